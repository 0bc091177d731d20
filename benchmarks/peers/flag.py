"""What most people write: a flag that says that one leads, set once and believed from then on."""

from __future__ import annotations


class Flag:
    leads = False

    def believes(self) -> bool:
        return self.leads

    def check(self) -> bool:
        return self.leads

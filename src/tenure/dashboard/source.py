"""Where the dashboard reads: the settings of a registry, checked once, for as many connections as are needed."""

from __future__ import annotations

import threading
import time
from typing import Any

from tenure import Registry, reports
from tenure.settings import Password, node_settings

EXAMINED_FOR_S = 60.0
"""How long what the doctor found is shown before it examines again."""


class Source:
    """The database and the namespace that a dashboard shows."""

    def __init__(self, url: str | None, namespace: str | None, schema: str, password: Password | None) -> None:
        self._settings = node_settings(url, password=password, name="dashboard", namespace=namespace, schema=schema)
        self._examining = threading.Lock()
        self._found: list[Any] = []
        self._examined = -EXAMINED_FOR_S

    @property
    def namespace(self) -> str:
        """The name of the namespace, as the pages show it."""
        return self._settings.namespace

    def registry(self) -> Registry:
        """Return a registry that is not connected yet."""
        settings = self._settings
        return Registry(settings.url, namespace=settings.namespace, schema=settings.schema, password=settings.password)

    def findings(self) -> tuple[list[Any], float]:
        """Return what the doctor found, and how many seconds ago. It examines at most once a minute."""
        with self._examining:
            if time.monotonic() - self._examined >= EXAMINED_FOR_S:
                self._found = reports.findings(self._settings)
                self._examined = time.monotonic()
            return self._found, time.monotonic() - self._examined

"""What the programs beside the tests (torture, exploration, benchmarks) have in common: numbers, and how they end."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable
from typing import Any


def at_least(low: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return what makes a number of an argument, or says what it must be."""

    def convert(text: str) -> Any:
        wanted = argparse.ArgumentTypeError(f"{text!r} must be a {'whole ' * (kind is int)}number from {low:g} on")
        try:
            number = kind(text)
        except ValueError:
            raise wanted from None
        if not math.isfinite(number) or number < low:
            raise wanted
        return number

    return convert


def run(main: Callable[[], int], name: str) -> None:
    """Run a program: a signal ends it with what it has started, and with one line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        sys.exit(130)

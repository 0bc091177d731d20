"""What the fuzz tests share: how many examples, and what no message may say.

The ordinary suite runs a few dozen examples of each, the same ones every time. More, and others each time:

    make test ARGS="tests/api/test_fuzz_settings.py tests/store/test_fuzz_rows.py --timeout 0" FUZZ=10000

A failure prints the smallest example that fails; put it into a test of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tenure import TenureError
from tests.support.secrets import PIECE, _told_by

LONGEST_MESSAGE = 2000


def fuzzed(examples: int) -> Callable[[Any], Any]:
    """So many examples, or FUZZ."""
    more = os.environ.get("FUZZ")
    return settings(
        max_examples=int(more or examples),
        derandomize=more is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def only_our_errors(kind: type[TenureError] = TenureError) -> Iterator[list[TenureError]]:
    """Nothing but an error of ours comes out of the block; it says something, not too much, and no secret."""
    caught: list[TenureError] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    for one in caught:
        assert 10 < len(str(one)) < LONGEST_MESSAGE, str(one)
        for text in _told_by(one):
            assert PIECE not in text


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
"""Whatever Python calls text: control characters and lone surrogates, too."""

JUNK = st.one_of(
    ANY_TEXT,
    st.integers(),
    st.sampled_from([2**63, -(2**63) - 1, 10**400]),
    st.sampled_from([1, -1]).map(lambda sign: sign * 10**5000),  # too long to be written
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.just(object()),
)
"""What a caller may give by mistake."""

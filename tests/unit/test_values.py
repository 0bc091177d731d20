"""Tenure's own data classes behave as those of ``dataclasses`` do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import typing

import pytest

from tenure import values


def classes(module):
    """Return the same classes, made by a module."""

    @module.dataclass(frozen=True)
    class Base:
        """A value."""

        name: str
        many: list[int] = module.field(default_factory=list, hash=False)
        number: int = 3
        note: str = module.field(default="", compare=False)
        secret: str | None = module.field(default=None, repr=False)

    @module.dataclass(frozen=True)
    class Longer(Base):
        """One with another field."""

        number: int = 4
        last: float = 0.5

    class Plain(Base):
        """One without."""

    @module.dataclass
    class Changing:
        """One that can be changed."""

        name: str
        number: int = 0

    @module.dataclass(frozen=True)
    class Empty:
        """One without a field."""

    return Base, Longer, Plain, Changing, Empty


OURS, THEIRS = classes(values), classes(dataclasses)
PAIRS = list(zip(OURS, THEIRS, strict=True))


def each(make):
    """Return what a function makes of a value of each class, in both ways."""
    for ours, theirs in PAIRS:
        arguments = ("me",) if inspect.signature(theirs).parameters else ()
        yield make(ours(*arguments)), make(theirs(*arguments))


@pytest.mark.parametrize(
    "make",
    [
        repr,
        vars,
        dataclasses.asdict,
        dataclasses.astuple,
        lambda value: [(field.name, field.type, field.repr, field.compare) for field in dataclasses.fields(value)],
        lambda value: type(value).__match_args__,
        lambda value: inspect.signature(type(value)),
        lambda value: typing.get_type_hints(type(value).__init__),
        lambda value: type(value).__dataclass_params__,
        lambda value: type(value).__hash__ is None,
        lambda value: vars(copy.deepcopy(value)),
        lambda value: value == copy.copy(value),
        lambda value: value == object(),
    ],
)
def test_a_value_is_as_one_of_dataclasses(make):
    for ours, theirs in each(make):
        assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("kind", [OURS, THEIRS], ids=["ours", "theirs"])
def test_equality_hash_and_replacement(kind):
    base, longer, plain, *_ = kind
    assert base("me", note="x") == base("me", note="y") != base("you")
    assert hash(base("me", [1])) == hash(base("me", [2]))
    assert base("me") != plain("me") != longer("me")
    assert {plain("me"), plain("me"), plain("you")} == {plain("you"), plain("me")}
    assert base("me", [1]).many is not base("me").many
    replaced = dataclasses.replace(longer("me", secret="hush"), last=1.0)
    assert (type(replaced), replaced.name, replaced.secret, replaced.last) == (longer, "me", "hush", 1.0)


@pytest.mark.parametrize("kind", [OURS, THEIRS], ids=["ours", "theirs"])
def test_a_frozen_value_stays_as_it_is(kind):
    value = kind[0]("me")
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.name = "you"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.name
    changing = kind[3]("me")
    changing.name = "you"
    assert changing == kind[3]("you")


@pytest.mark.parametrize("arguments", [(), ("me", [], 3, "", None, 0.5, "too many")])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(TypeError, match="__init__"):
        OURS[1](*arguments)


def test_a_class_of_dataclasses_can_be_derived():
    @dataclasses.dataclass(frozen=True)
    class Derived(OURS[0]):
        """A subclass that an application makes."""

        more: int = 7

    assert Derived("me") == Derived("me", more=7)
    assert [field.name for field in dataclasses.fields(Derived)][-2:] == ["secret", "more"]


def test_public_values_can_be_pickled():
    import tenure

    event = tenure.Deposed("role", 7, "resigned")
    assert pickle.loads(pickle.dumps(event)) == event


def test_a_node_on_sqlite_needs_no_dataclasses():
    """They load `inspect` and more, a third of what a node on SQLite imports."""
    program = "import sys, tenure.node, tenure.databases.sqlite.backend; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"dataclasses", "inspect", "uuid", "secrets", "hashlib", "asyncio"}.intersection(loaded)

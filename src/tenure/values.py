"""Data classes that cost next to nothing at import.

``dataclasses.dataclass`` writes and compiles the methods of a class when the class is defined. A node has sixty such
classes: they took half of the time in which Tenure's modules are imported. Here ``__init__`` is compiled when a class
is first used, and all classes share the other methods.

They count as data classes for everyone else: ``fields()``, ``replace()`` and ``asdict()`` of ``dataclasses``, pattern
matching, pickling and type checkers. What Tenure does not use is missing, such as ``__post_init__`` and slots.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any


class _Missing:
    """Stands for an argument that was not given. In a signature it is shown as ``dataclasses`` shows it."""

    def __repr__(self) -> str:
        return "<factory>"


_MISSING = _Missing()


class _Field:
    """Stands in a class for the options of one field, which have the names of ``dataclasses.field()``."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class _Init:
    """Compiles the ``__init__`` of a class when it is first looked up, which then takes this one's place."""

    def __init__(self, cls: Any, *, frozen: bool) -> None:
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: object, _: object) -> Any:
        init = self._cls.__init__ = _compiled(self._cls, frozen=self._frozen)
        return init if instance is None else init.__get__(instance)


class _Description:
    """What ``dataclasses`` notes in a class, made when it is first looked up."""

    def __init__(self, cls: Any, name: str, *, frozen: bool, eq: bool) -> None:
        self._cls = cls
        self._name = name
        self._frozen = frozen
        self._eq = eq

    def __get__(self, _: object, __: object) -> Any:
        import dataclasses  # noqa: PLC0415 - whoever asks for it has imported it

        fields = [(name, hint, dataclasses.field(**options)) for name, (hint, options) in self._cls.__values__.items()]
        twin = dataclasses.make_dataclass("Twin", fields, frozen=self._frozen, eq=self._eq)
        description = getattr(twin, self._name)
        setattr(self._cls, self._name, description)
        return description


def _compiled(cls: Any, *, frozen: bool) -> Any:
    """Return the ``__init__`` of a class."""
    given: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": _MISSING}
    parameters, body = ["self"], ["  pass"]
    for name, (_, options) in cls.__values__.items():
        value = name
        if "default_factory" in options:
            given[f"_make_{name}"] = options["default_factory"]
            parameters.append(f"{name}=_MISSING")
            value = f"_make_{name}() if {name} is _MISSING else {name}"
        elif "default" in options:
            given[f"_default_{name}"] = options["default"]
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        body.append(f"  _set(self, {name!r}, {value})" if frozen else f"  self.{name} = {value}")
    lines = [f"def make({', '.join(given)}):", f" def __init__({', '.join(parameters)}):", *body, " return __init__"]
    made: dict[str, Any] = {}
    # In the module of the class, so that its type hints resolve.
    exec("\n".join(lines), sys.modules[cls.__module__].__dict__, made)  # noqa: S102 - as dataclasses does
    init = made["make"](**given)
    init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**{name: hint for name, (hint, _) in cls.__values__.items()}, "return": None}
    return init


def _repr(self: Any) -> str:
    shown = (name for name, (_, options) in self.__values__.items() if options.get("repr", True))
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _eq(self: Any, other: Any) -> Any:
    return self.__compared__(self) == self.__compared__(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self.__hashed__(self))


def _refuse(self: Any, name: str, *_: object) -> None:
    from dataclasses import FrozenInstanceError  # noqa: PLC0415 - only after a programmer's mistake

    raise FrozenInstanceError(f"{type(self).__name__} is frozen: {name!r} can be neither set nor deleted")


def _replace(self: Any, /, **changes: Any) -> Any:
    """Return a copy of a value in which some fields differ."""
    return type(self)(**{name: getattr(self, name) for name in self.__values__} | changes)


def _getter(names: list[str]) -> Any:
    return attrgetter(*names) if names else staticmethod(lambda _: ())


def _dataclass(cls: Any = None, /, *, frozen: bool = False, eq: bool = True) -> Any:
    """Make a class a data class."""
    if cls is None:
        return lambda cls: _dataclass(cls, frozen=frozen, eq=eq)
    values: dict[str, tuple[Any, dict[str, Any]]] = {}
    for base in reversed(cls.__mro__[1:]):
        values |= base.__dict__.get("__values__", {})
    for name, hint in cls.__annotations__.items():
        given = cls.__dict__.get(name, _MISSING)
        options = given.options if isinstance(given, _Field) else {} if given is _MISSING else {"default": given}
        values[name] = hint, options
        if "default" in options:
            setattr(cls, name, options["default"])
        elif isinstance(given, _Field):
            delattr(cls, name)
    cls.__values__ = values
    setattr(cls, "__match_args__", tuple(values))  # noqa: B010 - mypy knows this name, and refuses it
    cls.__init__ = _Init(cls, frozen=frozen)
    for name in ("__dataclass_fields__", "__dataclass_params__"):
        setattr(cls, name, _Description(cls, name, frozen=frozen, eq=eq))
    cls.__repr__, cls.__replace__ = _repr, _replace
    if frozen:
        cls.__setattr__ = cls.__delattr__ = _refuse
    if eq:
        compared = [name for name, (_, options) in values.items() if options.get("compare", True)]
        cls.__compared__ = _getter(compared)
        cls.__hashed__ = _getter([name for name in compared if values[name][1].get("hash", True)])
        cls.__eq__, cls.__hash__ = _eq, _hash if frozen else None
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    dataclass, field, replace = _dataclass, _Field, _replace

__all__ = ["dataclass", "field", "replace"]

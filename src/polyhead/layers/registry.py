"""Values of several kinds as plain dictionaries: a family of dataclasses, each found again by the name of its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from polyhead.errors import OptionError

T = TypeVar("T")
Member = TypeVar("Member", bound=type)


class Registry(Generic[T]):
    """The dataclasses of one family by `kind`, and their way to dictionaries and back.

    A field that holds None or a value of another family names that family: `field(metadata={"kinds": family})`.

    >>> engines = Registry[Any]("an engine")
    >>> @engines.register("electric")
    ... @dataclasses.dataclass(frozen=True)
    ... class Electric:
    ...     volts: int = 400
    >>> engines.to_dict(Electric())
    {'kind': 'electric', 'volts': 400}
    >>> engines.from_dict({"kind": "electric", "amperes": 3})
    Traceback (most recent call last):
    polyhead.errors.OptionError: an engine of kind 'electric' has no field amperes; its fields are volts
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun  # with its article, as the errors need it: "an engine"
        self._classes: dict[str, type] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def register(self, kind: str) -> Callable[[Member], Member]:
        """A decorator that enters a dataclass under the name of its kind."""

        def enter(member: Member) -> Member:
            if self._classes.get(kind, member) is not member:
                raise OptionError(
                    f"{self.noun} of kind {kind!r} is {self._classes[kind].__name__} already, "
                    f"got {member.__name__}; give it another name"
                )
            self._classes[kind] = member
            return member

        return enter

    def kind_of(self, value: object) -> str:
        for kind, member in self._classes.items():
            if type(value) is member:
                return kind
        raise OptionError(
            f"{self.noun} is one of {', '.join(x.__name__ for x in self._classes.values())}; "
            f"got {type(value).__name__}, which was never registered"
        )

    def to_dict(self, value: T) -> dict[str, Any]:
        """`kind` and every field, those of nested values as dictionaries of their own."""
        found: dict[str, Any] = {"kind": self.kind_of(value)}
        for field in dataclasses.fields(cast(Any, value)):
            held = getattr(value, field.name)
            family = field.metadata.get("kinds")
            found[field.name] = held if held is None or family is None else family.to_dict(held)
        return found

    def from_dict(self, found: Mapping[str, Any]) -> T:
        """The value that `to_dict` describes; fields that are left out have their defaults."""
        if not isinstance(found, Mapping) or "kind" not in found:
            known = f"kind is one of {', '.join(self.names)}"
            raise OptionError(f"{self.noun} is described by a dictionary with its kind, got {found!r}; {known}")
        kind = found["kind"]
        member = self._classes.get(kind) if isinstance(kind, str) else None
        if member is None:
            raise OptionError(f"{self.noun} is of kind {', '.join(self.names)}; got {kind!r}")
        fields = {field.name: field for field in dataclasses.fields(member)}
        unknown = [name for name in found if name not in fields and name != "kind"]
        if unknown:
            raise OptionError(
                f"{self.noun} of kind {kind!r} has no field {', '.join(map(str, unknown))}; "
                f"its fields are {', '.join(fields)}"
            )
        needed = [name for name, field in fields.items() if _is_required(field) and name not in found]
        if needed:
            raise OptionError(f"{self.noun} of kind {kind!r} needs {', '.join(needed)}, got {found!r}")
        values = {}
        for name, value in found.items():
            family = None if name == "kind" else fields[name].metadata.get("kinds")
            if name != "kind":
                values[name] = value if value is None or family is None else family.from_dict(value)
        return cast(T, member(**values))


def check_flags(value: object) -> None:
    """Refuse what is not a boolean in the fields that are: a "false" read from a file would be true."""
    for field in dataclasses.fields(cast(Any, value)):
        held = getattr(value, field.name)
        optional = field.type == "bool | None" and held is None
        if field.type in ("bool", "bool | None") and not (isinstance(held, bool) or optional):
            raise OptionError(f"{field.name} must be True or False, got {held!r}")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING

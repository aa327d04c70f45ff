"""Registries of dataclasses that are serialised as dictionaries with a `kind`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from polyhead.errors import OptionError

T = TypeVar("T")
Member = TypeVar("Member", bound=type)


class Registry(Generic[T]):
    """Dataclasses of one family by `kind`, with conversion to and from dictionaries.

    A field that holds None or a dataclass of another registry must name it: `field(metadata={"kinds": registry})`. A
    dataclass can be registered as the description of another class, as a config is of a layer; that class is then
    stored on the dataclass, under the name passed as `attribute` (`layer` for configs).

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

    def __init__(self, noun: str, attribute: str = "described") -> None:
        self.noun = noun  # with its article, for error messages: "an engine"
        self.attribute = attribute
        self._classes: dict[str, type] = {}
        self._descriptions: dict[type, Any] = {}  # by the class that they describe

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def register(self, kind: str, described: type | None = None) -> Callable[[Member], Member]:
        """Return a decorator that registers a dataclass as `kind`, and as the description of a class."""

        def decorate(member: Member) -> Member:
            if self._classes.get(kind, member) is not member:
                raise OptionError(
                    f"{self.noun} of kind {kind!r} is already registered as {self._classes[kind].__name__}, "
                    f"got {member.__name__}; choose another name"
                )
            self._classes[kind] = member
            if described is not None:
                setattr(member, self.attribute, described)
                self._descriptions[described] = member
            return member

        return decorate

    def describe(self, value: object) -> T:
        """Return the description of an object, made by the `of` method of the dataclass registered for its class."""
        description = self._descriptions.get(type(value))
        if description is None:
            raise OptionError(
                f"{self.noun} describes one of {', '.join(x.__name__ for x in self._descriptions)}; "
                f"got {type(value).__name__}; register a dataclass that describes it"
            )
        return cast(T, description.of(value))

    def describe_like(self, described: type, base: type) -> None:
        """Let objects of a class be described by the dataclass that is registered for another one."""
        self._descriptions[described] = self._descriptions[base]

    def kind_of(self, value: object) -> str:
        for kind, member in self._classes.items():
            if type(value) is member:
                return kind
        raise OptionError(
            f"{self.noun} must be one of {', '.join(x.__name__ for x in self._classes.values())}; "
            f"got {type(value).__name__}, which is not registered"
        )

    def to_dict(self, value: T) -> dict[str, Any]:
        """Return `kind` and every field; nested values become dictionaries."""
        data: dict[str, Any] = {"kind": self.kind_of(value)}
        for field in dataclasses.fields(cast(Any, value)):
            field_value = getattr(value, field.name)
            registry = field.metadata.get("kinds")
            data[field.name] = field_value if field_value is None or registry is None else registry.to_dict(field_value)
        return data

    def from_dict(self, data: Mapping[str, Any]) -> T:
        """Return the value described by `to_dict`; missing fields take their defaults."""
        if not isinstance(data, Mapping) or "kind" not in data:
            known = f"kind is one of {', '.join(self.names)}"
            raise OptionError(f"{self.noun} must be a dictionary with a kind, got {data!r}; {known}")
        kind, values = data["kind"], {name: value for name, value in data.items() if name != "kind"}
        member = self._classes.get(kind) if isinstance(kind, str) else None
        if member is None:
            raise OptionError(f"the kind of {self.noun} must be one of {', '.join(self.names)}; got {kind!r}")
        fields = {field.name: field for field in dataclasses.fields(member)}
        unknown = [name for name in values if name not in fields]
        if unknown:
            raise OptionError(
                f"{self.noun} of kind {kind!r} has no field {', '.join(map(str, unknown))}; "
                f"its fields are {', '.join(fields)}"
            )
        missing = [name for name, field in fields.items() if _is_required(field) and name not in values]
        if missing:
            raise OptionError(f"{self.noun} of kind {kind!r} needs {', '.join(missing)}, got {data!r}")
        for name, value in values.items():
            registry = fields[name].metadata.get("kinds")
            if registry is not None and value is not None:
                values[name] = registry.from_dict(value)
        return cast(T, member(**values))


def check_flags(value: object) -> None:
    """Raise unless boolean fields hold booleans: a "false" read from a file would be truthy."""
    for field in dataclasses.fields(cast(Any, value)):
        field_value = getattr(value, field.name)
        optional = field.type == "bool | None" and field_value is None
        if field.type in ("bool", "bool | None") and not (isinstance(field_value, bool) or optional):
            raise OptionError(f"{field.name} must be True or False, got {field_value!r}")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING

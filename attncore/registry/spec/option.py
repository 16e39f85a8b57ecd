"""Option: one option that a backend takes when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attncore.quoted import quoted
from attncore.registry.spec.plain_values import collection, plain_scalar, text


@dataclass(frozen=True, slots=True)
class Option:
    """One option that a backend takes in ``Choice.create(options={...})``.

    ``type`` is bool, int, float or str; ``choices``, where given, are all the values allowed; ``default`` is None or an
    allowed value. A float is a finite number: reports are JSON, which has no other.

    Type and choices are all that is checked by attncore: in the negotiation (a reason), by ``Choice.create`` and by
    ``AttentionBackend.__init__`` (ValueError). A range, or what depends on something else, is checked by the vendor:
    in the backend's ``__init__``, and in the spec's ``check`` too where the negotiation is to know of it.
    """

    type: type
    help: str
    default: bool | int | float | str | None = None
    choices: tuple[bool | int | float | str, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.type is kind for kind in (bool, int, float, str)):
            raise ValueError(f"type: {quoted(self.type)} is not bool, int, float or str")
        given = collection("choices", self.choices, "not a collection of values")
        choices = tuple(plain_scalar("choices", one) for one in given)
        default = plain_scalar("default", self.default)
        for value in choices:
            if wrong := _wrong_type(self.type, value):
                raise ValueError(f"choices: {quoted(value)} {wrong}")
        if default is not None and (wrong := _wrong_type(self.type, default) or _no_choice(choices, default)):
            raise ValueError(f"default: {quoted(default)} {wrong}")
        for name, plain in (
            ("choices", choices),
            ("default", default),
            ("help", text("help", self.help, "not a text")),
        ):
            object.__setattr__(self, name, plain)

    def problem(self, value: object) -> str | None:
        """What is wrong with ``value``, as the end of a sentence; None where it is allowed."""
        return _wrong_type(self.type, value) or _no_choice(self.choices, value)


def _wrong_type(kind: type, value: object) -> str | None:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (kind is not bool and isinstance(value, bool)):
        return f"is not {'an' if kind is int else 'a'} {kind.__name__}"
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    return None


def _no_choice(choices: tuple[object, ...], value: object) -> str | None:
    return f"is not one of {', '.join(map(quoted, choices))}" if choices and value not in choices else None

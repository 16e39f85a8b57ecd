"""Option: one option that a backend takes when it is created."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One option that a backend takes in ``Choice.create(options={...})``.

    ``type`` is bool, int, float or str; ``choices``, where given, are all the values allowed; ``default`` is None or an
    allowed value.
    """

    type: type
    help: str
    default: bool | int | float | str | None = None
    choices: tuple[bool | int | float | str, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in (bool, int, float, str):
            raise ValueError(f"type: {self.type!r} is not bool, int, float or str")
        for value in (*self.choices, *(() if self.default is None else (self.default,))):
            if wrong := self.problem(value):
                raise ValueError(f"choices: {value!r} {wrong}")

    def problem(self, value: object) -> str | None:
        """What is wrong with ``value``, as the end of a sentence; None where it is allowed."""
        fits = isinstance(value, (int, float) if self.type is float else self.type)
        if not fits or (self.type is not bool and isinstance(value, bool)):
            return f"is not {'an' if self.type is int else 'a'} {self.type.__name__}"
        if self.choices and value not in self.choices:
            return f"is not one of {', '.join(map(repr, self.choices))}"
        return None

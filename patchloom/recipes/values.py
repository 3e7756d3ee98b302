"""Parsing values of recipe fields from text and Python by the field's type; errors name the dotted key."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from patchloom_runtime.errors import UsageError, nearest

OptionValue = bool | int | float | str | None | tuple[bool | int | float | str | None, ...]


@dataclass(frozen=True)
class NumberRange:
    """The numbers that a field accepts."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is excluded

    def __contains__(self, value: float) -> bool:
        above_low = value > self.low if self.above else value >= self.low
        return above_low and value <= self.high and abs(value) < math.inf

    def __str__(self) -> str:
        if math.isinf(self.high):
            return "" if math.isinf(self.low) else f" {'above' if self.above else 'of at least'} {self.low:g}"
        return f" {'above' if self.above else 'from'} {self.low:g} {'up ' if self.above else ''}to {self.high:g}"


Probability = Annotated[float, NumberRange(0, 1)]
NotNegative = Annotated[float, NumberRange(0)]
Positive = Annotated[float, NumberRange(0, above=True)]
Count = Annotated[int, NumberRange(1)]
CountOrZero = Annotated[int, NumberRange(0)]


class Options(Mapping[str, OptionValue]):
    """Further constructor options of a network: a read-only mapping of names to plain values."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = {name: _plain_value(f"model.options.{name}", v) for name, v in (values or {}).items()}

    def __getitem__(self, name: str) -> OptionValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Options({self._values!r})"


def _refuse_value(key: str, value: Any, expected: str, hint: str = "") -> NoReturn:
    raise UsageError(f"{key} is {value!r}, expected {expected}.{hint}")


def read_value(key: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`. Raise UsageError naming `key` if that fails."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else _refuse_value(key, value, f"a {hint.__name__}")
    if get_origin(hint) in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
            return None
        (hint,) = (h for h in get_args(hint) if h is not types.NoneType)
    allowed = NumberRange()
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    if get_origin(hint) is Literal:
        return _read_choice(key, value, get_args(hint))
    if get_origin(hint) is tuple:
        return _read_sequence(key, value, get_args(hint))
    if hint is bool:
        return _read_switch(key, value)
    if hint in (int, float):
        return _read_number(key, value, hint, allowed)
    if hint is str:
        return value if _is_line(value) and value else _refuse_value(key, value, "a line of text")
    return value if isinstance(value, Options) else _read_options(key, value)


def _read_choice(key: str, value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    _refuse_value(key, value, f"one of {', '.join(choices)}", nearest(str(value), choices))


def _read_sequence(key: str, value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = _strip_brackets(value)
        value = [] if value.lower() in ("", "none") else value.split(",")
    if not isinstance(value, list | tuple):
        _refuse_value(key, value, "values separated by commas")
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        _refuse_value(key, value, f"{len(hints)} values")
    return tuple(read_value(key, v, hint) for v, hint in zip(value, hints, strict=True))


def _read_switch(key: str, value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    return value if isinstance(value, bool) else _refuse_value(key, value, "true or false")


def _read_number(key: str, value: Any, kind: type[int] | type[float], allowed: NumberRange) -> int | float:
    number = _number_in(value) if isinstance(value, str) else value
    if kind is int and isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and number.bit_length() > 64:  # cannot be computed with or displayed
        raise UsageError(f"{key} is a whole number of {number.bit_length():,} bits, expected a number{allowed}.")
    wanted = int if kind is int else (int, float)
    if isinstance(number, bool) or not isinstance(number, wanted) or number not in allowed:
        _refuse_value(key, value, f"a {'whole ' if kind is int else ''}number{allowed}")
    return kind(number)


def _read_options(key: str, value: Any) -> Options:
    if not isinstance(value, Mapping):
        _refuse_value(key, value, "names with values")
    for name in value:
        if not (isinstance(name, str) and name.isidentifier()):
            _refuse_value(key, name, "names that can be keywords of a constructor")
    return Options(value)


def _plain_value(key: str, value: Any) -> OptionValue:
    """Parse an option, which has no declared type: text that looks like a number, a switch or none becomes one."""
    if isinstance(value, str) and (inner := _strip_brackets(value)) != value.strip():
        value = inner.split(",") if inner else ()
    elif isinstance(value, str) and "," in value:
        value = value.split(",")
    if isinstance(value, list | tuple):
        return tuple(_plain_scalar(key, v) for v in value)
    return _plain_scalar(key, value)


def _strip_brackets(text: str) -> str:  # [1, 2] and (1, 2) → 1, 2
    text = text.strip()
    return text[1:-1].strip() if text[:1] + text[-1:] in ("[]", "()") else text


def _plain_scalar(key: str, value: Any) -> bool | int | float | str | None:
    if isinstance(value, str):
        text = value.strip()
        words: dict[str, bool | None] = {"none": None, "true": True, "false": False}
        if text.lower() in words:
            return words[text.lower()]
        number = _number_in(text)
        value = text if number is None else number
    if value is None or isinstance(value, bool | int) or _is_line(value):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    _refuse_value(key, value, "a finite number, a line of text, true, false, none, or a list of these")


def _is_line(value: Any) -> bool:
    """Return whether text survives YAML unchanged: no line breaks, no control characters."""

    return isinstance(value, str) and value.isprintable()


def _number_in(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None

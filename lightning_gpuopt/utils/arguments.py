"""The checks of what users pass to the callbacks; every refusal reads ``name: expected ..., got ...``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Literal, NoReturn, TypeVar

import numpy as np

_T = TypeVar("_T")
_R = TypeVar("_R")


class ArgumentTypeError(TypeError, ValueError):
    """An argument is of a wrong type; whoever catches bad values catches it too."""


def refuse(name: str, expected: str, value: object, *, wrong_type: bool = False) -> NoReturn:
    """Raise a ValueError for an argument, in the words that all share; with ``wrong_type`` it is a TypeError too."""
    raise (ArgumentTypeError if wrong_type else ValueError)(f"{name}: expected {expected}, got {value!r}")


def whole_number(name: str, value: object, what: str, *, least: int, or_none: bool = False) -> int:
    """An integer, numpy's included, as Python's; else ValueError. ``or_none`` changes the text alone."""
    expected = f"{what}, at least {least}" + ", or None" * or_none
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(name, expected, value, wrong_type=True)
    if value < least:
        refuse(name, expected, value)
    return int(value)


def real_number(
    name: str,
    value: object,
    what: str,
    *,
    above: float | None = None,
    least: float | None = None,
    at_most: float | None = None,
    or_none: bool = False,
) -> float:
    """A finite number larger than ``above``, numpy's included, as Python's float; else ValueError.

    ``what`` names the unit; ``or_none`` changes the text alone.
    """
    expected = what
    expected += "" if above is None else f" above {above}"
    expected += "" if least is None else f", at least {least}"
    expected += "" if at_most is None else f" and at most {at_most}"
    expected += ", or None" * or_none
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(name, expected, value, wrong_type=True)
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds
        refuse(name, expected, value)
    if (
        not math.isfinite(number)
        or (above is not None and number <= above)
        or (least is not None and number < least)
        or (at_most is not None and number > at_most)
    ):
        refuse(name, expected, value)
    return number


def or_none(check: Callable[..., _R], name: str, value: object, what: str, **bounds: float) -> _R | None:
    """None as it is; anything else as ``check`` takes it, which says that None would do too."""
    return None if value is None else check(name, value, what, or_none=True, **bounds)


def or_auto(check: Callable[..., _R], name: str, value: object, *what: str, **bounds: float) -> _R | Literal["auto"]:
    return "auto" if value == "auto" else check(name, value, *what, **bounds)


def choice(name: str, value: _T, choices: Sequence[_T]) -> _T:
    if not isinstance(value, str) or value not in choices:
        refuse(name, f"one of {', '.join(map(repr, choices))}", value)
    return value


def flag(name: str, value: object) -> bool:
    """True or False, numpy's included, and nothing that is merely true or false in an ``if``; else ValueError."""
    if not isinstance(value, (bool, np.bool_)):
        refuse(name, "True or False", value, wrong_type=True)
    return bool(value)


def function(name: str, value: Callable[..., _R] | None) -> Callable[..., _R] | None:
    if value is not None and not callable(value):
        refuse(name, "a function, or None", value, wrong_type=True)
    return value


def number_range(name: str, value: object, what: str, *, at_most: float | None = None) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        refuse(name, f"two {what}, the smaller first", value)
    low, high = (real_number(name, each, what, above=0, at_most=at_most) for each in value)
    if low > high:
        refuse(name, f"two {what}, the smaller first", value)
    return low, high

"""Readings of a counter: a reading less an earlier one is what happened in between."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class Summed:
    """Readings of one counter, field by field: numbers, and mappings of names to numbers."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """Both stretches together."""
        return self._with(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        """What came after ``earlier``, which is an earlier reading of the same counter."""
        return self._with(earlier, -1)

    def _with(self, other: Self, sign: int) -> Self:
        values = []
        for name in self.__match_args__:  # type: ignore[attr-defined]
            first, second = getattr(self, name), getattr(other, name)
            values.append(added(first, second, sign) if isinstance(first, dict) else first + sign * second)
        return type(self)(*values)


def added(first: dict[Any, Any], second: dict[Any, Any], sign: int = 1) -> dict[Any, Any]:
    """The sum of two mappings of names to numbers, name by name; with ``sign=-1`` their difference."""
    total = {name: value + sign * second.get(name, 0) for name, value in first.items()}
    if second.keys() - total.keys():
        total |= {name: sign * value for name, value in second.items() if name not in total}
    return total

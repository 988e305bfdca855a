"""Readings of a counter: a reading less an earlier one is what happened in between."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self


class Summed:
    """Readings of one counter, field by field: numbers, mappings of names to numbers, and other counters.

    A field that is none of these, or that ``None`` stands for in one reading, is as it is in the first.
    """

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return self._with(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        """What came after ``earlier``, which is an earlier reading of the same counter."""
        return self._with(earlier, -1)

    def _with(self, other: Self, sign: int) -> Self:
        values = []
        for name in self.__match_args__:  # type: ignore[attr-defined]
            first, second = getattr(self, name), getattr(other, name)
            if isinstance(first, dict):
                first = added(first, second, sign)
            elif isinstance(first, Summed) and second is not None:
                first = first._with(second, sign)
            elif isinstance(first, (int, float)) and second is not None:
                first += sign * second
            values.append(first)
        return type(self)(*values)


def added(first: dict[Any, Any], second: dict[Any, Any], sign: int = 1) -> dict[Any, Any]:
    """The sum of two mappings of names to numbers, name by name; with ``sign=-1`` their difference."""
    total = {name: value + sign * second.get(name, 0) for name, value in first.items()}
    if second.keys() - total.keys():
        total |= {name: sign * value for name, value in second.items() if name not in total}
    return total


def since(earlier: Any, now: Any) -> Any:
    """What came after an earlier reading, of counters by name, too; what is no counter, or was not there, is as now."""
    if isinstance(now, dict):
        return {name: since(earlier.get(name) if earlier else None, value) for name, value in now.items()}
    return now - earlier if isinstance(now, Summed) and earlier is not None else now

"""Events of a ring, as far as they are what they should be: its process may have been ended while it wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from lightning_gpuopt.measurements.flight import FlightRecord


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _are_batches(value: Any) -> bool:
    """Numbers by rank: a list of them, or a mapping, whose keys JSON has made texts."""
    if isinstance(value, Mapping):
        return all(str(each).isdecimal() for each in value) and _are_batches(list(value.values()))
    return _is_list(value) and all(each is None or _is_number(each) for each in value)


_KNOWN: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("worker", "pid", "signal", "code"), _is_number),
    **dict.fromkeys(("type", "message", "where", "loader"), _is_text),
    **dict.fromkeys(("frames", "indices", "entries"), _is_list),
    **{"index": lambda value: _is_number(value) or _is_text(value), "batches": _are_batches},
}


def checked(record: FlightRecord) -> FlightRecord:
    """The record without what its events have of wrong types: fewer facts, never an error."""
    events = tuple(_checked(each) for each in record.events if isinstance(each, Mapping) and _has_time(each))
    return replace(record, events=events)


def _has_time(event: Mapping[str, Any]) -> bool:
    at_s = event.get("t")
    return isinstance(at_s, (int, float)) and math.isfinite(at_s)


def _checked(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in _KNOWN or _KNOWN[name](value)}

"""The lanes of the tests, and parameters of which only a few are in the core lane."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations as pairs
from itertools import product
from typing import Any
from zlib import crc32

import pytest

LANES = ("timed", "example", "matrix", "gpu", "loaders", "engines")
"""The markers: a test has at most one of them, and none in the core lane."""


def is_of_part(test: str, part: str) -> bool:
    """Whether a test, by its id, is in a part of its lane, such as ``"2/4"``: each is in one of the four."""
    number, _, parts = part.partition("/")
    return crc32(test.encode()) % int(parts) == int(number) % int(parts)


def few(core: str, sets: Mapping[str, object]) -> list[Any]:
    """Sets of parameters for ``pytest.mark.parametrize``: a few in the core lane, the others in the matrix lane.

    Args:
        core: the ids of the few, with blanks between them.
        sets: by id, the value of a test's parameter; a tuple of them where it has several.
    """
    unknown = set(core.split()) - set(sets)
    if unknown:
        raise ValueError(f"no such parameters: {', '.join(sorted(unknown))}; there are {', '.join(sets)}")
    return [
        pytest.param(
            *(values if isinstance(values, tuple) else (values,)),
            id=name,
            marks=() if name in core.split() else pytest.mark.matrix,
        )
        for name, values in sets.items()
    ]


def combinations(core: str, **values: Any) -> pytest.MarkDecorator:
    """Run a test with combinations of its parameters' values, a few of them in the core lane.

    Each value is combined with each of every other parameter: what three of them do together, no test has shown yet.

    Args:
        core: the ids of the few, such as ``"True-plan0"``, with blanks between them. An id is made of one part for each
            parameter: its name and the value's index, or the value itself where that is a number, a text or None.
        values: by the parameter's name, its values; a mapping gives them names.
    """
    parts = []
    for argument, given in values.items():
        named = (
            given.items()
            if isinstance(given, Mapping)
            else [(_part(argument, *each), each[1]) for each in enumerate(given)]
        )
        parts.append(list(named))
    sets = {"-".join(name for name, _ in each): tuple(value for _, value in each) for each in _pairwise(core, parts)}
    return pytest.mark.parametrize(tuple(values), few(core, sets))


def _pairwise(core: str, parts: list[list[tuple[str, Any]]]) -> list[tuple[tuple[str, Any], ...]]:
    """Those in the core lane, and so many others that each pair of two parameters' values is in one, in their order."""
    every = {tuple(name for name, _ in each): each for each in product(*parts)}

    def pairs_in(names: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
        return set(pairs(enumerate(names), min(2, len(names))))

    chosen = {names for names in every if "-".join(names) in core.split()}
    left = set().union(*map(pairs_in, every)) - set().union(*map(pairs_in, chosen))
    while left:
        best = max(every, key=lambda names: len(pairs_in(names) & left))
        chosen.add(best)
        left -= pairs_in(best)
    return [each for names, each in every.items() if names in chosen]


def _part(argument: str, index: int, value: object) -> str:
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else f"{argument}{index}"

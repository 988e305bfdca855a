"""The process's random states, to see whether fetching a batch has drawn from them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The global random states of torch (on the host), numpy and Python, as they are now."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return (
            torch.equal(self._torch, other._torch)
            and self._python == other._python
            and _same(self._numpy, other._numpy)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Have these states again."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)
    return bool(np.array_equal(first, second))

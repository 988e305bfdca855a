"""The process's random states, to see whether fetching a batch has drawn from them."""

from __future__ import annotations

import random
from typing import Any, Final, Literal

import numpy as np
import torch

_SEEDED: Final = 624  # the position in a Mersenne Twister's key right after it was seeded


class RandomStates:
    """The global random states of torch (and a CUDA device's), numpy and Python; reading them takes some 65 µs."""

    __slots__ = ("_cuda", "_numpy", "_python", "_torch")

    def __init__(self, device: torch.device | None = None) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = _generator_of(device)
        self._numpy = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return (
            torch.equal(self._torch, other._torch)
            and (self._cuda is None or other._cuda is None or torch.equal(self._cuda[1], other._cuda[1]))
            and self._python == other._python
            and _same(self._numpy, other._numpy)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            self._cuda[0].set_state(self._cuda[1])
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def drawn_since_seeded() -> Literal["torch", "another"] | None:
    """The random state that a worker drew from since torch seeded it.

    Of NumPy's and Python's states the position is looked at: a draw of a multiple of 624 words is not seen.
    """
    seeded = torch.Generator().manual_seed(torch.initial_seed())
    if not torch.equal(torch.get_rng_state(), seeded.get_state()):
        return "torch"
    state: Any = np.random.get_state()
    positions = random.getstate()[1][-1], state[2] if isinstance(state, tuple) else _SEEDED
    return None if positions == (_SEEDED, _SEEDED) else "another"


def _generator_of(device: torch.device | None) -> tuple[torch.Generator, torch.Tensor] | None:
    """A CUDA device's generator and its state, which the host keeps."""
    generators = torch.cuda.default_generators
    if device is None or device.type != "cuda" or (device.index or 0) >= len(generators):
        return None
    generator = generators[device.index or 0]
    return generator, generator.get_state()


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)
    return bool(np.array_equal(first, second))

"""What is seen of a dataset's state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpuopt.tuning.dataset_state import state_of

MAPPED = """
import mmap, os, sys
import numpy as np
from lightning_gpuopt.tuning.dataset_state import state_of

path = sys.argv[1]
np.arange(1 << 16).tofile(path)
with open(path, "r+b") as file:
    plain = mmap.mmap(file.fileno(), 0)
mapped = np.memmap(path, dtype=np.int64, mode="r", shape=(256, 256))
held = [mapped, mapped[1:, ::2], np.frombuffer(plain, dtype=np.int64), np.asarray(mapped).T]
assert state_of(*held) == state_of(*held)
assert len({state_of(each).digest for each in held}) == 4
state = state_of(*held)
os.truncate(path, 0)  # whoever reads a page now is ended by SIGBUS
assert state_of(*held) == state
"""


def test_the_pages_of_a_memory_map_are_not_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAPPED, str(tmp_path / "large.bin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class Held:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held.inner[0]["deep"], name, value)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (lambda: Held(inner=[{"deep": Held(extra=1)}]), _set("extra", 2)),
        (lambda: Held(items=[1, 2]), lambda held: held.items.append(3)),
        (lambda: Held(items={"a": 1}), lambda held: held.items.update(a=2)),
        (lambda: Held(tensor=torch.zeros(3)), lambda held: held.tensor.add_(1)),
        (lambda: Held(array=np.zeros(3)), lambda held: held.array.__setitem__(1, 5.0)),
        (lambda: Held(rng=np.random.default_rng(0)), lambda held: held.rng.random()),
        (lambda: Held(rng=random.Random(0)), lambda held: held.rng.random()),
        (lambda: Held(rng=torch.Generator()), lambda held: torch.rand(1, generator=held.rng)),
        (lambda: Held(call=partial(print, [1])), lambda held: held.call.args[0].append(2)),
    ],
    ids=["deep", "list", "dict", "tensor", "array", "numpy", "random", "torch", "partial"],
)
def test_a_change_is_seen_and_none_is_none(held, change):
    root = held()
    before = state_of(root)
    assert state_of(root) == before
    change(root)
    assert state_of(root) != before


def test_a_circle_ends():
    root = Held()
    root.own = root
    assert state_of(root) == state_of(root)


def test_epochs_are_found_deep_inside():
    class Epochs:
        def set_epoch(self, epoch: int) -> None: ...

    assert state_of(Held(inner=[Epochs()])).has_epochs
    assert not state_of(Held(inner=[Held()])).has_epochs


def test_what_is_not_sent_to_a_worker_is_no_state():
    class Opens:
        def __init__(self) -> None:
            self.handle: Any = None

        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "handle": None}

    root = Opens()
    before = state_of(root)
    root.handle = object()
    assert state_of(root) == before


def test_of_much_a_part_is_looked_at_and_of_too_much_that_is_said():
    assert state_of(Held(paths=[f"/{number}" for number in range(1_000_000)])).is_whole
    assert not state_of([[Held() for _ in range(250)] for _ in range(200)]).is_whole


class Refuses:
    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle")


def _chain(length: int) -> Held:
    chain = Held()
    for _ in range(length):
        chain = Held(next=chain)
    return chain


def _empty_closure() -> Callable[[], Any]:
    def function() -> Any:
        return later

    if function is None:
        later = 1
    return function


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    "odd", [Refuses, lambda: _chain(5000), _empty_closure, _inference], ids=["state", "chain", "closure", "tensor"]
)
def test_what_cannot_be_looked_into_is_known_by_its_identity(odd: Callable[[], Any]) -> None:
    held = Held(odd=odd(), extra=1)
    before = state_of(held)
    assert state_of(held) == before
    assert not before.is_whole
    held.extra = 2
    assert state_of(held) != before


def test_an_array_that_is_not_contiguous_is_not_copied() -> None:
    held = Held(array=np.broadcast_to(np.float32(0), (1 << 20, 1 << 20)))  # four terabytes, were it copied
    assert state_of(held).is_whole


class Loads(Mapping[str, Any]):
    """Loads its values as they are asked for."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("read")

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("read")


def test_a_mapping_that_loads_is_not_read() -> None:
    assert state_of(Held(samples=Loads())).is_whole

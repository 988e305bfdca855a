"""Code that takes its time at a known line: marked with ``# here``, and named by what the report has to say of it."""

from __future__ import annotations

import ctypes
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

_C = ctypes.PyDLL(None)
"""The C library, called without letting go of the interpreter's lock."""

_IMAGE = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)).save(_IMAGE, "JPEG", quality=95)
_JSON = json.dumps([{"id": number, "text": "sample"} for number in range(9_000)])
_NUMBERS = np.random.default_rng(0).permutation(60_000).tolist()
_MATRIX = torch.randn(420, 420)
_SAMPLE = torch.ones(8)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:  # here: spin
        pass


def a_little() -> None:
    """What any sample takes besides: a sixth of it."""
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass


def sleeps() -> None:
    time.sleep(0.006)  # here: sleeps


def computes() -> None:
    end = time.thread_time() + 0.006
    while time.thread_time() < end:  # here: computes
        pass


def helps() -> None:
    spin(0.006)


def keeps_the_lock() -> None:
    _C.usleep(6_000)  # here: keeps_the_lock


def sorts() -> None:
    sorted(_NUMBERS)  # here: sorts


def parses() -> None:
    json.loads(_JSON)  # here: parses


def matches() -> None:
    re.match("(a|aa)+$", "a" * 25 + "b")  # here: matches


def decodes() -> None:
    Image.open(_IMAGE).convert("RGB")  # here: decodes


def multiplies() -> None:
    for _ in range(4):
        _MATRIX @ _MATRIX  # here: multiplies


def counts_in_numpy() -> None:
    np.unique(np.asarray(_NUMBERS))  # here: counts_in_numpy


def comprehends() -> None:
    [spin(0.001) for _ in range(6)]


@torch.no_grad()
def without_gradients() -> None:
    time.sleep(0.006)  # here: without_gradients


def makes_strings() -> None:
    [str(number) for number in range(60_000)]  # here: makes_strings


class Takes(Dataset[Any]):
    """Samples that take their time in one function."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        a_little()
        self.work()
        return _SAMPLE


class Quick(Takes):
    def __init__(self) -> None:
        super().__init__(a_little)


class Blur(torch.nn.Module):
    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        end = time.thread_time() + 0.005
        while time.thread_time() < end:  # here: Blur
            pass
        return sample


class Flip(torch.nn.Module):
    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return sample


class Brighten:
    """Calls a function for its work."""

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        spin(0.006)
        return sample


class Compose:
    """As the libraries' own."""

    def __init__(self, transforms: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Transformed(Dataset[Any]):
    """Samples that pass a transform."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(_SAMPLE)


class Batched(Quick):
    """Gathers a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.02)  # here: Batched
        return [_SAMPLE for _ in indices]


class Stream(IterableDataset[Any]):
    """Samples from a generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.006)  # here: Stream
            yield _SAMPLE


def collates(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.03)  # here: collates
    return torch.stack(samples)


class SlowHook(Callback):
    """Takes its time at the end of each batch."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def on_train_batch_end(self, *args: Any) -> None:
        a_little()
        self.work()


class SlowLogger(DummyLogger):
    """Takes its time in each call."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.012)  # here: SlowLogger

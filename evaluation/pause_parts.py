"""The pieces of faults that stop the host: garbage, and functions that torch.compile compiles again."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from lightning.pytorch import Callback

from evaluation.parts import Data, Model


class HasObjects:
    """A module that keeps so many ``objects``, as annotations in lists and dicts are: collections look through them.

    What was there before the fit is left out of collections, so that they take as long in every process.
    """

    objects = 0

    def on_fit_start(self) -> None:
        gc.collect()
        gc.freeze()
        self.lasting = [{"id": number, "box": [number]} for number in range(self.objects // 2)]

    def on_fit_end(self) -> None:
        gc.unfreeze()


def make_garbage(count: int) -> None:
    """Objects that are dropped again, in cycles, so that only the collector frees them."""
    for number in range(count):
        ring: list[Any] = [number]
        ring.append(ring)


class CollectsAfterEachStep(Callback):
    """Asks for a full collection, as advice on the Internet goes."""

    def on_train_batch_end(self, *args: Any) -> None:
        gc.collect()


class KeepsObjects(HasObjects, Model):
    """Keeps objects, and does nothing with them."""

    def __init__(self, *args: Any, objects: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objects = objects


class CollectsInTheStep(KeepsObjects):
    """Asks for a full collection in the step."""

    def work(self, batch: Any, batch_idx: int) -> None:
        gc.collect()


class MakesGarbage(KeepsObjects):
    """Makes objects that refer to each other, so many that the collector begins by itself."""

    def __init__(self, *args: Any, garbage: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.garbage = garbage

    def work(self, batch: Any, batch_idx: int) -> None:
        make_garbage(self.garbage)


class ReadsRecords(KeepsObjects):
    """Makes many objects that live until the next step, as parsing a batch's records does."""

    def __init__(self, *args: Any, records: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = records
        self.batches: list[Any] = []

    def work(self, batch: Any, batch_idx: int) -> None:
        self.batches = [*self.batches[-1:], [[[number], {"box": [number]}] for number in range(self.count)]]


class KeepsItsLosses(Model):
    """Keeps each loss with its graph, and goes through all of them in each step, from a step on."""

    def __init__(self, *args: Any, each_s: float, begin: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.each_s, self.begin = each_s, begin
        self.losses: list[torch.Tensor] = []

    def work(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.begin:
            self.losses.append(self.layer(batch).mean())
        time.sleep(self.each_s * len(self.losses))


class SlowsDownThenRecovers(Model):
    """Some steps take twice as long, for example since their sequences are longer: ``slow`` says which."""

    def __init__(self, *args: Any, slow: Any, more_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow, self.more_s = slow, more_s

    def work(self, batch: Any, batch_idx: int) -> None:
        if self.slow(batch_idx):
            time.sleep(self.more_s)


class GrowingCallback(Callback):
    """Takes longer at each step: it goes through what it has kept."""

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s
        self.history: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.history.append(0.0)
        pl_module.pause("callbacks", self.each_s * len(self.history))


class GrowingData(Data):
    """Samples that take longer the more of them were read, as from a disk that fills up."""

    def __init__(self, each_s: float) -> None:
        super().__init__()
        self.each_s = each_s

    def __getitem__(self, index: int) -> torch.Tensor:
        self.sleep_s += self.each_s
        return super().__getitem__(index)


def compiled_sum() -> Any:
    """A new function that torch.compile compiles for each size anew, and for each number."""

    def scaled_sum(values: torch.Tensor, number: int) -> torch.Tensor:
        return (values.sin() * number).sum()

    return torch.compile(scaled_sum, backend="aot_eager", dynamic=False)


class Compiles(Model):
    """Calls a compiled function on as many values as ``size`` says of a step, and with the number that ``number`` says.

    Up to 64 versions of it are compiled before torch gives it up.
    """

    def __init__(self, *args: Any, size: Any = lambda step: 8, number: Any = lambda step: 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size, self.number = size, number
        self.compiled = compiled_sum()

    def on_fit_start(self) -> None:
        torch._dynamo.config.cache_size_limit = 64

    def on_fit_end(self) -> None:
        torch._dynamo.config.cache_size_limit = 8

    def work(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.compiled(torch.ones(self.size(step)), self.number(step))


class CompilesForItsBatches(Model):
    """Calls a compiled function on each batch: the last one of an epoch is smaller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compiled = compiled_sum()

    def work(self, batch: Any, batch_idx: int) -> None:
        self.compiled(batch, 2)

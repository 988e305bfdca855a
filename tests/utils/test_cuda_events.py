"""Events that a forked process has inherited: torch's destructor would end it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import Dataset

from lightning_gpuopt import CudaPrefetcher, LMDBDataModule, StallDetector
from lightning_gpuopt.utils.cuda_events import new_event
from tests.fork_server import run_code
from tests.helpers import tiny_trainer
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work, simulated_gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """None comes before the one in the forked process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def collected_in_a_fork() -> int:
    """Collect garbage in a forked process, as a DataLoader's worker does sooner or later; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_cycle(event: Any) -> None:
    cycle: list[Any] = [event]
    cycle.append(cycle)


@pytest.mark.parametrize(("make", "code"), [(lambda: torch.cuda.Event(), -signal.SIGABRT), (new_event, 0)])  # type: ignore[no-untyped-call]
def test_garbage_with_an_event_ends_a_forked_process_unless_the_event_is_ours(
    gpu: SimulatedGpu, make: Callable[[], Any], code: int
) -> None:
    in_a_cycle(make())
    assert collected_in_a_fork() == code


def test_a_collection_that_comes_right_after_the_fork_destroys_none(gpu: SimulatedGpu) -> None:
    for least in range(0, 700, 50):
        gc.enable()
        gc.collect()
        gc.disable()
        in_a_cycle(new_event())
        held = [[] for _ in range(least)]  # the collector's counter
        gc.enable()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gc.disable()
        del held


_ENDS_AS_A_PROGRAM = """
import os, sys
from lightning_gpuopt.utils.cuda_events import new_event
from tests.simulators.gpu import simulated_gpu
with simulated_gpu():
    event = new_event()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_that_ends_as_a_program_destroys_none() -> None:
    done = run_code(_ENDS_AS_A_PROGRAM, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_here_an_event_is_destroyed_with_its_cycle(gpu: SimulatedGpu) -> None:
    from lightning_gpuopt.utils import cuda_events

    before = len(cuda_events._alive)
    in_a_cycle(new_event())
    assert len(cuda_events._alive) == before + 1
    gc.collect()
    assert len(cuda_events._alive) == before


def test_workers_of_the_next_run_outlive_what_a_run_has_left(gpu: SimulatedGpu, tmp_path: Path) -> None:
    def fit() -> None:
        model = SimulatedModule(gpu, Step(Work(0.001, 2, 0.001)), batches=20)
        tiny_trainer(tmp_path, callbacks=[StallDetector()], max_steps=20, **gpu.trainer_arguments()).fit(model)

    fit()
    assert collected_in_a_fork() == 0


class Rows(Dataset[Any]):
    """Samples that loader processes fill into memory that is page-locked in place."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 12, index), index


class Ignores(LightningModule):
    """Does nothing with a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("prefetch", [False, True])
def test_loader_processes_of_the_next_run_outlive_what_a_run_has_left(
    gpu: SimulatedGpu, tmp_path: Path, prefetch: bool
) -> None:
    datamodule = LMDBDataModule(Rows(), batch_size=8, num_workers=2, pin_memory="in_place")
    callbacks: list[Callback] = [CudaPrefetcher(enabled=True)] if prefetch else []
    trainer = tiny_trainer(tmp_path, callbacks=callbacks, max_steps=32, **gpu.trainer_arguments())
    trainer.fit(Ignores(), datamodule=datamodule)
    del trainer, datamodule, callbacks
    assert collected_in_a_fork() == 0

"""A worker samples itself when it is asked to, hands its stacks back, and stops."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.measurements.code_location import Call, Stack
from lightning_gpuopt.timeline.worker_clock import WorkerClock, watch_workers
from lightning_gpuopt.timeline.worker_stacks import WorkerLook, WorkerStacks
from tests.helpers import error_of_a_killed_worker, wait_for
from tests.lanes import combinations


class Counts(Dataset[Any]):
    """Samples that take a moment, each with the number of sampling threads in its process, and that process.

    Once ``ends`` is set, the next to be read is the end of its worker.
    """

    def __init__(self) -> None:
        self.ends = torch.zeros(1).share_memory_()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            if self.ends:
                os.kill(os.getpid(), signal.SIGKILL)
        samplers = sum(thread.name == "gpuopt-stacks" for thread in threading.enumerate())
        return torch.tensor([samplers, os.getpid()])


def watched(**options: Any) -> tuple[Any, WorkerClock, WorkerStacks]:
    loader = DataLoader(Counts(), batch_size=1, **options)
    watch = watch_workers(loader)
    assert watch is not None
    clock = watch[0]
    return iter(loader), clock, clock.stacks


def until(batches: Any, condition: Any, most: int = 12_000) -> None:
    """Take batches until something is so; a minute of them at the most."""
    for _ in range(most):
        if condition(next(batches)[0]):
            return
    raise AssertionError("it never came")


@combinations("fork", method=["fork", "spawn"])
def test_only_the_worker_that_was_asked_samples_itself(method: str) -> None:
    batches, _, stacks = watched(num_workers=2, multiprocessing_context=method)
    first = next(batches)[0]
    assert stacks.answer() == (0, ())
    stacks.ask(1)
    until(batches, lambda batch: any(stack.calls[0].name.endswith("__getitem__") for stack in stacks.answer()[1]))
    until(batches, lambda batch: batch[1] == first[1])
    assert next(each for each in batches if each[0][1] == first[1])[0][0] == 0


@pytest.mark.timed
def test_it_stops_when_nobody_asks_any_more() -> None:
    batches, _, stacks = watched(num_workers=1)
    stacks.ask(0)
    until(batches, lambda batch: batch[0] == 1)
    stacks.end()
    until(batches, lambda batch: batch[0] == 0, most=200)  # 200 samples would take four times as long


@pytest.mark.matrix
def test_it_stops_by_itself_when_it_has_enough() -> None:
    batches, clock, stacks = watched(num_workers=1)
    stacks.ask(0)
    until(batches, lambda batch: batch[0] == 1)
    until(batches, lambda batch: batch[0] == 0)
    assert sum(stack.samples for stack in stacks.answer()[1]) >= 200
    until(batches, lambda batch: clock.times(1).batches > 600)
    assert next(batches)[0][0] == 0


def test_a_worker_may_be_asked_again() -> None:
    batches, _, stacks = watched(num_workers=1)
    for _ in range(2):
        stacks.ask(0)
        assert stacks.answer() == (0, ())
        until(batches, lambda batch: bool(stacks.answer()[1]))
        stacks.end()
        until(batches, lambda batch: batch[0] == 0)


@pytest.mark.matrix
def test_a_worker_that_is_killed_while_it_samples_itself_gives_the_error_of_torch() -> None:
    batches, _, stacks = watched(num_workers=1)
    stacks.ask(0)
    until(batches, lambda batch: batch[0] == 1)
    error = error_of_a_killed_worker(batches, 0, lambda pid: batches._dataset.ends.fill_(1))
    if isinstance(error, RuntimeError):  # else there was a batch of the dead worker, whose memory is gone
        assert re.search("is killed by signal: Killed|exited unexpectedly", f"{error} {error.__cause__}")
    stacks.answer()  # whatever was there, or nothing


def test_a_loader_without_workers_does_not_sample_itself() -> None:
    batches, _, stacks = watched(num_workers=0)
    stacks.ask(0)
    assert [next(batches)[0][0].item() for _ in range(20)] == [0] * 20


def a_stack(number: int, frames: int = 1) -> Stack:
    calls = tuple(
        Call(f"f{number}", f"/home/me/{'x' * 80}.py", line, own=True, transform="T") for line in range(frames)
    )
    return Stack(calls, 1.0 + number, 3)


def test_stacks_come_through_as_they_are() -> None:
    stacks = WorkerStacks()
    stacks.give((a_stack(0, 3), a_stack(1)))
    assert stacks.answer() == (os.getpid(), (a_stack(0, 3), a_stack(1)))


def test_those_that_do_not_fit_are_left_out() -> None:
    stacks = WorkerStacks()
    many = tuple(a_stack(number, 90) for number in range(199))
    stacks.give(many)
    _, answer = stacks.answer()
    assert 0 < len(answer) < 199
    assert answer == many[: len(answer)]


def test_an_answer_that_is_being_written_is_none() -> None:
    stacks = WorkerStacks()
    stacks.give((a_stack(0),))
    stacks._text[0] = b"!"
    assert stacks.answer() == (0, ())


def sets_up(sampled: Callable[[], int]) -> None:
    wait_for(lambda: sampled() >= 5)


def makes_batches(is_over: Callable[[], bool]) -> None:
    wait_for(is_over)


def test_what_a_worker_does_after_its_first_batch_is_no_part_of_an_epochs_beginning() -> None:
    stacks = WorkerStacks()
    stacks.ask(0, before_first_batch=True)
    look = WorkerLook(stacks, 0, busy=lambda: True, batches=lambda: 0.0)  # one batch follows the other at once
    look.epoch_begins()
    sampler = look._sampler
    assert sampler is not None
    sets_up(lambda: sampler.samples("epoch_setup"))
    look.first_batch_made()
    makes_batches(lambda: not sampler.running)
    _, answer = stacks.answer()
    assert any(call.name == "sets_up" for stack in answer for call in stack.calls)
    assert not any(call.name == "makes_batches" for stack in answer for call in stack.calls)


@pytest.mark.parametrize(("worker", "before_first_batch"), [(1, True), (0, False)])
def test_only_the_worker_that_is_asked_of_it_samples_an_epochs_beginning(worker: int, before_first_batch: bool) -> None:
    stacks = WorkerStacks()
    stacks.ask(worker, before_first_batch=before_first_batch)
    look = WorkerLook(stacks, 0, busy=lambda: True, batches=lambda: 0.0)
    look.epoch_begins()
    assert look._sampler is None


def test_of_two_questions_in_a_row_one_sampler_is_left_and_ends() -> None:
    stacks = WorkerStacks()
    look = WorkerLook(stacks, 0, busy=lambda: True, batches=lambda: 0.0)
    stacks.ask(0, before_first_batch=True)
    look.epoch_begins()
    first = look._sampler
    look.epoch_begins()  # the next epoch has begun before the first sampler has looked again
    second = look._sampler
    assert first is not None
    assert second is not None
    wait_for(lambda: not first.running)
    assert second.running
    stacks.end()
    wait_for(lambda: not second.running)

"""Stacks from inside a loader's worker: asked for, and handed back, through shared memory.

The training process names a worker; that worker sees it when it begins its next batch, or its next epoch, samples its
own main thread for a few batches, or until the first, and leaves the stacks, as text, in the block. Nothing else passes
between the two, so it works under fork and spawn alike, and no file is left behind.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import astuple
from multiprocessing import sharedctypes
from typing import Any, Final

from lightning_gpuopt.measurements.code_location import Call, Stack
from lightning_gpuopt.timeline.stacks import StackSampler, start_sampling

log = logging.getLogger(__name__)

_WANTED, _LENGTH, _CHECK = range(3)
_HEAD: Final = 3
_BYTES: Final = 1 << 17
_MAX_STACKS: Final = 200  # stacks handed back: those with most time
_ENOUGH_SAMPLES: Final = 200
_ENOUGH_BATCHES: Final = 24
_MAX_S: Final = 20.0
_FIRST_ANSWER_S: Final = 0.1
_OF_EPOCHS: Final = 1 << 15  # in a question: it is about what comes before an epoch's first batch


class WorkerStacks:
    """The block of shared memory of one loader; pickled into workers that are being spawned."""

    def __init__(self) -> None:
        self._head: Any = sharedctypes.RawArray("d", _HEAD)
        self._text: Any = sharedctypes.RawArray("c", _BYTES)
        self._asked = 0

    def ask(self, worker: int, *, before_first_batch: bool = False) -> None:
        """Have a worker sample itself from its next batch on, or from each epoch's beginning to its first batch."""
        self._asked += 1
        self._head[_LENGTH] = 0.0
        # the number of the question in the upper part: the same worker may be asked twice
        self._head[_WANTED] = float(self._asked << 16 | (_OF_EPOCHS if before_first_batch else 0) | worker + 1)

    def end(self) -> None:
        self._head[_WANTED] = 0.0

    @property
    def question(self) -> float:
        """The current request; 0: none."""
        return float(self._head[_WANTED])

    def answer(self) -> tuple[int, tuple[Stack, ...]]:
        """Which process has answered, and all its stacks so far; called in the training process. 0: none has yet."""
        length, check = int(self._head[_LENGTH]), int(self._head[_CHECK])
        text = self._text[:length]
        if not length or zlib.crc32(text) != check:  # none yet, or one is being written
            return 0, ()
        process, rows = json.loads(text)
        stacks = (Stack(tuple(Call(*call) for call in calls), seconds, seen) for calls, seconds, seen in rows)
        return int(process), tuple(stacks)

    def give(self, stacks: tuple[Stack, ...]) -> None:
        """Leave stacks for the training process; called in a worker. Those that do not fit are left out."""
        rows = [[[astuple(call) for call in each.calls], each.seconds, each.samples] for each in stacks[:_MAX_STACKS]]
        while len(text := json.dumps([os.getpid(), rows]).encode()) > _BYTES:
            rows = rows[: len(rows) // 2]
        self._head[_LENGTH] = 0.0
        self._text[: len(text)] = text
        self._head[_CHECK] = float(zlib.crc32(text))
        self._head[_LENGTH] = float(len(text))


class WorkerLook:
    """Samples the thread that calls :meth:`batch_begins` on request; ``busy``: whether it is at a batch."""

    def __init__(
        self, stacks: WorkerStacks, worker: int, busy: Callable[[], bool], batches: Callable[[], float]
    ) -> None:
        self._stacks = stacks
        self._mine = worker + 1
        self._busy = busy
        self._batches = batches
        self._question = 0.0
        self._sampler: StackSampler | None = None
        self._activity_name = ""
        self._first_is_made = False
        self._until = self._until_batch = self._next_answer = 0.0
        self._answer_after_s = _FIRST_ANSWER_S
        # a ctypes array is dear to read
        self.wanted = memoryview(stacks._head).cast("B").cast("d")
        self.seen = 0.0

    def batch_begins(self) -> None:
        """The request has changed."""
        self.seen = self.wanted[_WANTED]
        if int(self.seen) & 0xFFFF == self._mine:
            self._begin(self.seen, "data_wait")

    def epoch_begins(self) -> None:
        """The dataset is to be gone through from its beginning."""
        question = self.wanted[_WANTED]
        if int(question) & 0xFFFF == self._mine | _OF_EPOCHS:
            self._first_is_made = False
            self._begin(question, "epoch_setup")

    def first_batch_made(self) -> None:
        """What comes before an epoch's first batch is over."""
        self._first_is_made = True

    def _begin(self, question: float, activity: str) -> None:
        before, self._sampler = self._sampler, None
        if before is not None:
            before.stop(0.0)  # it would go on in the name of the new one
        now = time.perf_counter()
        self._activity_name = activity
        self._question = question
        self._until, self._until_batch = now + _MAX_S, self._batches() + _ENOUGH_BATCHES
        self._answer_after_s = _FIRST_ANSWER_S
        self._next_answer = now + _FIRST_ANSWER_S
        self._sampler = start_sampling(threading.get_ident(), self._activity, self._is_over)

    def _activity(self) -> str | None:
        if self._activity_name == "epoch_setup" and self._first_is_made:
            return None
        return self._activity_name if self._busy() else None

    def _is_over(self) -> bool:
        """Called after each sample, on the sampling thread: hands back what was seen now and then, and at the end."""
        sampler, now = self._sampler, time.perf_counter()
        if sampler is None:
            return False
        asked, activity = self.wanted[_WANTED] == self._question, self._activity_name
        if activity == "epoch_setup":
            enough = self._first_is_made
        else:
            enough = sampler.samples(activity) >= _ENOUGH_SAMPLES and self._batches() >= self._until_batch
        over = not asked or enough or now >= self._until
        if asked and (over or now >= self._next_answer):
            self._answer_after_s *= 2
            self._next_answer = now + self._answer_after_s
            self._stacks.give(sampler.stacks(activity))
        if over and self._sampler is sampler:
            self._sampler = None
        return over

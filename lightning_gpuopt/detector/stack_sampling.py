"""Decides when to sample stacks for the lines that a finding's time goes to, and keeps what was seen."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from lightning_gpuopt.detector.loader_watch import LoaderWatch
from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.code_places import belongs_to, finding_name, is_in_user_code, is_in_workers_before_it
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.timeline import stacks
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.stacks import StackSampler, start_sampling

log = logging.getLogger(__name__)

# steps after the warm-up at which it is looked for findings before a window ends: short runs have lines, too
_EARLY: Final = (5, 10, 20, 40, 80, 160)
_WHILE_SAMPLING: Final = 4  # steps after which it is asked whether samples are enough
_ENOUGH: Final = 200
_TOO_FEW: Final = 20
_MAX_S: Final = 30.0
_ANSWER_WITHIN_S: Final = 10.0
_MAX_LOOKS: Final = 3


class StackSampling:
    """Samples the training thread, or a worker, once a finding lies in the user's code, and for a few seconds only."""

    def __init__(self, timeline: Timeline, loader: LoaderWatch) -> None:
        self._timeline = timeline
        self._loader = loader
        self._sampler: StackSampler | None = None
        self._activities: set[str] = set()
        self._wanted: list[Finding] = []
        self._until = 0.0
        self._seen: dict[tuple[str, str], Sampled] = {}
        self._looks: dict[str, int] = {}
        self._in_worker: tuple[int, int] | None = None
        self._asked_for, self._of_epochs = "", False
        self._asked_at = 0.0
        self._answered = False
        self._looked = 0
        self._over = False

    def due_at(self, steps: int) -> int:
        """Steps since the end of the warm-up before which there is nothing to do, once so many are done."""
        early = next((each for each in _EARLY if each > steps), sys.maxsize)
        samples = self._sampler is not None or self._in_worker is not None
        return min(early, steps + _WHILE_SAMPLING) if samples else early

    def due(self, steps: int) -> bool:
        """Whether to look for findings before the window ends; ``steps`` are since the end of the warm-up."""
        return steps in _EARLY and not self._over

    def found(self, findings: Sequence[Finding]) -> None:
        if self._over:
            return
        self._collect()
        here = [each for each in findings if is_in_user_code(each) and not _is_in_processes(each)]
        here = [each for each in here if not self._is_in_workers(each)]
        there = [each for each in findings if self._is_in_workers(each)]
        here = [each for each in here if self._may_look(each)]
        if here and self._sampler is None:
            self._look_here(here)
        asks = self._in_worker is not None and (self._of_epochs or not self._answered)
        if asks and not self._waits_for_answer(there):
            self._end_there()
        there = [each for each in there if self._may_look(each)]
        if there and self._in_worker is None:
            self._look_there(there[0])

    def _waits_for_answer(self, there: Sequence[Finding]) -> bool:
        """Whether an answer may still come, and the finding stands; one about epochs waits for another epoch."""
        if self._asked_for not in [finding_name(each) for each in there]:
            return False
        if self._of_epochs:
            return all(is_in_workers_before_it(each) or not self._may_look(each) for each in there)
        return time.monotonic() - self._asked_at <= _ANSWER_WITHIN_S

    def step_done(self) -> None:
        """A step has ended; costs next to nothing while nothing is sampled."""
        if self._sampler is not None and not self._sampler.running:
            self._collect()
        if self._in_worker is not None and not self._of_epochs and time.monotonic() - self._asked_at > _MAX_S:
            self._collect()  # each epoch may have workers of its own, which find the question as the first did
            self._end_there()

    def finish(self) -> None:
        self._over = True
        if self._sampler is not None:
            self._sampler.stop()
        self._collect()
        self._end_there()

    def sampled(self) -> tuple[Sampled, ...]:
        self._collect()
        return tuple(self._seen.values())

    def notes(self, findings: Sequence[Finding]) -> list[str]:
        notes = []
        if self._seen and getattr(sys, "frozen", False):
            notes.append("This is a frozen application: its own files cannot be distinguished from those of libraries.")
        blind = [each for each in findings if is_in_user_code(each) and "where" not in each.evidence]
        return notes + [f"The lines that cause {each.cause} are unknown: {self._why_blind(each)}." for each in blind]

    def _why_blind(self, finding: Finding) -> str:
        if not stacks.FRAMES_ARE_SAFE:
            return "this Python cannot safely read another thread's stack"
        if _is_in_processes(finding) and not self._is_in_workers(finding):
            return "its worker processes do not belong to a DataLoader"
        if not self._looks.get(finding_name(finding)):
            return "the run ended before it could be sampled"
        if self._is_in_workers(finding):
            return "no worker started a batch and sampled itself after the request"
        return "nothing ran when it was sampled"

    def _is_in_workers(self, finding: Finding) -> bool:
        """Whether the worker processes of a DataLoader do what a finding is about."""
        in_batches = cause_of(finding.cause).in_loader_code and finding.cause != "main_process_loading"
        if not in_batches and not is_in_workers_before_it(finding):
            return False
        return self._loader.busiest(str(finding.evidence.get("loader", ""))) is not None

    def _may_look(self, finding: Finding) -> bool:
        if self._looks.get(finding_name(finding), 0) >= _MAX_LOOKS:
            return False
        return self._samples(finding) < _TOO_FEW

    def _samples(self, finding: Finding) -> int:
        return sum(
            stack.samples for each in self._seen.values() if belongs_to(finding, each.activity) for stack in each.stacks
        )

    # -- in this process

    def _look_here(self, findings: Sequence[Finding]) -> None:
        for each in findings:
            self._looks[finding_name(each)] = self._looks.get(finding_name(each), 0) + 1
        self._looked += 1
        self._wanted = list(findings)
        self._activities = set()
        self._until = time.monotonic() + _MAX_S
        self._sampler = start_sampling(
            threading.get_ident(), self._activity, self._is_over, helpers=lambda: self._loader.threads
        )

    def _activity(self) -> str | None:
        """What the training thread does, if that is what a finding is about; called on the sampling thread."""
        activity = self._timeline.activity
        if activity is None or not any(belongs_to(each, activity) for each in self._wanted):
            return None
        self._activities.add(activity)
        return activity

    def _is_over(self) -> bool:
        sampler = self._sampler
        if sampler is None or time.monotonic() >= self._until:
            return sampler is not None
        activities = list(self._activities)
        return all(
            sum(sampler.samples(activity) for activity in activities if belongs_to(each, activity)) >= _ENOUGH
            for each in self._wanted
        )

    # -- in a worker

    def _look_there(self, finding: Finding) -> None:
        asked = self._loader.busiest(str(finding.evidence.get("loader", "")))
        if asked is None:
            return
        key, stacks, workers = asked
        self._looks[finding_name(finding)] = looks = self._looks.get(finding_name(finding), 0) + 1
        worker = (looks - 1) % workers  # another one where the first has not answered
        self._asked_for, self._of_epochs = finding_name(finding), is_in_workers_before_it(finding)
        stacks.ask(worker, before_first_batch=self._of_epochs)
        self._in_worker, self._asked_at, self._answered = (key, worker), time.monotonic(), False

    def _end_there(self) -> None:
        if self._in_worker is not None:
            stacks = self._loader.stacks_of(self._in_worker[0])
            if stacks is not None:
                stacks.end()
        self._in_worker = None

    # -- what has come

    def _collect(self) -> None:
        if self._sampler is not None:
            for activity in list(self._activities):
                sampled = Sampled(activity, "training process", self._sampler.stacks(activity))
                self._seen[activity, f"look {self._looked}"] = sampled
            if not self._sampler.running:
                self._sampler = None
        if self._in_worker is not None:
            key, worker = self._in_worker
            stacks = self._loader.stacks_of(key)
            process, answer = stacks.answer() if stacks is not None else (0, ())
            if answer:
                self._answered = True
                activity = "epoch_setup" if self._of_epochs else "data_wait"
                self._seen[activity, f"process {process}"] = Sampled(activity, f"worker {worker}", answer)
            in_workers = [each for (_, where), each in self._seen.items() if where.startswith("process")]
            if stacks is None or sum(stack.samples for each in in_workers for stack in each.stacks) >= _ENOUGH:
                self._end_there()


def _is_in_processes(finding: Finding) -> bool:
    """Whether other processes do what a finding is about, whoever has started them."""
    return finding.evidence.get("work") == "processes" and finding.cause != "main_process_loading"

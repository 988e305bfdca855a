"""A close look at a few steps with torch.profiler: kernels, copies and calls of the CUDA runtime, without stacks.

Once in a run, after a step of warm-up, whose cost would land in the record (pytorch/kineto#328). CUPTI stays attached
after the first use and can slow the rest of the run down (pytorch#144455). It is never detached by us: kineto does that
on a thread of its own, steered by an environment variable, and its races crash (pytorch/kineto#1554).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from lightning_gpuopt.compat.torch_internals import profiler_is_enabled
from lightning_gpuopt.measurements.gpu import StepLook
from lightning_gpuopt.timeline.activity import ActivitySpan, look_of
from lightning_gpuopt.timeline.module_calls import ModuleCalls
from lightning_gpuopt.timeline.records import records_of

log = logging.getLogger(__name__)

_STEPS: Final = 3
_MAX_STEPS: Final = 16
_WARMUP_STEPS: Final = 1

_MAX_MIB: Final = 256  # a trace that is larger is not read: a kernel and its call take about 0.7 KiB
# the clocks of ``time.perf_counter`` and ``time.time_ns`` part by less during a look, unless one is set
_CLOCK_SET_S: Final = 1e-3
# profilers that this package has made; they may lie around for a while when they are done
OURS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


class CannotLookError(RuntimeError):
    """torch.profiler cannot record what the GPU does; the text says why."""


class ProfilerLook:
    """Records 3 to 16 steps, once: as many as come until they repeat themselves (``rhythm``), as with accumulation."""

    def __init__(self, rhythm: int = 1, modules: ModuleCalls | None = None) -> None:
        self._modules = modules
        self._profiler: Any = None
        self._rhythm = rhythm
        self._steps = min(max(_STEPS, rhythm), _MAX_STEPS)
        self._left = _WARMUP_STEPS + self._steps
        self._began_s = self._shift_s = 0.0
        self.recorded_s = (0.0, 0.0)  # when it began and ended, in seconds of ``time.perf_counter``

    @property
    def is_part(self) -> bool:
        """Whether steps repeat themselves only after more steps than are recorded."""
        return self._rhythm > self._steps

    @property
    def lasts(self) -> int:
        return _WARMUP_STEPS + self._steps

    def begin(self) -> None:
        """Start, with a step of warm-up; CannotLookError: not on this device, or not beside another profiler."""
        refuse_beside_another()
        own = torch.profiler.profile.__module__.startswith("torch.")  # else it is a stand-in, which decides for itself
        activity = torch.profiler.ProfilerActivity.CUDA
        if own and activity not in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
            raise CannotLookError("this torch cannot trace CUDA")
        schedule = torch.profiler.schedule(wait=0, warmup=_WARMUP_STEPS, active=self._steps, repeat=1)
        try:
            profiler = torch.profiler.profile(activities=[activity], schedule=schedule)
            OURS.add(profiler)
            profiler.start()
            self._profiler = profiler
            self._began_s, self._shift_s = time.perf_counter(), _shift_s()
            if self._modules is not None:
                self._modules.begin()
        except Exception as error:  # whatever CUPTI, or another profiler that holds it, does not like
            self.end()
            raise CannotLookError(f"{type(error).__name__}: {error}") from error

    def step_done(self) -> bool:
        """Count a step; True when the recording is over; CannotLookError if the profiler failed."""
        if self._profiler is None:
            return True
        self._left -= 1
        if self._modules is not None:
            self._modules.step_done()
        last = self._left == 0
        try:
            self._profiler.step()
            if last:  # to stop recording waits for the GPU, which so has finished these steps
                self.recorded_s = (self.recorded_s[0], time.perf_counter())
                self._profiler.stop()
        except Exception as error:
            self._drop()
            raise CannotLookError(f"{type(error).__name__}: {error}") from error
        if self._left == self._steps:
            self.recorded_s = (time.perf_counter(), 0.0)
        if last and self._modules is not None:
            self._modules.end()
        return last

    def read(self, spans: Sequence[ActivitySpan]) -> StepLook:
        """What was recorded; CannotLookError if there is no record of these steps: another tool may have CUPTI.

        Steps are in seconds of ``time.perf_counter``. Those outside of the recording are left out, and those issued
        before it began: their kernels are not in it.
        """
        profiler, self._profiler = self._profiler, None
        begin_s, end_s = self.recorded_s
        steps = [
            each
            for each in spans
            if begin_s <= each.begun_s and each.ended_s <= end_s and each.issue_begun_s >= self._began_s
        ]
        if not steps:
            raise CannotLookError("the GPU ran none of the recorded steps meanwhile: the host is too far ahead of it")
        try:
            records = records_of(self._trace_of(profiler), torch.cuda.current_device(), self._shift_s)
            look = look_of(records, steps, self._modules.at if self._modules is not None else None)
        except CannotLookError:
            raise
        except Exception as error:
            raise CannotLookError(f"{type(error).__name__}: {error}") from error
        if look is None:
            raise CannotLookError("it recorded no kernels; another tool may hold CUPTI")
        return look

    def end(self) -> None:
        profiler = self._drop()
        if profiler is not None:
            with contextlib.suppress(Exception):
                profiler.stop()

    def abandon(self) -> None:
        """Take the hooks away, and leave the profiler as it is: to stop it would wait for the GPU."""
        self._drop()

    def _trace_of(self, profiler: Any) -> dict[str, Any]:
        """A profiler's trace; CannotLookError if it is too large, or its times are not to be trusted."""
        if abs(_shift_s() - self._shift_s) > _CLOCK_SET_S:
            raise CannotLookError("the system's clock was changed meanwhile")
        with tempfile.TemporaryDirectory(prefix="lightning-gpuopt-") as folder:
            path = Path(folder) / "look.json"
            profiler.export_chrome_trace(str(path))
            mib = path.stat().st_size / 2**20
            if mib > _MAX_MIB:
                raise CannotLookError(f"the record of these steps has {mib:.0f} MiB, too much to read")
            with _no_collection():
                trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        return trace

    def _drop(self) -> Any:
        """Take the hooks away; returns the profiler, which is nobody's from here on."""
        if self._modules is not None:
            self._modules.end()
        profiler, self._profiler = self._profiler, None
        return profiler


def refuse_beside_another() -> None:
    """Raise CannotLookError if the program has a profiler, even one between two recordings: its next would fail."""
    kinds = {torch.profiler.profile, *_subclasses_of(torch.profiler.profile)}
    # an object refers to its class: that asks the collector once, in C, and not each of a million objects
    if profiler_is_enabled() or any(type(each) in kinds and each not in OURS for each in gc.get_referrers(*kinds)):
        raise CannotLookError("the program uses torch.profiler itself")


def _subclasses_of(kind: Any) -> list[type]:
    """All classes that derive from one; none if something else stands in for it."""
    if not isinstance(kind, type):
        return []
    direct: list[type] = kind.__subclasses__()
    return [*direct, *(each for one in direct for each in _subclasses_of(one))]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which looks through all that is read, again and again, and frees nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _shift_s() -> float:
    """What to add to seconds of ``time.time`` for those of ``time.perf_counter``."""
    before_s, now_s, after_s = time.perf_counter(), time.time_ns() / 1e9, time.perf_counter()
    return (before_s + after_s) / 2 - now_s

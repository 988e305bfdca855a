"""``torch.profiler.profile`` on the simulated device: kernels, copies and runtime calls in kineto's form."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.profiler
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerAction, ProfilerActivity

from tests.simulators.gpu.ledger import Activity
from tests.simulators.gpu.patches import Patches

if TYPE_CHECKING:
    from tests.simulators.gpu.gpu import SimulatedGpu

_CATEGORY = {"kernel": "kernel", "collective": "kernel", "copy": "gpu_memcpy"}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_user_annotation", "cuda_sync")
_EVENT_ARGUMENTS = set(inspect.signature(FunctionEvent.__init__).parameters)
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@dataclass
class Profiling:
    """How the profiler behaves.

    Attributes:
        refuses: ``start`` raises, as with another profiler active.
        blind: nothing of CUDA is recorded, as where another program has CUPTI.
        start_s: what its start (with the warm-up, where there is one) costs the host.
        launch_cost_s: what each launch costs the host more from then on, until it stops.
        slowdown_after: by which share kernels and the host's issuing are slower after its first use.
        is_attached: whether CUPTI is; that it is attached waits for all queued work (seen on an H100).
    """

    refuses: bool = False
    blind: bool = False
    start_s: float = 0.0
    launch_cost_s: float = 0.0
    slowdown_after: float = 0.0
    is_attached: bool = False


@dataclass(frozen=True)
class _Record:
    name: str
    category: str
    start_s: float
    end_s: float
    resource: int
    thread: int
    correlation: int
    nbytes: int = 0

    @property
    def on_device(self) -> bool:
        return self.category in _ON_DEVICE


class Tracer:
    """Collects what the device and the runtime do while it is the device's ``tracer``.

    Attributes:
        start_s: when the active window began; None during warm-up.
    """

    def __init__(self, launch_cost_s: float, blind: bool) -> None:
        self.launch_cost_s = launch_cost_s
        self.start_s: float | None = None
        self.records: list[_Record] = []
        self._blind = blind

    def activity(self, activity: Activity) -> None:
        """The device has begun something; what was launched before CUPTI was there has no number, and is not seen."""
        name, stream, start_s, end_s, kind, correlation, thread, _, nbytes = activity
        if correlation and not self._blind:
            self.records.append(_Record(name, _CATEGORY[kind], start_s, end_s, stream, thread, correlation, nbytes))

    def runtime(self, name: str, start_s: float, end_s: float, correlation: int) -> None:
        """The host has called the runtime."""
        if not self._blind:
            thread = threading.get_native_id()
            self.records.append(_Record(name, "cuda_runtime", start_s, end_s, thread, thread, correlation))
            if "Synchronize" in name:  # as CUPTI records where it is asked for synchronizations
                waited = _Record("Stream Synchronize", "cuda_sync", start_s, end_s, 7, thread, correlation)
                self.records.append(waited)

    def step(self, name: str, start_s: float, end_s: float) -> None:
        """A step of the schedule."""
        thread = threading.get_native_id()
        for category in ("user_annotation", "gpu_user_annotation"):
            self.records.append(_Record(name, category, start_s, end_s, thread, thread, 0))

    def within(self, end_s: float) -> list[_Record]:
        """What lies wholly inside the window, by starting time."""
        begin_s = end_s if self.start_s is None else self.start_s
        inside = [each for each in self.records if each.start_s >= begin_s and each.end_s <= end_s]
        return sorted(inside, key=lambda each: each.start_s)


class KinetoEvent:
    """One record, with the methods of ``torch._C._autograd._KinetoEvent``."""

    def __init__(self, gpu: SimulatedGpu, record: _Record) -> None:
        self._record, self._index = record, gpu.index
        self._start_ns, self._end_ns = gpu.unix_ns(record.start_s), gpu.unix_ns(record.end_s)

    def name(self) -> str:
        return self._record.name

    def overload_name(self) -> str:
        return ""

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self._record.on_device else DeviceType.CPU

    def device_index(self) -> int:
        return self._index if self._record.on_device else os.getpid()

    def device_resource_id(self) -> int:
        return self._record.resource

    def start_ns(self) -> int:
        return self._start_ns

    def end_ns(self) -> int:
        return self._end_ns

    def duration_ns(self) -> int:
        return self._end_ns - self._start_ns

    def start_thread_id(self) -> int:
        return self._record.thread

    end_thread_id = fwd_thread_id = start_thread_id

    def correlation_id(self) -> int:
        return self._record.correlation

    def linked_correlation_id(self) -> int:
        return 0

    def nbytes(self) -> int:
        return self._record.nbytes

    def activity_type(self) -> str:
        return self._record.category

    def is_user_annotation(self) -> bool:
        return self._record.category in ("user_annotation", "gpu_user_annotation")

    def is_async(self) -> bool:
        return False

    is_hidden_event = is_python_function = is_async

    def sequence_nr(self) -> int:
        return -1

    def scope(self) -> int:
        return 0

    external_id = flops = cuda_elapsed_us = privateuse1_elapsed_us = scope

    def stack(self) -> list[str]:
        return []

    shapes = dtypes = concrete_inputs = stack


class KinetoResults:
    """For ``profile.profiler.kineto_results``."""

    def __init__(self, gpu: SimulatedGpu, records: list[_Record], start_s: float) -> None:
        self._events = [KinetoEvent(gpu, each) for each in records]
        self._start_ns = gpu.unix_ns(start_s)

    def trace_start_ns(self) -> int:
        return self._start_ns

    def events(self) -> list[KinetoEvent]:
        return self._events

    def function_events(self) -> EventList:
        """As ``torch.autograd.profiler`` makes them of kineto's."""
        made = []
        for each in self._events:
            arguments = {
                "id": each.correlation_id(),
                "name": each.name(),
                "trace_name": each.name(),
                "overload_name": "",
                "thread": each.start_thread_id(),
                "start_us": (each.start_ns() - self._start_ns) / 1e3,
                "end_us": (each.end_ns() - self._start_ns) / 1e3,
                "use_device": "cuda",
                "device_type": each.device_type(),
                "device_index": each.device_index(),
                "device_resource_id": each.device_resource_id(),
                "is_user_annotation": each.is_user_annotation(),
                "activity_type": each.activity_type(),
                "linked_correlation_id": each.linked_correlation_id(),
                "input_shapes": [],
                "stack": [],
            }
            known = {name: value for name, value in arguments.items() if name in _EVENT_ARGUMENTS}
            made.append(FunctionEvent(**known))  # type: ignore[no-untyped-call]
        return EventList(made, use_device="cuda", profile_memory=False, with_flops=False)  # type: ignore[no-untyped-call]

    def chrome_trace(self) -> dict[str, Any]:
        """As kineto writes it; times in microseconds of the unix clock less a base."""
        base_ns = self._start_ns
        made = []
        for each in self._events:
            device = each.device_type() == DeviceType.CUDA
            where = {"device": each.device_index(), "stream": each.device_resource_id()} if device else {}
            where |= {"bytes": each.nbytes()} if each.activity_type() == "gpu_memcpy" else {}
            made.append(
                {
                    "ph": "X",
                    "cat": each.activity_type(),
                    "name": each.name(),
                    "pid": each.device_index(),
                    "tid": each.device_resource_id(),
                    "ts": (each.start_ns() - base_ns) / 1e3,
                    "dur": each.duration_ns() / 1e3,
                    "args": {**where, "correlation": each.correlation_id()},
                }
            )
        return {"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": made}


class Profile:
    """Stands in for ``torch.profiler.profile``.

    Args:
        gpu: the device.
        activities: without CUDA nothing of the device is recorded.
        schedule: as ``torch.profiler.schedule`` makes it; all steps by default.
        on_trace_ready: called with this object when a cycle has ended.
        **kwargs: further arguments of torch's, without effect.
    """

    def __init__(
        self,
        gpu: SimulatedGpu,
        *,
        activities: Any = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._gpu = gpu
        self._blind = activities is not None and ProfilerActivity.CUDA not in activities
        self._steps = schedule is not None
        self.schedule = schedule or (lambda step: ProfilerAction.RECORD)
        self.on_trace_ready = on_trace_ready
        self.step_num = 0
        self.current_action = self.schedule(0)
        self.profiler: Any = None
        self._tracer: Tracer | None = None
        self._step_began_s = 0.0

    def __enter__(self) -> Profile:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Begin the schedule."""
        self._enter(self.current_action)
        self._step_began_s = self._gpu.clock()

    def step(self) -> None:
        """The next step of the schedule begins."""
        self._end_step()
        before = self.current_action
        self.step_num += 1
        self.current_action = self.schedule(self.step_num)
        if before == ProfilerAction.RECORD_AND_SAVE:
            self._stop_trace()
            if self.on_trace_ready is not None:
                self.on_trace_ready(self)
        elif before in _RECORDING and self.current_action not in _RECORDING:
            self._stop_trace()
        self._enter(self.current_action)
        self._step_began_s = self._gpu.clock()

    def stop(self) -> None:
        """End it, and hand over what has been recorded."""
        self._end_step()
        recorded = self.current_action in _RECORDING
        if self._tracer is not None:
            self._stop_trace()
            if recorded and self.on_trace_ready is not None:
                self.on_trace_ready(self)

    def events(self) -> EventList:
        """The records as torch's FunctionEvents."""
        return self._results().function_events()

    def key_averages(self, **kwargs: Any) -> Any:
        """Sums by name."""
        return self.events().key_averages(**kwargs)  # type: ignore[no-untyped-call]

    def export_chrome_trace(self, path: str) -> None:
        """Write the records as JSON, compressed where the name ends in .gz."""
        text = json.dumps(self._results().chrome_trace())
        with gzip.open(path, "wt") if str(path).endswith(".gz") else open(path, "w") as file:
            file.write(text)

    def _results(self) -> KinetoResults:
        if self.profiler is None:
            raise AssertionError("Profiler didn't finish running")
        results: KinetoResults = self.profiler.kineto_results
        return results

    def _enter(self, action: ProfilerAction) -> None:
        profiling = self._gpu.profiling
        if action == ProfilerAction.NONE:
            return
        if self._tracer is None:
            if profiling.refuses or self._gpu.tracer is not None:
                raise RuntimeError("Profiler is already enabled on this thread.")
            if not profiling.is_attached:
                profiling.is_attached = True
                self._gpu.synchronize()
            self._gpu.clock.sleep_until(self._gpu.clock() + profiling.start_s)
            self._tracer = self._gpu.tracer = Tracer(profiling.launch_cost_s, self._blind or profiling.blind)
        if action in _RECORDING and self._tracer.start_s is None:
            self._tracer.start_s = self._gpu.clock()

    def _end_step(self) -> None:
        if self._tracer is not None and self._tracer.start_s is not None and self._steps:
            self._tracer.step(f"ProfilerStep#{self.step_num}", self._step_began_s, self._gpu.clock())

    def _stop_trace(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        self._gpu.synchronize()  # as torch.autograd.profiler.profile.__exit__
        self._gpu.tracer = None
        self._gpu.slowdown = 1.0 + self._gpu.profiling.slowdown_after
        if tracer.start_s is not None:
            results = KinetoResults(self._gpu, tracer.within(self._gpu.clock()), tracer.start_s)
            self.profiler = SimpleNamespace(kineto_results=results)


def install(gpu: SimulatedGpu, patches: Patches) -> None:
    """Put the stand-in where ``torch.profiler.profile`` is looked up."""

    class profile(Profile):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(gpu, **kwargs)

    patches.set(torch.profiler, "profile", profile)
    patches.set(torch.profiler.profiler, "profile", profile)

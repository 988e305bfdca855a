"""``torch.cuda.Event`` and ``torch.cuda.Stream`` on the simulated device, with torch's own errors."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tests.simulators.gpu.device import Device, Mark, Queue

CAPTURING = (
    "CUDA error: operation not permitted when stream is capturing\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


class Refusal:
    """Makes events fail, as in the capture of a CUDA graph.

    Attributes:
        left: calls that still succeed; None: all of them.
        captures: what is recorded now becomes part of a graph, and has no time of its own, ever.
    """

    __slots__ = ("captures", "left")

    def __init__(self) -> None:
        self.left: int | None = None
        self.captures = False

    def check(self) -> None:
        """One more call; raises RuntimeError when it is refused."""
        if self.left is not None:
            if self.left <= 0:
                raise RuntimeError(CAPTURING)
            self.left -= 1


class Event:
    """An event; the messages of its errors are those of c10/cuda/CUDAEvent.h in torch 2.13."""

    __slots__ = ("__weakref__", "_captured", "_device", "_mark", "_process", "_refusal", "_timing")

    def __init__(self, device: Device, refusal: Refusal, enable_timing: bool = False) -> None:
        self._device = device
        self._refusal = refusal
        self._timing = enable_timing
        self._mark: Mark | None = None
        self._captured = False
        self._process = os.getpid()

    def __del__(self, getpid: Any = os.getpid, abort: Any = os.abort) -> None:  # modules may be gone when it comes
        """As torch's destructor: it asks CUDA, which a forked process has not, and cannot raise (seen on an H100)."""
        if getpid() != self._process:
            abort()

    def record(self, stream: Stream | None = None) -> None:
        """Put the event after all that the stream was given; stamped when the stream gets there."""
        if self._refusal.left is not None:
            self._refusal.check()
        self._captured = self._refusal.captures
        self._mark = self._device.record(None if stream is None else stream.queue)

    def query(self) -> bool:
        """Whether the device has passed it; an event never recorded counts as passed."""
        if self._captured:
            raise RuntimeError(CAPTURING)
        return self._mark is None or self._device.passed(self._mark)

    def wait(self, stream: Stream | None = None) -> None:
        """What the stream is given from now on begins after the event."""
        if self._mark is not None:
            self._device.wait(self._mark, None if stream is None else stream.queue)

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""
        if self._mark is not None:
            self._device.wait_for(self._mark, "event", "cudaEventSynchronize")

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self._refusal.left is not None:
            self._refusal.check()
        start, end = self._mark, end_event._mark
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if start is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self._device.passed(start) and self._device.passed(end)):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        assert start.stamp_s is not None
        assert end.stamp_s is not None
        return (end.stamp_s - start.stamp_s) * 1e3

    @property
    def stamp_s(self) -> float | None:
        """The truth, for tests: when the device got there, in the clock's seconds; None while that is unknown."""
        return None if self._mark is None else self._mark.stamp_s


class Stream:
    """A stream; two objects for one queue are equal."""

    def __init__(self, device: Device, queue: Queue | None = None, index: int = 0) -> None:
        self._device = device
        self.queue = queue or device.new_queue()
        self.device = torch.device("cuda", index)

    device_index = property(lambda self: self.device.index)
    cuda_stream = property(lambda self: 0 if self.queue is self._device.default else self.queue.number)
    stream_id = cuda_stream
    priority = 0

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here; a new one by default."""
        event = torch.cuda.Event() if event is None else event  # type: ignore[assignment, no-untyped-call]
        assert isinstance(event, Event)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What this stream is given from now on begins after the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """What this stream is given from now on begins after what ``stream`` has been given so far."""
        self._device.wait(self._device.record(stream.queue), self.queue)

    def query(self) -> bool:
        """Whether all that the stream was given is done."""
        return self._device.passed(self._device.record(self.queue))

    def synchronize(self) -> None:
        """Block the host until all that the stream was given is done."""
        with synchronizing(self._device):
            self._device.wait_for(self._device.record(self.queue), "stream")

    def __enter__(self) -> Stream:
        self._context = torch.cuda.stream(self)  # type: ignore[arg-type]
        self._context.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


def synchronizing(device: Device) -> AbstractContextManager[None]:
    """Torch's check around each synchronizing operation; the installed GPU places its own."""
    check = getattr(device, "synchronizing_call", nullcontext)
    guard: AbstractContextManager[None] = check()
    return guard

"""The compute stream, and a side stream for copies; on a device without streams, nothing of either."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from typing_extensions import override

from lightning_gpuopt.measurements.gpu import AheadCopies
from lightning_gpuopt.utils.cuda_events import new_event

_MAX_UNREAD: Final = 256  # copies whose times were not read yet; beyond that the oldest are forgotten


class NoEvent:
    """Stands for a point in a stream that does not exist: it has always been passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: NoEvent) -> float:
        return 0.0


class Streams:
    """A device without streams: what is issued is done."""

    _NO_EVENT: Final = NoEvent()

    def on_side(self) -> AbstractContextManager[Any]:
        """While it is open, the device is given work on the side stream."""
        return nullcontext()

    def new_event(self, *, timing: bool = False) -> Any:
        """An event that was not recorded yet; with ``timing`` where :meth:`CopyTimes` will ask for its time."""
        return self._NO_EVENT

    def record(self, event: Any) -> None:
        """Put an event after all that the current stream was given."""

    def record_on_side(self, event: Any) -> None:
        """The same while :meth:`on_side` is open: no need to ask which stream is the current one."""
        self.record(event)

    def side_waits(self, event: Any) -> None:
        """What the side stream is given from now on begins after the event."""

    def compute_waits(self, event: Any) -> None:
        """What the compute stream is given from now on begins after the event."""

    def compute_waits_timed(self, events: CopyEvents) -> None:
        """The same for the end of a copy, between two events on the compute stream."""
        self.record(events.wait_begins)
        self.compute_waits(events.ends)
        self.record(events.wait_ends)

    def keep_for_compute(self, tensor: torch.Tensor) -> None:
        """Memory allocated on the side stream is not to be used again before the compute stream is done with it."""

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded: nothing else may be issued."""
        return False


# streams on which batches are copied to a device: whoever uses a batch's memory again waits for them, too
copy_streams: Final[weakref.WeakSet[torch.cuda.Stream]] = weakref.WeakSet()


class CudaStreams(Streams):
    """One side stream for the whole run; the compute stream is whichever is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copy_streams.add(self._side)

    @override
    def on_side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    @override
    def new_event(self, *, timing: bool = False) -> Any:
        return new_event(enable_timing=timing)

    @override
    def record(self, event: Any) -> None:
        event.record(torch.cuda.current_stream(self._device))

    @override
    def record_on_side(self, event: Any) -> None:
        event.record(self._side)

    @override
    def side_waits(self, event: Any) -> None:
        self._side.wait_event(event)

    @override
    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    @override
    def compute_waits_timed(self, events: CopyEvents) -> None:
        compute = torch.cuda.current_stream(self._device)  # asked once: it costs as much as recording an event
        events.wait_begins.record(compute)
        compute.wait_event(events.ends)
        events.wait_ends.record(compute)

    @override
    def keep_for_compute(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    @property
    @override
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()


class CopyEvents(NamedTuple):
    begins: Any  # on the side stream, before it
    ends: Any  # on the side stream, after it
    wait_begins: Any  # on the compute stream, before that waits for the copy
    wait_ends: Any  # on the compute stream, when it has waited


class CopyTimes:
    """How long copies took, and how long the compute stream stood still for them: read later, without waiting."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: list[CopyEvents] = []
        self._unread: deque[tuple[CopyEvents, bool]] = deque()
        self._sums = {True: AheadCopies(), False: AheadCopies()}  # of the training loop's batches, and of all others

    def events(self) -> CopyEvents:
        if self._free:
            return self._free.pop()
        return CopyEvents(*(self._streams.new_event(timing=True) for _ in range(4)))

    def used(self, events: CopyEvents, *, training: bool) -> None:
        """All four were recorded."""
        self._unread.append((events, training))
        if len(self._unread) > _MAX_UNREAD:
            self._unread.popleft()

    def read(self) -> None:
        unread = self._unread
        while unread and unread[0][0].wait_ends.query():
            events, training = unread.popleft()
            copy_s = events.begins.elapsed_time(events.ends) / 1e3
            self._sums[training] += AheadCopies(1, copy_s, events.wait_begins.elapsed_time(events.wait_ends) / 1e3)
            self._free.append(events)

    def sums(self, *, training: bool) -> AheadCopies:
        """What has been read of the training loop's batches, or else of all others."""
        return self._sums[training]

"""The device: streams in order, one compute engine, a copy engine for each direction, collectives beside them.

Nothing runs by itself. Work waits in its stream's queue, and whoever asks about the device first plays what has begun
up to now, in the order of starting times: the outcome is exact however seldom somebody asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Literal

from tests.simulators.gpu.clock import Clock, RealClock
from tests.simulators.gpu.exchange import Exchange, Memory
from tests.simulators.gpu.ledger import Activity, Kind, Ledger, Wait

_FOREVER: Final = float("inf")
_WORK, _COLLECTIVE, _RECORD, _WAIT = range(4)
COMM_STREAM: Final = 19
DEFAULT_STREAM: Final = 7  # as kineto numbers CUDA's default stream

Direction = Literal["h2d", "d2h"]


class Mark:
    """A point in a stream; ``stamp_s`` is when the stream gets there, None while that cannot be told."""

    __slots__ = ("stamp_s",)

    def __init__(self) -> None:
        self.stamp_s: float | None = None


class Engine:
    """Runs one operation at a time."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0


class Operation:
    """Something in a stream's queue."""

    __slots__ = (
        "address",
        "correlation",
        "engine",
        "issued_s",
        "kind",
        "mark",
        "name",
        "nbytes",
        "number",
        "ranks",
        "seconds",
        "thread",
    )

    def __init__(self, kind: int, issued_s: float, seconds: float = 0.0, mark: Mark | None = None) -> None:
        self.kind, self.issued_s, self.seconds, self.mark = kind, issued_s, seconds, mark
        self.name = ""
        self.engine: Engine | None = None
        self.correlation = self.thread = self.number = self.address = self.nbytes = 0
        self.ranks: tuple[int, ...] = ()


class Queue:
    """One stream of the device."""

    __slots__ = ("drained_s", "number", "operations")

    def __init__(self, number: int) -> None:
        self.number = number
        self.drained_s = 0.0
        self.operations: deque[Operation] = deque()


class Device:
    """A simulated device.

    Args:
        clock: real time by default.
        exchange: tells when the other ranks join collectives; a lone rank by default.
        launch_queue: operations of one stream that may be pending; a launch beyond that blocks the host.

    Example::

        device = Device(ManualClock())
        device.launch(0.1)
        device.synchronize()
        device.ledger.busy_s(100.0, 100.1)   # 0.1
    """

    def __init__(
        self, clock: Clock | None = None, exchange: Exchange | None = None, *, launch_queue: int = 1024
    ) -> None:
        self.clock = clock or RealClock()
        self.exchange = exchange or Memory()
        self.launch_queue = launch_queue
        self.slowdown = 1.0
        self.tracer: Any = None
        self.default = Queue(DEFAULT_STREAM)
        self.comm = Queue(COMM_STREAM)
        self.queues = [self.default, self.comm]
        self.ledger = Ledger(self.refresh, self._waiting_since)
        self._compute = Engine()
        self._copy = {"h2d": Engine(), "d2h": Engine()}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._collectives = 0
        self._unpublished: deque[Operation] = deque()
        self._correlation = 0

    # ---- streams ----

    @property
    def current(self) -> Queue:
        """This thread's current stream."""
        return getattr(self._local, "queue", self.default)

    @current.setter
    def current(self, queue: Queue) -> None:
        self._local.queue = queue

    def new_queue(self) -> Queue:
        """A side stream."""
        with self._lock:
            queue = Queue(COMM_STREAM + 4 * (len(self.queues) - 1))
            self.queues.append(queue)
        return queue

    # ---- work ----

    def launch(self, seconds: float, stream: Queue | None = None, name: str = "kernel") -> None:
        """Queue a kernel; costs the host nothing but this call."""
        tracer = self.tracer
        begin_s = self.clock()
        operation = Operation(_WORK, begin_s, seconds * self.slowdown)
        operation.name, operation.engine = name, self._compute
        if tracer is not None:
            self._traced(operation, "cudaLaunchKernel", begin_s)
        self._push(stream or self.current, operation)

    def issue(
        self,
        count: int,
        host_s_each: float,
        gpu_s_each: float,
        stream: Queue | None = None,
        name: str = "kernel",
    ) -> None:
        """Launch many kernels, for each of which the host takes its time."""
        due_s = self.clock()
        for _ in range(count):
            due_s += host_s_each * self.slowdown
            self.clock.sleep_until(due_s)
            self.launch(gpu_s_each, stream, name)

    def copy(
        self,
        seconds: float,
        direction: Direction = "h2d",
        stream: Queue | None = None,
        *,
        pinned: bool = True,
        address: int = 0,
        nbytes: int = 0,
    ) -> None:
        """Queue a copy; one of pageable memory blocks the host until it is done."""
        stream = stream or self.current
        host = "Pinned" if pinned else "Pageable"
        begin_s = self.clock()
        operation = Operation(_WORK, begin_s, seconds)
        operation.name = f"Memcpy HtoD ({host} -> Device)" if direction == "h2d" else f"Memcpy DtoH (Device -> {host})"
        operation.engine, operation.address, operation.nbytes = self._copy[direction], address, nbytes
        if self.tracer is not None:
            self._traced(operation, "", begin_s)
        self._push(stream, operation)
        if not pinned:
            self.wait_for(self.record(stream), operation.name, "")
        if self.tracer is not None:
            self.tracer.runtime("cudaMemcpyAsync", begin_s, self.clock(), operation.correlation)

    # ---- points in streams ----

    def record(self, stream: Queue | None = None) -> Mark:
        """A point after all that the stream has been given so far."""
        queue = stream or self.current
        mark = Mark()
        now_s = self.clock()
        with self._lock:
            if queue.operations:
                queue.operations.append(Operation(_RECORD, now_s, 0.0, mark))
            else:
                mark.stamp_s = queue.drained_s if queue.drained_s > now_s else now_s
        return mark

    def wait(self, mark: Mark, stream: Queue | None = None) -> None:
        """What the stream is given from now on begins after the mark."""
        queue = stream or self.current
        now_s = self.clock()
        if mark.stamp_s is None or mark.stamp_s > now_s:
            with self._lock:
                queue.operations.append(Operation(_WAIT, now_s, 0.0, mark))

    def passed(self, mark: Mark) -> bool:
        """Whether the device has got to the mark."""
        now_s = self.clock()
        if mark.stamp_s is None:
            with self._lock:
                self._play(now_s)
        return mark.stamp_s is not None and mark.stamp_s <= now_s

    def wait_for(self, mark: Mark, reason: str, runtime: str = "cudaStreamSynchronize") -> None:
        """Block the host until the device has got to the mark."""
        begin_s = self.clock()
        while True:
            with self._lock:
                self._play(self.clock())
                self._play(_FOREVER, mark)  # a host that waits issues nothing: what will be is known
            if mark.stamp_s is not None:
                break
            self.clock.pause()
        self.clock.sleep_until(mark.stamp_s)
        end_s = self.clock()
        self.ledger.waits.append(Wait(reason, begin_s, end_s, threading.get_native_id()))
        if self.tracer is not None and runtime:
            self.tracer.runtime(runtime, begin_s, end_s, self.next_correlation())

    def drain(self, reason: str = "synchronize", runtime: str = "cudaDeviceSynchronize") -> None:
        """Block the host until every stream has done all that it was given."""
        join = Queue(0)
        for queue in list(self.queues):
            self.wait(self.record(queue), join)
        with self._lock:
            self.queues.append(join)
        self.wait_for(self.record(join), reason, runtime)
        with self._lock:
            self.queues.remove(join)

    def refresh(self) -> float:
        """Play what has begun by now; returns now."""
        now_s = self.clock()
        with self._lock:
            self._play(now_s)
        return now_s

    # ---- collectives ----

    def collective(self, seconds: float, name: str, ranks: Iterable[int] | None = None) -> Mark:
        """Queue a collective on the communication stream, after what this thread's stream has been given so far.

        Args:
            seconds: its own duration, from when the last rank has joined.
            name: the NCCL kernel's name.
            ranks: whom it waits for; all of them by default.

        Returns:
            Where it ends.
        """
        after, begin_s = self.record(), self.clock()
        operation = Operation(_COLLECTIVE, begin_s, seconds, after)
        operation.name = name
        world = range(self.exchange.world_size) if ranks is None else ranks
        operation.ranks = tuple(rank for rank in world if rank != self.exchange.rank)
        if self.tracer is not None:
            self._traced(operation, "cudaLaunchKernelExC", begin_s)
        with self._lock:
            operation.number, self._collectives = self._collectives, self._collectives + 1
            self.comm.operations.append(operation)
            if self.exchange.world_size > 1:
                self._unpublished.append(operation)
                self._play(_FOREVER, after)  # the other ranks must know even if this host asks nothing more
                self._publish()
        return self.record(self.comm)

    @property
    def has_unpublished(self) -> bool:
        """Whether another rank may wait to hear when this one joins."""
        return bool(self._unpublished)

    def _publish(self) -> bool:
        published = False
        while self._unpublished:
            operation = self._unpublished[0]
            assert operation.mark is not None
            if operation.mark.stamp_s is None:
                break
            self.exchange.publish(operation.number, max(operation.issued_s, operation.mark.stamp_s))
            self._unpublished.popleft()
            published = True
        return published

    def _waiting_since(self) -> list[float]:
        with self._lock:
            joined_s = self._resident_since()
        return [] if joined_s is None else [joined_s]

    def _resident_since(self) -> float | None:
        """When the first collective in the queue joined, if it waits for another rank."""
        head = self.comm.operations[0] if self.comm.operations else None
        if head is None or not head.ranks or head.mark is None or head.mark.stamp_s is None:
            return None
        if self.exchange.latest(head.number, head.ranks) is not None:
            return None
        return max(head.issued_s, head.mark.stamp_s, self.comm.drained_s)

    # ---- the play ----

    def _push(self, queue: Queue, operation: Operation) -> None:
        with self._lock:
            queue.operations.append(operation)
        while len(queue.operations) > self.launch_queue:
            with self._lock:
                self._play(self.clock())
            if len(queue.operations) > self.launch_queue:
                self._wait_for_room(queue)

    def _wait_for_room(self, queue: Queue) -> None:
        begin_s = self.clock()
        with self._lock:
            while len(queue.operations) > self.launch_queue and self._step(_FOREVER):
                pass
            until_s = queue.drained_s
            full = len(queue.operations) > self.launch_queue
        if full:  # behind a collective that another rank has not joined
            self.clock.pause()
        else:
            self.clock.sleep_until(until_s)
        self.ledger.waits.append(Wait("launch queue", begin_s, self.clock(), threading.get_native_id()))

    def _play(self, limit_s: float, until: Mark | None = None) -> None:
        while until is None or until.stamp_s is None:
            if not self._step(limit_s):
                return

    def _step(self, limit_s: float) -> bool:
        """Begin the operation whose turn it is, if that is by ``limit_s``; False when there is none."""
        best: Queue | None = None
        best_key = (_FOREVER, 0.0)
        for queue in self.queues:
            if queue.operations:
                ready_s, start_s = self._start_of(queue, queue.operations[0])
                if start_s < best_key[0] or (start_s == best_key[0] and ready_s < best_key[1]):
                    best, best_key = queue, (start_s, ready_s)
        if limit_s == _FOREVER and self._resident_since() is not None:  # who knows what will run after it
            limit_s = self.clock()
        if best is None or best_key[0] > limit_s:
            return bool(self._unpublished) and self._publish()
        self._begin(best, best.operations.popleft(), best_key[0])
        if self._unpublished:
            self._publish()
        return True

    def _start_of(self, queue: Queue, operation: Operation) -> tuple[float, float]:
        """When the stream is ready for its first operation, and when it can start; infinite while that is unknown."""
        ready_s = operation.issued_s if operation.issued_s > queue.drained_s else queue.drained_s
        if operation.kind == _WORK:
            assert operation.engine is not None
            free_s = operation.engine.free_s
            return ready_s, (free_s if free_s > ready_s else ready_s)
        if operation.kind == _RECORD:
            return ready_s, ready_s
        assert operation.mark is not None
        stamp_s = operation.mark.stamp_s
        if stamp_s is None:
            return ready_s, _FOREVER
        if operation.ranks and self.exchange.latest(operation.number, operation.ranks) is None:
            return ready_s, _FOREVER
        return ready_s, (stamp_s if stamp_s > ready_s else ready_s)

    def _begin(self, queue: Queue, operation: Operation, start_s: float) -> None:
        if operation.kind == _RECORD:
            assert operation.mark is not None
            operation.mark.stamp_s = start_s
            return
        if operation.kind == _WAIT:
            queue.drained_s = start_s
            return
        joined_s = start_s
        if operation.ranks:
            joined_s = max(joined_s, self.exchange.latest(operation.number, operation.ranks) or 0.0)
        queue.drained_s = end_s = joined_s + operation.seconds
        kind: Kind = "collective"
        if operation.engine is not None:
            operation.engine.free_s = end_s
            kind = "kernel" if operation.engine is self._compute else "copy"
        activity = Activity(
            operation.name,
            queue.number,
            start_s,
            end_s,
            kind,
            operation.correlation,
            operation.thread,
            operation.address,
            operation.nbytes,
        )
        self.ledger.add(activity)
        if self.tracer is not None:
            self.tracer.activity(activity)

    # ---- tracing ----

    def next_correlation(self) -> int:
        """A number that ties a runtime call to what it started."""
        self._correlation += 1
        return self._correlation

    def _traced(self, operation: Operation, runtime: str, begin_s: float) -> None:
        operation.correlation, operation.thread = self.next_correlation(), threading.get_native_id()
        if runtime:
            self.clock.sleep_until(begin_s + self.tracer.launch_cost_s)
            operation.issued_s = self.clock()
            self.tracer.runtime(runtime, begin_s, operation.issued_s, operation.correlation)

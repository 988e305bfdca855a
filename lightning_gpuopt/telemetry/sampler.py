"""What is read of the GPUs while training runs, added up until somebody takes it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lightning_gpuopt.telemetry import nvml
from lightning_gpuopt.telemetry.nvml_thread import NvmlThread, SamplePace, join_thread
from lightning_gpuopt.telemetry.visible import Chosen, DeviceNotFoundError, NvmlDevice
from lightning_gpuopt.telemetry.window import DeviceWindow, Stat, merge

log = logging.getLogger(__name__)

_LAST_READING_S = 0.1  # how long a sampler that is stopped before its first value may go on to get one


class GpuSampler:
    """Reads the chosen GPUs at a steady pace, and adds the values up until somebody takes them.

    All samplers of a process are read on one thread, which alone calls NVML, and ``choose`` too. Readings are those of
    ``keys.readings_of``, and ``"slowed_percent"``, ``"power_capped_percent"``, ``"sm_clock_max_mhz"`` and
    ``"active_nvlinks"``; ``interval_s`` apart in the mean, more where they are dear if ``bounded``, see
    ``nvml_thread.SamplePace``. ``notices`` has each cause once, for the thread that may speak to the user. ``failure``
    (None: all is well) is known once :meth:`wait_until_open` returns True.
    """

    def __init__(
        self,
        readings: Iterable[str],
        choose: Callable[[Sequence[NvmlDevice]], Sequence[Chosen]],
        *,
        interval_s: float,
        bounded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notices: deque[nvml.Notice] = deque()
        self.failure: DeviceNotFoundError | nvml.NvmlUnavailableError | None = None
        self.devices: tuple[Chosen, ...] = ()
        self._readings = frozenset(readings)
        self._choose = choose
        self._interval_s = interval_s
        self._bounded = bounded
        self._clock = clock
        self._reported: set[str] = set()
        self._readers: list[nvml.DeviceReader] = []
        self._lock = threading.Lock()
        self._window: dict[tuple[str, str], Stat] = {}
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._read_until_s = float("inf")
        self._pace: SamplePace | None = None
        self._thread: NvmlThread | None = None

    def start(self) -> None:
        """Begin, on the daemon thread of all samplers."""
        self._pace = SamplePace(self._interval_s, self._clock(), bounded=self._bounded)
        self._thread = join_thread(self)

    def wait_until_open(self, timeout_s: float) -> bool:
        """Whether it is known by now which devices there are; waits for that ``timeout_s`` seconds at most."""
        return self._opened.wait(timeout_s)

    def cut(self) -> tuple[DeviceWindow, ...]:
        """Take what was read since the last cut. No NVML call, no waiting for one."""
        with self._lock:
            window, self._window = self._window, {}
        return self._as_windows(window)

    def peek(self) -> tuple[DeviceWindow, ...]:
        """What :meth:`cut` would give now; nothing is taken."""
        with self._lock:
            return self._as_windows(self._window)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End the readings; whether they have ended within ``timeout_s``.

        If not, an NVML call hangs, and cleans up later. The last sampler's end shuts NVML down, and is waited for too,
        as long as there is time.
        """
        if self._thread is None or not self._thread.is_alive():  # never started, ended, or left behind by a fork
            return True
        now_s = self._clock()
        self._read_until_s = min(self._read_until_s, now_s if self._window else now_s + _LAST_READING_S)
        deadline_s = time.monotonic() + timeout_s
        self._thread.wake()
        ended = self._ended.wait(timeout_s)
        if self._thread.is_last(self):
            self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return ended

    def open(self, session: nvml.NvmlSession, between_calls: Callable[[], None] = nvml.nothing) -> None:
        """Find the devices; called by the thread. What fails is in :attr:`failure`."""
        try:
            chosen = tuple(self._choose(session.devices(between_calls)))
            if not chosen:
                raise nvml.NvmlUnavailableError("no NVIDIA GPU is visible")
            self._readers = [
                session.reader(each.device, self._readings, self._clock, self._interval_s, between_calls)
                for each in chosen
            ]
            self.devices = chosen
        except nvml.NvmlUnavailableError as failure:
            self._fail(failure)
        except DeviceNotFoundError as failure:
            self.failure = failure
            self._notify(nvml.Notice("warning", "gpu-not-found", f"no GPU figures: {failure}."))

    def read_once(self) -> None:
        """Read every device once; called by the thread."""
        for reader in list(self._readers):
            try:
                values = reader.read()
            except nvml.DeviceLostError as error:
                self._readers.remove(reader)
                reader.close()
                self._notify(nvml.Notice("warning", f"gpu-lost-{reader.device.uuid}", f"{error}: no longer monitored."))
                continue
            while reader.notices:
                self._notify(reader.notices.popleft())
            with self._lock:
                for value in values:
                    merge(self._window, {(reader.device.uuid, value.reading): Stat.of(value.value, value.weight)})

    def close(self) -> None:
        """Free what is held; called by the thread."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    # ---- a user of the thread ----

    @property
    def due_s(self) -> float:
        """When it wants its next turn; at once when it is to end."""
        assert self._pace is not None
        return self._pace.due_s if self._read_until_s == float("inf") else 0.0

    def is_over(self) -> bool:
        return self._clock() >= self._read_until_s

    def turn(self, thread: NvmlThread) -> bool:
        """Open, read or end; whether there is more to come."""
        try:
            return self._turn(thread)
        except nvml.StopReading:
            return False
        except Exception as error:
            log.debug("GPU sampler stopped", exc_info=True)
            self._notify(
                nvml.Notice("warning", "sampler-failed", f"GPU readings stopped after an unexpected {error!r}.")
            )
            return False

    def released(self) -> None:
        self._opened.set()
        if not self._ended.is_set():
            for reader in self._readers:
                reader.notify_absent()
                while reader.notices:
                    self._notify(reader.notices.popleft())
            self._ended.set()

    def _turn(self, thread: NvmlThread) -> bool:
        assert self._pace is not None
        ends = self._read_until_s < float("inf")
        if not self._opened.is_set():
            try:
                self.open(thread.session(), thread.checking(self))
            except nvml.NvmlUnavailableError as failure:
                self._fail(failure)
            self._opened.set()
            thread.spent_s()
            return bool(self._readers)
        if not ends or (not self._window and not self.is_over()):
            self.read_once()
            self._pace.read(self._clock(), thread.spent_s())
        return bool(self._readers) and not ends

    def _fail(self, failure: nvml.NvmlUnavailableError) -> None:
        self.failure = failure
        self._notify(nvml.Notice("warning", "nvml-unavailable", f"no GPU figures, NVML cannot be used: {failure}."))

    def _notify(self, notice: nvml.Notice) -> None:
        if notice.cause not in self._reported:
            self._reported.add(notice.cause)
            self.notices.append(notice)

    def _as_windows(self, window: dict[tuple[str, str], Stat]) -> tuple[DeviceWindow, ...]:
        return tuple(
            DeviceWindow(
                chosen.device.uuid,
                chosen.device.index,
                chosen.device.mig_slot,
                chosen.ordinal,
                {reading: stat for (uuid, reading), stat in window.items() if uuid == chosen.device.uuid},
            )
            for chosen in self.devices
        )

"""The thread that reads the GPUs while training runs.

Every NVML call of ours is made here, opening and closing included: some take 20 ms as a rule, any may take forever on a
sick GPU, and the training thread must not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lightning_gpuopt.telemetry.nvml import (
    DeviceLostError,
    DeviceReader,
    Notice,
    NvmlSession,
    NvmlUnavailableError,
)
from lightning_gpuopt.telemetry.visible import Chosen, DeviceNotFoundError, NvmlDevice
from lightning_gpuopt.telemetry.window import Accumulator, DeviceWindow

__all__ = ["GpuSampler", "next_due"]

log = logging.getLogger(__name__)


class GpuSampler:
    """Reads the chosen GPUs at a steady pace, and adds the values up until somebody takes them.

    Args:
        readings: the series wanted (``keys.readings_of``).
        choose: picks from what NVML lists; called on the sampler's thread.
        interval_s: from one reading to the next, in seconds.
        clock: seconds, monotonic.

    Attributes:
        notices: what the user should hear, each cause once; the thread that may speak to the user takes them from here.
        failure: why nothing is read, None while all is well. Known once :meth:`wait_until_open` returns True.
        devices: what is monitored.

    Example::

        sampler = GpuSampler({"utilization"}, choose=lambda listed: [Chosen(listed[0], None)], interval_s=0.1)
        sampler.start()
        ...
        windows = sampler.cut()
        sampler.stop()
    """

    def __init__(
        self,
        readings: Iterable[str],
        choose: Callable[[Sequence[NvmlDevice]], Sequence[Chosen]],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notices: deque[Notice] = deque()
        self.failure: DeviceNotFoundError | NvmlUnavailableError | None = None
        self.devices: tuple[Chosen, ...] = ()
        self._readings = frozenset(readings)
        self._choose = choose
        self._interval_s = interval_s
        self._clock = clock
        self._said: set[str] = set()
        self._session: NvmlSession | None = None
        self._readers: list[DeviceReader] = []
        self._lock = threading.Lock()
        self._window: dict[tuple[str, str], Accumulator] = {}
        self._opened = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, on a daemon thread."""
        self._thread = threading.Thread(target=self._run, name="gpuopt-gpu-sampler", daemon=True)
        self._thread.start()

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

    def stop(self, timeout_s: float = 3.0) -> bool:
        """End the thread, which shuts NVML down.

        Returns:
            Whether it has ended within ``timeout_s`` seconds. If not, an NVML call hangs, and the thread cleans up by
            itself when that call comes back.
        """
        self._stopping.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open(self) -> None:
        """Initialise NVML and find the devices; called by the thread. What fails is in :attr:`failure`."""
        try:
            self._session = NvmlSession()
            listed = self._session.devices()
            chosen = tuple(self._choose(listed))
            if not chosen:
                raise NvmlUnavailableError("no NVIDIA GPU is visible")
            self._readers = [self._session.reader(c.device, self._readings, self._clock) for c in chosen]
            self.devices = chosen
        except NvmlUnavailableError as failure:
            self.failure = failure
            self._notify(Notice("warning", "nvml-unavailable", f"no GPU figures, NVML cannot be used: {failure}."))
        except DeviceNotFoundError as failure:
            self.failure = failure
            self._notify(Notice("warning", "gpu-not-found", f"no GPU figures: {failure}."))

    def read_once(self) -> None:
        """Read every device once; called by the thread."""
        for reader in list(self._readers):
            try:
                values = reader.read()
            except DeviceLostError as error:
                self._readers.remove(reader)
                reader.close()
                self._notify(Notice("warning", f"gpu-lost-{reader.device.uuid}", f"{error}: no longer monitored."))
                continue
            while reader.notices:
                self._notify(reader.notices.popleft())
            with self._lock:
                for value in values:
                    accumulator = self._window.setdefault((reader.device.uuid, value.reading), Accumulator())
                    accumulator.add(value.value, value.weight)

    def close(self) -> None:
        """Free what is held and shut NVML down; called by the thread."""
        for reader in self._readers:
            reader.tell_absent()
            while reader.notices:
                self._notify(reader.notices.popleft())
            reader.close()
        self._readers = []
        if self._session is not None:
            self._session.close()
            self._session = None

    def _run(self) -> None:
        try:
            self.open()
            self._opened.set()
            due_s = self._clock()
            while self._readers and not self._stopping.is_set():
                self.read_once()
                now_s = self._clock()
                due_s = next_due(due_s, now_s, self._interval_s)
                self._stopping.wait(due_s - now_s)
            if not self._window:  # a window shorter than the interval has a value all the same
                self.read_once()
        except Exception as error:
            log.debug("GPU sampler stopped", exc_info=True)
            self._notify(Notice("warning", "sampler-failed", f"GPU readings stopped after an unexpected {error!r}."))
        finally:
            self._opened.set()
            self.close()

    def _notify(self, notice: Notice) -> None:
        if notice.cause not in self._said:
            self._said.add(notice.cause)
            self.notices.append(notice)

    def _as_windows(self, window: dict[tuple[str, str], Accumulator]) -> tuple[DeviceWindow, ...]:
        stats = {key: accumulator.freeze() for key, accumulator in window.items()}
        return tuple(
            DeviceWindow(
                chosen.device.uuid,
                chosen.device.index,
                chosen.device.mig_slot,
                chosen.ordinal,
                {reading: stat for (uuid, reading), stat in stats.items() if uuid == chosen.device.uuid},
            )
            for chosen in self.devices
        )


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """When the next reading is due: on the grid of the first one, leaving out what a slow call has missed."""
    missed = max(0, int((now_s - due_s) / interval_s))
    return due_s + (missed + 1) * interval_s

"""NVML: the session, the devices it lists, and a reader for each device.

Only this module and ``telemetry.nvml_sources``, which knows what to ask for each reading, use pynvml.

Everything here blocks as long as the driver likes, so it belongs on a thread of its own (``telemetry.sampler``).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pynvml

from lightning_gpuopt.telemetry.nvml_sources import Failed, Handles, MetricSource, Value, make_source, ways_to_read
from lightning_gpuopt.telemetry.visible import NvmlDevice, NvmlIndex

T = TypeVar("T")

log = logging.getLogger(__name__)

_UNDECIDED_S = 3.0  # how long the list of a device's absent metrics waits for the slower ones to show what they can do
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
# errors that the same question would get again, so it is not asked again
_NEVER = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)


class StopReading(Exception):
    """Nothing more is to be asked; raised by what is called between two NVML calls."""


def nothing() -> None:
    """Between two calls: go on."""


class NvmlUnavailableError(RuntimeError):
    """NVML cannot be used here; the text says why."""


class DeviceLostError(RuntimeError):
    """The GPU has fallen off the bus or needs a reset; the text says which."""


@dataclass(frozen=True)
class Notice:
    """Something to tell the user; ``cause`` makes two notices the same."""

    level: Literal["warning", "info"]
    cause: str
    text: str


class NvmlSession:
    """NVML, initialised until :meth:`close`; NvmlUnavailableError: no library or driver, or it does not start."""

    def __init__(self) -> None:
        self._handles: dict[str, Handles] = {}
        self._listed: list[NvmlDevice] | None = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(str(error)) from None

    def close(self) -> None:
        """Shut NVML down, as far as we opened it."""
        with suppress(pynvml.NVMLError):  # somebody may have shut it down once too often
            pynvml.nvmlShutdown()

    def driver(self, between_calls: Callable[[], None] = nothing) -> tuple[str, tuple[int, int] | None]:
        """The driver's version, and the newest CUDA that it runs (None: not told); NvmlUnavailableError: no answer.

        ``between_calls`` is called before each NVML call; what it raises ends the asking.
        """
        try:
            between_calls()
            version = pynvml.nvmlSystemGetDriverVersion()
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(str(error)) from None
        version = version.decode() if isinstance(version, bytes) else version
        try:
            between_calls()
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        except pynvml.NVMLError:
            return version, None
        return version, (number // 1000, number % 1000 // 10)

    def devices(self, between_calls: Callable[[], None] = nothing) -> list[NvmlDevice]:
        """All GPUs by NVML index, each with its MIG instances behind; one that does not answer is left out.

        Asked once. ``between_calls`` is called before each NVML call; what it raises ends the listing.
        NvmlUnavailableError: NVML does not list any.
        """
        if self._listed is None:
            self._listed = self._list_gpus(between_calls)
        return list(self._listed)

    def reader(
        self,
        device: NvmlDevice,
        readings: Iterable[str],
        clock: Callable[[], float],
        interval_s: float = 0.0,
        between_calls: Callable[[], None] = nothing,
    ) -> DeviceReader:
        """A reader of these readings of a device that :meth:`devices` has listed; see there for the arguments."""
        return DeviceReader(device, self._handles[device.uuid], readings, clock, interval_s, between_calls)

    def _list_gpus(self, between_calls: Callable[[], None]) -> list[NvmlDevice]:
        def ask(function: Callable[..., Any], *arguments: Any) -> Any:
            between_calls()
            return function(*arguments)

        try:
            count = ask(pynvml.nvmlDeviceGetCount)
        except pynvml.NVMLError as error:
            raise NvmlUnavailableError(str(error)) from None
        listed: list[NvmlDevice] = []
        for index in range(count):
            try:
                listed += self._list_gpu(NvmlIndex(index), ask)
            except pynvml.NVMLError:
                continue
        return listed

    def _list_gpu(self, index: NvmlIndex, ask: Callable[..., Any]) -> list[NvmlDevice]:
        gpu = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        name = _or("unknown GPU", lambda: ask(pynvml.nvmlDeviceGetName, gpu))
        bus_id = ask(pynvml.nvmlDeviceGetPciInfo, gpu).busId
        bus_id = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
        listed = [NvmlDevice(ask(pynvml.nvmlDeviceGetUUID, gpu), index, name, bus_id)]
        self._handles[listed[0].uuid] = Handles(gpu, gpu, None)
        for slot in range(_or(0, lambda: ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu))):
            try:
                instance = ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, slot)
                uuid = ask(pynvml.nvmlDeviceGetUUID, instance)
                handles = Handles(instance, gpu, ask(pynvml.nvmlDeviceGetGpuInstanceId, instance))
            except pynvml.NVMLError:
                continue
            listed.append(NvmlDevice(uuid, index, name, bus_id, slot))
            self._handles[uuid] = handles
        return listed


class DeviceReader:
    """Reads what one device can tell, and finds out on the way what it cannot.

    ``interval_s`` is how often :meth:`read` is called. What changes slowly is asked less often, see ``MetricSource``.
    ``between_calls`` is called before each NVML call, and may raise :class:`StopReading`. The caller takes ``notices``
    to the user.
    """

    def __init__(
        self,
        device: NvmlDevice,
        handles: Handles,
        readings: Iterable[str],
        clock: Callable[[], float],
        interval_s: float = 0.0,
        between_calls: Callable[[], None] = nothing,
    ) -> None:
        self.device = device
        self.notices: deque[Notice] = deque()
        self._handles = handles
        self._clock = clock
        self._interval_s = interval_s
        self._between_calls = between_calls
        self._begun_s = clock()
        self._ways = {reading: list(ways_to_read(reading, handles)) for reading in sorted(readings)}
        self._undecided = set(self._ways)
        self._absent: dict[str, str] = {}
        self._sources: dict[str, MetricSource] = {}
        for reading in self._ways:
            self._hand_on(reading, "not reported for a MIG instance")

    def read(self) -> list[Value]:
        """Ask for what is due, while there is time; what fails is left out. DeviceLostError: the GPU is gone."""
        values: list[Value] = []
        now_s = self._clock()
        for name, source in list(self._sources.items()):
            if now_s >= source.due_s:
                try:
                    self._read_source(name, source, now_s)
                except StopReading:
                    return values
            values += source.values
            if source.covers_span:
                source.values = []
        if not self._undecided or now_s - self._begun_s > _UNDECIDED_S:
            self.notify_absent()
        return values

    def _read_source(self, name: str, source: MetricSource, now_s: float) -> None:
        values: list[Value] = []
        source.values = []
        try:
            self._between_calls()
            for item in source.read():
                if isinstance(item, Failed):
                    self._on_error(name, [item.reading], item.code, item.reason)
                elif math.isfinite(item.value):
                    self._undecided.discard(item.reading)
                    values.append(item)
        except pynvml.NVMLError as error:
            self._on_error(name, sorted(source.readings), error.value)
        except (StopReading, DeviceLostError):
            raise
        except Exception as error:  # no answer that NVML's documentation has; what others are asked may be well
            log.debug("an odd answer of NVML", exc_info=True)
            self._notify_left_out(f"nvml-odd-answer-{name}", sorted(source.readings), f"an unexpected {error!r}")
        else:
            source.due_s = now_s + source.pause_after(self._interval_s)
        source.values = values

    def notify_absent(self) -> None:
        """Put into words, once, which metrics this device does not have."""
        if not self._absent:
            return
        reasons: dict[str, list[str]] = {}
        for reading, reason in self._absent.items():
            reasons.setdefault(reason, []).append(reading)
        text = "; ".join(f"{', '.join(readings)} ({reason})" for reason, readings in reasons.items())
        cause = f"absent-{self.device.uuid}-{','.join(self._absent)}"
        self.notices.append(Notice("info", cause, f"{self._name} is without {text}."))
        self._absent = {}

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources = {}

    @property
    def _name(self) -> str:
        instance = f" MIG {self.device.mig_slot}" if self.device.mig_slot is not None else ""
        return f"GPU {self.device.index}{instance} ({self.device.uuid})"

    def _hand_on(self, reading: str, reason: str) -> None:
        """Give the reading to the next source that may know it; when there is none, it is absent."""
        if not self._ways[reading]:
            self._undecided.discard(reading)
            self._absent[reading] = reason
            return
        name = self._ways[reading].pop(0)
        if name not in self._sources:
            self._sources[name] = make_source(name, self._handles, self._clock, self._between_calls)
        self._sources[name].readings.add(reading)

    def _notify_left_out(self, cause: str, readings: list[str], reason: str) -> None:
        text = f"{self._name}: NVML could not read {', '.join(readings)} ({reason}); such readings are skipped."
        self.notices.append(Notice("warning", cause, text))

    def _on_error(self, name: str, readings: list[str], code: int, reason: str = "") -> None:
        reason = reason or str(pynvml.NVMLError(code))
        if code in _LOST:
            raise DeviceLostError(f"{self._name} is lost ({reason})")
        if code not in _NEVER:
            self._notify_left_out(f"nvml-error-{code}", readings, reason)
            return
        source = self._sources[name]
        for reading in readings:
            source.readings.discard(reading)
            self._hand_on(reading, reason)
        if not source.readings:
            source.close()
            del self._sources[name]


def _or(otherwise: T, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (pynvml.NVMLError, ValueError):  # ValueError: bytes that are no text
        return otherwise

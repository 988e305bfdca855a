"""The NVML queries of each reading, and the values derived from them; for ``telemetry.nvml`` only."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

_MIB = 1024 * 1024

# NVML wants 100 ms between GPM samples; the rest is for a thread that wakes a little early against the last time
_GPM_INTERVAL_S = 0.095
# a utilization buffer without an entry for so long does not work; the drivers write one every 1/6 s or so
_SILENT_BUFFER_S = 2.0
_HEAT_OR_BRAKE = (
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)
_REASONS: Mapping[str, int] = {
    "throttled_percent": pynvml.nvmlClocksThrottleReasonSwPowerCap | _HEAT_OR_BRAKE,
    "slowed_percent": pynvml.nvmlClocksThrottleReasonHwSlowdown | _HEAT_OR_BRAKE,
    "power_capped_percent": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "clock_set_percent": pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
}
"""Readings that are 100 while NVML gives one of these reasons for a lower clock, and 0 else.

``slowed_percent`` and ``power_capped_percent`` are for the diagnosis only, which tells a GPU that is too hot, or that
the hardware slows down, from one that works within its power limit as it is meant to. ``clock_set_percent`` (somebody
has set a lower clock) is for ``telemetry.health``.
"""

NEIGHBOUR = "process "  # beginning of the series of another process on the GPU; its identifier follows
_NOT_TOLD = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION)

_NO_SUCH_LINK = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)


@dataclass(frozen=True)
class Value:
    """One value of a reading, in its metric's unit; always finite."""

    reading: str  # which series it belongs to: ``keys.Metric.reading``
    value: float
    weight: float = 1.0  # in a mean: 1 for a point reading, seconds for what covers a span


@dataclass(frozen=True)
class Failed:
    """One reading of several failed, the others did not."""

    reading: str
    code: int  # NVML's
    reason: str = ""  # where NVML's own words do not help


@dataclass(frozen=True)
class Handles:
    own: Any  # of the GPU or the MIG instance
    physical: Any  # of the GPU itself
    gpu_instance: int | None  # the instance's id within its GPU, None for a whole GPU


def ways_to_read(reading: str, handles: Handles) -> tuple[str, ...]:
    """The sources that may know a reading, best first."""
    if reading in ("utilization", "memory_utilization") and handles.gpu_instance is not None:
        return ()
    return _WAYS.get(reading, (reading,))


_WAYS = {
    "utilization": ("buffer", "rates"),
    "memory_utilization": ("rates",),
    "sm_activity": ("gpm",),
    "tensor_activity": ("gpm",),
    "dram_activity": ("gpm",),
    "sm_occupancy": ("gpm",),
    "memory_used_mib": ("memory",),
    "memory_percent": ("memory",),
    "pcie_rx_mib_s": ("gpm", "pcie_rx_mib_s"),
    "pcie_tx_mib_s": ("gpm", "pcie_tx_mib_s"),
    "nvlink_rx_mib_s": ("gpm", "nvlink"),
    "nvlink_tx_mib_s": ("gpm", "nvlink"),
    "nvdec_utilization": ("gpm", "nvdec_utilization"),
    "nvjpg_utilization": ("gpm", "nvjpg_utilization"),
    **dict.fromkeys(_REASONS, ("reasons",)),
}


def _pcie_mib_s(handles: Handles, counter: int) -> float:
    return float(pynvml.nvmlDeviceGetPcieThroughput(handles.own, counter)) / 1024


# readings that are one call for one number
_POINTS: Mapping[str, Callable[[Handles], float]] = {
    "power_w": lambda h: pynvml.nvmlDeviceGetPowerUsage(h.own) / 1000,
    "power_limit_w": lambda h: pynvml.nvmlDeviceGetEnforcedPowerLimit(h.own) / 1000,
    "temperature_c": lambda h: pynvml.nvmlDeviceGetTemperature(h.physical, pynvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h.physical, pynvml.NVML_CLOCK_SM),
    "mem_clock_mhz": lambda h: pynvml.nvmlDeviceGetClockInfo(h.physical, pynvml.NVML_CLOCK_MEM),
    "pcie_rx_mib_s": lambda h: _pcie_mib_s(h, pynvml.NVML_PCIE_UTIL_RX_BYTES),
    "pcie_tx_mib_s": lambda h: _pcie_mib_s(h, pynvml.NVML_PCIE_UTIL_TX_BYTES),
    "nvdec_utilization": lambda h: pynvml.nvmlDeviceGetDecoderUtilization(h.own)[0],
    "nvjpg_utilization": lambda h: pynvml.nvmlDeviceGetJpgUtilization(h.own)[0],
    # of telemetry.health: settings, and what a moment is like
    "busy_percent": lambda h: pynvml.nvmlDeviceGetUtilizationRates(h.own).gpu,
    "persistence": lambda h: pynvml.nvmlDeviceGetPersistenceMode(h.physical),
    "pcie_generation": lambda h: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h.physical),
    "pcie_generation_max": lambda h: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h.physical),
    "pcie_lanes": lambda h: pynvml.nvmlDeviceGetCurrPcieLinkWidth(h.physical),
    "pcie_lanes_max": lambda h: pynvml.nvmlDeviceGetMaxPcieLinkWidth(h.physical),
    "power_limit_default_w": lambda h: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(h.physical) / 1000,
    "mig_mode": lambda h: pynvml.nvmlDeviceGetMigMode(h.physical)[0],
    "ecc_mode": lambda h: pynvml.nvmlDeviceGetEccMode(h.physical)[0],
    "ecc_errors": lambda h: pynvml.nvmlDeviceGetTotalEccErrors(
        h.own, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
}


class MetricSource:
    """One NVML call, or a few that belong together, and the readings that are taken from it.

    Each call makes the training thread give up the interpreter's lock for a moment, which is most of what monitoring
    costs. So only utilization is asked at every reading. Means over a span lose nothing when the span is longer, and
    for all else, which changes slowly, the last value stands until it is asked again. Values that cover a span
    (``covers_span``) must not be given twice.
    """

    least_pause_s = 0.5
    covers_span = False

    def __init__(self, handles: Handles, clock: Callable[[], float], between_calls: Callable[[], None]) -> None:
        self.readings: set[str] = set()
        self.values: list[Value] = []
        self.due_s = -math.inf
        self._handles = handles
        self._clock = clock
        self._between_calls = between_calls

    def pause_after(self, interval_s: float) -> float:
        """Seconds from a reading to the next: at most five intervals, less what one may come early."""
        return min(self.least_pause_s, 5 * interval_s) - interval_s / 2

    def read(self) -> Iterator[Value | Failed]:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what NVML has allocated for this source."""


class _Point(MetricSource):
    def read(self) -> Iterator[Value | Failed]:
        for reading in self.readings:
            yield Value(reading, float(_POINTS[reading](self._handles)))


class _CounterRates(MetricSource):
    least_pause_s = 0.0

    def read(self) -> Iterator[Value | Failed]:
        rates = pynvml.nvmlDeviceGetUtilizationRates(self._handles.own)
        both = (Value("utilization", float(rates.gpu)), Value("memory_utilization", float(rates.memory)))
        return (value for value in both if value.reading in self.readings)


class _Reasons(MetricSource):
    def read(self) -> Iterator[Value | Failed]:
        try:
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handles.physical)
        except pynvml.NVMLError_FunctionNotFound:  # drivers before 535
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handles.physical)
        return (Value(reading, 100.0 if reasons & _REASONS[reading] else 0.0) for reading in self.readings)


class _MaxClock(MetricSource):
    """The highest clock that the device can have: asked once, since it does not change, and given each time."""

    _mhz: float | None = None

    def read(self) -> Iterator[Value | Failed]:
        if self._mhz is None:
            self._mhz = float(pynvml.nvmlDeviceGetMaxClockInfo(self._handles.physical, pynvml.NVML_CLOCK_SM))
        yield Value("sm_clock_max_mhz", self._mhz)


class _Memory(MetricSource):
    def read(self) -> Iterator[Value | Failed]:
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handles.own, version=pynvml.nvmlMemory_v2)
        except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handles.own)
        both = {
            "memory_used_mib": memory.used / _MIB,
            "memory_percent": 100.0 * memory.used / (memory.total or math.nan),
        }
        return (Value(reading, both[reading]) for reading in self.readings)


class _Buffer(MetricSource):
    """Utilization from the driver's own buffer, which misses nothing; point readings stand in until it gives any."""

    least_pause_s = 0.2
    covers_span = True

    def __init__(self, handles: Handles, clock: Callable[[], float], between_calls: Callable[[], None]) -> None:
        super().__init__(handles, clock, between_calls)
        self._last_us = 0
        self._heard_s = clock()

    def _point(self) -> Value:
        return Value("utilization", float(pynvml.nvmlDeviceGetUtilizationRates(self._handles.own).gpu))

    def read(self) -> Iterator[Value | Failed]:
        try:
            kind, entries = pynvml.nvmlDeviceGetSamples(
                self._handles.own, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_us
            )
        except pynvml.NVMLError_NotFound:
            kind, entries = 0, []
        except pynvml.NVMLError_InsufficientSize:  # an entry came between pynvml's two calls: the next drain has it
            return
        except pynvml.NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                yield self._point()
            raise
        values = [value for entry in entries if math.isfinite(value := _of_union(entry.sampleValue, kind))]
        if not values:
            if not self._last_us:
                yield self._point()
            if self._clock() - self._heard_s > _SILENT_BUFFER_S:
                yield Failed("utilization", pynvml.NVML_ERROR_NOT_SUPPORTED)
            return
        self._heard_s = self._clock()
        first, self._last_us = not self._last_us, max(entry.timeStamp for entry in entries)
        if not first:  # the first drain brings what was before us
            yield from (Value("utilization", value) for value in values)


class _Ecc(MetricSource):
    _at_start: float | None = None

    def read(self) -> Iterator[Value | Failed]:
        count = _POINTS["ecc_errors"](self._handles)
        if self._at_start is None:
            self._at_start = count
        yield Value("ecc_uncorrected", float(count - self._at_start))


class _NvLink(MetricSource):
    """NVLink traffic before Hopper, from what each link's counters (KiB) gained since the last look."""

    least_pause_s = 0.2
    covers_span = True

    _FIELDS: Mapping[str, int] = {
        "nvlink_rx_mib_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        "nvlink_tx_mib_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    }

    def __init__(self, handles: Handles, clock: Callable[[], float], between_calls: Callable[[], None]) -> None:
        super().__init__(handles, clock, between_calls)
        self._links: int | None = None
        self._before: dict[str, tuple[float, dict[int, float]]] = {}

    def read(self) -> Iterator[Value | Failed]:
        if self._links is None:
            answer = pynvml.nvmlDeviceGetFieldValues(self._handles.own, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT])[0]
            pynvml._nvmlCheckReturn(answer.nvmlReturn)
            self._links = int(_of_union(answer.value, answer.valueType))
        for reading in sorted(self.readings):
            self._between_calls()
            yield from self._read_one(reading, self._links)

    def _read_one(self, reading: str, links: int) -> Iterator[Value | Failed]:
        answers = pynvml.nvmlDeviceGetFieldValues(
            self._handles.own, [(self._FIELDS[reading], link) for link in range(links)]
        )
        now_s = self._clock()
        kib = {
            link: value
            for link, answer in enumerate(answers)
            if not answer.nvmlReturn and math.isfinite(value := _of_union(answer.value, answer.valueType))
        }
        if not kib:
            code = answers[0].nvmlReturn if links else pynvml.NVML_ERROR_NOT_SUPPORTED
            yield Failed(reading, code or pynvml.NVML_ERROR_UNKNOWN)
            return
        then_s, kib_then = self._before.get(reading, (now_s, kib))
        self._before[reading] = (now_s, kib)
        gained_kib = sum(kib.values()) - sum(kib_then.values())
        if now_s > then_s and kib.keys() == kib_then.keys() and gained_kib >= 0:  # else the counters were reset
            yield Value(reading, gained_kib / 1024 / (now_s - then_s), now_s - then_s)


class _ActiveNvLinks(MetricSource):
    """How many NVLinks are up; 0 for a GPU without any. Links do not come and go: asked once."""

    def pause_after(self, interval_s: float) -> float:
        """Infinite: it is read once."""
        return math.inf

    def read(self) -> Iterator[Value | Failed]:
        up = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            self._between_calls()
            try:
                up += pynvml.nvmlDeviceGetNvLinkState(self._handles.physical, link) == pynvml.NVML_FEATURE_ENABLED
            except pynvml.NVMLError as error:
                if error.value not in _NO_SUCH_LINK:
                    raise
                break
        yield Value("active_nvlinks", float(up))


def _is_ours(pid: int) -> bool:
    """Whether a process is this one, or was started by it."""
    own = os.getpid()
    try:
        return pid == own or own in [each.pid for each in psutil.Process(pid).parents()]
    except psutil.Error:  # it is gone, or another container's
        return False


class _Neighbours(MetricSource):
    """Other processes that compute on the GPU: a series for each, ``"process 4711"``, its memory in MiB.

    If they are not told, as in many containers, there are none; if they are told by numbers of another PID
    namespace, only how many there are.
    """

    least_pause_s = 2.0

    def read(self) -> Iterator[Value | Failed]:
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handles.own)
        except pynvml.NVMLError as error:
            if error.value not in _NOT_TOLD:
                raise
            running = []
        others = [each for each in running if not _is_ours(each.pid)]
        if len(others) == len(running):  # a container sees itself by another number, and so the others, too
            yield Value("neighbours", float(max(len(running) - 1, 0)))
            return
        yield Value("neighbours", float(len(others)))
        for each in others:
            yield Value(f"{NEIGHBOUR}{each.pid}", (each.usedGpuMemory or 0) / _MIB)


class _Gpm(MetricSource):
    """GPU performance monitoring (Hopper and later): means over back-to-back windows, so that no time goes unseen."""

    least_pause_s = 0.2
    covers_span = True

    _METRICS: Mapping[str, tuple[int, ...]] = {
        "sm_activity": (pynvml.NVML_GPM_METRIC_SM_UTIL,),
        "sm_occupancy": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,),
        "tensor_activity": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,),
        "dram_activity": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,),
        "pcie_rx_mib_s": (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,),
        "pcie_tx_mib_s": (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,),
        "nvlink_rx_mib_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,),
        "nvlink_tx_mib_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,),
        "nvdec_utilization": tuple(range(pynvml.NVML_GPM_METRIC_NVDEC_0_UTIL, pynvml.NVML_GPM_METRIC_NVDEC_7_UTIL + 1)),
        "nvjpg_utilization": tuple(range(pynvml.NVML_GPM_METRIC_NVJPG_0_UTIL, pynvml.NVML_GPM_METRIC_NVJPG_7_UTIL + 1)),
    }
    """Of several engines the mean over those that the chip has."""

    def __init__(self, handles: Handles, clock: Callable[[], float], between_calls: Callable[[], None]) -> None:
        super().__init__(handles, clock, between_calls)
        self._query = pynvml.c_nvmlGpmMetricsGet_t()
        self._query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._samples: list[Any] = []
        self._taken_s: float | None = None

    def read(self) -> Iterator[Value | Failed]:
        if self._taken_s is None:
            if not pynvml.nvmlGpmQueryDeviceSupport(self._handles.physical).isSupportedDevice:
                reason = "NVML GPM needs Hopper or later"
                yield from (Failed(r, pynvml.NVML_ERROR_NOT_SUPPORTED, reason) for r in sorted(self.readings))
                return
            while len(self._samples) < 2:
                self._between_calls()
                self._samples.append(pynvml.nvmlGpmSampleAlloc())
            self._between_calls()
            self._taken_s = self._take_sample(self._samples[0])
            return
        if self._clock() - self._taken_s < _GPM_INTERVAL_S:
            return
        before, now = self._samples
        taken_s = self._take_sample(now)
        length_s, self._taken_s = taken_s - self._taken_s, taken_s
        self._samples = [now, before]
        self._between_calls()
        results = self._compute(before, now)
        for reading in sorted(self.readings):
            answers = [results[metric] for metric in self._METRICS[reading]]
            good = [value for code, value in answers if code == pynvml.NVML_SUCCESS and math.isfinite(value)]
            if good:
                yield Value(reading, sum(good) / len(good), length_s)
            elif answers[0][0] != pynvml.NVML_SUCCESS:
                yield Failed(reading, answers[0][0])

    def _take_sample(self, sample: Any) -> float:
        taken_s = self._clock()
        if self._handles.gpu_instance is None:
            pynvml.nvmlGpmSampleGet(self._handles.physical, sample)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handles.physical, self._handles.gpu_instance, sample)
        return taken_s

    def _compute(self, before: Any, now: Any) -> dict[int, tuple[int, float]]:
        """What each metric says of the span between two samples: (nvmlReturn, value)."""
        ids = [metric for reading in self.readings for metric in self._METRICS[reading]]
        query = self._query
        query.numMetrics, query.sample1, query.sample2 = len(ids), before, now
        for i, metric in enumerate(ids):
            query.metrics[i].metricId = metric
        pynvml.nvmlGpmMetricsGet(query)
        return {each.metricId: (each.nvmlReturn, each.value) for each in query.metrics[: len(ids)]}

    def close(self) -> None:
        while self._samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(self._samples.pop())


def make_source(
    name: str, handles: Handles, clock: Callable[[], float], between_calls: Callable[[], None]
) -> MetricSource:
    """The source of this name, which is a reading's own name where one call gives just that."""
    kinds: dict[str, type[MetricSource]] = {
        "rates": _CounterRates,
        "buffer": _Buffer,
        "memory": _Memory,
        "gpm": _Gpm,
        "nvlink": _NvLink,
        "active_nvlinks": _ActiveNvLinks,
        "ecc_uncorrected": _Ecc,
        "neighbours": _Neighbours,
        "reasons": _Reasons,
        "sm_clock_max_mhz": _MaxClock,
    }
    return kinds.get(name, _Point)(handles, clock, between_calls)


def _of_union(value: Any, kind: int) -> float:
    """The member of an ``nvmlValue_t`` that its type names; nan for a type that is not known here."""
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return float(getattr(value, members[kind])) if 0 <= kind < len(members) else math.nan

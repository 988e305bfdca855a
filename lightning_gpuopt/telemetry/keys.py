"""The table of GPU metrics: key, unit, meaning, reading and its statistic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Statistic = Literal["mean", "min", "max"]


@dataclass(frozen=True)
class Metric:
    """One logged figure of one device."""

    key: str  # its name after ``gpu/{i}/``
    unit: str
    meaning: str  # one line for documentation
    reading: str  # the series of values behind it, as ``telemetry.nvml`` names it
    statistic: Statistic = "mean"  # what is taken of the values in the window
    # "default", only "all", or added to the "summary" of a run beside its reading
    group: Literal["default", "all", "summary"] = "default"


METRICS: tuple[Metric, ...] = (
    Metric("utilization", "%", "time in which a kernel was resident, as nvidia-smi shows it", "utilization"),
    Metric("utilization_min", "%", "smallest reading of utilization", "utilization", "min"),
    Metric("utilization_max", "%", "largest reading of utilization", "utilization", "max"),
    Metric("sm_activity", "%", "share of the SMs that had work, from NVML GPM (Hopper and later)", "sm_activity"),
    Metric("tensor_activity", "%", "time in which tensor cores were active, from NVML GPM", "tensor_activity"),
    Metric("dram_activity", "%", "share of the memory bandwidth in use, from NVML GPM", "dram_activity"),
    Metric("memory_used_mib", "MiB", "memory in use, without the driver's reserve", "memory_used_mib"),
    Metric("memory_percent", "%", "memory in use, of the total", "memory_percent"),
    Metric("power_w", "W", "power draw", "power_w"),
    Metric("temperature_c", "°C", "temperature of the GPU", "temperature_c"),
    Metric("sm_clock_mhz", "MHz", "clock of the SMs", "sm_clock_mhz"),
    Metric(
        "throttled_percent",
        "%",
        "share of the window with a slowdown reason: SW or HW thermal, HW power brake, SW power cap",
        "throttled_percent",
    ),
    Metric("memory_utilization", "%", "time in which memory was read or written", "memory_utilization", "mean", "all"),
    Metric("mem_clock_mhz", "MHz", "clock of the memory", "mem_clock_mhz", "mean", "all"),
    Metric("power_limit_w", "W", "power limit in force", "power_limit_w", "mean", "all"),
    Metric("pcie_rx_mib_s", "MiB/s", "PCIe traffic to the GPU", "pcie_rx_mib_s", "mean", "all"),
    Metric("pcie_tx_mib_s", "MiB/s", "PCIe traffic from the GPU", "pcie_tx_mib_s", "mean", "all"),
    Metric("sm_occupancy", "%", "active warps as a share of the maximum, from NVML GPM", "sm_occupancy", "mean", "all"),
    Metric("nvlink_rx_mib_s", "MiB/s", "NVLink traffic to the GPU, all links", "nvlink_rx_mib_s", "mean", "all"),
    Metric("nvlink_tx_mib_s", "MiB/s", "NVLink traffic from the GPU, all links", "nvlink_tx_mib_s", "mean", "all"),
    Metric("nvdec_utilization", "%", "mean load of the video decoders", "nvdec_utilization", "mean", "all"),
    Metric("nvjpg_utilization", "%", "mean load of the JPEG decoders", "nvjpg_utilization", "mean", "all"),
    Metric("ecc_uncorrected", "errors", "uncorrected ECC errors since the run began", "ecc_uncorrected", "max", "all"),
    Metric("memory_used_mib_max", "MiB", "largest reading of memory in use", "memory_used_mib", "max", "summary"),
    Metric("temperature_c_max", "°C", "highest reading of temperature", "temperature_c", "max", "summary"),
)

# logged when more than one device is monitored, over all ranks
CROSS_DEVICE: dict[str, str] = {
    "gpu/mean/utilization": "mean of the devices' mean utilizations, %",
    "gpu/min/utilization": "smallest of the devices' mean utilizations, %",
    "gpu/imbalance": "largest minus smallest of the devices' mean utilizations, %",
}


def select_metrics(metrics: str | Sequence[str]) -> tuple[Metric, ...]:
    """Metrics of ``"default"``, ``"all"`` or keys without ``gpu/{i}/``, in the table's order.

    ValueError: a key is unknown, or none is given. TypeError: neither of the two words nor a list of keys.
    """
    chosen: set[str]
    known = [metric.key for metric in METRICS if metric.group != "summary"]
    if metrics == "default":
        chosen = {metric.key for metric in METRICS if metric.group == "default"}
    elif metrics == "all":
        chosen = set(known)
    elif isinstance(metrics, str):
        raise ValueError(f"metrics: expected 'default', 'all' or a list of {', '.join(known)}, got {metrics!r}")
    elif not isinstance(metrics, Sequence) or not all(isinstance(key, str) for key in metrics):
        raise TypeError(f"metrics: expected 'default', 'all' or a list of metric names, got {metrics!r}")
    else:
        chosen = set(metrics)
        unknown = sorted(chosen.difference(known))
        if unknown or not chosen:
            came = f"no such metric as {', '.join(map(repr, unknown))}" if unknown else "an empty list"
            raise ValueError(f"metrics={list(metrics)!r}: {came}; the known ones are {', '.join(known)}")
    return tuple(metric for metric in METRICS if metric.key in chosen)


def readings_of(metrics: Sequence[Metric]) -> frozenset[str]:
    return frozenset(metric.reading for metric in metrics)


def with_summary(metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    """These metrics, and what the summary of a run adds to them."""
    keys = {metric.key for metric in metrics}
    return (*metrics, *(m for m in METRICS if m.group == "summary" and m.reading in keys))

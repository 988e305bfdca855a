"""What readings add up to: a device's window, and the windows of all devices of all ranks under their keys.

No clock, no NVML, no torch: numbers in, numbers out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_gpuopt.telemetry.keys import Metric, with_summary

Key = TypeVar("Key")


@dataclass(frozen=True)
class Stat:
    """The values of one reading in one window, in that reading's unit."""

    total: float  # sum of value times weight
    weight: float  # sum of the weights
    low: float
    high: float

    @classmethod
    def of(cls, value: float, weight: float) -> Stat:
        """One value; the weight is greater than 0."""
        return cls(value * weight, weight, value, value)

    @property
    def mean(self) -> float:
        return self.total / self.weight

    def merged(self, other: Stat) -> Stat:
        return Stat(
            self.total + other.total, self.weight + other.weight, min(self.low, other.low), max(self.high, other.high)
        )


@dataclass(frozen=True)
class DeviceWindow:
    uuid: str
    nvml_index: int  # of the physical GPU
    mig_slot: int | None  # which MIG instance of its parent, None for a whole GPU
    ordinal: int | None  # in the process that read it, None outside the visible set
    stats: Mapping[str, Stat]  # by reading; what gave no value is missing


@dataclass(frozen=True)
class RankWindow:
    """The devices of one rank in one window; ``node`` is the number of its machine."""

    node: int
    devices: tuple[DeviceWindow, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankWindow:
        """What ``asdict`` has made of a window, and JSON has brought here."""
        devices = (
            DeviceWindow(**{**each, "stats": {reading: Stat(**stat) for reading, stat in each["stats"].items()}})
            for each in data["devices"]
        )
        return cls(data["node"], tuple(devices))


class Fleet:
    """All monitored devices of a run: takes windows, names the figures, with ``node{n}/`` before if ``multi_node``.

    A device that several ranks watch counts once. Devices are named by CUDA ordinal; on a node where two would share
    one, because each rank sees only its own GPU, by NVML index, and MIG instances of one GPU by ``index.slot``.
    """

    def __init__(self, metrics: Sequence[Metric], *, multi_node: bool = False) -> None:
        self._metrics = tuple(metrics)
        self._multi_node = multi_node
        self._known: dict[tuple[int, str], DeviceWindow] = {}
        self._run: dict[tuple[int, str], dict[str, Stat]] = {}

    def add(self, ranks: Iterable[RankWindow]) -> dict[str, float]:
        """Take a window of some ranks into the run, and give its metrics by key."""
        window = self._by_device(ranks)
        for device, stats in window.items():
            merge(self._run.setdefault(device, {}), stats)
        return self._figures(window, self._metrics)

    def summary(self, still_open: RankWindow | None = None) -> dict[str, float]:
        """The metrics of the run so far, with a window ``still_open`` counted in that has not been added yet."""
        run = {device: dict(stats) for device, stats in self._run.items()}
        for device, stats in self._by_device([still_open] if still_open else []).items():
            merge(run.setdefault(device, {}), stats)
        return self._figures(run, with_summary(self._metrics))

    def _by_device(self, ranks: Iterable[RankWindow]) -> dict[tuple[int, str], dict[str, Stat]]:
        merged: dict[tuple[int, str], dict[str, Stat]] = {}
        for rank in ranks:
            for device in rank.devices:
                key = (rank.node, device.uuid)
                self._known.setdefault(key, device)
                merge(merged.setdefault(key, {}), device.stats)
        return merged

    def _figures(
        self, window: Mapping[tuple[int, str], Mapping[str, Stat]], metrics: Sequence[Metric]
    ) -> dict[str, float]:
        names = self._names()
        figures = {
            f"{names[device]}/{metric.key}": _statistic(stats[metric.reading], metric.statistic)
            for device, stats in window.items()
            for metric in metrics
            if metric.reading in stats
        }
        means = [stats["utilization"].mean for stats in window.values() if "utilization" in stats]
        if len(means) > 1 and any(metric.key == "utilization" for metric in metrics):
            figures["gpu/mean/utilization"] = sum(means) / len(means)
            figures["gpu/min/utilization"] = min(means)
            figures["gpu/imbalance"] = max(means) - min(means)
        return figures

    def _names(self) -> dict[tuple[int, str], str]:
        by_ordinal = {
            key: (key[0], device.nvml_index if device.ordinal is None else device.ordinal)
            for key, device in self._known.items()
        }
        crowded = {node for (node, _), count in Counter(by_ordinal.values()).items() if count > 1}
        shared = Counter((key[0], device.nvml_index) for key, device in self._known.items())
        names = {}
        for (node, uuid), device in self._known.items():
            number = str(by_ordinal[node, uuid][1])
            if node in crowded:
                number = str(device.nvml_index)
                if shared[node, device.nvml_index] > 1 and device.mig_slot is not None:
                    number += f".{device.mig_slot}"
            names[node, uuid] = f"node{node}/gpu/{number}" if self._multi_node else f"gpu/{number}"
        return names


def merge(into: dict[Key, Stat], stats: Mapping[Key, Stat]) -> None:
    """Take more values into those that are there, by reading."""
    for key, stat in stats.items():
        into[key] = into[key].merged(stat) if key in into else stat


def _statistic(stat: Stat, name: str) -> float:
    return {"mean": stat.mean, "min": stat.low, "max": stat.high}[name]

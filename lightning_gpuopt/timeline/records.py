"""The records of a trace that torch.profiler wrote, by their type: what ran on the GPU, and the host's calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["kernel", "collective", "copy", "call"]

_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS: Final = ("cuda_runtime", "cuda_driver")
"""Categories of kineto's trace (libkineto/src/ActivityType.cpp). Ranges and synchronizations that it draws on a GPU
have others: they are no work."""

_DIRECTIONS: Final = ("HtoD", "DtoH")


@dataclass(frozen=True, slots=True)
class Record:
    """One record, with times in seconds of one clock."""

    # "kernel", "collective" and "copy" (host and device) ran on the GPU; "call" is one of CUDA's runtime or driver
    kind: Kind
    name: str  # of the kernel, the copy or the function
    start_s: float
    end_s: float
    correlation: int = 0  # ties a call to what it issued; 0: not known
    stream: int = 0  # where it ran on the GPU
    bytes: int = 0  # of a copy; 0: not known
    thread: int = 0  # that made a call

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def records_of(trace: Mapping[str, Any], device: int, shift_s: float) -> Iterator[Record]:
    """Read what ran on a CUDA ordinal, from a trace in Chrome's format; ``shift_s`` is added to ``time.time``."""
    base_s = trace.get("baseTimeNanoseconds", 0) / 1e9 + shift_s
    for each in trace.get("traceEvents", ()):
        category = each.get("cat")
        if each.get("ph") != "X" or (category not in _ON_DEVICE and category not in _CALLS):
            continue
        arguments = each.get("args", {})
        name, start_s = str(each.get("name", "")), base_s + float(each["ts"]) / 1e6
        kind: Kind = "call"
        if category in _ON_DEVICE:
            if arguments.get("device", device) != device:
                continue
            kind = _kind_on_device(category, name)
        yield Record(
            kind,
            name,
            start_s,
            start_s + float(each.get("dur", 0.0)) / 1e6,
            int(arguments.get("correlation", 0)),
            int(arguments.get("stream", 0)) if kind != "call" else 0,
            int(arguments.get("bytes", 0)) if kind == "copy" else 0,
            int(each.get("tid", 0)) if kind == "call" else 0,
        )


def _kind_on_device(category: str, name: str) -> Kind:
    if category == "gpu_memcpy":  # a copy on the device, or between devices, is its work
        return "copy" if any(each in name for each in _DIRECTIONS) else "kernel"
    return "collective" if name.lower().startswith(("nccl", "rccl")) else "kernel"

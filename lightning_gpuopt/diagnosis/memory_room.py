"""How much memory is left, when it is used up, and both in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from lightning_gpuopt.measurements.flight import MemoryReading

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


@dataclass(frozen=True)
class MemoryRoom:
    """The tighter of what a memory cgroup and the machine leave, in bytes."""

    kind: Literal["memory cgroup", "machine"]
    free: int
    limit: int | None  # None if only what is left is known

    @property
    def text(self) -> str:
        """``"the memory cgroup's limit of 64 GiB"``."""
        of = (
            f"limit of {size(self.limit)}" if self.limit is not None else f"memory, of which {size(self.free)} are left"
        )
        return f"the {self.kind}'s {of}"

    @property
    def evidence(self) -> dict[str, float | str]:
        known = {} if self.limit is None else {"limit_gib": round(self.limit / GIB, 3)}
        return {"limit": self.kind, **known, "left_gib": round(self.free / GIB, 3)}


def room_of(readings: Iterable[MemoryReading], machine_bytes: int | None) -> MemoryRoom | None:
    """What is left by the last of these readings (oldest first) that knows; None if none does."""
    found: dict[str, MemoryRoom] = {}
    for each in readings:
        if each.limit is not None and each.current is not None:
            used = each.current - (each.cache or 0)
            found["cgroup"] = MemoryRoom("memory cgroup", max(each.limit - used, 0), each.limit)
        if each.available is not None:
            found["machine"] = MemoryRoom("machine", each.available, machine_bytes)
    return min(found.values(), key=lambda room: room.free, default=None)


def size(bytes_: float) -> str:
    """Bytes with three digits: ``"4.1 KiB"``, ``"190 MiB"``, ``"64 GiB"``."""
    unit, name = next(((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB")) if bytes_ >= unit), (KIB, "KiB"))
    value = bytes_ / unit
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def duration(seconds: float) -> str:
    """How long it takes until then: ``"about 40 minutes"``."""
    if seconds < 90:
        return f"about {max(math.ceil(seconds / 10) * 10, 10)} seconds"
    for unit_s, name in ((60, "minutes"), (3600, "hours")):
        if seconds < 90 * unit_s if name == "minutes" else seconds < 48 * unit_s:
            return f"about {seconds / unit_s:.0f} {name}"
    return f"about {seconds / 86400:.0f} days"

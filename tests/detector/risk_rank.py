"""One rank of those whose risks go to rank 0."""

from __future__ import annotations

from typing import Any

from lightning_gpuopt.detector.risk_watch import RiskWatch
from lightning_gpuopt.diagnosis.record import Risk
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import RiskInputs
from tests.ranks import join

MIB = 1 << 20


def with_files(opened: int) -> RiskInputs:
    return RiskInputs(rank=tuple(MemoryReading(float(at), files=opened, files_limit=1024) for at in range(20)))


def growing(leak: str) -> RiskInputs:
    rank = tuple(MemoryReading(float(second), rss=(500 + 10 * second) * MIB) for second in range(60))
    return RiskInputs(rank=rank, grows=leak)


def risks() -> dict[str, Any]:
    """Ranks 1 and 2 leak; all but rank 1 have many files open."""
    rank, world_size = join()
    warned: list[Risk] = []
    watch = RiskWatch(list, rank, world_size, warned.append)
    if rank:
        watch.look(growing(f"list of rank {rank}"))
    if rank != 1:
        watch.look(with_files(1000 - rank))
    watch.send()
    watch.close(60.0)
    return {
        "risks": [[each.risk, each.text, each.evidence.get("on_ranks")] for each in watch.risks],
        "warned": [each.risk for each in warned],
    }

"""What holds several ranks up: one that is slower than the others, and collectives that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final

from lightning_gpuopt.diagnosis.causes.common import finding_of, per_step
from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.ranks import RankWork

# a rank whose batches take this much longer has slower data; one that waits in everybody's stead does not
_SLOWER_LOADER: Final = 1.3
_LARGER_BATCHES: Final = 1.2  # batches that are so many times as large as the others' are why a rank is slower
_MIB: Final = 1024 * 1024

_HOOKS: Final = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

# kind of work, the slowest rank in it, by how many seconds of a step, and how many the others need
_Excess = tuple[str, RankWork, float, float]


def straggler(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """The rank whose own work takes longest, if it is slower than the others."""
    waterfall, ranks = measurement.waterfall, measurement.ranks
    if len(ranks) < 2:
        return
    kind, slowest, excess_s, others_s = max(_excesses(ranks), key=lambda candidate: candidate[2])
    if kind == "data" and not _has_slower_loader(slowest, ranks):
        return
    seconds, sizes = excess_s * waterfall.steps, _larger_batches(slowest, ranks)
    if waterfall.share(seconds) < threshold:
        return
    about = CAUSES["straggler"].cases["sizes" if sizes else kind].format(**sizes)
    evidence: dict[str, float | str] = {
        "rank": slowest.rank,
        "kind": kind,
        "ms_per_step": round((others_s + excess_s) * 1e3, 3),
        "ms_per_step_elsewhere": round(others_s * 1e3, 3),
    }
    advice = CAUSES["straggler"].advice.format(rank=slowest.rank) + about
    yield finding_of("straggler", seconds, measurement, evidence | sizes, advice)


def _larger_batches(slowest: RankWork, ranks: tuple[RankWork, ...]) -> dict[str, float | str]:
    """The sizes of its batches and of the others', where those of the slowest rank are larger; else nothing."""
    others = [rank.batch_bytes for rank in ranks if rank is not slowest and rank.batch_bytes]
    if not slowest.batch_bytes or not others:
        return {}
    elsewhere = statistics.median(others)
    if slowest.batch_bytes < _LARGER_BATCHES * elsewhere:
        return {}
    return {"batch_mib": round(slowest.batch_bytes / _MIB, 4), "batch_mib_elsewhere": round(elsewhere / _MIB, 4)}


def communication(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Collectives that nothing hides: by the rank that waits least in them, since others wait for a slower one."""
    waterfall, exposed_s = measurement.waterfall, measurement.communication_s
    if exposed_s is None:
        return
    looked = sum(rank.communication_s is not None for rank in measurement.ranks)
    alone = waterfall.on_gpu and len(measurement.ranks) > 1 >= looked
    if alone:  # the wait for a slower rank is in it
        slower_s = (excess_s for _, rank, excess_s, _ in _excesses(measurement.ranks) if rank.communication_s is None)
        exposed_s = max(exposed_s - max(slower_s, default=0.0), 0.0)
    seconds = exposed_s * waterfall.steps
    if waterfall.share(seconds) < threshold:
        return
    evidence = per_step(seconds, measurement) | {"exposed_ms_per_step": round(exposed_s * 1e3, 3)} | _sent(measurement)
    advice = _send_less(measurement) + (CAUSES["communication"].cases["one_look"] if alone else "")
    yield finding_of("communication", seconds, measurement, evidence, advice)


def _sent(measurement: Measurement) -> dict[str, float | str]:
    """What the reduction of gradients sends, and how, as far as it is known."""
    known = measurement.gradients
    if known is None:
        return {}
    evidence: dict[str, float | str | None] = {
        "gradient_mib": round(known.bytes / _MIB, 3) if known.bytes else None,
        "buckets": known.buckets,
        "gradient_dtype": known.dtype or None,
        "comm_hook": known.hook or None,
        "link": known.link or None,
        "find_unused_parameters": _as_text(known.find_unused_parameters),
        "gradient_as_bucket_view": _as_text(known.bucket_view),
        "static_graph": _as_text(known.static_graph),
        "accumulate_grad_batches": known.accumulate_grad_batches,
        "metric": ", ".join(_metrics_in_forward(measurement)) or None,
    }
    return {name: value for name, value in evidence.items() if value is not None}


def _metrics_in_forward(measurement: Measurement) -> tuple[str, ...]:
    look, metrics = measurement.look, measurement.metrics
    return metrics.names if look is not None and look.forward_collectives else ()


def _as_text(value: bool | None) -> str | None:
    return None if value is None else str(value)


def _send_less(measurement: Measurement) -> str:
    """What there is to do about collectives, the surest first."""
    known = measurement.gradients
    if known is None:
        return CAUSES["communication"].advice
    todo = []
    if names := _metrics_in_forward(measurement):
        todo.append(f"reduce {', '.join(names)} once an epoch (self.log: on_step=False, on_epoch=True)")
    if known.find_unused_parameters and not known.unused:
        none = "no parameter was unused" if known.unused is False else "if every parameter is used"
        todo.append(f"remove find_unused_parameters=True ({none}; static_graph=True does not need it either)")
    # on the CPU Lightning does not register a hook
    if measurement.waterfall.on_gpu and known.dtype == "float32" and not known.hook and known.bytes:
        todo.append(f"send half as many bytes with DDPStrategy(ddp_comm_hook=bf16_compress_hook), from {_HOOKS}")
    if known.bucket_view is False:
        todo.append("save a copy of all gradients with DDPStrategy(gradient_as_bucket_view=True)")
    batches = 2 * known.accumulate_grad_batches
    todo.append(f"reduce them half as often with accumulate_grad_batches={batches}")
    todo.append("give each rank larger batches")
    link = f" ({known.link})" if known.link else ""
    return (
        "Collectives between ranks are not hidden behind computation. To wait less for them: "
        f"{'; '.join(todo)}; and check that the ranks' links are fast{link}."
    )


def _excesses(ranks: tuple[RankWork, ...]) -> list[_Excess]:
    found = [_slowest(ranks, "data", lambda rank: rank.data_wait_s)]
    if any(rank.forward_s is None for rank in ranks):
        found.append(_slowest(ranks, "compute", lambda rank: rank.compute_s))
    else:
        found.append(_slowest_forward(ranks))
    waits = {rank.rank: rank.communication_s for rank in ranks if rank.communication_s is not None}
    if len(waits) == len(ranks) and any(rank.forward_s is None for rank in ranks):
        found.append(_least_waiting(ranks, waits))
    return found


def _slowest(ranks: tuple[RankWork, ...], kind: str, seconds: Callable[[RankWork], float]) -> _Excess:
    """The slowest rank in one kind of work, by how much, and what the others need."""
    slowest = max(ranks, key=seconds)
    others_s = statistics.median(seconds(rank) for rank in ranks if rank is not slowest)
    return kind, slowest, seconds(slowest) - others_s, others_s


def _slowest_forward(ranks: tuple[RankWork, ...]) -> _Excess:
    """The slowest rank by compute and forward together.

    Its forward may contain a wait for a rank that still loads: then their sums with the data wait are even. So the
    lesser of both excesses counts.
    """
    work_s = {rank.rank: rank.compute_s + (rank.forward_s or 0.0) for rank in ranks}
    kind, slowest, excess_s, others_s = _slowest(ranks, "compute", lambda rank: work_s[rank.rank])
    others = statistics.median(rank.data_wait_s + work_s[rank.rank] for rank in ranks if rank is not slowest)
    return kind, slowest, min(excess_s, slowest.data_wait_s + work_s[slowest.rank] - others), others_s


def _least_waiting(ranks: tuple[RankWork, ...], waits: dict[int, float]) -> _Excess:
    """The rank that waits least in collectives: the others wait for it there."""
    slowest = min(ranks, key=lambda rank: waits[rank.rank])
    others = [rank for rank in ranks if rank is not slowest]
    excess_s = statistics.median(waits[rank.rank] for rank in others) - waits[slowest.rank]
    # what its own idle time explains is found there, with its right kind
    before_s = slowest.data_wait_s + slowest.compute_s
    excess_s -= max(before_s - statistics.median(rank.data_wait_s + rank.compute_s for rank in others), 0.0)
    return "compute", slowest, excess_s, statistics.median(rank.compute_s for rank in others)


def _has_slower_loader(slowest: RankWork, ranks: tuple[RankWork, ...]) -> bool:
    others = [rank.loader_s for rank in ranks if rank is not slowest and rank.loader_s is not None]
    if slowest.loader_s is None or not others:
        return True
    return slowest.loader_s >= _SLOWER_LOADER * statistics.median(others)

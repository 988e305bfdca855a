"""What a run would be like with other workers, CPUs, decoding or batches: simulated from what it measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.simulate import Pace, Pipeline, shape_of, simulate
from lightning_gpuopt.measurements.loader_costs import Interval, LoaderCosts
from lightning_gpuopt.measurements.loader_model import STEP_SPREAD

Limit = Literal["step", "workers", "cpus", "handing_over", "order", "training_process"]

_OWN_WORK: Final = 1.05  # a step that takes no more than this over its own work is limited by that
_IN_USE: Final = 0.9  # workers, or CPUs, of whose time this share is used are the limit
_EXPLAINS: Final = 0.1  # what is simulated of the run as it was may be off by so much before it is said


_MIN_CPUS: Final = 0.1  # CPUs that the run gets at worst where others were measured to use all
_FEW: Final = 30  # batches below which it is said that there were few


class CannotSayError(ValueError):
    """The report lacks what an answer needs; ``remedy`` is what to do about it."""

    def __init__(self, text: str, remedy: str = "record one with StallDetector and give that") -> None:
        super().__init__(text)
        self.remedy = remedy


@dataclass(frozen=True)
class WhatIf:
    """What is to be changed; None stays as it is."""

    num_workers: int | None = None  # 0: the training process loads by itself
    prefetch_factor: int | None = None
    cpus: float | None = None  # that the run may use
    decode_speedup: float | None = None  # the dataset's CPU time is divided by it
    batch_size: int | None = None


@dataclass(frozen=True)
class Forecast:
    """A run as it was, and as it would be; intervals are (low, mid, high)."""

    measured_step_s: float
    simulated_step_s: float  # the same run, simulated: how well the simulation knows it
    step_s: Interval  # (optimistic, expected, pessimistic)
    speedup: Interval  # samples per second, after over before
    limit_before: Limit
    limit: Limit
    before: dict[str, float]  # settings; what is not known is absent
    after: dict[str, float]
    notes: list[str]  # what is not known, and what was assumed for it


def what_if(report: RunRecord, change: WhatIf) -> Forecast:
    """Forecast a run with a ``DataLoader``; CannotSayError where the report lacks something.

    With another batch size the step takes between as long as now and longer in proportion; the loader's part is in
    proportion.
    """
    costs, measured_s, now, then = pipelines(report, change)
    pace = simulate(now[1])
    after = [simulate(each) for each in then]
    low_s, mid_s, high_s = sorted(each.step_s for each in after)
    samples = batch_factor(report, change)
    return Forecast(
        measured_step_s=measured_s,
        simulated_step_s=pace.step_s,
        step_s=(low_s, mid_s, high_s),
        speedup=(samples * measured_s / high_s, samples * measured_s / mid_s, samples * measured_s / low_s),
        limit_before=limit_of(now[1], pace),
        limit=limit_of(then[1], after[1]),
        before=_settings(report, costs, WhatIf()),
        after=_settings(report, costs, change),
        notes=notes_on(report, costs, change) + off_notes(pace.step_s, measured_s),
    )


def pipelines(report: RunRecord, change: WhatIf) -> tuple[LoaderCosts, float, list[Pipeline], list[Pipeline]]:
    """What a run's loader costs, its step in seconds, and the run before and after: at best, as expected, at worst.

    Raises CannotSayError where the report lacks something.
    """
    costs, measured_s = report.loader_costs, report.step_s
    if costs is None or not measured_s:
        raise CannotSayError(
            "expected a report that says what its loader costs, got one that does not: it is of an earlier version, "
            "its loader is no DataLoader, or no step came after the warm-up"
        )
    factor = batch_factor(report, change)
    now = [_pipeline(costs, side) for side in _SIDES]
    if costs.num_workers:
        now = _with_what_is_not_explained(now, measured_s)
    return (
        costs,
        measured_s,
        now,
        [_changed(each, costs, change, factor, side) for each, side in zip(now, _SIDES, strict=True)],
    )


@dataclass(frozen=True)
class _Side:
    """How things turn out: at best, as expected, at worst."""

    index: int
    sign: int


_SIDES: Final = (_Side(0, -1), _Side(1, 0), _Side(2, 1))


def _pipeline(costs: LoaderCosts, side: _Side) -> Pipeline:
    """The run as it was."""
    worker = 1 + side.sign * costs.spread
    return Pipeline(
        workers=costs.num_workers,
        prefetch_factor=costs.prefetch_factor or 2,
        service_s=costs.batch_s * worker,
        cpu_s=costs.worker_cpu_s * worker,
        receive_s=costs.receive_s[side.index],
        receive_cpu_s=costs.receive_s[side.index],
        consumer_s=costs.consumer_s * (1 + side.sign * STEP_SPREAD),
        consumer_cpu_s=costs.consumer_cpu_s or 0.0,
        cpus=_cpus(costs, WhatIf(), side),
        shape=shape_of(costs.edges_s, costs.counts),
    )


def _with_what_is_not_explained(now: list[Pipeline], measured_s: float) -> list[Pipeline]:
    """The run as it was, with step time that the model does not explain counted as hand-over time.

    Nothing is added where workers or CPUs are the limit. The best case stays as it is: the unexplained time may lie in
    the workers, and go away with more of them.
    """
    best, mid, worst = now
    pace = simulate(mid)
    if pace.workers_busy >= _IN_USE or pace.cpus_busy >= _IN_USE:
        return now
    receive_s = max(mid.receive_s + measured_s - pace.step_s, best.receive_s)
    mid = replace(mid, receive_s=receive_s, receive_cpu_s=min(mid.receive_cpu_s, receive_s))
    return [best, mid, replace(worst, receive_s=max(receive_s, worst.receive_s))]


def _changed(now: Pipeline, costs: LoaderCosts, change: WhatIf, factor: float, side: _Side) -> Pipeline:
    workers = now.workers if change.num_workers is None else change.num_workers
    prefetch = now.prefetch_factor if change.prefetch_factor is None else change.prefetch_factor
    then = replace(now, workers=workers, prefetch_factor=prefetch, cpus=_cpus(costs, change, side))
    if change.decode_speedup is not None:
        saved_s = costs.data_cpu_s * (1 - 1 / change.decode_speedup)
        then = replace(then, service_s=max(then.service_s - saved_s, 0.0), cpu_s=max(then.cpu_s - saved_s, 0.0))
    if factor != 1:
        step = (min(factor, 1.0), (1 + factor) / 2, max(factor, 1.0))[side.index]
        then = replace(
            then,
            service_s=then.service_s * factor,
            cpu_s=then.cpu_s * factor,
            receive_s=then.receive_s * max(factor, 1.0) if side.sign > 0 else then.receive_s,
            consumer_s=then.consumer_s * step,
            consumer_cpu_s=then.consumer_cpu_s * step,
        )
    return then


def _cpus(costs: LoaderCosts, change: WhatIf, side: _Side) -> float:
    """CPUs that the run gets: at worst other processes keep theirs, at best they leave all.

    Expected is the worst case, but at least half of all: a scheduler gives CPUs to those who ask. Fewer CPUs than now
    are first taken from the others; additional ones count as free.
    """
    usable, free = costs.usable_cpus, costs.free_cpus
    if usable is None or free is None:
        return change.cpus if change.cpus is not None else float("inf")
    most = change.cpus if change.cpus is not None else usable
    least = min(most, max(free + max(most - usable, 0.0), _MIN_CPUS))
    return (most, max(least, most / 2), least)[side.index]


def limit_of(pipeline: Pipeline, pace: Pace) -> Limit:
    """What limits the pace of the steps."""
    if pace.step_s <= _OWN_WORK * pipeline.consumer_s:
        return "step"
    if pace.cpus_busy >= _IN_USE:
        return "cpus"
    if not pipeline.workers:
        return "training_process"
    if pace.workers_busy >= _IN_USE:
        return "workers"
    return "handing_over" if 2 * pipeline.receive_s >= pace.step_s - pipeline.consumer_s else "order"


def _batch_size(report: RunRecord) -> int | None:
    text = report.environment.get("batch_size", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def batch_factor(report: RunRecord, change: WhatIf) -> float:
    """Samples of a batch, after over before; CannotSayError where the report does not say what they were."""
    if change.batch_size is None:
        return 1.0
    size = _batch_size(report)
    if size is None:
        raise CannotSayError("expected a report that says how many samples are in a batch, got one that does not")
    return change.batch_size / size


def _settings(report: RunRecord, costs: LoaderCosts, change: WhatIf) -> dict[str, float]:
    workers = costs.num_workers if change.num_workers is None else change.num_workers
    known: dict[str, float | None] = {
        "num_workers": workers,
        "prefetch_factor": (change.prefetch_factor or costs.prefetch_factor or 2) if workers else None,
        "cpus": change.cpus or costs.usable_cpus,
        "decode_speedup": change.decode_speedup,
        "batch_size": change.batch_size or _batch_size(report),
    }
    return {name: value for name, value in known.items() if value is not None}


def off_notes(simulated_s: float, measured_s: float) -> list[str]:
    """That the simulation of the run as it was is off, where it is."""
    off = simulated_s / measured_s - 1
    if abs(off) <= _EXPLAINS:
        return []
    return [
        f"The simulation of the run as it was is {abs(off) * 100:.0f} % {'slower' if off > 0 else 'faster'} than "
        "the run: it does not know all that happens there."
    ]


def notes_on(report: RunRecord, costs: LoaderCosts, change: WhatIf) -> list[str]:
    """What is not known of a run, and what is assumed for it."""
    notes = []
    if costs.usable_cpus is None and change.cpus is None:
        notes.append("How many CPUs there are was not measured: enough are assumed.")
    if costs.consumer_cpu_s is None:
        notes.append("What the training process takes of the CPUs was not measured: nothing is assumed.")
    if not costs.num_workers and change.num_workers:
        notes.append(
            "What handing a batch over costs was not measured in a run without workers: "
            f"{costs.receive_s[1] * 1e3:.1f} ms is assumed."
        )
    if costs.batches < _FEW:
        notes.append(f"Only {costs.batches} batches were measured: slow ones among them may have been missed.")
    if report.loader.duplicates and change.num_workers and change.num_workers > 1:
        notes.append("This IterableDataset does not divide its samples: each worker would give all of them.")
    return notes

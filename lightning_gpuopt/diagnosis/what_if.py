"""What a run would be like with other workers, CPUs, decoding or batches, by the model of its loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.measurements.loader_costs import Interval, LoaderCosts
from lightning_gpuopt.measurements.loader_model import IN_USE, LoaderModel, model_from

Limit = Literal["step", "workers", "cpus", "handing_over", "order", "training_process"]

_OWN_WORK: Final = 1.05  # a step that takes no more than this over its own work is limited by that
_EXPLAINS: Final = 0.1  # what is simulated of the run as it was may be off by so much before it is said

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


@dataclass(frozen=True)
class Run:
    """A run as it was, and as it would be at best, as expected and at worst."""

    measured_s: float
    simulated_s: float  # the same, by the model
    now: LoaderModel
    then: tuple[LoaderModel, ...]
    workers: int
    prefetch_factor: int

    def paces(self, then: Sequence[LoaderModel] = ()) -> list[float]:
        """Seconds of a step as it would be, or with these models."""
        return [each.pace(self.workers, self.prefetch_factor, side) for side, each in enumerate(then or self.then)]


def what_if(report: RunRecord, change: WhatIf) -> Forecast:
    """Forecast a run with a ``DataLoader``; CannotSayError if the report lacks something.

    With another batch size the loader takes longer in proportion; the step between that and as long as now.
    """
    run, costs = run_of(report, change), report.loader_costs
    assert costs is not None
    paces, samples = run.paces(), batch_factor(report, change)
    low_s, mid_s, high_s = sorted(paces)
    return Forecast(
        measured_step_s=run.measured_s,
        simulated_step_s=run.simulated_s,
        step_s=(low_s, mid_s, high_s),
        speedup=(samples * run.measured_s / high_s, samples * run.measured_s / mid_s, samples * run.measured_s / low_s),
        limit_before=limit_of(run.now, costs.num_workers, run.simulated_s),
        limit=limit_of(run.then[1], run.workers, paces[1]),
        before=_settings(report, costs, WhatIf()),
        after=_settings(report, costs, change),
        notes=notes_on(report, run, change),
    )


def run_of(report: RunRecord, change: WhatIf) -> Run:
    """A run before and after a change; CannotSayError if the report lacks something."""
    costs, measured_s = report.loader_costs, report.step_s
    if costs is None or not measured_s:
        raise CannotSayError(
            "expected a report that says what its loader costs, got one that does not: it is from an earlier version, "
            "its loader is not a DataLoader, or no step came after the warm-up"
        )
    before = costs.num_workers, costs.prefetch_factor or 2
    now = model_from(costs).explaining(measured_s, *before)
    return Run(
        measured_s,
        now.pace(*before),
        now,
        tuple(_changed(now, costs, change, batch_factor(report, change), side) for side in range(3)),
        costs.num_workers if change.num_workers is None else change.num_workers,
        change.prefetch_factor or before[1],
    )


def _changed(now: LoaderModel, costs: LoaderCosts, change: WhatIf, factor: float, side: int) -> LoaderModel:
    saved_s = costs.data_cpu_s * (1 - 1 / (change.decode_speedup or 1.0))
    step = (min(factor, 1.0), (1 + factor) / 2, max(factor, 1.0))[side]
    low, mid, high = now.receive_s
    return replace(
        now,
        cpus=model_from(costs, change.cpus).cpus,
        service_s=max(now.service_s - saved_s, 0.0) * factor,
        cpu_s=max(now.cpu_s - saved_s, 0.0) * factor,
        receive_s=(low, mid, high * max(factor, 1.0)),
        consumer_s=now.consumer_s * step,
        consumer_cpu_s=now.consumer_cpu_s * step,
    )


def limit_of(model: LoaderModel, workers: int, step_s: float) -> Limit:
    workers_used, cpus_used = model.in_use(workers, step_s)
    if step_s <= _OWN_WORK * model.consumer_s:
        return "step"
    if cpus_used >= IN_USE:
        return "cpus"
    if not workers:
        return "training_process"
    if workers_used >= IN_USE:
        return "workers"
    return "handing_over" if 2 * model.receive_s[1] >= step_s - model.consumer_s else "order"


def count_of(report: RunRecord, name: str) -> int | None:
    """A number above zero of a run's environment; None if it is not in the report."""
    text = report.environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 18 and int(text) > 0 else None


def batch_factor(report: RunRecord, change: WhatIf) -> float:
    """Samples of a batch, after over before; CannotSayError if the report does not say what they were."""
    if change.batch_size is None:
        return 1.0
    size = count_of(report, "batch_size")
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
        "batch_size": change.batch_size or count_of(report, "batch_size"),
    }
    return {name: value for name, value in known.items() if value is not None}


def notes_on(report: RunRecord, run: Run, change: WhatIf) -> list[str]:
    """What is not known of a run, and what is assumed for it."""
    costs, notes = report.loader_costs, list[str]()
    if costs is None:
        return ["What the loader costs is not in the report: it is assumed that the loaders keep up with more GPUs."]
    if costs.usable_cpus is None and change.cpus is None:
        notes.append("The number of CPUs was not measured: enough are assumed.")
    if costs.consumer_cpu_s is None:
        notes.append("The training process's CPU use was not measured: none is assumed.")
    if not costs.num_workers and change.num_workers:
        notes.append(
            f"A run without workers does not measure the cost of transferring a batch: {costs.receive_s[1] * 1e3:.1f} "
            "ms is assumed."
        )
    if costs.batches < _FEW:
        notes.append(f"Only {costs.batches} batches were measured: slow ones among them may have been missed.")
    if report.loader.duplicates and change.num_workers and change.num_workers > 1:
        notes.append("This IterableDataset does not divide its samples: each worker would yield all of them.")
    off = run.simulated_s / run.measured_s - 1
    if abs(off) > _EXPLAINS:
        notes.append(
            f"The simulation of the measured run is {abs(off) * 100:.0f} % {'slower' if off > 0 else 'faster'} than "
            "the run: it does not model everything that happens there."
        )
    return notes

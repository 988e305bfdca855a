"""What several GPUs would bring for a run on one: the reduction of gradients, and loaders that share the CPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_gpuopt.diagnosis import what_if
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loader_model import STEP_SPREAD, LoaderModel

_BUCKET_BYTES: Final = 25 << 20  # DDP's default ``bucket_cap_mb``
_BACKWARD: Final = 2 / 3  # share of a step's own work that the backward pass takes, beside which gradients are reduced
# what DDP's hooks, Lightning's broadcast before each step, and the wait for the slowest rank take of a step
_STEP_OVERHEAD_S: Final[Interval] = (1e-4, 4e-4, 1e-3)
_AS_IT_IS: Final = what_if.WhatIf()

_COUNTS: Final = 0.05  # from this share of a step's own work on the reduction is what limits it


@dataclass(frozen=True)
class Link:
    """What links the GPUs; intervals are (low, mid, high)."""

    name: str  # for people
    gb_per_s: Interval  # of a ring, in each direction; 1e9 bytes
    latency_s: Interval  # what a collective takes beside its bytes
    own_cpus: bool = False  # whether each GPU is on a machine of its own


# links where none is given: NVLink 3-4, PCIe 3-5 x16 with and without peer copies, Ethernet of 10, 25, 100 Gbit/s
ASSUMED: Final = (
    Link("NVLink", (80.0, 150.0, 300.0), (1.5e-5, 3e-5, 6e-5)),
    Link("PCIe", (6.0, 12.0, 24.0), (3e-5, 5e-5, 1e-4)),
    Link("network", (1.0, 2.5, 10.0), (5e-5, 1e-4, 3e-4), own_cpus=True),
)


def given_link(gb_per_s: float) -> Link:
    return Link("given link", (gb_per_s, gb_per_s, gb_per_s), (2e-5, 5e-5, 2e-4))


@dataclass(frozen=True)
class LinkForecast:
    """A run on several GPUs over one kind of link; intervals are (low, mid, high)."""

    link: Link
    exposed_s: Interval  # what a step takes longer: reduction that nothing hides, and overhead
    step_s: Interval
    speedup: Interval  # samples per second, on all GPUs over on one
    linear_percent: float  # expected speed-up over the number of GPUs
    slower_below_s: Interval  # own work of a step below which all GPUs are slower than one
    limit: what_if.Limit | Literal["reduction"]


@dataclass(frozen=True)
class Scaling:
    ranks: int  # GPUs, with a process and a loader each
    gradient_bytes: int  # reduced by a step
    buckets: int  # collectives in which it does
    measured_step_s: float
    own_step_s: float  # the step's own work
    cpus_per_rank: float | None  # where the GPUs are in one machine; None: not measured
    links: list[LinkForecast]
    notes: list[str]  # what is not known, and what was assumed for it


def scaling(
    report: RunRecord,
    ranks: int,
    change: what_if.WhatIf = _AS_IT_IS,
    *,
    link: Link | None = None,
    gradient_bytes: int | None = None,
) -> Scaling:
    """A one-GPU run on ``ranks`` (2 or more) GPUs; CannotSayError if the report is of several or lacks something.

    ``change.cpus`` are those of a machine, for all of its ranks. Without a link each of :data:`ASSUMED` is forecast;
    without ``gradient_bytes`` the report's count.
    """
    measured_s = _step_on_one_gpu(report)
    size = gradient_bytes if gradient_bytes is not None else _gradient_bytes(report)
    costs, own_share = report.loader_costs, 1.0
    if costs is not None or change != _AS_IT_IS:
        run = what_if.run_of(report, change)
    else:  # nothing is known of the loader
        own_share -= report.headroom or 0.0
        model = LoaderModel(0.0, 0.0, measured_s, 0.0, (math.inf,) * 3)
        run = what_if.Run(measured_s, measured_s, model, (model,) * 3, 0, 2)
    cpus = run.then[1].cpus[1] / ranks
    links = [link] if link is not None else ASSUMED
    return Scaling(
        ranks=ranks,
        gradient_bytes=size,
        buckets=_buckets(size),
        measured_step_s=measured_s,
        own_step_s=costs.consumer_s if costs is not None else measured_s * own_share,
        cpus_per_rank=cpus if math.isfinite(cpus) else None,
        links=[_over(each, ranks, size, report, change, run, own_share) for each in links],
        notes=what_if.notes_on(report, run, change),
    )


def _over(
    link: Link, ranks: int, size: int, report: RunRecord, change: what_if.WhatIf, run: what_if.Run, own_share: float
) -> LinkForecast:
    """The run over one kind of link; ``own_share`` is the part of a step that is its own work."""
    batches = what_if.count_of(report, "accumulate_grad_batches") or 1
    own_s = [model.consumer_s * own_share for model in run.then]
    reduced = [_reduced(link, ranks, size, batches, side, own_s[side]) for side in range(3)]
    exposed = [exposed_s for exposed_s, _ in reduced]
    low, mid, high = (each / (1 if link.own_cpus else ranks) for each in run.then[1].cpus)
    then = [
        replace(model, consumer_s=model.consumer_s + exposed_s / (1 + sign * STEP_SPREAD), cpus=(low, mid, high))
        for model, exposed_s, sign in zip(run.then, exposed, (-1, 0, 1), strict=True)
    ]
    paces = run.paces(then)
    low_s, mid_s, high_s = sorted(paces)
    most = 1.0 if change == _AS_IT_IS else math.inf  # a GPU among several is no faster than the one
    samples = what_if.batch_factor(report, change) * run.measured_s
    low, mid, high = (ranks * min(samples / each, most) for each in (high_s, mid_s, low_s))
    limit: what_if.Limit | Literal["reduction"] = what_if.limit_of(then[1], run.workers, paces[1])
    if limit == "step" and exposed[1] > _COUNTS * run.then[1].consumer_s:
        limit = "reduction"
    return LinkForecast(
        link=link,
        exposed_s=_interval(exposed),
        step_s=(low_s, mid_s, high_s),
        speedup=(low, mid, high),
        linear_percent=100 * mid / ranks,
        slower_below_s=_interval([below_s for _, below_s in reduced]),
        limit=limit,
    )


def _reduced(link: Link, ranks: int, size: int, batches: int, side: int, own_s: float) -> tuple[float, float]:
    """Seconds that a batch with so much own work takes longer; own work below which several GPUs are slower than one.

    A ring: each GPU sends and receives ``2 (n - 1) / n`` of the bytes, once in so many batches. At best the link is at
    its fastest. Beside the last bucket no backward pass runs.
    """
    buckets, overhead_s = _buckets(size), _STEP_OVERHEAD_S[side]
    sent = 2 * (ranks - 1) / ranks * size / buckets
    bucket_s = sent / (link.gb_per_s[2 - side] * 1e9) + link.latency_s[side]
    exposed_s = max(bucket_s, buckets * bucket_s - _BACKWARD * own_s) / batches + overhead_s
    unhidden_s = (bucket_s / batches + overhead_s) / (ranks - 1)
    hidden_s = (buckets * bucket_s / batches + overhead_s) / (ranks - 1 + _BACKWARD / batches)
    return exposed_s, max(unhidden_s, hidden_s)


def _buckets(size: int) -> int:
    return max(math.ceil(size / _BUCKET_BYTES), 1)


def _interval(sides: list[float]) -> Interval:
    low, mid, high = sorted(sides)
    return low, mid, high


def _step_on_one_gpu(report: RunRecord) -> float:
    device, ranks = report.environment.get("device", "unknown"), report.environment.get("ranks", "unknown")
    if not device.startswith("cuda") or ranks != "1":
        count = "1 rank" if ranks == "1" else f"{ranks} ranks"
        raise what_if.CannotSayError(f"expected a report of a run on one GPU, got one of {count} on {device}")
    if not report.step_s:
        raise what_if.CannotSayError("expected a report with a step after the warm-up, got one without")
    return report.step_s


def _gradient_bytes(report: RunRecord) -> int:
    known = what_if.count_of(report, "gradient_bytes")
    if known is None:
        raise what_if.CannotSayError(
            "expected a report that says how many bytes of gradients a step has, got one that does not",
            "give --gradient-bytes: in float32, four per trained parameter",
        )
    return known

"""What several GPUs would bring for a run on one: the reduction of gradients, and loaders that share the CPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.simulate import Pipeline, simulate
from lightning_gpuopt.diagnosis.what_if import (
    CannotSayError,
    Limit,
    WhatIf,
    batch_factor,
    limit_of,
    notes_on,
    off_notes,
    pipelines,
)
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loader_model import STEP_SPREAD

_BUCKET_BYTES: Final = 25 << 20  # DDP's default ``bucket_cap_mb``
_BACKWARD: Final = 2 / 3  # share of a step's own work that the backward pass takes, beside which gradients are reduced
# what DDP's hooks, Lightning's broadcast before each step, and the wait for the slowest rank take of a step
_STEP_OVERHEAD_S: Final[Interval] = (1e-4, 4e-4, 1e-3)
_AS_IT_IS: Final = WhatIf()

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
    """A link whose bandwidth is known."""
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
    limit: Limit | Literal["reduction"]


@dataclass(frozen=True)
class Scaling:
    """A run on one GPU, and what it would be on several."""

    ranks: int  # GPUs, with a process and a loader each
    gradient_bytes: int  # reduced by a step
    buckets: int  # collectives in which it does
    measured_step_s: float
    own_step_s: float  # the step's own work
    cpus_per_rank: float | None  # where the GPUs are in one machine; None: not measured
    links: list[LinkForecast]
    notes: list[str]  # what is not known, and what was assumed for it


@dataclass(frozen=True)
class _Reduction:
    """The reduction of gradients, in seconds; per batch it is a part where gradients are accumulated."""

    ranks: int
    whole_s: float  # all buckets
    last_s: float  # the last bucket, beside which no backward pass runs
    overhead_s: float  # what each batch takes besides
    batches: int  # between two reductions

    def exposed_s(self, own_s: float) -> float:
        """What a batch takes longer, with so much work of its own."""
        return max(self.last_s, self.whole_s - _BACKWARD * own_s) / self.batches + self.overhead_s

    @property
    def slower_below_s(self) -> float:
        """The own work with which ``own + exposed`` is ``ranks * own``."""
        others, hidden = self.ranks - 1, _BACKWARD / self.batches
        return max(
            (self.last_s / self.batches + self.overhead_s) / others,
            (self.whole_s / self.batches + self.overhead_s) / (others + hidden),
        )


def scaling(
    report: RunRecord,
    ranks: int,
    change: WhatIf = _AS_IT_IS,
    *,
    link: Link | None = None,
    gradient_bytes: int | None = None,
) -> Scaling:
    """A one-GPU run on ``ranks`` (2 or more) GPUs; CannotSayError where the report is of several or lacks something.

    ``change.cpus`` are those of a machine, for all of its ranks. Without a link each of :data:`ASSUMED` is forecast;
    without ``gradient_bytes`` the report's count.
    """
    measured_s = _step_on_one_gpu(report)
    size = gradient_bytes if gradient_bytes is not None else _gradient_bytes(report)
    run, costs = _run_of(report, change, measured_s), report.loader_costs
    cpus = run.sides[1].cpus / ranks
    return Scaling(
        ranks=ranks,
        gradient_bytes=size,
        buckets=_buckets(size),
        measured_step_s=measured_s,
        own_step_s=costs.consumer_s if costs is not None else measured_s * run.own_share,
        cpus_per_rank=cpus if math.isfinite(cpus) else None,
        links=[_over(each, ranks, size, run) for each in ([link] if link is not None else ASSUMED)],
        notes=run.notes,
    )


@dataclass(frozen=True)
class _Run:
    """The run on one GPU."""

    sides: list[Pipeline]  # at best, as expected, at worst
    step_s: float  # of one batch as it was, measured
    samples: float  # of a batch, after over before
    most: float  # speed-up per GPU that cannot be exceeded
    own_share: float  # share of ``consumer_s`` that is the step's own work
    batches: int  # between two reductions
    notes: list[str]


def _run_of(report: RunRecord, change: WhatIf, measured_s: float) -> _Run:
    own_share = 1.0
    if report.loader_costs is None and change == _AS_IT_IS:
        own_share = 1.0 - (report.headroom or 0.0)
        steps_s = [measured_s * (1 + sign * STEP_SPREAD) for sign in (-1, 0, 1)]
        sides = [Pipeline(0, 1, 0.0, 0.0, 0.0, 0.0, step_s, 0.0, math.inf) for step_s in steps_s]
        notes = ["What the loader costs is not in the report: the loaders are taken to keep up with more GPUs."]
    else:
        costs, _, now, sides = pipelines(report, change)
        notes = notes_on(report, costs, change) + off_notes(simulate(now[1]).step_s, measured_s)
    return _Run(
        sides=sides,
        step_s=measured_s,
        samples=batch_factor(report, change),
        most=1.0 if change == _AS_IT_IS else math.inf,
        own_share=own_share,
        batches=int(_digits(report, "accumulate_grad_batches") or 1),
        notes=notes,
    )


def _over(link: Link, ranks: int, size: int, run: _Run) -> LinkForecast:
    """The run over one kind of link."""
    reductions, exposed, then = [], [], []
    for side, pipeline in enumerate(run.sides):
        reductions.append(_reduction(link, ranks, size, run.batches, side))
        exposed_s = reductions[-1].exposed_s(pipeline.consumer_s * run.own_share)
        cpus = pipeline.cpus if link.own_cpus else pipeline.cpus / ranks
        exposed.append(exposed_s)
        then.append(replace(pipeline, consumer_s=pipeline.consumer_s + exposed_s, cpus=cpus))
    paces = [simulate(each) for each in then]
    low_s, mid_s, high_s = sorted(each.step_s for each in paces)
    low, mid, high = (ranks * min(run.samples * run.step_s / each, run.most) for each in (high_s, mid_s, low_s))
    limit: Limit | Literal["reduction"] = limit_of(then[1], paces[1])
    if limit == "step" and exposed[1] > _COUNTS * run.sides[1].consumer_s:
        limit = "reduction"
    return LinkForecast(
        link=link,
        exposed_s=_interval(exposed),
        step_s=(low_s, mid_s, high_s),
        speedup=(low, mid, high),
        linear_percent=100 * mid / ranks,
        slower_below_s=_interval([each.slower_below_s for each in reductions]),
        limit=limit,
    )


def _reduction(link: Link, ranks: int, size: int, batches: int, side: int) -> _Reduction:
    """A ring: each GPU sends and receives ``2 (n - 1) / n`` of the bytes. At best the link is at its fastest."""
    buckets = _buckets(size)
    sent = 2 * (ranks - 1) / ranks * size / buckets
    bucket_s = sent / (link.gb_per_s[2 - side] * 1e9) + link.latency_s[side]
    return _Reduction(ranks, buckets * bucket_s, bucket_s, _STEP_OVERHEAD_S[side], batches)


def _buckets(size: int) -> int:
    return max(math.ceil(size / _BUCKET_BYTES), 1)


def _interval(sides: list[float]) -> Interval:
    low, mid, high = sorted(sides)
    return low, mid, high


def _step_on_one_gpu(report: RunRecord) -> float:
    device, ranks = report.environment.get("device", "unknown"), report.environment.get("ranks", "unknown")
    if not device.startswith("cuda") or ranks != "1":
        count = "1 rank" if ranks == "1" else f"{ranks} ranks"
        raise CannotSayError(f"expected a report of a run on one GPU, got one of {count} on {device}")
    if not report.step_s:
        raise CannotSayError("expected a report with a step after the warm-up, got one without")
    return report.step_s


def _gradient_bytes(report: RunRecord) -> int:
    known = _digits(report, "gradient_bytes")
    if known is None:
        raise CannotSayError(
            "expected a report that says how many bytes of gradients a step has, got one that does not",
            "give --gradient-bytes, in float32 four for each parameter that is trained",
        )
    return int(known)


def _digits(report: RunRecord, name: str) -> str | None:
    text = report.environment.get(name, "")
    return text if text.isdecimal() and len(text) < 18 and int(text) > 0 else None

"""What ``lightning-gpuopt what-if`` says of a run, held against the run that is really so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from evaluation.catalogue import WARMUP_STEPS, Fault, loader
from evaluation.parts import Data, Model
from lightning_gpuopt import StallReport
from lightning_gpuopt.diagnosis.what_if import Forecast, WhatIf, what_if

CLOSE = 0.15
"""Share of the measured step by which the expected one may be off."""

Train = Callable[[Fault], tuple[StallReport, dict[str, float]]]
STEPS = WARMUP_STEPS + 80


@dataclass(frozen=True)
class Case:
    """A run, and a change of it.

    Attributes:
        name: the run as it is.
        data: makes its dataset.
        step_s: its step's own work, in seconds.
        workers: its workers.
        change: what is asked.
        cpus: CPUs that it may use; None: all of them.
        data_after: makes the dataset of the changed run, where the change concerns that.
        steps: training batches.
    """

    name: str
    data: Callable[[], Data]
    step_s: float
    workers: int
    change: WhatIf
    cpus: int | None = None
    data_after: Callable[[], Data] | None = None
    steps: int = STEPS


CASES = [
    Case("waits 40 ms a batch, step of 20 ms, 1 worker", lambda: Data(sleep_s=0.01), 0.02, 1, WhatIf(num_workers=2)),
    Case("waits 100 ms a batch, step of 20 ms, 2 workers", lambda: Data(sleep_s=0.025), 0.02, 2, WhatIf(num_workers=8)),
    Case("waits 100 ms a batch, step of 20 ms, 8 workers", lambda: Data(sleep_s=0.025), 0.02, 8, WhatIf(num_workers=2)),
    Case(
        "waits 30 ms a batch, step of 20 ms, no workers", lambda: Data(sleep_s=0.0075), 0.02, 0, WhatIf(num_workers=2)
    ),
    Case("waits 30 ms a batch, step of 20 ms, 2 workers", lambda: Data(sleep_s=0.0075), 0.02, 2, WhatIf(num_workers=0)),
    Case(
        "computes 30 ms a batch, step of 10 ms, no workers", lambda: Data(spin_s=0.0075), 0.01, 0, WhatIf(num_workers=2)
    ),
    Case("computes 40 ms a batch, step of 5 ms, 1 worker", lambda: Data(spin_s=0.01), 0.005, 1, WhatIf(num_workers=4)),
    Case("computes 40 ms a batch, step of 5 ms, 2 workers", lambda: Data(spin_s=0.01), 0.005, 2, WhatIf(cpus=1)),
    Case(
        "computes 40 ms a batch, step of 5 ms, 2 workers, 1 CPU", lambda: Data(spin_s=0.01), 0.005, 2, WhatIf(cpus=2), 1
    ),
    Case(
        "computes 20 ms and waits 20 ms a batch, step of 5 ms, 3 workers",
        lambda: Data(sleep_s=0.005, spin_s=0.005),
        0.005,
        3,
        WhatIf(cpus=1),
    ),
    Case(
        "one sample in 100 waits 0.3 s, step of 4 ms, 4 workers",
        lambda: Data(sleep_s=0.001, slow_every=100, slow_s=0.3),
        0.004,
        4,
        WhatIf(num_workers=8),
        steps=WARMUP_STEPS + 400,
    ),
    Case(
        "computes 40 ms a batch, step of 5 ms, 1 worker",
        lambda: Data(spin_s=0.01),
        0.005,
        1,
        WhatIf(decode_speedup=2.0),
        data_after=lambda: Data(spin_s=0.005),
    ),
]


@contextmanager
def only_cpus(count: int | None) -> Iterator[None]:
    """This thread, and what it starts, on so many CPUs."""
    before = os.sched_getaffinity(0)
    if count is not None:
        os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Answer:
    """What was expected of a case, and what came."""

    case: Case
    forecast: Forecast
    measured_s: float

    @property
    def error(self) -> float:
        """Of the expected step against the measured one; above 0: it was expected to be slower."""
        return self.forecast.step_s[1] / self.measured_s - 1

    @property
    def close(self) -> bool:
        """Whether what was expected was near what came."""
        return abs(self.error) <= CLOSE


def run_of(case: Case, change: WhatIf, train: Train) -> StallReport:
    """Train as the case is, with the change."""
    data = case.data
    if change.decode_speedup is not None and case.data_after is not None:
        data = case.data_after
    workers = case.workers if change.num_workers is None else change.num_workers
    fault = Fault(case.name, "", lambda: Model(loader(data(), workers), step_s=case.step_s), steps=case.steps)
    with only_cpus(case.cpus if change.cpus is None else int(change.cpus)):
        return train(fault)[0]


def score(only: str, train: Train) -> tuple[list[str], bool]:
    """Ask what if, then really change it.

    Args:
        only: words that a case's name or change must have.
        train: trains with a fault, and gives the report.

    Returns:
        The table and the score, as Markdown, and whether the target was reached: of the changes of workers and CPUs,
        five of six within 15 %.
    """
    answers: list[Answer] = []
    for case in CASES:
        if only not in f"{case.name} {_words(case.change)}":
            continue
        before = run_of(case, WhatIf(), train)
        forecast = what_if(before, case.change)
        after = run_of(case, case.change, train)
        assert after.step_s is not None
        answers.append(Answer(case, forecast, after.step_s))
        print(f"{'ok  ' if answers[-1].close else 'OFF '} {_row(answers[-1])}", flush=True)
    lines = ["| the run | what if | expected step, ms | measured | error | limited by |", "|---|---|---|---|---|---|"]
    lines += [f"| {_row(each)} |" for each in answers]
    resources = [each for each in answers if each.case.change.decode_speedup is None]
    close = [each for each in resources if each.close]
    kept = [each for each in answers if each.forecast.step_s[0] <= each.measured_s <= each.forecast.step_s[2]]
    text = (
        f"Of {len(resources)} changes of workers and CPUs, the expected step of {len(close)} was within 15 % of the "
        f"measured one. Of all {len(answers)} changes, the measured step of {len(kept)} was in the interval."
    )
    print(text, flush=True)
    return [*lines, "", text], 6 * len(close) >= 5 * len(resources)


def _row(answer: Answer) -> str:
    low_s, mid_s, high_s = (f"{seconds * 1e3:.1f}" for seconds in answer.forecast.step_s)
    return " | ".join(
        [
            answer.case.name,
            _words(answer.case.change),
            f"{mid_s} ({low_s} to {high_s})",
            f"{answer.measured_s * 1e3:.1f}",
            f"{answer.error * 100:+.0f} %",
            answer.forecast.limit.replace("_", " "),
        ]
    )


def _words(change: WhatIf) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in asdict(change).items() if value is not None)

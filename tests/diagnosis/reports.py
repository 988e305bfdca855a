"""Reports made of numbers, for the tests of their forms."""

from __future__ import annotations

from lightning_gpuopt.diagnosis.report import Finding, Proof, StallReport, Stretch
from lightning_gpuopt.measurements.kernels import KernelShare
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PHASES, Outlier, StepTimes

SIX_WORKERS = {"num_workers": 6, "persistent_workers": True}
PREDICTED = (1.8, 2.1, 2.4)


def phases(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0) | seconds


def before() -> StallReport:
    """A run of 100 steps that waits for storage, with all that a report can have."""
    half = phases(data_wait=3.0, forward=1.5, other=0.5)
    return StallReport(
        "slow_storage",
        10.0,
        phases(data_wait=6.0, forward=3.0, other=1.0),
        [
            Finding(
                "slow_storage",
                0.6,
                {"ms_per_step": 60.0, "num_workers": 2, "workers_busy_percent": 97.2468},
                "More workers read more at once: num_workers=6.",
                SIX_WORKERS,
                PREDICTED,
            ),
            Finding("callback", 0.12, {"callback": "Slow"}, "Slow.on_train_batch_end holds up training."),
        ],
        steps=100,
        step_s=0.1,
        gpu_idle_s=5.5,
        headroom=0.62,
        loader=LoaderFacts(2, False, 2, False),
        step_times=StepTimes(
            edges_s=(0.08, 0.1, 0.12, 0.5),
            counts=(40, 58, 2),
            median_s=0.1,
            p90_s=0.11,
            p99_s=0.3,
            slowest_s=0.4,
            outliers=(Outlier(17, 1.9, 0.3, "data_wait", 0.25), Outlier(71, 7.5, 0.4, "data_wait", 0.36)),
            outlier_count=2,
            outlier_s=0.5,
        ),
        proofs=[Proof("main_process_loading", {"num_workers": 2}, (1.1, 1.2, 1.3), 1.5)],
        timeline=[Stretch(0.0, 5.0, 50, half, 40.0), Stretch(5.0, 5.0, 50, half, None)],
        notes=["[nothing] could be read"],
        environment={"torch": "2.13.0"},
        kernels=[
            KernelShare("void at::native::vectorized<4, <values>>", "elementwise", 0.6, 12.0, "net.0"),
            KernelShare("ampere_sgemm_128x64_tn", "matmul", 0.3, 2.0),
        ],
        kernel_kinds={"elementwise": 0.6, "matmul": 0.3, "copy": 0.1, "other": 0.0},
        kernel_summary={"ms_per_step": 80.0, "short_per_step": 10.0, "short_share": 0.02, "unassigned_share": 0.4},
        idle_shares={"events": 0.5, "nvml": 0.2},
    )


def after() -> StallReport:
    """The same training after the advice was followed: nothing is left to gain."""
    return StallReport(
        "compute_bound",
        5.0,
        phases(data_wait=0.1, forward=3.9, other=1.0),
        [],
        steps=100,
        step_s=0.05,
        headroom=0.02,
        loader=LoaderFacts(6, True, 2, False),
    )


def largest() -> StallReport:
    """As much as a report can hold: 513 stretches, 100 outliers, 360 bins."""
    stretch = {phase: 1 / 3 + number / 7 for number, phase in enumerate(PHASES)}
    wall_s = sum(stretch.values())
    return StallReport(
        "compute_bound",
        513 * wall_s,
        {phase: 513 * seconds for phase, seconds in stretch.items()},
        [],
        steps=100_000,
        step_times=StepTimes(
            edges_s=tuple(1e-5 * 10 ** (number / 40) for number in range(361)),
            counts=tuple(range(1, 361)),
            median_s=0.1,
            outliers=tuple(Outlier(number, number / 3, 1 / 3, "data_wait", 1 / 7) for number in range(100)),
            outlier_count=100,
        ),
        timeline=[Stretch(number * wall_s, wall_s, 195, stretch, 100 / 3) for number in range(513)],
    )

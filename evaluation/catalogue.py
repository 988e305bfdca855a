"""The faults: what is injected, and the verdict that is right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from evaluation.parts import (
    Data,
    LargeBatch,
    LargeModel,
    LogsOverRanks,
    MetricsEveryStep,
    Model,
    Objects,
    RankData,
    SlowCallback,
    SlowCheckpoints,
    SlowLogger,
    collate_slowly,
)
from evaluation.pause_parts import (
    CollectsAfterEachStep,
    CollectsInTheStep,
    Compiles,
    CompilesForItsBatches,
    GrowingCallback,
    GrowingData,
    KeepsItsLosses,
    KeepsObjects,
    MakesGarbage,
    ReadsRecords,
    SlowsDownThenRecovers,
)

WARMUP_STEPS = 10
STEPS = WARMUP_STEPS + 50

CPUS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Fault:
    """One run.

    Attributes:
        name: what is injected.
        verdict: the right verdict.
        model: makes the model.
        callbacks: makes the callbacks.
        trainer: further arguments of the Trainer.
        ranks: processes; more than one train with DDP over gloo.
        around: a context in which the run takes place.
        evidence: what the largest finding's evidence must say besides.
        gain: the run is made again with the advised settings, and the measured gain held against the predicted one.
        steps: training batches.
    """

    name: str
    verdict: str
    model: Callable[[], Model]
    callbacks: Callable[[Path], list[Callback]] = lambda tmp: []
    trainer: Callable[[Path], dict[str, Any]] = lambda tmp: {}
    ranks: int = 1
    around: Callable[[], Any] | None = None
    evidence: dict[str, float | str] = field(default_factory=dict)
    gain: bool = False
    steps: int = STEPS


def loader(data: Data, workers: int = 0, **kwargs: Any) -> dict[str, Any]:
    return {"dataset": data, "num_workers": workers, **kwargs}


@contextmanager
def busy_machine() -> Iterator[None]:
    """Other processes that use every CPU."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CPUS)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


class CannotRun(Exception):
    """Why a fault cannot be injected on this machine."""


@contextmanager
def cpu_quota(cpus: float) -> Iterator[None]:
    """This process and its children in a cgroup that stops them when they use more CPU than that."""
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    root = v1 if v1.is_dir() else v2
    group = root / f"gpuopt-fault-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotRun(f"no cgroup can be made here: {error}") from None
    try:
        try:
            if root is v1:
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
            else:
                (group / "cpu.max").write_text(f"{int(cpus * 100_000)} 100000")
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise CannotRun(f"no quota can be set here: {error}") from None
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        try:
            group.rmdir()
        except OSError as error:
            print(f"{group} could not be taken away: {error}", file=sys.stderr)


def checkpoints(seconds: float, every: int) -> Callable[[Path], list[Callback]]:
    return lambda tmp: [SlowCheckpoints(seconds), ModelCheckpoint(dirpath=tmp, every_n_train_steps=every)]


CONTROLS = [
    Fault("step of 20 ms, loader in the process", "compute_bound", lambda: Model(loader(Data()), step_s=0.02)),
    Fault("step of 20 ms, 2 workers", "compute_bound", lambda: Model(loader(Data(sleep_s=0.001), 2), step_s=0.02)),
    Fault(
        "2 workers that just keep up",
        "compute_bound",
        lambda: Model(loader(Data(sleep_s=0.004), 2), step_s=0.025),
    ),
    Fault(
        "a callback of 1 ms in a step of 20 ms",
        "compute_bound",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [SlowCallback(0.001)],
    ),
    Fault(
        "validation of 4 % of the run",
        "compute_bound",
        lambda: Model(loader(Data()), step_s=0.02, validation_s=0.01),
        trainer=lambda tmp: {"limit_val_batches": 2, "val_check_interval": 25, "check_val_every_n_epoch": None},
    ),
    Fault(
        "a small checkpoint every 20 steps",
        "compute_bound",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [ModelCheckpoint(dirpath=tmp, every_n_train_steps=20)],
        trainer=lambda tmp: {"enable_checkpointing": True},
    ),
    Fault(
        "epochs with persistent workers",
        "compute_bound",
        lambda: Model(loader(Data(length=40), 2, persistent_workers=True), step_s=0.02),
    ),
    Fault(
        "garbage that young collections take away",
        "compute_bound",
        lambda: MakesGarbage(loader(Data()), step_s=0.02, garbage=2000),
    ),
    Fault(
        "500,000 objects that stay, and little garbage",
        "compute_bound",
        lambda: MakesGarbage(loader(Data()), step_s=0.02, garbage=500, objects=500_000),
    ),
    Fault(
        "a compiled function, the last batch of each epoch smaller",
        "compute_bound",
        lambda: CompilesForItsBatches(loader(Data(length=58)), step_s=0.02),
    ),
    Fault(
        "one slow window in the middle of the run",
        "compute_bound",
        lambda: SlowsDownThenRecovers(loader(Data()), step_s=0.028, more_s=0.028, slow=lambda step: 210 <= step < 260),
        steps=WARMUP_STEPS + 8 * 50,
    ),
    Fault(
        "steps that take longer in the second half of each epoch",
        "compute_bound",
        lambda: SlowsDownThenRecovers(
            loader(Data()), step_s=0.028, more_s=0.028, slow=lambda step: (step - WARMUP_STEPS) % 200 >= 100
        ),
        steps=WARMUP_STEPS + 8 * 50,
    ),
    Fault(
        "losses kept with their graphs, which nobody goes through",
        "compute_bound",
        lambda: KeepsItsLosses(loader(Data()), step_s=0.028, each_s=0.0),
        steps=WARMUP_STEPS + 8 * 50,
    ),
    Fault("2 ranks, both alike", "compute_bound", lambda: Model(loader(Data()), step_s=0.03), ranks=2),
    Fault(
        "2 ranks, 1 MiB of gradients, a step of 40 ms",
        "compute_bound",
        lambda: LargeModel(loader(Data()), mib=1, step_s=0.04),
        ranks=2,
    ),
    Fault(
        "2 ranks, a metric reduced over them once an epoch",
        "compute_bound",
        lambda: LogsOverRanks(loader(Data()), each_step=False, step_s=0.03),
        ranks=2,
    ),
    Fault("4 ranks, all alike", "compute_bound", lambda: Model(loader(Data()), step_s=0.06), ranks=4),
]

DATA = [
    Fault(
        "loading takes 30 % (waiting)",
        "main_process_loading",
        lambda: Model(loader(Data(sleep_s=0.0022)), step_s=0.02),
        gain=True,
    ),
    Fault(
        "loading takes 60 % (waiting)",
        "main_process_loading",
        lambda: Model(loader(Data(sleep_s=0.0075)), step_s=0.02),
        gain=True,
    ),
    Fault(
        "loading takes 75 % (computing)",
        "main_process_loading",
        lambda: Model(loader(Data(spin_s=0.0075)), step_s=0.01),
        gain=True,
    ),
    Fault(
        "1 worker, waiting twice the step",
        "slow_storage",
        lambda: Model(loader(Data(sleep_s=0.01), 1), step_s=0.02),
        gain=True,
    ),
    Fault(
        "2 workers, waiting five times the step",
        "slow_storage",
        lambda: Model(loader(Data(sleep_s=0.025), 2), step_s=0.02),
        gain=True,
    ),
    Fault(
        "4 workers, waiting, no step to speak of",
        "slow_storage",
        lambda: Model(loader(Data(sleep_s=0.02), 4), step_s=0.002),
    ),
    Fault(
        "1 worker, computing, a CPU is free",
        "slow_transform",
        lambda: Model(loader(Data(spin_s=0.008), 1), step_s=0.02),
        gain=True,
    ),
    Fault(
        "1 worker, computing twice as long, a CPU is free",
        "slow_transform",
        lambda: Model(loader(Data(spin_s=0.016), 1), step_s=0.02),
    ),
    Fault(
        "as many workers as CPUs, all computing",
        "cpu_saturated",
        lambda: Model(loader(Data(spin_s=0.01), CPUS), step_s=0.005),
    ),
    Fault(
        "twice as many workers as CPUs, all computing",
        "cpu_saturated",
        lambda: Model(loader(Data(spin_s=0.01), 2 * CPUS), step_s=0.005),
    ),
    Fault(
        "1 worker, computing, on a machine that others use",
        "cpu_saturated",
        lambda: Model(loader(Data(spin_s=0.01), 1), step_s=0.005),
        around=busy_machine,
    ),
    Fault(
        "2 workers, computing, under a quota of half a CPU",
        "cpu_throttled",
        lambda: Model(loader(Data(spin_s=0.005), 2), step_s=0.005),
        around=lambda: cpu_quota(0.5),
    ),
    Fault(
        "one sample in 100 takes 0.3 s, 4 workers",
        "head_of_line",
        lambda: Model(loader(Data(sleep_s=0.001, slow_every=100, slow_s=0.3), 4), step_s=0.004),
        steps=WARMUP_STEPS + 100,
    ),
    Fault(
        "one sample in 40 takes 0.1 s, 4 workers",
        "head_of_line",
        lambda: Model(loader(Data(sleep_s=0.0005, slow_every=40, slow_s=0.1), 4), step_s=0.002),
        steps=WARMUP_STEPS + 100,
    ),
    Fault(
        "one sample in 320 takes 0.8 s, 4 workers",
        "head_of_line",
        lambda: Model(loader(Data(slow_every=320, slow_s=0.8), 4), step_s=0.004),
        steps=WARMUP_STEPS + 400,
    ),
    Fault(
        "collate computes for 30 ms, 1 worker",
        "worker_transfer",
        lambda: Model(loader(Data(), 1, collate_fn=collate_slowly), step_s=0.01),
    ),
    Fault(
        "40,000 Python objects a batch, 2 workers",
        "worker_transfer",
        lambda: Model(loader(Data(), 2, collate_fn=Objects(40_000)), step_s=0.002),
    ),
    Fault(
        "batches of 64 MiB, 2 workers",
        "worker_transfer",
        lambda: Model(loader(Data(), 2, collate_fn=LargeBatch(64)), step_s=0.002),
    ),
]

SAMPLE_BY_SAMPLE = {
    "1 worker, waiting twice the step",
    "2 workers, waiting five times the step",
    "1 worker, computing twice as long, a CPU is free",
    "as many workers as CPUs, all computing",
    "one sample in 320 takes 0.8 s, 4 workers",
}
"""Those that a SampleLoader loads as well."""


def by_sample(fault: Fault) -> Fault:
    """The same with a SampleLoader."""

    def model() -> Model:
        made = fault.model()
        made.loader = {**made.loader, "by_sample": True}
        return made

    return replace(fault, name=f"{fault.name}, sample by sample", model=model)


DATA += [by_sample(fault) for fault in DATA if fault.name in SAMPLE_BY_SAMPLE]
CONTROLS.append(by_sample(next(fault for fault in CONTROLS if fault.name == "2 workers that just keep up")))

LOOP = [
    Fault(
        "a callback of 3 ms in a step of 20 ms",
        "callback",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [SlowCallback(0.003)],
        evidence={"callback": "SlowCallback", "hook": "on_train_batch_end"},
    ),
    Fault(
        "a callback of 20 ms",
        "callback",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [SlowCallback(0.02)],
        evidence={"callback": "SlowCallback"},
    ),
    Fault(
        "a callback of 200 ms at every tenth step",
        "callback",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [SlowCallback(0.2, every=10)],
        evidence={"callback": "SlowCallback"},
    ),
    Fault(
        "a logger of 4 ms at every step",
        "logging",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [MetricsEveryStep()],
        trainer=lambda tmp: {"logger": SlowLogger(0.004)},
    ),
    Fault(
        "a logger of 20 ms at every step",
        "logging",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=lambda tmp: [MetricsEveryStep()],
        trainer=lambda tmp: {"logger": SlowLogger(0.02)},
    ),
    Fault(
        "a checkpoint of 100 ms every 20 steps",
        "checkpoint",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=checkpoints(0.1, every=20),
        trainer=lambda tmp: {"enable_checkpointing": True},
    ),
    Fault(
        "a checkpoint of 100 ms at every fourth step",
        "checkpoint",
        lambda: Model(loader(Data()), step_s=0.02),
        callbacks=checkpoints(0.1, every=4),
        trainer=lambda tmp: {"enable_checkpointing": True},
    ),
    Fault(
        "validation of 20 % of the run",
        "validation",
        lambda: Model(loader(Data()), step_s=0.02, validation_s=0.06),
        trainer=lambda tmp: {"limit_val_batches": 2, "val_check_interval": 25, "check_val_every_n_epoch": None},
    ),
    Fault(
        "validation of 60 % of the run",
        "validation",
        lambda: Model(loader(Data()), step_s=0.02, validation_s=0.2),
        trainer=lambda tmp: {"limit_val_batches": 2, "val_check_interval": 15, "check_val_every_n_epoch": None},
    ),
    Fault(
        "2 workers started for epochs of 10 steps",
        "epoch_restart",
        lambda: Model(loader(Data(length=40), 2), step_s=0.01),
    ),
    Fault(
        "4 workers started for epochs of 5 steps",
        "epoch_restart",
        lambda: Model(loader(Data(length=20), 4), step_s=0.02),
    ),
]

PAUSES = [
    Fault(
        "gc.collect() in each step, 200,000 objects",
        "garbage_collection",
        lambda: CollectsInTheStep(loader(Data()), step_s=0.02, objects=200_000),
    ),
    Fault(
        "gc.collect() in a callback after each step",
        "garbage_collection",
        lambda: KeepsObjects(loader(Data()), step_s=0.02, objects=200_000),
        callbacks=lambda tmp: [CollectsAfterEachStep()],
    ),
    Fault(
        "40,000 records read in each step",
        "garbage_collection",
        lambda: ReadsRecords(loader(Data()), step_s=0.02, records=40_000),
    ),
    Fault(
        "a compiled function, another size at every third step",
        "recompilation",
        lambda: Compiles(loader(Data()), step_s=0.02, size=lambda step: 8 + step // 3),
    ),
    Fault(
        "a compiled function, another number at every third step",
        "recompilation",
        lambda: Compiles(loader(Data()), step_s=0.02, number=lambda step: 8 + step // 3),
    ),
]

_SLOW_RUN = WARMUP_STEPS + 8 * 50

SLOWDOWNS = [
    Fault(
        "losses kept with their graphs, which each step goes through",
        "slowdown",
        lambda: KeepsItsLosses(loader(Data()), step_s=0.016, each_s=0.00008),
        steps=_SLOW_RUN,
        evidence={"phase": "forward"},
    ),
    Fault(
        "the same from the middle of the run on",
        "slowdown",
        lambda: KeepsItsLosses(loader(Data()), step_s=0.02, each_s=0.0002, begin=200),
        steps=_SLOW_RUN,
        evidence={"phase": "forward"},
    ),
    Fault(
        "a callback that goes through what it has kept",
        "slowdown",
        lambda: Model(loader(Data()), step_s=0.016),
        callbacks=lambda tmp: [GrowingCallback(0.00008)],
        steps=_SLOW_RUN,
        evidence={"phase": "GrowingCallback.on_train_batch_end"},
    ),
    Fault(
        "loading that takes longer and longer",
        "slowdown",
        lambda: Model(loader(GrowingData(0.000006)), step_s=0.016),
        steps=_SLOW_RUN,
        evidence={"phase": "data_wait"},
    ),
]

RANKS = [
    Fault(
        "the step of rank 1 of 2 takes 20 ms longer",
        "straggler",
        lambda: Model(loader(Data()), step_s=0.03, slow_rank=(1, 0.02)),
        ranks=2,
        evidence={"rank": 1, "kind": "compute"},
    ),
    Fault(
        "the data of rank 1 of 2 takes 20 ms longer",
        "straggler",
        lambda: Model(loader(RankData(1, here_s=0.006)), step_s=0.02),
        ranks=2,
        evidence={"rank": 1, "kind": "data"},
    ),
    Fault(
        "the step of rank 2 of 4 takes 40 ms longer",
        "straggler",
        lambda: Model(loader(Data()), step_s=0.06, slow_rank=(2, 0.04)),
        ranks=4,
        evidence={"rank": 2, "kind": "compute"},
    ),
    Fault(
        "2 ranks, 8 MiB of gradients, a step of 5 ms",
        "communication",
        lambda: LargeModel(loader(Data()), mib=8, step_s=0.005),
        ranks=2,
        evidence={"gradient_mib": 8.0, "gradient_dtype": "float32", "find_unused_parameters": "False"},
    ),
    Fault(
        "2 ranks, a metric reduced over them in each step of 1 ms",
        "logging",
        lambda: LogsOverRanks(loader(Data()), step_s=0.001),
        ranks=2,
        steps=WARMUP_STEPS + 200,
        evidence={"metric": "m0", "syncs_per_step": 1.0},
    ),
    Fault(
        "2 ranks, 10 metrics reduced over them in each step of 5 ms",
        "logging",
        lambda: LogsOverRanks(loader(Data()), 10, step_s=0.005),
        ranks=2,
        steps=WARMUP_STEPS + 200,
        evidence={"syncs_per_step": 10.0},
    ),
    Fault(
        "2 ranks, a metric reduced over them in each step, which takes rank 1 20 ms longer",
        "straggler",
        lambda: LogsOverRanks(loader(Data()), step_s=0.02, slow_rank=(1, 0.02)),
        ranks=2,
        evidence={"rank": 1, "kind": "compute"},
    ),
    Fault(
        "2 ranks, 32 MiB of gradients, a step of 20 ms, unused parameters looked for",
        "communication",
        lambda: LargeModel(loader(Data()), mib=32, step_s=0.02),
        trainer=lambda tmp: {"strategy": "ddp_find_unused_parameters_true"},
        ranks=2,
        evidence={"gradient_mib": 32.0, "find_unused_parameters": "True"},
    ),
    Fault(
        "2 ranks, 32 MiB of gradients, the step of rank 1 takes 150 ms longer",
        "straggler",
        lambda: LargeModel(loader(Data()), mib=32, step_s=0.02, slow_rank=(1, 0.15)),
        ranks=2,
        evidence={"rank": 1, "kind": "compute"},
    ),
]

FAULTS = [*CONTROLS, *DATA, *LOOP, *PAUSES, *SLOWDOWNS, *RANKS]

OF_COMPUTING = ("slow_transform", "cpu_saturated")
"""Verdicts on what computes: beside other programs it is the CPUs that it lacks."""

BESIDE_OTHERS = [
    replace(
        fault,
        verdict="cpu_saturated" if fault.verdict in OF_COMPUTING else fault.verdict,
        around=busy_machine,
        gain=False,
    )
    for fault in DATA
    if fault.around is None and "Python objects" not in fault.name  # pickling computes: there it is either
]
"""The faults of data again, beside as many busy programs as there are CPUs: what waits has its verdict as before."""

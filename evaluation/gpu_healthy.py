"""Healthy runs on the simulated GPU: what looks like waiting, and costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from evaluation.gpu_parts import (
    Augments,
    CollectsGarbage,
    GrowingEnd,
    KernelsAtEnd,
    KernelsAtEpochEnd,
    KernelsAtStart,
    LogsItsLoss,
    MetricAtEnd,
    Parts,
    RefusesEvents,
    RunsACompiledFunction,
    Samples,
    ScalesItsGradients,
    Scene,
    SlowEnd,
    SlowSaving,
    ValidatesWithAMetric,
    steps_of,
)
from evaluation.gpu_run import GpuFault
from evaluation.parts import MetricsEveryStep, SlowLogger
from lightning_gpuopt import NumWorkersFinder
from tests.simulators.gpu import SimulatedGpu, Work
from tests.simulators.nvml import Gpu

SMALL_BUCKETS: Final = (0.012, 0.01, 0.001)
"""All-reduces of which the backward hides all but the last."""

_STEP: Final = steps_of(0.06, 0.015)
_LONG_STEP: Final = steps_of(0.08, 0.02)
_RANK_STEP: Final = steps_of(0.08, 0.02, all_reduce_s=SMALL_BUCKETS)


def with_bar(parts: Parts) -> Parts:
    """The same with a progress bar that reads the loss at every step."""
    bar: Any = TQDMProgressBar(refresh_rate=1)
    trainer = parts.trainer | {"enable_progress_bar": True}
    return replace(parts, module=LogsItsLoss, callbacks=[*parts.callbacks, bar], trainer=trainer)


def validates(every: int, batches: int) -> dict[str, Any]:
    """A Trainer's arguments for a validation of so many batches after each so many steps."""
    return {"limit_val_batches": batches, "val_check_interval": every, "check_val_every_n_epoch": None}


def _refuses(gpu: SimulatedGpu) -> None:
    gpu.profiling.refuses = True


def _sees_nothing(gpu: SimulatedGpu) -> None:
    gpu.profiling.blind = True


def _saving(scene: Scene, seconds: float, every: int) -> Parts:
    callbacks = [SlowSaving(scene.gpu, seconds), ModelCheckpoint(dirpath=scene.folder, every_n_train_steps=every)]
    return Parts(_STEP, callbacks=callbacks, trainer={"enable_checkpointing": True})


def _healthy(name: str, parts: Any, **more: Any) -> GpuFault:
    return GpuFault(name, "compute_bound", parts, **more)


HEALTHY: Final = [
    _healthy("asynchronous steps, the host far ahead", lambda scene: Parts(_STEP), gpu={"launch_queue": 1024}),
    _healthy("30 ms of loading behind 80 ms", lambda scene: Parts(_LONG_STEP, Samples(wait_s=0.03))),
    _healthy(
        "2 workers that just keep up", lambda scene: Parts(_STEP, Samples(wait_s=0.108), loader={"num_workers": 2})
    ),
    _healthy("a progress bar reads the loss at every step", lambda scene: with_bar(Parts(_LONG_STEP))),
    _healthy(
        "augmentation on the GPU, 15 %", lambda scene: Parts(_STEP, module=Augments, options={"augment_s": 0.011})
    ),
    _healthy("mixup on the GPU, 15 %", lambda scene: Parts(_STEP, callbacks=[KernelsAtStart(scene.gpu, 0.011)])),
    _healthy("averaged weights, 15 %", lambda scene: Parts(_STEP, callbacks=[KernelsAtEnd(scene.gpu, 0.011)])),
    _healthy(
        "a logger of 20 ms behind 80 ms",
        lambda scene: Parts(_LONG_STEP, callbacks=[MetricsEveryStep()], trainer={"logger": SlowLogger(0.02)}),
    ),
    _healthy("a hook of 20 ms behind 80 ms", lambda scene: Parts(_LONG_STEP, callbacks=[SlowEnd(0.02)])),
    _healthy(
        "accumulated gradients, a longer step at each fourth batch",
        lambda scene: Parts(
            replace(_STEP, optimizer=Work(0.04, 4, 0.004)), trainer={"accumulate_grad_batches": 4, "max_steps": 17}
        ),
    ),
    _healthy("GradScaler's question at every step", lambda scene: Parts(_LONG_STEP, module=ScalesItsGradients)),
    _healthy(
        "a validation of 4 %",
        lambda scene: Parts(
            _STEP,
            module=ValidatesWithAMetric,
            validation=Work(0.015, 4, 0.004),
            trainer=validates(every=20, batches=3),
        ),
        steps=75,
    ),
    _healthy("a checkpoint of 15 ms after each 20 steps", lambda scene: _saving(scene, 0.015, every=20)),
    _healthy(
        "epochs of 15 steps, persistent workers",
        lambda scene: Parts(_STEP, Samples(batches=15), {"num_workers": 2, "persistent_workers": True}),
    ),
    _healthy(
        "clocks 10 % down at the power limit",
        lambda scene: Parts(_STEP),
        nvml=Gpu(clock_reasons=0x4, sm_clock=1780),
        note="power limit",
    ),
    _healthy("a pinned copy of 2 ms", lambda scene: Parts(_STEP), gpu={"copy_s": 0.002}),
    _healthy(
        "small kernels, 10 % SM activity, the profiler sees nothing",
        lambda scene: Parts(_STEP),
        steps=110,
        sm_share=0.1,
        prepare=_sees_nothing,
    ),
    _healthy("small kernels, 10 % SM activity", lambda scene: Parts(_STEP), steps=110, sm_share=0.1),
    _healthy(
        "a metric of 8 ms in a hook, read at once",
        lambda scene: Parts(_STEP, callbacks=[MetricAtEnd(scene.gpu, 0.008)]),
    ),
    _healthy(
        "epochs of 20 steps, after each 0.5 s of averaged weights",
        lambda scene: Parts(_STEP, Samples(batches=20), callbacks=[KernelsAtEpochEnd(scene.gpu, 0.5)]),
    ),
    _healthy(
        "CUDA refuses events from the middle on",
        lambda scene: Parts(_STEP, callbacks=[RefusesEvents(scene.gpu, 35)]),
        idle=False,
    ),
    _healthy(
        "NumWorkersFinder mends the loader, NVML stays at 45 %",
        lambda scene: Parts(
            _STEP, Samples(wait_s=0.1), {"num_workers": 1}, callbacks=[NumWorkersFinder(max_num_workers=4)]
        ),
        steps=100,
        nvml=Gpu(utilization=45, gpm={2: 30.0}),
        nvml_follows=False,
        idle=False,
    ),
    _healthy(
        "gc.collect() in each step, behind 80 ms",
        lambda scene: Parts(_LONG_STEP, module=CollectsGarbage, options={"objects": 100_000}),
        steps=55,
    ),
    _healthy(
        "a compiled function that is compiled once",
        lambda scene: Parts(_STEP, module=RunsACompiledFunction, options={"every": 1_000}),
    ),
    _healthy(
        "a hook that takes longer after each step, behind its GPU",
        lambda scene: Parts(_STEP, callbacks=[GrowingEnd(0.0002)]),
        steps=165,
    ),
    _healthy("2 ranks, all-reduce overlapped", lambda scene: Parts(_RANK_STEP), ranks=2),
    _healthy("2 ranks, a progress bar on rank 0", lambda scene: with_bar(Parts(_RANK_STEP)), ranks=2),
    _healthy(
        "2 ranks, averaged weights, 10 %",
        lambda scene: Parts(_RANK_STEP, callbacks=[KernelsAtEnd(scene.gpu, 0.009)]),
        ranks=2,
    ),
    _healthy(
        "2 ranks, rank 1 has a hook of 30 ms behind its GPU",
        lambda scene: Parts(_RANK_STEP, callbacks=[SlowEnd(scene.on(1, 0.03))]),
        ranks=2,
    ),
    _healthy("2 ranks, the profiler refuses", lambda scene: Parts(_RANK_STEP), ranks=2, prepare=_refuses),
]

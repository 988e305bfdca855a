"""The GPU faults: what is injected, and the verdict that is right."""

from __future__ import annotations

from typing import Any, Final

from lightning.pytorch.callbacks import ModelCheckpoint

from evaluation.gpu_healthy import HEALTHY, SMALL_BUCKETS, validates, with_bar
from evaluation.gpu_parts import (
    Augments,
    CollectsGarbage,
    CopiesItsLoss,
    GrowingEnd,
    GrowingWork,
    KeepsItsOutputs,
    KeepsObjects,
    Offloads,
    Parts,
    PreparesOnTheHost,
    ReadsItsLoss,
    RunsACompiledFunction,
    Samples,
    Scene,
    SlowEnd,
    SlowSaving,
    SlowStart,
    Synchronizes,
    ValidatesWithAMetric,
    line_of,
    open_slowly,
    steps_of,
)
from evaluation.gpu_run import GpuFault
from evaluation.parts import MetricsEveryStep, SlowLogger
from evaluation.pause_parts import CollectsAfterEachStep
from lightning_gpuopt import CudaPrefetcher
from tests.simulators.gpu import SimulatedGpu, Step, Work
from tests.simulators.nvml import Gpu

_STEP: Final = steps_of(0.06, 0.015)
_SHORT_STEP: Final = steps_of(0.03, 0.025)
"""The host is hardly ahead: what it does after a step is exposed."""

_MANY_KERNELS: Final = steps_of(0.02, 0.06, kernels=100)
_SYNC_STEP: Final = Step(Work(0.05, 10, 0.005, "forward"), Work(0.015, 20, 0.04, "backward"), Work(0.002, 2, 0.004))
"""Without a wait after the forward the host's 49 ms are hidden behind the GPU's 67."""

_RANK_STEP: Final = steps_of(0.06, 0.015, all_reduce_s=SMALL_BUCKETS)
_MIB: Final = 2**20
_AT_THE_SLEEP: Final = f"(gpu_parts.py:{line_of(Samples.__getitem__, 'time.sleep')})"
_AT_THE_HOOK: Final = f"(gpu_parts.py:{line_of(SlowEnd.on_train_batch_end, 'time.sleep')})"


def _refuses(gpu: SimulatedGpu) -> None:
    gpu.profiling.refuses = True


def logs(seconds: float, step: Step = _SHORT_STEP, data: Samples | None = None) -> Parts:
    logger: dict[str, Any] = {"logger": SlowLogger(seconds)}
    return Parts(step, data or Samples(), callbacks=[MetricsEveryStep()], trainer=logger)


def _saves(scene: Scene, seconds: float, every: int, *more: Any) -> Parts:
    saving = [SlowSaving(scene.gpu, seconds), ModelCheckpoint(dirpath=scene.folder, every_n_train_steps=every)]
    return Parts(_SHORT_STEP, callbacks=[*more, *saving], trainer={"enable_checkpointing": True})


DATA: Final = [
    GpuFault(
        "1 worker, waiting 110 ms for a step of 60 ms",
        "slow_storage",
        lambda scene: Parts(_STEP, Samples(wait_s=0.11), {"num_workers": 1}),
        steps=50,
        evidence={"where": _AT_THE_SLEEP},
        cure="settings",
    ),
    GpuFault(
        "1 worker, computing 90 ms for a step of 50 ms",
        "slow_transform",
        lambda scene: Parts(steps_of(0.05, 0.015), Samples(compute_s=0.09), {"num_workers": 1}),
        steps=50,
        needs_cpu=0.7,
        cure="settings",
    ),
    GpuFault(
        "1 worker, waiting 130 ms for a step of 100 ms",
        "slow_storage",
        lambda scene: Parts(steps_of(0.1, 0.02), Samples(wait_s=0.13), {"num_workers": 1}),
        steps=45,
        cure="settings",
    ),
    GpuFault(
        "1 worker, waiting 124 ms for a step of 50 ms: in step with NVML's readings",
        "slow_storage",
        lambda scene: Parts(steps_of(0.05, 0.03), Samples(wait_s=0.124), {"num_workers": 1}),
        steps=50,
    ),
    GpuFault(
        "loading in the process, 60 ms for a step of 30 ms",
        "main_process_loading",
        lambda scene: Parts(steps_of(0.03, 0.01), Samples(wait_s=0.06)),
        evidence={"where": _AT_THE_SLEEP},
        cure="settings",
    ),
    GpuFault(
        "2 slow workers and a progress bar that reads the loss",
        "slow_storage",
        lambda scene: with_bar(Parts(steps_of(0.04, 0.015), Samples(wait_s=0.15), {"num_workers": 2})),
        evidence={"exposed_by": "TQDMProgressBar"},
    ),
    GpuFault(
        "30 ms of loading, exposed by a progress bar that reads the loss",
        "main_process_loading",
        lambda scene: with_bar(Parts(_STEP, Samples(wait_s=0.03))),
        steps=55,
        evidence={"exposed_by": "TQDMProgressBar"},
    ),
    GpuFault(
        "2 workers started for epochs of 8 steps",
        "epoch_restart",
        lambda scene: Parts(
            steps_of(0.03, 0.012), Samples(batches=8), {"num_workers": 2, "worker_init_fn": open_slowly}
        ),
    ),
]

LOOP: Final = [
    GpuFault(
        "a hook of 50 ms after each step",
        "callback",
        lambda scene: Parts(_SHORT_STEP, callbacks=[SlowEnd(0.05)]),
        evidence={"callback": "SlowEnd", "hook": "on_train_batch_end", "where": _AT_THE_HOOK},
        cure=lambda scene: Parts(_SHORT_STEP),
    ),
    GpuFault(
        "a hook of 50 ms before each step",
        "callback",
        lambda scene: Parts(_SHORT_STEP, callbacks=[SlowStart(0.05)]),
        evidence={"callback": "SlowStart", "hook": "on_train_batch_start"},
    ),
    GpuFault(
        "50 ms on the host after each batch's copy",
        "callback",
        lambda scene: Parts(_SHORT_STEP, module=Augments, options={"host_s": 0.05}),
        evidence={"callback": "Augments", "hook": "on_after_batch_transfer"},
    ),
    GpuFault(
        "50 ms on the host before each batch's copy",
        "callback",
        lambda scene: Parts(_SHORT_STEP, module=PreparesOnTheHost, options={"host_s": 0.05}),
        evidence={"callback": "PreparesOnTheHost", "hook": "on_before_batch_transfer"},
    ),
    GpuFault(
        "a logger of 40 ms at every step",
        "logging",
        lambda scene: logs(0.04),
        cure=lambda scene: Parts(_SHORT_STEP),
    ),
    GpuFault(
        "a checkpoint of 200 ms after each 10 steps",
        "checkpoint",
        lambda scene: _saves(scene, 0.2, every=10),
        steps=85,
    ),
    GpuFault(
        "a validation of 25 %, its metric read at the end",
        "validation",
        lambda scene: Parts(
            _STEP,
            module=ValidatesWithAMetric,
            validation=Work(0.02, 4, 0.005),
            trainer=validates(every=15, batches=15),
        ),
        steps=60,
        share=0.25,
    ),
    GpuFault(
        "a validation of 25 %, nothing waits for it",
        "validation",
        lambda scene: Parts(_STEP, validation=Work(0.02, 4, 0.005), trainer=validates(every=15, batches=15)),
        steps=60,
        share=0.25,
    ),
]

INSIDE: Final = [
    GpuFault(
        "a copy of pageable memory, 20 %",
        "host_to_device",
        lambda scene: Parts(_STEP, Samples(floats=_MIB // 8), {"pin_memory": False}),
        gpu={"copy_s": None, "pageable_bandwidth": _MIB / 0.018, "bandwidth": _MIB / 0.003},
        evidence={"pin_memory": "False"},
        cure="settings",
    ),
    GpuFault(
        "a copy of pinned memory, 20 %",
        "host_to_device",
        lambda scene: Parts(_STEP, Samples(floats=_MIB // 8), {"num_workers": 1}),
        gpu={"copy_s": None, "bandwidth": _MIB / 0.018},
        evidence={"pin_memory": "True"},
        cure=lambda scene: Parts(_STEP, Samples(floats=_MIB // 8), {"num_workers": 1}, callbacks=[CudaPrefetcher()]),
    ),
    GpuFault("many small kernels", "launch_bound", lambda scene: Parts(_MANY_KERNELS), steps=140),
    GpuFault("many small kernels, a short run", "launch_bound", lambda scene: Parts(_MANY_KERNELS), steps=55),
    GpuFault(
        "many small kernels, the profiler refuses",
        "launch_bound",
        lambda scene: Parts(_MANY_KERNELS),
        steps=140,
        prepare=_refuses,
    ),
    GpuFault(
        "loss.item() after the forward",
        "gpu_sync",
        lambda scene: Parts(_SYNC_STEP, module=ReadsItsLoss),
        steps=100,
        evidence={"where": f"gpu_parts.py:{line_of(ReadsItsLoss.training_step, 'loss.item()')}"},
        cure=lambda scene: Parts(_SYNC_STEP),
    ),
    GpuFault(
        "loss.item() after the forward, a short run",
        "gpu_sync",
        lambda scene: Parts(_SYNC_STEP, module=ReadsItsLoss),
        steps=42,
        evidence={"where": f"gpu_parts.py:{line_of(ReadsItsLoss.training_step, 'loss.item()')}"},
    ),
    GpuFault(
        "loss.cpu() after the forward",
        "gpu_sync",
        lambda scene: Parts(_SYNC_STEP, module=CopiesItsLoss),
        evidence={"where": f"gpu_parts.py:{line_of(CopiesItsLoss.training_step, 'injected copy')}"},
    ),
    GpuFault(
        "torch.cuda.synchronize() after the forward",
        "gpu_sync",
        lambda scene: Parts(_SYNC_STEP, module=Synchronizes),
        evidence={"where": f"gpu_parts.py:{line_of(Synchronizes.training_step, 'injected wait')}"},
    ),
    GpuFault(
        "an offloaded optimizer: 40 ms of kernels, 60 ms of copies",
        "device_copies",
        lambda scene: Parts(steps_of(0.04, 0.01), module=Offloads, options={"copy_s": 0.03}),
        evidence={"direction": "both"},
        share=0.6,
        idle=False,  # the look takes the host's lead away, and the GPU waits for that
    ),
    GpuFault(
        "the same with pageable memory",
        "device_copies",
        lambda scene: Parts(steps_of(0.04, 0.01), module=Offloads, options={"copy_s": 0.03, "pinned": False}),
        share=0.6,
    ),
    GpuFault(
        "many small kernels, a MIG instance",
        "launch_bound",
        lambda scene: Parts(_MANY_KERNELS),
        steps=100,
        nvml=Gpu(utilization=None, gpm={}),
        nvml_follows=False,
    ),
    GpuFault(
        "many small kernels, a neighbour on the GPU",
        "launch_bound",
        lambda scene: Parts(_MANY_KERNELS),
        steps=100,
        nvml=Gpu(utilization=100, gpm={}, processes=[1, 2]),
        nvml_follows=False,
    ),
    GpuFault(
        "clocks 40 % down for heat",
        "gpu_throttled",
        lambda scene: Parts(_STEP),
        nvml=Gpu(clock_reasons=0x20, sm_clock=1180),
    ),
    GpuFault(
        "clocks 40 % down by the hardware's thermal slowdown",
        "gpu_throttled",
        lambda scene: Parts(_STEP),
        nvml=Gpu(clock_reasons=0x40, sm_clock=1180),
    ),
]

PAUSES: Final = [
    GpuFault(
        "gc.collect() in each step, 400,000 objects",
        "garbage_collection",
        lambda scene: Parts(_SHORT_STEP, module=CollectsGarbage, options={"objects": 400_000}),
    ),
    GpuFault(
        "gc.collect() in each fourth step, a short run",
        "garbage_collection",
        lambda scene: Parts(_SHORT_STEP, module=CollectsGarbage, options={"objects": 400_000, "every": 4}),
        steps=45,
        idle=False,  # the thread that feeds NVML is stopped, too
    ),
    GpuFault(
        "gc.collect() in a hook after each step",
        "garbage_collection",
        lambda scene: Parts(
            _SHORT_STEP, module=KeepsObjects, callbacks=[CollectsAfterEachStep()], options={"objects": 400_000}
        ),
        idle=False,  # as above
    ),
    GpuFault(
        "a compiled function, another number at every second step",
        "recompilation",
        lambda scene: Parts(_SHORT_STEP, module=RunsACompiledFunction, options={"every": 2}),
        idle=False,  # as above
    ),
    GpuFault(
        "many small kernels, and gc.collect() in each step",
        "launch_bound",
        lambda scene: Parts(_MANY_KERNELS, module=CollectsGarbage, options={"objects": 150_000}),
        second="garbage_collection",
        steps=140,
    ),
]

SLOWDOWNS: Final = [
    GpuFault(
        "a hook that takes longer after each step",
        "slowdown",
        lambda scene: Parts(_SHORT_STEP, callbacks=[GrowingEnd(0.0003)]),
        steps=225,
        evidence={"phase": "GrowingEnd.on_train_batch_end", "grows": "GrowingEnd.history (list)"},
    ),
    GpuFault(
        "a step that goes through all it has kept",
        "slowdown",
        lambda scene: Parts(_SHORT_STEP, module=KeepsItsOutputs, options={"each_s": 0.0003}),
        steps=225,
        evidence={"phase": "forward", "grows": "KeepsItsOutputs.outputs (list)"},
    ),
    GpuFault(
        "more work for the GPU in each step",
        "slowdown",
        lambda scene: Parts(_SHORT_STEP, module=GrowingWork, options={"each_s": 0.0002}),
        steps=225,
        evidence={"phase": "gpu_work"},
    ),
]

RANKS: Final = [
    GpuFault(
        "2 ranks, the forward of rank 1 takes 35 ms longer on its GPU",
        "straggler",
        lambda scene: Parts(
            steps_of(0.06, 0.015, all_reduce_s=SMALL_BUCKETS, forward_more_s=scene.on(1, 0.035)),
        ),
        ranks=2,
        evidence={"rank": 1, "kind": "compute"},
    ),
    GpuFault(
        "2 ranks, the data of rank 1 takes 35 ms longer",
        "straggler",
        lambda scene: Parts(_RANK_STEP, Samples(wait_s=scene.on(1, 0.035))),
        ranks=2,
        evidence={"rank": 1, "kind": "data"},
    ),
    GpuFault(
        "2 ranks, rank 1 has a hook of 35 ms before each step",
        "straggler",
        lambda scene: Parts(_RANK_STEP, callbacks=[SlowStart(scene.on(1, 0.035))]),
        ranks=2,
        evidence={"rank": 1, "kind": "compute"},
        cure=lambda scene: Parts(_RANK_STEP),
    ),
    GpuFault(
        "2 ranks, an all-reduce of 30 % after the backward",
        "communication",
        lambda scene: Parts(steps_of(0.06, 0.015, all_reduce_s=(0.027,))),
        ranks=2,
        evidence={"gradient_dtype": "float32", "accumulate_grad_batches": 1},
    ),
    GpuFault(
        "2 ranks, 35 ms of loading in the process, exposed by Lightning's broadcast",
        "main_process_loading",
        lambda scene: Parts(_RANK_STEP, Samples(wait_s=0.035)),
        ranks=2,
    ),
]

PAIRS: Final = [
    GpuFault(
        "60 ms of loading, and a hook of 30 ms",
        "main_process_loading",
        lambda scene: Parts(_SHORT_STEP, Samples(wait_s=0.06), callbacks=[SlowEnd(0.03)]),
        second="callback",
        steps=45,
    ),
    GpuFault(
        "60 ms of loading, and a logger of 35 ms",
        "main_process_loading",
        lambda scene: logs(0.035, data=Samples(wait_s=0.06)),
        second="logging",
        steps=45,
    ),
    GpuFault(
        "a hook of 45 ms, and a copy of 20 ms",
        "callback",
        lambda scene: Parts(_SHORT_STEP, callbacks=[SlowEnd(0.045)]),
        gpu={"copy_s": 0.02},
        second="host_to_device",
        steps=50,
    ),
    GpuFault(
        "many small kernels, and a hook of 25 ms",
        "launch_bound",
        lambda scene: Parts(_MANY_KERNELS, callbacks=[SlowEnd(0.025)]),
        second="callback",
        steps=105,
    ),
    GpuFault(
        "50 ms of loading, and a validation of 20 %",
        "main_process_loading",
        lambda scene: Parts(
            _SHORT_STEP,
            Samples(wait_s=0.05),
            module=ValidatesWithAMetric,
            validation=Work(0.02, 4, 0.005),
            trainer=validates(every=10, batches=10),
        ),
        second="validation",
    ),
    GpuFault(
        "a hook of 40 ms, and a checkpoint of 250 ms after each 10 steps",
        "callback",
        lambda scene: _saves(scene, 0.25, 10, SlowEnd(0.04)),
        second="checkpoint",
        steps=55,
    ),
    GpuFault(
        "2 ranks, 60 ms of loading on both, and a hook of 35 ms on rank 1 before each step",
        "main_process_loading",
        lambda scene: Parts(_RANK_STEP, Samples(wait_s=0.06), callbacks=[SlowStart(scene.on(1, 0.035))]),
        ranks=2,
        steps=45,
        second="straggler",
    ),
]

GPU_FAULTS: Final = [*HEALTHY, *DATA, *LOOP, *INSIDE, *PAUSES, *SLOWDOWNS, *RANKS, *PAIRS]

"""The one table of causes: what each means, what to do about it, and where the documentation says more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

# the part of a run that a cause lies in
Group = Literal["loader", "transfer", "step", "hooks", "epoch", "ranks", "run"]
# which GPUs compute nothing meanwhile: all, all but that of the slow rank, or none (it computes slowly, or may do)
GpusWaiting = Literal["all", "others", "none"]


@dataclass(frozen=True, slots=True)
class Cause:
    name: str  # as it stands in reports and in their JSON
    meaning: str  # a sentence for the top of a report
    advice: str  # ``{names}`` in it are filled in by the finding
    # keys of the evidence that show it best, separated by blanks: the terminal shows the first :data:`FACTS_SHOWN`
    decided_by: str = ""
    group: Group = "run"
    waiting: GpusWaiting = "all"  # which GPUs compute nothing meanwhile
    in_user_code: bool = False  # whether the user's Python takes the time, so that its lines can be sampled
    storage: bool = False  # whether storing or decoding the samples otherwise can take it away
    needs_cpus: bool = False  # whether another CPU would help
    doing: str = ""  # what the loader does meanwhile, where more workers take the cause away
    cases: Mapping[str, str] = field(default_factory=dict)  # other advice, by the case that it is for

    @property
    def in_loader_code(self) -> bool:
        """Whether it lies in what the loader calls of the user's."""
        return self.group == "loader" and self.in_user_code


FACTS_SHOWN: Final = 4  # figures of a finding's evidence that the terminal shows; the page and the JSON have all
# callbacks of ours that measure a run, and change what they find
MEASURING: Final = frozenset(("AutoFix", "GpuUtilMonitor", "StallDetector", "WatchedRun"))
OURS: Final = MEASURING | {"CudaPrefetcher", "NumWorkersFinder"}  # all callbacks of ours
COMPUTE_BOUND: Final = Cause("compute_bound", "No bottleneck was found: the time goes into the steps' own work.", "")

UNKNOWN: Final = Cause(
    "unknown",
    "The GPU may wait inside the steps: a profiler recording was needed but disabled. A note says how to enable it.",
    "",
)

NOT_MEASURED: Final = Cause("not_measured", "No step was measured, so it is not known what training waits for.", "")

_ALL: Final = (
    Cause(
        "main_process_loading",
        "The training process loads the data itself, and the device waits while it does.",
        "The training process loads the data itself. Load in worker processes: num_workers={num_workers}.",
        decided_by="ms_per_step step_ms dataset_ms_per_batch free_cpus",
        group="loader",
        in_user_code=True,
        storage=True,
        needs_cpus=True,
        doing="The training process loads the data itself",
        cases={
            "no_dataloader": "The loader works in the training process and is not a DataLoader: let it prepare batches "
            "ahead.",
            "handing_over": "The training process loads the data itself, and worker processes would not be faster: "
            "transferring a batch costs as much. Make fewer, larger batches, or read a batch at once (__getitems__), "
            "as LMDBDataModule does.",
            "no_cpus": "The training process loads the data itself, and no CPU is left for worker processes: they "
            "would not be faster. Make decoding and transforms cheaper, or give the job more CPUs.",
            "nodes": "The graph's work is done in the training process: give it to workers, "
            'ParallelMapper(..., num_workers=N, method="process"), and let a Prefetcher prepare batches ahead.',
        },
    ),
    Cause(
        "slow_storage",
        "The loader spends most of its time waiting for storage.",
        "The workers mostly wait for storage, not for the CPU. More workers read more at once: "
        "num_workers={num_workers}.",
        decided_by="bottleneck memory_pressure_percent swap_mib_per_s ms_per_step "
        "step_ms read_wait_ms_per_batch workers_busy_percent worker_cpu_percent",
        group="loader",
        in_user_code=True,
        storage=True,
        doing="The workers mostly wait for storage",
        cases={
            "any_data": "Few large files are read faster than many small ones: lightning-gpuopt lmdb build SRC DST "
            "makes them, and LMDBDataModule reads them ahead.",
            "memory": "The workers mostly wait, and the machine is short of memory: what they read is evicted from the "
            "page cache or swapped out. Use fewer workers or a smaller prefetch_factor, keep less in memory, or give "
            "the job more. LMDBDataModule reads from files that all workers share.",
            "pipeline": "The pipeline mostly waits for files, and its reader threads wait for storage. Few large files "
            "are read faster than many small ones: {build} makes them, and DALIDataModule(DST) reads them too. If the "
            "samples are in an LMDB already, use a faster disk or smaller images (--image-size N).",
            "pipeline_memory": "The pipeline mostly waits for files, and the machine is short of memory: what is read "
            "is evicted from the page cache or swapped out. Keep less in memory, or give the job more.",
            "nodes": "The graph's {num_workers} workers mostly wait, but not for the CPU: more workers read more at "
            "once, ParallelMapper(..., num_workers=N).",
        },
    ),
    Cause(
        "slow_transform",
        "The loader spends most time on decoding and transforms, and CPUs are free.",
        "The workers compute all the time and CPUs are free: num_workers={num_workers}.",
        decided_by="bottleneck ms_per_step step_ms threads_busy_percent worker_cpu_percent free_cpus",
        group="loader",
        in_user_code=True,
        needs_cpus=True,
        doing="The workers mostly compute",
        cases={
            "pipeline": "The pipeline's CPU threads are the bottleneck. {more}{smaller}{gpu}.",
            "pipeline_threads": "The pipeline's CPU threads are the bottleneck, and CPUs are free: "
            "DALIDataModule(num_threads={threads}){gpu}.",
            "pipeline_files": "The pipeline waits for files, and its reader threads compute most of that time: opening "
            "and reading single files costs CPU time. An LMDB costs less ({build}), and DALIDataModule(DST) reads it "
            "too.",
            "decode_engine": "The GPU's decoder is the bottleneck; the pipeline's CPU threads compute for {busy:.0%} "
            "of the time. Try another hw_decoder_load, the share of the JPEG images that goes to the hardware decoder, "
            "and a larger num_threads for those that the CPU helps to decode. {smaller}.",
            "nodes": "The graph's {num_workers} workers compute all the time and CPUs are free: "
            'ParallelMapper(..., num_workers=N, method="process"). Threads share one interpreter, which runs '
            "Python code one thread at a time.",
        },
    ),
    Cause(
        "cpu_saturated",
        "No CPU is left for the loader: more workers or threads would not help.",
        "The workers use all available CPU time: more of them would not help. Make decoding and transforms cheaper, or "
        "move transforms to the GPU.",
        decided_by="bottleneck cpu_affinity threads_per_worker ms_per_step step_ms usable_cpus free_cpus",
        group="loader",
        in_user_code=True,
        storage=True,
        needs_cpus=True,
        cases={
            "any_data": 'Or store the data preprocessed: for image files, LMDBDataModule(..., decode="tensor", '
            "crop_size=..., normalize=...) decodes only the crop, and normalises on the device.",
            "others": "Other programs use about {others:.2g} of the {usable:g} CPUs, and the workers wait for them: "
            "stop those programs, or request dedicated CPUs. More workers would not help.",
            "step": "The host starts the GPU's work too slowly, because no CPU is free.",
            "pipeline": "The pipeline's CPU threads use all available CPU time: more of them would not help. "
            "{smaller}{gpu}.",
        },
    ),
    Cause(
        "cpu_throttled",
        "A CPU quota throttles the process, its threads and its workers.",
        "A CPU quota (cgroup) throttles the workers: more of them would not help. Ask for more CPUs (Kubernetes: "
        "resources.limits.cpu; Slurm: --cpus-per-task; Docker: --cpus), or make the transforms cheaper.",
        decided_by="bottleneck ms_per_step step_ms cpu_throttled_percent usable_cpus",
        group="loader",
        in_user_code=True,
        cases={
            "pipeline": "A CPU quota (cgroup) throttles the pipeline's CPU threads: more of them would not help. Ask "
            "for more CPUs (Kubernetes: resources.limits.cpu; Slurm: --cpus-per-task; Docker: --cpus). {smaller}{gpu}.",
        },
    ),
    Cause(
        "head_of_line",
        "Batches are ready, but the next one in order is late.",
        "Batches are ready, but the next one in order is late: a few samples take much longer than the rest. Prepare "
        "more ahead (prefetch_factor={prefetch_factor}), or make those samples cheaper; if order does not matter, "
        "in_order=False returns batches as they finish.",
        decided_by="ms_per_step step_ms late_batch_wait_percent workers_busy_percent",
        group="loader",
        in_user_code=True,
        cases={
            "samples": "SampleLoader(...) in place of DataLoader(...) loads sample by sample: a slow one then delays "
            "only its own batch, and the order stays the same.",
        },
    ),
    Cause(
        "worker_transfer",
        "Collating batches and transferring them to the training process takes longest.",
        "Samples are read quickly, but collating a batch and transferring it to the training process takes long. "
        "Collate tensors rather than Python objects, keep them small (uint8 instead of float32), and leave padding and "
        "stacking to the device. LMDBDataModule gathers small records batch-wise without workers.",
        decided_by="ms_per_step dataset_ms_per_batch collate_ms_per_batch workers_busy_percent",
        group="loader",
        in_user_code=True,
        cases={
            "no_workers": "A batch of these samples is made faster than a worker process can transfer it: load in the "
            "training process (num_workers=0), or make larger batches.",
            "ready": "Batches are finished, but taking one from its worker takes {ms:.3g} ms a step: keep them "
            "small (uint8 instead of float32), make them of few tensors rather than many Python objects, and leave "
            "padding and stacking to the device.",
        },
    ),
    Cause(
        "pin_memory",
        "Batches wait for the thread that copies them into page-locked memory.",
        "Batches wait for the pin-memory thread. Give it larger and fewer tensors per batch, smaller types, or try "
        "pin_memory=False.",
        decided_by="ms_per_step step_ms workers_busy_percent queue_empty_percent",
        group="loader",
    ),
    Cause(
        "host_to_device",
        "The GPU does nothing else while batches are copied to it.",
        "The GPU does nothing else while batches are copied to it: ",
        decided_by="ms_per_step step_ms copy_ms exposed_copy_ms pin_memory",
        group="transfer",
        cases={
            "pinned": "CudaPrefetcher() among the Trainer's callbacks copies the next batch during the step"
            "{with_workers}. Smaller types (uint8, normalised on the GPU) make the copy itself shorter.",
            "not_pinned": "CudaPrefetcher() among the Trainer's callbacks copies the next batch during the step, from "
            "page-locked memory{with_workers}. Without it, pin_memory=True makes the copy shorter.",
            "ahead": "The GPU waits for batches to be copied, although CudaPrefetcher starts copies as early as it "
            "can: ",
            "ahead_too_long": "the copy takes longer than the rest of the step. Send smaller types (uint8, and "
            "normalise on the GPU).",
            "ahead_too_late": "the loader delivers them too late, or batches differ in size (depth=2 evens that out).",
            "no_gpu": "Walking through the batch to move it takes long: make batches of few large tensors, not many "
            "objects.",
        },
    ),
    Cause(
        "gpu_sync",
        "The host waits for the GPU inside the step, and the GPU for the host afterwards.",
        "The host waits for the GPU inside the step, at {where}, so the GPU waits for the host afterwards: remove "
        ".item(), .cpu() and prints of tensors there, or run them every n steps.",
        decided_by="alloc_retries_per_step ms_per_step step_ms busy_ms_per_step syncs_per_step",
        group="step",
        cases={
            "memory": "torch's allocator finds no free block of GPU memory, returns memory to the driver and retries, "
            "which waits for the GPU: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, keep the sizes of tensors "
            "the same from step to step, or use a smaller batch.",
            "broadcast": "Before every step Lightning broadcasts whether it received a stop signal, and waits for the "
            "result. No setting disables this; larger batches make it rarer.",
        },
    ),
    Cause(
        "device_copies",
        "The GPU waits for copies between host and device that the step itself makes.",
        "The step itself copies from {direction}, and the GPU computes nothing meanwhile: keep what it needs on the "
        "device, or copy it early enough, from pinned memory with non_blocking=True on a stream of its own.",
        decided_by="ms_per_step step_ms copies_ms_per_step gb_per_s",
        group="step",
        cases={
            "to_host": "The step itself copies from {direction}, and the GPU computes nothing meanwhile: keep results "
            "on the device, copy them every n steps, or into pinned memory with non_blocking=True.",
            "both": "The step itself copies to the host and back, as an offloaded optimizer or parameters do, and the "
            "GPU computes nothing meanwhile: offload less, accumulate gradients over more batches "
            "(accumulate_grad_batches), so that it happens less often, or overlap the copies.",
            "pageable": " They are copies of pageable memory, which are slower and block the host: pin it "
            "(tensor.pin_memory()).",
        },
    ),
    Cause(
        "launch_bound",
        "The GPU finishes kernels faster than the host starts them.",
        "The GPU finishes kernels faster than the host starts them: use larger batches, torch.compile "
        '(mode="reduce-overhead" uses CUDA graphs), and fused optimizers (fused=True).',
        decided_by="memory_pressure_percent swap_mib_per_s ms_per_step "
        "step_ms busy_ms_per_step gpu_utilization_percent",
        group="step",
        cases={
            "memory": "The machine is short of memory, and the host waits for swap: keep less in memory.",
        },
    ),
    Cause(
        "callback",
        "A callback's own work delays training.",
        "{callback}.{hook} delays training: do its work less often, or in a thread.",
        decided_by="hooks_s ms_per_step step_ms",
        group="hooks",
        in_user_code=True,
        cases={
            "batch_transfer": "{callback}.{hook} delays training with each batch: do its work in the workers, in the "
            "dataset's transform or in collate_fn.",
            "finder": "NumWorkersFinder started workers, or measured how many are needed. It does so at the beginning, "
            "which matters in a run this short. Set the num_workers it found, and remove it.",
            "measuring": "This is the cost of measuring and of AutoFix's changes: it matters in a run this short, or "
            "with steps this short. Training without them has no such cost.",
        },
    ),
    Cause(
        "logging",
        "Logger calls, or metrics that are reduced over the ranks in each step, delay training.",
        "The logger's calls delay training: log less often with Trainer(log_every_n_steps=...), or let the logger "
        "write in the background.",
        decided_by="ms_per_step step_ms sync_ms_per_step syncs_per_step",
        group="hooks",
        in_user_code=True,
        cases={
            "metrics": "Metrics are reduced over all ranks in each step, and the step waits for it: self.log(..., "
            "sync_dist=True) with on_step=False, on_epoch=True reduces them once an epoch, and without sync_dist=True "
            "each rank logs its own.",
        },
    ),
    Cause(
        "checkpoint",
        "Saving checkpoints takes much of the run.",
        "Saving checkpoints takes this share of the run: save less often (ModelCheckpoint(every_n_train_steps=...)), "
        "only the weights (save_weights_only=True), or to a faster disk.",
        decided_by="checkpoint_s hyperparameters",
        group="epoch",
        cases={
            "background": " Or save in the background (AsyncCheckpointIO).",
            "upgrade": " To save in the background, upgrade Lightning first: before 2.5.4 AsyncCheckpointIO does not "
            "copy the tensors, and a checkpoint may mix those of several steps.",
        },
    ),
    Cause(
        "validation",
        "Validation takes much of the run.",
        "Validation takes this share of the run: validate less often (check_val_every_n_epoch, val_check_interval), on "
        "fewer batches (limit_val_batches), or with more workers in the validation loader.",
        decided_by="validation_s validation_setup_s",
        group="epoch",
        waiting="none",
        cases={
            "set_up": "Most of it is the set-up of each validation, before its first batch arrives: keep the workers "
            "of the validation loader with persistent_workers=True. ",
        },
    ),
    Cause(
        "epoch_restart",
        "Training waits at the beginning of every epoch.",
        "The workers are started again for every epoch: keep them with persistent_workers=True.",
        decided_by="epoch_setup_s_per_epoch epochs largest_part "
        "starting_workers_s_per_validation first_batch_s_per_validation validations",
        group="epoch",
        cases={
            "first_batch": "Training waits for the first batch of each epoch: fewer, longer epochs make it rarer, "
            "smaller batches make it come sooner, and an iterator made during validation or the last steps hides it.",
            "buffer": "In each epoch training waits until a shuffle buffer is filled: a smaller buffer fills faster.",
            "index": "In each epoch training waits for the dataset's work before its first sample: read an index once, "
            "in __init__, not in every __iter__; a smaller shuffle buffer fills faster.",
            "shards": "In each epoch training waits until the stream's first shards are opened: keep them on a local "
            "disk, or have fewer, longer epochs.",
            "iterator": "In each epoch training waits while the loader's iterator is made: check what the sampler and "
            "__iter__ do before the first batch, and do it once.",
            "validation": "The validation loader's workers are started again for each validation: keep them with "
            "persistent_workers=True in val_dataloader. They keep their memory between validations.",
        },
    ),
    Cause(
        "straggler",
        "One rank is slower than the others, and all of them wait for it.",
        "Rank {rank} is slower than the others, and they wait for it: check ",
        decided_by="ms_per_step ms_per_step_elsewhere batch_mib batch_mib_elsewhere",
        group="ranks",
        waiting="others",
        cases={
            "data": "its data: the disk, the CPUs and the samples of that process.",
            "compute": "what else runs on its CPUs and GPU, and work that only this rank does.",
            "sizes": "the sizes of its samples. Its batches have {batch_mib:.3g} MiB, the others' "
            "{batch_mib_elsewhere:.3g}: sort or bucket samples so that all ranks have batches of similar length.",
        },
    ),
    Cause(
        "gpu_throttled",
        "The GPU runs at reduced clocks, for heat or by its hardware's power brake.",
        "The GPU's clocks are reduced for heat or by its hardware's power brake: check its cooling and power supply "
        "(nvidia-smi -q -d PERFORMANCE).",
        decided_by="throttled_percent sm_clock_mhz sm_clock_mhz_max",
        group="step",
        waiting="none",
    ),
    Cause(
        "communication",
        "Collectives between ranks run while nothing else does.",
        "Collectives between ranks are not hidden behind computation: give each GPU more work per step (larger "
        "batches, accumulate_grad_batches), send less (bf16 gradient compression), and see that the ranks' links are "
        "fast.",
        decided_by="ms_per_step step_ms gradient_mib link buckets",
        group="ranks",
        cases={
            "one_look": " Only rank 0 was profiled: if another rank's forward is slower and has collectives, this "
            "is the wait for that rank.",
        },
    ),
    Cause(
        "slowdown",
        "The steps get slower over the run.",
        "A step took {from_ms:.3g} ms, and takes {to_ms:.3g} ms since step {since}: {part} grows.",
        decided_by="phase_from_ms phase_to_ms sm_clock_from_mhz sm_clock_to_mhz gpu_allocated_mib_grown "
        "gpu_reserved_mib_grown rss_mib_grown open_files_grown threads_grown alloc_retries_grown",
        group="run",
        waiting="none",
    ),
    Cause(
        "recompilation",
        "torch.compile recompiles again and again.",
        "torch.compile recompiles again and again, and the step waits for it.",
        decided_by="ms_per_step step_ms compilations ms_per_compilation",
        group="step",
        cases={
            "sizes": "Keep sizes constant: drop_last=True, or pad to a few lengths (buckets); or compile for any size "
            "with torch.compile(dynamic=True) or torch._dynamo.mark_dynamic(tensor, dim).",
            "number": "A number changes from step to step: pass it as a tensor, or keep it out of the compiled code.",
            "other": "Keep it the same from step to step, or move it out of the compiled code.",
            "unknown": "TORCH_LOGS=recompiles shows which function, and why.",
        },
    ),
    Cause(
        "garbage_collection",
        "Python's garbage collector stops the step.",
        "Python's garbage collector stops the step: it scans all objects, including long-lived ones. After the set-up "
        "(on_train_start) call gc.collect(), gc.freeze() and gc.disable(), and then gc.collect(1) every n steps in a "
        "callback, on each rank at the same step. Keep fewer Python objects: arrays or tensors rather than lists and "
        "dicts of numbers.",
        decided_by="ms_per_step generation_2_per_step longest_pause_ms objects_tracked",
        group="step",
        cases={
            "asked": "The program calls gc.collect() in the step, at {where}: remove it there, or call it only every n "
            "steps. gc.freeze() at the end of the set-up makes each of them shorter.",
        },
    ),
)

CAUSES: Final = {cause.name: cause for cause in _ALL}  # every cause that is found, by name
_VERDICTS: Final = {**CAUSES, **{each.name: each for each in (COMPUTE_BOUND, UNKNOWN, NOT_MEASURED)}}


def cause_of(verdict: str) -> Cause:
    """The row of a verdict or a finding; an empty one for what is not known, as in a report of another version."""
    return _VERDICTS.get(verdict) or Cause(verdict, "", "")

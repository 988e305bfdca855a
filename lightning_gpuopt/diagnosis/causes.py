"""The one table of causes: what each means, what to do about it, and where the documentation says more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of waiting.

    Attributes:
        name: as it stands in reports and in their JSON.
        meaning: a sentence for the top of a report.
        advice: what to do about it; ``{names}`` in it are filled in by the finding.
    """

    name: str
    meaning: str
    advice: str

    @property
    def docs(self) -> str:
        """Where the documentation says more, from the root of the project."""
        return f"docs/causes/{self.name}.md"


COMPUTE_BOUND: Final = Cause(
    "compute_bound", "Nothing holds the training up: the time goes into the steps' own work.", ""
)

UNKNOWN: Final = Cause(
    "unknown",
    "The GPU may wait inside the steps: a look was needed and not allowed. A note says how to allow it.",
    "",
)

_ALL: Final = (
    Cause(
        "main_process_loading",
        "The training process loads the data itself, and the device waits while it does.",
        "The training process loads the data itself. Load in worker processes: num_workers={num_workers}.",
    ),
    Cause(
        "slow_storage",
        "The loader spends most of its time waiting for storage.",
        "The workers mostly wait for storage, not for the CPU. More of them read more at once: "
        "num_workers={num_workers}.",
    ),
    Cause(
        "slow_transform",
        "Decoding and transforming is what takes the loader longest, and CPUs are free.",
        "The workers compute all the time and CPUs are free: num_workers={num_workers}.",
    ),
    Cause(
        "cpu_saturated",
        "The loader uses all the CPU there is: more workers or threads would not help.",
        "The workers use all the CPU there is: more of them would not help. Decode and transform less or cheaper, or "
        "move transforms to the GPU.",
    ),
    Cause(
        "cpu_throttled",
        "A CPU quota stops the process, its threads and its workers again and again.",
        "A CPU quota (cgroup) stops the workers: more of them would not help. Ask for more CPUs (Kubernetes: "
        "resources.limits.cpu; Slurm: --cpus-per-task; Docker: --cpus), or make the transforms cheaper.",
    ),
    Cause(
        "head_of_line",
        "Batches are ready, but the next one in order is late.",
        "Batches are ready, but the next one in order is late: a few samples take much longer than the rest. Prepare "
        "more ahead (prefetch_factor={prefetch_factor}), or make those samples cheaper; where order does not matter, "
        "in_order=False hands out what is ready.",
    ),
    Cause(
        "worker_transfer",
        "Putting batches together and handing them to the training process takes longest.",
        "The samples are read quickly; putting them together into a batch and handing it to the training process is "
        "what takes long. Collate tensors rather than Python objects, keep them small (uint8 instead of float32), and "
        "leave padding and stacking to the device. LMDBDataModule gathers small records batch-wise without workers.",
    ),
    Cause(
        "pin_memory",
        "Batches wait for the thread that copies them into page-locked memory.",
        "Batches wait for the pin-memory thread. Give it larger and fewer tensors per batch, smaller types, or try "
        "pin_memory=False.",
    ),
    Cause(
        "host_to_device",
        "The GPU does nothing else while batches are copied to it.",
        "The GPU does nothing else while batches are copied to it: ",
    ),
    Cause(
        "gpu_sync",
        "The host waits for the GPU inside the step, and the GPU for the host afterwards.",
        "The host waits for the GPU inside the step, at {where}, so the GPU waits for the host afterwards: leave out "
        ".item(), .cpu() and prints of tensors there, or do them every n steps.",
    ),
    Cause(
        "launch_bound",
        "The GPU finishes kernels faster than the host starts them.",
        "The GPU finishes kernels faster than the host starts them: use larger batches, torch.compile "
        '(mode="reduce-overhead" uses CUDA graphs), and fused optimizers (fused=True).',
    ),
    Cause(
        "callback",
        "A callback's own work holds the training up.",
        "{callback}.{hook} holds up training: do its work less often, or in a thread.",
    ),
    Cause(
        "logging",
        "Calls of the logger, or metrics that are reduced over the ranks in each step, hold the training up.",
        "The logger's own calls hold up training: log less often with Trainer(log_every_n_steps=...), or let the "
        "logger write in the background.",
    ),
    Cause(
        "checkpoint",
        "Saving checkpoints takes much of the run.",
        "Saving checkpoints takes this share of the run: save less often (ModelCheckpoint(every_n_train_steps=...)), "
        "only the weights (save_weights_only=True), to a faster disk, or in the background (AsyncCheckpointIO).",
    ),
    Cause(
        "validation",
        "Validation takes much of the run.",
        "Validation takes this share of the run: validate less often (check_val_every_n_epoch, val_check_interval), on "
        "fewer batches (limit_val_batches), or with more workers in the validation loader.",
    ),
    Cause(
        "epoch_restart",
        "The loader's workers are started again for every epoch.",
        "The workers are started again for every epoch: keep them with persistent_workers=True.",
    ),
    Cause(
        "straggler",
        "One rank is slower than the others, and all of them wait for it.",
        "Rank {rank} is slower than the others, and they wait for it: look at ",
    ),
    Cause(
        "gpu_throttled",
        "The GPU runs at reduced clocks, for heat or by its hardware's power brake.",
        "The GPU's clocks are reduced for heat or by its hardware's power brake: look at its cooling and power supply "
        "(nvidia-smi -q -d PERFORMANCE).",
    ),
    Cause(
        "communication",
        "Collectives between ranks run while nothing else does.",
        "Collectives between ranks are not hidden behind computation: give each GPU more work per step (larger "
        "batches, accumulate_grad_batches), send less (bf16 gradient compression), and see that the ranks' links are "
        "fast.",
    ),
    Cause(
        "slowdown",
        "The steps get slower over the run.",
        "A step took {from_ms:.3g} ms, and takes {to_ms:.3g} ms since step {since}: {part} grows.",
    ),
    Cause(
        "recompilation",
        "torch.compile compiles again and again.",
        "torch.compile compiles again and again, and the step waits for it.",
    ),
    Cause(
        "garbage_collection",
        "Python's garbage collector stops the step.",
        "Python's garbage collector stops the step: it looks through all objects, also those that stay. After the "
        "set-up (on_train_start) call gc.collect(), gc.freeze() and gc.disable(), and then gc.collect(1) every n steps "
        "in a callback, on each rank at the same step. Keep fewer Python objects: arrays or tensors rather than lists "
        "and dicts of numbers.",
    ),
)

CAUSES: Final = {cause.name: cause for cause in _ALL}
"""Every cause that is found, by name."""


def meaning_of(verdict: str) -> str:
    """The sentence for a verdict; empty for one that is not known, as in a report of another version."""
    cause = {each.name: each for each in (COMPUTE_BOUND, UNKNOWN)}.get(verdict) or CAUSES.get(verdict)
    return cause.meaning if cause is not None else ""

"""Where the time of a run goes: seconds by phase, by step and by window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lightning_gpuopt.measurements.counters import Summed, added

PHASES: Final = (
    *("data_wait", "transfer", "forward", "backward", "optimizer"),
    *("callbacks", "logging", "validation", "checkpoint", "epoch_setup", "other"),
)

BETWEEN_STEPS: Final = ("validation", "checkpoint", "epoch_setup")  # phases that are no part of a training step
# Lightning's broadcast before each step under several ranks: whether a signal told it to stop
SIGNAL_BROADCAST: Final = "signal_broadcast"
# the first fetch of an epoch, a part of ``epoch_setup``: what the workers do until there is a batch
FIRST_FETCH: Final = "first_fetch"
# Python's collector at work on the training thread, which does nothing else meanwhile
GARBAGE_COLLECTION: Final = "garbage_collection"
RECOMPILATION: Final = "recompilation"  # torch.compile at work, which the training thread waits for
GPU_WORK: Final = "gpu_work"  # the part of a window in which the GPU ran the steps' own work
# hooks that are called in every training step; the others lie between steps
STEP_HOOKS: Final = frozenset(
    {
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step"),
        *("on_before_backward", "on_after_backward", "on_before_batch_transfer", "on_after_batch_transfer"),
    }
)


@dataclass(frozen=True, slots=True)
class PhaseTimes(Summed):
    """Where the time of a stretch of training went, on the training thread, in seconds."""

    wall_s: float = 0.0  # length of the stretch
    steps: int = 0  # training batches finished in it
    # exclusive; every phase is there, and they sum to ``wall_s``
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    # exclusive, by hook, "MyCallback.on_train_batch_end"; they sum to ``phases["callbacks"]``
    callbacks: dict[str, float] = field(default_factory=dict)
    epochs: int = 0  # epochs begun in it
    # the broadcast before each step under DDP, by which Lightning agrees on whether a signal told it to stop; part of
    # ``phases["other"]``
    signal_broadcast_s: float = 0.0
    first_fetch_s: float = 0.0  # first fetch of each epoch; part of ``phases["epoch_setup"]``
    validation_setup_s: float = 0.0  # from the beginning of each validation to its first batch; part of the validation
    validations: int = 0  # validations of which a first batch has come
    # Lightning's own loops and strategy, by part; in ``phases["other"]``
    loops: dict[str, float] = field(default_factory=dict)
    # Python's garbage collector stopped a step, by what it stopped: a phase, or a hook; part of its seconds
    collecting: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)  # the same of torch.compile
    # hooks around the copy of a batch, "MyModel.on_after_batch_transfer"; part of ``phases["transfer"]``
    batch_hooks: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float | None:
        """Mean seconds per training batch, without validation, checkpoints, the set-up of epochs and their hooks."""
        if not self.steps:
            return None
        aside_s = sum(self.phases[phase] for phase in BETWEEN_STEPS) + self.phases["callbacks"] - self.step_hooks_s
        return max(self.wall_s - aside_s, 0.0) / self.steps

    @property
    def step_hooks_s(self) -> float:
        return sum(seconds for name, seconds in self.callbacks.items() if name.rpartition(".")[2] in STEP_HOOKS)


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window of the run, or several that follow each other, for what changes over the run."""

    steps: int
    end_step: int  # steps of the run until its end
    seconds: float  # of its steps, without validation, checkpoints and the set-up of epochs; a GPU's own clock
    parts: dict[str, float]  # seconds of those by what the device waited for or did: a phase, a hook, or "gpu_work"
    # what process and GPU held at its end: ``rss_mib``, ``open_files``, ``threads``, ``gpu_allocated_mib``,
    # ``gpu_reserved_mib``, ``alloc_retries``, and the mean ``sm_clock_mhz``
    held: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # seconds to issue forward, backward and optimizer, on a GPU

    def joined(self, later: WindowRecord) -> WindowRecord:
        parts, host = added(self.parts, later.parts), added(self.host, later.host)
        return WindowRecord(
            self.steps + later.steps, later.end_step, self.seconds + later.seconds, parts, later.held, host
        )


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than the others of its kind."""

    step: int  # number of the training batch in this run, from 0
    at_s: float  # when it ended, since the timeline's start
    seconds: float  # without validation, checkpoints and the set-up of epochs
    phase: str  # the phase in which it lost most, against the mean of the run
    phase_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Distribution of step times after warm-up."""

    edges_s: tuple[float, ...] = ()  # lower edges of the bins that are not empty, and the upper edge of the last
    counts: tuple[int, ...] = ()  # steps in each bin
    median_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    slowest_s: float | None = None
    outliers: tuple[Outlier, ...] = ()  # the slowest, in order of time; at most 100
    outlier_count: int = 0  # in all
    outlier_s: float = 0.0  # all of them took that much more than the median of their kind

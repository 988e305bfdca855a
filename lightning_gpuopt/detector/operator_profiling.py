"""Decides when to record the operators of a few steps on a CPU, once in a run and only where that is allowed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from lightning_gpuopt.detector.kernel_profiling import Profile
from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.timeline.look import CannotLookError, OperatorLook
from lightning_gpuopt.timeline.module_calls import ModuleCalls
from lightning_gpuopt.timeline.phases import Timeline

_AFTER: Final = 10
"""Steps after the warm-up at which rank 0 records with ``profile="on"`` where no end can be foreseen."""

_SPARE_STEPS: Final = 2

_MAX_NODES: Final = 2000
"""Nodes of a loss's graph from which on a step is not recorded: torch keeps about 10 KiB for each operator, and takes
0.1 ms; a ResNet-50 has 500 nodes, a Transformer of 12 layers 1,500."""

_LONGEST_S: Final = 0.25
_LONG_STEP_S: Final = 30.0
"""Mean seconds of a step beyond which it is never recorded: operators that are in no graph are not counted before."""

_UNFORESEEN: Final = 16
"""Steps after which to ask again for an end that could not be foreseen."""

_LEAST_S: Final = 10.0
"""With ``profile="auto"``, shorter runs are not worth the time that a profiler takes to start."""


class OperatorProfiling:
    """Records the operators of a step: in the last ones before a foreseen end, with ``"auto"`` where nothing was found.

    Without a foreseen end ``batches_left`` gives None. On several ranks ``"auto"`` records nothing, and nothing is
    while ``is_taken``: torch.profiler is at work for a trace. ``modules`` is None where the user's modules may not be
    noted. :meth:`step_done` has nothing to do before ``due_at`` steps since the end of the warm-up. ``notes`` say why
    nothing was recorded.
    """

    def __init__(
        self,
        timeline: Timeline,
        profile: Profile,
        *,
        batches_left: Callable[[], int | None],
        several_ranks: bool,
        is_taken: Callable[[], bool],
        modules: Callable[[], ModuleCalls | None],
        found: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due_at = 1
        self.kernels: StepKernels | None = None
        self.notes: list[str] = []
        self._timeline = timeline
        self._profile = profile
        self._batches_left = batches_left
        self._is_taken = is_taken
        self._modules = modules
        self._found = found
        self._clock = clock
        self._began_s = clock()
        self._look: OperatorLook | None = None
        self._counts = False
        self._nodes: int | None = None
        self._spent_s = 0.0
        self._over = False
        if profile == "off" or (several_ranks and profile == "auto"):
            self._end()

    @property
    def recording(self) -> bool:
        """Whether our own torch.profiler is running."""
        return self._look is not None

    @property
    def left_out(self) -> bool:
        """Whether nothing was looked at in a run that is long enough, and could have been."""
        long = self._clock() - self._began_s >= _LEAST_S
        return self._profile == "auto" and long and self.kernels is None and not self.notes

    def leaves_time_for(self, steps: int) -> bool:
        """Whether torch.profiler is free for so many steps."""
        return self._look is None

    def see_loss(self, loss: Any) -> None:
        """A backward pass is about to begin: count what a step's graph consists of, once before it is recorded."""
        if self._counts:
            self._counts, self._nodes = False, _nodes_of(loss)

    def step_done(self, steps: int) -> None:
        """A step has ended; ``steps`` are counted since the end of the warm-up."""
        if self._over or steps < self.due_at:
            return
        begin_s = self._clock()
        try:
            if self._look is not None:
                if self._look.step_done():
                    self._read()
            elif self._due(steps) and not self._is_taken():
                self._begin(steps)
        except CannotLookError as error:
            self.notes.append(f"The step's operators could not be recorded with torch.profiler: {error}.")
            self.finish()
        self._spent_s += self._clock() - begin_s
        if self.kernels is not None:
            self.notes.append(f"torch.profiler recorded a step's operators, which took {self._spent_s:.2f} s.")

    def finish(self) -> None:
        """End with the run; what is not recorded by then is dropped."""
        self._end()
        look, self._look = self._look, None
        if look is not None:
            look.end()
            self._timeline.forget_host_work()

    def _end(self) -> None:
        self._over, self.due_at = True, sys.maxsize

    def _due(self, steps: int) -> bool:
        left = self._batches_left()
        if left is None and self._profile == "on":
            self.due_at = max(_AFTER, steps)
            return steps >= _AFTER
        early = _UNFORESEEN if left is None else left - OperatorLook().lasts - 1 - _SPARE_STEPS
        if early > 0:  # half of them: the end may come nearer than it was
            self.due_at = steps + (early + 1) // 2
            return False
        return self._profile == "on" or (self._clock() - self._began_s >= _LEAST_S and not self._found())

    def _begin(self, steps: int) -> None:
        """Record the next steps, once it is known that they are not too much for that."""
        step_s = (self._clock() - self._began_s) / steps
        if step_s > (_LONG_STEP_S if self._profile == "on" else _LONGEST_S):
            raise CannotLookError(f"a step takes {step_s:.1f} s")
        if self._nodes is None:
            self._counts = True
            return
        if self._nodes > _MAX_NODES:
            raise CannotLookError(f"a step has more than {_MAX_NODES:,} operations")
        self._look = OperatorLook(modules=self._modules())
        self._timeline.keep_host_work()
        self._look.begin()

    def _read(self) -> None:
        look, self._look = self._look, None
        assert look is not None
        self._end()
        timeline = self._timeline
        work = timeline.take_host_work()
        timeline.forget_host_work()
        phases = [(timeline.name_of(work[index]), work[index + 1] / 1e9) for index in range(0, len(work), 2)]
        self.kernels = look.operators(phases)


def _nodes_of(loss: Any) -> int:
    """Nodes of a loss's graph, as far as they are not too many."""
    seen: set[Any] = set()
    open_ = [getattr(loss, "grad_fn", None)]
    while open_ and len(seen) <= _MAX_NODES:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ += [each for each, _ in node.next_functions]
    return len(seen)

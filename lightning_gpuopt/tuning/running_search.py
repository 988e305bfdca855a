"""Decides on the number of workers of a running loader: measurements in, the number to try next out.

The policy measures a window, changes the number, measures whether that helped, and when there is nothing left to gain
it sleeps, and measures again now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.measurements.loader_model import LoaderModel, next_workers
from lightning_gpuopt.tuning.search_result import LimitedBy, Trial
from lightning_gpuopt.tuning.worker_limits import Cap

_MIN_WINDOW: Final = 6
_IDLE_WINDOW: Final = 50  # steps measured before a worker is removed: an idle worker costs little, a missing one much
_MAX_LEAP: Final = 8  # largest factor by which workers grow at once: measurements with few of them are a rough guide
_LOOK_AGAIN: Final = 200  # steps between two measurements of a settled loader; doubles up to the next
_LOOK_AGAIN_AT_LAST: Final = 3200
_ALL_CPUS: Final = 0.9  # CPU utilization, 0-1, from which on another worker is not tried
_ANOTHER_STEP: Final = 0.25  # relative change of the step time after which earlier measurements no longer count


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Steps with the same number of workers; times are per step, and None is not known."""

    step_s: float
    wait_s: float  # without the cost of taking a finished batch
    busy: float | None = None  # batches in the making, or waiting for a worker, when the consumer came for one
    worker_cpu_s: float | None = None
    consumer_cpu_s: float = 0.0
    batch_bytes: float = 0.0
    batch_tensors: int = 0  # files that a batch keeps open


class LivePolicy:
    """Decides, window by window, on the ``num_workers`` that should run."""

    def __init__(self, num_workers: int, *, cpus: float, tolerance: float = 0.05, prefetch_factor: int = 2) -> None:
        self.num_workers = num_workers
        self.settled = False  # nothing is being tried
        self.limited_by: LimitedBy = "consumer"
        self._cpus = cpus  # for the loader and its consumer
        self._tolerance = tolerance  # share of the step below which a wait or a gain does not count
        self._prefetch_factor = prefetch_factor
        self._trials: dict[int, Trial] = {}
        self._before: tuple[int, LoaderStats] | None = None
        self._settled_step_s: float | None = None
        self._ceiling: tuple[int, LimitedBy] | None = None
        self._floor, self._idle, self._look_again = 1, False, _LOOK_AGAIN
        # the next window is of ``window`` steps, after ``skip`` steps in which nothing can be learned
        self.skip, self.window = max(num_workers, 2), _window(num_workers)

    @property
    def trials(self) -> list[Trial]:
        """The last measurement of each number, in the order in which they were first tried."""
        return list(self._trials.values())

    def decide(self, seen: LoaderStats, cap: Cap) -> int:
        """The number to run now, after a window with ``num_workers``."""
        count = self.num_workers
        self._trials[count] = Trial(count, 1.0 / seen.step_s, seen.wait_s)
        before, self._before = self._before, None
        settled_s = self._settled_step_s
        if before is None and settled_s is not None and abs(seen.step_s - settled_s) > _ANOTHER_STEP * settled_s:
            self._ceiling, self._floor, self._settled_step_s, self._look_again = None, 1, None, _LOOK_AGAIN
        starved = seen.wait_s > self._tolerance * seen.step_s
        if before is None or self._helped(*before, seen, starved):
            return self._improve(seen, starved, cap)
        number, earlier = before
        self._change(number, None)
        return self._settle(earlier)

    def set(self, num_workers: int, *, settle: bool = False) -> None:
        """Set the number that actually runs; ``settle``: leave it so for a while, else measure whether it is right."""
        self._change(num_workers, None)
        if settle:
            self.settled, self.skip = True, _LOOK_AGAIN_AT_LAST

    def wake(self) -> None:
        if self.settled:
            self.settled, self.skip, self.window = False, 0, _window(self.num_workers)

    def _improve(self, seen: LoaderStats, starved: bool, cap: Cap) -> int:
        if starved:
            more = self._more(seen, cap)
            return self._change(more, seen) if more > self.num_workers else self._settle(seen)
        self.limited_by = "consumer"
        fewer = self._fewer(seen)
        if fewer >= self.num_workers:
            return self._settle(seen)
        if not self._idle:
            self.settled, self._idle = False, True
            self.skip, self.window = 0, max(_IDLE_WINDOW, _window(self.num_workers))
            return self.num_workers
        return self._change(fewer, seen)

    def _helped(self, number: int, earlier: LoaderStats, seen: LoaderStats, starved: bool) -> bool:
        """Whether the change from ``number`` helped; what has not is not tried again."""
        if self.num_workers > number:
            if earlier.step_s >= (1 + self._tolerance) * seen.step_s:
                return True
            # Where nothing is waited for any more, it was not the data that set the pace: a GPU that works behind the
            # training loop, or another rank.
            self.limited_by = "cpu" if starved else "consumer"
            self._ceiling = number, self.limited_by
            return False
        if starved and seen.step_s > (1 + self._tolerance) * earlier.step_s:
            self._floor = number
            return False
        return True

    def _more(self, seen: LoaderStats, cap: Cap) -> int:
        """The workers that a starved consumer should have; the current number if more would not help."""
        count = self.num_workers
        model = self._model(seen, count * seen.step_s)
        most = min(cap.num_workers, _MAX_LEAP * count)
        ceiling, reason = self._ceiling or (most, cap.limited_by)
        most = min(most, ceiling)
        if count >= most:
            self.limited_by = reason if count == ceiling else cap.limited_by
            return count
        if (model.cpu_s + model.consumer_cpu_s) / seen.step_s > _ALL_CPUS * self._cpus:
            self.limited_by = "cpu"
            return count
        needed = next_workers(model, count, most)
        self.limited_by = cap.limited_by if needed == cap.num_workers else "consumer"
        return needed

    def _fewer(self, seen: LoaderStats) -> int:
        """The workers that suffice for a consumer that does not wait; the number now unless clearly fewer do."""
        count = self.num_workers
        if seen.busy is None or count <= 1:
            return count
        # By Little's law the batches in the making are the rate times the time that one takes.
        model = self._model(seen, min(seen.busy, count) * seen.step_s)
        needed = max(model.workers_needed(count), self._floor)
        return needed if 3 * needed <= 2 * count else count

    def _model(self, seen: LoaderStats, service_s: float) -> LoaderModel:
        cpu_s = min(seen.worker_cpu_s or 0.0, service_s)
        consumer_s = max(seen.step_s - seen.wait_s, 1e-6)
        return LoaderModel(service_s, cpu_s, consumer_s, seen.consumer_cpu_s, (self._cpus,) * 3)

    def _change(self, count: int, seen: LoaderStats | None) -> int:
        """Try another number, to be compared with ``seen``."""
        earlier, self.num_workers = self.num_workers, count
        self._before = (earlier, seen) if seen is not None else None
        self.settled, self._idle, self._look_again = False, False, _LOOK_AGAIN
        # what was asked for before comes first, then one round of the first batches of all
        self.skip, self.window = self._prefetch_factor * earlier + count, _window(count)
        return count

    def _settle(self, seen: LoaderStats) -> int:
        self._settled_step_s = seen.step_s
        self.settled, self._idle = True, False
        self.skip, self.window = self._look_again, _window(self.num_workers)
        self._look_again = min(2 * self._look_again, _LOOK_AGAIN_AT_LAST)
        return self.num_workers


def _window(count: int) -> int:
    """Steps of the next window, in whole rounds: busy workers deliver in bursts of one batch each."""
    return max(count, 1) * math.ceil(_MIN_WINDOW / max(count, 1))

"""An epoch of a DataLoader in segments: the number of workers changes between segments.

The epoch's sampler is iterated once, in the training process (:mod:`~lightning_gpuopt.tuning.epoch_indices`). A
*segment* (:mod:`~lightning_gpuopt.tuning.segment`) is a copy of the user's DataLoader that reads the rest of it. To
change the number of workers, the running segment requests nothing more, and the next one takes over; its workers start
while the first one's batches still come, in order. All that workers do, and how they start, fail and end, is torch's.
"""

from __future__ import annotations

import logging
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gpuopt.compat.dataloader import WorkersIterator, copy_of, number_from, shut_down, workers_of
from lightning_gpuopt.loading.elastic_loader import sample_tasks
from lightning_gpuopt.loading.engine.engine import CannotServe
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from lightning_gpuopt.loading.order import mix
from lightning_gpuopt.loading.sampler import Later, epoch_of_rank, most_samples
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.timeline.worker_numbers import NumberedWorkers
from lightning_gpuopt.tuning.epoch_indices import EpochIndices, RestOfEpoch
from lightning_gpuopt.tuning.random_draws import DrawWatch
from lightning_gpuopt.tuning.seen_order import SeenOrder
from lightning_gpuopt.tuning.segment import Drained, Segment
from lightning_gpuopt.tuning.sharing import forks
from lightning_gpuopt.utils.replaced_method import hide_us

log = logging.getLogger(__name__)

_SEED_STEP: Final = 0x9E3779B97F4A7C15
_SEEDS: Final = 1 << 63

_TIMED_OUT: Final = "DataLoader timed out"
_DIED: Final = "DataLoader worker (pid"  # how torch's error begins where a worker has died
Make = Callable[[], Any]


@dataclass
class Segments:
    """What all iterators of a loader share; with ``keeps`` its workers live on although the loader does not say so."""

    order: SeenOrder = field(default_factory=SeenOrder)
    draws: DrawWatch = field(default_factory=DrawWatch)
    keeps: bool = False
    kept: Segment | None = None
    by_sample: bool = False  # from the next segment on each sample is a task of the workers, not each batch
    why_by_batch: str | None = None  # why that has ended by itself

    @staticmethod
    def of(loader: DataLoader[Any]) -> Segments:
        if loader not in _shared:
            _shared[loader] = Segments()
        found: Segments = _shared[loader]
        return found

    def end_kept(self) -> None:
        kept, self.kept = self.kept, None
        if kept is not None:
            shut_down(kept.batches)


_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()


class SegmentedIterator(WorkersIterator):  # type: ignore[misc]
    """Iterates a DataLoader whose number of workers can change meanwhile; samples and their order are the loader's.

    ``changed`` says whether the dataset is another than as the epoch began, as these samples see it or, of None, at
    all: then no others take over from workers, and the training process from those that stand in for it.
    """

    resizes = True

    def __init__(
        self,
        loader: DataLoader[Any],  # over a map-style dataset; it begins with its ``num_workers``
        create: Callable[[Make], Any],  # makes a segment's iterator, with the given one where the loader would make it
        *,
        own_workers: int,  # that the user has given
        depth: int,  # batches that the loader asks for ahead as the user has set it; 0: it has no workers
        changed: Callable[[Iterable[Any] | None], bool] = lambda samples: False,
    ) -> None:
        self._loader = weakref.ref(loader)
        self._create, self._own_workers, self._depth, self.changed = create, own_workers, depth, changed
        self.shared = Segments.of(loader)
        self.failure: str | None = None  # what became of workers that were started in the user's place
        self.started: tuple[float, int] | None = None  # seconds that starting the last ones took, and their number
        self.begins_anew = False  # workers that persist give way to others as the next epoch begins
        self._segments: deque[Segment] = deque()
        self._count = self._epochs = 0
        self._seed = _next_seed(loader.generator)
        self._wanted: int | None = None
        self._kept, self.shared.kept = self.shared.kept, None
        anew = self._kept is not None and not self._kept.may_go_on(loader, by_sample=self.shared.by_sample)
        if self._kept is not None and (anew or not self.shared.keeps):
            self._kept.end()
            self._kept = None
        self._begin_epoch(loader)
        if not own_workers:
            self._begin(0, loader.generator, begins=True)
            self._wanted = loader.num_workers or None
        elif self._kept is None and not self.shared.by_sample:
            self._begin(loader.num_workers, loader.generator, begins=True)
        elif self._kept is None:
            self._draw_as_new(loader)
            self._begin_or_own(loader.num_workers)
        else:
            self._draw_as_new(loader)
            self._go_on()
        try:
            self._indices.draw_what_is_due()
        except BaseException:  # the sampler's: nobody will have this iterator, but maybe the exception
            self._shutdown_workers()
            raise

    def _begin_epoch(self, loader: DataLoader[Any]) -> None:
        order = self.shared.order
        ahead = order.why_not_ahead(loader) is None
        may = lambda: order.bound is None and (ahead or order.is_list)  # noqa: E731
        self._epochs += 1
        self._indices = EpochIndices(
            order.watched(loader), self._depth, may, epoch_of_rank(mix(self._seed, self._epochs) >> 1)
        )

    def _draw_as_new(self, loader: DataLoader[Any]) -> None:
        """Draw what a new iterator with workers draws: it iterates its sampler, draws a seed, and iterates it again."""
        iter(self._copy(loader, RestOfEpoch(self._indices, begins=True), 0, loader.generator, 0))
        self._indices.begin()

    # -- what others may ask

    @property
    def num_workers(self) -> int:
        """The workers of the last segment, or of one that is about to begin."""
        return self._wanted if self._wanted is not None else self._segments[-1].loader.num_workers

    _num_workers = num_workers

    @property
    def _persistent_workers(self) -> bool:
        return self._segments[-1].loader.persistent_workers

    @property
    def prefetch_factor(self) -> int | None:
        return self._segments[-1].loader.prefetch_factor

    @property
    def gpuopt_parts(self) -> list[Any]:
        """The iterators whose workers run: of the segment whose batches come, and of those after it."""
        segments = list(self._segments)  # other threads ask as well
        there = [each.batches for each in segments if not each.is_over]
        return [each for each in there if type(each) is not Drained] or [segments[-1].batches]

    @property
    def batches_left(self) -> int | None:
        """Batches of this epoch not requested yet; None if the sampler does not know its length."""
        return self._indices.left

    @property
    def as_without_workers(self) -> bool:
        """Whether workers stand in for the training process: each batch must match the dataset at its fetch."""
        return not self._own_workers

    @property
    def fetches_here(self) -> bool:
        """Whether the training process makes the batches instead of the wanted workers."""
        return not self._own_workers and self.failure is not None

    def __len__(self) -> int:
        return len(self._indices)

    # -- batches

    def __iter__(self) -> SegmentedIterator:
        return self

    def __next__(self) -> Any:
        return self._next_data()

    def _next_data(self) -> Any:
        try:
            if not self._own_workers and self.num_workers:
                self._stand_in()
            if "_try_put_index" not in self.__dict__:
                self._count_turn()
            if not self._depth:
                self._indices.draw_what_is_due()
                if self._segments[-1].rest.refused:
                    self._segments[-1].ask_again()
            while True:
                segment = self._segments[0]
                if segment.rest.stopped:
                    segment = self._now()
                try:
                    batch = next(segment.batches)
                except StopIteration as end:
                    if segment.has_come(end):  # a dataset of the user's raised it
                        self._taken(segment)
                        raise
                    if len(self._segments) > 1:  # it gave less than it was asked for
                        self._segments.popleft().end()
                    elif self._indices.waiting:  # the sampler gives more than it said
                        self._begin_next(segment.loader.num_workers)
                    else:
                        raise
                except Exception as error:
                    if segment.has_come(error):
                        self._taken(segment)
                        raise
                    if not self._goes_on_after(segment, error):
                        self._count_no_turn()
                        raise
                except BaseException:  # such as Ctrl-C
                    self._count_no_turn()
                    raise
                else:
                    self._taken(segment)
                    return batch
        except BaseException as error:
            hide_us(error)
            raise

    def _stand_in(self) -> None:
        """Workers replace the training process while the dataset is unchanged."""
        if not self._has_begun:
            self._begin_first()
        asked = [index for each in self._segments for index in each.rest.given]
        if self._segments[-1].loader.num_workers and self.changed(_samples(asked)):
            self._go_back("its dataset was changed while training ran, and workers would have kept the old state")

    @property
    def _has_begun(self) -> bool:
        return self._indices.due > self._depth

    def _count_turn(self) -> None:
        self.shared.order.turns += 1
        self._indices.due += 1

    def _count_no_turn(self) -> None:
        """No batch came in the turn that was counted."""
        if "_try_put_index" not in self.__dict__:
            self._indices.due -= 1

    def _try_put_index(self) -> None:
        """A batch taken ahead is used now: request one more."""
        self._count_turn()
        self._indices.draw_what_is_due()
        for each in self._segments:
            each.ask_again()

    def _taken(self, segment: Segment) -> None:
        if segment.rest.given:
            segment.rest.given.popleft()
        if "_try_put_index" in self.__dict__:  # batches are taken ahead of their turn: asking for more is put off
            self._try_put_index()
            return
        if self._indices.drawn < self._indices.due:
            self._indices.draw_what_is_due()
        if self._segments[-1].rest.refused:
            self._segments[-1].ask_again()

    def _now(self) -> Segment:
        """The segment whose batches come."""
        while len(self._segments) > 1 and self._segments[0].is_over:
            self._segments.popleft().end()
        return self._segments[0]

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch: a DataLoader whose workers persist has the iterator that it holds do so."""
        self._loader = weakref.ref(loader)
        anew, self.begins_anew, self._wanted = self.begins_anew or self._wanted is not None, False, None
        anew |= self._segments[-1].reads_by_sample != self.shared.by_sample and not self.changed(None)
        while len(self._segments) > 1:
            self._segments.popleft().end()
        self._begin_epoch(loader)
        kept = self._segments[0]
        if anew:
            self._segments.popleft()
            shut_down(kept.batches)
            self._indices.begin()
            self._begin_or_own(loader.num_workers)
        elif not self._goes_on(kept, begins=True):
            self._segments.popleft()
            self._begin_or_own(loader.num_workers)
        self._indices.draw_what_is_due()

    # -- changing the number of workers

    def resize(self, num_workers: int, *, overlap: bool = True) -> int:
        """Set the number of workers, between two batches; gives the number that runs, or will with the next epoch.

        With ``overlap`` the new workers start while the old ones finish; else once these have, and ended.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers: expected at least 1, got {num_workers}")
        if self.fetches_here or self._loader() is None:
            return self.num_workers
        if num_workers == self.num_workers or self._indices.left == 0:
            return num_workers
        if not (self._indices.ahead() or self._segments[-1].can_be_asked_again):
            return self.num_workers
        if not self._own_workers and not self._has_begun:
            self._wanted = num_workers
        else:
            self._begin_other(num_workers, overlap=overlap)
        return self.num_workers

    def _begin_other(self, workers: int, *, overlap: bool) -> None:
        if overlap:
            self._begin_next(workers)
            return
        for each in self._segments:
            each.drain()
        self.shared.kept = None
        self._begin_or_own(workers)

    def read_by_sample(self, value: bool, *, overlap: bool = True) -> None:
        """Have each sample be a task of the workers, or each batch, as torch has it; ``overlap`` as in :meth:`resize`.

        From now on, or from the next epoch on; ``Segments.why_by_batch`` says why not, if that cannot be.
        """
        self.shared.by_sample = value
        if self.reads_by_sample == value:
            return
        if self._indices.left == 0:
            self.begins_anew = True
        else:
            self._begin_other(self.num_workers, overlap=overlap)

    @property
    def reads_by_sample(self) -> bool:
        return self._segments[-1].reads_by_sample

    @property
    def samples_differ(self) -> bool:
        """Whether many batches of single samples have to be put together in the training process."""
        return bool(getattr(self._segments[-1].batches, "torch_is_faster", False))

    def _begin_or_own(self, workers: int) -> None:
        """Start workers if none run; the user's own number if the system allows no more."""
        try:
            self._begin(workers, self._new_generator())
        except (CannotServe, Later) as reason:  # or what is left may not be drawn yet
            self._by_batch(str(reason) or "it would have read the sampler too far ahead")
            self._begin(workers, self._new_generator())
        except Exception as error:  # no more processes, memory, files or threads
            log.warning("workers of the DataLoader could not be started: %s", str(error))
            if self.shared.by_sample:
                self._by_batch(f"workers could not be started: {error}")
            self._begin(self._own_workers, self._new_generator())
            self._give_up(f"workers could not be started: {error}")

    def _begin_next(self, workers: int) -> None:
        before = self._segments[-1]
        before.rest.stopped = True
        try:
            self._begin(workers, self._new_generator())
        except Later:  # the rest is in flight
            before.rest.stopped, self.begins_anew = False, True
        except CannotServe as reason:
            self._by_batch(str(reason))
            before.rest.stopped = False
            if not before.rest.given:
                self._begin(workers, self._new_generator())
        except Exception as error:  # no more processes, memory, files or threads
            log.warning("workers of the DataLoader could not be started: %s", str(error))
            before.rest.stopped = False
            if not before.rest.given:  # it has nothing left to do, and would end the epoch
                raise

    def _begin_first(self) -> None:
        """Start workers in place of the training process."""
        wanted, self._wanted = self._wanted, None
        self._segments[-1].rest.stopped = True
        try:
            if self._kept is not None:
                self._go_on()
            else:
                self._begin(wanted or 1, self._new_generator())
        except Exception as error:  # no more processes, memory, files or threads
            log.warning("no worker of the DataLoader could be started: %s", str(error))
            self._segments[-1].rest.stopped = False
            self._give_up(f"no worker could be started: {error}")

    def _by_batch(self, why: str) -> None:
        """Batches are the tasks of workers again, as torch has it."""
        self.shared.by_sample, self.shared.why_by_batch = False, why

    def _goes_on_after(self, segment: Segment, error: Exception) -> bool:
        """Go back to the user's own number of workers if an added one died, or samples cannot be tasks after all."""
        if segment.reads_by_sample and not str(error).startswith((_DIED, _TIMED_OUT)):  # nothing of the user's
            self._begin_again(self.num_workers)
            self._by_batch(str(error))
            return True
        died = [each for each in self._segments if not all(one.is_alive() for one in workers_of(each.batches))]
        died = died or [segment]  # it was drained
        workers = min(each.loader.num_workers for each in died)
        as_given = workers <= self._own_workers and not any(each.reads_by_sample for each in died)
        if not str(error).startswith(_DIED) or as_given or self._loader() is None:
            return False
        if not getattr(segment.loader, "in_order", True):  # which batches have come is not known
            return False
        if self._own_workers and self.changed(None):
            return False
        if workers <= self._own_workers:
            log.warning("%s; from now on each batch is made by one worker", str(error))
            self._by_batch(f"a worker died: {error}")
            self._begin_again(workers)
            return True
        log.warning("%s; num_workers was %d and is %d from now on", str(error), workers, self._own_workers)
        self._go_back(f"a worker died: {error}")
        return True

    def _go_back(self, why: str) -> None:
        """Have the user's own number of workers make the batches requested from others."""
        self._begin_again(self._own_workers)
        self._give_up(why)

    def _begin_again(self, workers: int) -> None:
        """Have other workers make the batches that were requested, each batch by one."""
        asked = [index for each in self._segments for index in each.rest.given]
        while self._segments:
            self._segments[0].rest.stopped = True
            self._segments.popleft().end()
        self._wanted = self.shared.kept = None
        self.shared.by_sample = False
        self._indices.give_back(asked)
        self._begin(workers, self._new_generator())

    def _give_up(self, why: str) -> None:
        self.failure = why
        loader = self._loader()
        if loader is not None:
            loader.num_workers = self._own_workers
            if not self._own_workers:
                loader.prefetch_factor = None

    # -- segments

    def _begin(self, workers: int, generator: torch.Generator | None, *, begins: bool = False) -> None:
        """Start a segment; with ``begins`` its iterator draws what the loader's own would have drawn."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the DataLoader was deleted, so it cannot start other workers")
        most = most_samples(loader.batch_sampler) if self.shared.by_sample and workers else None
        rest = RestOfEpoch(self._indices, begins=begins, most_samples=most)
        running = [(each.first, each.loader.num_workers) for each in self._segments if not each.is_over]
        first = 0 if all(workers <= number for number, _ in running) else max(map(sum, running))
        twins: list[DataLoader[Any]] = []

        def make() -> Any:
            twins.append(self._copy(loader, rest, workers, generator, first))
            batches = iter(twins[-1]) if most is None else EngineIterator(twins[-1])
            if most is not None and twins[-1].persistent_workers:
                twins[-1]._iterator = batches
            number_from(batches, first)
            return batches

        began = time.perf_counter()
        try:
            with without_hint(workers, self._own_workers):
                batches = self._create(make)
        except BaseException as error:
            self._indices.give_back(rest.given)
            for frame, _ in traceback.walk_tb(error.__traceback__):  # torch leaves those that it had started
                for worker in getattr(frame.f_locals.get("self"), "_workers", ()):
                    worker.terminate()
            raise
        if workers:
            self.started = time.perf_counter() - began, workers
        self._append(Segment(twins[-1], rest, batches, first), loader)

    def _copy(
        self, loader: DataLoader[Any], rest: RestOfEpoch, workers: int, generator: torch.Generator | None, first: int
    ) -> DataLoader[Any]:
        changed: dict[str, Any] = {
            "sampler" if loader.batch_sampler is None else "batch_sampler": rest,
            "num_workers": workers,
            "generator": generator,
            "prefetch_factor": (loader.prefetch_factor or 2) if workers else None,
            "persistent_workers": workers > 0 and (loader.persistent_workers or self.shared.keeps),
        }
        if not workers:
            return copy_of(loader, **changed, timeout=0)
        if not self._own_workers and hasattr(loader, "in_order"):
            changed["in_order"] = True
        if forks(loader) is None:
            changed["collate_fn"] = self.shared.draws.around(loader.collate_fn)
        if first:
            changed["worker_init_fn"] = NumberedWorkers(loader.worker_init_fn, first)
        if rest.most_samples is not None:
            changed.update(sample_tasks(loader))
        return copy_of(loader, **changed)

    def _go_on(self) -> None:
        """Have workers that live on make the batches of this epoch."""
        kept, self._kept = self._kept, None
        loader = self._loader()
        assert kept is not None
        if self._goes_on(kept, begins=False):
            self._append(kept, loader)
        else:
            self._begin_or_own(kept.loader.num_workers)

    def _goes_on(self, kept: Segment, *, begins: bool) -> bool:
        """Have workers that live on begin an epoch; False if they cannot any more, which torch's always can."""
        kept.rest.begin(self._indices, begins=begins)
        try:
            iter(kept.loader)
        except Exception as error:
            if not kept.reads_by_sample:
                raise
            self._by_batch(str(error))
            self._indices.give_back(kept.rest.given)
            shut_down(kept.batches)
            return False
        return True

    def _append(self, segment: Segment, loader: DataLoader[Any] | None) -> None:
        self._segments.append(segment)
        if segment.loader.persistent_workers and loader is not None and not loader.persistent_workers:
            self.shared.kept = segment

    def _new_generator(self) -> torch.Generator:
        """The source of the next segment's seed: different for each segment, the same in each run."""
        self._count += 1
        return torch.Generator().manual_seed((self._seed + self._count * _SEED_STEP) % _SEEDS)

    def _shutdown_workers(self) -> None:
        for each in self._segments:
            shut_down(each.batches)

    def __del__(self) -> None:
        """Each segment's iterator ends its own workers, those that live on excepted."""


@contextmanager
def without_hint(workers: int, own_workers: int) -> Iterator[None]:
    """Keep Python from warning of more workers than CPUs: changed filters would show old warnings again."""
    if workers == own_workers or workers <= usable_cpus():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _next_seed(generator: torch.Generator | None) -> int:
    """The generator's next draw; the generator stays unchanged."""
    again = torch.Generator()
    again.set_state((generator or torch.default_generator).get_state())
    return int(torch.empty((), dtype=torch.int64).random_(generator=again).item())


def _samples(indices: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in indices)

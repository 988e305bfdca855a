"""Decides which samples a rank gets at each step; resumable on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.loading.order import Order, mix

_BLOCK_BATCHES: Final = 64  # batches whose indices are worked out at a time


def step_size(left: int, world_size: int, batch_size: int, drop_last: bool, larger_last: bool = False) -> int:
    """How many of the samples that are left the next step of all ranks takes together; 0 at the end.

    A full batch for each rank. The last two steps share what is left so that no rank runs short; batches of one cannot
    be shared, but with `larger_last` the last one of a rank may have two samples.
    """
    full = world_size * batch_size
    if left < full:
        return 0 if drop_last else left
    if drop_last or not full < left < full + world_size:
        return full
    if batch_size > 1:
        return left - world_size
    return left if larger_last else full


def num_steps(left: int, world_size: int, batch_size: int, drop_last: bool, larger_last: bool = False) -> int:
    full = world_size * batch_size
    if drop_last or (larger_last and batch_size == 1 and left >= full):
        return left // full
    return -(-left // full)


class BatchIndices(list[int]):
    """A batch's indices, with their epoch and the position of the first in it: randomness by these is elastic too."""

    def __init__(self, indices: Iterable[int], epoch: int, first: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.first = first

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchIndices, (list(self), self.epoch, self.first)


class Later(StopIteration):
    """A sampler gives no more indices yet; it has not come to its end."""


class ElasticSampler(DistributedSampler[int]):
    """Gives each rank its share of each step, and goes on from any sample of an epoch on any number of ranks.

    Every sample of an epoch goes to one rank, once: where the samples do not divide evenly, the last batches are
    smaller, and all ranks still have the same number of them. Only if that is impossible (fewer samples than ranks, or
    batches of one without `larger_last`), samples go to more than one rank; `padding` is their number. It is a
    `DistributedSampler` so that Lightning leaves it in place. If `set_epoch` is never called, as in a plain loop, each
    iteration is the next epoch, as with a `RandomSampler`.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        larger_last: bool = False,
    ) -> None:
        # Not DistributedSampler's: it wants a dataset and cuts the epoch up in its own way.
        self.order = order
        self.batch_size = batch_size
        self.rank = rank
        self.num_replicas = world_size
        self.drop_last = drop_last
        self.larger_last = larger_last
        self.shuffle = order.shuffle
        self.seed = order.seed
        self.epoch = 0
        self.iterated_epoch = 0
        """The epoch of the latest iteration."""
        self.epoch_now: Callable[[], int | None] | None = None
        """Says which epoch it is; else, or if it says None, it is the one that `set_epoch` is given."""
        self.on_epoch: Callable[[int], None] | None = None
        """Called with the epoch's number of batches when an epoch is set."""
        self._start = (0, 0, 0)  # epoch, samples consumed in it, steps that took them
        self._is_set = False  # whether somebody says which epoch it is
        self._has_begun = False  # whether an iteration of the epoch has begun

    def set_epoch(self, epoch: int) -> None:
        # Lightning counts an epoch that max_steps cut short as done, and yet goes on in it after a resume.
        now = None if self.epoch_now is None else self.epoch_now()
        self.epoch = epoch if now is None else now
        self._is_set = True
        if self.on_epoch is not None:
            self.on_epoch(self.num_batches())

    def resume(self, epoch: int, consumed: int, steps: int) -> None:
        """Begin in the middle of an epoch (others are complete); if nothing is left of it, begin with the next.

        `consumed` samples are those of all ranks; `steps` took them, and count in ``len`` so that it agrees with the
        Trainer's progress.
        """
        self._start = (epoch, consumed, steps)
        self.iterated_epoch = epoch
        left = self._num_steps(self.order.num_samples - consumed)
        self.epoch = epoch if left else epoch + 1
        self._has_begun = False

    def start_over(self) -> None:
        """What was left of a resumed epoch has come: another iteration of it is whole."""
        self._start = (0, 0, 0)

    def begin(self) -> int:
        """An iteration begins; returns its epoch."""
        if self._has_begun and not self._is_set:
            self.epoch += 1
        self._has_begun = True
        self.iterated_epoch = self.epoch
        return self.epoch

    def begin_again(self) -> None:
        """The iteration that has begun last gives nothing: another is begun in its place."""
        self._has_begun = False

    def follow(self, before: ElasticSampler) -> bool:
        """Go on after the sampler of an earlier loader; False if epochs are set, or it was never iterated."""
        if before._is_set or not before._has_begun:
            return False
        self._start, self.epoch, self._has_begun = before._start, before.epoch, True
        return True

    def _step_size(self, left: int) -> int:
        return step_size(left, self.num_replicas, self.batch_size, self.drop_last, self.larger_last)

    def _num_steps(self, left: int) -> int:
        return num_steps(left, self.num_replicas, self.batch_size, self.drop_last, self.larger_last)

    def _begin(self, epoch: int) -> tuple[int, int]:
        """Samples consumed and steps done when an epoch's iteration begins."""
        resumed, consumed, steps = self._start
        return (consumed, steps) if epoch == resumed else (0, 0)

    def consumed_after(self, steps: int, epoch: int | None = None) -> int:
        """Samples of an epoch (None: this one) that all ranks together have had after so many of its steps."""
        consumed, done = self._begin(self.epoch if epoch is None else epoch)
        n, world, batch = self.order.num_samples, self.num_replicas, self.batch_size
        # All steps but the last two are full.
        sure = max(0, min(steps - done, (n - consumed) // (world * batch) - 1))
        consumed += sure * world * batch
        for _ in range(steps - done - sure):
            consumed += self._step_size(n - consumed)
        return consumed

    @property
    def padding(self) -> int:
        """Samples of the epoch that more than one rank gets (counted with their repetition)."""
        if self.drop_last:
            return 0
        consumed, steps = self._begin(self.epoch)
        total = self._num_steps(self.order.num_samples - consumed)
        last = self.order.num_samples - self.consumed_after(steps + max(0, total - 1))
        return max(0, self.num_replicas - last) if total else 0

    def num_batches(self) -> int:
        """Steps of the epoch: those done before a resume, and those that are left."""
        consumed, steps = self._begin(self.epoch)
        return steps + self._num_steps(self.order.num_samples - consumed)

    @property
    def randomness(self) -> tuple[int, ...]:
        """What a random stream of this rank's own must depend on, besides the seed, so as not to repeat another's."""
        epoch, consumed, _ = self._start
        return (self.rank, epoch, consumed) if self.num_replicas > 1 else ()

    def steps_done(self, epoch: int | None = None) -> int:
        """Steps of an epoch (None: this one) that were done before a resume."""
        return self._begin(self.epoch if epoch is None else epoch)[1]

    def batches(self) -> Iterator[BatchIndices]:
        """This rank's batches, from where the epoch begins to its end."""
        return self.batches_of(self.begin())

    def batches_of(self, epoch: int) -> Iterator[BatchIndices]:
        """The same of any epoch, which does not become the one that is iterated."""
        consumed, _ = self._begin(epoch)
        n, world = self.order.num_samples, self.num_replicas
        while True:
            slices: list[tuple[int, int]] = []
            while len(slices) < _BLOCK_BATCHES:
                take = self._step_size(n - consumed)
                if not take:
                    break
                if take >= world:
                    slices.append((consumed + take * self.rank // world, consumed + take * (self.rank + 1) // world))
                else:  # fewer samples than ranks
                    slices.append((consumed + self.rank % take, consumed + self.rank % take + 1))
                consumed += take
            if not slices:
                return
            positions = np.concatenate([np.arange(*s, dtype=np.int64) for s in slices])
            indices = self.order.at(epoch, positions).tolist()
            at = 0
            for start, stop in slices:
                yield BatchIndices(indices[at : at + stop - start], epoch, start)
                at += stop - start

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    def __len__(self) -> int:
        """This rank's samples from where the epoch begins to its end."""
        consumed, steps = self._begin(self.epoch)
        n, world, rank = self.order.num_samples, self.num_replicas, self.rank
        sure = max(0, self.num_batches() - steps - 2)  # all steps but the last two are full
        count, consumed = sure * self.batch_size, consumed + sure * world * self.batch_size
        while take := self._step_size(n - consumed):
            count += take * (rank + 1) // world - take * rank // world if take >= world else 1
            consumed += take
        return count


class ElasticBatchSampler(BatchSampler):
    """Batches of an `ElasticSampler`; else (Lightning's ``overfit_batches``) as torch's BatchSampler makes them."""

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.sampler, ElasticSampler):
            yield from self.sampler.batches()
            return
        first = 0
        for batch in super().__iter__():
            yield BatchIndices(batch, 0, first)
            first += len(batch)

    def __len__(self) -> int:
        return self.sampler.num_batches() if isinstance(self.sampler, ElasticSampler) else super().__len__()


def epoch_of_rank(epoch: int) -> int:
    """A number for an epoch that is another one on each rank, for what ranks should not draw alike."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return epoch
    rank = torch.distributed.get_rank()
    return mix(epoch, rank) >> 1 if rank else epoch


class PlacedBatches:
    """A user's batch sampler whose batches have their place in the epoch; ``where``: that, and batches to leave out."""

    def __init__(self, batches: Any, where: Callable[[], tuple[int, int]]) -> None:
        self.batches, self._where = batches, where
        self.most_samples, self.may_be_read_ahead = most_samples(batches), may_be_read_ahead(batches)
        # the first batch of an iteration, and the rest of it, with which the next one goes on
        self.begun: tuple[BatchIndices, Iterator[BatchIndices]] | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[BatchIndices]:
        begun, self.begun = self.begun, None
        if begun is not None:
            yield begun[0]
            yield from begun[1]
            return
        (epoch, done), first = self._where(), 0
        for number, batch in enumerate(self.batches):
            placed = BatchIndices(batch, epoch, first)
            first += len(placed)
            if number >= done:
                yield placed


def most_samples(batch_sampler: Any) -> int | None:
    """The most samples that a batch may have; None: that is not known."""
    if type(batch_sampler) is ElasticBatchSampler:
        return int(batch_sampler.batch_size) + 1  # the last batch of a rank may be larger by one
    if type(batch_sampler) is BatchSampler:
        return int(batch_sampler.batch_size)
    return getattr(batch_sampler, "most_samples", None)


# samplers that draw from a random state when they are iterated, and not again for each index
DRAW_AT_ONCE: Final = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ElasticSampler,
)


def may_be_read_ahead(batch_sampler: Any) -> bool:
    """Whether it makes no difference when a batch's indices are drawn; else a loader draws them when torch's would."""
    known = type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in DRAW_AT_ONCE
    return known or bool(getattr(batch_sampler, "may_be_read_ahead", False))


class ResumableLoader:
    """A loader that can resume in the middle of an epoch, as these methods tell Lightning."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position in the epoch is kept by the DataModule, where it is right at every moment."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do; see `state_dict`."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import BatchIndices, ElasticBatchSampler, ElasticSampler, step_size

shapes = given(n=st.integers(1, 60), world=st.integers(1, 5), batch=st.integers(1, 7))


def samplers(n: int, world: int, batch: int, drop_last: bool = False, epoch: int = 0) -> list[ElasticSampler]:
    made = [ElasticSampler(Order(n), batch, rank=r, world_size=world, drop_last=drop_last) for r in range(world)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def taken(made: list[ElasticSampler], steps: int | None = None) -> list[int]:
    """What all ranks together got in their first steps."""
    return [index for sampler in made for batch in list(sampler.batches())[:steps] for index in batch]


@shapes
def test_every_sample_goes_to_one_rank_and_all_ranks_have_as_many_batches(n: int, world: int, batch: int) -> None:
    ranks = samplers(n, world, batch)
    assert {len(list(sampler.batches())) for sampler in ranks} == {ranks[0].num_batches()}
    every = taken(ranks)
    assert set(every) == set(range(n))
    assert len(every) == n + ranks[0].padding
    if n >= world and batch > 1:
        assert ranks[0].padding == 0


@shapes
def test_drop_last_gives_full_batches_only(n: int, world: int, batch: int) -> None:
    ranks = samplers(n, world, batch, drop_last=True)
    assert {len(b) for sampler in ranks for b in sampler.batches()} <= {batch}
    every = taken(ranks)
    assert len(every) == len(set(every)) == n // (world * batch) * world * batch
    assert ranks[0].padding == 0


def test_the_last_two_steps_share_what_is_left() -> None:
    ranks = samplers(9, world=4, batch=2)  # 8 and 1 would leave three ranks without a last batch
    assert [[len(batch) for batch in sampler.batches()] for sampler in ranks] == [[1, 1], [1, 1], [1, 1], [2, 1]]


def test_steps_never_take_more_than_there_is() -> None:
    for left in range(1, 60):
        for world in (1, 2, 3, 4):
            for batch in (1, 2, 5):
                assert 0 < step_size(left, world, batch, drop_last=False) <= min(left, world * batch)


@given(new_world=st.integers(1, 5), steps=st.integers(0, 6), drop_last=st.booleans())
def test_a_resume_on_other_ranks_gives_the_rest_once(new_world: int, steps: int, drop_last: bool) -> None:
    n, epoch = 97, 3
    before = samplers(n, world=2, batch=8, drop_last=drop_last, epoch=epoch)
    consumed = before[0].consumed_after(steps)
    first = taken(before, steps)
    assert len(first) == consumed
    after = samplers(n, new_world, batch=8, drop_last=drop_last)
    for sampler in after:
        sampler.resume(epoch, consumed, steps)
    if drop_last and n - consumed < 8 * new_world:  # nothing is left that makes a batch for every rank
        assert {sampler.epoch for sampler in after} == {epoch + 1}
        return
    rest = taken(after)
    assert not set(first) & set(rest)
    dropped = (n - consumed) % (8 * new_world) if drop_last else 0
    assert len(set(first) | set(rest)) == n - dropped
    assert {len(list(s.batches())) + steps for s in after} == {after[0].num_batches()}


def test_a_resume_continues_the_same_order() -> None:
    (whole,) = samplers(50, 1, 4, epoch=2)
    (resumed,) = samplers(50, 1, 4)
    resumed.resume(2, consumed=whole.consumed_after(5), steps=5)
    assert list(resumed.batches()) == list(whole.batches())[5:]
    assert resumed.consumed_after(7) == whole.consumed_after(7) == 28


def test_the_epoch_after_a_resumed_one_is_whole() -> None:
    (sampler,) = samplers(50, 1, 4)
    sampler.resume(2, consumed=48, steps=12)
    assert sampler.num_batches() == 13
    assert len(list(sampler.batches())) == 1
    sampler.set_epoch(3)
    assert sorted(taken([sampler])) == list(range(50))


def test_a_resume_at_the_end_of_an_epoch_begins_the_next() -> None:
    (sampler,) = samplers(50, 1, 4)
    sampler.resume(2, consumed=50, steps=13)
    assert sampler.epoch == 3
    assert sorted(taken([sampler])) == list(range(50))


def test_a_new_epoch_is_announced_with_its_length() -> None:
    (sampler,) = samplers(50, 1, 4)
    sampler.resume(0, consumed=8, steps=5)
    told: list[int] = []
    sampler.on_epoch = told.append
    sampler.set_epoch(0)
    sampler.set_epoch(1)
    assert told == [5 + 11, 13]


def test_batches_know_their_epoch_also_in_another_process() -> None:
    (sampler,) = samplers(10, 1, 4, epoch=6)
    batch = next(sampler.batches())
    travelled = pickle.loads(pickle.dumps(batch))
    assert isinstance(travelled, BatchIndices)
    assert (travelled.epoch, list(travelled)) == (6, list(batch))


def test_it_is_a_distributed_sampler_for_lightning() -> None:
    (sampler,) = samplers(10, 1, 4)
    assert isinstance(sampler, DistributedSampler)
    assert list(sampler) == taken([sampler])
    assert len(sampler) == 10


def test_batches_of_another_sampler_are_as_usual() -> None:
    batches = ElasticBatchSampler(SequentialSampler(range(5)), 2, drop_last=False)  # type: ignore[arg-type]
    assert list(batches) == [[0, 1], [2, 3], [4]]
    assert len(batches) == 3


def test_the_length_of_a_rank_is_counted_without_iterating() -> None:
    for n in (*range(1, 40), 97):
        for world in (1, 2, 3, 5):
            for batch in (1, 2, 4, 7):
                for drop_last in (False, True):
                    for rank in range(world):
                        sampler = ElasticSampler(Order(n), batch, rank=rank, world_size=world, drop_last=drop_last)
                        assert len(sampler) == len(list(sampler)), (n, world, batch, drop_last, rank)
    resumed = ElasticSampler(Order(50), 4, world_size=2)
    resumed.resume(3, 16, 2)
    assert len(resumed) == len(list(resumed)) == 17
    assert len(ElasticSampler(Order(10**15), 4, rank=1, world_size=3)) == 10**15 // 3


def test_batches_know_their_positions() -> None:
    order = Order(23, seed=1)
    for rank in range(2):
        sampler = ElasticSampler(order, 4, rank=rank, world_size=2)
        for batch in ElasticBatchSampler(sampler, 4, False):
            assert isinstance(batch, BatchIndices)
            positions = np.arange(batch.first, batch.first + len(batch))
            assert order.at(0, positions).tolist() == batch


def test_short_runs_mix_classes_in_a_window() -> None:
    """A folder's order: 1,000 classes of 1,300 images one after the other."""
    n, window = 1_300_000, 16_384

    def classes(order: Order) -> int:
        return len(set((order.at(0, np.arange(window)) // 1300).tolist()))

    assert classes(Order(n, window=window)) < 150
    short = Order(n, window=window, run=10)
    assert classes(short) > 750
    assert sorted(Order(1000, window=100, run=7).at(2, np.arange(1000)).tolist()) == list(range(1000))

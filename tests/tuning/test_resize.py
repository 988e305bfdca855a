from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import itertools
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_gpuopt.compat import dataloader
from lightning_gpuopt.tuning import added_workers, resize
from lightning_gpuopt.tuning.resize import ResizeUnsupported, adopt, first_workers
from lightning_gpuopt.tuning.sharing import state_of
from tests.helpers import error_of_a_killed_worker, wait_for
from tests.lanes import combinations
from tests.shared_memory import shared_files

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset[torch.Tensor]):
    """Each sample is its own number, the worker that made it, and the worker's random seed."""

    def __init__(self, length: int = 240) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        return torch.tensor([index, -1 if worker is None else worker.id, torch.initial_seed()])


def loader(workers: int = 1, length: int = 240, **kwargs: Any) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Numbers(length), batch_size=2, shuffle=True, num_workers=workers, generator=generator, **kwargs)


def children() -> set[int | None]:
    return {each.pid for each in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, files = children(), shared_files()
    yield
    gc.collect()  # an exception that torch has raised again holds its iterator in a cycle
    wait_for(lambda: not children() - before)
    wait_for(lambda: shared_files() <= files)


def read(source: DataLoader[torch.Tensor], plan: dict[int, int], stop: int | None = None) -> list[tuple[int, ...]]:
    """One epoch, with the number of workers changed after some batches; the samples of each batch."""
    iterator = adopt(iter(source), source)
    seen = []
    for number, batch in enumerate(iterator):
        seen.append(tuple(batch[:, 0].tolist()))
        if number == stop:
            break
        if number in plan:
            assert iterator.resize(plan[number]) == plan[number]
    return seen


in_order = pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="this torch's DataLoader has no in_order"
)

PLANS = [{0: 3, 5: 8}, {3: 4, 10: 2, 11: 5, 12: 1, 40: 3}, {30: 2, 31: 1, 32: 2}, {2: 6, 59: 1}]


@combinations(
    "plan3-True-115",
    plan=PLANS,
    persistent=[False, True],
    left_after=[60, 115],  # with work under way; at 115 of 120 all has been asked for
)
def test_the_order_of_samples_is_as_without(plan: dict[int, int], persistent: bool, left_after: int) -> None:
    plain, changed = (loader(persistent_workers=persistent) for _ in range(2))
    for epoch in range(2):
        stop = left_after if epoch == 0 else None
        assert read(changed, plan, stop) == read(plain, {}, stop)
    assert changed.num_workers == list(plan.values())[-1]


@in_order
@combinations("1-plan3-True", prefetch_factor=[1, 3], plan=PLANS, persistent=[False, True])
def test_without_an_order_no_sample_is_lost_or_comes_twice(
    plan: dict[int, int], persistent: bool, prefetch_factor: int
) -> None:
    changed = loader(4, persistent_workers=persistent, in_order=False, prefetch_factor=prefetch_factor)
    for _ in range(2):
        assert sorted(index for batch in read(changed, plan) for index in batch) == list(range(240))


def test_new_workers_have_the_seeds_that_torch_would_give_them() -> None:
    source = loader()
    iterator = adopt(iter(source), source)
    base = iterator._base_seed
    iterator.resize(3)
    seeds = {(int(worker), int(seed)) for batch in iterator for _, worker, seed in batch}
    assert seeds == {(number, base + number) for number in range(3)}


def test_the_random_state_is_not_touched() -> None:
    source = loader()
    iterator = adopt(iter(source), source)
    next(iterator)
    torch_state, own_state = torch.get_rng_state(), source.generator.get_state()  # type: ignore[union-attr]
    iterator.resize(4)
    iterator.resize(2)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.equal(source.generator.get_state(), own_state)  # type: ignore[union-attr]


def test_a_worker_that_is_taken_away_finishes_its_work_and_ends_in_peace() -> None:
    source = loader(4)
    iterator = adopt(iter(source), source)
    next(iterator)
    leaving = iterator._workers[1:]
    pids = [each.pid for each in leaving]
    iterator.resize(1)
    first_batches = [int(next(iterator)[0, 1]) for _ in range(7)]
    assert first_batches == [1, 2, 3, 0, 1, 2, 3]  # what they were given before
    assert {int(batch[0, 1]) for batch in iterator} == {0}
    assert [each.exitcode for each in leaving] == [0, 0, 0]
    assert not any(psutil.pid_exists(pid or 0) for pid in pids)


def test_workers_on_their_way_out_can_be_kept() -> None:
    source = loader(4)
    iterator = adopt(iter(source), source)
    workers = list(iterator._workers)
    iterator.resize(2)
    iterator.resize(4)
    assert iterator._workers == workers
    assert sum(len(batch) for batch in iterator) == 240


class Late(Numbers):
    """The second worker's first samples come when they are asked for."""

    def __init__(self, released: Any) -> None:
        super().__init__(1000)
        self.released = released

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        if worker is not None and worker.id == 1:
            self.released.wait()
        return super().__getitem__(index)


def test_an_epoch_that_was_left_early_leaves_nothing_to_the_next() -> None:
    released = multiprocessing.Event()
    source = DataLoader(Late(released), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = adopt(iter(source), source)
    next(iterator)
    iterator.resize(1)
    later = threading.Timer(0.05, released.set)  # by then an epoch that did not wait has begun
    later.start()
    assert [int(batch[0, 0]) for batch in source] == list(range(0, 1000, 2))
    later.join()


class Stuck(Numbers):
    """From sample 40 on none comes from the given worker."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        while index >= 40 and worker is not None and worker.id == self.worker:
            signal.pause()
        return super().__getitem__(index)


def end_now(iterator: Any) -> None:
    """An iterator that garbage collection finds in a cycle, as after an exception, takes torch 5 s for each worker."""
    iterator._shutdown_workers()


@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize(("before", "after", "killed"), [(1, 3, 0), pytest.param(3, 1, 0, marks=pytest.mark.matrix)])
def test_a_killed_worker_of_the_user_s_gives_the_error_of_torch(before: int, after: int, killed: int) -> None:
    source = DataLoader(Stuck(killed), batch_size=1, num_workers=before)
    iterator = adopt(iter(source), source)
    for _ in range(10):
        next(iterator)
    iterator.resize(after)
    while iterator._rcvd_idx < 40 or iterator._task_info[iterator._rcvd_idx][0] != killed:
        next(iterator)
    assert len(iterator._workers) == after
    error = error_of_a_killed_worker(iterator, killed)
    assert isinstance(error, RuntimeError)
    assert re.search("is killed by signal: Killed|exited unexpectedly", f"{error} {error.__cause__}")


class Broken(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40:
            raise ValueError("sample 40 is corrupt")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_in_a_sample_comes_out_as_ever(workers: int) -> None:
    source = DataLoader(Broken(), batch_size=2, num_workers=2)
    iterator = adopt(iter(source), source)
    next(iterator)
    iterator.resize(workers)
    with pytest.raises(ValueError, match="sample 40 is corrupt"):
        for _ in iterator:
            pass
    end_now(iterator)


def init_worker(worker_id: int) -> None:
    torch.manual_seed(1000 + worker_id)


def test_worker_init_fn_timeout_and_pinning_are_kept() -> None:
    source = loader(worker_init_fn=init_worker, timeout=30, pin_memory=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch say that there is no accelerator
        iterator = adopt(iter(source), source)
    iterator.resize(3)
    seeds = {(int(worker), int(seed)) for batch in iterator for _, worker, seed in batch}
    assert seeds == {(number, 1000 + number) for number in range(3)}


@pytest.mark.matrix
def test_a_spawned_worker_comes_and_goes() -> None:
    source = loader(1, length=16, multiprocessing_context="spawn")
    iterator = adopt(iter(source), source)
    next(iterator)
    iterator.resize(2)
    workers = [int(next(iterator)[0, 1]) for _ in range(4)]
    assert set(workers) == {0, 1}
    leaving = iterator._workers[1]
    iterator.resize(1)
    assert len(list(iterator)) == 3
    assert leaving.exitcode == 0


def test_where_no_process_can_be_started_training_goes_on_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = loader()
    iterator = adopt(iter(source), source)
    start = iterator._start_worker

    def only_one_more(context: Any, worker_id: int, num_workers: int) -> None:
        if worker_id == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(context, worker_id, num_workers)

    monkeypatch.setattr(resize.ResizableIterator, "_start_worker", lambda self, *args: only_one_more(*args))
    assert iterator.resize(6) == 2
    assert source.num_workers == 2
    assert len(list(iterator)) == 120


def test_at_the_end_of_an_epoch_no_worker_is_started_in_vain() -> None:
    source = loader(length=20)
    iterator = adopt(iter(source), source)
    for _ in range(9):
        next(iterator)
    assert iterator.resize(4) == 4
    assert len(iterator._workers) == 1
    assert source.num_workers == 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_what_cannot_be_resized_is_refused_and_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    single = iter(loader(0))
    with pytest.raises(ResizeUnsupported, match="_SingleProcessDataLoaderIter is not torch's own iterator"):
        adopt(single, loader(0))
    stream = DataLoader(Stream(), num_workers=1)
    with pytest.raises(ResizeUnsupported, match="shares its samples out among the workers itself"):
        adopt(iter(stream), stream)
    source = loader()
    iterator: Any = iter(source)
    kind = type(iterator)
    monkeypatch.setattr(torch, "__version__", "3.0.1")
    with pytest.raises(ResizeUnsupported, match=r"torch 3\.0\.1 is none of those"):
        adopt(iterator, source)
    monkeypatch.undo()
    monkeypatch.setattr(dataloader, "WORKER_LOOP", [*dataloader.WORKER_LOOP, "more"])
    with pytest.raises(ResizeUnsupported, match="a worker is started in another way"):
        adopt(iterator, source)
    monkeypatch.undo()
    iterator._index_queues = tuple(iterator._index_queues)
    with pytest.raises(ResizeUnsupported, match="iterator's _index_queues is not as expected"):
        adopt(iterator, source)
    iterator._index_queues = list(iterator._index_queues)
    assert type(iterator) is kind


class Growing:
    """A batch sampler whose epochs become longer."""

    def __init__(self) -> None:
        self.batches = 10

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number] for number in range(self.batches))

    def __len__(self) -> int:
        return self.batches


def test_in_a_longer_epoch_the_workers_have_work_to_its_end() -> None:
    sampler = Growing()
    source = DataLoader(Numbers(), batch_sampler=sampler, num_workers=1, persistent_workers=True)
    adopt(iter(source), source).resize(3)
    assert len(list(source)) == 10
    sampler.batches = 30
    iterator: Any = iter(source)
    under_way = [len(iterator._task_info) for _ in iterator]
    assert under_way[:24] == [6] * 24
    assert len(under_way) == 30
    iterator._shutdown_workers()


def test_a_torch_without_the_parts_that_are_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_worker_pids")
    spec = importlib.util.spec_from_file_location("door_of_another_torch", dataloader.__file__)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    reason = elsewhere.why_not_as_expected(iter(loader()))
    assert "not as expected: cannot import name '_set_worker_pids'" in reason


def test_a_number_below_one_is_refused() -> None:
    source = loader()
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        adopt(iter(source), source).resize(0)


class Straggles(Numbers):
    """The first sample comes last of all that were asked for."""

    def __init__(self, length: int, released: Any) -> None:
        super().__init__(length)
        self.released = released

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            self.released.wait()
        return super().__getitem__(index)


class InTurn:
    """A sampler that draws once more from its generator as it ends, as torch's own do; or fails there."""

    def __init__(self, length: int, fails: bool) -> None:
        self.length, self.fails = length, fails
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length - self.fails)
        torch.rand(1, generator=self.generator)
        if self.fails:
            raise LookupError("the last one is missing")


@in_order
@combinations("2-True", workers=[2, 4], fails=[False, True])
def test_without_an_order_a_straggler_at_the_end_loses_no_error_and_no_draw(workers: int, fails: bool) -> None:
    ends = []
    for change in (False, True):
        released = multiprocessing.Event()
        sampler = InTurn(12, fails)
        source = DataLoader(
            Straggles(12, released), sampler=sampler, batch_size=1, num_workers=2, in_order=False, prefetch_factor=1
        )
        iterator: Any = iter(source)
        if change:
            iterator = adopt(iterator, source)
        seen, error = [], None
        try:
            for batch in iterator:
                seen.append(int(batch[0, 0]))
                if change and len(seen) == 1:
                    iterator.resize(workers)
                if len(seen) == 8:
                    released.set()
        except LookupError as caught:
            error = str(caught)
        iterator._shutdown_workers()
        ends.append((error, sampler.generator.get_state().tolist()))
        assert sorted(seen) == list(range(12 - fails)) or error
    assert ends[0] == ends[1]


@combinations("3", number=[1, 2, 3])
def test_where_no_thread_can_be_started_that_feeds_a_worker_no_index_is_lost(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = loader()
    plain = read(loader(), {})
    iterator = adopt(iter(source), source)
    seen = [tuple(next(iterator)[:, 0].tolist())]
    left = [number]

    def start(self: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("can't start new thread")
        real(self)

    real = multiprocessing.queues.Queue._start_thread  # type: ignore[attr-defined]
    monkeypatch.setattr(multiprocessing.queues.Queue, "_start_thread", start)
    assert iterator.resize(4) == number
    monkeypatch.undo()
    assert source.num_workers == number
    assert seen + [tuple(batch[:, 0].tolist()) for batch in iterator] == plain


def test_a_thread_that_cannot_be_started_for_the_only_worker_is_an_error_that_loses_no_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = loader()
    plain = read(loader(), {})
    iterator = adopt(iter(source), source)
    seen = [tuple(next(iterator)[:, 0].tolist())]

    def fail(self: Any, item: Any, *args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(multiprocessing.queues.Queue, "put", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(iterator)
    monkeypatch.undo()
    rest = [tuple(batch[:, 0].tolist()) for batch in iterator]
    assert seen + rest == plain[:1] + plain[2:]  # but for the batch in whose place the error came


def test_a_worker_that_takes_the_number_of_one_that_left_has_a_random_stream_of_its_own() -> None:
    source = loader(2, persistent_workers=True)
    iterator = adopt(iter(source), source)
    base = iterator._base_seed
    seeds = []
    for workers in (2, 1, 2, 1, 2):
        iterator.resize(workers)
        found = {int(seed) for batch in iterator for _, worker, seed in batch if worker == 1}
        if workers == 2:
            assert len(found) == 1
            seeds.append(found.pop())
        iter(source)
    assert seeds[0] == base + 1
    assert len(set(seeds)) == 3
    iterator._shutdown_workers()


class StuckAtFirst(Numbers):
    """Workers but the first give nothing, until they are let go."""

    def __init__(self, released: Any) -> None:
        super().__init__()
        self.released = released

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        if worker is not None and worker.id:
            self.released.wait()
        return super().__getitem__(index)


@pytest.mark.usefixtures("quick_checks")
@combinations("False-False", persistent=[False, True], comes_late=[False, True])
def test_the_work_of_a_new_worker_that_is_stuck_goes_to_others(
    monkeypatch: pytest.MonkeyPatch, persistent: bool, comes_late: bool
) -> None:
    monkeypatch.setattr(added_workers, "_PATIENCE_S", 0.0)
    released = multiprocessing.Event()
    source = DataLoader(StuckAtFirst(released), batch_size=2, num_workers=1, persistent_workers=persistent)
    iterator = adopt(iter(source), source)
    seen = [tuple(next(iterator)[:, 0].tolist())]
    assert iterator.resize(3) == 3
    for batch in iterator:
        seen.append(tuple(batch[:, 0].tolist()))
        if comes_late and len(seen) == 20:
            released.set()
        if len(seen) == 40:
            assert iterator.failure is not None
            assert (iterator._num_workers, source.num_workers) == (1, 1)
            assert iterator.resize(2) == 2
            assert (len(iterator._workers), source.num_workers) == (1, 2)  # from the next iterator on
    assert seen == [(index, index + 1) for index in range(0, 240, 2)]
    source.num_workers = 1
    assert [tuple(batch[:, 0].tolist()) for batch in source] == seen
    iterator._shutdown_workers()


class Dies(Numbers):
    """A worker ends itself, without a word, as it is about to read: nothing of it is on its way then.

    Args:
        worker: the number of the worker, which does so at its first sample; None: each does so at sample ``at``.
        contagious: whether another that reads the same sample does so, too.
        at: a sample that is read once ``may_die`` is set.
    """

    def __init__(self, worker: int | None = 1, *, contagious: bool = False, at: int | None = None) -> None:
        super().__init__()
        self.worker, self.contagious, self.at = worker, contagious, at
        self.deadly = multiprocessing.Value("q", -1 if at is None else at)
        self.may_die = multiprocessing.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        if info is not None and self.worker == info.id:
            if self.contagious:
                self.deadly.value = index
            os.kill(os.getpid(), signal.SIGKILL)
        if info is not None and (self.contagious or self.at is not None) and index == self.deadly.value:
            self.may_die.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index, -1 if info is None else info.id, 0])


@pytest.mark.usefixtures("quick_checks")
class TestAddedWorkersThatDie:
    @contextlib.contextmanager
    def grown(self, dataset: Dataset[Any], **kwargs: Any) -> Iterator[tuple[DataLoader[Any], Any]]:
        """One worker of the user's, and a second from the first batch on."""
        source = DataLoader(dataset, batch_size=2, num_workers=1, **kwargs)
        iterator = adopt(iter(source), source)
        try:
            next(iterator)
            assert iterator.resize(2) == 2
            yield source, iterator
        finally:
            iterator._shutdown_workers()

    @pytest.mark.parametrize("persistent", [False, True])
    def test_others_do_its_work(self, persistent: bool) -> None:
        with self.grown(Dies(), persistent_workers=persistent) as (source, iterator):
            assert [tuple(batch[:, 0].tolist()) for batch in iterator] == [(n, n + 1) for n in range(2, 240, 2)]
            why = r"worker \d+, which was added while training ran, died \(signal 9\)"
            assert re.fullmatch(why, iterator.failure)
            assert (iterator._num_workers, source.num_workers) == (1, 1)

    def test_a_sample_that_ends_each_worker_is_handed_on_once(self) -> None:
        dataset = Dies(contagious=True)
        dataset.may_die.set()
        with self.grown(dataset) as (_, iterator), pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
            list(iterator)

    def test_a_queue_whose_lock_has_died_with_it_is_an_error_that_names_the_change(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(added_workers, "may_write", lambda iterator, seconds: False)
        said = r"exited unexpectedly: worker .* died \(signal 9\). num_workers was 1"
        with self.grown(Dies()) as (_, iterator), pytest.raises(RuntimeError, match=said):
            list(iterator)

    def test_one_of_the_user_s_own_is_torch_s_error(self) -> None:
        dataset = Dies(None, at=100)
        with self.grown(dataset) as (_, iterator):
            iterator.resize(1)
            dataset.may_die.set()
            with pytest.raises((RuntimeError, ConnectionError, EOFError)):  # others where its last batch was under way
                list(iterator)

    def test_the_only_one_that_stands_in_for_the_training_process_leaves_the_rest_to_it(self) -> None:
        dataset = Dies(None, at=40)
        source = DataLoader(dataset, batch_size=2, num_workers=1)
        iterator = first_workers(source, state_of(source))
        seen = [tuple(next(iterator)[:, 0].tolist()) for _ in range(20)]
        dataset.may_die.set()
        seen += [tuple(batch[:, 0].tolist()) for batch in iterator]
        assert seen == [(n, n + 1) for n in range(0, 240, 2)]
        assert (iterator.fetches_here, source.num_workers) == (True, 0)
        iterator._shutdown_workers()

    def test_one_that_dies_between_two_epochs_is_known(self) -> None:
        with self.grown(Numbers(), persistent_workers=True) as (_, iterator):
            list(iterator)
            assert not iterator.has_failed
            iterator._workers[1].kill()
            iterator._workers[1].join()
            assert iterator.has_failed

    def test_of_several_the_others_take_over(self) -> None:
        source = DataLoader(Dies(), batch_size=2, num_workers=3)
        iterator = first_workers(source, state_of(source))
        assert [tuple(batch[:, 0].tolist()) for batch in iterator] == [(n, n + 1) for n in range(0, 240, 2)]
        assert (iterator.fetches_here, source.num_workers) == (False, 2)
        iterator._shutdown_workers()


def test_the_lock_of_the_result_queue_says_whether_workers_can_send() -> None:
    source = loader()
    iterator = adopt(iter(source), source)
    list(iterator)
    assert dataloader.may_write(iterator, 1.0)
    lock = iterator._worker_result_queue._wlock
    with lock:
        assert not dataloader.may_write(iterator, 0.01)
    iterator._shutdown_workers()


class Eager(InTurn):
    """A sampler that draws as it is iterated, not at its first index."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        return iter(order)


def epochs_of(source: DataLoader[Any], workers: int, *, leave: int | None = None) -> list[Any]:
    """Three epochs, as training reads them that draws from the global random state before and between its batches."""
    torch.manual_seed(1)
    seen: list[Any] = []
    for _ in range(3):
        source.num_workers, source.prefetch_factor = workers, 2 if workers else None
        iterator: Any = first_workers(source, state_of(source)) if workers else source._get_iterator()
        seen.append(float(torch.rand(())))
        try:
            for number in itertools.count():
                if number == leave:
                    break
                batch = next(iterator)
                seen.append(batch[..., 0].flatten().tolist())
                seen.append(float(torch.rand(())))
                if workers and number == 3:
                    iterator.resize(3)
        except StopIteration:
            seen.append("end")
        except LookupError as error:
            seen.append(str(error))
        if workers:
            iterator._shutdown_workers()
    generator = getattr(source.sampler, "generator", None)
    return [seen, torch.get_rng_state().tolist(), None if generator is None else generator.get_state().tolist()]


@combinations(
    "kwargs0-None kwargs3-12",
    kwargs=[
        {"shuffle": True, "batch_size": 2},
        {"shuffle": True, "batch_size": 2, "generator": 3},
        {"shuffle": True, "batch_size": None},
        {"batch_size": 2, "sampler": InTurn(24, False)},
        {"batch_size": 2, "sampler": InTurn(24, True)},
        {"batch_size": 2, "sampler": Eager(24, False)},
        {"batch_size": None, "sampler": Eager(24, False)},
    ],
    leave=[None, 5, 12],
)
def test_the_first_workers_of_a_loader_change_nothing_that_is_drawn(kwargs: dict[str, Any], leave: int | None) -> None:
    results = []
    for workers in (0, 1):
        given = dict(kwargs)
        if "generator" in given:
            given["generator"] = torch.Generator().manual_seed(given["generator"])
        if "sampler" in given:
            given["sampler"] = type(given["sampler"])(given["sampler"].length, given["sampler"].fails)
        results.append(epochs_of(DataLoader(Numbers(24), **given), workers, leave=leave))
    assert results[0] == results[1]


@combinations(
    "plan0-60",
    plan=[{5: 1}, {5: 6, 9: 1}, {57: 1}, {5: 1, 30: 8}],
    leave=[50, 58, 60, 62],
)
def test_an_epoch_left_early_with_fewer_workers_leaves_the_next_order_as_it_was(
    plan: dict[int, int], leave: int
) -> None:
    orders = []
    for given in ({}, plan):
        source = loader(4, length=128)  # its generator is drawn from once more as an order ends
        orders.append([read(source, given, leave), read(source, {}, None)])
    assert orders[0] == orders[1]


def test_the_error_of_a_sampler_comes_once_where_it_did_with_fewer_workers() -> None:
    seen = []
    for given in ({}, {2: 1}):
        source = DataLoader(Numbers(30), sampler=InTurn(30, True), batch_size=1, num_workers=4)
        iterator: Any = adopt(iter(source), source)
        batches: list[Any] = []
        for number in itertools.count():
            try:
                batches.append(int(next(iterator)[0, 0]))
            except LookupError as error:
                batches.append(str(error))
            except StopIteration:
                break
            if number in given:
                iterator.resize(given[number])
        seen.append(batches)
    assert seen[0] == seen[1]


def begins_late(worker_id: int) -> None:
    if worker_id:
        signal.pause()


@pytest.mark.matrix
@pytest.mark.usefixtures("quick_checks")
def test_a_stuck_worker_that_had_nothing_to_do_does_not_hold_up_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(added_workers, "_PATIENCE_S", 0.0)
    source = DataLoader(Numbers(24), batch_size=2, num_workers=1, persistent_workers=True, worker_init_fn=begins_late)
    iterator = adopt(iter(source), source)
    for _ in range(11):
        next(iterator)
    assert iterator.resize(2) == 2  # for the next epoch: there is no work left
    assert len(iterator._workers) == 1
    iterator._start_workers(2)
    assert len(list(source)) == 12
    assert len(iterator._workers) == 1
    iterator._shutdown_workers()


def test_an_error_of_the_sampler_that_comes_as_an_iterator_is_adopted_is_training_s() -> None:
    source = DataLoader(Numbers(6), sampler=InTurn(6, True), batch_size=1, num_workers=1, prefetch_factor=2)
    iterator: Any = iter(source)
    seen = [int(next(iterator)[0, 0])]
    iterator = adopt(iterator, source, depth=8)  # as many as eight were asked for ahead before
    with pytest.raises(LookupError, match="the last one is missing"):
        seen.extend(int(batch[0, 0]) for batch in iterator)
    seen += [int(batch[0, 0]) for batch in iterator]
    assert seen == [0, 2, 3, 4]  # but for the batch in whose place the error came
    iterator._shutdown_workers()

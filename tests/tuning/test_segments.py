from __future__ import annotations

import gc
import inspect
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from lightning_gpuopt.compat.dataloader import WorkerBatches, WorkersIterator, numbered_workers, shut_down, workers_of
from lightning_gpuopt.loaders.describe import describe
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.timeline.worker_numbers import worker_number
from lightning_gpuopt.tuning.segments import SegmentedIterator, Segments
from tests.helpers import wait_for
from tests.lanes import combinations
from tests.shared_memory import shared_files

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset[torch.Tensor]):
    """Each sample is its own number, that of the worker that made it, its seed, and a draw."""

    def __init__(self, length: int = 120, fails_at: tuple[int, ...] = ()) -> None:
        self.length, self.fails_at = length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.fails_at:
            raise ValueError(f"sample {index} is corrupt")
        number, seed = worker_number(), torch.initial_seed()
        return torch.tensor([index, -1 if number is None else number, seed, int(torch.randint(1 << 60, ()))])


def loader(workers: int = 1, length: int = 120, **kwargs: Any) -> DataLoader[torch.Tensor]:
    given: dict[str, Any] = {
        "dataset": Numbers(length),
        "batch_size": 2,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
        "num_workers": workers,
    }
    return DataLoader(**{**given, **kwargs})


def segmented(
    source: DataLoader[Any], own: int | None = None, changed: Callable[[Any], bool] = lambda indices: False
) -> SegmentedIterator:
    """An iterator of a loader, as ManagedLoader has it made."""
    own = source.num_workers if own is None else own
    depth = own * (source.prefetch_factor or 2)
    made = SegmentedIterator(source, lambda make: make(), own_workers=own, depth=depth, changed=changed)
    if not source.persistent_workers:  # with which the loader holds the iterator
        vars(made)["source"] = source  # as a Trainer does
    return made


def children() -> set[int | None]:
    return {each.pid for each in multiprocessing.active_children()}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)  # a seed of this process need not fit into int64
    gc.collect()
    before, files, threads = children(), shared_files(), threading.active_count()
    yield
    gc.collect()  # an exception that torch has raised again holds its iterator in a cycle
    wait_for(lambda: not children() - before, 10)
    wait_for(lambda: shared_files() <= files, 10)
    wait_for(lambda: threading.active_count() <= threads, 10)


def read(
    source: DataLoader[torch.Tensor], plan: dict[int, int], stop: int | None = None, *, overlap: bool = True
) -> list[tuple[int, ...]]:
    """One epoch, with the number of workers changed after some batches; the samples of each batch."""
    if plan and "_get_iterator" not in vars(source):
        own = source.num_workers
        vars(source)["_get_iterator"] = lambda: segmented(source, own)
    iterator: Any = iter(source)
    seen = []
    for number, batch in enumerate(iterator):
        seen.append(tuple(batch[:, 0].tolist()))
        if number == stop:
            break
        if number in plan:
            assert iterator.resize(plan[number], overlap=overlap) == plan[number]
            source.num_workers = plan[number]
    return seen


without_order = pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="this torch has no in_order"
)

PLANS = [{0: 3, 5: 4}, {3: 3, 10: 2, 11: 3, 12: 1, 40: 3}, {30: 2, 31: 1, 32: 2}, {2: 3, 29: 1}]


@combinations(
    "plan3-True-57-True",
    plan=PLANS,
    persistent=[False, True],
    left_after=[30, 57],  # with work under way; at 57 of 60 all has been asked for
    overlap=[True, False],
)
def test_the_order_of_samples_is_as_without(
    plan: dict[int, int], persistent: bool, left_after: int, overlap: bool
) -> None:
    plain, changed = (loader(persistent_workers=persistent) for _ in range(2))
    for stop in (left_after, None):
        assert read(changed, plan, stop, overlap=overlap) == read(plain, {}, stop)
        assert changed.generator.get_state().tolist() == plain.generator.get_state().tolist()  # type: ignore[union-attr]
    vars(changed).clear()  # its persistent workers end with it


@without_order
@combinations("1-plan3-True", prefetch_factor=[1, 3], plan=PLANS, persistent=[False, True])
def test_without_an_order_no_sample_is_lost_or_comes_twice(
    plan: dict[int, int], persistent: bool, prefetch_factor: int
) -> None:
    changed = loader(2, persistent_workers=persistent, in_order=False, prefetch_factor=prefetch_factor)
    for _ in range(2):
        assert sorted(index for batch in read(changed, plan) for index in batch) == list(range(120))
    vars(changed).clear()


def draws_of_two_epochs(persistent: bool) -> list[list[tuple[int, ...]]]:
    source = loader(length=60, persistent_workers=persistent)
    vars(source)["_get_iterator"] = lambda: segmented(source, 1)
    epochs = []
    for epoch in range(2):
        iterator: Any = iter(source)
        seen: list[tuple[int, ...]] = []
        for number, batch in enumerate(iterator):
            seen += [tuple(sample) for sample in batch.tolist()]
            if number in (5, 20):
                iterator.resize({5: 2, 20: 1}[number] + epoch)
        epochs.append(seen)
        source.num_workers = 1
    vars(source).clear()
    return epochs


@pytest.mark.parametrize("persistent", [False, True])
def test_no_two_segments_workers_or_epochs_draw_alike(persistent: bool) -> None:
    epochs = draws_of_two_epochs(persistent)
    draws = [draw for epoch in epochs for *_, draw in epoch]
    assert len(set(draws)) == len(draws) == 2 * 60
    assert not persistent or draws_of_two_epochs(persistent) == epochs


def test_the_first_segment_draws_as_the_loader_does() -> None:
    plain = [batch.tolist() for batch in loader(2)]
    iterator = segmented(loader(2))
    seen = [batch.tolist() for batch in itertools.islice(iterator, 20)]
    iterator.resize(3)
    first = [batch.tolist() for batch in itertools.islice(iterator, 4)]
    assert seen + first == plain[:24]  # these were asked for before
    assert [batch.tolist()[0][0] for batch in iterator] == [batch[0][0] for batch in plain[24:]]


@pytest.mark.parametrize("own", [0, 2])
def test_random_states_are_as_without(own: int) -> None:
    """Of the process, and of the loader's generator, at each batch; torch's samplers draw once more as they end."""

    def seen(changed: bool) -> list[Any]:
        torch.manual_seed(1)
        source, states = loader(own, 60, generator=None), []
        for leave in (3, 28, None):
            source.num_workers = 1 if changed else own
            iterator: Any = segmented(source, own) if changed else iter(source)
            states.append(RandomStates())
            for number, batch in enumerate(iterator):
                states.append((batch[:, 0].tolist(), RandomStates()))
                if number == leave:
                    break
                if changed and number in (2, 20):
                    iterator.resize({2: 3, 20: 1}[number])
        return states

    class Alone(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])  # without workers a draw would be the process's

    original, globals()["Numbers"] = Numbers, Alone
    try:
        assert seen(True) == seen(False)
    finally:
        globals()["Numbers"] = original


class Raises(Sampler[int]):
    """Gives so many indices, and raises."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __len__(self) -> int:
        return 120

    def __iter__(self) -> Iterator[int]:
        yield from range(self.after)
        raise ValueError("the sampler has failed")


def outcomes(iterator: Any, plan: dict[int, int]) -> list[Any]:
    """What comes of each fetch, after an error as well."""
    seen: list[Any] = []
    for number in range(130):
        try:
            seen.append(next(iterator)[:, 0].tolist())
        except StopIteration:
            seen.append("end")
            break
        except ValueError as error:
            seen.append(str(error).splitlines()[-1])
        if number in plan:
            iterator.resize(plan[number])
    return seen


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("after", [0, 6, 61])
def test_the_error_of_a_sampler_comes_where_it_would_have(own: int, after: int) -> None:
    given: dict[str, Any] = {"shuffle": False, "sampler": Raises(after)}

    def begin(changed: bool) -> list[Any]:
        source = loader(own, **given)
        if changed and not own:
            source.num_workers = 2
        try:
            iterator: Any = segmented(source, own) if changed else iter(source)
        except ValueError as error:
            return [str(error)]
        return outcomes(iterator, {0: 3, 12: 1} if changed else {})

    assert begin(True) == begin(False)
    gc.collect()


class Follows(Sampler[int]):
    """Each index is what was written before it was asked for."""

    def __init__(self) -> None:
        self.written = 0

    def __iter__(self) -> Iterator[int]:
        return (1000 * self.written + number for number in range(120))

    def __len__(self) -> int:
        return 120


@pytest.mark.parametrize("follows", [False, True])
def test_batches_taken_ahead_of_their_turn_ask_for_more_in_their_turn(follows: bool) -> None:
    """Also where the workers change in between: each segment is asked as often as it gave a batch, and no oftener."""

    def begin(ahead: int) -> list[Any]:
        sampler = Follows()
        order = {"sampler": sampler, "shuffle": False} if follows else {}
        source = loader(2, 120000 if follows else 120, **order)
        iterator = segmented(source)
        workers, waiting, seen = WorkerBatches(iterator), list[tuple[Any, int]](), list[Any]()
        for number in range(60):
            if not waiting:
                waiting.append((next(iterator), 0))
            while len(waiting) <= ahead and workers.may_be_taken_ahead:
                workers.take_ahead()
                batch = next(iterator)
                waiting.append((batch, workers.taken()))
            batch, asks = waiting.pop(0)
            workers.ask_for_more(asks)
            seen.append(batch[:, 0].tolist())
            sampler.written += 1
            if number in (5, 20, 21) and not follows:
                iterator.resize({5: 3, 20: 1, 21: 2}[number], overlap=number == 20)
        return seen

    assert begin(ahead=3) == begin(ahead=0)


def test_an_error_in_any_batch_of_a_segment_loses_nothing() -> None:
    """The first, a middle and the last batch of each of three segments: changes after the batches 9 and 29."""
    fails_at = (0, 2, 10, *range(18, 32, 2), 44, *range(56, 72, 2), 100, 118)
    given: dict[str, Any] = {"dataset": Numbers(fails_at=fails_at), "shuffle": False}
    seen = outcomes(segmented(loader(2, **given)), {9: 3, 29: 1})
    assert seen == outcomes(iter(loader(2, **given)), {})
    assert sum(isinstance(each, str) for each in seen) == len(fails_at) + 1
    gc.collect()


def test_an_error_of_torch_s_own_leaves_the_batch_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(iterator: Any) -> None:
        raise RuntimeError("Pin memory thread exited unexpectedly")

    iterator, seen = segmented(loader(2, shuffle=False)), list[int]()
    for number in range(60):
        if number in (3, 5):
            with monkeypatch.context() as patched:
                patched.setattr(WorkersIterator, "_next_data", fails)
                due = iterator._indices.due
                with pytest.raises(RuntimeError, match="thread exited"):
                    next(iterator)
                assert iterator._indices.due == due
        seen += next(iterator)[:, 0].tolist()
        if number in (4, 5):
            iterator.resize(number - 1)
    assert seen == list(range(120))
    assert next(iterator, None) is None


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("length", [30, 31, 32])
def test_the_generator_of_an_epoch_that_is_left_is_as_without(own: int, length: int) -> None:
    """A short last batch makes a BatchSampler ask for the end, at which RandomSampler draws once more."""

    def ends(plan: dict[int, int]) -> Any:
        source = loader(own, length)
        return read(source, plan, 9), source.generator.get_state().tolist()  # type: ignore[union-attr]

    assert ends({2: 3, 5: 2} if own else {2: 3}) == ends({})


class NoLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def __len__(self) -> int:
        raise ValueError("not known yet")


@pytest.mark.parametrize("own", [0, 1])
def test_a_sampler_whose_length_raises_is_not_asked_for_it(own: int) -> None:
    seen = read(loader(own, sampler=NoLength(), shuffle=False), {2: 2} if own else {})
    assert seen == [(number, number + 1) for number in range(0, 20, 2)]


class RunsDry(Numbers):
    """Ends the epoch at a sample, as an iterator in it that has no more."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index < 61 else next(iter(()))


@pytest.mark.parametrize("own", [0, 2])
def test_a_dataset_that_raises_stop_iteration_ends_the_epoch_where_it_would_have(own: int) -> None:
    given: dict[str, Any] = {"dataset": RunsDry(), "shuffle": False}
    ours, plain = segmented(loader(own, **given)), iter(loader(own, **given))
    assert outcomes(ours, {9: 3, 24: 1}) == outcomes(plain, {})
    for each in (ours, plain):  # while they are held by nobody else: torch waits 5 s for each worker in a cycle
        shut_down(each)


def test_no_worker_is_started_for_each_batch_where_nothing_may_come_early_any_more() -> None:
    indices = list(range(120))
    source = loader(0, sampler=indices, shuffle=False)
    source.num_workers, source.prefetch_factor = 3, 2
    iterator, seen = segmented(source, 0), list[int]()
    for number, batch in enumerate(iterator):
        seen += batch[:, 0].tolist()
        if number == 10:
            indices[-1] = 7
    assert seen == [*range(119), 7]
    assert iterator._count == 1


def test_workers_have_numbers_of_their_own_while_two_segments_run() -> None:
    iterator = segmented(loader(2))
    next(iterator)
    iterator.resize(3)
    assert [number for number, _ in numbered_workers(iterator)] == [0, 1, 2, 3, 4]
    seen = [int(sample[1]) for batch in iterator for sample in batch]
    assert set(seen[:8]) == {0, 1}
    assert set(seen[8:]) == {2, 3, 4}


def test_a_number_that_is_free_is_used_again() -> None:
    iterator = segmented(loader(1))
    next(iterator)
    iterator.resize(2)
    for _ in range(4):
        next(iterator)
    iterator.resize(1)
    assert [number for number, _ in numbered_workers(iterator)] == [1, 2, 0]
    list(iterator)


class InitSeen:
    """A ``worker_init_fn`` that marks the dataset of its worker."""

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.id == worker
        info.dataset.length = 1000 + worker


class Marked(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.length])


def test_what_the_loader_was_given_holds_for_each_segment() -> None:
    given: dict[str, Any] = {"worker_init_fn": InitSeen(), "timeout": 60, "prefetch_factor": 3}
    iterator = segmented(loader(1, dataset=Marked(), **given))
    seen = [next(iterator)]
    iterator.resize(3)
    seen += list(iterator)
    assert {int(mark) for batch in seen for mark in batch[:, 1]} == {1000, 1001, 1002}
    twin = iterator._segments[-1].loader
    assert (twin.timeout, twin.prefetch_factor, twin.num_workers) == (60, 3, 3)


class Holds(DataLoader[Any]):
    """A loader of the user's, whose constructor takes other arguments."""

    def __init__(self, samples: int) -> None:
        super().__init__(Numbers(samples), batch_size=None, num_workers=1)


def test_a_subclass_with_a_constructor_of_its_own_and_without_batches() -> None:
    iterator = segmented(Holds(50))
    seen = [int(next(iterator)[0]) for _ in range(5)]
    iterator.resize(3)
    assert seen + [int(sample[0]) for sample in iterator] == list(range(50))


def test_what_lightning_notes_of_a_loader_is_not_taken_over() -> None:
    """It notes what is set on a loader while a hook makes it: an iterator in it would be in a cycle with its copy."""
    source = loader(1)
    noted: list[Any] = []
    vars(source)["__pl_attrs_record"] = noted
    twin = segmented(source)._segments[-1].loader
    assert "__pl_attrs_record" not in vars(twin)
    assert vars(source)["__pl_attrs_record"] is noted


class Later:
    """The iterator of a torch to come: nothing is as it was, but that it iterates."""

    def __init__(self, source: Any) -> None:
        self.indices = iter(source.batch_sampler)
        self.seed = torch.empty((), dtype=torch.int64).random_(generator=source.generator)
        self.made = source

    def __iter__(self) -> Later:
        return self

    def __next__(self) -> Any:
        return self.made.collate_fn([self.made.dataset[index] for index in next(self.indices)])


def test_a_torch_that_does_not_exist_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: Later(self))
    plain = [batch[:, 0].tolist() for batch in iter(loader(2))]
    iterator = segmented(loader(2))
    seen = [next(iterator) for _ in range(7)]
    assert iterator.resize(5) == 5
    seen += [next(iterator) for _ in range(7)]
    assert iterator.resize(1) == 1
    assert [batch[:, 0].tolist() for batch in [*seen, *iterator]] == plain


@pytest.mark.matrix
def test_workers_that_are_started_anew_take_over() -> None:
    source = loader(1, 40, multiprocessing_context="spawn")
    vars(source)["_get_iterator"] = lambda: segmented(source, 1)
    assert read(source, {2: 2}) == read(loader(1, 40), {})


class Dies(Numbers):
    """The worker with this number dies as it reads its first sample."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __getitem__(self, index: int) -> torch.Tensor:
        if worker_number() == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


@pytest.fixture
def deaths_show_in_fetches() -> Iterator[None]:
    """As where a Trainer has run in this process: else torch's handler raises wherever the program is."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("quick_checks", "deaths_show_in_fetches")
def test_a_killed_worker_of_the_user_s_is_the_error_of_torch() -> None:
    iterator = segmented(loader(1, dataset=Dies(0), shuffle=False))
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly$"):
        next(iterator)
    iterator._shutdown_workers()


@pytest.mark.usefixtures("quick_checks", "deaths_show_in_fetches")
def test_where_one_of_more_workers_dies_the_user_s_own_number_goes_on() -> None:
    iterator = segmented(loader(1, dataset=Dies(2), shuffle=False))
    seen = [next(iterator)]
    iterator.resize(2)
    seen += list(iterator)
    assert [batch[:, 0].tolist() for batch in seen] == [[number, number + 1] for number in range(0, 120, 2)]
    assert iterator.failure is not None
    assert iterator.failure.startswith("a worker died: DataLoader worker (pid")


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class DiesMeanwhile(Dies):
    """The others' samples from the fourth on wait for that: torch's handler then raises as one of these is awaited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.pid = multiprocessing.Value("i")

    def __getitem__(self, index: int) -> torch.Tensor:
        if worker_number() == self.number:
            self.pid.value = os.getpid()
        elif index > 3:
            wait_for(lambda: self.pid.value)
            wait_for(lambda: is_dead(self.pid.value))
        return super().__getitem__(index)


def test_one_of_more_workers_may_die_while_those_before_it_are_waited_for() -> None:
    iterator = segmented(loader(1, dataset=DiesMeanwhile(2), shuffle=False))
    seen = [next(iterator)]
    iterator.resize(2)
    seen += list(iterator)
    assert [batch[:, 0].tolist() for batch in seen] == [[number, number + 1] for number in range(0, 120, 2)]
    assert iterator.failure is not None
    assert iterator.failure.startswith("a worker died: DataLoader worker (pid")  # by torch's handler, or by its queue


class DiesAt(Numbers):
    """A worker that is not the user's dies at this sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 12 and worker_number():
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


@pytest.mark.usefixtures("quick_checks", "deaths_show_in_fetches")
def test_what_had_come_of_workers_that_are_waited_for_comes_though_one_of_them_dies() -> None:
    iterator = segmented(loader(1, dataset=DiesAt(), shuffle=False))
    seen = [next(iterator)]
    iterator.resize(3)
    iterator.resize(2, overlap=False)
    seen += list(iterator)
    assert iterator.failure is not None
    assert [batch[:, 0].tolist() for batch in seen] == [[number, number + 1] for number in range(0, 120, 2)]


def test_what_had_come_of_workers_that_are_waited_for_comes_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = segmented(loader(1, dataset=Numbers(), shuffle=False))
    seen = [next(iterator)]
    iterator.resize(3)
    batches = iterator._segments[1].batches
    steps = itertools.count()

    def interrupted() -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return type(batches)._next_data(batches)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "_next_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iterator.resize(2, overlap=False)
    seen += list(iterator)
    assert [batch[:, 0].tolist() for batch in seen] == [[number, number + 1] for number in range(0, 120, 2)]


def test_where_no_process_can_be_started_those_there_are_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source = loader(1)
    iterator = segmented(source)
    seen = [next(iterator)]
    before = children()

    def fails(process: Any) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", fails)
        assert iterator.resize(3) == 1
    seen += list(iterator)
    assert children() <= before
    assert [batch[:, 0].tolist() for batch in seen] == [list(each) for each in read(loader(1), {})]


def test_at_the_end_of_an_epoch_no_worker_is_started_in_vain() -> None:
    iterator = segmented(loader(2))
    for _ in range(58):
        next(iterator)
    assert iterator.resize(4) == 4
    assert len(workers_of(iterator)) == 2
    assert len(list(iterator)) == 2


class Grows(Sampler[list[int]]):
    """Gives more batches than it has said."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number] for number in range(20)])


@pytest.mark.parametrize("own", [0, 2])
def test_more_batches_than_the_sampler_has_said_come_as_without(own: int) -> None:
    source: DataLoader[Any] = DataLoader(Numbers(20), batch_sampler=Grows(), num_workers=own)
    source.num_workers = max(own, 2)
    iterator = segmented(source, own)
    seen = [next(iterator)]
    iterator.resize(3)
    assert [int(batch[0, 0]) for batch in [*seen, *iterator]] == list(range(20))


def test_an_iterator_that_is_dropped_with_two_segments_leaves_nothing() -> None:
    before = descriptors()
    iterator = segmented(loader(1))
    next(iterator)
    iterator.resize(3)
    assert len(children()) == 4
    del iterator
    wait_for(lambda: not children())
    wait_for(lambda: descriptors() <= before)


def test_where_there_is_no_room_for_both_the_old_ones_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"dataset": Numbers(fails_at=(3,)), "shuffle": False}
    source, most, before = loader(2, **given), list[int](), children()
    start = multiprocessing.Process.start
    plain = outcomes(iter(loader(2, **given)), {})

    def counts(process: Any) -> None:
        start(process)
        most.append(len(children() - before))

    iterator = segmented(source)
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", counts)
        assert iterator.resize(3, overlap=False) == 3
    assert most == [1, 2, 3]
    assert [plain[0], *outcomes(iterator, {})] == plain  # the error in its turn


def test_where_none_can_be_started_in_their_place_the_user_s_own_number_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = loader(1), multiprocessing.Process.start
    iterator, starts = segmented(source), list[int]()
    seen = [next(iterator)]

    def fails(process: Any) -> None:
        starts.append(1)
        if len(starts) == 2:
            raise OSError("no more processes")
        real(process)

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", fails)
        assert iterator.resize(3, overlap=False) == 1
    assert iterator.failure == "workers could not be started: no more processes"
    seen += list(iterator)
    assert [batch[:, 0].tolist() for batch in seen] == [list(each) for each in read(loader(1), {})]


def test_a_sampler_that_must_not_be_asked_early_feeds_those_that_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start once, as the number changes: not again as the old ones end, with what the dataset is by then."""
    source = loader(2, sampler=Follows(), dataset=Versioned(), shuffle=False)
    iterator = segmented(source)
    seen = [next(iterator)]
    assert iterator.resize(1) == 1
    source.dataset.version = 1  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", lambda process: pytest.fail("another was started"))
        seen += list(iterator)
    assert [batch[:, :2].tolist() for batch in seen] == [[[number, 0], [number + 1, 0]] for number in range(0, 120, 2)]


def test_a_number_below_one_is_refused() -> None:
    iterator = segmented(loader())
    with pytest.raises(ValueError, match="num_workers: expected at least 1, got 0"):
        iterator.resize(0)


# -- in place of the training process


class Versioned(Numbers):
    version = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.version, -1 if get_worker_info() is None else 1])


@pytest.mark.usefixtures("quick_checks", "deaths_show_in_fetches")
@pytest.mark.parametrize("why", [pytest.param("no order", marks=without_order), "another dataset"])
def test_where_going_back_would_give_other_batches_a_death_is_the_error_of_torch(why: str) -> None:
    source = loader(1, dataset=Dies(2), shuffle=False, **{"in_order": False} if why == "no order" else {})
    iterator = segmented(source, 1, lambda samples: why == "another dataset")
    next(iterator)
    iterator.resize(2)
    with pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly$"):
        list(iterator)
    iterator._shutdown_workers()


def test_a_dataset_that_changes_is_read_here_from_that_batch_on() -> None:
    source = loader(0, dataset=Versioned(), shuffle=False)
    source.num_workers = 2
    dataset: Any = source.dataset
    iterator = segmented(source, 0, lambda indices: dataset.version > 0)
    assert workers_of(iterator) == []  # none before the first fetch
    seen = [next(iterator) for _ in range(10)]
    dataset.version = 1
    seen += list(iterator)
    expected = [[number, int(number >= 20), 1 if number < 20 else -1] for number in range(120)]
    assert [sample.tolist() for batch in seen for sample in batch] == expected
    assert iterator.fetches_here
    assert source.num_workers == 0
    assert source.prefetch_factor is None


def test_workers_that_live_on_take_over_from_the_process_in_each_epoch() -> None:
    plain, source = loader(0), loader(0)
    shared = Segments.of(source)
    shared.keeps = True
    pids = set()
    for _ in range(2):
        source.num_workers = 2
        iterator = segmented(source, 0)
        seen = [batch[:, 0].tolist() for batch in iterator]
        pids |= {worker.pid for worker in workers_of(iterator)}
        assert seen == [batch[:, 0].tolist() for batch in plain]
    assert len(pids) == 2
    shared.end_kept()


def test_workers_that_live_on_go_where_others_are_asked_for() -> None:
    source = loader(1)
    Segments.of(source).keeps = True
    first = segmented(source)
    list(first)
    assert describe(source, first).persistent_workers
    source.pin_memory = True
    second = segmented(source)
    assert workers_of(second)[0].pid != workers_of(first)[0].pid
    assert second._segments[-1].loader.pin_memory
    list(second)
    Segments.of(source).end_kept()


def test_workers_that_live_on_draw_from_the_loader_s_generator_as_new_ones() -> None:
    plain, source = loader(1), loader(1)
    shared = Segments.of(source)
    shared.keeps = True
    for _ in range(2):
        assert [b[:, 0].tolist() for b in segmented(source)] == [b[:, 0].tolist() for b in plain]
        assert source.generator.get_state().tolist() == plain.generator.get_state().tolist()  # type: ignore[union-attr]
    shared.end_kept()


def test_a_batch_sampler_that_numpy_draws_for_is_asked_when_it_would_have_been() -> None:
    class Draws(Sampler[list[int]]):
        def __len__(self) -> int:
            return 30

        def __iter__(self) -> Iterator[list[int]]:
            for _ in range(30):
                yield np.random.randint(0, 120, 2).tolist()

    def seen(changed: bool) -> list[Any]:
        np.random.seed(5)
        source: DataLoader[Any] = DataLoader(Numbers(), batch_sampler=Draws(), num_workers=1)
        found = []
        for _ in range(2):
            iterator: Any = segmented(source) if changed else iter(source)
            for number, batch in enumerate(iterator):
                found.append((batch[:, 0].tolist(), np.random.random()))
                if changed and number == 3:
                    iterator.resize(2)
        return found

    assert seen(True) == seen(False)

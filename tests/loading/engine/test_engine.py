"""Loader processes that fill batches sample by sample: the same batches in the same order, whatever happens to them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Sampler, Subset, TensorDataset

from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.loading.collate import Collate
from lightning_gpuopt.loading.elastic_loader import ElasticLoader, make_loader
from lightning_gpuopt.loading.engine import engine as engine_module
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from lightning_gpuopt.loading.engine.process import LoaderProcess
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.loading.samples import EpochSamples, SkippedSamples
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.fork_server import start
from tests.helpers import wait_for
from tests.loading.engine.test_layout import same


class Made(Dataset[Any]):
    """Samples made by a function of their index."""

    def __init__(self, make: Callable[[int], Any], size: int = 40) -> None:
        self.make = make
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def pair(index: int) -> Any:
    return torch.full((2, 3), index), index


def loader_of(
    dataset: Any, num_workers: int = 2, *, batch_size: int = 5, shuffle: bool = True, seed: int = 0, **kwargs: Any
) -> Any:
    rank = {name: kwargs.pop(name) for name in ("rank", "world_size") if name in kwargs}
    sampler = ElasticSampler(Order(len(dataset), seed, shuffle), batch_size, **rank)
    return make_loader(dataset, sampler, num_workers=num_workers, prefetch_factor=2, **kwargs)


def engine_of(loader: Any) -> tuple[Iterator[Any], Any]:
    iterator = iter(loader)
    assert type(iterator) is EngineIterator
    return iterator, iterator._engine


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        pair,
        lambda i: {"x": np.full(4, i / 3), "name": f"number {i}"},
        lambda i: (torch.rand(3), np.random.rand(), random.random()),
    ],
)
def test_batches_are_those_of_no_process(make: Callable[[int], Any], num_workers: int) -> None:
    here, there = loader_of(Made(make), 0), loader_of(Made(make), num_workers)
    for _ in range(2):
        iterator, _ = engine_of(there)
        batches = list(iterator)
        assert len(batches) == 8
        for one, other in zip(batches, here, strict=True):
            same(one, other)


def test_nests_of_datasets_are_read() -> None:
    nest = ConcatDataset([Subset(Made(pair), [3, 1, 2]), Made(pair, 4)])
    iterator, _ = engine_of(loader_of(nest, shuffle=False, batch_size=7))
    assert next(iterator)[1].tolist() == [3, 1, 2, 0, 1, 2, 3]


def test_a_batch_stays_as_it_is_for_as_long_as_somebody_has_any_of_it() -> None:
    loader = loader_of(Made(pair, 400), batch_size=4, shuffle=False)
    iterator, _ = engine_of(loader)
    held: dict[int, Any] = {}
    for number, (images, _) in enumerate(iterator):
        if number % 10 == 0:
            held[number] = [images, images[1:, 0], images[2].numpy()][number // 10 % 3]
        elif number % 10 == 5:
            images.fill_(-1)  # batches are the user's to write to
    assert all(batch.min() >= 4 * number for number, batch in held.items())
    assert all(batch.max() <= 4 * number + 3 for number, batch in held.items())


def test_memory_is_used_again() -> None:
    iterator, engine = engine_of(loader_of(Made(pair, 400), batch_size=4))
    for _ in iterator:
        pass
    assert engine._ring._number <= engine._slots + 3


def test_batches_that_are_held_make_it_grow_and_it_is_freed_with_them() -> None:
    before = shared_bytes()
    iterator, engine = engine_of(loader_of(Made(lambda i: torch.full((1 << 16,), i)), batch_size=1))
    batches = list(iterator)
    assert engine._ring._number >= 40
    assert sorted(int(batch[0, 0]) for batch in batches) == list(range(40))
    del iterator, engine
    last = batches[-1].clone()
    del batches[:-1]
    gc.collect()
    assert torch.equal(batches[0], last)
    assert shared_bytes() - before <= 1 << 20
    del batches
    gc.collect()
    assert shared_bytes() - before < 1 << 18


def shared_bytes() -> int:
    """Bytes of memory shared with others that this process has mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) << 10


class Waits(Dataset[Any]):
    """Sample 1 waits until another one has been read."""

    def __init__(self, folder: Path, until: int) -> None:
        self.folder = folder
        self.until = until

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        while index == 1 and not (self.folder / str(self.until)).exists():
            time.sleep(0.001)
        (self.folder / str(index)).touch()
        return index


def test_a_slow_sample_delays_its_own_batch_alone_and_the_order_is_kept(tmp_path: Path) -> None:
    # Two processes, four batches of four on their way: all other 15 samples are read while the first one waits.
    iterator, _ = engine_of(loader_of(Waits(tmp_path, 15), batch_size=4, shuffle=False))
    assert [batch.tolist() for batch in iterator] == [list(range(at, at + 4)) for at in range(0, 24, 4)]


@pytest.mark.parametrize(("most_bytes", "before"), [(1 << 30, 30), (1, 4)])
def test_batches_beyond_prefetch_factor_bridge_a_slow_sample_as_far_as_memory_allows(
    most_bytes: int, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_AHEAD_BYTES", most_bytes)
    monkeypatch.setattr(engine_module.LookAhead, "batches", lambda self: 30)
    iterator, engine = engine_of(loader_of(Made(pair, 400)))
    for _ in range(9):  # the number is asked for now and then
        next(iterator)
    wait_for(lambda: engine.pool.asked - engine.taken == before)
    assert engine.ahead == 4
    assert [batch[1].tolist() for batch in iterator][-1] == [batch[1].tolist() for batch in loader_of(Made(pair, 400))][
        -1
    ]


def slow_now_and_then(index: int) -> int:
    time.sleep(0.1 if index % 20 == 0 else 0.002)
    return index


@pytest.mark.timed
def test_so_many_batches_are_made_ahead_as_a_slow_sample_takes() -> None:
    iterator, engine = engine_of(loader_of(Made(slow_now_and_then, 400), 4, batch_size=4))
    assert sum(len(batch) for batch in iterator) == 400
    # four processes make a batch in 6.9 ms; `prefetch_factor` alone is 8
    assert 11 <= engine.far <= 20


def test_the_memory_is_bounded_and_a_full_ring_waits(tmp_path: Path) -> None:
    iterator, engine = engine_of(loader_of(Waits(tmp_path, 1), batch_size=4, shuffle=False))
    while len(list(tmp_path.iterdir())) < 15:
        time.sleep(0.001)
    assert engine.pool.asked == 4
    assert not (tmp_path / "16").exists()
    (tmp_path / "1").touch()
    assert sum(len(batch) for batch in iterator) == 24


# -- random numbers


def drawn(index: int) -> Any:
    return index, torch.rand(()).item(), np.random.rand(), random.random()


def by_index(loader: Any) -> dict[int, tuple[float, ...]]:
    found = {}
    for batch in loader:
        for index, *numbers in zip(*(column.tolist() for column in batch), strict=True):
            found[index] = tuple(numbers)
    return found


def test_random_numbers_are_the_same_on_any_number_of_processes_and_ranks() -> None:
    one = by_index(loader_of(Made(drawn), 0))
    assert len(set(one.values())) == 40
    assert by_index(loader_of(Made(drawn), 1)) == by_index(loader_of(Made(drawn), 3)) == one
    ranks = [by_index(loader_of(Made(drawn), 1, rank=rank, world_size=2)) for rank in range(2)]
    assert ranks[0] | ranks[1] == one
    assert by_index(loader_of(Made(drawn), 2, seed=1)) != one


def test_random_numbers_are_others_in_each_epoch_and_the_same_after_a_resume() -> None:
    loader = loader_of(Made(drawn), 2)
    first = by_index(loader)
    loader.sampler.set_epoch(1)
    second = by_index(loader)
    assert first != second
    resumed = loader_of(Made(drawn), 1, batch_size=3)
    resumed.sampler.resume(1, 20, 4)
    rest = by_index(resumed)
    assert len(rest) == 20
    assert rest == {index: second[index] for index in rest}


def test_this_processes_random_numbers_stay_its_own() -> None:
    def states() -> Any:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    loader = loader_of(Made(drawn), 0)
    iterator = iter(loader)
    before = states()
    next(iterator)
    assert states() == before


# -- samples that are not like the others


def test_a_sample_of_another_type_makes_the_batch_that_torch_makes() -> None:
    def mixed(index: int) -> Any:
        return torch.tensor(index), index if index < 7 else float(index)

    here, there = loader_of(Made(mixed), 0, shuffle=False), loader_of(Made(mixed), 2, shuffle=False)
    iterator, _ = engine_of(there)
    batches = list(iterator)
    assert [batch[1].dtype for batch in batches[:2]] == [torch.int64, torch.float32]  # as the whole of a batch has it
    for one, other in zip(batches, here, strict=True):
        same(one, other)


def test_samples_that_do_not_go_together_are_named() -> None:
    iterator, _ = engine_of(loader_of(Made(lambda i: torch.zeros(3 if i != 7 else 4)), shuffle=False))
    next(iterator)
    with pytest.raises(RuntimeError, match=r"Made\[5\] is float32 \[3\], Made\[7\] is float32 \[4\]"):
        next(iterator)
    assert len(list(iterator)) == 6


def test_samples_without_a_layout_are_loaded_by_torchs_workers() -> None:
    loader = loader_of(Made(lambda i: [i] * (i % 3)), collate_fn=lambda samples: samples)
    assert type(iter(loader)) is not EngineIterator
    state = torch.get_rng_state()
    iter(loader_of(Made(pair)))
    usual = torch.get_rng_state()
    torch.set_rng_state(state)
    nothing = loader_of(Made(lambda i: {"none": None}))
    iterator = iter(nothing)
    assert type(iterator) is not EngineIterator
    assert torch.equal(torch.get_rng_state(), usual)
    with pytest.raises(TypeError, match="NoneType"):
        next(iterator)


# -- errors


class Broken(ValueError):
    """Of the user's."""


def breaks_at(number: int, error: Callable[[], object]) -> Callable[[int], Any]:
    def make(index: int) -> Any:
        if index == number:
            error()
        return pair(index)

    return make


def raise_broken() -> None:
    raise Broken("of no use")


@pytest.mark.parametrize("number", [0, 7])
def test_an_exception_keeps_its_type_and_line_and_comes_in_its_turn(number: int) -> None:
    loader = loader_of(Made(breaks_at(number, raise_broken)), shuffle=False)
    iterator = iter(loader)
    for _ in range(number // 5):
        next(iterator)
    with pytest.raises(Broken, match=r'(?s)Caught Broken in DataLoader worker process \d.*raise Broken\("of no use"\)'):
        next(iterator)
    assert len(list(iterator)) == 8 - number // 5 - 1


def test_an_exception_whose_class_cannot_be_sent_comes_as_a_text() -> None:
    def raise_local() -> None:
        class Local(Exception):
            pass

        raise Local("of no use")

    iterator, _ = engine_of(loader_of(Made(breaks_at(7, raise_local)), shuffle=False))
    next(iterator)
    with pytest.raises(RuntimeError, match=r"Caught Local in DataLoader worker process \d"):
        next(iterator)
    assert len(list(iterator)) == 6


def test_an_exception_of_the_worker_init_fn_comes_through() -> None:
    def init(worker: int) -> None:
        raise Broken(f"worker {worker}")

    loader = loader_of(Made(pair))
    loader.worker_init_fn = init
    with pytest.raises(Broken, match="worker 0"):
        next(iter(loader))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_is_named_with_its_sample_and_the_others_go_on(how: signal.Signals) -> None:
    dataset = Made(breaks_at(12, lambda: os.kill(os.getpid(), how)))
    iterator, engine = engine_of(loader_of(dataset, 2, shuffle=False))
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    dead = [each for each in engine.pool.processes if not each.is_alive()]
    assert str(caught.value) == (
        f"DataLoader worker (pid {dead[0].pid}) is killed by signal: {signal.strsignal(how)}. It was reading sample 12 "
        "(Made[12])."
    )
    assert [batch[1].tolist()[0] for batch in iterator] == [15, 20, 25, 30, 35]


def test_where_all_processes_have_died_every_batch_says_so() -> None:
    dataset = Made(breaks_at(7, lambda: os._exit(3)))
    iterator, _ = engine_of(loader_of(dataset, 1, shuffle=False))
    next(iterator)
    with pytest.raises(
        RuntimeError, match=r"exited unexpectedly with exit code 3\. It was reading sample 7 \(Made\[7\]\)"
    ):
        next(iterator)
    for _ in range(6):
        with pytest.raises(RuntimeError, match=r"exited unexpectedly with exit code 3\. It had not yet read sample"):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_process_that_dies_at_the_first_sample_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"is killed by signal: Killed\. It was reading sample 0 \(Made\[0\]\)"):
        next(iter(loader_of(Made(breaks_at(0, lambda: os.kill(os.getpid(), 9))), shuffle=False)))


def test_samples_that_a_dying_process_has_taken_along_do_not_hang_the_epoch(tmp_path: Path) -> None:
    """Killed between taking a ticket and saying so."""
    iterator, engine = engine_of(loader_of(Waits(tmp_path, 1), batch_size=4, shuffle=False))
    while len(list(tmp_path.iterdir())) < 15:
        time.sleep(0.001)
    reader = engine.pool.reader_of(0)
    assert reader is not None
    engine._control.readers[reader, 0] = 0
    engine.pool.processes[reader].kill()
    engine.pool.processes[reader].join()
    with pytest.raises(RuntimeError, match=r"is killed by signal: Killed\. It had not yet read sample 1 "):
        next(iterator)
    assert [len(batch) for batch in iterator] == [4, 4, 4, 4, 4]


def unreadable(*numbers: int) -> Callable[[int], Any]:
    def make(index: int) -> Any:
        if index in numbers:
            from PIL import UnidentifiedImageError

            raise UnidentifiedImageError(f"number {index}")
        return pair(index)

    return make


def test_samples_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    skipped = SkippedSamples(tmp_path / "skipped.csv")
    loader = loader_of(Made(unreadable(0, 1, 7, 39)), shuffle=False, skipped=skipped)
    iterator, _ = engine_of(loader)
    batches = list(iterator)
    assert [batch[1].tolist() for batch in batches[:2]] == [[2, 3, 4], [5, 6, 8, 9]]
    assert batches[-1][0].tolist() == [[[number] * 3] * 2 for number in (35, 36, 37, 38)]
    assert sorted(skipped.read()) == ["Made[0]", "Made[1]", "Made[39]", "Made[7]"]


def test_a_batch_of_which_no_sample_can_be_read_is_an_error(tmp_path: Path) -> None:
    skipped = SkippedSamples(tmp_path / "skipped.csv")
    iterator, _ = engine_of(loader_of(Made(unreadable(5, 6, 7, 8, 9)), shuffle=False, skipped=skipped))
    next(iterator)
    with pytest.raises(CorruptSampleError, match=r"none of the 5 samples of a batch can be read.*number 9"):
        next(iterator)
    assert len(list(iterator)) == 6


# -- epochs, and their end


def test_processes_live_on_from_epoch_to_epoch() -> None:
    loader = loader_of(Made(pair), 2)
    pids = set()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        iterator, engine = engine_of(loader)
        pids.add(tuple(process.pid for process in engine.pool.processes))
        expected = loader_of(Made(pair), 0)
        expected.sampler.set_epoch(epoch)
        for one, other in zip(iterator, expected, strict=True):
            same(one, other)
        with pytest.raises(StopIteration):
            next(iterator)
    assert len(pids) == 1


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_an_epoch_that_is_left_early_does_not_reach_into_the_next(taken: int) -> None:
    loader = loader_of(Made(pair), 2)
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        expected = loader_of(Made(pair), 0)
        expected.sampler.set_epoch(epoch)
        for _, one, other in zip(range(taken), loader, expected, strict=False):
            same(one, other)
    assert len(list(loader)) == 8


def test_processes_end_with_the_iterator() -> None:
    iterator, engine = engine_of(loader_of(Made(pair), 2, persistent_workers=False))
    next(iterator)
    processes = engine.pool.processes
    del iterator, engine
    gc.collect()
    assert [process.exitcode for process in processes] == [0, 0]
    threads = [each for each in threading.enumerate() if each.name == "gpuopt-feeder"]
    assert threads == []


@pytest.mark.matrix
def test_nothing_is_left_behind() -> None:
    def left() -> tuple[int, int, int]:
        me = psutil.Process()
        return me.num_fds(), me.num_threads(), len(me.children(recursive=True))

    for persistent in (False, True):
        list(loader_of(Made(pair), 2, persistent_workers=persistent))
    gc.collect()
    before = left()
    for persistent in (False, True, False, True):
        list(loader_of(Made(pair), 2, persistent_workers=persistent))
        next(iter(loader_of(Made(pair), 2, persistent_workers=persistent)))
    gc.collect()
    assert left() == before


def test_several_loaders_run_at_once() -> None:
    loaders = [loader_of(Made(pair), 1, seed=seed) for seed in range(3)]
    expected = [[batch[1].tolist() for batch in loader_of(Made(pair), 0, seed=seed)] for seed in range(3)]
    seen: list[list[list[int]]] = [[], [], []]
    for batches in zip(*loaders, strict=True):
        for at, batch in enumerate(batches):
            seen[at].append(batch[1].tolist())
    assert seen == expected


def test_a_process_that_is_forked_meanwhile_leaves_the_loader_alone() -> None:
    loader = loader_of(Made(pair), 2, shuffle=False)
    iterator, _ = engine_of(loader)
    held = next(iterator)
    child = os.fork()
    if not child:  # drops the loader, and looks at a batch when others have been made
        try:
            sys.stdin.close()
            del iterator, loader
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [batch[1].tolist()[0] for batch in iterator] == [5, 10, 15, 20, 25, 30, 35]
    assert held[1].tolist() == [0, 1, 2, 3, 4]


def test_a_timeout_is_torchs() -> None:
    loader = loader_of(Made(lambda i: (time.sleep(1000) if i == 9 else None, i)[1]), 1, shuffle=False)
    loader.timeout = 0.2
    iterator, engine = engine_of(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
        next(iterator)
    for process in engine.pool.processes:
        process.kill()


_ORPHANS = """
import signal
from tests.loading.engine.test_engine import Made, loader_of, pair

iterator = iter(loader_of(Made(pair, 4000), 2))
next(iterator)
print(*(process.pid for process in iterator._engine.pool.processes), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_training_process_that_is_gone(how: signal.Signals) -> None:
    script = start(["-c", _ORPHANS])
    wait_for(lambda: len(script.lines()) == 1)
    workers = [psutil.Process(int(pid)) for pid in script.lines()[0].split()]
    assert len(workers) == 2
    os.kill(script.pid, how)
    script.communicate(timeout=60)
    assert psutil.wait_procs(workers, timeout=30)[1] == []


@pytest.mark.matrix
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_processes_may_be_started_in_every_way(context: str) -> None:
    loader = loader_of(Made(pair), 2)
    loader.multiprocessing_context = context
    iterator, _ = engine_of(loader)
    for one, other in zip(iterator, loader_of(Made(pair), 0), strict=True):
        same(one, other)


def test_the_number_of_processes_may_change_while_they_run() -> None:
    iterator, engine = engine_of(loader_of(Made(pair, 400), 2, shuffle=False))
    batches = [next(iterator)[1]]
    for number in (4, 1, 3):
        assert iterator.resize(number) == number
        batches += [next(iterator)[1] for _ in range(20)]
        wait_for(lambda wanted=number: len(engine.pool.running) == wanted)
    batches += [labels for _, labels in iterator]
    assert torch.cat(batches).tolist() == list(range(400))


class Draws(Sampler[list[int]]):
    """Batches that it draws as it gives them; notes which thread asks."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.given = 0
        self.batch_size = self.most_samples = 3

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(20):
            self.threads.add(threading.get_ident())
            self.given += 1
            yield torch.randint(0, 40, (3,)).tolist()

    def __len__(self) -> int:
        return 20


def test_a_sampler_of_the_users_draws_in_the_training_thread_and_in_its_turn() -> None:
    samples = EpochSamples(Made(pair))
    seen = []
    for num_workers, ahead in ((0, 0), (2, 4)):
        torch.manual_seed(0)
        sampler = Draws()
        loader = ElasticLoader(
            samples,
            batch_sampler=sampler,
            collate_fn=Collate(),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        batches = []
        for epoch in range(2):
            for number, batch in enumerate(loader, 1):
                assert sampler.given - 20 * epoch == min(20, number + ahead)
                batches.append(batch[1].tolist())
        assert sampler.threads == {threading.get_ident()}
        assert len(batches) == 40
        seen.append(sorted(map(len, batches)))
    assert seen[0] == seen[1]


def test_an_error_of_the_sampler_comes_after_the_batches_before_it() -> None:
    class Fails(Draws):
        def __iter__(self) -> Iterator[list[int]]:
            yield [1, 2, 3]
            yield [4, 5]
            raise Broken("of the sampler")

    loader = ElasticLoader(EpochSamples(Made(pair)), batch_sampler=Fails(), collate_fn=Collate(), num_workers=1)
    iterator, _ = engine_of(loader)
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[1, 2, 3], [4, 5]]
    with pytest.raises(Broken, match="of the sampler"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_without_memory_files_torchs_workers_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with caplog.at_level("DEBUG"):
        loader = loader_of(Made(pair), 1)
        assert type(iter(loader)) is not EngineIterator
        assert sum(len(batch[1]) for batch in loader) == 40
    assert "no memory files" in caplog.text


def test_threads_read_what_runs_no_code_of_the_users(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "data") as writer:
        for index in range(200):
            writer.write((Image.new("RGB", (32, 24), (index, 0, 0)), index))
    dataset = LMDBDataset(tmp_path / "data").with_decoder(_waits)
    iterator, engine = engine_of(loader_of(dataset, 2, batch_size=20))
    assert engine._most_threads == 32
    labels = torch.cat([labels for _, labels in iterator])
    assert sorted(labels.tolist()) == list(range(200))
    changed = LMDBDataset(tmp_path / "data", transform=_size, decode="tensor")
    assert engine_of(loader_of(changed, 2))[1]._most_threads == 1


def _waits(data: Any, mode: str | None = None) -> torch.Tensor:
    time.sleep(0.02)
    return torch.zeros(2)


def _size(image: torch.Tensor) -> int:
    return image.shape[1]


def test_a_process_that_dies_before_it_says_that_a_batch_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_done = LoaderProcess._say_done

    def dies(self: LoaderProcess, sequence: int) -> None:
        if sequence == 4:
            with contextlib.suppress(FileExistsError), open(tmp_path / "died", "x"):  # both may find the batch done
                os.kill(os.getpid(), signal.SIGKILL)
        say_done(self, sequence)

    monkeypatch.setattr(LoaderProcess, "_say_done", dies)
    iterator, _ = engine_of(loader_of(Made(pair), 2, shuffle=False))
    assert [batch[1].tolist()[0] for batch in iterator] == list(range(0, 40, 5))


def test_what_a_process_has_sent_outlives_it() -> None:
    def make(index: int) -> Any:
        if index == 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3 if 10 <= index < 25 else 2)

    iterator, _ = engine_of(loader_of(Made(make), 1, shuffle=False))
    assert [next(iterator).shape[1] for _ in range(5)] == [2, 2, 3, 3, 3]
    with pytest.raises(RuntimeError, match=r"It was reading sample 25 \(Made\[25\]\)"):
        next(iterator)


class Unreadable:
    """It can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return _refuses, ()


def _refuses() -> None:
    raise OSError("unreadable")


def test_a_sample_that_cannot_be_read_here_is_an_error_of_its_batch() -> None:
    iterator, _ = engine_of(loader_of(Made(lambda i: Unreadable() if i == 7 else i), shuffle=False))
    next(iterator)
    with pytest.raises(OSError, match="unreadable"):
        next(iterator)
    assert len(list(iterator)) == 6


def test_processes_that_are_to_end_do_so_though_the_epoch_is_left_before(tmp_path: Path) -> None:
    loader = loader_of(Made(pair, 4000), 3)
    iterator, engine = engine_of(loader)
    next(iterator)
    iterator.resize(1)
    for _ in loader:
        break
    wait_for(lambda: len(engine.pool.running) == 1)
    assert iterator.resize(3) == 3
    assert len(engine.pool.running) == 3
    assert sum(len(batch[1]) for batch in loader) == 4000


def test_when_nobody_is_left_to_read_any_number_of_batches_say_so() -> None:
    iterator, _ = engine_of(loader_of(Made(breaks_at(1, lambda: os._exit(3)), 40_000), 1, shuffle=False, batch_size=4))
    errors = 0
    while True:
        try:
            next(iterator)
        except StopIteration:
            break
        except RuntimeError:
            errors += 1
    assert errors == 10_000


def test_a_change_of_their_number_after_all_have_died_hides_nothing() -> None:
    iterator, engine = engine_of(loader_of(Made(pair, 200), batch_size=4))
    for process in engine.pool.processes:
        process.kill()
    wait_for(lambda: not engine.pool.running)
    engine.pool.threads = 2  # processes with several threads keep their number
    assert iterator.resize(3) == 0
    raised = []
    while True:
        try:
            next(iterator)
        except RuntimeError as error:
            raised.append(str(error))
        except StopIteration:
            break
    assert raised
    assert all("is killed by signal: Killed." in text for text in raised)


def test_a_copy_of_a_loader_has_processes_of_its_own() -> None:
    loader = loader_of(TensorDataset(torch.arange(40)))
    loader.sampler.set_epoch(0)
    first = [batch[0].tolist() for batch in loader]
    other = copy.copy(loader)
    assert other._iterator is None
    other._iterator = None
    assert len(loader._iterator._workers) == 2
    assert [batch[0].tolist() for batch in other] == first
    assert {each.pid for each in other._iterator._workers}.isdisjoint(each.pid for each in loader._iterator._workers)


def mixed(index: int) -> Any:
    return torch.full((2,), index), index / 2 if index % 2 else index // 2


def test_samples_of_several_kinds_are_left_to_torchs_workers_from_the_next_epoch_on() -> None:
    loader = loader_of(Made(mixed), shuffle=False)
    engine_of(loader)
    epochs = [[batch[1].tolist() for batch in loader] for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert [label for batch in epochs[0] for label in batch] == [index / 2 for index in range(40)]
    assert loader.torch_is_faster
    assert not isinstance(loader._iterator, EngineIterator)


@pytest.mark.parametrize("length", [254, 255, 4094])
def test_texts_of_many_lengths_lie_in_the_batch(length: int) -> None:
    loader = loader_of(Made(lambda index: "x" * (length if index % 2 else 3)), shuffle=False, batch_size=2)
    assert [list(batch) for batch in loader] == [["xxx", "x" * length]] * 20
    assert loader._iterator._engine.collated == 0

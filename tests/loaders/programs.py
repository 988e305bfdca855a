"""Programs over one DataLoader: what a user may do with it in a few epochs, and what is changed meanwhile.

:func:`run` carries a program out, with its changes or without: what comes of it must be the same.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_gpuopt.compat.dataloader import workers_of
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning.managed import ManagedLoader
from lightning_gpuopt.tuning.rules import CannotChange
from tests.helpers import wait_for
from tests.shared_memory import shared_files

PATIENCE_S = 20.0
"""So long processes may take to end."""

SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


class Act(NamedTuple):
    """What happens before a batch of an epoch is fetched.

    ``change`` and ``take_back`` are ours; ``peek``, ``version`` and ``entry`` are the user's: he reads a batch of the
    same loader with an iterator of his own, and changes an attribute, or one sample, of the dataset.
    """

    epoch: int
    step: int
    what: str
    setting: str = ""
    value: Any = None


@dataclass(frozen=True)
class Program:
    """See :func:`run`.

    Attributes:
        dataset: a name in ``DATASETS``.
        sampler: a name in ``SAMPLING``.
        seed: of the generators of sampler and loader, where they have their own; None: they have none.
        fails_at: reading this sample raises.
        dies: one worker of those that are added in an epoch, or in place of the training process, dies as it begins to
            read.
        dies_at: a worker dies as it begins to read this sample, in the first epoch; the order is the sequential one.
        leaves: by epoch, the batch after which it is left.
        writes: the user changes an attribute of the dataset after each batch.
        loader: a name in ``LOADERS``.
        acts: in their order.
    """

    dataset: str = "Numbers"
    length: int = 12
    sampler: str = "sequential"
    seed: int | None = None
    batch_size: int = 2
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    own_collate: bool = False
    start_method: str = "fork"
    epochs: int = 2
    fails_at: int | None = None
    dies: bool = False
    dies_at: int | None = None
    leaves: dict[int, int] = field(default_factory=dict)
    writes: bool = False
    loader: str = "torch"
    acts: tuple[Act, ...] = ()

    @property
    def raises(self) -> bool:
        """Whether an epoch may end with an exception."""
        return self.fails_at is not None or self.dies_at is not None or self.dies


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is ``i``, and a value that depends on what the dataset was when it was read."""

    def __init__(self, program: Program) -> None:
        self.length, self.fails_at, self.dies_at = program.length, program.fails_at, program.dies_at
        self.own_workers = program.num_workers
        self.version, self.table = 0, [0] * program.length
        self.deadly: Any = None
        if program.dies or program.dies_at is not None:
            context: Any = multiprocessing.get_context(program.start_method)
            self.deadly, self.may_die = context.Value("b", 0), context.Semaphore(0)
        self.has_read = False

    def __len__(self) -> int:
        return self.length

    def value(self, index: int) -> float:
        return 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.deadly is not None and (worker := get_worker_info()) is not None:
            self.maybe_die(worker.id, index)
        if index == self.fails_at:
            raise ValueError(f"sample {index} is corrupt")
        return torch.tensor([index, 10 * self.version + self.table[index], self.value(index)], dtype=torch.float64)

    def maybe_die(self, worker: int, index: int) -> None:
        """At a worker's first sample, or where all that it has made was received: nothing of it is on its way."""
        if self.dies_at is not None:
            if index == self.dies_at:
                self.may_die.acquire()  # unlike an event, it stands the end of those that wait
                os.kill(os.getpid(), signal.SIGKILL)
        elif worker >= self.own_workers and not self.has_read:
            self.has_read = True
            with self.deadly.get_lock():
                dies, self.deadly.value = self.deadly.value, 0
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)


class DrawsTorch(Numbers):
    def value(self, index: int) -> float:
        return float(torch.rand(()))


class DrawsNumpy(Numbers):
    def value(self, index: int) -> float:
        return float(np.random.random())


class DrawsPython(Numbers):
    def value(self, index: int) -> float:
        return random.random()


class HoldsGenerator(Numbers):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.generator = np.random.default_rng(5)

    def value(self, index: int) -> float:
        return float(self.generator.random())


class Caches(Numbers):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.cache: dict[int, float] = {}

    def value(self, index: int) -> float:
        if index not in self.cache:
            self.cache[index] = float(index * index)
        return self.cache[index]


class Counts(Numbers):
    """A sample's value is how many were read before it."""

    read = 0

    def value(self, index: int) -> float:
        self.read += 1
        return float(self.read)


class HoldsFile(Numbers):
    """Seeks and reads in a file that is open from the beginning."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.file: Any = self.opened()

    def opened(self) -> Any:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(bytes(range(self.length)))
        return file

    def value(self, index: int) -> float:
        self.file.seek(index)
        return float(self.file.read(1)[0])


class OpensLate(HoldsFile):
    """Opens its file when a sample is read first."""

    def __init__(self, program: Program) -> None:
        Numbers.__init__(self, program)
        self.file = None

    def value(self, index: int) -> float:
        if self.file is None:
            self.file = self.opened()
        return super().value(index)


class HoldsIterator(Numbers):
    """Takes its values from a Python generator, one after another."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.values = (float(each) for each in itertools.count())

    def value(self, index: int) -> float:
        return next(self.values)


_KINDS = (
    Numbers,
    DrawsTorch,
    DrawsNumpy,
    DrawsPython,
    HoldsGenerator,
    Caches,
    Counts,
    HoldsFile,
    OpensLate,
    HoldsIterator,
)
DATASETS: dict[str, type[Numbers]] = {each.__name__: each for each in _KINDS}
DEPENDS_ON_WORKERS = ("DrawsTorch", "DrawsNumpy", "DrawsPython", "HoldsGenerator", "HoldsIterator")
"""With workers, which of them reads a sample decides about its value: it holds for their number only. So it is with
``Counts``, whose workers are left alone for that."""

NOT_SPAWNED = ("HoldsFile", "HoldsIterator")
"""Cannot be pickled."""


class WithoutLength(Sampler[Any]):
    """Shuffles as it is iterated, with Python's random state; has no length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


class DrawsPerIndex(WithoutLength):
    """Draws each index from a global random state when it is asked for it."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class Feedback(DrawsPerIndex):
    """What it gives depends on how many batches training has told it of, as hard examples are mined."""

    told = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield (number + 5 * self.told) % self.length


class OwnBatches(WithoutLength):
    """Batches of one and two samples, in turn."""

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Any]:
        numbers = iter(range(self.length))
        for size in itertools.cycle((1, 2)):
            if not (batch := list(itertools.islice(numbers, size))):
                return
            yield batch


class Doubles(DataLoader[Any]):
    """Has an ``__iter__`` of its own."""

    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


class Backwards(DataLoader[Any]):
    """Makes its iterators itself."""

    def _get_iterator(self) -> Any:
        return iter(list(super()._get_iterator())[::-1])


LOADERS: dict[str, Any] = {"torch": DataLoader, "generator": Doubles, "own": Backwards}

SAMPLING: dict[str, Callable[[Program, Any, torch.Generator | None], dict[str, Any]]] = {
    "sequential": lambda program, dataset, generator: {},
    "shuffle": lambda program, dataset, generator: {"shuffle": True},
    "weighted": lambda program, dataset, generator: {
        "sampler": WeightedRandomSampler(
            [1.0 + index % 3 for index in range(program.length)], program.length, generator=generator
        )
    },
    "per_index": lambda program, dataset, generator: {"sampler": DrawsPerIndex(program.length)},
    "without_length": lambda program, dataset, generator: {"sampler": WithoutLength(program.length)},
    "batch_sampler": lambda program, dataset, generator: {
        "batch_sampler": BatchSampler(
            RandomSampler(dataset, generator=generator), program.batch_size, program.drop_last
        )
    },
    "own_batches": lambda program, dataset, generator: {"batch_sampler": OwnBatches(program.length)},
    "feedback": lambda program, dataset, generator: {"sampler": Feedback(program.length)},
}
"""Arguments of a DataLoader."""


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    """A ``collate_fn`` of one's own."""
    return torch.stack(samples)


def make_loader(program: Program) -> DataLoader[Any]:
    """The loader of a program."""
    dataset: Any = DATASETS[program.dataset](program)
    generator = None if program.seed is None else torch.Generator().manual_seed(program.seed)
    sampling = SAMPLING[program.sampler](program, dataset, generator)
    sized = {} if "batch_sampler" in sampling else {"batch_size": program.batch_size, "drop_last": program.drop_last}
    loader: DataLoader[Any] = LOADERS[program.loader](
        dataset,
        generator=generator,
        num_workers=program.num_workers,
        prefetch_factor=program.prefetch_factor if program.num_workers else None,
        persistent_workers=program.persistent_workers and program.num_workers > 0,
        pin_memory=program.pin_memory,
        collate_fn=stacked if program.own_collate else None,
        multiprocessing_context=program.start_method if program.num_workers else None,
        **sized,
        **sampling,
    )
    return loader


@dataclass
class Outcome:
    """What came of a program.

    Attributes:
        seen: by epoch, what was fetched, how it ended, and what training has drawn between the batches.
        random: by epoch, the random states after it, and those of the loader's and the sampler's generators.
        settings: of the loader at the end.
        is_exact: whether the samples' values must be those of the other run, too; else their numbers only.
        changed: the changes that were not refused.
    """

    seen: list[list[Any]] = field(default_factory=list)
    random: list[tuple[RandomStates, list[bytes]]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    changed: list[Act] = field(default_factory=list)


class _Untouched:
    """The user's program alone."""

    def __init__(self, program: Program, loader: DataLoader[Any], outcome: Outcome) -> None:
        self.program, self.loader, self.outcome = program, loader, outcome

    def epoch_begins(self) -> None:
        pass

    def iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    def act(self, act: Act, iterator: Any, *, last_epoch: bool) -> None:
        pass

    def step_done(self, iterator: Any) -> None:
        pass

    def end(self) -> None:
        pass


class _Changed(_Untouched):
    """With a ManagedLoader, as the registry and AutoFix use it."""

    def __init__(self, program: Program, loader: DataLoader[Any], outcome: Outcome) -> None:
        super().__init__(program, loader, outcome)
        self.own = {name: getattr(loader, name) for name in SETTINGS}
        self.managed = ManagedLoader(loader, local_ranks=1)
        self.managed.running.freeze()
        self.trains = False
        behind = weakref.ref(loader)  # a loader whose workers persist holds its iterator, and that what makes it

        def create(make: Any = None) -> Any:
            here: Any = behind()
            return (make or type(here)._get_iterator.__get__(here))()

        def get_iterator() -> Any:
            if self.trains:
                return self.managed.iterator_wanted()(create)
            with self.managed.unmodified():
                return create()

        vars(loader)["_get_iterator"] = get_iterator

    def epoch_begins(self) -> None:
        self.managed.epoch_begins()

    def iterate(self) -> Iterator[Any]:
        self.trains = True
        self.arm(False)
        try:
            return iter(self.loader)
        finally:
            self.trains = False
            self.arm(self.program.dies and not self.program.num_workers)

    def act(self, act: Act, iterator: Any, *, last_epoch: bool) -> None:
        before = len(workers_of(iterator))
        self.arm(self.program.dies and self.program.num_workers > 0)
        try:
            self._act(act, iterator, last_epoch=last_epoch)
        finally:
            if len(workers_of(iterator)) <= before:
                self.arm(False)

    def arm(self, dies: bool) -> None:
        """Have the next added worker die as it reads its first sample, or not."""
        dataset: Any = self.loader.dataset
        if self.program.dies:
            dataset.deadly.value = dies

    def _act(self, act: Act, iterator: Any, *, last_epoch: bool) -> None:
        try:
            if act.what == "change":
                self.managed.change(act.setting, act.value, iterator, last_epoch=last_epoch)
            elif act.what == "take_back":
                self.managed.take_back(act.setting, self.own[act.setting])
        except CannotChange:
            return
        self.outcome.changed.append(act)
        if act.setting in ("num_workers", "persistent_workers"):
            self.outcome.is_exact = self.program.num_workers == 0 or self.program.dataset not in DEPENDS_ON_WORKERS

    def step_done(self, iterator: Any) -> None:
        self.managed.step_done(iterator)

    def end(self) -> None:
        self.arm(False)
        self.managed.end(self.own)
        vars(self.loader).pop("_get_iterator", None)


def run(program: Program, *, changed: bool) -> Outcome:
    """Carry a program out, from the same random states on; ``changed``: with the acts that are ours."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    outcome, failed = Outcome(), []
    loader = make_loader(program)
    user = (_Changed if changed else _Untouched)(program, loader, outcome)
    try:
        for epoch in range(program.epochs):
            if epoch == program.epochs - 1:
                user.end()  # and one epoch without us
                user = _Untouched(program, loader, outcome)
            outcome.seen.append([])
            goes_on = _epoch(program, epoch, user, failed)
            outcome.random.append((RandomStates(), _generators(loader)))
            if not goes_on:
                break
    finally:
        user.end()
        for iterator in failed:
            end_workers(iterator, kill=program.dies or program.dies_at is not None)
    outcome.settings = {name: getattr(loader, name) for name in SETTINGS}
    return outcome


def _epoch(program: Program, epoch: int, user: _Untouched, failed: list[Any]) -> bool:
    """Read an epoch; whether the program goes on after it.

    ``failed`` gets the iterators of a program that raises: the exception holds them in a cycle.
    """
    loader, dataset, seen = user.loader, user.loader.dataset, user.outcome.seen[-1]
    last_epoch = epoch >= program.epochs - 2
    iterator: Any = None
    try:
        user.epoch_begins()
        iterator = user.iterate()
        if program.raises:
            failed.append(iterator)
        for step in itertools.count():
            for act in (each for each in program.acts if (each.epoch, each.step) == (epoch, step)):
                if act.what == "peek":
                    seen.append(("peek", _peek(loader, failed)))
                elif act.what == "version":
                    dataset.version += 1
                elif act.what == "entry":
                    dataset.table[act.value % program.length] += 1
                else:
                    user.act(act, iterator, last_epoch=last_epoch)
            if step == program.leaves.get(epoch):
                return True
            if program.dies_at is not None and step == program.dies_at // program.batch_size:
                for _ in range(4):  # the work of one that was added goes to another, which dies as well
                    dataset.may_die.release()
            seen.append(next(iterator).tolist())
            dataset.version += program.writes
            if isinstance(loader.sampler, Feedback):
                loader.sampler.told += 1
            user.step_done(iterator)
            seen.append((float(torch.rand(())), float(np.random.random()), random.random()))
    except StopIteration:
        seen.append("end")
    except ValueError as error:
        seen.append("corrupt" if "is corrupt" in str(error) else repr(error))
    except (RuntimeError, OSError, EOFError):
        if program.dies_at is None and not program.dies:
            raise
        seen.append("dead")
        return False
    return True


def _peek(loader: DataLoader[Any], failed: list[Any]) -> Any:
    """The first batch, by an iterator of the user's own."""
    iterator: Any = iter(loader)
    try:
        return next(iterator).tolist()
    except StopIteration:
        return "end"
    except ValueError:
        failed.append(iterator)
        return "corrupt"


def end_workers(iterator: Any, *, kill: bool = False) -> None:
    """End the workers of an iterator that has raised.

    With ``kill`` one has died: as long as torch knows of it, its handler raises at the end of any child.
    """
    for worker in workers_of(iterator) if kill else ():
        while worker.is_alive():
            with contextlib.suppress(RuntimeError):
                worker.kill()
                worker.join()
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _generators(loader: DataLoader[Any]) -> list[bytes]:
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    own = {id(each): each for each in (loader.generator, getattr(sampler, "generator", None)) if each is not None}
    return [each.get_state().numpy().tobytes() for each in own.values()]


def numbers_only(seen: list[list[Any]]) -> list[list[Any]]:
    """What was seen, without the values of samples."""

    def plain(each: Any) -> Any:
        if isinstance(each, list):
            return [sample[0] for sample in each]
        if isinstance(each, tuple) and each[0] == "peek":
            return "peek", plain(each[1])
        return each

    return [[plain(each) for each in epoch] for epoch in seen]


@contextlib.contextmanager
def nothing_is_left(*, collect: bool = False) -> Iterator[None]:
    """Fail where files, processes or shared memory are left behind; ``collect`` garbage before, which may hold them."""
    gc.collect()
    before = _left()
    gc.disable()  # what it has to collect stays for long, and torch takes five seconds for each worker of an iterator
    try:
        yield
        if collect:
            gc.collect()
        wait_for(lambda: not _since(before), PATIENCE_S)
    except AssertionError:
        if left := _since(before):
            raise AssertionError(f"left behind: {left}") from None
        raise
    finally:
        gc.enable()


def _since(before: tuple[set[Any], ...]) -> list[Any]:
    return [each for now, then in zip(_left(), before, strict=True) for each in now - then]


def _left() -> tuple[set[Any], ...]:
    """Child processes, files in shared memory, and open descriptors with what they lead to."""
    found = {(number, _target(number)) for number in os.listdir("/proc/self/fd")}
    # A heap of multiprocessing's is kept, and that of listdir itself is gone.
    descriptors = {each for each in found if each[1] and "/pym-" not in each[1]}
    return set(multiprocessing.active_children()), shared_files(), descriptors


def _target(descriptor: str) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return None

"""ManagedLoader and its rules: each setting is changed now, with the next iterator, or refused because of a rule."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset

from lightning_gpuopt.compat.dataloader import workers_of
from lightning_gpuopt.tuning.managed import ManagedLoader, changes_of
from lightning_gpuopt.tuning.random_draws import DrawWatch
from lightning_gpuopt.tuning.rules import BY_TRIAL, RULES, CannotChange
from tests.tuning.datasets import Stream

PAGE = Path(__file__).parents[2] / "docs/workers-rules.md"


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Draws(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


class Counts(Numbers):
    read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.tensor([self.read])


class Caches(Numbers):
    keys = range(24)

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.kept.setdefault(index, torch.tensor([index]))


class Keyed(Numbers):
    """A worker that is asked for numbers fails."""

    keys = tuple("abcdef")

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([self.keys.index(index)])


class OwnGenerator(Numbers):
    """Makes a generator in each worker when the first sample is read."""

    rng: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        return torch.tensor([self.rng.random()])


class OpensLate(Numbers):
    """Opens its file when a sample is read first."""

    file: Any = None
    keys = range(24)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file, self.tokens = PAGE.open("rb"), {"a": 0}
        return torch.tensor([index])


class Unpicklable(Numbers):
    keys = range(24)

    def __getstate__(self) -> Any:
        raise TypeError("not to be pickled")


class Epochs(Numbers):
    def set_epoch(self, epoch: int) -> None: ...


class Closed:
    """Cannot be looked into."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise TypeError("nobody looks into a Closed")


class Makes(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Keeps(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


def loader(dataset: Any = None, kind: Any = DataLoader, **kwargs: Any) -> DataLoader[Any]:
    made: DataLoader[Any] = kind(dataset or Numbers(), **{"batch_size": 2, "num_workers": 1, **kwargs})
    return made


def managed(source: DataLoader[Any] | None = None, **kwargs: Any) -> ManagedLoader:
    source = loader() if source is None else source
    made = ManagedLoader(source, local_ranks=1, **kwargs)
    vars(made)["source"] = source  # which is held by whoever uses it, as by a Trainer
    return made


def made_by(one: ManagedLoader) -> Any:
    """An iterator, as the registry has it made."""
    create: Any = type(one.loader)._get_iterator.__get__(one.loader)
    return one.iterator_wanted()(lambda make=create: make())


@pytest.mark.parametrize(
    ("made", "setting", "value", "when"),
    [
        (loader, "num_workers", 2, "now"),
        (lambda: loader(num_workers=0), "num_workers", 2, "with the next iterator"),
        (loader, "prefetch_factor", 4, "with the next iterator"),
        (loader, "pin_memory", True, "with the next iterator"),
        (loader, "persistent_workers", True, "with the next iterator"),
        (loader, "num_workers", 1, "refused because it is already set"),
        (lambda: loader(kind=Makes), "num_workers", 2, "refused because a Makes creates its own iterators"),
        (lambda: loader(kind=Makes), "prefetch_factor", 4, "with the next iterator"),
        (lambda: loader(kind=Keeps), "prefetch_factor", 4, "refused because the state of a Keeps is valid only for"),
        (lambda: loader(Stream(24)), "prefetch_factor", 4, "with the next iterator"),
        (lambda: loader(Stream(24)), "persistent_workers", True, "refused because persistent workers would continue"),
        (loader, "num_workers", 0, "refused because without workers, the training process would draw"),
        (
            lambda: loader(sampler=RandomSampler(range(24), generator=torch.default_generator)),
            "prefetch_factor",
            4,
            "refused because its sampler (RandomSampler) draws from the global generator",
        ),
        (
            lambda: loader(Subset(Epochs(), range(4))),
            "persistent_workers",
            True,
            "refused because Subset has set_epoch(), which persistent workers would not see",
        ),
        (
            lambda: loader(Numbers(closed=Closed())),
            "persistent_workers",
            True,
            "refused because Numbers is too large to check whether it changes between epochs",
        ),
        (lambda: loader(num_workers=0), "pin_memory", True, "refused because pinning would change its batches' types"),
        (lambda: loader(persistent_workers=True, num_workers=1), "pin_memory", True, "with the next iterator"),
    ],
)
def test_when_a_change_takes_effect(made: Callable[[], Any], setting: str, value: Any, when: str) -> None:
    assert managed(made()).when(setting, value).startswith(when)


def test_what_takes_another_iterator_is_refused_in_the_last_epoch() -> None:
    one = managed()
    last = "it needs a new iterator of the loader, and this epoch is the last"
    with pytest.raises(CannotChange, match=re.escape(last)):
        one.change("prefetch_factor", 4, last_epoch=True)


def test_a_dataset_that_cannot_be_looked_into_is_left_alone() -> None:
    class Fails:
        @property
        def generator(self) -> Any:
            raise OSError("gone")

    assert managed(loader(sampler=Fails())).when("num_workers", 2) == (
        "refused because it cannot be inspected: OSError: gone"
    )


def test_running_workers_are_changed_now_and_the_loader_is_as_before_at_the_end() -> None:
    source = loader()
    one = managed(source)
    iterator = made_by(one)
    next(iterator)
    assert one.change("num_workers", 2, iterator) is True
    assert (iterator.num_workers, one.now("num_workers")) == (2, 2)
    one.take_back("num_workers", 1)
    assert iterator.num_workers == 1
    assert [int(batch[0]) for batch in iterator] == list(range(2, 24, 2))
    one.end({"num_workers": 1, "persistent_workers": False})
    assert (source.num_workers, source.prefetch_factor, source.persistent_workers) == (1, 2, False)


@pytest.mark.parametrize(
    ("setting", "value", "made", "why"),
    [
        ("num_workers", 3, lambda: loader(Draws()), "its workers draw random numbers"),
        ("persistent_workers", True, lambda: loader(Draws()), "its workers draw random numbers"),
        (
            "num_workers",
            3,
            lambda: loader(Numbers(rng=np.random.default_rng(0)), num_workers=2),
            "its dataset holds a random generator, dataset.rng (Generator)",
        ),
        (
            "num_workers",
            3,
            lambda: loader(multiprocessing_context="forkserver"),
            "its workers are started by 'forkserver': their random draws cannot be inspected",
        ),
    ],
)
def test_exact_waits_for_a_first_look_and_leaves_alone_what_draws(
    setting: str, value: Any, made: Any, why: str
) -> None:
    one = managed(made(), exact=True)
    assert one.when(setting, value) == "refused because it is not known yet whether its workers draw random numbers"
    with pytest.raises(CannotChange):
        one.change(setting, value)
    assert one.when(setting, value) == f"refused because {why} (exact=True)"
    assert one.when("prefetch_factor", 4) == "with the next iterator"


def test_first_workers_that_would_run_the_script_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda: spawn)
    when = managed(loader(num_workers=0)).when("num_workers", 2)
    assert when.startswith("refused because its workers would be started by 'spawn', which runs the program's script")


@pytest.mark.parametrize(("setting", "value"), [("num_workers", 3), ("num_workers", 1), ("persistent_workers", True)])
def test_a_dataset_that_changes_as_it_is_read_keeps_the_workers_it_has(setting: str, value: Any) -> None:
    one = managed(loader(Counts(), num_workers=2))
    why = "its dataset changes as it is read: a sample depends on what its worker has read before"
    with pytest.raises(CannotChange, match=re.escape(why)):
        one.change(setting, value)
    assert one.when(setting, value) == f"refused because {why}"


class KeepsWhatItDraws(Numbers):
    """As many augmentations do."""

    def __init__(self, rng: Any = random) -> None:
        self.rng, self.params = rng, None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.params = {"angle": self.rng.random(), "scale": float(torch.rand(()))}
        return torch.tensor([index])


@pytest.mark.parametrize("rng", [random, random.Random(1), np.random.default_rng(1), np.random.RandomState(1)])
def test_what_was_drawn_may_be_kept(rng: Any) -> None:
    one = managed(loader(KeepsWhatItDraws(rng), num_workers=2))
    one.change("persistent_workers", True)
    assert one.refused == {}


@pytest.mark.matrix
def test_a_trial_in_spawned_workers_sees_it_beside_workers_that_persist() -> None:
    source = loader(Counts(), num_workers=1, persistent_workers=True, multiprocessing_context="spawn")
    iterator: Any = iter(source)
    with pytest.raises(CannotChange, match="its dataset changes as it is read"):
        managed(source).change("num_workers", 2)
    iterator._shutdown_workers()


class FailsOnce(Counts):
    """Its first worker meets a corrupt sample."""

    def __init__(self) -> None:
        self.may_fail = multiprocessing.Value("b", 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        fails, self.may_fail.value = self.may_fail.value, 0
        if fails:
            raise ValueError("corrupt")
        return super().__getitem__(index)


def test_a_corrupt_sample_does_not_hide_what_reading_does() -> None:
    with pytest.raises(CannotChange, match="its dataset changes as it is read"):
        managed(loader(FailsOnce())).change("num_workers", 2)


@pytest.mark.parametrize("made", [Caches, Keyed, OpensLate, Unpicklable])
def test_what_gives_the_same_when_it_is_read_again_is_served(made: Any) -> None:
    one = managed(loader(made(), sampler=made.keys))
    one.change("persistent_workers", True)
    made_by(one)
    assert one.refused == {}


class DrawsAtFirst(Numbers):
    """Draws as its first sample is read, and never again."""

    offset: Any = None

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.offset is None:
            self.offset = int(self.draw())
        return torch.tensor([index + self.offset])


def seeds(worker_id: int) -> None:
    np.random.seed(np.random.get_state()[1][0] + worker_id)  # type: ignore[index, arg-type]
    random.seed(torch.initial_seed() + worker_id)


@pytest.mark.parametrize("draw", [lambda: torch.randint(9, ()), lambda: np.random.randint(9), lambda: random.random()])
def test_exact_sees_a_draw_in_the_first_batch_alone(draw: Callable[[], Any]) -> None:
    for dataset, drawn in ((DrawsAtFirst(draw), True), (DrawsAtFirst(lambda: 1), False)):
        one = managed(loader(dataset, worker_init_fn=seeds), exact=True)
        with contextlib.suppress(CannotChange):
            one.change("persistent_workers", True)
        assert ("draw random numbers" in one.when("num_workers", 2)) == drawn


@pytest.mark.usefixtures("cheap_workers")
def test_exact_sees_a_generator_that_is_made_in_the_worker() -> None:
    one = managed(loader(OwnGenerator()), exact=True)
    with pytest.raises(CannotChange, match=re.escape("its workers draw random numbers (exact=True)")):
        one.change("num_workers", 2)
    first = managed(loader(OwnGenerator(), num_workers=0), exact=True)
    first.change("num_workers", 2)
    made_by(first)
    assert first.looked_s > 0
    assert first.refused == {"num_workers": "its dataset creates a random generator in each worker (exact=True)"}


class DrawsInOthers(Numbers):
    """Draws in all workers but the first, which alone is looked at before."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        return torch.tensor([index]) + (0 if info is None or not info.id else torch.randint(1, ()))


@pytest.mark.usefixtures("cheap_workers")
def test_exact_gives_first_workers_back_where_one_draws_after_all() -> None:
    source = loader(DrawsInOthers(), num_workers=0)
    one = managed(source, exact=True)
    one.change("num_workers", 2)
    iterator = made_by(one)
    samples = [int(each) for _ in range(12) for each in next(iterator)]
    lost = one.step_done(iterator)
    assert lost is not None
    assert (lost.kind, lost.why) == ("draws", "its workers draw random numbers after all (exact=True)")
    assert [one.step_done(iterator) for _ in range(3)] == [None] * 3  # it is told once, and stays so
    assert (samples, source.num_workers) == (list(range(24)), 1)  # to the end of this epoch
    assert [int(each) for batch in made_by(one) for each in batch] == list(range(24))
    assert (source.num_workers, source.prefetch_factor) == (0, None)


def test_workers_that_were_to_live_on_and_died_are_started_anew() -> None:
    source = loader()
    one = managed(source)
    one.change("persistent_workers", True)
    iterator = made_by(one)
    list(iterator)
    (worker,) = workers_of(iterator)
    worker.kill()
    worker.join()
    after = made_by(one)
    assert after is not iterator
    assert [int(batch[0]) for batch in after] == list(range(0, 24, 2))
    one.end()


def test_what_a_report_asks_iterates_no_sampler() -> None:
    class Own:
        iterated = 0

        def __iter__(self) -> Any:
            Own.iterated += 1
            return iter(range(24))

    changes, unshared = changes_of(loader(sampler=Own()))
    assert (changes["num_workers"], unshared) == ("now", None)
    assert Own.iterated == 0
    assert managed(loader(sampler=Own())).when("num_workers", 2) == "now"
    assert Own.iterated == 0


def test_inside_a_loader_of_somebody_s_own_workers_do_not_live_on() -> None:
    assert managed(wrapped=True).when("persistent_workers", True).startswith("refused because the program iterates it")
    assert managed(wrapped=True).when("num_workers", 2) == "with the next iterator"


def test_workers_show_their_draws() -> None:
    source = loader(Draws(), timeout=60)  # which has them come so
    one = managed(source)
    list(made_by(one))
    assert one.draws  # the user's own do
    one.running.shared.draws = DrawWatch()
    collate_fn = source.collate_fn
    one.change("num_workers", 2)
    iterator = made_by(one)
    assert source.collate_fn is collate_fn
    list(iterator)
    assert (iterator.num_workers, one.draws) == (2, True)


def test_a_generator_that_is_held_counts_as_drawing() -> None:
    one = managed(loader(Numbers(rng=np.random.default_rng(0)), num_workers=2))
    made_by(one)
    assert one.draws
    other = managed()
    made_by(other)
    assert not other.draws


def test_the_page_has_a_row_for_each_rule() -> None:
    (table,) = re.findall(r"\| rule \|.*?\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rows = [row.split("|")[1:3] for row in table.strip().splitlines()[2:]]
    named = {**{rule.name: rule.settings for rule in RULES}, **BY_TRIAL}
    assert {row[0].strip(): tuple(re.findall(r"`(\w+)`", row[1])) for row in rows} == named


class DrawsAtOnce(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(24).view(-1, 2).tolist())

    def __len__(self) -> int:
        return 12


def test_more_batches_ahead_are_prepared_only_where_the_sampler_may_be_asked_for_them() -> None:
    made = managed(loader(batch_size=1, batch_sampler=DrawsAtOnce()))
    assert (made.raise_prefetch(4), made.loader.prefetch_factor) == (False, 2)
    made.running.order.turns = 8  # an epoch in which it was changed by its own iteration alone
    assert (made.raise_prefetch(4), made.loader.prefetch_factor) == (True, 4)

"""AdjustableLoader beside a Trainer that is a few plain attributes: what it refuses, what it does, and how it leaves.

No worker is started: what runs, and what a training sees of it, is shown with real Trainers in
``tests/callbacks/test_auto_fix.py``.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.tuning.managed import ManagedLoader
from lightning_gpuopt.tuning.rules import CannotChange
from lightning_gpuopt.tuning.running import LostWorkers, RunningLoader
from lightning_gpuopt.tuning.worker_limits import Cap
from tests.callbacks.auto_fix_runs import Numbers, loader
from tests.tuning.datasets import Stream


class Keeps(DataLoader[torch.Tensor]):
    """Somebody's own loader with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Fetcher:
    """Stands where the training loop's fetcher does, and begins iterators."""

    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Any:
        return iter([each._get_iterator() for each in self.loaders])


class Plain(SimpleNamespace):
    """Has the attributes that it is given; can be held weakly, and be a key."""

    __hash__ = object.__hash__


class Rig:
    """An AdjustableLoader over these loaders, of whose iterators it only counts how many are made."""

    def __init__(self, *loaders: Any, **trainer: Any) -> None:
        self.loaders = list(loaders)
        self.loops = SimpleNamespace(
            _combined_loader=SimpleNamespace(flattened=self.loaders, _iterator=SimpleNamespace(iterators=[])),
            _data_fetcher=Fetcher(self.loaders),
        )
        self.trainer: Any = Plain(
            strategy=Plain(process_dataloader=lambda loader: loader),
            fit_loop=self.loops,
            **{
                "training": True,
                "reload_dataloaders_every_n_epochs": 0,
                "max_epochs": 3,
                "current_epoch": 0,
                "num_devices": 1,
                "world_size": 1,
                **trainer,
            },
        )
        self.own = self.trainer.strategy.process_dataloader
        self.made: list[int] = []
        self.adjustable = AdjustableLoader(self.trainer)
        for each in loaders:
            if type(each) is DataLoader:
                each._get_iterator = lambda loader=each: self.made.append(loader.num_workers)
            assert self.trainer.strategy.process_dataloader(each) is each

    def change(self, setting: str, value: Any) -> str | bool:
        """Change a setting: whether it is in effect, or why it has to stay."""
        try:
            return self.adjustable.change(setting, value)
        except CannotChange as reason:
            return str(reason)

    def epoch(self) -> None:
        """The loop begins an epoch."""
        list(self.loops._data_fetcher)


class TestWhatIsLeftAlone:
    @pytest.mark.parametrize(
        ("made", "why"),
        [
            ([], "there is no training loader"),
            ([loader(), loader()], "there are several training loaders, and the finding names none"),
            ([[1, 2]], "AutoFix leaves a list alone: it is not a torch DataLoader"),
            (
                [Keeps(Numbers(), 2, num_workers=1)],
                "the state of a Keeps is valid only for the settings it started with",
            ),
        ],
    )
    def test_a_loader_that_cannot_be_changed(self, made: list[Any], why: str) -> None:
        rig = Rig(*made)
        assert rig.change("num_workers", 3) == why
        assert rig.change("prefetch_factor", 5) == why

    @pytest.mark.parametrize("setting", ["num_workers", "persistent_workers"])
    def test_the_workers_of_a_stream_of_which_more_may_be_prepared_ahead(self, setting: str) -> None:
        rig = Rig(loader(Stream(40), shuffle=False))
        assert rig.change(setting, 3) == (
            "AutoFix leaves an IterableDataset alone: its samples depend on the workers (iterable=True includes it)"
        )
        assert rig.change("prefetch_factor", 5) is False

    def test_one_that_was_made_before(self) -> None:
        rig = Rig(loader())
        rig.loops._combined_loader.flattened = [loader()]
        assert rig.change("num_workers", 3) == "the training loader already existed"

    def test_one_of_a_validation(self) -> None:
        rig = Rig(training=False)
        made = loader()
        rig.trainer.strategy.process_dataloader(made)
        assert vars(made).get("_get_iterator") is None

    def test_loaders_that_are_made_anew(self) -> None:
        rig = Rig(loader(), reload_dataloaders_every_n_epochs=1)
        assert rig.change("num_workers", 3) == "the loaders are recreated while training runs"


class Wraps:
    """A loader of somebody's own, around a DataLoader."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return map(list, self.inner)

    def _get_iterator(self) -> Any:  # as Rig's fetcher begins iterators
        return iter(self)


class TestADataLoaderInALoader:
    def test_all_changes_come_with_the_next_iterator(self) -> None:
        inner = loader()
        inner._get_iterator = lambda: iter([])  # type: ignore[method-assign,assignment,return-value]
        rig = Rig(Wraps(inner))
        rig.loops._combined_loader._iterator.iterators = [iter([])]  # which cannot be held weakly
        assert [rig.change("num_workers", 3), rig.change("prefetch_factor", 5)] == [False, False]
        assert (inner.num_workers, inner.prefetch_factor) == (1, 2)
        rig.epoch()
        assert (inner.num_workers, inner.prefetch_factor) == (3, 5)
        assert rig.adjustable.is_settled
        rig.adjustable.undo({"num_workers": 1, "prefetch_factor": 2})
        assert (inner.num_workers, inner.prefetch_factor) == (1, 2)


class TestTheLastEpoch:
    @pytest.mark.parametrize(("epochs", "at"), [(1, 0), (3, 2)])
    def test_what_takes_a_new_iterator_comes_too_late(self, epochs: int, at: int) -> None:
        for made, setting, value in ((loader(num_workers=0), "num_workers", 2), (loader(), "prefetch_factor", 5)):
            rig = Rig(made, max_epochs=epochs, current_epoch=at)
            assert rig.change(setting, value) == "it needs a new iterator of the loader, and this epoch is the last"
            assert rig.adjustable.is_settled

    @pytest.mark.parametrize("epochs", [None, -1, 2])
    def test_is_not_this_where_another_comes(self, epochs: int | None) -> None:
        assert Rig(loader(), max_epochs=epochs).change("prefetch_factor", 5) is False

    def test_running_workers_keep_their_number(self) -> None:
        rig = Rig(loader(), max_epochs=1)
        said = rig.change("num_workers", 2)
        assert isinstance(said, str)
        assert said.startswith("running workers cannot be changed (")
        assert rig.loaders[0].num_workers == 1


class TestSeveralLoaders:
    def test_the_one_that_is_aimed_at_is_changed(self) -> None:
        rig = Rig(loader(), loader())
        assert rig.adjustable.aim("1")
        assert not rig.adjustable.aim("0")
        assert rig.change("prefetch_factor", 5) is False
        rig.epoch()
        assert [each.prefetch_factor for each in rig.loaders] == [2, 5]
        assert rig.adjustable.now("prefetch_factor") == 5
        rig.adjustable.undo({"prefetch_factor": 2})
        assert [each.prefetch_factor for each in rig.loaders] == [2, 2]

    def test_one_that_is_there_twice_is_left_alone(self) -> None:
        rig = Rig(twice := loader(), twice)
        rig.adjustable.aim("1")
        assert rig.change("persistent_workers", True) == "it is used twice among the training loaders"

    def test_the_only_one_needs_no_aim(self) -> None:
        rig = Rig(loader())
        assert not rig.adjustable.aim("1")
        assert rig.change("prefetch_factor", 5) is False


class TestWithTheNextIterator:
    def test_not_with_somebody_elses(self) -> None:
        rig = Rig(loader())
        rig.change("prefetch_factor", 5)
        rig.loaders[0]._get_iterator()
        assert rig.loaders[0].prefetch_factor == 2
        rig.trainer.training = False
        rig.epoch()
        assert rig.loaders[0].prefetch_factor == 2
        assert rig.made == [1, 1]

    def test_one_that_is_iterated_on_a_thread_of_its_own_is_left_alone(self) -> None:
        rig = Rig(loader())
        rig.change("prefetch_factor", 5)
        thread = threading.Thread(target=rig.epoch)
        thread.start()
        thread.join()
        why = "the program iterates it on its own thread"
        assert rig.adjustable.refused == {"prefetch_factor": why}
        assert (rig.loaders[0].prefetch_factor, rig.adjustable.is_settled) == (2, True)
        assert rig.change("num_workers", 2) == why

    def test_what_is_taken_back_comes_no_more_or_goes_with_the_next_or_with_the_end(self) -> None:
        rig, factors = Rig(loader()), []
        for ends in (False, True):
            rig.change("prefetch_factor", 5)
            rig.adjustable.take_back("prefetch_factor", 2)
            assert rig.adjustable.is_settled
            rig.epoch()
            factors.append(rig.loaders[0].prefetch_factor)
            rig.change("prefetch_factor", 5)
            rig.epoch()
            rig.adjustable.take_back("prefetch_factor", 2)
            assert (rig.loaders[0].prefetch_factor, rig.adjustable.is_settled) == (5, False)
            rig.adjustable.undo({}) if ends else rig.epoch()
            factors.append(rig.loaders[0].prefetch_factor)
        assert factors == [2, 2, 2, 2]

    def test_a_fault_in_setting_it_is_a_refusal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any) -> None:
            raise ValueError("ours")

        rig = Rig(loader())
        rig.change("prefetch_factor", 5)
        monkeypatch.setattr(ManagedLoader, "_set", broken)
        rig.epoch()
        assert rig.adjustable.refused == {"prefetch_factor": "ours"}


class TestRunningWorkers:
    def test_there_are_no_more_than_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RunningLoader, "cap", lambda self, **options: Cap(2, "memory"))
        rig = Rig(loader())
        rig.change("num_workers", 9)
        assert rig.loaders[0].num_workers == 2
        assert rig.change("num_workers", 9) == "there is no room for more workers, limited by memory"
        assert rig.change("num_workers", 1) is False  # for fewer there is

    def test_where_there_is_no_room_any_longer_some_go_and_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig(loader())
        assert rig.adjustable.step_done() is None
        rig.change("num_workers", 3)
        assert rig.adjustable.step_done() is None
        monkeypatch.setattr(RunningLoader, "no_longer_fits", lambda self: Cap(2, "memory"))
        said = rig.adjustable.step_done()
        assert said == LostWorkers("room", "there is no longer room for more workers, limited by memory")
        assert rig.loaders[0].num_workers == 2

    @pytest.mark.parametrize(("method", "slowly"), [("fork", False), ("spawn", True)])
    def test_whether_they_start_slowly(self, method: str, slowly: bool) -> None:
        assert Rig(loader(multiprocessing_context=method)).adjustable.starts_slowly is slowly


class TestTheEnd:
    def test_all_that_was_placed_is_gone(self) -> None:
        rig = Rig(loader())
        own = vars(rig.loaders[0])["_get_iterator"]
        rig.adjustable.undo({})
        rig.adjustable.undo({})
        assert rig.trainer.strategy.process_dataloader is rig.own
        assert own is not vars(rig.loaders[0])["_get_iterator"]


class Prefetch:
    def __init__(self) -> None:
        self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True

    def sleep(self) -> None:
        self.is_awake = False


class TestTheCopyAhead:
    def test_it_is_woken_at_once_and_sleeps_again(self) -> None:
        adjustable = AdjustableLoader(Rig(loader()).trainer, Prefetch())
        assert adjustable.now("device_prefetch") is False
        assert adjustable.change("device_prefetch", True) is True
        assert (adjustable.now("device_prefetch"), adjustable.is_waiting("device_prefetch")) == (True, False)
        adjustable.take_back("device_prefetch", False)
        assert adjustable.now("device_prefetch") is False

    def test_where_there_is_none_it_cannot_be_woken(self) -> None:
        rig = Rig(loader())
        assert rig.change("device_prefetch", True) == "there is no CudaPrefetcher to switch on"
        rig.adjustable.take_back("device_prefetch", False)
        assert rig.adjustable.now("device_prefetch") is False

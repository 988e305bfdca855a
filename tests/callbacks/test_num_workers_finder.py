from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt import CudaPrefetcher
from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.dataloader import parts, running_workers, workers_of
from lightning_gpuopt.compat.lightning import train_iterators
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.storage.gather import Gather
from lightning_gpuopt.tuning import running, without_workers, worker_limits
from lightning_gpuopt.tuning import tuned_loader as loader_module
from lightning_gpuopt.tuning.rules import why_left_alone
from lightning_gpuopt.tuning.running import RunningLoader
from lightning_gpuopt.tuning.running_search import LivePolicy
from lightning_gpuopt.tuning.search_result import NumWorkersResult, Trial
from tests.datamodules.training import EPOCHS, Notes, build
from tests.helpers import FEATURES, AfterBatch, RecordingLogger, TinyModel, tiny_trainer, wait_for
from tests.lanes import combinations, few
from tests.ranks import run_ranks
from tests.shared_memory import shared_files

pytestmark = [
    pytest.mark.usefixtures("cheap_workers"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), index / self.length)


class Model(TinyModel):
    """Keeps what it was given."""

    def __init__(self, *loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        given = [batch] if isinstance(batch, torch.Tensor) else batch
        self.batches.append([(each[:, 0] * 160).round().int().tolist() for each in given if each is not None])
        return sum(self.layer(each).pow(2).mean() for each in given if each is not None)  # type: ignore[return-value]

    def train_dataloader(self) -> Any:
        return self.loaders[0] if len(self.loaders) == 1 else CombinedLoader(list(self.loaders), "max_size")


def loader(workers: int = 1, length: int = 40, **kwargs: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(length), batch_size=2, shuffle=True, num_workers=workers, **kwargs)


def children() -> set[int]:
    """Processes of ours; the one that spawning needs stays."""
    return {each.pid for each in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = children()
    files = shared_files()
    yield
    gc.collect()
    wait_for(lambda: not children() - before)
    wait_for(lambda: shared_files() <= files)


def fit(tmp_path: Path, model: Model, *callbacks: Callback, **kwargs: Any) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model.layer.reset_parameters()
    options = {"max_steps": -1, "max_epochs": 2, "callbacks": list(callbacks), **kwargs}
    tiny_trainer(tmp_path, **options).fit(model)
    return {"weights": model.layer.weight.tolist(), "random": RandomStates(), "batches": model.batches}


@cache
def plain_fit(workers: int, **kwargs: Any) -> dict[str, Any]:
    """What comes of a training without us."""
    with tempfile.TemporaryDirectory() as folder:
        return fit(Path(folder), Model(loader(workers, **kwargs)))


class InTraining(Callback):
    """Workers of the iterator that the training loop reads, after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.counts.append(running_workers(None, train_iterators(trainer)[0]))


def found(monkeypatch: pytest.MonkeyPatch, result: NumWorkersResult) -> list[tuple[Any, ...]]:
    """What ``find_num_workers`` finds; gives the arguments that it is called with."""
    asked: list[tuple[Any, ...]] = []

    def find(source: Any, *args: Any) -> NumWorkersResult:
        asked.append(args)
        return result

    monkeypatch.setattr(loader_module, "find_num_workers", find)
    return asked


@pytest.mark.parametrize(
    ("workers", "kwargs", "wanted"),
    [
        (1, {"persistent_workers": True}, {1: 4, 4: 2}),
        pytest.param(3, {}, {3: 1}, marks=pytest.mark.matrix),
    ],
)
def test_batches_weights_and_random_state_are_as_without(
    tmp_path: Path, decisions: dict[int, int], workers: int, kwargs: Any, wanted: dict[int, int]
) -> None:
    decisions.update(wanted)
    source, finder, counts = loader(workers, **kwargs), NumWorkersFinder(), InTraining()
    tuned = fit(tmp_path, Model(source), finder, counts)
    assert tuned == plain_fit(workers, **kwargs)
    assert len(tuned["batches"]) == 40
    assert finder.optimal_num_workers == source.num_workers == counts.counts[-2] == list(wanted.values())[-1]
    assert max(counts.counts) == max(workers, *wanted.values())


class Validated(Model):
    def val_dataloader(self) -> Any:
        return loader(1, 6)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        torch.rand(())


@combinations(
    "validated-2-True",
    options={
        "limited": {"limit_train_batches": 9},
        "steps": {"max_steps": 30, "max_epochs": -1},
        "overfits": {"overfit_batches": 15},
        "validated": {"val_check_interval": 10},
        "reloads": {"reload_dataloaders_every_n_epochs": 1},
    },
    loaders=[1, 2],
    ahead=[False, True],
)
def test_however_an_epoch_goes_on_and_ends_workers_that_take_over_in_it_change_nothing(
    tmp_path: Path, decisions: dict[int, int], options: dict[str, Any], loaders: int, ahead: bool
) -> None:
    def model() -> Model:
        return Validated(*(loader(workers) for workers in (1, 4)[:loaders]))

    plain = fit(tmp_path, model(), **options)
    decisions.update({1: 3, 3: 2, 4: 5})
    finder = NumWorkersFinder()
    tuned = fit(tmp_path, model(), finder, *[CudaPrefetcher(enabled=True)][: int(ahead)], **options)
    assert tuned == plain
    assert [choice.num_workers for choice in finder.choices.values()] == [2, 5][:loaders]


def test_the_trainer_and_the_loader_are_left_as_they_were(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions[1] = 2
    source = loader()
    before = {name: value for name, value in vars(source).items() if name != "num_workers"}
    for callbacks in ([NumWorkersFinder(), StallDetector()], [StallDetector(), NumWorkersFinder()]):
        trainer = tiny_trainer(tmp_path, callbacks=callbacks, max_steps=8)
        trainer.fit(Model(source))
        assert "process_dataloader" not in vars(trainer.strategy)
        assert {name: value for name, value in vars(source).items() if name != "num_workers"} == before
    assert source.num_workers == 2


def test_the_choice_is_said_and_logged_once(
    tmp_path: Path, decisions: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    decisions[1] = 4
    logger = RecordingLogger()
    with caplog.at_level(logging.INFO):
        finder = NumWorkersFinder()
        fit(tmp_path, Model(loader()), finder, logger=logger)
    said = [record.getMessage() for record in caplog.records if "NumWorkersFinder" in record.getMessage()]
    assert said == [
        "NumWorkersFinder: num_workers 1 → 4: 4.0× faster input, limited by consumer",
        "NumWorkersFinder: give the DataLoader persistent_workers=True: its workers are started again in every epoch",
    ]
    # the first two fetches are left out; three are a window of two steps; two windows
    assert [each for each in logger.records if "loader/num_workers" in each[1]] == [(7, {"loader/num_workers": 4.0})]
    assert [trial.num_workers for trial in finder.trials] == [1, 4]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.full((FEATURES,), float(index)) for index in range(40))


def test_a_stream_is_left_alone_unless_asked_for(
    tmp_path: Path, decisions: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    decisions[1] = 2
    source = DataLoader(Stream(), batch_size=2, num_workers=1)
    finder = NumWorkersFinder()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Model(source), finder)
    assert (finder.optimal_num_workers, finder.trials, source.num_workers) == (1, [], 1)
    assert sum("leaves an IterableDataset alone" in record.getMessage() for record in caplog.records) == 1
    finder = NumWorkersFinder(iterable=True)
    with pytest.warns(UserWarning, match="num_workers is 2 from the next epoch on"):
        fit(tmp_path, Model(source), finder)
    assert source.num_workers == 2


def test_a_loader_that_gathers_without_workers_stays_so() -> None:
    source = loader(0)
    vars(source)["dataset"] = Gather.__new__(Gather)
    assert why_left_alone(source) == "a loader alone: it gathers its batches faster without workers"


class CorruptLater(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 30:
            raise ValueError("sample 30 is corrupt")
        return super().__getitem__(index)


class Ends:
    """A batch sampler that fails at batch 20, in this process only: where it fails in another, it is left alone."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(40):
            if batch == 20 and os.getpid() == self.pid:
                raise LookupError("no batch 20")
            yield [batch, batch + 1]

    def __len__(self) -> int:
        return 40


def fail(trainer: Any, batch_idx: int) -> None:
    if batch_idx == 10:
        raise OSError("the disk is gone")


def interrupt(trainer: Any, batch_idx: int) -> None:
    if batch_idx == 10:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("source", "act", "error"),
    [
        (loader, fail, OSError("the disk is gone")),
        (lambda: loader(3), interrupt, KeyboardInterrupt()),
        (lambda: DataLoader(CorruptLater(), batch_size=2, num_workers=1), None, ValueError("sample 30 is corrupt")),
        (lambda: DataLoader(Numbers(), batch_sampler=Ends(), num_workers=1), None, LookupError("no batch 20")),
    ],
    ids=["step", "ctrl-c", "data", "sampler"],
)
def test_an_error_or_ctrl_c_comes_out_and_leaves_no_worker_while_it_is_looked_at(
    tmp_path: Path, decisions: dict[int, int], source: Any, act: Any, error: BaseException
) -> None:
    decisions.update({1: 4, 3: 4})
    before, finder = children(), NumWorkersFinder()
    with pytest.raises((type(error), SystemExit), match=str(error) or None) as caught:
        fit(tmp_path, Model(source()), finder, *[] if act is None else [AfterBatch(act)], max_epochs=1)
    wait_for(lambda: not children() - before)
    assert caught.tb is not None  # its frames hold the iterator
    assert finder.optimal_num_workers == 4


def test_a_restored_choice_is_used_without_a_new_search(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions[1] = 3
    finder = NumWorkersFinder()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1)
    fit(tmp_path, Model(loader()), finder, checkpoint, enable_checkpointing=True, max_epochs=1)
    path = tmp_path / "epoch=0-step=10.ckpt"
    state = torch.load(path, weights_only=True)["callbacks"]["NumWorkersFinder"]
    choice = {"num_workers": 3, "before": 1, "settled": True, "limited_by": "consumer", "prefetch_factor": None}
    assert state == {"loaders": {0: choice}}
    checkpointed = torch.load(path, weights_only=True)
    checkpointed["callbacks"]["NumWorkersFinder"]["loaders"][0]["prefetch_factor"] = 4
    torch.save(checkpointed, path)
    decisions[3] = 5
    source, counts, again = loader(), InTraining(), NumWorkersFinder()
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, max_steps=30, callbacks=[again, counts], logger=logger)
    trainer.fit(Model(source), ckpt_path=path)
    assert set(counts.counts) == {3}
    assert (again.optimal_num_workers, source.num_workers, source.prefetch_factor) == (3, 3, 4)
    assert str(again.choices[0]) == "num_workers 1 → 3, prefetch_factor=4: limited by consumer"
    assert [each[1]["loader/num_workers"] for each in logger.records if "loader/num_workers" in each[1]] == [3.0]


def test_a_probe_goes_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trial(1, 10.0, 0.1), Trial(3, 25.0, 0.0), Trial(3, 20.0, 0.0)
    asked = found(monkeypatch, NumWorkersResult(3, trials, "consumer", 25.0, 4, False, True))
    source, counts = loader(), InTraining()
    finder = NumWorkersFinder("probe", step_time_s=0.04, max_num_workers=8, max_seconds=5, tolerance=0.1)
    assert fit(tmp_path, Model(source), finder, counts) == plain_fit(1)
    assert asked == [(0.04, 8, pytest.approx(5, abs=0.5), 0.1, 1, False)]
    assert set(counts.counts) == {3}
    assert (finder.optimal_num_workers, source.prefetch_factor) == (3, 4)
    assert str(finder.choices[0]) == "num_workers 1 → 3, prefetch_factor=4: 2.5× faster input, limited by consumer"
    assert finder.state_dict()["loaders"][0]["prefetch_factor"] == 4


def test_a_probe_measures_the_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = found(monkeypatch, NumWorkersResult(3, (Trial(1, 10.0, 0.1), Trial(3, 25.0, 0.0)), "consumer"))
    source, counts = loader(0), InTraining()
    assert fit(tmp_path, Model(source), NumWorkersFinder("probe"), counts) == plain_fit(0)
    assert len(asked) == 1
    assert asked[0][0] > 0
    assert (counts.counts[0], counts.counts[17], source.num_workers) == (1, 3, 3)


def test_trials_that_see_nothing_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, NumWorkersResult(1, (), "time"))
    source, finder = loader(2), NumWorkersFinder("probe", step_time_s=0.01)
    with pytest.warns(UserWarning, match="continues with num_workers=2: no batch came within max_seconds=10"):
        fit(tmp_path, Model(source), finder, max_epochs=1)
    assert source.num_workers == 2


def test_an_error_of_ours_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(LivePolicy, "decide", fail)
    model = Model(loader())
    with pytest.warns(UserWarning, match="disables itself, training continues: ZeroDivisionError: ours"):
        fit(tmp_path, model, NumWorkersFinder())
    assert len(model.batches) == 40


class Reloading(Model):
    """Makes a loader each time that it is asked."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def train_dataloader(self) -> Any:
        return loader(**self.given)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("given", "at"),
    [
        ({}, {20: 3}),
        # with which no other workers take over in mid-epoch: the change passes on to the next epoch's new loader
        ({"timeout": 60}, {0: 1, 19: 1, 20: 3, 39: 3}),
    ],
)
def test_new_loaders_of_the_next_epoch_go_on_with_the_number(
    tmp_path: Path, decisions: dict[int, int], given: Any, at: dict[int, int]
) -> None:
    decisions[1] = 3
    counts, finder = InTraining(), NumWorkersFinder()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers is 3 from the next epoch on")
        fit(tmp_path, Reloading(**given), finder, counts, reload_dataloaders_every_n_epochs=1)
    assert {step: counts.counts[step] for step in at} == at
    assert {index: choice.num_workers for index, choice in finder.choices.items()} == {0: 3}


@pytest.mark.matrix
def test_a_loader_that_a_search_for_a_learning_rate_has_used_is_let_go(
    tmp_path: Path, decisions: dict[int, int]
) -> None:
    decisions[1] = 3
    model, finder, counts = Reloading(), NumWorkersFinder(), InTraining()
    model.lr = 0.1
    callbacks = [LearningRateFinder(num_training_steps=10, update_attr=False), finder, counts]
    trainer = tiny_trainer(tmp_path, max_steps=40, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(model)
    assert (counts.counts[0], counts.counts[-1]) == (1, 3)
    assert {index: choice.num_workers for index, choice in finder.choices.items()} == {0: 3}


@pytest.mark.matrix
def test_a_resume_in_mid_epoch_knows_the_new_loader_of_the_next(tmp_path: Path, decisions: dict[int, int]) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1)
    fit(tmp_path, Reloading(), checkpoint, enable_checkpointing=True, max_epochs=1)
    decisions[1] = 3
    finder, counts = NumWorkersFinder(), InTraining()
    options = {"max_steps": -1, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1, "callbacks": [finder, counts]}
    tiny_trainer(tmp_path, **options).fit(Reloading(), ckpt_path=tmp_path / "epoch=0-step=10.ckpt")
    assert {index: choice.num_workers for index, choice in finder.choices.items()} == {0: 3}
    assert counts.counts[-20] == 3


class AfterSetup(SingleDeviceStrategy):
    """Restores callbacks as FSDP does: after loaders are iterated, where the model asks for its number of steps."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("persistent", "kwargs"), few("later", {"later": (True, {"timeout": 60}), "at once": (False, {})})
)
def test_a_choice_that_is_restored_late_is_used_from_the_first_step_on_or_the_next_epoch(
    tmp_path: Path, decisions: dict[int, int], kwargs: dict[str, Any], persistent: bool
) -> None:
    decisions[1] = 3
    trainer = tiny_trainer(tmp_path, max_steps=10, callbacks=[NumWorkersFinder()])
    trainer.fit(Model(loader()))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")

    class Scheduled(Model):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 60
            return super().configure_optimizers()

    decisions[3] = 5
    finder, counts = NumWorkersFinder(), InTraining()
    options = {"max_steps": -1, "max_epochs": 3, "callbacks": [finder, counts], "strategy": AfterSetup("cpu")}
    model = Scheduled(loader(persistent_workers=persistent, **kwargs))
    tiny_trainer(tmp_path, **options).fit(model, ckpt_path=tmp_path / "kept.ckpt")
    first = counts.counts[0]  # Lightning 2.5 restores before it iterates the loader
    assert first == 3 or kwargs
    assert counts.counts == [first] * 20 + [3] * 20
    assert str(finder.choices[0]) == "num_workers 1 → 3: limited by consumer"


def test_more_batches_ahead_are_prepared_by_workers_that_persist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, NumWorkersResult(1, (Trial(1, 10.0, 0.1),), "consumer", 10.0, 5))
    factors: list[int] = []
    looks = AfterBatch(lambda trainer, _: factors.append(parts(train_iterators(trainer)[0])[0]._prefetch_factor))
    plain = plain_fit(1, persistent_workers=True, timeout=60)
    assert fit(tmp_path, Model(loader(persistent_workers=True, timeout=60)), NumWorkersFinder("probe"), looks) == plain
    assert (factors[0], factors[-1]) == (2, 5)


@pytest.mark.matrix
def test_no_more_workers_than_allowed_are_kept(tmp_path: Path, decisions: dict[int, int]) -> None:
    finder, counts = NumWorkersFinder(max_num_workers=2), InTraining()
    fit(tmp_path, Model(loader(4)), finder, counts, max_epochs=1)
    assert set(counts.counts) == {2}
    assert str(finder.choices[0]).startswith("num_workers 4 → 2: ")


@pytest.mark.matrix
def test_a_state_that_is_loaded_in_mid_fit_changes_nothing(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions.update({1: 3, 3: 5})
    finder, state = NumWorkersFinder(), {"loaders": {0: {"num_workers": 2, "settled": True, "before": 1}}}
    loads = AfterBatch(lambda trainer, batch_idx: finder.load_state_dict(state) if batch_idx == 1 else None)
    fit(tmp_path, Model(loader()), finder, loads, max_epochs=1)
    assert finder.optimal_num_workers == 5


def test_the_state_of_a_later_version_is_read(tmp_path: Path) -> None:
    finder = NumWorkersFinder()
    finder.load_state_dict({"loaders": {0: {"num_workers": 3, "settled": True, "before": 1, "colour": "blue"}}})
    assert finder._restored[0].num_workers == 3


@pytest.mark.parametrize(("mode", "dry"), [(False, False), ("probe", True)])
def test_off_or_in_a_dry_run_it_does_nothing(tmp_path: Path, mode: Any, dry: bool) -> None:
    finder = NumWorkersFinder(mode, step_time_s=0.0)
    fit(tmp_path, Model(loader()), finder, max_epochs=1, fast_dev_run=dry)
    assert (finder.mode, finder.optimal_num_workers, finder.trials) == (mode or "off", None, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode: expected one of 'live', 'probe', 'off', got 'fast'"),
        ({"mode": True}, "mode: expected one of 'live', 'probe', 'off', got True"),
        ({"step_time_s": -1}, "step_time_s: expected seconds, at least 0, or None, got -1"),
        ({"max_num_workers": 0}, "max_num_workers: expected a number of workers, at least 1, or None, got 0"),
        ({"max_seconds": 0}, "max_seconds: expected seconds above 0, got 0"),
        ({"tolerance": 2}, "tolerance: expected a share above 0 and at most 0.5, got 2"),
        ({"iterable": 1}, "iterable: expected True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        NumWorkersFinder(**arguments)
    assert str(caught.value) == message


@pytest.mark.matrix
def test_a_stall_detector_beside_it_begins_anew_with_other_workers(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions[1] = 4
    detector = StallDetector(window_size=10, warmup_steps=2)
    seen: dict[str, Any] = {}

    def looks(trainer: Any, batch_idx: int) -> None:
        run: Any = detector._session
        steady = run._windows.steady(run.timeline.times())
        if batch_idx == 5:
            seen["too early"] = detector.report.notes
        if batch_idx == 30:
            seen["changed after"], seen["steady steps"] = run._changed_after, steady.steps
            seen["pids"] = set(run.loader._host._pids)
            seen["workers"] = {worker.pid for worker in workers_of(train_iterators(trainer)[0])}

    fit(tmp_path, Model(loader(length=80)), NumWorkersFinder(), detector, AfterBatch(looks), max_epochs=1)
    note = (
        "Only 1 step has run since the loader was changed, warm-up included: nothing is diagnosed, a verdict needs at "
        "least 3."
    )
    assert seen["too early"][0] == note
    assert (seen["changed after"], seen["steady steps"]) == (5, 31 - 5 - 2)
    assert seen["pids"] == seen["workers"]
    assert len(seen["pids"]) == 4


@pytest.mark.matrix
def test_a_stall_detector_sees_workers_of_a_loader_that_began_again(tmp_path: Path) -> None:
    detector = StallDetector(window_size=10, warmup_steps=2)
    seen: list[Any] = []

    class Grows(AfterBatch):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            AdjustableLoader(trainer)

    def grow(trainer: Any, batch_idx: int) -> None:
        if batch_idx == 30:  # the shorter loader is read for the fourth time
            train_iterators(trainer)[1].resize(3)
        assert detector._session is not None
        seen.append(detector._session.loader.facts.num_workers)

    model = Model(loader(1, length=80), loader(1, length=20))
    model.train_dataloader = lambda: CombinedLoader(list(model.loaders), "max_size_cycle")  # type: ignore[method-assign]
    fit(tmp_path, model, Grows(grow), detector, max_epochs=1)
    assert (seen[30], seen[31]) == (2, 4)


@pytest.mark.matrix
def test_a_stall_detector_beside_it_counts_the_workers_that_run(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions[1] = 4
    detector = StallDetector(window_size=10, warmup_steps=2)
    seen: list[Any] = []

    def looks(trainer: Any, batch_idx: int) -> None:
        run: Any = detector._session
        seen.append((run.loader.facts.num_workers, run._changed_after))

    with pytest.warns(UserWarning, match="num_workers is 4 from the next epoch on"):
        fit(tmp_path, Model(loader(timeout=60)), NumWorkersFinder(), detector, AfterBatch(looks))
    assert seen[19:21] == [(1, None), (4, 21)]


def test_a_copy_knows_the_choice_until_then_and_is_at_rest(tmp_path: Path, decisions: dict[int, int]) -> None:
    decisions[1] = 3
    finder = NumWorkersFinder(step_time_s=0.1)
    twins: list[NumWorkersFinder] = []

    def copies(trainer: Any, batch_idx: int) -> None:
        if batch_idx == 15:
            twins.extend([copy.deepcopy(finder), pickle.loads(pickle.dumps(finder))])

    fit(tmp_path, Model(loader()), finder, AfterBatch(copies), max_epochs=1)
    assert [(twin.step_time_s, twin.optimal_num_workers, len(twin.trials)) for twin in twins] == [(0.1, 3, 2)] * 2


def stateful(workers: int) -> Any:
    torch.manual_seed(2)  # its sampler draws when it is made
    return StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers)


@combinations("live", mode=["live", "probe"])
def test_a_loader_with_a_state_of_its_own_is_given_a_number_before_it_runs(
    tmp_path: Path, decisions: dict[int, int], monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    asked = found(monkeypatch, NumWorkersResult(2, (Trial(1, 10.0, 0.1), Trial(2, 25.0, 0.0)), "consumer"))
    decisions.update({1: 3, 2: 3})
    plain = fit(tmp_path, Model(stateful(1)))
    source, counts = stateful(1), InTraining()
    finder = NumWorkersFinder(mode)
    assert fit(tmp_path, Model(source), finder, counts) == plain
    assert asked == [(0.0, None, pytest.approx(10, abs=0.5), 0.05, 1, False)]
    assert set(counts.counts) == {2}
    assert (source.num_workers, finder.optimal_num_workers) == (2, 2)


def test_a_loader_that_resumes_from_its_state_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, NumWorkersResult(2, (Trial(2, 25.0, 0.0),), "consumer"))
    options = {"enable_checkpointing": True, "max_epochs": 1}
    checkpoints = [ModelCheckpoint(tmp_path / name, every_n_train_steps=10, save_top_k=-1) for name in ("own", "ours")]
    fit(tmp_path, Model(stateful(1)), checkpoints[0], **options)
    fit(tmp_path, Model(stateful(1)), NumWorkersFinder(), checkpoints[1], **options)

    def resume(name: str, *callbacks: Callback, workers: int = 1) -> Any:
        model = Model(stateful(workers))
        trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=1, callbacks=list(callbacks))
        trainer.fit(model, ckpt_path=tmp_path / name / "epoch=0-step=10.ckpt")
        return model.batches

    finder = NumWorkersFinder()
    with caplog.at_level(logging.INFO):
        assert resume("own", finder) == resume("own")
    assert "leaves a StatefulDataLoader alone: the state it resumes from is valid only for" in caplog.text
    assert finder.optimal_num_workers == 1
    assert resume("ours", finder) == resume("ours", workers=2)
    assert finder.optimal_num_workers == 2


@pytest.mark.parametrize(
    ("limit", "kwargs"),
    few(
        "generator",
        {
            "generator": (15, {"shuffle": True, "generator": 5}),
            "drop_last": (None, {"shuffle": True, "drop_last": True}),
            "replacement": (15, {"sampler": "replacement"}),
        },
    ),
)
def test_a_loader_without_workers_gets_some_and_nothing_else_changes(
    tmp_path: Path, decisions: dict[int, int], kwargs: dict[str, Any], limit: int | None
) -> None:
    def source() -> DataLoader[Any]:
        given = {"batch_size": 2, **kwargs}
        if "generator" in given:
            given["generator"] = torch.Generator().manual_seed(5)
        if "sampler" in given:
            given["sampler"] = RandomSampler(Numbers(), replacement=True)
        return DataLoader(Numbers(), **given)

    class DrawsAtStart(Callback):
        """Draws from the state that shuffles, after the loader was iterated and before its first batch."""

        def on_train_start(self, *args: Any) -> None:
            torch.rand(3)

        on_train_epoch_start = on_train_start

    decisions.update({1: 3, 3: 2})
    options = {"max_epochs": 2, "limit_train_batches": limit}
    plain = fit(tmp_path, Model(source()), DrawsAtStart(), **options)
    tuned_source, finder, counts = source(), NumWorkersFinder(), InTraining()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not have many workers")
        tuned = fit(tmp_path, Model(tuned_source), DrawsAtStart(), finder, counts, **options)
    assert tuned == plain
    assert (counts.counts[0], counts.counts[-1]) == (1, 2)
    assert (tuned_source.num_workers, finder.optimal_num_workers) == (2, 2)
    assert str(finder.choices[0]).startswith("num_workers 0 → 2")


class Holds(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class Corrupted(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return super().__getitem__(index)


class Wrapped(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("mode", "what"),
    few(
        "file error cheap stateful wrapped",
        {
            "file": ("live", "file"),
            "error": ("probe", "error"),
            "cheap": ("live", "cheap"),
            "stateful": ("live", "stateful"),
            "wrapped": ("live", "wrapped"),
            "spawn": ("probe", "spawn"),
            "generator": ("probe", "generator"),
        },
    ),
)
def test_a_loader_that_workers_cannot_serve_stays_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, mode: Any
) -> None:
    (tmp_path / "data").write_bytes(b"")
    if what == "cheap":
        monkeypatch.setattr(without_workers, "receive_cost", lambda nbytes: (9.0, 9.0, 9.0))
    if what == "spawn":
        spawn = multiprocessing.get_context("spawn")
        monkeypatch.setattr(torch.multiprocessing, "get_context", lambda: spawn)
    datasets = {
        "file": lambda: Holds((tmp_path / "data").open("rb")),
        "generator": lambda: Holds(torch.Generator()),
        "error": Corrupted,
    }
    reasons = {
        "file": "its dataset holds dataset.held (BufferedReader",
        "generator": "its dataset holds a random generator, dataset.held (Generator)",
        "error": "a worker process fails: RuntimeError: Cannot re-initialize CUDA in forked subprocess",
        "cheap": "sooner than a worker process can transfer it",
        "stateful": "workers would change its shuffle order",
        "wrapped": "a Wrapped creates its own iterators",
        "spawn": "its workers would be started by 'spawn', which runs the program's script again",
    }

    kind, counts = Wrapped if what == "wrapped" else DataLoader, InTraining()
    plain = fit(tmp_path, Model(stateful(0))) if what == "stateful" else plain_fit(0)
    source = stateful(0) if what == "stateful" else kind(datasets.get(what, Numbers)(), batch_size=2, shuffle=True)
    finder = NumWorkersFinder(mode, step_time_s=None if mode == "live" else 0.1)
    with caplog.at_level(logging.INFO):
        assert fit(tmp_path, Model(source), finder, counts) == plain
    assert (source.num_workers, finder.optimal_num_workers, set(counts.counts)) == (0, 0, {0})
    assert " with num_workers=0 alone: " in caplog.text
    assert reasons[what] in caplog.text


class Augmented(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 0 * torch.rand(FEATURES)


def test_a_dataset_that_draws_from_the_global_random_state_is_told_of(
    tmp_path: Path, decisions: dict[int, int]
) -> None:
    plain, tuned = (Model(DataLoader(Augmented(), batch_size=2, shuffle=True)) for _ in range(2))
    fit(tmp_path, plain)
    with pytest.warns(UserWarning, match="draws from the global random state") as caught:
        fit(tmp_path, tuned, NumWorkersFinder())
    assert sum("draws from the global" in str(each.message) for each in caught) == 1
    assert tuned.batches[:20] == plain.batches[:20]
    assert tuned.batches[20:] != plain.batches[20:]


def test_a_length_that_cannot_be_read_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Numbers) -> int:
        raise OSError("the index is gone")

    model = Model(DataLoader(Numbers(), batch_size=2, sampler=range(40)))
    monkeypatch.setattr(Numbers, "__len__", fails)
    with pytest.warns(UserWarning, match="NumWorkersFinder leaves a loader alone: the index is gone"):
        fit(tmp_path, model, NumWorkersFinder("probe", step_time_s=0.1), max_epochs=1)
    assert len(model.batches) == 20


def test_workers_for_which_there_is_no_room_any_longer_go_at_once(
    tmp_path: Path, decisions: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = worker_limits.Cap(16, "max_num_workers")
    monkeypatch.setattr(running, "_FITS_FOR_S", 0.0)
    monkeypatch.setattr(RunningLoader, "cap", lambda self, keep=False, beside=False: room)
    decisions[1] = 4

    def grow(trainer: Any, batch_idx: int) -> None:
        nonlocal room
        if batch_idx == 10:
            room = worker_limits.Cap(2, "memory")

    finder, counts = NumWorkersFinder(), InTraining()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Model(loader()), finder, counts, AfterBatch(grow), max_epochs=1)
    assert counts.counts[8:13] == [4, 4, 4, 2, 2]
    assert "num_workers 4 → 2: there is no longer room for more workers, limited by memory" in caplog.text
    assert finder.choices[0].limited_by == "memory"


def test_an_lmdb_datamodule_gives_the_same_samples_and_resumes(tmp_path: Path, decisions: dict[int, int]) -> None:
    path = build(tmp_path / "data")

    def run(*callbacks: Callback, **kwargs: Any) -> Notes:
        model, datamodule = Notes(), LMDBDataModule(path, batch_size=4, num_workers=2, seed=3)
        options = {"max_steps": -1, "max_epochs": EPOCHS, "callbacks": list(callbacks), "enable_checkpointing": True}
        tiny_trainer(tmp_path, **options).fit(model, datamodule, **kwargs)
        return model

    plain = run(ModelCheckpoint(tmp_path / "plain"))
    decisions[2] = 3
    checkpoint = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=20, save_top_k=-1)
    finder = NumWorkersFinder()
    tuned = run(finder, checkpoint)
    assert tuned.steps == plain.steps
    assert finder.optimal_num_workers == 3
    again = NumWorkersFinder()
    resumed = run(again, ModelCheckpoint(tmp_path / "again"), ckpt_path=tmp_path / "kept/epoch=1-step=20.ckpt")
    assert resumed.steps == plain.steps[20:]
    assert again.optimal_num_workers == 3


def test_a_trainer_made_from_yaml_takes_it(tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer", skip={"plugins", "strategy", "profiler"})
    config = tmp_path / "config.yaml"
    config.write_text(
        "callbacks:\n- class_path: lightning_gpuopt.NumWorkersFinder\n  init_args: {mode: off, max_num_workers: 4}\n"
    )
    trainer = parser.instantiate_classes(parser.parse_args([f"--trainer={config}", "--trainer.logger=false"])).trainer
    (finder,) = [each for each in trainer.callbacks if isinstance(each, NumWorkersFinder)]
    assert (finder.mode, finder.max_num_workers) == ("off", 4)


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "ended"), [("raises", [0, 1]), ("killed 0", [1]), ("killed 1", [0])])
def test_a_rank_that_fails_leaves_no_worker_and_holds_up_nobody(how: str, ended: list[int]) -> None:
    ranks = run_ranks("tests.callbacks.tuned_rank:fail", 2, may_fail=True, how=how)
    assert [index for index, rank in enumerate(ranks) if rank is not None] == ended
    assert all(rank["num_workers"] == [2, 4][index] for index, rank in enumerate(ranks) if rank is not None)
    if how == "raises":
        assert ranks[1]["ended"] == "OSError"


@pytest.mark.timed
def test_the_ranks_of_a_node_probe_together_and_agree() -> None:
    ranks = run_ranks("tests.callbacks.tuned_rank:probe", 2)
    assert [rank["num_workers"] for rank in ranks] == [3, 3]  # what rank 1 needs
    assert {1, 3} <= set(ranks[1]["tried"])


def test_where_no_worker_can_be_started_a_loader_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(process: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    source, finder = DataLoader(Numbers(), batch_size=2, shuffle=True), NumWorkersFinder()
    monkeypatch.setattr(loader_module, "check_workers", lambda *args, **kwargs: without_workers.WorkersCheck())
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", fails)
        assert fit(tmp_path, Model(source), finder) == plain_fit(0)
    assert (source.num_workers, finder.optimal_num_workers) == (0, 0)

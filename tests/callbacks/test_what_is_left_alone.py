"""What workers would do to the samples of ordinary set-ups, with NumWorkersFinder and AutoFix: real fits."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt import CudaPrefetcher, NumWorkersFinder, find_num_workers
from lightning_gpuopt.measurements.loader_model import most_workers
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning import tuned_loader as loader_module
from lightning_gpuopt.tuning import without_workers
from lightning_gpuopt.tuning.caps import Cap
from lightning_gpuopt.tuning.live import LivePolicy, LoaderStats
from lightning_gpuopt.tuning.running import RunningLoader
from lightning_gpuopt.tuning.workers import Trial
from tests.callbacks.auto_fix_runs import Model, Numbers, Run, finding, script, train
from tests.helpers import tiny_trainer
from tests.lanes import combinations, few

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MORE = {0: 4, 1: 4, 2: 5}
"""What the policy wants, by the workers that there are."""


@pytest.fixture(autouse=True)
def _wants_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy wants more workers from the first window on; taking a batch from a worker costs nothing."""
    monkeypatch.setattr(without_workers, "receive_cost", lambda nbytes: (0.0, 0.0, 0.0))

    def decide(self: LivePolicy, seen: LoaderStats, cap: Cap) -> int:
        self._trials[self.num_workers] = Trial(self.num_workers, 10.0 * max(self.num_workers, 1), 0.0)
        wanted = MORE.get(self.num_workers, self.num_workers)
        if wanted == self.num_workers:
            self._settle(seen)
        else:
            self._change(wanted, seen)
        self.skip, self.window = 0, 2
        return wanted

    real = LivePolicy.__init__

    def init(self: LivePolicy, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.skip, self.window = 0, 2

    monkeypatch.setattr(LivePolicy, "decide", decide)
    monkeypatch.setattr(LivePolicy, "__init__", init)
    monkeypatch.setattr(RunningLoader, "_pays_now", lambda self, num_workers: True)


class Fit:
    """A training with NumWorkersFinder; what it saw, and what was said."""

    def __init__(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        loader: Any,
        *callbacks: Callback,
        finder: NumWorkersFinder | None = None,
        **trainer: Any,
    ) -> None:
        self.finder = finder or NumWorkersFinder()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            self.model, self.trainer = train(tmp_path, loader, [self.finder, *callbacks], **trainer)
        self.said = [each for record in caplog.records if "NumWorkersFinder" in (each := record.getMessage())]
        self.num_workers = loader.num_workers


def plain(tmp_path: Path, loader: Any, *callbacks: Callback, **trainer: Any) -> list[float]:
    return train(tmp_path, loader, list(callbacks), **trainer)[0].seen


class Values(Dataset[torch.Tensor]):
    """Sample ``i`` is ``[i + extra, 0]``."""

    def __init__(self, length: int = 60) -> None:
        self.length, self.extra = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index + self.extra), 0.0])


def loader(dataset: Any = None, workers: int = 1, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Values(), **{"batch_size": 2, "num_workers": workers, "shuffle": True, **kwargs})


class OpenFile(Values):
    """Reads each sample at its place in a file that is open."""

    def __init__(self, path: Path, length: int = 400) -> None:
        super().__init__(length)
        path.write_bytes(np.arange(length, dtype=np.float32).tobytes())
        self.file: Any = path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(4 * index)
        time.sleep(0)
        return torch.tensor([float(np.frombuffer(self.file.read(4), np.float32)[0]), 0.0])


class Hdf5(Values):
    """The usual way: opened where the dataset is made."""

    def __init__(self, path: Path, length: int = 60) -> None:
        super().__init__(length)
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(length, dtype=np.float32)
        self.x = h5py.File(path)["x"]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.x[index]), 0.0])


class TestOpenFiles:
    @pytest.mark.parametrize("kind", [OpenFile, Hdf5])
    def test_one_worker_s_file_is_not_shared(self, tmp_path, caplog, kind):
        fit = Fit(tmp_path, caplog, loader(kind(tmp_path / "data", 60)), max_epochs=1)
        assert sorted(fit.model.seen) == [float(index) for index in range(len(fit.model.seen))]
        assert fit.num_workers == 1
        assert len(fit.said) == 1
        assert "its dataset holds dataset." in fit.said[0]
        assert "forked processes would share" in fit.said[0]
        assert "Open it in the worker" in fit.said[0]

    def test_a_file_that_is_opened_while_two_workers_run_is_not_shared_with_more(self, tmp_path, caplog):
        class Late(OpenFile):
            def __init__(self, path: Path) -> None:
                super().__init__(path, 60)
                self.path = path
                self.file.close()
                self.file = None

            def __getitem__(self, index: int) -> torch.Tensor:
                if self.file is None:
                    self.file = self.path.open("rb", buffering=0)
                return super().__getitem__(index)

        class LooksAtOne(Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                trainer.train_dataloader.dataset[0]

        with pytest.warns(UserWarning, match=r"num_workers stays 2: its dataset holds dataset.file \(FileIO"):
            fit = Fit(tmp_path, caplog, loader(Late(tmp_path / "data"), workers=2), LooksAtOne(), max_epochs=1)
        assert sorted(fit.model.seen) == [float(index) for index in range(60)]
        assert fit.num_workers == 2

    def test_find_num_workers_advises_none(self, tmp_path):
        with pytest.raises(ValueError, match=r"expected a dataset that workers can share, but its dataset holds"):
            find_num_workers(loader(OpenFile(tmp_path / "data")))
        with pytest.warns(UserWarning, match=r"the workers share dataset.file"):
            find_num_workers(loader(OpenFile(tmp_path / "data"), workers=2), max_seconds=1.0, max_num_workers=1)


class Changes(Callback):
    """Changes the dataset, as a curriculum does."""

    def __init__(self, when: str, every: int = 1) -> None:
        self.when, self.every = when, every

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "epoch":
            trainer.train_dataloader.dataset.extra = 1000 * (trainer.current_epoch + 1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when == "step" and (batch_idx + 1) % self.every == 0:
            trainer.train_dataloader.dataset.extra += 1000


class TestChangedDatasets:
    def test_no_worker_comes_to_those_that_have_the_old_one(self, tmp_path, caplog):
        expected = plain(tmp_path, loader(workers=2), Changes("epoch"))
        with pytest.warns(UserWarning, match=r"cannot change workers that run: its dataset may have changed since"):
            fit = Fit(tmp_path, caplog, loader(workers=2), Changes("epoch"))
        assert fit.model.seen == expected
        assert fit.num_workers == 5  # from the second epoch on, whose workers have all the same

    def test_workers_that_persist_keep_what_they_have(self, tmp_path, caplog):
        kwargs = {"workers": 2, "persistent_workers": True}
        expected = plain(tmp_path, loader(**kwargs), Changes("epoch"))
        with pytest.warns(UserWarning, match="num_workers stays 2: its dataset may have changed since its"):
            fit = Fit(tmp_path, caplog, loader(**kwargs), Changes("epoch"))
        assert fit.model.seen == expected
        assert fit.num_workers == 2

    @combinations("1-True 29-True", every=[1, 7, 29], shuffle=[False, True])
    def test_of_no_workers_each_batch_is_as_the_dataset_is_then(self, tmp_path, caplog, every, shuffle):
        def made() -> DataLoader[Any]:
            return loader(workers=0, shuffle=shuffle)

        expected = plain(tmp_path, made(), Changes("step", every))
        fit = Fit(tmp_path, caplog, made(), Changes("step", every))
        assert fit.model.seen == expected
        assert fit.num_workers == 0
        assert [each for each in fit.said if "its dataset was changed while training ran" in each]
        assert not multiprocessing.active_children()

    def test_a_look_at_a_batch_makes_no_workers_newer_than_they_are(self, tmp_path, caplog):
        class ChangesAndPeeks(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, o: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 0:
                    trainer.train_dataloader.dataset.extra += 1000
                    next(iter(trainer.train_dataloader))

        expected = plain(tmp_path, loader(), ChangesAndPeeks())
        with pytest.warns(UserWarning, match="its dataset may have changed since they were started"):
            fit = Fit(tmp_path, caplog, loader(), ChangesAndPeeks())
        assert fit.model.seen == expected

    @pytest.mark.matrix
    def test_each_loader_of_a_reload_is_looked_at(self, tmp_path, caplog):
        class Reloading(Model):
            def train_dataloader(self) -> DataLoader[Any]:
                own = {"sampler": Follows()} if self.trainer.current_epoch else {}
                return loader(shuffle=False, **own)

        def run(*callbacks: Callback) -> list[float]:
            seed_everything(3, verbose=False)
            model = Reloading()
            options = {"max_steps": -1, "max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
            tiny_trainer(tmp_path, callbacks=[*callbacks, IsFollowed()], **options).fit(model)
            return model.seen

        expected = run()
        with pytest.warns(UserWarning, match="num_workers stays 1: .* reads what changes while training runs"):
            assert run(NumWorkersFinder()) == expected

    @pytest.mark.matrix
    def test_of_no_workers_beside_a_prefetcher(self, tmp_path, caplog):
        def made() -> DataLoader[Any]:
            return loader(workers=0)

        expected = plain(tmp_path, made(), Changes("step", 7))
        prefetcher = CudaPrefetcher(enabled=True)
        fit = Fit(tmp_path, caplog, made(), Changes("step", 7), prefetcher)
        assert fit.model.seen == expected
        assert prefetcher.stats["staged"] == 0

    def test_of_no_workers_with_autofix(self, tmp_path):
        def made() -> DataLoader[Any]:
            return loader(workers=0)

        late = Changes("step", 29)
        run = Run(tmp_path, script([finding(num_workers=2)]), made(), callbacks=(late,), max_epochs=3)
        expected = plain(tmp_path, made(), Changes("step", 29), max_epochs=3)
        assert run.model.seen == expected
        assert run.loader.num_workers == 0
        assert run.left == []


class Cached(Values):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            time.sleep(0.002)
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Counts(Values):
    """A sample's value depends on how many were read before it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.extra += 1000
        return super().__getitem__(index)


class PartsAreKept(Values):
    """Keeps what is quickly made again, and takes long for what it does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = [None] * self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.parts[index] is None:
            self.parts[index] = super().__getitem__(index)
        time.sleep(0.002)
        return self.parts[index]


class OpensLazily(Values):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.file, self.tokens = path, None, None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file, self.tokens = self.path.open("rb"), {"a": 0}
        return super().__getitem__(index)


class TestCaches:
    @pytest.mark.timed
    def test_a_dataset_that_keeps_its_samples_stays_without_workers(self, tmp_path, caplog):
        fit = Fit(tmp_path, caplog, loader(Cached(), workers=0))
        assert (fit.num_workers, len(fit.said)) == (0, 1)
        assert "its dataset changes as it is read, as one that keeps its samples" in fit.said[0]

    def test_what_changes_with_each_read_keeps_its_workers(self, tmp_path, caplog):
        expected = plain(tmp_path, loader(Counts(), workers=1))
        fit = Fit(tmp_path, caplog, loader(Counts(), workers=1))
        assert (fit.num_workers, fit.model.seen) == (1, expected)
        assert "a loader with num_workers=1 alone: its dataset changes as it is read" in fit.said[0]

    @pytest.mark.parametrize("kind", [pytest.param("parts", marks=pytest.mark.timed), "lazy"])
    def test_what_is_opened_once_or_quickly_made_again_is_served(self, tmp_path, caplog, kind):
        (tmp_path / "file").write_bytes(b"0")
        dataset = {"parts": PartsAreKept, "lazy": lambda: OpensLazily(tmp_path / "file")}[kind]()
        assert Fit(tmp_path, caplog, loader(dataset, workers=0)).num_workers == 4

    def test_the_gain_is_told_against_the_users_own_setting(self):
        trials = (Trial(1, 100.0, 0.005), Trial(4, 150.0, 0.0))
        choice = loader_module.WorkersChoice(4, True, 0, trials, "consumer", None, making_s=0.002)
        # without workers a step takes 1/150 s and 2 ms
        assert str(choice) == "num_workers 0 → 4: 1.3× faster input, limited by consumer"
        assert "faster" not in str(loader_module.WorkersChoice(4, True, 0, trials, "consumer"))
        assert "1.5× faster" in str(loader_module.WorkersChoice(4, True, 1, trials, "consumer"))
        assert "faster" not in str(loader_module.WorkersChoice(4, True, 2, trials, "consumer"))


class PerIndex(Sampler[int]):
    def __init__(self, draw: str) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        for _ in range(60):
            yield random.randrange(60) if self.draw == "python" else int(torch.randint(60, ()))

    def __len__(self) -> int:
        return 60


class Follows(Sampler[int]):
    """Gives other samples after each step, as hard example mining does."""

    steps = 0

    def __iter__(self) -> Iterator[int]:
        return ((number + self.steps) % 60 for number in range(60))

    def __len__(self) -> int:
        return 60


class IsFollowed(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.train_dataloader.sampler.steps = trainer.global_step


class DrawsInTheStep(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        random.random()


class TestSamplers:
    @combinations("0-torch 1-python", workers=[0, 1, 2], draw=["torch", "python"])
    def test_one_that_draws_per_index_is_left_alone(self, tmp_path, caplog, workers, draw):
        def made() -> DataLoader[Any]:
            return loader(workers=workers, shuffle=False, sampler=PerIndex(draw))

        expected = plain(tmp_path, made(), DrawsInTheStep())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit = Fit(tmp_path, caplog, made(), DrawsInTheStep())
        assert fit.model.seen == expected
        assert fit.num_workers == workers
        assert any("draws random numbers for each index" in str(each.message) for each in said)


NO_GUARD = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from lightning.pytorch import Trainer
from lightning_gpuopt import AutoFix, NumWorkersFinder
from tests.helpers import TinyModel, FEATURES
with open(sys.argv[1], "a") as file:
    file.write("ran\\n")
torch.multiprocessing.set_start_method(sys.argv[2], force=True)
class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((FEATURES,), float(index))
loader = DataLoader(Numbers(), batch_size=2)
for callback in (NumWorkersFinder(), NumWorkersFinder(mode="probe", max_seconds=2.0), AutoFix()):
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[3])
    trainer.fit(TinyModel(), loader)
print("workers", loader.num_workers)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_where_processes_are_not_forked_a_script_without_a_guard_runs_once(tmp_path, method):
    (tmp_path / "script.py").write_text(NO_GUARD)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "runs"), method, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "workers 0"
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert "would be started by" in done.stderr


class Peeks(Callback):
    """Looks at a batch in the middle of each epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            next(iter(trainer.train_dataloader))


RESTARTS = finding("epoch_restart", None, persistent_workers=True)


class TestKeptWorkers:
    @pytest.mark.matrix
    def test_they_serve_the_training_loop_alone(self, tmp_path):
        detector = script([RESTARTS], before=60)
        run = Run(tmp_path, detector, loader(Values(40)), callbacks=(Peeks(),), max_epochs=5)
        assert run.changes[0][:3] == ("persistent_workers", False, True)
        epochs = [sorted(run.model.seen[start : start + 40]) for start in range(0, 200, 40)]
        assert epochs == [[float(index) for index in range(40)]] * 5
        assert run.model.seen == plain(tmp_path, loader(Values(40)), Peeks(), max_epochs=5)
        assert run.left == []


class Forgets(Values):
    def __getstate__(self) -> Any:
        return None


class Refuses(Values):
    def __getstate__(self) -> Any:
        raise TypeError("not to be pickled")


class Partly(Values):
    def __getstate__(self) -> Any:
        return {"length": self.length}


@combinations(
    "Refuses-1-more",
    kind={"Forgets": Forgets, "Refuses": Refuses, "Partly": Partly},
    workers=[0, 1],
    settings={"more": {"num_workers": 3}, "kept": {"persistent_workers": True}},
)
def test_a_getstate_of_any_kind_ends_no_training(tmp_path, caplog, kind, workers, settings):
    cause = "epoch_restart" if "persistent_workers" in settings else "slow_transform"
    run = Run(tmp_path, script([finding(cause, **settings)], before=25), loader(kind(40), workers), max_epochs=5)
    expected = plain(tmp_path, loader(kind(40), workers), max_epochs=5)
    assert run.model.seen == expected
    fit = Fit(tmp_path, caplog, loader(kind(40), workers), max_epochs=5)
    assert fit.model.seen == expected


class TestCheckpoints:
    def choice(self, number: int) -> dict[str, Any]:
        return {"num_workers": number, "before": 1, "settled": True, "limited_by": "consumer", "prefetch_factor": None}

    def test_a_choice_that_does_not_fit_here_is_clipped_and_measured_again(self, tmp_path, caplog):
        most, finder, before = most_workers(usable_cpus()), NumWorkersFinder(), []

        class Restores(Callback):
            def on_fit_start(self, *args: Any) -> None:
                finder.load_state_dict({"loaders": {0: TestCheckpoints().choice(most + 8)}})

            def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
                before.append(trainer.train_dataloader.num_workers)

        fit = Fit(tmp_path, caplog, loader(), Restores(), finder=finder, max_epochs=1)
        assert before[0] == most
        assert f"the checkpoint has num_workers={most + 8}, and there is room for {most} here" in fit.said[0]
        assert {trial.num_workers for trial in finder.trials} == {most}  # measured here

    def test_a_loader_with_a_state_gets_the_number_that_its_state_needs(self, tmp_path, caplog):
        most, finder = most_workers(usable_cpus()), NumWorkersFinder()

        class Restores(Callback):
            def on_fit_start(self, *args: Any) -> None:
                finder.load_state_dict({"loaders": {0: TestCheckpoints().choice(most + 1)}})

        source = StatefulDataLoader(Values(40), batch_size=2, num_workers=1)
        fit = Fit(tmp_path, caplog, source, Restores(), finder=finder, max_epochs=1)
        assert fit.num_workers == most + 1
        assert f"num_workers={most + 1} is kept, though there is room for {most} here" in fit.said[0]


class Augmented(Values):
    def __init__(self, held: Any = None, draws: bool = True) -> None:
        super().__init__()
        self.held, self.draws = held, draws

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if self.draws and get_worker_info() is not None:
            sample[1] = torch.rand(())
        return sample


class TestRandomNumbers:
    @pytest.mark.parametrize("draws", [pytest.param(False, marks=pytest.mark.matrix), True])
    def test_a_draw_in_the_workers_is_said_with_the_change(self, tmp_path, caplog, draws):
        fit = Fit(tmp_path, caplog, loader(Augmented(draws=draws)))
        assert fit.num_workers == 4
        assert [each for each in fit.said if "random numbers are drawn in the workers" in each] == fit.said[1:2] * draws

    @pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
    def test_a_generator_that_the_dataset_holds_stays_with_the_one_that_draws(self, tmp_path, caplog, workers):
        fit = Fit(tmp_path, caplog, loader(Augmented(np.random.default_rng(0)), workers))
        assert fit.num_workers == workers
        assert "its dataset holds a random generator, dataset.held (Generator)" in fit.said[0]

    @pytest.mark.matrix
    def test_autofix_says_it_as_well(self, tmp_path):
        run = Run(tmp_path, script([finding(num_workers=3)]), loader(Augmented()))
        assert run.changes == [("num_workers", 1, 3, True)]
        assert "random numbers are drawn in the workers" in run.why[0]


class TestExact:
    """With ``exact=True`` workers stay as they are where they were not shown to draw no random numbers."""

    @pytest.mark.parametrize(
        ("made", "workers", "why"),
        few(
            "draws draws-from-0",
            {
                "draws": (lambda: loader(Augmented()), 1, "its workers draw random numbers (exact=True)"),
                "draws-nothing": (lambda: loader(Augmented(draws=False)), 4, None),
                "draws-from-0": (
                    lambda: loader(Augmented(), 0),
                    0,
                    "its workers must not draw random numbers, and one was seen to",
                ),
                "draws-nothing-from-0": (lambda: loader(Augmented(draws=False), 0), 4, None),
                "generator": (
                    lambda: loader(Augmented(np.random.default_rng(0)), 2, worker_init_fn=print),
                    2,
                    "its dataset holds a random generator, dataset.held (Generator) (exact=True)",
                ),
                "not-forked": (
                    lambda: loader(multiprocessing_context="forkserver"),
                    1,
                    "started by 'forkserver': what they draw cannot be",
                ),
            },
        ),
    )
    def test_the_finder(self, tmp_path, caplog, made, workers, why):
        fit = Fit(tmp_path, caplog, made(), finder=NumWorkersFinder(exact=True))
        assert fit.num_workers == workers
        assert why is None or why in fit.said[0]
        assert not [each for each in fit.said if "random numbers are drawn" in each]

    def test_autofix(self, tmp_path):
        run = Run(tmp_path, script([finding(num_workers=3)]), loader(Augmented(draws=False)), exact=True)
        assert run.changes == [("num_workers", 1, 3, True)]


class TestSpawnedWorkers:
    @pytest.mark.matrix
    def test_no_more_are_started_for_each_epoch_than_save_what_that_takes(self, tmp_path, caplog):
        source = loader(Numbers(40), multiprocessing_context="spawn")
        with pytest.warns(UserWarning, match="num_workers stays 1: starting 4 for every epoch would take longer than"):
            fit = Fit(tmp_path, caplog, source, max_epochs=1)
        assert fit.num_workers == 1
        kept = loader(Numbers(40), multiprocessing_context="spawn", persistent_workers=True)
        assert Fit(tmp_path, caplog, kept, max_epochs=1).num_workers == 4  # from the next epoch on

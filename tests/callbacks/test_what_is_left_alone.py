"""What workers would do to the samples of ordinary set-ups, with NumWorkersFinder and AutoFix: real fits."""

from __future__ import annotations

import logging
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt import CudaPrefetcher, NumWorkersFinder, find_num_workers
from lightning_gpuopt.measurements.loader_model import most_workers
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.search_result import Trial, WorkersChoice
from tests.callbacks import auto_fix_runs
from tests.callbacks.auto_fix_runs import Numbers, Run, finding, script, train
from tests.helpers import AfterBatch
from tests.lanes import few

pytestmark = [
    pytest.mark.usefixtures("wants_more"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


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


def loader(dataset: Any = None, workers: int = 1, **kwargs: Any) -> DataLoader[Any]:
    return auto_fix_runs.loader(dataset or Numbers(60), num_workers=workers, **kwargs)


class OpenFile(Numbers):
    """Reads each sample at its place in a file that is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(60)
        path.write_bytes(np.arange(60, dtype=np.float32).tobytes())
        self.file: Any = path.open("rb", buffering=0)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(4 * index)
        time.sleep(0)
        return torch.tensor([float(np.frombuffer(self.file.read(4), np.float32)[0]), 0.0])


class TestOpenFiles:
    def test_one_worker_s_file_is_not_shared(self, tmp_path, caplog):
        fit = Fit(tmp_path, caplog, loader(OpenFile(tmp_path / "data")), max_epochs=1)
        assert sorted(fit.model.seen) == [float(index) for index in range(60)]
        assert fit.num_workers == 1
        assert len(fit.said) == 1
        assert "its dataset holds dataset.file (FileIO" in fit.said[0]
        assert "forked processes would share" in fit.said[0]
        assert "Open it in the worker" in fit.said[0]

    def test_a_file_that_is_opened_while_two_workers_run_is_not_shared_with_more(self, tmp_path, caplog):
        class Late(OpenFile):
            def __init__(self, path: Path) -> None:
                super().__init__(path)
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


class TestChangedDatasets:
    @pytest.mark.parametrize("prefetches", [False, True])
    def test_of_no_workers_each_batch_is_as_the_dataset_is_then(self, tmp_path, caplog, prefetches):
        def change(trainer: Any, batch_idx: int) -> None:
            if batch_idx % 29 == 28:
                trainer.train_dataloader.dataset.extra += 1000

        expected = plain(tmp_path, loader(workers=0), AfterBatch(change), max_epochs=2)
        prefetcher = CudaPrefetcher(enabled=prefetches)
        fit = Fit(tmp_path, caplog, loader(workers=0), AfterBatch(change), prefetcher, max_epochs=2)
        assert fit.model.seen == expected
        assert fit.num_workers == 0
        assert [each for each in fit.said if "its dataset was changed while training ran" in each]
        assert not multiprocessing.active_children()
        assert not prefetches or prefetcher.stats["staged"] == 0

    def test_a_look_at_a_batch_makes_no_workers_newer_than_they_are(self, tmp_path, caplog):
        def change(trainer: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.train_dataloader.dataset.extra += 1000
                next(iter(trainer.train_dataloader))

        expected = plain(tmp_path, loader(), AfterBatch(change), max_epochs=2)
        with pytest.warns(UserWarning, match="its dataset may have changed since they started"):
            fit = Fit(tmp_path, caplog, loader(), AfterBatch(change), max_epochs=2)
        assert fit.model.seen == expected


class Cached(Numbers):
    def __init__(self) -> None:
        super().__init__(60, takes_s=0.002)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Counts(Numbers):
    """A sample's value depends on how many were read before it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.extra += 1000
        return super().__getitem__(index)


class TestCaches:
    @pytest.mark.timed
    def test_a_dataset_that_keeps_its_samples_stays_without_workers(self, tmp_path, caplog):
        fit = Fit(tmp_path, caplog, loader(Cached(), workers=0))
        assert (fit.num_workers, len(fit.said)) == (0, 1)
        assert "its dataset changes as it is read, as a sample cache does" in fit.said[0]

    def test_what_changes_with_each_read_keeps_its_workers(self, tmp_path, caplog):
        expected = plain(tmp_path, loader(Counts(), workers=1), max_epochs=2)
        fit = Fit(tmp_path, caplog, loader(Counts(), workers=1), max_epochs=2)
        assert (fit.num_workers, fit.model.seen) == (1, expected)
        assert "a loader with num_workers=1 alone: its dataset changes as it is read" in fit.said[0]

    def test_the_gain_is_told_against_the_users_own_setting(self):
        trials = (Trial(1, 100.0, 0.005), Trial(4, 150.0, 0.0))
        choice = WorkersChoice(4, True, 0, trials, "consumer", None, making_s=0.002)
        # without workers a step takes 1/150 s and 2 ms
        assert str(choice) == "num_workers 0 → 4: 1.3× faster input, limited by consumer"
        assert "faster" not in str(WorkersChoice(4, True, 0, trials, "consumer"))
        assert "1.5× faster" in str(WorkersChoice(4, True, 1, trials, "consumer"))
        assert "faster" not in str(WorkersChoice(4, True, 2, trials, "consumer"))


class Restores(Callback):
    """Loads a choice of so many workers as from a checkpoint; notes those of each step."""

    def __init__(self, finder: NumWorkersFinder, number: int) -> None:
        self.finder, self.number, self.seen = finder, number, list[int]()

    def on_fit_start(self, *args: Any) -> None:
        self.finder.load_state_dict({"loaders": {0: {"num_workers": self.number, "before": 1, "settled": True}}})

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.train_dataloader.num_workers)


class TestCheckpoints:
    MOST = most_workers(usable_cpus())

    def test_a_choice_that_does_not_fit_here_is_clipped_and_measured_again(self, tmp_path, caplog):
        finder = NumWorkersFinder()
        restores = Restores(finder, self.MOST + 8)
        fit = Fit(tmp_path, caplog, loader(), restores, finder=finder, max_epochs=1)
        assert restores.seen[0] == self.MOST
        assert f"the checkpoint has num_workers={self.MOST + 8}, but there is room for {self.MOST} here" in fit.said[0]
        assert {trial.num_workers for trial in finder.trials} == {self.MOST}  # measured here

    def test_a_loader_with_a_state_gets_the_number_that_its_state_needs(self, tmp_path, caplog):
        finder = NumWorkersFinder()
        source = StatefulDataLoader(Numbers(40), batch_size=2, num_workers=1)
        fit = Fit(tmp_path, caplog, source, Restores(finder, self.MOST + 1), finder=finder, max_epochs=1)
        assert fit.num_workers == self.MOST + 1
        assert f"num_workers={self.MOST + 1} is kept, although there is room for {self.MOST} here" in fit.said[0]


class Augmented(Numbers):
    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if self.draws and get_worker_info() is not None:
            sample[1] = torch.rand(())
        return sample


class TestRandomNumbers:
    def test_a_draw_in_the_workers_is_said_with_the_change(self, tmp_path, caplog):
        fit = Fit(tmp_path, caplog, loader(Augmented()), max_epochs=2)
        assert fit.num_workers == 3
        assert [each for each in fit.said if "random numbers are drawn in the workers" in each] == fit.said[1:2]
        assert fit.said[1:2]


class TestExact:
    """With ``exact=True`` workers stay as they are where they were not shown to draw no random numbers."""

    @pytest.mark.parametrize(
        ("draws", "workers", "after", "why"),
        few(
            "draws draws-from-0",
            {
                "draws": (True, 1, 1, "its workers draw random numbers (exact=True)"),
                "draws-nothing": (False, 1, 3, ""),
                "draws-from-0": (True, 0, 0, "its workers must not draw random numbers, and one did"),
                "draws-nothing-from-0": (False, 0, 3, ""),
            },
        ),
    )
    def test_the_finder(self, tmp_path, caplog, draws, workers, after, why):
        fit = Fit(
            tmp_path, caplog, loader(Augmented(draws), workers), finder=NumWorkersFinder(exact=True), max_epochs=2
        )
        assert fit.num_workers == after
        assert why in fit.said[0]
        assert not [each for each in fit.said if "random numbers are drawn" in each]

    def test_autofix(self, tmp_path):
        run = Run(tmp_path, script([finding(num_workers=3)]), loader(Augmented(draws=False)), exact=True, max_epochs=1)
        assert run.changes == [("num_workers", 1, 3, True)]

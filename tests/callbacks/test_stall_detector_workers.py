"""StallDetector over loaders with real workers: they are timed, and nothing about the batches changes."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector, StallReport
from tests.callbacks.stalls import FAST, OF_WORKERS, STEPS, Broken, Model, Raiser, SleepyData, run
from tests.helpers import FEATURES, TinyModel, tiny_trainer, wait_for


def evidence_of_the_workers(report: StallReport) -> dict[str, Any]:
    (finding,) = [each for each in report.findings if each.cause in OF_WORKERS]
    return finding.evidence


class Starting(DataLoader[Any]):
    """Its workers take a third of a second to start."""

    def __iter__(self) -> Any:
        if self._iterator is None:
            time.sleep(0.3)
        return super().__iter__()


class StartingModel(Model):
    def train_dataloader(self) -> DataLoader[Any]:
        return Starting(**self.loader)


@pytest.mark.usefixtures("simulated_time")
class TestEpochs:
    def test_workers_started_for_every_epoch(self, tmp_path: Path) -> None:
        model = StartingModel(step_s=0.02, dataset=SleepyData(length=8), num_workers=2)
        report = run(tmp_path, model, max_steps=24)
        assert report.verdict == "epoch_restart"
        assert report.findings[0].settings == {"persistent_workers": True}
        # four steps an epoch
        assert report.findings[0].share == pytest.approx(0.3 / (0.3 + 4 * 0.02), abs=0.02)

    def test_persistent_workers_do_not_restart(self, tmp_path: Path) -> None:
        model = StartingModel(step_s=0.02, dataset=SleepyData(length=8), num_workers=2, persistent_workers=True)
        assert run(tmp_path, model, max_steps=24).verdict == "compute_bound"

    @pytest.mark.parametrize("persistent", [False, True])
    def test_workers_started_for_every_validation(self, tmp_path: Path, persistent: bool) -> None:
        class Validates(Model):
            def val_dataloader(self) -> DataLoader[Any]:
                data = SleepyData(length=4)
                return Starting(data, batch_size=2, num_workers=1, persistent_workers=persistent)

        model = Validates(step_s=0.02, dataset=SleepyData(length=8))
        report = run(tmp_path, model, max_steps=24, limit_val_batches=1.0)
        if persistent:
            assert [each.cause for each in report.findings if each.cause == "epoch_restart"] == []
            return
        finding = report.findings[0]
        assert (finding.cause, finding.evidence["loader"]) == ("epoch_restart", "validation")
        assert finding.settings == {"persistent_workers": True}
        evidence = {key: float(value) for key, value in finding.evidence.items() if key.endswith("_s_per_validation")}
        assert sum(evidence.values()) == pytest.approx(0.3, abs=0.002)

    def test_workers_of_the_last_epoch_end_before_the_next_begins(self, tmp_path: Path) -> None:
        counts = []

        class Count(Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 0:
                    counts.append(len(multiprocessing.active_children()))

        model = Model(dataset=SleepyData(length=8), num_workers=2)
        run(tmp_path, model, Count(), max_steps=16)
        assert counts == [2, 2, 2, 2]


@pytest.mark.timed
class TestWhatWorkersDo:
    """What sleeps is no CPU time, however busy the machine is."""

    def test_the_time_of_workers_that_wait_is_taken_apart(self, tmp_path: Path) -> None:
        data = SleepyData(sleep_s=0.01, length=400)
        report = run(tmp_path, Model(dataset=data, num_workers=1), max_steps=STEPS)
        evidence = evidence_of_the_workers(report)
        assert evidence["num_workers"] == 1
        assert evidence["dataset_ms_per_batch"] - evidence["dataset_cpu_ms_per_batch"] >= 20.0
        assert evidence["batch_mib"] == pytest.approx(2 * FEATURES * 4 / 2**20, abs=1e-3)
        assert {"worker_cpu_percent", "workers_busy_percent", "queue_depth"} <= evidence.keys()

    def test_the_time_of_workers_that_compute_is_the_cpus(self, tmp_path: Path) -> None:
        data = SleepyData(spin_s=0.01, length=400)
        report = run(tmp_path, Model(dataset=data, num_workers=1), max_steps=STEPS)
        evidence = evidence_of_the_workers(report)
        assert evidence["dataset_ms_per_batch"] >= evidence["dataset_cpu_ms_per_batch"] >= 20.0

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_workers_that_are_started_anew(self, tmp_path: Path, method: str) -> None:
        data = SleepyData(sleep_s=0.01, length=200)
        model = Model(dataset=data, num_workers=1, multiprocessing_context=method)
        evidence = evidence_of_the_workers(run(tmp_path, model, max_steps=STEPS))
        assert evidence["dataset_ms_per_batch"] - evidence["dataset_cpu_ms_per_batch"] >= 20.0

    @pytest.mark.parametrize("slow_first", [True, False], ids=["slow-first", "slow-last"])
    def test_of_several_loaders_the_narrow_one_is_told(self, tmp_path: Path, slow_first: bool) -> None:
        class Two(Model):
            def train_dataloader(self) -> Any:
                slow = DataLoader(SleepyData(sleep_s=0.02, length=200), batch_size=2, num_workers=1)
                fast = DataLoader(SleepyData(length=200), batch_size=2, num_workers=1)
                return [slow, fast] if slow_first else [fast, slow]

            def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
                return self.layer(batch[0][0] + batch[1][0]).pow(2).mean()

        evidence = evidence_of_the_workers(run(tmp_path, Two()))
        assert evidence["dataset_ms_per_batch"] - evidence["dataset_cpu_ms_per_batch"] >= 40.0
        assert evidence["num_workers"] == 1


class TestAdvice:
    def test_workers_that_would_share_an_open_file_are_not_advised(self, tmp_path: Path) -> None:
        dataset: Any = SleepyData(length=200, sleep_s=0.01)
        with Path(__file__).open("rb", buffering=0) as dataset.file:
            report = run(tmp_path, Model(dataset=dataset, num_workers=0), max_steps=STEPS)
        (finding,) = report.findings
        assert (finding.cause, finding.settings) == ("main_process_loading", {})
        assert "more workers would not read the same samples: its dataset holds dataset.file (FileIO " in (
            finding.advice
        )


@pytest.mark.timed
class TestProofs:
    def test_reloaded_loaders_with_other_settings_prove_the_advice(self, tmp_path: Path) -> None:
        class Growing(Model):
            def train_dataloader(self) -> DataLoader[Any]:
                workers = 1 if self.current_epoch == 0 else 8
                data = SleepyData(sleep_s=0.01, length=80)
                return DataLoader(data, batch_size=2, num_workers=workers)

        model = Growing(step_s=0.005)
        report = run(tmp_path, model, max_steps=80, reload_dataloaders_every_n_epochs=1)
        (proof,) = [each for each in report.proofs if each.cause in OF_WORKERS]
        assert proof.predicted is not None
        assert report.loader.num_workers == 8

    def test_the_report_of_an_earlier_run_is_what_a_new_one_is_held_against(self, tmp_path: Path) -> None:
        def report(workers: int) -> StallReport:
            detector = StallDetector(on_stall="ignore", report_dir=tmp_path / "report", **FAST)
            data = SleepyData(sleep_s=0.01, length=400)
            return run(tmp_path, Model(dataset=data, num_workers=workers, step_s=0.005), detector=detector)

        first = report(1)
        assert first.proofs == []
        file = tmp_path / "report" / "report.json"
        written = json.loads(file.read_text())
        # what a real run is advised is also the machine's affair
        written["findings"][0] |= {"cause": "slow_storage", "settings": {"num_workers": 2}}
        file.write_text(json.dumps(written))
        second = report(2)
        (proof,) = [each for each in second.proofs if each.cause == "slow_storage"]
        assert first.step_s is not None
        assert second.step_s is not None
        assert proof.measured == pytest.approx(first.step_s / second.step_s)


class TestNothingElseChanges:
    def test_the_users_loader_is_as_before(self, tmp_path: Path) -> None:
        def collate(samples: list[Any]) -> Any:
            return torch.utils.data.default_collate(samples)

        loader = DataLoader(SleepyData(length=400), batch_size=2, num_workers=1, collate_fn=collate)
        before = dict(vars(loader))
        detector = StallDetector(on_stall="ignore", **FAST)
        tiny_trainer(tmp_path, callbacks=[detector], max_steps=STEPS).fit(TinyModel(), loader)
        assert dict(vars(loader)) == before
        assert detector.report.loader.num_workers == 1

    @pytest.mark.parametrize("persistent", [False, True], ids=["plain", "persistent"])
    def test_no_worker_outlives_fit(self, tmp_path: Path, persistent: bool) -> None:
        model = Model(dataset=SleepyData(length=400), num_workers=2, persistent_workers=persistent)
        gc.disable()  # workers must end because nothing holds them, not because a collection comes by
        try:
            run(tmp_path, model)
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()

    def test_no_worker_outlives_an_exception(self, tmp_path: Path) -> None:
        model = Model(dataset=SleepyData(length=400), num_workers=2)
        gc.disable()
        try:
            with pytest.raises(Broken):
                run(tmp_path, model, Raiser("on_train_batch_end"))
            assert multiprocessing.active_children() == []
        finally:
            gc.enable()

    def test_a_collate_function_that_does_not_pickle(self, tmp_path: Path) -> None:
        model = Model(dataset=SleepyData(length=200), num_workers=1, collate_fn=lambda samples: default(samples))
        default = torch.utils.data.default_collate
        assert run(tmp_path, model).steps == STEPS

    def test_order_and_random_numbers_are_as_without_it(self, tmp_path: Path) -> None:
        class Noise(Dataset[Any]):
            def __len__(self) -> int:
                return 128

            def __getitem__(self, index: int) -> list[torch.Tensor]:
                return [torch.rand(FEATURES) + index]

        def seen(callbacks: list[Callback]) -> tuple[list[torch.Tensor], torch.Tensor]:
            batches: list[torch.Tensor] = []

            class Watching(Model):
                def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
                    batches.append(batch[0].clone())
                    return super().training_step(batch, batch_idx)

            seed_everything(5, verbose=False)
            model = Watching(dataset=Noise(), num_workers=2, shuffle=True)
            tiny_trainer(tmp_path, callbacks=callbacks, max_steps=STEPS).fit(model)
            return batches, torch.rand(3)

        plain, after_plain = seen([])
        watched, after_watched = seen([StallDetector(on_stall="ignore", **FAST)])
        assert len(plain) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
        assert torch.equal(after_plain, after_watched)


def test_a_hang_is_written_with_its_workers_and_training_goes_on(tmp_path: Path) -> None:
    written = tmp_path / "report"

    def stuck_in_step() -> list[str]:
        """What was written of the step below: a busy machine may be so slow that it counts as hung elsewhere."""
        texts = [path.read_text() for path in written.glob("hang-*.txt")]
        return [text for text in texts if "in in_step" in text]

    class Hanging(Model):
        def in_step(self, batch_idx: int) -> None:
            if batch_idx == 3:
                wait_for(lambda: bool(stuck_in_step()))

    detector = StallDetector(on_stall="ignore", report_dir=written, hang_timeout=0.3)
    model = Hanging(dataset=SleepyData(length=100), num_workers=2)
    with pytest.warns(UserWarning, match="no progress for"):
        run(tmp_path, model, detector=detector, max_steps=8)
    assert "Workers of the training loader: 2" in stuck_in_step()[0]
    assert detector.report.steps == 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuopt")]

"""The callbacks over DALI loaders: data wait is named by what a pipeline counts, and nothing else is done to them."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from skimage import data as pictures
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpuopt import CudaPrefetcher, DALIDataModule, NumWorkersFinder, StallDetector, StallReport
from lightning_gpuopt.dali.dali_loader import DALILoader
from lightning_gpuopt.detector.session import DetectorSession
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loading import PipelineTimes
from lightning_gpuopt.telemetry.host import HostWatch
from tests.callbacks.stalls import SleepyData
from tests.helpers import tiny_trainer
from tests.simulators.gpu import DeviceTensor, SimulatedGpu, simulated_gpu

IMAGES, BATCH, CROP = 24, 4, 32
STEPS = 16
FREE = HostActivity(8.0, 0.0, None, None, 6.0, process_cpus=1.5)
FULL = replace(FREE, free_cpus=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 JPEGs of 800x600 pixels in two classes."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    photo = Image.fromarray(pictures.astronaut()).resize((800, 600))
    for number in range(IMAGES):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        photo.rotate(number).save(root / "ab"[number % 2] / f"{number}.jpg")
    return root


def data(folder: Path, **more: Any) -> DALIDataModule:
    return DALIDataModule(folder, **{"batch_size": BATCH, "crop_size": CROP, "device": "cpu", "num_threads": 2} | more)


def loader_of(folder: Path, **more: Any) -> DALILoader:
    module = data(folder, **more)
    module.setup("fit")
    return module.train_dataloader()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.steps: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch[0] if isinstance(batch, list) and isinstance(batch[0], tuple) else batch
        self.steps.append(batch)
        return torch.nn.functional.cross_entropy(self.layer(images.mean((2, 3))), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path: Path, loaders: Any, *callbacks: Callback, **trainer: Any) -> tuple[Trainer, Net]:
    seed_everything(7, verbose=False)
    model = Net()
    made = tiny_trainer(tmp_path, callbacks=list(callbacks), **{"max_steps": STEPS, "max_epochs": -1} | trainer)
    made.fit(model, loaders)
    return made, model


def detector() -> StallDetector:
    return StallDetector(threshold=0.001, on_stall="ignore", window_size=5, warmup_steps=2)


def named(report: StallReport) -> Finding:
    (finding,) = [each for each in report.findings if "bottleneck" in each.evidence]
    return finding


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostActivity], None]:
    """Says what the machine had left."""
    return lambda activity: monkeypatch.setattr(HostWatch, "activity", lambda self: activity)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Callable[[PipelineTimes], None]:
    """Says what a loader counts for each batch that it has really given."""
    given = DALILoader.times

    def set_counts(each: PipelineTimes) -> None:
        def times(self: DALILoader) -> PipelineTimes:
            batches = given(self).batches
            seconds = (each.wait_s, each.read_wait_s, each.read_wall_s, each.read_cpu_s, each.decode_cpu_s)
            return PipelineTimes(batches, *(batches * value for value in seconds))

        monkeypatch.setattr(DALILoader, "times", times)

    return set_counts


class TestStallDetector:
    def test_the_numbers_are_what_the_loader_has_counted_since_the_warm_up(
        self, tmp_path: Path, folder: Path, host: Callable[[HostActivity], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host(FREE)
        readings: list[PipelineTimes] = []
        given = DALILoader.times

        def times(self: DALILoader) -> PipelineTimes:
            readings.append(given(self))
            return readings[-1]

        monkeypatch.setattr(DALILoader, "times", times)
        watching = detector()
        fit(tmp_path, data(folder), watching)
        finding = named(watching.report)
        assert finding.cause == "slow_transform"
        assert finding.settings == {}
        assert set(finding.evidence) == {
            "bottleneck",
            "ms_per_step",
            "step_ms",
            "num_threads",
            "threads_busy_percent",
            "pipeline_wait_ms_per_batch",
            "decode_cpu_ms_per_batch",
            "read_wait_ms_per_batch",
            "read_ms_per_batch",
            "read_cpu_ms_per_batch",
            "usable_cpus",
            "free_cpus",
        }
        assert (finding.evidence["bottleneck"], finding.evidence["num_threads"]) == ("CPU threads", 2)
        begin = next(each for each in readings if each.batches == 2)  # the warm-up's
        assert readings[-1].batches == STEPS
        since = [each - begin for each in readings if each.batches == STEPS]
        assert {name: finding.evidence[name] for name in per_batch(since[0])} in [per_batch(each) for each in since]

    @pytest.mark.parametrize(
        ("each", "activity", "bottleneck", "cause"),
        [
            (PipelineTimes(1, 0.25, 0.5, 2.0, 0.5, 0.125), FREE, "storage", "slow_storage"),
            (PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 8.0), FREE, "CPU threads", "slow_transform"),
            (PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 8.0), FULL, "CPU threads", "cpu_saturated"),
            (PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 8.0), replace(FREE, throttled=0.5), "CPU threads", "cpu_throttled"),
        ],
    )
    def test_the_cause_is_told_by_them(
        self,
        tmp_path: Path,
        folder: Path,
        host: Callable[[HostActivity], None],
        counts: Callable[[PipelineTimes], None],
        each: PipelineTimes,
        activity: HostActivity,
        bottleneck: str,
        cause: str,
    ) -> None:
        host(activity)
        counts(each)
        watching = detector()
        fit(tmp_path, data(folder), watching)
        finding = named(watching.report)
        assert (finding.evidence["bottleneck"], finding.cause, finding.settings) == (bottleneck, cause, {})
        assert {name: finding.evidence[name] for name in per_batch(each)} == per_batch(each)
        assert "num_workers" not in finding.advice
        assert [note for note in watching.report.notes if "could not be timed" in note] == []

    def test_pipelines_on_the_gpu_wait_for_its_decoder(
        self,
        tmp_path: Path,
        folder: Path,
        host: Callable[[HostActivity], None],
        counts: Callable[[PipelineTimes], None],
    ) -> None:
        host(FREE)
        counts(PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 0.0))
        loader = loader_of(folder)
        loader.on_gpu = True
        watching = detector()
        fit(tmp_path, loader, watching)
        finding = named(watching.report)
        assert (finding.evidence["bottleneck"], finding.cause) == ("decode engine", "slow_transform")
        assert "hw_decoder_load" in finding.advice

    def test_several_are_summed_up(
        self,
        tmp_path: Path,
        folder: Path,
        host: Callable[[HostActivity], None],
        counts: Callable[[PipelineTimes], None],
    ) -> None:
        host(FREE)
        counts(PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 0.125))
        loaders = [loader_of(folder, num_threads=threads) for threads in (2, 1)]
        watching = detector()
        fit(tmp_path, CombinedLoader(loaders, "min_size"), watching)
        evidence = named(watching.report).evidence
        assert evidence["num_threads"] == 3
        assert evidence["pipeline_wait_ms_per_batch"] == 500.0

    def test_beside_a_dataloader_it_is_named_where_training_waits_for_it(
        self,
        tmp_path: Path,
        folder: Path,
        host: Callable[[HostActivity], None],
        counts: Callable[[PipelineTimes], None],
    ) -> None:
        host(FREE)
        counts(PipelineTimes(1, 1000.0, 0.0, 1.0, 0.5, 0.125))
        for other_s, key in ((0.0, "0"), (0.1, "1")):
            other = DataLoader(SleepyData(sleep_s=other_s), batch_size=1)
            watching = detector()
            fit(tmp_path, CombinedLoader([loader_of(folder), other], "min_size"), watching)
            (found,) = [each for each in watching.report.findings if "loader" in each.evidence]
            assert found.evidence["loader"] == key
            assert ("bottleneck" in found.evidence) is (key == "0")

    def test_a_loader_that_is_reloaded_is_followed_and_let_go(
        self, tmp_path: Path, folder: Path, host: Callable[[HostActivity], None]
    ) -> None:
        host(FREE)
        seen: list[weakref.ref[DALILoader]] = []
        alive: list[int] = []

        class Reloads(DALIDataModule):
            def train_dataloader(self) -> DALILoader:
                loader = super().train_dataloader()
                seen.append(weakref.ref(loader))
                return loader

        class Look(Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                gc.collect()
                alive.append(sum(each() is not None for each in seen))

        watching = detector()
        module = Reloads(folder, batch_size=BATCH, crop_size=CROP, device="cpu", num_threads=2)
        fit(tmp_path, module, watching, Look(), reload_dataloaders_every_n_epochs=1, max_steps=-1, max_epochs=3)
        assert alive == [1, 1, 1]
        evidence = named(watching.report).evidence
        assert evidence["num_threads"] == 2
        assert float(evidence["pipeline_wait_ms_per_batch"]) > 0

    def test_batches_and_weights_are_as_without_it(self, tmp_path: Path, folder: Path) -> None:
        runs = [fit(tmp_path, data(folder), *watching)[1] for watching in ([], [detector()])]
        assert same_runs(*runs)

    def test_the_work_of_a_rank_counts_the_threads(
        self, tmp_path: Path, folder: Path, counts: Callable[[PipelineTimes], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lightning_gpuopt.detector.rank_exchange import work_of

        works: list[Any] = []
        stop = DetectorSession.stop

        def stopped(self: DetectorSession) -> None:
            works.append(work_of(0, self._measured(), forward=False))
            stop(self)

        monkeypatch.setattr(DetectorSession, "stop", stopped)
        counts(PipelineTimes(1, 0.5, 0.25, 1.0, 0.5, 3.0))
        fit(tmp_path, data(folder), detector())
        assert works[0].loader_s == 2.0  # 1 s of reading and 3 s of decoding on two threads


def per_batch(done: PipelineTimes) -> dict[str, float]:
    found = {
        "pipeline_wait": done.wait_s,
        "decode_cpu": done.decode_cpu_s,
        "read_wait": done.read_wait_s,
        "read": done.read_wall_s,
        "read_cpu": done.read_cpu_s,
    }
    return {f"{name}_ms_per_batch": round(seconds / done.batches * 1e3, 3) for name, seconds in found.items()}


def same_runs(first: Net, second: Net) -> bool:
    """Whether two runs have seen the same batches, bit for bit, and learned the same."""
    batches = zip(first.steps, second.steps, strict=True)
    same = all(torch.equal(one, other) for both in batches for one, other in zip(*both, strict=True))
    return same and torch.equal(first.layer.weight, second.layer.weight)


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [each.message for each in caplog.records if name in each.message]


class TestNumWorkersFinder:
    @pytest.mark.parametrize("mode", ["live", "probe"])
    def test_it_is_left_alone(self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, mode: Any) -> None:
        caplog.set_level(logging.INFO)
        finder = NumWorkersFinder(mode)
        fit(tmp_path, data(folder), finder)
        assert lines(caplog, "NumWorkersFinder") == [
            "NumWorkersFinder leaves a DALILoader alone: it is not a torch DataLoader."
        ]
        assert (finder.optimal_num_workers, finder.choices) == (None, {})


AHEAD = "CudaPrefetcher does not look ahead: its batches are already on the device."


class TestCudaPrefetcher:
    def test_on_a_cpu_nothing_is_copied_or_fetched_twice(
        self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        prefetcher, runs, given = CudaPrefetcher(enabled=True), [], []
        for callbacks in ([], [prefetcher]):
            loader = loader_of(folder)
            runs.append(fit(tmp_path, loader, *callbacks)[1])
            given.append(loader.times().batches)
        assert same_runs(*runs)
        assert given == [STEPS, STEPS]
        assert lines(caplog, "CudaPrefetcher") == [AHEAD]
        assert prefetcher.stats == {**prefetcher.stats, "staged": 0, "direct": STEPS, "copied_bytes": 0}

    def test_another_loop_of_the_same_run_is_still_looked_ahead_of(
        self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)

        class Validates(Net):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.layer(batch[0])

        validation = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2, num_workers=1)
        prefetcher = CudaPrefetcher(enabled=True)
        trainer = tiny_trainer(tmp_path, callbacks=[prefetcher], max_steps=-1, max_epochs=1, limit_val_batches=1.0)
        trainer.fit(Validates(), loader_of(folder), validation)
        assert lines(caplog, "CudaPrefetcher") == [AHEAD]
        stats = prefetcher.stats
        assert (stats["staged"], stats["direct"], stats["copied_bytes"]) == (2 + 4, IMAGES // BATCH, 6 * 2 * 3 * 4)

    @pytest.mark.parametrize("arrived", [True, False])
    def test_on_a_gpu_only_batches_that_are_not_there_are_copied(
        self, folder: Path, caplog: pytest.LogCaptureFixture, arrived: bool
    ) -> None:
        caplog.set_level(logging.INFO)
        with simulated_gpu(bandwidth=1e12, pageable_bandwidth=1e12) as gpu:
            loader = loader_on(folder, arrived=arrived)
            prefetcher = CudaPrefetcher()
            trainer = Trainer(
                **gpu.trainer_arguments(),
                max_epochs=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[prefetcher],
            )
            model = Net()
            trainer.fit(model, loader)
            gpu.synchronize()
            copied = copies_of_batches(gpu)
        batches = 2 * IMAGES // BATCH
        assert (len(model.steps), loader.times().batches) == (batches, batches)
        assert lines(caplog, "CudaPrefetcher") == ([AHEAD] if arrived else [])
        stats = prefetcher.stats
        assert (stats["staged"], stats["direct"]) == ((0, batches) if arrived else (batches, 0))
        assert copied == (0 if arrived else 2 * batches)  # images and labels


def loader_on(folder: Path, *, arrived: bool) -> DALILoader:
    """A loader whose batches are on the simulated GPU, or on the CPU."""
    loader = loader_of(folder)
    collect = loader.engine.collect
    if arrived:
        loader.on_gpu = True
        loader.engine.collect = lambda: tuple(  # type: ignore[method-assign]
            each.as_subclass(DeviceTensor) for each in collect()
        )
    return loader


def copies_of_batches(gpu: SimulatedGpu) -> int:
    """Copies to the device on another stream than that of the computation."""
    return sum("HtoD" in each.name and each.stream != gpu.default.number for each in gpu.ledger.activities)

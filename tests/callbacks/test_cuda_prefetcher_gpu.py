"""CudaPrefetcher on a simulated GPU, whose own ledger says what was hidden, and what was written when."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpuopt import CudaPrefetcher, StallDetector, StallReport
from lightning_gpuopt.compat.dataloader import in_the_making
from lightning_gpuopt.compat.lightning import train_iterators
from tests.helpers import wait_for
from tests.simulators.gpu import Activity, SimulatedGpu, SimulatedModule, Step, Work, simulated_gpu
from tests.simulators.simulated_time import SimulatedTime

STEPS = 30
COPY_S = 0.01
BATCH_BYTES = 2 * 4 * 4
STEP = Step(Work(0.01), Work(0.02))


@pytest.fixture
def gpu(simulated_time: SimulatedTime) -> Iterator[SimulatedGpu]:
    with made_gpu(simulated_time) as device:
        yield device


@pytest.fixture
def real_gpu() -> Iterator[SimulatedGpu]:
    """For loaders whose workers take their time, which is real."""
    with made_gpu() as device:
        yield device


def made_gpu(clock: SimulatedTime | None = None) -> AbstractContextManager[SimulatedGpu]:
    return simulated_gpu(clock, bandwidth=BATCH_BYTES / COPY_S, pageable_bandwidth=BATCH_BYTES / COPY_S)


class Model(SimulatedModule):
    """Names its kernels by the step, and notes where its batch lies and when it came."""

    def __init__(self, gpu: SimulatedGpu, step: Step = STEP, *, item: bool = False, **loader: Any) -> None:
        super().__init__(gpu, step, **{"num_workers": 2, **loader})
        self.item = item
        self.addresses: list[int] = []
        self.came_s: list[float] = []
        self.streams: dict[str, set[Any]] = {"copy": set(), "after": set()}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.streams["after"].add(torch.cuda.current_stream())
        self.came_s.append(time.perf_counter())
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(self.gpu.clock, SimulatedTime):  # in which workers take no time: the next batch is there
            wait_for(lambda: not any(in_the_making(each) for each in train_iterators(self.trainer)))
        self.addresses.append(batch[0].data_ptr())
        number = len(self.addresses) - 1
        self.gpu.launch(self.step.forward.gpu_s, name=f"step {number}")
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        self.gpu.launch(self.step.backward.gpu_s, name=f"step {len(self.addresses) - 1}")
        if self.item:
            self.gpu.item()


def fit(gpu: SimulatedGpu, model: SimulatedModule, *callbacks: Callback, **trainer: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    made = Trainer(**gpu.trainer_arguments(), **{**defaults, **trainer}, callbacks=list(callbacks))
    made.fit(model)
    gpu.synchronize()
    return made


def copies(gpu: SimulatedGpu) -> list[Activity]:
    """Those of batches; what Lightning itself moves is smaller."""
    longest_s = BATCH_BYTES / gpu.bandwidth / 2
    return [each for each in gpu.ledger.activities if "HtoD" in each.name and each.end_s - each.start_s > longest_s]


def kernels(gpu: SimulatedGpu, number: int) -> list[Activity]:
    return [each for each in gpu.ledger.activities if each.name == f"step {number}"]


def exposed_share(gpu: SimulatedGpu, model: Model) -> float:
    """Of the copies, as a share: for how long each kept the GPU from a step that had been reached otherwise.

    The first two, which nothing can hide, are left out.
    """
    made = copies(gpu)
    exposed_s = 0.0
    for number in range(2, len(model.addresses)):
        reached_s = max(kernels(gpu, number - 1)[-1].end_s, model.came_s[number])
        exposed_s += max(made[number].end_s - reached_s, 0.0)
    return exposed_s / sum(each.end_s - each.start_s for each in made[2:])


class TestTheCopy:
    @pytest.mark.timed
    @pytest.mark.parametrize("item", [False, True])
    def test_is_hidden_behind_the_step_before(self, gpu: SimulatedGpu, item: bool) -> None:
        model = Model(gpu, item=item)
        prefetcher = CudaPrefetcher()
        fit(gpu, model, prefetcher)
        assert prefetcher.stats["staged"] == len(copies(gpu)) == STEPS
        assert exposed_share(gpu, model) < 0.05
        # no step is late for the copy of the next one's batch
        idle_s = gpu.ledger.idle_s(kernels(gpu, 2)[0].start_s, kernels(gpu, STEPS - 1)[-1].end_s)
        assert idle_s < 0.05 * STEPS * COPY_S

    def test_is_all_exposed_without_it(self, gpu: SimulatedGpu) -> None:
        model = Model(gpu, pin_memory=True)
        fit(gpu, model)
        made = copies(gpu)
        exposed_s = sum(each.end_s - max(each.start_s, kernels(gpu, n)[-1].end_s) for n, each in enumerate(made[1:]))
        assert exposed_s == pytest.approx(sum(each.end_s - each.start_s for each in made[1:]))

    def test_never_writes_to_a_batch_that_is_in_use(self, gpu: SimulatedGpu) -> None:
        model = Model(gpu)
        fit(gpu, model, CudaPrefetcher())
        written = {each.address for each in copies(gpu)}
        assert written == set(model.addresses)
        assert len(written) == 2
        for number, each in enumerate(copies(gpu)):
            assert each.address == model.addresses[number]
            earlier = [n for n in range(number) if model.addresses[n] == each.address]
            assert all(kernel.end_s <= each.start_s for n in earlier for kernel in kernels(gpu, n))
            assert all(kernel.start_s >= each.end_s for kernel in kernels(gpu, number))

    def test_uses_one_side_stream_and_the_hook_after_it_the_computes(self, gpu: SimulatedGpu) -> None:
        model = Model(gpu)
        fit(gpu, model, CudaPrefetcher(), limit_val_batches=2, val_check_interval=4, num_sanity_val_steps=1)
        assert model.streams["after"] == {torch.cuda.default_stream()}
        (side,) = {each.stream for each in copies(gpu)}
        assert side not in (gpu.default.number, gpu.comm.number)

    def test_stops_at_max_steps(self, gpu: SimulatedGpu) -> None:
        model = Model(gpu)
        fit(gpu, model, CudaPrefetcher(depth=3), max_steps=7, accumulate_grad_batches=2)
        assert len(copies(gpu)) == len(model.addresses) == 14

    def test_does_not_hold_up_the_host(self, gpu: SimulatedGpu) -> None:
        waits = []
        for callbacks in ([], [CudaPrefetcher()]):
            gpu.ledger.waits.clear()
            fit(gpu, Model(gpu, pin_memory=True), *callbacks)
            waits.append(sorted(each.reason for each in gpu.ledger.waits))
        assert waits[0] == waits[1]

    def test_a_user_who_keeps_a_batch_finds_it_unchanged(self, gpu: SimulatedGpu) -> None:
        model = Model(gpu)
        kept: list[Any] = []

        class Keeps(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3:
                    kept.append(batch[0][1:])

        fit(gpu, model, CudaPrefetcher(), Keeps())
        assert model.addresses.count(model.addresses[3]) == 2  # batches 1 and 3, and none after that
        assert len({each.address for each in copies(gpu)}) == 3

    @pytest.mark.timed
    def test_is_hidden_where_all_batches_are_kept_and_each_comes_during_the_step(self, real_gpu: SimulatedGpu) -> None:
        class Keeps(Model):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.kept = [*getattr(self, "kept", []), batch]

        model = Keeps(real_gpu, Step(Work(0.02), Work(0.03)), dataset=Slow(0.02), num_workers=1, prefetch_factor=1)
        fit(real_gpu, model, CudaPrefetcher())
        made = copies(real_gpu)
        began_late = [n for n in range(2, STEPS) if made[n].start_s >= kernels(real_gpu, n - 1)[-1].end_s]
        assert len(began_late) < STEPS / 2  # all of them, when a copy waits for the step before it

    @pytest.mark.timed
    def test_is_hidden_even_where_the_batch_comes_during_the_step(self, real_gpu: SimulatedGpu) -> None:
        """The step's work is issued, the next batch comes, then a hook of the module waits for the GPU."""

        class Drains(Model):
            def on_train_batch_end(self, *args: Any) -> None:
                self.gpu.item()

        model = Drains(real_gpu, Step(Work(0.02), Work(0.03)), dataset=Slow(0.02), num_workers=1, prefetch_factor=1)
        fit(real_gpu, model, CudaPrefetcher())
        assert exposed_share(real_gpu, model) < 0.5


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Batches that take their time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 2 * 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds / 2)
        return torch.ones(4)


class TestPageLockedMemory:
    def test_is_the_loaders_own_where_workers_make_the_batches(self, gpu: SimulatedGpu) -> None:
        loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2, num_workers=1)
        model = Model(gpu)
        model.train_dataloader = lambda: loader  # type: ignore[method-assign]
        prefetcher = CudaPrefetcher()
        fit(gpu, model, prefetcher)
        assert prefetcher.stats["copied_bytes"] == STEPS * BATCH_BYTES
        assert prefetcher.stats["pageable_bytes"] == 0
        assert not loader.pin_memory

    @pytest.mark.parametrize("faster", ["plain", "thread"])
    def test_elsewhere_the_faster_of_two_ways_stays(
        self, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, faster: str
    ) -> None:
        submit = ThreadPoolExecutor.submit

        def take_a_millisecond(self: Any, *args: Any) -> Any:
            time.sleep(0.001)
            return submit(self, *args)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", take_a_millisecond)
        if faster == "plain":  # such a copy blocks the host for as long as it takes
            gpu.bandwidth = gpu.pageable_bandwidth = 1e9
        loader = Declared(STEPS * 2)
        model = Model(gpu, Step())
        model.train_dataloader = lambda: loader  # type: ignore[method-assign]
        prefetcher = CudaPrefetcher()
        fit(gpu, model, prefetcher)
        assert prefetcher.stats["staged"] == STEPS
        assert prefetcher.stats["pageable_bytes"] == STEPS * BATCH_BYTES
        names = {each.name for each in copies(gpu)[10:]}
        assert names == {f"Memcpy HtoD ({'Pageable' if faster == 'plain' else 'Pinned'} -> Device)"}


class Declared:
    """A loader of somebody's own, without workers, that says that it draws nothing."""

    draws_random_state = False

    def __init__(self, batches: int, draw: Callable[[int], object] = lambda number: None) -> None:
        self.batches, self.draw = batches, draw

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.batches):
            self.draw(number)
            yield [torch.full((2, 4), float(number))]


class TestRandomness:
    def test_a_loader_that_draws_after_all_is_taken_in_its_turn(self, gpu: SimulatedGpu) -> None:
        def run(*callbacks: Callback) -> tuple[Any, Any]:
            torch.manual_seed(3)
            model = Model(gpu, Step(Work(0.0001), Work(0.0001)))
            loader = Declared(10, lambda number: torch.rand(number and 1))
            model.train_dataloader = lambda: loader  # type: ignore[method-assign]
            fit(gpu, model, *callbacks, max_steps=-1, max_epochs=2)
            return model.layer.weight.detach().clone(), torch.rand(2).tolist()

        prefetcher = CudaPrefetcher()
        weight, drawn = run()
        with pytest.warns(UserWarning, match="Declared declares draws_random_state = False, but"):
            weight_with, drawn_with = run(prefetcher)
        assert torch.equal(weight, weight_with)
        assert drawn == drawn_with
        assert prefetcher.stats["direct"] > 0


class Own:
    """Moves itself."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def to(self, device: Any) -> Own:
        return Own(self.value.to(device))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.value


class TestMemory:
    @pytest.mark.parametrize("own_transfer", [False, True])
    def test_what_brings_memory_of_its_own_is_kept_for_the_compute_stream(
        self, gpu: SimulatedGpu, own_transfer: bool
    ) -> None:
        model = Model(gpu)
        if own_transfer:
            model.transfer_batch_to_device = lambda batch, device, index: batch.to(device)  # type: ignore[method-assign]
        batches = [Own(torch.ones(2, 4)) for _ in range(STEPS)]

        class Given(Declared):
            def __iter__(self) -> Iterator[Any]:
                yield from batches

        model.train_dataloader = lambda: Given(STEPS)  # type: ignore[method-assign]
        fit(gpu, model, CudaPrefetcher())
        assert gpu.recorded_streams == [gpu.default.number] * STEPS

    def test_a_loader_that_is_reloaded_is_let_go(self, gpu: SimulatedGpu) -> None:
        alive: list[int] = []
        datasets: list[Any] = []

        class Reloads(Model):
            def train_dataloader(self) -> Any:
                dataset = Slow(0.0)
                datasets.append(weakref.ref(dataset))
                return DataLoader(dataset, batch_size=32, num_workers=1)

            def on_train_epoch_end(self) -> None:
                gc.collect()
                alive.append(sum(each() is not None for each in datasets))

        fit(
            gpu, Reloads(gpu, Step()), CudaPrefetcher(), max_steps=-1, max_epochs=3, reload_dataloaders_every_n_epochs=1
        )
        assert alive == [1, 1, 1]

    def test_a_batch_that_is_on_its_way_when_memory_ends_is_moved_once(
        self, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lightning_gpuopt.prefetch.transfer import TransferPipeline

        plain, calls, moved = TransferPipeline.stage, [0], [0]

        def stage(self: Any, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 6:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return plain(self, *args)

        def move(batch: Any, device: Any, index: int) -> Any:
            moved[0] += 1
            return [each.to(device) for each in batch]

        monkeypatch.setattr(TransferPipeline, "stage", stage)
        model = Model(gpu, Step())
        model.transfer_batch_to_device = move  # type: ignore[method-assign]
        with pytest.warns(UserWarning, match="no memory left"):
            fit(gpu, model, CudaPrefetcher(depth=2))
        assert (len(model.addresses), moved[0]) == (STEPS, STEPS)

    def test_without_room_batches_are_copied_in_their_turn(
        self, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, left = torch.empty_like, [1]

        def empty_like(source: torch.Tensor, **options: Any) -> torch.Tensor:
            if str(options.get("device", "")).startswith("cuda"):
                left[0] -= 1
                if left[0] < 0:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore.")
            return plain(source, **options)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        model = Model(gpu)
        prefetcher = CudaPrefetcher()
        with pytest.warns(UserWarning, match=r"no memory left for a batch ahead.*Tried to allocate") as caught:
            fit(gpu, model, prefetcher)
        assert len([each for each in caught if "CudaPrefetcher" in str(each.message)]) == 1
        assert len(model.addresses) == STEPS
        assert prefetcher.stats == {**prefetcher.stats, "staged": 1, "direct": STEPS - 1}


class TestWithStallDetector:
    def report(self, gpu: SimulatedGpu, folder: Path, *callbacks: Callback, **options: Any) -> StallReport:
        detector = StallDetector(on_stall="ignore", window_size=10, warmup_steps=5, report_dir=folder)
        fit(gpu, Model(gpu, pin_memory=True, **options), *callbacks, detector, max_steps=50)
        return detector.report

    def test_the_advice_names_the_callback_and_its_gain_comes(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        before = self.report(gpu, tmp_path / "a")
        (finding,) = before.findings
        assert finding.cause == "host_to_device"
        assert "CudaPrefetcher()" in finding.advice
        assert finding.predicted_speedup is not None
        after = self.report(gpu, tmp_path / "b", CudaPrefetcher())
        assert after.verdict == "compute_bound"
        assert before.step_s is not None
        assert after.step_s is not None
        low, _, high = finding.predicted_speedup
        assert low <= before.step_s / after.step_s <= high

    def test_it_tells_how_much_of_the_copy_was_hidden(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        report = self.report(gpu, tmp_path, CudaPrefetcher())
        (note,) = [each for each in report.notes if "CudaPrefetcher" in each]
        assert note.startswith("CudaPrefetcher: the copy took 10.0 ms a step, 0.")

    @pytest.mark.timed
    def test_looking_ahead_is_no_callbacks_time(self, real_gpu: SimulatedGpu, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            real_gpu.bandwidth = 1e9
            detector = StallDetector(on_stall="ignore", window_size=10, warmup_steps=2, report_dir=tmp_path)
            model = Model(real_gpu, Step(Work(0.0005), Work(0.0005)), dataset=Slow(0.01), num_workers=1)
            times: list[Any] = []

            class Look(Callback):
                def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                    times.append(detector._session.timeline.times())  # type: ignore[union-attr]

            fit(real_gpu, model, CudaPrefetcher(), detector, Look())
        assert detector.report.verdict == "slow_storage"
        assert not [name for name in times[-1].callbacks if "CudaPrefetcher" in name]
        assert times[-1].phases["transfer"] > 0

    def test_a_copy_that_no_step_can_hide_is_still_found(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        detector = StallDetector(on_stall="ignore", window_size=10, warmup_steps=5, report_dir=tmp_path)
        model = Model(gpu, Step(Work(0.002), Work(0.002)), pin_memory=True)
        fit(gpu, model, CudaPrefetcher(), detector, max_steps=50)
        (finding,) = detector.report.findings
        assert finding.cause == "host_to_device"
        assert "takes longer than the rest of the step" in finding.advice
        assert finding.evidence["copy_ms"] == pytest.approx(10, abs=0.5)
        assert finding.evidence["exposed_copy_ms"] == pytest.approx(6, abs=1.0)

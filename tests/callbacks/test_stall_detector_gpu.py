"""StallDetector on a simulated GPU: real Trainers, whose device's own ledger says what is true."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_gpuopt import GpuUtilMonitor, NumWorkersFinder, StallDetector, StallError
from lightning_gpuopt.detector.kernel_profiling import Profile
from tests.callbacks.gpu_fit import MANY_KERNELS, STEP, STEPS, WARMUP_STEPS, At, Stretch, causes, fit, follow, module
from tests.callbacks.gpu_rank import Bar
from tests.callbacks.stalls import OF_WORKERS
from tests.helpers import BROADCASTS, RecordingLogger
from tests.ranks import run_ranks
from tests.simulators.gpu import (
    SimulatedGpu,
    SimulatedModule,
    Step,
    Work,
    rank_environment,
)
from tests.simulators.nvml import Gpu, Simulator
from tests.simulators.simulated_time import SimulatedTime
from tests.standstill import of_ranks, undisturbed

in_matrix = partial(pytest.param, marks=pytest.mark.matrix)


class TestVerdicts:
    def test_what_the_gpu_works_through_is_no_stall(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        # 30 ms on the GPU; the host needs 4 to issue it, 8 to load and 8 in a hook
        hook = At("on_train_batch_end", lambda: time.sleep(0.008))
        report = fit(gpu, tmp_path, module(gpu, sample_s=0.004), hook)
        assert (report.verdict, report.findings) == ("compute_bound", [])
        assert report.step_s == pytest.approx(0.031, rel=0.02)

    @pytest.mark.timed
    def test_a_slow_loader_behind_a_bar_that_waits_for_the_gpu(self, real_gpu: SimulatedGpu, tmp_path: Path) -> None:
        # 60 ms a batch from the worker, 30 on the GPU
        slow = module(real_gpu, sample_s=0.03, workers=1)
        report = undisturbed(lambda: fit(real_gpu, tmp_path, slow, Bar(real_gpu), steps=25))
        (finding,) = report.findings
        assert finding.cause in OF_WORKERS
        assert finding.evidence["exposed_by"] == "Bar.on_train_batch_end"
        assert finding.evidence["dataset_ms_per_batch"] - finding.evidence["dataset_cpu_ms_per_batch"] >= 60.0

    def test_the_idle_time_is_the_ledgers(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        ends = Stretch()
        report = fit(gpu, tmp_path, module(gpu, sample_s=0.025, workers=0), Bar(gpu), ends)
        begin_s, end_s = ends.ends[WARMUP_STEPS - 1], ends.ends[-1]
        assert report.gpu_idle_s == pytest.approx(gpu.ledger.idle_s(begin_s, end_s), rel=0.02)
        assert causes(report) == ["main_process_loading"]
        assert report.findings[0].evidence["exposed_by"] == "Bar.on_train_batch_end"

    def test_work_that_hooks_queue_is_the_gpus_own(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        class Augmented(SimulatedModule):
            def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                self.gpu.launch(0.006, name="augment")
                return batch

        mixup = At("on_train_batch_start", lambda: gpu.launch(0.003, name="mixup"))
        ema = At("on_train_batch_end", lambda: gpu.launch(0.003, name="ema"))
        report = fit(gpu, tmp_path, Augmented(gpu, STEP, batches=1000), Bar(gpu), mixup, ema)
        assert report.findings == []

    @pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
    def test_a_slow_hook_is_a_callback(self, gpu: SimulatedGpu, tmp_path: Path, hook: str) -> None:
        report = fit(gpu, tmp_path, module(gpu), At(hook, lambda: time.sleep(0.05)))
        assert causes(report) == ["callback"]
        assert (report.findings[0].evidence["callback"], report.findings[0].evidence["hook"]) == ("At", hook)

    @pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
    def test_a_slow_hook_of_the_batch_is_the_modules(self, gpu: SimulatedGpu, tmp_path: Path, hook: str) -> None:
        class Net(SimulatedModule):
            pass

        def slow(self: Net, batch: Any, dataloader_idx: int) -> Any:
            time.sleep(0.04)
            return batch

        setattr(Net, hook, slow)
        report = fit(gpu, tmp_path, Net(gpu, STEP, batches=1000))
        assert causes(report) == ["callback"]
        assert (report.findings[0].evidence["callback"], report.findings[0].evidence["hook"]) == ("Net", hook)

    def test_an_exposed_copy_of_pageable_memory(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        gpu.copy_s, gpu.pinned = 0.012, False
        report = fit(gpu, tmp_path, module(gpu))
        assert causes(report) == ["host_to_device"]
        assert report.findings[0].settings == {"pin_memory": True}
        assert report.findings[0].share == pytest.approx(12 / 42, abs=0.01)

    def test_checkpoints_count_by_the_time_in_which_the_gpu_was_idle(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        class Save(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                if trainer.global_step % 5 == 0:
                    gpu.synchronize()
                    trainer.save_checkpoint(tmp_path / "last.ckpt")

            def on_save_checkpoint(self, *args: Any) -> None:
                time.sleep(0.12)

        report = fit(gpu, tmp_path, module(gpu), Save())
        assert causes(report) == ["callback"]  # its own hook, on_save_checkpoint
        assert report.findings[0].share == pytest.approx(0.12 / (0.12 + 5 * 0.031), abs=0.02)


class TestInsideTheStep:
    """With NVML's figures following the device; a look needs 5 s of them."""

    LONG = 260

    @pytest.fixture
    def watched(self, gpu: SimulatedGpu, nvml: Simulator, simulated_time: SimulatedTime) -> SimulatedGpu:
        nvml.machine(Gpu(gpm={}))
        follow(gpu, nvml, simulated_time)
        return gpu

    @pytest.mark.parametrize("profile", ["auto", in_matrix("on")])
    def test_a_host_that_issues_too_slowly(self, watched: SimulatedGpu, tmp_path: Path, profile: Profile) -> None:
        report = fit(watched, tmp_path, module(watched, MANY_KERNELS), steps=self.LONG, profile=profile)
        assert causes(report) == ["launch_bound"]
        assert report.findings[0].share == pytest.approx(24 / 33, abs=0.02)
        assert report.findings[0].evidence["busy_ms_per_step"] == pytest.approx(8.0, rel=0.02)
        assert any(note.startswith("torch.profiler recorded") for note in report.notes)

    @pytest.mark.parametrize(
        ("profile", "trainer", "recorded"),
        [
            ("auto", {}, range(LONG - 6, LONG - 2)),
            in_matrix("auto", {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 130}, range(254, 258)),
            in_matrix("auto", {"max_steps": LONG // 2, "accumulate_grad_batches": 2}, range(LONG - 6, LONG - 2)),
            ("auto", {"max_steps": -1, "max_epochs": -1}, []),
            in_matrix("off", {}, []),
        ],
    )
    def test_by_itself_only_the_last_steps_before_an_end_that_can_be_foreseen_are_recorded(
        self, watched: SimulatedGpu, tmp_path: Path, profile: Profile, trainer: dict[str, Any], recorded: Sequence[int]
    ) -> None:
        seen: list[int] = []

        class Sees(Callback):
            steps = 0

            def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
                seen.extend([self.steps] if watched.tracer is not None else [])
                self.steps += 1
                trainer.should_stop = self.steps == TestInsideTheStep.LONG

        report = fit(
            watched,
            tmp_path,
            module(watched, MANY_KERNELS),
            Sees(),
            profile=profile,
            **{"max_steps": self.LONG} | trainer,
        )
        assert (report.steps, seen) == (self.LONG, list(recorded))
        assert causes(report) == ["launch_bound"]  # without a look by NVML's figures
        notes = [note for note in report.notes if "torch.profiler" in note]
        assert len(notes) == 1
        if recorded:
            assert re.fullmatch(r"torch.profiler recorded 3 steps, which took \d+\.\d\d s\.", notes[0])
        else:
            assert notes[0].startswith("torch.profiler was not allowed to record idle time inside the steps")
            assert notes[0].endswith('StallDetector(profile="on") records three steps.')

    @pytest.mark.parametrize(("profile", "verdict"), [("auto", "compute_bound"), ("off", "unknown")])
    def test_small_kernels_are_suspect_until_they_were_looked_at(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path, profile: Profile, verdict: str
    ) -> None:
        nvml.machine(Gpu(gpm={2: 10.0}, utilization=100))
        report = fit(gpu, tmp_path, module(gpu), Bar(gpu), steps=self.LONG, profile=profile)
        assert (report.verdict, report.findings) == (verdict, [])
        assert any("was not allowed to record" in note for note in report.notes) == (profile == "off")

    @pytest.mark.parametrize("profile", [in_matrix("auto"), "off"])
    def test_where_nvml_suspects_nothing_nothing_is_unknown_and_a_look_that_costs_little_is_taken(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path, profile: Profile
    ) -> None:
        nvml.machine(Gpu(gpm={2: 97.0}, utilization=100))
        report = fit(gpu, tmp_path, module(gpu), Bar(gpu), steps=self.LONG, profile=profile)
        assert (report.verdict, report.findings) == ("compute_bound", [])
        assert any("torch.profiler recorded" in note for note in report.notes) == (profile == "auto")

    def test_a_look_leaves_the_environment_alone(
        self, watched: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        before, changed = dict(os.environ), []
        watching = True
        sys.addaudithook(lambda event, args: changed.append(args) if event == "os.putenv" and watching else None)
        report = fit(watched, tmp_path, module(watched, MANY_KERNELS), steps=self.LONG)
        watching = False
        assert any(note.startswith("torch.profiler recorded") for note in report.notes)
        assert (changed, dict(os.environ)) == ([], before)

    @pytest.mark.parametrize(
        ("profile", "steps", "steps_recorded"),
        [
            in_matrix("on", 60, [26, 27, 28, 29, 30, 32, 33, 34, 35]),  # the trace, then the look
            ("auto", 30, [25, 26, 27, 28, 30]),  # the look, then as much of the trace as there is time for
            in_matrix("auto", 34, [29, 30, 31, 32, 34]),  # the trace would leave no time for the look
        ],
    )
    def test_a_trace_and_a_look_wait_for_each_other(
        self, watched: SimulatedGpu, tmp_path: Path, profile: Profile, steps: int, steps_recorded: list[int]
    ) -> None:
        recorded: list[int] = []

        class Sees(Callback):
            steps = 0

            def on_train_batch_start(self, *args: Any) -> None:
                self.steps += 1
                recorded.extend([self.steps] if watched.tracer is not None else [])

        # in the first window the hook is found, and NVML's figures give reason to look; 8 s a window
        slow = Step(Work(0.04, kernels=20, host_s=0.16), Work(0.04, kernels=20, host_s=0.16))
        detector = StallDetector(
            on_stall="ignore", window_size=20, warmup_steps=5, report_dir=tmp_path, capture_trace=True, profile=profile
        )
        hook = At("on_train_batch_end", lambda: time.sleep(0.1))
        report = fit(watched, tmp_path, module(watched, slow), hook, Sees(), detector=detector, steps=steps)
        assert causes(report) == ["launch_bound", "callback"]
        assert any(note.startswith("torch.profiler recorded 3 steps") for note in report.notes)
        assert not any("could not be recorded" in note or "No trace" in note for note in report.notes)
        assert recorded == steps_recorded
        assert (tmp_path / "trace.json.gz").is_file()

    def test_a_line_of_the_user_that_waits(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        class Waits(SimulatedModule):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                self.gpu.tensor(1.0).item()
                return loss

        step = Step(Work(0.012, kernels=4, host_s=0.002), Work(0.008, kernels=8, host_s=0.016))
        report = fit(watched, tmp_path, Waits(watched, step, batches=1000), steps=self.LONG)
        assert causes(report) == ["gpu_sync"]
        where = report.findings[0].evidence["where"]
        assert isinstance(where, str)
        assert re.fullmatch(r"100 % (Waits\.)?training_step \(test_stall_detector_gpu.py:\d+\)", where)

    def test_a_bar_that_waits_does_not_make_launching_the_fault_of_its_line(
        self, watched: SimulatedGpu, tmp_path: Path
    ) -> None:
        report = fit(watched, tmp_path, module(watched, MANY_KERNELS), Bar(watched), steps=self.LONG)
        assert causes(report) == ["launch_bound"]
        assert "where" not in report.findings[0].evidence

    def test_a_short_run_is_judged_by_its_last_window_as_well(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        report = fit(watched, tmp_path, module(watched, MANY_KERNELS), steps=60)
        assert causes(report) == ["launch_bound"]

    @pytest.mark.parametrize("trouble", ["refuses", in_matrix("blind")])
    def test_where_the_profiler_cannot_look_nvml_stands_in(
        self, watched: SimulatedGpu, tmp_path: Path, trouble: str
    ) -> None:
        setattr(watched.profiling, trouble, True)
        report = fit(watched, tmp_path, module(watched, MANY_KERNELS), steps=self.LONG)
        assert causes(report) == ["launch_bound"]
        (note,) = [each for each in report.notes if "could not be recorded with torch.profiler" in each]
        assert "are used instead" in note

    def test_nothing_is_told_before_the_look_is_over(
        self, watched: SimulatedGpu, simulated_time: SimulatedTime, tmp_path: Path
    ) -> None:
        detector = StallDetector(
            on_stall="raise", window_size=20, warmup_steps=WARMUP_STEPS, report_dir=tmp_path, profile="on"
        )
        seen: list[tuple[float, list[str]]] = []
        at = At("on_train_batch_end", lambda: seen.append((simulated_time(), causes(detector.report))))
        with pytest.raises(StallError, match="launch_bound"):
            fit(watched, tmp_path, module(watched, MANY_KERNELS), at, steps=self.LONG, detector=detector)
        told_s = next(moment for moment, each in seen if "launch_bound" in each)
        assert told_s - seen[0][0] > 5.0
        assert not any("gpu_sync" in each for _, each in seen)

    def test_an_exception_in_the_middle_of_a_look_leaves_nothing_on(
        self, watched: SimulatedGpu, tmp_path: Path
    ) -> None:
        def fail() -> None:
            if torch.cuda.get_sync_debug_mode():
                raise ZeroDivisionError

        showwarning = warnings.showwarning
        with pytest.raises(ZeroDivisionError):
            fit(watched, tmp_path, module(watched, MANY_KERNELS), At("on_train_batch_start", fail))
        assert torch.cuda.get_sync_debug_mode() == 0
        assert warnings.showwarning is showwarning
        assert not [each.name for each in threading.enumerate() if each.name.startswith("gpuopt-")]

    def test_both_callbacks_read_nvml_on_one_thread(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        names: set[int] = set()

        def count() -> None:
            names.update(each.ident or 0 for each in threading.enumerate() if each.name == "gpuopt-gpu-sampler")

        monitor = GpuUtilMonitor()
        fit(watched, tmp_path, module(watched), monitor, At("on_train_batch_end", count))
        assert len(names) == 1
        assert monitor.summary()["gpu/0/utilization"] > 0

    def test_a_power_cap_is_a_note_and_heat_a_cause(self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path) -> None:
        software_power_cap, hardware_thermal = 0x4, 0x40
        nvml.machine(Gpu(gpm={}, utilization=98, clock_reasons=software_power_cap, sm_clock=1200))
        capped = fit(gpu, tmp_path, module(gpu))
        assert causes(capped) == []
        assert any("stay within its power limit" in note for note in capped.notes)
        nvml.machine(Gpu(gpm={}, utilization=98, clock_reasons=hardware_thermal, sm_clock=1200))
        hot = fit(gpu, tmp_path, module(gpu))
        assert causes(hot) == ["gpu_throttled"]


def ranks(folder: Path, name: str, profile: Profile, nvml: Simulator | None = None) -> list[Any]:
    env = rank_environment(folder, 2)
    files = {} if nvml is None else {"nvml_library": str(nvml.library), "nvml_scenario": str(nvml.scenario)}
    return undisturbed(
        lambda: run_ranks("tests.callbacks.gpu_rank:run", 2, env=env, name=name, profile=profile, **files), of_ranks
    )


@pytest.mark.timed
class TestRanks:
    """Two processes, each with a GPU of its own, under Lightning's broadcast before every step."""

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("bar", {}),
            ("loader", {"main_process_loading": {"exposed_by": "Lightning's _broadcast_sigterm_tensor"}}),
            ("slow_gpu", {"straggler": {"rank": 1, "kind": "compute"}}),
            ("slow_data", {"straggler": {"rank": 1, "kind": "data"}}),
            ("gathers_slow_gpu", {"communication": {}}),
            ("gathers_slow_data", {"straggler": {"rank": 1, "kind": "data"}}),
            ("communication", {"communication": {"gradient_dtype": "float32", "accumulate_grad_batches": 1}}),
        ],
    )
    def test_what_rank_0_reports(self, name: str, found: dict[str, dict[str, Any]], tmp_path: Path) -> None:
        first, second = ranks(tmp_path, name, "on")
        if not BROADCASTS and name in ("loader", "slow_data", "gathers_slow_data"):
            found = {}  # nothing holds up the host, which loads while the GPU computes
        assert [cause for cause, _, _ in first["findings"]] == list(found)
        for cause, _, evidence in first["findings"]:
            assert found[cause].items() <= evidence.items()
        assert not first["profiler_on"]
        looked = [[note for note in each["notes"] if "torch.profiler recorded" in note] for each in (first, second)]
        assert [len(each) for each in looked] == [1, 0]

    def test_by_itself_no_rank_records(self, simulator: Simulator, tmp_path: Path) -> None:
        simulator.machine(*[Gpu(gpm={2: 10.0}, utilization=100)] * 2)
        first, second = ranks(tmp_path, "suspect", "auto", simulator)
        assert (first["verdict"], first["findings"]) == ("unknown", [])
        notes = [[note for note in each["notes"] if "torch.profiler" in note] for each in (first, second)]
        assert [len(each) for each in notes] == [1, 1]
        assert notes[0][0].endswith('StallDetector(profile="on") records three steps on rank 0.')
        assert "idle time inside the steps, which NVML's readings suggest and exposed communication" in notes[0][0]


class TestWhenThingsGoWrong:
    def test_events_refused_from_the_start(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        gpu.refuse_events()
        report = fit(gpu, tmp_path, module(gpu))
        assert (report.steps, report.findings, report.gpu_idle_s) == (STEPS, [], None)
        (note,) = [each for each in report.notes if "CUDA refused an event" in each]
        assert note.startswith("The GPU's times end here")

    def test_events_refused_in_mid_run_keep_what_was_read(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        later = At("on_train_epoch_start", lambda: gpu.refuse_events(after=400))
        report = fit(gpu, tmp_path, module(gpu, sample_s=0.025), later)
        assert causes(report) == ["main_process_loading"]
        assert len([each for each in report.notes if "CUDA refused an event" in each]) == 1

    def test_no_nvml(self, gpu: SimulatedGpu, simulator: Simulator, tmp_path: Path) -> None:
        simulator.machine()
        report = fit(gpu, tmp_path, module(gpu))
        assert (report.verdict, report.findings) == ("compute_bound", [])
        assert any(note.startswith("no GPU figures") for note in report.notes)

    def test_without_the_gpus_times_the_hosts_prove_nothing(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        gpu.refuse_events()
        report = fit(gpu, tmp_path, module(gpu, sample_s=0.008))  # 16 of 30 ms, behind the GPU
        assert (report.verdict, report.findings) == ("not_measured", [])

    def test_a_warm_up_that_the_gpu_has_still_to_do_is_no_part_of_the_rest(
        self, gpu: SimulatedGpu, tmp_path: Path
    ) -> None:
        gpu.pinned = True  # nothing makes the host wait: it is done long before the GPU

        class Compiles(SimulatedModule):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if batch_idx == 0:
                    self.gpu.launch(1.0)
                return super().training_step(batch, batch_idx)

        report = fit(gpu, tmp_path, Compiles(gpu, STEP, batches=1000))
        assert report.step_s == pytest.approx(0.031, rel=0.02)

    def test_a_users_profiler_between_two_recordings_is_left_alone(
        self, gpu: SimulatedGpu, nvml: Simulator, simulated_time: SimulatedTime, tmp_path: Path
    ) -> None:
        nvml.machine(Gpu(gpm={}))
        follow(gpu, nvml, simulated_time)
        schedule = torch.profiler.schedule(wait=100, warmup=1, active=1)
        profiler = torch.profiler.profile(schedule=schedule)
        profiler.start()
        at = At("on_train_batch_end", profiler.step)
        report = fit(gpu, tmp_path, module(gpu, MANY_KERNELS), at, steps=230)
        profiler.stop()
        assert (report.steps, report.verdict) == (230, "launch_bound")
        assert any("uses torch.profiler itself" in note for note in report.notes)

    def test_a_loader_that_changes_in_a_look_does_not_leave_it_on(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        modes: list[int] = []
        change = At("on_train_batch_start", lambda: modes.append(torch.cuda.get_sync_debug_mode()))
        model = module(gpu, sample_s=0.0, workers=1)
        detector = StallDetector(on_stall="ignore", window_size=20, warmup_steps=5, report_dir=tmp_path)

        class Changes(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                if torch.cuda.get_sync_debug_mode() and trainer.global_step < 40:
                    detector._session.loader.facts = replace(detector._session.loader.facts, num_workers=9)  # type: ignore[union-attr]
                    detector._session._epoch_seen = -1  # type: ignore[union-attr]

        fit(gpu, tmp_path, model, Bar(gpu), change, Changes(), detector=detector, steps=60)
        assert sum(mode != 0 for mode in modes) in (0, 3)

    def test_lazy_parameters_have_no_number_yet(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        model = module(gpu)
        model.lazy = torch.nn.LazyLinear(3)
        report = fit(gpu, tmp_path, model, steps=8)
        assert (report.steps, report.environment["model"]) == (8, "SimulatedModule (5 parameters)")

    def test_a_users_own_profiler_is_left_alone(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        with torch.profiler.profile() as profiler:
            report = fit(gpu, tmp_path, module(gpu), steps=20)
            profiler.step()
        assert report.steps == 20

    def test_manual_optimization_with_two_optimizers_and_accumulation(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        class Manual(SimulatedModule):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.automatic_optimization = False

            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                for optimizer in self.optimizers():  # type: ignore[union-attr]
                    optimizer.step()
                return loss

        report = fit(gpu, tmp_path, Manual(gpu, STEP, batches=1000), Bar(gpu), steps=2 * STEPS)
        assert (report.verdict, report.steps) == ("compute_bound", STEPS)
        accumulated = fit(gpu, tmp_path / "two", module(gpu), Bar(gpu), accumulate_grad_batches=3, steps=20)
        assert (accumulated.verdict, accumulated.steps) == ("compute_bound", 60)

    @pytest.mark.timed
    def test_a_loader_that_a_finder_mends_begins_a_new_part(
        self, real_gpu: SimulatedGpu, simulator: Simulator, tmp_path: Path
    ) -> None:
        simulator.machine(Gpu(gpm={}))
        real_gpu.follow_nvml(simulator)
        model = module(real_gpu, sample_s=0.03, workers=1)
        report = fit(real_gpu, tmp_path, model, NumWorkersFinder(), Bar(real_gpu), steps=200)
        assert "launch_bound" not in causes(report)
        assert report.loader.num_workers > 1

    def test_the_windows_figures_are_the_gpus(self, gpu: SimulatedGpu, tmp_path: Path) -> None:
        logger = RecordingLogger()
        fit(gpu, tmp_path, module(gpu), Bar(gpu), logger=logger, steps=65)
        times = [metrics["step/time_s"] for _, metrics in logger.records if "step/time_s" in metrics]
        assert times[1:] == pytest.approx([0.031] * (len(times) - 1), rel=0.02)
        stalls = [metrics["stall/count"] for _, metrics in logger.records if "stall/count" in metrics]
        assert set(stalls) == {0.0}

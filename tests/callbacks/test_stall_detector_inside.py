"""What StallDetector sees inside the step of a simulated GPU: waits, copies, hooks with kernels, no NVML to trust."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.detector import profiling_passes
from lightning_gpuopt.detector.kernel_profiling import Profile
from tests.callbacks.gpu_fit import MANY_KERNELS, STEP, WARMUP_STEPS, At, Stretch, causes, fit, follow, module
from tests.lanes import combinations
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work
from tests.simulators.nvml import Gpu, Simulator
from tests.simulators.simulated_time import SimulatedTime

in_matrix = partial(pytest.param, marks=pytest.mark.matrix)

LONG = 260
FORWARD_AND_SLOW_BACKWARD = Step(
    Work(0.05, 10, 0.005, "forward"), Work(0.015, 20, 0.04, "backward"), Work(0.002, 2, 0.004)
)
"""Without a wait after the forward the host's 49 ms are hidden behind the GPU's 67."""


@pytest.fixture
def watched(gpu: SimulatedGpu, nvml: Simulator, simulated_time: SimulatedTime) -> SimulatedGpu:
    nvml.machine(Gpu(gpm={}))
    follow(gpu, nvml, simulated_time)
    return gpu


class Waits(SimulatedModule):
    """Waits for the GPU after the forward."""

    how = ""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.how == "cpu":
            loss.detach().cpu()  # the wait
        elif self.how == "synchronize":
            torch.cuda.synchronize()  # the wait
        else:
            torch.cuda.current_stream().synchronize()  # the wait
        return loss


class Offloads(SimulatedModule):
    """Copies its gradients to the host at the end of the step, and the weights back."""

    def __init__(self, gpu: SimulatedGpu, seconds: float, *, pinned: bool) -> None:
        super().__init__(gpu, Step(Work(0.015, 4, 0.002), Work(0.025, 4, 0.002)), batches=10_000)
        self.seconds, self.pinned = seconds, pinned

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.gpu.copy(self.seconds, "d2h", pinned=self.pinned, nbytes=30_000_000)
        self.gpu.copy(self.seconds, "h2d", pinned=self.pinned, nbytes=30_000_000)


def waits(gpu: SimulatedGpu, how: str) -> Waits:
    model = Waits(gpu, FORWARD_AND_SLOW_BACKWARD, batches=10_000)
    model.how = how
    return model


READS: dict[str, Callable[[SimulatedGpu, torch.Tensor], object]] = {
    "item": lambda gpu, value: value.item(),
    "float": lambda gpu, value: float(value),
    "bool": lambda gpu, value: bool(value),
    "tolist": lambda gpu, value: value.tolist(),
    "cpu": lambda gpu, value: value.cpu(),
    "nonzero": lambda gpu, value: value.nonzero(),
    "format": lambda gpu, value: f"{value:.2f}",
    "stream": lambda gpu, value: torch.cuda.current_stream().synchronize(),
    "event": lambda gpu, value: torch.cuda.current_stream().record_event().synchronize(),
    "device": lambda gpu, value: torch.cuda.synchronize(),
}
"""Ways of waiting for the GPU."""


class TestWaits:
    @pytest.mark.parametrize(
        ("how", "line"), [("cpu", "loss.detach().cpu()"), ("synchronize", "torch.cuda.synchronize()"), ("stream", "")]
    )
    def test_each_kind_of_wait_is_a_sync_with_its_line(
        self, watched: SimulatedGpu, tmp_path: Path, how: str, line: str
    ) -> None:
        report = fit(watched, tmp_path, waits(watched, how), steps=120)
        assert causes(report) == ["gpu_sync"]
        (finding,) = report.findings
        assert finding.share == pytest.approx(29 / 97, abs=0.03)
        wanted = line or "torch.cuda.current_stream().synchronize()"
        source = Path(__file__).read_text().splitlines()
        number = next(index for index, text in enumerate(source, 1) if f"{wanted}  # the wait" in text)
        assert f"test_stall_detector_inside.py:{number}" in str(finding.evidence["where"])
        assert finding.evidence["syncs_per_step"] == 1.0

    @combinations(
        "item-True bool-False cpu-True format-False stream-True event-False device-True",
        how=list(READS),
        warns_first=[False, True],
    )
    def test_however_a_step_waits_it_is_counted_once(
        self, watched: SimulatedGpu, tmp_path: Path, how: str, warns_first: bool
    ) -> None:
        watched.sync_debug.warns_first = warns_first
        value = watched.tensor(1.0)

        class Reads(SimulatedModule):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = super().training_step(batch, batch_idx)
                READS[how](watched, value)
                return loss

        report = fit(watched, tmp_path, Reads(watched, FORWARD_AND_SLOW_BACKWARD, batches=10_000), steps=80)
        assert causes(report) == ["gpu_sync"]
        assert report.findings[0].evidence["syncs_per_step"] == 1.0

    def test_without_a_wait_the_host_is_ahead(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        report = fit(watched, tmp_path, module(watched, FORWARD_AND_SLOW_BACKWARD), steps=120)
        assert (report.verdict, report.findings) == ("compute_bound", [])


class TestCopies:
    @pytest.mark.parametrize("pinned", [True, in_matrix(False)])
    def test_an_offloaded_optimizer(self, watched: SimulatedGpu, tmp_path: Path, pinned: bool) -> None:
        report = fit(watched, tmp_path, Offloads(watched, 0.03, pinned=pinned), steps=80)
        assert causes(report) == ["device_copies"]
        (finding,) = report.findings
        assert finding.share == pytest.approx(0.6, abs=0.02)
        assert finding.evidence["direction"] == "both"
        assert finding.evidence["bytes_per_step"] == 60_000_000
        assert finding.evidence["gb_per_s"] == pytest.approx(1.0, rel=0.01)
        assert finding.predicted_speedup is not None
        assert finding.predicted_speedup[1] == pytest.approx(100.5 / 60, rel=0.03)  # hidden behind the kernels, at best
        assert ("pageable" in finding.advice) is not pinned

    def test_a_copy_beside_kernels_costs_nothing(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        side = watched.new_queue()

        class Copies(SimulatedModule):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                self.gpu.copy(0.02, "d2h", stream=side, nbytes=1_000_000)
                return super().training_step(batch, batch_idx)

        report = fit(watched, tmp_path, Copies(watched, FORWARD_AND_SLOW_BACKWARD, batches=10_000), steps=120)
        assert (report.verdict, report.findings) == ("compute_bound", [])


class TestHooks:
    @combinations(
        "item-0-False float-4-True cpu-4-False nonzero-0-True stream-4-False event-0-True device-4-True",
        how=list(READS),
        kernels=[0, 4],
        warns_first=[False, True],
    )
    def test_however_a_hook_waits_what_is_queued_is_no_idle_time(
        self, gpu: SimulatedGpu, tmp_path: Path, how: str, kernels: int, warns_first: bool
    ) -> None:
        gpu.sync_debug.warns_first = warns_first
        value = gpu.tensor(1.0)

        def metric() -> None:
            if kernels:
                gpu.issue(kernels, 0.00001, 0.005, name="metric")
            READS[how](gpu, value)
            gpu.clock.sleep_until(gpu.clock() + 0.002)

        ends = Stretch()
        model = module(gpu, Step(Work(0.02, 4, 0.0), Work(0.02, 4, 0.0)))
        report = fit(gpu, tmp_path, model, At("on_train_batch_end", metric), ends, steps=60, profile="off")
        assert report.findings == []
        assert report.gpu_idle_s is not None
        true_s = gpu.ledger.idle_s(ends.ends[WARMUP_STEPS - 1], ends.ends[-1])
        assert abs(report.gpu_idle_s - true_s) / (60 - WARMUP_STEPS) < 0.0003

    @pytest.mark.parametrize("profile", ["on", in_matrix("auto"), in_matrix("off")])
    def test_kernels_that_a_hook_waits_for_are_work(self, gpu: SimulatedGpu, tmp_path: Path, profile: Profile) -> None:
        def metric() -> None:
            gpu.issue(4, 0.00001, 0.002, name="metric")
            gpu.item()

        ends = Stretch()
        model = module(gpu, Step(Work(0.02, 4, 0.0), Work(0.02, 4, 0.0)))
        report = fit(gpu, tmp_path, model, At("on_train_batch_end", metric), ends, steps=80, profile=profile)
        assert report.findings == []
        assert report.gpu_idle_s is not None
        true_s = gpu.ledger.idle_s(ends.ends[WARMUP_STEPS - 1], ends.ends[-1])
        assert abs(report.gpu_idle_s - true_s) / (80 - WARMUP_STEPS) < 0.0002

    @pytest.mark.parametrize("warns_first", [False, True], ids=["warns on return", "warns first"])
    def test_what_a_call_does_after_its_wait_is_idle_time(
        self, gpu: SimulatedGpu, tmp_path: Path, warns_first: bool
    ) -> None:
        gpu.sync_debug.warns_first = warns_first
        gpu.list_s = 0.03
        values, ends = gpu.tensor([1.0, 2.0]), Stretch()

        def lists() -> None:
            gpu.launch(0.005, name="metric")
            values.tolist()

        model = module(gpu, Step(Work(0.02, 4, 0.0), Work(0.02, 4, 0.0)))
        report = fit(gpu, tmp_path, model, At("on_train_batch_end", lists), ends, steps=60, profile="off")
        assert causes(report) == ["callback"]
        assert report.gpu_idle_s is not None
        true_s = gpu.ledger.idle_s(ends.ends[WARMUP_STEPS - 1], ends.ends[-1])
        assert report.gpu_idle_s == pytest.approx(true_s, rel=0.05)

    def test_what_a_hook_does_after_its_wait_is_idle_time_as_before(
        self, watched: SimulatedGpu, tmp_path: Path
    ) -> None:
        def metric() -> None:
            watched.launch(0.008, name="metric")
            watched.item()
            torch.zeros(1)
            watched.clock.sleep_until(watched.clock() + 0.02)

        model = module(watched, Step(Work(0.02, 4, 0.002), Work(0.02, 4, 0.002)))
        report = fit(watched, tmp_path, model, At("on_train_batch_end", metric), steps=80)
        assert causes(report) == ["callback"]
        assert report.findings[0].share == pytest.approx(20 / 71, abs=0.02)

    def test_work_that_an_epochs_hook_queues_is_no_part_of_a_step(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        model = SimulatedModule(watched, Step(Work(0.005, 4, 0.001), Work(0.0055, 4, 0.001)), batches=20)
        hook = At("on_train_epoch_end", lambda: watched.launch(2.0, name="average"))
        report = fit(watched, tmp_path, model, hook, max_steps=-1, max_epochs=5)
        assert report.step_s == pytest.approx(0.011, rel=0.05)
        assert report.headroom is not None
        assert report.headroom < 0.1


class TestRhythm:
    def test_steps_of_each_kind_are_recorded_however_late_their_rhythm_is_set(
        self, watched: SimulatedGpu, tmp_path: Path
    ) -> None:
        recorded: list[int] = []

        class Sees(Callback):
            steps = 0

            def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
                recorded.extend([self.steps] if watched.tracer is not None else [])
                self.steps += 1

        schedule = GradientAccumulationScheduler({0: 1, 1: 6})
        model = SimulatedModule(watched, MANY_KERNELS, batches=60)
        fit(watched, tmp_path, model, Sees(), schedule, max_steps=-1, max_epochs=2, profile="auto")
        assert recorded == list(range(120 - 9, 120 - 2))  # a step of warm-up, and six


class TestWhatNvmlDoesNotShow:
    """Many small kernels, which leave the GPU idle for 24 of 33 ms."""

    @pytest.mark.parametrize(
        "device",
        [
            pytest.param(Gpu(utilization=100, gpm={}, processes=[1, 4712]), id="a neighbour"),
            pytest.param(Gpu(utilization=92, gpm={}), id="launch gaps that it counts as work"),
        ],
    )
    def test_the_gpus_events_are_reason_enough_to_look(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path, device: Gpu
    ) -> None:
        nvml.machine(device)
        report = fit(gpu, tmp_path, module(gpu, MANY_KERNELS), steps=LONG)
        assert causes(report) == ["launch_bound"]
        assert report.findings[0].share == pytest.approx(24 / 33, abs=0.02)

    @pytest.mark.parametrize(
        ("device", "verdict"),
        [
            (Gpu(utilization=100, gpm={}, processes=[1, 4712]), "unknown"),
            in_matrix(Gpu(utilization=100, gpm={}), "compute_bound"),
        ],
    )
    def test_where_no_look_is_allowed_the_verdict_is_unknown_unless_nvml_can_be_trusted(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path, device: Gpu, verdict: str
    ) -> None:
        nvml.machine(device)
        report = fit(gpu, tmp_path, module(gpu, MANY_KERNELS), steps=LONG, profile="off")
        assert (report.verdict, report.findings) == (verdict, [])

    @pytest.mark.parametrize(
        ("step", "profile", "verdict"),
        [
            (MANY_KERNELS, "auto", "launch_bound"),
            (MANY_KERNELS, "off", "unknown"),
            in_matrix(STEP, "off", "compute_bound"),  # the host is ahead
        ],
    )
    def test_without_utilization_as_on_a_mig_instance_the_events_decide(
        self, gpu: SimulatedGpu, simulator: Simulator, tmp_path: Path, step: Step, profile: Profile, verdict: str
    ) -> None:
        simulator.machine(Gpu(utilization=None, gpm={}))
        gpu.pinned = True  # copies do not make the host wait
        report = fit(gpu, tmp_path, module(gpu, step), steps=LONG, profile=profile)
        assert report.verdict == verdict


class LaunchesInBackward(torch.autograd.Function):
    """Does nothing in forward, and calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, launch: Callable[[], None]) -> torch.Tensor:
        ctx.launch = launch
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.launch()
        return gradients[0], None


class Named(SimulatedModule):
    """A small network whose parts launch kernels of their own in forward and backward."""

    class Part(torch.nn.Module):
        def __init__(self, gpu: SimulatedGpu, name: str, seconds: float) -> None:
            super().__init__()
            self.gpu, self.name, self.seconds = gpu, name, seconds
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.gpu.launch(self.seconds, name=self.name)
            launch = partial(self.gpu.launch, 2 * self.seconds, name=self.name)
            out: torch.Tensor = LaunchesInBackward.apply(self.linear(values), launch)  # type: ignore[no-untyped-call]
            return out

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__(gpu, Step(optimizer=Work(0.002, 4, 0.0001, "multi_tensor")), batches=10_000)
        self.net = torch.nn.Sequential(
            Named.Part(gpu, "ampere_sgemm_128x64_tn", 0.004), Named.Part(gpu, "flash_fwd_kernel", 0.002)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss: torch.Tensor = self.net(inputs).pow(2).mean()
        return loss


class TestWhatAStepComputes:
    def test_by_kind_by_kernel_and_by_module(
        self, watched: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(profiling_passes, "has_compiled", lambda: False)
        report = fit(watched, tmp_path, Named(watched), steps=60, profile="on")
        assert {kind: share for kind, share in report.kernel_kinds.items() if share > 0.001} == pytest.approx(
            {"matmul": 12 / 20, "attention": 6 / 20, "optimizer": 2 / 20}, abs=0.01
        )
        first, second, third = report.kernels[:3]
        assert (first.name, first.kind, first.module) == ("ampere_sgemm_128x64_tn", "matmul", "net.0")
        assert (first.share, first.calls_per_step) == (pytest.approx(0.6, abs=0.01), 2.0)
        assert (second.name, second.kind, second.module) == ("flash_fwd_kernel", "attention", "net.1")
        assert (third.name, third.kind, third.module) == ("multi_tensor", "optimizer", "")
        assert "ampere_sgemm_128x64_tn" in str(report)
        assert report.kernel_summary["ms_per_step"] == pytest.approx(20, rel=0.02)
        assert report.kernel_summary["unassigned_share"] == pytest.approx(2 / 20, abs=0.01)
        assert report.kernel_summary["short_share"] == pytest.approx(0.0, abs=0.001)
        assert StallReport.from_json(report.to_json()) == report

    def test_a_healthy_run_says_how_to_have_it(self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path) -> None:
        nvml.machine(Gpu(utilization=100, gpm={}))
        gpu.pinned = True
        report = fit(gpu, tmp_path, module(gpu, FORWARD_AND_SLOW_BACKWARD), steps=60)
        assert (report.verdict, report.kernels, report.kernel_kinds) == ("compute_bound", [], {})
        assert any(note.startswith("The steps' kernels were not recorded") for note in report.notes)

    def test_no_hooks_once_anything_was_compiled(
        self, watched: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(profiling_passes, "has_compiled", lambda: True)
        report = fit(watched, tmp_path, Named(watched), steps=60, profile="on")
        assert {each.module for each in report.kernels} == {""}
        assert report.kernel_kinds["matmul"] == pytest.approx(12 / 20, abs=0.01)


class TestWitnesses:
    def test_a_neighbour_is_named_where_nvml_counts_its_work(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path
    ) -> None:
        neighbour, name = os.getppid(), Path(f"/proc/{os.getppid()}/comm").read_text().strip()
        nvml.machine(Gpu(utilization=100, gpm={}, processes=[os.getpid(), neighbour]))
        report = fit(gpu, tmp_path, module(gpu, MANY_KERNELS), steps=LONG)
        (note,) = [each for each in report.notes if each.startswith("NVML has the GPU idle")]
        assert f"another process computes on it, which NVML counts: {name} (pid {neighbour})" in note
        assert report.idle_shares["nvml"] == 0.0
        assert report.idle_shares["records"] == pytest.approx(24 / 33, abs=0.03)
        assert report.findings[0].confidence == "medium"

    def test_processes_that_this_one_has_started_are_no_neighbours(
        self, gpu: SimulatedGpu, nvml: Simulator, tmp_path: Path
    ) -> None:
        with subprocess.Popen(["sleep", "100"]) as worker:
            try:
                nvml.machine(Gpu(utilization=100, gpm={}, processes=[os.getpid(), worker.pid]))
                report = fit(gpu, tmp_path, module(gpu, MANY_KERNELS), steps=LONG, profile="off")
            finally:
                worker.kill()
        assert (report.verdict, report.findings) == ("compute_bound", [])


class TestTheEnd:
    def test_a_gpu_that_never_finishes_does_not_hold_it_up(self, watched: SimulatedGpu, tmp_path: Path) -> None:
        def hang() -> None:
            if watched.tracer is not None and watched.tracer.start_s is not None:
                watched.launch(1e6, name="never")
                raise ZeroDivisionError

        detector = StallDetector(
            on_stall="ignore", window_size=20, warmup_steps=WARMUP_STEPS, report_dir=tmp_path, profile="on"
        )
        begin_s = watched.clock()
        with pytest.raises(ZeroDivisionError):
            fit(
                watched,
                tmp_path,
                module(watched, MANY_KERNELS),
                At("on_train_batch_start", hang),
                steps=LONG,
                detector=detector,
            )
        assert watched.clock() - begin_s < 1000
        assert any("was not stopped" in note for note in detector.report.notes)

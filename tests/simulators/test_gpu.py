"""The simulated GPU as torch and Lightning see it; the device itself and the ranks: tests/simulators/gpu/test_*.py."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from lightning.pytorch import Callback
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tests.helpers import tiny_trainer
from tests.simulators.gpu import (
    Device,
    DeviceTensor,
    ManualClock,
    SimulatedGpu,
    SimulatedModule,
    Step,
    Work,
    simulated_gpu,
)
from tests.simulators.nvml import Gpu, Simulator

BEGIN_S = 100.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(BEGIN_S)


@pytest.fixture
def gpu(clock: ManualClock) -> Iterator[SimulatedGpu]:
    with simulated_gpu(clock) as gpu:
        yield gpu


def seconds(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def activities(device: Device) -> list[tuple[str, float, float]]:
    device.refresh()
    return [
        (each.name, seconds(each.start_s - BEGIN_S), seconds(each.end_s - BEGIN_S)) for each in device.ledger.activities
    ]


# ---- events ----


def event(timing: bool = True) -> Any:
    return torch.cuda.Event(enable_timing=timing)


def test_an_event_is_stamped_when_it_is_recorded_and_the_stream_has_drained(gpu, clock):
    begin, drained, later = event(), event(), event()
    begin.record()
    gpu.launch(0.1)
    drained.record()
    assert begin.query()
    assert not drained.query()
    clock.advance(0.3)
    later.record()
    assert drained.query()
    assert begin.elapsed_time(drained) == seconds(100.0)
    assert drained.elapsed_time(later) == seconds(200.0)
    assert later.stamp_s == clock()


def test_a_host_that_synchronizes_with_an_event_waits_for_no_more(gpu, clock):
    middle = event()
    gpu.launch(0.1)
    middle.record()
    gpu.launch(0.1)
    middle.synchronize()
    assert clock() == seconds(BEGIN_S + 0.1)


def test_events_fail_in_torchs_own_words(gpu):
    never, done, untimed, pending = event(), event(), event(timing=False), event()
    done.record()
    untimed.record()
    gpu.launch(0.1)
    pending.record()
    assert never.query()
    with pytest.raises(ValueError, match="must be recorded before calculating elapsed time"):
        done.elapsed_time(never)
    with pytest.raises(ValueError, match="must be created with argument 'enable_timing=True'"):
        done.elapsed_time(untimed)
    with pytest.raises(RuntimeError, match="must be completed before calculating elapsed time"):
        done.elapsed_time(pending)


def test_events_can_be_refused_as_in_a_graphs_capture(gpu):
    gpu.refuse_events(after=1)
    event().record()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        event().record()
    gpu.accept_events()
    event().record()


def test_side_streams_through_torch(gpu, clock):
    side = torch.cuda.Stream()
    gpu.launch(0.1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        gpu.launch(0.1, name="side")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not side.query()
    torch.cuda.current_stream().synchronize()
    assert clock() == seconds(BEGIN_S + 0.1)
    torch.cuda.synchronize()
    assert activities(gpu)[1] == ("side", 0.1, 0.2)


# ---- tensors and waits ----


def test_reading_a_value_waits_for_the_stream_and_arithmetic_does_not(gpu, clock):
    gpu.item_s = 0.0
    loss = (gpu.tensor([1.0, 3.0]) * 2).mean().detach()
    reads = [loss.item, loss.cpu, loss.tolist, lambda: float(loss), lambda: bool(loss), lambda: f"{loss:.1f}", gpu.item]
    for number, read in enumerate(reads, start=1):
        gpu.launch(0.1)
        assert type(loss + 1) is DeviceTensor
        read()
        assert clock() == seconds(BEGIN_S + 0.1 * number)
    assert loss.item() == 4.0
    assert type(loss.cpu()) is torch.Tensor


def test_a_batch_goes_to_the_device_and_back(gpu, clock):
    gpu.bandwidth = gpu.pageable_bandwidth = 4000.0
    there = torch.ones(100).pin_memory().to("cuda", non_blocking=True)
    assert clock() == BEGIN_S
    assert (there.device.type, there.is_cuda, there.to("cuda") is not None) == ("cuda", True, True)
    torch.ones(100).to(torch.device("cuda", 0), non_blocking=True)
    assert clock() == seconds(BEGIN_S + 0.2)
    assert not there.to("cpu").is_cuda
    assert [name for name, *_ in activities(gpu)] == [
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pageable)",
    ]


def test_factories_make_device_tensors_and_only_those_with_data_wait(gpu, clock):
    gpu.launch(0.1)
    assert type(torch.zeros(2, device="cuda")) is DeviceTensor
    assert clock() == BEGIN_S
    assert type(torch.tensor([1.0], device=torch.device("cuda", 0))) is DeviceTensor
    assert clock() > BEGIN_S
    assert type(torch.tensor([1.0])) is torch.Tensor


def test_each_synchronizing_call_warns_at_the_users_line(gpu):
    value = gpu.tensor(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.set_sync_debug_mode(1)
        assert torch.cuda.get_sync_debug_mode() == 1
        value.item()
        float(value)
        torch.cuda.synchronize()
        torch.ones(2).to("cuda", non_blocking=True)
    about, *calls = caught
    assert "Synchronization debug mode is a prototype feature" in str(about.message)
    assert [str(each.message)[:61] for each in calls] == [
        "called a synchronizing CUDA operation (Triggered internally at"[:61]
    ] * 2
    assert {(each.filename, each.category) for each in calls} == {(__file__, UserWarning)}
    assert calls[1].lineno == calls[0].lineno + 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=r"^called a synchronizing CUDA operation$"):
        value.item()
    torch.cuda.set_sync_debug_mode(0)


@pytest.mark.parametrize(("warns_first", "at_s"), [(False, 0.1), (True, 0.0)])
def test_a_synchronizing_call_warns_when_it_returns_as_torchs_bindings_do(gpu, clock, warns_first, at_s):
    value = gpu.tensor(1.0)
    gpu.item_s = 0.0
    gpu.sync_debug.warns_first = warns_first
    torch.cuda.set_sync_debug_mode("warn")
    warned = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *of_warning: warned.append(clock() - BEGIN_S)
        gpu.launch(0.1)
        value.item()
    torch.cuda.set_sync_debug_mode(0)
    assert warned == [pytest.approx(at_s)]


def test_of_a_synchronizing_call_a_profile_function_sees_the_beginning_only(gpu):
    value, seen = gpu.tensor(1.0), []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *of_warning: seen.append("warned")
        sys.setprofile(lambda frame, event, argument: seen.append(Path(frame.f_code.co_filename).name))
        value.item()
        sys.setprofile(None)
    torch.cuda.set_sync_debug_mode(0)
    before = [each for each in seen[: seen.index("warned")] if each != "warnings.py"]
    assert set(before) <= {"tensors.py", "gpu.py", "syncs.py", "contextlib.py", "pathlib.py", "test_gpu.py"}
    assert "device.py" not in seen


# ---- torch.cuda, the allocator, NVML ----


def test_torch_sees_a_gpu_while_it_is_installed(gpu):
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_name(0) == "Simulated GPU"
    gpu.memory["num_alloc_retries"] = 3
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 3
    gpu.memory["allocated_bytes.all.current"] = 7
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 7
    torch.manual_seed(0)


def test_after_an_error_the_gpu_is_gone(clock, simulator):
    def names() -> list[Any]:
        return [torch.tensor, torch.Tensor.to, torch.Tensor.is_pinned, torch.profiler.profile, torch.cuda.Event]

    def fail() -> None:
        with simulated_gpu(clock) as gpu:
            gpu.follow_nvml(simulator)
            assert all(now is not then for now, then in zip(names(), before, strict=True))
            raise KeyError

    before = names()
    with pytest.raises(KeyError):
        fail()
    assert names() == before
    assert not torch.cuda.is_available()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sim-")]


def test_a_second_gpu_and_an_unknown_setting_are_refused(gpu):
    with pytest.raises(RuntimeError, match="installed already"), simulated_gpu():
        pass
    assert torch.cuda.is_available()
    with pytest.raises(TypeError, match="no setting 'copys'"), simulated_gpu(copys=1):
        pass


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_pinning_loader_gives_pinned_batches(gpu, num_workers):
    loader = SimulatedModule(gpu, batches=2, pin_memory=True, num_workers=num_workers).train_dataloader()
    assert loader.pin_memory
    assert [batch[0].is_pinned() for batch in loader] == [True, True]
    assert not torch.ones(1).is_pinned()


def test_nvml_follows_the_device(simulator: Simulator, gpu: SimulatedGpu, clock: ManualClock) -> None:
    (listed,) = simulator.machine(Gpu())
    assert str(torch.cuda.get_device_properties(0).uuid) in listed.uuid
    pynvml.nvmlLib, library = simulator._c, pynvml.nvmlLib
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        follower = gpu.follow_nvml(simulator, window_s=0.2, interval_s=3600.0)
        gpu.launch(0.05)
        clock.advance(0.05)
        gpu.copy(0.05)
        clock.advance(0.15)
        follower.update()
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 25
        follower.set("sm_clock", 1200)
        assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 1200
    finally:
        pynvml.nvmlShutdown()
        pynvml.nvmlLib = library


# ---- torch.profiler ----


def test_the_profiler_records_what_lies_inside_its_window(gpu, clock, tmp_path):
    ready: list[Any] = []
    gpu.launch(0.1, name="before")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=ready.append) as prof:
        for step in range(6):
            gpu.launch(0.1, name=f"kernel{step}")
            gpu.copy(0.02)
            gpu.all_reduce(0.01)
            gpu.item()
            prof.step()
    assert ready == [prof]
    events = prof.events()
    drawn = ("gpu_user_annotation", "cuda_sync")  # on the device, and no work
    on_device = [
        each
        for each in events
        if each.device_type == DeviceType.CUDA and not each.name.startswith(("ProfilerStep", "Stream Synchronize"))
    ]
    names = [each.name for each in on_device]
    assert names[:4] == [
        "kernel2",
        "Memcpy HtoD (Pinned -> Device)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "Memcpy DtoH (Device -> Pinned)",
    ]
    assert names[4] == "kernel3"
    assert len(names) == 8
    assert on_device[0].time_range.end - on_device[0].time_range.start == pytest.approx(100_000)
    assert (on_device[0].device_index, on_device[0].device_resource_id) == (0, 7)
    runtime = {each.name: each for each in events if each.name.startswith("cuda")}
    assert set(runtime) >= {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"}
    assert runtime["cudaLaunchKernel"].thread == threading.get_native_id()
    kineto = prof.profiler.kineto_results
    kernel = next(each for each in kineto.events() if each.name() == "kernel2")
    assert kernel.start_ns() >= kineto.trace_start_ns()
    assert kernel.duration_ns() == pytest.approx(1e8, abs=2)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {each["cat"] for each in trace} == {"kernel", "gpu_memcpy", "cuda_runtime", "user_annotation", *drawn}


def test_the_profiler_can_refuse_be_blind_and_cost(gpu, clock):
    gpu.profiling.refuses = True
    with pytest.raises(RuntimeError, match="already enabled"):
        torch.profiler.profile().start()
    gpu.profiling.refuses = False
    gpu.profiling.blind, gpu.profiling.launch_cost_s, gpu.profiling.slowdown_after = True, 0.01, 0.5
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        gpu.launch(0.1)
        assert clock() == seconds(BEGIN_S + 0.01)
    assert list(prof.events()) == []
    begin_s = clock()
    gpu.launch(0.1)
    gpu.synchronize()
    assert clock() == seconds(begin_s + 0.15)


# ---- a real Trainer ----


class Steps(Callback):
    """When each step ended on the host, and where the gaps were."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends_s.append(self.gpu.clock())


class Logging(SimulatedModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


WORK = Step(forward=Work(0.02), backward=Work(0.04, kernels=4), optimizer=Work(0.002))


def run(gpu: SimulatedGpu, tmp_path: Path, module: SimulatedModule, **kwargs: Any) -> Steps:
    steps = Steps(gpu)
    trainer = tiny_trainer(tmp_path, **gpu.trainer_arguments(), callbacks=[steps], max_steps=6, **kwargs)
    trainer.fit(module)
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert module.layer.weight.device.type == "cpu"
    return steps


@pytest.mark.parametrize("pinned", [False, True])
def test_a_fit_with_batches_copied_by_lightning(gpu, clock, tmp_path, pinned):
    gpu.copy_s = 0.01
    steps = run(gpu, tmp_path, SimulatedModule(gpu, WORK, pin_memory=pinned))
    gpu.synchronize()
    kernels = [each for each in gpu.ledger.activities if each.kind == "kernel"]
    copies = [each for each in gpu.ledger.activities if each.end_s - each.start_s > 0.005 and each.kind == "copy"]
    assert (len(kernels), len(copies)) == (36, 6)
    assert gpu.ledger.busy_s(BEGIN_S, clock()) == seconds(6 * 0.062)
    assert gpu.ledger.idle_s(copies[0].start_s, kernels[-1].end_s) == seconds(6 * 0.01)  # in order on one stream
    if pinned:
        assert steps.ends_s[-1] == steps.ends_s[0]  # the host runs ahead
    else:
        assert steps.ends_s[-1] == seconds(copies[-1].end_s)


def test_a_progress_bar_that_shows_a_loss_waits_at_each_step(gpu, clock, tmp_path, capsys):
    gpu.copy_s, gpu.item_s = 0.01, 0.0
    module = Logging(gpu, WORK, pin_memory=True)
    steps = run(gpu, tmp_path, module, enable_progress_bar=True)
    lengths = [later - sooner for sooner, later in zip(steps.ends_s[1:], steps.ends_s[2:], strict=False)]
    assert lengths == [seconds(0.072)] * 4


@pytest.mark.timed
def test_a_fit_on_real_time(tmp_path):
    with simulated_gpu(copy_s=0.001) as gpu:
        begin_s = time.perf_counter()
        run(gpu, tmp_path, SimulatedModule(gpu, Step(Work(0.005))))
        gpu.synchronize()
        assert time.perf_counter() - begin_s >= 6 * 0.006
        assert gpu.ledger.busy_s(begin_s, time.perf_counter()) == seconds(6 * 0.005)

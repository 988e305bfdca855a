"""The sampler: driven by hand for what it computes, on its thread for how it begins and ends."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pynvml
import pytest

from lightning_gpuopt.telemetry.nvml import NvmlSession, NvmlUnavailableError
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.telemetry.visible import Chosen, CudaOrdinal, DeviceNotFoundError, NvmlDevice
from lightning_gpuopt.telemetry.window import Stat, merge
from tests.helpers import Clock, wait_for
from tests.simulators.nvml import AMPERE, Gpu, Simulator, error, hang, odd, slow

LAST_CALL = "nvmlDeviceGetUtilizationRates"


def choose_all(listed: Sequence[NvmlDevice]) -> list[Chosen]:
    return [Chosen(device, CudaOrdinal(i)) for i, device in enumerate(listed)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def by_hand(simulator: Simulator, clock: Clock) -> Iterator[Callable[..., GpuSampler]]:
    """``by_hand(readings)``: an open sampler without a thread."""
    opened: list[GpuSampler | NvmlSession] = []

    def open_one(*readings: str, choose=choose_all) -> GpuSampler:
        session = NvmlSession()
        sampler = GpuSampler(readings, choose, interval_s=0.1, clock=clock)
        opened.extend([session, sampler])
        sampler.open(session)
        return sampler

    yield open_one
    for each in reversed(opened):
        each.close()


@pytest.fixture
def on_thread(simulator: Simulator) -> Iterator[Callable[..., GpuSampler]]:
    """``on_thread(readings)``: a started sampler."""
    started: list[GpuSampler] = []

    def start_one(*readings: str, choose=choose_all, interval_s: float = 0.001) -> GpuSampler:
        sampler = GpuSampler(readings, choose, interval_s=interval_s)
        started.append(sampler)
        sampler.start()
        return sampler

    yield start_one
    simulator.release()
    for sampler in started:
        assert sampler.stop(10)


def only(windows) -> dict[str, Stat]:
    (window,) = windows
    return dict(window.stats)


# ---- what it computes ----


def test_a_cut_takes_what_came_since_the_last_one(simulator, by_hand):
    simulator.machine(Gpu(utilization=[50, 90, 10]))
    sampler = by_hand("utilization")
    sampler.read_once()
    sampler.read_once()
    assert only(sampler.cut()) == {"utilization": Stat(140.0, 2.0, 50.0, 90.0)}
    assert only(sampler.cut()) == {}
    sampler.read_once()
    assert only(sampler.cut()) == {"utilization": Stat(10.0, 1.0, 10.0, 10.0)}


def test_a_peek_takes_nothing(simulator, by_hand):
    simulator.machine(Gpu(utilization=50))
    sampler = by_hand("utilization")
    sampler.read_once()
    assert only(sampler.peek()) == only(sampler.peek()) == only(sampler.cut()) != {}


def test_each_device_has_its_window_and_its_names(simulator, by_hand):
    first, second = simulator.machine(Gpu(utilization=90), Gpu(utilization=50))
    sampler = by_hand("utilization")
    sampler.read_once()
    windows = sampler.cut()
    assert [(w.uuid, w.nvml_index, w.ordinal) for w in windows] == [(first.uuid, 0, 0), (second.uuid, 1, 1)]
    assert [w.stats["utilization"].mean for w in windows] == [90.0, 50.0]


def test_gpm_means_are_weighted_by_the_length_of_their_windows(simulator, by_hand, clock):
    simulator.machine(Gpu(gpm={2: [10.0, 70.0]}))
    sampler = by_hand("sm_activity")
    for seconds in (0.2, 0.6, 0.0):
        sampler.read_once()
        clock.now_s += seconds
    assert only(sampler.cut())["sm_activity"].mean == pytest.approx((0.2 * 10 + 0.6 * 70) / 0.8)


def test_throttling_is_the_share_of_readings(simulator, by_hand, clock):
    simulator.machine(Gpu(clock_reasons=[0x4, 0, 0x1, 0x60]))
    sampler = by_hand("throttled_percent")
    for _ in range(4):
        sampler.read_once()
        clock.now_s += 0.5
    assert only(sampler.cut())["throttled_percent"].mean == 50.0


def test_a_lost_gpu_is_told_once_and_the_others_go_on(simulator, by_hand):
    first, _ = simulator.machine(Gpu(), Gpu())
    sampler = by_hand("utilization", "sm_activity")
    sampler.read_once()
    sampler.cut()
    simulator.now(error("*", pynvml.NVML_ERROR_GPU_IS_LOST, device=0))
    for _ in range(3):
        sampler.read_once()
    lost, alive = sampler.cut()
    assert lost.stats == {}
    assert alive.stats["utilization"].weight == 3.0
    assert [(n.level, n.cause) for n in sampler.notices] == [("warning", f"gpu-lost-{first.uuid}")]


def test_an_error_that_repeats_is_told_once(simulator, by_hand):
    simulator.machine(Gpu(), Gpu(), error("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN))
    sampler = by_hand("power_w")
    for _ in range(100):
        sampler.read_once()
    assert [notice.cause for notice in sampler.notices] == ["nvml-error-999"]


def test_an_odd_answer_of_one_gpu_ends_no_reading(simulator, by_hand, clock):
    buffers = [Gpu(samples=[[(1, 50)], [(2, 60)]]), Gpu(samples=[[(1, 50)], [(2, 60)], [(3, 70)]])]
    simulator.machine(*buffers, odd("samples.empty", device=0))
    sampler = by_hand("utilization", "power_w")
    for _ in range(3):
        sampler.read_once()
        clock.now_s += 0.5
    means = [{name: stat.mean for name, stat in window.stats.items()} for window in sampler.cut()]
    assert means == [{"utilization": 60.0, "power_w": 200.0}, {"utilization": 65.0, "power_w": 200.0}]
    assert not sampler.notices


def test_absent_metrics_are_told_at_the_end_if_the_run_was_too_short_to_be_sure(simulator, by_hand):
    simulator.machine(Gpu(power=None))
    sampler = by_hand("power_w", "sm_activity")
    sampler.read_once()
    assert not sampler.notices
    sampler.released()
    assert [notice.level for notice in sampler.notices] == ["info"]


def test_a_device_that_is_not_there_is_the_failure(simulator, by_hand):
    def choose(listed):
        raise DeviceNotFoundError("no GPU 7")

    simulator.machine(Gpu())
    sampler = by_hand("utilization", choose=choose)
    assert isinstance(sampler.failure, DeviceNotFoundError)
    assert sampler.cut() == ()


def test_without_a_gpu_nvml_is_of_no_use(simulator, by_hand):
    failure = by_hand("utilization").failure
    assert isinstance(failure, NvmlUnavailableError)
    assert "no NVIDIA GPU is visible" in str(failure)


def test_a_list_of_devices_that_cannot_be_had_is_the_failure(simulator, by_hand):
    simulator.machine(Gpu(), error("nvmlDeviceGetCount_v2", pynvml.NVML_ERROR_UNKNOWN))
    assert isinstance(by_hand("utilization").failure, NvmlUnavailableError)


# ---- memory ----


def test_memory_does_not_grow_with_the_readings(simulator, by_hand, clock):
    simulator.machine(Gpu(power=None), Gpu(architecture=AMPERE, gpm={}))
    sampler = by_hand("utilization", "sm_activity", "memory_used_mib", "power_w", "temperature_c")

    def read(times: int) -> None:
        for _ in range(times):
            clock.now_s += 0.1
            sampler.read_once()

    assert growth(lambda: read(500), lambda: read(2_000)) < 4096
    assert simulator.gpm_samples_alive == 2


def test_memory_does_not_grow_with_the_values():
    window: dict[str, Stat] = {}

    def add(times: int) -> None:
        for i in range(times):
            merge(window, {"utilization": Stat.of(float(i), 1.0)})

    assert growth(lambda: add(1000), lambda: add(20_000)) < 1024
    assert window["utilization"].weight == 22_000


def growth(warm_up: Callable[[], None], work: Callable[[], None]) -> int:
    """Bytes that Python holds more after the work than before."""
    warm_up()
    tracemalloc.start()
    try:
        warm_up()
        before, _ = tracemalloc.get_traced_memory()
        work()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


# ---- its thread ----


def test_no_call_is_made_by_the_thread_that_asks(simulator, on_thread):
    simulator.machine(Gpu())
    sampler = on_thread("utilization", "sm_activity", "memory_used_mib")
    assert sampler.wait_until_open(10)
    wait_for(lambda: simulator.calls(LAST_CALL) > 3)
    assert only(sampler.cut())["utilization"].mean == 50.0
    assert sampler.stop()
    assert simulator.calls() > 0
    assert simulator.calls_here() == 0
    assert simulator.references == 0


def test_every_sampler_thread_is_gone_after_stop(simulator, on_thread):
    simulator.machine(Gpu())
    assert on_thread("utilization").stop(10)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuopt-")] == []


def test_a_run_shorter_than_the_interval_has_a_value_all_the_same(simulator, on_thread):
    simulator.machine(Gpu(utilization=[50, 90]))
    sampler = on_thread("utilization", interval_s=3600)
    wait_for(lambda: sampler.peek() != () and only(sampler.peek()) != {})
    sampler.cut()
    assert sampler.stop(10)
    assert only(sampler.cut()) == {"utilization": Stat(90.0, 1.0, 90.0, 90.0)}


def test_stop_before_anything_was_opened(simulator, on_thread):
    simulator.machine(Gpu(), slow("nvmlInitWithFlags", 50))
    sampler = on_thread("utilization")
    assert sampler.stop(10)
    assert simulator.references == 0


def test_a_sampler_that_was_never_started_stops(simulator):
    assert GpuSampler({"utilization"}, choose_all, interval_s=0.1).stop()


@pytest.mark.parametrize("where", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", LAST_CALL, "nvmlGpmMetricsGet"])
def test_a_call_that_hangs_does_not_hold_anybody_and_nvml_is_shut_down_when_it_comes_back(simulator, on_thread, where):
    simulator.machine(Gpu(), hang(where))
    sampler = on_thread("utilization", "sm_activity")
    wait_for(lambda: simulator.hanging == 1)
    assert sampler.wait_until_open(0.01) is (where in (LAST_CALL, "nvmlGpmMetricsGet"))
    assert sampler.stop(0.05) is False
    assert len(sampler.cut()) == (1 if sampler.devices else 0)
    simulator.release()
    assert sampler.stop(10) is True
    assert simulator.references == 0


def test_when_the_last_gpu_is_lost_the_thread_ends_by_itself(simulator, on_thread):
    simulator.machine(Gpu())
    sampler = on_thread("utilization")
    wait_for(lambda: simulator.calls(LAST_CALL) > 0)
    simulator.now(error("*", pynvml.NVML_ERROR_GPU_IS_LOST, device=0))
    wait_for(lambda: simulator.references == 0)
    assert [notice.level for notice in sampler.notices] == ["warning"]


def test_a_fault_of_our_own_ends_the_readings_with_a_warning(simulator, on_thread):
    def choose(listed):
        raise ZeroDivisionError

    simulator.machine(Gpu())
    sampler = on_thread("utilization", choose=choose)
    wait_for(lambda: simulator.calls("nvmlShutdown") == 1)
    assert sampler.wait_until_open(10)
    assert sampler.stop(10)
    assert [(n.level, n.cause) for n in sampler.notices] == [("warning", "sampler-failed")]

"""The thread that several samplers share: who is read when, and how each leaves it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from lightning_gpuopt.telemetry import nvml_thread
from lightning_gpuopt.telemetry.nvml_thread import NvmlThread, SamplePace, next_due
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.telemetry.visible import Chosen, CudaOrdinal, NvmlDevice
from tests.helpers import wait_for
from tests.simulators.nvml import Gpu, Simulator, hang, slow

UTILIZATION, POWER = "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"
CLOSING = ("nvmlGpmSampleFree", "nvmlShutdown")


def choose_all(listed: Sequence[NvmlDevice]) -> list[Chosen]:
    return [Chosen(device, CudaOrdinal(i)) for i, device in enumerate(listed)]


@pytest.fixture
def start(simulator: Simulator) -> Iterator[Callable[..., GpuSampler]]:
    started: list[GpuSampler] = []

    def start_one(*readings: str, interval_s: float = 0.001) -> GpuSampler:
        sampler = GpuSampler(readings, choose_all, interval_s=interval_s)
        started.append(sampler)
        sampler.start()
        return sampler

    yield start_one
    simulator.release()
    for sampler in started:
        assert sampler.stop(10)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpuopt-gpu-sampler"]


def readings_of(sampler: GpuSampler) -> set[str]:
    return {reading for window in sampler.peek() for reading in window.stats}


def reading_calls(simulator: Simulator) -> int:
    return simulator.calls() - sum(map(simulator.calls, CLOSING))


# ---- several samplers ----


def test_samplers_share_one_thread_and_one_session_and_each_reads_its_own(simulator, start):
    simulator.machine(Gpu())
    first, second = start("utilization"), start("power_w", "temperature_c")
    wait_for(lambda: readings_of(first) == {"utilization"} and readings_of(second) == {"power_w", "temperature_c"})
    assert len(threads()) == 1
    assert (simulator.calls("nvmlInitWithFlags"), simulator.calls("nvmlDeviceGetCount_v2")) == (1, 1)


def test_each_has_its_own_pace(simulator, start):
    simulator.machine(Gpu())
    seldom, often = start("power_w", interval_s=3600), start("utilization")
    wait_for(lambda: simulator.calls(UTILIZATION) > 5 and readings_of(seldom) != set())
    assert simulator.calls(POWER) == 1
    assert seldom.stop(10)
    assert often.stop(10)


def test_one_that_stops_leaves_the_others_at_work_and_the_last_shuts_nvml_down(simulator, start):
    simulator.machine(Gpu())
    first, second = start("power_w"), start("utilization")
    wait_for(lambda: readings_of(first) == {"power_w"} and readings_of(second) == {"utilization"})
    assert first.stop(10)
    asked = simulator.calls(POWER)
    before = simulator.calls(UTILIZATION)
    wait_for(lambda: simulator.calls(UTILIZATION) > before + 3)
    assert (simulator.calls(POWER), simulator.references) == (asked, 1)
    assert second.stop(10)
    assert (simulator.references, threads()) == (0, [])
    assert nvml_thread._current is None


def test_one_that_begins_after_the_last_has_ended_gets_a_new_thread(simulator, start):
    simulator.machine(Gpu())
    for _ in range(3):
        sampler = start("utilization")
        wait_for(lambda sampler=sampler: readings_of(sampler) == {"utilization"})
        assert sampler.stop(10)
    assert simulator.calls("nvmlInitWithFlags") == simulator.calls("nvmlShutdown") == 3


def test_a_fault_of_one_does_not_end_the_others(simulator, start):
    def choose(listed):
        raise ZeroDivisionError

    simulator.machine(Gpu())
    well, ill = start("utilization"), GpuSampler({"power_w"}, choose, interval_s=0.001)
    ill.start()
    assert ill.wait_until_open(10)
    assert ill.stop(10)
    assert [notice.cause for notice in ill.notices] == ["sampler-failed"]
    before = simulator.calls(UTILIZATION)
    wait_for(lambda: simulator.calls(UTILIZATION) > before + 3)
    assert not well.notices


# ---- calls that hang ----


def test_a_call_that_hangs_holds_no_other_longer_than_it_will_wait(simulator, start):
    simulator.machine(Gpu(), hang(POWER))
    hanging, other = start("power_w"), start("utilization")
    wait_for(lambda: simulator.hanging == 1)
    assert other.stop(0.02) is False
    assert hanging.stop(0.02) is False
    assert simulator.hanging == 1
    simulator.release()
    wait_for(lambda: simulator.references == 0)


def test_who_comes_after_a_thread_was_left_hanging_is_read_on_another(simulator, start):
    simulator.machine(Gpu(), hang(POWER))
    left = start("power_w")
    wait_for(lambda: simulator.hanging == 1)
    assert left.stop(0.2) is False
    fresh = start("utilization")
    wait_for(lambda: readings_of(fresh) == {"utilization"})
    assert (simulator.hanging, len(threads())) == (1, 2)


# ---- calls that are slow ----


@pytest.mark.timed
def test_a_stop_while_devices_are_listed_lets_no_more_than_a_few_slow_calls_pass(simulator, start):
    simulator.machine(Gpu(), Gpu(), slow("*", 300))
    sampler = start("utilization", "sm_activity", "memory_used_mib", "power_w")
    assert not sampler.wait_until_open(0.0)
    wait_for(lambda: simulator.calls("nvmlDeviceGetHandleByIndex_v2") > 0)
    before = simulator.calls()
    assert sampler.stop(10)
    assert reading_calls(simulator) <= before + 2, "of the 11 that the list still needed"


@pytest.mark.timed
def test_a_stop_within_a_reading_lets_no_more_than_a_few_slow_calls_pass(simulator, start):
    simulator.machine(Gpu(), Gpu())
    sampler = start("utilization", "sm_activity", "memory_used_mib", "power_w", "temperature_c", interval_s=0.5)
    wait_for(lambda: len(readings_of(sampler)) > 3)
    simulator.now(slow("*", 300))
    before = reading_calls(simulator)
    wait_for(lambda: reading_calls(simulator) > before)
    before = reading_calls(simulator)
    assert sampler.stop(10)
    assert reading_calls(simulator) <= before + 1, "of the 12 of a reading"


@pytest.mark.timed
def test_a_stop_does_not_wait_for_the_slow_calls_of_another(simulator, start):
    simulator.machine(Gpu(), Gpu())
    first, second = start("utilization"), start("power_w", "temperature_c", "memory_used_mib", interval_s=0.2)
    wait_for(lambda: readings_of(first) == {"utilization"} and len(readings_of(second)) == 3)
    simulator.now(slow("*", 300))
    before = simulator.calls(POWER)
    wait_for(lambda: simulator.calls(POWER) > before)
    before = simulator.calls()
    assert first.stop(10)
    assert simulator.calls() <= before + 2, "of the 6 of the other's reading"


@pytest.mark.timed
def test_set_up_and_end_let_no_more_slow_calls_pass_than_three_seconds_have(simulator, start):
    simulator.machine(Gpu(), Gpu(), slow("*", 300))
    monitor, watch = start("utilization", "sm_activity"), start("utilization", "slowed_percent")
    assert not monitor.wait_until_open(1.5)
    assert monitor.stop()
    assert watch.stop()
    assert simulator.calls() <= 11
    assert not monitor.notices
    assert not watch.notices


# ---- its life ----


def test_a_system_without_a_thread_to_spare_is_an_error_once(simulator, start, monkeypatch):
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    simulator.machine(Gpu())
    with monkeypatch.context() as patch:
        patch.setattr(NvmlThread, "start", refuse)
        sampler = GpuSampler({"utilization"}, choose_all, interval_s=0.1)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            sampler.start()
    assert sampler.stop()
    fresh = start("utilization")
    wait_for(lambda: readings_of(fresh) == {"utilization"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_thread_of_its_own(simulator):
    simulator.machine(Gpu())
    script = """
import os, time
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.telemetry.visible import Chosen

def read():
    sampler = GpuSampler({"utilization"}, lambda listed: [Chosen(each, None) for each in listed], interval_s=0.001)
    sampler.start()
    while not (windows := sampler.peek()) or not windows[0].stats:
        time.sleep(0.001)
    return sampler

own = read()
child = os.fork()
if not child:
    print("stopped" if read().stop(10) else "hangs", flush=True)
    os._exit(0)
os.waitpid(child, 0)
own.stop(10)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], env=simulator.environment(), capture_output=True, text=True, timeout=50
    )
    assert (ran.stdout, ran.returncode) == ("stopped\n", 0), ran.stderr


# ---- the pace ----


@pytest.mark.parametrize(
    ("now_s", "expected_s"),
    [
        (10.0, 11.0),
        (10.3, 11.0),
        (10.999, 11.0),
        (9.9, 11.0),
        (11.2, 12.0),
        (12.5, 13.0),
        (14.0, 15.0),
    ],
)
def test_the_next_reading_is_on_the_grid_and_what_was_missed_is_left_out(now_s, expected_s):
    assert next_due(10.0, now_s, 1.0) == expected_s


def test_the_pace_does_not_drift():
    due_s = 0.0
    for i in range(1000):
        due_s = next_due(due_s, due_s + 0.09, 0.125)
        assert due_s == 0.125 * (i + 1)


def test_cheap_readings_keep_the_interval():
    pace = SamplePace(0.125, now_s=10.0, jitter=lambda: 0.0)
    for i in range(1, 100):
        pace.read(pace.due_s + 0.001, cpu_s=0.0006)
        assert pace.due_s == 10.0 + 0.125 * i


def test_dear_readings_take_half_a_percent_of_a_core():
    pace = SamplePace(0.1, now_s=0.0, jitter=lambda: 0.0)
    pace.read(0.0, cpu_s=0.004)
    begun_s = pace.due_s
    for _ in range(10):
        pace.read(pace.due_s, cpu_s=0.004)
    assert 10 * 0.004 / (pace.due_s - begun_s) == pytest.approx(0.005)


def test_the_first_reading_which_sets_things_up_does_not_count():
    pace = SamplePace(0.1, now_s=0.0, jitter=lambda: 0.0)
    pace.read(0.0, cpu_s=0.5)
    assert pace.due_s == 0.1


def test_one_dear_reading_makes_no_long_gap():
    pace = SamplePace(0.1, now_s=0.0, jitter=lambda: 0.0)
    for _ in range(20):
        pace.read(pace.due_s, cpu_s=0.0)
    before_s = pace.due_s
    pace.read(before_s, cpu_s=0.01)
    assert pace.due_s - before_s == pytest.approx(200 * 0.01 / 8)


def test_an_interval_that_is_kept_is_kept_however_dear_readings_are():
    pace = SamplePace(0.05, now_s=0.0, bounded=False, jitter=lambda: 0.0)
    for i in range(1, 20):
        pace.read(pace.due_s, cpu_s=0.03)
        assert pace.due_s == pytest.approx(0.05 * i)


@pytest.mark.parametrize("interval_s", [0.05, 0.1, 0.25, 0.5, 1.0])
def test_what_comes_and_goes_in_the_time_of_the_readings_is_met_as_often_as_it_is_there(interval_s):
    pace = SamplePace(interval_s, now_s=0.0, jitter=random.Random(0).random)
    busy = []
    for _ in range(4000):
        busy.append(pace.due_s % 0.5 < 0.28)
        pace.read(pace.due_s, cpu_s=0.0)
    assert sum(busy) / len(busy) == pytest.approx(0.56, abs=0.02)
    assert pace.due_s / 4000 == pytest.approx(interval_s, rel=0.001)  # once in each interval


def test_a_late_reading_costs_no_other_one():
    pace = SamplePace(1.0, now_s=0.0, jitter=iter([0.9, 0.1, 0.5]).__next__)
    due_s = []
    for late_s in (0.0, 0.5, 1.5):
        pace.read(pace.due_s + late_s, cpu_s=0.0)
        due_s.append(pace.due_s)
    assert due_s == pytest.approx([1.9, 2.1, 4.5])


def test_the_global_random_state_is_not_drawn_from():
    state = random.getstate()
    pace = SamplePace(0.1, now_s=0.0)
    pace.read(0.0, cpu_s=0.0)
    assert 0.1 <= pace.due_s < 0.2
    assert random.getstate() == state


def test_a_sampler_is_read_at_the_pace_of_what_its_readings_cost(simulator, start, monkeypatch):
    simulator.machine(Gpu())
    monkeypatch.setattr(NvmlThread, "spent_s", lambda self: 3600.0)
    begun_s = time.monotonic()
    dear = start("power_w")
    wait_for(lambda: dear.due_s > begun_s + 3600)
    assert simulator.calls(POWER) <= 2

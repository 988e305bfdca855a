"""One GPU under observation, through the real pynvml on simulated NVML."""

from __future__ import annotations

import torch

from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.timeline.phases import Timeline
from tests.diagnosis.numbers import gpu
from tests.helpers import wait_for
from tests.simulators.nvml import Gpu, Simulator, error

THERMAL, POWER_CAP = 0x40, 0x4


def watch() -> DeviceWatch:
    return DeviceWatch(torch.device("cuda", 0), Timeline(detailed=True))


def test_nvmls_figures_begin_anew_with_each_part(simulator: Simulator) -> None:
    simulator.machine(Gpu(gpm={}, utilization=10, clock_reasons=POWER_CAP, sm_clock=1200, sm_clock_max=1980))
    device = watch()
    wait_for(lambda: device.state().utilization is not None)
    device.close_window()
    before = device.state()
    assert (before.utilization, before.power_capped_percent, before.throttled_percent) == (10, 100, 0)
    assert (before.sm_clock_mhz, before.sm_clock_mhz_max) == (1200, 1980)
    simulator.now("trace 0 utilization 90")
    device.restart()
    assert device.state().utilization is None
    wait_for(lambda: device.state().utilization not in (None, 10))
    assert device.state().utilization == 90
    device.close()


def test_the_last_window_counts_before_it_is_closed(simulator: Simulator) -> None:
    simulator.machine(Gpu(gpm={2: 35.0}, clock_reasons=THERMAL))
    device = watch()
    wait_for(lambda: device.state().sm_activity is not None)
    state = device.state()
    assert (state.sm_activity, state.throttled_percent) == (35.0, 100)
    assert state.seconds > 0
    device.close()


def test_without_the_devices_highest_clock_the_runs_highest_stands_in(simulator: Simulator) -> None:
    simulator.machine(Gpu(gpm={}, sm_clock=[1980, 1200]), error("nvmlDeviceGetMaxClockInfo", 3))
    device = watch()
    wait_for(lambda: (device.state().sm_clock_mhz or 1980) < 1980)
    device.restart()  # from here on all readings are of 1200 MHz
    wait_for(lambda: device.state().sm_clock_mhz is not None)
    assert device.state().sm_clock_mhz == 1200
    assert device.state().sm_clock_mhz_max == 1980
    device.close()


def test_the_link_to_other_gpus(simulator: Simulator) -> None:
    for nvlinks, link in (((1, 1), "NVLink"), ((0, 0), "PCIe"), ((), "PCIe")):
        simulator.machine(Gpu(nvlinks=nvlinks))
        device = DeviceWatch(torch.device("cuda", 0), Timeline(detailed=True), links=True)
        wait_for(lambda device=device: device.link != "")
        assert device.link == link
        device.restart()
        assert device.link == link
        assert device.notes == []
        device.close()


def test_the_link_is_not_asked_for_on_one_rank(simulator: Simulator) -> None:
    simulator.machine(Gpu(nvlinks=(1,)))
    device = watch()
    wait_for(lambda: device.state().utilization is not None)
    assert device.link == ""
    assert simulator.calls("nvmlDeviceGetNvLinkState") == 0
    device.close()


def test_what_nvml_cannot_give_is_a_note(simulator: Simulator) -> None:
    simulator.machine()
    device = watch()
    device.catch_up()
    wait_for(lambda: device._sampler.failure is not None)
    device.close()
    assert [note.partition(":")[0] for note in device.notes] == ["no GPU figures"]
    assert device.state().utilization is None


class Clock:
    """A GPU's clock that shows what a test has set."""

    def __init__(self) -> None:
        self.snapshot: GpuTimes | None = None
        self.after: int | None = None
        self.ran = GpuTimes()

    def take_snapshot(self, steps: int) -> None:
        self.after = steps

    def times(self) -> GpuTimes:
        return self.ran


def test_the_gpu_counts_once_it_has_done_what_the_host_had_issued_before(simulator: Simulator) -> None:
    simulator.machine()
    timeline = Timeline(detailed=True)
    device, clock = DeviceWatch(torch.device("cuda", 0), timeline), Clock()
    device.clock = clock  # type: ignore[assignment]
    for _ in range(7):
        timeline.step_done()
    device.restart()
    assert clock.after == 7
    clock.ran = gpu(5, compute_s=0.5)
    assert device.gpu() == GpuTimes()
    clock.snapshot, clock.ran = gpu(6, compute_s=0.5), gpu(10, compute_s=1.0)
    assert device.read() == {"gpu": device.gpu()}
    assert (device.gpu().steps, device.gpu().compute_s) == (4, 0.5)
    device.close()

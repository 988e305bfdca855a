"""GpuUtilMonitor in real Trainers, through the real pynvml and the simulated library."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pynvml
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gpuopt import GpuUtilMonitor
from lightning_gpuopt.callbacks import gpu_util_monitor
from lightning_gpuopt.telemetry import nvml_thread
from tests.helpers import RecordingLogger, TinyModel, final_weights, tiny_trainer, wait_for
from tests.simulators.nvml import Gpu, Simulator, error, hang, mig_instance, slow

LAST_CALL = "nvmlDeviceGetUtilizationRates"
FAST = 0.001


class Told:
    """What the user was told, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.caught: list[warnings.WarningMessage] = []

    @property
    def warnings(self) -> list[str]:
        return [str(w.message) for w in self.caught if "GpuUtilMonitor" in str(w.message)]

    @property
    def infos(self) -> list[str]:
        return [line for line in self.lines if "GpuUtilMonitor" in line]


@pytest.fixture
def told() -> Iterator[Told]:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.lines.append(record.getMessage())

    told = Told()
    handler = Keep()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as told.caught:
        warnings.simplefilter("always")
        yield told
    logger.removeHandler(handler)


@pytest.fixture
def run(simulator: Simulator, tmp_path) -> Callable[..., RecordingLogger]:
    """``run(monitor, **trainer)``: train so that each step sees at least one whole reading; gives what was logged."""

    def run_one(*callbacks: Callback, in_step=lambda i: None, last_call=LAST_CALL, **kwargs) -> RecordingLogger:
        model = TinyModel()
        readings_seen(simulator, model, in_step, last_call)
        logger = RecordingLogger()
        tiny_trainer(tmp_path, **{"callbacks": list(callbacks), "logger": logger, **kwargs}).fit(model)
        return logger

    return run_one


def readings_seen(
    simulator: Simulator, model: TinyModel, then: Callable[[int], None] = lambda i: None, last_call: str = LAST_CALL
) -> None:
    """Let each step last until the sampler has begun a reading, whose last call this is, and ended it."""

    def in_step(batch_idx: int) -> None:
        begun = simulator.calls(last_call)
        wait_for(lambda: simulator.calls(last_call) >= begun + 2 or not simulator.references)
        then(batch_idx)

    model.in_step = in_step  # type: ignore[method-assign]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuopt-")]


# ---- what it logs ----


def test_default_metrics_go_to_the_logger_at_lightning_s_steps(simulator, run):
    simulator.machine(Gpu(utilization=70, gpm={}, clock_reasons=0x4))
    logger = run(GpuUtilMonitor(devices=[0], sample_interval=FAST), max_steps=6, log_every_n_steps=2)
    window = {
        "gpu/0/utilization": 70.0,
        "gpu/0/utilization_min": 70.0,
        "gpu/0/utilization_max": 70.0,
        "gpu/0/memory_used_mib": 2048.0,
        "gpu/0/memory_percent": 25.0,
        "gpu/0/power_w": 200.0,
        "gpu/0/temperature_c": 60.0,
        "gpu/0/sm_clock_mhz": 1500.0,
        "gpu/0/throttled_percent": 100.0,
    }
    assert logger.records == [(1, window), (3, window), (5, window)]


def test_gpm_metrics_are_logged_too(simulator, run):
    simulator.machine(Gpu(gpm={2: 60.0, 5: 30.0, 10: 40.0}))
    monitor = GpuUtilMonitor(["sm_activity", "tensor_activity", "dram_activity"], [0], FAST, log_every_n_steps=1)
    logger = run(monitor, max_steps=2, last_call="nvmlGpmMetricsGet")
    figures = {"gpu/0/sm_activity": 60.0, "gpu/0/tensor_activity": 30.0, "gpu/0/dram_activity": 40.0}
    assert logger.records == [(0, pytest.approx(figures)), (1, pytest.approx(figures))]
    assert monitor.summary() == pytest.approx(figures)


def test_a_window_holds_what_was_read_in_it(simulator, run):
    simulator.machine(Gpu(utilization=10))

    def busier(batch_idx: int) -> None:
        simulator.now(f"trace 0 utilization {10 * (batch_idx + 2)}")

    monitor = GpuUtilMonitor(["utilization_min", "utilization_max"], [0], FAST, log_every_n_steps=1)
    logger = run(monitor, in_step=busier)
    extremes = [(m["gpu/0/utilization_min"], m["gpu/0/utilization_max"]) for _, m in logger.records]
    for step, (low, high) in enumerate(extremes):
        assert low == 10 * (step + 1)
        assert high in (10 * (step + 1), 10 * (step + 2))
    assert monitor.summary()["gpu/0/utilization_min"] == 10


class Bar(ProgressBar):
    """A user's bar: keeps what it would show after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, pl_module))


@pytest.mark.parametrize("percents", [[31], [21, 41]], ids=["one GPU", "the mean of two"])
def test_the_progress_bar_shows_the_last_window(simulator, run, percents):
    simulator.machine(*[Gpu(utilization=percent) for percent in percents])
    bar = Bar()
    monitor = GpuUtilMonitor(
        devices=list(range(len(percents))), sample_interval=FAST, log_every_n_steps=2, prog_bar=True
    )
    logger = run(monitor, bar, max_steps=4, enable_progress_bar=True)
    assert bar.shown == [{"v_num": "0"}] + 3 * [{"v_num": "0", "gpu": "31 %"}]
    assert "get_metrics" not in vars(bar)
    assert logger.steps("gpu/0/utilization") == [1, 3]
    assert logger.steps("gpu") == [1, 3]


def test_the_progress_bar_shows_what_is_logged_nowhere(simulator, run, monkeypatch):
    monkeypatch.setattr(gpu_util_monitor, "_BAR_EVERY_N_STEPS", 3)
    simulator.machine(Gpu(utilization=31))
    bar = Bar()
    monitor = GpuUtilMonitor(devices=[0], sample_interval=FAST, log_every_n_steps=0, prog_bar=True)
    logger = run(monitor, bar, max_steps=4, enable_progress_bar=True)
    assert [each.get("gpu") for each in bar.shown] == [None, None, "31 %", "31 %"]
    assert logger.records == []


def test_the_progress_bar_is_as_before_after_an_error(simulator, run):
    def fail(batch_idx: int) -> None:
        raise RuntimeError

    simulator.machine(Gpu(utilization=31))
    bar = Bar()
    monitor = GpuUtilMonitor(devices=[0], sample_interval=FAST, prog_bar=True)
    with pytest.raises(RuntimeError):
        run(monitor, bar, in_step=fail, enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)


def test_the_progress_bar_cannot_show_what_is_not_measured():
    with pytest.raises(
        ValueError, match=r"metrics: expected \"utilization\" among them, which prog_bar=True shows, got"
    ):
        GpuUtilMonitor(["power_w"], prog_bar=True)


def test_two_gpus_show_their_imbalance(simulator, run):
    simulator.machine(Gpu(utilization=90), Gpu(utilization=50))
    monitor = GpuUtilMonitor(["utilization"], "all", FAST)
    run(monitor)
    assert monitor.summary() == {
        "gpu/0/utilization": 90.0,
        "gpu/1/utilization": 50.0,
        "gpu/mean/utilization": 70.0,
        "gpu/min/utilization": 50.0,
        "gpu/imbalance": 40.0,
    }


def test_own_interval_beats_the_trainer_s(simulator, run):
    simulator.machine(Gpu())
    logger = run(GpuUtilMonitor(devices=[0], sample_interval=FAST, log_every_n_steps=1), max_steps=3)
    assert logger.steps("gpu/") == [0, 1, 2]


@pytest.mark.parametrize("never", [{"log_every_n_steps": 0}, {}])
def test_an_interval_of_0_logs_nothing_and_the_summary_is_there(simulator, run, never):
    simulator.machine(Gpu(utilization=70))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST, **never)
    logger = run(monitor, **({} if never else {"log_every_n_steps": 0}))
    assert logger.records == []
    assert monitor.summary() == {"gpu/0/utilization": 70.0}


def test_what_is_left_at_the_end_is_logged_at_the_last_step(simulator, run):
    simulator.machine(Gpu())
    logger = run(GpuUtilMonitor(devices=[0], sample_interval=FAST), max_steps=5, log_every_n_steps=3)
    assert logger.steps("gpu/") == [2, 4]


def test_an_interval_that_is_given_is_kept_however_dear_readings_are(simulator, run, monkeypatch):
    simulator.machine(Gpu(), Gpu())
    monkeypatch.setattr(nvml_thread, "_WAIT_PER_CPU_S", 1e9)  # any reading is dear
    logger = run(GpuUtilMonitor(devices="all", sample_interval=FAST), max_steps=10, log_every_n_steps=5)
    assert logger.steps("gpu/") == [4, 9]


def test_a_step_is_an_optimizer_step_however_many_batches_it_takes(simulator, run):
    simulator.machine(Gpu())
    monitor = GpuUtilMonitor(devices=[0], sample_interval=FAST, log_every_n_steps=2)
    logger = run(monitor, max_steps=4, accumulate_grad_batches=3)
    assert logger.steps("gpu/") == [1, 3]


def test_every_logger_gets_it(simulator, run, tmp_path):
    simulator.machine(Gpu(utilization=70))
    recording, csv = RecordingLogger(), CSVLogger(tmp_path)
    run(GpuUtilMonitor(["utilization"], [0], FAST), logger=[recording, csv], log_every_n_steps=2)
    assert recording.records == [(1, {"gpu/0/utilization": 70.0}), (3, {"gpu/0/utilization": 70.0})]
    with open(os.path.join(csv.log_dir, "metrics.csv")) as file:
        assert file.read().splitlines() == ["gpu/0/utilization,step", "70.0,1", "70.0,3"]


def test_without_a_logger_the_summary_is_there(simulator, run):
    simulator.machine(Gpu(utilization=70, temperature=[50, 60]))
    monitor = GpuUtilMonitor(["utilization", "temperature_c"], [0], FAST)
    assert monitor.summary() == {}
    run(monitor, logger=False)
    summary = monitor.summary()
    assert summary["gpu/0/utilization"] == 70.0
    assert summary["gpu/0/temperature_c_max"] == 60.0
    assert set(summary) == {"gpu/0/utilization", "gpu/0/temperature_c", "gpu/0/temperature_c_max"}


def test_the_summary_is_there_during_fit(simulator, run):
    simulator.machine(Gpu(utilization=70))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    seen = []
    run(monitor, in_step=lambda i: seen.append(monitor.summary()))
    assert seen == [{"gpu/0/utilization": 70.0}] * 4


def test_what_was_before_training_is_not_counted(simulator, tmp_path):
    simulator.machine(Gpu(utilization=10))
    monitor = GpuUtilMonitor(["utilization_min"], [0], FAST)

    class Busy(Callback):
        def on_fit_start(self, trainer, pl_module):
            wait_for(lambda: simulator.calls(LAST_CALL) > 3)
            simulator.now("trace 0 utilization 90")
            begun = simulator.calls(LAST_CALL)
            wait_for(lambda: simulator.calls(LAST_CALL) >= begun + 2)

    model = TinyModel()
    readings_seen(simulator, model)
    tiny_trainer(tmp_path, callbacks=[monitor, Busy()]).fit(model)
    assert monitor.summary() == {"gpu/0/utilization_min": 90.0}


# ---- which devices ----


def test_auto_on_a_cpu_trainer_says_so_and_touches_no_nvml(simulator, run, told):
    simulator.machine(Gpu())
    logger = run(GpuUtilMonitor())
    assert logger.records == []
    assert told.infos == [
        'GpuUtilMonitor(devices="auto") has no GPU to monitor: the Trainer runs on cpu; '
        'devices="all" monitors every visible GPU.'
    ]
    assert told.warnings == []
    assert simulator.calls() == 0


class Disguise(Callback):
    """Around another callback: lets its ``setup`` see a Trainer on that device; the training stays on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch, device: torch.device | None) -> None:
        self.patch = patch
        self.device = device

    def setup(self, trainer, pl_module, stage):
        if self.device is None:
            self.patch.undo()
        else:
            self.patch.setattr(SingleDeviceStrategy, "root_device", self.device)


def on_cuda(monitor: GpuUtilMonitor, ordinal: int) -> list[Callback]:
    patch = pytest.MonkeyPatch()
    return [Disguise(patch, torch.device("cuda", ordinal)), monitor, Disguise(patch, None)]


def test_auto_is_the_device_of_this_rank(simulator, run):
    simulator.machine(Gpu(utilization=10), Gpu(utilization=20))
    monitor = GpuUtilMonitor(["utilization"], "auto", FAST)
    run(*on_cuda(monitor, 1))
    assert monitor.summary() == {"gpu/1/utilization": 20.0}


def test_auto_without_such_a_device_in_nvml_is_one_warning(simulator, run, told):
    simulator.machine(Gpu())
    assert run(*on_cuda(GpuUtilMonitor(), 3)).records == []
    (warning,) = told.warnings
    assert "there is no GPU 3 here" in warning


def test_cuda_visible_devices_and_uuids(simulator, run, monkeypatch):
    gpus = simulator.machine(*(Gpu(utilization=10 * i) for i in range(4)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,{gpus[0].uuid}")
    monitor = GpuUtilMonitor(["utilization"], [0, gpus[2].uuid], FAST)
    run(monitor)
    summary = monitor.summary()
    assert (summary["gpu/0/utilization"], summary["gpu/2/utilization"]) == (30.0, 20.0)


def test_a_mig_instance(simulator, run, monkeypatch):
    (gpu,) = simulator.machine(Gpu(mig=[mig_instance(1), mig_instance(2, memory_used=3 * 2**30)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu.mig[1].uuid)
    monitor = GpuUtilMonitor(["memory_used_mib", "utilization"], "all", FAST)
    run(monitor, last_call="nvmlDeviceGetMemoryInfo_v2")
    assert monitor.summary() == {"gpu/0/memory_used_mib": 3072.0, "gpu/0/memory_used_mib_max": 3072.0}


@pytest.mark.parametrize("missing", [1, "GPU-ffff", "MIG-0000"])
def test_a_device_that_is_not_there_is_an_error_that_names_it(simulator, run, missing):
    simulator.machine(Gpu())
    with pytest.raises(MisconfigurationException) as raised:
        run(GpuUtilMonitor(devices=[0, missing]))
    assert str(raised.value) == (
        f"GpuUtilMonitor(devices=[0, {missing!r}]): there is no GPU {missing!r} here; visible after "
        "CUDA_VISIBLE_DEVICES: 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, NVIDIA Simulated H100)."
    )
    assert simulator.references == 0


def test_all_without_a_gpu_is_one_warning(simulator, run, told):
    assert run(GpuUtilMonitor(devices="all")).records == []
    (warning,) = told.warnings
    assert "no NVIDIA GPU is visible" in warning


def test_an_order_that_is_a_guess_is_said(simulator, run, told):
    simulator.machine(Gpu(name="T4"), Gpu(name="H100"))
    run(GpuUtilMonitor(["utilization"], [0], FAST))
    (line,) = told.infos
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in line


# ---- when things go wrong ----


@pytest.mark.parametrize("devices", ["all", [0]])
def test_nvml_that_does_not_start_is_one_warning(simulator, run, told, devices):
    simulator.machine(error("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    assert run(GpuUtilMonitor(devices=devices)).records == []
    (warning,) = told.warnings
    assert "no GPU figures, NVML cannot be used: Driver Not Loaded." in warning


def test_metrics_that_the_gpu_does_not_have_are_one_line_and_absent(simulator, run, told):
    simulator.machine(Gpu(power=None, gpm={}, temperature=None))
    logger = run(GpuUtilMonitor(devices=[0], sample_interval=FAST))
    assert set(logger.records[0][1]) == {
        f"gpu/0/{key}"
        for key in (
            "utilization",
            "utilization_min",
            "utilization_max",
            "memory_used_mib",
            "memory_percent",
            "sm_clock_mhz",
            "throttled_percent",
        )
    }
    assert len(told.infos) == 1
    assert told.warnings == []


def test_a_gpu_lost_in_mid_run_is_one_warning_and_the_other_goes_on(simulator, run, told):
    simulator.machine(Gpu(utilization=90), Gpu(utilization=50))

    def lose(batch_idx: int) -> None:
        if batch_idx == 1:
            simulator.now(error("*", pynvml.NVML_ERROR_GPU_IS_LOST, device=0))

    monitor = GpuUtilMonitor(["utilization"], "all", FAST, log_every_n_steps=1)
    logger = run(monitor, in_step=lose, max_steps=6)
    both = {"gpu/0/utilization", "gpu/1/utilization", "gpu/mean/utilization", "gpu/min/utilization", "gpu/imbalance"}
    assert set(logger.records[0][1]) == both
    assert logger.records[-1] == (5, {"gpu/1/utilization": 50.0})
    (warning,) = told.warnings
    assert "GPU 0" in warning
    assert "is lost" in warning
    assert set(monitor.summary()) == both


def test_an_error_in_mid_run_is_one_warning_and_readings_go_on(simulator, run, told):
    simulator.machine(Gpu(utilization=[70]), error(LAST_CALL, pynvml.NVML_ERROR_UNKNOWN, from_call=2, times=3))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    run(monitor, max_steps=8)
    assert monitor.summary() == {"gpu/0/utilization": 70.0}
    (warning,) = told.warnings
    assert "could not read utilization (Unknown Error)" in warning


def test_calls_that_take_300_ms_do_not_hold_training(simulator, tmp_path):
    simulator.machine(Gpu(), slow(LAST_CALL, 300))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    calls = []
    model = TinyModel(num_batches=200)
    model.in_step = lambda i: calls.append(simulator.calls(LAST_CALL))
    tiny_trainer(tmp_path, max_steps=200, callbacks=[monitor]).fit(model)
    assert len(calls) == 200
    assert calls[-1] < 100, "no step waited for a reading"
    assert monitor.summary() == {"gpu/0/utilization": 50.0}
    assert simulator.references == 0


@pytest.mark.matrix
def test_nvml_that_is_slow_throughout_holds_fit_for_three_seconds_at_most_and_is_not_said_to_hang(
    simulator, tmp_path, told
):
    simulator.machine(Gpu(), Gpu(), slow("*", 300))
    tiny_trainer(tmp_path, callbacks=[GpuUtilMonitor(devices="all")]).fit(TinyModel())
    assert simulator.calls() <= 11, "of which the list of devices alone needs 14"
    assert told.warnings == []


def test_a_missing_device_is_an_error_where_nvml_is_a_little_slow(simulator, run):
    simulator.machine(Gpu(), slow("*", 20))
    with pytest.raises(MisconfigurationException, match="there is no GPU 1 here"):
        run(GpuUtilMonitor(devices=[1]))


@pytest.mark.parametrize("where", ["nvmlInitWithFlags", LAST_CALL])
def test_a_call_that_hangs_costs_a_little_time_and_a_warning(simulator, tmp_path, told, monkeypatch, where):
    monkeypatch.setattr(gpu_util_monitor, "_OPEN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(gpu_util_monitor, "_CLOSE_TIMEOUT_S", 0.1)
    simulator.machine(Gpu(), hang(where))
    tiny_trainer(tmp_path, callbacks=[GpuUtilMonitor(devices=[0])]).fit(TinyModel())
    assert simulator.hanging == 1
    assert len(told.warnings) == 1
    assert "NVML does not respond" in told.warnings[0]
    simulator.release()
    wait_for(lambda: not own_threads())
    assert simulator.references == 0


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_threads_are_gone_and_the_summary_is_there(simulator, run, kind):
    simulator.machine(Gpu(utilization=70))

    def fail(batch_idx: int) -> None:
        if batch_idx == 2:
            raise kind

    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    with pytest.raises((RuntimeError, SystemExit)):
        run(monitor, in_step=fail)
    assert own_threads() == []
    assert simulator.references == 0
    assert monitor.summary() == {"gpu/0/utilization": 70.0}


def test_an_exception_in_another_callback_s_setup(simulator, run):
    class Fails(Callback):
        def setup(self, trainer, pl_module, stage):
            raise RuntimeError

    simulator.machine(Gpu())
    with pytest.raises(RuntimeError):
        run(GpuUtilMonitor(devices=[0]), Fails())
    assert own_threads() == []


def test_a_logger_that_fails_ends_the_monitor_and_not_training(simulator, run, told):
    class Broken(RecordingLogger):
        def log_metrics(self, metrics, step=None):
            if any(key.startswith("gpu/") for key in metrics):
                raise OSError("disk full")

    simulator.machine(Gpu(utilization=70))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST, log_every_n_steps=1)
    steps = []
    run(monitor, logger=Broken(), in_step=steps.append)
    assert steps == [0, 1, 2, 3]
    (warning,) = told.warnings
    assert "disk full" in warning
    assert monitor.summary() == {"gpu/0/utilization": 70.0}


def test_a_machine_without_threads_to_spare_ends_the_monitor_and_not_training(run, told, monkeypatch):
    def no_thread(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gpu_util_monitor, "GpuMonitor", no_thread)
    steps = []
    run(GpuUtilMonitor(devices="all"), in_step=steps.append)
    assert steps == [0, 1, 2, 3]
    (warning,) = told.warnings
    assert "can't start new thread" in warning


def test_fast_dev_run(simulator, run):
    simulator.machine(Gpu(utilization=70))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    run(monitor, fast_dev_run=True)
    assert monitor.summary() == {"gpu/0/utilization": 70.0}


def test_sanity_check_only(simulator, run):
    simulator.machine(Gpu())
    run(GpuUtilMonitor(devices=[0]), limit_train_batches=0, limit_val_batches=1, num_sanity_val_steps=1)
    assert own_threads() == []


def test_validation_and_test_are_not_monitored(simulator, tmp_path):
    simulator.machine(Gpu())
    trainer = tiny_trainer(tmp_path, callbacks=[GpuUtilMonitor(devices=[0])], limit_val_batches=1)
    trainer.validate(TinyModel(), verbose=False)
    assert simulator.calls() == 0


def test_several_fits_each_have_their_own_summary(simulator, run, tmp_path):
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    for utilization in (70, 30):
        simulator.machine(Gpu(utilization=utilization))
        logger = run(monitor)
        assert logger.records == [(3, {"gpu/0/utilization": utilization})]
        assert monitor.summary() == {"gpu/0/utilization": utilization}


def test_a_second_fit_of_the_same_trainer_goes_on_with_the_steps(simulator, tmp_path):
    simulator.machine(Gpu(utilization=70))
    logger = RecordingLogger()
    model = TinyModel()
    readings_seen(simulator, model)
    monitor = GpuUtilMonitor(["utilization"], [0], FAST, log_every_n_steps=2)
    trainer = tiny_trainer(tmp_path, callbacks=[monitor], logger=logger)
    trainer.fit(model)
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model)
    assert logger.steps("gpu/") == [1, 3, 5, 7]


def test_two_monitors_in_one_trainer_do_not_disturb_each_other_nor_warn_twice(simulator, run, told):
    simulator.machine(Gpu(utilization=70, power=None))
    both = (
        GpuUtilMonitor(["utilization", "power_w"], [0], FAST),
        GpuUtilMonitor(["utilization", "power_w"], "all", FAST),
    )
    threads = []
    run(*both, in_step=lambda i: threads.append(own_threads()))
    assert threads == [["gpuopt-gpu-sampler"]] * 4
    assert both[0].summary() == both[1].summary() == {"gpu/0/utilization": 70.0}
    assert len(told.infos) == 1
    assert simulator.references == 0


def test_two_monitors_without_nvml_warn_once(simulator, run, told):
    simulator.machine(error("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    run(GpuUtilMonitor(devices="all"), GpuUtilMonitor(devices=[0]))
    assert len(told.warnings) == 1


# ---- what it leaves alone ----


def test_the_training_thread_makes_no_nvml_call(simulator, run):
    simulator.machine(Gpu(), Gpu())
    run(GpuUtilMonitor("all", "all", FAST, log_every_n_steps=1))
    assert simulator.calls() > 0
    assert simulator.calls_here() == 0


def test_after_fit_nvml_is_shut_down_and_no_thread_is_left(simulator, run):
    simulator.machine(Gpu())
    before = threading.active_count()
    run(GpuUtilMonitor(devices=[0]))
    assert simulator.references == 0
    assert threading.active_count() == before


def test_weights_are_the_same_with_and_without_it(simulator, tmp_path):
    simulator.machine(Gpu())
    monitor = GpuUtilMonitor(devices=[0], sample_interval=FAST, log_every_n_steps=1)
    plain = final_weights(tiny_trainer(tmp_path, max_steps=20))
    monitored = final_weights(tiny_trainer(tmp_path, max_steps=20, callbacks=[monitor], logger=RecordingLogger()))
    assert all(torch.equal(plain[name], monitored[name]) for name in plain)


def test_a_monitor_at_work_can_be_copied_and_sent(simulator, run):
    simulator.machine(Gpu(utilization=70))
    monitor = GpuUtilMonitor(["utilization"], [0], FAST)
    copies = []
    run(monitor, in_step=lambda i: copies.extend([copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))]))
    assert all(one.summary() == {"gpu/0/utilization": 70.0} for one in copies)
    simulator.machine(Gpu(utilization=30))
    run(copies[0])
    assert copies[0].summary() == {"gpu/0/utilization": 30.0}


def test_lightning_s_own_attribute_is_not_shadowed():
    assert not hasattr(GpuUtilMonitor(), "log")


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": ["utilisation"]}, "no such metric as 'utilisation'; the known ones are utilization"),
        ({"metrics": "some"}, "expected 'default', 'all' or a list"),
        ({"devices": "cuda"}, 'expected "auto", "all", or a list'),
        ({"devices": []}, 'expected "auto", "all", or a list'),
        ({"devices": [-1]}, 'expected "auto", "all", or a list'),
        ({"devices": ["0"]}, 'expected "auto", "all", or a list'),
        ({"devices": [0, 1, 0]}, "each once, got"),
        ({"devices": ["GPU-1", "GPU-1"]}, "each once, got"),
        ({"sample_interval": 0}, "expected seconds, at least 0.001, got 0"),
        ({"sample_interval": 0.0009}, "expected seconds, at least 0.001, got 0.0009"),
        ({"sample_interval": float("nan")}, "expected seconds, at least 0.001, got nan"),
        ({"sample_interval": float("inf")}, "expected seconds, at least 0.001, got inf"),
        ({"log_every_n_steps": -1}, "expected a number of steps, at least 0, or None, got -1"),
    ],
)
def test_a_value_that_makes_no_sense_is_a_value_error(arguments, words):
    with pytest.raises(ValueError, match=words) as raised:
        GpuUtilMonitor(**arguments)
    ((name, value),) = arguments.items()
    assert str(raised.value).startswith(name)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"metrics": None},
        {"metrics": [1]},
        {"devices": 0},
        {"devices": None},
        {"devices": np.array([0, 1])},
        {"devices": [True]},
        {"devices": [0.5]},
        {"sample_interval": "0.1"},
        {"sample_interval": True},
        {"log_every_n_steps": 1.5},
        {"log_every_n_steps": True},
    ],
)
def test_a_wrong_type_is_a_type_error(arguments):
    with pytest.raises(TypeError, match="expected") as raised:
        GpuUtilMonitor(**arguments)
    ((name, value),) = arguments.items()
    assert str(raised.value).startswith(name)
    assert repr(value) in str(raised.value)


def test_numpys_numbers_are_taken_as_pythons():
    monitor = GpuUtilMonitor(
        devices=[np.int64(0), "GPU-1"], sample_interval=np.float32(0.5), log_every_n_steps=np.int32(5)
    )
    taken = [*monitor.devices, monitor.sample_interval, monitor.log_every_n_steps]
    assert taken == [0, "GPU-1", 0.5, 5]
    assert [type(each) for each in taken] == [int, str, float, int]


def instantiate(parser: ArgumentParser, config: dict) -> Any:
    """``instantiate_classes`` was renamed in jsonargparse 4.49."""
    name = "instantiate" if hasattr(parser, "instantiate") else "instantiate_classes"
    return getattr(parser, name)(parser.parse_object(config))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"metrics": "all", "devices": "all", "sample_interval": 1, "log_every_n_steps": 0},
        {"metrics": ["power_w"], "devices": [0, "GPU-00000000", "MIG-0"], "sample_interval": 0.5},
    ],
)
def test_arguments_come_from_yaml(arguments):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GpuUtilMonitor, "monitor")
    parsed = instantiate(parser, {"monitor": arguments}).monitor
    for name, value in arguments.items():
        assert getattr(parsed, name) == value


def test_the_parser_refuses_what_the_annotations_do():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GpuUtilMonitor, "monitor")
    with pytest.raises(Exception, match="devices"):
        parser.parse_object({"monitor": {"devices": "cuda"}})


def test_a_trainer_made_from_yaml_takes_it(tmp_path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Trainer, "trainer", skip={"plugins", "strategy", "profiler"})
    config = {"callbacks": [{"class_path": "lightning_gpuopt.GpuUtilMonitor", "init_args": {"devices": [0, "GPU-1"]}}]}
    trainer = instantiate(parser, {"trainer": {**config, "logger": False, "default_root_dir": str(tmp_path)}}).trainer
    (monitor,) = [callback for callback in trainer.callbacks if isinstance(callback, GpuUtilMonitor)]
    assert monitor.devices == [0, "GPU-1"]

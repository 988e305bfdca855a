"""GpuUtilMonitor: logs GPU readings to every logger, read in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Literal

from typing_extensions import override

from lightning_gpuopt.compat.lightning import (
    STEP_OUTPUT,
    LightningModule,
    MisconfigurationException,
    Trainer,
    finished_optimizer_step,
    say_once,
)
from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.monitor import GpuMonitor
from lightning_gpuopt.utils.arguments import flag, or_none, real_number, refuse, whole_number
from lightning_gpuopt.utils.callback_base import CallbackBase
from lightning_gpuopt.utils.progress_bar import BarItem

log = logging.getLogger(__name__)

# closer readings would only keep a core busy: NVML's utilization is of 1/6 s to 1 s (nvml.h, nvmlUtilization_t)
_MIN_INTERVAL_S = 0.001
# how long ``setup`` waits for NVML to list the devices, so that a missing one is an error before training begins
_OPEN_TIMEOUT_S = 1.5
_CLOSE_TIMEOUT_S = 1.0  # how long the end of ``fit`` waits for NVML; a call that takes longer is said to hang
_GATHER_TIMEOUT_S = 3.0  # how long the end of ``fit`` waits for the other ranks' last figures
_INTERVAL_S = 0.1

_BAR_EVERY_N_STEPS = 50  # how often the progress bar's figure is refreshed where nothing is logged


class GpuUtilMonitor(CallbackBase):
    """Log what the GPUs do: utilization, SM, tensor-core and memory activity, memory, power, clocks, throttling.

    A background thread reads NVML; training itself makes no NVML call and waits for none. Every ``log_every_n_steps``
    optimizer steps the window's values of all ranks are written to every logger, under ``gpu/{i}/...`` with ``i`` the
    CUDA ordinal; with several GPUs also ``gpu/mean/utilization``, ``gpu/min/utilization`` and ``gpu/imbalance``.
    Percentages are 0-100; a value that a GPU does not support is absent. Without an NVIDIA driver or GPU, or if a GPU
    is lost during the run, it warns once and training continues.

    Args:
        metrics: ``"default"`` (12 keys per GPU), ``"all"``, or a list of names such as ``["utilization", "power_w"]``.
        devices: ``"auto"``: the GPU that this rank trains on, nothing on a CPU Trainer. ``"all"``: every visible GPU.
            Or a list of CUDA ordinals (after ``CUDA_VISIBLE_DEVICES``) and UUIDs (``"GPU-…"``, ``"MIG-…"``), each
            once.
        sample_interval: mean seconds between readings, each at a random moment of its interval; at least 0.001. The
            default, 0.1, grows if readings would take more than 0.5 % of a core; any other value is kept. Utilization
            is read each time, from the driver's own buffer if there is one; slowly changing values every fifth time, or
            every 0.5 s.
        log_every_n_steps: optimizer steps from one logged window to the next, 0 for never; None: the Trainer's.
        prog_bar: show ``gpu 31 %`` in the Trainer's progress bar: the last window's utilization, the mean if there is
            more than one GPU. Refreshed with each window (every 50 steps if none is logged).

    Raises:
        ValueError: an argument is out of range, or a metric is unknown (the message lists the known ones).
        TypeError: an argument has a wrong type.
        MisconfigurationException: at the start of ``fit``, if a GPU named in ``devices`` does not exist.

    Example::

        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning_gpuopt import GpuUtilMonitor

        monitor = GpuUtilMonitor()
        trainer = Trainer(max_epochs=1, callbacks=[monitor])
        trainer.fit(BoringModel())
        print(monitor.summary())  # {"gpu/0/utilization": 93.1, "gpu/0/memory_used_mib": 5120.0, ...}
    """

    def __init__(
        self,
        metrics: Literal["default", "all"] | list[str] = "default",
        devices: Literal["auto", "all"] | list[int | str] = "auto",
        sample_interval: float = _INTERVAL_S,
        log_every_n_steps: int | None = None,
        prog_bar: bool = False,
    ) -> None:
        super().__init__()
        self._selected = select_metrics(metrics)
        self.metrics = metrics
        self.devices: Literal["auto", "all"] | list[int | str] = _checked_devices(devices)
        self.sample_interval = real_number("sample_interval", sample_interval, "seconds", least=_MIN_INTERVAL_S)
        self.log_every_n_steps = or_none(
            whole_number, "log_every_n_steps", log_every_n_steps, "a number of steps", least=0
        )
        self.prog_bar = flag("prog_bar", prog_bar)
        if prog_bar and all(each.key != "utilization" for each in self._selected):
            refuse("metrics", '"utilization" among them, which prog_bar=True shows', metrics)
        self._bar_item = BarItem("gpu")
        self._undo_bar: Callable[[], None] | None = None
        self._monitor: GpuMonitor | None = None
        self._every = 0
        self._logs = False
        self._step = -1
        self._logged_step = -1
        self._summary: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """The values over the whole current run, or over the last one.

        Returns:
            The logged keys as means over the run (``_min`` and ``_max``: its extremes), and for each GPU
            ``memory_used_mib_max`` and ``temperature_c_max``. Rank 0 has all ranks' GPUs, other ranks their own; empty
            before the first ``fit``.
        """
        return dict(self._summary) if self._monitor is None else self._monitor.summary()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._close(trainer, finished=False)
        self._step = self._logged_step = -1
        self._summary = {}
        device = trainer.strategy.root_device
        if self.devices == "auto" and device.type != "cuda":
            text = (
                f'GpuUtilMonitor(devices="auto") has no GPU to monitor: the Trainer runs on {device.type}; '
                'devices="all" monitors every visible GPU.'
            )
            say_once(trainer, "gpu-monitor-no-cuda", text, warn=False)
            return
        try:
            self._monitor = self._start(trainer)
        except Exception as error:
            _report_failure(trainer, error)
            return
        missing = self._monitor.wait_until_open(_OPEN_TIMEOUT_S)
        if missing is not None and self.devices != "auto":
            self._close(trainer, finished=False, quietly=True)
            raise MisconfigurationException(f"GpuUtilMonitor(devices={self.devices!r}): {missing}.")
        self._notify(trainer, self._monitor)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = self.log_every_n_steps
        self._every = trainer.log_every_n_steps if own is None else own  # type: ignore[attr-defined]
        self._logs = self._every > 0
        if self._monitor is None:
            return
        self._monitor.restart()
        if self.prog_bar:
            self._every = self._every or _BAR_EVERY_N_STEPS
            self._bar_item = BarItem("gpu")
            self._undo_bar = self._bar_item.show_in(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        step = finished_optimizer_step(trainer)
        if step is None:
            return
        self._step = step
        ends_window = self._every > 0 and (step + 1) % self._every == 0
        if ends_window or monitor.has_pending:
            self._advance(trainer, monitor, ends_window)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer, finished=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer, finished=False)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer, finished=False)

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_monitor": None, "_summary": self.summary(), "_undo_bar": None}

    def _start(self, trainer: Trainer) -> GpuMonitor:
        return GpuMonitor(
            self._selected,
            self.devices,
            interval_s=self.sample_interval,
            bounded=self.sample_interval == _INTERVAL_S,
            current=trainer.strategy.root_device.index or 0,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            node=trainer.node_rank,
            num_nodes=trainer.num_nodes,
        )

    def _advance(self, trainer: Trainer, monitor: GpuMonitor, ends_window: bool) -> None:
        try:
            if ends_window:
                monitor.cut(self._step)
            self._write(trainer, monitor)
            self._notify(trainer, monitor)
        except Exception as error:
            self._close(trainer, finished=False)
            _report_failure(trainer, error)

    def _write(self, trainer: Trainer, monitor: GpuMonitor) -> None:
        for step, figures in monitor.ready():
            if not figures or step <= self._logged_step:
                continue
            self._logged_step = step
            percent = _utilization(figures)
            if percent is not None:
                self._bar_item.set_percent(percent)
            for logger in trainer.loggers if self._logs else ():
                logger.log_metrics(figures, step=step)

    def _notify(self, trainer: Trainer, monitor: GpuMonitor) -> None:
        for notice in monitor.notices():
            warn = notice.level == "warning"
            say_once(trainer, notice.cause, f"GpuUtilMonitor: {notice.text}", warn=warn, every_rank=warn)

    def _close(self, trainer: Trainer, *, finished: bool, quietly: bool = False) -> None:
        """Stop the threads and keep the summary; on a regular end the last window is logged too."""
        monitor, self._monitor = self._monitor, None
        if self._undo_bar is not None:
            self._undo_bar()
        if monitor is None:
            return
        try:
            monitor.close(self._step, _CLOSE_TIMEOUT_S, _GATHER_TIMEOUT_S if finished else 0.0)
            if finished and self._every > 0:
                self._write(trainer, monitor)
            else:
                monitor.ready()
            if not quietly:
                self._notify(trainer, monitor)
        except Exception as error:
            _report_failure(trainer, error)
        self._summary = monitor.summary()


def _report_failure(trainer: Trainer, error: Exception) -> None:
    text = f"GpuUtilMonitor stopped after an error, training continues without it: {error!r}"
    say_once(trainer, "gpu-monitor-failed", text)
    log.debug(text, exc_info=error)


def _utilization(figures: Mapping[str, float]) -> float | None:
    """The mean utilization of a window's GPUs; None if there is none."""
    if "gpu/mean/utilization" in figures:
        return figures["gpu/mean/utilization"]
    return next((value for key, value in figures.items() if key.endswith("/utilization")), None)


def _checked_devices(devices: object) -> Any:
    expected = '"auto", "all", or a list of CUDA ordinals (0, 1, ...) and UUIDs ("GPU-...", "MIG-..."), each once'
    if isinstance(devices, str):
        return devices if devices in ("auto", "all") else refuse("devices", expected, devices)
    if not isinstance(devices, (list, tuple)):
        refuse("devices", expected, devices, wrong_type=True)
    if any(isinstance(each, bool) or not isinstance(each, (Integral, str)) for each in devices):
        refuse("devices", expected, devices, wrong_type=True)
    named = [each if isinstance(each, str) else int(each) for each in devices]
    good = all(each.startswith(("GPU-", "MIG-")) if isinstance(each, str) else each >= 0 for each in named)
    if not good or not named or len(set(named)) < len(named):
        refuse("devices", expected, devices)
    return named

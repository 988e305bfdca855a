"""What NVML says of every GPU at one moment: link, limits, clocks, errors. For who asks once, outside of training."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_gpuopt.telemetry.nvml import DeviceLostError, DeviceReader, NvmlUnavailableError, StopReading
from lightning_gpuopt.telemetry.nvml_thread import NvmlThread, join_thread
from lightning_gpuopt.telemetry.visible import NvmlDevice, visible_devices

log = logging.getLogger(__name__)

READINGS: Final = frozenset(
    {
        "busy_percent",
        "memory_used_mib",
        "memory_percent",
        "temperature_c",
        "power_w",
        "power_limit_w",
        "power_limit_default_w",
        "sm_clock_mhz",
        "sm_clock_max_mhz",
        "slowed_percent",
        "power_capped_percent",
        "clock_set_percent",
        "persistence",
        "pcie_generation",
        "pcie_generation_max",
        "pcie_lanes",
        "pcie_lanes_max",
        "mig_mode",
        "ecc_mode",
        "ecc_errors",
    }
)
"""What is asked of a GPU. The values are in the unit of each name; modes are 0 or 1; ``slowed_percent``,
``power_capped_percent`` and ``clock_set_percent`` are 0 or 100: whether that lowers the clocks at this moment."""

_OF_AN_INSTANCE: Final = frozenset({"memory_used_mib", "memory_percent"})


@dataclass(frozen=True)
class GpuHealth:
    """One GPU, or MIG instance."""

    device: NvmlDevice
    values: Mapping[str, float] = field(default_factory=dict)  # what it said, by reading; what it did not say is absent
    unknown: tuple[str, ...] = ()  # what it did not say and why, as lines of text


@dataclass(frozen=True)
class NvmlHealth:
    driver: str = ""  # its version; empty if it is not known
    cuda: tuple[int, int] | None = None  # the newest CUDA that the driver runs, as (major, minor)
    gpus: tuple[GpuHealth, ...] = ()  # by NVML index, each followed by its MIG instances
    # UUIDs that a CUDA program of this process sees; None: the list of GPUs is not known
    visible: tuple[str, ...] | None = None
    failure: str = ""  # why nothing more is known


class HealthQuestion:
    """Asks NVML about all GPUs, on the thread that makes every NVML call of this process."""

    def __init__(self, readings: frozenset[str] = READINGS) -> None:
        self._readings = readings
        self._given_up = threading.Event()
        self._done = threading.Event()
        self._thread: NvmlThread | None = None
        self._reader: DeviceReader | None = None
        self._driver: tuple[str, tuple[int, int] | None] = ("", None)
        self._gpus: tuple[GpuHealth, ...] = ()
        self._visible: tuple[str, ...] | None = None
        self._failure = ""

    def start(self) -> None:
        try:
            self._thread = join_thread(self)
        except RuntimeError as error:
            self._failure = str(error)
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether all was asked, or nothing more will be."""
        return self._done.is_set()

    def answer(self, timeout_s: float) -> NvmlHealth:
        """What NVML has answered within ``timeout_s``; a call that takes longer is left to its thread."""
        deadline_s = time.monotonic() + timeout_s
        answered = self._done.wait(timeout_s)
        failure = self._failure
        if not answered:
            failure = f"NVML did not respond within {timeout_s:g} s"
            self._given_up.set()
        if self._thread is not None:
            self._thread.wake()
            if answered and self._thread.is_last(self):  # then it shuts NVML down
                self._thread.join(max(deadline_s - time.monotonic(), 0.1))
        driver, cuda = self._driver
        return NvmlHealth(driver, cuda, self._gpus, self._visible, failure)

    # ---- a user of the thread ----

    due_s = 0.0

    def is_over(self) -> bool:
        return self._given_up.is_set() or self._done.is_set()

    def turn(self, thread: NvmlThread) -> bool:
        """Ask everything; there is no second turn."""
        if self.is_over():
            return False
        try:
            self._ask(thread)
        except NvmlUnavailableError as error:
            self._failure = str(error)
        except StopReading:
            pass
        except Exception as error:
            log.debug("GPUs could not be asked", exc_info=True)
            self._failure = f"an unexpected {error!r}"
        return False

    def released(self) -> None:
        self._done.set()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _ask(self, thread: NvmlThread) -> None:
        session, between_calls = thread.session(), thread.checking(self)
        self._driver = session.driver(between_calls)
        listed = session.devices(between_calls)
        named, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
        visible = visible_devices(listed, named, order)
        self._visible = tuple(device.uuid for device in visible.devices if device is not None)
        for device in listed:
            readings = self._readings if device.mig_slot is None else self._readings & _OF_AN_INSTANCE
            reader = self._reader = session.reader(device, readings, time.monotonic, 0.0, between_calls)
            values: dict[str, float] = {}
            try:
                values = {value.reading: value.value for value in reader.read()}
                reader.notify_absent()
                unknown = tuple(notice.text for notice in reader.notices)
            except DeviceLostError as error:
                unknown = (f"{error}.",)
            self._gpus = (*self._gpus, GpuHealth(device, values, unknown))
            self.close()

"""What NVML says of every GPU at one moment: link, limits, clocks, errors. For who asks once, outside of training."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_gpuopt.telemetry.nvml import DeviceLostError, NvmlSession, NvmlUnavailableError, StopReading
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
    """Asks NVML about all GPUs once, on a thread of its own; outside of training."""

    def __init__(self, readings: frozenset[str] = READINGS) -> None:
        self._readings = readings
        self._given_up = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuopt-gpu-health", daemon=True)
        self._known = NvmlHealth()

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            self._known = NvmlHealth(failure=str(error))
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether all was asked, or nothing more will be."""
        return self._done.is_set()

    def answer(self, timeout_s: float) -> NvmlHealth:
        """What NVML has answered within ``timeout_s``; a call that takes longer is left to its thread."""
        deadline_s = time.monotonic() + timeout_s
        if not self._done.wait(timeout_s):
            self._given_up.set()
            return replace(self._known, failure=f"NVML did not respond within {timeout_s:g} s")
        if self._thread.is_alive():  # it shuts NVML down
            self._thread.join(max(deadline_s - time.monotonic(), 0.1))
        return self._known

    def _run(self) -> None:
        session = None
        try:
            session = NvmlSession()
            self._ask(session)
        except NvmlUnavailableError as error:
            self._known = replace(self._known, failure=str(error))
        except StopReading:
            pass
        except Exception as error:
            log.debug("GPUs could not be asked", exc_info=True)
            self._known = replace(self._known, failure=f"an unexpected {error!r}")
        finally:
            self._done.set()
            if session is not None:
                session.close()

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise StopReading

    def _ask(self, session: NvmlSession) -> None:
        driver, cuda = session.driver(self._go_on)
        self._known = replace(self._known, driver=driver, cuda=cuda)
        listed = session.devices(self._go_on)
        named, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
        visible = visible_devices(listed, named, order)
        self._known = replace(self._known, visible=tuple(each.uuid for each in visible.devices if each is not None))
        for device in listed:
            readings = self._readings if device.mig_slot is None else self._readings & _OF_AN_INSTANCE
            reader = session.reader(device, readings, time.monotonic, 0.0, self._go_on)
            values: dict[str, float] = {}
            try:
                values = {value.reading: value.value for value in reader.read()}
                reader.notify_absent()
                unknown = tuple(notice.text for notice in reader.notices)
            except DeviceLostError as error:
                unknown = (f"{error}.",)
            finally:
                reader.close()
            self._known = replace(self._known, gpus=(*self._known.gpus, GpuHealth(device, values, unknown)))

"""The choice of devices, with what CUDA itself says of them where it runs already; it is never started from here."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

import torch

from lightning_gpuopt.telemetry.nvml import Notice
from lightning_gpuopt.telemetry.visible import Chosen, CudaDevice, NvmlDevice, choose_devices, visible_devices


def chooser(
    wanted: str | Sequence[int | str], current: int, notices: deque[Notice]
) -> Callable[[Sequence[NvmlDevice]], list[Chosen]]:
    """What picks the wanted devices (see ``visible.choose_devices``) from NVML's, on the sampler's thread.

    ``current`` is the CUDA ordinal that ``"auto"`` means; ``notices`` take what the user should hear of it.
    """

    def choose(listed: Sequence[NvmlDevice]) -> list[Chosen]:
        order, named = os.environ.get("CUDA_DEVICE_ORDER"), os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = visible_devices(listed, named, order, cuda_devices())
        chosen = choose_devices(wanted, listed, visible, current)
        if visible.order_is_guess:
            text = (
                "this machine has GPUs of several models, which CUDA numbers by speed, and CUDA was not queried here: "
                "the numbers in gpu/{i}/ are NVML's. With CUDA_DEVICE_ORDER=PCI_BUS_ID both are the same."
            )
            notices.append(Notice("info", "gpu-order", text))
        return chosen

    return choose


def choose_current(ordinal: int) -> Callable[[Sequence[NvmlDevice]], list[Chosen]]:
    """What picks the device of that CUDA ordinal; for a process in which CUDA runs."""
    return chooser("auto", ordinal, deque())


def cuda_devices() -> list[CudaDevice]:
    """Each CUDA ordinal's UUID and PCI address; empty while CUDA is not initialised.

    To initialise it here would break every later ``fork`` of a process that trains on the CPU. Counting the devices
    makes torch ask NVML once, so call this on the sampler's thread.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [_describe(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


def _describe(properties: object) -> CudaDevice:
    """The UUID came with torch 2.4 or so, the PCI address later."""
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    address = "" if bus is None else f"{domain or 0:08x}:{bus:02x}:{slot or 0:02x}"
    return CudaDevice(uuid=str(getattr(properties, "uuid", "")), pci_bus_id=address)

"""What CUDA itself says of its devices, where it runs already; it is never started from here."""

from __future__ import annotations

import torch

from lightning_gpuopt.telemetry.visible import CudaDevice

__all__ = ["cuda_devices"]


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

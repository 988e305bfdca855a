"""From CUDA's device numbers to NVML's devices: ordinal -> UUID -> NVML, with ``CUDA_VISIBLE_DEVICES`` and MIG.

CUDA numbers the visible devices by speed, NVML all devices by PCI address, so a number of one means nothing to the
other: hence two types. The rules for ``CUDA_VISIBLE_DEVICES`` are those of the CUDA programming guide ("CUDA
Environment Variables"), as ``torch.cuda`` reads them too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

CudaOrdinal = NewType("CudaOrdinal", int)  # number of a device in CUDA, after ``CUDA_VISIBLE_DEVICES``
NvmlIndex = NewType("NvmlIndex", int)  # number of a physical GPU in NVML and nvidia-smi


@dataclass(frozen=True)
class NvmlDevice:
    """A GPU, or a MIG instance of one, as NVML lists it."""

    uuid: str  # ``GPU-…`` or ``MIG-…``
    index: NvmlIndex  # of the physical GPU; an instance has its parent's
    name: str = ""  # of the model
    pci_bus_id: str = ""  # ``domain:bus:device.function``; an instance has its parent's
    mig_slot: int | None = None  # which instance of its parent, None for a physical GPU


@dataclass(frozen=True)
class CudaDevice:
    """What an initialised CUDA says of one ordinal; empty if it does not tell."""

    uuid: str = ""  # with or without the ``GPU-`` or ``MIG-`` prefix
    pci_bus_id: str = ""  # ``domain:bus:device``, the function does not matter


@dataclass(frozen=True)
class Visible:
    """The devices that CUDA programs of this process see, in CUDA's order."""

    devices: tuple[NvmlDevice | None, ...]  # by ordinal; None if NVML does not know the device that CUDA sees
    order_is_guess: bool = False  # GPUs of several models, whose order by speed CUDA was not asked for


@dataclass(frozen=True)
class Chosen:
    device: NvmlDevice
    ordinal: CudaOrdinal | None  # None when it is outside the visible set


class DeviceNotFoundError(LookupError):
    """A requested device does not exist; the message names it and the visible ones."""


def visible_devices(
    listed: Sequence[NvmlDevice],
    cuda_visible_devices: str | None = None,
    cuda_device_order: str | None = None,
    cuda: Sequence[CudaDevice] = (),
) -> Visible:
    """What each CUDA ordinal stands for; in ``listed`` MIG instances follow their parent.

    ``cuda`` is what an initialised CUDA says of each ordinal; it is empty when CUDA must not be initialised.
    """
    from_variable, by_number = _read_variable(_default_order(listed), listed, cuda_visible_devices)
    if cuda:
        return Visible(tuple(_match(device, listed, from_variable[i : i + 1]) for i, device in enumerate(cuda)))
    models = {device.name for device in listed}
    guess = by_number and len(models) > 1 and cuda_device_order != "PCI_BUS_ID"
    return Visible(tuple(from_variable), guess)


def choose_devices(
    wanted: str | Sequence[int | str], listed: Sequence[NvmlDevice], visible: Visible, current: int = 0
) -> list[Chosen]:
    """The devices to monitor, each once; DeviceNotFoundError: one is not there.

    ``wanted`` is ``"auto"`` (the ordinal ``current``), ``"all"`` (all that are visible), or ordinals and UUIDs; of a
    UUID a beginning is enough, if only one device has it.
    """
    ordinals = {device.uuid: CudaOrdinal(i) for i, device in enumerate(visible.devices) if device is not None}
    if wanted == "all":
        found = [device for device in visible.devices if device is not None]
    else:
        found = [_find(one, listed, visible) for one in ([current] if wanted == "auto" else wanted)]
    return [Chosen(device, ordinals.get(device.uuid)) for device in dict.fromkeys(found)]


def _default_order(listed: Sequence[NvmlDevice]) -> list[NvmlDevice]:
    """Without the variable: every GPU, in place of one that is split its first MIG instance."""
    first: dict[NvmlIndex, NvmlDevice] = {}
    for device in listed:
        if device.index not in first or device.mig_slot == 0:
            first[device.index] = device
    return list(first.values())


def _read_variable(
    default: Sequence[NvmlDevice], listed: Sequence[NvmlDevice], variable: str | None
) -> tuple[list[NvmlDevice], bool]:
    """The devices that ``CUDA_VISIBLE_DEVICES`` names, and whether they depend on how CUDA numbers them.

    The first entry decides whether all are UUIDs or numbers; an entry that names nothing ends the list, and one that
    names a device again empties it.
    """
    if variable is None:
        return list(default), True
    entries = [entry.strip() for entry in variable.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), None)
    named: list[NvmlDevice] = []
    for entry in entries:
        device = _by_uuid(entry, listed) if kind and entry.startswith(kind) else None
        number = re.match(r"\+?\d+", entry)  # CUDA reads numbers as strtoul does: "1gpu" is 1
        if kind is None and number and int(number.group()) < len(default):
            device = default[int(number.group())]
        if device is None:
            break
        if device in named:
            return [], False
        named.append(device)
    return named, kind is None and bool(named)


def _by_uuid(entry: str, listed: Sequence[NvmlDevice]) -> NvmlDevice | None:
    exact = [device for device in listed if device.uuid == entry]
    found = exact or [device for device in listed if device.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _match(cuda: CudaDevice, listed: Sequence[NvmlDevice], named: Sequence[NvmlDevice]) -> NvmlDevice | None:
    """The NVML device that CUDA means; of a split GPU the instance that the variable names, or the first one."""
    found = [device for device in listed if cuda.uuid and bare(device.uuid) == bare(cuda.uuid)]
    if not found and cuda.pci_bus_id:
        found = [d for d in listed if d.pci_bus_id and _pci(d.pci_bus_id) == _pci(cuda.pci_bus_id)]
    if not found or found[0].mig_slot is not None:
        return found[0] if found else None
    instances = [d for d in listed if d.index == found[0].index and d.mig_slot is not None]
    return next((device for device in named if device in instances), instances[0] if instances else found[0])


def bare(uuid: str) -> str:
    """A UUID as both CUDA and NVML have it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def _pci(bus_id: str) -> tuple[int, ...]:
    """``00000000:3B:00.0`` as numbers without the function: the drivers write the domain with four or eight digits."""
    return tuple(int(part, 16) for part in bus_id.split(".")[0].split(":"))


def _find(wanted: int | str, listed: Sequence[NvmlDevice], visible: Visible) -> NvmlDevice:
    if isinstance(wanted, str):
        device = _by_uuid(wanted, listed)
    else:
        device = visible.devices[wanted] if wanted < len(visible.devices) else None
    if device is None:
        seen = [f"{i} ({d.uuid}, {d.name})" if d else f"{i} (unknown)" for i, d in enumerate(visible.devices)]
        raise DeviceNotFoundError(
            f"there is no GPU {wanted!r} here; visible after CUDA_VISIBLE_DEVICES: {', '.join(seen) or 'none'}"
        )
    return device

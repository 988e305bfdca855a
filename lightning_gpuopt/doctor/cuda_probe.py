"""What CUDA says of the GPUs, and how fast copies to them are.

Run as a process of its own, ``python -m lightning_gpuopt.doctor.cuda_probe``, which prints one line of JSON: a sick
driver can hang, or end, whoever asks it.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Final

import torch

from lightning_gpuopt.doctor.facts import CopyRates, CudaDeviceFacts, CudaFacts
from lightning_gpuopt.telemetry.health import HealthQuestion
from lightning_gpuopt.telemetry.visible import bare

_BYTES: Final = 64 << 20
_COPIES: Final = 5
_BUDGET_S: Final = 4.0  # no further device's copies are measured after so long
_LINK: Final = frozenset({"pcie_generation", "pcie_lanes"})
_LINK_TIMEOUT_S: Final = 1.0


def probe(clock: Callable[[], float] = time.perf_counter) -> CudaFacts:
    """Ask torch's CUDA, and measure copies to each device that it sees."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        refusal = str(warned[0].message).partition("(Triggered internally")[0] if warned else ""
        return CudaFacts(refusal=" ".join(refusal.split()))
    began_s = clock()
    devices: list[CudaDeviceFacts] = []
    failure = ""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        copies = None
        if clock() - began_s < _BUDGET_S:
            try:
                copies = copy_rates(torch.device("cuda", index), uuid, clock)
            except RuntimeError as error:  # out of memory, an exclusive mode, a device that fails
                failure = f"cuda:{index}: {str(error).splitlines()[0]}"
        devices.append(CudaDeviceFacts(properties.name, uuid, (properties.major, properties.minor), copies))
    return CudaFacts(True, tuple(torch.cuda.get_arch_list()), tuple(devices), failure)


def copy_rates(device: torch.device, uuid: str, clock: Callable[[], float] = time.perf_counter) -> CopyRates:
    """Measure copies from host memory to a device, and ask NVML for its link where it has a ``uuid``.

    RuntimeError if CUDA refuses.
    """
    target = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    pinned = torch.zeros(_BYTES, dtype=torch.uint8).pin_memory()
    pageable = torch.zeros(_BYTES, dtype=torch.uint8)

    def copy(source: torch.Tensor) -> float:
        began_s = clock()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return clock() - began_s

    def rate(source: torch.Tensor) -> float:
        copy(source)  # the first one sets up what the others use, and wakes the link
        return _BYTES / 1e9 / median(copy(source) for _ in range(_COPIES))

    pinned_gb_s, pageable_gb_s = rate(pinned), rate(pageable)
    generation, lanes = _link_while(lambda: copy(pinned), uuid) if uuid else (None, None)
    return CopyRates(pinned_gb_s, pageable_gb_s, generation, lanes)


def _link_while(copy: Callable[[], object], uuid: str) -> tuple[int | None, int | None]:
    """Generation and lanes of the PCIe link while copies run: idle, the link is slower than it can be."""
    question = HealthQuestion(_LINK)
    question.start()
    until_s = time.monotonic() + _LINK_TIMEOUT_S
    while not question.done and time.monotonic() < until_s:
        copy()
    for gpu in question.answer(timeout_s=0.1).gpus:
        if bare(gpu.device.uuid) == bare(uuid):
            generation, lanes = (gpu.values.get(name) for name in ("pcie_generation", "pcie_lanes"))
            return None if generation is None else int(generation), None if lanes is None else int(lanes)
    return None, None


def main() -> None:
    try:
        facts = probe()
    except Exception as error:
        facts = CudaFacts(failure=f"CUDA does not start: {(str(error) or repr(error)).splitlines()[0]}")
    print(json.dumps(asdict(facts)))  # noqa: T201 - this is what it is for


if __name__ == "__main__":
    main()

"""All checks of an environment, one after the other."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpuopt.doctor import gatherers
from lightning_gpuopt.doctor.check import Check, not_known
from lightning_gpuopt.doctor.facts import CopyRates, CudaFacts, TorchFacts
from lightning_gpuopt.doctor.gpu_checks import copies_check, gpu_checks, torch_check, visible_check
from lightning_gpuopt.doctor.version_checks import LOOKED_AT, version_checks
from lightning_gpuopt.telemetry.health import HealthQuestion, NvmlHealth
from lightning_gpuopt.telemetry.visible import bare
from lightning_gpuopt.utils.time_limit import NoAnswerError, within

_NVML_S: Final = 3.0
_CUDA_S: Final = 15.0  # a machine of eight GPUs without persistence mode takes 5 s or so to start CUDA
_PATH_S: Final = 5.0
_DATA_S: Final = 60.0  # a file system that has not answered by then: half of it is what a slow one needs


def examine(data: str | None = None, probe: Sequence[str] = gatherers.PROBE) -> list[Check]:
    """Look at GPUs, host, versions, and a dataset (OSError: no folder or file); ``probe`` is the command for CUDA."""
    silent = ""
    if data is not None:
        try:
            within(_PATH_S, lambda clock: _require(data))
        except NoAnswerError as error:
            silent = str(error)
    free = gatherers.free_cpus()  # before we are busy ourselves
    question = HealthQuestion()
    question.start()
    checks: list[Check] = []
    torch: TorchFacts | None = None
    cuda: CudaFacts | None = None
    try:
        torch = gatherers.torch_facts()
    except Exception as error:  # a broken installation fails in ways of its own
        line = (str(error) or repr(error)).splitlines()[0]
        why = "Training needs torch."
        checks.append(Check("torch", "problem", f"torch cannot be imported: {line}", {}, why, "reinstall torch"))
    nvml = question.answer(_NVML_S)
    if torch is not None:
        cuda = None if torch.cuda is None else gatherers.ask_cuda(_CUDA_S, probe)
        checks.append(torch_check(torch, nvml, cuda))
    checks += _gpus(nvml, cuda)
    if torch is not None:
        gpus = len(nvml.visible or (cuda.devices if cuda is not None else ()))
        from lightning_gpuopt.doctor.host_checks import host_checks  # with torch

        host = gatherers.host_facts(free)
        checks += host_checks(replace(host, memory_rates=gatherers.memory_rates(host)), torch, gpus)
    checks += version_checks(gatherers.versions_of(LOOKED_AT), nvml.cuda)
    if data is not None and torch is not None:
        checks += [not_known("data", f"{data}: {silent}")] if silent else _of_data(data)
    return checks


def _require(path: str) -> None:
    mode = os.stat(path).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):  # who reads a pipe or a device may wait for ever
        raise OSError(errno.EINVAL, "not a folder or file", path)


def _of_data(path: str) -> Iterator[Check]:
    from lightning_gpuopt.doctor.data import data_facts
    from lightning_gpuopt.doctor.data_checks import data_check, lmdb_check

    try:
        facts = within(_DATA_S, lambda clock: data_facts(path, clock))
    except NoAnswerError as error:
        yield not_known("data", f"{path}: {error}")
        return
    yield data_check(facts)
    lmdb = lmdb_check(facts)
    if lmdb is not None:
        yield lmdb


def _gpus(nvml: NvmlHealth, cuda: CudaFacts | None) -> Iterator[Check]:
    seen = visible_check(nvml)
    if seen is not None:
        yield seen
    split = {gpu.device.index for gpu in nvml.gpus if gpu.device.mig_slot is not None}
    for gpu in nvml.gpus:
        if gpu.device.mig_slot is not None:
            if gpu.unknown:
                yield not_known(f"gpu{gpu.device.index}.mig{gpu.device.mig_slot}", " ".join(gpu.unknown))
            continue
        copies = _copies_to(gpu.device.uuid, cuda)
        yield from gpu_checks(gpu, has_instances=gpu.device.index in split, copies=copies)
        if copies is not None:
            yield copies_check(int(gpu.device.index), copies, gpu.values)


def _copies_to(uuid: str, cuda: CudaFacts | None) -> CopyRates | None:
    devices = cuda.devices if cuda is not None else ()
    return next((device.copies for device in devices if bare(device.uuid) == bare(uuid)), None)

"""What is reported of a fit: its report, its notes, and the environment it ran in."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from lightning_gpuopt import _lightning
from lightning_gpuopt._lightning import LightningModule, Trainer
from lightning_gpuopt._measured import PhaseTimes
from lightning_gpuopt._version import __version__
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import headroom
from lightning_gpuopt.diagnosis.record import Stretch
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.stalls import diagnose, remarks, verdict_of
from lightning_gpuopt.timeline.windows import Window


def report_of(
    times: PhaseTimes, measured: Measurement | None, threshold: float, *, stretches: list[Window], **known: Any
) -> StallReport:
    """Put a report together.

    Args:
        times: the phases of the whole run.
        measured: its steady part; None before its first step.
        threshold: share of wall time from which on a cause is reported, 0-1.
        stretches: the run in stretches.
        **known: fields of the report that are known already.
    """
    findings = diagnose(measured, threshold) if measured is not None else []
    waterfall = measured.waterfall if measured is not None else None
    read = measured is not None and measured.gpu is not None and measured.gpu.steps > 0
    return StallReport(
        verdict=verdict_of(findings),
        wall_s=times.wall_s,
        phases=times.phases,
        findings=findings,
        steps=times.steps,
        step_s=waterfall.step_s if waterfall is not None else None,
        gpu_idle_s=waterfall.idle_s if waterfall is not None and read else None,
        headroom=headroom(measured) if measured is not None else None,
        timeline=[
            Stretch(each.start_s, each.times.wall_s, each.times.steps, each.times.phases, each.gpu_utilization)
            for each in stretches
        ],
        **known,
    )


def notes_of(
    times: PhaseTimes, measured: Measurement | None, threshold: float, known: list[str], changed_after: int | None
) -> list[str]:
    """What could not be measured, and what is no cause but worth a word.

    Args:
        times: the phases of the whole run.
        measured: its steady part; None before its first step.
        threshold: share of wall time from which on something is worth a word, 0-1.
        known: notes so far.
        changed_after: steps after which the loader was changed; None where it was not.
    """
    if measured is None or not measured.times.steps:
        since = "have run" if changed_after is None else "have run since the loader was changed"
        steps = times.steps - (changed_after or 0)
        return [*known, f"Only {steps} steps {since}, warm-up included: nothing is diagnosed."]
    if measured.waterfall.on_gpu and not measured.waterfall.steps:
        return [*known, "The GPU had finished no step after the warm-up when this was written: nothing is diagnosed."]
    return known + remarks(measured, threshold)


def environment_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    """Machine, versions, and what makes two runs comparable: model, kind of step, ranks."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "lightning_gpuopt": __version__,
        "lightning": _lightning.version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "device": f"{device.type} ({name})",
        "ranks": str(trainer.world_size),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "model": f"{type(pl_module).__name__} ({_parameters(pl_module)} parameters)",
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "batch_size": ", ".join(str(_batch_size(each)) for each in _lightning.train_loaders(trainer)),
    }


def _batch_size(loader: Any) -> int | None:
    """Samples of a batch; a DataLoader with a batch sampler leaves the number to that."""
    number = getattr(loader, "batch_size", None)
    if number is None:
        number = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return number if isinstance(number, int) else None


def _parameters(pl_module: LightningModule) -> int:
    """Their number, without those of lazy modules that have no size yet."""
    return sum(each.numel() for each in pl_module.parameters() if not isinstance(each, UninitializedParameter))

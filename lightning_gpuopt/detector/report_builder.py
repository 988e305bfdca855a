"""Builds the report of a fit: findings, notes, and the environment."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt._version import __version__
from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning import LightningModule, Trainer
from lightning_gpuopt.detector.rank_watch import gradients_of, is_sharded
from lightning_gpuopt.detector.run_settings import RunSettingsWatch
from lightning_gpuopt.diagnosis.causes.epoch import restart_in_run
from lightning_gpuopt.diagnosis.code_places import hot_spots_of
from lightning_gpuopt.diagnosis.diagnose import remarks, verdict_of
from lightning_gpuopt.diagnosis.hints import PaddedBatch, device_hints, padding_hints
from lightning_gpuopt.diagnosis.kernel_hints import kernel_hints
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import headroom, loader_costs
from lightning_gpuopt.diagnosis.record import Change, Finding, Hint, Stretch
from lightning_gpuopt.diagnosis.refuted import without_refuted
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.witnesses import idle_shares
from lightning_gpuopt.measurements.phases import STEP_HOOKS, PhaseTimes
from lightning_gpuopt.timeline.windows import Window

# what an option is called, at its end, whose value is shown to nobody
_SECRET: Final = re.compile(
    r"(^|[^a-z])(\w*key|token|secret|passw(or)?d|passphrase|pwd|auth|credentials?)$", re.IGNORECASE
)
_IN_URL: Final = re.compile(r"//[^/@\s]+:[^/@\s]+@")
_LONGEST: Final = 200  # characters of a word of the command: ``python -c`` has a whole script in one
_LARGE_BYTES: Final = 16 << 20  # bytes from which on a tensor or array in the hyperparameters is noted


def report_of(
    times: PhaseTimes,
    measured: Measurement,
    findings: list[Finding],
    threshold: float,
    *,
    stretches: list[Window],
    own_callbacks: frozenset[str] = frozenset(),
    run_settings: RunSettingsWatch | None = None,  # on CUDA only
    padded: Sequence[PaddedBatch] = (),
    **known: Any,
) -> StallReport:
    """Put a report of fields ``known`` together: ``times`` are of the whole run, ``measured`` since the last change."""
    waterfall, kernels = measured.waterfall, measured.kernels
    steady = waterfall.steps > 0
    if steady:
        findings = _of_whole_run(findings, times, measured, threshold, known.get("changes", ()))
    read = measured.gpu is not None and measured.gpu.steps > 0
    device = known.get("environment", {}).get("device", "").partition(" ")[0]
    gpus = torch.cuda.device_count() if device == "cpu" else 0
    return StallReport(
        verdict=verdict_of(findings, measured=steady, look_missed=measured.look_missed),
        wall_s=times.wall_s,
        phases=times.phases,
        findings=findings,
        hot_spots=[spots for each in findings if (spots := hot_spots_of(each, measured.sampled))],
        steps=times.steps,
        step_s=waterfall.step_s,
        measured_steps=waterfall.steps if waterfall.step_s is not None else None,
        gpu_idle_s=waterfall.idle_s + waterfall.diagnosis_s if read else None,
        hints=[*_hints(run_settings, measured, findings), *device_hints(device, gpus), *padding_hints(padded)],
        kernels=list(kernels.dearest) if kernels is not None else [],
        kernel_kinds=dict(kernels.kinds) if kernels is not None else {},
        kernel_summary=kernels.summary if kernels is not None else {},
        idle_shares=idle_shares(measured),
        lightning_work=lightning_work(measured.times, own_callbacks),
        headroom=headroom(measured),
        loader_costs=loader_costs(measured),
        timeline=[
            Stretch(each.start_s, each.times.wall_s, each.times.steps, each.times.phases, each.gpu_utilization)
            for each in stretches
        ],
        **known,
    )


def _hints(settings: RunSettingsWatch | None, measured: Measurement, findings: list[Finding]) -> list[Hint]:
    waterfall = measured.waterfall
    known = settings.hints(measured, findings) if settings is not None else []
    return kernel_hints(measured.kernels, 1 - waterfall.share(waterfall.idle_s), known)


def _of_whole_run(
    found: list[Finding], times: PhaseTimes, measured: Measurement, threshold: float, changes: Sequence[Change]
) -> list[Finding]:
    """Findings since the last change, with those that only the whole run shows, without advice that was refuted."""
    persists = any(each.setting == "persistent_workers" and each.kept for each in changes)
    restart = None if persists else restart_in_run(times, measured, threshold)
    if restart is not None and all(each.cause != restart.cause for each in found):
        found = sorted([*found, restart], key=lambda each: each.share, reverse=True)
    return without_refuted(found, changes)


def notes_of(
    times: PhaseTimes,
    measured: Measurement,
    threshold: float,
    known: list[str],
    changed_after: int | None,
    least_steps: int,
) -> list[str]:
    """Notes on what could not be measured, and on what is no cause but worth knowing.

    If nothing was measured, the first says why. The loader was changed after ``changed_after`` steps (None: it was
    not); a verdict needs ``least_steps`` since then, warm-up included.
    """
    if not measured.times.steps:
        steps = times.steps - (changed_after or 0)
        count = "1 step has run" if steps == 1 else f"{steps} steps have run"
        since = "" if changed_after is None else " since the loader was changed"
        needed = f"a verdict needs at least {least_steps}"
        return [f"Only {count}{since}, warm-up included: nothing is diagnosed, {needed}.", *known]
    if measured.waterfall.on_gpu and not measured.waterfall.steps:
        return ["The GPU had finished no step after the warm-up when this was written: nothing is diagnosed.", *known]
    return known + remarks(measured, threshold)


def lightning_work(times: PhaseTimes, own_callbacks: frozenset[str]) -> dict[str, float]:
    """Lightning's own work in a mean step since the last change, in seconds by part, the largest first."""
    parts = {name: seconds for name, seconds in times.loops.items() if seconds > 0}
    if times.signal_broadcast_s:
        parts["signal broadcast"] = times.signal_broadcast_s
    for name, seconds in times.callbacks.items():
        callback, _, hook = name.rpartition(".")
        if callback in own_callbacks and hook in STEP_HOOKS:
            parts[callback] = parts.get(callback, 0.0) + seconds
    steps = max(times.steps, 1)
    return {name: parts[name] / steps for name in sorted(parts, key=lambda name: -parts[name])}


def data_in_hyperparameters(*owners: object) -> tuple[str, ...]:
    """Datasets, loaders and large arrays that ``save_hyperparameters`` has taken in, each as ``"dataset (Photos)"``."""
    found = {}
    for owner in owners:
        kept = getattr(owner, "hparams", None)
        for name, value in dict(kept).items() if isinstance(kept, Mapping) else ():
            bytes_ = getattr(value, "nbytes", 0)
            large = isinstance(bytes_, int) and bytes_ >= _LARGE_BYTES
            if large or isinstance(value, (Dataset, DataLoader)):
                found[str(name)] = type(value).__name__
    return tuple(f"{name} ({kind})" for name, kind in found.items())


def environment_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    gradient_bytes = None if is_sharded(trainer.strategy) else gradients_of(pl_module, accumulated=1).bytes
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": command_line(sys.orig_argv),
        "lightning_gpuopt": __version__,
        "lightning": lightning.version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "device": f"{device.type} ({name})",
        "ranks": str(trainer.world_size),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "model": f"{type(pl_module).__name__} ({_parameters(pl_module)} parameters)",
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "batch_size": ", ".join(str(_batch_size(each)) for each in lightning.train_loaders(trainer)),
        **({"gradient_bytes": str(gradient_bytes)} if gradient_bytes is not None else {}),
    }


def command_line(words: Sequence[str]) -> str:
    """A command as it would be typed, without the interpreter's folder, and without values that look secret."""
    shown, hide = [os.path.basename(words[0])] if words else [], False
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        is_secret = _SECRET.search(name) is not None
        if hide and not word.startswith("-") and not os.path.exists(word):
            word = "***"
        elif is_secret and equals:
            word = f"{name}=***"
        hide = is_secret and not equals and word.startswith("-")
        word = _IN_URL.sub("//***@", word)
        shown.append(word if len(word) <= _LONGEST else f"{word[:_LONGEST]}...")
    return shlex.join(shown)


def owners_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, object]:
    """Objects whose attributes may grow, by display name: the module, callbacks, loggers and datasets."""
    callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
    others = [*callbacks, *trainer.loggers, *lightning.train_datasets(trainer)]
    ours = __name__.partition(".")[0]
    users = [each for each in others if each is not None and not type(each).__module__.startswith(ours)]
    return {type(pl_module).__name__: pl_module} | {type(each).__name__: each for each in users}


def _batch_size(loader: Any) -> int | None:
    """Samples of a batch; a DataLoader with a batch sampler leaves the number to that."""
    number = getattr(loader, "batch_size", None)
    if number is None:
        number = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return number if isinstance(number, int) else None


def _parameters(pl_module: LightningModule) -> int:
    """Their number, without those of lazy modules that have no size yet."""
    return sum(each.numel() for each in pl_module.parameters() if not isinstance(each, UninitializedParameter))

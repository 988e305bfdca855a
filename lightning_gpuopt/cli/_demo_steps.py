"""What the demo can do about a finding: the steps it knows, each read off a report, applied by other settings."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_gpuopt.cli._demo_training import CROP_SIZE, Settings
from lightning_gpuopt.diagnosis.record import Finding, RunRecord
from lightning_gpuopt.diagnosis.storage_step import STORAGE_CAUSES
from lightning_gpuopt.images.cost import resize_for
from lightning_gpuopt.storage.build.build import build_lmdb
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.model import Interval

StepName = Literal["fast-decoder", "smaller-images", "more-workers"]
STEP_NAMES: Final[tuple[str, ...]] = get_args(StepName)

_SURE_GAIN: Final = 1.1
"""More workers are tried where the low end of their prediction promises so much."""


@dataclass(frozen=True)
class Step:
    """One piece of advice, ready to be applied.

    Attributes:
        name: of its column and its folder.
        cause: the finding that advises it.
        code: what is applied, in lines.
        arguments: what is new in it as plain data, for the report.
        changes: fields of `Settings`.
        predicted: steps per second after over before, as (low, mid, high); None where the report does not say.
        image_size: shorter side in pixels of the LMDB's images, where one is built first.
    """

    name: StepName
    cause: str
    code: tuple[str, ...]
    arguments: dict[str, Any]
    changes: dict[str, Any]
    predicted: Interval | None
    image_size: int | None = None


def fast_decoder(finding: Finding, settings: Settings) -> Step | None:
    """The folder as it is, by the package's own decoder."""
    if settings.storage != "files" or finding.evidence.get("storage_step") != "ImageFolderDataModule":
        return None
    return Step(
        "fast-decoder",
        finding.cause,
        (f'ImageFolderDataModule("train", "val", decode="tensor", crop_size={CROP_SIZE}, ...)',),
        {"datamodule": "ImageFolderDataModule"},
        {"storage": "folder"},
        _predicted(finding),
    )


def smaller_images(finding: Finding, settings: Settings) -> Step | None:
    """An LMDB of images as large as the crops need."""
    size = resize_for(CROP_SIZE)
    advised = f"--image-size {size}" in str(finding.evidence.get("storage_step"))
    as_second = settings.storage == "folder" and "small_images_gain" in finding.evidence
    if settings.storage == "lmdb" or not (advised or as_second):
        return None
    return Step(
        "smaller-images",
        finding.cause,
        (
            f'build_lmdb("train", "train.lmdb", image_size={size})',
            f'LMDBDataModule("train.lmdb", "val.lmdb", decode="tensor", crop_size={CROP_SIZE}, ...)',
        ),
        {"datamodule": "LMDBDataModule", "image_size": size},
        {"storage": "lmdb"},
        _predicted(finding) if advised else None,
        image_size=size,
    )


def more_workers(finding: Finding, settings: Settings) -> Step | None:
    """Worker processes, where the prediction leaves no doubt: on few CPUs they take the step's own."""
    workers, predicted = finding.settings.get("num_workers"), finding.predicted_speedup
    if settings.persistent_workers or not workers or workers <= settings.num_workers:
        return None
    if predicted is None or predicted[0] < _SURE_GAIN:
        return None
    arguments = {"num_workers": workers, "persistent_workers": True}
    code = f"num_workers={workers}, persistent_workers=True"
    return Step("more-workers", finding.cause, (code,), arguments, arguments, predicted)


STEPS: Final[tuple[Callable[[Finding, Settings], Step | None], ...]] = (fast_decoder, smaller_images, more_workers)
"""In the order in which they are tried: less work first, then more processes for what is left."""


def next_step(reports: Sequence[RunRecord], settings: Settings) -> Step | None:
    """What is advised next, of what the demo can do; None where there is nothing.

    Args:
        reports: of all runs; the latest is the last.
        settings: of that run.
    """
    *earlier, latest = reports
    steps = (read(finding, settings) for read in STEPS for finding in latest.findings)
    step = next(filter(None, steps), None)
    if step is None and any(finding.cause in STORAGE_CAUSES for finding in latest.findings):
        # Few images are measured for a report: on a busy machine one may miss what the one before has seen.
        step = next(filter(None, (smaller_images(each, settings) for run in earlier for each in run.findings)), None)
    return step


def build(images: Path, folder: Path, image_size: int) -> int:
    """Make ``train.lmdb`` and ``val.lmdb`` of the images, anew; nothing is left of a build that is interrupted.

    Args:
        images: holds ``train`` and ``val``.
        folder: holds the datasets and nothing else.
        image_size: shorter side in pixels.

    Returns:
        The bytes stored.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo, which may have been killed
    try:
        folder.mkdir(parents=True)
        return sum(
            build_lmdb(
                images / part,
                folder / f"{part}.lmdb",
                num_proc=max(1, int(usable_cpus())),
                image_size=image_size,
                progress=sys.stderr.isatty(),
            ).num_bytes
            for part in ("train", "val")
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _predicted(finding: Finding) -> Interval | None:
    low, mid, high = (finding.evidence.get(f"storage_step_speedup{end}") for end in ("_low", "", "_high"))
    return (float(low), float(mid), float(high)) if low is not None and mid is not None and high is not None else None

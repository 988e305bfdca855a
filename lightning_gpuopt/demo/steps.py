"""What the demo can do about a finding: the steps it knows, each read off a report, applied by other settings."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_gpuopt.dali.library import load_dali
from lightning_gpuopt.demo.training import CROP_SIZE, DemoSettings, Outcome
from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.record import Finding, RunRecord
from lightning_gpuopt.images.cost import resize_for
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.telemetry.host import usable_cpus

StepName = Literal["fast-decoder", "smaller-images", "worker-search", "prefetch", "dali"]
STEP_NAMES: Final[tuple[str, ...]] = get_args(StepName)

# workers are searched for where the low end of their prediction promises so much: on few CPUs they take the step's
_SURE_GAIN: Final = 1.1

_PIL_MS: Final = ("image_decode_ms", "image_crop_ms", "image_to_float_ms")
_CLEARLY_CHEAPER: Final = 0.8


@dataclass(frozen=True)
class Machine:
    on_cuda: bool = False
    has_dali: bool = False  # whether DALI can be used there

    @classmethod
    def of(cls, outcome: Outcome) -> Machine:
        return cls(outcome.on_cuda, outcome.on_cuda and _has_dali())


@dataclass(frozen=True)
class Step:
    """One piece of advice, ready to be applied."""

    name: StepName  # of its column and its folder
    cause: str  # of the finding that advises it
    code: tuple[str, ...]  # what is applied, in lines
    arguments: dict[str, Any]  # what is new in it as plain data, for the report
    changes: dict[str, Any]  # fields of `DemoSettings`
    predicted: Interval | None  # steps per second after over before; None: the report does not say
    image_size: int | None = None  # pixels, shorter side in the LMDB, if one is built first


def fast_decoder(finding: Finding, settings: DemoSettings, machine: Machine) -> Step | None:
    """The folder as it is, by the package's own decoder."""
    advised = finding.evidence.get("storage_step") == "ImageFolderDataModule"
    likely = _data_wait_grows(finding) or _cheaper(finding, "fast_decode_ms", *_PIL_MS)
    if settings.storage != "files" or not (advised or likely):
        return None
    return Step(
        "fast-decoder",
        finding.cause,
        (
            *_data_module_code("ImageFolderDataModule", "train", "val"),
            "# batches travel as uint8 and are normalised on the device",
        ),
        {"datamodule": "ImageFolderDataModule"},
        {"storage": "folder"},
        _predicted(finding),
    )


def smaller_images(finding: Finding, settings: DemoSettings, machine: Machine) -> Step | None:
    """An LMDB of images as large as the crops need."""
    size = resize_for(CROP_SIZE)
    advised = f"--image-size {size}" in str(finding.evidence.get("storage_step"))
    likely = "small_images_gain" in finding.evidence or _cheaper(finding, "small_decode_ms", "fast_decode_ms")
    if settings.storage not in ("files", "folder") or not (advised or likely):
        return None
    return Step(
        "smaller-images",
        finding.cause,
        (
            f'build_lmdb("train", "train.lmdb", image_size={size})',
            *_data_module_code("LMDBDataModule", "train.lmdb", "val.lmdb"),
        ),
        {"datamodule": "LMDBDataModule", "image_size": size},
        {"storage": "lmdb"},
        _predicted(finding) if advised else None,
        image_size=size,
    )


def worker_search(finding: Finding, settings: DemoSettings, machine: Machine) -> Step | None:
    """NumWorkersFinder, where the prediction leaves no doubt that workers help."""
    workers, predicted = finding.settings.get("num_workers"), finding.predicted_speedup
    if settings.storage == "dali" or settings.worker_search or not workers or workers <= settings.num_workers:
        return None
    if predicted is None or predicted[0] < _SURE_GAIN:
        return None
    first = max(settings.num_workers, 1)
    return Step(
        "worker-search",
        finding.cause,
        (
            "Trainer(callbacks=[NumWorkersFinder(), ...])",
            f"# starts with num_workers={first}; predicted for the report's num_workers={workers}",
        ),
        {"callback": "NumWorkersFinder"},
        {"worker_search": True, "num_workers": first, "persistent_workers": True},
        predicted,
    )


def prefetch(finding: Finding, settings: DemoSettings, machine: Machine) -> Step | None:
    """CudaPrefetcher, which looks ahead of batches that workers make."""
    if finding.cause != "host_to_device" or not machine.on_cuda or settings.prefetch:
        return None
    code, changes = "Trainer(callbacks=[CudaPrefetcher(), ...])", {"prefetch": True}
    if settings.num_workers or settings.storage == "dali":
        return Step(
            "prefetch", finding.cause, (code,), {"callback": "CudaPrefetcher"}, changes, finding.predicted_speedup
        )
    worker = {"num_workers": 1, "persistent_workers": True}
    return Step(  # the prediction is of the copy alone
        "prefetch",
        finding.cause,
        (code, "# and num_workers=1: it prefetches batches that workers make"),
        {"callback": "CudaPrefetcher", **worker},
        {**changes, **worker},
        None,
    )


def dali(finding: Finding, settings: DemoSettings, machine: Machine) -> Step | None:
    """DALI decodes the same images on the GPU, where the CPU or the storage is still too slow."""
    row = cause_of(finding.cause)
    decodes = row.storage or "pipeline" in row.cases
    if not decodes or settings.storage == "dali" or not (machine.on_cuda and machine.has_dali):
        return None
    suffix = ".lmdb" if settings.storage == "lmdb" else ""
    return Step(
        "dali",
        finding.cause,
        (
            f'DALIDataModule("train{suffix}", "val{suffix}", crop_size={CROP_SIZE}, ...)',
            "# decoded, cropped (8 % to 100 % of the area) and normalised on the GPU",
        ),
        {"datamodule": "DALIDataModule"},
        {"storage": "dali"},
        None,
    )


# in the order in which they are tried: less work first, then processes and streams for what is left
STEPS: Final[tuple[Callable[[Finding, DemoSettings, Machine], Step | None], ...]] = (
    fast_decoder,
    smaller_images,
    worker_search,
    prefetch,
    dali,
)


def next_step(
    reports: Sequence[RunRecord], settings: DemoSettings, machine: Machine | None = None, tried: Collection[str] = ()
) -> Step | None:
    """What reports (the latest last) advise of what the demo can do and has not ``tried``; ``machine`` None: no GPU."""
    *earlier, latest = reports
    machine = machine or Machine()

    def first(reads: Sequence[Callable[..., Step | None]], findings: Sequence[Finding]) -> Step | None:
        steps = (read(finding, settings, machine) for read in reads for finding in findings)
        return next((step for step in steps if step is not None and step.name not in tried), None)

    if (step := first(STEPS[:2], latest.findings)) is not None:
        return step
    if any(cause_of(finding.cause).storage or _data_wait_grows(finding) for finding in latest.findings):
        # Few images are measured for a report: on a busy machine one may miss what the one before has seen.
        step = first([smaller_images], [finding for run in earlier for finding in run.findings])
    return step or first(STEPS[2:], latest.findings)


def settings_after(settings: DemoSettings, outcome: Outcome) -> DemoSettings:
    """What the run after this one starts with: a number of workers that was found is kept."""
    found = outcome.found_num_workers
    return replace(settings, worker_search=False, num_workers=found) if found is not None else settings


def build(images: Path, folder: Path, image_size: int) -> int:
    """Make ``train.lmdb`` and ``val.lmdb`` of the images, anew; the bytes stored. An interrupted build leaves nothing.

    ``folder`` holds the datasets and nothing else; ``image_size`` is the shorter side in pixels.
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


def _data_wait_grows(finding: Finding) -> bool:
    """Whether a finding is of a loader that became slower: then no other finding covers the same time."""
    return finding.cause == "slowdown" and finding.evidence.get("phase") == "data_wait"


def _cheaper(finding: Finding, then: str, *now: str) -> bool:
    """Whether what was measured of a few images promises a gain, even where no share of the loader's time is sure."""
    evidence = finding.evidence
    if not cause_of(finding.cause).storage or not all(name in evidence for name in (then, *now)):
        return False
    return float(evidence[then]) <= _CLEARLY_CHEAPER * sum(float(evidence[name]) for name in now)


def _data_module_code(name: str, train: str, val: str) -> tuple[str, str]:
    return (
        f'{name}("{train}", "{val}", decode="tensor",',
        f"{' ' * len(name)} crop_size={CROP_SIZE}, normalize=(mean, std), ...)",
    )


def _has_dali() -> bool:
    try:
        load_dali()
    except ImportError:
        return False
    return True

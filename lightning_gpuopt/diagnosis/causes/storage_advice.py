"""Which step of storing or decoding images helps a late loader, and by how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import speedup_of_cheaper_batches
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loading import ImageSamples, WorkerTimes

# batches per second over now, from which on a step is advised; and over a simpler step's, if there is one
_WORTH_IT: Final = 1.1
_LARGER: Final = 1.2  # images whose shorter side is so many times what is needed are worth making smaller
# a dataset that takes less CPU than PIL does, by more than two measurements differ, does not use PIL
_MEASURED_TWICE: Final = 1.15
_CHANNELS: Final = 3
_UINT8_OF_FLOAT: Final = 0.25
# bytes a value: the mean also counts labels, and a shorter last batch of an epoch
_BETWEEN_UINT8_AND_FLOAT: Final = 2.0


@dataclass(frozen=True)
class StorageAdvice:
    """What to change in how samples are stored or decoded; empty if nothing of the kind helps."""

    advice: str = ""
    evidence: dict[str, float | str] = field(default_factory=dict)  # the unit is in each name


def storage_advice(cause: str, measurement: Measurement) -> StorageAdvice:
    """The step for a cause; empty for causes that no such step takes away, and for pipelines of their own."""
    if not CAUSES[cause].storage or measurement.late_pipelines is not None:
        return StorageAdvice()
    images = measurement.images
    if images is None:
        return StorageAdvice(CAUSES[cause].cases.get("any_data", ""))
    if cause == "slow_storage":
        return _fewer_files(images)
    return _cheaper_decoding(cause, images, measurement)


def _fewer_files(images: ImageSamples) -> StorageAdvice:
    """For workers that wait for storage: its latency is paid once for many images."""
    evidence = _costs(images)
    smaller = f" --image-size {images.small_size}" if _much_larger(images) else ""
    build = f"lightning-gpuopt lmdb build SRC DST{smaller}"
    if not images.in_lmdb:
        why = f": at {images.width}x{images.height} pixels they are larger than the crops need" if smaller else ""
        advice = f"Pack the image files into few large files, which are read ahead: {build}, then LMDBDataModule{why}."
        return StorageAdvice(advice, evidence | {"storage_step": build})
    ordered = "The samples are in an LMDB already: shuffle_window=... reads neighbours together."
    if not smaller:
        return StorageAdvice(ordered, evidence | {"storage_step": "shuffle_window"})
    return StorageAdvice(f"{ordered} Smaller images are fewer bytes: {build}.", evidence | {"storage_step": build})


def _cheaper_decoding(cause: str, images: ImageSamples, measurement: Measurement) -> StorageAdvice:
    """For a CPU that decodes: the fast decoder, then smaller images."""
    evidence = _costs(images)
    if images.crop_size is None:  # no square crops: the fast path is not for this task
        return StorageAdvice("" if images.own else CAUSES[cause].cases.get("any_data", ""), evidence)
    if images.fast_decode_s is None or images.small_decode_s is None:
        if images.own:
            return StorageAdvice()
        reader = f'Read the images with ImageFolderDataModule(..., decode="tensor", crop_size={images.crop_size}, '
        advice = f"{reader}normalize=...): it decodes only the crop, and normalises on the device."
        return StorageAdvice(advice, {"storage_step": "ImageFolderDataModule"})
    now_s = _decodes_in_s(images, measurement)
    if now_s is None:
        return StorageAdvice("", evidence)
    sentences = []
    fast = None if images.fast else _Gain.of(measurement, images, now_s, images.fast_decode_s)
    if fast is not None and fast.batches >= _WORTH_IT:
        what = "Give the DataModule" if images.own else "Read the images with ImageFolderDataModule(...,"
        how = f'decode="tensor", crop_size={images.crop_size}'
        sentences.append(
            f"{what} {how}{'' if images.own else ')'}: its decoder gives a crop in {_ms(images.fast_decode_s)} here, "
            f"PIL in {_ms(now_s)}: {fast}."
        )
        evidence |= {"storage_step": 'decode="tensor"' if images.own else "ImageFolderDataModule"} | fast.evidence
    small = _Gain.of(measurement, images, now_s, images.small_decode_s)
    needed = _WORTH_IT * (fast.batches if sentences and fast is not None else 1.0)
    if small is not None and small.batches >= needed and _much_larger(images):
        build = f"lightning-gpuopt lmdb build SRC DST --image-size {images.small_size}"
        read = f'LMDBDataModule(DST, decode="tensor", crop_size={images.crop_size})'
        more = "Or build" if sentences else "Build"
        sentences.append(
            f"{more} an LMDB of smaller images ({images.width}x{images.height} now): {build}, read by {read}: "
            f"{_ms(images.small_decode_s)} a crop, {small}."
        )
        if "storage_step" in evidence:
            evidence |= {"small_images_gain": round(small.batches, 2)}
        else:
            evidence |= {"storage_step": build} | small.evidence
    return StorageAdvice(" ".join(sentences), evidence)


def _decodes_in_s(images: ImageSamples, measurement: Measurement) -> float | None:
    """CPU seconds to decode an image; None if unknown: a dataset faster than PIL does not decode with PIL."""
    workers = measurement.workers
    if not workers.batches or not images.batch_size:
        return None
    sample_s = workers.data_cpu_s / workers.batches / images.batch_size * _MEASURED_TWICE
    if images.fast:
        ways = [images.fast_decode_s]
    else:
        steps = [images.pil_decode_s, images.pil_crop_s, images.pil_float_s if _makes_floats(images, workers) else 0.0]
        sums = list(accumulate(seconds or 0.0 for seconds in steps))
        ways = [*reversed(sums)]
    fitting = [seconds for seconds in ways if seconds is not None and 0 < seconds <= sample_s]
    return fitting[0] if fitting else None


def _makes_floats(images: ImageSamples, workers: WorkerTimes) -> bool:
    """Whether a batch leaves its worker as float32 rather than uint8."""
    if images.crop_size is None or not images.batch_size or workers.batch_bytes is None:
        return False
    pixels = images.batch_size * _CHANNELS * images.crop_size**2
    return workers.batch_bytes > _BETWEEN_UINT8_AND_FLOAT * pixels


@dataclass(frozen=True)
class _Gain:
    """What cheaper decoding brings: batches that the loader can make, and training steps, per second over now."""

    batches: float
    steps: Interval | None

    @classmethod
    def of(cls, measurement: Measurement, images: ImageSamples, now_s: float, then_s: float) -> _Gain | None:
        """The gain where an image's decoding takes ``then_s`` CPU seconds in place of ``now_s``; None: not measured."""
        workers, host = measurement.workers, measurement.host
        if not workers.batches or not images.batch_size or then_s >= now_s:
            return None
        service_s = workers.busy_s / workers.batches
        stretch = 1.0  # a worker that queues for a CPU saves its part of the queueing too
        if measurement.loader.num_workers and host is not None and host.worker_cpu:
            stretch = min(1 + (host.worker_queued or 0.0) / host.worker_cpu, workers.busy_s / max(workers.cpu_s, 1e-9))
        sure_s = (now_s - then_s) * images.batch_size
        # What else the dataset does for a sample is not known: at best the DataModule does without. With floats some of
        # it is normalising, which goes through their values once more, as making them does, and moves to the device.
        rest_s = 0.0 if images.own else max(workers.data_cpu_s / workers.batches - now_s * images.batch_size, 0.0)
        best_s = sure_s + rest_s
        if _makes_floats(images, workers) and not images.fast:  # a batch of uint8 has a quarter of the bytes
            collated_s = (1 - _UINT8_OF_FLOAT) * workers.collate_cpu_s / workers.batches
            sure_s += collated_s + min((images.pil_float_s or 0.0) * images.batch_size, rest_s)
            best_s += collated_s
        saved = (sure_s, best_s)
        left = [max(service_s - each * max(stretch, 1.0), then_s * images.batch_size) for each in saved]
        if left[0] >= service_s:
            return None
        expected, best = (speedup_of_cheaper_batches(measurement, each) for each in saved)
        speedup = (*expected[:2], max(expected[2], best[1])) if expected and best else None
        return cls(service_s / left[0], speedup)

    @property
    def evidence(self) -> dict[str, float | str]:
        found: dict[str, float | str] = {"storage_step_gain": round(self.batches, 2)}
        if self.steps is None:
            return found
        low, mid, high = (round(factor, 2) for factor in self.steps)
        return found | {"storage_step_speedup": mid, "storage_step_speedup_low": low, "storage_step_speedup_high": high}

    def __str__(self) -> str:
        steps = f", {self.steps[1]:.1f}x steps" if self.steps is not None else ""
        return f"about {self.batches:.1f}x batches{steps} per second"


def _much_larger(images: ImageSamples) -> bool:
    """Whether smaller images would do for the crops."""
    if images.crop_size is None or images.small_size is None or images.width is None or images.height is None:
        return False
    return min(images.width, images.height) >= _LARGER * images.small_size


def _costs(images: ImageSamples) -> dict[str, float | str]:
    found = {
        "image_read_ms": images.read_s,
        "image_decode_ms": images.pil_decode_s,
        "image_crop_ms": images.pil_crop_s,
        "image_to_float_ms": images.pil_float_s,
        "fast_decode_ms": images.fast_decode_s,
        "small_decode_ms": images.small_decode_s,
    }
    evidence: dict[str, float | str] = {
        name: round(seconds * 1e3, 3) for name, seconds in found.items() if seconds is not None
    }
    if images.width is not None and images.height is not None:
        evidence |= {"image_width": images.width, "image_height": images.height}
    return evidence


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"

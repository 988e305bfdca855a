"""What a run waits for between epochs: workers that start, the first batch, a shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Candidate, Finding
from lightning_gpuopt.measurements.phases import PhaseTimes

_NAMES: Final = {"workers": "starting workers", "first_batch": "the first batch", "buffer": "filling a shuffle buffer"}
_MIN_EPOCHS: Final = 2

_WITHOUT_BUFFER: Final = ("litdata", "mds")
"""Kinds of streams that shuffle by the numbers of their samples."""


@dataclass(frozen=True)
class Pause:
    """The set-up of a mean epoch, taken apart, in seconds.

    Attributes:
        workers: making iterators and starting workers, with the imports of those that were spawned.
        first_batch: making the first batch, as long as any batch takes.
        buffer: what an iterable dataset does before its first sample.
    """

    workers: float
    first_batch: float
    buffer: float

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(_NAMES, key=lambda name: float(getattr(self, name)))


def pause_of(measurement: Measurement) -> Pause | None:
    """The set-up of a mean epoch; None where no epoch began.

    The first fetch of an epoch waits for the first batch, which takes a worker as long as any other; what it waits
    beyond that is the start of the workers, or an iterable dataset that fills its buffer.
    """
    times, workers = measurement.times, measurement.workers
    setup_s = times.phases["epoch_setup"]
    if not times.epochs or setup_s <= 0:
        return None
    waited = measurement.waterfall.wait("epoch_setup") / setup_s / times.epochs
    batch_s = workers.busy_s / workers.batches if workers is not None and workers.batches else times.first_fetch_s
    first_s = min(times.first_fetch_s, batch_s * times.epochs)
    rest_s = times.first_fetch_s - first_s
    before_s = setup_s - times.first_fetch_s
    if measurement.loader.duplicates is not None:
        return Pause(before_s * waited, first_s * waited, rest_s * waited)
    return Pause((before_s + rest_s) * waited, first_s * waited, 0.0)


def restart(measurement: Measurement) -> Iterator[Candidate]:
    """Workers that are started again for every epoch, and pauses of workers that live on."""
    loader, waterfall, pause = measurement.loader, measurement.waterfall, pause_of(measurement)
    if pause is None or not loader.num_workers or loader.persistent_workers:
        return
    restart_s = waterfall.wait("epoch_setup")
    if loader.duplicates is not None:  # workers that live on fill their buffers as well
        restart_s = pause.workers * measurement.times.epochs
    yield waterfall.share(restart_s), lambda: _restart(measurement, pause, restart_s)


def _restart(measurement: Measurement, pause: Pause, restart_s: float) -> Finding:
    times, waterfall = measurement.times, measurement.waterfall
    evidence: dict[str, float | str] = {
        "epoch_setup_s_per_epoch": round(restart_s / times.epochs, 3),
        "epochs": times.epochs,
        "largest_part": _NAMES[pause.largest],
        "starting_workers_s_per_epoch": round(pause.workers, 3),
        "first_batch_s_per_epoch": round(pause.first_batch, 3),
    }
    if pause.buffer:
        evidence["shuffle_buffer_s_per_epoch"] = round(pause.buffer, 3)
    for name, seconds in (
        ("checkpoint", waterfall.wait("checkpoint")),
        ("validation", waterfall.validation_s),
        ("validation_setup", times.validation_setup_s),
    ):
        if seconds:
            evidence[f"{name}_s_per_epoch"] = round(seconds / times.epochs, 3)
    advice = CAUSES["epoch_restart"].advice
    if pause.largest == "first_batch":
        advice += f" {CAUSES['epoch_restart'].cases['first_batch']}"
    return Finding("epoch_restart", waterfall.share(restart_s), evidence, advice, {"persistent_workers": True})


def validation_restart(measurement: Measurement) -> Iterator[Candidate]:
    """Workers of the validation's loader that are started again for each validation.

    The first validation has to start them, and each has to wait for its first batch, which takes a worker as long as
    any other.
    """
    times, reading, waterfall = measurement.times, measurement.validation, measurement.waterfall
    if reading is None or reading.workers is None or not reading.workers.batches or times.validations < _MIN_EPOCHS:
        return
    batch_s = reading.workers.busy_s / reading.workers.batches
    each_s = max(times.validation_setup_s / times.validations - batch_s, 0.0)
    on_device = min(waterfall.validation_s / (times.phases["validation"] or 1.0), 1.0)
    share = waterfall.share(each_s * (times.validations - 1) * on_device)
    evidence: dict[str, float | str] = {
        "loader": reading.loader.key,
        "num_workers": reading.facts.num_workers or 0,
        "validations": times.validations,
        "starting_workers_s_per_validation": round(each_s, 3),
        "first_batch_s_per_validation": round(batch_s, 3),
    }
    advice = CAUSES["epoch_restart"].cases["validation"]
    yield share, lambda: Finding("epoch_restart", share, evidence, advice, {"persistent_workers": True})


def restart_in_run(run: PhaseTimes, measurement: Measurement, threshold: float) -> Finding | None:
    """Workers that were started again for every epoch, where the run since the last change has seen none begin.

    Each change of the workers begins such a run anew, and may be in the last epoch.

    Args:
        run: the phases of the whole run.
        measurement: of the run since the last change.
        threshold: share of the run's wall time from which on it is reported, 0-1.
    """
    loader = measurement.loader
    if measurement.times.epochs or run.epochs < _MIN_EPOCHS or not run.wall_s:
        return None
    if not loader.num_workers or loader.persistent_workers or loader.duplicates is not None:
        return None
    per_epoch_s = run.phases["epoch_setup"] / run.epochs
    share = per_epoch_s * (run.epochs - 1) / run.wall_s  # the first epoch's workers have to be started anyway
    if share < threshold:
        return None
    evidence: dict[str, float | str] = {"epoch_setup_s_per_epoch": round(per_epoch_s, 3), "epochs": run.epochs}
    return Finding("epoch_restart", share, evidence, CAUSES["epoch_restart"].advice, {"persistent_workers": True})


def pause_note(measurement: Measurement, threshold: float) -> str | None:
    """What the beginning of epochs takes beside workers that are started again, where that is worth a word."""
    loader, waterfall, pause = measurement.loader, measurement.waterfall, pause_of(measurement)
    if pause is None:
        return None
    epochs_s = waterfall.wait("epoch_setup")
    restarted = bool(loader.num_workers) and not loader.persistent_workers
    if restarted:
        epochs_s = (
            (pause.buffer + pause.first_batch) * measurement.times.epochs if loader.duplicates is not None else 0.0
        )
    if waterfall.share(epochs_s) < threshold:
        return None
    part = "buffer" if restarted and pause.buffer > pause.first_batch else pause.largest
    what = "making the loader's iterator" if part == "workers" else _NAMES[part]
    fills = part == "buffer"
    if fills and measurement.source is not None and measurement.source.kind in _WITHOUT_BUFFER:
        what, fills = "opening the stream's first shards", False
    remedy = "A smaller buffer fills faster." if fills else "Fewer, longer epochs make it rarer."
    return (
        f"{waterfall.share(epochs_s):.0%} of the time goes to the beginning of epochs, most of it to {what} "
        f"({getattr(pause, part):.2f} s an epoch). {remedy}"
    )

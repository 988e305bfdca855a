"""What a run waits for at the beginning of epochs: workers that start, the first batch, a buffer or an index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.libraries import LIBRARIES
from lightning_gpuopt.measurements.phases import PhaseTimes

_PARTS: Final = {
    "workers": "starting workers",
    "first_batch": "the first batch",
    "buffer": "filling a shuffle buffer",
    "index": "filling a buffer or reading an index",
    "shards": "opening the stream's first shards",
    "iterator": "making the loader's iterator",
}
_MIN_EPOCHS: Final = 2

# by kind of stream what it does before its first sample; a class of one's own may fill a buffer, or read an index
_FIRST: Final[dict[str | None, str]] = {row.kind: row.begins_with for row in LIBRARIES}


@dataclass(frozen=True)
class Pause:
    """The set-up of a mean epoch, taken apart, in seconds."""

    workers: float  # making iterators and starting workers, with the imports of spawned ones
    first_batch: float  # as long as any batch takes; 0 if the training process makes it
    buffer: float  # what a stream does before its first sample
    loading: float = 0.0  # making the first batch in the training process: loading as any other, no part of the pause

    @property
    def seconds(self) -> float:
        """All of it, but for ``loading``."""
        return self.workers + self.first_batch + self.buffer


def pause_of(measurement: Measurement) -> Pause | None:
    """The set-up of a mean epoch; None if no epoch began.

    What its first fetch waits beyond an ordinary batch is the start of the workers, or a stream that fills its buffer.
    """
    times, workers, loader = measurement.times, measurement.workers, measurement.loader
    setup_s = times.phases["epoch_setup"]
    if not times.epochs or setup_s <= 0:
        return None
    waited = measurement.waterfall.wait("epoch_setup") / setup_s / times.epochs
    batch_s = math.inf
    if workers.batches:
        batch_s = workers.busy_s / workers.batches
    elif not loader.num_workers and times.steps > times.epochs and not _works_beside(measurement):
        batch_s = times.phases["data_wait"] / (times.steps - times.epochs)  # the others' first fetches
    first_s = min(times.first_fetch_s, batch_s * times.epochs)
    rest_s, before_s = times.first_fetch_s - first_s, setup_s - times.first_fetch_s
    here_s = first_s if not loader.num_workers and not _works_beside(measurement) else 0.0
    if loader.duplicates is None and loader.num_workers is not None:
        before_s, rest_s = before_s + rest_s, 0.0
    return Pause(before_s * waited, (first_s - here_s) * waited, rest_s * waited, here_s * waited)


def _works_beside(measurement: Measurement) -> bool:
    """Whether batches are made beside the training process, in threads or processes that are no DataLoader's."""
    return measurement.source.work != "training process"


def restart(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """The beginning of epochs, whatever it is that training waits for."""
    times, waterfall, loader = measurement.times, measurement.waterfall, measurement.loader
    pause = pause_of(measurement)
    if pause is None or (share := waterfall.share(pause.seconds * times.epochs)) < threshold:
        return
    part = max(("workers", "first_batch", "buffer"), key=lambda name: float(getattr(pause, name)))
    if part == "buffer":
        part = _FIRST.get(measurement.source.kind, "index")
    if part == "workers" and (loader.persistent_workers or not loader.num_workers):
        part = "iterator"
    evidence: dict[str, float | str] = {
        "epoch_setup_s_per_epoch": round(pause.seconds, 3),
        "epochs": times.epochs,
        "largest_part": _PARTS[part],
        "num_workers": loader.num_workers or 0,
    }
    for name, seconds in (
        ("starting_workers", pause.workers),
        ("first_batch", pause.first_batch),
        ("shuffle_buffer", pause.buffer),
        ("checkpoint", waterfall.wait("checkpoint") / times.epochs),
        ("validation", waterfall.validation_s / times.epochs),
        ("validation_setup", times.validation_setup_s / times.epochs),
    ):
        if seconds:
            evidence[f"{name}_s_per_epoch"] = round(seconds, 3)
    cause, advice = CAUSES["epoch_restart"], list[str]()
    settings: dict[str, Any] = {}
    if loader.num_workers and not loader.persistent_workers and part != "buffer":
        # a stream's workers that are spawned import in their first fetch
        advice, settings = [cause.advice], {"persistent_workers": True}
    if part in cause.cases:
        advice.append(cause.cases[part])
    yield Finding("epoch_restart", share, evidence, " ".join(advice), settings)


def validation_restart(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Workers of the validation's loader that are started again for each validation.

    The first validation has to start them, and each waits for its first batch, which takes as long as any other.
    """
    times, reading, waterfall = measurement.times, measurement.validation, measurement.waterfall
    if reading is None or not reading.workers.batches or times.validations < _MIN_EPOCHS:
        return
    batch_s = reading.workers.busy_s / reading.workers.batches
    each_s = max(times.validation_setup_s / times.validations - batch_s, 0.0)
    on_device = min(waterfall.validation_s / (times.phases["validation"] or 1.0), 1.0)
    share = waterfall.share(each_s * (times.validations - 1) * on_device)
    if share < threshold:
        return
    evidence: dict[str, float | str] = {
        "loader": reading.loader.key,
        "num_workers": reading.facts.num_workers or 0,
        "validations": times.validations,
        "starting_workers_s_per_validation": round(each_s, 3),
        "first_batch_s_per_validation": round(batch_s, 3),
    }
    advice = CAUSES["epoch_restart"].cases["validation"]
    yield Finding("epoch_restart", share, evidence, advice, {"persistent_workers": True})


def restart_in_run(run: PhaseTimes, measurement: Measurement, threshold: float) -> Finding | None:
    """Workers restarted for each epoch of ``run``, where ``measurement`` (since the last change) saw none begin."""
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

"""What a change will bring: the loader's throughput model and the device's own step time, as a run measured them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loader_costs import Interval, LoaderCosts
from lightning_gpuopt.measurements.loader_model import (
    MAX_SPREAD,
    MIN_SPREAD,
    LoaderModel,
    cpus_between,
    model_from,
    receive_cost,
)

SPREADS: Final = {"workers": 0.07, "without": 0.07, "storage": 0.14}
"""By what is advised: how far what came was from what was expected, in nine of ten runs. ``python -m evaluation
--predictions`` measures it in drawn runs, of which one half gives these figures, and the other checks the intervals."""

# phases that are a step's own work, but for what stopped it
_STEP_WORK: Final = ("forward", "backward", "optimizer", "other")


def loader_model(measurement: Measurement) -> LoaderModel | None:
    """Read the model off a measurement; None if workers or steps were not measured.

    The consumer is the diagnosed device, with its step time without data waits. On CUDA the host receives batches while
    the GPU computes, at no cost, unless it waits for the GPU in every step.
    """
    costs = _costs(measurement)
    return None if costs is None else replace(model_from(costs), unevenness=measurement.workers.unevenness or 0.0)


def loader_costs(measurement: Measurement) -> LoaderCosts | None:
    """What the loader and the step cost per batch; None if workers or steps were not measured."""
    return _costs(measurement) if measurement.loader.num_workers is not None else None


def _costs(measurement: Measurement) -> LoaderCosts | None:
    times, workers, host, waterfall = measurement.times, measurement.workers, measurement.host, measurement.waterfall
    if not workers.batches or not times.steps or waterfall.step_s is None:
        return None
    loader, batches = measurement.loader, workers.batches
    cpu_s = min(workers.cpu_s, workers.busy_s) / batches
    consumer_cpu_s = queued_s = free_cpus = None
    if host is not None:
        free_cpus = _cpus(host, workers.cpu_s / times.wall_s if loader.num_workers else 0.0)[0]
        if host.process_cpus is not None:
            own_s = cpu_s if not loader.num_workers else 0.0
            consumer_cpu_s = max(host.process_cpus * times.wall_s / times.steps - own_s, 0.0)
        if loader.num_workers:
            cpu_s = max(cpu_s, (host.worker_cpu or 0.0) * host.seconds / batches)
            queued_s = host.worker_queued * host.seconds / batches if host.worker_queued is not None else None
    hidden = waterfall.on_gpu and not waterfall.exposed_by
    bins = sorted(each for each, count in workers.took.items() if count)
    every = range(bins[0], bins[-1] + 1) if bins else range(0)
    return LoaderCosts(
        num_workers=loader.num_workers or 0,
        prefetch_factor=loader.prefetch_factor,
        batches=batches,
        data_s=workers.data_wall_s / batches,
        data_cpu_s=min(workers.data_cpu_s, workers.data_wall_s) / batches,
        collate_s=workers.collate_wall_s / batches,
        worker_cpu_s=cpu_s,
        queued_s=queued_s,
        consumer_s=without_data_s(measurement),
        consumer_cpu_s=consumer_cpu_s,
        receive_s=(0.0, 0.0, 0.0) if hidden else receive_cost(workers.batch_bytes or 0.0),
        usable_cpus=host.usable_cpus if host is not None else None,
        free_cpus=free_cpus,
        spread=_spread(measurement),
        edges_s=tuple(2 ** (each / 4) / 1e9 for each in [*every, every[-1] + 1]) if bins else (),
        counts=tuple(workers.took.get(each, 0) for each in every),
    )


def pipeline_model(measurement: Measurement) -> LoaderModel | None:
    """The model of a late pipeline, with its CPU threads as workers; None without exactly one, or without figures.

    Training waits for the pipeline, so it makes one batch a step: each thread takes ``num_threads`` steps for a batch.
    """
    pipelines, times, host = measurement.late_pipelines, measurement.times, measurement.host
    step_s = measurement.waterfall.step_s
    if pipelines is None or pipelines.loaders > 1 or host is None or host.process_cpus is None or not step_s:
        return None
    service_s = pipelines.num_threads * step_s
    cpu_s = min(pipelines.times.decode_cpu_s / pipelines.times.batches, service_s)
    return LoaderModel(
        service_s=service_s,
        cpu_s=cpu_s,
        receive_s=(0.0, 0.0, 0.0),
        consumer_s=without_data_s(measurement),
        consumer_cpu_s=max(host.process_cpus * times.wall_s / times.steps - cpu_s, 0.0),  # with what reading takes
        cpus=_cpus(host, 0.0),
    )


def step_without_s(measurement: Measurement, idle_s: float, host_s: float) -> float:
    """Seconds of a mean step without something that takes the host ``host_s`` and that the device waits ``idle_s`` for.

    Both are seconds of the stretch. The device's wait goes away. If the host never waits for the GPU, more may: a
    host whose remaining step is shorter than the GPU's runs ahead, and hides its other work as well.
    """
    times, waterfall = measurement.times, measurement.waterfall
    steps = max(waterfall.steps, 1)
    left_s = (waterfall.step_s or 0.0) - idle_s / steps
    in_step = bool(waterfall.exposed_by) or times.signal_broadcast_s > 0
    if waterfall.work_s > 0 and not in_step and times.step_s is not None:
        left_s = min(left_s, max(waterfall.work_s / steps, times.step_s - host_s / times.steps))
    return max(left_s, 1e-6)


def without_data_s(measurement: Measurement) -> float:
    """Seconds of a mean step that never waits for data."""
    return step_without_s(measurement, measurement.waterfall.wait("data_wait"), measurement.times.phases["data_wait"])


def ceiling(measurement: Measurement) -> float | None:
    """Upper bound of a faster loader's gain, as steps per second relative to now; None without steps."""
    step_s = measurement.waterfall.step_s
    return max(step_s / without_data_s(measurement), 1.0) if step_s else None


def _cpus(host: HostActivity, worker_cpus: float) -> Interval:
    """CPUs that we can count on: at worst what we use now and what is free."""
    if host.process_cpus is None or host.free_cpus is None:
        return (host.usable_cpus,) * 3
    return cpus_between(host.process_cpus + worker_cpus + host.free_cpus, host.usable_cpus)


def _spread(measurement: Measurement) -> float:
    workers = measurement.workers
    if workers.unevenness is None:
        return MIN_SPREAD
    # twice the standard error of the mean service time
    return min(max(2 * math.sqrt(workers.unevenness / workers.batches), MIN_SPREAD), MAX_SPREAD)


def speedup_of_workers(measurement: Measurement, workers: int, prefetch_factor: int | None = None) -> Interval | None:
    """Steady steps per second with so many workers (0: none) and batches ahead, over now; ``what-if`` says the same."""
    ahead = prefetch_factor or measurement.loader.prefetch_factor
    return _speedup(_explained(measurement), measurement, workers, ahead)


def speedup_of_threads(measurement: Measurement, threads: int) -> Interval | None:
    """Steps per second with so many pipeline threads, over now: (low, mid, high); nothing else may be the limit."""
    return _speedup(pipeline_model(measurement), measurement, threads)


def _explained(measurement: Measurement) -> LoaderModel | None:
    """The model, which explains the step as it was."""
    model, step_s, loader = loader_model(measurement), measurement.waterfall.step_s, measurement.loader
    if model is None or step_s is None:
        return None
    return model.explaining(step_s, loader.num_workers or 0, loader.prefetch_factor or 2)


def _speedup(
    model: LoaderModel | None,
    measurement: Measurement,
    workers: int,
    prefetch_factor: int | None = None,
    spread: float = SPREADS["workers"],
) -> Interval | None:
    now_s = measurement.waterfall.step_s
    if model is None or now_s is None:
        return None
    best_s, expected_s, worst_s = model.step_s(workers, prefetch_factor or 2)
    return _ordered(now_s / worst_s, now_s / expected_s, now_s / best_s, spread)


def speedup_of_cheaper_batches(measurement: Measurement, saved_s: float) -> Interval | None:
    """Steady steps per second with batches that cost so much less CPU time each, over now: (low, mid, high)."""
    model, waterfall, loader = _explained(measurement), measurement.waterfall, measurement.loader
    if model is None or waterfall.step_s is None:
        return None
    if not loader.num_workers:
        host_s = measurement.times.phases["data_wait"]
        # the first batch of an epoch is fetched before its steps begin, and is no part of them
        share = min(host_s / (model.service_s * measurement.times.steps), 1.0)
        seconds = min(share * saved_s * waterfall.steps, waterfall.wait("data_wait"))
        return speedup_without(measurement, seconds, spread=SPREADS["storage"])
    cheaper = replace(model, service_s=max(model.service_s - saved_s, 0.0), cpu_s=max(model.cpu_s - saved_s, 0.0))
    return _speedup(cheaper, measurement, loader.num_workers, loader.prefetch_factor, SPREADS["storage"])


def speedup_without(
    measurement: Measurement, seconds: float, host_s: float = 0.0, spread: float = SPREADS["without"]
) -> Interval | None:
    """Steady steps per second without these seconds of the device's waits, over now: (low: half of it, mid, high).

    ``host_s`` are seconds of the training process that the advice takes away as well; ``spread``: see ``SPREADS``.
    """
    waterfall = measurement.waterfall
    if waterfall.step_s is None or not waterfall.steps:
        return None
    left_s = step_without_s(measurement, seconds, host_s) if host_s else waterfall.step_s - seconds / waterfall.steps
    return _speedup_to(max(left_s, 1e-6), waterfall.step_s, spread)


def speedup_of_persistent_workers(epoch_s: float, set_up_s: float, first_batch_s: float) -> Interval:
    """Epochs per second with persistent workers over now: (low, mid, high); ``first_batch_s`` of ``set_up_s`` stays."""
    return _speedup_to(epoch_s + first_batch_s, epoch_s + set_up_s, SPREADS["without"])


def _speedup_to(left_s: float, now_s: float, spread: float) -> Interval:
    """Of seconds that become fewer; at the low end by half as many."""
    return _ordered(2 * now_s / (now_s + left_s), now_s / left_s, now_s / left_s, spread)


def headroom(measurement: Measurement) -> float | None:
    """Share of the steady step that is not the step's own work, 0-1: the upper bound of the gain."""
    waterfall = measurement.waterfall
    if not waterfall.step_s:
        return None
    waits_s = waterfall.step_waits_s if waterfall.on_gpu else _own_waits_s(measurement)
    return min(waits_s / (waterfall.step_s * waterfall.steps), 1.0)


def _own_waits_s(measurement: Measurement) -> float:
    """Seconds that the training process could save: all but the step's own work and what surrounds it."""
    phases = measurement.times.phases
    waits_s = phases["data_wait"] + phases["logging"] + phases["transfer"] + measurement.times.step_hooks_s
    stopped = (measurement.times.collecting, measurement.times.compiling)
    waits_s += (measurement.communication_s or 0.0) * measurement.times.steps
    return waits_s + sum(seconds.get(phase, 0.0) for seconds in stopped for phase in _STEP_WORK)


def _ordered(low: float, mid: float, high: float, spread: float) -> Interval:
    """An interval as wide as predictions of its kind are uncertain; no change for the better predicts a loss."""
    mid = max(mid, 1.0)
    return max(min(low, mid / (1 + spread)), 1.0), mid, max(high, mid * (1 + spread))

"""What a change will bring: the loader's throughput model and the device's own step time, as a run measured them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loader_costs import Interval, LoaderCosts
from lightning_gpuopt.measurements.loader_model import MIN_SPREAD, LoaderModel, receive_cost

SPREADS: Final = {"workers": 0.04, "without": 0.07, "storage": 0.14}
"""By what is advised: how far what came was from what was expected, in nine of ten runs. ``python -m evaluation
--predictions`` measures it in drawn runs, of which one half gives these figures, and the other checks the intervals."""

# phases that are a step's own work, but for what stopped it
_STEP_WORK: Final = ("forward", "backward", "optimizer", "other")


def loader_model(measurement: Measurement) -> LoaderModel | None:
    """Read the model off a measurement; None where workers or steps were not measured.

    The consumer is the diagnosed device, with its step time without data waits. On CUDA the host receives batches while
    the GPU computes, at no cost, unless it waits for the GPU in every step.
    """
    times, workers, host, waterfall = measurement.times, measurement.workers, measurement.host, measurement.waterfall
    if not workers.batches or not times.steps or waterfall.step_s is None:
        return None
    service_s = workers.busy_s / workers.batches
    cpu_s = min(workers.cpu_s / workers.batches, service_s)
    consumer_cpu_s = 0.0
    cpus = (math.inf, math.inf, math.inf)
    if host is not None:
        cpus = _cpus(host, workers.cpu_s / times.wall_s if measurement.loader.num_workers else 0.0)
        if host.process_cpus is not None:
            own_s = cpu_s if not measurement.loader.num_workers else 0.0
            consumer_cpu_s = max(host.process_cpus * times.wall_s / times.steps - own_s, 0.0)
    hidden = waterfall.on_gpu and not waterfall.exposed_by
    return LoaderModel(
        service_s=service_s,
        cpu_s=cpu_s,
        receive_s=(0.0, 0.0, 0.0) if hidden else receive_cost(workers.batch_bytes or 0.0),
        consumer_s=without_data_s(measurement),
        consumer_cpu_s=consumer_cpu_s,
        cpus=cpus,
        spread=_spread(measurement),
        unevenness=workers.unevenness or 0.0,
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

    Both are seconds of the stretch. The device's wait goes away. Where the host never waits for the GPU, more may: a
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
    """What any change of the loader brings at the very most, as steps per second over now; None without steps."""
    step_s = measurement.waterfall.step_s
    return max(step_s / without_data_s(measurement), 1.0) if step_s else None


def _cpus(host: HostActivity, worker_cpus: float) -> Interval:
    """CPUs that we can count on: at worst what we use now and what is free, at best all that we may use."""
    usable = max(host.usable_cpus, 0.1)
    if host.process_cpus is None or host.free_cpus is None:
        return usable, usable, usable
    sure = min(max(host.process_cpus + worker_cpus + host.free_cpus, 0.1), usable)
    return sure, (sure + usable) / 2, usable


def _spread(measurement: Measurement) -> float:
    workers = measurement.workers
    if workers.unevenness is None:
        return MIN_SPREAD
    # twice the standard error of the mean service time
    return min(max(2 * math.sqrt(workers.unevenness / workers.batches), MIN_SPREAD), 0.5)


def speedup_of_workers(measurement: Measurement, workers: int) -> Interval | None:
    """Steady steps per second with so many workers (at least 1), over now: (low, mid, high)."""
    return _speedup(loader_model(measurement), workers, measurement)


def speedup_of_threads(measurement: Measurement, threads: int) -> Interval | None:
    """Steps per second with so many pipeline threads, over now: (low, mid, high); nothing else may be the limit."""
    return _speedup(pipeline_model(measurement), threads, measurement)


def _speedup(
    model: LoaderModel | None, workers: int, measurement: Measurement, spread: float = SPREADS["workers"]
) -> Interval | None:
    now_s = measurement.waterfall.step_s
    if model is None or now_s is None:
        return None
    best_s, expected_s, worst_s = model.step_s(workers)
    return _ordered(now_s / worst_s, now_s / expected_s, now_s / best_s, spread)


def speedup_of_cheaper_batches(measurement: Measurement, saved_s: float, saved_cpu_s: float) -> Interval | None:
    """Steady steps per second with batches that cost so much less each, over now: (low, mid, high)."""
    model, waterfall = loader_model(measurement), measurement.waterfall
    if model is None or waterfall.step_s is None:
        return None
    if not measurement.loader.num_workers:
        host_s = measurement.times.phases["data_wait"]
        # the first batch of an epoch is fetched before its steps begin, and is no part of them
        share = min(host_s / (model.service_s * measurement.times.steps), 1.0)
        seconds = min(share * saved_s * waterfall.steps, waterfall.wait("data_wait"))
        return speedup_without(measurement, seconds, spread=SPREADS["storage"])
    service_s, cpu_s = max(model.service_s - saved_s, 0.0), max(model.cpu_s - saved_cpu_s, 0.0)
    cheaper = replace(model, service_s=service_s, cpu_s=min(cpu_s, service_s))
    return _speedup(cheaper, measurement.loader.num_workers, measurement, SPREADS["storage"])


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
    """Epochs per second with workers that persist, over now: (low, mid, high).

    ``first_batch_s``, a part of ``set_up_s``, stays; half of what they save is the low end.
    """
    return _speedup_to(epoch_s + first_batch_s, epoch_s + set_up_s, SPREADS["without"])


def _speedup_to(left_s: float, now_s: float, spread: float) -> Interval:
    """Of seconds that become fewer; at the low end by half as many."""
    return _ordered(2 * now_s / (now_s + left_s), now_s / left_s, now_s / left_s, spread)


def headroom(measurement: Measurement) -> float | None:
    """Share of the steady step that is not the step's own work, 0-1: what could be gained at the very most."""
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


def loader_costs(measurement: Measurement) -> LoaderCosts | None:
    """What the loader and the step cost per batch; None where workers or steps were not measured."""
    model, workers, host, loader = loader_model(measurement), measurement.workers, measurement.host, measurement.loader
    if model is None or loader.num_workers is None:
        return None
    cpu_s, queued_s = model.cpu_s, None
    if loader.num_workers and host is not None:
        cpu_s = max(cpu_s, (host.worker_cpu or 0.0) * host.seconds / workers.batches)
        queued_s = host.worker_queued * host.seconds / workers.batches if host.worker_queued is not None else None
    bins = sorted(each for each, count in workers.took.items() if count)
    every = range(bins[0], bins[-1] + 1) if bins else range(0)
    return LoaderCosts(
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        batches=workers.batches,
        data_s=workers.data_wall_s / workers.batches,
        data_cpu_s=min(workers.data_cpu_s, workers.data_wall_s) / workers.batches,
        collate_s=workers.collate_wall_s / workers.batches,
        worker_cpu_s=cpu_s,
        queued_s=queued_s,
        consumer_s=model.consumer_s,
        consumer_cpu_s=model.consumer_cpu_s if host is not None and host.process_cpus is not None else None,
        receive_s=model.receive_s,
        usable_cpus=host.usable_cpus if host is not None else None,
        free_cpus=model.cpus[0] if host is not None else None,
        spread=model.spread,
        edges_s=tuple(2 ** (each / 4) / 1e9 for each in [*every, every[-1] + 1]) if bins else (),
        counts=tuple(workers.took.get(each, 0) for each in every),
    )

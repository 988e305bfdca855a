"""Why the loader is late: which of its parts is the bottleneck."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_gpuopt.diagnosis.causes.common import (
    at_most,
    bound_to_one_cpu,
    exposed_by,
    host_evidence,
    memory_is_short,
    percent_of,
    rounded,
    threads_per_worker,
)
from lightning_gpuopt.diagnosis.causes.epoch import pause_of
from lightning_gpuopt.diagnosis.causes.storage_advice import storage_advice
from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import loader_model, speedup_of_workers, without_data_s
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loader_model import HEADROOM_LEFT, most_workers, next_workers, prefetch_needed
from lightning_gpuopt.measurements.loading import QueueTimes

# workers that make batches for less than this share of their time are not the bottleneck; what follows them is
_BUSY: Final = 0.6
# a worker whose time is CPU time, or queueing for a CPU, for at least this share computes; below it, it is blocked
_COMPUTES: Final = 0.5
# so much CPU, and this share of all that may be used, has to be left over for another worker to be worth starting
_A_FREE_CPU: Final = 0.5
_FREE_SHARE: Final = 0.05
# a quota that stops us in this share of the scheduler's periods is the limit, not the number of CPUs
_THROTTLED: Final = 0.1
# variance over squared mean of the batches' times: from here on single batches stand out (an exponential has 1)
_UNEVEN: Final = 1.0
_COMPUTING: Final = ("slow_transform", "cpu_saturated", "cpu_throttled")
_A_THIRD: Final = 1 / 3  # what explains so much of the wait for data is a finding of its own
_MOSTLY: Final = 0.5
_NEARLY_EVERY: Final = 0.8
_SELDOM: Final = 0.3


def data_findings(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    for cause, share in data_shares(measurement, threshold).items():
        if share >= threshold:
            yield data_finding(cause, share, measurement)


def data_shares(measurement: Measurement, threshold: float) -> dict[str, float]:
    """Shares of the time that are the wait for data, by cause; where one is below the threshold the largest has all."""
    causes, share, wait_s = explained_s(measurement), _data_share(measurement), measurement.times.phases["data_wait"]
    shares = {cause: share * seconds / (wait_s or 1.0) for cause, seconds in causes.items()}
    if min(shares.values()) < threshold or not wait_s:
        shares = {next(iter(causes)): share}
    return shares


def _data_share(measurement: Measurement) -> float:
    """Share of the time that is the wait for data, with the first batches of epochs that the training process makes."""
    pause = pause_of(measurement)
    first_s = pause.loading * measurement.times.epochs if pause is not None else 0.0
    return measurement.waterfall.share(measurement.waterfall.wait("data_wait") + first_s)


def data_finding(cause: str, share: float, measurement: Measurement) -> Finding:
    settings = _settings(cause, measurement)
    step = storage_advice(cause, measurement)
    return Finding(
        cause,
        share,
        _evidence(measurement) | step.evidence,
        _advice(cause, measurement, settings, step.advice),
        settings,
        _prediction(measurement, settings),
    )


def explained_s(measurement: Measurement) -> dict[str, float]:
    """Seconds of the wait for data by cause, the most first; causes below a third are counted with the largest.

    First comes what was seen at the queues: fetches that waited for the pin-memory thread, or for one late batch;
    neither explains what even batches of the same mean pace would be waited for. The rest goes to making batches where
    workers are busy with that, else to handing them over.
    """
    loader, workers, queues = measurement.loader, measurement.workers, measurement.queues
    wait_s, wall_s = measurement.times.phases["data_wait"], measurement.times.wall_s
    if not loader.num_workers:
        return {_cause_from_outside(measurement) if own_workers(measurement) else "main_process_loading": wait_s}
    if not workers.batches:
        return {_cause_from_outside(measurement): wait_s}
    busy = workers.busy_s / (loader.num_workers * wall_s)
    pace_s = min(max(busy * wall_s - (wall_s - wait_s), 0.0), wait_s)
    # of several workers another's batch may lie ready than the one whose turn it is
    lies_ready = _hands_over_slowly(queues) and (busy < _BUSY or loader.num_workers == 1)
    unpinned = late = 0.0
    if queues.wait_s:
        unpinned, late = queues.unpinned_wait_s / queues.wait_s, queues.late_wait_s / queues.wait_s
    elif busy < _BUSY:  # nobody has looked
        late = 1.0
    if lies_ready or _is_even(measurement):
        late = 0.0
    seen = {"pin_memory": unpinned * wait_s, "head_of_line": late * wait_s}
    part = min((wait_s - pace_s) / max(sum(seen.values()), 1e-9), 1.0)
    seen = {cause: part * seconds for cause, seconds in seen.items()}
    left_s = wait_s - sum(seen.values())
    making_s = left_s
    if lies_ready or (busy < _BUSY and _read_quickly(measurement)):
        making_s = min(pace_s, left_s)
        if lies_ready and loader.num_workers == 1:
            making_s = min(making_s, wait_s * queues.empty / queues.fetches)
    found = Counter(seen)
    found.update(_making(making_s, measurement))
    found.update(_handing_over(left_s - making_s, measurement))
    return _that_are_much(found, wait_s)


def _that_are_much(parts: Mapping[str, float], wait_s: float) -> dict[str, float]:
    """The largest part first, with those that are less than a third of the wait, then the others."""
    first, *others = sorted(parts, key=lambda cause: parts[cause], reverse=True)
    much = {cause: parts[cause] for cause in others if parts[cause] >= _A_THIRD * wait_s > 0}
    return {first: sum(parts.values()) - sum(much.values())} | much


def _is_even(measurement: Measurement) -> bool:
    """Whether no single batch is slow, or the others are not finished behind one that is."""
    workers, queues = measurement.workers, measurement.queues
    if workers.unevenness is None or workers.unevenness < _UNEVEN:
        return True
    return queues.empty > _MOSTLY * queues.fetches


def _making(seconds: float, measurement: Measurement) -> dict[str, float]:
    """Seconds of waiting for batches that are made, by what takes the workers: collating, computing, or storage."""
    workers, loader, host = measurement.workers, measurement.loader, measurement.host
    busy = workers.busy_s / ((loader.num_workers or 1) * measurement.times.wall_s)
    if not busy:
        return {"slow_storage": seconds}
    computes = workers.cpu_s / workers.busy_s
    if host is not None:  # other threads and child processes of a worker work for it too
        computes = max(computes, (host.worker_cpu or 0.0) / busy) + (host.worker_queued or 0.0) / busy
    computes, collates = min(computes, 1.0), workers.collate_wall_s / workers.busy_s
    if collates <= _MOSTLY:
        collates = 0.0  # what is slow is reading
    parts = {
        "worker_transfer": seconds * collates,
        cpu_cause(measurement): seconds * (1 - collates) * computes,
        "slow_storage": seconds * (1 - collates) * (1 - computes),
    }
    return _that_are_much(parts, measurement.times.phases["data_wait"])


def _handing_over(seconds: float, measurement: Measurement) -> dict[str, float]:
    """Seconds of handing over, by cause: that, or CPUs that others use, which workers wait for longer than it takes."""
    host, workers, loader = measurement.host, measurement.workers, measurement.loader
    cause, short_s = "worker_transfer", 0.0
    if host is not None and host.worker_queued is not None:
        workers_s = (loader.num_workers or 1) * measurement.times.wall_s
        found = cpu_cause(measurement)
        taken = found == "cpu_throttled" or (found == "cpu_saturated" and _used_by_others(measurement) is not None)
        if taken and host.worker_queued > max((host.worker_cpu or 0.0) - workers.cpu_s / workers_s, 0.0):
            cause, short_s = found, min(seconds, host.worker_queued * workers_s)
    parts = {cause: short_s, "worker_transfer": seconds - short_s}
    return _that_are_much(parts, measurement.times.phases["data_wait"])


def _hands_over_slowly(queues: QueueTimes) -> bool:
    """Whether nearly every fetch waits although a batch is ready."""
    seldom_empty = queues.empty <= _SELDOM * queues.fetches
    return seldom_empty and queues.waits >= _NEARLY_EVERY * queues.fetches > 0


def _read_quickly(measurement: Measurement) -> bool:
    """Whether reading samples takes no longer than collating and, at most, handing over: waits with idle workers."""
    workers, wall_s = measurement.workers, measurement.times.wall_s
    number = measurement.loader.num_workers or 1
    handing_over_s = min(measurement.times.phases["data_wait"] * number, wall_s * number - workers.busy_s)
    return workers.data_wall_s <= workers.collate_wall_s + max(handing_over_s, 0.0)


def _cause_from_outside(measurement: Measurement) -> str:
    """The cause by the kernel's figures of the workers, for loaders in whose workers nothing could be timed."""
    host = measurement.host
    if host is None or host.worker_cpu is None:
        return "slow_transform"
    if host.worker_cpu + (host.worker_queued or 0.0) >= _COMPUTES:
        return cpu_cause(measurement)
    return "slow_storage"


def cpu_cause(measurement: Measurement) -> str:
    """The cause for a loader that computes: a quota stops it, no CPU is free, or its work is slow."""
    host = measurement.host
    if host is not None:
        if host.throttled is not None and host.throttled >= _THROTTLED:
            return "cpu_throttled"
        if host.free_cpus is not None and host.free_cpus < max(_A_FREE_CPU, _FREE_SHARE * host.usable_cpus):
            return "cpu_saturated"
    return "slow_transform"


def _evidence(measurement: Measurement) -> dict[str, float | str]:
    times, loader, host = measurement.times, measurement.loader, measurement.host
    workers, queues = measurement.workers, measurement.queues
    found = wait_evidence(measurement) | {"num_workers": own_workers(measurement) or loader.num_workers}
    if workers.batches:
        found["dataset_ms_per_batch"] = workers.data_wall_s / workers.batches * 1e3
        found["dataset_cpu_ms_per_batch"] = workers.data_cpu_s / workers.batches * 1e3
        found["collate_ms_per_batch"] = workers.collate_wall_s / workers.batches * 1e3
        found["batch_mib"] = workers.batch_bytes / 2**20 if workers.batch_bytes is not None else None
        if loader.num_workers:
            found["workers_busy_percent"] = workers.busy_s / (loader.num_workers * times.wall_s) * 100
    if queues.fetches:
        found["queue_depth"] = queues.ready / queues.fetches
        found["queue_empty_percent"] = queues.empty / queues.fetches * 100
        found["late_batch_wait_percent"] = queues.late_wait_s / queues.wait_s * 100 if queues.wait_s else None
    if host is not None:
        found["worker_cpu_percent"] = percent_of(host.worker_cpu)
        found["worker_queued_percent"] = percent_of(host.worker_queued)
        found["threads_per_worker"] = threads_per_worker(host)
    evidence = rounded(found | host_evidence(measurement)) | exposed_by(measurement.waterfall)
    return evidence | kind_evidence(measurement)


def own_workers(measurement: Measurement) -> int:
    """Threads or processes that a loader without a DataLoader has for its work, as a graph of nodes; 0: none known."""
    source = measurement.source
    if source.kind != "nodes" or source.work == "training process":
        return 0
    return source.num_workers or 0


def kind_evidence(measurement: Measurement) -> dict[str, float | str]:
    """Which of several loaders it is, and what is special about its kind."""
    source = measurement.source
    found: dict[str, float | str] = {}
    if source.key:
        found["loader"] = source.key
    if source.kind not in ("torch", "pipeline"):
        found["kind"] = source.name
        found["work"] = source.work
    if source.idle_workers:
        found["idle_workers"] = source.idle_workers
    return found


def wait_evidence(measurement: Measurement) -> dict[str, float | None]:
    times, waterfall = measurement.times, measurement.waterfall
    found: dict[str, float | None] = {
        "ms_per_step": times.phases["data_wait"] / times.steps * 1e3,
        "step_ms": (waterfall.step_s or 0.0) * 1e3,
    }
    if waterfall.on_gpu:
        found["gpu_idle_ms_per_step"] = waterfall.wait("data_wait") / waterfall.steps * 1e3
    return found


def _settings(cause: str, measurement: Measurement) -> dict[str, Any]:
    loader = measurement.loader
    if loader.num_workers is None:
        return {}
    if cause == "head_of_line":
        return _prefetch_settings(measurement)
    if cause == "worker_transfer" and _costs_more_to_hand_over(measurement):
        return {"num_workers": 0}
    if not CAUSES[cause].doing:
        return {}
    if loader.duplicates or measurement.source.unshared or (cause == "slow_storage" and memory_is_short(measurement)):
        return {}
    workers = _workers_needed(cause, measurement)
    if measurement.source.shards is not None:  # others would have none to read
        workers = min(workers, measurement.source.shards)
    if workers <= loader.num_workers:
        return {}
    model, now_s = loader_model(measurement), measurement.waterfall.step_s
    if model is not None and now_s is not None and now_s < (1 + HEADROOM_LEFT) * model.pace(workers):
        return {}  # a batch is made faster than it could be handed over, or the CPUs are the limit
    settings: dict[str, Any] = {"num_workers": workers}
    if not loader.persistent_workers:
        settings["persistent_workers"] = True
    return settings


def _costs_more_to_hand_over(measurement: Measurement) -> bool:
    """Whether a batch is made faster than a worker can hand it over."""
    model = loader_model(measurement)
    return model is not None and model.service_s < model.receive_s[1]


def _workers_needed(cause: str, measurement: Measurement) -> int:
    host, now = measurement.host, measurement.loader.num_workers or 0
    cpus = max(host.usable_cpus, 1.0) if host is not None else 4.0
    most = most_workers(cpus)
    model = loader_model(measurement)
    if cause == "slow_transform" and host is not None and host.free_cpus is not None:
        cpu_share = model.cpu_s / model.service_s if model is not None else host.worker_cpu
        if cpu_share:
            most = min(most, now + math.ceil(host.free_cpus / cpu_share))
    if model is not None:
        return next_workers(model, now, max(most, now + 1))
    waterfall = measurement.waterfall
    wait_s = waterfall.wait("data_wait") / waterfall.steps
    consumer_s = without_data_s(measurement)
    need = math.ceil(1.1 * ((wait_s + consumer_s) * now if now else wait_s) / consumer_s)
    return max(now + 1, min(need, most if cause == "slow_storage" else min(most, math.ceil(cpus))))


def _prefetch_settings(measurement: Measurement) -> dict[str, Any]:
    """Enough batches ahead to bridge a slow one."""
    loader, workers = measurement.loader, measurement.workers
    assert workers.unevenness is not None
    mean_s = workers.busy_s / workers.batches
    consumer_s = without_data_s(measurement)
    now = loader.prefetch_factor or 2
    factor = prefetch_needed(mean_s, workers.unevenness, consumer_s, loader.num_workers or 1, now)
    return {"prefetch_factor": factor}


def _prediction(measurement: Measurement, settings: dict[str, Any]) -> Interval | None:
    if settings.keys().isdisjoint({"num_workers", "prefetch_factor"}):
        return None
    workers: int = settings.get("num_workers", measurement.loader.num_workers or 0)
    return speedup_of_workers(measurement, workers, settings.get("prefetch_factor"))


def _advice(cause: str, measurement: Measurement, settings: dict[str, Any], storage: str) -> str:
    parts = [*_threads(cause, measurement, settings), _remedy(cause, measurement, settings)]
    source = measurement.source
    if cause == "head_of_line" and source.may_be_sample_parallel and not source.sample_parallel:
        parts.append(CAUSES[cause].cases["samples"])
    if settings.get("num_workers"):
        parts.append("NumWorkersFinder() finds and sets the number while training runs.")
    if storage and not (cause == "slow_storage" and memory_is_short(measurement)):
        parts.append(storage)
    if CAUSES[cause].needs_cpus:
        parts += bound_to_one_cpu(measurement)
    return " ".join([*parts, *at_most(measurement)])


def _threads(cause: str, measurement: Measurement, settings: dict[str, Any]) -> list[str]:
    """A sentence where the workers' threads are more than the CPUs, now or with the workers that are advised."""
    host, now = measurement.host, measurement.loader.num_workers
    if cause not in _COMPUTING or host is None or not now or (threads := threads_per_worker(host)) is None:
        return []
    workers = max(settings.get("num_workers") or 0, now)
    if workers * threads <= host.usable_cpus:
        return []
    return [
        f"Each worker runs {threads:.2g} threads, so {workers} workers run {workers * threads:.0f} threads on "
        f"{host.usable_cpus:g} CPUs: give each worker one thread. In worker_init_fn call cv2.setNumThreads(0) (OpenCV) "
        "and torch.set_num_threads(1); for OpenMP and BLAS set OMP_NUM_THREADS=1 in the environment."
    ]


def _remedy(cause: str, measurement: Measurement, settings: dict[str, Any]) -> str:
    workers, doing = settings.get("num_workers"), CAUSES[cause].doing
    if doing and measurement.loader.duplicates:
        return (
            f"{doing}, but more workers would not help: this IterableDataset does not divide its samples among them, "
            "and each sample would come once from every worker. Divide them by torch.utils.data.get_worker_info() "
            "first, or make each sample cheaper to read."
        )
    if cause == "slow_storage" and memory_is_short(measurement):
        return CAUSES[cause].cases["memory"]
    if cause == "cpu_saturated" and (others := _used_by_others(measurement)) is not None:
        return CAUSES[cause].cases["others"].format(others=others[0], usable=others[1])
    if doing and (reason := measurement.source.unshared) is not None:
        return f"{doing}, but more workers would not read the same samples: {reason}."
    if cause == "main_process_loading" and workers is None:
        return _without_workers(measurement)
    if cause in ("slow_transform", "slow_storage") and (own := own_workers(measurement)):
        return CAUSES[cause].cases["nodes"].format(num_workers=own)
    shards = measurement.source.shards
    if doing and workers is None and shards is not None and (measurement.loader.num_workers or 0) >= shards:
        return (
            f"{doing}, and each of the stream's {shards} shards has a worker already: more workers would have none to "
            "read. Divide the data into more shards, or make each sample cheaper to read."
        )
    if doing and workers is None:
        return f"{doing}, and more of them would not help: make each sample cheaper to read."
    if workers == 0:
        return CAUSES["worker_transfer"].cases["no_workers"]
    if cause == "worker_transfer" and not _read_quickly(measurement):
        waits_ms = measurement.times.phases["data_wait"] / measurement.times.steps * 1e3
        return CAUSES[cause].cases["ready"].format(ms=waits_ms)
    return CAUSES[cause].advice.format(**{"num_workers": workers, "prefetch_factor": None, **settings})


def _used_by_others(measurement: Measurement) -> tuple[float, float] | None:
    """CPUs that other programs use, and of how many, where those are most that this one may use; None elsewhere."""
    host = measurement.host
    if host is None or host.free_cpus is None or host.process_cpus is None or host.worker_cpu is None:
        return None
    each = host.worker_cpu if host.worker_cpus is None else host.worker_cpus  # more than one CPU, if it has a pool
    own = host.process_cpus + each * (measurement.loader.num_workers or 0)
    others = host.usable_cpus - host.free_cpus - own
    return (others, host.usable_cpus) if others >= _MOSTLY * host.usable_cpus else None


def _without_workers(measurement: Measurement) -> str:
    """Advice for a training process that loads the data itself, if workers would not help."""
    cases, source = CAUSES["main_process_loading"].cases, measurement.source
    if source.kind == "nodes":
        return cases["nodes"]
    if measurement.loader.num_workers is None:
        return cases["no_dataloader"]
    return cases["handing_over" if _costs_more_to_hand_over(measurement) else "no_cpus"]

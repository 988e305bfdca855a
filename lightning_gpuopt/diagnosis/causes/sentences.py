"""Sentences that the advice of several causes has in common."""

from __future__ import annotations

from typing import Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import ceiling, without_data_s
from lightning_gpuopt.measurements.host import HostActivity

_A_POOL: Final = 1.5  # busy threads of a worker: fewer are its own thread and one that sends its batches


def threads_per_worker(host: HostActivity) -> float | None:
    """Threads of a worker that compute at once, as those of a pool; None where it is the worker's own alone."""
    threads, runnable = host.worker_threads, host.worker_runnable
    if threads is None or runnable is None or min(threads, runnable) < _A_POOL:
        return None
    return threads


def bound_to_one_cpu(measurement: Measurement) -> list[str]:
    """A sentence for the advice where the process may use only one CPU; empty elsewhere."""
    host = measurement.host
    if host is None or host.affinity != 1:
        return []
    return [
        "This process, its threads and its workers may use only one of the machine's CPUs: look at taskset, numactl, "
        "KMP_AFFINITY and OMP settings, and at how the job is launched (Slurm: --cpus-per-task, --cpu-bind)."
    ]


def at_most(measurement: Measurement) -> list[str]:
    """A sentence on the most that a change of the loader can bring, by the GPU's step time; empty without a GPU."""
    most = ceiling(measurement)
    if most is None or not measurement.waterfall.on_gpu:
        return []
    rest_ms = without_data_s(measurement) * 1e3
    return [f"No change of the loader brings more than {most:.2f}x: the rest of a step takes {rest_ms:.3g} ms."]

"""What the rules of several causes have in common: findings, evidence, and sentences of advice."""

from __future__ import annotations

from typing import Final

from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import ceiling, speedup_without, without_data_s
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.waterfall import Waterfall
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.phases import SIGNAL_BROADCAST

_A_POOL: Final = 1.5  # busy threads of a worker: fewer are its own thread and one that sends its batches
# memory is short where tasks wait for it for this share of the time, or so much comes back from swap
_MEMORY_SHORT: Final = 0.1
_SWAPPING_MIB_S: Final = 4.0


def finding_of(
    cause: str, seconds: float, measurement: Measurement, evidence: dict[str, float | str], advice: str = ""
) -> Finding:
    """A finding of ``seconds`` of the device's waiting, over all steps; advice is the table's by default."""
    gain = speedup_without(measurement, seconds)
    share = measurement.waterfall.share(seconds)
    return Finding(cause, share, evidence, advice or CAUSES[cause].advice, predicted_speedup=gain)


def per_step(seconds: float, measurement: Measurement) -> dict[str, float | str]:
    waterfall = measurement.waterfall
    evidence: dict[str, float | str] = {
        "ms_per_step": round(seconds / waterfall.steps * 1e3, 3),
        "step_ms": round((waterfall.step_s or 0.0) * 1e3, 3),
    }
    return evidence | exposed_by(waterfall)


def host_evidence(measurement: Measurement) -> dict[str, float | None]:
    host = measurement.host
    if host is None:
        return {}
    found = {
        "usable_cpus": host.usable_cpus,
        "free_cpus": host.free_cpus,
        "cpu_throttled_percent": percent_of(host.throttled),
        "io_pressure_percent": percent_of(host.io_pressure),
    }
    if host.affinity == 1:
        found["cpu_affinity"] = 1
    if memory_is_short(measurement):
        found["memory_pressure_percent"] = percent_of(host.memory_pressure)
        found["swap_mib_per_s"] = host.swapped_in_mib_s
    return found


def memory_is_short(measurement: Measurement) -> bool:
    """Whether what is read is pushed out of memory again."""
    host = measurement.host
    if host is None:
        return False
    return (host.memory_pressure or 0.0) >= _MEMORY_SHORT or (host.swapped_in_mib_s or 0.0) >= _SWAPPING_MIB_S


def exposed_by(waterfall: Waterfall) -> dict[str, float | str]:
    """Which hook waited for the GPU, and so exposed what the host did after it."""
    return {"exposed_by": hook_name(waterfall.exposed_by)} if waterfall.exposed_by else {}


def hook_name(name: str) -> str:
    return "Lightning's _broadcast_sigterm_tensor" if name == SIGNAL_BROADCAST else name


def rounded(found: dict[str, float | None]) -> dict[str, float | str]:
    """Evidence without what is not known."""
    return {name: round(value, 3) for name, value in found.items() if value is not None}


def percent_of(share: float | None) -> float | None:
    return share * 100 if share is not None else None


def threads_per_worker(host: HostActivity) -> float | None:
    """Threads of a worker that compute at once, as those of a pool; None if it is the worker's own alone."""
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
        "This process, its threads and its workers may use only one of the machine's CPUs: check taskset, numactl, "
        "KMP_AFFINITY and OMP settings, and at how the job is launched (Slurm: --cpus-per-task, --cpu-bind)."
    ]


def at_most(measurement: Measurement) -> list[str]:
    """A sentence on the most that a change of the loader can bring, by the GPU's step time; empty without a GPU."""
    most = ceiling(measurement)
    if most is None or not measurement.waterfall.on_gpu:
        return []
    rest_ms = without_data_s(measurement) * 1e3
    return [f"A faster loader gains at most {most:.2f}x: the rest of a step takes {rest_ms:.3g} ms."]

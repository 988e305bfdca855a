"""What to change, by how a run ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from lightning_gpuopt.postmortem.memory_before import Memory
from lightning_gpuopt.postmortem.process_end import ECHO, Death
from lightning_gpuopt.postmortem.record import Ended

_LESS_MEMORY: Final = (
    "give the job more memory, or use less of it: fewer workers, a smaller prefetch_factor, no large Python lists and "
    "dicts in the dataset"
)
_COPIES: Final = (
    " A forked worker copies the Python objects that it reads, little by little: keep paths and labels in numpy arrays "
    "or pyarrow instead of lists, dicts and objects."
)
_LEAK: Final = "more memory or fewer workers only delay the end."
_SHM: Final = (
    "give /dev/shm more room (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory), "
    "or use less of it: fewer workers, a smaller prefetch_factor."
)
_BY_END: Final[Mapping[str, str]] = {
    "killed": "check the cluster's log for who sent SIGKILL: a time limit, a memory limit, an eviction.",
    "segfault": "check the line above: the library called there crashed. Try it alone, in another version, and without "
    "its own threads in workers (cv2.setNumThreads(0)).",
    "aborted": "check the line above and the last lines printed: a library found its own data corrupted.",
    "interrupted": 'nothing is broken: trainer.fit(..., ckpt_path="last") continues from the last saved checkpoint.',
    "terminated": "find out who ends the job: a time limit (sbatch --signal warns before), a preemption, a launcher.",
    "exited": "look for sys.exit() and os._exit() in the script and in the code it calls.",
}
_MEMORY_ERRORS: Final = ("MemoryError",)
_GPU_MEMORY: Final = ("OutOfMemoryError",)
_FILES: Final = ("Too many open files", "received 0 items of ancdata")
_SHM_ERRORS: Final = ("unable to write to file </torch_", "unable to allocate shared memory", "out of shared memory")


def likely_of(ended: Ended, death: Death, memory: Memory) -> str:
    """What is inferred and not known; empty if nothing is."""
    silent = death.signal is None and death.code is None and death.error is None
    if ended == "killed":
        without = "only SIGKILL or os._exit() ends a process silently" if silent else ""
        if memory.near:
            memory_was_short = (
                f"it was ended because memory ran out, by the kernel or by an agent of the cluster: {memory.near}"
            )
            return "; ".join(filter(None, (without, memory_was_short)))
        return without or "something else ended it: an agent of the cluster, a supervisor, or a person"
    if ended == "bus_error":
        return (
            f"/dev/shm was full: {memory.shm_full}"
            if memory.shm_full
            else "/dev/shm was full for a moment, or a memory-mapped file was truncated while it was read"
        )
    return ""


def advice_of(ended: Ended, death: Death, memory: Memory) -> str:
    """What to change; arguments as those of :func:`likely_of`."""
    is_worker = death.process.worker is not None
    if ended == "out_of_memory" or (ended == "killed" and memory.near):
        if memory.leak:
            what = memory.leak.partition(" grew from ")[0]
            instead = "do not keep it: each worker fills its own copy" if is_worker else "clear it from time to time"
            return f"bound {what}, or {instead}; {_LEAK}"
        return f"{_LESS_MEMORY}.{_COPIES if is_worker else ''}"
    if ended == "bus_error":
        return _SHM if memory.shm_full or is_worker else "do not change files while they are mapped; check /dev/shm."
    if ended == "aborted" and death.signal == signal.SIGABRT and not is_worker:
        return (
            "check the last lines printed. NCCL's watchdog aborts when a collective takes too long: then check above "
            "which rank came late. Otherwise a library found its own data corrupted."
        )
    return _of_exception(death) if ended == "exception" else _BY_END.get(ended, "")


def _of_exception(death: Death) -> str:
    error = death.error or {}
    kind, message = str(error.get("type", "")).rpartition(".")[2], str(error.get("message", ""))
    if kind in _MEMORY_ERRORS or "can't allocate memory" in message or "Cannot allocate memory" in message:
        return f"{_LESS_MEMORY}. A limit of the address space (ulimit -v) raises this exception too."
    if kind in _GPU_MEMORY or "CUDA out of memory" in message:
        return "use less GPU memory: a smaller batch, precision='bf16-mixed', activation checkpointing, FSDP."
    if any(each in message for each in _SHM_ERRORS):
        return _SHM
    if "Cannot re-initialize CUDA in forked subprocess" in message:
        return "do not use CUDA in the dataset, or start workers with DataLoader(multiprocessing_context='spawn')."
    if any(each in message for each in _FILES):
        return (
            "allow more open files (ulimit -n), close what the dataset opens, or use "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        )
    if death.kind == ECHO:
        return "another rank ended, or came late to a collective: find out what ended first on the other nodes."
    if death.process.worker is not None or death.index is not None:
        return "read this sample alone: if it is the cause, dataset[index] raises the same error in a Python shell."
    return "check the line above; the traceback is in the command's output."

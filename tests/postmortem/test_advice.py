"""What is inferred, and what to change."""

from __future__ import annotations

import signal

import pytest

from tests.postmortem.judged_runs import GIB, KILL, command, died, judged, memory, raised, rank, torch_says, worker

FULL = memory((0, {"limit": 4 * GIB, "current": 4 * GIB}))
FULL_SHM = memory((0, {"shm_free": 0, "shm_size": 64 << 20}))


def worker_dies(number, **known):
    events = [died(1, at=-0.1, signal=int(number)), raised("RuntimeError", torch_says(1))]
    return judged(rank(ended="exception", events=events, **known), worker(1), end=command(1))


def rank_dies(number, **known):
    return judged(rank(**known), end=command(-number))


def fails(kind, message="", **known):
    return judged(rank(ended="exception", events=[raised(kind, message, **known)]), end=command(1))


# the post-mortem: what is likely, what to change
SAID = {
    "killed": (lambda: rank_dies(KILL), "something else ended it", "who sent SIGKILL"),
    "killed-at-the-limit": (lambda: rank_dies(KILL, memory=FULL), "it was ended because memory ran out", "more memory"),
    "vanished": (lambda: judged(rank()), "only SIGKILL or os._exit() ends a process", "who sent SIGKILL"),
    "vanished-at-the-limit": (lambda: judged(rank(memory=FULL)), "4.0 GiB of 4.0 GiB", "more memory"),
    "worker-killed-at-the-limit": (lambda: worker_dies(KILL, memory=FULL), "because memory ran out", "numpy arrays"),
    "bus-error": (lambda: worker_dies(signal.SIGBUS), "/dev/shm was full for a moment, or", "--shm-size"),
    "bus-error-shm-full": (
        lambda: worker_dies(signal.SIGBUS, memory=FULL_SHM),
        "/dev/shm was full: 0 bytes were free in /dev/shm of 64.0 MiB",
        "--shm-size",
    ),
    "rank-bus-error": (lambda: rank_dies(signal.SIGBUS), "memory-mapped file", "do not change files"),
    "segfault": (lambda: rank_dies(signal.SIGSEGV), "", "the library called there crashed"),
    "watchdog": (lambda: rank_dies(signal.SIGABRT), "", "NCCL's watchdog"),
    "worker-aborted": (lambda: worker_dies(signal.SIGABRT), "", "a library found its own data corrupted"),
    "terminated": (lambda: rank_dies(signal.SIGTERM), "", "a time limit"),
    "interrupted": (lambda: fails("KeyboardInterrupt"), "", 'ckpt_path="last"'),
    "exited": (lambda: judged(rank(), end=command(3)), "", "sys.exit()"),
    "memory-error": (lambda: fails("MemoryError"), "", "ulimit -v"),
    "no-more-memory": (lambda: fails("OSError", "[Errno 12] Cannot allocate memory"), "", "ulimit -v"),
    "torch-no-memory": (lambda: fails("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), "", "ulimit -v"),
    "gpu-memory": (lambda: fails("torch.OutOfMemoryError", "CUDA out of memory"), "", "bf16-mixed"),
    "gpu-memory-older": (lambda: fails("RuntimeError", "CUDA out of memory. Tried"), "", "bf16-mixed"),
    "open-files": (lambda: fails("OSError", "[Errno 24] Too many open files"), "", "ulimit -n"),
    "at-a-sample": (lambda: fails("ValueError", index=7), "", "read this sample alone"),
    "elsewhere": (lambda: fails("ValueError"), "", "the traceback"),
}


@pytest.mark.parametrize(("post", "likely", "advice"), SAID.values(), ids=SAID)
def test_what_is_said(post, likely, advice):
    found = post()
    assert likely in found.likely
    assert advice in found.advice
    assert (bool(found.likely), bool(found.advice)) == (bool(likely), bool(advice))

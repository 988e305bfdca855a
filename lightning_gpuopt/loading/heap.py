"""How the process's heap behaves under batches."""

from __future__ import annotations


def keep_heap() -> None:
    """Have glibc keep the memory of a batch for the next one.

    Else it gives the end of the heap back to the kernel whenever a batch is freed, and every page of the next batch
    is a fault: half the time of reading. It stops doing so after a large block was freed (mallopt(3), M_TRIM_THRESHOLD
    and the dynamic mmap threshold); such a block costs nothing, as it is never touched.
    """
    bytes(16 << 20)

from __future__ import annotations

import pytest
import torch.multiprocessing

from lightning_gpuopt.tuning.worker_limits import Cap, Room, files_of, prefetch_that_fits, worker_cap

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cpus", "arguments", "cap"),
    [
        (2.0, {}, Cap(16, "max_num_workers")),
        (64.0, {}, Cap(32, "max_num_workers")),
        (0.5, {}, Cap(4, "max_num_workers")),
        (0.1, {}, Cap(1, "max_num_workers")),
        (4.0, {"local_world_size": 4}, Cap(8, "max_num_workers")),
        (4.0, {"max_num_workers": 3, "local_world_size": 4}, Cap(3, "max_num_workers")),
        (4.0, {"max_num_workers": 100}, Cap(100, "max_num_workers")),
        # half of 8 GiB
        (4.0, {"worker_bytes": GIB}, Cap(4, "memory")),
        (4.0, {"worker_bytes": GIB, "local_world_size": 2}, Cap(2, "memory")),
        (4.0, {"worker_bytes": 16 * GIB}, Cap(1, "memory")),
        # four fifths of 1 GiB, less a batch with the consumer
        (4.0, {"batch_bytes": 0.04 * GIB}, Cap(9, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "prefetch_factor": 4}, Cap(4, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "local_world_size": 2}, Cap(4, "shared_memory")),
        (4.0, {"batch_bytes": GIB, "worker_bytes": GIB}, Cap(1, "shared_memory")),
        # what each prepares ahead is memory, too
        (4.0, {"batch_bytes": 0.25 * GIB, "worker_bytes": GIB, "prefetch_factor": 1}, Cap(2, "shared_memory")),
        (4.0, {"batch_bytes": 0.04 * GIB, "worker_bytes": 0.92 * GIB}, Cap(4, "memory")),
    ],
)
def test_the_narrowest_of_cpus_memory_and_shared_memory_is_the_cap(
    cpus: float, arguments: dict[str, int], cap: Cap
) -> None:
    assert worker_cap(Room(cpus, 8 * GIB, GIB), **arguments) == cap  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("room", "arguments", "cap"),
    [
        # what could not be read limits nothing
        (Room(2.0), {"worker_bytes": GIB, "batch_bytes": GIB}, Cap(16, "max_num_workers")),
        # 64 for others, a batch with the consumer; each worker 4 and 2 batches
        (Room(2.0, files=1000), {"batch_tensors": 20}, Cap(16, "max_num_workers")),
        (Room(2.0, files=1000), {"batch_tensors": 50}, Cap(8, "shared_memory")),
        (Room(2.0, files=1000), {"batch_tensors": 50, "prefetch_factor": 4}, Cap(4, "shared_memory")),
        (Room(2.0, files=100), {"batch_tensors": 50}, Cap(1, "shared_memory")),
        (Room(2.0, files=100), {}, Cap(9, "shared_memory")),
        # 32 for others, 4 for each worker
        (Room(2.0, processes=72), {}, Cap(10, "max_num_workers")),
        (Room(2.0, processes=200), {"local_world_size": 4}, Cap(4, "max_num_workers")),
        (Room(2.0, processes=0), {}, Cap(1, "max_num_workers")),
    ],
)
def test_files_and_processes_are_limits_too(room: Room, arguments: dict[str, int], cap: Cap) -> None:
    assert worker_cap(room, **arguments) == cap  # type: ignore[arg-type]


def test_each_tensor_of_a_batch_is_a_file() -> None:
    class Sample:
        def __init__(self) -> None:
            self.image, self.boxes = torch.zeros(3), [torch.zeros(2)] * 3

    batch = {"images": torch.zeros(4), "boxes": [torch.zeros(2)] * 300, "names": ["a", "b"], "samples": [Sample()] * 2}
    assert files_of(batch) == 1 + 300 + 8
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert files_of(batch) == 0
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_the_queue_is_no_deeper_than_fits() -> None:
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=0.04 * GIB) == 4
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=GIB) == 1
    assert prefetch_that_fits(Room(2.0, None, GIB), workers=4, batch_bytes=0) is None
    assert prefetch_that_fits(Room(2.0), workers=4, batch_bytes=1) is None
    # of memory, a quarter
    assert prefetch_that_fits(Room(2.0, 2 * GIB, GIB), workers=4, batch_bytes=0.04 * GIB) == 2


def test_where_descriptors_run_out_the_other_sharing_strategy_is_advised() -> None:
    cap = worker_cap(Room(4.0, files=200), batch_tensors=20)
    assert cap == Cap(2, "shared_memory")
    assert "torch.multiprocessing.set_sharing_strategy('file_system')" in str(cap)
    assert str(worker_cap(Room(4.0, files=200))) == "limited by max_num_workers"
    assert str(worker_cap(Room(4.0, shared_memory_bytes=100), batch_bytes=50.0)) == "limited by shared_memory"

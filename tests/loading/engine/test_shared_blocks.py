"""Memory of batches is written again when nobody has it, and no copy of it is on its way."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_gpuopt.loading.engine import page_locked
from lightning_gpuopt.loading.engine.shared_blocks import PLACED, SKIPPED, TO_DO, BlockRing, Control, SharedFile
from lightning_gpuopt.prefetch.stream import CudaStreams
from tests.simulators.gpu import ManualClock, SimulatedGpu, simulated_gpu

SIZE = 1 << 16


@pytest.fixture
def ring() -> BlockRing:
    ring = BlockRing(SharedFile.in_memory("test"), SIZE)
    ring.most = ring.spare = 1000
    return ring


def lent(ring: BlockRing) -> tuple[int, torch.Tensor]:
    number = ring.take()
    return number, torch.frombuffer(ring.lend(number), dtype=torch.uint8)


def test_a_block_is_given_out_again_once_nothing_of_it_is_held(ring: BlockRing) -> None:
    number, batch = lent(ring)
    view, array = batch[3:].view(-1, 1), batch.numpy()
    del batch
    assert ring.take() == 1
    del view
    assert ring.take() == 2
    del array
    assert ring.take() == number


def test_a_block_that_was_not_lent_is_free(ring: BlockRing) -> None:
    ring.give_back(ring.take())
    assert ring.take() == 0


def test_that_many_batches_are_held_is_said_once(ring: BlockRing) -> None:
    ring.most = 3
    held = [lent(ring) for _ in range(3)]
    with pytest.warns(UserWarning, match=r"4 batches of 0\.1 MiB are held by the program.*\.clone\(\)") as said:
        held += [lent(ring) for _ in range(5)]
    assert len(said) == 1


def test_what_was_held_once_gives_its_memory_back(ring: BlockRing) -> None:
    ring.spare = 2
    batches = [lent(ring)[1].fill_(1) for _ in range(6)]
    assert os.stat(ring.file.fd).st_blocks * 512 == 6 * SIZE
    del batches
    for _ in range(10):
        lent(ring)[1].fill_(2)
        assert os.stat(ring.file.fd).st_blocks * 512 <= 3 * SIZE


def test_what_is_held_at_a_fork_is_not_written_again(ring: BlockRing) -> None:
    number, batch = lent(ring)
    other, not_held = lent(ring)
    del not_held
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(read, 1)
            os._exit(int(batch[0]))
        finally:
            os._exit(99)
    batch.fill_(7)
    del batch
    again, new = lent(ring)
    assert again == other != number
    new.fill_(8)
    third, newer = lent(ring)
    newer.fill_(8)
    assert third != number
    ring.end()
    os.write(write, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_was_held_at_a_fork_is_used_again_when_the_other_process_is_gone(ring: BlockRing) -> None:
    for _ in range(5):
        number, batch = lent(ring)
        child = os.fork()
        if not child:
            os._exit(0)
        del batch
        os.waitpid(child, 0)
        assert ring.take() == number == 0
        ring.give_back(number)


def test_what_is_held_outlives_the_ring_and_all_else_is_freed(ring: BlockRing) -> None:
    batches = [lent(ring)[1].fill_(number) for number in range(4)]
    kept = batches[2]
    del batches
    file = ring.file
    assert os.stat(file.fd).st_blocks * 512 == 4 * SIZE
    ring.end()
    assert os.stat(file.fd).st_blocks * 512 == SIZE
    del ring
    gc.collect()
    assert kept.unique().tolist() == [2]


# -- copies to a device


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gpu(clock: ManualClock) -> Iterator[SimulatedGpu]:
    with simulated_gpu(clock) as gpu:
        yield gpu


@pytest.mark.parametrize("where", ["compute stream", "our side stream", "the training thread's stream"])
def test_a_block_is_not_written_while_it_is_copied_to_a_device(
    ring: BlockRing, gpu: SimulatedGpu, clock: ManualClock, where: str
) -> None:
    number, batch = lent(ring)
    if where == "compute stream":
        gpu.copy(0.1)
    elif where == "our side stream":
        streams = CudaStreams(torch.device("cuda", 0))
        with streams.on_side():
            gpu.copy(0.1)
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            ring.note_streams()
            gpu.copy(0.1)
    del batch
    assert ring.take() != number
    clock.advance(0.05)
    assert ring.take() != number
    clock.advance(0.06)
    assert ring.take() == number


def test_streams_of_a_device_that_is_gone_are_not_asked(ring: BlockRing) -> None:
    with simulated_gpu(ManualClock()):
        streams = CudaStreams(torch.device("cuda", 0))
    number, batch = lent(ring)
    del batch
    assert ring.take() == number
    assert streams is not None


def test_while_a_graph_is_captured_nothing_is_used_again(ring: BlockRing, gpu: SimulatedGpu) -> None:
    number, batch = lent(ring)
    del batch
    gpu.refusal.left = 0
    assert ring.take() != number
    gpu.refusal.left = None
    assert ring.take() == number


def test_an_event_that_a_graph_has_captured_is_recorded_anew(ring: BlockRing, gpu: SimulatedGpu) -> None:
    number, batch = lent(ring)
    del batch
    gpu.refusal.captures = True
    assert ring.take() != number
    gpu.refusal.captures = False
    taken = {ring.take() for _ in range(2)}
    assert number in taken


def test_what_is_copied_later_does_not_count(ring: BlockRing, gpu: SimulatedGpu, clock: ManualClock) -> None:
    batches = [lent(ring)[1] for _ in range(2)]
    del batches
    given = ring.take()
    gpu.copy(0.1)  # of another batch
    assert {given, ring.take()} == {0, 1}


# -- page-locked in place


@pytest.fixture
def registered(ring: BlockRing) -> BlockRing:
    ring.is_copied_here = ring.registers = True
    return ring


def test_blocks_are_registered_as_they_are_lent_and_torch_sees_it(registered: BlockRing, gpu: SimulatedGpu) -> None:
    _, batch = lent(registered)
    assert gpu.host_memory == {batch.data_ptr(): SIZE}
    assert batch.is_pinned()
    assert batch[100:].pin_memory().data_ptr() == batch[100:].data_ptr()


def test_a_registered_block_is_not_written_while_it_is_copied(
    registered: BlockRing, gpu: SimulatedGpu, clock: ManualClock
) -> None:
    number, batch = lent(registered)
    gpu.copy(0.1)
    del batch
    assert registered.take() != number
    clock.advance(0.11)
    assert registered.take() == number


def test_memory_does_not_grow_without_end_by_a_host_that_is_ahead(
    registered: BlockRing, gpu: SimulatedGpu, clock: ManualClock
) -> None:
    registered.most, began = 4, clock()
    for _ in range(10):
        _, batch = lent(registered)
        gpu.copy(0.1)
        del batch
    assert len(gpu.host_memory) == 4
    assert clock() == pytest.approx(began + 0.6, abs=1e-3)  # six copies are waited for


def test_no_pages_are_given_back_that_a_device_has(registered: BlockRing, gpu: SimulatedGpu) -> None:
    registered.spare = 1
    batches = [lent(registered)[1].fill_(1) for _ in range(3)]
    addresses = {batch.data_ptr() for batch in batches}
    assert set(gpu.host_memory) == addresses
    batches.clear()
    registered.take()
    assert len(gpu.host_memory) == 1
    assert os.stat(registered.file.fd).st_blocks * 512 == SIZE
    held = [lent(registered)[1] for _ in range(2)]
    assert {batch.data_ptr() for batch in held} < addresses
    assert all(batch.is_pinned() for batch in held)


def test_nothing_stays_registered(registered: BlockRing, gpu: SimulatedGpu, clock: ManualClock) -> None:
    kept, dropped = lent(registered)[1], lent(registered)[1]
    with torch.cuda.stream(torch.cuda.Stream()):  # of somebody who is gone when it ends
        gpu.copy(0.1)
    began = clock()
    del dropped
    registered.end()
    assert set(gpu.host_memory) == {kept.data_ptr()}
    assert clock() == pytest.approx(began + 0.1, abs=1e-3)
    gpu.copy(0.1)
    began = clock()
    del kept
    gc.collect()
    assert gpu.host_memory == {}
    assert clock() == pytest.approx(began + 0.1, abs=1e-3)


def test_what_cannot_be_unregistered_keeps_its_pages(
    registered: BlockRing, gpu: SimulatedGpu, clock: ManualClock
) -> None:
    """As while another thread captures a CUDA graph."""
    registered.spare = 0
    gpu.keeps_host_memory = True
    number, batch = lent(registered)
    address = batch.fill_(1).data_ptr()
    del batch
    assert registered.take() == number
    registered.give_back(number)
    assert os.stat(registered.file.fd).st_blocks * 512 == SIZE
    _, batch = lent(registered)
    assert (batch.data_ptr(), batch.is_pinned()) == (address, True)
    gpu.copy(0.1)
    del batch
    assert registered.take() != number
    clock.advance(0.11)
    assert number in {registered.take() for _ in range(2)}


def test_what_is_registered_is_not_unmapped(registered: BlockRing, gpu: SimulatedGpu) -> None:
    """What lay there then would be page-locked for CUDA, with other pages."""
    page_locked._stuck.clear()  # of other tests
    _, batch = lent(registered)
    address = batch.data_ptr()
    gpu.keeps_host_memory = True
    registered.end()
    del batch
    gc.collect()
    assert set(gpu.host_memory) == {address}
    (mapping,) = page_locked._stuck
    page_locked._stuck.clear()
    assert torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() == address
    gpu.keeps_host_memory = False
    mapping.unregister()


def test_what_cannot_be_registered_is_copied_and_that_is_said_once(registered: BlockRing, gpu: SimulatedGpu) -> None:
    gpu.refuses_host_memory = True
    with pytest.warns(UserWarning, match=r"not page-locked in place; CUDA's error: CUDA error 2") as said:
        batches = dict([lent(registered) for _ in range(3)])
    assert len(said) == 1
    assert not batches[0].is_pinned()
    gpu.copy(0.1)
    batches.clear()
    assert {registered.take() for _ in range(3)} == {0, 1, 2}


# -- what is to be read


def test_rows_are_done_when_none_is_left() -> None:
    control = Control(2, 5, 1)
    control.open(1, 7, [3, 1, 4], 2, 30, 0)
    assert control.slots[1].tolist() == [7, 3, 2, 30, 0, 0, 0]
    assert control.states(1, 3) == bytes([TO_DO] * 3)
    control.set_state(1, 0, 2, PLACED)
    assert not control.is_done(1, 7, 40)
    control.set_state(1, 2, 1, SKIPPED)
    assert control.is_done(1, 7, 2)
    assert control.slots[1, 5] == 42
    assert not control.is_done(1, 6, 1)  # of a batch that has been taken meanwhile
    control.open(1, 9, [8, 9], 2, 30, 0)
    assert control.states(1, 2) == bytes([TO_DO] * 2)


def test_descriptors_are_closed_with_their_owner() -> None:
    file: Any = SharedFile.in_memory("test", 10)
    fd = file.fd
    os.fstat(fd)
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)

"""Memory that is used in turn, on the CPU, where the numbers tell who was written over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpuopt.prefetch.leaves import Found
from lightning_gpuopt.prefetch.ring import DestinationRing
from lightning_gpuopt.prefetch.stream import NoEvent, Streams

CPU = torch.device("cpu")


class Recorded(Streams):
    """Notes when the side stream is made to wait, and whether for something newer than the set's rest."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def new_event(self, *, timing: bool = False) -> Any:
        return NoEvent()

    def record(self, event: Any) -> None:
        self.calls.append("record")

    def side_waits(self, event: Any) -> None:
        self.calls.append("side waits")

    def compute_waits(self, event: Any) -> None:
        self.calls.append("compute waits")


def use(ring: DestinationRing, source: torch.Tensor) -> tuple[Any, torch.Tensor]:
    place = ring.acquire()
    (target,) = place.destinations([source])
    target.copy_(source)
    return place, target


def test_sets_are_used_in_turn() -> None:
    ring = DestinationRing(Streams(), CPU, 2)
    addresses = []
    for number in range(6):
        place, tensor = use(ring, torch.full((3,), float(number)))
        addresses.append(tensor.data_ptr())
        del tensor
        place.release()
    assert len(ring) == 2
    assert addresses == [*addresses[:2]] * 3


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x[1:], lambda x: x.view(-1), lambda x: [x.t()]])
def test_what_somebody_holds_is_not_written_to(keep: Any) -> None:
    ring = DestinationRing(Streams(), CPU, 1)
    place, tensor = use(ring, torch.zeros(2, 2))
    kept = keep(tensor)
    del tensor
    place.release()
    _, other = use(ring, torch.ones(2, 2))
    assert all(float(each.sum()) == 0.0 for each in Found([kept]).tensors)
    assert float(other.sum()) == 4.0


def test_what_autograd_holds_is_not_written_to() -> None:
    ring = DestinationRing(Streams(), CPU, 1)
    place, tensor = use(ring, torch.ones(2, 2))
    weight = torch.ones(2, 2, requires_grad=True)
    loss = (tensor @ weight).sum()
    del tensor
    place.release()
    use(ring, torch.zeros(2, 2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_the_side_stream_waits_for_the_rest_and_for_no_more() -> None:
    streams = Recorded()
    ring = DestinationRing(streams, CPU, 1)
    place, tensor = use(ring, torch.zeros(3))
    assert streams.calls == ["record", "side waits"]  # new memory may still be in use by what was queued
    streams.calls.clear()
    del tensor
    place.release()
    assert streams.calls == ["record"]
    streams.calls.clear()
    place, tensor = use(ring, torch.zeros(3))
    assert streams.calls == ["side waits"]
    streams.calls.clear()
    place.release()  # somebody still holds it: new memory is there before the next step is issued
    use(ring, torch.zeros(3))
    assert streams.calls == ["record", "side waits"]
    assert tensor.tolist() == [0.0, 0.0, 0.0]


def test_smaller_batches_fit_and_larger_ones_get_new_memory() -> None:
    ring = DestinationRing(Streams(), CPU, 1)
    addresses = []
    for source in (torch.zeros(4, 2), torch.ones(3, 2), torch.ones(8, dtype=torch.uint8), torch.zeros(5, 2)):
        place, tensor = use(ring, source)
        assert torch.equal(tensor, source)
        assert (tensor.dtype, tensor.stride()) == (source.dtype, source.stride())
        assert tensor._base is None
        addresses.append(tensor.data_ptr())
        del tensor
        place.release()
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]


def test_memory_formats_stay() -> None:
    source = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    _, tensor = use(DestinationRing(Streams(), CPU, 1), source)
    assert tensor.stride() == source.stride()
    assert torch.equal(tensor, source)


def test_each_batch_has_a_version_counter_of_its_own() -> None:
    ring = DestinationRing(Streams(), CPU, 1)
    place, tensor = use(ring, torch.zeros(3))
    version = tensor._version
    del tensor
    place.release()
    _, tensor = use(ring, torch.zeros(3))
    assert tensor._version == version


def test_a_loop_inside_another_gets_more_and_gives_it_back() -> None:
    ring = DestinationRing(Streams(), CPU, 2)
    outer = [use(ring, torch.zeros(3)) for _ in range(2)]
    inner, _ = use(ring, torch.zeros(3))
    assert len(ring) == 3
    inner.release()
    ring.trim()
    assert len(ring) == 2
    assert all(place.in_use for place, _ in outer)


def test_memory_from_inference_mode_can_be_trained_on() -> None:
    ring = DestinationRing(Streams(), CPU, 1)
    with torch.inference_mode():
        place, tensor = use(ring, torch.ones(3))
        del tensor
    place.release()
    _, tensor = use(ring, torch.ones(3))
    assert not tensor.is_inference()

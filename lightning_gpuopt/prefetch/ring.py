"""Where batches go on the device: a few sets of tensors, used in turn.

The memory is allocated on the compute stream, so that it belongs to that stream's pool, and filled on the side stream.
A set is used again when nobody holds its tensors any more; the side stream then waits, on the device, for the work that
was queued until then. The host asks the device nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lightning_gpuopt.compat.torch_internals import count_holders, storage_key
from lightning_gpuopt.prefetch.stream import Streams


class Destination:
    """Memory on the device for one tensor of a batch, with the shape, strides and dtype of ``like``."""

    __slots__ = ("_alone", "_base", "_layout", "_storage", "_storage_key")

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        # Inside inference mode it would be a tensor that training cannot write to.
        with torch.inference_mode(False):
            self._keep(torch.empty_like(like, device=device, pin_memory=False))
        self._layout = _layout(like)

    def _keep(self, base: torch.Tensor) -> None:
        self._base, self._storage = base, base.untyped_storage()
        self._storage_key = storage_key(self._storage)
        assert count_holders is not None
        self._alone = count_holders(self._storage_key)

    @property
    def is_held(self) -> bool:
        """Whether somebody still has a tensor that was given out, or a view of it."""
        assert count_holders is not None
        return count_holders(self._storage_key) > self._alone

    def fits(self, source: torch.Tensor) -> bool:
        """Whether a tensor can go here; the memory takes on its shape."""
        dtype, shape, stride = self._layout
        if source.nbytes > self._storage.nbytes():  # also if a user has freed it
            return False
        if source.shape == shape and source.dtype is dtype and source.stride() == stride:
            return True
        wanted = torch.empty_like(source, device="meta")
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=source.dtype, device=self._base.device)
            self._keep(empty.set_(self._storage, 0, wanted.shape, wanted.stride()))
        self._layout = _layout(source)
        return True

    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of its own: with another version counter than all that were here before."""
        return self._base.data


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class DestinationSet:
    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._tensors: list[Destination] = []
        self._idle: list[bool] = []
        self._free = streams.new_event()
        self._begun = False
        self.in_use = False
        """Staged, or given to training; from :meth:`DestinationRing.acquire` until :meth:`release`."""

    def release(self) -> None:
        """Its batch was used. What nobody holds any more may be written to after what is queued now."""
        self.in_use = False
        self._begun = True
        for number, each in enumerate(self._tensors):
            if each.is_held:  # it is somebody's now; allocated here, new memory is free when the next step begins
                with suppress(torch.OutOfMemoryError):
                    self._tensors[number] = Destination(each.tensor(), self._device)
        self._streams.record(self._free)
        self._idle = [not each.is_held for each in self._tensors]

    def destinations(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors on the device for a batch; the side stream may write to them when this returns."""
        later = not self._begun
        self._begun = True
        given: list[torch.Tensor] = []
        for number, source in enumerate(sources):
            if number == len(self._tensors):
                self._tensors.append(Destination(source, self._device))
                self._idle.append(False)
            here = self._tensors[number]
            if here.is_held or not here.fits(source):
                # Somebody keeps the old batch, which is theirs now, or this one is larger.
                here = self._tensors[number] = Destination(source, self._device)
                later = True
            elif not self._idle[number]:
                later = True  # dropped, or allocated, since the set was put to rest
            given.append(here.tensor())
        if later:  # the compute stream has had work on this memory since the event
            self._streams.record(self._free)
        self._streams.side_waits(self._free)
        return given


class DestinationRing:
    """The sets: ``size`` for a loop that looks ahead; more while a second loop does, inside the first."""

    def __init__(self, streams: Streams, device: torch.device, size: int) -> None:
        self._streams = streams
        self._device = device
        self._size = size
        self._sets: list[DestinationSet] = []

    def __len__(self) -> int:
        return len(self._sets)

    def acquire(self) -> DestinationSet:
        """A set for one more batch: the one that has rested longest; a new one where all are in use."""
        chosen = next((each for each in self._sets if not each.in_use), None)
        if chosen is None or (len(self._sets) < self._size):
            chosen = DestinationSet(self._streams, self._device)
        else:
            self._sets.remove(chosen)
        self._sets.append(chosen)  # the order is that of use
        chosen.in_use = True
        return chosen

    def trim(self) -> None:
        """Give back what only the inner of two loops needed."""
        spare = [each for each in self._sets if not each.in_use][: max(len(self._sets) - self._size, 0)]
        self._sets = [each for each in self._sets if each not in spare]

    def clear(self) -> None:
        """Give back everything that is not in use."""
        self._sets.clear()

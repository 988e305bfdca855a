"""Batches of many small tensors: packed into one slab on the host, so that one copy brings them all."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch

from lightning_gpuopt.compat.torch_internals import copy_each
from lightning_gpuopt.prefetch.stream import Streams

ALIGNMENT: Final = 512
"""Bytes; as torch's allocator aligns a tensor on its own: kernels, and their rounding, may depend on it."""

_MAX_SLABS: Final = 4

_dtype: Final = operator.attrgetter("dtype")
_shape: Final = operator.attrgetter("shape")


class Layout:
    """Where each tensor of a batch lies in a slab.

    Args:
        tensors: the batch's tensors, contiguous, on the host.

    Attributes:
        nbytes: bytes of the slab.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.key = self.key_of(tensors)
        self._places: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        at = 0
        for each in tensors:
            self._places.append((each.dtype, each.shape, each.stride(), at // max(each.element_size(), 1)))
            at += -(-max(each.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.nbytes = at

    @staticmethod
    def key_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What two batches of one layout have in common."""
        return list(map(_dtype, tensors)), list(map(_shape, tensors))

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a slab, uint8 ``[nbytes]``."""
        typed = {dtype: slab.view(dtype) for dtype in {place[0] for place in self._places}}
        return [typed[dtype].as_strided(shape, stride, offset) for dtype, shape, stride, offset in self._places]


class HostSlabs:
    """Slabs in page-locked memory, used again when their last copy is done.

    Args:
        streams: the device's streams.
        pinned: page-locked memory, for a device that copies on its own.
    """

    def __init__(self, streams: Streams, *, pinned: bool) -> None:
        self._streams = streams
        self._pinned = pinned
        self._slabs: list[tuple[torch.Tensor, list[torch.Tensor], Any]] = []
        self._layout: Layout | None = None

    def clear(self) -> None:
        """Give the memory back."""
        self._slabs = []

    def fill(self, layout: Layout, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Pack a batch.

        Returns:
            The slab, and the event to record behind its copy.
        """
        if layout is not self._layout:
            self._layout, self._slabs = layout, []
        slab, views, copied = next((each for each in self._slabs if each[2].query()), (None, [], None))
        if slab is None:
            # torch's own pool of page-locked memory waits for copies that are under way.
            with torch.inference_mode(False):
                slab = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
                views, copied = layout.views(slab), self._streams.new_event()
            if len(self._slabs) < _MAX_SLABS:
                self._slabs.append((slab, views, copied))
        copy_each(views, tensors)
        return slab, copied

"""Scale and normalise images where they are, most cheaply on the GPU: uint8 is a quarter of float32's way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Normalize:
    """Turns every uint8 image batch ``[B, C, H, W]`` in a batch into normalised float32.

    Args:
        mean: Mean of each of the C channels, on the 0-1 scale.
        std: Standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_constants": {}}

    def __call__(self, batch: Any) -> Any:
        """A batch of the same make, in which uint8 tensors ``[B, C, H, W]`` are normalised float32."""
        if isinstance(batch, torch.Tensor):
            return self._normalized(batch) if self._concerns(batch) else batch
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*map(self, batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(map(self, batch))
        if isinstance(batch, Mapping):
            return {key: self(value) for key, value in batch.items()}
        return batch

    def _concerns(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.size(1) == len(self.mean)

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        found = self._constants.get(images.device)
        if found is None:
            # (x / 255 - mean) / std as one multiplication and one addition.
            scale = torch.tensor([1 / (255 * s) for s in self.std], device=images.device).view(-1, 1, 1)
            shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=images.device)
            found = self._constants[images.device] = (scale, shift.view(-1, 1, 1))
        return torch.addcmul(found[1], images.float(), found[0])

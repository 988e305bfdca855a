"""Scale and normalise images where they are, most cheaply on the GPU: uint8 is a quarter of float32's way there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Path: TypeAlias = tuple[int | str, ...]
"""Where something lies in a batch: indices and keys from the outside in."""


class Normalize:
    """Turns the uint8 photographs of a batch into normalised floating point.

    These are tensors ``[B, C, H, W]``, and lists of nothing but ``[C, H, W]`` (images of several sizes).

    Args:
        mean: Mean of each of the C channels, on the 0-1 scale.
        std: Standard deviation of each channel, on the 0-1 scale.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_constants": {}}

    def __call__(self, batch: Any, dtype: torch.dtype = torch.float32, exact: Collection[Path] = ()) -> tuple[Any, int]:
        """A batch of the same make with its photographs normalised, and how many tensors that were.

        Args:
            batch: Tensors in any nest of tuples, lists and mappings.
            dtype: Of the result; the arithmetic is float32's, or float64's.
            exact: Where images lie whose values count (masks, depth maps): these stay as they are.
        """
        normalized = 0

        def walk(part: Any, path: Path) -> Any:
            nonlocal normalized
            if any(path[: len(each)] == each for each in exact):
                return part
            if isinstance(part, torch.Tensor):
                if not self._is_photograph(part, 4):
                    return part
                normalized += 1
                return self._normalized(part, dtype)
            if isinstance(part, Mapping):
                return {key: walk(value, (*path, key)) for key, value in part.items()}
            if not isinstance(part, (list, tuple)):
                return part
            if part and all(self._is_photograph(each, 3) for each in part):
                normalized += len(part)
                values = [self._normalized(each, dtype) for each in part]
            else:
                values = [walk(value, (*path, at)) for at, value in enumerate(part)]
            return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)

        return walk(batch, ()), normalized

    def _is_photograph(self, value: Any, dims: int) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.uint8
            and value.dim() == dims
            and value.size(-3) == len(self.mean)
        )

    def _normalized(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        found = self._constants.get((images.device, exact))
        if found is None:
            # (x / 255 - mean) / std as one multiplication and one addition.
            options: dict[str, Any] = {"device": images.device, "dtype": exact}
            scale = torch.tensor([1 / (255 * s) for s in self.std], **options).view(-1, 1, 1)
            shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], **options)
            found = self._constants[images.device, exact] = (scale, shift.view(-1, 1, 1))
        return torch.addcmul(found[1], images.to(exact), found[0]).to(dtype)

"""Scale and normalise images where they are, most cheaply on the GPU: uint8 is a quarter of float32's way there."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from lightning_gpuopt.utils.arguments import real_number, refuse

Path: TypeAlias = tuple[int | str, ...]  # where something lies in a batch: indices and keys from the outside in

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)

_KEPT: Final = 64

_IMAGES: Final = frozenset(("image", "img", "x", "pixel_values"))
_NO_IMAGES: Final = re.compile(r"(?<![a-z])(mask|seg|label|target|depth)s?(?![a-z])")


def is_image_by_place(path: Path) -> bool:
    """Whether an array or tensor there is the sample's image: the sample, its first part, or one that is named so."""
    if not path:
        return True
    return not _is_no_image(path) and (path == (0,) or str(path[-1]).lower() in _IMAGES)


def _is_no_image(path: Path) -> bool:
    return any(isinstance(key, str) and _NO_IMAGES.search(key.lower()) is not None for key in path)


class Normalize:
    """Turns the uint8 photographs of a batch into normalised floating point; mean and std per channel, 0-1 scale.

    These are tensors ``[B, C, H, W]``, and lists of nothing but ``[C, H, W]`` (images of several sizes); in the place
    of a sample's image (`is_image_by_place`) also ``[B, H, W, C]``, which stay so. Never a part named mask, seg, label,
    target or depth.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = tuple(mean)
        self.std = tuple(std)
        self._constants: dict[tuple[torch.device, torch.dtype, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, argument: Any) -> Normalize:
        """What a user's ``normalize=(mean, std)`` asks for; ValueError if it is not that, with std above 0."""
        try:
            mean, std = argument
            mean, std = [float(m) for m in mean], [float(s) for s in std]
        except (TypeError, ValueError):
            refuse("normalize", "(mean, std), each a number per channel", argument)
        for value in std:
            real_number("normalize", value, "standard deviations", above=0)
        if len(mean) != len(std) or not mean:
            refuse("normalize", "a mean and a standard deviation for each channel", argument)
        return cls(mean, std)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_constants": {}}

    def __call__(self, batch: Any, dtype: torch.dtype = torch.float32, exact: Collection[Path] = ()) -> tuple[Any, int]:
        """A batch of the same make with its photographs normalised, and how many tensors that were.

        Arithmetic is float32's, or float64's. What lies at `exact` paths has values that count (masks, depth maps), and
        stays.
        """
        normalized = 0

        def walk(part: Any, path: Path) -> Any:
            nonlocal normalized
            if any(path[: len(each)] == each for each in exact) or _is_no_image(path):
                return part
            if isinstance(part, torch.Tensor):
                by_rows = part.dim() == 4 and part.size(1) != len(self.mean) and is_image_by_place(path)
                images = part.permute(0, 3, 1, 2) if by_rows else part
                if not self._is_photograph(images, 4):
                    return part
                normalized += 1
                done = self._normalized(images, dtype)
                return done.permute(0, 2, 3, 1) if by_rows else done
            if isinstance(part, Mapping):
                return _with_values(part, {key: walk(value, (*path, key)) for key, value in part.items()})
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
        if images.dim() == 3 or not images.is_contiguous(memory_format=torch.channels_last):
            scale, shift = self._constants_for(images.device, exact, 0)
            return _scaled(images, exact, scale, shift).to(dtype)
        # Pixels as they lie: a row's constants repeat with each pixel, and the inner loop runs through memory.
        rows = images.permute(0, 2, 3, 1).flatten(2)
        scale, shift = self._constants_for(images.device, exact, images.size(3))
        scaled = _scaled(rows, exact, scale, shift)
        return scaled.view(*rows.shape[:2], images.size(3), images.size(1)).permute(0, 3, 1, 2).to(dtype)

    def _constants_for(self, device: torch.device, dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What (x / 255 - mean) / std multiplies by and adds: ``[C, 1, 1]``, or for a row of `width` pixels."""
        found = self._constants.get((device, dtype, width))
        if found is None:
            scale = torch.tensor([1 / (255 * s) for s in self.std], device=device, dtype=dtype)
            shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=device, dtype=dtype)
            if width:
                found = scale.repeat(width), shift.repeat(width)
            else:
                found = scale.view(-1, 1, 1), shift.view(-1, 1, 1)
            if len(self._constants) >= _KEPT:  # images of very many widths
                self._constants.clear()
            self._constants[device, dtype, width] = found
        return found


def _with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type and attributes with other values; a dict where that cannot be."""
    if type(mapping) is dict:
        return values
    try:
        changed: Any = copy.copy(mapping)
        for key, value in values.items():
            changed[key] = value
    except TypeError:  # it cannot be assigned to
        return values
    return changed


def _scaled(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    floats = values.to(dtype)  # a copy, which is then worked on in place: half the memory
    return torch.addcmul(shift, floats, scale, out=floats)

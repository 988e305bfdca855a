"""The demo's data: crops of real photographs, as the folder of JPEGs that a user would have.

The photographs are those that scikit-image carries in its package; nothing is downloaded. The folder is made beside its
place and renamed into it when it is whole, so a making that was interrupted is never taken for data.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

# class name to the file of its photograph in scikit-image
PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "galaxies": "hubble_deep_field.jpg",
    "motorcycle": "motorcycle_left.png",
    "retina": "retina.jpg",
    "rocket": "rocket.jpg",
    "tissue": "ihc.png",
}
IMAGE_SIZE = (500, 375)  # width and height of the JPEGs in pixels: those of the common photograph in ImageNet
JPEG_QUALITY = 90
MIN_CROP = 0.15  # the narrowest crop, as a share of the widest that fits into the photograph
VALIDATION_PART = 16  # one image in so many is for validation
MANIFEST = "manifest.json"


class ForeignFolderError(ValueError):
    """The folder holds something that the demo has not made, and so must not replace."""


@dataclass(frozen=True)
class Recipe:
    """What the folder holds; the same recipe gives the same crops."""

    images: int  # JPEGs, training and validation together
    seed: int = 0  # of the crops' places and scales

    def files(self) -> list[str]:
        """The JPEGs' paths in the folder, ``{train,val}/<class>/<number>.jpg``; the classes take turns."""
        classes = list(PHOTOGRAPHS)
        for_validation = self.images // VALIDATION_PART
        paths = []
        for number in range(self.images):
            part = "val" if number < for_validation else "train"
            paths.append(f"{part}/{classes[number % len(classes)]}/{number:05d}.jpg")
        return paths

    def as_json(self) -> dict[str, Any]:
        """The recipe with all that the crops depend on, as the manifest keeps it."""
        return {
            **asdict(self),
            "photographs": list(PHOTOGRAPHS),
            "image_size": list(IMAGE_SIZE),
            "jpeg_quality": JPEG_QUALITY,
            "smallest_crop": MIN_CROP,
        }


def require_packages() -> None:
    """Raise ImportError, with the command that installs it, where the extra ``[demo]`` is not installed."""
    for module, name in (("PIL", "Pillow"), ("skimage", "scikit-image")):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f'the demo needs {name}, which is not installed; run: pip install "lightning-gpuopt[demo]"'
            )


def is_whole(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder holds this recipe's JPEGs, as written; ForeignFolderError if it holds something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        made_from, checksums = manifest["recipe"], manifest["crc32"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ForeignFolderError(f"{folder} is not a folder created by the demo") from None
    if made_from != recipe.as_json():
        return False
    try:
        return all(_crc32(folder / name) == checksums[name] for name in recipe.files())
    except (OSError, KeyError):
        return False


def make(folder: Path, recipe: Recipe, on_image: Callable[[], object] = lambda: None) -> None:
    """Make the folder, in place of what an earlier recipe left; ``on_image`` is called for each, on this thread."""
    photographs = load_photographs()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    outdated = folder.with_name(f".{folder.name}.outdated")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)
        checksums = _write_images(unfinished, recipe, photographs, on_image)
        text = json.dumps({"recipe": recipe.as_json(), "crc32": checksums}, indent=1)
        (unfinished / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if folder.exists():  # a folder half removed would have lost the manifest that says whose it is
            folder.rename(outdated)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)


def load_photographs() -> dict[str, Image]:
    """The photographs by class name, in RGB."""
    from PIL import Image
    from skimage.data import data_dir

    return {name: Image.open(Path(data_dir, file)).convert("RGB") for name, file in PHOTOGRAPHS.items()}


def crop(photograph: Image, rng: random.Random) -> Image:
    """A random part of the photograph in the shape of ``IMAGE_SIZE``, enlarged where it is smaller than that."""
    from PIL import Image

    aspect = IMAGE_SIZE[0] / IMAGE_SIZE[1]
    width = min(photograph.width, photograph.height * aspect) * rng.uniform(MIN_CROP, 1.0)
    height = width / aspect
    left, top = rng.uniform(0, photograph.width - width), rng.uniform(0, photograph.height - height)
    box = (left, top, left + width, top + height)
    return photograph.resize(IMAGE_SIZE, Image.Resampling.BICUBIC, box=box)


def _write_images(
    folder: Path, recipe: Recipe, photographs: dict[str, Image], on_image: Callable[[], object]
) -> dict[str, int]:
    def write(name: str) -> int:
        path = folder / name
        rng = random.Random(f"{recipe.seed}/{name}")
        crop(photographs[path.parent.name], rng).save(path, quality=JPEG_QUALITY)
        return _crc32(path)

    names = recipe.files()
    for parent in {(folder / name).parent for name in names}:
        parent.mkdir(parents=True)
    checksums: dict[str, int] = {}
    threads = ThreadPoolExecutor()  # Pillow leaves Python's lock while it resizes and encodes
    try:
        for name, checksum in zip(names, threads.map(write, names), strict=True):
            checksums[name] = checksum
            on_image()
    finally:
        threads.shutdown(cancel_futures=True)
    return checksums


def _crc32(path: Path) -> int:
    return zlib.crc32(path.read_bytes())

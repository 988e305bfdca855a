"""ImageFolderDataModule: folders of image files as they are, for the four stages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_gpuopt._lightning import rank_zero_info
from lightning_gpuopt.datamodules.elastic import STAGES, ElasticDataModule, is_path
from lightning_gpuopt.images.cost import MOST_IMAGES, measure_images, resize_for
from lightning_gpuopt.images.files import find_images
from lightning_gpuopt.loading.image_folder import ImageFolder

_CROP_SIZE = 224


class ImageFolderDataModule(ElasticDataModule):
    """Loaders over folders of image files, read as they are: no conversion.

    A path is a folder with a subfolder of images for each class, as torchvision's ``ImageFolder`` wants it; samples are
    ``(image, label)``. A folder for `predict` may hold images without class subfolders: samples are then images alone,
    in the order of `lightning_gpuopt.loading.image_folder.ImageFolder.files`. Any map-style dataset is taken, too. The
    arguments are those of `ElasticDataModule`, and so are order, crops, normalisation and resume.

    The folder is listed once. The list of a very large folder is kept in the user's cache directory, and used again
    until one of the folders changes. Where a folder is read so, one info line says what an LMDB built from it would
    bring, measured on a few of its images.

    Example::

        datamodule = ImageFolderDataModule("imagenet/train", "imagenet/val", batch_size=256, decode="tensor",
                                           crop_size=224, normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        trainer.fit(model, datamodule)
    """

    @override
    def prepare_data(self) -> None:
        """List the folders once a node, with a progress bar; large ones are found in the list by the other ranks."""
        stage = None if self.trainer is None else self.trainer.state.fn
        for name in STAGES.get(str(stage.value if stage is not None else None), tuple(STAGES)):
            for path in filter(is_path, self._given(name)):
                find_images(path, need_classes=name != "predict", progress=True)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the stage's folders; see `ElasticDataModule.setup`."""
        super().setup(stage)
        if stage == "fit" and is_path(self._sources["train"]) and self._advised is not self.trainer:
            self._advised = self.trainer
            self._say_what_an_lmdb_brings(self._datasets["train"][0])

    _advised: Any = None

    @override
    def _open_path(self, path: str | os.PathLike[str], name: str, transform: Callable[[Any], Any] | None) -> Any:
        return ImageFolder(path, transform, self.target_transform, decode=self.decode, need_classes=name != "predict")

    def _say_what_an_lmdb_brings(self, folder: ImageFolder) -> None:
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        some = np.random.default_rng(0).choice(len(folder), min(MOST_IMAGES, len(folder)), replace=False)
        costs = measure_images(folder.image_file, some.tolist(), self.crop_size or _CROP_SIZE)
        if costs is None:
            return
        decode_s = costs.fast_decode_s if self.crop_size else costs.pil_decode_s
        text = f"{folder.path} is read file by file: {costs.read_s * 1e3:.2f} ms an image"
        if self.decode != "raw":
            text += f", and {decode_s * 1e3:.2f} ms to decode it"
            text += f" (medians of {costs.images}). An LMDB, which spares opening files, would bring about "
            text += f"{(costs.read_s + decode_s) / decode_s:.2f}x samples a second and worker"
            if self.crop_size:
                small = (costs.read_s + decode_s) / costs.small_decode_s
                text += f"; with --image-size {resize_for(self.crop_size)} (smaller images) about {small:.2f}x"
        rank_zero_info(f"{type(self).__name__}: {text}: lightning-gpuopt lmdb build {folder.path} DST")

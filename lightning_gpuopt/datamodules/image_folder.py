"""ImageFolderDataModule: unconverted folders of image files, for the four stages."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_gpuopt.compat.lightning import rank_zero_info
from lightning_gpuopt.datamodules.elastic import ElasticDataModule
from lightning_gpuopt.datamodules.resumable import is_path
from lightning_gpuopt.images.cost import MAX_IMAGES, measure_images, resize_for
from lightning_gpuopt.images.files import ImageFiles, find_images
from lightning_gpuopt.loading.image_folder import ImageFolder


class ImageFolderDataModule(ElasticDataModule):
    """Loaders over folders of image files, without conversion.

    A path is a folder with a subfolder of images for each class, as for torchvision's ``ImageFolder``; samples are
    ``(image, label)``. A folder for `predict` may hold images without class subfolders: samples are then only images.
    Any map-style dataset is accepted too. The list of a very large folder is cached in the user's cache directory until
    one of the folders changes.

    Example::

        datamodule = ImageFolderDataModule("imagenet/train", "imagenet/val", batch_size=256, decode="tensor",
                                           crop_size=224, normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        trainer.fit(model, datamodule)
    """

    @override
    def prepare_data(self) -> None:
        """List the folders once a node, with a progress bar; large ones are found in the list by the other ranks."""
        for name in self._names(None if self.trainer is None else self.trainer.state.fn):
            for path in filter(is_path, self._given(name)):
                key = os.path.abspath(path), name != "predict"
                self._listed[key] = find_images(path, need_classes=key[1], progress=True)

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
        listed = self._listed.pop((os.path.abspath(path), name != "predict"), None)
        return ImageFolder(path, transform, self.target_transform, self.decode, name != "predict", files=listed)

    @cached_property
    def _listed(self) -> dict[tuple[str, bool], ImageFiles]:
        """What this process has found in `prepare_data`, until it opens it."""
        return {}

    def _say_what_an_lmdb_brings(self, folder: ImageFolder) -> None:
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        some = np.random.default_rng(0).choice(len(folder), min(MAX_IMAGES, len(folder)), replace=False)
        costs = measure_images(folder.image_file, some.tolist(), self.crop_size)
        if costs is None:
            return
        text = f"{folder.path} is read file by file, {costs.read_s * 1e3:.2f} ms an image"
        if self.crop_size or self.decode == "pil":
            decode_s = costs.fast_decode_s if self.crop_size else costs.pil_decode_s
            now_s = costs.read_s + decode_s
            text += f", and decoded in {decode_s * 1e3:.2f} ms (medians of {costs.images}). An LMDB, which opens "
            text += f"no files, would give up to {now_s / decode_s:.2f}x the samples per second and worker"
            if self.crop_size and costs.small_decode_s < 0.9 * decode_s:
                small = now_s / costs.small_decode_s
                text += f", and with --image-size {resize_for(self.crop_size)} (smaller images) up to {small:.2f}x"
        else:
            text += f" (median of {costs.images}), most of which an LMDB would save"
        rank_zero_info(f"{type(self).__name__}: {text}: lightning-gpuopt lmdb build {folder.path} DST")

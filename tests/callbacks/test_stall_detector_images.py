"""StallDetector and datasets of image files: they are recognised, measured once, and the storage step is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from PIL import Image
from skimage import data as pictures
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector import image_samples
from lightning_gpuopt.detector.image_samples import describe, image_files, images_in, measure
from lightning_gpuopt.measurements.loading import ImageSamples
from tests.helpers import tiny_trainer

CROP = 64
STEPS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 JPEGs of 1200x900 pixels."""
    root = tmp_path_factory.mktemp("images")
    photo = Image.fromarray(pictures.astronaut()).resize((1200, 900))
    photo.save(root / "0.jpg", quality=85)
    for number in range(1, 24):
        (root / f"{number}.jpg").write_bytes((root / "0.jpg").read_bytes())
    return root


class Photos(Dataset[Any]):
    """As torchvision's ImageFolder: PIL decodes, then a random crop."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(path), number % 2) for number, path in enumerate(sorted(folder.glob("*.jpg")))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        left, top = (torch.rand(2) * 100).tolist()
        crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=(left, top, left + 800, top + 800))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).float().div(255), label


class Net(LightningModule):
    def __init__(self, dataset: Dataset[Any], **loader: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.loader = DataLoader(dataset, shuffle=True, **{"batch_size": 2} | loader)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0].mean((2, 3))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader


def fit(tmp_path: Path, dataset: Dataset[Any], *callbacks: Any, **loader: Any) -> tuple[Trainer, Net]:
    seed_everything(7, verbose=False)
    model = Net(dataset, **loader)
    trainer = tiny_trainer(tmp_path, callbacks=list(callbacks), max_steps=STEPS, max_epochs=-1)
    trainer.fit(model)
    return trainer, model


def detector(**more: Any) -> StallDetector:
    return StallDetector(on_stall="ignore", window_size=5, warmup_steps=2, **more)


class TestAdvice:
    def test_what_decoding_costs_is_measured_on_the_dataset_s_images(self, tmp_path: Path, folder: Path) -> None:
        watching = detector()
        fit(tmp_path, Photos(folder), watching)
        finding = watching.report.findings[0]
        assert finding.cause == "main_process_loading"
        evidence = finding.evidence
        assert (evidence["image_width"], evidence["image_height"]) == (1200, 900)
        for name in ("image_read", "image_decode", "image_crop", "image_to_float", "fast_decode", "small_decode"):
            assert float(evidence[f"{name}_ms"]) > 0
        assert finding.settings.keys() <= {"num_workers", "persistent_workers"}

    def test_weights_and_random_state_are_as_without_it(self, tmp_path: Path, folder: Path) -> None:
        outcomes = []
        for watching in ([], [detector()]):
            _, model = fit(tmp_path, Photos(folder), *watching)
            outcomes.append([*model.state_dict().values(), torch.rand(3), torch.from_numpy(np.random.rand(3))])
        assert all(torch.equal(plain, watched) for plain, watched in zip(*outcomes, strict=True))

    def test_a_failure_in_measuring_is_swallowed(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any) -> None:
            raise ArithmeticError("a bug of ours")

        monkeypatch.setattr(image_samples, "measure", fail)
        watching = detector()
        fit(tmp_path, Photos(folder), watching)
        finding = watching.report.findings[0]
        assert finding.evidence["storage_step"] == "ImageFolderDataModule"
        assert "storage_step_gain" not in finding.evidence
        assert 'ImageFolderDataModule(..., decode="tensor", crop_size=64' in finding.advice

    def test_a_dataset_that_cannot_be_looked_at_is_trained_on(self, tmp_path: Path) -> None:
        class Odd(TensorDataset):
            @property
            def samples(self) -> Any:
                raise ArithmeticError

        watching = detector()
        trainer, _ = fit(tmp_path, Odd(torch.rand(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)), watching)
        assert (trainer.global_step, watching.report.steps) == (STEPS, STEPS)

    def test_images_are_measured_once_and_only_where_it_matters(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        monkeypatch.setattr(image_samples, "measure", lambda *args: calls.append(args))
        fit(tmp_path, Photos(folder), detector())
        assert [batch for _, batch in calls] == [(2, CROP)]
        calls.clear()
        fit(tmp_path, Photos(folder), detector(threshold=1.0))
        assert calls == []

    def test_after_an_exception_nothing_is_measured(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Failing(Net):
            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if self.trainer.global_step == 10:
                    raise ArithmeticError

        monkeypatch.setattr(image_samples, "measure", lambda *args: pytest.fail("measured"))
        watching = detector()
        with pytest.raises(ArithmeticError):
            tiny_trainer(tmp_path, callbacks=[watching], max_steps=STEPS).fit(Failing(Photos(folder)))
        assert watching.report.findings[0].evidence["storage_step"] == "ImageFolderDataModule"

    def test_data_that_is_no_image_files_gets_no_such_advice(self, tmp_path: Path) -> None:
        class Slow(TensorDataset):
            def __getitem__(self, index: int) -> Any:
                torch.rand(300_000).sort()
                return super().__getitem__(index)

        watching = detector()
        fit(tmp_path, Slow(torch.rand(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)), watching)
        finding = watching.report.findings[0]
        assert finding.cause == "main_process_loading"
        assert "storage_step" not in finding.evidence
        assert "Image" not in finding.advice


class Files(Dataset[Any]):
    def __init__(self, *paths: Path) -> None:
        self.files = list(paths)

    def __len__(self) -> int:
        return len(self.files)


class Own(Dataset[Any]):
    """What this package's own datasets offer."""

    class Shards:
        num_shards = 3

    def __init__(self, *, decode: str = "pil", lmdb: bool = False) -> None:
        self.decode = decode
        if lmdb:
            self.info = self.Shards()

    def __len__(self) -> int:
        return 5

    def image_file(self, index: int) -> bytes:
        return bytes([index])


class Wrapper(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], **attributes: Any) -> None:
        self.dataset = dataset
        vars(self).update(attributes)


def contents(dataset: Any) -> list[Any]:
    files = image_files(dataset)
    assert files is not None
    return [files.read(number) for number in range(files.count)]


class TestRecognition:
    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        paths = [tmp_path / f"{name}.JPG" for name in "abcd"]
        for path in paths:
            path.write_bytes(path.stem.encode())
        return paths

    def test_lists_of_files_are_read_by_number(self, paths: list[Path]) -> None:
        assert contents(Files(*paths)) == [b"a", b"b", b"c", b"d"]
        listed = Wrapper(Files(), imgs=[(str(path), 0) for path in paths[:2]])
        assert contents(listed) == [b"a", b"b"]

    def test_subsets_and_concatenations_are_followed(self, paths: list[Path]) -> None:
        first, rest = Files(*paths[:1]), Files(*paths[1:])
        both: Dataset[Any] = ConcatDataset([first, rest])
        assert contents(both) == [b"a", b"b", b"c", b"d"]
        assert contents(Subset(both, [3, 1])) == [b"d", b"b"]
        assert contents(Wrapper(Subset(Subset(rest, [2, 0]), [1]))) == [b"b"]
        assert image_files(ConcatDataset([first, TensorDataset(torch.zeros(2))])) is None

    @pytest.mark.parametrize(
        "dataset",
        [
            TensorDataset(torch.zeros(3)),
            Files(),
            Files(Path("a.txt")),
            Wrapper(Files(), samples=[(1, 2)]),
            Wrapper(Files(), samples=["text"]),
            None,
            {"a": 1},
        ],
    )
    def test_anything_else_is_not_known(self, dataset: Any) -> None:
        assert image_files(dataset) is None
        assert measure(dataset, (2, CROP)) is None

    def test_a_dataset_that_holds_itself_is_not_followed_for_ever(self) -> None:
        endless = Wrapper(Files())
        endless.dataset = endless
        assert image_files(endless) is None

    def test_our_own_datasets_tell_how_they_read(self) -> None:
        assert describe(Own(), None) == ImageSamples(own=True)
        assert describe(Own(lmdb=True, decode="tensor"), (8, 32)) == ImageSamples(True, True, True, 32, 8)
        cropping = Wrapper(Subset(Own(), [4, 2]), crops=object())
        assert describe(cropping, None) == ImageSamples(own=True, fast=True)
        assert contents(cropping) == [b"\x04", b"\x02"]
        mixed: Dataset[Any] = ConcatDataset([Own(lmdb=True), Own(decode="tensor")])
        assert describe(mixed, None) == ImageSamples(own=True)

    def test_what_cannot_be_measured_is_still_described(self) -> None:
        assert measure(Own(), (8, 32)) == describe(Own(), (8, 32))


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(4, 3, 8, 8), (4, 8)),
        ([torch.zeros(4, 3, 8, 8), torch.zeros(4)], (4, 8)),
        ({"label": torch.zeros(4), "image": torch.zeros(2, 16, 16, 3)}, (2, 16)),
        ([torch.zeros(4, 3, 8, 9)], None),
        ([torch.zeros(4, 1, 8, 8)], None),
        ([torch.zeros(4, 3)], None),
        ("text", None),
        (None, None),
    ],
)
def test_square_images_in_a_batch(batch: Any, found: tuple[int, int] | None) -> None:
    assert images_in(batch) == found

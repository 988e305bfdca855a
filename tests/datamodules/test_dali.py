"""DALIDataModule's arguments and sources, and what it says where something is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from nvidia.dali import fn
from nvidia.dali.pipeline import pipeline_def
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_gpuopt import DALIDataModule, LMDBDataset, LMDBWriter, build_lmdb
from lightning_gpuopt.datamodules import resumable
from lightning_gpuopt.loading.image_folder import ImageFolder
from tests.dali.runs import Notes, small, write_list
from tests.fork_server import run_code
from tests.helpers import tiny_trainer

IMAGES = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images in each of two classes."""
    for number in range(IMAGES):
        path = tmp_path / "folder" / ("ant", "bee")[number // 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (number, 0, 0)).save(path)
    return tmp_path / "folder"


def numbers(datamodule: DALIDataModule, stage: str = "val") -> list[int]:
    """The red values of a stage's images, which are their numbers."""
    loader = getattr(datamodule, f"{stage}_dataloader")()
    return [int(image.flatten()[0]) for images, _ in loader for image in images]


def labels(datamodule: DALIDataModule, stage: str = "val") -> list[int]:
    return [int(label) for _, labels in getattr(datamodule, f"{stage}_dataloader")() for label in labels]


def raw(**more: Any) -> DALIDataModule:
    return DALIDataModule(**small(dtype="uint8", batch_size=4, **more))


class TestSources:
    def test_a_folder(self, folder: Path) -> None:
        assert numbers(raw(val=folder)) == list(range(IMAGES))
        assert labels(raw(val=str(folder))) == [0, 0, 0, 1, 1, 1]

    def test_an_lmdb(self, tmp_path: Path, folder: Path) -> None:
        build_lmdb(folder, tmp_path / "lmdb", progress=False)
        assert numbers(raw(val=tmp_path / "lmdb")) == list(range(IMAGES))
        assert labels(raw(val=tmp_path / "lmdb")) == [0, 0, 0, 1, 1, 1]

    def test_an_lmdb_of_dicts(self, tmp_path: Path) -> None:
        with LMDBWriter(tmp_path / "lmdb") as writer:
            for number in range(4):
                writer.write({"name": str(number), "image": Image.new("RGB", (8, 8), (number, 0, 0)), "label": number})
        datamodule = raw(val=tmp_path / "lmdb")
        assert numbers(datamodule) == labels(datamodule) == [0, 1, 2, 3]

    def test_a_list_of_files(self, tmp_path: Path) -> None:
        data = write_list(tmp_path / "list", 5)
        data.write_text(data.read_text().replace(" 3\n", "\t -3 \n\n"))
        assert numbers(raw(val=data)) == [0, 1, 2, 3, 4]
        assert labels(raw(val=data)) == [0, 1, 2, -3, 4]

    def test_datasets_and_nests_of_them(self, tmp_path: Path, folder: Path) -> None:
        build_lmdb(folder, tmp_path / "lmdb", progress=False)
        nest = ConcatDataset([Subset(LMDBDataset(tmp_path / "lmdb"), [5, 1]), ImageFolder(folder)])
        assert numbers(raw(val=nest)) == [5, 1, *range(IMAGES)]
        assert labels(raw(val=nest)) == [1, 0, 0, 0, 0, 1, 1, 1]

    def test_predict_without_labels(self, tmp_path: Path, folder: Path) -> None:
        assert numbers(raw(predict=folder / "bee"), "predict") == [3, 4, 5]
        assert labels(raw(predict=folder / "bee"), "predict") == [-1, -1, -1]
        paths = tmp_path / "paths.txt"
        paths.write_text("folder/ant/2.png\nfolder/bee/4.png\n")
        assert numbers(raw(predict=paths), "predict") == [2, 4]
        assert labels(raw(predict=paths), "predict") == [-1, -1]

    def test_several_of_a_stage(self, folder: Path) -> None:
        first, second = raw(val=[folder, Subset(ImageFolder(folder), [2])]).val_dataloader()
        assert (len(first), len(second)) == (2, 1)
        assert [label for batch in second for label in batch[1].tolist()] == [0]


class TestErrors:
    """Each says what was expected and found."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"batch_size": 0}, "batch_size: expected samples per batch and rank, at least 1, got 0"),
            ({"crop_size": 0}, "crop_size: expected pixels, at least 1, got 0"),
            (
                {"resize_size": 200},
                "resize_size: expected at least crop_size=224, since the crop is taken from it, got 200",
            ),
            ({"device": "cuda"}, "device: expected one of 'auto', 'gpu', 'cpu', got 'cuda'"),
            ({"num_threads": 0}, "num_threads: expected CPU threads, at least 1, got 0"),
            ({"mean": [0.5]}, r"mean: expected three numbers, one for each of red, green and blue, got \[0.5\]"),
            ({"mean": 0.5}, "mean: expected three numbers, one for each of red, green and blue, got 0.5"),
            ({"std": [1, 0, 1]}, r"std: expected numbers above 0, got \[1, 0, 1\]"),
            ({"dtype": "float64"}, "dtype: expected one of 'float32', 'float16', 'uint8', got 'float64'"),
            ({"layout": "NCHW"}, "layout: expected one of 'CHW', 'HWC', got 'NCHW'"),
            ({"hw_decoder_load": 65}, "hw_decoder_load: expected a share, at least 0 and at most 1, got 65"),
            ({"on_corrupt": "ignore"}, "on_corrupt: expected one of 'raise', 'skip', got 'ignore'"),
            ({"shuffle": "yes"}, "shuffle: expected True or False, got 'yes'"),
            ({"seed": -1}, "seed: expected a whole number, at least 0, got -1"),
            ({"train_pipeline": len}, "train_pipeline: expected a function decorated with @pipeline_def"),
            ({"eval_pipeline": pipeline_def(lambda encoded: encoded)}, "that takes .encoded, labels. and returns"),
            ({"eval_pipeline": [len]}, "eval_pipeline: expected a function decorated with @pipeline_def"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_arguments(self, arguments: dict[str, Any], words: str) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            DALIDataModule("train", **arguments)

    def test_no_such_stage(self, folder: Path) -> None:
        with pytest.raises(MisconfigurationException, match="DALIDataModule was created without val=: pass the path"):
            super(DALIDataModule, DALIDataModule(folder)).val_dataloader()

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda root: root / "nowhere", "there is no such folder"),
            (lambda root: _made(root / "empty"), "expected class subfolders with images in them, found none"),
            (lambda root: root / "folder/ant", "3 images, but no class subfolders; expected PATH/<class>/<image>"),
            (lambda root: _written(root / "empty.txt", ""), r"expected lines PATH LABEL, the list is empty"),
            (
                lambda root: _written(root / "bad.txt", "a.png 1\nb.png one\n"),
                r"line 2: expected PATH LABEL, the label a whole number; got 'b.png one'",
            ),
            (lambda root: TensorDataset(torch.zeros(3)), "DALI decodes the image files itself; got a TensorDataset"),
            (
                lambda root: ImageFolder(root / "folder", transform=len),
                "expected a dataset without transform, which DALI does not run",
            ),
            (
                lambda root: _no_label(root / "lmdb"),
                "train: expected a label for each sample, but there is none in LMDB",
            ),
            (lambda root: _float_labels(root / "lmdb"), "expected one whole number a sample as its label; got float64"),
        ],
    )
    def test_sources(self, tmp_path: Path, folder: Path, make: Any, words: str) -> None:
        with pytest.raises((MisconfigurationException, ValueError, FileNotFoundError), match=words):
            raw(train=make(tmp_path)).setup("fit")

    def test_a_sample_without_an_image(self, tmp_path: Path) -> None:
        with LMDBWriter(tmp_path / "lmdb") as writer:
            writer.write((1.5, 3))
        with pytest.raises(RuntimeError, match="sample 0: expected an image in the sample, but there is none"):
            labels(raw(val=tmp_path / "lmdb"))

    def test_no_gpu(self, folder: Path) -> None:
        with pytest.raises(
            MisconfigurationException, match='device="gpu": expected a CUDA device, but torch sees none'
        ):
            DALIDataModule(folder, device="gpu").train_dataloader()

    def test_a_list_of_training_data(self, folder: Path) -> None:
        with pytest.raises(MisconfigurationException, match="train is one dataset, got a list"):
            DALIDataModule([folder])  # type: ignore[arg-type]

    def test_pipelines_with_other_outputs(self, folder: Path) -> None:
        @pipeline_def
        def three(encoded: Any, labels: Any) -> Any:
            return encoded, labels, labels

        @pipeline_def
        def ragged(encoded: Any, labels: Any) -> Any:
            return encoded, labels

        @pipeline_def
        def unlabelled(encoded: Any, labels: Any) -> Any:
            return _resized(encoded), fn.random.coin_flip()

        @pipeline_def
        def swapped(encoded: Any, labels: Any) -> Any:
            return labels, _resized(encoded)

        @pipeline_def
        def floats(encoded: Any, labels: Any) -> Any:
            return _resized(encoded), labels * 1.5

        for pipeline, words in (
            (three, r"eval_pipeline: expected a pipeline that returns \(images, labels\), got 3 outputs"),
            (ragged, r"eval_pipeline: expected images of one shape in a batch, got \(\d+,\), .*: resize or crop them"),
            (unlabelled, "eval_pipeline: expected a pipeline that uses labels, but it does not"),
            (
                swapped,
                r"eval_pipeline: expected images of four dimensions and whole numbers as labels \[B\] with B = 4, got",
            ),
            (floats, r"got images \[4, 8, 8, 3\] and float32 labels \[4\]"),
            (_beyond, "eval_pipeline: expected a pipeline that can process every image, but DALI failed in one of the"),
        ):
            with pytest.raises((ValueError, MisconfigurationException), match=words):
                labels(raw(val=folder, eval_pipeline=pipeline))

    def test_a_failure_of_the_pipeline_is_named_beside_an_image_that_cannot_be_read(self, folder: Path) -> None:
        (folder / "bee/5.png").write_bytes(b"no image")  # in the last batch, whose error waits for the first's

        datamodule = DALIDataModule(val=folder, eval_pipeline=_beyond, **small(batch_size=2))
        with pytest.raises(ValueError, match="eval_pipeline: expected a pipeline that can process every image"):
            labels(datamodule)

    def test_a_decoder_that_refuses_everything_is_asked_twice_only(self, folder: Path) -> None:
        loader = DALIDataModule(val=folder, eval_pipeline=_beyond, **small(batch_size=2)).val_dataloader()
        loader._undecodable = lambda images: dict.fromkeys(range(len(images)), RuntimeError("out of memory"))
        with pytest.raises(ValueError, match=r"DALI cannot decode .*0\.png, even as decoded by PIL.*out of memory"):
            list(loader)

    def test_without_dali_the_error_names_the_pip_lines(self) -> None:
        program = "import sys; sys.modules['nvidia.dali'] = None; from lightning_gpuopt import DALIDataModule as D; D()"
        ended = run_code(program)
        assert ended.returncode == 1
        assert 'pip install "lightning-gpuopt[dali]"' in ended.stderr
        assert 'pip install "lightning-gpuopt[dali-cuda13]"' in ended.stderr


def _resized(encoded: Any) -> Any:
    return fn.resize(fn.decoders.image(encoded, device="cpu"), size=[8, 8])


@pipeline_def
def _beyond(encoded: Any, labels: Any) -> Any:
    """Fails: it cuts out more than there is."""
    return fn.slice(_resized(encoded), 0, 100, axes=[0]), labels


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _no_label(path: Path) -> Path:
    with LMDBWriter(path) as writer:
        writer.write(Image.new("RGB", (8, 8)))
    return path


def _float_labels(path: Path) -> Path:
    with LMDBWriter(path) as writer:
        writer.write((Image.new("RGB", (8, 8)), 0.5))
    return path


class Floats(Notes):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


class TestLightning:
    def test_auto_is_the_cpu_where_the_trainer_is(self, tmp_path: Path, folder: Path) -> None:
        class Looks(Notes):
            def on_train_start(self) -> None:
                loader = self.trainer.train_dataloader
                devices.append((loader.on_gpu, loader.num_threads))

        devices: list[Any] = []
        datamodule = DALIDataModule(folder, batch_size=4, crop_size=8, resize_size=8, num_threads=3)
        tiny_trainer(tmp_path, max_steps=1).fit(Looks(), datamodule)
        assert devices == [(False, 3)]

    def test_threads_are_as_many_as_cpus(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resumable, "usable_cpus", lambda: 5.5)
        assert DALIDataModule(folder, device="cpu").train_dataloader().num_threads == 5

    def test_from_yaml(self, tmp_path: Path, folder: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text(
            f"""
trainer: {{accelerator: cpu, max_steps: 2, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
data:
  train: {folder}
  val: [{folder}]
  batch_size: 4
  crop_size: 8
  resize_size: 9
  num_threads: auto
  mean: [0.5, 0.5, 0.5]
  hw_decoder_load: 0.5
  on_corrupt: raise
"""
        )
        cli = LightningCLI(Notes, DALIDataModule, args=["fit", "--config", str(config)], save_config_callback=None)
        assert cli.datamodule.mean == (0.5, 0.5, 0.5)
        assert len(cli.model.steps) == 2

    def test_it_can_be_sent_to_other_processes(self, tmp_path: Path, folder: Path) -> None:
        datamodule = raw(train=folder, val=folder)
        for _ in range(2):
            assert numbers(pickle.loads(pickle.dumps(datamodule))) == list(range(IMAGES))
            tiny_trainer(tmp_path, max_steps=1, limit_val_batches=1).fit(Floats(), datamodule)

    def test_reading_ahead_is_part_of_no_random_state(self, folder: Path) -> None:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        labels(raw(train=folder), "train")
        assert torch.equal(torch.get_rng_state(), before)

"""The door to Lightning, where it goes by two names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning_loops import batches_left
from tests.helpers import FEATURES, TinyModel, tiny_trainer

needs_both = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning as well"
)

BOTH_NAMES = """
import {first}
import {second}
from lightning_gpuopt.compat.lightning import is_checkpoint


class OfTheUser(pytorch_lightning.callbacks.ModelCheckpoint): ...


class Namesake: ...


Namesake.__name__ = "Checkpoint"
for callbacks in (lightning.pytorch.callbacks, pytorch_lightning.callbacks):
    print(is_checkpoint(callbacks.ModelCheckpoint()), is_checkpoint(callbacks.EarlyStopping("loss")))
print(is_checkpoint(OfTheUser()), is_checkpoint(Namesake()))
"""


FIT = """
{imports}
import torch
from torch.utils.data import TensorDataset


class Net(spoken.LightningModule):
    transferred = validated = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, index):
        self.validated += 1

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.transferred += 1
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


samples = TensorDataset(torch.ones(8, 4), torch.zeros(8))
quiet = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
quiet |= dict(enable_progress_bar=False, enable_model_summary=False)
assert spoken.Trainer(callbacks=lightning_gpuopt.StallDetector(), **quiet).callbacks
for val in (None, samples):
    for positional in (True, False):
        detector = lightning_gpuopt.StallDetector(on_stall="ignore", print_report=False)
        callbacks = [
            lightning_gpuopt.GpuUtilMonitor(),
            detector,
            lightning_gpuopt.NumWorkersFinder(),
            lightning_gpuopt.CudaPrefetcher(),
        ]
        data = lightning_gpuopt.LMDBDataModule(train=samples, val=val, batch_size=2, num_workers=0)
        trainer = spoken.Trainer(callbacks=callbacks, num_sanity_val_steps=0, **quiet)
        net = Net()
        trainer.fit(net, data) if positional else trainer.fit(net, datamodule=data)
        assert detector.report.steps == 4
        print(trainer.global_step, net.transferred, net.validated)
assert isinstance(data, spoken.LightningDataModule)
"""
OURS = "import lightning_gpuopt; lightning_gpuopt.StallDetector; lightning_gpuopt.LMDBDataModule"


@pytest.mark.matrix
@needs_both
@pytest.mark.parametrize(
    "imports",
    [
        f"{OURS}\nimport pytorch_lightning as spoken",
        f"import pytorch_lightning as spoken\n{OURS}",
        f"import lightning.pytorch, pytorch_lightning as spoken\n{OURS}",
        f"{OURS}\nimport pytorch_lightning, lightning.pytorch as spoken",
    ],
)
def test_a_fit_is_the_same_by_either_name_in_any_order_of_imports(imports: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIT.format(imports=imports)], capture_output=True, text=True, cwd=tmp_path
    )  # not forked: the order of imports is what is tested
    assert done.returncode == 0, done.stderr
    without, with_validation = "4 4 0", "4 8 4"
    assert done.stdout.splitlines() == [without, without, with_validation, with_validation]


@pytest.mark.matrix
@needs_both
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("lightning.pytorch", "pytorch_lightning"),
        pytest.param("pytorch_lightning", "lightning.pytorch", marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_is_known_by_either_name(first: str, second: str) -> None:
    program = BOTH_NAMES.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"] * 3


def test_a_hook_that_nobody_overrides_is_known() -> None:
    class Own(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    class Net(TinyModel):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    own, net = Own(), Net()
    for each in (own, net):
        assert lightning.is_plain_hook(each, "on_train_batch_start")
        assert not lightning.is_plain_hook(each, "on_train_batch_end")
    own.on_train_batch_start = lambda *args: None  # type: ignore[method-assign]
    assert not lightning.is_plain_hook(own, "on_train_batch_start")
    assert not lightning.is_plain_hook(own, "on_nothing_that_exists")


def test_metrics_that_are_reduced_in_steps() -> None:
    def logged(name: str, *, on_step: bool = True, sync: bool = True, rank_zero_only: bool = False) -> Any:
        meta = SimpleNamespace(
            name=name, on_step=on_step, sync=SimpleNamespace(should=sync, rank_zero_only=rank_zero_only)
        )
        return SimpleNamespace(meta=meta)

    results = {
        "training_step.loss": logged("loss"),
        "training_step.alone": logged("alone", sync=False),
        "training_step.epoch": logged("epoch", on_step=False),
        "training_step.first": logged("first", rank_zero_only=True),
        "on_train_batch_end.loss": logged("loss"),
    }
    loop = SimpleNamespace(_results=results)
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop))
    assert lightning.metrics_reduced_in_steps(trainer) == ["loss"]
    del loop._results
    assert lightning.metrics_reduced_in_steps(trainer) == []


class ByHand(TinyModel):
    """Two optimizer steps a batch."""

    def __init__(self) -> None:
        super().__init__(num_batches=5)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for _ in range(2):
            self.optimizers().step()  # type: ignore[union-attr]
        return loss


class Unsized(TinyModel):
    """A loader that knows no length."""

    def train_dataloader(self) -> Any:
        return DataLoader(iter_of(self._loader().dataset), batch_size=2)


def iter_of(samples: Any) -> IterableDataset[Any]:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (samples[index] for index in range(10))

    return Stream()


@pytest.mark.parametrize(
    ("model", "trainer", "left"),
    [
        (TinyModel, {"max_steps": 4}, [3, 2, 1, 0]),
        (lambda: TinyModel(num_batches=3), {"max_steps": 4, "max_epochs": 1}, [2, 1, 0]),
        (TinyModel, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 2}, [3, 2, 1, 0]),
        (TinyModel, {"max_steps": 2, "accumulate_grad_batches": 2}, [3, 2, 1, 0]),
        (lambda: TinyModel(num_batches=2), {"max_steps": 2, "accumulate_grad_batches": 9}, [3, 2, 1, 0]),
        (ByHand, {"max_steps": 8}, [3, 2, 1, 0]),
        (Unsized, {"max_steps": -1, "max_epochs": 1}, [None] * 5),
        (Unsized, {"max_steps": 4, "max_epochs": 1}, [3, 2, 1, 0]),
    ],
)
def test_the_batches_up_to_an_end_that_can_be_foreseen(
    model: Any, trainer: dict[str, Any], left: list[int | None], tmp_path: Path
) -> None:
    seen = []

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            seen.append(batches_left(trainer))

    tiny_trainer(tmp_path, callbacks=[Counts()], **trainer).fit(model())
    assert seen == left


def test_the_keys_of_training_loaders(tmp_path: Path) -> None:
    def keys(loaders: Any) -> list[str]:
        trainer = tiny_trainer(tmp_path, max_steps=1)

        class Any_(TinyModel):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return self.layer(torch.ones(1, FEATURES)).sum()

        trainer.fit(Any_(), loaders)
        return lightning.train_loader_keys(trainer)

    one, two = ([torch.ones(1)] * 2 for _ in range(2))
    assert keys(DataLoader(one)) == [""]  # type: ignore[arg-type]
    assert keys({"a": DataLoader(one), "b": DataLoader(two)}) == ["a", "b"]  # type: ignore[arg-type]
    assert keys([DataLoader(one), {"x": DataLoader(two)}]) == ["0", "1.x"]  # type: ignore[arg-type]


class Holds(TorchCheckpointIO):
    """Writes when it is let."""

    def __init__(self) -> None:
        self.go_on, self.written = threading.Event(), dict[str, Any]()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.go_on.wait(60)
        self.written.update({name: value.clone() for name, value in checkpoint.items()})


def test_whether_saves_in_the_background_copy_is_as_this_lightning_does_it() -> None:
    weights, disk = torch.zeros(2), Holds()
    background = AsyncCheckpointIO(disk)
    background.save_checkpoint({"weights": weights}, "here")
    weights += 1
    disk.go_on.set()
    background.teardown()
    assert torch.equal(disk.written["weights"], torch.zeros(2)) is lightning.async_saves_copy()


@pytest.mark.parametrize(
    ("version", "copies"),
    [("2.5.0", False), ("2.5.3.post0", False), ("2.5.4", True), ("2.5.10", True), ("2.6.0rc1", True), ("3.0", True)],
)
def test_saves_in_the_background_copy_from_2_5_4_on(
    version: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "version", lambda: version)
    assert lightning.async_saves_copy() is copies

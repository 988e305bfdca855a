"""Set-ups of a Trainer, each small and different: what must be the same with CudaPrefetcher and without it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt import LMDBDataModule, LMDBWriter

FEATURES = 4
SAMPLES = 26


@dataclass
class Setup:
    """What a run is made of.

    Attributes:
        module: the model.
        data: the arguments of ``fit`` and its like.
        trainer: arguments of the Trainer.
        callbacks: beside the prefetcher.
        depth: its argument.
        run: the Trainer's method.
        staged: whether batches are staged at all.
    """

    module: LightningModule
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    depth: int = 1
    run: str = "fit"
    staged: bool = True


class Model(LightningModule):
    """Regression on whatever tensors a batch has; draws on the host in each step, as a step may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs = [each for each in leaves(batch) if each.dim() == 2]
        self.seen.append([plain(each) for each in leaves(batch)])
        weights = torch.rand(1) + random.random() + np.random.rand()
        output = sum(self.layer(each.to(self.layer.weight.dtype)).pow(2).mean() for each in inputs)
        return output * float(weights) / len(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("validation", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def leaves(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch of these set-ups, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch.to_dense() if batch.is_sparse else batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (Own, Pair)):
        batch = list(vars(batch).values())
    return [leaf for each in batch for leaf in leaves(each)] if isinstance(batch, (list, tuple)) else []


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, made without waiting for a device."""
    return tensor.detach().as_subclass(torch.Tensor).clone()


@dataclass
class Pair:
    """A batch that is a dataclass."""

    inputs: Any
    names: Any


class Own:
    """A batch that moves itself, as those of graph libraries do."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def to(self, device: Any) -> Own:
        return Own(self.inputs.to(device, non_blocking=True))


def samples(number: int = SAMPLES) -> torch.Tensor:
    """Different in each sample."""
    return torch.arange(number * FEATURES, dtype=torch.float32).sin().view(number, FEATURES)


def loader(collate: Callable[[Any], Any] | None = None, number: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    """Seven batches, the last one smaller, by two workers."""
    return DataLoader(
        TensorDataset(samples(number), torch.arange(number)),
        **{"batch_size": 4, "num_workers": 2, "collate_fn": collate, **options},
    )


def stack(items: Any) -> torch.Tensor:
    return torch.stack([item[0] for item in items])


def as_dict(items: Any) -> Any:
    return {"x": stack(items), "names": [str(int(item[1])) for item in items], "count": len(items), "none": None}


def as_pair(items: Any) -> Any:
    return Pair(stack(items), ("a", "b"))


def as_own(items: Any) -> Any:
    return Own(stack(items))


def nested(items: Any) -> Any:
    return {"a": (stack(items), [stack(items) + 1, "text"]), "b": {"c": torch.tensor(len(items))}}


def with_sparse(items: Any) -> Any:
    return stack(items), torch.eye(FEATURES).to_sparse()


class Hides:
    """Moves a tensor that nobody can find."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = lambda: value

    def to(self, device: Any) -> Hides:
        return Hides(self._value().to(device))

    def __reduce__(self) -> Any:
        return Hides, (self._value(),)


def with_hidden(items: Any) -> Any:
    return [stack(items), Hides(stack(items))]


def of_many(items: Any) -> Any:
    return {str(index): stack(items) + index for index in range(20)} | {"label": torch.tensor(len(items))}


def of_changing_shape(items: Any) -> Any:
    times = 1 + int(items[0][1]) % 3
    return stack(items).repeat(times, 1)


def out_of_order(items: Any) -> Any:
    """Dense memory in another order than the shape's, a view, and a transposed one."""
    x = stack(items)
    return x.t().contiguous().t(), x.repeat(2, 1)[::2], x.double()


class Counted(IterableDataset[Any]):
    """Divides its samples among the workers; has no length."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SAMPLES, step):
            yield samples()[index], index


class Drawing(Sampler[int]):
    """Draws each index from the process's random state, in its turn."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (int(torch.randint(SAMPLES, ())) + random.randrange(3) + int(np.random.randint(3))) % SAMPLES

    def __len__(self) -> int:
        return SAMPLES


class Curriculum(Sampler[int]):
    """Its choice depends on how far training is."""

    def __init__(self) -> None:
        self.level = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            yield (index + self.level) % SAMPLES

    def __len__(self) -> int:
        return SAMPLES


class Hook(Callback):
    """One hook, one function of ``(trainer, module)``."""

    def __init__(self, hook: str, function: Callable[[Any, Any], Any]) -> None:
        setattr(self, hook, lambda trainer, module, *args, **kwargs: function(trainer, module))


def fit(module: LightningModule | None = None, train: Any = None, val: Any = None, **options: Any) -> Setup:
    trainer = options.pop("trainer", {})
    data = {"train_dataloaders": loader() if train is None else train}
    if val is not None:
        data["val_dataloaders"] = val
    return Setup(module or Model(), data, {"max_epochs": 2, **trainer}, **options)


# ---- modules ----


class Transfers(Model):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) * 2 for each in leaves(batch)]


class TransfersAndDraws(Model):
    """Its own transfer adds noise."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) + torch.rand(1) for each in leaves(batch)]


class DrawsLater(Model):
    """The same, from the fourth batch on."""

    calls = 0

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        noise = torch.rand(1) if self.calls > 3 else torch.zeros(1)
        return [each.to(device) + noise for each in leaves(batch)]


class ManualUnderAutocast(Model):
    """The hooks of its optimizer step lie inside ``training_step``, where autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        x = leaves(batch)[0]
        return [(x @ torch.ones(FEATURES, FEATURES)).to(device)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Augments(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each + torch.rand(1) if each.is_floating_point() else each for each in batch]


class Before(Model):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each + torch.rand(1) if each.is_floating_point() else each for each in batch]


class Manual(Model):
    automatic_optimization: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class InPlace(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


class Skips(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Leaves(Model):
    """Skips the rest of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class Keeps(Model):
    """Keeps all batches, and a view of each, and looks at them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append((batch[0], batch[0][1:], plain(batch[0])))
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        for whole, view, then in self.kept:
            assert torch.equal(plain(whole), then)
            assert torch.equal(plain(view), then[1:])


class KeepsPrevious(Model):
    def __init__(self) -> None:
        super().__init__()
        self.previous: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.previous is not None and self.previous[0].shape == batch[0].shape:
            loss = loss + self.layer(self.previous[0]).mean()
        self.previous = batch
        return loss


class IteratesItself(Model):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss([each.to(self.device) for each in batch])


# ---- data ----


def stored(folder: Path, **options: Any) -> LMDBDataModule:
    path = folder / "stored.lmdb"
    if not path.exists():
        with LMDBWriter(path) as writer:
            for index, each in enumerate(samples()):
                writer.write((each.numpy(), index))
    return LMDBDataModule(path, path, batch_size=4, **options)


class Sources:
    """The data of set-ups that need a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def _lmdb(folder: Path, **options: Any) -> Setup:
    return Setup(Model(), {"datamodule": stored(folder, **options)}, {"max_epochs": 2})


def _curriculum(folder: Path) -> Setup:
    sampler = Curriculum()

    def harder(trainer: Any, module: Any) -> None:
        sampler.level += 3

    return fit(train=loader(sampler=sampler), callbacks=[Hook("on_train_batch_end", harder)])


def _stops(trainer: Any, module: Any) -> None:
    trainer.should_stop = trainer.global_step >= 4


def _combined(mode: str, *numbers: int, **options: Any) -> CombinedLoader:
    return CombinedLoader({str(n): loader(stack, number, **options) for n, number in enumerate(numbers)}, mode)


def _shuffled() -> DataLoader[Any]:
    return loader(shuffle=True, persistent_workers=True)


def _stateful(workers: int, data: Dataset[Any] | None = None) -> Any:
    return StatefulDataLoader(
        data or TensorDataset(samples(), torch.arange(SAMPLES)), batch_size=4, num_workers=workers
    )


SETUPS: dict[str, Callable[[Path], Setup]] = {
    "plain": lambda folder: fit(),
    "depth-3": lambda folder: fit(depth=3),
    "no-workers": lambda folder: fit(train=loader(num_workers=0, shuffle=True), staged=False),
    "shuffled-persistent": lambda folder: fit(train=_shuffled(), val=_shuffled()),
    "one-worker-one-ahead": lambda folder: fit(train=loader(num_workers=1, prefetch_factor=1), depth=2),
    "drop-last": lambda folder: fit(train=loader(drop_last=True)),
    "strings-and-none": lambda folder: fit(train=loader(as_dict)),
    "dataclass": lambda folder: fit(train=loader(as_pair)),
    "own-to": lambda folder: fit(train=loader(as_own)),
    "nested": lambda folder: fit(train=loader(nested)),
    "many-tensors": lambda folder: fit(train=loader(of_many), trainer={"max_epochs": 4}),
    "changing-shapes": lambda folder: fit(train=loader(of_changing_shape)),
    "memory-formats": lambda folder: fit(train=loader(out_of_order)),
    "own-transfer": lambda folder: fit(Transfers()),
    "transfer-draws": lambda folder: fit(TransfersAndDraws()),
    "transfer-draws-later": lambda folder: fit(DrawsLater(), depth=2),
    "manual-autocast": lambda folder: fit(ManualUnderAutocast(), trainer={"precision": "bf16-mixed"}),
    "sparse": lambda folder: fit(train=loader(with_sparse)),
    "hidden": lambda folder: fit(train=loader(with_hidden)),
    "after-transfer": lambda folder: fit(Augments()),
    "before-transfer": lambda folder: fit(Before(), staged=False),
    "dataloader-iter": lambda folder: fit(IteratesItself(), staged=False),
    "lmdb-gathered": lambda folder: _lmdb(folder, num_workers=0),
    "lmdb-workers": lambda folder: _lmdb(folder, num_workers=2),
    "combined-cycle-equal": lambda folder: fit(train=_combined("max_size_cycle", 20, 20)),
    "combined-cycle": lambda folder: fit(train=_combined("max_size_cycle", 26, 9, shuffle=True)),
    "combined-min": lambda folder: fit(train=_combined("min_size", 26, 13)),
    "combined-max": lambda folder: fit(train=_combined("max_size", 26, 13)),
    "several-validation": lambda folder: fit(val=[loader(), loader(number=9, shuffle=True), loader(num_workers=0)]),
    "limit-int": lambda folder: fit(trainer={"limit_train_batches": 3, "limit_val_batches": 2}, val=loader()),
    "limit-share": lambda folder: fit(trainer={"limit_train_batches": 0.5, "limit_val_batches": 0.5}, val=loader()),
    "overfit": lambda folder: fit(trainer={"overfit_batches": 2}),
    "fast-dev-run": lambda folder: fit(trainer={"fast_dev_run": 2}, val=loader()),
    "accumulate": lambda folder: fit(trainer={"accumulate_grad_batches": 3}),
    "accumulate-max-steps": lambda folder: fit(
        trainer={"accumulate_grad_batches": 2, "max_steps": 5, "max_epochs": -1}, depth=2
    ),
    "max-steps": lambda folder: fit(trainer={"max_steps": 10, "max_epochs": -1}, depth=2),
    "manual": lambda folder: fit(Manual(), trainer={"max_steps": 12, "max_epochs": -1}),
    "unsized": lambda folder: fit(train=DataLoader(Counted(), batch_size=4, num_workers=2)),
    "unsized-depth-2": lambda folder: fit(train=DataLoader(Counted(), batch_size=4, num_workers=3), depth=2),
    "unsized-no-workers": lambda folder: fit(train=DataLoader(Counted(), batch_size=4), staged=False),
    "unsized-limited": lambda folder: fit(
        train=DataLoader(Counted(), batch_size=4, num_workers=2), trainer={"limit_train_batches": 3}
    ),
    "validation-within": lambda folder: fit(val=loader(shuffle=True), trainer={"val_check_interval": 0.5}),
    "rest-of-epoch-left": lambda folder: fit(Leaves(), train=_shuffled()),
    "should-stop": lambda folder: fit(callbacks=[Hook("on_train_batch_end", _stops)], val=loader()),
    "early-stopping": lambda folder: fit(
        val=loader(), callbacks=[EarlyStopping("validation", mode="max", patience=1)], trainer={"max_epochs": 5}
    ),
    "drawing-sampler": lambda folder: fit(train=loader(sampler=Drawing())),
    "drawing-batch-sampler": lambda folder: fit(
        train=loader(batch_sampler=BatchSampler(Drawing(), 4, False), batch_size=1)
    ),
    "curriculum": _curriculum,
    "double-precision": lambda folder: fit(trainer={"precision": "64-true"}),
    "half-precision": lambda folder: fit(trainer={"precision": "bf16-true"}),
    "reloaded": lambda folder: fit(trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, val=loader()),
    "in-place": lambda folder: fit(InPlace()),
    "skipped-steps": lambda folder: fit(Skips()),
    "kept-batches": lambda folder: fit(Keeps()),
    "kept-previous": lambda folder: fit(KeepsPrevious()),
    "stateful": lambda folder: fit(train=_stateful(2)),
    "stateful-unsized": lambda folder: fit(train=_stateful(2, Counted())),
    "validate": lambda folder: Setup(Model(), {"dataloaders": [loader(), loader(number=9)]}, run="validate"),
    "test": lambda folder: Setup(Model(), {"dataloaders": loader()}, run="test"),
    "predict": lambda folder: Setup(Model(), {"dataloaders": [loader(), loader(number=9)]}, run="predict"),
}


def setup_of(name: str, folder: Path) -> Setup:
    """A set-up by its name; its own each time."""
    return copy.copy(SETUPS[name](folder))

"""Elastic resume: a checkpoint from anywhere in a run goes on to the sample, on other batches, workers and ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from tests.datamodules.training import (
    EPOCHS,
    MOMENTS,
    SAMPLES,
    Interrupted,
    Notes,
    SaveAndEnd,
    Steps,
    build,
    by_epoch,
    run,
)
from tests.helpers import tiny_trainer
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("resume") / "data")


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return run(data, tmp_path_factory.mktemp("work"), batch_size=4).steps


WHOLE = {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize("ask_for_steps", [False, True], ids=["", "estimated_stepping_batches"])
@pytest.mark.parametrize("batch_size", [2, pytest.param(4, marks=pytest.mark.matrix), 8])
@pytest.mark.parametrize(("hook", "batch", "options"), MOMENTS, ids=lambda value: str(value) if value else "")
def test_a_resumed_run_gives_every_sample_once_an_epoch(
    tmp_path: Path,
    data: Path,
    uninterrupted: Steps,
    hook: str,
    batch: int,
    options: dict[str, Any],
    batch_size: int,
    ask_for_steps: bool,
) -> None:
    """Another batch size changes the epoch's length as another number of ranks does."""
    checkpoint = tmp_path / "middle.ckpt"
    before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, hook, batch), **options)
    after = run(data, tmp_path, batch_size=batch_size, resume=checkpoint, ask_for_steps=ask_for_steps, **options)
    assert by_epoch(before.steps + after.steps) == WHOLE
    if batch_size == 4:
        assert before.steps + after.steps == uninterrupted


def test_workers_that_read_ahead_do_not_count(tmp_path: Path, data: Path, uninterrupted: Steps) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    before = run(data, tmp_path, batch_size=4, num_workers=2, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3))
    after = run(data, tmp_path, batch_size=4, num_workers=1, resume=checkpoint)
    assert before.steps + after.steps == uninterrupted


def test_the_state_is_plain_numbers(tmp_path: Path, data: Path) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3))
    state = torch.load(checkpoint, weights_only=True)["LMDBDataModule"]
    assert state == {
        "seed": 5, "epoch": 1, "consumed": 12, "batches": 3,
        "num_samples": SAMPLES, "shuffle": True, "shuffle_window": None, "weighted": False,
    }  # fmt: skip


def test_the_length_is_what_is_left_and_what_was_done(tmp_path: Path, data: Path) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 5))
    lengths: list[int] = []

    class Asks(Notes):
        def on_train_batch_end(self, *args: Any) -> None:
            lengths.append(int(self.trainer.num_training_batches))

    trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=EPOCHS)
    trainer.fit(Asks(), LMDBDataModule(data, batch_size=8, num_workers=0, seed=5), ckpt_path=checkpoint)
    rest = -(-(SAMPLES - 20) // 8)
    assert lengths == [5 + rest] * rest + [7] * 7


def test_gradient_accumulation_and_a_limit_go_together_with_a_resume(tmp_path: Path, data: Path) -> None:
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 10}
    whole = run(data, tmp_path, batch_size=4, **options)
    checkpoint = tmp_path / "middle.ckpt"
    before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 6), **options)
    after = run(data, tmp_path, batch_size=4, resume=checkpoint, **options)
    assert before.steps + after.steps == whole.steps
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"shuffle_window": 16}, {"weights": [1.0] * SAMPLES}, {"drop_last": True}])
def test_every_kind_of_order_is_resumed(tmp_path: Path, data: Path, options: dict[str, Any]) -> None:
    whole = run(data, tmp_path, batch_size=4, module_kwargs=options)
    checkpoint = tmp_path / "middle.ckpt"
    save = SaveAndEnd(checkpoint, "on_train_batch_end", 6)
    before = run(data, tmp_path, batch_size=4, save=save, module_kwargs=options)
    after = run(data, tmp_path, batch_size=4, resume=checkpoint, module_kwargs=options)
    assert before.steps + after.steps == whole.steps


def test_other_data_than_the_checkpoints_is_told(tmp_path: Path, data: Path) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 6))
    with pytest.warns(UserWarning, match=r"num_samples was 53 and is 60"):
        after = run(build(tmp_path / "grown", 60), tmp_path, batch_size=4, resume=checkpoint)
    assert [len(indices) for _, indices in after.steps[:9]] == [4] * 9  # 60 - 24


def test_a_second_fit_begins_at_the_beginning(tmp_path: Path, data: Path, uninterrupted: Steps) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 6))
    datamodule = LMDBDataModule(data, batch_size=4, num_workers=0, seed=5)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": EPOCHS}
    tiny_trainer(tmp_path, **options).fit(Notes(), datamodule, ckpt_path=checkpoint)
    again = Notes()
    tiny_trainer(tmp_path, **options).fit(again, datamodule)
    assert again.steps == uninterrupted


@pytest.mark.parametrize("batch", [3, 14])
def test_other_stages_with_a_checkpoint_leave_the_next_fit_alone(
    tmp_path: Path, data: Path, uninterrupted: Steps, batch: int
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", batch, epoch=0))
    datamodule = LMDBDataModule(data, val=data, batch_size=4, num_workers=0, seed=5)
    tiny_trainer(tmp_path, limit_val_batches=1).validate(Notes(), datamodule, ckpt_path=checkpoint)
    model = Notes()
    tiny_trainer(tmp_path, max_steps=-1, max_epochs=EPOCHS).fit(model, datamodule)
    assert model.steps == uninterrupted


def test_a_fit_that_raised_leaves_the_next_one_alone(tmp_path: Path, data: Path, uninterrupted: Steps) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3))
    datamodule = LMDBDataModule(data, batch_size=4, num_workers=0, seed=5)
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": EPOCHS}
    ends = SaveAndEnd(tmp_path / "again.ckpt", "on_train_batch_end", 1)
    ends.batches = 0
    with pytest.raises(Interrupted):
        tiny_trainer(tmp_path, **options, callbacks=[ends]).fit(Notes(), datamodule, ckpt_path=checkpoint)
    model = Notes()
    tiny_trainer(tmp_path, **options).fit(model, datamodule)
    assert model.steps == uninterrupted


@pytest.mark.parametrize("steps", [3, 13, 14, 20, 28])
def test_a_run_that_max_steps_ended_goes_on(tmp_path: Path, data: Path, uninterrupted: Steps, steps: int) -> None:
    """Lightning counts the epoch as done in the checkpoint of its end, and still goes on in it."""
    last = ModelCheckpoint(tmp_path, save_last=True)
    first = run(data, tmp_path, batch_size=4, max_steps=steps, callbacks=[last], enable_checkpointing=True)
    assert len(first.steps) == steps
    rest = run(data, tmp_path, batch_size=4, resume=tmp_path / "last.ckpt", max_epochs=-1, max_steps=42)
    assert [indices for _, indices in first.steps + rest.steps] == [indices for _, indices in uninterrupted]


def test_a_checkpoint_before_the_first_batch_of_a_resumed_run_is_right(
    tmp_path: Path, data: Path, uninterrupted: Steps
) -> None:
    checkpoint, second = tmp_path / "middle.ckpt", tmp_path / "second.ckpt"
    before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3))

    class AtStart(SaveAndEnd):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._maybe("on_train_start", trainer)

    run(data, tmp_path, batch_size=4, resume=checkpoint, save=AtStart(second, "on_train_start", 0))
    after = run(data, tmp_path, batch_size=4, resume=second)
    assert before.steps + after.steps == uninterrupted


def test_reloaded_loaders_are_resumed_too(tmp_path: Path, data: Path, uninterrupted: Steps) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3), **options)
    after = run(data, tmp_path, batch_size=4, resume=checkpoint, **options)
    assert before.steps + after.steps == uninterrupted


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.matrix)])
def test_the_number_of_ranks_may_change(tmp_path: Path, data: Path, before: int, after: int) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    common = {"data": str(data), "work": str(tmp_path), "batch_size": 4}
    save = {"path": str(checkpoint), "hook": "on_train_batch_end", "batch": 3}
    steps: Steps = []
    for world_size, more in ((before, {"save": save}), (after, {"resume": str(checkpoint)})):
        what = {**common, **more, "devices": world_size}
        for rank_steps in run_ranks("tests.datamodules.training:rank", world_size, **what):
            steps += rank_steps
    assert by_epoch(steps) == WHOLE

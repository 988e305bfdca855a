"""Lengths of sequences and their padding, as a batch's mask or lengths have them."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector import padding_watch
from lightning_gpuopt.detector.padding_watch import PaddingWatch, padding_in
from lightning_gpuopt.diagnosis.hints import PaddedBatch
from tests.helpers import TinyModel, tiny_trainer

LENGTHS = (1, 4, 2)
SEEN = PaddedBatch(LENGTHS, 4)


def mask(lengths: tuple[int, ...] = LENGTHS, width: int = 4, dtype: Any = torch.int64) -> torch.Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).to(dtype)


IDS = torch.ones(3, 4, dtype=torch.int64)
Named = namedtuple("Named", ["input_ids", "attention_mask"])


@dataclasses.dataclass
class Fields:
    tokens: torch.Tensor
    lengths: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "attention_mask": mask()},
        {"input_ids": IDS, "mask": mask(dtype=torch.bool)},
        {"mask": mask(dtype=torch.float32)},
        {"attention_mask": mask().flip(1)},  # padded on the left
        UserDict(input_ids=IDS, attention_mask=mask()),
        Named(IDS, mask()),
        Fields(IDS, torch.tensor(LENGTHS)),
        {"tokens": torch.ones(3, 4, 8), "length": torch.tensor(LENGTHS)},
        (Named(IDS, mask()), torch.ones(3)),
        [{"attention_mask": mask()}, torch.ones(3)],
    ],
)
def test_lengths_are_found(batch: Any) -> None:
    assert padding_in(batch) == SEEN


LONG = (5, 16, 9)
KEPT = mask(LONG, 16)
TOKENS = torch.arange(3 * 16).reshape(3, 16) + 1


@pytest.mark.parametrize(
    "batch",
    [
        # lengths beside the batch, whatever they are called
        (KEPT.float() * TOKENS, torch.tensor(LONG)),
        [(KEPT * TOKENS)[:, :, None] * torch.ones(8), torch.zeros(3, dtype=torch.int64), torch.tensor(LONG)],
        {"x": KEPT * TOKENS, "input_lengths": torch.tensor(LONG, dtype=torch.int32)},
        # padded by a constant, on either side
        {"input_ids": KEPT * TOKENS},
        (KEPT.flip(1) * TOKENS, torch.ones(3)),
        {"input_ids": KEPT * TOKENS + 30_000 * (1 - KEPT)},
    ],
)
def test_lengths_are_found_by_what_the_rows_hold(batch: Any) -> None:
    assert padding_in(batch) == PaddedBatch(LONG, 16)


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(3, 4),
        {"input_ids": IDS},
        {"attention_mask": mask().to("meta")},  # on a device
        {"mask": torch.ones(3, 8, 8)},  # of images
        {"mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1]])},  # of tokens to predict
        {"lengths": torch.tensor(LENGTHS)},  # packed: there is no padding
        {"lengths": torch.tensor(LENGTHS), "packed": torch.ones(7, 8)},
        {"length": torch.tensor([0.5, 2.0, 1.0]), "tokens": IDS},
        {"attention_mask": [1, 2]},
        (torch.rand(3, 4), torch.tensor(LENGTHS)),  # classes
        (torch.rand(3, 4, 4), torch.tensor(LENGTHS)),
        (torch.zeros(3, 4), torch.tensor(LENGTHS)),
        (torch.rand(3, 4), torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])),  # classes, one-hot
        (torch.rand(3, 4), torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 1]])),
        (torch.tensor([[5, 7, 9, 2], [4, 4, 1, 2], [8, 3, 6, 2]]), torch.ones(3)),  # each ends with the same token
        (torch.arange(12).reshape(3, 4), torch.ones(3)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.ones(3)),
        (torch.randint(1, 99, (64, 3)) * torch.tensor([1, 1, 0]), torch.ones(64)),  # user, item, label
        (torch.cat([torch.randint(1, 99, (64, 19)), torch.arange(64)[:, None] % 5 // 4], dim=1), torch.ones(64)),
        (torch.randn(1, 10), torch.tensor([9])),
        (torch.randn(8, 20, dtype=torch.complex64), torch.arange(1, 9)),
        (torch.randn(8, 20).to_sparse(), torch.arange(1, 9)),
        "text",
        (),
    ],
)
def test_what_has_none_is_left_out(batch: Any) -> None:
    assert padding_in(batch) is None


def test_whole_rows_and_empty_ones() -> None:
    assert padding_in({"mask": mask((4, 4))}) == PaddedBatch((4, 4), 4)
    assert padding_in({"mask": mask((0, 4))}) is None


def test_a_few_batches_are_looked_at_and_of_a_large_one_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_watch, "_MAX_ELEMENTS", 8)
    training = True
    watch = PaddingWatch(lambda: training)
    for _ in range(20):
        watch.see_batch({"mask": mask()})
    training = False
    for _ in range(20):
        watch.see_batch({"mask": mask()})
    assert watch.batches == [PaddedBatch((1, 2), 4)] * 5


def test_a_batch_that_raises_is_left_out() -> None:
    class Broken(UserDict[str, Any]):
        def __contains__(self, key: object) -> bool:
            raise OSError("gone")

    watch = PaddingWatch(lambda: True)
    watch.see_batch(Broken())
    assert watch.batches == []


class Tokens(TinyModel):
    """Lengths in turn 2 and 32, padded to the longest of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([torch.ones(4, 4)], batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        def collate(numbers: list[int]) -> dict[str, torch.Tensor]:
            lengths = tuple(2 + 30 * (number % 2) for number in numbers)
            return {"input_ids": torch.ones(len(lengths), 32), "attention_mask": mask(lengths, 32)}

        return DataLoader(range(80), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


def test_a_training_on_the_cpu_gets_the_hint_and_its_plugin_back(tmp_path: Path) -> None:
    detector = StallDetector(on_stall="ignore", warmup_steps=1, print_report=False)
    trainer = tiny_trainer(tmp_path, callbacks=[detector], max_steps=20)
    trainer.fit(Tokens())
    (hint,) = detector.report.hints
    assert (hint.name, hint.evidence) == (
        "padding",
        {"padding_percent": 46.9, "saved_percent": 37.5, "batches_seen": 5.0},
    )
    assert "convert_input" not in vars(trainer.strategy.precision_plugin)


def test_it_ends_where_the_first_five_looks_see_nothing() -> None:
    ended: list[int] = []
    watch = PaddingWatch(lambda: True)
    watch.end = lambda: ended.append(1)
    for _ in range(15):
        watch.see_batch([torch.ones(4, 4)])
    assert ended == []
    watch.see_batch([torch.ones(4, 4)])
    assert ended == [1]


def test_a_training_without_masks_gets_its_plugin_back_after_16_batches(tmp_path: Path) -> None:
    looked: list[bool] = []

    class Plain(TinyModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            looked.append("convert_input" in vars(self.trainer.strategy.precision_plugin))
            return super().training_step(batch, batch_idx)

    detector = StallDetector(on_stall="ignore", warmup_steps=1, print_report=False)
    tiny_trainer(tmp_path, callbacks=[detector], max_steps=20, max_epochs=-1).fit(Plain())
    assert looked == [True] * 15 + [False] * 5

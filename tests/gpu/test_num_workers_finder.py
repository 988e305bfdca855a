"""Workers that come and go behind the thread that pins batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.tuning.find import find_num_workers
from lightning_gpuopt.tuning.segments import SegmentedIterator

pytestmark = pytest.mark.gpu


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def loader(**kwargs: Any) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Numbers(), 2, shuffle=True, num_workers=1, pin_memory=True, generator=generator, **kwargs)


@pytest.mark.parametrize("persistent", [False, True])
def test_pinned_batches_come_in_the_same_order(persistent: bool) -> None:
    plain = [batch.flatten().tolist() for batch in loader(persistent_workers=persistent)]
    source = loader(persistent_workers=persistent)
    iterator = SegmentedIterator(source, lambda make: make(), own_workers=1, depth=2)
    seen = []
    for number, batch in enumerate(iterator):
        assert batch.is_pinned()
        seen.append(batch.cuda(non_blocking=True).flatten().tolist())
        if number in (10, 60):
            iterator.resize(4 if number == 10 else 2)
    assert seen == plain
    iterator._shutdown_workers()


def test_a_search_pins_as_the_loader_does_and_advises_it() -> None:
    result = find_num_workers(loader(), step_time_s=0.01, max_num_workers=2)
    assert result.pin_memory
    assert find_num_workers(DataLoader(Numbers(), 2), step_time_s=0.01, max_num_workers=2).pin_memory

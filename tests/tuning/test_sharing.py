from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpuopt.tuning.sharing import ForkSnapshot


def test_a_loader_whose_own_method_collates_is_not_compared_with_what_is_kept_of_it() -> None:
    class Own(DataLoader[Any]):
        def __init__(self) -> None:
            super().__init__(TensorDataset(torch.zeros(8, 2)), collate_fn=self.put_together)

        def put_together(self, samples: list[Any]) -> Any:
            return torch.stack([sample[0] for sample in samples])

    loader, parts = Own(), []
    for _ in range(4):
        start = ForkSnapshot(loader, 0)
        start.note(loader)
        parts.append(len(list(start.state._parts)))
        assert not start.has_changed
    assert len({*parts}) == 1

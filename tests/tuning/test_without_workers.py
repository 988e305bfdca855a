"""Whether a loader without workers can have some: real datasets, real worker processes."""

from __future__ import annotations

import multiprocessing
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from lightning_gpuopt.tuning import without_workers
from tests.tuning.datasets import Broken, Numbers, Stream, Stuck

pytestmark = pytest.mark.usefixtures("cheap_workers")


class Reads(Numbers):
    """Draws as it reads."""

    def __init__(self, draw: Any = None) -> None:
        super().__init__(64)
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.draw is not None:
            self.draw()
        return torch.full((self.size,), float(index))


def look(source: DataLoader[Any], longest_s: float = 30.0, **kwargs: Any) -> without_workers.WorkersCheck:
    return without_workers.check_workers(source, longest_s=longest_s, **kwargs)


def loader(dataset: Dataset[Any], **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=8, **kwargs)


def test_a_loader_that_a_worker_can_serve() -> None:
    torch.manual_seed(0)
    here: list[int] = []
    source = loader(Reads(lambda: here.append(os.getpid()) if os.getpid() == training else None), shuffle=True)
    training, before = os.getpid(), torch.get_rng_state()
    seen = look(source)
    assert (seen.problem, seen.shuffles) == (None, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert source.num_workers == 0
    assert here == []


@pytest.mark.parametrize(
    ("draw", "kwargs", "shuffles"),
    [
        ("torch", {"shuffle": True}, True),
        ("torch", {"sampler": SubsetRandomSampler(range(64))}, True),
        ("torch", {"shuffle": True, "generator": torch.Generator()}, False),
        ("torch", {}, False),
        ("torch", {"sampler": list(range(64))}, True),  # who knows what a sampler of one's own draws
        ("numpy", {"sampler": list(range(64))}, True),
        ("numpy", {"shuffle": True}, False),  # torch's samplers are seeded from torch's state
        ("python", {"shuffle": True}, False),
        ("collate_fn", {"shuffle": True, "collate_fn": lambda samples: torch.rand(())}, True),
    ],
)
def test_a_dataset_or_collate_fn_that_draws_from_what_the_sampler_is_seeded_from(
    draw: str, kwargs: dict[str, Any], shuffles: bool
) -> None:
    drawn = {"torch": lambda: torch.rand(1), "numpy": np.random.random, "python": random.random}.get(draw)
    assert look(loader(Reads(drawn), **kwargs)).shuffles is shuffles


@pytest.mark.parametrize(
    ("dataset", "longest_s", "problem"),
    [
        (Broken(), 30.0, "a worker process fails: KeyError: 'no sample"),
        (Stuck(from_the_start=True), 0.2, "a worker process gave no batch within 0.2 s"),
    ],
)
def test_what_becomes_of_the_worker_is_told(dataset: Any, longest_s: float, problem: str) -> None:
    assert (look(loader(dataset), longest_s).problem or "").startswith(problem)


def test_batches_that_are_made_sooner_than_handed_over_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_workers, "receive_cost", lambda nbytes: (0.0, 0.05 * nbytes, 0.0))
    assert look(loader(TensorDataset(torch.zeros(800, 0)))).problem is None
    problem = look(loader(TensorDataset(torch.zeros(800, 4)))).problem  # 128 bytes a batch
    assert problem is not None
    assert "sooner than a worker process can transfer it" in problem


def test_a_stream_is_read_where_that_is_allowed() -> None:
    assert "iterable=True" in (look(loader(Stream(64))).problem or "")
    assert look(loader(Stream(64)), iterable=True).problem is None


def test_where_processes_are_not_forked_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda: spawn)
    assert "would be started by 'spawn', which runs the program's script again" in (look(loader(Reads())).problem or "")


@pytest.mark.parametrize(
    ("seen", "keeps"),
    [
        # the second batch comes as the third and the fourth as well
        ([(None, 9.0), (None, 8.0), (None, 8.0), (None, 8.0), (None, 8.0)], False),
        ([("entries", 9.0), ("entries", 8.0), (None, 1.0), (None, 1.0), ("entries", 8.0)], True),
        ([("entries", 9.0), ("entries", 8.0), (None, 5.3), (None, 5.3), ("entries", 8.0)], True),
        ([("entries", 9.0), ("entries", 8.0), (None, 5.4), (None, 5.4), ("entries", 8.0)], False),
        ([("value", 9.0), ("value", 8.0), (None, 1.0), (None, 1.0), ("value", 8.0)], False),
        ([("entries", 9.0), ("entries", 8.0), ("entries", 8.0), ("entries", 8.0), ("entries", 8.0)], True),
    ],
    ids=["nothing", "samples", "worth keeping", "quickly made again", "the last number", "more each time"],
)
def test_a_dataset_that_keeps_what_it_has_read(seen: list[tuple[str | None, float]], keeps: bool) -> None:
    why = without_workers._why_kept([without_workers._Seen(None, change, read_s) for change, read_s in seen])
    assert (why is not None) is keeps

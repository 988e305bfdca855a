"""What is read off the training loaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_gpuopt.compat.dataloader import worker_pids
from lightning_gpuopt.loaders.describe import describe
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, PipelineTimes
from lightning_gpuopt.timeline.loader_facts import facts_of, pipeline_of

SAMPLES = [torch.zeros(1)] * 8


def test_a_loader_without_workers() -> None:
    assert facts_of([describe(DataLoader(SAMPLES))]) == LoaderFacts(
        num_workers=0, persistent_workers=False, prefetch_factor=None, pin_memory=False
    )


def test_several_loaders_are_summed_up() -> None:
    loaders = [
        DataLoader(SAMPLES, num_workers=2, persistent_workers=True, prefetch_factor=4),
        DataLoader(SAMPLES, num_workers=1, prefetch_factor=3),
    ]
    assert facts_of([describe(each) for each in loaders]) == LoaderFacts(
        num_workers=3, persistent_workers=False, prefetch_factor=3, pin_memory=False
    )


def test_what_is_no_dataloader_says_nothing() -> None:
    assert facts_of([]) == LoaderFacts()
    assert facts_of([describe(DataLoader(SAMPLES)), describe(range(3))]) == LoaderFacts()


def test_worker_processes_are_found_behind_their_iterators() -> None:
    iterator = iter(DataLoader(SAMPLES, num_workers=2))
    pids = worker_pids([iterator, iter(DataLoader(SAMPLES)), iter([1])])
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    for pid in pids:
        os.kill(pid, 0)
    list(iterator)


class Alike(IterableDataset[Any]):
    """Gives the same samples in every worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)


class Divided(Alike):
    """Each worker takes its share, in a function of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        def share() -> Iterator[torch.Tensor]:
            info = get_worker_info()
            return islice(
                super(Divided, self).__iter__(), info.id if info else 0, None, info.num_workers if info else 1
            )

        return share()


class Shuffled(Alike):
    """Fills a buffer from another dataset, which divides itself."""

    def __init__(self) -> None:
        self.source = Divided()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.source)


@pytest.mark.parametrize(
    ("loader", "duplicates"),
    [
        (DataLoader(SAMPLES), None),
        (DataLoader(Alike()), True),
        (DataLoader(Divided()), False),
        (DataLoader(Shuffled()), False),
        (DataLoader(Alike(), worker_init_fn=print), False),
    ],
)
def test_it_is_known_whether_workers_would_bring_samples_twice(loader: Any, duplicates: bool | None) -> None:
    assert facts_of([describe(loader)]).duplicates is duplicates
    assert facts_of([describe(DataLoader(Alike())), describe(loader)]).duplicates is True


class Decodes:
    """As DALIDataModule's loaders."""

    num_threads, on_gpu, batch_size = 3, True, 8

    def times(self) -> PipelineTimes:
        return PipelineTimes(5, 1.0)


class AlsoDecodes(Decodes, DataLoader[Any]):
    """A DataLoader is read as one."""


def test_a_pipeline_is_known_by_what_it_counts() -> None:
    assert pipeline_of(Decodes()) == Pipelines(PipelineTimes(5, 1.0), 3, True, 1, 8)


@pytest.mark.parametrize(
    ("name", "value"), [("num_threads", "3"), ("times", None), ("times", lambda: 5), ("batch_size", None)]
)
def test_what_lacks_something_of_it_is_none(name: str, value: Any) -> None:
    loader = Decodes()
    setattr(loader, name, value)
    found = pipeline_of(loader)
    assert found == (Pipelines(PipelineTimes(5, 1.0), 3, True) if name == "batch_size" else None)


def test_other_loaders_are_no_pipelines() -> None:
    assert pipeline_of(DataLoader(SAMPLES)) is None
    assert pipeline_of(AlsoDecodes(SAMPLES)) is None
    assert pipeline_of(range(3)) is None

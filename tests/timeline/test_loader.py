"""What is read off the training loaders."""

from __future__ import annotations

import os

import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.timeline.loader import LoaderFacts, facts_of, worker_pids

SAMPLES = [torch.zeros(1)] * 8


def test_a_loader_without_workers() -> None:
    assert facts_of([DataLoader(SAMPLES)]) == LoaderFacts(
        num_workers=0, persistent_workers=False, prefetch_factor=None, pin_memory=False
    )


def test_several_loaders_are_summed_up() -> None:
    loaders = [
        DataLoader(SAMPLES, num_workers=2, persistent_workers=True, prefetch_factor=4),
        DataLoader(SAMPLES, num_workers=1, prefetch_factor=3),
    ]
    assert facts_of(loaders) == LoaderFacts(
        num_workers=3, persistent_workers=False, prefetch_factor=3, pin_memory=False
    )


def test_what_is_no_dataloader_says_nothing() -> None:
    assert facts_of([]) == LoaderFacts()
    assert facts_of([DataLoader(SAMPLES), range(3)]) == LoaderFacts()


def test_worker_processes_are_found_behind_their_iterators() -> None:
    iterator = iter(DataLoader(SAMPLES, num_workers=2))
    pids = worker_pids([iterator, iter(DataLoader(SAMPLES)), iter([1])])
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    for pid in pids:
        os.kill(pid, 0)
    list(iterator)

"""A decision of all ranks, with a store in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_gpuopt.utils import rank_vote
from lightning_gpuopt.utils.rank_vote import all_say


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rank_vote, "open_store", lambda name: dist.PrefixStore(name, store))


@pytest.mark.parametrize(
    ("votes", "agreed"), [(["a", "a", "a"], True), (["a", "b", "a"], False), (["b", "a", "a"], False)]
)
def test_all_ranks_have_the_same_answer(store, votes, agreed):
    with ThreadPoolExecutor(3) as ranks:
        answers = [ranks.submit(all_say, vote, "x", rank, 3, 20.0) for rank, vote in enumerate(votes)]
        assert [each.result() for each in answers] == [agreed] * 3


def test_a_rank_that_does_not_take_part(store):
    assert all_say("a", "x", 0, 2, patience_s=0.01) is False
    assert all_say("a", "x", 1, 2, patience_s=0.01) is False  # it comes too late, and rank 0's word holds


def test_without_rank_0(store):
    assert all_say("a", "x", 1, 2, patience_s=0.01) is False


def test_one_rank_and_no_store(monkeypatch):
    assert all_say("a", "x", 0, 1) is True
    monkeypatch.setattr(rank_vote, "open_store", lambda name: None)
    assert all_say("a", "x", 0, 2) is False

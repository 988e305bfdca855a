"""What ranks decide together, with a store in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_gpuopt.utils import rank_vote
from lightning_gpuopt.utils.rank_vote import all_said, leave_together


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rank_vote, "open_store", lambda name: dist.PrefixStore(name, store))
    return store


def test_all_ranks_have_the_same_answer(store):
    with ThreadPoolExecutor(3) as ranks:
        answers = [ranks.submit(all_said, said, "x", rank, 3, 20.0) for rank, said in enumerate(["a", "", "b"])]
        assert [each.result() for each in answers] == [["a", "", "b"]] * 3


def test_a_rank_that_does_not_take_part(store):
    assert all_said("a", "x", 0, 2, patience_s=0.01) is None
    assert all_said("a", "x", 1, 2, patience_s=0.01) is None  # it comes too late, and rank 0's word holds


def test_without_rank_0(store):
    assert all_said("a", "x", 1, 2, patience_s=0.01) is None


def test_one_rank_and_no_store(monkeypatch):
    assert all_said("a", "x", 0, 1) == ["a"]
    monkeypatch.setattr(rank_vote, "open_store", lambda name: None)
    assert all_said("a", "x", 0, 2) is None
    leave_together("x", 0, 1)
    leave_together("x", 0, 2)


def test_rank_0_leaves_first(store, monkeypatch):
    monkeypatch.setattr(rank_vote, "_LAST_S", 20.0)
    with ThreadPoolExecutor(2) as ranks:
        other = ranks.submit(leave_together, "x", 1, 2, 20.0)
        ranks.submit(leave_together, "x", 0, 2, 20.0).result()
        assert not other.done()
        dist.PrefixStore("x", store).set("has ended", "")
        other.result()


def test_nobody_waits_for_ever_to_leave(store):
    leave_together("x", 1, 3, patience_s=0.01)
    leave_together("x", 0, 3, patience_s=0.01)

"""What ranks decide together, with a store in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gpuopt.utils import rank_channel, rank_vote
from lightning_gpuopt.utils.rank_vote import NodeRanks, all_said, leave_together
from tests.helpers import Clock


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rank_channel, "open_store", lambda name: dist.PrefixStore(name, store))
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


def test_a_host_that_does_not_answer_is_asked_with_a_limit_alone(monkeypatch):
    class Stopped:
        def set(self, key, word):
            """It goes into the connection."""

        def wait(self, keys, limit):
            asked.append(limit.total_seconds())
            raise RuntimeError("wait timeout")

        def check(self, keys):
            asked.append("for ever")

    asked = []
    monkeypatch.setattr(rank_channel, "open_store", lambda name: Stopped())
    assert [all_said("a", "x", rank, 2, 3.0) for rank in (0, 1)] == [None, None]
    for rank in (0, 1):
        leave_together("x", rank, 2, 4.0)
    assert asked == [3.0, 6.0, 4.0, 8.0]


def test_one_rank_and_no_store(monkeypatch):
    assert all_said("a", "x", 0, 1) == ["a"]
    monkeypatch.setattr(rank_channel, "open_store", lambda name: None)
    assert all_said("a", "x", 0, 2) is None
    leave_together("x", 0, 1)
    leave_together("x", 0, 2)


def test_rank_0_leaves_first(store, monkeypatch):
    monkeypatch.setattr(rank_vote, "_LAST_S", 20.0)
    with ThreadPoolExecutor(2) as ranks:
        other = ranks.submit(leave_together, "x", 1, 2, 20.0)
        ranks.submit(leave_together, "x", 0, 2, 20.0).result()
        assert not other.done()
        dist.PrefixStore("x", store).set("has ended/0", "null")
        other.result()


def test_nobody_waits_for_ever_to_leave(store):
    leave_together("x", 1, 3, patience_s=0.01)
    leave_together("x", 0, 3, patience_s=0.01)


class Waits(Clock):
    """Time passes only while somebody waits; something happens then."""

    happens: Callable[[], Any]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waited, self.happens, self.monotonic = 0, lambda: None, self
        monkeypatch.setattr(rank_channel, "time", self)

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        self.waited += 1
        self.happens()
        return False

    def ranks(self, rank: int) -> NodeRanks:
        ranks: Any = NodeRanks("test", rank, [4, 5])
        ranks._closing = self
        return ranks  # type: ignore[no-any-return]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def test_all_ranks_of_a_node_get_the_largest_number(store, clock):
    assert NodeRanks("test", 0, [0]).most(4, 10.0) == 4  # alone
    second = clock.ranks(5)
    heard = []
    clock.happens = lambda: heard.append(second.most(6))
    assert clock.ranks(4).most(3, 10.0) == 6
    assert (heard, clock.waited) == ([6], 1)


def test_each_question_has_its_own_answers(store, clock):
    first, second = clock.ranks(4), clock.ranks(5)
    assert [first.most(8), second.most(2)] == [8, 8]
    assert [second.most(3), first.most(1)] == [3, 3]


def test_a_rank_that_never_comes_holds_up_nobody_for_longer_than_the_patience(store, clock):
    assert clock.ranks(4).most(3, 1.0) == 3
    assert clock.waited in (50, 51)


def test_a_store_that_goes_away_is_as_good_as_none(monkeypatch, clock):
    class Gone:
        def set(self, *args):
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(rank_channel, "open_store", lambda name: Gone())
    assert clock.ranks(4).most(3, 10.0) == 3
    assert clock.waited == 0

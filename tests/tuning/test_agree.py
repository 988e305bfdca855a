from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gpuopt.tuning import agree
from lightning_gpuopt.tuning.agree import NodeRanks
from tests.helpers import Clock


class Waits(Clock):
    """Time passes only while somebody sleeps; something happens then."""

    happens: Callable[[], Any]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.slept, self.happens, self.monotonic = 0, lambda: None, self
        monkeypatch.setattr(agree, "time", self)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept += 1
        self.happens()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def ranks(store: Any, rank: int) -> NodeRanks:
    return NodeRanks("test", rank, [4, 5], store=store)


def test_all_get_the_largest_number(clock: Waits) -> None:
    assert NodeRanks("test", 0, [0]).most(4, 10.0) == 4  # alone
    store = dist.HashStore()
    second = ranks(store, 5)
    heard: list[int] = []
    clock.happens = lambda: heard.append(second.most(6))
    assert ranks(store, 4).most(3, 10.0) == 6
    assert (heard, clock.slept) == ([6], 1)


def test_each_question_has_its_own_answers() -> None:
    store = dist.HashStore()
    first, second = ranks(store, 4), ranks(store, 5)
    assert [first.most(8), second.most(2)] == [8, 8]
    assert [second.most(3), first.most(1)] == [3, 3]


def test_a_rank_that_never_comes_holds_up_nobody_for_longer_than_the_patience(clock: Waits) -> None:
    assert ranks(dist.HashStore(), 4).most(3, 1.0) == 3
    assert clock.slept in (20, 21)


def test_a_store_that_goes_away_is_as_good_as_none() -> None:
    class Gone:
        def set(self, *args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    assert ranks(Gone(), 4).most(3, 10.0) == 3

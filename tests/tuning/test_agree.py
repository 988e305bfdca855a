from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_gpuopt.tuning.agree import NodeRanks
from tests.helpers import Clock


class Waits(Clock):
    """Time passes only while somebody sleeps; something happens then."""

    def __init__(self, happens: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.slept, self.happens = 0, happens

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept += 1
        self.happens()


def ranks(store: Any, rank: int, clock: Waits) -> NodeRanks:
    return NodeRanks("test", rank, [4, 5], store=store, clock=clock, sleep=clock.sleep)


def test_a_rank_alone_hears_itself() -> None:
    assert NodeRanks("test", 0, [0]).most(4, 10.0) == 4


def test_all_get_the_largest_number() -> None:
    store = dist.HashStore()
    second = ranks(store, 5, Waits())
    heard: list[int] = []
    clock = Waits(lambda: heard.append(second.most(6)))
    assert ranks(store, 4, clock).most(3, 10.0) == 6
    assert (heard, clock.slept) == ([6], 1)


def test_each_question_has_its_own_answers() -> None:
    store = dist.HashStore()
    first, second = (ranks(store, rank, Waits()) for rank in (4, 5))
    assert [first.most(8), second.most(2)] == [8, 8]
    assert [second.most(3), first.most(1)] == [3, 3]


def test_a_rank_that_never_comes_holds_up_nobody_for_longer_than_the_patience() -> None:
    clock = Waits()
    assert ranks(dist.HashStore(), 4, clock).most(3, 1.0) == 3
    assert clock.now_s - Waits().now_s >= 1.0
    assert clock.slept in (20, 21)


def test_a_store_that_goes_away_is_as_good_as_none() -> None:
    class Gone:
        def set(self, *args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    assert ranks(Gone(), 4, Waits()).most(3, 10.0) == 3

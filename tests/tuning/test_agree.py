from __future__ import annotations

import torch.distributed as dist

from lightning_gpuopt.tuning.agree import RankAgreement
from tests.helpers import Clock, wait_for


def news(agreement: RankAgreement, number: int) -> None:
    wait_for(lambda: agreement.news() == number)


def test_a_rank_alone_agrees_with_itself() -> None:
    agreement = RankAgreement("test", 0, [0])
    assert agreement.news() is None
    agreement.wish(4)
    assert agreement.news() == 4
    assert agreement.news() is None
    agreement.close()


def test_all_get_the_largest_of_the_last_wishes() -> None:
    store = dist.HashStore()
    first, second = (RankAgreement("test", rank, [4, 5], store=store) for rank in (4, 5))
    second.wish(6)
    news(first, 6)
    news(second, 6)
    first.wish(3)
    news(first, 6)
    news(second, 6)
    second.wish(2)
    news(second, 3)
    news(first, 3)
    first.close()
    second.close()


def test_a_rank_that_is_content_keeps_what_it_began_with() -> None:
    store = dist.HashStore()
    first, second = (RankAgreement("test", rank, [4, 5], 8, store=store) for rank in (4, 5))
    second.wish(6)
    news(second, 8)
    first.wish(5)
    news(first, 6)
    news(second, 6)
    first.close()
    second.close()


def test_a_rank_that_has_no_need_to_measure_holds_up_nobody() -> None:
    store = dist.HashStore()
    first, second = (RankAgreement("test", rank, [4, 5], store=store) for rank in (4, 5))
    waits: list[float] = []
    assert not second.meet(0.0, sleep=waits.append)
    assert first.meet(sleep=waits.append)
    assert waits == []
    first.close()
    second.close()


def test_without_an_answer_a_rank_goes_on_alone() -> None:
    clock = Clock()
    agreement = RankAgreement("test", 1, [0, 1], store=dist.HashStore(), clock=clock, patience_s=10.0)
    agreement.wish(3)
    wait_for(lambda: agreement._asked is not None)
    assert agreement.news() is None
    clock.now_s += 11
    news(agreement, 3)
    agreement.close()


def test_ranks_measure_side_by_side_but_wait_for_nobody_for_ever() -> None:
    store, clock, log = dist.HashStore(), Clock(), []
    first, second = (RankAgreement("test", rank, [4, 5], store=store, clock=clock, patience_s=10.0) for rank in (4, 5))

    def other_comes(seconds: float) -> None:
        log.append(second.meet(sleep=lambda _: log.append("waits")))

    assert first.meet(sleep=other_comes)
    assert log == [True]

    def time_goes_on(seconds: float) -> None:
        clock.now_s += 3

    began = clock.now_s
    assert not first.meet(sleep=time_goes_on)
    assert clock.now_s - began == 12
    assert RankAgreement("test", 0, [0]).meet()
    first.close()
    second.close()


class GoneStore:
    def set(self, key: str, value: str) -> None:
        raise ConnectionError("the process that hosted it is gone")


def test_when_the_store_is_gone_a_rank_goes_on_alone() -> None:
    agreement = RankAgreement("test", 1, [0, 1], store=GoneStore())
    agreement.wish(3)
    news(agreement, 3)
    agreement.wish(5)
    news(agreement, 5)
    assert not agreement.meet()
    agreement.close()

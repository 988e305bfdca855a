"""Whether a figure grows for good: points in, a rate or nothing out."""

from __future__ import annotations

import pytest

from lightning_gpuopt.diagnosis.steady_growth import SteadyGrowth, steady_growth


def test_a_line() -> None:
    assert steady_growth([(float(at), 5.0 * at) for at in range(31)]) == SteadyGrowth(5.0, 135.0, 1.0)


def test_the_rate_is_that_of_the_later_half() -> None:
    found = steady_growth([(float(at), 10.0 * min(at, 15) + 5.0 * max(at - 15, 0)) for at in range(31)])
    assert found is not None
    assert (found.rate, found.evenness) == (5.0, pytest.approx(0.55, abs=0.05))


def test_growth_under_saw_teeth_is_that_of_their_feet() -> None:
    found = steady_growth([(float(at), 2.0 * at + 30 * (at % 3)) for at in range(60)])
    assert found is not None
    assert found.rate == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    "figures",
    [
        [1.0 * at for at in range(6)],  # too few
        [5.0] * 30,
        [30.0 - at for at in range(30)],
        [20.0 * min(at, 18) + 0.1 * at for at in range(30)],  # comes to rest
        [100.0 * (at >= 15) + 1.0 * at for at in range(30)],  # one step makes up most
        [100.0 * (at >= 22) + 1.0 * at for at in range(30)],
        [40.0 * (at >= 8) + 40.0 * (at >= 15) + 40.0 * (at >= 22) for at in range(30)],
    ],
    ids=["few", "flat", "falls", "rests", "step", "late step", "steps"],
)
def test_what_does_not_grow_for_good(figures: list[float]) -> None:
    assert steady_growth([(float(at), each) for at, each in enumerate(figures)]) is None


def test_units_that_stand_still_give_no_rate() -> None:
    assert steady_growth([(1.0, float(at)) for at in range(30)]) is None

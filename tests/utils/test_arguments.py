"""What users pass to the callbacks is taken as meant, or refused in one form of words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_gpuopt.utils.arguments import choice, flag, real_number, whole_number


def batches(value: object) -> int:
    return whole_number("window_size", value, "a number of batches", least=1)


def share(value: object) -> float:
    return real_number("threshold", value, "a share of wall time", above=0, at_most=1)


def timeout(value: object) -> float:
    return real_number("hang_timeout", value, "seconds", above=0, or_none=True)


def interval(value: object) -> float:
    return real_number("sample_interval", value, "seconds", least=0.001)


def steps(value: object) -> int:
    return whole_number("log_every_n_steps", value, "a number of steps", least=0, or_none=True)


def on_stall(value: Any) -> Any:
    return choice("on_stall", value, ("warn", "raise", "ignore"))


def nvtx(value: object) -> bool:
    return flag("nvtx", value)


@pytest.mark.parametrize(
    ("check", "value", "taken"),
    [
        (batches, 1, 1),
        (batches, np.int64(50), 50),
        (batches, np.uint8(7), 7),
        (steps, 0, 0),
        (share, 1, 1.0),
        (share, np.float64(0.1), 0.1),
        (share, np.float32(0.5), 0.5),
        (timeout, np.int32(600), 600.0),
        (interval, 0.001, 0.001),
        (on_stall, "raise", "raise"),
        (nvtx, False, False),
        (nvtx, np.True_, True),
    ],
)
def test_a_good_value_comes_back_as_pythons_own(check: Callable[[Any], Any], value: object, taken: object) -> None:
    got = check(value)
    assert got == taken
    assert type(got) is type(taken)


@pytest.mark.parametrize(
    ("check", "value", "text"),
    [
        (batches, 0, "window_size: expected a number of batches, at least 1, got 0"),
        (steps, -1, "log_every_n_steps: expected a number of steps, at least 0, or None, got -1"),
        (share, 0, "threshold: expected a share of wall time above 0 and at most 1, got 0"),
        (share, 1.5, "threshold: expected a share of wall time above 0 and at most 1, got 1.5"),
        (share, math.nan, "threshold: expected a share of wall time above 0 and at most 1, got nan"),
        (timeout, 0, "hang_timeout: expected seconds above 0, or None, got 0"),
        (timeout, math.inf, "hang_timeout: expected seconds above 0, or None, got inf"),
        (timeout, 10**400, f"hang_timeout: expected seconds above 0, or None, got {10**400}"),
        (interval, 0.0009, "sample_interval: expected seconds, at least 0.001, got 0.0009"),
        (on_stall, "shout", "on_stall: expected one of 'warn', 'raise', 'ignore', got 'shout'"),
        (on_stall, None, "on_stall: expected one of 'warn', 'raise', 'ignore', got None"),
        (on_stall, np.zeros(2), "on_stall: expected one of 'warn', 'raise', 'ignore', got array([0., 0.])"),
    ],
)
def test_a_bad_value_is_refused_in_words(check: Callable[[Any], Any], value: object, text: str) -> None:
    with pytest.raises(ValueError, match="expected") as raised:
        check(value)
    assert str(raised.value) == text
    assert not isinstance(raised.value, TypeError)


@pytest.mark.parametrize("kind", [TypeError, ValueError])
@pytest.mark.parametrize(
    ("check", "value", "text"),
    [
        (batches, 2.5, "window_size: expected a number of batches, at least 1, got 2.5"),
        (batches, True, "window_size: expected a number of batches, at least 1, got True"),
        (batches, np.True_, f"window_size: expected a number of batches, at least 1, got {np.True_!r}"),
        (batches, None, "window_size: expected a number of batches, at least 1, got None"),
        (share, "0.1", "threshold: expected a share of wall time above 0 and at most 1, got '0.1'"),
        (share, True, "threshold: expected a share of wall time above 0 and at most 1, got True"),
        (share, np.True_, f"threshold: expected a share of wall time above 0 and at most 1, got {np.True_!r}"),
        (nvtx, 1, "nvtx: expected True or False, got 1"),
        (nvtx, "no", "nvtx: expected True or False, got 'no'"),
    ],
)
def test_a_wrong_type_is_a_type_error_and_a_value_error(
    check: Callable[[Any], Any], value: object, text: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as raised:
        check(value)
    assert str(raised.value) == text

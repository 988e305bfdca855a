"""What stands in front of a method leaves with it when that is copied."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.utils.replaced_method import Replacement, hide_us, identity


def original(first: int, *, second: int = 0) -> int:
    return first + second


def test_what_is_in_its_place_is_called() -> None:
    assert Replacement(original, lambda first, *, second: first * second)(3, second=4) == 12
    assert Replacement(original)(3, second=4) == 7


def test_a_subclass_may_say_what_that_is() -> None:
    class Twice(Replacement):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * self._original(*args, **kwargs)

    assert Twice(original)(3, second=4) == 14


def test_a_copy_is_the_original() -> None:
    ours = Replacement(original, lambda: 0)
    assert pickle.loads(pickle.dumps(ours)) is original
    assert copy.copy(ours) is original
    assert copy.deepcopy(SimpleNamespace(method=ours)).method is original


def test_a_replacement_of_a_replacement_is_still_the_original() -> None:
    assert pickle.loads(pickle.dumps(Replacement(Replacement(original), lambda: 0))) is original


def test_identity_gives_what_it_was_given() -> None:
    assert identity(original) is original


def fails() -> None:
    raise ValueError("here")


def functions_in(error: BaseException) -> list[str]:
    return [each.name for each in traceback.extract_tb(error.__traceback__)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception is raised again with all that was caught")
def test_it_is_in_no_traceback() -> None:
    with pytest.raises(ValueError, match="here") as raised:
        Replacement(Replacement(Replacement(fails)))()
    assert functions_in(raised.value)[1:] == ["fails"]


def test_of_what_has_passed_us_before_our_frames_are_taken_out_on_every_python() -> None:
    def caught() -> BaseException:
        try:
            Replacement(Replacement(fails))()
        except ValueError as error:
            hide_us(error)
            return error
        raise AssertionError

    assert functions_in(caught()) == ["caught", "fails"]


def test_an_error_of_our_own_keeps_its_frames() -> None:
    with pytest.raises(TypeError) as raised:
        Replacement(Replacement(len))()
    assert functions_in(raised.value)[1:] == ["__call__", "__call__"]

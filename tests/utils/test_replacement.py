"""What stands in front of a method leaves with it when that is copied."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

from lightning_gpuopt.utils.replacement import Replacement, identity


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

"""What the callbacks share: a failure of their own ends no training, and a copy is at rest."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from tests.helpers import tiny_trainer


class Watcher(CallbackBase):
    """Something is under way in it, and it counts how often it has left."""

    def __init__(self) -> None:
        self.threshold = 0.5
        self.under_way: Any = lambda: "cannot be pickled"
        self.left = 0

    def _at_rest(self) -> dict[str, Any]:
        return {"under_way": None}

    def _leave(self) -> None:
        self.left += 1


@pytest.fixture
def trainer(tmp_path: Any) -> Any:
    return tiny_trainer(tmp_path)


class TestGuard:
    def test_a_failure_is_reported_once_and_the_callback_disables_itself(self, trainer: Any) -> None:
        watcher = Watcher()
        said = "^Watcher disables itself, training continues: ValueError: ours$"
        with pytest.warns(UserWarning, match=said), Guard(watcher, trainer):
            raise ValueError("ours")
        with warnings.catch_warnings(), Guard(watcher, trainer):
            warnings.simplefilter("error")
            raise ValueError("ours again")
        assert watcher.left == 2

    def test_where_nothing_fails_nothing_happens(self, trainer: Any) -> None:
        watcher = Watcher()
        with warnings.catch_warnings(), Guard(watcher, trainer):
            warnings.simplefilter("error")
        assert watcher.left == 0

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_what_is_no_exception_of_a_program_passes(self, trainer: Any, error: type[BaseException]) -> None:
        watcher = Watcher()
        with pytest.raises(error), Guard(watcher, trainer):
            raise error
        assert watcher.left == 0

    def test_a_worker_that_was_killed_ends_training_wherever_torch_says_so(self, trainer: Any) -> None:
        watcher = Watcher()
        message = "DataLoader worker (pid 12) is killed by signal: Killed."
        with pytest.raises(RuntimeError, match="is killed"), Guard(watcher, trainer):
            raise RuntimeError(message)
        assert watcher.left == 0

    def test_what_a_callback_calls_the_users_own_passes(self, trainer: Any) -> None:
        class Raises(Watcher):
            def _is_user_error(self, error: Exception) -> bool:
                return isinstance(error, LookupError)

        watcher = Raises()
        with pytest.raises(KeyError), Guard(watcher, trainer):
            raise KeyError("asked for")
        with pytest.warns(UserWarning, match="Raises disables itself"), Guard(watcher, trainer):
            raise ValueError
        assert watcher.left == 1


def test_a_copy_is_at_rest_and_without_what_lightning_gives_it() -> None:
    watcher: Any = Watcher()
    watcher.log = watcher.log_dict = lambda: None
    for twin in (copy.copy(watcher), copy.deepcopy(watcher), pickle.loads(pickle.dumps(watcher))):
        assert vars(twin) == {"threshold": 0.5, "under_way": None, "left": 0}
    assert watcher.under_way() == "cannot be pickled"


def test_by_itself_it_has_nothing_to_leave() -> None:
    CallbackBase()._leave()
    assert CallbackBase().__getstate__() == {}

"""Ranks that are started for a test: what comes back, and that none is left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import join, run_ranks

HERE = "tests.test_ranks"


def where_am_i(greeting: str) -> dict[str, Any]:
    rank, world_size = join()
    print("something else on stdout")
    return {"greeting": greeting, "rank": rank, "of": world_size, "own": os.environ.get("OWN")}


def note_and(folder: str, first: str, second: str) -> int:
    """Note this process, and end as this rank is told: ``returns``, ``raises``, ``dies`` or ``stays``."""
    rank = int(os.environ["RANK"])
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    how = (first, second)[rank]
    if how == "raises":
        raise OSError("the disk is gone")
    if how == "dies":
        os._exit(0)
    if how == "stays":
        print("waits for ever", file=sys.stderr, flush=True)
        time.sleep(600)
    return rank


def are_gone(folder: Path) -> bool:
    return not any(psutil.pid_exists(int(path.read_text())) for path in folder.iterdir())


def test_each_rank_gets_the_arguments_and_gives_back_its_result() -> None:
    env = {**os.environ, "OWN": "one more"}
    assert run_ranks(f"{HERE}:where_am_i", 2, env=env, greeting="hello") == [
        {"greeting": "hello", "rank": rank, "of": 2, "own": "one more"} for rank in range(2)
    ]


def test_one_that_ends_before_has_no_result(tmp_path: Path) -> None:
    assert run_ranks(f"{HERE}:note_and", 2, folder=str(tmp_path), first="dies", second="returns") == [None, 1]


@pytest.mark.timed
def test_one_that_fails_ends_them_all_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] of .* failed.*OSError: the disk is gone"):
        run_ranks(f"{HERE}:note_and", 2, folder=str(tmp_path), first="stays", second="raises")
    assert time.monotonic() - begun < 60
    assert are_gone(tmp_path)


def test_one_that_may_fail_leaves_the_others_alone(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "first": "raises", "second": "returns"}
    assert run_ranks(f"{HERE}:note_and", 2, may_fail=True, **arguments) == [None, 1]


@pytest.mark.timed
def test_after_the_time_limit_all_are_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] of .* still ran after 5 s"):
        run_ranks(f"{HERE}:note_and", 2, timeout_s=5, folder=str(tmp_path), first="stays", second="returns")
    assert are_gone(tmp_path)

"""Events of a ring without what is of a wrong type."""

from __future__ import annotations

import math

import pytest

from lightning_gpuopt.postmortem.events import checked
from tests.postmortem.judged_runs import NOW, rank

WHOLE = {
    "t": NOW,
    "event": "exception",
    "type": "ValueError",
    "message": "x",
    "frames": ["f (a.py:1)"],
    "index": "a.jpg",
    "pid": 7,
    "batches": {"0": 5, "1": None},
}


def test_whole_events_stay():
    assert checked(rank(events=[WHOLE, WHOLE | {"batches": [5, 6], "index": 4}])).events == (
        WHOLE,
        WHOLE | {"batches": [5, 6], "index": 4},
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("type", 5), ("frames", "x"), ("index", [1]), ("pid", "7"), ("pid", True), ("batches", {"a": 1}), ("batches", 3)],
)
def test_what_is_of_a_wrong_type_is_left_out(name, value):
    expected = {key: each for key, each in WHOLE.items() if key != name}
    assert checked(rank(events=[WHOLE | {name: value}])).events == (expected,)


@pytest.mark.parametrize("event", ["x", {"event": "exception"}, WHOLE | {"t": "now"}, WHOLE | {"t": math.nan}])
def test_an_event_without_a_time_is_left_out(event):
    assert checked(rank(events=[event, WHOLE])).events == (WHOLE,)

"""Figures, times and processes in words."""

from __future__ import annotations

import pytest

from lightning_gpuopt.postmortem.record import Process
from lightning_gpuopt.postmortem.wording import clock, first_line, key, name_of, ranks, signal_name, size, span


@pytest.mark.parametrize(
    ("given", "said"),
    [(5, "5 bytes"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (1.9 * 2**30, "1.9 GiB"), (2**60, "1,024 PiB")],
)
def test_sizes(given, said):
    assert size(given) == said


@pytest.mark.parametrize(("given", "said"), [(45, "45 s"), (120, "2 min"), (720, "12 min"), (9000, "2.5 h")])
def test_spans(given, said):
    assert span(given) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([5], "rank 5"),
        ([0, 1, 2, 3, 4, 6, 7], "ranks 0-4 and 6-7"),
        ([4, 0, 2], "ranks 0, 2 and 4"),
        ([1, 1], "rank 1"),
    ],
)
def test_ranks(given, said):
    assert ranks(given) == said


@pytest.mark.parametrize(
    ("process", "of", "said"),
    [
        (Process(0, None, 7), 1, "the training process (pid 7)"),
        (Process(1), 2, "rank 1"),
        (Process(0, 3, 7), 1, "worker 3 (pid 7)"),
        (Process(1, 3, 7), 2, "worker 3 of rank 1 (pid 7)"),
        (Process(1, -1, 7), 2, "a worker of rank 1 (pid 7)"),
        (Process(0, -1), 1, "a worker"),
    ],
)
def test_names(process, of, said):
    assert name_of(process, of) == said


def test_what_is_odd():
    assert (signal_name(9), signal_name(99)) == ("SIGKILL", "signal 99")
    assert [clock(each) for each in (float("nan"), float("inf"), 1e30)] == ["an unknown time"] * 3
    assert (key(48_213), key("a/b.jpg")) == ("48,213", "a/b.jpg")
    assert first_line("\n  a\t b \nc") == "a b"
    assert first_line("") == ""
    assert first_line("x" * 300, 10) == "xxxxxx ..."

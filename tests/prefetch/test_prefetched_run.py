"""One run of a Trainer with prefetching: when it may begin."""

from __future__ import annotations

from pathlib import Path

from lightning_gpuopt.prefetch.prefetched_run import PrefetchedRun
from tests.helpers import TinyModel, tiny_trainer


def test_why_nothing_is_prefetched_yet_or_any_more(tmp_path: Path) -> None:
    run = PrefetchedRun(tiny_trainer(tmp_path), TinyModel(), 1, asleep=True)
    assert run.why_not == "no epoch has begun"
    run.disable("it is a test")
    assert run.why_not == "it has disabled itself"

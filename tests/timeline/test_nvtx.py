"""Ranges for Nsight."""

from __future__ import annotations

import threading

from lightning_gpuopt.timeline.phases import Timeline


class Ranges:
    """Keeps what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self.range_push = calls.append
        self.range_pop = lambda: calls.append("/")


def test_phases_are_ranges_in_order_and_in_balance() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls), callback_names={"Slow": "Slow"})
    timeline.start()
    with timeline.span("run_training_epoch"):
        timeline.span("[_TrainingEpochLoop].train_dataloader_next").__enter__()
        timeline.span("[_TrainingEpochLoop].train_dataloader_next").__exit__(None, None, None)
        with timeline.span("[Strategy]S.optimizer_step"), timeline.span("[Strategy]S.backward"):
            pass
        with timeline.span("[Callback]Slow.on_train_batch_end"):
            pass
    assert calls == [
        "epoch_setup",
        "first_fetch",
        "/",
        "/",  # with the first batch the set-up is over
        "other",
        "optimizer",
        "backward",
        "/",
        "/",
        "Slow.on_train_batch_end",
        "/",
        "/",
    ]


def test_ranges_still_open_are_closed_at_the_end() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls))
    timeline.start()
    with timeline.span("run_training_batch"), timeline.span("[Strategy]S.backward"):
        timeline.stop()
    assert calls == ["other", "backward", "/", "/"]


def test_another_thread_that_ends_the_run_closes_no_ranges_of_its_own() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls))
    timeline.start()
    timeline.span("run_training_batch").__enter__()
    other = threading.Thread(target=timeline.stop)
    other.start()
    other.join()
    assert calls == ["other"]

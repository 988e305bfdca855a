"""Pauses between epochs are taken apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.causes.epoch import Pause, pause_of
from lightning_gpuopt.diagnosis.diagnose import diagnose, remarks
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.loader_description import LoaderDescription, LoaderKind
from lightning_gpuopt.measurements.loading import LoaderFacts, WorkerTimes
from lightning_gpuopt.measurements.phases import PhaseTimes
from tests.diagnosis.numbers import IN_PROCESS, times, workers

RESTARTED = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
KEPT = replace(RESTARTED, persistent_workers=True)


def phases(setup_s: float, first_fetch_s: float, epochs: int = 4, **others: float) -> PhaseTimes:
    return replace(times(epochs=epochs, epoch_setup=setup_s, **others), first_fetch_s=first_fetch_s)


def measured(loader: LoaderFacts, setup_s: float, first_fetch_s: float, batch_s: float, **others: float) -> Measurement:
    return Measurement(phases(setup_s, first_fetch_s, **others), loader, workers=workers(data_s=batch_s))


@pytest.mark.parametrize(
    ("iterable", "setup_s", "first_fetch_s", "batch_s", "pause"),
    [
        # a batch takes 0.1 s: what the first fetch waits beyond that is the workers' start
        (None, 4.0, 3.0, 0.1, Pause(0.9, 0.1, 0.0)),
        (None, 4.0, 3.0, 0.75, Pause(0.25, 0.75, 0.0)),
        (None, 4.0, 3.0, 9.0, Pause(0.25, 0.75, 0.0)),
        # an iterable dataset fills its buffer before its first sample
        (True, 4.0, 3.0, 0.1, Pause(0.25, 0.1, 0.65)),
    ],
)
def test_the_parts_of_a_pause(
    iterable: bool | None, setup_s: float, first_fetch_s: float, batch_s: float, pause: Pause
) -> None:
    found = pause_of(measured(replace(RESTARTED, duplicates=iterable), setup_s, first_fetch_s, batch_s))
    assert found is not None
    assert (found.workers, found.first_batch, found.buffer) == pytest.approx(
        (pause.workers, pause.first_batch, pause.buffer)
    )


def test_without_epochs_there_is_no_pause() -> None:
    assert pause_of(Measurement(phases(4.0, 3.0, epochs=0), RESTARTED)) is None
    assert pause_of(Measurement(phases(0.0, 0.0), RESTARTED)) is None


def test_a_restart_says_what_takes_the_time_and_what_else_is_done_between_epochs() -> None:
    run = measured(RESTARTED, 4.0, 3.0, 0.1, checkpoint=0.8, validation=0.4)
    run = replace(run, times=replace(run.times, validation_setup_s=0.2))
    (finding,) = diagnose(run, 0.1)
    assert (finding.cause, finding.settings) == ("epoch_restart", {"persistent_workers": True})
    assert finding.evidence == {
        "epoch_setup_s_per_epoch": 1.0,
        "epochs": 4,
        "largest_part": "starting workers",
        "num_workers": 2,
        "starting_workers_s_per_epoch": 0.9,
        "first_batch_s_per_epoch": 0.1,
        "checkpoint_s_per_epoch": 0.2,
        "validation_s_per_epoch": 0.1,
        "validation_setup_s_per_epoch": 0.05,
    }


@pytest.mark.parametrize(("setup_s", "told"), [(1.5, True), (0.5, False)])
def test_a_validation_whose_setup_takes_most_of_it_is_told_so(setup_s: float, told: bool) -> None:
    run = Measurement(replace(phases(0.0, 0.0, validation=2.0), validation_setup_s=setup_s), KEPT)
    (finding,) = diagnose(run, 0.1)
    assert finding.evidence == {"validation_s": 2.0, "validation_setup_s": setup_s}
    assert ("keep the workers of the validation loader" in finding.advice) is told


def test_where_the_first_batch_is_most_of_it_longer_epochs_are_advised_as_well() -> None:
    (finding,) = diagnose(measured(RESTARTED, 4.0, 3.0, 0.75), 0.1)
    assert finding.evidence["largest_part"] == "the first batch"
    assert "fewer, longer epochs" in finding.advice


def of_kind(kind: LoaderKind) -> LoaderDescription:
    return LoaderDescription(kind)


@pytest.mark.parametrize(
    ("kind", "part", "remedy"),
    [
        ("webdataset", "filling a shuffle buffer", "a smaller buffer fills faster"),
        ("torch", "filling a buffer or reading an index", "read an index once, in __init__"),
        ("iterable", "filling a buffer or reading an index", "read an index once, in __init__"),
        ("mds", "opening the stream's first shards", "keep them on a local disk"),
    ],
)
@pytest.mark.parametrize("loader", [RESTARTED, KEPT, IN_PROCESS])
def test_what_a_stream_does_before_its_first_sample_is_a_finding(
    loader: LoaderFacts, kind: LoaderKind, part: str, remedy: str
) -> None:
    run = measured(replace(loader, duplicates=True), 4.0, 3.8, 0.1)
    (finding,) = diagnose(replace(run, source=of_kind(kind)), 0.1)
    # of a class of one's own it is not known what is done: workers that are spawned import then
    settings = {"persistent_workers": True} if loader == RESTARTED and part != "filling a shuffle buffer" else {}
    assert (finding.cause, finding.settings, finding.evidence["largest_part"]) == ("epoch_restart", settings, part)
    assert finding.evidence["shuffle_buffer_s_per_epoch"] == 0.85
    assert remedy in finding.advice


def test_an_iterable_of_ones_own_has_no_workers_to_keep() -> None:
    run = Measurement(phases(4.0, 3.9, data_wait=0.5), LoaderFacts(), source=of_kind("iterable"))
    (finding,) = diagnose(run, 0.1)
    assert (finding.cause, finding.evidence["num_workers"]) == ("epoch_restart", 0)
    # a batch takes 5 ms: what the first takes beyond that is its index
    assert finding.evidence["shuffle_buffer_s_per_epoch"] == pytest.approx((3.9 - 4 * 0.005) / 4)


def test_the_first_batch_of_workers_that_live_on_is_a_finding() -> None:
    (finding,) = diagnose(measured(KEPT, 4.0, 3.92, 2.0), 0.1)
    assert (finding.cause, finding.settings, finding.evidence["largest_part"]) == (
        "epoch_restart",
        {},
        "the first batch",
    )
    assert "Training waits for the first batch of each epoch" in finding.advice


@pytest.mark.parametrize("timed", [True, False])
def test_the_first_batch_of_the_training_process_is_loading(timed: bool) -> None:
    run = measured(IN_PROCESS, 4.0, 3.92, 2.0)
    run = replace(run, times=replace(run.times, epochs=50, steps=100), workers=run.workers if timed else WorkerTimes())
    assert diagnose(replace(run, times=replace(run.times, epochs=0)), 0.1) == []
    (finding,) = diagnose(replace(run, times=replace(run.times, steps=50)), 0.1)  # each epoch is one batch
    assert (finding.cause, finding.share) == ("main_process_loading", pytest.approx(0.392))


def test_short_epochs_that_the_training_process_loads_are_loading() -> None:
    run = Measurement(phases(2.0, 2.0, epochs=20, data_wait=2.0), IN_PROCESS)
    run = replace(run, times=replace(run.times, steps=40))  # 0.1 s a batch
    (finding,) = diagnose(run, 0.05)
    assert (finding.cause, finding.share) == ("main_process_loading", pytest.approx(0.4))


def test_the_first_batch_of_a_loader_with_threads_of_its_own() -> None:
    source = LoaderDescription("nodes", work="threads")
    (finding,) = diagnose(Measurement(phases(2.0, 2.0, epochs=20), LoaderFacts(), source=source), 0.1)
    assert (finding.cause, finding.evidence["largest_part"]) == ("epoch_restart", "the first batch")


def test_a_sampler_that_is_slow_to_begin_is_a_finding() -> None:
    for loader in (IN_PROCESS, KEPT):
        (finding,) = diagnose(measured(loader, 4.0, 0.2, 0.01), 0.1)
        assert finding.evidence["largest_part"] == "making the loader's iterator"
        assert "sampler" in finding.advice


def test_a_short_pause_is_no_finding() -> None:
    assert diagnose(measured(KEPT, 0.9, 0.8, 0.1), 0.1) == []


@pytest.mark.parametrize("copies", [True, False])
def test_saving_in_the_background_is_advised_where_lightning_copies_the_tensors(copies: bool) -> None:
    run = replace(measured(KEPT, 0.0, 0.0, 0.01, checkpoint=3.0), async_saves_copy=copies)
    (finding,) = diagnose(run, 0.1)
    assert ("Or save in the background (AsyncCheckpointIO)." in finding.advice) is copies
    assert ("upgrade Lightning first" in finding.advice) is not copies


def test_data_in_the_hyperparameters_is_named_where_checkpoints_are() -> None:
    run = replace(measured(KEPT, 0.0, 0.0, 0.01, checkpoint=3.0), hyperparameters=("dataset (Photos)",))
    (finding,) = diagnose(run, 0.1)
    assert (finding.cause, finding.evidence["hyperparameters"]) == ("checkpoint", "dataset (Photos)")
    assert "save_hyperparameters(ignore=['dataset'])" in finding.advice
    assert any("save_hyperparameters() keeps dataset (Photos)" in note for note in remarks(run, 0.1))


def test_workers_that_start_again_every_epoch() -> None:
    (finding,) = diagnose(Measurement(times(epoch_setup=4, epochs=8), RESTARTED), 0.1)
    assert (finding.cause, finding.share, finding.settings) == ("epoch_restart", 0.4, {"persistent_workers": True})
    assert finding.evidence == {
        "epoch_setup_s_per_epoch": 0.5,
        "epochs": 8,
        "largest_part": "starting workers",
        "num_workers": 2,
        "starting_workers_s_per_epoch": 0.5,
    }


def test_no_pause_before_a_second_epoch() -> None:
    assert diagnose(Measurement(times(epoch_setup=4, epochs=0), RESTARTED), 0.1) == []

"""Pauses between epochs are taken apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.causes.epoch import Pause, pause_note, pause_of, restart
from lightning_gpuopt.diagnosis.diagnose import diagnose, remarks
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PhaseTimes
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, times, workers

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
    assert found.largest == pause.largest


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


def test_a_shuffle_buffer_is_no_restart_and_has_a_note() -> None:
    run = measured(replace(RESTARTED, duplicates=True), 4.0, 3.8, 0.1)
    assert diagnose(run, 0.1) == []
    assert pause_note(run, 0.1) == (
        "38% of the time goes to the beginning of epochs, most of it to filling a shuffle buffer (0.85 s an epoch). "
        "A smaller buffer fills faster."
    )


def test_workers_that_live_on_have_a_note_of_what_takes_the_time() -> None:
    run = measured(KEPT, 4.0, 3.92, 2.0)
    assert list(restart(run)) == []
    assert pause_note(run, 0.1) == (
        "40% of the time goes to the beginning of epochs, most of it to the first batch (0.98 s an epoch). "
        "Fewer, longer epochs make it rarer."
    )


def test_a_short_pause_has_no_note() -> None:
    assert pause_note(measured(KEPT, 0.9, 0.8, 0.1), 0.1) is None
    assert pause_note(measured(RESTARTED, 4.0, 3.0, 0.1), 0.1) is None


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
        "starting_workers_s_per_epoch": 0.5,
        "first_batch_s_per_epoch": 0.0,
    }


@pytest.mark.parametrize(("loader", "epochs"), [(TWO_WORKERS, 8), (IN_PROCESS, 8), (RESTARTED, 0)])
def test_no_restart_where_workers_persist_or_are_none_or_before_a_second_epoch(
    loader: LoaderFacts, epochs: int
) -> None:
    assert diagnose(Measurement(times(epoch_setup=4, epochs=epochs), loader), 0.1) == []

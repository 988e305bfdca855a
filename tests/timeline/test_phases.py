"""The timeline books every nanosecond once, to the innermost open action."""

from __future__ import annotations

import threading

import pytest

from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes
from lightning_gpuopt.timeline.actions import phase_of
from lightning_gpuopt.timeline.phases import Timeline


class Clock:
    """Nanoseconds that pass when told."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    timeline = Timeline(
        clock_ns=clock,
        checkpoint_callbacks=["ModelCheckpoint{'monitor': 'a.b'}"],
        callback_names={"Slow": "Slow", "ModelCheckpoint{'monitor': 'a.b'}": "ModelCheckpoint"},
    )
    timeline.start()
    return timeline


def spent(timeline: Timeline) -> dict[str, float]:
    return {name: round(seconds, 9) for name, seconds in timeline.times().phases.items() if seconds}


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[Strategy]SingleDeviceStrategy.batch_to_device", "transfer"),
        ("[LightningModule]M.on_after_batch_transfer", "transfer"),
        ("[LightningDataModule]D.transfer_batch_to_device", "transfer"),
        ("[Strategy]DDPStrategy.training_step", "forward"),
        ("[Strategy]DDPStrategy.backward", "backward"),
        ("[LightningModule]M.backward", "backward"),
        ("[LightningModule]M.on_after_backward", "backward"),
        ("[Strategy]DDPStrategy.optimizer_step", "optimizer"),
        ("[LightningModule]M.optimizer_step", "optimizer"),
        ("[LightningModule]M.configure_gradient_clipping", "optimizer"),
        ("[LightningModule]M.lr_scheduler_step", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("[Callback]EarlyStopping{'monitor': 'val.loss'}.on_validation_end", "callbacks"),
        ("[_EvaluationLoop].val_next", "validation"),
        ("[Strategy]DDPStrategy.validation_step", "validation"),
        ("[LightningModule]M.on_validation_epoch_end", "validation"),
        ("[LightningModule]M.val_dataloader", "validation"),
        ("[LightningModule]M.train_dataloader", "epoch_setup"),
        ("save_checkpoint", "checkpoint"),
        ("[LightningModule]M.on_save_checkpoint", "checkpoint"),
        ("run_training_epoch", "other"),
        ("run_training_batch", "other"),
        ("[LightningModule]M.on_train_batch_end", "callbacks"),
        ("[LightningModule]M.configure_optimizers", "other"),
        ("my_own_action", None),
    ],
)
def test_lightnings_actions_belong_to_phases(action: str, phase: str | None) -> None:
    assert phase_of(action) == phase


def test_an_action_inside_another_takes_its_own_time_only(timeline: Timeline, clock: Clock) -> None:
    with timeline.span("run_training_batch"):
        clock.advance(1)
        with timeline.span("[Strategy]S.optimizer_step"):
            clock.advance(2)
            with timeline.span("[Strategy]S.training_step"):
                clock.advance(3)
            with timeline.span("[Strategy]S.backward"):
                clock.advance(4)
            clock.advance(5)
        clock.advance(6)
    assert spent(timeline) == {"other": 7.0, "optimizer": 7.0, "forward": 3.0, "backward": 4.0}


def test_every_phase_is_there_and_they_sum_to_the_wall_time(timeline: Timeline, clock: Clock) -> None:
    clock.advance(0.5)
    with timeline.span("[Strategy]S.training_step"):
        clock.advance(0.25)
    clock.advance(0.125)
    times = timeline.times()
    assert tuple(times.phases) == PHASES
    assert times.wall_s == sum(times.phases.values()) == 0.875


def test_time_of_an_unknown_action_stays_with_the_action_around_it(timeline: Timeline, clock: Clock) -> None:
    with timeline.span("[Strategy]S.training_step"), timeline.span("attention"):
        clock.advance(3)
    assert spent(timeline) == {"forward": 3.0}


@pytest.mark.parametrize(
    ("around", "hook", "phase"),
    [
        ("[Strategy]S.batch_to_device", "[LightningDataModule]D.transfer_batch_to_device", "transfer"),
        ("[LightningModule]M.optimizer_step", "[LightningModule]M.optimizer_zero_grad", "optimizer"),
        ("[LightningModule]M.optimizer_step", "[LightningModule]M.configure_gradient_clipping", "optimizer"),
    ],
)
def test_a_hook_inside_an_action_of_its_phase_is_timed_with_it(
    timeline: Timeline, clock: Clock, around: str, hook: str, phase: str
) -> None:
    with timeline.span(around):
        with timeline.span(hook):
            clock.advance(3)
            assert not hasattr(timeline.span(hook), "slot")
        clock.advance(2)
    assert spent(timeline) == {phase: 5.0}


def test_a_callbacks_time_is_kept_by_name_and_hook(timeline: Timeline, clock: Clock) -> None:
    for hook, seconds in (("on_train_batch_start", 1), ("on_train_batch_end", 2), ("on_train_batch_end", 3)):
        with timeline.span(f"[Callback]Slow.{hook}"):
            clock.advance(seconds)
    assert timeline.times().callbacks == {"Slow.on_train_batch_start": 1.0, "Slow.on_train_batch_end": 5.0}


def test_a_checkpoint_callbacks_hooks_are_checkpointing(timeline: Timeline, clock: Clock) -> None:
    with timeline.span("[Callback]ModelCheckpoint{'monitor': 'a.b'}.on_train_batch_end"):
        clock.advance(1)
        with timeline.span("save_checkpoint"):
            clock.advance(2)
    assert spent(timeline) == {"checkpoint": 3.0}
    assert timeline.times().callbacks == {}


def run_epoch(timeline: Timeline, clock: Clock, fetches: list[float]) -> None:
    with timeline.span("run_training_epoch"):
        clock.advance(10)  # the workers start
        for seconds in fetches:
            with timeline.span("[_TrainingEpochLoop].train_dataloader_next"):
                clock.advance(seconds)
            clock.advance(0.5)
            timeline.step_done()


def test_the_start_of_workers_and_the_first_batch_are_set_up_of_the_epoch(timeline: Timeline, clock: Clock) -> None:
    run_epoch(timeline, clock, [20, 1, 1])
    assert spent(timeline) == {"epoch_setup": 30.0, "data_wait": 2.0, "other": 1.5}
    run_epoch(timeline, clock, [40, 1])
    assert spent(timeline) == {"epoch_setup": 80.0, "data_wait": 3.0, "other": 2.5}
    assert (timeline.times().epochs, timeline.times().steps) == (2, 5)


def test_a_fetch_from_inside_the_step_does_not_take_the_steps_time_along(timeline: Timeline, clock: Clock) -> None:
    with timeline.span("run_training_epoch"), timeline.span("[Strategy]S.training_step"):
        clock.advance(1)
        with timeline.span("[_TrainingEpochLoop].train_dataloader_next"):
            clock.advance(2)
        clock.advance(4)
    assert spent(timeline) == {"forward": 5.0, "epoch_setup": 2.0}


def test_inside_validation_all_but_callbacks_and_checkpoints_is_validation(timeline: Timeline, clock: Clock) -> None:
    def run() -> str:
        clock.advance(1)
        for action in (
            "[_EvaluationLoop].val_next",
            "[Strategy]S.batch_to_device",
            "[LightningModule]M.on_before_batch_transfer",
            "[Callback]Slow.on_validation_end",
            "save_checkpoint",
        ):
            with timeline.span(action):
                clock.advance(1)
        return "done"

    with timeline.span("[Strategy]S.batch_to_device"):
        clock.advance(7)
    assert timeline.validating(run)() == "done"
    with timeline.span("[Strategy]S.batch_to_device"):
        clock.advance(7)
    assert spent(timeline) == {"validation": 4.0, "callbacks": 1.0, "checkpoint": 1.0, "transfer": 14.0}


def test_the_set_up_of_a_validation_goes_to_its_first_batch(timeline: Timeline, clock: Clock) -> None:
    def run() -> None:
        clock.advance(3)  # workers start
        for seconds in (2, 1):
            with timeline.span("[_EvaluationLoop].val_next"):
                clock.advance(seconds)
            clock.advance(4)

    timeline.validating(run)()
    with timeline.span("[_EvaluationLoop].val_next"):  # somebody else's
        clock.advance(9)
    timeline.validating(run)()
    assert timeline.times().validation_setup_s == 10.0


def test_a_validation_that_fails_leaves_the_books_straight(timeline: Timeline, clock: Clock) -> None:
    def run() -> None:
        clock.advance(1)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        timeline.validating(run)()
    with timeline.span("[Strategy]S.batch_to_device"):
        clock.advance(2)
    assert spent(timeline) == {"validation": 1.0, "transfer": 2.0}


def test_a_wrapped_function_is_booked_and_returns_its_value(timeline: Timeline, clock: Clock) -> None:
    def log_metrics(value: int, *, step: int) -> tuple[int, int]:
        clock.advance(2)
        return value, step

    assert timeline.timed(log_metrics, "logging")(1, step=2) == (1, 2)
    assert spent(timeline) == {"logging": 2.0}


def test_other_threads_are_not_booked(timeline: Timeline, clock: Clock) -> None:
    def elsewhere() -> None:
        with timeline.span("[Strategy]S.training_step"):
            clock.advance(5)
        timeline.timed(lambda: clock.advance(5), "logging")()
        timeline.validating(lambda: clock.advance(5))()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert spent(timeline) == {"epoch_setup": 15.0}


def test_nothing_is_booked_before_start_and_after_stop(clock: Clock) -> None:
    timeline = Timeline(clock_ns=clock)
    around = timeline.span("[Callback]Slow.on_train_start")
    with around:
        clock.advance(5)
        timeline.start()
        clock.advance(1)
    with timeline.span("[Strategy]S.training_step"):
        clock.advance(2)
        timeline.stop()
        clock.advance(5)
    timeline.stop()
    assert spent(timeline) == {"epoch_setup": 1.0, "forward": 2.0}
    assert timeline.times().wall_s == 3.0


def test_an_exception_closes_what_it_leaves(timeline: Timeline, clock: Clock) -> None:
    def step() -> None:
        with timeline.span("run_training_batch"), timeline.span("[Strategy]S.backward"):
            clock.advance(1)
            raise KeyError

    with pytest.raises(KeyError):
        step()
    clock.advance(2)
    assert spent(timeline) == {"backward": 1.0, "epoch_setup": 2.0}


def test_a_reading_in_mid_action_counts_it_until_now(timeline: Timeline, clock: Clock) -> None:
    with timeline.span("[Callback]Slow.on_train_batch_end"):
        clock.advance(3)
        assert spent(timeline) == {"callbacks": 3.0}
        clock.advance(1)
    assert spent(timeline) == {"callbacks": 4.0}


def test_endless_new_action_names_do_not_fill_the_memory(timeline: Timeline) -> None:
    for number in range(10_000):
        with timeline.span(f"step {number}"):
            pass
    assert timeline._spans == {}
    for number in range(10_000):
        with timeline.span(f"[Callback]Odd.hook_{number}"):
            pass
    assert len(timeline._spans) <= 4096
    assert len(timeline.snapshot()) <= 4096


def test_a_step_is_counted_without_validation_checkpoints_and_set_up() -> None:
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": 2.0, "validation": 3.0, "checkpoint": 1.0, "epoch_setup": 4.0}
    assert PhaseTimes(10.0, 4, phases, {}, 1).step_s == 0.5
    assert PhaseTimes(10.0, 0, phases, {}, 1).step_s is None


def test_readings_subtract_and_add() -> None:
    early = PhaseTimes(1.0, 2, dict.fromkeys(PHASES, 0.0) | {"forward": 1.0}, {"A.x": 0.5}, 1)
    late = PhaseTimes(4.0, 5, dict.fromkeys(PHASES, 0.0) | {"forward": 4.0}, {"A.x": 1.5, "B.y": 1.0}, 2)
    between = late - early
    assert (between.wall_s, between.steps, between.epochs) == (3.0, 3, 1)
    assert between.phases["forward"] == 3.0
    assert between.callbacks == {"A.x": 1.0, "B.y": 1.0}
    assert early + between == late

"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import one_thread  # noqa: F401 (before what imports torch)
from tests.nvml_simulator import Simulator, build
from tests.scheduling import Groups
from tests.simulated_time import SimulatedTime

LANES = ("example", "matrix", "gpu")

TIMED = (
    "tests/callbacks/test_auto_fix.py::TestInARealRun",
    "tests/callbacks/test_auto_fix.py::test_rank_0_decides_and_all_apply",
    "tests/callbacks/test_cuda_prefetcher_gpu.py::TestTheCopy::test_is_hidden_",
    "tests/callbacks/test_cuda_prefetcher_limits.py::TestSeveralRanks",
    "tests/callbacks/test_gpu_util_monitor_ddp.py",
    "tests/callbacks/test_lines.py",
    "tests/callbacks/test_stall_detector_ddp.py",
    "tests/callbacks/test_stall_detector_gpu.py::TestRanks",
    "tests/callbacks/test_stall_detector_gpu.py::TestVerdicts::test_a_slow_loader",
    "tests/callbacks/test_stall_detector_gpu.py::TestWhenThingsGoWrong::test_a_loader_that_a_finder_mends",
    "tests/callbacks/test_stall_detector_workers.py",
    "tests/gpu_simulator/test_ranks.py",
    "tests/test_ranks.py",
    "tests/timeline/test_hang.py",
    "tests/timeline/test_queues.py",
    "tests/timeline/test_worker_clock.py",
    "tests/timeline/test_worker_stacks.py",
    "tests/tuning/test_find.py",
    "tests/tuning/test_probe.py",
)
"""Tests whose figures are of real time."""

GROUPS = {
    "timed": TIMED,
    "examples": ("tests/test_examples.py",),  # each script runs once in a process
    "docs": (
        "tests/test_docs.py::test_the_code_of_a_page_runs",
        "tests/test_docs.py::test_the_reader_in_the_format_s_page",
    ),
    "benchmarks": ("tests/test_benchmarks.py",),
}
"""Tests that run one after the other, in one process."""

MATRIX = (
    "tests/callbacks/test_auto_fix.py::TestInARealRun::test_a_copy_is_hidden_from_the_next_batch_on",
    "tests/callbacks/test_auto_fix.py::TestOrderAndSamplesStay::test_of_a_dataset_that_cannot_be_looked_into",
    "tests/callbacks/test_auto_fix.py::TestOrderAndSamplesStay::test_of_a_nested_dataset_whose_workers_were_kept",
    "tests/callbacks/test_auto_fix.py::TestOtherSettings::test_not_where_the_sampler_would_draw_earlier",
    "tests/callbacks/test_auto_fix.py::TestOtherSettings::test_of_workers_that_live_on_too",
    "tests/callbacks/test_auto_fix.py::TestWhenThingsGoWrong::test_what_is_taken_back_in_the_last_epoch_is_the_loader_s_again",
    "tests/callbacks/test_auto_fix.py::TestWorkersThatLiveOn::test_a_dataset_that_changes_is_brought_to_new_workers",
    "tests/callbacks/test_auto_fix.py::TestWorkersThatLiveOn::test_a_dataset_with_epochs_of_its_own_is_left",
    "tests/callbacks/test_auto_fix.py::TestWorkersThatLiveOn::test_a_sampler_that_draws_as_it_likes_is_left",
    "tests/callbacks/test_cuda_prefetcher_limits.py::TestSeveralRanks::test_over_gloo_nothing_changes",
    "tests/callbacks/test_cuda_prefetcher_limits.py::TestSeveralRanks::test_the_copy_is_hidden_though_each_step_waits",
    "tests/callbacks/test_gpu_util_monitor.py::test_nvml_that_is_slow_throughout_holds_fit_for_three_seconds",
    "tests/callbacks/test_lightning_work.py::test_fewer_batches_than_workers_is_said",
    "tests/callbacks/test_lines.py::test_a_frozen_application_is_said_to_be_one",
    "tests/callbacks/test_lines.py::test_a_python_whose_frames_are_not_safe_is_said_to_be_one",
    "tests/callbacks/test_num_workers_finder.py::test_a_change_that_waits_for_the_next_epoch_passes_on_to_its_new_loader",
    "tests/callbacks/test_num_workers_finder.py::test_a_copy_in_mid_training_knows_the_choice_until_then",
    "tests/callbacks/test_num_workers_finder.py::test_a_loader_that_a_search_for_a_learning_rate_has_used_is_let_go",
    "tests/callbacks/test_num_workers_finder.py::test_a_rank_that_fails_leaves_no_worker_and_holds_up_nobody",
    "tests/callbacks/test_num_workers_finder.py::test_a_resume_in_mid_epoch_knows_the_new_loader_of_the_next",
    "tests/callbacks/test_num_workers_finder.py::test_a_stall_detector_beside_it_counts_the_workers_that_run",
    "tests/callbacks/test_num_workers_finder.py::test_a_stall_detector_sees_workers_of_a_loader_that_began_again",
    "tests/callbacks/test_num_workers_finder.py::test_a_state_that_is_loaded_in_mid_fit_changes_nothing",
    "tests/callbacks/test_num_workers_finder.py::test_a_validation_with_the_same_loader_is_not_what_is_tuned",
    "tests/callbacks/test_num_workers_finder.py::test_a_worker_that_is_stuck_after_the_fork_holds_training_up_once",
    "tests/callbacks/test_num_workers_finder.py::test_an_epoch_that_is_cut_short_leaves_the_generator_as_without",
    "tests/callbacks/test_num_workers_finder.py::test_an_error_of_the_sampler_that_training_does_not_come_to_is_none",
    "tests/callbacks/test_num_workers_finder.py::test_each_loader_has_its_own_number_and_validation_is_left_alone",
    "tests/callbacks/test_num_workers_finder.py::test_new_loaders_of_the_next_epoch_go_on_with_the_number",
    "tests/callbacks/test_num_workers_finder.py::test_no_more_workers_than_allowed_are_kept",
    "tests/callbacks/test_num_workers_finder.py::test_somebody_else_who_iterates_the_loader_is_not_what_is_tuned",
    "tests/callbacks/test_num_workers_finder.py::test_where_the_iterator_is_not_as_expected_the_next_epoch_changes",
    "tests/callbacks/test_stall_detector_ddp.py::test_one_slow_rank_among_four_is_found",
    "tests/callbacks/test_stall_detector_gpu.py::TestWhenThingsGoWrong::test_a_loader_that_a_finder_mends_begins_a_new",
    "tests/cli/test_doctor.py::test_as_people_run_it_with_a_call_that_hangs",
    "tests/cli/test_find_workers.py::test_where_the_bars_cannot_be_written_the_figures_can",
    "tests/cli/test_watch.py::test_every_trainer_once_and_the_users_own_detector_is_kept",
    "tests/storage/test_writer.py::test_a_kill_at_any_point_costs_nothing_that_was_safe",
    "tests/test_lightning.py::test_a_checkpoint_is_known_by_either_name",
    "tests/test_lightning.py::test_a_fit_is_the_same_by_either_name_in_any_order_of_imports",
    "tests/test_package.py::test_a_library_that_cannot_be_imported_is_named_with_its_fix",
    "tests/test_package.py::test_the_callbacks_need_nothing_that_only_data_and_charts_need",
    "tests/timeline/test_worker_stacks.py::test_a_worker_that_is_killed_while_it_samples_itself_gives_the_error_of_torch",
    "tests/timeline/test_worker_stacks.py::test_it_stops_by_itself_when_it_has_enough",
    "tests/tuning/test_caps.py::test_the_soft_limit_of_files_is_raised_where_more_are_wanted",
    "tests/tuning/test_resize.py::test_a_killed_worker_gives_the_error_of_torch",
    "tests/tuning/test_resize.py::test_a_spawned_worker_comes_and_goes",
    "tests/tuning/test_resize.py::test_a_stuck_worker_that_had_nothing_to_do_does_not_hold_up_the_next_epoch",
)
"""Long tests of the matrix lane, beside those that are marked in their files."""

FEW = {
    "tests/callbacks/test_auto_fix.py::TestOrderAndSamplesStay::test_of_samplers_that_draw_for_each_index": (
        "own-1 derived-0 default-generator-1"
    ),
    "tests/callbacks/test_cuda_prefetcher.py::test_beside_the_other_callbacks": "True",
    "tests/callbacks/test_cuda_prefetcher_resume.py::test_killed_at_any_step_it_goes_on_as_if_it_had_not_been": (
        "stateful-0 lmdb-0"
    ),
    "tests/callbacks/test_cuda_prefetcher.py::test_nothing_else_changes": (
        "plain-cpu sparse-cpu plain-gpu combined-cycle-equal-gpu accumulate-gpu stateful-gpu "
        "unsized-gpu lmdb-gathered-gpu should-stop-gpu in-place-gpu "
        "transfer-draws-later-gpu depth-3-gpu shuffled-persistent-gpu "
        "no-workers-gpu predict-gpu rest-of-epoch-left-gpu drawing-sampler-gpu"
    ),
    "tests/callbacks/test_num_workers_finder.py::test_a_choice_that_is_restored_late_is_used": (
        "False-kwargs0 True-kwargs1"
    ),
    "tests/callbacks/test_num_workers_finder.py::test_a_loader_without_workers_gets_some_and_nothing_else_changes": (
        "None-kwargs0 30-kwargs1 30-kwargs3"
    ),
    "tests/callbacks/test_num_workers_finder.py::test_batches_weights_and_random_state_are_as_without": (
        "1-kwargs1-decisions1-2"
    ),
    "tests/callbacks/test_stall_detector_gpu.py::TestRanks::test_what_rank_0_reports": "slow_data-found3",
    "tests/storage/test_reader.py::test_workers_read_after_their_parent_did": "fork",
    "tests/timeline/test_worker_clock.py::test_dataset_and_collate_are_told_apart": "0-None 2-fork",
    "tests/timeline/test_worker_stacks.py::test_only_the_worker_that_was_asked_samples_itself": "fork",
    "tests/tuning/test_resize.py::test_an_epoch_left_early_with_fewer_workers_leaves": "plan0-60 plan1-62 plan3-58",
    "tests/tuning/test_resize.py::test_the_first_workers_of_a_loader_change_nothing_that_is_drawn": (
        "kwargs0-None kwargs1-5 kwargs3-12"
    ),
    "tests/tuning/test_resize.py::test_the_order_of_samples_is_as_without": (
        "plan0-False-60 plan1-False-115 plan2-True-60 plan3-True-115"
    ),
    "tests/tuning/test_resize.py::test_the_work_of_a_new_worker_that_is_stuck_goes_to_others": "False-False",
    "tests/tuning/test_resize.py::test_without_an_order_no_sample_is_lost_or_comes_twice": (
        "3-plan0-False 1-plan3-True 1-plan2-False"
    ),
    "tests/callbacks/test_num_workers_finder.py::test_a_loader_that_wraps_its_iterator_is_left_alone": "0",
    "tests/callbacks/test_num_workers_finder.py::test_an_lmdb_datamodule_gives_the_same_samples_and_resumes": "2",
    "tests/callbacks/test_num_workers_finder.py::test_a_probe_serves_a_loader_without_workers_too": "None",
    "tests/callbacks/test_auto_fix.py::TestFirstWorkers::test_a_dataset_that_draws_random_numbers_keeps_its": "torch",
    "tests/callbacks/test_auto_fix.py::TestRunningWorkers::test_they_are_taken_back_where": "too-small",
    "tests/cli/test_demo.py::test_a_damaged_folder_is_made_again": "change_one_byte",
}
"""Tests with many sets of parameters: these are in the core lane, all others in the matrix lane."""


for _name in ("lightning.pytorch", "pytorch_lightning"):
    # Imported before pytest listens, they keep their messages from it.
    logging.getLogger(_name).propagate = True

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test into its lane."""
    for family, few in FEW.items():
        collected = [item.nodeid.rstrip("]").partition("[")[2] for item in items if item.nodeid.startswith(family)]
        gone = set(few.split()) - set(collected)
        if gone and len(collected) > len(few.split()):
            raise pytest.UsageError(f"{family} has no such parameters any more: {', '.join(sorted(gone))}")
    for item in items:
        if item.nodeid.startswith(MATRIX) or not _is_one_of_few(item.nodeid):
            item.add_marker("matrix")
        lanes = [lane for lane in LANES if item.get_closest_marker(lane) is not None]
        if len(lanes) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in several lanes: {', '.join(lanes)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    """Who gives out the tests, unless another way was asked for than that of ``-n``."""
    return Groups(config, log, GROUPS) if config.getvalue("dist") == "load" else None


def _is_one_of_few(nodeid: str) -> bool:
    test, _, parameters = nodeid.rstrip("]").partition("[")
    return all(parameters in few.split() for family, few in FEW.items() if test.startswith(family))


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: it is left out of every collection that a test asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_worker_is_waited_for() -> Iterator[None]:
    """End the workers of loaders that a test leaves behind.

    Python would collect their iterators in another test, which then waits five seconds for each: the queue's thread
    ends before it has sent the worker its end.
    """
    from tests.helpers import ends_new_workers  # imports torch, which the process that only hands out tests is spared

    with ends_new_workers():
        yield


@pytest.fixture(scope="session")
def simulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built NVML simulator."""
    library = build(tmp_path_factory.mktemp("nvml_simulator"))
    if library is None:
        message = "the NVML simulator needs a C compiler: install cc (Debian: apt-get install gcc libc6-dev)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return library


@pytest.fixture
def simulator(simulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """NVML without a GPU. After the test NVML must be shut down, and every thread of ours must be gone."""
    simulator = Simulator(simulator_library, tmp_path / "nvml-scenario.txt")
    monkeypatch.setenv("NVML_SIM_SCENARIO", str(simulator.scenario))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    simulator.machine()
    simulator.forget_calls()
    yield simulator
    simulator.release()
    for thread in threading.enumerate():
        if thread.name.startswith("gpuopt-"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} survived the test"
    assert simulator.references == 0, "NVML was not shut down"
    assert simulator.gpm_samples_alive == 0, "a GPM sample was not freed"


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """Time that passes only in ``time.sleep``; see SimulatedTime."""
    clock = SimulatedTime()
    clock.install(monkeypatch)
    return clock

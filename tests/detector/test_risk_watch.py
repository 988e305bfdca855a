"""The risks of a fit: from readings, and of real ranks with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.detector.risk_watch import RiskWatch
from lightning_gpuopt.diagnosis.record import Risk
from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.measurements.risks import RiskInputs, WorkerMemory
from tests.ranks import run_ranks

MIB = 1 << 20


class Paths:
    def __init__(self, count: int) -> None:
        self.paths = [f"{number:0300d}" for number in range(count)]


def growing(count: int) -> RiskInputs:
    """A worker that has grown by 2 MiB a second, 50 samples a second, for so many seconds."""
    readings = tuple(
        MemoryReading(at_s=float(second), private=(50 + 2 * second) * MIB, samples=50 * second)
        for second in range(1, count + 1)
    )
    return RiskInputs(workers=(WorkerMemory(0, readings),), num_workers=1)


def test_each_kind_is_new_once_and_kept_as_it_was_seen_last() -> None:
    told: list[Risk] = []
    watch = RiskWatch(lambda: [Paths(400_000)], found=told.append)
    assert watch.look(growing(3)) == []
    (new,) = watch.look(growing(20))
    assert new.evidence["object"] == "paths, a list of 400,000 str"
    assert str(new.evidence["where"]).startswith("test_risk_watch.py:")
    assert watch.look(growing(30)) == []
    assert [each.evidence["grown_mib"] for each in (new, *watch.risks)] == [38.0, 58.0]
    assert told == [new]


def test_the_dataset_is_looked_at_once_and_only_when_a_worker_has_grown() -> None:
    looked: list[int] = []
    watch = RiskWatch(lambda: looked.append(1) or [])  # type: ignore[func-returns-value]
    watch.look(growing(4))
    assert looked == []
    watch.look(growing(20))
    watch.look(growing(21))
    assert looked == [1]


def test_a_dataset_that_cannot_be_looked_at_costs_a_risk_and_no_more() -> None:
    def fails() -> list[object]:
        raise RuntimeError("no datasets")

    def refuses(risk: Risk) -> None:
        raise UserWarning(risk.text)

    watch = RiskWatch(fails, found=refuses)
    assert watch.look(growing(20)) == []
    assert [each.risk for each in watch.look(growing(60))] == ["worker_memory"]


def test_what_is_found_on_other_ranks_is_in_rank_0s_report_with_their_numbers() -> None:
    first, second, third = run_ranks("tests.detector.risk_rank:risks", 3)
    (files, text, on), (memory, of_others, on_others) = first["risks"]
    assert (files, "1,000" in text, on) == ("open_files", True, None)
    assert (memory, on_others) == ("process_memory", "1, 2")
    assert of_others.startswith("On ranks 1, 2: The memory of the training process grows by 600 MiB a minute: list of")
    assert "list of rank 1" in of_others
    assert first["warned"] == ["open_files", "process_memory"]
    assert [each[0] for each in second["risks"]] == ["process_memory"]
    assert [each[0] for each in third["risks"]] == ["process_memory", "open_files"]


@pytest.fixture(scope="module")
def two() -> list[Any]:
    """What each of two ranks saw in its runs."""
    return run_ranks("tests.detector.uneven_rank:runs", 2)


@pytest.mark.matrix
def test_uneven_ranks_are_in_the_report_and_warned_of_once_before_training_begins(two: list[Any]) -> None:
    run = two[0]["uneven"]
    assert run["before"] == ["uneven_ranks"]
    (risk, text, evidence) = run["risks"][0]
    assert risk == "uneven_ranks"
    assert text.startswith("Rank 1 has 12 batches fewer in this epoch than rank 0 (8, not 20): ")
    assert evidence == {"ranks": "1", "batches_fewest": 8.0, "batches_most": 20.0, "batches_fewer": 12.0}
    assert (run["written"], run["in_text"]) == (["uneven_ranks"], True)
    assert [text in each for each in run["warned"]] == [True]


@pytest.mark.parametrize("name", ["ignored", "watched"])
def test_nothing_is_warned_of_where_nobody_wants_to_know(two: list[Any], name: str) -> None:
    assert two[0][name]["warned"] == []
    assert two[0][name]["written"] == ["uneven_ranks"]


@pytest.mark.parametrize("name", ["even", "ends_before"])
def test_even_ranks_and_runs_that_end_before_are_no_risk(two: list[Any], name: str) -> None:
    assert (two[0][name]["risks"], two[0][name]["warned"]) == ([], [])


def test_other_ranks_say_nothing(two: list[Any]) -> None:
    assert [run["warned"] for run in two[1].values()] == [[]] * 5
    assert [run["risks"] for run in two[1].values()] == [[]] * 5

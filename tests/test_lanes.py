"""The lanes of the tests: each is run by ``.ci/run``, and together they are all tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import LANES, combinations, few, is_of_part
from tests.scheduling import TOGETHER, Files

ROOT = Path(__file__).parents[1]
ON_DEMAND = ("gpu", "loaders", "engines")
"""Lanes that need a GPU, or an environment of their own."""


def selected_by(target: str) -> list[str]:
    """The lane that each of a target's calls of pytest asks for; "" where it asks for none."""
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)
    calls = re.findall(r"-m pytest( [^|}\n]*)", done.stdout)
    return ["".join(re.findall(r" -m (\w+)", call)) for call in calls]


def test_the_core_lane_is_what_has_no_lanes_marker(pytestconfig: pytest.Config) -> None:
    declared = [line.partition(":")[0] for line in pytestconfig.getini("markers") if "(make test-" in line]
    assert declared == list(LANES)
    options = pytestconfig.getini("addopts")
    assert options[options.index("-m") + 1] == " and ".join(f"not {lane}" for lane in LANES)


@pytest.mark.parametrize("lane", LANES)
def test_every_lane_has_its_target_and_is_called(lane: str) -> None:
    called = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(selected_by(f"test-{lane.replace('example', 'examples')}")) == {lane}
    assert (f"test-{lane.replace('example', 'examples')}" in called) == (lane not in ON_DEMAND)


def test_of_the_parts_of_a_lane_each_test_is_in_one() -> None:
    tests = [f"tests/test_a.py::test_{number}[x]" for number in range(200)]
    found = [[test for test in tests if is_of_part(test, f"{part}/4")] for part in range(4)]
    assert sorted(test for tests_of in found for test in tests_of) == sorted(tests)
    assert min(map(len, found)) > 30
    assert [test for test in tests if is_of_part(test, "1/1")] == tests


def test_the_core_lane_is_run_as_it_is_and_beside_busy_processes() -> None:
    assert "make test\n" in (ROOT / ".ci/run").read_text()
    assert selected_by("test-loaded") == [""]


@pytest.mark.parametrize("target", ["test", "test-timed", "test-examples", "test-matrix", "test-floor"])
def test_what_fails_in_a_lane_is_run_once_more_and_alone(target: str) -> None:
    lane = target.removeprefix("test").strip("-").replace("examples", "example").replace("floor", "")
    assert selected_by(target) == [lane, lane]
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True)
    first, again = re.findall(r"-m pytest [^|}\n]*", done.stdout)
    assert " -n 2 " in first
    assert " -n 0 --last-failed " in again


def test_of_combinations_with_each_pair_of_values_a_few_are_in_the_core_lane() -> None:
    mark = combinations("x0-True-a x1-False-b", x=[{}, {1: 2}], y=[True, False], z={"a": 7, "b": int})
    names, sets = mark.args
    assert names == ("x", "y", "z")
    assert [each.id for each in sets if not each.marks] == ["x0-True-a", "x1-False-b"]
    assert [each.values for each in sets if not each.marks] == [({}, True, 7), ({1: 2}, False, int)]
    assert {mark.name for each in sets for mark in each.marks} == {"matrix"}
    assert len(sets) < 8
    assert (
        len({(i, j, str(each.values[i]), str(each.values[j])) for each in sets for i, j in ((0, 1), (0, 2), (1, 2))})
        == 12
    )


def test_a_core_set_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such parameters: c; there are a, b"):
        few("a c", {"a": 1, "b": 2})


def test_the_files_that_are_run_together_are_there() -> None:
    assert [file for file in TOGETHER if not (ROOT / file).is_file()] == []


def test_a_file_that_is_run_together_is_given_out_as_a_whole() -> None:
    scheduler = object.__new__(Files)  # its set-up asks for processes
    together = [f"{file}::test_{number}" for file in sorted(TOGETHER) for number in range(2)]
    assert {scheduler._split_scope(each) for each in together} == TOGETHER
    assert scheduler._split_scope("tests/test_lanes.py::test_0") == "tests/test_lanes.py::test_0"


@pytest.mark.matrix
def test_one_process_runs_a_file_that_is_run_together(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    files = [tmp_path / name for name in ("tests/test_docs.py", "tests/test_examples.py", "test_free.py")]
    (tmp_path / "tests").mkdir()
    for path in files:
        path.write_text("".join(f"def test_{number}(): pass\n" for number in range(10)))
    (tmp_path / "pytest.ini").touch()
    code = "import sys, pytest; sys.path.insert(0, sys.argv.pop(1)); sys.exit(pytest.main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), "-n2", "-v", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    ran = re.findall(r"^\[(gw\d)\] .* PASSED (\S+)::", ended.stdout, re.MULTILINE)
    assert len(ran) == 30, ended.stdout + ended.stderr
    processes = [{process for process, file in ran if tmp_path / file == path} for path in files]
    assert [len(each) for each in processes[:2]] == [1, 1]
    assert len({process for process, _ in ran}) == 2

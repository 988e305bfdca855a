"""The lanes of the tests: each is run by ``.ci/run``, and together they are all tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FEW, LANES, MATRIX, TIMED

ROOT = Path(__file__).parents[1]
NEEDS_A_GPU = "gpu"


def test_the_core_lane_is_what_has_no_lanes_marker(pytestconfig: pytest.Config) -> None:
    declared = [line.partition(":")[0] for line in pytestconfig.getini("markers") if "(make test-" in line]
    assert declared == list(LANES)
    options = pytestconfig.getini("addopts")
    assert options[options.index("-m") + 1] == " and ".join(f"not {lane}" for lane in LANES)


def test_every_lane_has_its_target_and_is_called() -> None:
    recipes = dict(re.findall(r"^(test[a-z-]*): .*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"^make (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert " -m " not in recipes["test"].partition("pytest")[2]
    selected = {name: re.findall(r"pytest .* -m (\w+)", recipe) for name, recipe in recipes.items()}
    for lane in LANES:
        (target,) = [name for name, lanes in selected.items() if lanes == [lane]]
        assert (target in called) == (lane != NEEDS_A_GPU)
    assert "test" in called


@pytest.mark.parametrize("name", [*FEW, *MATRIX, *TIMED])
def test_what_the_tables_name_is_there(name: str) -> None:
    file, *parts = name.split("::")
    text = (ROOT / file).read_text()
    assert [part for part in parts if f"class {part}" not in text and f"def {part}" not in text] == []


def test_one_process_runs_the_tests_that_wait_for_real_time(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    one, several, free = (
        tmp_path / name for name in ("tests/timeline/test_hang.py", "tests/test_docs.py", "test_free.py")
    )
    one.parent.mkdir(parents=True)
    for path in (one, free):
        path.write_text("".join(f"def test_{number}(): pass\n" for number in range(10)))
    several.write_text("def test_the_code_of_a_page_runs(): pass\ndef test_the_reader_in_the_format_s_page(): pass\n")
    (tmp_path / "pytest.ini").touch()
    code = "import sys, pytest; sys.path.insert(0, sys.argv.pop(1)); sys.exit(pytest.main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), "-n2", "-v", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    ran = re.findall(r"^\[(gw\d)\] .* PASSED (\S+)::", ended.stdout, re.MULTILINE)
    assert len(ran) == 22, ended.stdout + ended.stderr
    for group in (one, several):
        assert len({process for process, file in ran if tmp_path / file == group}) == 1
    assert len({process for process, _ in ran}) == 2

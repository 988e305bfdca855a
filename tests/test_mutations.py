"""The faults of ``mutations.toml`` are lines of the package; whether tests show them, ``make test-mutations`` says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.mutate import ROOT, mutated, mutations, own_tests


def test_each_fault_can_be_put_in() -> None:
    for each in mutations():
        whole = (ROOT / each["file"]).read_text()
        with_fault = mutated(whole, each)
        changed = [pair for pair in zip(whole.splitlines(), with_fault.splitlines(), strict=True) if len(set(pair)) > 1]
        assert [tuple(line.strip() for line in pair) for pair in changed] == [(each["was"], each["becomes"])]
        compile(with_fault, each["file"], "exec")


def test_there_are_two_in_each_room() -> None:
    rooms = {path.parent for path in (ROOT / "lightning_gpuopt").rglob("*.py") if path.name != "__init__.py"}
    count = Counter((ROOT / each["file"]).parent for each in mutations())
    assert len(mutations()) == 62
    assert {room.name for room in rooms - set(count)} == {"lightning_gpuopt", "entry_point"}
    assert min(count.values()) == 2


def test_a_file_s_own_tests_are_run_first() -> None:
    assert own_tests("lightning_gpuopt/utils/time_limit.py") == ["tests/utils/test_time_limit.py", "tests/utils"]
    assert own_tests("lightning_gpuopt/storage/writing/lock.py")[-1] == str(Path("tests/storage"))

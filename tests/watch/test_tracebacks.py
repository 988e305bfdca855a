"""A traceback of the program's own is under ``watch`` as without: nothing of ours stands in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fork_server import run
from tests.watch.raises import HOOKS, KINDS, LOADERS

IN_WORKERS = [kind for kind, options in LOADERS.items() if "num_workers" in options]
HERE = [kind for kind in KINDS if kind not in IN_WORKERS]


def printed(*command: str) -> str:
    done = run([sys.executable, "-W", "ignore", "-m", *command])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception is raised again with all that was caught")
@pytest.mark.parametrize(
    ("kinds", "fix"),
    [
        pytest.param(HERE, [], id="here"),
        pytest.param(["late-collate-worker"], [], id="in a worker", marks=pytest.mark.matrix),
        pytest.param(["ranks"], [], id="in a rank that is forked", marks=pytest.mark.matrix),
        pytest.param([*HOOKS, *IN_WORKERS], ["--fix"], id="fix", marks=pytest.mark.matrix),
    ],
)
def test_is_as_without(kinds: list[str], fix: list[str], tmp_path: Path) -> None:
    program = ["tests.watch.raises", *kinds]
    command = ["lightning_gpuopt", "watch", *fix, "--report-dir", str(tmp_path), "--", sys.executable, "-W", "ignore"]
    plain = printed(*program)
    assert plain.count("Traceback") >= len(kinds)
    assert "did not fail" not in plain
    assert printed(*command, "-m", *program) == plain

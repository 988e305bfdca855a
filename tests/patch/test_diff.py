"""A diff is taken by git apply and patch -p1, byte by byte."""

from __future__ import annotations

import subprocess

import pytest

from lightning_gpuopt.patch.diff import unified

CASES = {
    "plain": ("train.py", b"a = 1\nb = 2\n", b"a = 1\nb = 3\n"),
    "crlf": ("train.py", b"a = 1\r\nb = 2\r\n", b"a = 1\r\nb = 3\r\n"),
    "no newline at the end": ("train.py", b"a = 1\nb = 2", b"a = 1\nb = 3"),
    "form feed and separators": ("train.py", "a\x0c = 1\u2028\nb = 2\n".encode(), "a\x0c = 1\u2028\nb = 3\n".encode()),
    "a blank in the name": ("my train.py", b"a = 1\n", b"a = 2\n"),
    "latin-1": ("train.py", "# ü\na = 1\n".encode("latin-1"), "# ü\na = 2\n".encode("latin-1")),
    "in a folder": ("src/train.py", b"a = 1\n", b"a = 2\n"),
}


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("name", CASES)
def test_a_diff_applies(tmp_path, name, tool):
    path, before, after = CASES[name]
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(before)
    (tmp_path / "fix.patch").write_bytes(b"# what it is\n" + unified({path: (before, after)}))
    command = {"git": ["git", "apply", "fix.patch"], "patch": ["patch", "-p1", "-i", "fix.patch"]}[tool]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert file.read_bytes() == after


def test_two_diffs_of_one_file_apply_one_after_the_other(tmp_path):
    first, second, third = b"a = 1\nb = 1\n", b"a = 2\nb = 1\n", b"a = 2\nb = 2\n"
    (tmp_path / "a.py").write_bytes(first)
    parts = [unified({"a.py": (first, second)}), b"# not proved\n", unified({"a.py": (second, third)})]
    (tmp_path / "fix.patch").write_bytes(b"".join(parts))
    subprocess.run(["git", "apply", "fix.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "a.py").read_bytes() == third


def test_an_unchanged_file_is_left_out():
    assert unified({"a.py": (b"a", b"a")}) == b""

"""The copy in which a patched command is run once more."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_gpuopt.patch.check import _copy

BEGAN = 1_000_000_000.0


def written(path: Path, text: str, when_s: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (when_s, when_s))
    os.utime(path.parent, (BEGAN - 10, BEGAN - 10))


def test_sources_are_copied_data_is_linked_and_results_of_the_first_run_are_left_out(tmp_path: Path) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    written(tree / "pack" / "train.py", "source", BEGAN + 5)  # edited while it ran, and a source all the same
    written(tree / "pack" / "settings.json", "{}", BEGAN - 5)
    written(tree / "pack" / "last.pt", "weights", BEGAN + 5)
    written(tree / "data" / "a" / "1.jpg", "image", BEGAN - 5)
    written(tree / "models" / "a" / "final.pt", "weights", BEGAN + 5)
    written(tree / "mixed" / "b" / "x.pt", "data", BEGAN - 5)
    written(tree / "mixed" / "b" / "cache.txt", "new", BEGAN + 5)
    written(tree / ".git" / "HEAD", "ref", BEGAN - 5)
    for folder in (tree / "data", tree / "models", tree / "pack", tree):
        os.utime(folder, (BEGAN - 10, BEGAN - 10))
    _copy(tree, copy, {tree / "pack" / "train.py"}, BEGAN)
    assert sorted(str(each.relative_to(copy)) for each in copy.rglob("*") if "data/" not in str(each)) == [
        "data",
        "mixed",
        "mixed/b",
        "mixed/b/x.pt",
        "pack",
        "pack/settings.json",
        "pack/train.py",
    ]
    assert (copy / "data").is_symlink()
    assert (copy / "mixed" / "b" / "x.pt").is_symlink()
    (copy / "pack" / "train.py").write_text("patched")
    assert (tree / "pack" / "train.py").read_text() == "source"

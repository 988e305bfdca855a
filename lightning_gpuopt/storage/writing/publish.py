"""Publishing a dataset: renamed to its path in one step, and recovered where a crash came in between."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.format import MANIFEST, SKIPPED, Manifest, replaced_directory
from lightning_gpuopt.storage.sources.tar_index import INDEX
from lightning_gpuopt.storage.writing.plan import PLAN

SHARD_FILE: Final = re.compile(r"shard-(\d{5,})\.[a-z0-9_.]+")
# what the name of a file begins with by which the workers of an executor know the build's directory
MARKER: Final = "executor-"
_OUR_FILE: Final = re.compile(
    rf"{SHARD_FILE.pattern}|({MANIFEST}|{SKIPPED}|{PLAN}|{MARKER}.*|{INDEX}.*)(\.part)?|lock|part-.*\.lock"
)


def check_target(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if a path holds something that must stay."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise FileExistsError(f"{path}: there is a file of that name; choose another path, or move it away")
    if not overwrite:
        raise FileExistsError(f"{path}: it exists already; give overwrite=True to replace it, or another path")
    strange = sorted(name for name in os.listdir(path) if not _OUR_FILE.fullmatch(name))
    if strange:
        raise FileExistsError(
            f"{path}: it holds {strange[0]!r}, which is not part of a lightning-gpuopt dataset and is not deleted; "
            "choose another path, or move it away"
        )


def publish(directory: Path, path: Path, manifest: Manifest) -> None:
    """Rename a directory to the dataset's path, in place of one that `check_target` let pass.

    At every moment there is the old dataset, or the new one, or the old one under its other name for `recover`.
    """
    replaced = replaced_directory(path)
    if path.exists():
        _remove(replaced)
        os.rename(path, replaced)
    os.rename(directory, path)
    durable.sync_directory(path.parent)
    keep = {MANIFEST, SKIPPED, *(name for shard in manifest.shards for name in shard.files)}
    for name in set(os.listdir(path)) - keep:  # the dataset is whole with or without these
        remove(path / name)
    _remove(replaced)


def recover(path: Path) -> None:
    """Undo or finish what a crash in the midst of `publish` left."""
    replaced = replaced_directory(path)
    if not replaced.is_dir():
        return
    if os.path.lexists(path):
        _remove(replaced)
    else:
        os.rename(replaced, path)


def remove(path: Path) -> None:
    """Remove a file, or a directory that a worker of an executor wrote in and may still do."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove(replaced: Path) -> None:
    """Remove what was replaced: a dataset, as `check_target` made sure."""
    if replaced.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)

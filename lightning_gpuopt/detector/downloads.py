"""Sees what comes into the folders in which streams keep their downloads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

_MAX_FILES: Final = 20_000  # of a folder so many files are looked at: more take too long


class DownloadWatch:
    """Compares the cache folders of streams with what they held when training began."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def begin(self, folders: Iterable[str]) -> None:
        for folder in folders:
            if folder not in self._before:
                self._before[folder] = _count(folder)

    def notes(self) -> list[str]:
        notes = []
        for folder, before in self._before.items():
            if (more := _count(folder) - before) > 0:
                notes.append(
                    f"{more} more file{'s' * (more > 1)} in the cache folder {folder} than before training: an epoch "
                    "that downloads is not representative of later epochs."
                )
        return notes


def _count(folder: str) -> int:
    return sum(1 for _ in islice(_files(folder), _MAX_FILES))


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry
    except OSError:
        return

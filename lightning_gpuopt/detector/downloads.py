"""Sees what comes into the folders in which streams keep their downloads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

_MAX_FILES: Final = 20_000
"""Of a folder so many files are looked at: more take too long."""


class DownloadWatch:
    """Compares the cache folders of streams with what they held when training began."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}

    def begin(self, folders: Iterable[str]) -> None:
        """Look at folders that were not looked at yet, before much is read."""
        for folder in folders:
            if folder not in self._before:
                self._before[folder] = _held(folder)

    def notes(self) -> list[str]:
        """A line for each folder into which files came."""
        notes = []
        for folder, (files, size) in self._before.items():
            now, now_size = _held(folder)
            if now > files:
                came = "1 file" if now == files + 1 else f"{now - files} files"
                notes.append(
                    f"{came} ({(now_size - size) / 1e6:,.0f} MB) came into the cache folder {folder} while training "
                    "ran: an epoch that downloads says little of those that read from there."
                )
        return notes


def _held(folder: str) -> tuple[int, int]:
    """Number and bytes of the files in a folder; of one that is not there, none."""
    files = size = 0
    for entry in _files(folder):
        try:
            size += entry.stat().st_size
        except OSError:  # evicted meanwhile
            continue
        files += 1
        if files == _MAX_FILES:
            break
    return files, size


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

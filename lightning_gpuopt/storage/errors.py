"""The storage errors."""

from __future__ import annotations

from lightning_gpuopt.images.errors import CorruptSampleError


class StorageError(RuntimeError):
    """A dataset on disk cannot be read or written.

    The message names the path, the sample if there is one, and what to do. Paths that do not exist, or that exist
    already, raise `FileNotFoundError` and `FileExistsError` instead.
    """


class DamagedError(StorageError):
    """Bytes on disk differ from those written: a flipped bit, a truncated or foreign file."""


class DamagedFileError(DamagedError):
    """A file of a dataset is missing, truncated, or not the one listed in the manifest."""


class DamagedSampleError(DamagedError, CorruptSampleError):
    """One sample is not what was written, or cannot be decoded; others of its file may be."""

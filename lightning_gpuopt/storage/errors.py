"""The errors of the storage."""

from __future__ import annotations

from lightning_gpuopt.images.errors import CorruptSampleError


class StorageError(RuntimeError):
    """A dataset on disk cannot be read or written.

    The text names the path, the sample where there is one, and what to do. Paths that are not there, or that are
    there already, raise `FileNotFoundError` and `FileExistsError` instead.
    """


class DamagedError(StorageError):
    """Bytes on disk are not those that were written: a flipped bit, a truncated or foreign file."""


class DamagedFileError(DamagedError):
    """A file of a dataset is missing, cut off, or not the one that the manifest tells of."""


class DamagedSampleError(DamagedError, CorruptSampleError):
    """One sample is not what was written, or cannot be decoded; others of its file may be."""

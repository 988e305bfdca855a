"""What every source of samples offers to the build, and what they share."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.images.files import read_file
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.sources.kinds import NO_KINDS, Kind, part_names

T = TypeVar("T")

PART_BYTES: Final = 8 << 20  # how much of a source is held in memory at a time, about


class Source(ABC):
    """Samples in a fixed order, read by index: in one process, or in several at a time after a fork or a pickle."""

    kind: str  # in a word or two
    path: str  # for messages; a Dataset's type where it has no path
    classes: tuple[str, ...] | None = None  # index by label; None if there are none
    num_bytes: int | None = None  # about, the same in each run; None if nobody knows
    isolated: bool = False  # its library may die of a damaged file: only ever read it in a child process
    kinds: Mapping[str, Kind] = NO_KINDS  # of parts by name, where the rule of ``sources/kinds.py`` is wrong
    single_reads: bool = False  # a sample is read fast without those before it, in any process

    @abstractmethod
    def __len__(self) -> int:
        """Samples in it."""

    @abstractmethod
    def read(self, index: int) -> Any:
        """The sample of that index; images are `EncodedImage`. BadImage is raised where one should be and is not."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What users call the sample: a path, a member of a tar, a row."""

    def identity(self, index: int) -> bytes | None:
        """What tells the sample from all others of it, wherever the source lies; None: nothing that is known does."""
        return None

    def parts(self) -> list[str]:
        """Names of the parts of its samples; where that takes long, those of the first one."""
        return part_names(self.read(0))

    def fingerprint(self) -> dict[str, Any]:
        """Plain JSON that differs where the source differs, and not if the same source lies elsewhere."""
        return {"kind": self.kind, "num_samples": len(self)}

    def close(self) -> None:
        """Close the files that this process has open; they are opened again when they are needed."""
        for each in vars(self).values():
            if isinstance(each, PerProcess):
                each.close()


class RowSource(Source):
    """Samples that are the rows of a file."""

    _length: int

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        return f"row {index}"


class PerProcess(Generic[T]):
    """Something opened at its first use in each process; neither a fork nor a pickle takes it along."""

    def __init__(self, opener: Callable[[], T]) -> None:
        self._opener = opener
        self._pid = 0
        self._value: T | None = None

    def get(self) -> T:
        if self._value is None or self._pid != os.getpid():
            self._value, self._pid = self._opener(), os.getpid()
        return self._value

    def forget(self) -> T | None:
        """Give it up, to be closed by the caller; it is opened again when it is needed. None: it is not open here."""
        value, self._value = self._value, None
        return value if self._pid == os.getpid() else None

    def close(self) -> None:
        """Give it up, and close it where it can be closed."""
        value: Any = self.forget()
        if hasattr(value, "close"):
            value.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_opener": self._opener, "_pid": 0, "_value": None}


# what libraries raise for what they do not support, and what mistakes in programs raise
_NOT_OF_DAMAGE: Final = (NotImplementedError, LookupError, TypeError, AttributeError)


@contextlib.contextmanager
def reading(path: str, what: str, not_of_damage: tuple[type[Exception], ...] = _NOT_OF_DAMAGE) -> Iterator[None]:
    """Have an error in this context name its file: DamagedError, StorageError (unsupported) or OSError (the storage).

    `what` is said where a library cannot read it, such as "row 3 cannot be read"; the library raises `not_of_damage`
    for other reasons than damage.
    """
    try:
        yield
    except (BadImage, ImportError):
        raise
    except Exception as error:  # of every type, where the bytes are others
        if type(error) is MemoryError or str(error).startswith(path):  # libraries have their own, for sizes of nothing
            raise
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # which is: a place that is none
            raise OSError(error.errno, os.strerror(error.errno), path) from None
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, not_of_damage):
            raise StorageError(f"{path}: {what} ({why})") from error
        raise DamagedError(f"{path}: {what} ({why}); copy it again from its source") from None


def read_image(path: str) -> EncodedImage:
    """An image file, as it is; the text of an OSError says how to go on."""
    try:
        return EncodedImage(read_file(path))
    except OSError as error:
        what = f"{error.strerror}; fix that, then continue with resume=True"
        raise OSError(error.errno, what, path) from error


def folder_of(paths: Iterable[str]) -> str:
    """What paths have in common of their folders, with the separator at its end."""
    common = os.path.commonprefix(list(paths))  # noqa: RUF071  # cut at a separator, also of other spellings
    return common[: common.rfind(os.sep) + 1]


def short_names(paths: list[str]) -> list[str]:
    """What tells files from one another wherever they lie: their names, or their paths within a common folder."""
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    whole = [os.path.abspath(path) for path in paths]
    start = len(folder_of(whole))
    return [path[start:] for path in whole]


def expand(pattern: str) -> list[str]:
    """The paths of a pattern: braces as in a shell (``{000..009}``, ``{a,b}``), then ``*``, ``?`` and ``[...]``.

    A pattern without wildcards gives its paths whether they exist or not.
    """
    paths: list[str] = []
    for path in _braces(pattern):
        paths += sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.lexists(path) else [path]
    return paths


_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")


def _braces(pattern: str) -> list[str]:
    found = next((m for m in _BRACES.finditer(pattern) if _RANGE.fullmatch(m[1]) or "," in m[1]), None)
    if found is None:
        return [pattern]
    numbers = _RANGE.fullmatch(found[1])
    if numbers is None:
        choices = found[1].split(",")
    else:
        first, last = int(numbers[1]), int(numbers[2])
        step = 1 if first <= last else -1
        choices = [str(n).zfill(len(numbers[1])) for n in range(first, last + step, step)]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [path for choice in choices for path in _braces(head + choice + tail)]


def missing_extra(package: str, error: ImportError) -> ImportError:
    what = f'this source needs {package} ({error}); install it with: pip install "lightning-gpuopt[sources]"'
    return ImportError(what)

"""Which image files cannot be decoded: found out once, before training, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from lightning_gpuopt.images.checks import BadImage, check_image
from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.utils.console_progress import ConsoleProgress
from lightning_gpuopt.utils.user_cache import UserCache

_VERSION: Final = 2
_THREADS: Final = 16
_AT_A_TIME: Final = 4096


def bad_images(
    read: Callable[[int], bytes],
    count: int,
    key: str,
    *,
    trust: bool = False,
    progress: bool = False,
) -> dict[int, str]:
    """The image files that are no images, or broken off, and why.

    All files are read once. What was found is kept in the user's cache directory; later, only the files that were bad
    are looked at again. A file that goes bad afterwards is not found so.

    Args:
        read: Gives a file's bytes by number; a `CorruptSampleError` stands for a file that cannot be read.
        count: How many files there are.
        key: Stands for the files and their order; what was found is kept by it.
        trust: Take what was kept as it is: another process of this machine has just looked.
        progress: Show a progress bar on stderr, in a terminal.

    Returns:
        The reason by the file's number, in order.
    """
    cache = UserCache("bad-images", [_VERSION, key], ".json")
    kept = cache.load(_parse)
    if kept is not None and trust:
        return kept
    numbers: Iterable[int] = range(count) if kept is None else kept
    found = _check(read, list(numbers), progress and kept is None)
    if found != kept:
        text = json.dumps({str(number): why for number, why in found.items()})
        cache.keep(lambda stream: stream.write(text.encode()))
    return found


def _check(read: Callable[[int], bytes], numbers: list[int], progress: bool) -> dict[int, str]:
    def reason(number: int) -> str | None:
        try:
            check_image(read(number))
        except (BadImage, CorruptSampleError) as error:
            return str(error)
        return None

    found: dict[int, str] = {}
    shown = progress and len(numbers) > _AT_A_TIME
    bar = ConsoleProgress(
        len(numbers), what="checking images", unit="images", enabled=shown, lines=False, transient=True
    )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="gpuopt-check") as pool, bar:
        for start in range(0, len(numbers), _AT_A_TIME):
            here = numbers[start : start + _AT_A_TIME]
            for number, why in zip(here, pool.map(reason, here), strict=True):
                if why is not None:
                    found[number] = why
            bar.add(len(here))
    return found


def _parse(data: bytes) -> dict[int, str]:
    return {int(number): str(why) for number, why in json.loads(data).items()}

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
    read: Callable[[int], bytes], count: int, key: str, *, trust: bool = False, progress: bool = False
) -> dict[int, str]:
    """The reason, by number and in order, of files that are no images, or broken off.

    All files are read once (a `CorruptSampleError` from `read` stands for one that cannot be). What was found is kept
    in the user's cache directory, by `key`; later, only the files that were bad are looked at again, and with `trust`
    none: another process of this machine has just looked. A file that goes bad afterwards is not found so.
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

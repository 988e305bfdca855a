"""Which image files cannot be decoded: found out once, before training, and kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress

from lightning_gpuopt.images.checks import BadImage, check_image
from lightning_gpuopt.images.errors import CorruptSampleError

_VERSION: Final = 1
_THREADS: Final = 16
_AT_A_TIME: Final = 4096

log = logging.getLogger(__name__)


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
    cache = _cache_file(key)
    kept = _from_cache(cache)
    if kept is not None and trust:
        return kept
    numbers: Iterable[int] = range(count) if kept is None else kept
    found = _check(read, list(numbers), progress and kept is None)
    if found != kept:
        _keep(cache, found)
    return found


def _check(read: Callable[[int], bytes], numbers: list[int], progress: bool) -> dict[int, str]:
    def reason(number: int) -> str | None:
        try:
            check_image(read(number))
        except (BadImage, CorruptSampleError) as error:
            return str(error)
        return None

    found: dict[int, str] = {}
    console = Console(stderr=True)
    shown = progress and console.is_terminal and len(numbers) > _AT_A_TIME
    with (
        ThreadPoolExecutor(_THREADS, thread_name_prefix="gpuopt-check") as pool,
        Progress(console=console, transient=True, disable=not shown) as bar,
    ):
        task = bar.add_task("checking images", total=len(numbers))
        for start in range(0, len(numbers), _AT_A_TIME):
            here = numbers[start : start + _AT_A_TIME]
            for number, why in zip(here, pool.map(reason, here), strict=True):
                if why is not None:
                    found[number] = why
            bar.update(task, advance=len(here))
    return found


def _cache_file(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(json.dumps([_VERSION, key]).encode()).hexdigest()[:32]
    return Path(root, "lightning-gpuopt", "bad-images", f"{name}.json")


def _from_cache(cache: Path) -> dict[int, str] | None:
    try:
        return {int(number): str(why) for number, why in json.loads(cache.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return None
    except Exception as error:  # what cannot be read is made anew
        log.debug("%s cannot be used: %s", cache, error)
        return None


def _keep(cache: Path, found: dict[int, str]) -> None:
    temporary: str | None = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=cache.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as stream:
            temporary = stream.name
            json.dump({str(number): why for number, why in found.items()}, stream)
        os.replace(temporary, cache)
    except OSError as error:
        log.debug("the list of bad images cannot be kept in %s: %s", cache, error)
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)

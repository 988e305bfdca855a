"""Runs the tests of a room against each fault of ``mutations.toml``: ``python -m tests.mutate [FILE ...]``.

A fault that no test shows is printed at the end, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
AT_ONCE = 2
LIMIT_S = 900.0


def mutations() -> list[dict[str, str]]:
    """The faults, in the order of the file."""
    every: list[dict[str, str]] = tomllib.loads((ROOT / "tests/mutations.toml").read_text())["mutation"]
    return every


def own_tests(file: str) -> list[str]:
    """The tests of a file's room, those of the file itself first; of a room in a room those of both."""
    folders = [Path("tests") / Path(file).relative_to("lightning_gpuopt").parts[0], Path("tests") / Path(file).stem]
    own = sorted((ROOT / folders[0]).rglob(f"test_{Path(file).name}"))
    return [*(str(path.relative_to(ROOT)) for path in own), *(str(each) for each in folders if (ROOT / each).is_dir())]


def mutated(text: str, mutation: dict[str, str]) -> str:
    """The file's text with the fault; ValueError where the line is not there, or not once."""
    lines = text.splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if line.strip() == mutation["was"]]
    if len(at) != 1:
        raise ValueError(f"{mutation['file']}: {mutation['was']!r} is there {len(at)} times, expected once")
    (number,) = at
    lines[number] = lines[number].replace(mutation["was"], mutation["becomes"])
    return "".join(lines)


def shows(mutation: dict[str, str], checkout: Path) -> bool:
    """Whether a test fails, or does not end, with this fault in a checkout, which is mended again."""
    file = checkout / mutation["file"]
    whole = file.read_text()
    file.write_text(mutated(whole, mutation))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    try:
        ended = subprocess.run(
            [*command, *own_tests(mutation["file"])],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(whole)
    return ended.returncode != 0


def main(files: list[str]) -> int:
    """Run those of these files, or all."""
    chosen = [each for each in mutations() if not files or each["file"] in files]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            checkout = Path(folder) / str(number)
            for name in filter(None, listed.split("\0")):
                (checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, checkout / name)
            free.put(checkout)

        def run(mutation: dict[str, str]) -> tuple[Any, ...]:
            checkout = free.get()
            began_s = time.perf_counter()
            try:
                return mutation, shows(mutation, checkout), time.perf_counter() - began_s
            finally:
                free.put(checkout)

        missed = []
        for mutation, shown, took_s in pool.map(run, chosen):
            print(
                f"{'shown' if shown else 'MISSED'}  {took_s:4.0f} s  {mutation['kind']}: {mutation['file']}", flush=True
            )
            if not shown:
                missed.append(mutation)
    for each in missed:
        print(f"no test fails: {each['file']}\n  - {each['was']}\n  + {each['becomes']}")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} shown")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

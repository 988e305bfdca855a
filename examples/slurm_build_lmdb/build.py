"""The parts of an LMDB build on this machine, one process for each, as Slurm's array job does them on many."""

import argparse
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_gpuopt import LMDBDataset, build_lmdb

DRAWN = ".drawn-by-the-example"


def make_images(folder: Path, count: int) -> None:
    """Small pictures of noise in four classes; those that are there already stay. A shard has 1,024 or more."""
    for index in range(count):
        file = folder / f"class-{index % 4}" / f"{index:05d}.jpg"
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (12, 16, 3), dtype=np.uint8)).save(file)


def build_part(source: Path, path: Path, part: tuple[int, int]) -> int:
    """What one task of the array does.

    Returns:
        The number of samples in this part.
    """
    return build_lmdb(source, path, part=part, resume=True, progress=False).num_samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("images"), help="a folder with a subfolder for each class")
    parser.add_argument("--path", type=Path, default=Path("images.lmdb"), help="where the dataset is to be")
    parser.add_argument("--parts", type=int, default=4, help="tasks of the array")
    parser.add_argument("--smoke", action="store_true", help="fewer images")
    options = parser.parse_args()
    if options.path.exists():
        raise SystemExit(f"{options.path} is there already: remove it, or give another --path")
    if not options.source.exists() or (options.source / DRAWN).exists():
        make_images(options.source, 2100 if options.smoke else 8400)
        (options.source / DRAWN).touch()

    # The array job: every task knows its number and how many there are, and nothing of the others.
    parts = [(options.source, options.path, (number, options.parts)) for number in range(options.parts)]
    with multiprocessing.get_context("spawn").Pool(min(2, options.parts)) as pool:
        for number, samples in enumerate(pool.starmap(build_part, parts)):
            print(f"part {number} of {options.parts}: {samples} samples", flush=True)
    assert not options.path.exists(), "a dataset is there when it is whole, and not before"

    # The job that waits for the array: join the parts, and compare every byte with its checksum.
    info = build_lmdb(options.source, options.path, resume=True, progress=False)
    subprocess.run([sys.executable, "-m", "lightning_gpuopt", "lmdb", "verify", str(options.path)], check=True)
    targets = LMDBDataset(options.path).targets
    print(f"{info.num_samples} samples of {len(set(targets))} classes in {info.num_shards} shards")


if __name__ == "__main__":
    main()

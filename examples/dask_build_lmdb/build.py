"""An LMDB built by Dask's workers, or, where Dask is not installed, by those of a pool of processes."""

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
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


@contextlib.contextmanager
def workers(scheduler: str | None) -> Iterator[Executor]:
    """The workers of a cluster that runs, or two processes on this machine."""
    if importlib.util.find_spec("distributed") is None:
        if scheduler is not None:
            raise SystemExit("Dask is not installed: pip install dask distributed")
        print("without Dask: a pool of two processes", flush=True)
        with ProcessPoolExecutor(2) as pool:
            yield pool
        return
    from dask import distributed

    with contextlib.ExitStack() as stack:
        address = scheduler or stack.enter_context(
            distributed.LocalCluster(2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)
        )
        yield stack.enter_context(distributed.Client(address)).get_executor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("images"), help="a folder with a subfolder for each class")
    parser.add_argument("--path", type=Path, default=Path("images.lmdb"), help="where the dataset is to be")
    parser.add_argument("--scheduler", help="the address of Dask's scheduler; none: two workers on this machine")
    parser.add_argument("--smoke", action="store_true", help="fewer images")
    options = parser.parse_args()
    if not options.source.exists() or (options.source / DRAWN).exists():
        make_images(options.source, 2100 if options.smoke else 8400)
        (options.source / DRAWN).touch()

    with workers(options.scheduler) as executor:
        info = build_lmdb(options.source, options.path, executor=executor, resume=True, progress=False)
    targets = LMDBDataset(options.path).targets
    print(f"{info.num_samples} samples of {len(set(targets))} classes in {info.num_shards} shards")


if __name__ == "__main__":  # workers that are started by "spawn" import this file
    main()

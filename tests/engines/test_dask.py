"""`build_lmdb(executor=)` with Dask, in an environment that has it: ``make test-engines``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.helpers import wait_for
from tests.storage.source_files import beside, write_folder, write_pickled, write_tar

pytestmark = pytest.mark.engines


@pytest.fixture(params=[3, 0], ids=["dask-sends-again", "we-send-again"])
def dask(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Two worker processes on this machine; so many deaths of a worker does Dask allow a unit."""
    config, distributed = pytest.importorskip("dask").config, pytest.importorskip("distributed")
    with (
        config.set({"distributed.scheduler.allowed-failures": request.param}),
        distributed.LocalCluster(2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


class Waits:
    """Numbered samples in three shards; whoever is the first to read one of them waits there, and says who it is."""

    def __init__(self, waiting: Path) -> None:
        self.waiting = waiting

    def __len__(self) -> int:
        return 2500

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 1000 and not self.waiting.exists():
            self.waiting.write_text(str(os.getpid()))
            while True:
                time.sleep(0.05)
        return {"index": index, "values": np.full(8, index)}


def files(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def test_a_worker_that_is_killed_changes_nothing(tmp_path: Path, dask: Executor) -> None:
    source = Waits(tmp_path / "waiting")
    with ThreadPoolExecutor(1) as one:
        built = one.submit(build_lmdb, source, tmp_path / "out", executor=dask, progress=False)
        wait_for(lambda: source.waiting.exists() and source.waiting.read_text() != "")
        os.kill(int(source.waiting.read_text()), signal.SIGKILL)
        info = built.result()
    assert build_lmdb(source, tmp_path / "one", progress=False) == info
    assert files(tmp_path / "out") == files(tmp_path / "one")
    assert beside(tmp_path / "out") == ["one", "out", "waiting"]


def test_sources_by_path_give_the_same_bytes(tmp_path: Path, dask: Executor) -> None:
    write_folder(tmp_path / "folder", {"a": 1100, "b": 1})
    write_tar(tmp_path / "x.tar", {f"{i:04d}.cls": str(i).encode() for i in range(1100)})
    write_pickled(tmp_path / "foreign", {f"{i:04d}".encode(): b"%d" % i for i in range(1100)})
    for name in ("folder", "x.tar", "foreign"):
        build_lmdb(tmp_path / name, tmp_path / f"{name}-1", progress=False)
        build_lmdb(tmp_path / name, tmp_path / f"{name}-2", executor=dask, progress=False)
        assert files(tmp_path / f"{name}-2") == files(tmp_path / f"{name}-1")


class Refusing:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        raise MemoryError("none is left")


def test_an_error_of_the_source_is_raised_here(tmp_path: Path, dask: Executor) -> None:
    with pytest.raises(RuntimeError, match=r"Refusing\[0\] raised MemoryError: none is left"):
        build_lmdb(Refusing(), tmp_path / "out", executor=dask, progress=False)
    with pytest.raises(StorageError, match=r"the executor accepts no more work .*shutdown"):
        build_lmdb([lambda: 0], tmp_path / "out", executor=_closed(dask), overwrite=True, progress=False)


def _closed(executor: Executor) -> Executor:
    executor.shutdown()
    return executor

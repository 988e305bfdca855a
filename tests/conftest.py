"""Fixtures for all tests."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import one_thread  # noqa: F401 (before what imports torch)
from tests.lanes import LANES, is_of_part
from tests.simulators.nvml import Simulator, build
from tests.simulators.simulated_time import SimulatedTime

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")  # --hypothesis-profile=default looks for new ones

importlib.import_module("lightning.pytorch")  # on import it says whether its messages are handed on
for _name in ("lightning.pytorch", "pytorch_lightning"):
    # Imported before pytest listens, they keep their messages from it.
    logging.getLogger(_name).propagate = True

_DIED = pytest.StashKey[bool]()

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="the tests of this part of a lane, such as 2/4")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a test of several lanes, and leave out those of other parts of the lane."""
    others = [item for item in items if not is_of_part(item.nodeid, config.getoption("part"))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]
    for item in items:
        lanes = [lane for lane in LANES if item.get_closest_marker(lane) is not None]
        if len(lanes) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in several lanes: {', '.join(lanes)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who gives out the tests, unless another way was asked for than that of ``-n``."""
    from tests.scheduling import Files  # where there is a GPU there may be no xdist

    return Files(config, log) if config.getvalue("dist") == "load" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note that one of xdist's processes died: with it ends the lane, whose other tests have not run."""
    node.config.stash[_DIED] = bool(error) or node.config.stash.get(_DIED, False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A lane that was ended is not one in which tests failed: nothing is run once more."""
    if session.config.stash.get(_DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_collection_finish() -> None:
    """What has been imported is no garbage: it is left out of every collection that a test asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """A collection looks at nothing that was there before the tests of its file, such as what others have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_worker_is_waited_for() -> Iterator[None]:
    """End the workers of loaders that a test leaves behind.

    Python would collect their iterators in another test, which then waits five seconds for each: the queue's thread
    ends before it has sent the worker its end.
    """
    from tests.helpers import ends_new_workers  # imports torch, which the process that only hands out tests is spared

    with ends_new_workers():
        yield


@pytest.fixture(autouse=True)
def no_process_group_is_left_behind() -> Iterator[None]:
    """Destroy a test's process group, which Lightning leaves: forked workers of later tests would wait in it."""
    yield
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks for dead workers twenty times a second, not every five, and waits half a second for their ends."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.05,))
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture
def cheap_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch from a worker costs nothing: also samples as cheap as those of tests get first workers."""
    monkeypatch.setattr("lightning_gpuopt.tuning.without_workers.receive_cost", lambda batch_bytes: (0.0, 0.0, 0.0))


@pytest.fixture(scope="session")
def simulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built NVML simulator."""
    library = build(tmp_path_factory.mktemp("nvml_simulator"))
    if library is None:
        message = "the NVML simulator needs a C compiler: install cc (Debian: apt-get install gcc libc6-dev)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return library


@pytest.fixture
def simulator(simulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """NVML without a GPU. After the test NVML must be shut down, and every thread of ours must be gone."""
    simulator = Simulator(simulator_library, tmp_path / "nvml-scenario.txt")
    monkeypatch.setenv("NVML_SIM_SCENARIO", str(simulator.scenario))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    simulator.machine()
    simulator.forget_calls()
    yield simulator
    simulator.release()
    for thread in threading.enumerate():
        if thread.name.startswith("gpuopt-"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} survived the test"
    assert simulator.references == 0, "NVML was not shut down"
    assert simulator.gpm_samples_alive == 0, "a GPM sample was not freed"


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """Time that passes only in ``time.sleep``; see SimulatedTime."""
    clock = SimulatedTime()
    clock.install(monkeypatch)
    return clock

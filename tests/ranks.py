"""Ranks of one node: a function of a module runs as each of them, in a process of its own, and what it returns is had.

``run_ranks("tests.some.module:function", 2, name="x")`` calls ``function(name="x")`` in two processes that find each
other by the variables that torchrun sets. Arguments and results go as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from time import monotonic, sleep  # bound here: also real where a test simulates the time
from typing import Any

from tests.fork_server import Ran, start

_RESULT = "result of this rank: "
_ports = count(20_000 + os.getpid() * 16 % 10_000)


def free_port() -> int:
    """A port for ranks to meet at, below those that the kernel hands out: no connection takes it in between."""
    for port in _ports:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("the ports do not end")


def environments(world_size: int, env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The environment of each rank.

    Args:
        world_size: how many ranks there are.
        env: what else is in them; this process's by default.
    """
    common = {**(os.environ if env is None else env), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        {**common, "WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(world_size)
    ]


def run_ranks(
    function: str,
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    may_fail: bool = False,
    timeout_s: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """Run a function as each rank; none of the processes is left, whatever happens.

    Args:
        function: its module and its name, with a colon between them.
        world_size: how many ranks there are.
        env: their environment beside what makes them ranks; this process's by default.
        may_fail: a rank may end without a result. Otherwise the first that does ends them all.
        timeout_s: seconds from the start of the last after which all ranks must have ended.
        arguments: of the function.

    Returns:
        What each rank's function has returned; None for a rank that ended before.

    Raises:
        AssertionError: a rank failed, or was not ready in time; with what the ranks have written to stderr.
    """
    ranks: list[Ran] = []
    with ExitStack() as ends:
        for each in environments(world_size, env):
            ranks.append(start(["-m", "tests.ranks", function, json.dumps(arguments)], each))
            ends.callback(ranks[-1].kill)
        deadline = monotonic() + timeout_s
        while running := [number for number, rank in enumerate(ranks) if rank.poll() is None]:
            if monotonic() > deadline or (not may_fail and any(rank.returncode for rank in ranks)):
                break
            sleep(0.005)
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    outputs = [rank.communicate(0.0) for rank in ranks]
    written = "\n".join(f"rank {number}: {errors}" for number, (_, errors) in enumerate(outputs))
    assert may_fail or not failed, f"ranks {failed} of {function} failed\n{written}"
    assert not running, f"ranks {running} of {function} still ran after {timeout_s:.0f} s\n{written}"
    return [_result_in(output) for output, _ in outputs]


def _result_in(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    return json.loads(lines[-1].removeprefix(_RESULT)) if lines else None


# ---- in a rank's process ----


def join() -> tuple[int, int]:
    """Join the gloo group of all ranks, and wait until each has all its connections.

    One that ends before breaks the start of the others; rank 0, which hosts the store, that of those that still wait.

    Returns:
        This rank, and how many there are.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"tests/connected/{rank}", "yes")
    store.wait([f"tests/connected/{each}" for each in range(world_size)])
    store.set(f"tests/joined/{rank}", "yes")
    if not rank:
        store.wait([f"tests/joined/{each}" for each in range(world_size)])
    return rank, world_size


def _main(function: str, arguments: str) -> None:
    from tests.helpers import ends_new_workers

    module, _, name = function.partition(":")
    code = 1
    try:
        with ends_new_workers():
            result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        print(f"\n{_RESULT}{json.dumps(result)}")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group of which a rank is gone does not come apart in good order


if __name__ == "__main__":
    _main(*sys.argv[1:])

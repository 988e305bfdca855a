"""One rank of a test with several processes, started by ``tests.helpers.run_ranks``.

What it saw is printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count

import torch.distributed as dist

from lightning_gpuopt import _rank_stop, _ranks
from lightning_gpuopt._rank_stop import RankStop
from lightning_gpuopt._ranks import RankGather
from tests.helpers import wait_for


def all_windows(rank: int, world_size: int) -> object:
    """Three windows, then a second run of the same name, beside another user of the store."""
    seen = []
    for run in range(2):
        gather, other = RankGather("test", rank, world_size), RankGather("other", rank, world_size)
        for step in (49, 99, 149):
            gather.post(step, {"run": run, "rank": rank})
            other.post(step, "other")
        gather.close(timeout_s=60)
        other.close(timeout_s=60)
        seen.append([[window.step, window.by_rank] for window in gather.ready()])
    return {"collects": gather.collects, "problem": gather.problem, "seen": seen}


def one_dies(rank: int, world_size: int) -> object:
    """The last rank dies after its first window; the others go on without it."""
    _ranks._PATIENCE_S = 0.3
    gather = RankGather("test", rank, world_size)
    gather.post(0, rank)
    if rank == world_size - 1:
        wait_for(lambda: gather._inbox.empty())
        gather.close()
        os._exit(0)
    for step in (1, 2):
        gather.post(step, rank)
    seen: list[object] = []

    def all_came() -> bool:
        seen.extend([window.step, sorted(window.by_rank)] for window in gather.ready())
        return len(seen) == 3

    if rank == 0:
        wait_for(all_came)
    gather.close()
    return {"seen": seen, "problem": gather.problem}


def the_first_dies(rank: int, world_size: int) -> object:
    """Rank 0, which keeps the store, dies; the others' ends are not held up."""
    gather = RankGather("test", rank, world_size)
    if rank == 0:
        gather.post(0, rank)
        wait_for(lambda: gather.has_ready)
        os._exit(0)
    gather.post(0, rank)

    def noticed() -> bool:
        gather.post(1, rank)
        return gather.problem is not None

    wait_for(noticed)
    gather.close()
    os.write(1, json.dumps({"problem": gather.problem is not None, "ready": gather.ready()}).encode())
    os._exit(0)


def all_stop(rank: int, world_size: int) -> object:
    """No rank waits for another: when rank 0 asks, in its third step, each is where it is. Then a second run."""
    seen = []
    for run in range(2):
        stop = RankStop("test", rank, world_size)
        for step in count(1):
            time.sleep(0.001 * (1 + rank))  # its work
            if rank == 0 and step == 3:
                stop.ask(f"run {run}")
                stop.ask("again")
            if (why := stop.step_done(step)) is not None:
                break
        stop.close()
        seen.append([step, why])
    return {"seen": seen, "problem": stop.problem}


def all_end(rank: int, world_size: int) -> object:
    """Training ends: with nothing to say, with a reason, with one that was asked for shortly before, and in silence."""
    seen = []
    for run in range(4):
        stop = RankStop("test", rank, world_size)
        if rank == 0 and run == 2:
            stop.ask("asked")
        if rank or run < 3:
            seen.append(stop.end("at the end" if rank == 0 and run in (1, 2) else None))
        stop.close()
    return {"seen": seen, "problem": stop.problem}


def one_never_answers(rank: int, world_size: int) -> object:
    """Rank 0 asks, and the last rank is gone."""
    if rank == world_size - 1:
        os._exit(0)
    _rank_stop._PATIENCE_S = 3.0 if rank == 0 else 30.0
    stop = RankStop("test", rank, world_size)
    if rank == 0:
        stop.ask("asked")
    for step in count(1):
        time.sleep(0.001)  # its work
        if (why := stop.step_done(step)) is not None:
            break
    stop.close()
    return {"step": step, "why": why}


def wait_for_the_others() -> None:
    """Until every rank has all its connections: one that ends before breaks the start of the others."""
    store = dist.distributed_c10d._get_default_store()
    ranks = [f"tests/connected/{rank}" for rank in range(dist.get_world_size())]
    store.set(ranks[dist.get_rank()], "yes")
    store.wait(ranks)


def main() -> None:
    dist.init_process_group("gloo")
    wait_for_the_others()
    print(json.dumps(globals()[sys.argv[1]](dist.get_rank(), dist.get_world_size())), flush=True)
    os._exit(0)  # a process group without all its ranks does not come apart in good order


if __name__ == "__main__":
    main()

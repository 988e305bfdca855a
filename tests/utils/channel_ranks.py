"""What the ranks of ``test_rank_channel`` do."""

from __future__ import annotations

import os
import time
from itertools import count

import torch.distributed as dist

from lightning_gpuopt.utils import rank_channel, rank_stop
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather
from lightning_gpuopt.utils.rank_stop import RankStop
from tests.helpers import wait_for
from tests.ranks import join


def all_windows() -> object:
    """Three windows, then a second run of the same name, beside another user of the store."""
    rank, world_size = join()
    seen = []
    for run in range(2):
        windows: list[Gathered] = []
        gather = RankGather("test", rank, world_size, windows.append)
        other = RankGather("other", rank, world_size, lambda gathered: None)
        for step in (49, 99, 149):
            gather.post(step, {"run": run, "rank": rank})
            other.post(step, "other")
        gather.close(timeout_s=60)
        other.close(timeout_s=60)
        seen.append([[window.step, window.by_rank] for window in windows])
    return {"collects": gather.collects, "problem": gather.problem, "seen": seen}


def say_posted(rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"tests/posted/{rank}", "yes")


def wait_for_posts(world_size: int) -> None:
    dist.distributed_c10d._get_default_store().wait([f"tests/posted/{rank}" for rank in range(1, world_size)])


def one_dies() -> object:
    """The last rank dies after its first window; the others go on without it."""
    rank, world_size = join()
    rank_channel._PATIENCE_S = 1.0
    seen: list[object] = []
    gather = RankGather("test", rank, world_size, lambda window: seen.append([window.step, sorted(window.by_rank)]))
    if rank == 0:  # its patience is for the one that is gone, whenever the others come to their windows
        wait_for_posts(world_size)
    for step in (0,) if rank == world_size - 1 else (0, 1, 2):
        gather.post(step, rank)
    if rank:
        wait_for(gather._inbox.empty)
        gather.close()
        say_posted(rank)
    if rank == world_size - 1:
        os._exit(0)
    if rank == 0:
        wait_for(lambda: len(seen) == 3)
    gather.close()
    return {"seen": seen, "problem": gather.problem}


def the_first_dies() -> object:
    """Rank 0, which keeps the store, dies; the others' ends are not held up."""
    rank, world_size = join()
    windows: list[Gathered] = []
    gather = RankGather("test", rank, world_size, windows.append)
    if rank == 0:
        gather.post(0, rank)
        wait_for(lambda: bool(windows))
        os._exit(0)
    gather.post(0, rank)

    def noticed() -> bool:
        gather.post(1, rank)
        return gather.problem is not None

    wait_for(noticed)
    gather.close()
    return {"problem": gather.problem is not None, "windows": windows}


def all_stop() -> object:
    """No rank waits for another: when rank 0 asks, in its third step, each is where it is. Then a second run."""
    rank, world_size = join()
    rank_stop._LOOK_EVERY_S = 0.05
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
        seen.append([step, why])
        problem = stop.problem  # before the end: rank 0, which keeps the store, may be gone by then
        stop.close()
    return {"seen": seen, "problem": problem}


def all_end() -> object:
    """Training ends: with nothing to say, with a reason, with one that was asked for shortly before, and in silence."""
    rank, world_size = join()
    seen = []
    for run in range(4):
        stop = RankStop("test", rank, world_size)
        if rank == 0 and run == 2:
            stop.ask("asked")
        if rank or run < 3:
            seen.append(stop.end("at the end" if rank == 0 and run in (1, 2) else None))
        stop.close()
    return {"seen": seen, "problem": stop.problem}


def one_never_answers() -> object:
    """Rank 0 asks, and the last rank is gone."""
    rank, world_size = join()
    if rank == world_size - 1:
        os._exit(0)
    rank_stop._LOOK_EVERY_S = 0.05
    rank_stop._PATIENCE_S = 1.5 if rank == 0 else 30.0
    stop = RankStop("test", rank, world_size)
    if rank == 0:  # its patience is for the one that is gone
        wait_for_posts(world_size - 1)
        stop.ask("asked")
    else:
        say_posted(rank)
    for step in count(1):
        time.sleep(0.001)  # its work
        if (why := stop.step_done(step)) is not None:
            break
    stop.close()
    return {"step": step, "why": why}

"""Tries a change of running workers on a tiny loader, under a torch that no test lane of this package runs."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.compat.dataloader import shut_down
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning.resize import adopt

log = logging.getLogger(__name__)

TESTED_MINORS: Final = ((2, 4), (2, 13), (2, 14))
"""Versions of torch that a lane of the tests runs."""

_BATCHES: Final = 12
_TIMEOUT_S: Final = 5.0


def why_not_tried(version: str | None = None) -> str | None:
    """Why running workers should not be changed with this torch; None where a test lane runs it, or a trial succeeds.

    The trial takes a fraction of a second, once in a process. Random states are as before.

    Args:
        version: of torch; None: the one that is there.
    """
    numbers = (version or torch.__version__).split("+")[0].split(".")[:2]
    if tuple(int(each) if each.isdigit() else -1 for each in numbers) in TESTED_MINORS:
        return None
    return _trial()


@cache
def _trial() -> str | None:
    """Run a loader with one worker, then two, then one, and compare the order of its batches."""
    states, iterator = RandomStates(), None
    try:
        loader: DataLoader[Any] = DataLoader(
            cast("Dataset[int]", range(_BATCHES)),
            batch_size=1,
            num_workers=1,
            multiprocessing_context="fork",
            generator=torch.Generator(),
            timeout=_TIMEOUT_S,
        )
        iterator = iter(loader)
        adopted = adopt(iterator, loader)
        seen = []
        for number, batch in enumerate(adopted):
            seen.append(int(batch))
            if number in (2, 6):
                adopted.resize(2 if number == 2 else 1)
        if seen == list(range(_BATCHES)):
            return None
        return f"with torch {torch.__version__} a trial gave another order"
    except Exception as error:
        log.debug("the trial of a change failed", exc_info=True)
        return f"with torch {torch.__version__} a trial failed: {type(error).__name__}: {error}"
    finally:
        shut_down(iterator)
        states.restore()

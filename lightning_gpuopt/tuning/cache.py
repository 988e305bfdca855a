"""Choices kept in files, so that the next run on the same data and the same machine need not search again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt._version import __version__
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.probe import sample_bytes
from lightning_gpuopt.tuning.workers import NumWorkersResult, Trial

log = logging.getLogger(__name__)


LOOK_S: Final = 2.0
"""Longer than this, a look at a few samples is not worth what it saves."""


def choice_key(dataloader: DataLoader[Any], look_s: float = LOOK_S, **question: float | int | str | None) -> str:
    """What a choice depends on, as a name for its file.

    The dataset (its class, its length, the size of its first, middle and last sample, read in a worker process), the
    machine (name, CPUs, quota), the loader's settings, and what was asked.

    Args:
        dataloader: whose choice it is.
        look_s: seconds that reading the samples may take, from the moment at which their worker runs.
        question: the arguments of the search, such as ``step_time_s``; times should be rounded.
    """
    facts = {
        "version": __version__,
        "dataset": _dataset_facts(dataloader, look_s),
        "machine": [platform.node(), platform.machine(), os.cpu_count(), round(usable_cpus(), 2), torch.__version__],
        "loader": _loader_facts(dataloader),
        "question": question,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_choice(cache_dir: str | os.PathLike[str], key: str) -> NumWorkersResult | None:
    """The choice kept under a key; None where there is none, or none that can be read."""
    try:
        fields = json.loads(_file(cache_dir, key).read_text(encoding="utf-8"))
        trials = tuple(Trial(**trial) for trial in fields.pop("trials"))
        result = NumWorkersResult(trials=trials, **fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.debug("the choice kept in %s is left aside: %s", _file(cache_dir, key), error)
        return None
    return result if isinstance(result.num_workers, int) and result.num_workers >= 0 else None


def store_choice(cache_dir: str | os.PathLike[str], key: str, result: NumWorkersResult) -> bool:
    """Keep a choice under a key, whole or not at all.

    Returns:
        Whether it was kept: a folder that cannot be written to is no reason to stop.
    """
    target = _file(cache_dir, key)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".num-workers-", delete=False
        ) as file:
            temporary = Path(file.name)
            json.dump(asdict(result), file)
        temporary.replace(target)
    except OSError as error:
        log.debug("the choice could not be kept in %s: %s", target, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True


def _file(cache_dir: str | os.PathLike[str], key: str) -> Path:
    return Path(cache_dir) / f"num-workers-{key}.json"


def _dataset_facts(loader: DataLoader[Any], look_s: float) -> list[Any]:
    dataset = loader.dataset
    facts: list[Any] = [_name_of(type(dataset))]
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return facts
    facts.append(length)
    if length and not isinstance(dataset, IterableDataset):
        facts.append(_sample_bytes(loader, sorted({0, length // 2, length - 1}), look_s))
    return facts


def _sample_bytes(loader: DataLoader[Any], indices: list[int], look_s: float) -> int | None:
    """About how large these samples are together; None where they cannot be read, or not soon.

    Read in a worker process: the training process's dataset opens no file for it, and draws no random number.
    """
    try:
        size = sample_bytes(loader, indices, look_s)
    except Exception:  # the search itself, or training, will say what is wrong with them
        return None
    return 1 << size.bit_length()  # random augmentation changes sizes a little


def _loader_facts(loader: DataLoader[Any]) -> list[Any]:
    context: Any = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return [
        _name_of(type(loader)),
        loader.batch_size,
        getattr(loader.batch_sampler, "batch_size", None),
        _name_of(loader.collate_fn),
        bool(loader.pin_memory),
        loader.prefetch_factor,
        getattr(loader, "in_order", True),
        context.get_start_method(),
    ]


def _name_of(thing: type | Callable[..., Any]) -> str:
    """Module and name; a function that stands in for another says the other's."""
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"

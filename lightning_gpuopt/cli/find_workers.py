"""``lightning-gpuopt find-workers``: the number of workers for a loader, measured."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveInt, restricted_number_type

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lightning_gpuopt.tuning.search_result import NumWorkersResult

SUMMARY = "measure how many workers a DataLoader needs"

Seconds = restricted_number_type("seconds above 0", float, [(">", 0), ("<", float("inf"))])
Tolerance = restricted_number_type("0 < share <= 0.5", float, [(">", 0), ("<=", 0.5)])

_BAR = 40

_BECAUSE = {
    "consumer": "the loader is as fast as its consumer",
    "cpu": "more workers gain nothing: the CPUs, or another resource the workers share, are always busy",
    "memory": "more workers would not fit into memory",
    "shared_memory": "the batches of more workers would not fit into /dev/shm",
    "max_num_workers": "no more were allowed",
    "time": "the time ran out: raise --max-seconds to be sure",
}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "loader",
        metavar="MODULE:FUNCTION",
        type=str,
        help="a function without arguments that returns a DataLoader; the current directory is searched too",
    )
    add("--step-time", type=NonNegativeFloat, default=0.0, metavar="MS", help="milliseconds of a training step")
    add("--max-num-workers", type=PositiveInt, metavar="N", help="upper limit of workers to try")
    add("--max-seconds", type=Seconds, default=10.0, metavar="S", help="seconds for the whole search")
    add("--tolerance", type=Tolerance, default=0.05, metavar="X", help="a gain below this share is not worth a worker")
    add(
        "--local-world-size", type=PositiveInt, default=1, metavar="N", help="ranks of this node that load concurrently"
    )
    add("--iterable", action="store_true", help="also for an IterableDataset, whose order depends on the number")
    add("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Search, and print the trials, a plot of them, and the choice."""
    loader = _load(options.loader)
    from lightning_gpuopt.tuning.find import check_shared, find_num_workers
    from lightning_gpuopt.tuning.trial_samples import own_sampling
    from lightning_gpuopt.utils.arguments import ArgumentTypeError

    try:
        own_sampling(loader, options.iterable)
        check_shared(loader)
    except (ArgumentTypeError, ValueError) as error:
        text = str(error).replace("dataloader:", f"{options.loader}:").replace("iterable=True", "--iterable")
        raise UsageError(text) from error
    result = find_num_workers(
        loader,
        options.step_time / 1e3,
        options.max_num_workers,
        options.max_seconds,
        options.tolerance,
        options.local_world_size,
        options.iterable,
    )
    if options.json:
        print(json.dumps({**asdict(result), "settings": result.settings}, indent=2))
    else:
        print(render(result))
    return 0


def _load(name: str) -> DataLoader[Any]:
    module_name, colon, function_name = name.partition(":")
    if not (colon and all(part.isidentifier() for part in module_name.split(".")) and function_name.isidentifier()):
        raise UsageError(f"expected MODULE:FUNCTION, such as train:make_loader, got {name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module needs is missing
        raise UsageError(
            f"{module_name}: there is no such module here or among those installed; start in the module's folder"
        ) from error
    if not hasattr(module, function_name):
        raise UsageError(f"{name}: {module_name} has no {function_name}; expected a function that returns a DataLoader")
    function = getattr(module, function_name)
    if not callable(function):
        raise UsageError(f"{name}: expected a function that returns a DataLoader, got {function!r}")
    loader: DataLoader[Any] = function()
    return loader


def render(result: NumWorkersResult) -> str:
    """The trials as a table with bars, and the choice."""
    trials = sorted(result.trials, key=lambda trial: trial.num_workers)
    most = max((trial.batches_per_s for trial in trials), default=1.0)
    lines = ["workers  batches/s  wait ms"] if trials else []
    for trial in trials:
        bar = "█" * max(round(_BAR * trial.batches_per_s / most), 1)
        mark = " ◀" if trial.num_workers == result.num_workers else ""
        lines.append(f"{trial.num_workers:7}  {trial.batches_per_s:9.1f}  {trial.data_wait_s * 1e3:7.1f}  {bar}{mark}")
    if trials:
        lines.append("")
    expected = result.predicted_batches_per_s
    rate = f", {expected:.1f} batches/s expected" if expected is not None else ""
    lines.append(f"num_workers={result.num_workers}{rate}")
    lines.append(f"limited by {result.limited_by}: {_BECAUSE[result.limited_by]}")
    if result.num_workers:
        lines.append(f"DataLoader(..., {', '.join(f'{name}={value}' for name, value in result.settings.items())})")
    return "\n".join(lines)

"""The safety rules: when a loader's setting must stay unchanged, each with its reason in one sentence.

A change of a loader is checked by :func:`why_not`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.compat.dataloader import is_plain, may_pin, persistent_iterator
from lightning_gpuopt.loaders.kinds import keeps_state, kind_of
from lightning_gpuopt.loading.elastic_loader import ElasticLoader, why_no_sample_tasks
from lightning_gpuopt.tuning.seen_order import SeenOrder
from lightning_gpuopt.tuning.sharing import ForkSnapshot, forks, has_init_fn, held_by, state_of, why_not_shared

# settings with which a sampler is asked at other moments
AHEAD: Final = ("num_workers", "prefetch_factor", "persistent_workers", "sample_parallel")


class CannotChange(Exception):
    """A setting must stay unchanged; the message gives the reason."""


@dataclass(frozen=True)
class AskedChange:
    """A requested change of an argument, and what is known about the loader."""

    loader: DataLoader[Any]
    setting: str
    value: Any
    own_workers: int  # the user's number
    start: ForkSnapshot | None = None  # what its running workers got a copy of, if that is known
    dataset_changes: bool = False  # it was another one at the last two starts of an epoch
    before_first: bool = False  # the loader was never iterated

    @property
    def adds_first(self) -> bool:
        return self.setting == "num_workers" and not self.own_workers and bool(self.value)

    @property
    def adds(self) -> bool:
        """Whether other workers are started beside those that run."""
        if self.setting == "sample_parallel":
            return bool(self.value)
        return self.setting == "num_workers" and 0 < self.loader.num_workers < self.value


@dataclass(frozen=True)
class Rule:
    """One reason not to change these settings, by its name in the docs; ``why`` returns it if it applies."""

    name: str
    settings: tuple[str, ...]
    why: Callable[[AskedChange], str | None]


def _own_iterators(asked: AskedChange) -> str | None:
    loader, kind = asked.loader, kind_of(asked.loader)
    ours = getattr(type(loader), "iterates_as_torch", False)
    stream = kind == "torch" and isinstance(loader.dataset, IterableDataset)
    if is_plain(loader) or kind == "stateful" or ours or stream:
        return None
    return f"a {type(loader).__name__} creates its own iterators"


def _own_state(asked: AskedChange) -> str | None:
    loader = asked.loader
    if asked.before_first or not has_own_state(loader):
        return None
    if asked.setting in ("prefetch_factor", "pin_memory") and keeps_state(loader):
        return None
    return f"the state of a {type(loader).__name__} is valid only for the settings it started with"


_TO_NONE: Final = "without workers, the training process would draw the workers' random numbers: training would change"
_NO_WORKERS: Final = "there are no workers"
ASKS_FOR_WORKER: Final = "its dataset asks get_worker_info(), so a sample may depend on which worker reads it"


def _start_method(asked: AskedChange) -> str | None:
    if not asked.adds_first or (method := forks(asked.loader)) is None:
        return None
    return (
        f"its workers would be started by {method!r}, which runs the program's script again. Set num_workers in the "
        "DataLoader"
    )


def _sampler(asked: AskedChange) -> str | None:
    if isinstance(asked.loader.dataset, IterableDataset):
        return None
    order = SeenOrder()
    if (reason := order.why_bound(asked.loader)) is not None:
        return reason
    if not is_plain(asked.loader) and not order.is_known(asked.loader):
        return f"a {type(asked.loader).__name__} iterates its own sampler, which may read what training writes"
    return None


def _held(asked: AskedChange) -> str | None:
    if isinstance(asked.loader.dataset, IterableDataset):
        return None
    if asked.adds and asked.start is not None:
        return asked.start.why_no_more()
    if asked.adds_first or asked.value > asked.own_workers:
        return why_not_shared(asked.loader, held_by(asked.loader), workers=asked.own_workers)
    return None


def _changed(asked: AskedChange) -> str | None:
    if asked.adds_first and asked.dataset_changes:
        return "the dataset changes while training runs, and workers would keep the old state"
    persist = persistent_iterator(asked.loader) is not None
    if persist and asked.adds and asked.own_workers and asked.start is not None and asked.start.has_changed:
        return "the dataset may have changed since its persistent workers started: new ones would see the new state"
    return None


def _pinning(asked: AskedChange) -> str | None:
    if persistent_iterator(asked.loader) is not None:
        return "its workers persist: pinning needs new ones"
    return None if may_pin(asked.loader) else "pinning would change its batches' types, or no worker makes them"


def _by_sample(asked: AskedChange) -> str | None:
    loader, state = asked.loader, state_of(asked.loader)
    if not asked.value:
        return None
    if (method := forks(loader)) is not None:
        return f"its workers are started by {method!r}, which takes seconds"
    if has_init_fn(loader):
        return "its worker_init_fn may prepare each worker for samples of its own"
    if state.asks_for_worker:
        return ASKS_FOR_WORKER
    if any(each.kind == "generator" for each in state.held):
        return "its dataset holds a random generator, whose draws depend on which worker reads which sample"
    return why_no_sample_tasks(loader)


def _keeping(asked: AskedChange) -> str | None:
    if isinstance(asked.loader.dataset, IterableDataset):
        return "persistent workers would continue the stream they have read"
    state, name = state_of(asked.loader), type(asked.loader.dataset).__name__
    if state.has_epochs:
        return f"{name} has set_epoch(), which persistent workers would not see"
    if not state.is_comparable:
        trained = [f"can depend on {each}, which training changes" for each in state.held if each.kind == "trained"]
        return f"{name} {[*trained, 'is too large to check whether it changes between epochs'][0]}"
    if asked.dataset_changes:
        return f"{name} changes between epochs, and persistent workers would keep the old state"
    return None


RULES: Final = (
    Rule("iterators of its own", ("num_workers", "persistent_workers", "sample_parallel"), _own_iterators),
    Rule("state of its own", (*AHEAD, "pin_memory"), _own_state),
    Rule("to no workers", ("num_workers",), lambda asked: None if asked.value else _TO_NONE),
    Rule("no workers", AHEAD[1:], lambda asked: None if asked.loader.num_workers else _NO_WORKERS),
    Rule("start method", ("num_workers",), _start_method),
    Rule("sampler", AHEAD, _sampler),
    Rule("held by the dataset", ("num_workers", "sample_parallel"), _held),
    Rule("changes while training runs", ("num_workers", "sample_parallel"), _changed),
    Rule("samples as tasks", ("sample_parallel",), _by_sample),
    Rule("pinning", ("pin_memory",), _pinning),
    Rule("workers that live on", ("persistent_workers",), _keeping),
)

# rules that a trial in a worker process decides, and their settings: ``without_workers.py``, ``managed.py``
BY_TRIAL: Final = {
    "changes as it is read": ("num_workers", "persistent_workers", "sample_parallel"),
    "random numbers": ("num_workers", "persistent_workers", "sample_parallel"),
}


def why_not(asked: AskedChange) -> str | None:
    """Why a setting must stay unchanged, or None; raises what the dataset or the sampler raises."""
    reasons = (rule.why(asked) for rule in RULES if asked.setting in rule.settings)
    return next((reason for reason in reasons if reason is not None), None)


def why_left_alone(loader: Any, *, iterable: bool = False) -> str | None:
    """Why a loader keeps its number of workers, whatever is measured: completes "NumWorkersFinder leaves ..."."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"a {name} alone: it is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset) and not iterable:
        return "an IterableDataset alone: its samples depend on the workers (iterable=True includes it)"
    if loader.num_workers == 0 and has_own_state(loader):
        return f"a {name} with num_workers=0 alone: workers would change its shuffle order"
    if loader.num_workers == 0 and getattr(loader.dataset, "gathers_batches", False):
        return "a loader alone: it gathers its batches faster without workers"
    return None


def has_own_state(loader: Any) -> bool:
    """Whether a loader's state is only valid for its ``num_workers``, as a ``StatefulDataLoader``'s."""
    return hasattr(loader, "state_dict") and not isinstance(loader, ElasticLoader)

"""Random programs over real loaders: with changes and without, the same comes of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.callbacks.auto_fix_runs import FAST, SLOW, Numbers, Run, finding, loader, script
from tests.fork_server import run_code
from tests.helpers import wait_for
from tests.loaders.programs import (
    DATASETS,
    NOT_SPAWNED,
    SAMPLING,
    Act,
    Outcome,
    Program,
    nothing_is_left,
    numbers_only,
    run,
)
from tests.shared_memory import shared_files

pytestmark = [
    pytest.mark.usefixtures("quick_checks", "cheap_workers"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' argument is set"),
]

VALUES: dict[str, Any] = {
    "num_workers": st.integers(0, 3),
    "prefetch_factor": st.integers(1, 4),
    "pin_memory": st.booleans(),
    "persistent_workers": st.booleans(),
}


@st.composite
def acts(draw: st.DrawFn, epochs: int, batches: int, peeks: bool) -> Act:
    what = draw(st.sampled_from([*["change"] * 6, "take_back", "version", "entry", *["peek"] * peeks]))
    ours = what in ("change", "take_back")
    epoch, step = draw(st.integers(0, epochs - 1 - ours)), draw(st.integers(0, batches))
    if what in ("change", "take_back"):
        setting = draw(st.sampled_from([*["num_workers"] * 3, *VALUES]))
        return Act(epoch, step, what, setting, draw(VALUES[setting]) if what == "change" else None)
    return Act(epoch, step, what, value=draw(st.integers(1, 4)) if what == "entry" else None)


@st.composite
def programs(
    draw: st.DrawFn, start_methods: tuple[str, ...] = ("fork",), samplers: tuple[str, ...] = tuple(SAMPLING)
) -> Program:
    """Programs whose untouched run is the same each time."""
    method = draw(st.sampled_from(start_methods))
    names = [each for each in DATASETS if method == "fork" or each not in NOT_SPAWNED]
    dataset = draw(st.sampled_from(["Numbers"] * 4 + names))
    # Forked workers share the position of an open file: two read at random even if nothing is changed.
    shares = dataset == "HoldsFile"
    numbers = (1, 0) if shares else (1, 2, 0, 3)
    workers = draw(st.sampled_from([each for each in numbers if each or method == "fork"]))
    length, batch_size = draw(st.integers(12, 28) | st.integers(1, 12)), draw(st.integers(1, 3))
    batches, epochs = -(-length // batch_size), draw(st.integers(2, 4))
    sampler = draw(st.sampled_from(samplers))
    fails = ["fails"] * (dataset != "Counts")  # where the trials meet that sample too often, it is changed
    ends = draw(st.sampled_from(["well"] * 4 + [*fails, "dies", *["dies_at"] * ("sequential" in samplers)]))
    seed, number = draw(st.none() | st.integers(0, 3)), st.integers(0, length - 1)
    # Two workers read at random where they share a file; and a worker that was to die may be one that the user asked.
    peeks = not shares and ends not in ("dies", "dies_at")
    if ends == "dies_at":
        sampler, workers = "sequential", max(workers, 1)
    leaves = st.dictionaries(st.integers(0, epochs - 1), st.integers(0, batches), max_size=1)
    kinds = ["torch"] * 6 + ["generator", "own"] * (ends in ("well", "fails"))
    kind = draw(st.sampled_from(kinds))
    first = Act(0, draw(st.integers(1, max(batches // 2, 1))), "change", "num_workers", draw(st.integers(1, 3)))
    return Program(
        dataset=dataset,
        length=length,
        sampler=sampler,
        seed=seed,
        batch_size=batch_size,
        drop_last=draw(st.booleans()),
        num_workers=workers,
        prefetch_factor=draw(st.none() | st.integers(1, 3)),
        persistent_workers=draw(st.booleans()) and kind != "own",  # torch wants its own iterator back
        pin_memory=draw(st.booleans()),
        own_collate=draw(st.booleans()),
        start_method=method,
        epochs=epochs,
        fails_at=draw(number) if ends == "fails" else None,
        dies=ends == "dies",
        dies_at=draw(number) if ends == "dies_at" else None,
        # A worker that waits to die in an epoch that was left would do so in the next one, as a second.
        leaves={} if ends == "dies_at" else draw(leaves),
        writes=draw(st.sampled_from([False, False, True])),
        loader=kind,
        acts=(first, *draw(st.lists(acts(epochs, batches, peeks), max_size=5))),
    )


def machine(examples: int) -> Any:
    return settings(
        max_examples=examples,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def compare(program: Program) -> None:
    with nothing_is_left(collect=program.raises):
        plain = run(program, changed=False)
    with nothing_is_left(collect=program.raises):
        changed = run(program, changed=True)
    check(program, plain, changed)


def check(program: Program, plain: Outcome, changed: Outcome) -> None:
    only = (lambda seen: seen) if changed.is_exact else numbers_only
    if program.dies and changed.seen[-1][-1:] == ["dead"]:  # torch's handler may raise at any place of the program
        *whole, last = only(changed.seen)
        plainly = only(plain.seen)
        assert whole == plainly[: len(whole)]
        assert last[:-1] == plainly[len(whole)][: len(last) - 1]
        return
    assert only(changed.seen) == only(plain.seen)
    assert changed.random == plain.random
    assert changed.settings == plain.settings


@machine(15)
@given(programs())
def test_changes_leave_a_program_as_it_was(program: Program) -> None:
    compare(program)


@pytest.mark.matrix
@pytest.mark.parametrize("sampler", SAMPLING)
@machine(40)
@given(st.data())
def test_changes_leave_many_programs_as_they_were(sampler: str, data: st.DataObject) -> None:
    compare(data.draw(programs(samplers=(sampler,))))


@pytest.fixture
def slow_starts() -> None:
    """The servers that these start methods begin with stay."""
    for method in ("forkserver", "spawn"):
        run(Program(num_workers=1, start_method=method), changed=False)


@pytest.mark.matrix
@pytest.mark.usefixtures("slow_starts")
@machine(3)
@given(programs(("forkserver", "spawn")))
def test_changes_leave_programs_with_slow_starts_as_they_were(program: Program) -> None:
    compare(program)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_batch_read_by_the_user_meanwhile_leaves_the_generator_as_it_was(workers: int) -> None:
    """A permutation that is drawn whole has torch draw from the generator once more: more workers get there sooner."""
    acts = (Act(0, 0, "change", "num_workers", 4), Act(0, 1, "peek"), Act(1, 1, "peek"))
    compare(Program(length=8, batch_size=1, sampler="shuffle", seed=1, num_workers=workers, epochs=3, acts=acts))


def test_persistent_workers_end_with_their_loader() -> None:
    """Not when garbage is collected: torch would wait five seconds for each."""
    compare(Program(num_workers=2, persistent_workers=True, acts=(Act(0, 1, "change", "num_workers", 3),)))


def test_a_dataset_goes_with_its_loader() -> None:
    compare(Program("HoldsFile", acts=(Act(0, 1, "change", "num_workers", 2),)))


def test_workers_that_live_on_leave_the_loader_s_number_as_it_was_restored() -> None:
    acts = (Act(0, 1, "change", "prefetch_factor", 4), Act(1, 2, "peek"), Act(1, 5, "change", "num_workers", 3))
    sampling: dict[str, Any] = {"length": 19, "sampler": "without_length", "drop_last": True}
    compare(
        Program(
            **sampling, num_workers=1, prefetch_factor=2, persistent_workers=True, epochs=3, leaves={1: 10}, acts=acts
        )
    )


def test_where_workers_live_on_a_dataset_that_changes_is_brought_to_new_ones() -> None:
    acts = (Act(0, 1, "change", "persistent_workers", True), Act(2, 0, "version"))
    compare(Program(num_workers=1, epochs=5, acts=acts))


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    setting = draw(st.sampled_from(["num_workers", "prefetch_factor", "persistent_workers"]))
    return {
        "finding": {setting: draw(VALUES[setting].filter(bool))},
        "before": draw(st.integers(5, 12)),
        "after": draw(st.sampled_from([FAST, SLOW])),
        "draws": draw(st.sampled_from(["", "", "torch", "numpy", "random"])),
        "length": draw(st.integers(20, 60)),
        "loader": {
            "num_workers": draw(st.integers(0, 3)),
            "batch_size": draw(st.integers(1, 3)),
            "generator": draw(st.none() | st.integers(0, 3)),
        },
    }


@pytest.mark.matrix
@machine(30)
@given(trainings())
def test_trainings_under_autofix_are_as_without(training: dict[str, Any]) -> None:
    """The same samples, order and weights."""

    def made() -> Any:
        given = dict(training["loader"])
        if given["generator"] is not None:
            given["generator"] = torch.Generator().manual_seed(given["generator"])
        return loader(Numbers(training["length"], training["draws"]), **given)

    detector = script([finding(**training["finding"])], training["after"], before=training["before"])
    with tempfile.TemporaryDirectory() as folder:
        autofix = Run(Path(folder), detector, made())
        assert autofix.left == []
        assert autofix.same_as_without(made)


def runs(pid: int) -> bool:
    """Whether a process has not ended; nobody may be there to wait for an orphan."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "name",
    ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.matrix)],  # its workers notice within seconds
)
def test_a_signal_ends_the_added_workers_as_well(name: str) -> None:
    code = f"""if True:
        import os, signal
        from lightning_gpuopt.compat.dataloader import workers_of
        from lightning_gpuopt.tuning.managed import ManagedLoader
        from tests.loaders.programs import Program, make_loader
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loader = make_loader(Program(length=200, num_workers=1))
        managed = ManagedLoader(loader, local_ranks=1)
        iterator = managed.iterator_wanted()(lambda make: make())
        next(iterator)
        assert managed.change("num_workers", 3, iterator)
        print(*(worker.pid for worker in workers_of(iterator)), flush=True)
        for _ in range(12):  # torch's watch for the end of its parent begins a moment after a worker does
            next(iterator)
        os.kill(os.getpid(), signal.{name})
        list(iterator)
    """
    files = shared_files()
    ended = run_code(code)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 4, ended.stderr
    assert ended.returncode != 0
    wait_for(lambda: not any(map(runs, pids)))
    wait_for(lambda: shared_files() <= files)

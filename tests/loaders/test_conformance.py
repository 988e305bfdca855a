"""A real Trainer trains from every kind of loader that needs no library of its own."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.lanes import few
from tests.loaders import conformance
from tests.loaders.kinds import BATCH, CORE, Around, Collate, Kind, Mapped, Prepare, nodes

pytestmark = [
    pytest.mark.usefixtures("quick_checks"),  # where garbage is collected, torch waits for each worker in it
    pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:.*IterableDataset.*"),
]
kinds = pytest.mark.parametrize("kind", CORE.values(), ids=CORE)


@pytest.mark.parametrize("kind", few("map-0 stateful-1 nodes-threads around combined-own", CORE))
def test_everything_is_as_without(tmp_path: Path, kind: Kind) -> None:
    conformance.everything_is_as_without(tmp_path, kind)


@pytest.mark.timed
@kinds
def test_the_slow_line_is_found(tmp_path: Path, kind: Kind) -> None:
    conformance.the_slow_line_is_found(tmp_path, kind)


@pytest.mark.timed
@kinds
def test_nothing_is_found_where_nothing_waits(tmp_path: Path, kind: Kind) -> None:
    conformance.nothing_is_found_where_nothing_waits(tmp_path, kind)


@pytest.mark.timed
def test_of_a_graph_s_processes_the_cause_is_found_and_not_the_line(tmp_path: Path) -> None:
    try:
        report = conformance.report_of(tmp_path, nodes(Prepare(conformance.SLOW_S), workers=2, method="process"))
    finally:  # forked inside of fit they have Lightning's handler of SIGTERM: Python would wait for them as it exits
        for process in multiprocessing.active_children():
            process.kill()
    found = report.findings[0]
    assert (found.cause, found.evidence["work"], found.evidence["num_workers"]) == ("slow_storage", "processes", 2)
    assert "where" not in found.evidence
    assert any("its worker processes do not belong to a DataLoader" in note for note in report.notes)


@pytest.mark.timed
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "around"])
def test_a_slow_collate_is_found(tmp_path: Path, wrapped: bool) -> None:
    loader = DataLoader(Mapped(Prepare()), BATCH, num_workers=1, collate_fn=Collate(0.02))
    found = conformance.report_of(tmp_path, Around(loader) if wrapped else loader).findings[0]
    assert found.cause == "worker_transfer"
    assert "Collate.__call__ (kinds.py:" in str(found.evidence["where"])


CHANGED = {
    **{name: {"num_workers"} for name in ("map-1", "around", "around-after", "lmdb-1", "combined-map-1")},
    **{name: {"prefetch_factor"} for name in ("stream-1", "stateful-1")},
}
"""What AutoFix changes, by kind; nothing of the others."""

MEASURED = ("map-0", "lmdb-0", "combined-map-0")
"""Whether first workers pay is measured."""


@pytest.mark.parametrize(
    "name", few("map-1 stream-1 around combined-map-1", {name: name for name in CORE if name not in MEASURED})
)
def test_what_autofix_changes_keeps_everything(tmp_path: Path, name: str) -> None:
    assert conformance.changes_keep_everything(tmp_path, CORE[name]) == CHANGED.get(name, set())

"""The same with loaders of libraries, in an environment that has them: ``make test-loaders``."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.loaders import conformance
from tests.loaders.kinds import BATCH, LIBRARIES, Kind, Prepare

pytestmark = [
    pytest.mark.loaders,
    pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:.*IterableDataset.*", "ignore:.*not writable.*"),
]
kinds = pytest.mark.parametrize("kind", LIBRARIES.values(), ids=LIBRARIES)


@kinds
def test_everything_is_as_without(tmp_path: Path, kind: Kind) -> None:
    conformance.everything_is_as_without(tmp_path, kind)


@kinds
def test_the_slow_line_is_found(tmp_path: Path, kind: Kind) -> None:
    conformance.the_slow_line_is_found(tmp_path, kind)


@kinds
def test_nothing_is_found_where_nothing_waits(tmp_path: Path, kind: Kind) -> None:
    conformance.nothing_is_found_where_nothing_waits(tmp_path, kind)


STREAMS = ("litdata-2", "mds-2", "webdataset-2", "datasets-stream-2")
CHANGED = {
    **{name: {"prefetch_factor"} for name in (*STREAMS, "combined-webdataset")},
    "datasets-map-1": {"num_workers"},
}
"""What AutoFix changes, by kind; nothing of the others."""


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_autofix_changes_keeps_everything(tmp_path: Path, name: str) -> None:
    assert conformance.changes_keep_everything(tmp_path, LIBRARIES[name]) == CHANGED.get(name, set())


def test_what_a_stream_downloads_is_a_note(tmp_path: Path) -> None:
    from streaming import StreamingDataset

    LIBRARIES["mds-2"].make(tmp_path, Prepare())
    cache = tmp_path / "cache"
    dataset = StreamingDataset(remote=str(tmp_path / "mds"), local=str(cache), batch_size=BATCH)
    notes = conformance.report_of(tmp_path, DataLoader(dataset, BATCH)).notes
    assert any(f"in the cache folder {cache} than before training" in note for note in notes)

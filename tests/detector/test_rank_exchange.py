"""What ranks send to rank 0, and when."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_ranks_of_which_one_begins_anew_still_end_their_windows_together() -> None:
    first, second = run_ranks("tests.callbacks.watched_rank:grown", 2)
    assert (first["began_anew"], second["began_anew"]) == (None, 8)
    assert first["sent"] == second["sent"]
    assert len(first["sent"]) == 3

"""The post-mortem in JSON, and in its file."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from lightning_gpuopt.postmortem.record import Ended, PostMortem, Process

WHOLE = PostMortem(
    "killed", Process(1, 3, 77), "f (a.py:1)", "a.jpg", 9, {"rss_bytes": 5, "curve": [[1.0, 5]]}, "l", "a", "t"
)


@pytest.mark.parametrize("post", [WHOLE, PostMortem("ok"), PostMortem("hang", Process(0), index=4)])
def test_what_is_written_is_read_back(post, tmp_path):
    assert PostMortem.from_json(post.to_json()) == post
    post.save(tmp_path / "made" / "post-mortem.json")
    assert PostMortem.from_json((tmp_path / "made" / "post-mortem.json").read_text()) == post


def test_the_keys_are_the_contracts():
    assert json.loads(WHOLE.to_json()) == {
        "ended": "killed",
        "process": {"rank": 1, "worker": 3, "pid": 77},
        "where": "f (a.py:1)",
        "index": "a.jpg",
        "signal": 9,
        "memory": {"rss_bytes": 5, "curve": [[1.0, 5]]},
        "likely": "l",
        "advice": "a",
        "text": "t",
    }
    assert len(get_args(Ended)) == 12


BROKEN = {
    "empty": "",
    "cut": WHOLE.to_json()[:-9],
    "a-list": "[]",
    "nothing": "{}",
    "another-end": json.dumps({"process": None, "ended": "bored"}),
    "unknown-key": json.dumps({"process": None, "ended": "ok", "more": 1}),
    "process-a-list": json.dumps({"process": [1], "ended": "ok"}),
    "text-a-number": json.dumps({"process": None, "ended": "ok", "text": 5}),
    "memory-a-list": json.dumps({"process": None, "ended": "ok", "memory": [1]}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_post_mortem_is_an_error(text):
    with pytest.raises(ValueError, match="expected a post-mortem in JSON"):
        PostMortem.from_json(text)


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "post-mortem.json"
    PostMortem("ok").save(path)
    before = path.read_text()

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="no space left"):
        WHOLE.save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]

"""A post-mortem as JSON, and as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_gpuopt.postmortem.record import PostMortem, Process
from lightning_gpuopt.postmortem.wording import key, name_of, ranks, size

WHOLE = PostMortem(
    *("killed", Process(1, 3, 4711), "f (a.py:1)", 7, 9),
    *({"rss_bytes": 1, "curve_of": "process", "curve": [[0.5, 1]]}, "likely", "advice", "text"),
)


@pytest.mark.parametrize("post", [WHOLE, PostMortem("unknown")])
def test_what_was_saved_is_read(post: PostMortem, tmp_path: Path) -> None:
    post.save(tmp_path / "made" / "post-mortem.json")
    assert PostMortem.from_json((tmp_path / "made" / "post-mortem.json").read_text()) == post
    assert [each.name for each in (tmp_path / "made").iterdir()] == ["post-mortem.json"]


def test_the_keys_of_the_json() -> None:
    data = json.loads(PostMortem("ok").to_json())
    assert list(data) == [
        *("ended", "process", "where", "index", "signal", "memory", "likely", "advice", "text"),
    ]
    assert json.loads(WHOLE.to_json())["process"] == {"rank": 1, "worker": 3, "pid": 4711}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ended": "ok"}', '{"ended": "gone", "process": null}'])
def test_what_is_no_post_mortem_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a post-mortem in JSON"):
        PostMortem.from_json(text)


def test_words() -> None:
    assert [size(each) for each in (0, 1023, 1536, 5 * 2**30, 300 * 2**20)] == [
        *("0 bytes", "1,023 bytes", "1.5 KiB", "5.0 GiB", "300 MiB"),
    ]
    assert [ranks(each) for each in ([5], [0, 1, 2, 4], [7, 3, 4, 0])] == [
        *("rank 5", "ranks 0-2 and 4", "ranks 0, 3-4 and 7"),
    ]
    assert (key(48213), key("a.jpg")) == ("48,213", "a.jpg")
    assert (name_of(Process(0, None, 7)), name_of(Process(2, 1), 4)) == (
        *("the training process (pid 7)", "worker 1 of rank 2"),
    )

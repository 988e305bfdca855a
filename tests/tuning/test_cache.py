from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_gpuopt.tuning import cache
from lightning_gpuopt.tuning.cache import choice_key, load_choice, store_choice
from lightning_gpuopt.tuning.workers import NumWorkersResult, Trial
from tests.tuning.datasets import Broken, Numbers, Stream

RESULT = NumWorkersResult(
    6, (Trial(1, 30.0, 0.03), Trial(6, 170.0, 0.001)), "consumer", 170.0, prefetch_factor=2, persistent_workers=True
)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert load_choice(folder, "key") is None
    assert store_choice(folder, "key", RESULT)
    assert load_choice(folder, "key") == RESULT
    assert load_choice(str(folder), "other") is None
    assert [file.name for file in folder.iterdir()] == ["num-workers-key.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"trials": 3}', '{"trials": [{"workers": 1}]}', "\udcff", "many", "negative"]
)
def test_a_file_that_holds_no_choice_is_left_aside(tmp_path: Path, text: str) -> None:
    store_choice(tmp_path, "key", RESULT)
    file = tmp_path / "num-workers-key.json"
    fields = json.loads(file.read_text())
    changed = {"many": {**fields, "num_workers": "6"}, "negative": {**fields, "num_workers": -1}}
    text = json.dumps(changed[text]) if text in changed else text
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert load_choice(tmp_path, "key") is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not store_choice(tmp_path / "file", "key", RESULT)
    assert load_choice(tmp_path / "file", "key") is None


def test_a_failed_write_leaves_the_old_choice_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_choice(tmp_path, "key", RESULT)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    assert not store_choice(tmp_path, "key", RESULT)
    assert load_choice(tmp_path, "key") == RESULT
    assert [file.name for file in tmp_path.iterdir()] == ["num-workers-key.json"]


def key(loader: DataLoader[Any], **question: Any) -> str:
    return choice_key(loader, **{"step_time_s": 0.05, **question})


def test_the_key_is_that_of_the_data_the_settings_the_question_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key(DataLoader(Numbers(), 4))
    assert key(DataLoader(Numbers(), 4, shuffle=True)) == first
    assert key(DataLoader(Numbers(size=5), 4)) == first  # as random crops differ from run to run
    others = [
        key(DataLoader(Numbers(999), 4)),
        key(DataLoader(Numbers(size=4000), 4)),
        key(DataLoader(Broken(), 4)),
        key(DataLoader(Numbers(), 5)),
        key(DataLoader(Numbers(), 4, collate_fn=len)),
        key(DataLoader(Numbers(), 4), step_time_s=0.06),
        key(DataLoader(Stream(3), 4)),
    ]
    monkeypatch.setattr(cache, "usable_cpus", lambda: 96.0)
    others.append(key(DataLoader(Numbers(), 4)))
    assert len({first, *others}) == len(others) + 1

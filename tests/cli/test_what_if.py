"""``lightning-gpuopt what-if``: the forecast of a saved report, and one line for what cannot be said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.diagnosis.render.what_if import render_forecast, render_scaling
from lightning_gpuopt.diagnosis.scaling import given_link, scaling
from lightning_gpuopt.diagnosis.what_if import WhatIf, what_if
from tests.diagnosis.reports import before
from tests.diagnosis.test_scaling import one_gpu
from tests.diagnosis.test_what_if import COMPUTING

REPORT = replace(before(), loader_costs=COMPUTING, environment={"batch_size": "32"})
ON_ONE_GPU = one_gpu()
ASKED = "--num-workers 12 --prefetch-factor 4 --cpus 16 --decode-speedup 1.9 --batch-size 512"
CHANGE = WhatIf(12, 4, 16.0, 1.9, 512)


@pytest.fixture(autouse=True)
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports in the working folder, ``old.json`` of an earlier version, ``bare.json`` of one that did not keep the
    bytes of gradients; a terminal of 70 columns."""
    REPORT.save_json(tmp_path / "report.json")
    before().save_json(tmp_path / "old.json")
    ON_ONE_GPU.save_json(tmp_path / "one.json")
    bare = {name: value for name, value in ON_ONE_GPU.environment.items() if name != "gradient_bytes"}
    replace(ON_ONE_GPU, environment=bare).save_json(tmp_path / "bare.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "70")


def test_the_forecast_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "report.json", *ASKED.split()]) == 0
    assert capsys.readouterr() == (f"{render_forecast(what_if(REPORT, CHANGE), 70)}\n", "")


def test_the_forecast_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "report.json", *ASKED.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (json.loads(json.dumps(asdict(what_if(REPORT, CHANGE)))), "")


def test_several_gpus_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "one.json", "--ranks", "4"]) == 0
    assert capsys.readouterr() == (f"{render_scaling(scaling(ON_ONE_GPU, 4), 70)}\n", "")


def test_several_gpus_over_a_given_link_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks 2 --cpus 8 --link-gb-per-s 10 --gradient-bytes 1000 --json"
    assert main(["what-if", "bare.json", *asked.split()]) == 0
    found = scaling(ON_ONE_GPU, 2, WhatIf(cpus=8.0), link=given_link(10.0), gradient_bytes=1000)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(found)))


def test_no_workers_is_a_number_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "report.json", "--num-workers", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit"] == "training_process"


def test_the_largest_numbers_have_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--num-workers 4096 --prefetch-factor 65536 --batch-size 1000000000"
    assert main(["what-if", "report.json", *arguments.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["num_workers"] == 4096


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "report.json",
            "what-if: expected a change, got none; give one or more of --num-workers, --prefetch-factor, --cpus, "
            "--decode-speedup, --batch-size, --ranks",
        ),
        (
            "nowhere.json --cpus 4",
            "expected a report.json, got nowhere.json: No such file or directory; "
            "StallDetector leaves one in its report_dir",
        ),
        (
            "old.json --cpus 4",
            "old.json: expected a report that says what its loader costs, got one that does not: it is from an earlier "
            "version, its loader is not a DataLoader, or no step came after the warm-up; record one with StallDetector "
            "and give that",
        ),
        ("one.json --link-gb-per-s 5", "--link-gb-per-s: expected --ranks with it, got none; give --ranks N"),
        ("one.json --gradient-bytes 5", "--gradient-bytes: expected --ranks with it, got none; give --ranks N"),
        (
            "report.json --ranks 2",
            "report.json: expected a report of a run on one GPU, got one of unknown ranks on unknown; record one with "
            "StallDetector and give that",
        ),
        (
            "bare.json --ranks 2",
            "bare.json: expected a report that says how many bytes of gradients a step has, got one that does not; "
            "give --gradient-bytes: in float32, four per trained parameter",
        ),
    ],
)
def test_what_cannot_be_said_is_one_line_and_exit_code_2(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"error: {complaint}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "--num-workers -1",
        "--num-workers two",
        "--num-workers 4097",
        "--num-workers 30000000",
        "--prefetch-factor 0",
        "--prefetch-factor 2000000000",
        "--cpus 0",
        "--cpus nan",
        "--decode-speedup 0",
        "--batch-size 0",
        "--batch-size 2000000000",
        "--ranks 1",
        "--ranks 65537",
        "--ranks two",
        "--link-gb-per-s 0",
        "--link-gb-per-s nan",
        "--gradient-bytes 0",
    ],
)
def test_a_wrong_number_is_one_line_and_exit_code_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", "report.json", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {arguments.split()[0]}: ")


@pytest.mark.parametrize(
    ("name", "value"), [("receive_s", [1]), ("batches", "x"), ("usable_cpus", 0), ("counts", [1]), ("num_workers", -1)]
)
@pytest.mark.parametrize("command", ["what-if damaged.json --cpus 8", "report damaged.json"])
def test_damaged_costs_are_one_line_and_exit_code_2(
    command: str, name: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(REPORT.to_json())
    data["loader_costs"][name] = value
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: damaged.json: expected a whole stall report, got one with a part missing or strange")


@pytest.mark.parametrize("costs", [{"free_cpus": 0.0}, {"edges_s": (0.0, 0.0), "counts": (5,)}])
def test_what_was_measured_as_nothing_has_a_forecast(
    costs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(REPORT, loader_costs=replace(COMPUTING, **costs)).save_json(tmp_path / "report.json")
    assert main(["what-if", "report.json", "--num-workers", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["step_s"]) == 3


def test_the_largest_ranks_have_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--ranks 65536 --num-workers 4096 --cpus 0.00001 --link-gb-per-s 0.001 --gradient-bytes 1000000000000000"
    assert main(["what-if", "one.json", *asked.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["links"][0]["speedup"][1] < 1


@pytest.mark.parametrize("change", ["--cpus 8", "--ranks 2"])
def test_it_imports_neither_torch_nor_lightning(change: str) -> None:
    code = (
        "import sys; from lightning_gpuopt.cli import main;"
        f"main(['what-if', 'one.json', *{change.split()}]);"
        "print({'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"

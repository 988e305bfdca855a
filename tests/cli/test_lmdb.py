"""``lightning-gpuopt lmdb``: what it prints, and its exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.cli.lmdb import _as_switches, in_words
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import image_file, stored, write_folder


def run(command: str) -> int:
    return main(["lmdb", *command.split()])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """``images``, a folder of five JPEGs in two classes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_folder(tmp_path / "images", {"a": 3, "b": 2})


def test_build_prints_what_came_of_it(folder: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build images out --num-proc 2") == 0
    size = LMDBDataset("out").info.num_bytes / 1024
    assert capsys.readouterr() == (f"out: 5 samples, {size:.1f} KiB, 1 shard\n", "")
    assert [image for image, _ in stored(Path("out"))] == list(folder.values())


def test_skipped_images_are_a_warning_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    Path("images/a/00001.jpg").write_bytes(b"")
    assert run("build images out") == 0
    out, err = capsys.readouterr()
    assert out.endswith(", 1 shard, 1 skipped\n")
    assert err.startswith("warning: ")
    assert err.endswith("out/skipped.csv lists them\n")
    assert err.count("\n") == 1
    assert run("build images strict --strict") == 1
    assert capsys.readouterr().err.startswith(
        "error: StorageError: images: a/00001.jpg: cannot be decoded (it is empty)"
    )
    assert run("info out") == 0
    assert "  skipped     1 (listed in skipped.csv)\n" in capsys.readouterr().out


def test_every_switch_reaches_the_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = []

    def instead(*args: object, **options: object) -> object:
        given.append((args, options))
        return build_lmdb([1], "other", progress=False, overwrite=True)

    monkeypatch.setattr("lightning_gpuopt.storage.writing.build.build_lmdb", instead)
    switches = "--num-proc 3 --part 1/4 --resume --overwrite --strict --allow-pickle --image-size 64 --image-quality 80"
    switches += ' --check decode --shuffle-seed 0 --max-skipped 0.5 --kinds {"jpg":"exact"}'
    assert run(f"build SRC DST {switches} --no-progress") == 0
    assert run("build SRC DST") == 0
    plain = {"num_proc": 1, "part": None, "progress": True, "resume": False, "overwrite": False, "strict": False}
    plain |= {"allow_pickle": False, "image_size": None, "image_quality": 90, "check": "header", "shuffle_seed": None}
    plain |= {"kinds": None, "max_skipped": 0.01}
    every = {"num_proc": 3, "part": (1, 4), "progress": False, "resume": True, "overwrite": True, "strict": True}
    every |= {"allow_pickle": True, "image_size": 64, "image_quality": 80, "check": "decode", "shuffle_seed": 0}
    every |= {"kinds": {"jpg": "exact"}, "max_skipped": 0.5}
    assert given == [(("SRC", "DST"), every), (("SRC", "DST"), plain)]
    assert capsys.readouterr().out.splitlines()[0].startswith("DST: part 1/4: 1 samples, ")


def test_parts_are_joined_by_a_last_call(folder: dict[str, bytes]) -> None:
    assert run("build images out --part 0/2") == 0
    assert run("build images out --part 1/2") == 0
    assert not Path("out").exists()
    assert run("build images out --resume") == 0
    assert len(stored(Path("out"))) == 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("build nowhere out", "nowhere: there is no such file or folder; pass the path of a source"),
        ("build empty out", "empty: expected class subfolders"),
        ("build images images/out", "images/out: it is inside the source"),
        ("build images full", "full: it exists already; give --overwrite to replace it"),
        ("build images full --overwrite", "full: it holds 'mine.txt', which is not part of a lightning-gpuopt dataset"),
        ("build images out --part 2/2", "--part: expected I/N with 0 <= I < N, such as 0/4, got 2/2"),
        ("build images out --num-proc 0", "--num-proc: Not of type PositiveInt"),
        ("build images out --image-quality 96", "--image-quality: Not of type 1..95"),
        ("build images", "required"),
        ("info nowhere", "nowhere: there is no such directory"),
        ("verify nowhere", "nowhere: there is no such directory"),
        ("", 'action" to be one of {build,verify,info}'),
    ],
)
def test_wrong_usage_and_paths_are_one_line_and_exit_code_2(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err
    assert not Path("out").exists()
    assert not Path(".out.building").exists()


def test_a_pickled_lmdb_needs_its_switch(capsys: pytest.CaptureFixture[str]) -> None:
    import lmdb

    with lmdb.open("old", map_size=1 << 20) as env, env.begin(write=True) as transaction:
        transaction.put(b"0", pickle.dumps("raw"))
    assert run("build old out") == 1
    assert "--allow-pickle" in capsys.readouterr().err
    assert run("build old out --allow-pickle") == 0


def test_errors_speak_of_switches() -> None:
    text = "give overwrite=True without resume=True; allow_pickle=True or strict=True; x=True"
    assert _as_switches(text) == "give --overwrite without --resume; --allow-pickle or --strict; x=True"
    assert _as_switches("more than max_skipped=0.01 allows") == "more than --max-skipped=0.01 allows"


@pytest.mark.matrix
def test_ctrl_c_is_exit_code_130_and_says_how_to_go_on(folder: dict[str, bytes]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    with Path("images/a/00001.jpg").open("r+b") as held:
        # Whoever opens the file waits until the lease on it is given up, and a signal tells that it does.
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        command = [sys.executable, "-m", "lightning_gpuopt", "lmdb", "build", "images", "out"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert signal.sigtimedwait({signal.SIGIO}, 60) is not None
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "interrupted; --resume continues\n")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    assert process.returncode == 130
    assert run("build images out --resume") == 0
    assert [image for image, _ in stored(Path("out"))] == list(folder.values())


def test_ctrl_c_before_the_first_sample_says_it_too(folder: dict[str, bytes]) -> None:
    Path("slow").mkdir()
    Path("slow/torch.py").write_text("import signal\nprint('imported', flush=True)\nsignal.pause()\n")
    command = [sys.executable, "-m", "lightning_gpuopt", "lmdb", "build", "images", "out", "--num-proc", "2"]
    path = os.pathsep.join(["slow", *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "interrupted; --resume continues\n")
    assert process.returncode == 130
    assert run("build images out --resume") == 0
    assert [image for image, _ in stored(Path("out"))] == list(folder.values())


def test_verify_finds_a_flipped_bit(capsys: pytest.CaptureFixture[str], folder: dict[str, bytes]) -> None:
    run("build images out")
    capsys.readouterr()
    assert run("verify out --decode") == 0
    assert capsys.readouterr() == ("out: 5 samples read, no problem\n", "")
    shard = Path("out/shard-00000.mdb")
    data = bytearray(shard.read_bytes())
    data[data.index(folder["a/00002.jpg"]) + 200] ^= 4
    shard.write_bytes(data)
    assert run("verify out --num-proc 2") == 1
    out, err = capsys.readouterr()
    assert any(line.startswith("sample 2: ") for line in out.splitlines())
    assert "problem" in out.splitlines()[-1]
    assert err == ""


def test_info_says_what_a_dataset_holds(capsys: pytest.CaptureFixture[str]) -> None:
    run("build images out")
    capsys.readouterr()
    manifest = LMDBDataset("out").manifest
    assert run("info out") == 0
    assert capsys.readouterr().out.splitlines() == [
        "out",
        "  samples     5",
        f"  a sample    {manifest.num_bytes // 5:,} B on average",
        "  content     (image, int)",
        f"  size        {manifest.shards[0].file_bytes / 1024:.1f} KiB in 1 shard",
        "  classes     2 (a, b)",
        f"  built from  kind image folder, path images, num samples 5, built with {manifest.source['built_with']}",
    ]
    assert run("info out --json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_samples"], facts["num_bytes"], facts["classes"]) == (5, manifest.num_bytes, ["a", "b"])
    assert facts["structure"] == ["tuple", [["image"], ["int"]]]


def test_a_structure_in_words(tmp_path: Path) -> None:
    sample = {"x": np.zeros((2, 3), np.float32), "y": [np.int16(1), "text", None], "z": (b"", 1.5)}
    build_lmdb([sample], "out", progress=False)
    structure = LMDBDataset("out").manifest.structure
    assert structure is not None
    assert in_words(structure) == "{x: array <f4 [2, 3], y: [<i2 scalar, str, none], z: (bytes, float)}"


def test_a_damaged_manifest_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    run("build images out")
    Path("out/manifest.json").write_text("{")
    assert run("info out") == 1
    assert capsys.readouterr().err.startswith("error: DamagedError: out/manifest.json: not a readable manifest")


def test_the_image_size_is_that_of_the_result() -> None:
    Path("images/b/00000.jpg").write_bytes(image_file(9, size=(64, 48)))
    assert run("build images out --image-size 24") == 0
    assert LMDBDataset("out")[3][0].size == (32, 24)


def test_resume_of_a_finished_build_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build images out") == 0
    line = capsys.readouterr().out
    for switches in ("--resume", "--resume --no-progress"):
        assert run(f"build images out {switches}") == 0
        assert capsys.readouterr() == (f"out: finished already, nothing to do\n{line}", "")
    assert run("build images out --resume --part 0/2") == 0
    assert capsys.readouterr().out.startswith("out: finished already, nothing to do\n")
    assert run("build images out --resume --image-size 8") == 2
    error = capsys.readouterr().err
    assert "was built from something else (image_size was null, now 8" in error
    assert "give --overwrite to replace it" in error


@pytest.mark.parametrize("switch", ["", " --json"])
def test_info_of_a_dataset_with_damaged_files_names_them(capsys: pytest.CaptureFixture[str], switch: str) -> None:
    Path("images/a/00001.jpg").write_bytes(b"")
    run("build images out")
    capsys.readouterr()

    def refused(file: str, text: str) -> None:
        assert run("info out" + switch) == 1
        out, err = capsys.readouterr()
        assert "samples" in out
        assert err.startswith(f"error: out/{file}: {text}")
        assert err.count("\n") == 1

    Path("out/skipped.csv").rename("skipped.csv")
    refused("skipped.csv", "this file is missing")
    Path("skipped.csv").rename("out/skipped.csv")
    shard, table = Path("out/shard-00000.mdb"), Path("out/shard-00000.tab")
    data = table.read_bytes()
    table.write_bytes(data[:-1])
    refused(table.name, f"{len(data) - 1} bytes long; expected {len(data)}")
    table.unlink()
    refused(table.name, "the shard's record table is missing")
    os.truncate(shard, 4096)
    refused(shard.name, "4096 bytes long, but")
    shard.unlink()
    refused(shard.name, "this shard is missing")

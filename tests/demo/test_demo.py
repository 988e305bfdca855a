from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_gpuopt.cli import demo as demo_module
from lightning_gpuopt.cli import main
from lightning_gpuopt.cli._parser import UsageError
from lightning_gpuopt.cli.demo import MARK
from lightning_gpuopt.demo import data
from lightning_gpuopt.demo.data import ForeignFolderError, Recipe, is_whole, make
from tests.lanes import combinations

SMALL = Recipe(images=128)
CLASSES = list(data.PHOTOGRAPHS)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of ``SMALL``; for reading."""
    folder = tmp_path_factory.mktemp("demo") / "data"
    make(folder, SMALL)
    return folder


def checksums(folder: Path) -> dict[str, int]:
    return json.loads((folder / "manifest.json").read_text())["crc32"]


def demo(tmp_path: Path, *arguments: str) -> list[str]:
    """A demo of a second or so: 120 training images in 15 steps an epoch."""
    quick = ["--images", "128", "--batch-size", "8", "--epochs", "1", "--accelerator", "cpu"]
    return ["demo", "--data-dir", f"{tmp_path}/data", "--output-dir", f"{tmp_path}/run", *quick, *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, where Ctrl-C works even if it is ignored here (as under ``nohup``)."""
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_gpuopt", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def stop_while_images_are_made(folder: Path, number: signal.Signals) -> subprocess.Popen[str]:
    process = start("demo", "--images", "100000", "--data-dir", str(folder), "--output-dir", f"{folder}-run")
    while not any(folder.parent.glob("*/val/*/*.jpg")):
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    return process


def test_the_classes_take_turns_and_one_image_in_sixteen_is_for_validation(photographs: Path) -> None:
    files = sorted(photographs.glob("*/*/*.jpg"))
    counts = Counter((file.parent.parent.name, file.parent.name) for file in files)
    assert counts == {("train", name): 15 for name in CLASSES} | {("val", name): 1 for name in CLASSES}
    assert sorted(str(file.relative_to(photographs)) for file in files) == sorted(checksums(photographs))


def test_the_images_are_jpegs_of_the_promised_size_and_quality(photographs: Path) -> None:
    reference = io.BytesIO()
    Image.new("RGB", (8, 8)).save(reference, "JPEG", quality=90)
    tables = Image.open(reference).quantization  # type: ignore[attr-defined]
    for file in photographs.glob("*/*/*.jpg"):
        with Image.open(file) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (500, 375))
            assert image.quantization == tables  # type: ignore[attr-defined]


@pytest.mark.matrix
def test_the_seed_alone_decides_the_crops(photographs: Path, tmp_path: Path) -> None:
    make(tmp_path / "same", SMALL)
    make(tmp_path / "other", Recipe(images=128, seed=1))
    assert checksums(tmp_path / "same") == checksums(photographs)
    ours, others = checksums(photographs), checksums(tmp_path / "other")
    assert [name for name in ours if ours[name] == others[name]] == []


def test_no_crop_is_in_the_data_twice(photographs: Path) -> None:
    assert len(set(checksums(photographs).values())) == 128


def test_progress_is_told_once_for_each_image(tmp_path: Path) -> None:
    told: list[None] = []
    make(tmp_path / "data", SMALL, on_image=lambda: told.append(None))
    assert len(told) == 128


def test_every_photograph_comes_from_the_package_of_scikit_image() -> None:
    sizes = {name: photograph.size for name, photograph in data.load_photographs().items()}
    assert sizes == {
        "astronaut": (512, 512),
        "cat": (451, 300),
        "coffee": (600, 400),
        "galaxies": (1000, 872),
        "motorcycle": (741, 500),
        "retina": (1411, 1411),
        "rocket": (640, 427),
        "tissue": (512, 512),
    }


def test_only_the_same_recipe_is_taken_for_whole(photographs: Path, tmp_path: Path) -> None:
    assert is_whole(photographs, SMALL)
    assert not is_whole(photographs, Recipe(images=128, seed=1))
    assert not is_whole(photographs, Recipe(images=136))
    assert not is_whole(tmp_path / "missing", SMALL)
    assert not is_whole(tmp_path, SMALL)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def change_one_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


@combinations("change_one_byte", damage={"unlink": Path.unlink, "shorten": shorten, "change_one_byte": change_one_byte})
def test_a_damaged_folder_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make(folder, SMALL)
    before = checksums(folder)
    damage(folder / "val/retina/00005.jpg")
    assert not is_whole(folder, SMALL)
    make(folder, SMALL)
    assert is_whole(folder, SMALL)
    assert checksums(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"name": "my project"}'])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(
    manifest: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    with pytest.raises(ForeignFolderError):
        is_whole(folder, SMALL)
    assert main(demo(tmp_path)) == 2
    assert capsys.readouterr().err == (
        "error: --data-dir: expected a new or empty folder, or one of the demo's; "
        f"{folder} is not a folder created by the demo\n"
    )
    assert (folder / "precious.txt").read_text() == "mine"


def test_reports_of_somebody_else_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "report.json").write_text("mine")
    assert main(demo(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"error: --output-dir: expected a new folder, or one of the demo's, got {folder}, whose report.json the demo "
        "did not write; choose another\n"
    )
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    assert (folder / "report.json").read_text() == "mine"
    assert not (tmp_path / "data").exists()


def test_a_folder_with_other_files_takes_the_reports(tmp_path: Path) -> None:
    make(tmp_path / "run" / "data", SMALL)
    (tmp_path / "run" / ".gitkeep").touch()
    demo_module._refuse_results_of_others(tmp_path / "run")
    (tmp_path / "run" / "before").mkdir()
    (tmp_path / "run" / "before" / "metrics.csv").touch()
    with pytest.raises(UsageError, match=r"whose before/metrics\.csv the demo did not write"):
        demo_module._refuse_results_of_others(tmp_path / "run")
    (tmp_path / "run" / MARK).touch()
    demo_module._refuse_results_of_others(tmp_path / "run")


@pytest.mark.matrix
def test_a_making_that_fails_leaves_the_old_data_and_nothing_else(photographs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make(folder, SMALL)

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make(folder, Recipe(images=136), on_image=fail)
    assert is_whole(folder, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.matrix
def test_a_making_that_was_killed_is_not_taken_for_whole_and_is_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    process = stop_while_images_are_made(folder, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    make(folder, SMALL)
    assert is_whole(folder, SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data-run"]


@pytest.mark.matrix
def test_ctrl_c_while_images_are_made_leaves_no_data(tmp_path: Path) -> None:
    process = stop_while_images_are_made(tmp_path / "data", signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["data-run"]
    assert list((tmp_path / "data-run").iterdir()) == []


@pytest.mark.example
def test_ctrl_c_in_training_leaves_whole_files_only(tmp_path: Path) -> None:
    process = start(*demo(tmp_path, "--epochs", "1000000"))
    assert process.stdout is not None
    while not process.stdout.readline().startswith("  step 15 "):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert is_whole(tmp_path / "data", SMALL)
    written = {path.name for path in (tmp_path / "run").iterdir()}
    # the flame graph where a look had begun, the hyperparameters by Lightning before 2.6
    assert written <= {MARK, "report.json", "report.html", "stacks.speedscope.json", "metrics.csv", "hparams.yaml"}
    if "report.json" in written:
        assert json.loads((tmp_path / "run/report.json").read_text())["steps"] >= 15


@pytest.mark.example
def test_a_demo_says_where_the_time_went_and_writes_the_report(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.csv").write_text("of an earlier demo")
    (tmp_path / "run" / MARK).touch()
    process = start(*demo(tmp_path, "--no-fix"))
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["steps"] == 15
    lines = out.splitlines()
    assert lines[0] == f"Making 128 JPEGs of 500x375 pixels from 8 photographs in {tmp_path}/data"
    assert lines[1].endswith(" 128/128 0:00:00")
    assert lines[2].startswith("  step 15  loss ")
    assert lines[4].startswith(f"Verdict: {report['verdict']} ")
    accuracy, gpu, files, watch, summary = lines[-5:]
    assert watch == "Your own script, measured like this: lightning-gpuopt watch -- python train.py"
    assert accuracy.startswith("Validation accuracy ")
    assert accuracy.endswith(" % (chance: 12.5 %)")
    assert gpu == "GPU figures: none, the run was on cpu"
    assert files == f"Report: {tmp_path}/run/report.html and report.json, metrics: {tmp_path}/run/metrics.csv"
    assert summary.startswith("15 steps on cpu, ")
    assert max(map(len, [*lines[1:-3], watch])) <= 80


@pytest.mark.example
def test_a_second_demo_uses_the_images_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(demo(tmp_path, "--no-fix")) == 0
    made = (tmp_path / "data/manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(demo(tmp_path, "--no-fix")) == 0
    assert capsys.readouterr().out.startswith(
        f"128 JPEGs of 500x375 pixels from 8 photographs are in {tmp_path}/data\n"
    )
    assert (tmp_path / "data/manifest.json").stat().st_mtime_ns == made


@pytest.mark.example
def test_max_steps_ends_within_an_epoch_and_the_accuracy_is_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(demo(tmp_path, "--max-steps", "3")) == 0
    out = capsys.readouterr().out
    assert "Validation accuracy " in out
    assert "\n3 steps on cpu, " in out
    assert json.loads((tmp_path / "run/report.json").read_text())["steps"] == 3


def train(tmp_path: Path, images: int, **changes: Any) -> Any:
    from lightning_gpuopt.demo import training as training_module

    make(tmp_path / "data", Recipe(images))
    settings: dict[str, Any] = {
        "data_dir": tmp_path / "data",
        "output_dir": tmp_path / "run",
        "epochs": 1,
        "max_steps": None,
        "batch_size": 16,
        "num_workers": 0,
        "accelerator": "cpu",
        "seed": 0,
        "progress_bar": False,
    }
    return training_module.train(training_module.DemoSettings(**{**settings, **changes}))


@pytest.mark.example
def test_the_network_learns_which_photograph_a_crop_comes_from(tmp_path: Path) -> None:
    outcome = train(tmp_path, images=512, epochs=4)
    assert outcome.accuracy_percent > 4 * 100 / len(CLASSES)
    assert outcome.steps == 4 * 30


@pytest.mark.example
def test_the_default_demo_waits_for_the_main_process_to_load(tmp_path: Path) -> None:
    report = train(tmp_path, images=512, batch_size=32).report
    assert report.verdict == "main_process_loading"


@pytest.mark.example
def test_worker_processes_can_load_the_images(tmp_path: Path) -> None:
    assert train(tmp_path, images=128, num_workers=2).steps == 8


def test_validation_images_are_the_same_on_every_read_and_training_images_are_not(photographs: Path) -> None:
    from lightning_gpuopt.demo.training import Photographs

    validation, training = Photographs(photographs / "val", train=False), Photographs(photographs / "train", train=True)
    assert (len(validation), len(training), training.classes) == (8, 120, sorted(CLASSES))
    assert validation[0][0].equal(validation[0][0])
    assert not training[0][0].equal(training[0][0])
    assert [validation[index][1] for index in range(8)] == list(range(8))
    assert validation[0][0].shape == training[0][0].shape == (3, 128, 128)


@pytest.mark.parametrize(("module", "package"), [("PIL", "Pillow"), ("skimage", "scikit-image")])
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(demo(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f'error: the demo needs {package}, which is not installed; run: pip install "lightning-gpuopt[demo]"\n'
    )


@pytest.mark.parametrize("argument", ["--data-dir", "--output-dir"])
def test_a_place_that_cannot_be_written_to_is_wrong_usage(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(demo(tmp_path, argument, f"{tmp_path}/file/below/it")) == 2
    below = tmp_path / "file/below" if argument == "--data-dir" else tmp_path / "file/below/it"
    assert capsys.readouterr().err == (
        f"error: {argument}: expected a writable path, got {below}: Not a directory; choose another\n"
    )


def test_a_gpu_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU")
    assert main(demo(tmp_path, "--accelerator", "gpu")) == 2
    assert capsys.readouterr().err == (
        "error: --accelerator: expected a GPU that PyTorch can use, found none; omit it to train on the CPU\n"
    )

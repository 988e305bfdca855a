"""``lightning-gpuopt doctor``: what it prints, and its exit codes; GPUs are simulated NVML through the real pynvml."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.cli import main
from lightning_gpuopt.doctor import data, examine, gatherers
from lightning_gpuopt.doctor.facts import CudaFacts, HostFacts, MemoryRates, TorchFacts
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.utils import time_limit
from tests.simulators.nvml import Gpu, Simulator, error, hang

WELL = HostFacts(
    machine_cpus=16,
    affinity_cpus=16,
    free_cpus=15.5,
    memory_total_mib=131072.0,
    memory_available_mib=120000.0,
    shm_total_mib=65536.0,
    shm_free_mib=65536.0,
    files_limit=65536,
    files_open=20,
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host and a torch that are well: what the machine of the tests is like does not matter."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(gatherers, "free_cpus", lambda: 15.5)
    monkeypatch.setattr(gatherers, "host_facts", lambda free: WELL)
    monkeypatch.setattr(gatherers, "memory_rates", lambda host: MemoryRates(11.0, 85.0, host.affinity_cpus))
    monkeypatch.setattr(gatherers, "versions_of", lambda names: {"torch": "2.9.0+cpu", "nvidia-ml-py": "13.615.71"})
    monkeypatch.setattr(gatherers, "torch_facts", lambda: TorchFacts("2.9.0+cpu", None, 8, "file_descriptor"))


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees its GPUs."""
    monkeypatch.setattr(gatherers, "torch_facts", lambda: TorchFacts("2.9.0", (12, 8), 8, "file_descriptor"))
    monkeypatch.setattr(gatherers, "ask_cuda", lambda seconds, command: CudaFacts(True))


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code, out = doctor(capsys, "--json", *arguments)
    data = json.loads(out)
    assert data["schema_version"] == 1
    checks = {check["name"]: check for check in data["checks"]}
    assert len(checks) == len(data["checks"])
    assert data["problems"] == sum(check["status"] == "problem" for check in checks.values())
    return code, checks


def test_a_machine_that_is_well(simulator: Simulator, with_cuda: None, capsys):
    simulator.machine(Gpu(utilization=0, memory_used=0))
    code, out = doctor(capsys)
    assert code == 0
    assert out.splitlines()[0] == "0 problems, 0 notes, 17 ok"


def test_problems_come_first_and_make_the_exit_code_1(simulator: Simulator, with_cuda: None, capsys):
    simulator.machine(Gpu(utilization=0, memory_used=0, pcie_lanes=4, persistence=0))
    code, out = doctor(capsys)
    assert code == 1
    assert out.splitlines()[:8] == [
        "1 problem, 1 note, 15 ok",
        "PROBLEM gpu0.pcie: PCIe 5 x4 of PCIe 5 x16",
        "        why: The link carries 16 GB/s of 63 GB/s. An idle GPU rarely reduces its",
        "        lanes: check slot, riser and BIOS.",
        "        fix: reseat the card, or use a slot with all its lanes",
        "note    gpu0.persistence: persistence mode is off",
        "        why: The driver unloads when no program uses the GPU: each program then",
        "        takes a second or more longer to start.",
    ]
    assert max(map(len, out.splitlines())) <= 80


def test_as_json(simulator: Simulator, with_cuda: None, capsys):
    simulator.machine(Gpu(utilization=0, memory_used=0, power_limit=200_000))
    code, checks = as_json(capsys)
    assert code == 1
    assert next(iter(checks)) == "gpu0.power"
    assert checks["gpu0.power"] == {
        "name": "gpu0.power",
        "status": "problem",
        "found": "power limit 200 W of 400 W",
        "measured": {"power_limit_w": 200.0, "power_limit_default_w": 400.0},
        "why": "Under load the GPU lowers its clocks to stay within the limit.",
        "fix": "sudo nvidia-smi -i 0 -pl 400 (unless the limit is intended: cooling, the rack's supply)",
    }
    assert checks["torch"]["measured"]["driver"] == "580.95"


def test_a_torch_without_cuda_beside_a_gpu(simulator: Simulator, capsys):
    simulator.machine(Gpu())
    code, checks = as_json(capsys)
    assert (code, checks["torch"]["status"]) == (1, "problem")


def test_a_driver_that_refuses_is_a_plain_line(simulator: Simulator, capsys):
    simulator.machine(Gpu(), error("nvmlInitWithFlags", 9))
    code, out = doctor(capsys)
    assert code == 0
    assert "?       gpus: not known: Driver Not Loaded" in out.splitlines()


def test_a_driver_that_hangs_is_a_plain_line(simulator: Simulator, monkeypatch, capsys):
    monkeypatch.setattr(examine, "_NVML_S", 0.05)
    simulator.machine(Gpu(), hang("nvmlDeviceGetHandleByIndex_v2"))
    code, out = doctor(capsys)
    assert code == 0
    assert "?       gpus: not known: NVML did not respond within 0.05 s" in out.splitlines()


def test_a_torch_that_cannot_be_imported_is_a_problem(simulator: Simulator, monkeypatch, capsys):
    def broken() -> TorchFacts:
        raise OSError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(gatherers, "torch_facts", broken)
    code, checks = as_json(capsys)
    assert code == 1
    assert checks["torch"]["found"] == "torch cannot be imported: libcudart.so.12: cannot open shared object file"


def test_a_dataset(simulator: Simulator, tmp_path: Path, capsys):
    folder = tmp_path / "data/class"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number}.bin").write_bytes(os.urandom(2000))
    _, checks = as_json(capsys, "--data", str(tmp_path / "data"))
    assert checks["data"]["measured"]["files"] == 40
    assert checks["data.lmdb"]["measured"]["samples"] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "nvml-scenario.txt"]


def test_a_dataset_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys):
    nowhere = tmp_path / "nowhere"
    assert main(["doctor", "--data", str(nowhere)]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: --data: expected an existing path, got {nowhere}: No such file or directory; "
        "give a folder or a file\n",
    )


def test_a_pipe_is_no_dataset(tmp_path: Path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["doctor", "--data", str(tmp_path / "pipe")]) == 2
    assert "/pipe: not a folder or file;" in capsys.readouterr().err


def test_a_file_system_that_hangs_is_a_plain_line(simulator: Simulator, with_cuda: None, monkeypatch, tmp_path, capsys):
    simulator.machine(Gpu())
    answers = threading.Event()
    monkeypatch.setattr(examine, "_DATA_S", 0.05)
    monkeypatch.setattr(time_limit, "_CLEAN_UP_S", 0.05)
    monkeypatch.setattr(data, "_list", lambda folder, clock: answers.wait())
    try:
        code, checks = as_json(capsys, "--data", str(tmp_path))
    finally:
        answers.set()
    assert code == 0
    assert checks["data"]["found"] == f"not known: {tmp_path}: no response within 0.05 s"


def test_a_path_that_does_not_answer_is_a_plain_line(simulator: Simulator, with_cuda: None, monkeypatch, capsys):
    simulator.machine(Gpu())
    answers = threading.Event()
    monkeypatch.setattr(examine, "_PATH_S", 0.05)
    monkeypatch.setattr(time_limit, "_CLEAN_UP_S", 0.05)
    monkeypatch.setattr(examine, "_require", lambda path: answers.wait())
    try:
        code, checks = as_json(capsys, "--data", "/nfs")
    finally:
        answers.set()
    assert code == 0
    assert checks["data"]["found"] == "not known: /nfs: no response within 0.05 s"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_behind_by_a_signal(simulator: Simulator, monkeypatch, tmp_path, capsys, number, code):
    def interrupted(self: LMDBWriter) -> None:
        os.kill(os.getpid(), number)
        plain_close(self)

    plain_close = LMDBWriter.close
    folder, place = tmp_path / "data", tmp_path / "temporary"
    folder.mkdir()
    place.mkdir()
    for each in range(40):
        (folder / f"{each}.bin").write_bytes(os.urandom(2000))
    monkeypatch.setattr(data.tempfile, "tempdir", str(place))
    monkeypatch.setattr(time_limit, "_CLEAN_UP_S", 60.0)
    monkeypatch.setattr(LMDBWriter, "close", interrupted)
    simulator.machine(Gpu())
    try:
        ended = main(["doctor", "--data", str(folder)])
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert list(place.iterdir()) == []


def test_wrong_usage(capsys):
    assert main(["doctor", "--fast"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "see 'lightning-gpuopt doctor --help'" in err) == ("", 1, True)


def test_ctrl_c(monkeypatch, capsys):
    def interrupted() -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(gatherers, "free_cpus", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys; from lightning_gpuopt.cli import main; main(['doctor', '--help']);"
        "print({'torch', 'lightning', 'pynvml', 'psutil', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.matrix
def test_as_people_run_it_with_a_call_that_hangs(simulator: Simulator):
    """The process ends although a thread of it hangs in the driver."""
    simulator.machine(Gpu(), hang("nvmlDeviceGetPersistenceMode"))
    done = subprocess.run(
        [sys.executable, "-m", "lightning_gpuopt", "doctor", "--json"],
        env=simulator.environment(),
        capture_output=True,
        text=True,
    )
    data = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1 if data["problems"] else 0, "")
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["gpus"]["found"] == "not known: NVML did not respond within 3 s"

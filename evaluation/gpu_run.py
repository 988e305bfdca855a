"""Runs one GPU fault, in processes of its own, and grades what the detector says of it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from evaluation.gains import Gain
from evaluation.gpu_parts import Parts, Scene, Truth
from evaluation.parts import quiet
from lightning_gpuopt import StallDetector, StallReport
from tests.ranks import free_port
from tests.simulators.gpu import SimulatedGpu, rank_environment, simulated_gpu
from tests.simulators.nvml import Gpu, Simulator

WARMUP_STEPS = 5
_TIMEOUT_S = 60.0
_IDLE_SHARE = 0.05
_IDLE_S = 0.001
_SHARE = 0.08

_TICK_S = 0.005
_MAX_LOST_S = 0.06
_TRIES = 3

_fork = multiprocessing.get_context("fork")  # torch and Lightning are imported once


@dataclass(frozen=True)
class GpuFault:
    """One run.

    Attributes:
        name: what is injected.
        verdict: the right verdict.
        parts: makes what is trained.
        ranks: processes, each with a simulated GPU of its own.
        steps: training batches.
        evidence: what the largest finding's evidence must say; of a text, a part.
        share: the largest finding's share, 0-1, to within 0.08.
        needs_cpu: so many CPUs have to be idle during the run, else it says nothing.
        second: another cause that must be among the findings.
        note: words that the report's notes must have.
        cure: ``"settings"``: run again with the advised loader settings; or the parts without the fault. Then the
            measured gain is held against the predicted one.
        gpu: settings of the simulated GPU.
        prepare: what else is done to it.
        nvml: its NVML device.
        sm_share: SM activity while a kernel runs, 0-1.
        nvml_follows: whether NVML's figures follow the GPU; else they stay as they are.
        idle: whether the report's idle time is held against the device's.
    """

    name: str
    verdict: str
    parts: Callable[[Scene], Parts]
    ranks: int = 1
    steps: int = 65
    evidence: dict[str, float | str] = field(default_factory=dict)
    share: float | None = None
    needs_cpu: float = 0.0
    second: str = ""
    note: str = ""
    cure: str | Callable[[Scene], Parts] = ""
    gpu: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[SimulatedGpu], None] = lambda gpu: None
    nvml: Gpu = field(default_factory=Gpu)
    sm_share: float = 0.6
    nvml_follows: bool = True
    idle: bool = True


@dataclass(frozen=True)
class GpuGrade:
    """How the detector did on one fault; None where that was not asked.

    Attributes:
        fault: the fault.
        verdict: the report's.
        missing: what evidence or notes do not say.
        found: causes and shares of all findings.
        extra: causes that were found and not injected.
        second: whether the second cause was named.
        gain: the prediction and what was measured.
        idle: the report's idle seconds and the device's.
        idle_close: whether they are within 5 %, or 1 ms a step.
        skipped: why the run says nothing.
        text: the report.
    """

    fault: GpuFault
    verdict: str
    missing: str = ""
    found: str = ""
    extra: tuple[str, ...] = ()
    second: bool | None = None
    gain: Gain | None = None
    idle: tuple[float, float] | None = None
    idle_close: bool | None = None
    skipped: str = ""
    text: str = ""

    @property
    def right(self) -> bool:
        """The verdict, and what the report must say besides."""
        return self.verdict == self.fault.verdict and not self.missing

    @property
    def good(self) -> bool:
        """Right in every respect that was asked for."""
        return (
            self.right
            and not self.extra
            and False not in (self.second, self.idle_close)
            and (not self.fault.cure or (self.gain is not None and self.gain.kept and self.gain.close))
        )


def grade(fault: GpuFault, library: Path) -> GpuGrade:
    """Run a fault, and again with the cure where there is one.

    Args:
        fault: what to run.
        library: the built NVML simulator.
    """
    try:
        idle_before, began_s = _idle_cpu_s(), time.perf_counter()
        answer = _undisturbed(fault, library)
        idle_cpus = (_idle_cpu_s() - idle_before) / (time.perf_counter() - began_s)
        if idle_cpus < fault.needs_cpu:
            return GpuGrade(fault, "", skipped=f"others use the CPUs: only {idle_cpus:.1f} were idle")
        cured = _cured(fault, answer)
        after = _undisturbed(cured, library) if cured is not None else None
    except RuntimeError as error:
        return GpuGrade(fault, "failed", text=str(error))
    findings = answer["findings"]
    graded = GpuGrade(
        fault,
        answer["verdict"],
        _missing(fault, answer),
        ", ".join(f"{each['cause']} {each['share']:.2f}" for each in findings),
        tuple(each["cause"] for each in findings if each["cause"] not in (fault.verdict, fault.second)),
        text=f"{answer['text']}\n{json.dumps(findings[:2])}",
    )
    if fault.second:
        graded = replace(graded, second=fault.second in [each["cause"] for each in findings])
    if fault.idle and fault.ranks == 1 and answer["idle_s"] is not None:
        told_s, true_s = answer["gpu_idle_s"], answer["idle_s"]
        close = abs(told_s - true_s) <= max(_IDLE_SHARE * true_s, _IDLE_S * (fault.steps - WARMUP_STEPS))
        graded = replace(graded, idle=(told_s, true_s), idle_close=close)
    if not fault.cure:
        return graded
    if after is None or not findings:
        return graded
    change = "" if fault.cure == "settings" else "without it"
    return replace(graded, gain=Gain.of(findings[0], answer["step_s"], after["step_s"], change))


def _idle_cpu_s() -> float:
    """Seconds in which CPUs of this machine were idle since it started."""
    return float(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")


def _cured(fault: GpuFault, answer: dict[str, Any]) -> GpuFault | None:
    """The same run with the largest finding's advice followed."""
    if callable(fault.cure):
        return replace(fault, parts=fault.cure)
    settings = answer["findings"][0]["settings"] if fault.cure and answer["findings"] else {}
    if not settings:
        return None

    def parts(scene: Scene) -> Parts:
        made = fault.parts(scene)
        return replace(made, loader=made.loader | settings)

    return replace(fault, parts=parts)


def _missing(fault: GpuFault, answer: dict[str, Any]) -> str:
    evidence = answer["findings"][0]["evidence"] if answer["findings"] else {}
    wrong = []
    for name, wanted in fault.evidence.items():
        found = evidence.get(name)
        if found != wanted and not (isinstance(wanted, str) and wanted in str(found)):
            wrong.append(f"{name} is {found}, not {wanted}")
    share = answer["findings"][0]["share"] if answer["findings"] else 0.0
    if fault.share is not None and abs(share - fault.share) > _SHARE:
        wrong.append(f"the share is {share:.2f}, not {fault.share:.2f}")
    if fault.note and not any(fault.note in note for note in answer["notes"]):
        wrong.append(f"no note says {fault.note!r}")
    return "; ".join(wrong)


# ---- in processes of their own ----


def _undisturbed(fault: GpuFault, library: Path) -> dict[str, Any]:
    """Rank 0's answer; from another run where the machine stood still in the first: then the device did, too."""
    for _ in range(_TRIES):
        answer, lost_s = _answer(fault, library)
        if lost_s <= _MAX_LOST_S:
            break
    return answer


def _answer(fault: GpuFault, library: Path) -> tuple[dict[str, Any], float]:
    """Rank 0's answer, and the longest time for which the machine let this process wait."""
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        shared = rank_environment(tmp, fault.ranks) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = []
        for rank in range(fault.ranks):
            alone = {"WORLD_SIZE": str(fault.ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = shared | (alone if fault.ranks > 1 else {})
            processes.append(_fork.Process(target=_in_process, args=(fault, library, rank, tmp, environment)))
        for process in processes:
            process.start()
        lost_s = _wait_for(processes)
        answer = tmp / "answer.json"
        if not answer.exists():
            logs = (tmp / f"rank{rank}.log" for rank in range(fault.ranks))
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs if log.exists()))
        result: dict[str, Any] = json.loads(answer.read_text())
        return result, lost_s


def _wait_for(processes: list[Any]) -> float:
    """Wait until all have ended; returns by how much the longest of many short sleeps was too long."""
    lost_s = 0.0
    deadline_s = time.perf_counter() + _TIMEOUT_S
    while (begin_s := time.perf_counter()) < deadline_s and any(each.is_alive() for each in processes):
        time.sleep(_TICK_S)
        lost_s = max(lost_s, time.perf_counter() - begin_s - _TICK_S)
    for each in processes:
        if each.is_alive():
            each.kill()
        each.join()
    return lost_s


def _in_process(fault: GpuFault, library: Path, rank: int, tmp: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(name, None)
    with open(tmp / f"rank{rank}.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        try:
            answer = train(fault, library, rank, tmp / f"rank{rank}")
        except BaseException:
            traceback.print_exc()
            raise
        if rank == 0:
            beside = tmp / "answer.tmp"
            beside.write_text(json.dumps(answer))
            beside.rename(tmp / "answer.json")


def train(fault: GpuFault, library: Path, rank: int, folder: Path) -> dict[str, Any]:
    """Train with the fault on this rank.

    Args:
        fault: what to run.
        library: the built NVML simulator.
        rank: this rank.
        folder: for its files.
    """
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    folder.mkdir()
    simulator = Simulator(library, folder / "nvml-scenario.txt")
    os.environ["NVML_SIM_SCENARIO"] = str(simulator.scenario)
    simulator.machine(*[fault.nvml] * fault.ranks)
    with simulated_gpu(**{"copy_s": 0.0005, "launch_queue": 100} | fault.gpu) as gpu:
        fault.prepare(gpu)
        if fault.nvml_follows:
            gpu.follow_nvml(simulator, rank, sm_share=fault.sm_share)
        parts = fault.parts(Scene(gpu, rank, folder))
        detector = StallDetector(
            window_size=20, warmup_steps=WARMUP_STEPS, on_stall="ignore", print_report=False, profile="on"
        )
        truth = Truth(gpu, WARMUP_STEPS)
        arguments = quiet(folder, max_steps=fault.steps, max_epochs=-1, log_every_n_steps=1)
        arguments |= gpu.trainer_arguments() | parts.trainer
        trainer = Trainer(**arguments, callbacks=[detector, truth, *parts.callbacks])
        trainer.fit(parts.module(gpu, parts))
        gpu.synchronize()
        return _summary(detector.report) | {"idle_s": truth.idle_s(), "step_s": truth.step_s()}


def _summary(report: StallReport) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "findings": [asdict(each) for each in report.findings],
        "notes": report.notes,
        "gpu_idle_s": report.gpu_idle_s,
        "text": str(report),
    }

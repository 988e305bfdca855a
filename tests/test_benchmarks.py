"""The benchmarks run from end to end; what they measure is no matter of tests."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulators.gpu import ManualClock, SimulatedGpu, simulated_gpu

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
ASSUMPTIONS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/limits.md").read_text(), re.MULTILINE)
SECTIONS = {
    *("demo", "event_clock", "detector_idle", "causes", "overhead", "telemetry", "gpm_without_root", "stalls"),
    *("prefetch", "workers", "dali", "gpu_tests", "probe", *ASSUMPTIONS),
}


def run(script: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode in codes, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def results() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (BENCHMARKS / "results").iterdir()}


@pytest.mark.matrix
class TestGpuOnTheSimulators:
    def test_every_section_has_an_outcome_or_a_reason(self, tmp_path: Path, simulator_library: Path) -> None:
        before = results()
        run("gpu.py", "--simulated", "--output", str(tmp_path))
        assert results() == before
        (file,) = tmp_path.iterdir()
        assert file.name == "simulated.json"
        found: dict[str, Any] = json.loads(file.read_text())
        assert (found["gpu"], found["simulated"]) == ("simulated", True)
        assert found["sections"].keys() == SECTIONS
        assert found["no_time"] == {}
        for name, outcome in found["sections"].items():
            assert outcome["form"] == "trial"
            assert ("skipped" in outcome) != bool(outcome.get("checks") or outcome.get("answers")), name
        ran = {name for name, outcome in found["sections"].items() if outcome.get("checks")}
        assert ran >= {"event_clock", "detector_idle", "causes", "overhead", "telemetry", "stalls", "prefetch"}
        assert ran >= {
            "demo",
            "workers",
            "before_cupti",
            "short_kernels",
            "look_ahead",
            "killed_in_look",
            "side_stream",
            "registered_memory",
        }
        assert found["sections"]["fsdp_step"]["skipped"] == "not here: FSDP needs two GPUs"
        assert {each["section"] for each in found["claims"]} == ran
        assert found["claims_held"] + found["claims_failed"] == len(found["claims"])
        assert found["environment"]["lightning-gpuopt"] != "missing"
        assert all(outcome["holds"] for outcome in found["claims"] if outcome["section"] == "telemetry")
        assert found["sections"]["overhead"]["extra_us"].keys() == {"GPU-bound, 5 ms", "launch-bound, 5 ms"}
        runs = found["sections"]["demo"]["runs"]
        assert (runs[0]["steps"], runs[0]["gpu_utilization_percent"]) == (60, 50.0)


@pytest.mark.matrix
def test_scale_runs_in_a_tiny_form(tmp_path: Path) -> None:
    before = results()
    run("scale.py", "--tiny", "--output", str(tmp_path / "scale.json"))
    assert results() == before
    found = json.loads((tmp_path / "scale.json").read_text())
    assert found["tiny"] is True
    order = found["order"]
    assert order["samples_of_one_step"] == order["different_samples_of_one_step"] == 256 * 40
    assert found["report"]["straggler_found"] is True
    assert found["report"]["monitor_keys_per_window"] == 40 * 12 + 3
    assert found["manifest"]["opened"]["shards"] == 16
    assert found["build"] == {
        "arithmetic": True,
        "shards": 256,
        "samples_per_shard": 3907,
        "gb_per_shard": 0.390625,
        "parts_that_have_work": 40,
        "record_tables_gb": 0.012012544,
        "record_tables_percent": 0.012012544,
    }


@pytest.mark.matrix
def test_growth_runs_in_a_tiny_form(tmp_path: Path) -> None:
    before = results()
    printed = run("growth.py", "--tiny", "--output", str(tmp_path / "growth.json"))
    assert results() == before
    found = json.loads((tmp_path / "growth.json").read_text())
    assert (found["tiny"], list(found["records"]), list(found["files"])) == (True, ["1000"], ["1000"])
    figures = found["records"]["1000"]
    assert (figures["lab_mib"] * 2**20, figures["tab_mib"] * 2**20) == (2000, 32 + 12 * 1000 + 8)
    assert "| label columns | 1.95 KiB | 19.1 MiB | 191 MiB | 1.86 GiB | the samples |" in printed.splitlines()


def test_the_figures_of_growth_are_those_of_all_sizes() -> None:
    found = json.loads((BENCHMARKS / "results/growth-cpu.json").read_text())
    assert found["tiny"] is False
    assert list(found["records"]) == ["10000", "100000", "1000000", "10000000"]
    assert list(found["files"]) == ["10000", "100000", "1000000"]


def test_the_figures_of_scale_are_those_of_the_whole_size() -> None:
    found = json.loads((BENCHMARKS / "results/scale-cpu.json").read_text())
    assert found["tiny"] is False
    assert (found["size"]["samples"], found["size"]["ranks"]) == (10**9, 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


def outcome(**more: Any) -> dict[str, Any]:
    return {"form": "quick", "seconds": 1.0, "date": "2026-01-01", **more}


class TestResultsOfGpu:
    HERE: dict[str, str] = {"gpu": "NVIDIA H200", "driver": "580"}  # noqa: RUF012

    def test_a_skipped_section_leaves_an_earlier_outcome(self, gpu: Any, tmp_path: Path) -> None:
        target = tmp_path / "nvidia-h200.json"
        first = gpu.Results(target, self.HERE, simulated=False)
        first.add("stalls", outcome(checks={"a": True, "b": False}))
        second = gpu.Results(target, self.HERE, simulated=False)
        second.add("stalls", outcome(skipped="no time"))
        second.add("dali", outcome(skipped="missing: nvidia"))
        found = json.loads(target.read_text())
        assert found["sections"]["stalls"]["checks"] == {"a": True, "b": False}
        assert found["skipped"] == {"stalls": "no time", "dali": "missing: nvidia"}
        assert found["claims"] == [
            {"section": "stalls", "claim": "a", "holds": True, "form": "quick"},
            {"section": "stalls", "claim": "b", "holds": False, "form": "quick"},
        ]
        assert (found["claims_held"], found["claims_failed"]) == (1, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["nvidia-h200.json"]

    def test_a_section_that_fails_keeps_an_earlier_whole_outcome(self, gpu: Any, tmp_path: Path) -> None:
        results = gpu.Results(tmp_path / "nvidia-h200.json", self.HERE, simulated=False)
        whole = outcome(checks={"a": True})
        results.add("stalls", whole)
        results.add("stalls", outcome(checks={"ran": False}, error="RuntimeError: out of memory"))
        assert json.loads(results.target.read_text())["sections"]["stalls"]["earlier"] == whole

    def test_another_driver_begins_anew(self, gpu: Any, tmp_path: Path) -> None:
        target = tmp_path / "nvidia-h200.json"
        gpu.Results(target, self.HERE, simulated=False).add("stalls", outcome(checks={"a": True}))
        after = gpu.Results(target, {**self.HERE, "driver": "590"}, simulated=False)
        assert after.sections == {}

    def test_no_time_is_told_apart_from_what_is_not_for_this_machine(self, gpu: Any, tmp_path: Path) -> None:
        results = gpu.Results(tmp_path / "nvidia-h200.json", self.HERE, simulated=False)
        results.add("stalls", outcome(no_time="needs about 75 s, 0 s are left"))
        results.add("dali", outcome(skipped="missing: nvidia"))
        found = json.loads(results.target.read_text())
        assert (found["no_time"], found["skipped"]) == (
            {"stalls": "needs about 75 s, 0 s are left"},
            {"dali": "missing: nvidia"},
        )


class TestSectionsOfGpu:
    def measured(self, gpu: Any, run: Callable[[bool, str], dict[str, Any]], limit_s: float = 9.0) -> dict[str, Any]:
        found: dict[str, Any] = gpu.measured(gpu.Section(run, 0.0), simulated=True, form="trial", limit_s=limit_s)
        assert gpu.keepers == []
        del found["seconds"]
        return found

    def test_one_that_is_stopped_keeps_what_it_has(self, gpu: Any) -> None:
        def pauses(simulated: bool, form: str) -> dict[str, Any]:
            gpu.keep({"checks": {"a": True}})
            signal.pause()
            raise AssertionError

        assert self.measured(gpu, pauses, 0.01) == {"checks": {"a": True}, "stopped": "stopped after 0 s"}
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

    def test_one_that_fails_keeps_what_it_has(self, gpu: Any) -> None:
        def fails(simulated: bool, form: str) -> dict[str, Any]:
            gpu.keep({"checks": {"a": True}})
            raise ZeroDivisionError("by zero")

        found = self.measured(gpu, fails)
        assert (found["error"], found["checks"]) == ("ZeroDivisionError: by zero", {"a": True, "ran": False})

    @pytest.mark.parametrize(
        ("error", "word"),
        [
            (ModuleNotFoundError("No module named 'nvidia.dali'", name="nvidia.dali"), {"skipped": "missing: nvidia"}),
            (PermissionError(13, "denied"), {"skipped": "not allowed: [Errno 13] denied"}),
        ],
    )
    def test_what_is_not_for_this_machine_is_skipped(self, gpu: Any, error: Exception, word: dict[str, str]) -> None:
        def raises(simulated: bool, form: str) -> dict[str, Any]:
            raise error

        assert self.measured(gpu, raises) == word

    @pytest.mark.parametrize(
        "error",
        [
            ModuleNotFoundError("No module named 'gpu_dal'", name="gpu_dal"),
            ImportError("cannot import name 'Place' from 'dali_parts'", name="dali_parts"),
            SystemExit("nothing was staged"),
        ],
    )
    def test_what_is_missing_of_our_own_is_an_error(self, gpu: Any, error: BaseException) -> None:
        def raises(simulated: bool, form: str) -> dict[str, Any]:
            raise error

        found = self.measured(gpu, raises)
        assert (found["error"], found["checks"]) == (f"{type(error).__name__}: {error}", {"ran": False})

    def test_each_is_in_one_group_and_the_parts_are_in_order(self, gpu: Any) -> None:
        grouped = [name for _, group in gpu.GROUPS.values() for name in group]
        assert sorted(grouped) == sorted(gpu.SECTIONS)
        asked = gpu.parser().parse_args(["--part", "1", "--sections", "telemetry", "stalls", "debug_mode", "probe"])
        assert gpu.chosen_sections(asked) == ["probe", "debug_mode", "telemetry"]

    def test_what_no_longer_fits_is_not_begun(self, gpu: Any) -> None:
        told: list[Any] = []
        reporter = SimpleNamespace(tell=lambda *line: told.append(line))
        gpu.run_sections(["stalls"], reporter, simulated=True, form="trial", left_s=0.0)
        assert told == [("ends", "stalls", {"no_time": "needs about 75 s, 0 s are left (--minutes, --full)"})]


GROUP = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from gpu_groups import Reporter
fd, *names = sys.argv[2:]
reporter = Reporter(int(fd))
if "never" in names:
    raise SystemExit(3)
for name in names:
    reporter.tell("begins", name, 0.0 if name == "hangs" else 60.0)
    reporter.tell("keeps", name, {"pid": os.getpid(), "checks": {"a": True}})
    if name == "leaves a child":
        os.fork() or signal.pause()  # the child keeps the pipe
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        child = subprocess.Popen(["sleep", "1000"])
        reporter.tell("keeps", name, {"pid": os.getpid(), "child": child.pid, "checks": {}})
        signal.pause()
    reporter.tell("ends", name, {"pid": os.getpid()})
"""


class TestGroupsOfGpu:
    @pytest.fixture
    def run_group(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
        import gpu_groups

        monkeypatch.setattr(gpu_groups, "GRACE_S", 0.2)

        def run_group(*names: str) -> dict[str, dict[str, Any]]:
            outcomes: dict[str, dict[str, Any]] = {}
            command = [sys.executable, "-c", GROUP, str(BENCHMARKS)]
            gpu_groups.run_group(command, names, outcomes.__setitem__)
            assert list(outcomes) == list(names)
            return outcomes

        return run_group

    def test_sections_share_a_process(self, run_group: Callable[..., dict[str, dict[str, Any]]]) -> None:
        outcomes = run_group("one", "two")
        assert outcomes["one"] == outcomes["two"] != {"pid": 0}

    def test_a_crash_costs_its_own_section_only(self, run_group: Callable[..., dict[str, dict[str, Any]]]) -> None:
        outcomes = run_group("one", "crashes", "two")
        crashed = outcomes["crashes"]
        assert crashed.pop("pid") == outcomes["one"]["pid"] != outcomes["two"]["pid"]
        assert crashed == {"error": "its process ended with SIGSEGV", "checks": {"a": True, "ran": False}}

    def test_a_crash_is_seen_though_a_forked_process_holds_the_pipe(
        self, run_group: Callable[..., dict[str, dict[str, Any]]]
    ) -> None:
        assert run_group("leaves a child")["leaves a child"]["error"] == "its process ended with SIGSEGV"

    def test_one_that_does_not_stop_is_killed_with_what_it_started(
        self, run_group: Callable[..., dict[str, dict[str, Any]]]
    ) -> None:
        outcomes = run_group("hangs", "two")
        hung = outcomes["hangs"]
        assert hung["error"] == "killed: it took longer than it may, and did not stop"
        assert hung["checks"] == {"ran": False}
        assert outcomes["two"]["pid"] != hung["pid"]
        for pid in (hung["pid"], hung["child"]):
            assert not is_running(pid)

    def test_a_process_that_begins_nothing_is_an_error_of_each(
        self, run_group: Callable[..., dict[str, dict[str, Any]]]
    ) -> None:
        failed = {"error": "its process ended with exit code 3, before it began", "checks": {"ran": False}}
        outcomes = run_group("one", "never")
        assert outcomes["one"] == failed
        assert outcomes["never"] == failed


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class TestProbeOfGpu:
    def test_an_error_costs_its_own_probe(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import gpu_probe

        def fails(card: object) -> dict[str, Any]:
            raise RuntimeError("no such device")

        def finds(card: object) -> dict[str, Any]:
            return {"ms": 1.0}

        monkeypatch.setattr(gpu_probe, "Card", object)
        result = gpu_probe.probe(probes=(fails, finds))
        assert result["probes"] == {"fails": {"error": "RuntimeError: no such device"}, "finds": {"ms": 1.0}}
        assert result["errors"] == {"fails": "RuntimeError: no such device"}
        assert result["checks"] == {"fails: ran": False, "finds: ran": True}


NOT_OF_TRAINING = (
    "event_stamps",
    "trace_clock",
    "correlation",
    "pageable_copy",
    "debug_mode",
    "wait_names",
    "prehooks",
)


class TestAssumptionsOfGpu:
    @pytest.fixture
    def simulated(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
        """A GPU on a clock that is turned, which the experiments read too."""
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        import gpu_assumed_records

        clock = ManualClock()
        with simulated_gpu(clock) as simulated:
            begin_ns = simulated.unix_ns(0.0)

            def time_ns() -> int:
                return begin_ns + round(clock() * 1e9)

            of_host = {
                "perf_counter": clock,
                "perf_counter_ns": lambda: round(clock() * 1e9),
                "sleep": clock.advance,
                "time_ns": time_ns,
            }
            of_host["time"] = lambda: time_ns() / 1e9
            monkeypatch.setattr(gpu_assumed_records, "time", SimpleNamespace(**of_host))
            yield simulated

    def outcome(self, name: str, simulated: SimulatedGpu) -> dict[str, Any]:
        from gpu_assumptions import on_device
        from gpu_devices import SimulatedDevice

        found: dict[str, Any] = on_device(name, SimulatedDevice(simulated), "trial")
        return found

    def test_the_limits_list_each(self, gpu: Any) -> None:
        assert list(gpu.EXPERIMENTS) == ASSUMPTIONS
        assert max(each.seconds for each in gpu.EXPERIMENTS.values()) <= 60

    @pytest.mark.parametrize("name", NOT_OF_TRAINING)
    def test_they_hold_on_the_simulated_gpu(self, simulated: SimulatedGpu, name: str) -> None:
        found = self.outcome(name, simulated)
        assert list(found) == ["assumed", "measured", "checks"]
        assert found["measured"]
        assert found["checks"]
        assert [claim for claim, held in found["checks"].items() if not held] == []

    @pytest.mark.parametrize(
        ("name", "broken", "claims"),
        [
            (
                "event_stamps",
                lambda simulated: {"record": lambda stream=None: SimpleNamespace(stamp_s=simulated.clock())},
                ["behind 20 ms of work: stamped when that is done, within 5 %"],
            ),
            (
                "trace_clock",
                lambda simulated: {"_epoch_ns": simulated._epoch_ns + 100_000},
                ["calls lie within 20 us of time.time_ns around them"],
            ),
            (
                "correlation",
                lambda simulated: {"next_correlation": lambda: 5},
                ["no two share a number", "calls begin before what they issue"],
            ),
            (
                "wait_names",
                lambda simulated: {"drain": partial(simulated.drain, "synchronize", "cuCtxSynchronize")},
                ["torch.cuda.synchronize() waits in cudaDeviceSynchronize"],
            ),
            (
                "pageable_copy",
                lambda simulated: {"copy": copies_pinned(simulated)},
                [
                    "pageable: the copy blocks inside cudaMemcpyAsync",
                    "pageable: the call ends with the copy or after it",
                    "the record's name tells pageable memory",
                ],
            ),
            (
                "debug_mode",
                lambda simulated: {"synchronizing_call": nullcontext},
                ["one warning for .item()"],
            ),
        ],
    )
    def test_what_is_otherwise_is_told(
        self,
        simulated: SimulatedGpu,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        broken: Callable[[SimulatedGpu], dict[str, Any]],
        claims: list[str],
    ) -> None:
        for attribute, value in broken(simulated).items():
            monkeypatch.setattr(simulated, attribute, value)
        checks = self.outcome(name, simulated)["checks"]
        assert [claim for claim, held in checks.items() if not held] == claims

    def test_a_recording_whose_beginning_waits_for_the_queue_is_a_verdict(self, simulated: SimulatedGpu) -> None:
        found = self.outcome("before_cupti", simulated)
        assert found["measured"]["waited_for_the_queue"] is True
        assert list(found["checks"].values()) == [True]

    def test_nvmls_mean_is_of_the_load_alone(self, simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        import gpu_assumed_records

        told: list[str] = []

        class Sampler:
            def __init__(self, *arguments: Any, **options: Any) -> None: ...

            def start(self) -> None: ...

            def wait_until_open(self, timeout_s: float) -> bool:
                return True

            def cut(self) -> list[Any]:
                told.append("read")
                return []

            def stop(self, timeout_s: float) -> None: ...

        monkeypatch.setattr(gpu_assumed_records, "GpuSampler", Sampler)
        gpu_assumed_records.sampled((), lambda: told.append("load"), first=lambda: told.append("load before"))
        assert told == ["load before", "read", "load", "read"]

    def test_a_profiler_that_sees_nothing_is_no_verdict(self, simulated: SimulatedGpu) -> None:
        from gpu_parts import Skip

        simulated.profiling.blind = True
        with pytest.raises(Skip, match="recorded nothing on the GPU"):
            self.outcome("correlation", simulated)


def copies_pinned(simulated: SimulatedGpu) -> Callable[..., None]:
    """A copy that never blocks."""
    copy = simulated.copy
    return lambda *args, **more: copy(*args, **{**more, "pinned": True})


@pytest.mark.matrix
def test_the_flight_recorder_is_measured(tmp_path: Path) -> None:
    before = results()
    run(
        "recorder.py", "--rounds", "1", "--output", str(tmp_path / "recorder.json"), codes=(0, 1)
    )  # 1: a target is missed
    assert results() == before
    figures = json.loads((tmp_path / "recorder.json").read_text())["figures"]
    assert sorted(figures) == [
        "batch_without_workers_us",
        "beat_us",
        "core_percent",
        "sample_in_worker_us",
        "step_us",
    ]
    assert figures["core_percent"] == pytest.approx(figures["beat_us"] / 250_000 * 100)


@pytest.mark.matrix
def test_sample_parallel_runs_in_a_tiny_form(tmp_path: Path) -> None:
    before = results()
    output = tmp_path / "sample-parallel.json"
    printed = run("sample_parallel.py", "--tiny", "--output", str(output), codes=(0, 1))  # 1: a goal is missed
    assert results() == before
    found = json.loads(output.read_text())
    assert (found["tiny"], found["workers"]) == (True, 2)
    assert {name: [each["case"] for each in cases] for name, cases in found["rows"].items()} == {
        "tail": ["asleep, 10 times, batches of 4", "busy, 10 times, batches of 4"],
        "large": ["1 MiB"],
        "taking": ["1 MiB", "1 MiB, and freeing the one before"],
        "images": ["JPEGs"],
        "never_slower": ["table", "texts", "detection"],
        "fix": ["asleep, 50 times, batches of 8", "8 MiB"],
    }
    cases = [each for cases in found["rows"].values() for each in cases]
    assert all({"DataLoader", "SampleLoader"} <= each["medians"].keys() for each in cases)
    verdicts = [goal["verdict"] for each in cases for goal in each["goals"]]
    assert {verdict: verdicts.count(verdict) for verdict in verdicts} == found["goals"]
    assert len(re.findall(r"goal at (?:least|most) \S+: ", printed)) == len(verdicts)


def test_the_figures_of_sample_parallel_are_those_of_all_rows() -> None:
    found = json.loads((BENCHMARKS / "results/sample-parallel-cpu.json").read_text())
    assert found["tiny"] is False
    assert list(found["rows"]) == ["tail", "large", "taking", "images", "never_slower", "fix"]
    assert len(found["rows"]["tail"]) == 2 * 3 * 3

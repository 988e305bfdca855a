"""Train ten public projects plain and under ``watch`` at once, then once under ``watch --fix``, and compare.

    python -m evaluation.projects [--only NAME ...] [--rounds N] [--keep-fix] [--output FILE]

It runs in an environment of ``requirements.txt`` or ``requirements-images.txt``, beside this file, with this
package, and takes the projects that are installed there; the rows of the others remain in the file of results. Each
training is a process of its own in a new folder, with modules that are compiled already. Batches, losses, weights and
the state of random numbers are compared exactly, the plain runs with each other, too. The two of a round run at once
and share one CPU, so that whatever else the machine does meets both: their CPU times are compared. Training under
``--fix`` has all CPUs, and is twice as long: it is compared with a plain one of that length, and the patch that it
gives is checked. Torch has one thread in each.
The exit code is 1 if ``watch`` changed anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/results/projects-cpu.json"
MODULES = {"scvi_tools": "scvi"}  # where a project's module is not named as its script
DISTRIBUTIONS = {"pina": "pina-mathlab"}
SAME = ("batches", "losses", "weights", "random", "exit_code")
TIMES = {"fit_s": "fit", "fit_cpu_s": "fit_cpu", "step_ms": "step", "step_cpu_ms": "step_cpu"}
TARGET_PERCENT = 2.0
COMPLAINT = re.compile(r"Warning|Error|Traceback|WARN")


def train(name: str, *watch: str, times: int = 1, cpu: int | None = None) -> dict[str, Any]:
    """One training: what it recorded, its exit code, and what ``watch`` reported of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / f"train_{name}.py"), "recorded.json", str(times)]
        if watch:
            options = [*watch, "--report-dir", "../reports", "--"]
            command = [sys.executable, "-m", "lightning_gpuopt", *options, *command]
        if cpu is not None:
            command = ["taskset", "--cpu-list", str(cpu), *command]
        work = Path(folder) / "work"
        work.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if not (work / "recorded.json").exists():
            raise SystemExit(f"{name}: no training ended\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads((work / "recorded.json").read_text()) | {"exit_code": done.returncode}
        before, _, printed = done.stderr.partition("── lightning-gpuopt watch ")
        lines = (done.stdout + before).replace("\r", "\n").splitlines()
        found["complaints"] = {re.sub(r"\d+", "0", line) for line in lines if COMPLAINT.search(line)}
        found["printed"] = printed.partition("\nReport: ")[0].splitlines()[1:]
        reports = sorted(Path(folder).glob("reports/*/fit-*/report.json"))
        print(f"  {name} {' '.join(watch)}: fit {found['fit_s']:.1f} s, step {found['step_ms']:.1f} ms", flush=True)
        if "--patch" in watch:
            found["patch"] = patch_of(reports[0].parent, done.stderr, work, environment)
        return found | {"report": json.loads(reports[0].read_text()) if reports else {"verdict": "none", "steps": 0}}


def patch_of(report: Path, printed: str, work: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What a run's patch says of each setting, and what its check has found; None if there is no patch."""
    begins = ("proved: ", "not proved: ", "changes ", "no edit: ")
    lines = [line for line in printed.splitlines() if line.startswith(begins)]
    if not (report / "fix.patch").exists():
        return {"lines": lines, "check": None}
    command = [sys.executable, "-m", "lightning_gpuopt", "patch", str(report), "--check"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    checks = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Check: ")]
    return {"lines": lines, "check": checks[-1] if checks else done.stderr[-300:]}


def pairs(name: str, rounds: int, cpu: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Trainings as they are, and under ``watch``."""
    plain, watched = [], []
    with ThreadPoolExecutor() as pool:
        for _ in range(rounds):
            both = pool.submit(train, name, cpu=cpu), pool.submit(train, name, "watch", cpu=cpu)
            plain.append(both[0].result())
            watched.append(both[1].result())
    return plain, watched


def fixed_of(name: str) -> dict[str, Any]:
    """What is kept of a training under ``watch --fix``, and whether one without had the same batches and losses."""
    longer, fixed = train(name, times=2), train(name, "watch", "--fix", "--patch", times=2)
    return {
        **{key: fixed[key] for key in ("exit_code", "steps", "step_ms", "printed", "patch")},
        "verdict": fixed["report"]["verdict"],
        "changes": fixed["report"].get("changes", []),
        **{f"same_{key}": all(map(eq, fixed[key], longer[key])) for key in ("batches", "losses")},
    }


def row_of(name: str, plain: list[dict[str, Any]], watched: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a project's trainings as they are, and under ``watch``."""
    first, report, steps = plain[0], watched[-1]["report"], plain[0]["steps"]
    complaints = {line for each in watched for line in each["complaints"]}
    return {
        "version": importlib.metadata.version(DISTRIBUTIONS.get(name, name.replace("_", "-"))),
        "torch": importlib.metadata.version("torch"),
        "threads": first["threads"],
        "steps": steps,
        "rounds": len(plain),
        **{key: median(each[key] for each in plain) for key in TIMES},
        "plain": {key: [each[key] for each in plain] for key in TIMES},
        "watched": {key: [each[key] for each in watched] for key in TIMES},
        "more_percent": {
            of: (median(each[key] for each in watched) / median(each[key] for each in plain) - 1) * 100
            for key, of in TIMES.items()
        },
        "more_of_each_round_percent": {
            of: [(after[key] / before[key] - 1) * 100 for before, after in zip(plain, watched, strict=True)]
            for key, of in TIMES.items()
        },
        "plain_runs_differ_in": sorted({key for key in SAME for each in plain if each[key] != first[key]}),
        "watched_runs_differ_in": sorted({key for key in SAME for each in watched if each[key] != first[key]}),
        "steps_of_reports": [each["report"]["steps"] for each in watched],
        "complaints_only_under_watch": sorted(complaints - {line for each in plain for line in each["complaints"]}),
        "verdicts": [each["report"]["verdict"] for each in watched],
        "findings": report.get("findings", []),
        "printed": watched[-1]["printed"],
    }


def changed(row: dict[str, Any]) -> bool:
    """Whether ``watch`` changed what is equal in all runs without it, or its report has other steps."""
    differing = set(row["watched_runs_differ_in"]) - set(row["plain_runs_differ_in"])
    return bool(differing or row["complaints_only_under_watch"] or {*row["steps_of_reports"]} != {row["steps"]})


def slower(row: dict[str, Any]) -> str:
    """Whether the training is more than 2 % slower: decided if three rounds of wall and CPU time agree."""
    each = [value for of in ("fit", "fit_cpu") for value in row["more_of_each_round_percent"][of]]
    if len(each) < 6:
        return "undecided"
    if max(each) <= TARGET_PERCENT:
        return "no"
    return "yes" if min(each) > TARGET_PERCENT else "undecided"


def fix_of(row: dict[str, Any]) -> str:
    """What AutoFix did, in a few words."""
    words = [
        f"{each['setting']} {each['from']} → {each['to']}: "
        + (f"{each['measured']:.2f}x, {'kept' if each['kept'] else 'undone'}" if each.get("measured") else "not judged")
        for each in row["fixed"]["changes"]
    ]
    return "; ".join(words) or "no change"


def table(rows: dict[str, Any]) -> list[str]:
    head = (
        "project | steps | ms a step | same | fit, wall | fit, CPU | step, wall | step, CPU | verdict | --fix | patch"
    )
    lines = [f"| {head} |", "|---|---:|---:|---|---:|---:|---:|---:|---|---|---|"]
    for name, row in rows.items():
        more = " | ".join(f"{row['more_percent'][of]:+.1f} %" for of in TIMES.values())
        same = "**no**" if changed(row) else "yes"
        verdicts = ", ".join(sorted(set(row["verdicts"])))
        title = f"{name.replace('_', '-')} {row['version']}"
        lines.append(
            f"| {title} | {row['steps']} | {row['step_ms']:.1f} | {same} | {more} | {verdicts} | {fix_of(row)} "
            f"| {row['fixed']['patch']['check'] or 'none'} |"
        )
    return lines


def results(rows: dict[str, Any]) -> dict[str, Any]:
    packages = ("lightning", "pytorch-lightning", "lightning-gpuopt")
    return {
        "machine": f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}, no GPU is used",
        "python": platform.python_version(),
        **{each: importlib.metadata.version(each) for each in packages},
        "count": len(rows),
        "unchanged": sum(not changed(row) for row in rows.values()),
        "slower": {name: slower(row) for name, row in rows.items()},
        "not_slower": sum(slower(row) == "no" for row in rows.values()),
        "gained": sum(any(each["kept"] for each in row["fixed"]["changes"]) for row in rows.values()),
        "patches": sum(row["fixed"]["patch"]["check"] is not None for row in rows.values()),
        "patches_that_hold": sum(", proved (" in (row["fixed"]["patch"]["check"] or "") for row in rows.values()),
        "projects": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evaluation.projects", description=__doc__)
    names = sorted(each.stem.removeprefix("train_") for each in HERE.glob("train_*.py"))
    installed = [name for name in names if importlib.util.find_spec(MODULES.get(name, name))]
    parser.add_argument("--only", nargs="+", choices=names, default=installed)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", type=int, default=0, help="the one CPU on which plain and watched trainings run")
    parser.add_argument("--keep-fix", action="store_true", help="keep what the file has of trainings under --fix")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = json.loads(options.output.read_text())["projects"] if options.output.exists() else {}
    for name in options.only:
        plain, watched = pairs(name, options.rounds, options.cpu)
        fixed = rows[name]["fixed"] if options.keep_fix else fixed_of(name)
        row = row_of(name, plain, watched) | {"fixed": fixed}
        rows = dict(sorted((rows | {name: row}).items()))
        options.output.write_text(json.dumps(results(rows), indent=1) + "\n")
        print("\n".join(table({name: row})), flush=True)
    found = results(rows)
    print(
        *table(rows),
        *(f"{key}: {found[key]}" for key in ("count", "unchanged", "slower", "gained", "patches", "patches_that_hold")),
        sep="\n",
    )
    return 1 if any(changed(row) for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m evaluation.patch.gains [NAME ...]``: whether the gain that a patch states is there when it is checked.

Each script gets slow samples and more of them. It is watched with ``--fix --patch``, and its patch is run with
``--check``. The gain holds if the check proves one, and its 95 % interval and that of the patch have a value in common.
Writes ``benchmarks/results/patch-gains-cpu.json``; exit code 1 if a gain that a patch states is not there at all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evaluation.patch.catalogue import SCRIPTS
from evaluation.patch.run import write_script

RESULTS = Path(__file__).parents[2] / "benchmarks/results/patch-gains-cpu.json"
SLOW = {"SAMPLES": "2400", "SAMPLE_S": "0.002"}
COMMAND = [sys.executable, "-m", "lightning_gpuopt"]
STATED = re.compile(r"^# proved: .*measured ([0-9.]+)x(?: \(([0-9.]+)x to ([0-9.]+)x\))?", re.MULTILINE)
CHECKED = re.compile(r": ([0-9.]+)x(?: \(([0-9.]+)x to ([0-9.]+)x\))?, (not )?proved \(")


def numbers(match: re.Match[str]) -> dict[str, Any]:
    gain, low, high = (None if each is None else float(each) for each in match.groups()[:3])
    return {"gain": gain, "interval": None if low is None else [low, high]}


def gain_of(name: str, folder: Path) -> dict[str, Any]:
    """What a script's patch states, and what the check of it has found."""
    script = SCRIPTS[name]
    folder.mkdir()
    write_script(script, folder / "tree")
    place = {"cwd": folder / "tree", "env": {**os.environ, **script.environment, **SLOW, "OUT": str(folder / "out")}}
    watch = [*COMMAND, "watch", "--fix", "--patch", "--report-dir", str(folder / "report"), "--"]
    command = [*watch, sys.executable, "train.py", *script.arguments]
    subprocess.run(command, **place, capture_output=True, check=True)
    (report,) = folder.glob("report/*/fit-1/report.json")
    patch = report.with_name("fix.patch")
    stated = STATED.findall(patch.read_text()) if patch.exists() else []
    if len(stated) != 1:
        return {"outcome": "no single gain stated", "stated": len(stated)}
    row = {"stated": numbers(STATED.search(patch.read_text()))}  # type: ignore[arg-type]
    done = subprocess.run(
        [*COMMAND, "patch", str(report), "--check"], **place, capture_output=True, text=True, check=False
    )
    found = CHECKED.search(done.stdout)
    if found is None:
        return {**row, "outcome": "not checked", "said": done.stdout[-300:] + done.stderr[-300:]}
    row["checked"] = numbers(found)
    ends = [row[each]["interval"] or [row[each]["gain"]] * 2 for each in ("stated", "checked")]
    meet = max(each[0] for each in ends) <= min(each[1] for each in ends)
    proved = found[4] is None
    return {**row, "outcome": "holds" if proved and meet else "another gain" if proved else "no gain"}


def main() -> int:
    patched = [name for name, script in SCRIPTS.items() if script.added is not None and isinstance(script.source, str)]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in sys.argv[1:] or patched:
            rows[name] = gain_of(name, Path(place).resolve() / name)
            print(f"{name:28} {rows[name]}", flush=True)
    outcomes = [each["outcome"] for each in rows.values()]
    counts = {each: outcomes.count(each) for each in dict.fromkeys(outcomes)}
    print(f"{len(rows)} scripts: {counts}")
    found = {"scripts": len(rows), "of": len(patched), "outcomes": counts, "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return int("no gain" in counts)


if __name__ == "__main__":
    sys.exit(main())

"""Measured figures in README and on the pages are those of a results file, which each block names.

On the pages that make claims each figure is asked for, on the others what compares outside of code: "1.9x", "500/s",
"9 of 10". A block of a page (lines without an empty one between them) or a line of it names its files: ``<!-- from:
watch-cpu.json -->``; figures of the set-up, which are no result, follow as ``; set-up: 2 ms, 50 ms``. What stands in a
fence of code is a block as well. Files are looked for in ``benchmarks/results/`` and in ``docs/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (
    "README.md",
    *(f"docs/{page}.md" for page in ("autofix", "benchmarks", "comparison", "dali", "faq", "limits", "scale", "watch")),
    *(f"docs/{page}.md" for page in ("workers", "workers-benchmarks", "workers-rules")),
)
OTHER_PAGES: Final = sorted(
    {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "dev"}
    - {*PAGES, "docs/fault-suite.md"}
)

UNSOURCED: Final[dict[str, set[str]]] = {
    "README.md": {
        *("14 of 15", "13 of 13", "5 of 9"),  # counted in the files of the H100 by hand
    },
    "docs/benchmarks.md": {
        *("1.8 %", "-4 %", "5 of 9", "9 of 9", "13 of 13", "72 of 77"),  # the same
        *("23 of 29", "25 of 29"),  # counted in the cases of workers-cpu.json
        *("49 µs", "69 µs"),  # other runs that day
    },
}
"""Figures whose results file is not kept, from before this was asked for: none may be added."""

NUMBER: Final = r"(?<![\w.,])-?\d+(?:,\d{3})*(?:\.\d+)?"
FIGURE: Final = re.compile(
    rf"(?P<number>{NUMBER})(?P<unit>x\b| %| µs| ms|/s\b)|(?<![\w.,-])(?P<part>\d+) of (?P<whole>\d+)(?![\w.-]\d)"
)
CELL: Final = re.compile(rf"(?<=\| ){NUMBER}(?= \|)|(?<![\w.,])\d{{1,3}}(?:,\d{{3}})+(?![\w/.])")
SOURCE: Final = re.compile(r"<!-- (?:from: (?P<files>[^;>]+?))?(?:; )?(?:set-up: (?P<set_up>[^>]+?))? -->")
SHOWN: Final = re.compile(r"`(?:benchmarks/results/)?([\w.-]+\.jsonl?)`")
UNIT: Final = re.compile(r"(?:^|_)(us|ms|s|percent)(?=_|$)")
SCALES: Final[dict[str, dict[str, tuple[float, ...]]]] = {
    "": dict.fromkeys(("us", "ms", "s", "percent", ""), (1.0,)),
    "x": {"": (1.0,)},
    "%": {"percent": (1.0,), "": (1.0, 100.0)},
    "µs": {"us": (1.0,), "ms": (1e3,), "s": (1e6,), "": (1.0,)},
    "ms": {"us": (1e-3,), "ms": (1.0,), "s": (1e3,), "": (1.0,)},
    "/s": {"": (1.0,), "s": (1.0,)},
}
"""What a value of a results file is multiplied by to be in this unit, by the unit in the value's name."""


def blocks(page: str) -> Iterator[list[str]]:
    """The blocks of a page as lines; a comment alone belongs to the block after it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = re.split(r"^(```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    pending: list[str] = []
    for block in (each for part in parts for each in ([part] if part.startswith("```") else part.split("\n\n"))):
        lines = [*pending, *block.strip("\n").split("\n")]
        pending = []
        if all(not line or line.startswith("<!--") for line in lines):
            pending = [line for line in lines if line]
        elif lines:
            yield lines


def claims(page: str, code: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Each figure of a page, with or without those in code, and the files that it may be from."""
    for lines in blocks(page):
        if not code and any(line.startswith("```") for line in lines):
            continue
        whole = [match for line in lines if line.startswith("<!--") for match in [SOURCE.search(line)] if match]
        for line in lines:
            if line.startswith("#"):  # a heading
                continue
            named = whole + [match for match in [SOURCE.search(line)] if match and not line.startswith("<!--")]
            files = [file.strip() for match in named for file in (match["files"] or "").split(",") if file.strip()]
            shown = SHOWN.findall(line if line.startswith("|") else " ".join(lines))
            files += [file for file in shown if (ROOT / "benchmarks/results" / file).exists()]
            set_up = {each.strip() for match in named for each in (match["set_up"] or "").split(", ")}
            text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", "", line)
            for match in [*FIGURE.finditer(text), *(CELL.finditer(text) if files else ())]:
                if match[0] not in set_up:
                    yield match[0], files


@cache
def values(file: str) -> tuple[tuple[str, Any], ...]:
    """All values of a results file or numbers of a page, with the unit that their names give."""
    path = next(each for each in (ROOT / "benchmarks/results" / file, ROOT / "docs" / file) if each.exists())
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return tuple(("", float(each.replace(",", ""))) for each in re.findall(NUMBER, text))
    return tuple(_leaves(json.loads(text if path.suffix == ".json" else f"[{','.join(text.splitlines())}]")))


@cache
def pairs(file: str) -> set[str]:
    """The "N of M" of a page."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8") if file.endswith(".md") else ""
    found = {match[0] for match in FIGURE.finditer(text) if match["whole"]}
    found |= {f"{part} of {whole}" for part, whole in re.findall(r"(\d+) false alarms in (\d+)", text)}
    return found | {f"{part} of {whole}" for whole, part in re.findall(r"Of (\d+) [^,.]*,[a-z ]* (\d+)", text)}


def _leaves(value: Any, unit: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            named = UNIT.findall(name)
            yield from _leaves(each, named[-1] if named else unit)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, unit)
    elif isinstance(value, (int, float, str)):
        yield unit, value


def is_found(figure: str, files: list[str]) -> bool:
    """Whether a figure is in one of the files, as far as its digits go."""
    known = [value for file in files for value in values(file)]
    if any(isinstance(value, str) and re.search(rf"(?<![\d.,]){re.escape(figure)}", value) for _, value in known):
        return True
    match = FIGURE.fullmatch(figure)
    plain = [(unit, value) for unit, value in known if isinstance(value, (int, float))]
    if match is None or not match["whole"]:
        text, unit = (match["number"], match["unit"].strip()) if match is not None else (figure, "")
        number, digits = float(text.replace(",", "")), len(text.partition(".")[2])
        scaled = (value * scale for of, value in plain for scale in SCALES[unit].get(of, ()))
        return any(abs(each - number) <= 0.5001 * 10**-digits for each in scaled)
    if any(file.endswith(".md") for file in files):
        return any(figure in pairs(file) for file in files)
    numbers, part, whole = {value for _, value in plain}, int(match["part"]), int(match["whole"])
    as_share = whole in numbers and any(abs(each * whole - part) < 0.01 for each in numbers)
    return as_share or {part, whole} <= numbers


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_is_one_of_the_results_that_its_block_names(page: str) -> None:
    found = [(figure, is_found(figure, files)) for figure, files in claims(page)]
    missing = {figure for figure, known in found if not known}
    allowed = UNSOURCED.get(page, set())
    assert missing - allowed == set(), f"{page}: without a source, or not as the source has it"
    assert allowed - missing == set(), f"{page}: has a source now, or is gone: take it out of UNSOURCED"


def test_each_comparison_is_one_of_the_results_that_its_block_names() -> None:
    claimed = [(page, *claim) for page in OTHER_PAGES for claim in claims(page, code=False)]
    compared = [each for each in claimed if re.search(r"x$|/s$| of ", each[1])]
    assert [(page, figure) for page, figure, files in compared if not is_found(figure, files)] == []


@pytest.mark.parametrize(
    ("figure", "file", "known"),
    [
        *(("64 of 64", "fault-suite.md", True), ("63 of 63", "fault-suite.md", False)),
        *(("7.7 µs", "overhead-cpu.json", True), ("4.1 µs", "overhead-cpu.json", False)),
        *(("28 of 29", "workers-cpu.json", True), ("0.91x", "dali-cpu.json", True), ("0.92x", "dali-cpu.json", False)),
        *(("17.8 ms", "watch-cpu.json", True), ("17.9 ms", "watch-cpu.json", False)),
    ],
)
def test_a_figure_is_found_as_far_as_its_digits_go(figure: str, file: str, known: bool) -> None:
    assert is_found(figure, [file]) is known


@pytest.mark.parametrize("page", ["README.md", "docs/watch.md", "docs/autofix.md"])
def test_the_text_of_a_run_is_the_benchmark_s(page: str) -> None:
    found = json.loads((ROOT / "benchmarks/results/watch-cpu.json").read_text())
    printed = [*found["printed"], *found["printed_of_fixed"]]
    text = (ROOT / page).read_text(encoding="utf-8").partition("```text\n")[2].partition("\n```")[0]
    shown = [line.removesuffix(" ...") for line in text.splitlines() if not re.match(r" *\.\.\.$|──|Report|Next", line)]
    lines = [line for line in shown if line.strip(" ─")]
    assert [line for line in lines if not any(each.startswith(line) for each in printed)] == []
    assert len(lines) > 3


def test_the_fault_suite_counts_its_own_rows() -> None:
    text = (ROOT / "docs/fault-suite.md").read_text(encoding="utf-8")
    counted = [each for each in re.split(r"^## ", text, flags=re.MULTILINE) if " verdicts right" in each]
    assert len(counted) >= 2
    for section in counted:
        rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
        got = [(row[2].strip(), row[3].strip()) for row in rows]
        right = sum(wanted == found for wanted, found in got)
        assert f"{right} of {len(got)} verdicts right" in section
        healthy = sum(wanted == "compute_bound" for wanted, _ in got)
        assert re.search(rf" false alarms in {healthy} (controls|healthy runs)", section)

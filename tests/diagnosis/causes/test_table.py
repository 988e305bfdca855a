"""The one table of causes, and the documentation of each."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

import lightning_gpuopt.diagnosis
from evaluation.catalogue import FAULTS
from evaluation.gpu_catalogue import GPU_FAULTS
from lightning_gpuopt.diagnosis.causes.table import CAUSES, COMPUTE_BOUND, NOT_MEASURED, UNKNOWN, cause_of
from lightning_gpuopt.diagnosis.record import Verdict
from lightning_gpuopt.measurements.loading import QueueTimes
from tests.diagnosis.numbers import TWO_WORKERS, data_finding, host, measurement, times, workers

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = DOCS / "causes"
HEADINGS = ["How it looks", "What to do", "How it differs from other causes", "Evidence"]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_KEY = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its blocks of code, in which a comment looks like a heading."""
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> list[str]:
    return re.findall(r"^## (.+)$", prose(page), re.MULTILINE)


def evidence_keys(page: Path) -> list[str]:
    """The keys in a page's table of evidence."""
    _, _, evidence = prose(page).partition("\n## Evidence\n")
    return _KEY.findall(evidence)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def keys_in_the_code() -> re.Pattern[str]:
    """What the diagnosis may write: its strings, and those that it puts together, such as ``f"{name}_grown"``."""
    found = set()
    for file in Path(lightning_gpuopt.diagnosis.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values]
                if re.fullmatch(r"\w{4,}", "".join(parts)):
                    found.add("".join(re.escape(part) or r"\w+" for part in parts))
    return re.compile("|".join(sorted(found)))


def test_every_cause_has_a_meaning_an_advice_and_a_page_in_the_docs() -> None:
    for name, cause in CAUSES.items():
        assert cause.name == name
        assert cause.meaning.endswith("."), name
        assert cause.advice, name
        page = PAGES / f"{name}.md"
        assert prose(page).startswith(f"# {name}\n\n")
        assert headings(page) == HEADINGS, name
        assert f"\n1. {name}: " in page.read_text(encoding="utf-8"), "an excerpt of the report"


def pages_with_evidence() -> Iterator[Path]:
    return (page for page in sorted(PAGES.glob("*.md")) if "Evidence" in headings(page))


def test_the_evidence_in_the_docs_is_what_the_code_writes() -> None:
    assert {page.stem for page in pages_with_evidence()} > {*CAUSES}
    for page in pages_with_evidence():
        keys = evidence_keys(page)
        assert keys, page
        assert len(keys) == len(set(keys)), page
        assert [key for key in keys if not keys_in_the_code().fullmatch(key)] == [], page


def known_keys(name: str) -> set[str]:
    """The keys of evidence on the page of a cause, and on those that its section of evidence links to."""
    page = PAGES / f"{name}.md"
    linked = _LINK.findall(prose(page).partition("\n## Evidence\n")[2])
    return {key for each in [page.name, *linked] for key in evidence_keys(PAGES / each.partition("#")[0])}


def test_what_decides_is_evidence_that_the_docs_have() -> None:
    for name, cause in CAUSES.items():
        keys = cause.decided_by.split()
        assert keys, name
        assert len(keys) == len(set(keys)), name
        assert set(keys) <= known_keys(name), name


def test_the_index_has_every_cause_with_its_meaning_and_every_page() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for name, cause in CAUSES.items():
        assert f"| [`{name}`]({name}.md) | {cause.meaning} |" in index
    pages = {page.name for page in PAGES.glob("*.md")} - {"README.md"}
    assert pages == {link for link in _LINK.findall(index) if "/" not in link}


def test_the_code_in_the_docs_is_python() -> None:
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            ast.parse(textwrap.dedent(code), str(page))


def test_the_docs_have_all_that_a_finding_of_the_loader_writes() -> None:
    for timed, activity, queues in product(
        [workers(data_s=0.19, cpu=0.9), workers(data_s=0.05, collate_s=0.14, cpu=0.9)],
        [host(0.05, affinity=1, swapped_in_mib_s=8.0), host(0.9), host(0.9, free=0.1), host(0.9, throttled=0.5)],
        [None, QueueTimes(fetches=100, ready=300, empty=4, waits=98, wait_s=5.0)],
    ):
        found = measurement(times(data_wait=5.0), TWO_WORKERS, workers=timed, host=activity, queues=queues)
        finding = data_finding(found)
        assert set(finding.evidence) <= known_keys(finding.cause)


def linked_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def leads_somewhere(link: str, page: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return "://" in link or (target.exists() and (not anchor or anchor in anchors(target)))


def test_every_relative_link_leads_somewhere() -> None:
    links = [(page, link) for page in linked_pages() for link in _LINK.findall(prose(page))]
    assert len(links) > 300
    assert [(page.name, link) for page, link in links if not leads_somewhere(link, page)] == []


def test_a_verdict_is_one_of_the_causes_or_one_of_three_others() -> None:
    assert set(get_args(Verdict)) == {*CAUSES, COMPUTE_BOUND.name, UNKNOWN.name, NOT_MEASURED.name}


def test_every_verdict_has_a_sentence() -> None:
    assert cause_of("compute_bound").meaning == COMPUTE_BOUND.meaning
    assert cause_of("unknown").meaning == UNKNOWN.meaning
    assert cause_of("slow_storage").meaning == CAUSES["slow_storage"].meaning
    assert cause_of("of another version").meaning == ""


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/stall-detector.md"])
def test_the_number_of_causes_in_the_docs_is_that_of_the_table(page: str) -> None:
    numbers = re.findall(r"(\d+) \[causes\]|one of (\d+) causes|one of \[(\d+)\]", (ROOT / page).read_text())
    assert [number for each in numbers for number in each if number] == [str(len(CAUSES))]


def test_every_cause_is_in_the_faults_that_verdicts_are_graded_by() -> None:
    verdicts = {fault.verdict for fault in (*FAULTS, *GPU_FAULTS)}
    assert verdicts - {COMPUTE_BOUND.name} == {*CAUSES} - {"pin_memory"}, "whose thread needs a CUDA build of torch"


def test_rows_say_what_the_rules_ask() -> None:
    of_loader = {name for name, row in CAUSES.items() if row.in_loader_code}
    assert of_loader == {
        *("main_process_loading", "slow_storage", "slow_transform", "cpu_saturated", "cpu_throttled"),
        *("head_of_line", "worker_transfer"),
    }
    assert {name for name, row in CAUSES.items() if row.in_user_code} - of_loader == {"callback", "logging"}
    assert {name for name, row in CAUSES.items() if row.storage} == {
        *("main_process_loading", "slow_storage", "cpu_saturated"),
    }
    assert {name for name, row in CAUSES.items() if row.needs_cpus} == {
        *("main_process_loading", "slow_transform", "cpu_saturated"),
    }
    for row in CAUSES.values():
        assert bool(row.doing) == ("{num_workers}" in row.advice)

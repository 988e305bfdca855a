"""The one table of causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gpuopt.diagnosis.causes import CAUSES, COMPUTE_BOUND, meaning_of

DOCS = Path(__file__).parents[2] / "docs" / "causes.md"


@pytest.mark.parametrize("name", [*CAUSES])
def test_every_cause_has_a_meaning_an_advice_and_a_section_in_the_docs(name: str) -> None:
    cause = CAUSES[name]
    assert cause.name == name
    assert cause.meaning.endswith(".")
    assert cause.advice
    assert cause.docs == f"docs/causes.md#{name}"
    assert f"\n## {name}\n" in DOCS.read_text(encoding="utf-8")


def test_every_verdict_has_a_sentence() -> None:
    assert meaning_of("compute_bound") == COMPUTE_BOUND.meaning
    assert meaning_of("slow_storage") == CAUSES["slow_storage"].meaning
    assert meaning_of("of another version") == ""

"""A notebook's cells as one module, whose names they share; a comment line stands before each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lightning_gpuopt.watch.code_facts import CallSite, Made, RunCode

NOTEBOOK: Final = "notebook"
"""The name of that module."""
_MARK: Final = "# cell of the notebook\n"


def joined(code: RunCode) -> RunCode:
    """The code of a run with the cells that ran, in their order, as one."""
    if not code.cells:
        return code
    text, above = "", {}
    for name, cell in code.cells.items():
        text += _MARK
        above[name] = text.count("\n")
        text += cell.removesuffix("\n") + "\n"

    def moved(made: Made) -> Made:
        return replace(
            made, calls=tuple(_below(site, above[site.file]) if site.file in above else site for site in made.calls)
        )

    loaders, training = tuple(map(moved, code.loaders)), tuple(map(moved, code.training))
    trainer = moved(code.trainer) if code.trainer is not None else None
    return replace(code, cells={NOTEBOOK: text}, loaders=loaders, training=training, trainer=trainer)


def _below(site: CallSite, lines: int) -> CallSite:
    start, end = (each and each + lines for each in (site.start, site.end))
    return replace(site, file=NOTEBOOK, line=site.line + lines, start=start, end=end)


def changed_cells(code: RunCode, text: str) -> Iterator[tuple[str, str]]:
    """The cells of a run that differ in the new text of them all, with their new text."""
    for (name, before), after in zip(
        code.cells.items(), re.split(f"^{_MARK}", text, flags=re.MULTILINE)[1:], strict=True
    ):
        if after != before.removesuffix("\n") + "\n":
            yield name, after if before.endswith("\n") else after.removesuffix("\n")

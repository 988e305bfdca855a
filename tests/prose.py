"""``python -m tests.prose``: the pages' sentences are short, and say in the field's words what only we would say so.

``docs/dev/words.txt`` has such words with better ones. None may be in a page, or in a text or docstring of the package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
READ_FIRST = ("README.md", "docs/index.md", "docs/symptoms.md", "docs/guide.md")
MOST_WORDS_FIRST, MOST_WORDS = 25, 35
WORDS = ROOT / "docs/dev/words.txt"

_CODE = re.compile(r"^( *)```.*?^\1```|<!--.*?-->|!\[[^]]*\]\([^)]*\)|<[^>]+>", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_PARTS = re.compile(r"\n(?=\s*\n)|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)|\n(?=#)")
_END = re.compile(r"(?<=[.!?])[\"')\]*_`]*\s+(?=[\"'(\[*_`]*[A-Z0-9])")


class Text(NamedTuple):
    """Some prose, and where it begins."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def prose_of(page: Path) -> Iterator[Text]:
    """The paragraphs, items and cells of a page, without its code."""
    text = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page.read_text(encoding="utf-8"))
    line = 1
    for part in _PARTS.split(text):
        for cell in part.split("|") if part.lstrip().startswith("|") else [part]:
            yield Text(page, line, " ".join(_LINK.sub(r"\1", cell).split()))
        line += part.count("\n") + 1


def texts_of(module: Path) -> Iterator[Text]:
    """The texts in a module's code, docstrings included; where values are put into one, what stands around them."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(module, node.lineno, " ".join(node.value.split()))


def too_long(text: Text) -> Iterator[str]:
    """A line for each sentence with too many words."""
    most = MOST_WORDS_FIRST if str(text.file.relative_to(ROOT)) in READ_FIRST else MOST_WORDS
    for sentence in _END.split(text.text):
        count = sum(1 for word in sentence.split() if re.search(r"\w", word))
        if count > most:
            yield f"{text}: a sentence of {count} words, expected {most} at most: {sentence[:60]} ..."


def of_ours(text: Text, words: dict[re.Pattern[str], str]) -> Iterator[str]:
    """A line for each word that only we would use."""
    for pattern, better in words.items():
        if found := pattern.search(text.text):
            yield f"{text}: {found[0]!r}, better: {better}"


def words_of_ours() -> dict[re.Pattern[str], str]:
    """Better words, by those they replace."""
    rows = (line.split("=", 1) for line in WORDS.read_text(encoding="utf-8").splitlines() if "=" in line)
    return {re.compile(rf"\b(?:{ours.strip()})\b", re.IGNORECASE): better.strip() for ours, better in rows}


def main() -> int:
    """Print what is wrong; 1 where something is."""
    words, wrong = words_of_ours(), list[str]()
    for page in PAGES:
        for text in prose_of(page):
            wrong += [*too_long(text), *of_ours(text, words)]
    for module in sorted((ROOT / "lightning_gpuopt").rglob("*.py")):
        for text in texts_of(module):
            wrong += of_ours(text, words)
    print("\n".join(wrong) or "the pages' words: fine")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

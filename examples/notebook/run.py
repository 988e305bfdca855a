"""Run the notebook's cells without Jupyter: ``python run.py [--smoke]``."""

import argparse
import json
import linecache
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "diagnose.ipynb"
FEW = "MAX_STEPS = 20\nBATCH_SIZE = 4\n"


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    """The notebook's cells of code, in their order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def execute(notebook: Path, parameters: str = "") -> dict[str, Any]:
    """Execute all cells of code in one namespace.

    Args:
        notebook: The file.
        parameters: Takes the place of the cell with the tag "parameters"; empty: the notebook's own.

    Returns:
        The namespace, as it is after the last cell.
    """
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(code_cells(notebook), 1):
        replaced = parameters and "parameters" in cell["metadata"].get("tags", ())
        source = parameters if replaced else "".join(cell["source"])
        name = f"<ipython-input-{number}-run>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
    return namespace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    options = parser.parse_args()
    execute(NOTEBOOK, FEW if options.smoke else "")


if __name__ == "__main__":
    main()

"""Build README.md from nbs/index.ipynb: prose, code and the outputs that the notebook really gave."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def directives(source: str) -> set[str]:
    """Return the names of the `#|` lines at the top of a cell."""
    lines = [line for line in source.splitlines() if line.startswith("#|")]
    return {line[2:].strip().rstrip(":") for line in lines}


def output_text(output: dict[str, Any]) -> str:
    """Return one output as Markdown: Markdown itself, else indented plain text."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return "".join(data["text/markdown"]).strip()
    text = "".join(output.get("text", data.get("text/plain", []))).rstrip()
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """Return the parts that one cell adds to the page."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return [source]
    names = directives(source)
    if "hide" in names or any(name.startswith("default_exp") for name in names):
        return []
    code = "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip()
    parts = [] if "echo: false" in names else [f"``` python\n{code}\n```"]
    return parts + [text for output in cell["outputs"] if (text := output_text(output))]


def build(notebook: Path) -> str:
    """Return the whole page."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    note = "<!-- Built from nbs/index.ipynb by tools/build_readme.py; edit the notebook, not this file. -->"
    parts = [part for cell in cells for part in cell_parts(cell) if part]
    return "\n\n".join([note, *parts]) + "\n"


if __name__ == "__main__":
    page = build(ROOT / "nbs" / "index.ipynb")
    target = ROOT / "README.md"
    if "--check" in sys.argv:
        sys.exit(
            0 if target.read_text(encoding="utf-8") == page else "README.md is not what the index gives."
        )
    target.write_text(page, encoding="utf-8")

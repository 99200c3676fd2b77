"""Build README.md from nbs/index.ipynb: prose, code and the outputs that the notebook really gave."""

import json
import posixpath
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


class TableRows(HTMLParser):
    """Collect the cells of the table in a piece of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def markdown_table(html: str) -> str:
    """Return an HTML table as a Markdown table, without the first column, which counts the rows."""
    parser = TableRows()
    parser.feed(html)
    rows = [[cell.strip().replace("|", "\\|") for cell in row[1:]] for row in parser.rows]
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def directives(source: str) -> set[str]:
    """Return the names of the `#|` lines at the top of a cell."""
    lines = [line for line in source.splitlines() if line.startswith("#|")]
    return {line[2:].strip().rstrip(":") for line in lines}


def output_text(output: dict[str, Any]) -> str:
    """Return one output as Markdown: Markdown itself, a table as one, else plain text in a block."""
    data = output.get("data", {})
    if "text/markdown" in data:
        return "".join(data["text/markdown"]).strip()
    if "<table" in "".join(data.get("text/html", "")):
        return markdown_table("".join(data["text/html"]))
    text = "".join(output.get("text", data.get("text/plain", []))).rstrip()
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def from_the_root(address: str) -> str:
    """Return where a link of the index leads, seen from the folder of the README."""
    if re.match(r"[a-z]+:|#|/", address):
        return address
    return posixpath.normpath(posixpath.join("nbs", address))


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """Return the parts that one cell adds to the page."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return [LINK.sub(lambda found: f"{found[1]}{from_the_root(found[2])}{found[3]}", source)]
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
        same = target.is_file() and target.read_text(encoding="utf-8") == page
        sys.exit(0 if same else "README.md is not what the index gives.")
    target.write_text(page, encoding="utf-8")

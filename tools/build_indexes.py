"""Fill the table of every folder's index notebook: its notebooks in reading order, each with its title and purpose."""

import json
import re
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"
HEAD = "| Notebook | What it is for |\n|---|---|"


def title_and_purpose(notebook: Path) -> tuple[str, str]:
    """Return the title of a notebook and the line below it that says what it is for."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        found = re.match(r"# (.+)\n+> (.+)", "".join(cell["source"]))
        if found:
            return found[1], found[2]
    raise ValueError(f"{notebook} does not begin with a title and a line that says what it is for")


def table(folder: Path) -> str:
    """Return the table of a folder's notebooks."""
    rows = [HEAD]
    for notebook in sorted(folder.glob("*.ipynb")):
        if notebook.stem != "index":
            title, purpose = (text.replace("|", "\\|") for text in title_and_purpose(notebook))
            rows.append(f"| [{title}]({notebook.name}) | {purpose} |")
    return "\n".join(rows)


def with_table(index: Path) -> str:
    """Return the text of an index notebook with its table as it should be."""
    notebook = json.loads(index.read_text(encoding="utf-8"))
    tables = [cell for cell in notebook["cells"] if "".join(cell["source"]).startswith(HEAD)]
    if len(tables) != 1:
        raise ValueError(f"{index} has {len(tables)} tables of notebooks")
    tables[0]["source"] = table(index.parent).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def outdated(notebooks: Path = NOTEBOOKS) -> list[Path]:
    """Return the index notebooks whose table is not as it should be."""
    indexes = sorted(notebooks.glob("*/index.ipynb"))
    return [index for index in indexes if index.read_text(encoding="utf-8") != with_table(index)]


if __name__ == "__main__":
    found = outdated()
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{index}: run tools/build_indexes.py" for index in found) or 0)
    for index in found:
        index.write_text(with_table(index), encoding="utf-8")

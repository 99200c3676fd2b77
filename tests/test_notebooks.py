"""Every notebook runs from top to bottom, as a test of the package that was generated from it.

The cells that are exported are not defined again: they are replaced by the generated module, so that the examples and
checks of a notebook test what people import. That the module says the same as the notebook is a test of its own.
"""

import json
import os
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
SKIP_FLAGS = [
    flag for flag in ("slow", "net", "browser") if flag not in os.environ.get("AI4RAG_NB_FLAGS", "")
]

# Every notebook has a shell of its own, and each would tidy up at exit, a second apiece, what the exit tidies up anyway.
InteractiveShell.atexit_operations = lambda self: None


def directive_names(source: str) -> list[str]:
    """Return what stands behind the `#|` at the top of a cell."""
    return [line[2:].strip() for line in source.splitlines() if line.startswith("#|")]


def module_name(cells: list[dict]) -> str:
    """Return the module that a notebook exports to, or an empty text."""
    for cell in cells:
        for name in directive_names("".join(cell["source"])):
            if name.startswith("default_exp"):
                return "ai4rag_nb." + name.split()[1]
    return ""


def with_generated_module(notebook: dict) -> dict:
    """Put one import of the generated module in the place of the exported cells."""
    module = module_name(notebook["cells"])
    if not module:
        return notebook
    take_over = (
        f"import {module} as _m\nglobals().update({{k: v for k, v in vars(_m).items() if k[:2] != '__'}})"
    )
    for cell in notebook["cells"]:
        names = directive_names("".join(cell["source"]))
        if cell["cell_type"] == "code" and any(name.split()[0] in ("export", "exports") for name in names):
            cell["source"] = [take_over]
            take_over = "pass"
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(ROOT / "nbs")))
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = with_generated_module(json.loads(path.read_text(encoding="utf-8")))
    copy = tmp_path / path.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    copy.write_text(json.dumps(notebook), encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    passed, _ = run_notebook(copy, skip_flags=SKIP_FLAGS, cell_timeout=300)
    assert passed, f"{path.relative_to(ROOT)} failed; the cell and its traceback stand above"

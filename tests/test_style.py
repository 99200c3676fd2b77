"""The rhythm of the notebooks, as chkstyle sees it: text beside every public definition, small cells, imports alone.

Of its rules only those about the narrative count here. Its rules of layout contradict ruff and typed signatures.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = {
    *("too-many-defs", "long-exported-cell", "long-example-cell", "undocumented-export"),
    *("comment-in-example", "exported-run", "example-run", "mixed-imports"),
}
FOUND = re.compile(
    r"^# (?P<notebook>\S+\.ipynb):cell\[(?P<cell>\w+)\]:\d+: \[(?P<rule>[\w-]+)\] (?P<what>.*)$", flags=re.M
)


def faults(*places: str) -> list[str]:
    """Return what breaks one of the rules that count."""
    command = [str(Path(sys.executable).with_name("chkstyle")), "--show-rule", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert not done.stderr, done.stderr
    found = [match for match in FOUND.finditer(done.stdout) if match["rule"] in RULES]
    return [f"{match['notebook']} cell {match['cell']} [{match['rule']}] {match['what']}" for match in found]


def test_notebooks_tell_a_story() -> None:
    found = faults("nbs")
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("cells", "rule"),
    [
        (
            ["#| export\ndef first():\n    return 1", "#| export\ndef second():\n    return 2"],
            "undocumented-export",
        ),
        (["1\n" * 11], "long-example-cell"),
        (["1", "2", "3", "4"], "example-run"),
        (["1  # why not"], "comment-in-example"),
        (["import os\nos.sep"], "mixed-imports"),
        (["#| export\ndef a(): ...\ndef b(): ...\ndef c(): ...\ndef d(): ..."], "too-many-defs"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, cells: list[str], rule: str) -> None:
    """A rule that chkstyle no longer knows, or prints in another way, would otherwise hide every fault."""
    import nbformat

    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in ["#| default_exp sample", *cells]]
    nbformat.write(notebook, tmp_path / "sample.ipynb")
    assert f"[{rule}]" in "".join(faults(str(tmp_path)))

"""The house: notebooks and package in step, sizes, directions of imports, style, and what a wheel holds."""

import ast
import filecmp
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
PACKAGE = ROOT / "ai4rag_nb"
NOTEBOOKS = sorted(path for path in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "_modidx.py"))
LAYERS = [
    *("foundations", "indexing", "querying", "evaluation", "optimization", "learning"),
    *("dashboard", "serving"),
]
HEAVY = [
    *(
        "torch",
        "transformers",
        "sentence_transformers",
        "pymilvus",
        "milvus_lite",
        "unitxt",
        "pygam",
        "openai",
    ),
    *("matplotlib", "pandas", "docling_core", "ipywidgets", "langchain_text_splitters", "model2vec"),
]


def cells_of(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def is_exported(cell: dict) -> bool:
    source = "".join(cell["source"])
    return cell["cell_type"] == "code" and bool(re.match(r"#\|\s*exports?\b", source))


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of everything that the notebook tools read and write."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("nbs", "ai4rag_nb"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    for name in ("pyproject.toml", "settings.ini", "_quarto.yml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_cleaning_changes_no_notebook(copied_tree: Path) -> None:
    before = {path: path.read_bytes() for path in copied_tree.joinpath("nbs").rglob("*.ipynb")}
    done = run(tool("nbdev-clean"), folder=copied_tree)
    assert done.returncode == 0, done.stderr
    changed = [
        str(path.relative_to(copied_tree)) for path, text in before.items() if path.read_bytes() != text
    ]
    assert changed == [], "run nbdev-clean"


def test_export_changes_no_module(copied_tree: Path) -> None:
    done = run(tool("nbdev-export"), folder=copied_tree)
    assert done.returncode == 0, done.stderr
    for fresh in copied_tree.joinpath("ai4rag_nb").rglob("*.py"):
        kept = PACKAGE / fresh.relative_to(copied_tree / "ai4rag_nb")
        assert kept.is_file() and filecmp.cmp(fresh, kept, shallow=False), (
            f"{kept} is not what its notebook says"
        )


def test_every_module_has_its_notebook() -> None:
    for module in MODULES:
        named = re.search(r"File to edit: (\S+\.ipynb)", module.read_text(encoding="utf-8"))
        assert named, f"{module} names no notebook"
        assert (module.parent / named.group(1)).resolve().is_file(), (
            f"{module} is left over from {named.group(1)}"
        )


def test_readme_is_the_index() -> None:
    done = run(sys.executable, "tools/build_readme.py", "--check")
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme and "make test" in readme


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(NBS)))
def test_notebook_has_the_house_size(path: Path) -> None:
    exported = [len("".join(cell["source"]).splitlines()) for cell in cells_of(path) if is_exported(cell)]
    assert max(exported, default=0) <= 40, "split the longest exported cell by idea"
    assert sum(exported) <= 300, "split the notebook by idea"
    outputs = [output for cell in cells_of(path) for output in cell.get("outputs", [])]
    assert len(json.dumps(outputs)) <= 150_000, "outputs are to be small"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(NBS)))
def test_notebook_opens_with_title_and_purpose(path: Path) -> None:
    first = next("".join(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "markdown")
    assert re.match(r"# .+\n\n> .+", first), "the first text is a title and a line that says what it is for"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.relative_to(NBS)))
def test_imports_stand_alone_in_their_cells(path: Path) -> None:
    for cell in cells_of(path):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "%" in source[:1]:
            continue
        statements = ast.parse(source).body
        kinds = {isinstance(statement, ast.Import | ast.ImportFrom) for statement in statements}
        type_checking = any(isinstance(statement, ast.If) for statement in statements)
        assert len(kinds) < 2 or type_checking, f"a cell mixes imports with other code:\n{source[:200]}"
        assert not re.search(r"^from .+ import \*", source, flags=re.M), "no star imports"


def imported_packages(module: Path) -> Iterator[str]:
    """Name the layers that a module imports, whatever the way it is spelled."""
    here = module.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(here[: len(here) - node.level + 1]) + (node.module or "").split(".")
            yield next((part for part in base if part), "")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ai4rag_nb."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("ai4rag_nb."))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(module: Path) -> None:
    own = module.relative_to(PACKAGE).parts[0]
    if own not in LAYERS:
        return
    above = [layer for layer in imported_packages(module) if LAYERS.index(layer) > LAYERS.index(own)]
    assert above == [], f"{own} may not import {above}"


def test_import_is_light() -> None:
    """The top and every module of ours load no heavy package; the top alone takes well under 0.3 s."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES]
    code = (
        "import sys, importlib\nimport ai4rag_nb\nfor name in sys.argv[2:]: importlib.import_module(name)\n"
    )
    code += "print(*[name for name in sys.argv[1].split(',') if name in sys.modules])"
    done = run(sys.executable, "-c", code, ",".join(HEAVY))
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
    really_heavy = ",".join(name for name in HEAVY if name not in ("docling_core", "pandas"))
    done = run(sys.executable, "-c", code, really_heavy, *names)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def public_functions(module: Path) -> Iterator[tuple[str, ast.FunctionDef, list[str]]]:
    """Give every public function and method of a module with the module's lines."""
    text = module.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        scopes = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
        for inner in scopes:
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                yield f"{getattr(node, 'name', '')}.{inner.name}", inner, lines


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_signatures_are_typed_and_explained(module: Path) -> None:
    for name, function, lines in public_functions(module):
        assert ast.get_docstring(function), f"{name} has no docstring"
        assert function.returns is not None, f"{name} does not say what it returns"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            if argument.arg in ("self", "cls"):
                continue
            assert argument.annotation is not None, f"{name}({argument.arg}) has no type"
            assert "#" in lines[argument.lineno - 1 : argument.end_lineno + 1][0] or "#" in "".join(
                lines[argument.lineno - 1 : argument.end_lineno + 1]
            ), f"{name}({argument.arg}) has no comment"
            assert len(argument.arg) > 2 or argument.arg in ("k", "n"), (
                f"{name}({argument.arg}): use a full word"
            )


def test_wheel_holds_every_subpackage_and_the_corpora(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(PACKAGE, tree / "ai4rag_nb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    done = run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(tmp_path), str(tree)),
    )
    assert done.returncode == 0, done.stderr
    inside = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    expected = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - inside == set()


def test_settings_file_says_the_defaults() -> None:
    from ai4rag_nb.foundations.settings import Settings, load_settings

    assert load_settings(ROOT / "settings.ini") == Settings()


def test_ruff_is_content() -> None:
    places = ["nbs", "ai4rag_nb", "tests", "tools", "benchmarks"]
    done = run(tool("ruff"), "check", "--no-cache", *places)
    assert done.returncode == 0, done.stdout
    done = run(
        tool("ruff"), "format", "--no-cache", "--check", *(name for name in places if name != "ai4rag_nb")
    )
    assert done.returncode == 0, done.stdout


def test_mypy_is_content(tmp_path: Path) -> None:
    done = run(tool("mypy"), "--cache-dir", str(tmp_path), "ai4rag_nb")
    assert done.returncode == 0, done.stdout


def test_facade_names_everything_it_promises() -> None:
    """Every name of the top level can be imported; the stub file is what the lazy loader reads."""
    top = importlib.import_module("ai4rag_nb")
    for name in top.__all__:
        assert getattr(top, name) is not None


def test_no_path_or_secret_of_a_machine_is_committed() -> None:
    home = str(Path.home())
    for path in [*NOTEBOOKS, *MODULES, ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        assert home not in text and "/tmp/" not in text, f"{path} holds a path of one machine"
        assert not re.search(r"sk-[A-Za-z0-9]{20,}", text), f"{path} holds something like a key"


def test_constraints_pin_what_is_installed() -> None:
    """A fresh installation is the tested one."""
    from importlib.metadata import PackageNotFoundError, version

    if os.environ.get("AI4RAG_NB_ANY_VERSIONS"):
        pytest.skip("other versions are tried on purpose (AI4RAG_NB_ANY_VERSIONS)")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, pinned = line.partition("==")
        if not pinned or line.startswith("#"):
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        assert installed.split("+")[0] == pinned, f"{name} is {installed}, tested with {pinned}"


CLOCKS = re.compile(
    r"\btime\.(time|time_ns|monotonic|perf_counter|process_time|thread_time|sleep)\(|\btimeit\b"
)


def test_no_test_reads_a_clock_or_sleeps() -> None:
    """Tests count work and wait for conditions: a busy machine fails none of them."""
    found = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name == "small_world.py":  # `wait_until` may ask again, and gives up after a long time
            before, body = text.split("def wait_until(")
            text = before + body.partition("\n\n\n")[2]
        found += [f"{path.name}: {match[0]}" for match in CLOCKS.finditer(text)]
    for path in NOTEBOOKS:
        for cell in cells_of(path):
            if cell["cell_type"] == "code" and not is_exported(cell):
                found += [f"{path.name}: {match[0]}" for match in CLOCKS.finditer("".join(cell["source"]))]
    assert found == []


def skips_without_reason(text: str) -> list[str]:
    """Find calls and marks that skip a test, or let it fail, and do not say why."""
    tree = ast.parse(text)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in (
            "skip",
            "skipif",
            "xfail",
            "importorskip",
        ):
            continue
        if not (ast.unparse(node.value) == "pytest" or ast.unparse(node.value).endswith("mark")):
            continue
        call = called.get(id(node))
        reasons = [word.value for word in call.keywords if word.arg == "reason"] if call else []
        if call and not reasons and node.attr == "skip":
            reasons = call.args[:1]
        if not reasons or (isinstance(reasons[0], ast.Constant) and not str(reasons[0].value).strip()):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_skip_says_why() -> None:
    for path in sorted((ROOT / "tests").glob("*.py")):
        assert skips_without_reason(path.read_text(encoding="utf-8")) == [], path.name
    for bad in (
        "pytest.skip()",
        "pytest.skip('')",
        "pytest.importorskip('x')",
        "f(pytest.mark.skip)",
        "pytest.mark.skipif(True)",
        "pytest.mark.xfail(reason=' ')",
    ):
        assert len(skips_without_reason(bad)) == 1, bad
    good = "pytest.skip('why'); pytest.mark.skipif(x, reason='why'); path.skip(); pytest.importorskip('x', reason=why)"
    assert skips_without_reason(good) == []


def test_skips_are_listed_at_the_end(tmp_path: Path) -> None:
    """`make test` ends with what was skipped, and why."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(
        r"^test:.*\n\t.*-m pytest (?!.*(--no-summary|-r\s*N|-c |--override-ini)).* tests$",
        makefile,
        re.MULTILINE,
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\ndef test_one():\n    pytest.skip('the moon is not full')\n"
    )
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^SKIPPED \[1\] test_one.py:4: the moon is not full$", done.stdout, re.MULTILINE)

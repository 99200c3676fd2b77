"""The documentation is built whole, its links lead somewhere, and the pages that introduce the project are in step."""

import html
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"


def load_tool(name: str) -> ModuleType:
    """Import a script of the folder `tools`."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


benchmark_tables = load_tool("benchmark_tables")
build_docs = load_tool("build_docs")
build_indexes = load_tool("build_indexes")
build_readme = load_tool("build_readme")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built without Quarto, which not every machine has."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    found = build_docs.build(folder)
    assert found == [], "\n".join(found)
    return folder


def test_every_notebook_has_its_page(site: Path) -> None:
    for notebook in build_docs.source_notebooks(NBS):
        place = notebook.relative_to(NBS)
        page = site / place.with_name(build_docs.without_number(place.stem) + ".html")
        assert page.is_file(), f"{place} has no page"
        title, purpose = build_indexes.title_and_purpose(notebook)
        text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
        assert any(page_words(title) in page_words(head) for head in re.findall(r"<h1.*?</h1>", text)), (
            f"{page.name} has another title"
        )
        assert page_words(purpose[:30]) in page_words(text), f"{page.name} does not say what it is for"


def page_words(text: str) -> str:
    """Return the letters of a text, since pages have typographic quotes and marked-up code."""
    return re.sub(r"[^a-z]", "", re.sub(r"<[^>]+>|&\w+;", "", text.casefold()))


def test_introductions_are_not_lost(site: Path) -> None:
    page = (site / "03_evaluation" / "index.html").read_text(encoding="utf-8")
    assert page_words(build_docs.introduction(NBS / "03_evaluation" / "index.ipynb")) in page_words(page)


def test_sidebar_is_in_reading_order(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    sidebar = page[page.index('id="quarto-sidebar"') : page.index("<main")]
    linked = re.findall(r'href="(?:\./)?([^"#]+\.html)"', sidebar)
    places = [path.relative_to(NBS) for path in build_docs.source_notebooks(NBS)]
    order = sorted(
        (place for place in places if len(place.parts) > 1),
        key=lambda place: (place.parts[0] != "tutorials", place.parts[0], place.stem != "index", place.name),
    )
    names = [f"{place.parts[0]}/{build_docs.without_number(place.stem)}.html" for place in order]
    assert linked == ["index.html", *names, "CONTRIBUTING.html", "CHANGELOG.html"]


def test_picture_is_on_the_first_page_and_in_the_readme(site: Path) -> None:
    picture = site / "images" / "dashboard.png"
    assert picture.is_file() and picture.stat().st_size < 100_000
    assert 'src="images/dashboard.png"' in (site / "index.html").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](nbs/images/dashboard.png)" in readme and (NBS / "images" / "dashboard.png").is_file()


def test_nothing_of_this_machine_is_on_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert str(Path.home()) not in text and str(ROOT) not in text, (
            f"{page.name} names a folder of this machine"
        )
        assert "Traceback (most recent call last)" not in text, f"{page.name} shows a traceback"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("b.html", ""),
        ("b.html#place", ""),
        ("#top", ""),
        ("folder/", ""),
        ("data:image/png;base64,AA==", ""),
        ("mailto:someone", ""),
        ("c.html", "leads to nothing"),
        ("b.html#elsewhere", "leads to no such place"),
        ("https://example.org/x.js", "leads outside"),
        ("//example.org/x.js", "leads outside"),
        ("../../secret.html", "leads outside"),
    ],
)
def test_addresses_are_judged(tmp_path: Path, address: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text("<p>here</p>", encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="place">b</h2>', encoding="utf-8")
    (tmp_path / "a.html").write_text(f'<p id="top"><a href="{address}">a</a></p>', encoding="utf-8")
    assert build_docs.check_site(tmp_path) == ([f"a.html: '{address}' {problem}"] if problem else [])


@pytest.mark.parametrize(
    "loading",
    [
        '<script src="https://example.org/x.js"></script>',
        '<link rel="stylesheet" href="https://example.org/x.css">',
        '<img src="https://example.org/x.png">',
        '<img src="x.png" srcset="https://example.org/x.png 2x">',
        '<a href="https://example.org/"><img src="x.png"></a>',
    ],
)
def test_what_is_loaded_from_outside_is_found(tmp_path: Path, loading: str) -> None:
    (tmp_path / "x.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(loading, encoding="utf-8")
    assert len(build_docs.check_site(tmp_path)) == 1


def test_style_sheets_are_looked_through(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face{src:url('https://example.org/f.woff')}", encoding="utf-8")
    assert build_docs.check_site(tmp_path) == ["a.css: 'https://example.org/f.woff' leads outside"]


@pytest.mark.parametrize(
    ("text", "on_the_site"),
    [
        ("[a](01_source.ipynb)", "[a](source.ipynb)"),
        ("[a](../01_indexing/02a_writer.ipynb#x)", "[a](../01_indexing/writer.ipynb#x)"),
        ("[a](../index.ipynb)", "[a](../index.ipynb)"),
        ("[a](../CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
        ("![a](images/1_x.png)", "![a](images/1_x.png)"),
    ],
)
def test_links_between_notebooks_become_links_between_pages(text: str, on_the_site: str) -> None:
    assert build_docs.with_page_links(text) == on_the_site


def test_indexes_list_their_notebooks() -> None:
    folders = {path.parent for path in NBS.glob("*/*.ipynb")}
    assert {path.parent for path in NBS.glob("*/index.ipynb")} == folders
    assert build_indexes.outdated() == [], "run tools/build_indexes.py"


def test_first_page_leads_to_every_folder() -> None:
    text = (NBS / "index.ipynb").read_text(encoding="utf-8")
    for index in NBS.glob("*/index.ipynb"):
        assert f"({index.relative_to(NBS)})" in text, f"{index.parent.name} is not on the first page"


def test_links_of_the_readme_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    addresses = re.findall(r"\]\(([^)\s#]+)\)", readme)
    assert len(addresses) > 10
    assert [address for address in addresses if not (ROOT / address).exists()] == []


def test_tables_become_markdown() -> None:
    html = "<table><tr><th></th><th>a</th><th>b</th></tr><tr><th>0</th><td>x|y</td><td>1</td></tr></table>"
    assert build_readme.markdown_table(html) == "| a | b |\n|---|---|\n| x\\|y | 1 |"


def test_commands_of_the_readme_exist() -> None:
    from ai4rag_nb.serving.arguments import parse_arguments

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ai4rag-nb (.+)$", readme, flags=re.M)
    assert len(commands) == 9
    for command in commands:
        assert parse_arguments(shlex.split(command)).command
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    for name in re.findall(
        r"(?:^|`)make ([a-z]+)",
        readme + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        flags=re.M,
    ):
        assert name in targets, f"there is no `make {name}`"


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    needed = {re.match(r"[\w.-]+", line)[0] for line in [*project["dependencies"], *extras]}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reasons = page[page.index("## Why each dependency is there") :]
    named = set(re.findall(r"^\| (?:`\w+` \| )?`([\w.-]+)` \| \S", reasons, flags=re.M))
    assert named == needed


def test_tutorial_shows_the_five_cells() -> None:
    cells = json.loads((NBS / "tutorials" / "01_first_search.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = "\n".join(
        "".join(cell["source"]) for cell in cells if not "".join(cell["source"]).startswith("#| hide")
    )
    for line in (
        *("docs = load_documents(", "bench = BenchmarkData.from_file(", "space = AI4RAGSearchSpace("),
        *(
            "experiment = AI4RAGExperiment(",
            "experiment.search()",
            ".leaderboard()",
            "best = experiment.results.best_pattern()",
        ),
        *("best.generate(", "best.chat("),
    ):
        assert line in shown, f"the tutorial does not show {line}"


def test_licence_is_the_one_that_is_named() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_quoted_figures_are_those_of_the_results() -> None:
    """What the first page says of retrieval stands in the results of the benchmark."""
    retrieval = benchmark_tables.results("retrieval")
    page = (NBS / "index.ipynb").read_text(encoding="utf-8")
    assert f"lost: {benchmark_tables.sentence(retrieval, 'scifact')}" in page
    table = benchmark_tables.quality(retrieval)
    above = [f"`{name}`" for name in table["set"][table["above 0.90"] == "yes"]]
    assert f"Above 0.90 are {' and '.join(above)};" in page
    merged = retrieval["structured"]
    for way in (merged["baseline"], merged["chosen"]):
        found = merged["ways"][way]["held-out"]["mrr"]
        assert f"{found['mean']:.2f} [{found['ci_low']:.2f}, {found['ci_high']:.2f}]" in page
    assert (
        f"{merged['ways'][merged['chosen']]['held-out']['mrr']['relative']:.0%}".replace("%", " % more")
        in page
    )


def test_results_with_and_without_a_router_are_read() -> None:
    retrieval = benchmark_tables.results("retrieval")
    old = {
        name: {key: kept for key, kept in found.items() if key != "router"}
        for name, found in retrieval.items()
    }
    assert "routed rightly" not in benchmark_tables.quality(old)
    new = {
        **old,
        "code": {**old["code"], "router": {"questions": 99, "accuracy": 0.957, "majority": 0.5, "folds": 5}},
    }
    assert dict(zip(new, benchmark_tables.quality(new)["routed rightly"], strict=True))["code"] == "96%"


def test_the_page_of_measurements_is_made_of_the_results() -> None:
    """The tables that are stored with the page are those that the files give now."""
    cells = json.loads((NBS / "tutorials" / "04_what_was_measured.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    shown = "".join(
        "".join(out.get("data", {}).get("text/html", [])) for cell in cells for out in cell.get("outputs", [])
    )
    for table in (
        benchmark_tables.quality(benchmark_tables.results("retrieval")),
        benchmark_tables.end_to_end(benchmark_tables.results("end_to_end")),
        benchmark_tables.store_speed(benchmark_tables.results("store_speed")),
    ):
        for value in table.to_numpy().ravel():
            assert (html.escape(value) if isinstance(value, str) else f"{value}"[:5]) in shown, value

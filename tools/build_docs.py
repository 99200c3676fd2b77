"""Build the documentation from the notebooks, with Quarto where there is one, else with smalldocs.

The notebooks are processed by nbdev and put in reading order with a sidebar; the renderer is the one step that can be
replaced. The finished pages are checked: every link leads somewhere, and no page asks another host for anything.
"""

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "nbs"
PAGES_BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md")  # pages that lie beside the notebooks' folder
LEADING_NUMBER = re.compile(r"^\d+[a-z]?_")
MODULE = re.compile(
    r"\b(?:ai4rag_nb|collections|typing|pathlib|numpy|docling_core)(?:\.[a-z_]\w*)*\.(?=[A-Z])"
)
LINK = re.compile(r"(\]\()([^)\s#]+\.(?:ipynb|md))(#[^)\s]*)?(\))")


def without_number(name: str) -> str:
    """Return a file's or folder's name without the number that gives the reading order."""
    return LEADING_NUMBER.sub("", name)


def page_of(address: str) -> str:
    """Return where a link between notebooks leads on the site, where files have no numbers."""
    folder, _, name = address.rpartition("/")
    if name in PAGES_BESIDE:
        folder = folder.removeprefix("..").removeprefix("/")
    return f"{folder}/{without_number(name)}".removeprefix("/")


def with_page_links(text: str) -> str:
    """Turn the links between notebooks in some Markdown into links between pages."""
    return LINK.sub(lambda found: f"{found[1]}{page_of(found[2])}{found[3] or ''}{found[4]}", text)


def source_notebooks(notebooks: Path) -> list[Path]:
    """Return the notebooks in reading order."""
    found = (path.relative_to(notebooks) for path in sorted(notebooks.rglob("*.ipynb")))
    return [notebooks / path for path in found if not any(part[0] in "._" for part in path.parts)]


def lenient_signature(function: Callable[..., Any], *, eval_str: bool = True) -> inspect.Signature:
    """Return a signature; types that are only imported for type checkers stay as they are written."""
    try:
        return inspect.signature(function, eval_str=eval_str)
    except NameError:
        return inspect.signature(function)


def title_of(notebook: Path) -> str:
    """Return the title of a notebook."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        found = re.match(r"# (.+)", "".join(cell["source"]))
        if cell["cell_type"] == "markdown" and found:
            return found[1]
    raise ValueError(f"{notebook} has no title")


def introduction(source: Path) -> str:
    """Return what stands below title and purpose in their cell; nbdev takes these two and drops the rest."""
    for cell in json.loads(source.read_text(encoding="utf-8"))["cells"]:
        found = re.match(r"# .+\n+> .+\n+([\s\S]+)", "".join(cell["source"]))
        if cell["cell_type"] == "markdown":
            return found[1] if found else ""
    return ""


def finish_cell(cell: dict[str, Any]) -> None:
    """Mend one processed cell: links between pages, short names of types, nothing that a notebook may not hold."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        cell["source"] = with_page_links(source)
    elif cell["cell_type"] == "raw":  # the page has its name already
        cell["source"] = re.sub(r"^output-file: .*\n", "", source, flags=re.M)
    cell["metadata"].pop("execution", None)
    if cell.pop("has_sd", False):
        for output in cell["outputs"]:
            data = output.get("data", {})
            data |= {kind: MODULE.sub("", "".join(text)) for kind, text in data.items()}


def process_notebook(source: Path, page: Path) -> None:
    """Let nbdev process one notebook into a page."""
    import fastcore.docments
    from nbdev.doclinks import NbdevLookup
    from nbdev.processors import FilterDefaults
    from nbdev.serve_drv import exec_nb

    fastcore.docments.signature = lenient_signature
    NbdevLookup.code = lambda self, symbol: (
        None
    )  # the source is on the page; there is no other place to link to
    os.environ["IN_TEST"] = "1"
    main = sys.modules["__main__"]
    exec_nb(source, page, FilterDefaults)  # runs the cells that import, in a `__main__` of its own
    sys.modules["__main__"] = main
    notebook = json.loads(page.read_text(encoding="utf-8"))
    first = {"cell_type": "markdown", "id": "introduction", "metadata": {}, "source": introduction(source)}
    notebook["cells"].insert(1, first)
    for cell in notebook["cells"]:
        finish_cell(cell)
    page.write_text(json.dumps(notebook), encoding="utf-8")


def process_notebooks(notebooks: Path, target: Path) -> None:
    """Process every notebook, and bring the pictures and the pages beside them along."""
    sources = source_notebooks(notebooks)
    places = [source.relative_to(notebooks) for source in sources]
    pages = [target / place.with_name(without_number(place.name)) for place in places]
    for folder in {page.parent for page in pages}:
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(process_notebook, sources, pages))
    for pattern in ("*.png", "*.svg", "*.css"):
        for file in notebooks.rglob(pattern):
            place = target / file.relative_to(notebooks)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    for name in PAGES_BESIDE:
        shutil.copy(ROOT / name, target / name)


def section(folder: Path) -> dict[str, object]:
    """Return a section of the sidebar: the index notebook of a folder, and below it the others in reading order."""
    names = [path.name for path in sorted(folder.glob("*.ipynb")) if path.stem != "index"]
    return {
        "section": title_of(folder / "index.ipynb"),
        "href": f"{folder.name}/index.ipynb",
        "contents": [f"{folder.name}/{without_number(name)}" for name in names],
    }


def sidebar(notebooks: Path) -> list[object]:
    """Return the sidebar: the index, the tutorials, then a section for each folder, in reading order."""
    folders = [index.parent for index in notebooks.glob("*/index.ipynb")]
    sections = [
        section(folder) for folder in sorted(folders, key=lambda path: (path.name != "tutorials", path.name))
    ]
    return ["index.ipynb", *sections, {"section": "The project", "contents": list(PAGES_BESIDE)}]


def configure(notebooks: Path, target: Path) -> Path:
    """Write the site's configuration with the sidebar, and return where the pages will be."""
    configuration = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    configuration.pop("metadata-files", None)
    configuration["project"]["output-dir"] = "_site"
    contents = sidebar(notebooks)
    configuration["website"]["sidebar"] = {"style": "floating", "collapse-level": 1, "contents": contents}
    (target / "_quarto.yml").write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return target / "_site"


class Addresses(HTMLParser):
    """Collect what a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and "href" in values:
            self.loads.append(values["href"])
        if "srcset" in values:
            self.loads += [part.split()[0] for part in values["srcset"].split(",") if part.strip()]


def read_addresses(page: Path) -> Addresses:
    """Return the addresses in one page."""
    addresses = Addresses()
    addresses.feed(page.read_text(encoding="utf-8"))
    return addresses


def address_problem(site: Path, page: Path, address: str, pages: dict[Path, Addresses]) -> str:
    """Say what is wrong with one address in a page; nothing when all is well."""
    parts = urlsplit(address)
    if parts.scheme in ("data", "javascript", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        return "leads outside"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site):
        return "leads outside"
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "leads to nothing"
    known = pages[target].anchors if target in pages else None
    if parts.fragment and known is not None and unquote(parts.fragment) not in known:
        return "leads to no such place"
    return ""


def check_site(site: Path) -> list[str]:
    """Return every broken link and every address outside the site."""
    site = site.resolve()
    pages = {page: read_addresses(page) for page in sorted(site.rglob("*.html"))}
    problems = []
    for page, addresses in pages.items():
        for address in dict.fromkeys(addresses.links + addresses.loads):
            problem = address_problem(site, page, address, pages)
            if problem:
                problems.append(f"{page.relative_to(site)}: '{address}' {problem}")
    for sheet in sorted(site.rglob("*.css")):
        for address in re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text(encoding="utf-8")):
            problems.append(f"{sheet.relative_to(site)}: '{address}' leads outside")
    return problems


def render_command(folder: Path, quarto: bool) -> list[str]:
    """Return the command that renders a processed folder."""
    if quarto:
        return ["quarto", "render", str(folder), "--no-execute"]
    return [str(Path(sys.executable).with_name("smalldocs")), "render", "--quiet", str(folder)]


def build(output: Path, notebooks: Path = NOTEBOOKS, quarto: bool = False) -> list[str]:
    """Build the site and return what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        process_notebooks(notebooks, work)
        site = configure(notebooks, work)
        done = subprocess.run(render_command(work, quarto), capture_output=True, text=True, check=False)
        if done.returncode:
            return [done.stdout + done.stderr]
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(site, output)
        said = [line for line in (done.stdout + done.stderr).splitlines() if "warn" in line.lower()]
    return said + check_site(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs", help="folder for the pages")
    options = parser.parse_args()
    there_is_quarto = shutil.which("quarto") is not None
    print(
        "Building with Quarto." if there_is_quarto else "Building with smalldocs, because there is no Quarto."
    )
    found = build(options.out, quarto=there_is_quarto)
    count = len(list(options.out.rglob("*.html")))
    print(*(found or [f"{count} pages in {options.out}, all links whole."]), sep="\n")
    sys.exit(bool(found))

"""Build the documentation from the notebooks, with Quarto where there is one, else with smalldocs.

The fallback is one step that can be replaced: notebooks are processed by nbdev, put in order with a sidebar, rendered, and
the finished pages are checked: every link leads somewhere and no page asks another host for anything.
"""

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
LEADING_NUMBER = re.compile(r"^\d+[a-z]?_")


def page_title(notebook: Path) -> str:
    """Return the title of a processed notebook."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        found = re.search(r"^(?:# |title: )(.+)$", "".join(cell["source"]), flags=re.M)
        if found:
            return found.group(1).strip("'\" ")
    return notebook.stem


def without_number(name: str) -> str:
    """Return a file's or folder's name without the number that gives the reading order."""
    return LEADING_NUMBER.sub("", name)


def lenient_signature(function: Callable[..., Any], *, eval_str: bool = True) -> inspect.Signature:
    """Return a signature; types that are only imported for type checkers stay as they are written."""
    try:
        return inspect.signature(function, eval_str=eval_str)
    except NameError:
        return inspect.signature(function)


def process_notebooks(target: Path) -> None:
    """Let nbdev process the notebooks, and write them under the names that its links expect."""
    import fastcore.docments
    from nbdev.processors import FilterDefaults
    from nbdev.serve_drv import exec_nb

    fastcore.docments.signature = lenient_signature
    os.environ["IN_TEST"] = "1"
    shutil.rmtree(target, ignore_errors=True)
    for source in sorted((ROOT / "nbs").rglob("*.ipynb")):
        if source.name[0] in "._" or ".ipynb_checkpoints" in source.parts:
            continue
        place = source.relative_to(ROOT / "nbs")
        page = target / place.with_name(without_number(place.name))
        page.parent.mkdir(parents=True, exist_ok=True)
        exec_nb(source, page, FilterDefaults)


def sidebar(notebooks: Path) -> list[object]:
    """Return the sidebar: the index, then a section for each folder, in reading order."""
    contents: list[object] = ["index.ipynb"]
    for folder in sorted(path for path in notebooks.iterdir() if path.is_dir() and path.name[0] not in "._"):
        pages = sorted(folder.glob("*.ipynb"), key=lambda path: (path.stem != "index", path.name))
        files = [f"{folder.name}/{without_number(page.name)}" for page in pages]
        name = without_number(folder.name).replace("_", " ").capitalize()
        contents.append({"section": name, "contents": files})
    return contents


def configure(target: Path) -> Path:
    """Write the site's configuration with the sidebar, and return where the pages will be."""
    configuration = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    configuration.pop("metadata-files", None)
    configuration["project"]["output-dir"] = "_site"
    configuration["website"]["sidebar"] = {"style": "floating", "contents": sidebar(ROOT / "nbs")}
    (target / "_quarto.yml").write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return target / "_site"


class Addresses(HTMLParser):
    """Collect what a page links to and what it loads."""

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
        elif "src" in values:
            self.loads.append(values["src"])
        elif tag == "link" and "href" in values:
            self.loads.append(values["href"])


def read_addresses(page: Path) -> Addresses:
    """Return the addresses in one page."""
    addresses = Addresses()
    addresses.feed(page.read_text(encoding="utf-8"))
    return addresses


def check_site(site: Path) -> list[str]:
    """Return every broken link and every address outside the site."""
    pages = {page: read_addresses(page) for page in site.rglob("*.html")}
    problems = []
    for page, addresses in pages.items():
        for address in addresses.links + addresses.loads:
            parts = urlsplit(address)
            if parts.scheme in ("data", "javascript", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                problems.append(f"{page.relative_to(site)} leads outside: {address}")
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists():
                problems.append(f"{page.relative_to(site)} links to nothing: {address}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in anchors:
                problems.append(f"{page.relative_to(site)} links to no such place: {address}")
    return problems


def build(output: Path) -> list[str]:
    """Build the site without Quarto and return what is wrong with it."""
    work = ROOT / "_proc_docs"
    process_notebooks(work)
    site = configure(work)
    command = [str(Path(sys.executable).with_name("smalldocs")), "render", "--quiet", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stdout + done.stderr]
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(site, output)
    shutil.rmtree(work)
    return check_site(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs", help="folder for the pages")
    options = parser.parse_args()
    if shutil.which("quarto"):
        print("Building with Quarto.")
        sys.exit(
            subprocess.run(
                [str(Path(sys.executable).with_name("nbdev-docs"))], cwd=ROOT, check=False
            ).returncode
        )
    print("Building with smalldocs, because there is no Quarto.")
    found = build(options.out)
    print(
        *(found or [f"{len(list(options.out.rglob('*.html')))} pages in {options.out}, all links whole."]),
        sep="\n",
    )
    sys.exit(bool(found))

"""Measure what the package weighs: import time against a bare interpreter, packages and megabytes installed.

Times are medians of seven processes; the ratio to starting the interpreter alone holds on any machine.
Run: python benchmarks/imports.py
"""

import json
import statistics
import subprocess
import sys
import time
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

RESULT = Path(__file__).parent / "results" / "imports.json"
HEAVY = (
    "torch",
    "transformers",
    "pymilvus",
    "unitxt",
    "pygam",
    "openai",
    "pandas",
    "docling_core",
    "matplotlib",
)


def seconds(code: str) -> float:
    """Return the median time of running some code in a new interpreter."""
    times = []
    for _ in range(7):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Collect everything that a package needs without extras."""
    if name.lower() in found:
        return found
    try:
        found[name.lower()] = distribution(name)
    except ModuleNotFoundError:
        return found
    for line in requires(name) or []:
        wanted = Requirement(line)
        extras = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if extras:
            needed(wanted.name, found)
            for extra in wanted.extras:
                for inner in requires(wanted.name) or []:
                    more = Requirement(inner)
                    if more.marker is not None and more.marker.evaluate({"extra": extra}):
                        needed(more.name, found)
    return found


def megabytes(package: Distribution) -> float:
    """Return the size of a package's files."""
    files = [package.locate_file(file) for file in package.files or []]
    return sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).is_file()) / 1e6


def main() -> None:
    """Measure and write the results."""
    alone, ours = seconds("pass"), seconds("import ai4rag_nb")
    loaded = f"import sys, ai4rag_nb; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    heavy = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    ).stdout.split()
    packages = needed("ai4rag_nb", {})
    sizes = {name: megabytes(package) for name, package in packages.items()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    found = {
        "import_seconds": round(ours - alone, 3),
        "import over interpreter start": round(ours / alone, 2),
        "heavy packages loaded": heavy,
        "packages installed": len(packages),
        "megabytes installed": round(sum(sizes.values())),
        "largest, megabytes": {name: round(size) for name, size in largest},
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

"""Draw nbs/images/dashboard.png: the upper part of the snapshot in the first tutorial, as a browser shows it.

Needs chromium. The picture is committed, so nobody else needs it; run this when the dashboard looks different.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "nbs" / "tutorials" / "01_first_search.ipynb"
PICTURE = ROOT / "nbs" / "images" / "dashboard.png"
WIDTH, HEIGHT = 1180, 900


def snapshot() -> str:
    """Return the largest HTML output of the tutorial."""
    cells = json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return max(("".join(output.get("data", {}).get("text/html", "")) for output in outputs), key=len)


def draw(html: str, picture: Path) -> None:
    """Let a browser draw a page, and keep the upper part in few colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("There is no chromium; install it first.")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8><body style='margin:16px'>{html}", encoding="utf-8"
        )
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=2"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={folder}/page.png", page.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)
        image = Image.open(f"{folder}/page.png").convert("RGB").resize((WIDTH * 5 // 4, HEIGHT * 5 // 4))
    picture.parent.mkdir(exist_ok=True)
    image.quantize(48).save(picture, optimize=True)


if __name__ == "__main__":
    draw(snapshot(), PICTURE)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1024} kB")

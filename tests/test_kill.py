"""Killed at any moment, a search goes on: nothing that was answered is paid for again, and the final table is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import command, environment, run_arguments, table_of, wait_until

THREADS = 10  # questions that are answered at the same time
MOMENTS = 10 if "slow" in os.environ.get("AI4RAG_NB_FLAGS", "") else 5

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL exists on POSIX only")


def arguments(folder: Path, run: str, workspace: str) -> list[str]:
    return run_arguments(
        folder, "--out", str(folder / run), "--workspace", str(folder / workspace), "--max-evals", "8"
    )


def table_in(folder: Path) -> list[dict[str, Any]]:
    from ai4rag_nb import open_run

    return table_of(open_run(folder))


def paid_calls(stub: OpenAIStub) -> tuple[list[str], list[str]]:
    """Give every prompt and every text that was sent."""
    prompts = [repr(body["messages"]) for path, body in stub.bodies if path.endswith("/completions")]
    texts = [text for path, body in stub.bodies if path.endswith("/embeddings") for text in body["input"]]
    return prompts, texts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The table of a search that nobody disturbs, and how many requests that cost something it makes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with OpenAIStub(delay=0.02, listed_window=512) as stub:
        done = subprocess.run(
            command(*arguments(folder, "run", "workspace")),
            env=environment(stub),
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr.decode()
        yield table_in(folder / "run"), len(stub.bodies)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_killed_search_goes_on(
    tmp_path: Path, undisturbed: tuple[list[dict[str, Any]], int], moment: int
) -> None:
    table, requests = undisturbed
    chance = random.Random(2_000 + moment)
    # One moment lies in each of as many parts of the search, the last ones close to its end.
    when = round((moment + chance.random()) / MOMENTS * requests)
    with OpenAIStub(delay=0.02, listed_window=512) as stub:
        process = subprocess.Popen(
            command(*arguments(tmp_path, "run", "workspace")),
            env=environment(stub),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wait_until(lambda: len(stub.bodies) >= when or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        prompts, texts = paid_calls(stub)
        again = subprocess.run(
            command(*arguments(tmp_path, "run", "workspace")),
            env=environment(stub),
            capture_output=True,
            timeout=300,
        )
        assert again.returncode == 0, again.stderr.decode()
        assert "Traceback" not in again.stderr.decode()
        all_prompts, all_texts = paid_calls(stub)
    repeated_prompts = len(all_prompts) - len(set(all_prompts))
    assert repeated_prompts <= THREADS, f"{repeated_prompts} of {len(prompts)} answers were paid for twice"
    repeated_texts = len(all_texts) - len(set(all_texts))
    assert repeated_texts <= 12, (
        f"{repeated_texts} of {len(texts)} texts were paid for twice: more than one request"
    )
    assert without_collections(table_in(tmp_path / "run")) == without_collections(table)


def without_collections(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: entry[name] for name in ("name", "rank", "state", "score", "scores", "settings")}
        for entry in table
    ]

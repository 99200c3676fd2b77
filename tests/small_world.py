"""A small world for tests of whole searches: six documents, twelve questions, a service to pay, and ways to start a search."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai_stub import OpenAIStub

from ai4rag_nb import AI4RAGExperiment, AI4RAGSearchSpace, BaseEventHandler, BenchmarkData, load_documents
from ai4rag_nb.foundations.events import Event, PhaseStarted, TrialStarted
from ai4rag_nb.foundations.settings import Settings

KEY = "sk-secret-3f9a77c1e0"  # what must never be seen anywhere
SPEC_EMBEDDING, SPEC_CHAT = "openai:stub-embedding", "openai:stub-chat"

DOCUMENTS = {
    "bakery.md": """# The bakery at Oven Lane

The bakery opens at six in the morning and closes when the last loaf is sold. Rye bread is baked on Tuesdays only.

## Sourdough

The sourdough starter is called Gertrude and is fed twice a day with rye flour. A loaf rests for fourteen hours before it
goes into the stone oven, which is heated with beech wood to 260 degrees.
""",
    "ferry.md": """# The ferry to Heron Island

The ferry leaves the north pier every forty minutes. The crossing takes twelve minutes in calm water.

## Fares

A ticket costs three crowns for adults; children under seven travel free. Bicycles cost one crown. In fog the captain, Ada
Lindqvist, sounds the horn twice before she casts off.
""",
    "library.md": """# The town library

The library lends books for four weeks and maps for three days. A lost card is replaced for two crowns.

## The reading room

The reading room holds 48 seats under a glass roof. Talking is allowed on the gallery only. The oldest book is a herbal
printed in 1547, which is kept behind the desk.
""",
    "lighthouse.md": """# The lighthouse on Gull Rock

The lighthouse was built in 1862 from grey granite. Its lamp turns once in nine seconds and is seen from 21 miles.

## The keeper

The keeper lives on the second floor and winds the clockwork every evening. Visitors may climb the 199 steps on Sundays.
""",
    "orchard.md": """# The orchard behind the mill

The orchard grows eleven kinds of apples. The Winter Banana ripens last, at the end of October.

## Pruning

Trees are pruned in February, never in frost below minus five degrees. The cuttings are burned in the bakery's oven. Bees
from four hives pollinate the blossoms.
""",
    "clock/tower.md": """# The clock tower

The clock has one hand and strikes every quarter of an hour. The great bell weighs 900 kilograms and is named Osric.

## Repairs

The clockmaker comes each spring and oils the wheels with whale-free oil. In 1911 lightning split the spire, and the
clock stood still for two years.
""",
}
RECORDS = [
    ("On which day is rye bread baked?", ["Tuesdays"], "bakery.md", "Rye bread is baked on Tuesdays only."),
    (
        "What is the sourdough starter called?",
        ["Gertrude"],
        "bakery.md",
        "The sourdough starter is called Gertrude",
    ),
    (
        "How long does the ferry's crossing take?",
        ["twelve minutes"],
        "ferry.md",
        "The crossing takes twelve minutes",
    ),
    ("What does a bicycle cost on the ferry?", ["one crown"], "ferry.md", "Bicycles cost one crown."),
    ("For how long does the library lend maps?", ["three days"], "library.md", "maps for three days"),
    ("How many seats has the reading room?", ["48 seats"], "library.md", "The reading room holds 48 seats"),
    ("When was the lighthouse built?", ["1862"], "lighthouse.md", "The lighthouse was built in 1862"),
    ("How many steps may visitors climb?", ["199 steps"], "lighthouse.md", "climb the 199 steps on Sundays"),
    ("Which apple ripens last?", ["the Winter Banana"], "orchard.md", "The Winter Banana ripens last"),
    ("In which month are trees pruned?", ["February"], "orchard.md", "Trees are pruned in February"),
    (
        "How much does the great bell weigh?",
        ["900 kilograms"],
        "clock/tower.md",
        "The great bell weighs 900 kilograms",
    ),
    ("What split the spire in 1911?", ["lightning"], "clock/tower.md", "In 1911 lightning split the spire"),
]


def benchmark_records() -> list[dict[str, Any]]:
    """Give the questions as a benchmark file holds them."""
    return [
        {
            "question": question,
            "correct_answers": answers,
            "correct_answer_document_keys": [key],
            "evidence": [evidence],
        }
        for question, answers, key, evidence in RECORDS
    ]


def write_world(folder: Path) -> Path:
    """Write the documents and the questions into a folder."""
    for name, text in DOCUMENTS.items():
        path = folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "bench.json").write_text(json.dumps(benchmark_records()), encoding="utf-8")
    return folder


class Recorder(BaseEventHandler):
    """Remember everything that an experiment tells."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.patterns: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        self.statuses: list[tuple[str, str, str]] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_status_change(self, level: Any, message: str, step: Any) -> None:
        self.statuses.append((level.value, message, step.name))

    def on_pattern_creation(self, payload: dict[str, Any], evaluation_results: list[dict[str, Any]]) -> None:
        self.patterns.append((payload, evaluation_results))

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Once(Recorder):
    """Do something once, when a configuration comes to a piece of work."""

    def __init__(self, pattern: str, work: str, act: Callable[[], Any]) -> None:
        super().__init__()
        self.pattern, self.work, self.act = pattern, work, act
        self.at, self.done = "", False

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        self.at = event.name if isinstance(event, TrialStarted) else self.at
        comes = isinstance(event, PhaseStarted) and self.work in event.label and self.at == self.pattern
        if comes and not self.done:
            self.done = True
            self.act()


class FromTheTest:
    """Do something on the thread of the test while a search waits: a server ends with the thread that started it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act, self.wanted, self.done = act, threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> None:
        self.wanted.release()
        self.done.acquire()

    def search(self, experiment: AI4RAGExperiment) -> None:
        """Run a search to its end and do what it wants meanwhile."""
        run = experiment.start()
        while run.running:
            if self.wanted.acquire(timeout=0.05):
                try:
                    self.act()
                finally:
                    self.done.release()
        run.wait()


def wait_until(condition: Callable[[], Any], patience: float = 90.0) -> None:
    """Wait for a condition; the patience only ends a test that would wait forever."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


QUICK = Settings(request_retries=0, request_timeout_seconds=10.0)


def small_space(**values: Any) -> AI4RAGSearchSpace:
    """Make a space of eight pipelines, or another one."""
    lists: dict[str, Any] = {
        "embedding_model": [SPEC_EMBEDDING],
        "foundation_model": [SPEC_CHAT],
        "chunking_method": ["recursive"],
        "chunk_size": [64, 128],
        "chunk_overlap": [0],
        "search_mode": ["vector", "hybrid"],
        "ranker_strategy": ["rrf"],
        "retrieval_method": ["simple"],
        "number_of_chunks": [1, 2],
    }
    return AI4RAGSearchSpace(**{**lists, **values})


def make_experiment(
    folder: Path,
    space: AI4RAGSearchSpace | None = None,
    max_evals: int = 4,
    run: str = "run",
    workspace: str = "workspace",
    records: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> AI4RAGExperiment:
    """Make an experiment about the small world, without progress bars."""
    if not (folder / "docs").is_dir():
        write_world(folder)
    documents = load_documents(folder / "docs")
    benchmark = BenchmarkData.from_records(list(records or benchmark_records()))
    optimizer_settings = options.pop("optimizer_settings", {"max_evals": max_evals})
    options.setdefault("settings", QUICK)
    experiment = AI4RAGExperiment(
        documents,
        benchmark,
        space or small_space(),
        optimizer_settings,
        output_path=folder / run,
        workspace=folder / workspace,
        **options,
    )
    experiment.show_progress = False
    return experiment


@contextmanager
def service(monkeypatch: Any, **settings: Any) -> Iterator[OpenAIStub]:
    """Start the service and point the environment at it."""
    options = {"listed_window": 512, "api_key": KEY, **settings}
    with OpenAIStub(**options) as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield stub


def paid(stub: OpenAIStub) -> int:
    """Count the requests that cost something."""
    return len(stub.bodies)


def environment(stub: OpenAIStub | None, **more: str) -> dict[str, str]:
    """Make the environment of a subprocess."""
    values = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    values |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ""}
    if stub is not None:
        values |= {"OPENAI_BASE_URL": stub.base_url, "OPENAI_API_KEY": KEY}
    return {**values, **more}


SPACE_LINES = """chunking_method: [recursive]
chunk_size: [64, 128]
chunk_overlap: [0]
search_mode: [vector, hybrid]
ranker_strategy: [rrf]
retrieval_method: [simple]
number_of_chunks: [1, 2]
"""


def run_arguments(folder: Path, *more: str) -> list[str]:
    """Write what `ai4rag-nb run` needs and give its arguments."""
    if not (folder / "space.yaml").exists():
        write_world(folder)
        (folder / "space.yaml").write_text(SPACE_LINES)
    named = {
        "--documents": folder / "docs",
        "--benchmark": folder / "bench.json",
        "--space": folder / "space.yaml",
        "--embedding-model": SPEC_EMBEDDING,
        "--foundation-model": SPEC_CHAT,
        "--workspace": folder / "workspace",
        "--out": folder / "run",
        "--max-evals": 4,
    }
    arguments = {name: str(value) for name, value in named.items()}
    others: list[str] = []
    rest = list(more)
    while rest:
        name = rest.pop(0)
        if name in arguments and rest:
            arguments[name] = rest.pop(0)
        else:
            others.append(name)
    return ["run", *(part for pair in arguments.items() for part in pair), *others]


def command(*arguments: str) -> list[str]:
    """Give the command line of a subprocess."""
    # Whatever started the tests may ignore Ctrl-C, which children inherit.
    hear = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = f"{hear}from ai4rag_nb.serving.commands import main; sys.exit(main())"
    return [sys.executable, "-c", program, *arguments]


def call(
    *arguments: str, stub: OpenAIStub | None = None, folder: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a subprocess to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(stub, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def table_of(results: Any) -> list[dict[str, Any]]:
    """Give a leaderboard without what differs from run to run: durations and names of collections."""
    from ai4rag_nb.optimization.leaderboard import leaderboard_records

    return [
        {name: value for name, value in entry.items() if name != "duration_seconds"}
        for entry in leaderboard_records(results)["patterns"]
    ]


def files_holding(folder: Path, text: str) -> list[str]:
    """Find the files that hold a text, whatever their format."""
    pattern = re.compile(re.escape(text.encode()))
    return [str(path) for path in folder.rglob("*") if path.is_file() and pattern.search(path.read_bytes())]

"""Search real question sets with local models: time by phase, and what the toolkit adds to model and store.

Every call into the embedding model and into the vector store's client is timed; what is left of the run's wall
time is the toolkit's own: reading, cutting, caching, retrieving, scoring, storing. The ratio of the two
is what counts, since both are taken in one run. The sets are read from the folder in AI4RAG_NB_DATA.
Run: python benchmarks/full_runs.py [squad] [covidqa]
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ai4rag_nb import AI4RAGSearchSpace, BaseEventHandler, BenchmarkData, load_documents
from ai4rag_nb.foundations.events import Event, PhaseFinished
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.milvus_lite import MilvusLiteStore
from ai4rag_nb.optimization.experiment import Experiment

DATA = Path(
    os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parent.parent.parent / "shared" / "data")
)
RESULT = Path(__file__).parent / "results" / "full_runs.json"
EVALUATIONS = 8
STORE_CALLS = ("_write", "_settle", "_dense_hits", "_keyword_hits", "_fetch", "count", "__init__", "close")


class Clock:
    """Add up the wall time during which at least one timed call is going on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth = threading.local()

    def spent(self, kind: str, started: float) -> None:
        """Add the time since the start."""
        self.seconds[kind] += time.perf_counter() - started

    def wrap(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Time a function; calls inside a timed call of the same thread are not counted twice."""

        def timed(*arguments: Any, **named: Any) -> Any:
            if getattr(self._depth, "inside", False):
                return function(*arguments, **named)
            self._depth.inside, started = True, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._depth.inside = False
                self.spent(kind, started)

        return timed

    def wrap_batches(self, kind: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Time a generator: only the time until it gives its next value."""

        def timed(*arguments: Any, **named: Any) -> Iterator[Any]:
            batches = function(*arguments, **named)
            while True:
                started = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self.spent(kind, started)
                yield batch

        return timed


class Phases(BaseEventHandler):
    """Add up the time of the phases by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def on_event(self, event: Event) -> None:
        if isinstance(event, PhaseFinished):
            self.seconds[event.step.value] += event.seconds


def run(name: str, folder: str, clock: Clock) -> dict[str, Any]:
    """Search one set and describe where the time went."""
    started = time.perf_counter()
    documents = load_documents(DATA / name / "documents")
    benchmark = BenchmarkData.from_file(DATA / name / "benchmark.json")
    phases = Phases()
    phases.seconds["reading"] = time.perf_counter() - started
    experiment = Experiment(
        *(documents, benchmark, AI4RAGSearchSpace(), {"max_evals": EVALUATIONS}, phases),
        output_path=f"{folder}/run",
        workspace=f"{folder}/workspace",
    )
    best = experiment.search()
    results = experiment.results
    wall = time.perf_counter() - started
    experiment.close()
    bare = sum(clock.seconds.values())
    held_out = {m["name"]: m["scores"] for m in results.held_out.get("metrics", [])}
    return {
        "documents": len(documents),
        "questions": len(benchmark),
        "evaluations": len(results.evaluations),
        "indexes": len(results.collection_names),
        "share of the time by phase": {step: round(part / wall, 3) for step, part in phases.seconds.items()},
        "share of the time in": {kind: round(part / wall, 3) for kind, part in clock.seconds.items()},
        "toolkit over model and store": round(wall / bare - 1, 3),
        "best": {key: value for key, value in best.items() if key != "score"},
        "score": round(best["score"], 4),
        "held out": held_out.get("overall_score"),
    }


def main(names: list[str]) -> None:
    """Measure the sets and write the results."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    model_call, store_calls = (
        LocalEmbeddingModel.encode_batches,
        {n: getattr(MilvusLiteStore, n) for n in STORE_CALLS},
    )
    for name in names:
        clock = Clock()
        LocalEmbeddingModel.encode_batches = clock.wrap_batches("embedding model", model_call)  # type: ignore[method-assign]
        for attribute, call in store_calls.items():
            setattr(MilvusLiteStore, attribute, clock.wrap("vector store", call))
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(name, folder, clock)
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:] or ["squad", "covidqa"])

"""Score 45 configurations on two real sets of questions, question by question, for the page that teaches how sure one is.

Five ways to cut (recursive with 64, 128 and 256 tokens, hybrid with 128 and 256), three searches (dense, joined with keywords by
reciprocal ranks, and by normalized scores), and 3, 5 or 10 chunks to read. Vectors and answers come from local models: all-MiniLM-L6-v2
and the extractive reader. Kept are figures alone: the scores of each question, and the number of the group of questions about the same
document. No text, no name of a document and no id of a question of the sets is kept.
The sets are read from the folder in AI4RAG_NB_DATA; vectors stay in .benchmarks/, or in the file that --cache names.
Run: python benchmarks/real_scores.py [--save] [--cache FILE]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.context_size import context_tokens
from ai4rag_nb.evaluation.evaluation_data import EvaluationData, build_evaluation_data
from ai4rag_nb.evaluation.metrics import Metrics
from ai4rag_nb.evaluation.retrieval_evaluator import RetrievalEvaluator
from ai4rag_nb.evaluation.split import question_clusters
from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.indexing.chunking import get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.embedding import CachedEmbeddingModel
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusLiteConfig, get_vector_store
from ai4rag_nb.optimization.pipeline import make_pipeline
from ai4rag_nb.querying.extractive import ExtractiveFoundationModel
from ai4rag_nb.querying.hit_list_cache import HitListCache
from ai4rag_nb.querying.rag import query_rag

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "ai4rag_nb" / "corpora" / "real_scores.json"
KEPT = ROOT / ".benchmarks"
MODELS = "all-MiniLM-L6-v2 for vectors, the extractive reader for answers"
ORIGINS = {
    "squad": "Questions of XQuAD (English) and SQuAD 1.1 about Wikipedia articles; by the authors of both sets and the contributors of Wikipedia, under CC BY-SA 4.0.",
    "covidqa": "Questions of COVID-QA about scientific papers; by the authors of the set, under Apache-2.0.",
}
METRICS = (Metrics.ANSWER_CORRECTNESS, Metrics.EVIDENCE_RECIPROCAL_RANK)
CUTTINGS = (("recursive", 64), ("recursive", 128), ("recursive", 256), ("hybrid", 128), ("hybrid", 256))
SEARCHES: dict[str, dict[str, Any]] = {
    "vector": {"search_mode": "vector"},
    "rrf": {"search_mode": "hybrid", "ranker_strategy": "rrf", "ranker_k": 60},
    "normalized": {"search_mode": "hybrid", "ranker_strategy": "normalized", "ranker_alpha": 0.8},
}
CHUNKS = (3, 5, 10)


@dataclass(frozen=True)
class Way:
    """Hold one configuration."""

    method: str
    size: int
    search: str
    count: int

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "chunking_method": self.method,
            "chunk_size": self.size,
            **SEARCHES[self.search],
            "number_of_chunks": self.count,
        }


def ways() -> list[Way]:
    """List the configurations; those that share an index stand together."""
    return [
        Way(method, size, search, count)
        for method, size in CUTTINGS
        for search in SEARCHES
        for count in CHUNKS
    ]


class Bench:
    """Hold a set of questions and the index in use."""

    def __init__(self, name: str, model: CachedEmbeddingModel, folder: Path) -> None:
        self.name, self.model, self.folder = name, model, folder
        self.documents = load_documents(DATA / name / "documents", cache=model.cache)
        self.benchmark = BenchmarkData.from_file(DATA / name / "benchmark.json")
        self.evidence = self.benchmark.check(self.documents).evidence
        self.lists, self.reader = HitListCache(), ExtractiveFoundationModel(model)
        self.opened: tuple[tuple[str, int], BaseVectorStore] | None = None

    def close(self) -> None:
        """Close the index in use."""
        if self.opened is not None:
            self.opened[1].close()
        self.opened = None

    def store(self, way: Way) -> BaseVectorStore:
        """Give the index of a way; the one before it is closed."""
        key = (way.method, way.size)
        if self.opened is None or self.opened[0] != key:
            self.close()
            chunks = get_chunker(way.method, way.size, 0, self.model.token_counter).split_documents(
                self.documents
            )
            place = MilvusLiteConfig(str(self.folder / f"{self.name}.db"))
            store = get_vector_store(self.model, place, f"ai4rag_{way.method}_{way.size}")
            store.add_documents(chunks, self.model.embed_documents([chunk.text for chunk in chunks]))
            self.opened = key, store
        return self.opened[1]

    def answers(self, way: Way) -> list[EvaluationData]:
        """Ask all questions of the set."""
        configuration = {"embedding_model": self.model, "foundation_model": self.reader, **way.settings}
        pipeline = make_pipeline(configuration, self.store(way), self.lists)
        responses = query_rag(pipeline, self.benchmark.questions, max_threads=1)
        lost = [response["error"] for response in responses if response.get("error")]
        if lost:
            raise SystemExit(f"{self.name}: {len(lost)} questions were lost, the first by: {lost[0]}")
        return build_evaluation_data(self.benchmark, responses, self.evidence)


def columns(data: Sequence[EvaluationData]) -> dict[str, list[float | None]]:
    """Score the answers by each metric, question by question."""
    found: dict[str, list[float | None]] = {}
    for evaluator in (UnitxtEvaluator(), RetrievalEvaluator()):
        for row in evaluator.evaluate_metrics(data, METRICS)["question_scores"]:
            for metric in row["metrics"]:
                value = metric["value"]
                found.setdefault(metric["name"], []).append(None if value is None else round(value, 3))
    return found


def plain(value: float | None) -> float | int | None:
    """Write 0 and 1 without a point."""
    return int(value) if value in (0.0, 1.0) else value


def run_set(name: str, model: CachedEmbeddingModel, folder: Path) -> dict[str, Any]:
    """Score all configurations on one set."""
    bench, rows = Bench(name, model, folder), []
    groups = question_clusters(bench.benchmark.document_keys)
    try:
        for way in ways():
            started = time.perf_counter()
            data = bench.answers(way)
            scores = columns(data)
            tokens = context_tokens([answer.contexts for answer in data]) or 0.0
            rows.append({"settings": way.settings, "context_tokens": round(tokens), "scores": scores})
            means = {metric: round(sum(v or 0 for v in own) / len(own), 3) for metric, own in scores.items()}
            print(
                f"  {name}: {way}: {means}, {tokens:.0f} tokens ({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    finally:
        bench.close()
    return {
        "origin": ORIGINS[name],
        "n": len(bench.benchmark),
        "clusters": [
            next(g for g, group in enumerate(groups) if place in group)
            for place in range(len(bench.benchmark))
        ],
        "settings": [row["settings"] for row in rows],
        "context_tokens": [row["context_tokens"] for row in rows],
        "scores": {
            metric.name: [[plain(value) for value in row["scores"][metric.name]] for row in rows]
            for metric in METRICS
        },
    }


def main() -> int:
    """Score both sets, and keep the figures where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--cache", type=Path, default=KEPT / "retrieval.db", help="the file of vectors")
    arguments = parser.parse_args()
    missing = [name for name in ORIGINS if not (DATA / name).is_dir()]
    if missing:
        print(f"skipped: {', '.join(missing)} is not at {DATA}; set AI4RAG_NB_DATA", file=sys.stderr)
        return 1
    cache = Cache.open(arguments.cache)
    model = CachedEmbeddingModel(LocalEmbeddingModel.load(), cache)
    with tempfile.TemporaryDirectory() as folder:
        sets = {name: run_set(name, model, Path(folder)) for name in ORIGINS}
    cache.close()
    text = json.dumps({"models": MODELS, "sets": sets}, separators=(",", ":"))
    print(f"{len(text):,} characters")
    if arguments.save:
        RESULT.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

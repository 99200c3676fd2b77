"""Measure the ways to retrieve on real questions: one dense index against hybrid, windows, small chunks, kinds of content and reranking.

Every set of the folder in AI4RAG_NB_DATA is measured, and a merged one of text, tables and code. Models are local: all-MiniLM-L6-v2,
its own tokens for MaxSim. A retrieved chunk is right when it brings an item of evidence (half of it, or it lies inside); rows of
tables are items by the annotated cells; where a set has no places, the document is the item. The halves of a set share no document:
the baseline and the combination are chosen on the tuning half and compared on the held-out half, by question, with BCa intervals.
Longer passages bring evidence more easily: the tokens of ten passages stand beside every score.
Vectors are kept in .benchmarks/, so that a run that was broken off goes on.
Run: python benchmarks/retrieval.py [SET ...] [--save]
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ai4rag_nb.evaluation.evidence import EvidenceItem, Passage, Span, items_found, locate_evidence
from ai4rag_nb.evaluation.intervals import paired_difference, summarise
from ai4rag_nb.evaluation.rank_scores import evidence_ndcg, evidence_recall, evidence_reciprocal_rank
from ai4rag_nb.evaluation.split import question_clusters
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.indexing.chunking import get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.embedding import CachedEmbeddingModel
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.multi_parts import ByTypeConfig
from ai4rag_nb.indexing.source import SourceDocument, document_id, with_source
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusLiteConfig, get_vector_store
from ai4rag_nb.optimization.pipeline import make_retriever
from ai4rag_nb.optimization.routers import learn_router
from ai4rag_nb.querying.hit_list_cache import HitListCache

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "retrieval.json"
KEPT = ROOT / ".benchmarks"
SETS = ("structured", "squad", "tables", "code", "covidqa", "chunking", "xquad_multi", "scifact")
MERGED = ("squad", "tables", "code")
DEPTH, SEED = 10, 64


@dataclass(frozen=True)
class Question:
    """Hold a question with what answers it."""

    text: str
    set_name: str
    document: str
    items: tuple[EvidenceItem, ...]


@dataclass(frozen=True)
class Way:
    """Hold one way to retrieve: how documents are cut, and the settings of the search."""

    name: str
    method: str
    size: int
    settings: dict[str, Any]

    @property
    def by_type(self) -> bool:
        return self.settings.get("index_structure") == "by_type"


def ways() -> list[Way]:
    """List the ways that are compared; those that may be the baseline come first."""
    dense: dict[str, Any] = {"search_mode": "vector"}
    rerank = {"reranker": "maxsim", "rerank_depth": 20}
    rrf = {"search_mode": "hybrid", "ranker_strategy": "rrf", "ranker_k": 60}
    blend = {"search_mode": "hybrid", "ranker_strategy": "normalized", "ranker_alpha": 0.8}
    typed = {"index_structure": "by_type"}
    return [
        Way("dense, 128 tokens with titles", "hybrid", 128, dense),
        Way("dense, 256 tokens with titles", "hybrid", 256, dense),
        Way("dense, 256 tokens without titles", "recursive", 256, dense),
        Way("hybrid by reciprocal ranks", "hybrid", 256, rrf),
        Way("hybrid, 0.8 dense, normalized", "hybrid", 256, blend),
        Way("window of 1", "hybrid", 128, {**dense, "retrieval_method": "window", "window_size": 1}),
        Way("sentences, read as parents", "sentence", 256, {**dense, "retrieval_method": "parent"}),
        Way(
            "sentences, merged",
            "sentence",
            256,
            {**dense, "retrieval_method": "auto_merge", "merge_share": 0.5},
        ),
        Way(
            "sentences, read as parents, 0.8 dense, normalized",
            "sentence",
            256,
            {**blend, "retrieval_method": "parent"},
        ),
        Way("by content, rows, one index", "by_content_rows", 256, dense),
        Way(
            "by content, rows, index by type, all",
            "by_content_rows",
            256,
            {**dense, **typed, "routing": "all"},
        ),
        Way(
            "by content, rows, index by type, rules",
            "by_content_rows",
            256,
            {**dense, **typed, "routing": "rules"},
        ),
        Way(
            "by content, rows, index by type, classifier",
            "by_content_rows",
            256,
            {**dense, **typed, "routing": "classifier"},
        ),
        Way("dense + MaxSim", "hybrid", 256, {**dense, **rerank}),
        Way("hybrid, 0.8 dense + MaxSim", "hybrid", 256, {**blend, **rerank}),
        Way(
            "sentences + MaxSim, read as parents",
            "sentence",
            256,
            {**dense, "retrieval_method": "parent", **rerank},
        ),
        Way(
            "sentences, 0.8 dense + MaxSim, read as parents",
            "sentence",
            256,
            {**blend, "retrieval_method": "parent", **rerank},
        ),
        Way("by content, rows + MaxSim", "by_content_rows", 256, {**dense, **rerank}),
        Way("by content, rows, 0.8 dense + MaxSim", "by_content_rows", 256, {**blend, **rerank}),
        Way(
            "by content, index by type, all + MaxSim",
            "by_content_rows",
            256,
            {**dense, **typed, "routing": "all", **rerank},
        ),
        Way(
            "by content, index by type, classifier + MaxSim",
            *("by_content_rows", 256, {**dense, **typed, "routing": "classifier", **rerank}),
        ),
    ]


BASELINES = 3  # of the ways: single dense indexes


def items_of(record: dict[str, Any], name: str, source: SourceDocument) -> tuple[EvidenceItem, ...]:
    """Find what a retrieval should bring for one question."""
    text, key = source.source_text or "", record["correct_answer_document_keys"][0]
    if "cells" in record:
        rows = [b for b in source.source_blocks if b.ref == record["table"] and b.kind == "table_row"]
        wanted = sorted({row for row, _ in record["cells"] if 0 < row <= len(rows)})
        return tuple(EvidenceItem("", (Span(key, rows[n - 1].start, rows[n - 1].end),)) for n in wanted)
    if "spans" in record:
        return tuple(EvidenceItem("", (Span(key, s["start"], s["end"]),)) for s in record["spans"])
    if "evidence" in record and name != "scifact":
        (found,) = locate_evidence([record["evidence"]], [[key]], {key: text})
        return tuple(item for item in found if item.spans)
    return (EvidenceItem("", (Span(key, 0, len(text)),)),)


def read_set(name: str, cache: Cache) -> tuple[list[SourceDocument], list[Question]]:
    """Read the documents and questions of a set; "structured" is three of them together."""
    documents, questions = [], []
    for part in MERGED if name == "structured" else (name,):
        loaded = [
            with_source(document) for document in load_documents(DATA / part / "documents", cache=cache)
        ]
        named = {document_id(document): document for document in loaded}
        documents += loaded
        for record in json.loads((DATA / part / "benchmark.json").read_text(encoding="utf-8")):
            key = record["correct_answer_document_keys"][0]
            items = items_of(record, part, named[key])
            if items:
                questions.append(Question(record["question"], part, key, items))
    return documents, questions


def in_document(question: Question) -> bool:
    """Tell whether the whole document is what is looked for."""
    return question.set_name in ("code", "scifact")


def scores_of(question: Question, hits: Sequence[Any]) -> dict[str, float]:
    """Score the ranking of one question."""
    passages = [Passage(hit.document_id, hit.start_index, hit.end_index, hit.text) for hit in hits[:DEPTH]]
    if in_document(question):
        found = [
            frozenset({0}) if passage.document_id == question.document else frozenset()
            for passage in passages
        ]
        count = 1
    else:
        found, count = items_found(passages, question.items), len(question.items)
    return {
        "mrr": evidence_reciprocal_rank(found),
        "ndcg": min(1.0, evidence_ndcg(found, count)),
        "recall": evidence_recall(found, count),
    }


def tuning_places(questions: Sequence[Question]) -> set[int]:
    """Choose the tuning half: documents are not shared with the other half."""
    clusters = question_clusters([[question.document] for question in questions])
    random.Random(SEED).shuffle(clusters)
    chosen: set[int] = set()
    for cluster in clusters:
        if len(chosen) + len(cluster) <= (len(questions) + 1) // 2:
            chosen |= set(cluster)
    return chosen


class Bench:
    """Hold the indexes of one set while its ways are measured."""

    def __init__(self, name: str, model: CachedEmbeddingModel, folder: Path) -> None:
        self.name, self.model = name, model
        self.documents, self.questions = read_set(name, model.cache)
        self.tuning = tuning_places(self.questions)
        self.config = MilvusLiteConfig(str(folder / f"{name}.db"))
        self.stores: dict[tuple[str, int, bool], BaseVectorStore] = {}
        self.lists, self.router = HitListCache(), None
        self.routed: dict[str, Any] | None = None  # how well the router tells kinds of content apart

    def store(self, way: Way) -> BaseVectorStore:
        """Open the index of a way, or build it."""
        key = (way.method, way.size, way.by_type)
        if key not in self.stores:
            chunks = get_chunker(way.method, way.size, 0, self.model.token_counter).split_documents(
                self.documents
            )
            config = ByTypeConfig(self.config) if way.by_type else self.config
            store = get_vector_store(
                self.model, config, f"ai4rag_{way.method}_{way.size}" + "_t" * way.by_type
            )
            store.add_documents(chunks, self.model.embed_documents([chunk.text for chunk in chunks]))
            self.stores[key] = store
        return self.stores[key]

    def learned(self) -> Any:
        """Learn the router from the tuning half."""
        if self.router is None:
            asked = [self.questions[place] for place in sorted(self.tuning)]
            evidence = [question.items for question in asked]
            self.router, report = learn_router([q.text for q in asked], evidence, self.documents, self.model)
            self.routed = {name: round(value, 4) for name, value in asdict(report).items()}
            print(f"  {self.name}: routing {report}", flush=True)
        return self.router

    def measure(self, way: Way) -> list[dict[str, float]]:
        """Score one way on every question."""
        configuration = {"embedding_model": self.model, "number_of_chunks": DEPTH, **way.settings}
        router = self.learned() if way.settings.get("routing") == "classifier" else None
        retriever = make_retriever(configuration, self.store(way), self.lists, router)
        found = retriever.retrieve_many([question.text for question in self.questions])
        count = self.model.token_counter.count_many
        return [
            {**scores_of(question, hits), "tokens": float(sum(count([hit.text for hit in hits[:DEPTH]])))}
            for question, hits in zip(self.questions, found, strict=True)
        ]

    def close(self) -> None:
        """Close all indexes."""
        for store in self.stores.values():
            store.close()


def column(rows: Sequence[dict[str, float]], places: Sequence[int], metric: str) -> list[float]:
    """Pick one metric of some questions."""
    return [rows[place][metric] for place in places]


def compared(
    rows: Sequence[dict[str, float]], base: Sequence[dict[str, float]], places: Sequence[int], metric: str
) -> dict[str, Any]:
    """Compare a way with the baseline on some questions."""
    ours, theirs = column(rows, places, metric), column(base, places, metric)
    difference = paired_difference(ours, theirs)
    mean = sum(theirs) / len(theirs)
    return {
        **{
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in summarise(ours).items()
        },
        "difference": [
            round(value or 0.0, 4) for value in (difference.mean, difference.ci_low, difference.ci_high)
        ],
        "relative": round((difference.mean or 0.0) / mean, 4) if mean else None,
    }


def run_set(name: str, model: CachedEmbeddingModel, folder: Path) -> dict[str, Any]:
    """Measure all ways on one set."""
    bench = Bench(name, model, folder)
    measured: dict[str, list[dict[str, float]]] = {}
    try:
        for way in ways():
            if way.by_type and name not in ("structured", "tables", "code"):
                continue
            started = time.perf_counter()
            measured[way.name] = bench.measure(way)
            mean = sum(row["mrr"] for row in measured[way.name]) / len(bench.questions)
            print(
                f"  {name}: {way.name}: MRR@10 {mean:.3f} ({time.perf_counter() - started:.0f} s)", flush=True
            )
    finally:
        bench.close()
    tuning = sorted(bench.tuning)
    held_out = [place for place in range(len(bench.questions)) if place not in bench.tuning]

    def best(names: Sequence[str]) -> str:
        return max(names, key=lambda each: sum(column(measured[each], tuning, "mrr")))

    baseline, chosen = best([way.name for way in ways()[:BASELINES]]), best(list(measured))
    parts = {"held-out": held_out, "all": list(range(len(bench.questions)))}
    if name == "structured":
        for part in MERGED:
            parts[f"held-out, {part}"] = [p for p in held_out if bench.questions[p].set_name == part]
    return {
        "documents": len(bench.documents),
        "questions": len(bench.questions),
        "baseline": baseline,
        "chosen": chosen,
        **({"router": bench.routed} if bench.routed else {}),
        "ways": {
            way: {
                "tokens of ten passages": round(sum(row["tokens"] for row in rows) / len(rows)),
                **{
                    part: {
                        metric: compared(rows, measured[baseline], places, metric)
                        for metric in ("mrr", "ndcg", "recall")
                    }
                    for part, places in parts.items()
                },
            }
            for way, rows in measured.items()
        },
    }


def main() -> None:
    """Measure the sets that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=list(SETS), metavar="SET")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/retrieval.json")
    arguments = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    cache = Cache.open(KEPT / "retrieval.db")
    model = CachedEmbeddingModel(LocalEmbeddingModel.load(), cache)
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    for name in arguments.sets:
        if not all((DATA / part).is_dir() for part in (MERGED if name == "structured" else (name,))):
            print(f"skipped: '{name}' is not at {DATA}; set AI4RAG_NB_DATA", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run_set(name, model, Path(folder))
        shown = results[name]["ways"][results[name]["chosen"]]["held-out"]["mrr"]
        print(f"{name}: {results[name]['chosen']} over {results[name]['baseline']}: {shown}", flush=True)
        if arguments.save:
            RESULT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    cache.close()


if __name__ == "__main__":
    main()

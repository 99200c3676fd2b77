"""Compare our Milvus Lite store with the bare client, and many questions in one call with one by one.

Run `python benchmarks/stores.py [--save] [--rows 2000 5000] [--questions 200]`. The bare client makes the same
calls. Texts of the shared set `squad` are used where AI4RAG_NB_DATA finds it, made-up ones elsewhere; vectors
are random, since nothing here depends on them. Ratios of processor time and counts are kept, never seconds,
since those belong to one machine.
"""

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.indexing.milvus_lite_probe import create_collection
from ai4rag_nb.indexing.store_checks import MAXIMUM_BATCH_ROWS, check_rows
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusLiteConfig, get_vector_store
from ai4rag_nb.querying.hit_list_cache import HitListCache
from ai4rag_nb.querying.retriever import Retriever

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "stores.json"
DIMENSION, CHARACTERS, REPEATS, DEPTH, BLOCK = 384, 700, 5, 50, 128
FIELDS = ["document_text", "metadata"]


class RandomModel:
    """Give every text the vector that was drawn for it."""

    dimension = DIMENSION

    def __init__(self) -> None:
        self.vectors: dict[str, np.ndarray] = {}
        self.draw = np.random.default_rng(0)

    def embed_documents(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        for text in texts:
            self.vectors.setdefault(text, self.draw.normal(size=DIMENSION).astype(np.float32))
        return np.stack([self.vectors[text] for text in texts])

    embed_queries = embed_documents


def material(rows: int, questions: int) -> tuple[list[AI4RAGChunk], list[str]]:
    """Cut the texts of the shared set into pieces, the same ones on every run."""
    chosen = random.Random(64)
    files = sorted((DATA / "squad" / "documents").glob("*.md"))
    words = "\n".join(path.read_text(encoding="utf-8") for path in files).split() or [
        f"word{n}" for n in range(5000)
    ]
    asked = [f"word{n} and word{n + 7}" for n in range(questions)]
    if files:
        records = json.loads((DATA / "squad" / "benchmark.json").read_text(encoding="utf-8"))
        asked = [records[n % len(records)]["question"] for n in range(questions)]
    chunks = []
    for number in range(rows):
        start = chosen.randrange(len(words))
        text = " ".join((words + words)[start : start + 110])[:CHARACTERS]
        place = {"document_id": f"{number // 40}.md", "sequence_number": number % 40 + 1}
        chunks.append(AI4RAGChunk(text, {**place, "start_index": 0, "end_index": len(text)}))
    return chunks, asked


def processor_times(*works: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Give the least processor time of each work, the server's thread included; they take turns."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for times, work in zip(taken, works, strict=True):
            gc.collect()
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
    return [min(times) for times in taken]


def bare_load(client: Any, name: str, chunks: Sequence[AI4RAGChunk], vectors: np.ndarray) -> None:
    """Make the calls that a load makes, with rows that are ready."""
    data = [
        {"id": row.key, "document_text": row.text, "metadata": row.metadata, "dense": vector}
        for row, vector in zip(check_rows(chunks), vectors, strict=True)
    ]
    begun = time.process_time()
    create_collection(client, name, DIMENSION, "cosine")
    for start in range(0, len(data), MAXIMUM_BATCH_ROWS):
        client.upsert(name, data[start : start + MAXIMUM_BATCH_ROWS])
    client.flush(name)
    client.load_collection(name)
    bare_load.seconds = time.process_time() - begun  # type: ignore[attr-defined]


def bare_search(client: Any, name: str, data: Sequence[Any], field: str, block: int) -> list[Any]:
    """Make the calls that a search makes, and read what comes back."""
    found = []
    for start in range(0, len(data), block):
        results = client.search(
            name, data=list(data[start : start + block]), anns_field=field, limit=DEPTH, output_fields=FIELDS
        )
        found += [
            [(hit["id"], hit["distance"], hit["entity"]["document_text"]) for hit in hits] for hits in results
        ]
    return found


def compare(store: BaseVectorStore, asked: list[str], vectors: np.ndarray) -> dict[str, float]:
    """Give ours against the bare calls, and one by one against together."""
    client, name = store._file.client, store.collection_name  # type: ignore[attr-defined]
    few, few_vectors = asked[:20], list(vectors[:20])
    bare_dense, bare_words, dense, hybrid = processor_times(
        lambda: bare_search(client, name, list(vectors), "dense", BLOCK),
        lambda: bare_search(client, name, asked, "sparse", BLOCK),
        lambda: store.search_many(asked, 5),
        lambda: store.search_many(asked, 5, "hybrid"),
    )
    alone_bare, alone = processor_times(
        lambda: bare_search(client, name, few_vectors, "dense", 1),
        lambda: [store.search(question, 5) for question in few],
    )
    return {
        "vector, batch: ours / bare": dense / bare_dense,
        "hybrid, batch: ours / bare": hybrid / (bare_dense + bare_words),
        "vector, one by one: ours / bare": alone / alone_bare,
        "vector: one by one / batch, per question": (alone / len(few)) / (dense / len(asked)),
        "keyword / vector, batch": bare_words / bare_dense,
    }


def hit_list_figures(store: BaseVectorStore, asked: list[str]) -> dict[str, float]:
    """Count the calls of 12 configurations over the same questions, with and without shared hit lists."""
    choices = [
        {"number_of_chunks": k, "search_mode": mode} for k in (3, 5, 10) for mode in ("vector", "hybrid")
    ]
    choices += [{**choice, "retrieval_method": "window", "window_size": 1} for choice in choices]
    lists = HitListCache()
    alone, shared = processor_times(
        lambda: [Retriever(store, **choice).retrieve_many(asked) for choice in choices],  # type: ignore[arg-type]
        lambda: [Retriever(store, hit_lists=lists, **choice).retrieve_many(asked) for choice in choices],  # type: ignore[arg-type]
        repeats=1,
    )
    return {
        "12 configurations: searches of the store": lists.store_calls,
        "12 configurations: time with / without hit lists": shared / alone,
    }


def measure(rows: int, questions: int) -> dict[str, float]:
    """Measure one size."""
    chunks, asked = material(rows, questions)
    model = RandomModel()
    vectors = model.embed_documents([chunk.text for chunk in chunks])
    asked_vectors = model.embed_queries(asked)
    with tempfile.TemporaryDirectory() as folder:
        config = MilvusLiteConfig(str(Path(folder) / "store.db"), exact_rows=rows)
        loads, bare = [], []
        with get_vector_store(model, config) as store:  # type: ignore[arg-type]
            for turn in range(REPEATS):
                bare_load(store._file.client, f"ai4rag_bare{turn}", chunks, vectors)  # type: ignore[attr-defined]
                bare.append(bare_load.seconds)  # type: ignore[attr-defined]
                with get_vector_store(model, config) as fresh:  # type: ignore[arg-type]
                    loads += processor_times(lambda: fresh.add_documents(chunks, vectors), repeats=1)
            store.add_documents(chunks, vectors)
            figures = {"load: ours / bare": min(loads) / min(bare)}
            figures |= compare(store, asked, asked_vectors) | hit_list_figures(store, asked)
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Measure and show, or save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/stores.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[2_000, 5_000], help="sizes of the collection")
    parser.add_argument("--questions", type=int, default=200, help="questions in a batch")
    arguments = parser.parse_args()
    results = {
        f"{rows} rows, {arguments.questions} questions": measure(rows, arguments.questions)
        for rows in arguments.rows
    }
    text = json.dumps(results, indent=1)
    if arguments.save:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

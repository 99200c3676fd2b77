"""Measure how long an answer takes, from the question to the end, with fifty clients at once and a model that takes a second.

The model is the stub of the tests, in a process of its own and asked over HTTP; it waits a second before each answer. One
pipeline is asked by all clients: each thread asks one question after the other, and all begin together. Questions are embedded
by MiniLM in this process; nothing is kept from question to question. The chunks are those of the shared sets squad and covidqa
(a few thousand of them, 128 tokens at most), or of made-up pages where the sets are not there; their own vectors are kept in
.benchmarks/. The stores are a Milvus Lite file and PostgreSQL with pgvector, started for it with the settings of the tests.
Limit: p95 under 5 seconds.
Run: python benchmarks/end_to_end.py [--clients 50] [--rounds 4] [--save]
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.indexing.chunking import get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.embedding import CachedEmbeddingModel
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.markdown import markdown_document
from ai4rag_nb.indexing.vector_store import (
    BaseVectorStore,
    BaseVectorStoreConfig,
    MilvusLiteConfig,
    PGVectorConfig,
    get_vector_store,
)
from ai4rag_nb.querying.models import foundation_model
from ai4rag_nb.querying.rag import SimpleRAG
from ai4rag_nb.querying.retriever import Retriever

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "end_to_end.json"
KEPT = ROOT / ".benchmarks" / "end_to_end.db"
SETS, STORES, MODES = ("squad", "covidqa"), ("milvus_lite", "pgvector"), ("vector", "hybrid")
CHUNK_SIZE, DELAY, LIMIT = 128, 1.0, 5.0


@dataclass(frozen=True)
class Material:
    """Hold what is searched and what is asked."""

    chunks: list[AI4RAGChunk]
    vectors: np.ndarray
    questions: list[str]


def read_documents() -> tuple[list[Any], list[str], str]:
    """Read documents and questions, or make some up, and say which."""
    if all((DATA / name).is_dir() for name in SETS):
        documents = [document for name in SETS for document in load_documents(DATA / name / "documents")]
        records = [
            record
            for name in SETS
            for record in json.loads((DATA / name / "benchmark.json").read_text(encoding="utf-8"))
        ]
        return documents, [record["question"] for record in records], ", ".join(SETS)
    chosen = random.Random(64)
    pages = []
    for page in range(60):
        words = [f"word{chosen.randrange(5_000)}" for _ in range(3_000)]
        sentences = [" ".join(words[start : start + 12]) + "." for start in range(0, len(words), 12)]
        pages.append(markdown_document(f"# Page {page}\n\n" + " ".join(sentences), f"{page}.md"))
    asked = [f"What is word{number} beside word{number + 7}?" for number in range(400)]
    return pages, asked, "made up"


def make_material(model: LocalEmbeddingModel, most: int | None) -> tuple[Material, str]:
    """Make chunks with their vectors, and questions in a fixed order without repeats."""
    documents, questions, name = read_documents()
    chunks = get_chunker("recursive", CHUNK_SIZE, 0, model.token_counter).split_documents(documents)
    if most:
        chunks = random.Random(64).sample(chunks, min(most, len(chunks)))
    cache = Cache.open(KEPT)
    try:
        vectors = CachedEmbeddingModel(model, cache).embed_documents([chunk.text for chunk in chunks])
    finally:
        cache.close()
    asked = list(dict.fromkeys(questions))
    random.Random(64).shuffle(asked)
    return Material(chunks, vectors, asked), name


@contextmanager
def slow_model(delay: float) -> Iterator[str]:
    """Run the stub in a process of its own, and give its address."""
    command = [sys.executable, str(ROOT / "tests" / "openai_stub.py"), "--delay", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if "http://" not in said:
                raise RuntimeError("The stub did not start.")
            yield said.split()[-1]
        finally:
            process.terminate()


@contextmanager
def place_of(store: str) -> Iterator[BaseVectorStoreConfig]:
    """Give a store that lasts as long as the block."""
    if store == "milvus_lite":
        with tempfile.TemporaryDirectory() as folder:
            yield MilvusLiteConfig(str(Path(folder) / "store.db"))
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import PostgresServer

    server = PostgresServer()
    try:
        place = server.place
        yield PGVectorConfig(place.host, place.port, place.database, place.user, place.password)
    finally:
        server.close()


@dataclass
class Asked:
    """Hold what became of one question."""

    seconds: float  # from the question to the answer
    retrieval: float
    generation: float
    failed: bool


def ask_all(rag: SimpleRAG, questions: Sequence[str], clients: int, rounds: int) -> tuple[list[Asked], float]:
    """Let all clients begin together and ask one question after the other."""
    together = threading.Barrier(clients + 1)
    answered: list[list[Asked]] = [[] for _ in range(clients)]

    def client(number: int) -> None:
        together.wait()
        for turn in range(rounds):
            begun = time.perf_counter()
            try:
                answer = rag.generate(questions[(turn * clients + number) % len(questions)])
                seconds, timings = time.perf_counter() - begun, answer["timings"]
                failed = not answer["answer"]
                answered[number].append(Asked(seconds, timings["retrieval"], timings["generation"], failed))
            except Exception as error:  # the boundary of a question: counted and shown
                print(f"  a question failed: {error!r}", flush=True)
                answered[number].append(Asked(time.perf_counter() - begun, 0.0, 0.0, True))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    together.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return [one for own in answered for one in own], time.perf_counter() - started


def shares(values: Sequence[float]) -> dict[str, float]:
    """Give the median and the tail."""
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 95, 99)}


def figures_of(answered: Sequence[Asked], wall: float, first: Sequence[Asked]) -> dict[str, Any]:
    """Say how long answers took, and what of it was retrieval."""
    whole = [one.seconds for one in answered]
    p95 = shares(whole)["p95"]
    return {
        "questions": len(answered),
        "failed": sum(one.failed for one in answered),
        "seconds": shares(whole),
        "seconds, longest": max(whole),
        "seconds of retrieval": shares([one.retrieval for one in answered]),
        "seconds of generation": shares([one.generation for one in answered]),
        "answers a second": len(answered) / wall,
        "one client alone, seconds": shares([one.seconds for one in first]),
        "limit": f"p95 < {LIMIT:g} s",
        "holds": p95 < LIMIT and not any(one.failed for one in answered),
    }


def measure_store(store: BaseVectorStore, material: Material, clients: int, rounds: int) -> dict[str, Any]:
    """Ask one store in each way."""
    found: dict[str, Any] = {"product": store.properties().product}
    model = foundation_model("openai:stub-chat")
    try:
        for mode in MODES:
            rag = SimpleRAG(model, Retriever(store, number_of_chunks=5, search_mode=mode))
            first, _ = ask_all(rag, material.questions, 1, 3)  # loads the weights and warms the store
            first, _ = ask_all(rag, material.questions[::-1], 1, 3)
            gc.collect()
            answered, wall = ask_all(rag, material.questions, clients, rounds)
            found[mode] = figures_of(answered, wall, first)
    finally:
        model.close()
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all stores."""
    embedding = LocalEmbeddingModel.load()
    material, name = make_material(embedding, arguments.chunks)
    results: dict[str, Any] = {
        "clients": arguments.clients,
        "rounds": arguments.rounds,
        "model_takes_seconds": arguments.delay,
        "documents": name,
        "chunks": len(material.chunks),
        "processors": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    with slow_model(arguments.delay) as address:
        os.environ |= {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "key-for-the-benchmark"}
        for name in arguments.stores:
            with place_of(name) as config, get_vector_store(embedding, config) as store:
                store.add_documents(material.chunks, material.vectors)
                results[name] = measure_store(store, material, arguments.clients, arguments.rounds)
                store.drop()
    results["load_after"] = os.getloadavg()[0]
    return rounded(results)


def rounded(value: Any) -> Any:
    """Keep three digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    """Measure and show, or save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/end_to_end.json")
    parser.add_argument("--clients", type=int, default=50, help="threads that ask at the same time")
    parser.add_argument("--rounds", type=int, default=4, help="questions of each client")
    parser.add_argument("--delay", type=float, default=DELAY, help="seconds that the model takes")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--chunks", type=int, help="at most so many chunks; all without it")
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments), indent=1)
    if arguments.save:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

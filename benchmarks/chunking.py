"""Measure how many megabytes of text each chunker divides in a second, in one process and in two.

The documents are those of the shared sets squad and covidqa (prose) and tables, read beforehand; tokens are counted by MiniLM's
tokenizer and chunks have 256 of them at most. Worker processes are started anew (spawn), read the documents and divide some of
them to get warm; then documents are dealt to them by size, they begin together, and the time from the first beginning to the
last end counts. Beside it stands the time that a caller sees who sends documents to the same workers and has the chunks
brought back. Chunks of all processes are compared. A megabyte is 1,000,000 bytes of a document's text in UTF-8.
Run: python benchmarks/chunking.py [--processes 1 2] [--save]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.indexing.chunking import BaseChunker, chunking_methods, get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.source import SourceDocument, document_text, with_source
from ai4rag_nb.indexing.tokens import TokenCounter

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "chunking.json"
KINDS = {"prose": ("squad", "covidqa"), "tables": ("tables",)}
CHUNK_SIZE, WARM_BYTES, PATIENCE = 256, 60_000, 600


def size_of(document: SourceDocument) -> int:
    """Give the bytes of a document's text."""
    return len(document_text(document).encode())


def read_kind(kind: str, most: int | None) -> list[SourceDocument]:
    """Read the documents of a kind, the same number of each set."""
    found: list[SourceDocument] = []
    for name in KINDS[kind]:
        folder = DATA / name / "documents"
        found += [with_source(document) for document in load_documents(folder)][:most]
    return found


def deal(documents: Sequence[SourceDocument], shares: int) -> list[list[int]]:
    """Deal documents out by their size: the next largest goes to whoever has least."""
    dealt: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for place in sorted(range(len(documents)), key=lambda place: -size_of(documents[place])):
        least = loads.index(min(loads))
        dealt[least].append(place)
        loads[least] += size_of(documents[place])
    return dealt


@dataclass
class Worker:
    """Hold what a worker process has at hand."""

    barrier: Any
    counter: TokenCounter
    documents: dict[str, list[SourceDocument]]


@dataclass(frozen=True)
class Share:
    """Hold what one worker did."""

    begun: float  # on the clock that all processes share
    ended: float
    worked: float  # seconds that processors were busy for it
    chunks: int
    digests: dict[str, str]  # document -> what its chunks are


_WORKER: list[Worker] = []  # of this process


def begin_worker(barrier: Any, most: int | None) -> None:
    """Read all documents into a fresh process."""
    documents = {kind: read_kind(kind, most) for kind in KINDS}
    _WORKER.append(Worker(barrier, LocalEmbeddingModel.load().token_counter, documents))


def digest_of(chunks: Sequence[AI4RAGChunk]) -> str:
    """Tell whether chunks are the same."""
    told = json.dumps([[chunk.text, chunk.metadata] for chunk in chunks], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def divide(method: str, kind: str, places: Sequence[int]) -> Share:
    """Divide some documents, beginning together with the other workers."""
    worker = _WORKER[0]
    chunker = get_chunker(method, CHUNK_SIZE, 0, worker.counter)
    documents = worker.documents[kind]
    warm = 0
    for document in documents:
        if warm > WARM_BYTES:
            break
        chunker.split_document(document)
        warm += size_of(document)
    worker.barrier.wait(PATIENCE)
    begun, before = time.monotonic(), time.process_time()
    found = [chunker.split_document(documents[place]) for place in places]
    ended, worked = time.monotonic(), time.process_time() - before
    digests = {documents[place].name: digest_of(chunks) for place, chunks in zip(places, found, strict=True)}
    return Share(begun, ended, worked, sum(map(len, found)), digests)


def divide_sent(chunker: BaseChunker, documents: Sequence[SourceDocument]) -> list[list[AI4RAGChunk]]:
    """Divide documents that were sent, and give their chunks back."""
    return [chunker.split_document(document) for document in documents]


class Bench:
    """Measure with one number of processes."""

    def __init__(self, processes: int, repeats: int, documents: dict[str, list[SourceDocument]]) -> None:
        self.processes, self.repeats, self.documents = processes, repeats, documents
        self.counter = LocalEmbeddingModel.load().token_counter
        self.digests: dict[tuple[str, str], dict[str, str]] = {}

    def run(self, pool: ProcessPoolExecutor, method: str, kind: str) -> dict[str, Any]:
        """Measure one chunker on one kind of documents."""
        documents = self.documents[kind]
        megabytes = sum(map(size_of, documents)) / 1e6
        shares = deal(documents, self.processes)
        walls, busy = [], []
        for _ in range(self.repeats):
            waiting = [pool.submit(divide, method, kind, share) for share in shares]
            done = [share.result() for share in waiting]
            walls.append(max(share.ended for share in done) - min(share.begun for share in done))
            busy.append(sum(share.worked for share in done) / walls[-1])
            self.digests[method, kind] = {name: own for share in done for name, own in share.digests.items()}
        sent = [self.sent(pool, method, kind, shares) for _ in range(self.repeats)]
        return {
            "megabytes_per_second": megabytes / float(np.median(walls)),
            "megabytes_per_second_sent_and_brought_back": megabytes / float(np.median(sent)),
            "processors_busy": float(np.median(busy)),
            "chunks": sum(share.chunks for share in done),
        }

    def sent(self, pool: ProcessPoolExecutor, method: str, kind: str, shares: list[list[int]]) -> float:
        """Time a caller who sends documents and waits for their chunks."""
        chunker = get_chunker(method, CHUNK_SIZE, 0, self.counter)
        parts = [[self.documents[kind][place] for place in share] for share in shares]
        begun = time.monotonic()
        for waiting in [pool.submit(divide_sent, chunker, part) for part in parts]:
            waiting.result()
        return time.monotonic() - begun


def named(count: int) -> str:
    """Name a number of processes."""
    return f"{count} process" + "es" * (count != 1)


def measure(
    processes: Sequence[int], methods: Sequence[str], repeats: int, most: int | None
) -> dict[str, Any]:
    """Measure all chunkers with each number of processes."""
    documents = {kind: read_kind(kind, most) for kind in KINDS}
    results: dict[str, Any] = {
        "chunk_size": CHUNK_SIZE,
        "processors": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "documents": {
            kind: {"documents": len(own), "megabytes": sum(map(size_of, own)) / 1e6}
            for kind, own in documents.items()
        },
        "chunkers": {method: {kind: {} for kind in KINDS} for method in methods},
    }
    digests: list[dict[tuple[str, str], dict[str, str]]] = []
    context = multiprocessing.get_context("spawn")
    for count in processes:
        bench = Bench(count, repeats, documents)
        initial = (context.Barrier(count), most)
        with ProcessPoolExecutor(count, context, begin_worker, initial) as pool:
            for method in methods:
                for kind in KINDS:
                    found = bench.run(pool, method, kind)
                    results["chunkers"][method][kind][named(count)] = found
                    print(f"  {named(count)}, {method}, {kind}: {json.dumps(rounded(found))}", flush=True)
        digests.append(bench.digests)
    for own in (own for kinds in results["chunkers"].values() for own in kinds.values()):
        speeds = [found["megabytes_per_second"] for found in own.values()]
        own["last / first number of processes"] = speeds[-1] / speeds[0]
    results["same chunks in all processes"] = all(own == digests[0] for own in digests)
    results["load_after"] = os.getloadavg()[0]
    return results


def rounded(value: Any) -> Any:
    """Keep three digits of every figure."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def show(results: dict[str, Any]) -> None:
    """Print megabytes a second as a table."""
    for kind in KINDS:
        about = results["documents"][kind]
        print(f"\n{kind}: {about['documents']} documents, {about['megabytes']:.2f} MB; MB/s")
        for method, kinds in results["chunkers"].items():
            cells = [
                f"{name}: {found['megabytes_per_second']:.3f} "
                f"(sent {found['megabytes_per_second_sent_and_brought_back']:.3f})"
                for name, found in kinds[kind].items()
                if isinstance(found, dict)
            ]
            ratio = kinds[kind]["last / first number of processes"]
            print(f"  {method:16} {'   '.join(cells)}   ratio {ratio:.2f}")
    print(f"same chunks in all processes: {results['same chunks in all processes']}")


def main() -> int:
    """Measure and show, or save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/chunking.json")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--methods", nargs="+", choices=chunking_methods(), default=chunking_methods())
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--documents", type=int, help="at most so many of each set; all without it")
    arguments = parser.parse_args()
    missing = [name for names in KINDS.values() for name in names if not (DATA / name).is_dir()]
    if missing:
        print(f"Not measured: {DATA} has no {', '.join(missing)}; set AI4RAG_NB_DATA.")
        return 0
    results = measure(arguments.processes, arguments.methods, arguments.repeats, arguments.documents)
    show(results)
    if arguments.save:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(rounded(results), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

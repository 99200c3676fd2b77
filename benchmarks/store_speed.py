"""Measure how fast each vector store loads and finds, and what our layer adds to the bare client.

Vectors of 384 numbers are made up, in topics, documents and passages and with a falling spectrum, so that an index has about
as hard a time as with MiniLM's (effective dimension about 100, 87 there; length of the mean 0.20, as there); texts are words of
a Zipf distribution. Each store and size is measured in a process of its own, with a server of its
own. The bare client sends the very same statement or call, composed beforehand, and takes turns with our layer and with a
NumPy search over all rows: blocks of the same questions, in another order each time. A block's p50 and p95 are taken, then the
median over the blocks. What the layer adds is the difference of the two p50 of a round, and for ten readers the difference of
the time a search takes on average. It is held against 10 % of the bare client or 0.3 ms, whichever is more. The garbage
collector is off within blocks and NumPy has one thread. PostgreSQL runs with the settings of the tests (no fsync). A real
Milvus is started only where the tests may start one (AI4RAG_NB_MILVUS_SERVER=1).
Run: python benchmarks/store_speed.py [--stores milvus_lite pgvector milvus] [--rows 1000 20000 100000] [--save]
With --save the results file is brought up to date behind each store and size.
"""

import argparse
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.foundations.chunks import AI4RAGChunk, RetrievedChunk
from ai4rag_nb.indexing.milvus_calls import prepare_index, row_fields
from ai4rag_nb.indexing.milvus_lite_probe import create_collection
from ai4rag_nb.indexing.search_settings import search_depth
from ai4rag_nb.indexing.store_checks import (
    MAXIMUM_BATCH_ROWS,
    StoredRow,
    check_rows,
    new_collection_name,
    row_key,
)
from ai4rag_nb.indexing.vector_store import (
    BaseVectorStore,
    BaseVectorStoreConfig,
    MilvusConfig,
    MilvusLiteConfig,
    PGVectorConfig,
    get_vector_store,
)

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "store_speed.json"
STORES = ("milvus_lite", "pgvector", "milvus")
DIMENSION, WANTED, READERS = 384, 10, 10
DEPTH = search_depth(WANTED)  # hits that our layer asks a store for
FIELDS = ["document_text", "metadata"]
JUDGED_ROWS = 20_000  # the size that the limits on time are about
LIMITS = {  # store -> search -> p95 in milliseconds
    "milvus_lite": {"dense": 100.0, "hybrid": 200.0},
    "pgvector": {"dense": 10.0, "hybrid": 100.0},
}
LEAST_LOADED, LEAST_BATCH = (
    20_000.0,
    5.0,
)  # rows a second before indexes are built; times that one call is faster
MOST_SHARE, MOST_MS = 0.1, 0.3  # what the layer may add
WARM, FEWEST = 10, 20  # searches before anything is timed; questions in a block at least

Ask = Callable[[int, int], Any]  # number of the question, number of the reader -> anything


COMMON = (
    "the of and in to a is was for as on with by that it from at his an are were which be this had or not have but "
    "also has their its they he who been when her all more other into there than only some what how such"
)
STOP_WORDS = COMMON.split()
VOCABULARY, WORDS_A_ROW, ROWS_A_DOCUMENT = 20_000, 120, 40


def vocabulary() -> np.ndarray:
    """Make words of two to four syllables, the commonest words of English before them."""
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    made = ("".join(parts) for size in (2, 3) for parts in itertools.product(syllables, repeat=size))
    words = list(itertools.islice(made, 12 * VOCABULARY))
    random.Random(1).shuffle(words)
    return np.array([*STOP_WORDS, *words[: VOCABULARY - len(STOP_WORDS)]], dtype=object)


def make_texts(rows: int, draw: np.random.Generator) -> list[str]:
    """Draw the words of texts by their rank, as language does."""
    words = vocabulary()
    share = 1.0 / (np.arange(len(words)) + 2.7)
    reach = np.cumsum(share / share.sum())
    texts: list[str] = []
    for start in range(0, rows, 5_000):
        drawn = np.searchsorted(reach, draw.random((min(5_000, rows - start), WORDS_A_ROW)))
        texts += [" ".join(line) for line in words[np.minimum(drawn, len(words) - 1)]]
    return texts


def unit(vectors: np.ndarray) -> np.ndarray:
    """Give vectors the length 1."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def directions(rows: int, draw: np.random.Generator) -> np.ndarray:
    """Draw directions whose spectrum falls, so that about a hundred of the 384 numbers matter."""
    scale = (1.0 + np.arange(DIMENSION)) ** -0.35
    return unit(draw.standard_normal((rows, DIMENSION), dtype=np.float32) * scale.astype(np.float32))


def make_vectors(rows: int, draw: np.random.Generator) -> np.ndarray:
    """Draw vectors of a language, of topics, of documents in them, of passages, and of the rows themselves."""
    numbers = np.arange(rows)
    documents = numbers // ROWS_A_DOCUMENT
    topics = draw.integers(rows // 400 + 2, size=documents[-1] + 1)[documents]
    groups = ((0.2, 0 * numbers), (0.4, topics), (0.6, documents), (0.45, numbers // 5), (0.5, numbers))
    total = np.zeros((rows, DIMENSION), dtype=np.float32)
    for weight, group in groups:
        total += np.float32(weight) * directions(int(group.max()) + 1, draw)[group]
    return unit(total)


@dataclass(frozen=True)
class Material:
    """Hold what is loaded and what is asked."""

    chunks: list[AI4RAGChunk]
    vectors: np.ndarray  # of the chunks, each of length 1
    questions: list[str]
    asked: np.ndarray  # vectors of the questions

    def keys(self) -> list[str]:
        """Give the keys of all rows in their order."""
        return [row_key(chunk.document_id, chunk.sequence_number) for chunk in self.chunks]


def make_material(rows: int, questions: int) -> Material:
    """Make chunks in clusters, and questions that are near one chunk each and use words of it."""
    draw, chosen = np.random.default_rng(64), random.Random(64)
    vectors = make_vectors(rows, draw)
    chunks = []
    for number, text in enumerate(make_texts(rows, draw)):
        document, place_in_it = divmod(number, ROWS_A_DOCUMENT)
        place = {"document_id": f"{document:05d}.md", "sequence_number": place_in_it + 1}
        chunks.append(AI4RAGChunk(text, {**place, "start_index": 0, "end_index": len(text)}))
    targets = [chosen.randrange(rows) for _ in range(questions)]
    asked = []
    for number, target in enumerate(targets):
        content = [word for word in chunks[target].text.split() if word not in STOP_WORDS]
        first, second, third, fourth = chosen.sample(content, 4)
        asked.append(f"what is the {first} {second} of the {third} and how was {fourth} made in {number}")
    return Material(chunks, vectors, asked, unit(vectors[targets] + directions(questions, draw)))


class KnownVectors:
    """Give every question the vector that it was made with."""

    dimension = DIMENSION

    def __init__(self, material: Material) -> None:
        self.asked, self.places = material.asked, {text: n for n, text in enumerate(material.questions)}

    def embed_queries(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        return self.asked[[self.places[text] for text in texts]]

    embed_documents = embed_queries


def brute_force(vectors: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Find the rows that are nearest to one vector, with NumPy alone."""
    scores = vectors @ asked
    wanted = min(WANTED, len(scores))
    best = np.argpartition(-scores, wanted - 1)[:wanted]
    return best[np.argsort(-scores[best])]


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep the garbage collector out of a block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Block:
    """Hold what one block of searches took."""

    taken: np.ndarray  # milliseconds of each search
    wall: float  # seconds of all together
    worked: float  # seconds that the readers' threads kept a processor busy; those of a server are not in it

    @property
    def p50(self) -> float:
        return float(np.percentile(self.taken, 50))

    @property
    def p95(self) -> float:
        return float(np.percentile(self.taken, 95))

    @property
    def each(self) -> float:  # milliseconds
        return 1000 * self.wall / len(self.taken)

    @property
    def busy(self) -> float:  # milliseconds
        return 1000 * self.worked / len(self.taken)


def run_block(ask: Ask, count: int, readers: int = 1) -> Block:
    """Ask the first questions, shared out among readers that begin together."""
    taken, worked = np.zeros(count), np.zeros(readers)
    together = threading.Barrier(readers + 1)
    failures: list[BaseException] = []

    def read(reader: int) -> None:
        if readers > 1:
            together.wait()
        before = time.thread_time()
        for number in range(reader, count, readers):
            begun = time.perf_counter()
            ask(number, reader)
            taken[number] = 1000 * (time.perf_counter() - begun)
        worked[reader] = time.thread_time() - before

    def work(reader: int) -> None:
        try:
            read(reader)
        except BaseException as error:  # raised again by the caller's thread
            failures.append(error)

    with no_collector():
        if readers == 1:
            started = time.perf_counter()
            read(0)
        else:
            threads = [threading.Thread(target=work, args=(reader,)) for reader in range(readers)]
            for thread in threads:
                thread.start()
            together.wait()
            started = time.perf_counter()
            for thread in threads:
                thread.join()
        wall = time.perf_counter() - started
    if failures:
        raise failures[0]
    return Block(taken, wall, float(worked.sum()))


@dataclass(frozen=True)
class Plan:
    """Say how much is measured."""

    questions: int
    repeats: int
    block_seconds: float

    def count(self, each_ms: float) -> int:
        """Give the number of questions of a block, where one takes so long."""
        fitting = int(1000 * self.block_seconds / max(each_ms, 0.001))
        return max(min(FEWEST, self.questions), min(self.questions, fitting))


def take_turns(works: dict[str, Ask], plan: Plan, readers: int = 1) -> dict[str, list[Block]]:
    """Let ways of searching take turns, block by block, beginning with another one each time."""
    names = list(works)
    slowest = max(
        run_block(work, min(WARM, plan.questions), min(readers, WARM)).each for work in works.values()
    )
    count = plan.count(slowest)
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for turn in range(plan.repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            blocks[name].append(run_block(works[name], count, readers))
    return blocks


def median(values: Sequence[float]) -> float:
    """Give the median of figures that were taken in rounds."""
    return float(np.median(values))


def figures_of(blocks: dict[str, list[Block]], readers: int = 1) -> dict[str, Any]:
    """Say what searches took, and what the layer added."""
    found: dict[str, Any] = {"questions": len(blocks["ours"][0].taken), "rounds": len(blocks["ours"])}
    for name, own in blocks.items():
        found[name] = {
            "p50_ms": median([block.p50 for block in own]),
            "p95_ms": median([block.p95 for block in own]),
        }
        if readers > 1:
            found[name]["searches_per_second"] = median([1000 / block.each for block in own])
    pairs = list(zip(blocks["ours"], blocks["bare"], strict=True))
    kind = "each" if readers > 1 else "p50"
    ours, bare = ([getattr(pair[place], kind) for pair in pairs] for place in (0, 1))
    added = median([mine - theirs for mine, theirs in zip(ours, bare, strict=True)])
    allowed = max(MOST_MS, MOST_SHARE * median(bare))
    found["layer"] = {
        "of": "time a search takes on average" if readers > 1 else "p50",
        "ours_ms": median(ours),
        "bare_ms": median(bare),
        "added_ms": added,
        "ratio": median([mine / theirs for mine, theirs in zip(ours, bare, strict=True)]),
        "added_processor_ms": median([mine.busy - theirs.busy for mine, theirs in pairs]),
        "limit_ms": allowed,
        "holds": added <= allowed,
    }
    return found


def status_megabytes(pid: int | str, field: str) -> float | None:
    """Read VmRSS or VmHWM of a process, where the system tells."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024
    return None


def forget_peak() -> None:
    """Let the peak of this process begin anew; ru_maxrss would also hold that of the parent."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def proportional_megabytes(pid: int) -> float | None:
    """Read the memory of a process with its share of what it shares."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return None


def process_tree(pid: int) -> list[int]:
    """List a process and all below it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += [child for child, parent in parents.items() if parent == found[-1]]
    return found


def server_memory(pid: int | None) -> dict[str, Any]:
    """Add up the memory of a server's processes; RSS and peaks count what they share more than once."""
    if pid is None or not Path("/proc/self/status").is_file():
        return {}
    processes = process_tree(pid)
    sums: dict[str, Any] = {"processes": len(processes)}
    reads: dict[str, Callable[[int], float | None]] = {
        "rss_sum_mb": lambda each: status_megabytes(each, "VmRSS"),
        "peak_rss_sum_mb": lambda each: status_megabytes(each, "VmHWM"),
        "pss_sum_mb": proportional_megabytes,
    }
    for name, read in reads.items():
        known = [value for value in map(read, processes) if value is not None]
        sums[name] = sum(known) if known else None
    return sums


@dataclass(frozen=True)
class Load:
    """Hold what one load took."""

    written: float  # seconds until the rows were there
    whole: float  # seconds until they could be searched by their indexes


class Bare(ABC):
    """Make the same calls as a store, composed beforehand."""

    has_words = True  # whether there is a keyword search

    @abstractmethod
    def load(self, rows: Sequence[StoredRow], vectors: np.ndarray) -> Load:
        """Load rows that are ready into a collection of its own, and drop it."""

    @abstractmethod
    def aim(self, store: BaseVectorStore, material: Material) -> None:
        """Make ready for searches of a store's collection."""

    @abstractmethod
    def dense(self, number: int, reader: int, limit: int = DEPTH) -> list[Any]:
        """Search by a vector; hits begin with their keys."""

    @abstractmethod
    def keyword(self, number: int, reader: int) -> list[Any]:
        """Search by words; hits begin with their keys."""

    def dense_few(self, number: int, reader: int) -> list[Any]:
        """Ask for no more hits than are wanted in the end."""
        return self.dense(number, reader, WANTED)

    def hybrid(self, number: int, reader: int) -> list[Any]:
        """Make the calls of both legs."""
        return self.dense(number, reader) + self.keyword(number, reader)

    @abstractmethod
    def close(self) -> None:
        """Give back what was opened."""


class BareMilvus(Bare):
    """Ask a pymilvus client."""

    def __init__(
        self, client: Any, keyword: str, exact_rows: int, options: dict[str, Any], own: bool
    ) -> None:
        self.client, self.mode, self.exact_rows, self.options, self.own = (
            client,
            keyword,
            exact_rows,
            options,
            own,
        )
        self.has_words = keyword != "none"

    def load(self, rows: Sequence[StoredRow], vectors: np.ndarray) -> Load:
        client, name = self.client, new_collection_name()
        data = [row_fields(row, vector, None) for row, vector in zip(rows, vectors, strict=True)]
        exact = len(rows) <= self.exact_rows
        with no_collector():
            begun = time.perf_counter()
            create_collection(
                client, name, DIMENSION, "cosine", self.mode, exact=not self.own or self.exact_rows > 0
            )
            for start in range(0, len(data), MAXIMUM_BATCH_ROWS):
                client.upsert(name, data[start : start + MAXIMUM_BATCH_ROWS])
            written = time.perf_counter() - begun
            client.flush(name)
            prepare_index(client, name, "cosine", self.mode, exact)
            if self.own:
                strong = {"consistency_level": "Strong", "timeout": 600}
                client.query(name, filter="", output_fields=["count(*)"], **strong)
            whole = time.perf_counter() - begun
        client.drop_collection(name)
        return Load(written, whole)

    def aim(self, store: BaseVectorStore, material: Material) -> None:
        self.name, self.questions, self.vectors = (
            store.collection_name,
            material.questions,
            list(material.asked),
        )

    def _search(
        self, asked: Any, field: str, limit: int, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        (hits,) = self.client.search(
            self.name,
            data=[asked],
            search_params=parameters,
            anns_field=field,
            limit=limit,
            filter="",
            output_fields=FIELDS,
            **self.options,
        )
        return [
            (hit["id"], hit["distance"], hit["entity"]["document_text"], hit["entity"]["metadata"])
            for hit in hits
        ]

    def dense(self, number: int, reader: int, limit: int = DEPTH) -> list[Any]:
        return self._search(self.vectors[number], "dense", limit, {"params": {"ef": max(64, DEPTH)}})

    def keyword(self, number: int, reader: int) -> list[Any]:
        return self._search(self.questions[number], "sparse", DEPTH, {})

    def close(self) -> None:
        if self.own:
            self.client.close()


class BarePostgres(Bare):
    """Ask psycopg, over a connection for each reader that is set as ours are."""

    def __init__(self, config: PGVectorConfig) -> None:
        import psycopg
        from pgvector.psycopg import register_vector

        from ai4rag_nb.indexing.pgvector_connection import (
            apply_settings,
            connection_parameters,
            session_settings,
        )

        self.config = config
        self.connections: list[Any] = []
        for _ in range(READERS):
            connection = psycopg.connect(**connection_parameters(config), autocommit=True)
            apply_settings(connection, session_settings(config, "public"))
            register_vector(connection)
            self.connections.append(connection)
        row = self._one("select oid from pg_ts_config where cfgname = %s", [config.language])
        self.language = row[0]

    def _one(self, statement: Any, values: Any = None) -> Any:
        return self.connections[0].execute(statement, values).fetchone()

    def load(self, rows: Sequence[StoredRow], vectors: np.ndarray) -> Load:
        from ai4rag_nb.indexing import pgvector_statements as statements

        connection, names = (
            self.connections[0],
            statements.TableNames(self.config.schema, new_collection_name()),
        )
        values = [
            (row.key, row.document_key, row.text, row.metadata, vector)
            for row, vector in zip(rows, vectors, strict=True)
        ]
        copy = statements.copy_statements(names, "table", statements.CHUNK_COLUMNS).direct
        connection.execute("set statement_timeout = 0")
        with no_collector():
            begun = time.perf_counter()
            for statement in statements.create_statements(names, DIMENSION, "native"):
                connection.execute(statement)
            for start in range(0, len(values), MAXIMUM_BATCH_ROWS):
                with connection.transaction(), connection.cursor().copy(copy) as stream:
                    stream.set_types(["text", "text", "text", "text", "vector"])
                    for value in values[start : start + MAXIMUM_BATCH_ROWS]:
                        stream.write_row(value)
            written = time.perf_counter() - begun
            self._index(connection, names, len(rows))
            whole = time.perf_counter() - begun
        connection.execute(names.fill(statements.DROP))
        return Load(written, whole)

    def _index(self, connection: Any, names: Any, rows: int) -> None:
        import psycopg
        from psycopg import sql

        from ai4rag_nb.indexing import pgvector_statements as statements

        connection.execute(
            names.fill(
                "insert into {words} (id, document_key, words) select id, document_key, "
                "to_tsvector(%(language)s::oid::regconfig, text) from {table}"
            ),
            {"language": self.language},
        )
        index = sql.Identifier(names.beside("words_index"))
        connection.execute(names.fill(statements.INDEX_WORDS, index=index))
        if rows > self.config.exact_rows:
            connection.execute("set maintenance_work_mem = '256MB'")
            statement = statements.index_statement(names, DIMENSION, "cosine")
            try:
                connection.execute(statement)
            except psycopg.errors.DiskFull:  # too little shared memory for workers
                connection.execute("set max_parallel_maintenance_workers = 0")
                connection.execute(statement)
        for template in statements.ANALYZE:
            connection.execute(names.fill(template))

    def aim(self, store: BaseVectorStore, material: Material) -> None:
        from ai4rag_nb.indexing import pgvector_statements as statements

        names = statements.TableNames(self.config.schema, store.collection_name)
        exact = len(material.chunks) <= self.config.exact_rows
        self.dense_sql = statements.dense_statement(names, "cosine", DIMENSION, exact, False).as_string()
        self.word_sql = statements.keyword_statement(names, False).as_string()
        self.questions, self.vectors = material.questions, list(material.asked)

    def dense(self, number: int, reader: int, limit: int = DEPTH) -> list[Any]:
        values = {"vector": self.vectors[number], "depth": limit}
        return self.connections[reader].execute(self.dense_sql, values, binary=True).fetchall()

    def keyword(self, number: int, reader: int) -> list[Any]:
        values = {"text": self.questions[number], "depth": DEPTH, "language": self.language}
        return self.connections[reader].execute(self.word_sql, values, binary=True).fetchall()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def configuration(store: str, place: dict[str, Any]) -> BaseVectorStoreConfig:
    """Make the configuration of the store that is measured."""
    if store == "milvus_lite":
        return MilvusLiteConfig(str(Path(place["folder"]) / "store.db"))
    if store == "milvus":
        return MilvusConfig(place["uri"], place["token"])
    return PGVectorConfig(
        place["host"], place["port"], place["database"], place["user"], place["password"], pool_size=READERS
    )


def bare_client(config: BaseVectorStoreConfig, store: Any) -> Bare:
    """Make the bare client beside an open store; a Milvus Lite file has one client only."""
    if isinstance(config, PGVectorConfig):
        return BarePostgres(config)
    if isinstance(config, MilvusLiteConfig):
        return BareMilvus(store._file.client, "native", config.exact_rows, {}, own=False)
    assert isinstance(config, MilvusConfig)
    from pymilvus import MilvusClient

    client = MilvusClient(config.uri, token=config.token or "", dedicated=True)
    options = {"consistency_level": "Bounded", "timeout": config.timeout_seconds}
    return BareMilvus(client, store._keyword, config.exact_rows, options, own=True)


def our_load(store: BaseVectorStore, material: Material) -> Load:
    """Load through our layer; the last call of on_progress comes before the indexes are built."""
    written = [0.0]

    def told(done: int, total: int) -> None:
        written[0] = time.perf_counter() - begun

    with no_collector():
        begun = time.perf_counter()
        store.add_documents(material.chunks, material.vectors, on_progress=told)
        whole = time.perf_counter() - begun
    return Load(written[0], whole)


def load_figures(ours: Sequence[Load], bare: Sequence[Load], rows: int) -> dict[str, Any]:
    """Say how fast rows were loaded."""
    found: dict[str, Any] = {"loads": len(ours)}
    for name, loads in (("ours", ours), ("bare", bare)):
        found[name] = {
            "rows_per_second_before_indexes": median([rows / load.written for load in loads]),
            "rows_per_second_with_indexes": median([rows / load.whole for load in loads]),
            "seconds_with_indexes": median([load.whole for load in loads]),
        }
    for name in ("written", "whole"):
        ratios = [
            getattr(mine, name) / getattr(theirs, name) for mine, theirs in zip(ours, bare, strict=True)
        ]
        found[f"ours / bare, {name}"] = median(ratios)
    return found


class Measurement:
    """Measure one store at one size."""

    def __init__(self, store: str, rows: int, plan: Plan, place: dict[str, Any]) -> None:
        self.rows, self.plan, self.server = rows, plan, place.get("pid")
        self.config = configuration(store, place)
        self.material = make_material(rows, plan.questions)
        self.model: Any = KnownVectors(self.material)
        self.result: dict[str, Any] = {"rows": rows, "dimension": DIMENSION, "wanted": WANTED, "asked": DEPTH}
        gc.collect()
        gc.freeze()

    def run(self) -> dict[str, Any]:
        """Measure all of it."""
        load_before = os.getloadavg()[0]
        with ExitStack() as opened:
            self.store = opened.enter_context(get_vector_store(self.model, self.config))
            self.bare = bare_client(self.config, self.store)
            opened.callback(self.bare.close)
            self.load()
            self.bare.aim(self.store, self.material)
            self.check()
            self.search()
            self.batch()
            self.result["memory"]["server_after_searches"] = server_memory(self.server)
            self.store.drop()
        self.result["machine"] = {
            "processors": os.cpu_count(),
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
        }
        return self.result

    def load(self) -> None:
        """Load again and again, in turns; the first load of ours stays, and is the one whose memory is read."""
        before = status_megabytes("self", "VmRSS")
        forget_peak()
        ours, bare = [our_load(self.store, self.material)], []
        peak = status_megabytes("self", "VmHWM")
        facts = self.store.properties()
        self.result |= {
            "product": facts.product,
            "search": "exact" if self.rows <= facts.exact_rows else facts.index,
        }
        self.result["memory"] = {
            "process_before_load_mb": before,
            "process_peak_of_load_mb": peak,
            "server_after_load": server_memory(self.server),
        }
        ready = check_rows(self.material.chunks)
        turns = self.plan.repeats if self.rows <= 20_000 else 1
        for turn in range(min(3, turns)):
            bare.append(self.bare.load(ready, self.material.vectors))
            if turn:
                with get_vector_store(self.model, self.config) as fresh:
                    ours.append(our_load(fresh, self.material))
                    fresh.drop()
        self.result["load"] = load_figures(ours, bare, self.rows)

    def ours(self, mode: str) -> Ask:
        """Search through our layer."""
        store, questions = self.store, self.material.questions
        return lambda number, reader: store.search(questions[number], WANTED, mode)

    def check(self) -> None:
        """Compare what is found with what there is to be found, and note the memory of searching."""
        forget_peak()
        keys, count = self.material.keys(), self.plan.questions
        dense = self.store.search_many(self.material.questions, WANTED)
        right = [
            {keys[place] for place in brute_force(self.material.vectors, asked)}
            for asked in self.material.asked
        ]
        shares = [
            len(found_keys(hits) & truth) / len(truth) for hits, truth in zip(dense, right, strict=True)
        ]
        self.result["recall_at_10"] = float(np.mean(shares))
        same = {"dense": self.overlap(self.bare.dense, "dense", min(50, count))}
        if self.bare.has_words:
            same["keyword"] = self.overlap(self.bare.keyword, "keyword", min(50, count))
        self.result["hits_shared_with_bare"] = same
        self.result["memory"]["process_peak_of_searches_mb"] = status_megabytes("self", "VmHWM")

    def overlap(self, ask: Ask, leg: str, count: int) -> float:
        """Tell how many of our hits the bare client finds as well, so that both do the same work."""
        asked, shares = self.material.questions[:count], []
        for number, found in enumerate(self.store.search_legs(asked, [leg], DEPTH)):
            mine, theirs = found_keys(found[leg]), {hit[0] for hit in ask(number, 0)}
            shares.append(len(mine & theirs) / max(1, len(mine | theirs)))
        return float(np.mean(shares))

    def search(self) -> None:
        """Search with one reader and with ten."""
        vectors, asked = self.material.vectors, self.material.asked

        def numpy_search(number: int, reader: int) -> Any:
            return brute_force(vectors, asked[number])

        dense = {"ours": self.ours("vector"), "bare": self.bare.dense, "numpy": numpy_search}
        alone = {**dense, "bare, no more hits than wanted": self.bare.dense_few}
        found = self.result["one reader"] = {"dense": figures_of(take_turns(alone, self.plan))}
        if self.bare.has_words:
            found["keyword"] = self.pair("keyword", self.bare.keyword)
            found["hybrid"] = self.pair("hybrid", self.bare.hybrid)
        else:
            self.result["note"] = "this server has no keyword search"
        many = take_turns(dense, self.plan, READERS)
        self.result["ten readers"] = {"dense": figures_of(many, READERS)}

    def pair(self, mode: str, bare: Ask) -> dict[str, Any]:
        """Let our layer and the bare client take turns."""
        return figures_of(take_turns({"ours": self.ours(mode), "bare": bare}, self.plan))

    def batch(self) -> None:
        """Ask all questions in one call, and by ten threads one by one."""
        questions, together, alone = self.material.questions, [], []
        for _ in range(min(3, self.plan.repeats)):
            with no_collector():
                begun = time.perf_counter()
                self.store.search_many(questions, WANTED)
                together.append(time.perf_counter() - begun)
            alone.append(run_block(self.ours("vector"), len(questions), READERS).wall)
        self.result["batch"] = {
            "questions": len(questions),
            "one_call_ms_a_question": 1000 * median(together) / len(questions),
            "ten_threads_ms_a_question": 1000 * median(alone) / len(questions),
            "times_faster": median([one / all_ for one, all_ in zip(alone, together, strict=True)]),
        }


def found_keys(hits: Sequence[RetrievedChunk]) -> set[str]:
    """Give the keys of hits."""
    return {row_key(hit.document_id, hit.sequence_number) for hit in hits}


def verdict(what: str, value: float, unit: str, limit: float, least: bool = False) -> dict[str, Any]:
    """Hold a figure against its limit."""
    holds = value >= limit if least else value <= limit
    sign = ">=" if least else "<="
    return {"what": what, "measured": value, "limit": f"{sign} {limit:,.4g} {unit}", "holds": bool(holds)}


def verdicts(store: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold all figures of one store and size against the limits."""
    found, rows = [], result["rows"]
    searches = result["one reader"]
    for mode, most in LIMITS.get(store, {}).items():
        if rows == JUDGED_ROWS and mode in searches:
            found.append(verdict(f"{mode}, p95", searches[mode]["ours"]["p95_ms"], "ms", most))
    if store == "pgvector" and rows >= JUDGED_ROWS:
        rate = result["load"]["ours"]["rows_per_second_before_indexes"]
        found.append(verdict("rows a second before indexes", rate, "", LEAST_LOADED, least=True))
    for readers in ("one reader", "ten readers"):
        for mode, figures in result[readers].items():
            layer = figures["layer"]
            found.append(
                verdict(f"layer, {mode}, {readers}", layer["added_ms"], "ms added", layer["limit_ms"])
            )
    if store == "milvus_lite":
        times = result["batch"]["times_faster"]
        found.append(verdict("one call against ten threads", times, "times faster", LEAST_BATCH, least=True))
    return found


def show(store: str, result: dict[str, Any]) -> None:
    """Print the figures of one store and size."""
    load, memory = result["load"], result["memory"]
    print(f"\n{store}, {result['rows']:,} rows ({result['product']}, {result['search']})")
    for who in ("ours", "bare"):
        own = load[who]
        print(
            f"  load, {who}: {own['rows_per_second_before_indexes']:,.0f} rows/s before indexes, "
            f"{own['rows_per_second_with_indexes']:,.0f} with them"
        )
    for readers in ("one reader", "ten readers"):
        for mode, figures in result[readers].items():
            for who, own in figures.items():
                if isinstance(own, dict) and "p50_ms" in own:
                    print(
                        f"  {readers}, {mode}, {who}: p50 {own['p50_ms']:.2f} ms, p95 {own['p95_ms']:.2f} ms"
                    )
            layer = figures["layer"]
            print(
                f"  {readers}, {mode}, layer: {layer['added_ms']:+.3f} ms, {layer['ratio']:.3f} of the bare client; "
                f"{layer['added_processor_ms']:+.3f} ms of a processor"
            )
    batch = result["batch"]
    print(
        f"  {batch['questions']} questions: {batch['one_call_ms_a_question']:.2f} ms each in one call, "
        f"{batch['ten_threads_ms_a_question']:.2f} by ten threads"
    )
    print(
        f"  recall@10 {result['recall_at_10']:.4f}; hits shared with the bare client {result['hits_shared_with_bare']}"
    )
    print(f"  memory {json.dumps(memory)}")
    print(f"  machine {json.dumps(result['machine'])}", flush=True)


def show_limits(results: dict[str, Any]) -> None:
    """Print the limits as a table."""
    lines = [("store", "rows", "what", "measured", "limit", "holds")]
    for store in STORES:
        for rows, result in sorted(results.get(store, {}).items(), key=lambda pair: int(pair[0])):
            for entry in result.get("limits", []):
                measured, holds = f"{entry['measured']:,.3f}", "yes" if entry["holds"] else "NO"
                lines.append((store, f"{int(rows):,}", entry["what"], measured, entry["limit"], holds))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@contextmanager
def server_of(store: str, folder: str) -> Iterator[dict[str, Any]]:
    """Start the server of a store, and say where it is."""
    if store == "milvus_lite":
        yield {"folder": folder}
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import MilvusServer235, PostgresServer

    if store == "milvus":
        milvus = MilvusServer235()
        try:
            assert milvus.process is not None
            yield {"uri": milvus.uri, "token": milvus.token, "pid": milvus.process.pid}
        finally:
            milvus.close()
        return
    postgres = PostgresServer()
    try:
        assert postgres.process is not None
        place = vars(postgres.place)
        yield {**place, "pid": postgres.process.pid}
    finally:
        postgres.close()


def why_not(store: str) -> str | None:
    """Say why a store is not measured here, if it is not."""
    if store != "milvus":
        return None
    sys.path.insert(0, str(ROOT / "tests"))
    from servers import why_no_milvus

    reason = why_no_milvus()
    return "somebody's own server is not measured" if os.environ.get("AI4RAG_NB_TEST_MILVUS_URI") else reason


def measure(store: str, rows: int, plan: Plan) -> dict[str, Any]:
    """Measure one store and size in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, server_of(store, folder) as place:
        answer = Path(folder) / "answer.json"
        arguments = [
            "--one",
            store,
            "--rows",
            str(rows),
            "--questions",
            str(plan.questions),
            "--repeats",
            str(plan.repeats),
        ]
        arguments += ["--block-seconds", str(plan.block_seconds), "--answer", str(answer)]
        subprocess.run(
            [sys.executable, __file__, *arguments],
            input=json.dumps(place),
            text=True,
            check=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return {**result, "limits": verdicts(store, result)}


def rounded(value: Any) -> Any:
    """Keep four digits of every figure."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(store: str, rows: int, result: dict[str, Any]) -> None:
    """Put one store and size into the results file and leave the others as they are."""
    known: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    known.setdefault(store, {})[str(rows)] = rounded(result)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    fresh = RESULT.with_suffix(".new")
    ordered = {
        name: dict(sorted(known[name].items(), key=lambda pair: int(pair[0])))
        for name in STORES
        if name in known
    }
    fresh.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    fresh.replace(RESULT)


def measure_one(arguments: argparse.Namespace, plan: Plan) -> None:
    """Be the fresh process."""
    place = json.loads(sys.stdin.read())
    result = Measurement(arguments.one, arguments.rows[0], plan, place).run()
    Path(arguments.answer).write_text(json.dumps(result), encoding="utf-8")


def measure_all(arguments: argparse.Namespace, plan: Plan) -> int:
    """Measure every store and size; one that fails does not keep the others from being measured."""
    results: dict[str, Any] = {}
    failed = 0
    for store in arguments.stores:
        reason = why_not(store)
        if reason:
            print(f"\n{store}: not measured: {reason}", flush=True)
            continue
        for rows in arguments.rows:
            begun = time.monotonic()
            try:
                result = measure(store, rows, plan)
            except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
                print(f"\n{store}, {rows:,} rows: failed: {error}", flush=True)
                failed += 1
                continue
            results.setdefault(store, {})[str(rows)] = result
            if arguments.save:
                keep(store, rows, result)
            show(store, result)
            print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
    show_limits(results)
    return min(failed, 1)


def main() -> int:
    """Measure and show, or save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--save", action="store_true", help="bring benchmarks/results/store_speed.json up to date"
    )
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES), help="what is measured")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 20_000, 100_000], help="sizes")
    parser.add_argument("--questions", type=int, default=200, help="different questions")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of blocks; of loads at most 3")
    parser.add_argument("--block-seconds", type=float, default=3.0, help="about how long a block lasts")
    parser.add_argument("--one", choices=STORES, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    plan = Plan(arguments.questions, arguments.repeats, arguments.block_seconds)
    if arguments.one:
        measure_one(arguments, plan)
        return 0
    return measure_all(arguments, plan)


if __name__ == "__main__":
    sys.exit(main())

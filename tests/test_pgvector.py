"""The store in PostgreSQL: the contract of all stores over a real server, and what only a server can do to one."""

import contextlib
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import ssl
import subprocess
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import ForeignPostgres, PostgresServer
from servers import postgres as postgres_fixture
from small_world import FromTheTest, Once, files_holding, make_experiment, paid, service, table_of, wait_until
from store_contract import HashModel, Opener, StoreContract, bm25, chunk, random_chunks

from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.errors import (
    AI4RAGError,
    Failure,
    IndexingError,
    InputError,
    LostStoreError,
    VectorStoreInitializationError,
)
from ai4rag_nb.foundations.events import TrialFailed, TrialStarted
from ai4rag_nb.indexing import languages, multi_parts, pgvector_loading
from ai4rag_nb.indexing.cleaning import find_orphans
from ai4rag_nb.indexing.collections import CollectionRegistry, open_collection, open_place
from ai4rag_nb.indexing.multi_index import MultiIndexStore
from ai4rag_nb.indexing.pgvector_statements import LARGEST_INDEXED, TableNames, dense_statement
from ai4rag_nb.indexing.pgvector_store import PGVectorStore
from ai4rag_nb.indexing.store_config import PGVectorConfig
from ai4rag_nb.indexing.vector_store import get_vector_store
from ai4rag_nb.optimization.workspace import Workspace
from ai4rag_nb.serving.commands import main

postgres = postgres_fixture
psycopg = pytest.importorskip("psycopg", reason="the extra pgvector is not installed")

Server = PostgresServer | ForeignPostgres


def connect(server: Server, **changes: Any) -> Any:
    place = server.place
    parameters = {
        "host": place.host,
        "port": place.port,
        "user": place.user,
        "password": place.password,
        "dbname": place.database,
    }
    return psycopg.connect(**{**parameters, **changes}, autocommit=True)


@pytest.fixture(autouse=True)
def no_pool_is_left() -> Iterator[None]:
    """After each test all pools of this process are closed and their threads have ended."""
    yield
    wait_until(lambda: not pool_threads())  # a store that was not closed keeps them


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ai4rag_nb-")]


@pytest.fixture()
def config(postgres: Server) -> Iterator[PGVectorConfig]:
    """A configuration with a schema of its own, which is dropped with all that is in it."""
    place, schema = postgres.place, f"ai4rag_test_{secrets.token_hex(6)}"
    yield PGVectorConfig(
        place.host,
        place.port,
        place.database,
        place.user,
        place.password,
        schema=schema,
        language="simple",
        timeout_seconds=20,
    )
    with connect(postgres) as connection:
        connection.execute(f'drop schema if exists "{schema}" cascade')


@pytest.fixture()
def opener(config: PGVectorConfig) -> Iterator[Opener]:
    """Open stores; whatever a test leaves open is closed."""
    opened: list[PGVectorStore] = []

    def make(model: Any, name: str | None = None, metric: str = "cosine", **settings: Any) -> PGVectorStore:
        opened.append(get_vector_store(model, replace(config, distance_metric=metric, **settings), name))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


NO_SCAN = "-c enable_seqscan=off"  # small tables are searched through their index, too


class TestPGVectorContract(StoreContract):
    """PostgreSQL with every row looked at, and its own full text."""

    native_k1 = None
    settings: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture()
    def opener(self, opener: Opener) -> Opener:
        return lambda *arguments, **changes: opener(
            *arguments, **{"keyword": self.mode, **self.settings, **changes}
        )


class TestPGVectorContractWithOurWeights(TestPGVectorContract):
    """PostgreSQL with our BM25."""

    mode = "bm25"


class TestPGVectorContractOfTheIndex(TestPGVectorContract):
    """PostgreSQL with an HNSW index from the first row on."""

    settings = {"exact_rows": 0}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def no_scan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGOPTIONS", NO_SCAN)


def cloud(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    """Points in clusters, as embeddings are."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(max(2, count // 50), dimension))
    return (
        centres[random.integers(len(centres), size=count)] + random.normal(size=(count, dimension))
    ).astype(np.float32)


def brute_force(table: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Cosines of questions to rows, in double precision."""
    wide, questions = table.astype(float), asked.astype(float)
    return (questions @ wide.T) / np.linalg.norm(wide, axis=1) / np.linalg.norm(questions, axis=1)[:, None]


class TestIndex:
    """Which rows are looked at."""

    ROWS = 1_500

    @pytest.fixture()
    def store(self, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> PGVectorStore:
        monkeypatch.setenv("PGOPTIONS", NO_SCAN)
        store = opener(HashModel(16), "ai4rag_indexed", exact_rows=1_000)
        self.vectors = cloud(self.ROWS, 16)
        self.rows = [chunk(f"t{n}", n, f"{n % 3}.md") for n in range(1, self.ROWS + 1)]
        store.add_documents(self.rows, self.vectors)
        return store

    def plan(self, store: PGVectorStore, depth: int, documents: list[str] | None = None) -> str:
        statement = dense_statement(store._names, "cosine", 16, exact=False, filtered=documents is not None)
        values = {"vector": self.vectors[0], "depth": depth, "documents": documents}
        with store._pool.lend() as connection:
            lines = connection.execute(
                "explain " + statement.as_string(connection).replace("%%", "%"), values
            )
            return "\n".join(line for (line,) in lines)

    def test_the_index_answers_and_finds_what_there_is(self, store: PGVectorStore) -> None:
        assert store._indexed and f"Index Scan using {store._names.beside('hnsw')}" in self.plan(store, 50)
        questions = [f"q{n}" for n in range(30)]
        scores = brute_force(self.vectors, store.embedding_model.embed_queries(questions))
        best = np.argsort(-scores, axis=1)[:, :10]
        hits = store.search_many(questions, k=10)
        found = [{hit.sequence_number - 1 for hit in each} for each in hits]
        assert sum(len(each & set(row)) for each, row in zip(found, best.tolist(), strict=True)) >= 0.98 * 300
        alone = [store.search(question, k=10) for question in questions]
        assert [[hit.chunk_id for hit in each] for each in alone] == [
            [hit.chunk_id for hit in each] for each in hits
        ]
        for each, row in zip(hits, scores, strict=True):
            np.testing.assert_allclose(
                [hit.score for hit in each], [row[hit.sequence_number - 1] for hit in each], rtol=1e-4
            )

    def test_deep_searches_find_all(self, store: PGVectorStore) -> None:
        for k in (200, self.ROWS, 5_000):
            assert len(store.search("q", k=k)) == min(k, self.ROWS)

    def test_a_filter_finds_all_of_few(self, store: PGVectorStore) -> None:
        store.add_documents([chunk("far", n, "few.md") for n in range(1, 6)], -self.vectors[:5])
        model = store.embedding_model
        model.embed_queries = lambda texts: self.vectors[:1].repeat(len(texts), axis=0)  # type: ignore[method-assign]
        assert len(store.search("q", k=10, document_ids=["few.md"])) == 5
        assert len(store.search("q", k=700, document_ids=["0.md", "1.md", "few.md"])) == 700
        assert len(store.search("q", k=1_400, document_ids=["0.md", "1.md", "few.md"])) == 1_005

    def test_what_the_index_does_not_find_is_looked_for(
        self, store: PGVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = type(store)._nearest
        asked: list[bool] = []

        def lossy(self: Any, questions: Any, exact: bool) -> Any:
            asked.append(exact)
            return [rows if exact else rows[:3] for rows in real(self, questions, exact)]

        monkeypatch.setattr(type(store), "_nearest", lossy)
        assert len(store.search("q", k=10)) == 10 and asked == [False, True]

    def test_below_the_limit_every_row_is_looked_at(self, opener: Opener, store: PGVectorStore) -> None:
        again = opener(HashModel(16), "ai4rag_indexed")
        questions = [f"q{n}" for n in range(20)]
        scores = brute_force(self.vectors, again.embedding_model.embed_queries(questions))
        for row, hits in zip(scores, again.search_many(questions, k=10), strict=True):
            assert [hit.sequence_number - 1 for hit in hits] == np.argsort(-row)[:10].tolist()

    def test_a_collection_gets_its_index_when_it_is_opened(self, opener: Opener) -> None:
        first = opener(HashModel(8), "ai4rag_late")
        first.add_documents(random_chunks(30))
        assert not first._indexed
        assert opener(HashModel(8), "ai4rag_late", exact_rows=10)._indexed

    @pytest.mark.parametrize(
        ("dimension", "index"),
        [
            (1_900, "HNSW"),
            (2_000, "HNSW"),
            (2_001, "HNSW in half precision"),
            (4_000, "HNSW in half precision"),
        ],
    )
    def test_long_vectors_are_indexed_as_far_as_can_be(
        self, opener: Opener, dimension: int, index: str
    ) -> None:
        store, vectors = opener(HashModel(dimension), exact_rows=50), cloud(120, dimension)
        store.add_documents([chunk(f"t{n}", n) for n in range(1, 121)], vectors)
        assert store._indexed and store.properties().index == index
        scores = brute_force(vectors, store.embedding_model.embed_queries(["q"]))[0]
        hits = store.search("q", k=10)
        assert {hit.sequence_number - 1 for hit in hits} == set(np.argsort(-scores)[:10].tolist())
        best = np.sort(scores)[::-1][:10]
        np.testing.assert_allclose([hit.score for hit in hits], best, rtol=1e-4, atol=1e-6)

    def test_longer_vectors_are_searched_without_an_index(self, opener: Opener) -> None:
        store, vectors = opener(HashModel(4_001), exact_rows=5), cloud(20, 4_001)
        store.add_documents([chunk(f"t{n}", n) for n in range(1, 21)], vectors)
        assert not store._indexed and store.properties().index.startswith("none above 4,000 numbers")
        scores = brute_force(vectors, store.embedding_model.embed_queries(["q"]))[0]
        assert [hit.sequence_number - 1 for hit in store.search("q", k=20)] == np.argsort(-scores).tolist()
        with pytest.raises(VectorStoreInitializationError, match="16,001 numbers; pgvector holds 16,000"):
            opener(HashModel(16_001))
        assert LARGEST_INDEXED == 2_000

    @pytest.mark.parametrize("metric", ["l2", "ip"])
    def test_other_metrics_have_their_index(self, opener: Opener, metric: str) -> None:
        store, vectors = opener(HashModel(8), metric=metric, exact_rows=10), cloud(200, 8)
        store.add_documents([chunk(f"t{n}", n) for n in range(1, 201)], vectors)
        asked = store.embedding_model.embed_queries(["q"])[0].astype(float)
        wide = vectors.astype(float)
        expected = wide @ asked if metric == "ip" else -((wide - asked) ** 2).sum(axis=1)
        hits = store.search("q", k=5)
        assert [hit.sequence_number - 1 for hit in hits] == np.argsort(-expected)[:5].tolist()


class TestWords:
    """PostgreSQL's own full text."""

    TEXTS = (
        "The cats were running home.",
        "A dog runs.",
        "Nothing of the kind",
        "running running running cat",
    )

    def load(self, opener: Opener, language: str) -> PGVectorStore:
        store = opener(HashModel(), language=language)
        store.add_documents([chunk(text, n) for n, text in enumerate(self.TEXTS, 1)])
        return store

    def found(self, store: PGVectorStore, question: str) -> list[int]:
        return [hit.sequence_number for hit in store.search(question, search_mode="keyword")]

    def test_any_word_matches_by_its_stem(self, opener: Opener) -> None:
        store = self.load(opener, "english")
        assert set(self.found(store, "Did the cat run with an elephant?")) == {1, 2, 4}
        assert self.found(store, "the of were") == [], "stop words find nothing"
        assert self.found(store, "a running cat") == [4, 1, 2], "more of the words, and more often"

    def test_words_are_those_of_the_language(self, opener: Opener) -> None:
        store = self.load(opener, "simple")
        assert self.found(store, "cat") == [4] and set(self.found(store, "the")) == {1, 3}
        german = opener(HashModel(), language="german")
        german.add_documents([chunk("Die Häuser und der Garten")])
        assert len(german.search("Haus", search_mode="keyword")) == 1

    @pytest.mark.parametrize(
        "question",
        [
            "it's 'quoted' \\ back\\slash & | ! ( ) <-> :* cat",
            "cat'; drop table x; --",
            "http://a.b/c?x=1&y=2|z cat",
            "foo-bar_baz cat %s %(text)s {table}",
            "cat " * 10_000,
            "cat " + "x" * 60_000,
        ],
        ids=lambda text: ascii(text[:12]),
    )
    def test_questions_are_no_queries(self, opener: Opener, question: str) -> None:
        store = self.load(opener, "english")
        assert set(self.found(store, question)) == {1, 4}

    def test_what_ranks_is_said(self, opener: Opener) -> None:
        assert "not BM25" in opener(HashModel()).properties().keyword_search
        assert opener(HashModel(), keyword="bm25").properties().keyword_search == "BM25 of this toolkit"

    def test_another_language_is_refused(self, opener: Opener) -> None:
        opener(HashModel(), "ai4rag_words", language="english").add_documents([chunk("a cat")])
        with pytest.raises(VectorStoreInitializationError, match="language='english', not 'german'"):
            opener(HashModel(), "ai4rag_words", language="german")
        with pytest.raises(
            VectorStoreInitializationError, match=r"no text search configuration 'germann'.*'german'"
        ):
            opener(HashModel(), language="germann")

    def test_the_language_is_that_of_the_first_chunks(self, opener: Opener) -> None:
        plural = ("Pumpen", "Ventile", "Leitungen", "Türen", "Straßen")
        texts = [f"Die {word} sind in der Halle, und es ist nicht die Regel." for word in plural]
        stems = []
        for language in ("english", "auto"):
            store = opener(HashModel(), f"ai4rag_{language}", language=language)
            store.add_documents([chunk(text, number) for number, text in enumerate(texts, 1)])
            singular = ["Pumpe", "Ventil", "Leitung", "Tür", "Straße"]
            found = [self.found(store, word) for word in singular]
            stems.append(sum(number in hits for number, hits in enumerate(found, 1)))
        assert stems[0] < 5 and stems[1] == 5
        again = opener(HashModel(), "ai4rag_auto", language="auto")
        assert self.found(again, "Tür") == [4] and again.language == "german"
        assert "german" in again.properties().keyword_search
        with pytest.raises(VectorStoreInitializationError, match="language='german', not 'english'"):
            opener(HashModel(), "ai4rag_auto", language="english")
        again.add_documents([chunk("The pumps of the plant are in the hall.", 9)])
        assert self.found(again, "Pumpe") == [1], "what comes later changes nothing"

    def test_an_unclear_language_stems_nothing(self, opener: Opener) -> None:
        store = opener(HashModel(), language="auto")
        store.add_documents([chunk("Die Pumpen sind in der Halle, und das ist die Regel.", 1)])
        other = opener(HashModel(), language="auto")
        both = [chunk("Die Pumpen sind in der Halle, und das ist die Regel.", 1)]
        other.add_documents([*both, chunk("The pumps of the plant are in the hall, by the door.", 1, "b.md")])
        assert (store.language, other.language) == ("german", "simple")
        assert self.found(other, "Pumpe") == [] and self.found(other, "Pumpen") == [1]

    def test_the_stemmed_languages_are_there(self, postgres: Server) -> None:
        with connect(postgres) as connection:
            known = {name for (name,) in connection.execute("select cfgname from pg_ts_config")}
        assert set(languages._STEMMED) <= known

    def test_the_most_different_words(self, opener: Opener) -> None:
        """A chunk as long as chunks can be, full of different words, is found by each and by all of them."""
        store = opener(HashModel(), "ai4rag_many", keyword="bm25")
        most = " ".join(f"{n:x}" for n in range(13_000))
        assert len(most.encode()) <= 65_535
        store.add_documents([chunk(most, 1), chunk("abc", 2)])
        assert [hit.sequence_number for hit in store.search("abc", search_mode="keyword")] == [2, 1]
        assert len(store.search(most, search_mode="keyword")) == 2


class TestOpening:
    """What a server can say when a store is opened."""

    def refused(self, config: PGVectorConfig, match: str) -> str:
        threads = threading.active_count()
        with pytest.raises(VectorStoreInitializationError, match=match) as caught:
            get_vector_store(HashModel(), config)
        assert threading.active_count() == threads
        return str(caught.value)

    def test_wrong_password(self, config: PGVectorConfig) -> None:
        said = self.refused(
            replace(config, password="Wr0ng!"), f"refuses user '{config.user}' with this password"
        )
        assert "Check user and password (PGVECTOR_USER, PGVECTOR_PASSWORD)" in said and "Wr0ng!" not in said
        self.refused(replace(config, password=None), "refuses user")
        self.refused(replace(config, user="nobody'; --"), "refuses user")

    def test_nobody_there(self, config: PGVectorConfig) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            said = self.refused(replace(config, host="127.0.0.1", port=port), "nobody answers there")
        assert "Check that the server runs and that host and port are right" in said
        assert str(config.password) not in said
        self.refused(replace(config, host="no-such-host.invalid"), "host name is not known. Check host")

    def test_somebody_else_there(self, config: PGVectorConfig) -> None:
        """A server that takes the connection and says nothing is given up after the time limit."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            quick = replace(config, host="127.0.0.1", port=port, timeout_seconds=2)
            self.refused(quick, "nobody answers there.*timeout")

    def test_missing_database(self, config: PGVectorConfig) -> None:
        said = self.refused(replace(config, database="no such"), "there is no such database. Create it")
        assert "'no such' on" in said

    def test_foreign_table(self, config: PGVectorConfig, postgres: Server) -> None:
        get_vector_store(HashModel(), config).close()
        with connect(postgres) as connection:
            connection.execute(f'create table "{config.schema}".ai4rag_foreign (id int)')
        with pytest.raises(VectorStoreInitializationError, match="was not made by this toolkit"):
            get_vector_store(HashModel(), config, "ai4rag_foreign")
        assert PGVectorStore.list_collections(config) == {}

    @pytest.fixture()
    def guest(self, config: PGVectorConfig, postgres: Server) -> Iterator[PGVectorConfig]:
        """A role with no rights, and a database without the extension."""
        name, password = f"guest_{secrets.token_hex(4)}", secrets.token_hex(8)
        try:
            with connect(postgres) as connection:
                connection.execute(f"create role {name} login password '{password}'")
                connection.execute(f"create database {name}")
        except psycopg.errors.InsufficientPrivilege:
            pytest.skip("the user of the server may not make roles and databases")
        yield replace(config, user=name, password=password, database=name)
        with connect(postgres) as connection:
            connection.execute(f"drop database {name} with (force)")
            connection.execute(f"drop owned by {name} cascade")
            connection.execute(f"drop role {name}")

    def test_missing_extension(self, guest: PGVectorConfig, postgres: Server) -> None:
        said = self.refused(guest, "has no extension 'vector', and user 'guest_.*' has no right to make it")
        assert "Ask its administrator to run there: CREATE EXTENSION IF NOT EXISTS vector" in said
        with connect(postgres, dbname=guest.database) as connection:
            connection.execute("create schema tools; create extension vector schema tools")
        said = self.refused(guest, f"has no schema '{guest.schema}', and user")
        assert f'CREATE SCHEMA IF NOT EXISTS "{guest.schema}"' in said

    def test_an_extension_in_a_schema_of_its_own(self, guest: PGVectorConfig, postgres: Server) -> None:
        with connect(postgres, dbname=guest.database) as connection:
            connection.execute("create schema tools; create extension vector schema tools")
            connection.execute(f"grant usage on schema tools to {guest.user}")
            connection.execute(f'create schema "{guest.schema}" authorization {guest.user}')
        with get_vector_store(HashModel(), replace(guest, exact_rows=5)) as store:
            store.add_documents(random_chunks(20))
            assert store._indexed and len(store.search("word1", 5, "hybrid")) == 5

    def test_a_reader_without_rights(
        self, guest: PGVectorConfig, config: PGVectorConfig, postgres: Server
    ) -> None:
        with get_vector_store(HashModel(), config, "ai4rag_read") as store:
            store.add_documents(random_chunks(20))
        with connect(postgres) as connection:
            connection.execute(f'grant usage on schema "{config.schema}" to {guest.user}')
            connection.execute(f'grant select on all tables in schema "{config.schema}" to {guest.user}')
        reader = replace(guest, database=config.database, exact_rows=5)
        with get_vector_store(HashModel(), reader, "ai4rag_read") as store:
            assert len(store.search("word1", 5, "hybrid")) == 5 and not store._indexed
            with pytest.raises(IndexingError, match=r"has no right to .*GRANT USAGE, CREATE ON SCHEMA"):
                store.add_documents(random_chunks(3))
            with pytest.raises(IndexingError, match="has no right to"):
                store.drop()
            assert store.count() == 20
        with get_vector_store(HashModel(), reader, "ai4rag_new") as store:
            with pytest.raises(IndexingError, match="has no right to"):
                store.add_documents(random_chunks(3))

    def test_a_database_in_another_encoding(self, guest: PGVectorConfig, postgres: Server) -> None:
        name = f"{guest.user}_latin"
        with connect(postgres) as connection:
            connection.execute(
                f"create database {name} encoding 'LATIN1' locale 'C' template template0 owner {guest.user}"
            )
            with connect(postgres, dbname=name) as inside:
                inside.execute("create extension vector")
                inside.execute(f'create schema "{guest.schema}"')
            try:
                self.refused(replace(guest, database=name), "its encoding is LATIN1")
            finally:
                connection.execute(f"drop database {name} with (force)")

    def test_from_the_environment(self, config: PGVectorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in [
            ("HOST", config.host),
            ("PORT", str(config.port)),
            ("DB", config.database),
            ("USER", config.user),
            ("PASSWORD", str(config.password)),
        ]:
            monkeypatch.setenv(f"PGVECTOR_{name}", value)
        again = replace(PGVectorConfig.from_env(), schema=config.schema)
        with get_vector_store(HashModel(), again) as store:
            assert store.add_documents(random_chunks(2)) == 2


class TlsFront:
    """Speak TLS before a server that does not: answer the request for it, then pass bytes on."""

    def __init__(self, server: Server, certificate: Path, key: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)
        self.target = (server.place.host, server.place.port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            assert client.recv(8) == b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
            client.sendall(b"S")
            secure = self.context.wrap_socket(client, server_side=True)
            back = socket.create_connection(self.target)
            threading.Thread(target=self.passing, args=(back, secure), daemon=True).start()
            self.passing(secure, back)

    @staticmethod
    def passing(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.listener.close()


def certificate(folder: Path, name: str, host: str) -> tuple[Path, Path]:
    """Make a certificate that signs itself."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={host}",
    ]
    command += ["-addext", f"subjectAltName=DNS:{host}", "-keyout", str(key), "-out", str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl makes no certificate: {error}")
    return made, key


class TestTls:
    """A server proves who it is, when a certificate of its authority is given."""

    def test_own_authority(self, config: PGVectorConfig, postgres: Server, tmp_path: Path) -> None:
        trusted, key = certificate(tmp_path, "trusted", "localhost")
        other, _ = certificate(tmp_path, "other", "localhost")
        front = TlsFront(postgres, trusted, key)
        secure = replace(config, host="localhost", port=front.port, ca_cert=str(trusted))
        try:
            with get_vector_store(HashModel(), secure) as store:
                store.add_documents(random_chunks(5))
                with store._pool.lend() as connection:
                    assert connection.pgconn.ssl_in_use
            for wrong in (replace(secure, ca_cert=str(other)), replace(secure, host="127.0.0.1")):
                with pytest.raises(
                    VectorStoreInitializationError, match="certificate cannot be verified"
                ) as caught:
                    get_vector_store(HashModel(), wrong)
                assert "Give the certificate of its authority (ca_cert, PGVECTOR_CA_CERT)" in str(
                    caught.value
                )
        finally:
            front.close()

    def test_no_silent_fall_back(self, config: PGVectorConfig, postgres: Server, tmp_path: Path) -> None:
        if not postgres.can_stop:
            pytest.skip("the server is somebody's own and may speak TLS")
        trusted, _ = certificate(tmp_path, "trusted", "localhost")
        with pytest.raises(VectorStoreInitializationError, match="the server speaks no TLS"):
            get_vector_store(HashModel(), replace(config, ca_cert=str(trusted)))
        (tmp_path / "broken.pem").write_text("no certificate")
        with pytest.raises(VectorStoreInitializationError):
            get_vector_store(HashModel(), replace(config, ca_cert=str(tmp_path / "broken.pem")))


class TestNames:
    """Nothing that users write becomes a part of a statement, and no name is cut."""

    def test_long_names_do_not_meet(self, opener: Opener) -> None:
        names = ["ai4rag_" + "x" * 55 + end for end in "ab"]
        assert all(len(name) == 63 for name in names)
        first, second = (opener(HashModel(), name, exact_rows=0) for name in names)
        first.add_documents(random_chunks(5))
        second.add_documents(random_chunks(3, seed=1))
        first._write_notes({"which": "first"})
        assert (first.count(), second.count()) == (5, 3) and "which" not in second._read_notes()
        assert first._indexed and second._indexed
        second.drop()
        assert len(first.search("word1", 5, "hybrid")) == 5 and first._read_notes(["which"]) == {
            "which": "first"
        }
        kinds = ("words", "pending", "notes", "hnsw", "document", "words_index")
        assert all(len(TableNames("s", names[0]).beside(kind)) <= 63 for kind in kinds)

    def test_names_are_quoted(self, opener: Opener, config: PGVectorConfig, postgres: Server) -> None:
        store = opener(HashModel(), "ai4rag_select", schema=config.schema + "_Mixed")
        store.add_documents(random_chunks(3))
        assert PGVectorStore.list_collections(store.config) == {"ai4rag_select": 3}
        store.drop()
        with connect(postgres) as connection:
            connection.execute(f'drop schema "{config.schema}_Mixed" cascade')

    @pytest.mark.parametrize(
        "evil",
        [
            "'; drop schema public cascade; --",
            '"; select 1; --',
            "%s %(keys)s",
            "$1",
            "{table}",
            "\\'",
            "a\u2028b",
            "😀",
        ],
    )
    def test_injection_through_ids_and_texts(self, opener: Opener, evil: str) -> None:
        store = opener(HashModel(), "ai4rag_evil")
        rows = [chunk(evil, 1, evil, **{evil: evil}), *random_chunks(5)]
        store.add_documents(rows)
        store._write_notes({evil: evil})
        assert store.verify(rows).whole and store.documents() == {**{"a.md": 5}, evil: 1}
        assert [hit.text for hit in store.search(evil, 1, document_ids=[evil])] == [evil]
        assert store.get_chunks([(evil, 1)]) == rows[:1] and store._read_notes([evil]) == {evil: evil}
        assert store.delete_documents([evil]) == 1 and store.count() == 5

    def test_nul_is_refused_and_an_escaped_one_kept(self, opener: Opener) -> None:
        store = opener(HashModel(), "ai4rag_nul")
        with pytest.raises(InputError, match="contains a NUL"):
            store.add_documents([chunk("a\x00b")])
        with pytest.raises(InputError, match="contains a NUL"):
            store.search("a\x00b")
        rows = [chunk("fine", 1, heading="a\x00b")]
        store.add_documents(rows)
        assert store.get_chunks([("a.md", 1)]) == rows and store.verify(rows).whole


def sessions(server: Server) -> int:
    with connect(server) as connection:
        query = "select count(*) from pg_stat_activity where application_name = 'ai4rag_nb'"
        return connection.execute(query).fetchone()[0]


class TestPool:
    """Connections are shared, few, and given back."""

    def test_stores_share_a_pool(self, opener: Opener, postgres: Server) -> None:
        before = sessions(postgres)
        stores = [opener(HashModel(4), pool_size=4, metric=("cosine", "l2", "ip")[n % 3]) for n in range(30)]
        with ThreadPoolExecutor(15) as pool:
            loaded = list(pool.map(lambda store: store.add_documents(random_chunks(3)), stores))
        assert loaded == [3] * 30 and len({id(store._pool) for store in stores}) == 1
        assert sessions(postgres) - before <= 4

    def test_nothing_is_left_behind(self, config: PGVectorConfig, postgres: Server) -> None:
        threads, before = set(threading.enumerate()), sessions(postgres)
        with get_vector_store(HashModel(), config) as store, get_vector_store(HashModel(), config) as other:
            store.add_documents(random_chunks(5))
            other.add_documents(random_chunks(5))
            store.close()
            assert other.count() == 5
        for _ in range(3):
            PGVectorStore.list_collections(config)
            with pytest.raises(VectorStoreInitializationError):
                get_vector_store(HashModel(), replace(config, language="nolanguage"))
            with pytest.raises(VectorStoreInitializationError):
                get_vector_store(HashModel(3), config, other.collection_name)
        wait_until(lambda: set(threading.enumerate()) <= threads)
        wait_until(lambda: sessions(postgres) == before)

    def test_a_child_process_opens_its_own(self, opener: Opener) -> None:
        store = opener(HashModel(), "ai4rag_forked")
        store.add_documents(random_chunks(3))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.count()
            except AI4RAGError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert b"opened in another process. Open it in this one" in os.read(reader, 1_000)
        os.close(reader)
        assert store.count() == 3

    def test_slow_statements_are_cut_off(self, opener: Opener) -> None:
        store = opener(HashModel(), timeout_seconds=1)
        store.add_documents(random_chunks(3))
        sleep = store._names.fill("select pg_sleep(5) from {table}")  # in the server
        with pytest.raises(IndexingError, match=r"it took longer than 1 seconds. Raise timeout_seconds"):
            store._rows_of("search", sleep)
        assert store.count() == 3

    def test_a_collection_that_somebody_dropped(self, opener: Opener) -> None:
        store, other = opener(HashModel(), "ai4rag_gone"), opener(HashModel(), "ai4rag_gone")
        store.add_documents(random_chunks(3))
        other.drop()
        with pytest.raises(IndexingError, match=r"does not exist\. Load it with add_documents"):
            store.search("word1")
        assert store.count() == 0
        store.add_documents(random_chunks(2))
        assert other.count() == 2 and len(other.search("word1")) == 2


class TestSecrets:
    """A password is shown nowhere."""

    def test_password(
        self,
        opener: Opener,
        config: PGVectorConfig,
        postgres: Server,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        caplog.set_level(logging.DEBUG)
        secret = str(config.password)
        shown = [repr(config), str(config), str(config.binding())]
        store = opener(HashModel(), "ai4rag_secret")
        store.add_documents(random_chunks(3))
        shown += [
            repr(store),
            str(store),
            repr(store._pool),
            repr(store._pool._pool),
            str(store.properties()),
        ]
        wrong = [
            replace(config, port=1),
            replace(config, database="no"),
            replace(config, user="no"),
            replace(config, host="x.invalid"),
        ]
        for other in wrong:
            with pytest.raises(AI4RAGError) as caught:
                get_vector_store(HashModel(), other)
            shown += traceback.format_exception(caught.value)
        store._names = replace(store._names, schema="nowhere")
        with pytest.raises(AI4RAGError) as caught:
            store.count()
            store._fetch(["x"])
        shown += traceback.format_exception(caught.value)
        shown += [record.getMessage() for record in caplog.records]
        shown += [f"{record.__dict__}" for record in caplog.records]
        shown += list(capfd.readouterr())
        assert secret and not any(secret in text for text in shown)
        assert "password" in asdict(config)


def load_part(config: PGVectorConfig, part: int) -> int:
    with get_vector_store(HashModel(4), config, "ai4rag_processes") as store:
        own = store.add_documents(random_chunks(300, seed=part, document=f"{part}.md"))
        return own + store.add_documents(random_chunks(50, seed=99, document="shared.md"))


def load_kind(config: PGVectorConfig, kind: str) -> int:
    with MultiIndexStore(HashModel(4), config, "ai4rag_whole") as store:
        return store.add_documents([chunk(f"a {kind}", 1, f"{kind}.md", content_type=kind)])


def load_words(config: PGVectorConfig, writer: str) -> int:
    """Load documents in many small changes; every text has five words, so that the mean never moves."""
    with get_vector_store(HashModel(4), config, "ai4rag_words") as store:
        rows = own_words(writer)
        return sum(store.add_documents(rows[start : start + 4]) for start in range(0, len(rows), 4))


def own_words(writer: str) -> list[Any]:
    texts = [f"common {'usual' if n % 7 else 'rare'} {writer}word{n} part{n % 2} pad" for n in range(40)]
    return [chunk(text, number, f"{writer}.md") for number, text in enumerate(texts, 1)]


def change_documents(config: PGVectorConfig, deleting: bool) -> int:
    """Replace or delete the same documents again and again."""
    with get_vector_store(HashModel(4), config, "ai4rag_words") as store:
        for turn in range(15):
            names = [f"d{(turn + n) % 7}.md" for n in range(4)]
            if deleting:
                store.delete_documents(names[:3])
            else:
                texts = [f"{name} turn{turn} part{n}" for name in names for n in (1, 2, 3)]
                places = [(name, n) for name in names for n in (1, 2, 3)]
                store.replace_documents(
                    [chunk(text, n, name) for text, (name, n) in zip(texts, places, strict=True)]
                )
        return turn


def scores_of(store: PGVectorStore, query: str) -> dict[str, float]:
    return {hit.text: hit.score for hit in store.search(query, 500, "keyword")}


class TestManyProcesses:
    """Processes share a collection."""

    @pytest.mark.parametrize("queries", [["common rare", "aword7 usual", "bword14 rare", "part1 cword3"]])
    def test_writers_of_our_weights_take_turns(
        self, config: PGVectorConfig, opener: Opener, queries: list[str]
    ) -> None:
        config = replace(config, keyword="bm25")
        with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
            loads = [pool.submit(load_words, config, writer) for writer in "abc"]
            assert [load.result(timeout=180) for load in loads] == [40] * 3
        store = opener(HashModel(4), "ai4rag_words", keyword="bm25")
        rows = [row for writer in "abc" for row in own_words(writer)]
        fresh = opener(HashModel(4), "ai4rag_fresh", keyword="bm25")
        fresh.add_documents(rows)
        assert store.verify(rows).whole
        for query in queries:
            texts = [row.text for row in rows]
            expected = {texts[place]: score for place, score in bm25(texts, query, 1.2).items()}
            assert scores_of(store, query) == pytest.approx(expected, rel=1e-4)
            assert scores_of(store, query) == scores_of(fresh, query)

    @pytest.mark.parametrize("keyword", ["native", "bm25"])
    def test_replaces_and_deletes_at_once(self, config: PGVectorConfig, opener: Opener, keyword: str) -> None:
        config = replace(config, keyword=keyword)
        store = opener(HashModel(4), "ai4rag_words", keyword=keyword)
        store.add_documents([chunk(f"d{n}.md turn part1", 1, f"d{n}.md") for n in range(7)])
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            changes = [pool.submit(change_documents, config, deleting) for deleting in (False, True)]
            assert [change.result(timeout=180) for change in changes] == [14] * 2
            assert (
                pool.submit(change_documents, config, False).result(timeout=180) == 14
            )  # what was deleted last
        kept = [row.chunk() for row in store._fetch([key for key, _, _ in store._inventory()]).values()]
        fresh = opener(HashModel(4), "ai4rag_fresh", keyword=keyword)
        fresh.add_documents(kept)
        assert store.documents() == fresh.documents() and set(store.documents().values()) == {3}
        for query in ["d3 md", "turn14 part1", "turn13 d6"]:
            assert scores_of(store, query) == pytest.approx(scores_of(fresh, query), rel=1e-4)

    @pytest.mark.parametrize("keyword", ["native", "bm25"])
    def test_a_replaced_document_is_the_old_one_or_the_new_one(self, opener: Opener, keyword: str) -> None:
        store, reader = (opener(HashModel(4), "ai4rag_swap", keyword=keyword) for _ in range(2))
        old = [chunk(f"old words {n}", n) for n in range(1, 7)]
        new = [chunk(f"new words {n}", n) for n in range(1, 3)]
        seen: list[set[str]] = []

        def look(*_: int) -> None:
            for mode in ("vector", "keyword"):
                seen.append({hit.text for hit in reader.search("old new words", 50, mode)})

        def fail(*_: int) -> None:
            raise OSError("the disk is gone")

        store.add_documents(old)
        with pytest.raises(OSError, match="the disk is gone"):
            store.replace_documents(new, on_progress=fail)
        assert store.verify(old).whole and store.replace_documents(new, on_progress=look) == 2
        assert seen == [{row.text for row in old}] * 2
        look()
        assert seen[2:] == [{row.text for row in new}] * 2 and store.verify(new).whole

    def test_a_change_needs_one_connection(self, opener: Opener) -> None:
        store = opener(HashModel(4), keyword="bm25", pool_size=1)
        store.add_documents(random_chunks(20))
        assert store.replace_documents(random_chunks(5)) == 5 and store.refresh_keywords() == 5
        assert len(store.search("word0 word1 word2", 50, "keyword")) > 0
        assert store.delete_documents(["a.md", "b.md"]) == 5 and store.count() == 0

    def test_a_writer_that_died_blocks_nobody(self, opener: Opener, postgres: Server) -> None:
        store, rows = opener(HashModel(4), "ai4rag_died", keyword="bm25"), random_chunks(2_100)
        store.add_documents(random_chunks(10))
        end = (
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and "
            "objid = (%(turn)s::bigint & 4294967295)::oid"
        )

        def cut(done: int, _: int) -> None:
            with connect(postgres) as connection:
                assert connection.execute(end, {"turn": store._names.turn}).fetchall()

        with pytest.raises(LostStoreError, match="there is no connection"):
            store.add_documents(rows, on_progress=cut)
        other = opener(HashModel(4), "ai4rag_died", keyword="bm25")
        assert other.add_documents(rows, resume=True) == 2_100 and other.verify(rows).whole
        expected = bm25(
            [row.text for row in rows], "word3 word40", 1.2, mean=other.keyword_index.refresh().mean
        )
        found = {hit.sequence_number - 1: hit.score for hit in other.search("word3 word40", 3_000, "keyword")}
        assert found == pytest.approx(expected, rel=1e-4)

    def test_processes_load_one_collection(self, config: PGVectorConfig, opener: Opener) -> None:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(3, mp_context=context) as pool:
            loads = [pool.submit(load_part, config, part) for part in range(3)]
            assert [load.result(timeout=180) for load in loads] == [350] * 3
        store = opener(HashModel(4), "ai4rag_processes")
        expected = [row for part in range(3) for row in random_chunks(300, seed=part, document=f"{part}.md")]
        assert store.verify([*expected, *random_chunks(50, seed=99, document="shared.md")]).whole
        assert len(store.search("word0 word1", 1_000, "keyword")) > 900

    def test_two_loads_of_the_same_rows(self, opener: Opener) -> None:
        rows = random_chunks(1_500)
        stores = [opener(HashModel(4), "ai4rag_same") for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            orders = [rows, rows[::-1], rows[700:] + rows[:700], rows]
            loads = list(
                pool.map(lambda pair: pair[0].add_documents(pair[1]), zip(stores, orders, strict=True))
            )
        assert loads == [1_500] * 4 and stores[0].verify(rows).whole

    def test_loads_and_deletes_at_once(self, opener: Opener) -> None:
        """Whoever stands in another's way is let through, whichever way round the rows are taken."""
        rows = random_chunks(900)
        stores = [opener(HashModel(4), "ai4rag_both_ways") for _ in range(4)]
        stores[0].add_documents(rows[:500])
        for _ in range(5):
            with ThreadPoolExecutor(4) as pool:
                loads = [
                    pool.submit(store.add_documents, order)
                    for store, order in zip(stores[:3], (rows, rows[::-1], rows[300:]), strict=True)
                ]
                deleted = pool.submit(stores[3].delete_documents, ["other.md", rows[0].document_id])
            assert [load.result() for load in loads] == [900, 900, 600] and deleted.result() >= 0
        stores[0].add_documents(rows)
        assert stores[0].verify(rows).whole

    def test_rows_that_are_there_are_left_alone(self, opener: Opener) -> None:
        """A row that comes as it is keeps its place in the table and in the index."""
        store, rows = opener(HashModel(4)), random_chunks(50)
        places = store._names.fill("select id, ctid::text from {table} order by id")
        store.add_documents(rows)
        before = store._rows_of("read", places)
        changed = [*rows[:-1], chunk("another text", 50)]
        store.add_documents(changed)
        after = store._rows_of("read", places)
        assert before[:-1] == after[:-1] and before[-1] != after[-1]
        assert store.verify(changed).whole
        assert [hit.sequence_number for hit in store.search("another", search_mode="keyword")] == [50]

    def test_what_others_loaded_is_searched_by_its_index(self, opener: Opener) -> None:
        reader, writer = (opener(HashModel(4), "ai4rag_others", exact_rows=10) for _ in range(2))
        with pytest.raises(IndexingError, match="does not exist"):
            reader.search("word1")
        writer.add_documents(random_chunks(30))
        assert len(reader.search("word1", 5)) == 5 and reader._indexed and reader._rows == 30

    def test_a_load_waits_for_an_index(self, opener: Opener) -> None:
        """The time limit of a question is none of waiting for somebody else's build."""
        store = opener(HashModel(4), "ai4rag_waiting", timeout_seconds=1)
        idle = opener(HashModel(4), timeout_seconds=1)
        store.add_documents(random_chunks(3))
        idle.add_documents(random_chunks(3))
        with ThreadPoolExecutor(1) as pool:
            with store._writing("build", alone=True):
                loading = pool.submit(store.add_documents, random_chunks(5, document="b.md"))
                with pytest.raises(
                    IndexingError, match="longer than 1 seconds"
                ):  # so long the load has waited too
                    idle._rows_of("search", idle._names.fill("select pg_sleep(5) from {table}"))
                assert not loading.done()
            assert loading.result() == 5

    def test_a_load_that_is_stopped_leaves_what_another_process_completed(
        self, config: PGVectorConfig, tmp_path: Path
    ) -> None:
        """Two searches build one index; the first is stopped behind the end of the second."""
        model, rows = HashModel(), random_chunks(4)
        caches = [Cache.open(tmp_path / "cache.sqlite") for _ in range(2)]
        first, second = map(CollectionRegistry, caches)
        opened: list[Any] = []

        def overtaken(store: Any) -> int:
            with ThreadPoolExecutor(1) as pool:  # the lock of an index is one of the thread that has it
                name = first.records()[0].collection_name
                known = replace(first.records()[0], state="complete", chunks=len(rows))
                with get_vector_store(model, config, name) as other:
                    pool.submit(other.add_documents, rows).result()
                second.record(known)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            open_collection(first, model, config, "f" * 64, overtaken)
        opened.append(open_collection(second, model, config, "f" * 64, overtaken))
        assert opened[0].reused and opened[0].store.count() == len(rows)
        opened[0].store.close()
        for cache in caches:
            cache.close()

    def test_a_load_that_is_stopped_is_taken_up_again(self, config: PGVectorConfig, tmp_path: Path) -> None:
        cache = Cache.open(tmp_path / "cache.sqlite")
        registry, model, rows = CollectionRegistry(cache), HashModel(), random_chunks(6)

        def stopped(store: Any) -> int:
            store.add_documents(rows[:4])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            open_collection(registry, model, config, "f" * 64, stopped)
        assert [record.state for record in registry.records()] == ["loading"]
        assert list(find_orphans(registry, config).values()) == [4]
        begun = registry.records()[0].collection_name
        load = lambda store: store.add_documents(rows, resume=True)  # noqa: E731
        opened = open_collection(registry, model, config, "f" * 64, load)
        assert opened.record.collection_name == begun and opened.store.verify(rows).whole
        opened.store.close()
        cache.close()

    @pytest.mark.parametrize("way", ["reads only", "no right"])
    def test_a_user_who_may_not_write_is_told_before_anything_is_paid(
        self, config: PGVectorConfig, postgres: Server, tmp_path: Path, way: str
    ) -> None:
        name, registry = f"reader_{secrets.token_hex(4)}", CollectionRegistry(Cache.open(":memory:"))
        with connect(postgres) as connection:
            connection.execute(f"create schema if not exists {config.schema}")
            connection.execute(f"create role {name} login password 'pw'")
            connection.execute(f"grant usage on schema {config.schema} to {name}")
            if way == "reads only":
                connection.execute(f"grant create on schema {config.schema} to {name}")
                connection.execute(f"alter role {name} set default_transaction_read_only = on")
        said = "may only read" if way == "reads only" else "may not make tables"
        with pytest.raises(VectorStoreInitializationError, match=said) as caught:
            open_place(registry, HashModel(), replace(config, user=name, password="pw"))
        assert "administrator" in caught.value.remedy
        registry.cache.close()
        with connect(postgres) as connection:
            connection.execute(f"drop owned by {name}")
            connection.execute(f"drop role {name}")

    def test_cleaning_leaves_what_others_made(
        self, config: PGVectorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        config = replace(config, schema="public", language="english")  # as the environment has it
        names = {"host": "HOST", "port": "PORT", "database": "DB", "user": "USER", "password": "PASSWORD"}
        for name, variable in names.items():
            monkeypatch.setenv(f"PGVECTOR_{variable}", str(getattr(config, name)))
        workspace, model = Workspace.open(tmp_path / "workspace"), HashModel()
        registry = CollectionRegistry(workspace.cache)
        rows, others = random_chunks(4), f"ai4rag_others_{secrets.token_hex(4)}"
        own = open_collection(registry, model, config, "f" * 64, lambda store: store.add_documents(rows))
        own.store.close()
        with get_vector_store(model, config, others) as store:
            store.add_documents(random_chunks(2))
        workspace.close()
        options = ["clean", "--workspace", str(tmp_path / "workspace")]
        assert main(options) == 0
        assert "1 collection of this workspace is in another place (pgvector)" in capsys.readouterr().out
        assert main([*options, "--vector-store", "pgvector", "--yes"]) == 0
        said = capsys.readouterr()
        assert "1 collection with 4 chunks dropped" in said.out and str(config.password) not in str(said)
        left = PGVectorStore.list_collections(config)
        assert left[others] == 2 and own.record.collection_name not in left
        assert PGVectorStore.drop_collections(config, [others]) == [others]

    def test_what_a_registry_does(self, config: PGVectorConfig, tmp_path: Path) -> None:
        cache = Cache.open(tmp_path / "cache.sqlite")
        registry, model, loads = CollectionRegistry(cache), HashModel(), []

        def load(store: Any) -> int:
            loads.append(store.collection_name)
            return store.add_documents(random_chunks(4))

        for expected in (False, True):
            opened = open_collection(registry, model, config, "f" * 64, load)
            assert opened.reused is expected
            opened.store.close()
        with get_vector_store(model, config, "ai4rag_orphan") as orphan:
            orphan.add_documents(random_chunks(2))
        assert len(loads) == 1 and find_orphans(registry, config) == {}, "it is somebody else's"
        assert str(config.password) not in str(registry.records())
        cache.close()


@pytest.fixture()
def stoppable(postgres: Server) -> PostgresServer:
    if not isinstance(postgres, PostgresServer):
        pytest.skip("the server is somebody's own and is not stopped")
    return postgres


class TestRestarts:
    """A server that goes away."""

    def test_broken_connections_are_replaced(self, opener: Opener, postgres: Server) -> None:
        store = opener(HashModel(), pool_size=3)
        store.add_documents(random_chunks(20))
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(store.search, ["word1"] * 9))
        expected = store.search("word1", 5, "hybrid")
        with connect(postgres) as connection:
            end = (
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ai4rag_nb'"
            )
            assert len(connection.execute(end).fetchall()) >= 1
        assert store.search("word1", 5, "hybrid") == expected
        assert store.add_documents(random_chunks(3, document="b.md")) == 3 and store.count() == 23

    def test_restart_in_mid_run(self, opener: Opener, stoppable: PostgresServer) -> None:
        store = opener(HashModel(), pool_size=4)
        store.add_documents(random_chunks(100))
        questions = [f"word{n} word{n + 1}" for n in range(40)]
        expected = [store.search(question, 5, "hybrid") for question in questions]
        answered = threading.Semaphore(0)

        def ask(question: str) -> Any:
            found = store.search(question, 5, "hybrid")
            answered.release()
            return found

        with ThreadPoolExecutor(4) as pool:
            running = pool.map(ask, questions * 10)
            for _ in range(20):
                answered.acquire()
            stoppable.stop()
            stoppable.start()
            for _ in range(20):
                answered.acquire()
            stoppable.stop(signal.SIGQUIT)
            stoppable.start()
            assert list(running) == expected * 10

    def test_killed_in_mid_load(self, opener: Opener, stoppable: PostgresServer) -> None:
        store, rows = opener(HashModel(4), "ai4rag_killed", timeout_seconds=3), random_chunks(3_500)

        def kill(done: int, _: int) -> None:
            if done == 2_000:
                stoppable.stop(signal.SIGQUIT)

        with pytest.raises(IndexingError, match=r"there is no connection .*what was loaded is kept"):
            store.add_documents(rows, on_progress=kill)
        with pytest.raises(LostStoreError, match="there is no connection") as caught:
            store.search("word1")
        assert caught.value.failure is Failure.STORE
        with pytest.raises(LostStoreError, match=r"none came in 2 seconds"):
            store.search("word1")
        stoppable.start()
        assert store.count() == 2_000
        written: list[int] = []
        real = type(store)._copy
        store._copy = lambda keys, *rest: (written.append(len(keys)), real(store, keys, *rest))[0]  # type: ignore[method-assign]
        assert store.add_documents(rows, resume=True) == 3_500
        assert written == [1_000, 500] and store.verify(rows).whole
        assert len(store.search("word0", 4_000, "keyword")) == sum(
            "word0" in row.text.split() for row in rows
        )

    def test_a_batch_is_whole_or_not_there(self, opener: Opener, postgres: Server) -> None:
        store = opener(HashModel(4), "ai4rag_batch", keyword="bm25")
        rows = random_chunks(1_800)

        def cut(done: int, _: int) -> None:
            with connect(postgres) as connection:
                connection.execute(
                    f'alter table "{store.config.schema}".ai4rag_batch add check (id <> id) not valid'
                )

        with pytest.raises(IndexingError, match="violates check constraint"):
            store.add_documents(rows, on_progress=cut)
        words = store._rows_of("count", store._names.fill("select count(*) from {words}"))[0][0]
        assert store.count() == 1_000 == words


class TestKindsOfContent:
    """A whole of several collections that several processes fill."""

    def test_parts_of_another_process_are_seen(
        self, config: PGVectorConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def kinds(store: MultiIndexStore) -> set[str]:
            return {hit.metadata["content_type"] for hit in store.search("a question", 9)}

        context = multiprocessing.get_context("spawn")
        with (
            MultiIndexStore(HashModel(4), config, "ai4rag_whole") as store,
            ProcessPoolExecutor(1, context) as pool,
        ):
            assert pool.submit(load_kind, config, "text").result() == 1
            assert kinds(store) == {"text"}, "the first part is seen at once"
            pool.submit(load_kind, config, "table").result()
            before = store.revision
            assert store.count() == 2 and kinds(store) == {"text", "table"} and store.revision > before
            pool.submit(load_kind, config, "code").result()
            assert kinds(store) == {"text", "table"}, "the last look was just now"
            monkeypatch.setattr(multi_parts, "_LOOK_AGAIN", 0.0)
            assert kinds(store) == {"text", "table", "code"}
            monkeypatch.setattr(multi_parts, "_LOOK_AGAIN", 600.0)
            pool.submit(load_kind, config, "image").result()
            assert store.delete_documents(["image.md"]) == 1, "what is deleted is deleted everywhere"
            assert sorted(store.parts) == ["code", "image", "table", "text"]


class TestExperiment:
    """A search whose indexes are in PostgreSQL."""

    def test_it_takes_the_language_of_the_documents(
        self, config: PGVectorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        auto = replace(config, language="auto")
        with service(monkeypatch):
            found = make_experiment(tmp_path, vector_store_config=auto, max_evals=2)
            found.search()
            assert found.prepared.config.language == "english"
            assert any("stems words as in english" in note for note in found.results.notes)
            given = make_experiment(tmp_path, run="given", vector_store_config=config)
            assert given.prepared.config.language == "simple"
            assert not any("stem" in note for note in given.prepared.inputs.notes)
            with pytest.raises(AI4RAGError, match="language"):
                make_experiment(tmp_path, vector_store_config=replace(config, language="german"))
            given.close(), found.close()

    def test_a_search_and_its_second_run(
        self, config: PGVectorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with service(monkeypatch) as stub:
            first = make_experiment(tmp_path, vector_store_config=config)
            first.search()
            stored, once = PGVectorStore.list_collections(config), paid(stub)
            assert len(table_of(first.results)) == 4
            assert stored and all(count > 0 for count in stored.values())
            again = make_experiment(tmp_path, vector_store_config=config, run="second")
            again.search()
            assert table_of(again.results) == table_of(first.results)
            assert PGVectorStore.list_collections(config) == stored
            assert paid(stub) == once, "nothing is paid twice"
            assert pool_threads() == [], "no pool is open behind a search"
            first.close()
            again.close()
        assert not files_holding(tmp_path, str(config.password))

    @pytest.mark.parametrize(
        ("pattern", "work", "by"),
        [
            ("Pattern2", "Loading the collection", signal.SIGQUIT),
            ("Pattern2", "asking", signal.SIGINT),
            ("Pattern1", "Loading the collection", signal.SIGQUIT),
        ],
    )
    def test_a_server_that_stays_away_ends_the_search_and_costs_nothing(
        self,
        config: PGVectorConfig,
        stoppable: PostgresServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        pattern: str,
        work: str,
        by: int,
    ) -> None:
        given = {"vector_store_config": replace(config, timeout_seconds=3)}
        with service(monkeypatch) as stub:
            gone = Once(pattern, work, lambda: stoppable.stop(by))
            first = make_experiment(tmp_path, event_handler=gone, **given)
            with pytest.raises(
                AI4RAGError, match=r"there is no connection.*Everything finished is kept"
            ) as caught:
                first.search()
            assert caught.value.failure is Failure.STORE
            assert [event.name for event in gone.of(TrialStarted)][-1] == pattern
            assert not gone.of(TrialFailed)
            kept = [trial.state for trial in first.results.evaluations]
            assert kept == ["completed"] * (int(pattern[-1]) - 1)
            first.close()
            stoppable.start()
            again = make_experiment(tmp_path, **given)
            again.search()
            paid_in_two = paid(stub)
            whole = make_experiment(tmp_path, run="whole", workspace="other", **given)
            whole.search()
            assert table_of(again.results) == table_of(whole.results)
            paid_in_one = paid(stub) - paid_in_two
            assert paid_in_two <= paid_in_one + 2, "no more than that both models are greeted again"
            again.close()
            whole.close()

    def test_a_server_that_comes_back_costs_no_configuration(
        self,
        config: PGVectorConfig,
        stoppable: PostgresServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is killed in the middle of a copy, which is not repeated by itself, and between two searches."""
        copy_rows, crashes = pgvector_loading.copy_rows, iter([False, True])

        def restart() -> None:
            stoppable.stop(signal.SIGQUIT)
            stoppable.start()

        crash = FromTheTest(restart)

        def copy(*arguments: Any, **settings: Any) -> None:
            if next(crashes, False):
                crash()
            copy_rows(*arguments, **settings)

        monkeypatch.setattr(pgvector_loading, "copy_rows", copy)
        with service(monkeypatch):
            seen = Once("Pattern3", "asking", crash)
            broken = make_experiment(tmp_path, event_handler=seen, vector_store_config=config)
            crash.search(broken)
            assert [event.name for event in seen.of(TrialStarted)] == [f"Pattern{n}" for n in (1, 2, 3, 4)]
            assert not seen.of(TrialFailed) and next(crashes, None) is None and seen.done
            assert [message for _, message, _ in seen.statuses if "once more" in message] == [
                "The vector store works again: Pattern2 is tried once more."
            ]
            whole = make_experiment(tmp_path, run="whole", workspace="other", vector_store_config=config)
            whole.search()
            assert table_of(broken.results) == table_of(whole.results)
            broken.close()
            whole.close()

"""A Milvus server keeps the contract of all stores; it also keeps to its limits, its time limits and its secrets.

BM25 and hybrid search run over the server of Milvus Lite; dense search, limits and consistency over a real 2.3.5 as well.
"""

import base64
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from small_world import FromTheTest, Once, make_experiment, service, table_of, wait_until
from servers import (
    ForeignMilvus,
    MilvusLiteServer,
    MilvusProcess,
    MilvusServer235,
    make_certificates,
    milvus_lite_server,
    real_milvus,
)
from store_contract import HashModel, Opener, StoreContract, bm25, chunk, random_chunks, spy

from ai4rag_nb.foundations.errors import (
    AI4RAGError,
    Failure,
    IndexingError,
    InputError,
    LostStoreError,
    NotAvailableError,
    StorageError,
    VectorStoreInitializationError,
)
from ai4rag_nb.foundations.events import TrialFailed, TrialStarted
from ai4rag_nb.indexing import milvus_session
from ai4rag_nb.indexing.milvus_client import SteadyClient
from ai4rag_nb.indexing.milvus_faults import explain_fault, read_fault
from ai4rag_nb.indexing.milvus_server import MilvusServerStore
from ai4rag_nb.indexing.milvus_session import list_server_collections
from ai4rag_nb.indexing.milvus_versions import keyword_mode, server_abilities
from ai4rag_nb.indexing.store_checks import check_rows
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusConfig, get_vector_store

__all__ = ["milvus_lite_server", "real_milvus"]  # fixtures

Server = MilvusLiteServer | MilvusServer235 | ForeignMilvus


def config_of(server: Any, **settings: Any) -> MilvusConfig:
    """Give a configuration for a server, with time limits that a busy machine can keep."""
    return MilvusConfig(server.uri, token=server.token, **{"timeout_seconds": 20, **settings})


def server_opener(server: Any, **always: Any) -> Iterator[Opener]:
    """Open stores on a server; whatever a test made is dropped and closed."""
    opened: list[BaseVectorStore] = []

    def opener(
        model: Any, name: str | None = None, metric: str = "cosine", **settings: Any
    ) -> BaseVectorStore:
        config = config_of(server, distance_metric=metric, **{**always, **settings})
        opened.append(get_vector_store(model, config, name))
        return opened[-1]

    yield opener
    names = {store.collection_name for store in opened}
    for store in opened:
        store.close()
    MilvusServerStore.drop_collections(config_of(server), sorted(names))
    assert not milvus_session._SERVERS, "every connection was given back"


class TestMilvusLiteServerContract(StoreContract):
    """The server of Milvus Lite over TCP, with its own BM25.

    It weighs words segment by segment, and each load makes one: what is found is right, scores only after one load.
    """

    native_k1 = None

    @pytest.fixture()
    def opener(self, milvus_lite_server: MilvusLiteServer) -> Iterator[Opener]:
        yield from server_opener(milvus_lite_server, keyword=self.mode)

    def test_words_of_one_load_are_weighed_by_the_definition(self, opener: Opener) -> None:
        if self.mode == "bm25":
            pytest.skip("our own weights are compared with the definition throughout")
        chunks = random_chunks(200)
        store = opener(HashModel())
        store.add_documents(chunks)
        for query in ("word3", "word50 word7", "Word40, word41; WORD42?", "word1 word1 word59"):
            expected = bm25([row.text for row in chunks], query)
            hits = store.search(query, 200, "keyword")
            found = {hit.sequence_number - 1: hit.score for hit in hits}
            assert found == pytest.approx(expected, rel=1e-4)


class TestMilvusLiteServerContractWithOurWeights(TestMilvusLiteServerContract):
    """The server of Milvus Lite over TCP, with our BM25."""

    mode = "bm25"


class TestMilvusLiteServerContractExact(TestMilvusLiteServerContract):
    """The server of Milvus Lite over TCP, with an exact dense index."""

    @pytest.fixture()
    def opener(self, milvus_lite_server: MilvusLiteServer) -> Iterator[Opener]:
        yield from server_opener(milvus_lite_server, exact_rows=5_000)


class TestRealMilvusContract(StoreContract):
    """A real Milvus 2.3.5: no search by words."""

    modes = ("vector",)

    @pytest.fixture()
    def opener(self, real_milvus: Server) -> Iterator[Opener]:
        yield from server_opener(real_milvus, exact_rows=5_000)


SERVERS = ["milvus_lite_server", "real_milvus"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Give each server in turn, running again behind a test that stopped it."""
    given = request.getfixturevalue(request.param)
    yield given
    if given.can_stop and (given.process is None or given.process.poll() is not None):
        given.start()


def stoppable(server: Any) -> MilvusProcess:
    """Give a server that the tests may stop."""
    if not server.can_stop:
        pytest.skip("this server is not ours to stop")
    return server


def crash(server: MilvusProcess) -> None:
    """Kill a server in the middle of whatever it does, and start it again on its data and port."""
    server.stop(signal.SIGKILL)
    server.start()


def places(hits: Any) -> list[tuple[str, int]]:
    return [(hit.document_id, hit.sequence_number) for hit in hits]


@pytest.fixture()
def opener(server: Any) -> Iterator[Opener]:
    yield from server_opener(server)


def is_stopped(process_id: int) -> bool:
    """Tell whether a process has taken a SIGSTOP; where /proc cannot be read it is taken for granted."""
    status = Path(f"/proc/{process_id}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "T"


class TestFailures:
    """What a server can do to us, really done."""

    def test_a_load_whose_server_was_killed_goes_on_at_its_batch(
        self, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows, process = random_chunks(3_300), stoppable(server)

        def kill(done: int, _: int) -> None:
            if done == 2_000:
                process.stop(signal.SIGKILL)

        config = config_of(server, timeout_seconds=3)
        with get_vector_store(HashModel(4), config, "ai4rag_killed") as store:
            with pytest.raises(IndexingError, match=r"does not answer \(tried for 3 s\).*written is kept"):
                store.add_documents(rows, on_progress=kill)
            with pytest.raises(LostStoreError, match="does not answer") as caught:
                store.search("word1")
            assert caught.value.failure is Failure.STORE
            process.start()
            calls = spy(store, monkeypatch, "_write")
            assert store.add_documents(rows, resume=True) == 3_300
            assert calls == [("_write", 1_000), ("_write", 300)], "the two batches before are not sent again"
            assert store.verify(rows).whole and store.count() == 3_300
            store.drop()

    def test_a_new_process_goes_on_where_a_killed_server_left_off(self, server: Any) -> None:
        rows, process = random_chunks(1_500), stoppable(server)
        with get_vector_store(HashModel(4), config_of(server, timeout_seconds=3), "ai4rag_later") as store:
            with pytest.raises(IndexingError, match="does not answer"):
                store.add_documents(rows, on_progress=lambda *_: process.stop(signal.SIGKILL))
        process.start()
        with get_vector_store(HashModel(4), config_of(server), "ai4rag_later") as store:
            store.add_documents(rows, resume=True)
            assert store.verify(rows).whole
            store.drop()

    @pytest.mark.parametrize("call", ["search", "read", "list", "count", "verify"])
    def test_reads_outlive_a_restart(self, server: Any, opener: Opener, call: str) -> None:
        rows, process = random_chunks(60), stoppable(server)
        store = opener(HashModel())
        store.add_documents(rows)
        calls: dict[str, Any] = {
            "search": lambda: [places(hits) for hits in store.search_many(["word1", "word2 word3"], 7)],
            "read": lambda: store.get_chunks([("a.md", 3), ("a.md", 60)]),
            "list": store.documents,
            "count": store.count,
            "verify": lambda: store.verify(rows),
        }
        before = calls[call]()
        crash(process)
        assert calls[call]() == before
        process.stop()
        process.start()
        assert calls[call]() == before

    def test_writes_outlive_a_restart(self, server: Any, opener: Opener) -> None:
        store, rows, process = opener(HashModel()), random_chunks(60), stoppable(server)
        store.add_documents(rows[:30])
        crash(process)
        store.add_documents(rows[30:])
        assert store.verify(rows).whole
        crash(process)
        assert store.delete_documents(["a.md"]) == 60 and store.count() == 0

    def test_a_read_waits_for_a_server_that_comes_back(self, server: Any) -> None:
        process = stoppable(server)
        with get_vector_store(HashModel(), config_of(server, timeout_seconds=60)) as store:
            store.add_documents(random_chunks(20))
            before = places(store.search("word1"))
            process.stop(signal.SIGKILL)
            with ThreadPoolExecutor(4) as pool:
                asked = [pool.submit(lambda: places(store.search("word1"))) for _ in range(4)]
                process.start()
                assert [found.result() for found in asked] == [before] * 4
            assert store._server.client.reconnections <= 1, "four readers make one connection"
            store.drop()

    def test_a_server_that_hangs_costs_its_time_limit(self, milvus_lite_server: MilvusLiteServer) -> None:
        process = milvus_lite_server.process
        assert process is not None
        with get_vector_store(HashModel(), config_of(milvus_lite_server, timeout_seconds=1)) as store:
            store.add_documents(random_chunks(20))
            before = places(store.search("word1"))
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: is_stopped(process.pid))
            try:
                for call in (
                    lambda: store.search("word1"),
                    lambda: store.add_documents(random_chunks(1)),
                    store.documents,
                    store.drop,
                ):
                    with pytest.raises(IndexingError, match=r"does not answer \(tried for 1 s\)"):
                        call()
            finally:
                process.send_signal(signal.SIGCONT)
            assert places(store.search("word1")) == before
            store.drop()

    def test_nobody_at_the_address(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            for port in (1, silent.getsockname()[1]):
                config = MilvusConfig(f"http://127.0.0.1:{port}", token="root:very-secret", timeout_seconds=1)
                with pytest.raises(VectorStoreInitializationError, match="does not answer") as caught:
                    get_vector_store(HashModel(), config)
                assert "very-secret" not in "".join(traceback.format_exception(caught.value))
                with pytest.raises(IndexingError, match="Cannot list the collections"):
                    MilvusServerStore.list_collections(config)
        with pytest.raises(VectorStoreInitializationError, match="does not answer"):
            get_vector_store(
                HashModel(), MilvusConfig("http://no.such.host.invalid:19530", timeout_seconds=1)
            )
        assert not milvus_session._SERVERS

    def test_a_page_is_no_milvus(self) -> None:
        with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as pages:
            threading.Thread(target=pages.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{pages.server_address[1]}"
            with pytest.raises(VectorStoreInitializationError, match=r"does not (answer|speak Milvus)"):
                get_vector_store(HashModel(), MilvusConfig(address, timeout_seconds=1))
            pages.shutdown()

    def test_a_database_that_is_not_there(self, server: Any) -> None:
        with pytest.raises(VectorStoreInitializationError, match="has no database 'nowhere'"):
            get_vector_store(HashModel(), config_of(server, database="nowhere"))


class Refusing(grpc.GenericRpcHandler):
    """Speak gRPC and want another token, repeating the one that was sent."""

    def service(self, details: Any) -> Any:
        sent = {key: value for key, value in details.invocation_metadata}.get("authorization", "")

        def refuse(_: Any, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{sent} is not known")

        return grpc.unary_unary_rpc_method_handler(refuse)


class TestSecrets:
    """Tokens stay where they are, and certificates are looked at."""

    def check_refused(self, config: MilvusConfig, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            with pytest.raises(
                VectorStoreInitializationError, match=r"refuses the token\. Set MILVUS_TOKEN"
            ) as got:
                get_vector_store(HashModel(), config)
        assert not milvus_session._SERVERS
        assert config.token is not None
        for secret in (config.token, config.token.partition(":")[2]):
            assert secret not in str(got.value) + repr(got.value) + repr(config) + str(config.binding())
            assert secret not in caplog.text

    def test_a_token_that_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        refusing = grpc.server(ThreadPoolExecutor(2))
        refusing.add_generic_rpc_handlers((Refusing(),))
        port = refusing.add_insecure_port("127.0.0.1:0")
        refusing.start()
        try:
            config = MilvusConfig(f"http://127.0.0.1:{port}", token="root:very-secret", timeout_seconds=5)
            self.check_refused(config, caplog)
        finally:
            refusing.stop(None).wait()

    def test_a_wrong_token_on_a_real_server(
        self, real_milvus: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        if not real_milvus.token:
            pytest.skip("this server wants no token")
        wrong = MilvusConfig(real_milvus.uri, token="root:very-secret", timeout_seconds=5)
        self.check_refused(wrong, caplog)
        with pytest.raises(VectorStoreInitializationError, match="refuses the token"):
            get_vector_store(HashModel(), MilvusConfig(real_milvus.uri, timeout_seconds=5))

    def test_a_store_does_not_show_its_token(self, milvus_lite_server: MilvusLiteServer) -> None:
        config = MilvusConfig(milvus_lite_server.uri, token="root:very-secret")
        with get_vector_store(HashModel(), config) as store:
            assert "very-secret" not in repr(store) + repr(store.properties()) + str(store.config.binding())
            assert "very-secret" not in repr(milvus_session._SERVERS)
            with pytest.raises(IndexingError) as caught:
                store.search("word1")
            assert "very-secret" not in "".join(traceback.format_exception(caught.value))

    def test_what_a_server_says_is_shown_without_the_token(self) -> None:
        config = MilvusConfig("http://host:19530", token="me:pass-word")
        sent = base64.b64encode(b"me:pass-word").decode()
        for said in (f"bad {sent} here", "bad me:pass-word here", "bad pass-word here"):
            assert "says: bad *** here" in str(explain_fault(config, "search", ValueError(said)))

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        certificate = tmp_path / "ca.pem"
        certificate.write_text("-----BEGIN CERTIFICATE-----")
        monkeypatch.setenv("MILVUS_URI", "https://vectors.example")
        monkeypatch.setenv("MILVUS_TOKEN", "key")
        monkeypatch.setenv("MILVUS_CA_CERT", str(certificate))
        config = MilvusConfig.from_env()
        assert (config.uri, config.token, config.ca_cert) == (
            "https://vectors.example",
            "key",
            str(certificate),
        )
        monkeypatch.delenv("MILVUS_URI")
        with pytest.raises(InputError, match="MILVUS_URI is not set"):
            MilvusConfig.from_env()


class TlsProxy:
    """Take TLS off connections and pass them on."""

    def __init__(self, folder: Path, target: int) -> None:
        self.target = target
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.context.set_alpn_protocols(["h2"])
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.uri = f"https://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                raw, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(raw,), daemon=True).start()

    def serve(self, raw: socket.socket) -> None:
        try:
            front = self.context.wrap_socket(raw, server_side=True)
        except OSError:
            return
        back = socket.create_connection(("127.0.0.1", self.target))
        front.settimeout(0.002)
        back.settimeout(0.002)
        with front, back:
            while True:
                for source, sink in ((front, back), (back, front)):
                    try:
                        data = source.recv(65_536)
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    if not data:
                        return
                    sink.settimeout(None)
                    sink.sendall(data)
                    sink.settimeout(0.002)


class TestTls:
    """A server behind TLS with an authority of one's own."""

    def test_only_with_the_right_authority(
        self, milvus_lite_server: MilvusLiteServer, tmp_path: Path
    ) -> None:
        make_certificates(tmp_path)
        proxy = TlsProxy(tmp_path, milvus_lite_server.port)
        try:
            right = MilvusConfig(proxy.uri, ca_cert=str(tmp_path / "ca.pem"), timeout_seconds=20)
            with get_vector_store(HashModel(), right) as store:
                store.add_documents(random_chunks(20))
                assert store.count() == 20 and len(store.search("word1", 3, "hybrid")) == 3
                store.drop()
            for wrong in (str(tmp_path / "other.pem"), None):
                with pytest.raises(
                    VectorStoreInitializationError, match=r"cannot be reached over TLS.*ca_cert"
                ):
                    get_vector_store(HashModel(), MilvusConfig(proxy.uri, ca_cert=wrong, timeout_seconds=2))
        finally:
            proxy.socket.close()

    def test_a_server_without_tls(self, milvus_lite_server: MilvusLiteServer) -> None:
        address = milvus_lite_server.uri.replace("http:", "https:")
        with pytest.raises(VectorStoreInitializationError, match="cannot be reached over TLS"):
            get_vector_store(HashModel(), MilvusConfig(address, timeout_seconds=2))


class Recorder:
    """Stand before a client and keep what goes with each call."""

    def __init__(self, client: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.client, self.calls = client, calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.client, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            self.calls.append((name, settings))
            return real(*arguments, **settings)

        return call


class TestServer:
    """Limits, consistency, indexes, and other processes."""

    def test_every_call_has_a_time_limit(self, opener: Opener) -> None:
        store = opener(HashModel(), timeout_seconds=17, settle_seconds=99)
        calls: list[tuple[str, dict[str, Any]]] = []
        steady = store._server.client
        steady._client = Recorder(steady._client, calls)
        rows = random_chunks(30)
        store.add_documents(rows)
        store.search_many(["word1", "word2"])
        store.replace_documents(rows[:20])
        store.verify(rows)
        store._write_notes({"a": "b"})
        store._read_notes()
        MilvusServerStore.list_collections(store.config)
        store.drop()
        local = {"create_schema", "prepare_index_params"}
        limits = {name: settings.get("timeout") for name, settings in calls if name not in local}
        long = {"flush", "create_index", "load_collection", "release_collection"}
        assert len(limits) >= 12 and long - set(limits) <= {"release_collection"}
        assert {name for name, limit in limits.items() if limit != 17} - {"query"} <= long
        assert all(settings["timeout"] in (17, 99) for name, settings in calls if name not in local)

    def test_reads_are_strong_until_a_load_has_settled(self, opener: Opener) -> None:
        store = opener(HashModel())
        calls: list[tuple[str, dict[str, Any]]] = []
        steady = store._server.client
        steady._client = Recorder(steady._client, calls)
        store.add_documents(random_chunks(30))
        assert len(store.search("word1", 30)) == 30, "right after the load, all of it"
        store._write(check_rows(random_chunks(5, document="b.md")), np.ones((5, 16), dtype=np.float32), None)
        assert len(store.search("word1", 50)) == 35
        store._settle()
        assert len(store.search("word1", 50)) == 35
        assert [settings["consistency_level"] for name, settings in calls if name == "search"] == [
            "Bounded",
            "Strong",
            "Bounded",
        ]

    def test_another_process_sees_everything_at_once(self, server: Any, opener: Opener) -> None:
        store = opener(HashModel(4), "ai4rag_shared")
        code = """
        import sys
        import numpy as np
        from ai4rag_nb.indexing.vector_store import MilvusConfig, get_vector_store
        class Model:
            dimension = 4
            def embed_documents(self, texts, on_progress=None):
                return np.ones((len(texts), 4), dtype=np.float32)
            embed_queries = embed_documents
        config = MilvusConfig(sys.argv[1], token=sys.argv[2] or None)
        with get_vector_store(Model(), config, "ai4rag_shared") as store:
            print(store.count(), len(store.search("any", 50)), sum(store.documents().values()))
        """
        store.add_documents(random_chunks(40))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), server.uri, server.token or ""],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.split() == ["40", "40", "40"], done.stderr

    @pytest.mark.parametrize("exact_rows", [0, 100, 5_000])
    def test_the_index_follows_the_number_of_rows(self, opener: Opener, exact_rows: int) -> None:
        model, rows = HashModel(), random_chunks(300)
        store = opener(model, exact_rows=exact_rows)
        kinds = []
        for part in (rows[:90], rows[90:]):
            store.add_documents(part)
            kinds.append(store._client.describe_index(store.collection_name, "dense")["index_type"])
        assert kinds == {0: ["HNSW", "HNSW"], 100: ["FLAT", "HNSW"], 5_000: ["FLAT", "FLAT"]}[exact_rows]
        table = model.embed_documents([row.text for row in rows])
        asked = model.embed_query("word9")
        best = np.argsort(-(table @ asked) / np.linalg.norm(table, axis=1), kind="stable")[:20]
        assert [hit.sequence_number - 1 for hit in store.search("word9", 20)] == best.tolist()

    def test_the_largest_answer(self, opener: Opener) -> None:
        store = opener(HashModel(4))
        store.add_documents([chunk(f"word {number}", number) for number in range(1, 1_201)])
        assert len(store.search("word", 16_384)) == 1_200
        with pytest.raises(InputError, match="16,384"):
            store.search("word", 16_385)
        found = store.search_many([f"question {n}" for n in range(300)], 100)
        assert [len(hits) for hits in found] == [100] * 300
        assert places(found[299]) == places(store.search("question 299", 100))

    def test_the_longest_texts_go_in_parts(self, server: Any, opener: Opener) -> None:
        """A thousand of them are more than a real server takes in one message."""
        count = 250 if isinstance(server, MilvusLiteServer) else 1_000
        store = opener(HashModel(4))
        rows = [
            chunk(f"{number:05} " + "é" * 32_764, number, pad="x" * 20_000) for number in range(1, count + 1)
        ]
        store.add_documents(rows, np.random.default_rng(0).normal(size=(count, 4)))
        assert store.count() == count and store.verify(rows).whole
        found = store.get_chunks([("a.md", 7), ("a.md", count)])
        assert [row.text[:5] for row in found] == ["00007", f"{count:05}"]
        assert len(store.search("anything", 50)) == 50

    def test_opening_leaves_nothing_behind(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def use() -> None:
            for metric in ("cosine", "ip", "l2"):
                with get_vector_store(HashModel(), config_of(server, distance_metric=metric)):
                    pass

        monkeypatch.setattr(milvus_session, "_CALIBRATIONS", {})
        before = list_server_collections(config_of(server))
        use()
        assert list_server_collections(config_of(server)) == before
        assert len(milvus_session._CALIBRATIONS) == 3 and not milvus_session._SERVERS
        held = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            use()

        def given_back() -> bool:  # channels end behind our back
            now = threading.active_count(), len(os.listdir("/proc/self/fd"))
            return now[0] <= held[0] and now[1] <= held[1] + 8

        wait_until(given_back)  # thirty connections leave less than one each

    def test_stores_share_their_connection(self, opener: Opener) -> None:
        first, second = opener(HashModel()), opener(HashModel(8))
        assert first._server is second._server
        first.close()
        second.add_documents(random_chunks(3))
        assert second.count() == 3

    def test_a_collection_of_others_is_left_alone(self, opener: Opener) -> None:
        store = opener(HashModel())
        client = store._client
        client.create_collection("ai4rag_foreign", dimension=4)
        try:
            with pytest.raises(VectorStoreInitializationError, match="was not made by this toolkit"):
                opener(HashModel(4), "ai4rag_foreign")
        finally:
            client.drop_collection("ai4rag_foreign")

    def test_a_collection_that_is_used_is_not_dropped(self, opener: Opener) -> None:
        store = opener(HashModel(), "ai4rag_used")
        store.add_documents(random_chunks(2))
        assert MilvusServerStore.drop_collections(store.config, ["ai4rag_used", "ai4rag_never"]) == [
            "ai4rag_never"
        ]
        assert store.count() == 2

    def test_words_are_left_out_where_the_server_has_none(self, real_milvus: Server) -> None:
        for keyword in ("native", "bm25"):
            with get_vector_store(HashModel(), config_of(real_milvus, keyword=keyword)) as store:
                abilities = store._server.abilities
                if keyword_mode(abilities, keyword) != "none":
                    pytest.skip(f"{abilities.product} searches by words")
                assert store.capabilities() == {"vector"}
                assert store.properties().keyword_search.startswith(f"none: {abilities.product} has no")
                store.add_documents(random_chunks(5))
                assert store.keyword_index is None
                for mode in ("keyword", "hybrid"):
                    with pytest.raises(NotAvailableError, match=r"no keyword search\. It has: vector"):
                        store.search("word1", search_mode=mode)
                store.drop()

    def test_a_collection_without_words_stays_without(
        self, milvus_lite_server: MilvusLiteServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server of 2.3 was replaced by one of 2.6 on the same data."""
        old, new = server_abilities("v2.3.5"), server_abilities("v2.6.0")
        config = config_of(milvus_lite_server)
        monkeypatch.setattr(milvus_session, "server_abilities", lambda reported: old)
        with get_vector_store(HashModel(), config, "ai4rag_old") as store:
            store.add_documents(random_chunks(5))
        monkeypatch.setattr(milvus_session, "server_abilities", lambda reported: new)
        with get_vector_store(HashModel(), config, "ai4rag_old") as store:
            assert store.capabilities() == {"vector"} and len(store.search("word1")) == 5
            assert "made without keywords; load it anew" in store.properties().keyword_search
            store.drop()

    def test_two_stores_make_a_collection_at_once(self, opener: Opener) -> None:
        """The lock of this process is taken away, as it is between two processes."""
        if server_abilities(str(opener(HashModel())._client.get_server_version())).serial:
            pytest.skip("the server of Milvus Lite is not made for several writers at once")
        stores = [opener(HashModel(4), "ai4rag_race") for _ in range(4)]
        for store in stores:
            store._lock = threading.RLock()
        parts = [random_chunks(20, seed=n, document=f"{n}.md") for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda pair: pair[0].add_documents(pair[1]), zip(stores, parts, strict=True)))
        assert stores[0].count() == 80


def test_a_full_server_is_a_matter_of_room() -> None:
    config = MilvusConfig("http://host:19530")
    for said in ("disk quota exceeded", "write failed: No space left on device", "memory quota exceeded"):
        assert isinstance(explain_fault(config, "write 'ai4rag_x'", OSError(said)), StorageError)


def test_readers_of_a_dead_server_give_up_together() -> None:
    opened: list[int] = []

    class Dead:
        def search(self, name: str, **settings: Any) -> None:
            raise ConnectionError("Cannot invoke RPC on closed channel!")

    def open_client(config: MilvusConfig) -> Any:
        opened.append(1)
        if len(opened) > 1:
            raise ConnectionError("Retry timeout")
        return Dead()

    client = SteadyClient(MilvusConfig("http://host:19530", timeout_seconds=1), open_client)
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(client.search, "ai4rag_x") for _ in range(20)]
    assert all(isinstance(found.exception(), ConnectionError) for found in asked)
    assert len(opened) <= 2 * (1 / 0.2 + 2), "one of them tried for a second, not each"


def test_an_error_around_itself_is_read_once() -> None:
    error = ValueError("a")
    error.__cause__ = error
    assert read_fault(error).said == "a"


class TestExperiment:
    """A search whose indexes are on a server that goes away."""

    @pytest.mark.parametrize("work", ["Loading the collection", "asking"])
    def test_a_server_that_stays_away_ends_the_search_and_costs_nothing(
        self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
    ) -> None:
        process = stoppable(server)
        hasty, patient = config_of(server, timeout_seconds=3), config_of(server, timeout_seconds=60)
        with service(monkeypatch):
            gone = Once("Pattern2", work, lambda: process.stop(signal.SIGKILL))
            first = make_experiment(tmp_path, event_handler=gone, vector_store_config=hasty)
            with pytest.raises(AI4RAGError, match=r"does not answer.*Everything finished is kept") as caught:
                first.search()
            assert caught.value.failure is Failure.STORE
            assert [event.name for event in gone.of(TrialStarted)] == ["Pattern1", "Pattern2"]
            assert [trial.state for trial in first.results.evaluations] == ["completed"]
            first.close()
            process.start()
            again = make_experiment(tmp_path, vector_store_config=patient)  # it recovers for some seconds
            again.search()
            whole = make_experiment(tmp_path, run="whole", workspace="other", vector_store_config=patient)
            whole.search()
            assert table_of(again.results) == table_of(whole.results)
            again.close()
            whole.close()
        names = list(MilvusServerStore.list_collections(config_of(server)))
        MilvusServerStore.drop_collections(config_of(server), names)

    def test_a_server_that_comes_back_costs_no_configuration(
        self, milvus_lite_server: MilvusLiteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is dead when rows are written, which is not repeated by itself, and comes back."""
        real, crashes, start = SteadyClient._call, list[str](), FromTheTest(milvus_lite_server.start)

        def call(client: SteadyClient, name: str, *arguments: Any, **settings: Any) -> Any:
            if name != "upsert" or crashes != ["wanted"]:
                return real(client, name, *arguments, **settings)
            crashes.append("done")
            milvus_lite_server.stop(signal.SIGKILL)
            try:
                return real(client, name, *arguments, **settings)
            finally:
                start()

        monkeypatch.setattr(SteadyClient, "_call", call)
        config = config_of(milvus_lite_server)
        with service(monkeypatch):
            seen = Once("Pattern2", "Loading the collection", lambda: crashes.append("wanted"))
            broken = make_experiment(tmp_path, event_handler=seen, vector_store_config=config)
            start.search(broken)
            assert crashes == ["wanted", "done"]
            assert len(seen.of(TrialStarted)) == 4 and not seen.of(TrialFailed)
            assert sum("Pattern2 is tried once more" in message for _, message, _ in seen.statuses) == 1
            whole = make_experiment(tmp_path, run="whole", workspace="other", vector_store_config=config)
            whole.search()
            assert table_of(broken.results) == table_of(whole.results)
            broken.close()
            whole.close()
        MilvusServerStore.drop_collections(config, list(MilvusServerStore.list_collections(config)))


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from store_contract import HashModel, random_chunks
from ai4rag_nb.foundations.errors import AI4RAGError
from ai4rag_nb.indexing.vector_store import MilvusConfig, get_vector_store

uri, number = sys.argv[2], int(sys.argv[3])
config = MilvusConfig(uri, keyword="bm25", timeout_seconds=60)
with get_vector_store(HashModel(4), config, "ai4rag_crowd") as store:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        for part in range(3):
            name = f"{number}-{part}.md"
            store.add_documents(random_chunks(12, seed=10 * number + part, document=name))
        print("done", flush=True)
    except AI4RAGError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.parametrize("writers", [4])
def test_processes_that_write_our_weights_at_once_are_told(
    milvus_lite_server: MilvusLiteServer, writers: int
) -> None:
    """A Milvus server knows no turns: nobody is told that all is well while weights are wrong, and one call mends them."""
    config, model = config_of(milvus_lite_server, keyword="bm25"), HashModel(4)
    first = random_chunks(30, document="first.md")
    with get_vector_store(model, config, "ai4rag_crowd") as store:
        store.add_documents(first)
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), milvus_lite_server.uri]
    started = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(1, writers + 1)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0].strip() for process in started]
    refused = [words for words in said if words != "done"]
    assert all("Another process changed 'ai4rag_crowd' meanwhile" in words for words in refused), said
    assert all("Let one process write at a time" in words for words in refused), said
    with get_vector_store(model, config, "ai4rag_crowd") as store:
        if refused:
            store.refresh_keywords()
        rows = store.get_chunks(written_places(writers))
        assert store.count() == len(rows)
        assert store.keyword_index is not None
        mean = store.keyword_index.refresh().mean
        for question in ("word1 word2", "word3"):
            expected = bm25([row.text for row in rows], question, 1.2, mean=mean)
            wanted = {rows[place].chunk_id: score for place, score in expected.items()}
            hits = store.search(question, 500, "keyword")
            assert {hit.chunk_id: hit.score for hit in hits} == pytest.approx(wanted, rel=1e-3)
        store.drop()


def written_places(writers: int) -> list[tuple[str, int]]:
    """List the places of everything that the writers may have written."""
    names = ["first.md", *(f"{n}-{part}.md" for n in range(1, writers + 1) for part in range(3))]
    return [(name, number) for name in names for number in range(1, 31)]

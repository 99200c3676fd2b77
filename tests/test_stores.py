"""Every vector store keeps one contract; Milvus Lite also keeps to its file, its process and its limits."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_world import wait_until
from store_contract import WORDS, HashModel, Opener, StoreContract, bm25, chunk, random_chunks

from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import (
    IndexingError,
    AI4RAGError,
    InputError,
    NotAvailableError,
    StorageError,
    VectorStoreInitializationError,
)
from ai4rag_nb.indexing.cleaning import clean_collections, find_orphans
from ai4rag_nb.indexing.collections import (
    CollectionRecord,
    CollectionRegistry,
    indexing_fingerprint,
    open_collection,
    place_binding,
)
from ai4rag_nb.indexing.languages import language_of, language_of_all
from ai4rag_nb.indexing.milvus_lite import MilvusLiteStore, drop_collections, list_collections
from ai4rag_nb.indexing.milvus_lite_file import merge_segments
from ai4rag_nb.indexing.store_config import MilvusConfig, PGVectorConfig
from ai4rag_nb.indexing.vector_store import (
    BaseVectorStore,
    BaseVectorStoreConfig,
    MilvusLiteConfig,
    get_vector_store,
)
from ai4rag_nb.optimization.setup import described_store
from ai4rag_nb.optimization.space_store import fit_language


def milvus_lite_opener(folder: Path, mode: str) -> tuple[Opener, list[BaseVectorStore]]:
    """Give what opens stores in a file, and the list of those that were opened."""
    opened: list[BaseVectorStore] = []

    def opener(
        model: Any, name: str | None = None, metric: str = "cosine", **settings: Any
    ) -> BaseVectorStore:
        config = MilvusLiteConfig(
            str(folder / "store.db"), distance_metric=metric, **{"keyword": mode, **settings}
        )
        opened.append(get_vector_store(model, config, name))
        return opened[-1]

    return opener, opened


class TestMilvusLiteContract(StoreContract):
    """Milvus Lite as a file, with its own BM25."""

    @pytest.fixture()
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        opener, opened = milvus_lite_opener(tmp_path, self.mode)
        yield opener
        for store in opened:
            store.close()


class TestMilvusLiteContractWithOurWeights(TestMilvusLiteContract):
    """Milvus Lite as a file, with our BM25."""

    mode = "bm25"


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


SMALL_MODEL = """
import signal, sys
import numpy as np
class Model:
    dimension = 4
    def embed_documents(self, texts, on_progress=None):
        return np.array([[len(t) + 1, t.count('a') + 1, 1, 2] for t in texts], dtype=np.float32)
    embed_queries = embed_documents
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import AI4RAGError
from ai4rag_nb.indexing.vector_store import MilvusLiteConfig, get_vector_store
def chunks(start, stop):
    return [AI4RAGChunk(f"text {n}", {"document_id": "d", "sequence_number": n}) for n in range(start, stop)]
"""


def script(body: str) -> str:
    return textwrap.dedent(SMALL_MODEL) + textwrap.dedent(body)


class TestMilvusLite:
    """The file, the process, the index."""

    def test_parent_folders_are_made(self, tmp_path: Path) -> None:
        config = MilvusLiteConfig(tmp_path / "a b" / "ü" / "store.db")
        with get_vector_store(HashModel(), config) as store:
            store.add_documents(random_chunks(2))
        assert (tmp_path / "a b" / "ü" / "store.db").is_dir()

    def test_path_must_end_in_db(self) -> None:
        for bad in ("store", "store.sqlite", "store.db/", "", "a\x00.db"):
            with pytest.raises(InputError):
                MilvusLiteConfig(bad)

    def test_configuration_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MILVUS_LITE_DB_PATH", "elsewhere/x.db")
        monkeypatch.setenv("MILVUS_LITE_DISTANCE_METRIC", "IP")
        config = MilvusLiteConfig.from_env()
        assert (config.db_path, config.distance_metric) == ("elsewhere/x.db", "ip")
        monkeypatch.setenv("MILVUS_LITE_DISTANCE_METRIC", "euclid")
        with pytest.raises(InputError, match="There are 'cosine', 'l2', 'ip'"):
            MilvusLiteConfig.from_env()

    def test_a_store_that_is_none_is_named(self) -> None:
        with pytest.raises(NotAvailableError, match=r"no configuration of a vector store.*'milvus_lite'"):
            get_vector_store(HashModel(), BaseVectorStoreConfig("faiss"))

    def test_places_that_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        (tmp_path / "old.db").write_text("Milvus Lite 2")
        with pytest.raises(VectorStoreInitializationError, match="Check the path and its permissions"):
            get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "file" / "store.db"))
        with pytest.raises(
            VectorStoreInitializationError, match="it is a file, and Milvus Lite 3 keeps a folder"
        ):
            get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "old.db"))

    def test_a_file_in_the_place_of_the_store_is_to_be_moved(self, tmp_path: Path) -> None:
        (tmp_path / "vectors.db").write_text("no folder")
        with pytest.raises(VectorStoreInitializationError, match="Move it away and run the search again"):
            get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "vectors.db"))

    @pytest.mark.parametrize("kind", ["*.parquet", "*.idx", "schema.json", "manifest.json*"])
    @pytest.mark.parametrize("content", [b"", b"{junk", b"\xff" * 1000])
    def test_a_damaged_collection_says_how_it_is_mended(
        self, tmp_path: Path, kind: str, content: bytes
    ) -> None:
        config = MilvusLiteConfig(tmp_path / "vectors.db")
        chunks = [
            AI4RAGChunk(word, {"document_id": "a", "sequence_number": n}) for n, word in enumerate(WORDS, 1)
        ]
        with get_vector_store(HashModel(), config, "ai4rag_damaged") as store:
            store.add_documents(chunks)
        damaged = list((tmp_path / "vectors.db").rglob(kind))
        assert damaged
        for file in damaged:
            file.write_bytes(content)
        with pytest.raises(AI4RAGError) as caught:
            with get_vector_store(HashModel(), config, "ai4rag_damaged") as store:
                store.search("word1")
        assert "run the search again" in str(caught.value)
        assert str(tmp_path / "vectors.db") in str(caught.value) and "MilvusException" not in str(
            caught.value
        )

    def test_too_long_a_question_is_not_a_chunk(self, tmp_path: Path) -> None:
        with get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "vectors.db")) as store:
            store.add_documents([AI4RAGChunk("word", {"document_id": "a", "sequence_number": 1})])
            with pytest.raises(InputError, match=r"Question 1 has 65,536 bytes.*Ask a shorter question"):
                store.search("x" * 65_536)
            for text, place, remedy in (
                ("x" * 65_536, {"document_id": "a"}, "Use smaller chunks"),
                ("x", {"document_id": "a" * 65_536}, "shorter name"),
                ("x", {"document_id": "a", "headings": "x" * 65_536}, "Keep less in the metadata"),
            ):
                with pytest.raises(InputError, match=remedy):
                    store.add_documents([AI4RAGChunk(text, {**place, "sequence_number": 1})])

    def test_a_second_process_is_told_what_to_do(self, tmp_path: Path) -> None:
        path = str(tmp_path / "store.db")
        code = script("""
            try:
                get_vector_store(Model(), MilvusLiteConfig(sys.argv[1]))
            except AI4RAGError as error:
                print(type(error).__name__, error)
            else:
                print("opened")
        """)
        with get_vector_store(HashModel(), MilvusLiteConfig(path)) as store:
            store.add_documents(random_chunks(3))
            done = run_python(code, path)
        assert done.stdout.startswith("LockedStoreError Cannot open the vector store"), done.stderr
        assert f"another process {os.getpid()} has it open" in done.stdout
        assert "shut that notebook's kernel down" in done.stdout and "db_path of its own" in done.stdout
        assert "Traceback" not in done.stderr + done.stdout
        released = run_python(code, path)
        assert released.stdout.strip() == "opened", released.stdout + released.stderr

    def test_the_process_that_holds_the_file_is_named(self, tmp_path: Path) -> None:
        path = str(tmp_path / "store.db")
        code = script("""
            store = get_vector_store(Model(), MilvusLiteConfig(sys.argv[1]))
            print("open", flush=True)
            signal.pause()
        """)
        child = start_child(code, path)
        try:
            assert child.stdout is not None and child.stdout.readline().strip() == "open"
            with pytest.raises(
                VectorStoreInitializationError, match=f"another process {child.pid} has it open"
            ):
                get_vector_store(HashModel(), MilvusLiteConfig(path))
            with pytest.raises(VectorStoreInitializationError, match="another process"):
                list_collections(MilvusLiteConfig(path))
        finally:
            child.kill()
            child.communicate()
        get_vector_store(HashModel(), MilvusLiteConfig(path)).close()

    def test_the_file_is_free_after_a_failed_opening(self, tmp_path: Path) -> None:
        config = MilvusLiteConfig(tmp_path / "store.db")
        with get_vector_store(HashModel(16), config, "ai4rag_x") as store:
            store.add_documents(random_chunks(3))
        with pytest.raises(VectorStoreInitializationError):
            get_vector_store(HashModel(8), config, "ai4rag_x")
        done = run_python(
            script("print(get_vector_store(Model(), MilvusLiteConfig(sys.argv[1])).count())"), config.db_path
        )
        assert done.stdout.strip() == "0", done.stderr

    def test_failed_calls_are_quiet_and_named(self, tmp_path: Path) -> None:
        done = run_python(
            script("""
                with get_vector_store(Model(), MilvusLiteConfig(sys.argv[1])) as store:
                    store.add_documents(chunks(1, 3))
                    store._file.client.drop_collection(store.collection_name)
                    try:
                        store.search("text")
                    except AI4RAGError as error:
                        print(type(error).__name__, error)
            """),
            str(tmp_path / "store.db"),
        )
        assert re.match(r"IndexingError Cannot search 'ai4rag_\w+' in '.*store.db': ", done.stdout), (
            done.stderr
        )
        assert done.stderr == "" and done.stdout.count("\n") == 1

    def test_a_full_disk_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "store.db")) as store:
            store.add_documents(random_chunks(3))

            def full(*arguments: Any, **settings: Any) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(store._file.client, "upsert", full)
            with pytest.raises(StorageError, match=r"the disk of .* is full\. Free some space"):
                store.add_documents(random_chunks(3))

    def test_many_rows_are_searched_by_hnsw(self, tmp_path: Path) -> None:
        random = np.random.default_rng(3)
        vectors = random.normal(size=(1_500, 16)).astype(np.float32)
        rows = [chunk(f"t{number}", number) for number in range(1, 1_501)]
        config = MilvusLiteConfig(tmp_path / "store.db", exact_rows=1_000)
        model = HashModel(16)
        questions = [f"q{n}" for n in range(20)]
        asked = model.embed_queries(questions)
        with get_vector_store(model, config, "ai4rag_hnsw") as store:
            store.add_documents(rows[:900], vectors[:900])
            assert store._file.client.describe_index("ai4rag_hnsw", "dense")["index_type"] == "FLAT"
            store.add_documents(rows[900:], vectors[900:])
            assert store._file.client.describe_index("ai4rag_hnsw", "dense")["index_type"] == "HNSW"
            found = store.search_many(questions, k=10)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        right = [
            len({hit.sequence_number - 1 for hit in hits} & set(np.argsort(-(unit @ vector))[:10].tolist()))
            for vector, hits in zip(asked, found, strict=True)
        ]
        assert sum(right) >= 0.99 * 200
        with get_vector_store(model, config, "ai4rag_hnsw") as store:
            assert [[hit.chunk_id for hit in hits] for hits in store.search_many(questions, k=10)] == [
                [hit.chunk_id for hit in hits] for hits in found
            ]
        smaller = MilvusLiteConfig(tmp_path / "store.db")
        with get_vector_store(model, smaller, "ai4rag_hnsw") as store:
            assert store._file.client.describe_index("ai4rag_hnsw", "dense")["index_type"] == "FLAT"
            assert store.search_many(questions, k=10)[0][0].chunk_id == found[0][0].chunk_id

    def test_loads_become_one_segment(self, tmp_path: Path) -> None:
        with get_vector_store(HashModel(4), MilvusLiteConfig(tmp_path / "store.db")) as store:
            for part in range(3):
                store.add_documents(random_chunks(10, seed=part, document=f"{part}.md"))
                assert merge_segments(store._file, store.collection_name) == 1

    def test_collections_leak_neither_threads_nor_descriptors(self, tmp_path: Path) -> None:
        config = MilvusLiteConfig(tmp_path / "store.db")
        model = HashModel(4)
        with get_vector_store(model, config) as keeper:
            keeper.add_documents(random_chunks(2))
            threads, descriptors = threading.active_count(), count_descriptors()
            names = []
            for number in range(60):
                with get_vector_store(model, config) as store:
                    store.add_documents(random_chunks(3, seed=number))
                    names.append(store.collection_name)
            for name in names:
                with get_vector_store(model, config, name) as store:
                    assert store.count() == 3 and len(store.search("word1", search_mode="hybrid")) == 3
            wait_until(lambda: threading.active_count() <= threads + 2)
            assert count_descriptors() <= descriptors + 2
            assert len(list_collections(config)) == 61
        for _ in range(3):
            get_vector_store(model, config).close()
        assert count_descriptors() < descriptors

    def test_opening_and_closing_in_threads(self, tmp_path: Path) -> None:
        config, model = MilvusLiteConfig(tmp_path / "store.db"), HashModel(4)

        def work(number: int) -> int:
            with get_vector_store(model, config, f"ai4rag_{number % 3}") as store:
                store.add_documents(random_chunks(5, document=f"{number}.md"))
                return len(store.search("word1 word2", k=5))

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(work, range(24))) == [5] * 24
        assert list_collections(config) == {f"ai4rag_{number}": 40 for number in range(3)}

    def test_dropping_by_name(self, tmp_path: Path) -> None:
        config, model = MilvusLiteConfig(tmp_path / "store.db"), HashModel(4)
        assert list_collections(config) == {} and not (tmp_path / "store.db").exists()
        with (
            get_vector_store(model, config, "ai4rag_a") as store,
            get_vector_store(model, config, "ai4rag_b") as other,
        ):
            store.add_documents(random_chunks(2))
            other.add_documents(random_chunks(3))
            store._file.client.create_collection("somebody_elses", dimension=4)
            assert list_collections(config) == {"ai4rag_a": 2, "ai4rag_b": 3}
            assert drop_collections(config, ["ai4rag_a", "ai4rag_b"]) == []
        with get_vector_store(model, config, "ai4rag_a"):
            assert drop_collections(config, ["ai4rag_a", "ai4rag_b"]) == ["ai4rag_b"]
        assert list_collections(config) == {"ai4rag_a": 2}

    def test_rows_survive_kill_9(self, tmp_path: Path) -> None:
        path = str(tmp_path / "store.db")
        child = start_child(
            script("""
                store = get_vector_store(Model(), MilvusLiteConfig(sys.argv[1]), "ai4rag_x")
                store.add_documents(chunks(1, 501))
                print("loaded", flush=True)
                signal.pause()
            """),
            path,
        )
        kill_after(child, "loaded")
        with get_vector_store(HashModel(4), MilvusLiteConfig(path), "ai4rag_x") as store:
            assert store.count() == 500
            assert store.search("text", search_mode="keyword", k=3)[0].text.startswith("text")

    def test_the_product_is_imported_late(self) -> None:
        done = run_python("""
            import sys
            import ai4rag_nb.indexing.milvus_lite, ai4rag_nb.indexing.collections, ai4rag_nb.querying.rag
            print([name for name in ("pymilvus", "milvus_lite", "grpc", "pandas", "torch") if name in sys.modules])
        """)
        assert done.stdout.strip() == "[]", done.stderr


def start_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_after(child: subprocess.Popen[str], line: str) -> None:
    """Wait for a line of output, then kill the process that we started."""
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    if said != line:
        child.kill()
        _, errors = child.communicate()
        raise AssertionError(f"{said!r} instead of {line!r}: {errors}")
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()


class TestCollections:
    """One collection for one index, whole or rebuilt."""

    @pytest.fixture()
    def registry(self, tmp_path: Path) -> Iterator[CollectionRegistry]:
        cache = Cache.open(tmp_path / "cache.sqlite")
        yield CollectionRegistry(cache)
        cache.close()

    @pytest.fixture()
    def config(self, tmp_path: Path) -> MilvusLiteConfig:
        return MilvusLiteConfig(tmp_path / "store.db")

    def test_fingerprints_differ_in_every_part(self) -> None:
        base: list[Any] = [["d1", "d2"], {"size": 64}, {"model": "m"}, "cosine"]
        prints = {indexing_fingerprint(*base)}
        for place, other in enumerate([["d2", "d1"], {"size": 65}, {"model": "n"}, "l2"]):
            prints.add(indexing_fingerprint(*[other if place == n else part for n, part in enumerate(base)]))
        prints.add(indexing_fingerprint(*base, "bm25"))
        assert len(prints) == 6
        assert indexing_fingerprint(*base) == indexing_fingerprint(*base, "native")

    def test_keyword_modes_have_collections_of_their_own(
        self, registry: CollectionRegistry, config: MilvusLiteConfig
    ) -> None:
        names = set()
        for mode in ("native", "bm25", "native"):
            opened = open_collection(
                registry,
                HashModel(),
                replace(config, keyword=mode),
                indexing_fingerprint("d", "c", "m", "cosine", mode),
                lambda store: store.add_documents(random_chunks(3)),
            )
            names.add(opened.record.collection_name)
            opened.store.close()
        assert len(names) == 2 and set(list_collections(config)) == names

    def test_a_second_run_loads_nothing(self, registry: CollectionRegistry, config: MilvusLiteConfig) -> None:
        model, loads = HashModel(), []

        def load(store: BaseVectorStore) -> int:
            loads.append(store.collection_name)
            return store.add_documents(random_chunks(30))

        first = open_collection(registry, model, config, "print", load)
        hits = first.store.search("word1", 5, "hybrid")
        first.store.close()
        again = open_collection(CollectionRegistry(registry.cache), model, config, "print", load)
        assert again.reused and len(loads) == 1 and again.store.search("word1", 5, "hybrid") == hits
        other = open_collection(registry, model, config, "other print", load)
        assert not other.reused and other.record.collection_name != again.record.collection_name
        again.store.close()
        other.store.close()

    def test_two_threads_build_once(self, registry: CollectionRegistry, config: MilvusLiteConfig) -> None:
        model, loads = HashModel(), []

        def load(store: BaseVectorStore) -> int:
            loads.append(1)
            return store.add_documents(random_chunks(30))

        def work(_: int) -> bool:
            opened = open_collection(CollectionRegistry(registry.cache), model, config, "print", load)
            opened.store.close()
            return opened.reused

        with ThreadPoolExecutor(6) as pool:
            assert sorted(pool.map(work, range(6))) == [False, True, True, True, True, True]
        assert loads == [1] and len(list_collections(config)) == 1

    def test_the_place_belongs_to_the_record(
        self,
        registry: CollectionRegistry,
        config: MilvusLiteConfig,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def load(store: BaseVectorStore) -> int:
            return store.add_documents(random_chunks(3))

        open_collection(registry, HashModel(), config, "print", load).store.close()
        elsewhere = MilvusLiteConfig(tmp_path / "other.db")
        opened = open_collection(registry, HashModel(), elsewhere, "print", load)
        opened.store.close()
        assert not opened.reused
        monkeypatch.chdir(tmp_path)
        opened = open_collection(registry, HashModel(), MilvusLiteConfig("store.db"), "print", load)
        opened.store.close()
        assert opened.reused

    def test_a_workspace_can_be_moved(self, tmp_path: Path) -> None:
        def load(store: BaseVectorStore) -> int:
            return store.add_documents(random_chunks(3))

        reused = []
        for home, cache_name in ((tmp_path / "here", "cache.sqlite"), (tmp_path / "there", "cache.sqlite")):
            if reused:
                (tmp_path / "here").rename(home)
            cache = Cache.open(home / cache_name)
            opened = open_collection(
                CollectionRegistry(cache), HashModel(), MilvusLiteConfig(home / "store.db"), "print", load
            )
            reused.append(opened.reused)
            opened.store.close()
            cache.close()
        assert reused == [False, True]

    def test_a_failing_load_leaves_nothing(
        self, registry: CollectionRegistry, config: MilvusLiteConfig
    ) -> None:
        def load(store: BaseVectorStore) -> int:
            store.add_documents(random_chunks(3))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            open_collection(registry, HashModel(), config, "print", load)
        assert list_collections(config) == {} and registry.records() == []

    @pytest.mark.parametrize("damage", ["dropped", "file gone", "rows missing", "rows added"])
    def test_what_is_not_as_recorded_is_built_again(
        self, registry: CollectionRegistry, config: MilvusLiteConfig, damage: str
    ) -> None:
        model = HashModel()

        def load(store: BaseVectorStore) -> int:
            return store.add_documents(random_chunks(6))

        with open_collection(registry, model, config, "print", load).store as store:
            name = store.collection_name
            if damage == "dropped":
                store.drop()
            elif damage == "rows missing":
                store._file.client.delete(name, ids=[store._client.query(name, limit=1)[0]["id"]])
            elif damage == "rows added":
                store.add_documents(random_chunks(1, document="new.md"))
        if damage == "file gone":
            import shutil

            shutil.rmtree(config.db_path)
        opened = open_collection(registry, model, config, "print", load)
        assert not opened.reused and opened.store.count() == 6
        opened.store.close()
        assert list(list_collections(config).values()) == [6]
        assert [record.state for record in registry.records()] == ["complete"]

    @pytest.mark.parametrize("mode", ["native", "bm25"])
    @pytest.mark.parametrize(
        ("moment", "batches"),
        [("named", 3), ("first batch", 2), ("flushed", 1), ("going on", None), ("half", None)],
    )
    def test_a_load_that_was_killed_goes_on_at_its_batch(
        self, tmp_path: Path, moment: str, batches: int | None, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """kill -9 between the record and its completion, while it stands still at three places, and twice while it goes on."""
        code = script("""
            from ai4rag_nb.foundations.cache import Cache
            from ai4rag_nb.indexing.collections import CollectionRegistry, open_collection
            moment = sys.argv[3]
            def wait(name):
                if moment == name:
                    print("now", flush=True)
                    signal.pause()
            def load(store):
                if moment == "going on": print("now", flush=True)
                wait("named")
                store.add_documents(chunks(1, 1001))
                wait("first batch")
                if moment == "half": print("now", flush=True)
                store.add_documents(chunks(1001, 2001))
                wait("flushed")
                signal.pause()
                return 2500
            config = MilvusLiteConfig(sys.argv[2], keyword=sys.argv[4])
            open_collection(CollectionRegistry(Cache.open(sys.argv[1])), Model(), config, "print", load)
        """)
        cache_path, store_path = str(tmp_path / "cache.sqlite"), str(tmp_path / "store.db")
        child = start_child(code, cache_path, store_path, moment, mode)
        kill_after(child, "now")
        registry = CollectionRegistry(Cache.open(cache_path))
        config = MilvusLiteConfig(store_path, keyword=mode)
        assert [record.state for record in registry.records()] == ["loading"]
        begun = registry.records()[0].collection_name
        assert set(find_orphans(registry, config)) <= {begun}
        rows = [chunk(f"text {number}", number, "d") for number in range(1, 2_501)]
        written: list[int] = []
        real = MilvusLiteStore._write

        def counted(self: Any, batch: Any, *rest: Any) -> None:
            written.append(len(batch))
            real(self, batch, *rest)

        monkeypatch.setattr(MilvusLiteStore, "_write", counted)
        opened = open_collection(
            registry, HashModel(4), config, "print", lambda store: store.add_documents(rows, resume=True)
        )
        if batches is not None:
            assert written == [1_000, 1_000, 500][3 - batches :]
        assert not opened.reused and opened.record.collection_name == begun
        assert opened.store.verify(rows).whole
        expected = sorted(
            (bm25([row.text for row in rows], "text 77", 1.2 if mode == "bm25" else 1.5)).values()
        )
        hits = opened.store.search("text 77", 1, "keyword")
        assert hits[0].sequence_number == 77 and hits[0].score == pytest.approx(expected[-1], rel=1e-4)
        opened.store.close()
        assert list_collections(config) == {begun: 2_500}
        assert [(record.state, record.chunks) for record in registry.records()] == [("complete", 2_500)]
        registry.cache.close()

    def test_a_store_that_fails_in_mid_load_is_gone_on_with(
        self, registry: CollectionRegistry, config: MilvusLiteConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server is gone behind the second batch, comes back, and the third run writes the rest."""
        rows, written = random_chunks(3_500), []
        real = MilvusLiteStore._write

        def failing(self: Any, batch: Any, *rest: Any) -> None:
            if len(written) in failures:
                failures.remove(len(written))
                raise IndexingError("The server is gone.")
            written.append(len(batch))
            real(self, batch, *rest)

        def load(store: BaseVectorStore) -> int:
            return store.add_documents(rows, resume=True)

        failures = {2}
        monkeypatch.setattr(MilvusLiteStore, "_write", failing)
        with pytest.raises(IndexingError, match="The server is gone"):
            open_collection(registry, HashModel(4), config, "print", load)
        assert [record.state for record in registry.records()] == ["loading"]
        opened = open_collection(registry, HashModel(4), config, "print", load)
        opened.store.close()
        assert written == [1_000, 1_000, 1_000, 500] and len(list_collections(config)) == 1

    def test_what_was_left_but_does_not_fit_is_built_again(
        self, registry: CollectionRegistry, config: MilvusLiteConfig
    ) -> None:
        rows = random_chunks(5)

        def stray(store: BaseVectorStore) -> int:
            store.add_documents(random_chunks(3, document="stray.md"))
            raise IndexingError("The server is gone.")

        with pytest.raises(IndexingError):
            open_collection(registry, HashModel(4), config, "print", stray)
        opened = open_collection(
            registry, HashModel(4), config, "print", lambda store: store.add_documents(rows, resume=True)
        )
        assert opened.store.verify(rows).whole and opened.store.documents() == {"a.md": 5}
        opened.store.close()
        assert list(list_collections(config).values()) == [5]

    def test_cleaning(self, registry: CollectionRegistry, config: MilvusLiteConfig) -> None:
        model = HashModel()

        def load(store: BaseVectorStore) -> int:
            return store.add_documents(random_chunks(4))

        opened = open_collection(registry, model, config, "print", load)
        with get_vector_store(model, config, "ai4rag_orphan") as orphan:
            load(orphan)
        assert find_orphans(registry, config) == {"ai4rag_orphan": 4}
        assert clean_collections(registry, config) == {"ai4rag_orphan": 4}
        assert clean_collections(registry, config, everything=True) == {}, "it is in use"
        opened.store.close()
        assert clean_collections(registry, config, everything=True) == {opened.record.collection_name: 4}
        assert registry.records() == [] and list_collections(config) == {}

    def test_records_are_json_and_say_where(
        self, registry: CollectionRegistry, config: MilvusLiteConfig
    ) -> None:
        opened = open_collection(
            registry, HashModel(), config, "print", lambda store: store.add_documents(random_chunks(2))
        )
        opened.store.close()
        record = registry.records()[0]
        assert record == opened.record
        assert json.loads(json.dumps(record.__dict__)) == record.__dict__
        assert set(record.store_binding) == {"provider_type", "uri", "distance_metric"}


def test_the_class_is_what_get_vector_store_opens(tmp_path: Path) -> None:
    with get_vector_store(HashModel(), MilvusLiteConfig(tmp_path / "store.db")) as store:
        assert isinstance(store, MilvusLiteStore)
        assert store.capabilities() == {"vector", "keyword", "hybrid"}
        assert "ai4rag_" in repr(store) and "store.db" in repr(store)


@pytest.mark.parametrize("value", ["30", "", None, True, [], {}, 0, -1, math.nan, math.inf, 10**400, b"30"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MilvusConfig, "timeout_seconds"),
        (MilvusConfig, "settle_seconds"),
        (PGVectorConfig, "timeout_seconds"),
    ],
)
def test_time_limits_are_numbers_of_seconds(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is .*seconds above 0") as caught:
        kind(**{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MilvusLiteConfig, "db_path"),
        (MilvusConfig, "ca_cert"),
        (PGVectorConfig, "ca_cert"),
        (PGVectorConfig, "schema"),
        (PGVectorConfig, "language"),
        (PGVectorConfig, "host"),
        (PGVectorConfig, "port"),
    ],
)
@pytest.mark.parametrize("value", [7.5, True, [], {}, math.nan, b"x", "\ud800", "a\0b", "x" * 5_000])
def test_places_are_texts(kind: Any, name: str, value: Any) -> None:
    if name == "host" and value == "x" * 5_000:
        return  # a server may have any name
    address = {"uri": "https://localhost:19530"} if kind is MilvusConfig else {}
    with pytest.raises(InputError, match=name) as caught:
        kind(**address, **{name: value})
    assert caught.value.remedy and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "missing", [(MilvusLiteConfig, "db_path"), (PGVectorConfig, "schema"), (PGVectorConfig, "language")]
)
def test_places_are_given(missing: tuple[Any, str]) -> None:
    kind, name = missing
    with pytest.raises(InputError, match=name):
        kind(**{name: None})


@pytest.mark.parametrize(
    "value", [5, [], {"very": "secret-4711"}, b"secret-4711", "secret-4711\0", "secret-4711\ud800"]
)
def test_a_secret_that_is_none_is_refused_and_not_shown(value: Any) -> None:
    for kind, name in ((PGVectorConfig, "password"), (MilvusConfig, "token")):
        with pytest.raises(InputError, match=name) as caught:
            kind(**{name: value})
        assert "4711" not in str(caught.value) and caught.value.remedy


STEMMED = {
    "arabic": "تم اختبار جميع الصمامات في المحطة من قبل المشغل قبل أن يتم تشغيلها وقد وجد أن بعضها لا يغلق على الوجه المطلوب.",
    "danish": "Alle ventiler i anlægget bliver prøvet, før det startes, og de ventiler der ikke er tætte, skal skiftes ud efter en tid.",
    "dutch": "Alle kleppen van de installatie worden getest voordat het systeem start, en een klep die niet dicht is wordt vervangen.",
    "english": "All valves of the plant are tested before it is started, and a valve that is not tight has to be replaced.",
    "finnish": "Venttiilit on tarkastettava ennen kuin laitos käynnistetään, ja se joka ei ole tiivis on vaihdettava, mutta myös muut.",
    "french": "Toutes les vannes de l'installation sont contrôlées avant la mise en marche, et une vanne qui n'est pas étanche est changée.",
    "german": "Alle Ventile der Anlage werden geprüft, bevor sie in Betrieb geht, und ein Ventil, das nicht dicht ist, wird ersetzt.",
    "greek": "Όλες οι βαλβίδες της εγκατάστασης ελέγχονται πριν από την έναρξη, και μια βαλβίδα που δεν είναι στεγανή αλλάζει.",
    "hungarian": "A berendezés minden szelepét meg kell vizsgálni, és ha egy szelep nem zár jól, azt ki kell cserélni, de ez csak ritka.",
    "indonesian": "Semua katup di instalasi ini diperiksa oleh operator, dan katup yang tidak rapat akan diganti dengan yang baru dari gudang.",
    "irish": "Déantar gach comhla sa ghléasra a thástáil, agus má tá comhla ar bith nach bhfuil dlúth, tá sí le hathrú go luath.",
    "italian": "Le valvole dell'impianto sono controllate prima che sia messo in funzione, e una valvola che non è stagna è sostituita con un'altra.",
    "lithuanian": "Visi įrenginio vožtuvai yra tikrinami prieš tai, kai jis paleidžiamas, ir vožtuvas, kuris nėra sandarus, turi būti pakeistas.",
    "nepali": "यो कारखानाको सबै भल्भ चलाउनु अघि जाँच गरेको हुन्छ र नमिलेको भल्भ पनि फेर्नु पर्ने छ भने यसको लागि अर्को भल्भ छैन।",
    "norwegian": "Alle ventiler i anlegget blir prøvd før det startes, og de ventilene som ikke er tette, skal skiftes ut etter en tid.",
    "portuguese": "Todas as válvulas da instalação são verificadas antes do arranque, e uma válvula que não é estanque tem de ser trocada por uma nova.",
    "romanian": "Toate supapele din instalație sunt verificate înainte de pornire, iar o supapă care nu este etanșă va fi înlocuită cu una nouă.",
    "russian": "Все клапаны установки проверяются перед пуском, и клапан, который не закрывается, должен быть заменён на новый, но это бывает не часто.",
    "spanish": "Las válvulas de la instalación son revisadas antes de la puesta en marcha, y una válvula que no es estanca se cambia por una nueva.",
    "swedish": "Alla ventiler i anläggningen provas innan den startas, och de ventiler som inte är täta ska bytas ut efter en tid.",
    "tamil": "இந்த ஆலையின் எல்லா வால்வுகளும் சோதிக்கப்படும் மற்றும் ஒரு வால்வு சரியாக மூடவில்லை என்று தெரிந்தால் அது மாற்றப்படும்.",
    "turkish": "Tesisteki bütün vanalar denetlenir ve sızdırmaz olmayan bir vana yenisi ile değiştirilir, ancak bu çok sık olan bir şey değil.",
}
OTHERS = {
    "ukrainian": "Усі клапани установки перевіряє оператор перед пуском, і клапан, що не закривається, має бути замінений на новий, але не часто.",
    "catalan": "Les vàlvules de la instal·lació són revisades abans de la posada en marxa, i una vàlvula que no és estanca es canvia amb una de nova.",
    "polish": "Zawory instalacji są sprawdzane przed uruchomieniem, a zawór, który nie jest szczelny, należy wymienić, ale to się nie zdarza często.",
    "hindi": "संयंत्र के सभी वाल्व चलाने से पहले जाँचे जाते हैं और जो वाल्व ठीक नहीं है उस को बदलना है, पर यह बहुत कम होता है।",
}


@pytest.mark.parametrize("language", [*STEMMED, *OTHERS])
def test_the_language_of_a_text(language: str) -> None:
    text = {**STEMMED, **OTHERS}[language]
    assert language_of(text) == language
    assert language_of_all([text]).name == (language if language in STEMMED else "simple")


def test_texts_that_differ_or_say_nothing_have_no_language() -> None:
    german, english = STEMMED["german"], STEMMED["english"]
    assert language_of_all([german, english]).why == "the documents are in english, german"
    assert language_of_all([german] * 10 + [english]).name == "german", "nine tenths of the words"
    assert language_of_all([german] * 7 + [english]).name == "simple"
    assert language_of_all(["12 34 56 78 90 " * 9, german]).name == "simple", "most of it says nothing"
    for nothing in ([], [""], ["def f(x): return x"], ["水漏れ検知 " * 20]):
        assert language_of_all(nothing).why == "the language of the documents is not clear"


def test_the_language_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGVECTOR_HOST", "localhost")
    monkeypatch.delenv("PGVECTOR_LANGUAGE", raising=False)
    texts = [STEMMED["german"]]
    config, notes = fit_language(PGVectorConfig.from_env(), texts)
    assert config.language == "german" and "german" in notes[0] and "PGVECTOR_LANGUAGE" in notes[0]
    monkeypatch.setenv("PGVECTOR_LANGUAGE", "dutch")
    given = PGVectorConfig.from_env()
    assert given.language == "dutch" and fit_language(given, texts) == (given, [])
    for other in (PGVectorConfig(keyword="bm25"), MilvusLiteConfig("x.db")):
        assert fit_language(other, texts) == (other, []), "nothing of it depends on a language"


def test_collections_of_two_languages_are_two(tmp_path: Path) -> None:
    """The record of an index in one language is not found in another, nor is its run gone on with."""
    cache = Cache.open(tmp_path / "cache.sqlite")
    registry = CollectionRegistry(cache)
    german, english = PGVectorConfig(language="german"), PGVectorConfig(language="english")
    registry.record(CollectionRecord("f" * 64, "ai4rag_a", place_binding(german, cache), "complete", 3))
    assert registry.get("f" * 64, german) is not None and registry.get("f" * 64, english) is None
    assert described_store(german) != described_store(english)
    assert described_store(replace(german, keyword="bm25")) == described_store(
        replace(english, keyword="bm25")
    )
    cache.close()

"""Collections for each kind of content: the contract of stores as far as it applies, and what is their own."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_contract import HashModel, Opener, StoreContract, bm25, chunk, random_chunks

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import InputError
from ai4rag_nb.indexing.content_kinds import TYPES
from ai4rag_nb.indexing.markdown import markdown_document
from ai4rag_nb.indexing.milvus_lite import MilvusLiteStore
from ai4rag_nb.indexing.multi_index import MultiIndexManager, MultiIndexStore
from ai4rag_nb.indexing.multi_parts import part_name
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusLiteConfig, get_vector_store


def typed(chunks: Sequence[AI4RAGChunk]) -> list[AI4RAGChunk]:
    """Deal chunks to the kinds of content by their numbers."""
    return [
        AI4RAGChunk(row.text, {**row.metadata, "content_type": TYPES[row.sequence_number % 4]})
        for row in chunks
    ]


@pytest.fixture()
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    opened: list[BaseVectorStore] = []
    mode = getattr(request.cls, "mode", "native")

    def made(model: Any, name: str | None = None, metric: str = "cosine", **settings: Any) -> MultiIndexStore:
        config = MilvusLiteConfig(
            str(tmp_path / "store.db"), distance_metric=metric, **{"keyword": mode, **settings}
        )
        opened.append(MultiIndexStore(model, config, name))
        return opened[-1]  # type: ignore[return-value]

    yield made
    for store in opened:
        store.close()


class TestMultiIndexContract(StoreContract):
    """Chunks that do not say their kind are prose: the whole is one part, and behaves as a store."""

    def needs_parts(self) -> None:
        pytest.skip("rows are written by the parts, which keep this part of the contract themselves")

    def test_writes_go_in_batches(self, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        self.needs_parts()

    def test_what_was_changed_behind_our_back_is_found(self, opener: Opener) -> None:
        self.needs_parts()

    def test_a_broken_load_goes_on_where_it_was(
        self, opener: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.needs_parts()

    def test_notes_stand_beside_the_collection(self, opener: Opener) -> None:
        self.needs_parts()


class TestMultiIndexContractWithOurWeights(TestMultiIndexContract):
    """The same with our own BM25."""

    mode = "bm25"

    @property
    def keyword_hook(self) -> str:
        return "_keyword_hits"

    def reference(self, store: BaseVectorStore, texts: Sequence[str], query: str) -> dict[int, float]:
        return super().reference(store.part("text"), texts, query)  # type: ignore[attr-defined]


class TestKindsOfContent:
    @pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
    def test_dense_search_over_all_parts_equals_one_index(self, opener: Opener, metric: str) -> None:
        random, chunks = np.random.default_rng(1), typed(random_chunks(120))
        vectors = (random.normal(size=(120, 16)) * random.uniform(0.3, 3, size=(120, 1))).astype(np.float32)
        store = opener(HashModel(16), metric=metric)
        store.add_documents(chunks, vectors)
        assert sorted(store.parts) == sorted(TYPES)  # type: ignore[attr-defined]
        questions = [f"question {n}" for n in range(6)]
        asked, table = HashModel(16).embed_queries(questions).astype(float), vectors.astype(float)
        scores = {
            "cosine": asked
            @ table.T
            / np.linalg.norm(table, axis=1)
            / np.linalg.norm(asked, axis=1)[:, None],
            "ip": asked @ table.T,
            "l2": -((asked[:, None] - table[None]) ** 2).sum(axis=2),
        }[metric]
        for own, hits in zip(scores, store.search_many(questions, k=20), strict=True):
            best = np.argsort(-own, kind="stable")[:20]
            assert [hit.sequence_number - 1 for hit in hits] == best.tolist()
            np.testing.assert_allclose([hit.score for hit in hits], own[best], rtol=1e-4, atol=1e-5)

    def test_a_part_ranks_words_by_its_own_statistics(self, opener: Opener) -> None:
        chunks = typed(random_chunks(80))
        store = opener(HashModel())
        store.add_documents(chunks)
        for kind in TYPES:
            own = [row for row in chunks if row.metadata["content_type"] == kind]
            expected = bm25([row.text for row in own], "word3 word9")
            hits = store.parts[kind].search("word3 word9", 50, "keyword")  # type: ignore[attr-defined]
            assert {hit.sequence_number for hit in hits} == {own[n].sequence_number for n in expected}

    @pytest.mark.parametrize("mode", ["native", "bm25"])
    def test_words_are_weighed_over_all_parts(self, opener: Opener, tmp_path: Path, mode: str) -> None:
        """A word that is rare among code and common in prose is not rare; our BM25 ranks as one index does."""
        prose = [f"the pump number {n} is blue and it runs every day" for n in range(1, 6)]
        prose += [f"unrelated words about valve {n} and its seat" for n in range(6, 40)]
        prose += ["the pump pump calibration recipe"]
        code = ["def pump(): pass", *(f"def valve{n}(): pass" for n in range(2, 200))]
        texts, kinds = [*prose, *code], [*["text"] * len(prose), *["code"] * len(code)]
        pairs = enumerate(zip(texts, kinds, strict=True), 1)
        chunks = [chunk(text, number, content_type=kind) for number, (text, kind) in pairs]
        store = opener(HashModel(), keyword=mode)
        store.add_documents(chunks)
        if mode == "native":
            found = store.search("pump", 2, "keyword")
            assert {hit.text for hit in found} == {"the pump pump calibration recipe", "def pump(): pass"}
            assert found[0].score == found[1].score == pytest.approx(1 / 61), "the first of each kind"
            return
        for question in ("pump", "def pump recipe", "valve of the pump", "pass every seat"):
            expected = bm25(texts, question, 1.2)
            hits = store.search(question, 300, "keyword")
            assert {hit.sequence_number - 1 for hit in hits} == set(expected)
            for hit in hits:
                assert hit.score == pytest.approx(expected[hit.sequence_number - 1], rel=1e-4)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        with get_vector_store(HashModel(), store.inner, "ai4rag_one") as single:
            single.add_documents(chunks)
            assert [hit.text for hit in single.search("pump", 2, "keyword")] == [
                hit.text for hit in store.search("pump", 2, "keyword")
            ]

    def test_documents_come_change_and_go_in_all_parts(self, opener: Opener) -> None:
        store = opener(HashModel(), "ai4rag_kinds")
        first = typed(random_chunks(40))
        store.add_documents([*first, *typed(random_chunks(12, seed=4, document="b.md"))])
        assert store.documents() == {"a.md": 40, "b.md": 12} and store.count() == 52
        places = [("a.md", number) for number in (5, 6, 7, 8)]
        assert [found.sequence_number for found in store.get_chunks(places)] == [5, 6, 7, 8]
        assert len(store.neighbours(first[10], 2)) == 5
        fewer = typed(random_chunks(9, seed=7))
        store.replace_documents(fewer)
        assert store.documents() == {"a.md": 9, "b.md": 12}
        assert store.delete_documents(["b.md", "nobody"]) == 12 and store.verify(fewer).whole
        kind, config = type(store), store.config
        assert kind.list_collections(config)["ai4rag_kinds"] == 9
        store.drop()
        assert store.count() == 0
        store.add_documents(fewer)
        assert store.count() == 9

    def test_a_chunk_that_becomes_another_kind_moves(self, opener: Opener) -> None:
        """Once it was found in both parts."""
        store = opener(HashModel())
        rows = typed(random_chunks(8))
        store.add_documents(rows)
        moved = [AI4RAGChunk(row.text, {**row.metadata, "content_type": "table"}) for row in rows]
        for load in (store.add_documents, store.replace_documents):
            load(moved)
            assert store.count() == 8 and store.verify(moved).whole
            assert store.parts["table"].count() == 8  # type: ignore[attr-defined]
            load(rows)
            assert store.count() == 8 and store.verify(rows).whole

    def test_missing_kinds_cost_nothing(self, opener: Opener) -> None:
        """Asking what a store can do before it is loaded once made an empty part that no search survived."""
        store = opener(HashModel(), "ai4rag_tables")
        assert "vector" in store.capabilities() and store.properties().product
        rows = [chunk(f"row {n} | word{n}", n, content_type="table") for n in range(1, 9)]
        store.add_documents(rows)
        assert list(store.parts) == ["table"]  # type: ignore[attr-defined]
        assert store.search("word3", 3, "keyword")[0].sequence_number == 3
        assert len(store.search("word3", 3, "hybrid")) == 3 == len(store.search("word3", 3))
        store.close()
        again = opener(HashModel(), "ai4rag_tables")
        assert list(again.parts) == ["table"] and again.verify(rows).whole  # type: ignore[attr-defined]

    def test_bad_loads_are_named_before_anything_is_written(self, opener: Opener) -> None:
        store, rows = opener(HashModel()), typed(random_chunks(8))
        with pytest.raises(InputError, match="8 chunks have 7 vectors"):
            store.add_documents(rows, np.ones((7, 16)))
        broken = [*rows[:-1], AI4RAGChunk("x", {**rows[-1].metadata, "content_type": "music"})]
        with pytest.raises(InputError, match="music"):
            store.add_documents(broken)
        vectors = np.ones((8, 16))
        vectors[5, 3] = np.nan
        with pytest.raises(InputError):
            store.add_documents(rows, vectors)
        assert store.count() == 0

    def test_the_manager_tags_joins_and_repeats_nothing(self, tmp_path: Path) -> None:
        from ai4rag_nb.indexing.markdown import markdown_document

        text = "# Pumps\n\nThe seal lasts long.\n\n| part | months |\n|---|---|\n| seal | 24 |\n\n```python\ndef seal():\n    return 24\n```\n"
        manager = MultiIndexManager(HashModel(), MilvusLiteConfig(str(tmp_path / "m.db")))  # type: ignore[arg-type]
        counts = manager.index_document(markdown_document(text, "p.md"), "ai4rag_manual")
        assert {"text", "table", "code"} <= set(counts)
        assert manager.index_document(markdown_document(text, "p.md"), "ai4rag_manual") == counts
        hits = manager.search_multi_index("seal", "ai4rag_manual", top_k_per_index=4)
        assert {hit.metadata["content_type"] for hit in hits} == set(counts)
        assert len({(hit.document_id, hit.text) for hit in hits}) == len(hits)
        (only,) = {
            h.metadata["content_type"] for h in manager.search_multi_index("seal", "ai4rag_manual", ["code"])
        }
        assert only == "code" and part_name("ai4rag_manual", "code") == "ai4rag_manual_code"
        with pytest.raises(InputError, match="music"):
            manager.search_multi_index("seal", "ai4rag_manual", ["music"])
        manager.close()

    def test_a_base_needs_no_beginning(self, tmp_path: Path) -> None:
        """`papers` is kept as ai4rag_papers_<type>, so that cleaning tells it from what others made."""
        config = MilvusLiteConfig(str(tmp_path / "store.db"))
        document = markdown_document("# Pump\n\nThe pump is loud.", "pump.md")
        with contextlib.closing(MultiIndexManager(HashModel(), config)) as manager:
            assert manager.index_document(document, "papers") == {"text": 1}
            assert manager.search_multi_index("pump", "papers") == manager.search_multi_index(
                "pump", "ai4rag_papers"
            )
            assert MilvusLiteStore.list_collections(config) == {"ai4rag_papers_text": 1}
            with pytest.raises(
                InputError, match=r"There is no index 'ai4rag_paper'\. Did you mean 'ai4rag_papers'"
            ):
                manager.search_multi_index("pump", "paper")
            for bad in ("", "Papers", "a-b", "1a", "x" * 60, None):
                with pytest.raises(InputError, match="cannot name a collection"):
                    manager.index_document(document, bad)  # type: ignore[arg-type]

    def test_killed_while_loading_it_goes_on(self, tmp_path: Path) -> None:
        code = """
            import os, signal, sys
            sys.path.insert(0, sys.argv[2])
            from store_contract import HashModel, random_chunks
            from test_multi_index import typed
            from ai4rag_nb.indexing.multi_index import MultiIndexStore
            from ai4rag_nb.indexing.vector_store import MilvusLiteConfig
            store = MultiIndexStore(HashModel(4), MilvusLiteConfig(sys.argv[1]), "ai4rag_killed")
            done = []
            def advance(written, total):
                done.append(written)
                if len(done) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            store.add_documents(typed(random_chunks(400)), on_progress=advance)
        """
        place = str(tmp_path / "killed.db")
        arguments = [sys.executable, "-c", textwrap.dedent(code), place, str(Path(__file__).parent)]
        ended = subprocess.run(arguments, capture_output=True, timeout=120, env=dict(os.environ))
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        rows = typed(random_chunks(400))
        with MultiIndexStore(HashModel(4), MilvusLiteConfig(place), "ai4rag_killed") as store:
            assert 0 < store.count() < 400 and not store.verify(rows).whole
            assert store.add_documents(rows, resume=True) == 400
            assert store.verify(rows).whole
        with MultiIndexStore(HashModel(4), MilvusLiteConfig(place), "ai4rag_killed") as store:
            assert store.verify(rows).whole and sorted(store.parts) == sorted(TYPES)
            hits = store.search_many([row.text for row in rows[:20]], k=1)
            assert [found[0].sequence_number for found in hits] == list(range(1, 21))

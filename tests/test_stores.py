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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import (
    AI4RAGError,
    IndexingError,
    InputError,
    NotAvailableError,
    StorageError,
    VectorStoreInitializationError,
)
from ai4rag_nb.foundations.texts import is_blank
from ai4rag_nb.indexing.collections import (
    CollectionRegistry,
    clean_collections,
    find_orphans,
    indexing_fingerprint,
    open_collection,
)
from ai4rag_nb.indexing.fusion import fuse_legs
from ai4rag_nb.indexing.hit_lists import hit_name
from ai4rag_nb.indexing.milvus_lite import MilvusLiteStore, drop_collections, list_collections
from ai4rag_nb.indexing.milvus_lite_file import merge_segments
from ai4rag_nb.indexing.store_checks import new_collection_name
from ai4rag_nb.indexing.vector_store import (
    BaseVectorStore,
    BaseVectorStoreConfig,
    MilvusConfig,
    MilvusLiteConfig,
    PGVectorConfig,
    get_vector_store,
)

WORDS = [f"word{n}" for n in range(60)]


class HashModel:
    """Embed texts as random directions that depend on nothing but the text."""

    def __init__(self, dimension: int = 16) -> None:
        self.dimension = dimension
        self.calls: list[int] = []

    def embed_documents(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        self.calls.append(len(texts))
        rows = [
            np.random.default_rng(list(text.encode()) or [0]).normal(size=self.dimension) for text in texts
        ]
        return np.asarray(rows, dtype=np.float32).reshape(len(texts), self.dimension)

    embed_queries = embed_documents

    def embed_query(self, text: str) -> np.ndarray:
        return self.embed_documents([text])[0]


def chunk(text: str, number: int = 1, document: str = "a.md", **metadata: Any) -> AI4RAGChunk:
    return AI4RAGChunk(text, {"document_id": document, "sequence_number": number, **metadata})


def random_chunks(count: int, seed: int = 0, document: str = "a.md", first: int = 1) -> list[AI4RAGChunk]:
    """Texts of 5 to 40 words out of 60, common ones more often."""
    random = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, len(WORDS) + 1)
    picks = [random.choice(WORDS, random.integers(5, 40), p=weights / weights.sum()) for _ in range(count)]
    return [chunk(" ".join(words), number, document) for number, words in enumerate(picks, first)]


def bm25(texts: Sequence[str], query: str, k1: float = 1.5, b: float = 0.75) -> dict[int, float]:
    """Score the texts that share a word with the query, straight from the definition."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    lengths = [sum(bag.values()) for bag in bags]
    mean = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for word, times in Counter(re.findall(r"\w+", query.lower())).items():
        holders = [place for place, bag in enumerate(bags) if word in bag]
        rarity = math.log(1 + (len(texts) - len(holders) + 0.5) / (len(holders) + 0.5))
        for place in holders:
            count = bags[place][word]
            gain = count * (k1 + 1) / (count + k1 * (1 - b + b * lengths[place] / mean))
            scores[place] = scores.get(place, 0.0) + times * rarity * gain
    return scores


Opener = Callable[..., BaseVectorStore]


def open_milvus_lite(folder: Path) -> Opener:
    def opener(
        model: Any, name: str | None = None, metric: str = "cosine", **settings: Any
    ) -> BaseVectorStore:
        config = MilvusLiteConfig(str(folder / "store.db"), distance_metric=metric, **settings)
        return get_vector_store(model, config, name)

    return opener


STORES: dict[str, Callable[[Path], Opener]] = {"milvus_lite": open_milvus_lite}  # a further store joins here


@pytest.fixture(params=list(STORES))
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Open stores of one product; whatever a test leaves open is closed."""
    opened: list[BaseVectorStore] = []
    make = STORES[request.param](tmp_path)

    def tracked(*arguments: Any, **settings: Any) -> BaseVectorStore:
        opened.append(make(*arguments, **settings))
        return opened[-1]

    yield tracked
    for store in opened:
        store.close()


def spy(store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, int]]:
    """Record the calls of primitives as (name, length of the first argument)."""
    calls: list[tuple[str, int]] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append((name, len(arguments[0]) if arguments else 0))
            return real(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(store, name, watched(name, getattr(store, name)))
    return calls


class TestContract:
    """What the rest of the toolkit relies on, whatever the store."""

    @pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
    def test_dense_search_equals_brute_force(self, opener: Opener, metric: str) -> None:
        random = np.random.default_rng(1)
        model, chunks = HashModel(24), random_chunks(300)
        vectors = (random.normal(size=(300, 24)) * random.uniform(0.2, 5, size=(300, 1))).astype(np.float32)
        store = opener(model, metric=metric)
        store.add_documents(chunks, vectors)
        questions = [f"question {n}" for n in range(10)]
        asked = model.embed_queries(questions).astype(float)
        table = vectors.astype(float)
        if metric == "cosine":
            norms = np.linalg.norm(table, axis=1) * np.linalg.norm(asked, axis=1)[:, None]
            expected = asked @ table.T / norms
        elif metric == "ip":
            expected = asked @ table.T
        else:
            expected = -((asked[:, None] - table[None]) ** 2).sum(axis=2)
        for scores, hits in zip(expected, store.search_many(questions, k=25), strict=True):
            best = np.argsort(-scores, kind="stable")[:25]
            assert [hit.sequence_number - 1 for hit in hits] == best.tolist()
            np.testing.assert_allclose([hit.score for hit in hits], scores[best], rtol=1e-4, atol=1e-5)
            assert all(hit.scores == {"dense": hit.score} for hit in hits)

    @pytest.mark.parametrize("loads", [1, 2, 5])
    def test_keyword_search_equals_the_definition(self, opener: Opener, loads: int) -> None:
        chunks = random_chunks(200, seed=loads)
        store = opener(HashModel())
        for part in range(loads):
            store.add_documents(chunks[part::loads])
        self.check_keywords(store, chunks)

    def test_keyword_search_after_texts_were_replaced(self, opener: Opener) -> None:
        chunks = random_chunks(120)
        store = opener(HashModel())
        store.add_documents(chunks)
        fresh = random_chunks(40, seed=9)
        store.add_documents(fresh)
        self.check_keywords(store, fresh + chunks[40:])

    @staticmethod
    def check_keywords(store: BaseVectorStore, chunks: Sequence[AI4RAGChunk]) -> None:
        texts = [chunk.text for chunk in chunks]
        for query in [
            "word3",
            "word50 word7",
            "Word40, word41; WORD42?",
            "word1 word1 word59",
            "word0 nothing",
        ]:
            expected = bm25(texts, query)
            hits = store.search(query, k=200, search_mode="keyword")
            assert len(hits) == len(expected)
            found = {hit.sequence_number: hit.score for hit in hits}
            for place, score in expected.items():
                assert found[chunks[place].sequence_number] == pytest.approx(score, rel=1e-4)
            ranked = np.array([hit.score for hit in hits])
            np.testing.assert_allclose(ranked, np.sort(ranked)[::-1], rtol=1e-5)
            assert all(hit.score > 0 and hit.scores == {"keyword": hit.score} for hit in hits)

    @pytest.mark.parametrize("strategy", ["rrf", "weighted", "normalized"])
    def test_hybrid_is_our_fusion_of_deep_legs(self, opener: Opener, strategy: str) -> None:
        store = opener(HashModel())
        store.add_documents(random_chunks(150))
        query = "word5 word20"
        legs = store.search_legs([query], depth=50)[0]
        assert len(legs["dense"]) == 50 and len(legs["keyword"]) == 50
        pairs = {leg: [(hit_name(hit), hit.score) for hit in hits] for leg, hits in legs.items()}
        expected = fuse_legs(pairs, strategy, 60, 0.3)[:4]
        hits = store.search(query, 4, "hybrid", strategy, 60, 0.3)
        assert [(hit_name(hit), hit.score) for hit in hits] == expected
        for hit in hits:
            assert hit.scores["fused"] == hit.score
            for leg in ("dense", "keyword"):
                assert hit.scores.get(leg) == dict(pairs[leg]).get(hit_name(hit))

    def test_hybrid_finds_what_is_deep_in_both_legs(self, opener: Opener) -> None:
        """A chunk at place 4 of both legs wins over the first of each, which no leg of length k could show."""
        model = HashModel(2)
        store = opener(model)
        angles = np.linspace(0.1, 1.2, 8)
        texts = ["filler", "filler x", "filler y", "apple pie", "z", "z z", "apple apple", "apple"]
        chunks = [chunk(text, number) for number, text in enumerate(texts, 1)]
        store.add_documents(chunks, np.stack([np.cos(angles), np.sin(angles)], axis=1))
        model.embed_queries = lambda texts: np.array([[1.0, 0.0]] * len(texts))  # type: ignore[method-assign]
        assert store.search("apple", k=1, search_mode="hybrid")[0].text == "apple pie"

    def test_many_questions_go_in_one_call(self, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        model = HashModel()
        store = opener(model)
        store.add_documents(random_chunks(100))
        questions = [f"word{n % 40} and more" for n in range(80)]
        alone = [store.search(question, 7, "hybrid") for question in questions[:40]]
        calls = spy(store, monkeypatch, "_dense_hits", "_keyword_hits")
        model.calls.clear()
        together = store.search_many(questions, 7, "hybrid")
        assert calls == [("_dense_hits", 40), ("_keyword_hits", 40)] and model.calls == [40]
        assert together[:40] == together[40:]
        for one, many in zip(alone, together[:40], strict=True):
            assert [hit.chunk_id for hit in one] == [hit.chunk_id for hit in many]
            np.testing.assert_allclose([hit.score for hit in one], [hit.score for hit in many], rtol=1e-5)

    def test_shorter_lists_begin_longer_ones(self, opener: Opener) -> None:
        store = opener(HashModel())
        twins = [chunk("the same words", number, f"twin{number}.md") for number in range(1, 31)]
        store.add_documents([*random_chunks(80), *twins])
        for mode in ("vector", "keyword", "hybrid"):
            long = store.search("the same words", 25, mode)
            for k in (1, 3, 10):
                assert store.search("the same words", k, mode) == long[:k]
        names = [hit.document_id for hit in store.search("the same words", 20)]
        assert names == sorted(names), "equal scores come in the order of the documents"

    def test_hits_are_chunks(self, opener: Opener) -> None:
        store = opener(HashModel())
        kept = chunk(
            "A “text”\r\nwith lines\t",
            7,
            "b/ü 😀.md",
            start_index=4,
            headings=["H", "Ü"],
            ratio=0.25,
            none=None,
        )
        store.add_documents([kept, *random_chunks(5)])
        hit = store.search(kept.text, k=1)[0]
        assert (hit.text, hit.metadata, hit.chunk_id) == (kept.text, kept.metadata, kept.chunk_id)
        hit.metadata["mine"] = True
        assert "mine" not in store.search(kept.text, k=1)[0].metadata

    def test_loading_again_replaces(self, opener: Opener) -> None:
        store = opener(HashModel())
        assert store.count() == 0
        assert store.add_documents([chunk("old", 1), chunk("kept", 2)]) == 2
        assert store.add_documents([chunk("new", 1)]) == 1
        assert store.count() == 2
        assert [found.text for found in store.get_chunks([("a.md", 1), ("a.md", 2)])] == ["new", "kept"]
        assert store.search("old", search_mode="keyword") == []

    def test_writes_go_in_batches(self, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        store = opener(HashModel(4))
        calls = spy(store, monkeypatch, "_write", "_settle")
        seen: list[tuple[int, int]] = []
        rows = [chunk(f"t{number}", number) for number in range(1, 2_101)]
        assert store.add_documents(rows, on_progress=lambda *numbers: seen.append(numbers)) == 2_100
        assert calls == [("_write", 1_000), ("_write", 1_000), ("_write", 100), ("_settle", 0)]
        assert seen == [(1_000, 2_100), (2_000, 2_100), (2_100, 2_100)]
        assert store.count() == 2_100

    def test_places(self, opener: Opener) -> None:
        store = opener(HashModel())
        rows = [
            chunk(f"{document} {number}", number, document)
            for document in ("a", "b")
            for number in range(1, 6)
        ]
        store.add_documents(rows)
        assert [found.sequence_number for found in store.neighbours(rows[2], 1)] == [2, 3, 4]
        assert [found.text for found in store.neighbours(rows[5], 2)] == ["b 1", "b 2", "b 3"]
        wanted = [("b", 5), ("a", 99), ("zz", 1), ("a", 1), ("b", 5), ("a", 0), ("a", -3)]
        assert [found.text for found in store.get_chunks(wanted)] == ["b 5", "a 1", "b 5"]
        assert store.get_chunks([]) == []

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        texts=st.lists(
            st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=60
            ),
            min_size=1,
            max_size=8,
        ),
        document=st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=40
        ),
    )
    def test_any_text_comes_back_unchanged(self, opener: Opener, texts: list[str], document: str) -> None:
        with opener(HashModel()) as store:
            rows = [chunk(text, number, document, heading=text) for number, text in enumerate(texts, 1)]
            store.add_documents(rows)
            assert store.get_chunks([(document, number) for number in range(1, len(texts) + 1)]) == rows
            for text in texts:
                store.search(text, search_mode="hybrid")
            store.drop()

    @pytest.mark.parametrize(
        "text",
        [
            *(
                "'",
                '"',
                "\\",
                "a' or 1=1 --",
                '"; drop',
                "{x} %s $1",
                "\n\r\t",
                "日本語の文",
                "שלום",
                "e\u0301",
                "😀👩‍👩‍👧",
            ),
            *("\u2028\u2029", "\u202e", "\ufeffbom", "</script>", "null", "x" * 65_535, "é" * 32_767),
        ],
        ids=lambda text: ascii(text[:12]),
    )
    def test_nasty_texts_and_names(self, opener: Opener, text: str) -> None:
        store = opener(HashModel())
        rows = [chunk(text, 1, text[:200]), chunk("other", 2, text[:200]), chunk("third", 1, "c.md")]
        store.add_documents(rows)
        assert store.get_chunks([(text[:200], 1)]) == rows[:1]
        assert [hit.text for hit in store.search(text, k=1)] == ([] if is_blank(text) else [text])
        assert store.neighbours(rows[0], 1) == rows[:2]
        store.search(text, search_mode="hybrid", k=3)

    BAD_CHUNKS = (
        (chunk("a\x00b"), "chunk 1 of 'a.md' contains a NUL"),
        (chunk("a\udc80"), "surrogate"),
        (chunk("é" * 32_768), "65,536 bytes"),
        (chunk(None), "no text but NoneType"),
        (chunk("t", 1, "a\x00.md"), "document_id contains a NUL"),
        (chunk("t", 1, "a\ud800"), "surrogate"),
        (chunk("t", 1, ""), "'' as document_id"),
        (chunk("t", 1, 7), "7 as document_id"),
        (chunk("t", 0), "0 as sequence_number"),
        (chunk("t", True), "True as sequence_number"),
        (chunk("t", "1"), "'1' as sequence_number"),
        (chunk("t", extra={1, 2}), "metadata of chunk 1"),
        (chunk("t", extra=float("nan")), "metadata of chunk 1"),
        (chunk("t", extra="x" * 70_000), "metadata of chunk 1"),
        (AI4RAGChunk("t", {}), "None as document_id"),
    )

    @pytest.mark.parametrize(("bad", "reason"), BAD_CHUNKS, ids=[reason for _, reason in BAD_CHUNKS])
    def test_bad_chunks_are_named_before_any_call(
        self, opener: Opener, monkeypatch: pytest.MonkeyPatch, bad: AI4RAGChunk, reason: str
    ) -> None:
        model = HashModel()
        store = opener(model)
        calls = spy(store, monkeypatch, "_write", "_settle")
        with pytest.raises(InputError, match=re.escape(reason)):
            store.add_documents([chunk("good", 2), bad])
        assert calls == [] and model.calls == [] and store.count() == 0

    BAD_VECTORS: tuple[tuple[Any, str], ...] = (
        ([[1.0] * 16, [0.0] * 16], "chunk 2 of 'a.md' is all zero"),
        ([[1.0] * 16, [float("nan")] * 16], "chunk 2 of 'a.md' contains values that are no finite"),
        ([[float("inf")] * 16, [1.0] * 16], "chunk 1 of 'a.md' contains"),
        ([[1.0] * 15, [1.0] * 15], "16 numbers"),
        ([[1.0] * 16], "2 chunks have 1 vectors"),
        ([[1.0] * 16, [1.0] * 15], "no table of numbers"),
        (["a", "b"], "no table of numbers"),
        (np.ones((2, 16, 1)), "shape"),
    )

    @pytest.mark.parametrize(("bad", "reason"), BAD_VECTORS, ids=[reason for _, reason in BAD_VECTORS])
    def test_bad_vectors_are_named_before_any_call(
        self, opener: Opener, monkeypatch: pytest.MonkeyPatch, bad: Any, reason: str
    ) -> None:
        store = opener(HashModel())
        calls = spy(store, monkeypatch, "_write", "_settle")
        with pytest.raises(InputError, match=re.escape(reason)):
            store.add_documents([chunk("one", 1), chunk("two", 2)], bad)
        assert calls == []

    def test_bad_questions_are_refused_before_any_call(
        self, opener: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = HashModel()
        store = opener(model)
        store.add_documents(random_chunks(10))
        calls = spy(store, monkeypatch, "_dense_hits", "_keyword_hits", "_fetch")
        for bad, reason in [
            ("a\x00", "NUL"),
            ("\ud800", "surrogate"),
            (None, "NoneType"),
            (7, "int"),
            ("x" * 65_536, "bytes"),
        ]:
            with pytest.raises(InputError, match=f"Question 2 .*{reason}"):
                store.search_many(["fine", bad], search_mode="hybrid")
        for wrong, reason in [
            ({"k": 0}, "k is 0"),
            ({"k": 16_385}, "16,384"),
            ({"k": 2.0}, "k is 2.0"),
            ({"search_mode": "vectors"}, "Did you mean 'vector'"),
            ({"search_mode": None}, "There are 'vector', 'keyword', 'hybrid'"),
            (
                {"search_mode": "hybrid", "ranker_strategy": "RRF"},
                "There are 'rrf', 'weighted', 'normalized'",
            ),
            ({"search_mode": "hybrid", "ranker_strategy": ""}, "There are 'rrf'"),
            ({"search_mode": "hybrid", "ranker_k": 0}, "ranker_k is 0"),
            ({"search_mode": "hybrid", "ranker_strategy": "weighted", "ranker_alpha": -0.1}, "ranker_alpha"),
            (
                {"search_mode": "hybrid", "ranker_strategy": "weighted", "ranker_alpha": float("nan")},
                "ranker_alpha",
            ),
        ]:
            with pytest.raises(InputError, match=re.escape(reason)):
                store.search("fine", **wrong)
        with pytest.raises(InputError, match="'bm25' is no leg"):
            store.search_legs(["fine"], ["bm25"])
        with pytest.raises(InputError, match="depth is 0"):
            store.search_legs(["fine"], depth=0)
        for vector, reason in [
            ([0.0] * 16, "is all zero"),
            ([float("nan")] * 16, "no finite"),
            ([1.0] * 3, "shape"),
        ]:
            model.embed_queries = lambda texts, row=vector: np.array([row] * len(texts))  # type: ignore[method-assign]
            with pytest.raises(InputError, match=reason):
                store.search("fine")
        assert calls == []

    def test_nothing_to_find(self, opener: Opener) -> None:
        store = opener(HashModel())
        store.add_documents(random_chunks(10))
        for blank in ("", "  ", "\n\t", "\u200b"):
            for mode in ("vector", "keyword", "hybrid"):
                assert store.search(blank, search_mode=mode) == []
        assert store.search("nowhere to be found", search_mode="keyword") == []
        assert store.search("?!… —", search_mode="keyword") == []
        hybrid = store.search("nowhere to be found", 3, "hybrid")
        assert [hit.chunk_id for hit in hybrid] == [
            hit.chunk_id for hit in store.search("nowhere to be found", 3)
        ]
        assert store.search_many([]) == []
        mixed = store.search_many(["", "word1", " "], k=2)
        assert [len(hits) for hits in mixed] == [0, 2, 0]
        assert len(store.search("word1", k=500)) == 10
        with pytest.raises(InputError, match="no chunks to load"):
            store.add_documents([])

    def test_names(self, opener: Opener) -> None:
        store = opener(HashModel())
        assert re.fullmatch(r"ai4rag_\d{14}_[0-9a-f]{8}", store.collection_name)
        for bad in (
            "1a",
            "a-b",
            "a.b",
            "é",
            "../x",
            "AI4RAG_X",
            "ai4rag_" + "x" * 57,
            "docs",
            "ai4rag_ x",
            "x\n",
        ):
            with pytest.raises(InputError, match="cannot name a collection"):
                opener(HashModel(), bad)
        assert len({new_collection_name() for _ in range(500)}) == 500

    def test_life(self, opener: Opener) -> None:
        model = HashModel()
        store = opener(model, "ai4rag_life")
        with pytest.raises(IndexingError, match="does not exist"):
            store.search("word1")
        with pytest.raises(IndexingError, match="does not exist"):
            store.get_chunks([("a.md", 1)])
        store.add_documents(random_chunks(20))
        before = store.search("word1", 5, "hybrid")
        store.close()
        store.close()
        for call in (
            lambda: store.search("word1"),
            store.count,
            store.drop,
            lambda: store.add_documents(random_chunks(1)),
        ):
            with pytest.raises(IndexingError, match="is closed"):
                call()
        again = opener(model, "ai4rag_life")
        assert again.count() == 20 and again.search("word1", 5, "hybrid") == before
        again.add_documents(random_chunks(5, seed=3, document="b.md"))
        assert again.count() == 25
        again.drop()
        again.drop()
        assert again.count() == 0
        again.add_documents(random_chunks(3))
        assert again.count() == 3

    def test_another_model_or_metric_is_refused(self, opener: Opener) -> None:
        opener(HashModel(16), "ai4rag_wrong").add_documents(random_chunks(3))
        with pytest.raises(VectorStoreInitializationError, match="16 numbers; the model makes 8"):
            opener(HashModel(8), "ai4rag_wrong")
        with pytest.raises(VectorStoreInitializationError, match="measures cosine, not ip"):
            opener(HashModel(16), "ai4rag_wrong", metric="ip")
        assert opener(HashModel(16), "ai4rag_wrong").count() == 3

    def test_collections_do_not_mix(self, opener: Opener) -> None:
        first, second = opener(HashModel()), opener(HashModel(8))
        first.add_documents(random_chunks(4))
        second.add_documents([chunk("elsewhere", 1)])
        assert (first.count(), second.count()) == (4, 1)
        assert second.search("word1 word2")[0].text == "elsewhere"
        second.close()
        assert len(first.search("word1")) == 4

    def test_threads_read_what_one_reads(self, opener: Opener) -> None:
        store = opener(HashModel())
        store.add_documents(random_chunks(200))
        questions = [f"word{n} word{n + 1}" for n in range(40)]
        expected = [store.search(question, 5, "hybrid") for question in questions]
        with ThreadPoolExecutor(10) as pool:
            found = list(pool.map(lambda question: store.search(question, 5, "hybrid"), questions * 3))
        assert found == expected * 3

    def test_reading_while_loading_is_never_wrong(self, opener: Opener) -> None:
        """Words that stay in one chunk are found in every moment of a load, by their own weights."""
        store = opener(HashModel(4))
        store.add_documents([chunk("needle " + "hay " * 5, 1, "needle.md"), *random_chunks(300)])
        done = threading.Event()
        wrong: list[Any] = []

        def read() -> None:
            while not done.is_set():
                hits = store.search("needle", search_mode="keyword")
                if [hit.document_id for hit in hits] != ["needle.md"]:
                    wrong.append(hits)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for part in range(6):
            store.add_documents(random_chunks(150, seed=part, document=f"{part}.md"))
        done.set()
        for reader in readers:
            reader.join()
        assert wrong == [] and store.count() == 1_201

    def test_threads_that_write_lose_nothing(self, opener: Opener) -> None:
        store = opener(HashModel(4), "ai4rag_writers")
        other = opener(HashModel(4), "ai4rag_writers")
        parts = [random_chunks(50, seed=part, document=f"{part}.md") for part in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda pair: pair[0].add_documents(pair[1]), zip([store, other] * 4, parts, strict=True)
                )
            )
        assert store.count() == 400
        TestContract.check_one_keyword(store, [row for part in parts for row in part])

    @staticmethod
    def check_one_keyword(store: BaseVectorStore, chunks: Sequence[AI4RAGChunk]) -> None:
        expected = sorted(bm25([chunk.text for chunk in chunks], "word30").values(), reverse=True)
        hits = store.search("word30", k=400, search_mode="keyword")
        np.testing.assert_allclose([hit.score for hit in hits], expected, rtol=1e-4)


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

    def test_other_stores_are_not_there_yet(self) -> None:
        for later in (MilvusConfig, PGVectorConfig):
            with pytest.raises(NotAvailableError, match="not available yet"):
                later()
        with pytest.raises(NotAvailableError, match="no configuration of a vector store"):
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
            assert threading.active_count() <= threads + 2
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
        assert len(prints) == 5

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

    @pytest.mark.parametrize("moment", ["named", "first batch", "flushed", "going on", "half"])
    def test_a_load_that_was_killed_is_found_and_built_again(self, tmp_path: Path, moment: str) -> None:
        """kill -9 between the record and its completion, while it stands still at three places, and while it goes on."""
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
                return 2000
            open_collection(CollectionRegistry(Cache.open(sys.argv[1])), Model(), MilvusLiteConfig(sys.argv[2]), "print", load)
        """)
        cache_path, store_path = str(tmp_path / "cache.sqlite"), str(tmp_path / "store.db")
        kill_after(start_child(code, cache_path, store_path, moment), "now")
        registry, config = CollectionRegistry(Cache.open(cache_path)), MilvusLiteConfig(store_path)
        assert [record.state for record in registry.records()] == ["loading"]
        orphans = find_orphans(registry, config)
        assert set(orphans) <= {registry.records()[0].collection_name}
        loaded = []

        def load(store: BaseVectorStore) -> int:
            loaded.append(store.collection_name)
            return store.add_documents(random_chunks(2_000))

        opened = open_collection(registry, HashModel(4), config, "print", load)
        assert not opened.reused and opened.store.count() == 2_000 and len(loaded) == 1
        opened.store.close()
        assert list_collections(config) == {loaded[0]: 2_000}
        assert [(record.state, record.chunks) for record in registry.records()] == [("complete", 2_000)]
        registry.cache.close()

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

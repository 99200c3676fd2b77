"""What every vector store keeps, whatever the product: one test class, run over each of them.

A product joins with a subclass whose name begins with `Test` and a fixture `opener` that gives a function
`(model, name=None, metric="cosine", **settings) -> store` and closes what it opened.
"""

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import IndexingError, InputError, VectorStoreInitializationError
from ai4rag_nb.foundations.texts import is_blank
from ai4rag_nb.indexing.fusion import LEGS, fuse_legs
from ai4rag_nb.indexing.hit_lists import hit_name
from ai4rag_nb.indexing.store_checks import StoredRow, check_rows, new_collection_name, row_key
from ai4rag_nb.indexing.vector_store import BaseVectorStore

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


def bm25(
    texts: Sequence[str], query: str, k1: float = 1.5, b: float = 0.75, mean: float | None = None
) -> dict[int, float]:
    """Score the texts that share a word with the query, straight from the definition."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    lengths = [sum(bag.values()) for bag in bags]
    mean = mean or sum(lengths) / len(lengths)
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
INHERITED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]  # one test, many products


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


class StoreContract:
    """What the rest of the toolkit relies on, whatever the store. Subclasses have a fixture `opener`."""

    mode = "native"  # the keyword mode of the configurations that the opener makes
    native_k1: float | None = 1.5  # k1 of the product's BM25; None when its keyword search is no BM25
    many_rows = 2_100  # rows of the largest load
    modes: tuple[str, ...] = ("vector", "keyword", "hybrid")  # what the product can do, the most last

    @property
    def words(self) -> bool:
        return "keyword" in self.modes

    def needs_words(self) -> None:
        if not self.words:
            pytest.skip("this product searches by vectors only")

    @property
    def keyword_hook(self) -> str:
        return "_sparse_hits" if self.mode == "bm25" else "_keyword_hits"

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
        self.needs_words()
        chunks = random_chunks(200, seed=loads)
        store = opener(HashModel())
        for part in range(loads):
            store.add_documents(chunks[part::loads])
        self.check_keywords(store, chunks)

    def test_keyword_search_after_texts_were_replaced(self, opener: Opener) -> None:
        self.needs_words()
        chunks = random_chunks(120)
        store = opener(HashModel())
        store.add_documents(chunks)
        fresh = random_chunks(40, seed=9)
        store.add_documents(fresh)
        self.check_keywords(store, fresh + chunks[40:])

    def reference(self, store: BaseVectorStore, texts: Sequence[str], query: str) -> dict[int, float]:
        """Score texts by the definition, with the mean that our weights were written with."""
        if self.mode == "native":
            return bm25(texts, query, self.native_k1 or 1.2)
        assert store.keyword_index is not None
        mean = store.keyword_index.refresh().mean
        true = sum(len(re.findall(r"\w+", text)) for text in texts) / len(texts)
        assert abs(true - mean) <= 0.05 * mean, "the weights are at most 5 % away"
        return bm25(texts, query, 1.2, mean=mean)

    def check_keywords(self, store: BaseVectorStore, chunks: Sequence[AI4RAGChunk]) -> None:
        if not self.words:
            return
        texts = [chunk.text for chunk in chunks]
        queries = ("word3", "word50 word7", "Word40, word41; WORD42?", "word1 word1 word59", "word0 nothing")
        for query, hits in zip(queries, store.search_many(queries, 500, "keyword"), strict=True):
            expected = self.reference(store, texts, query)
            found = {(hit.document_id, hit.sequence_number): hit.score for hit in hits}
            places = {(chunks[n].document_id, chunks[n].sequence_number): n for n in expected}
            assert found.keys() == places.keys()
            if self.mode == "bm25" or self.native_k1:
                for place, n in places.items():
                    assert found[place] == pytest.approx(expected[n], rel=1e-4)
            ranked = np.array([hit.score for hit in hits])
            np.testing.assert_allclose(ranked, np.sort(ranked)[::-1], rtol=1e-5)
            assert all(hit.score > 0 and hit.scores == {"keyword": hit.score} for hit in hits)

    @pytest.mark.parametrize("strategy", ["rrf", "weighted", "normalized", "zscore"])
    def test_hybrid_is_our_fusion_of_deep_legs(self, opener: Opener, strategy: str) -> None:
        self.needs_words()
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
        self.needs_words()
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
        alone = [store.search(question, 7, self.modes[-1]) for question in questions[:40]]
        hooks = ["_dense_hits", self.keyword_hook] if self.words else ["_dense_hits"]
        calls = spy(store, monkeypatch, *hooks)
        model.calls.clear()
        together = store.search_many(questions, 7, self.modes[-1])
        assert calls == [(hook, 40) for hook in hooks] and model.calls == [40]
        assert together[:40] == together[40:]
        for one, many in zip(alone, together[:40], strict=True):
            assert [hit.chunk_id for hit in one] == [hit.chunk_id for hit in many]
            np.testing.assert_allclose([hit.score for hit in one], [hit.score for hit in many], rtol=1e-5)

    def test_shorter_lists_begin_longer_ones(self, opener: Opener) -> None:
        store = opener(HashModel())
        twins = [chunk("the same words", number, f"twin{number}.md") for number in range(1, 31)]
        store.add_documents([*random_chunks(80), *twins])
        for mode in self.modes:
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
        if self.words:
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

    @settings(max_examples=15, deadline=None, suppress_health_check=INHERITED)
    @given(
        texts=st.lists(
            st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=60
            ).filter(lambda text: not is_blank(text)),
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
                store.search(text, search_mode=self.modes[-1])
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
                "\n\r\ta",
                "日本語の文",
                "שלום",
                "e\u0301",
                "😀👩‍👩‍👧",
            ),
            *("a\u2028\u2029", "\u202ea", "\ufeffbom", "</script>", "null", "x" * 65_535, "é" * 32_767),
        ],
        ids=lambda text: ascii(text[:12]),
    )
    def test_nasty_texts_and_names(self, opener: Opener, text: str) -> None:
        store = opener(HashModel())
        rows = [chunk(text, 1, text[:200]), chunk("other", 2, text[:200]), chunk("third", 1, "c.md")]
        store.add_documents(rows)
        assert store.get_chunks([(text[:200], 1)]) == rows[:1]
        assert [hit.text for hit in store.search(text, k=1)] == [text]
        assert store.neighbours(rows[0], 1) == rows[:2]
        store.search(text, search_mode=self.modes[-1], k=3)

    BAD_CHUNKS = (
        (chunk("a\x00b"), "chunk 1 of 'a.md' contains a NUL"),
        (chunk("a\udc80"), "surrogate"),
        (chunk("é" * 32_768), "65,536 bytes"),
        (chunk(None), "no text but NoneType"),
        (chunk(""), "The text of chunk 1 of 'a.md' is empty. Leave the chunk out."),
        (chunk(" \n\u200b"), "The text of chunk 1 of 'a.md' is empty"),
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
        calls = spy(store, monkeypatch, "_dense_hits", "_keyword_hits", "_sparse_hits", "_fetch")
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
            for mode in self.modes:
                assert store.search(blank, search_mode=mode) == []
        if self.words:
            assert store.search("nowhere to be found", search_mode="keyword") == []
            assert store.search("?!… —", search_mode="keyword") == []
        hybrid = store.search("nowhere to be found", 3, self.modes[-1])
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
        before = store.search("word1", 5, self.modes[-1])
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
        assert again.count() == 20 and again.search("word1", 5, self.modes[-1]) == before
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
        if self.words:
            other = "native" if self.mode == "bm25" else "bm25"
            with pytest.raises(VectorStoreInitializationError, match=f"keyword='{self.mode}', not '{other}'"):
                opener(HashModel(16), "ai4rag_wrong", keyword=other)
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
        expected = [store.search(question, 5, self.modes[-1]) for question in questions]
        with ThreadPoolExecutor(10) as pool:
            found = list(pool.map(lambda question: store.search(question, 5, self.modes[-1]), questions * 3))
        assert found == expected * 3

    def test_reading_while_loading_is_never_wrong(self, opener: Opener) -> None:
        """Words that stay in one chunk are found in every moment of a load, by their own weights."""
        store = opener(HashModel(4))
        needle = chunk("needle " + "hay " * 5, 1, "needle.md")
        asked = ("needle", 5, "keyword") if self.words else (needle.text, 1, "vector")
        store.add_documents([needle, *random_chunks(300)])
        done = threading.Event()
        wrong: list[Any] = []

        def read() -> None:
            while not done.is_set():
                hits = store.search(*asked)
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
        self.check_keywords(store, [row for part in parts for row in part])

    # --- documents: filters, changes, read-back ---

    def test_a_search_is_kept_to_documents(self, opener: Opener) -> None:
        store, model = opener(HashModel()), HashModel()
        names = ["a.md", "b/ü 😀.md", "c' or ''='.md", 'd" in ["x"] or "1"=="1.md']
        rows = [row for n, name in enumerate(names) for row in random_chunks(40, seed=n, document=name)]
        store.add_documents(rows)
        for mode in self.modes:
            for wanted in ([names[2]], [names[3], names[1]], [*names, "nobody.md"]):
                hits = store.search("word0 word1 word2", 200, mode, document_ids=wanted)
                assert {hit.document_id for hit in hits} == set(wanted) & set(names)
                alone = store.search_many(["word9", "word0 word1 word2"], 200, mode, document_ids=wanted)[1]
                assert [hit.chunk_id for hit in alone] == [hit.chunk_id for hit in hits]
            for nobody in (["nobody.md"], [], ["' or 1=1 --"], ["%"], ["*"]):
                assert store.search("word0", 5, mode, document_ids=nobody) == []
        asked = model.embed_query("word5")
        table = model.embed_documents([row.text for row in rows[40:80]])
        best = np.argsort(-(table @ asked) / np.linalg.norm(table, axis=1), kind="stable")[:7]
        hits = store.search("word5", 7, document_ids=[names[1]])
        assert [hit.sequence_number - 1 for hit in hits] == best.tolist()
        legs = store.search_legs(["word5"], LEGS if self.words else ["dense"], document_ids=[names[0]])[0]
        assert {hit.document_id for leg in legs.values() for hit in leg} == {names[0]}
        with pytest.raises(InputError, match="document ids are one text"):
            store.search("word0", document_ids="a.md")
        with pytest.raises(InputError, match="document_id is no text but int"):
            store.search("word0", document_ids=[7])

    def test_documents_come_change_and_go(self, opener: Opener) -> None:
        store = opener(HashModel())
        parts = {name: random_chunks(30, seed=n, document=name) for n, name in enumerate(("a", "b", "c"))}
        store.add_documents([row for rows in parts.values() for row in rows])
        assert store.documents() == {"a": 30, "b": 30, "c": 30}
        revision = store.revision
        assert store.delete_documents(["b", "nobody"]) == 30 and store.revision > revision
        assert store.delete_documents(["b"]) == 0 and store.delete_documents([]) == 0
        assert store.count() == 60 and store.get_chunks([("b", 1)]) == []
        self.check_keywords(store, parts["a"] + parts["c"])
        parts["a"] = random_chunks(12, seed=9, document="a")
        parts["b"] = random_chunks(3, seed=8, document="b")
        assert store.replace_documents(parts["a"] + parts["b"]) == 15
        now = [row for rows in parts.values() for row in rows]
        assert store.documents() == {"a": 12, "b": 3, "c": 30}
        assert store.verify(now).whole
        self.check_keywords(store, now)
        hits = store.search_many([row.text for row in parts["a"]], k=1)
        assert [found[0].chunk_id for found in hits] == [row.chunk_id for row in parts["a"]]
        store.delete_documents(["a", "b", "c"])
        assert store.count() == 0 and store.documents() == {}
        for mode in self.modes:
            assert store.search("word1", 5, mode) == []
        store.add_documents(parts["c"])
        self.check_keywords(store, parts["c"])

    @settings(max_examples=8, deadline=None, suppress_health_check=INHERITED)
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["add", "replace", "delete"]), st.sampled_from("abc"), st.integers(1, 9)
            ),
            min_size=1,
            max_size=7,
        )
    )
    def test_any_changes_end_where_a_fresh_load_does(
        self, opener: Opener, steps: list[tuple[str, str, int]]
    ) -> None:
        with opener(HashModel()) as store:
            held: dict[tuple[str, int], AI4RAGChunk] = {}
            for place, (step, name, size) in enumerate(steps):
                rows = random_chunks(size, seed=place, document=name)
                if step != "add":
                    held = {key: row for key, row in held.items() if key[0] != name}
                if step == "delete":
                    store.delete_documents([name])
                    continue
                (store.add_documents if step == "add" else store.replace_documents)(rows)
                held |= {(name, row.sequence_number): row for row in rows}
            assert store.verify(list(held.values())).whole and store.count() == len(held)
            if held:
                self.check_keywords(store, list(held.values()))
            store.drop()

    def test_what_was_changed_behind_our_back_is_found(self, opener: Opener) -> None:
        store = opener(HashModel())
        rows = random_chunks(20)
        assert store.verify(rows).missing[0] == "chunk 1 of 'a.md'" and store.documents() == {}
        store.add_documents(rows)
        report = store.verify(rows)
        assert report.whole and (report.expected, report.found) == (20, 20)
        store._delete([row_key("a.md", 7)])
        cut = StoredRow(row_key("a.md", 9), "shorter", check_rows([rows[8]])[0].metadata)
        extra = check_rows([chunk("nobody asked", 1, "b.md")])[0]
        sparse = [{0: 1.0}] * 2 if self.mode == "bm25" else None
        store._write([cut, extra], np.ones((2, 16), dtype=np.float32), sparse)
        store._settle()
        report = store.verify(rows)
        assert not report.whole and report.found == 20
        assert report.missing == ("chunk 7 of 'a.md'",)
        assert report.different == ("chunk 9 of 'a.md'",)
        assert report.unexpected == ("chunk 1 of 'b.md'",)
        assert "1 missing: chunk 7 of 'a.md'; 1 different" in str(report)
        store.replace_documents(rows)
        store.delete_documents(["b.md"])
        assert store.verify(rows).whole

    def test_a_broken_load_goes_on_where_it_was(
        self, opener: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, rows = opener(HashModel(4), "ai4rag_broken"), random_chunks(self.many_rows)
        real, written = type(store)._write, []

        def failing(self: Any, batch: Any, *rest: Any) -> None:
            if len(written) == 2:
                raise OSError("the server is gone")
            written.append(len(batch))
            real(self, batch, *rest)

        monkeypatch.setattr(type(store), "_write", failing)
        with pytest.raises(OSError, match="the server is gone"):
            store.add_documents(rows)
        store.close()
        monkeypatch.setattr(type(store), "_write", real)
        store = opener(HashModel(4), "ai4rag_broken")
        calls = spy(store, monkeypatch, "_write")
        seen: list[tuple[int, int]] = []
        assert store.add_documents(rows, on_progress=lambda *at: seen.append(at), resume=True) == len(rows)
        assert calls == [("_write", len(rows) - 2_000)] and seen[-1] == (len(rows), len(rows))
        assert store.verify(rows).whole
        if self.mode == "bm25":
            assert store.keyword_index is not None and store.keyword_index.statistics.chunks == len(rows)

    def test_notes_stand_beside_the_collection(self, opener: Opener) -> None:
        store = opener(HashModel(), "ai4rag_noted")
        assert store._read_notes() == {} == store._read_notes(["a"])
        store._write_notes({"a": "é" * 30_000, "b": "'; drop --"})
        assert store.count() == 0
        store.add_documents(random_chunks(3))
        store._write_notes({"b": "new", "c": '\\ \n" 😀'})
        store.close()
        store = opener(HashModel(), "ai4rag_noted")
        kept = {name: note for name, note in store._read_notes().items() if len(name) == 1}
        assert kept == {"a": "é" * 30_000, "b": "new", "c": '\\ \n" 😀'}
        assert store._read_notes(["b", "never"]) == {"b": "new"}
        assert store.count() == 3 and store.documents() == {"a.md": 3}
        store.drop()
        assert store._read_notes() == {}

    def test_collections_are_listed_and_dropped_by_name(self, opener: Opener) -> None:
        store, other = opener(HashModel(4), "ai4rag_listed"), opener(HashModel(4), "ai4rag_other")
        store.add_documents(random_chunks(3))
        other.add_documents(random_chunks(2))
        kind, config = type(store), store.config
        assert {"ai4rag_listed": 3, "ai4rag_other": 2}.items() <= kind.list_collections(config).items()
        assert all(name.startswith("ai4rag_") for name in kind.list_collections(config))
        other.close()
        assert kind.drop_collections(config, ["ai4rag_other"]) == ["ai4rag_other"]
        assert "ai4rag_other" not in kind.list_collections(config)
        again = opener(HashModel(4), "ai4rag_other")
        assert again.count() == 0 and again._read_notes() == {}

    def test_the_store_says_what_it_is(self, opener: Opener) -> None:
        store = opener(HashModel())
        facts = store.properties()
        assert facts.product and facts.keyword_search and facts.largest_dimension >= 2_000
        assert store.capabilities() <= {"vector", "keyword", "hybrid"} and "vector" in store.capabilities()
        assert store.config.binding()["provider_type"] == store.config.provider

"""Fusion, passages, retrievers and pipelines: what must hold for any input."""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.chunks import AI4RAGChunk, RetrievedChunk
from ai4rag_nb.foundations.errors import GenerationError, InputError, NotAvailableError, StoppedError
from ai4rag_nb.foundations.events import StopFlag
from ai4rag_nb.indexing.fusion import (
    fuse_legs,
    normalized_fusion,
    rank_hits,
    reciprocal_rank_fusion,
    weighted_fusion,
    zscore_fusion,
)
from ai4rag_nb.indexing.hit_lists import HitLists, hit_name, ranked_hits
from ai4rag_nb.indexing.search_settings import SearchSettings, search_depth
from ai4rag_nb.indexing.store_checks import RANKER_STRATEGIES
from ai4rag_nb.indexing.vector_store import BaseVectorStore, MilvusLiteConfig, get_vector_store
from ai4rag_nb.querying.compression import ExtractiveCompression, extracted
from ai4rag_nb.querying.context_budget import cut_passage
from ai4rag_nb.querying.context_order import ChunkHeaders, ContextOrder, with_header
from ai4rag_nb.querying.generation import BaseFoundationModel, Generation
from ai4rag_nb.querying.hit_list_cache import HitListCache
from ai4rag_nb.querying.passages import choose_chunks, cut_to_budget, merge_passages, place_of, window_places
from ai4rag_nb.querying.rag import SimpleRAG, query_rag
from ai4rag_nb.querying.retriever import Retriever
from ai4rag_nb.querying.sentences import split_sentences
from ai4rag_nb.querying.small_to_big import ParentExpansion

scored = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.floats(0.01, 50, allow_nan=False)),
    max_size=8,
    unique_by=lambda hit: hit[0],
).map(rank_hits)
legs_strategy = st.fixed_dictionaries({"dense": scored, "keyword": scored})


class TestFusion:
    @given(legs_strategy, st.sampled_from(RANKER_STRATEGIES), st.floats(0, 1))
    def test_every_hit_once_best_first(self, legs: dict, strategy: str, alpha: float) -> None:
        fused = fuse_legs(legs, strategy, alpha=alpha, metric="ip")
        assert {name for name, _ in fused} == {name for hits in legs.values() for name, _ in hits}
        assert len(fused) == len({name for name, _ in fused})
        scores = [score for _, score in fused]
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(scores))
        for (first, one), (second, other) in pairwise(fused):
            assert one != other or first < second

    @given(legs_strategy)
    def test_reciprocal_ranks_by_definition(self, legs: dict) -> None:
        expected: dict[str, float] = {}
        for hits in legs.values():
            for place, (name, _) in enumerate(hits, 1):
                expected[name] = expected.get(name, 0) + 1 / (60 + place)
        assert dict(reciprocal_rank_fusion(legs)) == pytest.approx(expected)

    @given(legs_strategy)
    def test_the_order_of_the_legs_does_not_matter(self, legs: dict) -> None:
        turned = dict(reversed(legs.items()))
        for strategy in RANKER_STRATEGIES:
            assert fuse_legs(legs, strategy) == fuse_legs(turned, strategy)

    @given(legs_strategy)
    def test_one_leg_alone_keeps_its_order(self, legs: dict) -> None:
        only = [name for name, _ in legs["dense"]]
        for fused in (
            reciprocal_rank_fusion({"dense": legs["dense"], "keyword": []}),
            weighted_fusion({"dense": legs["dense"]}, 1.0, "ip"),
            normalized_fusion({"dense": legs["dense"]}, 1.0),
            zscore_fusion({"dense": legs["dense"]}, 1.0),
        ):
            scores = dict(fused)
            assert sorted(scores) == sorted(only)
            kept = [scores[name] for name in only]
            assert all(later <= earlier + 1e-9 for earlier, later in pairwise(kept))

    @given(legs_strategy, st.floats(0, 1))
    def test_weighted_and_normalized_stay_between_0_and_1(self, legs: dict, alpha: float) -> None:
        for fused in (weighted_fusion(legs, alpha, "ip"), normalized_fusion(legs, alpha)):
            assert all(-1e-12 <= score <= 1 + 1e-12 for _, score in fused)

    @given(
        st.dictionaries(st.text(min_size=1, max_size=4), scored, min_size=1, max_size=5),
        st.sampled_from(RANKER_STRATEGIES),
        st.data(),
    )
    def test_any_number_of_legs_by_definition(self, legs: dict, strategy: str, data: st.DataObject) -> None:
        """Each strategy against a table with a row for each hit and a column for each leg."""
        weights = {leg: data.draw(st.floats(0.1, 9), label=leg) for leg in legs}
        scales = dict.fromkeys(legs, "keyword")
        fused = dict(fuse_legs(legs, strategy, 7, weights=weights, scales=scales))
        names = sorted({name for hits in legs.values() for name, _ in hits})
        table = np.zeros((len(names), len(legs)))
        for column, hits in enumerate(legs.values()):
            found = np.array([score for _, score in hits])
            spread = float(np.ptp(found)) if hits else 0.0
            for place, (name, score) in enumerate(hits, 1):
                table[names.index(name), column] = {
                    "rrf": len(legs) / (7 + place),
                    "weighted": math.atan(score) * 2 / math.pi,
                    "normalized": (score - found.min()) / spread if spread else 1.0,
                    "zscore": (score - found.min()) / found.std() if spread else 1.0,
                }[strategy]
        expected = table @ (np.array(list(weights.values())) / sum(weights.values()))
        assert fused.keys() == set(names)
        assert [fused[name] for name in names] == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)

    @given(legs_strategy, st.floats(0.01, 0.99), st.sampled_from(RANKER_STRATEGIES[1:]))
    def test_alpha_is_a_weight(self, legs: dict, alpha: float, strategy: str) -> None:
        by_weight = fuse_legs(
            legs, strategy, metric="ip", weights={"dense": 5 * alpha, "keyword": 5 * (1 - alpha)}
        )
        by_alpha = fuse_legs(legs, strategy, alpha=alpha, metric="ip")
        assert dict(by_weight) == pytest.approx(dict(by_alpha), abs=1e-9)

    @given(legs_strategy, st.sampled_from(RANKER_STRATEGIES))
    def test_a_leg_without_weight_only_adds_its_hits_at_the_end(self, legs: dict, strategy: str) -> None:
        fused = fuse_legs(legs, strategy, metric="ip", weights={"dense": 2, "keyword": 0})
        alone = fuse_legs({"dense": legs["dense"]}, strategy, alpha=1.0, metric="ip")
        scores = dict(fused)
        for name, _ in alone:
            assert scores[name] >= max(
                (scores[other] for other in scores.keys() - dict(alone).keys()), default=0
            )

    def test_raw_scores_of_different_legs_are_never_compared(self) -> None:
        small = {"dense": [("a", 0.9), ("b", 0.1)], "keyword": [("b", 2.0), ("a", 1.0)]}
        large = {**small, "keyword": [("b", 2000.0), ("a", 1000.0)]}
        assert fuse_legs(small, "rrf") == fuse_legs(large, "rrf")
        assert fuse_legs(small, "normalized") == fuse_legs(large, "normalized")
        assert fuse_legs(large, "weighted", alpha=0.9)[0][0] == "a"

    def test_constant_legs_and_single_hits(self) -> None:
        assert normalized_fusion({"dense": [("a", 0.5), ("b", 0.5)], "keyword": []}, 0.5) == [
            ("a", 0.5),
            ("b", 0.5),
        ]
        assert normalized_fusion({"dense": [("a", 0.2)], "keyword": [("b", 9.0)]}, 0.7) == [
            ("a", 0.7),
            ("b", pytest.approx(0.3)),
        ]

    def test_noise_in_the_last_bits_changes_nothing(self) -> None:
        assert [name for name, _ in rank_hits([("b", 0.70000002), ("a", 0.7)])] == ["a", "b"]
        assert [name for name, _ in rank_hits([("b", 0.70002), ("a", 0.7)])] == ["b", "a"]

    @given(st.integers(1, 16_384))
    def test_depth(self, k: int) -> None:
        assert k <= search_depth(k) <= 16_384
        assert search_depth(k) >= min(2 * k, 16_384)
        assert search_depth(1) == 50


def retrieved(
    number: int, text: str, start: int, end: int, document: str = "a", rank: int = 1
) -> RetrievedChunk:
    place = {"document_id": document, "sequence_number": number, "start_index": start, "end_index": end}
    return RetrievedChunk(text, place, score=1 / rank, scores={"dense": 1 / rank})


@st.composite
def cut_documents(draw: st.DrawFn) -> tuple[str, list[RetrievedChunk]]:
    """A text cut into chunks as chunkers do: with overlap, without, or with white space left out between them."""
    text = draw(st.text("ab \n.", min_size=1, max_size=200)).strip() or "a"
    chunks: list[RetrievedChunk] = []
    start = 0
    while start < len(text):
        end = min(len(text), start + draw(st.integers(1, 30)))
        prefix = draw(st.sampled_from(["", "Title > Part\n"]))
        chunks.append(retrieved(len(chunks) + 1, prefix + text[start:end], start, end))
        if end == len(text):
            break
        overlap = draw(st.integers(0, end - start - 1))
        start = end - overlap
    return text, chunks


class TestPassages:
    @settings(max_examples=200, deadline=None)
    @given(cut_documents(), st.data())
    def test_merged_text_is_the_documents_own(
        self, cut: tuple[str, list[RetrievedChunk]], data: st.DataObject
    ) -> None:
        text, chunks = cut
        hits = data.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=5, unique_by=place_of))
        window = data.draw(st.integers(0, 3))
        fetched = {place_of(chunk): chunk for chunk in chunks}
        passages = merge_passages(hits, choose_chunks(hits, fetched, window))
        covered: set[int] = set()
        for passage in passages:
            start, end = passage.start_index, passage.end_index
            body = passage.text.removeprefix("Title > Part\n")
            assert body == text[start:end], "each text once, in reading order"
            numbers = passage.metadata["sequence_numbers"]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert not covered & set(numbers)
            covered |= set(numbers)
        expected = {
            number
            for hit in hits
            for number in range(hit.sequence_number - window, hit.sequence_number + window + 1)
            if 1 <= number <= len(chunks)
        }
        assert covered == expected
        ranks = [
            hits.index(next(hit for hit in hits if hit.sequence_number == p.sequence_number))
            for p in passages
        ]
        assert ranks == sorted(ranks) and ranks[0] == 0, "the passage with the best hit comes first"

    @settings(max_examples=200, deadline=None)
    @given(cut_documents(), st.data())
    def test_every_hit_is_found_at_its_position(
        self, cut: tuple[str, list[RetrievedChunk]], data: st.DataObject
    ) -> None:
        _, chunks = cut
        hits = data.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=4, unique_by=place_of))
        passages = merge_passages(hits, choose_chunks(hits, {place_of(c): c for c in chunks}, 1))
        marked = [passage.text[a:b] for passage in passages for a, b in passage.metadata["hit_positions"]]
        bodies = [hit.text.removeprefix("Title > Part\n") for hit in hits]
        assert sorted(mark.removeprefix("Title > Part\n") for mark in marked) == sorted(bodies)

    def test_hits_at_3_4_and_6_make_one_passage(self) -> None:
        chunks = [retrieved(n, f"<{n}>", n * 3, n * 3 + 3) for n in range(1, 10)]
        hits = [chunks[5], chunks[2], chunks[3]]
        (passage,) = merge_passages(hits, choose_chunks(hits, {place_of(c): c for c in chunks}, 1))
        assert passage.text == "<2><3><4><5><6><7>"
        assert (passage.sequence_number, passage.score) == (6, hits[0].score)

    def test_gaps_are_white_space(self) -> None:
        text = "First part. \n\n Second part. Third."
        chunks = [
            retrieved(1, "First part.", 0, 11),
            retrieved(2, "Second part.", 15, 27),
            retrieved(3, "Third.", 28, 34),
        ]
        (passage,) = merge_passages(chunks, chunks)
        assert passage.text == "First part.\n\nSecond part.\nThird."
        assert text[passage.start_index : passage.end_index] == text

    def test_table_groups_keep_one_header(self) -> None:
        header, rows = "| a | b |\n|---|---|\n", ["| 1 | 2 |\n", "| 3 | 4 |\n", "| 5 | 6 |\n"]
        source = header + "".join(rows)
        chunks, start = [], len(header)
        for number, row in enumerate(rows, 1):
            begin = 0 if number == 1 else start
            chunks.append(retrieved(number, header + row, begin, start + len(row)))
            start += len(row)
        (passage,) = merge_passages(chunks[:1], chunks)
        assert passage.text == source

    def test_chunks_without_places(self) -> None:
        def bare(number: int, text: str) -> RetrievedChunk:
            return RetrievedChunk(text, {"document_id": "a", "sequence_number": number})

        chunks = [bare(1, "the early bird"), bare(2, "early bird catches the worm"), bare(3, "elsewhere")]
        (passage,) = merge_passages(chunks[:1], chunks)
        assert passage.text == "the early bird catches the worm\nelsewhere"
        assert passage.end_index is None
        assert passage.metadata["hit_positions"] == [(0, 14)]

    @settings(max_examples=150, deadline=None)
    @given(cut_documents(), st.integers(1, 60), st.integers(0, 2), st.data())
    def test_budget_is_kept_and_hits_come_first(
        self, cut: tuple[str, list[RetrievedChunk]], budget: int, window: int, data: st.DataObject
    ) -> None:
        _, chunks = cut
        hits = data.draw(st.lists(st.sampled_from(chunks), min_size=1, max_size=4, unique_by=place_of))
        chosen = choose_chunks(hits, {place_of(c): c for c in chunks}, window, budget, characters)
        assert sum(characters([chunk.text for chunk in chosen])) <= budget
        places = [place_of(chunk) for chunk in chosen]
        order = window_places(hits, window)
        assert places == sorted(places, key=order.index)
        kept_hits = [hit for hit in hits if place_of(hit) in places]
        for passage in merge_passages(hits, chosen):
            assert any(place_of(hit)[1] in passage.metadata["sequence_numbers"] for hit in kept_hits), (
                "no stray neighbour"
            )
        cheapest = min(characters([hit.text for hit in hits]))
        assert bool(kept_hits) == (cheapest <= budget)

    @given(st.text("ab ", min_size=1, max_size=60).filter(str.strip), st.integers(0, 40))
    def test_cut_fits(self, text: str, budget: int) -> None:
        for cut in cut_to_budget(retrieved(1, text, 0, len(text)), budget, characters):
            assert 0 < len(cut.text) <= budget and text.startswith(cut.text)
            assert cut.metadata["cut"] and cut.end_index == len(cut.text)


def characters(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


class Counter:
    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]


class BagModel:
    """Embed texts by their words: deterministic, and texts that share words are near."""

    dimension = 64

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def embed_documents(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        rows = np.full((len(texts), self.dimension), 0.01, dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().replace(".", " ").replace("?", " ").split():
                row[sum(map(ord, word)) % self.dimension] += 1
        return rows

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        self.asked.append(list(texts))
        return self.embed_documents(texts)


SENTENCES = [f"Step {n} turns part {chr(97 + n % 26)}{n} of the machine." for n in range(1, 26)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseVectorStore]:
    chunks = []
    for document in ("one.md", "two.md"):
        start = 0
        for number, sentence in enumerate(SENTENCES, 1):
            text = f"{document}: {sentence}"
            place = {
                "document_id": document,
                "sequence_number": number,
                "start_index": start,
                "end_index": start + len(text),
            }
            chunks.append(AI4RAGChunk(text, place))
            start += len(text) + 1
    path = tmp_path_factory.mktemp("retrieval") / "store.db"
    with get_vector_store(BagModel(), MilvusLiteConfig(path)) as opened:  # type: ignore[arg-type]
        opened.add_documents(chunks)
        yield opened


CHOICES: list[dict[str, Any]] = [
    {"number_of_chunks": k, **mode, **method}
    for k in (1, 3, 10, 25)
    for mode in (
        {"search_mode": "vector", "ranker_strategy": ""},
        {"search_mode": "keyword"},
        {"search_mode": "hybrid", "ranker_strategy": "rrf", "ranker_k": 10},
        {"search_mode": "hybrid", "ranker_strategy": "weighted", "ranker_alpha": 0.3},
        {"search_mode": "hybrid", "ranker_strategy": "normalized"},
    )
    for method in (
        {},
        {"retrieval_method": "window", "window_size": 2},
        {"context_budget": 25, "token_counter": Counter()},
    )
]
QUESTIONS = ["Which step turns part c2?", "part z25 of two.md", "unrelated words only", "Step 25"]


def assert_alike(one: list[list[RetrievedChunk]], other: list[list[RetrievedChunk]]) -> None:
    """The same hits in the same order, their scores equal but for the last bits."""
    for first, second in zip(one, other, strict=True):
        assert [hit.chunk_id for hit in first] == [hit.chunk_id for hit in second]
        for hit, twin in zip(first, second, strict=True):
            assert hit.scores == pytest.approx(twin.scores, rel=1e-5) and hit.metadata == twin.metadata


class FourTogether(ParentExpansion):
    """Read four chunks in a row around each hit."""

    stage_name = "parent"

    def apply_many(self, questions: Any, hits: Any, setting: Any) -> Any:
        return super().apply_many(
            questions, [[self.related(hit) for hit in found] for found in hits], setting
        )

    def related(self, hit: RetrievedChunk) -> RetrievedChunk:
        first = (hit.sequence_number - 1) // 4 * 4 + 1
        return replace(hit, metadata={**hit.metadata, "families": [[first, min(25, first + 3)]]})


class TestRetriever:
    def test_hit_lists_change_nothing_and_save_calls(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alone = [Retriever(store, **choice).retrieve_many(QUESTIONS) for choice in CHOICES]
        lists, calls = HitListCache(), []
        for name in ("_dense_hits", "_keyword_hits"):
            real = getattr(store, name)
            monkeypatch.setattr(store, name, lambda *a, real=real: calls.append(a) or real(*a))
        together = [
            Retriever(store, hit_lists=lists, **choice).retrieve_many(QUESTIONS) for choice in CHOICES
        ]
        assert together == alone
        assert len(calls) == lists.store_calls == 2, "one call for each leg serves 60 configurations"

    def test_a_shorter_k_begins_a_longer_one(self, store: BaseVectorStore) -> None:
        for mode in ("vector", "keyword", "hybrid"):
            long = Retriever(store, 10, search_mode=mode).retrieve_many(QUESTIONS)
            short = Retriever(store, 4, search_mode=mode).retrieve_many(QUESTIONS)
            assert short == [hits[:4] for hits in long]

    def test_a_list_that_is_deeper_than_needed(self, store: BaseVectorStore) -> None:
        lists = HitListCache()
        deep = Retriever(store, 26, search_mode="hybrid", hit_lists=lists).retrieve_many(QUESTIONS)
        calls = lists.store_calls
        for strategy in ("rrf", "weighted", "normalized"):
            choice = {"number_of_chunks": 3, "search_mode": "hybrid", "ranker_strategy": strategy}
            cached = Retriever(store, hit_lists=lists, **choice).retrieve_many(QUESTIONS)
            assert_alike(cached, Retriever(store, **choice).retrieve_many(QUESTIONS))
        assert lists.store_calls == calls and len(deep[0]) == 26

    def test_threads_share_one_list(self, store: BaseVectorStore) -> None:
        lists = HitListCache()
        expected = Retriever(store, 3, search_mode="hybrid").retrieve_many(QUESTIONS)
        with ThreadPoolExecutor(8) as pool:
            work = Retriever(store, 3, search_mode="hybrid", hit_lists=lists).retrieve_many
            assert list(pool.map(work, [QUESTIONS] * 24)) == [expected] * 24
        assert lists.store_calls == 2

    def test_retrieve_is_retrieve_many_of_one(self, store: BaseVectorStore) -> None:
        for choice in CHOICES:
            retriever = Retriever(store, **choice)
            alone = [retriever.retrieve(question) for question in QUESTIONS]
            assert_alike(alone, retriever.retrieve_many(QUESTIONS))

    def test_windows_stay_inside_their_document(self, store: BaseVectorStore) -> None:
        retriever = Retriever(store, 5, retrieval_method="window", window_size=3)
        for passages in retriever.retrieve_many(["Step 1 turns", "Step 25 turns"]):
            for passage in passages:
                assert passage.text.count(f"{passage.document_id}:") == len(
                    passage.metadata["sequence_numbers"]
                )
                assert (
                    min(passage.metadata["sequence_numbers"]) >= 1
                    and max(passage.metadata["sequence_numbers"]) <= 25
                )

    @pytest.mark.parametrize("budget", [1, 5, 9, 10, 20, 50, 200])
    @pytest.mark.parametrize("method", [{}, {"retrieval_method": "window", "window_size": 2}])
    def test_budget(self, store: BaseVectorStore, budget: int, method: dict) -> None:
        retriever = Retriever(store, 6, context_budget=budget, token_counter=Counter(), **method)  # type: ignore[arg-type]
        for passages in retriever.retrieve_many(QUESTIONS):
            assert 0 < sum(Counter().count_many([passage.text for passage in passages])) <= budget

    @pytest.mark.parametrize("budget", [6, 25, 90])
    @pytest.mark.parametrize("headers", [(), (ChunkHeaders(),)])
    @pytest.mark.parametrize("share", [None, 0.5])
    @pytest.mark.parametrize("order", ["best_first", "best_last", "reading_order"])
    @pytest.mark.parametrize("way", ["alone", "window", "parent"])
    def test_the_budget_holds_for_what_is_read(
        self, store: BaseVectorStore, budget: int, headers: tuple, share: float | None, order: str, way: str
    ) -> None:
        count = Counter().count_many
        shorter = () if share is None else (ExtractiveCompression(BagModel(), share),)
        method = {"retrieval_method": "window", "window_size": 2} if way == "window" else {}
        if way == "parent":
            method = {"ranking_stages": (FourTogether(),)}
        changing = (*shorter, *headers)
        free = Retriever(store, 6, context_stages=changing, **method)  # type: ignore[arg-type]
        ordered = ContextOrder(order)
        bound = replace(
            free, context_budget=budget, token_counter=Counter(), context_stages=(ordered, *changing)
        )
        for question in QUESTIONS:
            whole, read = free.retrieve(question), bound.retrieve(question)
            assert 0 < sum(count([passage.text for passage in read])) <= budget
            left, fitting = budget, []
            for passage, cost in zip(whole, count([passage.text for passage in whole]), strict=True):
                if cost <= left:
                    fitting.append(passage.text)
                    left -= cost
            if way != "window" and fitting:
                assert sorted(passage.text for passage in read) == sorted(fitting)
            if not fitting and way != "window":
                (beginning,) = read
                bare = beginning.text[beginning.metadata.get("header_length", 0) :]
                assert bare and bare in whole[0].text
            ranks = [passage.metadata["retrieval_rank"] for passage in read]
            assert sorted(ranks) == list(range(1, len(read) + 1))
            if order == "best_last":
                assert ranks == sorted(ranks, reverse=True)

    def test_a_window_in_a_budget_keeps_its_hit(self, store: BaseVectorStore) -> None:
        shorter = ExtractiveCompression(BagModel(), 0.5)
        for stages in ((), (ChunkHeaders(),), (shorter,), (shorter, ChunkHeaders())):
            retriever = Retriever(
                *(store, 1, "window", 4),
                context_budget=30,
                token_counter=Counter(),
                context_stages=stages,
            )  # type: ignore[arg-type]
            (passage,) = retriever.retrieve("Which step turns part c2?")
            (hit,) = Retriever(store, 1).retrieve("Which step turns part c2?")
            assert hit.text.strip(".") in passage.text

    def test_cut_extracts_know_what_is_left_of_them(self) -> None:
        text = "# Pumps\nThe pump is blue. It has two seals. They last for a year."
        place = {"document_id": "a.md", "sequence_number": 1, "start_index": 50, "end_index": 50 + len(text)}
        short = extracted(RetrievedChunk(text, place), split_sentences(text), {1, 3})
        for tokens in range(1, 12):
            for passage in (short, with_header(short)):
                for cut in cut_passage(passage, tokens, Counter().count_many):
                    bare = cut.text[cut.metadata.get("header_length", 0) :]
                    stretches = [text[start - 50 : end - 50] for start, end in cut.metadata["kept_spans"]]
                    assert " ... ".join(stretches) == bare.removesuffix(" ...")

    def test_one_call_for_all_neighbours(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []
        real = store._fetch
        monkeypatch.setattr(store, "_fetch", lambda keys: calls.append(len(keys)) or real(keys))
        Retriever(store, 5, retrieval_method="window", window_size=1).retrieve_many(QUESTIONS * 3)
        assert len(calls) == 1

    def test_a_missing_leg_is_not_replaced_in_silence(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store, "capabilities", lambda: frozenset({"vector"}))
        with pytest.raises(NotAvailableError, match="no keyword search"):
            Retriever(store, search_mode="hybrid").retrieve("Step 1")

    def test_a_failing_leg_fails_the_search(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*arguments: Any) -> Any:
            raise RuntimeError("the index is gone")

        monkeypatch.setattr(store, "_keyword_hits", broken)
        with pytest.raises(RuntimeError, match="the index is gone"):
            Retriever(store, search_mode="hybrid").retrieve("Step 1")

    def test_blank_questions_find_nothing(self, store: BaseVectorStore) -> None:
        retriever = Retriever(
            store, 3, retrieval_method="window", window_size=1, context_budget=9, token_counter=Counter()
        )  # type: ignore[arg-type]
        assert retriever.retrieve_many(["", " \n"]) == [[], []]

    def test_repr_and_equality(self, store: BaseVectorStore) -> None:
        first, second = Retriever(store, 3), Retriever(store, 3, hit_lists=HitListCache())
        assert first == second and "HitListCache" not in repr(second)
        assert replace(first, number_of_chunks=4) != first


def test_deep_lists_are_cut_to_what_a_search_would_fetch() -> None:
    def lists(depth: int) -> HitLists:
        made = HitLists()
        for leg in ("dense", "keyword"):
            chunks = [
                AI4RAGChunk("t", {"document_id": leg, "sequence_number": n}) for n in range(1, depth + 1)
            ]
            made.chunks |= {hit_name(chunk): chunk for chunk in chunks}
            made.keep(leg, "q", [(hit_name(chunk), 1 / chunk.sequence_number) for chunk in chunks], depth)
        return made

    for strategy in ("rrf", "weighted", "normalized"):
        wanted = SearchSettings(5, "hybrid", strategy)
        assert ranked_hits(lists(100), "q", wanted) == ranked_hits(lists(50), "q", wanted)


class Model(BaseFoundationModel):
    """Answer with the first passage; slow, failing or blocked on demand."""

    model_id = "test"
    system_message_text = "Be brief."

    def __init__(self, seconds: float = 0.0, together: int = 1) -> None:
        self.seconds, self.now, self.most, self.calls = seconds, 0, 0, 0
        self.met = threading.Barrier(together)  # nobody answers before so many are asked at the same time
        self.lock = threading.Lock()
        self.messages: list[Any] = []
        self.prepared: list[Any] = []

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def prepare(self, requests: Sequence[Any]) -> None:
        self.prepared.append(requests)

    def generate(self, messages: list[Any], question: str, contexts: list[str]) -> Generation:
        with self.lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
            self.messages.append(messages)
        self.met.wait(60)
        with self.lock:
            self.now -= 1
        if "fail" in question:
            raise GenerationError(
                "'test' gave an empty answer (finish reason: length).", remedy="Raise the limit."
            )
        if "crash" in question:
            raise ZeroDivisionError("division by zero")
        return Generation(
            contexts[0] if contexts else "nothing", 10, 2, "stop", self.seconds, refused="odd" in question
        )


class TestRAG:
    def test_answer_has_everything(self, store: BaseVectorStore) -> None:
        rag = SimpleRAG(Model(0.01), Retriever(store, 3))
        answer = rag.generate("Which step turns part c2?")
        assert answer["answer"] == answer["reference_documents"][0].text
        assert answer["question"] == "Which step turns part c2?"
        assert answer["tokens"] == {"prompt": 10, "completion": 2}
        assert answer["timings"]["generation"] == 0.01 and answer["timings"]["retrieval"] > 0
        assert (answer["refused"], answer["error"], answer["finish_reason"], answer["cached"]) == (
            False,
            None,
            "stop",
            False,
        )

    def test_braces_and_templates_in_texts_stay_as_they_are(self, tmp_path: Path) -> None:
        texts = ["Use {question} and {0} and %s", 'He said """{document}"""']
        with get_vector_store(BagModel(), MilvusLiteConfig(tmp_path / "store.db")) as braces:  # type: ignore[arg-type]
            braces.add_documents(
                [
                    AI4RAGChunk(text, {"document_id": "a", "sequence_number": n})
                    for n, text in enumerate(texts, 1)
                ]
            )
            model = Model()
            SimpleRAG(model, Retriever(braces, 2)).generate("What is {reference_documents}?")
        content = model.messages[0][-1]["content"]
        assert all(text in content for text in texts) and "What is {reference_documents}?" in content

    def test_chat_enriches_only_the_last_message(self, store: BaseVectorStore) -> None:
        model = Model()
        turns = [{"role": "user", "content": "Step 9?"}, {"role": "assistant", "content": "Yes."}]
        before = [dict(turn) for turn in turns]
        answer = SimpleRAG(model, Retriever(store, 2)).chat(
            [*turns, {"role": "user", "content": "Which is part c2?"}]
        )
        assert turns == before and model.messages[0][1:3] == turns
        assert model.messages[0][0] == {"role": "system", "content": "Be brief."}
        assert answer["reference_documents"][0].text in model.messages[0][3]["content"]
        assert "Step 9?" not in model.messages[0][3]["content"]

    def test_questions_keep_their_order_and_use_the_pool(self, store: BaseVectorStore) -> None:
        model = Model(together=5)
        rag = SimpleRAG(model, Retriever(store, 2))
        questions = [f"Step {n}?" for n in range(1, 21)]
        seen: list[tuple[int, int]] = []
        answers = query_rag(rag, questions, max_threads=5, on_progress=lambda *numbers: seen.append(numbers))
        assert [answer["question"] for answer in answers] == questions
        assert model.most == 5
        model.met = threading.Barrier(1)
        assert seen == [(n, 20) for n in range(1, 21)]
        assert len(model.prepared) == 1 and len(model.prepared[0]) == 20
        assert [answer["answer"] for answer in answers] == [
            rag.generate(question)["answer"] for question in questions
        ]

    def test_one_batch_for_all_questions(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []
        real = store._dense_hits
        monkeypatch.setattr(
            store, "_dense_hits", lambda vectors, *rest: calls.append(len(vectors)) or real(vectors, *rest)
        )
        query_rag(SimpleRAG(Model(), Retriever(store, 2)), [f"Step {n}?" for n in range(15)])
        assert calls == [15]

    def test_a_bad_question_costs_itself(self, store: BaseVectorStore) -> None:
        rag = SimpleRAG(Model(), Retriever(store, 2))
        questions = ["Step 1?", "fail", "crash", "nul \x00", "half \ud800", "", "odd", "Step 2?"]
        answers = query_rag(rag, questions)
        assert [answer["question"] for answer in answers] == questions
        assert [answer["answer"] is not None for answer in answers] == [
            True,
            False,
            False,
            False,
            False,
            False,
            True,
            True,
        ]
        errors = [answer["error"] for answer in answers]
        assert errors[0] is errors[6] is errors[7] is None
        assert "finish reason: length). Raise the limit." in errors[1]
        assert errors[2] == "ZeroDivisionError: division by zero"
        assert "NUL" in errors[3] and "surrogate" in errors[4] and "The question is empty" in errors[5]
        assert answers[6]["refused"] is True
        assert answers[1]["reference_documents"], "what was found is kept"

    def test_a_dead_store_costs_all_questions_but_no_crash(
        self, store: BaseVectorStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dead(*arguments: Any) -> Any:
            raise ConnectionError("no server")

        monkeypatch.setattr(store, "_dense_hits", dead)
        model = Model()
        answers = query_rag(SimpleRAG(model, Retriever(store, 2)), ["a", "b"])
        assert [answer["error"] for answer in answers] == [
            "ConnectionError: no server"
        ] * 2 and model.calls == 0

    def test_stop_ends_what_has_not_begun(self, store: BaseVectorStore) -> None:
        stop = StopFlag()

        class Stopper(Model):
            def generate(self, messages: list[Any], question: str, contexts: list[str]) -> Generation:
                if self.calls == 4:
                    stop.set()
                return super().generate(messages, question, contexts)

        model = Stopper(0.02)
        with pytest.raises(StoppedError):
            query_rag(SimpleRAG(model, Retriever(store, 2)), [f"Step {n}?" for n in range(200)], 2, stop)
        assert model.calls <= 7
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ai4rag-answers")]

    def test_any_executor_can_be_used(self, store: BaseVectorStore) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="mine") as pool:
            answers = query_rag(
                SimpleRAG(Model(), Retriever(store, 2)), ["Step 1?", "Step 2?"], executor=pool
            )
            assert pool.submit(lambda: 1).result() == 1, "it is not shut down"
        assert all(answer["answer"] for answer in answers)

    def test_progress_comes_from_the_calling_thread(self, store: BaseVectorStore) -> None:
        names: set[str] = set()
        here = threading.current_thread().name
        query_rag(
            SimpleRAG(Model(), Retriever(store, 2)),
            ["Step 1?", "Step 2?"],
            on_progress=lambda *numbers: names.add(threading.current_thread().name),
        )
        assert names == {here}

    def test_empty_input(self, store: BaseVectorStore) -> None:
        rag = SimpleRAG(Model(), Retriever(store, 2))
        for blank in ("", " ", None, 7):
            with pytest.raises(InputError, match="The question is empty"):
                rag.generate(blank)  # type: ignore[arg-type]
        for conversation in ([], [{}], [{"role": "user", "content": ""}]):
            with pytest.raises(InputError, match="no question"):
                rag.chat(conversation)
        for threads in (0, -1, 1.5, True):
            with pytest.raises(InputError, match="max_threads"):
                query_rag(rag, ["Step 1?"], max_threads=threads)  # type: ignore[arg-type]

"""Attribution: every planted fault of a pipeline is blamed on the part that has it, and nothing is asked that was not allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_stub import OpenAIStub

from ai4rag_nb.evaluation.answer_evaluator import AnswerEvaluator
from ai4rag_nb.evaluation.attribution import Cause, QuestionFacts, find_cause, holds_answer, lost_at
from ai4rag_nb.evaluation.attribution_plan import AttributionSettings, attribution_cost, scorer_of
from ai4rag_nb.evaluation.attribution_report import AttributionReport
from ai4rag_nb.evaluation.attribution_runs import attribute
from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.evaluation_data import EvaluationData, build_evaluation_data
from ai4rag_nb.evaluation.metrics import Metrics
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.indexing.vector_store import MilvusLiteConfig, get_vector_store
from ai4rag_nb.querying.generation import BaseFoundationModel, Generation, GenerationCounts, is_refusal
from ai4rag_nb.querying.openai_generation import OpenAIFoundationModel
from ai4rag_nb.querying.query_expansion import MultiQuery
from ai4rag_nb.querying.rag import SimpleRAG, query_rag
from ai4rag_nb.querying.retriever import Retriever
from ai4rag_nb.querying.stages import BaseHitStage, Outcome

SENTENCES = [f"Sentence number {number} speaks of nothing at all." for number in range(80)]
EVIDENCE = "The gate of the north dock closes at 21:40 sharp."
PAGE = " ".join([*SENTENCES[:40], EVIDENCE, *SENTENCES[40:]])
QUESTION = "When does the gate of the north dock close?"


class Places:
    """An embedding that ranks the evidence where a test wants it: the nearest chunks are the first ones."""

    dimension = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank  # of the evidence, from 1

    def embed_documents(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        angles = []
        for text in texts:
            if EVIDENCE[:20] in text:
                angles.append(0.01 * self.rank - 0.005)
            else:
                angles.append(0.01 * (1 + int("".join(c for c in text if c.isdigit())[:2] or 0)))
        return np.array([[np.cos(angle), np.sin(angle)] for angle in angles], dtype=np.float32)

    def embed_queries(self, texts: Sequence[str], on_progress: Any = None) -> np.ndarray:
        return np.array([[1.0, 0.0]] * len(texts), dtype=np.float32)


class Reader(BaseFoundationModel):
    """Reads well, unless a test says otherwise; local as far as the price is concerned."""

    spec = "local:test"
    model_id = "test"

    def __init__(self, say: Callable[[list[str]], str] | None = None) -> None:
        self.say, self.asked, self.counts = say, list[list[str]](), GenerationCounts()

    def fingerprint(self) -> dict[str, Any]:
        return {"model": "test"}

    def generate(self, messages: list[Any], question: str, contexts: list[str]) -> Generation:
        self.asked.append(contexts)
        if self.say is not None:
            said = self.say(contexts)
            return Generation(said, refused=is_refusal(said))
        return Generation("At 21:40." if any("21:40" in text for text in contexts) else "No idea of that.")


class WordCounter:
    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]


class CutEnds(BaseHitStage):
    """A compression that keeps the first ten characters."""

    stage_name = "cut_ends"

    def apply_many(self, questions: Any, hits: Any, setting: Any) -> list[Outcome]:
        def cut(hit: Any) -> Any:
            start = hit.metadata["start_index"]
            return replace(
                hit, text=hit.text[:10], metadata={**hit.metadata, "kept_spans": [(start, start + 10)]}
            )

        return [Outcome(hits=[cut(hit) for hit in found]) for found in hits]


def chunks_of(page: str, lost: str = "") -> list[AI4RAGChunk]:
    """One chunk a sentence, but for the sentence that is lost."""
    texts = [text for text in [*SENTENCES[:40], EVIDENCE, *SENTENCES[40:]] if text != lost]
    found = []
    for number, text in enumerate(texts, 1):
        start = page.index(text)
        place = {"document_id": "dock.md", "sequence_number": number}
        found.append(AI4RAGChunk(text, {**place, "start_index": start, "end_index": start + len(text)}))
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    stores = []

    def open_store(rank: int = 1, lost: str = "") -> Any:
        config = MilvusLiteConfig(tmp_path / f"store{len(stores)}.db")
        store = get_vector_store(Places(rank), config, "ai4rag_dock")
        store.add_documents(chunks_of(PAGE, lost))
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def benchmark(evidence: bool = True, **more: Any) -> BenchmarkData:
    passages = [[EVIDENCE]] if evidence else [[]]
    return BenchmarkData([QUESTION], [["at 21:40"]], [["dock.md"]], evidence=passages, **more)


def answered(
    retriever: Retriever, reader: BaseFoundationModel, evidence: bool = True
) -> list[EvaluationData]:
    asked = benchmark(evidence)
    places = asked.check({"dock.md": PAGE}).evidence
    return build_evaluation_data(asked, query_rag(SimpleRAG(reader, retriever), asked.questions), places)


def cause_of(retriever: Retriever, reader: BaseFoundationModel, **options: Any) -> Any:
    report = attribute(answered(retriever, reader), retriever, reader, **options)
    return report.attributions[0]


# ------------------------------------------------------------------ planted faults


def test_a_right_answer_is_right_and_costs_nothing(opened: Callable[..., Any]) -> None:
    reader, retriever = Reader(), Retriever(opened(rank=1), number_of_chunks=3)
    found = cause_of(retriever, reader)
    assert (found.cause, len(reader.asked)) == (Cause.RIGHT, 1)


def test_a_chunker_that_loses_the_passage_is_blamed(opened: Callable[..., Any]) -> None:
    reader = Reader()
    found = cause_of(Retriever(opened(lost=EVIDENCE), number_of_chunks=3), reader)
    assert (found.cause, found.also, found.facts.indexed) == (Cause.CHUNKING, (), 0.0)
    assert reader.asked[-1] == [EVIDENCE]  # no chunk holds it, so the benchmark's own words are put in


def test_a_search_that_misses_is_blamed(opened: Callable[..., Any]) -> None:
    found = cause_of(Retriever(opened(rank=60), number_of_chunks=3), Reader())
    assert (found.cause, found.facts.indexed, found.facts.candidates) == (Cause.RETRIEVAL, 1.0, 0.0)
    deeper = cause_of(
        Retriever(opened(rank=60), number_of_chunks=3), Reader(), settings=AttributionSettings(depth=70)
    )
    assert (deeper.cause, deeper.facts.rank) == (Cause.RANKING, 60)


@pytest.mark.parametrize(("k", "cause"), [(2, Cause.RANKING), (5, Cause.RIGHT)])
def test_too_few_hits_are_blamed_on_the_ranking(opened: Callable[..., Any], k: int, cause: Cause) -> None:
    found = cause_of(Retriever(opened(rank=5), number_of_chunks=k), Reader())
    assert found.cause == cause
    if cause is Cause.RANKING:
        assert found.facts.rank == 5 and "within its first 5" in found.note


def test_a_budget_that_is_too_small_is_blamed(opened: Callable[..., Any]) -> None:
    choices = {"number_of_chunks": 5, "token_counter": WordCounter()}
    short = Retriever(opened(rank=5), context_budget=20, **choices)
    found = cause_of(short, Reader())
    assert (found.cause, found.facts.hits, found.facts.context) == (Cause.TRUNCATION, 1.0, 0.0)
    assert cause_of(replace(short, context_budget=200), Reader()).cause is Cause.RIGHT


def test_a_compression_that_cuts_the_passage_is_blamed(opened: Callable[..., Any]) -> None:
    cut = Retriever(opened(rank=1), number_of_chunks=2, context_stages=(CutEnds(),))
    found = cause_of(cut, Reader())
    assert found.cause is Cause.TRUNCATION
    assert found.facts.context == pytest.approx(10 / len(EVIDENCE))


def test_a_reader_that_answers_wrongly_is_blamed(opened: Callable[..., Any]) -> None:
    found = cause_of(
        Retriever(opened(rank=1), number_of_chunks=3), Reader(lambda contexts: "In the evening.")
    )
    assert (found.cause, found.facts.context) == (Cause.GENERATION, 1.0)
    assert "from the gold context as well" in found.note


def test_a_reader_that_is_led_astray_by_other_passages_is_blamed(opened: Callable[..., Any]) -> None:
    reader = Reader(lambda contexts: "At 21:40." if len(contexts) == 1 else "It speaks of nothing.")
    found = cause_of(Retriever(opened(rank=1), number_of_chunks=3), reader)
    assert found.cause is Cause.GENERATION and "from the gold context alone" in found.note


def test_a_reader_that_refuses_is_blamed(opened: Callable[..., Any]) -> None:
    reader = Reader(lambda contexts: "At 21:40." if len(contexts) == 1 else "I don't know.")
    found = cause_of(Retriever(opened(rank=1), number_of_chunks=3), reader)
    assert found.cause is Cause.GENERATION and "refuses" in found.note


def test_a_metric_that_scores_a_right_answer_low_is_blamed(opened: Callable[..., Any]) -> None:
    """The token F1 of one right word in twelve is low, and the answer holds the correct one."""
    reader = Reader(
        lambda contexts: "The gate is closed every day of the week at 21:40 by the harbour master."
    )
    score = scorer_of(AnswerEvaluator(), Metrics.TOKEN_F1)
    found = cause_of(Retriever(opened(rank=1), number_of_chunks=3), reader, score=score)
    assert found.cause is Cause.JUDGE and "word for word" in found.note


def test_two_faults_are_both_named(opened: Callable[..., Any]) -> None:
    found = cause_of(Retriever(opened(rank=5), number_of_chunks=2), Reader(lambda contexts: "Never."))
    assert (found.cause, found.also) == (Cause.RANKING, (Cause.GENERATION,))


def test_a_question_without_answer_that_is_answered_is_a_fault_of_the_model(
    opened: Callable[..., Any],
) -> None:
    retriever = Retriever(opened(), number_of_chunks=2)
    asked = BenchmarkData(["Who built it?", "Who paid for it?"], [[], []], [[], []])
    said = [{"question": "Who built it?", "answer": "Ada.", "reference_documents": []}]
    said += [{"question": "Who paid for it?", "answer": "I don't know.", "reference_documents": []}]
    report = attribute(build_evaluation_data(asked, said), retriever, Reader())
    assert [one.cause for one in report.attributions] == [Cause.GENERATION, Cause.RIGHT]
    assert report.cost.answers == 0


def test_without_evidence_documents_are_followed_and_that_is_said(opened: Callable[..., Any]) -> None:
    reader, retriever = Reader(lambda contexts: "Never."), Retriever(opened(rank=5), number_of_chunks=2)
    report = attribute(answered(retriever, reader, evidence=False), retriever, reader)
    (found,) = report.attributions
    assert (found.facts.level, found.facts.context, found.cause) == ("document", 1.0, Cause.GENERATION)
    assert "no passage of evidence is known" in found.note
    assert "1 of 1 was followed by documents" in report.notes[0]
    assert len(reader.asked[-1]) == 81  # the whole document fits into one prompt
    short = AttributionSettings(gold_characters=100)
    unknown = attribute(answered(retriever, reader, evidence=False), retriever, reader, short)
    assert unknown.attributions[0].cause is Cause.UNKNOWN
    assert any("too long for one prompt" in note for note in unknown.notes)


def test_one_failing_answer_costs_only_itself(opened: Callable[..., Any]) -> None:
    def broken(contexts: list[str]) -> str:
        if len(contexts) == 1:
            raise RuntimeError("out of memory")
        return "Never."

    found = cause_of(Retriever(opened(rank=1), number_of_chunks=3), Reader(broken))
    assert found.cause is Cause.UNKNOWN and "out of memory" in found.note


# ------------------------------------------------------------------ searches and price


def test_all_questions_are_searched_in_one_call(opened: Callable[..., Any]) -> None:
    store, calls = opened(rank=5), []
    ask = store._dense_hits
    store._dense_hits = lambda *arguments: calls.append(len(arguments[0])) or ask(*arguments)
    retriever = Retriever(store, number_of_chunks=2)
    (one,) = answered(retriever, Reader())
    many = [replace(one, question=f"{QUESTION} {number}", question_id=f"q{number}") for number in range(20)]
    calls.clear()
    report = attribute(many, retriever, Reader())
    assert calls == [20] and report.counts == {Cause.RANKING: 20}


def test_a_paid_model_is_asked_when_it_is_allowed_and_never_twice(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    retriever = Retriever(opened(rank=5), number_of_chunks=2)
    data = answered(retriever, Reader())
    with OpenAIStub(planned=lambda body: "At 21:40.") as stub:
        paid = OpenAIFoundationModel("stub-chat", stub.client())
        cost = attribution_cost(data, retriever, paid)
        assert (cost.answers, cost.free, cost.questions) == (1, False, 1)
        shown: list[str] = []
        quiet = attribute(data, retriever, paid, show=shown.append)
        assert (stub.counts.chats, shown) == (0, [])
        assert "Set ask=True" in quiet.notes[0] and "1 call to" in quiet.notes[0]
        cache, settings = Cache.open(tmp_path / "cache.db"), AttributionSettings(ask=True)
        asked = attribute(data, retriever, paid, settings, cache=cache, show=shown.append)
        assert (stub.counts.chats, len(shown), asked.attributions[0].also) == (1, 1, ())
        assert asked.attributions[0].facts.gold_right
        cache.close()
        cache = Cache.open(tmp_path / "cache.db")
        assert attribution_cost(data, retriever, paid, cache=cache).answers == 0
        again = attribute(data, retriever, paid, settings, cache=cache, show=shown.append)
        assert (stub.counts.chats, len(shown), again.attributions) == (1, 1, asked.attributions)
        cache.close()


def test_a_price_is_the_most_that_can_be_paid(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Two equal questions and one with a document that is too long: 2 calls at most, 1 where all goes well."""
    retriever = Retriever(opened(rank=5), number_of_chunks=2)
    first = answered(retriever, Reader())[0]
    long = replace(answered(retriever, Reader(), evidence=False)[0], question_id="q3")
    data = [first, replace(first, question_id="q2"), long]
    short = AttributionSettings(gold_characters=10)
    with OpenAIStub(planned=lambda body: "At 21:40.") as stub:
        paid = OpenAIFoundationModel("stub-chat", stub.client())
        cache = Cache.open(tmp_path / "cache.db")
        alone = attribution_cost(data[:1], retriever, paid, cache=cache)
        cost = attribution_cost(data, retriever, paid, short, cache=cache)
        assert (cost.questions, cost.answers, cost.shared, cost.bare, cost.kept) == (3, 2, 1, 1, 0)
        assert cost.tokens == 2 * alone.tokens
        said = f"3 questions went wrong: at most 2 calls to {paid.name}, about {cost.tokens:,} tokens; "
        said += "1 of them repeats another one and as a rule takes its answer; "
        assert str(cost) == said + "1 without a right passage to ask with."
        asked = replace(short, ask=True)
        attribute(data, retriever, paid, asked, cache=cache, show=None)
        assert stub.counts.chats == 1, "the equal question takes the answer"
        again = attribution_cost(data, retriever, paid, short, cache=cache)
        assert (again.answers, again.shared, again.kept) == (0, 0, 2)
        cache.close()
        without = attribution_cost(data, retriever, paid, short)
        assert (without.answers, without.shared) == (2, 0), "nothing is shared without a memory"


def test_stages_that_ask_a_paid_model_do_not_run_again_unasked(opened: Callable[..., Any]) -> None:
    with OpenAIStub(planned=lambda body: "another question") as stub:
        paid = OpenAIFoundationModel("stub-chat", stub.client())
        retriever = Retriever(opened(rank=5), number_of_chunks=2)
        data = answered(retriever, Reader())
        staged = replace(retriever, query_stage=MultiQuery(paid))
        report = attribute(data, staged, Reader())
        assert (stub.counts.chats, report.cost.stages) == (0, ("multi_query",))
        assert report.attributions[0].facts.hits is None
        shown: list[str] = []
        report = attribute(data, staged, Reader(), AttributionSettings(ask=True), show=shown.append)
        assert stub.counts.chats == 1 and "'multi_query'" in shown[0]
        assert report.attributions[0].cause is Cause.RANKING


def test_the_table_of_a_report(opened: Callable[..., Any]) -> None:
    retriever = Retriever(opened(rank=5), number_of_chunks=2)
    report: AttributionReport = attribute(answered(retriever, Reader()), retriever, Reader())
    frame = report.to_frame()
    assert list(frame["cause"]) == ["ranking"] and frame["rank"][0] == 5
    assert str(report).split()[:2] == ["1", "ranking"]


# ------------------------------------------------------------------ the pure core

shares = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 0.89, 0.9, 1.0]))


@given(st.lists(shares, min_size=4, max_size=4))
def test_the_loss_is_where_the_last_full_step_ends(values: list[float | None]) -> None:
    """Said the other way round: it is lost at the first known step behind the last one where it was whole."""
    causes = [Cause.CHUNKING, Cause.RETRIEVAL, Cause.RANKING, Cause.TRUNCATION]
    known = [place for place in range(4) if values[place] is not None]
    whole = [place for place in known if (values[place] or 0.0) >= 0.9]
    behind = [place for place in known if not whole or place > whole[-1]]
    facts = QuestionFacts("q", indexed=values[0], candidates=values[1], hits=values[2], context=values[3])
    assert lost_at(facts) == (causes[behind[0]] if behind else None)


@given(
    st.builds(
        QuestionFacts,
        st.just("q"),
        wrong=st.booleans(),
        answerable=st.booleans(),
        score=st.sampled_from([None, 0.1]),
        refused=st.booleans(),
        error=st.sampled_from([None, "away"]),
        holds_correct=st.booleans(),
        level=st.sampled_from(["evidence", "document", "none"]),
        indexed=shares,
        candidates=shares,
        hits=shares,
        context=shares,
        asked=st.booleans(),
        gold_right=st.booleans(),
        gold_holds=st.booleans(),
        gold_error=st.sampled_from([None, "away"]),
    )
)
def test_every_combination_of_facts_has_one_cause_and_a_reason(facts: QuestionFacts) -> None:
    found = find_cause(facts)
    assert found.note and "{" not in found.note
    assert (found.cause is Cause.RIGHT) == (not facts.wrong)
    if found.cause in (Cause.CHUNKING, Cause.RETRIEVAL, Cause.RANKING, Cause.TRUNCATION):
        assert lost_at(facts) == found.cause and facts.answerable and facts.error is None
    if found.also:
        assert facts.asked and not facts.gold_right


def test_holding_an_answer_is_a_matter_of_words() -> None:
    assert holds_answer("It closes at 21:40, on Sundays too.", ["At 21:40"])
    assert not holds_answer("It closes at 121:40.", ["21:40"])
    assert not holds_answer("", ["the"]) and not holds_answer("anything", [])


def test_ranks_and_counts_of_one_read_well() -> None:
    """A search that finds the evidence at once finds it as its first hit, and one question has no plural."""
    lost = QuestionFacts("q", indexed=1.0, candidates=1.0, hits=0.0, context=0.0, score=0.0)
    said = {rank: find_cause(replace(lost, rank=rank)).note for rank in (None, 1, 2, 9)}
    assert said[None].startswith("The search finds it, and the hits that are used hold 0% of it.")
    assert said[1].startswith("The search finds it as its first hit, and the hits")
    assert said[2].startswith("The search finds it within its first 2 hits, and the hits")
    assert said[9].startswith("The search finds it within its first 9 hits, and the hits")

"""What is scored is what was found and said: neither the order of a prompt nor the marks of a pipeline make it better or worse."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai_stub import OpenAIStub
from small_world import make_experiment, service, small_space

from ai4rag_nb import BenchmarkData, Metrics, RetrievedChunk, open_run
from ai4rag_nb.evaluation.answer_evaluator import AnswerEvaluator
from ai4rag_nb.evaluation.attribution import holds_answer
from ai4rag_nb.evaluation.criteria import materials_of
from ai4rag_nb.evaluation.evaluation_data import build_evaluation_data
from ai4rag_nb.evaluation.exchange import exchange_rows
from ai4rag_nb.evaluation.retrieval_evaluator import RetrievalEvaluator
from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import InputError
from ai4rag_nb.foundations.events import EventBus, StopFlag
from ai4rag_nb.indexing.collections import CollectionRegistry
from ai4rag_nb.indexing.search_settings import SearchSettings
from ai4rag_nb.optimization.indexing_phase import Cutting, IndexingPhase, chunker_for, index_name
from ai4rag_nb.optimization.causes import answered_row
from ai4rag_nb.optimization.payloads import question_results
from ai4rag_nb.optimization.routers import kept_router, router_key
from ai4rag_nb.optimization.stage_failures import emptied_by, empty_sentences
from ai4rag_nb.optimization.stage_progress import result_traces, stored_trace
from ai4rag_nb.optimization.workspace import Workspace
from ai4rag_nb.querying.compression import ExtractiveCompression
from ai4rag_nb.querying.context_order import (
    ContextOrder,
    ordered_passages,
    ranked,
    retrieval_order,
    with_header,
)
from ai4rag_nb.querying.generation import BaseFoundationModel, Generation, last_question
from ai4rag_nb.querying.hit_list_cache import HitListCache
from ai4rag_nb.querying.passages import merge_passages
from ai4rag_nb.querying.rag import SimpleRAG
from ai4rag_nb.querying.retriever import Retrieval
from ai4rag_nb.querying.routing import AllRouter, RuleRouter
from ai4rag_nb.querying.small_to_big import expanded_passages
from ai4rag_nb.querying.stage_runs import Batch, run_search
from ai4rag_nb.querying.stages import StageSetting
from ai4rag_nb.querying.trace import StageRecord, Trace, trace_table
from ai4rag_nb.serving.commands import main
from ai4rag_nb.querying.verification import HEDGE, OverlapVerification


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


def passage(document: str, number: int, text: str = "", **more: Any) -> RetrievedChunk:
    said = text or f"{document} says {number}."
    return RetrievedChunk(
        said, {"document_id": document, "sequence_number": number, **more}, score=1 / number
    )


# --- the order of the prompt is not the order of the retrieval ---------------------------------------------------------------

FOUND = [passage("b.md", 7), passage("a.md", 1), passage("b.md", 2), passage("c.md", 4), passage("a.md", 9)]


@pytest.mark.parametrize("order", ["best_first", "best_last", "reading_order"])
@pytest.mark.parametrize("backend", ["native", "unitxt"])
def test_ranks_are_those_of_the_retrieval(order: str, backend: str) -> None:
    (outcome,) = ContextOrder(order).apply_many(["?"], [FOUND], StageSetting(None))  # type: ignore[arg-type]
    assert [hit.text for hit in outcome.hits] == [hit.text for hit in ordered_passages(FOUND, order)]
    benchmark = BenchmarkData(["Who?"], [["a.md says 1."]], [["a.md"]])
    response = {"answer": "a.md says 1.", "reference_documents": outcome.hits}
    (data,) = build_evaluation_data(benchmark, [response])
    assert data.contexts == [hit.text for hit in FOUND]
    assert data.context_ids == ["b.md", "a.md", "b.md", "c.md", "a.md"]
    wanted = [Metrics.CONTEXT_CORRECTNESS, Metrics.FAITHFULNESS]
    scores = UnitxtEvaluator(backend).evaluate_metrics([data], wanted)["question_scores"][0]["metrics"]
    assert [score["value"] for score in scores] == [0.5, 1.0]
    (ranks,) = RetrievalEvaluator().evaluate_metrics([data], [Metrics.DOCUMENT_RECIPROCAL_RANK])["metrics"]
    assert ranks["scores"]["mean"] == 0.5


def test_the_order_of_the_prompt_is_kept_in_results_and_traces() -> None:
    shown = ordered_passages(ranked(FOUND), "reading_order")
    records = Trace("Who?").then(
        StageRecord("search", hits=marks(FOUND)), StageRecord("order", hits=marks(shown))
    )
    benchmark = BenchmarkData(["Who?"], [["a"]], [["a.md"]])
    response = {
        "question": "Who?",
        "answer": "a",
        "reference_documents": shown,
        "trace": records.to_records(),
    }
    data = build_evaluation_data(benchmark, [response])
    (row,) = json.loads(json.dumps(question_results(data, [response], [], [[None] * 5])))
    assert row["answer_contexts"] == [hit["text"] for hit in row["hits"]] == [hit.text for hit in FOUND]
    assert [hit["right_document"] for hit in row["hits"]] == [False, True, False, False, True]
    read = [hit["text"] for hit in sorted(row["hits"], key=lambda hit: hit["prompt_place"])]
    assert read == [hit.text for hit in shown]
    (trace,) = result_traces([row])
    assert [stage.hit_count for stage in trace.stages] == [5, 5]
    told = [(mark["document_id"], mark["sequence_number"]) for mark in trace.stages[1].hits]
    assert told == [("b.md", 2), ("b.md", 7), ("a.md", 1), ("a.md", 9), ("c.md", 4)]
    assert answered_row(row).context_ids == [hit.document_id for hit in FOUND]


def marks(hits: Sequence[RetrievedChunk]) -> tuple[dict[str, Any], ...]:
    names = ("document_id", "sequence_number")
    return tuple({name: hit.metadata[name] for name in names} for hit in hits)


def test_passages_without_ranks_keep_their_order() -> None:
    assert retrieval_order([{}, {"retrieval_rank": 1}, {"retrieval_rank": 2}]) == [0, 1, 2]
    assert retrieval_order([]) == []
    foreign = [
        {"text": "x", "metadata": {"document_id": "x.md"}},
        {"page_content": "y", "document_id": "y.md"},
    ]
    benchmark = BenchmarkData(["Who?"], [["a"]], [["a.md"]])
    (data,) = build_evaluation_data(benchmark, [{"answer": "a", "reference_documents": foreign}])
    assert data.context_ids == ["x.md", "y.md"]


def test_merged_and_expanded_passages_rank_by_their_best_hit() -> None:
    """Chunks 1 to 9 of two documents: the best hit is b 5, then a 2, then b 6 and a 9."""
    hits = [passage("b.md", 5), passage("a.md", 2), passage("b.md", 6), passage("a.md", 9)]
    around = [
        AI4RAGChunk(f"{d} {n}", {"document_id": d, "sequence_number": n})
        for d, n in [("b.md", 4), ("a.md", 3)]
    ]
    merged = merge_passages(hits, [*hits, *around])
    assert [hit.metadata["sequence_numbers"] for hit in merged] == [[4, 5, 6], [2, 3], [9]]
    ranges = [("b.md", 5, 8), ("a.md", 1, 4), ("b.md", 5, 8), ("a.md", 9, 9)]
    fetched = {(hit.document_id, hit.sequence_number): hit for hit in hits}
    expanded = expanded_passages(hits, ranges, fetched)
    assert [(hit.document_id, hit.sequence_number) for hit in expanded] == [
        ("b.md", 5),
        ("a.md", 2),
        ("a.md", 9),
    ]


def test_no_context_order_wins_by_its_order(tmp_path: Path, stub: OpenAIStub) -> None:
    orders = ["best_first", "best_last", "reading_order"]
    space = small_space(chunk_size=[32], search_mode=["vector"], number_of_chunks=[4], context_order=orders)
    experiment = make_experiment(tmp_path, space, 3)
    experiment.search()
    found = {one.configuration["context_order"]: one for one in experiment.results.evaluations}
    assert set(found) == set(orders)

    def retrieval(name: str) -> list[Any]:
        names = ("context_correctness", "document_ndcg", "evidence_reciprocal_rank", "evidence_ndcg")
        rows = sorted(found[name].results, key=lambda row: row["question_id"])
        return [[(m["name"], m["score"]) for m in row["metrics"] if m["name"] in names] for row in rows]

    assert retrieval("best_first") == retrieval("best_last") == retrieval("reading_order")
    for row in found["best_last"].results:
        assert [hit["prompt_place"] for hit in row["hits"]] == [4, 3, 2, 1]
        right = [hit["document_id"] in row["document_keys"] for hit in row["hits"]]
        (score,) = [m["score"] for m in row["metrics"] if m["name"] == "context_correctness"]
        assert score == (1 / (right.index(True) + 1) if any(right) else 0.0)
    assert all("prompt_place" not in hit for row in found["best_first"].results for hit in row["hits"])
    experiment.close()


# --- marks of the pipeline are not words of the answer -----------------------------------------------------------------------


class Says(BaseFoundationModel):
    """Say the same to everybody."""

    def __init__(self, text: str) -> None:
        self.model_id, self.text = "says", text

    def fingerprint(self) -> dict[str, Any]:
        return {"says": self.text}

    def generate(self, messages: Any, question: str, contexts: Any) -> Generation:
        return Generation(self.text)


class Finds:
    def __init__(self, hits: list[RetrievedChunk]) -> None:
        self.hits = hits

    def retrieve_traced(self, questions: Sequence[str], *_: Any) -> list[Retrieval]:
        return [Retrieval(list(self.hits), Trace(text)) for text in questions]


LAMP = [passage("a.md", 1, "The pump is loud."), passage("b.md", 2, "The lamp is red, see a[2] and [3].")]


def answered(text: str, action: str, citations: bool) -> Any:
    rag = SimpleRAG(Says(text), Finds(LAMP), OverlapVerification(action), citations)  # type: ignore[arg-type]
    return rag.generate("Which colour?")


TEXTS = [
    "The lamp is red.",
    "The lamp is red. The pump is loud.",
    "The lamp is red, see a[2] there. The seal is 36 months old.",
    "| lamp | red |\n",
    "Nothing of that sort stands anywhere",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("action", ["pass", "hedge", "regenerate"])
def test_citations_and_hedges_are_not_scored(text: str, action: str) -> None:
    benchmark = BenchmarkData(["Which colour?"], [["The lamp is red."]], [["b.md"]])
    plain, marked = answered(text, "pass", False), answered(text, action, True)
    assert "plain_answer" not in plain and plain["answer"] == text
    data = [build_evaluation_data(benchmark, [one])[0] for one in (plain, marked)]
    assert data[0].answer.rstrip() == data[1].answer.rstrip()
    for evaluator in (AnswerEvaluator(), UnitxtEvaluator()):
        wanted = [metric for metric in evaluator.metrics if metric != Metrics.ANSWER_CHARACTERS]
        first, second = (evaluator.evaluate_metrics([one], wanted)["question_scores"] for one in data)
        assert first == second
    reads = ("question", "answer", "contexts")
    assert [part.split() for part in materials_of(data[0], reads)] == [
        p.split() for p in materials_of(data[1], reads)
    ]
    assert holds_answer(data[0].answer, ["red"]) == holds_answer(data[1].answer, ["red"])


def test_marks_of_the_model_itself_are_replaced_and_not_scored() -> None:
    benchmark = BenchmarkData(["Which colour?"], [["The lamp is red."]], [["b.md"]])
    one = answered("The lamp is red [1]. The pump is loud [3].", "pass", True)
    assert one["answer"] == "The lamp is red. [2] The pump is loud. [1]"
    assert build_evaluation_data(benchmark, [one])[0].answer == "The lamp is red. The pump is loud."


def test_stored_answers_keep_their_marks() -> None:
    benchmark = BenchmarkData(["Which colour?"], [["red"]], [["b.md"]])
    one = answered("The lamp is red. It is 9 metres high.", "hedge", True)
    assert one["answer"] == f"The lamp is red. [2] It is 9 metres high. {HEDGE}"
    data = build_evaluation_data(benchmark, [one])
    (row,) = question_results(data, [one], [], [[None, None]])
    assert row["answer"] == one["answer"]
    assert row["plain_answer"] == data[0].answer == "The lamp is red. It is 9 metres high."
    assert answered_row(row).answer == row["plain_answer"]
    assert exchange_rows([row])[0]["response"] == row["plain_answer"]


def test_brackets_of_the_answer_itself_stay() -> None:
    text = "See a[2] and [3] of the lamp. [2]"
    benchmark = BenchmarkData(["Which colour?"], [[text]], [["b.md"]])
    (data,) = build_evaluation_data(benchmark, [answered(text, "pass", False)])
    assert data.answer == text
    (f1,) = AnswerEvaluator().evaluate_metrics([data], [Metrics.EXACT_MATCH])["metrics"]
    assert f1["scores"]["mean"] == 1.0


# --- traces tell the truth ---------------------------------------------------------------------------------------------------


def test_stored_traces_count_what_fresh_ones_count(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(
        chunk_size=[32],
        search_mode=["vector"],
        number_of_chunks=[3],
        reranker=["none", "mmr"],
        rerank_depth=[12],
    )
    experiment = make_experiment(tmp_path, space, 2)
    experiment.search()
    experiment.close()
    results = open_run(tmp_path / "run")
    seen = set()
    for result in results.evaluations:
        with results.pattern(result.name) as pattern:
            fresh = trace_table([pattern.generate(row["question"]) for row in result.results])
        stored = results.traces(result.name)
        assert list(zip(stored["stage"], stored["hits"], strict=True)) == list(
            zip(fresh["stage"], fresh["hits"], strict=True)
        )
        seen |= set(zip(stored["stage"], stored["hits"], strict=True))
    assert {("search", 3), ("search", 12), ("mmr", 12), ("generation", 0)} <= seen


def test_a_stored_trace_is_small_and_can_be_stored_again() -> None:
    mark = {"document_id": "a.md", "sequence_number": 1}
    records = Trace(
        "?", (StageRecord("search", hits=(mark,) * 30), StageRecord("mmr", hits=(mark,) * 20))
    ).to_records()
    once = stored_trace(records)
    assert [(len(one["hits"]), one["counted"]) for one in once] == [(10, 30), (0, 20)]
    assert [one["counted"] for one in stored_trace(once)] == [30, 20]
    assert list(trace_table(once)["hits"]) == [30, 20]


@pytest.mark.parametrize("way", ["answer", "answers", "records", "lists", "trace", "traces"])
def test_a_trace_table_takes_what_an_answer_carries(way: str) -> None:
    answer = answered("The lamp is red.", "pass", True)
    trace = Trace("Which colour?", tuple(StageRecord(**record) for record in answer["trace"]))
    forms = {
        "answer": answer,
        "answers": [answer],
        "records": answer["trace"],
        "lists": [answer["trace"]],
        "trace": trace,
        "traces": iter([trace]),
    }
    table = trace_table(forms[way])
    assert list(table["stage"]) == ["generation", "overlap"]
    asked = "" if way in ("records", "lists") else "Which colour?"
    assert set(table["question"]) == {asked}


@pytest.mark.parametrize(
    "wrong", ["search", 7, None, ["search"], [7], {"question": "Why?"}, [{"stage": "x"}, 3]]
)
def test_what_is_no_trace_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="is no trace"):
        trace_table(wrong)


# --- routers outlive their collection ----------------------------------------------------------------------------------------

PARTS = {"chunking_method": ["by_content_rows"], "chunk_size": [64], "search_mode": ["vector"]}


def routed(folder: Path, routing: list[str], run: str = "run") -> Any:
    space = small_space(
        **PARTS, number_of_chunks=[2], index_structure=["by_type"], routing=routing, chunk_overlap=[0]
    )
    return make_experiment(folder, space, len(routing), run)


def test_a_learned_router_survives_cleaning(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = routed(tmp_path, ["classifier"])
    experiment.search()
    said = [note for note in experiment.results.notes if "the routing of questions" in note]
    assert (
        len(said) == 1 and said[0].startswith("Pattern1: ") and "right in 5-fold cross-validation" in said[0]
    )
    experiment.close()
    assert said[0] in open_run(tmp_path / "run").summary()
    before = asked(tmp_path)
    assert main(["clean", "--workspace", str(tmp_path / "workspace"), "--yes"]) == 0
    assert asked(tmp_path) == before


def asked(folder: Path) -> list[str]:
    with open_run(folder / "run").best_pattern() as pattern:
        return [hit.text for hit in pattern.generate("Which apple ripens last?")["reference_documents"]]


def test_the_remedy_for_a_lost_router_works(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = routed(tmp_path, ["all", "classifier"])
    experiment.search()
    experiment.close()
    before = asked_by_classifier(tmp_path)
    workspace = Workspace.existing(tmp_path / "workspace")
    with workspace.cache.transaction() as connection:
        connection.execute("DELETE FROM entries WHERE kind = 'routers'")
    workspace.close()
    with pytest.raises(InputError, match=r"is gone\. Run the same search again"):
        asked_by_classifier(tmp_path)
    again = routed(tmp_path, ["all", "classifier"])
    again.search()
    again.close()
    assert asked_by_classifier(tmp_path) == before


def asked_by_classifier(folder: Path) -> list[str]:
    results = open_run(folder / "run")
    name = next(one.name for one in results.evaluations if one.configuration["routing"] == "classifier")
    with results.pattern(name) as pattern:
        return [hit.text for hit in pattern.generate("Which apple ripens last?")["reference_documents"]]


def test_routers_of_older_workspaces_are_found(tmp_path: Path, stub: OpenAIStub) -> None:
    """They were kept under the name of their collection, and say what they were learned from."""
    experiment = routed(tmp_path, ["classifier"])
    experiment.search()
    experiment.close()
    before = asked(tmp_path)
    (result,) = open_run(tmp_path / "run").evaluations
    name = result.payload["settings"]["store_binding"]["collection_name"]
    workspace = Workspace.existing(tmp_path / "workspace")
    index = CollectionRegistry(workspace.cache).index_of(name)
    assert index is not None
    questions = [row["question"] for row in result.results]
    with workspace.cache.transaction() as connection:
        statement = "UPDATE entries SET key = ? WHERE kind = 'routers' AND key = ?"
        connection.execute(statement, (name, router_key(index, questions)))
    assert kept_router(workspace.cache, index, questions[:3], None) is None
    workspace.close()
    assert asked(tmp_path) == before


def test_an_index_has_its_name_without_a_collection(tmp_path: Path) -> None:
    configuration = {"chunking_method": "recursive", "chunk_size": 16, "index_structure": "by_type"}
    config, cache = Workspace.open(tmp_path).vector_store_config(), Cache.open(":memory:")

    class Model:
        token_counter = None

        def fingerprint(self) -> dict[str, Any]:
            return {"model": 1}

    from ai4rag_nb.indexing.markdown import markdown_document

    pages = [markdown_document("# Pump\n\nThe pump is loud.", "pump.md")]
    work = IndexingPhase(pages, "pages", config, cache, EventBus(), StopFlag())
    cutting = Cutting(work, chunker_for(configuration, Model()))  # type: ignore[arg-type]
    names = {
        index_name(cutting, {**configuration, "index_structure": own}, Model())
        for own in ("single", "by_type")
    }  # type: ignore[arg-type]
    assert len(names) == 2


# --- a conversation ends with its user ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["assistant", "system", "tool", 7])
def test_only_a_user_asks(role: Any) -> None:
    talk = [{"role": "user", "content": "Hello"}, {"role": role, "content": "x"}]
    with pytest.raises(InputError, match="not by the user"):
        last_question(talk)
    rag = SimpleRAG(Says("Yes."), Finds(LAMP))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not by the user"):
        rag.chat(talk)
    assert rag.chat(talk[:1])["answer"] == "Yes."


# --- no passage is left ------------------------------------------------------------------------------------------------------


def test_a_threshold_that_leaves_nothing_is_told(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(
        chunk_size=[64],
        search_mode=["vector"],
        number_of_chunks=[2],
        score_threshold=[0.99],
        compression=["extractive"],
    )
    experiment = make_experiment(tmp_path, space, 1)
    experiment.search()
    (result,) = experiment.results.evaluations
    assert all(not row["hits"] for row in result.results)
    said = "Pattern1: the stage 'threshold' left no passage for 12 of 12 questions."
    assert said in experiment.results.notes
    experiment.close()
    assert said in open_run(tmp_path / "run").summary()


def counted(*stages: tuple[str, int], hits: int = 0) -> dict[str, Any]:
    return {"hits": [{}] * hits, "trace": [{"stage": stage, "counted": count} for stage, count in stages]}


def test_the_stage_that_took_the_last_passage_is_named() -> None:
    assert (
        emptied_by(counted(("search", 9), ("threshold", 2), ("extractive", 0), ("generation", 0)))
        == "extractive"
    )
    assert emptied_by(counted(("cot", 0), ("search", 0), ("generation", 0))) == "search"
    assert emptied_by(counted(("search", 3), ("generation", 0), hits=3)) == ""
    assert emptied_by({"hits": [], "trace": [{"stage": "search"}]}) == ""
    assert emptied_by({"trace": [{"stage": "search", "counted": 0}]}) == ""
    few = [counted(("search", 0))] * 1 + [counted(("search", 3), hits=3)] * 19
    assert empty_sentences(few, {}) == []
    assert empty_sentences(few[:2], {}) == ["the search found no passage for 1 of 2 questions."]


class Alike:
    """Embed every text in the same way, so that the first sentences are kept."""

    def embed_documents(self, texts: Sequence[str], on_progress: Any = None) -> Any:
        return np.ones((len(texts), 2))

    embed_queries = embed_documents


def test_a_compression_leaves_no_passage_that_is_only_a_heading() -> None:
    body = "Rinse it once a week with warm water."
    prefixed = "Care\nFilter\n" + body
    spans = {"start_index": 100, "end_index": 100 + len(body), "headings": ["Care", "Filter"]}
    alone = passage("b.md", 2, "Filter", headings=["Care", "Filter"])
    hits = [
        passage("a.md", 1, prefixed, **spans),
        alone,
        passage("c.md", 3, "## Filter\n\nCall the service."),
    ]
    stage = ExtractiveCompression(Alike(), 1.0)
    (outcome,) = stage.apply_many(["?"], [hits], StageSetting(None))  # type: ignore[arg-type]
    assert [hit.text for hit in outcome.hits] == [body, "Call the service."]
    tight = ExtractiveCompression(Alike(), 0.1)
    (outcome,) = tight.apply_many(["?"], [hits], StageSetting(None))  # type: ignore[arg-type]
    assert [hit.text for hit in outcome.hits] == [body]


# --- nothing is said twice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Consuming\nPoll it.", "[api/python.md > Python client]"),
        ("### Consuming\n\nPoll it.", "[api/python.md > Python client]"),
        ("Python client\nConsuming\nPoll it.", "[api/python.md]"),
        ("Python client > Consuming\nPoll it.", "[api/python.md]"),
        ("Consuming is slow.", "[api/python.md > Python client > Consuming]"),
        ("", "[api/python.md > Python client > Consuming]"),
    ],
)
def test_a_header_repeats_no_heading(text: str, line: str) -> None:
    metadata = {
        "document_id": "api/python.md",
        "sequence_number": 1,
        "headings": ["Python client", "Consuming"],
    }
    assert with_header(RetrievedChunk(text, metadata)).text == f"{line}\n{text}"


class Part:
    """Find nothing."""


class NoLists(HitListCache):
    def search_many(self, store: Any, queries: Sequence[str], *_: Any) -> list[list[RetrievedChunk]]:
        return [[] for _ in queries]


@pytest.mark.parametrize("router", [AllRouter(), RuleRouter()])
def test_only_kinds_that_exist_are_named(router: Any) -> None:
    batch = Batch(["Which colour is the box in the diagram?", "What does parse_args() return?"])
    setting = StageSetting(SimpleNamespace(parts={"text": Part(), "code": Part()}))  # type: ignore[arg-type]
    run_search(batch, setting, SearchSettings(5), NoLists(), router)
    notes = [trace.stages[0].note for trace in batch.traces]
    everything = ["text, code", "text, code"]
    assert notes == (everything if isinstance(router, AllRouter) else ["text", "text, code"])

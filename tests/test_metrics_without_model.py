"""Metrics that need no model: ranks with a cut-off, letters, exact matches, costs, custom functions, and rows that lack something."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.character_scores import character_pairs, exact_match
from ai4rag_nb.evaluation.cost_evaluator import CostEvaluator
from ai4rag_nb.evaluation.custom_metrics import custom_metric, sample_row, try_custom_metric
from ai4rag_nb.evaluation.evaluation_data import EvaluationData, build_evaluation_data
from ai4rag_nb.evaluation.evidence import EvidenceItem, Span
from ai4rag_nb.evaluation.metrics import DEFAULT_METRICS, Metrics, Unscored, metric_direction, shown_metrics
from ai4rag_nb.evaluation.overall_score import (
    apply_custom_metrics,
    check_metrics,
    default_evaluators,
    evaluate_answers,
    merge_evaluation_results,
    metric_scores,
    question_values,
)
from ai4rag_nb.evaluation.retrieval_evaluator import RetrievalEvaluator
from ai4rag_nb.evaluation.token_scores import WordCounter, best_overlap
from ai4rag_nb.foundations.errors import BenchmarkError, EvaluationError, InputError
from ai4rag_nb.querying.rag_template import make_answer

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
MEASURES = ("hit", "recall", "precision", "mrr", "map", "ndcg")
TREC = {"hit": "success", "recall": "recall", "precision": "P", "map": "map_cut", "ndcg": "ndcg_cut"}


def row(**changes: Any) -> EvaluationData:
    base = {
        "question": "Who opens it?",
        "answer": "the shift leader",
        "contexts": ["Ask the shift leader.", "Wear a helmet."],
        "context_ids": ["a.md", "b.md"],
        "ground_truths": ["the leader"],
        "ground_truths_context_ids": ["a.md"],
        "question_id": "q0",
    }
    return EvaluationData(**{**base, **changes})


def values(data: list[EvaluationData], names: list[Any], evaluators: Any = None) -> list[dict[str, Any]]:
    result = evaluate_answers(data, names, evaluators)
    return [{entry["name"]: entry["value"] for entry in one["metrics"]} for one in result["question_scores"]]


def data_set(name: str) -> Path:
    if not (DATA / name).is_dir():
        pytest.skip(f"the shared set '{name}' is not at {DATA}; set AI4RAG_NB_DATA")
    return DATA / name


# ----------------------------------------------------------------- ranks with a cut-off


def trec_values(ranking: list[str], gold: set[str], cutoffs: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """What trec_eval says about a ranking without repeats; MRR@k is that of the ranking cut at k."""
    import pytrec_eval

    listed = ",".join(map(str, cutoffs))
    measures = {f"{name}.{listed}" for name in TREC.values()}
    run = {name: float(len(ranking) - place) for place, name in enumerate(ranking)}
    judged = pytrec_eval.RelevanceEvaluator({"q": dict.fromkeys(gold, 1)}, measures).evaluate({"q": run})["q"]
    found = {(ours, k): judged[f"{theirs}_{k}"] for ours, theirs in TREC.items() for k in cutoffs}
    for k in cutoffs:
        cut = {"q": {name: run[name] for name in ranking[:k]}}
        only = pytrec_eval.RelevanceEvaluator({"q": dict.fromkeys(gold, 1)}, {"recip_rank"}).evaluate(cut)
        found["mrr", k] = only["q"]["recip_rank"]
    return found


def asked(side: str, cutoffs: tuple[int, ...]) -> list[Any]:
    return [Metrics.by_name(f"{side}_{measure}@{k}") for measure in MEASURES for k in cutoffs]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=14),
    st.sets(st.sampled_from("abcdefghijkl"), min_size=1),
)
def test_documents_are_ranked_as_by_trec_eval(ranking: list[str], gold: set[str]) -> None:
    cutoffs = (1, 3, 5, 100)
    data = row(contexts=["x"] * len(ranking), context_ids=ranking, ground_truths_context_ids=sorted(gold))
    result = RetrievalEvaluator().evaluate_metrics([data], asked("document", cutoffs))
    for (measure, k), expected in trec_values(list(dict.fromkeys(ranking)), gold, cutoffs).items():
        value = question_values(result, Metrics.by_name(f"document_{measure}@{k}"))["q0"]
        assert value == pytest.approx(expected, abs=1e-9), (measure, k)


@settings(max_examples=100, deadline=None)
@given(st.permutations(list(range(12))), st.integers(1, 6), st.integers(1, 12))
def test_chunks_with_one_passage_each_are_ranked_as_by_trec_eval(
    order: list[int], relevant: int, shown: int
) -> None:
    """Chunk n lies at 10n to 10n + 10; the passages of evidence are the first few chunks."""
    cutoffs, kept = (1, 3, 5), order[:shown]
    items = tuple(EvidenceItem("?", (Span("a.md", 10 * n, 10 * n + 10),)) for n in range(relevant))
    data = row(
        contexts=["x"] * shown,
        context_ids=["a.md"] * shown,
        context_spans=[(10 * n, 10 * n + 10) for n in kept],
        evidence=items,
    )
    result = RetrievalEvaluator().evaluate_metrics([data], asked("evidence", cutoffs))
    expected = trec_values([str(n) for n in kept], {str(n) for n in range(relevant)}, cutoffs)
    for (measure, k), number in expected.items():
        value = question_values(result, Metrics.by_name(f"evidence_{measure}@{k}"))["q0"]
        assert value == pytest.approx(number, abs=1e-9), (measure, k)


def test_a_shared_set_is_ranked_as_by_trec_eval() -> None:
    """Rankings by shared words over abstracts of scifact, with the judgements that come with it."""
    folder = data_set("scifact")
    judged: dict[str, set[str]] = {}
    for line in (folder / "qrels_test.tsv").read_text(encoding="utf-8").splitlines():
        parts = line.split("\t")
        if parts[-1].isdigit() and int(parts[-1]) > 0:
            name = next(part for part in parts if part.endswith(".md") or part.isdigit())
            judged.setdefault(parts[0], set()).add(name)
    assert len(judged) > 100
    chosen, queries = random.Random(3), list(judged.items())[:60]
    names = sorted({name for _, gold in queries for name in gold})
    rows, expected = [], []
    for number, (_, gold) in enumerate(queries):
        ranking = chosen.sample(names, 30)
        ranking[chosen.randrange(10)] = chosen.choice(sorted(gold))
        ranking = list(dict.fromkeys(ranking))
        rows.append(
            row(
                question_id=f"q{number}",
                contexts=["x"] * len(ranking),
                context_ids=ranking,
                ground_truths_context_ids=sorted(gold),
            )
        )
        expected.append(trec_values(ranking, gold, (5, 10)))
    result = RetrievalEvaluator().evaluate_metrics(rows, asked("document", (5, 10)))
    for measure in MEASURES:
        for k in (5, 10):
            metric = Metrics.by_name(f"document_{measure}@{k}")
            wanted = [one[measure, k] for one in expected]
            assert list(question_values(result, metric).values()) == pytest.approx(wanted, abs=1e-9)
            assert metric_scores(result, metric)["scores"]["mean"] == pytest.approx(sum(wanted) / len(wanted))


def test_a_chunk_that_repeats_a_passage_is_to_the_point_and_brings_nothing_new() -> None:
    """By hand: the chunks bring passage 0, passage 0 again, nothing, and passages 0 and 1."""
    items = (EvidenceItem("?", (Span("a.md", 0, 10),)), EvidenceItem("?", (Span("a.md", 20, 30),)))
    spans = [(0, 10), (2, 12), (40, 50), (0, 30)]
    data = row(contexts=["x"] * 4, context_ids=["a.md"] * 4, context_spans=spans, evidence=items)
    (found,) = values([data], [f"evidence_{measure}@4" for measure in MEASURES])
    assert found["evidence_precision@4"] == 3 / 4
    assert found["evidence_recall@4"] == 1.0 and found["evidence_hit@4"] == 1.0
    assert found["evidence_map@4"] == (1 + 2 / 4) / 2
    assert found["evidence_ndcg@4"] == pytest.approx((1 + 1 / math.log2(5)) / (1 + 1 / math.log2(3)))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("recall@5", "Known: document_hit@5|Did you mean"),
        ("document_recal@5", "Did you mean 'document_recall@5'"),
        ("document_recall@0", "Begin at 1"),
        ("document_recall@", "There is no metric"),
        ("document_recall@five", "There is no metric"),
        ("unitxt:document_recall@5", "There is no metric"),
        ("evidence_reciprocal_rank@5", "There is no metric"),
    ],
)
def test_a_wrong_name_with_a_cutoff_says_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        check_metrics([name], default_evaluators())


def test_tables_do_not_grow_by_what_nobody_asked_for() -> None:
    shown = [metric.name for metric in shown_metrics(DEFAULT_METRICS)]
    assert not [name for name in shown if "@" in name]
    new = {"exact_match", "character_recall", "character_faithfulness", "latency", "money", "context_tokens"}
    assert not new & set(shown)
    assert {metric.name for metric in Metrics} >= new and not [one for one in Metrics if "@" in one.name]
    result = evaluate_answers([row()], ["document_recall@3"])
    assert [one["name"] for one in result["metrics"]] == [
        "document_recall@3",
        "right_refusal",
        "wrong_refusal",
    ]


# ----------------------------------------------------------------- letters and exact matches


@pytest.mark.parametrize(
    ("answer", "truth", "recall"),
    [
        ("\u4ed6\u5728\u5317\u4eac\u5927\u5b66\u5de5\u4f5c", "\u5317\u4eac\u5927\u5b66", 1.0),
        ("\u9996\u90fd\u306f\u6771\u4eac\u3067\u3059", "\u6771\u4eac", 1.0),
        ("\u0e40\u0e21\u0e37\u0e2d\u0e07\u0e2b\u0e25\u0e27\u0e07\u0e04\u0e37\u0e2d\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e", "\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e", 1.0),
        ("\uff34\uff2f\uff2b\uff39\uff2f", "Tokyo", 1.0),
        ("\u5317\u4eac", "\u4e0a\u6d77", 0.0),
    ],
)  # fmt: skip
def test_languages_without_spaces_score_by_letters(answer: str, truth: str, recall: float) -> None:
    (found,) = values(
        [row(answer=answer, ground_truths=[truth], contexts=[answer], context_ids=["a.md"])],
        ["character_recall", "character_f1", "character_faithfulness", "answer_correctness"],
    )
    assert found["character_recall"] == recall and found["answer_correctness"] == 0.0
    assert (found["character_f1"] > 0) == bool(recall)
    assert found["character_faithfulness"] == 1.0


def test_chinese_answers_of_a_shared_set_score_by_letters_and_not_by_words() -> None:
    records = json.loads((data_set("xquad_multi") / "benchmark.json").read_text(encoding="utf-8"))
    chinese = [one for one in records if one["id"].startswith("zh-") and len(one["correct_answers"][0]) > 3]
    assert len(chinese) > 30
    rows = [
        row(
            question_id=one["id"],
            answer="\u7b54\u6848\u662f" + one["correct_answers"][0] + "\u3002",
            ground_truths=one["correct_answers"],
        )
        for one in chinese
    ]
    found = values(rows, ["character_recall", "answer_correctness"])
    letters = [one["character_recall"] for one in found]
    words = [one["answer_correctness"] for one in found]
    assert min(letters) > 0.5 and sum(words) / len(words) < 0.3


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_scores_by_letters_stay_between_0_and_1(answer: str, truth: str) -> None:
    counter = WordCounter(character_pairs)
    scores = best_overlap(counter, answer, [truth])
    assert 0 <= scores.precision <= 1 and 0 <= scores.recall <= 1 and 0 <= scores.f1 <= 1
    same = best_overlap(counter, truth, [truth])
    assert same.f1 == pytest.approx(1.0 if character_pairs(truth) else 0.0)
    assert exact_match(truth, [truth]) == float(bool(truth.strip()))


# ----------------------------------------------------------------- costs


def costly(**changes: Any) -> EvaluationData:
    details = {
        "model": "openai:small",
        "timings": {"retrieval": 0.25, "generation": 1.5},
        "tokens": {"prompt": 2_000, "completion": 100},
        "stages": (
            {"stage": "search", "seconds": 0.25, "calls": 0, "tokens": 0},
            {"stage": "generation", "seconds": 1.5, "calls": 1, "tokens": 2_100},
            {"stage": "verification", "seconds": 0.5, "calls": 2, "tokens": 300},
        ),
    }
    return row(**{**details, **changes})


COSTS = [
    *("context_tokens", "latency", "latency@retrieval", "latency@verification", "model_calls"),
    *("tokens_read", "tokens_written", "money"),
]


def test_what_an_answer_costs_is_counted_as_reported() -> None:
    evaluators = [*default_evaluators(), CostEvaluator({"small": {"input": 3, "output": 12}})]
    result = evaluate_answers([costly()], COSTS, evaluators)
    found = {entry["name"]: entry["value"] for entry in result["question_scores"][0]["metrics"]}
    characters = len("Ask the shift leader.") + len("Wear a helmet.")
    assert found["context_tokens"] == characters / 4
    assert (found["latency"], found["latency@retrieval"], found["latency@verification"]) == (1.75, 0.25, 0.5)
    assert (found["model_calls"], found["tokens_read"], found["tokens_written"]) == (3, 2_000, 100)
    assert found["money"] == pytest.approx((2_000 * 3 + 100 * 12 + 300 * 12) / 1_000_000)
    assert all(metric_direction(name) is False for name in COSTS)


def test_what_nobody_reported_is_unscored_and_never_free() -> None:
    bare = costly(timings={}, tokens={}, stages=(), question_id="q1")
    unpriced = costly(model="large", question_id="q2")
    lost = costly(answer=None, error="timed out", contexts=[], context_ids=[], question_id="q3")
    result = evaluate_answers([costly(model=None), bare, unpriced, lost], COSTS)
    reasons = {
        (one["question_id"], entry["name"]): entry.get("reason")
        for one in result["question_scores"]
        for entry in one["metrics"]
    }
    assert reasons["q0", "money"] == "the pipeline did not say which model answered"
    assert reasons["q1", "latency"] == "the pipeline reported no times"
    assert reasons["q1", "tokens_read"] == "the model did not report its tokens"
    assert reasons["q1", "model_calls"] == "the pipeline reported no stages"
    assert reasons["q2", "money"] == "there is no price for the model 'large'"
    assert {reasons["q3", name] for name in COSTS} == {"timed out"}
    money = metric_scores(result, Metrics.MONEY)
    assert (money["scores"]["mean"], money["scores"]["n"], money["unscored"]) == (None, 0, 4)


def test_costs_come_from_the_answers_of_pipelines() -> None:
    from ai4rag_nb.foundations.chunks import RetrievedChunk
    from ai4rag_nb.querying.generation import Generation
    from ai4rag_nb.querying.trace import StageRecord, Trace

    chunk = RetrievedChunk("Ask the leader.", {"document_id": "a.md", "start_index": 0, "end_index": 15})
    made = Generation("The leader.", 90, 10, "stop", 0.5)
    trace = Trace("Who?", (StageRecord("search", 0.125),))
    answer = make_answer("Who?", [chunk], trace, made, retrieval=0.125)
    benchmark = BenchmarkData(["Who?"], [["the leader"]], [["a.md"]])
    data = build_evaluation_data(benchmark, [answer], model="gpt")
    (found,) = values(data, COSTS[:3] + COSTS[4:], [CostEvaluator({"gpt": (1, 2)})])
    assert (found["latency"], found["latency@retrieval"], found["model_calls"]) == (0.625, 0.125, 1)
    assert found["money"] == pytest.approx((90 + 10 * 2) / 1e6)


# ----------------------------------------------------------------- custom metrics


def names_the_leader(data: EvaluationData) -> bool:
    """1 where the answer names the leader."""
    return "leader" in data.answer


def test_a_function_is_a_metric_and_part_of_the_overall_score() -> None:
    rows = [row(), row(question_id="q1", answer="nobody"), row(question_id="q2", answerable=False)]
    result = evaluate_answers(rows, [names_the_leader, "exact_match", "overall_score"])
    metric = custom_metric(names_the_leader)
    assert question_values(result, metric) == {"q0": 1.0, "q1": 0.0, "q2": None}
    assert question_values(result, Metrics.OVERALL_SCORE) == {"q0": 0.5, "q1": 0.0, "q2": None}
    entry = metric_scores(result, metric)
    assert (entry["scores"]["n"], entry["not_applicable"], entry["coverage"]) == (2, 1, 1.0)
    assert entry["description"] == "1 where the answer names the leader."
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "odd gave nothing where a number belongs"),
        (float("nan"), "odd gave nan"),
        (float("inf"), "odd gave inf"),
        ("0.5", "odd gave a str where a number belongs"),
        ([0.5], "odd gave a list where a number belongs"),
        (ValueError("no\nunit"), "odd raised ValueError: no unit"),
        (RecursionError(), "odd raised RecursionError"),
    ],
)
def test_what_is_no_number_is_unscored_and_found_before_anything_is_paid(given: Any, reason: str) -> None:
    def function(data: EvaluationData) -> Any:
        if data.question_id == "good":
            return 0.25
        if isinstance(given, Exception):
            raise given
        return given

    metric = custom_metric(function, "odd", "Odd.")
    rows = [row(question_id="good"), row(question_id="bad")]
    result = evaluate_answers(rows, [metric, "overall_score"])
    assert question_values(result, metric) == {"good": 0.25, "bad": None}
    assert question_values(result, Metrics.OVERALL_SCORE) == {"good": 0.25, "bad": None}
    assert result["question_scores"][1]["metrics"][-2]["reason"] == reason
    assert metric_scores(result, metric)["coverage"] == 0.5
    with pytest.raises(InputError, match="failed on a first row"):
        try_custom_metric(metric, row(question_id="bad"))
    assert try_custom_metric(metric, row(question_id="good")) == 0.25


def test_the_first_row_is_a_question_with_its_correct_answer() -> None:
    benchmark = BenchmarkData(
        ["Why?", "Who?"], [[], ["the leader"]], [[], ["a.md"]], evidence=[[], ["Ask the leader."]]
    )
    sample = sample_row(benchmark)
    assert (sample.question, sample.answer, sample.contexts) == ("Who?", "the leader", ["Ask the leader."])
    assert try_custom_metric(names_the_leader, sample) == 1.0
    assert try_custom_metric(lambda_with_reason(), sample) == Unscored("no number in it")
    assert benchmark.questions == ["Why?", "Who?"]


def lambda_with_reason() -> Any:
    return custom_metric(lambda data: Unscored("no number in it"), "numbers", "Compares numbers.")


def test_two_functions_of_one_name_and_functions_without_rows_are_refused() -> None:
    with pytest.raises(InputError, match="Two custom metrics are named 'names_the_leader'"):
        check_metrics([names_the_leader, custom_metric(names_the_leader, description="Other.")], [])
    merged = merge_evaluation_results([])
    with pytest.raises(EvaluationError, match="needs the answered questions"):
        apply_custom_metrics(merged, [custom_metric(names_the_leader)])
    assert check_metrics([names_the_leader, "names_the_leader"], []) == [custom_metric(names_the_leader)]


# ----------------------------------------------------------------- rows that lack something

ODD: list[dict[str, Any]] = [
    {"answer": None},
    {"answer": 7},
    {"answer": ""},
    {"answer": None, "error": "timed out"},
    {"answer": None, "error": "timed out", "contexts": [], "context_ids": []},
    {"contexts": None},
    {"contexts": [None, "x"]},
    {"contexts": [], "context_ids": []},
    {"context_ids": None},
    {"context_ids": [7, "a.md"]},
    {"context_ids": ["", "a.md"]},
    {"context_ids": ["a.md"]},
    {"ground_truths": None},
    {"ground_truths": []},
    {"ground_truths": "the leader"},
    {"ground_truths": ["the leader", 7]},
    {"ground_truths_context_ids": None},
    {"ground_truths_context_ids": []},
    {"ground_truths_context_ids": [7]},
    {"answerable": False, "ground_truths": [], "ground_truths_context_ids": []},
    {"refused": True},
]


def test_every_metric_handles_every_odd_row_alone() -> None:
    evidence = (EvidenceItem("Ask the shift leader.", (Span("a.md", 0, 21),)),)
    good = [row(question_id="first", evidence=evidence), row(question_id="last", evidence=evidence)]
    odd = [row(question_id=f"odd{n}", evidence=evidence, **changes) for n, changes in enumerate(ODD)]
    every = [*Metrics, *asked("document", (2,)), *asked("evidence", (2,)), names_the_leader]
    alone = values(good, every)
    result = evaluate_answers([good[0], *odd, good[1]], every)
    rows = result["question_scores"]
    assert len(rows) == len(ODD) + 2
    for place, expected in ((0, alone[0]), (-1, alone[1])):
        assert {entry["name"]: entry["value"] for entry in rows[place]["metrics"]} == expected
    for entry in (entry for one in rows for entry in one["metrics"]):
        assert (entry["value"] is None) == bool(entry.get("reason"))
    for entry in result["metrics"]:
        assert entry["scores"]["n"] + entry["unscored"] + entry["not_applicable"] == len(rows)
    json.dumps(result, allow_nan=False)


# ----------------------------------------------------------------- spans


def test_spans_of_a_shared_set_are_the_evidence_of_its_questions() -> None:
    folder = data_set("chunking")
    benchmark = BenchmarkData.from_file(folder / "benchmark.json")
    texts = {path.name: path.read_text(encoding="utf-8") for path in (folder / "documents").glob("*.md")}
    report = benchmark.check(texts)
    assert report.evidence_missing == []
    records = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    for record, items in zip(records, report.evidence, strict=True):
        assert [one.spans[0].start for one in items] == [span["start"] for span in record["spans"]]
        answers = {answer.strip() for answer in record["correct_answers"]}
        assert {item.text.strip() for item in items} == answers
    cut = {name: text[:20_000] for name, text in texts.items()}
    with pytest.raises(
        BenchmarkError, match=r"Question 'chunk-\d+': the span from \d+ to \d+ reaches beyond"
    ):
        benchmark.check(cut)


def test_spans_come_from_records_lists_and_tables_and_change_the_key(tmp_path: Path) -> None:
    import pandas

    records = [{"question": "Who?", "correct_answers": ["leader"], "correct_answer_document_keys": ["a.md"]}]
    bare = BenchmarkData.from_records(records)
    spanned = BenchmarkData.from_records([{**records[0], "spans": [{"start": 4, "end": 10}]}])
    table = pandas.DataFrame([{**records[0], "spans": [[4, 10]]}])
    file = tmp_path / "questions.csv"
    file.write_text(
        "question,correct_answers,correct_answer_document_keys,spans\n"
        'Who?,leader,a.md,"[{""start"": 4, ""end"": 10}]"\n'
    )
    by_lists = BenchmarkData(["Who?"], [["leader"]], [["a.md"]], spans=[[(4, 10)]])
    for one in (BenchmarkData.from_dataframe(table), BenchmarkData.from_file(file), by_lists):
        assert one.spans == spanned.spans == [[{"start": 4, "end": 10}]]
        assert one.fingerprint() == by_lists.fingerprint() != bare.fingerprint()
    (item,) = spanned.check({"a.md": "The leader."}).evidence[0]
    assert item == EvidenceItem("leader", (Span("a.md", 4, 10),))
    assert replace(row(), evidence=(item,)).found_evidence == (item,)
    with pytest.raises(BenchmarkError, match=r"record 1.*'spans' holds"):
        BenchmarkData.from_records([{**records[0], "spans": [{"start": 10, "end": 4}]}])

"""Evaluation: equality with unitxt and trec_eval, intervals, unscored questions, and what may be compared."""

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.answer_evaluator import AnswerEvaluator
from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.evaluation_data import (
    EvaluationData,
    build_evaluation_data,
    judge_hits,
    right_documents,
)
from ai4rag_nb.evaluation.evidence import EvidenceItem, Span
from ai4rag_nb.evaluation.intervals import bca_interval, paired_difference, summarise
from ai4rag_nb.evaluation.metrics import DEFAULT_METRICS, BaseEvaluator, Metrics, RAGMetric
from ai4rag_nb.evaluation.overall_score import (
    apply_custom_metrics,
    can_win,
    check_metrics,
    constant_metrics,
    default_evaluators,
    evaluate_answers,
    merge_evaluation_results,
    metric_scores,
    question_values,
)
from ai4rag_nb.evaluation.rank_scores import evidence_ndcg, evidence_recall, evidence_reciprocal_rank
from ai4rag_nb.evaluation.rank_scores import ndcg, recall, reciprocal_rank
from ai4rag_nb.evaluation.retrieval_evaluator import RetrievalEvaluator
from ai4rag_nb.evaluation.split import few_questions_note
from ai4rag_nb.evaluation.token_scores import WordCounter, answer_words
from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator
from ai4rag_nb.foundations.chunks import RetrievedChunk
from ai4rag_nb.foundations.errors import EvaluationError, InputError

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
THREE = (Metrics.FAITHFULNESS, Metrics.ANSWER_CORRECTNESS, Metrics.CONTEXT_CORRECTNESS)
Evaluate = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture(scope="module")
def unitxt_evaluate() -> Evaluate:
    """unitxt with every way out of the machine closed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the evaluation asked for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        from unitxt.eval_utils import evaluate

        yield evaluate


def made(
    question_id: str = "q0",
    answer: str | None = "the shift leader",
    contexts: tuple[str, ...] = ("Ask the shift leader.",),
    ids: tuple[str, ...] = ("a.md",),
    truths: tuple[str, ...] = ("the leader",),
    keys: tuple[str, ...] = ("a.md",),
    **others: Any,
) -> EvaluationData:
    return EvaluationData(
        "Who?", answer, list(contexts), list(ids), list(truths), list(keys), question_id, **others
    )


def set_rows(name: str, seed: int = 5) -> list[EvaluationData]:
    """Rows as a pipeline would give them: right, wrong, partial and mixed-up answers over pieces of documents."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the shared set '{name}' is not at {DATA}; set AI4RAG_NB_DATA")
    chosen = random.Random(seed)
    records = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    names = sorted({key for record in records for key in record["correct_answer_document_keys"]})
    texts = {key: (folder / "documents" / key).read_text(encoding="utf-8") for key in names}
    rows = []
    for number, record in enumerate(records):
        right = record["correct_answer_document_keys"]
        ids = [chosen.choice(right) if chosen.random() < 0.4 else chosen.choice(names) for _ in range(5)]
        starts = [chosen.randrange(max(1, len(texts[key]))) for key in ids]
        contexts = [texts[key][start : start + 700] for key, start in zip(ids, starts, strict=True)]
        gold, other = record["correct_answers"][0], chosen.choice(records)["correct_answers"][0]
        words = gold.split()
        answers = [
            *(gold, other, f"{other} {gold}", " ".join(words[: len(words) // 2]), contexts[0][:150]),
            *("", "The a an", "I don\u2019t know \u2014 the text does not say."),
        ]
        answer = chosen.choice(answers)
        rows.append(
            EvaluationData(
                record["question"], answer, contexts, ids, record["correct_answers"], right, f"q{number}"
            )
        )
    return rows


def assert_equal_to_unitxt(rows: list[EvaluationData], evaluate: Evaluate, intervals: bool = True) -> None:
    names = {metric: f"metrics.rag.external_rag.{metric.name}" for metric in THREE}
    theirs, summary = evaluate(
        [row.to_dict() for row in rows], list(names.values()), compute_conf_intervals=intervals
    )
    ours = UnitxtEvaluator().evaluate_metrics(rows, THREE)
    for metric, name in names.items():
        values = list(question_values(ours, metric).values())
        assert values == pytest.approx([row[name] for row in theirs], abs=1e-9)
        scores, expected = metric_scores(ours, metric)["scores"], summary[name]
        assert scores["n"] == len(rows)
        assert scores["mean"] == pytest.approx(expected["score"], abs=1e-9)
        if intervals and "score_ci_low" in expected:
            assert scores["ci_low"] == pytest.approx(expected["score_ci_low"], abs=1e-9)
            assert scores["ci_high"] == pytest.approx(expected["score_ci_high"], abs=1e-9)
        else:
            assert intervals is False or scores["ci_low"] == scores["mean"] == scores["ci_high"]


# ----------------------------------------------------------------- equal to unitxt


@pytest.mark.parametrize("name", ["squad", "covidqa", "xquad_multi", "code"])
def test_scores_and_intervals_equal_unitxt_on_real_texts(name: str, unitxt_evaluate: Evaluate) -> None:
    assert_equal_to_unitxt(set_rows(name), unitxt_evaluate)


ODD = st.one_of(
    st.text(max_size=40),
    st.text(
        alphabet="aAnNtThHeE .,-\u2014\u2019'\"_\n\t\x01\x1c\u00a0\u00e9e\u0301\u0130\u4e2d\u6587\U0001f600",
        max_size=40,
    ),
    st.sampled_from(
        [
            "",
            "The a an",
            "$1,234.50",
            "my_var foo.bar()",
            "the\u2014end",
            "don\u2019t",
            "a\x85b",
            "\u01c5 \u1e9e",
        ]
    ),
)
ROWS = st.lists(
    st.builds(
        made,
        answer=ODD,
        contexts=st.lists(ODD, min_size=3, max_size=3),
        ids=st.lists(st.sampled_from("abc"), min_size=3, max_size=3),
        truths=st.lists(ODD, min_size=1, max_size=3),
        keys=st.lists(st.sampled_from("abcd"), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS)
@example([made(answer="x")])
@example([made(), made()])
def test_scores_and_intervals_equal_unitxt_on_odd_texts(
    unitxt_evaluate: Evaluate, rows: list[EvaluationData]
) -> None:
    numbered = [made(f"q{n}", r.answer, r.contexts, r.context_ids, r.ground_truths, r.ground_truths_context_ids)
                for n, r in enumerate(rows)]  # fmt: skip
    assert_equal_to_unitxt(numbered, unitxt_evaluate)


@settings(max_examples=300, deadline=None)
@given(ODD)
def test_words_are_those_of_unitxt(text: str) -> None:
    from unitxt.metrics import normalize_answer

    assert answer_words(text) == normalize_answer(text).split()


def test_the_library_as_backend_gives_the_same_result(unitxt_evaluate: Evaluate) -> None:
    rows = [
        made("q0"),
        made("q1", answer="nobody"),
        made("q2", answer=None, error="timed out"),
        made("q3", truths=(), keys=(), answerable=False),
        made("q4", contexts=(), ids=()),
        made("q5", answer="I cannot say, ask the shift leader.", refused=True),
    ]
    native = UnitxtEvaluator().evaluate_metrics(rows, THREE)
    library = UnitxtEvaluator("unitxt").evaluate_metrics(rows, THREE)
    assert native["question_scores"] == library["question_scores"]
    for ours, theirs in zip(native["metrics"], library["metrics"], strict=True):
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-9)
        assert {**ours, "scores": 0} == {**theirs, "scores": 0}
    nothing = [made("q0", answer=None, error="timed out")]
    assert UnitxtEvaluator("unitxt").evaluate_metrics(nothing, THREE)["metrics"][0]["scores"]["mean"] is None


def test_a_failure_of_the_library_is_one_of_ours(
    unitxt_evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such artifact")

    monkeypatch.setattr("unitxt.eval_utils.evaluate", fail)
    with pytest.raises(EvaluationError, match="unitxt could not compute faithfulness: no such artifact"):
        UnitxtEvaluator("unitxt").evaluate_metrics([made()], [Metrics.FAITHFULNESS])


def test_scoring_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from ai4rag_nb.evaluation.overall_score import evaluate_answers\n"
        "from ai4rag_nb.evaluation.evaluation_data import EvaluationData\n"
        "from ai4rag_nb.evaluation.metrics import DEFAULT_METRICS\n"
        "row = EvaluationData('q', 'a b', ['b c'], ['d'], ['b'], ['d'], 'q0')\n"
        "evaluate_answers([row], DEFAULT_METRICS)\n"
        "print([name for name in ('unitxt', 'scipy', 'pandas', 'docling_core', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ----------------------------------------------------------------- intervals


VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 1.0]), st.floats(0, 1, allow_subnormal=False)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
@example([0.0] * 99 + [1.0])
@example([1.0] * 99 + [0.0])
@example([0.1, 0.1 + 1e-17, 0.1, 0.30000000000000004, 0.1 + 0.2])
def test_an_interval_holds_its_own_mean(values: list[float]) -> None:
    summary = summarise(values)
    assert summary["n"] == len(values)
    assert summary["mean"] == pytest.approx(np.mean(values), abs=1e-12)
    assert summary["ci_low"] <= summary["mean"] <= summary["ci_high"]
    assert min(values) - 1e-12 <= summary["ci_low"] and summary["ci_high"] <= max(values) + 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1.0]), min_size=2, max_size=60))
def test_intervals_equal_scipy(values: list[float]) -> None:
    from scipy.stats import bootstrap

    if len(set(values)) == 1:
        return
    expected = bootstrap(
        (np.array(values),), np.mean, n_resamples=1000, random_state=np.random.default_rng(42)
    )
    assert bca_interval(values) == pytest.approx(tuple(expected.confidence_interval), abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_equal_values_have_an_interval_of_no_width(value: float, count: int) -> None:
    assert summarise([value] * count) == {"mean": value, "ci_low": value, "ci_high": value, "n": count}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.floats(0, 1)), min_size=1, max_size=30))
def test_pairs_count_only_where_both_sides_scored(pairs: list[tuple[float | None, float | None]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    difference, reverse = paired_difference(first, second), paired_difference(second, first)
    both = [a - b for a, b in pairs if a is not None and b is not None]
    assert difference.n == len(both)
    if both:
        assert difference.mean == pytest.approx(np.mean(both), abs=1e-12)
        assert difference.mean == pytest.approx(-(reverse.mean or 0), abs=1e-12)
    else:
        assert difference.mean is None and not difference.is_separable


def test_pairing_shows_what_separate_intervals_hide() -> None:
    hardness = np.linspace(0, 0.9, 40)
    better, worse = hardness + 0.08 + 0.02 * np.sin(np.arange(40)), hardness
    separate = summarise(better.tolist()), summarise(worse.tolist())
    assert separate[0]["ci_low"] < separate[1]["ci_high"]
    assert paired_difference(better.tolist(), worse.tolist()).is_separable


# ----------------------------------------------------------------- ranks


RANKINGS = st.lists(st.sampled_from("abcdefghij"), max_size=14)
GOLD = st.sets(st.sampled_from("abcdefghijkl"), min_size=1)


@settings(max_examples=200, deadline=None)
@given(RANKINGS, GOLD)
def test_rank_metrics_equal_trec_eval(ranking: list[str], gold: set[str]) -> None:
    import pytrec_eval

    kept = list(dict.fromkeys(ranking))
    if not kept:
        assert (reciprocal_rank(kept, gold), recall(kept, gold), ndcg(kept, gold)) == (0, 0, 0)
        return
    measures = {"recip_rank", "recall.3,5", "recall.100", "ndcg", "ndcg_cut.3,5"}
    run = {"q": {name: float(len(kept) - place) for place, name in enumerate(kept)}}
    expected = pytrec_eval.RelevanceEvaluator({"q": dict.fromkeys(gold, 1)}, measures).evaluate(run)["q"]
    assert reciprocal_rank(kept, gold) == pytest.approx(expected["recip_rank"], abs=1e-12)
    assert recall(ranking, gold) == pytest.approx(expected["recall_100"], abs=1e-12)
    assert ndcg(ranking, gold) == pytest.approx(expected["ndcg"], abs=1e-12)
    for k in (3, 5):
        assert recall(ranking, gold, k) == pytest.approx(expected[f"recall_{k}"], abs=1e-12)
        assert ndcg(ranking, gold, k) == pytest.approx(expected[f"ndcg_cut_{k}"], abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(RANKINGS, GOLD)
def test_evidence_one_item_a_chunk_is_ranked_like_documents(ranking: list[str], gold: set[str]) -> None:
    numbers = {name: number for number, name in enumerate(sorted(gold))}
    kept = list(dict.fromkeys(ranking))
    found = [frozenset({numbers[name]}) if name in numbers else frozenset() for name in kept]
    assert evidence_reciprocal_rank(found) == reciprocal_rank(kept, gold)
    assert evidence_recall(found, len(gold)) == pytest.approx(recall(kept, gold))
    assert evidence_ndcg(found, len(gold)) == pytest.approx(ndcg(kept, gold))


@given(st.lists(st.frozensets(st.integers(0, 4)), max_size=8))
def test_evidence_gain_is_one_only_for_the_best_order(found: list[frozenset[int]]) -> None:
    value = evidence_ndcg(found, 5)
    assert 0 <= value <= 1 + 1e-12
    seen: set[int] = set()
    news = []
    for items in found:
        news.append(bool(items - seen))
        seen |= items
    perfect = len(seen) == 5 and news == sorted(news, reverse=True)
    assert (value > 1 - 1e-9) == perfect


def test_chunks_of_one_document_count_once() -> None:
    row = made(contexts=("x", "y", "z"), ids=("a", "a", "b"), keys=("b", "c"))
    result = RetrievalEvaluator().evaluate_metrics([row], RetrievalEvaluator.metrics)
    values = {entry["name"]: entry["value"] for entry in result["question_scores"][0]["metrics"]}
    assert values["document_recall"] == 0.5
    assert values["document_reciprocal_rank"] == 0.5
    assert values["document_ndcg"] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))


def test_the_right_document_is_not_enough_where_evidence_is_known() -> None:
    item = EvidenceItem("the shift leader", (Span("a.md", 500, 520),))
    beside = made(
        contexts=("x", "y"), ids=("a.md", "a.md"), context_spans=[(0, 400), (380, 509)], evidence=(item,)
    )
    half = made(
        contexts=("x", "y"), ids=("a.md", "a.md"), context_spans=[(0, 400), (380, 510)], evidence=(item,)
    )
    inside = made(
        contexts=("x", "y"), ids=("a.md", "b.md"), context_spans=[(505, 508), (500, 520)], evidence=(item,)
    )
    assert [judge_hits(row) for row in (beside, half, inside)] == [
        [False, False],
        [False, True],
        [True, False],
    ]
    result = RetrievalEvaluator().evaluate_metrics([beside, half, inside], [Metrics.EVIDENCE_RECIPROCAL_RANK])
    assert [row["metrics"][0]["value"] for row in result["question_scores"]] == [0.0, 0.5, 1.0]


def test_questions_without_found_evidence_have_a_right_document_and_no_right_passage() -> None:
    lost = made(
        contexts=("x", "y"),
        ids=("b.md", "a.md"),
        context_spans=[(0, 4), (0, 4)],
        evidence=(EvidenceItem("?"),),
    )
    known = replace(
        lost, question_id="q2", evidence=(EvidenceItem("once", (Span("a.md", 0, 4),)),), answerable=True
    )
    assert judge_hits(lost) == [None, None] and right_documents(lost) == [False, True]
    wanted = [Metrics.EVIDENCE_RECALL, Metrics.EVIDENCE_NDCG, Metrics.DOCUMENT_RECIPROCAL_RANK]
    result = RetrievalEvaluator().evaluate_metrics([lost, known], wanted)
    values = [[entry["value"] for entry in row["metrics"]] for row in result["question_scores"]]
    assert values[0] == [None, None, 0.5] and values[1][0] == 1.0
    by_name = {entry["name"]: entry for entry in result["metrics"]}
    assert (
        by_name["evidence_recall"]["scores"]["n"] == 1
        and by_name["document_reciprocal_rank"]["scores"]["n"] == 2
    )
    assert by_name["evidence_recall"]["coverage"] == 1.0 and by_name["evidence_recall"]["not_applicable"] == 1


# ----------------------------------------------------------------- unscored, refused, unanswerable


def evaluation() -> dict[str, Any]:
    rows = [
        made("right"),
        made("wrong", answer="nobody"),
        made("lost", answer=None, error="the request timed out", contexts=(), ids=()),
        made("declined", answer="I do not know, ask the shift leader.", refused=True),
        made("open", answer="In 1907.", truths=(), keys=(), answerable=False),
        made("open, declined", answer="I don't know.", truths=(), keys=(), answerable=False, refused=True),
    ]
    metrics = [*DEFAULT_METRICS, Metrics.DOCUMENT_RECALL]
    return evaluate_answers(rows, metrics)


def test_unscored_is_a_third_state() -> None:
    result = evaluation()
    faithfulness = metric_scores(result, Metrics.FAITHFULNESS)
    assert question_values(result, Metrics.FAITHFULNESS) == {
        **{"right": 1.0, "wrong": 0.0, "lost": None, "declined": 0.0},
        **{"open": None, "open, declined": None},
    }
    assert faithfulness["scores"]["mean"] == pytest.approx(1 / 3)
    assert (faithfulness["scores"]["n"], faithfulness["unscored"], faithfulness["not_applicable"]) == (
        3,
        1,
        2,
    )
    assert faithfulness["coverage"] == 0.75
    lost = next(row for row in result["question_scores"] if row["question_id"] == "lost")
    assert {entry["value"] for entry in lost["metrics"]} == {None}
    reasons = {entry["reason"] for entry in lost["metrics"] if entry["name"] != "right_refusal"}
    assert reasons == {"the request timed out"}


def test_refusals_are_two_rates_and_never_faithful() -> None:
    result = evaluation()
    assert metric_scores(result, Metrics.RIGHT_REFUSAL)["scores"]["mean"] == 0.5
    assert metric_scores(result, Metrics.RIGHT_REFUSAL)["scores"]["n"] == 2
    wrong = metric_scores(result, Metrics.WRONG_REFUSAL)
    assert (wrong["scores"]["mean"], wrong["scores"]["n"], wrong["coverage"]) == (
        pytest.approx(1 / 3),
        3,
        0.75,
    )
    assert question_values(result, Metrics.FAITHFULNESS)["declined"] == 0.0
    assert question_values(result, Metrics.ANSWER_CORRECTNESS)["declined"] == 0.0


def test_the_overall_score_is_the_mean_of_the_selected_metrics_and_has_its_own_interval() -> None:
    result = evaluation()
    selected = [*THREE, Metrics.DOCUMENT_RECALL]
    overall = question_values(result, Metrics.OVERALL_SCORE)
    for name, value in overall.items():
        parts = [question_values(result, metric)[name] for metric in selected]
        assert value == (None if None in parts else pytest.approx(sum(p for p in parts if p is not None) / 4))
    scores = metric_scores(result, Metrics.OVERALL_SCORE)
    assert scores["scores"] == summarise(list(overall.values()))
    assert scores["coverage"] == 0.75 and not can_win(result, Metrics.OVERALL_SCORE)
    assert Metrics.TOKEN_F1.name in [entry["name"] for entry in result["metrics"]]


def test_coverage_of_nine_tenths_may_win() -> None:
    rows = [made(f"q{number}") for number in range(18)]
    lost = [made(f"lost{number}", answer=None, error="x") for number in range(3)]
    unanswerable = [made("open", truths=(), keys=(), answerable=False)] * 1
    assert can_win(evaluate_answers(rows + lost[:2] + unanswerable, DEFAULT_METRICS), Metrics.OVERALL_SCORE)
    assert not can_win(evaluate_answers(rows + lost, DEFAULT_METRICS), Metrics.OVERALL_SCORE)
    assert not can_win(evaluate_answers(lost, DEFAULT_METRICS), Metrics.OVERALL_SCORE)
    assert not can_win(evaluate_answers(unanswerable, DEFAULT_METRICS), Metrics.OVERALL_SCORE)


def test_every_question_lost_gives_no_mean_and_no_zero() -> None:
    result = evaluate_answers([made(answer=None)], DEFAULT_METRICS)
    for entry in result["metrics"]:
        if not entry["name"].startswith(("context", "document", "evidence")):
            assert entry["scores"]["mean"] is None and entry["scores"]["n"] == 0
    assert evaluate_answers([], DEFAULT_METRICS)["question_scores"] == []


def test_the_whole_page_is_right_and_not_to_the_point() -> None:
    page = "word " * 200 + "the leader"
    result = evaluate_answers([made(answer=page)], DEFAULT_METRICS)
    assert metric_scores(result, Metrics.ANSWER_CORRECTNESS)["scores"]["mean"] == 1.0
    assert metric_scores(result, Metrics.TOKEN_F1)["scores"]["mean"] < 0.02
    assert metric_scores(result, Metrics.ANSWER_WORDS)["scores"]["mean"] == 201


def test_refusals_without_a_mark_are_known_by_their_words() -> None:
    benchmark = BenchmarkData(["Who?", "Why?", "How?"], [["a"]] * 3, [["a"]] * 3)
    answers = [
        {"answer": "I don\u2019t know."},
        {"answer": "The leader, but I don't know his name."},
        {"answer": "I don't know.", "refused": False},
    ]
    assert [row.refused for row in build_evaluation_data(benchmark, answers)] == [True, False, False]


# ----------------------------------------------------------------- joining, merging, names


def test_chunks_may_come_from_other_libraries() -> None:
    class Document:
        page_content, metadata = "from elsewhere", {"document_id": "b.md"}

    benchmark = BenchmarkData(["Who?"], [["the leader"]], [["a.md"]])
    chunk = RetrievedChunk("ours", {"document_id": "a.md", "start_index": 3, "end_index": 7})
    mapping = {"page_content": "mapped", "metadata": {"document_id": 7, "start_index": 1, "end_index": None}}
    response = {"answer": "the leader", "reference_documents": [chunk, Document(), mapping]}
    (row,) = build_evaluation_data(benchmark, [response])
    assert row.contexts == ["ours", "from elsewhere", "mapped"]
    assert row.context_ids == ["a.md", "b.md", "7"]
    assert row.context_spans == [(3, 7), (None, None), (None, None)]
    assert set(row.to_dict()) == {
        *("question", "answer", "contexts", "context_ids", "ground_truths"),
        *("ground_truths_context_ids", "question_id"),
    }


def test_responses_in_another_order_are_refused() -> None:
    benchmark = BenchmarkData(["Who?", "Why?"], [["a"], ["b"]], [["a"], ["b"]])
    answers = [{"question": "Why?", "answer": "b"}, {"question": "Who?", "answer": "a"}]
    with pytest.raises(EvaluationError, match="Response 0 answers 'Why\\?'"):
        build_evaluation_data(benchmark, answers)
    with pytest.raises(EvaluationError, match="2 questions and 1 responses"):
        build_evaluation_data(benchmark, answers[:1])


def test_metrics_of_one_name_are_told_apart_by_their_evaluator() -> None:
    class Judge(BaseEvaluator):
        name = "judge"
        metrics = (RAGMetric("faithfulness", "judge", "Judged."),)

        def evaluate_metrics(self, evaluation_data: Any, metrics: Any) -> dict[str, Any]:
            from ai4rag_nb.evaluation.metrics import build_result

            return build_result(["q0"], {metric: [0.25] for metric in self.selected(metrics)})

    chosen = [Metrics.FAITHFULNESS, *Judge.metrics, Metrics.OVERALL_SCORE]
    result = evaluate_answers([made()], chosen, [*default_evaluators(), Judge()])
    assert question_values(result, Metrics.FAITHFULNESS) == {"q0": 1.0}
    assert question_values(result, Judge.metrics[0]) == {"q0": 0.25}
    assert question_values(result, Metrics.OVERALL_SCORE) == {"q0": 0.625}
    with pytest.raises(InputError, match="No evaluator of this run computes 'judge:faithfulness'"):
        check_metrics(chosen, default_evaluators())
    with pytest.raises(EvaluationError, match="Two results hold"):
        merge_evaluation_results([result, result])


@pytest.mark.parametrize(
    "name", ["faithfullness", "answer_corectness", "token-f1", "unitxt:faithfulnes", "zzz"]
)
def test_a_misspelt_metric_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(InputError, match="There is no metric"):
        check_metrics([name], default_evaluators())


def test_results_are_json_and_unrounded() -> None:
    rows = [made("q0", answer="the tall leader of three"), made("q1", answer=None, error="x")]
    result = evaluate_answers(rows, [*DEFAULT_METRICS, *RetrievalEvaluator.metrics])
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again == result
    assert question_values(result, Metrics.FAITHFULNESS)["q0"] == 1 / 4
    assert apply_custom_metrics(result, THREE) == result


def test_metrics_that_say_nothing_are_flagged() -> None:
    def scores(answer: str) -> list[dict[str, Any]]:
        rows = [made("q0", answer=answer), made("q1", answer="leader"), made("q2", answer=None, error="x")]
        return evaluate_answers(rows, THREE)["question_scores"]

    flagged = constant_metrics([scores("leader"), scores("shift"), scores("shift leader")])
    assert ("faithfulness", "unitxt") in flagged and ("context_correctness", "unitxt") in flagged
    assert ("answer_correctness", "unitxt") not in flagged
    assert constant_metrics([scores("leader")]) == []


def test_few_questions_are_called_noise() -> None:
    assert "29 questions" in few_questions_note(29) and "noise" in few_questions_note(29)
    assert few_questions_note(30) == ""


# ----------------------------------------------------------------- remembering words


def test_each_text_is_split_once_and_memory_is_bounded() -> None:
    seen: list[str] = []

    def split(text: str) -> list[str]:
        seen.append(text)
        return text.split()

    counter = WordCounter(split, remembered=10)
    for text in ["a b", "a b", "c"] * 5:
        counter.counts(text)
    assert seen == ["a b", "c"]
    for number in range(100):
        counter.counts(str(number))
    assert len(counter) <= 10


def test_one_evaluator_serves_many_threads() -> None:
    rows = [made(f"q{n}", answer=f"leader {n % 7}", contexts=(f"leader {n % 5}", "x")) for n in range(60)]
    evaluator = UnitxtEvaluator(counter=WordCounter(remembered=8))
    expected = UnitxtEvaluator().evaluate_metrics(rows, THREE)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(evaluator.evaluate_metrics(rows, THREE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_character_pairs_help_where_words_do_not() -> None:
    row = made(answer="\u5728\u5317\u4eac\u5927\u5b66", truths=("\u5317\u4eac\u5927\u5b66",))
    result = AnswerEvaluator().evaluate_metrics([row], [Metrics.TOKEN_F1, Metrics.CHARACTER_F1])
    values = [entry["value"] for entry in result["question_scores"][0]["metrics"]]
    assert values[0] == 0.0 and values[1] == pytest.approx(6 / 7)


def test_the_comparison_of_speed_runs(unitxt_evaluate: Evaluate) -> None:
    if not (DATA / "squad").is_dir():
        pytest.skip(f"the shared set 'squad' is not at {DATA}; set AI4RAG_NB_DATA")
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "evaluation.py"
    done = subprocess.run(
        [sys.executable, script, "--questions", "6"], capture_output=True, text=True, check=True
    )
    (row,) = json.loads(done.stdout)["runs"]
    assert row["questions"] == 6 and row["largest_difference"] < 1e-9

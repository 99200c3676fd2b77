"""The three scores and their intervals equal those of unitxt: every shared set, three kinds of answers, and odd rows."""

import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.evaluation_data import EvaluationData
from ai4rag_nb.evaluation.metrics import Metrics, Unscored
from ai4rag_nb.evaluation.overall_score import metric_scores, question_values
from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator, native_value

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
SETS = ("squad", "covidqa", "scifact", "tables", "code", "xquad_multi", "chunking")
THREE = (Metrics.FAITHFULNESS, Metrics.ANSWER_CORRECTNESS, Metrics.CONTEXT_CORRECTNESS)
NAMES = {metric: f"metrics.rag.external_rag.{metric.name}" for metric in THREE}
Evaluate = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]


@pytest.fixture(scope="module")
def unitxt_evaluate() -> Iterator[Evaluate]:
    """unitxt with every way out of the machine closed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the evaluation asked for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        from unitxt.eval_utils import evaluate

        yield evaluate


def readable(path: Path) -> str:
    """The text of a document; of a DoclingDocument its texts and cells, in the order of the file."""
    if path.suffix != ".json":
        return path.read_text(encoding="utf-8")
    document = json.loads(path.read_text(encoding="utf-8"))
    texts = [item["text"] for item in document.get("texts", ())]
    for table in document.get("tables", ()):
        texts += [cell["text"] for cell in table["data"]["table_cells"]]
    return "\n".join(texts)


def set_rows(name: str, kind: str) -> list[EvaluationData]:
    """Answer every question of a set with a correct answer, another question's, or the first context."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the shared set '{name}' is not at {DATA}; set AI4RAG_NB_DATA")
    chosen = random.Random(f"{name} {kind}")
    records = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    names = sorted({key for record in records for key in record["correct_answer_document_keys"]})
    texts = {key: readable(folder / "documents" / key) for key in names}
    shuffled = chosen.sample(records, len(records))
    rows = []
    for number, (record, other) in enumerate(zip(records, shuffled, strict=True)):
        keys = record["correct_answer_document_keys"]
        ids = [chosen.choice(keys) if chosen.random() < 0.3 else chosen.choice(names) for _ in range(4)]
        starts = [chosen.randrange(max(1, len(texts[key]))) for key in ids]
        contexts = [texts[key][start : start + 500] for key, start in zip(ids, starts, strict=True)]
        answers = {
            "gold": chosen.choice(record["correct_answers"]),
            "shuffled": other["correct_answers"][0],
            "retrieved": contexts[0],
        }
        fields = (record["question"], answers[kind], contexts, ids, record["correct_answers"], keys)
        rows.append(EvaluationData(*fields, f"q{number}"))
    return rows


def assert_equal(rows: list[EvaluationData], evaluate: Evaluate) -> None:
    """Scores and bounds agree to 1e-9, question by question and in the mean."""
    theirs, summary = evaluate(
        [row.to_dict() for row in rows], list(NAMES.values()), compute_conf_intervals=True
    )
    ours = UnitxtEvaluator().evaluate_metrics(rows, THREE)
    for metric, name in NAMES.items():
        values = list(question_values(ours, metric).values())
        assert values == pytest.approx([row[name] for row in theirs], abs=1e-9, rel=0)
        scores, expected = metric_scores(ours, metric)["scores"], summary[name]
        assert scores["n"] == len(rows)
        assert scores["mean"] == pytest.approx(expected["score"], abs=1e-9, rel=0)
        low, high = (
            expected.get("score_ci_low", scores["mean"]),
            expected.get("score_ci_high", scores["mean"]),
        )
        assert [scores["ci_low"], scores["ci_high"]] == pytest.approx([low, high], abs=1e-9, rel=0)


@pytest.mark.parametrize("kind", ["gold", "shuffled", "retrieved"])
@pytest.mark.parametrize("name", SETS)
def test_every_shared_set_scores_as_with_unitxt(name: str, kind: str, unitxt_evaluate: Evaluate) -> None:
    assert_equal(set_rows(name, kind), unitxt_evaluate)


# Any character of Unicode but halves of pairs, which unitxt cannot encode, and runs of those that split words in odd ways.
ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
SCRIPTS = st.text("aA tThHeE\u0301\u0130\u0131\u03c2\u03a3\u1e9e\u00df\ufb01\u0e17\u0e35\u0e48\u4e2d\u6587\u3002\u0627\u0644\u200d\u200b\u2028\u00ad\uff21_-\u2019.", max_size=30)  # fmt: skip
WORDS = st.lists(st.sampled_from(["the", "A", "an", "cat", "CAT.", "ca-t", "\u2014the", "caf\u00e9", "\u5317\u4eac"]), max_size=8)  # fmt: skip
TEXT = st.one_of(ANY, SCRIPTS, WORDS.map(" ".join))
ROW = st.tuples(
    TEXT,
    st.lists(TEXT, min_size=1, max_size=3),
    st.lists(TEXT, min_size=1, max_size=3),
    st.lists(st.sampled_from(["a.md", "b.md", "\u00fc.md", "1"]), min_size=0, max_size=4),
    st.lists(st.sampled_from(["a.md", "\u00fc.md", "1"]), min_size=1, max_size=2),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ROW, min_size=2, max_size=12))
def test_any_unicode_scores_as_with_unitxt(unitxt_evaluate: Evaluate, rows: list[Any]) -> None:
    made = [
        EvaluationData("?", answer, contexts, ids, truths, keys, f"q{number}")
        for number, (answer, contexts, truths, ids, keys) in enumerate(rows)
    ]
    assert_equal(made, unitxt_evaluate)


# What unitxt makes of odd rows, measured by calling it, and what ours makes of them: its number where it has one that means
# something, and a reason where it stops for the whole batch or scores 0 because there is nothing to compare with.
STOPS = "ValueError"
ODD_ROWS: list[tuple[str, dict[str, Any], tuple[Any, Any, Any], tuple[Any, Any, Any]]] = [
    ("an empty answer", {"answer": ""}, (0, 0, 0.5), (0, 0, 0.5)),
    ("articles alone", {"answer": "The a an"}, (0, 0, 0.5), (0, 0, 0.5)),
    ("no answer", {"answer": None}, (STOPS, STOPS, 0.5), ("no answer was given", "no answer was given", 0.5)),
    ("a number", {"answer": 7}, (STOPS, STOPS, 0.5), ("the answer is a int", "the answer is a int", 0.5)),
    ("no contexts", {"contexts": [], "context_ids": []}, (STOPS, 0.5, 0), (0, 0.5, 0)),
    ("no truths", {"ground_truths": []}, (1, STOPS, 0.5), (1, "no correct answer is known", 0.5)),
    ("a lone truth", {"ground_truths": "cat"}, (1, STOPS, 0.5), (1, "'ground_truths' is a str, not a list", 0.5)),
    ("truths missing", {"ground_truths": None}, (1, STOPS, 0.5), (1, "'ground_truths' is a NoneType, not a list", 0.5)),
    ("no gold ids", {"ground_truths_context_ids": []}, (1, 0.5, 0), (1, 0.5, "no correct document is known")),
    ("gold ids missing", {"ground_truths_context_ids": None}, (1, 0.5, STOPS), (1, 0.5, "'ground_truths_context_ids' is a NoneType, not a list")),
    ("mixed ids", {"context_ids": [7, "a.md"]}, (1, 0.5, STOPS), (1, 0.5, 0.5)),
    ("ids as one text", {"context_ids": "a.md"}, (1, 0.5, STOPS), (1, 0.5, "'context_ids' is a str, not a list")),
    ("Chinese", {"answer": "\u5317\u4eac", "contexts": ["\u5728\u5317\u4eac"], "context_ids": ["a.md"], "ground_truths": ["\u5317\u4eac\u5e02"]}, (0, 0, 1), (0, 0, 1)),
    ("Chinese with spaces", {"answer": "\u5317 \u4eac", "contexts": ["\u5728 \u5317 \u4eac"], "ground_truths": ["\u5317 \u4eac \u5e02"]}, (1, 2 / 3, 0.5), (1, 2 / 3, 0.5)),
    ("money", {"answer": "$1,234.50", "contexts": ["1234.50 dollars", "x"], "ground_truths": ["1234.5"]}, (1, 0, 0.5), (1, 0, 0.5)),
    ("curly quotes", {"answer": "don\u2019t", "contexts": ["don't", "x"], "ground_truths": ["dont"]}, (0, 0, 0.5), (0, 0, 0.5)),
    ("accents", {"answer": "\u00e9cole", "contexts": ["ecole", "x"], "ground_truths": ["e\u0301cole"]}, (0, 0, 0.5), (0, 0, 0.5)),
    ("repeats", {"answer": "cat cat cat cat", "contexts": ["cat", "x"], "ground_truths": ["cat cat"]}, (0.25, 1, 0.5), (0.25, 1, 0.5)),
    ("code", {"answer": "my_var foo.bar()", "contexts": ["my_var foo.bar", "x"], "ground_truths": ["myvar foobar"]}, (1, 1, 0.5), (1, 1, 0.5)),
]  # fmt: skip


def odd_row(changes: dict[str, Any]) -> EvaluationData:
    base = {
        "question": "Which?",
        "answer": "cat",
        "contexts": ["cat", "dog"],
        "context_ids": ["b.md", "a.md"],
        "ground_truths": ["cat dog"],
        "ground_truths_context_ids": ["a.md"],
        "question_id": "q0",
    }
    return EvaluationData(**{**base, **changes})


@pytest.mark.parametrize(("what", "changes", "theirs", "ours"), ODD_ROWS, ids=[row[0] for row in ODD_ROWS])
def test_odd_rows_are_handled_one_by_one(
    what: str,
    changes: dict[str, Any],
    theirs: tuple[Any, ...],
    ours: tuple[Any, ...],
    unitxt_evaluate: Evaluate,
) -> None:
    from ai4rag_nb.evaluation.token_scores import WordCounter

    row = odd_row(changes)
    for metric, expected, wanted in zip(THREE, theirs, ours, strict=True):
        try:
            scored, _ = unitxt_evaluate([row.to_dict()], [NAMES[metric]])
            found: Any = scored[0][NAMES[metric]]
        except ValueError:
            found = STOPS
        assert found == (expected if expected == STOPS else pytest.approx(expected)), (what, metric.name)
        value = native_value(metric, row, WordCounter())
        if isinstance(wanted, str):
            assert value == Unscored(wanted), (what, metric.name)
        else:
            assert value == pytest.approx(wanted), (what, metric.name)


def test_odd_rows_cost_nobody_else_and_both_backends_agree(unitxt_evaluate: Evaluate) -> None:
    from dataclasses import replace

    rows = [replace(odd_row(row[1]), question_id=f"q{number}") for number, row in enumerate(ODD_ROWS)]
    native = UnitxtEvaluator().evaluate_metrics(rows, THREE)
    library = UnitxtEvaluator("unitxt").evaluate_metrics(rows, THREE)
    for metric in THREE:
        ours, theirs = question_values(native, metric), question_values(library, metric)
        assert [name for name, value in ours.items() if value is None] == [
            name for name, value in theirs.items() if value is None
        ]
        scored = [name for name, value in ours.items() if value is not None]
        assert [ours[name] for name in scored] == pytest.approx([theirs[name] for name in scored], abs=1e-9)
        entry, other = metric_scores(native, metric), metric_scores(library, metric)
        assert entry["unscored"] == other["unscored"] == len(rows) - len(scored)
        assert entry["scores"] == pytest.approx(other["scores"], abs=1e-9)
        reasons = [
            one["reason"]
            for row in native["question_scores"]
            for one in row["metrics"]
            if one["name"] == metric.name and one["value"] is None
        ]
        wanted = [row[3][THREE.index(metric)] for row in ODD_ROWS]
        assert reasons == [reason for reason in wanted if isinstance(reason, str)]

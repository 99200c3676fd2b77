"""Answers of other systems: reading, joining with a benchmark, finding contexts, scores, and messages."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.answers_file import NOT_ANSWERED, ContextPlaces, evaluate_answers_file
from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.evaluation_data import build_evaluation_data
from ai4rag_nb.evaluation.metrics import DEFAULT_METRICS, Metrics
from ai4rag_nb.evaluation.overall_score import (
    default_evaluators,
    evaluate_answers,
    metric_scores,
    question_values,
)
from ai4rag_nb.evaluation.row_checks import NO_CONTEXTS
from ai4rag_nb.foundations.errors import AI4RAGError, BenchmarkError, InputError
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.optimization.preparation import prepare_inputs
from ai4rag_nb.serving.commands import main

TEXTS = {
    "valves.md": "Valves. The shift leader opens the red valve. Nobody else does.",
    "history.md": "Ada built the plant in 1907. The shift leader opens the gate.",
}
RECORDS = [
    {
        "id": "open",
        "question": "Who opens the red valve?",
        "correct_answers": ["the shift leader"],
        "correct_answer_document_keys": ["valves.md"],
        "evidence": ["The shift leader opens the red valve."],
    },
    {
        "id": "built",
        "question": "Who built the plant?",
        "correct_answers": ["Ada"],
        "correct_answer_document_keys": ["history.md"],
        "evidence": ["Ada built the plant in 1907."],
    },
    {
        "id": "colour",
        "question": "What is the owner's name?",
        "correct_answers": [],
        "correct_answer_document_keys": [],
        "answerable": False,
    },
]
BENCHMARK = BenchmarkData.from_records(RECORDS)
ANSWERS: list[dict[str, Any]] = [
    {
        "question_id": "open",
        "answer": "The shift leader.",
        "contexts": ["Ada built the plant in 1907.", "The shift  leader opens the red valve."],
        "times": {"retrieval": 0.25, "generation": 0.5},
        "tokens": {"input": 100, "output": 10},
        "model": "small",
    },
    {
        "question": "Who built the plant?",
        "answer": "Bob",
        "contexts": [{"text": TEXTS["history.md"][:28], "document_id": "history.md", "start": 0, "end": 28}],
    },
    {"question_id": "colour", "answer": "I don't know.", "contexts": []},
]


def written(folder: Path, answers: list[Any], name: str = "answers.jsonl") -> Path:
    path = folder / name
    lines = [one if isinstance(one, str) else json.dumps(one) for one in answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_answers_of_another_system_are_scored_as_ours_are(tmp_path: Path) -> None:
    """The same answers, given as a pipeline gives them, have the same result."""
    questions = tmp_path / "benchmark.json"
    questions.write_text(json.dumps(RECORDS))
    result = evaluate_answers_file(written(tmp_path, ANSWERS), questions, documents=TEXTS)
    first = {"document_id": "history.md", "start_index": 0, "end_index": 28}
    second = {"document_id": "valves.md", "start_index": 8, "end_index": 45}
    assert TEXTS["valves.md"][8:45] == "The shift leader opens the red valve."
    chunks = [
        {"text": ANSWERS[0]["contexts"][0], "metadata": first},
        {"text": ANSWERS[0]["contexts"][1], "metadata": second},
    ]
    responses = [
        {"answer": "The shift leader.", "reference_documents": chunks},
        {"answer": "Bob", "reference_documents": [{"text": TEXTS["history.md"][:28], "metadata": first}]},
        {"answer": "I don't know.", "reference_documents": []},
    ]
    data = build_evaluation_data(BENCHMARK, responses, BENCHMARK.check(TEXTS).evidence)
    assert {name: result[name] for name in ("metrics", "question_scores")} == evaluate_answers(
        data, DEFAULT_METRICS
    )
    assert question_values(result, Metrics.CONTEXT_CORRECTNESS) == {"open": 0.5, "built": 1.0, "colour": None}
    assert question_values(result, Metrics.EVIDENCE_RECIPROCAL_RANK) == {
        "open": 0.5,
        "built": 1.0,
        "colour": None,
    }
    assert result["answers"] == {"questions": 3, "answered": 3, "failed": 0, "missing": 0, "refused": 1}
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_costs_and_cutoffs_can_be_asked_for(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"small": {"input": 1, "output": 2}}')
    asked = ["money", "latency@generation", "tokens_read", "document_hit@1", "document_hit@2"]
    result = evaluate_answers_file(ANSWERS, BENCHMARK, asked, TEXTS, prices)
    money = metric_scores(result, Metrics.MONEY)
    assert money["scores"]["mean"] == pytest.approx((100 + 20) / 1e6) and money["scores"]["n"] == 1
    assert question_values(result, Metrics.by_name("latency@generation"))["open"] == 0.5
    assert question_values(result, Metrics.by_name("document_hit@1"))["open"] == 0.0
    assert question_values(result, Metrics.by_name("document_hit@2"))["open"] == 1.0


def test_unanswered_questions_are_counted_and_named_and_never_zero() -> None:
    given = [ANSWERS[0], {"question_id": "built", "answer": None, "error": "timed out"}]
    result = evaluate_answers_file(given, BENCHMARK, ["answer_correctness", "right_refusal"], TEXTS)
    entry = metric_scores(result, Metrics.ANSWER_CORRECTNESS)
    assert (entry["scores"]["mean"], entry["scores"]["n"], entry["unscored"], entry["coverage"]) == (
        1,
        1,
        1,
        0.5,
    )
    assert result["answers"] == {"questions": 3, "answered": 1, "failed": 2, "missing": 1, "refused": 0}
    assert "No answer to 1 question: colour." in result["notes"]
    reasons = {
        (one["question_id"], entry["name"]): entry.get("reason")
        for one in result["question_scores"]
        for entry in one["metrics"]
    }
    assert reasons["built", "answer_correctness"] == "timed out"
    assert reasons["colour", "right_refusal"] == NOT_ANSWERED


def test_bare_contexts_without_documents_have_no_score_by_documents() -> None:
    result = evaluate_answers_file(ANSWERS, BENCHMARK)
    values = question_values(result, Metrics.CONTEXT_CORRECTNESS)
    assert values == {"open": None, "built": 1.0, "colour": None}
    assert metric_scores(result, Metrics.CONTEXT_CORRECTNESS)["unscored"] == 1
    assert question_values(result, Metrics.FAITHFULNESS)["open"] == 1.0
    assert [note for note in result["notes"] if note.startswith("2 of 3 contexts do not say")]


def test_an_answer_that_does_not_tell_its_contexts_has_no_score_by_them(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Told: a faithfulness of 1 and a rank of 1. Not told: no score. An empty list: nothing was found, so 0 in both."""
    told = {"text": TEXTS["valves.md"], "document_id": "valves.md"}
    one = {"question_id": "open", "answer": "The shift leader", "contexts": [told]}
    other = {"question_id": "built", "answer": "Ada"}
    wanted = ["faithfulness", "answer_correctness", "context_correctness", "document_recall@5"]
    wanted += ["evidence_recall@5", "character_faithfulness", "context_tokens"]
    by_contexts = [Metrics.by_name(name) for name in wanted if name != "answer_correctness"]
    for untold in (other, {**other, "contexts": None}):
        result = evaluate_answers_file([one, untold], BENCHMARK, wanted, TEXTS)
        for metric in by_contexts:
            entry = metric_scores(result, metric)
            assert question_values(result, metric)["built"] is None, metric.name
            assert entry["reasons"][NO_CONTEXTS] == 1 and entry["scores"]["n"] == 1, metric.name
        assert metric_scores(result, Metrics.FAITHFULNESS)["scores"]["mean"] == 1.0
        assert metric_scores(result, Metrics.FAITHFULNESS)["coverage"] == 0.5
        assert question_values(result, Metrics.ANSWER_CORRECTNESS) == {
            "open": 1.0,
            "built": 1.0,
            "colour": None,
        }
        assert any(
            note.startswith("1 of 2 answers do not say what was retrieved") for note in result["notes"]
        )
    empty = evaluate_answers_file([one, {**other, "contexts": []}], BENCHMARK, wanted, TEXTS)
    assert [question_values(empty, metric)["built"] for metric in by_contexts] == [0.0] * len(by_contexts)
    assert metric_scores(empty, Metrics.FAITHFULNESS)["scores"]["mean"] == 0.5
    assert not any("retrieved" in note or "empty" in note for note in empty["notes"])
    lines = printed(capsys, evaluated(tmp_path, [other, {**one, "contexts": None}]))
    assert any(line.startswith("Lost in faithfulness") and f"2 x {NO_CONTEXTS}" in line for line in lines)
    (faithful,) = [line.split() for line in lines if line.startswith("faithfulness")]
    assert faithful[1] == "-"


def test_answers_whose_lists_are_all_empty_are_told_what_that_means() -> None:
    """A system without a search may write empty lists by habit; the scores are 0, and the note says why."""
    answers = [{"question_id": "open", "answer": "The shift leader", "contexts": []}]
    result = evaluate_answers_file(answers, BENCHMARK, ["faithfulness"])
    assert question_values(result, Metrics.FAITHFULNESS)["open"] == 0.0
    assert any(note.startswith("Each list of contexts is empty") for note in result["notes"])


def test_a_text_that_stands_in_two_documents_is_nobodys() -> None:
    places = ContextPlaces(TEXTS)
    assert places.place({"text": "The shift leader opens"}) == {"text": "The shift leader opens"}
    named = places.place({"text": "The shift leader opens", "document_id": "valves.md"})
    assert (named["start"], named["end"]) == (8, 30)
    assert places.place({"text": "the"}) == {"text": "the"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"question_id": "open", '], "line 1: it is no JSON"),
        ([ANSWERS[0], "[1]"], "line 2: it holds a list"),
        ([{"answer": "x"}], "line 1: it has neither 'question_id' nor 'question'"),
        ([{"id": "open", "answer": "x"}], "neither 'question_id' nor 'question'"),
        ([{"question_id": "open", "anwser": "x"}], "Did you mean 'anwser'"),
        ([{"question_id": "open", "answer": "x", "contexts": "text"}], "Write a list, best first"),
        ([{"question_id": "open", "answer": "x", "contexts": [None]}], "a context is None"),
        (
            [{"question_id": "open", "answer": "x", "contexts": [{"text": "t", "start": 5, "end": 1}]}],
            "from 5 to 1",
        ),
        ([{"question_id": "open", "answer": "x", "tokens": {"input": -1}}], "not negative"),
        ([{"question_id": "open", "answer": "x", "times": "1 s"}], "'times' is a str"),
        ([{"question_id": "opn", "answer": "x"}], "Line 1: .*'opn'. Did you mean 'open'"),
        ([{"question": "Who built the plants?", "answer": "x"}], "Did you mean 'Who built the plant\\?'"),
        ([ANSWERS[0], ANSWERS[0]], "Lines 1 and 2 both answer the question 'open'"),
        ([""], "is empty"),
    ],
)
def test_a_wrong_file_names_the_line_and_the_remedy(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        evaluate_answers_file(written(tmp_path, lines), BENCHMARK)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = written(tmp_path, [ANSWERS[0], "", "{", ANSWERS[1], '{"question_id": 1}'])
    with pytest.raises(InputError, match=r"2 of 4 lines are wrong:\nline 3: .*\nline 5: "):
        evaluate_answers_file(path, BENCHMARK)


def test_a_file_that_cannot_be_read_and_a_misspelt_metric_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no answers file"):
        evaluate_answers_file(tmp_path / "none.jsonl", BENCHMARK)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question_id": "open", "answer": "caf\xe9"}')
    with pytest.raises(InputError, match="not UTF-8"):
        evaluate_answers_file(tmp_path / "latin.jsonl", BENCHMARK)
    with pytest.raises(InputError, match="Did you mean 'faithfulness'"):
        evaluate_answers_file(tmp_path / "none.jsonl", BENCHMARK, ["faithfullness"])
    with pytest.raises(BenchmarkError, match="not among the 1 documents"):
        evaluate_answers_file(ANSWERS, BENCHMARK, documents={"history.md": "x"})
    with pytest.raises(InputError, match="The price of 'small'"):
        evaluate_answers_file(ANSWERS, BENCHMARK, prices={"small": "cheap"})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "document_id", "start", "end", "input", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
LINE = st.dictionaries(
    st.sampled_from(
        ["question_id", "question", "answer", "contexts", "refused", "error", "times", "tokens", "model", "x"]
    ),
    JUNK,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(LINE, st.booleans())
def test_whatever_stands_in_a_line_is_scored_or_refused_with_words(line: dict[str, Any], known: bool) -> None:
    entry = {**line, "question_id": "open"} if known else line
    try:
        result = evaluate_answers_file([entry], BENCHMARK, documents=TEXTS)
    except AI4RAGError as error:
        assert str(error)
        return
    assert len(result["question_scores"]) == 3
    json.dumps(result, allow_nan=False)


# --- the command --------------------------------------------------------------------------------------------------------------


def evaluated(folder: Path, answers: list[Any], *more: str, records: list[Any] = RECORDS) -> list[str]:
    """Write what `evaluate` needs and give its arguments."""
    questions = folder / "benchmark.json"
    questions.write_text(json.dumps(records), encoding="utf-8")
    return ["evaluate", "--answers", str(written(folder, answers)), "--benchmark", str(questions), *more]


def test_small_prices_are_printed_with_digits_that_say_something(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """100 tokens read at 1 and 10 written at 2 a million are 0.00012; the other question costs ten times as much."""
    (tmp_path / "prices.json").write_text('{"small": {"input": 1, "output": 2}}')
    more = {
        "question_id": "built",
        "answer": "Bob",
        "model": "small",
        "tokens": {"input": 1000, "output": 100},
    }
    named = ["--prices", str(tmp_path / "prices.json"), "--metrics", "money", "exact_match"]
    assert main(evaluated(tmp_path, [ANSWERS[0], more, ANSWERS[2]], *named)) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["money"][1:5] == ["0.000660", "0.000120", "-", "0.00120"]
    assert lines["exact_match"][1] == "0.500"


def printed(capsys: pytest.CaptureFixture, arguments: list[str]) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_the_reason_of_lost_questions_is_printed_with_the_option_that_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    bare = [
        ANSWERS[0],
        {"question_id": "built", "answer": "Bob", "contexts": ["Ada built the plant in 1907."]},
    ]
    asked = ["--metrics", "money", "model_calls", "evidence_recall@5", "document_recall@5"]
    lines = printed(capsys, evaluated(tmp_path, bare, *asked))
    assert [line.split(": ", 1)[1] for line in lines if line.startswith("Lost in money: ")] == [
        "1 x there is no price for the model 'small'; 1 x the pipeline did not say which model answered; "
        f"1 x {NOT_ANSWERED}."
    ]
    (calls,) = [line for line in lines if line.startswith("Lost in model_calls: ")]
    assert calls.startswith("Lost in model_calls: 2 x the pipeline reported no stages; 1 x ")
    unknown = "2 x the contexts do not say which documents they are from"
    assert any("document_recall@5" in line and unknown in line for line in lines)
    told = "\n".join(lines)
    assert "Give --prices FILE" in told and "Give --documents DIR" in told and '"model": "NAME"' in told
    (tmp_path / "prices.json").write_text('{"large": {"input": 1, "output": 2}}')
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_text(text)
    given = ["--prices", str(tmp_path / "prices.json"), "--documents", str(tmp_path / "docs")]
    told = "\n".join(printed(capsys, evaluated(tmp_path, bare, *given, *asked)))
    assert "--prices" not in told and "--documents" not in told
    assert "there is no price for the model 'small'" in told


def test_odd_rows_are_told_with_their_three_most_frequent_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    odd = [None, None, 5, 6, 7, ["a", "list"], {"an": "object"}, "the shift leader"]
    records = [{**RECORDS[0], "id": f"q{n}", "question": f"Who opens valve {n}?"} for n in range(len(odd))]
    answers = [
        {"question_id": f"q{number}", "answer": answer, "contexts": []} for number, answer in enumerate(odd)
    ]
    lines = printed(capsys, evaluated(tmp_path, answers, "--metrics", "answer_correctness", records=records))
    told = [line for line in lines if line.startswith("Lost in answer_correctness, token_f1, answer_words")]
    reasons = (
        "3 x the answer is a int; 2 x no answer was given; 1 x the answer is a list; 1 x something else."
    )
    assert [line.split(": ", 1)[1] for line in told] == [reasons]
    result = json.loads("\n".join(printed(capsys, evaluated(tmp_path, answers, "--json", records=records))))
    kept = next(one for one in result["metrics"] if one["name"] == "answer_correctness")["reasons"]
    assert kept == {"the answer is a int": 3, "no answer was given": 2, "the answer is a list": 1}


# --- languages without spaces ------------------------------------------------------------------------------------------------

CITIES = {"q0": "東京", "q1": "กรุงเทพมหานคร", "q2": "1868年", "q3": "Paris", "q4": "서울"}
USE_LETTERS = "3 of 5 correct answers are written without spaces: use character_recall, character_f1, "
USE_LETTERS += "character_faithfulness."


def city_records() -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "question": f"Question {name}?",
            "correct_answers": [city],
            "correct_answer_document_keys": ["a.md"],
        }
        for name, city in CITIES.items()
    ]


def test_answers_without_spaces_are_told_where_only_words_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Japanese, Thai and a year with its sign have no spaces; French and Korean have."""
    answers = [{"question_id": name, "answer": f"答えは{city}です"} for name, city in CITIES.items()]
    assert USE_LETTERS in printed(capsys, evaluated(tmp_path, answers, records=city_records()))
    benchmark = BenchmarkData.from_records(city_records())
    assert USE_LETTERS in evaluate_answers_file(answers, benchmark)["notes"]
    by_letters = evaluate_answers_file(answers, benchmark, ["answer_correctness", "character_recall"])
    assert not any("without spaces" in note for note in by_letters["notes"])
    assert not any("without spaces" in note for note in evaluate_answers_file(ANSWERS, BENCHMARK)["notes"])


def test_an_experiment_notes_answers_without_spaces_before_anything_is_paid() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.md").write_text("\n\n".join(CITIES.values()), encoding="utf-8")
        documents = load_documents(folder)
    benchmark = BenchmarkData.from_records(city_records())
    evaluators = default_evaluators()
    assert USE_LETTERS in prepare_inputs(documents, benchmark, evaluators=evaluators).notes
    chosen = ["answer_correctness", "character_f1", "overall_score"]
    inputs = prepare_inputs(documents, benchmark, chosen, evaluators=evaluators)
    assert not any("without spaces" in note for note in inputs.notes)

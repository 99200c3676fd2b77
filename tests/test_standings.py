"""What unseen questions make of a tie, how two patterns are compared, and what is said of both: worked out by hand."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_world import benchmark_records, make_experiment, service, small_space

from ai4rag_nb import open_run
from ai4rag_nb.foundations.errors import AI4RAGError
from ai4rag_nb.optimization.expense import expense, fastest_group
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, put_trial
from ai4rag_nb.optimization.summary import summary
from ai4rag_nb.serving.commands import main
from ai4rag_nb.serving.run_report import write_run_report

METRIC = "custom:overall_score"
HALVES = [0.5] * 16  # questions about documents of their own


def rows(values: Sequence[float | None], tokens: int = 100, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Questions with one score each, and what their answers took."""
    return [
        {
            "question_id": f"q{place}",
            "question": f"Question {place}?",
            "document_keys": [f"{place}.md"],
            "metrics": [{"name": "overall_score", "evaluator": "custom", "score": value}],
            "tokens": {"prompt": tokens},
            "timings": {"retrieval": seconds},
        }
        for place, value in enumerate(values)
    ]


def tried(number: int, values: Sequence[float | None], **taken: Any) -> EvaluationResult:
    scored = [value for value in values if value is not None]
    mean = sum(scored) / len(scored)
    scores = {"mean": mean, "ci_low": mean - 0.1, "ci_high": mean + 0.1, "n": len(scored)}
    metric = {"name": "overall_score", "evaluator": "custom", "description": "", "scores": scores}
    payload = {"name": f"Pattern{number + 1}", "evaluation": {"metrics": [metric]}, "settings": {}}
    facts = (f"k{number}", {"chunk_size": 64 * (number + 1)}, "completed", mean, payload)
    return EvaluationResult(number, *facts, rows(values, **taken))


def stored(
    folder: Path, search: Sequence[EvaluationResult], unseen: dict[int, Sequence[float | None]], **facts: Any
) -> str:
    """A run on disk; unseen scores by the number of the configuration, the leader's first."""
    folder.mkdir(exist_ok=True)
    store = RunStore(folder / "run")
    store.put_facts({"objective": METRIC, "questions": len(search[0].results), **facts})
    for result in search:
        put_trial(store, result)
    part = {}
    for place, (number, values) in enumerate(unseen.items()):
        part[f"Pattern{number + 1}"] = {
            **{"name": f"Pattern{number + 1}", "key": f"k{number}", "configuration": {}},
            "roles": ["tie" if place else "leader"],
        }
        record = {"questions": len(values), "metrics": [], "results": rows(values)}
        store.put_facts({f"test_part k{number}": {**record, "state": "completed", "reason": ""}})
    store.put_facts({"test_part": part})
    store.close()
    return str(folder / "run")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The first of five leads by a hair. Of the unseen questions each rival is asked 40, but for the fifth.

    The second is 0.5 behind on every second one of them, the third as much ahead, and the fourth equal.
    """
    search = [
        tried(0, [*HALVES, 0.6], tokens=500, seconds=2.0),
        tried(1, [*HALVES, 0.5], tokens=10, seconds=0.1),
        tried(2, [*HALVES, 0.5], tokens=400, seconds=1.5),
        tried(3, [*HALVES, 0.5], tokens=300, seconds=1.0),
        tried(4, [*HALVES, 0.5], tokens=450, seconds=1.8),
    ]
    unseen = {0: [0.5] * 40, 1: [0.5, 0.0] * 20, 2: [0.5, 1.0] * 20, 3: [0.5] * 40}
    return stored(tmp_path, search, unseen)


# --- standings ------------------------------------------------------------------------------------------------


def said(run: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert main([options[0], run, *options[1:]]) == 0
    return capsys.readouterr().out


def test_every_tie_has_its_standing_in_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(run, capsys, "report", "--no-attribute", "--json"))
    standing = {
        one["name"]: (group, one["standing"], one["is_asked"])
        for group in ("ties", "refuted", "better")
        for one in found[group]
    }
    assert standing == {
        "Pattern2": ("refuted", "refuted", True),
        "Pattern3": ("better", "better", True),
        "Pattern4": ("ties", "confirmed", True),
        "Pattern5": ("ties", "open", False),
    }
    behind = found["refuted"][0]["unseen"]
    assert behind["mean"] == pytest.approx(0.25) and behind["n"] == 40 and behind["verdict"] == "better"


def test_the_ranking_for_programs_has_ties_and_unseen_scores(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same standings as the report's: the second refuted, the third better, the fourth equal, the fifth not asked."""
    found = json.loads(said(run, capsys, "leaderboard", "--json"))
    assert {one["name"]: one["unseen"] for one in found["ties"]} == {
        "Pattern2": "refuted",
        "Pattern3": "better",
        "Pattern4": "confirmed",
        "Pattern5": "open",
    }
    asked = {one["name"]: (one["roles"], one["state"], one["questions"]) for one in found["held_out"]}
    assert asked == {
        "Pattern1": (["leader"], "completed", 40),
        **{f"Pattern{number}": (["tie"], "completed", 40) for number in (2, 3, 4)},
    }
    assert found["folder"] == run and found["test_part_seen"] is False
    assert found["patterns"][0]["name"] == "Pattern1", "the keys that were there before stay"


def test_held_out_scores_are_given_under_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two questions that were answered right and half right: 0.75."""
    path = stored(tmp_path, [tried(0, [1.0, 0.5])], {0: [1.0, 0.5]})
    scores = {"mean": 0.75, "ci_low": 0.5, "ci_high": 1.0, "n": 2}
    store = RunStore(Path(path))
    metric = {"name": "overall_score", "evaluator": "custom", "scores": scores}
    store.put_facts(
        {
            "test_part k0": {
                **{"questions": 2, "metrics": [metric], "results": rows([1.0, 0.5])},
                **{"state": "completed", "reason": ""},
            }
        }
    )
    store.close()
    found = json.loads(said(path, capsys, "leaderboard", "--json"))
    assert found["held_out"][0]["scores"] == {METRIC: scores} and found["ties"] == []


def test_a_refuted_tie_is_neither_cheapest_nor_fastest_nor_open(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second takes 10 tokens and a tenth of a second, less than any other."""
    found = json.loads(said(run, capsys, "report", "--no-attribute", "--json"))
    assert (found["winner"], found["cheapest"], found["fastest"]) == ("Pattern1", "Pattern4", "Pattern4")
    assert not {"Pattern2", "Pattern3", "Pattern4"} & set(found["questions_needed"])
    assert found["claims"]["ties"] == [f"Pattern{number}" for number in (2, 3, 4, 5)]


def test_text_page_and_summary_say_the_same_of_standings(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(run, capsys, "report", "--no-attribute")
    first = (
        "3 of 4 others cannot be called worse. "
        "Pattern3 is better than Pattern1 on questions that the search never saw."
    )
    lines = [
        "Better on questions that the search never saw: Pattern1 is worse than Pattern3 (-0.250,",
        "Confirmed on questions that the search never saw: Pattern4.",
        "Refuted on questions that the search never saw, and no tie any more: "
        "Pattern1 is better than Pattern2 (+0.250,",
        "Not asked such questions: Pattern5.",
    ]
    assert first in text and all(line in text for line in lines)
    cheapest = next(line for line in text.splitlines() if line.startswith("Cheapest of these"))
    assert cheapest.startswith("Cheapest of these: Pattern4 with 300 tokens") and "Pattern2" not in cheapest
    results = open_run(run)
    page = write_run_report(run).read_text(encoding="utf-8")
    assert first in page and all(line in page for line in lines)
    shown = results.report(attribute=False)._repr_html_()
    assert first in shown and all(line in shown for line in lines)
    brief = summary(results)
    assert "Worse on questions that the search never saw: Pattern2." in brief
    assert "Better on questions that the search never saw: Pattern3." in brief
    assert not any("as good" in line and "Pattern2" in line for line in brief.splitlines())


def test_nothing_is_as_good_where_all_ties_are_refuted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = [tried(0, [*HALVES, 0.6]), tried(1, [*HALVES, 0.5], tokens=1)]
    path = stored(tmp_path, search, {0: [0.5] * 20, 1: [0.0] * 20})
    text = said(path, capsys, "report", "--no-attribute")
    assert "Pattern1 is better than the other.\nRefuted on questions that the search never saw" in text
    assert "would settle" not in text and "Cheapest" not in text
    assert json.loads(said(path, capsys, "report", "--no-attribute", "--json"))["cheapest"] == "Pattern1"


# --- two patterns ---------------------------------------------------------------------------------------------


def compared(run: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(run, capsys, "compare", *more, "--json"))
    return found


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """Ahead by 0.1 to 0.6 on the search: 2 of 64 flips. On unseen questions by 0.5, 0 and -0.25."""
    steps = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    search = [tried(0, [0.4 + step for step in steps]), tried(1, [0.4] * 6), tried(2, [0.3] * 6)]
    return stored(tmp_path, search, {0: [1.0, 0.5, 0.25], 1: [0.5, 0.5, 0.5]})


def test_a_comparison_is_of_a_part_and_of_unseen_questions(
    pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(pair, capsys, "Pattern1", "Pattern2")
    assert (found["part"], found["n"], found["p_value"]) == ("search", 6, 2 / 64)
    assert found["mean"] == pytest.approx(0.35) and found["ci_low"] > 0
    unseen = found["unseen"]
    assert (unseen["part"], unseen["n"]) == ("unseen", 3) and unseen["mean"] == pytest.approx(0.25 / 3)
    assert unseen["p_value"] == 1.0  # of 8 flips, 2 reach 0.75, 2 reach 0.25, and each twice for the 0
    assert found == open_run(pair).compare("Pattern1", "pattern2")
    text = said(pair, capsys, "compare", "Pattern1", "Pattern2")
    assert "On the questions of the search: +0.350 (95 % interval [+0." in text
    assert "On questions that the search never saw: +0.083 (95 % interval [-0." in text


def test_turning_a_comparison_round_turns_everything(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = (
        compared(pair, capsys, "Pattern1", "Pattern2"),
        compared(pair, capsys, "Pattern2", "Pattern1"),
    )
    for one, other in ((there, back), (there["unseen"], back["unseen"])):
        assert one["mean"] == -other["mean"] and one["p_value"] == other["p_value"]
        assert (one["wins"], one["ties"], one["losses"]) == (other["losses"], other["ties"], other["wins"])
    assert (there["unseen"]["wins"], there["unseen"]["ties"], there["unseen"]["losses"]) == (1, 1, 1)
    assert (there["share_of_wins"], back["share_of_wins"]) == (1.0, 0.0)


def test_what_was_not_asked_is_said(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(pair, capsys, "Pattern1", "Pattern3")
    assert found["unseen"] is None and found["unseen_reason"] == "Pattern3 was not asked them."
    text = said(pair, capsys, "compare", "Pattern1", "Pattern3")
    assert "Not compared on questions that the search never saw: Pattern3 was not asked them." in text


def test_equal_differences_have_no_interval(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0.4 - 0.3 in each of six questions, whatever a computer makes of the last digit."""
    found = compared(pair, capsys, "Pattern2", "Pattern3")
    assert (found["ci_low"], found["ci_high"], found["method"]) == (None, None, "none")
    assert "All 6 differences are equal: they have no interval." in found["note"]
    assert "+0.100 (no interval; 6 questions)" in said(pair, capsys, "compare", "Pattern2", "Pattern3")


def test_an_interval_and_a_p_value_may_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five questions all ahead: the interval is above 0, and 2 of 32 flips reach as far."""
    path = stored(tmp_path, [tried(0, [0.5, 0.6, 0.7, 0.8, 0.9]), tried(1, [0.4] * 5)], {})
    found = compared(path, capsys, "Pattern1", "Pattern2")
    assert found["p_value"] == 2 / 32 and found["ci_low"] > 0
    assert "disagree: the interval leaves out 0, and the p-value is above 0.05" in found["note"]
    assert found["unseen_reason"] == "No questions were held out and asked."


def test_a_pattern_is_not_compared_with_itself(pair: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for names in (("Pattern1", "Pattern1"), ("Pattern1", "pattern1")):
        assert main(["compare", pair, *names, "--json"]) == 2
        output = capsys.readouterr()
        assert output.out == "" and "'Pattern1' cannot be compared with itself" in output.err
        assert "Name another one beside it: Pattern2, Pattern3." in output.err


def test_where_low_is_good_the_lower_one_wins(tmp_path: Path) -> None:
    search = [tried(0, [1.0, 1.0, 0.0]), tried(1, [0.0, 1.0, 0.0])]
    for result in search:
        for row in result.results:
            row["metrics"].append({**row["metrics"][0], "name": "wrong_refusal"})
        scores = result.payload["evaluation"]["metrics"][0]
        result.payload["evaluation"]["metrics"].append({**scores, "name": "wrong_refusal"})
    found = open_run(stored(tmp_path, search, {})).compare("Pattern1", "Pattern2", "wrong_refusal")
    assert found["mean"] == pytest.approx(1 / 3)
    assert (found["wins"], found["ties"], found["losses"]) == (0, 2, 1)


# --- words for one --------------------------------------------------------------------------------------------


def test_one_question_and_one_other_have_no_plural(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, [tried(0, [0.5]), tried(1, [0.25])], {0: [0.5], 1: [0.25]})
    text = said(path, capsys, "report", "--no-attribute") + summary(open_run(path))
    text += said(path, capsys, "compare", "Pattern1", "Pattern2")
    text += write_run_report(path).read_text(encoding="utf-8").partition("</style>")[2]
    assert "1 questions" not in text and "1 others" not in text and "of 1 other" not in text
    assert "The other one cannot be called worse." in text and "all of 1" not in text
    assert "It cannot be told whether it is worse: Pattern2." in text


# --- questions won, and questions needed ----------------------------------------------------------------------


def test_questions_won_are_counted_everywhere(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The leader wins one question of the search in 17; of the unseen ones it wins or loses every second one."""
    found = json.loads(said(run, capsys, "report", "--no-attribute", "--json"))
    rows = {row["name"]: (row["wins"], row["ties"], row["losses"]) for row in found["claims"]["rows"]}
    assert rows == dict.fromkeys(("Pattern2", "Pattern3", "Pattern4", "Pattern5"), (1, 16, 0))
    unseen = {one["name"]: one["unseen"] for one in found["refuted"] + found["better"] + found["ties"][:1]}
    counts = {name: (row["wins"], row["ties"], row["losses"]) for name, row in unseen.items()}
    assert counts == {"Pattern2": (20, 20, 0), "Pattern3": (0, 20, 20), "Pattern4": (0, 40, 0)}
    assert unseen["Pattern2"]["share_of_wins"] == 0.5
    text, page = (
        said(run, capsys, "report", "--no-attribute"),
        write_run_report(run).read_text(encoding="utf-8"),
    )
    for won in (
        "Pattern1 wins 20 of 40 questions (50 %), loses 0, and 20 are equal.",
        "Pattern1 wins 0 of 40 questions (0 %), loses 20, and 20 are equal.",
    ):
        assert won in text and won in page
    assert "questions won / equal / lost" in page and "0 / 40 / 0" in page and "1 / 16 / 0" in page
    compared_with = compared(run, capsys, "Pattern1", "Pattern2")
    assert (compared_with["wins"], compared_with["unseen"]["wins"]) == (1, 20)


def counts_of(record: Any, name: str) -> list[Any]:
    """Every "needed" that is said of a pattern in a record."""
    if isinstance(record, list):
        return [count for one in record for count in counts_of(one, name)]
    if not isinstance(record, dict):
        return []
    own = [record["needed"]] if record.get("name") == name and "needed" in record else []
    return own + [count for one in record.values() for count in counts_of(one, name)]


def test_a_pair_has_one_number_of_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind by 0.4 on every second unseen question: 0.2, with a spread of 0.2108 over ten questions.

    One comparison at 0.05 on the unseen questions: 1.960 + 0.842 times 1.054, squared, is 8.72.
    """
    search = [tried(0, [0.5, 0.9, 0.5, 0.9] * 2), tried(1, [0.9, 0.3, 0.5, 0.8] * 2), tried(2, [0.0] * 8)]
    path = stored(tmp_path, search, {0: [0.9] * 5, 1: [0.9, 0.5, 0.9, 0.5, 0.9]})
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    apart = [0.0, 0.4, 0.0, 0.4, 0.0]
    centre = sum(apart) / 5
    deviation = math.sqrt(sum((one - centre) ** 2 for one in apart) / 4)
    wanted = math.ceil(((1.959964 + 0.841621) * deviation / centre) ** 2)
    assert found["questions_needed"] == {"Pattern2": wanted} and wanted == 15
    assert set(counts_of(found, "Pattern2")) == {wanted}
    text = said(path, capsys, "report", "--no-attribute")
    assert f"about {wanted} questions would show such a difference" in text
    assert f"about {wanted} questions would settle Pattern2." in text
    page = write_run_report(path).read_text(encoding="utf-8")
    assert f"about {wanted}" in page and text.count("would show such a difference") == 1


def test_few_questions_with_a_tiny_spread_promise_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ahead by 0.06, with a spread of 0.001 in five questions: a spread of 0.1 is the least that is believed.

    2.170 + 0.842 times 0.1 / 0.06, squared, is 25.2; times 0.1 / 0.05, squared, is 36.3.
    """
    behind = [0.439, 0.44, 0.441, 0.44, 0.44]
    path = stored(tmp_path, [tried(0, [0.5] * 5), tried(1, behind)], {})
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    assert found["questions_needed"] == {"Pattern2": 26}
    assert found["questions_needed_for_relevant"] == 37
    assert "about 37 questions" in said(path, capsys, "report", "--no-attribute")


def test_pairs_that_do_not_differ_need_no_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind by 0.1, by 0.025 and by nothing: the first alone has to be settled."""
    even = [0.9, 0.1] * 8
    far = [one - 0.4 * (place % 4 == 0) for place, one in enumerate(even)]
    near = [one - 0.4 * (place == 0) for place, one in enumerate(even)]
    level = [0.1, 0.9, *even[2:]]
    path = stored(tmp_path, [tried(0, even), tried(1, far), tried(2, near), tried(3, level)], {})
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    assert set(found["questions_needed"]) == {"Pattern2"}
    rows = {row["name"]: row for row in found["claims"]["rows"]}
    assert rows["Pattern3"]["mean"] == pytest.approx(0.025) and rows["Pattern3"]["needed"] is None
    assert rows["Pattern4"]["mean"] == pytest.approx(0.0) and rows["Pattern4"]["needed"] is None
    text = said(path, capsys, "report", "--no-attribute")
    assert "would settle Pattern2." in text and "all of them" not in text
    names = [row["name"] for row in found["claims"]["rows"] if row["needed"] is None]
    assert f"Not counted, with less than 0.05 difference to settle: {', '.join(names)}." in text


# --- values that a metric of one's own has lost -----------------------------------------------------------------


def test_lost_values_of_own_metrics_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of twelve questions one function fails on three, one on all, and one on none."""

    def has_unit(data: Any) -> float:
        """Whether the answer has a unit."""
        if any(word in data.question for word in awkward):
            raise ValueError(f"no unit in {data.question_id}")
        return 1.0

    def shortness(data: Any) -> float:
        """How short the answer is."""
        return float("nan") if data.contexts and len(data.contexts) > 1 else 1.0

    def brevity(data: Any) -> float:
        """One for all."""
        return 1.0

    awkward = [record["question"] for record in benchmark_records()[-3:]]
    space = small_space(number_of_chunks=[2], chunk_size=[64])
    own = [has_unit, shortness, brevity]
    with service(monkeypatch):
        wanted = {"metrics": ["token_f1", *own], "optimization_metric": "token_f1"}
        experiment = make_experiment(tmp_path, space, 1, **wanted)
        experiment.search()
        kept = experiment.results
        experiment.close()
        experiment = make_experiment(tmp_path, space, 1, "other", metrics=["overall_score", *own])
        with pytest.raises(AI4RAGError, match=r"0 of 12\. 9 x shortness gave nan"):
            experiment.search()
        experiment.close()
    lost = "The metric 'has_unit' has no value for 3 of 12 questions of Pattern1. The first reason: has_unit raised"
    dead = "The metric 'shortness' failed on all questions and says nothing: shortness gave nan."
    path = str(tmp_path / "run")
    for found in (kept, open_run(path)):
        notes = " ".join(found.notes)
        assert lost in notes and dead in notes and "'brevity'" not in notes
    for text in (
        said(path, capsys, "report", "--no-attribute"),
        said(path, capsys, "leaderboard"),
        " ".join(json.loads(said(path, capsys, "report", "--no-attribute", "--json"))["notes"]),
    ):
        assert lost in text and "ValueError: no unit in " in text and dead in text
    page = html.unescape(write_run_report(path).read_text(encoding="utf-8"))
    assert lost in page and dead in page


# --- words for intervals, names and seconds ---------------------------------------------------------------------


def test_two_intervals_of_one_mean_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine right answers of twelve: Wilson's interval is 0.468 to 0.911."""
    shares = [1.0, 1.0, 1.0, 0.0] * 3
    path = stored(tmp_path, [tried(0, shares), tried(1, [0.0] * 12)], {})
    text, page = (
        said(path, capsys, "report", "--no-attribute"),
        write_run_report(path).read_text(encoding="utf-8"),
    )
    assert "it scores 0.750 (95 % interval 0.468 - 0.911 by Wilson, 12 questions)" in text
    line = "A mean has two intervals: BCa in the leaderboard"
    assert text.count(line) == page.count(line) == 1 and "and here Wilson, which fits these scores." in text
    assert "0.468 - 0.911 by Wilson" in page
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    assert [one["method"] for one in found["scores"]] == ["wilson"]


def test_one_interval_needs_no_explanation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, [tried(0, [0.2, 0.5, 0.9]), tried(1, [0.1, 0.4, 0.3])], {})
    text = said(path, capsys, "report", "--no-attribute")
    assert " by BCa, 3 questions)" in text and "two intervals" not in text


def test_intervals_with_negative_numbers_stand_in_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, [tried(0, [-0.2, -0.5, -0.9]), tried(1, [-0.6, -0.7, -0.95])], {})
    for text in (
        said(path, capsys, "report", "--no-attribute"),
        said(path, capsys, "leaderboard"),
        said(path, capsys, "show", "Pattern1"),
        said(path, capsys, "compare", "Pattern1", "Pattern2"),
    ):
        assert not re.search(r"\d (-|–) -\d", text) and "--0" not in text
    assert re.search(
        r"scores -0\.533 \(95 % interval \[-0\.\d+, -0\.\d+\] by BCa", said(path, capsys, "report")
    )


def test_a_millisecond_makes_nobody_the_fastest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of equals one is faster by a millisecond, and one by half; the second alone is a gain."""
    search = [
        tried(0, [*HALVES, 0.6], seconds=1.001),
        tried(1, [*HALVES, 0.5], seconds=1.0),
    ]
    path = stored(tmp_path, search, {})
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    assert (found["fastest"], found["equally_fast"]) == ("", ["Pattern2", "Pattern1"])
    text, page = (
        said(path, capsys, "report", "--no-attribute"),
        write_run_report(path).read_text(encoding="utf-8"),
    )
    line = "Equally fast, as far as can be told: Pattern2, Pattern1, with 1 second a question (median)."
    assert line in text and line in page and "Fastest" not in text
    search[1] = tried(1, [*HALVES, 0.5], seconds=0.5)
    path = stored(tmp_path / "more", search, {})
    found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
    assert (found["fastest"], found["equally_fast"]) == ("Pattern2", [])
    assert "Fastest of these: Pattern2 with 0.5 seconds a question (median)" in said(path, capsys, "report")


def test_noise_makes_nobody_the_fastest() -> None:
    """The medians are 1 and 2 seconds, and on half of the questions it is the other way round."""
    search = [tried(0, [0.5] * 16), tried(1, [0.5] * 16)]
    times = ([1.0, 3.0] * 7 + [1.0, 1.0], [2.0, 1.0] * 7 + [2.0, 2.0])
    for result, seconds in zip(search, times, strict=True):
        for row, one in zip(result.results, seconds, strict=True):
            row["timings"] = {"retrieval": one}
    assert [expense(result).seconds for result in search] == [1.0, 2.0]
    assert [result.name for result in fastest_group(search)] == ["Pattern1", "Pattern2"]


def test_no_single_name_is_hidden_behind_dots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight others are all named; of twelve the first eight are, with the number of the rest."""
    for others in (8, 12):
        search = [tried(0, [0.5, 0.6]), *(tried(number, [0.5, 0.5]) for number in range(1, others + 1))]
        path = stored(tmp_path / str(others), search, {})
        text = said(path, capsys, "report", "--no-attribute")
        named = ", ".join(f"Pattern{number}" for number in range(2, 10))
        more = "" if others == 8 else " and 4 more (all are in --json)"
        assert f"It cannot be told whether they are worse: {named}{more}." in text
        assert "…" not in text and "..." not in text
        found = json.loads(said(path, capsys, "report", "--no-attribute", "--json"))
        assert len(found["ties"]) == others

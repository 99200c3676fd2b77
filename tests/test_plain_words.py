"""What numbers say to a reader who sees them for the first time, in the terminal and in the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ai4rag_nb import open_run
from ai4rag_nb.dashboard.render_leaderboard import render_leaderboard
from ai4rag_nb.dashboard.render_retrieval import render_question_details, render_retrieval
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, put_trial
from ai4rag_nb.serving.commands import main
from ai4rag_nb.serving.run_report import run_state, write_run_report

OBJECTIVE = "custom:overall_score"
ASKED, ANSWERABLE = 16, 13  # q13, q14 and q15 have no answer in the documents


def entry(name: str, values: list[float | None], **more: Any) -> dict[str, Any]:
    scored = [value for value in values if value is not None]
    mean = sum(scored) / len(scored)
    scores = {"mean": mean, "ci_low": min(scored), "ci_high": max(scored), "n": len(scored)}
    outside = len(values) - len(scored)
    base = {
        "name": name,
        "evaluator": "custom",
        "description": name,
        "not_applicable": outside,
        "unscored": 0,
    }
    return {**base, "scores": scores, **more}


def trial(number: int, wrong: set[int], right: set[int], overall: float, words: float) -> EvaluationResult:
    """A configuration that declines the questions in `wrong` and `right`, and answers the others."""
    rows, columns = (
        [],
        {name: [] for name in ("overall_score", "right_refusal", "wrong_refusal", "answer_words")},
    )
    for place in range(ASKED):
        answerable, refused = place < ANSWERABLE, place in wrong | right
        values = {
            "overall_score": (0.0 if refused else overall) if answerable else None,
            "right_refusal": None if answerable else float(refused),
            "wrong_refusal": float(refused) if answerable else None,
            "answer_words": words if answerable else None,
        }
        for name, value in values.items():
            columns[name].append(value)
        rows.append(
            {
                "question_id": f"q{place}",
                "question": f"Question {place}?",
                "correct_answers": ["Blue."] if answerable else [],
                "answer": "I cannot tell." if refused else "Blue.",
                "answer_contexts": ["Blue is the sky. " * 30],
                "metrics": [
                    {"name": key, "evaluator": "custom", "score": value} for key, value in values.items()
                ],
                "refused": refused,
                "error": None,
            }
        )
    metrics = [entry(name, values) for name, values in columns.items()]
    metrics[0]["optimization_metric"] = True
    message = "Answer from the passages and from nothing else, or say that you cannot tell. " * 3
    settings = {
        "chunking": {"chunk_size": 64 * 2**number},
        "generation": {"parameters": {"threshold": 0.5, "sentences": 2}, "system_message_text": message},
    }
    payload = {
        "name": f"Pattern{number + 1}",
        "iteration": number,
        "max_combinations": 2,
        "settings": settings,
    }
    payload |= {"duration_seconds": 1.0, "evaluation": {"metrics": metrics}}
    configuration = {"chunk_size": 64 * 2**number, "system_message_text": message + str(number)}
    return EvaluationResult(number, str(number), configuration, "completed", overall, payload, rows)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Pattern1 scores higher and refuses wrongly once; Pattern2 never does."""
    store = RunStore(tmp_path / "run")
    facts = {"objective": OBJECTIVE, "questions": ASKED, "max_evals": 2, "combinations": 2, "created": 1.0}
    held_out = entry("overall_score", [1.0] * 6 + [None])
    store.put_facts(
        {
            **facts,
            "state": "completed",
            "held_out": {
                "name": "Pattern1",
                "key": "0",
                "questions": 7,
                "metrics": [held_out],
                "results": [],
            },
        }
    )
    put_trial(store, trial(0, {2}, {13}, 1.0, 30.0))
    put_trial(store, trial(1, set(), {13, 14}, 0.5, 9.0))
    store.close()
    return tmp_path / "run"


def ranks(printed: str) -> list[str]:
    return re.findall(r"^ *\d +(Pattern\d)", printed, flags=re.M)


def test_the_lowest_comes_first_where_low_is_good(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["leaderboard", str(run)]) == 0
    assert ranks(capsys.readouterr().out) == ["Pattern1", "Pattern2"]
    assert main(["leaderboard", str(run), "--metric", "wrong_refusal"]) == 0
    printed = capsys.readouterr().out
    assert ranks(printed) == ["Pattern2", "Pattern1"]
    assert "Ordered by wrong_refusal, lowest first: low is good." in printed
    assert main(["leaderboard", str(run), "--metric", "answer_words"]) == 0
    assert "Ordered by answer_words, lowest first: which is neither good nor bad." in capsys.readouterr().out
    frame = open_run(run).leaderboard(metric="wrong_refusal")
    assert list(frame["pattern"]) == ["Pattern2", "Pattern1"] and "lowest first" in frame.attrs["note"]
    assert open_run(run).leaderboard().attrs == {}


def test_the_summary_says_what_became_of_every_question(run: Path, capsys: pytest.CaptureFixture) -> None:
    main(["leaderboard", str(run)])
    printed = capsys.readouterr().out
    assert "all 13 equal, no interval" in printed  # Pattern2, by 13 times 0.5
    assert "(all 6 equal, no interval, 6 of 7 questions; 1 is unanswerable and has no score)" in printed
    assert "It answered 2 of 3 unanswerable questions." in printed
    assert "made of 13 of 16 questions, those with a score, and with fewer than 30" in printed


def test_show_cuts_between_words_and_says_so(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["show", str(run), "Pattern1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"generation\.parameters\.threshold +0\.5\n", printed) and "{" not in printed
    assert re.search(r"system_message_text +Answer from .* \.\.\.\n", printed)
    assert "Texts that end in '...' are cut; --json has all of them." in printed


def test_a_run_that_was_stopped_at_once_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    store = RunStore(tmp_path / "run")
    store.put_facts({"objective": OBJECTIVE, "state": "stopped", "max_evals": 12, "combinations": 40})
    store.close()
    assert main(["leaderboard", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "Run the same again to go on." in printed and "rank" not in printed


def words(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S))


def test_the_report_tells_what_a_score_does_not_show(run: Path) -> None:
    page = write_run_report(run).read_text()
    text = words(page)
    assert "13 of 16 scored; 1 rightly refused, 1 wrongly refused, 2 answered though unanswerable" in text
    assert "13 of 16 scored; 2 rightly refused, 1 answered though unanswerable" in text
    assert "It answered 2 of 3 unanswerable questions." in text
    assert (
        "6 of 7 questions; 1 is unanswerable and has no score" in text and "all 6 equal, no interval" in text
    )
    assert (
        "all 13 equal, no interval" in text and "0.500 to 0.500" not in text and "1.000 to 1.000" not in text
    )
    heat = page[page.index("Scores by question</h2>") : page.index("Question by question</h2>")]
    cells = re.findall(r'<td class="(cell [^"]*)"[^>]*>([^<]*)<', heat)
    assert len(cells) == 2 * ASKED and not [cell for cell in cells if cell[1] == "–"]
    counts = {
        word: [cell[1] for cell in cells].count(word) for word in ("✓ rightly refused", "✕ wrongly refused")
    }
    assert counts == {"✓ rightly refused": 3, "✕ wrongly refused": 1}
    assert cells.count(("cell outcome fault", "✕ answered though unanswerable")) == 3
    details = words(page[page.index("Question by question</h2>") :])
    assert "Question 15? ✕ answered though unanswerable" in details
    assert "Question 13? ✓ rightly refused" in details and "Question 2? ✕ wrongly refused" in details


def test_the_report_shows_every_question_without_a_box(run: Path) -> None:
    page = write_run_report(run).read_text()
    heat = page[page.index("Scores by question</h2>") : page.index("Question by question</h2>")]
    assert heat.count("<tr") == ASKED + 1 and "tall" not in heat
    assert "Scroll the table sideways for the settings." in page


def test_the_dashboard_orders_by_what_is_good(run: Path) -> None:
    shown = words(render_leaderboard(run_state(run), "custom:wrong_refusal"))
    assert shown.index("Pattern2") < shown.index("Pattern1") and "lowest first: low is good" in shown


def test_a_folder_that_is_missing_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    benchmark = tmp_path / "questions.json"
    benchmark.write_text(
        '[{"question": "Which?", "correct_answers": ["This."], "correct_answer_document_keys": ["a.md"]}]'
    )
    arguments = [
        "run",
        "--documents",
        str(tmp_path / "none"),
        "--benchmark",
        str(benchmark),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*arguments, "--workspace", str(tmp_path / "workspace")]) == 2
    said = capsys.readouterr()
    assert "There is no" in said.err and "Reading documents" not in said.err + said.out


# --- amounts that three decimals do not show ----------------------------------------------------------------------------------


def priced(number: int, prices: list[float], overall: float) -> EvaluationResult:
    """A configuration whose answers cost money."""
    made = trial(number, set(), {13, 14, 15}, overall, 9.0)
    for row, price in zip(made.results, prices, strict=True):
        row["metrics"].append({"name": "money", "evaluator": "custom", "score": price})
    made.payload["evaluation"]["metrics"].append(entry("money", list(prices)))
    return made


@pytest.fixture
def paid_run(tmp_path: Path) -> Path:
    """Pattern1 costs 0.0004 or 0.0005 a question, Pattern2 costs 0.00001 more."""
    store = RunStore(tmp_path / "paid")
    store.put_facts(
        {"objective": OBJECTIVE, "questions": ASKED, "max_evals": 2, "combinations": 2, "created": 1.0}
    )
    store.put_facts({"state": "completed", "metrics": [OBJECTIVE, "custom:money"]})
    prices = [0.0004] * 8 + [0.0005] * 8
    put_trial(store, priced(0, prices, 1.0))
    put_trial(store, priced(1, [price + 0.00001 * (1 + n % 2) for n, price in enumerate(prices)], 0.5))
    store.close()
    return tmp_path / "paid"


def test_small_amounts_are_shown_with_digits_that_say_something(
    paid_run: Path, capsys: pytest.CaptureFixture
) -> None:
    def said(*arguments: str) -> str:
        assert main([arguments[0], str(paid_run), *arguments[1:]]) == 0
        return " ".join(capsys.readouterr().out.split())

    ranked = said("leaderboard", "--metric", "money")
    assert "1 Pattern1 0.000450 0.000400 - 0.000500 16" in ranked and "0.000465" in ranked
    assert "1.000" in said("leaderboard"), "scores keep three decimals"
    assert "0.000450" in said("leaderboard"), "beside the score that is ranked by"
    assert "0.0004500" in said("leaderboard", "--columns", "all")
    assert "money 0.000450 0.000400 - 0.000500 16" in said("show", "Pattern1")
    compared = said("compare", "Pattern2", "Pattern1", "--metric", "money")
    assert "On the questions of the search: +0.0000150 (" in compared
    frame = open_run(paid_run).leaderboard()
    assert list(frame["money"]) == [0.00045, 0.000465] and list(frame["overall_score"]) == [1.0, 0.5]
    assert list(open_run(paid_run).leaderboard(metric="money")["money_ci_low"]) == [0.0004, 0.00041]


def test_a_decision_by_money_says_how_much_and_claims_no_difference_too_small_to_matter(
    paid_run: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["report", str(paid_run), "--metric", "money", "--no-attribute"]) == 0
    told = capsys.readouterr().out
    assert "it takes 0.000450 (" in told and "+0.000015" in told and "0.000 " not in told
    assert "as good" not in told.replace("As good as the winner", "") and "difference of 0.05" not in told


def test_pages_show_small_amounts_too(paid_run: Path) -> None:
    page = write_run_report(paid_run).read_text()
    row = page[page.index(">money ") :]
    assert "0.000450</td>" in row[:400] and "0.000400 to 0.000500" in row[:900]
    ranked = render_leaderboard(run_state(paid_run), "custom:money")
    assert "0.000450" in ranked and "interval, 0 to 0.00052" in ranked and "0.000<" not in ranked
    details = render_question_details(run_state(paid_run), ["q0"], "Pattern1")
    assert "1.000" in details
    card = render_retrieval(run_state(paid_run), "q0", "Pattern1")
    assert "0.000400" in card


# --- lost questions ------------------------------------------------------------------------------------------------------------


def test_lost_questions_are_told_with_their_reason(run: Path, capsys: pytest.CaptureFixture) -> None:
    made = trial(0, {2}, {13}, 1.0, 30.0)
    lost = {"unscored": 2, "reasons": {"there is no price for the model 'large'": 2}}
    made.payload["evaluation"]["metrics"].append(
        entry("money", [0.5, None, None]) | lost | {"not_applicable": 0}
    )
    held_out = entry("overall_score", [1.0] * 4) | {"unscored": 1, "reasons": {"the service timed out": 1}}
    kept = {"name": "Pattern1", "key": "0", "questions": 5, "metrics": [held_out], "results": []}
    store = RunStore(run)
    put_trial(store, made)
    store.put_facts({"held_out": kept})
    store.close()
    assert main(["show", str(run), "Pattern1"]) == 0
    assert "Lost in money: 2 x there is no price for the model 'large'." in capsys.readouterr().out
    assert main(["leaderboard", str(run)]) == 0
    assert "4 of 5 questions; 1 was lost). Lost: 1 x the service timed out." in capsys.readouterr().out

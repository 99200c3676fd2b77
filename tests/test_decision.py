"""The decision report: its numbers against other ways to work them out, its words, its price, and the command line."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from small_world import KEY, benchmark_records, files_holding, make_experiment, paid, service, small_space

from ai4rag_nb import open_run
from ai4rag_nb.evaluation.comparisons import Verdict, questions_to_settle
from ai4rag_nb.foundations.errors import InputError
from ai4rag_nb.optimization.causes import Causes, answered_row
from ai4rag_nb.optimization.cause_search import answer_scores, find_causes, known_causes
from ai4rag_nb.optimization.certainty import leader_claims
from ai4rag_nb.optimization.decision import decision_report
from ai4rag_nb.optimization.ranking import RankedEvaluations
from ai4rag_nb.optimization.results import ExperimentResults
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore
from ai4rag_nb.optimization.summary import lead_sentences
from ai4rag_nb.serving.commands import main

METRIC = "custom:overall_score"


def rows(values: Sequence[float | None], documents: int, name: str = "overall_score") -> list[dict[str, Any]]:
    """Questions that take turns through the documents."""
    metric = {"name": name, "evaluator": "custom"}
    return [
        {
            "question_id": f"q{place}",
            "document_keys": [f"{place % documents}.md"],
            "metrics": [{**metric, "score": value}],
        }
        for place, value in enumerate(values)
    ]


def tried(
    number: int, values: Sequence[float], documents: int = 4, name: str = "overall_score", **more: Any
) -> EvaluationResult:
    scores = {"mean": float(np.mean(values)), "ci_low": 0.0, "ci_high": 1.0, "n": len(values)}
    metric = {"name": name, "evaluator": "custom", "description": "", "scores": scores}
    return EvaluationResult(
        number,
        f"k{number}",
        {"chunk_size": number},
        "completed",
        scores["mean"],
        {"evaluation": {"metrics": [metric]}},
        [{**row, **more} for row in rows(values, documents, name)],
    )


def measured(name: str, roles: list[str], values: Sequence[float], documents: int) -> dict[str, Any]:
    facts = {"name": name, "key": name, "configuration": {}, "questions": len(values), "metrics": []}
    return {**facts, "roles": roles, "results": rows(values, documents), "state": "completed", "reason": ""}


def drawn(seed: int, count: int, centre: float) -> list[float]:
    """Scores with one decimal, so that no two ways of adding them up differ in the last digit."""
    return np.clip(np.round(np.random.default_rng(seed).normal(centre, 0.2, count), 1), 0, 1).tolist()


@pytest.fixture
def split() -> ExperimentResults:
    """Three patterns on 24 questions, and 24 more about 12 documents that the search never saw."""
    patterns = [tried(0, drawn(1, 24, 0.5)), tried(1, drawn(2, 24, 0.75)), tried(2, drawn(3, 24, 0.7))]
    results = ExperimentResults(patterns, METRIC)
    results.test_part = {
        "Pattern2": measured("Pattern2", ["leader"], drawn(4, 24, 0.7), 12),
        "Pattern3": measured("Pattern3", ["tie", "runner-up"], drawn(5, 24, 0.65), 12),
        "default": measured("default", ["default"], drawn(6, 24, 0.3), 12),
    }
    return results


# --- numbers --------------------------------------------------------------------------------------------------


def by_document(values: Sequence[float], documents: int) -> np.ndarray:
    """Means of questions about the same document; every document has as many questions."""
    return np.array(values).reshape(-1, documents).mean(axis=0)


def test_intervals_are_those_of_documents(split: ExperimentResults) -> None:
    found = decision_report(split)
    values = {
        name: [row["metrics"][0]["score"] for row in one["results"]] for name, one in split.test_part.items()
    }
    own = by_document(values["Pattern2"], 12)
    low, high = stats.t.interval(0.95, 11, own.mean(), own.std(ddof=1) / math.sqrt(12))
    score = found.scores[0].interval
    assert (score.mean, score.ci_low, score.ci_high) == pytest.approx((own.mean(), low, high))
    assert (found.scores[0].part, score.n, score.clusters, score.method) == ("unseen", 24, 12, "clustered t")
    for rival in found.rivals:
        apart = own - by_document(values[rival.name], 12)
        low, high = stats.t.interval(0.95, 11, apart.mean(), apart.std(ddof=1) / math.sqrt(12))
        row = rival.comparison
        assert rival.part == "unseen" and row is not None
        assert (row.mean, row.ci_low, row.ci_high) == pytest.approx((apart.mean(), low, high))


def test_p_values_are_those_of_all_flips_of_documents(split: ExperimentResults) -> None:
    found = {rival.name: rival.comparison for rival in decision_report(split).rivals}
    own = by_document([row["metrics"][0]["score"] for row in split.test_part["Pattern2"]["results"]], 12)
    plain = {}
    for name, row in found.items():
        values = [line["metrics"][0]["score"] for line in split.test_part[name]["results"]]
        apart = own - by_document(values, 12)
        signs = np.array(list(itertools.product((1, -1), repeat=12)))
        plain[name] = float((np.abs(signs @ apart) >= abs(apart.sum()) - 1e-9).mean())
        assert row is not None and row.p_value == pytest.approx(plain[name])
    first, second = sorted(plain, key=lambda name: plain[name])
    assert found[first].p_claim == pytest.approx(min(1, 2 * plain[first]))  # Holm, with two comparisons
    assert found[second].p_claim == pytest.approx(min(1, max(2 * plain[first], plain[second])))
    assert found["default"].verdict == Verdict.BETTER and found["Pattern3"].is_tie


def test_ties_of_the_search_are_confirmed_on_unseen_questions(split: ExperimentResults) -> None:
    found = decision_report(split)
    claims = leader_claims(split)
    assert claims is not None and found.claims == claims
    assert [tie.comparison.name for tie in found.ties] == list(claims.ties) == ["Pattern3"]
    assert found.ties[0].standing == "open" and found.ties[0].unseen == found.rivals[1].comparison
    same = [row["metrics"][0]["score"] for row in split.test_part["Pattern2"]["results"]] * 2
    for name in ("Pattern2", "Pattern3"):  # 48 questions, and no difference in any of them
        split.test_part[name] = measured(name, ["leader" if name == "Pattern2" else "tie"], same, 12)
    assert decision_report(split).ties[0].standing == "confirmed"
    split.test_part["Pattern3"] = measured("Pattern3", ["tie", "runner-up"], [0.0] * 48, 12)
    parted = decision_report(split)
    assert (parted.ties, parted.refuted[0].name) == ((), "Pattern3")
    said = "Refuted on questions that the search never saw, and no tie any more: Pattern2 is better than Pattern3"
    assert said in str(parted)


def test_cheapest_and_fastest_are_among_the_equally_good() -> None:
    def taking(number: int, values: list[float], tokens: int, seconds: float) -> EvaluationResult:
        return tried(
            number, values, tokens={"prompt": tokens, "completion": 10}, timings={"retrieval": seconds}
        )

    good, other, bad = drawn(1, 40, 0.8), drawn(2, 40, 0.8), [0.0] * 40
    patterns = [taking(0, good, 500, 1.0), taking(1, other, 300, 2.0), taking(2, bad, 10, 0.1)]
    found = decision_report(RankedEvaluations(patterns, METRIC))
    assert "Pattern3" not in [tie.comparison.name for tie in found.ties]
    assert (found.cheapest, found.cheapest_by, found.fastest) == ("Pattern2", "tokens", "Pattern1")
    assert "Cheapest of these: Pattern2 with 310 tokens a question" in str(found)


def test_questions_needed_allow_for_all_comparisons() -> None:
    """With five comparisons at 0.03, each has 0.006: 2.748 + 0.842, and the spread is three differences."""
    assert questions_to_settle(0.1, 0.3, 5) == math.ceil(((2.7478 + 0.8416) * 3) ** 2) == 116
    values, other = [1.0, 0.0, 1.0, 1.0] * 10, [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0] * 5
    found = decision_report(RankedEvaluations([tried(0, values, 40), tried(1, other, 40)], METRIC))
    apart = np.array(values) - np.array(other)
    alone = math.ceil(((2.1701 + 0.8416) * apart.std(ddof=1) / apart.mean()) ** 2)  # one comparison at 0.03
    assert found.ties[0].comparison.needed == alone and found.needed == {"Pattern2": alone}


def test_low_values_lead_where_low_is_good() -> None:
    timid = tried(0, [1.0] * 20 + [0.0] * 20, name="wrong_refusal")
    bold = tried(1, [0.0] * 40, name="wrong_refusal")
    results = RankedEvaluations([timid, bold], "custom:wrong_refusal")
    claims = leader_claims(results)
    assert claims is not None and (claims.leader, claims.beaten) == ("Pattern2", ("Pattern1",))
    assert lead_sentences(results) == [
        "It is better than the other one by more than chance on these questions."
    ]
    row = decision_report(results).rivals[0].comparison
    assert row is not None and row.mean == pytest.approx(0.5)


# --- what is said ---------------------------------------------------------------------------------------------


def test_too_few_documents_are_said(split: ExperimentResults) -> None:
    text = str(decision_report(split))
    assert "Unseen questions: Intervals are clustered by document" in text
    assert "Questions of the search: By their documents the questions form 4 groups, fewer than 10" in text


def test_the_mark_stands_on_every_unseen_statement(split: ExperimentResults) -> None:
    split.test_part_seen = True
    text = str(decision_report(split))
    assert (
        text.count("that the search never saw")
        == text.count("that the search never saw (test part seen)")
        >= 4
    )
    assert "test part seen" in json.dumps(decision_report(split).to_dict()).replace("_", " ")


def test_what_failed_on_unseen_questions_is_compared_on_the_others(split: ExperimentResults) -> None:
    split.test_part["default"] |= {"state": "failed", "reason": "The service is gone.", "results": []}
    split.test_part["Pattern3"] |= {"state": "failed", "reason": "It took too long.", "results": []}
    found = decision_report(split)
    assert [(one.name, one.part) for one in found.rivals] == [("default", ""), ("Pattern3", "search")]
    assert "The default configuration was not compared: The service is gone." in str(found)
    assert "It was not compared on unseen questions: It took too long." in str(found)
    assert found.scores[0].part == "unseen"


def test_one_question_has_no_interval() -> None:
    text = str(decision_report(RankedEvaluations([tried(0, [0.5]), tried(1, [0.25])], METRIC)))
    assert "scores 0.500 (1 question, no interval, 1 question)" in text
    assert "(+0.250, 1 question, no interval)" in text


def test_metrics_that_do_not_vary_are_flagged() -> None:
    patterns = [tried(number, [0.5, 1.0]) for number in range(3)]
    assert "The same for all 3 configurations, question by question: overall_score." in str(
        decision_report(RankedEvaluations(patterns, METRIC))
    )


def test_another_metric_has_another_leader(split: ExperimentResults) -> None:
    with pytest.raises(InputError, match="was not measured"):
        split.report(attribute=False, metric="beauty")
    two = [tried(0, [0.0, 1.0]), tried(1, [1.0, 1.0])]
    for result, length in zip(two, (3.0, 9.0), strict=True):
        extra = {"name": "answer_words", "evaluator": "custom"}
        result.payload["evaluation"]["metrics"].append({**extra, "scores": {"mean": length, "n": 2}})
        for row in result.results:
            row["metrics"].append({**extra, "score": length})
    results = ExperimentResults(two, METRIC)
    assert results.report(attribute=False).winner == "Pattern2"
    assert results.report(attribute=False, metric="answer_words").winner == "Pattern1"


def test_both_spellings_of_a_metric_are_one(split: ExperimentResults) -> None:
    for short, long in (("overall_score", METRIC),):
        boards = [split.leaderboard(metric=name) for name in (short, long)]
        assert boards[0].equals(boards[1]) and short in boards[0].columns
        assert str(split.report(False, short)) == str(split.report(False, long))
        assert split.compare("Pattern1", "Pattern2", short) == split.compare("Pattern1", "Pattern2", long)
        table = split.trade_offs([long], [f"{short} >= 0"], {short: 1})
        assert table.equals(split.trade_offs([short], [f"{long} >= 0"], {long: 1}))
    with pytest.raises(InputError) as told:
        split.leaderboard(metric="unitxt:overal_score")
    assert str(told.value).count("'overall_score'") == 1 and "A name is fine alone" in str(told.value)
    with pytest.raises(InputError, match=r"Known: overall_score\. A name is fine alone"):
        split.leaderboard(metric="zzz")


# --- a search that pays ---------------------------------------------------------------------------------------


HARD = 3  # questions whose known answer no passage words in this way


def hard_experiment(folder: Path, max_evals: int, chunks: int = 2) -> Any:
    """Two passages are read, so that the right one alone is another prompt."""
    records = benchmark_records()
    for record in records[:HARD]:
        record["correct_answers"] = ["whatever the harbour master decrees"]
    space = small_space(number_of_chunks=[chunks], chunk_size=[64])
    return make_experiment(folder, space, max_evals=max_evals, records=records)


def wrong_answers(results: ExperimentResults) -> list[dict[str, Any]]:
    best = results.get_best_evaluations()[0]
    scores, _ = answer_scores(best.results)
    assert scores is not None
    pairs = zip(best.results, scores, strict=True)
    return [row for row, score in pairs if row["refused"] or score is None or score < 0.5]


def test_a_paid_look_is_priced_first_asked_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch) as stub:
        experiment = hard_experiment(tmp_path, 2)
        experiment.search()
        before = paid(stub)
        results = experiment.results
        wrong = wrong_answers(results)
        assert len(wrong) == HARD
        first = results.report()
        assert first.causes is not None and not first.causes.is_found and paid(stub) == before
        price = re.match(r"(\d+) questions? went wrong: (\d+) calls? to", first.causes.price)
        assert price is not None and int(price[1]) == len(wrong) and "report(attribute=True)" in str(first)
        shown: list[str] = []
        progress: list[tuple[int, int]] = []

        def show(text: str) -> None:
            assert paid(stub) == before
            shown.append(text)

        looked = results.report(True, show=show, on_progress=lambda *count: progress.append(count))
        calls = paid(stub) - before
        assert calls == int(price[2]) and len(shown) == 1 and progress[-1] == (calls, calls)
        assert looked.causes is not None and len(looked.causes.rows) == len(wrong)
        assert {row.question_id for row in looked.causes.rows} == {row["question_id"] for row in wrong}
        for attribute in (None, True):
            again = experiment.results.report(attribute, show=show)
            assert again.causes == looked.causes and paid(stub) == before + calls and len(shown) == 1
        assert results.report(False).causes is None
        page = experiment.report().read_text(encoding="utf-8")
        assert "Why answers went wrong" in page and "How sure is it?" in page
        assert "It was asked no others" in page
        experiment.close()
        assert open_run(tmp_path / "run").report().causes == looked.causes
        assert not files_holding(tmp_path / "run", KEY)


def test_an_interruption_passes_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch) as stub:
        experiment = hard_experiment(tmp_path, 1)
        experiment.search()
        results, before = experiment.results, paid(stub)

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            results.report(True, show=None, on_progress=interrupt)
        assert known_causes(results) is None
        found = results.report(True, show=None).causes
        assert found is not None and len(found.rows) == HARD and known_causes(results) == found
        assert paid(stub) - before == HARD, "no answer is paid for twice"
        experiment.close()


def test_what_is_in_memory_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one passage the right one alone is the prompt that was paid for in the search."""
    with service(monkeypatch) as stub:
        experiment = hard_experiment(tmp_path, 1, chunks=1)
        experiment.search()
        before = paid(stub)
        found = experiment.results.report().causes
        assert found is not None and found.is_found and len(found.rows) == HARD and paid(stub) == before
        experiment.close()


def test_nothing_is_kept_of_a_look_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(monkeypatch) as stub:
        experiment = hard_experiment(tmp_path, 1)
        experiment.search()
        results = experiment.results
        stub.stop()
        found = results.report(True, show=None).causes
        assert found is not None and any("got no answer" in row.note for row in found.rows)
        assert known_causes(results) is None
        experiment.close()


def test_a_reader_that_copies_says_once_that_it_ignores_earlier_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch):
        space = small_space(foundation_model=["local:extractive"], chunk_size=[64], number_of_chunks=[1])
        experiment = make_experiment(tmp_path, space, max_evals=1)
        experiment.search()
        turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello."}]
        last = {"role": "user", "content": benchmark_records()[0]["question"]}
        with experiment.results.best_pattern() as pattern:
            alone = pattern.chat([last])["answer"]
            assert pattern.notes == []
            assert [pattern.chat([*turns, last])["answer"] for _ in range(2)] == [alone, alone]
            assert (
                len(pattern.notes) == 1 and "earlier turns of a conversation are ignored" in pattern.notes[0]
            )
        experiment.close()


def test_stored_answers_are_those_that_were_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence comes back with its place in the document, so that it can be followed."""
    with service(monkeypatch):
        experiment = make_experiment(tmp_path, max_evals=1)
        experiment.search()
        rows = experiment.results.get_best_evaluations()[0].results
        texts = {
            path.relative_to(tmp_path / "docs").as_posix(): path.read_text()
            for path in (tmp_path / "docs").rglob("*.md")
        }
        for row in rows:
            data = answered_row(row)
            assert data.answerable and len(data.found_evidence) == 1
            assert len(data.passages) == len(row["hits"])
            span = data.found_evidence[0].spans[0]
            assert span.document_id in texts and span.end - span.start > 10
        experiment.close()


def test_a_run_without_models_has_its_statements(tmp_path: Path) -> None:
    """A pipeline that cannot be opened costs the causes, not the report."""
    row = {
        "question": "When?",
        "correct_answers": ["now"],
        "answer": "<i>never</i>",
        "hits": [],
        "answer_contexts": [],
    }
    results = ExperimentResults([tried(0, [0.0, 0.25], **row)], METRIC)
    found = results.report()
    assert found.causes is not None and "read without its models" in str(found)
    with pytest.raises(InputError, match="open_run"):
        results.report(attribute=True)
    assert find_causes(replace(results, evaluations=[])) is None
    assert known_causes(results) is None


def test_documents_of_strangers_are_escaped() -> None:
    results = RankedEvaluations([tried(0, [0.5])], METRIC, notes=["<script>alert(1)</script>"])
    page = decision_report(results, causes=Causes("Pattern1", notes=("<b>x</b>",)))._repr_html_()
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;" in page


# --- the command line -----------------------------------------------------------------------------------------


def test_the_command_prices_and_asks_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(monkeypatch) as stub:
        experiment = hard_experiment(tmp_path, 2)
        experiment.search()
        expected = str(experiment.results.report(False))
        experiment.close()
        before, run = paid(stub), str(tmp_path / "run")
        capsys.readouterr()
        assert main(["report", run, "--no-attribute"]) == 0
        assert capsys.readouterr().out.strip() == expected
        assert main(["report", run]) == 0
        output = capsys.readouterr()
        assert "calls to" in output.out and "--attribute" in output.out and paid(stub) == before
        assert main(["report", run, "--attribute", "--json"]) == 0
        output = capsys.readouterr()
        found = json.loads(output.out)
        calls = paid(stub) - before
        assert f"{calls} call" in output.err and calls > 0 and found["causes"]["is_found"]
        assert f"Asked again with the right passages: {calls} of {calls}" in output.err
        assert sum(found["causes"]["counts"].values()) == len(found["causes"]["rows"])
        assert main(["report", run]) == 0 and paid(stub) == before + calls
        output = capsys.readouterr().out
        assert "No questions are held out" in output and "of the questions that it was chosen by" in output
        assert "fewer than 10" in output and "Why answers went wrong" in output


def test_the_command_writes_the_page_again_with_the_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(monkeypatch):
        experiment = hard_experiment(tmp_path, 1)
        experiment.search()
        experiment.close()
        run, page = str(tmp_path / "run"), tmp_path / "run" / "report.html"
        page.write_text("an old page")
        assert main(["report", run, "--metric", "token_f1", "--no-attribute"]) == 0
        assert "stays as it was" in capsys.readouterr().err and page.read_text() == "an old page"
        assert main(["report", run, "--metric", "overall_score"]) == 0
        assert f"The page was written again: {page}\n" in capsys.readouterr().err
        said = page.read_text()
        assert "was not looked at" in said and f"{HARD} questions went wrong: {HARD} calls to" in said
        assert main(["report", run, "--attribute", "--json"]) == 0
        output = capsys.readouterr()
        assert f"again, with the reasons of wrong answers: {page}\n" in output.err
        found, said = json.loads(output.out)["causes"]["rows"], page.read_text()
        assert len(found) == HARD
        for row in found:
            assert said.count(f">{row['question_id']}<") and row["note"][:20] in said
        assert main(["report", run, "--no-attribute"]) == 0
        assert "Why answers went wrong" in page.read_text(), "what was found stays in the page"


def test_the_command_refuses_what_it_cannot_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    RunStore(tmp_path / "run").close()
    assert main(["report", str(tmp_path / "run")]) == 1
    output = capsys.readouterr()
    assert "Nothing has been evaluated yet." in output.err and output.out == ""

"""Whole searches against a real service: what is told, what is paid, what is kept, and what happens when things go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    KEY,
    QUICK,
    RECORDS,
    SPEC_CHAT,
    SPEC_EMBEDDING,
    Recorder,
    benchmark_records,
    call,
    command,
    environment,
    files_holding,
    make_experiment,
    paid,
    run_arguments,
    service,
    small_space,
    table_of,
    wait_until,
    write_world,
)

from ai4rag_nb.foundations.errors import (
    VectorStoreInitializationError,
    AI4RAGError,
    BenchmarkError,
    InputError,
    ModelSettingsError,
    NotAvailableError,
    RunFolderError,
    StorageError,
    StoppedError,
)
from ai4rag_nb.foundations.events import (
    BaseEventHandler,
    PhaseStarted,
    RunFinished,
    RunStarted,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


def sent_texts(stub: OpenAIStub) -> list[str]:
    return [text for path, body in stub.bodies if path.endswith("/embeddings") for text in body["input"]]


def sent_prompts(stub: OpenAIStub) -> list[str]:
    return [json.dumps(body["messages"]) for path, body in stub.bodies if path.endswith("/completions")]


# --- the story ---------------------------------------------------------------------------------------------------------------


def test_five_cells(tmp_path: Path, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
    from ai4rag_nb import AI4RAGExperiment, AI4RAGSearchSpace, BenchmarkData, load_documents, open_run

    write_world(tmp_path)
    monkeypatch.chdir(tmp_path)

    docs = load_documents("docs/")
    bench = BenchmarkData.from_file("bench.json")
    space = AI4RAGSearchSpace(embedding_model=[SPEC_EMBEDDING], foundation_model=[SPEC_CHAT], chunk_size=[64])
    experiment = AI4RAGExperiment(docs, bench, space, {"max_evals": 3})
    found = experiment.search()

    assert found["chunk_size"] == 64 and 0 <= found["score"] <= 1
    table = experiment.results.leaderboard(columns="all")
    interval = ["overall_score_ci_low", "overall_score_ci_high"]
    assert list(table.columns[:7]) == ["rank", "pattern", "state", "overall_score", *interval, "n"]
    assert {"answer_correctness", "token_f1", "chunk_size", "duration_seconds"} <= set(table.columns)
    assert list(table["rank"]) == [1, 2, 3]
    assert list(table["overall_score"]) == sorted(table["overall_score"], reverse=True)
    low, mean, high = (table[name] for name in (interval[0], "overall_score", interval[1]))
    assert ((low <= mean) & (mean <= high)).all()
    best = experiment.results.best_pattern()
    assert best.name == table["pattern"][0] and "Pattern" in repr(best)
    answer = best.generate("When was the lighthouse built?")
    assert "1862" in answer["answer"] and answer["question"] == "When was the lighthouse built?"
    assert answer["reference_documents"][0].document_id == "lighthouse.md"
    chatted = best.chat(
        [
            {"role": "user", "content": "Tell me about the ferry."},
            {"role": "assistant", "content": "It goes to Heron Island."},
            {"role": "user", "content": "How long does the ferry's crossing take?"},
        ]
    )
    assert (
        "twelve minutes" in chatted["answer"]
        and {"answer", "reference_documents", "question"} <= chatted.keys()
    )
    last = [body for path, body in stub.bodies if path.endswith("/completions")][-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
    assert last[1]["content"] == "Tell me about the ferry."
    best.close()
    experiment.close()
    assert (tmp_path / "ai4rag_runs").is_dir() and (tmp_path / ".ai4rag_nb").is_dir()
    with open_run(experiment.output_path).best_pattern() as opened:
        assert "1862" in opened.generate("When was the lighthouse built?")["answer"]


def test_results_answer_questions_about_the_search(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path)
    experiment.search()
    results = experiment.results
    best = results.get_best_evaluations(2)
    assert [result.score for result in best] == sorted([result.score for result in best], reverse=True)
    settings = best[0].payload["settings"]
    indexing = {name: settings[name] for name in ("chunking", "embedding")}
    rag = {name: settings[name] for name in ("template_id", "retrieval", "generation")}
    assert results.evaluation_explored_or_cached(indexing, rag) == best[0].score
    assert results.evaluation_explored_or_cached({**indexing, "chunking": {}}, rag) is None
    assert results.get_existing_collection(indexing) == settings["store_binding"]["collection_name"]
    assert results.get_existing_collection({**indexing, "embedding": {}}) is None
    assert len(results.collection_names) == len(set(results.collection_names)) <= 2
    assert all(name.startswith("ai4rag_") for name in results.collection_names)
    experiment.close()


def test_what_is_told_and_written(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    experiment = make_experiment(tmp_path, max_evals=5, event_handler=recorder)
    experiment.search()
    experiment.close()

    assert [payload["name"] for payload, _ in recorder.patterns] == [f"Pattern{n}" for n in range(1, 6)]
    for payload, results in recorder.patterns:
        assert payload["iteration"] == int(payload["name"].removeprefix("Pattern")) - 1
        assert payload["max_combinations"] == 8
        assert isinstance(payload["duration_seconds"], float) and payload["duration_seconds"] >= 0
        chosen = [metric for metric in payload["evaluation"]["metrics"] if metric.get("optimization_metric")]
        assert [(metric["evaluator"], metric["name"]) for metric in chosen] == [("custom", "overall_score")]
        for metric in payload["evaluation"]["metrics"]:
            assert {"name", "evaluator", "description", "scores"} <= metric.keys() and metric["description"]
            assert set(metric["scores"]) == {"mean", "ci_low", "ci_high", "n"}
            if metric["scores"]["mean"] is not None:
                assert metric["scores"]["ci_low"] <= metric["scores"]["mean"] <= metric["scores"]["ci_high"]
        settings = payload["settings"]
        assert {"chunking", "embedding", "retrieval", "generation", "store_binding"} <= set(settings)
        assert settings["chunking"]["chunking_method"] == "recursive"
        assert settings["embedding"]["embedding_dimension"] == 64
        assert set(settings["store_binding"]) == {"provider_type", "collection_name"}
        assert settings["store_binding"]["provider_type"] == "milvus_lite"
        assert settings["store_binding"]["collection_name"].startswith("ai4rag_")
        assert len(results) == len(RECORDS)
        for row in results:
            assert {"question", "correct_answers", "answer", "answer_contexts", "metrics"} <= row.keys()
            assert all(set(metric) == {"name", "evaluator", "score"} for metric in row["metrics"])
        folder = tmp_path / "run" / payload["name"]
        assert json.loads((folder / "pattern.json").read_text()) == payload
        assert json.loads((folder / "evaluation_results.json").read_text()) == results
    steps = {step for _, _, step in recorder.statuses} | {
        event.step.name for event in recorder.of(PhaseStarted)
    }
    assert {"CHUNKING", "EMBEDDING", "GENERATION", "EVALUATION", "OPTIMIZATION"} <= steps
    kinds = [
        type(event)
        for event in recorder.events
        if type(event) in (RunStarted, TrialStarted, TrialFinished, RunFinished)
    ]
    assert kinds == [RunStarted, *[TrialStarted, TrialFinished] * 5, RunFinished]
    started, finished = recorder.of(RunStarted)[0], recorder.of(RunFinished)[0]
    assert (started.max_evaluations, started.combinations, started.questions, started.resumed) == (
        5,
        8,
        12,
        0,
    )
    assert finished.state == "completed" and finished.best_pattern is not None


def test_objective_and_metrics_can_be_chosen(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    experiment = make_experiment(
        tmp_path,
        event_handler=recorder,
        optimization_metric="token_f1",
        metrics=["answer_correctness", "unitxt:faithfulness"],
    )
    best = experiment.search()
    results = experiment.results
    assert results.optimization_metric == "custom:token_f1"
    scores = {
        name: metric["scores"]["mean"]
        for metric in recorder.patterns[0][0]["evaluation"]["metrics"]
        for name in [metric["name"]]
    }
    assert "context_correctness" not in scores and "overall_score" not in scores
    flagged = [
        metric["name"]
        for metric in recorder.patterns[0][0]["evaluation"]["metrics"]
        if metric.get("optimization_metric")
    ]
    assert flagged == ["token_f1"]
    table = results.leaderboard(columns="all")
    assert (
        best["score"]
        == table["token_f1"][0]
        == max(payload_score(payload, "token_f1") for payload, _ in recorder.patterns)
    )
    by_other = results.leaderboard("answer_correctness", columns="all")
    assert list(by_other["answer_correctness"]) == sorted(
        [payload_score(payload, "answer_correctness") for payload, _ in recorder.patterns], reverse=True
    )
    with pytest.raises(InputError, match="answer_correctness"):
        results.leaderboard("answer_corectness")
    experiment.close()


def payload_score(payload: dict[str, Any], metric: str) -> float:
    return next(
        entry["scores"]["mean"] for entry in payload["evaluation"]["metrics"] if entry["name"] == metric
    )


def test_metrics_that_do_not_vary_are_flagged(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64, 72, 128, 136], number_of_chunks=[2], search_mode=["hybrid"])
    experiment = make_experiment(tmp_path, space, max_evals=3)
    experiment.search()
    assert not [note for note in experiment.results.notes if "the same for all" in note], "three say little"
    experiment.close()
    experiment = make_experiment(tmp_path, space, max_evals=4)
    experiment.search()
    (note,) = [note for note in experiment.results.notes if "configurations" in note]
    assert "faithfulness" in note or "All 4 configurations score the same" in note
    assert "refusal" not in note, "only of metrics that were chosen"
    experiment.close()


# --- what is paid ------------------------------------------------------------------------------------------------------------


def test_the_floor_of_calls(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=8)
    assert paid(stub) == 0, "making an experiment calls nothing that costs"
    experiment.search()
    experiment.close()
    texts, prompts = sent_texts(stub), sent_prompts(stub)
    assert len(texts) == len(set(texts)) and len(prompts) == len(set(prompts))
    questions = [question for question, *_ in RECORDS]
    asked = [
        body["input"]
        for path, body in stub.bodies
        if path.endswith("/embeddings") and set(body["input"]) & set(questions)
    ]
    assert asked == [questions], "all questions travel in one request"
    assert stub.counts.embedding_requests == 3, "one for the questions and one for each index"
    shown = {row["question"] for row in experiment.results.evaluations[0].results}
    assert shown == set(questions)
    distinct = {
        (row["question"], tuple(row["answer_contexts"]))
        for result in experiment.results.evaluations
        for row in result.results
    }
    assert len(prompts) == len(distinct) + 1, (
        "one for each distinct prompt, and one small call to see that the model answers"
    )


def test_a_second_run_pays_nothing(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path)
    first.search()
    table, before = table_of(first.results), stub.counts.requests
    first.close()
    again = make_experiment(tmp_path)
    again.search()
    assert table_of(again.results) == table
    again.close()
    elsewhere = make_experiment(tmp_path, run="other")
    elsewhere.search()
    elsewhere.close()
    assert table_of(elsewhere.results) == table
    assert (
        again.results.collection_names == first.results.collection_names == elsewhere.results.collection_names
    )
    assert [path for path, _ in stub.bodies[before:]] == []


def test_another_experiment_pays_only_for_what_is_new(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path, max_evals=8)
    first.search()
    first.close()
    texts, prompts = set(sent_texts(stub)), set(sent_prompts(stub))
    stub.reset()
    second = make_experiment(tmp_path, small_space(number_of_chunks=[2, 3]), max_evals=8, run="second")
    second.search()
    assert sent_texts(stub) == []
    fresh = sent_prompts(stub)
    assert fresh and len(fresh) == len(set(fresh)) and not set(fresh) & prompts
    stub.reset()
    more = [
        *benchmark_records(),
        {
            **benchmark_records()[0],
            "question": "How often is the starter fed?",
            "correct_answers": ["twice a day"],
        },
    ]
    third = make_experiment(tmp_path, max_evals=8, run="third", records=more)
    third.search()
    assert sent_texts(stub) == ["How often is the starter fed?"]
    assert all("How often is the starter fed?" in prompt for prompt in sent_prompts(stub))
    assert texts and third.results.collection_names[0] in first.results.collection_names
    for experiment in (second, third):
        experiment.close()


def test_two_spellings_of_one_pipeline_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch, listed_window=4096) as stub:
        space = small_space(chunk_size=[512, 1024], search_mode=["vector"], number_of_chunks=[2])
        experiment = make_experiment(tmp_path, space, max_evals=2)
        experiment.search()
        first, second = experiment.results.evaluations
        assert len(experiment.results.collection_names) == 1, "both sizes give the same chunks"
        assert first.score == second.score and first.results == second.results and first.key != second.key
        assert stub.counts.chats == len(RECORDS) + 1
        flagged = [
            metric["name"]
            for metric in second.payload["evaluation"]["metrics"]
            if metric.get("optimization_metric")
        ]
        assert flagged == ["overall_score"]
        experiment.close()


def test_a_window_that_the_service_does_not_list_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch, listed_window=None, window=200) as stub:
        first = make_experiment(tmp_path)
        probes = [body for path, body in stub.bodies]
        assert len(probes) <= 5 and sum(len(body["input"]) for body in probes) <= 10
        first.search()
        first.close()
        before = paid(stub)
        second = make_experiment(tmp_path, run="other")
        second.search()
        second.close()
        assert paid(stub) == before


def test_a_larger_budget_goes_on_from_where_the_search_ended(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path, max_evals=3)
    first.search()
    first.close()
    names = [entry["name"] for entry in table_of(first.results)]
    recorder = Recorder()
    second = make_experiment(tmp_path, max_evals=6, event_handler=recorder)
    second.search()
    second.close()
    assert sorted(names) == ["Pattern1", "Pattern2", "Pattern3"]
    assert [event.name for event in recorder.of(TrialStarted)] == ["Pattern4", "Pattern5", "Pattern6"]
    assert recorder.of(RunStarted)[0].resumed == 3
    straight = make_experiment(tmp_path, max_evals=6, run="straight")
    straight.search()
    straight.close()
    assert table_of(straight.results) == table_of(second.results)


def test_known_observations(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path, max_evals=3)
    first.search()
    first.close()
    known = [{"config": result.configuration, "score": result.score} for result in first.results.evaluations]
    second = make_experiment(tmp_path, max_evals=8, run="second", known_observations=known)
    second.search()
    keys = {result.key for result in first.results.evaluations}
    assert len(second.results.evaluations) == 5
    assert not keys & {result.key for result in second.results.evaluations}
    second.close()
    with pytest.raises(InputError, match="known_observations"):
        make_experiment(tmp_path, run="third", known_observations=[{"score": 1.0}])
    assert not (tmp_path / "third").exists()


def test_a_budget_above_the_space_ends_well(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    experiment = make_experiment(tmp_path, max_evals=50, event_handler=recorder)
    experiment.search()
    experiment.close()
    assert len(experiment.results.evaluations) == 8
    assert (
        recorder.of(RunFinished)[0].state == "completed" and recorder.of(RunStarted)[0].max_evaluations == 8
    )


# --- held out ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def handbook(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Twelve pages of the handbook and the questions about them, enough for a part that is held out."""
    source = Path(__file__).resolve().parent.parent / "ai4rag_nb" / "corpora"
    names = "hearth-8 mast-20x crops alarms calibration hearth-2 installation sluice-valves overview rules dusk-run murmur-radio"
    for name in names.split():
        (tmp_path / "docs").mkdir(exist_ok=True)
        shutil.copy(source / "handbook" / f"{name}.md", tmp_path / "docs")
    known = {f"{name}.md" for name in names.split()}
    records = json.loads((source / "handbook_benchmark.json").read_text(encoding="utf-8"))
    return tmp_path, [
        record
        for record in records
        if record["correct_answer_document_keys"] and set(record["correct_answer_document_keys"]) <= known
    ]


def test_the_held_out_part_is_used_once(
    handbook: tuple[Path, list[dict[str, Any]]], stub: OpenAIStub
) -> None:
    folder, records = handbook
    recorder = Recorder()
    space = small_space(chunk_size=[128], number_of_chunks=[3, 5])
    experiment = make_experiment(folder, space, max_evals=4, records=records, event_handler=recorder)
    experiment.search()
    held_out = experiment.results.held_out
    asked = {row["question"] for row in held_out["results"]}
    tuning = {row["question"] for _, results in recorder.patterns for row in results}
    assert held_out["questions"] == len(asked) > 0 and not asked & tuning
    assert len(asked) + len(tuning) == len(records)
    documents = {record["question"]: set(record["correct_answer_document_keys"]) for record in records}
    assert not {key for question in asked for key in documents[question]} & {
        key for question in tuning for key in documents[question]
    }
    about_held_out = [
        prompt
        for prompt in sent_prompts(stub)
        if any(json.dumps(question)[1:-1] in prompt for question in asked)
    ]
    records_of = experiment.results.test_part
    needed = {
        (row["question"], tuple(row["answer_contexts"]))
        for record in records_of.values()
        for row in record["results"]
    }
    assert len(about_held_out) == len(needed), "each question with each set of passages is asked once"
    assert held_out["name"] == table_of(experiment.results)[0]["name"] == next(iter(records_of))
    before = paid(stub)
    experiment.search()
    assert paid(stub) == before
    experiment.close()


def test_a_held_out_part_that_fails_does_not_cost_the_search(
    handbook: tuple[Path, list[dict[str, Any]]], stub: OpenAIStub
) -> None:
    folder, records = handbook
    space = small_space(chunk_size=[128], number_of_chunks=[3], search_mode=["vector"])

    class Sabotage(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, TrialFinished):
                stub.settings.empty = "none"

    experiment = make_experiment(folder, space, max_evals=1, records=records, event_handler=Sabotage())
    assert experiment.search()["score"] is not None
    assert any("held out" in note and "empty answer" in note for note in experiment.results.notes)
    stub.settings.empty = None
    experiment.handlers.clear()
    experiment.search()
    assert experiment.results.held_out["questions"] > 0
    experiment.close()


# --- faults ------------------------------------------------------------------------------------------------------------------


def test_one_failing_question_costs_that_question(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.fail_texts = ("When was the lighthouse built?\nAnswer",)
    experiment = make_experiment(tmp_path, settings=QUICK)
    experiment.search()
    for result in experiment.results.evaluations:
        assert result.state == "completed"
        failed = [row for row in result.results if row["error"]]
        assert [row["question"] for row in failed] == ["When was the lighthouse built?"] and failed[0][
            "answer"
        ] is None
        assert "not welcome" in failed[0]["error"]
        overall = next(
            metric for metric in result.payload["evaluation"]["metrics"] if metric["name"] == "overall_score"
        )
        assert overall["scores"]["n"] == 11 and overall["unscored"] == 1
    experiment.close()


def test_three_answers_in_ten_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(monkeypatch, fail_share=0.3) as stub:
        experiment = make_experiment(tmp_path, max_evals=8)
        experiment.search()
        states = set()
        for result in experiment.results.evaluations:
            answered = sum(row["error"] is None for row in result.results)
            overall = next(
                metric
                for metric in result.payload["evaluation"]["metrics"]
                if metric["name"] == "overall_score"
            )
            assert overall["scores"]["n"] == answered and overall["unscored"] == 12 - answered
            assert result.state == ("completed" if answered >= 0.9 * 12 else "incomplete")
            states.add(result.state)
        assert states == {"completed", "incomplete"}
        table = experiment.results.leaderboard(columns="all")
        assert table["rank"][table["state"] == "incomplete"].isna().all()
        assert table["state"][0] == "completed" and table["rank"][0] == 1
        assert len(set(sent_prompts(stub))) == len(sent_prompts(stub)) or stub.counts.refused
        experiment.close()


def test_too_many_answers_failing_leaves_no_winner_and_is_asked_again(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    class Breaking(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, TrialStarted):
                stub.settings.fail_share = 0.5

    experiment = make_experiment(tmp_path, max_evals=3, event_handler=Breaking())
    with pytest.raises(AI4RAGError) as caught:
        experiment.search()
    assert "Too few questions" in str(caught.value) and "500" in str(caught.value)
    table = experiment.results.leaderboard(columns="all")
    assert len(table) == 3 and set(table["state"]) <= {"incomplete", "failed"} and table["rank"].isna().all()
    stub.settings.fail_share = 0.0
    experiment.handlers.clear()
    answered = stub.counts.chats
    experiment.search()
    assert set(experiment.results.leaderboard(columns="all")["state"]) == {"completed"}
    again = stub.counts.chats - stub.counts.distinct_chats
    assert again <= 2, "answers that were paid for are kept; only the look at the service is repeated"
    assert stub.counts.distinct_chats > answered
    experiment.close()


def test_empty_answers_everywhere_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(monkeypatch) as stub:
        experiment = make_experiment(tmp_path, max_evals=2)
        done = threading.Event()

        class Emptying(BaseEventHandler):
            def on_event(self, event: Any) -> None:
                if isinstance(event, TrialFinished) and not done.is_set():
                    done.set()
                    stub.settings.empty = "none"

        experiment.handlers.append(Emptying())
        with pytest.raises(AI4RAGError, match=r"does not answer any more.*empty answer"):
            experiment.search()
        assert [trial.state for trial in experiment.results.evaluations] == ["completed"]
        experiment.close()


def test_all_trials_failing_says_why_and_tries_again_next_time(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.fail_texts = ("Question: ",)
    recorder = Recorder()
    experiment = make_experiment(tmp_path, max_evals=3, event_handler=recorder)
    with pytest.raises(AI4RAGError) as caught:
        experiment.search()
    assert not isinstance(caught.value, InputError)
    assert "3 x" in str(caught.value) and "not welcome" in str(caught.value)
    assert len(recorder.of(TrialFailed)) == 3 and recorder.of(RunFinished)[0].state == "failed"
    table = experiment.results.leaderboard(columns="all")
    assert list(table["state"]) == ["failed"] * 3
    texts = len(sent_texts(stub))
    stub.settings.fail_texts = ()
    experiment.search()
    assert [entry["state"] for entry in table_of(experiment.results)] == ["completed"] * 3
    assert sorted(entry["name"] for entry in table_of(experiment.results)) == [
        "Pattern1",
        "Pattern2",
        "Pattern3",
    ]
    assert len(sent_texts(stub)) == texts, "what was embedded is not embedded again"
    experiment.close()


class Raising(BaseEventHandler):
    def on_event(self, event: Any) -> None:
        raise RuntimeError("this handler is broken")


def test_a_handler_that_raises_is_reported_and_stops_nothing(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    experiment = make_experiment(tmp_path, event_handler=[Raising(), recorder])
    experiment.search()
    assert len(recorder.patterns) == 4 and (tmp_path / "run" / "Pattern4" / "pattern.json").is_file()
    assert any("Raising" in note and "this handler is broken" in note for note in experiment.results.notes)
    experiment.close()


def test_an_unexpected_error_in_a_chunker_costs_its_trials_only(
    tmp_path: Path, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ai4rag_nb.indexing.langchain_chunker import LangChainChunker

    original = LangChainChunker.split_documents

    def breaking(self: Any, documents: Any, **more: Any) -> Any:
        if self.chunk_size == 64:
            raise ZeroDivisionError("a fault in a chunker")
        return original(self, documents, **more)

    monkeypatch.setattr(LangChainChunker, "split_documents", breaking)
    experiment = make_experiment(tmp_path, max_evals=8)
    experiment.search()
    states = {result.configuration["chunk_size"]: result.state for result in experiment.results.evaluations}
    assert states == {64: "failed", 128: "completed"}
    reasons = {result.reason for result in experiment.results.evaluations if result.state == "failed"}
    assert reasons == {"ZeroDivisionError: a fault in a chunker"}
    experiment.close()


def test_an_unexpected_error_in_a_template_costs_its_trial_only(
    tmp_path: Path, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ai4rag_nb.optimization.pipeline as pipeline

    original = pipeline.SimpleRAG

    def breaking(foundation_model: Any, retriever: Any, **stages: Any) -> Any:
        if retriever.number_of_chunks == 2:
            raise LookupError("a fault in a template")
        return original(foundation_model, retriever, **stages)

    monkeypatch.setattr(pipeline, "SimpleRAG", breaking)
    experiment = make_experiment(tmp_path, max_evals=8)
    experiment.search()
    states = {
        result.configuration["number_of_chunks"]: result.state for result in experiment.results.evaluations
    }
    assert states == {1: "completed", 2: "failed"}
    experiment.close()


def test_an_evaluator_that_raises_costs_trials_and_is_named(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator

    class Broken(UnitxtEvaluator):
        def evaluate_metrics(self, evaluation_data: Any, metrics: Any) -> Any:
            raise KeyError("a fault in an evaluator")

    experiment = make_experiment(tmp_path, max_evals=2)
    evaluators = [
        Broken() if isinstance(one, UnitxtEvaluator) else one for one in experiment.prepared.inputs.evaluators
    ]
    experiment.prepared.inputs.evaluators[:] = evaluators
    with pytest.raises(AI4RAGError, match="a fault in an evaluator"):
        experiment.search()
    assert [result.state for result in experiment.results.evaluations] == ["failed", "failed"]
    experiment.close()


# --- models of every kind ----------------------------------------------------------------------------------------------------


def test_variants_of_one_model_are_different_pipelines(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import OpenAIEmbeddingModel, OpenAIFoundationModel, open_run

    client = stub.client(KEY)
    writers = [
        OpenAIFoundationModel("stub-chat", client, {"temperature": 0.0}),
        OpenAIFoundationModel("stub-chat", client, {"temperature": 1.0, "max_completion_tokens": 77}),
        OpenAIFoundationModel("stub-chat", client, system_message_text="Answer as {nobody} would {}."),
    ]
    space = small_space(
        embedding_model=[OpenAIEmbeddingModel("stub-embedding", client, {"context_length": 512})],
        foundation_model=writers,
        chunk_size=[128],
        search_mode=["vector"],
        number_of_chunks=[2],
    )
    experiment = make_experiment(tmp_path, space, max_evals=3)
    experiment.search()
    results = experiment.results
    labels = [result.configuration["foundation_model"] for result in results.evaluations]
    assert sorted(labels) == ["stub-chat", "stub-chat #2", "stub-chat #3"]
    assert stub.counts.chats == 3 * len(RECORDS) + 3, "no variant borrows the answers of another one"
    second = next(
        result for result in results.evaluations if result.configuration["foundation_model"] == "stub-chat #2"
    )
    assert second.payload["settings"]["generation"]["parameters"] == {
        "temperature": 1.0,
        "max_completion_tokens": 77,
    }
    experiment.close()
    opened = open_run(tmp_path / "run")
    for result in opened.evaluations:
        assert opened.pattern_builder is not None
        with opened.pattern_builder(result) as pattern:
            pattern.generate("Who oils the wheels of the clock?")
    asked = [body for path, body in stub.bodies if "Who oils the wheels" in json.dumps(body)]
    chats = [body for body in asked if "messages" in body]
    assert sorted(body["temperature"] for body in chats) == [0.0, 0.1, 1.0]
    assert {body["max_completion_tokens"] for body in chats} == {77, 1024}
    assert sum(body["messages"][0]["content"] == "Answer as {nobody} would {}." for body in chats) == 1


def test_two_embedding_models_with_different_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ai4rag_nb import OpenAIEmbeddingModel

    with service(monkeypatch, embedding_models=("stub-embedding", "other")) as stub:
        client = stub.client(KEY)
        space = small_space(
            embedding_model=[SPEC_EMBEDDING, OpenAIEmbeddingModel("other", client, {"context_length": 100})],
            search_mode=["vector"],
            number_of_chunks=[2],
        )
        experiment = make_experiment(tmp_path, space, max_evals=9)
        experiment.search()
        found = {
            (r.configuration["embedding_model"], r.configuration["chunk_size"])
            for r in experiment.results.evaluations
        }
        assert found == {("stub-embedding", 64), ("stub-embedding", 128), ("other", 64)}
        by_model: dict[str, list[str]] = {}
        for path, body in stub.bodies:
            if path.endswith("/embeddings"):
                by_model.setdefault(body["model"], []).extend(body["input"])
        assert all(len(texts) == len(set(texts)) for texts in by_model.values()) and len(by_model) == 2
        assert experiment.search()["score"] is not None
        experiment.close()


def test_a_model_of_ones_own(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import open_run
    from ai4rag_nb.querying.generation import BaseFoundationModel, Generation, GenerationCounts

    class Parrot(BaseFoundationModel):
        model_id, counts = "parrot", GenerationCounts()

        def fingerprint(self) -> dict[str, Any]:
            return {"kind": "parrot"}

        def generate(self, messages: Any, question: str, contexts: list[str]) -> Generation:
            return Generation(contexts[0] if contexts else "hello")

    space = small_space(foundation_model=[Parrot()], chunk_size=[64], search_mode=["vector"])
    experiment = make_experiment(tmp_path, space, max_evals=2)
    experiment.search()
    with experiment.results.best_pattern() as pattern:
        assert "1862" in pattern.generate("When was the lighthouse built?")["answer"]
    experiment.close()
    with pytest.raises(InputError, match="parrot"), open_run(tmp_path / "run").best_pattern() as pattern:
        pattern.generate("When was the lighthouse built?")


# --- a service that goes away ------------------------------------------------------------------------------------------------


def test_a_service_that_goes_away_ends_the_search_and_costs_no_budget(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    straight = make_experiment(tmp_path, run="straight", workspace="elsewhere")
    straight.search()
    straight.close()

    class Breaking(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, TrialFinished) and event.name == "Pattern2":
                stub.settings.status = 503

    experiment = make_experiment(tmp_path, event_handler=Breaking())
    with pytest.raises(AI4RAGError, match="does not answer any more") as caught:
        experiment.search()
    assert not isinstance(caught.value, InputError) and "same again" in str(caught.value)
    assert len(experiment.results.evaluations) == 2
    experiment.handlers.clear()
    stub.settings.status = None
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    experiment.close()


def test_a_folder_in_which_nothing_was_evaluated_is_free(tmp_path: Path, stub: OpenAIStub) -> None:
    with pytest.raises(ModelSettingsError, match="misspelt"):
        make_experiment(tmp_path, small_space(foundation_model=["openai:misspelt"])).search()
    experiment = make_experiment(tmp_path)
    experiment.search()
    assert len(experiment.results.evaluations) == 4
    experiment.close()


# --- stopping and going on ---------------------------------------------------------------------------------------------------


class StopAt(BaseEventHandler):
    """Stop the experiment when a number of trials have begun."""

    def __init__(self, trials: int) -> None:
        self.left, self.experiment = trials, None

    def on_event(self, event: Any) -> None:
        self.left -= isinstance(event, TrialStarted)
        if self.left == 0 and isinstance(event, PhaseStarted):
            self.experiment.run.stop()


def test_stop_keeps_what_is_finished_and_the_next_search_goes_on(tmp_path: Path, stub: OpenAIStub) -> None:
    straight = make_experiment(tmp_path, run="straight", workspace="elsewhere")
    straight.search()
    straight.close()
    stub.reset()
    stopper, recorder = StopAt(3), Recorder()
    experiment = make_experiment(tmp_path, event_handler=[stopper, recorder])
    stopper.experiment = experiment
    with pytest.raises(StoppedError):
        experiment.search()
    assert recorder.of(RunFinished)[-1].state == "stopped"
    assert [entry["state"] for entry in table_of(experiment.results)] == ["completed", "completed"]
    assert any("2 of 4" in note for note in experiment.results.notes)
    stopper.left = -1
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    assert not any("of 4" in note for note in experiment.results.notes)
    texts, prompts = sent_texts(stub), sent_prompts(stub)
    assert len(texts) == len(set(texts))
    assert len(prompts) <= len(set(prompts)) + 10
    experiment.close()


def test_a_stopped_batch_is_taken_up_where_it_was_left(tmp_path: Path, stub: OpenAIStub) -> None:
    settings = {"max_evals": 8, "n_random_nodes": 2, "evals_per_trial": 3}
    straight = make_experiment(tmp_path, run="straight", optimizer_settings=settings)
    straight.search()
    for trials in (4, 5, 7):
        stopper = StopAt(trials)
        experiment = make_experiment(
            tmp_path, run=f"run{trials}", optimizer_settings=settings, event_handler=stopper
        )
        stopper.experiment = experiment
        with pytest.raises(StoppedError):
            experiment.search()
        experiment.search()
        assert table_of(experiment.results) == table_of(straight.results)
        experiment.close()
    straight.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_command_keeps_everything_and_the_same_command_goes_on(
    tmp_path: Path, number: int
) -> None:
    with OpenAIStub(delay=0.05, listed_window=512) as stub:
        arguments = run_arguments(tmp_path, "--max-evals", "6")
        process = subprocess.Popen(
            command(*arguments),
            env=environment(stub),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: stub.counts.chats >= 20 or process.poll() is not None)
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
        assert output == "" and "Traceback" not in errors
        assert "Interrupted" in errors and "same command" in errors
        before, prompts = stub.counts.chats, set(sent_prompts(stub))
        assert before < 60
        stub.settings.delay = 0.0
        done = call(*arguments, stub=stub)
        assert done.returncode == 0, done.stderr
        assert not prompts & set(sent_prompts(stub)[before:]), "no call that was answered is made again"
        assert len(set(sent_texts(stub))) == len(sent_texts(stub))


# --- folders -----------------------------------------------------------------------------------------------------------------


def test_the_folder_of_another_experiment_is_refused_before_anything_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch, listed_window=None) as stub:
        first = make_experiment(tmp_path, max_evals=2)
        first.search()
        first.close()
        stub.reset()
        kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")}
        for number, (what, options) in enumerate(
            {
                "search space": {"space": small_space(number_of_chunks=[3])},
                "questions": {"records": benchmark_records()[:6]},
                "metrics": {"optimization_metric": "token_f1"},
                "optimizer": {"optimizer_settings": {"max_evals": 2, "random_state": 1}},
            }.items()
        ):
            with pytest.raises(RunFolderError, match=what) as caught:
                make_experiment(tmp_path, **{"max_evals": 2, "workspace": f"new{number}", **options})
            assert "new folder" in str(caught.value)
        (tmp_path / "docs" / "bakery.md").write_text("# The bakery\n\nIt closed.\n")
        with pytest.raises(RunFolderError, match="documents"):
            make_experiment(tmp_path, max_evals=2, workspace="newest", records=benchmark_records()[2:])
        assert stub.bodies == []
        assert kept == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")}


def test_a_folder_with_other_things_is_refused(tmp_path: Path, stub: OpenAIStub) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="holds no run"):
        make_experiment(tmp_path)
    with pytest.raises(RunFolderError):
        make_experiment(tmp_path, run="run/thesis.tex")
    with pytest.raises(RunFolderError):
        make_experiment(tmp_path, run="run/thesis.tex/run")
    assert stub.counts.requests == 0 and (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


def test_a_run_folder_can_be_renamed_and_opened_from_anywhere(
    tmp_path: Path, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ai4rag_nb import open_run

    work = tmp_path / "work"
    work.mkdir()
    write_world(work)
    monkeypatch.chdir(work)
    experiment = make_experiment(Path("."), max_evals=2)
    experiment.search()
    table = table_of(experiment.results)
    experiment.close()
    monkeypatch.chdir(tmp_path)
    (work / "run").rename(tmp_path / "renamed")
    opened = open_run("renamed")
    assert table_of(opened) == table
    with opened.best_pattern() as pattern:
        assert pattern.generate("Which apple ripens last?")["answer"]
    work.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="workspace") as caught:
        open_run("renamed").best_pattern().generate("Which apple ripens last?")
    assert str(work) in str(caught.value) and not work.exists()
    with open_run("renamed", workspace=tmp_path / "moved" / "workspace").best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate("Which apple ripens last?")["answer"]
    before = paid(stub)
    monkeypatch.chdir(tmp_path / "moved")
    again = make_experiment(Path("."), max_evals=2, run="../renamed")
    again.search()
    again.close()
    assert paid(stub) == before and table_of(again.results) == table


def test_cleaned_collections_are_rebuilt_without_paying(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import open_run
    from ai4rag_nb.serving.commands import main

    experiment = make_experiment(tmp_path, max_evals=2)
    experiment.search()
    table = table_of(experiment.results)
    experiment.close()
    assert main(["clean", "--yes", "--workspace", str(tmp_path / "workspace")]) == 0
    before = paid(stub)
    with open_run(tmp_path / "run").best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate("Which apple ripens last?")["answer"]
    assert paid(stub) == before
    assert main(["clean", "--yes", "--workspace", str(tmp_path / "workspace")]) == 0
    before = paid(stub)
    again = make_experiment(tmp_path, max_evals=2)
    again.search()
    assert table_of(again.results) == table and paid(stub) == before
    with again.results.best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate("Which apple ripens last?")["answer"]
    again.close()
    with open_run(tmp_path / "run").best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate("Which apple ripens last?")["answer"]


def test_vectors_that_vanished_are_rebuilt_without_paying(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import open_run

    experiment = make_experiment(tmp_path, max_evals=2)
    experiment.search()
    table = table_of(experiment.results)
    experiment.close()
    shutil.rmtree(tmp_path / "workspace" / "vectors.db")
    before = paid(stub)
    again = make_experiment(tmp_path, max_evals=2)
    again.search()
    assert table_of(again.results) == table and paid(stub) == before
    again.close()
    with open_run(tmp_path / "run").best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate("Which apple ripens last?")["answer"]


def test_missing_files_of_patterns_are_written_again(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=2)
    experiment.search()
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")}
    shutil.rmtree(tmp_path / "run" / "Pattern1")
    (tmp_path / "run" / "Pattern2" / "evaluation_results.json").unlink()
    experiment.search()
    assert kept == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.json")}
    experiment.close()


# --- two at once -------------------------------------------------------------------------------------------------------------


def test_a_second_process_in_one_workspace_gets_a_message_and_harms_nothing(tmp_path: Path) -> None:
    with OpenAIStub(delay=0.1, listed_window=512) as stub:
        arguments = run_arguments(tmp_path)
        first = subprocess.Popen(
            command(*arguments),
            env=environment(stub),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: stub.counts.chats >= 16 or first.poll() is not None)
        stub.settings.delay = 8.0
        others = [
            run_arguments(tmp_path, "--out", str(tmp_path / "second")),
            arguments,
            ["ask", str(tmp_path / "run"), "Which apple ripens last?"],
        ]
        with ThreadPoolExecutor() as pool:
            second, same, asked = pool.map(lambda other: call(*other, stub=stub), others)
        stub.settings.delay = 0.0
        output, errors = first.communicate(timeout=300)
        assert first.returncode == 0, errors
        for done in (second, same):
            assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
            assert "process" in done.stderr and str(first.pid) in done.stderr
        assert asked.returncode in (1, 2) and "process" in asked.stderr
        after = call(*run_arguments(tmp_path, "--out", str(tmp_path / "second")), stub=stub)
        assert after.returncode == 0, after.stderr
        assert [row.split()[1:4] for row in after.stdout.splitlines()[1:5]] == [
            row.split()[1:4] for row in output.splitlines()[1:5]
        ]


def test_two_experiments_of_one_process_share_a_workspace(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path, max_evals=4, run="first")
    second = make_experiment(tmp_path, small_space(number_of_chunks=[1, 3]), max_evals=4, run="second")
    runs = [first.start(), second.start()]
    for run in runs:
        run.wait()
    for experiment in (first, second):
        assert [entry["state"] for entry in table_of(experiment.results)] == ["completed"] * 4
        experiment.close()
    texts, prompts = sent_texts(stub), sent_prompts(stub)
    assert len(prompts) - len(set(prompts)) <= 1 + 20 and len(set(texts)) <= len(texts)


def test_one_experiment_is_not_started_twice_at_once(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.delay = 0.05
    experiment = make_experiment(tmp_path, max_evals=2)
    run = experiment.start()
    with pytest.raises(InputError, match="running"):
        experiment.start()
    twin = make_experiment(tmp_path, max_evals=2)
    with pytest.raises(AI4RAGError, match="running in"):
        twin.search()
    run.wait()
    experiment.close()
    twin.close()


# --- disks -------------------------------------------------------------------------------------------------------------------

_FULL_DISK = """
import resource, sys
sys.path.insert(0, {tests!r})
from small_world import *
from pathlib import Path
from ai4rag_nb.foundations.errors import StorageError
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
experiment = make_experiment(Path({folder!r}), max_evals=6)

class Fill(BaseEventHandler):
    def on_event(self, event):
        if type(event).__name__ == "TrialFinished" and event.name == "Pattern2":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

experiment.handlers.append(Fill())
try:
    experiment.search()
except StorageError as error:
    print("STORAGE", error)
    sys.exit(1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes exist on POSIX only")
def test_a_disk_that_runs_full_keeps_everything_so_far(tmp_path: Path, stub: OpenAIStub) -> None:
    write_world(tmp_path)
    program = _FULL_DISK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(stub), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("STORAGE") and "free space" in done.stdout
    assert "Traceback" not in done.stderr
    prompts = sent_prompts(stub)
    experiment = make_experiment(tmp_path, max_evals=6)
    states = [result.state for result in experiment.results.evaluations]
    assert states[:2] == ["completed", "completed"] and set(states) == {"completed"}
    experiment.search()
    assert len(experiment.results.evaluations) == 6
    repeated = set(prompts) & set(sent_prompts(stub)[len(prompts) :])
    assert len(repeated) <= 20, (
        "at most the calls that were on their way, and what ten threads began before they heard of it"
    )
    experiment.close()


def test_a_cache_that_cannot_be_written_ends_the_search_at_once(
    tmp_path: Path, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ai4rag_nb.foundations.cache import Cache

    original, stub.settings.delay = Cache.put_many, 0.02

    def failing(self: Cache, kind: str, items: Any) -> None:
        if kind == "answers" and stub.counts.chats > 15:
            raise StorageError("Cannot use the cache: the disk is full.", remedy="Make room.")
        original(self, kind, items)

    monkeypatch.setattr(Cache, "put_many", failing)
    experiment = make_experiment(tmp_path, max_evals=8)
    with pytest.raises(StorageError, match="the disk is full"):
        experiment.search()
    assert stub.counts.chats <= 15 + 20, "answers that cannot be kept are not paid for trial after trial"
    assert [result.state for result in experiment.results.evaluations] == ["completed"]
    monkeypatch.undo()
    experiment.close()


def test_an_unwritable_place_is_refused_before_anything_is_paid(tmp_path: Path, stub: OpenAIStub) -> None:
    (tmp_path / "file").write_text("")
    for options in ({"workspace": "file/workspace"}, {"run": "file/run"}, {"workspace": "file"}):
        with pytest.raises(InputError):
            make_experiment(tmp_path, **options)
    assert paid(stub) == 0


def test_a_damaged_run_is_named(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import open_run

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.sqlite").write_bytes(b"this is no database" * 300)
    with pytest.raises(AI4RAGError, match="damaged"):
        open_run(tmp_path / "run")


# --- models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"status": 401}, {"status": 404}, {"html": True}, {"status": 500}, {"broken": "json"}, {"hang": 60.0}],
)
def test_a_service_that_cannot_work_is_found_before_anything_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    from ai4rag_nb.foundations.settings import Settings

    patience = Settings(request_retries=0, request_timeout_seconds=1.0)
    with service(monkeypatch, **settings) as stub:
        with pytest.raises(ModelSettingsError) as caught:
            make_experiment(tmp_path, settings=patience).search()
        assert stub.counts.hung <= 1 and stub.counts.waited_out == 0, "nobody waits for such an answer"
        assert stub.counts.texts <= 2 and stub.counts.chats == 0, "one try of the window at most"
        assert stub.base_url in str(caught.value) and KEY not in str(caught.value)


def test_settings_reach_the_models(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb.foundations.settings import Settings

    experiment = make_experiment(tmp_path, settings=Settings(request_retries=7, request_timeout_seconds=3.0))
    for model in (
        *experiment.prepared.models.embedding_models,
        *experiment.prepared.models.foundation_models,
    ):
        inner = getattr(model, "model", model)
        assert (inner.timeout, inner.retries) == (3.0, 7)
    experiment.close()


def test_questions_that_cannot_be_asked_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(monkeypatch, listed_window=128) as stub:
        long = {**benchmark_records()[0], "question": f"How often is the {'very ' * 300} old starter fed?"}
        with pytest.raises(BenchmarkError, match="How often is the very") as caught:
            make_experiment(tmp_path, records=[*benchmark_records(), long])
        assert "128 tokens" in str(caught.value)
        with pytest.raises(BenchmarkError, match="None of the questions has an answer"):
            make_experiment(tmp_path, records=[{"question": "Why?", "answerable": False}])
        assert paid(stub) == 0


@pytest.mark.parametrize("provider", ["milvus", "pgvector"])
def test_a_server_that_is_not_there_is_named_before_anything_is_paid(
    tmp_path: Path, stub: OpenAIStub, provider: str
) -> None:
    from ai4rag_nb import MilvusConfig, PGVectorConfig

    config = {
        "milvus": MilvusConfig("http://127.0.0.1:1", token="root:very-secret", timeout_seconds=2),
        "pgvector": PGVectorConfig("127.0.0.1", 1, password="very-secret", timeout_seconds=2),
    }[provider]
    with pytest.raises(VectorStoreInitializationError) as caught:
        make_experiment(tmp_path, vector_store_config=config)
    assert "127.0.0.1" in str(caught.value) and "very-secret" not in str(caught.value)
    assert paid(stub) == 0


def test_later_names_are_refused_before_anything_is_called(tmp_path: Path, stub: OpenAIStub) -> None:
    with pytest.raises(InputError):
        make_experiment(tmp_path, optimizer="bayess")
    with pytest.raises(NotAvailableError):
        make_experiment(
            tmp_path, small_space(foundation_model=[SPEC_CHAT, "openai:other"]), n_mps_foundation_models=1
        )
    for settings in ({"max_evals": 0}, {"max_evals": "many"}, {"max_evalls": 3}):
        with pytest.raises(InputError):
            make_experiment(tmp_path, optimizer_settings=settings)
    assert stub.counts.requests == 0


def test_the_key_is_nowhere(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    stub.settings.fail_texts = ("Which apple ripens last?\nAnswer",)
    experiment = make_experiment(tmp_path, max_evals=2, event_handler=recorder)
    experiment.search()
    told = repr(recorder.events) + repr(experiment) + repr(experiment.prepared) + repr(experiment.results)
    with experiment.results.best_pattern() as pattern:
        told += repr(pattern) + repr(pattern.generate("Which day?"))
    experiment.report()
    experiment.close()
    assert KEY not in told
    assert files_holding(tmp_path, KEY) == [] and files_holding(tmp_path, KEY[-8:]) == []
    assert os.environ["OPENAI_API_KEY"] == KEY

"""What may go wrong around a search: services that break on the way, damaged files, arguments of the wrong type."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    Recorder,
    benchmark_records,
    make_experiment,
    paid,
    service,
    small_space,
    table_of,
    write_world,
)

from ai4rag_nb import open_run
from ai4rag_nb.foundations.cache import Cache, count_entries
from ai4rag_nb.foundations.errors import AI4RAGError, InputError, StorageError
from ai4rag_nb.foundations.events import BaseEventHandler, PhaseStarted, TrialFinished
from ai4rag_nb.foundations.paths import check_path
from ai4rag_nb.foundations.settings import load_settings
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, get_trials, put_trial
from ai4rag_nb.optimization.workspace import Workspace


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


class After(BaseEventHandler):
    """Change the service when a pattern is finished."""

    def __init__(self, stub: OpenAIStub, name: str, **settings: Any) -> None:
        self.stub, self.name, self.settings = stub, name, settings

    def on_event(self, event: Any) -> None:
        if isinstance(event, TrialFinished) and event.name == self.name:
            for name, value in self.settings.items():
                setattr(self.stub.settings, name, value)


class InTheMiddle(After):
    """Change the service after a number of answers."""

    def on_event(self, event: Any) -> None:
        if isinstance(event, PhaseStarted) and event.label == f"{self.name}: asking":
            super().on_event(TrialFinished(name=self.name, payload={}, evaluation_results=[]))


# --- services that break on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"html": True}, {"html": False}),
        ({"fail_share": 1.0}, {"fail_share": 0.0}),
        ({"empty": "none"}, {"empty": None}),
        ({"empty": "blank"}, {"empty": None}),
        ({"status": 404}, {"status": None}),
        ({"chat_models": ("another",)}, {"chat_models": ("stub-chat",)}),
    ],
)
@pytest.mark.parametrize("handler", [After, InTheMiddle])
def test_an_outage_ends_the_run_and_the_same_again_repairs_it(
    tmp_path: Path, stub: OpenAIStub, bad: dict[str, Any], good: dict[str, Any], handler: type[After]
) -> None:
    straight = make_experiment(tmp_path, run="straight", workspace="elsewhere")
    straight.search()
    straight.close()
    experiment = make_experiment(tmp_path, event_handler=handler(stub, "Pattern2", **bad))
    with pytest.raises(AI4RAGError, match="does not answer any more") as caught:
        experiment.search()
    assert not isinstance(caught.value, InputError) and "same again" in str(caught.value)
    assert {trial.state for trial in experiment.results.evaluations} == {"completed"}
    experiment.handlers.clear()
    for name, value in good.items():
        setattr(stub.settings, name, value)
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    experiment.close()


def test_a_short_outage_is_noted_and_the_same_again_repairs_it(tmp_path: Path, stub: OpenAIStub) -> None:
    """The service is back when it is looked at, so the trial stays in this run and is tried in the next one."""

    class Short(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label.startswith("Pattern2: "):
                stub.settings.fail_share = 0.6 if event.label.endswith("asking") else 0.0

    experiment = make_experiment(tmp_path, event_handler=Short())
    experiment.search()
    states = [trial.state for trial in experiment.results.evaluations]
    assert states == ["completed", "incomplete", "completed", "completed"]
    assert any("Pattern2 lost questions" in note for note in experiment.results.notes)
    experiment.handlers.clear()
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 4
    assert not any("lost questions" in note for note in experiment.results.notes)
    experiment.close()


def test_a_trial_spoiled_by_its_questions_stays(tmp_path: Path, stub: OpenAIStub) -> None:
    class Refusing(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label == "Pattern2: asking":
                stub.settings.fail_texts = ("lighthouse", "ferry")

    experiment = make_experiment(tmp_path, max_evals=2, event_handler=Refusing())
    experiment.search()
    assert experiment.results.evaluations[1].state in ("incomplete", "failed")
    stub.settings.fail_texts = ()
    experiment.handlers.clear()
    stub.reset()
    experiment.search()
    assert stub.counts.chats == 0
    assert experiment.results.evaluations[1].state in ("incomplete", "failed")
    experiment.close()


@pytest.mark.parametrize("bad", [{"broken": "nan"}, {"broken": "zero"}, {"dimension": 32}])
def test_unusable_vectors_end_the_run_at_once(tmp_path: Path, stub: OpenAIStub, bad: dict[str, Any]) -> None:
    class Breaking(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label.startswith("Chunking"):
                for name, value in bad.items():
                    setattr(stub.settings, name, value)

    experiment = make_experiment(tmp_path, event_handler=Breaking())
    with pytest.raises(AI4RAGError, match="does not answer any more"):
        experiment.search()
    assert experiment.results.evaluations == []
    sent = [t for path, body in stub.bodies if path.endswith("/embeddings") for t in body["input"]]
    assert len(sent) <= len(set(sent)) + 3, "no text was paid for in a second trial"
    stub.settings.broken, stub.settings.dimension = None, 64
    experiment.handlers.clear()
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 4
    experiment.close()


# --- handlers ----------------------------------------------------------------------------------------------------------------


def test_a_handler_that_changes_what_it_gets_changes_nothing(tmp_path: Path, stub: OpenAIStub) -> None:
    class Clearing(BaseEventHandler):
        def on_pattern_creation(
            self, payload: dict[str, Any], evaluation_results: list[dict[str, Any]]
        ) -> None:
            payload.clear()
            evaluation_results.clear()

        def on_event(self, event: Any) -> None:
            for name in ("payload", "evaluation_results", "configuration"):
                if hasattr(event, name):
                    getattr(event, name).clear()

    seen = Recorder()
    straight = make_experiment(tmp_path, run="straight")
    straight.search()
    experiment = make_experiment(tmp_path, event_handler=[Clearing(), seen])
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    assert all(event.payload and event.evaluation_results for event in seen.of(TrialFinished))
    straight.close(), experiment.close()


# --- damaged and read-only files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"no JSON", b"5", b"\xff\xfe", b"", "text", 5, b"[1]", b'{"text": 5}'])
def test_unreadable_rows_of_the_cache_are_computed_again(
    tmp_path: Path, stub: OpenAIStub, value: bytes | str | int
) -> None:
    first = make_experiment(tmp_path, run="first", max_evals=2)
    first.search()
    first.close()
    with closing(sqlite3.connect(tmp_path / "workspace" / "cache.sqlite")) as cache, cache:
        kinds = {kind for (kind,) in cache.execute("SELECT DISTINCT kind FROM entries")}
        assert {"embeddings", "answers", "collections"} <= kinds
        facts = "embedding_facts" if value == b"[1]" else ""
        cache.execute("UPDATE entries SET value = ? WHERE kind != ?", (value, facts))
    second = make_experiment(tmp_path, run="second", max_evals=2)
    second.search()
    assert table_of(second.results) == table_of(first.results)
    texts = stub.counts.texts
    second.close()
    third = make_experiment(tmp_path, run="third", max_evals=2)
    third.search()
    assert stub.counts.texts == texts, "what was computed again is kept"
    third.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE facts SET value = 'no JSON'",
        "UPDATE trials SET configuration = '{'",
        "UPDATE trials SET payload = '5'",
        "UPDATE trials SET results = x'ff'",
        "UPDATE trials SET score = 'high'",
        "DROP TABLE trials",
        "UPDATE facts SET value = CAST(x'ff' AS TEXT)",
    ],
)
def test_unreadable_rows_of_a_run_are_named(tmp_path: Path, stub: OpenAIStub, change: str) -> None:
    first = make_experiment(tmp_path, max_evals=1)
    first.search()
    first.close()
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as run, run:
        run.execute(change)
    with pytest.raises(StorageError, match=r"run\.sqlite.* Name a new folder for the results"):
        open_run(tmp_path / "run")
    if "DROP" not in change:
        with pytest.raises(StorageError, match=r"run\.sqlite.* Name a new folder for the results"):
            make_experiment(tmp_path, max_evals=1).search()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE facts SET value = 'null'", "is damaged: the fact"),
        ("UPDATE trials SET results = '[{\"a\": 1}]'", "is damaged: Pattern1"),
        ("UPDATE trials SET parts = x'00'", "is damaged: Pattern1"),
        ("DELETE FROM texts", "is damaged: Pattern1"),
        ("DELETE FROM facts", "is damaged: the fact 'workspace'"),
        ("UPDATE trials SET payload = '{}'", "does not say where the vectors of Pattern1 are"),
        ("UPDATE trials SET configuration = '{}'", "does not say what 'None' is"),
    ],
)
def test_values_of_another_form_are_damage(
    tmp_path: Path, stub: OpenAIStub, change: str, message: str
) -> None:
    experiment = make_experiment(tmp_path, max_evals=1)
    experiment.search()
    experiment.close()
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as run, run:
        run.execute(change)
    with pytest.raises(AI4RAGError, match=message):
        results = open_run(tmp_path / "run")
        assert results.evaluations[0].results
        results.pattern("Pattern1").generate("When was the lighthouse built?")


def test_an_empty_run_file_and_a_damaged_lock_say_what_to_do(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=1)
    experiment.search()
    (tmp_path / "run" / "run.lock").write_bytes(b"garbage" * 1000)
    with pytest.raises(StorageError, match=r"run\.lock.*Delete the file run\.lock and run the same again"):
        experiment.search()
    (tmp_path / "run" / "run.lock").unlink()
    experiment.search()
    experiment.close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.sqlite").touch()
    with pytest.raises(StorageError, match=r"is empty: it holds no run\. Name a new folder"):
        open_run(tmp_path / "empty")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(InputError, match=r"may not be looked into\. Give yourself the permission"):
        open_run(tmp_path)


def test_a_damaged_run_file_says_where_to_go(tmp_path: Path, stub: OpenAIStub) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.sqlite").write_bytes(b"this is no database" * 300)
    for use in (lambda: open_run(tmp_path / "run"), lambda: make_experiment(tmp_path)):
        with pytest.raises(StorageError, match="Name a new folder for the results"):
            use()
    make_experiment(tmp_path, run="new", max_evals=1).search()


def test_after_closing_it_says_so(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=1)
    experiment.close()
    with pytest.raises(StorageError, match="was closed before") as caught:
        experiment.search()
    assert "free space" not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="rights work otherwise")
def test_a_read_only_run_can_be_read(stub: OpenAIStub) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = make_experiment(folder, max_evals=2)
        experiment.search()
        expected = table_of(experiment.results)
        experiment.close()
        places = [folder, *folder.rglob("*")]
        for place in places:
            place.chmod(0o555 if place.is_dir() else 0o444)
        mine = os.geteuid()
        try:
            if mine == 0:
                os.seteuid(65534)
            assert not os.access(folder / "run", os.W_OK, effective_ids=True)
            results = open_run(folder / "run")
            assert table_of(results) == expected
            cache = Cache.open(folder / "workspace" / "cache.sqlite", read_only=True)
            assert count_entries(cache)["answers"] > 0
            cache.put_many("answers", {"new": b"1"})
            cache.close()
        finally:
            os.seteuid(mine)
            for place in places:
                place.chmod(0o755)


# --- arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("known_observations", 5),
        ("known_observations", [{"config": None, "score": 0.5}]),
        ("known_observations", [{"config": {}, "score": "x"}]),
        ("optimizer_settings", 5),
        ("optimizer_settings", "x"),
        ("optimizer", 5),
        ("space", 5),
        ("vector_store_config", 5),
        ("event_handler", 5),
        ("event_handler", [5]),
        ("event_handler", "x"),
        ("evaluators", 5),
        ("evaluators", [5]),
        ("n_mps_embedding_models", "x"),
        ("n_mps_foundation_models", 0),
        ("inference_max_threads", 10**6),
        ("inference_max_threads", 0),
        ("inference_max_threads", True),
        ("inference_max_threads", "x"),
        ("workspace", "a" * 300),
        ("run", "a" * 300),
        ("run", "a\0b"),
        ("settings", 5),
        ("strict", 5),
    ],
)
def test_arguments_of_another_type_are_refused_before_anything_is_paid(
    tmp_path: Path, stub: OpenAIStub, name: str, value: Any
) -> None:
    with pytest.raises(InputError):
        make_experiment(tmp_path, **{name: value})
    assert paid(stub) == 0


@pytest.mark.parametrize("name", ["workspace", "output_path"])
@pytest.mark.parametrize("value", [5, "", b"x", ["x"]])
def test_places_of_another_type_are_refused(tmp_path: Path, stub: OpenAIStub, name: str, value: Any) -> None:
    from ai4rag_nb import AI4RAGExperiment, BenchmarkData, load_documents

    documents = load_documents(write_world(tmp_path) / "docs")
    benchmark = BenchmarkData.from_records(benchmark_records())
    with pytest.raises(InputError, match=name):
        AI4RAGExperiment(documents, benchmark, small_space(), **{name: value})


def test_settings_that_cannot_work_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.ini").write_text("[ai4rag_nb]\ninference_max_threads = 1000000\n")
    with pytest.raises(InputError, match="at most 1000"):
        load_settings()
    (tmp_path / "settings.ini").unlink()
    (tmp_path / "settings.ini").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        load_settings()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError, match="current folder is gone"):
        check_path("work", "workspace")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("place", ["a" * 300, "a\0b"])
def test_places_that_cannot_be_are_refused_when_a_run_is_opened(place: str) -> None:
    with pytest.raises(InputError):
        open_run(place)
    with pytest.raises(InputError):
        Workspace.existing(place)
    with pytest.raises(InputError):
        Workspace.open(place)


# ------------------------------------------------------------------------------------------------- the size of a run


def passage(number: int) -> str:
    """Make a passage of some 600 characters that no other one equals."""
    return f"Passage {number} about the boiler. " + f"{number} bars at noon. " * 30


def evaluated(iteration: int, questions: int = 6, passages: int = 10) -> EvaluationResult:
    """Make a trial whose questions found the same passages as those of every other trial."""
    rows = [
        {
            "question_id": f"q{place}",
            "question": f"What does gauge {place} say?",
            "answer": "#1",
            "answer_contexts": [passage(number) for number in range(passages)],
            "metrics": [{"name": "m", "evaluator": "custom", "score": place / questions}],
            "hits": [{"text": passage(number), "score": 0.5, "evidence": None} for number in range(passages)],
            "trace": [{"stage": "search", "hits": [{"chunk_id": "c1"}], "failure": None}],
            "evidence": [],
        }
        for place in range(questions)
    ]
    state = (iteration, f"key{iteration}", {"chunk_size": iteration}, "completed", 0.5, {})
    return EvaluationResult(*state, rows, seconds=1.0)


def test_a_passage_is_kept_once_and_read_when_it_is_asked_for(tmp_path: Path) -> None:
    made = [evaluated(iteration) for iteration in range(8)]
    with closing(RunStore(tmp_path / "run")) as store:
        for trial in made:
            put_trial(store, trial)
        read = get_trials(store)
    as_it_comes = sum(len(json.dumps(trial.results)) for trial in made)
    assert as_it_comes > 10 * (tmp_path / "run" / "run.sqlite").stat().st_size
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as file:
        texts = [zlib.decompress(value).decode() for (value,) in file.execute("SELECT value FROM texts")]
    assert sorted(texts) == sorted(["#1", *(passage(number) for number in range(10))])
    assert read == made and [list(one) for one in read[3].results] == [list(one) for one in made[3].results]
    assert [one.context_tokens for one in read] == [one.context_tokens for one in made]
    assert passage(3) not in str(read[0].outline) and read[0].outline[1]["metrics"][0]["score"] == 1 / 6


def test_a_run_of_the_former_form_is_read_and_gets_the_columns(tmp_path: Path) -> None:
    made = [evaluated(iteration) for iteration in range(3)]
    (tmp_path / "run").mkdir()
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as file:
        file.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        file.execute(
            "CREATE TABLE trials (iteration INTEGER PRIMARY KEY, key TEXT NOT NULL, configuration TEXT NOT NULL, "
            "state TEXT NOT NULL, score REAL, payload TEXT NOT NULL, results TEXT NOT NULL, "
            "reason TEXT NOT NULL, seconds REAL NOT NULL, failure TEXT NOT NULL DEFAULT '')"
        )
        for one in made[:2]:
            row = (one.iteration, one.key, json.dumps(one.configuration), one.state, one.score, "{}")
            values = (*row, json.dumps(one.results), "", one.seconds, "")
            file.execute(f"INSERT INTO trials VALUES ({','.join('?' * 10)})", values)
        file.commit()
    for read_only in (True, False, True):
        with closing(RunStore(tmp_path / "run", read_only)) as store:
            known = get_trials(store)
            assert [one.context_tokens for one in known] == [one.context_tokens for one in made[:2]]
            assert known == made[:2] and passage(3) not in str(known[0].outline)
    with closing(RunStore(tmp_path / "run")) as store:
        put_trial(store, made[2])
        assert get_trials(store) == made

"""Whose failure it is travels with the error, from the request to the run folder, and no sentence is searched for it."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import Once, Recorder, make_experiment, service, small_space, table_of

from ai4rag_nb.foundations.errors import (
    AI4RAGError,
    Failure,
    FailedIterationError,
    GenerationError,
    IndexingError,
    LostStoreError,
    StorageError,
    VectorStoreInitializationError,
    failure_of,
    prevailing,
)
from ai4rag_nb.foundations.events import TrialFailed, TrialFinished, TrialStarted
from ai4rag_nb.indexing.openai_embedding import OpenAIEmbeddingModel
from ai4rag_nb.optimization.lost_trials import forget_lost, lost_to_service
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, get_trials, put_trial
from ai4rag_nb.querying.generation import BaseFoundationModel, Generation, GenerationCounts
from ai4rag_nb.querying.openai_generation import OpenAIFoundationModel
from ai4rag_nb.serving.run_report import run_events

ROOT = Path(__file__).resolve().parent.parent
OLD_WORDS = (
    "'http://x' answered with a web page instead of JSON. It cannot be reached, gave no answer in 3 seconds, "
    "did not answer in time; 'http://x' refused the request with status 503: gave an empty answer"
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


@dataclass
class Mood:
    """What a model does next; shared by every copy of it."""

    trouble: Exception | None = None
    asked: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Moody(BaseFoundationModel):
    """Answer from the passages, or raise what it is told to raise."""

    mood: Mood = field(repr=False, compare=False)
    model_id: str = "moody"
    spec: str = "own:moody"
    counts: GenerationCounts = field(default_factory=GenerationCounts, compare=False)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "moody"}

    def generate(self, messages: list[Any], question: str, contexts: list[str]) -> Generation:
        if contexts:
            self.mood.asked.append(question)
            if self.mood.trouble is not None:
                raise self.mood.trouble
        return Generation(contexts[0][:200] if contexts else "hello")


def run_with(folder: Path, mood: Mood, trouble: Exception | None, **options: Any) -> Any:
    """Search over two configurations with a model that has trouble with all questions of the second one."""
    space = small_space(foundation_model=[Moody(mood)])

    class Second(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if type(event).__name__ == "TrialStarted":
                mood.trouble = trouble if event.name == "Pattern2" else None

    experiment = make_experiment(folder, space, max_evals=2, event_handler=Second(), **options)
    experiment.search()
    return experiment


# --- errors of services ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ({"status": 400}, Failure.ITEM),
        ({"status": 422}, Failure.ITEM),
        ({"status": 400, "message": OLD_WORDS}, Failure.ITEM),
        ({"status": 401}, Failure.SERVICE),
        ({"status": 402}, Failure.SERVICE),
        ({"status": 404}, Failure.SERVICE),
        ({"status": 408}, Failure.SERVICE),
        ({"status": 429}, Failure.SERVICE),
        ({"status": 500}, Failure.SERVICE),
        ({"status": 503}, Failure.SERVICE),
        ({"html": True}, Failure.SERVICE),
        ({"empty": "blank"}, Failure.UNUSABLE),
        ({"empty": "none"}, Failure.UNUSABLE),
    ],
)
def test_an_answering_service_says_its_kind(behaviour: dict[str, Any], failure: Failure) -> None:
    with OpenAIStub(**behaviour) as running:
        model = OpenAIFoundationModel("stub-chat", running.client(), retries=0, timeout=10)
        with pytest.raises(GenerationError) as caught:
            model.chat([{"role": "user", "content": "Where?"}])
    assert caught.value.failure is failure


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ({"status": 400, "message": OLD_WORDS}, Failure.ITEM),
        ({"status": 503}, Failure.SERVICE),
        ({"html": True}, Failure.SERVICE),
        ({"broken": "json"}, Failure.SERVICE),
        ({"broken": "list"}, Failure.SERVICE),
        ({"broken": "nan"}, Failure.UNUSABLE),
        ({"broken": "zero"}, Failure.UNUSABLE),
        ({"broken": "missing"}, Failure.UNUSABLE),
    ],
)
def test_an_embedding_service_says_its_kind(behaviour: dict[str, Any], failure: Failure) -> None:
    with OpenAIStub(**behaviour) as running:
        parameters = {"context_length": 512}
        model = OpenAIEmbeddingModel("stub-embedding", running.client(), parameters, retries=0, timeout=10)
        with pytest.raises(IndexingError) as caught:
            model.embed_documents(["one text", "another text"])
    assert caught.value.failure is failure


def test_a_service_that_is_gone_says_its_kind() -> None:
    with OpenAIStub() as running:
        client = running.client()
    model = OpenAIFoundationModel("stub-chat", client, retries=0, timeout=10)
    with pytest.raises(GenerationError) as caught:
        model.chat([{"role": "user", "content": "Where?"}])
    assert caught.value.failure is Failure.SERVICE


def test_errors_of_other_packages_are_faults_and_the_worst_prevails() -> None:
    assert failure_of(ValueError(OLD_WORDS)) is Failure.FAULT
    assert failure_of(StorageError("full")) is Failure.ITEM
    assert failure_of(VectorStoreInitializationError("locked")) is Failure.STORE
    assert failure_of(FailedIterationError("x", failure=Failure.STORE)) is Failure.STORE
    assert prevailing(["item", "unusable", None, "store"]) is Failure.STORE
    assert prevailing([]) is None


# --- trials and runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "again"),
    [
        (GenerationError("Ask me another time.", failure=Failure.SERVICE), True),
        (GenerationError("My shelf fell down.", failure=Failure.STORE), True),
        (GenerationError("Hm.", failure=Failure.UNUSABLE), True),
        (GenerationError(OLD_WORDS), False),
        (RuntimeError(OLD_WORDS), False),
    ],
)
def test_only_the_kind_decides_whether_a_trial_is_tried_again(
    tmp_path: Path, stub: OpenAIStub, trouble: Exception, again: bool
) -> None:
    mood = Mood()
    experiment = run_with(tmp_path, mood, trouble)
    trials = experiment.results.evaluations
    assert [trial.state for trial in trials] == ["completed", "failed"]
    assert trials[1].failure == failure_of(trouble).value and trials[0].failure == ""
    assert lost_to_service(trials[1]) is again
    noted = any("lost questions to a failing service" in note for note in experiment.results.notes)
    assert noted is again
    experiment.handlers.clear()
    mood.trouble, mood.asked = None, []
    experiment.search()
    assert bool(mood.asked) is again
    states = [trial.state for trial in experiment.results.evaluations]
    assert states == ["completed", "completed" if again else "failed"]
    experiment.close()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_store_that_works_again_costs_no_configuration(
    tmp_path: Path, stub: OpenAIStub, failing: int
) -> None:
    """The configuration is tried three times at most; when it is lost each time, the next run tries it again."""
    mood, tries = Mood(), list[str]()

    class Second(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if type(event).__name__ == "TrialStarted":
                mood.trouble = None
            if type(event).__name__ == "PhaseStarted" and event.label == "Pattern2: asking":
                tries.append(event.label)
                mood.trouble = LostStoreError("The server is gone.") if len(tries) <= failing else None

    seen = Second()
    space = small_space(foundation_model=[Moody(mood)])
    experiment = make_experiment(tmp_path, space, max_evals=3, event_handler=seen)
    experiment.search()
    second = "completed" if failing < 3 else "failed"
    assert len(tries) == min(failing + 1, 3) and len(seen.of(TrialStarted)) == 3
    assert [trial.state for trial in experiment.results.evaluations] == ["completed", second, "completed"]
    assert experiment.results.evaluations[1].failure == ("" if failing < 3 else "store")
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 3
    experiment.close()


def test_a_file_that_nothing_can_be_written_to_ends_the_search(tmp_path: Path, stub: OpenAIStub) -> None:
    """It is no damage of one collection: each configuration would fail, and none is used up."""
    file = tmp_path / "workspace" / "vectors.db"

    def spoil() -> None:
        shutil.rmtree(file)
        file.write_text("no store")

    seen = Once("Pattern1", "asking", spoil)
    experiment = make_experiment(tmp_path, event_handler=seen)
    with pytest.raises(AI4RAGError, match=r"does not work any more.*Everything finished is kept") as caught:
        experiment.search()
    assert caught.value.failure is Failure.STORE and not seen.of(TrialFailed)
    assert [event.name for event in seen.of(TrialStarted)] == ["Pattern1", "Pattern2"]
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"]
    experiment.search()
    whole = make_experiment(tmp_path, run="whole", workspace="other")
    whole.search()
    assert table_of(experiment.results) == table_of(whole.results)
    experiment.close()
    whole.close()


def test_the_kind_is_stored_with_every_question(tmp_path: Path, stub: OpenAIStub) -> None:
    class Part(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if type(event).__name__ == "PhaseStarted" and event.label.startswith("Pattern2: "):
                stub.settings.fail_share = 0.5 if event.label.endswith("asking") else 0.0

    experiment = make_experiment(tmp_path, max_evals=2, event_handler=Part())
    experiment.search()
    experiment.close()
    stored = json.loads((tmp_path / "run" / "Pattern2" / "evaluation_results.json").read_text())
    assert {entry["failure"] for entry in stored} == {None, "service"}
    assert all((entry["failure"] is None) == (entry["error"] is None) for entry in stored)
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as file:
        assert file.execute("SELECT state, failure FROM trials ORDER BY iteration").fetchall() == [
            ("completed", ""),
            ("incomplete", "service"),
        ]


def test_a_run_without_kinds_is_read_and_taken_up(tmp_path: Path) -> None:
    """The table of the first release, made by hand."""
    (tmp_path / "run").mkdir()
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as file:
        file.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        file.execute(
            "CREATE TABLE trials (iteration INTEGER PRIMARY KEY, key TEXT NOT NULL, configuration TEXT NOT NULL, "
            "state TEXT NOT NULL, score REAL, payload TEXT NOT NULL, results TEXT NOT NULL, reason TEXT NOT NULL, "
            "seconds REAL NOT NULL)"
        )
        file.execute("INSERT INTO trials VALUES (0, 'k', '{}', 'failed', NULL, '{}', '[]', 'why', 1.5)")
        file.commit()
    old = EvaluationResult(0, "k", {}, "failed", reason="why", seconds=1.5)
    with closing(RunStore(tmp_path / "run", read_only=True)) as store:
        assert get_trials(store) == [old]
    with closing(RunStore(tmp_path / "run")) as store:
        new = replace(old, iteration=1, failure="service")
        put_trial(store, new)
        assert get_trials(store) == [old, new]
        assert forget_lost(store) == 1 and get_trials(store) == [old]


def test_no_module_searches_our_own_sentences() -> None:
    """A regular expression or a comparison over the text of one of our errors would read what a type says."""
    suspicious = re.compile(r"\b(in|==|!=) (str\(error\)|error\.message|error\.remedy|[a-z_.]*\.reason)\b")
    foreign = {"cache.py", "milvus_lite_file.py"}  # what SQLite and Milvus Lite say
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "ai4rag_nb").rglob("*.py"))
        if path.name not in foreign
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if suspicious.search(line) and not line.lstrip().startswith(("for ", "#"))
    ]
    assert found == []


# --- what is told and what is stored -----------------------------------------------------------------------------------------


def test_what_is_told_live_is_what_is_stored(tmp_path: Path, stub: OpenAIStub) -> None:
    class Part(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if type(event).__name__ == "PhaseStarted" and event.label.startswith("Pattern2: "):
                stub.settings.fail_share = 0.5 if event.label.endswith("asking") else 0.0

    seen = Part()
    experiment = make_experiment(tmp_path, max_evals=4, event_handler=seen)
    experiment.search()
    experiment.close()
    live = [event for event in seen.events if isinstance(event, TrialFinished)]
    stored = [event for event in run_events(tmp_path / "run") if isinstance(event, TrialFinished)]
    assert [event.payload["state"] for event in live] == ["completed", "incomplete", "completed", "completed"]
    assert [replace(event, at=0.0) for event in live] == [replace(event, at=0.0) for event in stored]
    assert seen.patterns == [(event.payload, event.evaluation_results) for event in stored]
    for event in stored:
        folder = tmp_path / "run" / event.name
        assert json.loads((folder / "pattern.json").read_text()) == event.payload
        assert json.loads((folder / "evaluation_results.json").read_text()) == event.evaluation_results

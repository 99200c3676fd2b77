"""Two experiments at once, texts that a service refuses, full disks, windows that change, names in two spellings, and odd records."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_stub import OpenAIStub
from small_world import (
    DOCUMENTS,
    RECORDS,
    Recorder,
    benchmark_records,
    environment,
    make_experiment,
    service,
    small_space,
    write_world,
)

from ai4rag_nb import BenchmarkData
from ai4rag_nb.foundations.errors import AI4RAGError


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


# --- two at once -------------------------------------------------------------------------------------------------------------


def test_two_experiments_of_one_workspace_pay_once(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.delay = 0.02
    experiments = [make_experiment(tmp_path, max_evals=4, run=name) for name in ("one", "two")]
    runs = [experiment.start() for experiment in experiments]
    for run in runs:
        run.wait()
    assert stub.counts.chats == stub.counts.distinct_chats > 0
    assert stub.counts.texts == stub.counts.distinct_texts > 0
    for experiment in experiments:
        assert len(experiment.results.evaluations) == 4
        experiment.close()


# --- refused texts -----------------------------------------------------------------------------------------------------------


def test_a_refused_question_costs_that_question(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.fail_texts = ("dusk",)
    records = benchmark_records()
    records[3] = {**records[3], "question": "What does a bicycle cost at dusk?"}
    seen = Recorder()
    experiment = make_experiment(tmp_path, max_evals=2, records=records, event_handler=[seen])
    experiment.search()
    results = experiment.results
    assert [result.state for result in results.evaluations] == ["completed"] * 2
    for result in results.evaluations:
        lost = [entry for entry in result.results if entry.get("error")]
        assert [entry["question"] for entry in lost] == ["What does a bicycle cost at dusk?"]
        assert "Reword the text" in lost[0]["error"] and "smaller" not in lost[0]["error"]
    notes = [message for _, message, _ in seen.statuses if "What does a bicycle cost at dusk?" in message]
    assert len(notes) == 1 and "status 400" in notes[0]
    experiment.close()


def test_a_refused_chunk_is_named_with_its_document(tmp_path: Path, stub: OpenAIStub) -> None:
    write_world(tmp_path)
    (tmp_path / "docs" / "night.md").write_text("# Night\n\nThe lamps are lit at dusk.\n")
    stub.settings.fail_texts = ("dusk",)
    experiment = make_experiment(tmp_path, max_evals=1)
    with pytest.raises(AI4RAGError):
        experiment.search()
    reasons = [result.reason for result in experiment.results.evaluations]
    assert len(reasons) == 1
    assert "of 'night.md', beginning with" in reasons[0] and "status 400" in reasons[0]
    assert "Reword the text, or leave it out." in reasons[0] and "smaller" not in reasons[0]
    experiment.close()


def test_a_service_that_refuses_everything_does_not_blame_a_probe(tmp_path: Path, stub: OpenAIStub) -> None:
    class Refuse(Recorder):
        def on_event(self, event: object) -> None:
            if type(event).__name__ == "TrialStarted":
                stub.settings.status = 413

    experiment = make_experiment(tmp_path, max_evals=4, event_handler=[Refuse()])
    with pytest.raises(AI4RAGError, match=r"refuses even a few words.*status 413") as caught:
        experiment.search()
    assert "one and one" not in str(caught.value) and "smaller" not in str(caught.value)
    experiment.close()


def test_a_service_that_refuses_everything_from_the_start_is_said_so(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    stub.settings.fail_texts = ("e", "o")
    experiment = make_experiment(
        tmp_path, max_evals=1, space=small_space(foundation_model=["local:extractive"])
    )
    with pytest.raises(AI4RAGError, match="refuses even a few words"):
        experiment.search()
    experiment.close()


# --- full disks --------------------------------------------------------------------------------------------------------------

_FULL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from small_world import *
from ai4rag_nb.foundations.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
experiment = make_experiment(Path({folder!r}), max_evals=6)

class Fill(BaseEventHandler):
    def on_event(self, event):
        if type(event).__name__ == "PhaseStarted" and event.step.name == "GENERATION":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

experiment.handlers.append(Fill())
try:
    experiment.search()
except StorageError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes exist on POSIX only")
def test_a_full_disk_loses_only_what_is_on_its_way(tmp_path: Path, stub: OpenAIStub) -> None:
    stub.settings.delay = 0.1
    write_world(tmp_path)
    program = _FULL.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(stub), capture_output=True, text=True, timeout=300
    )
    asked = sum(
        path.endswith("/chat/completions") and "Question:" in json.dumps(body) for path, body in stub.bodies
    )
    assert 1 <= asked <= 10, "ten threads ask at the same time; nobody asks after the first failure"
    assert f"{asked} answers could not be kept" in done.stdout, done.stdout + done.stderr
    assert "everything finished is kept" not in done.stdout


# --- windows that change -----------------------------------------------------------------------------------------------------


def test_a_remembered_window_is_asked_for_again_before_it_forbids_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(monkeypatch, listed_window=None, window=20) as stub:
        with pytest.raises(AI4RAGError, match=r"20 tokens, was found out by asking the service\."):
            make_experiment(tmp_path, max_evals=1)
        stub.settings.window = 512
        experiment = make_experiment(tmp_path, max_evals=1)
        assert experiment.prepared.models.embedding_models[0].context_length == 512
        experiment.close()


def test_a_listing_that_changed_replaces_the_window(tmp_path: Path, stub: OpenAIStub) -> None:
    def window() -> int:
        experiment = make_experiment(tmp_path, max_evals=1)
        found = experiment.prepared.models.embedding_models[0].context_length
        experiment.close()
        return found

    stub.settings.listed_window = 128
    assert window() == 128
    stub.settings.listed_window = 512
    assert window() == 512
    assert stub.bodies == []


def test_a_window_that_is_given_is_not_overruled_by_memory(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb.foundations.cache import Cache
    from ai4rag_nb.querying.models import embedding_model

    cache = Cache.open(tmp_path / "cache.sqlite")
    assert embedding_model("openai:stub-embedding", cache).context_length == 512
    assert embedding_model("openai:stub-embedding", cache, {"context_length": 300}).context_length == 300
    assert embedding_model("openai:stub-embedding", cache).context_length == 512
    cache.close()


def test_a_window_is_remembered_while_the_service_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ai4rag_nb.foundations.cache import Cache
    from ai4rag_nb.foundations.settings import Settings
    from ai4rag_nb.querying.models import embedding_model

    cache, quick = Cache.open(tmp_path / "cache.sqlite"), Settings(request_retries=0)
    with service(monkeypatch, listed_window=None, window=300) as stub:
        assert embedding_model("openai:stub-embedding", cache, settings=quick).context_length == 300
        paid = len(stub.bodies)
        assert embedding_model("openai:stub-embedding", cache, settings=quick).context_length == 300
        assert len(stub.bodies) == paid
    assert embedding_model("openai:stub-embedding", cache, settings=quick).context_length == 300
    cache.close()


# --- two spellings of one name -----------------------------------------------------------------------------------------------


def test_document_keys_match_however_their_accents_are_written(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import load_documents

    write_world(tmp_path)
    apart, composed = "u\u0308ber/fa\u0308hre.md", "\u00fcber/f\u00e4hre.md"
    target = tmp_path / "docs" / apart
    target.parent.mkdir()
    target.write_text(DOCUMENTS["ferry.md"])
    (tmp_path / "docs" / "ferry.md").unlink()
    records = [
        {**record, "correct_answer_document_keys": [composed]}
        if record["correct_answer_document_keys"] == ["ferry.md"]
        else record
        for record in benchmark_records()
    ]
    for key in (composed, unicodedata.normalize("NFD", composed)):
        other = [
            {
                **record,
                "correct_answer_document_keys": [
                    key if name == composed else name for name in record["correct_answer_document_keys"]
                ],
            }
            for record in records
        ]
        report = BenchmarkData.from_records(other).check(load_documents(tmp_path / "docs"))
        assert report.evidence_missing == [] and report.documents_asked == 6
    experiment = make_experiment(tmp_path, max_evals=1, records=records)
    experiment.search()
    (result,) = experiment.results.evaluations
    ferry = [entry for entry in result.results if "ferry" in entry["question"]]
    assert len(ferry) == 2
    assert all(any(hit["document_id"] == composed for hit in entry["hits"]) for entry in ferry)
    assert any(hit["evidence"] for entry in ferry for hit in entry["hits"])
    experiment.close()


def test_two_files_that_differ_in_spelling_only_are_an_error_that_says_so(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    write_world(tmp_path)
    for name in ("u\u0308.md", "\u00fc.md"):
        (tmp_path / "docs" / name).write_text(f"# Page\n\nThis is a page of {len(name)} characters.\n")
    if len(list((tmp_path / "docs").glob("*.md"))) < 7:
        pytest.skip("this file system knows only one spelling of a name")
    with pytest.raises(AI4RAGError, match="differ only in how their accents are written"):
        make_experiment(tmp_path)
    with pytest.raises(AI4RAGError, match="differ only in how their accents are written"):
        BenchmarkData.from_records(benchmark_records()).check({"u\u0308.md": "one", "\u00fc.md": "two"})


# --- odd records -------------------------------------------------------------------------------------------------------------


def odd_notes(changes: dict[int, dict[str, object]]) -> list[str]:
    records = [{**record, **changes.get(number, {})} for number, record in enumerate(benchmark_records())]
    return BenchmarkData.from_records(records).check(DOCUMENTS).notes


@pytest.mark.parametrize("spelled", [RECORDS[0][0].upper(), RECORDS[0][0].replace("?", " ?")])
def test_questions_that_differ_in_case_or_white_space_only_are_named(spelled: str) -> None:
    notes = odd_notes({2: {"question": spelled}})
    assert [note for note in notes if "case or white space" in note] == [
        "Questions differ only in case or white space, and each counts: q0 and q2."
    ]


def test_answers_of_a_question_that_is_marked_as_not_answerable_are_named() -> None:
    assert any(
        "these answers are not used: q1, q4." in note
        for note in odd_notes({1: {"answerable": False}, 4: {"answerable": False}})
    )
    assert not any("not used" in note or "case" in note for note in odd_notes({}))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_known_score_that_is_no_number_is_left_out_and_noted(
    tmp_path: Path, stub: OpenAIStub, score: float
) -> None:
    first = make_experiment(tmp_path, run="first")
    space = first.prepared.models.space
    configuration = space.labels(space[0])
    first.close()
    experiment = make_experiment(
        tmp_path, max_evals=1, known_observations=[{"config": configuration, "score": score}]
    )
    notes = [note for note in experiment.prepared.inputs.notes if "known observation" in note]
    assert notes == [f"A known observation is not used: its score is {score}."]
    experiment.close()

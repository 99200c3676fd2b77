"""Stages that cannot work are refused before anything is paid, and patterns whose stages failed do not win as if they had worked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    Recorder,
    call,
    make_experiment,
    paid,
    run_arguments,
    service,
    small_space,
    table_of,
    write_world,
)

from ai4rag_nb import AI4RAGExperiment, BenchmarkData, load_documents, open_run
from ai4rag_nb.foundations.errors import AI4RAGError, Failure, InputError, ModelSettingsError
from ai4rag_nb.foundations.events import BaseEventHandler, PhaseStarted, TrialFinished
from ai4rag_nb.foundations.settings import Settings
from ai4rag_nb.optimization.lost_trials import lost_to_service
from ai4rag_nb.optimization.rag_space import AI4RAGSearchSpace
from ai4rag_nb.optimization.run_store import EvaluationResult
from ai4rag_nb.optimization.space_stages import ask_stages, check_stages, made_stages
from ai4rag_nb.optimization.stage_failures import count_stages, stage_notes, stage_verdict

SECRET = "rerank-secret-1"
NOWHERE = "http://127.0.0.1:9/v1"  # the discard port: nobody listens
LINES = "number_of_chunks: [2]\nchunk_size: [64]\nsearch_mode: [vector]\n"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


@pytest.fixture
def reranking(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    """A rerank service of its own, so that it can go away while the models stay."""
    with OpenAIStub(api_key=SECRET) as running:
        monkeypatch.setenv("RERANK_BASE_URL", running.base_url)
        monkeypatch.setenv("RERANK_API_KEY", SECRET)
        yield running


def tiny_model(folder: Path, labels: dict[int, str]) -> str:
    """A model for pairs of texts with one tiny layer and random weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "lamp", "is", "red", "bell", "which"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    named = {"num_labels": 1} if len(labels) == 1 else {"num_labels": len(labels), "id2label": labels}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes, **named)
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def one(**values: Any) -> AI4RAGSearchSpace:
    """One pipeline, and what the test adds."""
    return small_space(**{"chunk_size": [64], "search_mode": ["vector"], "number_of_chunks": [2], **values})


# --- refused before anything is paid -----------------------------------------------------------------------------------------


def broken_folder(folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("stage", "environment", "said"),
    [
        ("reranker: [cross_encoder]\nrerank_model: ['/nope']", {}, "There is no folder '/nope'"),
        ("reranker: [none, cross_encoder]", {}, "needs a model"),
        ("reranker: [cross_encoder]\nrerank_model: [docs]", {}, "'docs' holds no cross-encoder"),
        ("reranker: [cross_encoder]\nrerank_model: [broken]", {}, "'broken' cannot be read"),
        ("reranker: [cross_encoder]\nrerank_model: [bench.json]", {}, "is a file, not a folder"),
        ("reranker: [cross_encoder]\nrerank_model: [an-owner/a-model]", {}, "hub cannot be reached"),
        ("verification: [none, entailment]", {}, "needs a model"),
        (
            "verification: [entailment]\nverification_model: [docs]",
            {},
            "holds no model of language inference",
        ),
        ("verification: [entailment]\nverification_model: ['../no model']", {}, "There is no folder"),
        ("reranker: [endpoint]", {"RERANK_BASE_URL": NOWHERE}, "RERANK_API_KEY is not set"),
        ("reranker: [endpoint]\nrerank_model: [x]", {"RERANK_API_KEY": SECRET}, "RERANK_BASE_URL is not set"),
        (
            "reranker: [endpoint]\nrerank_model: [x]",
            {"RERANK_API_KEY": SECRET, "RERANK_BASE_URL": "somewhere"},
            "RERANK_BASE_URL is no web address",
        ),
        (
            "reranker: [endpoint]",
            {"RERANK_API_KEY": SECRET, "RERANK_BASE_URL": NOWHERE},
            "The reranker 'endpoint' needs a model",
        ),
        (
            "reranker: [none, endpoint]\nrerank_model: [x]",
            {"RERANK_API_KEY": SECRET, "RERANK_BASE_URL": NOWHERE},
            "The reranker 'endpoint' with 'x' cannot work: Reranking failed",
        ),
    ],
)
def test_the_command_line_refuses_what_cannot_work_and_pays_nothing(
    tmp_path: Path,
    stub: OpenAIStub,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    environment: dict[str, str],
    said: str,
) -> None:
    for name in ("RERANK_BASE_URL", "RERANK_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    write_world(tmp_path)
    broken_folder(tmp_path)
    (tmp_path / "space.yaml").write_text(f"{stage}\n{LINES}")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = call(
        *run_arguments(tmp_path, "--max-evals", "1"), stub=stub, folder=tmp_path, **offline, **environment
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert paid(stub) == 0 and SECRET not in done.stderr + done.stdout
    ours = ("Reading documents", "Search:", "Error:", "6 documents")
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert [line for line in lines[:-1] if not line.startswith(ours) and " in the space" not in line] == []


def test_a_name_that_is_nowhere_is_asked_for_once_and_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hub is a service that answers 404, and 503 after that."""
    import huggingface_hub.constants

    with OpenAIStub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.base_url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        space = AI4RAGSearchSpace(reranker=["cross_encoder"], rerank_model=["an-owner/a-model-of-nobody"])
        hub.settings.status = 503
        with pytest.raises(ModelSettingsError, match="hub cannot be reached"):
            check_stages(space)
        assert hub.counts.requests <= 2
    said = capfd.readouterr()
    assert said.out + said.err == ""


def test_a_model_for_something_else_is_refused(tmp_path: Path, stub: OpenAIStub) -> None:
    two = tiny_model(tmp_path / "two", {0: "no", 1: "yes"})
    with pytest.raises(ModelSettingsError, match="gives 2 numbers for a pair"):
        make_experiment(tmp_path, one(reranker=["cross_encoder"], rerank_model=[two]))
    with pytest.raises(ModelSettingsError, match="has no output 'entailment' but no, yes"):
        make_experiment(tmp_path, one(verification=["entailment"], verification_model=[two]))
    (Path(two) / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelSettingsError, match="cannot be read"):
        make_experiment(tmp_path, one(reranker=["cross_encoder"], rerank_model=[two]))
    assert paid(stub) == 0


def test_a_folder_that_goes_away_before_the_search_costs_nothing(tmp_path: Path, stub: OpenAIStub) -> None:
    model = tiny_model(tmp_path / "model", {0: "score"})
    experiment = make_experiment(tmp_path, one(reranker=["cross_encoder"], rerank_model=[model]))
    before = paid(stub)
    shutil.rmtree(model)
    with pytest.raises(ModelSettingsError, match="There is no folder"):
        experiment.search()
    assert paid(stub) == before
    experiment.close()


def test_stage_and_model_that_never_meet_are_nobodys_concern(tmp_path: Path, reranking: OpenAIStub) -> None:
    model = tiny_model(tmp_path / "model", {0: "score"})

    def fitting(reranker: str, rerank_model: str) -> bool:
        return (reranker == "cross_encoder") == (rerank_model == model)

    values = {
        "reranker": ["cross_encoder", "endpoint"],
        "rerank_model": [model, "stub-rerank", "other/model"],
    }
    space = AI4RAGSearchSpace(**values, rules=[fitting])
    check_stages(space)
    with pytest.raises(ModelSettingsError, match="endpoint' with 'other/model' cannot work"):
        ask_stages(space)
    assert [wanted.settings["rerank_model"] for wanted, _ in made_stages(space)].count("stub-rerank") == 2
    reranking.settings.rerank_models = ("stub-rerank", "other/model")
    ask_stages(space)
    wrong = AI4RAGSearchSpace(reranker=["cross_encoder"], rerank_model=[model, "./nowhere"])
    with pytest.raises(InputError, match=r"There is no folder '\./nowhere'"):
        made_stages(wrong)


@pytest.mark.parametrize(
    "behaviour", [{"status": 401}, {"html": True}, {"rerank_models": ("other",)}, {"broken": "missing"}]
)
def test_a_dead_rerank_service_is_found_before_anything_is_paid(
    tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub, behaviour: dict[str, Any]
) -> None:
    for name, value in behaviour.items():
        setattr(reranking.settings, name, value)
    experiment = make_experiment(tmp_path, one(reranker=["endpoint"], rerank_model=["stub-rerank"]))
    with pytest.raises(ModelSettingsError, match="The reranker 'endpoint' with 'stub-rerank'") as caught:
        experiment.search()
    wanted = Failure.UNUSABLE if "broken" in behaviour else Failure.SERVICE
    assert caught.value.failure is wanted and SECRET not in str(caught.value)
    assert paid(stub) == 0 and paid(reranking) <= 1
    experiment.close()


# --- stages that work --------------------------------------------------------------------------------------------------------


def test_stages_that_work_leave_no_note(tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub) -> None:
    model = tiny_model(tmp_path / "model", {0: "score"})
    judge = tiny_model(tmp_path / "judge", {0: "contradiction", 1: "entailment", 2: "neutral"})

    def fitting(reranker: str, rerank_model: str) -> bool:
        return (reranker == "cross_encoder") == (rerank_model == model)

    space = one(
        reranker=["cross_encoder", "endpoint"],
        rerank_model=[model, "stub-rerank"],
        verification=["entailment"],
        verification_model=[judge],
        rules=[fitting],
    )
    experiment = make_experiment(tmp_path, space)
    experiment.search()
    results = experiment.results
    assert [trial.state for trial in results.evaluations] == ["completed"] * 2
    assert not any("the reranker" in note or "the verification" in note for note in results.notes)
    assert reranking.counts.reranks == 12 + 1, "one for each question, and one to see whether it is there"
    experiment.close()


# --- services that go away ---------------------------------------------------------------------------------------------------


class Asking(BaseEventHandler):
    """Change a service while one pattern is asked, or from then on."""

    def __init__(self, stub: OpenAIStub, name: str, back: bool, **settings: Any) -> None:
        self.stub, self.name, self.back, self.settings = stub, name, back, settings
        self.before = {key: getattr(stub.settings, key) for key in settings}

    def on_event(self, event: Any) -> None:
        if isinstance(event, PhaseStarted) and event.label == f"{self.name}: asking":
            self.change(self.settings)
        if isinstance(event, PhaseStarted) and event.label == f"{self.name}: scoring" and self.back:
            self.change(self.before)

    def change(self, settings: dict[str, Any]) -> None:
        for key, value in settings.items():
            setattr(self.stub.settings, key, value)


RERANKED = {"reranker": ["endpoint"], "rerank_model": ["stub-rerank"], "chunk_size": [48, 64, 128]}


@pytest.mark.parametrize("bad", [{"status": 401}, {"html": True}, {"rerank_models": ("another",)}])
def test_a_rerank_service_that_dies_ends_the_run_and_the_same_again_repairs_it(
    tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub, bad: dict[str, Any]
) -> None:
    straight = make_experiment(tmp_path, one(**RERANKED), run="straight", workspace="elsewhere")
    straight.search()
    dying = Asking(reranking, "Pattern2", back=False, **bad)
    experiment = make_experiment(tmp_path, one(**RERANKED), event_handler=dying)
    with pytest.raises(AI4RAGError, match="'stub-rerank' does not answer any more") as caught:
        experiment.search()
    assert not isinstance(caught.value, InputError) and caught.value.failure is Failure.SERVICE
    assert "same again" in str(caught.value)
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"]
    experiment.handlers.clear()
    dying.change(dying.before)
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    straight.close()
    experiment.close()


def test_a_short_outage_cannot_win_and_is_tried_again(
    tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub
) -> None:
    seen = Recorder()
    outage = Asking(reranking, "Pattern2", back=True, status=401)
    experiment = make_experiment(tmp_path, one(**RERANKED), event_handler=[outage, seen])
    experiment.search()
    spoiled = experiment.results.evaluations[1]
    assert (spoiled.state, spoiled.failure) == ("incomplete", "service") and lost_to_service(spoiled)
    assert spoiled.reason.startswith(
        "The reranker 'endpoint' failed for 12 of 12 questions: Reranking failed."
    )
    notes = experiment.results.notes
    assert any(note.startswith("Pattern2: the reranker 'endpoint' failed for 12 of 12") for note in notes)
    assert any("Pattern2 lost questions to a failing service" in note for note in notes)
    warnings = [message for level, message, _ in seen.statuses if level == "warning"]
    assert any(message.startswith("Pattern2: the reranker 'endpoint' failed") for message in warnings)
    finished = {event.name: event.state for event in seen.of(TrialFinished)}
    assert finished == {"Pattern1": "completed", "Pattern2": "incomplete", "Pattern3": "completed"}
    assert experiment.results.get_best_evaluations(1)[0].name != "Pattern2"
    experiment.handlers.clear()
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 3
    assert not any("the reranker" in note for note in experiment.results.notes)
    experiment.close()


def test_a_part_of_the_questions_without_the_service_cannot_win_either(
    tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub
) -> None:
    """The two questions that begin with "how many" are refused as if the key were wrong."""
    experiment = make_experiment(
        tmp_path,
        one(**{**RERANKED, "chunk_size": [64]}),
    )
    real = reranking.reply

    def reply(path: str, body: Any, authorization: str) -> Any:
        bad = isinstance(body, dict) and "how many" in str(body.get("query")).lower()
        return real(path, body, "Bearer wrong" if bad else authorization)

    reranking.reply = reply  # type: ignore[method-assign]
    with pytest.raises(AI4RAGError, match="failed for 2 of 12 questions"):
        experiment.search()
    (trial,) = experiment.results.evaluations
    assert (trial.state, trial.failure) == ("incomplete", "service")
    experiment.close()


# --- stages that fail by themselves ------------------------------------------------------------------------------------------


def misjudging(times: int) -> Callable[[dict[str, Any]], str | None]:
    """Give no verdict so many times, and verdicts after that."""
    left = [times]

    def planned(body: dict[str, Any]) -> str | None:
        if not str(body["messages"][0]["content"]).startswith("Below are numbered passages and numbered"):
            return None
        left[0] -= 1
        return "That is hard to say." if left[0] >= 0 else "1: 1\n2: 1\n3: 1"

    return planned


@pytest.mark.parametrize(
    ("times", "state", "noted"),
    [(0, "completed", False), (1, "completed", True), (2, "degraded", True), (11, "degraded", True)],
)
def test_a_stage_that_fails_for_some_questions_is_told(
    tmp_path: Path, stub: OpenAIStub, times: int, state: str, noted: bool
) -> None:
    stub.settings.planned = misjudging(times)
    seen = Recorder()
    experiment = make_experiment(tmp_path, one(verification=["judge"]), event_handler=seen)
    experiment.search()
    (trial,) = experiment.results.evaluations
    said = f"Pattern1: the verification 'judge' failed for {times} of 12 questions: The judge gave no verdict"
    assert (trial.state, trial.payload["state"]) == (state, state)
    assert [note.startswith(said) for note in experiment.results.notes].count(True) == noted
    assert [message.startswith(said) for _, message, _ in seen.statuses].count(True) == noted
    assert experiment.results.get_best_evaluations(1)[0].name == "Pattern1"
    assert ("state" in experiment.results.leaderboard().columns) == (state == "degraded")
    assert bool(trial.reason) == (state == "degraded")
    experiment.close()
    again = open_run(tmp_path / "run")
    assert again.notes == experiment.results.notes and (said in again.summary()) == noted


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"verification": ["none", "judge"]}, "the verification 'judge' failed for 12 of 12 questions"),
        ({"reranker": ["none", "listwise"]}, "the reranker 'listwise' failed for 12 of 12 questions"),
    ],
)
def test_a_stage_that_never_worked_cannot_win(
    tmp_path: Path, stub: OpenAIStub, values: dict[str, Any], said: str
) -> None:
    from ai4rag_nb.querying.listwise import ranking_messages

    opening = ranking_messages("?", ["a", "b"])[0]["content"]
    judge = misjudging(100)
    stub.settings.planned = lambda body: (
        "No idea." if body["messages"][0]["content"] == opening else judge(body)
    )
    experiment = make_experiment(tmp_path, one(**values))
    experiment.search()
    name, on = next((name, allowed[1]) for name, allowed in values.items())
    with_stage, without = sorted(
        experiment.results.evaluations, key=lambda trial: trial.configuration[name] != on
    )
    assert (with_stage.state, without.state) == ("incomplete", "completed")
    assert said in with_stage.reason[:1].lower() + with_stage.reason[1:] and with_stage.failure != "service"
    assert experiment.results.get_best_evaluations(5) == [without]
    assert any(note.startswith(f"{with_stage.name}: {said}") for note in experiment.results.notes)
    table = experiment.results.leaderboard()
    assert list(table["state"]) == ["completed", "incomplete"] and table["rank"].isna().tolist() == [
        False,
        True,
    ]
    experiment.close()


def test_the_command_line_recommends_nothing_that_never_worked(tmp_path: Path, stub: OpenAIStub) -> None:
    """One of the answers may be a refusal, which no judge is asked about."""
    stub.settings.planned = misjudging(100)
    write_world(tmp_path)
    lines = f"{LINES}retrieval_method: [simple]\nchunking_method: [recursive]\nchunk_overlap: [0]\n"
    (tmp_path / "space.yaml").write_text(f"verification: [judge]\n{lines}")
    alone = call(*run_arguments(tmp_path, "--max-evals", "1"), stub=stub, folder=tmp_path)
    assert alone.returncode == 1 and "Best:" not in alone.stdout
    assert re.search("The verification 'judge' failed for 1[12] of 12 questions", alone.stderr)
    (tmp_path / "space.yaml").write_text(f"verification: [none, judge]\n{lines}")
    arguments = run_arguments(tmp_path, "--max-evals", "2", "--out", str(tmp_path / "both"))
    both = call(*arguments, stub=stub, folder=tmp_path)
    assert both.returncode == 0 and "verification none" in both.stdout.partition("Best: ")[2].splitlines()[0]
    said = re.compile("the verification 'judge' failed for 1[12] of 12 questions")
    assert "incomplete" in both.stdout and said.search(both.stdout) and said.search(both.stderr)
    report = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert re.search("failed for 1[12] of 12 questions", report)


def test_a_stage_that_never_did_anything_is_told(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, one(score_threshold=[0.000001], number_of_chunks=[1]))
    experiment.search()
    (trial,) = experiment.results.evaluations
    assert trial.state == "completed"
    said = "Pattern1: the stage 'threshold' did nothing for any of 12 questions."
    assert said in experiment.results.notes
    experiment.close()


# --- the held-out part -------------------------------------------------------------------------------------------------------


def test_the_report_says_when_the_winner_lost_its_stage(
    tmp_path: Path, stub: OpenAIStub, reranking: OpenAIStub
) -> None:
    colours = ["red", "blue", "green", "white", "black", "brown", "grey", "pink", "orange", "violet"]
    records = []
    for number, colour in enumerate(colours):
        text = (
            f"# Lamp {number}\n\nLamp {number} is {colour}. Lamp {number} weighs {number + 11} kilograms.\n"
        )
        path = tmp_path / "docs" / f"lamp{number}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for question, answer in ((f"Which colour has lamp {number}?", colour), ("", "")):
            question = question or f"How many kilograms does lamp {number} weigh?"
            answer = answer or str(number + 11)
            key = {"correct_answer_document_keys": [path.name]}
            records.append({"question": question, "correct_answers": [answer], **key})

    class Late(Recorder):
        def on_status_change(self, level: Any, message: str, step: Any) -> None:
            super().on_status_change(level, message, step)
            if "questions that the search never saw" in message:
                reranking.settings.status = 401

    experiment = AI4RAGExperiment(
        load_documents(tmp_path / "docs"),
        BenchmarkData.from_records(records),
        one(**{**RERANKED, "chunk_size": [64]}),
        {"max_evals": 1},
        event_handler=Late(),
        output_path=tmp_path / "run",
        workspace=tmp_path / "workspace",
        settings=Settings(request_retries=0),
    )
    experiment.show_progress = False
    experiment.search()
    results = experiment.results
    assert results.held_out == {} and results.evaluations[0].state == "completed"
    said = "The questions that were held out could not be asked: The reranker 'endpoint' failed for"
    assert any(note.startswith(said) for note in results.notes)
    reranking.settings.status = None
    experiment.handlers.clear()
    experiment.search()
    assert experiment.results.held_out["questions"] > 0
    assert not any(note.startswith(said) for note in experiment.results.notes)
    experiment.close()


# --- counting, by hand -------------------------------------------------------------------------------------------------------


def record(stage: str, failure: str | None = None, fired: bool = True) -> dict[str, Any]:
    error = f"{failure}!" if failure else None
    return {"stage": stage, "fired": fired and not failure, "failure": failure, "error": error}


def test_several_records_of_one_question_count_once() -> None:
    """An agent that searches twice: the reranker failed in one search of the first question, in both of the second."""
    rows = [
        {"trace": [record("maxsim"), record("tool"), record("maxsim", "item")]},
        {"trace": [record("maxsim", "service"), record("maxsim", "item")]},
        {"trace": [record("search"), record("maxsim"), record("agent")]},
        {"trace": []},
    ]
    counts = {count.stage: count for count in count_stages(rows)}
    assert set(counts) == {"maxsim", "tool"}
    found = counts["maxsim"]
    assert (found.questions, found.failed, found.worked, found.lost, found.failure) == (4, 2, 1, 1, "service")
    assert stage_verdict(rows, {"reranker": "maxsim"}).state == "incomplete", (
        "a service took one of four away"
    )
    assert counts["tool"].failed == 0 and not counts["tool"].spoiled


def test_traces_of_older_runs_say_nothing_and_names_are_listed_once() -> None:
    old = [{"trace": [{"stage": "maxsim", "fired": False, "error": "why"}]}, {"trace": []}, {}]
    assert stage_verdict(old, {}).state == "completed"
    rows = [{"trace": [record("parent", "fault")]}] * 3
    trials = [
        EvaluationResult(n, f"k{n}", {"retrieval_method": "parent"}, "incomplete", 0.5, results=rows)
        for n in range(7)
    ]
    assert stage_notes(trials) == [
        "Pattern1, Pattern2, Pattern3, Pattern4, Pattern5, Pattern6 and 1 more: the retrieval method 'parent' "
        "failed for 3 of 3 questions: fault!"
    ]
    assert stage_notes([]) == []

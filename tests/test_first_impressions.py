"""What people met who tried the toolkit for the first time."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    KEY,
    QUICK,
    Recorder,
    benchmark_records,
    make_experiment,
    run_arguments,
    service,
    small_space,
)

import ai4rag_nb
from ai4rag_nb.querying.generation import AnswerSource
from ai4rag_nb.querying.answer import Answer, answer_sources
from ai4rag_nb.foundations.chunks import RetrievedChunk
from ai4rag_nb import AI4RAGExperiment, AI4RAGSearchSpace, BenchmarkData, InputError, open_run
from ai4rag_nb.dashboard.ranking import leader
from ai4rag_nb.dashboard.report import write_report
from ai4rag_nb.foundations.errors import ModelSettingsError, RunFolderError
from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, put_trial
from ai4rag_nb.serving.commands import main
from ai4rag_nb.serving.run_report import run_state, write_run_report


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    with service(monkeypatch) as running:
        yield running


# --- exact ties ----------------------------------------------------------------------------------------------------------


def stored_trial(number: int, mean: float, characters: int) -> EvaluationResult:
    """One configuration on two questions, with contexts of so many characters."""
    scores = {"mean": mean, "ci_low": mean, "ci_high": mean, "n": 2}
    metric = {"name": "overall_score", "evaluator": "custom", "description": "", "scores": scores}
    payload = {
        "name": f"Pattern{number + 1}",
        "iteration": number,
        "max_combinations": 4,
        "duration_seconds": 1.0,
        "evaluation": {"metrics": [{**metric, "optimization_metric": True}]},
        "settings": {"chunking": {"chunk_size": 64 * 2**number}},
    }
    rows = [
        {
            "question_id": f"q{place}",
            "question": "Why?",
            "correct_answers": ["Because."],
            "answer": "Because.",
            "answer_contexts": ["x" * characters],
            "metrics": [{"name": "overall_score", "evaluator": "custom", "score": mean}],
            "hits": [{"document_id": "a.md", "sequence_number": 1, "text": "x" * characters}],
        }
        for place in range(2)
    ]
    configuration = {"chunk_size": 64 * 2**number}
    return EvaluationResult(number, f"key{number}", configuration, "completed", mean, payload, rows, "", 1.0)


@pytest.fixture
def tied_run(tmp_path: Path) -> Path:
    """A run in which three of four configurations tie, and the last of them has the shortest context."""
    store = RunStore(tmp_path / "run")
    facts = {"objective": "custom:overall_score", "questions": 2, "max_evals": 4, "combinations": 4}
    store.put_facts(
        {**facts, "state": "completed", "created": 1.0, "notes": ["No questions are held out: few."]}
    )
    for number, (mean, size) in enumerate([(0.5, 4000), (0.4, 40), (0.1 + 0.4, 2400), (0.5, 1200)]):
        put_trial(store, stored_trial(number, mean, size))
    store.close()
    return tmp_path / "run"


def test_the_shortest_context_leads_among_exact_equals(tied_run: Path, capsys: pytest.CaptureFixture) -> None:
    results = open_run(tied_run)
    order = ["Pattern4", "Pattern3", "Pattern1", "Pattern2"]
    assert list(results.leaderboard()["pattern"]) == order
    assert list(results.leaderboard()["context_tokens"]) == [300, 600, 1000, 10]
    assert results.get_best_evaluations()[0].name == "Pattern4"
    state = run_state(tied_run)
    assert state.best_pattern == leader(state).name == "Pattern4"
    assert "The best configuration is Pattern4" in write_run_report(tied_run).read_text()
    assert main(["leaderboard", str(tied_run)]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^ *\d +(Pattern\d)", printed, flags=re.M) == order
    assert "Best: Pattern4" in printed
    told = (
        "Exactly the same score as Pattern4: Pattern3, Pattern1. Pattern4 leads because its context is short"
    )
    assert (
        told in printed
        and f"{told}: about 300 tokens a question, theirs about 600 to 1,000." in results.notes
    )


def test_a_better_score_still_wins_over_a_shorter_context(tied_run: Path) -> None:
    store = RunStore(tied_run)
    put_trial(store, stored_trial(1, 0.6, 9000))
    store.close()
    assert open_run(tied_run).leaderboard()["pattern"][0] == "Pattern2"


# --- notes ---------------------------------------------------------------------------------------------------------------


def test_a_report_says_each_thing_once(tied_run: Path) -> None:
    page = re.sub(r"<style>.*?</style>|<[^>]+>", " ", write_run_report(tied_run).read_text(), flags=re.S)
    few = re.findall(r"[Ff]ewer than 30|Only 2 questions", page)
    assert len(few) == 1
    assert len(re.findall(r"No questions (?:were|are) held out", page)) == 1


def test_a_report_without_notes_still_says_both_once(tied_run: Path, tmp_path: Path) -> None:
    page = write_report(tmp_path / "own.html", run_state(tied_run)).read_text()
    assert page.count("Fewer than 30 questions (2)") == 1 and page.count("No questions were held out") == 1


def test_held_out_questions_that_were_not_asked_yet_are_not_denied(tied_run: Path, tmp_path: Path) -> None:
    note = "40 questions choose, 20 questions are held out for the report."
    page = write_report(tmp_path / "own.html", run_state(tied_run), notes=[note]).read_text()
    assert "No questions were held out" not in page


def test_notes_are_no_warnings(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    records = benchmark_records()
    records[0]["evidence"] = ["This stands in no document."]
    experiment = make_experiment(
        tmp_path, small_space(ranker_k=[60]), max_evals=1, event_handler=recorder, records=records
    )
    experiment.search()
    experiment.close()
    levels = {message: level for level, message, _ in recorder.statuses}
    (held_out,) = [message for message in levels if "held out" in message]
    (missing,) = [message for message in levels if "stand in none of their documents" in message]
    assert (levels[held_out], levels[missing]) == ("info", "warning")


def test_what_the_terminal_calls_a_warning_needs_action(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture
) -> None:
    assert main(run_arguments(tmp_path, "--max-evals", "1")) == 0
    output = capsys.readouterr()
    assert "warning" not in output.err
    assert output.out.count("No questions are held out") == 1


# --- checked before documents are opened -----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documents that the command line has opened."""
    import ai4rag_nb.serving.running as running

    seen: list[str] = []
    monkeypatch.setattr(running, "load_documents", lambda folder, **options: seen.append(folder))
    return seen


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--metric", "faithfullness"), "Did you mean 'faithfulness'"),
        (("--metric", "answer_words"), "cannot be maximised"),
        (("--metrics", "faithfullness"), "Did you mean 'faithfulness'"),
        (("--metrics", "document_recal@5"), "Did you mean 'document_recall@5'"),
        (("--metrics", "judge:faithfulness"), "LLMaJEvaluator"),
        (("--metrics", "money"), "Give --prices FILE"),
        (("--prices", "no/such/file.json"), "no/such/file.json"),
        (("--optimizer", "gamm"), "gam"),
        (("--optimizer", "bayess"), "bayes"),
        (("--embedding-model", "local:no-such-model"), "local:static"),
        (("--embedding-model", "nonsense"), "names no model"),
        (("--foundation-model", "local:extractiv"), "Did you mean 'local:extractive'?"),
        (("--foundation-model", "local:gguf:no/such/file.gguf"), "no/such/file.gguf"),
        (("--vector-store", "pgvector"), "PGVECTOR_HOST is not set"),
        (("--max-evals", "0"), "max_evals"),
        (("--benchmark", "no/such/file.json"), "no/such/file.json"),
        (("--space", "no/such/file.yaml"), "no/such/file.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_slip_is_refused_before_documents_are_opened(
    tmp_path: Path,
    stub: OpenAIStub,
    opened: list[str],
    capsys: pytest.CaptureFixture,
    wrong: tuple[str, str],
    said: str,
) -> None:
    status = main(run_arguments(tmp_path, *wrong))
    assert (status, opened) == (2, [])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not stub.bodies


class Untouched(list):
    """Documents that notice when somebody looks at them."""

    looks = 0

    def __iter__(self) -> Any:
        type(self).looks += 1
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        type(self).looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimization_metric": "faithfullness"}, "Did you mean 'faithfulness'"),
        ({"metrics": ["token_f2"]}, "token_f1"),
        ({"optimizer": "gamm"}, "gam"),
        ({"optimizer_settings": {"max_eval": 3}}, "max_evals"),
        ({"search_space": {"embedding_model": ["local:no-such-model"]}}, "local:all-MiniLM-L6-v2"),
        ({"search_space": {"foundation_model": ["openai"]}}, "names no model"),
        ({"inference_max_threads": 0}, "inference_max_threads"),
        ({"vector_store_config": "milvus"}, "MilvusLiteConfig"),
    ],
    ids=str,
)
def test_python_refuses_before_documents_are_looked_at(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    Untouched.looks = 0
    given = dict(options)
    lists = {"chunk_size": [64], **given.pop("search_space", {})}
    benchmark = BenchmarkData.from_records(benchmark_records())
    with pytest.raises(InputError, match=re.escape(said)):
        space = AI4RAGSearchSpace(**lists)
        AI4RAGExperiment(
            Untouched([object()]), benchmark, space, workspace=tmp_path / "workspace", settings=QUICK, **given
        )
    assert Untouched.looks == 0 and not (tmp_path / "workspace").exists()


def test_an_unknown_local_model_is_told_which_there_are() -> None:
    from ai4rag_nb.querying.model_checks import check_embedding_spec
    from ai4rag_nb.querying.models import embedding_model

    for ask in (check_embedding_spec, embedding_model):
        for name in ("bge-m3", "all-MiniLM-L6", "statik"):
            with pytest.raises(ModelSettingsError) as caught:
                ask(f"local:{name}")
            assert all(
                text in str(caught.value) for text in ("'local:static'", "'local:all-MiniLM-L6-v2'", "folder")
            )


# --- the leaderboard -------------------------------------------------------------------------------------------------------


def test_the_leaderboard_is_short_and_everything_can_be_had(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path)
    experiment.search()
    short, everything = experiment.results.leaderboard(), experiment.results.leaderboard(columns="all")
    experiment.close()
    named = ["rank", "pattern", "overall_score", "overall_score_ci_low", "overall_score_ci_high", "n"]
    others = ["faithfulness", "answer_correctness", "token_f1", "context_correctness"]
    varied = [name for name in ("chunk_size", "search_mode", "number_of_chunks") if name in short.columns]
    assert sorted(short.columns) == sorted([*named, *others, *varied, *(
        name for name in ("ranker_strategy", "ranker_k") if name in short.columns
    ), "context_tokens", "seconds"])  # fmt: skip
    assert list(short.columns[:10]) == [*named, *others] and list(short.columns[-2:]) == [
        "context_tokens",
        "seconds",
    ]
    assert {"token_f1", "faithfulness_ci_low", "embedding_model", "state", "duration_seconds"} <= set(
        everything
    )
    assert all(abs(short["overall_score"] - everything["overall_score"]) <= 0.0005)
    with pytest.raises(InputError, match="short"):
        experiment.results.leaderboard(columns="some")


def test_the_command_line_shows_the_same_columns(tied_run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["leaderboard", str(tied_run)]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert re.split(r" {2,}", heading.strip()) == [
        *("rank", "pattern", "overall_score", "95 % interval", "n", "chunk_size", "context tokens", "seconds")
    ]
    assert main(["leaderboard", str(tied_run), "--columns", "all"]) == 0
    assert "overall_score_ci_low" in capsys.readouterr().out.splitlines()[0]


# --- another experiment's folder --------------------------------------------------------------------------------------------


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(RunFolderError) as caught:
        make_experiment(folder, **options)
    return caught.value.message


def test_a_refused_folder_says_what_differs(tmp_path: Path, stub: OpenAIStub) -> None:
    first = make_experiment(tmp_path, max_evals=1)
    first.search()
    first.close()
    said = refusal(tmp_path, space=small_space(chunk_size=[64, 96], number_of_chunks=[1]))
    assert "The search space differs: " in said
    assert "chunk_size 64, 128 -> 64, 96" in said and "number_of_chunks 1, 2 -> 1" in said
    assert refusal(tmp_path, optimizer_settings={"max_evals": 1, "random_state": 7}).endswith(
        "The optimizer differs: random_state 64 -> 7."
    )
    assert "optimizer gam -> random" in refusal(tmp_path, optimizer="random")
    assert refusal(tmp_path, optimization_metric="faithfulness").endswith(
        "The metrics differ: optimization metric overall_score -> faithfulness."
    )
    records = benchmark_records()
    records[3]["correct_answers"] = ["two crowns"]
    assert "removed" in refusal(tmp_path, records=records[1:])
    said = refusal(tmp_path, records=records)
    assert re.search(
        r"The questions differ: '[^']*What does a bicycle cost on the ferry\?' changed\.$", said
    ), said
    (tmp_path / "docs" / "bakery.md").write_text("# The bakery\n\nRye bread is baked on Tuesdays only. "
                                                 "The sourdough starter is called Gertrude.")  # fmt: skip
    (tmp_path / "docs" / "new.md").write_text("# New\n\nA new page.")
    said = refusal(tmp_path)
    assert said.endswith("The documents differ: 'bakery.md' changed; 'new.md' added.")
    assert KEY not in said


# --- progress of a library --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_making_the_static_model_shows_a_bar_with_a_label_or_none(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], shown: bool
) -> None:
    from tqdm import tqdm

    from ai4rag_nb.indexing.static_embedding import own_bar

    library = types.SimpleNamespace(tqdm=tqdm)
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with own_bar(library):
        bar = library.tqdm(total=3, desc="Encoding tokens", unit=" tokens")
        bar.update(3)
        bar.close()
    assert library.tqdm is tqdm
    assert ("Making local:static, once" in written.getvalue()) is shown
    assert "Encoding tokens" not in written.getvalue() and bool(written.getvalue()) is shown


# --- answers ----------------------------------------------------------------------------------------------------------------


def test_a_copied_answer_names_its_passage(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture
) -> None:
    experiment = make_experiment(tmp_path, small_space(foundation_model=["local:extractive"]), max_evals=1)
    experiment.search()
    best = experiment.results.best_pattern()
    question = "How many steps may visitors climb?"
    answer = best.generate(question)
    (source,) = answer["answer_sources"]
    passage = answer["reference_documents"][source["passage"] - 1]
    assert source["document_id"] == passage.document_id == "lighthouse.md"
    assert passage.text[source["start"] : source["end"]] == source["text"] == answer["answer"]
    assert {"answer", "reference_documents", "question", "timings", "tokens"} <= answer.keys()
    shown = repr(answer)
    assert f"Copied from [{source['passage']}] lighthouse.md" in shown and len(shown) < 600
    assert "lighthouse.md, characters" in answer._repr_html_()
    chatted = best.chat([{"role": "user", "content": question}])
    assert repr(chatted).splitlines()[0] == answer["answer"] and chatted["answer_sources"]
    best.close()
    experiment.close()
    capsys.readouterr()
    assert main(["ask", str(tmp_path / "run"), question]) == 0
    printed = capsys.readouterr().out
    assert f"Copied from [{source['passage']}] lighthouse.md." in printed and "[1] " in printed
    assert main(["ask", str(tmp_path / "run"), question, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer_sources"][0]["document_id"] == "lighthouse.md"


def test_a_written_answer_claims_no_passage(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture
) -> None:
    experiment = make_experiment(tmp_path, max_evals=1)
    experiment.search()
    with experiment.results.best_pattern() as best:
        answer = best.generate("When was the lighthouse built?")
    experiment.close()
    assert answer["answer_sources"] == [] and "Copied" not in repr(answer)
    capsys.readouterr()
    assert main(["ask", str(tmp_path / "run"), "When was the lighthouse built?"]) == 0
    printed = capsys.readouterr().out
    assert "Copied" not in printed and "Found by Pattern1:\n[1] " in printed


# --- a handle ---------------------------------------------------------------------------------------------------------------


def test_a_handle_says_how_far_it_is(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=2)
    handle = experiment.start()
    handle.wait()
    best = experiment.results.get_best_evaluations()[0]
    expected = f"RunHandle: completed, 2 of 2 configurations, best {best.name} with {best.score:.3f}"
    assert repr(handle) == expected and KEY not in repr(handle)
    experiment.close()
    further = make_experiment(tmp_path, max_evals=3)
    handle = further.start()
    handle.wait()
    best = further.results.get_best_evaluations()[0]
    assert repr(handle).endswith(f"3 of 3 configurations, best {best.name} with {best.score:.3f}")
    further.close()


# --- names of arguments ------------------------------------------------------------------------------------------------------


def test_a_model_as_an_argument_is_sent_to_the_space() -> None:
    for name in ("foundation_model", "embedding_model"):
        with pytest.raises(InputError, match=rf"AI4RAGSearchSpace\({name}=\['"):
            AI4RAGExperiment([], None, **{name: "openai:some"})  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"AI4RAGExperiment has no argument 'optimiser'. Did you mean 'optimizer'"
    ):
        AI4RAGExperiment([], None, optimiser="gam")  # type: ignore[arg-type,call-arg]
    with pytest.raises(InputError, match="AI4RAGExperiment needs 'benchmark_data'"):
        AI4RAGExperiment([])  # type: ignore[call-arg]
    with pytest.raises(InputError, match="Did you mean 'chunk_size'"):
        AI4RAGSearchSpace(chunk_sise=[64])  # type: ignore[call-arg]


def facade_classes() -> list[type]:
    """The classes of the top level that people make themselves."""
    found = [getattr(ai4rag_nb, name) for name in ai4rag_nb.__all__]
    made = [kind for kind in found if isinstance(kind, type) and not issubclass(kind, Exception)]
    left_out = (
        "BaseEventHandler",
        "BaseRAGTemplate",
        "ContentType",
        "ExperimentStep",
        "LogLevel",
        *ai4rag_nb._MADE_IN_BULK,
    )
    return [kind for kind in made if not inspect.isabstract(kind) and kind.__name__ not in left_out]


@pytest.mark.parametrize("kind", facade_classes(), ids=lambda kind: kind.__name__)
def test_every_class_of_the_top_level_refuses_unknown_names_in_words(kind: type) -> None:
    with pytest.raises(InputError, match="no_such_argument"):
        kind(no_such_argument=1)


def test_a_table_row_is_shown_with_the_names_of_its_columns() -> None:
    table = "| Flour | Type | Ash |\n|---|---|---|\n| 550 | T55 | 0.5 % |\n| 812 | T80 | 0.8 % |"
    start = table.index("812")
    chunk = RetrievedChunk(table, {"document_id": "flour.md", "sequence_number": 1})
    sources = answer_sources([AnswerSource(0, start, start + len("812 | T80 | 0.8 %"))], [chunk])
    answer = Answer(
        {"answer": "812 | T80 | 0.8 %", "answer_sources": sources, "reference_documents": [chunk]}
    )
    assert repr(answer).startswith("Flour | Type | Ash: 812 | T80 | 0.8 %\n")
    assert "Flour | Type | Ash: 812 | T80 | 0.8 %" in answer._repr_html_()
    assert answer["answer"] == "812 | T80 | 0.8 %"

"""What happens around a command: readers that go away, folders that vanish, and files that are none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    benchmark_records,
    command,
    environment,
    make_experiment,
    paid,
    run_arguments,
    service,
    write_world,
)

from ai4rag_nb import load_documents, open_run
from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.foundations.errors import BenchmarkError, InputError, ModelSettingsError, StorageError
from ai4rag_nb.foundations.events import BaseEventHandler, TrialFinished, TrialStarted
from ai4rag_nb.indexing.store_config import MilvusLiteConfig
from ai4rag_nb.querying.models import parse_spec
from ai4rag_nb.serving.commands import main

QUESTION = "Which apple ripens last?"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process and give its status, output and errors."""
    try:
        status = main(list(arguments))
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "unexpected" not in captured.err, captured.err
    return status, captured.out, captured.err


# --- readers that go away ----------------------------------------------------------------------------------------------------


def shell(line: str, arguments: list[str], stub: OpenAIStub) -> subprocess.CompletedProcess[str]:
    """Run a command with a redirection; `$@` in the line is the command."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", *command(*arguments)],
        env=environment(stub), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        '"$@" 2>&1 | head -1',
        '"$@" 2> >(head -c 1 >/dev/null)',
        '"$@" 2>/dev/full',
        '"$@" 2>&-',
        '"$@" | true',
    ],
)
def test_nobody_who_reads_progress_can_end_a_search(tmp_path: Path, stub: OpenAIStub, line: str) -> None:
    done = shell(line, run_arguments(tmp_path, "--max-evals", "2"), stub)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    found = open_run(tmp_path / "run")
    assert [result.state for result in found.evaluations] == ["completed"] * 2
    assert not any("failed on" in note for note in found.notes), found.notes
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if line.endswith("&-"):
        assert done.stdout.startswith("rank"), "progress does not go to the results instead"


def test_a_failing_command_fails_also_when_nobody_hears_why(tmp_path: Path, stub: OpenAIStub) -> None:
    done = shell('"$@" 2>/dev/full', run_arguments(tmp_path, "--benchmark", "nowhere.json"), stub)
    assert done.returncode == 2


def test_a_broken_pipe_elsewhere_is_not_the_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ai4rag_nb.serving.reading as reading

    def broken(*given: Any) -> Any:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(reading, "read_results", broken)
    assert main(["leaderboard", str(tmp_path)]) == 1
    assert "Broken pipe" in capsys.readouterr().err


# --- links that lead nowhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["loop1", "gone"])
@pytest.mark.parametrize("option", ["--documents", "--out", "--workspace", "--benchmark", "--space"])
def test_links_that_lead_nowhere_are_refused(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], option: str, link: str
) -> None:
    (tmp_path / "loop1").symlink_to("loop1")
    (tmp_path / "gone").symlink_to("nothing")
    status, output, errors = ends(capsys, *run_arguments(tmp_path, option, str(tmp_path / link)))
    assert status == 2 and output == "" and paid(stub) == 0
    assert link in errors and f"mean '{link}'" not in errors and len(errors.strip().splitlines()) == 2, errors


def test_links_that_lead_nowhere_are_refused_in_python(tmp_path: Path, stub: OpenAIStub) -> None:
    (tmp_path / "loop1").symlink_to("loop1")
    for wrong in ({"run": "loop1"}, {"run": "loop1/run"}, {"workspace": "loop1"}):
        with pytest.raises(InputError, match=r"loop1.*back to itself"):
            make_experiment(tmp_path, **wrong)
    with pytest.raises(InputError, match="back to itself"):
        MilvusLiteConfig(str(tmp_path / "loop1" / "vectors.db"))
    with pytest.raises(InputError, match="back to itself") as caught:
        load_documents(tmp_path / "loop1")
    assert "mean" not in str(caught.value)
    assert paid(stub) == 0


# --- what vanishes while a search runs ---------------------------------------------------------------------------------------


class Vanishing(BaseEventHandler):
    """Remove a folder when the second configuration begins or is finished, and count what begins then."""

    def __init__(self, folder: Path, moment: type) -> None:
        self.folder, self.moment, self.begun = folder, moment, 0

    def on_event(self, event: Any) -> None:
        self.begun += isinstance(event, TrialStarted)
        if isinstance(event, self.moment) and event.name == "Pattern2":
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("moment", [TrialStarted, TrialFinished])
@pytest.mark.parametrize("name", ["run", "workspace"])
def test_a_folder_that_is_deleted_while_a_search_runs(
    tmp_path: Path, stub: OpenAIStub, name: str, moment: type
) -> None:
    vanishing = Vanishing(tmp_path / name, moment)
    experiment = make_experiment(tmp_path, max_evals=6, event_handler=vanishing)
    with pytest.raises(StorageError, match="deleted or replaced while it was in use") as caught:
        experiment.search()
    assert str(tmp_path / name) in str(caught.value) and "workspace" in str(caught.value)
    assert vanishing.begun <= 3, "nothing is measured behind it"
    if name == "run":
        with pytest.raises(StorageError, match="was deleted"):
            assert experiment.results
        assert not (tmp_path / "run").exists(), "no leftovers are in the way of the next run"
    experiment.close()
    again = make_experiment(tmp_path, max_evals=6)
    before = paid(stub)
    again.search()
    assert [result.state for result in again.results.evaluations] == ["completed"] * 6
    assert paid(stub) > before
    again.close()


def test_a_lost_workspace_costs_nothing_before_somebody_asks(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(tmp_path, "--max-evals", "2")
    assert ends(capsys, *arguments)[0] == 0
    shutil.rmtree(tmp_path / "workspace")
    status, _, errors = ends(capsys, "ask", str(tmp_path / "run"), QUESTION)
    assert status == 2 and "of this run is gone" in errors and "Run the same again" in errors
    status, _, errors = ends(
        capsys, "ask", str(tmp_path / "run"), QUESTION, "--workspace", str(tmp_path / "workspace")
    )
    assert status == 2 and "of this run is gone" in errors
    before = paid(stub)
    status, output, errors = ends(capsys, *arguments)
    assert status == 0 and "Pattern1" in output and paid(stub) == before
    assert "is built when it is asked" in errors
    status, output, _ = ends(capsys, "ask", str(tmp_path / "run"), QUESTION)
    assert status == 0 and "Winter Banana" in output and paid(stub) > before
    before = paid(stub)
    status, _, errors = ends(capsys, *arguments)
    assert status == 0 and "is built when" not in errors and paid(stub) == before


def test_a_cleaned_workspace_gets_its_winner_back(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    from ai4rag_nb.indexing.milvus_lite import list_collections

    arguments = run_arguments(tmp_path, "--max-evals", "2")
    assert ends(capsys, *arguments)[0] == 0
    assert ends(capsys, "clean", "--yes", "--workspace", str(tmp_path / "workspace"))[0] == 0
    before = paid(stub)
    status, _, errors = ends(capsys, *arguments)
    assert status == 0 and "is built when" not in errors and paid(stub) == before
    assert len(list_collections(MilvusLiteConfig(db_path=str(tmp_path / "workspace" / "vectors.db")))) == 1


def test_a_folder_in_the_place_of_the_cache(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workspace" / "cache.sqlite").mkdir(parents=True)
    for arguments in (run_arguments(tmp_path), ["clean", "--workspace", str(tmp_path / "workspace")]):
        status, _, errors = ends(capsys, *arguments)
        assert status == 2 and "cache.sqlite' is a folder" in errors and "Move it away" in errors


# --- files that are none, and files that no parser takes ---------------------------------------------------------------------


@pytest.mark.parametrize(("option", "name"), [("--benchmark", "pipe.json"), ("--space", "pipe.yaml")])
def test_pipes_and_devices_are_not_read(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"null{name[-5:]}").symlink_to("/dev/zero")
    for place in (tmp_path / name, tmp_path / f"null{name[-5:]}"):
        status, _, errors = ends(capsys, *run_arguments(tmp_path, option, str(place)))
        assert status == 2 and "no regular file" in errors and place.name in errors


def test_settings_in_a_pipe_are_not_read(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "settings.ini")
    monkeypatch.chdir(tmp_path)
    status, _, errors = ends(capsys, *run_arguments(tmp_path))
    assert status == 2 and "settings.ini" in errors and "no regular file" in errors


ROW = '"Why?","[""so""]","[""a.md""]"\n'
HEADER = "question,correct_answers,correct_answer_document_keys\n"
HUGE = json.dumps(benchmark_records()[:1]).replace('"evidence"', f'"answerable": {"7" * 10_000}, "evidence"')


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("huge.json", HUGE, ["too many digits", "quotes"]),
        ("huge.jsonl", "\n" + HUGE[1:-1], ["line 2", "too many digits", "quotes"]),
        ("deep.json", "[" * 200_000, ["nested too deeply", "one list of objects"]),
        ("deep.jsonl", "[" * 200_000, ["line 1", "nested too deeply"]),
        ("open.csv", HEADER + ROW + '"Why,a,b\n\n\n', ["line 3", "quote is not closed", "Close it"]),
        ("open.csv", "\n\n" + HEADER + ROW + '"Why,a,b\n', ["line 5", "quote is not closed"]),
        ("long.csv", HEADER + ROW + "x" * 131_073 + ",a,b\n", ["line 3", "131,072 characters", "JSON"]),
        ("inner.csv", HEADER + '"Why" not,a,b\n', ["line 2", "quote stands within", "twice"]),
    ],
)
def test_benchmarks_that_no_parser_takes(
    tmp_path: Path,
    stub: OpenAIStub,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    words: list[str],
) -> None:
    write_world(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(BenchmarkError, match=name):
        BenchmarkData.from_file(tmp_path / name)
    status, _, errors = ends(capsys, *run_arguments(tmp_path, "--benchmark", str(tmp_path / name)))
    assert status == 2 and all(word in errors for word in words), errors


def test_spaces_that_no_parser_takes(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "huge.json": f'{{"chunk_size": [{"7" * 10_000}]}}',
        "huge.yaml": f"chunk_size: [{'7' * 10_000}]",
        "large.yaml": f"chunk_size: [{'7' * 4_000}]",
        "deep.json": "[" * 200_000,
        "surrogate.json": '{"foundation_model": ["openai:\\udc80"]}',
    }.items():
        run_arguments(tmp_path)
        (tmp_path / name).write_text(text)
        given = run_arguments(tmp_path, "--space", str(tmp_path / name))
        cut = given.index("--foundation-model")
        status, _, _ = ends(capsys, *(given[:cut] + given[cut + 2 :]))
        assert status == 2, name
    assert paid(stub) == 0


@pytest.mark.parametrize(
    "option", ["--foundation-model", "--embedding-model", "--metric", "--optimizer", "--documents", "--out"]
)
def test_no_argument_may_hold_half_a_letter(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    status, output, errors = ends(capsys, *run_arguments(tmp_path, option, "openai:\udc80"))
    assert status == 2 and output == "" and paid(stub) == 0
    assert "no valid text" in errors and "udc80" in errors
    assert ends(capsys, "ask", str(tmp_path), "Why \udc80?")[0] == 2


def test_no_name_in_python_may_hold_half_a_letter(tmp_path: Path, stub: OpenAIStub) -> None:
    with pytest.raises(ModelSettingsError, match="no valid text"):
        parse_spec("openai:\udc80", "local:extractive")
    for wrong in ({"run": "r\udc80"}, {"workspace": "w\udc80"}):
        with pytest.raises(InputError, match="no valid text"):
            make_experiment(tmp_path, **wrong)


# --- what is said ------------------------------------------------------------------------------------------------------------


def test_a_busy_service_says_once_that_everything_is_kept(tmp_path: Path, stub: OpenAIStub) -> None:
    class Busy(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, TrialFinished):
                stub.settings.status = 429

    experiment = make_experiment(tmp_path, event_handler=Busy())
    with pytest.raises(Exception, match="does not answer any more") as caught:
        experiment.search()
    assert str(caught.value).casefold().count("everything finished is kept") == 1
    experiment.close()


GRPC = """
import os, sys
from ai4rag_nb.indexing.milvus_lite_file import MilvusLiteFile
assert "grpc" not in sys.modules
MilvusLiteFile.open(sys.argv[1]).release()
print(os.environ["GRPC_VERBOSITY"], "grpc" in sys.modules)
"""


@pytest.mark.parametrize("chosen", [None, "debug"])
def test_grpc_is_quiet_unless_the_user_wants_to_hear_it(tmp_path: Path, chosen: str | None) -> None:
    values = environment(None) | ({"GRPC_VERBOSITY": chosen} if chosen else {})
    if chosen is None:
        values.pop("GRPC_VERBOSITY", None)
    done = subprocess.run(
        [sys.executable, "-c", GRPC, str(tmp_path / "vectors.db")],
        env=values, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == [chosen or "ERROR", "True"], done.stderr
    assert chosen is not None or done.stderr == ""

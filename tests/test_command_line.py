"""The command line: what it prints where, how it ends, and what it says about every input that is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    DOCUMENTS,
    KEY,
    SPACE_LINES,
    RECORDS,
    benchmark_records,
    call,
    command,
    environment,
    files_holding,
    paid,
    run_arguments,
    service,
    wait_until,
    write_world,
)

from ai4rag_nb.foundations.errors import StorageError
from ai4rag_nb.optimization.results import ExperimentResults
from ai4rag_nb.optimization.run_store import EvaluationResult
from ai4rag_nb.serving import running
from ai4rag_nb.serving.commands import main

QUESTION = "Which apple ripens last?"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder whose settings allow no retries and little patience, so that failures come at once."""
    (tmp_path / "settings.ini").write_text("[ai4rag_nb]\nrequest_retries = 0\nrequest_timeout_seconds = 3\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, OpenAIStub, subprocess.CompletedProcess]]:
    """A finished run, made by the real command, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    with OpenAIStub(listed_window=512, api_key=KEY) as running:
        done = call(*run_arguments(folder), stub=running)
        assert done.returncode == 0, done.stderr
        yield folder, running, done


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process and give its status, output and errors."""
    try:
        status = main(list(arguments))
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "Traceback" not in captured.out
    return status, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], stub: OpenAIStub, arguments: list[str], *words: str) -> str:
    """Check that a command is bad input, that its message holds some words, and that nothing was paid."""
    status, output, errors = ends(capsys, *arguments)
    assert status == 2, (status, errors)
    assert output == ""
    for word in words:
        assert word.lower() in errors.lower(), (word, errors)
    assert paid(stub) == 0
    assert KEY not in errors
    return errors


# --- what is printed ---------------------------------------------------------------------------------------------------------


def test_a_run_prints_the_ranking_and_what_it_means(finished: Any) -> None:
    folder, _, done = finished
    lines = done.stdout.splitlines()
    assert re.match(r"rank +pattern +overall_score +95 % interval +n ", lines[0])
    assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "3", "4"]
    assert "Best: Pattern" in done.stdout and "chunk_size" in done.stdout
    assert f"Results: {folder / 'run'}" in done.stdout and (folder / "run" / "report.html").is_file()
    assert str(folder / "run" / "report.html") in done.stdout
    assert "12 questions" in done.stdout, "that few questions are mostly noise is said"
    assert "6 documents" in done.stderr and "8 pipelines" in done.stderr and "rank" not in done.stderr
    said = [*done.stderr.splitlines(), *lines]
    notes = [line for line in said if "No questions are held out" in line]
    assert len(notes) == 1, "a note is told once"


def test_the_leaderboard_in_json(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, stub, _ = finished
    status, output, errors = ends(capsys, "leaderboard", str(folder / "run"), "--json")
    assert status == 0 and errors == ""
    records = json.loads(output)
    more = {"held_out", "test_part_seen", "ties", "notes", "folder"}
    assert set(records) == {"metric", "chosen", "patterns", *more}
    assert records["metric"] == "custom:overall_score" and records["folder"] == str(folder / "run")
    assert records["held_out"] == [] and not records["test_part_seen"], "too few questions to hold any out"
    assert any("No questions are held out" in note for note in records["notes"])
    names = {entry["name"] for entry in records["patterns"][1:]}
    assert {one["name"] for one in records["ties"]} <= names
    assert all(
        set(one) == {"name", "verdict", "unseen"} and one["unseen"] == "open" for one in records["ties"]
    )
    for rank, entry in enumerate(records["patterns"], start=1):
        costs = {"context_tokens", "duration_seconds"}
        assert set(entry) == {"name", "rank", "state", "score", "scores", "settings", *costs}
        assert entry["rank"] == rank and entry["state"] == "completed" and entry["name"].startswith("Pattern")
        assert all(set(scores) == {"mean", "ci_low", "ci_high", "n"} for scores in entry["scores"].values())
        assert entry["score"] == entry["scores"]["custom:overall_score"]["mean"]
        assert entry["settings"]["chunking_method"] == "recursive"
    assert {"unitxt:faithfulness", "unitxt:answer_correctness", "custom:token_f1"} <= set(
        records["patterns"][0]["scores"]
    )
    before = paid(stub)
    again = call(*run_arguments(folder, "--json"), stub=stub)
    expected = {**records, "held_out_missing": []}
    assert again.returncode == 0 and json.loads(again.stdout) == expected
    assert paid(stub) == before


@pytest.mark.parametrize("more", [["--list-parameters", "--json"], ["--json", "--list-parameters"]])
def test_parameters_are_listed_for_programs(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """The same names as the text has, in its order; sizes are numbers, and what has no values has none."""
    status, output, errors = ends(capsys, "run", *more)
    rows = {row["name"]: row for row in json.loads(output)["parameters"]}
    assert (status, errors) == (0, "")
    text = ends(capsys, "run", "--list-parameters")[1]
    assert list(rows) == re.findall(r"^(\w+): ", text, re.MULTILINE)
    assert rows["chunk_size"]["values"] == [64, 128, 256, 512, 1024, 2048]
    assert rows["citations"]["values"] == ["off", "on"] and rows["citations"]["without"] == ["off"]
    assert rows["rerank_model"]["values"] == rows["rerank_model"]["without"] == []
    assert rows["search_mode"]["without"] == ["vector", "hybrid", "keyword"]
    assert all(row["meaning"] for row in rows.values())


def test_the_leaderboard_by_another_metric(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = finished
    status, output, _ = ends(
        capsys, "leaderboard", str(folder / "run"), "--metric", "answer_correctness", "--json"
    )
    records = json.loads(output)
    assert status == 0 and records["metric"] == "unitxt:answer_correctness"
    scores = [entry["score"] for entry in records["patterns"]]
    assert scores == sorted(scores, reverse=True)
    assert scores == [entry["scores"]["unitxt:answer_correctness"]["mean"] for entry in records["patterns"]]
    status, output, _ = ends(capsys, "leaderboard", str(folder / "run"), "--metric", "custom:token_f1")
    assert status == 0 and "token_f1" in output.splitlines()[0]
    status, output, errors = ends(capsys, "leaderboard", str(folder / "run"), "--metric", "answer_corectness")
    assert status == 2 and output == "" and "answer_correctness" in errors


def test_show(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = finished
    status, output, errors = ends(capsys, "show", str(folder / "run"), "Pattern1")
    assert status == 0 and errors == ""
    assert (
        "Pattern1 (completed" in output
        and "overall_score" in output
        and "custom:" not in output
        and "number_of_chunks" in output
    )
    status, output, _ = ends(capsys, "show", str(folder / "run"), "pattern2", "--json")
    shown = json.loads(output)
    assert (
        status == 0
        and shown["name"] == "Pattern2"
        and shown["settings"]["store_binding"]["provider_type"] == "milvus_lite"
    )
    status, output, errors = ends(capsys, "show", str(folder / "run"), "Pattern77")
    assert status == 2 and output == "" and "Pattern77" in errors and "Pattern2" in errors


def test_ask(finished: Any) -> None:
    folder, stub, _ = finished
    done = call("ask", str(folder / "run"), QUESTION, stub=stub)
    assert done.returncode == 0, done.stderr
    assert "Winter Banana" in done.stdout.splitlines()[0] and "orchard.md" in done.stdout
    named = call(
        "ask",
        str(folder / "run"),
        QUESTION,
        "--pattern",
        "Pattern2",
        "--json",
        stub=stub,
        folder=folder.parent,
    )
    record = json.loads(named.stdout)
    assert {"pattern", "question", "answer", "sources", "timings", "tokens"} <= set(record)
    assert (
        record["pattern"] == "Pattern2"
        and record["question"] == QUESTION
        and "Winter Banana" in record["answer"]
    )
    source = record["sources"][0]
    text = DOCUMENTS[source["document_id"]]
    assert text[source["start_index"] : source["end_index"]] == source["text"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", "{run}", "   "], ["question is empty"]),
        (["ask", "{run}", QUESTION, "--pattern", "Patern2"], ["Pattern2"]),
        (["ask", "{none}", QUESTION], ["does not exist", "--out"]),
        (["leaderboard", "{none}"], ["does not exist", "--out"]),
        (["leaderboard", "{docs}"], ["holds no run"]),
        (["show", "{docs}", "Pattern1"], ["holds no run"]),
        (["ask", "{run}", QUESTION, "--workspace", "{none}"], ["no workspace"]),
        (["clean", "--workspace", "{none}"], ["no workspace"]),
        (["export", "{none}", "--form", "ragas", "--out", "{none}"], ["does not exist", "--out"]),
        (["export", "{run}", "--form", "ragas", "--pattern", "Patern2", "--out", "{none}"], ["Pattern2"]),
        (
            ["export", "{run}", "--form", "ragas", "--out", "{docs}"],
            ["is there already", "Name another file"],
        ),
        (["export", "{run}", "--form", "ragas", "--out", "{none}/a.json"], ["cannot be written"]),
        (["export", "{run}", "--form", "raga", "--out", "{none}"], ["--form", "deepeval"]),
        (["export", "{run}", "--form", "ragas"], ["--out"]),
    ],
)
def test_reading_commands_refuse_what_is_not_there(
    finished: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    folder, _, _ = finished
    places = {"run": folder / "run", "none": folder / "nowhere", "docs": folder / "docs"}
    status, output, errors = ends(capsys, *[argument.format(**places) for argument in arguments])
    assert status == 2 and output == ""
    assert all(word in errors for word in words), errors
    assert not (folder / "nowhere").exists()


def test_the_answers_of_a_pattern_are_given_to_another_evaluator(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are those that `evaluation_results.json` holds, under the names of the other evaluators."""
    folder, service, _ = finished
    before = paid(service)
    kept = json.loads((folder / "run" / "Pattern2" / "evaluation_results.json").read_text())
    names = {
        "ragas": ("user_input", "response", "retrieved_contexts", "reference"),
        "deepeval": ("input", "actual_output", "retrieval_context", "expected_output"),
    }
    for form, (question, answer, contexts, reference) in names.items():
        out = tmp_path / f"{form}.jsonl"
        named = ["export", str(folder / "run"), "--form", form, "--out", str(out)]
        status, output, errors = ends(capsys, *named, "--pattern", "pattern2")
        assert (status, errors) == (0, "") and output.startswith("Pattern2: ") and form in output
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row[question] for row in rows] == [one["question"] for one in kept]
        assert [row[answer] for row in rows] == [one["answer"] for one in kept]
        assert [row[contexts] for row in rows] == [one["answer_contexts"] for one in kept]
        assert [row[reference] for row in rows] == [one["correct_answers"][0] for one in kept]
        written = out.read_bytes()
        status, output, errors = ends(capsys, *named)
        assert (status, output, out.read_bytes()) == (2, "", written) and "move that one away" in errors
    best = json.loads(ends(capsys, "leaderboard", str(folder / "run"), "--json")[1])["patterns"][0]["name"]
    named = ["export", str(folder / "run"), "--form", "ragas", "--out", str(tmp_path / "best.json"), "--json"]
    assert json.loads(ends(capsys, *named)[1])["pattern"] == best
    assert len(json.loads((tmp_path / "best.json").read_text())) == len(kept)
    assert paid(service) == before


def test_clean_counts_and_drops(tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(capsys, *run_arguments(tmp_path, "--max-evals", "2"))[0] == 0
    workspace = str(tmp_path / "workspace")
    status, output, _ = ends(capsys, "clean", "--workspace", workspace, "--dry-run", "--json")
    counted = json.loads(output)
    assert status == 0 and len(counted["collections"]) in (1, 2) and counted["dropped"] is False
    assert set(counted["bytes"]) == set(counted["collections"]) and min(counted["bytes"].values()) > 1_000
    status, output, _ = ends(capsys, "clean", "--workspace", workspace, "--yes")
    assert status == 0 and "dropped" in output and str(len(counted["collections"])) in output
    assert all(name in output for name in counted["collections"])
    status, output, _ = ends(capsys, "clean", "--workspace", workspace, "--json")
    assert status == 0 and json.loads(output)["collections"] == {}, "nothing to drop, so nothing to ask"
    before = paid(stub)
    status, output, errors = ends(capsys, "ask", str(tmp_path / "run"), QUESTION)
    assert status == 0 and "Winter Banana" in output, errors
    assert ends(capsys, "clean", "--workspace", workspace, "--yes")[0] == 0
    assert ends(capsys, *run_arguments(tmp_path, "--max-evals", "2"))[0] == 0
    assert paid(stub) == before
    status, output, errors = ends(capsys, "ask", str(tmp_path / "run"), QUESTION)
    assert status == 0 and "Winter Banana" in output, errors


# --- documents ---------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(tmp_path, "--documents", str(tmp_path / "dcos"))
    refused(capsys, stub, arguments, "dcos", "docs")


def test_an_empty_folder(tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    refused(
        capsys, stub, run_arguments(tmp_path, "--documents", str(tmp_path / "empty")), "empty", "no document"
    )


def test_a_folder_of_other_kinds(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.jpg").write_bytes(b"\xff\xd8\xff")
    refused(
        capsys, stub, run_arguments(tmp_path, "--documents", str(tmp_path / "pictures")), "no document", ".md"
    )


def test_a_folder_that_cannot_be_read(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = run_arguments(tmp_path)
    (tmp_path / "docs").chmod(0)
    if os.access(tmp_path / "docs", os.R_OK):  # the superuser may read everything
        real = os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode, **more: Path(path).name != "docs" and real(path, mode, **more)
        )
    try:
        refused(capsys, stub, arguments, "docs", "permission")
    finally:
        (tmp_path / "docs").chmod(stat.S_IRWXU)


BAD_FILES: dict[str, bytes] = {
    "empty.md": b"",
    "blank.md": b" \n\t\n",
    "binary.md": bytes(range(256)) * 8,
    "broken.json": b'{"schema_name": "DoclingDocument", "name": ',
    "other.json": b'{"schema_name": "Something"}',
}


def test_bad_files_are_named_and_left_out(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(tmp_path, "--max-evals", "1")
    for name, content in BAD_FILES.items():
        (tmp_path / "docs" / name).write_bytes(content)
    (tmp_path / "docs" / "latin.txt").write_bytes(
        "Größe und Gewicht stehen auf dem Schild.".encode("latin-1")
    )
    with (tmp_path / "docs" / "huge.md").open("wb") as file:
        file.truncate(50_000_000)
    refused(
        capsys, stub, [*arguments, "--strict"], "binary.md", "broken.json", "huge.md", "and 1 more", "strict"
    )
    status, output, errors = ends(capsys, *arguments)
    assert status == 0 and output
    for name in (*BAD_FILES, "huge.md"):
        assert name in errors, name
    assert "latin.txt" in errors and "7 documents" in errors


@pytest.mark.parametrize("name", BAD_FILES)
def test_only_bad_files(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / name).write_bytes(BAD_FILES[name])
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--documents", str(tmp_path / "bad")),
        name,
        "Mend",
    )


# --- benchmark ---------------------------------------------------------------------------------------------------------------


def changed(**values: Any) -> list[dict[str, Any]]:
    """Give the benchmark with other values in its third record."""
    records = benchmark_records()
    records[2] = {name: value for name, value in {**records[2], **values}.items() if value != "left out"}
    return records


BENCHMARKS: dict[str, tuple[str, list[str]]] = {
    "broken": ('[{"question": "Wh', ["JSON"]),
    "nothing": ("", ["empty"]),
    "no questions": ("[]", ["empty", "at least one question"]),
    "an object": ('{"question": "Why?"}', ["dict", "list"]),
    "a list of texts": ('["Why?"]', ["Record 1"]),
    "without a column": (
        json.dumps([{"question": "Why?", "correct_answers": ["so"]}]),
        ["correct_answer_document_keys"],
    ),
    "a misspelt column": (
        json.dumps(
            [{"question": "Why?", "correct_answer": ["so"], "correct_answer_document_keys": ["ferry.md"]}]
        ),
        ["correct_answers", "Did you mean"],
    ),
    "a number for a text": (json.dumps(changed(question=7)), ["record 3", "question"]),
    "a text for a list": (
        json.dumps(changed(correct_answers="twelve minutes")),
        ["record 3", "correct_answers", "list"],
    ),
    "an empty question": (json.dumps(changed(question=" ")), ["record 3", "empty"]),
    "no answers": (json.dumps(changed(correct_answers=[])), ["record 3", "correct_answers"]),
    "a number for a key": (
        json.dumps(changed(correct_answer_document_keys=[12])),
        ["record 3", "document_keys"],
    ),
    "an unknown document": (
        json.dumps(changed(correct_answer_document_keys=["fery.md"])),
        ["fery.md", "ferry.md", "q2"],
    ),
    "a question twice": (json.dumps(changed(question=RECORDS[0][0])), ["Records 1 and 3", RECORDS[0][0]]),
}


@pytest.mark.parametrize("fault", BENCHMARKS)
def test_a_bad_benchmark(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    text, words = BENCHMARKS[fault]
    (tmp_path / "bad.json").write_text(text)
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "bad.json")), *words)
    assert not (tmp_path / "run").exists()


def test_a_benchmark_file_that_cannot_be_used(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--benchmark", str(tmp_path / "bnech.json")),
        "bnech.json",
        "bench.json",
    )
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "docs")), "docs")
    (tmp_path / "latin.csv").write_bytes("question;größe\n".encode("latin-1"))
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "latin.csv")), "UTF-8")
    (tmp_path / "short.csv").write_text("question,correct_answers,correct_answer_document_keys\nWhy?,so\n")
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "short.csv")), "row 1")
    (tmp_path / "lines.jsonl").write_text('{"question": "Why?"\n')
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "lines.jsonl")), "line 1")
    (tmp_path / "table.xlsx").write_bytes(b"PK\x03\x04")
    refused(capsys, stub, run_arguments(tmp_path, "--benchmark", str(tmp_path / "table.xlsx")), "table.xlsx")


def test_evidence_that_is_not_found(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text(json.dumps(changed(evidence=["a sentence that nobody wrote"])))
    arguments = run_arguments(tmp_path, "--benchmark", str(tmp_path / "other.json"), "--max-evals", "1")
    refused(capsys, stub, [*arguments, "--strict"], "evidence", "a sentence that nobody wrote")
    status, output, errors = ends(capsys, *arguments)
    assert status == 0 and "a sentence that nobody wrote" in errors + output


# --- space -------------------------------------------------------------------------------------------------------------------

SPACES: dict[str, tuple[str, list[str]]] = {
    "an unknown parameter": ("chunk_sise: [64]\n", ["chunk_sise", "chunk_size"]),
    "an unknown value": ("chunking_method: [recursve]\n", ["recursve", "recursive"]),
    "a wrong type": ("chunk_size: [small]\n", ["chunk_size", "small"]),
    "a negative size": ("chunk_size: [-5]\n", ["chunk_size", "-5"]),
    "a size in which no text fits": ("chunk_size: [4]\n", ["chunk_size: 4", "between 8 and"]),
    "more chunks than a store finds": ("number_of_chunks: [20000]\n", ["number_of_chunks", "16384"]),
    "a window beyond the limit": ("window_size: [101]\n", ["window_size: 101", "100"]),
    "a range without an end": (
        "chunk_size: {minimum: 1, maximum: 1000000000000}\n",
        ["chunk_size", "too many"],
    ),
    "a step of nothing": (
        "ranker_alpha: {minimum: 0, maximum: 1, step: 0}\n",
        ["ranker_alpha", "step is above 0"],
    ),
    "a name that is written twice": ("chunk_size: [64]\nchunk_size: [128]\n", ["chunk_size is given twice"]),
    "too many brackets": ("chunk_size: " + "[" * 9_999 + "]" * 9_999, ["nested too deeply"]),
    "no values": ("chunk_size: []\n", ["chunk_size"]),
    "a list of lists": ("- chunk_size\n- 64\n", ["parameters"]),
    "broken": ("chunk_size: [64\n", ["YAML"]),
    "nothing": ("", ["parameters"]),
    "beyond every window": ("chunk_size: [64, 9000]\n", ["9000", "512", "stub-embedding"]),
    "contradictions": (
        "chunking_method: [recursive]\nchunk_size: [64, 128]\nchunk_overlap: [128, 256]\n",
        ["None of the", "chunk_overlap is not below chunk_size (", ")"],
    ),
    "several contradictions": (
        "chunking_method: [recursive]\nchunk_size: [64]\nchunk_overlap: [64]\nretrieval_method: [window]\nwindow_size: [0]\n",
        ["chunk_overlap is not below chunk_size (", "window_size above 0 ("],
    ),
}


@pytest.mark.parametrize("fault", SPACES)
def test_a_bad_space(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    text, words = SPACES[fault]
    (tmp_path / "bad.yaml").write_text(text)
    arguments = run_arguments(tmp_path, "--space", str(tmp_path / "bad.yaml"))
    refused(capsys, stub, arguments, *words)


def test_a_space_file_that_is_not_there(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, stub, run_arguments(tmp_path, "--space", str(tmp_path / "spice.yaml")), "spice.yaml")
    refused(capsys, stub, run_arguments(tmp_path, "--space", str(tmp_path / "docs")), "docs")
    (tmp_path / "bad.json").write_text('{"chunk_size": 64,}')
    refused(capsys, stub, run_arguments(tmp_path, "--space", str(tmp_path / "bad.json")), "JSON")


def test_a_size_beyond_the_local_window(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("chunk_size: [512]\n")
    arguments = run_arguments(tmp_path, "--space", str(tmp_path / "bad.yaml"), "--embedding-model", "default")
    refused(capsys, stub, arguments, "512", "256", "window", "all-MiniLM-L6-v2")


# --- models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "spec", "words"),
    [
        ("--embedding-model", "openia:m", ["openia:m", "openai"]),
        ("--embedding-model", "stub-embedding", ["stub-embedding", "openai:MODEL"]),
        ("--embedding-model", "openai:", ["names no model"]),
        ("--embedding-model", "", ["embedding_model", "no model"]),
        ("--embedding-model", "local:all-MiniLM-L6", ["all-MiniLM-L6-v2"]),
        ("--embedding-model", "local:/nowhere/at/all", ["/nowhere/at/all"]),
        ("--embedding-model", "local:extractive", ["embeds no texts"]),
        ("--embedding-model", "openai:unknown", ["unknown", "does not exist"]),
        ("--foundation-model", "local:extractiv", ["extractive"]),
        ("--foundation-model", "local:gguf:/nowhere.gguf", ["/nowhere.gguf"]),
        ("--foundation-model", "openai:unknown", ["unknown", "does not exist"]),
    ],
)
def test_a_model_that_is_not_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    spec: str,
    words: list[str],
) -> None:
    with service(monkeypatch) as stub:
        status, output, errors = ends(capsys, *run_arguments(tmp_path, option, spec))
        assert status == 2 and output == "", errors
        assert all(word in errors for word in words), errors
        assert stub.counts.texts == stub.counts.chats == 0


@pytest.mark.parametrize("option", ["--embedding-model", "--foundation-model"])
def test_a_missing_key(
    tmp_path: Path,
    stub: OpenAIStub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    other = {"--embedding-model": "--foundation-model", "--foundation-model": "--embedding-model"}[option]
    refused(capsys, stub, run_arguments(tmp_path, other, "default"), "OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost:8000")
    refused(capsys, stub, run_arguments(tmp_path, other, "default"), "OPENAI_BASE_URL", "http://")


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a wrong key": ({"api_key": "another-key"}, ["401", "OPENAI_API_KEY"]),
    "a web page": ({"html": True}, ["web page", "/v1"]),
    "nothing but silence": ({"hang": 60.0}, ["time", "request_timeout_seconds"]),
    "single bytes": ({"drip": 0.3}, ["time"]),
    "no money": ({"status": 429, "message": "insufficient_quota"}, ["insufficient_quota", "account"]),
    "a fault": ({"status": 503, "message": "starting"}, ["503", "starting"]),
    "half an answer": ({"broken": "json"}, ["no JSON"]),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("option", ["--embedding-model", "--foundation-model"])
def test_a_service_with_a_fault(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    option: str,
) -> None:
    settings, words = FAULTS[fault]
    with service(monkeypatch, **settings) as stub:
        other = {"--embedding-model": "--foundation-model", "--foundation-model": "--embedding-model"}[option]
        harmless = {"--embedding-model": "local:all-MiniLM-L6-v2", "--foundation-model": "local:extractive"}[
            other
        ]
        status, output, errors = ends(capsys, *run_arguments(tmp_path, other, harmless))
        assert stub.counts.hung <= 1 and stub.counts.waited_out == 0, "nobody waits for such an answer"
        assert status == 2 and output == "", errors
        assert all(word in errors for word in [*words, stub.base_url]), errors
        assert KEY not in errors and KEY[-6:] not in errors and KEY[:7] not in errors
        assert stub.counts.texts <= 2 and stub.counts.chats <= 1, "one small try at most"
    assert files_holding(tmp_path, KEY) == []


@pytest.mark.usefixtures("quick")
def test_a_dead_service(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://user:{KEY}@127.0.0.1:{port}/v1")
    errors = refused(
        capsys,
        stub,
        run_arguments(tmp_path),
        f"http://127.0.0.1:{port}/v1",
        "cannot be reached",
        "OPENAI_BASE_URL",
    )
    assert "user" not in errors


# --- options -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--vector-store", "pgvector"], ["PGVECTOR_HOST", "is not set"]),
        (["--vector-store", "milvus"], ["MILVUS_URI", "is not set"]),
        (["--vector-store", "chroma"], ["chroma", "milvus_lite"]),
        (["--optimizer", "bayesian"], ["bayesian", "Did you mean 'bayes'"]),
        (["--optimizer", "gamm"], ["gamm", "gam"]),
        (["--max-evals", "0"], ["max_evals", "at least 1"]),
        (["--max-evals", "-3"], ["max_evals", "-3"]),
        (["--max-evals", "many"], ["--max-evals", "many"]),
        (["--seed", "x"], ["--seed", "x"]),
        (["--metric", "answer_corectness"], ["answer_corectness", "answer_correctness"]),
        (["--metric", "answer_words"], ["answer_words", "cannot be maximised"]),
        (["--metric", "judge:faithfulness"], ["judge"]),
        (["--colour", "red"], ["--colour"]),
        (["--keyword", "tsvector"], ["--keyword", "native", "bm25"]),
        (["--distance-metric", "manhattan"], ["--distance-metric", "cosine", "l2", "ip"]),
    ],
)
def test_options_that_are_wrong(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], more: list[str], words: list[str]
) -> None:
    refused(capsys, stub, run_arguments(tmp_path, *more), *words)
    assert stub.counts.requests == 0 and not (tmp_path / "run").exists()


def test_the_searches_of_the_store(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run keeps its keyword search and its metric; the same folder is not gone on with in another way."""
    ours = ["--keyword", "bm25", "--distance-metric", "l2"]
    status, _, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "1"), *ours)
    assert status == 0, errors
    for kept in ('"keyword": "bm25"', '"distance_metric": "l2"'):
        assert files_holding(tmp_path / "run", kept), kept
    status, _, errors = ends(
        capsys, "ask", str(tmp_path / "run"), "When does it open?", "--workspace", str(tmp_path / "workspace")
    )
    assert status == 0, errors
    status, _, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "1"), "--distance-metric", "l2")
    assert status == 2 and "keyword" in errors


@pytest.mark.parametrize("name", ["learn", "fine-tune", "serve", "feedback", "stop"])
def test_commands_of_later_versions(stub: OpenAIStub, capsys: pytest.CaptureFixture[str], name: str) -> None:
    refused(capsys, stub, [name, "run"], name, "not available yet")


def test_commands_that_do_not_exist(stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, stub, ["leederboard", "run"], "leederboard")
    refused(capsys, stub, [], "usage")
    refused(capsys, stub, ["run"], "--documents", "--benchmark", "--out")
    status, output, errors = ends(capsys, "--help")
    assert status == 0 and "leaderboard" in output and errors == ""


# --- what is measured --------------------------------------------------------------------------------------------------------


def prices_file(folder: Path, prices: dict[str, Any]) -> str:
    (folder / "prices.json").write_text(json.dumps(prices))
    return str(folder / "prices.json")


def test_a_run_measures_what_it_is_told_and_goes_on_without_being_told_again(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--metrics", "answer_correctness", "document_recall@1"]
    few = run_arguments(tmp_path, "--max-evals", "2")
    priced = ["--prices", prices_file(tmp_path, {"openai:stub-chat": {"input": 3, "output": 5}})]
    status, output, errors = ends(capsys, *few, *named, *priced)
    assert status == 0, errors
    assert {"document_recall@1", "money"} <= set(output.splitlines()[0].split())
    assert "context_correctness" not in output
    rows = json.loads((tmp_path / "run" / "Pattern1" / "evaluation_results.json").read_text())
    costs = [(3 * row["tokens"]["prompt"] + 5 * row["tokens"]["completion"]) / 1e6 for row in rows]
    mean = sum(costs) / len(costs)
    assert 0 < mean < 0.01 and f"{mean:.{2 - math.floor(math.log10(mean))}f}" in output
    records = json.loads(ends(capsys, "leaderboard", str(tmp_path / "run"), "--json")[1])
    first = next(entry for entry in records["patterns"] if entry["name"] == "Pattern1")
    assert first["scores"]["custom:money"]["mean"] == pytest.approx(mean)
    assert records["chosen"] == [
        *("unitxt:answer_correctness", "custom:document_recall@1", "custom:money", "custom:overall_score")
    ]
    before = paid(stub)
    status, again, errors = ends(capsys, *few)
    assert status == 0 and again == output and paid(stub) == before, errors
    status, more, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "3"))
    assert status == 0 and "Pattern3" in more and "money" in more.splitlines()[0], errors


def test_another_table_of_prices_or_other_metrics_are_told_apart(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    few = run_arguments(tmp_path, "--max-evals", "1")
    first = ["--prices", prices_file(tmp_path, {"stub-chat": [3, 5]})]
    status, output, errors = ends(capsys, *few, *first)
    assert status == 0 and {"faithfulness", "money"} <= set(output.splitlines()[0].split()), errors
    stub.reset()
    other = ["--prices", prices_file(tmp_path, {"stub-chat": [3, 6]})]
    refused(
        capsys, stub, [*few, *other], "another experiment", "prices stub-chat 3.0/5.0 -> stub-chat 3.0/6.0"
    )
    refused(capsys, stub, [*few, "--metrics", "token_f1"], "another experiment", "measured", "token_f1")


def test_a_model_without_a_price_is_named_before_anything_is_paid(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = ["--prices", prices_file(tmp_path, {"other": [3, 5]})]
    status, output, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "1", *priced))
    assert status == 0 and "There is no price for openai:stub-chat" in errors.split("documents")[0]
    status, output, _ = ends(capsys, "show", str(tmp_path / "run"), "Pattern1")
    assert "Lost in money: 12 x there is no price for the model " in output
    refused_prices = ["--prices", prices_file(tmp_path, {})]
    status, _, errors = ends(capsys, *run_arguments(tmp_path, *refused_prices))
    assert status == 2 and "name no model" in errors


# --- folders -----------------------------------------------------------------------------------------------------------------


def test_the_folder_of_another_experiment(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(capsys, *run_arguments(tmp_path, "--max-evals", "1"))[0] == 0
    stub.reset()
    for more, what in (
        (["--seed", "5"], "optimizer"),
        (["--metric", "token_f1"], "metrics"),
        (["--optimizer", "random"], "optimizer"),
    ):
        new = ["--workspace", str(tmp_path / "other")]
        refused(
            capsys,
            stub,
            run_arguments(tmp_path, "--max-evals", "1", *more, *new),
            "another experiment",
            what,
            "new folder",
        )
        errors = ends(capsys, *run_arguments(tmp_path, *more, *new))[2]
        assert "Reading documents" not in errors and not (tmp_path / "other").exists(), "nothing was read"
    (tmp_path / "docs" / "ferry.md").write_text("# The ferry\n\nIt sank.\n")
    (tmp_path / "few.json").write_text(json.dumps(benchmark_records()[:2]))
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--benchmark", str(tmp_path / "few.json")),
        "documents",
        "questions",
        "differ",
    )


def test_the_demo_ends_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 without the held-out part, and Ctrl-C behind the results says that they are whole."""
    score = {"mean": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 12}
    metric = {"name": "m", "evaluator": "custom", "description": "", "scores": score}
    trial = EvaluationResult(0, "k0", {}, "completed", 0.5, {"evaluation": {"metrics": [metric]}}, [])
    part = {"state": "failed", "key": "k0", "name": "Pattern1", "roles": ["leader"], "reason": "gone"}
    part |= {"metrics": [], "results": [], "questions": 3, "configuration": {}}
    whole = ExperimentResults([trial], "custom:m")
    experiment = SimpleNamespace(output_path=Path("run"), close=lambda: None)
    monkeypatch.setattr(running, "demo_experiment", lambda *_: experiment)
    monkeypatch.setattr(running, "write_run_report", lambda folder, results: folder / "report.html")
    for found, status in ((whole, 0), (replace(whole, test_part={"Pattern1": part}), 1)):
        monkeypatch.setattr(running, "search", lambda _, found=found: found)
        assert main(["demo", "--json"]) == status
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("Not asked: the held-out questions of Pattern1.") == bool(status)

        def interrupt(*_: Any) -> Path:
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(running, "write_run_report", interrupt)
            assert main(["demo", "--json"]) == 130
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith(
            "Interrupted. Everything" if status else "Interrupted after the results: the run is complete"
        )


def test_places_for_results_that_cannot_be(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, stub, run_arguments(tmp_path, "--out", str(tmp_path / "docs")), "docs", "not empty")
    refused(
        capsys, stub, run_arguments(tmp_path, "--out", str(tmp_path / "bench.json")), "bench.json", "file"
    )
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--out", str(tmp_path / "bench.json" / "run")),
        "bench.json",
        "file",
    )
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--workspace", str(tmp_path / "bench.json")),
        "bench.json",
        "file",
    )
    refused(
        capsys,
        stub,
        run_arguments(tmp_path, "--workspace", str(tmp_path / "bench.json" / "ws")),
        "bench.json",
    )
    assert json.loads((tmp_path / "bench.json").read_text()) == benchmark_records()


def test_results_are_not_written_among_the_documents(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = str(tmp_path / "docs" / "results")
    refused(capsys, stub, run_arguments(tmp_path, "--out", inside), "among the documents", inside)
    refused(capsys, stub, run_arguments(tmp_path, "--workspace", inside), "among the documents", inside)
    hidden = run_arguments(tmp_path, "--workspace", str(tmp_path / "docs" / ".ai4rag_nb"), "--max-evals", "1")
    assert ends(capsys, *hidden)[0] == ends(capsys, *hidden)[0] == 0


def test_a_misspelt_model_leaves_the_folder_free(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(capsys, *run_arguments(tmp_path, "--foundation-model", "openai:stub-chta"))[0] == 2
    assert ends(capsys, *run_arguments(tmp_path, "--max-evals", "1"))[0] == 0


def test_settings_that_are_wrong(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, words in (
        ("[ai4rag_nb]\nmax_evalls = 3\n", ["max_evalls", "max_evals"]),
        ("[ai4rag_nb]\nmax_evals = many\n", ["max_evals", "many"]),
        ("no section\n", ["settings.ini"]),
        ("[ai4rag_nb]\noptimization_metric = beauty\n", ["beauty"]),
        ("[ai4rag_nb]\ntest_share = 2\n", ["test_share", "2"]),
        ("[ai4rag_nb]\ninference_max_threads = 0\n", ["inference_max_threads"]),
    ):
        (tmp_path / "settings.ini").write_text(text)
        refused(capsys, stub, run_arguments(tmp_path), *words)


# --- endings -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_all_trials_failing(tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.settings.fail_texts = ("Question: ",)
    status, output, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "3"))
    assert status == 1 and output == ""
    assert "3 x" in errors and "not welcome" in errors and "same again" in errors
    status, output, _ = ends(capsys, "leaderboard", str(tmp_path / "run"), "--json")
    records = json.loads(output)
    assert status == 0 and [entry["state"] for entry in records["patterns"]] == ["failed"] * 3
    assert all(entry["rank"] is None and "not welcome" in entry["reason"] for entry in records["patterns"])
    status, output, errors = ends(capsys, "ask", str(tmp_path / "run"), QUESTION)
    assert status in (1, 2) and output == "" and "not welcome" in errors
    status, output, _ = ends(capsys, "show", str(tmp_path / "run"), "Pattern1")
    assert status == 0 and "not welcome" in output
    stub.settings.fail_texts = ()
    assert ends(capsys, *run_arguments(tmp_path, "--max-evals", "3"))[0] == 0


def test_a_budget_above_the_space(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "500", "--json"))
    assert status == 0 and len(json.loads(output)["patterns"]) == 8
    assert "500" in errors and "8 combinations" in errors


def test_a_reader_that_goes_away(finished: Any) -> None:
    folder, stub, _ = finished
    line = " ".join(
        f"'{part}'" if " " in part else part
        for part in command("leaderboard", str(folder / "run"), "--json")[3:]
    )
    # Whatever started the tests may ignore Ctrl-C, which children inherit.
    hear = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = f"{hear}from ai4rag_nb.serving.commands import main; sys.exit(main())"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -c '{program}' {line} | head -c 1"],
        env=environment(stub), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_names_with_control_characters_are_shown_and_not_obeyed(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = refused(
        capsys, stub, run_arguments(tmp_path, "--documents", str(tmp_path / "a\x1b[31mred")), "red"
    )
    assert "\x1b" not in errors
    run_arguments(tmp_path)
    (tmp_path / "docs" / "evil\x1b[2J.md").write_bytes(b"")
    status, output, errors = ends(capsys, *run_arguments(tmp_path, "--max-evals", "1"))
    assert status == 0 and "\x1b" not in output + errors and "evil" in errors


def test_the_key_is_in_no_output_and_no_file(finished: Any) -> None:
    folder, stub, done = finished
    for text in (done.stdout, done.stderr):
        assert KEY not in text
    assert files_holding(folder, KEY) == [] and files_holding(folder, KEY[-10:]) == []
    assert stub.counts.chats > 0


STOPPING_AT = """
import builtins, importlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ai4rag_nb.serving.commands import main

place, module, name = sys.argv.pop(1), *sys.argv.pop(1).split(":")

def here(*arguments, **options):
    print("here", file=sys.stderr, flush=True)
    sys.stdin.read()  # until the signal comes

if place == "function":
    setattr(importlib.import_module(module), name, here)
if place == "import":
    known = builtins.__import__
    builtins.__import__ = lambda wanted, *more, **rest: (here if wanted == module else known)(wanted, *more, **rest)
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("function", "ai4rag_nb.serving.running:check_run_folder"),
        ("function", "ai4rag_nb.serving.running:read_documents"),
        ("import", "openai:"),
        ("request", "none:"),
        ("function", "ai4rag_nb.serving.running:print_results"),
    ],
)
def test_an_interruption_before_and_after_the_search(tmp_path: Path, place: str, name: str) -> None:
    with (
        OpenAIStub(hang=45.0 if place == "request" else 0.0, listed_window=512) as stub,
        open(tmp_path / "errors.txt", "w") as written,
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPING_AT, place, name, *run_arguments(tmp_path)],
            env=environment(stub),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )
        errors = (tmp_path / "errors.txt").read_text
        reached = lambda: stub.counts.hung > 0 if place == "request" else "here" in errors()  # noqa: E731
        wait_until(lambda: reached() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        assert stub.counts.waited_out == 0
    assert process.returncode == 130, errors()
    assert output == "" and "Traceback" not in errors() and "Interrupted" in errors()


def test_an_interruption_of_a_report(tmp_path: Path) -> None:
    """It ends at once, also while a service is asked about wrong answers, and leaves the run as it was."""
    records = benchmark_records()
    for record in records[:3]:
        record["correct_answers"] = ["whatever the harbour master decrees"]
    write_world(tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(records))
    (tmp_path / "space.yaml").write_text(SPACE_LINES.replace("[1, 2]", "[2]"))
    report = ["report", str(tmp_path / "run"), "--attribute"]
    with OpenAIStub(listed_window=512) as stub:
        assert call(*run_arguments(tmp_path, "--max-evals", "1"), stub=stub).returncode == 0
        for place, name in (
            ("function", "ai4rag_nb.optimization.results:decision_report"),
            ("function", "ai4rag_nb.optimization.cause_search:attribute"),
            ("request", "none:"),
        ):
            stub.settings.hang = 45.0 if place == "request" else 0.0
            with open(tmp_path / "errors.txt", "w") as written:
                process = subprocess.Popen(
                    [sys.executable, "-c", STOPPING_AT, place, name, *report],
                    env=environment(stub),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=written,
                    text=True,
                )
            errors = (tmp_path / "errors.txt").read_text
            wait_until(lambda: stub.counts.hung or "here\n" in errors() or process.poll() is not None)  # noqa: B023
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=300)
            assert stub.counts.waited_out == 0 and process.returncode == 130, errors()
            assert output == "" and "Traceback" not in errors() and "Interrupted" in errors()
            assert "the same command goes on from here" in errors()
            assert "With --no-attribute it does not look into wrong answers." in errors()
        stub.settings.hang = 0.0
        done = call(*report, "--json", stub=stub)
        assert done.returncode == 0 and len(json.loads(done.stdout)["causes"]["rows"]) == 3


def test_a_second_interruption_leaves_at_once(tmp_path: Path) -> None:
    with (
        OpenAIStub(listed_window=512, hang=45.0, hang_after=15) as stub,
        open(tmp_path / "errors.txt", "w") as written,
    ):
        process = subprocess.Popen(
            command(*run_arguments(tmp_path)),
            env=environment(stub),
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        )
        errors = (tmp_path / "errors.txt").read_text
        wait_until(lambda: stub.counts.hung > 0 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "Ctrl-C again" in errors() or process.poll() is not None)
        assert process.poll() is None, "calls that are on their way are waited for"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
        assert stub.counts.waited_out == 0, "nobody waits for them any more"
        assert process.returncode == 130 and output == "" and "Traceback" not in errors()
        assert "Interrupted" in errors()
        stub.settings.hang = 0.0
        assert call(*run_arguments(tmp_path), stub=stub).returncode == 0


def test_unexpected_errors_are_named_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, finished: Any
) -> None:
    import ai4rag_nb.serving.reading as reading

    def failing(folder: Any) -> Any:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(reading, "read_results", failing)
    status, output, errors = ends(capsys, "leaderboard", str(finished[0] / "run"))
    assert status == 1 and output == "" and "ZeroDivisionError" in errors and "AI4RAG_NB_DEBUG" in errors


@pytest.mark.parametrize("option", ["--documents", "--benchmark", "--out", "--space", "--workspace"])
@pytest.mark.parametrize(
    "place", ["", "  ", "x" * 300, "new/" + "x" * 300, "\u00e9" * 128, "a/" * 2_000, "a\0b"]
)
def test_places_that_cannot_be_are_refused(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], option: str, place: str
) -> None:
    refused(capsys, stub, run_arguments(tmp_path, option, place), f"argument {option}")
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize("option", ["--metric", "--optimizer"])
def test_empty_names_are_refused(
    tmp_path: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    refused(capsys, stub, run_arguments(tmp_path, option, ""), f"argument {option}", "empty")


@pytest.mark.parametrize("name", ["leaderboard", "show", "ask"])
def test_a_run_folder_that_cannot_be_is_refused(
    stub: OpenAIStub, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    more = [] if name == "leaderboard" else ["Pattern1"]
    refused(capsys, stub, [name, "x" * 300, *more], "argument RUN", "too long")
    refused(capsys, stub, [name, "", *more], "argument RUN", "empty")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("name", ["leaderboard", "show"])
def test_an_output_that_cannot_be_written(finished: Any, name: str, more: list[str]) -> None:
    wanted = [name, str(finished[0] / "run"), *(["Pattern1"] if name == "show" else []), *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*wanted),
            env=environment(None),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1 and "could not be written: No space left on device" in done.stderr
    assert "fault of" not in done.stderr and "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_output_is_no_fault(finished: Any) -> None:
    wanted = command("leaderboard", str(finished[0] / "run"))
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *wanted], env=environment(None), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\u202e", "\u2066", "\u200f", "\x1b", "\ud800"])
def test_no_printed_answer_breaks_lines_or_turns_them(mark: str) -> None:
    from ai4rag_nb.serving.printing import answer_text, plain

    record = {"pattern": "Pattern1", "answer": f"one{mark}two", "sources": []}
    printed = answer_text(record)
    assert mark not in printed and ascii(mark)[1:-1] in printed and len(printed.splitlines()) == 3
    assert mark not in plain(mark)


def test_what_was_found_is_printed_before_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> Path:
        raise IsADirectoryError(21, "Is a directory")

    monkeypatch.setattr(running, "write_run_report", refuse)
    metric = {"name": "m", "evaluator": "custom", "scores": {"mean": 0.5, "ci_low": 0, "ci_high": 1, "n": 2}}
    payload = {"evaluation": {"metrics": [metric]}}
    trial = EvaluationResult(0, "k", {"chunk_size": 64}, "completed", 0.5, payload)
    other = EvaluationResult(1, "bad", {"chunk_size": 128}, "failed", reason="It broke.")
    parts = {
        "Pattern1": {"state": "failed", "key": "k", "roles": ["leader"], "reason": "The service is down."},
        "default": {"state": "failed", "key": "bad", "roles": ["default"], "reason": "It broke."},
    }
    results = ExperimentResults([trial, other], "custom:m", test_part=parts)
    assert running.missing_test_part(results) == ["Pattern1"]
    for json_wanted in (False, True):
        with pytest.raises(StorageError, match="report could not be written: Is a directory"):
            running.print_results(results, tmp_path, json_wanted)
        told = capsys.readouterr().out
        assert "Pattern1" in told and ("held_out_missing" in told) is json_wanted

"""Measure what a run takes: its file against the plain JSON of the same results, and the memory of a leaderboard.

40 configurations answer 40 questions with 10 to 30 passages each. Memory is the peak of a process of its own, less that
of a process that ranks a run without questions; it is compared with a process that holds all results at once. All of it
is measured in one run, so the ratios hold on any machine.
Run: python benchmarks/run_size.py
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ai4rag_nb.optimization.run_store import EvaluationResult, RunStore, put_trial

RESULT = Path(__file__).parent / "results" / "run_size.json"
CONFIGURATIONS, QUESTIONS, CHUNKS = 40, 40, 400
METRICS = ("answer_correctness", "faithfulness", "context_correctness", "token_f1", "overall_score")
LEADERBOARD = """
import contextlib, io, resource, sys
from ai4rag_nb.optimization.open_run import read_results
from ai4rag_nb.serving.commands import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["leaderboard", sys.argv[1]]) == 0
held = [list(one.results) for one in read_results(sys.argv[1]).evaluations] if sys.argv[2] == "all" else []
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def chunk(chooser: random.Random) -> str:
    """Make a passage of some 600 characters."""
    return " ".join("".join(chooser.choices("aeioulmnrst", k=chooser.randint(2, 9))) for _ in range(95))


def asked(place: int, chooser: random.Random, chunks: list[str]) -> dict[str, Any]:
    """Make what a configuration stores for one question."""
    found = chooser.sample(range(len(chunks)), chooser.randint(10, 30))
    hits = [
        {
            "document_id": f"document{number % 30}.md",
            "sequence_number": number,
            "chunk_id": f"{number:032x}",
            "start_index": 600 * number,
            "end_index": 600 * number + len(chunks[number]),
            "text": chunks[number],
            "score": chooser.random(),
            "scores": {"dense": chooser.random()},
            "evidence": chooser.random() < 0.1,
            "right_document": chooser.random() < 0.2,
        }
        for number in found
    ]
    return {
        "question_id": f"q{place}",
        "question": f"What does part {place} of the handbook say about the boiler?",
        "correct_answers": [f"{place} bars"],
        "document_keys": [f"document{place % 30}.md"],
        "answerable": True,
        "answer": chunks[found[0]][:120],
        "answer_contexts": [chunks[number] for number in found],
        "metrics": [{"name": name, "evaluator": "custom", "score": chooser.random()} for name in METRICS],
        "hits": hits,
        "timings": {"retrieval": chooser.random(), "generation": chooser.random()},
        "trace": [{"stage": "search", "hits": [], "counted": len(found), "failure": None}],
        "error": None,
        "failure": None,
    }


def trial(iteration: int, chooser: random.Random, chunks: list[str], questions: int) -> EvaluationResult:
    """Make a configuration that was evaluated."""
    rows = [asked(place, chooser, chunks) for place in range(questions)]
    means = [chooser.random() for _ in METRICS]
    metrics = [
        {
            "name": name,
            "evaluator": "custom",
            "scores": {"mean": mean, "ci_low": mean, "ci_high": mean, "n": QUESTIONS},
        }
        for name, mean in zip(METRICS, means, strict=True)
    ]
    facts = ({"chunk_size": iteration}, "completed", means[-1], {"evaluation": {"metrics": metrics}})
    return EvaluationResult(iteration, f"key{iteration}", *facts, rows, seconds=1.0)


def make_run(folder: Path, questions: int) -> int:
    """Write a run and return the bytes that its results take as JSON."""
    chooser, written = random.Random(7), 0
    chunks = [chunk(chooser) for _ in range(CHUNKS)]
    store = RunStore(folder)
    for iteration in range(CONFIGURATIONS):
        made = trial(iteration, chooser, chunks, questions)
        put_trial(store, made)
        written += len(json.dumps(made.results, ensure_ascii=False).encode())
    store.put_facts({"objective": "custom:overall_score", "state": "completed", "questions": questions})
    store.close()
    return written


def peak(folder: Path, held: str = "none") -> float:
    """Return the peak memory of a process that prints the leaderboard, in megabytes."""
    command = [sys.executable, "-c", LEADERBOARD, str(folder), held]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


def main() -> None:
    """Measure and write the results."""
    with tempfile.TemporaryDirectory() as place:
        full, empty = Path(place, "full"), Path(place, "empty")
        plain = make_run(full, QUESTIONS)
        make_run(empty, 0)
        size = (full / "run.sqlite").stat().st_size
        nothing, lazy, everything = peak(empty), peak(full), peak(full, "all")
    found = {
        "configurations": CONFIGURATIONS,
        "questions": QUESTIONS,
        "results as JSON, megabytes": round(plain / 1e6, 1),
        "run.sqlite, megabytes": round(size / 1e6, 1),
        "JSON over run.sqlite": round(plain / size, 1),
        "leaderboard, megabytes above a run without questions": round(lazy - nothing, 1),
        "all results at once, megabytes above a run without questions": round(everything - nothing, 1),
        "all results over leaderboard": round((everything - nothing) / max(lazy - nothing, 0.1), 1),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

"""Compare the native scores with unitxt: processor time of three metrics with intervals, and the difference.

Run `python benchmarks/evaluation.py [--save]`. The shared set `squad` is found through AI4RAG_NB_DATA
(`../shared/data` by default). Ratios and counts are kept, never seconds, since those belong to one machine.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ai4rag_nb.evaluation.evaluation_data import EvaluationData
from ai4rag_nb.evaluation.metrics import Metrics
from ai4rag_nb.evaluation.overall_score import metric_scores, question_values
from ai4rag_nb.evaluation.unitxt_evaluator import UnitxtEvaluator

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "evaluation.json"
THREE = (Metrics.FAITHFULNESS, Metrics.ANSWER_CORRECTNESS, Metrics.CONTEXT_CORRECTNESS)
CONTEXTS, CHARACTERS, REPEATS = 5, 800, 5


def real_rows(count: int) -> list[EvaluationData]:
    """Answer `count` questions of the set from pieces of its documents, the same ones on every run."""
    chosen = random.Random(64)
    records = json.loads((DATA / "squad" / "benchmark.json").read_text(encoding="utf-8"))
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in (DATA / "squad" / "documents").glob("*.md")
    }
    rows = []
    for number in range(count):
        record = records[number % len(records)]
        keys = record["correct_answer_document_keys"]
        ids = [keys[0], *chosen.choices(sorted(texts), k=CONTEXTS - 1)]
        chosen.shuffle(ids)
        starts = [chosen.randrange(max(1, len(texts[name]) // CHARACTERS)) * CHARACTERS for name in ids]
        contexts = [texts[name][start : start + CHARACTERS] for name, start in zip(ids, starts, strict=True)]
        answer = chosen.choice([record["correct_answers"][0], contexts[0][:120], contexts[1][:40]])
        rows.append(
            EvaluationData(
                record["question"], answer, contexts, ids, record["correct_answers"], keys, f"q{number}"
            )
        )
    return rows


def processor_time(work: Callable[[], Any]) -> float:
    """Give the least processor time of a few runs, in seconds."""
    taken = []
    for _ in range(REPEATS):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken)


def compare(count: int) -> dict[str, float | int]:
    """Compare both ways of scoring on `count` questions."""
    from unitxt.eval_utils import evaluate

    names = {metric: f"metrics.rag.external_rag.{metric.name}" for metric in THREE}
    rows = real_rows(count)
    plain = [row.to_dict() for row in rows]
    warm = UnitxtEvaluator()
    ours = warm.evaluate_metrics(rows, THREE)
    scored, summary = evaluate(
        [dict(row) for row in plain], list(names.values()), compute_conf_intervals=True
    )
    differences = [0.0]
    for metric, name in names.items():
        values = question_values(ours, metric).values()
        differences += [abs(value - row[name]) for value, row in zip(values, scored, strict=True)]
        scores = metric_scores(ours, metric)["scores"]
        for ending in ("ci_low", "ci_high"):
            differences.append(
                abs(scores[ending] - float(summary[name].get(f"score_{ending}", scores[ending])))
            )
    library = processor_time(
        lambda: evaluate([dict(row) for row in plain], list(names.values()), compute_conf_intervals=True)
    )
    fresh = processor_time(lambda: UnitxtEvaluator().evaluate_metrics(rows, THREE))
    known = processor_time(lambda: warm.evaluate_metrics(rows, THREE))
    return {
        "questions": count,
        "times_less_processor_time": round(library / fresh, 1),
        "times_less_with_known_texts": round(library / known, 1),
        "largest_difference": max(differences),
    }


def loaded_modules() -> int:
    """Count the modules of unitxt and of its requirements that native scoring loads."""
    code = (
        "import sys, ai4rag_nb.evaluation.overall_score\n"
        "print(sum(name.split('.')[0] in ('unitxt', 'datasets', 'scipy', 'pandas') for name in sys.modules))"
    )
    return int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def main() -> int:
    """Measure, show, and keep the result where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--questions", type=int, nargs="+", default=[25, 200, 1000, 2000])
    arguments = parser.parse_args()
    if not (DATA / "squad").is_dir():
        print(f"skipped: the shared set 'squad' is not at {DATA}; set AI4RAG_NB_DATA", file=sys.stderr)
        return 0
    result = {
        "what": "three unitxt metrics with intervals: processor time of unitxt over ours, warm",
        "contexts_a_question": CONTEXTS,
        "characters_a_context": CHARACTERS,
        "heavy_modules_loaded_by_native_scoring": loaded_modules(),
        "runs": [compare(count) for count in arguments.questions],
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if arguments.save:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

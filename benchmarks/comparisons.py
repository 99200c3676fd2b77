"""Measure paired comparisons of many configurations: sign flips, claims, intervals and shares of wins.

Run `python benchmarks/comparisons.py [--save]`. Scores are drawn, correlated by two thirds as real ones are. Kept are
counts, seconds of processor time and of the clock, and how many times less one matrix product takes than a test for
each pair by scipy with the same number of flips. The file is not called `statistics.py`: scripts of this folder
would then load it in place of Python's own module.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.evaluation.claims import chosen_leader_p_values
from ai4rag_nb.evaluation.comparisons import compare_all, share_of_wins
from ai4rag_nb.evaluation.permutation import FLIPS, sign_flip_p_values

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "comparisons.json"
REPEATS, MOST_SECONDS = 3, 0.5


def drawn_scores(questions: int, configurations: int) -> np.ndarray:
    """Draw scores of slightly different configurations, the same ones on every run."""
    generator = np.random.default_rng(64)
    hardness = generator.normal(size=(questions, 1))
    own = generator.normal(size=(questions, configurations))
    scores = 0.74 + 0.36 * (math.sqrt(0.675) * hardness + math.sqrt(0.325) * own)
    return scores - np.linspace(0, 0.1, configurations)


def seconds(work: Callable[[], Any]) -> dict[str, float]:
    """Give the least seconds of a few runs, by the clock and of the processor."""
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter(), time.process_time()
        work()
        taken.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    return {
        "seconds": round(min(t[0] for t in taken), 3),
        "processor_seconds": round(min(t[1] for t in taken), 3),
    }


def by_pair(differences: np.ndarray) -> None:
    """Test a few pairs by scipy, one at a time."""
    from scipy.stats import permutation_test

    for column in differences.T:
        permutation_test(
            (column,),
            lambda values, axis: values.mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=FLIPS,
        )


def measure(questions: int, configurations: int, group: int) -> dict[str, Any]:
    """Measure everything that a report needs, for one size."""
    scores = drawn_scores(questions, configurations)
    differences = scores[:, [0]] - scores[:, 1:]
    with_gaps = np.where(np.random.default_rng(1).random(scores.shape) < 0.03, np.nan, scores)
    clusters = [list(range(start, min(start + group, questions))) for start in range(0, questions, group)]
    named = {f"Pattern{place}": column for place, column in enumerate(scores.T.tolist())}
    flips = seconds(lambda: sign_flip_p_values(differences))
    result = {
        "questions": questions,
        "configurations": configurations,
        "flips": FLIPS,
        "sign_flips": flips,
        "claims_of_a_chosen_leader": seconds(lambda: chosen_leader_p_values(scores, 0)),
        "the_same_with_3_percent_missing": seconds(lambda: chosen_leader_p_values(with_gaps, 0)),
        "all_rows_with_intervals": seconds(lambda: compare_all(named, "Pattern0")),
        "all_rows_by_document": seconds(lambda: compare_all(named, "Pattern0", clusters)),
        "share_of_wins": seconds(lambda: share_of_wins(named)),
    }
    if differences.shape[1] >= 2:
        each = seconds(lambda: by_pair(differences[:, :2]))["processor_seconds"] / 2
        times = each * differences.shape[1] / max(flips["processor_seconds"], 1e-3)
        result["times_less_processor_time_than_scipy_by_pair"] = round(times, 1)
    result["sign_flips_within_half_a_second"] = flips["seconds"] < MOST_SECONDS
    return result


def main() -> int:
    """Measure, show, and keep the result where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--configurations", type=int, nargs="+", default=[20, 48])
    arguments = parser.parse_args()
    result = {
        "what": "paired comparisons of a leader with all other configurations",
        "questions_a_document": 6,
        "runs": [measure(arguments.questions, count, 6) for count in arguments.configurations],
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if arguments.save:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

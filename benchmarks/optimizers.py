"""Replay real grids to optimizers, and compare how soon each finds a good configuration.

A table holds every configuration of a grid with the score of every question (`make_tables.py` made them). One task is one score of one
table: an optimizer asks for a configuration and is told its mean score, so that a thousand searches take minutes. The regret after k
evaluations is the distance of the best one found to the best there is, in units of the distance from the best to the worst. Peers are
Optuna's samplers as their users call them and pyGAM as ai4rag describes its use; a configuration that a peer proposes again costs it
nothing. The second part tells an optimizer the scores of one half of the questions, and asks how good its choice is on the other half.
Run: python benchmarks/optimizers.py [--save] [--quick]
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.optimization.additive_model import believe
from ai4rag_nb.optimization.bayes_optimizer import BayesOptimizer, BayesOptSettings, measured
from ai4rag_nb.optimization.gam_optimizer import GAMOptimizer
from ai4rag_nb.optimization.greedy_optimizer import GreedyOptimizer
from ai4rag_nb.optimization.optimizer import BaseOptimizer
from ai4rag_nb.optimization.parameters import Parameter
from ai4rag_nb.optimization.random_optimizer import RandomOptimizer
from ai4rag_nb.optimization.search_space import SearchSpace
from ai4rag_nb.optimization.setting_levels import level_codes

HERE = Path(__file__).resolve().parent
TABLES, RESULT = HERE / "tables", HERE / "results" / "optimizers.json"
DEPTHS = (5, 8, 10, 16, 24)
INDEXING = ("embedding_model", "chunking_method", "chunk_size", "chunk_overlap")
GOOD = 0.05


@dataclass(frozen=True, eq=False)
class Task:
    """Hold the scores of a grid, by configuration and question."""

    name: str  # table and metric
    configurations: tuple[dict[str, Any], ...]  # the settings that vary
    scores: np.ndarray  # (configurations, questions); NaN where a question has no score

    @cached_property
    def space(self) -> SearchSpace:
        """Make the space of the grid."""
        parameters = []
        for name in self.configurations[0]:
            values = list(dict.fromkeys(one[name] for one in self.configurations))
            numbers = all(isinstance(value, int) for value in values)
            parameters.append(Parameter(name, "I" if numbers else "C", sorted(values) if numbers else values))
        return SearchSpace(parameters)

    @cached_property
    def rows(self) -> dict[int, int]:
        """Tell which row of the scores belongs to which point of the space."""
        return {self.space.index(one): row for row, one in enumerate(self.configurations)}

    @cached_property
    def values(self) -> np.ndarray:
        """Give the mean score of each point of the space."""
        return self.means(np.ones(self.scores.shape[1], dtype=bool))

    def means(
        self,
        chosen: np.ndarray,  # (questions,) which of them count
    ) -> np.ndarray:  # (points,)
        """Average over some questions."""
        means = np.nanmean(self.scores[:, chosen], axis=1)
        return np.array([means[self.rows[point]] for point in range(len(self.configurations))])


def tasks() -> Iterator[Task]:
    """Read every table; a score that does not vary is no task."""
    for file in sorted(TABLES.glob("*.json")):
        facts = json.loads(file.read_text(encoding="utf-8"))
        scores = np.load(file.with_suffix(".npz"))["scores"].astype(float)
        scores[scores < 0] = np.nan
        full = facts["configurations"]
        names = [
            n for n in full[0] if all(n in one for one in full) and len({str(one[n]) for one in full}) > 1
        ]
        configurations = tuple({name: one[name] for name in names} for one in full)
        for place, metric in enumerate(facts["metrics"]):
            task = Task(f"{file.stem}: {metric}", configurations, scores[:, :, place] / 10_000)
            if np.ptp(task.values) > 0.01:
                yield task


# ------------------------------------------------------------------------------------------------------------ searches

Searcher = Callable[
    [SearchSpace, np.ndarray, int, int], list[int]
]  # space, scores, evaluations, seed -> points


def ours(kind: type[BaseOptimizer], **settings: Any) -> Searcher:
    """Search with one of the package's optimizers."""

    def search(space: SearchSpace, values: np.ndarray, most: int, seed: int) -> list[int]:
        made = kind(None, space, kind.settings_class(max_evals=most, random_state=seed, **settings))
        made.search(lambda configuration: float(values[space.index(configuration)]))
        return [trial.point for trial in made.trials]

    return search


def optuna_sampler(name: str, **options: Any) -> Searcher:
    """Search with Optuna, called as its documentation says; what it proposes again costs nothing."""

    def search(space: SearchSpace, values: np.ndarray, most: int, seed: int) -> list[int]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        points: list[int] = []

        def objective(trial: Any) -> float:
            chosen = {p.name: trial.suggest_categorical(p.name, p.choices.values) for p in space.parameters}
            point = space.index(chosen)
            if point not in points:
                points.append(point)
            if len(points) >= most:
                trial.study.stop()
            return float(values[point])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = getattr(optuna.samplers, name)(seed=seed, **options)
            study = optuna.create_study(direction="maximize", sampler=sampler)
            study.optimize(objective, n_trials=most * 8)
        return points

    return search


def plain_gam(space: SearchSpace, values: np.ndarray, most: int, seed: int) -> list[int]:
    """Fit pyGAM's LinearGAM to codes of the values after four random points, and take its best prediction."""
    from pygam import LinearGAM

    codes = np.array([[p.choices.values.index(one[p.name]) for p in space.parameters] for one in space])
    points = list(np.random.default_rng(seed).permutation(len(values))[:4])
    while len(points) < most:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                predicted = LinearGAM().fit(codes[points], values[points]).predict(codes)
            except (ValueError, np.linalg.LinAlgError):
                predicted = np.random.default_rng(seed + len(points)).random(len(values))
        predicted[points] = -np.inf
        points.append(int(np.argmax(predicted)))
    return [int(point) for point in points]


SEARCHERS: dict[str, tuple[Searcher, int]] = {  # with how many seeds each is run
    "random": (ours(RandomOptimizer), 60),
    "BayesOptimizer": (ours(BayesOptimizer), 30),
    "GAMOptimizer": (ours(GAMOptimizer), 10),
    "GreedyOptimizer": (ours(GreedyOptimizer), 30),
    "Optuna TPE": (optuna_sampler("TPESampler"), 10),
    "Optuna TPE, multivariate": (optuna_sampler("TPESampler", multivariate=True), 10),
    "Optuna GP": (optuna_sampler("GPSampler"), 4),
    "pyGAM on codes, 4 random": (plain_gam, 6),
}


def regrets(values: np.ndarray, points: list[int]) -> np.ndarray:
    """Give the normalised regret after each evaluation."""
    best = np.maximum.accumulate(values[points])
    return (values.max() - best) / np.ptp(values)


def indexes(space: SearchSpace, points: list[int]) -> int:
    """Count the indexes that were built."""
    names = [name for name in INDEXING if name in {p.name for p in space.parameters}]
    return len({tuple(space[point][name] for name in names) for point in points})


def replay(search: Searcher, seeds: int, found: list[Task]) -> dict[str, Any]:
    """Replay every task with every seed; tasks count alike."""
    started, per_task, built, reached = time.process_time(), [], [], []
    for task in found:
        rows = []
        for seed in range(seeds):
            points = search(task.space, task.values, max(DEPTHS), seed)
            row = regrets(task.values, points)
            rows.append(np.pad(row, (0, max(DEPTHS) - len(row)), mode="edge"))
            built.append(indexes(task.space, points[:16]))
            good = np.flatnonzero(row <= GOOD)
            reached.append(int(good[0]) + 1 if len(good) else max(DEPTHS) + 1)
        per_task.append(np.array(rows))
    table = np.array(per_task)  # (tasks, seeds, evaluations)
    return {
        "searches": len(found) * seeds,
        "regret": {
            str(depth): {
                "mean": round(float(table[:, :, depth - 1].mean()), 4),
                "median": round(float(np.median(table[:, :, depth - 1])), 4),
                "p90": round(float(np.quantile(table[:, :, depth - 1], 0.9)), 4),
            }
            for depth in DEPTHS
        },
        "mean regret at 16 by task": {
            task.name: round(float(rows[:, 15].mean()), 4) for task, rows in zip(found, per_task, strict=True)
        },
        f"median evaluations to regret {GOOD}": float(np.median(reached)),
        "mean indexes built by 16": round(float(np.mean(built)), 2),
        "processor seconds a search": round((time.process_time() - started) / len(found) / seeds, 4),
    }


# --------------------------------------------------------------------------------------------- which one is the best?


def choices(found: list[Task], seeds: int) -> dict[str, Any]:
    """Compare the luckiest draw with the best by the model: searched on one half of the questions, judged on the other."""
    rows: dict[str, list[float]] = {"highest score": [], "best by the model": []}
    for task in found:
        for seed in range(seeds):
            half = np.random.default_rng(seed).permutation(task.scores.shape[1]) % 2 == 0
            seen, unseen = task.means(half), task.means(~half)
            made = BayesOptimizer(None, task.space, BayesOptSettings(max_evals=16, random_state=seed))
            made.search(lambda one, task=task, seen=seen: float(seen[task.space.index(one)]))
            by_score = max(made.trials, key=lambda trial: trial.score).point
            codes = level_codes(task.space, [trial.point for trial in made.trials])
            expected = believe(measured(task.space, made.trials, made.settings.pair_share), codes).mean
            by_model = made.trials[int(np.argmax(expected))].point
            for name, point in (("highest score", by_score), ("best by the model", by_model)):
                rows[name].append((unseen.max() - unseen[point]) / np.ptp(unseen))
    differences = np.array(rows["best by the model"]) - np.array(rows["highest score"])
    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    return {
        **{
            f"regret on unseen questions, {name}": round(float(np.mean(values)), 4)
            for name, values in rows.items()
        },
        "difference": round(float(differences.mean()), 4),
        "its standard error": round(error, 4),
        "searches": len(differences),
    }


def main() -> None:
    """Measure, print, and keep the figures where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/optimizers.json")
    parser.add_argument("--quick", action="store_true", help="a fifth of the seeds")
    parser.add_argument("--only", nargs="*", help="names of searchers")
    options = parser.parse_args()
    found = list(tasks())
    if not found:
        raise SystemExit(f"There is no table in {TABLES}. Run benchmarks/make_tables.py first.")
    results: dict[str, Any] = {
        "tasks": {task.name: list(task.scores.shape) for task in found},
        "searchers": {},
    }
    for name, (search, seeds) in SEARCHERS.items():
        if options.only and name not in options.only:
            continue
        results["searchers"][name] = replay(search, max(1, seeds // 5) if options.quick else seeds, found)
        line = {k: v["mean"] for k, v in results["searchers"][name]["regret"].items()}
        print(f"{name:28} {line}", flush=True)
    results["choice of the best"] = choices(found, 2 if options.quick else 20)
    print(json.dumps(results["choice of the best"], indent=1))
    if options.save:
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

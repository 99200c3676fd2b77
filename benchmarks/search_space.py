"""Open a space of a million raw combinations, and compare the cost with listing and filtering it.

Results are counts and ratios, which hold on any machine: how often rules are asked, and how much processor
time opening takes in units of one plain pass over the product. The regrets are those of made-up landscapes
with main effects and interactions, not of real pipelines. Run: python benchmarks/search_space.py
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ai4rag_nb.optimization.gam_optimizer import GAMOptimizer, level_codes, level_counts
from ai4rag_nb.optimization.parameters import Parameter, Rule
from ai4rag_nb.optimization.rag_space import AI4RAGSearchSpace
from ai4rag_nb.optimization.random_optimizer import RandomOptimizer
from ai4rag_nb.optimization.search_space import SearchSpace

RESULT = Path(__file__).parent / "results" / "search_space.json"
NAMES = [f"setting_{letter}" for letter in "abcdef"]
ASKED = [0]


def counted(allowed: bool) -> bool:
    """Count one question to a rule."""
    ASKED[0] += 1
    return allowed


NAMED = (
    Rule(lambda setting_a, setting_b: counted(setting_a <= setting_b), "b is below a"),
    Rule(lambda setting_c, setting_f: counted(setting_c != setting_f), "c equals f"),
    Rule(
        lambda setting_d, setting_e, setting_f: counted(setting_d + setting_e + setting_f > 3),
        "d, e, f are small",
    ),
)
WHOLE = (
    Rule(
        lambda configuration: counted(configuration["setting_a"] <= configuration["setting_b"]),
        "b is below a",
    ),
    Rule(
        lambda configuration: counted(configuration["setting_c"] != configuration["setting_f"]), "c equals f"
    ),
)


def plain(rules: tuple[Rule, ...]) -> int:
    """List and filter the product, once, as the smallest program that can."""
    kept = 0
    for values in itertools.product(range(10), repeat=len(NAMES)):
        configuration = dict(zip(NAMES, values, strict=True))
        kept += all(rule.allows(configuration) for rule in rules)
    return kept


def timed(work: Callable[[], int], repeats: int) -> tuple[int, float, int]:
    """Return the result, the median of the processor seconds, and how often rules were asked in one run."""
    seconds = []
    for _ in range(repeats):
        ASKED[0], begin = 0, time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return result, statistics.median(seconds), ASKED[0]


def opened(rules: tuple[Rule, ...]) -> dict[str, float | int | bool]:
    """Measure opening one space against the plain way."""
    parameters = [Parameter(name, "I", minimum=0, maximum=9) for name in NAMES]
    kept, seconds, asked = timed(lambda: SearchSpace(parameters, rules).combinations, 3)
    kept_plainly, seconds_plainly, asked_plainly = timed(lambda: plain(rules), 1)
    assert kept == kept_plainly
    return {
        "raw_combinations": 10 ** len(NAMES),
        "combinations": kept,
        "rule_calls": asked,
        "rule_calls_plain": asked_plainly,
        "processor_time_over_plain": round(seconds / seconds_plainly, 4),
        "opens_within_a_processor_second": seconds < 1,
    }


def regrets(landscapes: int = 20, evaluations: int = 16) -> dict[str, float]:
    """Search made-up landscapes over the default space; 0 is the optimum of each, 1 its worst point."""
    import numpy as np

    space = AI4RAGSearchSpace()
    codes, levels = level_codes(space, range(len(space))), level_counts(space)
    found: dict[str, list[float]] = {"random": [], "gam": []}
    for seed in range(landscapes):
        generator = np.random.default_rng(seed)
        worth = np.zeros(len(space))
        for column, count in enumerate(levels):
            worth += generator.exponential() * generator.normal(size=count)[codes[:, column]]
        for one, two in itertools.combinations(range(len(levels)), 2):
            worth += 0.3 * generator.normal(size=(levels[one], levels[two]))[codes[:, one], codes[:, two]]
        loss = (worth.max() - worth) / (worth.max() - worth.min())
        for name, optimizer in (("random", RandomOptimizer), ("gam", GAMOptimizer)):
            made = optimizer(
                lambda one, loss=loss: -float(loss[space.index(one)]),
                space,
                optimizer.settings_class(max_evals=evaluations, random_state=seed),
            )
            found[name].append(-made.search()["score"])
    return {name: round(statistics.mean(values), 4) for name, values in found.items()}


def main() -> None:
    """Measure and write."""
    space = AI4RAGSearchSpace()
    results = {
        "default_space": {"combinations": len(space), "notes": list(space.notes)},
        "rules_that_name_their_parameters": opened(NAMED),
        "rules_about_the_whole_configuration": opened(WHOLE),
        "made_up_landscapes_mean_regret_after_16_of_162": regrets(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

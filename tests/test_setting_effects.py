"""What settings are worth, against a Bayesian linear regression that is written out in full."""

import itertools

import numpy as np
import pytest

from ai4rag_nb.optimization.additive_model import RESTS, SCALES, AdditiveModel
from ai4rag_nb.optimization.setting_effects import drawn_worths, effect_rows, setting_table

CHOICES = {"model": ["a", "b"], "size": [64, 128, 256], "mode": ["vector", "hybrid"]}
GRID = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def explicit_columns(codes: np.ndarray, counts: list[int], pair_share: float) -> tuple[np.ndarray, int]:
    """Write out a column for each level and, scaled, for each pair of levels of two settings."""
    levels = [(setting, level) for setting, count in enumerate(counts) for level in range(count)]
    single = {one: (codes[:, one[0]] == one[1]).astype(float) for one in levels}
    pairs = [
        np.sqrt(pair_share) * single[one] * single[two]
        for one, two in itertools.combinations(levels, 2)
        if one[0] != two[0]
    ]
    return np.column_stack([*single.values(), *pairs]), len(levels)


def test_the_draws_follow_the_posterior_of_the_written_out_regression() -> None:
    chosen = [GRID[place] for place in (0, 2, 5, 7, 9, 10, 11)]
    table = setting_table(chosen)
    generator = np.random.default_rng(1)
    scores = generator.normal(0.6, 0.1, len(chosen))
    model = AdditiveModel(table.codes, scores)
    columns, levels = explicit_columns(table.codes, [len(one) for one in table.levels], model.pair_share)
    targets = (scores - scores.mean()) / scores.std()
    means, seconds, evidence = [], [], []
    for scale, rest in itertools.product(SCALES, RESTS):
        precision = columns.T @ columns / rest + np.eye(columns.shape[1]) / scale
        covariance = np.linalg.inv(precision)
        mean = covariance @ columns.T @ targets / rest
        whole = scale * columns @ columns.T + rest * np.eye(len(targets))
        evidence.append(-(np.linalg.slogdet(whole)[1] + targets @ np.linalg.solve(whole, targets)) / 2)
        means.append(mean[:levels])
        seconds.append(np.diag(covariance)[:levels] + mean[:levels] ** 2)
    weights = np.exp(np.array(evidence) - max(evidence))
    weights /= weights.sum()
    mean = weights @ np.array(means) * scores.std()
    deviation = np.sqrt(weights @ np.array(seconds) * scores.var() - mean**2)
    draws = drawn_worths(model, table.rows, draws=40_000)
    assert draws.mean(axis=0) == pytest.approx(mean, abs=0.03 * scores.std())
    assert draws.std(axis=0) == pytest.approx(deviation, rel=0.05)


def test_what_was_put_in_is_found_with_honest_intervals() -> None:
    """In two hundred made-up searches of nine trials the true effect lies in its 95 % interval at least as often."""
    inside, signs = [], []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        worths = {name: generator.normal(0, 0.05, len(values)) for name, values in CHOICES.items()}
        chosen = [GRID[place] for place in generator.permutation(len(GRID))[:9]]
        scores = [
            0.6
            + sum(worths[name][CHOICES[name].index(value)] for name, value in one.items())
            + generator.normal(0, 0.01)
            for one in chosen
        ]
        table = setting_table(chosen)
        for row in effect_rows(table, scores):
            names = table.levels[table.names.index(row["setting"])]
            places = [[str(value) for value in CHOICES[row["setting"]]].index(name) for name in names]
            of_setting = worths[row["setting"]][places]
            true = of_setting[names.index(row["value"])] - of_setting.mean()
            inside.append(row["ci_low"] <= true <= row["ci_high"])
            if abs(true) > 0.04:
                signs.append(true * row["effect"] > 0)
    assert np.mean(inside) >= 0.95
    assert len(signs) > 200 and np.mean(signs) >= 0.9


def test_the_importances_of_all_settings_make_one() -> None:
    scores = [0.5 + 0.1 * (one["model"] == "a") for one in GRID]
    rows = effect_rows(setting_table(GRID), scores)
    shares = {row["setting"]: row["importance"] for row in rows}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["model"] > 0.9 and rows[0]["setting"] == "model" and rows[0]["value"] == "a"

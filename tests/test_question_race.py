"""A race over questions drops what cannot win, and keeps its promise however often it looks."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from ai4rag_nb.optimization.question_race import (
    RacingSettings,
    betting_capital,
    chance_to_win,
    question_order,
    questions_seen,
)

RUNS = 600


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=3, max_size=6))
def test_no_pool_as_good_as_the_leader_is_dropped_too_often_in_all_of_its_orders(pool: list[float]) -> None:
    pool = pool if sum(pool) >= 0 else [-value for value in pool]
    highest = np.array([betting_capital(order, len(pool)).max() for order in itertools.permutations(pool)])
    for level in (1.5, 2, 5, 20):
        assert np.mean(highest >= level) <= 1 / level + 1e-12


def pairs(questions: int, binary: bool, worse: float, spread: float = 0.0) -> Iterator[np.ndarray]:
    """Draw the differences of configurations whose expected scores are lower by a share, give or take a spread."""
    generator = np.random.default_rng(questions + binary)
    for _ in range(RUNS):
        chances = 1 / (1 + np.exp(-(1.4 + 1.5 * generator.normal(size=questions))))
        lower = chances * (1 - worse - spread * generator.uniform(-1, 1))
        if binary:
            draws = generator.random((2, questions)) < [chances, lower]
            leader, other = draws.astype(float)
        else:
            noise = generator.normal(0, 0.15, (2, questions))
            leader, other = np.clip(noise + np.array([chances, lower]), 0, 1)
        yield other - leader


@pytest.mark.parametrize("questions", [60, 120])
@pytest.mark.parametrize("binary", [True, False], ids=["0/1 scores", "graded scores"])
class TestSimulatedRaces:
    """Scores of questions that differ in how hard they are."""

    def test_the_safe_rule_hardly_drops_what_is_as_good(self, questions: int, binary: bool) -> None:
        drops = 0
        for differences in pairs(questions, binary, 0.0):
            fair = differences if differences.sum() >= 0 else -differences
            drops += questions_seen(RacingSettings(), fair) < questions
        assert beta.ppf(0.95, drops + 1, RUNS - drops) <= 0.05

    def test_what_is_worse_by_a_quarter_costs_few_questions(self, questions: int, binary: bool) -> None:
        mean = {
            rule: np.mean(
                [questions_seen(RacingSettings(rule=rule), d) for d in pairs(questions, binary, 0.25)]
            )
            for rule in ("safe", "lean")
        }
        assert mean["lean"] < 0.35 * questions
        assert mean["lean"] < mean["safe"] < 0.7 * questions

    def test_the_lean_rule_means_what_it_says(self, questions: int, binary: bool) -> None:
        """Where all differences are about as common, of those with a chance of one in four one in four wins."""
        said, won = [], []
        for differences in pairs(questions, binary, 0.0, spread=0.4):
            chance = chance_to_win(differences[:20], questions)
            if 0.1 < chance < 0.4:
                said.append(chance)
                won.append(differences.sum() > 0)
        assert len(said) > 30
        assert abs(np.mean(said) - np.mean(won)) < 0.12


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(0, 1_000))
def test_every_question_once_and_every_kind_in_its_share(kinds: list[str], seed: int) -> None:
    order = question_order(kinds, seed)
    assert sorted(order) == list(range(len(kinds)))
    for kind in set(kinds):
        places = [place for place, number in enumerate(order) if kinds[number] == kind]
        share = len(places) / len(kinds)
        for length in range(1, len(kinds) + 1):
            shown = sum(place < length for place in places)
            assert abs(shown - share * length) < 1 + len(set(kinds)) / 2

"""Statistics against scipy, brute force and values worked out by hand; rates of false claims and of claims missed."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from ai4rag_nb.evaluation.claims import (
    CHOSEN_LEVEL,
    CLAIM_LEVEL,
    _Shuffled,
    _shuffled_measures,
    chosen_leader_p_values,
    holm,
)
from ai4rag_nb.evaluation.clustered import clustered_error, clustered_interval, grouping, statement_interval
from ai4rag_nb.evaluation.comparisons import (
    Verdict,
    compare_all,
    questions_to_settle,
    share_of_wins,
    smallest_difference,
)
from ai4rag_nb.evaluation.intervals import questions_needed
from ai4rag_nb.evaluation.permutation import sign_flip_p_value, sign_flip_p_values
from ai4rag_nb.evaluation.proportions import is_binary, wilson_interval
from ai4rag_nb.evaluation.split import question_clusters
from ai4rag_nb.foundations.errors import InputError

QUESTIONS, CONFIGURATIONS, RUNS = 200, 20, 1000
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
FEW_FLIPS, FEWER_FLIPS, HOLM_FLIPS = 250, 500, 2000  # Holm multiplies the smallest p-value that is possible


def documents_of(size: int, count: int = QUESTIONS) -> list[list[int]] | None:
    """Group the questions by documents of `size` questions; None where each stands alone."""
    if size < 2:
        return None
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def equal_scores(
    generator: np.random.Generator, size: int = 1, kind: str = "plain", count: int = QUESTIONS
) -> np.ndarray:
    """Draw scores of equally good configurations that correlate by about two thirds, as real ones do."""
    hardness = generator.normal(size=(count, 1))
    own = generator.normal(size=(count, CONFIGURATIONS))
    if size > 1:
        shared = generator.normal(size=(-(-count // size), CONFIGURATIONS))[np.arange(count) // size]
        own = math.sqrt(0.91) * own + math.sqrt(0.09) * shared
    if kind == "binary":
        return (math.sqrt(0.87) * hardness + math.sqrt(0.13) * own > -0.65).astype(float)
    scores = 0.74 + 0.36 * (math.sqrt(0.675) * hardness + math.sqrt(0.325) * own)
    return np.clip(scores, 0, 1) if kind == "bounded" else scores


def true_error(size: int, kind: str) -> float:
    """Measure the standard error of the difference of two configurations by drawing many."""
    generator = np.random.default_rng(99)
    means = np.array([equal_scores(generator, size, kind).mean(axis=0) for _ in range(400)])
    spread = (means - means.mean(axis=1, keepdims=True)).std()
    return float(spread * math.sqrt(2 * CONFIGURATIONS / (CONFIGURATIONS - 1)))


def log_odds(share: float) -> float:
    """Find the middle of normal log-odds with a deviation of 1.5 whose chances are `share` on average."""
    return float(optimize.brentq(lambda middle: (WEIGHTS * chances(middle)).sum() - share, -20, 20))


def chances(middle: float) -> np.ndarray:
    """Give the chance of a right answer at each node."""
    return special.expit(middle + 1.5 * NODES)


def four_errors_behind(middle: float, count: int) -> float:
    """Find the log-odds of a configuration that is four standard errors of a paired difference behind."""

    def missed(other: float) -> float:
        one, two = chances(middle), chances(other)
        apart = float((WEIGHTS * (one - two)).sum())
        square = float((WEIGHTS * (one * (1 - two) + two * (1 - one))).sum())
        return apart - 4 * math.sqrt((square - apart**2) / count)

    return float(optimize.brentq(missed, -20, middle - 0.01))


def right_or_wrong(generator: np.random.Generator, count: int, middles: list[float]) -> np.ndarray:
    """Draw a chance for each question, and independent answers by it."""
    odds = np.array(middles) + 1.5 * generator.normal(size=(count, 1))
    return (generator.random(odds.shape) < special.expit(odds)).astype(float)


def upper_bound(found: int, of: int) -> float:
    """Give the upper end of the exact 95 % interval of a rate (Clopper and Pearson)."""
    return float(stats.binomtest(found, of).proportion_ci(0.95, method="exact").high)


# Claims


@pytest.mark.parametrize(("size", "kind"), [(1, "plain"), (6, "bounded"), (4, "binary")])
def test_few_runs_make_a_false_claim(size: int, kind: str) -> None:
    """All configurations are equally good and the best-looking one is compared: any claim is false."""
    generator, clusters, false = np.random.default_rng(64), documents_of(size), 0
    for _ in range(RUNS):
        scores = equal_scores(generator, size, kind)
        leader = int(scores.mean(axis=0).argmax())
        found = chosen_leader_p_values(scores, leader, clusters, flips=FEWER_FLIPS)
        false += bool((found <= CHOSEN_LEVEL).any())
    assert upper_bound(false, RUNS) <= 0.07, f"{false} of {RUNS} runs"


def test_the_drawn_chances_are_as_planned() -> None:
    answers = right_or_wrong(np.random.default_rng(1), 20_000, [log_odds(0.8)] * 2)
    assert answers.mean() == pytest.approx(0.8, abs=0.01)
    behind = right_or_wrong(
        np.random.default_rng(2), 40_000, [log_odds(0.9), four_errors_behind(log_odds(0.9), 30)]
    )
    gains = behind[:, 0] - behind[:, 1]
    assert gains.mean() / (gains.std() / math.sqrt(30)) == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize("count", [20, 30, 60])
def test_few_small_sets_of_right_and_wrong_answers_make_a_false_claim(count: int) -> None:
    generator, false, middles = np.random.default_rng(64), 0, [log_odds(0.8)] * CONFIGURATIONS
    for _ in range(RUNS):
        scores = right_or_wrong(generator, count, middles)
        leader = int(scores.mean(axis=0).argmax())
        found = chosen_leader_p_values(scores, leader, flips=FEW_FLIPS)
        false += bool((found <= CHOSEN_LEVEL).any())
    assert upper_bound(false, RUNS) <= 0.07, f"{false} of {RUNS} runs"


@pytest.mark.parametrize(("count", "kind"), [(20, "bounded"), (30, "plain")])
def test_few_small_sets_make_a_false_claim(count: int, kind: str) -> None:
    generator, false = np.random.default_rng(64), 0
    for _ in range(RUNS):
        scores = equal_scores(generator, kind=kind, count=count)
        leader = int(scores.mean(axis=0).argmax())
        found = chosen_leader_p_values(scores, leader, flips=FEW_FLIPS)
        false += bool((found <= CHOSEN_LEVEL).any())
    assert upper_bound(false, RUNS) <= 0.07, f"{false} of {RUNS} runs"


@pytest.mark.parametrize("ahead", [1, 10])
@pytest.mark.parametrize("count", [20, 30, 60])
def test_right_and_wrong_answers_show_four_standard_errors(count: int, ahead: int) -> None:
    """One configuration, or half of them, is better than the rest; the claims against the rest are counted."""
    best, runs, found = log_odds(0.9), 150, 0.0
    middles = [best] * ahead + [four_errors_behind(best, count)] * (CONFIGURATIONS - ahead)
    generator = np.random.default_rng(66)
    for _ in range(runs):
        scores = right_or_wrong(generator, count, middles)
        leader = int(scores.mean(axis=0).argmax())
        claimed = chosen_leader_p_values(scores, leader, flips=FEWER_FLIPS) <= CHOSEN_LEVEL
        found += float(claimed[ahead:].mean()) if leader < ahead else 0.0
    assert found / runs >= 0.8


@pytest.mark.parametrize("count", [20, 30, 60])
def test_small_sets_show_four_standard_errors(count: int) -> None:
    generator, runs, found = np.random.default_rng(66), 150, 0.0
    for _ in range(runs):
        scores = equal_scores(generator, count=count)
        scores[:, 0] += 4 * 0.36 * math.sqrt(2 * 0.325 / count)
        leader = int(scores.mean(axis=0).argmax())
        claimed = chosen_leader_p_values(scores, leader, flips=FEWER_FLIPS) <= CHOSEN_LEVEL
        found += float(claimed[1:].mean()) if leader == 0 else 0.0
    assert found / runs >= 0.8


def test_a_naive_comparison_would_make_false_claims() -> None:
    """The simulation has teeth: without the correction most runs claim something."""
    generator, plain, corrected = np.random.default_rng(64), 0, 0
    for _ in range(100):
        scores = equal_scores(generator)
        leader = int(scores.mean(axis=0).argmax())
        differences = np.delete(scores[:, [leader]] - scores, leader, axis=1)
        p_values = sign_flip_p_values(differences, flips=HOLM_FLIPS)
        plain += bool((p_values <= CLAIM_LEVEL).any())
        corrected += min(holm(p_values.tolist())) <= CLAIM_LEVEL
    assert plain > 80
    assert corrected > 10


@pytest.mark.parametrize(("size", "kind"), [(1, "plain"), (6, "plain"), (4, "binary")])
def test_few_runs_with_a_leader_from_elsewhere_make_a_false_claim(size: int, kind: str) -> None:
    generator, clusters, false = np.random.default_rng(65), documents_of(size), 0
    for _ in range(RUNS):
        scores = equal_scores(generator, size, kind)
        p_values = sign_flip_p_values(scores[:, [0]] - scores[:, 1:], clusters, flips=HOLM_FLIPS)
        false += min(holm(p_values.tolist())) <= CLAIM_LEVEL
    assert upper_bound(false, RUNS) <= 0.07, f"{false} of {RUNS} runs"


@pytest.mark.parametrize(("size", "kind"), [(1, "plain"), (6, "bounded")])
def test_a_difference_of_four_standard_errors_is_found(size: int, kind: str) -> None:
    """One configuration is better than all others; the claims against any of them are counted."""
    generator, clusters, error = np.random.default_rng(66), documents_of(size), true_error(size, kind)
    chosen, planned, runs = 0.0, 0.0, 200
    for _ in range(runs):
        scores = equal_scores(generator, size, kind)
        scores[:, 0] += 4 * error
        leader = int(scores.mean(axis=0).argmax())
        found = chosen_leader_p_values(scores, leader, clusters, flips=FEWER_FLIPS)
        chosen += float((found[1:] <= CHOSEN_LEVEL).mean()) if leader == 0 else 0.0
        p_values = sign_flip_p_values(scores[:, [0]] - scores[:, 1:], clusters, flips=HOLM_FLIPS)
        planned += sum(p <= CLAIM_LEVEL for p in holm(p_values.tolist())) / len(p_values)
    assert chosen / runs >= 0.8
    assert planned / runs >= 0.8


def test_half_of_the_configurations_being_behind_is_found_too() -> None:
    """Ten are equally good and ten are four standard errors behind: those are found, the equal ones are not claimed."""
    generator, error = np.random.default_rng(67), true_error(1, "plain")
    found, false, runs = 0.0, 0, 200
    for _ in range(runs):
        scores = equal_scores(generator)
        scores[:, 10:] -= 4 * error
        leader = int(scores.mean(axis=0).argmax())
        claimed = chosen_leader_p_values(scores, leader, flips=FEWER_FLIPS) <= CHOSEN_LEVEL
        found += float(claimed[10:].mean())
        false += bool(claimed[:10].any())
    assert found / runs >= 0.8
    assert false / runs <= 0.08


def slow_claims(scores: np.ndarray, leader: int) -> np.ndarray:
    """Do the same by loops: every flip, every set, every pair."""
    count, size = scores.shape
    flips = [np.array(signs) for signs in itertools.product([1.0, -1.0], repeat=count)]

    def strength(one: int, other: int, signs: np.ndarray) -> float:
        gain = scores[:, one] - scores[:, other]
        return float((signs * gain).sum() / math.sqrt((gain**2).sum()))

    none = np.ones(count)
    order = sorted(
        (place for place in range(size) if place != leader), key=lambda place: strength(leader, place, none)
    )
    by_set: list[float] = []
    reached = np.zeros(len(flips))
    for step in range(1, size):
        members, leads = [leader, *order[:step]], []
        for number, signs in enumerate(flips):
            top = max(members, key=lambda place: float((signs * scores[:, place]).sum()))
            rest = [place for place in members if place != top]
            reached[number] = max(reached[number], *(abs(strength(top, place, signs)) for place in rest))
            gains = sum(scores[:, top] - scores[:, place] for place in rest)
            leads.append(float((signs * gains).sum() / math.sqrt((gains**2).sum())))
        scales = np.quantile(reached, 0.95), np.quantile(leads, 0.95)
        both = np.maximum(reached / scales[0], np.array(leads) / scales[1])
        whole = sum(scores[:, leader] - scores[:, place] for place in order[:step])
        observed = max(
            strength(leader, order[step - 1], none) / scales[0],
            float(whole.sum() / math.sqrt((whole**2).sum())) / scales[1],
        )
        far = [abs(strength(leader, order[step - 1], signs)) for signs in flips]
        alone = np.mean(np.array(far) >= abs(strength(leader, order[step - 1], none)) - 1e-9)
        by_set.append(max(float(alone), float(np.mean(both >= observed - 1e-9))))
    p_values = np.ones(size)
    for step, place in enumerate(order):
        p_values[place] = max(by_set[step:])
    return p_values


@pytest.mark.parametrize("seed", range(3))
def test_claims_are_those_of_the_slow_way(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.normal(0.5, 0.2, (8, 1)) + generator.normal(0, 0.1, (8, 4)) - [0, 0, 0.1, 0.3]
    leader = int(scores.mean(axis=0).argmax())
    assert chosen_leader_p_values(scores, leader) == pytest.approx(slow_claims(scores, leader), abs=0.009)


def test_shuffles_are_those_of_all_orders() -> None:
    """Three questions and three configurations: 216 ways to hand the scores out, counted by loops."""
    scores = np.array([[0.9, 0.5, 0.1], [0.8, 0.7, 0.3], [1.0, 0.2, 0.4]])
    ways = list(itertools.product(itertools.permutations(range(3)), repeat=3))
    dealt = [np.array([scores[row, list(way[row])] for row in range(3)]) for way in ways]

    def measures(given: np.ndarray) -> tuple[float, float]:
        front = int(given.sum(axis=0).argmax())
        gains = given[:, [front]] - given
        squares = np.sqrt((gains**2).sum(axis=0))
        ahead = given[:, front] - given.mean(axis=1)
        largest = max(float(gains[:, place].sum() / squares[place]) for place in range(3) if place != front)
        return largest, float(ahead.sum() / np.sqrt((ahead**2).sum()))

    found = np.array([measures(one) for one in dealt])
    contest = _Shuffled(scores - scores.mean(axis=1, keepdims=True), 20_000, 1)
    contest.enter(1)
    contest.enter(2)
    assert contest.scores[0] == pytest.approx((scores - scores.mean(axis=1, keepdims=True)).T, abs=1e-6)
    drawn = np.column_stack(_shuffled_measures(contest, 3))
    assert drawn[0] == pytest.approx(measures(scores), abs=1e-5)
    for measure in range(2):
        for limit in np.unique(np.round(found[:, measure], 3))[::5]:
            exact = float((found[:, measure] >= limit - 2e-3).mean())
            assert float((drawn[:, measure] >= limit - 2e-3).mean()) == pytest.approx(exact, abs=0.015)


def test_claims_depend_on_neither_order_nor_difficulty_of_questions() -> None:
    generator = np.random.default_rng(4)
    scores = equal_scores(generator, count=60)
    scores[:, 3] += 0.2
    leader = int(scores.mean(axis=0).argmax())
    found = chosen_leader_p_values(scores, leader, flips=2000)
    shuffled = generator.permutation(CONFIGURATIONS)
    again = chosen_leader_p_values(
        scores[:, shuffled], int(np.argwhere(shuffled == leader)[0, 0]), flips=2000
    )
    assert again == pytest.approx(found[shuffled], abs=0.002)
    harder = scores + generator.normal(size=(60, 1))
    assert chosen_leader_p_values(harder, leader, flips=2000) == pytest.approx(found, abs=0.002)


def test_missing_scores_only_cost_their_own_pairs() -> None:
    generator = np.random.default_rng(8)
    scores = equal_scores(generator, count=80)
    scores[:, 0] += 0.3
    before = chosen_leader_p_values(scores, 0, flips=2000)
    scores[:5, 7] = np.nan
    after = chosen_leader_p_values(scores, 0, flips=2000)
    assert (before[1:] <= CHOSEN_LEVEL).all()
    assert (after[1:] <= CHOSEN_LEVEL).all()
    scores[:, 9] = np.nan
    assert chosen_leader_p_values(scores, 0, flips=2000)[9] == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.001, 0.04, 0.02, 0.03, 0.5]) == pytest.approx([0.005, 0.09, 0.08, 0.09, 0.5])


def test_holm_needs_a_smaller_p_value_than_the_plain_test() -> None:
    assert holm([0.02, 0.6, 0.7]) == pytest.approx([0.06, 1.0, 1.0])


# Sign flips


@pytest.mark.parametrize("count", [3, 5, 8, 10])
@pytest.mark.parametrize("steps", [2, 1000])
def test_exact_sign_flips_are_those_of_scipy(count: int, steps: int) -> None:
    generator = np.random.default_rng(count)
    first, second = (np.round(generator.random((2, count)) * steps) / steps).tolist()
    reference = stats.permutation_test(
        (first, second),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert sign_flip_p_value(first, second) == pytest.approx(reference.pvalue, abs=1e-12)


def test_drawn_flips_are_near_all_flips() -> None:
    generator = np.random.default_rng(1)
    gains = generator.normal(0.1, 0.2, 16)
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=16)))
    exact = float((np.abs(signs @ gains) >= abs(gains.sum()) - 1e-12).mean())
    drawn = float(sign_flip_p_values(gains[:, None])[0])
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))
    assert drawn != exact


def test_no_p_value_is_zero() -> None:
    assert sign_flip_p_values(np.ones((200, 1)))[0] == pytest.approx(1 / 10_001)


def test_few_questions_that_differ_are_flipped_exactly() -> None:
    """7 better and 1 worse of 100: the sign test of scipy, since all differences are alike."""
    gains = np.array([1.0] * 7 + [-1.0] + [0.0] * 92)
    exact = stats.binomtest(7, 8).pvalue
    assert exact == pytest.approx(18 / 256)
    assert sign_flip_p_values(gains[:, None])[0] == pytest.approx(exact, abs=1e-12)
    both = np.column_stack([gains, np.random.default_rng(1).normal(size=100)])
    assert sign_flip_p_values(both)[0] == pytest.approx(exact, abs=1e-12)


def test_flips_by_document_are_flips_of_sums() -> None:
    generator = np.random.default_rng(2)
    gains = generator.normal(0.05, 0.2, 40)
    documents = [list(range(start, start + 4)) for start in range(0, 40, 4)]
    sums = [sum(gains[place] for place in document) for document in documents]
    far = [
        abs(sum(sign * value for sign, value in zip(signs, sums, strict=True))) >= abs(sum(sums)) - 1e-12
        for signs in itertools.product([1, -1], repeat=10)
    ]
    assert sign_flip_p_values(gains[:, None], documents)[0] == pytest.approx(sum(far) / 1024)


# Intervals


@pytest.mark.parametrize(("right", "count"), [(0, 5), (3, 5), (5, 5), (17, 20), (150, 200), (1999, 2000)])
def test_wilson_is_that_of_scipy(right: int, count: int) -> None:
    reference = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((reference.low, reference.high), abs=1e-12)
    stated = statement_interval([1] * right + [0] * (count - right))
    assert (stated.method, stated.n) == ("wilson", count)
    assert (stated.ci_low, stated.ci_high) == pytest.approx((reference.low, reference.high), abs=1e-12)


@pytest.mark.parametrize("count", [5, 25, 120, 300])
def test_bca_is_that_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).beta(3, 1, count)
    reference = stats.bootstrap(
        (values,), np.mean, n_resamples=1000, random_state=np.random.default_rng(42)
    ).confidence_interval
    stated = statement_interval([*values.tolist(), None])
    assert stated.method == "bca"
    assert (stated.ci_low, stated.ci_high) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_many_questions_take_the_interval_of_student() -> None:
    values = np.random.default_rng(3).beta(3, 1, 500)
    reference = stats.ttest_1samp(values, 0).confidence_interval()
    stated = statement_interval(values.tolist())
    assert stated.method == "t"
    assert (stated.ci_low, stated.ci_high) == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_clustered_error_leaves_out_one_group_at_a_time() -> None:
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 12, 70)
    values = generator.random(70)
    means = [values[labels != group].mean() for group in range(12)]
    centre = sum(means) / 12
    expected = math.sqrt(11 / 12 * sum((mean - centre) ** 2 for mean in means))
    assert clustered_error(values, labels) == pytest.approx(expected, abs=1e-12)
    half = stats.t.ppf(0.975, 11) * expected
    bounds = clustered_interval(values, labels)
    assert bounds == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-9)


def test_groups_from_documents_widen_the_interval_and_are_counted() -> None:
    generator = np.random.default_rng(5)
    keys = [[f"{number // 6}.md"] for number in range(120)]
    values = np.clip(0.7 + np.repeat(generator.normal(0, 0.2, 20), 6) + generator.normal(0, 0.2, 120), 0, 1)
    plain, clustered = (
        statement_interval(values.tolist(), groups) for groups in (None, question_clusters(keys))
    )
    assert clustered.counts == "120 questions in 20 groups that share documents"
    assert clustered.ci_high - clustered.ci_low > 1.4 * (plain.ci_high - plain.ci_low)
    assert (plain.mean, plain.counts) == (pytest.approx(clustered.mean), "120 questions")


def test_clustered_shares_keep_within_their_range() -> None:
    for values in ([1.0] * 60, [0.0] * 60, [1.0] * 59 + [0.0]):
        stated = statement_interval(values, documents_of(5, 60))
        assert stated.method == "clustered wilson"
        assert 0 <= stated.ci_low <= stated.mean <= stated.ci_high <= 1
        assert stated.ci_low < stated.ci_high


@pytest.mark.parametrize(("kind", "groups"), [("share", 12), ("share", 40), ("normal", 12), ("normal", 40)])
def test_clustered_intervals_hold_the_truth(kind: str, groups: int) -> None:
    generator, held, draws = np.random.default_rng(groups), 0, 600
    truth = 0.8 if kind == "share" else 0.0
    for _ in range(draws):
        labels = np.repeat(np.arange(groups), generator.choice([1, 2, 4, 6, 8], groups))
        values = 0.5 * generator.normal(size=groups)[labels] + 0.75**0.5 * generator.normal(size=len(labels))
        if kind == "share":
            values = (values < stats.norm.ppf(0.8)).astype(float)
        low, high = clustered_interval(values, labels, shares=kind == "share")
        held += low <= truth <= high
    assert 0.92 <= held / draws <= 0.985


def test_fewer_than_ten_groups_are_not_used_and_it_is_said() -> None:
    nine, ten = ([list(range(start, start + 3)) for start in range(0, size, 3)] for size in (27, 30))
    values = np.random.default_rng(6).random(30).tolist()
    stated = statement_interval(values[:27], nine)
    assert (stated.method, stated.clusters) == ("bca", 27)
    assert "9 groups, fewer than 10" in stated.note
    assert statement_interval(values, ten).note == ""
    scored_in_nine = [None] * 3 + values[3:]
    assert "9 groups" in statement_interval(scored_in_nine, ten).note


@pytest.mark.parametrize("clusters", [[[0, 1]], [[0, 1, 2], [2]], [[0, 1, 3]], [[-1, 0, 1]]])
def test_groups_that_are_no_division_are_refused(clusters: list[list[int]]) -> None:
    with pytest.raises(InputError, match="exactly one group"):
        grouping(clusters, 3)


def test_what_is_a_share() -> None:
    assert is_binary([0, 1.0, True, None, float("nan")])
    assert not is_binary([0, 1, 0.999])
    assert not is_binary([])


# Comparisons


def as_scores(matrix: np.ndarray) -> dict[str, list[float | None]]:
    return {
        f"Pattern{place}": [None if math.isnan(value) else value for value in column]
        for place, column in enumerate(matrix.T.tolist())
    }


@pytest.mark.parametrize("size", [1, 5])
def test_rows_hold_what_the_parts_say(size: int) -> None:
    generator = np.random.default_rng(9)
    matrix = equal_scores(generator, size)[:, :5] - [0, 0.01, 0.05, 0.1, 0.2]
    matrix[generator.random(matrix.shape) < 0.02] = np.nan
    clusters, scores = documents_of(size), as_scores(matrix)
    found = compare_all(scores, "Pattern0", clusters)
    claimed = chosen_leader_p_values(matrix, 0, clusters)
    plain = [sign_flip_p_value(scores["Pattern0"], scores[row.name], clusters) for row in found]
    assert [row.p_value for row in found] == pytest.approx(plain, abs=1e-12)
    assert [row.p_holm for row in found] == pytest.approx(holm(plain), abs=1e-12)
    assert [row.p_claim for row in found] == pytest.approx(claimed[1:].tolist(), abs=1e-12)
    for place, row in enumerate(found, start=1):
        differences = matrix[:, 0] - matrix[:, place]
        stated = statement_interval(differences.tolist(), clusters, differences=True)
        assert (row.mean, row.ci_low, row.ci_high) == (stated.mean, stated.ci_low, stated.ci_high)
        assert row.n == int((~np.isnan(differences)).sum())
        assert (row.verdict == Verdict.BETTER) == (row.mean > 0 and row.p_claim <= CHOSEN_LEVEL)
    assert found.beaten[-1] == "Pattern4"
    assert set(found.ties) | set(found.beaten) == set(scores) - {"Pattern0"}


def test_as_good_needs_a_narrow_interval_and_thirty_questions() -> None:
    generator = np.random.default_rng(10)
    base = generator.random(400)
    near = {"a": base.tolist(), "b": (base + generator.normal(0, 0.05, 400)).tolist()}
    assert compare_all(near, "a").rows[0].verdict == Verdict.AS_GOOD
    assert compare_all(near, "a", relevant=0.001).rows[0].verdict == Verdict.UNKNOWN
    few = {name: values[:29] for name, values in near.items()}
    assert compare_all(few, "a").rows[0].verdict == Verdict.UNKNOWN


def test_a_leader_from_elsewhere_is_judged_by_holm() -> None:
    generator = np.random.default_rng(11)
    scores = as_scores(equal_scores(generator, count=60)[:, :4] + [0, 0, 0, 0.4])
    found = compare_all(scores, "Pattern0", chosen_here=False)
    assert [row.p_claim for row in found] == [row.p_holm for row in found]
    assert found.rows[2].verdict == Verdict.WORSE
    assert compare_all(scores, "Pattern0").rows[2].verdict == Verdict.WORSE


def test_one_question_and_none_are_survived() -> None:
    for values in ([], [None], [1.0], [1.0, None]):
        found = compare_all({"a": values, "b": [None] * len(values), "c": values}, "a")
        assert [row.verdict for row in found] == [Verdict.UNKNOWN] * 2
        assert found.ties == ("b", "c")


def test_share_of_wins_is_near_all_draws() -> None:
    scores = {"a": [1.0, 0.0, 0.6], "b": [0.5, 0.5, 0.5], "c": [0.0, 1.0, 0.3]}
    wins = dict.fromkeys(scores, 0.0)
    for draw in itertools.product(range(3), repeat=3):
        means = {name: sum(values[place] for place in draw) for name, values in scores.items()}
        first = [name for name, mean in means.items() if mean >= max(means.values()) - 1e-9]
        for name in first:
            wins[name] += 1 / len(first) / 27
    assert share_of_wins(scores) == pytest.approx(wins, abs=0.02)


def test_smallest_difference_and_questions_needed_are_each_others_inverse() -> None:
    for count in (10, 77, 400):
        assert questions_needed(smallest_difference(0.3, count) * (1 + 1e-9), 0.3) == count


def test_no_number_of_questions_is_below_what_sign_flips_can_show() -> None:
    """Of n questions that are all better 2 flips of 2 ** n reach as far."""
    for comparisons in (1, 2, 19):
        count = questions_to_settle(1.0, 0.001, comparisons)
        assert 2 / 2**count <= CHOSEN_LEVEL / comparisons < 2 / 2 ** (count - 1)
    assert questions_to_settle(0.03, 0.21, 1, 0.05) == questions_needed(0.03, 0.21)


def test_wins_are_counted_whatever_the_last_digit_says() -> None:
    row = compare_all({"a": [0.1 + 0.2, 0.5, 0.2, None], "b": [0.3, 0.4, 0.9, 1.0]}, "a").rows[0]
    assert (row.wins, row.ties, row.losses) == (1, 1, 1)
    equal = compare_all({"a": [0.6, 0.8, 0.3], "b": [0.5, 0.7, 0.2]}, "a").rows[0]
    assert equal.ci_low == equal.ci_high == equal.mean == 0.1

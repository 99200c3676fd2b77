"""One contract for every optimizer, and what the additive model owes beyond it."""

import itertools
import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.errors import (
    FailedIterationError,
    InputError,
    SearchSpaceError,
    StoppedError,
)
from ai4rag_nb.foundations.events import EventBus, StopFlag
from ai4rag_nb.optimization import gam_optimizer
from ai4rag_nb.optimization.bayes_optimizer import BayesOptimizer
from ai4rag_nb.optimization.gam_optimizer import GAMOptimizer, GAMOptSettings, level_codes, level_counts
from ai4rag_nb.optimization.greedy_optimizer import GreedyOptimizer
from ai4rag_nb.optimization.grid_optimizer import GridOptimizer
from ai4rag_nb.optimization.optimizer import BaseOptimizer, get_optimizer, optimizer_class, register_optimizer
from ai4rag_nb.optimization.optuna_optimizer import OptunaOptimizer
from ai4rag_nb.optimization.parameters import Parameter, Rule
from ai4rag_nb.optimization.rag_space import AI4RAGSearchSpace
from ai4rag_nb.optimization.random_optimizer import RandomOptimizer, RandomOptSettings
from ai4rag_nb.optimization.run_store import Candidate, EvaluationResult, RunStore, get_trials
from ai4rag_nb.optimization.search import Search, run_search, take_up
from ai4rag_nb.optimization.search_space import SearchSpace
from ai4rag_nb.optimization.trials import OptimizerSettings


class Stubborn(BaseOptimizer):
    """An optimizer that always wants the same points, to show what the base sees to."""

    def propose(self, n: int) -> list[int]:
        last = self.search_space.combinations - 1
        return [min(3, last), min(3, last), 0]


class TwoAtOnce(GAMOptimizer):
    """The additive model with two evaluations between two fits, and a short random phase."""

    class Settings(GAMOptSettings):
        """Defaults of the variant."""

        def __init__(self, **values: Any) -> None:
            super().__init__(**{"n_random_nodes": 2, "evals_per_trial": 3, **values})

    settings_class: ClassVar[type[OptimizerSettings]] = Settings


SPACE = AI4RAGSearchSpace()
SMALL = SearchSpace(
    [
        Parameter("method", "C", ["a", "b"]),
        Parameter("size", "I", [1, 2, 3]),
        Parameter("weight", "R", [0.1, 0.5], condition={"method": ["b"]}),
    ],
    [Rule(lambda method, size: (method, size) != ("a", 3), "a is never 3")],
)


OPTIMIZERS = [
    *(RandomOptimizer, GridOptimizer, GreedyOptimizer, GAMOptimizer, BayesOptimizer, OptunaOptimizer),
    *(Stubborn, TwoAtOnce),
]


def score_of(configuration: Mapping[str, Any]) -> float:
    """Score a configuration of any space, repeatably and with interactions."""
    generator = random.Random(repr(sorted((name, str(value)) for name, value in configuration.items())))
    main = sum(len(str(value)) / (3 + len(name)) for name, value in configuration.items())
    return main + generator.random() / 4


def often_failing(configuration: Mapping[str, Any]) -> float | None:
    """Fail for a third of the configurations, in all the ways an objective can fail."""
    score = score_of(configuration)
    kind = int(score * 1_000) % 12
    if kind == 0:
        raise FailedIterationError("the store is away")
    if kind == 1:
        raise RuntimeError("unforeseen")
    return {2: None, 3: float("nan")}.get(kind, score)


def run(optimizer: BaseOptimizer, objective: Any = score_of) -> list[dict[str, Any]]:
    """Search to the end and return the evaluations."""
    optimizer.search(objective)
    return optimizer.evaluations


def keys(space: SearchSpace, evaluations: list[dict[str, Any]]) -> list[str]:
    return [space.key(one["config"]) for one in evaluations]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
class TestContract:
    """What every optimizer promises."""

    def make(
        self, optimizer: type[BaseOptimizer], space: SearchSpace = SPACE, **values: Any
    ) -> BaseOptimizer:
        return optimizer(score_of, space, optimizer.settings_class(**values))

    def test_no_point_twice_and_the_budget_holds(self, optimizer: type[BaseOptimizer]) -> None:
        evaluations = run(self.make(optimizer, max_evals=30))
        assert len(evaluations) == 30 == len(set(keys(SPACE, evaluations)))
        assert all(one["config"] in SPACE for one in evaluations)

    def test_defaults(self, optimizer: type[BaseOptimizer]) -> None:
        made = optimizer(score_of, SPACE)
        assert (made.settings.max_evals, made.settings.random_state) == (12, 64)
        assert len(run(made)) == 12

    def test_ends_when_the_space_is_exhausted(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, SMALL, max_evals=500)
        evaluations = run(made)
        assert sorted(keys(SMALL, evaluations)) == sorted(SMALL.key(one) for one in SMALL)
        assert made.ask() == made.ask(5) == [] and made.finished and made.remaining == 0
        assert any("max_evals 500 is above the 8 combinations" in note for note in made.notes)
        assert made.best()["score"] == max(map(score_of, SMALL))

    def test_a_space_of_one(self, optimizer: type[BaseOptimizer]) -> None:
        single = SearchSpace([Parameter("size", "I", [1])])
        assert run(self.make(optimizer, single)) == [{"config": {"size": 1}, "score": score_of({"size": 1})}]

    def test_failures_use_the_budget_and_are_no_scores(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, max_evals=40)
        evaluations = run(made, often_failing)
        assert len(evaluations) == 40 == len(set(keys(SPACE, evaluations)))
        failed = [one for one in evaluations if one["score"] is None]
        assert failed and sum(made.reasons.values()) == len(failed)
        assert set(made.reasons) <= {"the store is away", "RuntimeError: unforeseen", "no score"}
        assert made.best()["score"] == max(one["score"] for one in evaluations if one["score"] is not None)
        assert set(made.trials.scores().values()) == {one["score"] for one in evaluations} - {None}

    def test_all_failing_names_the_reasons(self, optimizer: type[BaseOptimizer]) -> None:
        def failing(configuration: Mapping[str, Any]) -> float:
            raise FailedIterationError("quota" if configuration["search_mode"] == "vector" else "no keywords")

        made = self.make(optimizer, max_evals=9)
        with pytest.raises(FailedIterationError, match=r"None of the 9 evaluations .* \(\d\)") as caught:
            made.search(failing)
        assert f"no keywords ({made.reasons['no keywords']})" in caught.value.remedy
        assert len(made.evaluations) == 9

    def test_a_stop_is_no_failure(self, optimizer: type[BaseOptimizer]) -> None:
        def stopping(configuration: Mapping[str, Any]) -> float:
            raise StoppedError("stopped")

        made = self.make(optimizer)
        with pytest.raises(StoppedError):
            made.search(stopping)
        assert made.evaluations == []

    def test_same_seed_same_sequence(self, optimizer: type[BaseOptimizer]) -> None:
        one, two = (run(self.make(optimizer, random_state=7)) for _ in range(2))
        assert one == two

    def test_another_seed_another_sequence(self, optimizer: type[BaseOptimizer]) -> None:
        sequences = {tuple(keys(SPACE, run(self.make(optimizer, random_state=seed)))) for seed in range(5)}
        fewest = {GridOptimizer: 1, GreedyOptimizer: 3}  # nothing is drawn, or only the beginning
        assert len(sequences) >= fewest.get(optimizer, 5)

    def test_batches_differ(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, max_evals=24)
        seen: list[str] = []
        for size in (3, 1, 5, 8, 4, 9):
            batch = made.ask(size)
            seen += [SPACE.key(one) for one in batch]
            for configuration in reversed(batch):
                made.tell(configuration, score_of(configuration))
        assert len(seen) == 24 == len(set(seen))
        assert made.ask(0) == made.ask(-1) == []

    def test_waiting_proposals_are_part_of_the_budget(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, max_evals=5)
        first = made.ask(3)
        assert len(made.ask(10)) == 2 and made.ask() == [] and not made.finished
        made.withdraw(first[0])
        assert len(made.ask(10)) == 1
        with pytest.raises(FailedIterationError, match="Look at the objective"):
            made.best()

    @pytest.mark.parametrize("objective", [score_of, often_failing])
    def test_resumption_after_any_evaluation(self, optimizer: type[BaseOptimizer], objective: Any) -> None:
        whole = run(self.make(optimizer, max_evals=20), objective)
        for done in range(20):
            resumed = self.make(optimizer, max_evals=20)
            for one in whole[:done]:
                resumed.tell(SPACE.labels(one["config"]), one["score"])
            assert resumed.ask() == [whole[done]["config"]], f"after {done} evaluations"

    def test_resumed_search_ends_like_the_uninterrupted_one(self, optimizer: type[BaseOptimizer]) -> None:
        whole = run(self.make(optimizer, max_evals=15))
        resumed = self.make(optimizer, max_evals=15)
        for one in whole[:7]:
            resumed.tell(one["config"], one["score"])
        assert run(resumed) == whole

    def test_what_was_told_unasked_is_not_proposed(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, SMALL, max_evals=8)
        told = [SMALL[number] for number in (0, 3, 5)]
        for configuration in told:
            made.tell({**configuration, "weight": configuration.get("weight", 0)}, 0.1)
        proposed = [SMALL.key(one["config"]) for one in run(made)[3:]]
        assert len(proposed) == 5 and not set(proposed) & {SMALL.key(one) for one in told}

    def test_known_observations_cost_nothing(self, optimizer: type[BaseOptimizer]) -> None:
        known = [{"config": SMALL[number], "score": score_of(SMALL[number])} for number in range(5)]
        known += [{"config": SMALL[5], "score": None}, {"config": {"method": "c", "size": 1}, "score": 1.0}]
        made = optimizer(score_of, SMALL, optimizer.settings_class(max_evals=6), known_observations=known)
        assert sum("A known observation is not used" in note for note in made.notes) == 1
        evaluations = run(made)
        assert len(evaluations) == 2 and made.best()["score"] == max(
            score_of(SMALL[n]) for n in (0, 1, 2, 3, 4, 6, 7)
        )
        everything = [{"config": one, "score": 0.5} for one in SMALL]
        full = optimizer(score_of, SMALL, known_observations=everything)
        assert full.search()["score"] == 0.5 and full.evaluations == []

    def test_a_lucky_score_does_not_stay_best(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer)
        lucky, steady = SPACE[0], SPACE[1]
        for configuration, score in ((lucky, 0.9), (steady, 0.6), (lucky, 0.1)):
            made.tell(configuration, score)
        assert made.best() == {**steady, "score": 0.6}

    def test_equal_scores(self, optimizer: type[BaseOptimizer]) -> None:
        assert len(set(keys(SPACE, run(self.make(optimizer, max_evals=20), lambda configuration: 1.0)))) == 20

    @pytest.mark.parametrize("size", [1e-300, 1e300, -1e12])
    def test_scores_of_any_size(self, optimizer: type[BaseOptimizer], size: float) -> None:
        assert len(run(self.make(optimizer), lambda configuration: size * score_of(configuration))) == 12

    def test_huge_space_begins_at_once(self, optimizer: type[BaseOptimizer]) -> None:
        many = [Parameter(f"setting_{letter}", "I", minimum=0, maximum=9) for letter in "abcdef"]
        huge = SearchSpace(many, [Rule(lambda setting_a, setting_b: setting_a <= setting_b, "b below a")])
        evaluations = run(self.make(optimizer, huge, max_evals=10), lambda one: float(sum(one.values())))
        assert len(set(keys(huge, evaluations))) == 10

    def test_workers_share_an_optimizer(self, optimizer: type[BaseOptimizer]) -> None:
        made = self.make(optimizer, max_evals=40)
        before = threading.active_count()

        def work() -> None:
            while batch := made.ask():
                made.tell(batch[0], score_of(batch[0]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: work(), range(4)))
        assert len(made.evaluations) == 40 == len(set(keys(SPACE, made.evaluations)))
        assert threading.active_count() <= before

    def test_an_objective_may_spoil_what_it_is_given(self, optimizer: type[BaseOptimizer]) -> None:
        def spoiling(configuration: dict[str, Any]) -> float:
            score = score_of(configuration)
            configuration.clear()
            return score

        assert len(set(keys(SPACE, run(self.make(optimizer), spoiling)))) == 12

    def test_configurations_of_other_spaces_are_refused(self, optimizer: type[BaseOptimizer]) -> None:
        with pytest.raises(SearchSpaceError, match="is no parameter of this space"):
            self.make(optimizer).tell({"chunk_sise": 64}, 0.5)

    @pytest.mark.parametrize("observation", [{}, {"config": {}}, "config", {"score": 1}])
    def test_bad_observations(self, optimizer: type[BaseOptimizer], observation: Any) -> None:
        with pytest.raises(InputError, match="is no known observation"):
            optimizer(score_of, SPACE, known_observations=[observation])

    @pytest.mark.parametrize(
        ("name", "value"), [("max_evals", 0), ("max_evals", 2.5), ("max_evals", True), ("random_state", "a")]
    )
    def test_bad_settings(self, optimizer: type[BaseOptimizer], name: str, value: Any) -> None:
        with pytest.raises(InputError, match=name):
            optimizer.settings_class(**{name: value})


# ------------------------------------------------------------------------------------------------ the additive model


def test_random_phase_counts_successes_only() -> None:
    optimizer = GAMOptimizer(None, SPACE, GAMOptSettings(max_evals=30))
    chance = RandomOptimizer(None, SPACE, RandomOptSettings(max_evals=30)).ask(30)
    for number, expected in enumerate(chance[:9]):
        (configuration,) = optimizer.ask()
        assert configuration == expected
        optimizer.tell(configuration, None if number < 6 else score_of(configuration))
    assert gam_optimizer.round_history(optimizer.trials, optimizer.settings) is None
    (configuration,) = optimizer.ask()
    optimizer.tell(configuration, 0.5)
    assert gam_optimizer.round_history(optimizer.trials, optimizer.settings) == optimizer.trials


def test_failed_trials_are_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[tuple[int, list[float]]] = []
    original = gam_optimizer.additive_prediction

    def spy(observed: np.ndarray, scores: np.ndarray, *rest: Any) -> np.ndarray:
        fitted.append((len(observed), scores.tolist()))
        return original(observed, scores, *rest)

    monkeypatch.setattr(gam_optimizer, "additive_prediction", spy)
    optimizer = GAMOptimizer(often_failing, SPACE, GAMOptSettings(max_evals=25))
    optimizer.search()
    succeeded = [one["score"] for one in optimizer.evaluations if one["score"] is not None]
    assert len(succeeded) < 25
    assert max(rows for rows, _ in fitted) <= len(succeeded)
    assert all(np.isfinite(scores).all() and len(scores) == rows for rows, scores in fitted)


def test_evaluations_between_two_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    original = gam_optimizer.additive_prediction

    def spy(observed: np.ndarray, *rest: Any) -> np.ndarray:
        fits.append(len(observed))
        return original(observed, *rest)

    monkeypatch.setattr(gam_optimizer, "additive_prediction", spy)
    GAMOptimizer(score_of, SPACE, GAMOptSettings(max_evals=14, evals_per_trial=5)).search()
    assert fits == [4, 9]


def test_a_model_that_cannot_be_fitted_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> np.ndarray:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(gam_optimizer, "additive_prediction", failing)
    optimizer = GAMOptimizer(score_of, SPACE)
    assert len(run(optimizer)) == 12
    assert any("SVD did not converge" in note for note in optimizer.notes)


@pytest.mark.parametrize(("max_evals", "loaded"), [(4, []), (5, ["pygam"])])
def test_the_library_is_loaded_ahead_where_it_will_be_needed(
    max_evals: int, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(gam_optimizer.importlib, "import_module", names.append)
    space = SearchSpace([Parameter("x", "I", minimum=0, maximum=9)])
    GAMOptimizer(None, space, GAMOptSettings(max_evals=max_evals, n_random_nodes=4)).load_ahead()
    assert names == loaded


class Loading(RandomOptimizer):
    """An optimizer that cannot load what it wants."""

    def load_ahead(self) -> None:
        order.append(threading.current_thread().name)
        loaded.set()
        raise ImportError("it is not installed")


order: list[str] = []
loaded = threading.Event()


def test_a_search_loads_beside_the_first_trial_and_once(tmp_path: Path) -> None:
    order.clear()
    loaded.clear()

    def attempt(candidate: Candidate) -> EvaluationResult:
        assert loaded.wait(60)
        order.append(candidate.name)
        return EvaluationResult(candidate.iteration, candidate.key, dict(candidate.labels), "completed", 0.5)

    space = SearchSpace([Parameter("x", "I", minimum=0, maximum=2)])
    for again in range(2):
        optimizer = Loading(None, space, RandomOptSettings(max_evals=3))
        with closing(RunStore(tmp_path)) as store:
            prepare = partial(order.append, "prepared")
            search = Search(optimizer, space, store, attempt, EventBus(()), StopFlag(), 1, prepare)
            run_search(search, take_up(search))
        assert order == ["prepared", "ai4rag-ahead_0", "Pattern1", "Pattern2", "Pattern3"], again
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ai4rag-ahead")]


def test_what_always_fails_is_left_alone() -> None:
    """Half of the space fails; after the random phase a few tries are enough to learn it."""
    for seed in range(6):
        optimizer = GAMOptimizer(
            lambda one: score_of(one) if one["chunking_method"] == "recursive" else None,
            SPACE,
            GAMOptSettings(max_evals=24, random_state=seed),
        )
        optimizer.search()
        assert sum(one["score"] is None for one in optimizer.evaluations[12:]) <= 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 161), st.one_of(st.none(), st.floats(-1, 1))),
        max_size=12,
        unique_by=lambda one: one[0],
    ),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_any_history_gives_fresh_proposals(
    history: list[tuple[int, float | None]], nodes: int, batch: int
) -> None:
    optimizer = GAMOptimizer(None, SPACE, GAMOptSettings(max_evals=50, n_random_nodes=nodes))
    for point, score in history:
        optimizer.tell(SPACE[point], score)
    proposed = [SPACE.index(one) for one in optimizer.ask(batch)]
    assert len(set(proposed)) == batch and not set(proposed) & {point for point, _ in history}
    assert optimizer.notes == []


@pytest.mark.parametrize(
    "parameters",
    [
        [Parameter("only", "C", ["a", "b", "c"])],
        [Parameter("fixed", "C", ["a"]), Parameter("flag", "B")],
        [Parameter("fine", "I", minimum=0, maximum=500)],
        [Parameter("flag", "B"), Parameter("never", "I", [1, 2], condition={"flag": ["no"]})],
        [
            Parameter("flag", "B"),
            Parameter("deep", "R", minimum=0, maximum=1, step=0.01, condition={"flag": [True]}),
        ],
        [
            Parameter("size", "I", [4, 8]),
            Parameter("part", "I", {4: [0, 1], 8: [0, 2, 4]}, depends_on="size"),
        ],
    ],
)
def test_spaces_of_every_kind(parameters: list[Parameter]) -> None:
    space = SearchSpace(parameters)
    optimizer = GAMOptimizer(
        lambda one: sum(map(hash, map(str, one.values()))) % 7, space, GAMOptSettings(n_random_nodes=2)
    )
    evaluations = run(optimizer)
    assert len({space.key(one["config"]) for one in evaluations}) == min(12, len(space)) and not [
        note for note in optimizer.notes if "could not be fitted" in note
    ]
    codes = level_codes(space, range(len(space)))
    assert codes.min(initial=0) >= 0 and (codes < level_counts(space)).all()


def test_large_space_is_sampled_around_the_best() -> None:
    many = [Parameter(f"setting_{letter}", "I", minimum=0, maximum=9) for letter in "abcdef"]
    space = SearchSpace(many)
    target = GAMOptSettings(max_evals=40, candidates=500)
    optimizer = GAMOptimizer(lambda one: -float(sum(abs(value - 7) for value in one.values())), space, target)
    chance = RandomOptimizer(optimizer.objective_function, space, RandomOptSettings(max_evals=40))
    assert optimizer.search()["score"] > chance.search()["score"]


def regret(optimizer: type[BaseOptimizer], seed: int) -> float:
    """Search a made-up landscape of main effects and interactions over the default space; 0 is the optimum."""
    generator = np.random.default_rng(seed)
    codes, levels = level_codes(SPACE, range(len(SPACE))), level_counts(SPACE)
    worth = np.zeros(len(SPACE))
    for column, count in enumerate(levels):
        worth += generator.exponential() * generator.normal(size=count)[codes[:, column]]
    for one, two in itertools.combinations(range(len(levels)), 2):
        worth += 0.3 * generator.normal(size=(levels[one], levels[two]))[codes[:, one], codes[:, two]]
    worth = (worth.max() - worth) / (worth.max() - worth.min())
    made = optimizer(
        lambda one: -worth[SPACE.index(one)], SPACE, optimizer.settings_class(max_evals=16, random_state=seed)
    )
    return -made.search()["score"]


def test_better_than_chance() -> None:
    """Mean normalised regret after 16 of 162 evaluations, over ten made-up landscapes."""
    additive, chance = (
        np.mean([regret(one, seed) for seed in range(10)]) for one in (GAMOptimizer, RandomOptimizer)
    )
    assert additive < chance / 2


# ------------------------------------------------------------------------------------------------- optimizers by name


def test_names() -> None:
    assert optimizer_class("random") is RandomOptimizer and optimizer_class("gam") is GAMOptimizer
    assert isinstance(get_optimizer("random", None, SPACE, {"max_evals": 3}), RandomOptimizer)
    assert isinstance(get_optimizer(None, None, SPACE, RandomOptSettings()), RandomOptimizer)
    assert isinstance(get_optimizer(None, None, SPACE, GAMOptSettings()), GAMOptimizer)
    assert isinstance(get_optimizer(None, None, SPACE), GAMOptimizer)
    for name in ("random", "grid", "greedy", "gam", "bayes", "optuna"):
        made = get_optimizer(name, None, SPACE)
        assert type(get_optimizer(None, None, SPACE, made.settings)) is type(made) is optimizer_class(name)
    with pytest.raises(InputError, match="Did you mean 'gam'"):
        get_optimizer("gams", None, SPACE)
    with pytest.raises(InputError, match=r"'n_random_node' is no setting .* Did you mean 'n_random_nodes'"):
        get_optimizer("gam", None, SPACE, {"n_random_node": 3})
    with pytest.raises(InputError, match="are no settings of 'gam'"):
        get_optimizer("gam", None, SPACE, RandomOptSettings())
    with pytest.raises(InputError, match="is the name of another optimizer"):
        register_optimizer("gam", Stubborn)


def test_own_optimizer_by_name() -> None:
    register_optimizer("stubborn for tests", Stubborn)
    assert isinstance(get_optimizer("stubborn for tests", None, SPACE), Stubborn)


# ------------------------------------------------------------------------------------- optimizers that break the rules


def own(**methods: Any) -> type[RandomOptimizer]:
    """Make an optimizer in which some methods are written anew."""
    return type("Homemade", (RandomOptimizer,), methods)


def searched(folder: Path, optimizer: BaseOptimizer, batch: int = 1) -> list[str]:
    """Search a run folder and give the names of what it holds then."""

    def attempt(candidate: Candidate) -> EvaluationResult:
        return EvaluationResult(
            candidate.iteration, candidate.key, dict(candidate.labels), "completed", score=0.5
        )

    with closing(RunStore(folder)) as store:
        search = Search(optimizer, SMALL, store, attempt, EventBus(), StopFlag(), batch)
        try:
            run_search(search, take_up(search))
        finally:
            names = [trial.name for trial in get_trials(store)]
    return names


@pytest.mark.parametrize(
    "proposed", [None, 5, "12", [10**6], ["a"], [{"x": 1}], [-1, 5], [1.5], [True], [None], [np.float64(1.0)]]
)
def test_points_that_are_none_are_refused_by_name(proposed: Any, tmp_path: Path) -> None:
    made = own(propose=lambda self, n: proposed)(None, SMALL, RandomOptSettings(max_evals=3))
    with pytest.raises(InputError, match=r"optimizer Homemade proposed .*whole numbers from 0 to"):
        searched(tmp_path / "run", made)
    with pytest.raises(InputError, match="optimizer Homemade proposed"):
        own(propose=lambda self, n: proposed)(score_of, SMALL).search()
    sound = RandomOptimizer(None, SMALL, RandomOptSettings(max_evals=3))
    assert searched(tmp_path / "run", sound) == ["Pattern1", "Pattern2", "Pattern3"]


@pytest.mark.parametrize("given", ["abc", None, 7, {"x": 1}, [None], ["a"], [{"x": 1}], [SMALL[0], SMALL[1]]])
def test_configurations_that_are_none_are_refused_by_name(given: Any, tmp_path: Path) -> None:
    made = own(ask=lambda self, n=1: given)
    with pytest.raises(InputError, match="optimizer Homemade returned"):
        searched(tmp_path / "run", made(None, SMALL))
    with pytest.raises(InputError, match="optimizer Homemade returned"):
        made(score_of, SMALL).search()


@pytest.mark.parametrize("method", ["ask", "propose", "tell"])
def test_an_error_inside_is_blamed_on_the_optimizer(method: str, tmp_path: Path) -> None:
    def broken(self: Any, *arguments: Any, **more: Any) -> Any:
        raise ZeroDivisionError("oh")

    made = own(**{method: broken})(None, SMALL)
    with pytest.raises(InputError, match=f"Homemade failed in `{method}`: ZeroDivisionError: oh.*is kept"):
        searched(tmp_path / "run", made)


def test_a_repeated_configuration_costs_nothing(tmp_path: Path) -> None:
    """One point for ever: paid for once, and refused when it comes again."""
    made = own(ask=lambda self, n=1: [SMALL[0]])
    with pytest.raises(InputError, match=r"Homemade returned .* from `ask` a second time"):
        searched(tmp_path / "run", made(None, SMALL, RandomOptSettings(max_evals=3)))
    with closing(RunStore(tmp_path / "run", read_only=True)) as store:
        assert [trial.name for trial in get_trials(store)] == ["Pattern1"]
    with pytest.raises(InputError, match="a second time"):
        made(score_of, SMALL, RandomOptSettings(max_evals=3)).search()


@pytest.mark.parametrize("batch", [1, 2])
def test_the_budget_holds_against_an_optimizer_that_goes_on(batch: int, tmp_path: Path) -> None:
    def endless(self: Any, n: int = 1) -> list[dict[str, Any]]:
        self.place = getattr(self, "place", -n) + n
        return [SMALL[point] for point in range(self.place, self.place + n)]

    made = own(ask=endless)
    for budget, names in ((3, 3), (3, 3), (5, 5)):
        done = searched(tmp_path / "run", made(None, SMALL, RandomOptSettings(max_evals=budget)), batch)
        assert len(done) == names, budget
    alone = made(score_of, SMALL, RandomOptSettings(max_evals=3))
    alone.search()
    assert len(alone.evaluations) == 3


@pytest.mark.parametrize("endless", [lambda: iter(int, 1), lambda: itertools.cycle([1, 2])])
def test_points_without_end_hold_no_search(endless: Any) -> None:
    made = own(propose=lambda self, n: endless())(score_of, SMALL, RandomOptSettings(max_evals=6))
    made.search()
    assert len(set(keys(SMALL, made.evaluations))) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "5 is no class of optimizers"),
        (None, "None is no class"),
        (dict, "dict is no class of optimizers"),
        (RandomOptimizer(None, SMALL), "is no class of optimizers"),
        (BaseOptimizer, "BaseOptimizer lacks propose"),
        (own(settings_class=None), "its settings_class is None"),
        (own(settings_class=dict), "its settings_class is <class 'dict'>"),
        (own(__init__=lambda self: None), "Homemade cannot be made: .*objective_function, search_space"),
    ],
)
def test_what_cannot_work_is_not_registered(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        register_optimizer("cannot work", given)
    with pytest.raises(InputError, match="There is no optimizer 'cannot work'"):
        get_optimizer("cannot work", None, SMALL)
    assert isinstance(get_optimizer(None, None, SMALL, RandomOptSettings()), RandomOptimizer)


def test_an_optimizer_that_is_not_complete_is_named() -> None:
    register_optimizer("half made", own(__init__=lambda self, *given, **named: None))
    with pytest.raises(InputError, match=r"Homemade is not complete.*super\(\).__init__"):
        get_optimizer("half made", None, SMALL, {"max_evals": 3})
    for name in ("", 5, None):
        with pytest.raises(InputError, match="is no name of an optimizer"):
            register_optimizer(name, RandomOptimizer)

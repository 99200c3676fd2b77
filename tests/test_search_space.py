"""The search space against brute force, its canonical forms, the RAG defaults, and what it refuses."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.overall_score import default_evaluators
from ai4rag_nb.foundations.errors import InputError, SearchSpaceError
from ai4rag_nb.indexing import chunking
from ai4rag_nb.optimization.candidate_points import neighbours
from ai4rag_nb.optimization.gam_optimizer import GAMOptimizer, GAMOptSettings
from ai4rag_nb.optimization.numbering import fork, number_of, positions_at, positions_of, shuffled
from ai4rag_nb.optimization import numbering, rag_settings
from ai4rag_nb.optimization.parameters import Parameter, Rule
from ai4rag_nb.optimization.preparation import choose_metrics
from ai4rag_nb.optimization.rag_space import AI4RAGSearchSpace
from ai4rag_nb.optimization.search_space import SearchSpace

LOCAL = "local:all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Model:
    """A model as the search space sees one."""

    name: str
    temperature: float = 0.1
    context_length: int | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name, "temperature": self.temperature}


# ---------------------------------------------------------------------------------------------- against brute force


@st.composite
def spaces(draw: st.DrawFn) -> tuple[list[Parameter], list[Rule]]:
    """Draw parameters with conditions and dependent lists, and rules of every kind."""
    names = ["alpha", "beta", "gamma", "delta", "epsilon"][: draw(st.integers(1, 5))]
    parameters: list[Parameter] = []
    for place, name in enumerate(names):
        values = list(range(draw(st.integers(1, 4))))
        condition, depends_on = None, None
        if place and draw(st.booleans()):
            parent = draw(st.sampled_from(parameters))
            condition = {parent.name: draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))}
        if place and draw(st.integers(0, 3)) == 0:
            parent = draw(st.sampled_from(parameters))
            depends_on = parent.name
            lists = {
                value: draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
                for value in parent.choices.values
            }
            parameters.append(Parameter(name, "I", lists, condition=condition, depends_on=depends_on))
            continue
        parameters.append(Parameter(name, "I", values, condition=condition))
    rules = []
    for number in range(draw(st.integers(0, 3))):
        one, two = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        limit = draw(st.integers(0, 6))
        kind = draw(st.sampled_from(["pair", "whole", "optional"]))
        if kind == "whole":
            function = _namespace(f"lambda configuration: sum(configuration.values()) != {limit}")
        elif kind == "optional" and one != two:
            function = _namespace(f"lambda {one}, {two}=0: {one} + {two} != {limit}")
        else:
            arguments = one if one == two else f"{one}, {two}"
            function = _namespace(f"lambda {arguments}: {one} + {two} != {limit}")
        rules.append(Rule(function, f"rule {number}"))
    return draw(st.permutations(parameters)), rules


def _namespace(source: str) -> Any:
    return eval(source)


def brute_force(parameters: list[Parameter], rules: list[Rule]) -> list[dict[str, int]]:
    """List the allowed combinations the slow and obvious way."""
    by_name = {parameter.name: parameter for parameter in parameters}
    found: dict[str, dict[str, int]] = {}
    for values in itertools.product(*(parameter.choices.values for parameter in parameters)):
        chosen = dict(zip(by_name, values, strict=True))

        def active(name: str, chosen: Mapping[str, int] = chosen) -> bool:
            parameter = by_name[name]
            on = all(
                active(parent) and chosen[parent] in allowed
                for parent, allowed in parameter.condition.items()
            )
            return on and (parameter.depends_on is None or active(parameter.depends_on))

        kept = {name: value for name, value in chosen.items() if active(name)}
        lists = (by_name[name] for name in kept if by_name[name].depends_on)
        if any(kept[one.name] not in one.values[kept[one.depends_on]] for one in lists):
            continue
        if all(rule.allows(kept) for rule in rules):
            found[json.dumps(kept, sort_keys=True)] = kept
    return list(found.values())


@settings(max_examples=150, deadline=None)
@given(spaces())
def test_space_equals_brute_force(drawn: tuple[list[Parameter], list[Rule]]) -> None:
    parameters, rules = drawn
    expected = brute_force(parameters, rules)
    everything = brute_force(parameters, [])
    if not expected:
        with pytest.raises(SearchSpaceError, match="None of the"):
            SearchSpace(parameters, rules)
        return
    space = SearchSpace(parameters, rules)
    listed = list(space)
    assert len(space) == space.combinations == len(expected) == len(listed)
    assert {json.dumps(one, sort_keys=True) for one in listed} == {
        json.dumps(one, sort_keys=True) for one in expected
    }
    assert [space[number] for number in range(len(space))] == listed
    assert [space.index(one) for one in listed] == list(range(len(space)))
    assert len({space.key(one) for one in listed}) == len(space)
    forbidden = {rule.message: sum(not rule.allows(one) for one in everything) for rule in rules}
    assert space.explain() == {message: count for message, count in forbidden.items() if count}
    for one in everything:
        assert (one in space) == all(rule.allows(one) for rule in rules)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(-5, 10**6))
def test_shuffle_is_a_permutation(size: int, seed: int) -> None:
    order = list(shuffled(size, seed))
    assert sorted(order) == list(range(size))
    assert order[:7] == list(itertools.islice(shuffled(size, seed), 7))


# ------------------------------------------------------------------------------------------------------ large spaces


def test_a_million_combinations_open_with_few_rule_calls() -> None:
    calls = []
    parameters = [Parameter(f"setting_{letter}", "I", minimum=0, maximum=9) for letter in "abcdef"]
    rules = [
        Rule(lambda setting_a, setting_b: calls.append(1) or setting_a <= setting_b, "b is below a"),
        Rule(lambda setting_e, setting_f: calls.append(1) or setting_e + setting_f > 3, "e and f are small"),
    ]
    space = SearchSpace(parameters, rules)
    assert space.combinations == 55 * 100 * 90
    assert len(calls) <= 2_000
    assert space.explain() == {"b is below a": 450_000, "e and f are small": 100_000}
    assert len({space.key(one) for one in space.sample(500)}) == 500


def test_a_rule_about_everything_is_asked_once_for_each_combination() -> None:
    calls = []
    parameters = [Parameter(f"setting_{letter}", "I", minimum=0, maximum=9) for letter in "abcd"]
    space = SearchSpace(
        parameters, [Rule(lambda configuration: calls.append(1) or configuration["setting_a"] > 0)]
    )
    assert (space.combinations, len(calls)) == (9_000, 10_000)


def test_a_rule_that_would_take_for_ever_is_refused() -> None:
    parameters = [Parameter(f"setting_{place}", "I", minimum=0, maximum=99) for place in range(8)]
    with pytest.raises(SearchSpaceError, match="look at too many combinations"):
        SearchSpace(parameters, [Rule(lambda configuration: len(configuration) == 8)]).combinations


def test_huge_range_costs_nothing() -> None:
    space = SearchSpace([Parameter("seed", "I", minimum=0, maximum=10**12), Parameter("lower", "B")])
    assert space.combinations == 2 * (10**12 + 1)
    assert space.index(space[123_456_789]) == 123_456_789


# --------------------------------------------------------------------------------------------------- one form of each


def test_two_variants_of_one_model_are_two_points() -> None:
    calm, lively = Model("reader", 0.1), Model("reader", 0.9)
    space = SearchSpace([Parameter("foundation_model", "C", [calm, lively, Model("reader", 0.1)])])
    assert len(space) == 2
    first, second = ({"foundation_model": model} for model in (calm, lively))
    assert space.key(first) != space.key(second)
    assert [space.labels(one)["foundation_model"] for one in space] == ["reader", "reader #2"]
    assert space.canonical({"foundation_model": "reader #2"}) == second


def test_spellings_of_one_pipeline_are_one_point() -> None:
    space = AI4RAGSearchSpace(ranker_strategy=["rrf", "weighted"], ranker_k=[20, 60], ranker_alpha=[0.3, 0.7])
    short = {
        **{"embedding_model": LOCAL, "chunking_method": "hybrid", "chunk_size": 128, "search_mode": "hybrid"},
        **{"ranker_strategy": "rrf", "ranker_k": 60, "retrieval_method": "simple", "number_of_chunks": 5},
        **{"template_id": "simple_rag", "foundation_model": "local:extractive"},
    }
    spelled = [
        short,
        {**short, "ranker_alpha": 1, "window_size": 0, "chunk_overlap": 0},
        {**short, "ranker_alpha": 0.3, "window_size": 1, "chunk_overlap": 32},
        {name: value for name, value in short.items() if name not in ("template_id", "foundation_model")},
        dict(reversed(short.items())),
        {**short, "chunk_size": 128.0},
    ]
    assert len({space.key(one) for one in spelled}) == 1
    assert len({space.index(one) for one in spelled}) == 1
    assert all(space.canonical(one) == short for one in spelled)
    dense = {**short, "search_mode": "vector", "ranker_strategy": "", "ranker_k": 0, "ranker_alpha": 1}
    assert space.key(dense) == space.key({**dense, "ranker_strategy": "weighted", "ranker_k": 20})
    assert space.key(dense) != space.key(short)


def test_key_does_not_depend_on_the_other_values_of_a_space() -> None:
    small, large = AI4RAGSearchSpace(chunk_size=[64]), AI4RAGSearchSpace(chunk_size=[64, 128])
    assert {small.key(one) for one in small} < {large.key(one) for one in large}


# ------------------------------------------------------------------------------------------------------- the defaults


def test_default_space_is_the_promised_one() -> None:
    space = AI4RAGSearchSpace()
    assert len(space) == 162
    values = {parameter.name: list(parameter.choices.values) for parameter in space.parameters}
    assert values["chunk_size"] == [64, 128, 256]
    assert values["number_of_chunks"] == [3, 5, 10]
    assert values["search_mode"] == ["vector", "hybrid"]
    overlaps = {
        (one["chunk_size"], one["chunk_overlap"]) for one in space if one["chunking_method"] == "recursive"
    }
    assert overlaps == {(64, 0), (64, 16), (128, 0), (128, 32), (256, 0), (256, 64)}
    for one in space:
        assert ("chunk_overlap" in one) == (one["chunking_method"] == "recursive")
        assert one.get("window_size") == (1 if one["retrieval_method"] == "window" else None)
        assert one.get("ranker_k") == (60 if one.get("ranker_strategy") == "rrf" else None)
        assert one.get("ranker_alpha") == (0.5 if one.get("ranker_strategy") == "weighted" else None)
        assert ("ranker_strategy" in one) == (one["search_mode"] == "hybrid")
    assert any("512, 1024, 2048" in note and "256 tokens" in note for note in space.notes)


def test_sizes_follow_the_window_of_the_models() -> None:
    space = AI4RAGSearchSpace(embedding_model=["openai:big"])
    assert len(space) == 324
    assert len(space.resolve({"openai:big": 8192})) == 324
    assert len(space.resolve({"openai:big": 512})) == 216
    unknown = space.resolve({"openai:big": None})
    assert len(unknown) == 324 and any("openai:big is not known" in note for note in unknown.notes)
    resolved = space.resolve(
        {"openai:big": Model("big", context_length=100)}, {"local:extractive": Model("reader")}
    )
    assert {one["chunk_size"] for one in resolved} == {64}
    assert resolved[0]["embedding_model"] == Model("big", context_length=100)
    assert resolved.labels(resolved[0])["foundation_model"] == "reader"
    with pytest.raises(SearchSpaceError, match=r"beyond the window of every model: openai:big .32 tokens"):
        space.resolve({"openai:big": 32})


def test_a_size_beyond_one_window_is_forbidden_for_that_model_only() -> None:
    space = AI4RAGSearchSpace(embedding_model=[LOCAL, "openai:big"], chunk_size=[256, 512]).resolve(
        {"openai:big": 512}
    )
    pairs = {(one["embedding_model"], one["chunk_size"]) for one in space}
    assert pairs == {(LOCAL, 256), ("openai:big", 256), ("openai:big", 512)}
    assert space.explain() == {f"chunk_size is beyond the 256 tokens that {LOCAL} can hold": 54}
    with pytest.raises(SearchSpaceError, match="not allowed: chunk_size is beyond the 256 tokens"):
        space.index({**space[0], "embedding_model": LOCAL, "chunk_size": 512})


def test_a_size_beyond_every_window_is_an_error_before_anything_runs() -> None:
    with pytest.raises(SearchSpaceError, match=r"chunk_size 512 is beyond .* Use at most 256"):
        AI4RAGSearchSpace(chunk_size=[256, 512])
    later = AI4RAGSearchSpace(embedding_model=["openai:big"], chunk_size=[1024])
    with pytest.raises(SearchSpaceError, match="chunk_size 1024 is beyond"):
        later.resolve({"openai:big": 512})
    assert len(AI4RAGSearchSpace(chunk_size=[512], context_lengths={LOCAL: 512})) == 54


def test_resolving_an_unknown_name_is_an_error() -> None:
    with pytest.raises(SearchSpaceError, match="'openai:big' is not in the space"):
        AI4RAGSearchSpace().resolve({"openai:big": 512})


def test_own_parameters_and_rules() -> None:
    fixed = Parameter(
        "chunk_overlap", "I", [0, 32], condition={"chunking_method": ["recursive"], "chunk_size": [128]}
    )
    few = Rule(lambda number_of_chunks: number_of_chunks < 10, "too many chunks")
    space = AI4RAGSearchSpace([fixed], [few], search_mode=["vector"], retrieval_method=["simple"])
    assert len(space) == (3 + 2 + 2) * 2
    assert space.explain() == {"too many chunks": 7}
    assert space.resolve().explain() == space.explain()


def test_registered_chunkers_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "chunking_methods", lambda: ["hybrid", "mine", "recursive"])
    space = AI4RAGSearchSpace(chunking_method=["mine"], search_mode=["vector"])
    assert len(space) == 3 * 2 * 3 and all("chunk_overlap" not in one for one in space)


def test_values_given_in_vain_are_said() -> None:
    space = AI4RAGSearchSpace(
        chunking_method=["hybrid"], chunk_overlap=[16], window_size=[2], retrieval_method=["simple"]
    )
    assert "chunk_overlap plays no role: chunking_method is never 'recursive'." in space.notes
    assert "window_size plays no role: retrieval_method is never 'window'." in space.notes
    assert (
        "Not among the defaults: ranker_strategy 'normalized' and 'zscore'; list them to try them."
        in AI4RAGSearchSpace().notes
    )


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_sizes": [64]}, "Did you mean 'chunk_size'"),
        ({"nonsense": [64]}, "The parameters are embedding_model"),
        ({"chunking_method": ["recursve"]}, "Did you mean 'recursive'"),
        ({"chunking_method": [3]}, "3 is not known"),
        ({"retrieval_method": ["graph"]}, "It can be simple, window"),
        ({"search_mode": ["hybird"]}, "Did you mean 'hybrid'"),
        ({"ranker_strategy": ["rff"]}, "Did you mean 'rrf'"),
        ({"template_id": ["graph_rag"]}, "It can be simple_rag"),
        ({"chunk_size": ["64"]}, "Leave the quotes out"),
        ({"chunk_size": [64.5]}, "is not a whole number"),
        ({"chunk_size": [True]}, "is not a whole number"),
        ({"chunk_size": [0]}, "chunk_size: 0 is not possible"),
        ({"chunk_size": []}, "chunk_size has no values"),
        ({"chunk_size": None}, "chunk_size has no values"),
        ({"chunk_overlap": [-1]}, "chunk_overlap: -1 is not possible"),
        ({"number_of_chunks": [0]}, "number_of_chunks: 0 is not possible"),
        ({"ranker_alpha": [1.5]}, "between 0 and 1"),
        ({"ranker_alpha": [float("nan")]}, "is not a real number"),
        ({"embedding_model": [""]}, "is no model"),
        ({"embedding_model": [7]}, "is no model"),
        ({"foundation_model": [object()]}, "cannot be told from other values"),
        ({"chunk_size": {"min": 3}}, "is not understood"),
        ({"chunk_size": {"minimum": 300, "maximum": 200}}, "holds no value"),
        ({"chunk_size": 4096}, "chunk_size 4096 is beyond the window"),
        ({"chunk_size": [4]}, "between 8 and 1000000"),
        ({"chunk_size": [9]}, "Use at least 10 tokens"),
        ({"number_of_chunks": [20_000]}, "between 1 and 16384"),
        ({"window_size": [101]}, "between 0 and 100"),
        ({"ranker_k": [20_000]}, "between 0 and 16384"),
        ({"ranker_alpha": {"minimum": 0, "maximum": 1, "step": 0}}, "holds no value"),
        (
            {"ranker_alpha": {"minimum": 0, "maximum": 1, "step": "1e-12"}},
            "step: '1e-12' .* without an exponent",
        ),
        ({"ranker_alpha": {"minimum": 0, "maximum": 1, "step": 1e-320}}, "are too many"),
        ({"chunk_size": {"minimum": "a", "maximum": 9}}, "minimum: 'a' .* Give a whole number"),
        ({"chunk_size": {"minimum": 1, "maximum": 10**12}}, "values are too many"),
        ({"chunk_size": {"minimum": 1, "maximum": 10**40}}, "are too many"),
        ({"chunk_size": {"minimum": 64, "maximum": 9_000}}, "beyond the window"),
        ({"chunk_size": [10**400]}, "is not a whole number"),
        ({"ranker_alpha": [10**400]}, "is not a real number"),
        ({"foundation_model": [{"name": "a"}]}, "cannot be told from other values"),
        ({"chunk_size": [np.array([64, 128])]}, "chunk_size: array.* is not a whole number"),
        ({"search_mode": np.array([["vector", "hybrid"]])}, "search_mode: array"),
        ({"ranker_alpha": np.ones((2, 2))}, "ranker_alpha: array.* is not a real number"),
        ({"foundation_model": range(10**9)}, "foundation_model: more than 100,000 values are too many"),
        ({"embedding_model": range(10**9)}, "embedding_model: more than 100,000 values"),
        ({"search_mode": range(10**9)}, "search_mode: more than 100,000 values"),
        ({"ranker_alpha": range(10**9)}, "ranker_alpha: more than 100,000 values"),
        ({"chunk_size": itertools.count(64)}, "chunk_size: more than 100,000 values"),
        ({"parameters": range(5)}, "0 is no Parameter"),
        ({"parameters": b"chunk_size"}, "parameters is b'chunk_size'"),
        ({"parameters": {"chunk_size": [64]}}, "parameters is {'chunk_size': .* Give a list"),
        ({"preset": "x" * 100_000}, "There is no preset 'xx"),
    ],
)
def test_unknown_names_and_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchSpaceError, match=message) as caught:
        AI4RAGSearchSpace(**values)
    assert caught.value.remedy and len(str(caught.value)) < 500


def bomb(depth: int) -> list[Any]:
    """Nest a list in itself, ten times at every level."""
    return [bomb(depth - 1)] * 10 if depth else ["x"] * 10


@pytest.mark.parametrize("name", ["chunk_size", "ranker_alpha", "chunking_method"])
@pytest.mark.parametrize("values", [bomb(7), ["x" * 10**6], {"x" * 10**6: 1}], ids=["bomb", "text", "map"])
def test_messages_show_the_beginning_of_large_values(name: str, values: Any) -> None:
    with pytest.raises(SearchSpaceError) as caught:
        AI4RAGSearchSpace(**{name: values})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "chunk_size: [64]\nchunk_size: [128]\n", "chunk_size is given twice"),
        ("a.json", '{"chunk_size": [64], "chunk_size": [128]}', "chunk_size is given twice"),
        ("a.yaml", "chunk_size: {minimum: 64, minimum: 65, maximum: 66}\n", "minimum is given twice"),
        ("a.json", '{"chunk_size": {"minimum": 64, "minimum": 65, "maximum": 66}}', "minimum is given twice"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("a.yaml", "chunk_size: " + "[" * 10_000 + "]" * 10_000, "nested too deeply"),
        ("a.yaml", "chunk_size: &a [*a]\n", "is not a whole number"),
        ("a.yaml", "ranker_alpha: {minimum: 0, maximum: 1, step: 1e-3}\n", "without an exponent"),
        ("a.json", json.dumps({"x" * 100_000: [1]}), "is no parameter"),
    ],
)
def test_faulty_space_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SearchSpaceError, match=message) as caught:
        AI4RAGSearchSpace.from_file(tmp_path / name)
    assert caught.value.remedy and len(str(caught.value)) < 800


def test_a_size_has_room_beside_the_special_tokens_of_every_model() -> None:
    @dataclass(frozen=True)
    class Counter:
        special_tokens: int

    @dataclass(frozen=True)
    class Counting(Model):
        token_counter: Counter = Counter(5)

    space = AI4RAGSearchSpace(embedding_model=["openai:large"], chunk_size=[12, 64])
    with pytest.raises(SearchSpaceError, match="Use at least 13 tokens"):
        space.resolve({"openai:large": Counting("large", context_length=512)})
    assert space.resolve({"openai:large": Counting("large", token_counter=Counter(4), context_length=512)})


def test_contradictions_name_every_reason_with_its_count() -> None:
    with pytest.raises(SearchSpaceError) as caught:
        AI4RAGSearchSpace(
            chunking_method=["recursive"],
            chunk_size=[64, 128],
            chunk_overlap=[128, 200],
            retrieval_method=["window"],
            window_size=[0, 1],
            search_mode=["hybrid"],
            ranker_strategy=["", "rrf"],
        )
    raw = 2 * 2 * 2 * 2 * 3
    assert f"None of the {raw} combinations is allowed" in str(caught.value)
    assert f"chunk_overlap is not below chunk_size ({raw})" in str(caught.value)
    assert f"retrieval_method 'window' needs a window_size above 0 ({raw // 2})" in str(caught.value)
    assert f"search_mode 'hybrid' needs a ranker_strategy ({raw // 2})" in str(caught.value)


def test_single_values_and_ranges_are_understood() -> None:
    space = AI4RAGSearchSpace(
        chunk_size={"minimum": 64, "maximum": 256, "step": 64}, number_of_chunks=5, search_mode="vector"
    )
    assert {one["chunk_size"] for one in space} == {64, 128, 192, 256}
    assert {one["number_of_chunks"] for one in space} == {5}


@pytest.mark.parametrize("name", ["space.yaml", "space.json"])
def test_space_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(json.dumps({"chunk_size": [64], "search_mode": ["vector"]}), encoding="utf-8")
    assert len(AI4RAGSearchSpace.from_file(file)) == 18
    assert len(AI4RAGSearchSpace.from_file(str(file))) == 18


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"chunk_size: [64", "neither YAML nor JSON"),
        ("a.json", b"{'chunk_size': [64]}", "neither YAML nor JSON"),
        ("a.yaml", b"", "does not hold parameters"),
        ("a.yaml", b"- chunk_size", "does not hold parameters"),
        ("a.yaml", b"\xff\xfe\x00binary", "neither YAML nor JSON"),
        ("a.yaml", b"chunk_siez: [64]", "Did you mean 'chunk_size'"),
        ("a.yaml", b"3: [64]", "3 is no parameter"),
        ("a.yaml", b"chunk_size: big", "Give a whole number"),
        ("a.yaml", b"chunk_size: !!python/object/apply:os.getcwd []", "neither YAML nor JSON"),
    ],
)
def test_bad_space_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(SearchSpaceError, match=message) as caught:
        AI4RAGSearchSpace.from_file(file)
    assert caught.value.remedy


def test_missing_space_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(SearchSpaceError, match="There is no space file"):
        AI4RAGSearchSpace.from_file(tmp_path / "none.yaml")
    with pytest.raises(SearchSpaceError, match="cannot be read"):
        AI4RAGSearchSpace.from_file(tmp_path)


def test_rules_that_fail_are_named() -> None:
    with pytest.raises(SearchSpaceError, match="The rule 'broken' failed on"):
        AI4RAGSearchSpace(rules=[Rule(lambda configuration: configuration["ranker_k"] > 1, "broken")])
    with pytest.raises(
        SearchSpaceError, match=r"looks at 'chunk_sise', which is no parameter. Did you mean 'chunk_size'"
    ):
        AI4RAGSearchSpace(rules=[lambda chunk_sise: chunk_sise > 1])


# ------------------------------------------------------------------------------------------------------- large spaces


@settings(max_examples=60, deadline=None)
@given(spaces(), st.integers(0, 1_000))
def test_many_numbers_and_neighbours_equal_one_at_a_time(
    drawn: tuple[list[Parameter], list[Rule]], seed: int
) -> None:
    try:
        space = SearchSpace(*drawn)
    except SearchSpaceError:
        return
    numbers = list(itertools.islice(shuffled(len(space), seed), 40))
    found = positions_of(space.numbering, numbers)
    assert found.tolist() == [list(positions_at(space.numbering, number)) for number in numbers]
    assert [number_of(space.numbering, tuple(row)) for row in found.tolist()] == numbers
    point = numbers[0]
    expected = set()
    for parameter in space.parameters:
        for value in parameter.choices.values if parameter.name in space[point] else ():
            changed = {**space[point], parameter.name: value}
            if value != space[point][parameter.name] and changed in space:
                expected.add(space.index(changed))
    found = set(neighbours(space, point))
    assert expected <= found
    for extra in found - expected:
        assert follows_from_one_change(space, point, extra), f"{space[extra]} is not near {space[point]}"


def follows_from_one_change(space: SearchSpace, before: int, after: int) -> bool:
    """Tell whether all that differs beside one setting had to change with it, or is on or off by it."""
    old, new = space[before], space[after]
    differing = [p for p in space.parameters if old.get(p.name) != new.get(p.name)]
    return any(
        all(
            other is first or other.depends_on is not None or (other.name in old) != (other.name in new)
            for other in differing
        )
        and {**old, first.name: new[first.name]} not in space
        for first in differing
        if first.name in old and first.name in new
    )


def test_what_depends_on_a_changed_setting_changes_with_it() -> None:
    size = Parameter(name="size", param_type="I", values=[64, 128])
    overlap = Parameter(name="overlap", param_type="I", values={64: [0, 16], 128: [0, 32]}, depends_on="size")
    space = SearchSpace([size, overlap])
    near = [space[number] for number in neighbours(space, space.index({"size": 64, "overlap": 16}))]
    assert near == [{"size": 128, "overlap": 32}, {"size": 64, "overlap": 0}]


def test_a_space_beyond_64_bits_is_numbered() -> None:
    space = SearchSpace(
        [Parameter(f"p{place}", "I", minimum=0, maximum=999) for place in range(8)],
        [Rule(lambda p0, p1: p0 < p1, "p0 below p1")],
    )
    numbers = [0, 1, 2**63, space.combinations - 1]
    assert positions_of(space.numbering, numbers).tolist() == [
        list(positions_at(space.numbering, number)) for number in numbers
    ]


@pytest.mark.parametrize(
    "rule", [None, lambda ranker_k, number_of_chunks: ranker_k + number_of_chunks < 1_900]
)
def test_a_proposal_in_a_space_of_a_million_reads_points_together(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = {"rules": 0, "forks": 0}

    def counted_rule(ranker_k: int, number_of_chunks: int) -> bool:
        work["rules"] += 1
        return bool(rule(ranker_k, number_of_chunks))

    def counted_fork(*arguments: Any) -> Any:
        work["forks"] += 1
        return fork(*arguments)

    thousand = {"minimum": 1, "maximum": 1_000}
    space = AI4RAGSearchSpace(
        rules=[Rule(counted_rule, "not both at once")] if rule else [],
        chunking_method=["recursive"],
        chunk_size=[64],
        chunk_overlap=[0],
        number_of_chunks=thousand,
        search_mode=["hybrid"],
        ranker_strategy=["rrf", "weighted", "normalized"],
        ranker_k=thousand,
        ranker_alpha={"minimum": 0, "maximum": 1, "step": 0.01},
        retrieval_method=["simple"],
    )
    assert space.combinations > 1_000_000
    optimizer = GAMOptimizer(None, space, GAMOptSettings(max_evals=10))
    most = 1_020_000 if rule else 0
    assert work["rules"] <= most, (
        "every pair once when the space is opened, and a few to look for lost values"
    )
    monkeypatch.setattr(numbering, "fork", counted_fork)
    for place in range(10):
        work["forks"] = 0
        (configuration,) = optimizer.ask()
        # 10,000 points of 13 settings each are predicted: 130,000 looks when every point is read by itself.
        assert work["forks"] < 10_000
        optimizer.tell(configuration, place / 10)
    assert work["rules"] <= (2_000_000 if rule else 0), "and once more when points are read"


def test_limits_are_those_of_chunkers_retrievers_and_the_packaged_model() -> None:
    from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
    from ai4rag_nb.querying.retriever import MAXIMUM_WINDOW

    model = LocalEmbeddingModel.load("all-MiniLM-L6-v2")
    assert rag_settings.LARGEST_WINDOW == MAXIMUM_WINDOW
    assert model.token_counter.special_tokens == rag_settings.KNOWN_SPECIAL_TOKENS[LOCAL]
    smallest = model.token_counter.special_tokens + rag_settings.SMALLEST_CHUNK
    assert chunking.get_chunker("recursive", smallest, 0, model.token_counter).chunk_size == smallest
    with pytest.raises(InputError, match="is too small"):
        chunking.get_chunker("recursive", smallest - 1, 0, model.token_counter)


@pytest.mark.parametrize("metrics", ["faithfulness", b"x", 5])
def test_one_text_is_no_list_of_metrics(metrics: Any) -> None:
    with pytest.raises(InputError, match="which is no list of metrics"):
        choose_metrics(metrics, None, default_evaluators())


# ---------------------------------------------------------------- what YAML makes of words, and contradictions


@pytest.mark.parametrize(
    "written", ["[off, on]", "[no, yes]", "[false, true]", "['off', 'on']", "['No', 'YES']"]
)
@pytest.mark.parametrize("name", ["chunk_headers", "citations"])
def test_a_switch_may_be_written_as_truth_values(tmp_path: Path, name: str, written: str) -> None:
    file = tmp_path / "space.yaml"
    extra = "template_id: [simple_rag]\nverification: [overlap]\n" if name == "citations" else ""
    file.write_text(f"{name}: {written}\n{extra}")
    space = AI4RAGSearchSpace.from_file(file)
    (switch,) = [parameter for parameter in space.parameters if parameter.name == name]
    assert list(switch.choices.values) == ["off", "on"]


def test_a_switch_may_be_one_truth_value_and_is_found_by_it() -> None:
    space = AI4RAGSearchSpace(chunk_headers=True)
    assert {one["chunk_headers"] for one in space} == {"on"}
    both = AI4RAGSearchSpace(chunk_headers=[False, "off", True])
    assert {one["chunk_headers"] for one in both} == {"off", "on"}
    first = dict(both[0])
    assert both.index({**first, "chunk_headers": first["chunk_headers"] == "on"}) == 0
    by_hand = AI4RAGSearchSpace([Parameter("chunk_headers", "B")])
    assert {one["chunk_headers"] for one in by_hand} == {"off", "on"}


@pytest.mark.parametrize("name", ["search_mode", "verification", "reranker", "context_order"])
def test_truth_values_elsewhere_are_refused_with_a_word_about_quotes(tmp_path: Path, name: str) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(f"{name}: [off]\n")
    with pytest.raises(SearchSpaceError, match=f"{name}: False is not known. Put words in quotes.*YAML"):
        AI4RAGSearchSpace.from_file(file)


def test_a_contradiction_names_its_values_and_what_would_help() -> None:
    with pytest.raises(SearchSpaceError) as caught:
        AI4RAGSearchSpace(chunking_method=["hybrid"], chunk_size=[64], retrieval_method=["parent"])
    said = str(caught.value)
    assert "Here chunking_method is 'hybrid' and retrieval_method is 'parent'." in said
    added = said.partition("Add ")[2]
    assert added and "remove a rule" not in said
    for name, values in (("chunking_method", "hierarchical"), ("retrieval_method", "simple")):
        assert f"'{values}'" in added and name in added
    mended = {"chunking_method": ["hybrid"], "chunk_size": [64], "retrieval_method": ["parent", "simple"]}
    assert len(AI4RAGSearchSpace(**mended))
    assert len(AI4RAGSearchSpace(**{**mended, "chunking_method": ["hybrid", "hierarchical"]}))


def test_contradictions_of_several_rules_and_of_whole_configurations() -> None:
    with pytest.raises(SearchSpaceError, match=r"Add 0 to chunk_overlap|Add .* to chunk_size"):
        AI4RAGSearchSpace(chunking_method=["recursive"], chunk_size=[64], chunk_overlap=[64, 100])
    with pytest.raises(SearchSpaceError, match="Add values to its parameters"):
        SearchSpace([Parameter("a", values=[1])], [Rule(lambda configuration: False, "never")])
    with pytest.raises(SearchSpaceError, match=r"Here a is 1 and b is 2\. Add values to a or b\."):
        SearchSpace(
            [Parameter("a", values=[1]), Parameter("b", values=[2])], [Rule(lambda a, b: a > b, "a above b")]
        )

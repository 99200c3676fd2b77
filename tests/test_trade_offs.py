"""Several aims at once, against brute force and by hand."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import benchmark_records, write_world

from ai4rag_nb import AI4RAGExperiment, AI4RAGSearchSpace, BenchmarkData, load_documents
from ai4rag_nb.foundations.errors import InputError
from ai4rag_nb.optimization.trade_offs import covered_area, pareto_set, weighted_values

values = st.one_of(st.none(), st.integers(0, 4).map(float))
tables = st.lists(st.fixed_dictionaries({"score": values, "seconds": values, "money": values}), max_size=12)


@given(tables)
def test_the_pareto_set_is_what_nothing_dominates(rows: list[dict[str, Any]]) -> None:
    """Worked out with arrays: whole rows, turned so that more is better, compared all with all."""
    whole = [place for place, row in enumerate(rows) if None not in row.values()]
    points = np.array([[rows[p]["score"], -rows[p]["seconds"], -rows[p]["money"]] for p in whole]).reshape(
        -1, 3
    )
    at_least = (points[:, None] >= points[None]).all(axis=2)
    better = (points[:, None] > points[None]).any(axis=2)
    beaten = (at_least & better).any(axis=0)
    expected = [place for place, lost in zip(whole, beaten, strict=True) if not lost]
    assert pareto_set(rows, ["score", "seconds", "money"], low=["seconds", "money"]) == expected


@given(tables, st.floats(0.01, 5), st.floats(0.01, 5))
def test_whoever_leads_by_any_weights_is_in_the_pareto_set(
    rows: list[dict[str, Any]], one: float, two: float
) -> None:
    weighted = weighted_values(rows, {"score": one, "seconds": two}, low=["seconds"])
    known = [value for value in weighted if value is not None]
    members = pareto_set(rows, ["score", "seconds"], low=["seconds"])
    assert bool(known) == bool(members)
    assert not known or max(known) == pytest.approx(max(weighted[member] for member in members))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_the_covered_area_is_that_of_the_squares_beneath(points: list[tuple[int, int]]) -> None:
    squares = {(x, y) for first, second in points for x in range(first) for y in range(second)}
    assert covered_area([(x / 20, y / 20) for x, y in points]) == pytest.approx(len(squares) / 400)


def test_a_run_weighs_what_it_measured(tmp_path: Path) -> None:
    space = AI4RAGSearchSpace(
        chunking_method=["recursive"],
        chunk_size=[64],
        chunk_overlap=[0],
        number_of_chunks=[1, 3, 5],
        retrieval_method=["simple"],
        search_mode=["vector"],
    )
    documents = load_documents(write_world(tmp_path / "world") / "docs")
    benchmark = BenchmarkData.from_records(benchmark_records())
    folders = {"output_path": tmp_path / "run", "workspace": tmp_path / "workspace"}
    with closing(AI4RAGExperiment(documents, benchmark, space, **folders)) as experiment:
        experiment.search()
        table = experiment.results.trade_offs(["answer_correctness", "context_tokens"])
        shortest = table["context_tokens"].idxmin()
        assert table.loc[shortest, "pareto"] and len(table) == 3
        limited = experiment.results.trade_offs(limits=[f"context_tokens <= {table['context_tokens'].min()}"])
        assert limited["allowed"].sum() == 1 and limited.loc[shortest, "allowed"]
        by_length = experiment.results.trade_offs(weights={"context_tokens": 1})
        assert by_length.index[0] == shortest and by_length["weighted"].iloc[0] == 1.0
        with pytest.raises(InputError, match="There is no aim 'speed'"):
            experiment.results.trade_offs(["speed"])

"""The scores that come with the package are figures alone, and what the pictures say about them is counted by hand."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from ai4rag_nb.dashboard.certainty_figures import CurvePoint, chance_bars, curves, rank_slopes, score_map
from ai4rag_nb.dashboard.comparison_figures import cost_dots, difference_rows, document_dots
from ai4rag_nb.dashboard.pictures import Picture
from ai4rag_nb.evaluation.comparisons import Comparisons, compare_all
from ai4rag_nb.evaluation.real_scores import RealScores, read_real_scores, real_score_sets
from ai4rag_nb.foundations.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "ai4rag_nb" / "corpora" / "real_scores.json"
WORDS = {"recursive", "hybrid", "vector", "rrf", "normalized"}
ODD = '<script>&"\'$x_1$\\frac ￿\u202e 1.23456 <g id="x"> مرحبا'


def stored() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def words_in(value: object) -> set[str]:
    """Collect every text of a JSON value that is not a key."""
    if isinstance(value, dict):
        return set().union(*map(words_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(words_in, value))
    return {value} if isinstance(value, str) else set()


def test_only_figures_are_kept() -> None:
    """The sets are others' work: neither a question nor an answer nor the name of a document is in the file."""
    assert FILE.stat().st_size < 200_000
    for own in stored()["sets"].values():
        assert set(own) == {"origin", "n", "clusters", "settings", "context_tokens", "scores"}
        assert words_in({key: value for key, value in own.items() if key != "origin"}) <= WORDS
        assert re.search(r"CC BY-SA 4\.0|Apache-2\.0", own["origin"])


@pytest.mark.parametrize("name", ["squad", "covidqa"])
def test_what_is_read_is_what_is_stored(name: str) -> None:
    own, real = stored()["sets"][name], read_real_scores(name)
    assert (
        real.n == own["n"] == len(own["clusters"]) and len(real.configurations) == len(own["settings"]) == 45
    )
    assert len(set(real.configurations)) == 45
    for metric, rows in own["scores"].items():
        assert np.array_equal(
            np.array(rows), np.array([real.scores[metric][one] for one in real.configurations])
        )
        assert all(round(value, 3) == value and 0 <= value <= 1 for row in rows for value in row)
    for number, group in enumerate(real.clusters):
        assert {own["clusters"][place] for place in group} == {number}


def test_reading_more_chunks_never_hides_evidence_and_always_costs() -> None:
    """With the same index and search, more chunks find evidence at the same rank or newly, and make a longer prompt."""
    for name in real_score_sets():
        real = read_real_scores(name)
        ranks = real.scores["evidence_reciprocal_rank"]
        for one in real.configurations:
            if one.endswith(", 3"):
                more = f"{one[:-3]}, 10"
                few, many = np.array(ranks[one]), np.array(ranks[more])
                assert (many >= few - 1e-9).all() and (many[few > 0] == few[few > 0]).mean() > 0.95
                assert real.context_tokens[more] > real.context_tokens[one]


def test_a_part_keeps_scores_and_documents_together() -> None:
    real = read_real_scores("covidqa")
    chosen = np.random.default_rng(1).permutation(real.n)[:80].tolist()
    part = real.part(chosen)
    document = {place: number for number, group in enumerate(real.clusters) for place in group}
    assert part.n == 80 and sorted(place for group in part.clusters for place in group) == list(range(80))
    for group in part.clusters:
        assert len({document[chosen[place]] for place in group}) == 1
    assert len(part.clusters) == len({document[place] for place in chosen})
    for metric, table in part.scores.items():
        for one, own in table.items():
            assert list(own) == [real.scores[metric][one][place] for place in chosen]


@pytest.mark.parametrize("wrong", [[0, 0], [-1], [270], [1, 2, 1]])
def test_places_that_are_none_are_refused(wrong: list[int]) -> None:
    with pytest.raises(InputError, match="different questions"):
        read_real_scores("covidqa").part(wrong)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(InputError, match="covidqa"):
        read_real_scores("covid")


def drawn(name: str) -> tuple[dict[str, list[float]], list[list[int]], Comparisons]:
    generator = np.random.default_rng(5)
    hardness = generator.normal(size=(48, 1))
    table = np.clip(0.6 + 0.3 * (hardness + generator.normal(size=(48, 4))), 0, 1)
    scores = dict(zip((name, "b", "c", "d"), table.T.tolist(), strict=True))
    groups = [list(range(start, start + 4)) for start in range(0, 48, 4)]
    return scores, groups, compare_all(scores, name, groups, flips=500)


def pictures(name: str) -> list[Picture]:
    scores, groups, compared = drawn(name)
    means = {one: float(np.mean(own)) for one, own in scores.items()}
    costs = {one: 100.0 * place for place, one in enumerate(scores, 1)}
    points = [CurvePoint(10, 0.5, 0.4, 0.6), CurvePoint(20, 0.6, 0.5, 0.7)]
    return [
        *(score_map(scores), rank_slopes(means, means, (name, "other"))),
        *(curves({name: points, "other": points}, name, name), chance_bars([0.1, -0.2, 0.3], 0.2, name)),
        *(document_dots(scores[name], groups, name), difference_rows(compared)),
        cost_dots(means, costs, compared, name, name),
    ]


@pytest.mark.parametrize("name", ["plain", ODD, "x" * 500])
def test_pictures_are_well_formed_and_the_same_twice(name: str) -> None:
    for first, second in zip(pictures(name), pictures(name), strict=True):
        root = ElementTree.fromstring(first.svg())
        assert root.tag.endswith("svg") and first.svg() == second.svg() and first.description
        assert len(first.svg()) < 40_000
        assert "script" not in [element.tag.rpartition("}")[2] for element in root.iter()]


@pytest.mark.parametrize("observed", [0.0, 0.013, -0.02, 0.5])
def test_chance_is_counted_as_it_is(observed: float) -> None:
    """What the words say is a plain count, and as many bars are coloured as hold values that far out."""
    values = np.random.default_rng(2).normal(0, 0.02, 700)
    both = int((np.abs(values) >= abs(observed) - 1e-9).sum())
    one = int((values >= observed - 1e-9).sum())
    for sides, count in ((True, both), (False, one)):
        picture = chance_bars(values.tolist(), observed, "difference", both_sides=sides)
        assert f" {count} of 700 times" in picture.description
        bars = picture.figure.axes[0].patches
        far = sum(bar.get_height() for bar in bars if bar.get_facecolor()[0] > 0.5 > bar.get_facecolor()[2])
        assert abs(far - count) <= 1 and sum(bar.get_height() for bar in bars) == 700


def test_a_map_puts_the_best_on_top_and_leaves_gaps_white() -> None:
    picture = score_map({"low": [0.0, 0.2, None], "high": [1.0, 0.9, 0.1], "none": [None, None, None]})
    axis = picture.figure.axes[0]
    shown = axis.images[0].get_array()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["high", "none"]
    assert shown.filled(-1).tolist() == [[0.9, 1.0, 0.1], [0.2, 0.0, -1.0], [-1.0, -1.0, -1.0]]


def test_rows_are_sorted_and_cut_but_all_are_counted() -> None:
    scores, _, compared = drawn("a")
    picture = difference_rows(compared, most=2)
    nearest = sorted(compared, key=lambda row: row.mean)
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels == [row.name for row in nearest[:2]]
    assert sum(map(int, re.findall(r" (\d+)[,.]", picture.description))) == len(scores) - 1


def test_the_set_that_is_read_is_not_changed_by_its_parts() -> None:
    real = read_real_scores("squad")
    real.part([3, 1])
    assert real == read_real_scores("squad") and isinstance(real, RealScores)

"""Pictures of retrievals: well-formed whatever the names are, the same on every run, and true to the scores."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ai4rag_nb.dashboard.pictures import Picture, interval_bars, small_svg
from ai4rag_nb.dashboard.retrieval_figures import (
    TokenMatches,
    marked_passages,
    match_columns,
    match_map,
    model_tokens,
    rank_lines,
    rank_places,
    token_matches,
)
from ai4rag_nb.foundations.chunks import RetrievedChunk

ODD = '<script>&"\'$x_1$\\frac ￿\u202e 1.23456 <g id="x"> مرحبا'


def hit(name: str, place: int = 1) -> RetrievedChunk:
    return RetrievedChunk(name, {"document_id": name, "sequence_number": place})


def pictures(name: str) -> list[Picture]:
    lists = {name: [hit(name), hit("b")], "other": [hit("b"), hit(name)]}
    matches = TokenMatches((name, "b"), ("c", name), np.array([[0.1, 0.9], [0.3, 0.2]]), 0.6)
    scores = {name: [0.0, 1.0, 1.0], "other": [1.0, 1.0, 0.0]}
    return [rank_lines(lists, marked={hit(name).chunk_id}), match_map(matches), interval_bars(scores, name)]


@pytest.mark.parametrize("name", ["plain", ODD, "x" * 500])
def test_pictures_are_well_formed_and_the_same_twice(name: str) -> None:
    for first, second in zip(pictures(name), pictures(name), strict=True):
        root = ElementTree.fromstring(first.svg())
        assert root.tag.endswith("svg") and first.svg() == first.svg() == second.svg()
        assert len(first.svg()) < 60_000 and first.description
        assert "script" not in [element.tag.rpartition("}")[2] for element in root.iter()]


def test_words_of_a_picture_stay_as_they_are() -> None:
    """Numbers in attributes are rounded; a number in a name is not."""
    picture = rank_lines({"dense": [hit("v1.23456.md", 7)]})
    texts = ["".join(element.itertext()) for element in ElementTree.fromstring(picture.svg()).iter()]
    assert "v1.23456.md 7" in texts
    assert small_svg('<svg><g id="a"><use x="1.987" y="-0.25"/></g></svg>') == (
        '<svg><g><use x="1.9" y="-0.2"/></g></svg>'
    )


def test_what_is_pointed_at_is_there() -> None:
    """Names of groups are left out, but not those that something refers to."""
    for picture in pictures("plain"):
        root = ElementTree.fromstring(picture.svg())
        names = {element.get("id") for element in root.iter()}
        for element in root.iter():
            for value in element.attrib.values():
                if value.startswith(("url(#", "#")) and not value.startswith("#0"):
                    assert value.removeprefix("url(").strip("#)") in names


def test_places_are_counted_in_the_whole_list() -> None:
    one, two, three = hit("a"), hit("b"), hit("c")
    found = rank_places({"x": [one, two, three], "y": [three], "z": []}, depth=1)
    assert found == {one.chunk_id: (1, None, None), three.chunk_id: (3, 1, None)}


def small_model(prompt: str) -> SimpleNamespace:
    """Make a model of five words that puts something before each question."""
    words = {"[S]": 0, "[E]": 1, "ask": 2, "red": 3, "lamp": 4, "?": 5}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[S] $A [E]", special_tokens=[("[S]", 0), ("[E]", 1)]
    )
    vectors = np.eye(6, dtype=np.float32)

    def batches(texts: list[str], role: str):
        before = prompt if role == "query" else ""
        rows = [vectors[tokenizer.encode(before + text).ids] for text in texts]
        yield list(range(len(texts))), rows

    return SimpleNamespace(
        facts=SimpleNamespace(prompts=(("query", prompt),)),
        token_counter=SimpleNamespace(tokenizer=tokenizer),
        token_batches=batches,
        fingerprint=lambda: {"model": "small"},
        symmetric=not prompt,
        dimension=6,
    )


@pytest.mark.parametrize("prompt", ["", "ask "])
def test_tokens_are_those_of_the_question_and_not_of_its_prompt(prompt: str) -> None:
    model = small_model(prompt)
    told = [(token, start, end) for token, start, end in model_tokens(model, "red lamp", "query") if end]
    assert told == [("red", 0, 3), ("lamp", 4, 8)]
    matches = token_matches("red lamp", "lamp ? red", model)
    assert (matches.tokens, matches.words) == (("red", "lamp"), ("lamp", "?", "red"))
    assert matches.likeness.tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert matches.score == pytest.approx(4 / 5 if prompt else 1.0), (
        "the word of the prompt is met by nothing"
    )
    assert match_columns(matches, 5) == [0, 2]


def test_a_text_without_words_has_an_empty_map() -> None:
    matches = token_matches("red", "", small_model(""))
    assert matches.words == () and match_columns(matches, 3) == []
    ElementTree.fromstring(match_map(matches).svg())


def test_passages_are_shown_as_text() -> None:
    passage = RetrievedChunk(
        ODD, {"document_id": ODD, "sequence_number": 1, "hit_positions": [(0, 8), (4, 99)]}
    )
    shown = marked_passages([passage])
    assert "<script>" not in shown and "<mark>&lt;script&gt;</mark>" in shown

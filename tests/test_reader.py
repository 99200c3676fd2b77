"""The extractive reader: what it may pick, what it says about where it picked, and when it abstains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ai4rag_nb.evaluation.token_scores import WordCounter, token_overlap
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.indexing.embedding import BaseEmbeddingModel
from ai4rag_nb.indexing.embedding_checks import Batches, EmbeddingCounts
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.querying.candidates import find_candidates
from ai4rag_nb.querying.clues import clues_of, question_stems
from ai4rag_nb.querying.extractive import ExtractiveFoundationModel
from ai4rag_nb.querying.generation import CachedFoundationModel, Generation
from ai4rag_nb.querying.prompts import REFUSAL_SENTENCE
from ai4rag_nb.querying.sentences import split_sentences

TABLE = (
    "# Mast 10\n\n## Data\n\n| Quantity | Range | Step |\n| --- | --- | --- |\n"
    "| wind speed | 0.4 to 60 m/s | 0.1 m/s |\n| air temperature | -40 to 60 °C | 0.1 °C |\n"
)
LIST = "## Start\n\nThere are three ways to start it:\n\n- press the green button\n- send the word go\n- wait"
CODE = "## Clean\n\nThe tank is emptied by this command:\n\n```console\n$ nimctl tank --empty\nok\n```\n"
PAGES = [TABLE, LIST, CODE, "The mast weighs 3 kg. It was built by Ada Lund in 1987."]


class Numbers(BaseEmbeddingModel):
    """Embed every text as the same direction, and remember what was asked."""

    model_id = "numbers"

    def __init__(self) -> None:
        self.counts = EmbeddingCounts()
        self.seen: list[str] = []

    @property
    def dimension(self) -> int:
        return 2

    @property
    def context_length(self) -> int | None:
        return None

    @property
    def token_counter(self) -> Any:
        from ai4rag_nb.indexing.tokens import CharacterCounter

        return CharacterCounter()

    def encode_batches(self, texts: list[str], role: str) -> Batches:
        self.seen += texts if role == "document" else []
        yield list(range(len(texts))), np.tile(np.array([1.0, 0.0], dtype=np.float32), (len(texts), 1))

    def fingerprint(self) -> dict[str, Any]:
        return {"model": "numbers"}


@pytest.fixture(scope="module")
def minilm() -> LocalEmbeddingModel:
    return LocalEmbeddingModel.load()


def pieces(generation: Generation, contexts: list[str]) -> list[str]:
    """Cut the pieces of an answer out of the passages."""
    return [contexts[place.context][place.start : place.end] for place in generation.sources]


class TestWhatIsPicked:
    @pytest.mark.parametrize(
        ("question", "answer"),
        [
            ("Which range does the wind speed have?", "wind speed | 0.4 to 60 m/s | 0.1 m/s"),
            ("In which step is the air temperature given?", "air temperature | -40 to 60 °C | 0.1 °C"),
            (
                "Which command empties the tank?",
                "The tank is emptied by this command:\n$ nimctl tank --empty\nok",
            ),
            ("Who built the mast?", "It was built by Ada Lund in 1987."),
            ("How much does the mast weigh?", "The mast weighs 3 kg."),
        ],
    )
    def test_the_piece_that_answers(self, minilm: LocalEmbeddingModel, question: str, answer: str) -> None:
        generation = ExtractiveFoundationModel(minilm, sentences=1).generate([], question, PAGES)
        assert generation.text == answer and not generation.refused

    def test_headings_and_header_rows_are_never_an_answer(self) -> None:
        reader = ExtractiveFoundationModel(Numbers(), threshold=0.0)
        bare = "# Mast 10\n\n## Data\n\n| Quantity | Range |\n| --- | --- |\n"
        for question in ("Mast 10?", "Which range?", "Quantity | Range"):
            assert reader.generate([], question, [bare]).text == REFUSAL_SENTENCE
            assert "Quantity" not in reader.generate([], question, [TABLE]).text

    def test_a_table_drawn_with_signs_is_read_by_rows(self) -> None:
        drawn = "+----+----+\n| op | is |\n|====|====|\n| ** | to |\n|    | power |\n+----+----+\n| ~x | not |\n+----+----+\n"
        found = find_candidates([drawn])
        assert [candidate.text for candidate in found] == ["** | to | | | power", "~x | not"]
        assert {candidate.before for candidate in found} == {"op | is"}

    def test_rows_of_a_table_without_its_header_are_rows(self) -> None:
        rows = "| Lid | 2 years |\n| Pump | 5 years |\n"
        assert [candidate.kind for candidate in find_candidates([rows])] == ["row", "row"]

    def test_items_go_with_what_introduces_them(self) -> None:
        found = [candidate for candidate in find_candidates([LIST]) if candidate.kind == "item"]
        assert {candidate.before for candidate in found} == {"There are three ways to start it:"}
        assert {candidate.heading for candidate in found} == {"Start"}

    def test_a_second_piece_is_nearly_as_good_and_new(self) -> None:
        contexts = [
            "The seal is red.\n\n- The *seal* is red.\n\nThe seal is old. Unrelated words stand here."
        ]
        reader = ExtractiveFoundationModel(Numbers(), threshold=0.0)
        assert (
            reader.generate([], "What about the seal?", contexts).text == "The seal is red. The seal is old."
        )
        one = ExtractiveFoundationModel(Numbers(), threshold=0.0, sentences=1)
        assert one.generate([], "What about the seal?", contexts).text == "The seal is red."


class TestWhereItStands:
    @settings(max_examples=100, deadline=None)
    @given(
        some.lists(some.sampled_from([*PAGES, "\n", "Is it? Yes.", "水温六十度。请等待。"]), max_size=4),
        some.sampled_from(
            ["How much?", "Which range has the wind speed?", "水温?", "Who built it and when?"]
        ),
    )
    def test_every_word_and_place_is_of_the_passages(self, contexts: list[str], question: str) -> None:
        generation = ExtractiveFoundationModel(Numbers(), threshold=0.0).generate([], question, contexts)
        cut = pieces(generation, contexts)
        if generation.refused:
            assert cut == [] and generation.text == REFUSAL_SENTENCE
        else:
            assert "".join("".join(cut).split()) == "".join(generation.text.split())
            if generation.text.isascii():
                assert token_overlap(WordCounter(), generation.text, " ".join(contexts)).precision == 1.0

    def test_a_piece_of_two_passages_is_placed_in_the_better_one(self) -> None:
        reader = ExtractiveFoundationModel(Numbers(), threshold=0.0, sentences=1)
        generation = reader.generate(
            [], "Who is red?", ["Nobody knows.", "The lid is red.", "The lid is red."]
        )
        assert [place.context for place in generation.sources] == [1]

    def test_sources_are_kept_with_answers(self) -> None:
        cache = Cache.open(":memory:")
        reader = CachedFoundationModel(ExtractiveFoundationModel(Numbers(), threshold=0.0), cache)
        made = [reader.generate([], "Who built the mast?", PAGES) for _ in range(2)]
        assert made[1].cached and made[1].sources == made[0].sources != ()
        cache.close()


class TestWhenItAbstains:
    def test_questions_about_something_else(self, minilm: LocalEmbeddingModel) -> None:
        reader = ExtractiveFoundationModel(minilm)
        for question in (
            "What does a replacement battery cost?",
            "Which colours can the display show?",
            "Who won the football match?",
            "How many litres does a tomato plant need in a week?",
        ):
            assert reader.generate([], question, PAGES).refused, question

    def test_a_threshold_of_0_always_answers_and_of_1_never(self) -> None:
        for threshold, refused in ((0.0, False), (1.0, True)):
            reader = ExtractiveFoundationModel(Numbers(), threshold=threshold)
            assert reader.generate([], "Zebra?", PAGES).refused is refused

    def test_long_questions_do_not_overflow(self) -> None:
        generation = ExtractiveFoundationModel(Numbers()).generate([], "mast " * 5_000, PAGES)
        assert isinstance(generation.text, str)


class TestWhatItCosts:
    def test_each_promising_piece_is_embedded_once(self) -> None:
        model = Numbers()
        reader = ExtractiveFoundationModel(model, most_candidates=3)
        questions = ["Who built the mast?", "What does the mast weigh?", "Which range has the wind speed?"]
        reader.prepare([(question, PAGES) for question in questions])
        for question in questions:
            reader.generate([], question, PAGES)
        assert len(model.seen) == len(set(model.seen)) <= 3 * len(questions)

    def test_kept_answers_of_an_older_reader_are_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = Cache.open(":memory:")
        reader = CachedFoundationModel(ExtractiveFoundationModel(Numbers(), threshold=0.0), cache)
        reader.generate([], "Who built the mast?", PAGES)
        monkeypatch.setattr("ai4rag_nb.querying.extractive.READER_VERSION", -1)
        assert not reader.generate([], "Who built the mast?", PAGES).cached
        monkeypatch.setattr("ai4rag_nb.querying.extractive.KIND_WEIGHT", 0.5)
        assert not reader.generate([], "Who built the mast?", PAGES).cached
        cache.close()


class TestClues:
    @settings(max_examples=100, deadline=None)
    @given(some.text(max_size=60), some.lists(some.text(max_size=80), max_size=3))
    def test_shares_are_parts_of_one_whole(self, question: str, contexts: list[str]) -> None:
        values = clues_of(question, find_candidates(contexts), contexts).values
        assert (values >= 0).all() and (values[:, :4].sum(axis=1) <= 1 + 1e-9).all()

    def test_words_without_spaces_are_compared_by_pairs(self) -> None:
        assert question_stems("水温是多少") == ["水温", "温是", "是多", "多少"]
        contexts = ["门是红色的。水温是六十度。"]
        clues = clues_of("水温是多少", find_candidates(contexts), contexts)
        assert clues.values[1, 0] > clues.values[0, 0]

    def test_indented_code_below_a_colon_stays_together(self) -> None:
        text = "It is equivalent to:\n\n   if debug:\n       stop()\n\nThen it goes on."
        found = [(sentence.kind, text[sentence.start : sentence.end]) for sentence in split_sentences(text)]
        assert found == [
            ("text", "It is equivalent to:"),
            ("code", "if debug:\n       stop()"),
            ("text", "Then it goes on."),
        ]

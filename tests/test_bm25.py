"""Our BM25: words of any script, counts that can be taken back, scores by the definition."""

import math
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai4rag_nb.foundations.errors import IndexingError
from ai4rag_nb.indexing.bm25 import B, K1, LONGEST_WORD, chunk_weights, rarity, words_of
from ai4rag_nb.indexing.bm25_statistics import (
    KeywordState,
    KeywordStatistics,
    chunk_vector,
    question_vector,
    read_state,
    read_statistics,
    statistics_notes,
)

any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=60)
short = st.lists(
    st.sampled_from(["pump", "valve", "rust", "Pump", "the", "漏水検知", "pumpe", "é", "2"]), max_size=9
).map(" ".join)


@given(any_text)
def test_words_of_any_text(text: str) -> None:
    words = words_of(text)
    assert all(0 < len(word) <= LONGEST_WORD and not re.search(r"\s", word) for word in words)
    assert words_of(text.casefold()) == words
    assert words_of(f"  {text}\n") == words
    assert words_of(f"before {text} behind") == ["before", *words, "behind"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Größe GRÖSSE große", ["grösse", "grösse", "grosse"]),
        ("naïve naı\u0308ve nai\u0308ve", ["naïve", "naı\u0308ve", "naïve"]),
        ("ﬁle ＦＩＬＥ ①", ["file", "file", "1"]),
        ("snake_case kebab-case a.b 3.14", ["snake", "case", "kebab", "case", "a", "b", "3", "14"]),
        ("水", ["水"]),
        ("漏水検知 と 3本", ["漏水", "水検", "検知", "と", "3", "本"]),
        ("ภาษาไทย", ["ภา", "าษ", "ษา", "าไ", "ไท", "ทย"]),
        ("שָׁלוֹם مَرْحَبًا", ["שָׁלוֹם", "مَرْحَبًا"]),
        ("\u202eabc\u202c \u200bdef", ["abc", "def"]),
        ("😀 👩‍👩‍👧 !?", []),
    ],
)
def test_words_by_hand(text: str, words: list[str]) -> None:
    assert words_of(text) == [word for word in words]


@given(st.lists(short, min_size=1, max_size=8), short)
def test_scores_by_the_definition(texts: list[str], question: str) -> None:
    statistics = KeywordStatistics()
    statistics.count(texts)
    statistics.settle_mean()
    bags = [Counter(words_of(text)) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    asked = question_vector(statistics, question)
    for text, bag in zip(texts, bags, strict=True):
        expected = 0.0
        for word in words_of(question):
            holders = sum(word in other for other in bags)
            if bag[word]:
                norm = bag[word] + 1.2 * (1 - 0.75 + 0.75 * bag.total() / mean)
                expected += math.log((len(bags) + 1) / (holders + 0.5)) * bag[word] * 2.2 / norm
        found = chunk_vector(statistics, text)
        assert sum(weight * found.get(number, 0) for number, weight in asked.items()) == pytest.approx(
            expected
        )


@given(st.lists(any_text, max_size=8), st.lists(any_text, max_size=8))
def test_what_is_counted_in_can_be_counted_out(kept: list[str], gone: list[str]) -> None:
    one, two = KeywordStatistics(), KeywordStatistics()
    one.count(kept)
    two.count(gone)
    two.count(kept)
    two.count(gone, -1)
    assert (one.chunks, one.words) == (two.chunks, two.words)
    assert {word: one.holders[number] for word, number in one.numbers.items()} == {
        word: two.holders[number] for word, number in two.numbers.items() if two.holders[number]
    }


@given(st.lists(any_text, max_size=8), st.integers(1, 10**9), st.booleans(), st.booleans())
def test_notes_give_everything_back(texts: list[str], generation: int, writing: bool, again: bool) -> None:
    statistics = KeywordStatistics()
    statistics.count(texts)
    statistics.settle_mean()
    state = KeywordState(generation, writing, again)
    notes = statistics_notes(statistics, state)
    assert list(notes)[-1] == "bm25" and all(len(note.encode()) <= 60_000 for note in notes.values())
    assert (read_state(notes), read_statistics(notes, "ai4rag_x")) == (state, statistics)


def test_half_written_counts_give_a_question_some_weight() -> None:
    """A reader may meet new holders beside the old number of chunks, where a store writes notes one by one."""
    statistics = KeywordStatistics({"pump": 1, "gone": 2}, [0, 5, -1], chunks=2, words=6, mean=3.0)
    assert question_vector(statistics, "pump gone") == {1: pytest.approx(math.log(1 + 0.5 / 5.5))}


def test_a_word_that_was_never_counted_is_said() -> None:
    statistics = KeywordStatistics()
    statistics.count(["pump"])
    with pytest.raises(IndexingError, match="'valve', which was never counted") as caught:
        chunk_vector(statistics, "pump valve")
    assert "refresh_keywords" in caught.value.remedy


def test_the_state_tells_whether_any_note_is_another() -> None:
    notes = []
    for text in ("pump valve", "pump vase", "pump valve"):
        statistics = KeywordStatistics()
        statistics.count([text])
        notes.append(statistics_notes(statistics, KeywordState(1))["bm25"])
    assert notes[0] == notes[2] != notes[1]


def test_numbers_of_words_never_change() -> None:
    statistics = KeywordStatistics()
    statistics.count(["pump valve"])
    before = dict(statistics.numbers)
    statistics.count(["pump valve"], -1)
    statistics.count(["rust pump"])
    assert before.items() <= statistics.numbers.items()
    assert sorted(statistics.numbers.values()) == [1, 2, 3]


def test_the_mean_moves_only_when_it_is_far() -> None:
    statistics = KeywordStatistics()
    statistics.count(["a b c d"] * 100)
    assert not statistics.settle_mean() and statistics.mean == 4.0
    statistics.count(["a " * 20])
    assert not statistics.settle_mean() and statistics.mean == 4.0, "420 / 101 = 4.16 is 4 % away"
    statistics.count(["a " * 20])
    assert statistics.settle_mean() and statistics.mean == 440 / 102
    assert (K1, B) == (1.2, 0.75)
    assert chunk_weights({"a": 1}, 1.0)["a"] == pytest.approx(1.0)
    assert rarity(10, 0) == pytest.approx(math.log(22))

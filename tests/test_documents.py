"""Documents: positions that are exact, bad files that are named, and nothing lost on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import types
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from docling_core.types.doc.document import (
    BaseMeta,
    ContentLayer,
    DescriptionMetaField,
    DoclingDocument,
    PictureMeta,
    RefItem,
    SectionHeaderItem,
    SummaryMetaField,
    TableCell,
    TableData,
    TitleItem,
)
from docling_core.types.doc.labels import DocItemLabel
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.errors import DocumentError, InputError
from ai4rag_nb.foundations.texts import find_occurrences
from ai4rag_nb.indexing.conversion import FORMATS
from ai4rag_nb.indexing.decoding import decode_text
from ai4rag_nb.indexing.documents import LoadedDocuments, load_documents
from ai4rag_nb.indexing.markdown import markdown_document, text_document
from ai4rag_nb.indexing.markup import html_document
from ai4rag_nb.indexing.restructuredtext import restructuredtext_document
from ai4rag_nb.indexing.source import (
    SourceDocument,
    check_documents,
    document_blocks,
    document_fingerprint,
    document_id,
    document_text,
    with_source,
)

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
SETS = ["squad", "covidqa", "scifact", "code", "xquad_multi", "chunking", "docling_documents", "tables"]


def shared_documents(name: str) -> Path:
    folder = DATA / name / "documents"
    if not folder.is_dir():
        pytest.skip(f"the shared set '{name}' is not there (AI4RAG_NB_DATA={DATA})")
    return folder


def check_blocks(document: DoclingDocument) -> None:
    """The contract of blocks: in order, apart, trimmed, and nothing readable outside."""
    text, position = document_text(document), 0
    for block in document_blocks(document):
        assert position <= block.start < block.end <= len(text), block
        assert text[position : block.start].strip() == "", (text[position : block.start], block)
        piece = text[block.start : block.end]
        assert piece == piece.rstrip() and piece[0] not in "\n\r"
        assert (block.level > 0) == (block.kind == "heading")
        if block.ref:
            RefItem(cref=block.ref).resolve(document)
        position = block.end
    assert text[position:].strip() == ""


def exported(document: DoclingDocument) -> str:
    return document.export_to_markdown(escape_underscores=False, escape_html=False, compact_tables=True)


def without_words_of_pictures(document: DoclingDocument) -> str:
    """docling-core writes the mark of a picture alone; our text has its words behind the mark."""
    text, mark = document_text(document), "<!-- image -->"
    for block in reversed([block for block in document_blocks(document) if block.kind == "picture"]):
        text = text[: block.start] + mark + text[block.end :]
    return text


# ---------------------------------------------------------------- real documents


@pytest.mark.parametrize("name", SETS)
def test_shared_sets_load_whole_with_exact_blocks(name):
    folder = shared_documents(name)
    loaded = load_documents(folder, strict=True)
    assert [document.name for document in loaded] == sorted(path.name for path in folder.iterdir())
    assert not loaded.cleaned and not loaded.notes and not loaded.ignored
    for document in loaded:
        check_blocks(document)
        if document.name.endswith(".md"):
            assert document.source_text == (folder / document.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["docling_documents", "tables"])
def test_converted_documents_have_the_text_that_docling_core_exports(name):
    for path in sorted(shared_documents(name).glob("*.json")):
        document = DoclingDocument.load_from_json(path)
        source = with_source(document)
        without = DoclingDocument.load_from_json(path)
        for picture in without.pictures:  # their words are in our text only
            picture.children = [child for child in picture.children if child in picture.captions]
        assert document_text(without) == exported(document)
        for block in source.source_blocks:
            if block.kind in ("heading", "list_item", "code"):
                item = RefItem(cref=block.ref).resolve(document)
                words = getattr(item, "text", "").split()
                assert not words or words[-1] in source.source_text[block.start : block.end]


def test_words_of_pictures_are_in_the_blocks_of_their_pictures():
    for document in load_documents(shared_documents("docling_documents")):
        shown: dict[str, str] = {}
        for block in document_blocks(document):
            if block.kind == "picture":
                words = document_text(document)[block.start : block.end]
                shown[block.ref] = shown.get(block.ref, "") + " ".join(words.split())
        for picture in document.pictures:
            captions = {caption.cref for caption in picture.captions}
            inside = [child.resolve(document) for child in picture.children if child.cref not in captions]
            for item in inside:
                assert " ".join(getattr(item, "text", "").split()) in shown[picture.self_ref]


def test_tables_lists_and_pictures_in_a_picture_are_its_words():
    document = DoclingDocument(name="plan")
    outer = document.add_picture(caption=document.add_text(DocItemLabel.CAPTION, "Plan"))
    document.add_text(DocItemLabel.TEXT, "Inlet", parent=outer)
    document.add_list_item("Valve", parent=document.add_list_group(parent=outer))
    inner = document.add_picture(caption=document.add_text(DocItemLabel.CAPTION, "Detail"), parent=outer)
    document.add_text(DocItemLabel.TEXT, "Spring", parent=inner)
    data = TableData(num_rows=1, num_cols=2)
    for column, text in enumerate(("seal", "24")):
        place = {"start_row_offset_idx": 0, "end_row_offset_idx": 1}
        place |= {"start_col_offset_idx": column, "end_col_offset_idx": column + 1}
        data.table_cells.append(TableCell(text=text, **place))
    document.add_table(data, parent=outer)
    document.add_text(DocItemLabel.TEXT, "Behind.")
    assert "Inlet" not in exported(document)
    text = document_text(document)
    assert text == "Plan\n\n<!-- image -->\n\nInlet\nValve\nDetail\nSpring\nseal, 24\n\nBehind."
    check_blocks(document)


def test_headings_of_real_documents_are_their_own_text():
    for document in load_documents(shared_documents("docling_documents")):
        text, items = document_text(document), {item.self_ref: item for item in document.texts}
        found = {block.ref: block for block in document_blocks(document) if block.kind == "heading"}
        wanted = [
            ref
            for ref, item in items.items()
            if isinstance(item, TitleItem | SectionHeaderItem) and item.text
        ]
        assert set(found) <= set(wanted)
        for ref, block in found.items():
            assert text[block.start : block.end].lstrip("#").split() == items[ref].text.split()


def test_what_a_model_noted_about_an_item_is_a_block_of_its_own_or_of_its_picture():
    document = DoclingDocument(name="noted")
    document.body.meta = BaseMeta(summary=SummaryMetaField(text="All of it."))
    document.add_title("Pumps").meta = BaseMeta(summary=SummaryMetaField(text="Pumps"))
    document.add_text(DocItemLabel.TEXT, "Rinse it.").meta = BaseMeta(
        summary=SummaryMetaField(text="Of rinsing.")
    )
    document.add_code("start()").meta = BaseMeta(summary=SummaryMetaField(text="Of code."))
    picture = document.add_picture(caption=document.add_text(DocItemLabel.CAPTION, "Figure 1"))
    picture.meta = PictureMeta(description=DescriptionMetaField(text="A red pump."))
    group = document.add_list_group()
    group.meta = BaseMeta(summary=SummaryMetaField(text="Of a list."))
    document.add_list_item("one", parent=group)
    source = with_source(document)
    assert source.source_text == exported(document)
    check_blocks(source)
    written = [(block.kind, source.source_text[block.start : block.end]) for block in source.source_blocks]
    assert written == [
        ("heading", "# Pumps"),
        ("text", "Pumps"),
        ("text", "Rinse it."),
        ("text", "Of rinsing."),
        ("code", "```\nstart()\n```"),
        ("text", "Of code."),
        ("text", "Figure 1"),
        ("picture", "<!-- image -->\n\nA red pump."),
        ("list_item", "- one"),
        ("text", "Of a list."),
        ("text", "All of it."),
    ]


def test_every_table_row_is_one_block():
    for document in load_documents(shared_documents("tables")):
        text = document_text(document)
        rows = [
            text[block.start : block.end] for block in document_blocks(document) if block.kind == "table_row"
        ]
        assert len(rows) == sum(table.data.num_rows - 1 for table in document.tables)
        assert all(row.startswith("|") and row.endswith("|") and "\n" not in row for row in rows)


@pytest.mark.parametrize("name", ["squad", "covidqa", "xquad_multi"])
def test_answers_of_benchmarks_are_found_where_they_stand(name):
    documents = {document.name: document for document in load_documents(shared_documents(name))}
    questions = json.loads((DATA / name / "benchmark.json").read_text(encoding="utf-8"))[:200]
    for question in questions:
        texts = [document_text(documents[key]) for key in question["correct_answer_document_keys"]]
        for evidence in question.get("evidence", []):
            assert any(find_occurrences(text, evidence) for text in texts), question["id"]


def test_exact_spans_of_a_benchmark_count_in_our_text():
    documents = {document.name: document for document in load_documents(shared_documents("chunking"))}
    questions = json.loads((DATA / "chunking" / "benchmark.json").read_text(encoding="utf-8"))
    for question in questions:
        text = document_text(documents[question["correct_answer_document_keys"][0]])
        parts = [text[span["start"] : span["end"]].strip() for span in question["spans"]]
        assert parts == question["correct_answers"]


# ---------------------------------------------------------------- converted documents of every shape


def odd_document() -> DoclingDocument:
    document = DoclingDocument(name="odd")
    document.add_title("Title\nover two lines")
    document.add_heading("Deep", level=7)
    document.add_text(DocItemLabel.TEXT, "same")
    document.add_text(DocItemLabel.TEXT, "same")
    document.add_text(DocItemLabel.TEXT, "")
    outer = document.add_list_group()
    for number in range(3):
        item = document.add_list_item("- item" if number else "", parent=outer, enumerated=number == 1)
        inner = document.add_list_group(parent=item)
        document.add_list_item("- item", parent=inner)
        document.add_code("a\n\n    b", parent=item)
    inline = document.add_inline_group()
    document.add_text(DocItemLabel.TEXT, "snake_case <b>", parent=inline)
    document.add_code("x = 1", parent=inline)
    document.add_formula("a_b", parent=inline)
    document.add_formula("\\frac{1}{2}")
    document.add_text(DocItemLabel.PAGE_FOOTER, "page 3", content_layer=ContentLayer.FURNITURE)
    caption = document.add_text(DocItemLabel.CAPTION, "Figure | 1\n| - | - |")
    document.add_picture(caption=caption)
    document.add_picture()
    data = TableData(num_rows=2, num_cols=2)
    for row in range(2):
        for column in range(2):
            data.table_cells.append(
                TableCell(
                    text=f"| {row}\n--- {column} |",
                    start_row_offset_idx=row,
                    end_row_offset_idx=row + 1,
                    start_col_offset_idx=column,
                    end_col_offset_idx=column + 1,
                )
            )
    document.add_table(data, caption=document.add_text(DocItemLabel.CAPTION, "| - | - |"))
    document.add_table(TableData())
    group = document.add_group()
    document.add_text(DocItemLabel.TEXT, "in a group", parent=group)
    document.add_key_values(graph={"cells": [], "links": []})
    return document


def test_odd_items_keep_exact_blocks():
    document = odd_document()
    source = with_source(document)
    assert source.source_text == exported(document)
    check_blocks(source)
    kinds = [block.kind for block in source.source_blocks]
    assert kinds.count("picture") == 2 and kinds.count("table_row") == 1 and kinds.count("code") == 3
    texts = [source.source_text[block.start : block.end] for block in source.source_blocks]
    assert texts[:4] == ["# Title over two lines", "###### Deep", "same", "same"]
    assert any("snake_case <b>" in text for text in texts)
    assert "page 3" not in source.source_text


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("thlcip"), st.text(max_size=30)), max_size=12))
def test_any_document_has_exact_blocks(pieces):
    document = DoclingDocument(name="any")
    group = document.add_list_group()
    for kind, text in pieces:
        if kind == "t":
            document.add_text(DocItemLabel.TEXT, text)
        elif kind == "h":
            document.add_heading(text)
        elif kind == "l":
            document.add_list_item(text, parent=group)
        elif kind == "c":
            document.add_code(text)
        elif kind == "i":
            document.add_text(DocItemLabel.TEXT, text, parent=document.add_inline_group())
        else:
            document.add_picture(caption=document.add_text(DocItemLabel.CAPTION, text))
    source = with_source(document)
    assert source.source_text == exported(document)
    check_blocks(source)


def test_a_document_saved_and_read_back_is_the_same_for_everybody():
    source = markdown_document("# A\n\n| a |\n|---|\n| 1 |\n", "a.md")
    again = SourceDocument.model_validate_json(source.model_dump_json())
    assert document_fingerprint(again) == document_fingerprint(source)
    plain = DoclingDocument.model_validate_json(source.model_dump_json())
    assert [table.data.num_rows for table in plain.tables] == [2]


def test_fingerprint_tells_apart_what_chunkers_tell_apart():
    texts = ["# A\n\nb", "A\n\nb", "# A\n\nb\n"]
    prints = {document_fingerprint(markdown_document(text, "a.md")) for text in texts}
    prints.add(document_fingerprint(text_document(texts[0], "a.md")))
    prints.add(document_fingerprint(markdown_document(texts[0], "b.md")))
    assert len(prints) == 5


def test_plain_docling_documents_are_accepted_and_equal_names_are_not():
    first, second = DoclingDocument(name="a"), DoclingDocument(name="")
    first.add_text(DocItemLabel.TEXT, "one")
    second.add_text(DocItemLabel.TEXT, "two")
    checked = check_documents([first, second])
    assert [document_id(document) for document in checked] == ["a", document_id(second)]
    assert len(document_id(second)) == 32
    with pytest.raises(DocumentError, match="'a'"):
        check_documents([first, first])
    with pytest.raises(DocumentError, match="more than one"):
        check_documents([second, second])
    with pytest.raises(DocumentError, match="list of documents"):
        check_documents(first)
    with pytest.raises(DocumentError, match="of type dict"):
        check_documents([{"name": "a"}])


# ---------------------------------------------------------------- Markdown and text

MARKDOWN_LINES = st.sampled_from(
    [
        "",
        " ",
        "# One",
        "#### Four",
        "Setext",
        "===",
        "---",
        "- item",
        "  - inner",
        "    - deeper",
        "1. first",
        "   more of it",
        "> said",
        "> - said item",
        "```python",
        "```",
        "    indented",
        "| a | b |",
        "|---|:-:|",
        "| 1 | x\\|y |",
        "<div>",
        "</div>",
        "<!-- note -->",
        "[ref]: https://example.org 'title'",
        "![alt](a.png)",
        "text with `code` and *words*",
        "title: x",
        "\tTab",
        "日本語 العربية 🙂",
        "a\u2028b\x0bc",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MARKDOWN_LINES, max_size=25), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_markdown_has_exact_blocks(lines, ending):
    text = ending.join(lines)
    document = markdown_document(text, "any.md")
    assert document.source_text == text
    check_blocks(document)
    check_blocks(text_document(text, "any.txt"))


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=200))
def test_any_text_has_exact_blocks(text):
    check_blocks(markdown_document(text, "any.md"))
    check_blocks(text_document(text, "any.txt"))


def test_items_of_markdown_are_slices_of_the_source():
    text = "# A *b*\n\npara _one_\ntwo\n\n- x **y**\n  z\n\n  more\n\n```\ncode\n```\n"
    document = markdown_document(text, "a.md")
    assert [item.text for item in document.texts] == [
        "A *b*",
        "para _one_\ntwo",
        "x **y**\nz",
        "more",
        "code",
    ]
    assert all(item.text.split("\n")[0] in text for item in document.texts)
    assert document.texts[3].parent.cref == document.texts[2].self_ref


def test_a_rule_at_the_top_is_no_front_matter():
    document = markdown_document("---\n\nFirst words.\n\n---\n\nMore.", "a.md")
    assert [block.kind for block in document_blocks(document)] == ["other", "text", "other", "text"]
    document = markdown_document("---\r\ntitle: A\r\n---\r\n# B", "a.md")
    assert [block.kind for block in document_blocks(document)] == ["other", "heading"]


def test_reference_definitions_and_raw_html_are_not_lost():
    text = "See [it].\n\n[it]: https://example.org\n\n<table><tr><td>raw</td></tr></table>\n"
    document = markdown_document(text, "a.md")
    check_blocks(document)
    assert [block.kind for block in document_blocks(document)] == ["text", "other", "other"]


def test_a_list_after_a_paragraph_is_a_new_list():
    document = markdown_document("- a\n- b\n\npara\n\n- c\n", "a.md")
    assert [len(group.children) for group in document.groups] == [2, 1]


@pytest.mark.parametrize(
    "text",
    [
        "> " * 5000 + "deep",
        "[" * 20000,
        "![a](" * 5000,
        "[![a][b]" * 3000,
        "*" * 20000,
        "`" * 20001,
        "<" * 20000,
    ],
)
def test_hostile_markdown_is_harmless(text):
    check_blocks(markdown_document(text, "hostile.md"))


# ---------------------------------------------------------------- HTML and reStructuredText

HTML_PIECES = st.sampled_from(
    "<p>;</p>;<ul>;<li>;</ul>;<ol start=3>;</ol>;<table>;<tr>;<td colspan=2>;<th>;</table>;<pre>;</pre>;<h1>;</h1>;"
    "<h3>;</h3>;<br>;<b>;</b>;<div hidden>;</div>;<main>;</main>;<script>x</script>;<!-- c -->;<dl><dt>;<dd>;</dl>;"
    "word ;a_b | c\n;&lt|tag&gt|;  ;<img alt='picture'>;<thead>;<caption>cap</caption>".replace(
        "|&", ";&"
    ).split(";")
)


@settings(max_examples=120, deadline=None)
@given(st.lists(HTML_PIECES, max_size=30))
def test_any_html_has_exact_blocks(pieces):
    document = html_document("".join(pieces), "any.html")
    assert without_words_of_pictures(document) == exported(document)
    check_blocks(document)


def test_html_shows_what_a_browser_shows():
    page = """<html><head><title>T</title><script>bad()</script></head><body><nav>menu</nav>
    <main><p>One<p>Two <b>bold</b>&nbsp;x<div hidden>secret</div>
    <table><tr><th>Name<td>Ada<tr><th>Born<td>1815</table>
    <table role=presentation><tr><td><p>left<td>right</table>
    <dl><dt>term<dd>meaning</dl><pre>  a &lt; b</pre></main><footer>foot</footer></body></html>"""
    text = document_text(html_document(page, "a.html"))
    for word in (
        "# T",
        "One",
        "Two bold\u00a0x",
        "Ada",
        "1815",
        "left",
        "right",
        "term",
        "meaning",
        "  a < b",
    ):
        assert word in text
    for word in ("bad", "menu", "secret", "foot"):
        assert word not in text
    assert text.count("|") == 9  # two rows of names and values, and the dashes between them


def test_pictures_of_a_page_are_pictures():
    page = html_document(
        "<h1>T</h1><p>before</p><figure><a href='x'><img src='x.png' alt='A red\n pump'></a>"
        "<figcaption>Figure 3: <b>the pump</b></figcaption></figure><p>see <img alt='an icon'> here</p>"
        "<p><img src='y.png' alt='A lamp'></p><img alt=''><img src='z.png' alt='A fan'><pre>x = 1</pre>"
        "<figure><svg><text>S</text></svg><figcaption>Drawn</figcaption></figure>"
        "<figure><pre>y = 2</pre><figcaption>Code</figcaption></figure>"
        "<figure><img alt='A jar'>More words<figcaption>Jar</figcaption></figure><ul><li><img alt='in a list'></ul>",
        "a.html",
    )
    check_blocks(page)
    shown = [page.source_text[b.start : b.end] for b in page.source_blocks if b.kind == "picture"]
    assert [words.removeprefix("<!-- image -->").strip() for words in shown] == [
        "A red pump",
        "A lamp",
        "A fan",
        "",
    ]
    assert [len(picture.captions) for picture in page.pictures] == [1, 0, 0, 1]
    for words in ("Figure 3: the pump\n\n<!-- image", "see an icon here", "Drawn\n\n<!--", "y = 2", "Code"):
        assert words in page.source_text
    for words in ("A jarMore words", "Jar", "- in a list"):
        assert words in page.source_text


def test_pictures_of_restructuredtext_are_pictures():
    page = restructuredtext_document(
        "Title\n=====\n\n.. figure:: pump.png\n   :alt: A red pump\n   :target: https://x.org\n\n   Figure 3: the *pump*\n\n"
        "   The legend.\n\n.. image:: valve.png\n   :alt: the valve\n\n.. image:: plain.png\n\nSee |icon| here.\n\n"
        ".. |icon| image:: i.png\n   :alt: an icon\n\n- .. image:: l.png\n     :alt: listed\n",
        "a.rst",
    )
    check_blocks(page)
    assert len(page.pictures) == 2 and [len(picture.captions) for picture in page.pictures] == [1, 0]
    assert page.source_text == (
        "# Title\n\nFigure 3: the pump\n\n<!-- image -->\n\nA red pump\n\nThe legend.\n\n"
        "<!-- image -->\n\nthe valve\n\nSee an icon here.\n\n- listed"
    )


def test_deep_html_is_read_as_text():
    assert "deep" in document_text(html_document("<div>" * 3000 + "deep", "a.html"))
    items = document_text(html_document("<ul>" + "<li>item" * 300 + "</ul>", "a.html")).count("- item")
    assert items == 300


UNCLOSED = (
    "<!--",
    "<!-- x ",
    "<![CDATA[",
    "<![if ",
    "<!",
    "<?",
    "<a ",
    "<a href='",
    "<a b=",
    "</a ",
    "&#",
    "<script",
)


def characters_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the characters that the parser of the standard library looks at behind every sign of markup."""
    read: list[int] = []

    def counted(method):
        def parse(self, place, *more):
            found = method(self, place, *more)
            read.append((found if found >= 0 else len(self.rawdata)) - place)
            return found

        return parse

    for name in (
        "comment",
        "pi",
        "html_declaration",
        "marked_section",
        "bogus_comment",
        "starttag",
        "endtag",
    ):
        monkeypatch.setattr(HTMLParser, f"parse_{name}", counted(getattr(HTMLParser, f"parse_{name}")))
    return read


@pytest.mark.parametrize("begin", UNCLOSED)
@pytest.mark.parametrize("ending", ["", ">", "]>", "</p>"])
def test_markup_that_nothing_closes_is_not_looked_for_to_the_end(begin, ending, monkeypatch):
    page = f"<p>first</p>{begin * (12_000 // len(begin))}{ending}"
    read = characters_read(monkeypatch)
    text = document_text(html_document(page, "a.html"))
    assert sum(read) <= 6 * len(page)  # `&lt;` is four times as long as `<`
    assert text.startswith("first")


def test_the_count_sees_what_is_looked_for_to_the_end(monkeypatch):
    page = "<p>first</p>" + "<!-- x " * 1_000
    monkeypatch.setattr("ai4rag_nb.indexing.markup._closed", lambda text: text)
    read = characters_read(monkeypatch)
    html_document(page, "a.html")
    assert sum(read) > 100 * len(page)


def test_what_follows_an_unclosed_comment_is_read():
    page = (
        "<h1>Pumps</h1><!-- seen --><p>a</p><!-- never closed <p>Keep it dry.</p><p>1 < 2 &# &amp; so on</p>"
    )
    text = document_text(html_document(page, "a.html"))
    assert "Keep it dry." in text and "seen" not in text and "1 < 2 &# & so on" in text
    assert "<p>" not in text


RST_TEXT = (
    "~Title~=====~Sub~---~- a~  b~1. one~term~   definition~::~    code~.. note:: x~   inside~.. foo:: bar~"
    "   :opt: 1~.. include:: /etc/passwd~`broken~|sub|~:func:`x`~==  ==~a   b~+--+~|a |~.. [1] foot~*emph*~``lit``~"
    ">>> 1 + 1~:field: x"
)
RST_LINES = st.sampled_from(RST_TEXT.split("~"))


@settings(max_examples=80, deadline=None)
@given(st.lists(RST_LINES, max_size=20))
def test_any_restructuredtext_has_exact_blocks(lines):
    document = restructuredtext_document("\n".join(lines), "any.rst")
    assert document.source_text == exported(document)
    check_blocks(document)


def test_restructuredtext_opens_no_file(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    text = f".. include:: {secret}\n\n.. raw:: html\n   :file: {secret}\n\n.. csv-table:: t\n   :file: {secret}\n\nend"
    assert document_text(restructuredtext_document(text, "a.rst")) == "end"


def test_words_of_sphinx_directives_are_kept():
    text = """
Title
=====

.. function:: open(path)
   :noindex:

   Opens the **valve** with :ref:`care <careful>`.

   .. warning:: Not when hot.

.. code-block:: python
   :linenos:

   a = 1

      b = 2

.. toctree::

   other

.. list-table:: Prices
   :header-rows: 1

   * - part
     - price
   * - bolt
     - 2

======  ===
broken table
======

* item

  * inner
"""
    document = restructuredtext_document(text, "a.rst")
    shown = document_text(document)
    for words in (
        "open(path)",
        "Opens the valve with care.",
        "Not when hot.",
        "a = 1\n\n   b = 2",
        "Prices",
        "bolt",
    ):
        assert words in shown
    assert "broken table" in shown and "- item\n    - inner" in shown
    assert "other" not in shown and "Unknown directive" not in shown


def test_python_language_reference_is_read_without_loss():
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items())[:25]:
        document = restructuredtext_document(text, name)
        check_blocks(document)
        shown = set(re.findall(r"\w+", document_text(document)))
        lost = [word for word in re.findall(r"\w+", text) if word not in shown]
        assert len(lost) <= len(text.split()) * 0.02, (name, lost[:20])


# ---------------------------------------------------------------- decoding


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_text_or_a_reason(data):
    try:
        decoded = decode_text(data)
    except DocumentError as error:
        assert str(error).startswith("it is ")
    else:
        assert "\x00" not in decoded.text and "\r" not in decoded.text
        decoded.text.encode("utf-8")


@settings(max_examples=80, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1))
def test_utf8_text_comes_back_unchanged(text):
    assert decode_text(text.encode()).text == text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252", "latin-1"])
def test_encodings(tmp_path, encoding):
    text = "Grüße aus Köln: Maße, Öl und Übermaß. " * 20
    (tmp_path / "a.md").write_bytes(text.encode(encoding))
    loaded = load_documents(tmp_path)
    assert document_text(loaded[0]).removeprefix("\ufeff") == text
    assert bool(loaded.notes) == (encoding != "utf-8-sig")


@pytest.mark.parametrize(
    "declared",
    ["utf-16", "utf-16-le", "utf-32", "utf-7", "unicode_escape", "idna", "undefined", "hex"],
)
def test_an_encoding_that_a_page_cannot_be_in_is_not_believed(tmp_path, declared):
    page = f"<html><meta charset={declared}><p>Plain words \\n of a caf\u00e9.</p></html>"
    for encoding in ("latin-1", "utf-8"):
        (tmp_path / "a.html").write_bytes(page.encode(encoding))
        assert "Plain words \\n of a caf\u00e9." in load_documents(tmp_path)[0].source_text.replace(
            "\\\\", "\\"
        )


# ---------------------------------------------------------------- bad folders and bad files


def test_missing_folder_names_the_nearest(tmp_path):
    (tmp_path / "handbook").mkdir()
    with pytest.raises(DocumentError, match=r"handbok.*Did you mean 'handbook'"):
        load_documents(tmp_path / "handbok")


def test_links_and_names_that_lead_nowhere(tmp_path):
    (tmp_path / "docs").symlink_to(tmp_path / "gone")
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    os.mkfifo(tmp_path / "pipe")
    for name in ("docs", "ring", "a\x00b", "x" * 300, "no/such/folder"):
        with pytest.raises(DocumentError):
            load_documents(tmp_path / name)
    with pytest.raises(DocumentError, match="neither a folder nor a file"):
        load_documents(tmp_path / "pipe")


def test_a_very_deep_folder(tmp_path):
    depth, here = 600, os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("deep.md").write_text("deep")
    finally:
        os.chdir(here)
    assert load_documents(tmp_path)[0].name == "d/" * depth + "deep.md"


@pytest.mark.parametrize("folder", ["", "  ", None, 3])
def test_no_path_is_an_error(folder):
    with pytest.raises(DocumentError, match="no path"):
        load_documents(folder)


def test_a_home_folder_of_nobody_is_an_error():
    with pytest.raises(DocumentError, match="Write the path in full"):
        load_documents("~nobody-of-this-name/docs")


@pytest.mark.parametrize(
    "options",
    [
        {"patterns": 5},
        {"patterns": [5]},
        {"patterns": {"*.md": 1}},
        {"most_megabytes": "x"},
        {"most_megabytes": None},
        {"most_megabytes": float("nan")},
        {"most_megabytes": 0},
        {"most_megabytes": True},
        {"cache": 5},
        {"on_progress": 5},
    ],
)
def test_options_of_another_type_are_named(tmp_path, options):
    (tmp_path / "a.md").write_text("words")
    with pytest.raises(DocumentError, match=next(iter(options))):
        load_documents(tmp_path, **options)


def test_empty_folder(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.md").write_text("hidden")
    with pytest.raises(DocumentError, match=r"holds no file.*\.md"):
        load_documents(tmp_path)
    (tmp_path / "logo.png").write_bytes(b"\x89PNG")
    with pytest.raises(DocumentError, match="1 file of other kinds"):
        load_documents(tmp_path)


LOAD = """
import os, sys
from ai4rag_nb.indexing.documents import load_documents
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
print(load_documents(sys.argv[1]).report())
"""


def loaded_without_rights(folder: Path) -> subprocess.CompletedProcess[str]:
    """Load a folder as a user without rights, also where tests run as root."""
    command = [sys.executable, "-c", LOAD, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_unreadable_folder_and_file():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        docs = Path(folder) / "docs"
        (docs / "locked").mkdir(parents=True)
        (docs / "good.md").write_text("good")
        (docs / "secret.md").write_text("secret")
        (docs / "locked" / "inner.md").write_text("inner")
        (docs / "secret.md").chmod(0)
        (docs / "locked").chmod(0)
        shown = loaded_without_rights(docs).stdout
        assert "1 document," in shown and "2 skipped" in shown
        assert "secret.md: it cannot be read (Permission denied)" in shown
        assert "locked/: the folder cannot be read (Permission denied)" in shown
        docs.chmod(0)
        failed = loaded_without_rights(docs)
        docs.chmod(0o755)
        (docs / "locked").chmod(0o755)
        assert failed.returncode and "permission denied" in failed.stderr.casefold()


BAD_FILES = {
    "empty.md": (b"", "it is empty"),
    "blank.md": (b" \n\t\n", "it is empty"),
    "invisible.md": ("\u200b\u200b".encode(), "there is no text in it"),
    "picture.md": (b"\x89PNG\r\n\x1a\n" + bytes(50), "it is a PNG picture, not text"),
    "binary.txt": (bytes(range(256)) * 8, "it is binary, not text"),
    "zeros.txt": (bytes(1000), "it is binary, not text"),
    "word.md": (b"PK\x03\x04" + bytes(60), "it is a ZIP file"),
    "half.txt": ("Hello there".encode("utf-16") + b"x", "it is broken utf-16-le"),
    "empty.html": (b"<html><script>x</script></html>", "there is no text in it"),
    "cut.json": (b'{"schema_name": "DoclingDocument", "texts": [', "it is broken JSON"),
    "deep.json": (b"[" * 100_000, "it is broken JSON"),
    "benchmark.json": (b'[{"question": "Why?"}]', "not a DoclingDocument"),
    "number.json": (b"3", "not a DoclingDocument"),
    "package.json": (b'{"name": "x"}', "not a DoclingDocument"),
    "fields.json": (b'{"schema_name": "DoclingDocument"}', "broken DoclingDocument (name"),
    "newer.json": (b'{"schema_name": "DoclingDocument", "name": "x", "version": "99.0.0"}', "version"),
    "paper.pdf": (b"%PDF-1.4 broken", "pip install 'ai4rag_nb[docling]'"),
    "letter.docx": (b"PK\x03\x04", "pip install 'ai4rag_nb[docling]'"),
    "talk.PPTX": (b"PK\x03\x04", "pip install 'ai4rag_nb[docling]'"),
}
BAD_FILES["fields.json"] = (
    b'{"schema_name": "DoclingDocument", "texts": [{"label": "text"}]}',
    "broken DoclingDocument (",
)


def without_docling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docling", None)
    monkeypatch.setitem(sys.modules, "docling.document_converter", None)


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_counted_and_skipped(tmp_path, monkeypatch, name):
    without_docling(monkeypatch)
    content, reason = BAD_FILES[name]
    (tmp_path / "good.md").write_text("# Good")
    (tmp_path / name).write_bytes(content)
    loaded = load_documents(tmp_path)
    assert [document.name for document in loaded] == ["good.md"]
    assert len(loaded.skipped) == 1 and loaded.skipped[0][0] == name
    assert reason in loaded.skipped[0][1]
    assert "1 skipped" in loaded.report() and name in loaded.report()
    with pytest.raises(DocumentError, match="1 file in") as caught:
        load_documents(tmp_path, strict=True)
    assert name in str(caught.value) and caught.value.remedy
    (tmp_path / "good.md").unlink()
    with pytest.raises(DocumentError, match=r"Nothing in .* is a readable document \(1 file\)"):
        load_documents(tmp_path)
    with pytest.raises(InputError):
        load_documents(tmp_path / name)


def test_a_file_of_fifty_megabytes_is_skipped_unopened(tmp_path):
    (tmp_path / "good.md").write_text("good")
    with open(tmp_path / "huge.md", "wb") as file:
        file.truncate(50_000_000)
    loaded = load_documents(tmp_path)
    assert loaded.skipped[0][0] == "huge.md"
    assert "50.0 MB" in loaded.skipped[0][1] and "most_megabytes=51" in loaded.skipped[0][1]
    (tmp_path / "large.txt").write_text("words\n" * 1000)
    assert len(load_documents(tmp_path, most_megabytes=0.005)) == 1
    assert len(load_documents(tmp_path, most_megabytes=49)) == 2


LARGE = """
import json, resource, sys
from ai4rag_nb.indexing.documents import load_documents

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded = load_documents(sys.argv[1], most_megabytes=float(sys.argv[2]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
texts = [document.source_text for document in loaded]
print(json.dumps([len(texts), sum(map(len, texts)), loaded.skipped, loaded.ignored, grown / 1000]))
"""


def loaded_apart(folder: Path, most_megabytes: int) -> tuple[int, int, list[list[str]], list[str], float]:
    """Read a folder in a process of its own: documents, characters, skipped, ignored, megabytes of memory."""
    command = [sys.executable, "-c", LARGE, str(folder), str(most_megabytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    documents, characters, skipped, ignored, grown = json.loads(done.stdout.splitlines()[-1])
    return documents, characters, skipped, ignored, grown


@pytest.mark.parametrize("content", ["text", "random", "zeros"])
def test_large_files_among_documents(tmp_path, content):
    """Unopened by default. Where a user allows them, text is read whole and binary data is named, both within bounds."""
    (tmp_path / "small.md").write_text("# Lamp\n\nThe lamp is red.\n")
    size = 50_000_000
    made = {"text": b"word " * (size // 5), "random": os.urandom(size), "zeros": bytes(size)}[content]
    (tmp_path / "large.txt").write_bytes(made)
    (tmp_path / "large.bin").write_bytes(made)
    documents, characters, skipped, ignored, grown = loaded_apart(tmp_path, 50)
    assert (documents, characters, ignored) == (1, 25, ["large.bin"])
    assert [name for name, _ in skipped] == ["large.txt"] and "most_megabytes=51" in skipped[0][1]
    assert grown < 20, "nothing of it was read"
    documents, characters, skipped, ignored, grown = loaded_apart(tmp_path, 51)
    if content == "text":
        assert (documents, characters, skipped) == (2, 25 + size, [])
    else:
        assert (documents, skipped) == (1, [["large.txt", "it is binary, not text"]])
    assert ignored == ["large.bin"] and grown < 6 * size / 1e6


@pytest.mark.skipif(
    "slow" not in os.environ.get("AI4RAG_NB_FLAGS", ""), reason="takes a minute; AI4RAG_NB_FLAGS=slow runs it"
)
def test_a_large_text_of_many_paragraphs(tmp_path):
    """Read and cut whole, with no more memory than some copies of it."""
    paragraph = "The pump has a valve of brass, which opens at four bar and closes at two. " * 6
    (tmp_path / "large.txt").write_text(f"{paragraph}\n\n" * (50_000_000 // (len(paragraph) + 2)))
    documents, characters, skipped, _, grown = loaded_apart(tmp_path, 60)
    assert documents == 1 and characters > 49_000_000 and not skipped and grown < 20 * 50


def test_damaged_docling_documents(tmp_path):
    good = odd_document().export_to_dict()
    (tmp_path / "good.json").write_text(json.dumps(good))
    faults = {}
    faults["reference.json"] = json.loads(json.dumps(good).replace("#/texts/1", "#/texts/999"))
    faults["cycle.json"] = json.loads(json.dumps(good))
    faults["cycle.json"]["groups"][0]["children"].append({"$ref": "#/groups/0"})
    faults["huge.json"] = json.loads(json.dumps(good))
    faults["huge.json"]["tables"][0]["data"]["num_rows"] = 10**9
    for name, value in faults.items():
        (tmp_path / name).write_text(json.dumps(value))
    loaded = load_documents(tmp_path)
    assert [document.name for document in loaded] == ["good.json"]
    assert [name for name, _ in loaded.skipped] == sorted(faults)
    assert all("broken DoclingDocument" in reason for _, reason in loaded.skipped)


def test_stored_positions_of_others_are_not_believed(tmp_path):
    stored = markdown_document("# A\n\nb", "a.md")
    stored.source_text = "something else"
    (tmp_path / "a.json").write_text(stored.model_dump_json())
    assert document_text(load_documents(tmp_path)[0]) == "# A\n\nb"


def test_unusable_characters_are_removed_and_counted(tmp_path):
    document = DoclingDocument(name="x")
    document.add_text(DocItemLabel.TEXT, "a\x00b\x00c")
    (tmp_path / "a.md").write_bytes(b"one two three four five six seven eight nine ten\x00 eleven")
    (tmp_path / "b.json").write_text(json.dumps(document.export_to_dict()))
    loaded = load_documents(tmp_path)
    assert loaded.cleaned == {"a.md": 1, "b.json": 4}  # text and orig of the item
    assert document_text(loaded[1]) == "abc"
    assert all("\x00" not in document_text(found) for found in loaded)


def test_equal_files_are_reported_and_kept(tmp_path):
    for name in ("b.md", "a.md", "sub/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Same\n\ntext")
    (tmp_path / "d.md").write_text("# Other")
    loaded = load_documents(tmp_path)
    assert len(loaded) == 4
    assert loaded.duplicates == [["a.md", "b.md", "sub/c.md"]]
    assert "a.md = b.md = sub/c.md" in loaded.report()


def test_links_loops_pipes_and_broken_links(tmp_path):
    (tmp_path / "docs" / "inner").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "far.md").write_text("far")
    (tmp_path / "docs" / "inner" / "near.md").write_text("near")
    (tmp_path / "docs" / "a_loop").symlink_to(tmp_path / "docs", target_is_directory=True)
    (tmp_path / "docs" / "b_twice").symlink_to("inner", target_is_directory=True)
    (tmp_path / "docs" / "outer").symlink_to(tmp_path / "outside", target_is_directory=True)
    (tmp_path / "outside" / "back").symlink_to(tmp_path / "docs", target_is_directory=True)
    (tmp_path / "docs" / "far.md").symlink_to("../outside/far.md")
    (tmp_path / "docs" / "gone.md").symlink_to("nothing.md")
    (tmp_path / "docs" / "self.md").symlink_to("self.md")
    os.mkfifo(tmp_path / "docs" / "pipe.md")
    loaded = load_documents(tmp_path / "docs")
    assert [document.name for document in loaded] == ["far.md", "inner/near.md"]
    reasons = dict(loaded.skipped)
    assert set(reasons) == {"a_loop/", "b_twice/", "outer/", "gone.md", "self.md", "pipe.md"}
    assert "not there" in reasons["gone.md"] and "no regular file" in reasons["pipe.md"]
    assert "leads out of the folder" in reasons["outer/"]
    (tmp_path / "linked").symlink_to("docs", target_is_directory=True)
    assert [document.name for document in load_documents(tmp_path / "linked")] == ["far.md", "inner/near.md"]


def test_tables_and_data_that_are_no_documents_come_with_advice(tmp_path):
    (tmp_path / "a.md").write_text("A valve.")
    (tmp_path / "data.json").write_text("[1]")
    assert "turn those" not in load_documents(tmp_path).report()
    (tmp_path / "parts.CSV").write_text("part;size")
    report = load_documents(tmp_path).report()
    assert (
        "parts.CSV\nTables are read as Markdown or HTML: turn those among them into one of these." in report
    )
    assert (
        "data.json: it is JSON, but not a DoclingDocument; write what it tells as Markdown or text" in report
    )


def test_names_with_odd_characters(tmp_path):
    names = [
        "a b.md",
        "naïve – ümlaut.md",
        "日本/語.md",
        "line\nbreak.md",
        "q?*[x].md",
        "'quote\".md",
        "UPPER.MD",
        "🙂.md",
    ]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text {number}")
    loaded = load_documents(tmp_path)
    assert sorted(document.name for document in loaded) == sorted(names)
    (tmp_path / os.fsdecode(b"bad\xff.md")).write_text("bytes")
    names = [document.name for document in load_documents(tmp_path)]
    assert "bad\\xff.md" in names
    json.dumps(names, ensure_ascii=False).encode("utf-8")
    assert all(unicodedata.is_normalized("NFC", name) for name in names)


def test_patterns_choose_files_and_read_other_kinds_as_text(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("# not a heading")
    (tmp_path / "src" / "notes.md").write_text("# heading")
    for patterns in ("*.py", ["*.py"], ["src/*.py"]):
        assert [d.name for d in load_documents(tmp_path, patterns=patterns)] == ["src/main.py"]
    both = load_documents(tmp_path, patterns=["src/*"])
    assert [document_blocks(document)[0].kind for document in both] == ["text", "heading"]


def test_progress_counts_every_file(tmp_path):
    for name in ("a.md", "b.md", "c.json"):
        (tmp_path / name).write_text("x")
    seen = []
    load_documents(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_loaded_list_is_a_list():
    loaded = LoadedDocuments([text_document("hello", "a.txt")])
    assert check_documents(loaded) == list(loaded)
    assert repr(loaded) == "1 document, 5 characters."


# ---------------------------------------------------------------- conversion and its cache


def test_conversions_are_made_once_for_the_same_bytes(tmp_path, monkeypatch):
    import ai4rag_nb.indexing.conversion as conversion

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.html").write_text("<h1>A</h1><table><tr><td>1<td>2</table>")
    (docs / "b.rst").write_text(
        "Title\n=====\n\nSome text of more than one line,\nso that a NUL\x00 is rare.\n"
    )
    (docs / "c.json").write_text(json.dumps(odd_document().export_to_dict()))
    (docs / "d.md").write_text("# D")
    cache = Cache.open(tmp_path / "cache.sqlite")
    first = load_documents(docs, cache=cache)
    (docs / "a.html").rename(docs / "z.html")
    second = load_documents(docs, cache=cache)
    assert (first.from_cache, second.from_cache) == (0, 3)
    assert [document.name for document in second] == ["b.rst", "c.json", "d.md", "z.html"]
    assert second[3].source_text == first[0].source_text and second[3].tables == first[0].tables
    assert second.cleaned == first.cleaned
    (docs / "z.html").write_text("<h1>Changed</h1>")
    assert load_documents(docs, cache=cache).from_cache == 2
    monkeypatch.setattr(conversion, "_OWN_VERSION", 999)
    assert load_documents(docs, cache=cache).from_cache == 0
    cache.close()


def test_a_damaged_cache_entry_is_made_again(tmp_path, monkeypatch):
    import ai4rag_nb.indexing.conversion as conversion

    (tmp_path / "a.html").write_text("<h1>A</h1>")
    cache = Cache.open(":memory:")
    monkeypatch.setattr(conversion, "_kept", lambda converted: b"garbage\n{}")
    load_documents(tmp_path, cache=cache)
    monkeypatch.undo()
    loaded = load_documents(tmp_path, cache=cache)
    assert loaded.from_cache == 0 and loaded[0].source_text == "# A"
    assert load_documents(tmp_path, cache=cache).from_cache == 1
    cache.close()


def fake_docling(monkeypatch: pytest.MonkeyPatch, made: list[str]) -> None:
    """Put a stand-in for docling where the import finds it."""

    class DocumentConverter:
        def __init__(self) -> None:
            made.append("converter")

        def convert(self, stream):
            content = stream.stream.read().decode()
            if "broken" in content:
                raise RuntimeError("no\npages")
            document = DoclingDocument(name=stream.name)
            if "scan" not in content:
                document.add_text(DocItemLabel.TEXT, content)
            document.add_picture()
            return types.SimpleNamespace(document=document)

    package, module = types.ModuleType("docling"), types.ModuleType("docling.document_converter")
    module.DocumentConverter = DocumentConverter
    monkeypatch.setenv("DOCLING_ARTIFACTS_PATH", "anywhere")
    monkeypatch.setitem(sys.modules, "docling", package)
    monkeypatch.setitem(sys.modules, "docling.document_converter", module)


def test_office_files_go_through_docling_when_it_is_there(tmp_path, monkeypatch):
    made: list[str] = []
    fake_docling(monkeypatch, made)
    for name, text in {
        "a.pdf": "pdf words",
        "sub/b.docx": "word words",
        "c.pptx": "broken",
        "d.pdf": "scan",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    cache = Cache.open(":memory:")
    loaded = load_documents(tmp_path, cache=cache)
    assert made == ["converter"]
    assert [(d.name, document_text(d)) for d in loaded] == [
        ("a.pdf", "pdf words\n\n<!-- image -->"),
        ("sub/b.docx", "word words\n\n<!-- image -->"),
    ]
    assert loaded.skipped == [
        ("c.pptx", "it could not be read (RuntimeError: no pages)"),
        ("d.pdf", "there is no text in it"),
    ]
    assert load_documents(tmp_path, cache=cache).from_cache == 2
    cache.close()


def fake_pdfium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for pypdfium2 where the import finds it; its files are their pages, parted by form feeds."""

    class PdfDocument(list):
        def __init__(self, data: bytes) -> None:
            if data.startswith(b"locked"):
                raise RuntimeError("Incorrect password error.")
            super().__init__(
                types.SimpleNamespace(
                    get_textpage=lambda page=page: types.SimpleNamespace(get_text_bounded=lambda: page)
                )
                for page in data.decode().split("\f")
            )

        def close(self) -> None:
            self.clear()

    monkeypatch.setitem(sys.modules, "pypdfium2", types.SimpleNamespace(PdfDocument=PdfDocument))


def without_models(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let no model of docling be found."""
    monkeypatch.delenv("DOCLING_ARTIFACTS_PATH", raising=False)
    monkeypatch.setenv("DOCLING_CACHE_DIR", str(folder / "no-cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "no-hub"))


def test_a_pdf_is_plain_text_until_the_models_are_there(tmp_path, monkeypatch):
    made: list[str] = []
    fake_docling(monkeypatch, made)
    fake_pdfium(monkeypatch)
    without_models(monkeypatch, tmp_path)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(b"One\r\ntwo.\f\fThree \x00.")
    (folder / "b.pdf").write_bytes(b"locked")
    cache = Cache.open(":memory:")
    loaded = load_documents(folder, cache=cache)
    assert [document_text(document) for document in loaded] == ["One\ntwo.\n\nThree ."]
    check_blocks(loaded[0])
    assert loaded.cleaned == {"a.pdf": 1}
    assert loaded.skipped == [("b.pdf", "it could not be read (RuntimeError: Incorrect password error.)")]
    ((name, note),) = loaded.notes
    assert name == "a.pdf" and "plain text" in note and "docling-tools models download" in note
    assert load_documents(folder, cache=cache).from_cache == 1
    monkeypatch.setenv("DOCLING_ARTIFACTS_PATH", "anywhere")
    again = load_documents(folder, cache=cache)
    assert again.from_cache == 0 and not any(name == "a.pdf" for name, _ in again.notes)
    assert "<!-- image -->" in document_text(again[0])
    cache.close()


def test_a_pdf_that_the_models_fail_on_is_plain_text_and_tried_again(tmp_path, monkeypatch):
    made: list[str] = []
    fake_docling(monkeypatch, made)
    fake_pdfium(monkeypatch)
    (tmp_path / "a.pdf").write_bytes(b"A broken page.")
    cache = Cache.open(":memory:")
    for _ in range(2):
        loaded = load_documents(tmp_path, cache=cache)
        assert loaded.from_cache == 0 and document_text(loaded[0]) == "A broken page."
        assert "docling could not convert it (RuntimeError: no pages)" in loaded.report()
    cache.close()


# ---------------------------------------------------------------------------------------- the real docling, where it is installed


@pytest.fixture(scope="module")
def office_files(tmp_path_factory):
    """A Word file, a PowerPoint file and a PDF, as other programs write them."""
    reason = "the extra 'docling' is not installed (pip install '.[docling]')"
    for name in ("docling.document_converter", "pypdfium2"):
        pytest.importorskip(name, reason=reason)
    docx, pptx = pytest.importorskip("docx", reason=reason), pytest.importorskip("pptx", reason=reason)
    folder = tmp_path_factory.mktemp("office")
    word = docx.Document()
    word.add_heading("Pump manual", 0)
    word.add_heading("Safety", 1)
    word.add_paragraph("Wear gloves_and goggles & <masks>.")
    for text, style in (
        ("Close the valve.", "List Bullet"),
        ("Drain the pump.", "List Bullet"),
        ("First step.", "List Number"),
        ("Second step.", "List Number"),
    ):
        word.add_paragraph(text, style=style)
    word.add_heading("Parts", 2)
    fill(word.add_table(rows=3, cols=2), [("Part", "Price"), ("Seal", "3 €"), ("Grüße 🐙", "40 €")])
    word.add_paragraph("Keep the receipt.")
    word.save(str(folder / "manual.docx"))
    show = pptx.Presentation()
    first = show.slides.add_slide(show.slide_layouts[1])
    first.shapes.title.text = "Launch plan"
    first.placeholders[1].text_frame.text = "Order parts"
    first.placeholders[1].text_frame.add_paragraph().text = "Call Bergen"
    second = show.slides.add_slide(show.slide_layouts[5])
    second.shapes.title.text = "Costs"
    fill(
        second.shapes.add_table(2, 2, 0, 2_000_000, 4_000_000, 900_000).table,
        [("Item", "Sum"), ("Pump", "12")],
    )
    show.save(str(folder / "plan.pptx"))
    (folder / "report.pdf").write_bytes(
        plain_pdf([["The seal was replaced in May", "and holds."], ["Page two."]])
    )
    return folder


def fill(table, rows) -> None:
    for number, row in enumerate(rows):
        for column, text in enumerate(row):
            table.cell(number, column).text = text


def plain_pdf(pages: list[list[str]]) -> bytes:
    """Write a PDF of plain lines by hand."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, lines in enumerate(pages):
        shown = "BT /F1 12 Tf 14 TL 72 770 Td " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * n} 0 R >>"
        )
        objects.append(f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream")
    written, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(written)}\n%%EOF\n"
    return (written + head + table + end).encode()


def test_real_office_files_have_exact_blocks(office_files, tmp_path, monkeypatch):
    without_models(monkeypatch, tmp_path)
    refuse_the_network(monkeypatch)
    cache = Cache.open(":memory:")
    loaded = load_documents(office_files, cache=cache)
    assert loaded.skipped == [] and [name for name, _ in loaded.notes] == ["report.pdf"]
    shown = {}
    for document in loaded:
        check_blocks(document)
        text = document_text(document)
        shown[document.name] = [
            (block.kind, block.level, text[block.start : block.end]) for block in document_blocks(document)
        ]
    manual = [(kind, level, re.sub(" {2,}", " ", text)) for kind, level, text in shown["manual.docx"]]
    assert [entry for entry in manual if entry[0] != "table"] == [
        ("heading", 1, "# Pump manual"),
        ("heading", 2, "## Safety"),
        ("text", 0, "Wear gloves_and goggles & <masks>."),
        ("list_item", 0, "- Close the valve."),
        ("list_item", 0, "- Drain the pump."),
        ("list_item", 0, "1. First step."),
        ("list_item", 0, "2. Second step."),
        ("heading", 3, "### Parts"),
        ("table_row", 0, "| Seal | 3 € |"),
        ("table_row", 0, "| Grüße 🐙 | 40 € |"),
        ("text", 0, "Keep the receipt."),
    ]
    plan = [(kind, re.sub(" {2,}", " ", text)) for kind, _, text in shown["plan.pptx"]]
    assert [entry for entry in plan if entry[0] != "table"] == [
        ("heading", "# Launch plan"),
        ("list_item", "- Order parts"),
        ("list_item", "- Call Bergen"),
        ("heading", "# Costs"),
        ("table_row", "| Pump | 12 |"),
    ]
    assert [text for _, _, text in shown["report.pdf"]] == [
        "The seal was replaced in May\nand holds.",
        "Page two.",
    ]
    assert load_documents(office_files, cache=cache).from_cache == 3
    cache.close()


def refuse_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments, **options):
        raise AssertionError(f"somebody looks for a host: {arguments[:2]}")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


def test_a_real_pdf_is_plain_text_when_the_models_are_broken(office_files, tmp_path, monkeypatch):
    without_models(monkeypatch, tmp_path)
    refuse_the_network(monkeypatch)
    broken = tmp_path / "cache" / "models" / "docling-project--docling-layout-heron"
    broken.mkdir(parents=True)
    monkeypatch.setenv("DOCLING_CACHE_DIR", str(tmp_path / "cache"))
    cache = Cache.open(":memory:")
    for cached in (0, 2):
        loaded = load_documents(office_files, cache=cache)
        assert loaded.skipped == [] and loaded.from_cache == cached
        assert [document_text(document) for document in loaded if document.name == "report.pdf"] == [
            "The seal was replaced in May\nand holds.\n\nPage two."
        ]
        ((name, note),) = loaded.notes
        assert name == "report.pdf" and "plain text" in note and "docling could not convert it" in note
    cache.close()


def test_real_files_that_are_damaged_are_named(office_files, tmp_path, monkeypatch):
    without_models(monkeypatch, tmp_path)
    refuse_the_network(monkeypatch)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "whole.md").write_text("All is well.")
    for name in ("manual.docx", "plan.pptx", "report.pdf"):
        data = (office_files / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 3])
    loaded = load_documents(folder)
    assert [name for name, _ in loaded.skipped] == ["manual.docx", "plan.pptx", "report.pdf"]
    assert all(reason.startswith("it could not be read") for _, reason in loaded.skipped)
    assert "Traceback" not in loaded.report()


@pytest.mark.parametrize("method", ["recursive", "hybrid"])
def test_real_office_files_are_chunked_whole(office_files, tmp_path, monkeypatch, method):
    from ai4rag_nb.indexing.chunking import check_chunks, get_chunker
    from ai4rag_nb.indexing.tokens import CharacterCounter

    without_models(monkeypatch, tmp_path)
    counter = CharacterCounter()
    chunker = get_chunker(method, 64, 0, counter)
    for document in load_documents(office_files):
        chunks = chunker.split_document(document)
        report = check_chunks(document, chunks, counter)
        assert report.coverage == 1.0, report


def test_every_known_ending_has_a_reader():
    assert set(FORMATS.values()) == {
        "markdown",
        "text",
        "html",
        "restructuredtext",
        "docling_json",
        "docling",
        "pdf",
    }


def test_loading_documents_imports_nothing_heavy():
    code = (
        "import sys, ai4rag_nb.indexing.documents; "
        "print([m for m in ('torch', 'transformers', 'pymilvus', 'unitxt', 'docling', 'docutils') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"

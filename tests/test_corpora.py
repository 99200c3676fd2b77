"""The corpora: evidence stands where it should, answers follow from it, and nothing is copied from the Python reference."""

import json
import re
from pathlib import Path

import pytest

from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.foundations.errors import InputError, NotAvailableError
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.source import document_blocks, document_text
from ai4rag_nb.serving import corpora
from ai4rag_nb.serving.corpora import (
    bundling_topics,
    corpora_folder,
    find_by_keywords,
    handbook_benchmark,
    handbook_documents,
    python_reference_benchmark,
    python_reference_documents,
    write_handbook,
    write_python_reference,
)

NOTEBOOKS = Path(__file__).parent.parent / "nbs"
LONGEST_RUN = 5  # words in a row that a question or an answer may share with the reference
SMALL_WORDS = set(
    re.findall(r"\w+", "a an and against at by for in is it its no not of on only or than the to with yes")
)


def words(text):
    return re.findall(r"\w+", text.casefold())


def runs(text, length):
    found = words(text)
    return {tuple(found[start : start + length]) for start in range(len(found) - length + 1)}


def records(name):
    return json.loads((corpora_folder() / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages():
    return {page.name: document_text(page) for page in handbook_documents()}


@pytest.fixture(scope="module")
def reference():
    return python_reference_documents()


@pytest.fixture(scope="module")
def topics():
    reason = "this Python comes without its language reference (pydoc_data)"
    return pytest.importorskip("pydoc_data.topics", reason=reason).topics


def test_pages_are_as_long_as_pages(pages):
    assert len(pages) == 29
    assert all(2_500 <= len(text) <= 5_000 for text in pages.values())


def test_pages_have_what_chunkers_find_hard():
    kinds = {page.name: {block.kind for block in document_blocks(page)} for page in handbook_documents()}
    assert sum("table" in found for found in kinds.values()) >= 25
    assert sum("code" in found for found in kinds.values()) >= 15
    assert sum("list_item" in found for found in kinds.values()) >= 12
    rows = {
        page.name: sum(b.kind == "table_row" for b in document_blocks(page)) for page in handbook_documents()
    }
    assert rows["error-codes.md"] > 35


def test_look_alike_pages_differ_in_little(pages):
    lines = [set(pages[f"hearth-{size}.md"].splitlines()) for size in (2, 4, 8)]
    assert len(lines[0] & lines[1]) > 0.5 * len(lines[0])
    assert len(lines[1] & lines[2]) > 0.3 * len(lines[1])


def test_one_page_has_many_scripts(pages):
    text = pages["languages.md"]
    assert all(sample in text for sample in ("日本語", "Ελληνικά", "العربية", "한국어", "🍅", "Cafe\u0301"))


def test_handbook_questions_are_distinct_and_shaped():
    questions = records("handbook_benchmark.json")
    assert len(questions) == 60
    assert len({one["id"] for one in questions}) == len({one["question"] for one in questions}) == 60
    for one in questions:
        assert list(one) == [
            "id",
            "question",
            "correct_answers",
            "correct_answer_document_keys",
            "evidence",
            "answerable",
        ]
        filled = [
            bool(one[key])
            for key in ("correct_answers", "correct_answer_document_keys", "evidence", "answerable")
        ]
        assert filled == [not one["id"].startswith("none-")] * 4


def test_handbook_evidence_stands_verbatim_in_its_document(pages):
    for one in records("handbook_benchmark.json"):
        for passage in one["evidence"]:
            holders = [key for key in one["correct_answer_document_keys"] if passage in pages[key]]
            assert holders, one["id"]
        for key in one["correct_answer_document_keys"]:
            assert any(passage in pages[key] for passage in one["evidence"]), (one["id"], key)


def test_handbook_answers_follow_from_their_evidence():
    for one in records("handbook_benchmark.json"):
        known = set(words(" ".join(one["evidence"]))) | SMALL_WORDS
        assert not one["answerable"] or any(
            set(words(answer)) <= known for answer in one["correct_answers"]
        ), one["id"]


def test_comparisons_need_two_pages():
    for one in records("handbook_benchmark.json"):
        if one["id"].startswith("compare-"):
            assert len(one["correct_answer_document_keys"]) == len(one["evidence"]) == 2


def test_paraphrases_share_no_word_with_their_evidence():
    for one in records("handbook_benchmark.json"):
        if one["id"].startswith("paraphrase-"):
            told = {word for word in words(" ".join(one["evidence"])) if len(word) > 3}
            assert not told & set(words(one["question"])), one["id"]


def test_handbook_benchmark_fits_the_handbook():
    report = handbook_benchmark().check(handbook_documents(), strict=True)
    assert (report.questions, report.unanswerable, report.documents, report.documents_asked) == (
        60,
        8,
        29,
        28,
    )


def test_python_questions_cover_the_reference():
    questions = records("python_reference_questions.json")
    assert 80 <= len(questions) <= 90
    assert (
        len({one["id"] for one in questions}) == len({one["question"] for one in questions}) == len(questions)
    )
    assert len({topic for one in questions for topic in one["topics"]}) >= 45
    assert sum(not one["topics"] for one in questions) == 6
    for one in questions:
        filled = [bool(one[key]) for key in ("correct_answers", "topics", "evidence_keywords")]
        assert filled == [not one["id"].startswith("none-")] * 3
        assert all(len(keyword.split()) <= 3 for keyword in one["evidence_keywords"])


def test_no_sentence_of_the_python_reference_is_copied(topics):
    theirs = set().union(*(runs(text, LONGEST_RUN + 1) for text in topics.values()))
    for one in records("python_reference_questions.json"):
        for text in [one["question"], *one["correct_answers"], " ".join(one["evidence_keywords"])]:
            assert not runs(text, LONGEST_RUN + 1) & theirs, (one["id"], text)


def test_no_saved_output_shows_the_python_reference(topics):
    theirs = {run for text in topics.values() for run in runs(text, 8) if len(set(run) - SMALL_WORDS) >= 4}
    theirs = {run for run in theirs if sum(len(word) > 2 and word.isalpha() for word in run) >= 5}
    for notebook in sorted(NOTEBOOKS.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in notebook.parts:
            continue
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            shown = json.dumps(cell.get("outputs", []), ensure_ascii=False).replace("\\n", " ")
            assert not runs(shown, 8) & theirs, notebook.name


def test_python_evidence_stands_in_the_installed_text(reference):
    benchmark, report = python_reference_benchmark(reference)
    texts = {document.name: document_text(document) for document in reference}
    for passages, keys in zip(benchmark.evidence, benchmark.document_keys, strict=True):
        assert all(any(passage in texts[key] for key in keys) for passage in passages)
    assert report.located + len(report.reworded) == benchmark.answerable.count(True)
    assert len(report.reworded) <= 0.1 * len(benchmark)
    assert not report.left_out


def test_python_passages_are_short_and_in_one_place(reference):
    benchmark, _ = python_reference_benchmark(reference)
    texts = {document.name: document_text(document) for document in reference}
    for passages, keys in zip(benchmark.evidence, benchmark.document_keys, strict=True):
        for passage in passages:
            assert len(passage) < 600
            holders = [name for name, text in texts.items() if passage in text]
            assert holders == keys, holders


def test_rewording_and_missing_topics_are_reported(topics):
    changed = {
        "for": "Everything about loops is told with other words in this edition.",
        **{name: text for name, text in topics.items() if name not in ("for", "while")},
    }
    benchmark, report = python_reference_benchmark(python_reference_documents(changed))
    assert "for-1" in report.reworded
    assert report.left_out == ["while-1"]
    number = benchmark.questions_ids.index("for-1")
    assert (benchmark.document_keys[number], benchmark.evidence[number]) == (["for.txt"], [])
    assert "while-1" not in benchmark.questions_ids
    assert "for-1" in str(report) and "while-1" in str(report)


def test_topics_that_bundle_others_are_left_out(topics):
    left_out = bundling_topics(topics)
    assert "compound" in left_out and "specialnames" in left_out
    assert not {"for", "while", "with", "assert", "types"} & set(left_out)
    assert left_out == bundling_topics(dict(reversed(topics.items())))
    assert bundling_topics({}) == []


def test_python_without_its_reference(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(NotAvailableError, match="without its reference"):
        python_reference_documents()


@pytest.mark.parametrize(
    ("text", "keywords", "passage"),
    [
        ("One red. Two red blue. Blue.", ["red", "blue"], "Two red blue."),
        ("One red. Then. Blue here. Red.", ["red", "blue"], "Blue here. Red."),
        ("One red.\n\nOne blue.", ["red", "blue"], None),
        ("Bluebird and red.", ["blue"], None),
        ("It calls f() now. No.", ["f()"], "It calls f() now."),
        ("In one\n   line end.", ["one line"], "In one\n   line end."),
        ("", ["red"], None),
        ("About +x* and (y.", ["+x*", "(y"], "About +x* and (y."),
    ],
)
def test_key_words(text, keywords, passage):
    assert find_by_keywords(text, keywords) == passage


@pytest.mark.parametrize("write", [write_handbook, write_python_reference])
def test_written_corpora_read_back_the_same(write, tmp_path):
    written = write(tmp_path / "new" / "folder")
    again = write(tmp_path / "new" / "folder")
    assert written == again
    documents = load_documents(written.documents)
    expected = handbook_documents() if write is write_handbook else python_reference_documents()
    assert {one.name: document_text(one) for one in documents} == {
        one.name: document_text(one) for one in expected
    }
    benchmark = BenchmarkData.from_file(written.benchmark)
    wanted = handbook_benchmark() if write is write_handbook else python_reference_benchmark(expected)[0]
    assert benchmark == wanted
    assert benchmark.check(documents, strict=True).evidence_missing == []


def test_written_files_end_their_lines_alike(tmp_path):
    written = write_handbook(tmp_path)
    assert all(b"\r" not in path.read_bytes() for path in written.documents.iterdir())


def test_a_place_without_room_for_a_folder(tmp_path):
    (tmp_path / "file").write_text("taken")
    with pytest.raises(InputError, match="cannot be written into") as caught:
        write_handbook(tmp_path / "file")
    assert "folder in which" in caught.value.remedy


def test_the_module_shows_what_it_offers():
    assert set(corpora.__all__) >= {
        "handbook_documents",
        "handbook_benchmark",
        "write_handbook",
        "WrittenCorpus",
    }

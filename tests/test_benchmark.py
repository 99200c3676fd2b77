"""Benchmarks: every way in, every fault that a person can write into a file, and the check against documents."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai4rag_nb.evaluation.benchmark import BenchmarkData, document_texts
from ai4rag_nb.evaluation.benchmark_records import split_cell
from ai4rag_nb.evaluation.evidence import EvidenceItem, Passage, Span, covers, evidence_share, locate_evidence
from ai4rag_nb.evaluation.split import question_clusters, split_benchmark
from ai4rag_nb.foundations.errors import BenchmarkError, InputError

DATA = Path(os.environ.get("AI4RAG_NB_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
RECORD = {"question": "Why?", "correct_answers": ["so"], "correct_answer_document_keys": ["a.md"]}


def shared(name: str) -> Path:
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the shared set '{name}' is not at {DATA}; set AI4RAG_NB_DATA")
    return folder


def markdown_texts(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "documents").glob("*.md"))
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(content: Any, name: str = "benchmark.json") -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write_file


def changed(**values: Any) -> list[dict[str, Any]]:
    return [{**RECORD, **values}]


BAD_FILES = {
    "broken JSON": ('[{"question": ]', "broken at line 1, column"),
    "empty": ("", "is empty"),
    "blank": (" \n\t", "is empty"),
    "no questions": ([], "The benchmark is empty"),
    "an object": ({"question": "Why?"}, "holds a dict, not a list"),
    "not objects": (["Why?"], "Record 1 of the benchmark is a str"),
    "not UTF-8": (b'[{"question": "Caf\xe9?"}]', "is not UTF-8"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", "is not UTF-8"),
    "missing column": (
        [{"question": "Why?", "correct_answer_document_keys": ["a.md"]}],
        "no column 'correct_answers'",
    ),
    "misspelt column": (
        [{"question": "Why?", "correct_answers": ["so"], "correct_answer_document_key": ["a.md"]}],
        "Did you mean 'correct_answer_document_key'",
    ),
    "column missing in one": ([RECORD, {"question": "How?", "correct_answers": ["so"]}], "record 2 ('How?')"),
    "question is a number": (changed(question=7), "'question' holds 7 (int)"),
    "question is empty": (changed(question=" "), "empty text"),
    "question is null": (changed(question=None), "'question' holds nothing"),
    "answers are a text": (changed(correct_answers="so"), 'Write ["so"]'),
    "answers are a number": (changed(correct_answers=1969), "holds 1969 (int)"),
    "answers hold a number": (changed(correct_answers=[1969]), 'Write it in quotes: "1969"'),
    "answers are an object": (changed(correct_answers={"text": ["so"]}), "(dict)"),
    "answers are empty": (changed(correct_answers=[]), "'correct_answers' is empty"),
    "an answer is empty": (changed(correct_answers=[""]), "empty text"),
    "keys are numbers": (changed(correct_answer_document_keys=[12]), 'Write it in quotes: "12"'),
    "keys are empty": (changed(correct_answer_document_keys=[]), "Name the document"),
    "evidence is a text": (changed(evidence="so it is"), "where a list belongs"),
    "answerable is a word": (changed(answerable="perhaps"), "Write true or false"),
    "id is a list": (changed(id=["a"]), "'id' holds"),
    "duplicate questions": ([RECORD, RECORD], "Records 1 and 2 ask the same question: 'Why?'"),
    "duplicate but for spaces": ([RECORD, {**RECORD, "question": " Why? "}], "ask the same question"),
    "duplicate with other answers": (
        [RECORD, {**RECORD, "correct_answers": ["no"]}],
        "ask the same question",
    ),
    "duplicate with ids": (
        [{**RECORD, "id": "a"}, {**RECORD, "id": "b"}],
        "ask the same question",
    ),
    "duplicate ids": (
        [{**RECORD, "id": "a"}, {**RECORD, "question": "How?", "id": "a"}],
        "the same id 'a'",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_refused_with_its_name_and_the_fault(fault: str, write: Callable[..., Path]) -> None:
    content, message = BAD_FILES[fault]
    path = write(content)
    with pytest.raises(BenchmarkError) as caught:
        BenchmarkData.from_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_a_missing_file_names_the_nearest_one(write: Callable[..., Path]) -> None:
    path = write([RECORD])
    with pytest.raises(BenchmarkError, match=r"Did you mean 'benchmark\.json'"):
        BenchmarkData.from_file(path.with_name("benchmrk.json"))
    with pytest.raises(BenchmarkError, match="There is no benchmark file"):
        BenchmarkData.from_file(path.parent / "nowhere" / "x.json")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        BenchmarkData.from_file(path.parent)
    with pytest.raises(BenchmarkError, match="cannot be read"):
        BenchmarkData.from_file("bench\x00mark.json")


def test_unknown_endings_are_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(BenchmarkError, match=r"unknown ending '\.xlsx'"):
        BenchmarkData.from_file(write("x", "benchmark.xlsx"))


def test_deeply_nested_json_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(BenchmarkError):
        BenchmarkData.from_file(write("[" * 100_000))


def test_all_faulty_records_are_named_in_one_error(write: Callable[..., Path]) -> None:
    records = [{**RECORD, "question": number} for number in range(7)]
    with pytest.raises(BenchmarkError) as caught:
        BenchmarkData.from_file(write(records))
    assert all(f"record {number}" in str(caught.value) for number in range(1, 6))
    assert "7 of 7" in str(caught.value) and "2 more" in str(caught.value)


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".tsv"])
def test_the_same_questions_come_from_every_kind_of_file(ending: str, write: Callable[..., Path]) -> None:
    records = [
        {**RECORD, "id": "one", "evidence": ["so it is, they say"], "answerable": True},
        {
            "question": 'How, "exactly"?',
            "correct_answers": ["a|b", "[c]"],
            "correct_answer_document_keys": ["x/ä.md", "b.md"],
            "id": "two",
            "evidence": [],
            "answerable": True,
        },
        {
            "question": "Who?",
            "correct_answers": [],
            "correct_answer_document_keys": [],
            "id": "three",
            "evidence": [],
            "answerable": False,
        },
    ]
    if ending == ".json":
        path = write(records)
    elif ending == ".jsonl":
        path = write("\n".join(map(json.dumps, records)), "benchmark.jsonl")
    else:
        table = pd.DataFrame(
            [
                {name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()}
                for row in records
            ]
        )
        path = write("", f"benchmark{ending}")
        table.to_csv(path, index=False, sep="\t" if ending == ".tsv" else ",")
    expected = BenchmarkData.from_records(records)
    assert BenchmarkData.from_file(path) == expected
    assert BenchmarkData.from_dataframe(pd.DataFrame(records)) == expected
    assert expected.questions_ids == ["one", "two", "three"]
    assert expected.answerable == [True, True, False]
    assert expected.correct_answers[1] == ["a|b", "[c]"]


def test_csv_cells_may_be_separated_texts_or_python_lists(write: Callable[..., Path]) -> None:
    header = "question;correct_answers;correct_answer_document_keys;answerable;evidence\r\n"
    rows = "Why?;so | thus;a.md|b.md;;\r\nHow?;['it''s', \"b\"];[\"a.md\"];yes;x\r\nWho?;;;no;\r\n"
    path = write("\ufeff\r\n" + header + rows, "benchmark.csv")
    benchmark = BenchmarkData.from_file(path)
    assert benchmark.correct_answers == [["so", "thus"], ["its", "b"], []]
    assert benchmark.document_keys == [["a.md", "b.md"], ["a.md"], []]
    assert benchmark.answerable == [True, True, False]
    assert BenchmarkData.from_file(path, separator=" | ").document_keys[0] == ["a.md|b.md"]


def test_a_csv_with_a_broken_list_or_row_says_where(write: Callable[..., Path]) -> None:
    header = "question,correct_answers,correct_answer_document_keys\n"
    with pytest.raises(BenchmarkError, match="looks like a list and is none"):
        BenchmarkData.from_file(write(header + "Why?,[so],a.md\n", "a.csv"))
    with pytest.raises(BenchmarkError, match="row 1 has another number of cells"):
        BenchmarkData.from_file(write(header + "Why?,so\n", "b.csv"))
    with pytest.raises(BenchmarkError, match="row 1 has another number of cells"):
        BenchmarkData.from_file(write(header + "Why?,so,a.md,more\n", "c.csv"))
    with pytest.raises(BenchmarkError, match="cannot be used"):
        BenchmarkData.from_file(write(header + 'Why?,"so,a.md\n', "d.csv"))
    with pytest.raises(BenchmarkError, match="The benchmark is empty"):
        BenchmarkData.from_file(write(header, "e.csv"))


def test_data_frames_with_arrays_gaps_and_numbers() -> None:
    table = pd.DataFrame({name: [value] for name, value in RECORD.items()})
    table["correct_answers"] = [np.array(["so", "thus"])]
    table["id"] = [float("nan")]
    table["evidence"] = [None]
    table["answerable"] = [np.bool_(True)]
    benchmark = BenchmarkData.from_dataframe(table)
    assert (benchmark.correct_answers, benchmark.questions_ids) == ([["so", "thus"]], ["q0"])
    with pytest.raises(BenchmarkError, match="holds 3"):
        BenchmarkData.from_dataframe(table.assign(correct_answer_document_keys=[3]))
    with pytest.raises(BenchmarkError, match="The benchmark is empty"):
        BenchmarkData.from_dataframe(table.iloc[:0])


ROW = {"question": "Why?", "correct_answers": ["so"], "correct_answer_document_keys": ["a.md"]}


def test_a_benchmark_is_made_of_a_data_frame_alone() -> None:
    table = pd.DataFrame([ROW, {**ROW, "question": "How?", "correct_answers": "thus|so"}], index=[7, 7])
    made = BenchmarkData(table)
    assert made == BenchmarkData.from_dataframe(table)
    assert (made.questions, made.correct_answers) == (["Why?", "How?"], [["so"], ["thus", "so"]])
    with pytest.raises(BenchmarkError, match="Give the table alone"):
        BenchmarkData(table, [["so"], ["so"]])


@pytest.mark.parametrize("name", ["question", "correct_answers", "id", "page"])
def test_a_name_that_stands_twice_is_refused_everywhere(name: str, write: Callable[..., Path]) -> None:
    columns = [*ROW, name, name] if name not in ROW else [*ROW, name]
    frame = pd.DataFrame([["x"] * len(columns)], columns=columns)
    header, cells = ",".join(columns), ",".join("x" for _ in columns)
    values = ", ".join(f'"{column}": ["x"]' for column in columns)
    for make in (BenchmarkData, BenchmarkData.from_dataframe):
        with pytest.raises(BenchmarkError, match=f"'{name}' more than once"):
            make(frame)
    for file in (
        write(f"{header}\n{cells}\n", "a.csv"),
        write(f"{header} \n{cells}\n".replace(",", "\t"), "a.tsv"),
        write(f"[{{{values}}}]", "a.json"),
        write(f"{{{values}}}\n", "a.jsonl"),
    ):
        with pytest.raises(BenchmarkError, match=rf"a\.\w+.*'{name}' more than once"):
            BenchmarkData.from_file(file)


def test_columns_without_a_name_may_repeat(write: Callable[..., Path]) -> None:
    file = write("question,correct_answers,correct_answer_document_keys,,\nWhy?,so,a.md,,\n", "a.csv")
    assert BenchmarkData.from_file(file).questions == ["Why?"]


@pytest.mark.parametrize(
    "wrong", [None, 5, "abc", {"a": 1}, pd.DataFrame([ROW]), pd.Series([1]), {1}, object()]
)
def test_a_value_of_another_type_is_named(wrong: Any) -> None:
    with pytest.raises(BenchmarkError):
        BenchmarkData.from_records(wrong)
    if not isinstance(wrong, pd.DataFrame):
        for make in (BenchmarkData.from_dataframe, BenchmarkData):
            with pytest.raises(BenchmarkError):
                make(wrong)
        with pytest.raises(BenchmarkError):
            BenchmarkData.from_file(wrong)
    with pytest.raises(BenchmarkError):
        BenchmarkData(wrong, wrong, wrong)
    with pytest.raises(BenchmarkError):
        BenchmarkData(["Why?"], wrong, [["a.md"]])
    made = BenchmarkData.from_records([ROW])
    with pytest.raises(InputError):
        made.check(wrong)
    if not isinstance(wrong, pd.DataFrame | pd.Series):
        with pytest.raises(BenchmarkError):
            made.subset(wrong)


@pytest.mark.parametrize("separator", ["", None, 5])
def test_a_separator_has_to_be_a_text(separator: Any, write: Callable[..., Path]) -> None:
    with pytest.raises(BenchmarkError, match="separator"):
        BenchmarkData.from_dataframe(pd.DataFrame([ROW]), separator)
    with pytest.raises(BenchmarkError, match="separator"):
        BenchmarkData.from_file(write("question\nWhy?\n", "a.csv"), separator)


def test_a_question_that_is_missing_is_not_to_be_quoted() -> None:
    for value in (float("nan"), np.nan, None, pd.NA, pd.NaT):
        with pytest.raises(BenchmarkError) as caught:
            BenchmarkData.from_records([{**ROW, "question": value}])
        assert "holds nothing" in str(caught.value) and "quotes" not in str(caught.value)


def test_unusable_characters_are_removed(write: Callable[..., Path]) -> None:
    benchmark = BenchmarkData.from_file(
        write(
            '[{"question": "Wh\\u0000y\\ud800?", "correct_answers": ["s\\udfffo"], '
            '"correct_answer_document_keys": ["a.md"], "id": 7}]'
        )
    )
    assert (benchmark.questions, benchmark.correct_answers, benchmark.questions_ids) == (
        ["Why?"],
        [["so"]],
        ["7"],
    )
    assert len(benchmark.fingerprint()) == 64


@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Cf", "Z"]), min_size=1), min_size=1
    )
)
def test_any_list_survives_a_cell_as_json(texts: list[str]) -> None:
    assert split_cell(json.dumps(texts)) == texts


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_no_cell_breaks_the_parser(cell: str) -> None:
    try:
        assert all(part is not None for part in split_cell(cell))
    except BenchmarkError as error:
        assert "looks like a list" in str(error)


# ----------------------------------------------------------------- against the documents


def benchmark_of(keys: list[list[str]], evidence: list[list[str]] | None = None) -> BenchmarkData:
    count = len(keys)
    return BenchmarkData(
        [f"Question {number}?" for number in range(count)], [["yes"]] * count, keys, evidence=evidence or []
    )


@pytest.mark.parametrize("key", ["Guide/Setup.md", "guide/setup", "guide/setpu.md", "setup.md"])
def test_an_unknown_key_is_named_with_its_questions_and_the_nearest_name(key: str) -> None:
    texts = {"guide/setup.md": "", "index.md": "", "zebra.md": ""}
    with pytest.raises(BenchmarkError) as caught:
        benchmark_of([["index.md"], [key], [key]]).check(texts)
    assert f"'{key}' (questions: q1, q2)" in str(caught.value)
    assert "Did you mean 'guide/setup.md'" in str(caught.value)


def test_numbers_in_names_are_not_guessed() -> None:
    with pytest.raises(BenchmarkError, match=r"'12' \(questions: q0\)"):
        benchmark_of([["12"]]).check({"12.md": "text"})


def test_documents_may_be_docling_documents() -> None:
    from ai4rag_nb.indexing.markdown import markdown_document

    document = markdown_document("# Valve\n\nThe leader\nopens it.\n", "safety.md")
    report = benchmark_of([["safety.md"]], [["leader opens it."]]).check([document])
    (item,) = report.evidence[0]
    assert (
        document_texts([document])["safety.md"][item.spans[0].start : item.spans[0].end]
        == "leader\nopens it."
    )
    with pytest.raises(BenchmarkError, match=r"Did you mean 'safety\.md'"):
        benchmark_of([["safty.md"]]).check([document])


def test_evidence_is_found_whatever_its_spaces_and_unicode_form() -> None:
    text = "Cafe\u0301\n  au lait. Caf\u00e9 au\u00a0lait!"
    located = locate_evidence([["Caf\u00e9 au lait"]], [["a"]], {"a": text})
    found = [text[span.start : span.end] for span in located[0][0].spans]
    assert found == ["Cafe\u0301\n  au lait", "Caf\u00e9 au\u00a0lait"]


def test_missing_evidence_is_listed_and_strict_raises() -> None:
    benchmark = benchmark_of([["a.md"], ["a.md"]], [["it is so"], ["it is not"]])
    report = benchmark.check({"a.md": "Well, it  is so."})
    assert report.evidence_missing == [("q1", "it is not")]
    assert (report.evidence_found, report.evidence[1][0].spans) == (1, ())
    assert "1 of 2 passages of evidence" in str(report)
    with pytest.raises(BenchmarkError, match="q1: 'it is not'"):
        benchmark.check({"a.md": "Well, it  is so."}, strict=True)


def test_repeated_and_unanswerable_questions_are_counted_in_the_report() -> None:
    records = [
        {**RECORD, "id": "a"},
        {**RECORD, "id": "b", "correct_answers": ["because"]},
        {"question": "Who?", "correct_answers": [], "correct_answer_document_keys": [], "id": "c"},
    ]
    report = BenchmarkData.from_records(records).check({"a.md": ""})
    assert (report.questions, report.unanswerable, report.documents_asked) == (3, 1, 1)
    assert "1 question has no answer" in str(report) and "1 question repeats the words of another" in str(
        report
    )


def test_unanswerable_questions_may_repeat_under_ids_of_their_own() -> None:
    empty = {"question": "Who?", "correct_answers": [], "correct_answer_document_keys": []}
    assert len(BenchmarkData.from_records([{**empty, "id": "a"}, {**empty, "id": "b"}])) == 2
    with pytest.raises(BenchmarkError, match="ask the same question"):
        BenchmarkData.from_records([empty, empty])


def test_the_fingerprint_changes_with_anything() -> None:
    base = BenchmarkData.from_records([{**RECORD, "id": "a", "evidence": ["x"]}])
    others = [
        {"question": "How?"},
        {"correct_answers": ["no"]},
        {"correct_answer_document_keys": ["b.md"]},
        {"id": "b"},
        {"evidence": ["y"]},
    ]
    prints = {
        BenchmarkData.from_records([{**RECORD, "id": "a", "evidence": ["x"], **other}]).fingerprint()
        for other in others
    }
    assert len(prints | {base.fingerprint()}) == len(others) + 1
    assert (
        base.fingerprint()
        == BenchmarkData.from_records([{**RECORD, "id": "a", "evidence": ["x"]}]).fingerprint()
    )


# ----------------------------------------------------------------- the rule for evidence


@given(
    start=st.integers(0, 60),
    length=st.integers(0, 60),
    evidence_start=st.integers(0, 60),
    evidence_length=st.integers(1, 60),
)
def test_the_rule_is_half_of_the_evidence_or_wholly_inside(
    start: int, length: int, evidence_start: int, evidence_length: int
) -> None:
    chunk, evidence = (
        set(range(start, start + length)),
        set(range(evidence_start, evidence_start + evidence_length)),
    )
    item = EvidenceItem("x", (Span("a", evidence_start, evidence_start + evidence_length),))
    expected = bool(chunk) and (len(chunk & evidence) >= len(evidence) / 2 or chunk <= evidence)
    assert covers(Passage("a", start, start + length), item) == expected
    assert not covers(Passage("b", start, start + length), item)


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 40)), max_size=6),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=3),
)
def test_the_share_counts_each_character_once(
    chunks: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    passages = [Passage("a", start, start + length) for start, length in chunks]
    held = {place for start, length in chunks for place in range(start, start + length)}
    items = [EvidenceItem("x", (Span("a", start, start + length),)) for start, length in spans]
    total = sum(length for _, length in spans)
    expected = sum(place in held for start, length in spans for place in range(start, start + length)) / total
    assert evidence_share(passages, items) == pytest.approx(expected)


# ----------------------------------------------------------------- splitting


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=2),
        min_size=20,
        max_size=60,
    )
)
def test_no_document_is_on_both_sides(keys: list[list[str]]) -> None:
    benchmark = benchmark_of(keys)
    tuning, test, note = split_benchmark(benchmark, seed=3)
    assert sorted(tuning + test) == sorted(benchmark.questions_ids) and tuning and note
    documents = dict(zip(benchmark.questions_ids, benchmark.document_keys, strict=True))
    sides = [{key for name in side for key in documents[name]} for side in (tuning, test)]
    assert not sides[0] & sides[1]
    assert sorted(number for cluster in question_clusters(keys) for number in cluster) == list(
        range(len(keys))
    )


def test_small_benchmarks_are_not_split() -> None:
    assert split_benchmark(benchmark_of([[f"{n}.md"] for n in range(19)]))[1] == []
    assert split_benchmark(benchmark_of([[f"{n % 9}.md"] for n in range(40)]))[1] == []
    assert split_benchmark(benchmark_of([[f"{n % 10}.md"] for n in range(40)]))[1] != []


# ----------------------------------------------------------------- shared sets


@pytest.mark.parametrize(
    ("name", "questions", "documents", "missing"),
    [
        ("squad", 200, 54, 0),
        ("covidqa", 270, 44, 0),
        ("xquad_multi", 252, 84, 0),
        ("scifact", 143, 94, 3),  # three passages of it are sentences that do not stand beside each other
    ],
)
def test_shared_sets_are_read_and_their_evidence_is_found(
    name: str, questions: int, documents: int, missing: int
) -> None:
    folder = shared(name)
    benchmark = BenchmarkData.from_file(folder / "benchmark.json")
    texts = markdown_texts(folder)
    report = benchmark.check(texts)
    assert (len(benchmark), len(report.evidence_missing), report.documents_asked) == (
        questions,
        missing,
        documents,
    )
    for items in report.evidence:
        for item in items:
            for span in item.spans:
                assert "".join(texts[span.document_id][span.start : span.end].split()) == "".join(
                    item.text.split()
                )
    _, test, _ = split_benchmark(benchmark)
    assert 0.25 < len(test) / questions < 0.35


def test_shared_unanswerable_questions_are_read() -> None:
    benchmark = BenchmarkData.from_file(shared("squad") / "unanswerable.json")
    assert benchmark.answerable == [False] * 43


@pytest.mark.parametrize("cell", ["[1,", "[", '["a", "b', "['see [1]', 'b'"])
def test_a_list_that_is_cut_off_is_no_answer(cell: str) -> None:
    table = [{"question": "Why?", "correct_answers": cell, "correct_answer_document_keys": "a.md"}]
    with pytest.raises(BenchmarkError, match=r"record 1 .*'correct_answers': the cell .* looks like a list"):
        BenchmarkData.from_dataframe(pd.DataFrame(table))


@pytest.mark.parametrize("cell", ["[0, 5) degrees", "[1] or later", '["] key'])
def test_brackets_in_an_answer_stay(cell: str) -> None:
    assert split_cell(cell) == [cell]


def test_a_record_without_a_question_is_named_by_its_number() -> None:
    good = {"question": "When?", "correct_answers": ["now"], "correct_answer_document_keys": ["a.md"]}
    for missing in (None, "", float("nan")):
        with pytest.raises(BenchmarkError) as told:
            BenchmarkData.from_records([good, {**good, "question": missing}])
        assert (
            "\nrecord 2: 'question' holds" in str(told.value)
            and "(" not in str(told.value).partition("record 2")[2][:3]
        )
    with pytest.raises(BenchmarkError, match=r"record 1 \('When\?'\): 'correct_answers'"):
        BenchmarkData.from_records([{**good, "correct_answers": "now"}])

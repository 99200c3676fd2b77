"""Measure the extractive reader on six sets of questions, and how its weights were fitted.

Passages come from one fixed retriever, so only the reader differs: five chunks of 256 tokens by the hybrid
chunker, found by the static model and by keywords, fused by rank. Every question is asked three times: with
its passages, with the passages left that are not from the right document ("document removed"), and with those
left that do not touch the evidence ("passage removed"). The last two, and questions that no document answers
("genuine"), ought to be refused. The halves of a set share no document; weights and thresholds were fitted on
the tuning half. The handbook and the Python reference come with the package, the other sets are read from the
folder in AI4RAG_NB_DATA. Vectors are kept in a file of the temporary folder.
Run: python benchmarks/reader.py [--save] [--fit]
"""

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ai4rag_nb.evaluation.benchmark import BenchmarkData
from ai4rag_nb.evaluation.evidence import EvidenceItem, Passage, covers, locate_evidence, overlap
from ai4rag_nb.evaluation.intervals import paired_difference, summarise
from ai4rag_nb.evaluation.split import question_clusters
from ai4rag_nb.evaluation.token_scores import WordCounter, best_overlap, token_overlap
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.chunks import RetrievedChunk
from ai4rag_nb.foundations.texts import normalise
from ai4rag_nb.indexing.chunking import get_chunker
from ai4rag_nb.indexing.documents import load_documents
from ai4rag_nb.indexing.embedding import BaseEmbeddingModel, CachedEmbeddingModel
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.indexing.source import document_id, document_text
from ai4rag_nb.indexing.static_embedding import StaticEmbeddingModel
from ai4rag_nb.indexing.vector_store import MilvusLiteConfig, get_vector_store
from ai4rag_nb.querying.candidates import find_candidates
from ai4rag_nb.querying.clues import clues_of
from ai4rag_nb.querying.extractive import (
    ExtractiveFoundationModel,
    VectorMemory,
    at_hand,
    certainty,
    readable_beginning,
    shortlist,
)
from ai4rag_nb.querying.generation import Generation
from ai4rag_nb.querying.prompts import REFUSAL_SENTENCE
from ai4rag_nb.querying.retriever import Retriever
from ai4rag_nb.querying.sentences import split_sentences

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
RESULT = ROOT / "benchmarks" / "results" / "reader.json"
PASSAGES, DEPTH, SIZE, MOST, SEED = 5, 40, 256, 60, 64
FITTED = 25  # questions of a set whose candidates are all embedded, to fit the clues
SHARED = ("squad", "covidqa", "code", "tables")
WORDS = WordCounter()


@dataclass(frozen=True)
class Case:
    """Hold a question with the passages that a reader gets."""

    set_name: str  # such as "squad"
    part: str  # "tuning" or "held-out"
    kind: str  # "answerable", "genuine", "document removed" or "passage removed"
    question: str
    answers: list[str]
    contexts: list[str]
    answered: bool  # whether the passages hold the evidence

    @property
    def answerable(self) -> bool:
        """Tell whether there is an answer in the set's documents."""
        return self.kind == "answerable"


def question_sets() -> Iterator[tuple[str, list[Any], BenchmarkData, list[str]]]:
    """Load every set: its name, documents, questions, and further questions without an answer."""
    from ai4rag_nb.serving.corpora import (
        handbook_benchmark,
        handbook_documents,
        python_reference_benchmark,
        python_reference_documents,
    )

    yield "handbook", handbook_documents(), handbook_benchmark(), []
    reference = python_reference_documents()
    yield "python", reference, python_reference_benchmark(reference)[0], []
    for name in SHARED:
        folder = DATA / name
        if not folder.is_dir():
            print(f"skipped: '{name}' is not at {DATA}; set AI4RAG_NB_DATA", file=sys.stderr)
            continue
        more = folder / "unanswerable.json"
        records = json.loads(more.read_text(encoding="utf-8")) if more.is_file() else []
        documents = converted(folder) if name == "tables" else load_documents(folder / "documents")
        benchmark = BenchmarkData.from_file(folder / "benchmark.json")
        yield name, documents, benchmark, [record["question"] for record in records]


def converted(folder: Path) -> list[Any]:
    """Load documents that are kept as DoclingDocument."""
    from docling_core.types.doc.document import DoclingDocument

    documents = []
    for file in sorted((folder / "documents").glob("*.json")):
        document = DoclingDocument.model_validate_json(file.read_text(encoding="utf-8"))
        document.name = file.name
        documents.append(document)
    return documents


def halves(benchmark: BenchmarkData, most: int) -> dict[int, str]:
    """Put questions into the tuning or the held-out half, by document; keep at most so many of each."""
    chance = random.Random(SEED)
    clusters = question_clusters(benchmark.document_keys)
    chance.shuffle(clusters)
    parts: dict[str, list[int]] = {"tuning": [], "held-out": []}
    seen = 0
    for cluster in clusters:
        parts["tuning" if seen * 2 < len(benchmark) else "held-out"] += cluster
        seen += len(cluster)
    return {
        place: part
        for part, places in parts.items()
        for place in chance.sample(places, min(most, len(places)))
    }


def is_held(chunk: RetrievedChunk, items: Sequence[EvidenceItem], name: str) -> bool:
    """Tell whether a passage of the right document brings the evidence."""
    if name == "code" or not items:
        return True
    text = normalise(chunk.text).lower()
    if name == "tables":
        cells = {normalise(item.text).lower() for item in items}
        return 2 * sum(cell in text for cell in cells) >= len(cells)
    passage = Passage(chunk.document_id, chunk.start_index, chunk.end_index, chunk.text)
    return any(covers(passage, item) for item in items)


def touches(chunk: RetrievedChunk, items: Sequence[EvidenceItem], answers: Sequence[str]) -> bool:
    """Tell whether a passage shares a character with the evidence, or has the answer in it."""
    text = normalise(chunk.text).lower()
    if any(len(normalise(answer)) > 3 and normalise(answer).lower() in text for answer in answers):
        return True
    passage = Passage(chunk.document_id, chunk.start_index, chunk.end_index, chunk.text)
    return any(overlap(passage, span) for item in items for span in item.spans)


def found_chunks(documents: list[Any], questions: Sequence[str]) -> list[list[RetrievedChunk]]:
    """Retrieve for all questions with the fixed retriever."""
    model = StaticEmbeddingModel.load()
    chunks = get_chunker("hybrid", SIZE, 0, model.token_counter).split_documents(documents)
    with tempfile.TemporaryDirectory() as folder:
        store = get_vector_store(model, MilvusLiteConfig(Path(folder) / "store.db"), "ai4rag_reader")
        store.add_documents(chunks)
        found = Retriever(store, number_of_chunks=DEPTH, search_mode="hybrid").retrieve_many(questions)
        store.close()
    return found


def cut_case(
    name: str,
    part: str,
    question: str,
    answers: list[str],
    kind: str,
    chunks: list[RetrievedChunk],
    answered: bool = False,
) -> Case:
    """Make a case of the first passages."""
    contexts = [chunk.text for chunk in chunks[:PASSAGES]]
    return Case(name, part, kind, question, answers, contexts, answered)


def make_cases(name: str, documents: list[Any], benchmark: BenchmarkData, more: list[str]) -> Iterator[Case]:
    """Make the cases of one set."""
    texts = {document_id(document): document_text(document) for document in documents}
    located = locate_evidence(benchmark.evidence, benchmark.document_keys, texts)
    hits = found_chunks(documents, [*benchmark.questions, *more])
    for place, part in sorted(halves(benchmark, MOST if name in SHARED else 10_000).items()):
        question, answers = benchmark.questions[place], list(benchmark.correct_answers[place])
        keys, items, found = benchmark.document_keys[place], located[place], hits[place]

        make = partial(cut_case, name, part, question, answers)
        if not benchmark.answerable[place]:
            yield make("genuine", found)
            continue
        right = [chunk for chunk in found[:PASSAGES] if chunk.document_id in keys]
        yield make("answerable", found, answered=any(is_held(chunk, items, name) for chunk in right))
        yield make("document removed", [chunk for chunk in found if chunk.document_id not in keys])
        if name not in ("code", "tables") and any(item.spans for item in items):
            kept = [
                chunk for chunk in found if not (chunk.document_id in keys and touches(chunk, items, answers))
            ]
            yield make("passage removed", kept)
    for number, (question, found) in enumerate(zip(more, hits[len(benchmark) :], strict=True)):
        yield cut_case(name, "tuning" if number % 2 else "held-out", question, [], "genuine", found)


@dataclass(frozen=True)
class NearestSentence:
    """Answer with the nearest sentence, as this toolkit did before its reader weighed clues."""

    embedding_model: BaseEmbeddingModel
    memory: VectorMemory
    threshold: float = 0.3
    word_weight: float = 0.3
    most_candidates: int = 12

    def generate(self, messages: list[Any], question: str, contexts: list[str]) -> Generation:
        """Pick the sentence with the highest similarity, a little helped by shared beginnings of words."""
        texts = self.sentences(contexts)
        shares = self.shares(question, texts)
        kept = sorted(sorted(range(len(texts)), key=lambda place: -shares[place])[: self.most_candidates])
        if not kept:
            return Generation(REFUSAL_SENTENCE, refused=True)
        asked, compared = at_hand(self, [question], [texts[place] for place in kept])  # type: ignore[arg-type]
        similar = compared @ asked[0]
        ranked = np.argsort(-(similar + self.word_weight * shares[kept]), kind="stable")
        chosen = [place for place in ranked if similar[place] >= self.threshold][:1]
        text = texts[kept[chosen[0]]] if chosen else REFUSAL_SENTENCE
        return Generation(text, refused=not chosen)

    def sentences(self, contexts: list[str]) -> list[str]:
        """Find all sentences, rows and header rows but no titles and questions."""
        texts: dict[str, str] = {}
        for context in contexts:
            for sentence in split_sentences(context):
                text = context[sentence.start : sentence.end]
                title = len(text.split()) <= 12 and text[-1] not in ".!…:;。！\"')]*_`"
                if (
                    sentence.kind == "heading"
                    or (sentence.kind == "text" and title)
                    or text.endswith(("?", "？"))
                ):
                    continue
                texts.setdefault(normalise(text), text)
        return list(texts.values())

    def shares(self, question: str, texts: list[str]) -> np.ndarray:
        """Measure how much of the question's words each sentence has, by their first five letters."""
        found = [{word[:5] for word in re.findall(r"\w+", text.lower())} for text in texts]
        asked = {word[:5] for word in re.findall(r"\w+", question.lower())}
        weights = {}
        for word in asked:
            count = sum(word in one for one in found)
            if count:
                weights[word] = math.log(1 + len(texts) / count)
        total = sum(weights.values()) or 1.0
        return np.array([sum(weights.get(word, 0.0) for word in one) / total for one in found])


@dataclass(frozen=True)
class Read:
    """Hold what a reader made of a case."""

    f1: float
    recall: float
    refused: bool
    faithful: float  # share of the answer's words that stand in the passages


def read(reader: Any, case: Case) -> Read:
    """Let a reader answer, and score it; a refusal scores 0."""
    generation = reader.generate([], case.question, case.contexts)
    if generation.refused:
        return Read(0.0, 0.0, True, 1.0)
    scores = best_overlap(WORDS, generation.text, case.answers)
    faithful = token_overlap(WORDS, generation.text, " ".join(case.contexts)).precision
    return Read(scores.f1, scores.recall, False, faithful)


def rounded(value: Any) -> Any:
    """Keep three digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def compare(cases: list[Case], reads: dict[str, list[Read]]) -> dict[str, Any]:
    """Compare readers on the cases of one set and part."""
    able = [place for place, case in enumerate(cases) if case.answerable]
    held = [place for place in able if cases[place].answered]
    kinds = ("genuine", "document removed", "passage removed")
    found: dict[str, Any] = {"questions": len(able), "answered by their passages": len(held)}
    for name, made in reads.items():
        one: dict[str, Any] = {
            "token F1": summarise([made[place].f1 for place in able]),
            "answer correctness": summarise([made[place].recall for place in able]),
            "wrong refusals": summarise([float(made[place].refused) for place in held]),
        }
        for kind in kinds:
            places = [place for place, case in enumerate(cases) if case.kind == kind]
            if places:
                one[f"right refusals, {kind}"] = summarise([float(made[place].refused) for place in places])
        found[name] = one
    before, after = reads["nearest sentence"], reads["reader"]
    for metric, name in (("f1", "token F1"), ("recall", "answer correctness")):
        difference = paired_difference(
            [getattr(after[place], metric) for place in able],
            [getattr(before[place], metric) for place in able],
        )
        found[f"{name}, reader minus nearest sentence"] = {
            "mean": difference.mean,
            "ci_low": difference.ci_low,
            "ci_high": difference.ci_high,
        }
    return found


@cache
def compared_by() -> CachedEmbeddingModel:
    """Load the packaged model, with vectors kept between runs."""
    file = Path(tempfile.gettempdir()) / "ai4rag_nb_reader_benchmark.db"
    return CachedEmbeddingModel(LocalEmbeddingModel.load(), Cache.open(file))


def measure(cases: list[Case]) -> dict[str, Any]:
    """Ask all readers everything."""
    model = compared_by()
    readers: dict[str, Any] = {
        "nearest sentence": NearestSentence(model, VectorMemory()),
        "reader, one piece": ExtractiveFoundationModel(model, sentences=1),
        "reader": ExtractiveFoundationModel(model),
    }
    prepare(cases, readers)
    reads = {name: [read(reader, case) for case in cases] for name, reader in readers.items()}
    result: dict[str, Any] = {
        "least share of an answer's words in its passages": min(
            one.faithful for made in reads.values() for one in made
        )
    }
    for part in ("tuning", "held-out"):
        result[part] = {}
        for name in (*dict.fromkeys(case.set_name for case in cases), "all"):
            places = [
                place
                for place, case in enumerate(cases)
                if name in (case.set_name, "all") and case.part == part
            ]
            chosen = {reader: [made[place] for place in places] for reader, made in reads.items()}
            result[part][name] = compare([cases[place] for place in places], chosen)
    return rounded(result)


def prepare(cases: list[Case], readers: dict[str, Any]) -> None:
    """Embed everything in a few large calls, as a search does; say how many texts each reader needs."""
    first, reader = readers["nearest sentence"], readers["reader"]
    texts: dict[str, None] = {}
    for case in cases:
        sentences = first.sentences(case.contexts)
        shares = first.shares(case.question, sentences)
        best = sorted(range(len(sentences)), key=lambda place: -shares[place])[: first.most_candidates]
        texts.update(dict.fromkeys(sentences[place] for place in best))
    needed = {"nearest sentence": len(texts)}
    own: dict[str, None] = {}
    for case in cases:
        listed = shortlist(case.question, case.contexts, reader.most_candidates, reader.word_weight)
        own.update(dict.fromkeys(candidate.text for candidate in listed.candidates))
    needed["reader"] = len(own)
    print("texts to embed:", needed, file=sys.stderr)
    model = compared_by()
    every = [readable_beginning(model, text) for text in (*texts, *own)]
    model.embed_documents(list(dict.fromkeys(every)))
    model.embed_queries(list(dict.fromkeys(case.question for case in cases)))


def ascend(slope: Callable[[np.ndarray], np.ndarray], count: int, steps: int = 500) -> np.ndarray:
    """Climb to the top of a function with a known slope, by Adam."""
    weights, mean, spread = np.zeros(count), np.zeros(count), np.zeros(count)
    for step in range(1, steps + 1):
        along = slope(weights)
        mean, spread = 0.9 * mean + 0.1 * along, 0.999 * spread + 0.001 * along**2
        weights = weights + 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(spread / (1 - 0.999**step)) + 1e-6)
    return weights


def fit_clues(cases: list[Case]) -> dict[str, float]:
    """Fit the weights of clues and similarity so that the candidates that hold the answer come first."""
    model = ExtractiveFoundationModel(compared_by())
    rows, aims, names = [], [], []
    for case in cases:
        candidates = find_candidates(case.contexts)
        if case.part != "tuning" or not case.answerable or not candidates:
            continue
        if names.count(case.set_name) == FITTED:
            continue
        scores = [best_overlap(WORDS, candidate.text, case.answers) for candidate in candidates]
        gain = np.array([(one.recall + one.f1) / 2 for one in scores])
        if gain.max() < 0.15:
            continue
        aim = np.where(gain >= 0.6 * gain.max(), gain**3, 0)
        asked, compared = at_hand(model, [case.question], [candidate.text for candidate in candidates])
        values = clues_of(case.question, candidates, case.contexts).values
        rows.append(np.column_stack([values, compared @ asked[0]]))
        aims.append(aim / aim.sum())
        names.append(case.set_name)
    shares = [1 / names.count(name) / len(set(names)) for name in names]

    def slope(weights: np.ndarray) -> np.ndarray:
        along = -0.001 * weights
        for row, aim, share in zip(rows, aims, shares, strict=True):
            points = np.exp(row @ weights - (row @ weights).max())
            along = along + share * (row.T @ (aim - points / points.sum()))
        return along

    labels = ("own", "near", "heading", "passage", "kind", "rank", "similarity")
    weights = ascend(slope, len(labels))
    return {label: float(weight / weights[-1]) for label, weight in zip(labels, weights, strict=True)}


def fit_certainty(cases: list[Case]) -> dict[str, float]:
    """Fit the weights of the certainty, and the threshold that refuses one in twenty answered questions."""
    model = ExtractiveFoundationModel(compared_by())
    rows, able, names = [], [], []
    for case in cases:
        if case.part != "tuning" or (case.answerable and not case.answered):
            continue
        listed = shortlist(case.question, case.contexts, model.most_candidates, model.word_weight)
        if not listed.candidates:
            continue
        asked, compared = at_hand(model, [case.question], [one.text for one in listed.candidates])
        similar = compared @ asked[0]
        scores = np.array(listed.scores) + similar
        best = int(scores.argmax())
        code = listed.candidates[best].kind == "code"
        rows.append([scores[best], similar.max(), listed.found[best], float(code), 1.0])
        able.append(case.answerable)
        names.append((case.set_name, case.answerable))
    matrix, right = np.array(rows), np.array(able)
    shares = np.array([1 / names.count(name) for name in names])
    shares /= shares.sum()

    def slope(weights: np.ndarray) -> np.ndarray:
        chance = 1 / (1 + np.exp(-matrix @ weights))
        return matrix.T @ (shares * (right - chance)) - 0.001 * np.append(weights[:4], 0.0)

    weights = ascend(slope, 5, steps=3000)
    sure = np.array([certainty(*row[:3], bool(row[3])) for row in rows])
    order = np.argsort(sure)
    refused = np.cumsum((shares * right)[order]) / (shares * right).sum()
    labels = ("score", "similarity", "found", "code", "offset")
    fitted = {label: float(weight) for label, weight in zip(labels, weights, strict=True)}
    return {**fitted, "threshold": float(sure[order][np.searchsorted(refused, 1 / 20)])}


def main() -> int:
    """Measure, show, and keep the result where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--fit", action="store_true", help="fit the weights on the tuning half, too")
    arguments = parser.parse_args()
    cases = [case for parts in question_sets() for case in make_cases(*parts)]
    result: dict[str, Any] = {
        "what": "the extractive reader against the nearest sentence, with the same passages",
        "note": "the clues were chosen while some held-out questions were seen; no weight was fitted on them",
        "passages": {
            "chunker": "hybrid",
            "tokens": SIZE,
            "a question": PASSAGES,
            "search": "static + keywords",
        },
        "cases": len(cases),
        **measure(cases),
    }
    if arguments.fit:
        result["fitted"] = rounded({"clues": fit_clues(cases), "certainty": fit_certainty(cases)})
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    print(text, end="")
    if arguments.save:
        RESULT.write_text(text, encoding="utf-8")
    compared_by().cache.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Evaluate whole grids of RAG configurations on real questions, and keep every question's scores as figures.

The tables are what `optimizers.py` replays: an optimizer that asks for a configuration is told what was measured here, so that a
thousand searches take minutes. A grid is 144 pipelines: two embedding models, two chunkers, three sizes, two numbers of chunks, dense
or hybrid search, three readers. Kept are question ids and figures, no texts. A grid that was broken off goes on where it was.
Run: python benchmarks/make_tables.py [squad] [covidqa] [tables]
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from ai4rag_nb import AI4RAGSearchSpace, BenchmarkData, load_documents
from ai4rag_nb.evaluation.context_size import context_tokens
from ai4rag_nb.foundations.settings import Settings
from ai4rag_nb.indexing.source import document_id
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel
from ai4rag_nb.optimization.experiment import Experiment
from ai4rag_nb.optimization.run_store import EvaluationResult
from ai4rag_nb.querying.extractive import ExtractiveFoundationModel

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("AI4RAG_NB_DATA", ROOT / ".." / "shared" / "data"))
TABLES = ROOT / "benchmarks" / "tables"
KEPT = ROOT / ".benchmarks"
QUESTIONS = int(os.environ.get("Q", 120))
METRICS = ("answer_correctness", "token_f1", "context_correctness", "overall_score")
CHOICES = {
    "embedding_model": ["local:all-MiniLM-L6-v2", "local:static"],
    "chunking_method": ["recursive", "hybrid"],
    "chunk_size": [64, 128, 256],
    "chunk_overlap": [0],
    "number_of_chunks": [3, 10],
    "retrieval_method": ["simple"],
    "search_mode": ["vector", "hybrid"],
    "ranker_strategy": ["rrf"],
}


def readers() -> list[ExtractiveFoundationModel]:
    """Make three readers that differ in how much they say and in how readily they abstain."""
    model = LocalEmbeddingModel.load()
    return [
        ExtractiveFoundationModel(model, sentences=1, model_id="short"),
        ExtractiveFoundationModel(model, sentences=4, margin=0.5, threshold=0.0, model_id="long"),
        ExtractiveFoundationModel(model, word_weight=4.0, most_candidates=3, model_id="words"),
    ]


def questions_of(name: str) -> BenchmarkData:
    """Take evenly spread questions that have an answer."""
    records = json.loads((DATA / name / "benchmark.json").read_text(encoding="utf-8"))
    records = [record for record in records if record["correct_answers"]]
    places = np.linspace(0, len(records) - 1, min(QUESTIONS, len(records))).astype(int)
    return BenchmarkData.from_records([records[place] for place in places])


def table_of(name: str) -> None:
    """Evaluate the grid on one set."""
    benchmark = questions_of(name)
    documents = load_documents(DATA / name / "documents")
    wanted = set().union(*benchmark.document_keys)
    documents = [document for document in documents if document_id(document) in wanted]
    space = AI4RAGSearchSpace(**CHOICES, foundation_model=readers())
    experiment = Experiment(
        *(documents, benchmark, space, {"max_evals": space.combinations}),
        optimizer="random",
        output_path=KEPT / "tables" / name,
        workspace=KEPT / "workspace",
        settings=Settings(test_share=0.0),
        metrics=["answer_correctness", "token_f1", "context_correctness"],
    )
    experiment.search()
    evaluations = sorted(experiment.results.evaluations, key=lambda one: one.key)
    experiment.close()
    failed = [one.reason for one in evaluations if one.state != "completed"]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(evaluations)} evaluations are not complete: {failed[0]}")
    write_table(name, list(benchmark.questions_ids), evaluations)


def write_table(
    name: str,  # the set
    ids: list[str],  # the questions
    evaluations: list[EvaluationResult],  # of the whole grid
) -> None:
    """Write configurations as JSON and the figures as arrays: scores in ten-thousandths, -1 where there is none."""
    scores = np.full((len(evaluations), len(ids), len(METRICS)), -1, dtype=np.int16)
    tokens = np.zeros((len(evaluations), len(ids)), dtype=np.int16)
    places = {question: place for place, question in enumerate(ids)}
    for row, evaluation in enumerate(evaluations):
        for entry in evaluation.results:
            column = places[entry["question_id"]]
            tokens[row, column] = round(context_tokens([entry["answer_contexts"]]) or 0)
            for metric in entry["metrics"]:
                if metric["name"] in METRICS and metric["score"] is not None:
                    scores[row, column, METRICS.index(metric["name"])] = round(metric["score"] * 10_000)
    TABLES.mkdir(exist_ok=True)
    facts = {
        "metrics": METRICS,
        "questions": ids,
        "configurations": [one.configuration for one in evaluations],
    }
    (TABLES / f"{name}.json").write_text(json.dumps(facts, indent=None) + "\n", encoding="utf-8")
    np.savez_compressed(TABLES / f"{name}.npz", scores=scores, tokens=tokens)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ("squad", "covidqa", "tables"):
        table_of(chosen)

"""Search twelve configurations over a local service, and count what it costs beyond the requests needed.

The service answers after 20 ms and runs in this process; the search runs in a process of its own, whose wall
time, processor time and peak memory are measured. Then a bare script makes the very same requests with the
plain client, ten chats at a time, and the difference of the two wall times is what the toolkit adds. Counts
are compared with the floor: every distinct text embedded once, every distinct prompt answered once.
Run: python benchmarks/search.py
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "search.json"
DOCUMENTS, CHARACTERS, QUESTIONS, DELAY = 30, 4_600, 25, 0.02
VARIANTS = {"both chunkers": ["recursive", "hybrid"], "recursive alone": ["recursive"]}


def workload() -> tuple[list[Any], Any]:
    """Make 30 documents of about 4,600 characters out of the handbook, and take 25 of its questions."""
    from ai4rag_nb import BenchmarkData, handbook_benchmark, handbook_documents
    from ai4rag_nb.indexing.markdown import markdown_document
    from ai4rag_nb.indexing.source import document_text

    pages = handbook_documents()
    texts = {page.name: document_text(page) for page in pages}
    names = list(texts)
    documents = []
    for number in range(DOCUMENTS):
        name = names[number % len(names)]
        own = texts[name] if number < len(names) else ""
        filled = (
            own
            + "\n\n"
            + texts[names[(number + 7) % len(names)]]
            + "\n\n"
            + texts[names[(number + 11) % len(names)]]
        )
        documents.append(markdown_document(filled[:CHARACTERS], name if own else f"extra-{number}.md"))
    full = handbook_benchmark()
    chosen = [name for name, able in zip(full.questions_ids, full.answerable, strict=True) if able][
        :QUESTIONS
    ]
    subset = full.subset(chosen)
    records = zip(subset.questions, subset.correct_answers, subset.document_keys, strict=True)
    return documents, BenchmarkData.from_records(
        [
            {"question": text, "correct_answers": answers, "correct_answer_document_keys": keys}
            for text, answers, keys in records
        ]
    )


def run_search(folder: str, chunkers: list[str]) -> None:
    """Search, as a program of its own; the service's address stands in the environment."""
    from ai4rag_nb import AI4RAGSearchSpace
    from ai4rag_nb.optimization.experiment import Experiment

    documents, benchmark = workload()
    space = AI4RAGSearchSpace(
        embedding_model=["openai:stub-embedding"],
        foundation_model=["openai:stub-chat"],
        chunking_method=chunkers,
        chunk_size=[64, 128, 256],
        number_of_chunks=[3],
        retrieval_method=["simple"],
        search_mode=["vector", "hybrid"],
        ranker_strategy=["rrf"],
    )
    experiment = Experiment(
        documents, benchmark, space, output_path=f"{folder}/run", workspace=f"{folder}/workspace"
    )
    experiment.search()
    evaluated = [result.state for result in experiment.results.evaluations]
    experiment.close()
    used = resource.getrusage(resource.RUSAGE_SELF)
    facts = {
        "pipelines in the space": space.combinations,
        "evaluated": len(evaluated),
        "completed": evaluated.count("completed"),
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_memory_mb": used.ru_maxrss / 1024,
    }
    Path(folder, "facts.json").write_text(json.dumps(facts))


def run_bare(file: str) -> None:
    """Make the same requests with the plain client: embeddings in their order, chats ten at a time."""
    import openai

    client = openai.OpenAI(max_retries=0)
    requests = json.loads(Path(file).read_text())

    def make(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        call = client.embeddings.create if path.endswith("/embeddings") else client.chat.completions.create
        call(**body)

    with ThreadPoolExecutor(10) as pool:
        for is_chat, group in groupby(requests, key=lambda request: request[0].endswith("/chat/completions")):
            if is_chat:
                list(pool.map(make, group))
            else:
                for request in group:
                    make(request)


def timed(*arguments: str, environment: dict[str, str]) -> float:
    """Run this file with some arguments and return the wall time in seconds."""
    started = time.monotonic()
    subprocess.run([sys.executable, __file__, *arguments], env=environment, check=True)
    return time.monotonic() - started


def measure(chunkers: list[str]) -> dict[str, Any]:
    """Measure one variant."""
    sys.path.insert(0, str(ROOT / "tests"))
    from openai_stub import OpenAIStub

    with OpenAIStub(delay=DELAY) as stub, tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": stub.base_url,
            "OPENAI_API_KEY": "key-for-the-benchmark",
        }
        wall = timed("search", folder, ",".join(chunkers), environment=environment)
        counts = replace(stub.counts)
        requests = [(path, body) for path, body in stub.bodies]
        Path(folder, "requests.json").write_text(json.dumps(requests))
        bare = timed("bare", f"{folder}/requests.json", environment=environment)
        facts = json.loads(Path(folder, "facts.json").read_text())
    return {
        **facts,
        "wall_seconds": wall,
        "bare_wall_seconds": bare,
        "own_overhead_seconds": wall - bare,
        "embedding_requests": counts.embedding_requests,
        "texts": counts.texts,
        "texts over the floor": counts.texts / counts.distinct_texts,
        "chats": counts.chats,
        "chats over the floor": counts.chats / counts.distinct_chats,
        "largest_batch": counts.largest_batch,
        "refused": counts.refused,
    }


def rounded(value: Any) -> Any:
    """Keep three digits behind the point."""
    return round(value, 3) if isinstance(value, float) else value


def results() -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure every variant."""
    for name, chunkers in VARIANTS.items():
        yield name, {key: rounded(value) for key, value in measure(chunkers).items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["search"]:
        run_search(sys.argv[2], sys.argv[3].split(","))
    elif sys.argv[1:2] == ["bare"]:
        run_bare(sys.argv[2])
    else:
        found = {"delay_seconds": DELAY, "documents": DOCUMENTS, "questions": QUESTIONS, **dict(results())}
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(RESULT.read_text(encoding="utf-8"))

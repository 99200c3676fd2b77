"""With our own keyword weights every store ranks the same way, whatever happened to it before."""

import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.outcomes import Skipped
from servers import MilvusLiteServer
from servers import milvus_lite_server as milvus_lite_server_fixture
from servers import postgres as postgres_fixture
from store_contract import HashModel, chunk, random_chunks

from ai4rag_nb.foundations.chunks import AI4RAGChunk
from ai4rag_nb.indexing.bm25 import words_of
from ai4rag_nb.indexing.capabilities import capability_table
from ai4rag_nb.indexing.hit_lists import hit_name
from ai4rag_nb.indexing.store_checks import RANKER_STRATEGIES
from ai4rag_nb.indexing.store_config import MilvusConfig, MilvusLiteConfig, PGVectorConfig
from ai4rag_nb.indexing.vector_store import BaseVectorStore, get_vector_store

milvus_lite_server, postgres = milvus_lite_server_fixture, postgres_fixture

TEXTS = {
    "german.md": ["Die Größe der Pumpe", "Straßen und STRASSEN", "Über die Ventile und die Pumpen"],
    "hebrew.md": ["שלום עולם", "עולם המשאבות של שלום", "\u202eמשאבה\u202c"],
    "japanese.md": ["漏水検知器を点検する", "ポンプの漏水", "検知器"],
    "korean.md": ["펌프가 새고 있다", "펌프"],
    "hindi.md": ["मणि और हिन्दी", "हिन्दी पंप"],
    "emoji.md": ["😀 pump 😀", "👩‍👩‍👧 valve", "…!?"],
    "code.md": ["def open_valve(x): return x_1 + 2.5", "open valve x 1 2 5"],
    "twins.md": ["the same pump"] * 4,
    "long.md": ["pump " * 900 + "valve", "x" * 5_000, "f" * 48 + " " + "f" * 49],
}
QUESTIONS = [
    *(
        "pump",
        "the pump of the valve",
        "Grösse STRASSE",
        "große Größe",
        "שלום",
        "משאבה",
        "漏水",
        "検知器の点検",
    ),
    *("펌프가", "हिन्दी", "open_valve 2.5", "x" * 5_000, "f" * 49, "word0 word1 word59", "word3 word3 word3"),
    *("nothing that is there", "?!", "😀", "the THE the", "word7 pump 漏水"),
]


def written() -> list[AI4RAGChunk]:
    own = [chunk(text, number, name) for name, texts in TEXTS.items() for number, text in enumerate(texts, 1)]
    return [*own, *random_chunks(150, seed=4, document="random.md")]


@pytest.fixture()
def stores(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, BaseVectorStore]]:
    """Open a new collection in each store that there is; those that cannot be started are left out."""
    model, opened = HashModel(24), {}

    def place(name: str) -> Any:
        return request.getfixturevalue(name)

    def server_config() -> MilvusConfig:
        server: MilvusLiteServer = place("milvus_lite_server")
        return MilvusConfig(server.uri, keyword="bm25", exact_rows=10_000)

    def postgres_config() -> PGVectorConfig:
        found = place("postgres").place
        login = (found.host, found.port, found.database, found.user, found.password)
        return PGVectorConfig(*login, keyword="bm25")

    makers: dict[str, Callable[[], Any]] = {
        "file": lambda: MilvusLiteConfig(tmp_path / "store.db", keyword="bm25"),
        "server": server_config,
        "postgres": postgres_config,
    }
    for name, maker in makers.items():
        try:
            config = maker()
        except Skipped:  # this store cannot run here; the fixture says why
            continue
        opened[name] = get_vector_store(model, config, f"ai4rag_same_{secrets.token_hex(6)}")
    if len(opened) < 2:
        pytest.skip("there is only one store here, so there is nothing to compare")
    yield opened
    for store in opened.values():
        store.drop()
        store.close()


def definition(store: BaseVectorStore, chunks: list[AI4RAGChunk], question: str) -> dict[str, float]:
    """Score chunks by BM25 in plain steps, with the mean that the weights were written with."""
    assert store.keyword_index is not None
    mean = store.keyword_index.refresh().mean
    bags = [Counter(words_of(piece.text)) for piece in chunks]
    scores: dict[str, float] = {}
    for word, times in Counter(words_of(question)).items():
        holders = sum(word in bag for bag in bags)
        rare = math.log(1 + (len(bags) - holders + 0.5) / (holders + 0.5))
        for piece, bag in zip(chunks, bags, strict=True):
            if word in bag:
                long = 1.2 * (0.25 + 0.75 * bag.total() / mean)
                gain = times * rare * bag[word] * 2.2 / (bag[word] + long)
                scores[hit_name(piece)] = scores.get(hit_name(piece), 0.0) + gain
    return scores


def check_same(stores: dict[str, BaseVectorStore], chunks: list[AI4RAGChunk]) -> None:
    """Compare every store with the definition and with the first store."""
    first = next(iter(stores.values()))
    keywords = first.search_many(QUESTIONS, 500, "keyword")
    for question, hits in zip(QUESTIONS, keywords, strict=True):
        expected = definition(first, chunks, question)
        assert {hit_name(hit): hit.score for hit in hits} == pytest.approx(expected, rel=2e-6)
    for other in stores.values():
        assert other.verify(chunks).whole
        for search in [("keyword",), *(("hybrid", strategy, 60, 0.4) for strategy in RANKER_STRATEGIES)]:
            ours, theirs = (store.search_many(QUESTIONS, 20, *search) for store in (first, other))
            for question, one, two in zip(QUESTIONS, ours, theirs, strict=True):
                assert [hit_name(hit) for hit in one] == [hit_name(hit) for hit in two], (search, question)
                np.testing.assert_allclose(
                    [hit.score for hit in one], [hit.score for hit in two], rtol=1e-5, atol=1e-6
                )
        wanted = ["japanese.md", "random.md", "nobody.md"]
        ours, theirs = (
            store.search_many(QUESTIONS, 20, "keyword", document_ids=wanted) for store in (first, other)
        )
        assert [[hit_name(hit) for hit in hits] for hits in ours] == [
            [hit_name(hit) for hit in hits] for hits in theirs
        ]


def test_every_store_ranks_words_as_the_definition_does(stores: dict[str, BaseVectorStore]) -> None:
    chunks = written()
    for store in stores.values():
        store.add_documents(chunks)
    check_same(stores, chunks)


def test_stores_with_the_same_history_stay_the_same(stores: dict[str, BaseVectorStore]) -> None:
    """Documents come, change and go; the means drift; a load is broken off and gone on with."""
    chunks = written()
    later = random_chunks(40, seed=7, document="later.md")
    shorter = [chunk("word1 pump", number, "random.md") for number in range(1, 31)]
    for store in stores.values():
        store.add_documents(chunks[:60])
        store.add_documents(chunks[60:])
        store.add_documents(later)
        store.delete_documents(["long.md", "hebrew.md", "nobody.md"])
        real = type(store)._settle
        try:
            type(store)._settle = broken  # type: ignore[method-assign]
            with pytest.raises(OSError, match="gone"):
                store.add_documents(random_chunks(5, document="broken.md"))
        finally:
            type(store)._settle = real  # type: ignore[method-assign]
        store.delete_documents(["broken.md"])
        store.replace_documents(shorter)
    kept = [piece for piece in chunks if piece.document_id not in ("long.md", "hebrew.md", "random.md")]
    check_same(stores, [*kept, *later, *shorter])
    for store in stores.values():
        assert store.refresh_keywords() == store.count()
        fresh = store.keyword_index
        assert fresh is not None
        words = sum(len(words_of(piece.text)) for piece in [*kept, *later, *shorter])
        assert fresh.statistics.mean == words / store.count()
    check_same(stores, [*kept, *later, *shorter])


def broken(self: Any) -> None:
    raise OSError("The server is gone.")


def test_the_table_of_stores(stores: dict[str, BaseVectorStore]) -> None:
    table = capability_table(stores)
    assert list(table.index) == list(stores)
    assert all(table["hybrid"]) and set(table["keyword"]) == {"BM25 of this toolkit"}
    for name, product, remote in [
        ("file", r"Milvus Lite 3\.\d+", False),
        ("server", "Milvus", True),
        ("postgres", "PostgreSQL", True),
    ]:
        if name in stores:
            assert re.search(product, table.loc[name, "product"]) and table.loc[name, "remote"] == remote
            assert "<" not in table.loc[name, "product"]

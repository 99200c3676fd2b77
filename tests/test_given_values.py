"""What is handed to chunkers, stores and indexes by kind: another thing in its place is named, never used."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from store_contract import HashModel

from ai4rag_nb.foundations.chunks import AI4RAGChunk, RetrievedChunk
from ai4rag_nb.foundations.errors import AI4RAGError, InputError
from ai4rag_nb.indexing.chunking import chunking_methods, get_chunker
from ai4rag_nb.indexing.markdown import markdown_document
from ai4rag_nb.indexing.multi_index import MultiIndexManager
from ai4rag_nb.indexing.vector_store import MilvusLiteConfig, get_vector_store
from ai4rag_nb.querying.small_to_big import ChunkOptimizer

PAGE = "# Care\n\nRinse the filter weekly. Dry it in the shade. Never use soap.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
DOCUMENT = markdown_document(PAGE, "care.md")
CHUNKS = get_chunker("hybrid", 64).split_documents([DOCUMENT])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    opened = get_vector_store(HashModel(), MilvusLiteConfig(str(tmp_path_factory.mktemp("s") / "s.db")))  # type: ignore[arg-type]
    opened.add_documents(ChunkOptimizer().optimize_for_retrieval(CHUNKS, [DOCUMENT]))
    yield opened
    opened.close()


class TestChunkOptimizer:
    @pytest.mark.parametrize("size", [0, -5, 7, "64", 64.5, True, None])
    def test_sizes(self, size: Any) -> None:
        with pytest.raises(InputError, match="small_size"):
            ChunkOptimizer(small_size=size)

    @pytest.mark.parametrize("counter", [64, "words", None, HashModel()])
    def test_counters(self, counter: Any) -> None:
        with pytest.raises(InputError, match=r"token_counter is .*, which counts no tokens"):
            ChunkOptimizer(counter)

    @pytest.mark.parametrize("chunks", [[DOCUMENT], DOCUMENT, "care.md", None, CHUNKS[0], [1]])
    def test_chunks(self, chunks: Any) -> None:
        with pytest.raises(InputError, match="chunks"):
            ChunkOptimizer().optimize_for_retrieval(chunks)

    @pytest.mark.parametrize("documents", [CHUNKS, DOCUMENT, "care.md", None])
    def test_documents(self, documents: Any) -> None:
        with pytest.raises(InputError, match="documents"):
            ChunkOptimizer().optimize_for_retrieval(CHUNKS, documents)

    @pytest.mark.parametrize("limit", [-2, -1, 0, "x", 1.5, True])
    def test_limits(self, store: Any, limit: Any) -> None:
        hits = store.search("filter", k=4)
        with pytest.raises(InputError, match="limit is"):
            ChunkOptimizer().expand_for_generation(hits, store, limit=limit)

    @pytest.mark.parametrize("share", [2, 0, -1, "x", None, True, float("nan")])
    def test_shares(self, store: Any, share: Any) -> None:
        with pytest.raises(InputError, match="merge_share is"):
            ChunkOptimizer().expand_for_generation(
                store.search("filter"), store, "auto_merge", merge_share=share
            )

    def test_hits_and_stores(self, store: Any) -> None:
        hits, optimizer = store.search("filter"), ChunkOptimizer()
        for wrong in (CHUNKS, hits[0], "filter", store, None):
            with pytest.raises(InputError, match="hits"):
                optimizer.expand_for_generation(wrong, store)
        for nothing in (None, "store.db", hits):
            with pytest.raises(InputError, match="keeps no chunks"):
                optimizer.expand_for_generation(hits, nothing)
        assert optimizer.expand_for_generation([], store) == []
        assert len(optimizer.expand_for_generation(hits, store, limit=1)) == 1


class TestDirectEntries:
    @pytest.mark.parametrize("method", [["hybrid"], 5, None])
    def test_methods(self, method: Any) -> None:
        with pytest.raises(InputError, match="no name of a chunking method"):
            get_chunker(method)

    @pytest.mark.parametrize("method", chunking_methods())
    def test_every_chunker_checks_counter_size_and_document(self, method: str) -> None:
        for counter in ("x", 4, HashModel()):
            with pytest.raises(InputError, match="counts no tokens"):
                get_chunker(method, 128, 0, counter)  # type: ignore[arg-type]
        for size in ("128", 64.5, True, 3):
            with pytest.raises(InputError, match="chunk_size"):
                get_chunker(method, size)  # type: ignore[arg-type]
        for document in ("care.md", None, [DOCUMENT]):
            with pytest.raises(AI4RAGError, match="is no document"):
                get_chunker(method).split_document(document)  # type: ignore[arg-type]

    @pytest.mark.parametrize("model", [None, "minilm", HashModel])
    def test_models(self, tmp_path: Path, model: Any) -> None:
        config = MilvusLiteConfig(str(tmp_path / "m.db"))
        for make in (get_vector_store, MultiIndexManager):
            with pytest.raises(InputError, match="embeds no texts"):
                make(model, config)  # type: ignore[operator]

    def test_loads_and_places(self, store: Any) -> None:
        for load in (store.add_documents, store.replace_documents):
            for wrong in ([DOCUMENT], DOCUMENT, CHUNKS[0], "care.md"):
                with pytest.raises(InputError, match="chunks"):
                    load(wrong)
        for wrong in ("care.md", [("care.md", "1")], ["care.md"], 5, [("care.md", True)]):
            with pytest.raises(InputError, match="place"):
                store.get_chunks(wrong)
        for window in (-1, 1.5, "1", True):
            with pytest.raises(InputError, match="window"):
                store.neighbours(CHUNKS[0], window)
        with pytest.raises(InputError, match="chunk"):
            store.neighbours("care.md", 1)
        assert [chunk.sequence_number for chunk in store.neighbours(CHUNKS[0], 0)] == [1]


class TestMultiIndexManager:
    @pytest.fixture()
    def manager(self, tmp_path: Path) -> Any:
        made = MultiIndexManager(HashModel(), MilvusLiteConfig(str(tmp_path / "m.db")))  # type: ignore[arg-type]
        made.index_document(DOCUMENT, "ai4rag_manual")
        yield made
        made.close()

    def test_one_kind_needs_no_list_and_an_empty_list_is_refused(self, manager: Any) -> None:
        alone = manager.search_multi_index("filter", "ai4rag_manual", "table", 3)
        assert {hit.metadata["content_type"] for hit in alone} == {"table"}
        assert alone == manager.search_multi_index("filter", "ai4rag_manual", ["table"], 3)
        for wrong, said in (([], "empty"), ("tables", "Did you mean 'table'"), (5, "not a list")):
            with pytest.raises(InputError, match=said):
                manager.search_multi_index("filter", "ai4rag_manual", wrong)

    def test_names_and_questions(self, manager: Any) -> None:
        with pytest.raises(InputError, match=r"no index .ai4rag_manuel.\. Did you mean .ai4rag_manual"):
            manager.search_multi_index("filter", "ai4rag_manuel")
        for question in ("", "  ", None):
            with pytest.raises(InputError, match="The question is empty"):
                manager.search_multi_index(question, "ai4rag_manual")
        for base in (None, 5, "no such; name"):
            with pytest.raises(InputError, match="cannot name a collection"):
                manager.search_multi_index("filter", base)
        for depth in (0, -1, "3", True):
            with pytest.raises(InputError, match="k is"):
                manager.search_multi_index("filter", "ai4rag_manual", None, depth)
        with pytest.raises(InputError, match="search mode"):
            manager.search_multi_index("filter", "ai4rag_manual", search_mode="dense")
        both = manager.search_multi_index("filter weekly", "ai4rag_manual", search_mode="hybrid")
        assert both[0].scores.keys() >= {"types", "keyword"}

    def test_a_name_that_is_not_there_is_found_once_it_is(self, manager: Any) -> None:
        with pytest.raises(InputError, match="no index"):
            manager.search_multi_index("filter", "ai4rag_other")
        manager.index_document(DOCUMENT, "ai4rag_other")
        assert manager.search_multi_index("filter", "ai4rag_other")

    def test_a_chunker_without_kinds_is_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        config = MilvusLiteConfig(str(tmp_path / "m.db"))
        manager = MultiIndexManager(HashModel(), config, get_chunker("hybrid", 128))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="The chunker 'hybrid' does not say"):
            manager.index_document(DOCUMENT, "ai4rag_manual")
        assert manager.store("ai4rag_manual").list_collections(config) == {}
        manager.close()
        for wrong in ({"tab": HashModel()}, {"table": "minilm"}, HashModel()):
            with pytest.raises(InputError):
                MultiIndexManager(HashModel(), config, None, wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="cuts no documents"):
            MultiIndexManager(HashModel(), config, "by_content")  # type: ignore[arg-type]
        with pytest.raises(AI4RAGError, match="no configuration"):
            MultiIndexManager(HashModel(), "m.db")  # type: ignore[arg-type]

    def test_equal_ranks_are_ordered_by_score_where_one_model_made_all(self, manager: Any) -> None:
        hits = manager.search_multi_index("filter", "ai4rag_manual", None, 3)
        for one, other in pairwise(hits):
            assert one.score > other.score or one.scores["dense"] >= other.scores["dense"]
        assert len({hit.metadata["content_type"] for hit in hits}) > 1

    def test_scores_of_models_of_their_own_are_not_compared(self) -> None:
        from ai4rag_nb.indexing.join_types import join_types

        def hit(number: int, score: float) -> RetrievedChunk:
            where = {"document_id": "a.md", "sequence_number": number}
            return RetrievedChunk(f"text {number}", where, score, {"dense": score})

        found = {"text": [hit(1, 0.1), hit(3, 0.05)], "table": [hit(2, 0.9), hit(4, 0.8)]}
        ranked = [one.sequence_number for one in join_types(found, 4, comparable=True)]
        assert ranked == [2, 1, 4, 3]
        assert [one.sequence_number for one in join_types(found, 4)] == [1, 2, 3, 4]
        assert join_types({}, 4, comparable=True) == []


def test_a_chunk_list_may_be_a_tuple() -> None:
    made = ChunkOptimizer().optimize_for_retrieval(tuple(CHUNKS), (DOCUMENT,))
    assert made and all(isinstance(child, AI4RAGChunk) for child in made)

"""What a user registers is looked at before anything runs, and takes no name away."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from ai4rag_nb.foundations.errors import InputError
from ai4rag_nb.foundations.registration import place_of
from ai4rag_nb.indexing import chunking, store_backend
from ai4rag_nb.indexing.chunking import BaseChunker, chunking_methods, get_chunker, register_chunker
from ai4rag_nb.indexing.milvus_lite import MilvusLiteStore
from ai4rag_nb.indexing.store_backend import register_store, store_class
from ai4rag_nb.indexing.store_config import BaseVectorStoreConfig
from ai4rag_nb.optimization import optimizer
from ai4rag_nb.optimization.optimizer import register_optimizer
from ai4rag_nb.optimization.random_optimizer import RandomOptimizer
from ai4rag_nb.querying import stages, templates
from ai4rag_nb.querying.generation import Generation
from ai4rag_nb.querying.rag import SimpleRAG
from ai4rag_nb.querying.rag_template import BaseRAGTemplate
from ai4rag_nb.querying.stages import (
    STAGE_KINDS,
    BaseHitStage,
    BaseQueryStage,
    Outcome,
    StageModels,
    make_stage,
    register_stage,
    stage_names,
)
from ai4rag_nb.querying.templates import get_template, register_template


@dataclass(frozen=True)
class Turned(BaseHitStage):
    """Turn the hits round."""

    extra: int = 1

    def apply_many(self, questions: Any, hits: Any, setting: Any) -> list[Outcome]:
        return [Outcome(hits=found[::-1]) for found in hits]


class Plain(BaseHitStage):
    def apply_many(self, questions: Any, hits: Any, setting: Any) -> list[Outcome]:
        return []


@dataclass(frozen=True)
class Narrow(BaseHitStage):
    def apply_many(self, hits: Any) -> list[Outcome]:  # type: ignore[override]
        return []


@dataclass(frozen=True)
class Asking(BaseQueryStage):
    def queries_many(self, questions: Any, setting: Any) -> list[Outcome]:
        return [Outcome(queries=(question,)) for question in questions]


@dataclass(frozen=True)
class Unfinished(BaseHitStage):
    extra: int = 1


@dataclass(frozen=True)
class BadSource(Turned):
    @classmethod
    def from_models(cls) -> BadSource:
        return cls()


class Whole(BaseChunker):
    def split_document(self, document: Any) -> list[Any]:
        return []


class NoDocument(BaseChunker):
    def split_document(self) -> list[Any]:  # type: ignore[override]
        return []


@dataclass(frozen=True)
class Demanding(Whole):
    language: str = field(kw_only=True)


class Echo(BaseRAGTemplate):
    def __init__(self, foundation_model: Any, retriever: Any) -> None:
        self.foundation_model, self.retriever = foundation_model, retriever

    def retrieve_many(self, questions: Any) -> list[list[Any]]:
        return [[] for _ in questions]

    def answer(self, question: str, chunks: Any, history: Any = ()) -> Generation:
        return Generation(question)


class Mute(Echo):
    answer = BaseRAGTemplate.answer


class Blind(Echo):
    retrieve_many = BaseRAGTemplate.retrieve_many


class Deaf(Echo):
    def answer(self, question: str) -> Generation:  # type: ignore[override]
        return Generation(question)


class Alone(Echo):
    def __init__(self) -> None:
        super().__init__(None, None)


class NamedStore(MilvusLiteStore):
    """Milvus Lite by another name."""


class Lonely(MilvusLiteStore):
    def __init__(self, config: Any) -> None: ...


class Wordless(MilvusLiteStore):
    _keyword_hits = None  # type: ignore[assignment]


class Short(MilvusLiteStore):
    def _fetch(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


def reranker(name: Any) -> Callable[[Any], Any]:
    return register_stage("reranker", name)


@pytest.mark.parametrize("name", ["", "  ", 5, None, ["a"], " a", "a\n", "a\tb", Turned])
@pytest.mark.parametrize(
    "register",
    [
        register_chunker,
        register_template,
        register_store,
        reranker,
        lambda name: register_optimizer(name, RandomOptimizer),
    ],
)
def test_what_is_no_name_is_refused_at_once(register: Callable[[Any], Any], name: Any) -> None:
    with pytest.raises(InputError, match=r"is no name of an? "):
        register(name)


def test_a_decorator_without_its_name_is_explained() -> None:
    with pytest.raises(InputError, match="Give a text, and the class behind it"):

        @register_chunker
        class Nameless(Whole): ...


@pytest.mark.parametrize(
    ("register", "given", "message"),
    [
        (reranker, 5, "5 is no class of reranker stages. Give the class itself, made from BaseHitStage"),
        (reranker, Turned(), r"Turned\(extra=1\) is no class of reranker stages"),
        (reranker, dict, "dict is no class of reranker stages"),
        (reranker, Asking, "Asking is no class of reranker stages"),
        (reranker, Unfinished, "Unfinished lacks apply_many. Write what is missing"),
        (reranker, Narrow, r"Narrow.apply_many cannot be called: .*self, questions, hits, setting"),
        (reranker, Plain, "Plain is no dataclass. Put @dataclass"),
        (reranker, BadSource, r"BadSource.from_models cannot be called: .*from_models\(self, models\)"),
        (lambda name: register_stage("query", name), Turned, "Turned is no class of query stages"),
        (lambda name: register_stage("verification", name), Turned, "Turned has no method verify. Write one"),
        (register_chunker, Turned, "Turned is no class of chunkers"),
        (register_chunker, BaseChunker, "BaseChunker lacks split_document"),
        (register_chunker, NoDocument, r"NoDocument.split_document cannot be called.*\(self, document\)"),
        (register_chunker, Demanding, "Demanding cannot be made: missing a required argument: 'language'"),
        (register_template, dict, "dict is no class of templates.*made from BaseRAGTemplate"),
        (register_template, Mute, "Mute has neither answer nor tell. Write one of them"),
        (register_template, Blind, "Blind has neither retrieve_many nor retrieve_traced"),
        (register_template, Deaf, r"Deaf.answer cannot be called.*\(self, question, chunks, history\)"),
        (register_template, Alone, r"Alone cannot be made: .*take foundation_model and retriever"),
        (register_store, Turned, "Turned is no class of vector stores.*made from BaseVectorStore"),
        (register_store, Lonely, "Lonely cannot be made: .*embedding_model, config and collection_name"),
        (register_store, Wordless, r"Wordless has no method _keyword_hits.*texts, depth, document_keys"),
        (register_store, Short, r"Short._fetch cannot be called.*\(self, keys\)"),
    ],
)
def test_what_cannot_work_is_not_registered(register: Callable[[Any], Any], given: Any, message: str) -> None:
    before = [dict(table) for table in tables()]
    with pytest.raises(InputError, match=f"'cannot work' cannot be registered: {message}"):
        register("cannot work")(given)
    assert [dict(table) for table in tables()] == before


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no name of these tests be seen by others."""
    own = [*stages._BUILT_IN.values(), *chunking._BUILT_IN.values(), *templates._BUILT_IN.values()]
    for module in {
        *(place.partition(":")[0] for place in own),
        *(module for module, *_ in store_backend._MODULES.values()),
    }:
        importlib.import_module(
            module
        )  # what is registered by an import is not lost with the names of a test
    for module, table in ((stages, "_REGISTERED"), (chunking, "_REGISTERED"), (templates, "_REGISTERED")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    monkeypatch.setattr(store_backend, "_CLASSES", dict(store_backend._CLASSES))


def tables() -> list[dict[Any, type]]:
    """Everything that is registered."""
    return [stages._REGISTERED, chunking._REGISTERED, templates._REGISTERED, store_backend._CLASSES]


def built_in() -> list[tuple[Callable[[Any], Any], Any, str]]:
    """Every name of the toolkit's own, how it is registered, and the class behind it."""
    names: list[tuple[Callable[[Any], Any], Any, str]] = []
    names += [
        (lambda given, kind=kind, name=name: register_stage(kind, name)(given), kind, place)
        for (kind, name), place in stages._BUILT_IN.items()
    ]
    for register, places in (
        (register_chunker, chunking._BUILT_IN),
        (register_template, templates._BUILT_IN),
        (register_store, store_backend._PLACES),
    ):
        names += [
            (lambda given, register=register, name=name: register(name)(given), register, place)
            for name, place in places.items()
        ]
    return names


@pytest.mark.parametrize(("register", "kind", "place"), built_in())
def test_built_in_names_stay_with_their_classes(
    register: Callable[[Any], Any], kind: Any, place: str
) -> None:
    """A class that could do the work is refused; the toolkit's own class may come again."""
    module, _, name = place.partition(":")
    own = getattr(importlib.import_module(module), name)
    assert place_of(own) == place
    other = type("Other", (own,), {})
    with pytest.raises(InputError, match=r"is the name of another .*Choose another name"):
        register(other)
    assert register(own) is own


def test_every_built_in_name_is_looked_at() -> None:
    assert set(store_backend._PLACES) == set(store_backend._MODULES)
    assert all(
        place.startswith(f"{store_backend._MODULES[name][0]}:")
        for name, place in store_backend._PLACES.items()
    )
    assert {kind for kind, _ in stages._BUILT_IN} == set(STAGE_KINDS)
    for name in optimizer.BUILT_IN:
        with pytest.raises(InputError, match="is the name of another optimizer"):
            register_optimizer(name, type("Other", (RandomOptimizer,), {}))
    with pytest.raises(InputError, match="'sequential_rag' is the name of another template"):
        register_template("sequential_rag")(SimpleRAG)


def test_names_of_users_stay_with_their_classes_too() -> None:
    register_chunker("whole for tests")(Whole)
    with pytest.raises(InputError, match="is the name of another chunking method"):
        register_chunker("whole for tests")(type("Other", (Whole,), {}))
    with pytest.raises(InputError, match=r"Whole is registered as 'whole for tests'. Make a class from it"):
        register_chunker("second name for tests")(Whole)
    assert Whole.chunking_method == "whole for tests"
    again = type("Whole", (Whole,), {"__module__": Whole.__module__, "__qualname__": "Whole"})
    assert register_chunker("whole for tests")(again) is again, "a cell that runs a second time"
    assert type(get_chunker("whole for tests")) is again and "second name for tests" not in chunking_methods()


def test_what_works_is_registered_and_used() -> None:
    reranker("turned for tests")(Turned)
    register_stage("query", "asking for tests")(Asking)
    made = make_stage("reranker", "turned for tests", StageModels(None, settings={"extra": 4}))  # type: ignore[arg-type]
    assert made == Turned(4) and made.fingerprint() == {"stage": "turned for tests", "extra": 4}
    assert "asking for tests" in stage_names("query") and Asking.stage_name == "asking for tests"
    register_template("echo for tests")(Echo)
    assert get_template("echo for tests")(None, None).generate("Who?")["answer"] == "Who?"  # type: ignore[call-arg]
    register_store("named for tests")(NamedStore)
    assert store_class(BaseVectorStoreConfig("named for tests")) is NamedStore


def test_a_verification_needs_no_class_of_ours() -> None:
    """Any stage that can verify will do."""

    @dataclass(frozen=True)
    class Trusting(stages.BaseStage):
        words: ClassVar[int] = 0

        def verify(self, question: Any, chunks: Any, generation: Any, again: Any = None) -> Any:
            return generation

    assert register_stage("verification", "trusting for tests")(Trusting) is Trusting

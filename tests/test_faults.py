"""What may go wrong around a search: services that break on the way, damaged files, arguments of the wrong type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import make_experiment, service, table_of

from ai4rag_nb.foundations.errors import AI4RAGError, InputError
from ai4rag_nb.foundations.events import BaseEventHandler, PhaseStarted, TrialFinished


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


class After(BaseEventHandler):
    """Change the service when a pattern is finished."""

    def __init__(self, stub: OpenAIStub, name: str, **settings: Any) -> None:
        self.stub, self.name, self.settings = stub, name, settings

    def on_event(self, event: Any) -> None:
        if isinstance(event, TrialFinished) and event.name == self.name:
            for name, value in self.settings.items():
                setattr(self.stub.settings, name, value)


class InTheMiddle(After):
    """Change the service after a number of answers."""

    def on_event(self, event: Any) -> None:
        if isinstance(event, PhaseStarted) and event.label == f"{self.name}: asking":
            super().on_event(TrialFinished(name=self.name, payload={}, evaluation_results=[]))


# --- services that break on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"html": True}, {"html": False}),
        ({"fail_share": 1.0}, {"fail_share": 0.0}),
        ({"empty": "none"}, {"empty": None}),
        ({"empty": "blank"}, {"empty": None}),
        ({"status": 404}, {"status": None}),
        ({"chat_models": ("another",)}, {"chat_models": ("stub-chat",)}),
    ],
)
@pytest.mark.parametrize("handler", [After, InTheMiddle])
def test_an_outage_ends_the_run_and_the_same_again_repairs_it(
    tmp_path: Path, stub: OpenAIStub, bad: dict[str, Any], good: dict[str, Any], handler: type[After]
) -> None:
    straight = make_experiment(tmp_path, run="straight", workspace="elsewhere")
    straight.search()
    straight.close()
    experiment = make_experiment(tmp_path, event_handler=handler(stub, "Pattern2", **bad))
    with pytest.raises(AI4RAGError, match="does not answer any more") as caught:
        experiment.search()
    assert not isinstance(caught.value, InputError) and "same again" in str(caught.value)
    assert {trial.state for trial in experiment.results.evaluations} == {"completed"}
    experiment.handlers.clear()
    for name, value in good.items():
        setattr(stub.settings, name, value)
    experiment.search()
    assert table_of(experiment.results) == table_of(straight.results)
    experiment.close()


def test_a_short_outage_is_noted_and_the_same_again_repairs_it(tmp_path: Path, stub: OpenAIStub) -> None:
    """The service is back when it is looked at, so the trial stays in this run and is tried in the next one."""

    class Short(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label.startswith("Pattern2: "):
                stub.settings.fail_share = 0.6 if event.label.endswith("asking") else 0.0

    experiment = make_experiment(tmp_path, event_handler=Short())
    experiment.search()
    states = [trial.state for trial in experiment.results.evaluations]
    assert states == ["completed", "incomplete", "completed", "completed"]
    assert any("Pattern2 lost questions" in note for note in experiment.results.notes)
    experiment.handlers.clear()
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 4
    assert not any("lost questions" in note for note in experiment.results.notes)
    experiment.close()


def test_a_trial_spoiled_by_its_questions_stays(tmp_path: Path, stub: OpenAIStub) -> None:
    class Refusing(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label == "Pattern2: asking":
                stub.settings.fail_texts = ("lighthouse", "ferry")

    experiment = make_experiment(tmp_path, max_evals=2, event_handler=Refusing())
    experiment.search()
    assert experiment.results.evaluations[1].state in ("incomplete", "failed")
    stub.settings.fail_texts = ()
    experiment.handlers.clear()
    stub.reset()
    experiment.search()
    assert stub.counts.chats == 0
    assert experiment.results.evaluations[1].state in ("incomplete", "failed")
    experiment.close()


@pytest.mark.parametrize("bad", [{"broken": "nan"}, {"broken": "zero"}, {"dimension": 32}])
def test_unusable_vectors_end_the_run_at_once(tmp_path: Path, stub: OpenAIStub, bad: dict[str, Any]) -> None:
    class Breaking(BaseEventHandler):
        def on_event(self, event: Any) -> None:
            if isinstance(event, PhaseStarted) and event.label.startswith("Chunking"):
                for name, value in bad.items():
                    setattr(stub.settings, name, value)

    experiment = make_experiment(tmp_path, event_handler=Breaking())
    with pytest.raises(AI4RAGError, match="does not answer any more"):
        experiment.search()
    assert experiment.results.evaluations == []
    sent = [t for path, body in stub.bodies if path.endswith("/embeddings") for t in body["input"]]
    assert len(sent) <= len(set(sent)) + 3, "no text was paid for in a second trial"
    stub.settings.broken, stub.settings.dimension = None, 64
    experiment.handlers.clear()
    experiment.search()
    assert [trial.state for trial in experiment.results.evaluations] == ["completed"] * 4
    experiment.close()

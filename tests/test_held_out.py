"""Who answers the questions that were held out, what is kept of it, and what is said about it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import (
    Recorder,
    command,
    environment,
    make_experiment,
    paid,
    service,
    small_space,
    wait_until,
)

from ai4rag_nb import CostEvaluator, open_run
from ai4rag_nb.evaluation.call_costs import rounded_up
from ai4rag_nb.evaluation.metrics import Metrics
from ai4rag_nb.foundations.errors import InputError, RunFolderError, StoppedError
from ai4rag_nb.foundations.events import StatusChanged, TrialFailed, TrialFinished, TrialStarted
from ai4rag_nb.foundations.settings import Settings
from ai4rag_nb.optimization.certainty import leader_claims
from ai4rag_nb.optimization.expense import expense
from ai4rag_nb.optimization.run_plan import run_costs
from ai4rag_nb.optimization.run_store import RunStore

COLOURS = [
    "red",
    "green",
    "blue",
    "white",
    "black",
    "brown",
    "pink",
    "grey",
    "violet",
    "orange",
    "silver",
    "golden",
]
SETTINGS = Settings(request_retries=0, request_timeout_seconds=10.0)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIStub]:
    with service(monkeypatch) as running:
        yield running


def lamps(folder: Path) -> list[dict[str, Any]]:
    """Write twelve pages of several sections, and give two questions about each."""
    records = []
    for number, colour in enumerate(COLOURS):
        path = folder / "docs" / f"lamp{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        filling = " ".join(f"The {other} lamp stands in another room of the long house." for other in COLOURS)
        path.write_text(
            f"# Lamp {number}\n\nLamp {number} is {colour} and hangs in room {number + 50}.\n\n## Rooms\n\n{filling}\n\n"
            f"## Weight\n\nLamp {number} weighs {number + 11} kilograms and takes {number + 30} watts.\n",
            encoding="utf-8",
        )
        for question, answer in (
            (f"Which colour has lamp {number}?", colour),
            (f"How many kilograms does lamp {number} weigh?", str(number + 11)),
        ):
            key = {"correct_answer_document_keys": [path.name]}
            records.append({"question": question, "correct_answers": [answer], **key})
    return records


def searched(folder: Path, **options: Any) -> Any:
    """Make an experiment about the lamps and search."""
    experiment = experiment_of(folder, **options)
    try:
        experiment.search()
    finally:
        experiment.close()
    return experiment


def experiment_of(folder: Path, **options: Any) -> Any:
    return make_experiment(folder, records=lamps(folder), **{"settings": SETTINGS, **options})


def asked_about(stub: OpenAIStub, questions: set[str]) -> list[str]:
    """Give the prompts that are about some questions."""
    prompts = [json.dumps(body["messages"]) for path, body in stub.bodies if path.endswith("/completions")]
    return [prompt for prompt in prompts if any(json.dumps(text)[1:-1] in prompt for text in questions)]


def prompts_of(test_part: dict[str, dict[str, Any]]) -> set[tuple[str, tuple[str, ...]]]:
    """Give each question with its passages once: what a service has to answer at least."""
    rows = [row for record in test_part.values() for row in record["results"]]
    return {(row["question"], tuple(row["answer_contexts"])) for row in rows}


class At(Recorder):
    """Do something when a sentence is said for the first time."""

    def __init__(self, words: str, act: Callable[[], Any]) -> None:
        super().__init__()
        self.words, self.act, self.done = words, act, False

    def on_event(self, event: Any) -> None:
        super().on_event(event)
        if isinstance(event, StatusChanged) and self.words in event.message and not self.done:
            self.done = True
            self.act()


# --- who is asked ------------------------------------------------------------------------------------------------------------


def test_leader_ties_runner_up_and_default_answer_the_same_unseen_questions(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    recorder = Recorder()
    experiment = searched(tmp_path, max_evals=6, event_handler=recorder)
    results = experiment.results
    ranking, part = results.ranking(), results.test_part
    # The default by hand: the space holds neither 256 tokens nor 5 passages, so the first of its values count.
    default = {"chunk_size": 64, "chunk_overlap": 0, "search_mode": "vector", "number_of_chunks": 1}
    by_hand = [result for result in ranking if default.items() <= result.configuration.items()]
    names = {record["name"]: set(record["roles"]) for record in part.values()}
    assert list(part) == list(names) and next(iter(part)) == ranking[0].name == results.held_out["name"]
    holders = {
        role: [name for name, roles in names.items() if role in roles]
        for role in ("leader", "tie", "runner-up", "default")
    }
    assert holders["leader"] == [ranking[0].name] and holders["runner-up"] == [ranking[1].name]
    assert holders["default"] == [by_hand[0].name if by_hand else "default"]
    claims = leader_claims(results)
    assert claims is not None and set(holders["tie"]) <= set(claims.ties)
    assert len(holders["tie"]) == min(5, len(claims.ties)) and len(part) <= 8
    tuning = {row["question"] for row in ranking[0].results}
    for record in part.values():
        unseen = {row["question"] for row in record["results"]}
        assert record["state"] == "completed" and record["reason"] == ""
        assert record["questions"] == len(unseen) == 24 - len(tuning) and not unseen & tuning
        assert {metric["name"] for metric in record["metrics"]} >= {"overall_score"}
    assert part[ranking[0].name]["results"] == results.held_out["results"]
    assert part[holders["default"][0]]["configuration"].items() >= default.items()
    again = open_run(tmp_path / "run")
    assert again.test_part == part and again.test_part_seen is False


def test_a_default_that_was_not_tried_is_measured_under_its_own_name(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    space = small_space(chunk_size=[64, 128, 256], number_of_chunks=[1, 5])
    results = searched(tmp_path, space=space, max_evals=1).results
    (pattern,) = results.evaluations
    assert pattern.configuration["chunk_size"] != 256 or pattern.configuration["number_of_chunks"] != 5
    assert list(results.test_part) == [pattern.name, "default"]
    record = results.test_part["default"]
    wanted = {"chunk_size": 256, "number_of_chunks": 5, "search_mode": "vector", "chunk_overlap": 0}
    assert wanted.items() <= record["configuration"].items() and record["roles"] == ["default"]
    assert all(len(row["hits"]) == 5 for row in record["results"])


def test_one_configuration_is_leader_and_default(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64], number_of_chunks=[1], search_mode=["vector"])
    results = searched(tmp_path, space=space, max_evals=3).results
    assert {name: record["roles"] for name, record in results.test_part.items()} == {
        "Pattern1": ["leader", "default"]
    }
    unseen = {row["question"] for row in results.held_out["results"]}
    assert len(asked_about(stub, unseen)) == len(unseen)


def test_fewer_ties_are_a_setting(tmp_path: Path, stub: OpenAIStub) -> None:
    settings = Settings(request_retries=0, test_ties=0)
    experiment = searched(tmp_path, max_evals=8, settings=settings)
    part = experiment.results.test_part
    assert not [name for name, record in part.items() if "tie" in record["roles"]] and len(part) <= 3
    with pytest.raises(InputError, match="test_ties is 6"):
        Settings(test_ties=6)


def test_nothing_is_claimed_where_nothing_was_held_out(tmp_path: Path, stub: OpenAIStub) -> None:
    settings = Settings(request_retries=0, test_share=0.0)
    results = searched(tmp_path, max_evals=2, settings=settings).results
    assert (results.test_part, results.held_out, results.test_part_seen) == ({}, {}, False)


# --- what is kept ------------------------------------------------------------------------------------------------------------


def test_each_prompt_is_paid_once_and_a_second_run_pays_nothing(tmp_path: Path, stub: OpenAIStub) -> None:
    experiment = experiment_of(tmp_path, max_evals=4)
    experiment.search()
    part = experiment.results.test_part
    unseen = {row["question"] for record in part.values() for row in record["results"]}
    assert len(asked_about(stub, unseen)) == len(prompts_of(part))
    before = paid(stub)
    experiment.search()
    experiment.close()
    assert paid(stub) == before and experiment.results.test_part == part
    assert experiment.results.test_part_seen is False


def test_a_stopped_test_part_goes_on_behind_what_was_measured(tmp_path: Path, stub: OpenAIStub) -> None:
    """The second run has a new workspace, so nothing but the kept records spares it a question."""
    handler = At("Asking Pattern", lambda: None)
    experiment = experiment_of(tmp_path, max_evals=4, event_handler=handler)
    handler.words, handler.act = "runner-up", lambda: experiment.run.stop()
    with pytest.raises(StoppedError):
        experiment.search()
    experiment.close()
    stopped = experiment.results
    assert next(iter(stopped.test_part)) == stopped.ranking()[0].name
    before = len(stub.bodies)
    again = searched(tmp_path, max_evals=4, workspace="elsewhere")
    part = again.results.test_part
    assert set(stopped.test_part) < set(part) and again.results.test_part_seen is False
    for name, record in stopped.test_part.items():
        assert part[name] == record
    new = {name: record for name, record in part.items() if name not in stopped.test_part}
    unseen = {row["question"] for row in again.results.held_out["results"]}
    del stub.bodies[:before]
    assert len(asked_about(stub, unseen)) == len(prompts_of(new))


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL exists on POSIX only")
def test_a_killed_test_part_goes_on(tmp_path: Path) -> None:
    (tmp_path / "questions.json").write_text(json.dumps(lamps(tmp_path)), encoding="utf-8")
    (tmp_path / "space.json").write_text(
        json.dumps({"chunk_size": [64], "chunking_method": ["recursive"], "number_of_chunks": [1, 2, 3, 5]}),
        encoding="utf-8",
    )
    words = f"run --documents {tmp_path / 'docs'} --benchmark {tmp_path / 'questions.json'} --max-evals 3"
    words += (
        f" --out {tmp_path / 'run'} --workspace {tmp_path / 'workspace'} --space {tmp_path / 'space.json'}"
    )
    words += " --embedding-model openai:stub-embedding --foundation-model openai:stub-chat"
    with OpenAIStub(delay=0.05, listed_window=512) as stub:
        running = environment(stub)
        process = subprocess.Popen(command(*words.split()), env=running, stderr=subprocess.PIPE)

        def one_is_kept() -> bool:
            if process.poll() is not None:
                return True
            try:
                return len(open_run(tmp_path / "run").test_part) > 0
            except Exception:  # there is no run yet
                return False

        wait_until(one_is_kept)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=120)
        kept = open_run(tmp_path / "run").test_part
        done = subprocess.run(command(*words.split()), env=running, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        prompts = [repr(body["messages"]) for path, body in stub.bodies if path.endswith("/completions")]
    results = open_run(tmp_path / "run")
    assert kept and set(kept) < set(results.test_part), said.decode()
    assert all(results.test_part[name] == record for name, record in kept.items())
    assert len(prompts) - len(set(prompts)) <= 10, "more than the answers on their way were paid twice"
    assert "answer the" in done.stderr.decode() and results.test_part_seen is False


# --- what fails --------------------------------------------------------------------------------------------------------------


def test_one_that_fails_is_recorded_and_tried_again(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64, 128, 256], number_of_chunks=[1, 5])
    handler = At("Asking default", lambda: setattr(stub.settings, "empty", "none"))
    experiment = experiment_of(tmp_path, space=space, max_evals=1, event_handler=handler)
    experiment.search()
    results = experiment.results
    record = results.test_part["default"]
    assert (record["state"], record["metrics"], record["results"]) == ("failed", [], [])
    assert "empty answer" in record["reason"] and results.test_part["Pattern1"]["state"] == "completed"
    assert results.held_out["questions"] > 0 and results.best_pattern().name == "Pattern1"
    notes = [note for note in results.notes if "could not be asked of default: " in note]
    assert len(notes) == 1 and "empty answer" in notes[0]
    stub.settings.empty = None
    before = len(stub.bodies)
    experiment.search()
    experiment.close()
    part = experiment.results.test_part
    assert part["default"]["state"] == "completed"
    assert not [note for note in experiment.results.notes if "could not be asked" in note]
    unseen = {row["question"] for row in part["default"]["results"]}
    del stub.bodies[:before]
    assert len(asked_about(stub, unseen)) == len(prompts_of({"default": part["default"]}))


def test_a_dead_service_is_not_waited_for_with_every_pattern(tmp_path: Path, stub: OpenAIStub) -> None:
    """The leader meets the failure with every question; who comes behind it only with a few small calls."""
    handler = At("(leader", lambda: setattr(stub.settings, "status", 401))
    experiment = searched(tmp_path, max_evals=4, event_handler=handler)
    results = experiment.results
    assert results.held_out == {} and len(results.evaluations) == 4
    assert {record["state"] for record in results.test_part.values()} == {"failed"}
    behind = [record["reason"] for record in results.test_part.values() if "leader" not in record["roles"]]
    assert behind and all("does not answer any more" in reason for reason in behind)
    assert any(
        note.startswith("The questions that were held out could not be asked: ") for note in results.notes
    )
    with closing(RunStore(tmp_path / "run", read_only=True)) as store:
        assert store.fact("state") == "completed"


def test_a_default_that_failed_in_the_search_is_not_asked(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64], number_of_chunks=[1, 2], search_mode=["vector"])
    experiment = experiment_of(tmp_path, space=space, max_evals=2)

    def silent(body: dict[str, Any]) -> str | None:
        return "" if "lamp" in json.dumps(body["messages"]) else None

    class Breaking(Recorder):
        def on_event(self, event: Any) -> None:
            super().on_event(event)
            if isinstance(event, TrialStarted):
                first = event.configuration["number_of_chunks"] == 1
                stub.settings.planned = silent if first else None
            elif isinstance(event, TrialFinished | TrialFailed):
                stub.settings.planned = None

    experiment.handlers.append(Breaking())
    experiment.search()
    experiment.close()
    results = experiment.results
    (spoiled,) = [result for result in results.evaluations if result.configuration["number_of_chunks"] == 1]
    assert spoiled.state in ("failed", "incomplete")
    record = results.test_part[spoiled.name]
    assert record["state"] == "failed" and record["reason"].startswith("It failed in the search: ")
    assert record["roles"] == ["default"]
    unseen = {row["question"] for row in results.held_out["results"]}
    assert len(asked_about(stub, unseen)) == len(unseen), "only the leader was asked"


# --- a search that goes on ---------------------------------------------------------------------------------------------------


def test_a_search_that_is_extended_is_marked_and_asks_nobody_twice(tmp_path: Path, stub: OpenAIStub) -> None:
    first = searched(tmp_path, max_evals=2).results
    before = len(stub.bodies)
    assert first.test_part_seen is False
    # Without what the workspace remembers: only the records of the run can spare a question.
    longer = searched(tmp_path, max_evals=6, workspace="elsewhere").results
    assert len(longer.evaluations) == 6 and longer.test_part_seen is True
    assert longer.notes and any(note.startswith("Test part seen: ") for note in longer.notes)
    keys = {record["key"] for record in first.test_part.values()}
    new = {name: record for name, record in longer.test_part.items() if record["key"] not in keys}
    for record in longer.test_part.values():
        same = [one for one in first.test_part.values() if one["key"] == record["key"]]
        assert not same or same[0]["results"] == record["results"]
    assert next(iter(longer.test_part)) == longer.ranking()[0].name == longer.held_out["name"]
    unseen = {row["question"] for row in longer.held_out["results"]}
    del stub.bodies[:before]
    assert len(asked_about(stub, unseen)) == len(prompts_of(new))
    again = searched(tmp_path, max_evals=6).results
    assert again.test_part == longer.test_part and again.test_part_seen is True


def test_a_larger_budget_without_anything_left_to_try_is_no_extension(
    tmp_path: Path, stub: OpenAIStub
) -> None:
    space = small_space(chunk_size=[64], number_of_chunks=[1, 2], search_mode=["vector"])
    searched(tmp_path, space=space, max_evals=2)
    results = searched(tmp_path, space=space, max_evals=20).results
    assert results.test_part_seen is False and not any("Test part seen" in note for note in results.notes)


def test_the_test_part_does_not_choose(tmp_path: Path, stub: OpenAIStub) -> None:
    results = searched(tmp_path, max_evals=4).results
    before = [result.name for result in results.ranking()]
    with closing(RunStore(tmp_path / "run")) as store:
        for record in results.test_part.values():
            score = 0.0 if "leader" in record["roles"] else 1.0
            metrics = [
                {**metric, "scores": {**metric["scores"], "mean": score}} for metric in record["metrics"]
            ]
            store.put_facts({f"test_part {record['key']}": {**record, "metrics": metrics}})
    again = searched(tmp_path, max_evals=4).results
    assert [result.name for result in again.ranking()] == before
    assert next(iter(again.test_part)) == before[0]
    assert again.test_part[before[0]]["metrics"][0]["scores"]["mean"] == 0.0, "what was kept is what is shown"


# --- what is said before -----------------------------------------------------------------------------------------------------


def most_read(experiment: Any, passages: float) -> int:
    """Work out the longest prompt by hand: a third of its bytes, eight tokens a message, and sixteen around a passage."""
    from ai4rag_nb.querying.prompts import DEFAULT_SYSTEM_MESSAGE

    questions = experiment.prepared.inputs.held_out.benchmark.questions
    around = f"{DEFAULT_SYSTEM_MESSAGE}\n\n\nQuestion: {max(questions, key=len)}\nAnswer:"
    return len(around) // 3 + 2 * 8 + math.ceil(passages * 4 / 3)


def test_the_plan_names_the_most_answers(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    experiment = experiment_of(tmp_path, max_evals=4, event_handler=recorder)
    planned = run_costs(experiment.prepared)
    assert stub.counts.chats == 0
    experiment.search()
    results = experiment.results
    held_out = results.held_out["questions"]
    said = [message for _, message, _ in recorder.statuses if message.startswith("At most ")]
    # 4 of 8 configurations are tried, and a default that is not among them makes 5.
    asked = 5 * held_out
    # Two chunks of 128 tokens at most, and 1,024 tokens of an answer, which is what a model may write.
    read = asked * (most_read(experiment, 2 * 128) + 2 * 16)
    assert (planned.test_answers.calls, planned.test_answers.read) == (asked, read)
    words = f"at most {rounded_up(read, 3):,.0f} tokens read and {rounded_up(asked * 1024, 3):,.0f} written."
    assert said == [
        f"At most 5 configurations answer the {held_out} held-out questions after the search: up to {asked} answers, {words}"
    ]
    rows = [row["tokens"] for record in results.test_part.values() for row in record["results"]]
    assert len(rows) <= asked and 0 < sum(row["prompt"] for row in rows) <= read
    rows = [row["tokens"] for result in results.evaluations for row in result.results]
    assert len(rows) <= planned.answers.calls and sum(row["prompt"] for row in rows) <= planned.answers.read
    recorder.statuses.clear()
    experiment.search()
    experiment.close()
    assert not [message for _, message, _ in recorder.statuses if message.startswith("At most ")]


def test_the_plan_names_the_price_where_it_is_known(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64], number_of_chunks=[1, 2], search_mode=["vector"])
    for number, (prices, words) in enumerate(
        [
            ({"stub-chat": [1000.0, 2000.0]}, "at most {price:,.0f} by the table of prices."),
            ({"other": [1.0, 2.0]}, "; the table of prices does not know 'stub-chat'."),
        ]
    ):
        recorder = Recorder()
        experiment = experiment_of(
            tmp_path,
            space=space,
            max_evals=2,
            event_handler=recorder,
            evaluators=[CostEvaluator(prices)],
            run=f"run{number}",
        )
        asked = 2 * len(experiment.prepared.inputs.held_out)
        read, written = asked * (most_read(experiment, 2 * 64) + 2 * 16), asked * 1024
        experiment.search()
        experiment.close()
        (said,) = [message for _, message, _ in recorder.statuses if message.startswith("At most ")]
        assert said.endswith(words.format(price=rounded_up(read / 1000 + written / 500)))


def test_a_table_of_prices_is_used_whether_or_not_money_is_named(tmp_path: Path, stub: OpenAIStub) -> None:
    space = small_space(chunk_size=[64], number_of_chunks=[1, 2], search_mode=["vector"])
    prices = CostEvaluator(prices={"stub-chat": {"input": 0.5, "output": 2.0}})
    experiment = searched(tmp_path, space=space, max_evals=2, evaluators=[prices])
    results = experiment.results
    table = results.leaderboard().set_index("pattern")
    for result in results.evaluations:
        tokens = [(row["tokens"]["prompt"], row["tokens"]["completion"]) for row in result.results]
        mean = sum(read * 0.5e-6 + written * 2e-6 for read, written in tokens) / len(tokens)
        assert expense(result).money == pytest.approx(mean, rel=1e-9) and 0 < mean < 0.001
        assert table.loc[result.name, "money"] == pytest.approx(mean, rel=0.005), "shown, and not as 0"
    report = results.report(False)
    assert report.cheapest_by == "money" and "by the table of prices" in str(report)
    leader = results.get_best_evaluations()[0]
    assert f"{expense(leader).money:.7f}" in experiment.report().read_text(encoding="utf-8")
    with pytest.raises(RunFolderError, match="prices"):
        dearer = CostEvaluator(prices={"stub-chat": {"input": 5.0, "output": 20.0}})
        experiment_of(tmp_path, space=space, max_evals=2, evaluators=[dearer])


def test_the_price_is_said_before_anything_is_asked(tmp_path: Path, stub: OpenAIStub) -> None:
    recorder = Recorder()
    prices = CostEvaluator(prices={"stub-chat": {"input": 1000.0, "output": 2000.0}})
    space = small_space(chunk_size=[64], number_of_chunks=[1, 2], search_mode=["vector"])
    experiment = searched(
        *(tmp_path,),
        space=space,
        max_evals=2,
        event_handler=recorder,
        evaluators=[prices],
        metrics=[Metrics.ANSWER_CORRECTNESS, Metrics.MONEY],
    )
    results = experiment.results
    expected = 0.0
    for result in results.evaluations:
        tokens = [(row["tokens"]["prompt"], row["tokens"]["completion"]) for row in result.results]
        expected += sum(read * 0.001 + written * 0.002 for read, written in tokens) / len(tokens)
    asked = results.held_out["questions"]
    (said,) = [message for _, message, _ in recorder.statuses if ", about " in message]
    assert said.endswith(f"{2 * asked} answers, about {asked * expected:.2f} by the table of prices.")

"""Dashboards, reports and progress bars: hostile text, many threads, missing data, sizes, and a real browser."""

import io
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import wait_until

from ai4rag_nb.dashboard import painter
from ai4rag_nb.dashboard import progress as progress_module
from ai4rag_nb.dashboard.colours import DARK, LIGHT, SHADES, contrast, shade
from ai4rag_nb.dashboard.dashboard import Dashboard
from ai4rag_nb.dashboard.payload import read_answer
from ai4rag_nb.dashboard.progress import ProgressBars
from ai4rag_nb.dashboard.ranking import ranked_trials
from ai4rag_nb.dashboard.render_leaderboard import leaderboard_notes, render_leaderboard
from ai4rag_nb.dashboard.render_progress import render_progress
from ai4rag_nb.dashboard.render_questions import render_question, render_question_table
from ai4rag_nb.dashboard.render_retrieval import mark_spans, marked_text, render_retrieval
from ai4rag_nb.dashboard.report import report_html, write_report
from ai4rag_nb.dashboard.report_answer import ReportFacts
from ai4rag_nb.dashboard.safe_html import element, escape, shorten, visible_text
from ai4rag_nb.dashboard.sample import sample_events, sample_payload
from ai4rag_nb.dashboard.snapshot import Selection, page_of_state, render_snapshot
from ai4rag_nb.dashboard.state import DashboardState, fold
from ai4rag_nb.foundations.errors import InputError, StorageError
from ai4rag_nb.foundations.events import (
    Event,
    EventBus,
    ExperimentStep,
    LogLevel,
    PhaseAdvanced,
    PhaseFinished,
    PhaseStarted,
    RunFinished,
    RunStarted,
    StatusChanged,
    TrialFailed,
    TrialFinished,
    TrialStarted,
    phase,
)

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '<a href="javascript:alert(1)">click</a>',
    "</style><svg onload=alert(1)>",
    "</title></textarea>--><iframe src=//example.org>",
    "\x1b[2J\x1b]0;title\x07red\x9b31m",
    "invoice\u202egnp.exe\u2066",
    "null\x00 and half \ud83d",
    "{0.__class__} {braces} %s &lt;b&gt; <bar/>",
]
NUMBER_WORDS = ["nan", float("inf"), None, "much", True]


class Page(HTMLParser):
    """Read a page as a browser would, and remember what could do harm."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.harm: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("br", "hr", "img", "input", "meta", "wbr", "link"):
            self.open.append(tag)
        if tag in ("script", "iframe", "img", "object", "embed", "link", "base", "form"):
            self.harm.append(tag)
        for name, value in attributes:
            if name.startswith("on") or (name in ("href", "src") and not (value or "").startswith("#")):
                self.harm.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.harm.append(f"stray </{tag}>")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def check_page(document: str) -> Page:
    page = Page(document)
    assert page.harm == []
    assert page.open == []
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", document
    )
    document.encode("utf-8")
    return page


def hostile_events(text: str) -> list[Event]:
    """A run in which every text comes from somebody else."""
    metric = {
        "name": text,
        "evaluator": text,
        "description": text,
        "scores": {"mean": 0.5, "ci_low": 0.4, "ci_high": 0.6, "n": 3},
    }
    hit = {
        "document_id": text,
        "sequence_number": 1,
        "chunk_id": text,
        "text": text,
        "score": 0.5,
        "scores": {text: 0.5},
    }
    row = {
        "question_id": text,
        "question": text,
        "correct_answers": [text],
        "answer": text,
        "hits": [{**hit, "evidence": True}],
    }
    row["metrics"] = [{"name": text, "evaluator": text, "score": 0.5}]
    lost = {**row, "question_id": text + "2", "answer": None, "error": text, "refused": False}
    refused = {**row, "question_id": text + "3", "refused": True}
    payload = {
        "iteration": 0,
        "duration_seconds": 1.0,
        "evaluation": {"metrics": [metric]},
        "settings": {text: {text: text}},
    }
    step = ExperimentStep.EMBEDDING
    return [
        RunStarted(
            at=0.0,
            run_name=text,
            max_evaluations=3,
            combinations=9,
            optimization_metric=text,
            questions=3,
            resumed=1,
        ),
        PhaseStarted(at=0.0, step=step, label=text, total=3, unit=text),
        PhaseAdvanced(at=1.0, step=step, label=text, done=1),
        StatusChanged(at=1.0, level=LogLevel.ERROR, message=text, step=step),
        StatusChanged(at=1.0, level=LogLevel.INFO, message=text, step=step),
        TrialStarted(at=1.0, name=text, iteration=0, configuration={text: text}),
        TrialFinished(at=2.0, name=text, payload=payload, evaluation_results=[row, lost, refused]),
        TrialFailed(at=3.0, name=text + "2", iteration=1, configuration={text: text + "2"}, reason=text),
        PhaseStarted(at=3.0, step=step, label=text + "2", total=None, unit=text),
        PhaseFinished(at=3.0, step=step, label=text + "2", done=3, seconds=1.0),
    ]


def every_view(state: DashboardState) -> dict[str, str]:
    question, pattern = next(iter(state.questions), None), state.trials[0].name if state.trials else None
    told = ReportFacts(
        held_out=state.trials[0].scores if state.trials else (),
        ties=[{"name": pattern, "difference": 0.1, "ci_low": -0.1, "ci_high": 0.2}],
        notes=[str(pattern)],
        places={str(pattern): str(pattern)},
    )
    return {
        "progress": render_progress(state),
        "leaderboard": render_leaderboard(state),
        "table": render_question_table(state, "hardest", linked=list(state.questions)),
        "question": render_question(state, question),
        "retrieval": render_retrieval(state, question, pattern),
        "snapshot": render_snapshot(state, Selection(question_id=question, pattern=pattern)),
        "page": page_of_state(state, Selection()),
        "report": report_html(state, told),
    }


# --- text from outside ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_every_view_shows_hostile_text_as_text(text: str) -> None:
    state = fold(DashboardState(), hostile_events(text))
    for name, view in every_view(state).items():
        page = check_page(view)
        first_words = visible_text(text).split()[0][:20]
        assert first_words in "".join(page.text), f"{name} does not show the text"


@pytest.mark.parametrize("text", HOSTILE)
def test_widgets_show_hostile_text_as_text(text: str) -> None:
    dashboard = Dashboard.from_events(hostile_events(text))
    assert dashboard.widget is not None and dashboard._screen is not None
    assert dashboard._painter.error is None
    for widget in dashboard._screen.widgets.html.values():
        check_page(widget.value)
    for dropdown in ("question", "pattern", "metric"):
        for label in getattr(dashboard._screen.widgets, dropdown).options:
            assert visible_text(label[0]) == label[0]


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_every_view(text: str) -> None:
    for view in every_view(fold(DashboardState(), hostile_events(text))).values():
        check_page(view)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), limit=st.integers(2, 60))
def test_escaping_and_shortening(text: str, limit: int) -> None:
    assert "".join(Page(f"<p>{escape(text)}</p>").text) == visible_text(text)
    assert len(shorten(text, limit)) <= limit or limit < 2
    assert "\n" not in shorten(text, limit)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80), question=st.text(max_size=30), answer=st.text(max_size=20))
def test_marks_change_nothing_but_the_marks(text: str, question: str, answer: str) -> None:
    spans = mark_spans(text, question, [answer])
    assert all(0 <= start < end <= len(text) for start, end, _ in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    shown = Page(f"<p>{marked_text(text, spans)}</p>")
    pieces = [0, *(edge for start, end, _ in spans for edge in (start, end)), len(text)]
    expected = "".join(visible_text(text[start:end]) for start, end in pairwise(pieces))
    assert "".join(shown.text) == expected


def test_elements_refuse_what_is_never_needed() -> None:
    for attributes in ({"onclick": "x"}, {"ONLOAD": "x"}, {"href": "http://example.org"}, {"src": "x.png"}):
        with pytest.raises(ValueError):
            element("a", "text", **attributes)


# --- the state ----------------------------------------------------------------------------------------------


def test_the_same_events_give_the_same_state_in_any_portions() -> None:
    events = sample_events()
    whole = fold(DashboardState(), events)
    for size in (1, 2, 7):
        state = DashboardState()
        for start in range(0, len(events), size):
            state = fold(state, events[start : start + size])
        assert state == whole


def test_a_resumed_run_keeps_what_is_known() -> None:
    begun = sample_events()[0]
    before = fold(DashboardState(), sample_events())
    resumed = fold(before, [replace(begun, resumed=5)])
    assert [trial.name for trial in resumed.trials] == [trial.name for trial in before.trials]
    assert "5 of 12 configurations" in render_progress(resumed) and "left" not in render_progress(resumed)
    unknown = fold(DashboardState(), [replace(begun, resumed=5)])
    assert unknown.unseen == 5 and "5 of 12 configurations" in render_progress(unknown)


def test_a_second_run_begins_anew() -> None:
    state = fold(fold(DashboardState(), sample_events()), sample_events(finished=False)[:1])
    assert (state.trials, state.questions, state.run_state) == ((), {}, "running")


def test_a_trial_told_twice_is_there_once() -> None:
    payload, rows = sample_payload(0)
    again = [TrialFinished(at=1.0, name="Pattern1", payload=payload, evaluation_results=rows)] * 2
    assert [trial.name for trial in fold(DashboardState(), again).trials] == ["Pattern1"]


@pytest.mark.parametrize("value", NUMBER_WORDS)
def test_missing_numbers_are_missing_and_never_zero(value: Any) -> None:
    row = {
        "question": "Why?",
        "metrics": [{"name": "f1", "evaluator": "custom", "score": value}],
        "hits": [{"score": value}],
    }
    answer = read_answer(row, 0)
    assert answer.scores == {"custom:f1": None}
    metric = {
        "name": "f1",
        "evaluator": "custom",
        "scores": {"mean": value, "ci_low": value, "ci_high": value, "n": value},
    }
    event = TrialFinished(
        at=1.0, name="P", payload={"evaluation": {"metrics": [metric]}}, evaluation_results=[row]
    )
    state = fold(DashboardState(metric="custom:f1"), [event])
    assert ranked_trials(state)[0][0] is None
    assert "0.000" not in render_leaderboard(state)
    for view in every_view(state).values():
        check_page(view)


@pytest.mark.parametrize(
    "payload", [{}, {"evaluation": None}, {"evaluation": {"metrics": None}}, {"settings": None}]
)
def test_incomplete_payloads_can_be_shown(payload: dict[str, Any]) -> None:
    state = fold(
        DashboardState(), [TrialFinished(at=1.0, name="P", payload=payload, evaluation_results=[{}])]
    )
    for view in every_view(state).values():
        check_page(view)


def test_an_empty_run_can_be_shown() -> None:
    for view in every_view(DashboardState()).values():
        check_page(view)
    assert "No configuration could be evaluated" in report_html(DashboardState())


def test_the_leaderboard_ranks_by_the_metric_it_is_asked_for() -> None:
    state = fold(DashboardState(), sample_events())
    for metric in ("custom:overall_score", "unitxt:context_correctness", "answer_correctness"):
        means = [trial.score(metric).mean for rank, trial in ranked_trials(state, metric) if rank is not None]
        assert means == sorted(means, reverse=True) and len(means) == 4
    assert "Ranked by the mean of context_correctness" in render_leaderboard(
        state, "unitxt:context_correctness"
    )


def test_what_lost_too_many_questions_cannot_win() -> None:
    payload, rows = sample_payload(1)
    events = [
        *sample_events(),
        TrialFinished(
            at=101.0, name="Best", payload={**payload, "state": "incomplete"}, evaluation_results=rows
        ),
    ]
    state = fold(DashboardState(), events)
    assert (None, "Best") in [(rank, trial.name) for rank, trial in ranked_trials(state)]
    assert "! incomplete" in render_leaderboard(state)


def test_small_benchmarks_and_constant_metrics_are_told() -> None:
    state = fold(DashboardState(), sample_events())
    assert [note for note in leaderboard_notes(state) if "Only 10 questions" in note]
    assert [note for note in leaderboard_notes(state) if "faithfulness" in note]
    assert not [note for note in leaderboard_notes(replace(state, expected_questions=30)) if "Only" in note]


def test_stopped_runs_keep_their_settings_in_the_table() -> None:
    events = [
        *sample_events(finished=False),
        RunFinished(at=101.0, state="stopped", best_pattern="Pattern2", seconds=101.0),
    ]
    table = render_leaderboard(fold(DashboardState(), events))
    row = table[table.index("Pattern6") :]
    assert "interrupted" in row and "chunk_size" in row


# --- the report ---------------------------------------------------------------------------------------------


def test_the_report_says_how_sure_it_is() -> None:
    state = fold(DashboardState(), sample_events())
    text = " ".join(Page(report_html(state)).text)
    assert "No questions were held out" in text and "was not compared question by question" in text
    text = " ".join(Page(report_html(state, ReportFacts(ties=()))).text)
    assert "every other configuration is measurably worse" in text


def test_ties_are_named_and_marked() -> None:
    state = fold(DashboardState(), sample_events())
    ties = [{"name": "Pattern3", "difference": 0.015, "ci_low": -0.06, "ci_high": 0.09}]
    text = " ".join(Page(report_html(state, ReportFacts(ties=ties))).text)
    assert "Statistically as good" in text and "Pattern3 (behind by 0.015 at most)" in text
    assert "Pattern3 tied" in text


def test_metrics_beyond_one_are_not_drawn_off_the_scale() -> None:
    words = {
        "name": "answer_words",
        "evaluator": "custom",
        "scores": {"mean": 11.8, "ci_low": 9.0, "ci_high": 14.0, "n": 5},
    }
    payload, rows = sample_payload(1)
    payload["evaluation"]["metrics"].append(words)
    state = fold(
        DashboardState(), [TrialFinished(at=1.0, name="P", payload=payload, evaluation_results=rows)]
    )
    text = report_html(state)
    assert "9.000 to 14.000" in text and 'cx="1' in text
    assert max(float(place) for place in re.findall(r'cx="([-0-9.]+)"', text)) <= 140
    assert (
        max(
            float(place)
            for place in re.findall(r'cx="([-0-9.]+)"', render_leaderboard(state, "answer_words"))
        )
        <= 140
    )


def test_the_report_is_one_file_with_places_for_all_its_links(tmp_path: Path) -> None:
    state = fold(DashboardState(), sample_events())
    written = write_report(tmp_path / "deep" / "report.html", state)
    page = check_page(written.read_text(encoding="utf-8"))
    assert len(page.links) == 10 and {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("main") == 1 and page.tags.count("h1") == 1
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="can't be written"):
        write_report(tmp_path / "file" / "report.html", DashboardState())
    with pytest.raises(InputError, match="is a folder"):
        write_report(tmp_path, DashboardState())


def large_run(patterns: int, questions: int) -> list[Event]:
    """A run of the size that a real search has, with chunks of about 900 characters."""
    base, rows = sample_payload(1)
    events: list[Event] = [
        RunStarted(
            at=0.0,
            run_name="large",
            max_evaluations=patterns,
            combinations=patterns,
            optimization_metric="custom:overall_score",
            questions=questions,
            resumed=0,
        )
    ]
    for pattern in range(patterns):
        many = []
        for place in range(questions):
            row = rows[place % len(rows)]
            hits = [{**hit, "text": hit["text"] + " and so on" * 70} for hit in row["hits"]]
            many.append(
                {**row, "question_id": f"q{place}", "question": f"{place}: {row['question']}", "hits": hits}
            )
        payload = {**base, "iteration": pattern}
        events.append(
            TrialFinished(
                at=float(pattern), name=f"Pattern{pattern + 1}", payload=payload, evaluation_results=many
            )
        )
    return events


def test_pages_stay_small() -> None:
    state = fold(DashboardState(), large_run(12, 100))
    assert len(page_of_state(state, Selection()).encode()) < 2_000_000
    assert len(report_html(state).encode()) < 2_000_000


def test_large_runs_are_cut_and_say_so() -> None:
    state = fold(DashboardState(), large_run(30, 300))
    table = render_question_table(state)
    assert "100 more questions and 6 more patterns" in table
    assert "100 are left out" in page_of_state(state, Selection())


# --- looks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast_is_at_least_aa(theme: dict[str, str]) -> None:
    for text in ("ink", "quiet", "accent", "trouble"):
        for ground in ("ground", "raised"):
            assert contrast(theme[text], theme[ground]) >= 4.5
    for ground in ("soft", "mark", "gold"):
        assert contrast(theme["ink"], theme[ground]) >= 4.5
    assert contrast(theme["accent"], theme["soft"]) >= 4.5
    for step in range(SHADES):
        assert contrast(*shade(theme, step)) >= 4.5


def test_shades_are_told_apart_by_lightness_alone() -> None:
    for theme in (LIGHT, DARK):
        steps = [contrast(shade(theme, step)[0], theme["low"]) for step in range(SHADES)]
        assert steps == sorted(steps) and len(set(steps)) == SHADES


# --- the live dashboard -------------------------------------------------------------------------------------


def advance_from_many_threads(handler: Any, threads: int, events: int) -> None:
    bus = EventBus([handler])
    bus.emit(
        PhaseStarted(step=ExperimentStep.EMBEDDING, label="Embedding", total=threads * events, unit="texts")
    )
    lock, done = threading.Lock(), [0]

    def work() -> None:
        for _ in range(events):
            with lock:
                done[0] += 1
                bus.emit(PhaseAdvanced(step=ExperimentStep.EMBEDDING, label="Embedding", done=done[0]))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert bus.warnings == []


def test_no_event_of_many_threads_is_lost_and_the_last_state_is_painted() -> None:
    dashboard = Dashboard(repaints_per_second=0.001)
    widgets = dashboard.widget and dashboard._screen.widgets
    paints: list[str] = []
    widgets.html["progress"].observe(lambda change: paints.append(change["new"]), "value")
    advance_from_many_threads(dashboard, threads=10, events=100)
    assert dashboard.state.phases[0].done == 1000
    dashboard.close()
    assert "1,000 of 1,000 texts" in widgets.html["progress"].value
    assert dashboard._painter.error is None
    assert len(paints) == 1, "a thousand events, and one painting when its turn came"


def test_paintings_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by hand: what is asked for too early waits for the rest of the interval."""
    now, timers, painted = [100.0], list[Any](), list[float]()

    class Timer:
        def __init__(self, wait: float, function: Any) -> None:
            self.wait, self.function, self.daemon = wait, function, False
            timers.append(self)

        def start(self) -> None:
            assert self.daemon, "no timer keeps the process alive"

        def cancel(self) -> None:
            self.function = None

    monkeypatch.setattr(painter.threading, "Timer", Timer)
    monkeypatch.setattr(painter, "time", SimpleNamespace(monotonic=lambda: now[0]))
    brush = painter.Painter(lambda: painted.append(now[0]), repaints_per_second=4)
    for wait, passes in ((0.0, 0.0), (0.25, 0.25), (0.15, 0.15), (0.0, 0.0)):
        for _ in range(50):
            brush.request()
        assert timers[-1].wait == pytest.approx(wait)
        now[0] += passes
        timers[-1].function()
        now[0] += {0.0: 0.0, 0.25: 0.1, 0.15: 9.0}[wait]
    assert len(timers) == len(painted) == 4
    brush.close()
    brush.request()
    assert len(timers) == len(painted) == 4


def test_the_end_of_a_run_is_painted_at_once() -> None:
    dashboard = Dashboard(repaints_per_second=0.1)
    widgets = dashboard.widget and dashboard._screen.widgets
    for event in sample_events():
        dashboard.on_event(event)
    assert "stopped" in widgets.html["progress"].value and "Pattern5" in widgets.html["table"].value
    dashboard.close()


def test_widgets_are_made_once_and_no_thread_is_left() -> None:
    before = threading.active_count()
    dashboard = Dashboard(repaints_per_second=60)
    assert dashboard.widget is dashboard.widget
    models = {name: widget.model_id for name, widget in dashboard._screen.widgets.html.items()}
    for event in sample_events():
        dashboard.on_event(event)
    dashboard.close()
    assert {name: widget.model_id for name, widget in dashboard._screen.widgets.html.items()} == models
    wait_until(lambda: threading.active_count() <= before)


def test_a_script_loads_no_widgets() -> None:
    import subprocess

    code = (
        "import sys\nfrom ai4rag_nb.dashboard.dashboard import Dashboard\n"
        "from ai4rag_nb.dashboard.sample import sample_events\n"
        "assert 'Pattern2' in Dashboard.from_events(sample_events()).snapshot()\n"
        "import ai4rag_nb.dashboard.report\n"
        "print([name for name in ('ipywidgets', 'tqdm', 'IPython', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_choice_stays_when_more_patterns_come() -> None:
    events = sample_events()
    cut = next(place for place, event in enumerate(events) if isinstance(event, TrialFinished)) + 1
    dashboard = Dashboard.from_events(events[:cut], repaints_per_second=60)
    widgets = dashboard.widget and dashboard._screen.widgets
    widgets.question.value = "q4"
    for event in events[cut:]:
        dashboard.on_event(event)
    assert (widgets.question.value, widgets.pattern.value) == ("q4", "Pattern2")
    assert dashboard.selection == Selection(question_id="q4")


def test_a_fault_in_drawing_does_not_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = Dashboard(repaints_per_second=60)
    assert dashboard.widget is not None

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no picture")

    monkeypatch.setattr(dashboard._screen, "paint", broken)
    bus = EventBus([dashboard])
    for event in sample_events():
        bus.emit(event)
    assert bus.warnings == [] and "no picture" in repr(dashboard._painter.error)


def test_the_bundle_has_a_snapshot_for_places_without_widgets() -> None:
    bundle = Dashboard.from_events(sample_events())._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} == set(bundle)
    json.dumps(bundle)
    check_page(bundle["text/html"])


# --- progress bars ------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_of_two_trials(bus: EventBus, tick: Callable[[], None] = lambda: None) -> None:
    with phase(bus, ExperimentStep.OPTIMIZATION, "Evaluations", total=2, unit="patterns") as outer:
        for iteration in range(2):
            with phase(bus, ExperimentStep.EMBEDDING, "Embedding", total=40, unit="texts") as inner:
                for _ in range(4):
                    tick()
                    inner.advance(10)
            payload, rows = sample_payload(iteration)
            bus.emit(TrialFinished(name=f"Pattern{iteration + 1}", payload=payload, evaluation_results=rows))
            outer.advance()
    bus.emit(RunFinished(state="completed", best_pattern="Pattern2", seconds=1.0))


def test_a_terminal_keeps_one_line_for_the_run() -> None:
    terminal = Terminal()
    bus = EventBus([ProgressBars(stream=terminal)])
    run_of_two_trials(bus)
    assert bus.warnings == []
    assert terminal.getvalue().count("\n") == 1 or terminal.getvalue().rstrip("\r").endswith("\n")
    assert "Evaluations: 100%" in terminal.getvalue() and "best 0.883" in terminal.getvalue()


def test_no_watching_thread_outlives_the_bars() -> None:
    before = threading.active_count()
    run_of_two_trials(EventBus([ProgressBars(stream=Terminal())]))
    wait_until(lambda: threading.active_count() <= before)


def test_a_log_gets_few_lines_and_only_when_asked() -> None:
    silent, log, now = io.StringIO(), io.StringIO(), [0.0]

    def tick() -> None:
        now[0] += 1.0

    bars = ProgressBars("always", log, seconds_between_lines=5.0, clock=lambda: now[0])
    run_of_two_trials(EventBus([ProgressBars(stream=silent), bars]), tick)
    assert silent.getvalue() == ""
    lines = ["Embedding: 10 of 40 texts", "Embedding: 40 of 40 texts", "Evaluations: 2 of 2 patterns"]
    assert log.getvalue().splitlines() == lines, "a phase that was told of is told to its end"
    assert "\r" not in log.getvalue()


def test_a_search_has_one_bar_that_stays() -> None:
    terminal = Terminal()
    bus = EventBus([ProgressBars(stream=terminal)])
    for event in sample_events():
        bus.emit(replace(event, resumed=2) if isinstance(event, RunStarted) else event)
    assert bus.warnings == []
    drawn = re.split(r"[\r\n]|\x1b\[A", terminal.getvalue())
    last = [line for line in drawn if line.strip()][-1]
    assert "7/12" in last and "best 0.883" in last and "1 failed" in last
    assert "2 chunk sizes were left out" in terminal.getvalue()


def test_messages_can_be_left_to_others() -> None:
    log = io.StringIO()
    bars = ProgressBars("always", log, messages=False)
    bars.on_event(StatusChanged(level=LogLevel.ERROR, message="lost", step=ExperimentStep.EVALUATION))
    assert log.getvalue() == ""


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_cannot_steer_a_terminal(text: str) -> None:
    for stream, style in ((Terminal(), "auto"), (io.StringIO(), "always")):
        bars = ProgressBars(style, stream)
        for event in hostile_events(text):
            bars.on_event(event)
        bars.close()
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x80-\x9f\u202e]", stream.getvalue())
        escapes = set(re.findall(r"\x1b[^A-Za-z]*[A-Za-z]", stream.getvalue()))
        assert escapes <= {"\x1b[A"}


def test_bars_of_a_notebook_stay_in_their_box(monkeypatch: pytest.MonkeyPatch) -> None:
    from ipywidgets import VBox

    box = VBox()
    monkeypatch.setattr(progress_module, "in_notebook", lambda: True)
    monkeypatch.setattr(progress_module, "displayed_box", lambda: box)
    bars = ProgressBars()
    bus = EventBus([bars])
    bars.show()
    with phase(bus, ExperimentStep.OPTIMIZATION, "<b>Outer</b>", total=1, unit="patterns"):
        with phase(bus, ExperimentStep.EMBEDDING, "Inner", total=2, unit="texts") as inner:
            inner.advance(2)
            assert len(box.children) == 2
        assert len(box.children) == 1
    bus.status(LogLevel.WARNING, "<b>3 questions were lost.</b>", ExperimentStep.EVALUATION)
    assert len(box.children) == 2 and box.children[1].value == "warning: <b>3 questions were lost.</b>"
    assert "&lt;b&gt;Outer" in box.children[0].children[0].value
    assert bus.warnings == []


# --- a real browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium is None:
        pytest.skip("there is no chromium here (make test-browser installs it)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=chromium, headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 800, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_in_a_browser(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    state = fold(DashboardState(), [*sample_events()])
    written = write_report(tmp_path / "report.html", state)
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(written.as_uri())
    assert requests == [written.as_uri()] and errors == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.locator("a[href='#question-3']").focus()
    page.keyboard.press("Enter")
    assert page.locator("#question-3").is_visible()
    summary = page.locator("details > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#question-1").is_visible()
    page.close()


_CROPPED = """() => [...document.querySelectorAll('body *')].filter(element => {
    if (element.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
    for (let frame = element.parentElement; frame; frame = frame.parentElement)
        if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(frame).overflowX)) return false;
    return true;
}).map(element => element.outerHTML.slice(0, 80))"""


@pytest.mark.browser
def test_the_report_on_a_phone(browser: Any, tmp_path: Path) -> None:
    state = fold(DashboardState(), [*sample_events()])
    long = "unbroken" * 40
    places = {"results": f"/home/{long}/run"}
    written = write_report(tmp_path / "report.html", state, notes=[long], places=places, title=long)
    page = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page.goto(written.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate("innerWidth") == 390, "the page is laid out for the phone and not zoomed out"
    assert page.evaluate("document.documentElement.scrollWidth") == 390 and page.evaluate(_CROPPED) == []
    sizes = page.evaluate(
        "[...document.querySelectorAll('p, td, th, li')].map(e => getComputedStyle(e).fontSize)"
    )
    assert min(float(size.removesuffix("px")) for size in sizes) >= 12
    heights = page.evaluate("[...document.querySelectorAll('table.wide tr')].map(e => e.offsetHeight)")
    assert max(heights) < 200, "columns are not squeezed until every word has a line"
    page.close()


@pytest.mark.browser
def test_hostile_text_runs_nothing_in_a_browser(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    alerts: list[str] = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    for number, text in enumerate(HOSTILE):
        written = Dashboard.from_events(hostile_events(text)).to_html(tmp_path / f"{number}.html")
        page.goto(written.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        page.mouse.move(200, 200)
        assert page.locator("script, iframe, img").count() == 0
    assert alerts == []
    page.close()

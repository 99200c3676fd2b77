"""Vectors that cannot be read are put aside and built again by whoever asks; vectors in use by another program are left alone."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_stub import OpenAIStub
from small_world import make_experiment, paid, service

from ai4rag_nb import open_run
from ai4rag_nb.foundations.cache import Cache
from ai4rag_nb.foundations.errors import AI4RAGError, DamagedStoreError, LockedStoreError
from ai4rag_nb.indexing import damage
from ai4rag_nb.indexing.collections import CollectionRegistry
from ai4rag_nb.indexing.damage import aside_folder, set_aside
from ai4rag_nb.indexing.milvus_lite import list_collections
from ai4rag_nb.indexing.vector_store import MilvusLiteConfig
from ai4rag_nb.optimization.open_run import find_pattern
from ai4rag_nb.serving.commands import main

QUESTION = "Which apple ripens last?"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with pytest.MonkeyPatch.context() as patch, service(patch) as running:
        yield running


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, stub: OpenAIStub) -> Path:
    """A finished run with several collections; copied before anything is done to it."""
    folder = tmp_path_factory.mktemp("searched")
    experiment = make_experiment(folder, max_evals=4)
    experiment.search()
    experiment.close()
    assert len(list_collections(config_of(folder))) > 1
    return folder


@pytest.fixture
def world(searched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(searched, tmp_path / "world"))


def config_of(world: Path) -> MilvusLiteConfig:
    return MilvusLiteConfig(str(world / "workspace" / "vectors.db"))


def collection_of(world: Path, pattern: str) -> Path:
    """Find the folder of the collection that a pattern uses today."""
    name = json.loads((world / "run" / pattern / "pattern.json").read_text())["settings"]["store_binding"]
    return world / "workspace" / "vectors.db" / "collections" / name["collection_name"]


def ask(world: Path, *more: str) -> int:
    return main(["ask", str(world / "run"), QUESTION, "--workspace", str(world / "workspace"), *more])


def each(pattern: str, change: Callable[[bytes], bytes | None]) -> Damage:
    """Change every file of a collection whose name fits; None deletes it."""

    def apply(collection: Path) -> None:
        files = [path for path in collection.rglob(pattern) if path.is_file()]
        assert files, f"there is no {pattern}"
        for path in files:
            content = change(path.read_bytes())
            path.unlink() if content is None else path.write_bytes(content)

    return apply


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: b"\x9e\x01" * (len(content) // 2),
    "gone": lambda content: None,
}
DAMAGES: dict[str, Damage] = {
    f"{pattern} {name}": each(pattern, change)
    for pattern in ("*.parquet", "manifest.json*", "schema.json")
    for name, change in CHANGES.items()
}
DAMAGES |= {f"*.idx {name}": each("*.idx", CHANGES[name]) for name in ("truncated", "empty", "garbage")}
DAMAGES["no folder of data"] = lambda collection: shutil.rmtree(collection / "partitions")
DAMAGES["a file in its place"] = lambda place: (shutil.rmtree(place), place.write_text("x"))[0]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_collection_is_put_aside_and_built_again(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    best = open_run(world / "run").best_pattern().name
    place = collection_of(world, best)
    DAMAGES[name](place)
    whole = {other.name for other in place.parent.iterdir()} - {place.name}
    before = paid(stub)
    assert ask(world) == 0
    printed = capsys.readouterr()
    assert "Winter Banana" in printed.out and paid(stub) == before
    assert "It is built again" in printed.err and ".damaged" in printed.err
    aside = aside_folder(config_of(world))
    assert [path.name for path in aside.iterdir()] == [place.name] and not os.path.lexists(place)
    assert whole < {other.name for other in place.parent.iterdir()}, "the others stay"
    assert ask(world) == 0
    told = capsys.readouterr().err.splitlines()
    assert all(line.startswith("Loading Pattern") for line in told), "it is whole now"
    assert len(list(aside.iterdir())) == 1


def test_a_wrong_count_is_damage(world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]) -> None:
    best = open_run(world / "run").best_pattern().name
    name = collection_of(world, best).name
    cache = Cache.open(world / "workspace" / "cache.sqlite")
    record = next(found for found in CollectionRegistry(cache).records() if found.collection_name == name)
    cache.close()
    code = """
        import sys
        from ai4rag_nb.indexing.milvus_lite_file import MilvusLiteFile
        file = MilvusLiteFile.open(sys.argv[1])
        file.client.load_collection(sys.argv[2])
        file.client.delete(sys.argv[2], ids=[file.client.query(sys.argv[2], limit=1)[0]["id"]])
        file.client.flush(sys.argv[2])
        file.release()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), config_of(world).db_path, name]
    subprocess.run(arguments, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ask(world) == 0
    printed = capsys.readouterr()
    assert f"held {record.chunks - 1} chunks instead of {record.chunks}" in printed.err
    assert "Winter Banana" in printed.out and (aside_folder(config_of(world)) / name).is_dir()


STORE_DAMAGES: dict[str, Damage] = {
    "a file": lambda store: (shutil.rmtree(store), store.write_bytes(b"SQLite format 3"))[0],
    "a file for the collections": lambda store: (
        shutil.rmtree(store / "collections"),
        (store / "collections").write_text("x"),
    )[0],
    "a folder for the lock": lambda store: ((store / "LOCK").unlink(), (store / "LOCK").mkdir())[0],
}


@pytest.mark.parametrize("name", STORE_DAMAGES)
@pytest.mark.parametrize("way", ["ask", "search"])
def test_a_damaged_store_is_put_aside_as_a_whole(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], name: str, way: str
) -> None:
    store = world / "workspace" / "vectors.db"
    STORE_DAMAGES[name](store)
    before = paid(stub)
    if way == "ask":
        assert ask(world) == 0
        assert ".damaged" in capsys.readouterr().err
    else:
        again = make_experiment(world, max_evals=4)
        again.search()
        with again.results.best_pattern() as pattern:
            assert "Winter Banana" in pattern.generate(QUESTION)["answer"]
        again.close()
    assert paid(stub) == before
    assert [path.name for path in aside_folder(config_of(world)).iterdir()] == ["vectors.db"]
    assert ask(world) == 0


@pytest.mark.parametrize("state", ["dropped", "damaged", "store gone"])
def test_every_pattern_is_built_again_when_it_is_asked(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    shutil.rmtree(world / "docs", ignore_errors=True)
    if state == "dropped":
        assert main(["clean", "--yes", "--workspace", str(world / "workspace")]) == 0
    elif state == "store gone":
        shutil.rmtree(world / "workspace" / "vectors.db")
    else:
        for place in (world / "workspace" / "vectors.db" / "collections").iterdir():
            each("*.parquet", CHANGES["truncated"])(place)
    before = paid(stub)
    names = [result.name for result in open_run(world / "run").evaluations]
    for name in names:
        capsys.readouterr()
        assert ask(world, "--pattern", name, "--json") == 0
        assert json.loads(capsys.readouterr().out)["pattern"] == name
    assert len(names) == 4 and paid(stub) == before
    recorded = {place.name for place in (world / "workspace" / "vectors.db" / "collections").iterdir()}
    assert len(recorded) == len({collection_of(world, name).name for name in names})


def test_without_kept_chunks_the_message_says_what_to_do(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache.open(world / "workspace" / "cache.sqlite")
    with cache.transaction() as connection:
        connection.execute("DELETE FROM entries WHERE kind = 'chunks'")
    cache.close()
    assert ask(world) == 0, "what is whole needs no chunks"
    shutil.rmtree(world / "workspace" / "vectors.db")
    capsys.readouterr()
    assert ask(world) == 2
    errors = capsys.readouterr().err
    assert "neither its chunks nor the documents are at hand" in errors and "same search again" in errors


def test_a_store_in_use_by_another_process_is_not_damaged(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
        import sys
        from ai4rag_nb.indexing.milvus_lite_file import MilvusLiteFile
        file = MilvusLiteFile.open(sys.argv[1])
        print("open", flush=True)
        sys.stdin.readline()
        file.release()
    """
    store = world / "workspace" / "vectors.db"
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(store)]
    before = sorted(path.name for path in (store / "collections").iterdir())
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert ask(world) == 1
        errors = capsys.readouterr().err
        assert "another process" in errors and str(holder.pid) in errors and "damaged" not in errors
        again = make_experiment(world, max_evals=5)
        with pytest.raises(LockedStoreError):
            again.search()
        again.close()
        for arguments in (["--yes"], ["--dry-run"]):
            assert main(["clean", "--workspace", str(world / "workspace"), *arguments]) == 1
        holder.stdin.write("go\n")
        holder.stdin.flush()
        holder.wait(60)
    assert sorted(path.name for path in (store / "collections").iterdir()) == before
    assert not aside_folder(config_of(world)).exists()
    assert ask(world) == 0


def test_nothing_is_moved_where_nothing_new_can_be_made(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or too many open files look like damage; then the old vectors stay where they are."""
    monkeypatch.setattr(damage, "place_works", lambda config, whole=False: False)
    error = DamagedStoreError("Cannot open it: too many open files.")
    with pytest.raises(DamagedStoreError, match="too many open files"):
        set_aside(config_of(world), "ai4rag_x", error)
    assert (world / "workspace" / "vectors.db").is_dir() and not aside_folder(config_of(world)).exists()


def test_a_place_that_cannot_be_written_is_found_out(tmp_path: Path) -> None:
    assert damage.place_works(MilvusLiteConfig(str(tmp_path / "store.db")), True)
    assert not damage.place_works(MilvusLiteConfig(str(tmp_path / "nowhere" / "store.db")), True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_use_here_is_not_moved(world: Path, stub: OpenAIStub) -> None:
    results = open_run(world / "run", world / "workspace")
    with results.best_pattern() as pattern:
        assert "Winter Banana" in pattern.generate(QUESTION)["answer"]
        name = pattern.rag.retriever.vector_store.collection_name
        assert set_aside(config_of(world), name) is None
        assert "Winter Banana" in pattern.generate(QUESTION)["answer"]
    assert (world / "workspace" / "vectors.db" / "collections" / name).is_dir()


def test_the_note_can_be_read_from_the_pattern(world: Path, stub: OpenAIStub) -> None:
    best = open_run(world / "run").best_pattern().name
    each("schema.json", CHANGES["garbage"])(collection_of(world, best))
    with find_pattern(open_run(world / "run", world / "workspace"), best) as pattern:
        assert pattern.notes == []
        pattern.generate(QUESTION)
        assert len(pattern.notes) == 1 and "built again" in pattern.notes[0]


# --- clean -------------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def clean(world: Path, *more: str) -> int:
    return main(["clean", "--workspace", str(world / "workspace"), *more])


@pytest.mark.parametrize(
    ("said", "goes"),
    [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False), ("yep\n", False)],
)
def test_clean_asks_whoever_sits_there(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, goes: bool
) -> None:
    held = list_collections(config_of(world))
    monkeypatch.setattr(sys, "stdin", Terminal(said))
    assert clean(world) == 0
    printed = capsys.readouterr()
    assert f"Drop {len(held)} collections with {sum(held.values())} chunks" in printed.err
    assert "[y/N]" in printed.err and all(name in printed.out for name in held)
    assert all(f" {count} " in printed.out for count in held.values()) and "kB" in printed.out
    assert list_collections(config_of(world)) == ({} if goes else held)
    assert ("Nothing was dropped" in printed.out) is not goes


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_clean_needs_yes_where_nobody_can_be_asked(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    held = list_collections(config_of(world))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert clean(world, *options) == 2
    printed = capsys.readouterr()
    assert "--yes" in printed.err and "--dry-run" in printed.err
    assert list_collections(config_of(world)) == held
    assert clean(world, "--yes", *options) == 0
    assert list_collections(config_of(world)) == {}


def test_clean_lists_sizes_and_drops_what_was_put_aside(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    best = open_run(world / "run").best_pattern().name
    place = collection_of(world, best)
    each("*.parquet", CHANGES["truncated"])(place)
    other = next(path for path in place.parent.iterdir() if path != place)
    each("manifest.json*", CHANGES["garbage"])(other)
    assert ask(world) == 0
    capsys.readouterr()
    assert clean(world, "--dry-run", "--json") == 0
    listed: dict[str, Any] = json.loads(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in other.rglob("*") if file.is_file())
    assert listed["bytes"][other.name] == size and listed["collections"][other.name] == 0
    assert set(listed["put_aside"]) == {place.name} and listed["dropped"] is False
    assert aside_folder(config_of(world)).is_dir()
    assert clean(world, "--yes") == 0
    assert "damaged, put aside" in capsys.readouterr().out
    assert not aside_folder(config_of(world)).exists()
    assert list((world / "workspace" / "vectors.db" / "collections").iterdir()) == []
    assert clean(world) == 0, "there is nothing left to ask about"
    assert "nothing to drop" in capsys.readouterr().out


def test_clean_keeps_away_from_a_search_that_is_running(
    world: Path, stub: OpenAIStub, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same process, where the lock of the vectors keeps nobody out."""
    from ai4rag_nb import BaseEventHandler
    from ai4rag_nb.foundations.events import Event, TrialFinished

    seen: list[tuple[int, dict[str, int], dict[str, int]]] = []

    class Cleaner(BaseEventHandler):
        def on_event(self, event: Event) -> None:
            if isinstance(event, TrialFinished):
                before = list_collections(config_of(world))
                status = clean(world, "--yes")
                seen.append((status, before, list_collections(config_of(world))))

    shutil.rmtree(world / "run")
    experiment = make_experiment(world, max_evals=3, event_handler=[Cleaner()])
    experiment.search()
    assert len(seen) == 3 and all(status == 1 and before == after for status, before, after in seen)
    assert "A search is running in" in capsys.readouterr().err
    experiment.close()
    assert clean(world, "--yes") == 0 and list_collections(config_of(world)) == {}


def test_errors_of_the_store_say_their_kind() -> None:
    assert issubclass(LockedStoreError, AI4RAGError) and not issubclass(LockedStoreError, DamagedStoreError)
    assert LockedStoreError("x").failure == DamagedStoreError("x").failure == "store"

"""A small service that speaks the OpenAI protocol, for tests and benchmarks.

It listens on the loopback, embeds texts by their words (so that searching makes sense), answers questions with the sentence of the prompt that
shares most words with the question, counts everything it is asked for, and fails in every way that real services do. Answers depend on the request
only. Use it as a context manager, or as a program: `python tests/openai_stub.py --port 8085 --delay 0.02`; then `GET /stub/counts` shows the counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"[^\n.!?]+(?:[.!?](?=\S)[^\n.!?]*)*[.!?]?")
_COMMON = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "can",
        "do",
        "does",
        "for",
        "from",
        "has",
        "have",
        "how",
        "if",
        "in",
        "is",
        "it",
        "its",
        "may",
        "must",
        "not",
        "of",
        "on",
        "or",
        "should",
        "than",
        "that",
        "the",
        "their",
        "then",
        "there",
        "this",
        "to",
        "was",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
        "will",
        "with",
        "you",
        "your",
    ]
)
_PLAIN_FIELDS = {
    "embeddings": {"model", "input"},
    "chat": {"model", "messages", "temperature", "max_completion_tokens"},
}


@dataclass
class StubSettings:
    """Say how the service behaves; every field may be changed while it runs."""

    dimension: int = 64  # length of the vectors
    delay: float = 0.0  # seconds before each answer
    api_key: str | None = None  # the only key that is accepted; None accepts all
    embedding_models: tuple[str, ...] = ("stub-embedding",)
    chat_models: tuple[str, ...] = ("stub-chat",)
    rerank_models: tuple[str, ...] = ("stub-rerank",)
    planned: Callable[[dict[str, Any]], str | dict[str, Any] | None] | None = (
        None  # body of a chat -> its text or whole message; None where the usual answer is given
    )
    max_batch: int | None = None  # more texts in one request are refused with 400
    window: int | None = None  # tokens of one text; more is refused with 400, or cut
    window_named: bool = True  # whether the refusal names the limit
    window_cut: bool = False  # cut longer texts and say nothing
    listed_window: int | None = None  # shown as max_model_len by GET /models
    report_usage: bool = True  # whether answers carry token counts
    strict: bool = False  # refuse every field beside the plain ones with 422
    max_tokens_only: bool = False  # refuse max_completion_tokens, as older servers do
    status: int | None = None  # answer everything with this status
    message: str = "no"  # the sentence in such an answer
    retry_after: str | None = None  # header of such an answer
    html: bool = False  # answer everything with a web page
    hang: float = 0.0  # seconds without a byte before the connection ends
    hang_after: int = 0  # so many chats are answered before anything is left hanging
    drip: float = 0.0  # seconds between single bytes of the answer
    fail_first: int = 0  # so many requests are answered with 503
    fail_share: float = 0.0  # share of the chats, chosen by their content, answered with 500
    fail_texts: tuple[str, ...] = ()  # chats and texts containing one of these are answered with 400
    empty: str | None = None  # "none" or "blank": chats without content; with finish reason "length"
    shuffle: bool = False  # give vectors in another order, with their right indices
    broken: str | None = None  # "nan", "zero", "missing", "no_index", "dimension", "json", "list", "index"
    echo_key: bool = True  # repeat a refused key in the message, as services do


@dataclass
class StubCounts:
    """Count what was asked."""

    requests: int = 0  # all of them, refused ones too
    embedding_requests: int = 0
    texts: int = 0  # texts in answered requests
    distinct_texts: int = 0
    text_tokens: int = 0  # tokens of all texts sent, refused ones too
    chats: int = 0  # answered ones
    distinct_chats: int = 0
    refused: int = 0  # answers with a status that is not 200
    largest_batch: int = 0  # in answered requests
    most_at_once: int = 0  # requests in work at the same time
    reranks: int = 0  # answered ones
    hung: int = 0  # requests left without an answer
    waited_out: int = 0  # slow answers that a caller waited for to their end


def count_tokens(text: str) -> int:
    """Count words, plus two as many models add."""
    return len(text.split()) + 2


@lru_cache(maxsize=100_000)
def _word_place(word: str, dimension: int) -> tuple[int, float]:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") % dimension, 1.0 if digest[4] % 2 else -1.0


def content_words(text: str) -> list[str]:
    """Find the words that carry meaning, with a plain plural removed."""
    words = [word.lower() for word in _WORD.findall(text)]
    return [
        word[:-1] if len(word) > 3 and word.endswith("s") else word for word in words if word not in _COMMON
    ]


def embed(text: str, dimension: int) -> np.ndarray:
    """Embed a text by its words, with a small part of its own that tells equal bags of words apart."""
    vector = np.zeros(dimension)
    for word in content_words(text):
        place, sign = _word_place(word, dimension)
        vector[place] += sign
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    own = np.random.default_rng(seed).normal(size=dimension)
    vector = vector / (np.linalg.norm(vector) or 1.0) + 0.02 * own / np.linalg.norm(own)
    return vector / np.linalg.norm(vector)


def answer(prompt: str) -> str:
    """Answer with the sentence of the prompt that shares most words with its question."""
    passages, _, rest = prompt.rpartition("Question:")
    question = set(content_words((rest or prompt).replace("Answer:", "")))
    best, best_score = "I don't know.", 0.0
    for match in _SENTENCE.finditer(passages):
        words = content_words(match[0])
        score = len(question & set(words)) / (len(words) + 8) ** 0.5 if words else 0.0
        if score > best_score:
            best, best_score = match[0].strip(), score
    return best


@dataclass
class Reply:
    """Hold one answer."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._serve(json.loads(raw))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _serve(self, body: Any) -> None:
        stub = self.server.stub
        if self.path == "/stub/counts":
            self._send(Reply(200, dataclasses.asdict(stub.counts)))
            return
        with stub.in_work():
            if stub.settings.delay:
                stub.stopping.wait(stub.settings.delay)
            if stub.settings.hang and stub.counts.chats >= stub.settings.hang_after:
                stub.count(hung=1)
                counts = stub.counts  # a caller that went away must not be counted in a later test
                counts.waited_out += not stub.stopping.wait(stub.settings.hang)
                self.close_connection = True
                return
            reply = stub.reply(self.path, body, self.headers.get("Authorization", ""))
            stub.count(refused=int(reply.status != 200))
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        html = isinstance(reply.body, str)
        data = reply.body.encode() if html else json.dumps(reply.body).encode()
        if not html and self.server.stub.settings.broken == "json":
            data = data[: len(data) // 2]
        head = f"HTTP/1.1 {reply.status} X\r\nContent-Type: {'text/html' if html else 'application/json'}\r\n"
        head += f"Content-Length: {len(data)}\r\n" + "".join(
            f"{k}: {v}\r\n" for k, v in reply.headers.items()
        )
        drip = self.server.stub.settings.drip
        if not drip:
            self.wfile.write(head.encode() + b"\r\n" + data)
            return
        counts = self.server.stub.counts
        self.wfile.write(head.encode() + b"\r\n")
        for position in range(len(data)):
            self.wfile.write(data[position : position + 1])
            if self.server.stub.stopping.wait(drip):
                return
        counts.waited_out += 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    stub: OpenAIStub

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[socket.socket] = set()  # open ones
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End the connections that callers keep open, and with them their threads."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *arguments: object) -> None:
        return


class OpenAIStub:
    """Run the service; `with OpenAIStub(delay=0.02) as stub: ... stub.base_url ... stub.counts`."""

    def __init__(self, port: int = 0, **settings: Any) -> None:
        self.settings = StubSettings(**settings)
        self.counts = StubCounts()
        self.bodies: list[tuple[str, Any]] = []  # (path, body) of every POST request
        self.stopping = threading.Event()
        self._texts: set[str] = set()
        self._chats: set[str] = set()
        self._lock = threading.Lock()
        self._at_once = 0
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.stub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, api_key: str = "test-key-1234") -> Any:
        """Make a client of the openai package."""
        import openai

        return openai.OpenAI(base_url=self.base_url, api_key=api_key)

    def start(self) -> OpenAIStub:
        self._thread.start()
        return self

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> OpenAIStub:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.stop()

    def reset(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self.counts, self._texts, self._chats, self.bodies = StubCounts(), set(), set(), []

    def count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    @property
    def at_once(self) -> int:
        """Say how many requests are in work now."""
        return self._at_once

    def in_work(self) -> _InWork:
        return _InWork(self)

    def reply(self, path: str, body: Any, authorization: str) -> Reply:
        """Answer one request."""
        settings = self.settings
        with self._lock:
            self.counts.requests += 1
            number = self.counts.requests
            if body is not None:
                self.bodies.append((path, body))
        if settings.html:
            return Reply(200, "<!doctype html><html><body>Welcome to our website</body></html>")
        if settings.status:
            return _refuse(settings.status, settings.message, retry_after=settings.retry_after)
        if number <= settings.fail_first:
            return _refuse(503, "starting up")
        key = authorization.removeprefix("Bearer ")
        if settings.api_key is not None and key != settings.api_key:
            shown = f"{key} ({key[:4]}*****{key[-4:]})" if settings.echo_key else "it"
            return _refuse(401, f"Incorrect API key provided: {shown}.", "invalid_api_key")
        if path == "/v1/models":
            return Reply(200, {"object": "list", "data": [self._entry(name) for name in self._models()]})
        if path == "/v1/embeddings" and isinstance(body, dict):
            return self._embeddings(body)
        if path == "/v1/chat/completions" and isinstance(body, dict):
            return self._chat(body)
        if path == "/v1/rerank" and isinstance(body, dict):
            return self._rerank(body)
        return _refuse(404, f"There is nothing at {path}")

    def _models(self) -> tuple[str, ...]:
        return (*self.settings.embedding_models, *self.settings.chat_models)

    def _entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "stub"}
        if self.settings.listed_window is not None:
            entry["max_model_len"] = self.settings.listed_window
        return entry

    def _checked(self, kind: str, body: dict[str, Any], models: tuple[str, ...]) -> Reply | None:
        if body.get("model") not in models:
            return _refuse(404, f"The model `{body.get('model')}` does not exist", "model_not_found")
        unknown = set(body) - _PLAIN_FIELDS[kind]
        if self.settings.max_tokens_only and kind == "chat":
            unknown = set(body) - (_PLAIN_FIELDS[kind] - {"max_completion_tokens"} | {"max_tokens"})
        if (self.settings.strict or self.settings.max_tokens_only) and unknown:
            return _refuse(422, f"Extra inputs are not permitted: {', '.join(sorted(unknown))}")
        return None

    def _embeddings(self, body: dict[str, Any]) -> Reply:
        settings = self.settings
        texts = [body["input"]] if isinstance(body.get("input"), str) else body.get("input", [])
        sizes = [count_tokens(text) for text in texts]
        self.count(embedding_requests=1, text_tokens=sum(sizes))
        refused = self._checked("embeddings", body, settings.embedding_models) or self._texts_refused(
            texts, sizes
        )
        if refused:
            return refused
        if settings.window_cut and settings.window:
            texts = [" ".join(text.split()[: settings.window - 2]) for text in texts]
        self.count(texts=len(texts))
        with self._lock:
            self._texts.update(texts)
            self.counts.distinct_texts = len(self._texts)
            self.counts.largest_batch = max(self.counts.largest_batch, len(texts))
        rows = [self._row(text, position) for position, text in enumerate(texts)]
        if settings.shuffle:
            rows = rows[::-1]
        if settings.broken == "missing":
            rows = rows[1:]
        if settings.broken == "list":
            return Reply(200, rows)
        answered: dict[str, Any] = {"object": "list", "data": rows, "model": body["model"]}
        if settings.report_usage:
            tokens = sum(min(size, settings.window or size) for size in sizes)
            answered["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return Reply(200, answered)

    def _texts_refused(self, texts: list[str], sizes: list[int]) -> Reply | None:
        settings = self.settings
        if not texts or not all(isinstance(text, str) and text for text in texts):
            return _refuse(400, "input must be a non-empty list of non-empty strings")
        if settings.max_batch is not None and len(texts) > settings.max_batch:
            return _refuse(400, f"batch size {len(texts)} > maximum allowed batch size {settings.max_batch}")
        if settings.window is not None and not settings.window_cut and max(sizes) > settings.window:
            named = f"This model's maximum context length is {settings.window} tokens, however you sent {max(sizes)}."
            return _refuse(400, named if settings.window_named else "bad request")
        if any(bad in text for bad in settings.fail_texts for text in texts):
            return _refuse(400, "this text is not welcome")
        return None

    def _row(self, text: str, position: int) -> dict[str, Any]:
        vector = [round(float(value), 6) for value in embed(text, self.settings.dimension)]
        broken = self.settings.broken
        if broken == "nan":
            vector[0] = float("nan")
        if broken == "zero":
            vector = [0.0] * len(vector)
        if broken == "dimension" and position == 1:
            vector = vector[:-1]
        row: dict[str, Any] = {"object": "embedding", "index": position, "embedding": vector}
        if broken == "no_index":
            del row["index"]
        return row

    def _chat(self, body: dict[str, Any]) -> Reply:
        settings = self.settings
        refused = self._checked("chat", body, settings.chat_models)
        if refused:
            return refused
        prompt = body["messages"][-1]["content"]
        key = json.dumps(body["messages"], sort_keys=True)
        share = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") / 2**32
        if share < settings.fail_share:
            return _refuse(500, "internal error")
        if any(bad in prompt for bad in settings.fail_texts):
            return _refuse(400, "this prompt is not welcome")
        with self._lock:
            self._chats.add(key)
            self.counts.chats += 1
            self.counts.distinct_chats = len(self._chats)
        planned = settings.planned(body) if settings.planned else None
        text = {None: answer(prompt), "none": None, "blank": " "}[settings.empty]
        text = planned if isinstance(planned, str) else text
        reason = "length" if settings.empty else "stop"
        message = {"role": "assistant", "content": text}
        if isinstance(planned, dict):
            message, reason = {**message, "content": None, **planned}, "tool_calls"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        answered: dict[str, Any] = {
            "id": "stub",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [choice],
        }
        if settings.report_usage:
            read = sum(count_tokens(str(message["content"])) for message in body["messages"])
            answered["usage"] = {"prompt_tokens": read, "completion_tokens": len(str(text).split())}
        return Reply(200, answered)

    def _rerank(self, body: dict[str, Any]) -> Reply:
        """Score documents by the likeness of their vectors to the query's, as Cohere and Jina answer."""
        settings = self.settings
        if body.get("model") not in settings.rerank_models:
            return _refuse(404, f"The model `{body.get('model')}` does not exist", "model_not_found")
        query, texts = str(body.get("query")), list(body.get("documents") or [])
        if not texts or not all(isinstance(text, str) and text for text in texts):
            return _refuse(400, "documents must be a non-empty list of non-empty strings")
        if any(bad in text for bad in settings.fail_texts for text in (query, *texts)):
            return _refuse(400, "this text is not welcome")
        self.count(reranks=1)
        asked = embed(query, settings.dimension)
        scores = [round(float(asked @ embed(text, settings.dimension)), 6) for text in texts]
        order = sorted(range(len(texts)), key=lambda place: -scores[place])[: int(body["top_n"])]
        rows: list[dict[str, Any]] = [
            {"index": place, "relevance_score": scores[place]}
            for place in order[settings.broken == "missing" :]
        ]
        if settings.broken == "nan":
            rows[0]["relevance_score"] = float("nan")
        if settings.broken == "index":
            rows[0]["index"] = len(texts)
        answered: dict[str, Any] = {"id": "stub", "model": body["model"], "results": rows}
        if settings.report_usage:
            answered["usage"] = {"total_tokens": sum(map(count_tokens, [query, *texts]))}
        return Reply(200, answered)


class _InWork:
    """Count requests that are in work at the same time."""

    def __init__(self, stub: OpenAIStub) -> None:
        self._stub = stub

    def __enter__(self) -> None:
        with self._stub._lock:
            self._stub._at_once += 1
            self._stub.counts.most_at_once = max(self._stub.counts.most_at_once, self._stub._at_once)

    def __exit__(self, *details: object) -> None:
        with self._stub._lock:
            self._stub._at_once -= 1


def _refuse(status: int, message: str, code: str = "", retry_after: str | None = None) -> Reply:
    headers = {"Retry-After": retry_after} if retry_after is not None else {}
    return Reply(
        status,
        {"error": {"message": message, "type": "invalid_request_error", "code": code or None}},
        headers,
    )


def main() -> None:
    """Run the service until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="NAME=JSON of any other setting")
    options = parser.parse_args()
    others = {name: json.loads(value) for name, _, value in (item.partition("=") for item in options.set)}
    stub = OpenAIStub(options.port, delay=options.delay, dimension=options.dimension, **others)
    with stub:
        print(f"listening on {stub.base_url}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()

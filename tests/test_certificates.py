"""Services behind TLS with an authority of one's own: trusted when its certificate is named, else refused by name.

The stores have their own tests of this: `TestTls` in `test_milvus_server.py` and `test_pgvector.py`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai_stub import OpenAIStub
from servers import make_certificates

from ai4rag_nb.foundations.errors import AI4RAGError, Failure, ModelSettingsError
from ai4rag_nb.indexing.openai_embedding import OpenAIEmbeddingModel
from ai4rag_nb.querying.models import check_model, service_client
from ai4rag_nb.querying.openai_generation import OpenAIFoundationModel
from ai4rag_nb.querying.rerank_endpoint import EndpointReranker, rerank_client

KEY = "secret-key-8642"


class SecureStub(OpenAIStub):
    """The same service, reached over TLS only."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        plain = self._server.socket
        self._server.socket = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)

    @property
    def base_url(self) -> str:
        return f"https://127.0.0.1:{self.port}/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    make_certificates(made)
    return made


@pytest.fixture(scope="module")
def stub(folder: Path) -> Iterator[SecureStub]:
    with SecureStub(folder) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(stub: SecureStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for service in ("OPENAI", "RERANK"):
        monkeypatch.setenv(f"{service}_BASE_URL", stub.base_url)
        monkeypatch.setenv(f"{service}_API_KEY", KEY)


def embeds() -> None:
    model = OpenAIEmbeddingModel("stub-embedding", service_client(), retries=0)
    check_model(model)
    assert len(model.embed_documents(["one lamp", "two lamps"])) == 2


def answers() -> None:
    model = OpenAIFoundationModel("stub-chat", service_client(), retries=0)
    check_model(model)
    messages = model.build_messages("Which lamp is red?", ["The first lamp is red."])
    assert model.generate(messages, "Which lamp is red?", ["The first lamp is red."]).text


def reranks() -> None:
    EndpointReranker("stub-rerank", rerank_client(), retries=0).probe()


@pytest.mark.parametrize("work", [embeds, answers, reranks])
def test_a_named_authority_is_trusted(
    work: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    work()


@pytest.mark.parametrize("authority", [None, "other.pem"])
@pytest.mark.parametrize("work", [embeds, answers, reranks])
def test_another_authority_is_refused(
    work: Callable[[], None],
    authority: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stub: SecureStub,
) -> None:
    """The message names the service and the variable, never the key, and nothing was asked."""
    if authority:
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / authority))
    stub.reset()
    with pytest.raises(AI4RAGError, match="SSL_CERT_FILE") as caught:
        work()
    assert "certificate of" in str(caught.value) and "is not trusted" in str(caught.value)
    assert f"127.0.0.1:{stub.port}" in str(caught.value) and KEY not in str(caught.value)
    assert caught.value.failure is Failure.SERVICE and not stub.bodies


@pytest.mark.parametrize("make", [service_client, rerank_client])
def test_a_file_that_holds_no_certificate_is_named(
    make: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("missing.pem", None), ("empty.pem", "no certificate")):
        if text:
            (tmp_path / name).write_text(text)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        with pytest.raises(ModelSettingsError, match=r"cannot be made: .*SSL_CERT_FILE"):
            make()


def test_a_service_without_tls_is_unreachable_over_https(monkeypatch: pytest.MonkeyPatch) -> None:
    with OpenAIStub() as plain:
        monkeypatch.setenv("OPENAI_BASE_URL", plain.base_url.replace("http:", "https:"))
        with pytest.raises(AI4RAGError, match=r"cannot be reached: .*Check OPENAI_BASE_URL"):
            embeds()

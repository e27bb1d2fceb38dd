"""What the scenarios run on: servers, agents in each language, a proxy between them, and a ledger of effects."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parents[2]
BUILT = os.environ["CLIENTS_BUILT"]
TOKEN = "a-token-for-the-tests-of-clients"
#: How long a fact may take to come true, in seconds: far more than it ever needs.
PATIENCE = 120.0

AGENTS = {
    "python": ["python3", str(ROOT / "packages/python/tests/agent.py")],
    "async": ["python3", str(ROOT / "packages/python/tests/agent.py")],
    "node": ["node", str(ROOT / "packages/node/tests/agent.js")],
    "go": [f"{BUILT}/go"],
    "java": ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-cp", f"{BUILT}/java", "oncegate.Agent"],
}


class Failed(AssertionError):
    """What a scenario found."""


def check(holds: bool, *what: object) -> None:
    if not holds:
        raise Failed(" ".join(map(str, what)))


class Ended(Exception):
    """A process has closed its output."""


class Lines:
    """The lines that a process prints, read by a thread."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._lines: "queue.Queue[Optional[str]]" = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def next(self, timeout: float = PATIENCE) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise Failed(f"nothing was printed for {timeout} s") from None
        if line is None:
            self._lines.put(None)
            raise Ended
        return line


CONFIGURATION = """
version = 1

[store]
url = "{store}"

[status]
listen = "off"

[door.functions]
listen = "{address}"
lease = "{lease_ms}ms"
max_attempts = {attempts}
fenced = true

[door.functions.api]
keys = {{ orders = "order_id" }}

[door.functions.api.callers]
tests = {{ token = {{ file = "token" }}, scopes = ["jobs", "orders"] }}
another = {{ token = {{ env = "ANOTHER_TOKEN" }}, scopes = ["others"] }}
"""


class Server:
    """`oncegate serve` with an API on a store. It has its address for as long as this lives, also after a kill."""

    def __init__(self, world: "World", store: str, lease_ms: int = 30_000, attempts: int = 3) -> None:
        self._world = world
        self._settings = {"store": store, "lease_ms": lease_ms, "attempts": attempts}
        self._file = world.folder / f"{uuid.uuid4()}.toml"
        self.address = "127.0.0.1:0"
        self.start_again()
        self.url = f"http://{self.address}"

    def start_again(self) -> None:
        self._file.write_text(CONFIGURATION.format(address=self.address, **self._settings))
        # It ends with this process, whatever ends that.
        command = ["setpriv", "--pdeathsig", "KILL", os.environ["CLIENTS_ONCEGATE"], "serve", "--config", str(self._file)]
        env = {"ANOTHER_TOKEN": "a-token-of-nothing-that-runs", "NO_COLOR": "1"}
        self._process = self._world.spawn(command, env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        lines = Lines(self._process)
        said: List[str] = []
        while True:
            try:
                said.append(lines.next())
            except Ended:
                raise Failed("the server has ended: " + "".join(said)) from None
            if "requests are answered" in said[-1]:
                break
        self.address = re.search(r"127\.0\.0\.1:[0-9]+", said[-1])[0]  # type: ignore[index]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Agent:
    """A process with a client. `call` sends a command; the events of each are kept in their order."""

    def __init__(self, world: "World", language: str, url: str, scope: str = "jobs", **environment: str) -> None:
        self.language = language
        env = {"ONCEGATE_URL": url, "ONCEGATE_TOKEN": TOKEN, **environment}
        command = AGENTS[language] + [scope, str(world.ledger), language]
        self._process = world.spawn(command, env, stdin=subprocess.PIPE)
        self._lines = Lines(self._process)
        self._kept: List[Dict[str, Any]] = []
        self.pid = self._process.pid

    def call(self, key: Any, work: str = "return", **command: Any) -> str:
        name = command.pop("id", None) or uuid.uuid4().hex
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": name, "key": key, "work": work, **command}) + "\n")
        self._process.stdin.flush()
        return name

    def event(self, name: Optional[str], which: Callable[[Dict[str, Any]], bool]) -> Dict[str, Any]:
        for kept in self._kept:
            if kept["id"] == name and which(kept):
                return kept
        while True:
            event: Dict[str, Any] = json.loads(self._lines.next())
            self._kept.append(event)
            if event["id"] == name and which(event):
                return event

    def next(self, timeout: float) -> Dict[str, Any]:
        event: Dict[str, Any] = json.loads(self._lines.next(timeout))
        return event

    def began(self, name: str) -> Dict[str, Any]:
        found = self.event(name, lambda event: "began" in event or "error" in event)
        check("began" in found, "it should run:", found)
        return found

    def has_begun(self, name: str) -> bool:
        return any(kept["id"] == name and "began" in kept for kept in self._kept)

    def end(self, name: str) -> Dict[str, Any]:
        return self.event(name, lambda event: bool({"done", "bytes", "error"} & set(event)))

    def done(self, name: str) -> Any:
        found = self.end(name)
        check("error" not in found, "it should have a result:", found)
        return found.get("done", found.get("bytes"))

    def error(self, name: str) -> str:
        found = self.end(name)
        check("error" in found, "it should have no result:", found)
        return str(found["error"])

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Freezes it; returns when it is frozen."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> int:
        """Ends its input; it waits for what runs. Returns its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE)


class Proxy:
    """Passes requests on to a server, and can lose replies or refuse connections. It counts what was answered."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._changed = threading.Condition()
        self._loses: List[str] = []
        self._refuses = False
        self._open: List[socket.socket] = []
        self.answered: List[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_reply(self, path: str) -> None:
        with self._changed:
            self._loses.append(path)

    def refuse(self, refuses: bool) -> None:
        with self._changed:
            self._refuses = refuses
            for client in self._open if refuses else []:
                try:
                    client.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            self._open = []

    def wait_for(self, what: str, count: int) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: self.answered.count(what) >= count, PATIENCE)
        check(came, f"{count} of {what!r} did not pass, but", self.answered)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            with self._changed:
                if self._refuses:
                    client.close()
                    continue
                self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        host, port = self._target.rsplit(":", 1)
        try:
            with client, socket.create_connection((host, int(port))) as server:
                asks, answers = client.makefile("rb"), server.makefile("rb")
                while request := frame(asks):
                    server.sendall(request)
                    reply = frame(answers)
                    if reply is None:
                        return
                    path = request.split(b" ", 2)[1].decode()
                    state = re.search(rb'"state":\s*"([a-z-]+)"', reply)
                    with self._changed:
                        loses = path in self._loses
                        if loses:
                            self._loses.remove(path)
                        self.answered.append(f"{'lost ' if loses else ''}{path} {state[1].decode() if state else ''}")
                        self._changed.notify_all()
                    if loses:
                        return
                    client.sendall(reply)
        except OSError:
            pass


def frame(stream: Any) -> Optional[bytes]:
    """A request or a reply with a length: its head and its body."""
    head: bytes = b""
    length = 0
    while line := stream.readline():
        head += line
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
        if line == b"\r\n":
            return head + bytes(stream.read(length))
    return None


class World:
    """A folder with a ledger, and the processes of one run, which end with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.ledger = self.folder / "ledger"
        self.ledger.touch()
        self.token_file = self.folder / "token"
        self.token_file.write_text(TOKEN)
        self._processes: List["subprocess.Popen[str]"] = []

    def spawn(self, command: List[str], env: Dict[str, str], **more: Any) -> "subprocess.Popen[str]":
        env = {**os.environ, "PYTHONPATH": str(ROOT / "packages/python/src"), **env}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **more)
        self._processes.append(process)
        return process

    def flag(self) -> Path:
        """A file that is not there yet: a function goes on when it is."""
        return self.folder / uuid.uuid4().hex

    def effects(self) -> Iterator[Dict[str, Any]]:
        for line in self.ledger.read_text().splitlines():
            if line:
                try:
                    yield json.loads(line)
                except ValueError:
                    pass  # of a process that was killed while it wrote

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

"""What the tests share: a server on a free port, requests as literal octets, answers taken apart. No sleeping."""

import ast
import contextlib
import functools
import json
import os
import queue
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import reference_server
from headers import headers_for
from reference_server import LOCKS, Exchange, HttpServer, Server, StoreBusy
from sse import EventParser

VERSION = "2026-07-28"
META: dict[str, Any] = {"io.modelcontextprotocol/protocolVersion": VERSION,
                        "io.modelcontextprotocol/clientCapabilities": {}}
TASKS = "io.modelcontextprotocol/tasks"
if os.environ.get("MCP_TEST_SELECTOR") == "select":  # the whole suite as on a system that has nothing better
    HttpServer.selecting = reference_server.Selecting = selectors.SelectSelector
PATIENCE = 10.0  # seconds that any wait of a test may take; reaching it is a failure
ROOT = Path(__file__).resolve().parents[1]
# Python's arguments for the server as a process, in the folder ROOT. It is the same start as `reference_server.py`, but
# from cached bytecode: a script is compiled each time, which takes longer than all the rest of its start. What users
# type is started in test_options.py, test_shutdown.py, test_cases.py.
SERVER_MODULE = ("-m", "reference_server")


def meta(capabilities: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A request's `_meta`; `log_level` and `progressToken` as keywords."""
    level = {"io.modelcontextprotocol/logLevel": more.pop("log_level")} if "log_level" in more else {}
    return META | {"io.modelcontextprotocol/clientCapabilities": capabilities or {}} | level | more


def message(method: str, params: dict[str, Any] | None = None, id: Any = 1, **metadata: Any) -> dict[str, Any]:
    """A JSON-RPC request with its metadata."""
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": {**(params or {}), "_meta": meta(**metadata)}}


def octets(body: dict[str, Any] | bytes, *, verb: str = "POST", path: str = "/mcp", version: str = "HTTP/1.1",
           user: str | None = None, length: bool = True, **fields: str | list[str] | None) -> bytes:
    """A whole request as it goes over the wire. `fields`: field lines to add or (None) to leave out, `_` for `-`."""
    lines: dict[str, str | list[str] | None] = {
        "Host": "127.0.0.1", "Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    if isinstance(body, dict):
        lines |= headers_for(body)
        body = json.dumps(body).encode()
    if user:
        lines["Authorization"] = f"Bearer {user}"
    if length:
        lines["Content-Length"] = str(len(body))
    for name, value in fields.items():
        lines = {one: old for one, old in lines.items() if one.lower() != name.replace("_", "-").lower()}
        lines[name.replace("_", "-")] = value
    head = f"{verb} {path} {version}\r\n"
    for name, value in lines.items():
        for one in [value] if isinstance(value, str) else value or []:
            head += f"{name}: {one}\r\n"
    return (head + "\r\n").encode("latin-1") + body


class Reply(NamedTuple):
    """An answer: status, field lines by lower-case name, body without its coding, the messages it carries."""

    status: int
    fields: dict[str, str]
    body: bytes
    messages: list[dict[str, Any]]
    ended: bool  # the body came to its end as its framing says

    @property
    def message(self) -> dict[str, Any]:
        """The last message: the response."""
        return self.messages[-1]


class Connection:
    """A client's end of one TCP connection, for literal octets. Every read is bounded by PATIENCE."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)  # octets leave when they are sent
        self.buffer = b""

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def _more(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            data = b""
        self.buffer += data
        return bool(data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with the mark; what there is if the connection ends before."""
        while mark not in self.buffer and self._more():
            pass
        end = self.buffer.find(mark) + len(mark) if mark in self.buffer else len(self.buffer)
        taken, self.buffer = self.buffer[:end], self.buffer[end:]
        return taken

    def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        while self._more():
            pass
        taken, self.buffer = self.buffer, b""
        return taken

    def ended(self) -> bool:
        """Whether the server has closed and every octet has been read; waits for an octet or the end."""
        return not self.buffer and not self._more()

    def _read(self, count: int) -> bytes:
        while len(self.buffer) < count and self._more():
            pass
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def head(self) -> tuple[int, dict[str, str]]:
        """The status and field lines of the next answer."""
        lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        assert lines[0].startswith("HTTP/1.1 "), lines[0]
        return int(lines[0].split(" ")[1]), {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}

    def reply(self) -> Reply:
        """The next answer, whole."""
        status, fields = self.head()
        chunks, ended = [], True
        if fields.get("transfer-encoding") == "chunked":
            while size := int(self.read_until(b"\r\n") or b"0", 16):
                chunks.append(self._read(size))
                self._read(2)
            ended = self._read(2) == b"\r\n"
        elif "content-length" in fields:
            chunks.append(self._read(int(fields["content-length"])))
            ended = len(chunks[0]) == int(fields["content-length"])
        elif status != 204:
            chunks.append(self.read_to_end())
        body = b"".join(chunks)
        media_type = fields.get("content-type", "")
        messages = []
        if media_type == "text/event-stream":
            messages = [json.loads(event.data) for event in EventParser().feed(body)]
        elif media_type == "application/json":
            messages = [json.loads(body)]
        return Reply(status, fields, body, messages, ended)

    def events(self) -> Iterator[dict[str, Any]]:
        """The messages of a stream, as they come; begins after its head has been read."""
        parser = EventParser()
        while line := self.read_until(b"\r\n"):
            size = int(line, 16)
            if not size:
                return
            for event in parser.feed(self._read(size)):
                yield json.loads(event.data)
            self._read(2)

    def call(self, method: str, params: dict[str, Any] | None = None, user: str | None = None, id: Any = 1,
             **metadata: Any) -> Reply:
        """One request on this connection and its answer."""
        self.send(octets(message(method, params, id, **metadata), user=user))
        return self.reply()


class Running(NamedTuple):
    """A server that serves on another thread."""

    http: HttpServer
    server: Server

    @property
    def port(self) -> int:
        return self.http.port

    def connect(self) -> Connection:
        return Connection(self.http.port)

    def exchange(self, data: bytes) -> Reply:
        """One request as literal octets, on a connection of its own."""
        with self.connect() as connection:
            connection.send(data)
            return connection.reply()

    def call(self, method: str, params: dict[str, Any] | None = None, user: str | None = None, **more: Any) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as connection:
            return connection.call(method, params, user, **more)

    def call_tool(self, name: str, arguments: dict[str, Any] | None = None, user: str | None = None,
                  **more: Any) -> Reply:
        """One tools/call on a connection of its own."""
        return self.call("tools/call", {"name": name, "arguments": arguments or {}}, user, **more)


@contextlib.contextmanager
def running(server: Server, **limits: Any) -> Iterator[Running]:
    """Serves on a free port, or `port`; `limits` are attributes of HttpServer. All have ended afterwards."""
    http = HttpServer(server, port=limits.pop("port", 0), allow_origins=limits.pop("allow_origins", ()))
    for name, value in limits.items():
        assert hasattr(http, name), name
        setattr(http, name, value)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Running(http, server)
    finally:
        http.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
        server.store.close()


@contextlib.contextmanager
def killed_at_last(process: subprocess.Popen[Any]) -> Iterator[None]:
    """No process outlives its test, nor keeps it for longer than PATIENCE."""
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        process.kill()


BY_HAND = '''
import contextlib, io, json, os, runpy, sys
root, before, commands = json.loads(sys.argv[1])
exec(before)
path, outcomes = sys.path[1:], []
for script, *arguments in commands:
    for name in [name for name, one in sys.modules.items() if (getattr(one, "__file__", "") or "").startswith(root)]:
        del sys.modules[name]
    sys.argv, sys.path = [script, *arguments], [os.path.dirname(script), *path]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = 0
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
    outcomes.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(outcomes))
'''


def by_hand(*commands: tuple[str, ...], before: str = "") -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of scripts that end by themselves, `(path, *arguments)` each.

    One process plays all, each with the path and the modules that it would have on its own; `before` is run first.
    """
    scripts = [[str(ROOT / script), *arguments] for script, *arguments in commands]
    told = json.dumps([str(ROOT), before, scripts])
    done = subprocess.run([sys.executable, "-c", BY_HAND, told], cwd="/", capture_output=True, text=True,
                          timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]


@functools.cache
def source_of(path: str) -> str:
    """The text of a file, by its path from the top."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def named_tests(name: str) -> dict[str, str]:
    """The tests of a file and their docstrings. Found in its text, since it takes seconds to parse all the files."""
    pattern = r'(?ms)^ *def (test_\w+)\(.*?\)(?: -> \w+)?:\n(?: +"""(.*?)""")?'
    return {name: words for name, words in re.findall(pattern, source_of(f"tests/{name}"))}


@functools.cache
def nodes_of(path: str) -> tuple[ast.AST, ...]:
    """The syntax of a module, its tree first, as `ast.walk` gives it; parsed once, so it must not be changed."""
    return tuple(ast.walk(ast.parse(source_of(path))))


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within PATIENCE; for states that no event announces."""
    waiting = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if condition():
            return True
        waiting.wait(0.002)
    return False


@contextlib.contextmanager
def alive(server: Server) -> Iterator[Server]:
    """The server without a transport: requests go in by `respond`. No task worker is left afterwards."""
    server.start()
    try:
        yield server
    finally:
        server.stop()
        assert eventually(lambda: not server.tasks.running), "a task worker did not stop"
        server.store.close()


def dies(server: Server) -> None:
    """As when its process is killed: the kernel lets go of its lock, nobody writes anything any more."""
    server.stopped.set()
    server.store.committed.set()
    server.keeper.join(PATIENCE)
    for request in list(server.tasks.running.values()):
        request.exchange.cancel("killed")
    with server.store.lock:
        LOCKS.discard(server.store.life)
        os.close(server.store.life)
        server.store.instance = "dead"


def sweep(server: Server) -> None:
    """The keeper's look for the dead, their work and the expired; where it is at that itself, it is left alone."""
    for duty in (server.tasks.give_up_dead, server.tasks.take_up, server.tasks.expire):
        with contextlib.suppress(StoreBusy):
            duty()


class Recorder(Exchange):
    """The way back to a client that reads everything; `messages` is what went over it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []

    def send_message(self, text: bytes) -> None:
        self.messages.append(json.loads(text))


def respond(server: Server, method: str, params: dict[str, Any] | None = None, user: str = "anonymous", id: Any = 1,
            exchange: Exchange | None = None, **metadata: Any) -> dict[str, Any]:
    """The response to one request, without a transport."""
    answer = reference_server.respond(server, message(method, params, id, **metadata), exchange or Exchange(), user)
    assert answer, "it was cancelled"
    return dict(json.loads(answer.body))


def call_tool(server: Server, name: str, arguments: dict[str, Any] | None = None, user: str = "anonymous",
              **more: Any) -> dict[str, Any]:
    """The response to one tools/call, without a transport; `more`: further params, then metadata as for `meta`."""
    params = {key: more.pop(key) for key in ("inputResponses", "requestState") if key in more}
    return respond(server, "tools/call", {"name": name, "arguments": arguments or {}} | params, user, **more)


class Listener(Exchange):
    """An open subscriptions/listen without a socket; `first` is the first message, None the last one of a cut stream.

    `room`: how many messages its client takes before it is too far behind.
    """

    def __init__(self, server: Server, notifications: dict[str, Any], id: Any = 1, user: str = "anonymous",
                 room: int = 10**9, **metadata: Any) -> None:
        super().__init__()
        self.server, self.room = server, room
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        listen = message("subscriptions/listen", {"notifications": notifications}, id, **metadata)
        if answer := reference_server.respond(server, listen, self, user):
            self.messages.put(json.loads(answer.body))
        self.first = self.next()

    def push(self, text: bytes) -> bool:
        self.room -= 1
        if self.room >= 0:
            self.messages.put(json.loads(text))
        return self.room >= 0

    def end(self, result: bytes | None) -> None:
        self.over = True
        self.messages.put(json.loads(result) if result else None)

    def next(self) -> dict[str, Any] | None:
        """The next message; queue.Empty, and so a failure, if none comes within PATIENCE."""
        return self.messages.get(timeout=PATIENCE)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        """Hangs up."""
        self.cancel("stream closed")
        if not self.over:
            self.server.subscriptions.forget(self)


class HastyClock:
    """Stands in for the module `time` where the server waits its time out: its clock runs fifty times as fast."""

    def monotonic(self) -> float:
        return time.monotonic() * 50

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class PlainLog:
    """In place of the log's queue and thread: a line is on stderr when `log` returns, so that a test can look at it."""

    def put(self, line: str) -> None:
        sys.stderr.write(line)

    def finish(self) -> None:
        pass


class Lines:
    """Keeps what all threads write to stderr, and lets a test wait for a line.

    Its `write` replaces that of `sys.stderr`; pytest puts back `sys.stderr` itself before each test.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.text = ""

    def write(self, text: str) -> int:
        with self.condition:
            self.text += text
            self.condition.notify_all()
        return len(text)

    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait_for(self, line: str, count: int = 1) -> bool:
        """Whether the line has come so many times within PATIENCE."""
        with self.condition:
            return self.condition.wait_for(lambda: self.lines().count(line) >= count, PATIENCE)

"""What bench.py measures: servers as processes on a core of their own, and the ones that are the bench's own.

    python tests/load/bench_servers.py loop|tools PORT [--stdio]

`loop` answers without a look at what it has read, which shows what the load can do; `tools` is this server with the
tools that the measurements need.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import resource
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "official")]

from harness import end_process, install_python  # noqa: E402
from support import message, octets  # noqa: E402

OURS, TOOLS, LOOP, SDK = "this server", "its undeclared tool", "bare loop", "python-sdk"
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = CORES[0], CORES[-1]
MANY = 20_000  # connections that a server of ours may have here
PATIENCE = 20.0  # seconds after which a server counts as broken
WEATHER = octets(message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}}))


def raise_descriptor_limit() -> None:
    """As many connections as the system lets this process have; a child inherits it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def commands(wanted: str) -> dict[str, str]:
    """The command of each wanted server (all, if the text is empty) by name; `{port}` stands for its port."""
    python, names = shlex.quote(sys.executable), [name for name in wanted.split(",") if name]
    limits = f"--rate 0 --max-connections {MANY} --idle-timeout 600"
    found = {OURS: f"{python} {ROOT}/reference_server.py {limits} --port {{port}}"}
    found |= dict(one.partition("=")[::2] for one in os.environ.get("PEER", "").split(";;") if one.strip())
    if not names or SDK in names:
        sdk = install_python("bench-python-sdk", "mcp==2.3.0", "uvicorn") / "bin/python"
        found[SDK] = f"{sdk} {HERE}/bench_python_sdk.py {{port}}"
    found[LOOP] = own("loop")
    if unknown := set(names) - set(found):
        raise SystemExit(f"no such server: {', '.join(unknown)}; there are {', '.join(found)}")
    return {name: command for name, command in found.items() if name in (names or found)}


def own(kind: str) -> str:
    """The command of one of the servers below."""
    return f"{shlex.quote(sys.executable)} {HERE}/bench_servers.py {kind} {{port}}"


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """A child that is started meanwhile stays on this core; the load goes back to its own."""
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, {LOAD_CORE})


class Running:
    """A server's process on its core. With `log`, its lines on stderr come with the time at which they were read."""

    def __init__(self, command: str, log: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.sink: Any = subprocess.PIPE if log else tempfile.TemporaryFile()  # noqa: SIM115, closed in `end`
        self.lines: list[tuple[float, str]] = []  # written by the log's thread only
        self.began = time.perf_counter()
        with on_core(SERVER_CORE):
            self.process = subprocess.Popen(shlex.split(command.replace("{port}", str(self.port))), stdout=self.sink,
                                            stderr=self.sink if not log else subprocess.STDOUT)
        self.reader = threading.Thread(target=self.read, daemon=True) if log else None
        if self.reader:
            self.reader.start()

    def read(self) -> None:
        """The log's thread, until the process ends."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.perf_counter(), line.decode(errors="replace")))

    def first_answer(self) -> float:
        """Seconds from the start of the process to its first answer."""
        while time.perf_counter() < self.began + PATIENCE and self.process.poll() is None:
            with contextlib.suppress(OSError), Client(self.port) as client:
                client.send(WEATHER)
                client.answer()
                return time.perf_counter() - self.began
            time.sleep(0.001)
        raise SystemExit(f"{self.process.args} does not answer")

    def memory(self) -> int:
        """Resident octets."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s*(\d+)", status)[0])

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Ends the process, and waits for it."""
        end_process(self.process)
        if self.reader:
            self.reader.join()
            assert self.process.stdout
            self.process.stdout.close()
        else:
            self.sink.close()


@contextlib.contextmanager
def started(command: str, log: bool = False) -> Iterator[Running]:
    """A server that answers."""
    server = Running(command, log)
    try:
        server.first_answer()
        yield server
    finally:
        server.end()


def addressed(request: bytes, port: int) -> bytes:
    """The request with a Host that names the port too, because the Python SDK insists on it."""
    return request.replace(b"Host: 127.0.0.1\r\n", b"Host: 127.0.0.1:%d\r\n" % port)


class Client:
    """One blocking connection, for what is measured one at a time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, request: bytes) -> None:
        """A whole request."""
        self.socket.sendall(addressed(request, self.port))

    def answer(self) -> bytes:
        """The octets of one whole answer with status 200."""
        received = b""
        while not (head := received.partition(b"\r\n\r\n"))[1]:
            received += self.more()
        if not received.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"unexpected answer: {received[:300]!r}")
        length = re.findall(rb"(?i)\ncontent-length: *(\d+)", head[0])
        while len(received) < len(head[0]) + 4 + int(length[0]) if length else not received.endswith(b"\r\n0\r\n\r\n"):
            received += self.more()
        return received

    def more(self) -> bytes:
        """What has come; ConnectionError at the end."""
        if not (data := self.socket.recv(65536)):
            raise ConnectionError
        return data

    def wait_for(self, mark: bytes) -> bytes:
        """Everything up to the piece that brings the mark."""
        received = b""
        while mark not in received:
            received += self.more()
        return received


# ----------------------------------------------------------------------------- servers of the bench's own


def serve_loop(port: int) -> None:
    """The bare loop: a fixed answer, but that listeners stay and hear of a touch."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    event = b'data: {"method": "notifications/%s"}\n\n'
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + event % b"subscriptions/acknowledged"
    listening, epoll = socket.create_server(("127.0.0.1", port), backlog=1024), select.epoll()
    clients: dict[int, socket.socket] = {}
    listeners: dict[int, socket.socket] = {}
    epoll.register(listening, select.EPOLLIN)
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == listening.fileno():
                client = listening.accept()[0]
                clients[client.fileno()] = client
                epoll.register(client, select.EPOLLIN)
                continue
            client, request = clients[descriptor], b""
            with contextlib.suppress(OSError):
                request = client.recv(65536)
            if not request:
                listeners.pop(descriptor, None)
                clients.pop(descriptor).close()
                continue
            if b"touch_config" in request:
                for listener in listeners.values():
                    listener.send(event % b"resources/updated")
            elif b"subscriptions/listen" in request:
                listeners[descriptor] = client
            client.send(stream if descriptor in listeners else answer)


def serve_lines() -> None:
    """The bare loop over stdio."""
    while lines := os.read(0, 1 << 20):
        os.write(1, b'{"result":{}}\n' * lines.count(b"\n"))


def serve_tools(port: int) -> None:
    """This server with the tools that the measurements need. Those that are not declared quick may wait."""
    from reference_server import HttpServer, demo_server

    server = demo_server()
    place = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
    quick: dict[str, Any] = {"quick": True} if "quick" in inspect.signature(server.tool).parameters else {}

    @server.tool("plain_weather", "The weather, from a tool that may wait.", place)
    def plain_weather(arguments: dict[str, Any], request: Any) -> str:
        return f"14 °C and rainy in {arguments['location']}."

    @server.tool("stamps", "Events that carry the time at which they were written.", {"type": "object"})
    def stamps(arguments: dict[str, Any], request: Any) -> str:
        for number in range(arguments["count"]):
            request.progress(number, message=str(time.monotonic_ns()))
            request.sleep(0.002)
        return "done"

    @server.tool("blocks", "Blocks, without a word to the server.", {"type": "object"})
    def blocks(arguments: dict[str, Any], request: Any) -> str:
        time.sleep(arguments["seconds"])
        return "done"

    @server.tool("computes", "Computes in Python alone.", {"type": "object"})
    def computes(arguments: dict[str, Any], request: Any) -> str:
        end, number = time.perf_counter() + arguments["seconds"], 0
        while time.perf_counter() < end:
            number += 1
        return str(number)

    @server.tool("lingers", "Says that it is quick, and is not.", {"type": "object"}, **quick)
    def lingers(arguments: dict[str, Any], request: Any) -> str:
        time.sleep(arguments["seconds"])
        return "done"

    http = HttpServer(server, port=port)
    http.max_connections = MANY
    http.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The servers of bench.py's own.")
    parser.add_argument("kind", choices=["loop", "tools"])
    parser.add_argument("port", type=int)
    parser.add_argument("--stdio", action="store_true", help="the bare loop alone")
    options = parser.parse_args()
    raise_descriptor_limit()
    if options.stdio:
        sys.exit(serve_lines())
    {"loop": serve_loop, "tools": serve_tools}[options.kind](options.port)

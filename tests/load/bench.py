"""How fast this server is, how soon it stops a tool and how much memory it takes, beside other servers. Linux only.

    python tests/load/bench.py [--seconds 1] [--rounds 5] [--only throughput,hangup,events,memory,start]
    PEER='node=env PORT={port} node reference-server.mjs' python tests/load/bench.py

The servers run on one core, the load (this process) on another. All of them are up at the same time, and each
round measures one after the other, so that whatever else the machine does strikes all alike: read the ratios,
which are medians over the rounds. `CPU` is what the server's process used for one request; it needs no quiet
machine. The peers: the official Python SDK, and a bare loop with a fixed answer, which shows what the load can do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import select
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "official")]

from harness import end_process, install_python  # noqa: E402
from support import message, octets  # noqa: E402

OURS, LOOP, SDK = "this server", "bare loop", "python-sdk"
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = CORES[0], CORES[-1]
CONNECTIONS = (1, 8, 64)
CONFIG = "file:///project/config.json"
WEATHER = octets(message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}}))
REPORT = octets(message("tools/call", {"name": "build_report", "arguments": {"month": "May"}}, progressToken=0))
TOUCH = octets(message("tools/call", {"name": "touch_config", "arguments": {}}))
STAMPS = octets(message("tools/call", {"name": "stamps", "arguments": {"count": 100}}, progressToken=0))
LISTEN = octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}))
LISTEN_CONFIG = octets(message("subscriptions/listen", {"notifications": {"resourceSubscriptions": [CONFIG]}}))
PATIENCE = 20.0  # seconds after which a server counts as broken


# ------------------------------------------------------------------------------------------------ servers


def commands() -> dict[str, str]:
    """The command of each server by name; `{port}` stands for its port."""
    python = shlex.quote(sys.executable)
    sdk = install_python("bench-python-sdk", "mcp==2.3.0", "uvicorn") / "bin/python"
    peers = dict(one.partition("=")[::2] for one in os.environ.get("PEER", "").split(";;") if one.strip())
    return {OURS: f"{python} {ROOT}/reference_server.py --rate 0 --port {{port}}", **peers,
            SDK: f"{sdk} {HERE}/bench_python_sdk.py {{port}}", LOOP: f"{python} {HERE}/bench.py --serve-loop {{port}}"}


class Running:
    """A server's process on its core. With `log`, its lines on stderr come with the time at which they were read."""

    def __init__(self, command: str, log: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.sink: Any = subprocess.PIPE if log else tempfile.TemporaryFile()  # noqa: SIM115, closed in `end`
        self.lines: list[tuple[float, str]] = []  # written by the log's thread only
        self.began = time.perf_counter()
        os.sched_setaffinity(0, {SERVER_CORE})  # a child inherits it
        self.process = subprocess.Popen(shlex.split(command.replace("{port}", str(self.port))), stdout=self.sink,
                                        stderr=self.sink if not log else subprocess.STDOUT)
        os.sched_setaffinity(0, {LOAD_CORE})
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
            raise SystemExit(f"unexpected answer: {received[:300]!r}")
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


# --------------------------------------------------------------------------------------------- throughput


class Load:
    """A closed loop: each connection sends its next request as soon as it has its answer."""

    def __init__(self, port: int, request: bytes, keep: bool) -> None:
        self.port, self.request, self.keep = port, addressed(request, port), keep
        with Client(port) as client:
            client.send(request)
            self.length = len(client.answer())  # of every answer: they differ in the date alone
        self.epoll = select.epoll()
        self.open: dict[int, list[Any]] = {}  # descriptor -> socket, when its request went out, octets still to come
        self.latencies: list[float] = []

    def connect(self) -> None:
        """One more connection, with its first request."""
        began = time.perf_counter()
        one = socket.create_connection(("127.0.0.1", self.port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        one.setblocking(False)
        self.open[one.fileno()] = [one, began, self.length]
        self.epoll.register(one, select.EPOLLIN)
        one.send(self.request)

    def take(self, descriptor: int) -> None:
        """What has come on one connection."""
        entry = self.open[descriptor]
        data = entry[0].recv(65536)
        entry[2] -= len(data)
        if entry[2] > 0 and data:
            return
        now = time.perf_counter()
        if entry[2] < 0 or not data:
            raise SystemExit(f"port {self.port}: an answer is not like the first: {data[:300]!r}")
        self.latencies.append(now - entry[1])
        if self.keep:
            entry[1:] = now, self.length
            entry[0].send(self.request)
        else:
            del self.open[descriptor]
            entry[0].close()
            self.connect()

    def run(self, connections: int, seconds: float) -> list[float]:
        """The latencies of the answers that came within the time."""
        for _ in range(connections):
            self.connect()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for descriptor, _ in self.epoll.poll(1):
                self.take(descriptor)
        for entry in self.open.values():
            entry[0].close()
        self.epoll.close()
        return self.latencies


class Rate(NamedTuple):
    """One measurement of throughput; times in seconds."""

    rate: float
    p50: float
    p99: float
    cpu: float  # of the server, for one request


def measure_rate(server: Running, keep: bool, connections: int, seconds: float) -> Rate:
    """One server, one load."""
    cpu, load = server.cpu(), Load(server.port, WEATHER, keep)
    latencies = load.run(connections, seconds)
    cpu = server.cpu() - cpu
    return Rate(len(latencies) / seconds, at(latencies, 0.5), at(latencies, 0.99), cpu / len(latencies))


def at(values: list[float], part: float) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def throughput(options: argparse.Namespace) -> None:
    """Requests a second, on kept connections and with a new connection for each request."""
    kinds = [(keep, connections) for keep in (True, False) for connections in CONNECTIONS]
    seen: dict[tuple[str, bool, int], list[Rate]] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(started(command)) for name, command in commands().items()}
        for server in servers.values():  # a compiler that compiles while it runs has done so by now
            measure_rate(server, True, 8, 2 * options.seconds)
        for _ in range(options.rounds):
            for keep, connections in kinds:
                for name, server in servers.items():
                    rate = measure_rate(server, keep, connections, options.seconds)
                    seen.setdefault((name, keep, connections), []).append(rate)
    print("\n| connections | server | requests/s | p50 ms | p99 ms | CPU µs | this server to it (rate) | (CPU) |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for keep, connections in kinds:
        for name in servers:
            ours, its = seen[OURS, keep, connections], seen[name, keep, connections]
            rate, p50, p99, cpu = (statistics.median(column) for column in zip(*its, strict=True))
            ratio = statistics.median(a.rate / b.rate for a, b in zip(ours, its, strict=True))
            effort = statistics.median(b.cpu / a.cpu for a, b in zip(ours, its, strict=True))
            print(f"| {connections} {'kept' if keep else 'new'} | {name} | {rate:,.0f} | {p50 * 1e3:.2f} |"
                  f" {p99 * 1e3:.2f} | {cpu * 1e6:.0f} | {ratio:.2f} | {effort:.2f} |", flush=True)


# ---------------------------------------------------------------------------------- hang-up and events


def open_streams(port: int, count: int, stack: contextlib.ExitStack) -> None:
    """That many subscriptions, acknowledged and then quiet, until the stack unwinds."""
    for _ in range(count):
        client = stack.enter_context(Client(port))
        client.send(LISTEN)
        client.wait_for(b"acknowledged")


def hang_up(server: Running, after: float) -> float | None:
    """Seconds from closing a slow call's connection to the server's line that says it has stopped."""
    seen = len(server.lines)
    with Client(server.port) as client:
        client.send(REPORT)
        time.sleep(after)
        began = time.perf_counter()
    while time.perf_counter() < began + 3:
        for when, line in server.lines[seen:]:
            if "build_report cancel" in line:
                return when - began
        time.sleep(0.001)
    return None


def measure_hang_up(command: str, streams: int, seconds: float) -> str:
    """p50 and p99 in milliseconds; n/a for a server that says nothing."""
    with started(command, log=True) as server, contextlib.ExitStack() as stack:
        open_streams(server.port, streams, stack)
        end, times, after = time.perf_counter() + seconds, [], 0.02  # by then the tool runs
        while time.perf_counter() < end and len(times) < 500 and (took := hang_up(server, after)) is not None:
            times.append(1e3 * took)
            # a tool that looks once in a step of a second is left at any moment of it
            after = random.uniform(0.02, 1) if took > 0.1 else 0.02
    return f"{at(times, 0.5):.2f} / {at(times, 0.99):.2f} ({len(times)})" if times else "n/a"


def hangup(options: argparse.Namespace) -> None:
    """From a client that hangs up to the tool that has stopped, as the server's own log line says."""
    busy = f"with {options.streams:,} streams"
    table([("hang-up to stop, idle, p50 / p99 ms (samples)", 0), (busy, options.streams)],
          lambda command, streams: measure_hang_up(command, streams, 6 * options.seconds))


def stamped(command: str) -> str:
    """From the tool's call that writes an event to the client's read, by the time that the event carries."""
    with started(command) as server, Client(server.port) as client:
        client.send(STAMPS)
        piece, times = b"", []
        while b'"result"' not in piece and b'"error"' not in piece:
            piece = client.more()  # one event: the tool waits between them
            times += [(time.monotonic_ns() - int(one)) / 1e6 for one in re.findall(rb'"message": ?"(\d+)"', piece)]
    return f"{at(times, 0.5):.3f} / {at(times, 0.99):.3f}" if times else "n/a"


def touched(command: str) -> str:
    """From the request that changes a resource to the event that a subscriber reads."""
    times = []
    with started(command) as server, Client(server.port) as listener, Client(server.port) as client:
        listener.send(LISTEN_CONFIG)
        listener.wait_for(b"acknowledged")
        for _ in range(200):
            began = time.perf_counter()
            client.send(TOUCH)
            listener.wait_for(b"updated")
            times.append(1e3 * (time.perf_counter() - began))
            client.answer()
    return f"{at(times, 0.5):.2f} / {at(times, 0.99):.2f}"


def events(options: argparse.Namespace) -> None:
    """How soon a client reads what the server tells it."""
    table([("event written to event read, p50 / p99 ms", stamped), ("change asked for to event read", touched)],
          lambda command, measure: measure(with_stamps(command)))


def with_stamps(command: str) -> str:
    """This server with one tool more."""
    return command.replace(f"{ROOT}/reference_server.py --rate 0 --port", f"{HERE}/bench.py --serve-stamps")


# ------------------------------------------------------------------------------------- memory and start


def memory(options: argparse.Namespace) -> None:
    """Resident memory idle, and what an open subscription adds."""
    table([("idle MB", 0), ("KB a stream at 200", 200), (f"at {options.streams:,}", options.streams)], measure_memory)


def measure_memory(command: str, streams: int) -> str:
    """Resident after one answer; or what each of the streams adds to that."""
    with started(command) as server, contextlib.ExitStack() as stack:
        idle = server.memory()
        if not streams:
            return f"{idle / 1e6:.1f}"
        open_streams(server.port, streams, stack)
        return f"{(server.memory() - idle) / streams / 1e3:.1f}"


def start(options: argparse.Namespace) -> None:
    """From starting the process to its first answer."""
    def measure(command: str, rounds: int) -> str:
        times = []
        for _ in range(rounds):
            server = Running(command)
            try:
                times.append(1e3 * server.first_answer())
            finally:
                server.end()
        return f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
    table([("start to first answer ms, median (range)", options.rounds)], measure)


def table(columns: list[tuple[str, Any]], measure: Callable[[str, Any], str]) -> None:
    """A row for each server but the bare loop, a column for each measurement."""
    print(f"\n| server | {' | '.join(title for title, _ in columns)} |")
    print("|---|" + "--:|" * len(columns))
    for name, command in commands().items():
        if name != LOOP:
            print(f"| {name} | {' | '.join(attempt(measure, command, what) for _, what in columns)} |", flush=True)


def attempt(measure: Callable[[str, Any], str], command: str, what: Any) -> str:
    """The measurement, or n/a for a server that breaks on the way."""
    try:
        return measure(command, what)
    except (OSError, ValueError) as problem:
        return f"n/a ({type(problem).__name__})"


# ----------------------------------------------------------------------------- servers of the bench's own


def serve_loop(port: int) -> None:
    """The bare loop: reads, and sends a fixed answer, without a look at what it has read."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    listening, epoll, clients = socket.create_server(("127.0.0.1", port), backlog=1024), select.epoll(), {}
    epoll.register(listening, select.EPOLLIN)
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == listening.fileno():
                client = listening.accept()[0]
                clients[client.fileno()] = client
                epoll.register(client, select.EPOLLIN)
                continue
            with contextlib.suppress(OSError):
                if clients[descriptor].recv(65536):
                    clients[descriptor].send(answer)
                    continue
            clients.pop(descriptor).close()


def serve_stamps(port: int) -> None:
    """This server with a tool whose progress carries the time at which it was written."""
    from reference_server import HttpServer, demo_server

    server = demo_server()

    @server.tool("stamps", "Events that carry the time.", {"type": "object"})
    def stamps(arguments: dict[str, Any], request: Any) -> str:
        for number in range(arguments["count"]):
            request.progress(number, message=str(time.monotonic_ns()))
            request.sleep(0.002)
        return "done"

    HttpServer(server, port=port).serve_forever()


# ------------------------------------------------------------------------------------------- command line

MEASUREMENTS = {"throughput": throughput, "hangup": hangup, "events": events, "memory": memory, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=1.0, help="of load for each server, kind and round (default: 1)")
    add("--rounds", type=int, default=5, help="how often (default: 5)")
    add("--streams", type=int, default=1000, help="open streams where many are meant (default: 1000)")
    add("--only", default=",".join(MEASUREMENTS), help="measurements, with commas between (default: all)")
    add("--serve-loop", type=int, metavar="PORT", help=argparse.SUPPRESS)
    add("--serve-stamps", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_loop:
        return serve_loop(options.serve_loop)
    if options.serve_stamps:
        return serve_stamps(options.serve_stamps)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"Python {sys.version.split()[0]}, servers on core {SERVER_CORE}, load on core {LOAD_CORE},"
          f" {options.rounds} rounds of {options.seconds} s, load average {os.getloadavg()[0]:.1f}", flush=True)
    for name in options.only.split(","):
        MEASUREMENTS[name](options)


if __name__ == "__main__":
    main()

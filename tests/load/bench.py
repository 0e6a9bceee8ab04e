"""How fast this server is, how soon it stops a tool and how much memory it takes, beside other servers. Linux only.

    python tests/load/bench.py [--seconds 1] [--rounds 5] [--only throughput,stdio,…] [--servers "this server,node"]
    PEER='node=env PORT={port} node reference-server.mjs' python tests/load/bench.py

The servers run on one core, the load (this process) on another. Each round measures one server after the other, so
that whatever else the machine does strikes all alike: read the ratios, which are medians over the rounds, as every
figure is. A figure in brackets is a ratio: this server's figure to that one's. `CPU` is what the server's process used
for one request; it needs no quiet machine. The peers: the official Python SDK, whatever PEER names (over stdio it gets
`--stdio` behind its command), and a bare loop with a fixed answer, which shows what the load can do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import select
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench_servers import (
    LOAD_CORE,
    LOOP,
    OURS,
    PATIENCE,
    SERVER_CORE,
    TOOLS,
    WEATHER,
    Client,
    Running,
    addressed,
    commands,
    end_process,
    message,
    octets,
    on_core,
    own,
    raise_descriptor_limit,
    started,
)

CONNECTIONS = (1, 8, 64)
SUBSCRIBERS = (1000, 3000)
PIECE = 3000  # calls that are sent in one piece
CONFIG = "file:///project/config.json"
LISTEN = octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}))
LISTEN_CONFIG = octets(message("subscriptions/listen", {"notifications": {"resourceSubscriptions": [CONFIG]}}))
Figures = list[float]  # one a column; nan where there is none


def call(tool: str, progress: bool = False, **arguments: Any) -> bytes:
    """A tool's call."""
    metadata = {"progressToken": 0} if progress else {}
    return octets(message("tools/call", {"name": tool, "arguments": arguments}, **metadata))


REPORT = call("build_report", progress=True, month="May")
TOUCH = call("touch_config")
UNDECLARED = call("plain_weather", location="Oslo")


# ------------------------------------------------------------------------------------------------- tables


def compare(options: argparse.Namespace, titles: list[str], measure: Callable[[str], Figures],
            bare: bool = False) -> None:
    """A row for each server, a column for each figure. `bare`: the bare loop can take part."""
    servers = {name: command for name, command in commands(options.servers).items() if bare or name != LOOP}
    seen: dict[str, list[Figures]] = {name: [] for name in servers}
    for _ in range(options.rounds):
        for name, command in servers.items():
            seen[name].append(attempt(name, measure, command, len(titles)))
    print(f"\n| server | {' | '.join(titles)} |\n|---|" + "--:|" * len(titles))
    for name, rows in seen.items():
        cells = []
        for column in range(len(titles)):
            values = [row[column] for row in rows]
            ratios = [row[column] / its for row, its in zip(seen.get(OURS, []), values, strict=False) if its]
            figure, ratio = middle(values), middle(ratios)
            cells.append("n/a" if math.isnan(figure) else
                         f"{figure:,.{0 if abs(figure) >= 100 else 1 if abs(figure) >= 10 else 2}f}"
                         + (f" ({ratio:.2f})" if name != OURS and not math.isnan(ratio) else ""))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def middle(values: Figures) -> float:
    """The median of those that are numbers."""
    return statistics.median([value for value in values if not math.isnan(value)] or [math.nan])


def attempt(name: str, measure: Callable[[str], Figures], command: str, count: int) -> Figures:
    """The measurement, or nothing for a server that breaks on the way, which is said on stderr."""
    try:
        return measure(command)
    except (OSError, ValueError) as problem:
        print(f"{name}: {type(problem).__name__}: {problem}"[:300], file=sys.stderr, flush=True)
        return [math.nan] * count


def at(values: list[float], part: float) -> float:
    """A percentile; nan of nothing."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else math.nan


def spread(values: list[float]) -> Figures:
    """p50 and p99 in milliseconds."""
    return [1e3 * at(values, 0.5), 1e3 * at(values, 0.99)]


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
            raise ValueError(f"port {self.port}: an answer is not like the first: {data[:300]!r}")
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


def measure_rate(server: Running, request: bytes, keep: bool, connections: int, seconds: float) -> Rate:
    """One server, one load."""
    cpu, load = server.cpu(), Load(server.port, request, keep)
    latencies = load.run(connections, seconds)
    cpu = server.cpu() - cpu
    return Rate(len(latencies) / seconds, at(latencies, 0.5), at(latencies, 0.99), cpu / max(1, len(latencies)))


def throughput(options: argparse.Namespace) -> None:
    """Requests a second, on kept connections and with a new connection for each request."""
    kinds = [(keep, connections) for keep in (True, False) for connections in CONNECTIONS]
    seen: dict[tuple[str, bool, int], list[Rate]] = {}
    with contextlib.ExitStack() as stack:
        chosen = commands(options.servers)
        chosen = {OURS: chosen.pop(OURS, commands(OURS)[OURS]), TOOLS: own("tools"), **chosen}
        servers = {name: stack.enter_context(started(command)) for name, command in chosen.items()}
        requests = {name: UNDECLARED if name == TOOLS else WEATHER for name in servers}
        for name, server in servers.items():  # a compiler that compiles while it runs has done so by now
            measure_rate(server, requests[name], True, 8, 2 * options.seconds)
        for _ in range(options.rounds):
            for keep, connections in kinds:
                for name, server in servers.items():
                    rate = measure_rate(server, requests[name], keep, connections, options.seconds)
                    seen.setdefault((name, keep, connections), []).append(rate)
    print("\n| connections | server | requests/s | p50 ms | p99 ms | CPU µs | this server to it (rate) | (CPU) |"
          f" {TOOLS} to it (rate) |\n|---|---|" + "--:|" * 7)
    for keep, connections in kinds:
        ours, undeclared = (seen[name, keep, connections] for name in (OURS, TOOLS))
        for name in servers:
            its = seen[name, keep, connections]
            rate, p50, p99, cpu = (statistics.median(column) for column in zip(*its, strict=True))
            ratio, other = (statistics.median(a.rate / b.rate for a, b in zip(one, its, strict=True))
                            for one in (ours, undeclared))
            effort = statistics.median(b.cpu / a.cpu if a.cpu else math.nan for a, b in zip(ours, its, strict=True))
            print(f"| {connections} {'kept' if keep else 'new'} | {name} | {rate:,.0f} | {p50 * 1e3:.2f} |"
                  f" {p99 * 1e3:.2f} | {cpu * 1e6:.0f} | {ratio:.2f} | {effort:.2f} | {other:.2f} |", flush=True)


# -------------------------------------------------------------------------------------------------- stdio


class Piped:
    """A server that talks over pipes, on its core."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command.replace("--port {port}", "").replace("{port}", "0") + " --stdio")
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed in `__exit__`
        with on_core(SERVER_CORE):
            self.process = subprocess.Popen(words, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=self.log)
        assert self.process.stdin and self.process.stdout
        self.to, self.back = self.process.stdin.fileno(), self.process.stdout.fileno()

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        end_process(self.process)
        for one in (self.process.stdin, self.process.stdout, self.log):
            assert one
            one.close()

    def read(self, count: int) -> bytes:
        """So many lines. ValueError if they are too late or the server ends."""
        lines, pieces = 0, []
        while lines < count:
            if not select.select([self.back], [], [], PATIENCE)[0] or not (piece := os.read(self.back, 1 << 20)):
                raise ValueError(f"{lines} of {count} answers")
            lines += piece.count(b"\n")
            pieces.append(piece)
        return b"".join(pieces)

    def in_turn(self, seconds: float) -> float:
        """Calls a second, each sent when the one before is answered."""
        done, request = 0, numbered(1)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            os.write(self.to, request)
            check_answers(self.read(1), 1)
            done += 1
        return done / seconds

    def in_one_piece(self, count: int) -> float:
        """Calls a second, sent without a look at the answers."""
        piece = b"".join(map(numbered, range(count)))
        began = time.perf_counter()
        sender = threading.Thread(target=send_all, args=(self.to, piece), daemon=True)
        sender.start()
        received = self.read(count)
        took = time.perf_counter() - began
        sender.join()
        check_answers(received, count)
        return count / took


def numbered(number: int) -> bytes:
    """A call with this id, as a line."""
    line = message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}}, number)
    return json.dumps(line).encode() + b"\n"


def check_answers(received: bytes, count: int) -> None:
    """ValueError unless these are so many results."""
    if received.count(b'"result":') != count or b'"error":' in received:
        raise ValueError(f"unexpected answers: {received[:300]!r}")


def send_all(descriptor: int, octets: bytes) -> None:
    """The sender's thread: until everything is in the pipe, or nobody reads it any more."""
    rest = memoryview(octets)
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(descriptor, rest):]


def stdio(options: argparse.Namespace) -> None:
    """Calls a second over pipes."""
    def measure(command: str) -> Figures:
        with Piped(command) as server:
            server.in_turn(options.seconds)  # as above, for a compiler
            server.in_one_piece(PIECE)
            return [server.in_turn(options.seconds), middle([server.in_one_piece(PIECE) for _ in range(3)])]
    compare(options, ["stdio: calls/s, one at a time", f"{PIECE:,} sent in one piece"], measure, bare=True)


# ------------------------------------------------------------------------------------------ large numbers


class Crowd:
    """Many connections, read by one epoll."""

    def __init__(self, port: int) -> None:
        self.port, self.epoll = port, select.epoll()
        self.all: dict[int, socket.socket] = {}
        self.closed = 0  # by the server

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all.values():
            one.close()
        self.epoll.close()

    def grow(self, count: int, request: bytes, mark: bytes, batch: int = 64) -> None:
        """To that many; each new one has sent the request and has read a message with the mark."""
        request = addressed(request, self.port)
        while len(self.all) < count:
            new = [socket.create_connection(("127.0.0.1", self.port), PATIENCE)
                   for _ in range(min(batch, count - len(self.all)))]
            for one in new:
                one.setblocking(False)
                one.send(request)
                self.all[one.fileno()] = one
                self.epoll.register(one, select.EPOLLIN)
            self.wait({one.fileno() for one in new}, mark)

    def wait(self, waiting: set[int], mark: bytes) -> None:
        """Until each of these has read a whole message with the mark. ValueError if that takes too long."""
        pieces = dict.fromkeys(waiting, b"")
        while waiting:
            if not (events := self.epoll.poll(PATIENCE)):
                raise ValueError(f"{len(waiting)} connections wait for {mark!r}")
            for descriptor, _ in events:
                piece = self.read(descriptor)
                if descriptor in waiting:
                    if not piece:
                        raise ValueError("the server has closed a connection")
                    piece = pieces[descriptor] = pieces[descriptor] + piece
                    if mark in piece and piece.rstrip(b"\r\n").endswith((b"}", b"\r\n0")):
                        waiting.discard(descriptor)

    def read(self, descriptor: int) -> bytes:
        """What has come on one; nothing at its end, after which it is looked at no more."""
        if not (piece := self.all[descriptor].recv(65536)):
            self.closed += 1
            self.epoll.unregister(descriptor)
        return piece

    def look(self) -> int:
        """How many the server has closed."""
        for descriptor, _ in self.epoll.poll(0, max(1, len(self.all))):
            self.read(descriptor)
        return self.closed


def warm(server: Running, seconds: float) -> None:
    """A load before the memory of an idle server is measured."""
    Load(server.port, WEATHER, True).run(8, seconds)


def idle(options: argparse.Namespace) -> None:
    """What a connection costs that has had an answer and is kept, and what a call takes beside so many."""
    def measure(command: str) -> Figures:
        with started(command) as server, Crowd(server.port) as crowd:
            warm(server, options.seconds)
            alone = Load(server.port, WEATHER, True).run(1, options.seconds)
            before = server.memory()
            crowd.grow(options.idle, WEATHER, b"200")
            each = (server.memory() - before) / options.idle / 1e3
            beside = Load(server.port, WEATHER, True).run(1, options.seconds)
            return [each, *spread(alone), *spread(beside), float(crowd.look())]
    compare(options, [f"KB an idle connection at {options.idle:,}", "a call alone, p50 ms", "p99 ms",
                      "beside them, p50 ms", "p99 ms", "of them closed meanwhile"], measure, bare=True)


def fanout(options: argparse.Namespace) -> None:
    """From a change until the last subscriber has read it: the first change, and the median of five more."""
    def measure(command: str) -> Figures:
        with started(command) as server, Crowd(server.port) as crowd, Client(server.port) as client:
            warm(server, options.seconds)
            before, figures = server.memory(), []
            for count in SUBSCRIBERS:
                crowd.grow(count, LISTEN_CONFIG, b"acknowledged")
                first, *more = [1e3 * change(crowd, client) for _ in range(6)]
                figures += [first, statistics.median(more), (server.memory() - before) / count / 1e3]
            return figures
    titles = [title for count in SUBSCRIBERS
              for title in (f"first change to the last of {count:,}, ms", "further ones, ms", "KB each")]
    compare(options, titles, measure, bare=True)


def change(crowd: Crowd, client: Client) -> float:
    """Seconds from asking for a change until everybody has read of it."""
    began = time.perf_counter()
    client.send(TOUCH)
    crowd.wait(set(crowd.all), b"updated")
    took = time.perf_counter() - began
    client.answer()
    return took


def memory(options: argparse.Namespace) -> None:
    """Resident memory idle, and what a running call and a quiet subscription add."""
    def measure(command: str) -> Figures:
        figures = []
        for request, mark in ((REPORT, b"progress"), (LISTEN, b"acknowledged")):
            with started(command) as server, Crowd(server.port) as crowd:
                before = server.memory()
                # all at once: the first event of a running call comes after a second
                crowd.grow(options.streams, request, mark, batch=options.streams)
                figures += [before / 1e6, (server.memory() - before) / options.streams / 1e3]
        return figures[:2] + figures[3:]
    compare(options, ["idle MB", f"KB a running call at {options.streams:,}", "KB a quiet subscription"], measure)


# ---------------------------------------------------------------------------------- hang-up and events


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


def hang_ups(command: str, streams: int, seconds: float) -> Figures:
    """p50 and p99 in milliseconds, and how many there were; nan for a server that says nothing."""
    with started(command, log=True) as server, Crowd(server.port) as crowd:
        crowd.grow(streams, LISTEN, b"acknowledged")
        end, times, after = time.perf_counter() + seconds, [], 0.02  # by then the tool runs
        while time.perf_counter() < end and len(times) < 500 and (took := hang_up(server, after)) is not None:
            times.append(took)
            # a tool that looks once in a step of a second is left at any moment of it
            after = random.uniform(0.02, 1) if took > 0.1 else 0.02
    return [*spread(times), float(len(times)) if times else math.nan]


def hangup(options: argparse.Namespace) -> None:
    """From a client that hangs up to the tool that has stopped, as the server's own log line says."""
    titles = ["hang-up to stop, p50 ms", "p99 ms", "samples", f"beside {options.streams:,} streams, p50 ms", "p99 ms",
              "samples"]
    compare(options, titles, lambda command: hang_ups(command, 0, 4 * options.seconds)
            + hang_ups(command, options.streams, 4 * options.seconds))


def stamped(command: str) -> Figures:
    """From the tool's call that writes an event to the client's read, by the time that the event carries."""
    with started(command) as server, Client(server.port) as client:
        client.send(call("stamps", progress=True, count=100))
        piece, times = b"", []
        while b'"result"' not in piece and b'"error"' not in piece:
            piece = client.more()  # one event: the tool waits between them
            times += [(time.monotonic_ns() - int(one)) / 1e9 for one in re.findall(rb'"message": ?"(\d+)"', piece)]
    return spread(times)


def touched(command: str) -> Figures:
    """From asking for a change of a resource to the event that a subscriber reads."""
    times = []
    with started(command) as server, Crowd(server.port) as crowd, Client(server.port) as client:
        crowd.grow(1, LISTEN_CONFIG, b"acknowledged")
        for _ in range(200):
            times.append(change(crowd, client))
    return spread(times)


def events(options: argparse.Namespace) -> None:
    """How soon a client reads what the server tells it."""
    ours = commands(OURS)[OURS]
    titles = ["event written to event read, p50 ms", "p99 ms", "change asked for to event read, p50 ms", "p99 ms"]
    compare(options, titles,
            lambda command: stamped(own("tools") if command == ours else command) + touched(command))


def start(options: argparse.Namespace) -> None:
    """From starting the process to its first answer."""
    def measure(command: str) -> Figures:
        server = Running(command)
        try:
            return [1e3 * server.first_answer()]
        finally:
            server.end()
    compare(options, ["start to first answer ms"], measure)


# ------------------------------------------------------------------------------------- tools that do not say


def undeclared(options: argparse.Namespace) -> None:
    """What others notice of a tool that blocks or computes for a second and has not said so; each server is new."""
    titles, rows = ["alone", "beside one that blocks for a second", "beside one that computes for a second"], []
    for _ in range(options.rounds):
        with started(own("tools")) as server:
            rows.append([beside(server, tool) for tool in (None, "blocks", "computes")])
    print("\n| get_weather on another connection | p50 ms | p99 ms | longest ms |\n|---|--:|--:|--:|")
    for title, column in zip(titles, zip(*rows, strict=True), strict=True):
        print(f"| {title} | {' | '.join(f'{middle(list(values)):.2f}' for values in zip(*column, strict=True))} |")
    print(f"\nA quick tool that takes 100 ms: {named() or 'not named in the log'}", flush=True)


def beside(server: Running, tool: str | None) -> Figures:
    """p50, p99 and the longest of calls in turn while the tool runs, from before it begins."""
    load = Load(server.port, WEATHER, True)
    with Client(server.port) as other:
        if tool:
            other.send(call(tool, seconds=1))
        latencies = load.run(1, 0.9)
        if tool:
            other.answer()
    return [*spread(latencies), 1e3 * max(latencies, default=math.nan)]


def named() -> str:
    """The line that the server writes about a quick tool only if it takes long."""
    seen = []
    with started(own("tools"), log=True) as server, Client(server.port) as client:
        for seconds in (0, 0.1):
            before = len(server.lines)
            client.send(call("lingers", seconds=seconds))
            client.answer()
            time.sleep(0.3)  # the log may gather lines
            lines = (line.strip() for _, line in server.lines[before:] if "lingers" in line)
            seen.append({re.sub(r"[\d.]+", "…", line) for line in lines})
    return " ".join(seen[1] - seen[0])


# ------------------------------------------------------------------------------------------- command line

MEASUREMENTS = {"throughput": throughput, "stdio": stdio, "idle": idle, "fanout": fanout, "hangup": hangup,
                "undeclared": undeclared, "events": events, "memory": memory, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=1.0, help="of load for each server, kind and round (default: 1)")
    add("--rounds", type=int, default=5, help="how often (default: 5)")
    add("--streams", type=int, default=1000, help="open streams where many are meant (default: 1000)")
    add("--idle", type=int, default=10_000, help="idle connections (default: 10000)")
    add("--only", default=",".join(MEASUREMENTS), help=f"measurements, with commas between: {', '.join(MEASUREMENTS)}")
    add("--servers", default="", help="names of servers, with commas between (default: all)")
    options = parser.parse_args()
    raise_descriptor_limit()
    print(f"Python {sys.version.split()[0]}, servers on core {SERVER_CORE}, load on core {LOAD_CORE},"
          f" {options.rounds} rounds of {options.seconds} s, load average {os.getloadavg()[0]:.1f}", flush=True)
    for name in options.only.split(","):
        MEASUREMENTS[name](options)


if __name__ == "__main__":
    main()

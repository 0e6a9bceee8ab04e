"""What takes a server's last thread, descriptor or patience: each is tried, and none of it may touch the others.

    python tests/load/stress.py [--only threads,descriptors,killed,unread,bursts]

Beside each trial, other clients go on: one calls get_weather in turn on a kept connection, one reads a slow call to
its end. A line for each trial, and what was wrong; exit status 1 if anything was. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1]), str(HERE.parent)]

from processes import PATIENCE, Process, process  # noqa: E402
from support import Connection, message, octets  # noqa: E402

SERVER = str(HERE.parents[2] / "reference_server.py")
OPTIONS = ["--rate", "0", "--step-seconds", "0.3", "--write-timeout", "1"]
WEATHER = octets(message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}}))
REPORT = octets(message("tools/call", {"name": "build_report", "arguments": {"month": "May"}}, progressToken=0))
QUIET_REPORT = octets(message("tools/call", {"name": "build_report", "arguments": {"month": "May"}}))
TOUCH = octets(message("tools/call", {"name": "touch_config", "arguments": {}}))
CONFIG = {"notifications": {"resourceSubscriptions": ["file:///project/config.json"]}}
LISTEN = octets(message("subscriptions/listen", CONFIG))
LISTEN_LONG = octets(message("subscriptions/listen", CONFIG, "x" * 4000))  # an id that makes each event 4 kB long
P99, LONGEST = 0.05, 0.5  # seconds that a call of the others may take
Trial = Callable[[Process, list[str]], str]  # writes what is wrong into the list; what it saw


class Others:
    """Two clients that have nothing to do with the trial."""

    def __init__(self, port: int, faults: list[str]) -> None:
        self.port, self.faults = port, faults
        self.begun, self.over = threading.Event(), threading.Event()
        self.latencies: list[float] = []
        self.connections = [Connection(port), Connection(port)]
        self.threads = [threading.Thread(target=self.guard, args=(work, connection))
                        for work, connection in zip((self.calls, self.slow_call), self.connections, strict=True)]

    def guard(self, work: Callable[[Connection], None], connection: Connection) -> None:
        """A thread: whatever goes wrong is a fault."""
        try:
            with connection:
                work(connection)
        except Exception as problem:
            self.faults.append(f"another client's {work.__name__}: {type(problem).__name__} {problem}")

    def calls(self, connection: Connection) -> None:
        """One call after another."""
        while not self.over.wait(0.002):
            began = time.perf_counter()
            connection.send(WEATHER)
            assert connection.reply().status == 200
            self.latencies.append(time.perf_counter() - began)

    def slow_call(self, connection: Connection) -> None:
        """A stream, to its end."""
        connection.send(REPORT)
        connection.buffer = connection.read_until(b"progress") + connection.buffer
        self.begun.set()
        messages = connection.reply().messages
        assert len(messages) == 11 and "result" in messages[-1], f"{len(messages)} messages"

    def __enter__(self) -> Others:
        for thread in self.threads:
            thread.start()
        self.begun.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.threads[1].join()
        self.over.set()
        self.threads[0].join()

    def verdict(self) -> str:
        """How they fared."""
        times = sorted(self.latencies) or [float("inf")]
        p99, longest = times[len(times) * 99 // 100], times[-1]
        if p99 > P99 or longest > LONGEST:
            self.faults.append("the others were slowed")
        return f"{len(self.latencies)} other calls, p99 {1e3 * p99:.1f} ms, longest {1e3 * longest:.0f} ms"


def statuses(connections: list[Connection]) -> list[int | str]:
    """What each of these is answered."""
    found: list[int | str] = []
    for connection in connections:
        try:
            found.append(connection.reply().status)
        except (AssertionError, OSError, ValueError):
            found.append("nothing")
    return found


def count(values: list[Any]) -> str:
    """As in `40 x 200, 2 x 503`."""
    return ", ".join(f"{number} x {value}" for value, number in sorted(collections.Counter(values).items(), key=str))


# ----------------------------------------------------------------------------------------------- the trials


def threads(server: Process, faults: list[str]) -> str:
    """No thread to be had: an answer for each request, 503 at worst, and each connection lives on."""
    with contextlib.ExitStack() as stack:
        os.kill(server.popen.pid, signal.SIGUSR1)
        clients = [stack.enter_context(Connection(server.port)) for _ in range(40)]
        for number, client in enumerate(clients):
            client.send(QUIET_REPORT if number % 2 else WEATHER)
        first = statuses(clients)
        os.kill(server.popen.pid, signal.SIGUSR2)
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(WEATHER)
        second = statuses(clients)
    if not set(first) <= {200, 503} or set(second) != {200}:
        faults.append("not every request was answered, or not every connection lived on")
    return f"without threads {count(first)}; with threads again, on the same connections, {count(second)}"


def descriptors(server: Process, faults: list[str]) -> str:
    """No descriptor to be had: new connections wait, nothing spins, and all goes on when there are some again."""
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(Connection(server.port)).send(WEATHER)
        before = processor(server)
        time.sleep(1)
        used = processor(server) - before
    began = time.perf_counter()
    with Connection(server.port) as client:
        client.send(WEATHER)
        again = statuses([client])
    took = time.perf_counter() - began
    if again != [200] or took > 1 or used > 0.5:
        faults.append("it spins, or does not go on")
    return f"{100 * used:.0f} % of a core meanwhile; then {count(again)} after {1e3 * took:.0f} ms"


def processor(server: Process) -> float:
    """Seconds of processor time so far."""
    times = Path(f"/proc/{server.popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def killed(server: Process, faults: list[str]) -> str:
    """A client is killed with 3 MB unread behind its slow call: the tool stops."""
    with subprocess.Popen([sys.executable, str(HERE), "--attack", str(server.port)], stdout=subprocess.PIPE) as client:
        assert client.stdout
        sent = client.stdout.readline().decode().strip()
        client.kill()
    began = time.perf_counter()
    while not (stopped := any("build_report cancel" in line for line in server.lines)):
        if time.perf_counter() > began + 1.5:
            faults.append("the tool ran on")
            break
        time.sleep(0.001)
    return f"{sent} octets went out; stopped: {stopped}, {1e3 * (time.perf_counter() - began):.0f} ms after the kill"


def attack(port: int) -> None:
    """The client that is killed: a slow call, and then whatever the server's buffers take."""
    client = Connection(port)
    client.send(QUIET_REPORT)  # nothing comes back, so that the kernel ends the connection with a FIN, behind it all
    client.socket.setblocking(False)
    octets, sent = WEATHER * (3_000_000 // len(WEATHER)), 0
    with contextlib.suppress(ConnectionError):  # a server may end a connection on which more comes than it reads ahead
        while sent < len(octets) and select.select([], [client.socket], [], 0.3)[1]:
            sent += client.socket.send(octets[sent:])
    print(sent, flush=True)
    signal.pause()


def unread(server: Process, faults: list[str]) -> str:
    """A subscriber stops reading: the others are told of every change, and calls are answered."""
    memory = resident(server)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(socket.socket())
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.connect(("127.0.0.1", server.port))
        stopped.sendall(LISTEN_LONG)
        ended = b"?"
        listeners = [stack.enter_context(Connection(server.port)) for _ in range(20)]
        for listener in listeners:
            listener.send(LISTEN)
            listener.read_until(b"acknowledged")
        toucher, longest = stack.enter_context(Connection(server.port)), 0.0
        for number in range(8000):
            began = time.perf_counter()
            toucher.send(TOUCH)
            assert toucher.reply().status == 200
            longest = max(longest, time.perf_counter() - began)
            if number % 50 == 0:
                told(listeners, 0)
        while told(listeners, 0.3):
            pass
        toucher.send(TOUCH)
        heard = len(told(listeners, 2, all_of_them=True))
        grown = resident(server) - memory
        stopped.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while ended := stopped.recv(1 << 16):
                pass
    if heard < 20 or longest > LONGEST or grown > 50e6:
        faults.append("not everybody was told, or a change waited, or it is all kept")
    return (f"8,000 changes, the longest call {1e3 * longest:.0f} ms; {heard} of 20 others heard of the last;"
            f" {grown / 1e6:.1f} MB more; its subscription {'lives on' if ended else 'was ended'}")


def told(listeners: list[Connection], seconds: float, all_of_them: bool = False) -> set[Connection]:
    """Those that have read of a change: what is there; with time, until something, or everybody's, has come."""
    heard: set[Connection] = set()
    end = time.monotonic() + seconds
    while len(heard) < len(listeners):
        ready = select.select([one.socket for one in listeners], [], [], max(0, end - time.monotonic()))[0]
        for listener in listeners:
            if listener.socket in ready and b"updated" in listener.socket.recv(1 << 16):
                heard.add(listener)
        if not ready or (heard and not all_of_them):
            break
    return heard


def resident(server: Process) -> int:
    """Octets of memory."""
    pages = int(Path(f"/proc/{server.popen.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bursts(server: Process, faults: list[str]) -> str:
    """Four bursts of 80 connections where 50 are served: about 50 each time, and 503 for the rest."""
    seen = []
    for _ in range(4):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(Connection(server.port)) for _ in range(80)]
            for client in clients:
                client.send(WEATHER)
            seen.append(statuses(clients))
    if any(not 43 <= one.count(200) <= 52 or one.count(200) + one.count(503) != 80 for one in seen):
        faults.append("not about 50 each time")
    return "; ".join(map(count, seen))


TRIALS: dict[str, tuple[Trial, list[str]]] = {
    "threads": (threads, [str(HERE), "--serve"]), "descriptors": (descriptors, [SERVER]), "killed": (killed, [SERVER]),
    "unread": (unread, [SERVER]), "bursts": (bursts, [SERVER, "--max-connections", "50"])}


def serve(words: list[str]) -> int:
    """This server, which gets no thread from a SIGUSR1 until a SIGUSR2."""
    import reference_server

    start, none_left = threading.Thread.start, False

    def set_none_left(number: int, _: object) -> None:
        nonlocal none_left
        none_left = number == signal.SIGUSR1

    def start_perhaps(self: threading.Thread) -> None:
        if none_left:
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = start_perhaps  # type: ignore[method-assign]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, set_none_left)
    sys.argv = [SERVER, *words]
    return reference_server.main()


def run(name: str) -> bool:
    """One trial on a server of its own; whether all was well."""
    trial, command = TRIALS[name]
    faults: list[str] = []
    with process(*command, *OPTIONS) as server:
        with Others(server.port, faults) as others:
            try:
                saw = trial(server, faults)
            except (AssertionError, OSError) as problem:
                saw = "broken off"
                faults.append(f"{type(problem).__name__} {problem}")
        saw += f"; {others.verdict()}"
        if status := server.stop():
            faults.append(f"exit status {status}")
        if any("Traceback" in line for line in server.lines):
            faults.append("a traceback in the log")
    print(f"{name}: {saw}: {'; '.join(faults) or 'well'}", flush=True)
    return not faults


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRIALS), help="trials, with commas between (default: all)")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if options.attack:
        attack(options.attack)
    if options.serve:
        return serve(words)
    good = [run(name) for name in options.only.split(",")]
    print(f"{sum(good)} of {len(good)} trials went well")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Minutes of mixed traffic with random hang-ups: the server ends with the threads, descriptors and memory it had.

    python tests/load/soak.py [--seconds 600 | --minutes 10] [--clients 8] [--unread] [--stdio] [--state FILE]

Calls, streams, subscriptions, tasks, questions and bad input from several clients at once, each of which hangs up
whenever it likes. Four tenths of the time warm the server up; then all clients pause, and what the server holds is
the measure for the end. Exit status 1 if it holds more then (5 MB are granted), if an answer was wrong, or if the
log has a traceback. With `--unread`, stderr is a pipe that nobody reads; with `--stdio`, all go through one pair of
pipes. With `--state`, 1,000 waiting
tasks and 100,000 that have ended are put into that file before, and the idle server must not use more of the
processor at the end. Linux only: it looks into /proc.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import fuzz  # noqa: E402
from processes import PATIENCE, Process, process  # noqa: E402
from soak_stdio import Piped  # noqa: E402
from support import TASKS, Connection, message, octets  # noqa: E402

from reference_server import Store, demo_server, elicit  # noqa: E402

OPTIONS = ["--step-seconds", "0.02", "--keep-alive", "0.1", "--request-timeout", "1", "--idle-timeout", "2",
           "--write-timeout", "1", "--rate", "0"]
GRANTED = 5e6  # octets of memory
SETTLED = 10.0  # seconds of silence after which every connection, task and spare thread has ended
IDLE = 3.0  # the last of them, in which the processor use is measured
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Held(NamedTuple):
    """What the server's process holds."""

    threads: int
    descriptors: int
    memory: int  # resident octets
    idle: float = 0.0  # of a processor, after the silence


class Unread(Process):
    """A server whose stderr is a pipe that nobody reads, so that its port is chosen here."""

    def __init__(self, *command: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.lines, self.reader = [], threading.Thread()
        self.popen = subprocess.Popen([sys.executable, *command, "--port", str(self.port)], stderr=subprocess.PIPE)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(OSError), Connection(self.port):
                return
            time.sleep(0.02)
        self.kill()
        raise SystemExit("a server did not start")

    def wait(self) -> int:
        """Until it has ended; the exit status."""
        assert self.popen.stderr
        status = self.popen.wait(PATIENCE)
        self.popen.stderr.close()
        return status

    def __enter__(self) -> Unread:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def held(server: Process | Piped) -> Held:
    """At this moment."""
    root = Path(f"/proc/{server.popen.pid}")
    memory = 1024 * int(re.findall(r"VmRSS:\s*(\d+)", (root / "status").read_text())[0])
    return Held(len(list((root / "task").iterdir())), len(list((root / "fd").iterdir())), memory)


def used(server: Process) -> dict[str, float]:
    """Seconds of processor that each thread of the server's process has used so far."""
    threads = Path(f"/proc/{server.popen.pid}/task").iterdir()
    return {one.name: int((one / "schedstat").read_text().split()[0]) / 1e9 for one in threads}


def held_idle(server: Process) -> Held:
    """After the silence in which all that is left over ends, and the processor use of the last seconds of it."""
    time.sleep(SETTLED - IDLE)
    before = used(server)
    time.sleep(IDLE)
    return held(server)._replace(idle=sum(one - before[name] for name, one in used(server).items()) / IDLE)


def keep_tasks(state: str, waiting: int = 1000, ended: int = 100_000) -> None:
    """Puts so many tasks into a new state file, a hundred waiting ones and a thousand ended ones for each user."""
    store = Store(state)
    demo_server(0, store)
    saved = json.dumps({"params": {"name": "build_report", "arguments": {"month": "May"}}, "responses": {},
                        "state": None})
    asked = json.dumps({"charts": elicit("Include charts in the report?", {"charts": {"type": "boolean"}})})
    outcome = json.dumps({"result": {"content": [{"type": "text", "text": "The report for May is ready."}]}})
    insert = ("INSERT INTO tasks (id, user, tool, status, created, updated, ttl_ms, request, asked, outcome)"
              " VALUES (?, ?, 'build_report', ?, ?, 0, 86400000, ?, ?, ?)")
    now = time.time()
    with store.transaction():
        store.db.executemany(insert, ((f"waiting {number}", f"patient {number // 100}", "input_required", now, saved,
                                       asked, "{}") for number in range(waiting)))
        store.db.executemany(insert, ((f"ended {number}", f"former {number // 1000}", "completed", now, saved, "{}",
                                       outcome) for number in range(ended)))
    store.close()
    print(f"{waiting} waiting tasks and {ended} ended ones are kept: {os.path.getsize(state) / 1e6:.0f} MB", flush=True)


class HungUp(Exception):
    """This client has had enough."""


class Visitor:
    """One client: a connection, a user, and the mood to leave at any moment."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.port, self.chance = port, chance
        self.user = f"user{chance.randrange(20)}"

    def visit(self) -> str:
        """One random thing; its name. AssertionError for a wrong answer."""
        activity: Callable[[Connection], None] = self.chance.choice(ACTIVITIES).__get__(self)
        if activity.__name__ == "bad_input":
            self.bad_input()
        else:
            with Connection(self.port) as connection, contextlib.suppress(HungUp):
                activity(connection)
                self.perhaps_leave(connection, 0.2)
        return activity.__name__

    def perhaps_leave(self, connection: Connection, probability: float) -> None:
        """Hangs up, now and then with a reset."""
        if self.chance.random() < probability:
            if self.chance.random() < 0.3:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            raise HungUp

    def ask(self, connection: Connection, method: str, params: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        """One request; its response."""
        connection.send(octets(message(method, params, **metadata), user=self.user))
        self.perhaps_leave(connection, 0.1)
        return connection.reply().message

    def call_tool(self, connection: Connection, name: str, arguments: dict[str, Any],
                  more: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
        """A tool's result."""
        params = {"name": name, "arguments": arguments} | (more or {})
        response = self.ask(connection, "tools/call", params, **metadata)
        assert "result" in response, response
        result: dict[str, Any] = response["result"]
        return result

    # what a client does

    def calls(self, connection: Connection) -> None:
        """A few quick calls on one connection."""
        for _ in range(self.chance.randint(1, 10)):
            assert "Oslo" in self.call_tool(connection, "get_weather", {"location": "Oslo"})["content"][0]["text"]

    def lists(self, connection: Connection) -> None:
        """The lists, and a resource."""
        for method in ("server/discover", "tools/list", "resources/list", "prompts/list"):
            assert "result" in self.ask(connection, method, {})
        assert "result" in self.ask(connection, "resources/read", {"uri": "file:///project/config.json"})

    def stream(self, connection: Connection) -> None:
        """A slow call, read for a while or to its end."""
        params = {"name": "build_report", "arguments": {"month": "May"}}
        call = message("tools/call", params, progressToken=1, log_level="debug")
        connection.send(octets(call, user=self.user, version=self.chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0"))))
        for _ in range(self.chance.randint(0, 12)):
            if not connection.read_until(b"\n\n"):
                return
            self.perhaps_leave(connection, 0.1)

    def listen(self, connection: Connection) -> None:
        """A subscription, and the change that it is told of."""
        uri = "file:///project/config.json"
        wanted = {"notifications": {"resourceSubscriptions": [uri], "toolsListChanged": True}}
        connection.send(octets(message("subscriptions/listen", wanted), user=self.user))
        assert b"acknowledged" in connection.read_until(b"\n\n")
        self.perhaps_leave(connection, 0.3)
        with Connection(self.port) as other:
            self.call_tool(other, self.chance.choice(("touch_config", "toggle_beta_tool")), {})
        while not re.search(b"list_changed|updated", event := connection.read_until(b"\n\n")):
            assert event.endswith(b":\n\n"), event  # a comment

    def task(self, connection: Connection) -> None:
        """A task: polled to its end, or cancelled."""
        capabilities = {"extensions": {TASKS: {}}}
        created = self.call_tool(connection, "build_report", {"month": "May"}, capabilities=capabilities)
        stop, status = self.chance.random() < 0.5, "working"
        if stop:
            self.ask(connection, "tasks/cancel", {"taskId": created["taskId"]}, capabilities=capabilities)
        while status == "working":
            response = self.ask(connection, "tasks/get", {"taskId": created["taskId"]}, capabilities=capabilities)
            status = response["result"]["status"]
            time.sleep(0.05)
        assert status == "cancelled" if stop else status == "completed", status

    def question(self, connection: Connection) -> None:
        """A form that is asked for, filled in and sent with the retried call."""
        capabilities = {"elicitation": {"form": {}}}
        first = self.call_tool(connection, "create_repo", {"repo": "r"}, capabilities=capabilities)
        answer = {"github_login": {"action": "accept", "content": {"name": "octocat"}}}
        again = {"inputResponses": answer, "requestState": first["requestState"]}
        last = self.call_tool(connection, "create_repo", {"repo": "r"}, again, capabilities=capabilities)
        assert "octocat/r" in last["content"][0]["text"], last

    def cart(self, connection: Connection) -> None:
        """State behind a handle."""
        made = self.call_tool(connection, "create_cart", {})["structuredContent"]["cartId"]
        result = self.call_tool(connection, "add_to_cart", {"cartId": made, "sku": "tea"})
        assert result["structuredContent"] == {"items": ["tea"]}, result

    def unfinished(self, connection: Connection) -> None:
        """Part of a request, and then silence until one of the two has had enough."""
        call = octets(message("tools/list"))
        connection.send(call[: self.chance.randrange(len(call))])
        self.perhaps_leave(connection, 0.9)
        connection.read_to_end()

    def bad_input(self) -> None:
        """What the fuzzer sends."""
        fault = fuzz.find_fault(self.port, fuzz.make_input(self.chance.randrange(10**9)))
        assert fault is None, fault


ACTIVITIES = [Visitor.calls, Visitor.calls, Visitor.lists, Visitor.stream, Visitor.stream, Visitor.listen, Visitor.task,
              Visitor.question, Visitor.cart, Visitor.unfinished, Visitor.bad_input]


class Traffic:
    """The clients, each on a thread of its own. `lock` guards the two counters."""

    def __init__(self, server: Process | Piped, clients: int) -> None:
        self.server, self.clients = server, clients
        self.lock = threading.Lock()
        self.visits: collections.Counter[str] = collections.Counter()
        self.problems: collections.Counter[str] = collections.Counter()

    def client(self, number: int, end: float) -> None:
        """One client's thread: visit after visit."""
        chance = random.Random(f"{number} {end}")
        while time.monotonic() < end:
            try:
                if isinstance(self.server, Piped):
                    name, problem = self.server.visit(chance), None
                else:
                    name, problem = Visitor(self.server.port, chance).visit(), None
            except Exception as fault:  # of whatever kind: it is counted, shown, and decides the exit status
                name, problem = "failed", f"{type(fault).__name__}: {fault}"[:300]
            with self.lock:
                self.visits[name] += 1
                if problem:
                    self.problems[problem] += 1

    def run(self, seconds: float) -> Held:
        """Traffic for that long, then silence; what the server holds after it."""
        end, shown = time.monotonic() + seconds, time.monotonic() + 30
        threads = [threading.Thread(target=self.client, args=(number, end)) for number in range(self.clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            self.read_log()
            if time.monotonic() > shown:
                shown += 30
                print(f"  {sum(self.visits.values()):7} visits, {show(held(self.server))}", flush=True)
        left = held_idle(self.server)
        self.read_log()
        return left

    def read_log(self) -> None:
        """A traceback in the server's log is a problem; the rest is dropped."""
        lines, self.server.lines[:] = self.server.lines[:], []
        if any("Traceback" in line for line in lines):
            text = "\n".join(lines)
            self.problems["log: " + text[text.index("Traceback"):][:2000]] += 1


def show(what: Held) -> str:
    """One line of figures."""
    idle = f", {what.idle:.2%} of a processor when idle" if what.idle else ""
    return f"{what.threads} threads, {what.descriptors} descriptors, {what.memory / 1e6:.1f} MB{idle}"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="in all (default: 600)")
    parser.add_argument("--minutes", type=float, help="in all, instead of --seconds")
    parser.add_argument("--clients", type=int, default=8, help="at once (default: 8)")
    parser.add_argument("--unread", action="store_true", help="nobody reads the server's stderr")
    parser.add_argument("--stdio", action="store_true", help="over stdio")
    parser.add_argument("--state", help="a new state file, with many tasks in it (default: a new one without)")
    options = parser.parse_args()
    options.seconds = 60 * options.minutes if options.minutes else options.seconds
    os.environ["MALLOC_ARENA_MAX"] = "1"  # glibc: otherwise each thread's heap fills up by itself, for many minutes
    with tempfile.TemporaryDirectory() as folder:
        state = options.state or str(Path(folder) / "state.db")  # a file, so that what is kept takes no memory
        if options.state:
            keep_tasks(state)
        command = [str(HERE.parents[1] / "reference_server.py"), *OPTIONS, "--state", state]
        piped = functools.partial(Piped, unread=options.unread)
        with (piped if options.stdio else Unread if options.unread else process)(*command) as server:
            traffic = Traffic(server, options.clients)
            first = held_idle(server)
            print(f"at the start: {show(first)}", flush=True)
            before = traffic.run(0.4 * options.seconds)
            print(f"warmed up:    {show(before)}", flush=True)
            after = traffic.run(0.6 * options.seconds)
            print(f"at the end:   {show(after)}", flush=True)
            status = server.stop()
    print("visits:", ", ".join(f"{count} {name}" for name, count in sorted(traffic.visits.items())))
    for problem, count in traffic.problems.most_common(20):
        print(f"{count} times: {problem}")
    good = after.threads <= before.threads and after.descriptors <= before.descriptors
    good = good and after.memory - before.memory <= GRANTED and not traffic.problems and status == 0
    good = good and after.idle <= 1.3 * first.idle + 0.001  # what one machine's noise is
    print("as it began" if good else "NOT as it began")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

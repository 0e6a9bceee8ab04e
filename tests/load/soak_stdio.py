"""The soak over stdio: several clients' worth of traffic through one pair of pipes, each answer told to who waits."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from processes import PATIENCE
from support import TASKS, message

CONFIG = "file:///project/config.json"
Messages = queue.SimpleQueue[dict[str, Any]]


class Piped:
    """A server over pipes, for soak.py's `Traffic`. `unread`: nobody reads its stderr."""

    def __init__(self, *command: str, unread: bool) -> None:
        self.popen = subprocess.Popen([sys.executable, *command, "--stdio"], bufsize=0, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.lines: list[str] = []
        self.writing = threading.Lock()
        self.numbers = itertools.count(1)
        self.waiting: dict[int, Messages] = {}  # filled and emptied by the clients' threads, read by the reader's
        self.bad: Messages = queue.SimpleQueue()  # answers without an id
        self.strays: list[str] = []  # what nobody has asked for
        self.threads = [threading.Thread(target=self.read)]
        if not unread:
            self.threads.append(threading.Thread(target=self.read_log))
        for thread in self.threads:
            thread.start()

    def read(self) -> None:
        """The reader's thread: until the process has closed its end."""
        assert self.popen.stdout
        for line in self.popen.stdout:
            one = json.loads(line)
            params = one.get("params", {})
            key = one.get("id", params.get("progressToken",
                                           params.get("_meta", {}).get("io.modelcontextprotocol/subscriptionId")))
            if waiting := self.bad if "error" in one and key is None else self.waiting.get(key):
                waiting.put(one)
            elif "method" not in one:  # what is on its way when a client cancels goes nowhere
                self.strays.append(line.decode()[:200])

    def read_log(self) -> None:
        """The log's thread."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def send(self, line: bytes) -> None:
        """One line, whole."""
        assert self.popen.stdin
        with self.writing:
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[self.popen.stdin.write(rest) or 0:]

    def visit(self, chance: random.Random) -> str:
        """One random thing; its name. AssertionError for a wrong answer, queue.Empty for one that does not come."""
        activity: Callable[[random.Random], None] = chance.choice(ACTIVITIES).__get__(self)
        activity(chance)
        return activity.__name__

    @contextlib.contextmanager
    def asked(self, method: str, params: dict[str, Any], *, progress: bool = False, **metadata: Any) -> Any:
        """A request's id and the messages that it brings."""
        number: int = next(self.numbers)
        self.waiting[number] = queue.SimpleQueue()
        if progress:
            metadata["progressToken"] = number
        self.send(json.dumps(message(method, params, number, **metadata)).encode())
        try:
            yield number, self.waiting[number]
        finally:
            del self.waiting[number]

    def ask(self, method: str, params: dict[str, Any], **metadata: Any) -> Any:
        """The result of a request that sends nothing else."""
        with self.asked(method, params, **metadata) as (_, messages):
            response = messages.get(timeout=PATIENCE)
            assert "result" in response, response
            return response["result"]

    def call(self, name: str, arguments: dict[str, Any], **metadata: Any) -> Any:
        """A tool's result."""
        return self.ask("tools/call", {"name": name, "arguments": arguments}, **metadata)

    def cancel(self, number: int, messages: Messages) -> None:
        """Withdraws a request. What the server had already sent is read, what is still to come is nobody's."""
        self.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled",
                              "params": {"requestId": number, "reason": "enough"}}).encode())
        self.ask("server/discover", {})  # by now the server has read the withdrawal
        with contextlib.suppress(queue.Empty):
            while "method" in messages.get(timeout=0.05):
                pass

    # what a client does

    def calls(self, chance: random.Random) -> None:
        """A few quick calls."""
        for _ in range(chance.randint(1, 30)):
            assert "Oslo" in self.call("get_weather", {"location": "Oslo"})["content"][0]["text"]

    def lists(self, chance: random.Random) -> None:
        """The lists, and a resource."""
        for method in ("server/discover", "tools/list", "resources/list", "prompts/list"):
            self.ask(method, {})
        self.ask("resources/read", {"uri": CONFIG})

    def slow(self, chance: random.Random) -> None:
        """A slow call, read to its end or withdrawn."""
        report = {"name": "build_report", "arguments": {"month": "May"}}
        with self.asked("tools/call", report, progress=True, log_level="debug") as (number, messages):
            for _ in range(chance.randint(0, 12)):
                if "method" not in (one := messages.get(timeout=PATIENCE)):
                    assert "result" in one, one
                    return
            self.cancel(number, messages)

    def listen(self, chance: random.Random) -> None:
        """A subscription, and the change that it is told of."""
        wanted = {"notifications": {"resourceSubscriptions": [CONFIG]}}
        with self.asked("subscriptions/listen", wanted) as (number, messages):
            assert messages.get(timeout=PATIENCE)["method"].endswith("acknowledged")
            self.call("touch_config", {})
            assert messages.get(timeout=PATIENCE)["method"].endswith("updated")
            self.cancel(number, messages)

    def task(self, chance: random.Random) -> None:
        """A task: polled to its end; or the word that a thousand are kept already."""
        capabilities = {"extensions": {TASKS: {}}}
        made = self.call("build_report", {"month": "May"}, capabilities=capabilities)
        if made.get("isError"):
            assert "There is no room for more" in made["content"][0]["text"], made
            return
        while (status := self.ask("tasks/get", {"taskId": made["taskId"]}, capabilities=capabilities)["status"]) != \
                "completed":
            assert status == "working", status
            threading.Event().wait(0.05)

    def bad_input(self, chance: random.Random) -> None:
        """A line that is no JSON gets an error without an id."""
        self.send(b"{" * chance.randint(1, 100))
        assert "error" in self.bad.get(timeout=PATIENCE)

    def stop(self) -> int:
        """The end of input; the exit status."""
        assert self.popen.stdin and self.popen.stdout and self.popen.stderr
        self.popen.stdin.close()
        status = self.popen.wait(PATIENCE)
        for thread in self.threads:
            thread.join(PATIENCE)
        if self.strays:
            print(f"{len(self.strays)} answers that nobody asked for: {self.strays[:3]}")
        return status or len(self.strays)

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        for thread in self.threads:
            thread.join(PATIENCE)
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert stream
            stream.close()


ACTIVITIES = [Piped.calls, Piped.calls, Piped.lists, Piped.slow, Piped.slow, Piped.listen, Piped.task, Piped.bad_input]

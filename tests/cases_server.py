"""The server that the cases assume. python tests/cases_server.py --port P, or --stdio; or in the process of a test."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference_server import HttpServer, Request, Server, elicit, input_required, serve_stdio, takes

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


class CasesServer(Server):
    """The fixture; it records what its tools do. `pace`: how long a second of its tools takes, in seconds."""

    def __init__(self, pace: float = 1.0) -> None:
        super().__init__("cases", "1.0.0")
        self.pace = pace
        self.calls: list[str] = []  # names of tools whose function has begun
        self.endings: list[str] = []  # how `slow` and `longtask` ended: finished, cancelled
        self.slow_started = threading.Event()
        self.slow_ended = threading.Event()
        add_plain_tools(self)
        add_slow_tools(self)
        add_asking_tools(self)
        self.resource("test://a", "a")(lambda uri, request: "the text of a")
        self.prompt("greet", "A greeting.")(lambda arguments, request: "Say hello.")

    def wait(self, request: Request, seconds: float, *, reports: bool = False) -> None:
        """Sleeps in small steps and records how that ended, even if its first report meets the client's end."""
        self.slow_ended.clear()
        self.slow_started.set()
        ending = "cancelled"
        try:
            if reports:
                request.progress(0)
            for _ in range(10):
                request.sleep(seconds * self.pace / 10)
            ending = "finished"
        finally:
            self.endings.append(ending)
            self.slow_started.clear()
            self.slow_ended.set()


def add_plain_tools(server: CasesServer) -> None:
    """Tools that answer at once."""

    @server.tool("echo", "Gives its text back.", takes(text=TEXT))
    def echo(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("echo")
        return str(arguments["text"])

    tenant = {"type": "object", "properties": {"tenant": TEXT | {"x-mcp-header": "Tenant"}}}
    mirrored = {"region": TEXT | {"x-mcp-header": "Region"}, "count": {"type": "integer", "x-mcp-header": "Count"},
                "flag": {"type": "boolean", "x-mcp-header": "Flag"}, "opts": tenant}

    # To the headers a null argument is an absent one, and the cases send one: this tool takes it.
    @server.tool("route", "Mirrors its parameters.", takes(mirrored), checks_own_arguments=True)
    def route(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("route")
        return f"routed to {arguments.get('region')!r}"

    @server.tool("café", "A name that is not ASCII.", takes())
    def coffee(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("café")
        return "un café"

    @server.tool("boom", "Raises.", takes())
    def boom(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("boom")
        raise RuntimeError("the secret reason")

    @server.tool("nan", "Has a result that JSON cannot say.", takes())
    def nan(arguments: dict[str, Any], request: Request) -> dict[str, Any]:
        server.calls.append("nan")
        return {"content": [], "structuredContent": {"value": float("nan")}}

    @server.tool("noisy", "Writes to what was standard output, and so do its children; one of them reads.", takes())
    def noisy(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("noisy")
        print("x")
        os.write(1, b"y\n")
        subprocess.run(["echo", "z"], check=True)
        subprocess.run(["cat"], check=True, timeout=5)
        return "quiet now"


def add_slow_tools(server: CasesServer) -> None:
    """Tools that take time."""

    @server.tool("slow", "Sleeps in small steps.", takes(seconds=NUMBER))
    def slow(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("slow")
        server.wait(request, arguments["seconds"], reports=True)
        return "slept"

    @server.tool("progress", "Reports progress and, if asked to, logs.", takes(
        {"values": {"type": "array", "items": NUMBER}, "log": {"type": "boolean"}}, steps={"type": "integer"}))
    def progress(arguments: dict[str, Any], request: Request) -> str:
        server.calls.append("progress")
        for value in arguments.get("values", range(1, arguments["steps"] + 1)):
            if arguments.get("log"):
                request.log("info", f"at {value}")
            request.progress(value)
        return "done"

    @server.tool("longtask", "Sleeps as a task.", takes({"seconds": NUMBER, "ttlMs": {"type": "integer"}}))
    def longtask(arguments: dict[str, Any], request: Request) -> str:
        request.as_task(ttl_ms=arguments.get("ttlMs", 60_000))
        server.calls.append("longtask")
        server.wait(request, arguments.get("seconds", 0))
        return "the task is done"

    @server.tool("tasksonly", "Runs as a task or not at all.", takes())
    def tasksonly(arguments: dict[str, Any], request: Request) -> str:
        request.as_task(required=True)
        server.calls.append("tasksonly")
        return "done as a task"


def add_asking_tools(server: CasesServer) -> None:
    """Tools that ask for a name under the key q1: in a second round trip, or while they run as a task."""
    question = elicit("What is your name?", {"name": TEXT})

    @server.tool("ask", "Asks once.", takes(topic=TEXT))
    def ask(arguments: dict[str, Any], request: Request) -> str | dict[str, Any]:
        answer = request.accepted("q1")
        if answer is None and "q1" in request.responses:
            return "declined"
        if answer is None:
            return input_required({"q1": question}, state={"topic": arguments["topic"]})
        server.calls.append("ask")
        return f"{answer['name']} on {arguments['topic']}"

    @server.tool("asktask", "Asks as a task.", takes())
    def asktask(arguments: dict[str, Any], request: Request) -> str:
        request.as_task(required=True)
        answer = request.ask({"q1": question})["q1"]
        server.calls.append("asktask")
        return f"hello {answer['content']['name']}"


def main() -> None:
    """Serves until SIGINT or the end of input; the first line on stderr ends with the port."""
    parser = argparse.ArgumentParser(description="The fixture of the cases.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stdio", action="store_true")
    options = parser.parse_args()
    server = CasesServer()
    if options.stdio:
        serve_stdio(server)
        return
    http = HttpServer(server, port=options.port)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: http.stop())
    print(f"serving the cases on port {http.port}", file=sys.stderr, flush=True)
    http.serve_forever()


if __name__ == "__main__":
    main()

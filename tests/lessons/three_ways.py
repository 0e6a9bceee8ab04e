"""One slow call, three ways: the same job over stdio, over Streamable HTTP 2026-07-28, and over that of 2025-11-25.

    python tests/lessons/three_ways.py     prints what happened; exit status 1 when it is not what the lesson says

The job has 40 steps of 20 ms and reports each. It is called and cancelled after six steps; it is called again and the
connection drops after six; then the client does what its revision offers it to get the result all the same. The steps
that were run are counted where they are run, not by what arrives.
"""

import http.client
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import by_hand
from legacy_server import LegacyServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headers import headers_for
from reference_server import Endpoint, HttpServer, Request, Server, serve_stdio
from sse import Event, EventParser

Message = dict[str, Any]
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
PATIENCE = 10.0  # seconds for anything to happen


class Plan(NamedTuple):
    """How long the job is, and after how many steps the client leaves."""

    steps: int = 40
    step_seconds: float = 0.02
    leave_after: int = 6


class Row(NamedTuple):
    """What happened over one transport."""

    transport: str
    arrived: str  # how progress came
    cancelled: str  # what the client did to cancel
    stopped_after: int  # steps finished when the work had stopped
    recovered: str  # what the client did after the drop
    in_all: int  # steps that were run for one result, with a drop on the way


# ------------------------------------------------------------------------------------------------------ the job


class Job:
    """The long tool and what it really did. `ran` is written by whoever runs it, one call at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ran = 0  # steps
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # for each call, how many steps it has finished

    def note(self, line: str) -> None:
        """Takes down `ran` or `ended STEP`; any other line is none of its business."""
        word, _, step = line.strip().partition(" ")
        self.ran += word == "ran"
        if word == "ended":
            self.ended.put(int(step))

    def wait(self) -> int:
        """How many steps the call has finished, when it has ended. queue.Empty when it does not end."""
        return self.ended.get(timeout=PATIENCE)


def job_server(plan: Plan, note: Callable[[str], object]) -> Server:
    """A server with the one tool, from the same registry for all three transports."""
    server = Server("three-ways", "1.0.0")

    @server.tool("long_job", "Takes many steps.", {"type": "object"})
    def long_job(arguments: Message, request: Request) -> str:
        finished = 0
        try:
            while finished < plan.steps:
                request.sleep(plan.step_seconds)
                finished += 1
                note("ran")
                request.progress(finished, plan.steps)
        finally:
            note(f"ended {finished}")
        return "All steps are done."

    return server


def call_of(message_id: int) -> Message:
    """The request, the same for all three; the old server does not look at the metadata it has no use for."""
    params = {"name": "long_job", "arguments": {}, "_meta": META | {"progressToken": message_id}}
    return {"jsonrpc": "2.0", "id": message_id, "method": "tools/call", "params": params}


def cancellation_of(message_id: int) -> Message:
    """The notification that cancels a request over stdio, and over HTTP until 2025-11-25."""
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": message_id}}


def progress_in(messages: Iterator[Message], count: int) -> int:
    """How many progress notifications came: reads up to the `count`th, or up to the response if `count` never comes."""
    seen = 0
    for message in messages:
        seen += message.get("method") == "notifications/progress"
        if seen == count or "result" in message:
            break
    return seen


# --------------------------------------------------------------------------------------------------------- stdio


class Child:
    """This file as a stdio server in a process of its own, which notes its steps on stderr."""

    def __init__(self, job: Job) -> None:
        numbers = [str(number) for number in job.plan]
        self.process = subprocess.Popen([sys.executable, __file__, "--stdio", *numbers], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        self.bound = threading.Timer(PATIENCE, self.process.kill)
        self.reader = threading.Thread(target=self.read_notes, args=(job,))

    def __enter__(self) -> "Child":
        self.bound.start()
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Closes both pipes, as a client that dies does, and waits for the process to end."""
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):
                pipe.close()
        self.process.wait()
        self.bound.cancel()
        self.reader.join()
        self.stderr.close()

    def read_notes(self, job: Job) -> None:
        for line in self.stderr:
            job.note(line)

    def send(self, message: Message) -> None:
        """One message, one line."""
        self.stdin.write(json.dumps(message) + "\n")
        self.stdin.flush()

    def messages(self) -> Iterator[Message]:
        """What comes back, a message a line."""
        return (json.loads(line) for line in self.stdout)


def over_stdio(job: Job) -> Row:
    """A process for each connection, because the pipes are the connection."""
    with Child(job) as child:
        child.send(call_of(1))
        progress_in(child.messages(), job.plan.leave_after)
        child.send(cancellation_of(1))
        stopped_after = job.wait()
    job.ran = 0
    with Child(job) as child:
        child.send(call_of(1))
        progress_in(child.messages(), job.plan.leave_after)
    job.wait()
    with Child(job) as child:
        child.send(call_of(1))
        arrived = progress_in(child.messages(), job.plan.steps)
        job.wait()
    return Row("stdio", f"{arrived} lines on stdout", "notifications/cancelled on stdin", stopped_after,
               "new process, called again", job.ran)


# ---------------------------------------------------------------------------------------------------- Streamable HTTP


class Exchange:
    """One HTTP request and its answer; leaving the block closes the connection, whatever is still to come."""

    def __init__(self, port: int, verb: str, fields: dict[str, str], message: Message | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        fields = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"} | fields
        self.connection.request(verb, "/mcp", json.dumps(message) if message else None, fields)
        self.answer = self.connection.getresponse()
        self.event_ids: list[str] = []  # of the progress events so far

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.close()
        self.connection.close()

    def events(self) -> Iterator[Event]:
        """The events of the answer as they come."""
        parser = EventParser()
        while piece := self.answer.read1(1 << 16):
            yield from parser.feed(piece)

    def messages(self) -> Iterator[Message]:
        """The messages in these events; takes down the ids of those that report progress."""
        for event in self.events():
            message = json.loads(event.data or "{}")
            if message.get("method") == "notifications/progress":
                self.event_ids.append(event.id)
            yield message


def ids_in(*exchanges: Exchange) -> int:
    """How many different event ids came with progress."""
    return len({event_id for exchange in exchanges for event_id in exchange.event_ids} - {""})


@contextmanager
def serving(server: Any) -> Iterator[int]:
    """The port of a server that serves until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        (server.stop if isinstance(server, HttpServer) else server.shutdown)()
        thread.join(PATIENCE)
        server.server_close()


def over_http(job: Job, endpoint: type[Endpoint] = Endpoint) -> Row:
    """Revision 2026-07-28: each request stands alone, and its stream is all that ties a client to it."""
    server = HttpServer(job_server(job.plan, job.note))
    server.RequestHandlerClass = endpoint

    def call(message_id: int) -> Exchange:
        return Exchange(port, "POST", headers_for(call_of(message_id)), call_of(message_id))

    with serving(server) as port:
        with call(1) as exchange:
            progress_in(exchange.messages(), job.plan.leave_after)
        stopped_after = job.wait()
        job.ran = 0
        with call(2) as exchange:
            progress_in(exchange.messages(), job.plan.leave_after)
        job.wait()
        with call(3) as exchange:
            arrived = progress_in(exchange.messages(), job.plan.steps)
            job.wait()
    server.mcp.store.close()
    return Row("HTTP 2026-07-28", f"{arrived} events, {ids_in(exchange)} with an id", "closed the response stream",
               stopped_after, "called again, with a new id", job.ran)


def over_legacy_http(job: Job) -> Row:
    """Revision 2025-11-25: the server keeps a session and all events, and a closed stream says nothing to it."""
    mcp = job_server(job.plan, job.note)
    with serving(LegacyServer(mcp)) as port:
        hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
        with Exchange(port, "POST", {}, hello) as exchange:
            session_id = exchange.answer.headers["Mcp-Session-Id"]
        session = {"MCP-Protocol-Version": "2025-11-25", "Mcp-Session-Id": session_id}
        with Exchange(port, "POST", session, call_of(1)) as exchange:
            progress_in(exchange.messages(), job.plan.leave_after)
            with Exchange(port, "POST", session, cancellation_of(1)):
                stopped_after = job.wait()
        job.ran = 0
        with Exchange(port, "POST", session, call_of(2)) as dropped:
            before = progress_in(dropped.messages(), job.plan.leave_after)
        with Exchange(port, "GET", session | {"Last-Event-ID": dropped.event_ids[-1]}) as resumed:
            after = progress_in(resumed.messages(), job.plan.steps)
        job.wait()
        with Exchange(port, "DELETE", session):
            pass
    mcp.store.close()
    return Row("HTTP 2025-11-25", f"{before} + {after} events, {ids_in(dropped, resumed)} with an id",
               "notifications/cancelled, a second POST", stopped_after, "GET with Last-Event-ID", job.ran)


# ----------------------------------------------------------------------------------------------------- the comparison


def is_the_lesson(plan: Plan, stdio: Row, modern: Row, legacy: Row) -> bool:
    """Whether the three did what the lesson says."""
    stopped = all(plan.leave_after <= row.stopped_after < plan.steps for row in (stdio, modern, legacy))
    again = all(plan.steps < row.in_all < 2 * plan.steps for row in (stdio, modern))
    shown = [stdio.arrived, modern.arrived] == [f"{plan.steps} lines on stdout", f"{plan.steps} events, 0 with an id"]
    return stopped and again and shown and legacy.in_all == plan.steps and legacy.arrived.endswith(
        f" events, {plan.steps} with an id")


def show(plan: Plan | None = None, endpoint: type[Endpoint] = Endpoint) -> int:
    """Prints the table; 0 when it is the lesson's. `endpoint` is the part of the server under test."""
    plan = plan or Plan()
    rows = [over_stdio(Job(plan)), over_http(Job(plan), endpoint), over_legacy_http(Job(plan))]
    titles = ("transport", "progress arrived as", "cancelled by", "stopped after", "after a drop", "steps in all")
    table = [titles, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(titles))]
    print(f"A job of {plan.steps} steps, cancelled after {plan.leave_after}, then dropped after {plan.leave_after}:")
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    if not is_the_lesson(plan, *rows):
        print("This is not what the lesson says: see is_the_lesson in this file.")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Without arguments the comparison; `--stdio STEPS SECONDS LEAVE` is the stdio server that it starts."""
    if arguments[:1] != ["--stdio"]:
        by_hand.parser_for(__doc__).parse_args(arguments)
        return show()
    plan = Plan(int(arguments[1]), float(arguments[2]), int(arguments[3]))
    serve_stdio(job_server(plan, lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

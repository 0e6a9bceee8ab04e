"""The Model Context Protocol, revision 2026-07-28: a reference server to run, to poke and to read.

    python reference_server.py            serves http://127.0.0.1:3000/mcp  (Streamable HTTP)
    python reference_server.py --stdio    serves one client over stdin and stdout

Every request stands alone: it carries its version, its client's capabilities and its user, and nothing is
remembered about the connection it came on. Closing the response stream is the cancellation. Headers are a copy
of the body and must agree with it. What must survive a hang-up is a task, and a task is a handle.

The book has five parts; a reader in a hurry stops after the first.

1. One request            the words, the ladder of checks, what a tool sees, the answer, the hang-up
2. What a server offers   schemas, tools, resources, prompts, questions, subscriptions
3. What outlives a request  the store, tasks
4. The demo               the tools of the lessons
5. The carriers           the loop, the workers and the HTTP server, stdio, the log, the command line

One request, end to end:

    client                     the loop (one thread)                   a worker (a thread for a request that may wait)
      | POST /mcp        --->  octets -> one whole request
      |                        quick? answered here  -- otherwise -->  check_head     origin, path, verb, types, user
      |                                                                parse_message  body -> one JSON-RPC message
      |                                                                open_request   metadata, headers, method
      |                                                                call_tool      checks arguments, runs the tool
      | <--- SSE event                                                 emit()
      x closes --------------> reads the end of file:
      |                        request.cancelled is set  ------------> the tool stops; nothing more is written

| thread       | made by                          | touches                                      | ends when         |
|--------------|----------------------------------|----------------------------------------------|-------------------|
| loop         | main                             | the selector; reads all sockets              | shutdown          |
| worker       | the loop, the stdio reader       | writes the connection of its request, alone  | 5 s idle          |
| keeper       | start                            | expiry, orphans, delivery to subscribers     | shutdown          |
| task worker  | a task's start, one each         | the task's row                               | the tool ends     |
| log writer   | the first line                   | the queue of log lines, descriptor 2         | the process ends  |
| stdio reader | start                            | stdin; quick answers                         | end of input      |
| stdio writer | a write that the pipe won't take | stdout                                       | it has caught up  |
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - before anything that an older one cannot read
    sys.exit(f"reference_server.py needs Python 3.11 or newer, this is {sys.version.split()[0]}")

import argparse
import base64
import collections
import contextlib
import datetime
import errno
import functools
import glob
import hashlib
import hmac
import itertools
import json
import math
import operator
import os
import queue
import re
import secrets
import select
import selectors
import signal
import socket
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

if sqlite3.sqlite_version_info < (3, 35):
    sys.exit(f"reference_server.py needs SQLite 3.35 or newer (RETURNING), this is {sqlite3.sqlite_version}")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where `python -I` and PYTHONSAFEPATH do not look

import headers
import sse
from headers import BadHead, Fields, HeaderMismatch, Refused

# ================================================================================================================
# Part 1. One request: from its octets to the end of its answer, and the hang-up that stops it. What it uses of the
# later parts: `Server` (2), whose tables say what there is to call, `Outbox` and `HttpServer` (5), which carry it.
# ================================================================================================================

Json = dict[str, Any]

SUPPORTED_VERSIONS = ["2026-07-28"]
META = "io.modelcontextprotocol/"
VERSION_KEY, CAPABILITIES_KEY, LEVEL_KEY = headers.VERSION_KEY, META + "clientCapabilities", META + "logLevel"
TASKS = META + "tasks"
NEEDS_TASKS: Json = {"extensions": {TASKS: {}}}
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION = -32020, -32021, -32022

# choice: 200 for what the method itself finds wrong, because the request as such was understood and served.
STATUS_OF_CODE = {PARSE_ERROR: 400, INVALID_REQUEST: 400, METHOD_NOT_FOUND: 404, HEADER_MISMATCH: 400,
                  MISSING_CAPABILITY: 400, UNSUPPORTED_VERSION: 400}
STATUS_LINES = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}

MAX_MESSAGE = 1 << 20  # octets of one message, over HTTP and stdio
MAX_QUEUED = 1000  # notifications that a subscription may be behind before it is dropped
MAX_NAMED = 1000  # resources and tasks that a subscription may name
MAX_CHANGES = 10_000  # changes that the feed holds, for instances that come late to it
MAX_TASKS = 100  # unfinished tasks of one user
MAX_KEPT, MAX_KEPT_OCTETS = 1000, 16 << 20  # handles of one user; and tasks, those included that have ended
MAX_DEATHS = 3  # of the processes that ran a task, one after the other, before it has failed
STATE_SECONDS = 600  # how long a requestState may travel
HANDLE_SECONDS = 86_400  # how long a cart or hold that nobody touches is kept
WRITE_SECONDS = 5.0  # how long a write waits for others, of this process and of others
KEEPER_SECONDS = 0.2  # how often the dead, the expired and other instances' changes are looked for


class Rejection(Exception):
    """A request that is not served: JSON-RPC code (None: HTTP refuses it), message, data, HTTP status, field lines.

    `rule` is what the refusal rests on, "Page › Heading" of the specification or "rfc9110 §15.5.16"; the log shows it.
    All of this server's have one; a tool's own may rest on nothing but its author's will.
    """

    def __init__(self, code: int | None, message: str, data: Any = None, status: int = 0, fields: str = "",
                 message_id: str | int | None = None, *, rule: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.data, self.fields, self.rule = code, message, data, fields, rule
        self.status = status or STATUS_OF_CODE.get(code or 0, 200)
        self.id = message_id  # when the message is rejected before it is known to be a request

    def error(self) -> Json:
        """The `error` member of a response."""
        return present(code=self.code, message=self.message, data=self.data)

    def response(self, message_id: str | int | None) -> Json:
        """The error response; without an `id` when the request's could not be read, since the schema has no null."""
        return present(jsonrpc="2.0" if self.code else None, id=message_id, error=self.error())

    def line(self) -> str:
        """The log's words: status, code, what was wrong, and the rule that says so."""
        code, rule = f"{self.code} " if self.code else "", f" ({self.rule})" if self.rule else ""
        return f"{self.status}, {code}{self.message}{rule}"


class ToolError(Exception):
    """A failure that a model can act on: the call's result says `isError: true` and this text."""


class Cancelled(BaseException):
    """Nobody waits for this request any more. No Exception, so that no tool swallows it by accident."""


class BecomesTask(BaseException):
    """The tool goes on as a task, see `Request.as_task`."""

    def __init__(self, ttl_ms: int) -> None:
        super().__init__()
        self.ttl_ms = ttl_ms


# ---- the way back to the client --------------------------------------------------------------------------------


class Exchange:
    """One request's way back to its client; as it stands, that of a task: nobody listens. It ends with its answer.

    A tool may report from any of its threads: `lock` keeps what they send whole and in order. What is reported after
    the answer, or to a client that is gone, goes nowhere. `cancelled` and `reason` are set by whoever sees the client
    go, from any thread and without a lock.
    """

    quick = False  # answered by the thread that reads everybody's requests, where nothing may wait
    parked = False  # a subscription: no thread is its own, and `end` will end it
    reason: str | None = None  # why it was cancelled
    heeded = False  # the method has reported, or has looked whether it is cancelled
    over = False  # the answer has been sent
    thread = 0  # that runs the method
    outbox: Outbox  # what its carrier sends by, if there is one

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.began = self.quiet_since = time.monotonic()  # the request had come; later, when octets were last sent

    @property
    def cancelled(self) -> threading.Event:
        """Set together with `reason`; made when somebody first looks, since most requests are answered before."""
        event: threading.Event = self.__dict__.setdefault("event", threading.Event())
        if self.reason:
            event.set()
        return event

    def cancel(self, reason: str) -> None:
        """Tells the method that nobody waits any more."""
        self.reason = self.reason or reason
        if event := self.__dict__.get("event"):  # one made after this line is set by whoever makes it
            event.set()

    def emit(self, message: Json) -> None:
        """Sends one notification ahead of the response; raises Cancelled in a method whose client is gone."""
        text = sse.encode_json({"jsonrpc": "2.0"} | message)
        with self.lock:
            if not self.over and not self.reason:
                self.send_message(text)
        if self.reason and not self.over and self.thread == threading.get_ident():
            raise Cancelled(self.reason)

    def comment_due(self) -> float:
        """Seconds until a quiet stream needs a comment."""
        return math.inf

    def keep_alive(self) -> None:
        """Sends a comment if one is due; proxies cut streams that stay silent."""
        with self.lock:
            if self.comment_due() == 0 and not self.over:
                self.send_comment()

    def send_message(self, text: bytes) -> None:
        """The carrier's part of `emit`; called with `lock` held."""

    def send_comment(self) -> None:
        """The carrier's part of `keep_alive`; called with `lock` held."""

    def push(self, text: bytes) -> bool:
        """A subscription's next message, never waiting; False if its client is gone or too far behind."""
        with self.lock:
            self.parked = True
            if self.over or self.reason or self.outbox.behind >= MAX_QUEUED:
                return False
            self.send_message(text)
        return not self.reason

    def end(self, result: bytes | None) -> None:
        """Ends a subscription from this side: with its result if there is one and it can be sent."""


class Connection:
    """One TCP connection. The loop alone reads it and sets its attributes; what is sent is its outbox's affair."""

    __slots__ = ("arrived", "at_end", "exchange", "inbox", "limit", "outbox", "place", "server", "socket")

    def __init__(self, server: HttpServer, connection: socket.socket, place: bool) -> None:
        self.server, self.socket = server, connection
        self.place = place  # it counts against the limit; without one it is refused
        self.inbox = Inbox(server.max_body)
        self.outbox = Outbox(self.send_some, self.send_all, server.workers.run, self.caught_up)
        self.exchange: Endpoint | None = None  # the request that is being answered
        self.at_end = False  # the client sends no more
        self.limit = ""  # the queue of deadlines in which it stands: idle_timeout, request_timeout, linger_timeout
        self.arrived = 0  # octets since it stands there

    def read(self) -> None:
        """The loop: takes what has come. This is where a closed stream becomes a cancellation.

        choice: an end of file is a hang-up even if only half of the connection is closed, because Go's and Node's
        servers read it so, and nothing distinguishes the two before the first write.
        """
        try:
            octets = self.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:  # the connection was reset
            octets = b""
        self.inbox.received += octets
        self.arrived += len(octets)
        if not octets:
            self.at_end = True
            if self.exchange:
                self.exchange.cancel("stream closed")  # wakes the tool in `Request.sleep`, at its next `emit` otherwise

    def send_some(self, octets: bytes | memoryview) -> int:
        """Sends what the kernel takes at once, and says how many octets that was."""
        try:
            return self.socket.send(octets)
        except BlockingIOError:
            return 0

    def send_all(self, octets: bytes) -> None:
        """Sends everything; TimeoutError when the client has taken nothing for the write timeout."""
        rest = memoryview(octets)
        while rest := rest[self.send_some(rest) :]:
            if not ready_to_send(self.socket, self.server.write_timeout):
                if self.exchange and self.exchange.over:  # it has been logged as complete
                    log(f"an answer is cut: its client has taken nothing for {self.server.write_timeout:g} s")
                raise TimeoutError

    def caught_up(self) -> None:
        """A worker has sent what waited, or has found that the client takes nothing: the loop goes on from there."""
        if exchange := self.exchange:
            self.server.give_back(exchange)


# ---- the ladder: rungs 1 to 10 ---------------------------------------------------------------------------------


class Endpoint(BaseHTTPRequestHandler, Exchange):
    """One HTTP request and its answer: on the loop if it is quick, else on a worker.

    The loop has found its octets whole (rung 1, framing and sizes: `Inbox`), and reads on while it is answered.
    """

    server: HttpServer

    def __init__(self, connection: Connection, head: headers.Head = headers.NO_HEAD, body: bytes = b"") -> None:
        Exchange.__init__(self)
        self.client, self.server, self.outbox = connection, connection.server, connection.outbox
        self.head, self.body, self.close_connection = head, body, head.last
        self.writer = sse.ResponseWriter(head.version)
        if self.server.wire and head.octets:
            self.server.wire.show("-->", self, head.octets.decode("latin-1") + "\n" + body.decode("utf-8", "replace"))

    def handle_one_request(self) -> None:
        """Answers it. Whatever refuses it is an answer too."""
        try:
            (self.do_POST if self.head.verb == "POST" else self.do_other)()
        except (Rejection, Refused, HeaderMismatch) as refusal:
            self.send_rejection(rejection_for(refusal))

    def do_POST(self) -> None:
        """The MCP endpoint: one message in, one answer out; the first check that fails is the answer."""
        user = self.check_head()  # 2 to 7: origin, path, verb, media types, user
        message = parse_message(self.body)  # 8 and 9: one JSON-RPC request or notification
        if "id" not in message:
            self.send_accepted(message)  # 10
        elif answer := respond(self.server.mcp, message, self, user, self.head.fields):  # 11 to 18
            self.send_answer_to_request(answer)
        elif self.parked:
            self.head, self.body = headers.NO_HEAD, b""  # of a subscription's request nothing is kept
        else:
            self.close_connection = True  # the client is gone
            if self.server.wire:
                self.server.wire.show("--x", self, f"{self.reason}: request {message['id']!r} is cancelled")

    def do_other(self) -> None:
        """No message: a browser's preflight, a health probe, or a refusal that says what to do instead."""
        self.check_head()
        if self.head.verb == "OPTIONS":
            self.send_answer(204, fields=headers.preflight_lines(self.head.fields))
        else:
            self.send_answer(200, b"ok\n", "text/plain")

    def is_quick(self) -> bool:
        """Whether the loop can answer it, judged as a gateway would: by the mirrored headers, which must be right."""
        fields = self.head.fields
        method, name = fields.get("mcp-method", [""])[0], fields.get("mcp-name", [None])[0]
        return self.head.verb != "POST" or self.server.mcp.is_quick(method, name)

    def check_head(self) -> str:
        """The user's name. Rejection or Refused when the head alone says that this request is not served."""
        if not self.client.place:
            self.close_connection = True
            raise Rejection(503, "Too many connections", status=503, fields="Retry-After: 1\r\n",
                            rule="rfc9110 §15.6.4")
        return headers.check_head(self.head.octets, self.server.policy)

    def send_accepted(self, message: Json) -> None:
        """202: over HTTP only the closed stream cancels, so a notification changes nothing here."""
        headers.check_notification_headers(self.head.fields, message)
        log(f"{message['method'][:100]} -> 202")
        self.send_answer(202)  # spec: Streamable HTTP › Sending Messages: MUST return 202 Accepted with no body

    def put(self, octets: bytes) -> None:
        """Sends it: all of it, or what is taken without waiting, and the rest by a worker. A lost client cancels."""
        try:
            if self.quick or self.parked:
                self.outbox.put(octets)
            else:
                self.client.send_all(octets)
        except OSError:
            self.outbox.lost = True  # perhaps in the middle of an answer: nothing may come behind it
            self.cancel("stream closed")
        self.quiet_since = time.monotonic()
        if self.server.wire:
            self.server.wire.show("<--", self, sse.without_chunk_sizes(octets))

    def send_answer(self, status: int, body: bytes = b"", media_type: str = "", fields: str = "") -> None:
        """A whole answer in one write."""
        with self.lock:
            self.over = True
            fields = self.common_lines() + (f"Content-Type: {media_type}\r\n" if media_type else "") + fields
            self.put(self.writer.answer(STATUS_LINES[status], fields, body, bodiless=self.head.verb == "HEAD"))

    def common_lines(self) -> str:
        """Every answer's field lines, all built here; the one value that is echoed, Origin, has been checked."""
        cors = headers.cors_lines(self.head, self.server.policy) if "origin" in self.head.fields else ""
        close = "Connection: close\r\n" if self.close_connection or self.parked else ""
        return f"Server: mcp-reference-server\r\nDate: {headers.http_date(int(time.time()))}\r\n{cors}{close}"

    def send_rejection(self, rejection: Rejection) -> None:
        """The answer to what got no further than HTTP or JSON; what a browser may show its user is a plain sentence."""
        log(f"{self.head.verb[:50] or '-'} {self.head.path[:200] or '-'} -> {rejection.line()}")
        if rejection.status in (404, 405):
            text, media_type = rejection.message.encode() + b"\n", "text/plain; charset=utf-8"
        else:
            text, media_type = sse.encode_json(rejection.response(rejection.id)), "application/json"
        self.send_answer(rejection.status, text, media_type, rejection.fields)

    def send_answer_to_request(self, answer: Answer) -> None:
        """A request's last message: the end of its stream, or the whole answer."""
        if not self.writer.streaming:
            self.send_answer(answer.status, answer.body, "application/json", answer.fields)
        else:
            with self.lock:
                self.over = True
                self.put(self.writer.piece(sse.frame_event(answer.body), last=True))

    # the exchange: events, comments, and the life of a subscription

    def send_message(self, text: bytes) -> None:
        """One event."""
        self.send_piece(sse.frame_event(text))

    def send_comment(self) -> None:
        """What keeps a quiet stream open."""
        self.send_piece(sse.KEEP_ALIVE)

    def send_piece(self, octets: bytes) -> None:
        """Some of a stream; the first piece turns the answer into one."""
        streaming, writer = self.writer.streaming, self.writer
        self.put(writer.piece(octets) if streaming else writer.first_piece(self.common_lines(), octets))

    def comment_due(self) -> float:
        """Seconds until the stream has been quiet for one keep-alive interval."""
        return max(0.0, self.quiet_since + self.server.keep_alive - time.monotonic())

    def end(self, result: bytes | None) -> None:
        """Ends a subscription: with its result, or None: by cutting the stream. The connection goes to the loop."""
        with self.lock:
            if not self.over:
                self.over = True
                if result is not None and not self.reason:
                    self.put(self.writer.piece(sse.frame_event(result), last=True))
        self.server.give_back(self)


def parse_message(octets: bytes) -> Json:
    """One JSON-RPC request or notification. Rejection -32700 for what is no JSON, -32600 for anything else."""
    try:
        message: Json = sse.decode_json(octets)
    except ValueError as broken:
        hint = " (is $META empty? source tests/lessons/mcp.sh)" if b",}" in octets else ""
        raise Rejection(PARSE_ERROR, f"This is no JSON text: {broken}{hint}", rule="Overview › Messages") from None
    problem, rule = check_shape(message), "Overview › Requests"
    message_id = message.get("id") if isinstance(message, dict) else None
    if isinstance(message, dict) and ("result" in message or "error" in message):
        problem, rule = (" is a response: a server sends none here, so there is none to answer; POST only requests and"
                         " notifications"), "Streamable HTTP › Sending Messages"
    elif not problem and "id" in message and type(message_id) not in (str, int):
        problem = ".id must be a string or an integer"
    if problem:
        raise Rejection(INVALID_REQUEST, f"The message{problem}", rule=rule,
                        message_id=message_id if type(message_id) in (str, int) else None)
    return message


# ---- the ladder: rungs 11 to 18 --------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A response, ready to send: HTTP status, JSON text, further field lines."""

    status: int
    body: bytes
    fields: str = ""


def respond(server: Server, message: Json, exchange: Exchange, user: str,
            fields: Fields | None = None) -> Answer | None:
    """The answer to one request, whatever happens; None when nobody waits for it, or when it is a subscription's,
    which comes later. `fields`: over HTTP."""
    request, exchange.thread = None, threading.get_ident()
    try:
        request = open_request(server, message, exchange, user, fields)  # 11 to 17
        result = server.methods[request.method](request)  # 18
        if result is None:
            return None
        result = server.complete_result(request, result)
        answer = Answer(200, sse.encode_json({"jsonrpc": "2.0", "id": request.id, "result": result}))
        if exchange.reason and exchange.heeded:
            raise Cancelled(exchange.reason)
        outcome = result["resultType"] + ", isError" * bool(result.get("isError"))
    except BaseException as problem:  # a tool may raise anything; its client gets an answer all the same
        if isinstance(problem, Cancelled) and exchange.reason:
            exchange.over = True
            log(f"{cancelled_line(request)} ({problem})")
            return None
        rejection = rejection_for(problem)
        if message["method"] == "initialize":
            # spec: Versioning and Compatibility › Backward Compatibility with Initialization-Based Versions:
            # SHOULD name the supported versions in any error returned to initialize
            rejection.message = (f"This server speaks MCP {SUPPORTED_VERSIONS[0]}, which has no initialize: every"
                                 f" request carries its metadata, server/discover tells the rest. {rejection.message}")
        answer = Answer(rejection.status, sse.encode_json(rejection.response(message["id"])), rejection.fields)
        outcome = rejection.line()
    log(f"{request_line(message, user)} -> {outcome}")
    return answer


def open_request(server: Server, message: Json, exchange: Exchange, user: str, fields: Fields | None) -> Request:
    """Rungs 11 to 17, and the shape of the params."""
    method, params = message["method"], message.get("params", {})
    fields = fields if server.compares_headers else None
    if fields is not None:
        header_version = headers.check_method_header(fields, method)  # 11
    if problem := check_metadata(params.get("_meta")):  # 12
        needed = (f" is required, with the members {META}protocolVersion (a string, {SUPPORTED_VERSIONS[0]!r}) and"
                  f" {META}clientCapabilities (an object); with the curl helper, `source` it first: $META is empty")
        raise Rejection(INVALID_PARAMS, f"params._meta{problem if '_meta' in params else needed}", status=400,
                        rule="Overview › _meta")
    version = params["_meta"][VERSION_KEY]
    if fields is not None:
        headers.check_version_header(header_version, version)  # 13
    if version not in SUPPORTED_VERSIONS:  # 14
        raise Rejection(UNSUPPORTED_VERSION, f"Unsupported version: this server speaks MCP {SUPPORTED_VERSIONS[0]}",
                        {"supported": SUPPORTED_VERSIONS, "requested": version},
                        rule="Versioning and Compatibility › Protocol Version Negotiation")
    if not server.offers(method):  # 15
        raise Rejection(METHOD_NOT_FOUND, f"Unknown method: {method[:100]}",
                        rule="Streamable HTTP › Protocol Version Header")
    if fields is not None:
        headers.check_name_header(fields, method, params)  # 16
    request = Request(message, exchange, user)
    if method.startswith("tasks/"):  # 17
        # spec: Tasks Extension › Protocol Errors: MUST return -32021 to clients that do not declare the extension
        request.require(NEEDS_TASKS)
    if fields is not None and method == "tools/call" and (tool := server.tools.get(params["name"])) and tool.mirrored:
        headers.check_parameter_headers(fields, params.get("arguments", {}), tool.mirrored)
    if (sealed := params.get("requestState")) is not None and method in server.named:
        # spec: Multi Round-Trip Requests › Supported Requests: these are the ones that may ask
        request.state = server.unseal(request, sealed)
    if method in check_params and (problem := check_params[method](params)):
        raise Rejection(INVALID_PARAMS, f"params{problem}", rule="Overview › Requests")
    return request


def rejection_for(problem: BaseException) -> Rejection:
    """What a client is told of an exception: all of a rejection, nothing of a fault of this server's."""
    if isinstance(problem, Rejection):
        try:
            sse.encode_json(problem.error())
            return problem
        except Exception as unsayable:  # an author's data
            problem = unsayable
    if isinstance(problem, Refused):
        return Rejection(None, str(problem), status=problem.status, fields=problem.fields, rule=problem.rule)
    if isinstance(problem, HeaderMismatch):
        return Rejection(HEADER_MISMATCH, f"Header mismatch: {problem}", rule=problem.rule)
    if isinstance(problem, StoreTrouble):
        log(f"the state cannot be used: {problem}")
        return Rejection(INTERNAL_ERROR, "The server cannot reach its state at the moment",
                         rule="Overview › Error Codes")
    log_fault(problem)
    # choice: no more than that, because what went wrong here is no client's business
    return Rejection(INTERNAL_ERROR, "Internal error", rule="Overview › Error Codes")


def request_line(message: Json, user: str) -> str:
    """The log's words for a request: method, name, user, id, trace."""
    method, params = message["method"], message.get("params", {})
    name, meta = params.get(headers.NAME_SOURCE.get(method)), params.get("_meta")
    trace = meta.get("traceparent") if isinstance(meta, dict) else None
    return (f"{method[:100]}{f' {name}'[:200] if name else ''} user={user[:100]} id={message['id']!r:.100}"
            f"{f' traceparent={trace}'[:100] if trace else ''}")


def cancelled_line(request: Request | None) -> str:
    """The log's words for a request that nobody waits for: a tool's step is the one that was in progress."""
    if request and request.method == "tools/call":
        return f"{request.params['name']} cancelled at step {math.floor(request.done) + 1}"
    return f"{request.method if request else 'a request'} ended"


# ---- what a tool sees ------------------------------------------------------------------------------------------


class Request:
    """Everything that the server may know while it answers one request, and the verbs of a tool that takes time.

    Whoever sees the client go sets `cancelled`, from any thread: the loop (HTTP), the stdio reader, shutdown, a write
    that failed. Everything else belongs to the thread that runs the method.
    """

    reported: float | None = None  # the highest progress so far
    state: Any = None  # what `input_required(state=…)` sealed in the round before

    def __init__(self, message: Json, exchange: Exchange, user: str) -> None:
        self.id, self.method, self.params = message["id"], message["method"], message.get("params", {})
        self.meta: Json = self.params.get("_meta", {})
        self.capabilities: Json = self.meta.get(CAPABILITIES_KEY, {})
        self.exchange, self.user = exchange, user
        self.responses: Json = self.params.get("inputResponses") or {}  # of a retry; in a task, all answers so far
        self.asked: Json = {}  # the schemas of the forms that were asked for in that round
        self.held: Json = {}  # by method: the notification that came too fast to be sent

    @property
    def cancelled(self) -> threading.Event:
        """Set as soon as the client is gone."""
        self.exchange.heeded = True
        return self.exchange.cancelled

    @property
    def reason(self) -> str | None:
        """Why it was cancelled."""
        return self.exchange.reason

    @property
    def done(self) -> float:
        """The progress reported so far; in a task, by the runs before this one too: go on after it."""
        return self.reported or 0

    def emit(self, message: Json) -> None:
        """One notification ahead of the response, if anybody still listens; else Cancelled, and the tool ends."""
        self.exchange.heeded = True
        self.exchange.emit(message)

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Reports progress; a value that does not increase is dropped."""
        # spec: Progress › Progress Flow: the progress value MUST increase with each notification
        if math.isfinite(done) and (self.reported is None or done > self.reported):
            self.reported = done
            self.report(done, total, message)

    def report(self, done: float, total: float | None, message: str | None) -> None:
        """Tells a client that asked for it."""
        # spec: Progress › Behavior Requirements: MUST only reference tokens that were provided
        if (token := self.meta.get("progressToken")) is not None:
            params = present(progressToken=token, progress=done, total=total, message=message)
            self.notify("notifications/progress", params)

    # choice: a hundred notifications at once and twenty a second after that, because nobody can use more; of what
    # comes faster, the last one of its kind goes out with the answer.
    pace = functools.cached_property(lambda self: RateLimit(20, 100))

    def notify(self, method: str, params: Json) -> None:
        """Sends a notification about this request, or holds it back when they come too fast."""
        # spec: Progress › Behavior Requirements: SHOULD implement rate limiting to prevent flooding
        self.held.pop(method, None)
        if self.pace.seconds_to_wait(self.user):
            self.held[method] = params
        else:
            self.emit({"method": method, "params": params})

    def release(self) -> None:
        """Before the answer: sends what was held back."""
        held, self.held = self.held, {}
        for method, params in held.items():
            self.emit({"method": method, "params": params})

    def log(self, level: str, data: Any, logger: str = "reference") -> None:
        """A log message on this request's stream, if the request asked for that level. Deprecated by the revision."""
        # spec: Logging › Per-request log level: MUST NOT emit notifications/message without logLevel
        wanted = self.meta.get(LEVEL_KEY)
        if wanted is not None and LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted):
            self.notify("notifications/message", {"level": level, "logger": logger, "data": data})

    def sleep(self, seconds: float) -> None:
        """Returns after that time, or raises Cancelled as soon as the client is gone."""
        self.may_wait()
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            if self.cancelled.wait(min(left, self.exchange.comment_due())):
                raise Cancelled(self.reason)
            if not left:
                return
            self.exchange.keep_alive()

    def may_wait(self) -> None:
        """RuntimeError where a wait would hold up everybody: an author's mistake."""
        if self.exchange.quick:
            raise RuntimeError("this is registered as quick: it may neither wait, nor ask, nor become a task")

    def require(self, capabilities: Json) -> None:
        """Rejects the request unless its client declared these capabilities."""
        # spec: Elicitation › Capabilities: an empty object is equivalent to form mode
        declared = dict(self.capabilities)
        if declared.get("elicitation") == {}:
            declared["elicitation"] = {"form": {}}
        if missing := undeclared(capabilities, declared):
            raise Rejection(MISSING_CAPABILITY, "The client must declare a capability for this",
                            {"requiredCapabilities": missing}, rule="Overview › _meta")

    def declares(self, capabilities: Json) -> bool:
        """Whether its client declared these capabilities."""
        with contextlib.suppress(Rejection):
            self.require(capabilities)
            return True
        return False

    def accepted(self, key: str, question: Json | None = None) -> Json | None:
        """What the user filled in under this key; None if that is missing, or was declined (`responses` tells).

        -32602 for what does not fit the form: the question's, or the one that was asked, as the requestState tells.
        """
        if (response := self.responses.get(key)) is None:
            return None
        schema = question["params"].get("requestedSchema", {}) if question else self.asked.get(key, {})
        filled_in = {} if response.get("content") is None else response["content"]
        missing = isinstance(filled_in, dict) and set(schema.get("required", ())) - filled_in.keys()
        if response.get("action") == "accept" and missing:
            # spec: Multi Round-Trip Requests › Error Handling: SHOULD request again what is missing
            self.responses = {other: one for other, one in self.responses.items() if other != key}
            return None
        check_answer(key, {"method": "elicitation/create", "params": {"requestedSchema": schema}}, response)
        return filled_in if response["action"] == "accept" else None

    def as_task(self, required: bool = False, ttl_ms: int = 3_600_000) -> None:
        """From here on the work outlives the connection.

        For a client that declared the tasks extension this does not return: its answer is a task handle, and the tool's
        function runs again from the top, in a task, where this call does nothing. It runs from the top once more
        whenever there is something to do: a question has been answered, or the process has died. So what it does
        before its first step should be cheap, and each step should be done only if `done` says that it is not yet.
        Other clients wait for the result as before, or get -32021 when the tool cannot do without (`required`).
        """
        self.may_wait()
        # spec: Tasks Extension › Capability Negotiation: MUST NOT return CreateTaskResult to a client without it
        if self.declares(NEEDS_TASKS):
            raise BecomesTask(ttl_ms)
        if required:
            self.require(NEEDS_TASKS)

    def ask(self, requests: Json) -> Json:
        """In a task: the answers to these input requests, which are in `responses` too.

        While one is missing this does not return, and nobody waits: the function unwinds, the client is asked, and the
        function runs again from the top, up to here and on. A key names one question for the life of the task.
        """
        raise RuntimeError("only a task can ask while it runs; return input_required(…) instead")

    def can_ask(self) -> bool:
        """Whether this is a task whose user can be asked while it runs."""
        return False


def check_answer(key: str, asked: Json, answer: Any) -> None:
    """Rejection for an answer that is not what the input request asked for."""
    form = asked["method"] == "elicitation/create"
    problem = (check_elicited if form else check_object)(answer)
    if form and not problem and answer["action"] == "accept":
        content = {} if answer.get("content") is None else answer["content"]
        problem = compile_schema(takes(content=asked["params"].get("requestedSchema", True)))({"content": content})
    if problem:
        raise Rejection(INVALID_PARAMS, f"inputResponses.{key[:100]}{problem}",
                        rule="Multi Round-Trip Requests › Error Handling")


def undeclared(required: Json, declared: Any) -> Json:
    """The part of the required capabilities that a client has not declared."""
    if not isinstance(declared, dict):
        return required
    missing = {name: undeclared(inner, declared.get(name)) for name, inner in required.items()}
    return {name: missing[name] for name in required if missing[name] or not isinstance(declared.get(name), dict)}


def input_required(requests: Json | None, state: Any = None) -> Json:
    """A result that asks the client for input, or (None) only to come again; `state` comes back as `request.state`."""
    return present(resultType="input_required", inputRequests=requests, requestState=state)


def elicit(message: str, properties: Json, required: Iterable[str] | None = None) -> Json:
    """An input request: a form for the user; `required`: the fields that must be filled in, by default all.

    A field's schema is one of those that Elicitation › Requested Schema lists.
    """
    schema = takes() | {"properties": properties, "required": list(properties if required is None else required)}
    return {"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}}


def elicit_url(message: str, url: str) -> Json:
    """An input request: a page for the user to visit, for what must not pass through the client."""
    return {"method": "elicitation/create", "params": {"mode": "url", "message": message, "url": url}}


# ================================================================================================================
# Part 2. What a server offers: the registry of tools, resources, prompts and completions, their schemas, the methods
# that serve them, questions to the user, and subscriptions. Each method stands by itself; skip what you do not need.
# ================================================================================================================

# ---- schemas ---------------------------------------------------------------------------------------------------

Check = Callable[[Any], str | None]
Whole = tuple[Any, dict[str, Check]]  # a schema; checks of members of its $defs, compiled already or just now
NUMBER, STRING, ARRAY, MEMBERS = (int, float), (str,), (list,), (dict,)
TYPES: dict[str, tuple[type, ...]] = {"string": STRING, "boolean": (bool,), "object": MEMBERS, "array": ARRAY,
                                      "null": (type(None),), "number": NUMBER, "integer": (int,)}


def compile_schema(schema: Any, path: str = "the schema", whole: Whole | None = None,
                   behind: tuple[str, ...] = ()) -> Check:
    """A function that finds the first way in which a JSON value breaks the schema, None if it breaks none.

    What it says is to be put behind the value's name: ".month is required", " must be of type string". ValueError,
    with the place, for what is no schema of JSON Schema 2020-12 or says what is not checked here. `whole`: what the
    schema is a part of; `behind`: members of $defs that lead here with the same value.
    """
    if not isinstance(schema, dict):
        if isinstance(schema, bool):
            return any_kind if schema else (lambda value: " is not known here")
        raise ValueError(f"{path} must be of type object or boolean")
    kinds = schema.get("type", TYPES)
    check_kind = ONE_KIND.get(kinds) if type(kinds) is str else any_kind if kinds is TYPES else None
    if check_kind is None:
        if problem := check_type(kinds):
            raise ValueError(f"{path}.type{problem}")
        check_kind = check_kinds(*kinds)
    if len(schema) == 1 and kinds is not TYPES:  # most members
        return check_kind
    used, whole = {}, whole or (schema, {})  # one function may see to several keywords
    for keyword, argument in schema.items():
        try:
            passing, check_argument, make = KEYWORDS[keyword]
        except KeyError:
            if keyword == "$id" and schema is whole[0]:  # which a part of a schema may not have
                continue
            raise ValueError(f"{path}.{keyword} is not known here (see checks_own_arguments)") from None
        if type(argument) not in passing and (problem := check_argument(argument)):
            raise ValueError(f"{path}.{keyword}{problem}")
        if make:
            used[make] = argument
    check = None
    for make, argument in used.items():
        if one := make(argument, path, schema, whole, behind):
            check = both(check, one) if check else one
    if check is None or check_kind is any_kind:
        return check or check_kind
    passing = PASSING[check_kind]
    return lambda value: check(value) if type(value) in passing else check_kind(value) or check(value)


def both(first: Check, second: Check) -> Check:
    """One check of two."""
    return lambda value: first(value) or second(value)


PASSING: dict[Check, Collection[type]] = {}  # of a check of the type alone: types that pass unasked


@functools.cache  # a type is all that most members must have
def check_kinds(*kinds: str) -> Check:
    """`type`, with which all begins."""
    types, problem = {one for kind in kinds for one in TYPES[kind]}, f" must be of type {' or '.join(kinds)}"

    def check(value: Any) -> str | None:
        fits = type(value) in types or ("integer" in kinds and type(value) is float and value.is_integer())
        return None if fits else problem  # to JSON Schema 42.0 is an integer

    PASSING[check] = types
    return check


def limit(schema: Json, types: tuple[type, ...], breaks: Callable[[Any, Any], Any], words: str) -> Row:
    """A keyword that compares the value with its argument."""

    def make(argument: Any, *place: Any) -> Check:
        problem = f" must {words.format(argument)}"
        return lambda value: problem if type(value) in types and breaks(value, argument) else None

    return schema, make


def combination(keyword: str, schema: Any, enough: Callable[[int, int], bool], words: str) -> Row:
    """A keyword about how many of its schemas the value fits: `enough(these, all)`."""

    def make(argument: Any, path: str, schema: Json, *around: Any) -> Check:
        parts = {"": argument} if keyword == "not" else {f"[{index}]": one for index, one in enumerate(argument)}
        checks = [compile_schema(one, f"{path}.{keyword}{step}", *around) for step, one in parts.items()]

        def check(value: Any) -> str | None:
            problems = [problem for one in checks if (problem := one(value))]
            if enough(len(checks) - len(problems), len(checks)):
                return None
            reasons = f" ({';'.join(problems).strip()})" if problems else ""
            return problems[0] if keyword == "allOf" else f" must fit {words}{reasons}"

        return check

    return schema, make


def check_enum(values: list[Any], *place: Any) -> Check:
    """`enum`, or `const`."""
    problem = f" must be one of {json.dumps(values)[1:-1]}"
    texts = {one for one in values if type(one) is str}
    others = {sse.canonical(one) for one in values if type(one) is not str}
    return lambda value: None if (value in texts if type(value) is str else sse.canonical(value) in others) else problem


def check_multiple(step: float, *place: Any) -> Check:
    """`multipleOf`, in decimal digits as they are written: 0.0075 is a multiple of 0.0001."""
    from fractions import Fraction  # here, because few schemas need it and every start would wait for it

    exact, problem = Fraction(str(step)), f" must be a multiple of {step}"
    return lambda value: problem if type(value) in NUMBER and Fraction(str(value)) % exact else None


def check_pattern(pattern: str, path: str, *place: Any) -> Check:
    """As `re` has it, but for ECMA-262's `$`, the very end of the text, and `\\d`, an ASCII digit."""
    try:
        python = re.sub(r"(\\.|\[\^?]?(?:\\.|[^]\\])*])|\$", lambda part: part[1] or r"\Z", pattern, flags=re.DOTALL)
        search = re.compile(python, re.ASCII).search
    except re.error as problem:
        raise ValueError(f"{path}.pattern: {problem}") from None
    return lambda value: f" must match the pattern {pattern}" if type(value) is str and not search(value) else None


def check_members(argument: Any, path: str, schema: Json, whole: Whole, behind: Any) -> Check:
    """`required`, `propertyNames`, `properties`, and `additionalProperties` for the others."""
    required, properties = schema.get("required", ()), schema.get("properties", {})
    if len({name for name in required if type(name) is str}) < len(required):
        raise ValueError(f"{path}.required{check_names(required)}")
    check_name, others, members = any_kind, WHATEVER, {}
    if "propertyNames" in schema:
        check_name = compile_schema(schema["propertyNames"], f"{path}.propertyNames", whole)
    if "additionalProperties" in schema:
        one = compile_schema(schema["additionalProperties"], f"{path}.additionalProperties", whole)
        others = PASSING.get(one, ()), one
    for name, inner in properties.items():
        one = compile_schema(inner, f"{path}.properties.{name}", whole)
        members[name] = PASSING.get(one, ()), one

    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return None
        for name in required:
            if name not in value:
                return f".{name} is required"
        for name, inner in value.items():
            passing, check_inner = members.get(name, others)
            if type(inner) not in passing and (problem := check_inner(inner)):
                return f".{name[:100]}{problem}"
        if check_name is not any_kind:
            for name in value:
                if problem := check_name(name):
                    return f".{name[:100]}{problem}"
        return None

    return check


def check_items(argument: Any, path: str, schema: Json, whole: Whole, behind: Any) -> Check:
    """`prefixItems`, and `items` for those behind them."""
    check_other = compile_schema(schema.get("items", True), f"{path}.items", whole)
    first = [compile_schema(one, f"{path}.prefixItems[{index}]", whole)
             for index, one in enumerate(schema.get("prefixItems", ()))]
    passing = () if first else PASSING.get(check_other, ())

    def check(value: Any) -> str | None:
        for index, item in enumerate(value if type(value) is list else ()):
            if type(item) not in passing and (problem := (first[index] if index < len(first) else check_other)(item)):
                return f"[{index}]{problem}"
        return None

    return check


def check_reference(pointer: str, path: str, schema: Json, whole: Whole, behind: tuple[str, ...]) -> Check:
    """`$ref` to a member of the whole schema's $defs; with the same value it must not come back."""
    start, _, last = pointer.rpartition("/")
    name, definitions, known = unquote(last).replace("~1", "/").replace("~0", "~"), whole[0].get("$defs", {}), whole[1]
    if start != "#/$defs" or name not in definitions:
        raise ValueError(f"{path}.$ref: {pointer} is no member of $defs (see checks_own_arguments)")
    if name in behind:
        raise ValueError(f"{path}.$ref: {pointer} returns to itself without descending into the value")
    target = definitions[name], f"$defs.{name}", whole, (*behind, name)
    if behind:
        return compile_schema(*target)
    if name not in known:
        known[name] = check_kinds(*TYPES)  # until it is compiled
        known[name] = compile_schema(*target)
    return lambda value: known[name](value)


def check_nothing(argument: Any, path: str, schema: Json, whole: Whole, behind: Any) -> None:
    """`$defs` and `contentSchema`: what they hold has to be a schema, but no value is checked by it here."""
    for name, one in schema.get("$defs", {}).items():
        compile_schema(one, f"{path}.$defs.{name}", whole)
    compile_schema(schema.get("contentSchema", True), f"{path}.contentSchema", whole)


OF_TYPE: dict[str, Json] = {kind: {"type": kind} for kind in TYPES}
TEXT, BOOLEAN, OBJECT, LIST, _, SOME_NUMBER, WHOLE = OF_TYPE.values()
COUNT, SCHEMA_LIST = WHOLE | {"minimum": 0}, LIST | {"minItems": 1}
TEXTS, TEXT_LIST = OBJECT | {"additionalProperties": TEXT}, LIST | {"items": TEXT}
Row = tuple[Any, Callable[..., Any] | None]
# A keyword: the schema of its argument (if that is a schema, it is judged as it is compiled), what makes its check.
COUNTED = ("Length", STRING, "characters"), ("Items", ARRAY, "items"), ("Properties", MEMBERS, "members")
ROWS: dict[str, Row] = {
    "minimum": limit(SOME_NUMBER, NUMBER, operator.lt, "be at least {}"),
    "maximum": limit(SOME_NUMBER, NUMBER, operator.gt, "be at most {}"),
    "exclusiveMinimum": limit(SOME_NUMBER, NUMBER, operator.le, "be more than {}"),
    "exclusiveMaximum": limit(SOME_NUMBER, NUMBER, operator.ge, "be less than {}"),
    "multipleOf": (SOME_NUMBER | {"exclusiveMinimum": 0}, check_multiple),
    **{"min" + what: limit(COUNT, types, lambda value, least: len(value) < least, f"have at least {{}} {words}")
       for what, types, words in COUNTED},
    **{"max" + what: limit(COUNT, types, lambda value, most: len(value) > most, f"have at most {{}} {words}")
       for what, types, words in COUNTED},
    "enum": (LIST, check_enum), "const": (True, lambda value, *place: check_enum([value])),
    "pattern": (TEXT, check_pattern),
    "uniqueItems": limit(BOOLEAN, ARRAY, lambda items, wanted: wanted and len(set(map(sse.canonical, items))) <
                         len(items), "have no two equal items"),
    "prefixItems": (SCHEMA_LIST, check_items), "items": (True, check_items),
    "required": (LIST, check_members), "properties": (OBJECT, check_members),
    "propertyNames": (True, check_members), "additionalProperties": (True, check_members),
    "allOf": combination("allOf", SCHEMA_LIST, lambda fit, count: fit == count, "all"),
    "anyOf": combination("anyOf", SCHEMA_LIST, lambda fit, count: fit > 0, "one of anyOf"),
    "oneOf": combination("oneOf", SCHEMA_LIST, lambda fit, count: fit == 1, "exactly one of oneOf"),
    "not": combination("not", True, lambda fit, count: fit == 0, "none of not"),
    "$ref": (TEXT, check_reference), "$defs": (OBJECT, check_nothing), "contentSchema": (True, check_nothing),
    # what promises nothing, so that there is nothing to check
    **dict.fromkeys(("title", "description", "$comment", "$anchor", "format", "contentMediaType", "contentEncoding"),
                    (TEXT, None)), "default": (True, None), "examples": (LIST, None), "x-mcp-header": (True, None),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly"), (BOOLEAN, None)),
    "$schema": ({"const": "https://json-schema.org/draft/2020-12/schema"}, None),
}
TYPE: Json = {"enum": list(TYPES)}
any_kind = check_kinds(*TYPES)  # of a schema that leaves it to its keywords
ONE_KIND = {kind: check_kinds(kind) for kind in TYPES}  # what most members have
WHATEVER = PASSING[any_kind], any_kind
# The types of arguments that pass unasked, the check of the others, what makes the keyword's check. What a row's schema
# says must be a row above it; `type` is the first.
KEYWORDS: dict[str, tuple[Collection[type], Check, Callable[..., Check | None] | None]] = {"type": (*WHATEVER, None)}
for keyword, (argument_schema, maker) in ROWS.items():
    check_argument = compile_schema(argument_schema, keyword)
    KEYWORDS[keyword] = PASSING.get(check_argument, ()), check_argument, maker
check_type = compile_schema({"anyOf": [TYPE, LIST | {"items": TYPE, "minItems": 1, "uniqueItems": True}]})
check_names = compile_schema(TEXT_LIST | {"uniqueItems": True})


def takes(optional: Json | None = None, /, **required: Json) -> Json:
    """The schema of an object with these properties."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


OBJECTS = OBJECT | {"additionalProperties": OBJECT}
check_object = compile_schema(OBJECT)
check_shape = compile_schema(takes({"params": OBJECT}, jsonrpc={"enum": ["2.0"]}, method=TEXT))
# Capabilities are an open set, and what the schema does not name may be of any type.
CAPABILITIES = takes(dict.fromkeys(("elicitation", "sampling", "roots"), OBJECT)
                     | dict.fromkeys(("extensions", "experimental"), OBJECTS))
check_metadata = compile_schema(takes(
    {META + "clientInfo": takes(name=TEXT, version=TEXT), LEVEL_KEY: {"enum": list(LOG_LEVELS)},
     "progressToken": {"type": ["string", "integer"]}}, **{VERSION_KEY: TEXT, CAPABILITIES_KEY: CAPABILITIES}))
# choice: null counts as absent in what a client merely echoes, because client libraries send it so.
ECHOED: Json = {"inputResponses": OBJECTS | {"type": ["object", "null"]}, "requestState": {"type": ["string", "null"]}}
check_params = {method: compile_schema(schema) for method, schema in {
    "tools/call": takes({"arguments": OBJECT} | ECHOED, name=TEXT),
    "prompts/get": takes({"arguments": TEXTS} | ECHOED, name=TEXT), "resources/read": takes(ECHOED, uri=TEXT),
    "completion/complete": takes({"context": takes({"arguments": TEXTS})}, argument=takes(name=TEXT, value=TEXT),
                                 ref=takes({"name": TEXT, "uri": TEXT}, type={"enum": ["ref/prompt", "ref/resource"]})),
    "subscriptions/listen": takes(notifications=takes({
        "toolsListChanged": BOOLEAN, "promptsListChanged": BOOLEAN, "resourcesListChanged": BOOLEAN,
        "resourceSubscriptions": TEXT_LIST, "taskIds": TEXT_LIST})),
    "tasks/get": takes(taskId=TEXT), "tasks/update": takes(taskId=TEXT, inputResponses=OBJECT),
    "tasks/cancel": takes(taskId=TEXT)}.items()}
WAITING = ("tasks/update", "tasks/cancel", "completion/complete")  # they write, or call an author's function
check_elicited = compile_schema(takes({"content": {"type": ["object", "null"]}},
                                      action={"enum": ["accept", "decline", "cancel"]}))

# What the author of a tool, a prompt or a resource hands over, by what it is called; a breach is the author's fault.
LETTERS = r"A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-"
URI = TEXT | {"pattern": rf"^[A-Za-z][A-Za-z0-9+.-]*:([{LETTERS}]|%[0-9A-Fa-f]{{2}})*$"}  # rfc3986 §2, §3.1
BASE64 = TEXT | {"pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}
CONTENTS = takes({"text": TEXT, "blob": BASE64}, uri=URI)
BLOCKS = [takes(type={"const": kind}, **members) for kind, members in {
    "text": {"text": TEXT}, "image": {"data": BASE64, "mimeType": TEXT}, "audio": {"data": BASE64, "mimeType": TEXT},
    "resource_link": {"uri": URI, "name": TEXT}, "resource": {"resource": CONTENTS}}.items()]
SAID = {"anyOf": [*BLOCKS, takes(type={"enum": ["tool_use", "tool_result"]})]}  # to a model, or by it
ROLE = {"enum": ["user", "assistant"]}
OPTIONS = LIST | {"items": takes(const=TEXT, title=TEXT)}
FIELDS: dict[str, Json] = {  # of a form; spec: Elicitation › Requested Schema
    **dict.fromkeys(("number", "integer"), dict.fromkeys(("minimum", "maximum", "default"), SOME_NUMBER)),
    "string": {"minLength": COUNT, "maxLength": COUNT, "format": {"enum": ["email", "uri", "date", "date-time"]},
               "enum": TEXT_LIST, "oneOf": OPTIONS, "default": TEXT},
    "boolean": {"default": BOOLEAN},
    "array": {"minItems": COUNT, "maxItems": COUNT, "default": TEXT_LIST, "items": {"anyOf": [
        takes(enum=TEXT_LIST, type={"const": "string"}), takes(anyOf=OPTIONS)]}},
}
FIELD = {"anyOf": [takes({"title": TEXT, "description": TEXT} | members, type={"const": kind}) | {
    "required": ["type", "items"] if kind == "array" else ["type"], "additionalProperties": False}
    for kind, members in FIELDS.items()]}
FORM = takes({"required": TEXT_LIST, "$schema": TEXT}, type={"const": "object"},
             properties=OBJECT | {"additionalProperties": FIELD}) | {"additionalProperties": False}
check_authored = {kind: compile_schema(schema) for kind, schema in {
    "uri": URI, "roots/list": OBJECT, "content": LIST | {"items": {"anyOf": BLOCKS}},
    "messages": LIST | {"items": takes(role=ROLE, content={"anyOf": BLOCKS})}, "contents": LIST | {"items": CONTENTS},
    "form": takes(message=TEXT, requestedSchema=FORM),
    "url": takes(message=TEXT, url={"allOf": [URI, {"pattern": "^[^:]+://[^/?#]"}]}),
    "sampling/createMessage": takes(maxTokens={"type": "integer"}, messages=LIST | {"items": takes(
        role=ROLE, content={"anyOf": [SAID, LIST | {"items": SAID}]})}),
}.items()}


# ---- the registry ----------------------------------------------------------------------------------------------

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


class Entry(NamedTuple):
    """What is registered: as it is listed, its function; a resource's caching hints; the rest is a tool's."""

    definition: Json
    function: Function
    quick: bool  # answered where requests are read: it takes no time, and waits for nothing
    hints: Json
    mirrored: Sequence[headers.MirroredParameter] = ()
    check_arguments: Check = check_object
    check_output: Check | None = None  # None: no output schema
    switchable: bool = False  # it can be listed and unlisted while the server runs


class Server:
    """What one MCP server offers and how it answers; a transport calls `start`, `respond` and `stop`.

    `page_size`: resources on one page of their list; None: all. `rate`: calls a second and burst, for each user.
    `changing`: the lists whose changes can be subscribed to.
    """

    compares_headers = True  # False, in tests only: shows what a gateway that trusts the headers lets through

    def __init__(self, name: str, version: str, instructions: str = "", page_size: int | None = None,
                 store: Store | None = None, rate: tuple[float, float] | None = None, *, title: str | None = None,
                 icons: list[Json] | None = None, changing: Iterable[str] = ("tools", "prompts", "resources")) -> None:
        self.info = present(name=name, title=title, version=version, icons=icons)
        self.result_meta = {META + "serverInfo": self.info}
        self.instructions, self.changing = instructions, frozenset(changing)
        self.page_sizes: dict[str, int | None] = {"resources": page_size, "resourceTemplates": page_size}
        self.store, self.rate = store or Store(), RateLimit(*rate) if rate else None
        self.tools: dict[str, Entry] = {}
        self.resources: dict[str, Entry] = {}
        self.templates: dict[str, Entry] = {}
        self.prompts: dict[str, Entry] = {}
        self.completions: dict[tuple[str, str, str], Entry] = {}
        self.named = {"tools/call": self.tools, "prompts/get": self.prompts, "resources/read": self.resources}
        self.tables: dict[str, tuple[Any, ...]] = {
            "tools": (self.tools,), "prompts": (self.prompts,), "resources": (self.resources, self.templates),
            "completion": (self.completions,)}
        self.lists = {"tools/list": ("tools", self.tools), "prompts/list": ("prompts", self.prompts),
                      "resources/list": ("resources", self.resources),
                      "resources/templates/list": ("resourceTemplates", self.templates)}
        self.subscriptions, self.tasks = Subscriptions(self), Tasks(self)
        self.stopped = threading.Event()
        self.keeper = threading.Thread(target=self.keep, name="keeper", daemon=True)
        self.methods: dict[str, Callable[[Request], Json | None]] = {  # None: the answer comes later, by `end`
            "server/discover": self.discover, **dict.fromkeys(self.lists, self.page), "tools/call": self.call_tool,
            "resources/read": self.read_resource, "prompts/get": self.get_prompt, "completion/complete": self.complete,
            "subscriptions/listen": self.subscriptions.listen, "tasks/get": self.tasks.get,
            "tasks/update": self.tasks.update, "tasks/cancel": self.tasks.cancel}

    # What a server is built from; each is a decorator. `quick`: it neither waits nor computes for long, so that it is
    # answered where requests are read; what touches the state is not quick.

    def tool(self, name: str, description: str, input_schema: Json, *, title: str | None = None,
             icons: list[Json] | None = None, output_schema: Json | None = None, annotations: Json | None = None,
             listed: bool = True, checks_own_arguments: bool = False, quick: bool = False) -> Decorator:
        """Registers `function(arguments, request) -> text or result`. ValueError for a schema that breaks the rules."""
        mirrored = headers.mirrored_parameters(input_schema)
        if input_schema.get("type") != "object":
            raise ValueError(f"{name}'s inputSchema must be of type object")
        check_arguments, check_output = (
            None if schema is None else compile_schema(checks_own_arguments or schema, f"{name}'s {which}putSchema")
            for which, schema in (("in", input_schema), ("out", output_schema)))
        definition = present(name=name, title=title, description=description, icons=icons, inputSchema=input_schema,
                             outputSchema=output_schema, annotations=annotations)
        if not listed:
            self.store.execute("INSERT OR IGNORE INTO settings VALUES (?, 'no')", f"listed {name}")
        return register_in(self.tools, name, definition, quick, {}, mirrored, check_arguments, check_output, not listed)

    def resource(self, uri: str, name: str, *, title: str | None = None, description: str | None = None,
                 icons: list[Json] | None = None, mime_type: str = "text/plain", cache_scope: str = "public",
                 ttl_ms: int = 60_000, quick: bool = False) -> Decorator:
        """Registers `function(uri, request) -> text, bytes, a list of contents, or None: there is no such resource`."""
        check_authored_as("uri", uri)
        definition = present(uri=uri, name=name, title=title, description=description, icons=icons, mimeType=mime_type)
        return register_in(self.resources, uri, definition, quick, cacheable(ttl_ms, cache_scope))

    def resource_template(self, template: str, name: str, *, title: str | None = None, description: str | None = None,
                          icons: list[Json] | None = None, mime_type: str = "text/plain", cache_scope: str = "public",
                          ttl_ms: int = 60_000, quick: bool = False) -> Decorator:
        """Registers `function(uri, values, request)`, as for `resource`; `{name}` stands for (part of) one segment."""
        # choice: of RFC 6570 level 1 alone, because what the other operators write cannot be read back for certain.
        check_authored_as("uri", re.sub(VARIABLE, "%00", template))
        if len(names := re.findall(VARIABLE, template)) > len(set(names)):
            raise ValueError(f"{template} has a variable twice")
        definition = present(uriTemplate=template, name=name, title=title, description=description, icons=icons,
                             mimeType=mime_type)
        return register_in(self.templates, template, definition, quick, cacheable(ttl_ms, cache_scope))

    def prompt(self, name: str, description: str, arguments: Iterable[Json] = (), *, title: str | None = None,
               icons: list[Json] | None = None, quick: bool = False) -> Decorator:
        """Registers `function(arguments, request) -> text, or a list of messages`."""
        definition = present(name=name, title=title, description=description, icons=icons, arguments=list(arguments))
        return register_in(self.prompts, name, definition, quick)

    def completion(self, kind: str, name: str, argument: str, *, quick: bool = False) -> Decorator:
        """Registers `function(value, context, request) -> all matches, best first`; kind: ref/prompt, ref/resource."""
        return register_in(self.completions, (kind, name, argument), {}, quick)

    def list_changed(self, kind: str) -> None:
        """Tells subscribers that the list of tools, prompts or resources has changed."""
        self.store.tell(kind)

    def resource_updated(self, uri: str) -> None:
        """Tells the subscribers of this resource that it has changed."""
        self.store.tell("resource", uri)

    def set_listed(self, name: str, listed: bool) -> None:
        """Lists or unlists a tool that was registered with `listed=False`, on every instance."""
        with self.store.transaction():
            self.store.execute("UPDATE settings SET value = ? WHERE name = ?", "yes" if listed else "no",
                               f"listed {name}")
            self.list_changed("tools")

    def is_listed(self, tool: Entry) -> bool:
        """Whether clients can see and call the tool at this moment."""
        question = "SELECT 1 FROM settings WHERE name = ? AND value = 'yes'"
        return not tool.switchable or self.store.read(question, f"listed {tool.definition['name']}") != []

    # ---- its life

    def start(self) -> None:
        """Begins the housekeeping."""
        if not self.compares_headers:
            log("WARNING: this server does not compare the headers with the body: anyone can walk past a gateway")
        self.store.committed.set()
        self.keeper.start()

    def keep(self) -> None:
        """The keeper's loop, which a commit wakes. It survives whatever happens, and says so when it begins."""
        said: set[str] = set()
        again, next_sweep = True, 0.0
        while not self.stopped.is_set():
            if woken := self.store.committed.wait(max(0.001, next_sweep - time.monotonic())):
                self.store.committed.clear()  # before the rows are read: what comes after it wakes again
            duties = []
            if woken or again or self.store.has_changed():
                duties += [self.subscriptions.deliver, self.tasks.take_up]
            if time.monotonic() >= next_sweep:
                duties += [self.subscriptions.comment, self.tasks.give_up_dead, self.tasks.expire, self.store.purge]
                next_sweep = time.monotonic() + KEEPER_SECONDS
            again = False
            for duty in duties:
                try:
                    duty()
                    said.discard(repr(duty))
                except BaseException as problem:
                    again = True
                    if not isinstance(problem, StoreBusy) and repr(duty) not in said:
                        said.add(repr(duty))
                        rejection_for(problem)  # logs it

    def stop(self) -> None:
        """Ends the housekeeping and leaves running tasks to other instances."""
        self.stopped.set()
        self.store.committed.set()
        self.keeper.join(0.5)
        self.tasks.release()

    # ---- one request

    def is_quick(self, method: str, name: Any = None) -> bool:
        """Whether it is answered at once from memory, judged by method and name (over HTTP: their mirrored headers)."""
        if (table := self.named.get(method)) is None:
            quick = method not in WAITING
        else:
            quick = name in table and table[name].quick
        return quick and self.compares_headers

    def offers(self, method: str) -> bool:
        """Whether there is such a method, and anything registered that it could serve."""
        return method in self.methods and any(self.tables.get(method.partition("/")[0], (True,)))

    def complete_result(self, request: Request, result: Json) -> Json:
        """A result as it is sent: with its type and the server's name; what it asks of the client checked, sealed."""
        if request.held:
            request.release()
        if result.get("resultType") == "input_required":
            wanted = result.get("inputRequests", {})
            for one in wanted.values():
                request.require(capability_for(one))
            if not wanted and "requestState" not in result:
                # spec: Multi Round-Trip Requests › Server Requirements (Basic Workflow): MUST include one of the two
                raise ValueError("input_required without a question and without a state")
            forms = {key: one["params"]["requestedSchema"] for key, one in wanted.items()
                     if "requestedSchema" in one.get("params", {})}
            if forms or "requestState" in result:
                result = result | {"requestState": self.seal(request, result.get("requestState"), forms)}
        meta = self.result_meta | result["_meta"] if "_meta" in result else self.result_meta
        return {"resultType": "complete", **result, "_meta": meta}

    # ---- server/discover and the lists

    def discover(self, request: Request) -> Json:
        """server/discover: what this server speaks and offers."""
        changes = {kind: {"listChanged": True} if kind in self.changing else {} for kind in FILTERS}
        capabilities = present(
            logging={}, extensions={TASKS: {}},  # logging is deprecated by this revision, and taught until it is gone
            tools=changes["tools"] if self.tools else None, prompts=changes["prompts"] if self.prompts else None,
            resources=changes["resources"] | {"subscribe": True} if self.offers("resources/read") else None,
            completions={} if self.completions else None)
        about = present(instructions=self.instructions or None)
        return {"supportedVersions": SUPPORTED_VERSIONS, "capabilities": capabilities} | about | cacheable(3_600_000)

    def page(self, request: Request) -> Json:
        """One page of a list, from the cursor on, always in the order of registration."""
        key, table = self.lists[request.method]
        items = [entry.definition for entry in table.values() if key != "tools" or self.is_listed(entry)]
        size = self.page_sizes.get(key) or len(items) or 1
        further = [base64.b64encode(b"after %d" % start).decode() for start in range(size, len(items), size)]
        cursors = [None, *further, None]  # the first page has none, and the last none to follow
        if (cursor := request.params.get("cursor")) not in cursors:
            raise Rejection(INVALID_PARAMS, "This cursor is not valid", rule="Pagination › Error Handling")
        page = cursors.index(cursor)
        return {key: items[page * size :][:size]} | present(nextCursor=cursors[page + 1]) | cacheable(300_000)

    # ---- tools, resources, prompts, completion

    def limit_rate(self, request: Request, rule: str) -> None:
        """Rejection for a user who asks too often."""
        if self.rate and (wait := self.rate.seconds_to_wait(request.user)):
            raise Rejection(429, "Too many calls", status=429, fields=f"Retry-After: {wait}\r\n", rule=rule)

    def call_tool(self, request: Request) -> Json:
        """tools/call: checks the arguments, then runs the tool's function."""
        self.limit_rate(request, "Tools › Security Considerations")
        tool = self.tools.get(request.params["name"])
        if tool is None or not self.is_listed(tool):
            raise Rejection(INVALID_PARAMS, f"Unknown tool: {request.params['name'][:100]}",
                            rule="Tools › Error Handling")
        arguments = request.params.get("arguments", {})
        try:
            problem = tool.check_arguments(arguments)
        except RecursionError:  # a schema may take many steps for each level of a value
            problem = " are nested too deeply"
        if problem:
            return text_result(f"arguments{problem}") | {"isError": True}
        try:
            return run_tool(tool, arguments, request)
        except BecomesTask as task:
            return self.tasks.create(request, task.ttl_ms)

    def find_resource(self, uri: str) -> tuple[Entry, tuple[Any, ...]] | None:
        """The resource or template behind a URI, and the arguments of its function before the request."""
        if entry := self.resources.get(uri):
            return entry, (uri,)
        matches = ((entry, match_template(template, uri)) for template, entry in self.templates.items())
        return next(((entry, (uri, values)) for entry, values in matches if values is not None), None)

    def read_resource(self, request: Request) -> Json:
        """resources/read: the contents behind a URI, or a question first."""
        uri = request.params["uri"]
        found = self.find_resource(uri)
        content = found[0].function(*found[1], request) if found else None
        if found is None or content is None:
            # never an empty `contents` array, which could mean an empty resource
            raise Rejection(INVALID_PARAMS, "Resource not found", {"uri": uri}, rule="Resources › Error Handling")
        if isinstance(content, dict):
            return content
        if not isinstance(content, list):
            body = {"text": content} if isinstance(content, str) else {"blob": base64.b64encode(content).decode()}
            content = [{"uri": uri, "mimeType": found[0].definition["mimeType"]} | body]
        # choice: what somebody answered a question for is nobody else's, and not the same the next time.
        retried = request.params.get("inputResponses") or request.params.get("requestState")
        hints = cacheable(0, "private") if retried else found[0].hints
        return {"contents": check_authored_as("contents", content)} | hints

    def get_prompt(self, request: Request) -> Json:
        """prompts/get: its messages, or a question first."""
        entry, arguments = self.prompts.get(request.params["name"]), request.params.get("arguments", {})
        if entry is None:
            raise Rejection(INVALID_PARAMS, f"Unknown prompt: {request.params['name'][:100]}",
                            rule="Prompts › Error Handling")
        declared = {one["name"]: one.get("required") for one in entry.definition["arguments"]}
        if missing := [name for name, required in declared.items() if required and name not in arguments]:
            raise Rejection(INVALID_PARAMS, f"Missing required argument: {missing[0]}", rule="Prompts › Error Handling")
        check_known(arguments, declared, "Prompts › Security")
        content = entry.function(arguments, request)
        if isinstance(content, dict):
            return content
        if isinstance(content, str):
            content = [{"role": "user", "content": {"type": "text", "text": content}}]
        messages = check_authored_as("messages", content)
        return {"description": entry.definition["description"], "messages": messages}

    def complete(self, request: Request) -> Json:
        """completion/complete: at most 100 values for an argument of a prompt, or for a variable of a template."""
        self.limit_rate(request, "Completion › Security")
        ref, argument = request.params["ref"], request.params["argument"]
        if ref["type"] == "ref/prompt":
            prompt = self.prompts.get(name := ref.get("name", ""))
            known = [one["name"] for one in prompt.definition["arguments"]] if prompt else None
        else:  # a template, or a URI that matches one
            uri = ref.get("uri", "")
            name = next((one for one in self.templates if one == uri or match_template(one, uri) is not None), uri)
            known = re.findall(VARIABLE, name) if name in self.templates or name in self.resources else None
        if known is None:
            raise Rejection(INVALID_PARAMS, "params.ref must name a prompt, a resource template or a resource",
                            rule="Completion › Error Handling")
        entry = self.completions.get((ref["type"], name, argument["name"]))
        if entry is None:
            check_known([argument["name"]], known, "Completion › Security")
        others = request.params.get("context", {}).get("arguments", {})
        values = entry.function(argument["value"], others, request) if entry else []
        return {"completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}}

    # ---- multi round-trip requests: the state travels with the client, sealed

    def seal(self, request: Request, state: Any, forms: Json) -> str:
        """requestState: bound to the request, its user and a time, so that it is of no use anywhere else."""
        payload = {"state": state, "forms": forms, "expires": time.time() + STATE_SECONDS} | origin_of(request)
        text = base64.urlsafe_b64encode(json.dumps(payload).encode()).decode()
        return f"{text}.{self.signature(text)}"

    def unseal(self, request: Request, sealed: Any) -> Any:
        """The state inside; what was asked goes to the request. One refusal for every cause: it teaches nothing."""
        text, _, signature = sealed.rpartition(".") if isinstance(sealed, str) else ("", "", "")
        if hmac.compare_digest(self.signature(text).encode(), signature.encode("utf-8", "backslashreplace")):
            payload = json.loads(base64.urlsafe_b64decode(text))
            if payload["expires"] > time.time() and origin_of(request).items() <= payload.items():
                request.asked = payload["forms"]
                return payload["state"]
        raise Rejection(INVALID_PARAMS, "requestState is not valid for this request", status=400,
                        rule="Multi Round-Trip Requests › Server Requirements (Basic Workflow)")

    def signature(self, text: str) -> str:
        """HMAC-SHA-256 over the exact characters received."""
        return hmac.new(self.store.secret, text.encode("utf-8", "backslashreplace"), hashlib.sha256).hexdigest()


def register_in(table: dict[Any, Entry], key: Any, definition: Json, quick: bool, hints: Json | None = None,
                *of_tool: Any) -> Decorator:
    """A decorator that puts a function into a table."""

    def register(function: Function) -> Function:
        table[key] = Entry(definition, function, quick, hints or {}, *of_tool)
        return function

    return register


def check_authored_as(kind: str, value: Any) -> Any:
    """The value; ValueError, for its author, when it is none of that kind."""
    if problem := check_authored[kind](value):
        raise ValueError(f"{kind}{problem}: {value!r:.200}")
    return value


def check_known(names: Iterable[str], known: Iterable[str], rule: str) -> None:
    """Rejection for an argument that nobody declared."""
    for name in names:
        if name not in known:
            raise Rejection(INVALID_PARAMS, f"Unknown argument: {name[:100]}", rule=rule)


def present(**members: Any) -> Json:
    """An object of those members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def run_tool(tool: Entry, arguments: Json, request: Request) -> Json:
    """A tool's function, and its outcome as a result."""
    try:
        result: str | Json = tool.function(arguments, request)
    except ToolError as failure:
        return text_result(str(failure)) | {"isError": True}
    if isinstance(result, str):
        result = text_result(result)
    elif "content" in result:
        check_authored_as("content", result["content"])
    if "structuredContent" in result:
        structured = result["structuredContent"]
        # spec: Tools › Output Schema: MUST provide structured results that conform to this schema
        if tool.check_output and (problem := tool.check_output(structured)):
            raise ValueError(f"structuredContent{problem}")
        # spec: Tools › Structured Content: SHOULD also return the serialized JSON in a TextContent block
        return text_result(json.dumps(structured, ensure_ascii=False)) | result
    if tool.check_output and not (result.get("isError") or "resultType" in result):
        raise ValueError("structuredContent is missing")
    return result


def text_result(text: str) -> Json:
    """A tool's result with one block of text."""
    return {"content": [{"type": "text", "text": text}]}


def cacheable(ttl_ms: int, scope: str = "public") -> Json:
    """The caching hints of a result."""
    return {"ttlMs": ttl_ms, "cacheScope": scope}


VARIABLE = r"\{([A-Za-z0-9_]+)\}"  # rfc6570 §3.2.2: {var}; in the manner of §1.2, level 1


def match_template(template: str, uri: str) -> dict[str, str] | None:
    """The values of a template's variables in a URI; None if it does not match, or if a value would climb out.

    Segment by segment, each from its end, which is linear whatever the URI is; the first variables get the most.
    """
    patterns, segments, values = template.split("/"), uri.split("/"), {}
    if len(patterns) != len(segments):
        return None
    for pattern, segment in zip(patterns, segments, strict=True):
        *parts, last = re.split(VARIABLE, pattern)
        end = len(segment) - len(last)
        if not segment.endswith(last) or (end and not parts):
            return None
        while parts:
            name, literal = parts.pop(), parts.pop()
            start = segment.rfind(literal, 0, end - 1) if parts else 0
            value = unquote(segment[start + len(literal) : end], errors="surrogateescape")  # which is not printable
            # spec: Resources › Security Considerations: MUST sanitize file paths to prevent directory traversal
            climbs = not value.strip(".") or not value.isprintable() or "/" in value or "\\" in value
            if climbs or start < 0 or not segment.startswith(literal, start):
                return None
            values[name], end = value, start
    return values


def origin_of(request: Request) -> Json:
    """What a requestState is bound to: the user, the method, and a digest of the parameters that matter."""
    salient = [request.params.get("name"), request.params.get("uri"), request.params.get("arguments") or {}]
    digest = hashlib.sha256(json.dumps(salient, sort_keys=True).encode()).hexdigest()
    return {"user": request.user, "method": request.method, "digest": digest}


def capability_for(input_request: Json) -> Json:
    """The client capability that an input request needs. ValueError for what is no input request."""
    # spec: Multi Round-Trip Requests › Server Requirements (Basic Workflow): MUST NOT send undeclared inputRequests
    method, params = input_request["method"], input_request.get("params", {})
    mode = params.get("mode", "form")
    check_authored_as(mode if method == "elicitation/create" else method, params)
    if method == "elicitation/create":
        return {"elicitation": {mode: {}}}
    if method == "roots/list":  # deprecated by this revision, like sampling
        return {"roots": {}}
    # spec: Sampling › Tools in Sampling: MUST NOT send tools to a client that has not declared sampling.tools
    tools, context = bool(params.keys() & {"tools", "toolChoice"}), params.get("includeContext", "none") != "none"
    return {"sampling": present(tools={} if tools else None, context={} if context else None)}


class RateLimit:
    """A bucket of calls for each user; it holds `burst` and gains `rate` a second. `lock` guards `buckets`."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self.lock = threading.Lock()
        self.buckets: dict[str, tuple[float, float]] = {}  # user -> (calls left, when that was true)

    def seconds_to_wait(self, user: str) -> int:
        """0 and one call less in the user's bucket; or whole seconds until there is one."""
        now = time.monotonic()
        with self.lock:
            left, then = self.buckets.get(user, (self.burst, now))
            left = min(self.burst, left + (now - then) * self.rate)
            if left < 1:
                return math.ceil((1 - left) / self.rate)
            if len(self.buckets) > 10_000:  # a full bucket is no different from none
                self.buckets = {one: two for one, two in self.buckets.items() if now - two[1] < self.burst / self.rate}
            self.buckets[user] = left - 1, now
            return 0


# ---- subscriptions ----------------------------------------------------------------------------------------------

FILTERS = {"tools": "toolsListChanged", "prompts": "promptsListChanged", "resources": "resourcesListChanged",
           "resource": "resourceSubscriptions", "task": "taskIds"}
SUBSCRIPTION_ID = META + "subscriptionId"
HERE = "<id>"  # stands for a subscription's id where a message is encoded once for many of them


class Subscriptions:
    """The open subscriptions, none of which has a thread, and the feed of changes, which the keeper delivers to them.

    `lock` guards `open` and `table`; who listens, who hangs up and the keeper take it, none of them for long.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.store = server, server.store
        self.lock = threading.Lock()
        self.open: dict[Exchange, tuple[bytes, list[tuple[str, str]]]] = {}  # -> the id, as JSON, and keys of the table
        self.table: dict[tuple[str, str], dict[Exchange, bytes]] = {}  # topic and subject -> who hears of it -> the id
        self.ending, self.ended = False, threading.Event()
        self.seen: int = self.store.read("SELECT coalesce(max(number), 0) FROM changes")[0][0]  # the keeper's
        self.next_comment = 0.0  # the keeper's: when it looks for streams that have been quiet for long

    def listen(self, request: Request) -> None:
        """subscriptions/listen: acknowledged and entered into the table; the answer comes when somebody ends it."""
        agreed = self.agree(request)
        subjects = {topic: agreed.get(name, ()) for topic, name in FILTERS.items()}
        keys = [(topic, one) for topic, named in subjects.items() for one in ([""] if named is True else named)]
        exchange, subscription_id = request.exchange, sse.encode_json(request.id)
        acknowledged = notification("subscriptions/acknowledged", {"notifications": agreed})
        with self.lock:  # which the keeper takes, too: nothing goes out before this, and no change is missed
            # spec: Subscriptions › Acknowledgment: MUST send acknowledged as the first message
            if exchange.push(subscription_id.join(acknowledged)):
                self.open[exchange] = subscription_id, keys
                for key in keys:
                    self.table.setdefault(key, {})[exchange] = subscription_id
                self.next_comment = min(self.next_comment, time.monotonic() + exchange.comment_due())
        if self.ending:
            self.finish(exchange)

    def agree(self, request: Request) -> Json:
        """The part of the filter that this server serves to this user."""
        wanted = request.params["notifications"]
        uris, tasks = wanted.get("resourceSubscriptions", []), wanted.get("taskIds", [])
        if len(uris) + len(tasks) > MAX_NAMED:
            raise Rejection(INVALID_PARAMS, f"A subscription may name at most {MAX_NAMED} resources and tasks",
                            rule="choice: what one request costs is bounded")
        if tasks:
            request.require(NEEDS_TASKS)
        offered = {"tools": self.server.tools, "prompts": self.server.prompts, "resources": self.server.resources}
        agreed: Json = {FILTERS[kind]: True for kind, table in offered.items()
                        if wanted.get(FILTERS[kind]) and table and kind in self.server.changing}
        mine = {row["id"] for row in self.store.read("SELECT id FROM tasks WHERE user = ? AND id IN (SELECT value FROM"
                                                     " json_each(?))", request.user, json.dumps(tasks))}
        named = {"resourceSubscriptions": [one for one in dict.fromkeys(uris) if self.server.find_resource(one)],
                 "taskIds": [one for one in dict.fromkeys(tasks) if one in mine]}
        return agreed | {name: subjects for name, subjects in named.items() if subjects}

    def forget(self, exchange: Exchange) -> bytes | None:
        """Out of the table, because its client has gone or because it ends; its id if it was there."""
        with self.lock:
            subscription_id, keys = self.open.pop(exchange, (None, []))
            for key in keys:
                del self.table[key][exchange]
                if not self.table[key]:
                    del self.table[key]
        return subscription_id

    def finish(self, *exchanges: Exchange) -> None:
        """Ends subscriptions from this server's side."""
        # spec: Subscriptions › Graceful Closure: SHOULD respond with an empty result before closing the stream
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION_ID: HERE} | self.server.result_meta}
        pieces = cut({"id": HERE, "result": result}, 2)
        for exchange in exchanges:
            if subscription_id := self.forget(exchange):
                exchange.end(subscription_id.join(pieces))

    def end(self, deadline: float) -> None:
        """At shutdown: has the keeper tell what there is to tell and end all of them, before the deadline."""
        self.ending = True
        self.store.committed.set()
        self.ended.wait(max(0.0, deadline - time.monotonic()))

    # on the keeper's thread

    def deliver(self) -> None:
        """Passes on what the feed has brought, in its order; nobody who may have missed something is left in doubt."""
        if news := self.store.read("SELECT * FROM changes WHERE number > ? ORDER BY number", self.seen):
            # one notification a subject: it tells how things stand, and they stand as they do now
            changes = {(row["topic"], row["subject"]): row["detail"] for row in news}
            if news[0]["number"] > self.seen + 1:  # the others were purged before this instance came to them
                log("changes were forgotten before they could be told: all subscriptions end")
                self.server.tasks.stop_lost(list(self.server.tasks.running))
                self.finish(*self.open)
            else:
                self.server.tasks.stop_lost([subject for topic, subject in changes if topic == "task"])
                for (topic, subject), detail in changes.items():
                    try:
                        self.tell(topic, subject, detail)
                    except ValueError as broken:  # one row that cannot be read keeps nobody from hearing of the others
                        rejection_for(broken)
            self.seen = news[-1]["number"]
        if self.ending:
            self.finish(*self.open)
            self.ended.set()

    def tell(self, topic: str, subject: str, detail: str | None) -> None:
        """One change, encoded once for all who hear of it."""
        with self.lock:
            concerned = dict(self.table.get((topic, subject), {}))
        if topic not in FILTERS:
            log(f"the feed has a change of an unknown kind: {topic}")
        elif concerned and (message := self.message(topic, subject, detail)):
            for exchange, subscription_id in concerned.items():
                if not exchange.push(subscription_id.join(message)):
                    log("a subscription ends: its client has gone, or is too far behind")
                    self.finish(exchange)

    def message(self, topic: str, subject: str, detail: str | None) -> list[bytes] | None:
        """The notification of a change; None for a task that is no longer there."""
        if topic == "resource":
            return notification("resources/updated", {"uri": subject})
        if topic != "task":
            return notification(f"{topic}/list_changed", {})
        if detail:
            return notification("tasks", json.loads(detail))
        rows = self.store.read("SELECT * FROM tasks WHERE id = ?", subject)
        return notification("tasks", task_view(rows[0])) if rows else None

    def comment(self) -> None:
        """Comments on the streams that have been quiet for the keep-alive interval, late by at most a fifteenth."""
        if time.monotonic() >= self.next_comment:
            with self.lock:
                exchanges = list(self.open)
            for exchange in exchanges:
                exchange.keep_alive()
            due = [one for exchange in exchanges if (one := exchange.comment_due()) < math.inf]
            self.next_comment = time.monotonic() + max(min(due), max(due) / 15) if due else 0.0


def notification(name: str, params: Json) -> list[bytes]:
    """A notification for many subscriptions, in two pieces: the id of each goes between."""
    # spec: Subscriptions › Receiving Notifications: all carry the id of the listen request in _meta
    return cut({"method": f"notifications/{name}", "params": {"_meta": {SUBSCRIPTION_ID: HERE}} | params})


def cut(message: Json, places: int = 1) -> list[bytes]:
    """A message in JSON, cut where the id of a subscription goes."""
    return sse.encode_json({"jsonrpc": "2.0"} | message).split(sse.encode_json(HERE), places)


# ================================================================================================================
# Part 3. What outlives a request: a handle is a row, life is a lock, a task runs again from the top. Several instances
# share one file, and each sentence below stands for a race between them. Who wants the protocol alone may skip it.
# ================================================================================================================

APPLICATION_ID, SCHEMA_VERSION = 0x4D435028, 1
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {SCHEMA_VERSION}",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE changes (number INTEGER PRIMARY KEY, topic TEXT, subject TEXT, detail TEXT)",
    "CREATE TABLE handles (id TEXT PRIMARY KEY, kind TEXT, user TEXT, used REAL, value TEXT,"
    " size INTEGER AS (length(CAST(value AS BLOB))))",
    "CREATE INDEX handles_of ON handles (user, size)",
    "CREATE INDEX handles_used ON handles (used)",
    "CREATE TABLE tasks (id TEXT PRIMARY KEY, user TEXT, tool TEXT, status TEXT DEFAULT 'working', message TEXT,"
    " created REAL, updated REAL, ttl_ms INTEGER, expires REAL AS (created + ttl_ms / 1000.0), done REAL,"
    " owner TEXT, run INTEGER DEFAULT 1, deaths INTEGER DEFAULT 0, asked TEXT DEFAULT '{}',"
    " request TEXT, answers TEXT DEFAULT '{}', outcome TEXT DEFAULT '{}',"
    " size INTEGER AS (length(CAST(request || answers || outcome AS BLOB))))",
    "CREATE INDEX tasks_of ON tasks (user, status, size)",
    "CREATE INDEX tasks_expire ON tasks (expires)",
    "CREATE INDEX tasks_working ON tasks (owner, tool, deaths) WHERE status = 'working'",
)


class StoreTrouble(Exception):
    """The state cannot be used. An exception of the store's own: a sqlite3.Error is the tool's that raises it."""


class StoreBusy(StoreTrouble):
    """Somebody writes for longer than this write would wait."""


@contextlib.contextmanager
def state_trouble_logged(what: str) -> Iterator[None]:
    """For what can wait until the state can be used again."""
    try:
        yield
    except StoreTrouble as problem:
        log(f"{what}: {problem}")


class Store:
    """What outlives a request, in SQLite: in memory, or in a file that several instances share.

    `lock` guards the connection that writes. Reading has a connection and a lock (`reading`) of its own, and waits for
    nobody's write; in memory it shares both.
    """

    def __init__(self, path: str = ":memory:") -> None:
        self.instance, self.shared = secrets.token_hex(8), path != ":memory:"
        self.path = os.path.realpath(path) if self.shared else path
        self.committed, self.closing = threading.Event(), threading.Event()  # the first wakes the keeper
        self.running: dict[str, TaskRequest] = {}  # what `Tasks` has running on this instance
        self.lock, self.life = threading.RLock(), -1
        with contextlib.suppress(OSError):
            if self.shared:  # SQLite gives the files that it makes beside it the same mode
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                os.chmod(self.path, 0o600)
        self.reader = self.db = self.connect(0)
        self.reading: contextlib.AbstractContextManager[Any] = self.lock
        try:
            self.prepare()
            if self.shared:
                self.reader, self.reading = self.connect(1), threading.Lock()
            self.version = self.read("PRAGMA data_version")[0][0]
            self.file = os.stat(self.path) if self.shared else None
            self.secret = bytes.fromhex(self.read("SELECT value FROM settings WHERE name = 'secret'")[0]["value"])
        except BaseException:
            self.close()
            raise

    def connect(self, timeout: float) -> sqlite3.Connection:
        """A connection. A reader waits only where somebody mends what a killed process has left."""
        try:
            db = sqlite3.connect(self.path, timeout=timeout, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as problem:
            raise StoreTrouble(str(problem)) from problem
        db.row_factory = sqlite3.Row
        return db

    def prepare(self) -> None:
        """Makes the tables in a new file, and this instance's lock. StoreTrouble for a file that is not ours."""
        with self.transaction():
            if not self.execute("SELECT 1 FROM sqlite_master"):
                for statement in SCHEMA:
                    self.execute(statement)
            if self.execute("PRAGMA application_id")[0][0] != APPLICATION_ID:
                raise StoreTrouble("it belongs to another program")
            if (version := self.execute("PRAGMA user_version")[0][0]) != SCHEMA_VERSION:
                raise StoreTrouble(f"it was made by another version of this program (its format is {version}, and here"
                                   f" {SCHEMA_VERSION}); take a new file")
            self.execute("INSERT OR IGNORE INTO settings VALUES ('secret', ?)", secrets.token_hex(32))
            if self.shared:
                self.begin_life()
        self.run(self.db, "PRAGMA journal_mode = WAL", deadline=time.monotonic() + WRITE_SECONDS)

    def run(self, db: sqlite3.Connection, statement: str, *values: Any, deadline: float = 0.0) -> list[sqlite3.Row]:
        """One statement on a connection whose lock is held; its rows. It waits for others until the deadline."""
        # SQLite's text is UTF-8, which has no lone surrogates: they are kept, and looked for, as their escapes.
        stored = [one.encode("utf-8", "backslashreplace").decode() if isinstance(one, str) else one for one in values]
        while True:
            try:
                return db.execute(statement, stored).fetchall()
            except sqlite3.Error as problem:
                if isinstance(problem, sqlite3.ProgrammingError) and not self.closing.is_set():
                    raise  # the caller's fault: a value of a type that cannot be kept
                busy = getattr(problem, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                # in short slices, since nothing ends SQLite's own wait, and this must hold up nobody's end
                if not busy or time.monotonic() >= deadline or self.closing.wait(0.005):
                    raise (StoreBusy if busy else StoreTrouble)(str(problem)) from problem

    @contextlib.contextmanager
    def transaction(self, patience: float | None = None) -> Iterator[None]:
        """Several statements that take effect together or not at all; inside another transaction, a part of it.

        It waits for others' writes, this process's included, for 5 s (or `patience`) in all; StoreBusy after that.
        """
        deadline = time.monotonic() + (patience := WRITE_SECONDS if patience is None else patience)
        if not self.lock.acquire(timeout=patience):
            raise StoreBusy("database is locked")
        try:
            if self.closing.is_set():
                raise StoreTrouble("the server stops")
            if self.db.in_transaction:
                yield
                return
            self.run(self.db, "BEGIN IMMEDIATE", deadline=deadline)
            before = self.db.total_changes
            try:
                yield
                self.run(self.db, "COMMIT", deadline=deadline)
            finally:
                if self.db.in_transaction:
                    self.run(self.db, "ROLLBACK")
            if self.db.total_changes != before:
                self.committed.set()
        finally:
            self.lock.release()

    def execute(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """One statement that writes, or reads what is about to be written; its rows."""
        with self.transaction():
            return self.run(self.db, statement, *values)

    def read(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of one SELECT, which waits for nobody's write."""
        with self.reading:
            return self.run(self.reader, statement, *values)

    def tell(self, topic: str, subject: str = "", detail: str | None = None) -> None:
        """A change for the feed, so that subscribers hear of it; to be called in the transaction that makes it true."""
        with self.transaction():
            self.execute("INSERT INTO changes (topic, subject, detail) VALUES (?, ?, ?)", topic, subject, detail)
            self.execute("DELETE FROM changes WHERE number <= last_insert_rowid() - ?", MAX_CHANGES)

    def close(self) -> None:
        """After the last request. A tool that does not stop keeps the lock: it lives as long as the process."""
        self.closing.set()  # whoever waits for another process gives up
        if self.lock.acquire(timeout=1):
            if self.life in LOCKS and not self.running:
                LOCKS.discard(self.life)
                os.close(self.life)
            with self.reading:
                self.reader.close()
            self.db.close()
            self.lock.release()

    def new_handle(self, kind: str, user: str, value: Any) -> str:
        """Keeps a value under a new name that nobody can guess, for this user alone. ToolError: it is too much."""
        handle = f"{kind}_{secrets.token_urlsafe(16)}"
        with self.transaction():
            self.execute("INSERT INTO handles VALUES (?, ?, ?, ?, ?)", handle, kind, user, time.time(),
                         json.dumps(value))
            self.check_room("handles", user)
        return handle

    def append(self, kind: str, handle: str, user: str, item: Any) -> list[Any] | None:
        """Adds to the list behind a handle and returns it; None if this user has no such handle."""
        with self.transaction():
            rows = self.execute("UPDATE handles SET value = json_insert(value, '$[#]', json(?)), used = ? WHERE id = ?"
                                " AND kind = ? AND user = ? RETURNING value", json.dumps(item), time.time(), handle,
                                kind, user)
            self.check_room("handles", user)
        return json.loads(rows[0]["value"]) if rows else None

    def check_room(self, table: str, user: str) -> None:
        """ToolError, which undoes the transaction, when it gives the user more than is kept for one."""
        number, size = self.execute(f"SELECT count(*), coalesce(sum(size), 0) FROM {table} WHERE user = ?", user)[0]
        if number > MAX_KEPT or size > MAX_KEPT_OCTETS:
            raise ToolError(f"There is no room for more: {MAX_KEPT} {table}, of {MAX_KEPT_OCTETS >> 20} MiB in all, are"
                            " kept for one user. Room comes with time, when old ones are forgotten.")

    # Life is a lock on a file of one's own, which the kernel lets go when the process dies, however it dies. It is made
    # and locked, and others are tried and removed, in a write transaction only: between its making and its locking, a
    # finder would take it for a dead one's.

    def begin_life(self) -> None:
        """Takes this instance's lock; removes those that the dead have left."""
        beside = f"{self.path}-instance-"
        for path in glob.glob(glob.escape(beside) + "[0-9a-f]" * 16):
            self.is_dead(path.removeprefix(beside))
        try:
            self.life = os.open(beside + self.instance, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as problem:
            raise StoreTrouble(f"no lock can be made beside it: {problem.strerror}") from problem
        LOCKS.add(self.life)
        try_lock(self.life)

    def is_dead(self, instance: str) -> bool:
        """Whether its lock is free, or not there."""
        path = f"{self.path}-instance-{instance}"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as problem:
            return isinstance(problem, FileNotFoundError)
        dead = try_lock(descriptor)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            if dead:
                os.remove(path)
        return dead

    # on the keeper's thread

    def has_changed(self) -> bool:
        """Whether another process has committed since the last look; asked before the rows are read."""
        with contextlib.suppress(StoreTrouble):  # who looks closer will meet it
            before, self.version = self.version, self.read("PRAGMA data_version")[0][0]
            return bool(self.version != before)
        return True

    def purge(self) -> None:
        """Forgets handles that have not been used for a day; says so when the file itself has gone."""
        unused, day_ago = "SELECT id FROM handles WHERE used < ? LIMIT 1000", time.time() - HANDLE_SECONDS
        if self.read(unused, day_ago):
            with self.transaction(0):
                self.execute(f"DELETE FROM handles WHERE id IN ({unused})", day_ago)
        with contextlib.suppress(OSError):
            if self.file is None or os.path.samestat(self.file, os.stat(self.path)):
                return
        self.file = None
        log(f"{self.path} has been deleted or replaced: what is kept from now on will be lost")


LOCKS: set[int] = set()  # the descriptors of the locks that this process lives by


def close_locks() -> None:
    """In a child process: one that goes on by itself would hold them beyond its parent's death."""
    while LOCKS:
        os.close(LOCKS.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_locks)


def try_lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock on an open file. From here on this process does, until it closes it."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# ---- tasks ------------------------------------------------------------------------------------------------------

UNFINISHED = ("working", "input_required")


class Asks(BaseException):
    """A question that has no answer yet, as its argument: the function unwinds here, see `Request.ask`."""


class TaskRequest(Request):
    """The request of one run of a task: no client waits, so steps and questions are written to the row."""

    def __init__(self, row: sqlite3.Row, tasks: Tasks) -> None:
        saved = json.loads(row["request"])
        super().__init__({"id": row["id"], "method": "tools/call", "params": saved["params"]}, Exchange(), row["user"])
        self.tasks, self.row, self.saved, self.state, self.reported = tasks, row, saved, saved["state"], row["done"]
        self.answers: Json = json.loads(row["answers"])
        self.responses = saved["responses"] | self.answers

    def record(self, **columns: Any) -> None:
        """Changes the row if it is still this run's; otherwise the run ends, by Cancelled."""
        store, names = self.tasks.store, ", ".join(f"{name} = ?" for name in columns)
        with store.transaction():
            mine = "id = ? AND owner = ? AND run = ? AND status = 'working'"
            changed = not self.reason and store.execute(
                f"UPDATE tasks SET {names}, deaths = 0, updated = ? WHERE {mine} RETURNING id", *columns.values(),
                time.time(), self.id, self.row["owner"], self.row["run"])
            if changed:
                store.tell("task", self.id)
        if not changed:
            self.tasks.stop_lost([self.id])
            self.exchange.cancel("no longer this worker's")  # if the task is already in its next run here
            raise Cancelled(self.reason)

    def report(self, done: float, total: float | None, message: str | None) -> None:
        """Records the step, so that the next run can go on after it; one that cannot be written is dropped."""
        if not self.exchange.over:
            with state_trouble_logged(f"step {done:g} of task {self.id} is not recorded"):
                self.record(done=done * 1.0, message=message or f"{done:g}" + (f" of {total:g}" if total else ""))

    def as_task(self, required: bool = False, ttl_ms: int = 3_600_000) -> None:
        """It is one already."""

    def can_ask(self) -> bool:
        """Whether the client that created the task can show its user a form."""
        return self.declares({"elicitation": {"form": {}}})

    def ask(self, requests: Json) -> Json:
        """The answers, once they are all there; until then the function unwinds here."""
        for wanted in requests.values():
            self.require(capability_for(wanted))
        if new := {key: wanted for key, wanted in requests.items() if key not in self.answers}:
            raise Asks(new)
        return {key: self.answers[key] for key in requests}


class Tasks:
    """tasks/get, tasks/update, tasks/cancel, and the workers. A row is worked on by the instance that it names as its
    owner, in the run that it counts; a worker writes only while both are its own.

    `lock` guards `running` (task id -> the request of its run). When a task runs: see `Request.as_task`.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.store, self.running = server, server.store, server.store.running
        self.lock = threading.Lock()

    # tasks/*

    def create(self, request: Request, ttl_ms: int) -> Json:
        """A new task for this request, committed before its handle is sent."""
        saved = json.dumps({"params": request.params, "responses": request.responses, "state": request.state})
        unfinished = f"SELECT count(*) FROM tasks WHERE user = ? AND status IN {UNFINISHED}"
        try:
            with self.worker() as go:
                with self.store.transaction():
                    row = self.store.execute(
                        "INSERT INTO tasks (id, user, tool, created, updated, ttl_ms, owner, request) VALUES"
                        " (?, ?, ?, ?, ?, ?, ?, ?) RETURNING *", secrets.token_urlsafe(24), request.user,
                        request.params["name"], now := time.time(), now, ttl_ms, self.store.instance, saved)[0]
                    self.store.check_room("tasks", request.user)
                    if self.store.execute(unfinished, request.user)[0][0] > MAX_TASKS:
                        raise ToolError(f"{MAX_TASKS} of your tasks are unfinished: cancel one, or wait for one.")
                go(row)
        except ToolError as full:
            return text_result(str(full)) | {"isError": True}
        # spec: Tasks Extension › Polymorphic Results: MUST set resultType to "task"
        return {"resultType": "task"} | task_view(row)

    def find(self, request: Request, rows: Callable[..., list[sqlite3.Row]]) -> sqlite3.Row:
        """The row that a tasks/* request names."""
        # spec: Tasks Extension › Security Implications: MUST check on each request that the client may access a task
        found = rows("SELECT * FROM tasks WHERE id = ? AND user = ?", request.params["taskId"], request.user)
        if not found:
            raise Rejection(INVALID_PARAMS, "There is no such task", rule="Tasks Extension › Protocol Errors")
        return found[0]

    def get(self, request: Request) -> Json:
        """tasks/get: the task as it stands."""
        return task_view(self.find(request, self.store.read))

    def update(self, request: Request) -> Json:
        """tasks/update: answers to outstanding input requests; others are ignored. The last one begins the next run."""
        if self.find(request, self.store.read)["status"] == "input_required":
            with self.worker() as go:
                with self.store.transaction():
                    row = self.take_answers(self.find(request, self.store.execute), request.params["inputResponses"])
                if row:
                    go(row)
        return {}

    def take_answers(self, row: sqlite3.Row, given: Json) -> sqlite3.Row | None:
        """Writes what is new, in the transaction that is open. The row, if this instance is to run it now."""
        asked, answers = json.loads(row["asked"]), json.loads(row["answers"])
        new = {key: given[key] for key in asked if key in given and key not in answers}
        for key, answer in new.items():
            check_answer(key, asked[key], answer)
        if not new or row["status"] != "input_required":
            return None
        complete = asked.keys() <= answers.keys() | new.keys()
        mine = complete and row["tool"] in self.server.tools  # otherwise an instance that knows it takes it up
        rows = self.store.execute(
            "UPDATE tasks SET answers = ?, updated = ?, status = ?, owner = ?, run = run + ? WHERE id = ? RETURNING *",
            json.dumps(answers | new), time.time(), "working" if complete else "input_required",
            self.store.instance if mine else None, int(mine), row["id"])
        self.store.tell("task", row["id"])
        return rows[0] if mine else None

    def cancel(self, request: Request) -> Json:
        """tasks/cancel: stops the work, wherever it runs; a finished task stays as it is."""
        row = self.find(request, self.store.read)
        with self.store.transaction():
            if self.store.execute(f"UPDATE tasks SET status = 'cancelled', updated = ? WHERE id = ? AND status IN"
                                  f" {UNFINISHED} RETURNING id", time.time(), row["id"]):
                self.store.tell("task", row["id"])  # which the keeper that has it running obeys
        return {}

    # the workers

    @contextlib.contextmanager
    def worker(self) -> Iterator[Callable[[sqlite3.Row], None]]:
        """A thread behind a gate, before anything is promised: it runs the row that it is given, or ends with this."""
        gate: queue.SimpleQueue[TaskRequest | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self.work, args=(gate,), name="task worker", daemon=True).start()
        except RuntimeError as problem:
            raise Rejection(INTERNAL_ERROR, f"No task can run at the moment: {problem}", status=503,
                            fields="Retry-After: 1\r\n", rule="choice: no thread, no task") from None
        try:
            yield lambda row: gate.put(self.admit(row))
        finally:
            gate.put(None)

    def admit(self, row: sqlite3.Row) -> TaskRequest:
        """The request of a run that begins; from here on it can be stopped."""
        request = TaskRequest(row, self)
        with self.lock:
            self.running[row["id"]] = request
        if self.server.stopped.is_set():
            request.exchange.cancel("server stopped")
        return request

    def work(self, gate: queue.SimpleQueue[TaskRequest | None]) -> None:
        """The task worker: one run of the tool from the top; how it ended is written down."""
        if (request := gate.get()) is None:
            return
        try:
            with state_trouble_logged(f"task {request.id} begins without a look at its row"):  # its next step will look
                self.stop_lost([request.id])  # for what has become of it before it could be stopped
            self.write(request, self.run(request))
        except Cancelled as gone:
            log(f"{cancelled_line(request)} ({gone})")
        finally:
            with self.lock:
                if self.running[request.id] is request:  # and not the next run of the same task
                    del self.running[request.id]

    def run(self, request: TaskRequest) -> Json:
        """The columns that say how the run has ended: however the function ends, as a call would have ended."""
        try:
            if request.reason:
                raise Cancelled(request.reason)
            try:
                tool, arguments = self.server.tools[request.params["name"]], request.params.get("arguments", {})
                result = run_tool(tool, arguments, request)
                if result.get("resultType") == "input_required":
                    request.saved["state"] = result.get("requestState")
                    request.ask(result.get("inputRequests") or {})
                    # spec: Tasks Extension › Task Update Requests: MUST NOT reuse a key once it has been answered
                    raise ValueError("it asks for what has been answered, or for nothing")
                outcome = {"result": self.server.complete_result(request, result)}
                return {"status": "completed", "outcome": sse.encode_json(outcome).decode()}
            except Asks as asks:
                asked = sse.encode_json(json.loads(request.row["asked"]) | asks.args[0]).decode()
                return {"status": "input_required", "owner": None, "asked": asked, "request": json.dumps(request.saved)}
        except BaseException as problem:
            if request.reason:
                raise Cancelled(request.reason) from None
            return failed(rejection_for(problem))

    def write(self, request: TaskRequest, columns: Json) -> None:
        """Writes down how a run has ended; while that cannot be done, again every second until the process ends."""
        request.exchange.over = True  # threads that the function has left behind are not heard any more
        while not request.reason:
            try:
                return request.record(**columns)
            except Exception as problem:
                log(f"how task {request.id} has ended is not written yet: {problem}")
            request.cancelled.wait(1)
        raise Cancelled(request.reason)

    def stop_lost(self, ids: list[str]) -> None:
        """Stops the runs of these tasks that are not to go on."""
        for request in filter(None, map(self.running.get, ids)):
            rows = self.store.read("SELECT status, owner, run FROM tasks WHERE id = ?", request.id)
            if not rows:
                request.exchange.cancel("expired")
            elif rows[0]["status"] == "cancelled":
                request.exchange.cancel("tasks/cancel")
            elif (rows[0]["owner"], rows[0]["run"]) != (request.row["owner"], request.row["run"]):
                request.exchange.cancel("no longer this worker's")

    def release(self) -> None:
        """At shutdown: stops the runs, and leaves their rows to whoever sees the lock go. That will be no death."""
        for request in list(self.running.values()):
            request.exchange.cancel("server stopped")
        owned = "status = 'working' AND owner = ?"
        with state_trouble_logged("the tasks of this instance will count it as dead"):
            if self.store.read(f"SELECT 1 FROM tasks WHERE {owned} LIMIT 1", self.store.instance):
                with self.store.transaction(0.2):
                    self.store.execute(f"UPDATE tasks SET deaths = deaths - 1 WHERE {owned}", self.store.instance)

    # on the keeper's thread

    def take_up(self) -> None:
        """Begins a run of one row that nobody runs; its commit wakes the keeper for the next."""
        # choice: a row whose processes have died runs alone among such rows, so that the one that kills is found out.
        free = ("SELECT id FROM tasks WHERE status = 'working' AND owner IS NULL AND tool IN (SELECT value FROM"
                " json_each(?)) AND (deaths < 1 OR NOT EXISTS (SELECT 1 FROM tasks WHERE status = 'working' AND"
                " owner = ? AND deaths > 0)) LIMIT 1")
        values = json.dumps(list(self.server.tools)), self.store.instance
        if self.store.read(free, *values):
            with self.worker() as go:
                with self.store.transaction(0):
                    rows = self.store.execute(f"UPDATE tasks SET owner = ?, run = run + 1 WHERE id IN ({free})"
                                              " RETURNING *", self.store.instance, *values)
                for row in rows:
                    log(f"task {row['id']} taken up after step {row['done'] or 0:g} (its instance is gone)")
                    go(row)

    def give_up_dead(self) -> None:
        """Finds instances whose lock is free and gives up what they ran; after the third death, for good."""
        others = self.store.read("SELECT DISTINCT owner FROM tasks WHERE status = 'working' AND owner > ''"
                                 " AND owner != ?", self.store.instance)
        if not others:
            return
        with self.store.transaction(0):
            for owner in [row["owner"] for row in others if self.store.is_dead(row["owner"])]:
                self.store.execute("UPDATE tasks SET owner = NULL, deaths = deaths + 1 WHERE status = 'working' AND"
                                   " owner = ?", owner)
            end = failed(Rejection(INTERNAL_ERROR, f"The process that ran this has died, {MAX_DEATHS} times in a row",
                                   rule="Tasks Extension › Task Execution Errors"))
            for row in self.store.execute(
                    "UPDATE tasks SET status = ?, message = ?, outcome = ?, updated = ? WHERE status = 'working' AND"
                    " owner IS NULL AND deaths >= ? RETURNING id", *end.values(), time.time(), MAX_DEATHS):
                self.store.tell("task", row["id"])

    def expire(self) -> None:
        """Forgets tasks whose time is over; those that had not ended have failed, as their subscribers hear."""
        now, over = time.time(), "SELECT id FROM tasks WHERE expires < ? LIMIT 100"
        if self.store.read(over, now):
            with self.store.transaction(0):
                for row in self.store.execute(f"DELETE FROM tasks WHERE id IN ({over}) RETURNING *", now):
                    if row["status"] in UNFINISHED:
                        # spec: Tasks Extension › Task Polling: MAY mark it as failed after its TTL, and then delete it
                        end = failed(Rejection(INTERNAL_ERROR, "The task has expired",
                                               rule="Tasks Extension › Task Polling"))
                        last = task_view(dict(row) | end | {"updated": now})
                        self.store.tell("task", row["id"], sse.encode_json(last).decode())


def failed(rejection: Rejection) -> Json:
    """The columns of a task that has failed."""
    # spec: Tasks Extension › Task Execution Errors: failed is for JSON-RPC errors only
    outcome = sse.encode_json({"error": rejection.error()}).decode()
    return {"status": "failed", "message": str(rejection.message), "outcome": outcome}


def task_view(row: Any) -> Json:
    """A task as the wire shows it."""
    view = {"taskId": row["id"], "status": row["status"], "createdAt": iso_time(row["created"]),
            "lastUpdatedAt": iso_time(row["updated"]), "ttlMs": row["ttl_ms"], "pollIntervalMs": 500}
    if row["message"]:
        view["statusMessage"] = row["message"]
    if row["status"] == "input_required":
        answers = json.loads(row["answers"])
        view["inputRequests"] = {key: one for key, one in json.loads(row["asked"]).items() if key not in answers}
    return view | dict(json.loads(row["outcome"]))


def iso_time(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


# ================================================================================================================
# Part 4. The demo: the tools, resources and prompts of the lessons, built as anybody would build a server.
# ================================================================================================================

READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False}
SWITCHES = ADDS | {"idempotentHint": True}


def demo_server(step_seconds: float = 1.0, store: Store | None = None,
                rate: tuple[float, float] | None = None) -> Server:
    """The server that the lessons use."""
    about = "A demo: weather, carts, flights, and a report that takes its time."
    server = Server("mcp-reference-server", "1.0.0", about, page_size=2, store=store, rate=rate, changing=["tools"])
    add_report(server, step_seconds)
    for add in (add_weather, add_shop, add_questions, add_switches, add_documents):
        add(server)
    return server


def add_report(server: Server, step_seconds: float) -> None:
    """The slow call that the story is about."""
    month = TEXT | {"description": "as 2026-09, or May", "pattern": r"^(\d{4}-(0[1-9]|1[0-2])|[A-Z][a-z]{2,8})$"}
    charts_or_not = {"charts": BOOLEAN | {"title": "Charts", "description": "one for each week"}}

    @server.tool("build_report", "Builds a monthly report in ten slow steps. Reports progress; stops when you hang up;"
                 " a task for clients that know tasks.", takes(month=month), annotations=READS)
    def build_report(arguments: Json, request: Request) -> str:
        request.as_task()
        work(request, 1, 5)
        charts = ""
        if request.can_ask():
            request.ask({"charts": elicit("Include charts in the report?", charts_or_not)})
            charts = ", with charts" if (request.accepted("charts") or {}).get("charts") else ", without charts"
        work(request, 6, 10)
        return f"The report for {arguments['month']} is ready{charts}."

    def work(request: Request, first: int, last: int) -> None:
        for step in range(max(first, int(request.done) + 1), last + 1):
            request.sleep(step_seconds)
            request.log("debug", f"step {step} of 10 is done")
            request.progress(step, 10, f"step {step} of 10")


def add_weather(server: Server) -> None:
    """Two answers that come at once: as text, and as data with a schema."""

    def weather(location: str) -> Json:
        number = sum(map(ord, location.strip().lower()))
        return {"temperature": number % 35 - 1, "conditions": ("windy", "cloudy", "rainy", "sunny")[number % 4],
                "humidity": 30 + number % 60}

    @server.tool("get_weather", "The weather at a place, as text.", takes(location=TEXT), annotations=READS, quick=True)
    def get_weather(arguments: Json, request: Request) -> str:
        now = weather(arguments["location"])
        return f"{now['temperature']} °C and {now['conditions']} in {arguments['location']}."

    report = takes(temperature=SOME_NUMBER, conditions=TEXT, humidity=COUNT | {"maximum": 100})

    @server.tool("get_weather_data", "The weather at a place, as data.", takes(location=TEXT), output_schema=report,
                 annotations=READS, quick=True)
    def get_weather_data(arguments: Json, request: Request) -> Json:
        return {"structuredContent": weather(arguments["location"])}

    region = TEXT | {"description": "where to run it; gateways route by it", "x-mcp-header": "Region"}

    @server.tool("execute_sql", "Pretends to run a query in a region.", takes(region=region, query=TEXT),
                 annotations=READS, quick=True)
    def execute_sql(arguments: Json, request: Request) -> str:
        return f"Ran in {arguments['region']}: {arguments['query']}"


def add_shop(server: Server) -> None:
    """State is a handle: a cart is a name that works for its user alone. A gateway allows search, not place_hold."""
    titles = ["Emma", "Middlemarch", "Moby-Dick", "The Trial", "Ulysses"]

    @server.tool("create_cart", "Creates an empty cart; it is kept for 24 hours after its last use.", takes(),
                 output_schema=takes(cartId=TEXT), annotations=ADDS)
    def create_cart(arguments: Json, request: Request) -> Json:
        return {"structuredContent": {"cartId": server.store.new_handle("cart", request.user, [])}}

    @server.tool("add_to_cart", "Puts an article into a cart.", takes(cartId=TEXT, sku=TEXT),
                 output_schema=takes(items=TEXT_LIST), annotations=ADDS)
    def add_to_cart(arguments: Json, request: Request) -> Json:
        content = server.store.append("cart", arguments["cartId"], request.user, arguments["sku"])
        if content is None:  # another user's cart is answered like one that never was
            raise ToolError("There is no such cart, or it has expired. Create one with create_cart.")
        return {"structuredContent": {"items": content}}

    @server.tool("book_flight", "Books a flight.", takes(to=TEXT, date=TEXT | {"description": "YYYY-MM-DD"}),
                 annotations=ADDS, quick=True)
    def book_flight(arguments: Json, request: Request) -> str:
        today = datetime.date.today()
        with contextlib.suppress(ValueError):
            if datetime.date.fromisoformat(arguments["date"]) > today:
                return f"Booked: {arguments['to']} on {arguments['date']}."
        raise ToolError(f"The departure must be a date in the future, as YYYY-MM-DD. Today is {today}.")

    @server.tool("search", "Searches the library's titles.", takes(query=TEXT), annotations=READS, quick=True)
    def search(arguments: Json, request: Request) -> str:
        return ", ".join(title for title in titles if arguments["query"].lower() in title.lower()) or "Nothing found."

    @server.tool("place_hold", "Reserves a title in your name for 24 hours.", takes(title=TEXT),
                 output_schema=takes(holdId=TEXT, title=TEXT), annotations=ADDS)
    def place_hold(arguments: Json, request: Request) -> Json:
        hold = server.store.new_handle("hold", request.user, arguments["title"])
        return {"structuredContent": {"holdId": hold, "title": arguments["title"]}}


def add_questions(server: Server) -> None:
    """Tools that need something from the user first: a form, and a page for what must not pass through the client."""
    login = TEXT | {"title": "GitHub user name", "minLength": 1}
    form = elicit("Please provide your GitHub user name", {"name": login})

    @server.tool("create_repo", "Creates a repository; asks for your GitHub user name.", takes(repo=TEXT),
                 annotations=ADDS)
    def create_repo(arguments: Json, request: Request) -> str | Json:
        if (answer := request.accepted("github_login", form)) is not None:
            return f"Created {answer['name']}/{arguments['repo']}."
        if "github_login" in request.responses:
            return "No repository was created, as you wished."
        return input_required({"github_login": form}, state={"asked": (request.state or {}).get("asked", 0) + 1})

    @server.tool("connect_billing", "Connects your billing account, on its own page.", takes(), annotations=SWITCHES)
    def connect_billing(arguments: Json, request: Request) -> str | Json:
        consent = request.accepted("billing_key")
        if consent is None and "billing_key" in request.responses:
            return "Billing was not connected, as you wished."
        visit = (request.state or {}).get("visit") or server.store.new_handle("visit", request.user, [])
        # spec: Elicitation › URL Mode Elicitation Requests: accept is consent to open the page, not completion
        if consent is not None and "finished" in (server.store.append("visit", visit, request.user, "consent") or []):
            return f"Billing is connected (visit {visit})."
        page = elicit_url("Enter your billing key on this page", f"https://billing.example.com/connect/{visit}")
        return input_required({"billing_key": page}, state={"visit": visit})

    @server.tool("finish_billing", "Plays the billing page: its visitor has entered the key.", takes(visit=TEXT),
                 annotations=SWITCHES)
    def finish_billing(arguments: Json, request: Request) -> str:
        if server.store.append("visit", arguments["visit"], request.user, "finished") is None:
            raise ToolError("There is no such visit. Start one with connect_billing.")
        return "The key is entered. Go on with connect_billing."


def add_switches(server: Server) -> None:
    """Tools that change what others have subscribed to."""

    @server.tool("toggle_beta_tool", "Lists beta_search, or unlists it.", takes(), annotations=ADDS)
    def toggle_beta_tool(arguments: Json, request: Request) -> str:
        listed = not server.is_listed(server.tools["beta_search"])
        server.set_listed("beta_search", listed)
        return f"beta_search is now {'listed' if listed else 'unlisted'}."

    @server.tool("touch_config", "Changes file:///project/config.json.", takes(), annotations=SWITCHES)
    def touch_config(arguments: Json, request: Request) -> str:
        with server.store.transaction():
            server.store.execute("INSERT OR REPLACE INTO settings VALUES ('touched', ?)", iso_time(time.time()))
            server.resource_updated("file:///project/config.json")
        return "file:///project/config.json has changed."

    @server.tool("beta_search", "Searches better, perhaps.", takes(query=TEXT), listed=False, annotations=READS,
                 quick=True)
    def beta_search(arguments: Json, request: Request) -> str:
        return f"A better answer to {arguments['query']} is being thought about."


def add_documents(server: Server) -> None:
    """Resources, a resource template, and a prompt with completion."""

    @server.resource("app://me/settings", "settings", description="Your settings", mime_type="application/json",
                     cache_scope="private", quick=True)
    def settings(uri: str, request: Request) -> str:
        return json.dumps({"user": request.user, "language": "en"})

    @server.resource("file:///project/config.json", "config.json", mime_type="application/json")
    def config(uri: str, request: Request) -> str:
        touched = server.store.read("SELECT value FROM settings WHERE name = 'touched'")
        return json.dumps({"debug": False, "touched": touched[0]["value"] if touched else None})

    documents = {"README.md": "# The project\n", "CHANGES.md": "Nothing yet.\n", "LICENSE": "Use it as you like.\n"}
    for name in documents:
        server.resource(f"file:///project/{name}", name, quick=True)(lambda uri, request, name=name: documents[name])
    server.resource_template("file:///project/{name}", "project files", description="A file of the project",
                             quick=True)(lambda uri, values, request: documents.get(values["name"]))

    @server.prompt("code_review", "Asks for a review of some code.", [
        {"name": "code", "description": "the code to review", "required": True},
        {"name": "language", "description": "the language it is written in"}], quick=True)
    def code_review(arguments: dict[str, str], request: Request) -> str:
        return f"Please review this {arguments.get('language', '')} code:\n{arguments['code']}"

    @server.completion("ref/prompt", "code_review", "language", quick=True)
    def language(value: str, context: dict[str, str], request: Request) -> list[str]:
        languages = ["c", "go", "haskell", "java", "javascript", "python", "ruby", "rust", "typescript"]
        return [one for one in languages if one.startswith(value.lower())]


# ================================================================================================================
# Part 5. The carriers: how octets reach a request and how its answer leaves, over HTTP and over stdio. One thread
# reads; what may wait has a thread of its own meanwhile (Half-Sync/Half-Async). Nothing here knows what MCP means.
# ================================================================================================================

READ_AHEAD = 8 * headers.MAX_LINE  # octets behind a request in progress, beside one more body
SLOWEST = 500  # octets a second: a request that arrives more slowly counts as standing still
SLOW_QUICK = 0.02  # seconds: a quick tool that takes longer has held up everybody


class Inbox:
    """Octets in, whole requests out, however the octets were cut. No socket, no clock; the loop alone touches it."""

    __slots__ = ("chunks", "expected", "head", "max_body", "received")

    def __init__(self, max_body: int) -> None:
        self.received, self.max_body = bytearray(), max_body
        self.head: headers.Head | None = None  # of the request whose body is still coming
        self.chunks: sse.ChunkDecoder | None = None
        self.expected = False  # its client waits for a 100, or for a refusal, before it sends the body

    def next_request(self) -> tuple[headers.Head, bytes] | None:
        """A head and a body, once both are whole. BadHead for broken framing."""
        if (head := self.head or self.take_head()) is None:
            return None
        if self.chunks:
            body = self.take_chunks(self.chunks)
        elif len(self.received) < head.length:
            body = None
        else:
            body = bytes(self.received[: head.length])
            del self.received[: head.length]
        if body is None:
            return None
        self.head, self.chunks, self.expected = None, None, False
        return head, body

    def take_head(self) -> headers.Head | None:
        """The next head, if it is there; what is there is checked, as far as it goes."""
        while self.received.startswith(b"\r\n"):  # rfc9112 §2.2: ignore empty lines before the request line
            del self.received[:2]
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            if self.received:
                headers.check_head_so_far(self.received)
            return None
        head = headers.read_head(bytes(self.received[:end]))
        if head.length > self.max_body:
            raise BadHead(413, f"A message may have at most {self.max_body} octets", "rfc9110 §15.5.14")
        if "expect" in head.fields and head.version == "HTTP/1.1":
            if ",".join(head.fields["expect"]).lower() != "100-continue":
                raise BadHead(417, "The only expectation served here is 100-continue", "rfc9110 §10.1.1")
            self.expected = True
        del self.received[: end + 4]
        self.head, self.chunks = head, sse.ChunkDecoder(self.max_body) if head.length == headers.CHUNKED else None
        return head

    def take_chunks(self, chunks: sse.ChunkDecoder) -> bytes | None:
        """A body whose length is only known at its end."""
        try:
            return chunks.take(self.received)
        except sse.TooLarge as broken:
            raise BadHead(413, str(broken), "rfc9110 §15.5.14") from None
        except ValueError as broken:
            raise BadHead(400, str(broken), "rfc9112 §7.1") from None

    def begun(self) -> bool:
        """Whether a part of a request is there."""
        return bool(self.head is not None or self.received.strip(b"\r\n"))


class Outbox:
    """What goes out on one socket or pipe, in order. `lock` guards the attributes; nobody holds it while waiting.

    `send_some(octets)` sends what is taken without waiting and says how much; `send_all(octets)` waits, and `run` gives
    it a thread. Both raise OSError when nobody takes anything any more.
    """

    __slots__ = ("behind", "caught_up", "lock", "lost", "run", "send_all", "send_some", "waiting", "weight")

    def __init__(self, send_some: Callable[[bytes], int], send_all: Callable[[bytes], None],
                 run: Callable[..., None], caught_up: Callable[[], None]) -> None:
        self.send_some, self.send_all, self.run, self.caught_up = send_some, send_all, run, caught_up
        self.lock = threading.Lock()
        self.waiting: list[bytes] = []
        self.behind = 0  # messages that have not been taken whole, those in the writer's hand included
        self.weight = 0  # octets of `waiting`
        self.lost = False

    def put(self, octets: bytes) -> None:
        """Sends what is taken at once; the rest goes to a thread that may wait. OSError when the reader is gone."""
        with self.lock:
            try:
                if self.lost:
                    raise BrokenPipeError
                if not self.behind:
                    octets = octets[self.send_some(octets) :]
                if octets:
                    self.waiting.append(octets)
                    self.weight += len(octets)
                    self.behind += 1
                    if self.behind == 1:
                        self.run(self.send_waiting)
            except (OSError, RuntimeError):  # nobody takes anything any more, or there is no thread to wait for it
                self.lost = True
                raise BrokenPipeError from None

    def send_waiting(self) -> None:
        """The writer, until it has caught up."""
        batch: list[bytes] = []
        while True:
            with self.lock:
                self.behind = 0 if self.lost else self.behind - len(batch)
                if not self.behind:
                    self.weight = 0
                    break
                batch, self.waiting, self.weight = self.waiting, [], 0
            try:
                self.send_all(b"".join(batch))
            except OSError:
                self.lost = True
        self.caught_up()


Selecting = getattr(selectors, "PollSelector", selectors.SelectSelector)


def ready_to_send(sink: Any, timeout: float) -> bool:
    """Waits until a socket or pipe takes octets again; False after the timeout. Its closing wakes it too."""
    with Selecting() as selector, contextlib.suppress(ValueError):  # closed meanwhile, as the next write will tell
        selector.register(sink, selectors.EVENT_WRITE)
        return bool(selector.select(timeout))
    return True


class Workers:
    """Threads that are used again: one whose job is done takes the next instead of ending.

    `lock` guards `idle`; whoever has a job, and the workers, touch it. A waiting worker is woken by a job or after 5 s.
    """

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.idle = 0  # workers that wait and that no job has been promised

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls the function on a thread of its own. RuntimeError when the system gives no more threads."""
        with self.lock:
            if reuse := self.idle > 0:
                self.idle -= 1
                self.jobs.put((function, arguments))
        if not reuse:
            threading.Thread(target=self.work, args=(function, arguments), daemon=True).start()

    def work(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """One worker's life: a job, then the next one if it comes in time."""
        while True:
            try:
                function(*arguments)
            except Exception as fault:  # of this server's; the other requests go on
                log_fault(fault)
            del function, arguments
            with self.lock:
                self.idle += 1
            try:
                function, arguments = self.jobs.get(timeout=5)
            except queue.Empty:
                with self.lock:
                    if self.idle > 0:
                        self.idle -= 1
                        return
                function, arguments = self.jobs.get()  # promised to this worker while it gave up


class HttpServer(HTTPServer):
    """The listening socket, the loop that reads all connections, and their limits (seconds, octets).

    The limits may be set before serving. The loop's thread alone touches the selector and the connections; others
    leave what they hand back in `returned` and wake it by a socket pair. `ready`: connections whose next request may
    have come already; they wait behind those that have something to read.
    """

    request_queue_size = 1024
    allow_reuse_address = os.name == "posix"  # elsewhere it would let two servers share the port
    keep_alive = 15.0  # silence before a stream gets a comment
    idle_timeout = 30.0  # between two requests
    request_timeout = 10.0  # for a head or a body that has begun
    write_timeout = 10.0  # for a client that does not read
    linger_timeout = 1.0  # for a client that has been sent its last answer to hang up
    max_body = MAX_MESSAGE
    max_connections = 4096
    wire: Wire | None = None
    selecting: type[selectors.BaseSelector] = selectors.DefaultSelector
    RequestHandlerClass: type[Endpoint]

    def __init__(self, mcp: Server, host: str = "127.0.0.1", port: int = 0, allow_origins: Iterable[str] = ()) -> None:
        self.mcp = mcp
        families = {one[0] for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        # choice: of a name with both kinds of address the older one, because every client tries it
        self.address_family = min(families, key=(socket.AF_INET, socket.AF_INET6).index)
        origins = frozenset(headers.parse_origin(origin) for origin in allow_origins)
        hosts = {urlsplit(origin).hostname or "" for origin in origins} | {host.lower()}
        self.policy = headers.Policy(origins, frozenset(hosts))
        self.workers = Workers()
        self.connections: set[Connection] = set()
        self.deadlines: dict[str, collections.OrderedDict[Connection, float]] = {
            limit: collections.OrderedDict() for limit in ("idle_timeout", "request_timeout", "linger_timeout")}
        self.places = 0  # connections that count against the limit
        self.ready: collections.deque[Connection] = collections.deque()
        self.returned: collections.deque[Endpoint] = collections.deque()
        self.exhausted = False  # no descriptor was to be had for the last connection
        self.asleep = False  # the loop waits, or is about to
        self.stopping = False  # set by a signal handler, which must not touch a lock
        self.resume_accepting = self.next_look = math.inf  # never later than the oldest deadline
        self.waker, self.woken = socket.socketpair()
        super().__init__((host, port), Endpoint)  # type: ignore[arg-type]  # made by the loop, one a request
        for one in (self.waker, self.woken, self.socket):
            one.setblocking(False)

    def server_bind(self) -> None:
        """Binds without the standard library's reverse look-up, which can take seconds."""
        TCPServer.server_bind(self)
        self.port = self.server_address[1]

    def server_close(self) -> None:
        """Closes what `serve_forever` has not."""
        for one in (self.socket, self.waker, self.woken):
            one.close()

    # the loop

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serves until `stop`; then every connection ends."""
        self.mcp.start()
        with self.selecting() as self.selector:
            if isinstance(self.selector, selectors.SelectSelector):
                self.max_connections = min(self.max_connections, 400)  # choice: select() takes 1,024, or 512 on Windows
            self.selector.register(self.woken, selectors.EVENT_READ)
            self.selector.register(self.socket, selectors.EVENT_READ)
            while not self.stopping:
                self.turn()
            self.end_connections()
        self.server_close()
        self.mcp.stop()

    def turn(self, at_most: float = 3600.0) -> None:
        """One round: whatever can be read, whatever was handed back, whatever is due."""
        self.asleep = True  # from here on others wake the loop; what they left before is looked at below
        wait = 0 if self.ready or self.returned else min(at_most, max(0.0, self.next_look - time.monotonic()))
        events = self.selector.select(wait)
        self.asleep = False
        for key, _ in events:
            if isinstance(key.data, Connection):
                self.take_in(key.data)
            elif key.fileobj is self.socket:
                self.accept()
            else:
                with contextlib.suppress(OSError):
                    self.woken.recv(4096)
        while self.returned:
            self.go_on(self.returned.popleft())
        for _ in range(len(self.ready)):
            self.advance(self.ready.popleft())
        if (now := time.monotonic()) >= self.next_look:
            self.expire(now)

    def wake(self) -> None:
        """Ends the loop's wait; from any thread and from signal handlers."""
        with contextlib.suppress(OSError):  # a full pair wakes it as well
            self.waker.send(b"\0")

    def stop(self) -> None:
        """Ends `serve_forever`; from any thread and from signal handlers."""
        self.stopping = True
        self.wake()

    def accept(self) -> None:
        """Takes what connects, a few at a time; decides who has a place."""
        for _ in range(64):
            if len(self.connections) >= 2 * self.max_connections:
                return self.pause_accepting()
            try:
                accepted, _ = self.socket.accept()
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if not self.exhausted:
                        log("out of file descriptors: new connections wait")
                    self.exhausted = True
                    self.pause_accepting()
                return None
            self.exhausted = False
            accepted.setblocking(False)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            connection = Connection(self, accepted, place=self.places < self.max_connections)
            self.places += connection.place
            self.connections.add(connection)
            self.selector.register(accepted, selectors.EVENT_READ, connection)
            self.set_deadline(connection, "idle_timeout")
            self.take_in(connection)  # most clients have sent something by now
        return None

    def pause_accepting(self) -> None:
        """For 50 ms the loop does not look at the listening socket, which would wake it at once."""
        self.selector.unregister(self.socket)
        self.resume_accepting = self.next_look = time.monotonic() + 0.05

    def take_in(self, connection: Connection) -> None:
        """Something has come on a connection: octets, or its end."""
        connection.read()
        exchange = connection.exchange
        if exchange and not exchange.parked and len(connection.inbox.received) > self.max_body + READ_AHEAD:
            exchange.cancel("too much sent behind it")  # or the end of file behind those octets would never be seen
            connection.at_end = True
        if connection.at_end:
            self.selector.unregister(connection.socket)
        if connection.limit == "linger_timeout" or (exchange and exchange.parked):  # nothing counts but the end
            connection.inbox.received.clear()
            if connection.at_end:
                self.lose(connection, exchange)
        elif exchange is None:
            self.advance(connection)

    def lose(self, connection: Connection, subscriber: Endpoint | None) -> None:
        """Its client has gone, or reads nothing any more; nothing was to come on it but a subscription's messages."""
        if subscriber:
            subscriber.cancel("stream closed")
            if self.wire:
                self.wire.show("--x", subscriber, "stream closed: the subscription ends")
            log(f"subscriptions/listen ended ({subscriber.reason})")
            self.mcp.subscriptions.forget(subscriber)
        self.drop(connection)

    def advance(self, connection: Connection) -> None:
        """Serves the connection's next request, if it has come: here if it is quick, else on a worker."""
        if connection.exchange or connection not in self.connections:
            return None
        if self.stopping:
            return self.close(connection)
        try:
            request = connection.inbox.next_request()
        except BadHead as broken:
            return self.refuse(connection, rejection_for(broken))
        if request is None:
            return self.wait_for_more(connection)
        exchange = connection.exchange = self.RequestHandlerClass(connection, *request)
        exchange.quick = exchange.is_quick()
        if exchange.quick:
            return self.serve(exchange)
        self.set_deadline(connection)
        if connection.at_end:
            exchange.cancel("stream closed")
        try:
            self.workers.run(self.serve, exchange)
        except RuntimeError as problem:
            exchange.quick = True
            exchange.send_rejection(Rejection(503, f"No thread is free: {problem}", status=503,
                                              fields="Retry-After: 1\r\n", rule="rfc9110 §15.6.4"))
            self.go_on(exchange)
        return None

    def serve(self, exchange: Endpoint) -> None:
        """One request: on the loop if it is quick, else on a worker, with plain blocking code."""
        try:
            exchange.handle_one_request()
        except BaseException as fault:  # of this server's: the connection ends, the others go on
            log_fault(fault)
            exchange.close_connection = True
        if not exchange.quick:
            return self.give_back(exchange)
        took = time.monotonic() - exchange.began
        if took > SLOW_QUICK and (name := exchange.head.fields.get("mcp-name")):  # its author is told
            log(f"{name[0][:200]} is registered as quick, and has held up everybody for {1000 * took:.0f} ms")
        return self.go_on(exchange)

    def give_back(self, exchange: Endpoint) -> None:
        """From any thread: this request is answered, its connection is the loop's again."""
        self.returned.append(exchange)
        if self.asleep:
            self.wake()

    def go_on(self, exchange: Endpoint) -> None:
        """The request may be over: then the connection ends, or its next request is looked for."""
        connection = exchange.client
        if connection.exchange is not exchange:
            return
        if exchange.parked and connection.outbox.lost:
            self.lose(connection, exchange)
            return
        if (exchange.parked and not exchange.over) or connection.outbox.behind:  # a worker sends, and gives it back
            self.set_deadline(connection)
            return
        connection.exchange = None
        if exchange.close_connection or exchange.parked or connection.outbox.lost or self.stopping:
            self.close(connection)
        elif connection.inbox.received or connection.at_end:
            self.ready.append(connection)
        else:
            self.set_deadline(connection, "idle_timeout")

    def wait_for_more(self, connection: Connection) -> None:
        """No whole request is there yet: a client that expects 100 is told to go on, or refused before it does."""
        if connection.at_end:
            return self.close(connection)
        if connection.inbox.expected:
            connection.inbox.expected = False
            try:
                headers.check_head((connection.inbox.head or headers.NO_HEAD).octets, self.policy)
            except Refused as refusal:
                return self.refuse(connection, rejection_for(refusal))
            if not connection.inbox.received:
                with contextlib.suppress(OSError):
                    connection.outbox.put(b"HTTP/1.1 100 Continue\r\n\r\n")
        limit = "request_timeout" if connection.inbox.begun() else "idle_timeout"
        if connection.limit != limit:
            self.set_deadline(connection, limit)
        return None

    def refuse(self, connection: Connection, rejection: Rejection) -> None:
        """The last answer on a connection: nobody can tell where its next request begins, or whether it comes."""
        self.set_deadline(connection)
        exchange = connection.exchange = self.RequestHandlerClass(connection, connection.inbox.head or headers.NO_HEAD)
        exchange.quick = True
        if self.wire:
            self.wire.show("-->", exchange, connection.inbox.received[:65536].decode("latin-1"))
        connection.inbox.received.clear()
        exchange.close_connection = True
        exchange.send_rejection(rejection)
        self.go_on(exchange)

    # deadlines and ends

    def set_deadline(self, connection: Connection, limit: str = "") -> None:
        """From now on, or none; those of one limit stand in the order in which they come due."""
        if connection.limit:
            del self.deadlines[connection.limit][connection]
        connection.limit, connection.arrived = limit, 0
        if limit:
            self.deadlines[limit][connection] = deadline = time.monotonic() + getattr(self, limit)
            if deadline < self.next_look:
                self.next_look = deadline

    def expire(self, now: float) -> None:
        """Ends what has waited for too long."""
        if now >= self.resume_accepting:
            self.resume_accepting = math.inf
            self.selector.register(self.socket, selectors.EVENT_READ)
        for limit, waiting in self.deadlines.items():
            while waiting and next(iter(waiting.values())) <= now:
                (self.time_out if limit == "request_timeout" else self.drop)(next(iter(waiting)))
        oldest = [next(iter(waiting.values())) for waiting in self.deadlines.values() if waiting]
        self.next_look = min([*oldest, self.resume_accepting])

    def time_out(self, connection: Connection) -> None:
        """A request that has not arrived in its time; what arrives slowly but steadily is given the same time again."""
        if connection.arrived > SLOWEST * self.request_timeout:
            self.set_deadline(connection, "request_timeout")
        else:
            self.refuse(connection, Rejection(None, "The request did not arrive in time", status=408,
                                              rule="rfc9110 §15.5.9"))

    def close(self, connection: Connection) -> None:
        """Lets the client read the last answer first: to close over unread octets would be a reset."""
        self.places -= connection.place
        connection.place = False
        if connection.at_end or connection.outbox.lost:
            return self.drop(connection)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        connection.inbox.received.clear()
        self.set_deadline(connection, "linger_timeout")
        return None

    def drop(self, connection: Connection) -> None:
        """Closes the socket and forgets it."""
        self.places -= connection.place
        connection.place = False
        self.set_deadline(connection)
        connection.exchange = None
        self.connections.discard(connection)
        if not connection.at_end:
            self.selector.unregister(connection.socket)
        connection.socket.close()

    def end_connections(self) -> None:
        """Subscriptions get their result, calls are cancelled, the rest ends; half a second for all of it."""
        if self.resume_accepting == math.inf:
            self.selector.unregister(self.socket)
        self.resume_accepting = math.inf
        self.socket.close()
        deadline = time.monotonic() + 0.5
        self.mcp.subscriptions.end(deadline)
        for connection in list(self.connections):
            if connection.exchange and not connection.exchange.parked:
                connection.exchange.cancel("server stopped")
            elif connection.exchange is None and connection.limit != "linger_timeout":
                self.drop(connection)
        while self.connections and time.monotonic() < deadline:
            self.turn(0.02)
        for connection in list(self.connections):
            self.drop(connection)


class Wire:
    """--wire: shows what crosses the wire, as it crosses, in the log; what authenticates is masked."""

    # up to its colon if it has one: in a line that is malformed, the rest may be a secret all the same
    secret = re.compile(r"(?is)([^:]*?(?:authorization|cookie|api-?key|auth-token)[\w-]*:?).*")

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        plain = os.environ.get("NO_COLOR") or not os.isatty(2) or os.name == "nt"  # not every window there knows them
        self.colours = {} if plain else {"-->": "\033[36m", "<--": "\033[33m", "--x": "\033[33m"}

    def show(self, arrow: str, exchange: Any, text: str) -> None:
        """The lines of a text, each with an arrow, the request's number, milliseconds since it had come."""
        if not hasattr(exchange, "number"):
            exchange.number = next(self.numbers)
        colour = self.colours.get(arrow, "")
        milliseconds = 1000 * (time.monotonic() - exchange.began)
        masking = False
        for line in filter(None, re.split(r"[\r\n]+", text)):
            secret = self.secret.fullmatch(line)
            masking = bool(secret) or (masking and line[0] in " \t")  # a folded line goes on with the one before
            shown = f"{secret[1]} ***" if secret else "***" if masking else line
            log(shown, f"{colour}{arrow} #{exchange.number} {milliseconds:7.1f} ms  ", "\033[0m" if colour else "")


# ---- stdio -----------------------------------------------------------------------------------------------------

MAX_WAITING = 64 << 20  # octets that may wait for a reader of stdout before no more is read from stdin
PIPE_BUF = getattr(select, "PIPE_BUF", 512)


class StdioExchange(Exchange):
    """The way back to the client for one stdio request, on the output that all of them share."""

    def __init__(self, transport: StdioTransport, key: tuple[type, Any]) -> None:
        super().__init__()
        self.transport, self.key, self.outbox = transport, key, transport.outbox

    def emit(self, message: Json) -> None:
        """As everywhere; a method that says more than its client reads waits for it, like one over HTTP."""
        while self.outbox.weight > MAX_WAITING and not (self.quick or self.reason or self.over or self.outbox.lost):
            time.sleep(0.01)
        super().emit(message)

    def send_message(self, text: bytes) -> None:
        """One line, or several; the reader's own wait until it has taken all lines that it has."""
        if self.transport.wire:
            self.transport.wire.show("<--", self, text.decode("utf-8", "replace"))
        if self.quick and not self.parked and self.transport.reader == threading.get_ident():
            self.transport.answers.append(text)
        else:
            self.transport.write(text + b"\n")

    def answer(self, text: bytes) -> None:
        """The response, unless the request has been cancelled. Its id is free before it goes out."""
        with self.lock, self.transport.lock:
            self.transport.forget(self)
            if not self.over and not self.reason:
                self.over = True
                self.send_message(text)

    def end(self, result: bytes | None) -> None:
        """Ends a subscription from this side: its result, then a notification that says so."""
        # spec: Cancellation › Cancellation: MUST send notifications/cancelled when it tears down a subscription
        # choice: after the result, because client libraries believe the first of the two; not over HTTP, because the
        # schema has it on stdio only, and the end of the stream says the same.
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": self.key[1]}}
        self.answer((result + b"\n" if result else b"") + sse.encode_json(note))


class StdioTransport:
    """One client over a pair of pipes, a message a line. The reader answers what is quick, lines read together with
    few writes; everything else has a worker. `exchanges` (requests in progress): the reader adds, who answers removes,
    with `lock` held until the answer is in the outbox.
    """

    def __init__(self, mcp: Server, source: int, sink: int, user: str, wire: Wire | None = None) -> None:
        self.mcp, self.source, self.sink, self.user, self.wire = mcp, source, sink, user, wire
        self.exchanges: dict[tuple[type, Any], StdioExchange] = {}
        self.lock = threading.Lock()
        self.poll = select.poll() if hasattr(select, "poll") else None  # without it everything has a thread to wait
        if self.poll:
            self.poll.register(sink, select.POLLOUT)
        self.workers = Workers()
        self.outbox = Outbox(self.send_some, self.send_all, self.workers.run, self.look_at_output)
        self.reader = 0  # the thread that reads
        self.answers: list[bytes] = []  # its own, of the lines that it has read together
        self.taken = time.monotonic()  # when the client last took something
        self.over = threading.Event()  # set at end of input, or when nobody reads the output any more
        self.failed = ""  # what made it end, if not the end of input

    def serve(self) -> int:
        """Until the end of input; what was read is answered then, within a second. The exit status: 1 for a loss."""
        self.mcp.start()
        patience = 10.0
        try:
            threading.Thread(target=self.read, name="stdio reader", daemon=True).start()
            while not self.over.wait(1):  # on Windows a signal does not end a wait
                pass
        except KeyboardInterrupt:  # SIGINT and SIGTERM end it too, and whoever sends them waits for less
            patience = 0.5
        deadline = time.monotonic() + 1
        self.mcp.subscriptions.end(deadline)
        while self.exchanges and time.monotonic() < deadline:
            self.mcp.stopped.wait(0.01)
        for exchange in list(self.exchanges.values()):
            exchange.cancel("end of input")
        with self.lock:  # the last answer is in the outbox
            pass
        self.taken = time.monotonic()  # a client that takes something now and then is waited for
        while self.outbox.behind and not self.outbox.lost and time.monotonic() < self.taken + patience:
            self.mcp.stopped.wait(0.01)
        if (behind := self.outbox.behind) and not self.failed:
            self.failed = f"nobody reads the output: {behind} pieces of it are lost"
        if self.failed:
            log(self.failed)
        self.mcp.stop()
        return int(bool(self.failed))

    def read(self) -> None:
        """The reader: lines of at most MAX_MESSAGE octets; a longer one is skipped in bounded memory."""
        self.reader, lines = threading.get_ident(), sse.LineSplitter(MAX_MESSAGE)
        try:
            while octets := self.receive():
                self.take_lines(lines.feed(octets))
            self.take_lines(lines.feed(b"\n"))
        except OSError as problem:
            self.failed = f"stdin cannot be read: {problem}"
        finally:
            self.over.set()

    def receive(self) -> bytes:
        """The next octets, none at the end of input; octets, the end, or a reader that has caught up wakes it."""
        while self.outbox.weight > MAX_WAITING and not self.outbox.lost:
            time.sleep(0.01)
        while True:
            try:
                return os.read(self.source, 65536)
            except BlockingIOError:  # a parent's O_NONBLOCK
                select.select([self.source], [], [])

    def take_lines(self, lines: list[bytes | None]) -> None:
        """Lines that came together: what the reader answers itself goes out together too."""
        for line in lines:
            self.take(line)
        if self.answers:
            answers, self.answers = self.answers, []
            self.write(b"\n".join(answers) + b"\n")

    def take(self, line: bytes | None) -> None:
        """One line: a request is answered or gets a worker, a cancellation takes effect, anything else is an error."""
        exchange = None
        try:
            if line is None:
                raise Rejection(PARSE_ERROR, f"A message may have at most {MAX_MESSAGE} octets", rule="stdio › stdio")
            message = parse_message(line)
            if "id" not in message:
                return self.take_notification(message)
            key = type(message["id"]), message["id"]
            if key in self.exchanges:
                raise Rejection(INVALID_REQUEST, "This id's request is in progress", message_id=message["id"],
                                rule="Overview › Requests")
            exchange = self.exchanges[key] = StdioExchange(self, key)
            if self.wire:
                self.wire.show("-->", exchange, line.decode("utf-8", "replace"))
            name = message.get("params", {}).get(headers.NAME_SOURCE.get(message["method"], ""))
            exchange.quick = self.mcp.is_quick(message["method"], name if isinstance(name, str) else None)
            if exchange.quick:
                return self.answer(message, exchange)
            try:
                self.workers.run(self.answer, message, exchange)
            except RuntimeError as problem:
                raise Rejection(INTERNAL_ERROR, f"Not served: {problem}", message_id=message["id"],
                                rule="Overview › Error Codes") from None
        except Exception as problem:  # the reader outlives whatever a line does to it
            rejection = rejection_for(problem)
            log(f"line refused: {rejection.line()}")
            if exchange:
                with self.lock:
                    self.forget(exchange)
            self.answers.append(sse.encode_json(rejection.response(rejection.id)))
        return None

    def take_notification(self, message: Json) -> None:
        """Cancels the request that it names, by id and type."""
        # spec: Cancellation › Error Handling: SHOULD ignore unknown, finished and malformed ones
        params = message.get("params", {})
        request_id, reason = params.get("requestId"), params.get("reason")
        exchange = self.exchanges.get((type(request_id), request_id)) if type(request_id) in (str, int) else None
        if message["method"] == "notifications/cancelled" and exchange:
            # spec: Cancellation › Implementation Notes: both parties SHOULD log cancellation reasons
            exchange.cancel("notifications/cancelled" + (f": {reason[:200]}" if isinstance(reason, str) else ""))
            if exchange.parked:
                log(f"subscriptions/listen ended ({exchange.reason})")
                with self.lock:
                    self.forget(exchange)
                self.mcp.subscriptions.forget(exchange)

    def answer(self, message: Json, exchange: StdioExchange) -> None:
        """The reader or a worker: one request."""
        if answer := respond(self.mcp, message, exchange, self.user):
            exchange.answer(answer.body)
        elif not exchange.parked:
            with self.lock:
                self.forget(exchange)

    def forget(self, exchange: StdioExchange) -> None:
        """Its id is free, if it is still its own; called with `lock` held."""
        if self.exchanges.get(exchange.key) is exchange:
            del self.exchanges[exchange.key]

    def write(self, octets: bytes) -> None:
        """Puts whole lines out."""
        try:
            self.outbox.put(octets)
        except OSError:
            self.look_at_output()

    def look_at_output(self) -> None:
        """Who writes, or the writer when it is done or has failed: when nobody reads any more, everything ends."""
        if self.outbox.lost:
            self.failed = "stdout cannot be written: what was to be sent is lost"
            self.over.set()
            for exchange in list(self.exchanges.values()):
                exchange.cancel("stdout closed")

    def send_some(self, octets: bytes) -> int:
        """What the pipe takes without waiting: PIPE_BUF octets at a time, as long as it is ready for them."""
        sent = 0
        try:
            while sent < len(octets) and self.poll and self.poll.poll(0):
                sent += os.write(self.sink, octets[sent : sent + PIPE_BUF])
        except BlockingIOError:
            pass
        return sent

    def send_all(self, octets: bytes) -> None:
        """The stdio writer: everything, however long the client takes."""
        rest = memoryview(octets)
        while rest:
            try:
                rest = rest[os.write(self.sink, rest[:65536]) :]
                self.taken = time.monotonic()
            except BlockingIOError:
                ready_to_send(self.sink, 1)


def serve_stdio(mcp: Server, wire: bool = False) -> int:
    """Serves the process's stdin and stdout; nothing else in the process or its children reads or writes them."""
    source, sink, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # spec: stdio › stdio: MUST NOT write anything to stdout that is not a valid MCP message
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    user = os.environ.get("MCP_USER") or "anonymous"
    with contextlib.suppress(KeyboardInterrupt):
        return StdioTransport(mcp, source, sink, user, Wire() if wire else None).serve()
    return 1  # a second signal, before the end was in order


# ---- the log ---------------------------------------------------------------------------------------------------

MAX_LOG_LINES, MAX_LOG_LINE = 10_000, 2_000  # lines that may wait; characters in one


class LogWriter:
    """stderr, for which nobody waits: lines queue here, one thread writes them, what is too much is dropped.

    `lock` guards `dropped` and `running`, and is held for moments only; a line wakes the writer.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self.descriptor = descriptor
        self.lock = threading.Lock()
        self.lines: collections.deque[str] = collections.deque()  # anybody adds, the writer takes
        self.dropped = 0
        self.wake = threading.Event()
        self.running = False  # there is a writer
        self.busy = False  # it has lines in hand

    def put(self, line: str) -> None:
        """Adds a line, and returns at once."""
        if len(self.lines) >= MAX_LOG_LINES:
            with self.lock:
                self.dropped += 1
            return
        self.lines.append(line)
        if not self.running:
            with self.lock, contextlib.suppress(RuntimeError):  # no thread to be had: the lines wait for the next one's
                if not self.running:
                    threading.Thread(target=self.run, name="log writer", daemon=True).start()
                    self.running = True
        if not self.wake.is_set():
            self.wake.set()

    def run(self) -> None:
        """The log writer: a line after a pause goes out at once; those of a burst are gathered for 10 ms."""
        while self.wake.wait():
            self.wake.clear()
            self.busy = True
            lines = [self.lines.popleft() for _ in range(len(self.lines))]
            with self.lock:
                dropped, self.dropped = self.dropped, 0
            if dropped:
                lines.append(f"[ref] {dropped} log lines were dropped: nobody read them in time\n")
            for start in range(0, len(lines), 500):
                self.write("".join(lines[start : start + 500]))
            self.busy = False
            time.sleep(0.01)

    def write(self, text: str) -> None:
        """The one place that writes to stderr, which may be a pipe that is full, closed or set to O_NONBLOCK."""
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                return

    def finish(self) -> None:
        """At the end of the process: half a second for what is left."""
        deadline = time.monotonic() + 0.5
        while (self.lines or self.busy) and time.monotonic() < deadline:
            time.sleep(0.002)


log_writer = LogWriter()


def log(text: str, prefix: str = "[ref] ", suffix: str = "") -> None:
    """One event, one line on stderr; nothing that comes from outside can break or forge a line, or flood the screen."""
    if not text.isprintable() or len(text) > MAX_LOG_LINE:
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:MAX_LOG_LINE])
        cut = f"… ({len(text)} characters)" if max(len(text), len(shown)) > MAX_LOG_LINE else ""
        text = shown[:MAX_LOG_LINE] + cut
    log_writer.put(f"{prefix}{text}{suffix}\n")


def log_fault(fault: BaseException) -> None:
    """The traceback of a fault, for whoever mends it: what led to it first, and a log line for each of its lines."""
    one: BaseException | None = fault
    chain: list[BaseException] = []
    while one is not None and len(chain) < 10:
        chain.append(one)
        one = one.__cause__ if one.__suppress_context__ else one.__context__  # a cause suppresses the context
    for one in reversed(chain):
        log("Traceback (most recent call last):")
        for line in "".join(traceback.format_tb(one.__traceback__, limit=-20)).splitlines():
            log(line)
        log("".join(traceback.format_exception_only(one)).rstrip())


# ---- the command line ------------------------------------------------------------------------------------------


def number_between(low: float, high: float, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """The type of an option whose value lies between two numbers; argparse puts the option's name before the words."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a {whole}number from {low:g} to {high:.0f}")

    return parse


def not_empty(value: str) -> str:
    """The type of an option that may not be empty."""
    if not value.strip() or "\0" in value or value != value.encode(errors="ignore").decode():
        raise argparse.ArgumentTypeError("it may not be empty, nor contain NUL, and must be UTF-8")
    return value


def web_origin(value: str) -> str:
    """The type of --allow-origin."""
    try:
        return headers.parse_origin(value)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


class Options(argparse.ArgumentParser):
    """The parser of the command line. What it refuses is one line of the log, since nobody may wait for stderr."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        log(f"{message} (--help lists the options)", "reference_server: ")
        raise SystemExit(2)


def parse_command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with a --help that a newcomer understands."""
    parser = Options(
        description="A reference server for MCP 2026-07-28: run it, then talk to it with the curl helper.",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="example: python3 reference_server.py --port 3005, and in another terminal\n"
               "  export MCP=http://127.0.0.1:3005/mcp; source tests/lessons/mcp.sh; mcp server/discover …")
    add = parser.add_argument_group("for the lessons").add_argument
    seconds = number_between(0.1, 1_000_000)
    add("--stdio", action="store_true", help="serve one client over stdin and stdout instead of HTTP")
    add("--host", type=not_empty, default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=number_between(0, 65535, int), help="port (default: $PORT, or 3000; 0: any)")
    add("--step-seconds", type=number_between(0, 1_000_000), default=1.0,
        help="how long one of build_report's ten steps takes (default: 1)")
    add("--keep-alive", type=number_between(0.001, 1_000_000), default=15.0,
        help="seconds until a quiet stream gets a comment (default: 15)")
    add("--allow-origin", type=web_origin, action="append", default=[], metavar="ORIGIN",
        help="a web origin that may call, too")
    add("--state", type=not_empty, default=":memory:", metavar="FILE",
        help="keep carts, holds and tasks in this SQLite file")
    add("--wire", action="store_true", help="print everything that crosses the wire, as it crosses")
    add = parser.add_argument_group("limits").add_argument
    add("--rate", type=number_between(0, 1e9), default=1000,
        help="tool calls a second for each user, 0: no limit (default: 1000)")
    add("--max-connections", type=number_between(1, 1_000_000, int), default=4096,
        help="connections served at a time (default: 4096)")
    add("--max-body", type=number_between(1, 1 << 30, int), default=MAX_MESSAGE,
        help="octets in one message (default: 1 MiB)")
    add("--idle-timeout", type=seconds, default=30, help="seconds between two requests on a connection (default: 30)")
    add("--request-timeout", type=seconds, default=10, help="seconds for a request to arrive (default: 10)")
    add("--write-timeout", type=seconds, default=10, help="seconds for a client to read what is sent (default: 10)")
    options = parser.parse_args(arguments)
    if options.port is None and not options.stdio:
        try:
            options.port = number_between(0, 65535, int)(os.environ.get("PORT") or "3000")
        except argparse.ArgumentTypeError as problem:
            parser.error(f"the environment's PORT: {problem}")
    return options


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have; a connection takes one."""
    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for wanted in (hard, 10_240):  # macOS says "no limit" and takes no more than that
            with contextlib.suppress(OSError, ValueError):
                return resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_missing_descriptors() -> bool:
    """Whether a parent has closed 0 or 1. The next file opened would get that number, so there is one now."""
    opened = []
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        opened.append(descriptor)
    os.close(descriptor)
    return min(opened, default=2) < 2


def main() -> int:
    """The exit status."""
    closed = open_missing_descriptors()
    try:
        options = parse_command_line()
        if options.stdio and closed:
            log("stdin or stdout is closed: over stdio there is nobody to serve", "reference_server: ")
            return 1
        rate = (options.rate, max(1.0, 5 * options.rate)) if options.rate > 0 else None
        with contextlib.closing(Store(options.state)) as store:
            mcp = demo_server(options.step_seconds, store, rate)
            return serve_stdio(mcp, options.wire) if options.stdio else serve_http(mcp, options)
    except StoreTrouble as problem:
        log(f"cannot use {options.state}: {problem}", "reference_server: ")
        return 1
    finally:
        log_writer.finish()


def serve_http(mcp: Server, options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM. The exit status."""
    try:
        http = HttpServer(mcp, options.host, options.port, options.allow_origin)
    except (OSError, OverflowError, UnicodeError) as problem:
        hint = "--host takes a name or an address of this machine, such as 127.0.0.1 or ::1"
        if isinstance(problem, OSError) and problem.errno in (errno.EADDRINUSE, errno.EACCES):
            hint = "take another, such as --port 3005, and export MCP=http://127.0.0.1:3005/mcp"
        log(f"cannot listen on {options.host}, port {options.port}: {problem}; {hint}", "reference_server: ")
        return 1
    for limit in ("keep_alive", "idle_timeout", "request_timeout", "write_timeout", "max_body", "max_connections"):
        setattr(http, limit, getattr(options, limit))
    http.wire = Wire() if options.wire else None
    raise_descriptor_limit()
    signal.set_wakeup_fd(http.waker.fileno(), warn_on_full_buffer=False)  # on Windows a signal does not end select()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: http.stop())
    host = str(http.server_address[0])  # choice: the address, since a name may have others that are not served
    host = f"[{host}]" if ":" in host else host
    log(f"MCP {SUPPORTED_VERSIONS[0]} at http://{host}:{http.port}/mcp (Ctrl-C ends it)")
    http.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

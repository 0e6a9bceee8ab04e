"""The Model Context Protocol, revision 2026-07-28: a reference server to run, to poke and to read.

    python reference_server.py            serves http://127.0.0.1:3000/mcp  (Streamable HTTP)
    python reference_server.py --stdio    serves one client over stdin and stdout

Every request stands alone: it carries its version, its client's capabilities and its user, and nothing is
remembered about the connection it came on. Closing the response stream is the cancellation. Headers are a copy
of the body and must agree with it. What must survive a hang-up is a task, and a task is a handle.

One request, end to end:

    client                     connection thread (one per TCP connection)         disconnect watcher
      | POST /mcp        --->  read_head, read_body    octets -> head and body
      |                        check_head              origin, path, verb, media types, user
      |                        parse_message           body -> one JSON-RPC message
      |                        open_request            metadata, mirrored headers, version, method
      |                        call_tool               checks its arguments, runs the tool's function
      |                          the tool waits or reports progress ------------> watch(socket)
      | <--- SSE event           emit()                                                |
      x closes                   request.cancelled is set  <---------------------- end of file seen
      |                        the tool stops; nothing more is written for this request

| thread             | made by                      | touches                                 | ends when        |
|--------------------|------------------------------|-----------------------------------------|------------------|
| accept loop        | main                         | the listening socket                    | shutdown         |
| connection thread  | accept loop, one each        | alone reads, writes, closes its socket  | connection ends  |
| disconnect watcher | server start                 | looks at sockets, cancels requests      | shutdown         |
| keeper             | server start                 | leases, expiry, others' changes         | shutdown         |
| task worker        | a task's start, one each     | the task's row only                     | task is terminal |
| stdio reader       | server start                 | reads lines, cancels requests           | end of input     |
| stdio worker       | stdio reader, one a request  | writes whole lines under one lock       | request answered |

A publisher of change notifications only puts into a subscription's queue; the subscription's own thread writes.
The story ends with the watcher; what follows it are the methods, the state that outlives requests, the demo.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import datetime
import errno
import functools
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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import headers
import sse
from headers import BadHead, Fields, HeaderMismatch

# ---------------------------------------------------------------------------------------------------- vocabulary

Json = dict[str, Any]

SUPPORTED_VERSIONS = ["2026-07-28"]
META = "io.modelcontextprotocol/"
TASKS = META + "tasks"
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION = -32020, -32021, -32022

# choice: 200 for what the method itself finds wrong, because the request as such was understood and served.
STATUS_OF_CODE = {PARSE_ERROR: 400, INVALID_REQUEST: 400, METHOD_NOT_FOUND: 404, HEADER_MISMATCH: 400,
                  MISSING_CAPABILITY: 400, UNSUPPORTED_VERSION: 400}
REASONS = {status.value: status.phrase for status in HTTPStatus}

MAX_MESSAGE = 1 << 20  # octets of one message, over HTTP and stdio
MAX_QUEUED = 1000  # notifications that a subscription may be behind before it is dropped
MAX_TASKS = 100  # unfinished tasks of one user
STATE_SECONDS = 600  # how long a requestState may travel
HANDLE_SECONDS = 86_400  # how long a cart or hold that nobody touches is kept
LEASE_SECONDS = 2.0  # how long a task may go without a sign of life of its worker
KEEPER_SECONDS = 0.2  # how often leases are renewed and other instances' changes are looked for


class Rejection(Exception):
    """A request that is not served: JSON-RPC code (None: HTTP refuses it), message, data, HTTP status, field lines.

    `rule` is what the refusal rests on, "Page › Heading" of the specification or "rfc9110 §15.5.16"; the log shows it.
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


class ToolError(Exception):
    """A failure that a model can act on: the call's result says `isError: true` and this text."""


class Cancelled(BaseException):
    """Nobody waits for this request any more. No Exception, so that no tool swallows it by accident."""


class BecomesTask(BaseException):
    """The tool goes on as a task, see `Request.as_task`."""

    def __init__(self, ttl_ms: int) -> None:
        super().__init__()
        self.ttl_ms = ttl_ms


def log(text: str, prefix: str = "[ref] ", suffix: str = "") -> None:
    """One event, one line on stderr, in one write; nothing that a client sends can break or forge a line."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    with contextlib.suppress(OSError, ValueError):  # stderr may be a pipe that nobody reads any more
        sys.stderr.write(f"{prefix}{text}{suffix}\n")


# ------------------------------------------------------------------------------------------------------ endpoint


class Channel:
    """What a request sees of the way back to its client; as it stands, that of a task: nobody listens."""

    def emit(self, message: Json) -> None:
        """Sends one notification ahead of the response."""

    def comment_due(self) -> float:
        """Seconds until a quiet stream needs a comment."""
        return math.inf

    def keep_alive(self) -> None:
        """Sends a comment if one is due."""

    def watch(self, request: Request) -> None:
        """From now on, a client that goes away cancels this request."""

    def unwatch(self, request: Request) -> None:
        """The request is over."""


class Head(NamedTuple):
    """What the head of an HTTP request says."""

    verb: str
    path: str  # of the request-target, without its query
    version: str  # HTTP/1.1 or HTTP/1.0
    fields: Fields
    host: str | None  # of the Host field, without its port
    length: int  # octets of the body, or headers.CHUNKED
    last: bool  # the connection ends after this request


NO_HEAD = Head("", "", "HTTP/1.1", {}, None, 0, True)


class Endpoint(BaseHTTPRequestHandler, Channel):
    """One TCP connection on its own thread: the only one that reads, writes or closes this socket."""

    server: HttpServer

    def setup(self) -> None:
        """Takes the socket over from the accept loop."""
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.received = bytearray()  # octets read from the socket and not used yet
        self.gone = False  # the client reads no more
        self.crowded = len(self.server.connections) > self.server.max_connections

    def handle_one_request(self) -> None:
        """Reads one head and answers it. What breaks HTTP's framing is answered, and ends the connection."""
        self.head, self.streaming, self.last_write = NO_HEAD, False, time.monotonic()
        try:
            self.head = read_whole_head(self.read_head())
            self.close_connection = self.head.last
            (self.do_POST if self.head.verb == "POST" else self.do_other)()
        except BadHead as broken:
            self.send_last(Rejection(None, str(broken), status=broken.status))
        except TimeoutError:
            self.send_last(Rejection(None, "The request did not arrive in time", status=408))
        except Rejection as rejection:
            self.send_rejection(rejection)
        except (Cancelled, OSError):
            self.close_connection = True

    def do_POST(self) -> None:
        """The MCP endpoint: one message in, one answer out; the first check that fails is the answer."""
        body = self.read_body()  # 1 (with the head): framing and sizes
        user = self.check_head()  # 2 to 7: origin, path, verb, media types, user
        message = parse_message(body)  # 8 and 9: one JSON-RPC request or notification
        if "id" not in message:
            self.send_accepted(message)  # 10
        else:
            answer = self.server.mcp.respond(message, self, user, self.head.fields)  # 11 to 18
            self.send_answer_to_request(answer)

    def do_other(self) -> None:
        """No message: a health probe, a browser's preflight, or a refusal that says what to do instead."""
        self.read_body()
        if self.head.verb == "GET" and self.head.path == "/healthz":
            self.check_origin()
            self.send_answer(200, b"ok\n", "text/plain")
        elif self.head.verb == "OPTIONS" and self.head.path == "/mcp" and "origin" in self.head.fields:
            self.check_origin()
            self.send_answer(204, fields=preflight_lines(self.head.fields))
        else:
            self.check_head()

    # reading

    def receive(self, deadline: float) -> None:
        """Waits for more octets. Wakes for octets, end of file, the deadline, and SHUT_RD at shutdown."""
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))
        octets = self.connection.recv(65536)
        if not octets:
            raise Cancelled("stream closed")
        self.received += octets
        if time.monotonic() >= deadline:  # one octet every few seconds is not progress
            raise TimeoutError

    def read_head(self) -> bytes:
        """The next request's head, without its blank line."""
        self.started = bool(self.received)
        deadline = time.monotonic() + (self.server.request_timeout if self.started else self.server.idle_timeout)
        while True:
            while self.received.startswith(b"\r\n"):  # rfc9112 §2.2: ignore empty lines before the request line
                del self.received[:2]
            if (end := self.received.find(b"\r\n\r\n")) >= 0:
                break
            if self.received:
                headers.check_head_so_far(self.received)
            self.receive(deadline)
            if not self.started:
                self.started, deadline = True, time.monotonic() + self.server.request_timeout
        return self.take(end + 4)[:-4]

    def read_body(self) -> bytes:
        """The body, within the size limit; after `Expect: 100-continue` only if the head passes its checks."""
        if (length := self.head.length) > self.server.max_body:
            raise BadHead(413, f"A message may have at most {self.server.max_body} octets")
        if "expect" in self.head.fields and self.head.version == "HTTP/1.1":
            self.answer_expectation()
        deadline = time.monotonic() + self.server.request_timeout
        if length == headers.CHUNKED:
            return self.read_chunks(deadline)
        while len(self.received) < length:
            self.receive(deadline)
        return self.take(length)

    def read_chunks(self, deadline: float) -> bytes:
        """A body whose length is only known at its end."""
        decoder = sse.ChunkDecoder(self.server.max_body)
        try:
            while (body := decoder.take(self.received)) is None:
                self.receive(deadline)
        except ValueError as broken:
            raise BadHead(413 if isinstance(broken, sse.TooLarge) else 400, str(broken)) from None
        return body

    def take(self, count: int) -> bytes:
        """The first octets received."""
        octets = bytes(self.received[:count])
        del self.received[:count]
        return octets

    def answer_expectation(self) -> None:
        """rfc9110 §10.1.1: the final status at once if the head decides it, else 100 and then the body."""
        if ",".join(self.head.fields["expect"]).lower() != "100-continue":
            raise BadHead(417, "The only expectation served here is 100-continue")
        try:
            self.check_head()
        except Rejection:
            self.close_connection = True  # the client may or may not send the body now
            raise
        if not self.received:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    # rungs 2 to 7: what the head alone decides

    def check_head(self) -> str:
        """The user's name. Rejection when the head alone says that this request is not served."""
        if self.crowded:
            self.close_connection = True
            raise Rejection(503, "Too many connections", status=503, fields="Retry-After: 1\r\n")
        self.check_origin()
        if self.head.path != "/mcp":
            raise Rejection(None, "Nothing here. POST your MCP messages to /mcp; GET /healthz says ok.", status=404)
        if self.head.verb != "POST":
            # spec: Streamable HTTP › Earlier Streamable HTTP Revisions: SHOULD answer GET and DELETE with 405
            raise Rejection(None, "This is an MCP endpoint: it takes JSON-RPC messages by POST. Try an MCP client, or"
                            " the curl helper tests/lessons/mcp.sh.", status=405, fields="Allow: POST, OPTIONS\r\n")
        if not headers.is_json(self.head.fields):
            raise Rejection(None, "Content-Type must be application/json", status=415)
        # choice: 406 for an Accept that does not list both, and for none at all, because absent is not a list.
        if not accepts_both(tuple(self.head.fields.get("accept", ()))):
            raise Rejection(None, "Accept must list application/json and text/event-stream", status=406)
        try:
            return headers.bearer_name(self.head.fields) or "anonymous"
        except ValueError as problem:
            raise Rejection(None, str(problem), status=401, fields="WWW-Authenticate: Bearer\r\n") from None

    def check_origin(self) -> None:
        """Rejects what a web page could send here by way of its visitor's browser."""
        # spec: Streamable HTTP › Security & Endpoint: MUST validate Origin, and MUST answer 403 if it is invalid
        if "origin" in self.head.fields and not self.origin_allowed():
            raise Rejection(None, "This Origin is not allowed here (see --allow-origin)", status=403)
        # choice: Host must be an address, localhost or an allowed origin's host, because DNS rebinding needs a name.
        if self.head.host and not headers.host_allowed(self.head.host, self.server.allow_hosts):
            raise Rejection(None, "This Host is not served here (see --allow-origin)", status=403)

    def origin_allowed(self) -> bool:
        """Whether the Origin that a browser sent is this machine's or one of --allow-origin."""
        return headers.origin_allowed(", ".join(self.head.fields["origin"]), self.server.allow_origins)

    # writing

    def send(self, octets: bytes) -> None:
        """All of it, or Cancelled when the client is gone or has read nothing for the write timeout."""
        try:
            self.connection.settimeout(self.server.write_timeout)
            self.connection.sendall(octets)
        except OSError:
            self.close_connection = self.gone = True
            raise Cancelled("stream closed") from None
        self.last_write = time.monotonic()

    def send_answer(self, status: int, body: bytes = b"", media_type: str = "", fields: str = "") -> None:
        """A whole answer in one write."""
        if media_type:
            fields += f"Content-Type: {media_type}\r\n"
        if status != 204:
            fields += f"Content-Length: {len(body)}\r\n"
        self.send(self.answer_head(status, fields) + (b"" if self.head.verb == "HEAD" else body))

    def answer_head(self, status: int, fields: str) -> bytes:
        """Status line and field lines, all built here; the one value that is echoed, Origin, has been checked."""
        cors = cors_lines(self.head.fields) if "origin" in self.head.fields and self.origin_allowed() else ""
        close = "Connection: close\r\n" if self.close_connection else ""
        return (f"HTTP/1.1 {status} {REASONS[status]}\r\nServer: mcp-reference-server\r\n"
                f"Date: {http_date(int(time.time()))}\r\n{cors}{close}{fields}\r\n").encode("latin-1")

    def send_accepted(self, message: Json) -> None:
        """202: over HTTP only the closed stream cancels, so a notification changes nothing here."""
        try:
            headers.check_notification_headers(self.head.fields, message)
        except HeaderMismatch as mismatch:
            raise rejection_for(mismatch) from None
        log(f"{message['method']} -> 202")
        self.send_answer(202)  # spec: Streamable HTTP › Sending Messages: MUST return 202 Accepted with no body

    def send_rejection(self, rejection: Rejection) -> None:
        """The answer to what got no further than HTTP or JSON; what a browser may show its user is a plain sentence."""
        log(f"{self.head.verb or '-'} {self.head.path or '-'} -> {rejection.status}, {rejection.message}")
        with contextlib.suppress(Cancelled):
            if rejection.status in (404, 405):
                text = rejection.message.encode() + b"\n"
                self.send_answer(rejection.status, text, "text/plain; charset=utf-8", rejection.fields)
            else:
                body = sse.encode_json(rejection.response(rejection.id))
                self.send_answer(rejection.status, body, "application/json", rejection.fields)

    def send_last(self, rejection: Rejection) -> None:
        """The last answer on a connection whose next request cannot be found; none if none has begun."""
        self.close_connection = True
        if self.started:
            self.send_rejection(rejection)

    def send_answer_to_request(self, answer: Answer) -> None:
        """A request's last message: the end of its stream, or the whole answer."""
        if self.streaming:
            self.send_stream(sse.frame_event(answer.body), last=True)
        else:
            self.send_answer(answer.status, answer.body, "application/json", answer.fields)

    def send_stream(self, octets: bytes, last: bool = False) -> None:
        """Events or a comment on the response stream; the first ones turn the answer into a stream."""
        if chunked := self.head.version == "HTTP/1.1":  # HTTP/1.0: the stream ends with the connection
            octets = sse.encode_chunk(octets) + (sse.LAST_CHUNK if last else b"")
        if not self.streaming:
            self.streaming = True
            # spec: Streamable HTTP › Receiving Messages: SHOULD include X-Accel-Buffering: no
            fields = "Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
            octets = self.answer_head(200, fields + ("Transfer-Encoding: chunked\r\n" if chunked else "")) + octets
        self.send(octets)

    # the channel of the request that is being answered

    def emit(self, message: Json) -> None:
        """Sends one notification, as an event."""
        self.send_stream(sse.encode_event(message))

    def comment_due(self) -> float:
        """Seconds until the stream has been quiet for one keep-alive interval."""
        return max(0.0, self.last_write + self.server.keep_alive - time.monotonic())

    def keep_alive(self) -> None:
        """Sends a comment if one is due; proxies cut streams that stay silent."""
        if self.comment_due() == 0:
            self.send_stream(sse.KEEP_ALIVE)

    def watch(self, request: Request) -> None:
        """Has the disconnect watcher look at this socket."""
        self.server.watcher.watch(self.connection, request)

    def unwatch(self, request: Request) -> None:
        """The socket may now carry the next request."""
        self.server.watcher.forget(self.connection)

    def finish(self) -> None:
        """Lets the client read the last answer before the close, which over unread octets would be a reset."""
        if self.gone:
            return
        with contextlib.suppress(OSError, Cancelled):
            self.connection.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + 1
            while True:
                self.received.clear()
                self.receive(deadline)


class WiredEndpoint(Endpoint):
    """An endpoint that prints what crosses the wire, as it crosses (--wire); bearer values are masked."""

    numbers = itertools.count(1)

    def setup(self) -> None:
        """Gives the connection its number."""
        super().setup()
        self.number, self.began = next(self.numbers), time.monotonic()

    def show(self, arrow: str, text: str) -> None:
        """The lines of a text, each with an arrow, the connection's number, milliseconds since the request began."""
        colour, plain = (f"\033[{36 if arrow == '-->' else 33}m", "\033[0m") if sys.stderr.isatty() else ("", "")
        milliseconds = 1000 * (time.monotonic() - self.began)
        for line in filter(None, re.split(r"\r\n|\n", text)):
            masked = re.sub(r"(?is)^(authorization:).*", r"\1 ***", line)
            log(masked, f"{colour}{arrow} #{self.number} {milliseconds:7.1f} ms  ", plain)

    def read_head(self) -> bytes:
        """Shows the request line and the field lines."""
        head = super().read_head()
        self.began = time.monotonic()
        self.show("-->", head.decode("latin-1"))
        return head

    def read_body(self) -> bytes:
        """Shows the message."""
        body = super().read_body()
        self.show("-->", body.decode("utf-8", "replace"))
        return body

    def send(self, octets: bytes) -> None:
        """Shows status, field lines, body, events and comments, without the sizes of chunks."""
        super().send(octets)
        self.show("<--", re.sub(r"(?m)^[0-9a-f]+\r\n", "", octets.decode("utf-8", "replace")))

    def unwatch(self, request: Request) -> None:
        """Shows the hang-up, if that is why the request is over."""
        super().unwatch(request)
        if request.reason:
            self.show("--x", f"{request.reason}: request {request.id!r} is cancelled")


@functools.lru_cache(64)  # on a kept connection most heads are the same octets
def read_whole_head(octets: bytes) -> Head:
    """What a head says, a function of its octets alone. BadHead for one that breaks the rules."""
    verb, target, version, fields = headers.parse_head(octets)
    if not target.startswith("/"):
        target = re.sub(r"^https?://[^/?#]*", "", target)  # rfc9112 §3.2.2: MUST accept absolute-form
    length = headers.check_framing(fields, version)
    if verb == "POST" and not fields.keys() & {"content-length", "transfer-encoding"}:
        raise BadHead(411, "A message needs Content-Length, or the chunked coding")
    options = {one.strip().lower() for line in fields.get("connection", ()) for one in line.split(",")}
    last = version == "HTTP/1.0" or "close" in options
    return Head(verb, target.partition("?")[0], version, fields, headers.host_name(fields), length, last)


@functools.lru_cache(64)
def accepts_both(lines: tuple[str, ...]) -> bool:
    """Whether the Accept field lines list both media types of an answer."""
    fields = {"accept": list(lines)}
    return headers.accepts(fields, "application/json") and headers.accepts(fields, "text/event-stream")


@functools.lru_cache(1)
def http_date(now: int) -> str:
    """The value of Date (rfc9110 §5.6.7) for a time in seconds."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now))


def cors_lines(fields: Fields) -> str:
    """The field lines that let an allowed page read the answer."""
    return (f"Access-Control-Allow-Origin: {fields['origin'][0]}\r\nVary: Origin\r\n"
            "Access-Control-Expose-Headers: Retry-After, WWW-Authenticate\r\n")


def preflight_lines(fields: Fields) -> str:
    """The answer to a preflight: the MCP headers, and the Mcp-Param-* that it asks for."""
    names = ["Content-Type", "Accept", "Authorization", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name"]
    asked = ",".join(fields.get("access-control-request-headers", ()))
    names += re.findall(r"(?i)\bmcp-param-[!#$%&'*+.^_`|~0-9a-z-]+", asked)
    return (f"Access-Control-Allow-Methods: POST\r\nAccess-Control-Allow-Headers: {', '.join(names)}\r\n"
            "Access-Control-Max-Age: 600\r\n")


def parse_message(octets: bytes) -> Json:
    """One JSON-RPC request or notification. Rejection -32700 for what is no JSON, -32600 for anything else."""
    try:
        message = sse.decode_json(octets)
    except ValueError as broken:
        raise Rejection(PARSE_ERROR, f"This is no JSON text: {broken}") from None
    # spec: Overview › Requests: MUST include a string or integer ID; the ID MUST NOT be null
    readable = isinstance(message, dict) and type(message.get("id")) in (str, int)
    problem = check_shape(message)
    if not problem and "id" in message and not readable:
        problem = ".id must be a string or an integer"
    # spec: Streamable HTTP › Sending Messages: the client MUST NOT send JSON-RPC responses
    if not problem and message.keys() & {"result", "error"}:
        problem = " is a response; only requests and notifications are taken"
    if problem:
        raise Rejection(INVALID_REQUEST, f"The message{problem}", message_id=message["id"] if readable else None)
    return dict(message)


# ------------------------------------------------------------------------------------------- disconnect watcher


class DisconnectWatcher(threading.Thread):
    """Looks at the sockets of the requests that wait, and tells a request when its client hangs up.

    It never reads, writes or closes. `lock` guards `watched`, which connection threads and this thread touch.
    """

    interval = 0.1  # seconds until `stop` is seen

    def __init__(self) -> None:
        super().__init__(name="disconnect watcher", daemon=True)
        self.lock = threading.Lock()
        self.watched: dict[int, tuple[socket.socket, Request]] = {}
        self.stopping = threading.Event()
        self.epoll = select.epoll() if hasattr(select, "epoll") else None

    def watch(self, connection: socket.socket, request: Request) -> None:
        """Called by a connection thread whose request begins to wait."""
        with self.lock:
            self.watched[connection.fileno()] = connection, request
            if self.epoll:  # asks for the end of file only: pipelined octets are no hang-up
                self.epoll.register(connection, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, connection: socket.socket) -> None:
        """Called by the connection thread when its request is over."""
        with self.lock:
            self.watched.pop(connection.fileno(), None)
            if self.epoll:
                self.epoll.unregister(connection)

    def run(self) -> None:
        """Sleeps until the kernel reports a hang-up; without epoll, looks every 50 ms."""
        while not self.stopping.is_set():
            suspects = [one for one, _ in self.epoll.poll(self.interval)] if self.epoll else list(self.watched)
            for descriptor in suspects:
                with self.lock:  # by now the descriptor may be another connection's, so look before telling
                    connection, request = self.watched.get(descriptor, (None, None))
                    if connection and request and hung_up(connection):
                        request.cancel("stream closed")
            if not self.epoll:
                self.stopping.wait(0.05)

    def stop(self) -> None:
        """Ends the thread and cancels what it still watches."""
        self.stopping.set()
        self.join()
        with self.lock:
            for _, request in self.watched.values():
                request.cancel("server stopped")


def hung_up(connection: socket.socket) -> bool:
    """Whether the peer has closed or reset the connection.

    choice: an end of file is a hang-up even if only half of the connection is closed, because Go's and Node's
    servers read it so, and nothing distinguishes the two before the first write.
    """
    if hasattr(select, "POLLRDHUP"):
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


class Workers:
    """Threads that are used again: one whose connection has ended takes the next instead of ending.

    `lock` guards `idle`; the accept loop and the workers touch it. A waiting worker is woken by a job or after 5 s.
    """

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.idle = 0  # workers that wait and that no job has been promised

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls the function on a thread of its own. RuntimeError when the system gives no more threads."""
        with self.lock:
            reuse = self.idle > 0
            self.idle -= reuse
        if reuse:
            self.jobs.put((function, arguments))
        else:
            threading.Thread(target=self.work, args=(function, arguments), daemon=True).start()

    def work(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """One worker's life: a job, then the next one if it comes in time."""
        while True:
            function(*arguments)
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
    """The listening socket, its connections and their limits (seconds, octets), which may be set before serving."""

    request_queue_size = 1024
    allow_reuse_address = os.name == "posix"  # elsewhere it would let two servers share the port
    keep_alive = 15.0  # silence before a stream gets a comment
    idle_timeout = 30.0  # between two requests
    request_timeout = 10.0  # for a head or a body that has begun
    write_timeout = 10.0  # for a client that does not read
    max_body = MAX_MESSAGE
    max_connections = 4096
    endpoint: type[Endpoint] = Endpoint

    def __init__(self, mcp: Server, host: str = "127.0.0.1", port: int = 0, allow_origins: Iterable[str] = ()) -> None:
        self.mcp = mcp
        self.allow_origins = frozenset(origin.lower() for origin in allow_origins)
        self.allow_hosts = {urlsplit(origin).hostname or "" for origin in self.allow_origins} | {host.lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connections: dict[socket.socket, None] = {}  # accept loop and connection threads; single operations only
        self.watcher, self.workers = DisconnectWatcher(), Workers()
        self.stopping = False  # set by a signal handler, which must not touch a lock
        super().__init__((host, port), Endpoint)

    def server_bind(self) -> None:
        """Binds without the standard library's reverse look-up, which can take seconds."""
        TCPServer.server_bind(self)
        self.port = self.server_address[1]

    def serve_forever(self, poll_interval: float = 0.1) -> None:
        """The accept loop. A connection wakes it; `stop` is seen within the poll interval, then all connections end."""
        self.mcp.start()
        self.watcher.start()
        self.socket.settimeout(poll_interval)
        exhausted = False
        while not self.stopping:
            try:
                connection, address = self.socket.accept()
                exhausted = False
            except TimeoutError:
                continue
            except OSError as problem:
                if problem.errno in (errno.EMFILE, errno.ENFILE) and not exhausted:
                    log("out of file descriptors: new connections wait")
                    exhausted = True
                time.sleep(0.05)
                continue
            self.connections[connection] = None
            try:
                self.workers.run(self.serve_connection, connection, address)
            except RuntimeError as problem:
                log(f"a connection was refused: {problem}")
                self.end_connection(connection)
            while len(self.connections) >= 2 * self.max_connections and not self.stopping:
                time.sleep(0.01)
        self.end_connections()

    def serve_connection(self, connection: socket.socket, address: Any) -> None:
        """A connection's whole life, on its own thread."""
        try:
            self.endpoint(connection, address, self)
        except OSError:
            pass
        except Exception:
            traceback.print_exc()  # a fault of this server's; the other connections go on
        finally:
            self.end_connection(connection)

    def end_connection(self, connection: socket.socket) -> None:
        """Closes the socket and forgets it."""
        self.connections.pop(connection, None)
        connection.close()

    def stop(self) -> None:
        """Ends `serve_forever`; callable from any thread and from a signal handler."""
        self.stopping = True

    def end_connections(self) -> None:
        """Subscriptions get their result, calls are cancelled, idle connections wake up; half a second for all."""
        self.socket.close()
        deadline = time.monotonic() + 0.6
        self.mcp.subscriptions.end(deadline - 0.3)
        self.watcher.stop()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads it; close() would not
        while self.connections and time.monotonic() < deadline:
            self.mcp.stopped.wait(0.005)
        self.mcp.stop()


# ------------------------------------------------------------------------------------------------------- requests


class Request:
    """Everything that the server may know while it answers one request, and the verbs of a tool that takes time.

    `cancelled` is set by the disconnect watcher (HTTP), by the stdio reader, by shutdown, or by a write that failed;
    the thread that runs the method reads it. Everything else belongs to that thread.
    """

    def __init__(self, message: Json, channel: Channel, user: str) -> None:
        self.id, self.method, self.params = message["id"], message["method"], message.get("params", {})
        self.meta: Json = self.params.get("_meta", {})
        self.capabilities: Json = self.meta.get(META + "clientCapabilities", {})
        self.channel, self.user = channel, user
        self.reason: str | None = None  # why it was cancelled
        self.wake: Callable[[], None] | None = None  # wakes the method's thread where it waits for something else
        self.reported: float | None = None  # the highest progress so far
        self.responses: Json = {}  # the checked inputResponses of a retried request
        self.state: Any = None  # what `input_required(state=…)` sealed in the round before
        self.asked: Json = {}  # the schemas of the forms that were asked for in that round
        self.held: Json = {}  # by method: the notification that came too fast to be sent

    @functools.cached_property
    def cancelled(self) -> threading.Event:
        """Set as soon as the client is gone. Looking at it for the first time begins the watch on the socket."""
        event = self.__dict__["cancelled"] = threading.Event()
        self.channel.watch(self)
        return event

    def cancel(self, reason: str) -> None:
        """Tells the method's thread that nobody waits any more; called from any thread, once or often."""
        self.reason = self.reason or reason
        self.cancelled.set()
        if self.wake:
            self.wake()

    def close(self) -> None:
        """The request is over."""
        if "cancelled" in self.__dict__:
            self.channel.unwatch(self)

    @property
    def done(self) -> float:
        """The progress reported so far; a task that was taken up again starts where it stopped."""
        return self.reported or 0

    def emit(self, message: Json) -> None:
        """One notification ahead of the response, if anybody still listens."""
        self.write(self.channel.emit, {"jsonrpc": "2.0"} | message)

    def write(self, send: Callable[..., None], *message: Json) -> None:
        """Has the channel send something; a client that turns out to be gone cancels the request."""
        if self.cancelled.is_set():
            raise Cancelled(self.reason)
        try:
            send(*message)
        except Cancelled as gone:
            self.cancel(str(gone))
            raise

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
        wanted = self.meta.get(META + "logLevel")
        if wanted is not None and LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted):
            self.notify("notifications/message", {"level": level, "logger": logger, "data": data})

    def sleep(self, seconds: float) -> None:
        """Returns after that time, or raises Cancelled as soon as the client is gone."""
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            if self.cancelled.wait(min(left, self.channel.comment_due())):
                raise Cancelled(self.reason)
            if not left:
                return
            self.write(self.channel.keep_alive)

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

        For a client that declared the tasks extension this does not return: its answer is a task handle, and a task
        worker runs the tool's function again from the top, where this call does nothing. Other clients wait for the
        result as before, or get -32021 when the tool cannot do without (`required`).
        """
        # spec: Tasks Extension › Capability Negotiation: MUST NOT return CreateTaskResult to a client without it
        if self.declares(NEEDS_TASKS):
            raise BecomesTask(ttl_ms)
        if required:
            self.require(NEEDS_TASKS)

    def ask(self, requests: Json) -> Json:
        """In a task: waits for the answers to these input requests; they are in `responses` too."""
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


# ------------------------------------------------------------------------------------------------------- schemas

Check = Callable[[Any], str | None]
NUMBER, STRING, ARRAY, MEMBERS = (int, float), (str,), (list,), (dict,)
EVERY = (*NUMBER, *STRING, *ARRAY, *MEMBERS, bool, type(None))
TYPES: dict[str, tuple[type, ...]] = {"string": STRING, "boolean": (bool,), "object": MEMBERS, "array": ARRAY,
                                      "null": (type(None),), "number": NUMBER, "integer": NUMBER}


def compile_schema(schema: Any, name: str = "the schema") -> Check:
    """A function that finds the first way in which a JSON value breaks the schema, None if it breaks none.

    What it says is to be put behind the value's name: ".month is required", " must be of type string". ValueError,
    with the place, for what is no schema of JSON Schema 2020-12 or says what is not checked here.
    """
    unnamed = {key: value for key, value in schema.items() if key != "$id"} if isinstance(schema, dict) else schema
    if problem := check_is_schema(unnamed):
        raise ValueError(f"{name}{problem} (see checks_own_arguments)")
    return Place(schema, name, schema, {}).compile()


class Place(NamedTuple):
    """A schema where it stands in the whole one. `behind`: members of $defs that lead here with the same value."""

    schema: Any
    path: str
    whole: Any
    definitions: dict[str, Check]  # compiled already, or just now
    behind: tuple[str, ...] = ()

    def below(self, schema: Any, step: str) -> Check:
        """The function of a schema for a part of the value."""
        return Place(schema, self.path + step, self.whole, self.definitions).compile()

    def compile(self) -> Check:
        """The schema's function: a look at the value's type, then the keywords that apply to it."""
        if isinstance(self.schema, bool):
            return (lambda value: None) if self.schema else (lambda value: " is not known here")
        kinds = self.schema.get("type", list(TYPES))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        wrong = f" must be of type {' or '.join(kinds)}"
        by_type: dict[type, list[Check]] = {one: [] for kind in kinds for one in TYPES[kind]}
        if "integer" in kinds and "number" not in kinds:  # to JSON Schema 42.0 is one
            by_type[float].append(lambda value: None if value.is_integer() else wrong)
        used = {KEYWORDS[keyword][1:]: argument for keyword, argument in self.schema.items() if keyword in KEYWORDS}
        for (types, make), argument in used.items():
            check_keyword = make(argument, self)
            for one in by_type:
                if one in types:
                    by_type[one].append(check_keyword)

        def check(value: Any) -> str | None:
            checks = by_type.get(type(value))
            if checks is None:
                return wrong
            for one in checks:
                if problem := one(value):
                    return problem
            return None

        return check


def limit(schema: Json, types: tuple[type, ...], breaks: Callable[[Any, Any], Any], words: str) -> Keyword:
    """A keyword that compares the value with its argument."""

    def make(argument: Any, place: Place) -> Check:
        problem = f" must {words.format(argument)}"
        return lambda value: problem if breaks(value, argument) else None

    return schema, types, make


def combination(keyword: str, schema: Json, fits: Callable[[int, int], bool], words: str) -> Keyword:
    """A keyword about how many of its schemas the value fits: `fits(these, all)`."""

    def make(argument: Any, place: Place) -> Check:
        checks = [place._replace(schema=one, path=f"{place.path}.{keyword}[{index}]").compile()
                  for index, one in enumerate(argument if isinstance(argument, list) else [argument])]

        def check(value: Any) -> str | None:
            problems = [problem for one in checks if (problem := one(value))]
            if fits(len(checks) - len(problems), len(checks)):
                return None
            reasons = f" ({';'.join(problems).strip()})" if problems else ""
            return problems[0] if keyword == "allOf" else f" must fit {words}{reasons}"

        return check

    return schema, EVERY, make


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value: 1 is 1.0, and members have no order; true is not 1."""
    same = json.loads(json.dumps(value), parse_float=lambda text: int(number) if (
        number := float(text)).is_integer() else number)
    return json.dumps(same, sort_keys=True)


def check_enum(values: list[Any], place: Place) -> Check:
    """`enum`, or `const`."""
    problem = f" must be one of {json.dumps(values)[1:-1]}"
    texts = {one for one in values if type(one) is str}
    others = {canonical(one) for one in values if type(one) is not str}
    return lambda value: None if (value in texts if type(value) is str else canonical(value) in others) else problem


def check_pattern(pattern: str, place: Place) -> Check:
    """As `re` has it, but for ECMA-262's `$`, the very end of the text, and `\\d`, an ASCII digit."""
    try:
        python = re.sub(r"(\\.|\[\^?]?(?:\\.|[^]\\])*])|\$", lambda part: part[1] or r"\Z", pattern, flags=re.DOTALL)
        search = re.compile(python, re.ASCII).search
    except re.error as problem:
        raise ValueError(f"{place.path}.pattern: {problem}") from None
    return lambda value: None if search(value) else f" must match the pattern {pattern}"


def check_members(argument: Any, place: Place) -> Check:
    """`required`, `propertyNames`, `properties`, and `additionalProperties` for the others."""
    required, properties = place.schema.get("required", ()), place.schema.get("properties", {})
    checks = {name: place.below(inner, f".properties.{name}") for name, inner in properties.items()}
    check_name, check_other = (place.below(place.schema[keyword], f".{keyword}") if keyword in place.schema else None
                               for keyword in ("propertyNames", "additionalProperties"))

    def check(value: Json) -> str | None:
        for name in required:
            if name not in value:
                return f".{name} is required"
        for name, inner in value.items():
            if check_name and (problem := check_name(name)):
                return f".{name[:100]}{problem}"
            if (check_inner := checks.get(name, check_other)) and (problem := check_inner(inner)):
                return f".{name[:100]}{problem}"
        return None

    return check


def check_items(argument: Any, place: Place) -> Check:
    """`prefixItems`, and `items` for those behind them."""
    prefix, check_other = place.schema.get("prefixItems", ()), place.below(place.schema.get("items", True), ".items")
    first = [place.below(one, f".prefixItems[{index}]") for index, one in enumerate(prefix)]

    def check(value: list[Any]) -> str | None:
        for index, item in enumerate(value):
            if problem := first[index](item) if index < len(first) else check_other(item):
                return f"[{index}]{problem}"
        return None

    return check


def check_reference(pointer: str, place: Place) -> Check:
    """`$ref` to a member of the whole schema's $defs; with the same value it must not come back."""
    start, _, last = pointer.rpartition("/")
    name, known = unquote(last).replace("~1", "/").replace("~0", "~"), place.definitions
    if start != "#/$defs" or name not in place.whole.get("$defs", {}):
        raise ValueError(f"{place.path}.$ref: {pointer} is no member of $defs (see checks_own_arguments)")
    if name in place.behind:
        raise ValueError(f"{place.path}.$ref: {pointer} returns to itself without descending into the value")
    target = place._replace(schema=place.whole["$defs"][name], path=f"$defs.{name}", behind=(*place.behind, name))
    if place.behind:
        return target.compile()
    if name not in known:
        known[name] = lambda value: None  # until it is compiled
        known[name] = target.compile()
    return lambda value: known[name](value)


TEXT: Json = {"type": "string"}
OBJECT: Json = {"type": "object"}
BOOLEAN: Json = {"type": "boolean"}
LIST: Json = {"type": "array"}
COUNT: Json = {"type": "integer", "minimum": 0}
SOME_NUMBER: Json = {"type": "number"}
ANY_SCHEMA: Json = {"$ref": "#/$defs/schema"}
TEXTS, SCHEMAS = ({"type": "object", "additionalProperties": one} for one in (TEXT, ANY_SCHEMA))
TEXT_LIST, SCHEMA_LIST = LIST | {"items": TEXT}, LIST | {"items": ANY_SCHEMA, "minItems": 1}
TYPE: Json = {"enum": list(TYPES)}
Keyword = tuple[Any, tuple[type, ...], Callable[[Any, Place], Any]]
# A keyword: the schema of its argument, the types of value that it looks at, what makes its check.
KEYWORDS: dict[str, Keyword] = {
    "enum": (LIST, EVERY, check_enum),
    "const": (True, EVERY, lambda value, place: check_enum([value], place)),
    "minimum": limit(SOME_NUMBER, NUMBER, operator.lt, "be at least {}"),
    "maximum": limit(SOME_NUMBER, NUMBER, operator.gt, "be at most {}"),
    "exclusiveMinimum": limit(SOME_NUMBER, NUMBER, operator.le, "be more than {}"),
    "exclusiveMaximum": limit(SOME_NUMBER, NUMBER, operator.ge, "be less than {}"),
    # in decimal digits, as they are written: 0.0075 is a multiple of 0.0001
    "multipleOf": limit(SOME_NUMBER | {"exclusiveMinimum": 0}, NUMBER,
                        lambda value, step: Fraction(str(value)) % Fraction(str(step)), "be a multiple of {}"),
    "minLength": limit(COUNT, STRING, lambda value, least: len(value) < least, "have at least {} characters"),
    "maxLength": limit(COUNT, STRING, lambda value, most: len(value) > most, "have at most {} characters"),
    "pattern": (TEXT, STRING, check_pattern),
    "minItems": limit(COUNT, ARRAY, lambda value, least: len(value) < least, "have at least {} items"),
    "maxItems": limit(COUNT, ARRAY, lambda value, most: len(value) > most, "have at most {} items"),
    "uniqueItems": limit(BOOLEAN, ARRAY, lambda value, wanted: wanted and len(set(map(canonical, value))) < len(value),
                         "have no two equal items"),
    "prefixItems": (SCHEMA_LIST, ARRAY, check_items),
    "items": (ANY_SCHEMA, ARRAY, check_items),
    "minProperties": limit(COUNT, MEMBERS, lambda value, least: len(value) < least, "have at least {} members"),
    "maxProperties": limit(COUNT, MEMBERS, lambda value, most: len(value) > most, "have at most {} members"),
    "required": (TEXT_LIST | {"uniqueItems": True}, MEMBERS, check_members),
    "propertyNames": (ANY_SCHEMA, MEMBERS, check_members),
    "properties": (SCHEMAS, MEMBERS, check_members),
    "additionalProperties": (ANY_SCHEMA, MEMBERS, check_members),
    "allOf": combination("allOf", SCHEMA_LIST, lambda fit, count: fit == count, "all"),
    "anyOf": combination("anyOf", SCHEMA_LIST, lambda fit, count: fit > 0, "one of anyOf"),
    "oneOf": combination("oneOf", SCHEMA_LIST, lambda fit, count: fit == 1, "exactly one of oneOf"),
    "not": combination("not", ANY_SCHEMA, lambda fit, count: fit == 0, "none of not"),
    "$ref": (TEXT, EVERY, check_reference),
    "$defs": (SCHEMAS, (), lambda schemas, place: [place.below(one, ".$defs") for one in schemas.values()]),
}
# What promises nothing, so that there is nothing to check; and `type`, which every schema's function begins with.
OTHERS: Json = dict.fromkeys(
    ("title", "description", "$comment", "$anchor", "format", "contentMediaType", "contentEncoding"), TEXT)
OTHERS |= {"default": True, "examples": LIST, "deprecated": BOOLEAN, "readOnly": BOOLEAN, "writeOnly": BOOLEAN,
           "contentSchema": ANY_SCHEMA, "x-mcp-header": True,
           "$schema": {"const": "https://json-schema.org/draft/2020-12/schema"},
           "type": {"anyOf": [TYPE, LIST | {"items": TYPE, "minItems": 1, "uniqueItems": True}]}}
KNOWN: Json = {"type": ["object", "boolean"], "additionalProperties": False,
               "properties": OTHERS | {keyword: row[0] for keyword, row in KEYWORDS.items()}}
check_is_schema = Place(ANY_SCHEMA, "", ANY_SCHEMA | {"$defs": {"schema": KNOWN}}, {}).compile()


def takes(optional: Json | None = None, /, **required: Json) -> Json:
    """The schema of an object with these properties."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


TOKEN: Json = {"type": ["string", "integer"]}
OBJECTS: Json = {"type": "object", "additionalProperties": OBJECT}
check_object = compile_schema(OBJECT)
check_shape = compile_schema(takes({"params": OBJECT}, jsonrpc={"enum": ["2.0"]}, method=TEXT))
# Capabilities are an open set, and what the schema does not name may be of any type.
CAPABILITIES = takes(dict.fromkeys(("elicitation", "sampling", "roots"), OBJECT)
                     | dict.fromkeys(("extensions", "experimental"), OBJECTS))
check_metadata = compile_schema(takes(
    {META + "clientInfo": takes(name=TEXT, version=TEXT), META + "logLevel": {"enum": list(LOG_LEVELS)},
     "progressToken": TOKEN}, **{META + "protocolVersion": TEXT, META + "clientCapabilities": CAPABILITIES}))
# choice: null counts as absent in what a client merely echoes, because client libraries send it so.
ECHOED: Json = {"inputResponses": OBJECTS | {"type": ["object", "null"]}, "requestState": {"type": ["string", "null"]}}
PARAMS: dict[str, Json] = {
    "tools/call": takes({"arguments": OBJECT} | ECHOED, name=TEXT),
    "prompts/get": takes({"arguments": TEXTS} | ECHOED, name=TEXT),
    "resources/read": takes(ECHOED, uri=TEXT),
    "completion/complete": takes({"context": takes({"arguments": TEXTS})}, argument=takes(name=TEXT, value=TEXT),
                                 ref=takes({"name": TEXT, "uri": TEXT}, type={"enum": ["ref/prompt", "ref/resource"]})),
    "subscriptions/listen": takes(notifications=takes({
        "toolsListChanged": BOOLEAN, "promptsListChanged": BOOLEAN, "resourcesListChanged": BOOLEAN,
        "resourceSubscriptions": TEXT_LIST, "taskIds": TEXT_LIST})),
    "tasks/get": takes(taskId=TEXT),
    "tasks/update": takes(taskId=TEXT, inputResponses=OBJECT),
    "tasks/cancel": takes(taskId=TEXT),
}
check_params = {method: compile_schema(schema) for method, schema in PARAMS.items()}
check_elicited = compile_schema(takes({"content": {"type": ["object", "null"]}},
                                      action={"enum": ["accept", "decline", "cancel"]}))
MAY_ASK = ("tools/call", "prompts/get", "resources/read")  # spec: Multi Round-Trip Requests › Supported Requests

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


# ------------------------------------------------------------------------------------------ the registry and dispatch


class Tool(NamedTuple):
    """A registered tool: its definition as listed, its function, and what its headers mirror."""

    definition: Json
    function: Callable[[Json, Request], str | Json]
    mirrored: list[headers.MirroredParameter]
    check_arguments: Check
    check_output: Check | None  # None: no output schema
    switchable: bool  # it can be listed and unlisted while the server runs
    quick: bool  # answered where requests are read: it takes no time, and waits for nothing


class Entry(NamedTuple):
    """A registered resource, resource template, prompt or completion; a resource's with caching hints."""

    definition: Json
    function: Callable[..., Any]
    hints: Json
    quick: bool


class Answer(NamedTuple):
    """A response, ready to send: HTTP status, JSON text, further field lines."""

    status: int
    body: bytes
    fields: str = ""


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
        self.instructions, self.changing = instructions, frozenset(changing)
        self.page_sizes: dict[str, int | None] = {"resources": page_size, "resourceTemplates": page_size}
        self.store, self.rate = store or Store(), RateLimit(*rate) if rate else None
        self.tools: dict[str, Tool] = {}
        self.resources: dict[str, Entry] = {}
        self.templates: dict[str, Entry] = {}
        self.prompts: dict[str, Entry] = {}
        self.completions: dict[tuple[str, str, str], Entry] = {}
        self.subscriptions, self.tasks = Subscriptions(self), Tasks(self)
        self.stopped = threading.Event()
        self.keeper = threading.Thread(target=self.keep, name="keeper", daemon=True)
        self.methods: dict[str, Callable[[Request], Json]] = {
            "server/discover": self.discover, "tools/list": functools.partial(self.page, "tools", self.tools),
            "resources/list": functools.partial(self.page, "resources", self.resources),
            "resources/templates/list": functools.partial(self.page, "resourceTemplates", self.templates),
            "prompts/list": functools.partial(self.page, "prompts", self.prompts),
            "tools/call": self.call_tool, "resources/read": self.read_resource, "prompts/get": self.get_prompt,
            "completion/complete": self.complete, "subscriptions/listen": self.subscriptions.listen,
            "tasks/get": self.tasks.get, "tasks/update": self.tasks.update, "tasks/cancel": self.tasks.cancel,
        }

    # what a server is built from; each is a decorator. `quick`: it neither waits nor computes for long, so that it is
    # answered where requests are read; what touches the state is not quick.

    def tool(self, name: str, description: str, input_schema: Json, *, title: str | None = None,
             icons: list[Json] | None = None, output_schema: Json | None = None, annotations: Json | None = None,
             listed: bool = True, checks_own_arguments: bool = False, quick: bool = False) -> Decorator:
        """Registers `function(arguments, request) -> text or result`. ValueError for a schema that breaks the rules."""
        mirrored = headers.mirrored_parameters(input_schema)
        if input_schema.get("type") != "object":
            raise ValueError(f"{name}'s inputSchema must be of type object")
        checked = (True, True) if checks_own_arguments else (input_schema, output_schema)
        check_arguments = compile_schema(checked[0], f"{name}'s inputSchema")
        check_output = None if output_schema is None else compile_schema(checked[1], f"{name}'s outputSchema")
        definition = present(name=name, title=title, description=description, icons=icons, inputSchema=input_schema,
                             outputSchema=output_schema, annotations=annotations)
        if not listed:
            self.store.execute("INSERT OR IGNORE INTO settings VALUES (?, 'no')", f"listed {name}")

        def register(function: Function) -> Function:
            self.tools[name] = Tool(definition, function, mirrored, check_arguments, check_output, not listed, quick)
            return function

        return register

    def resource(self, uri: str, name: str, *, title: str | None = None, description: str | None = None,
                 icons: list[Json] | None = None, mime_type: str = "text/plain", cache_scope: str = "public",
                 ttl_ms: int = 60_000, quick: bool = False) -> Decorator:
        """Registers `function(uri, request) -> text, bytes, a list of contents, or None: there is no such resource`."""
        check_authored_as("uri", uri)
        definition = present(uri=uri, name=name, title=title, description=description, icons=icons, mimeType=mime_type)
        return register_in(self.resources, uri, definition, cacheable(ttl_ms, cache_scope), quick)

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
        return register_in(self.templates, template, definition, cacheable(ttl_ms, cache_scope), quick)

    def prompt(self, name: str, description: str, arguments: Iterable[Json] = (), *, title: str | None = None,
               icons: list[Json] | None = None, quick: bool = False) -> Decorator:
        """Registers `function(arguments, request) -> text, or a list of messages`."""
        definition = present(name=name, title=title, description=description, icons=icons, arguments=list(arguments))
        return register_in(self.prompts, name, definition, {}, quick)

    def completion(self, kind: str, name: str, argument: str, *, quick: bool = False) -> Decorator:
        """Registers `function(value, context, request) -> all matches, best first`; kind: ref/prompt, ref/resource."""
        return register_in(self.completions, (kind, name, argument), {}, {}, quick)

    def list_changed(self, kind: str) -> None:
        """Tells subscribers that the list of tools, prompts or resources has changed."""
        self.subscriptions.publish(kind)

    def resource_updated(self, uri: str) -> None:
        """Tells the subscribers of this resource that it has changed."""
        self.subscriptions.publish("resource", uri)

    def set_listed(self, name: str, listed: bool) -> None:
        """Lists or unlists a tool that was registered with `listed=False`, on every instance."""
        self.store.execute("UPDATE settings SET value = ? WHERE name = ?", "yes" if listed else "no", f"listed {name}")
        self.list_changed("tools")

    def is_listed(self, tool: Tool) -> bool:
        """Whether clients can see and call the tool at this moment."""
        question = "SELECT 1 FROM settings WHERE name = ? AND value = 'yes'"
        return not tool.switchable or self.store.execute(question, f"listed {tool.definition['name']}") != []

    # its life

    def start(self) -> None:
        """Begins the housekeeping, and takes up the tasks that a dead instance has left."""
        if not self.compares_headers:
            log("WARNING: this server does not compare the headers with the body: anyone can walk past a gateway")
        with state_trouble_logged():
            self.tasks.adopt_all()
        self.keeper.start()

    def keep(self) -> None:
        """The keeper's loop; `stopped` wakes it. Trouble with the state is logged when it begins."""
        trouble = False
        while not self.stopped.wait(KEEPER_SECONDS):
            try:
                self.tasks.renew()
                self.subscriptions.deliver_others()
                self.store.purge()
                trouble = False
            except sqlite3.Error as problem:
                if not trouble:
                    log(f"the state cannot be used: {problem}")
                trouble = True

    def stop(self) -> None:
        """Ends the housekeeping and leaves running tasks to other instances."""
        self.stopped.set()
        with state_trouble_logged():
            self.tasks.release()
        self.keeper.join()

    # one request

    def respond(self, message: Json, channel: Channel, user: str, fields: Fields | None = None) -> Answer:
        """The answer to one request, whatever happens; Cancelled when nobody waits for it. `fields`: over HTTP."""
        request = None
        try:
            request = self.open_request(message, channel, user, fields)  # 11 to 17
            result = self.complete_result(request, self.methods[request.method](request))  # 18
            answer = Answer(200, sse.encode_json({"jsonrpc": "2.0", "id": request.id, "result": result}))
            if request.reason:
                raise Cancelled(request.reason)
            outcome = result["resultType"]
        except Cancelled as gone:
            log(f"{cancelled_line(request)} ({gone})")
            raise
        except (Exception, SystemExit) as problem:
            rejection = rejection_for(problem)
            if message["method"] == "initialize":
                # spec: Versioning and Compatibility › Backward Compatibility with Initialization-Based Versions:
                # SHOULD name the supported versions in any error returned to initialize
                rejection.message += f". There is no initialize here: this server speaks MCP {SUPPORTED_VERSIONS[0]}"
            answer = Answer(rejection.status, sse.encode_json(rejection.response(message["id"])), rejection.fields)
            outcome = f"{rejection.status}, {rejection.code} {rejection.message}"
        finally:
            if request:
                request.close()
        log(f"{request_line(message, user)} -> {outcome}")
        return answer

    def open_request(self, message: Json, channel: Channel, user: str, fields: Fields | None) -> Request:
        """Rungs 11 to 17, and the shape of the params."""
        method, params = message["method"], message.get("params", {})
        if not self.compares_headers:
            fields = None
        if fields is not None:
            header_version = headers.check_method_header(fields, method)  # 11
        # spec: Overview › _meta: a request missing any required field MUST be rejected with -32602, on HTTP with 400
        if problem := check_metadata(params.get("_meta")):  # 12
            raise Rejection(INVALID_PARAMS, f"params._meta{problem}", status=400)
        version = params["_meta"][META + "protocolVersion"]
        if fields is not None:
            headers.check_version_header(header_version, version)  # 13
        if version not in SUPPORTED_VERSIONS:  # 14
            # spec: Versioning and Compatibility › Protocol Version Negotiation: MUST list the versions it supports
            raise Rejection(UNSUPPORTED_VERSION, f"Unsupported version: this server speaks MCP {SUPPORTED_VERSIONS[0]}",
                            {"supported": SUPPORTED_VERSIONS, "requested": version})
        if not self.offers(method):  # 15
            # spec: Streamable HTTP › Protocol Version Header: MUST respond with 404 and -32601
            raise Rejection(METHOD_NOT_FOUND, f"Unknown method: {method[:100]}")
        if fields is not None:
            headers.check_name_header(fields, method, params)  # 16
        request = Request(message, channel, user)
        if method.startswith("tasks/"):  # 17
            # spec: Tasks Extension › Protocol Errors: MUST return -32021 to clients that do not declare the extension
            request.require(NEEDS_TASKS)
        if fields is not None and method == "tools/call" and (tool := self.tools.get(params["name"])):
            headers.check_parameter_headers(fields, params.get("arguments", {}), tool.mirrored)
        if method in MAY_ASK:
            request.state = self.unseal(request, params.get("requestState"))
        if method in check_params and (problem := check_params[method](params)):
            raise Rejection(INVALID_PARAMS, f"params{problem}")
        request.responses = params.get("inputResponses") or {}
        return request

    def offers(self, method: str) -> bool:
        """Whether there is such a method, and anything registered that it could serve."""
        tables = {"tools": self.tools, "prompts": self.prompts, "resources": self.resources or self.templates,
                  "completion": self.completions}
        return method in self.methods and bool(tables.get(method.partition("/")[0], True))

    def complete_result(self, request: Request, result: Json) -> Json:
        """A result as it is sent: with its type and the server's name; what it asks of the client checked, sealed."""
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
        meta = {META + "serverInfo": self.info} | result.get("_meta", {})
        return {"resultType": "complete"} | result | {"_meta": meta}

    # server/discover and the lists

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

    def page(self, key: str, table: dict[str, Any], request: Request) -> Json:
        """One page of a list, from the cursor on, always in the order of registration."""
        items = [entry.definition for entry in table.values() if key != "tools" or self.is_listed(entry)]
        size = self.page_sizes.get(key) or len(items) or 1
        cursors = {make_cursor(start): start for start in range(size, len(items), size)}
        cursor = request.params.get("cursor")
        if cursor is not None and (not isinstance(cursor, str) or cursor not in cursors):
            raise Rejection(INVALID_PARAMS, "This cursor is not valid", rule="Pagination › Error Handling")
        start = cursors[cursor] if cursor else 0
        following = present(nextCursor=make_cursor(start + size) if start + size < len(items) else None)
        return {key: items[start : start + size]} | following | cacheable(300_000)

    # tools, resources, prompts, completion

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
        declared = entry.definition["arguments"]
        if missing := [one["name"] for one in declared if one.get("required") and one["name"] not in arguments]:
            raise Rejection(INVALID_PARAMS, f"Missing required argument: {missing[0]}", rule="Prompts › Error Handling")
        check_known(arguments, [one["name"] for one in declared], "Prompts › Security")
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

    # multi round-trip requests: the state travels with the client, sealed

    def seal(self, request: Request, state: Any, forms: Json) -> str:
        """requestState: bound to the request, its user and a time, so that it is of no use anywhere else."""
        payload = {"state": state, "forms": forms, "expires": time.time() + STATE_SECONDS} | origin_of(request)
        text = base64.urlsafe_b64encode(json.dumps(payload).encode()).decode()
        return f"{text}.{self.signature(text)}"

    def unseal(self, request: Request, sealed: Any) -> Any:
        """The state inside; None for None; the forms that were asked for go to the request.

        One message for every cause, so that a refusal teaches nothing.
        """
        if sealed is None:
            return None
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


Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
NEEDS_TASKS: Json = {"extensions": {TASKS: {}}}


@contextlib.contextmanager
def state_trouble_logged() -> Iterator[None]:
    """For what can wait until the state can be used again."""
    try:
        yield
    except sqlite3.Error as problem:
        log(f"the state cannot be used: {problem}")


def register_in(table: dict[Any, Entry], key: Any, definition: Json, hints: Json, quick: bool) -> Decorator:
    """A decorator that puts a function into a table."""

    def register(function: Function) -> Function:
        table[key] = Entry(definition, function, hints, quick)
        return function

    return register


def check_authored_as(kind: str, value: Any) -> Any:
    """The value; ValueError, for its author, when it is not what it should be."""
    if problem := check_authored[kind](value):
        raise ValueError(f"{kind}{problem}: {value!r:.200}")
    return value


def check_known(names: Iterable[str], known: list[str], rule: str) -> None:
    """Rejection for an argument that nobody declared."""
    for name in names:
        if name not in known:
            raise Rejection(INVALID_PARAMS, f"Unknown argument: {name[:100]}", rule=rule)


def present(**members: Any) -> Json:
    """An object of those members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def rejection_for(problem: BaseException) -> Rejection:
    """What a client is told of an exception: all of a rejection, nothing of a fault of this server's."""
    if isinstance(problem, Rejection):
        return problem
    if isinstance(problem, HeaderMismatch):
        return Rejection(HEADER_MISMATCH, f"Header mismatch: {problem}", rule="Streamable HTTP › Server Validation")
    if isinstance(problem, sqlite3.Error):
        log(f"the state cannot be used: {problem}")
        return Rejection(INTERNAL_ERROR, "The server cannot reach its state at the moment")
    traceback.print_exception(problem)
    return Rejection(INTERNAL_ERROR, "Internal error")


def request_line(message: Json, user: str) -> str:
    """The log's words for a request: method, name, user, id, trace."""
    params = message.get("params", {})
    name, meta = params.get(headers.NAME_SOURCE.get(message["method"], "")), params.get("_meta")
    trace = meta.get("traceparent") if isinstance(meta, dict) else None
    return (f"{message['method'][:100]}{f' {name}'[:200] if name else ''} user={user} id={message['id']!r:.100}"
            f"{f' traceparent={trace}'[:100] if trace else ''}")


def cancelled_line(request: Request | None) -> str:
    """The log's words for a request that nobody waits for: a tool's step is the one that was in progress."""
    if request and request.method == "tools/call":
        return f"{request.params['name']} cancelled at step {math.floor(request.done) + 1}"
    return f"{request.method if request else 'a request'} ended"


def run_tool(tool: Tool, arguments: Json, request: Request) -> Json:
    """A tool's function, and its outcome as a result."""
    try:
        result = tool.function(arguments, request)
    except ToolError as failure:
        return text_result(str(failure)) | {"isError": True}
    if isinstance(result, str):
        result = text_result(result)
    elif "content" in result:
        check_authored_as("content", result["content"])
    if "structuredContent" in result:
        structured = result["structuredContent"]
        problem = tool.check_output(structured) if tool.check_output else None
        # spec: Tools › Structured Content: SHOULD also return the serialized JSON in a TextContent block
        result = text_result(json.dumps(structured, ensure_ascii=False)) | result
    else:
        excused = tool.check_output is None or result.get("isError") or "resultType" in result
        problem = None if excused else " is missing"
    if problem:
        # spec: Tools › Output Schema: MUST provide structured results that conform to this schema
        raise ValueError(f"structuredContent{problem}")
    return result


def text_result(text: str) -> Json:
    """A tool's result with one block of text."""
    return {"content": [{"type": "text", "text": text}]}


def cacheable(ttl_ms: int, scope: str = "public") -> Json:
    """The caching hints of a result."""
    return {"ttlMs": ttl_ms, "cacheScope": scope}


def make_cursor(position: int) -> str:
    """Opaque to clients: only this server reads it."""
    return base64.b64encode(b"after %d" % position).decode()


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
            found = start >= 0 and segment.startswith(literal, start)
            value = value_in_uri(segment[start + len(literal) : end]) if found else ""
            if not value:
                return None
            values[name], end = value, start
    return values


def value_in_uri(text: str) -> str:
    """What a variable stands for; nothing for what is no text, or would climb out of where it belongs."""
    # spec: Resources › Security Considerations: MUST sanitize file paths to prevent directory traversal
    with contextlib.suppress(UnicodeDecodeError):
        value = unquote(text, errors="strict")
        if value.strip(".") and value.isprintable() and not set(value) & set("/\\"):
            return value
    return ""


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


# ------------------------------------------------------------------------------------------------- subscriptions

FILTERS = {"tools": "toolsListChanged", "prompts": "promptsListChanged", "resources": "resourcesListChanged",
           "resource": "resourceSubscriptions", "task": "taskIds"}


class Subscription(NamedTuple):
    """One open subscriptions/listen: what was agreed, and the queue from publishers to its own thread."""

    request: Request
    agreed: Json
    queue: queue.SimpleQueue[Json | None]  # None: look whether to go on


class Subscriptions:
    """The open subscriptions, and the feed of changes from the other instances on the same state file.

    `lock` guards `open`; listening threads add and remove, publishers and the keeper read.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.store = server, server.store
        self.lock = threading.Lock()
        self.open: list[Subscription] = []
        self.ending = False
        self.seen = self.store.execute("SELECT coalesce(max(number), 0) AS seen FROM changes")[0]["seen"]

    def listen(self, request: Request) -> Json:
        """subscriptions/listen: acknowledges, then passes on what was agreed until somebody ends it."""
        subscription = Subscription(request, self.agree(request), queue.SimpleQueue())
        request.wake = lambda: subscription.queue.put(None)
        with self.lock:
            self.open.append(subscription)  # before the acknowledgement, or a change right after it would be lost
        try:
            # spec: Subscriptions › Acknowledgment: MUST send acknowledged as the first message
            self.send(request, "notifications/subscriptions/acknowledged", {"notifications": subscription.agreed})
            self.pass_on(subscription)
        finally:
            with self.lock:
                self.open.remove(subscription)
        # spec: Subscriptions › Graceful Closure: SHOULD respond with an empty result before closing the stream
        return {"_meta": {META + "subscriptionId": request.id}}

    def agree(self, request: Request) -> Json:
        """The part of the filter that this server serves to this user."""
        wanted = request.params["notifications"]
        if wanted.get("taskIds"):
            request.require(NEEDS_TASKS)
        offered = {"tools": self.server.tools, "prompts": self.server.prompts, "resources": self.server.resources}
        agreed: Json = {FILTERS[kind]: True for kind, table in offered.items()
                        if wanted.get(FILTERS[kind]) and table and kind in self.server.changing}
        if uris := [uri for uri in wanted.get("resourceSubscriptions", ()) if self.server.find_resource(uri)]:
            agreed["resourceSubscriptions"] = uris
        if tasks := [one for one in wanted.get("taskIds", ()) if self.server.tasks.find(one, request.user)]:
            agreed["taskIds"] = tasks
        return agreed

    def pass_on(self, subscription: Subscription) -> None:
        """The listening thread's loop. A queued message, a cancellation, the end or a due comment wakes it."""
        request = subscription.request
        while not self.ending or subscription.queue.qsize():
            try:
                message = subscription.queue.get(timeout=min(request.channel.comment_due(), 3600))
            except queue.Empty:
                request.write(request.channel.keep_alive)
                continue
            if request.cancelled.is_set():
                raise Cancelled(request.reason)
            if message:
                self.send(request, message["method"], message["params"])

    def send(self, request: Request, method: str, params: Json) -> None:
        # spec: Subscriptions › Receiving Notifications: all carry the id of the listen request in _meta
        request.emit({"method": method, "params": {"_meta": {META + "subscriptionId": request.id}} | params})

    def publish(self, topic: str, subject: str = "") -> None:
        """Tells this instance's subscribers now, and the other instances' at their next look."""
        self.store.execute("INSERT INTO changes (origin, topic, subject, at) VALUES (?, ?, ?, ?)",
                           self.store.instance, topic, subject, time.time())
        self.deliver(topic, subject)

    def deliver(self, topic: str, subject: str) -> None:
        """Puts a change into the queue of each subscription that agreed to it; drops one that is too far behind."""
        with self.lock:
            concerned = [one for one in self.open if (agreed := one.agreed.get(FILTERS[topic]))
                         and (agreed is True or subject in agreed)]
        message = self.message(topic, subject) if concerned else None
        for subscription in concerned:
            if subscription.queue.qsize() < MAX_QUEUED:
                subscription.queue.put(message)
            else:
                subscription.request.cancel("reads too slowly")

    def message(self, topic: str, subject: str) -> Json | None:
        """The notification of a change; None for a task that has expired."""
        if topic == "task":
            row = self.server.tasks.find(subject)
            return {"method": "notifications/tasks", "params": task_view(row)} if row else None
        if topic == "resource":
            return {"method": "notifications/resources/updated", "params": {"uri": subject}}
        return {"method": f"notifications/{topic}/list_changed", "params": {}}

    def deliver_others(self) -> None:
        """The keeper: passes on what other instances have published."""
        for change in self.store.execute("SELECT * FROM changes WHERE number > ? ORDER BY number", self.seen):
            self.seen = change["number"]
            if change["origin"] != self.store.instance:
                self.deliver(change["topic"], change["subject"])

    def end(self, deadline: float) -> None:
        """At shutdown: every subscription sends what is queued, then its result, before the deadline."""
        self.ending = True
        with self.lock:
            for subscription in self.open:
                subscription.queue.put(None)
        while self.open and time.monotonic() < deadline:
            self.server.stopped.wait(0.005)


# -------------------------------------------------------------------- the store: a handle is a row, a lease a column

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE IF NOT EXISTS handles (id TEXT PRIMARY KEY, kind TEXT, user TEXT, value TEXT, used REAL)",
    "CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY AUTOINCREMENT, origin TEXT, topic TEXT,"
    " subject TEXT, at REAL)",
    "CREATE TABLE IF NOT EXISTS tasks (id TEXT PRIMARY KEY, user TEXT, request TEXT, status TEXT, message TEXT,"
    " created REAL, updated REAL, ttl_ms INTEGER, done REAL, asked TEXT DEFAULT '{}', answers TEXT DEFAULT '{}',"
    " outcome TEXT, owner TEXT, lease REAL)",
)
APPLICATION_ID = 0x4D435028


class Store:
    """What outlives a request, in SQLite: in memory, or in a file that several instances share.

    `lock` guards the connection, which every thread uses. An instance waits at most 5 s for another's write.
    """

    def __init__(self, path: str = ":memory:") -> None:
        self.instance = secrets.token_hex(8)
        self.lock = threading.RLock()
        self.db = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        try:
            self.prepare()
        except sqlite3.Error:
            self.db.close()
            raise
        self.secret = bytes.fromhex(self.execute("SELECT value FROM settings WHERE name = 'secret'")[0]["value"])

    def prepare(self) -> None:
        """Makes the tables in a new file; sqlite3.Error for a file that cannot be used or is not ours."""
        with self.transaction():
            tables = self.execute("SELECT count(*) AS count FROM sqlite_master")[0]["count"]
            if tables and self.execute("PRAGMA application_id")[0][0] != APPLICATION_ID:
                raise sqlite3.DatabaseError("it belongs to another program")
            for statement in SCHEMA:
                self.execute(statement)
            self.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.execute("INSERT OR IGNORE INTO settings VALUES ('secret', ?)", secrets.token_hex(32))
        for _ in range(500):  # this one statement does not wait for other instances by itself
            with contextlib.suppress(sqlite3.OperationalError):
                self.execute("PRAGMA journal_mode = WAL")
                break
            time.sleep(0.01)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Several statements that take effect together or not at all."""
        with self.lock:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    def execute(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """One statement, committed when this returns; its rows."""
        # SQLite's text is UTF-8, which has no lone surrogates: they are kept, and looked for, as their escapes.
        stored = [one.encode("utf-8", "backslashreplace").decode() if isinstance(one, str) else one for one in values]
        with self.lock:
            return self.db.execute(statement, stored).fetchall()

    def new_handle(self, kind: str, user: str, value: Any) -> str:
        """Keeps a value under a new name that nobody can guess, for this user alone."""
        handle = f"{kind}_{secrets.token_urlsafe(16)}"
        self.execute("INSERT INTO handles VALUES (?, ?, ?, ?, ?)", handle, kind, user, json.dumps(value), time.time())
        return handle

    def append(self, kind: str, handle: str, user: str, item: Any) -> list[Any] | None:
        """Adds to the list behind a handle and returns it; None if this user has no such handle."""
        rows = self.execute("UPDATE handles SET value = json_insert(value, '$[#]', json(?)), used = ? WHERE id = ? AND"
                            " kind = ? AND user = ? RETURNING value", json.dumps(item), time.time(), handle, kind, user)
        return json.loads(rows[0]["value"]) if rows else None

    def close(self) -> None:
        """After the last request."""
        with self.lock:
            self.db.close()

    def purge(self) -> None:
        """The keeper: forgets what has not been used for a day, and changes that every instance has seen."""
        self.execute("DELETE FROM handles WHERE used < ?", time.time() - HANDLE_SECONDS)
        self.execute("DELETE FROM changes WHERE at < ?", time.time() - 60)


# --------------------------------------------------------------------------------------------------------- tasks

UNFINISHED = ("working", "input_required")
ACTIVE = f"status IN {UNFINISHED}"


class TaskRequest(Request):
    """The request of a task: no client waits, so progress is written to the row and questions wait in it."""

    def __init__(self, row: sqlite3.Row, tasks: Tasks) -> None:
        saved = json.loads(row["request"])
        super().__init__({"id": row["id"], "method": "tools/call", "params": saved["params"]}, Channel(), row["user"])
        self.responses, self.state = saved["responses"], saved["state"]
        self.tasks, self.reported, self.owner = tasks, row["done"], row["owner"]
        self.answered = threading.Event()  # set by tasks/update on this instance, and by cancel
        self.wake = self.answered.set

    def record(self, **columns: Any) -> sqlite3.Row:
        """Changes the row if it is still this worker's and not finished; otherwise the worker ends, by Cancelled."""
        names = ", ".join(f"{name} = ?" for name in columns)
        rows = self.tasks.store.execute(
            f"UPDATE tasks SET {names}, updated = ? WHERE id = ? AND owner = ? AND {ACTIVE} RETURNING *",
            *columns.values(), time.time(), self.id, self.owner)
        if not rows or self.reason:
            raise Cancelled(self.reason or "no longer this worker's")
        self.tasks.server.subscriptions.publish("task", str(self.id))
        return rows[0]

    def report(self, done: float, total: float | None, message: str | None) -> None:
        """Records the step, so that another worker can go on after it."""
        self.record(done=done, message=message or f"{done:g}" + (f" of {total:g}" if total else ""))

    def as_task(self, required: bool = False, ttl_ms: int = 3_600_000) -> None:
        """It is one already."""

    def can_ask(self) -> bool:
        """Whether the client that created the task can show its user a form."""
        return self.declares({"elicitation": {"form": {}}})

    def row(self) -> sqlite3.Row:
        """The task as it stands; Cancelled when it is not to go on."""
        row = self.tasks.find(str(self.id))
        if self.reason or row is None:
            raise Cancelled(self.reason or "expired")
        return row

    def ask(self, requests: Json) -> Json:
        """Waits until tasks/update has brought an answer to each; one that was given before is not asked for again."""
        for wanted in requests.values():
            self.require(capability_for(wanted))
        row = self.row()
        if not requests.keys() <= json.loads(row["answers"]).keys():
            row = self.record(status="input_required", asked=json.dumps(json.loads(row["asked"]) | requests))
        while not requests.keys() <= (answers := json.loads(row["answers"])).keys():
            self.answered.wait(KEEPER_SECONDS)
            self.answered.clear()
            row = self.row()
        self.responses |= answers
        return {key: answers[key] for key in requests}


class Tasks:
    """tasks/get, tasks/update, tasks/cancel, and the workers. The row is the truth: a worker writes only while the row
    names it as its owner, and whoever asks about a task whose lease has lapsed gives it a new one.

    `running` (task id -> its request) is touched by workers, the keeper and tasks/*; single operations only.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.store = server, server.store
        self.running: dict[str, TaskRequest] = {}

    def create(self, request: Request, ttl_ms: int) -> Json:
        """A new task for this request, committed before its handle is sent."""
        unfinished = "SELECT count(*) AS count FROM tasks WHERE user = ? AND " + ACTIVE
        if self.store.execute(unfinished, request.user)[0]["count"] >= MAX_TASKS:
            raise Rejection(429, f"{MAX_TASKS} tasks are unfinished", status=429, fields="Retry-After: 9\r\n")
        task_id, now = secrets.token_urlsafe(24), time.time()
        saved = json.dumps({"params": request.params, "responses": request.responses, "state": request.state})
        row = self.store.execute(
            "INSERT INTO tasks (id, user, request, status, created, updated, ttl_ms, owner, lease)"
            " VALUES (?, ?, ?, 'working', ?, ?, ?, ?, ?) RETURNING *", task_id, request.user, saved, now, now,
            ttl_ms, secrets.token_hex(8), now + LEASE_SECONDS)[0]
        self.start(row)
        # spec: Tasks Extension › Polymorphic Results: MUST set resultType to "task"
        return {"resultType": "task"} | task_view(row)

    def start(self, row: sqlite3.Row) -> None:
        """Begins or goes on with the work, on a thread of its own."""
        request = self.running[row["id"]] = TaskRequest(row, self)
        threading.Thread(target=self.work, args=(request,), name="task worker", daemon=True).start()

    def work(self, request: TaskRequest) -> None:
        """The task worker: runs the tool from the top and writes down how it ended."""
        try:
            arguments = request.params.get("arguments", {})
            result = run_tool(self.server.tools[request.params["name"]], arguments, request)
            outcome = {"result": self.server.complete_result(request, result)}
            request.record(status="completed", outcome=json.dumps(outcome))
        except Cancelled as gone:
            log(f"{cancelled_line(request)} ({gone})")
        except sqlite3.Error as problem:  # not the tool's failure: the lease lapses, and the work goes on later
            log(f"task {request.id} stops, the state cannot be used: {problem}")
        except (Exception, SystemExit) as problem:
            rejection = rejection_for(problem)
            # spec: Tasks Extension › Task Execution Errors: failed is for JSON-RPC errors only
            outcome = {"error": rejection.error()}
            with contextlib.suppress(Cancelled), state_trouble_logged():
                request.record(status="failed", message=rejection.message, outcome=json.dumps(outcome))
        finally:
            self.running.pop(str(request.id), None)

    def find(self, task_id: str, user: str | None = None) -> sqlite3.Row | None:
        """A task's row, or None if there is none, or not for this user; an orphan is adopted on the way."""
        rows = self.store.execute("SELECT * FROM tasks WHERE id = ? AND coalesce(?, user) = user", task_id, user)
        if rows:
            self.adopt(rows[0])
        return rows[0] if rows else None

    def adopt(self, row: Any) -> None:
        """Takes up an unfinished task whose worker has shown no sign of life; of all who try, one succeeds."""
        now = time.time()
        if row["status"] in UNFINISHED and row["lease"] < now and row["id"] not in self.running:
            for orphan in self.store.execute(
                    f"UPDATE tasks SET owner = ?, lease = ? WHERE id = ? AND lease < ? AND {ACTIVE} RETURNING *",
                    secrets.token_hex(8), now + LEASE_SECONDS, row["id"], now):
                self.start(orphan)

    def find_for(self, request: Request) -> sqlite3.Row:
        """The row that a tasks/* request names."""
        # spec: Tasks Extension › Security Implications: MUST check on each request that the client may access a task
        row = self.find(request.params["taskId"], request.user)
        if row is None:
            raise Rejection(INVALID_PARAMS, "There is no such task")
        return row

    def get(self, request: Request) -> Json:
        """tasks/get: the task as it stands."""
        return task_view(self.find_for(request))

    def update(self, request: Request) -> Json:
        """tasks/update: answers to outstanding input requests; others are ignored."""
        task_id, given = self.find_for(request)["id"], request.params["inputResponses"]
        with self.store.transaction():
            row = self.find_for(request)
            asked, answers = json.loads(row["asked"]), json.loads(row["answers"])
            new = {key: given[key] for key in asked if key in given and key not in answers}
            for key, answer in new.items():
                check_answer(key, asked[key], answer)
            if new:
                answers |= new
                status = "working" if asked.keys() <= answers.keys() else "input_required"
                self.store.execute(
                    f"UPDATE tasks SET answers = ?, status = ?, updated = ? WHERE id = ? AND {ACTIVE}",
                    json.dumps(answers), status, time.time(), task_id)
        if new:
            self.server.subscriptions.publish("task", task_id)
            if worker := self.running.get(task_id):
                worker.answered.set()
        return {}

    def cancel(self, request: Request) -> Json:
        """tasks/cancel: stops the work, wherever it runs; a finished task stays as it is."""
        row = self.find_for(request)
        statement = f"UPDATE tasks SET status = 'cancelled', updated = ? WHERE id = ? AND {ACTIVE} RETURNING id"
        if self.store.execute(statement, time.time(), row["id"]):
            if worker := self.running.get(row["id"]):
                worker.cancel("tasks/cancel")
            self.server.subscriptions.publish("task", row["id"])
        return {}

    def renew(self) -> None:
        """The keeper: expired tasks go, held leases are renewed, and workers that have lost their row are told."""
        now, reasons = time.time(), {}
        for row in self.store.execute("DELETE FROM tasks WHERE created + ttl_ms / 1000.0 < ? RETURNING id", now):
            reasons[row["id"]] = "expired"
        owners = {worker.owner: worker for worker in list(self.running.values())}
        mine = f"owner IN (SELECT value FROM json_each(?)) AND {ACTIVE}"
        held = self.store.execute(f"UPDATE tasks SET lease = ? WHERE {mine} RETURNING owner", now + LEASE_SECONDS,
                                  json.dumps(list(owners))) if owners else []
        for owner in owners.keys() - {row["owner"] for row in held}:
            owners[owner].cancel(reasons.get(str(owners[owner].id), "no longer this worker's"))

    def adopt_all(self) -> None:
        """At start-up: takes up what a dead instance has left."""
        for row in self.store.execute(f"SELECT * FROM tasks WHERE {ACTIVE}"):
            self.adopt(row)

    def release(self) -> None:
        """At shutdown: lets go of the leases, so that another instance can take up the work at once."""
        for worker in list(self.running.values()):
            worker.cancel("server stopped")
            self.store.execute(f"UPDATE tasks SET lease = 0 WHERE owner = ? AND {ACTIVE}", worker.owner)


def task_view(row: Any) -> Json:
    """A task as the wire shows it."""
    view = {"taskId": row["id"], "status": row["status"], "createdAt": iso_time(row["created"]),
            "lastUpdatedAt": iso_time(row["updated"]), "ttlMs": row["ttl_ms"], "pollIntervalMs": 500}
    if row["message"]:
        view["statusMessage"] = row["message"]
    if row["status"] == "input_required":
        answers = json.loads(row["answers"])
        view["inputRequests"] = {key: one for key, one in json.loads(row["asked"]).items() if key not in answers}
    return view | dict(json.loads(row["outcome"] or "{}"))


def iso_time(seconds: float) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


# --------------------------------------------------------------------------------------------- the demo catalogue

READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False}
SWITCHES = ADDS | {"idempotentHint": True}


def demo_server(step_seconds: float = 1.0, store: Store | None = None,
                rate: tuple[float, float] | None = None) -> Server:
    """The server that the lessons use."""
    about = "A demo: weather, carts, flights, and a report that takes its time."
    server = Server("mcp-reference-server", "1.0.0", about, page_size=2, store=store, rate=rate, changing=["tools"])
    add_report(server, step_seconds)
    add_weather(server)
    add_shop(server)
    add_spoofing_lesson(server)
    add_questions(server)
    add_switches(server)
    add_documents(server)
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
        number = hashlib.sha256(location.strip().lower().encode("utf-8", "replace")).digest()
        return {"temperature": number[0] % 35 - 5, "conditions": ("sunny", "cloudy", "rainy", "windy")[number[1] % 4],
                "humidity": 30 + number[2] % 60}

    @server.tool("get_weather", "The weather at a place, as text.", takes(location=TEXT), annotations=READS, quick=True)
    def get_weather(arguments: Json, request: Request) -> str:
        location = arguments["location"]
        return "{temperature} °C and {conditions} in ".format(**weather(location)) + f"{location}."

    percent = {"type": "integer", "minimum": 0, "maximum": 100}
    report = takes(temperature={"type": "number"}, conditions=TEXT, humidity=percent)

    @server.tool("get_weather_data", "The weather at a place, as data.", takes(location=TEXT), output_schema=report,
                 annotations=READS, quick=True)
    def get_weather_data(arguments: Json, request: Request) -> Json:
        return {"structuredContent": weather(arguments["location"])}

    region = {"type": "string", "description": "where to run it; gateways route by it", "x-mcp-header": "Region"}

    @server.tool("execute_sql", "Pretends to run a query in a region.", takes(region=region, query=TEXT),
                 annotations=READS, quick=True)
    def execute_sql(arguments: Json, request: Request) -> str:
        return f"Ran in {arguments['region']}: {arguments['query']}"


def add_shop(server: Server) -> None:
    """State is a handle: a cart is a name that works for its user alone."""

    @server.tool("create_cart", "Creates an empty cart; it is kept for 24 hours after its last use.", takes(),
                 output_schema=takes(cartId=TEXT), annotations=ADDS)
    def create_cart(arguments: Json, request: Request) -> Json:
        return {"structuredContent": {"cartId": server.store.new_handle("cart", request.user, [])}}

    items = takes(items={"type": "array", "items": TEXT})

    @server.tool("add_to_cart", "Puts an article into a cart.", takes(cartId=TEXT, sku=TEXT), output_schema=items,
                 annotations=ADDS)
    def add_to_cart(arguments: Json, request: Request) -> Json:
        content = server.store.append("cart", arguments["cartId"], request.user, arguments["sku"])
        if content is None:  # another user's cart is answered like one that never was
            raise ToolError("There is no such cart, or it has expired. Create one with create_cart.")
        return {"structuredContent": {"items": content}}

    @server.tool("book_flight", "Books a flight.", takes(to=TEXT, date={"type": "string", "description": "YYYY-MM-DD"}),
                 annotations=ADDS, quick=True)
    def book_flight(arguments: Json, request: Request) -> str:
        today = datetime.date.today()
        with contextlib.suppress(ValueError):
            if datetime.date.fromisoformat(arguments["date"]) > today:
                return f"Booked: {arguments['to']} on {arguments['date']}."
        raise ToolError(f"The departure must be a date in the future, as YYYY-MM-DD. Today is {today}.")


def add_spoofing_lesson(server: Server) -> None:
    """A harmless tool that a gateway allows, and one that it does not."""
    titles = ["Emma", "Middlemarch", "Moby-Dick", "The Trial", "Ulysses"]

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
        answer = request.accepted("github_login", form)
        if answer is not None:
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
        touched = server.store.execute("SELECT value FROM settings WHERE name = 'touched'")
        return json.dumps({"debug": False, "touched": touched[0]["value"] if touched else None})

    documents = {"README.md": "# The project\n", "CHANGES.md": "Nothing yet.\n", "LICENSE": "Use it as you like.\n"}

    def document(uri: str, values: dict[str, str], request: Request) -> str | None:
        return documents.get(values["name"])

    for name in documents:
        server.resource(f"file:///project/{name}", name, quick=True)(lambda uri, request, name=name: documents[name])
    server.resource_template("file:///project/{name}", "project files", description="A file of the project",
                             quick=True)(document)
    languages = ["c", "go", "haskell", "java", "javascript", "python", "ruby", "rust", "typescript"]

    @server.prompt("code_review", "Asks for a review of some code.", [
        {"name": "code", "description": "the code to review", "required": True},
        {"name": "language", "description": "the language it is written in"}], quick=True)
    def code_review(arguments: dict[str, str], request: Request) -> str:
        return f"Please review this {arguments.get('language', '')} code:\n{arguments['code']}"

    @server.completion("ref/prompt", "code_review", "language", quick=True)
    def language(value: str, context: dict[str, str], request: Request) -> list[str]:
        return [one for one in languages if one.startswith(value.lower())]


# --------------------------------------------------------------------------------------------------------- stdio


class StdioChannel(Channel):
    """The way back to the client for one stdio request, on the output that all of them share."""

    def __init__(self, transport: StdioTransport) -> None:
        self.transport = transport
        self.request: Request | None = None
        self.gone: str | None = None  # why nothing more may be sent; the reader sets it, the worker looks at it

    def emit(self, message: Json) -> None:
        """One notification, one line."""
        self.transport.send(sse.encode_json(message), self)

    def watch(self, request: Request) -> None:
        """Lets `cancel` reach the request; it may have come first."""
        self.request = request
        if self.gone:
            request.cancel(self.gone)

    def cancel(self, reason: str) -> None:
        """From here on nothing is sent."""
        self.gone = reason
        if self.request:
            self.request.cancel(reason)


class StdioTransport:
    """One client over a pair of pipes, a message a line.

    `lock` guards the output, which all workers write. The reader alone adds to `channels`, a worker removes its own.
    """

    def __init__(self, mcp: Server, source: int, sink: int, user: str) -> None:
        self.mcp, self.source, self.sink, self.user = mcp, source, sink, user
        self.lock = threading.Lock()
        self.channels: dict[tuple[type, Any], StdioChannel] = {}
        self.workers = Workers()
        self.over = threading.Event()  # set at end of input, or when nobody reads the output any more

    def serve(self) -> None:
        """Until the end of input; then what was read is answered, within a second."""
        self.mcp.start()
        threading.Thread(target=self.read, name="stdio reader", daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # SIGINT and SIGTERM end it too
            self.over.wait()
        deadline = time.monotonic() + 1
        self.mcp.subscriptions.end(deadline)
        while self.channels and time.monotonic() < deadline:
            self.mcp.stopped.wait(0.01)
        for channel in list(self.channels.values()):
            channel.cancel("end of input")
        if self.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):  # the last answer is out
            self.lock.release()
        self.mcp.stop()

    def read(self) -> None:
        """The reader: lines of at most MAX_MESSAGE octets; a longer one is skipped in bounded memory."""
        lines = sse.LineSplitter(MAX_MESSAGE)
        try:
            while octets := os.read(self.source, 65536):
                for line in lines.feed(octets):
                    self.take(line)
            for line in lines.feed(b"\n"):
                self.take(line)
        finally:
            self.over.set()

    def take(self, line: bytes | None) -> None:
        """One line: a request gets a worker, a cancellation takes effect, anything else an error."""
        try:
            if line is None:
                raise Rejection(PARSE_ERROR, f"A message may have at most {MAX_MESSAGE} octets")
            message = parse_message(line)
            if "id" not in message:
                self.take_notification(message)
                return
            key = type(message["id"]), message["id"]
            if key in self.channels:
                # spec: Overview › Requests: the ID MUST NOT match one that has not been answered yet
                raise Rejection(INVALID_REQUEST, "This id's request is in progress", message_id=message["id"])
            self.channels[key] = StdioChannel(self)
            try:
                self.workers.run(self.answer, message, key)
            except RuntimeError as problem:  # as the accept loop does
                del self.channels[key]
                raise Rejection(INTERNAL_ERROR, f"Not served: {problem}", message_id=message["id"]) from None
        except Rejection as rejection:
            log(f"line refused: {rejection.message}")
            self.send(sse.encode_json(rejection.response(rejection.id)))

    def take_notification(self, message: Json) -> None:
        """Cancels the request that it names, by id and type."""
        # spec: Cancellation › Error Handling: SHOULD ignore unknown, finished and malformed ones
        request_id = message.get("params", {}).get("requestId")
        channel = self.channels.get((type(request_id), request_id)) if type(request_id) in (str, int) else None
        if message["method"] == "notifications/cancelled" and channel:
            channel.cancel("notifications/cancelled")

    def answer(self, message: Json, key: tuple[type, Any]) -> None:
        """A stdio worker: one request."""
        channel = self.channels[key]
        try:
            lines = self.mcp.respond(message, channel, self.user).body
            if message["method"] == "subscriptions/listen" and self.mcp.subscriptions.ending:
                # spec: Cancellation › Cancellation: MUST send notifications/cancelled when it tears down a subscription
                # choice: after the result, because client libraries believe the first of the two; not over HTTP,
                # because the schema has it on stdio only, and the end of the stream says the same.
                note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": message["id"]}}
                lines += b"\n" + sse.encode_json(note)
            self.send(lines, channel, key)
        except Cancelled:
            self.channels.pop(key, None)

    def send(self, lines: bytes, channel: StdioChannel | None = None, answered: Any = None) -> None:
        """Whole lines, unless their request has been cancelled. The id that they answer is free before they go out."""
        with self.lock:
            if channel and channel.gone:
                raise Cancelled(channel.gone)
            self.channels.pop(answered, None)
            rest = memoryview(lines + b"\n")
            try:
                while rest:
                    rest = rest[os.write(self.sink, rest) :]
            except OSError:  # nobody reads any more
                self.over.set()
                for other in list(self.channels.values()):
                    other.cancel("stdout closed")


def serve_stdio(mcp: Server) -> None:
    """Serves the process's stdin and stdout; nothing else in the process or its children reads or writes them."""
    source, sink, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # spec: stdio › stdio: MUST NOT write anything to stdout that is not a valid MCP message
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        StdioTransport(mcp, source, sink, os.environ.get("MCP_USER", "anonymous")).serve()


# -------------------------------------------------------------------------------------------------- command line


def parse_command_line() -> argparse.Namespace:
    """The options, with a --help that a newcomer understands."""
    parser = argparse.ArgumentParser(description="A reference server for MCP 2026-07-28: run it, then talk to it with"
                                     " the curl helper (source tests/lessons/mcp.sh).")
    add = parser.add_argument
    add("--stdio", action="store_true", help="serve one client over stdin and stdout instead of HTTP")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=os.environ.get("PORT") or "3000", help="port (default: $PORT, or 3000; 0: any)")
    add("--step-seconds", type=float, default=1.0, help="how long one of build_report's ten steps takes (default: 1)")
    add("--keep-alive", type=float, default=15.0, help="seconds until a quiet stream gets a comment (default: 15)")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help="a web origin that may call, too")
    add("--state", default=":memory:", metavar="FILE", help="keep carts, holds and tasks in this SQLite file")
    add("--wire", action="store_true", help="print everything that crosses the wire, as it crosses")
    add("--rate", type=float, default=1000, help="tool calls a second for each user, 0: no limit (default: 1000)")
    add("--max-connections", type=int, default=4096, help="connections served at a time (default: 4096)")
    add("--max-body", type=int, default=MAX_MESSAGE, help="octets in one message (default: 1 MiB)")
    add("--idle-timeout", type=float, default=30, help="seconds between two requests on a connection (default: 30)")
    add("--request-timeout", type=float, default=10, help="seconds for a request to arrive (default: 10)")
    add("--write-timeout", type=float, default=10, help="seconds for a client to read what is sent (default: 10)")
    return parser.parse_args()


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have; a connection takes one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    """The exit status."""
    options = parse_command_line()
    rate = (options.rate, 5 * options.rate) if options.rate > 0 else None
    try:
        with contextlib.closing(Store(options.state)) as store:
            mcp = demo_server(options.step_seconds, store, rate)
            if options.stdio:
                serve_stdio(mcp)
            else:
                serve_http(mcp, options)
    except sqlite3.Error as problem:
        print(f"reference_server: cannot use {options.state}: {problem}", file=sys.stderr)
        return 1
    except (OSError, OverflowError) as problem:
        print(f"reference_server: cannot listen on {options.host}, port {options.port}: {problem}", file=sys.stderr)
        return 1
    return 0


def serve_http(mcp: Server, options: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM. OSError when the address is taken."""
    http = HttpServer(mcp, options.host, options.port, options.allow_origin)
    for limit in ("keep_alive", "idle_timeout", "request_timeout", "write_timeout", "max_body", "max_connections"):
        setattr(http, limit, getattr(options, limit))
    http.endpoint = WiredEndpoint if options.wire else Endpoint
    raise_descriptor_limit()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: http.stop())
    host = f"[{options.host}]" if ":" in options.host else options.host
    log(f"MCP {SUPPORTED_VERSIONS[0]} at http://{host}:{http.port}/mcp (Ctrl-C ends it)")
    http.serve_forever()


if __name__ == "__main__":
    sys.exit(main())

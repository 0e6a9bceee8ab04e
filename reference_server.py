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
import glob
import hashlib
import hmac
import itertools
import json
import math
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

    # seam: what the exchange does without a thread, done by a queue and the thread of the connection

    @functools.cached_property
    def pushed(self) -> queue.SimpleQueue[bytes | Callable[[], None] | None]:
        """What has been pushed and not been sent."""
        return queue.SimpleQueue()

    def push(self, text: bytes) -> bool:
        """One message ahead of the end; never waits. False: the client is gone, or MAX_QUEUED messages wait."""
        if room := self.pushed.qsize() < MAX_QUEUED:
            self.pushed.put(text)
        return room

    def push_comment(self) -> None:
        """A comment on a quiet stream."""
        self.last_write = time.monotonic()
        self.pushed.put(self.keep_alive_now)

    def keep_alive_now(self) -> None:
        """A comment, which is due."""
        self.last_write = -math.inf
        self.keep_alive()

    def finish(self, *result: bytes | None) -> None:
        """The end: the result if it can be sent, the cut stream otherwise."""
        self.pushed.put(b"end" + (result[0] or b""))

    def pass_on(self, request: Request, subscriptions: Subscriptions) -> Json:
        """The connection's thread, until `finish` or until the client has gone."""
        subscriptions.passing.add(self)
        pushed, gone, request.wake = self.pushed, request.cancelled, lambda: pushed.put(None)
        try:
            while True:
                item = pushed.get()
                if gone.is_set():
                    raise Cancelled(request.reason)
                if callable(item):
                    request.write(item)
                elif item and item.startswith(b"end"):
                    return dict(json.loads(item[3:])["result"])
                elif item:
                    request.emit(json.loads(item))
        finally:
            subscriptions.forget(self)
            del self.pushed
            subscriptions.passing.discard(self)


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

    def finish(self, *result: bytes | None) -> None:
        """Lets the client read the last answer before the close, which over unread octets would be a reset."""
        if result:  # seam: the standard library calls its end of the connection so, too
            return Channel.finish(self, *result)
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
        self.responses: Json = {}  # the inputResponses of a retried request; in a task, all answers so far
        self.state: Any = None  # what `input_required(state=…)` sealed in the round before

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
        """The progress reported so far; in a task, by the runs before this one too: go on after it."""
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
            self.emit({"method": "notifications/progress", "params": params})

    def log(self, level: str, data: Any, logger: str = "reference") -> None:
        """A log message on this request's stream, if the request asked for that level."""
        # spec: Logging › Per-request log level: MUST NOT emit notifications/message without logLevel
        wanted = self.meta.get(META + "logLevel")
        if wanted is not None and LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted):
            self.emit({"method": "notifications/message", "params": {"level": level, "logger": logger, "data": data}})

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
            # spec: Overview › _meta: MUST return MissingRequiredClientCapabilityError
            raise Rejection(MISSING_CAPABILITY, "The client must declare a capability for this",
                            {"requiredCapabilities": missing})

    def declares(self, capabilities: Json) -> bool:
        """Whether its client declared these capabilities."""
        with contextlib.suppress(Rejection):
            self.require(capabilities)
            return True
        return False

    def accepted(self, key: str) -> Json | None:
        """What the user filled in under this key; None if that is missing, or was declined (`responses` tells)."""
        if (response := self.responses.get(key)) is None:
            return None
        check_elicitation(key, response)
        return response.get("content") or {} if response["action"] == "accept" else None

    def as_task(self, required: bool = False, ttl_ms: int = 3_600_000) -> None:
        """From here on the work outlives the connection.

        For a client that declared the tasks extension this does not return: its answer is a task handle, and the tool's
        function runs again from the top, in a task, where this call does nothing. It runs from the top once more
        whenever there is something to do: a question has been answered, or the process has died. So what it does
        before its first step should be cheap, and each step should be done only if `done` says that it is not yet.
        Other clients wait for the result as before, or get -32021 when the tool cannot do without (`required`).
        """
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


def check_elicitation(key: str, response: Any) -> None:
    """Rejection for what is no answer to an elicitation."""
    if not isinstance(response, dict) or response.get("action") not in ("accept", "decline", "cancel"):
        raise Rejection(INVALID_PARAMS, f"inputResponses.{key}.action must be accept, decline or cancel")
    if not isinstance(response.get("content") or {}, dict):
        raise Rejection(INVALID_PARAMS, f"inputResponses.{key}.content must be an object")


def undeclared(required: Json, declared: Any) -> Json:
    """The part of the required capabilities that a client has not declared."""
    if not isinstance(declared, dict):
        return required
    missing = {name: undeclared(inner, declared.get(name)) for name, inner in required.items()}
    return {name: missing[name] for name in required if missing[name] or not isinstance(declared.get(name), dict)}


def input_required(requests: Json, state: Any = None) -> Json:
    """A result that asks the client for input; `state` comes back as `request.state` with the retried request."""
    return present(resultType="input_required", inputRequests=requests, requestState=state)


def elicit(message: str, properties: Json, required: Iterable[str] | None = None) -> Json:
    """An input request: a form for the user; `required`: the fields that must be filled in, by default all."""
    schema = takes() | {"properties": properties, "required": list(properties if required is None else required)}
    return {"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}}


def elicit_url(message: str, url: str) -> Json:
    """An input request: a page for the user to visit, for what must not pass through the client."""
    return {"method": "elicitation/create", "params": {"mode": "url", "message": message, "url": url}}


# ------------------------------------------------------------------------------------------------------- schemas

TEXT: Json = {"type": "string"}
OBJECT: Json = {"type": "object"}
TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "boolean": (bool,), "object": (dict,), "array": (list,),
                                      "null": (type(None),), "number": (int, float), "integer": (int,)}
KEYWORDS = {"type", "properties", "required", "items", "enum", "additionalProperties",
            "title", "description", "default", "examples", "$schema", "x-mcp-header"}


def takes(optional: Json | None = None, /, **required: Json) -> Json:
    """The schema of an object with these properties."""
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def check_schema(schema: Any) -> None:
    """ValueError for a schema with keywords that `compile_schema` does not know."""
    if unknown := set(schema) - KEYWORDS:
        raise ValueError(f"not checked here: {', '.join(sorted(unknown))} (see checks_own_arguments)")
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for one in filter(None, inner):
        check_schema(one)


Check = Callable[[Any], str | None]


def compile_schema(schema: Json) -> Check:
    """A function that finds the first way in which a JSON value breaks the schema, None if it breaks none.

    What it says is to be put behind the value's name: ".month is required", " must be of type string".
    """
    kind = schema.get("type", [])
    kinds = [kind] if isinstance(kind, str) else kind
    types = [one for name in kinds for one in TYPES[name]]  # bool is an int to Python and no number to JSON
    enum, required = schema.get("enum"), schema.get("required", ())
    properties = {name: compile_schema(inner) for name, inner in schema.get("properties", {}).items()}
    others = compile_schema(schema["additionalProperties"]) if schema.get("additionalProperties") else None
    items = compile_schema(schema["items"]) if "items" in schema else None
    closed = schema.get("additionalProperties") is False

    def check(value: Any) -> str | None:
        integral = type(value) is float and value.is_integer() and "integer" in kinds  # to JSON Schema 42.0 is one
        if types and type(value) not in types and not integral:
            return f" must be of type {' or '.join(kinds)}"
        if enum is not None and not any(type(value) is type(one) and value == one for one in enum):
            return f" must be one of {json.dumps(enum)[1:-1]}"
        if type(value) is dict:
            for name in required:
                if name not in value:
                    return f".{name} is required"
            for name, inner in value.items():
                if (check_inner := properties.get(name, others)) and (problem := check_inner(inner)):
                    return f".{name[:100]}{problem}"
                if closed and name not in properties:
                    return f".{name[:100]} is not known here"
        elif type(value) is list and items:
            return next((f"[{index}]{problem}" for index, one in enumerate(value) if (problem := items(one))), None)
        return None

    return check


TOKEN: Json = {"type": ["string", "integer"]}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
TEXT_LIST: Json = {"type": "array", "items": TEXT}
OBJECTS: Json = {"type": "object", "additionalProperties": OBJECT}
check_shape = compile_schema(takes({"params": OBJECT}, jsonrpc={"enum": ["2.0"]}, method=TEXT))
check_metadata = compile_schema(takes(
    {META + "clientInfo": takes(name=TEXT, version=TEXT), META + "logLevel": {"enum": list(LOG_LEVELS)},
     "progressToken": TOKEN}, **{META + "protocolVersion": TEXT, META + "clientCapabilities": OBJECTS}))
# choice: null counts as absent in what a client merely echoes, because client libraries send it so.
ECHOED: Json = {"inputResponses": OBJECTS | {"type": ["object", "null"]}, "requestState": {"type": ["string", "null"]}}
PARAMS: dict[str, Json] = {
    "tools/call": takes({"arguments": OBJECT} | ECHOED, name=TEXT),
    "prompts/get": takes({"arguments": TEXTS} | ECHOED, name=TEXT),
    "resources/read": takes(ECHOED, uri=TEXT),
    "completion/complete": takes({"context": takes({"arguments": TEXTS})}, argument=takes(name=TEXT, value=TEXT),
                                 ref=takes({"name": TEXT, "uri": TEXT}, type={"enum": ["ref/prompt", "ref/resource"]})),
    "subscriptions/listen": takes(notifications=takes({
        "toolsListChanged": {"type": "boolean"}, "promptsListChanged": {"type": "boolean"},
        "resourcesListChanged": {"type": "boolean"}, "resourceSubscriptions": TEXT_LIST, "taskIds": TEXT_LIST})),
    "tasks/get": takes(taskId=TEXT),
    "tasks/update": takes(taskId=TEXT, inputResponses=OBJECT),
    "tasks/cancel": takes(taskId=TEXT),
}
check_params = {method: compile_schema(schema) for method, schema in PARAMS.items()}
MAY_ASK = ("tools/call", "prompts/get", "resources/read")  # spec: Multi Round-Trip Requests › Supported Requests


# ------------------------------------------------------------------------------------------ the registry and dispatch


class Tool(NamedTuple):
    """A registered tool: its definition as listed, its function, and what its headers mirror."""

    definition: Json
    function: Callable[[Json, Request], str | Json]
    mirrored: list[headers.MirroredParameter]
    check_arguments: Check
    check_output: Check
    switchable: bool  # it can be listed and unlisted while the server runs


class Entry(NamedTuple):
    """A registered resource, resource template or prompt; a resource's with caching hints."""

    definition: Json
    function: Callable[..., Any]
    hints: Json


class Answer(NamedTuple):
    """A response, ready to send: HTTP status, JSON text, further field lines."""

    status: int
    body: bytes
    fields: str = ""


class Server:
    """What one MCP server offers and how it answers; a transport calls `start`, `respond` and `stop`.

    `page_size`: resources on one page of their list; None: all. `rate`: calls a second and burst, for each user.
    """

    compares_headers = True  # False, in tests only: shows what a gateway that trusts the headers lets through

    def __init__(self, name: str, version: str, instructions: str = "", page_size: int | None = None,
                 store: Store | None = None, rate: tuple[float, float] | None = None) -> None:
        self.info, self.instructions, self.page_size = {"name": name, "version": version}, instructions, page_size
        self.store, self.rate = store or Store(), RateLimit(*rate) if rate else None
        self.tools: dict[str, Tool] = {}
        self.resources: dict[str, Entry] = {}
        self.templates: dict[str, Entry] = {}
        self.prompts: dict[str, Entry] = {}
        self.completions: dict[tuple[str, str, str], Callable[[str, dict[str, str], Request], list[str]]] = {}
        self.subscriptions, self.tasks = Subscriptions(self), Tasks(self)
        self.stopped = threading.Event()
        self.keeper = threading.Thread(target=self.keep, name="keeper", daemon=True)
        self.methods: dict[str, Callable[[Request], Json | None]] = {  # None: the answer comes later, by `finish`
            "server/discover": self.discover, "tools/list": self.list_tools, "tools/call": self.call_tool,
            "resources/list": self.list_resources, "resources/templates/list": self.list_templates,
            "resources/read": self.read_resource, "prompts/list": self.list_prompts, "prompts/get": self.get_prompt,
            "completion/complete": self.complete, "subscriptions/listen": self.subscriptions.listen,
            "tasks/get": self.tasks.get, "tasks/update": self.tasks.update, "tasks/cancel": self.tasks.cancel,
        }

    # what a server is built from; each is a decorator

    def tool(self, name: str, description: str, input_schema: Json, *, title: str | None = None,
             output_schema: Json | None = None, annotations: Json | None = None, listed: bool = True,
             checks_own_arguments: bool = False) -> Callable[[Function], Function]:
        """Registers `function(arguments, request) -> text or result`. ValueError for a schema that breaks the rules."""
        mirrored = headers.mirrored_parameters(input_schema)
        checked = [{}, {}] if checks_own_arguments else [input_schema, output_schema or {}]
        for schema in checked:
            check_schema(schema)
        definition = present(name=name, title=title, description=description, inputSchema=input_schema,
                             outputSchema=output_schema, annotations=annotations)
        if not listed:
            self.store.execute("INSERT OR IGNORE INTO settings VALUES (?, 'no')", f"listed {name}")

        def register(function: Function) -> Function:
            check_arguments, check_output = map(compile_schema, checked)
            self.tools[name] = Tool(definition, function, mirrored, check_arguments, check_output, not listed)
            return function

        return register

    def resource(self, uri: str, name: str, *, description: str | None = None, mime_type: str = "text/plain",
                 cache_scope: str = "public", ttl_ms: int = 60_000) -> Callable[[Function], Function]:
        """Registers `function(uri, request) -> text, bytes, a list of contents, or None: there is no such resource`."""
        definition = present(uri=uri, name=name, description=description, mimeType=mime_type)
        return register_in(self.resources, uri, definition, cacheable(ttl_ms, cache_scope))

    def resource_template(self, template: str, name: str, *, description: str | None = None,
                          mime_type: str = "text/plain", cache_scope: str = "public",
                          ttl_ms: int = 60_000) -> Callable[[Function], Function]:
        """Registers `function(uri, values, request)`, as for `resource`; `{name}` stands for one segment of a path."""
        definition = present(uriTemplate=template, name=name, description=description, mimeType=mime_type)
        return register_in(self.templates, template, definition, cacheable(ttl_ms, cache_scope))

    def prompt(self, name: str, description: str, arguments: Iterable[Json] = ()) -> Callable[[Function], Function]:
        """Registers `function(arguments, request) -> text, or a list of messages`."""
        definition = present(name=name, description=description, arguments=list(arguments))
        return register_in(self.prompts, name, definition, {})

    def completion(self, kind: str, name: str, argument: str) -> Callable[[Function], Function]:
        """Registers `function(value, context, request) -> all matches, best first`; kind: ref/prompt, ref/resource."""
        return register_in(self.completions, (kind, name, argument))

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

    def is_listed(self, tool: Tool) -> bool:
        """Whether clients can see and call the tool at this moment."""
        question = "SELECT 1 FROM settings WHERE name = ? AND value = 'yes'"
        return not tool.switchable or self.store.read(question, f"listed {tool.definition['name']}") != []

    # its life

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

    # one request

    def respond(self, message: Json, channel: Channel, user: str, fields: Fields | None = None) -> Answer:
        """The answer to one request, whatever happens; Cancelled when nobody waits for it. `fields`: over HTTP."""
        request = None
        try:
            request = self.open_request(message, channel, user, fields)  # 11 to 17
            result = self.methods[request.method](request)  # 18
            if result is None:
                result = channel.pass_on(request, self.subscriptions)  # seam
            result = self.complete_result(request, result)
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
        if result.get("resultType") == "input_required":
            for wanted in result["inputRequests"].values():
                request.require(capability_for(wanted))
            if "requestState" in result:
                result = result | {"requestState": self.seal(request, result["requestState"])}
        meta = {META + "serverInfo": self.info} | result.get("_meta", {})
        return {"resultType": "complete"} | result | {"_meta": meta}

    # server/discover and the lists

    def discover(self, request: Request) -> Json:
        """server/discover: what this server speaks and offers."""
        changes = {"listChanged": True}
        capabilities = present(
            logging={}, extensions={TASKS: {}},
            tools=changes if self.tools else None, prompts=changes if self.prompts else None,
            resources=changes | {"subscribe": True} if self.offers("resources/read") else None,
            completions={} if self.completions else None)
        about = present(instructions=self.instructions or None)
        return {"supportedVersions": SUPPORTED_VERSIONS, "capabilities": capabilities} | about | cacheable(3_600_000)

    def list_tools(self, request: Request) -> Json:
        """tools/list: in the order of registration, which is the same every time."""
        return page(request, "tools", [tool for tool in self.tools.values() if self.is_listed(tool)])

    def list_resources(self, request: Request) -> Json:
        """resources/list, page by page."""
        return page(request, "resources", self.resources.values(), self.page_size)

    def list_templates(self, request: Request) -> Json:
        """resources/templates/list, page by page."""
        return page(request, "resourceTemplates", self.templates.values(), self.page_size)

    def list_prompts(self, request: Request) -> Json:
        """prompts/list."""
        return page(request, "prompts", self.prompts.values())

    # tools, resources, prompts, completion

    def call_tool(self, request: Request) -> Json:
        """tools/call: checks the arguments, then runs the tool's function."""
        # spec: Tools › Security Considerations: MUST rate limit tool invocations
        if self.rate and (wait := self.rate.seconds_to_wait(request.user)):
            raise Rejection(429, "Too many tool calls", status=429, fields=f"Retry-After: {wait}\r\n")
        tool = self.tools.get(request.params["name"])
        if tool is None or not self.is_listed(tool):
            raise Rejection(INVALID_PARAMS, f"Unknown tool: {request.params['name'][:100]}")
        arguments = request.params.get("arguments", {})
        if problem := tool.check_arguments(arguments):
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
            # spec: Resources › Error Handling: MUST return -32602, MUST NOT return an empty contents array
            raise Rejection(INVALID_PARAMS, "Resource not found", {"uri": uri})
        if isinstance(content, dict):
            return content
        if not isinstance(content, list):
            body = {"text": content} if isinstance(content, str) else {"blob": base64.b64encode(content).decode()}
            content = [{"uri": uri, "mimeType": found[0].definition["mimeType"]} | body]
        return {"contents": content} | found[0].hints

    def get_prompt(self, request: Request) -> Json:
        """prompts/get: its messages, or a question first."""
        entry, arguments = self.prompts.get(request.params["name"]), request.params.get("arguments", {})
        if entry is None:
            raise Rejection(INVALID_PARAMS, f"Unknown prompt: {request.params['name'][:100]}")
        for argument in entry.definition["arguments"]:
            if argument.get("required") and argument["name"] not in arguments:
                raise Rejection(INVALID_PARAMS, f"Missing required argument: {argument['name']}")
        content = entry.function(arguments, request)
        if isinstance(content, dict):
            return content
        if isinstance(content, str):
            content = [{"role": "user", "content": {"type": "text", "text": content}}]
        return {"description": entry.definition["description"], "messages": content}

    def complete(self, request: Request) -> Json:
        """completion/complete: at most 100 values."""
        ref, argument = request.params["ref"], request.params["argument"]
        prompt = ref["type"] == "ref/prompt"
        name = ref.get("name" if prompt else "uri")
        if name not in (self.prompts if prompt else self.templates):
            raise Rejection(INVALID_PARAMS, "params.ref must name a prompt or a resource template")
        function = self.completions.get((ref["type"], name, argument["name"]))
        known = request.params.get("context", {}).get("arguments", {})
        values = function(argument["value"], known, request) if function else []
        return {"completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}}

    # multi round-trip requests: the state travels with the client, sealed

    def seal(self, request: Request, state: Any) -> str:
        """requestState: bound to the request, its user and a time, so that it is of no use anywhere else."""
        payload = {"state": state, "expires": time.time() + STATE_SECONDS} | origin_of(request)
        text = base64.urlsafe_b64encode(json.dumps(payload).encode()).decode()
        return f"{text}.{self.signature(text)}"

    def unseal(self, request: Request, sealed: Any) -> Any:
        """The state inside; None for None. One message for every cause, so that a refusal teaches nothing."""
        if sealed is None:
            return None
        text, _, signature = sealed.rpartition(".") if isinstance(sealed, str) else ("", "", "")
        # spec: Multi Round-Trip Requests › Server Requirements (Basic Workflow): MUST reject state that does not verify
        if hmac.compare_digest(self.signature(text).encode(), signature.encode("utf-8", "backslashreplace")):
            payload = json.loads(base64.urlsafe_b64decode(text))
            if payload["expires"] > time.time() and origin_of(request).items() <= payload.items():
                return payload["state"]
        raise Rejection(INVALID_PARAMS, "requestState is not valid for this request", status=400)

    def signature(self, text: str) -> str:
        """HMAC-SHA-256 over the exact characters received."""
        return hmac.new(self.store.secret, text.encode("utf-8", "backslashreplace"), hashlib.sha256).hexdigest()


Function = Callable[..., Any]
NEEDS_TASKS: Json = {"extensions": {TASKS: {}}}


@contextlib.contextmanager
def state_trouble_logged(what: str) -> Iterator[None]:
    """For what can wait until the state can be used again."""
    try:
        yield
    except StoreTrouble as problem:
        log(f"{what}: {problem}")


def register_in(table: dict[Any, Any], key: Any, *entry: Json) -> Callable[[Function], Function]:
    """A decorator that puts a function, with its definition and hints if it has any, into a table."""

    def register(function: Function) -> Function:
        table[key] = Entry(entry[0], function, entry[1]) if entry else function
        return function

    return register


def present(**members: Any) -> Json:
    """An object of those members that are not None."""
    return {name: value for name, value in members.items() if value is not None}


def rejection_for(problem: BaseException) -> Rejection:
    """What a client is told of an exception: all of a rejection, nothing of a fault of this server's."""
    if isinstance(problem, Rejection):
        return problem
    if isinstance(problem, HeaderMismatch):
        # spec: Streamable HTTP › Server Validation: MUST return 400 with HeaderMismatch
        return Rejection(HEADER_MISMATCH, f"Header mismatch: {problem}")
    if isinstance(problem, StoreTrouble):
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
        return text_result(result)
    if "structuredContent" in result:
        structured = result["structuredContent"]
        # spec: Tools › Output Schema: MUST provide structured results that conform to this schema
        if problem := tool.check_output(structured):
            raise ValueError(f"structuredContent{problem}")
        # spec: Tools › Structured Content: SHOULD also return the serialized JSON in a TextContent block
        return text_result(json.dumps(structured, ensure_ascii=False)) | result
    return result


def text_result(text: str) -> Json:
    """A tool's result with one block of text."""
    return {"content": [{"type": "text", "text": text}]}


def cacheable(ttl_ms: int, scope: str = "public") -> Json:
    """The caching hints of a result."""
    return {"ttlMs": ttl_ms, "cacheScope": scope}


def page(request: Request, key: str, entries: Iterable[Tool | Entry], size: int | None = None) -> Json:
    """One page of a list, from the cursor on. -32602 for a cursor that this list has not given out."""
    items = [entry.definition for entry in entries]
    cursors = {make_cursor(start): start for start in range(size or len(items) or 1, len(items), size or 1)}
    cursor = request.params.get("cursor")
    if cursor is not None and (not isinstance(cursor, str) or cursor not in cursors):
        raise Rejection(INVALID_PARAMS, "This cursor is not valid")
    start = cursors[cursor] if cursor else 0
    end = start + (size or len(items))
    following = present(nextCursor=make_cursor(end) if end < len(items) else None)
    return {key: items[start:end]} | following | cacheable(300_000)


def make_cursor(position: int) -> str:
    """Opaque to clients: only this server reads it."""
    return base64.b64encode(b"after %d" % position).decode()


def match_template(template: str, uri: str) -> dict[str, str] | None:
    """The values of a template's variables in a URI; None if it does not match, or if a value would climb out."""
    pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(template))
    # spec: Resources › Security Considerations: MUST sanitize file paths to prevent directory traversal
    with contextlib.suppress(UnicodeDecodeError):
        if match := re.fullmatch(pattern, uri):
            values = {name: unquote(value, errors="strict") for name, value in match.groupdict().items()}
            if not any(re.fullmatch(r"\.*|.*[/\\].*", one) or not one.isprintable() for one in values.values()):
                return values
    return None


def origin_of(request: Request) -> Json:
    """What a requestState is bound to: the user, the method, and a digest of the parameters that matter."""
    salient = [request.params.get("name"), request.params.get("uri"), request.params.get("arguments") or {}]
    digest = hashlib.sha256(json.dumps(salient, sort_keys=True).encode()).hexdigest()
    return {"user": request.user, "method": request.method, "digest": digest}


def capability_for(input_request: Json) -> Json:
    """The client capability that an input request needs."""
    # spec: Multi Round-Trip Requests › Server Requirements (Basic Workflow): MUST NOT send undeclared inputRequests
    if input_request["method"] == "elicitation/create":
        return {"elicitation": {input_request["params"].get("mode", "form"): {}}}
    return {{"sampling/createMessage": "sampling", "roots/list": "roots"}[input_request["method"]]: {}}


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
SUBSCRIPTION_ID = META + "subscriptionId"
HERE = "<id>"  # stands for a subscription's id where a message is encoded once for many of them


class Subscriptions:
    """The open subscriptions, none of which has a thread, and the feed of changes, which the keeper delivers to them.

    `lock` guards `open` and `table`; who listens, who hangs up and the keeper take it, none of them for long.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.store = server, server.store
        self.lock = threading.Lock()
        self.open: dict[Channel, tuple[bytes, list[tuple[str, str]]]] = {}  # -> the id, as JSON, and keys of the table
        self.table: dict[tuple[str, str], dict[Channel, bytes]] = {}  # topic and subject -> who hears of it -> the id
        self.ending, self.ended = False, threading.Event()
        self.seen: int = self.store.read("SELECT coalesce(max(number), 0) FROM changes")[0][0]  # the keeper's
        self.next_comment = 0.0  # the keeper's: when it looks for streams that have been quiet for long
        self.passing: set[Channel] = set()  # seam: those whose thread has not ended

    def listen(self, request: Request) -> None:
        """subscriptions/listen: acknowledged and entered into the table; the answer comes when somebody ends it."""
        agreed = self.agree(request)
        subjects = {topic: agreed.get(name, ()) for topic, name in FILTERS.items()}
        keys = [(topic, one) for topic, named in subjects.items() for one in ([""] if named is True else named)]
        exchange, subscription_id = request.channel, sse.encode_json(request.id)
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
        offered = {"toolsListChanged": self.server.tools, "promptsListChanged": self.server.prompts,
                   "resourcesListChanged": self.server.resources}
        agreed: Json = {name: True for name, table in offered.items() if wanted.get(name) and table}
        mine = {row["id"] for row in self.store.read("SELECT id FROM tasks WHERE user = ? AND id IN (SELECT value FROM"
                                                     " json_each(?))", request.user, json.dumps(tasks))}
        named = {"resourceSubscriptions": [one for one in dict.fromkeys(uris) if self.server.find_resource(one)],
                 "taskIds": [one for one in dict.fromkeys(tasks) if one in mine]}
        return agreed | {name: subjects for name, subjects in named.items() if subjects}

    def forget(self, exchange: Channel) -> bytes | None:
        """Out of the table, because its client has gone or because it ends; its id if it was there."""
        with self.lock:
            subscription_id, keys = self.open.pop(exchange, (None, []))
            for key in keys:
                del self.table[key][exchange]
                if not self.table[key]:
                    del self.table[key]
        return subscription_id

    def finish(self, *exchanges: Channel) -> None:
        """Ends subscriptions from this server's side."""
        # spec: Subscriptions › Graceful Closure: SHOULD respond with an empty result before closing the stream
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION_ID: HERE, META + "serverInfo": self.server.info}}
        pieces = cut({"id": HERE, "result": result}, 2)
        for exchange in exchanges:
            if subscription_id := self.forget(exchange):
                exchange.finish(subscription_id.join(pieces))

    def end(self, deadline: float) -> None:
        """At shutdown: has the keeper tell what there is to tell and end all of them, before the deadline."""
        self.ending = True
        self.store.committed.set()
        self.ended.wait(max(0.0, deadline - time.monotonic()))
        while self.passing and time.monotonic() < deadline:  # seam
            self.server.stopped.wait(0.005)

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
                if not exchange.comment_due():
                    exchange.push_comment()
            due = [one for exchange in exchanges if (one := exchange.comment_due()) < math.inf]
            self.next_comment = time.monotonic() + max(min(due), max(due) / 15) if due else 0.0


def notification(name: str, params: Json) -> list[bytes]:
    """A notification for many subscriptions, in two pieces: the id of each goes between."""
    # spec: Subscriptions › Receiving Notifications: all carry the id of the listen request in _meta
    return cut({"method": f"notifications/{name}", "params": {"_meta": {SUBSCRIPTION_ID: HERE}} | params})


def cut(message: Json, places: int = 1) -> list[bytes]:
    """A message in JSON, cut where the id of a subscription goes."""
    return sse.encode_json({"jsonrpc": "2.0"} | message).split(sse.encode_json(HERE), places)


# ------------------------------------------------------------------------- the store: a handle is a row, life a lock

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
        self.lock, self.inside, self.life = threading.RLock(), False, -1
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
            if self.inside:
                yield
                return
            self.run(self.db, "BEGIN IMMEDIATE", deadline=deadline)
            self.inside, before = True, self.db.total_changes
            try:
                yield
                self.run(self.db, "COMMIT", deadline=deadline)
            finally:
                self.inside = False
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
            added = "INSERT INTO changes (topic, subject, detail) VALUES (?, ?, ?) RETURNING number"
            number = self.execute(added, topic, subject, detail)[0]["number"]
            self.execute("DELETE FROM changes WHERE number <= ?", number - MAX_CHANGES)

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

    # handles

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
        for path in glob.glob(glob.escape(beside) + "*"):
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


# --------------------------------------------------------------------------------------------------------- tasks

UNFINISHED = ("working", "input_required")


class Asks(BaseException):
    """A question that has no answer yet, as its argument: the function unwinds here, see `Request.ask`."""


class TaskRequest(Request):
    """The request of one run of a task: no client waits, so steps and questions are written to the row."""

    def __init__(self, row: sqlite3.Row, tasks: Tasks) -> None:
        saved = json.loads(row["request"])
        super().__init__({"id": row["id"], "method": "tools/call", "params": saved["params"]}, Channel(), row["user"])
        self.tasks, self.row, self.saved, self.state, self.reported = tasks, row, saved, saved["state"], row["done"]
        self.answers: Json = json.loads(row["answers"])
        self.responses = saved["responses"] | self.answers
        self.over = False  # the function has ended; threads that it has left behind are not heard any more
        self.cancelled.clear()  # seam: makes the event, before two threads do

    def record(self, **columns: Any) -> None:
        """Changes the row if it is still this run's; otherwise the run ends, by Cancelled."""
        store, names = self.tasks.store, ", ".join(f"{name} = ?" for name in columns)
        with store.transaction():
            mine = "id = ? AND owner = ? AND run = ? AND status = 'working'"
            changed = not self.reason and store.execute(
                f"UPDATE tasks SET {names}, deaths = 0, updated = ? WHERE {mine} RETURNING id", *columns.values(),
                time.time(), self.id, self.row["owner"], self.row["run"])
            if changed:
                store.tell("task", str(self.id))
        if not changed:
            self.tasks.stop_lost([str(self.id)])
            self.cancel("no longer this worker's")  # if the task is already in its next run here
            raise Cancelled(self.reason)

    def report(self, done: float, total: float | None, message: str | None) -> None:
        """Records the step, so that the next run can go on after it; one that cannot be written is dropped."""
        if not self.over:
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

    A task runs from the top whenever there is something to do: when it has been created, when its questions have been
    answered, when the process that ran it has died. `lock` guards `running` (task id -> the request of its run).
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
        self.store.execute(
            "UPDATE tasks SET answers = ?, updated = ?, status = ?, owner = ?, run = run + ? WHERE id = ?",
            json.dumps(answers | new), time.time(), "working" if complete else "input_required",
            self.store.instance if mine else None, int(mine), row["id"])
        self.store.tell("task", row["id"])
        return self.store.execute("SELECT * FROM tasks WHERE id = ?", row["id"])[0] if mine else None

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
            request.cancel("server stopped")
        return request

    def work(self, gate: queue.SimpleQueue[TaskRequest | None]) -> None:
        """The task worker: one run of the tool from the top; how it ended is written down."""
        if (request := gate.get()) is None:
            return
        try:
            self.stop_lost([str(request.id)])  # for what has become of it before it could be stopped
            self.write(request, self.run(request))
        except Cancelled as gone:
            log(f"{cancelled_line(request)} ({gone})")
        finally:
            with self.lock:
                if self.running[str(request.id)] is request:  # and not the next run of the same task
                    del self.running[str(request.id)]

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
            try:
                return failed(rejection_for(problem))
            except Exception as broken:  # what it says is no JSON
                return failed(rejection_for(broken))

    def write(self, request: TaskRequest, columns: Json) -> None:
        """Writes down how a run has ended; while that cannot be done, again every second until the process ends."""
        request.over = True
        while not request.reason:
            try:
                return request.record(**columns)
            except Exception as problem:
                log(f"how task {request.id} has ended is not written yet: {problem}")
            request.cancelled.wait(1)
        raise Cancelled(request.reason)

    def stop_lost(self, ids: list[str]) -> None:
        """Stops the runs of these tasks that are not to go on."""
        for task_id in ids:
            if request := self.running.get(task_id):
                rows = self.store.read("SELECT status, owner, run FROM tasks WHERE id = ?", task_id)
                if not rows:
                    request.cancel("expired")
                elif rows[0]["status"] == "cancelled":
                    request.cancel("tasks/cancel")
                elif (rows[0]["owner"], rows[0]["run"]) != (request.row["owner"], request.row["run"]):
                    request.cancel("no longer this worker's")

    def release(self) -> None:
        """At shutdown: stops the runs, and leaves their rows to whoever sees the lock go. That will be no death."""
        for request in list(self.running.values()):
            request.cancel("server stopped")
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
            end = failed(Rejection(INTERNAL_ERROR, f"The process that ran this has died, {MAX_DEATHS} times in a row"))
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
                        end = failed(Rejection(INTERNAL_ERROR, "The task has expired"))
                        last = task_view(dict(row) | end | {"updated": now})
                        self.store.tell("task", row["id"], sse.encode_json(last).decode())


def failed(rejection: Rejection) -> Json:
    """The columns of a task that has failed."""
    # spec: Tasks Extension › Task Execution Errors: failed is for JSON-RPC errors only
    outcome = sse.encode_json({"error": rejection.error()}).decode()
    return {"status": "failed", "message": str(rejection.message), "outcome": outcome}


def check_answer(key: str, asked: Json, answer: Any) -> None:
    """Rejection for an answer that is not what the input request asked for."""
    problem = compile_schema(OBJECT)(answer)
    if asked["method"] == "elicitation/create" and not problem:
        check_elicitation(key, answer)
        if answer["action"] == "accept" and (schema := asked["params"].get("requestedSchema")):
            problem = compile_schema(takes(content=schema))({"content": answer.get("content") or {}})
    if problem:
        raise Rejection(INVALID_PARAMS, f"inputResponses.{key}{problem}")


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


# --------------------------------------------------------------------------------------------- the demo catalogue

READS = {"readOnlyHint": True, "openWorldHint": False}
ADDS = {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False, "openWorldHint": False}
SWITCHES = ADDS | {"idempotentHint": True}


def demo_server(step_seconds: float = 1.0, store: Store | None = None,
                rate: tuple[float, float] | None = None) -> Server:
    """The server that the lessons use."""
    about = "A demo: weather, carts, flights, and a report that takes its time."
    server = Server("mcp-reference-server", "1.0.0", about, page_size=2, store=store, rate=rate)
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

    @server.tool("build_report", "Builds a monthly report in ten slow steps. Reports progress; stops when you hang up;"
                 " a task for clients that know tasks.", takes(month=TEXT), annotations=READS)
    def build_report(arguments: Json, request: Request) -> str:
        request.as_task()
        work(request, 1, 5)
        charts = ""
        if request.can_ask():
            request.ask({"charts": elicit("Include charts in the report?", {"charts": {"type": "boolean"}})})
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

    @server.tool("get_weather", "The weather at a place, as text.", takes(location=TEXT), annotations=READS)
    def get_weather(arguments: Json, request: Request) -> str:
        return "{temperature} °C and {conditions} in {location}.".format(**arguments, **weather(arguments["location"]))

    report = takes(temperature={"type": "number"}, conditions=TEXT, humidity={"type": "number"})

    @server.tool("get_weather_data", "The weather at a place, as data.", takes(location=TEXT), output_schema=report,
                 annotations=READS)
    def get_weather_data(arguments: Json, request: Request) -> Json:
        return {"structuredContent": weather(arguments["location"])}

    region = {"type": "string", "description": "where to run it; gateways route by it", "x-mcp-header": "Region"}

    @server.tool("execute_sql", "Pretends to run a query in a region.", takes(region=region, query=TEXT),
                 annotations=READS)
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
                 annotations=ADDS)
    def book_flight(arguments: Json, request: Request) -> str:
        today = datetime.date.today()
        with contextlib.suppress(ValueError):
            if datetime.date.fromisoformat(arguments["date"]) > today:
                return f"Booked: {arguments['to']} on {arguments['date']}."
        raise ToolError(f"The departure must be a date in the future, as YYYY-MM-DD. Today is {today}.")


def add_spoofing_lesson(server: Server) -> None:
    """A harmless tool that a gateway allows, and one that it does not."""
    titles = ["Emma", "Middlemarch", "Moby-Dick", "The Trial", "Ulysses"]

    @server.tool("search", "Searches the library's titles.", takes(query=TEXT), annotations=READS)
    def search(arguments: Json, request: Request) -> str:
        return ", ".join(title for title in titles if arguments["query"].lower() in title.lower()) or "Nothing found."

    @server.tool("place_hold", "Reserves a title in your name for 24 hours.", takes(title=TEXT),
                 output_schema=takes(holdId=TEXT, title=TEXT), annotations=ADDS)
    def place_hold(arguments: Json, request: Request) -> Json:
        hold = server.store.new_handle("hold", request.user, arguments["title"])
        return {"structuredContent": {"holdId": hold, "title": arguments["title"]}}


def add_questions(server: Server) -> None:
    """Tools that need something from the user first: a form, and a page for what must not pass through the client."""

    @server.tool("create_repo", "Creates a repository; asks for your GitHub user name.", takes(repo=TEXT),
                 annotations=ADDS)
    def create_repo(arguments: Json, request: Request) -> str | Json:
        answer = request.accepted("github_login")
        if answer is None and "github_login" in request.responses:
            return "No repository was created, as you wished."
        name = (answer or {}).get("name")
        if not isinstance(name, str) or not name:
            return input_required({"github_login": elicit("Please provide your GitHub user name", {"name": TEXT})},
                                  state={"asked": (request.state or {}).get("asked", 0) + 1})
        return f"Created {name}/{arguments['repo']}."

    @server.tool("connect_billing", "Connects your billing account, on its own page.", takes(), annotations=SWITCHES)
    def connect_billing(arguments: Json, request: Request) -> str | Json:
        consent = request.accepted("billing_key")
        if consent is not None and request.state:
            return f"Billing is connected (visit {request.state['visit']})."
        if consent is None and "billing_key" in request.responses:
            return "Billing was not connected, as you wished."
        visit = secrets.token_urlsafe(8)
        page = elicit_url("Enter your billing key on this page", f"https://billing.example.com/connect/{visit}")
        return input_required({"billing_key": page}, state={"visit": visit})


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

    @server.tool("beta_search", "Searches better, perhaps.", takes(query=TEXT), listed=False, annotations=READS)
    def beta_search(arguments: Json, request: Request) -> str:
        return f"A better answer to {arguments['query']} is being thought about."


def add_documents(server: Server) -> None:
    """Resources, a resource template, and a prompt with completion."""

    @server.resource("app://me/settings", "settings", description="Your settings", mime_type="application/json",
                     cache_scope="private")
    def settings(uri: str, request: Request) -> str:
        return json.dumps({"user": request.user, "language": "en"})

    @server.resource("file:///project/config.json", "config.json", mime_type="application/json")
    def config(uri: str, request: Request) -> str:
        touched = server.store.read("SELECT value FROM settings WHERE name = 'touched'")
        return json.dumps({"debug": False, "touched": touched[0]["value"] if touched else None})

    documents = {"README.md": "# The project\n", "CHANGES.md": "Nothing yet.\n", "LICENSE": "Use it as you like.\n"}

    def document(uri: str, values: dict[str, str], request: Request) -> str | None:
        return documents.get(values["name"])

    for name in documents:
        server.resource(f"file:///project/{name}", name)(lambda uri, request, name=name: documents[name])
    server.resource_template("file:///project/{name}", "project files", description="A file of the project")(document)
    languages = ["c", "go", "haskell", "java", "javascript", "python", "ruby", "rust", "typescript"]

    @server.prompt("code_review", "Asks for a review of some code.", [
        {"name": "code", "description": "the code to review", "required": True},
        {"name": "language", "description": "the language it is written in"}])
    def code_review(arguments: dict[str, str], request: Request) -> str:
        return f"Please review this {arguments.get('language', '')} code:\n{arguments['code']}"

    @server.completion("ref/prompt", "code_review", "language")
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
            if message["method"] == "subscriptions/listen" and "result" in json.loads(lines):  # seam: `finish`
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
    except StoreTrouble as problem:
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

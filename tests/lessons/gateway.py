"""A small gateway that lets some tools through and judges by the `Mcp-Name` header alone. It never reads a body.

    python tests/lessons/gateway.py [UPSTREAM-PORT [PORT]]    allows `search`; default: 3000, and 3001 for itself

What it may believe depends on the server behind it: a header is worth judging only if whoever runs the body compares
the two. So it refuses what says nothing about that, or what two readers could read in two ways:

    a version older than the comparison, or none               400
    Mcp-Name missing, malformed, or given twice with different values    400
    a `Connection` field that would make it drop Mcp-*         400
    a name that is not allowed, in whatever spelling           403

Everything else goes through as it is, `Mcp-Param-*` too; the answer comes back octet by octet, as it comes. When its
client leaves, it leaves the server, because over this transport that is the cancellation. One request a connection.
"""

import re
import select
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import by_hand

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headers import CHUNKED, BadHead, Fields, HeaderMismatch, check_framing, check_head_so_far, decode_value, parse_head

FIRST_COMPARING = "2026-07-28"  # the first version whose servers must compare headers and body
# rfc9110 §7.6.1: these concern one connection only, as do the fields that Connection names
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "upgrade", "expect", "content-length"}
MAX_BODY = 1 << 20  # octets
PATIENCE = 10.0  # seconds for a request to arrive, or for the server to take it


class Refusal(Exception):
    """The gateway's own answer: an HTTP status and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def judge(fields: Fields, allowed: Collection[str]) -> None:
    """Refusal unless the headers name an allowed tool, beyond doubt."""
    # spec: Streamable HTTP › Server Validation: SHOULD reject an older or absent version rather than trust the headers
    version = single_value(fields, "MCP-Protocol-Version")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", version, re.ASCII) or version < FIRST_COMPARING:
        raise Refusal(400, f"servers that speak {version[:20]!r} do not compare headers and body")
    # rfc9110 §7.6.1: what Connection names goes no further, so the server would not see what was judged here
    if "mcp-" in ",".join(fields.get("connection", ())).lower():
        raise Refusal(400, "Connection must not name the headers that this gateway judges by")
    try:
        # spec: Streamable HTTP › Value Encoding: intermediaries that inspect these values MUST decode them
        name = decode_value(single_value(fields, "Mcp-Name"), "Mcp-Name header")
    except HeaderMismatch as malformed:
        raise Refusal(400, str(malformed)) from None
    if name not in allowed:
        raise Refusal(403, f"{name[:80]!r} is not allowed here")


def single_value(fields: Fields, header: str) -> str:
    """The one value of a header; Refusal when it is missing, or repeated with another value."""
    values = set(fields.get(header.lower(), ()))
    if len(values) != 1:
        raise Refusal(400, f"{header} is {'repeated with other values' if values else 'missing'}")
    return values.pop()


def forwarded_head(verb: str, target: str, version: str, fields: Fields, length: int) -> bytes:
    """The request's head for the server: all fields but those that concern one connection only."""
    dropped = HOP_BY_HOP | set(re.split(r"[ \t]*,[ \t]*", ",".join(fields.get("connection", ())).lower()))
    lines = [f"{name}: {value}" for name, values in fields.items() if name not in dropped for value in values]
    lines += [f"content-length: {length}", "connection: close"]
    return "\r\n".join([f"{verb} {target} {version}", *lines, "", ""]).encode("latin-1")


class Passage(BaseRequestHandler):
    """One client's connection, on its own thread: one request in, one answer out."""

    server: "Gateway"
    request: socket.socket
    answered = False  # octets of the server's answer have been passed on

    def handle(self) -> None:
        """Judges, then carries octets; a refusal is the gateway's own and says so."""
        self.request.settimeout(PATIENCE)
        try:
            message = self.read_request()
        except (Refusal, BadHead) as refusal:
            self.refuse(refusal.status, str(refusal))
            return
        except OSError:  # the client has left, or its request did not come in time
            return
        try:
            with socket.create_connection(("127.0.0.1", self.server.upstream), PATIENCE) as upstream:
                upstream.sendall(message)
                self.carry_answer(upstream)
        except OSError:
            if not self.answered:
                self.refuse(502, "there is no answer from the server")

    def read_request(self) -> bytes:
        """The whole request as it goes on to the server. It is judged before its body is waited for."""
        received = bytearray()
        while b"\r\n\r\n" not in received:
            check_head_so_far(received)
            self.receive(received)
        head, _, rest = received.partition(b"\r\n\r\n")
        verb, target, version, fields = parse_head(bytes(head))
        length = check_framing(fields, version)
        judge(fields, self.server.allowed)
        if "expect" in fields and not rest:
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.read_body(rest, length)
        return forwarded_head(verb, target, version, fields, len(body)) + body

    def read_body(self, received: bytearray, length: int) -> bytes:
        """The body, which goes on as it is, unread."""
        if length == CHUNKED or length > MAX_BODY:
            raise Refusal(411 if length == CHUNKED else 413, f"this needs a Content-Length of at most {MAX_BODY}")
        while len(received) < length:
            self.receive(received)
        return bytes(received[:length])

    def receive(self, received: bytearray) -> None:
        octets = self.request.recv(65536)
        if not octets:
            raise ConnectionError("the client has left")
        received += octets

    def carry_answer(self, upstream: socket.socket) -> None:
        """Octets from the server to the client, as they come, until either of them leaves."""
        while True:
            ready, _, _ = select.select([upstream, self.request], [], [])
            if self.request in ready and not self.request.recv(65536):
                return  # and so the server is left too: `upstream` is closed on the way out
            if upstream in ready:
                octets = upstream.recv(65536)
                if not octets:
                    return
                self.answered = True
                self.request.sendall(octets)

    def refuse(self, status: int, reason: str) -> None:
        """A plain answer of the gateway's own."""
        text = f"gateway: {reason}\n"
        with suppress(OSError):
            self.request.sendall(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
                                 "Content-Type: text/plain; charset=utf-8\r\n"
                                 f"Content-Length: {len(text.encode())}\r\n\r\n{text}".encode())
            self.request.shutdown(socket.SHUT_WR)
            self.request.settimeout(1)
            while self.request.recv(65536):  # closing over unread octets would reset the connection, answer and all
                pass


class Gateway(ThreadingTCPServer):
    """Listens on localhost in front of the server at port `upstream`; `port` 0 takes any that is free."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: int, allowed: Collection[str] = ("search",), port: int = 0) -> None:
        self.upstream, self.allowed = upstream, frozenset(allowed)
        super().__init__(("127.0.0.1", port), Passage)
        self.port = self.server_address[1]


def main(arguments: list[str]) -> int:
    """Serves until Ctrl-C."""
    parser = by_hand.parser_for(__doc__)
    parser.add_argument("upstream", nargs="?", type=int, default=3000, help="the port of the server behind it")
    parser.add_argument("port", nargs="?", type=int, default=3001, help="its own port; 0: any")
    options = parser.parse_args(arguments)
    ready = f"gateway: http://127.0.0.1:PORT/mcp allows `search` on port {options.upstream}"
    return by_hand.serve(options.port, lambda port: Gateway(options.upstream, port=port), ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""HISTORY, not an example to follow: Streamable HTTP as it was in revision 2025-11-25, as little as a comparison needs.

    python tests/lessons/legacy_server.py [PORT]    serves the demo's tools; default: 3003

Written for three_ways.py. It speaks `initialize`, sessions, event ids, GET with `Last-Event-ID`, and cancellation by
notification; it has no Origin check, no limits and no login, so it listens on localhost alone.

Look at what it has to remember, and the server of this revision has not: a session for each client, in it every stream,
in that every event that was ever sent, because a client may come back and ask for them. All of it lives in this one
process, so the next request must reach the same one. And since a closed connection may come back, it says nothing:
work goes on for nobody until a message comes that cancels it.

    https://modelcontextprotocol.io/specification/2025-11-25/basic/transports
"""

import json
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import by_hand

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reference_server import Cancelled, Exchange, Request, Server, demo_server
from sse import LAST_CHUNK, encode_chunk, encode_json

VERSION = "2025-11-25"
Json = dict[str, Any]


class Stream(Exchange):
    """All events of one request, kept for good. `changed` guards `messages` and `complete`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.messages: list[Json | None] = [None]  # the first event has an id and no data: something to come back with
        self.complete = False
        self.changed = threading.Condition()

    def emit(self, message: Json) -> None:
        """Keeps a message and wakes whoever reads; nobody may be reading at the moment."""
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def finish(self) -> None:
        """There will be no more messages."""
        with self.changed:
            self.complete = True
            self.changed.notify_all()

    def events(self, first: int = 0) -> Iterator[bytes]:
        """The events from one number on, as they come, until the stream is over."""
        while True:
            with self.changed:
                while first == len(self.messages) and not self.complete:
                    self.changed.wait()
                if first == len(self.messages):
                    return
                message = self.messages[first]
            text = b"" if message is None else encode_json(message)
            yield b"id: %d-%d\ndata: %b\n\n" % (self.number, first, text)
            first += 1


class Session:
    """What one client has begun. Touched by the connection threads of that client, in the order of its messages."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.requests: dict[Any, Request] = {}


class LegacyServer(ThreadingHTTPServer):
    """Serves the tools of a registry, on a free port unless one is given."""

    daemon_threads = True

    def __init__(self, mcp: Server, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), LegacyEndpoint)
        self.mcp = mcp
        self.sessions: dict[str, Session] = {}


class LegacyEndpoint(BaseHTTPRequestHandler):
    """One connection, on its own thread."""

    server: LegacyServer
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """All requests of a connection; one that its client resets is simply over."""
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        """One message: `initialize` opens a session, everything else belongs to one."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if message["method"] == "initialize":
            self.send_session(message)
        elif session := self.find_session():
            if "id" in message:
                self.send_events(self.begin(message, session).events())
            else:
                self.take_notification(message, session)
                self.send_status(202)

    def do_GET(self) -> None:
        """Reads on after the event that `Last-Event-ID` names: from what was kept, then as it comes."""
        if session := self.find_session():
            number, _, last = self.headers.get("Last-Event-ID", "").partition("-")
            if last:
                self.send_events(session.streams[int(number)].events(int(last) + 1))
            else:
                self.send_status(405)

    def do_DELETE(self) -> None:
        """Ends a session; a client that forgets to leaves it here for good."""
        if self.find_session():
            del self.server.sessions[self.headers["Mcp-Session-Id"]]
            self.send_status(204)

    def find_session(self) -> Session | None:
        """The session that the request names, or a refusal sent."""
        name = self.headers.get("Mcp-Session-Id")
        session = self.server.sessions.get(name or "")
        if session is None:
            self.send_status(404 if name else 400)
        return session

    def send_session(self, message: Json) -> None:
        """The handshake: from here on the server remembers this client."""
        name = secrets.token_urlsafe(16)
        self.server.sessions[name] = Session()
        result = {"protocolVersion": VERSION, "capabilities": {"tools": {}}, "serverInfo": self.server.mcp.info}
        body = encode_json({"jsonrpc": "2.0", "id": message["id"], "result": result})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Mcp-Session-Id", name)
        self.end_headers()
        self.wfile.write(body)

    def begin(self, message: Json, session: Session) -> Stream:
        """Starts a tool on a thread of its own: no connection can be trusted to last as long as the work."""
        stream = Stream(len(session.streams))
        session.streams.append(stream)
        request = session.requests[message["id"]] = Request(message, stream, "")
        threading.Thread(target=self.work, args=(request, stream), daemon=True).start()
        return stream

    def work(self, request: Request, stream: Stream) -> None:
        """The worker: runs the tool, keeps its response."""
        tool = self.server.mcp.tools[request.params["name"]]
        try:
            text = tool.function(request.params["arguments"], request)
            result = {"content": [{"type": "text", "text": text}]}
            stream.emit({"jsonrpc": "2.0", "id": request.id, "result": result})
        except Cancelled:
            pass  # what was cancelled gets no response
        stream.finish()

    def take_notification(self, message: Json, session: Session) -> None:
        """A cancellation is a message of its own, by POST."""
        if message["method"] == "notifications/cancelled" and message["params"]["requestId"] in session.requests:
            session.requests[message["params"]["requestId"]].exchange.cancel("notifications/cancelled")

    def send_status(self, status: int) -> None:
        """An answer without a body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_events(self, events: Iterator[bytes]) -> None:
        """A response stream. A client that has gone ends this connection, and nothing else."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                self.wfile.write(encode_chunk(event))
            self.wfile.write(LAST_CHUNK)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


def main(arguments: list[str]) -> int:
    """Serves until Ctrl-C."""
    parser = by_hand.parser_for(__doc__)
    parser.add_argument("port", nargs="?", type=int, default=3003)
    ready = f"legacy server: http://127.0.0.1:PORT/mcp speaks MCP {VERSION}, which is history (Ctrl-C ends it)"
    return by_hand.serve(parser.parse_args(arguments).port, lambda port: LegacyServer(demo_server(), port), ready)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The spoofed header: a gateway that believes `Mcp-Name`, before a server that compares it with the body or does not.

    python tests/lessons/spoof.py     prints what happened; exit status 1 when it is not what the lesson says

The gateway allows `search` alone. An honest `place_hold` does not get through. Then the header says `search` and the
body calls `place_hold`: the gateway lets it through, and all now depends on whether the server compares the two.
A hold is a row in the server's store, so what was really done is counted there.
"""

import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import by_hand
from gateway import Gateway

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headers import headers_for
from reference_server import HttpServer, Server, demo_server

META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
ARGUMENTS = {"search": {"query": "moby"}, "place_hold": {"title": "Moby-Dick"}}
PATIENCE = 10.0  # seconds


class Row(NamedTuple):
    """What happened to three calls, each as `status` or `status, code`, and the holds that exist afterwards."""

    search: str
    place_hold: str
    spoofed: str
    holds: int


# What the lesson says: first about a server that does not compare, then about one that does.
TRUSTING = Row("200", "403", "200", 1)
COMPARING = Row("200", "403", "400, -32020", 0)


@contextmanager
def behind_a_gateway(server: Server) -> Iterator[int]:
    """The port of a gateway before this server; both serve until the block ends."""
    served = HttpServer(server)
    gateway = Gateway(served.port)
    threads = [threading.Thread(target=served.serve_forever, args=[0.01]),
               threading.Thread(target=gateway.serve_forever, args=[0.01])]
    for thread in threads:
        thread.start()
    try:
        yield gateway.port
    finally:
        gateway.shutdown()
        gateway.server_close()
        served.stop()
        for thread in threads:
            thread.join(PATIENCE)


def call(port: int, tool: str, header: str) -> str:
    """Calls a tool in the body while `Mcp-Name` says `header`; the answer's status, and its code if it is an error."""
    params = {"name": tool, "arguments": ARGUMENTS[tool], "_meta": META}
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    fields = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/mcp", json.dumps(message), fields | headers_for(message) | {"Mcp-Name": header})
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    error = json.loads(body).get("error") if is_json else None
    return f"{answer.status}, {error['code']}" if error else f"{answer.status}"


def try_it(server: Server) -> Row:
    """The three calls against one server, and the count in its store."""
    with behind_a_gateway(server) as port:
        calls = [("search", "search"), ("place_hold", "place_hold"), ("place_hold", "search")]
        search, honest, spoofed = [call(port, tool, header) for tool, header in calls]
    holds = server.store.execute("SELECT count(*) AS count FROM handles WHERE kind = 'hold'")[0]["count"]
    server.store.close()
    return Row(search, honest, spoofed, holds)


def show(build: Callable[[], Server] = demo_server) -> int:
    """Prints the table; 0 when both servers did what the lesson says. `build` makes the server under test, twice."""
    trusting = build()
    trusting.compares_headers = False
    rows = {"does not compare": try_it(trusting), "this server": try_it(build())}
    titles = ("server behind the gateway", "search", "place_hold", "header search, body place_hold", "holds made")
    for name, *cells in (titles, *((name, *row) for name, row in rows.items())):
        print(f"{name:<28}{cells[0]:<9}{cells[1]:<13}{cells[2]:<33}{cells[3]}", flush=True)
    shown = list(rows.values()) == [TRUSTING, COMPARING]
    if not shown:
        print(f"This is not what the lesson says: {TRUSTING} and {COMPARING}")
    return 0 if shown else 1


if __name__ == "__main__":
    by_hand.parser_for(__doc__).parse_args()
    sys.exit(show())

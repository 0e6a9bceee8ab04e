"""A server that lists three tools, of which a client must leave one out: its x-mcp-header stands on a number.

    python tests/lessons/bad_tool.py [PORT]    default: 3004

reference_server.py refuses to register such a tool, so this server is one of its own. It answers tools/list alone.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import by_hand

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sse import decode_json, encode_json


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    """A tool as tools/list has it."""
    return {"name": name, "description": description, "inputSchema": {"type": "object", "properties": properties}}


TOOLS = [
    tool("list_accounts", "Lists the accounts."),
    tool("move_money", "Moves money.", amount={"type": "number", "x-mcp-header": "Amount"}),
    tool("get_rate", "The rate in a region.", region={"type": "string", "x-mcp-header": "Region"}),
]


class ListingEndpoint(BaseHTTPRequestHandler):
    """Answers one kind of message, as little as a lesson needs."""

    def do_POST(self) -> None:
        """The tools, or -32601."""
        try:
            message = decode_json(self.rfile.read(int(self.headers.get("Content-Length", ""))))
            listing = message["method"] == "tools/list"
        except (ValueError, KeyError, TypeError):
            self.send_error(400)
            return
        result = {"resultType": "complete", "tools": TOOLS, "ttlMs": 0, "cacheScope": "public"}
        error = {"code": -32601, "message": "This server knows tools/list alone"}
        outcome = {"result": result} if listing else {"error": error}
        body = encode_json({"jsonrpc": "2.0", "id": message.get("id")} | outcome)
        self.send_response(200 if listing else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


def listing_server(port: int = 0) -> ThreadingHTTPServer:
    """The server, which listens on this machine alone."""
    return ThreadingHTTPServer(("127.0.0.1", port), ListingEndpoint)


if __name__ == "__main__":
    parser = by_hand.parser_for(__doc__)
    parser.add_argument("port", nargs="?", type=int, default=3004)
    ready = f"bad tool: http://127.0.0.1:PORT/mcp lists {json.dumps([one['name'] for one in TOOLS])}"
    sys.exit(by_hand.serve(parser.parse_args().port, listing_server, ready))

"""Mutated requests, cut anywhere and sent one behind another: nothing that a client sends may confuse the server.

    python tests/load/fuzz.py [--inputs 200000] [--starts 400] [--seed 0] [--connections 8]

Input number n is the same in every run. After it, each answer must be well-formed HTTP with a status that the
server may give, or the connection closes cleanly; there are never more answers than requests; the server's log has
no traceback; and a plain request still works. That last look comes after each batch; if it fails, the batch's inputs
are sent again one by one. What has failed once is kept in fuzz_seeds.json, which tests/test_fuzz.py replays.
Then come starts with mutated descriptors and options (fuzz_starts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from support import message, octets  # noqa: E402

KEPT = HERE / "fuzz_seeds.json"
BATCH = 100
PATIENCE = 8.0  # seconds until an answer that does not come counts as a hang
STATUSES = {200, 202, 204, 400, 401, 403, 404, 405, 406, 408, 411, 413, 414, 415, 417, 429, 431, 501, 503, 505}
LIMITS = ["--request-timeout", "0.4", "--idle-timeout", "0.4", "--write-timeout", "2", "--keep-alive", "0.1",
          "--step-seconds", "0", "--rate", "0"]
CANARY = octets(message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}}), Connection="close")


class Input(NamedTuple):
    """What one connection sends."""

    pieces: list[bytes]  # as they are handed to the socket
    least: int  # how many answers there must be, unless the server says that it closes
    most: int  # how many answers there may be
    patient: bool  # the client leaves its half open, so that the server's own limits must end what is incomplete


# ----------------------------------------------------------------------------------------- valid requests


def corpus() -> list[tuple[dict[str, Any] | bytes, dict[str, str]]]:
    """Bodies, and the field lines beside those that `octets` gives them."""
    tasks = {"extensions": {"io.modelcontextprotocol/tasks": {}}}  # no forms, so that no task waits for an answer
    call: Callable[..., dict[str, Any]] = lambda name, arguments, **more: message(  # noqa: E731
        "tools/call", {"name": name, "arguments": arguments}, **more)
    bodies: list[dict[str, Any]] = [
        call("get_weather", {"location": "Oslo"}), call("get_weather_data", {"location": "Zürich"}, id="a"),
        call("add_to_cart", {"cartId": "cart_x", "sku": "tea"}),
        call("create_repo", {"repo": "r"}, capabilities={"elicitation": {}}),
        call("build_report", {"month": "May"}, progressToken=0, log_level="debug"),
        call("build_report", {"month": "May"}, capabilities=tasks),
        call("book_flight", {"to": "OSL", "date": "2031-01-01"}),
        message("server/discover"), message("tools/list"), message("resources/list", {"cursor": "x"}),
        message("resources/read", {"uri": "file:///project/config.json"}), message("prompts/list", id=2**63),
        message("prompts/get", {"name": "code_review", "arguments": {"code": "x", "language": "c"}}),
        message("completion/complete", {"ref": {"type": "ref/prompt", "name": "code_review"},
                                        "argument": {"name": "language", "value": "p"}}),
        message("tasks/get", {"taskId": "t"}, capabilities=tasks),
        message("tasks/cancel", {"taskId": "t"}, capabilities=tasks),
        message("subscriptions/listen", {"notifications": {"toolsListChanged": True, "taskIds": ["t"]}}),
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
    ]
    region = {"Mcp_Param_Region": "eu"}
    return [(body, {}) for body in bodies] + [(call("execute_sql", {"region": "eu", "query": "q"}), region)]


CORPUS = corpus()
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 42.0, 2**53 + 1, 10**400, float("nan"), "", "\0", "\ud800", "é" * 40, "x" * 3000,
    [], {}, [[[]]], {"a": {"b": [1]}}, "2026-07-28", "=?base64?4pyT?=", "file:///project/../x"]
FIELD_VALUES = [
    "", " ", "0", "-1", "18446744073709551616", "1, 1", "chunked", "gzip, chunked", "close", "keep-alive", "*/*;q=0",
    "application/json;q=0.5, */*", "text/html", "application/json; charset=latin-1", "null", "http://evil.example",
    "http://localhost:1", "Bearer a", "bearer  b=", "Basic x", "100-continue", "é", "=?base64?!?=", "x" * 9000, "a\tb",
    "tools/list", "get_weather", "2025-11-25", "evil.example", "[::1]:80", "a b"]
FIELD_NAMES = [
    "Host", "Content-Length", "Transfer-Encoding", "Connection", "Accept", "Content-Type", "Origin", "Authorization",
    "Expect", "Mcp-Method", "Mcp-Name", "MCP-Protocol-Version", "Mcp-Param-Region", "X-Other", "Cookie", "Trailer"]
SHREDS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\xff", b"\xe2\x80", b"0\r\n\r\n", b"5\r\nhello\r\n",
    b"ffffffffffffffff\r\n", b";ext=1\r\n", b"{", b"[" * 200, b'"', b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HTTP/1.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"Transfer-Encoding: chunked\r\n"]
NEW_MEMBERS = ["id", "result", "x", "requestState", "inputResponses", "progressToken"]
COLONS = [b" :", b"::", b"", b":\t "]


# ---------------------------------------------------------------------------------------------- mutations


def make_input(number: int) -> Input:
    """Input `number`: one to four requests, some or all mutated, joined and cut."""
    chance = random.Random(number)
    made = [make_request(chance) for _ in range(chance.choice((1, 1, 1, 2, 3, 4)))]
    stream = b"".join(request for request, _ in made)
    # a client that hangs up gets no answer to a call that waits, nor to what follows it
    at_once = itertools.takewhile(lambda one: one[1] and not re.search(rb"build_report|listen", one[0]), made)
    # where the framing is the mutation, a blank line may begin another request, and the rest may be one that is cut
    most = len(made) if all(intact for _, intact in made) else stream.count(b"\r\n\r\n") + stream.count(b"\n\n") + 1
    return Input(list(cut(chance, stream)), len(list(at_once)), most, chance.random() < 0.004)


def make_request(chance: random.Random) -> tuple[bytes, bool]:
    """One request, and whether its framing is as good as before."""
    body, fields = chance.choice(CORPUS)
    kind = chance.choice(("none", "json", "json", "fields", "fields", "octets", "octets", "other"))
    if kind == "json":
        mutated = mutate_json(chance, json.loads(json.dumps(body)))
        text = json.dumps(mutated, ensure_ascii=chance.random() < 0.7).encode("utf-8", "surrogatepass")
        lines = octets(body, **fields).partition(b"\r\n\r\n")[0]  # the mirrored headers of the message as it was
        return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(text), lines) + b"\r\n\r\n" + text, True
    if kind == "other":
        return make_other(chance, body), False
    request = octets(body, **fields)
    if kind == "fields":
        return mutate_fields(chance, request), False
    if kind == "octets":
        return mutate_octets(chance, request), False
    return request, True


def mutate_json(chance: random.Random, value: Any) -> Any:
    """The value with one to three of its members replaced, removed, added or renamed."""
    for _ in range(chance.randint(1, 3)):
        holder = value
        while isinstance(holder, dict) and holder:
            name = chance.choice(list(holder))
            if isinstance(holder[name], dict) and chance.random() < 0.7:
                holder = holder[name]
                continue
            change = chance.randrange(4)
            if change == 0:
                del holder[name]
            elif change == 1:
                holder[chance.choice(NEW_MEMBERS)] = odd_value(chance)
            else:
                holder[name] = odd_value(chance)
            break
    return value if chance.random() < 0.95 else chance.choice([[value], [value, value], *VALUES])


def odd_value(chance: random.Random) -> Any:
    """One of VALUES, copied, because the next mutation may change what is inside."""
    return copy.deepcopy(chance.choice(VALUES))


def mutate_fields(chance: random.Random, request: bytes) -> bytes:
    """The request with one to three of its field lines removed, repeated, changed, bent or joined by new ones."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(1, len(lines)) if len(lines) > 1 else 0
        new = f"{chance.choice(FIELD_NAMES)}: {chance.choice(FIELD_VALUES)}".encode()
        change = chance.randrange(7)
        if change == 0 and place:
            del lines[place]
        elif change == 1:
            lines.insert(place + 1, lines[place])
        elif change == 2:
            lines[place] = lines[place].partition(b":")[0] + b": " + chance.choice(FIELD_VALUES).encode()
        elif change == 3:
            lines[place] = chance.choice((b" ", b"\t", b"")) + lines[place].replace(b":", chance.choice(COLONS), 1)
        elif change == 4:
            lines[place] = lines[place].swapcase()
        elif change == 5:
            lines[place + 1 : place + 1] = [new] * chance.choice((1, 1, 2, 70))
        else:
            lines.insert(place + 1, new)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def mutate_octets(chance: random.Random, request: bytes) -> bytes:
    """The request with one to four places changed, whatever stands there."""
    data = bytearray(request)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((1, 1, 2, 8, 60)))
        change = chance.randrange(5)
        if change == 0:
            del data[start:end]
        elif change == 1:
            data[start:start] = chance.choice(SHREDS)
        elif change == 2:
            data[start:end] = chance.randbytes(end - start)
        elif change == 3:
            data[start:start] = data[start:end]
        elif chance.random() < 0.3:
            del data[start:]
    return bytes(data)


def make_other(chance: random.Random, body: Any) -> bytes:
    """Chunks, expectations, other verbs and paths; sometimes with mutated octets."""
    text = json.dumps(body).encode()
    middle = chance.randrange(len(text))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (text[:middle], text[middle:]) if part)
    plain = octets(body)
    chunked = octets(body, length=False, Transfer_Encoding="chunked").partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + chunks
    shapes = [
        chunked + b"0\r\n\r\n", chunked + b"0\r\nA: b\r\n\r\n",
        octets(body, Expect="100-continue"), octets(body, version="HTTP/1.0"), octets(body, path="/other?x=1"),
        octets(body, path="http://127.0.0.1/mcp"), octets(b"", verb="GET", path="/healthz"), octets(b"", verb="GET"),
        octets(b"", verb="OPTIONS", Origin="http://localhost:5173", Access_Control_Request_Headers="mcp-param-x"),
        octets(body, Connection="close"), plain.replace(b"/mcp", b"/" + b"a" * chance.choice((10, 9000))),
        b"\r\n" + plain,
    ]
    shape = chance.choice(shapes)
    return mutate_octets(chance, shape) if chance.random() < 0.4 else shape


def cut(chance: random.Random, stream: bytes) -> Iterator[bytes]:
    """The stream in pieces: whole, in a few, or (now and then) octet by octet."""
    way = chance.random()
    count = 0 if way < 0.5 else chance.randint(1, 6)
    places = sorted(chance.randrange(len(stream) + 1) for _ in range(count))
    start = 0
    for place in (*(places if way < 0.98 else range(len(stream))), len(stream)):
        if place > start:
            yield stream[start:place]
            start = place


# ------------------------------------------------------------------------------------------------- answers


def exchange(port: int, one: Input) -> bytes:
    """Everything that the server sends until it closes; ConnectionError when it resets, TimeoutError when it hangs."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        with contextlib.suppress(BrokenPipeError):  # it has closed already, and says why
            for piece in one.pieces:
                client.sendall(piece)
            if not one.patient:
                client.shutdown(socket.SHUT_WR)
        received, end = bytearray(), time.monotonic() + PATIENCE / 4
        while (data := client.recv(65536)) and (time.monotonic() < end or b"text/event-stream" not in received):
            received += data  # a subscription goes on until its client hangs up
    return bytes(received)


def find_fault(port: int, one: Input) -> str | None:
    """What is wrong with the server's answers to this input."""
    try:
        received = exchange(port, one)
    except TimeoutError:
        return "neither an answer nor a close in time"
    except ConnectionError as problem:
        return f"no clean close: {problem}"
    try:
        answers = list(parse_answers(received, bodiless=any(b"HEAD" in piece for piece in one.pieces)))
    except ValueError as problem:
        return f"{problem} in {received[:200]!r}"
    if len(answers) > one.most or (len(answers) < one.least and b"\r\nConnection: close\r\n" not in received):
        return f"{len(answers)} answers, not {one.least} to {one.most}: {answers}"
    return None


STATUS_LINE = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [A-Za-z' -]+\r\n")
FIELD_LINES = re.compile(rb"((?:[A-Za-z-]+: [ -~]*\r\n)*)\r\n")


def parse_answers(stream: bytes, bodiless: bool) -> Iterator[int]:
    """The status of each final answer; ValueError for one that is not well-formed. `bodiless`: there may be a HEAD."""
    place = 0
    while place < len(stream):
        start = STATUS_LINE.match(stream, place)
        fields = FIELD_LINES.match(stream, start.end()) if start else None
        if not start or not fields:
            raise ValueError(f"no head of an answer at octet {place}")
        status, place = int(start[1]), fields.end()
        if status == 100:
            continue
        if status not in STATUSES:
            raise ValueError(f"status {status}")
        yield status
        if bodiless and stream.startswith(b"HTTP/1.1 ", place):
            continue
        place = parse_body(stream, place, status, dict(re.findall(r"([a-z-]+): (.*)\r\n", fields[1].decode().lower())))
        if bodiless and place > len(stream):
            return


def parse_body(stream: bytes, place: int, status: int, fields: dict[str, str]) -> int:
    """Where the answer ends; ValueError for a body that is not what its head says."""
    if fields.get("content-type") == "text/event-stream":
        return parse_stream(stream, place, "transfer-encoding" in fields)
    if status == 204:
        return place
    end = place + int(fields.get("content-length", -1))
    if end < place:
        raise ValueError("an answer of unknown length")
    if end > len(stream):
        raise ValueError("an answer is cut")
    if fields.get("content-type") == "application/json":
        check_message(stream[place:end], refused=status >= 400)
    return end


CHUNK_SIZE = re.compile(rb"([0-9a-f]+)\r\n")


def parse_stream(stream: bytes, place: int, chunked: bool) -> int:
    """Where a stream ends: at its last chunk, or, because its client hung up, with the connection."""
    if not chunked:
        check_events(stream[place:])
        return len(stream)
    events = b""
    while place < len(stream):
        if not (line := CHUNK_SIZE.match(stream, place)):
            raise ValueError(f"no chunk at octet {place}")
        size, place = int(line[1], 16), line.end()
        events += stream[place : place + size]
        if stream[place + size : place + size + 2] not in (b"\r\n", b""):
            raise ValueError(f"no end of a chunk at octet {place + size}")
        place += size + 2
        if not size:
            break
    check_events(events)
    return min(place, len(stream))


def check_events(events: bytes) -> None:
    """ValueError unless each whole event is a message or a comment."""
    for event in events.split(b"\n\n")[:-1]:
        if event != b":":
            check_message(event.removeprefix(b"data: "))


def check_message(text: bytes, refused: bool = False) -> None:
    """ValueError for what is no JSON-RPC message, nor (if HTTP refused the request) an error's text."""
    value = json.loads(text, parse_constant=lambda name: json.loads("-"))
    if not isinstance(value, dict) or not value.keys() & {"method", "result", "error"}:
        raise ValueError(f"no JSON-RPC message: {text[:100]!r}")
    if value.get("jsonrpc") != "2.0" and not (refused and "message" in value["error"]):
        raise ValueError(f"no JSON-RPC version: {text[:100]!r}")


# ------------------------------------------------------------------------------------------------- the run


def canary_lives(port: int) -> bool:
    """Whether a plain request is answered as ever."""
    try:
        received = exchange(port, Input([CANARY], 1, 1, True))
    except OSError:
        return False
    return received.startswith(b"HTTP/1.1 200 ") and b'"result"' in received


def read_kept() -> list[Input]:
    """The inputs that have failed once."""
    entries = json.loads(KEPT.read_text()) if KEPT.exists() else []
    return [Input([piece.encode("latin-1") for piece in one["pieces"]], one["least"], one["most"], one["patient"])
            for one in entries]


def keep(number: int, one: Input, fault: str) -> None:
    """Adds an input that has failed."""
    entries = json.loads(KEPT.read_text()) if KEPT.exists() else []
    pieces = [piece.decode("latin-1") for piece in one.pieces]
    entries.append({"number": number, "fault": fault[:300]} | one._asdict() | {"pieces": pieces})
    KEPT.write_text(json.dumps(entries, indent=1) + "\n")


class Run:
    """One server and what has gone wrong with it."""

    def __init__(self, port: int, lines: list[str], pool: ThreadPoolExecutor) -> None:
        self.port, self.lines, self.pool = port, lines, pool
        self.faults: dict[int, str] = {}

    def batch(self, numbers: Iterable[int]) -> None:
        """Sends a batch, several connections at a time, then looks whether the server is as before."""
        numbers = list(numbers)
        for number, fault in zip(numbers, self.pool.map(self.fault_of, numbers), strict=True):
            if fault:
                self.note(number, fault)
        if problem := self.trouble():
            print(f"inputs {numbers[0]} to {numbers[-1]}: {problem}; sending them again one by one", flush=True)
            for number in numbers:
                self.fault_of(number)
                if problem := self.trouble():
                    self.note(number, problem)

    def fault_of(self, number: int) -> str | None:
        """What is wrong with the answers to one input."""
        return find_fault(self.port, make_input(number))

    def trouble(self) -> str | None:
        """What the log or the canary says."""
        logged = "\n".join(self.lines)
        self.lines.clear()
        if "Traceback" in logged:
            return "a traceback: " + logged[logged.index("Traceback"):][-2000:]
        return None if canary_lives(self.port) else "the canary is dead"

    def note(self, number: int, fault: str) -> None:
        """Prints and keeps a fault."""
        print(f"input {number}: {fault}", flush=True)
        self.faults[number] = fault
        if len(self.faults) <= 20:
            keep(number, make_input(number), fault)


def main() -> int:
    """The exit status: 0 when all inputs were clean."""
    import fuzz_starts
    from processes import process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000, help="how many (default: 200000)")
    parser.add_argument("--starts", type=int, default=400, help="how many starts of servers (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--connections", type=int, default=8, help="side by side (default: 8)")
    options = parser.parse_args()
    began, last = time.monotonic(), options.seed + options.inputs
    program = str(HERE.parents[1] / "reference_server.py")
    with process(program, *LIMITS) as server, ThreadPoolExecutor(options.connections) as pool:
        run = Run(server.port, server.lines, pool)
        for start in range(options.seed, last, BATCH):
            run.batch(range(start, min(start + BATCH, last)))
            if (start - options.seed) % (100 * BATCH) == 0 and start > options.seed:
                seconds = time.monotonic() - began
                print(f"{start - options.seed} inputs, {seconds:.0f} s, {len(run.faults)} faults", flush=True)
        status = server.stop()
    seconds = time.monotonic() - began
    print(f"{options.inputs} inputs from {options.seed} on in {seconds:.0f} s: {len(run.faults)} faults;"
          f" the server ended with status {status}", flush=True)
    starts = fuzz_starts.run(range(options.seed, options.seed + options.starts))
    return 1 if run.faults or status or starts else 0


if __name__ == "__main__":
    sys.exit(main())

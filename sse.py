"""Server-Sent Events: JSON messages to stream bytes, and stream bytes back to events.

Contract
    Bytes and values in, values and bytes out: no sockets, no clocks, no threads, only the standard library.
    The writer produces what this revision of MCP needs and no more: one `data:` line of JSON for each message,
    a comment to keep a quiet stream open, and the chunks that carry both over HTTP/1.1.
    The parser takes what any server may send. It is incremental: however a stream is cut into chunks, the same
    events come out, each of them as soon as the first octet that ends its blank line has been fed.

Words
    A *stream* is a sequence of events. An *event* is a block of lines and ends with a blank line. A line is a
    *field* (`data: …`), or a *comment* if it begins with a colon. A *chunk* is HTTP's unit of transfer; it may
    begin and end anywhere, even inside a character.

Rules: the WHATWG HTML Standard, chapter 9.2, for the stream ("whatwg"); RFC 9112 for the chunks.
"""

import json
import math
import re
from typing import Any, NamedTuple

# ---------------------------------------------------------------------------------------------- the writer

# spec: Streamable HTTP › Receiving Messages: clients must ignore a line that begins with a colon
# choice: a blank line after it, because some readers hold back what they have until one comes
KEEP_ALIVE = b":\n\n"

# rfc9112 §7.1: a chunk of size zero and an empty trailer section end the body
LAST_CHUNK = b"0\r\n\r\n"

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(message: Any) -> bytes:
    """One line of strict JSON in UTF-8. ValueError for what JSON cannot say (NaN, Infinity, a cycle)."""
    # A lone surrogate has no UTF-8. It can only stand inside a JSON string, where the escape that
    # `backslashreplace` writes for it, \ud800, is JSON's own.
    return _JSON.encode(message).encode("utf-8", "backslashreplace")


def frame_event(text: bytes) -> bytes:
    """The event that carries one line of JSON: a single `data:` line, since JSON escapes every CR and LF."""
    return b"data: " + text + b"\n\n"


def encode_event(message: Any) -> bytes:
    """The event that carries one message."""
    return frame_event(encode_json(message))


def encode_chunk(data: bytes) -> bytes:
    """One HTTP chunk; nothing at all for no data, because a chunk of size zero would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


# rfc9112 §7.1: chunk      = chunk-size [ chunk-ext ] CRLF chunk-data CRLF
#               chunk-size = 1*HEXDIG
#               chunk-ext  = *( BWS ";" BWS chunk-ext-name [ BWS "=" BWS chunk-ext-val ] )
# choice: at most 16 digits, because no body has more octets than 64 bits can count; of an extension only
# that it has no control characters, because rfc9112 §7.1.1 lets a recipient ignore all of them
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


def parse_chunk_size(line: bytes) -> int:
    """The size that a chunk's first line (without its CRLF) announces. ValueError when it is none."""
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise ValueError("a chunk must begin with its size in hexadecimal digits")
    return int(match[1], 16)


# ------------------------------------------------------------------------------- requests: bodies, lines, strict JSON


class TooLarge(ValueError):
    """A body that outgrows its limit."""


class BodyDecoder:
    """Takes one request's body from the front of a growing buffer: `length` octets, or chunks if it is negative."""

    def __init__(self, length: int, limit: int) -> None:
        self._length, self._limit = length, limit
        self._body = bytearray()
        self._chunk: int | None = None  # the size of the chunk being read; None: a line comes next
        self._trailers = -1  # trailer fields seen; negative before the last chunk

    def take(self, received: bytearray) -> bytes | None:
        """The whole body, removed from the buffer, once it has come. ValueError for broken chunks, TooLarge."""
        if self._length < 0:
            return self._take_chunks(received)
        if self._length > self._limit:
            raise TooLarge(f"A message may have at most {self._limit} octets")
        if len(received) < self._length:
            return None
        body = bytes(received[: self._length])
        del received[: self._length]
        return body

    def _take_chunks(self, received: bytearray) -> bytes | None:
        while True:
            if (size := self._chunk) is None:
                if (line := _take_line(received)) is None:
                    return None
                if self._trailers >= 0:
                    self._trailers += 1  # choice: at most 64, and their content is dropped, as rfc9112 §7.1.2 allows
                    if not line or self._trailers > 64:
                        return bytes(self._body)
                elif size := parse_chunk_size(line):
                    self._chunk = size
                    if len(self._body) + size > self._limit:
                        raise TooLarge(f"A message may have at most {self._limit} octets")
                else:
                    self._trailers = 0
            elif len(received) < size + 2:
                return None
            elif received[size : size + 2] != b"\r\n":
                raise ValueError("a chunk is longer than its size says")
            else:
                self._body += received[:size]
                del received[: size + 2]
                self._chunk = None


def _take_line(received: bytearray) -> bytes | None:
    if (end := received.find(b"\r\n")) < 0:
        if len(received) > 8192 or b"\n" in received:
            raise ValueError("a line of the chunked body is too long, or does not end in CRLF")
        return None
    line = bytes(received[:end])
    del received[: end + 2]
    return line


class LineSplitter:
    """stdio's messages, one a line: LF or CRLF ends it, blank lines are dropped, a line over the limit gives None."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that these octets complete. At the end of input, feed one more LF."""
        lines: list[bytes | None] = []
        *endings, rest = data.split(b"\n")
        for ending in endings:
            self._grow(ending)
            line = self._line.strip(b" \t\r")
            if line:
                lines.append(bytes(line) if len(self._line) <= self._limit else None)
            self._line = bytearray()
        self._grow(rest)
        return lines

    def _grow(self, piece: bytes) -> None:
        self._line += piece[: self._limit + 1 - len(self._line)]


def decode_json(data: bytes) -> Any:
    """The value of one JSON text, read strictly. ValueError for anything that two readers could read differently."""
    # rfc8259 §8.1: between systems JSON is UTF-8; json.loads would also take UTF-16, NaN and repeated names.
    try:
        value = _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)
                     if isinstance(one, dict | list)]
        if level:
            raise ValueError("it is nested too deeply")
    return value


# choice: because what the parser can still read may be too deep for whatever walks the value later
MAX_DEPTH = 100


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) != len(members):
        raise ValueError("a member name is repeated")
    return value


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("a number is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)

# ---------------------------------------------------------------------------------------------- the parser


class Event(NamedTuple):
    """One event: its type ("message" unless the stream says otherwise), its data, the last event ID."""

    event: str
    data: str
    id: str


class EventTooLarge(ValueError):
    """An event that outgrows the parser's limit. `events`: those that the same chunk had completed before."""

    def __init__(self, limit: int, events: list[Event]) -> None:
        super().__init__(f"an event of the stream is larger than {limit} octets")
        self.events = events


# whatwg §9.2.5: stream      = [ bom ] *event
#                event       = *( comment / field ) end-of-line
#                comment     = colon *any-char end-of-line
#                field       = 1*name-char [ colon [ space ] *any-char ] end-of-line
#                end-of-line = ( cr lf / cr / lf )
#                any-char    = any character but CR and LF: U+0085 and U+2028 end no line
_BOM = b"\xef\xbb\xbf"

# whatwg §9.2.6: `retry` counts if its value consists of ASCII digits only
# choice: 15 of them at most, because thirty thousand years are enough and int() refuses thousands of digits
_MILLISECONDS = re.compile(rb"[0-9]{1,15}")


class EventParser:
    """Feed it a stream's chunks as they come; it gives back the events that each of them completes.

    There is nothing to call at the end of the stream: an event whose blank line never came is discarded, as
    whatwg §9.2.6 has it. `max_event` bounds, in octets, what one event makes the parser hold: its data so far
    and the line being read. After EventTooLarge the stream cannot be read any further.
    """

    last_event_id: str
    retry: int | None  # milliseconds to wait before reconnecting, if the stream has said so

    def __init__(self, max_event: int = 1 << 20) -> None:
        self.last_event_id = ""
        self.retry = None
        self._max_event = max_event
        self._line = bytearray()  # the line being read; it grows in place, so a long one costs linear time
        self._after_cr = False  # the last octet was a CR: a LF that comes next belongs to it
        self._first_line = True
        self._event = ""
        self._data: list[str] = []  # the event's data lines so far
        self._size = 0  # their octets, a line end counted for each
        self._id = ""  # becomes the last event ID at the next blank line

    def feed(self, data: bytes) -> list[Event]:
        """The events that this chunk completes. EventTooLarge when one outgrows the limit."""
        if not data:
            return []
        events: list[Event] = []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        *endings, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for ending in endings:
            line = self._grow_line(ending, events)
            self._line = bytearray()
            event = self._take_line(line)
            if event is not None:
                events.append(event)
        self._grow_line(rest, events)
        return events

    def _grow_line(self, piece: bytes, events: list[Event]) -> bytearray:
        self._line += piece
        if self._size + len(self._line) > self._max_event:
            raise EventTooLarge(self._max_event, events)
        return self._line

    def _take_line(self, line: bytearray) -> Event | None:
        # whatwg §9.2.5: decoding the stream as UTF-8 strips one byte order mark. All that follows looks at
        # whole lines, so no character is ever seen in halves.
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        # whatwg §9.2.6: the name ends at the first colon, and one space after the colon is not the value's.
        # A line without a colon is a name with an empty value; a comment is a field whose name is empty.
        name, _, value = line.partition(b":")
        self._take_field(bytes(name), bytes(value.removeprefix(b" ")))
        return None

    def _take_field(self, name: bytes, value: bytes) -> None:
        # whatwg §9.2.6: names are compared as they are, case and spaces included; unknown ones are ignored.
        if name == b"data":
            self._data.append(_decode(value))
            self._size += len(value) + 1
        elif name == b"event":
            self._event = _decode(value)
        elif name == b"id" and b"\0" not in value:
            self._id = _decode(value)
        elif name == b"retry" and _MILLISECONDS.fullmatch(value):
            self.retry = int(value)

    def _dispatch(self) -> Event | None:
        # whatwg §9.2.6: the ID counts from the blank line on, also for a block without data, which is no event.
        self.last_event_id = self._id
        event = None
        if self._data:
            event = Event(self._event or "message", "\n".join(self._data), self.last_event_id)
        self._event, self._data, self._size = "", [], 0
        return event


def _decode(value: bytes) -> str:
    # whatwg §9.2.5: octets that are no UTF-8 become U+FFFD, never an error.
    return value.decode("utf-8", "replace")

"""Messages to octets and back: strict JSON, Server-Sent Events, HTTP's chunks, stdio's lines.

Contract: octets and values in, values and octets out. No sockets, no clocks, no threads, only the standard library.
What reads is incremental (however the octets are cut, the same values come out, each as soon as it is complete) and
bounded (no peer makes it hold more than its limit).

A *stream* is a sequence of events. An *event* is a block of lines and ends with a blank line. A line is a *field*
(`data: …`), or a *comment* if it begins with a colon. A *chunk* is HTTP's unit of transfer and may begin and end
anywhere, even inside a character. Rules: the WHATWG HTML Standard, chapter 9.2 ("whatwg"); RFC 9112 for the chunks.
"""

import json
import math
import re
from typing import Any, NamedTuple

# ------------------------------------------------------------------------------------------------------ writing

# spec: Streamable HTTP › Receiving Messages: clients must ignore a line that begins with a colon
# choice: a blank line after it, because some readers hold back what they have until one comes
KEEP_ALIVE = b":\n\n"
# rfc9112 §7.1: a chunk of size zero and an empty trailer section end the body
LAST_CHUNK = b"0\r\n\r\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
# What JSONEncoder.encode makes anew for each message; without markers, so that a cycle ends as a RecursionError
_MAKE: Any = getattr(json.encoder, "c_make_encoder", None)
_pieces: Any = _ENCODER.iterencode if _MAKE is None else _MAKE(
    None, _ENCODER.default, json.encoder.encode_basestring, _ENCODER.indent, _ENCODER.key_separator,
    _ENCODER.item_separator, _ENCODER.sort_keys, _ENCODER.skipkeys, _ENCODER.allow_nan)


def encode_json(message: Any) -> bytes:
    """One line of strict JSON in UTF-8. ValueError for what JSON cannot say (NaN, Infinity, a cycle)."""
    try:
        # A lone surrogate has no UTF-8; what `backslashreplace` writes for it, \ud800, is JSON's own escape.
        return "".join(_pieces(message, 0)).encode("utf-8", "backslashreplace")
    except RecursionError:
        raise ValueError("it is nested too deeply, or contains itself") from None


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value: 1 is 1.0, and members have no order; true is not 1."""
    if type(value) is str:
        return f'"{value}'
    same = json.loads(json.dumps(value), parse_float=lambda text: int(number) if (
        number := float(text)).is_integer() else number)
    return json.dumps(same, sort_keys=True)


def frame_event(text: bytes) -> bytes:
    """The event that carries one line of JSON: a single `data:` line, since JSON escapes every CR and LF."""
    return b"data: " + text + b"\n\n"


def encode_event(message: Any) -> bytes:
    """The event that carries one message."""
    return frame_event(encode_json(message))


def encode_chunk(data: bytes) -> bytes:
    """One HTTP chunk; nothing at all for no data, because a chunk of size zero would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def without_chunk_sizes(octets: bytes) -> str:
    """What was sent, as a person wants to see it."""
    return re.sub(r"(?m)^[0-9a-f]+\r\n", "", octets.decode("utf-8", "replace"))


class ResponseWriter:
    """Says which octets come next on one HTTP answer: a whole one, or a stream's pieces and its end, never both.

    `common`: the field lines that every head has, each with its CRLF. HTTP/1.0 knows no chunks: there a stream ends
    with the connection. `streaming`: the answer has become a stream.
    """

    streaming = False

    def __init__(self, version: str) -> None:
        self.chunked = version != "HTTP/1.0"

    def answer(self, status: str, common: str, body: bytes, bodiless: bool = False) -> bytes:
        """A whole answer. `status`: code and phrase; `bodiless`: the body is only counted (rfc9110 §9.3.2, HEAD)."""
        # rfc9110 §8.6: MUST NOT send Content-Length in a 204
        length = "" if status.startswith("204") else f"Content-Length: {len(body)}\r\n"
        return f"HTTP/1.1 {status}\r\n{common}{length}\r\n".encode("latin-1") + (b"" if bodiless else body)

    def first_piece(self, common: str, octets: bytes) -> bytes:
        """The head of a stream, and the events or the comment that turn the answer into one."""
        self.streaming = True
        # spec: Streamable HTTP › Receiving Messages: SHOULD include X-Accel-Buffering: no
        fields = "Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
        fields += "Transfer-Encoding: chunked\r\n" if self.chunked else ""
        return f"HTTP/1.1 200 OK\r\n{common}{fields}\r\n".encode("latin-1") + self.piece(octets)

    def piece(self, octets: bytes, last: bool = False) -> bytes:
        """Further events or a comment; `last`: and the end of the stream."""
        return encode_chunk(octets) + (LAST_CHUNK if last else b"") if self.chunked else octets


# ------------------------------------------------------------------------------------- reading JSON, bodies, lines

MAX_DEPTH = 100  # choice: because what the parser can still read may be too deep for whatever walks the value later


def decode_json(data: bytes) -> Any:
    """The value of one JSON text. ValueError for anything that two readers could read differently."""
    # rfc8259 §8.1: between systems JSON is UTF-8. By itself json.loads takes UTF-16, NaN and repeated names too.
    text = data.decode("utf-8").strip(" \t\n\r")
    try:
        value, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if end < len(text):
        raise ValueError("more text follows the value")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        level = [value]
        for _ in range(MAX_DEPTH):
            inside = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
            level = [one for one in inside if isinstance(one, (dict, list))]
        if level:
            raise ValueError("it is nested too deeply")
    return value


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(members)) != len(members):
        raise ValueError("a member name is repeated")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):  # Infinity and NaN come here too
        raise ValueError("a number is too large, or none")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


class TooLarge(ValueError):
    """A body that outgrows its limit."""


# rfc9112 §7.1: chunk      = chunk-size [ chunk-ext ] CRLF chunk-data CRLF
#               chunk-size = 1*HEXDIG
#               chunk-ext  = *( BWS ";" BWS chunk-ext-name [ BWS "=" BWS chunk-ext-val ] )
# choice: at most 16 digits, and an extension without control characters, because §7.1.1 lets a recipient ignore it
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


def parse_chunk_size(line: bytes | bytearray) -> int:
    """The size that a chunk's first line (without its CRLF) announces. ValueError when it is none."""
    if (match := _CHUNK_SIZE.fullmatch(line)) is None:
        raise ValueError("a chunk must begin with its size in hexadecimal digits")
    return int(match[1], 16)


class ChunkDecoder:
    """Takes one chunked body from the front of a growing buffer. `limit`: octets of the decoded body."""

    def __init__(self, limit: int) -> None:
        self._limit, self._body = limit, bytearray()
        self._trailers: int | None = None  # trailer fields seen, once the last chunk has come

    def take(self, received: bytearray) -> bytes | None:
        """The whole body, removed from the buffer, once it has come. ValueError for broken chunks, TooLarge."""
        while (end := received.find(b"\r\n")) >= 0:
            size = parse_chunk_size(received[:end]) if self._trailers is None else 0
            start, stop = end + 2, end + 2 + size
            if len(self._body) + size > self._limit:
                raise TooLarge(f"A message may have at most {self._limit} octets")
            if size and len(received) < stop + 2:
                return None
            if size and received[stop : stop + 2] != b"\r\n":
                raise ValueError("a chunk is longer than its size says")
            self._body += received[start:stop]
            del received[: stop + 2 if size else start]
            if self._trailers is not None and end == 0:
                return bytes(self._body)
            if not size:  # choice: trailer fields are dropped, as rfc9112 §7.1.2 allows
                self._trailers = 0 if self._trailers is None else self._trailers + 1
                if self._trailers > 64:
                    raise ValueError("the chunked body has too many trailer fields")
        if len(received) > 8192 or b"\n" in received:
            raise ValueError("a line of the chunked body is too long, or does not end in CRLF")
        return None


class LineSplitter:
    """Splits stdio's octets into lines: LF or CRLF ends one, blank ones are dropped, one over the limit gives None."""

    def __init__(self, limit: int) -> None:
        self._limit, self._line = limit, bytearray()

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that these octets complete; at the end of input, feed one more LF."""
        lines: list[bytes | None] = []
        *endings, rest = data.split(b"\n")
        for ending in endings:
            if self._line:  # its beginning has come before
                self._grow(ending)
                ending, self._line = bytes(self._line), bytearray()
            if line := ending.strip(b" \t\r"):
                lines.append(line if len(ending) <= self._limit else None)
        self._grow(rest)
        return lines

    def _grow(self, piece: bytes) -> None:
        self._line += piece[: self._limit + 1 - len(self._line)]


# ------------------------------------------------------------------------------------------------ reading events


class Event(NamedTuple):
    """One event: its type ("message" unless the stream says otherwise), its data, the last event ID."""

    event: str
    data: str
    id: str


class EventTooLarge(ValueError):
    """An event that outgrows the parser's limit. `events`: those that the same piece had completed before."""

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
_MILLISECONDS = re.compile(rb"[0-9]{1,15}")  # whatwg §9.2.6: ASCII digits only; choice: 15, or thirty thousand years


class EventParser:
    """Feed it a stream piece by piece. An event without its blank line at the end is discarded (whatwg §9.2.6).

    `max_event` bounds one event's data and line, in octets; after EventTooLarge the stream cannot be read further.
    """

    def __init__(self, max_event: int = 1 << 20) -> None:
        self.last_event_id = self._id = self._event = ""  # an ID counts from the next blank line on
        self.retry: int | None = None  # milliseconds to wait before reconnecting, if the stream has said so
        self._max_event, self._first_line = max_event, True
        self._line = bytearray()  # the line being read; it grows in place, so a long one costs linear time
        self._after_cr = False  # the last octet was a CR: a LF that comes next belongs to it
        self._data: list[str] = []  # the event's data lines so far
        self._size = 0  # their octets, a line end counted for each

    def feed(self, data: bytes) -> list[Event]:
        """The events that this piece completes. EventTooLarge when one outgrows the limit."""
        events: list[Event] = []
        if not data:
            return events
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        *endings, rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for ending in endings:
            self._grow(ending, events)
            line, self._line = self._line, bytearray()
            events += self._take_line(line)
        self._grow(rest, events)
        return events

    def _grow(self, piece: bytes, events: list[Event]) -> None:
        self._line += piece
        if self._size + len(self._line) > self._max_event:
            raise EventTooLarge(self._max_event, events)

    def _take_line(self, line: bytearray) -> list[Event]:
        if self._first_line:  # whatwg §9.2.5: decoding the stream strips one byte order mark
            self._first_line, line = False, line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        # whatwg §9.2.6: the name ends at the first colon; one space after it is not the value's. Unknown names are
        # ignored. A line without a colon has an empty value; a comment is a field without a name.
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(_decode(value))
            self._size += len(value) + 1
        elif name == b"event":
            self._event = _decode(value)
        elif name == b"id" and b"\0" not in value:
            self._id = _decode(value)
        elif name == b"retry" and _MILLISECONDS.fullmatch(value):
            self.retry = int(value)
        return []

    def _dispatch(self) -> list[Event]:
        # whatwg §9.2.6: a block without data is no event, but its ID counts.
        self.last_event_id = self._id
        events = [Event(self._event or "message", "\n".join(self._data), self._id)] if self._data else []
        self._event, self._data, self._size = "", [], 0
        return events


def _decode(value: bytes | bytearray) -> str:
    return value.decode("utf-8", "replace")  # whatwg §9.2.5: octets that are no UTF-8 become U+FFFD, never an error

"""Server-Sent Events: every stream is read whole, octet by octet, cut at every point, and with trailing data."""

import json
import math
import random
from typing import Any

import pytest

from sse import (
    KEEP_ALIVE,
    LAST_CHUNK,
    Event,
    EventParser,
    EventTooLarge,
    ResponseWriter,
    encode_chunk,
    encode_event,
    encode_json,
    parse_chunk_size,
    without_chunk_sizes,
)

TRAILING = b"\ndata: trailing\n\n"  # the first LF ends what the stream left open, or is a blank line of no meaning


def read(*chunks: bytes, parser: EventParser | None = None) -> list[Event]:
    parser = parser or EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def octets(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def read_every_way(stream: bytes) -> list[Event]:
    """The events of a stream, after making sure that they do not depend on how it was cut."""
    events = read(stream)
    assert read(*octets(stream)) == events, "octet by octet"
    for cut in range(len(stream) + 1):
        assert read(stream[:cut], b"", stream[cut:]) == events, f"cut at {cut}"
    return events


def message(data: str, event: str = "message", id: str = "") -> Event:
    return Event(event, data, id)


STREAMS: dict[str, tuple[bytes, list[Event]]] = {
    # the cases that other parsers got wrong
    "B131 separators that are no line ends": (
        b'data: {"t":"a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d\x0be\x0cf\x1cg"}\n\n',
        [message('{"t":"a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"}')],
    ),
    "B133 every line end": (
        b"data: a\r\n\r\ndata: b\r\rdata: c\n\ndata: d\r\n\n",
        [message("a"), message("b"), message("c"), message("d")],
    ),
    "B135 a character in two chunks": (b"data: \xf0\x9f\x98\x80\n\n", [message("😀")]),
    "B137 a CR that ends the stream": (b"data: x\n\r", [message("x")]),
    "B139 colons and spaces": (
        b"data:a\n\ndata:  b \n\ndata\n\ndata: \n\n:c\n: d\nevent\ndata: e\n\n",
        [message("a"), message(" b "), message(""), message(""), message("e")],
    ),
    "B141 id with NUL, retry, unknown fields": (
        b"id: a\ndata: 1\n\nid: b\0c\ndata: 2\n\nretry: 50x\nfoo: bar\nData: no\n data: no\ndata : no\ndata: 3\n\n",
        [message("1", id="a"), message("2", id="a"), message("3", id="a")],
    ),
    "B143 byte order mark, comment, CRLF, two data lines": (
        b"\xef\xbb\xbf: hi\r\nevent: x\r\ndata: \xc3\xa9\r\ndata: \xf0\x9f\x98\x80\r\n\r\ndata: z\r\r",
        [message("é\n😀", event="x"), message("z")],
    ),
    # the rest of the rules
    "nothing": (b"", []),
    "an event whose blank line is missing": (b"data: a\n\ndata: b\n", [message("a")]),
    "a line that does not end": (b"data: a\n\ndata: b", [message("a")]),
    "blank lines only": (b"\n\r\n\r\r\n\n", []),
    "no data, no event": (b"event: x\nid: 7\n\ndata: a\n\n", [message("a", id="7")]),
    "the type holds for one event": (b"event: x\ndata: a\n\ndata: b\n\n", [message("a", event="x"), message("b")]),
    "the last type counts": (b"event: x\nevent: y\ndata: a\n\n", [message("a", event="y")]),
    "an empty type is message": (b"event: x\nevent:\ndata: a\n\n", [message("a")]),
    "an empty id resets": (b"id: 1\ndata: a\n\nid\ndata: b\n\n", [message("a", id="1"), message("b")]),
    "only the first colon divides": (b"data: a: b:c\n\n", [message("a: b:c")]),
    "a tab is no space": (b"data:\ta\n\n", [message("\ta")]),
    "data lines that are empty": (b"data:\ndata\ndata: \n\n", [message("\n\n")]),
    "comments between data lines": (b"data: a\n:\n: x\ndata: b\n\n", [message("a\nb")]),
    "a keep-alive before and after": (KEEP_ALIVE + b"data: a\n\n" + KEEP_ALIVE, [message("a")]),
    "a byte order mark at the start": (b"\xef\xbb\xbfdata: a\n\n", [message("a")]),
    "one byte order mark, not two": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\ndata: b\n\n", [message("b")]),
    "no byte order mark later": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [message("a")]),
    "a byte order mark inside data": (b"data: \xef\xbb\xbfa\n\n", [message("\ufeffa")]),
    "a byte order mark and a blank line": (b"\xef\xbb\xbf\ndata: a\n\n", [message("a")]),
    "half a byte order mark": (b"\xef\xbbdata: a\ndata: b\n\n", [message("b")]),
    "an octet that is no UTF-8": (b"data: a\xffb\n\n", [message("a\ufffdb")]),
    "a character cut by a line end": (b"data: \xf0\x9f\ndata: \x98\n\n", [message("\ufffd\n\ufffd")]),
    "an encoded surrogate": (b"data: \xed\xa0\x80\n\n", [message("\ufffd\ufffd\ufffd")]),
    "NUL in data": (b"data: a\0b\n\n", [message("a\0b")]),
    "CR LF CR": (b"data: a\r\n\rdata: b\n\r\n", [message("a"), message("b")]),
    "LF CR is two line ends": (b"data: a\n\rdata: b\n\n", [message("a"), message("b")]),
    "CR CR LF ends one event": (b"data: a\r\r\ndata: b\r\r\n", [message("a"), message("b")]),
}


@pytest.mark.parametrize(("stream", "expected"), STREAMS.values(), ids=STREAMS.keys())
def test_a_stream_gives_its_events_however_it_is_cut(stream: bytes, expected: list[Event]) -> None:
    """WHATWG HTML §9.2.5 and §9.2.6: lines, fields and dispatch; where chunks begin and end means nothing."""
    assert read_every_way(stream) == expected


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_what_comes_after_a_stream_does_not_change_its_events(stream: tuple[bytes, list[Event]]) -> None:
    """WHATWG HTML §9.2.6: an event is complete at its blank line, whatever follows."""
    events = read_every_way(stream[0] + TRAILING)
    assert events[: len(stream[1])] == stream[1]
    assert events[-1].data.endswith("trailing")


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
def test_an_event_is_dispatched_with_the_first_octet_that_ends_its_blank_line(end: bytes) -> None:
    """Choice: waiting for the LF that may follow a CR would hold back the last event of a stream."""
    parser = EventParser()
    assert parser.feed(b"data: x" + end) == []
    assert parser.feed(end[:1]) == [message("x")]
    assert parser.feed(end[1:] + b"data: y" + end + end) == [message("y")]


def test_an_empty_chunk_between_cr_and_lf_changes_nothing() -> None:
    """WHATWG HTML §9.2.5: CR LF is one line end, however long its LF is in coming."""
    assert read(b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n") == [message("a\nb")]


def test_the_last_event_id_counts_from_the_blank_line_on() -> None:
    """WHATWG HTML §9.2.6: the ID is set when the event is dispatched, with data or without."""
    parser = EventParser()
    parser.feed(b"id: 1\n")
    assert parser.last_event_id == ""
    parser.feed(b"\n")
    assert parser.last_event_id == "1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"3000", 3000),
        (b"0", 0),
        (b"007", 7),
        (b"", None),
        (b"-1", None),
        (b"+1", None),
        (b"1.5", None),
        (b"1_0", None),
        (b" 1", None),
        (b"50x", None),
        ("٣".encode(), None),
        ("²".encode(), None),
        (b"9" * 5000, None),
    ],
)
def test_retry_is_a_number_in_ascii_digits(value: bytes, expected: int | None) -> None:
    """WHATWG HTML §9.2.6: if the field value consists of only ASCII digits; otherwise ignore the field."""
    parser = EventParser()
    parser.feed(b"retry: " + value + b"\n")
    assert parser.retry == expected


# ------------------------------------------------------------------------------------------------- limits


def read_until_too_large(chunks: list[bytes], max_event: int) -> list[Event]:
    parser = EventParser(max_event)
    events: list[Event] = []
    with pytest.raises(EventTooLarge, match=f"larger than {max_event} octets") as caught:
        for chunk in chunks:
            events += parser.feed(chunk)
    return events + caught.value.events


@pytest.mark.parametrize(
    "too_large",
    [
        b"data: " + b"x" * 20 + b"\n\n",
        b"data: " + b"x" * 20,
        b": " + b"x" * 30 + b"\n",
        b"x" * 30,
        b"data: 12\n" * 10,
        b"data\n" * 30,
        b"event: 12345678901234567890\n",
    ],
)
def test_an_event_that_is_too_large_is_refused_however_it_is_cut(too_large: bytes) -> None:
    """Choice: one event may hold a bounded number of octets, also as many short lines or as an endless one."""
    stream = b"data: a\n\ndata: b\r\n\r\n" + too_large + b"\n\ndata: c\n\n"
    for cut in range(len(stream)):
        assert read_until_too_large([stream[:cut], stream[cut:]], 24) == [message("a"), message("b")]
    assert read_until_too_large(octets(stream), 24) == [message("a"), message("b")]


@pytest.mark.parametrize("stream", [b"data: 890123456789\n\n", b":\n" * 50 + b"data: 1\n\n", b"foo: bar\n" * 9])
def test_what_the_parser_does_not_hold_does_not_count(stream: bytes) -> None:
    """Choice: the limit is on memory, so comments without blank lines may keep a stream open for ever."""
    for cut in range(len(stream)):
        read(stream[:cut], stream[cut:], parser=EventParser(18))


def test_a_line_that_never_ends_is_refused_before_it_ends() -> None:
    """Choice: the limit is checked with every chunk, not when a line end comes at last."""
    assert read_until_too_large([b"data: a\n\n", *[b"x"] * 25], 24) == [message("a")]


def test_the_limit_is_for_each_event() -> None:
    """Choice: a stream may be endless, its events may not."""
    assert read(b"data: 890123456789\n\n" * 50, parser=EventParser(18)) == [message("890123456789")] * 50


def test_many_chunks_are_read_in_linear_time() -> None:
    """Choice: four megabytes in a line, or in lines, cost one pass; a parser that searches again takes minutes."""
    piece = b"x" * 100
    assert read(b"data: ", *[piece] * 40_000, b"\n\n", parser=EventParser(1 << 23)) == [message("x" * 4_000_000)]
    (event,) = read(*[b"data: " + piece + b"\n"] * 40_000, b"\n", parser=EventParser(1 << 23))
    assert len(event.data) == 101 * 40_000 - 1
    assert len(read(b"data: x\r\r\n" * 100_000)) == 100_000


# ------------------------------------------------------------------------------------------------- writer

AWKWARD = "\n \r \r\n \n\ndata: x\n: y \u2028 \u2029 \x85 \x0b \0 \x1f \x7f é 😀 \ufeff \" \\ </ \ud83d x \udc00"


def random_value(dice: random.Random, depth: int = 3) -> Any:
    match dice.randrange(8 if depth else 6):
        case 0:
            return "".join(dice.choices(AWKWARD, k=dice.randrange(12)))
        case 1:
            return dice.choice([None, True, False])
        case 2:
            return dice.randrange(-(10**20), 10**20)
        case 3:
            return dice.uniform(-1e300, 1e300)
        case 4:
            return chr(dice.choice([*range(0xD800, 0xE000, 0x100), *range(0x20), 0x10FFFF]))
        case 5:
            return AWKWARD
        case 6:
            return [random_value(dice, depth - 1) for _ in range(dice.randrange(4))]
        case _:
            return {AWKWARD[dice.randrange(9) :]: random_value(dice, depth - 1) for _ in range(dice.randrange(4))}


def normal(value: Any) -> Any:
    """JSON cannot tell two lone surrogates that stand together from the character that they make up."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("seed", range(20))
def test_every_json_value_comes_back_from_its_event(seed: int) -> None:
    """WHATWG HTML §9.2.6: one `data:` line is one event, so its JSON must not break the line."""
    dice = random.Random(seed)
    for value in [random_value(dice) for _ in range(20)]:
        stream = encode_event(value)
        (event,) = read(stream)
        assert event == message(event.data)
        assert json.loads(event.data) == normal(value)
        assert stream.count(b"\n") == 2 and stream.endswith(b"\n\n") and b"\r" not in stream
        assert read(*octets(stream)) == [event]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, "é"], "b": None}, b'{"a":[1,"\xc3\xa9"],"b":null}'),
        ("a\nb\r", rb'"a\nb\r"'),
        ("\u2028", b'"\xe2\x80\xa8"'),
        ("x\ud800y", rb'"x\ud800y"'),
        ("\\\ud800", rb'"\\\ud800"'),
        ({"\udfff": 1}, rb'{"\udfff":1}'),
    ],
)
def test_json_is_one_compact_line_of_utf8(value: Any, expected: bytes) -> None:
    """Choice: UTF-8 as it is, and JSON's own escape for a lone surrogate, which UTF-8 does not have."""
    assert encode_json(value) == expected
    assert encode_event(value) == b"data: " + expected + b"\n\n"
    assert json.loads(encode_json(value)) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [-math.inf]}])
def test_what_json_cannot_say_is_an_error(value: Any) -> None:
    """RFC 8259 §6: numeric values that cannot be represented, such as Infinity and NaN, are not permitted."""
    with pytest.raises(ValueError):
        encode_event(value)


def test_a_keep_alive_is_a_comment_and_no_event() -> None:
    """WHATWG HTML §9.2.6: if the line starts with a colon, ignore the line."""
    assert KEEP_ALIVE.startswith(b":")
    assert read(KEEP_ALIVE * 3 + encode_event(1) + KEEP_ALIVE) == [message("1")]


# ------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(
    ("data", "expected"), [(b"abc", b"3\r\nabc\r\n"), (b"\r\n" * 8, b"10\r\n" + b"\r\n" * 9), (b"", b"")]
)
def test_a_chunk_carries_its_size(data: bytes, expected: bytes) -> None:
    """RFC 9112 §7.1: chunk-size is the length of chunk-data; a size of zero would end the body."""
    assert encode_chunk(data) == expected


def test_the_last_chunk_has_size_zero_and_no_trailer() -> None:
    """RFC 9112 §7.1: last-chunk, trailer-section, CRLF."""
    assert LAST_CHUNK == b"0\r\n\r\n"
    assert parse_chunk_size(LAST_CHUNK.split(b"\r\n")[0]) == 0


@pytest.mark.parametrize(
    ("line", "size"),
    [
        (b"0", 0),
        (b"1a", 26),
        (b"1A", 26),
        (b"000000000000000f", 15),
        (b"5;name", 5),
        (b'5 ; name="a b"; x', 5),
        (b"5\t;\xc3\xa9", 5),
        (b"ffffffffffffffff", 2**64 - 1),
    ],
)
def test_a_chunk_size_is_hexadecimal_and_may_have_extensions(line: bytes, size: int) -> None:
    """RFC 9112 §7.1.1: a recipient MUST ignore unrecognized chunk extensions."""
    assert parse_chunk_size(line) == size


@pytest.mark.parametrize(
    "line",
    [
        b"", b" 5", b"5 ", b"+5", b"-1", b"0x5", b"1_0", b"g", b";x", b"5 x", b"5;\r", b"5;\0", b"5\n", b"5\r",
        b"\xd9\xa3", b"0" * 17,
    ],
)  # fmt: skip
def test_what_is_no_chunk_size_is_refused(line: bytes) -> None:
    """RFC 9112 §7.1: chunk-size = 1*HEXDIG; a lenient reader lets a second request hide in a body."""
    with pytest.raises(ValueError):
        parse_chunk_size(line)


# ------------------------------------------------------------------------------------------------ the response writer


@pytest.mark.parametrize(("status", "body", "bodiless", "octets"), [
    ("200 OK", b"{}", False, b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 2\r\n\r\n{}"),
    ("200 OK", b"ok\n", True, b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 3\r\n\r\n"),
    ("202 Accepted", b"", False, b"HTTP/1.1 202 Accepted\r\nA: b\r\nContent-Length: 0\r\n\r\n"),
    ("204 No Content", b"", False, b"HTTP/1.1 204 No Content\r\nA: b\r\n\r\n")])
def test_a_whole_answer_is_a_head_with_its_length_and_a_body(status, body, bodiless, octets):
    """RFC 9110 §8.6: a length with every answer but 204; for HEAD the length that GET would have."""
    assert ResponseWriter("HTTP/1.1").answer(status, "A: b\r\n", body, bodiless) == octets


def test_a_stream_is_chunked_and_ends_with_its_last_chunk():
    """RFC 9112 §7.1: the head once, each piece a chunk, then the chunk of size zero."""
    writer = ResponseWriter("HTTP/1.1")
    assert not writer.streaming
    head, _, chunk = writer.first_piece("A: b\r\n", KEEP_ALIVE).partition(b"\r\n\r\n")
    assert writer.streaming and chunk == b"3\r\n:\n\n\r\n"
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK", b"A: b", b"Content-Type: text/event-stream", b"Cache-Control: no-cache",
        b"X-Accel-Buffering: no", b"Transfer-Encoding: chunked"]
    assert writer.piece(b"x") == b"1\r\nx\r\n"
    assert writer.piece(b"y", last=True) == b"1\r\ny\r\n0\r\n\r\n"


def test_for_http_1_0_a_stream_is_plain_and_ends_with_the_connection():
    """RFC 9112 §6.1: MUST NOT send Transfer-Encoding to HTTP/1.0."""
    writer = ResponseWriter("HTTP/1.0")
    first = writer.first_piece("", b"x")
    assert first.endswith(b"\r\n\r\nx") and b"Transfer-Encoding" not in first
    assert writer.piece(b"y", last=True) == b"y"


def test_what_is_shown_of_a_stream_has_no_chunk_sizes():
    """Choice: a learner watches events, not the carrier's arithmetic."""
    writer = ResponseWriter("HTTP/1.1")
    shown = without_chunk_sizes(writer.first_piece("", b"data: 1\n\n") + writer.piece(b"data: 2\n\n", last=True))
    assert "data: 1" in shown and "data: 2" in shown and "9\r\n" not in shown

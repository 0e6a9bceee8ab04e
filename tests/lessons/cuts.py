"""Where a stream is cut makes no difference: TCP and proxies cut it anywhere, even inside a character or a line end.

    python tests/lessons/cuts.py     prints what came out; exit status 1 when it is not always the same

The stream below is fed to the parser in two pieces, cut at each place in turn; then octet by octet.
"""

import sys
from pathlib import Path

import by_hand

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sse import Event, EventParser

# Three events among comments; all three kinds of line ends, a character of three octets, an event of two data lines.
STREAM = (b": comment\n\n"
          b'data: {"progress":10}\n\n'
          b'data: {"text":\r\ndata: "17 \xe2\x84\x83"}\r\n\r\n'
          b":\n\n"
          b"id: 42\rdata: done\r\r")


def read(*pieces: bytes) -> tuple[Event, ...]:
    """The events of a stream that arrives in these pieces."""
    parser = EventParser()
    return tuple(event for piece in pieces for event in parser.feed(piece))


def main(stream: bytes = STREAM) -> int:
    """Prints the stream, the cuts and what came out."""
    places = range(1, len(stream))
    outcomes = {read(stream[:place], stream[place:]) for place in places}
    bit_by_bit = read(*(stream[place : place + 1] for place in range(len(stream))))
    for line in stream.decode().splitlines(keepends=True):
        print("   ", repr(line)[1:-1])
    print(f"{len(stream)} octets, cut at {len(places)} places: {len(outcomes)} outcome{'s' * (len(outcomes) > 1)}")
    for event in bit_by_bit:
        print(f"    event: {event.data!r}")
    return 0 if outcomes == {bit_by_bit} and len(bit_by_bit) == 3 else 1


if __name__ == "__main__":
    by_hand.parser_for(__doc__).parse_args()
    sys.exit(main())

"""How a value travels in a header, and back: the five kinds of text that the specification tells apart.

    python tests/lessons/header_values.py              prints the table
    python tests/lessons/header_values.py 'any text'   prints its row
"""

import sys
from pathlib import Path

import by_hand

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headers import decode_value, encode_value

KINDS = {"plain": "us-west1", "not ASCII": "Zürich", "space around it": " padded ", "line break": "line1\nline2",
         "looks encoded": "=?base64?bGl0ZXJhbA==?="}


def main(kinds: dict[str, str]) -> int:
    """Prints a row for each value; 0 when each came back as it was."""
    rows = [("", "value in the body", "in the header", "read back as")]
    for kind, value in kinds.items():
        header = encode_value(value)
        rows.append((kind, repr(value), header, repr(decode_value(header))))
    for cells in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, (15, 25, 44, 0), strict=True)).rstrip())
    return 0 if all(row[1] == row[3] for row in rows[1:]) else 1


if __name__ == "__main__":
    parser = by_hand.parser_for(__doc__)
    parser.add_argument("text", nargs="?", help="a value of your own")
    text = parser.parse_args().text
    sys.exit(main(KINDS if text is None else {"yours": text}))

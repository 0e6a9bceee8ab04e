"""Every refusal names its rule: in the source, where the argument is the tag, and in the line of the log."""

import ast
import contextlib
import json
import os
import re
from collections.abc import Iterator
from functools import cache

import pytest
from support import META, ROOT, Lines, Running, message, nodes_of, running, source_of
from test_ladder import MAX_BODY, ROWS, Row, Spy, spoiled

import headers
from headers import BadHead, HeaderMismatch, Refused
from reference_server import MAX_MESSAGE, Rejection, StdioTransport, rejection_for

MODULES = ["reference_server.py", "headers.py", "sse.py"]
HEADINGS = json.loads((ROOT / "tests" / "spec_headings.json").read_text(encoding="utf-8"))
# What refuses: the name of its rule's argument, and where that stands if it stands without a name.
REFUSALS = {"Rejection": ("rule", 99), "Refused": ("rule", 2), "BadHead": ("rule", 2), "HeaderMismatch": ("rule", 1)}
DEFAULTS = {"HeaderMismatch": "Streamable HTTP › Server Validation"}


def is_rule(text: str) -> bool:
    """Whether it names a heading of the specification, a section of an RFC, or a choice."""
    page, _, heading = text.partition(" › ")
    return heading in HEADINGS.get(page, ()) or bool(re.fullmatch(r"rfc\d{4} §\d+(\.\d+)*|choice: .{5,80}", text))


def literals(node: ast.expr | None) -> list[str]:
    """The texts that an argument may be: a literal, or one of two; [] for anything that only a run can tell."""
    if isinstance(node, ast.Constant):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return literals(node.body) + literals(node.orelse)
    return []


def refusals(name: str) -> Iterator[tuple[int, str, ast.expr | None]]:
    """The line, the kind and the rule of each refusal in a module."""
    for node in nodes_of(name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
            member, place = REFUSALS[node.func.id]
            named = [keyword.value for keyword in node.keywords if keyword.arg == member]
            found = named[0] if named else node.args[place] if len(node.args) > place else None
            if found is None and node.func.id in DEFAULTS:
                found = ast.Constant(DEFAULTS[node.func.id])
            yield node.lineno, node.func.id, found


def assigned(name: str) -> set[str]:
    """Every text that a module gives to a variable `rule`."""
    found = set()
    for node in nodes_of(name):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                found |= {text for one, value in zip(names, values, strict=False)
                          if isinstance(one, ast.Name) and one.id == "rule" for text in literals(value) if text}
    return found


@cache
def middle() -> tuple[int, int]:
    """Where the server's part 2 begins, and its part 5."""
    lines = source_of("reference_server.py").splitlines()
    first, last = (number for number, text in enumerate(lines, 1) if text.startswith(("# Part 2.", "# Part 5.")))
    return first, last


def part_of(line: int) -> str:
    """"2 to 4" for a line of those parts of the server, which others are filling at the moment."""
    return "2 to 4" if middle()[0] < line < middle()[1] else "1 and 5"


@pytest.mark.parametrize("name, part", [
    ("headers.py", "all"), ("sse.py", "all"), ("reference_server.py", "1 and 5"), ("reference_server.py", "2 to 4")])
def test_every_refusal_in_the_source_has_a_rule(name: str, part: str) -> None:
    """Choice: a refusal's argument is its tag, a literal that can be looked up; nothing is refused without one."""
    here = [one for one in refusals(name) if part in ("all", part_of(one[0]))]
    without = [(line, kind) for line, kind, rule in here if rule is None]
    wrong = [(line, text) for line, _, rule in here for text in literals(rule) if not is_rule(text)]
    assert (without, wrong) == ([], [])
    variable = [line for line, _, rule in here if rule is not None and not literals(rule)]
    known = ["rule", "problem.rule", "self.rule"]  # handed on, or one of the literals that `assigned` finds
    assert [line for line, _, rule in here if line in variable and rule and ast.unparse(rule) not in known] == []
    assert [text for text in assigned(name) if not is_rule(text)] == []
    assert here or name == "sse.py"


def test_the_check_of_rules_finds_a_wrong_one() -> None:
    """Choice: it would be worth nothing if it took any text."""
    assert is_rule("Streamable HTTP › Server Validation") and is_rule("rfc9110 §15.5.16") and is_rule("choice: because")
    assert not any(map(is_rule, ["", "Streamable HTTP", "Streamable HTTP › Nothing", "rfc9110", "RFC 9110 §15", "why"]))


def test_what_refuses_says_why_when_it_is_shown() -> None:
    """Choice: str() of each is its reason, which is what the client reads."""
    assert str(BadHead(400, "the reason", "rfc9112 §5")) == str(Refused(404, "the reason", "rfc9110 §1"))
    assert str(Refused(404, "the reason", "rfc9110 §1")) == "the reason"
    assert str(HeaderMismatch("the reason")) == str(Rejection(-32602, "the reason")) == "the reason"
    for problem in (BadHead(400, "the reason", "rfc9112 §5", "A: b\r\n"), Refused(404, "the reason", "rfc9112 §5")):
        rejection = rejection_for(problem)
        assert (rejection.message, rejection.rule, rejection.fields) == ("the reason", "rfc9112 §5", problem.fields)
        assert rejection.line() == f"{problem.status}, the reason (rfc9112 §5)"


# ---------------------------------------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def run() -> Iterator[Running]:
    """The server of the ladder's tests."""
    with running(Spy(), allow_origins=["https://app.example"], max_body=MAX_BODY) as one:
        yield one


def check_line(line: str, method: str = "") -> str:
    """The rule at the end of a refusal's line."""
    found = re.fullmatch(r"\[ref\] .* -> \d{3}, (-32\d{3} |503 |429 )?(.+) \((.+)\)", line)
    assert found, line
    assert is_rule(found[3]), line
    return found[3]


REFUSED = [row for row in ROWS if row.status != 202 and row.rung < 18 and "a forged" not in row.what]


@pytest.mark.parametrize("rung", sorted({row.rung for row in REFUSED}))
def test_every_refusal_names_its_rule_in_the_log(run: Running, log: Lines, rung: int) -> None:
    """Choice: a client's author reads which sentence it broke, beside what was wrong."""
    rules = set()
    for row in (one for one in REFUSED if one.rung == rung):
        with log.condition:
            log.text = ""
        reply = run.exchange(spoiled(row.spoil).octets())
        [line] = log.lines()
        rules.add(check_line(line))
        words = reply.message["error"]["message"] if reply.messages else reply.body.decode().strip()
        assert words and words in line, (row.what, line)
    assert rules


EXPECTED: list[tuple[str, str]] = [
    ("no Host", "rfc9112 §3.2"), ("a bare CR", "rfc9112 §5"), ("a length with a sign", "rfc9112 §6.3"),
    ("broken chunks", "rfc9112 §7.1"), ("a message without length", "rfc9110 §15.5.12"),
    ("a message that is too large", "rfc9110 §15.5.14"), ("a request line that is too long", "rfc9110 §15.5.15"),
    ("an unknown expectation", "rfc9110 §10.1.1"), ("too many fields", "rfc6585 §5"),
    ("an unknown coding", "rfc9112 §6.1"), ("another major version", "rfc9110 §15.6.6"),
    ("Origin 'null'", "Streamable HTTP › Security & Endpoint"),
    ("Host is a foreign name", "Streamable HTTP › Security & Endpoint"),
    ("no Accept", "Streamable HTTP › Sending Messages"), ("Authorization 'Bearer'", "rfc6750 §2.1"),
    ("two texts", "Overview › Messages"), ("an array", "Overview › Requests"),
    ("a response", "Streamable HTTP › Sending Messages"), ("no Mcp-Method", "Streamable HTTP › Server Validation"),
    ("no _meta", "Overview › _meta"),
    ("an older version", "Versioning and Compatibility › Protocol Version Negotiation"),
    ("another Mcp-Name", "Streamable HTTP › Server Validation"), ("a capability that is missing", "Overview › _meta"),
]


def test_the_rules_are_the_right_ones(run: Running, log: Lines) -> None:
    """Choice: one of each kind, written down by hand."""
    for what, rule in EXPECTED:
        [row] = [one for one in ROWS if one.what == what]
        with log.condition:
            log.text = ""
        run.exchange(spoiled(row.spoil).octets())
        assert (what, check_line(log.lines()[0])) == (what, rule)


def test_a_head_that_is_refused_says_in_its_answer_what_is_wrong(run: Running) -> None:
    """Choice: the words of each refusal reach the client, whole."""
    rows: list[Row] = [row for row in ROWS if row.rung == 1]
    for row in rows:
        octets = spoiled(row.spoil).octets()
        with contextlib.suppress(BadHead):
            headers.read_head(octets.partition(b"\r\n\r\n")[0])
            continue
        try:
            headers.read_head(octets.partition(b"\r\n\r\n")[0])
        except BadHead as broken:
            assert run.exchange(octets).message["error"]["message"] == str(broken) != ""


# --------------------------------------------------------------------------------------------------- over stdio

LINES: list[tuple[bytes, str]] = [
    (b"{", "Overview › Messages"), (b"\xff", "Overview › Messages"), (b"[]", "Overview › Requests"),
    (b"x" * (MAX_MESSAGE + 1), "stdio › stdio"),
    (b'{"jsonrpc":"2.0","id":1,"result":{}}', "Streamable HTTP › Sending Messages"),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', "Overview › Requests"),
    (json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode(), "Overview › _meta"),
    (json.dumps(message("tools/fly")).encode(), "Streamable HTTP › Protocol Version Header"),
    (json.dumps(message("tasks/get", {"taskId": "x"})).encode(), "Overview › _meta"),
    (json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {
        "_meta": META | {"io.modelcontextprotocol/protocolVersion": "2020-01-01"}}}).encode(),
     "Versioning and Compatibility › Protocol Version Negotiation"),
]


def test_over_stdio_every_refusal_names_its_rule_too(log: Lines) -> None:
    """Choice: the same words and rules as over HTTP, in the log on stderr."""
    (source, to_server), (from_server, sink) = os.pipe(), os.pipe()
    server = Spy()
    transport = StdioTransport(server, source, sink, "anonymous")
    for line, rule in LINES:
        with log.condition:
            log.text = ""
        transport.take_lines([None if len(line) > MAX_MESSAGE else line])
        error = json.loads(os.read(from_server, 65536))["error"]
        [told] = log.lines()
        assert (line[:80], re.findall(r"\(([^()]+)\)$", told)) == (line[:80], [rule]) and error["message"] in told
        assert is_rule(rule)
    for descriptor in (source, to_server, from_server, sink):
        os.close(descriptor)
    server.store.close()

"""What the headers of an MCP request say: pure functions, text and dicts in, values or an exception out.

A client copies a few values of the JSON-RPC body into HTTP headers, so that a gateway can route a request
without parsing its body. These mirrored headers are worth something only if whoever reads the body compares.
Below are both sides of a mirrored header (1), the encoding of its value (2), the x-mcp-header annotations of a
tool's schema (3), the head of an HTTP request (4), the verdict on it (5), and what its field values mean (6).

What is refused raises `HeaderMismatch`, `Refused` or `BadHead`, each of which names the rule that it rests on; anything
else is a `ValueError` with the reason. Nothing here touches a socket or keeps state.
"""

import base64
import contextlib
import datetime
import functools
import ipaddress
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

Fields = dict[str, list[str]]  # lower-case field name -> its values in order, without the white space around them
Path = tuple[str, ...]  # the member names that lead into a JSON object
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
SAFE_INTEGER = 2**53 - 1  # beyond it, JSON parsers that use floats see neighbours as equal


class HeaderMismatch(ValueError):
    """A mirrored header is missing, malformed, or differs from the body; the text says which and how."""
    rule = "Streamable HTTP › Server Validation"


class Refused(ValueError):
    """A request that HTTP's own words refuse: `status`, the `rule` behind it, `fields` (lines) for the answer."""
    def __init__(self, status: int, reason: str, rule: str, fields: str = "") -> None:
        super().__init__(reason)
        self.status, self.rule, self.fields = status, rule, fields


class BadHead(Refused):
    """Octets that break HTTP's grammar or a limit, so that nobody can tell where the next request begins."""


# ---- 1. Both sides of a mirrored header ------------------------------------------------------------------------
# spec: Streamable HTTP › Standard Request Headers: the member of `params` that Mcp-Name copies (tasks: SEP-2663)
NAME_SOURCE = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri",
               "tasks/get": "taskId", "tasks/update": "taskId", "tasks/cancel": "taskId"}


class MirroredParameter(NamedTuple):
    """A tool parameter that travels in a header too."""
    header: str  # "Mcp-Param-Region"
    path: Path  # ("region",), or ("options", "region") for a nested one
    type: str  # "string", "integer" or "boolean"


def headers_for(message: dict[str, Any], parameters: Sequence[MirroredParameter] = ()) -> dict[str, str]:
    """The client's side: the mirrored headers of a message; ValueError for a value that no header can carry."""
    sources: dict[str, Path] = {"MCP-Protocol-Version": ("params", "_meta", VERSION_KEY), "Mcp-Method": ("method",)}
    if message["method"] in NAME_SOURCE:
        sources["Mcp-Name"] = ("params", NAME_SOURCE[message["method"]])
    sources |= {parameter.header: ("params", "arguments", *parameter.path) for parameter in parameters}
    values = {header: _value_at(message, path) for header, path in sources.items()}
    # spec: Streamable HTTP › Server Behavior for Custom Headers: MUST omit the header of an absent or null value
    return {header: encode_value(value) for header, value in values.items() if value is not None}


def check_method_header(fields: Fields, method: str) -> str:
    """The server's side of Mcp-Method. Returns the value of MCP-Protocol-Version, which must be there too."""
    # spec: Streamable HTTP › Protocol Version Header: every POST request MUST include it
    version = _single_value(fields, "MCP-Protocol-Version")
    # spec: Streamable HTTP › Case Sensitivity: field names are case-insensitive, values are not
    _check_equal("Mcp-Method", _single_value(fields, "Mcp-Method"), method)
    return version


def check_version_header(header: str, version: str) -> None:
    """The server's side of MCP-Protocol-Version: its value against the version in the body's `_meta`."""
    # spec: Streamable HTTP › Protocol Version Header: the two MUST match
    _check_equal("MCP-Protocol-Version", header, version)


def check_name_header(fields: Fields, method: str, params: dict[str, Any]) -> None:
    """The server's side of Mcp-Name, for the methods that have one; on others it means nothing."""
    if method in NAME_SOURCE:
        # spec: Streamable HTTP › Value Encoding: servers MUST decode before comparing
        name = decode_value(_single_value(fields, "Mcp-Name"), "Mcp-Name header")
        _check_equal("Mcp-Name", name, params.get(NAME_SOURCE[method]))


def check_parameter_headers(fields: Fields, arguments: Any, parameters: Sequence[MirroredParameter]) -> None:
    """The server's side of Mcp-Param-*; one that no parameter declares is ignored."""
    for header, path, kind in parameters:
        value = _value_at(arguments, path)
        if value is not None:
            text = decode_value(_single_value(fields, header), f"{header} header")
            # spec: Streamable HTTP › Server Validation: SHOULD compare integers numerically, `42.0` equals `42`
            if kind == "integer" and not isinstance(value, str) and INTEGER.fullmatch(text):
                text = str(int(text.partition(".")[0]))
            _check_equal(header, text, _text_form(value) or value)
        # choice: a declared header without a value in the body is refused, because a gateway may have believed it
        elif header.lower() in fields:
            raise HeaderMismatch(f"{header} header is present, but the body has no value for it")


def check_notification_headers(fields: Fields, message: dict[str, Any]) -> None:
    """The server's side for a notification, which needs no header: what is present must agree with the body."""
    version = _value_at(message, ("params", "_meta", VERSION_KEY))
    for header, body in (("Mcp-Method", message["method"]), ("MCP-Protocol-Version", version)):
        if header.lower() in fields:
            value = _single_value(fields, header)
            _check_equal(header, value, value if body is None else body)
    if "mcp-name" in fields:
        check_name_header(fields, message["method"], message.get("params", {}))


def _value_at(value: Any, path: Path) -> Any:
    """The value at a path into the body, None when absent or null: both sides read the body with this."""
    # spec: Streamable HTTP › Schema Extension: the instance value at the exact property path
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _single_value(fields: Fields, header: str) -> str:
    values = fields.get(header.lower(), ())
    # spec: Streamable HTTP › Server Validation: failures are a missing header and a value with invalid characters
    if not values:
        raise HeaderMismatch(f"{header} header is missing")
    # choice: repeats pass when all are equal, because then no two readers can disagree
    if len(values) > 1 and len(set(values)) > 1:
        raise HeaderMismatch(f"{header} header is repeated with other values: {_shown(', '.join(values))}")
    if not _is_value(values[0]):
        raise HeaderMismatch(f"{header} header value {_shown(values[0])} contains invalid characters")
    return values[0]


def _check_equal(header: str, value: str, body: Any) -> None:
    if value != body:
        raise HeaderMismatch(f"{header} header value {_shown(value)} does not match body value {_shown(body)}")


def _shown(value: Any) -> str:
    """A value as a message may show it: text escaped and cut after some 80 characters, or else its type."""
    if isinstance(value, str):
        return repr(value[:80])[:80]
    return "null" if value is None else _text_form(value) or type(value).__name__


# ---- 2. Value encoding -----------------------------------------------------------------------------------------
PREFIX, SUFFIX = "=?base64?", "?="
#   plain = [ VCHAR [ *( VCHAR / SP ) VCHAR ] ]
PLAIN = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
#   integer = [ "-" ] 1*16DIGIT [ "." 1*"0" ]
INTEGER = re.compile(r"-?[0-9]{1,16}(?:\.0+)?")


def _is_value(text: str) -> bool:
    # spec: Streamable HTTP › Value Encoding: value = *( VCHAR / SP / HTAB )
    return text.isascii() and (text.isprintable() or text.replace("\t", " ").isprintable())


def encode_value(value: str | int | bool) -> str:
    """A value as a header carries it: as it is where HTTP keeps it intact, else `=?base64?…?=`."""
    if (text := _text_form(value)) is None:
        raise ValueError(f"a header cannot carry {_shown(value)}")
    # spec: Streamable HTTP › Value Encoding: MUST also encode a plain value that matches the sentinel pattern
    matches = text.startswith(PREFIX) and text.endswith(SUFFIX)
    return text if PLAIN.fullmatch(text) and not matches else _encoded(text)


@functools.lru_cache(256)
def decode_value(text: str, what: str = "header") -> str:
    """The text behind a header's value; HeaderMismatch, naming `what`, for one that is malformed."""
    if not _is_value(text):
        raise HeaderMismatch(f"{what} value {_shown(text)} contains invalid characters")
    # spec: Streamable HTTP › Value Encoding: the markers are case-sensitive and MUST appear exactly as shown
    if not (text.startswith(PREFIX) and text.endswith(SUFFIX)):
        return text
    with contextlib.suppress(ValueError):
        value = base64.b64decode(text[len(PREFIX) : -len(SUFFIX)], validate=True).decode("utf-8")
        # rfc4648 §3.5: several spellings decode to one value but one is canonical, so encode again and compare
        if _encoded(value) == text:
            return value
    raise HeaderMismatch(f"{what} value {_shown(text)} is not canonical base64 of UTF-8 text")


def _encoded(text: str) -> str:
    return PREFIX + base64.b64encode(text.encode("utf-8")).decode("ascii") + SUFFIX


def _text_form(value: Any) -> str | None:
    """A JSON value as text, before encoding; None when it has no such form."""
    # spec: Streamable HTTP › Value Encoding: strings as they are, integers decimal, booleans `true` or `false`
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not value.is_integer():  # JSON does not tell 42.0 from 42
        return repr(value)
    # spec: Streamable HTTP › Schema Extension: integers MUST be within ±(2^53-1)
    if isinstance(value, int | float):
        return str(int(value)) if abs(value) <= SAFE_INTEGER else None
    return value if isinstance(value, str) else None


# ---- 3. x-mcp-header: which parameters a tool mirrors ----------------------------------------------------------
# rfc9110 §5.6.2: token = 1*tchar
#   tchar = "!" / "#" / "$" / "%" / "&" / "'" / "*" / "+" / "-" / "." / "^" / "_" / "`" / "|" / "~" / DIGIT / ALPHA
TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"  # possessive, as below: what never backtracks is never slow
HEADER_NAME = re.compile(TOKEN)
# Under these keywords stands a map by name: in there, "items" or "x-mcp-header" is a name like any other.
NAME_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired"}
DATA = {"const", "enum", "default", "examples"}  # under these stands a value, not a schema
MAX_DEPTH = 128  # choice: deeper schemas are refused, because a hostile one must not exhaust the stack


def valid_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What a client keeps of tools/list; then, for each tool that it drops, the name and the reason."""
    kept, dropped = [], []
    for tool in tools:
        try:
            mirrored_parameters(_value_at(tool, ("inputSchema",)))
            kept.append(tool)
        # spec: Streamable HTTP › Schema Extension: MUST exclude the invalid tool, SHOULD log name and reason
        except ValueError as error:
            name = _value_at(tool, ("name",))
            dropped.append((name if isinstance(name, str) else _shown(name), str(error)))
    return kept, dropped


def mirrored_parameters(schema: dict[str, Any]) -> list[MirroredParameter]:
    """The parameters that an inputSchema mirrors; ValueError with the reason when an annotation breaks a rule."""
    if not isinstance(schema, dict):
        raise ValueError("inputSchema is not an object")
    found: dict[str, MirroredParameter] = {}
    for owner, place in _annotated(schema, ()):
        name, kind = owner["x-mcp-header"], owner.get("type")
        where = f"x-mcp-header {_shown(name)} at {_shown('/'.join(place))}"
        # spec: Streamable HTTP › Schema Extension: MUST match token syntax, so neither empty nor with CR or LF
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            raise ValueError(f"{where} is not a token")
        # spec: Streamable HTTP › Schema Extension: MUST be reachable via a chain of `properties` keys
        if set(place[::2]) != {"properties"}:
            raise ValueError(f"{where} is not reachable through `properties` alone")
        # spec: Streamable HTTP › Schema Extension: MUST only be applied to integer, string and boolean
        if kind not in ("integer", "string", "boolean"):
            raise ValueError(f"{where} is not on an integer, a string or a boolean")
        # spec: Streamable HTTP › Schema Extension: MUST be case-insensitively unique
        if name.lower() in found:
            raise ValueError(f"{where} is used twice")
        found[name.lower()] = MirroredParameter(f"Mcp-Param-{name}", place[1::2], kind)
    return list(found.values())


def _annotated(schema: Any, place: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Each annotated object in a schema and its place: ("properties", "a", "properties", "b") when reachable."""
    if len(place) > MAX_DEPTH:
        raise ValueError(f"inputSchema is nested more than {MAX_DEPTH} steps deep")
    if isinstance(schema, dict) and "x-mcp-header" in schema:
        yield schema, place
    members = enumerate(schema) if isinstance(schema, list) else schema.items() if isinstance(schema, dict) else ()
    for key, value in members:
        if key in NAME_MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield from _annotated(child, (*place, key, name))
        elif key not in DATA:
            yield from _annotated(value, (*place, f"{key}", "*"))


# ---- 4. The head of an HTTP request ----------------------------------------------------------------------------
MAX_LINE, MAX_FIELDS = 8192, 64  # octets in a line, field lines in a head; eight full lines are the most in all
CHUNKED = -1
# rfc9112 §3: request-line = method SP request-target SP HTTP-version; HTTP-version = "HTTP/" DIGIT "." DIGIT
REQUEST_LINE = re.compile(rf"({TOKEN}) ([!-~]+) HTTP/([0-9])\.([0-9])")
# rfc9112 §5: field-line = field-name ":" OWS field-value OWS
#   OWS = *( SP / HTAB ), field-value = *( VCHAR / obs-text / SP / HTAB )
# choice: other controls pass in Mcp-* fields, for the comparison to refuse: its answer says more than HTTP's
FIELD_LINE = re.compile(rf"(?=(?i:Mcp-)|[ -~\x80-\xff\t]*\Z)({TOKEN}):[ \t]*+([^\r\n\0]*)")


class Head(NamedTuple):
    """What the head of a request says."""
    octets: bytes  # before the blank line
    verb: str
    path: str  # of the request-target, without its query
    version: str  # "HTTP/1.1" or "HTTP/1.0"
    fields: Fields
    host: str | None  # the name under which the client called, without its port
    length: int  # octets of the body, or CHUNKED
    last: bool  # the connection ends after this request


NO_HEAD = Head(b"", "", "", "HTTP/1.1", {}, None, 0, True)  # of a request that could not be read


def check_head_so_far(received: bytes | bytearray) -> None:
    """What a head can be refused for before its blank line has come: its first octet, a bare LF, its size."""
    # rfc9112 §2.2: SHOULD ignore an empty line before the request line
    lines = bytes(received).rstrip(b"\r\n").removeprefix(b"\r\n").split(b"\r\n")
    if (lines[0] and not HEADER_NAME.match(chr(lines[0][0]))) or received.count(b"\n") > received.count(b"\r\n"):
        raise BadHead(400, "the first octet is not of a method, or a line ends with LF alone", "rfc9112 §2.2")
    if len(lines[0]) > MAX_LINE:
        raise BadHead(414, f"the request line is longer than {MAX_LINE} octets", "rfc9110 §15.5.15")
    if len(lines) > 1 + MAX_FIELDS or max(map(len, lines)) > MAX_LINE or len(received) > 8 * MAX_LINE:
        raise BadHead(431, f"more than {MAX_FIELDS} fields, {MAX_LINE} octets in one or {8 * MAX_LINE} in all",
                      "rfc6585 §5")


@functools.lru_cache(128)  # on a kept connection most heads are the same octets
def read_head(octets: bytes) -> Head:
    """What the octets before a blank line say. BadHead for those that break the rules."""
    verb, target, version, fields = parse_head(octets)
    length = check_framing(fields, version)
    if verb == "POST" and not fields.keys() & {"content-length", "transfer-encoding"}:
        raise BadHead(411, "A message needs Content-Length, or the chunked coding", "rfc9110 §15.5.12")
    host = host_name(fields)
    # rfc9112 §3.2.2: MUST accept absolute-form, whose host counts instead of the Host field's
    if absolute := ABSOLUTE_FORM.fullmatch(target):
        host, target = authority_name(absolute[1]), absolute[2] if absolute[2][:1] == "/" else "/" + absolute[2]
    last = version == "HTTP/1.0" or "close" in members(fields, "connection")
    return Head(octets, verb, target.partition("?")[0], version, fields, host, length, last)


def members(fields: Fields, name: str) -> set[str]:
    """The members of a field that is a list of tokens, in lower case."""
    return {one.strip(" \t").lower() for line in fields.get(name, ()) for one in line.split(",")}


def parse_head(head: bytes) -> tuple[str, str, str, Fields]:
    """The octets before the blank line as (verb, request-target, "HTTP/1.1" or "HTTP/1.0", fields)."""
    check_head_so_far(head)
    start_line, *lines = head.decode("latin-1").removeprefix("\r\n").split("\r\n")
    if (start := REQUEST_LINE.fullmatch(start_line)) is None or start[3] != "1":
        raise BadHead(505 if start else 400, f"{_shown(start_line)} is not a request line of HTTP/1.1",
                      "rfc9110 §15.6.6" if start else "rfc9112 §3")
    fields: Fields = {}
    for line in lines:
        # white space before the colon, folded lines, bare CR and NUL do not match
        if (field := FIELD_LINE.fullmatch(line)) is None:
            name = HEADER_NAME.match(line)  # the rest may be a secret
            raise BadHead(400, f"a line that begins with {_shown(name[0] if name else '')} is not a field line",
                          "rfc9112 §5")
        fields.setdefault(field[1].lower(), []).append(field[2].rstrip(" \t"))
    # rfc9110 §2.5: a higher minor version is read as the highest one known
    return start[1], start[2], "HTTP/1.0" if start[4] == "0" else "HTTP/1.1", fields


def check_framing(fields: Fields, version: str) -> int:
    """How many octets the body has, or CHUNKED; BadHead where two readers of the head could disagree."""
    if host_name(fields) is None and version != "HTTP/1.0":
        raise BadHead(400, "Host is missing", "rfc9112 §3.2")
    if "transfer-encoding" in fields:
        # beside Content-Length it may be an attack, and HTTP/1.0 does not know it
        if "content-length" in fields or version == "HTTP/1.0":
            raise BadHead(400, "Transfer-Encoding beside Content-Length or in HTTP/1.0", "rfc9112 §6.1")
        coding = ", ".join(fields["transfer-encoding"])
        if coding.lower() != "chunked":
            raise BadHead(501, f"Transfer-Encoding {_shown(coding)} is not `chunked`", "rfc9112 §6.1")
        return CHUNKED
    length = ", ".join(fields.get("content-length", ["0"]))
    # rfc9110 §8.6: Content-Length = 1*DIGIT
    if not (length.isascii() and length.isdigit()):
        raise BadHead(400, f"Content-Length {_shown(length)} is not one number", "rfc9112 §6.3")
    # choice: of a longer number the first 19 digits will do, because they are over every limit
    return int(length.lstrip("0")[:19] or "0")


# ---- 5. The verdict on a head: rungs 2 to 7 of the ladder ------------------------------------------------------
class Policy(NamedTuple):
    """Who may call, beside this machine: `parse_origin`s, and names that the Host field may have."""
    origins: frozenset[str]
    hosts: frozenset[str]


@functools.lru_cache(128)
def check_head(octets: bytes, policy: Policy) -> str:
    """The name of the user whose message comes behind this head, or Refused by the first check that fails.

    A health probe and a browser's preflight have no message, and need no more than the check of Origin.
    """
    head = read_head(octets)
    check_origin(head, policy)
    probe, preflight = head.verb in ("GET", "HEAD"), head.verb == "OPTIONS" and "origin" in head.fields
    if (head.path == "/healthz" and (probe or preflight)) or (head.path == "/mcp" and preflight):
        return "anonymous"
    if head.path != "/mcp":
        raise Refused(404, "Nothing here. POST your MCP messages to /mcp; GET /healthz says ok.", "rfc9110 §15.5.5")
    if head.verb != "POST":
        raise Refused(405, "This is an MCP endpoint: it takes JSON-RPC messages by POST. Try an MCP client, or the curl"
                      " helper tests/lessons/mcp.sh.", "Streamable HTTP › Earlier Streamable HTTP Revisions",
                      "Allow: POST, OPTIONS\r\n")
    if not is_json(head.fields):
        raise Refused(415, "Content-Type must be application/json", "Streamable HTTP › Sending Messages")
    if members(head.fields, "content-encoding") - {"", "identity"}:
        raise Refused(415, "Content-Encoding is not served here: send the body as it is", "rfc9110 §8.4",
                      "Accept-Encoding: identity\r\n")
    # choice: 406 for an Accept that does not list both, and for none at all, because absent is not a list.
    if not (accepts(head.fields, "application/json") and accepts(head.fields, "text/event-stream")):
        raise Refused(406, "Accept must list application/json and text/event-stream",
                      "Streamable HTTP › Sending Messages")
    return bearer_name(head.fields) or "anonymous"


def check_origin(head: Head, policy: Policy) -> None:
    """Refuses what a web page could send here by way of its visitor's browser."""
    if "origin" in head.fields and not origin_allowed(", ".join(head.fields["origin"]), policy.origins):
        raise Refused(403, "This Origin is not allowed here (see --allow-origin)",
                      "Streamable HTTP › Security & Endpoint")
    # choice: Host must be an address, localhost or an allowed origin's host, because DNS rebinding needs a name.
    if head.host and not host_allowed(head.host, policy.hosts):
        raise Refused(403, "This Host is not served here (see --allow-origin)", "Streamable HTTP › Security & Endpoint")


def cors_lines(head: Head, policy: Policy) -> str:
    """The field lines that let a page of an allowed origin read the answer; none for other clients."""
    origin = ", ".join(head.fields.get("origin", ()))
    return ("" if not origin_allowed(origin, policy.origins) else f"Access-Control-Allow-Origin: {origin}\r\n"
            "Vary: Origin\r\nAccess-Control-Expose-Headers: Retry-After, WWW-Authenticate\r\n")


def preflight_lines(fields: Fields) -> str:
    """The answer to a preflight: the MCP headers, and the Mcp-Param-* that it asks for."""
    asked = re.findall(rf"(?i)\bmcp-param-{TOKEN}", ",".join(fields.get("access-control-request-headers", ())))
    names = ["Content-Type", "Accept", "Authorization", "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", *asked]
    return (f"Access-Control-Allow-Methods: POST\r\nAccess-Control-Allow-Headers: {', '.join(names)}\r\n"
            "Access-Control-Max-Age: 600\r\n")


@functools.lru_cache(1)
def http_date(now: int) -> str:
    """The value of Date (rfc9110 §5.6.7) for a time in seconds."""
    return datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")


# ---- 6. What field values mean ---------------------------------------------------------------------------------
# rfc3986 §3.2: ( "[" IPv6address "]" / 1*( unreserved / pct-encoded / sub-delims ) ) [ ":" *DIGIT ]
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|(?:[\w\-.~!$&'()*+,;=]|%[0-9A-Fa-f]{2})++)(?::([0-9]{0,5}))?", re.ASCII)
# rfc9112 §3.2.2: absolute-form = absolute-URI; rfc3986 §3.1: schemes are case-insensitive
ABSOLUTE_FORM = re.compile(r"(?i:https?)://([^/?#]*)(.*)")
# rfc6454 §7.1: serialized-origin = scheme "://" host [ ":" port ]
LOCAL_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::([0-9]{1,5}))?")
# rfc9110 §5.6.4: quoted-string = DQUOTE *( qdtext / quoted-pair ) DQUOTE
QUOTED = r'"(?:[^"\\]|\\.)*+"'
# rfc9110 §5.6.6: parameters = *( OWS ";" OWS [ token "=" ( token / quoted-string ) ] )
PARAMETER = re.compile(rf";[ \t]*({TOKEN})=({TOKEN}|{QUOTED})")
# rfc9110 §8.3.1: media-type = type "/" subtype parameters; a media-range (§12.5.1) too, as `*` is a tchar
MEDIA_TYPE = re.compile(rf"({TOKEN}/{TOKEN})((?:[ \t]*;[ \t]*(?:{TOKEN}=(?:{TOKEN}|{QUOTED}))?)*+)")
# rfc9110 §5.6.1: a list has commas between its elements; a comma in a quoted-string is none of them
ELEMENT = re.compile(r'(?:[^",]|"(?:[^"\\]|\\.?)*+"?)++')
# rfc9110 §12.4.2: qvalue = ( "0" [ "." *3DIGIT ] ) / ( "1" [ "." *3"0" ] )
QVALUE = re.compile(r"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")
# rfc6750 §2.1: credentials = "Bearer" 1*SP 1*( ALPHA / DIGIT / "-" / "." / "_" / "~" / "+" / "/" ) *"="
BEARER = re.compile(r"(?i:Bearer) +([A-Za-z0-9\-._~+/]+=*)")


def host_name(fields: Fields) -> str | None:
    """The Host field's name without port, in lower case; None without the field, BadHead 400 when it is invalid."""
    return authority_name(", ".join(fields["host"])) if "host" in fields else None


def authority_name(authority: str) -> str:
    """The host of an authority, without its port, in lower case; BadHead 400 for what is no host and port."""
    host = HOST.fullmatch(authority)
    if not host or int(host[2] or 0) > 65535 or (authority[0] == "[" and not host_allowed(host[1], ())):
        raise BadHead(400, f"Host {_shown(authority)} is not one host and port", "rfc9112 §3.2")
    return host[1].lower()


def host_allowed(name: str, extra: Collection[str]) -> bool:
    """Whether a client may call this server by that name: localhost, an IP address, or one of `extra`."""
    if name == "localhost" or name in extra:
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(name[1:-1]) if name[:1] == "[" else ipaddress.IPv4Address(name))
    return False


def parse_origin(text: str) -> str:
    """An origin as browsers send it: lower case, no default port, no slash behind it. ValueError for anything else."""
    scheme, _, authority = text.lower().removesuffix("/").partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme, ":")
    with contextlib.suppress(BadHead):
        if re.fullmatch("[a-z][a-z0-9+.-]*", scheme) and "*" not in authority_name(authority):
            return f"{scheme}://" + authority.removesuffix(default_port).removesuffix(":")
    raise ValueError(f"{_shown(text)} is not an origin such as https://app.example.com or http://localhost:5173")


def origin_allowed(origin: str, extra: Collection[str]) -> bool:
    """Whether pages of an origin may call: those of this machine, or of one of `extra`; all of it is compared."""
    # spec: Streamable HTTP › Security & Endpoint: MUST validate Origin to prevent DNS rebinding
    local = LOCAL_ORIGIN.fullmatch(origin)
    return int(local[1] or 0) <= 65535 if local else "://" in origin and origin in extra


def accepts(fields: Fields, media_type: str) -> bool:
    """Whether the Accept field lines cover a media type; without any they list nothing, so False."""
    ranges = ("*/*", media_type.partition("/")[0] + "/*", media_type)
    best = (0, 0.0)
    for element in ELEMENT.findall(", ".join(fields.get("accept", ()))):
        if (match := MEDIA_TYPE.fullmatch(element.strip(" \t"))) and match[1].lower() in ranges:
            weights = [value for name, value in PARAMETER.findall(match[2]) if name in ("q", "Q")] or ["1"]
            if QVALUE.fullmatch(weights[0]):
                # rfc9110 §12.5.1: the most specific range that matches decides
                best = max(best, (ranges.index(match[1].lower()), float(weights[0])))
    return best[1] > 0


def is_json(fields: Fields) -> bool:
    """Whether there is one Content-Type field line and it says application/json, in UTF-8 if it says more."""
    values = fields.get("content-type", ())
    match = MEDIA_TYPE.fullmatch(values[0]) if len(values) == 1 else None
    return match is not None and match[1].lower() == "application/json" and all(
        value.strip('"').lower() == "utf-8" for name, value in PARAMETER.findall(match[2]) if name.lower() == "charset")


def bearer_name(fields: Fields) -> str | None:
    """The name in `Authorization: Bearer <name>`; None without the field, Refused 401 for anything else in it."""
    if "authorization" not in fields:
        return None
    if match := BEARER.fullmatch(", ".join(fields["authorization"])):
        return match[1]
    raise Refused(401, "Authorization is not one `Bearer <name>`", "rfc6750 §2.1", "WWW-Authenticate: Bearer\r\n")

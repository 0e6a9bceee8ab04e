"""headers.py, without a socket: the mirrored headers from both sides, value encoding, x-mcp-header, HTTP heads.

Ids such as B093 name the public bug reports that the inputs are drawn from.
"""

import base64
import contextlib
import json

import pytest

from headers import (
    CHUNKED,
    MAX_FIELDS,
    MAX_LINE,
    BadHead,
    HeaderMismatch,
    MirroredParameter,
    Policy,
    Refused,
    accepts,
    bearer_name,
    check_framing,
    check_head,
    check_head_so_far,
    check_method_header,
    check_name_header,
    check_notification_headers,
    check_parameter_headers,
    check_version_header,
    decode_value,
    encode_value,
    headers_for,
    host_allowed,
    host_name,
    is_json,
    mirrored_parameters,
    origin_allowed,
    parse_head,
    parse_origin,
    read_head,
    valid_tools,
)

VERSION = "2026-07-28"
META = {"io.modelcontextprotocol/protocolVersion": VERSION, "io.modelcontextprotocol/clientCapabilities": {}}
ROUTE = [
    MirroredParameter("Mcp-Param-Region", ("region",), "string"),
    MirroredParameter("Mcp-Param-Count", ("count",), "integer"),
    MirroredParameter("Mcp-Param-Flag", ("flag",), "boolean"),
    MirroredParameter("Mcp-Param-Tenant", ("opts", "tenant"), "string"),
]


def call(name, arguments=None):
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": name, "arguments": arguments or {}, "_meta": META}}


def request(method, **params):
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}


def fields_of(*lines):
    """The fields of a head with these field lines, as a server reads them."""
    return parse_head("\r\n".join(["POST /mcp HTTP/1.1", *lines]).encode("latin-1"))[3]


def check_all(fields, message):
    """A server's checks of a request, in the order of the ladder; `route` is the one tool with parameters."""
    method, params = message["method"], message["params"]
    version = check_method_header(fields, method)
    check_version_header(version, params["_meta"]["io.modelcontextprotocol/protocolVersion"])
    check_name_header(fields, method, params)
    if params.get("name") == "route":
        check_parameter_headers(fields, params.get("arguments"), ROUTE)


def refused(lines, message):
    with pytest.raises(HeaderMismatch) as caught:
        check_all(fields_of(*lines), message)
    return str(caught.value)


# ---- Value Encoding ----


@pytest.mark.parametrize(("value", "header"), [
    ("us-west1", "us-west1"),
    ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
    (" padded ", "=?base64?IHBhZGRlZCA=?="),
    ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
    ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
])
def test_the_table_of_the_specification_holds_in_both_directions(value, header):
    """MUST (Streamable HTTP › Value Encoding): the five encoding examples, exactly."""
    assert encode_value(value) == header
    assert decode_value(header) == value


@pytest.mark.parametrize(("value", "header"), [
    ("", ""), ("a", "a"), ("us west 1", "us west 1"), ("!~", "!~"), ("a,b;c\"d\\", "a,b;c\"d\\"),
    ("file:///path/to/file%20name.txt", "file:///path/to/file%20name.txt"), ("my-tool_name", "my-tool_name"),
    ("SGVsbG8=", "SGVsbG8="), ("=?base64?SGVsbG8=", "=?base64?SGVsbG8="), ("SGVsbG8=?=", "SGVsbG8=?="),
    ("=?BASE64?SGVsbG8=?=", "=?BASE64?SGVsbG8=?="), ("=?utf-8?b?ZWNobw==?=", "=?utf-8?b?ZWNobw==?="),
    (" us-west1", "=?base64?IHVzLXdlc3Qx?="), ("us-west1 ", "=?base64?dXMtd2VzdDEg?="), (" ", "=?base64?IA==?="),
    ("\tindented", "=?base64?CWluZGVudGVk?="), ("a\tb", "=?base64?YQli?="), ("\x7f", "=?base64?fw==?="),
    ("line1\r\nline2", "=?base64?bGluZTENCmxpbmUy?="), ("\0", "=?base64?AA==?="),
    ("日本語", "=?base64?5pel5pys6Kqe?="),
    ("é", "=?base64?w6k=?="), ("\x85", "=?base64?woU=?="), ("=?base64??=", "=?base64?PT9iYXNlNjQ/Pz0=?="),
    ("=?base64?=", "=?base64?PT9iYXNlNjQ/PQ==?="), ("a\n", "=?base64?YQo=?="),
])
def test_text_travels_plain_or_encoded_and_comes_back(value, header):
    """MUST (Streamable HTTP › Value Encoding): encode what is not plain ASCII, and what matches the sentinel."""
    assert encode_value(value) == header
    assert decode_value(header) == value
    assert fields_of(f"x: {header}")["x"] == [header]


@pytest.mark.parametrize(("value", "header"), [
    (42, "42"), (-7, "-7"), (0, "0"), (2**53 - 1, "9007199254740991"), (1 - 2**53, "-9007199254740991"),
    (True, "true"), (False, "false"), (42.0, "42"),
])
def test_integers_are_decimal_and_booleans_lower_case(value, header):
    """MUST (Streamable HTTP › Value Encoding): type conversion, before anything else."""
    assert encode_value(value) == header


@pytest.mark.parametrize("value", [
    2**53, -(2**53), pytest.param(10**5000, id="huge"), 1e300, ["a"], {"a": 1}, None, "\ud800",
])
def test_a_value_without_a_text_form_is_not_encoded(value):
    """MUST (Streamable HTTP › Schema Extension): primitive types, integers in the safe range."""
    with pytest.raises(ValueError):
        encode_value(value)


@pytest.mark.parametrize("text", [
    "=?base64?ZWNo!!bw==?=", "=?base64?ZWNobw?=", "=?base64?ZWNobx==?=", "=?base64?ZWNobw====?=",
    "=?base64?37_fvz4-?=", "=?base64?ZWNv bw==?=", "=?base64?/w==?=", "=?base64?SGVsbG8?=",
    "=?base64?SGVs!!!bG8=?=", "=?base64?not even base64?=", "=?base64?=", "=?base64?ZWNobw==\t?=",
    "=?base64?7aCA?=", "=?base64?wIA=?=", "=?base64?=?=", "=?base64?Zg==Zg==?=",
])
def test_only_canonical_base64_of_utf8_is_decoded(text):
    """MUST (Streamable HTTP › Server Validation): a malformed encoded value is a mismatch (B093)."""
    with pytest.raises(HeaderMismatch, match="base64"):
        decode_value(text)


@pytest.mark.parametrize("text", [
    "\xe9", "echo\xa0", "echo\x85", "ec\0ho", "echo\x7f", "\x0becho", "echo\x1f", "a\nb",
    "日本", "=?base64?\xe9?=",
])
def test_a_value_outside_the_grammar_is_a_mismatch(text):
    """MUST (Streamable HTTP › Server Behavior for Custom Headers): reject invalid characters."""
    with pytest.raises(HeaderMismatch, match="invalid characters"):
        decode_value(text)


def test_a_tab_inside_a_value_is_legal_though_no_encoder_sends_it():
    """MUST (Streamable HTTP › Value Encoding): field values are visible ASCII, space and horizontal tab."""
    assert decode_value("a\tb") == "a\tb"
    check_all(fields_of(*NAMED, "Mcp-Name: a\tb"), call("a\tb"))


def test_a_value_is_decoded_once():
    """MUST (Streamable HTTP › Value Encoding): what decodes to a sentinel is the literal that it says."""
    assert decode_value(encode_value(encode_value("é"))) == "=?base64?w6k=?="


def test_an_empty_payload_is_the_empty_text():
    """MUST (Streamable HTTP › Server Validation): equal to a body of "", a mismatch with any other (B093)."""
    assert decode_value("=?base64??=") == ""
    check_parameter_headers({"mcp-param-region": ["=?base64??="]}, {"region": ""}, ROUTE)


@pytest.mark.parametrize("code", [*range(0x180), 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF])
def test_every_character_survives_in_every_place(code):
    """MUST (Streamable HTTP › Value Encoding): encoded values are field values that HTTP passes on unchanged."""
    for value in (chr(code), "a" + chr(code), chr(code) + "a", f"a{chr(code)}b"):
        header = encode_value(value)
        assert fields_of(f"x:{header}")["x"] == [header]
        assert decode_value(header) == value


# ---- Server Validation: the request against its headers ----

NAMED = ["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: tools/call"]
TO_ECHO, TO_ROUTE, EU = [*NAMED, "Mcp-Name: echo"], [*NAMED, "Mcp-Name: route"], "Mcp-Param-Region: eu"
READ = ["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: resources/read"]
LIST = ["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: tools/list"]
CAFE = [*NAMED, "Mcp-Name: =?base64?Y2Fmw6k=?="]


@pytest.mark.parametrize(("lines", "message"), [
    pytest.param(LIST, request("tools/list"), id="B081 tools/list needs no name"),
    pytest.param(["mcp-PROTOCOL-version:2026-07-28", "MCP-METHOD:\ttools/list \t"], request("tools/list"),
                 id="case"),
    pytest.param([*LIST, "Mcp-Name: echo"], request("tools/list"), id="B103 Mcp-Name on tools/list"),
    pytest.param([*NAMED, "Mcp-Name:   echo  "], call("echo"), id="white space around the value"),
    pytest.param([*TO_ECHO, "mcp-name: echo"], call("echo"), id="B087 repeated, but equal"),
    pytest.param(CAFE, call("café"), id="B091 encoded name"),
    pytest.param([*NAMED, "Mcp-Name: =?base64?ZWNobw==?="], call("echo"), id="B091 ascii encoded"),
    pytest.param([*READ, "Mcp-Name: =?base64?dGVzdDovL8Op?="], request("resources/read", uri="test://é"),
                 id="B091 uri"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?5pel5pys?="], call("route", {"region": "日本"}),
                 id="B091 param"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?YQpi?="], call("route", {"region": "a\nb"}),
                 id="B091 newline"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?BASE64?aGk=?="], call("route", {"region": "=?BASE64?aGk=?="}),
                 id="B095 literal match"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?aGk="], call("route", {"region": "=?base64?aGk="}),
                 id="B095 suffix missing"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: SGVsbG8="], call("route", {"region": "SGVsbG8="}),
                 id="prefix missing"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 42.0"], call("route", {"count": 42}), id="B097 42.0 in the header"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 42"], call("route", {"count": 42}), id="B097 plain"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: -7"], call("route", {"count": -7}), id="B097 negative"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 42"], call("route", {"count": 42.0}), id="B097 42.0 in the body"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 42.00"], call("route", {"count": 42.0}), id="42.0 in both"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: -0"], call("route", {"count": 0}), id="minus nought"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 9007199254740991"], call("route", {"count": 2**53 - 1}),
                 id="B099 safe"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: -9007199254740991.0"], call("route", {"count": 1 - 2**53}),
                 id="least"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: two"], call("route", {"count": "two"}),
                 id="other type, equal as text"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 4.5"], call("route", {"count": 4.5}), id="fraction, equal as text"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: true"], call("route", {"flag": True}), id="B101 true"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: false"], call("route", {"flag": False}), id="B101 false"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Tenant: t1"], call("route", {"opts": {"tenant": "t1"}}), id="nested"),
    pytest.param(TO_ROUTE, call("route", {"opts": "no object"}), id="nothing at the path"),
    pytest.param([*TO_ROUTE, EU], call("route", {"region": "eu", "count": None}), id="B103 null value, no header"),
    pytest.param([*TO_ROUTE, EU, "Mcp-Param-Unknown: zzz"], call("route", {"region": "eu"}),
                 id="B107 not declared"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region:"], call("route", {"region": ""}), id="B107 empty value"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?IGV1IA==?="], call("route", {"region": " eu "}),
                 id="B107 padded"),
    pytest.param([*TO_ECHO, EU], call("echo"), id="B107 other tool's header"),
    pytest.param([*TO_ROUTE, EU, "Mcp-Param-Unknown: =?base64?not even base64?="], call("route", {"region": "eu"}),
                 id="B107 not declared and malformed"),
    pytest.param(["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: tasks/get", "Mcp-Name: t1"],
                 request("tasks/get", taskId="t1"), id="task"),
])
def test_headers_that_agree_with_the_body_pass(lines, message):
    """MUST (Streamable HTTP › Server Validation): decoded values, numbers as numbers, names without case."""
    check_all(fields_of(*lines), message)


@pytest.mark.parametrize(("lines", "message", "says"), [
    pytest.param(["Mcp-Method: tools/list"], request("tools/list"), "MCP-Protocol-Version header is missing",
                 id="B081"),
    pytest.param(LIST[:1], request("tools/list"), "Mcp-Method header is missing", id="B081 no Mcp-Method"),
    pytest.param(NAMED, call("echo"), "Mcp-Name header is missing", id="B081 no Mcp-Name on tools/call"),
    pytest.param(READ, request("resources/read", uri="test://a"), "Mcp-Name header is missing", id="B081 on read"),
    pytest.param(["MCP-Protocol-Version: ", LIST[1]], request("tools/list"), "MCP-Protocol-Version header value ''",
                 id="B081 empty version"),
    pytest.param(["MCP-Protocol-Version: 2025-11-25", LIST[1]], request("tools/list"),
                 "value '2025-11-25' does not match body value '2026-07-28'", id="version differs"),
    pytest.param([LIST[0], "MCP-Protocol-Version: 2025-11-25", LIST[1]], request("tools/list"), "repeated",
                 id="versions"),
    pytest.param([LIST[0], "Mcp-Method: TOOLS/LIST"], request("tools/list"), "TOOLS/LIST", id="values have case"),
    pytest.param([LIST[0], "Mcp-Method: =?base64?dG9vbHMvbGlzdA==?="], request("tools/list"), "does not match",
                 id="Mcp-Method has no encoded form"),
    pytest.param([LIST[0], "Mcp-Method: caf\xe9"], request("café"), "invalid characters",
                 id="method outside ASCII"),
    pytest.param(["MCP-Protocol-Version: \xe9", LIST[1]], request("tools/list"), "invalid characters",
                 id="version too"),
    pytest.param([*TO_ECHO, "Mcp-Name: slow"], call("echo"), "repeated", id="B087"),
    pytest.param([*NAMED, "Mcp-Name: slow", "Mcp-Name: echo"], call("echo"), "repeated", id="B087 order swapped"),
    pytest.param([*TO_ECHO, "mcp-method: tools/list"], call("echo"), "repeated", id="B087 method twice"),
    pytest.param([*TO_ECHO, "Mcp-Name:"], call("echo"), "repeated", id="B087 one empty"),
    pytest.param([*TO_ROUTE, EU, "mcp-param-region: us"], call("route", {"region": "eu"}), "repeated",
                 id="B087 param"),
    pytest.param([*NAMED, "Mcp-Name: echo\xa0"], call("echo"), "invalid characters", id="B089 \\xa0"),
    pytest.param([*NAMED, "Mcp-Name: echo\x85"], call("echo"), "invalid characters", id="B089 \\x85"),
    pytest.param([*NAMED, "Mcp-Name: caf\xe9"], call("café"), "invalid characters", id="latin-1 name"),
    pytest.param([*NAMED, "Mcp-Name: =?base64?c2xvdw==?="], call("echo"), "'slow' does not match body value 'echo'",
                 id="B091 wrong name inside"),
    pytest.param([*NAMED, "Mcp-Name: =?base64?Y2FmZcyB?="], call("café"), "does not match", id="B091 NFD vs NFC"),
    pytest.param([*NAMED, "Mcp-Name: =?base64?ZWNobx==?="], call("echo"), "Mcp-Name header value '=",
                 id="B093 bits"),
    pytest.param([*NAMED, "Mcp-Name: =?base64??="], call("echo"), "does not match", id="B093 empty payload"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?37_fvz4-?="], call("route", {"region": "߿߿>>"}),
                 "Mcp-Param-Region header value '=", id="B093 url-safe alphabet"),
    pytest.param([*NAMED, "Mcp-Name: =?BASE64?ZWNobw==?="], call("echo"), "does not match", id="B095"),
    pytest.param([*NAMED, "Mcp-Name: =?utf-8?b?ZWNobw==?="], call("echo"), "does not match", id="B095 rfc2047"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: =?base64?aGk="], call("route", {"region": "hi"}), "does not match",
                 id="B095 suffix missing"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: True"], call("route", {"flag": True}), "match", id="B101 True"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: TRUE"], call("route", {"flag": True}), "match", id="B101 TRUE"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: 1"], call("route", {"flag": True}), "match", id="B101 1"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: false"], call("route", {"flag": True}), "'false'.*'true'",
                 id="B101 false"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Flag: yes"], call("route", {"flag": True}), "match", id="B101 yes"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Count: 1"], call("route", {"count": True}), "match",
                 id="B101 count true vs 1"),
    pytest.param(TO_ECHO, request("tools/call", arguments={}), "'echo' does not match body value null", id="B103"),
    pytest.param(NAMED, request("tools/call", arguments={}), "missing", id="B103 neither"),
    pytest.param([*NAMED, "Mcp-Name: 7"], call(7), "match", id="name that is not text"),
    pytest.param([*NAMED, "Mcp-Name: ['a']"], call(["a"]), "body value list", id="name that is a list"),
    pytest.param([*TO_ROUTE, EU], call("route"), "Mcp-Param-Region.*no value", id="B103 orphan param"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Tenant: t1"], call("route", {"tenant": "t1"}), "no value", id="wrong path"),
    pytest.param([*TO_ROUTE, EU, "Mcp-Param-Count: null"], call("route", {"region": "eu", "count": None}),
                 "Mcp-Param-Count.*no value", id="B103 null value, header 'null'"),
    pytest.param(TO_ROUTE, call("route", {"region": ""}), "Mcp-Param-Region header is missing", id="B107 missing"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region:  eu "], call("route", {"region": " eu "}), "match",
                 id="B107 padded"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: eu"], call("route", {"region": ["eu"]}), "list", id="a list"),
    pytest.param(TO_ECHO, call("slow", {"seconds": 0}), "'echo' does not match body value 'slow'", id="B180"),
    pytest.param([LIST[0], "Mcp-Method: tools/list", "Mcp-Name: echo"], call("echo"), "Mcp-Method",
                 id="B180 method"),
    pytest.param([*TO_ROUTE, "Mcp-Param-Region: us"], call("route", {"region": "eu"}), "'us'.*'eu'",
                 id="B180 param"),
    pytest.param([*READ, "Mcp-Name: test://public"], request("resources/read", uri="test://secret"), "match",
                 id="B180 uri"),
    pytest.param(["MCP-Protocol-Version: 2026-07-28", "Mcp-Method: tasks/get", "Mcp-Name: t2"],
                 request("tasks/get", taskId="t1"), "'t2' does not match body value 't1'", id="task"),
])
def test_headers_that_do_not_agree_with_the_body_are_a_mismatch_that_names_them(lines, message, says):
    """MUST (Streamable HTTP › Server Validation): reject missing, malformed, repeated and differing headers."""
    with pytest.raises(HeaderMismatch, match=says):
        check_all(fields_of(*lines), message)


@pytest.mark.parametrize(("header", "body"), [
    ("43", 42), ("42.5", 42), ("4_2", 42), ("+42", 42), ("٤٢", 42), ("４２", 42), ("²", 2), ("42.", 42), (".0", 0),
    ("42e0", 42), ("0x2a", 42), ("", 0), ("--42", -42), ("- 42", -42), ("42 .0", 42), ("42.0.0", 42), ("4 2", 42),
    ("42.00000000000000000001", 42), ("9007199254740992", 2**53 + 1), ("9007199254740993", 2**53 + 1),
    ("9007199254740992", 2**53), ("9007199254740992", float(2**53)), ("-9007199254740992", -(2**53)),
    ("10000000000000000000000", 1e22), ("1e+22", 1e22), ("42.0", "42"), ("1", True), ("0", False), ("null", []),
    ("9" * 6000, 9), pytest.param("42", 10**5000, id="huge"), ("42", 42.5), ("42." + "0" * 5000 + "1", 42),
])
def test_integers_are_compared_as_numbers_of_one_spelling(header, body):
    """SHOULD (Streamable HTTP › Server Validation): numerically; no float, no other notation, no unsafe value."""
    with pytest.raises(HeaderMismatch, match="Mcp-Param-Count"):
        check_parameter_headers({"mcp-param-count": [encode_value(header)]}, {"count": body}, ROUTE)


def test_only_an_integer_parameter_has_numbers():
    """MUST (Streamable HTTP › Server Validation): a string parameter is compared as text."""
    check_parameter_headers({"mcp-param-region": ["42"]}, {"region": "42"}, ROUTE)
    with pytest.raises(HeaderMismatch):
        check_parameter_headers({"mcp-param-region": ["42.0"]}, {"region": 42}, ROUTE)


@pytest.mark.parametrize("arguments", [None, [], "text", {"opts": []}, {"opts": {"tenant": None}}])
def test_a_path_that_leads_nowhere_has_no_value(arguments):
    """MUST (Streamable HTTP › Server Behavior for Custom Headers): the server must not expect the header."""
    check_parameter_headers({}, arguments, ROUTE)
    with pytest.raises(HeaderMismatch):
        check_parameter_headers({"mcp-param-tenant": ["t1"]}, arguments, ROUTE)


@pytest.mark.parametrize("value", ["a" * 100_000, "\x1b[31m" * 50, "\u202e\ud800" * 60, "\U0001f600" * 90])
def test_a_mismatch_shows_a_value_escaped_and_cut_off(value):
    """Choice: an error message is safe to log, whatever the request said."""
    with pytest.raises(HeaderMismatch) as caught:
        check_name_header({"mcp-name": ["echo"]}, "tools/call", {"name": value})
    assert len(str(caught.value)) < 160
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("lines", "message"), [
    ([], {"method": "notifications/x"}),
    (["Mcp-Method: notifications/x", "MCP-Protocol-Version: 2026-07-28", "Mcp-Name: y"],
    {"method": "notifications/x"}),
    (["MCP-Protocol-Version: 2026-07-28"], {"method": "notifications/x", "params": {"_meta": META}}),
    (["MCP-Protocol-Version: 2026-07-28"], {"method": "notifications/x", "params": {"_meta": 5}}),
    (["Mcp-Name: echo"], {"method": "tools/call", "params": {"name": "echo"}}),
])
def test_a_notification_needs_no_mirrored_header(lines, message):
    """Choice: header requirements for notifications are not defined, so none is required."""
    check_notification_headers(fields_of(*lines), message)


@pytest.mark.parametrize(("lines", "message"), [
    (["Mcp-Method: tools/call"], {"method": "notifications/x"}),
    (["Mcp-Method: notifications/x", "Mcp-Method: tools/call"], {"method": "notifications/x"}),
    (["MCP-Protocol-Version: 2025-11-25"], {"method": "notifications/x", "params": {"_meta": META}}),
    (["MCP-Protocol-Version: 2025-11-25", "MCP-Protocol-Version: 2026-07-28"], {"method": "notifications/x"}),
    (["Mcp-Name: echo"], {"method": "tools/call", "params": {"name": "slow"}}),
    (["Mcp-Name: echo"], {"method": "tools/call"}),
])
def test_a_notifications_header_must_agree_when_present(lines, message):
    """MUST (Streamable HTTP › Server Validation): reject values that do not match the body."""
    with pytest.raises(HeaderMismatch):
        check_notification_headers(fields_of(*lines), message)


# ---- Client Behavior ----


@pytest.mark.parametrize(("message", "headers"), [
    (request("tools/list"), {}),
    (call("café"), {"Mcp-Name": "=?base64?Y2Fmw6k=?="}),
    (request("resources/read", uri="test://a"), {"Mcp-Name": "test://a"}),
    (request("prompts/get", name="p"), {"Mcp-Name": "p"}),
    (request("tasks/get", taskId="t"), {"Mcp-Name": "t"}),
    (request("tasks/update", taskId="t"), {"Mcp-Name": "t"}),
    (request("tasks/cancel", taskId="t"), {"Mcp-Name": "t"}),
    (call("route", {"region": "", "count": 7, "flag": False, "opts": {"tenant": " t"}}),
     {"Mcp-Name": "route", "Mcp-Param-Region": "", "Mcp-Param-Count": "7", "Mcp-Param-Flag": "false",
      "Mcp-Param-Tenant": "=?base64?IHQ=?="}),
    (call("route", {"region": None, "opts": {}, "other": 1}), {"Mcp-Name": "route"}),
])
def test_a_client_sends_what_the_server_checks(message, headers):
    """MUST (Streamable HTTP › Client Behavior): mirror the values that are present, omit absent and null ones."""
    sent = headers_for(message, ROUTE)
    assert sent == {"MCP-Protocol-Version": VERSION, "Mcp-Method": message["method"], **headers}
    lines = [f"{name}: {value}" for name, value in sent.items()]
    check_all(fields_of(*lines), message)
    for i in range(len(lines)):  # each of them is required, and none may differ
        refused(lines[:i] + lines[i + 1 :], message)
        refused([*lines[:i], lines[i].replace(":", ": x"), *lines[i + 1 :]], message)


def test_a_notification_without_metadata_has_no_version_to_mirror():
    """MUST (Streamable HTTP › Client Behavior): headers are extracted from the body."""
    assert headers_for({"method": "notifications/x"}) == {"Mcp-Method": "notifications/x"}


def test_no_text_can_inject_a_field_line():
    """MUST (Streamable HTTP › Value Encoding): encoding prevents injection attacks."""
    message = call("a\r\nEvil: 1", {"region": "b\r\nEvil: 2"}) | {"method": "x\r\nEvil: 3"}
    message["params"]["_meta"] = {"io.modelcontextprotocol/protocolVersion": "\nEvil: 4"}
    for sent in (headers_for(message, ROUTE), headers_for(message | {"method": "tools/call"}, ROUTE)):
        assert not any(set("\r\n") & set(value) for value in sent.values())


@pytest.mark.parametrize("value", [2**53, ["eu"], {}, "\ud800"])
def test_a_client_refuses_to_mirror_what_no_header_can_carry(value):
    """MUST (Streamable HTTP › Schema Extension): integers within the safe range, primitive types."""
    with pytest.raises(ValueError):
        headers_for(call("route", {"count": value}), ROUTE)


# ---- Schema Extension: x-mcp-header ----


def schema(**properties):
    return {"type": "object", "properties": properties}


X = {"type": "string", "x-mcp-header": "X"}


@pytest.mark.parametrize(("input_schema", "found"), [
    pytest.param(schema(o=schema(b={"type": "integer", "x-mcp-header": "B"})), [("B", ("o", "b"), "integer")],
                 id="B105 nested"),
    pytest.param(schema(a={"type": "boolean", "x-mcp-header": "!#$%&'*+-.^_`|~9"}),
                 [("!#$%&'*+-.^_`|~9", ("a",), "boolean")], id="B105 odd tchar"),
    pytest.param({"type": "object", "properties": {"x-mcp-header": {"type": "string"}}}, [],
                 id="B105 property called x-mcp-header"),
    pytest.param(schema(a={"type": "object", "default": {"x-mcp-header": "X"}}), [], id="B105 default"),
    pytest.param(schema(items={"type": "string", "x-mcp-header": "Items"}), [("Items", ("items",), "string")],
                 id="B105 property called items"),
    pytest.param(schema(a={"const": X}, b={"enum": [X, [X]]}, c={"examples": [X]}), [], id="const, enum, examples"),
    pytest.param(schema(properties=schema(properties=X)), [("X", ("properties", "properties"), "string")],
                 id="names"),
    pytest.param(schema(**{"default": X}), [("X", ("default",), "string")], id="property called default"),
    pytest.param(schema(**{"x-mcp-header": X}), [("X", ("x-mcp-header",), "string")], id="annotated x-mcp-header"),
    pytest.param({"$defs": {"x-mcp-header": {"type": "string"}}}, [], id="definition called x-mcp-header"),
    pytest.param({"patternProperties": {"x-mcp-header": {}}}, [], id="pattern x-mcp-header"),
    pytest.param({"dependentRequired": {"x-mcp-header": ["a"]}, "required": ["x-mcp-header"]}, [], id="required"),
    pytest.param(schema(a={"type": "string", "x-mcp-header": "Method"}), [("Method", ("a",), "string")],
                 id="Method"),
    pytest.param(schema(a=X, b={"type": "string", "x-mcp-header": "Y"}),
                 [("X", ("a",), "string"), ("Y", ("b",), "string")], id="in order"),
    pytest.param(schema(a={"allOf": [schema(b={})]}, c=True), [], id="composition without annotation"),
    pytest.param({}, [], id="empty schema"),
])
def test_an_annotated_property_is_mirrored_under_its_exact_path(input_schema, found):
    """MUST (Streamable HTTP › Schema Extension): statically reachable properties, whatever their names."""
    assert mirrored_parameters(input_schema) == [
        MirroredParameter(f"Mcp-Param-{name}", path, kind) for name, path, kind in found]


UNREACHABLE = {
    "B105 items": schema(a={"type": "array", "items": schema(x=X)}),
    "B105 oneOf": schema(a={"oneOf": [X]}),
    "B105 $defs via $ref": {**schema(a={"$ref": "#/$defs/A"}), "$defs": {"A": X}},
    "B105 on the root": {**schema(), "x-mcp-header": "X"},
    "root with a type": {**X, "properties": {}},
    **{keyword: schema(a={keyword: X}) for keyword in (
        "items", "additionalProperties", "unevaluatedItems", "contains", "not", "if", "then", "else",
        "propertyNames", "unknownKeyword", "unevaluatedProperties", "contentSchema", "additionalItems")},
    **{f"properties under {keyword}": {keyword: schema(x=X)} for keyword in (
        "items", "additionalProperties", "not", "if", "then", "else")},
    **{f"{keyword} list": schema(a={keyword: [{}, schema(x=X)]}) for keyword in (
        "prefixItems", "anyOf", "allOf", "items")},
    **{f"{keyword} map": {keyword: {"properties": X}} for keyword in (
        "patternProperties", "$defs", "definitions", "dependentSchemas")},
    **{f"properties in {keyword}": schema(a={keyword: {"b": schema(x=X)}}) for keyword in (
        "patternProperties", "$defs", "definitions", "dependentSchemas")},
    "properties is a list": {"properties": [X]},
    "properties is a list below": {"properties": {"a": {"properties": [schema(x=X)]}}},
    "list in a list": {"anyOf": [[[X]]]},
    "properties of an annotation": schema(a={"type": "string", "x-mcp-header": "A", "else": X}),
}


@pytest.mark.parametrize("input_schema", UNREACHABLE.values(), ids=UNREACHABLE.keys())
def test_an_annotation_anywhere_else_makes_the_definition_invalid(input_schema):
    """MUST (Streamable HTTP › Schema Extension): a chain consisting solely of `properties` keys."""
    with pytest.raises(ValueError, match=r"x-mcp-header 'X' at .* not reachable"):
        mirrored_parameters(input_schema)


@pytest.mark.parametrize("kind", [
    pytest.param({"type": "number"}, id="B105 number"), pytest.param({"type": "object"}, id="B105 object"),
    pytest.param({"type": ["string", "null"]}, id="B105 type list"), pytest.param({}, id="B105 no type"),
    {"type": "array"}, {"type": "null"}, {"type": "String"}, {"type": ["string"]}, {"type": {}}, {"type": None},
])
def test_only_integer_string_and_boolean_are_mirrored(kind):
    """MUST (Streamable HTTP › Schema Extension): only applied to primitive types, never to number."""
    with pytest.raises(ValueError, match="integer"):
        mirrored_parameters(schema(a={**kind, "x-mcp-header": "X"}))


@pytest.mark.parametrize("name", [
    pytest.param("", id="B105 empty"), pytest.param("My Region", id="B105 space"),
    pytest.param("A:B", id="B105 colon"),
    pytest.param("Régión", id="B105 non-ascii"), pytest.param(5, id="B105 not a string"),
    "Region\t1", "Region\r\nEvil: 1", "Region\n", "a/b", "\x7f", "Ｒ", "\u212a", None, True, ["X"], {"a": 1},
    "(X)",
])
def test_the_annotation_is_a_token(name):
    """MUST (Streamable HTTP › Schema Extension): not empty, token syntax, no control characters."""
    with pytest.raises(ValueError, match="token"):
        mirrored_parameters(schema(a={"type": "string", "x-mcp-header": name}))


@pytest.mark.parametrize("input_schema", [
    pytest.param(schema(a={"type": "string", "x-mcp-header": "Region"},
                 b={"type": "string", "x-mcp-header": "REGION"}),
                 id="B105 case twins"),
    pytest.param(schema(a={"type": "string", "x-mcp-header": "Region"},
                        o=schema(b={"type": "string", "x-mcp-header": "region"})), id="B105 case twins, nested"),
    pytest.param(schema(a=X, b=X), id="twins"),
])
def test_annotations_are_unique_without_regard_to_case(input_schema):
    """MUST (Streamable HTTP › Schema Extension): case-insensitively unique in the inputSchema."""
    with pytest.raises(ValueError, match="twice"):
        mirrored_parameters(input_schema)


def deep(levels, inner, wrap):
    for _ in range(levels):
        inner = wrap(inner)
    return inner


@pytest.mark.parametrize("hostile", [
    None, True, 5, "text", [], [X], {"properties": 5}, {"properties": {"a": 5}}, {"properties": {"a": [5, None]}},
    {"items": [[[]]], "allOf": {}}, {"x-mcp-header": {}}, {"properties": {"a": {"type": {}, "x-mcp-header": []}}},
    {"": {"": {"x-mcp-header": "\ud800"}}},
    deep(5000, X, lambda inner: {"properties": {"a": inner}}), deep(5000, X, lambda inner: {"items": inner}),
    deep(5000, X, lambda inner: [inner]), {"allOf": deep(5000, X, lambda inner: [inner])},
    {"x-mcp-header": deep(5000, {}, lambda inner: [inner])}, {"const": deep(5000, X, lambda inner: [inner])},
    schema(a={"type": "string", "x-mcp-header": "a" * 100_000 + " "}),
], ids=range(20))
def test_a_hostile_schema_raises_nothing_but_value_error(hostile):
    """MUST (Streamable HTTP › Schema Extension): one malformed definition must not stop the others."""
    good = {"name": "good", "inputSchema": schema(a=X)}
    try:
        mirrored_parameters(hostile)
    except ValueError as error:
        assert len(str(error)) < 300
    kept, _ = valid_tools([{"name": "bad", "inputSchema": hostile}, good])
    assert good in kept


@pytest.mark.parametrize("not_an_object", [None, True, 5, "text", [], [X]])
def test_an_input_schema_is_an_object(not_an_object):
    """MUST (Streamable HTTP › Schema Extension): annotations belong to properties of the schema root."""
    with pytest.raises(ValueError, match="not an object"):
        mirrored_parameters(not_an_object)


def test_a_schema_may_nest_sixty_objects():
    """Choice: the limit on depth is far from any real schema."""
    assert mirrored_parameters(deep(60, X, lambda inner: schema(a=inner)))[0].path == ("a",) * 60
    with pytest.raises(ValueError, match="deep"):
        mirrored_parameters(deep(70, X, lambda inner: schema(a=inner)))


def test_a_client_drops_bad_tools_with_a_reason_and_keeps_the_others():
    """MUST (Streamable HTTP › Schema Extension): exclude the invalid tool; SHOULD log its name and the reason."""
    good, plain = {"name": "good", "inputSchema": schema(a=X)}, {"name": "plain", "inputSchema": {"type": "object"}}
    bad = {"name": "bad", "inputSchema": schema(a={"type": "number", "x-mcp-header": "X"})}
    kept, dropped = valid_tools([bad, good, {"name": 5}, plain, "no tool", {"inputSchema": UNREACHABLE["items"]}])
    assert kept == [good, plain]
    assert [name for name, _ in dropped] == ["bad", "5", "null", "null"]
    assert "x-mcp-header 'X' at 'properties/a'" in dropped[0][1]
    assert dropped[1][1] == "inputSchema is not an object"
    assert "properties/a/items" in dropped[3][1]


# ---- RFC 9112: the head of a request ----

HEAD = (b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
        b"Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: 2026-07-28\r\n"
        b"Mcp-Method: tools/call\r\nMcp-Name: =?base64?Y2Fmw6k=?=\r\nAuthorization: Bearer alice\r\n"
        b"Origin: http://localhost:3000\r\nContent-Length: 210\r\nConnection: close")


def status_of(function, *arguments):
    with pytest.raises(BadHead) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value) and 5 < len(str(caught.value)) < 200
    return caught.value.status


def test_a_head_becomes_verb_target_version_and_fields():
    """RFC 9112 §2: a request line, then field lines."""
    verb, target, version, fields = parse_head(HEAD)
    assert (verb, target, version) == ("POST", "/mcp", "HTTP/1.1")
    assert fields["accept"] == ["application/json, text/event-stream"]
    assert fields["mcp-name"] == ["=?base64?Y2Fmw6k=?="]
    assert len(fields) == 10


@pytest.mark.parametrize(("line", "name", "values"), [
    (b"A: b", "a", ["b"]), (b"A:b", "a", ["b"]), (b"A:", "a", [""]), (b"A: \t ", "a", [""]),
    (b"A:\t b\t ", "a", ["b"]),
    (b"A: b\tc d", "a", ["b\tc d"]), (b"A: b:c", "a", ["b:c"]),
    (b"!#$%&'*+-.^_`|~9z: 1", "!#$%&'*+-.^_`|~9z", ["1"]),
    (b"A: \xa0b\x85 ", "a", ["\xa0b\x85"]), (b"A: 1\r\na: 2\r\nA: 1", "a", ["1", "2", "1"]),
    (b"A: ::", "a", ["::"]),
    (b"Mcp-Name: " + "日本".encode(), "mcp-name", ["日本".encode().decode("latin-1")]),
])
def test_a_field_line_is_a_token_a_colon_and_a_value(line, name, values):
    """RFC 9112 §5: only SP and HTAB around a value are stripped, obs-text is kept, repeats keep their order."""
    assert parse_head(b"POST / HTTP/1.1\r\n" + line)[3] == {name: values}


@pytest.mark.parametrize("line", [
    b"Mcp-Name : echo", b"Mcp-Name\t: echo", b" Mcp-Name: echo", b"Mcp-Name", b": echo", b"", b"Mcp Name: echo",
    b"Mcp-Name: echo\r\n  ", b"Mcp-Name: ec\r\n ho", b"Mcp-Name: ec\r\n\tho",
    b"Mcp-Name: echo\rMcp-Method: tools/list",
    b"X-A: 1\rContent-Length: 0", b"X\r-A: 1", b"Mcp-Name: echo\nX: y", b"Mcp-Name: ec\0ho", b"X: echo\x7f",
    b"X-Mcp-Name: \x0becho", b"Accept: echo\x1f", b"M\xe9: 1", b"M\0: 1", b"(x): 1", b"Mcp-Name: echo\r", b"A/B: 1",
    b"X: \x1b[31m",
])
def test_a_line_outside_the_grammar_is_400(line):
    """RFC 9112 §5: no space before the colon, no folding, no bare CR or LF, no control (B089, B109, B111)."""
    assert status_of(parse_head, b"POST /mcp HTTP/1.1\r\nHost: a\r\n" + line + b"\r\nX: y") == 400


@pytest.mark.parametrize(("line", "status"), [
    (b"GET /mcp", 400), (b"POST  /mcp HTTP/1.1", 400), (b"POST /mcp HTTP/1.10", 400), (b"POST /mcp  HTTP/1.1", 400),
    (b"POST /mcp HTTP/1.1 ", 400), (b" POST /mcp HTTP/1.1", 400), (b"POST\t/mcp HTTP/1.1", 400), (b"", 400),
    (b"POST /mcp http/1.1", 400), (b"POST /m\xe9 HTTP/1.1", 400), (b"POST /m\0 HTTP/1.1", 400),
    (b"P(ST / HTTP/1.1", 400),
    (b"POST /mcp HTTP/1.\xb2", 400), (b"POST /mcp HTTP/11", 400), (b"POST /mcp HTTP/1.1\n", 400),
    (b"POST /a b HTTP/1.1", 400),
    (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03", 400), (b"\nPOST /mcp HTTP/1.1", 400),
    (b"POST /\rx HTTP/1.1", 400),
    (b"PRI * HTTP/2.0", 505), (b"POST /mcp HTTP/0.9", 505), (b"POST /mcp HTTP/3.0", 505),
])
def test_a_request_line_outside_the_grammar_is_refused(line, status):
    """RFC 9112 §3: method SP request-target SP HTTP-version; another major version is 505 (B125)."""
    assert status_of(parse_head, line + b"\r\nHost: a") == status


@pytest.mark.parametrize(("line", "expected"), [
    (b"post /mcp HTTP/1.1", ("post", "/mcp", "HTTP/1.1")), (b"OPTIONS * HTTP/1.1", ("OPTIONS", "*", "HTTP/1.1")),
    (b"CONNECT a:1 HTTP/1.1", ("CONNECT", "a:1", "HTTP/1.1")),
    (b"M-SEARCH /?q#x HTTP/1.0", ("M-SEARCH", "/?q#x", "HTTP/1.0")),
    (b"POST /mcp HTTP/1.7", ("POST", "/mcp", "HTTP/1.1")),
    (b"\r\nPOST /mcp HTTP/1.1", ("POST", "/mcp", "HTTP/1.1")),
])
def test_a_request_line_is_read_as_it_stands(line, expected):
    """RFC 9112 §3: verbs have case; RFC 9110 §2.5: a higher minor version is 1.1; §2.2: an empty line first."""
    assert parse_head(line + b"\r\nHost: a")[:3] == expected


def test_a_head_has_limits():
    """Choice: 8 KiB a line, 64 fields, 64 KiB in all: 414 for the request line, 431 for the rest."""
    assert (MAX_LINE, MAX_FIELDS) == (8192, 64)
    full = b"x: " + b"y" * (MAX_LINE - 3)
    longest = b"POST /" + b"a" * (MAX_LINE - 15) + b" HTTP/1.1"
    for head in (longest, b"GET / HTTP/1.1\r\n" + full, b"GET / HTTP/1.1" + b"\r\nx: y" * MAX_FIELDS):
        parse_head(head)
        check_head_so_far(head + b"\r\n")
        check_head_so_far(head + b"\r\n\r")
    for head, status in ((longest.replace(b"/", b"/a", 1), 414), (b"GET / HTTP/1.1\r\n" + full + b"y", 431),
                         (b"GET / HTTP/1.1" + b"\r\nx: y" * (MAX_FIELDS + 1), 431),
                         (b"GET / HTTP/1.1" + (b"\r\n" + full) * 8, 431)):
        assert status_of(parse_head, head) == status
        assert status_of(check_head_so_far, head) == status


def test_a_good_head_is_never_refused_before_it_is_complete():
    """Choice: what arrives octet by octet is judged like what arrives at once."""
    for start in (b"", b"\r\n"):
        for end in range(len(start + HEAD + b"\r\n\r") + 1):
            check_head_so_far((start + HEAD + b"\r\n\r")[:end])
            check_head_so_far(bytearray(start + HEAD + b"\r\n\r")[:end])


@pytest.mark.parametrize(("received", "status"), [
    (b"\x16", 400), (b"\x16\x03\x01\x00\xa5", 400), (b" ", 400), (b"\xff", 400), (b"\0", 400), (b"\n", 400),
    (b"\rP", 400),
    (b"\r\n\n", 400), (b"POST /mcp HTTP/1.1\n", 400), (b"POST /mcp HTTP/1.1\r\nHost: a\n", 400), (b"(", 400),
    (b"POST /mcp HTTP/1.1\r\nA: b\nC", 400), (b"a" * (MAX_LINE + 1), 414), (b"\r\n\x16", 400),
    (b"\r\n" + b"a" * (MAX_LINE + 1), 414),
    (b"POST / HTTP/1.1\r\n" + b"a" * (MAX_LINE + 1), 431),
])
def test_a_hopeless_head_is_refused_before_its_end(received, status):
    """Choice: a TLS hello, a bare LF or an endless line is answered at once (B125)."""
    assert status_of(check_head_so_far, received) == status


ODD = [b"", b"\0", b"\t", b"\n", b"\r", b"\r\n", b"\x0b", b"\x1f", b" ", b'"', b",", b":", b";", b"\\", b"0",
       b"\x7f", b"\x80", b"\x85", b"\xa0", b"\xb2", b"\xff"]


def test_a_head_with_any_octet_replaced_raises_nothing_but_its_own_errors():
    """RFC 9112 §2.2: whatever the octets are, the answer is values or BadHead."""
    outcomes = set()
    for at in range(len(HEAD)):
        for odd in ODD:
            head = HEAD[:at] + odd + HEAD[at + 1 :]
            try:
                verb, target, version, fields = parse_head(head)
                outcomes.add(check_framing(fields, version))
            except BadHead as error:
                outcomes.add(error.status)
                continue
            assert not set(verb + target) & set(" \r\n\0")
            assert all(not set(value) & set("\r\n\0") for values in fields.values() for value in values)
            read_everything(fields)
    assert {400, 505, 210, 10, 0} <= outcomes <= {*range(1000), 2100}


def read_everything(fields):
    """Every other reader of fields, each of which raises its own error or none."""
    accepts(fields, "text/event-stream")
    is_json(fields)
    origin_allowed(fields.get("origin", [""])[0], ())
    host_allowed(host_name(fields) or "", ())
    with contextlib.suppress(ValueError):
        bearer_name(fields)
    with contextlib.suppress(HeaderMismatch):
        check_name_header(fields, "tools/call", {"name": "café"})
    with contextlib.suppress(HeaderMismatch):
        check_method_header(fields, "tools/call")


# ---- RFC 9112 §6: framing ----


@pytest.mark.parametrize(("lines", "length"), [
    (["Content-Length: 210"], 210), (["Content-Length: 000210"], 210), (["Content-Length: 0"], 0), ([], 0),
    (["Content-Length: 000"], 0), (["Content-Length: 1000000000000"], 10**12),
    (["Transfer-Encoding: chunked"], CHUNKED),
    (["Transfer-Encoding: Chunked \t"], CHUNKED), (["Content-Length: " + "0" * 5000 + "7"], 7),
])
def test_framing_gives_the_length_of_the_body(lines, length):
    """RFC 9112 §6.3: Content-Length, or chunked, or no body at all."""
    assert check_framing(fields_of("Host: a", *lines), "HTTP/1.1") == length


def test_a_length_of_thousands_of_digits_is_merely_large():
    """RFC 9110 §8.6: anticipate potentially large numerals and prevent parsing errors."""
    assert check_framing(fields_of("Host: a", "Content-Length: " + "9" * 5000), "HTTP/1.1") > 2**53


@pytest.mark.parametrize("value", [
    "+210", "-1", "abc", "", "0xd2", "21_0", "210.0", "1e2", "\xb2\xb3", "210;", "2 10",
    "210, 210", "210,", "\xa0210",
])
def test_a_length_that_is_not_digits_is_400(value):
    """RFC 9110 §8.6: Content-Length = 1*DIGIT, in ASCII (B113)."""
    assert status_of(check_framing, fields_of("Host: a", f"Content-Length: {value}"), "HTTP/1.1") == 400


@pytest.mark.parametrize(("lines", "version", "status"), [
    (["Content-Length: 4", "Content-Length: 5"], "HTTP/1.1", 400),
    (["Content-Length: 4", "Content-Length: 4"], "HTTP/1.1", 400),
    (["Content-Length: 4", "Transfer-Encoding: chunked"], "HTTP/1.1", 400),
    (["Transfer-Encoding: chunked", "Content-Length: 4"], "HTTP/1.1", 400),
    (["Transfer-Encoding: chunked"], "HTTP/1.0", 400),
    (["Transfer-Encoding: xchunked"], "HTTP/1.1", 501),
    (["Transfer-Encoding: gzip, chunked"], "HTTP/1.1", 501),
    (["Transfer-Encoding: chunked, chunked"], "HTTP/1.1", 501),
    (["Transfer-Encoding: chunked, identity"], "HTTP/1.1", 501),
    (["Transfer-Encoding: identity"], "HTTP/1.1", 501),
    (["Transfer-Encoding: chunked;q=1"], "HTTP/1.1", 501),
    (["Transfer-Encoding: identity", "Transfer-Encoding: chunked"], "HTTP/1.1", 501),
    (["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], "HTTP/1.1", 501),
    (["Transfer-Encoding:"], "HTTP/1.1", 501),
    (["Transfer-Encoding: \xa0chunked"], "HTTP/1.1", 501),
])
def test_framing_that_two_readers_could_take_differently_is_refused(lines, version, status):
    """RFC 9112 §6.1: one Content-Length or one `chunked`, never both (B115, B117)."""
    assert status_of(check_framing, fields_of("Host: a", *lines), version) == status


@pytest.mark.parametrize("lines", [
    [], ["Host: evil.example", "Host: 127.0.0.1:8000"], ["Host: a", "Host: a"], ["Host: "],
])
def test_a_request_has_one_host(lines):
    """RFC 9112 §3.2: 400 for a missing, a repeated or an invalid Host (B123)."""
    assert status_of(check_framing, fields_of(*lines), "HTTP/1.1") == 400
    if lines:
        assert status_of(check_framing, fields_of(*lines), "HTTP/1.0") == 400


def test_http_1_0_may_lack_a_host():
    """RFC 9112 §3.2: only HTTP/1.1 requires it (B123)."""
    assert host_name({}) is None
    assert check_framing({}, "HTTP/1.0") == 0


# ---- Security & Endpoint: Host and Origin ----


@pytest.mark.parametrize(("value", "name"), [
    ("127.0.0.1:8000", "127.0.0.1"), ("LocalHost", "localhost"), ("localhost:", "localhost"),
    ("[::1]:8000", "[::1]"),
    ("[2001:DB8::1]", "[2001:db8::1]"), ("[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]"),
    ("a.example:65535", "a.example"),
    ("evil.com:8000", "evil.com"), ("127.0.0.1.evil.com:8000", "127.0.0.1.evil.com"), ("a%41_b", "a%41_b"),
])
def test_the_host_field_is_a_name_and_a_port(value, name):
    """RFC 9110 §7.2: Host = uri-host [ ":" port ]."""
    assert host_name(fields_of(f"Host: {value}")) == name


@pytest.mark.parametrize("value", [
    "[::1]evil.com", "[::1]:8000.evil.com", "[::1]:99999", "[::1", "::1", "127.0.0.1:8000@evil.com",
    "localhost:80a",
    "127.0.0.1:8000, evil.com", "127.0.0.1:8000/evil", "\xec\x95\x88", "h\xe9st", "", ":80", "[]", "[:::]",
    "[127.0.0.1]",
    "[fe80::1%25x]",
    "a b", "localhost:80:80", "localhost:65536", "localhost:" + "0" * 5000, "localhost:-1", "a%4", "user@localhost",
    "[1::2::3]",
])
def test_an_invalid_host_is_400(value):
    """RFC 9112 §3.2: 400 for a Host with an invalid field value (B172)."""
    assert status_of(host_name, fields_of(f"Host: {value}")) == 400


@pytest.mark.parametrize(("name", "allowed"), [
    ("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("192.168.1.7", True), ("0.0.0.0", True),
    ("mcp.example", True),
    ("evil.example", False), ("127.0.0.1.evil.com", False), ("evil.com", False), ("sub.mcp.example", False),
    ("localhost.evil.com", False), ("xlocalhost", False), ("127.1", False), ("0177.0.0.1", False),
    ("256.0.0.1", False),
    ("2130706433", False), ("", False), ("mcp.example.", False), ("[evil]", False),
])
def test_a_host_is_this_machine_an_address_or_listed(name, allowed):
    """MUST (Streamable HTTP › Security & Endpoint): prevent DNS rebinding, which needs a DNS name (B172, B176)."""
    assert host_allowed(name, ["mcp.example"]) is allowed


@pytest.mark.parametrize("origin", [
    "http://localhost", "https://localhost:3000", "http://127.0.0.1:1", "http://[::1]:65535", "https://127.0.0.1",
    "https://app.example", "https://app.example:8443", "vscode-webview://abc",
])
def test_origins_of_this_machine_and_listed_ones_are_allowed(origin):
    """MUST (Streamable HTTP › Security & Endpoint): validate the Origin header."""
    assert origin_allowed(origin,
    ["https://app.example", "https://app.example:8443", "vscode-webview://abc", "null"])


@pytest.mark.parametrize("origin", [
    "null", "", "http://", "http:///", "//127.0.0.1:8000", "127.0.0.1:8000", "javascript:alert(1)",
    "http://127.0.0.1:8000/path",
    "http://user@127.0.0.1:8000", "http://127.0.0.1:8000 http://evil.example", "http://evil.example:8000",
    "http://localhost.evil",
    "http://localhost:3000.evil.com", "http://localhost@evil.com", "http://127a0b0c1", "http://127.0.0.1.evil.com",
    "http://localhost:",
    "http://::1",
    "http://localhost:65536", "http://localhost:999999", "http://localhost:3000\n", "http://localhost?x",
    "http://localhost#x",
    "ftp://localhost", "http://localhost, http://localhost", "http://localhost:\u0663", "http://[::1]x",
    "http://127.0.0.2",
    "https://app.example.evil.com", "https://app.example/", "http://app.example", "https://app.example:8444",
    "app.example",
    "https://xapp.example", "file://", "http://localhost:+1", "http://0x7f.1", "http:\\\\localhost",
])
def test_other_origins_are_refused(origin):
    """MUST (Streamable HTTP › Security & Endpoint): present and invalid is 403 (B174, B176)."""
    assert not origin_allowed(origin, ["https://app.example", "https://app.example:8443", "null"])


# ---- Sending Messages: Accept, Content-Type; Authorization ----


@pytest.mark.parametrize("lines", [
    ["application/json, text/event-stream"], ["text/event-stream,application/json"], ["*/*"],
    ["application/*, text/*"],
    ["Text/Event-Stream;q=0.9 ,\tAPPLICATION/JSON; charset=utf-8"], ["application/json", "text/event-stream"],
    [", application/json,, text/event-stream,"], ["text/html, */*;q=0.001"],
    ["application/json;Q=1.000 , text/*;q=0.5"],
    ["text/*;q=0, text/event-stream, application/json"], ["*/*;q=0, application/json, text/event-stream;q=1."],
    ['text/html;x=",;\\"", text/event-stream, application/json'],
    ["application/json;;q=1;, text/event-stream ; a=b ; q=0.1"],
    ["application/json;v=1;q=0, application/json, text/event-stream"],
    ["nonsense, application/json, text/event-stream"],
])
def test_accept_covers_both_media_types_in_any_legal_spelling(lines):
    """RFC 9110 §12.5.1: ranges, parameters, weights, case, empty elements, several field lines (B026)."""
    fields = fields_of(*[f"Accept: {line}" for line in lines])
    assert accepts(fields, "application/json")
    assert accepts(fields, "text/event-stream")


@pytest.mark.parametrize("lines", [
    [], [""], ["application/json"], ["text/html"], ["*/event-stream"], ["text/event-stream;q=0"],
    ["text/event-stream;Q=0"],
    ["text/event-stream;q=0.000, */*"],
    ["text/*;q=0, */*"], ["text/event-streams"], ["xtext/event-stream"], ['text/html;x="text/event-stream"'], ["*"],
    ["text/"],
    ['text/html;x=",text/event-stream,"'], ['application/json;x=", text/event-stream'], ["text/event-stream;q=2"],
    ["text/event-stream;q=0.1234"], ["text/event-stream;q=abc"], ["text/event-stream;q=-1"],
    ["text/event-stream;q"],
    ["text/event-stream;q =1"], ["text /event-stream"], ["text/event-stream q=1"],
    ["application/json;text/event-stream"],
    ["application/json; text/event-stream"], ["text/event-stream;q=\xb9"],
])
def test_accept_that_does_not_cover_a_media_type_says_so(lines):
    """RFC 9110 §12.5.1: the most specific range decides, 0 is a refusal, and what is malformed covers nothing."""
    assert not accepts(fields_of(*[f"Accept: {line}" for line in lines]), "text/event-stream")


@pytest.mark.parametrize("value", [
    "application/json", "Application/JSON", "application/json; charset=utf-8", 'application/json;charset="UTF-8"',
    "application/json ; a=b;charset=Utf-8", "application/json;", 'application/json; a="x;charset=latin-1"',
    "application/json;CHARSET=utf-8",
])
def test_json_may_have_parameters(value):
    """MUST (Streamable HTTP › Sending Messages): the body is JSON; RFC 9110 §8.3.1 for how its type is written."""
    assert is_json(fields_of(f"Content-Type: {value}"))


@pytest.mark.parametrize("lines", [
    [], ["Content-Type:"], ["Content-Type: text/plain; a=application/json"],
    ["Content-Type: text/plain;application/json"],
    ["Content-Type: text/plain, application/json"], ["Content-Type: text/plain", "Content-Type: application/json"],
    ["Content-Type: application/json", "Content-Type: application/json"],
    ["Content-Type: application/json, text/plain"],
    ["Content-Type: application/json; charset=latin-1"], ["Content-Type: application/json;CHARSET=latin-1"],
    ["Content-Type: application/json;charset=utf-8;charset=utf-16"],
    ["Content-Type: application/jsonx"], ["Content-Type: application/ld+json"], ["Content-Type: */*"],
    ["Content-Type: application/json charset=utf-8"], ["Content-Type: application/json; charset"],
    ["Content-Type: json"],
    ["Content-Type: application/json;x=\"a", "Content-Type: b\""], ["Content-Type: \xa0application/json"],
])
def test_anything_else_is_not_json(lines):
    """MUST (Streamable HTTP › Sending Messages): no CORS-simple type passes for JSON (B178)."""
    assert not is_json(fields_of(*lines))


@pytest.mark.parametrize("text", [
    "a/b" + ";    " * 4000 + "!", "a/b;x=" + '"\\' * 8000, '"\\' * 8000, '"' * 9001, "a/b" + " ;" * 8000,
    ";" * 16000, "a/b" + ';x="y"' * 2500 + ",", "," * 16000, "[" * 16000, "%" * 16000,
    "a" * 16000 + "%",
])
def test_a_hostile_value_is_read_in_linear_time(text):
    """Choice: no pattern backtracks, so a field value of any length is answered, not pondered."""
    fields = {name: [text] for name in ("accept", "content-type", "authorization", "host", "origin", "mcp-name")}
    assert not accepts(fields, "text/event-stream")
    assert not is_json(fields)
    assert not origin_allowed(text, ["http://a.example"])
    with pytest.raises(ValueError):
        bearer_name(fields)
    with contextlib.suppress(BadHead):
        host_name(fields)
    with pytest.raises(HeaderMismatch):
        check_name_header(fields, "tools/call", {"name": ""})


@pytest.mark.parametrize(("value", "name"), [
    ("Bearer alice", "alice"), ("bearer alice", "alice"), ("BEARER   a-._~+/Z9==", "a-._~+/Z9=="),
])
def test_a_bearer_token_is_a_name(value, name):
    """RFC 6750 §2.1: "Bearer" 1*SP b64token; RFC 9110 §11.1: the scheme has no case."""
    assert bearer_name(fields_of(f"Authorization: {value}")) == name


@pytest.mark.parametrize("lines", [
    ["Bearer"], ["Bearer "], [""], ["alice"], ["Basic YTpi"], ["Bearer a b"], ["Bearer a, Bearer b"],
    ["Bearer a", "Bearer a"],
    ["Bearer a", "Bearer b"], ["Bearer\ta"], ["Bearer =a"], ["Bearer caf\xe9"], ['Bearer "a"'], ["Bearera"],
    ["Bearer a=b"], ["Bearer ="],
])
def test_another_authorization_is_refused(lines):
    """RFC 6750 §2.1: one b64token, or it is not understood."""
    with pytest.raises(ValueError, match="Bearer"):
        bearer_name(fields_of(*[f"Authorization: {line}" for line in lines]))


def test_without_authorization_there_is_no_name():
    """Choice: a request without Authorization is anonymous."""
    assert bearer_name({}) is None


def test_canonical_means_what_a_standard_encoder_writes():
    """MUST (Streamable HTTP › Value Encoding): only payloads that an encoder writes are taken."""
    letters = "AQwg/+9z="
    for payload in (a + b + c + d for a in letters for b in letters for c in letters for d in letters):
        try:
            canonical = base64.b64encode(base64.b64decode(payload, validate=True)).decode() == payload
            text = base64.b64decode(payload, validate=True).decode() if canonical else None
        except ValueError:
            text = None
        try:
            assert decode_value(f"=?base64?{payload}?=") == text
        except HeaderMismatch:
            assert text is None


def test_arguments_arrive_as_json_parsed_them():
    """MUST (Streamable HTTP › Server Validation): the body's escapes do not matter, only what they stand for."""
    arguments = json.loads(r'{"region": "\u0065u", "count": 4.20e1, "flag": true, "opts": {"tenant": "\u00e9"}}')
    check_all(fields_of(*TO_ROUTE, EU, "Mcp-Param-Count: 42", "Mcp-Param-Flag: true",
    "Mcp-Param-Tenant: =?base64?w6k=?="),
              call("route", arguments))


# ------------------------------------------------------------------------------------------- the verdict on a head

NOBODY = Policy(frozenset(), frozenset())
FIELDS = ["Host: 127.0.0.1", "Content-Type: application/json", "Accept: application/json, text/event-stream",
          "Content-Length: 2"]


def head_of(*changes, start="POST /mcp HTTP/1.1"):
    """The octets of a good head with other fields: one replaces those of its name, "Name:" alone leaves it out."""
    names = [change.partition(":")[0] for change in changes]
    lines = [line for line in FIELDS if line.partition(":")[0] not in names]
    return "\r\n".join([start, *lines, *(one for one in changes if not one.endswith(":"))]).encode("latin-1")


@pytest.mark.parametrize(("line", "value"), [
    ("Mcp-Name: get\x01weather", "get\x01weather"), ("mcp-param-region: \x7f", "\x7f"), ("MCP-METHOD: \x0bx", "\x0bx")])
def test_a_control_in_a_mirrored_header_is_kept_for_the_comparison(line, value):
    """MUST (Streamable HTTP › Server Validation): invalid characters are a HeaderMismatch, so HTTP lets them pass."""
    assert [values for name, values in read_head(head_of(line)).fields.items() if name.startswith("mcp-")] == [[value]]


@pytest.mark.parametrize(("target", "host", "path"), [
    ("/mcp?x=1", "127.0.0.1", "/mcp"), ("http://evil.example/mcp", "evil.example", "/mcp"),
    ("HTTP://LocalHost:3000/mcp?a", "localhost", "/mcp"), ("https://[::1]:1/mcp", "[::1]", "/mcp"),
    ("http://a", "a", "/"), ("http://a?x", "a", "/"), ("*", "127.0.0.1", "*"), ("a:1", "127.0.0.1", "a:1")])
def test_the_host_of_an_absolute_target_counts_instead_of_the_field(target, host, path):
    """RFC 9112 §3.2.2: MUST ignore the received Host field and replace it by the target's host information."""
    head = read_head(head_of(start=f"POST {target} HTTP/1.1"))
    assert (head.host, head.path) == (host, path)


@pytest.mark.parametrize("target", [
    "http:///mcp", "http://", "http://a:99999/", "http://u@a/mcp", "http://:80/mcp", "http://[::g]/mcp"])
def test_a_target_without_a_right_host_is_400(target):
    """RFC 9110 §4.2.1: MUST reject an http URI with an empty host as invalid."""
    with pytest.raises(BadHead) as caught:
        read_head(head_of(start=f"POST {target} HTTP/1.1"))
    assert (caught.value.status, caught.value.rule) == (400, "rfc9112 §3.2")
    assert "is not one host and port" in str(caught.value)


@pytest.mark.parametrize(("fields", "start", "status", "words"), [
    (["Origin: http://evil.example"], "", 403, "This Origin is not allowed here"),
    (["Host: evil.example"], "", 403, "This Host is not served here"),
    ([], "POST http://evil.example/mcp HTTP/1.1", 403, "This Host is not served here"),
    ([], "POST / HTTP/1.1", 404, "POST your MCP messages to /mcp"), ([], "GET /mcp HTTP/1.1", 405, "by POST"),
    (["Content-Type: text/plain"], "", 415, "must be application/json"),
    (["Content-Encoding: gzip"], "", 415, "Content-Encoding is not served here"),
    (["Content-Encoding: identity, br"], "", 415, "Content-Encoding is not served here"),
    (["Accept: application/json"], "", 406, "must list application/json and text/event-stream"),
    (["Authorization: Basic eA=="], "", 401, "not one `Bearer <name>`"),
    (["Content-Type:", "Accept:", "Authorization: x"], "GET / HTTP/1.1", 404, "Nothing here")])
def test_the_first_check_that_fails_is_the_verdict(fields, start, status, words):
    """Choice: rungs 2 to 7 in their order; each refusal says what would be right and names its rule."""
    with pytest.raises(Refused) as caught:
        check_head(head_of(*fields, start=start or "POST /mcp HTTP/1.1"), NOBODY)
    assert caught.value.status == status and words in str(caught.value) and caught.value.rule


@pytest.mark.parametrize(("fields", "user"), [
    ([], "anonymous"), (["Authorization: bearer alice"], "alice"), (["Content-Encoding: identity"], "anonymous"),
    (["Origin: http://localhost:5173"], "anonymous"), (["Origin: https://app.example.com"], "anonymous"),
    (["Host: app.example.com:1"], "anonymous")])
def test_a_good_head_gives_the_name_of_its_user(fields, user):
    """Choice: demo authentication, in which the bearer token is the user's name."""
    policy = Policy(frozenset([parse_origin("https://App.example.com:443/")]), frozenset(["app.example.com"]))
    assert check_head(head_of(*fields), policy) == user


@pytest.mark.parametrize(("text", "origin"), [
    ("https://app.example.com/", "https://app.example.com"), ("http://a:80", "http://a"), ("http://a:81", "http://a:81"),
    ("HTTPS://A:443/", "https://a"), ("https://a:80", "https://a:80"), ("http://[::1]:80", "http://[::1]"),
    ("app://x", "app://x")])
def test_an_origin_is_brought_to_the_form_in_which_browsers_send_it(text, origin):
    """RFC 6454 §6.2: lower case, and no port where it is the scheme's own."""
    assert parse_origin(text) == origin


@pytest.mark.parametrize("text", [
    "", "*", "null", "https://", "https://*.example.com", "https://a/b", "https://a:x", "a", "https://a b", "//a",
    "https://a:99999", "https://u@a", "https://a//"])
def test_what_is_no_origin_is_refused_with_an_example(text):
    """Choice: an option that can never match is refused where somebody reads why."""
    with pytest.raises(ValueError, match=r"is not an origin such as https://app\.example\.com"):
        parse_origin(text)

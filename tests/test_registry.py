"""Another server from the same parts: what a registration takes, and what becomes of a tool's outcome."""

import json
import subprocess
import sys

import pytest
from support import PATIENCE, ROOT, Listener, alive, by_hand, call_tool, message, respond

from reference_server import (
    TEXT,
    Rejection,
    Server,
    ToolError,
    compile_schema,
    demo_server,
    input_required,
    match_template,
    takes,
)

NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


@pytest.fixture(scope="module")
def server():
    """A server of one tool for each way in which a tool can end."""
    with alive(Server("another", "2.0")) as server:
        add_outcomes(server)
        yield server


def add_outcomes(server):
    @server.tool("double", "Doubles a number.", takes(number=INTEGER))
    def double(arguments, request):
        return str(2 * arguments["number"])

    @server.tool("refuse", "Fails in a way that a model can act on.", takes())
    def refuse(arguments, request):
        raise ToolError("Try again with a larger number.")

    @server.tool("crash", "Has a fault.", takes())
    def crash(arguments, request):
        raise KeyError("the password is swordfish")

    @server.tool("reject", "Raises a protocol error.", takes())
    def reject(arguments, request):
        raise Rejection(-32602, "Not like this", {"why": "because"})

    @server.tool("sample", "Needs a capability.", takes())
    def sample(arguments, request):
        request.require({"sampling": {"tools": {}}})
        return "It may be sampled."

    @server.tool("measure", "Gives back what it is given, as data.", takes(value={}), output_schema=takes(value=NUMBER))
    def measure(arguments, request):
        return {"structuredContent": {"value": arguments["value"]}}

    @server.tool(
        "loose",
        "Checks its own arguments.",
        {"type": "object", "oneOf": [{"required": ["a"]}]},
        checks_own_arguments=True,
    )
    def loose(arguments, request):
        return f"got {sorted(arguments)}"

    @server.tool("whole", "Gives a whole result.", takes(), title="A whole one")
    def whole(arguments, request):
        return {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "isError": False}


def test_a_server_is_built_from_the_same_parts_in_a_few_lines():
    """Choice: the registry is for learners and tests too, so that three lines make a tool that is served."""
    with alive(Server("tiny", "0.1", instructions="Say hello.")) as server:

        @server.tool("hello", "Says hello.", takes(name=TEXT))
        def hello(arguments, request):
            return f"Hello, {arguments['name']}!"

        assert call_tool(server, "hello", {"name": "Ada"})["result"] == {
            "resultType": "complete",
            "content": [{"type": "text", "text": "Hello, Ada!"}],
            "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "tiny", "version": "0.1"}},
        }
        discovered = respond(server, "server/discover")["result"]
        assert discovered["instructions"] == "Say hello."
        assert discovered["capabilities"].keys() == {"logging", "extensions", "tools"}
        for method in (
            "prompts/list",
            "resources/list",
            "resources/templates/list",
            "completion/complete",
            "resources/read",
        ):
            assert respond(server, method)["error"]["code"] == -32601, method


# ---- what registration refuses ----


@pytest.mark.parametrize(
    "annotated",
    [
        {"type": "string", "x-mcp-header": ""},
        {"type": "string", "x-mcp-header": "a b"},
        {"type": "string", "x-mcp-header": "é"},
        {"type": "number", "x-mcp-header": "A"},
        {"type": "array", "x-mcp-header": "A"},
        {"type": "string", "x-mcp-header": 1},
        {"type": "array", "items": {"type": "string", "x-mcp-header": "A"}},
    ],
)
def test_a_tool_with_a_bad_header_annotation_is_refused(annotated):
    """MUST (Tools › x-mcp-header): a token, on a primitive parameter that is statically reachable."""
    with alive(Server("s", "1")) as server, pytest.raises(ValueError, match="x-mcp-header"):
        server.tool("t", "", takes(a=annotated))


def test_two_parameters_cannot_be_mirrored_into_one_header():
    """MUST (Tools › x-mcp-header): case-insensitively unique among all values in the inputSchema."""
    one, two = ({"type": "string", "x-mcp-header": name} for name in ("Region", "REGION"))
    with alive(Server("s", "1")) as server, pytest.raises(ValueError):
        server.tool("t", "", takes(a=one, b=two))


@pytest.mark.parametrize("uri", ["", "README.md", "/etc/passwd", "//host/x", "1a://x", "a b://x", "file:///a b",
                                 "file:///é", "file:///{name}", "file:///%zz", "file:///a\n", "file:///a%", None])
def test_a_resource_without_a_uri_is_refused(uri):
    """MUST (Resources › Custom URI Schemes): in accordance with RFC 3986: a scheme, a colon, no stray characters."""
    with alive(Server("s", "1")) as server:
        with pytest.raises(ValueError, match=r"^uri must"):
            server.resource(uri, "r")
        assert server.resources == {}


@pytest.mark.parametrize("uri", ["file:///a", "urn:isbn:1", "x:", "a+b-c.d://[::1]:1/~a?b=c&d#e", "x://%C3%A9"])
def test_a_resource_may_have_any_uri(uri):
    """MAY (Resources › Custom URI Schemes): any scheme."""
    with alive(Server("s", "1")) as server:
        server.resource(uri, "r")(lambda uri, request: uri)
        assert respond(server, "resources/read", {"uri": uri})["result"]["contents"][0]["text"] == uri


@pytest.mark.parametrize("template", [
    "{name}", "/{name}", "{scheme}://x", "file:///{+path}", "file:///{#x}", "file:///{?q}", "file:///{&q}",
    "file:///{/x}", "file:///{;x}", "file:///{.x}", "file:///{a,b}", "file:///{a*}", "file:///{a:3}", "file:///{a",
    "file:///a}", "file:///{}", "file:///{{a}}", "file:///{ a }", "file:///{a}/{a}", "file:///{é}", "file:///{a} b",
])
def test_a_template_that_is_not_simple_or_can_never_match_is_refused(template):
    """RFC 6570 §1.2: of its four levels, `{name}` alone (level 1) can be read back from a URI for certain."""
    with alive(Server("s", "1")) as server:
        with pytest.raises(ValueError, match=r"uri must|twice"):
            server.resource_template(template, "t")
        assert server.templates == {}


MATCHES = [
    ("file:///{name}.{ext}", "file:///a.b", {"name": "a", "ext": "b"}),
    ("file:///{name}.{ext}", "file:///a.tar.gz", {"name": "a.tar", "ext": "gz"}),
    ("file:///{name}.{ext}", "file:///a..gz", {"name": "a.", "ext": "gz"}),
    ("file:///{name}.{ext}", "file:///.gz", None),
    ("file:///{name}.{ext}", "file:///a.", None),
    ("file:///{name}.{ext}", "file:///a/b.c", None),
    ("file:///{name}.{ext}", "file:///a.b/", None),
    ("x:{a}{b}", "x:123", {"a": "12", "b": "3"}),
    ("x:{a}{b}", "x:1", None),
    ("x:{a}-{b}-{c}", "x:1-2-3-4", {"a": "1-2", "b": "3", "c": "4"}),
    ("x:{a}-{b}-{c}", "x:1--3", None),
    ("x:{a}ab", "x:abab", {"a": "ab"}),
    ("x:{a}ab", "x:ab", None),
    ("x:ab{a}", "x:abab", {"a": "ab"}),
    ("x:ab{a}", "x:ab", None),
    ("x:ab{a}ba", "x:aba", None),
    ("x://{h}/p/{a}", "x://h/p/%C3%A9", {"h": "h", "a": "é"}),
    ("x://{h}/p/{a}", "x://h/q/1", None),
    ("x:fixed", "x:fixed", {}),
    ("x:fixed", "x:fixed2", None),
    ("x:fixed", "x:", None),
    ("x:{a}", "y:1", None),
    ("x:{a}", "x:a%2Fb", None),
    ("x:{a}", "x:%2e%2e", None),
    ("x:{a}", "x:%ff", None),
    ("x:{a}.txt", "x:..txt", None),
]


@pytest.mark.parametrize(("template", "uri", "values"), MATCHES)
def test_a_template_gives_the_first_variables_the_most(template, uri, values):
    """RFC 6570 §1.4: where the inverse of an expansion is not unique, this one is as a greedy pattern would have it."""
    assert match_template(template, uri) == values


SLOW = """
from reference_server import match_template
for template in ("file:///{name}.{ext}", "file:///{a}.{b}.{c}.{d}", "file:///{a}a{b}a{c}b", "file:///{a}{b}{c}{d}/"):
    for unit in (".", "a", "/", "a.", "%2e", "%ff"):
        for end in ("", "/", "b", "."):
            match_template(template, "file:///" + 100_000 * unit + end)
print("done")
"""


def test_no_uri_makes_the_process_stand_still():
    """Choice: a template is matched in linear time on any input, because others wait meanwhile."""
    command = [sys.executable, "-c", SLOW]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_titles_and_icons_are_listed_where_the_schema_has_them():
    """MAY (Tools › Tool), MAY (Overview › icons): for tools, resources, templates, prompts and the server itself."""
    icons = [{"src": "data:image/svg+xml;base64,PHN2Zy8+", "mimeType": "image/svg+xml", "sizes": ["any"]}]
    about = {"title": "A title", "icons": icons}
    with alive(Server("s", "1", **about)) as server:
        server.tool("t", "", takes(), **about)(print)
        server.resource("x://1", "r", **about)(print)
        server.resource_template("x:{a}", "m", **about)(print)
        server.prompt("p", "", **about)(print)
        for method, key in (("tools/list", "tools"), ("resources/list", "resources"), ("prompts/list", "prompts"),
                            ("resources/templates/list", "resourceTemplates")):
            result = respond(server, method)["result"]
            assert result[key][0].items() >= about.items(), method
            info = result["_meta"]["io.modelcontextprotocol/serverInfo"]
            assert info == {"name": "s", "version": "1"} | about


def test_every_list_comes_in_pages_if_it_is_to():
    """MUST (Pagination › Operations Supporting Pagination): resources, templates, prompts and tools alike."""
    with alive(Server("s", "1")) as server:
        server.page_sizes = dict.fromkeys(("tools", "resources", "resourceTemplates", "prompts"), 2)
        for number in range(3):
            server.tool(f"t{number}", "", takes())(print)
            server.resource(f"x:{number}", f"r{number}")(print)
            server.resource_template(f"x{number}:{{a}}", f"m{number}")(print)
            server.prompt(f"p{number}", "")(print)
        for method, key in (("tools/list", "tools"), ("resources/list", "resources"), ("prompts/list", "prompts"),
                            ("resources/templates/list", "resourceTemplates")):
            first = respond(server, method)["result"]
            second = respond(server, method, {"cursor": first["nextCursor"]})["result"]
            assert [len(first[key]), len(second[key]), "nextCursor" in second] == [2, 1, False], method


def test_changes_are_offered_where_something_can_change():
    """SHOULD (Prompts › List Changed Notification): by servers that declared `listChanged`; others do not offer it."""
    wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
    with alive(demo_server(0)) as demo, Listener(demo, wanted) as listener:
        capabilities = respond(demo, "server/discover")["result"]["capabilities"]
        offered = [capabilities[kind].get("listChanged", False) for kind in ("tools", "prompts", "resources")]
        assert offered == [True, False, False]
        assert listener.first["params"]["notifications"] == {"toolsListChanged": True}


def test_what_is_quick_says_so():
    """Choice: what neither waits nor touches the state is marked, so that a transport may answer it at once."""
    with alive(demo_server(0)) as demo:
        quick = {name for name, tool in demo.tools.items() if tool.quick}
        assert quick == {"get_weather", "get_weather_data", "execute_sql", "book_flight", "search", "beta_search"}
        assert {uri.rpartition("/")[2] for uri, one in demo.resources.items() if one.quick} == {
            "settings", "README.md", "CHANGES.md", "LICENSE"}
        tables = demo.templates, demo.prompts, demo.completions
        assert all(one.quick for table in tables for one in table.values())
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(print)
        server.resource("x:1", "r")(print)
        server.completion("ref/prompt", "p", "a")(print)
        assert not any(one.quick for table in (server.tools, server.resources, server.completions)
                       for one in table.values())


# ---- how a tool's call ends ----


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "arguments.number is required"),
        ({"number": "2"}, "arguments.number must be of type integer"),
        ({"number": True}, "arguments.number must be of type integer"),
        ({"number": None}, "arguments.number must be of type integer"),
    ],
)
def test_wrong_arguments_are_a_tool_execution_error_that_names_the_argument(server, arguments, problem):
    """MUST (Tools › Error Handling): input validation errors are results with isError, for the model."""
    result = call_tool(server, "double", arguments)["result"]
    assert result["isError"] is True
    assert result["content"] == [{"type": "text", "text": problem}]


def test_an_integer_may_be_written_with_a_fraction_of_zero(server):
    """Choice: 42.0 is an integer to JSON Schema 2020-12."""
    assert call_tool(server, "double", {"number": 21.0})["result"]["content"][0]["text"] == "42.0"


def test_a_failure_for_the_model_is_a_result(server):
    """MUST (Tools › Error Handling): tool execution errors are reported in results with `isError: true`."""
    result = call_tool(server, "refuse")["result"]
    assert (result["isError"], result["content"][0]["text"]) == (True, "Try again with a larger number.")


def test_a_fault_of_the_tool_is_an_internal_error_without_detail(server, capsys):
    """Choice: the client learns nothing of a fault; the traceback is for the operator, on stderr."""
    assert call_tool(server, "crash")["error"] == {"code": -32603, "message": "Internal error"}
    assert "KeyError: 'the password is swordfish'" in capsys.readouterr().err


def test_a_tool_can_reject_its_request(server):
    """MUST (Tools › Error Handling): protocol errors are JSON-RPC errors."""
    assert call_tool(server, "reject")["error"] == {
        "code": -32602,
        "message": "Not like this",
        "data": {"why": "because"},
    }


@pytest.mark.parametrize(
    ("declared", "served"),
    [
        ({}, False),
        ({"sampling": {}}, False),
        ({"sampling": {"context": {}}}, False),
        ({"elicitation": {}}, False),
        ({"sampling": {"tools": {}}}, True),
        ({"sampling": {"tools": {"x": 1}, "context": {}}}, True),
    ],
)
def test_a_tool_can_require_a_capability_of_the_client(server, declared, served):
    """MUST (Overview › _meta): MissingRequiredClientCapabilityError lists the missing capabilities, as an object."""
    answer = call_tool(server, "sample", capabilities=declared)
    if served:
        assert answer["result"]["content"][0]["text"] == "It may be sampled."
    else:
        assert answer["error"]["code"] == -32021
        assert answer["error"]["data"] == {"requiredCapabilities": {"sampling": {"tools": {}}}}


def test_structured_content_conforms_to_the_output_schema(server, capsys):
    """MUST (Tools › Output Schema): provide structured results that conform to this schema."""
    assert call_tool(server, "measure", {"value": 1.5})["result"]["structuredContent"] == {"value": 1.5}
    for value in ("1.5", None, True, [1]):
        assert call_tool(server, "measure", {"value": value})["error"]["code"] == -32603, value
    assert "structuredContent.value must be of type number" in capsys.readouterr().err


@pytest.mark.parametrize("outcome", ["text", {"content": [{"type": "text", "text": "x"}]}, {}, {"isError": False}])
def test_a_declared_output_schema_is_kept_by_text_too(outcome, capsys):
    """MUST (Tools › Output Schema): structured results; text alone breaks the promise like a value that is wrong."""
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes(), output_schema=takes(a=NUMBER))(lambda arguments, request: outcome)
        assert call_tool(server, "t")["error"] == {"code": -32603, "message": "Internal error"}
    assert "ValueError: structuredContent is missing" in capsys.readouterr().err


def test_a_failure_or_a_question_needs_no_structured_content():
    """MUST (Tools › Error Handling): isError results, and questions, are no results that a schema describes."""

    def ends(arguments, request):
        if arguments["how"] == "raise":
            raise ToolError("no")
        return {"content": [], "isError": True} if arguments["how"] == "return" else input_required(None, "s")

    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes(how=TEXT), output_schema=takes(a=NUMBER))(ends)
        assert call_tool(server, "t", {"how": "raise"})["result"]["isError"] is True
        assert call_tool(server, "t", {"how": "return"})["result"]["isError"] is True
        assert call_tool(server, "t", {"how": "ask"})["result"]["resultType"] == "input_required"


PICTURE = {"type": "image", "data": "AP8=", "mimeType": "image/png"}
NO_BASE64 = ["no base64!", "AP8", "AP8=\n", "AP8==", "=", "A", "-_8=", 1, None]
BROKEN = [
    *[PICTURE | {"data": data} for data in NO_BASE64],
    *[{"type": "audio", "mimeType": "audio/wav", "data": data} for data in NO_BASE64],
    *[{"type": "resource", "resource": {"uri": "x:1", "blob": data}} for data in NO_BASE64],
    {"type": "image", "data": "AP8="},
    {"type": "image", "mimeType": "image/png"},
    {"type": "text"},
    {"type": "text", "text": 1},
    {"type": "resource_link", "name": "n", "uri": "no uri"},
    {"type": "resource_link", "uri": "x:1"},
    {"type": "resource", "resource": {"text": "t"}},
    {"type": "video"},
    {},
    "text",
]


@pytest.mark.parametrize("block", BROKEN, ids=repr)
def test_content_that_is_none_is_its_authors_fault(block, capsys):
    """MUST (Prompts › Image Content): base64-encoded; what is not is -32603 and a traceback for the operator."""
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(lambda arguments, request: {"content": [PICTURE, block]})
        server.prompt("p", "")(lambda arguments, request: [{"role": "user", "content": block}])
        server.resource("x:1", "r")(lambda uri, request: [{"uri": "x:1", "blob": "AP8="} | block.get("resource", block)]
                                    if isinstance(block, dict) else [block])
        assert call_tool(server, "t")["error"]["code"] == -32603
        assert respond(server, "prompts/get", {"name": "p"})["error"]["code"] == -32603
        if isinstance(block, str) or "blob" in block.get("resource", ()):
            assert respond(server, "resources/read", {"uri": "x:1"})["error"]["code"] == -32603
    assert "ValueError: content[1]" in capsys.readouterr().err


def test_content_of_every_kind_is_sent():
    """MUST (Tools › Tool Result): text, images, audio, resource links and embedded resources."""
    blocks = [
        {"type": "text", "text": ""}, PICTURE, {"type": "audio", "data": "", "mimeType": "audio/wav"},
        {"type": "resource_link", "uri": "x:1", "name": "n", "annotations": {"priority": 1}},
        {"type": "resource", "resource": {"uri": "x:1", "text": "t"}},
    ]
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(lambda arguments, request: {"content": blocks})
        assert call_tool(server, "t")["result"]["content"] == blocks


def test_structured_content_comes_as_text_too(server):
    """SHOULD (Tools › Structured Content): also return the serialized JSON in a TextContent block."""
    assert call_tool(server, "measure", {"value": 2})["result"]["content"] == [{"type": "text", "text": '{"value": 2}'}]


def test_a_tool_that_checks_its_own_arguments_gets_them_as_they_are(server):
    """Choice: what the checker cannot check, the tool does."""
    assert call_tool(server, "loose", {"b": 1})["result"]["content"][0]["text"] == "got ['b']"


def test_a_result_object_is_passed_on_whole(server):
    """MUST (Overview › Result Responses): the result includes a resultType."""
    result = call_tool(server, "whole")["result"]
    assert result["resultType"] == "complete"
    assert [block["text"] for block in result["content"]] == ["a", "b"]
    assert result["isError"] is False


def test_a_title_is_listed(server):
    """MAY (Tools › Tool): a human-readable name beside the unique one."""
    listed = {tool["name"]: tool for tool in respond(server, "tools/list")["result"]["tools"]}
    assert listed["whole"]["title"] == "A whole one"
    assert "title" not in listed["double"]


# ---- the demo's tools ----

CHANGES_NOTHING = {"build_report", "get_weather", "get_weather_data", "execute_sql", "search", "beta_search"}
RUNS_TWICE_LIKE_ONCE = {"connect_billing", "finish_billing", "touch_config"}
CALLS = {
    "build_report": {"month": "May"},
    "get_weather": {"location": "Oslo"},
    "get_weather_data": {"location": "Oslo"},
    "execute_sql": {"region": "eu", "query": "SELECT 1"},
    "create_cart": {},
    "add_to_cart": {"cartId": None, "sku": "book"},
    "book_flight": {"to": "Oslo", "date": "9999-12-31"},
    "search": {"query": "e"},
    "place_hold": {"title": "Emma"},
    "create_repo": {"repo": "mcp"},
    "connect_billing": {},
    "finish_billing": {"visit": "visit_0"},
    "toggle_beta_tool": {},
    "touch_config": {},
    "beta_search": {"query": "e"},
}


def test_every_demo_tool_says_honestly_what_it_changes(demo):
    """Choice: annotations are hints, and these are true: a tool that writes is not called read-only."""
    assert demo.tools.keys() >= CHANGES_NOTHING | RUNS_TWICE_LIKE_ONCE
    for name, tool in demo.tools.items():
        hints = tool.definition["annotations"]
        assert hints["readOnlyHint"] is (name in CHANGES_NOTHING), name
        assert hints["openWorldHint"] is False, name
        if name not in CHANGES_NOTHING:
            assert hints["destructiveHint"] is False, name
            assert hints["idempotentHint"] is (name in RUNS_TWICE_LIKE_ONCE), name


def test_every_demo_tool_with_structured_content_declares_its_schema(demo):
    """MUST (Tools › Output Schema): a declared schema is kept; whatever is structured declares one."""
    assert CALLS.keys() == demo.tools.keys()
    cart = call_tool(demo, "create_cart")["result"]["structuredContent"]["cartId"]
    for name, tool in demo.tools.items():
        arguments = {key: cart if key == "cartId" else value for key, value in CALLS[name].items()}
        result = call_tool(demo, name, arguments, capabilities={"elicitation": {"form": {}, "url": {}}}).get(
            "result", {}
        )
        schema = tool.definition.get("outputSchema")
        assert ("structuredContent" in result) is (schema is not None), name
        if schema:
            assert compile_schema(schema)(result["structuredContent"]) is None, name
            assert result["structuredContent"].keys() == schema["properties"].keys(), name
            assert json.loads(result["content"][0]["text"]) == result["structuredContent"], name


# ---- the server with everything ----

EVERYTHING = [sys.executable, "tests/official/conformance_server.py"]


def talk(*options, calls=()):
    """The results of these calls, over its standard input and output."""
    lines = "".join(json.dumps(message(method, params, number)) + "\n" for number, (method, params) in enumerate(calls))
    done = subprocess.run([*EVERYTHING, *options], input=lines, cwd=ROOT, capture_output=True, text=True,
                          timeout=PATIENCE, check=True)
    answers = {one["id"]: one["result"] for one in map(json.loads, done.stdout.splitlines())}
    return [answers[number] for number in range(len(calls))]


def test_the_server_with_everything_has_every_kind_of_content():
    """MUST (Tools › Tool Result): text, image, audio, resource link, embedded resource; and structured values."""
    names = ["test_multiple_content_types", "test_audio_content", "test_resource_link", "test_array_output",
             "test_number_output", "test_nested_headers"]
    calls = [("tools/call", {"name": name, "arguments": {}}) for name in names]
    *results, prompt = talk("--stdio", calls=[*calls, ("prompts/get", {"name": "test_prompt_with_several_messages"})])
    kinds = {block["type"] for result in results for block in result["content"]}
    assert kinds == {"text", "image", "audio", "resource_link", "resource"}
    assert [type(result.get("structuredContent")) for result in results[3:5]] == [list, int]
    assert {one["role"] for one in prompt["messages"]} == {"user", "assistant"}
    assert len(prompt["messages"]) > 2


LISTS = ["tools/list", "prompts/list", "resources/list", "resources/templates/list"]


@pytest.fixture(scope="module")
def first_pages():
    """Of each list."""
    return dict(zip(LISTS, talk("--stdio", "--page-size", "1", calls=[(one, {}) for one in LISTS]), strict=True))


@pytest.mark.parametrize("method", LISTS)
def test_the_server_with_everything_pages_every_list(method, first_pages):
    """MUST (Pagination › Operations Supporting Pagination): a page of one is enough to see a client follow."""
    page = first_pages[method]
    assert len(next(value for value in page.values() if isinstance(value, list))) == 1
    assert ("nextCursor" in page) is (method != "resources/templates/list")


def test_the_server_with_everything_explains_itself():
    """Choice: a client author starts it by hand, so it says how."""
    starts = {("--help",): 0, ("--page-size", "0"): 2, ("--port", "x"): 2}
    for wanted, (status, out, err) in zip(
            starts.values(), by_hand(*((EVERYTHING[1], *options) for options in starts)), strict=True):
        assert status == wanted
        assert "--page-size" in out + err and "Traceback" not in err

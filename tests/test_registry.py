"""Another server from the same parts: what a registration takes, and what becomes of a tool's outcome."""

import json

import pytest
from support import alive, call_tool, respond

from reference_server import TEXT, Rejection, Server, ToolError, compile_schema, demo_server, takes

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

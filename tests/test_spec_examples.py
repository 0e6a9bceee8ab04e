"""Every example of the specification's pages that a server can send or receive; `#n` counts those under a heading.

spec_examples.json holds their facts: names, members and values. Prose is left out ("…"), and so is what the pages
leave out themselves, above all `_meta`; the tests add it. What an example's server offers is registered here, with
the same names.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, TASKS, Listener, Recorder, alive, eventually, meta, octets, respond, running

import reference_server
from reference_server import Rejection, Server, StdioTransport, ToolError, demo_server, elicit, input_required, takes

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "spec_examples.json").read_text(encoding="utf-8"))
META = "io.modelcontextprotocol/"
HAS_TASKS = {"extensions": {TASKS: {}}}
EVERYTHING = HAS_TASKS | {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
ANY = {"type": "object"}

# values that must be the example's own, and members that a server may leave out
EXACT = {
    "jsonrpc",
    "id",
    "method",
    "code",
    "status",
    "resultType",
    "cacheScope",
    "type",
    "role",
    "mimeType",
    "uri",
    "name",
    "mode",
    "isError",
    "structuredContent",
    "requestedSchema",
    "inputSchema",
    "outputSchema",
    "uriTemplate",
    "requiredCapabilities",
    "requested",
}
MAY_BE_MISSING = {
    "icons",
    "title",
    "nextCursor",
    "isError",
    "instructions",
    "statusMessage",
    "pollIntervalMs",
    "description",
    "data",
    "_meta",
}


def check_like(answer: Any, example: Any, place: str = "") -> None:
    """The answer has the example's members, with values of the same type, and for the EXACT ones the same value."""
    if isinstance(example, dict):
        assert isinstance(answer, dict), place
        assert answer.keys() - example.keys() <= {"_meta", "resultType"}, place  # left out of a task's inner result
        assert example.keys() - answer.keys() <= MAY_BE_MISSING, place
        for key in answer.keys() & example.keys() - {"_meta"}:
            if key in EXACT:
                assert answer[key] == example[key], f"{place}.{key}"
            check_like(answer[key], example[key], f"{place}.{key}")
    elif isinstance(example, list):
        assert isinstance(answer, list), place
        for number, item in enumerate(answer if example else ()):
            check_like(item, example[number if len(answer) == len(example) else 0], f"{place}[{number}]")
    else:
        kinds = {int, float} if type(example) in (int, float) else {type(example)}
        assert type(answer) in kinds, place


def send(server: Server, example: str, capabilities: Any = None, channel: Any = None, **instead: Any) -> dict[str, Any]:
    """The response to an example's request, with the metadata that the page leaves out; `instead`: other params."""
    request = EXAMPLES[example]
    params = {
        key: value for key, value in (request["params"] | instead).items() if key != "_meta" and value is not None
    }
    more = {key: value for key, value in request["params"].get("_meta", {}).items() if not key.startswith(META)}
    return respond(
        server, request["method"], params, "alice", request["id"], channel, capabilities=capabilities or {}, **more
    )


def tool_of(server: Server, name: str, result: Any, schema: Any = ANY, **more: Any) -> None:
    """Registers a tool that gives this result."""
    server.tool(name, "…", schema, **more)(lambda arguments, request: result)


@pytest.fixture
def server():
    with alive(Server("examples", "1.0.0", page_size=1)) as server:
        yield server


# ---- capabilities ----

OFFERED = [
    "Prompts › Capabilities #1",
    "Resources › Capabilities #1",
    "Resources › Capabilities #2",
    "Tools › Capabilities #1",
    "Completion › Capabilities #1",
    "Logging › Capabilities #1",
    "Versioning and Compatibility › Extension Negotiation #2",
    "Tasks Extension › Capability Negotiation #2",
]
DECLARED = [
    "Versioning and Compatibility › Extension Negotiation #1",
    "Elicitation › Capabilities #1",
    "Elicitation › Capabilities #2",
    "Tasks Extension › Capability Negotiation #1",
]


@pytest.mark.parametrize("name", OFFERED)
def test_the_demo_declares_the_capability(name):
    """MUST (Discovery › Response): servers that support a feature declare its capability."""
    example = EXAMPLES[name]
    with alive(demo_server(0)) as demo:
        demo.changing |= {"prompts", "resources"}
        declared = respond(demo, "server/discover")["result"]["capabilities"]
    for capability, settings in example.get("result", example)["capabilities"].items():
        assert settings.items() <= declared[capability].items()


@pytest.mark.parametrize("name", DECLARED)
def test_a_client_may_declare_the_capability(server, name):
    """MUST (Overview › _meta): the capabilities that a request declares are the ones it has."""
    example = EXAMPLES[name]
    example = example.get("params", example)
    declared = example.get("capabilities") or example["_meta"][META + "clientCapabilities"]
    server.tool("look", "…", ANY)(lambda arguments, request: json.dumps(request.capabilities))
    result = respond(server, "tools/call", {"name": "look"}, capabilities=declared)["result"]
    assert json.loads(result["content"][0]["text"]) == declared


# ---- definitions and contents ----

TOOLS = [
    "Tools › x-mcp-header #1",
    "Streamable HTTP › Schema Extension #1",
    "Tools › Output Schema #1",
    "Tools › Output Schema #3",
    "Tools › Tool with default 2020-12 schema: #1",
    "Tools › Tool with explicit draft-07 schema: #1",
    "Tools › Tool with no parameters: #1",
]
SCHEMAS = ["Overview › Default dialect (2020-12): #1", "Overview › Explicit dialect (draft-07): #1"]
BLOCKS = [
    "Prompts › Text Content #1",
    "Prompts › Image Content #1",
    "Prompts › Audio Content #1",
    "Prompts › Resource Links #1",
    "Prompts › Embedded Resources #1",
    "Tools › Text Content #1",
    "Tools › Image Content #1",
    "Tools › Audio Content #1",
    "Tools › Resource Links #1",
    "Tools › Embedded Resources #1",
]
CONTENTS = ["Resources › Text Content #1", "Resources › Binary Content #1"]
FORMS = [
    "Elicitation › Requested Schema #1",
    "Elicitation › Requested Schema #2",
    "Elicitation › Requested Schema #3",
    "Elicitation › Requested Schema #4",
    "Elicitation › Requested Schema #5",
    "Elicitation › Requested Schema #6",
    "Elicitation › Requested Schema #7",
]


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_listed_as_it_is_defined(server, name):
    """MUST (Tools › Tool): name, description and schemas, as they were registered."""
    tool = EXAMPLES[name]
    server.tool(
        tool["name"],
        tool["description"],
        tool["inputSchema"],
        title=tool.get("title"),
        output_schema=tool.get("outputSchema"),
        checks_own_arguments="draft-07" in tool["inputSchema"].get("$schema", ""),
    )(print)
    assert respond(server, "tools/list")["result"]["tools"] == [tool]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_of_either_dialect_is_listed_as_it_is(server, name):
    """MUST (Overview › Schema Dialect): with `$schema` or, by default, JSON Schema 2020-12."""
    server.tool("t", "…", EXAMPLES[name], checks_own_arguments=True)(print)
    assert respond(server, "tools/list")["result"]["tools"][0]["inputSchema"] == EXAMPLES[name]


def encoded(example):
    """The example with octets in base64, where the page has words that say so."""
    return {name: "AP8=" if name in ("data", "blob") else value for name, value in example.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_content_of_every_kind_is_passed_on(server, name):
    """MUST (Tools › Tool Result): content blocks of each type; MUST (Prompts › PromptMessage): in messages too."""
    block = encoded(EXAMPLES[name])
    tool_of(server, "t", {"content": [block, block]})
    server.prompt("p", "…")(lambda arguments, request: [{"role": "assistant", "content": block}])
    assert respond(server, "tools/call", {"name": "t"})["result"]["content"] == [block, block]
    assert respond(server, "prompts/get", {"name": "p"})["result"]["messages"] == [
        {"role": "assistant", "content": block}
    ]


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_of_every_kind_are_passed_on(server, name):
    """MUST (Resources › Resource Contents): text, or a base64-encoded blob."""
    contents = encoded(EXAMPLES[name])
    server.resource(contents["uri"], "r", mime_type=contents["mimeType"])(lambda uri, request: [contents])
    assert respond(server, "resources/read", {"uri": contents["uri"]})["result"]["contents"] == [contents]


def test_a_resource_is_listed(server):
    """MUST (Resources › Resource): uri and name. (Of Annotations #1: annotations and titles are not offered.)"""
    example = EXAMPLES["Resources › Annotations #1"]
    server.resource(example["uri"], example["name"], mime_type=example["mimeType"])(print)
    listed = respond(server, "resources/list")["result"]["resources"][0]
    assert listed.items() <= example.items()
    assert listed.keys() == {"uri", "name", "mimeType"}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_may_have_a_field_of_every_kind(server, name):
    """MUST (Elicitation › Requested Schema): flat objects of primitive properties, passed on as they are."""
    server.tool("t", "…", ANY)(lambda arguments, request: input_required({"q": elicit("…", {"field": EXAMPLES[name]})}))
    asked = respond(server, "tools/call", {"name": "t"}, capabilities={"elicitation": {}})["result"]["inputRequests"][
        "q"
    ]
    assert asked["params"]["requestedSchema"]["properties"] == {"field": EXAMPLES[name]}


# ---- lists ----


def register_lists(server: Server) -> None:
    """The one entry of each list that the pages show, and a second one, so that there is a next page."""
    tool = EXAMPLES["Tools › Listing Tools #2"]["result"]["tools"][0]
    server.tool(tool["name"], tool["description"], tool["inputSchema"], title=tool["title"])(print)
    prompt = EXAMPLES["Prompts › Listing Prompts #2"]["result"]["prompts"][0]
    server.prompt(prompt["name"], prompt["description"], prompt["arguments"])(print)
    for resource in (
        EXAMPLES["Resources › Listing Resources #2"]["result"]["resources"][0],
        {"uri": "x://", "name": "x"},
    ):
        server.resource(resource["uri"], resource["name"], mime_type=resource.get("mimeType", ""))(print)
    for template in (
        EXAMPLES["Resources › Resource Templates #2"]["result"]["resourceTemplates"][0],
        {"uriTemplate": "x://{a}", "name": "x"},
    ):
        server.resource_template(template["uriTemplate"], template["name"], mime_type=template.get("mimeType", ""))(
            print
        )


@pytest.mark.parametrize(
    ("request_name", "response_name"),
    [
        ("Tools › Listing Tools #1", "Tools › Listing Tools #2"),
        ("Prompts › Listing Prompts #1", "Prompts › Listing Prompts #2"),
        ("Resources › Listing Resources #1", "Resources › Listing Resources #2"),
        ("Resources › Resource Templates #1", "Resources › Resource Templates #2"),
        ("Pagination › Request Format #1", "Pagination › Response Format #1"),
    ],
)
def test_a_list_looks_like_the_page_says(server, request_name, response_name):
    """MUST (Caching › Cacheable Results): with hints. And -32602 for a cursor of somebody else."""
    register_lists(server)
    assert send(server, request_name)["error"]["code"] == -32602  # the cursor is not one of this server's
    answer, example = send(server, request_name, cursor=None), EXAMPLES[response_name]
    check_like(answer | {"id": example["id"]}, example)
    if "resources/" in EXAMPLES[request_name]["method"]:
        following = send(server, request_name, cursor=answer["result"]["nextCursor"])["result"]
        assert "nextCursor" not in following
        assert following["cacheScope"] == answer["result"]["cacheScope"]


# ---- one request and its response ----


def test_discovery(server):
    """MUST (Discovery › Response): supported versions, capabilities, identity, hints."""
    tool_of(server, "t", "")
    server.resource("x://", "x")(print)
    answer = json.loads(reference_server.respond(server, EXAMPLES["Discovery › Request #1"], Recorder(), "alice").body)
    example = EXAMPLES["Discovery › Response #1"]
    offered, declared = (one["result"].pop("capabilities") for one in (answer, example))
    check_like(answer, example)
    assert declared.keys() <= offered.keys()
    assert answer["result"]["supportedVersions"] == example["result"]["supportedVersions"]
    assert (
        answer["result"]["_meta"][META + "serverInfo"].keys() == example["result"]["_meta"][META + "serverInfo"].keys()
    )


PAIRS = [
    ("Prompts › Getting a Prompt #1", "Prompts › Getting a Prompt #2"),
    ("Resources › Reading Resources #1", "Resources › Reading Resources #2"),
    ("Tools › Calling Tools #1", "Tools › Calling Tools #2"),
    ("Completion › Requesting Completions #1", "Completion › Requesting Completions #2"),
    ("Completion › Requesting Completions #3", "Completion › Requesting Completions #4"),
]


@pytest.mark.parametrize(("request_name", "response_name"), PAIRS)
def test_a_request_is_answered_as_the_page_shows(server, request_name, response_name):
    """MUST (Overview › Result Responses): the same id, a result, its type; the content is the example's own."""
    request, example = EXAMPLES[request_name], EXAMPLES[response_name]
    result = example["result"]
    server.prompt("code_review", "…", [{"name": "code", "required": True}])(
        lambda arguments, request: result["messages"]
    )
    known = request["params"].get("context", {}).get("arguments", {})
    for argument in ("language", "framework"):
        server.completion("ref/prompt", "code_review", argument)(
            lambda value, context, request: result["completion"]["values"] if context == known else []
        )
    server.resource("file:///project/src/main.rs", "main.rs", cache_scope="private")(
        lambda uri, request: result["contents"]
    )
    tool_of(server, "get_weather", {"content": result.get("content")}, takes(location={"type": "string"}))
    answer = send(server, request_name)
    check_like(answer, example)
    for member in ("messages", "contents", "content"):
        assert answer["result"].get(member) == result.get(member)
    if "completion" in result:
        assert answer["result"]["completion"]["values"] == result["completion"]["values"]


@pytest.mark.parametrize(
    ("definition_name", "response_name"),
    [
        ("Tools › Output Schema #1", "Tools › Output Schema #2"),
        ("Tools › Output Schema #3", "Tools › Output Schema #4"),
    ],
)
def test_structured_content_of_any_shape_conforms(server, definition_name, response_name):
    """MUST (Tools › Output Schema): structured results conform; an array is as good as an object."""
    tool, example = EXAMPLES[definition_name], EXAMPLES[response_name]
    given = {key: example["result"][key] for key in ("content", "structuredContent")}
    tool_of(server, tool["name"], given, tool["inputSchema"], output_schema=tool["outputSchema"])
    answer = respond(server, "tools/call", {"name": tool["name"], "arguments": {"location": "x"}}, id=example["id"])
    check_like(answer, example)
    assert {key: answer["result"][key] for key in given} == given


def test_a_basket_is_a_handle(server):
    """Choice: a handle is an ordinary string (Tools › Stateful Tools): #1 creates, #2 names it, #3 uses it."""
    first, result, second = (
        EXAMPLES[name]
        for name in ("Tools › Stateful Tools #1", "Tools › Stateful Tools #2", "Tools › Stateful Tools #3")
    )
    tool_of(server, first["name"], result)
    server.tool(second["name"], "…", takes(basket_id={"type": "string"}, sku={"type": "string"}))(
        lambda arguments, request: "in " + arguments["basket_id"]
    )
    check_like(
        {key: value for key, value in respond(server, "tools/call", first)["result"].items() if key in result}, result
    )
    assert (
        respond(server, "tools/call", second)["result"]["content"][0]["text"]
        == "in " + result["structuredContent"]["basket_id"]
    )


def test_trace_context_does_not_disturb(server):
    """MUST (Overview › _meta): traceparent is reserved for OpenTelemetry. (Overview › _meta #1)"""
    tool_of(server, "get_weather", "sunny", takes(location={"type": "string"}))
    assert send(server, "Overview › _meta #1")["result"]["content"][0]["text"] == "sunny"


# ---- errors ----


def test_errors_look_like_the_pages_say(server):
    """MUST (Overview › Error Responses): the request's id, an integer code, a message."""
    unknown, invalid = EXAMPLES["Tools › Error Handling #1"], EXAMPLES["Tools › Error Handling #2"]
    tool_of(server, "get_weather", "")
    server.tool("book", "…", ANY)(fails(ToolError("…")))
    check_like(respond(server, "tools/call", {"name": "invalid_tool_name"}, id=unknown["id"]), unknown)
    check_like(respond(server, "tools/call", {"name": "book"}, id=invalid["id"]), invalid)
    missing = EXAMPLES["Resources › Error Handling #1"]
    server.resource("x://", "x")(print)
    check_like(respond(server, "resources/read", missing["error"]["data"], id=missing["id"]), missing)
    version = EXAMPLES["Versioning and Compatibility › Protocol Version Negotiation #1"]
    more = {META + "protocolVersion": version["error"]["data"]["requested"]}
    check_like(respond(server, "server/discover", id=version["id"], **more), version)


def fails(problem):
    def fail(arguments, request):
        raise problem

    return fail


@pytest.mark.parametrize(
    "name", ["Tasks Extension › Capability Negotiation #3", "Tasks Extension › Task Status Notifications #1"]
)
def test_a_client_without_tasks_is_told_so(server, name):
    """MUST (Tasks Extension › Capability Negotiation): -32021 with the required extension."""
    server.tool("long", "…", ANY)(lambda arguments, request: request.as_task(required=True))
    if "Notifications" in name:
        with Listener(server, {"taskIds": ["x"]}, id=EXAMPLES[name]["id"]) as listener:
            check_like(listener.first, EXAMPLES[name])
    else:
        check_like(respond(server, "tools/call", {"name": "long"}, id=EXAMPLES[name]["id"]), EXAMPLES[name])


# ---- over HTTP ----


def test_the_requests_of_the_transport_page_are_served_with_their_headers():
    """MUST (Streamable HTTP › Standard Request Headers): Mcp-Method, Mcp-Name and Mcp-Param-Region as on the page."""
    server = Server("examples", "1")
    tool_of(server, "get_weather", "sunny", takes(location={"type": "string"}))
    definition = EXAMPLES["Streamable HTTP › Schema Extension #1"]
    tool_of(server, definition["name"], "ran", definition["inputSchema"])
    server.resource("file:///projects/myapp/config.json", "config.json")(lambda uri, request: "{}")
    mismatch = EXAMPLES["Streamable HTTP › Server Validation #1"]
    with running(server) as http:
        for name, fields in (
            ("Streamable HTTP › Standard Request Headers #1", {"Mcp_Name": "get_weather", "Mcp_Method": "tools/call"}),
            (
                "Streamable HTTP › Standard Request Headers #2",
                {"Mcp_Name": "file:///projects/myapp/config.json", "Mcp_Method": "resources/read"},
            ),
            (
                "Streamable HTTP › Schema Extension #2",
                {"Mcp_Name": "execute_sql", "Mcp_Method": "tools/call", "Mcp_Param_Region": "us-west1"},
            ),
        ):
            reply = http.exchange(octets(EXAMPLES[name], MCP_Protocol_Version="2026-07-28", **fields))
            assert (reply.status, reply.message["id"], reply.message["result"]["resultType"]) == (
                200,
                EXAMPLES[name]["id"],
                "complete",
            )
        bar = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "bar", "_meta": meta()}}
        reply = http.exchange(octets(bar, Mcp_Name="foo"))
        assert reply.status == 400
        check_like(reply.message, mismatch)
        assert "foo" in reply.message["error"]["message"]
        assert "bar" in reply.message["error"]["message"]
        assert http.exchange(octets(EXAMPLES["Cancellation › Cancellation Flow #1"])).status == 202


# ---- notifications ----


def test_progress(server):
    """MUST (Progress › Progress Flow): the token of the request. (Progress › Progress Flow #1 and #2)"""
    example = EXAMPLES["Progress › Progress Flow #2"]
    server.tool("t", "…", ANY)(lambda arguments, request: request.progress(50, 100, "…") or "done")
    channel = Recorder()
    assert send(server, "Progress › Progress Flow #1")["error"]["code"] == -32601  # some_method is nobody's method
    respond(
        server,
        "tools/call",
        {"name": "t"},
        exchange=channel,
        **EXAMPLES["Progress › Progress Flow #1"]["params"]["_meta"],
    )
    assert channel.messages == [example]


def test_log_messages(server):
    """MAY (Logging › Log Message Notifications): level, logger, and data of any kind."""
    example = EXAMPLES["Logging › Log Message Notifications #1"]
    params = example["params"]
    server.tool("t", "…", ANY)(
        lambda arguments, request: request.log(params["level"], params["data"], params["logger"]) or "done"
    )
    channel = Recorder()
    respond(server, "tools/call", {"name": "t"}, exchange=channel, log_level="info")
    assert channel.messages == [example]


def test_cancellation_over_stdio(server):
    """MUST (Cancellation › Transport-Specific Cancellation): by the id of the request, type and all."""
    note = EXAMPLES["Cancellation › Cancellation Flow #1"]
    begun, ended, waiting = threading.Event(), threading.Event(), []

    @server.tool("wait", "…", ANY)
    def wait(arguments, request):
        waiting.append(request)
        begun.set()
        if request.cancelled.wait(PATIENCE):
            ended.set()
        return "too late"

    source, sink = os.pipe()
    transport = StdioTransport(server, -1, sink, "alice")
    request = {
        "jsonrpc": "2.0",
        "id": note["params"]["requestId"],
        "method": "tools/call",
        "params": {"name": "wait", "_meta": meta()},
    }
    transport.take(json.dumps(request).encode())
    assert begun.wait(PATIENCE)
    transport.take(json.dumps(note | {"params": {"requestId": 123}}).encode())  # not the same id
    assert not waiting[0].cancelled.is_set()
    transport.take(json.dumps(note).encode())
    assert ended.wait(PATIENCE)
    assert eventually(lambda: not transport.exchanges)
    os.close(sink)
    assert os.read(source, 1) == b""
    os.close(source)


def test_a_subscription_from_its_beginning_to_its_end():
    """MUST (Subscriptions › Acknowledgment): first; then notifications, and at the end the result, all with the id."""
    opening, acknowledged, updated, closed = (
        EXAMPLES[name]
        for name in (
            "Subscriptions › Opening a Stream #1",
            "Subscriptions › Acknowledgment #1",
            "Subscriptions › Receiving Notifications #1",
            "Subscriptions › Graceful Closure #1",
        )
    )
    with (
        alive(demo_server(0)) as demo,
        Listener(demo, opening["params"]["notifications"], id=opening["id"]) as listener,
    ):
        assert listener.first == acknowledged
        demo.resource_updated(updated["params"]["uri"])
        assert listener.next() == updated
        demo.subscriptions.end(0)
        last = listener.next()
        assert last["result"]["_meta"].items() >= closed["result"]["_meta"].items()
        check_like(last, closed)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Tools › List Changed Notification #1", "toolsListChanged"),
        ("Prompts › List Changed Notification #1", "promptsListChanged"),
        ("Resources › List Changed Notification #1", "resourcesListChanged"),
    ],
)
def test_changes_of_lists(name, wanted):
    """SHOULD (Tools › List Changed Notification): to who asked; with nothing but the subscription's id."""
    changing = demo_server(0)
    changing.changing |= {"prompts", "resources"}
    with alive(changing) as demo, Listener(demo, {wanted: True}, id=3) as listener:
        demo.list_changed(EXAMPLES[name]["method"].split("/")[1])
        assert listener.next() == EXAMPLES[name] | {"params": {"_meta": {META + "subscriptionId": 3}}}


def test_an_update_of_a_resource(server):
    """MUST (Resources › Subscriptions): with its URI and the subscription's id. (Resources › Subscriptions #1)"""
    example = EXAMPLES["Resources › Subscriptions #1"]
    uri = example["params"]["uri"]
    server.resource(uri, "main.rs")(print)
    with Listener(
        server, {"resourceSubscriptions": [uri]}, id=example["params"]["_meta"][META + "subscriptionId"]
    ) as listener:
        server.resource_updated(uri)
        assert listener.next() == example


# ---- questions ----

ASKED = [
    ("Elicitation › Example: Simple Text Request #1", "Elicitation › Example: Simple Text Request #2"),
    ("Elicitation › Example: Structured Data Request #1", "Elicitation › Example: Structured Data Request #2"),
    ("Elicitation › Example: Request Sensitive Data #1", "Elicitation › Example: Request Sensitive Data #2"),
    ("Elicitation › Example: Simple Text Request #1", "Elicitation › Response Actions #1"),
]


@pytest.mark.parametrize(("question_name", "answer_name"), ASKED)
def test_a_question_and_its_answer(server, question_name, answer_name):
    """MUST (Elicitation › Elicitation Requests): inside an InputRequiredResult; the answer comes with the retry."""
    question, answer = EXAMPLES[question_name], EXAMPLES[answer_name]
    server.tool("t", "…", ANY)(
        lambda arguments, request: (
            input_required({"q": question}) if request.accepted("q") is None else json.dumps(request.accepted("q"))
        )
    )
    asked = respond(server, "tools/call", {"name": "t"}, capabilities=EVERYTHING)["result"]
    assert (asked["resultType"], asked["inputRequests"]) == ("input_required", {"q": question})
    done = respond(server, "tools/call", {"name": "t", "inputResponses": {"q": answer}}, id=2, capabilities=EVERYTHING)[
        "result"
    ]
    assert json.loads(done["content"][0]["text"]) == answer.get("content", {})


def test_several_questions_of_several_kinds(server):
    """MUST (Multi Round-Trip Requests › Core Types): maps by the same keys; a state that comes back."""
    requests, responses, result = (
        EXAMPLES[name]
        for name in (
            "Multi Round-Trip Requests › InputRequests #1",
            "Multi Round-Trip Requests › InputResponses #1",
            "Multi Round-Trip Requests › InputRequiredResult #1",
        )
    )
    for asked_for in (requests, result["result"]["inputRequests"]):
        server.tool("t", "…", ANY)(
            lambda arguments, request, asked_for=asked_for: (
                json.dumps([request.state, request.responses])
                if request.responses
                else input_required(asked_for, state=["kept"])
            )
        )
        asked = respond(server, "tools/call", {"name": "t"}, id=result["id"], capabilities=EVERYTHING)
        check_like(asked, result | {"result": result["result"] | {"inputRequests": asked_for}})
        assert asked["result"]["inputRequests"] == asked_for
        retry = {"name": "t", "inputResponses": responses, "requestState": asked["result"]["requestState"]}
        done = respond(server, "tools/call", retry, id=2, capabilities=EVERYTHING)["result"]
        assert json.loads(done["content"][0]["text"]) == [["kept"], responses]


def test_a_tool_that_asks_first(server):
    """MUST (Tools › Input Required Tool Results): the retry has another id and echoes the state."""
    first, retry = (
        EXAMPLES["Tools › Input Required Tool Results #1"],
        EXAMPLES["Tools › Input Required Tool Results #2"],
    )
    server.tool("get_weather", "…", takes(location={"type": "string"}))(
        lambda arguments, request: (
            f"for {request.accepted('github_login')['name']}"
            if request.responses
            else input_required(first["result"]["inputRequests"], state=arguments)
        )
    )
    asked = respond(
        server,
        "tools/call",
        {"name": "get_weather", "arguments": retry["params"]["arguments"]},
        "alice",
        first["id"],
        capabilities=EVERYTHING,
    )
    check_like(asked, first)
    refused = send(
        server, "Tools › Input Required Tool Results #2", EVERYTHING
    )  # the page's state is not this server's
    assert refused["error"]["code"] == -32602
    done = send(
        server, "Tools › Input Required Tool Results #2", EVERYTHING, requestState=asked["result"]["requestState"]
    )
    assert (done["id"], done["result"]["content"][0]["text"]) == (retry["id"], "for octocat")


# ---- tasks ----


def flow(number: int) -> str:
    return f"Tasks Extension › Example Message Flow #{number}"


def test_the_message_flow_of_a_task(server):
    """MUST (Tasks Extension › Example Message Flow): create, poll, answer, poll, result.

    Tasks Extension › Example Message Flow #1, #2 (creation), #3, #4 (working), #5, #6, #7, #8 (asked, twice alike),
    #9, #10 (answered), #11, #12 (working again), #13, #14 (completed).
    """
    gates = threading.Event(), threading.Event()

    @server.tool("hello_world", "…", ANY)
    def hello_world(arguments, request):
        request.as_task()
        assert gates[0].wait(PATIENCE)
        answers = request.ask(EXAMPLES[flow(6)]["result"]["inputRequests"])
        assert gates[1].wait(PATIENCE)
        return f"Hello, {answers['name']['content']['name']}!"

    created = send(server, flow(1), EVERYTHING)
    check_like(created, EXAMPLES[flow(2)])
    task = created["result"]["taskId"]

    def step(request: int, response: int) -> dict[str, Any]:
        answer = send(server, flow(request), EVERYTHING, taskId=task)
        check_like(answer, EXAMPLES[flow(response)])
        return answer

    def status() -> str:
        return send(server, flow(3), EVERYTHING, taskId=task)["result"]["status"]

    step(3, 4)
    gates[0].set()
    assert eventually(lambda: status() == "input_required")
    assert step(5, 6)["result"] == step(7, 8)["result"]
    # the page's answer does not fit the page's own schema: refused as it stands, taken with the schema's member
    answer = EXAMPLES[flow(9)]["params"]["inputResponses"]["name"]
    assert send(server, flow(9), EVERYTHING, taskId=task)["error"]["code"] == -32602
    fitting = {"name": answer | {"content": {"name": answer["content"]["input"]}}}
    check_like(send(server, flow(9), EVERYTHING, taskId=task, inputResponses=fitting), EXAMPLES[flow(10)])
    step(11, 12)
    gates[1].set()
    assert eventually(lambda: status() == "completed")
    assert step(13, 14)["result"]["result"]["content"][0]["text"] == "Hello, Luca!"


ENDS = [
    ("Tasks Extension › Task Execution Errors #1", fails(Rejection(-32603, "…"))),
    ("Tasks Extension › Task Execution Errors #2", fails(ToolError("…"))),
    ("Tasks Extension › Task Status Notifications #2", lambda arguments, request: "…"),
]


@pytest.mark.parametrize(("name", "outcome"), ENDS)
def test_how_a_task_ends(server, name, outcome):
    """MUST (Tasks Extension › Task Execution Errors): error for failed, result for completed.

    Where the page's examples of tasks/get say resultType "task", its rule says "complete"; the rule is kept.
    """
    gate = threading.Event()
    server.tool("get_weather", "…", ANY)(
        lambda arguments, request: request.as_task() or (gate.wait(PATIENCE) and outcome(arguments, request))
    )
    created = send(server, "Tasks Extension › Task Creation #1", EVERYTHING)
    check_like(created, EXAMPLES["Tasks Extension › Task Creation #2"])
    task, example = created["result"]["taskId"], EXAMPLES[name]
    with Listener(server, {"taskIds": [task]}, user="alice", capabilities=EVERYTHING) as listener:
        gate.set()
        told = listener.next()
    got = (
        respond(server, "tasks/get", {"taskId": task}, "alice", id=example.get("id"), capabilities=EVERYTHING)
        if "id" in example
        else told
    )
    assert got.get("result", {}).get("resultType", "complete") == "complete"
    body, wanted = (one.get("result") or one["params"] for one in (got, example))
    check_like(body, {"pollIntervalMs": 1} | {key: value for key, value in wanted.items() if key != "resultType"})


@pytest.mark.parametrize("name", ["Tasks Extension › Protocol Errors #1", "Tasks Extension › Protocol Errors #2"])
def test_a_task_that_is_not_there(server, name):
    """MUST (Tasks Extension › Protocol Errors): -32602, for a task that never was and for one that has expired."""
    server.tool("short", "…", ANY)(lambda arguments, request: request.as_task(ttl_ms=1))
    task = respond(server, "tools/call", {"name": "short"}, capabilities=EVERYTHING)["result"]["taskId"]
    server.store.execute("UPDATE tasks SET created = 0")
    assert eventually(lambda: not server.store.read("SELECT id FROM tasks WHERE id = ?", task))
    params = {"taskId": task if name.endswith("#2") else "nothing"}
    check_like(respond(server, "tasks/get", params, id=EXAMPLES[name]["id"], capabilities=EVERYTHING), EXAMPLES[name])


# ---- none is forgotten ----


def test_every_example_is_covered():
    """Choice: each example is named in this file, the message flow of tasks by its numbers."""
    text = Path(__file__).read_text(encoding="utf-8")
    flows = {flow(number) for number in range(1, 15)}
    assert len(EXAMPLES) == 124
    assert {name for name in EXAMPLES if f'"{name}"' not in text} == flows

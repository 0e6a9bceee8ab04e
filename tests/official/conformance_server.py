"""A server with everything that the protocol knows, to point a half-finished client at; also what the official
conformance suite calls by name. It is built from the reference server's own parts.

    python tests/official/conformance_server.py --port 3001                 Streamable HTTP; prints the URL
    python tests/official/conformance_server.py --stdio                     one client over stdin and stdout
    python tests/official/conformance_server.py --port 3001 --page-size 2   every list comes in pages of two

Content of every kind, tools that ask for one or several things, tasks that end in every way, array outputs, nested
and integer mirrored headers, prompts of several messages. Fixtures that are alike are rows of a table: CONTENT
answers at once, ASKING asks the client first (multi round-trip requests). The others follow as functions.
`test_simple_text` stays the first tool, because the suite calls the first one that is listed with no arguments.
"""

from __future__ import annotations

import argparse
import base64
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reference_server import HttpServer, Rejection, Request, Server, ToolError, elicit, input_required, serve_stdio

Json = dict[str, Any]

# ------------------------------------------------------------------------------------- content and input requests


def text(words: str) -> Json:
    """A text block."""
    return {"type": "text", "text": words}


def resource(uri: str, mime_type: str, words: str) -> Json:
    """An embedded resource block."""
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": words}}


# One red pixel, and two samples of silence.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQIAAACAgA=="
ICONS = [{"src": f"data:image/png;base64,{PNG}", "mimeType": "image/png", "sizes": ["1x1"]}]
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": WAV, "mimeType": "audio/wav"}
LINK = {"type": "resource_link", "uri": "test://static-text", "name": "static-text", "mimeType": "text/plain"}

server = Server("conformance-fixtures", "1.0.0", "One fixture for each thing that a client must understand.",
                title="A server with everything", icons=ICONS)


def sampling(question: str, max_tokens: int) -> Json:
    """An input request for the client's model; sampling is deprecated by this revision, and so are roots."""
    messages = [{"role": "user", "content": text(question)}]
    return {"method": "sampling/createMessage", "params": {"messages": messages, "maxTokens": max_tokens}}


ROOTS = {"method": "roots/list", "params": {}}
NAME = elicit("What is your name?", {"name": {"type": "string"}}, ["name"])
COLOR = elicit("What is your favourite colour?", {"color": {"type": "string"}}, ["color"])
CONFIRM = elicit("Please confirm.", {"ok": {"type": "boolean"}}, ["ok"])
CONTEXT = elicit("What context should the prompt use?", {"context": {"type": "string"}}, ["context"])
DELETE = elicit("Delete the file for good?", {"confirm": {"type": "boolean"}}, ["confirm"])


def schema(**properties: Json) -> Json:
    """The input schema of an object with these properties, none of them required."""
    return {"type": "object", "properties": properties}


# ------------------------------------------------------------------------------- tools that always answer the same

CONTENT: dict[str, list[Json]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_image_content": [IMAGE],
    "test_audio_content": [AUDIO],
    "test_embedded_resource": [
        resource("test://embedded-resource", "text/plain", "This is an embedded resource content."),
    ],
    "test_resource_link": [LINK],
    "test_multiple_content_types": [
        text("Multiple content types test:"),
        IMAGE,
        resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}'),
    ],
}


def always(content: list[Json]) -> Callable[[Json, Request], Json]:
    """A tool that gives these blocks, whatever it is asked."""
    return lambda arguments, request: {"content": content}


for name, blocks in CONTENT.items():
    server.tool(name, f"Answers with: {', '.join(block['type'] for block in blocks)}.", schema())(always(blocks))


@server.tool("test_error_handling", "Always fails with a tool execution error.", schema())
def fail(arguments: Json, request: Request) -> str:
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool("test_tool_with_progress", "Reports 0, 50 and 100 of 100.", schema())
def report_progress(arguments: Json, request: Request) -> str:
    for done in (0, 50, 100):
        request.progress(done, 100, f"{done} of 100")
        request.sleep(0.05)
    return "Done, all 100."


@server.tool("test_missing_capability", "Needs a client that offers sampling.", schema())
def need_sampling(arguments: Json, request: Request) -> str:
    request.require({"sampling": {}})
    return "This client offers sampling."


@server.tool("test_logging_tool", "Logs one line, for a client that asks for the level (deprecated).", schema())
def log_a_line(arguments: Json, request: Request) -> str:
    request.log("info", "The logging tool ran.")
    return "Logged, if you asked for it."


@server.tool("test_trigger_tool_change", "Says that the tool list has changed.", schema())
def change_tools(arguments: Json, request: Request) -> str:
    server.list_changed("tools")
    return "Published."


@server.tool("test_trigger_prompt_change", "Says that the prompt list has changed.", schema())
def change_prompts(arguments: Json, request: Request) -> str:
    server.list_changed("prompts")
    return "Published."


JSON_SCHEMA_2020_12 = json.loads("""
{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
 "$defs": {"address": {"$anchor": "addressDef", "type": "object",
                       "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}},
 "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"},
                "contactMethod": {"type": "string", "enum": ["phone", "email"]},
                "phone": {"type": "string"}, "email": {"type": "string"}},
 "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
 "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
 "then": {"required": ["phone"]}, "else": {"required": ["email"]}, "additionalProperties": false}
""")


@server.tool("json_schema_2020_12_tool", "Its schema must be listed as it is.", JSON_SCHEMA_2020_12,
             checks_own_arguments=True)
def echo_arguments(arguments: Json, request: Request) -> str:
    return json.dumps(arguments)


REGION = schema(region={"type": "string", "x-mcp-header": "Region"}) | {"required": ["region"]}


@server.tool("test_x_mcp_header", "Its argument is mirrored in the header Mcp-Param-Region.", REGION)
def show_region(arguments: Json, request: Request) -> str:
    return f"Region: {arguments['region']}"


ORDER = schema(number={"type": "integer", "x-mcp-header": "Order-Number"},
               place=schema(city={"type": "string", "x-mcp-header": "City"},
                            indoors={"type": "boolean", "x-mcp-header": "Indoors"}))


@server.tool("test_nested_headers", "An integer, and nested arguments, are mirrored in headers; none is required.",
             schema(order=ORDER), title="Nested mirrored headers", icons=ICONS)
def show_order(arguments: Json, request: Request) -> str:
    return f"Order: {json.dumps(arguments.get('order'))}"


USER = schema(id={"type": "string"}, name={"type": "string"}) | {"required": ["id", "name"]}


@server.tool("test_array_output", "Its structured output is a list.", schema(),
             output_schema={"type": "array", "items": USER})
def list_users(arguments: Json, request: Request) -> Json:
    return {"structuredContent": [{"id": "1", "name": "Alice"}, {"id": "2", "name": "Bob"}]}


@server.tool("test_number_output", "Its structured output is a number.", schema(), output_schema={"type": "number"})
def count_users(arguments: Json, request: Request) -> Json:
    return {"structuredContent": 2, "content": [text("There are 2 users.")]}


# --------------------------------------------------------------------------------- tools that ask the client first

# Tool: its input requests, the state that travels with them, and its answer, filled in with the client's.
ASKING: dict[str, tuple[Json, Any, str]] = {
    "test_streaming_elicitation": ({"user_name": NAME}, None, "Hello, {user_name[name]}!"),
    "test_input_required_result_elicitation": ({"user_name": NAME}, None, "Hello, {user_name[name]}!"),
    "test_input_required_result_sampling": (
        {"capital_question": sampling("What is the capital of France?", 100)}, None,
        "The model said: {capital_question[content]}",
    ),
    "test_input_required_result_list_roots": ({"client_roots": ROOTS}, None, "Roots: {client_roots[roots]}"),
    "test_input_required_result_request_state": ({"confirm": CONFIRM}, "asked", "state-ok"),
    "test_input_required_result_tampered_state": ({"confirm": CONFIRM}, "asked", "state-ok"),
    "test_input_required_result_multiple_inputs": (
        {"user_name": NAME, "greeting": sampling("Say hello.", 50), "client_roots": ROOTS}, "asked",
        "{user_name[name]} is greeted with {greeting[content]} in {client_roots[roots]}",
    ),
}


def usable(key: str, wanted: Json, request: Request) -> Json | None:
    """The client's answer to one input request; None while there is none that answers it."""
    if wanted["method"] != "elicitation/create":
        return request.responses.get(key)
    return request.accepted(key, wanted)


def asking(requests: Json, state: Any, reply: str) -> Callable[[Json, Request], str | Json]:
    """A tool that asks until every input request is answered in a round that carries its state."""
    def ask(arguments: Json, request: Request) -> str | Json:
        answers = {key: usable(key, wanted, request) for key, wanted in requests.items()}
        if None in answers.values() or request.state != state:
            return input_required(requests, state=state)
        return reply.format(**answers)
    return ask


for name, (requests, state, reply) in ASKING.items():
    kinds = ", ".join(wanted["method"] + ("" if wanted["method"] == "elicitation/create" else " (deprecated)")
                      for wanted in requests.values())
    server.tool(name, f"Asks the client for {kinds} before it answers.", schema())(asking(requests, state, reply))


@server.tool("test_input_required_result_multi_round", "Asks for a name, then for a colour.", schema())
def ask_twice(arguments: Json, request: Request) -> str | Json:
    if isinstance(request.state, dict) and (answer := usable("step2", COLOR, request)):
        return f"{request.state['name']} likes {answer['color']}."
    if answer := usable("step1", NAME, request):
        return input_required({"step2": COLOR}, state={"name": answer["name"]})
    return input_required({"step1": NAME}, state="first round")


@server.tool("test_input_required_result_capabilities", "Asks only for what the client declares.", schema())
def ask_what_is_declared(arguments: Json, request: Request) -> str | Json:
    possible = {"elicitation": NAME, "sampling": sampling("Say hello.", 50), "roots": ROOTS}
    requests = {key: wanted for key, wanted in possible.items() if key in request.capabilities}
    if all(usable(key, wanted, request) for key, wanted in requests.items()):
        return f"Answered: {', '.join(requests) or 'nothing was asked'}."
    return input_required(requests)


# ---------------------------------------------------------------------------------------------------------- tasks


@server.tool("greet", "Greets, at once.", schema(name={"type": "string"}))
def greet(arguments: Json, request: Request) -> str:
    return f"Hello, {arguments.get('name', 'World')}!"


@server.tool("slow_compute", "Takes as long as it is told; a task where the client can have one.",
             schema(seconds={"type": "number"}, label={"type": "string"}))
def compute_slowly(arguments: Json, request: Request) -> str:
    request.as_task()
    request.sleep(arguments.get("seconds", 1))
    return f"Computed {arguments.get('label', 'something')}."


@server.tool("failing_job", "A task that completes with a tool execution error.", schema())
def fail_slowly(arguments: Json, request: Request) -> str:
    request.as_task(required=True)
    request.sleep(0.5)
    raise ToolError("The job ran, and failed.")


@server.tool("protocol_error_job", "A task that fails with a JSON-RPC error.", schema())
def break_slowly(arguments: Json, request: Request) -> str:
    request.as_task(required=True)
    request.sleep(0.5)
    raise Rejection(-32603, "The job could not be run")


@server.tool("confirm_delete", "A task that asks before it deletes (nothing).", schema(filename={"type": "string"}))
def confirm_delete(arguments: Json, request: Request) -> str:
    request.as_task(required=True)
    response = request.ask({"confirm": DELETE})["confirm"]
    confirmed = response["action"] == "accept" and response["content"].get("confirm") is True
    return f"{arguments.get('filename', 'The file')}: {'deleted' if confirmed else 'kept'}."


@server.tool("multi_input", "A task that asks two questions at once.", schema())
def ask_two_questions(arguments: Json, request: Request) -> str:
    request.as_task(required=True)
    responses = request.ask({"user_name": NAME, "confirm": DELETE})
    return f"Answered: {', '.join(responses)}."


@server.tool("test_tool_with_task", "Asks for a name, then goes on as a task.", schema())
def ask_then_become_a_task(arguments: Json, request: Request) -> str | Json:
    answer = usable("user_name", NAME, request)
    if answer is None:
        return input_required({"user_name": NAME})
    request.as_task(required=True)
    request.sleep(0.2)
    return f"Hello, {answer['name']}!"


# ------------------------------------------------------------------------------------------ resources and prompts


@server.resource("test://static-text", "static-text", description="A text.")
def static_text(uri: str, request: Request) -> str:
    return "This is the content of the static text resource."


@server.resource("test://static-binary", "static-binary", description="A red pixel.", mime_type="image/png")
def static_binary(uri: str, request: Request) -> bytes:
    return base64.b64decode(PNG)


@server.resource_template("test://template/{id}/data", "template", description="Data by id.",
                          mime_type="application/json")
def template_data(uri: str, values: dict[str, str], request: Request) -> str:
    return json.dumps({"id": values["id"], "templateTest": True, "data": f"Data for ID: {values['id']}"})


@server.completion("ref/resource", "test://template/{id}/data", "id")
def complete_id(value: str, context: dict[str, str], request: Request) -> list[str]:
    return [number for number in map(str, range(1000)) if number.startswith(value)]


def user(*blocks: Json) -> list[Json]:
    """One user message for each block."""
    return [{"role": "user", "content": block} for block in blocks]


def argument(name: str, description: str) -> Json:
    """A required argument of a prompt."""
    return {"name": name, "description": description, "required": True}


@server.prompt("test_simple_prompt", "A prompt without arguments.", [])
def simple_prompt(arguments: dict[str, str], request: Request) -> str:
    return "This is a simple prompt for testing."


@server.prompt("test_prompt_with_arguments", "Shows its arguments.",
               [argument("arg1", "First."), argument("arg2", "Second.")])
def prompt_with_arguments(arguments: dict[str, str], request: Request) -> str:
    return f"Prompt with arguments: arg1='{arguments['arg1']}', arg2='{arguments['arg2']}'"


@server.completion("ref/prompt", "test_prompt_with_arguments", "arg1")
def complete_arg1(value: str, context: dict[str, str], request: Request) -> list[str]:
    return [word for word in ("testValue1", "testValue2", "other") if word.startswith(value)]


@server.prompt("test_prompt_with_embedded_resource", "Embeds a resource.", [argument("resourceUri", "Its URI.")])
def prompt_with_resource(arguments: dict[str, str], request: Request) -> list[Json]:
    embedded = resource(arguments["resourceUri"], "text/plain", "Embedded resource content for testing.")
    return user(embedded, text("Please process the embedded resource above."))


@server.prompt("test_prompt_with_image", "Shows a picture.", [])
def prompt_with_image(arguments: dict[str, str], request: Request) -> list[Json]:
    return user(IMAGE, text("Please analyze the image above."))


@server.prompt("test_prompt_with_several_messages", "Content of every kind, from both roles.", [],
               title="Several messages", icons=ICONS)
def prompt_with_messages(arguments: dict[str, str], request: Request) -> list[Json]:
    reply = {"role": "assistant", "content": text("I see a red pixel, and hear nothing.")}
    return [*user(text("What is this?"), IMAGE, AUDIO), reply, *user(LINK)]


@server.prompt("test_input_required_result_prompt", "Asks for the context before it answers.", [])
def asking_prompt(arguments: dict[str, str], request: Request) -> str | Json:
    answer = usable("user_context", CONTEXT, request)
    return f"In the context of: {answer['context']}" if answer else input_required({"user_context": CONTEXT})


def main() -> None:
    """Serves the fixtures until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1; 0 (the default) picks a free one")
    parser.add_argument("--stdio", action="store_true", help="serve one client over stdin and stdout instead of HTTP")
    parser.add_argument("--page-size", type=int, metavar="N", help="entries on a page of each list (default: all)")
    options = parser.parse_args()
    if options.page_size is not None and options.page_size < 1:
        parser.error("--page-size must be at least 1")
    server.page_sizes = dict.fromkeys(("tools", "resources", "resourceTemplates", "prompts"), options.page_size)
    if options.stdio:
        return serve_stdio(server)
    http = HttpServer(server, "127.0.0.1", options.port)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: http.stop())
    print(f"Serving http://127.0.0.1:{http.port}/mcp", file=sys.stderr, flush=True)
    http.serve_forever()


if __name__ == "__main__":
    main()

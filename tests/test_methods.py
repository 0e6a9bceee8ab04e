"""server/discover, the lists, resources, prompts, completion, log levels, and the demo's tools that answer at once."""

import base64
import datetime
import json
import re
import time

import pytest
from support import Recorder, alive, call_tool, message, respond, running

import reference_server
from reference_server import LOG_LEVELS, Server, demo_server, input_required, takes

ROOT = "file:///project/"


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


@pytest.fixture(scope="module")
def library():
    """A server of many things: for pages, templates, contents and long completions."""
    with alive(Server("library", "1", page_size=3)) as server:
        add_library(server)
        yield server


def add_library(server):
    for number in range(10):
        server.resource(f"x://{number}", f"n{number}", cache_scope="private" if number == 9 else "public")(
            lambda uri, request: uri
        )
    for kind in "abcd":
        server.resource_template(f"{kind}://{{one}}/{{two}}", kind)(lambda uri, values, request: json.dumps(values))
    server.resource("bin://1", "octets", mime_type="image/png", ttl_ms=0)(lambda uri, request: b"\0\xff")
    server.resource("many://1", "two files")(
        lambda uri, request: [{"uri": "many://1/a", "text": "a"}, {"uri": "many://1/b", "text": "b"}]
    )
    server.resource("none://1", "gone")(lambda uri, request: None)
    server.prompt("two", "Two messages.", [{"name": "a", "required": True}, {"name": "b"}])(
        lambda arguments, request: [
            {"role": role, "content": {"type": "text", "text": repr(arguments)}} for role in ("user", "assistant")
        ]
    )
    words = [f"w{number:03}" for number in range(101)]
    server.completion("ref/prompt", "two", "a")(
        lambda value, context, request: [one for one in words if one.startswith(value)]
    )
    server.completion("ref/prompt", "two", "b")(lambda value, context, request: [context.get("a", "nothing") + value])
    server.completion("ref/resource", "a://{one}/{two}", "one")(lambda value, context, request: [request.user])
    server.tool("count", "Reports what is no progress, too.", takes())(
        lambda arguments, request: (
            [request.progress(value) for value in (-1, 0, 0, -0.5, 0.5, float("nan"), 0.25, float("inf"), 2, 2.0)]
            and "done"
        )
    )
    server.tool("talk", "Logs at every level.", takes())(
        lambda arguments, request: [request.log(level, {"is": level}, "mouth") for level in LOG_LEVELS] and "done"
    )


def result(server, method, params=None, **more):
    answer = respond(server, method, params, **more)
    assert "result" in answer, answer
    return answer["result"]


def error(server, method, params=None, **more):
    answer = respond(server, method, params, **more)
    assert "error" in answer, answer
    return answer["error"]


def read(server, uri, **more):
    return result(server, "resources/read", {"uri": uri}, **more)


# ---- discovery and lists ----


def test_discover_says_what_the_server_speaks_and_offers(demo):
    """MUST (Discovery › Response): supported versions, capabilities, caching hints; identity in _meta."""
    assert result(demo, "server/discover") == {
        "resultType": "complete",
        "supportedVersions": ["2026-07-28"],
        "ttlMs": 3_600_000,
        "cacheScope": "public",
        "capabilities": {
            "tools": {"listChanged": True},
            "prompts": {},
            "logging": {},
            "completions": {},
            "resources": {"subscribe": True},
            "extensions": {"io.modelcontextprotocol/tasks": {}},
        },
        "instructions": demo.instructions,
        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "mcp-reference-server", "version": "1.0.0"}},
    }


@pytest.mark.parametrize(
    "method", ["server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list"]
)
def test_every_list_may_be_cached_by_everybody(demo, method):
    """MUST (Caching › Cacheable Results): caching hints; public, since the lists are the same for all users."""
    answer = result(demo, method, user="alice")
    assert answer["ttlMs"] > 0
    assert answer["cacheScope"] == "public"
    assert answer == result(demo, method, user="bob")


def test_tools_are_listed_in_the_same_order_every_time(demo):
    """SHOULD (Tools › Capabilities): deterministic order, here that of registration."""
    names = [tool["name"] for tool in result(demo, "tools/list")["tools"]]
    assert names == [name for name in demo.tools if name != "beta_search"]
    assert names[:3] == ["build_report", "get_weather", "get_weather_data"]
    for _ in range(3):
        assert [tool["name"] for tool in result(demo, "tools/list")["tools"]] == names


def test_a_tool_can_be_listed_and_unlisted_and_keeps_its_place(demo):
    """MAY (Tools › Capabilities): the set of tools changes over time."""
    params = {"query": "x"}
    assert "Unknown tool" in call_tool(demo, "beta_search", params)["error"]["message"]
    assert call_tool(demo, "toggle_beta_tool")["result"]["content"][0]["text"] == "beta_search is now listed."
    assert [tool["name"] for tool in result(demo, "tools/list")["tools"]] == list(demo.tools)
    assert "thought about" in call_tool(demo, "beta_search", params)["result"]["content"][0]["text"]
    assert call_tool(demo, "toggle_beta_tool")["result"]["content"][0]["text"] == "beta_search is now unlisted."
    assert call_tool(demo, "beta_search", params)["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tools/list", {"cursor": "x"}),
        ("prompts/list", {"cursor": "x"}),
        ("resources/templates/list", {"cursor": "eA=="}),
        ("resources/list", {"cursor": ""}),
        ("resources/list", {"cursor": "0"}),
        ("resources/list", {"cursor": 3}),
        ("resources/list", {"cursor": "YWZ0ZXIgMQ"}),
        ("resources/list", {"cursor": base64.b64encode(b"after 4").decode()}),
        ("resources/list", {"cursor": base64.b64encode(b"after -3").decode()}),
        ("resources/list", {"cursor": ["x"]}),
    ],
)
def test_a_cursor_that_was_not_given_out_is_refused(library, method, params):
    """SHOULD (Pagination › Error Handling): invalid cursors result in -32602."""
    method = method if method != "tools/list" else "tools/list"
    assert error(library, method, params)["code"] == -32602


def pages_of(server, method, key):
    pages = [result(server, method)]
    while "nextCursor" in pages[-1]:
        pages.append(result(server, method, {"cursor": pages[-1]["nextCursor"]}))
        assert len(pages) < 20
    return [[one["name"] for one in page[key]] for page in pages], pages


def test_the_demo_lists_its_resources_two_a_page(demo):
    """MUST (Caching › Interaction with Pagination): one cacheScope. Two a page, so that a learner sees a cursor."""
    names, pages = pages_of(demo, "resources/list", "resources")
    assert names == [["settings", "config.json"], ["README.md", "CHANGES.md"], ["LICENSE"]]
    assert {(page["cacheScope"], page["ttlMs"]) for page in pages} == {("public", 300_000)}
    assert not re.search(r"\d", pages[0]["nextCursor"]) or not pages[0]["nextCursor"].isdigit()


def test_pages_cover_the_list_once_and_cursors_are_stable(library):
    """SHOULD (Pagination › Implementation Guidelines): stable cursors."""
    for method, key, sizes in (
        ("resources/list", "resources", [3, 3, 3, 3, 1]),
        ("resources/templates/list", "resourceTemplates", [3, 1]),
    ):
        names, pages = pages_of(library, method, key)
        assert [len(page) for page in names] == sizes
        assert len({name for page in names for name in page}) == sum(sizes)
        assert pages_of(library, method, key)[1] == pages


# ---- resources ----


def test_settings_are_private_to_each_user(demo):
    """MUST (Caching › Security Considerations): cacheScope reflects the visibility; the content is the user's own."""
    for user in ("alice", "bob"):
        answer = read(demo, "app://me/settings", user=user)
        assert (answer["cacheScope"], answer["ttlMs"]) == ("private", 60_000)
        assert json.loads(answer["contents"][0]["text"])["user"] == user


def test_the_bearer_name_is_the_user(demo):
    """Choice: `Authorization: Bearer <name>` names the user, and without one the user is anonymous."""
    with running(demo_server(0)) as server, server.connect() as connection:
        for user, expected in (("alice", "alice"), (None, "anonymous"), ("bob", "bob")):
            contents = connection.call("resources/read", {"uri": "app://me/settings"}, user).message["result"][
                "contents"
            ]
            assert json.loads(contents[0]["text"])["user"] == expected


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("README.md", "# The project\n"),
        ("LICENSE", "Use it as you like.\n"),
        ("README%2Emd", "# The project\n"),
        ("%4CICENSE", "Use it as you like.\n"),
    ],
)
def test_a_file_is_read_by_its_uri(demo, uri, text):
    """MUST (Resources › Reading Resources): contents with the URI that was asked for; %2E is a dot (RFC 3986 §2.3)."""
    assert read(demo, ROOT + uri)["contents"] == [{"uri": ROOT + uri, "mimeType": "text/plain", "text": text}]


@pytest.mark.parametrize(
    ("uri", "contents"),
    [
        ("bin://1", [{"uri": "bin://1", "mimeType": "image/png", "blob": "AP8="}]),
        ("many://1", [{"uri": "many://1/a", "text": "a"}, {"uri": "many://1/b", "text": "b"}]),
        ("b://p/q", [{"uri": "b://p/q", "mimeType": "text/plain", "text": '{"one": "p", "two": "q"}'}]),
        (
            "b://%C3%A9/%20",
            [{"uri": "b://%C3%A9/%20", "mimeType": "text/plain", "text": json.dumps({"one": "é", "two": " "})}],
        ),
    ],
)
def test_a_resource_is_text_octets_or_several_contents(library, uri, contents):
    """MUST (Resources › Security Considerations): binary data properly encoded. MAY: several contents for one URI."""
    assert read(library, uri)["contents"] == contents


def test_each_resource_has_its_own_caching_hints(library):
    """MUST (Caching › Time-to-Live (TTL) Field): ttlMs of at least 0."""
    assert [
        (read(library, uri)["ttlMs"], read(library, uri)["cacheScope"]) for uri in ("x://0", "x://9", "bin://1")
    ] == [(60_000, "public"), (60_000, "private"), (0, "public")]


CLIMBING = [
    "",
    ".",
    "..",
    "...",
    "../etc/passwd",
    "..%2Fetc%2Fpasswd",
    "%2e%2e",
    "%2E%2E%2Fx",
    "%252e%252e%252f",
    "..%5cx",
    "..\\x",
    "a/b",
    "a%2Fb",
    "%2F",
    "README.md%00",
    "README.md\0",
    "%00",
    "README.md/",
    "/README.md",
    "README.md?x",
    "README.md#x",
    "%C0%AE%C0%AE",
    "%FF",
    "%0a",
    "README.md ",
    "readme.md",
    "nothing.txt",
    "README.md%0d%0a",
    "%E2%80%AE",
]


@pytest.mark.parametrize("name", CLIMBING)
def test_what_does_not_exist_is_not_found_and_nothing_climbs_out(demo, name):
    """MUST (Resources › Error Handling): -32602; MUST (Resources › Security Considerations): no directory traversal."""
    uri = ROOT + name
    assert error(demo, "resources/read", {"uri": uri}) == {
        "code": -32602,
        "message": "Resource not found",
        "data": {"uri": uri},
    }


@pytest.mark.parametrize(
    "uri",
    [
        "b://%2e/x",
        "b://../x",
        "b://x/..",
        "b://%2e%2e/x",
        "b://a%2Fb/x",
        "b://x",
        "b://x/y/z",
        "b:///y",
        "b://a%00/x",
        "b://%ff/x",
        "b://a%5Cb/x",
        "none://1",
        "nothing://1",
        "",
        "b://a/b\n",
    ],
)
def test_a_template_matches_whole_segments_only(library, uri):
    """MUST (Resources › Security Considerations): validate all resource URIs."""
    assert error(library, "resources/read", {"uri": uri})["data"] == {"uri": uri}


def test_a_change_of_the_configuration_can_be_read(demo):
    """Choice: touch_config leaves a mark, so that a learner sees what the notification was about."""
    before = json.loads(read(demo, ROOT + "config.json")["contents"][0]["text"])
    call_tool(demo, "touch_config")
    after = json.loads(read(demo, ROOT + "config.json")["contents"][0]["text"])
    assert after["touched"] not in (None, before["touched"])


# ---- prompts ----


def test_prompts_are_listed_with_their_arguments(demo):
    """MUST (Prompts › Listing Prompts): name, description, arguments and which of them are required."""
    (prompt,) = result(demo, "prompts/list")["prompts"]
    assert prompt["name"] == "code_review"
    assert [(one["name"], one.get("required", False)) for one in prompt["arguments"]] == [
        ("code", True),
        ("language", False),
    ]


def test_a_prompt_is_filled_in(demo):
    """MUST (Prompts › Getting a Prompt): messages with role and content."""
    filled = result(demo, "prompts/get", {"name": "code_review", "arguments": {"code": "1/0", "language": "Python"}})
    assert filled["description"] == "Asks for a review of some code."
    assert filled["messages"] == [
        {"role": "user", "content": {"type": "text", "text": "Please review this Python code:\n1/0"}}
    ]


def test_a_prompt_may_have_several_messages(library):
    """MUST (Prompts › PromptMessage): role is user or assistant."""
    assert [
        one["role"] for one in result(library, "prompts/get", {"name": "two", "arguments": {"a": "1"}})["messages"]
    ] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"name": "code_review"}, "Missing required argument: code"),
        ({"name": "code_review", "arguments": {}}, "Missing required argument: code"),
        ({"name": "code_review", "arguments": {"language": "c"}}, "Missing required argument: code"),
        ({"name": "nothing"}, "Unknown prompt: nothing"),
        ({"name": "code_review", "arguments": {"code": 1}}, "params.arguments.code must be of type string"),
        ({"name": "code_review", "arguments": {"code": "x", "tone": "kind"}}, "Unknown argument: tone"),
        ({"arguments": {}}, "params.name is required"),
        ({"name": ["code_review"]}, "params.name must be of type string"),
    ],
)
def test_a_prompt_that_cannot_be_filled_in_is_an_error(demo, params, text):
    """SHOULD (Prompts › Error Handling): -32602 for an invalid name and for missing required arguments."""
    assert error(demo, "prompts/get", params) == {"code": -32602, "message": text}


# ---- completion ----


def complete(server, name, argument, value, kind="ref/prompt", **context):
    ref = {"type": kind, ("name" if kind == "ref/prompt" else "uri"): name}
    params = {"ref": ref, "argument": {"name": argument, "value": value}} | (
        {"context": {"arguments": context}} if context else {}
    )
    return result(server, "completion/complete", params)["completion"]


@pytest.mark.parametrize(("value", "values"), [("py", ["python"]), ("JAVA", ["java", "javascript"]), ("x", [])])
def test_languages_are_completed(demo, value, values):
    """Choice: what begins with the value, whatever its case."""
    assert complete(demo, "code_review", "language", value) == {
        "values": values,
        "total": len(values),
        "hasMore": False,
    }


@pytest.mark.parametrize(("value", "sent", "total"), [("w", 100, 101), ("w0", 100, 100), ("w1", 1, 1), ("w09", 10, 10)])
def test_at_most_a_hundred_values_are_sent_and_the_rest_is_counted(library, value, sent, total):
    """MUST (Completion › Completion Results): maximum 100 items; total, and whether there are more."""
    answer = complete(library, "two", "a", value)
    assert (len(answer["values"]), answer["total"], answer["hasMore"]) == (sent, total, total > sent)
    assert answer["values"][0].startswith(value)


def test_completion_knows_the_arguments_given_before(library):
    """SHOULD (Completion › Requesting Completions): previous completions come in context.arguments."""
    assert complete(library, "two", "b", "!", a="yes")["values"] == ["yes!"]
    assert complete(library, "two", "b", "!")["values"] == ["nothing!"]


def test_a_template_and_its_user_complete_too(library):
    """MUST (Completion › Reference Types): ref/resource names a URI template."""
    assert complete(library, "a://{one}/{two}", "one", "", "ref/resource")["values"] == ["anonymous"]


def test_an_argument_without_completion_has_no_values(demo):
    """Choice: nothing to suggest is an empty list, no error."""
    assert complete(demo, "code_review", "code", "x") == {"values": [], "total": 0, "hasMore": False}
    assert complete(demo, ROOT + "{name}", "name", "x", "ref/resource")["values"] == []


@pytest.mark.parametrize("uri", ["a://{one}/{two}", "a://1/2", "a://x/%20"])
def test_a_uri_completes_like_the_template_that_it_matches(library, uri):
    """MUST (Completion › Reference Types): ref/resource names a resource URI or a URI template."""
    assert complete(library, uri, "one", "", "ref/resource")["values"] == ["anonymous"]
    assert complete(library, uri, "two", "", "ref/resource")["values"] == []


@pytest.mark.parametrize(("name", "argument", "kind"), [
    ("two", "c", "ref/prompt"), ("two", "", "ref/prompt"), ("a://{one}/{two}", "three", "ref/resource"),
    ("a://1/2", "three", "ref/resource"), ("x://1", "one", "ref/resource"),
])
def test_an_argument_that_nobody_declared_is_not_completed(library, name, argument, kind):
    """MUST (Completion › Security): validate all completion inputs."""
    ref = {"type": kind, ("name" if kind == "ref/prompt" else "uri"): name}
    params = {"ref": ref, "argument": {"name": argument, "value": ""}}
    assert error(library, "completion/complete", params) == {"code": -32602, "message": f"Unknown argument: {argument}"}


def test_completion_is_limited_like_calls():
    """MUST (Completion › Security): implement appropriate rate limiting; the two share one limit."""
    with running(demo_server(0, rate=(0.001, 2))) as server:
        params = {"ref": {"type": "ref/prompt", "name": "code_review"}, "argument": {"name": "language", "value": "p"}}
        replies = [server.call("completion/complete", params) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert int(replies[2].fields["retry-after"]) > 100
        assert server.call_tool("get_weather", {"location": "Oslo"}).status == 429
        assert server.call("completion/complete", params, "alice").status == 200


@pytest.mark.parametrize(
    "params",
    [
        {"ref": {"type": "ref/prompt", "name": "nothing"}, "argument": {"name": "a", "value": ""}},
        {"ref": {"type": "ref/prompt"}, "argument": {"name": "a", "value": ""}},
        {"ref": {"type": "ref/resource", "uri": "file:///nothing/{x}"}, "argument": {"name": "a", "value": ""}},
        {"ref": {"type": "ref/tool", "name": "code_review"}, "argument": {"name": "language", "value": ""}},
        {"ref": {"type": "ref/prompt", "name": "code_review"}, "argument": {"name": "language"}},
        {"ref": {"type": "ref/prompt", "name": "code_review"}, "argument": {"name": "language", "value": 1}},
        {
            "ref": {"type": "ref/prompt", "name": "code_review"},
            "argument": {"name": "language", "value": ""},
            "context": {"arguments": {"a": 1}},
        },
        {"argument": {"name": "language", "value": ""}},
    ],
)
def test_a_completion_of_nothing_known_is_an_error(demo, params):
    """MUST (Completion › Security): validate all completion inputs; SHOULD (Completion › Error Handling): -32602."""
    assert error(demo, "completion/complete", params)["code"] == -32602


# ---- log levels ----


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_messages_at_or_above_the_level_are_sent(library, level):
    """MUST (Logging › Per-request log level): at or above the requested level, before the response."""
    recorder = Recorder()
    call_tool(library, "talk", exchange=recorder, log_level=level)
    wanted = LOG_LEVELS[LOG_LEVELS.index(level) :]
    assert recorder.messages == [
        {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": one, "logger": "mouth", "data": {"is": one}},
        }
        for one in wanted
    ]


def test_no_message_is_sent_to_who_asked_for_no_level(library):
    """MUST NOT (Logging › Per-request log level): no notifications/message for a request without logLevel."""
    recorder = Recorder()
    call_tool(library, "talk", exchange=recorder)
    assert recorder.messages == []


@pytest.mark.parametrize("level", ["verbose", "DEBUG", "", 3, None])
def test_an_unknown_level_is_refused(library, level):
    """SHOULD (Logging › Error Handling): -32602."""
    assert error(library, "tools/call", {"name": "talk"}, log_level=level)["code"] == -32602


# ---- not too fast ----


def flood(count):
    def report(arguments, request):
        for number in range(count):
            request.progress(number + 1, count)
            request.log("info", number)
        return "done"

    return report


def test_progress_and_log_messages_do_not_flood_and_the_last_ones_come():
    """SHOULD (Progress › Behavior Requirements): rate limiting to prevent flooding; the last value comes."""
    recorder = Recorder()
    with alive(Server("s", "1")) as server:
        server.tool("flood", "", takes())(flood(10_000))
        call_tool(server, "flood", exchange=recorder, progressToken=1, log_level="debug")
    done = [one["params"]["progress"] for one in recorder.messages if one["method"] == "notifications/progress"]
    said = [one["params"]["data"] for one in recorder.messages if one["method"] == "notifications/message"]
    assert 50 <= len(recorder.messages) < 1000
    assert done == sorted(set(done))
    assert (done[-1], said[-1]) == (10_000, 9_999)


def test_what_comes_slowly_comes_whole(monkeypatch):
    """MUST (Progress › Progress Flow): a slow tool's values are all sent, each before the next is reported."""
    clock = iter(range(10**9))

    class Slow:
        def monotonic(self):
            return next(clock) / 10

        def __getattr__(self, name):
            return getattr(time, name)

    recorder = Recorder()
    with alive(Server("s", "1")) as server:
        server.tool("flood", "", takes())(flood(300))
        monkeypatch.setattr(reference_server, "time", Slow())
        call_tool(server, "flood", exchange=recorder, progressToken=1)
    assert [one["params"]["progress"] for one in recorder.messages] == list(range(1, 301))


def test_the_next_request_is_not_slowed_down_by_the_last_one():
    """Choice: the limit is each request's own, because a flood is one stream's."""
    with alive(Server("s", "1")) as server:
        server.tool("flood", "", takes())(flood(1000))
        for _ in range(2):
            recorder = Recorder()
            call_tool(server, "flood", exchange=recorder, progressToken=1)
            assert [one["params"]["progress"] for one in recorder.messages][:50] == list(range(1, 51))


# ---- the demo's tools that answer at once ----


def text_of(answer):
    return answer["result"]["content"][0]["text"]


def test_the_weather_comes_as_text_or_as_data(demo):
    """MUST (Tools › Output Schema): the data conforms; SHOULD (Tools › Structured Content): and comes as text too."""
    data = call_tool(demo, "get_weather_data", {"location": "Zürich"})["result"]
    weather = data["structuredContent"]
    assert weather.keys() == {"temperature", "conditions", "humidity"}
    assert json.loads(data["content"][0]["text"]) == weather
    assert text_of(call_tool(demo, "get_weather", {"location": "Zürich"})) == (
        f"{weather['temperature']} °C and {weather['conditions']} in Zürich."
    )


@pytest.mark.parametrize("more", ["temperature", "conditions", "humidity", "0", "self", "args"])
def test_a_further_argument_does_not_disturb_the_weather(demo, more):
    """MAY (Tools › Tool): an object schema that does not close itself takes further members."""
    alone = text_of(call_tool(demo, "get_weather", {"location": "Oslo"}))
    assert text_of(call_tool(demo, "get_weather", {"location": "Oslo", more: "x"})) == alone


def test_the_weather_at_a_place_is_the_same_every_time(demo):
    """Choice: nothing is fetched, so a learner's second call gives what the first gave."""
    assert len({text_of(call_tool(demo, "get_weather", {"location": "Oslo"})) for _ in range(3)}) == 1
    assert len({text_of(call_tool(demo, "get_weather", {"location": str(number)})) for number in range(20)}) == 20


@pytest.mark.parametrize("location", ["{conditions}", "{0}", "\ud800", "", "x" * 10_000, "\n"])
def test_any_location_has_weather(demo, location):
    """MUST (Tools › Security Considerations): an argument is data, whatever it looks like."""
    assert text_of(call_tool(demo, "get_weather", {"location": location})).endswith(f" in {location}.")


def test_a_flight_in_the_past_is_refused_with_todays_date(demo):
    """MUST (Tools › Error Handling): feedback that a model can use to correct itself."""
    today = datetime.date.today()
    dates = [str(today), str(today - datetime.timedelta(1)), "2020-02-30", "tomorrow", "", "08/08/2025"]
    for date in dates:
        result = call_tool(demo, "book_flight", {"to": "Oslo", "date": date})["result"]
        assert result["isError"] is True, date
        assert str(today) in result["content"][0]["text"]
    tomorrow = str(today + datetime.timedelta(1))
    assert text_of(call_tool(demo, "book_flight", {"to": "Oslo", "date": tomorrow})) == f"Booked: Oslo on {tomorrow}."


def test_a_cart_is_filled_by_its_handle(demo):
    """Choice: state is a handle; the same call twice adds twice, in any order of connections."""
    first, second = (call_tool(demo, "create_cart")["result"]["structuredContent"]["cartId"] for _ in range(2))
    assert first != second
    for cart, skus in ((first, ["a", "b"]), (second, ["c"]), (first, ["b"])):
        for sku in skus:
            items = call_tool(demo, "add_to_cart", {"cartId": cart, "sku": sku})["result"]["structuredContent"]["items"]
    assert items == ["a", "b", "b"]


def test_the_library_finds_titles(demo):
    """Choice: a search without a match is an answer, no error."""
    assert text_of(call_tool(demo, "search", {"query": "m"})) == "Emma, Middlemarch, Moby-Dick"
    assert text_of(call_tool(demo, "search", {"query": "zzz"})) == "Nothing found."
    hold = call_tool(demo, "place_hold", {"title": "Emma"})["result"]["structuredContent"]
    assert hold["title"] == "Emma"
    assert hold["holdId"].startswith("hold_")


def test_a_query_runs_in_its_region(demo):
    """Choice: execute_sql only says what it would have done; its region is mirrored into Mcp-Param-Region."""
    assert text_of(call_tool(demo, "execute_sql", {"region": "eu", "query": "SELECT 1"})) == "Ran in eu: SELECT 1"


def test_a_report_without_tasks_comes_with_progress(demo):
    """MUST (Progress › Progress Flow): the value increases, under the request's token; 0 is a token."""
    for token in (0, "", "abc", 2**53):
        recorder = Recorder()
        assert text_of(call_tool(demo, "build_report", {"month": "May"}, exchange=recorder, progressToken=token)) == (
            "The report for May is ready."
        )
        assert [one["params"] for one in recorder.messages] == [
            {"progressToken": token, "progress": step, "total": 10, "message": f"step {step} of 10"}
            for step in range(1, 11)
        ]


def test_progress_only_goes_up(library):
    """MUST (Progress › Progress Flow): the value increases with each notification; and it is a number of JSON."""
    recorder = Recorder()
    call_tool(library, "count", exchange=recorder, progressToken="p")
    assert [one["params"] for one in recorder.messages] == [
        {"progressToken": "p", "progress": value} for value in (-1, 0, 0.5, 2)
    ]


@pytest.mark.parametrize("params", [None, {}, {"protocolVersion": "2025-11-25", "capabilities": {}}])
def test_an_old_client_is_told_what_this_server_speaks(demo, params):
    """SHOULD (Versioning and Compatibility › Backward Compatibility with Initialization-Based Versions): name them."""
    old = {"jsonrpc": "2.0", "id": 0, "method": "initialize"} | ({} if params is None else {"params": params})
    for request in (old, message("initialize", params, id=0)):
        answer = json.loads(reference_server.respond(demo, request, Recorder(), "anonymous").body)
        assert answer["error"]["code"] in (-32601, -32602)
        assert "2026-07-28" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"name": "nothing"}, -32602),
        ({"name": 1}, -32602),
        ({}, -32602),
        ({"name": "get_weather", "arguments": []}, -32602),
        ({"name": "get_weather", "arguments": None}, -32602),
        ({"name": "Get_Weather"}, -32602),
    ],
)
def test_a_call_of_nothing_is_a_protocol_error(demo, params, code):
    """MUST (Tools › Error Handling): unknown tools and malformed requests are JSON-RPC errors."""
    assert error(demo, "tools/call", params)["code"] == code


def test_a_prompt_or_a_resource_may_ask_first():
    """MAY (Multi Round-Trip Requests › Supported Requests): prompts/get and resources/read too."""
    with alive(Server("s", "1")) as server:
        server.resource("a://1", "a")(
            lambda uri, request: input_required(None, "state") if not request.state else request.state
        )
        asked = read(server, "a://1")
        assert asked["resultType"] == "input_required"
        assert not asked.keys() & {"ttlMs", "cacheScope", "contents"}
        again = result(server, "resources/read", {"uri": "a://1", "requestState": asked["requestState"]})
        assert again["contents"][0]["text"] == "state"


@pytest.mark.parametrize("retry", [
    {"inputResponses": {"q": {"action": "accept"}}}, {"inputResponses": {"q": {}}, "requestState": None}])
def test_what_was_read_with_an_answer_is_cached_by_nobody(library, retry):
    """MUST (Caching › Security Considerations): cacheScope reflects the visibility; an answer is one user's own."""
    assert (read(library, "x://0")["cacheScope"], read(library, "x://0")["ttlMs"]) == ("public", 60_000)
    again = result(library, "resources/read", {"uri": "x://0"} | retry)
    assert (again["cacheScope"], again["ttlMs"]) == ("private", 0)


def test_what_was_read_with_a_state_is_cached_by_nobody():
    """MUST (Caching › Security Considerations): the state is part of what was asked for, and no cache's key has it."""
    with alive(Server("s", "1")) as server:
        server.resource("a://1", "a")(lambda uri, request: request.state or input_required(None, "come again"))
        state = read(server, "a://1")["requestState"]
        again = result(server, "resources/read", {"uri": "a://1", "requestState": state})
        assert (again["contents"][0]["text"], again["cacheScope"], again["ttlMs"]) == ("come again", "private", 0)
        nothing = {"uri": "a://1", "inputResponses": None, "requestState": None}
        assert "requestState" in result(server, "resources/read", nothing)


@pytest.mark.parametrize(("capabilities", "served"), [
    ({"com.example/x": True}, True), ({"com.example/x": 1, "y": None, "z": [], "": {}}, True),
    ({"elicitation": {"form": {}, "later": 1}}, True), ({"experimental": {"a": {}}}, True),
    ({"elicitation": True}, False), ({"sampling": []}, False), ({"roots": None}, False),
    ({"extensions": {"com.example/x": True}}, False), ({"extensions": []}, False), ({"experimental": {"a": 1}}, False),
])
def test_capabilities_are_an_open_set(demo, capabilities, served):
    """MUST (Overview › _meta): ClientCapabilities is no closed set; what it does name is of its type."""
    answer = call_tool(demo, "get_weather", {"location": "Oslo"}, capabilities=capabilities)
    assert ("result" in answer) is served
    assert served or answer["error"]["code"] == -32602


def test_a_prompt_with_content_of_every_kind():
    """MUST (Prompts › PromptMessage): text, image, audio, resource links and embedded resources."""
    blocks = [
        {"type": "text", "text": "t"},
        {"type": "image", "data": "AP8=", "mimeType": "image/png"},
        {"type": "audio", "data": "AP8=", "mimeType": "audio/wav"},
        {"type": "resource_link", "uri": "file:///a", "name": "a"},
        {"type": "resource", "resource": {"uri": "file:///a", "blob": "AP8="}},
    ]
    with alive(Server("s", "1")) as server:
        server.prompt("p", "")(lambda arguments, request: [{"role": "user", "content": block} for block in blocks])
        messages = result(server, "prompts/get", {"name": "p"})["messages"]
        assert [message["content"] for message in messages] == blocks

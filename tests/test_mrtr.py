"""Multi round-trip requests: what may be asked of whom, and a requestState that is of no use anywhere else."""

import base64
import json
import time

import pytest
from support import PATIENCE, alive, call_tool, eventually, message, respond, running

import reference_server
from reference_server import Exchange, Server, demo_server, elicit, elicit_url, input_required, takes

FORM, URL = {"elicitation": {"form": {}}}, {"elicitation": {"url": {}}}
BOTH = {"elicitation": {"form": {}, "url": {}}}
REFUSED = {"code": -32602, "message": "requestState is not valid for this request"}
REPO = {"repo": "mcp"}
OCTOCAT = {"github_login": {"action": "accept", "content": {"name": "octocat"}}}
SAMPLING = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}


def sampling(**more):
    return {"method": SAMPLING["method"], "params": SAMPLING["params"] | more}


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


@pytest.fixture(scope="module")
def asking():
    """A server whose tool, prompt and resource ask whatever the arguments say, and count their rounds in the state."""
    requests = {
        "form": elicit("?", {"a": {"type": "string"}}),
        "url": elicit_url("?", "https://example.com/"),
        "sampling": SAMPLING,
        "sampling_tools": sampling(tools=[]),
        "sampling_choice": sampling(toolChoice={"mode": "none"}),
        "sampling_context": sampling(includeContext="thisServer"),
        "sampling_none": sampling(includeContext="none"),
        "roots": {"method": "roots/list"},
    }
    with alive(Server("asking", "1")) as server:

        def ask(keys, request):
            if keys and all(key in request.responses for key in keys):
                return f"{request.state}: {sorted(request.responses)}"
            return input_required(
                {key: requests[key] for key in keys if key not in request.responses}, (request.state or 0) + 1
            )

        def by_name(arguments, request):
            return ask(list(filter(None, arguments.get("keys", "").split(","))), request)

        server.tool("ask", "Asks.", takes({"keys": {"type": "string"}, "other": {}}))(by_name)
        server.tool("ask_too", "Asks.", takes({"keys": {"type": "string"}}))(by_name)
        server.prompt("ask", "Asks.", [{"name": "keys"}])(by_name)
        server.resource_template("ask://{keys}", "ask")(lambda uri, values, request: by_name(values, request))
        yield server


def ask(server, keys, *, method="tools/call", capabilities=BOTH, **more):
    params = {"uri": f"ask://{keys}"} if method == "resources/read" else {"name": "ask", "arguments": {"keys": keys}}
    extra = {key: more.pop(key) for key in ("inputResponses", "requestState") if key in more}
    return respond(server, method, params | extra, capabilities=capabilities, **more)


# ---- what may be asked, and of whom ----


@pytest.mark.parametrize("method", ["tools/call", "prompts/get", "resources/read"])
def test_three_methods_may_ask(asking, method):
    """MAY (Multi Round-Trip Requests › Supported Requests): tools/call, prompts/get and resources/read."""
    first = ask(asking, "form", method=method)["result"]
    assert first["resultType"] == "input_required"
    assert first["inputRequests"].keys() == {"form"}
    answers = {"form": {"action": "accept", "content": {"a": "b"}}}
    again = ask(asking, "form", method=method, id=2, inputResponses=answers, requestState=first["requestState"])[
        "result"
    ]
    assert again["resultType"] == "complete"
    assert "1: ['form']" in json.dumps(again)


@pytest.mark.parametrize(
    "method", ["server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list"]
)
def test_no_other_method_asks(demo, method):
    """MUST NOT (Multi Round-Trip Requests › Supported Requests): an InputRequiredResult on any other request."""
    params = {"inputResponses": OCTOCAT, "requestState": "x"}
    assert respond(demo, method, params, capabilities=BOTH)["result"]["resultType"] == "complete"


DECLARED = [
    ({}, "form", {"elicitation": {"form": {}}}),
    ({"sampling": {}, "roots": {}}, "form", {"elicitation": {"form": {}}}),
    ({"elicitation": {}}, "form", None),
    (FORM, "form", None),
    (URL, "form", {"elicitation": {"form": {}}}),
    ({"elicitation": {}}, "url", {"elicitation": {"url": {}}}),
    (FORM, "url", {"elicitation": {"url": {}}}),
    (URL, "url", None),
    (BOTH, "form,url", None),
    ({"elicitation": {}}, "sampling", {"sampling": {}}),
    ({"sampling": {}}, "sampling", None),
    ({"sampling": {}}, "sampling_tools", {"sampling": {"tools": {}}}),
    ({"sampling": {"context": {}}}, "sampling_tools", {"sampling": {"tools": {}}}),
    ({"sampling": {"tools": {}}}, "sampling_tools", None),
    ({"sampling": {}}, "sampling_choice", {"sampling": {"tools": {}}}),
    ({"sampling": {}}, "sampling_context", {"sampling": {"context": {}}}),
    ({"sampling": {"context": {}}}, "sampling_context", None),
    ({"sampling": {}}, "sampling_none", None),
    ({}, "sampling_tools", {"sampling": {"tools": {}}}),
    ({}, "roots", {"roots": {}}),
    ({"roots": {"listChanged": True}}, "roots", None),
    (FORM, "form,sampling", {"sampling": {}}),
]


@pytest.mark.parametrize(("declared", "keys", "missing"), DECLARED)
@pytest.mark.parametrize("method", ["tools/call", "prompts/get", "resources/read"])
def test_only_what_the_client_declared_is_asked(asking, method, declared, keys, missing):
    """MUST NOT (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): undeclared inputRequests.

    MUST NOT (Elicitation › Capabilities): modes that are not supported; an empty object means form mode.
    """
    answer = ask(asking, keys, method=method, capabilities=declared)
    if missing is None:
        assert answer["result"]["inputRequests"].keys() == set(keys.split(","))
    else:
        assert answer["error"]["code"] == -32021
        assert answer["error"]["data"] == {"requiredCapabilities": missing}


def test_a_missing_capability_is_a_bad_request():
    """MUST (Overview › _meta): on HTTP, the response status is 400 Bad Request."""
    with running(demo_server(0)) as server:
        reply = server.call_tool("create_repo", REPO)
        assert (reply.status, reply.message["error"]["data"]) == (
            400,
            {"requiredCapabilities": {"elicitation": {"form": {}}}},
        )
        assert server.call_tool("connect_billing", capabilities=FORM).status == 400
        tampered = server.call(
            "tools/call", {"name": "create_repo", "arguments": REPO, "requestState": "x"}, capabilities=BOTH
        )
        assert tampered.message["error"] == REFUSED


# ---- requestState ----


def round_one(server, arguments=REPO, user="anonymous"):
    return call_tool(server, "create_repo", arguments, user, capabilities=BOTH)["result"]


def retry(server, state, arguments=REPO, user="anonymous", name="create_repo", answers=OCTOCAT):
    return call_tool(server, name, arguments, user, id=2, capabilities=BOTH, inputResponses=answers, requestState=state)


def test_the_state_comes_back_as_it_was_sealed(demo):
    """MUST (Multi Round-Trip Requests › Client Requirements (Basic Workflow)): the client echoes the exact value."""
    state = round_one(demo)["requestState"]
    assert retry(demo, state)["result"]["content"][0]["text"] == "Created octocat/mcp."
    assert retry(demo, state)["result"]["content"][0]["text"] == "Created octocat/mcp."


def test_every_character_of_the_state_counts(demo):
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): reject state that fails verification."""
    state = round_one(demo)["requestState"]
    assert len(state) > 100
    for place, character in enumerate(state):
        flipped = chr(ord(character) ^ 1)
        assert retry(demo, state[:place] + flipped + state[place + 1 :]).get("error") == REFUSED, place
        assert retry(demo, state[:place] + state[place + 1 :]).get("error") == REFUSED, place


SPELLINGS = [
    lambda s: "",
    lambda s: ".",
    lambda s: s + "=",
    lambda s: s + " ",
    lambda s: " " + s,
    lambda s: s + "\n",
    lambda s: s + "-TAMPERED",
    lambda s: s.upper(),
    lambda s: s.replace(".", ".."),
    lambda s: s.partition(".")[0],
    lambda s: s.partition(".")[2],
    lambda s: s.partition(".")[0] + ".",
    lambda s: "." + s.partition(".")[2],
    lambda s: s.partition(".")[0] + "=." + s.partition(".")[2],
    lambda s: s.replace(".", "\n."),
    lambda s: s.partition(".")[0].replace("=", "") + "x." + s.partition(".")[2],
    lambda s: s + "." + s.partition(".")[2],
    lambda s: "\ud800." + s.partition(".")[2],
    lambda s: s.partition(".")[0] + ".\ud800é",
    lambda s: base64.b64encode(b'{"state": 1, "expires": 9e99}').decode() + "." + s.partition(".")[2],
    lambda s: "x" * 100_000,
]


@pytest.mark.parametrize("spell", SPELLINGS)
def test_no_other_spelling_of_the_state_is_taken(demo, spell):
    """MUST (Multi Round-Trip Requests › Security Considerations): attacker-controlled input; one refusal for all."""
    assert retry(demo, spell(round_one(demo)["requestState"])).get("error") == REFUSED


def test_a_last_character_with_spare_bits_has_one_spelling(demo):
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): over the exact characters received."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for length in range(3):  # three lengths of state, so that the base64 text ends in 0, 1 and 2 padding characters
        arguments = {"repo": "m" * (1 + length)}
        demo_state = round_one(demo, arguments)["requestState"]
        text, _, signature = demo_state.rpartition(".")
        bare = text.rstrip("=")
        for spare in range(64):
            other = bare[:-1] + alphabet[spare] + "=" * (len(text) - len(bare))
            if other != text:
                assert retry(demo, f"{other}.{signature}", arguments).get("error") == REFUSED


def test_the_state_is_of_no_use_to_another_user_or_request(demo):
    """SHOULD (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): bound to who and what it was for."""
    state = round_one(demo, user="alice")["requestState"]
    assert retry(demo, state, user="alice")["result"]
    for stolen in (
        {"user": "bob"},
        {"user": "anonymous"},
        {"user": "alice", "arguments": {"repo": "other"}},
        {"user": "alice", "arguments": {"repo": "mcp", "x": 1}},
        {"user": "alice", "arguments": {}},
        {"user": "alice", "name": "connect_billing"},
    ):
        assert retry(demo, state, **stolen).get("error") == REFUSED, stolen


def test_the_state_of_one_method_or_name_is_refused_by_another(asking):
    """SHOULD (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): bound to the originating request."""
    state = ask(asking, "form")["result"]["requestState"]
    for method in ("prompts/get", "resources/read"):
        assert ask(asking, "form", method=method, requestState=state).get("error") == REFUSED, method
    assert ask(asking, "form,form", requestState=state).get("error") == REFUSED
    params = {"name": "ask_too", "arguments": {"keys": "form"}, "requestState": state}
    assert respond(asking, "tools/call", params, capabilities=BOTH).get("error") == REFUSED
    with alive(Server("ask", "1")) as other:  # another secret
        other.tool("ask", "", takes({"keys": {}}))(lambda arguments, request: "")
        assert ask(other, "form", requestState=state).get("error") == REFUSED


def test_the_order_of_members_does_not_change_a_request(asking):
    """Choice: a JSON object has no order, so the digest has none either."""
    one, two = ({"keys": "form", "other": 1}, {"other": 1, "keys": "form"})
    state = call_tool(asking, "ask", one, capabilities=BOTH)["result"]["requestState"]
    assert (
        call_tool(asking, "ask", two, capabilities=BOTH, requestState=state)["result"]["resultType"] == "input_required"
    )


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [(0, True), (reference_server.STATE_SECONDS - 60, True), (reference_server.STATE_SECONDS + 1, False)],
)
def test_the_state_expires(demo, monkeypatch, seconds, taken):
    """SHOULD (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): a short expiry."""

    class Later:
        def __getattr__(self, name):
            return getattr(time, name)

        def time(self):
            return time.time() + seconds

    state = round_one(demo)["requestState"]
    monkeypatch.setattr(reference_server, "time", Later())
    assert ("result" in retry(demo, state)) is taken
    assert taken or retry(demo, state)["error"] == REFUSED


def test_null_counts_as_absent(demo):
    """Choice: client libraries send null for what they do not have, so null is absent."""
    first = call_tool(demo, "create_repo", REPO, capabilities=BOTH, inputResponses=None, requestState=None)["result"]
    assert first["resultType"] == "input_required"
    assert retry(demo, None)["result"]["content"][0]["text"] == "Created octocat/mcp."


@pytest.mark.parametrize(
    "extra",
    [
        {"requestState": 1},
        {"requestState": {}},
        {"requestState": ["x"]},
        {"requestState": True},
        {"inputResponses": "x"},
        {"inputResponses": []},
        {"inputResponses": {"github_login": 12345}},
        {"inputResponses": {"github_login": None}},
        {"inputResponses": {"github_login": "accept"}},
        {"inputResponses": {"github_login": {}}},
        {"inputResponses": {"github_login": {"action": "yes"}}},
        {"inputResponses": {"github_login": {"action": None}}},
        {"inputResponses": {"github_login": {"action": ["accept"]}}},
        {"inputResponses": {"github_login": {"action": "accept", "content": "octocat"}}},
        {"inputResponses": {"github_login": {"action": "accept", "content": ["octocat"]}}},
    ],
)
def test_answers_of_the_wrong_shape_are_an_error(demo, extra):
    """SHOULD (Multi Round-Trip Requests › Error Handling): validate that the data is a valid InputResponses object."""
    assert call_tool(demo, "create_repo", REPO, capabilities=BOTH, **extra)["error"]["code"] == -32602


# ---- the rounds ----


def test_a_missing_answer_is_asked_for_again(asking):
    """SHOULD (Multi Round-Trip Requests › Error Handling): a new InputRequiredResult for what is missing."""
    keys = "form,url,sampling"
    every = BOTH | {"sampling": {}}
    first = ask(asking, keys, capabilities=every)["result"]
    assert first["inputRequests"].keys() == {"form", "url", "sampling"}
    answers = {"form": {"action": "decline"}}
    second = ask(asking, keys, capabilities=every, inputResponses=answers, requestState=first["requestState"])["result"]
    assert second["inputRequests"].keys() == {"url", "sampling"}
    assert second["requestState"] != first["requestState"]
    answers |= {"url": {"action": "accept"}, "sampling": {"role": "assistant"}, "extra": {"action": "accept"}}
    third = ask(asking, keys, capabilities=every, inputResponses=answers, requestState=second["requestState"])["result"]
    assert third["content"][0]["text"] == "2: ['extra', 'form', 'sampling', 'url']"


def test_answers_to_questions_that_nobody_asked_are_ignored(demo):
    """SHOULD (Multi Round-Trip Requests › Error Handling): ignore any information that is not recognized."""
    extra = {"unknown": {"action": "accept", "content": {"foo": "bar"}}, "": {}}
    assert retry(demo, None, answers=OCTOCAT | extra)["result"]["content"][0]["text"] == "Created octocat/mcp."
    assert retry(demo, None, answers=extra)["result"]["resultType"] == "input_required"


@pytest.mark.parametrize("content", [None, {}, {"login": "octocat"}])
def test_an_answer_without_the_name_is_asked_for_again(demo, content):
    """SHOULD (Multi Round-Trip Requests › Error Handling): request what is missing again, rather than an error."""
    accepted = {"action": "accept"} | ({} if content is None else {"content": content})
    answer = retry(demo, round_one(demo)["requestState"], answers={"github_login": accepted})["result"]
    assert answer["resultType"] == "input_required"
    assert answer["inputRequests"]["github_login"]["params"]["requestedSchema"]["required"] == ["name"]


@pytest.mark.parametrize("content", [{"name": ""}, {"name": 1}, {"name": None}, {"name": ["octocat"]}])
@pytest.mark.parametrize("with_state", [True, False])
def test_a_name_that_is_none_is_refused_and_the_question_stays(demo, content, with_state):
    """SHOULD (Elicitation › Form Mode Security): received data matches the requested schema; with no state, too."""
    state = round_one(demo)["requestState"] if with_state else None
    wrong = {"github_login": {"action": "accept", "content": content}}
    refused = retry(demo, state, answers=wrong)["error"]
    assert refused["code"] == -32602
    assert refused["message"].startswith("inputResponses.github_login.content.name must ")
    assert retry(demo, state)["result"]["content"][0]["text"] == "Created octocat/mcp."


@pytest.mark.parametrize("action", ["decline", "cancel"])
@pytest.mark.parametrize(
    ("name", "arguments", "key"), [("create_repo", REPO, "github_login"), ("connect_billing", {}, "billing_key")]
)
def test_a_user_may_decline_or_cancel(demo, action, name, arguments, key):
    """MUST (Elicitation › Error Handling): handle cases where the user declines or cancels."""
    first = call_tool(demo, name, arguments, capabilities=BOTH)["result"]
    answer = retry(demo, first["requestState"], arguments, name=name, answers={key: {"action": action}})["result"]
    assert answer["resultType"] == "complete"
    assert answer["content"][0]["text"].endswith("as you wished.")


def test_creating_a_repository_asks_for_the_github_name(demo):
    """MUST (Elicitation › Form Mode Elicitation Requests): mode, message and a flat schema of primitives."""
    asked = round_one(demo)
    request = asked["inputRequests"]["github_login"]
    assert request["method"] == "elicitation/create"
    assert request["params"]["mode"] == "form"
    assert request["params"]["requestedSchema"] == {
        "type": "object",
        "properties": {"name": {"type": "string", "title": "GitHub user name", "minLength": 1}},
        "required": ["name"],
    }
    assert isinstance(request["params"]["message"], str)
    assert "content" not in asked


def test_billing_is_connected_on_a_page_of_its_own(demo):
    """MUST (Elicitation › User Interaction Model): URL mode; accept is consent to open the page, not completion."""
    first, other = (call_tool(demo, "connect_billing", capabilities=URL)["result"] for _ in range(2))
    request = first["inputRequests"]["billing_key"]
    assert request["params"].keys() == {"mode", "message", "url"}
    assert request["params"]["mode"] == "url"
    assert request["params"]["url"].startswith("https://billing.example.com/connect/")
    assert request != other["inputRequests"]["billing_key"]
    consent = {"name": "connect_billing", "answers": {"billing_key": {"action": "accept"}}}
    for _ in range(3):
        waiting = retry(demo, first["requestState"], {}, **consent)["result"]
        assert (waiting["resultType"], waiting["inputRequests"]) == ("input_required", first["inputRequests"])
    visit = request["params"]["url"].rpartition("/")[2]
    assert call_tool(demo, "finish_billing", {"visit": visit}, "mallory")["result"]["isError"] is True
    assert retry(demo, waiting["requestState"], {}, **consent)["result"]["resultType"] == "input_required"
    assert "isError" not in call_tool(demo, "finish_billing", {"visit": visit})["result"]
    for state in (first["requestState"], waiting["requestState"]):
        done = retry(demo, state, {}, **consent)["result"]
        assert done["content"][0]["text"] == f"Billing is connected (visit {visit})."
    still = retry(demo, other["requestState"], {}, **consent)["result"]
    assert still["resultType"] == "input_required"


def test_consent_without_the_state_connects_nothing(demo):
    """MUST (Elicitation › Security Considerations): bound to the user; acceptance alone is no visit."""
    answer = retry(demo, None, {}, name="connect_billing", answers={"billing_key": {"action": "accept"}})["result"]
    assert answer["resultType"] == "input_required"


def test_a_retry_may_come_to_another_instance_that_shares_the_state(tmp_path):
    """MUST (Overview › Statelessness): a retry is a request of its own; any instance with the secret can serve it."""
    path = str(tmp_path / "state")
    with (
        alive(demo_server(0, reference_server.Store(path))) as one,
        alive(demo_server(0, reference_server.Store(path))) as two,
    ):
        assert retry(two, round_one(one)["requestState"])["result"]["content"][0]["text"] == "Created octocat/mcp."


def test_the_state_does_not_tell_what_must_not_be_known(demo):
    """Choice: the state is signed, not secret; it holds who, what and until when, and no secret of the server."""
    payload = json.loads(base64.urlsafe_b64decode(round_one(demo, user="alice")["requestState"].rpartition(".")[0]))
    assert payload.keys() == {"state", "forms", "expires", "user", "method", "digest"}
    assert demo.store.secret.hex() not in json.dumps(payload)
    assert 0 < payload["expires"] - time.time() <= reference_server.STATE_SECONDS + PATIENCE


def test_a_refused_state_reaches_no_tool(asking):
    """Choice: the state is checked before the arguments are looked at, so that a refusal teaches nothing."""
    body = message("tools/call", {"name": "ask", "arguments": {"keys": 1}, "requestState": "x"}, capabilities=BOTH)
    assert json.loads(reference_server.respond(asking, body, Exchange(), "anonymous").body)["error"] == REFUSED


# ---- what a tool's author may ask ----


@pytest.fixture
def asks(capsys):
    """Calls a tool that returns this, of a client that can do everything; the error's code, or the result."""
    servers = []

    def ask(outcome, answers=None, state=None):
        server = Server("s", "1")
        server.tool("t", "", takes())(outcome if callable(outcome) else lambda arguments, request: outcome)
        servers.append(server)
        more = {} if answers is None else {"inputResponses": answers, "requestState": state}
        answer = call_tool(server, "t", capabilities=BOTH | {"sampling": {"tools": {}}, "roots": {}}, **more)
        return answer.get("result") or answer["error"]["code"]

    yield ask
    for server in servers:
        server.store.close()


@pytest.mark.parametrize("state", ["s", 0, "", {}, [], False])
def test_a_state_alone_is_a_legal_answer(state):
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): at least one of the two members."""
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(
            lambda arguments, request: (
                input_required(None, state=state) if request.state is None else json.dumps(request.state)
            )
        )
        first = call_tool(server, "t")["result"]
        assert first.keys() == {"resultType", "requestState", "_meta"}
        again = call_tool(server, "t", requestState=first["requestState"])["result"]
        assert json.loads(again["content"][0]["text"]) == state


@pytest.mark.parametrize("nothing", [input_required(None), {"resultType": "input_required"}, input_required({})])
def test_neither_a_question_nor_a_state_is_the_authors_fault(asks, capsys, nothing):
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): at least one of the two members."""
    assert asks(nothing) == -32603
    assert "ValueError: input_required without a question and without a state" in capsys.readouterr().err


def form(schema):
    return {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": schema}}


TITLED = [{"const": "a", "title": "A"}]
FORMS = [
    ({"type": "string", "minLength": 1, "maxLength": 9, "format": "date-time", "default": "x", "title": "t"}, True),
    ({"type": "number", "minimum": 0, "maximum": 1, "default": 0.5, "description": "d"}, True),
    ({"type": "integer", "minimum": 0}, True),
    ({"type": "boolean", "default": False}, True),
    ({"type": "string", "enum": ["a", "b"]}, True),
    ({"type": "string", "oneOf": TITLED}, True),
    ({"type": "array", "items": {"type": "string", "enum": ["a"]}, "minItems": 1, "maxItems": 2, "default": []}, True),
    ({"type": "array", "items": {"anyOf": TITLED}}, True),
    ({"type": "object"}, False),
    ({"type": "null"}, False),
    ({}, False),
    (True, False),
    ({"type": ["string", "null"]}, False),
    ({"type": "string", "pattern": "x"}, False),
    ({"type": "string", "format": "ipv4"}, False),
    ({"type": "string", "enum": [1]}, False),
    ({"type": "string", "oneOf": [{"const": "a"}]}, False),
    ({"type": "string", "minLength": -1}, False),
    ({"type": "string", "minLength": 1.5}, False),
    ({"type": "number", "minimum": "0"}, False),
    ({"type": "number", "multipleOf": 2}, False),
    ({"type": "boolean", "default": "yes"}, False),
    ({"type": "array"}, False),
    ({"type": "array", "items": {"type": "string"}}, False),
    ({"type": "array", "items": {"type": "object"}}, False),
    ({"type": "string", "properties": {}}, False),
]


@pytest.mark.parametrize(("field", "good"), FORMS)
def test_a_form_has_the_fields_that_clients_can_show(asks, capsys, field, good):
    """MUST (Elicitation › Requested Schema): flat objects with primitive properties, of the kinds that are listed."""
    asked = asks(input_required({"q": form(takes(field=field))}))
    assert (asked == -32603) is not good
    assert ("ValueError: form.requestedSchema.properties.field must fit" in capsys.readouterr().err) is not good


@pytest.mark.parametrize("schema", [
    {"type": "object"}, {"type": "array", "properties": {}}, {"properties": {}}, takes() | {"allOf": [{}]},
    takes() | {"required": "a"}, takes(a={"type": "string"}) | {"$defs": {}}, True, None,
])
def test_a_form_is_a_flat_object(asks, capsys, schema):
    """MUST (Elicitation › Requested Schema): the restricted subset of JSON Schema."""
    assert asks(input_required({"q": form(schema)})) == -32603
    assert "ValueError: form.requestedSchema" in capsys.readouterr().err


@pytest.mark.parametrize(("url", "good"), [
    ("https://example.com/", True), ("http://127.0.0.1:3000/a?b=c#d", True), ("https://[::1]/", True),
    ("https://example.com/%C3%A9", True), ("vscode://file/x", True),
    ("", False), ("example.com", False), ("/connect", False), ("//example.com", False), ("https:", False),
    ("https://", False), ("https:///x", False), ("https://example.com/a b", False), ("https://example.com/é", False),
    ("https://example.com/%zz", False), ("https://example.com/\n", False), ("1https://example.com", False),
    ("mailto:a@example.com", False), (None, False), (1, False), ("https://exa<mple.com", False),
])
def test_the_page_to_visit_has_a_valid_url(asks, capsys, url, good):
    """MUST (Elicitation › URL Mode Elicitation Requests): the `url` parameter contains a valid URL."""
    asked = asks(input_required({"q": elicit_url("?", url)}))
    assert (asked == -32603) is not good
    assert ("ValueError: url.url" in capsys.readouterr().err) is not good


TEXT_SAID = {"role": "user", "content": {"type": "text", "text": "t"}}
PICTURE = {"type": "image", "data": "AP8=", "mimeType": "image/png"}


@pytest.mark.parametrize(("question", "good"), [
    (sampling(), True),
    (sampling(messages=[TEXT_SAID, {"role": "assistant", "content": [PICTURE]}]), True),
    (sampling(tools=[], messages=[{"role": "assistant", "content": {"type": "tool_use", "id": "1"}}]), True),
    ({"method": "roots/list"}, True),
    (sampling(messages=[{"role": "user", "content": PICTURE | {"data": "no base64!"}}]), False),
    (sampling(messages=[{"role": "user", "content": [PICTURE | {"data": "no base64!"}]}]), False),
    (sampling(messages=[{"role": "system", "content": TEXT_SAID["content"]}]), False),
    (sampling(maxTokens="1"), False),
    ({"method": "sampling/createMessage", "params": {"messages": []}}, False),
    ({"method": "sampling/createMessage"}, False),
    ({"method": "tools/call", "params": {}}, False),
    ({"method": "elicitation/create", "params": {"mode": "voice", "message": "?"}}, False),
    ({"params": {}}, False),
    ("what?", False),
])
def test_a_question_is_one_of_three_requests(asks, capsys, question, good):
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): elicitation, sampling or roots."""
    assert (asks(input_required({"q": question})) == -32603) is not good
    assert ("Traceback" in capsys.readouterr().err) is not good


# ---- answers to forms ----

AGE = {"type": "integer", "minimum": 18, "maximum": 120}
COLOUR = {"type": "string", "oneOf": [{"const": "#f00", "title": "Red"}, {"const": "#0f0", "title": "Green"}]}
NICK = {"type": "string", "minLength": 3, "maxLength": 5}
TITLES = [{"const": "s", "title": "S"}, {"const": "m", "title": "M"}]
SIZES = {"type": "array", "items": {"anyOf": TITLES}, "minItems": 1}
ANSWERS = [
    (AGE, [18, 120, 42.0], [17, 121, 17.9, "18", True, None]),
    (COLOUR, ["#f00"], ["red", "", 1]),
    (NICK, ["abc", "abcde"], ["ab", "abcdef", 123]),
    ({"type": "string", "enum": ["a"]}, ["a"], ["A", "b"]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    (SIZES, [["s"], ["s", "m"]], [[], ["x"], "s", ["s", 1]]),
    ({"type": "number", "minimum": 0}, [0, 0.5], [-0.1, "0"]),
]


@pytest.mark.parametrize(("field", "good", "bad"), ANSWERS)
@pytest.mark.parametrize("named", [True, False])
def test_a_form_is_filled_in_as_its_schema_says(field, good, bad, named):
    """SHOULD (Elicitation › Form Mode Security): validate that received data matches the requested schema."""
    question = elicit("?", {"field": field})
    with alive(Server("s", "1")) as server:

        @server.tool("t", "", takes())
        def tool(arguments, request):
            answer = request.accepted("q", question) if named else request.accepted("q")
            return input_required({"q": question}) if answer is None else json.dumps(answer["field"])

        state = call_tool(server, "t", capabilities=FORM)["result"]["requestState"]
        for value in bad:
            filled = {"q": {"action": "accept", "content": {"field": value}}}
            refused = call_tool(server, "t", capabilities=FORM, inputResponses=filled, requestState=state)["error"]
            assert refused["code"] == -32602, value
            assert refused["message"].startswith("inputResponses.q.content.field"), value
        for value in good:
            filled = {"q": {"action": "accept", "content": {"field": value}}}
            done = call_tool(server, "t", capabilities=FORM, inputResponses=filled, requestState=state)["result"]
            assert json.loads(done["content"][0]["text"]) == value


def test_a_form_that_is_no_more_than_asked_for_may_hold_more():
    """SHOULD (Multi Round-Trip Requests › Error Handling): ignore any information that is not recognized."""
    asked = {"q": elicit("?", {"n": NICK})}
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(
            lambda arguments, request: (
                json.dumps(request.accepted("q")) if request.responses else input_required(asked)
            )
        )
        state = call_tool(server, "t", capabilities=FORM)["result"]["requestState"]
        filled = {"q": {"action": "accept", "content": {"n": "abc", "more": 1}}}
        done = call_tool(server, "t", capabilities=FORM, inputResponses=filled, requestState=state)["result"]
        assert json.loads(done["content"][0]["text"]) == {"n": "abc", "more": 1}


@pytest.mark.parametrize(("field", "good", "bad"), ANSWERS)
def test_a_tasks_form_is_filled_in_by_the_same_rules(field, good, bad):
    """SHOULD (Elicitation › Form Mode Security): in tasks/update as in a retried request; the question stays."""
    capabilities = FORM | {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    with alive(Server("s", "1")) as server:

        @server.tool("t", "", takes())
        def tool(arguments, request):
            request.as_task(required=True)
            request.ask({"q": elicit("?", {"field": field})})
            return json.dumps(request.accepted("q")["field"])

        def poll():
            return respond(server, "tasks/get", {"taskId": task}, capabilities=capabilities)["result"]

        def update(value):
            filled = {"q": {"action": "accept", "content": {"field": value}}}
            params = {"taskId": task, "inputResponses": filled}
            return respond(server, "tasks/update", params, capabilities=capabilities)

        task = call_tool(server, "t", capabilities=capabilities)["result"]["taskId"]
        assert eventually(lambda: poll()["status"] == "input_required")
        for value in bad:
            assert update(value)["error"]["code"] == -32602, value
            assert poll()["status"] == "input_required"
        assert "result" in update(good[0])
        assert eventually(lambda: poll()["status"] == "completed")
        assert json.loads(poll()["result"]["content"][0]["text"]) == good[0]


@pytest.mark.parametrize("question", [form(takes(a={"type": "object"})), elicit_url("?", "no url"), {"method": "x"}])
def test_a_task_that_asks_what_cannot_be_asked_has_failed(question, capsys):
    """MUST (Elicitation › Requested Schema): the restricted schemas, whoever asks; the fault is the tool's author's."""
    capabilities = BOTH | {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    with alive(Server("s", "1")) as server:

        @server.tool("t", "", takes())
        def tool(arguments, request):
            request.as_task(required=True)
            request.ask({"q": question})
            return "asked"

        def poll():
            return respond(server, "tasks/get", {"taskId": task}, capabilities=capabilities)["result"]

        task = call_tool(server, "t", capabilities=capabilities)["result"]["taskId"]
        assert eventually(lambda: poll()["status"] == "failed")
        assert poll()["error"]["code"] == -32603
    assert "Traceback" in capsys.readouterr().err

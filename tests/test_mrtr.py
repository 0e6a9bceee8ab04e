"""Multi round-trip requests: what may be asked of whom, and a requestState that is of no use anywhere else."""

import base64
import json
import time

import pytest
from support import PATIENCE, alive, call_tool, message, respond, running

import reference_server
from reference_server import Exchange, Server, demo_server, elicit, elicit_url, input_required, takes

FORM, URL = {"elicitation": {"form": {}}}, {"elicitation": {"url": {}}}
BOTH = {"elicitation": {"form": {}, "url": {}}}
REFUSED = {"code": -32602, "message": "requestState is not valid for this request"}
REPO = {"repo": "mcp"}
OCTOCAT = {"github_login": {"action": "accept", "content": {"name": "octocat"}}}
SAMPLING = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}


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


@pytest.mark.parametrize("content", [None, {}, {"name": ""}, {"name": 1}, {"name": None}, {"login": "octocat"}])
def test_an_answer_without_the_name_is_asked_for_again(demo, content):
    """SHOULD (Elicitation › Form Mode Security): validate that received data matches the requested schema."""
    accepted = {"action": "accept"} | ({} if content is None else {"content": content})
    answer = retry(demo, round_one(demo)["requestState"], answers={"github_login": accepted})["result"]
    assert answer["resultType"] == "input_required"
    assert answer["inputRequests"]["github_login"]["params"]["requestedSchema"]["required"] == ["name"]


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
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    assert isinstance(request["params"]["message"], str)
    assert "content" not in asked


def test_billing_is_connected_on_a_page_of_its_own(demo):
    """MUST (Elicitation › User Interaction Model): URL mode for what must not pass through the client."""
    first, other = (call_tool(demo, "connect_billing", capabilities=URL)["result"] for _ in range(2))
    request = first["inputRequests"]["billing_key"]
    assert request["params"].keys() == {"mode", "message", "url"}
    assert request["params"]["mode"] == "url"
    assert request["params"]["url"].startswith("https://billing.example.com/connect/")
    assert request != other["inputRequests"]["billing_key"]
    done = retry(
        demo, first["requestState"], {}, name="connect_billing", answers={"billing_key": {"action": "accept"}}
    )["result"]
    visit = request["params"]["url"].rpartition("/")[2]
    assert done["content"][0]["text"] == f"Billing is connected (visit {visit})."


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
    assert payload.keys() == {"state", "expires", "user", "method", "digest"}
    assert demo.store.secret.hex() not in json.dumps(payload)
    assert 0 < payload["expires"] - time.time() <= reference_server.STATE_SECONDS + PATIENCE


def test_a_refused_state_reaches_no_tool(asking):
    """Choice: the state is checked before the arguments are looked at, so that a refusal teaches nothing."""
    body = message("tools/call", {"name": "ask", "arguments": {"keys": 1}, "requestState": "x"}, capabilities=BOTH)
    assert json.loads(reference_server.respond(asking, body, Exchange(), "anonymous").body)["error"] == REFUSED

"""Two users: whatever belongs to one is answered to the other exactly like what never existed."""

import json

import pytest
from support import TASKS, Listener, alive, call_tool, eventually, respond, running

from reference_server import demo_server

CAPABILITIES = {"extensions": {TASKS: {}}, "elicitation": {"form": {}, "url": {}}}
UNKNOWN = ["cart_AAAAAAAAAAAAAAAAAAAAAA", "nothing", "", "\ud800", "\0", "é", "x" * 5000]


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


def create_cart(server, user):
    return call_tool(server, "create_cart", {}, user)["result"]["structuredContent"]["cartId"]


def place_hold(server, user):
    return call_tool(server, "place_hold", {"title": "Emma"}, user)["result"]["structuredContent"]["holdId"]


def create_task(server, user):
    """A task that waits for an answer, so that it stays as it is."""
    task = call_tool(server, "build_report", {"month": "May"}, user, capabilities=CAPABILITIES)["result"]["taskId"]
    params = {"taskId": task}
    assert eventually(
        lambda: (
            respond(server, "tasks/get", params, user, capabilities=CAPABILITIES)["result"]["status"]
            == "input_required"
        )
    )
    return task


def ask_for_name(server, user):
    return call_tool(server, "create_repo", {"repo": "mcp"}, user, capabilities=CAPABILITIES)["result"]["requestState"]


def add_to_cart(server, handle, user):
    return call_tool(server, "add_to_cart", {"cartId": handle, "sku": "book"}, user)


def use_task(method):
    def use(server, handle, user):
        params = {"taskId": handle, "inputResponses": {"charts": {"action": "accept", "content": {"charts": True}}}}
        return respond(server, method, params, user, capabilities=CAPABILITIES)

    return use


def listen_for_task(server, handle, user):
    with Listener(server, {"taskIds": [handle]}, user=user, capabilities=CAPABILITIES) as listener:
        return listener.first


def answer_question(server, handle, user):
    answers = {"github_login": {"action": "accept", "content": {"name": "octocat"}}}
    return call_tool(
        server,
        "create_repo",
        {"repo": "mcp"},
        user,
        capabilities=CAPABILITIES,
        inputResponses=answers,
        requestState=handle,
    )


HANDLES = {
    "a cart": (create_cart, add_to_cart),
    "a hold taken for a cart": (place_hold, add_to_cart),
    "tasks/get": (create_task, use_task("tasks/get")),
    "tasks/update": (create_task, use_task("tasks/update")),
    "tasks/cancel": (create_task, use_task("tasks/cancel")),
    "a subscription to a task": (create_task, listen_for_task),
    "a requestState": (ask_for_name, answer_question),
}


@pytest.mark.parametrize(("create", "use"), HANDLES.values(), ids=HANDLES.keys())
def test_anothers_handle_is_answered_like_one_that_never_was(demo, create, use):
    """MUST (Tasks Extension › Security Implications): check each access; possession is not permission."""
    handle = create(demo, "alice")
    for user in ("bob", "anonymous", "alic", "ALICE", "alice "):
        refused = json.dumps(use(demo, handle, user))
        assert handle not in refused
        for unknown in UNKNOWN:
            assert json.dumps(use(demo, unknown, user)) == refused, unknown
            assert json.dumps(use(demo, unknown, "alice")) == refused, unknown


OWNED = {name: pair for name, pair in HANDLES.items() if name != "a hold taken for a cart"}  # no tool takes a hold


@pytest.mark.parametrize(("create", "use"), OWNED.values(), ids=OWNED.keys())
def test_the_owner_still_has_it_afterwards(demo, create, use):
    """MUST (Tasks Extension › Security Implications): a stranger's attempt leaves no trace."""
    handle = create(demo, "alice")
    before = json.dumps(use(demo, handle, "bob"))
    if create is create_task:
        view = respond(demo, "tasks/get", {"taskId": handle}, "alice", capabilities=CAPABILITIES)["result"]
        assert view["status"] == "input_required"
    assert json.dumps(use(demo, handle, "alice")) != before


def test_a_handle_of_one_kind_is_none_of_another(demo):
    """Choice: a hold is no cart and a cart is no task, not even to the one who owns both."""
    hold, cart, task = (create(demo, "alice") for create in (place_hold, create_cart, create_task))
    unknown = add_to_cart(demo, "nothing", "alice")
    assert add_to_cart(demo, hold, "alice") == add_to_cart(demo, task, "alice") == unknown
    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        unknown = use_task(method)(demo, "nothing", "alice")
        assert use_task(method)(demo, cart, "alice") == use_task(method)(demo, hold, "alice") == unknown


def test_a_stranger_hears_nothing_of_a_task(demo):
    """MUST (Tasks Extension › Security Implications): also not on a subscription that names it."""
    task = create_task(demo, "alice")
    with (
        Listener(demo, {"taskIds": [task]}, user="bob", capabilities=CAPABILITIES) as bob,
        Listener(demo, {"taskIds": [task]}, user="alice", capabilities=CAPABILITIES) as alice,
    ):
        assert bob.first["params"]["notifications"] == {}
        use_task("tasks/cancel")(demo, task, "alice")
        assert alice.next()["params"]["status"] == "cancelled"
        assert bob.messages.empty()


def test_the_same_holds_over_http_whole_answers_compared():
    """Choice: the user is the bearer's name; whole answers are equal but for the date: status, fields, body."""
    with running(demo_server(0)) as server:

        def used(handle, user):
            with server.connect() as connection:
                cart = connection.call(
                    "tools/call", {"name": "add_to_cart", "arguments": {"cartId": handle, "sku": "x"}}, user
                )
                gets = connection.call("tasks/get", {"taskId": handle}, user, capabilities=CAPABILITIES)
                return [
                    (one.status, {name: value for name, value in one.fields.items() if name != "date"}, one.body)
                    for one in (cart, gets)
                ]

        cart, task = create_cart(server.server, "alice"), create_task(server.server, "alice")
        unknown = used("nothing", "bob")
        assert used(cart, "bob") == used(task, "bob") == used(cart, None) == used(task, None) == unknown
        assert used(cart, "alice")[0] != unknown[0]
        assert used(task, "alice")[1] != unknown[1]


def test_limits_are_each_users_own():
    """MUST (Tools › Security Considerations): rate limit tool invocations, each user for themselves."""
    with alive(demo_server(0, rate=(0.001, 3))) as server:

        def calls(user):
            return ["result" in call_tool(server, "search", {"query": "e"}, user) for _ in range(5)]

        assert calls("alice") == [True, True, True, False, False]
        assert calls("bob") == [True, True, True, False, False]

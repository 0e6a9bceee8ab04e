"""subscriptions/listen: its acknowledgement, its filter, its messages and its end."""

import queue
import threading

import pytest
from support import (
    PATIENCE,
    TASKS,
    Connection,
    Listener,
    alive,
    call_tool,
    eventually,
    message,
    meta,
    octets,
    respond,
    running,
)

import reference_server
from reference_server import Server, takes

CONFIG = "file:///project/config.json"
ID = "io.modelcontextprotocol/subscriptionId"
HAS_TASKS = {"extensions": {TASKS: {}}}
EVERYTHING = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": [CONFIG],
}
MESSAGES = {
    "toolsListChanged": "notifications/tools/list_changed",
    "promptsListChanged": "notifications/prompts/list_changed",
    "resourcesListChanged": "notifications/resources/list_changed",
    "resourceSubscriptions": "notifications/resources/updated",
}


def demo_server(step_seconds):
    """The demo, with changes of every list to subscribe to; by itself it has those of its tools alone."""
    server = reference_server.demo_server(step_seconds)
    server.changing |= {"prompts", "resources"}
    return server


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server
        assert server.subscriptions.open == []


def change_everything(server):
    """Everything that a subscription can be about, each once, in this order."""
    for kind in ("tools", "prompts", "resources"):
        server.list_changed(kind)
    server.resource_updated(CONFIG)
    server.resource_updated("file:///project/README.md")


def same(one, other):
    """Equal, and of the same type: 1 is not True, and 0 is not "0"."""
    return one == other and type(one) is type(other)


# ---- what is agreed ----


def test_the_acknowledgement_is_the_first_message(demo):
    """MUST (Subscriptions › Acknowledgment): acknowledged first, with the subscription's id and what was agreed."""
    with Listener(demo, EVERYTHING, id=7) as listener:
        assert listener.first == {
            "jsonrpc": "2.0",
            "method": "notifications/subscriptions/acknowledged",
            "params": {"_meta": {ID: 7}, "notifications": EVERYTHING},
        }


FILTERS = [
    ({}, {}),
    ({"toolsListChanged": False}, {}),
    ({"toolsListChanged": True, "promptsListChanged": False}, {"toolsListChanged": True}),
    ({"resourceSubscriptions": []}, {}),
    ({"resourceSubscriptions": [CONFIG, "file:///nothing"]}, {"resourceSubscriptions": [CONFIG]}),
    ({"resourceSubscriptions": ["file:///project/any.txt"]}, {"resourceSubscriptions": ["file:///project/any.txt"]}),
    ({"resourceSubscriptions": ["file:///project/../x"]}, {}),
    ({"thirdParty": True, "resourcesListChanged": True}, {"resourcesListChanged": True}),
    ({"taskIds": []}, {}),
]


@pytest.mark.parametrize(("wanted", "agreed"), FILTERS)
def test_the_acknowledgement_names_the_part_that_is_served(demo, wanted, agreed):
    """MUST (Subscriptions › Acknowledgment): the subset that the server honours; the rest is omitted."""
    with Listener(demo, wanted) as listener:
        assert listener.first["params"]["notifications"] == agreed


def test_a_server_agrees_only_to_changes_of_what_it_has():
    """MUST (Subscriptions › Acknowledgment): notification types that the server does not support are omitted."""
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes())(lambda arguments, request: "")
        with Listener(server, EVERYTHING) as listener:
            assert listener.first["params"]["notifications"] == {"toolsListChanged": True}


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        [],
        {"toolsListChanged": 1},
        {"toolsListChanged": "true"},
        {"resourceSubscriptions": CONFIG},
        {"resourceSubscriptions": [1]},
        {"taskIds": "x"},
    ],
)
def test_a_filter_of_the_wrong_shape_is_refused(demo, wanted):
    """MUST (Subscriptions › Notification Filter): booleans, and arrays of strings."""
    with Listener(demo, wanted, capabilities=HAS_TASKS) as listener:
        assert listener.first["error"]["code"] == -32602


@pytest.mark.parametrize("wanted", [*MESSAGES, None])
def test_a_stream_carries_only_what_was_asked_for(demo, wanted):
    """MUST NOT (Subscriptions › Opening a Stream): no notification types that were not explicitly requested."""
    asked = {wanted: EVERYTHING[wanted]} if wanted else {}
    with Listener(demo, asked) as listener, Listener(demo, EVERYTHING, id="all") as other:
        change_everything(demo)
        if wanted:
            assert listener.next()["method"] == MESSAGES[wanted]
        assert [other.next()["method"] for _ in range(4)] == list(MESSAGES.values())
        assert listener.messages.empty()
        assert other.messages.empty()


IDS = [0, "0", 1, "1", "", -1, 2**63, 10**30, "é/\n", "discover-1"]


@pytest.mark.parametrize("id", IDS)
def test_every_message_of_a_stream_carries_the_id_with_its_type(id):
    """MUST (Subscriptions › Receiving Notifications): the id of the listen request, in _meta of each message."""
    with alive(demo_server(0)) as server, Listener(server, EVERYTHING, id=id) as listener:
        change_everything(server)
        messages = [listener.first, *(listener.next() for _ in range(4))]
        server.subscriptions.end(0)
        final = listener.next()
        assert final["result"].keys() == {"resultType", "_meta"}
        assert same(final["id"], id)
        assert all(same(one["params"]["_meta"][ID], id) for one in messages)
        assert same(final["result"]["_meta"][ID], id)
        assert messages[-1]["params"]["uri"] == CONFIG


def test_several_subscriptions_are_told_apart_by_their_ids(demo):
    """MAY (Subscriptions › Multiple Concurrent Subscriptions): each notification carries its own subscription's id."""
    with Listener(demo, {"toolsListChanged": True}, id=0) as one, Listener(demo, EVERYTHING, id="0") as two:
        demo.list_changed("tools")
        assert same(one.next()["params"]["_meta"][ID], 0)
        assert same(two.next()["params"]["_meta"][ID], "0")


# ---- the demo's switches ----


def test_toggling_a_tool_tells_who_listens_for_tools(demo):
    """SHOULD (Tools › List Changed Notification): to clients that asked for toolsListChanged."""
    with Listener(demo, {"toolsListChanged": True}) as listener, Listener(demo, {"promptsListChanged": True}) as other:
        names = []
        for _ in range(2):
            call_tool(demo, "toggle_beta_tool")
            assert listener.next() == {
                "jsonrpc": "2.0",
                "method": "notifications/tools/list_changed",
                "params": {"_meta": {ID: 1}},
            }
            names.append({tool["name"] for tool in respond(demo, "tools/list")["result"]["tools"]})
        assert names[0] - names[1] == {"beta_search"}
        assert other.messages.empty()


def test_touching_the_configuration_tells_who_listens_for_it(demo):
    """MUST (Resources › Subscriptions): notifications/resources/updated whenever a watched resource changes."""
    with (
        Listener(demo, {"resourceSubscriptions": [CONFIG]}) as listener,
        Listener(demo, {"resourceSubscriptions": ["file:///project/LICENSE"]}) as other,
    ):
        call_tool(demo, "touch_config")
        assert listener.next() == {
            "jsonrpc": "2.0",
            "method": "notifications/resources/updated",
            "params": {"_meta": {ID: 1}, "uri": CONFIG},
        }
        assert other.messages.empty()


# ---- tasks ----


def test_tasks_can_be_listened_for_only_with_the_extension(demo):
    """MUST (Tasks Extension › Task Status Notifications): -32021 with the missing capability."""
    for capabilities in ({}, {"extensions": {}}, {"tasks": {}}):
        with Listener(demo, {"taskIds": ["x"]}, capabilities=capabilities) as listener:
            assert listener.first["error"]["code"] == -32021
            assert listener.first["error"]["data"] == {"requiredCapabilities": HAS_TASKS}
    with Listener(demo, {"taskIds": ["no such task"]}, capabilities=HAS_TASKS) as listener:
        assert listener.first["params"]["notifications"] == {}


def test_a_task_reports_each_change_to_who_listens_for_it(demo):
    """MUST (Tasks Extension › Task Status Notifications): a complete task, identical to what tasks/get returns."""
    go = threading.Event()
    demo.tool("gated", "Waits.", takes())(
        lambda arguments, request: request.as_task() or (go.wait(PATIENCE) and "done")
    )
    try:
        task = call_tool(demo, "gated", capabilities=HAS_TASKS)["result"]["taskId"]
        with Listener(demo, {"taskIds": [task]}, capabilities=HAS_TASKS, id="t") as listener:
            assert listener.first["params"]["notifications"] == {"taskIds": [task]}
            go.set()
            told = listener.next()
            assert told["method"] == "notifications/tasks"
            got = respond(demo, "tasks/get", {"taskId": task}, capabilities=HAS_TASKS)["result"]
            assert told["params"] == {key: value for key, value in got.items() if key != "resultType"} | {
                "_meta": {ID: "t"}
            }
            assert told["params"]["status"] == "completed"
    finally:
        go.set()
        del demo.tools["gated"]


# ---- the order of things ----


def test_a_change_right_after_the_acknowledgement_is_not_lost(demo):
    """MUST (Subscriptions › Acknowledgment): the acknowledgement first; the registration is older still."""

    class Eager(Listener):
        def emit(self, message):
            if message["method"].endswith("acknowledged"):
                demo.list_changed("tools")
            super().emit(message)

    with Eager(demo, {"toolsListChanged": True}) as listener:
        assert listener.first["method"] == "notifications/subscriptions/acknowledged"
        assert listener.next()["method"] == "notifications/tools/list_changed"
        assert listener.messages.empty()


def test_what_was_queued_is_sent_before_the_end():
    """SHOULD (Subscriptions › Graceful Closure): the empty result is the last message, after what was queued."""
    with alive(demo_server(0)) as server, Listener(server, {"toolsListChanged": True}) as listener:
        for _ in range(50):
            server.list_changed("tools")
        server.subscriptions.end(0)
        methods = [listener.next().get("method", "the result") for _ in range(51)]
        assert methods == ["notifications/tools/list_changed"] * 50 + ["the result"]


def test_a_server_that_stops_ends_its_streams_with_the_result():
    """SHOULD (Subscriptions › Graceful Closure): respond with an empty result before closing the stream."""
    with running(demo_server(0)) as server, server.connect() as connection:
        connection.send(octets(message("subscriptions/listen", {"notifications": EVERYTHING}, id="s")))
        connection.head()
        events = connection.events()
        assert next(events)["method"] == "notifications/subscriptions/acknowledged"
        server.http.stop()
        assert next(events) == {
            "jsonrpc": "2.0",
            "id": "s",
            "result": {
                "resultType": "complete",
                "_meta": {ID: "s", "io.modelcontextprotocol/serverInfo": server.server.info},
            },
        }
        assert list(events) == []


def test_a_subscription_is_forgotten_when_its_client_goes():
    """MUST (Streamable HTTP › Cancellation): closing the stream is the cancellation."""
    with running(demo_server(0)) as server:
        with server.connect() as connection:
            connection.send(octets(message("subscriptions/listen", {"notifications": EVERYTHING})))
            assert connection.head()[0] == 200
            assert next(connection.events())["method"] == "notifications/subscriptions/acknowledged"
            assert len(server.server.subscriptions.open) == 1
        assert eventually(lambda: not server.server.subscriptions.open)


# ---- many, slow, and both ----


def test_a_slow_reader_is_dropped_and_delays_nobody(demo, monkeypatch, capsys):
    """Choice: a subscription may be MAX_QUEUED notifications behind; then it is dropped, unnoticed by the others."""
    monkeypatch.setattr(reference_server, "MAX_QUEUED", 10)
    gate = threading.Event()

    class Slow(Listener):
        def emit(self, message):
            super().emit(message)
            if not message["method"].endswith("acknowledged"):
                assert gate.wait(PATIENCE)

    with (
        Slow(demo, {"toolsListChanged": True}, id="slow") as slow,
        Listener(demo, {"toolsListChanged": True}, id="fast") as fast,
    ):
        demo.list_changed("tools")
        assert slow.next()["method"] == "notifications/tools/list_changed"  # from here on it hangs in its write
        for _ in range(30):
            assert fast.next()["method"] == "notifications/tools/list_changed"
            demo.list_changed("tools")
        assert slow.request.cancelled.is_set()
        assert fast.request.reason is None
        gate.set()
        assert slow.next() is None
        assert eventually(lambda: len(demo.subscriptions.open) == 1)
    assert "reads too slowly" in capsys.readouterr().err


def test_a_client_that_reads_nothing_blocks_only_its_own_connection():
    """Choice: publishers only put into queues, so a full socket stops nobody but its own thread."""
    uri = "x://" + "long" * 25_000
    server = Server("s", "1")
    server.resource(uri, "long")(lambda uri, request: "")
    listen = octets(message("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}}))
    with (
        running(server, write_timeout=0.2) as http,
        http.connect() as deaf,
        Listener(server, {"resourceSubscriptions": [uri]}) as fast,
    ):
        deaf.send(listen)
        assert eventually(lambda: len(server.subscriptions.open) == 2)
        for _ in range(150):
            server.resource_updated(uri)
            assert fast.next()["params"]["uri"] == uri
        assert eventually(lambda: len(server.subscriptions.open) == 1)


def comes_and_goes(port, wanted, seen, failures):
    """One listener of the storm: opens a stream, reads a little, hangs up; three times."""
    try:
        for turn in range(3):
            with Connection(port) as connection:
                connection.send(octets(message("subscriptions/listen", {"notifications": wanted}, id=turn)))
                assert connection.head()[0] == 200
                events = connection.events()
                first = next(events)
                assert first["method"] == "notifications/subscriptions/acknowledged"
                assert first["params"]["notifications"] == wanted
                for _ in range(5):
                    event = next(events)
                    assert event["params"]["_meta"] == {ID: turn}
                    assert event["method"] in {MESSAGES[key] for key in wanted}, (event, wanted)
                    seen.put(event["method"])
    except BaseException as problem:
        failures.append(problem)


def test_a_storm_of_changes_while_listeners_come_and_go(monkeypatch):
    """MUST (Subscriptions › Acknowledgment): first on every stream; and nothing that was not asked for."""
    monkeypatch.setattr(reference_server, "MAX_QUEUED", 10**9)  # nobody is dropped, however slow the machine
    wishes = [
        {key: EVERYTHING[key] for key in keys}
        for keys in (
            ["toolsListChanged"],
            ["promptsListChanged"],
            ["resourcesListChanged"],
            ["resourceSubscriptions"],
            list(MESSAGES),
        )
    ]
    before, over, seen, failures = set(threading.enumerate()), threading.Event(), queue.SimpleQueue(), []

    def publish(server, number):
        while not over.is_set():
            change_everything(server)
            over.wait(0.005)

    with running(demo_server(0)) as server:
        publishers = [threading.Thread(target=publish, args=(server.server, number)) for number in range(10)]
        listeners = [
            threading.Thread(target=comes_and_goes, args=(server.port, wishes[number % 5], seen, failures))
            for number in range(50)
        ]
        for thread in publishers + listeners:
            thread.start()
        for thread in listeners:
            thread.join(PATIENCE)
        over.set()
        for thread in publishers:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in publishers + listeners)
        assert failures == []
        assert seen.qsize() == 50 * 3 * 5
        assert eventually(lambda: not server.server.subscriptions.open)
        assert eventually(lambda: not server.http.connections)
    workers = server.http.workers  # choice: a worker waits 5 s for another connection; nobody else is left
    assert eventually(lambda: len(set(threading.enumerate()) - before) == workers.idle)


def test_a_stream_stays_open_while_other_requests_are_served():
    """MUST NOT (Overview › Statelessness): one stream says nothing about the next request, not even its user's."""
    with running(demo_server(0)) as server, server.connect() as stream, server.connect() as other:
        stream.send(
            octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}), user="alice")
        )
        stream.head()
        events = stream.events()
        next(events)
        for user in ("bob", "alice", None):
            assert other.call("tools/call", {"name": "toggle_beta_tool"}, user).status == 200
            assert next(events)["method"] == "notifications/tools/list_changed"


def test_progress_and_log_messages_never_come_on_a_subscription(demo):
    """MUST NOT (Logging › Per-request log level): only on the stream of the request that set the level."""
    with Listener(demo, EVERYTHING, log_level="debug", progressToken="p") as listener:
        call_tool(demo, "build_report", {"month": "May"}, log_level="debug", progressToken="p")
        demo.list_changed("tools")
        assert listener.next()["method"] == "notifications/tools/list_changed"
        assert listener.messages.empty()


def test_the_stream_of_a_listener_is_an_event_stream():
    """MUST (Streamable HTTP › Receiving Messages): text/event-stream, one message an event."""
    with running(demo_server(0)) as server, server.connect() as connection:
        body = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "subscriptions/listen",
            "params": {"notifications": {}, "_meta": meta()},
        }
        connection.send(octets(body))
        status, fields = connection.head()
        assert (status, fields["content-type"], fields["cache-control"]) == (200, "text/event-stream", "no-cache")
        assert fields["x-accel-buffering"] == "no"
        assert next(connection.events())["params"]["notifications"] == {}

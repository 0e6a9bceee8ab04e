"""subscriptions/listen: its acknowledgement, its filter, its messages and its end."""

import json
import os
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
from reference_server import Exchange, Request, Server, StdioTransport, Store, takes

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


def demo_server(step_seconds, store=None):
    """The demo, with changes of every list to subscribe to; by itself it has those of its tools alone."""
    server = reference_server.demo_server(step_seconds, store)
    server.changing |= {"prompts", "resources"}
    return server


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server
        assert server.subscriptions.open == server.subscriptions.table == {}


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
        def push(self, text):
            if b"acknowledged" in text:
                demo.list_changed("tools")
            return super().push(text)

    with Eager(demo, {"toolsListChanged": True}) as listener:
        assert listener.first["method"] == "notifications/subscriptions/acknowledged"
        assert listener.next()["method"] == "notifications/tools/list_changed"
        assert listener.messages.empty()


def test_what_has_changed_is_told_before_the_end():
    """SHOULD (Subscriptions › Graceful Closure): the empty result is the last message, after what was in the feed."""
    with alive(demo_server(0)) as server, Listener(server, EVERYTHING) as listener:
        for _ in range(50):
            change_everything(server)
        server.subscriptions.end(0)
        methods = [listener.next().get("method", "the result")]
        while methods[-1] != "the result":
            methods.append(listener.next().get("method", "the result"))
        assert set(methods) == {*MESSAGES.values(), "the result"}
        assert listener.messages.empty()


def test_a_subscription_that_comes_at_the_end_ends_at_once():
    """SHOULD (Subscriptions › Graceful Closure): acknowledged and then closed with its result, whenever it comes."""
    with alive(demo_server(0)) as server:
        server.subscriptions.end(0)
        with Listener(server, EVERYTHING, id=5) as listener:
            assert listener.first["method"] == "notifications/subscriptions/acknowledged"
            assert listener.next()["id"] == 5


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
            assert eventually(lambda: len(server.server.subscriptions.open) == 1)
        assert eventually(lambda: not server.server.subscriptions.open)


# ---- many, slow, and both ----


class Bounded(Exchange):
    """The way back to a client that takes `room` messages and no more; what it was given is in `texts`."""

    def __init__(self, room=10**9):
        super().__init__()
        self.room, self.texts, self.comments = room, [], 0

    def push(self, text):
        if len(self.texts) < self.room:
            self.texts.append(text)
        return len(self.texts) < self.room

    def end(self, result):
        self.texts.append(result)

    def send_comment(self):
        self.comments += 1

    def comment_due(self):
        return 0.0 if not self.comments else 10.0

    @property
    def messages(self):
        return [json.loads(text) for text in self.texts]


def listen(server, exchange, notifications, id=1, user="anonymous", **metadata):
    """What a transport does with subscriptions/listen: it takes no thread and has no answer yet."""
    request = Request(message("subscriptions/listen", {"notifications": notifications}, id, **metadata), exchange, user)
    assert server.subscriptions.listen(request) is None
    return exchange


def test_a_reader_that_is_too_far_behind_gets_its_end_and_delays_nobody(demo, log):
    """Choice: a subscription that is MAX_QUEUED messages behind is ended with its result, unnoticed by the others."""
    with Listener(demo, {"toolsListChanged": True}, id="fast") as fast:
        slow = listen(demo, Bounded(room=5), {"toolsListChanged": True}, id="slow")
        for _ in range(10):
            demo.list_changed("tools")
            assert fast.next()["method"] == "notifications/tools/list_changed"
        *told, last = slow.messages
        assert [one["method"] for one in told[1:]] == ["notifications/tools/list_changed"] * 4
        assert (last["id"], last["result"]["_meta"][ID]) == ("slow", "slow")
        assert len(demo.subscriptions.open) == 1
        assert fast.reason is None and not fast.over
    assert log.text.count("too far behind") == 1


def test_a_subscription_takes_no_thread_and_is_forgotten_at_once(demo):
    """Choice: it is an entry in a table; whoever sees the client go takes it out of there, without waiting."""
    before = threading.active_count()
    exchanges = [listen(demo, Bounded(), EVERYTHING, id=number) for number in range(500)]
    assert threading.active_count() <= before
    assert len(demo.subscriptions.open) == 500
    demo.list_changed("prompts")
    assert eventually(lambda: all(len(one.texts) == 2 for one in exchanges))
    assert [one.messages[1]["params"]["_meta"] for one in exchanges] == [{ID: number} for number in range(500)]
    for one in exchanges:
        assert demo.subscriptions.forget(one)
        assert demo.subscriptions.forget(one) is None
    assert demo.subscriptions.open == demo.subscriptions.table == {}


def test_a_client_that_has_gone_before_its_acknowledgement_is_not_entered(demo):
    """Choice: nobody would ever take it out again."""
    listen(demo, Bounded(room=0), EVERYTHING)
    assert demo.subscriptions.open == demo.subscriptions.table == {}


def test_a_change_is_encoded_once_for_all_who_hear_of_it(demo, monkeypatch):
    """Choice: in two pieces around the subscription's id, so that the cost of one more subscriber is a copy."""
    exchanges = [listen(demo, Bounded(), {"resourceSubscriptions": [CONFIG]}, id=f'"{number}')
                 for number in range(100)]
    calls, encode = [], reference_server.sse.encode_json
    monkeypatch.setattr(reference_server.sse, "encode_json", lambda value: calls.append(value) or encode(value))
    demo.resource_updated(CONFIG)
    assert eventually(lambda: all(len(one.texts) == 2 for one in exchanges))
    assert len(calls) == 2  # the message, and the mark where the id goes
    assert [one.messages[1]["params"]["_meta"][ID] for one in exchanges] == [f'"{number}' for number in range(100)]
    for one in exchanges:
        demo.subscriptions.forget(one)


def test_an_id_or_a_uri_that_looks_like_the_mark_is_itself(demo):
    """MUST (Subscriptions › Receiving Notifications): the id of the listen request, whatever it is."""
    uri = f"file:///project/{reference_server.HERE}"
    exchange = listen(demo, Bounded(), {"resourceSubscriptions": [uri]}, id=reference_server.HERE)
    demo.resource_updated(uri)
    assert eventually(lambda: len(exchange.texts) == 2)
    assert exchange.messages[1]["params"] == {"_meta": {ID: reference_server.HERE}, "uri": uri}
    demo.subscriptions.finish(exchange)
    assert exchange.messages[2]["id"] == exchange.messages[2]["result"]["_meta"][ID] == reference_server.HERE


def test_the_keeper_comments_on_streams_that_are_quiet():
    """SHOULD (Streamable HTTP › Receiving Messages): comments keep a quiet stream, without a thread of its own."""
    with alive(demo_server(0)) as server:
        exchanges = [listen(server, Bounded(), {}, id=number) for number in range(10)]
        assert eventually(lambda: all(one.comments == 1 for one in exchanges))
        for one in exchanges:
            server.subscriptions.forget(one)


# ---- the feed ----


def test_a_change_of_an_unknown_kind_is_logged_and_passed_over(demo, log):
    """Choice: a feed that is shared may hold what another program has put there; the keeper goes on."""
    exchange = listen(demo, Bounded(), {"toolsListChanged": True})
    with demo.store.transaction():
        demo.store.tell("weather", "sunny")
        demo.store.tell("tools")
    assert eventually(lambda: len(exchange.texts) == 2)
    assert "[ref] the feed has a change of an unknown kind: weather" in log.lines()
    assert demo.keeper.is_alive()
    demo.subscriptions.forget(exchange)


def test_what_changes_often_is_told_once_a_round_as_it_stands(demo):
    """Choice: a notification tells how things stand, so that several changes of one subject need one."""
    exchange = listen(demo, Bounded(), EVERYTHING)
    with demo.store.transaction():
        for _ in range(100):
            demo.list_changed("tools")
            demo.resource_updated(CONFIG)
        demo.list_changed("prompts")
    assert eventually(lambda: len(exchange.texts) == 4)
    assert [one["method"].removeprefix("notifications/") for one in exchange.messages[1:]] == [
        "tools/list_changed", "resources/updated", "prompts/list_changed"]
    demo.subscriptions.forget(exchange)


def test_who_may_have_missed_a_change_is_not_left_in_doubt(tmp_path, monkeypatch, log):
    """Choice: an instance that was suspended while the feed was purged ends its subscriptions."""
    monkeypatch.setattr(reference_server, "MAX_CHANGES", 3)
    with (alive(demo_server(0, Store(str(tmp_path / "state")))) as one,
          alive(demo_server(0, Store(str(tmp_path / "state")))) as two):
        one.list_changed("tools")
        assert eventually(lambda: one.subscriptions.seen == 1)
        exchange = listen(one, Bounded(), {"resourceSubscriptions": [CONFIG]}, id=3)
        deliver = one.subscriptions.deliver
        monkeypatch.setattr(one.subscriptions, "deliver", lambda: None)  # as if suspended
        two.resource_updated(CONFIG)
        for _ in range(5):
            two.list_changed("prompts")
        monkeypatch.setattr(one.subscriptions, "deliver", deliver)
        two.list_changed("tools")
        assert eventually(lambda: len(exchange.texts) == 2)
        assert exchange.messages[1]["id"] == 3 and "result" in exchange.messages[1]
        assert [line for line in log.lines() if "changes were forgotten" in line]
        assert one.subscriptions.seen == 8
        again = listen(one, Bounded(), {"toolsListChanged": True})  # and it goes on
        two.list_changed("tools")
        assert eventually(lambda: len(again.texts) == 2)


def test_an_instance_that_was_away_for_less_than_that_tells_all(tmp_path, monkeypatch):
    """Choice: no clock decides it: after an hour's suspension the subscribers hear what they have missed."""
    with (alive(demo_server(0, Store(str(tmp_path / "state")))) as one,
          alive(demo_server(0, Store(str(tmp_path / "state")))) as two):
        exchange = listen(one, Bounded(), EVERYTHING)
        deliver = one.subscriptions.deliver
        monkeypatch.setattr(one.subscriptions, "deliver", lambda: None)
        change_everything(two)
        monkeypatch.setattr(two.store, "purge", lambda: None)
        now = reference_server.time.time
        monkeypatch.setattr(reference_server.time, "time", lambda: now() + 600)
        monkeypatch.setattr(one.subscriptions, "deliver", deliver)
        two.list_changed("tools")
        assert eventually(lambda: len(exchange.texts) == 5)
        assert {one["method"] for one in exchange.messages[1:]} == set(MESSAGES.values())


class Between(threading.Event):
    """Has something happen right after a wait for it has run out, before the one who waited goes on."""

    happening = None

    def wait(self, timeout=None):
        woken = super().wait(timeout)
        if not woken and (happening := self.happening):
            self.happening = None
            happening()
        return woken


def test_a_change_that_comes_between_the_keepers_wait_and_its_look_is_told():
    """Choice: what wakes is forgotten only by who has been woken by it: in memory nothing else tells of a commit."""
    server = demo_server(0)
    server.store.committed = Between()
    with alive(server):
        exchange = listen(server, Bounded(), {"toolsListChanged": True})
        server.store.committed.happening = lambda: server.list_changed("tools")
        assert eventually(lambda: len(exchange.texts) == 2)
        server.subscriptions.forget(exchange)


def test_a_change_that_was_undone_is_not_told(demo):
    """Choice: the change is a row of the transaction that makes it true."""
    exchange = listen(demo, Bounded(), {"toolsListChanged": True, "promptsListChanged": True})
    with pytest.raises(ZeroDivisionError), demo.store.transaction():
        demo.list_changed("tools")
        raise ZeroDivisionError
    demo.list_changed("prompts")
    assert eventually(lambda: len(exchange.texts) == 2)
    assert exchange.messages[1]["method"] == "notifications/prompts/list_changed"
    demo.subscriptions.forget(exchange)


def test_a_row_that_cannot_be_read_keeps_nobody_from_hearing_of_the_others(demo, log):
    """Choice: what one change holds is passed over with a traceback; the feed does not stand still before it."""
    task = call_tool(demo, "build_report", {"month": "May"}, capabilities=HAS_TASKS)["result"]["taskId"]
    exchange = listen(demo, Bounded(), {"taskIds": [task], "promptsListChanged": True}, capabilities=HAS_TASKS)
    assert eventually(lambda: not demo.tasks.running)
    written = demo.store.read("SELECT max(number) FROM changes")[0][0]
    assert eventually(lambda: demo.subscriptions.seen == written)
    with demo.store.transaction():
        demo.store.tell("task", task, "no JSON")
        demo.list_changed("prompts")
    assert eventually(lambda: exchange.messages[-1]["method"] == "notifications/prompts/list_changed")
    assert log.text.count("Traceback") == 1
    demo.subscriptions.forget(exchange)


def test_a_cancellation_among_changes_that_were_missed_stops_the_work_all_the_same(tmp_path, monkeypatch):
    """Choice: who cannot know what was in the feed looks at all that it has running."""
    monkeypatch.setattr(reference_server, "MAX_CHANGES", 3)
    with (alive(demo_server(60 * PATIENCE, Store(str(tmp_path / "state")))) as one,
          alive(demo_server(0, Store(str(tmp_path / "state")))) as two):
        task = call_tool(one, "build_report", {"month": "May"}, capabilities=HAS_TASKS)["result"]["taskId"]
        deliver = one.subscriptions.deliver
        monkeypatch.setattr(one.subscriptions, "deliver", lambda: None)  # as if suspended
        respond(two, "tasks/cancel", {"taskId": task}, capabilities=HAS_TASKS)
        for _ in range(10):
            two.list_changed("tools")
        monkeypatch.setattr(one.subscriptions, "deliver", deliver)
        two.list_changed("tools")
        assert eventually(lambda: not one.tasks.running)


def test_over_stdio_too_a_reader_that_is_too_far_behind_gets_its_end(monkeypatch):
    """MUST (Cancellation › Cancellation): on stdio notifications/cancelled when it tears a subscription down."""
    monkeypatch.setattr(reference_server, "MAX_QUEUED", 10)
    uri = "x://" + "long" * 10_000
    server = Server("s", "1")
    server.resource(uri, "long")(lambda uri, request: "")
    (source, entrance), (exit, sink) = os.pipe(), os.pipe()
    transport = threading.Thread(target=StdioTransport(server, source, sink, "me").serve)
    transport.start()
    try:
        wanted = message("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}}, id="s")
        os.write(entrance, json.dumps(wanted).encode() + b"\n")
        assert eventually(lambda: server.subscriptions.open)
        for number in range(1, 30):  # the pipe holds one or two of them, the queue ten
            server.resource_updated(uri)
            assert eventually(lambda number=number: server.subscriptions.seen == number)
        assert server.subscriptions.open == {}
        os.close(entrance)
        with open(exit, "rb") as output:
            closing = threading.Thread(target=lambda: (transport.join(PATIENCE), os.close(sink)))
            closing.start()
            *told, result, note = [json.loads(line) for line in output]
            closing.join(PATIENCE)
        assert 10 < len(told) < 20 and all(one["params"]["_meta"] == {ID: "s"} for one in told)
        assert (result["id"], result["result"]["_meta"][ID]) == ("s", "s")
        assert (note["method"], note["params"]["requestId"]) == ("notifications/cancelled", "s")
    finally:
        transport.join(PATIENCE)
        assert not transport.is_alive()
        os.close(source)
        server.store.close()


# ---- what one listen may cost ----


@pytest.mark.parametrize("wanted", [
    {"resourceSubscriptions": [CONFIG] * 1001},
    {"taskIds": [f"task {number}" for number in range(1001)]},
    {"resourceSubscriptions": [CONFIG] * 600, "taskIds": ["x"] * 401}])
def test_a_subscription_may_name_a_bounded_number_of_things(demo, wanted):
    """Choice: MAX_NAMED of them in all, because each costs a look-up and an entry."""
    with Listener(demo, wanted, capabilities=HAS_TASKS) as listener:
        assert listener.first["error"]["code"] == -32602 and "1000" in listener.first["error"]["message"]


def test_a_thousand_task_ids_are_looked_up_at_once(demo, monkeypatch):
    """Choice: one query for all of them; what does not exist is not acknowledged."""
    task = call_tool(demo, "build_report", {"month": "May"}, capabilities=HAS_TASKS)["result"]["taskId"]
    reads, read = [], demo.store.read
    monkeypatch.setattr(demo.store, "read", lambda statement, *values: (
        reads.append(statement) if threading.current_thread() is threading.main_thread() else None,
        read(statement, *values))[1])
    ids = ["\ud800", "' OR 1=1 --", task, *(f"task {number}" for number in range(996)), task]
    exchange = listen(demo, Bounded(), {"taskIds": ids}, capabilities=HAS_TASKS)
    assert exchange.messages[0]["params"]["notifications"] == {"taskIds": [task]}
    assert len([one for one in reads if "FROM tasks" in one]) == 1
    demo.subscriptions.forget(exchange)


# ---- many, slow, and both: over sockets ----


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

"""What is done with a handle from its making to its end, for instances that share a state file, and a round robin.

Each walk speaks to one port as a client would; a connection carries one request, so that behind a round robin each
request meets another instance than the one before. A walk asserts what it is told.
"""

import itertools
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from support import PATIENCE, TASKS, Connection, eventually, message, octets

Json = dict[str, Any]

KNOWS_TASKS: Json = {"extensions": {TASKS: {}}, "elicitation": {}}
ASKS: Json = {"elicitation": {"form": {}, "url": {}}}


class RoundRobin:
    """Listens on `port` and passes each connection to the next of several ports. `passed` counts, by port."""

    def __init__(self, *ports: int) -> None:
        self.turns = itertools.cycle(ports)
        self.passed: Counter[int] = Counter()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self.run)]
        self.threads[0].start()

    def run(self) -> None:
        """The accept loop; `__exit__` wakes it."""
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            port = next(self.turns)
            self.passed[port] += 1
            self.threads = [one for one in self.threads if one.is_alive()]
            self.threads.append(threading.Thread(target=self.pass_on, args=(client, port)))
            self.threads[-1].start()

    def pass_on(self, client: socket.socket, port: int) -> None:
        """One connection: octets both ways until either end closes, and then both are closed."""
        with client, socket.create_connection(("127.0.0.1", port), PATIENCE) as instance:
            other = {client: instance, instance: client}
            while True:
                for one in select.select([client, instance], [], [])[0]:
                    try:
                        data = one.recv(65536)
                        other[one].sendall(data)
                    except ConnectionError:
                        data = b""
                    if not data:
                        return

    def __enter__(self) -> "RoundRobin":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close() alone would not
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a connection of the round robin did not end"
        self.listener.close()


class Client(NamedTuple):
    """Requests to one port, each on a connection of its own."""

    port: int

    def call(self, method: str, params: Json | None = None, user: str | None = None, **more: Any) -> Json:
        """The response to one request."""
        with Connection(self.port) as connection:
            return connection.call(method, params, user, **more).message

    def call_tool(self, name: str, arguments: Json | None = None, user: str | None = None, **more: Any) -> Json:
        """The response to one tools/call; `more`: further params, then metadata."""
        params = {key: more.pop(key) for key in ("inputResponses", "requestState") if key in more}
        return self.call("tools/call", {"name": name, "arguments": arguments or {}} | params, user, **more)

    def result_of(self, name: str, arguments: Json | None = None, user: str | None = None, **more: Any) -> Json:
        """The result of a tools/call that succeeds."""
        response = self.call_tool(name, arguments, user, **more)
        assert "result" in response and not response["result"].get("isError"), response
        return dict(response["result"])

    def task(self, verb: str, task_id: str, **params: Any) -> Json:
        """The result of tasks/get, tasks/update or tasks/cancel."""
        response = self.call(f"tasks/{verb}", {"taskId": task_id} | params, capabilities=KNOWS_TASKS)
        assert "result" in response, response
        return dict(response["result"])

    def becomes(self, task_id: str, status: str) -> bool:
        """Whether a task reaches this status, asked often and each time on the next connection."""
        return eventually(lambda: self.task("get", task_id)["status"] == status)


def walk_carts(client: Client) -> None:
    """A cart made by one instance is filled by the other, and is its user's alone."""
    cart = client.result_of("create_cart", user="alice")["structuredContent"]["cartId"]
    for count, article in enumerate(("pen", "ink", "paper"), 1):
        items = client.result_of("add_to_cart", {"cartId": cart, "sku": article}, "alice")["structuredContent"]["items"]
        assert items == ["pen", "ink", "paper"][:count]
    refused = client.call_tool("add_to_cart", {"cartId": cart, "sku": "ink"}, "bob")["result"]
    unknown = client.call_tool("add_to_cart", {"cartId": "cart_0", "sku": "ink"}, "bob")["result"]
    assert refused["isError"] and refused == unknown


def walk_holds(client: Client) -> None:
    """Each hold is a handle of its own, whichever instance gives it out."""
    holds = [client.result_of("place_hold", {"title": "Emma"}, "alice")["structuredContent"] for _ in range(2)]
    assert holds[0]["title"] == holds[1]["title"] == "Emma"
    assert holds[0]["holdId"] != holds[1]["holdId"]
    assert all(hold["holdId"].startswith("hold_") for hold in holds)


def walk_questions(client: Client) -> None:
    """What one instance asks, the other takes the answer to; the state in between is of no use to anybody else."""
    asked = client.result_of("create_repo", {"repo": "notes"}, "alice", capabilities=ASKS)
    assert asked["resultType"] == "input_required" and asked["inputRequests"].keys() == {"github_login"}
    answer = {"inputResponses": {"github_login": {"action": "accept", "content": {"name": "ada"}}},
              "requestState": asked["requestState"], "capabilities": ASKS}
    stolen = client.call_tool("create_repo", {"repo": "notes"}, "bob", **answer)
    assert stolen["error"]["code"] == -32602
    created = client.result_of("create_repo", {"repo": "notes"}, "alice", **answer)
    assert created["content"][0]["text"] == "Created ada/notes."
    asked = client.result_of("connect_billing", user="alice", capabilities=ASKS)
    visited = {"inputResponses": {"billing_key": {"action": "accept"}}, "requestState": asked["requestState"]}
    waiting = client.result_of("connect_billing", user="alice", capabilities=ASKS, **visited)
    assert waiting["inputRequests"] == asked["inputRequests"]
    visit = asked["inputRequests"]["billing_key"]["params"]["url"].rpartition("/")[2]
    client.result_of("finish_billing", {"visit": visit}, "alice")
    connected = client.result_of("connect_billing", user="alice", capabilities=ASKS, **visited)
    assert connected["content"][0]["text"].startswith("Billing is connected")


def create_report(client: Client) -> str:
    """A task that asks after its fifth step."""
    result = client.result_of("build_report", {"month": "May"}, capabilities=KNOWS_TASKS)
    assert result["resultType"] == "task", result
    return str(result["taskId"])


def walk_tasks(client: Client) -> None:
    """A task is created at one instance, polled, answered and collected at either."""
    task = create_report(client)
    assert client.becomes(task, "input_required")
    assert client.task("get", task)["inputRequests"].keys() == {"charts"}
    client.task("update", task, inputResponses={"charts": {"action": "accept", "content": {"charts": True}}})
    assert client.becomes(task, "completed")
    for _ in range(2):  # both instances tell the same
        done = client.task("get", task)
        assert done["result"]["content"][0]["text"] == "The report for May is ready, with charts."
    stranger = client.call("tasks/get", {"taskId": task}, "mallory", capabilities=KNOWS_TASKS)
    assert stranger["error"] == client.call("tasks/get", {"taskId": "0"}, capabilities=KNOWS_TASKS)["error"]


def walk_cancellation(client: Client) -> None:
    """A task is created at one instance and cancelled at the other; from then on both say so."""
    task = create_report(client)
    client.task("cancel", task)
    for _ in range(4):
        assert client.task("get", task)["status"] == "cancelled"


def beta_is_listed(client: Client) -> bool:
    """Whether the next instance lists the tool."""
    return "beta_search" in [tool["name"] for tool in client.call("tools/list")["result"]["tools"]]


def walk_beta(client: Client) -> None:
    """A tool that one instance lists is listed, and can be called, at the other."""
    assert not beta_is_listed(client)
    client.result_of("toggle_beta_tool")
    assert beta_is_listed(client) and beta_is_listed(client)
    client.result_of("beta_search", {"query": "x"})
    client.result_of("toggle_beta_tool")
    assert not beta_is_listed(client) and not beta_is_listed(client)


def walk_changes(client: Client, told: Callable[[float], None] = lambda seconds: None) -> None:
    """A subscriber of one instance hears of changes made through the other; `told` gets how long after the answer."""
    task = create_report(client)
    assert client.becomes(task, "input_required")
    config = "file:///project/config.json"
    wanted = {"toolsListChanged": True, "resourceSubscriptions": [config], "taskIds": [task]}
    with Connection(client.port) as listening:
        listening.send(octets(message("subscriptions/listen", {"notifications": wanted}, capabilities=KNOWS_TASKS)))
        assert listening.head()[0] == 200
        events = listening.events()
        assert next(events)["params"]["notifications"] == wanted
        for tool, method in [("touch_config", "resources/updated")] + 2 * [("toggle_beta_tool", "tools/list_changed")]:
            client.result_of(tool)
            answered = time.monotonic()
            assert any(event["method"] == f"notifications/{method}" for event in events)  # older ones may come first
            told(time.monotonic() - answered)
            client.call("server/discover")  # or the next change would come from the subscriber's own instance
        client.task("update", task, inputResponses={"charts": {"action": "decline"}})
        assert any(event["params"].get("status") == "completed" for event in events)


WALKS: dict[str, Callable[[Client], None]] = {
    "carts": walk_carts, "holds": walk_holds, "questions": walk_questions, "tasks": walk_tasks,
    "cancellation": walk_cancellation, "beta": walk_beta, "changes": walk_changes}

"""The tasks extension (SEP-2663): work that outlives its connection, and the handle by which its user finds it."""

import datetime
import json
import threading

import pytest
from support import PATIENCE, TASKS, Listener, Recorder, alive, call_tool, eventually, message, octets, respond, running

import reference_server
from reference_server import (
    TEXT,
    Rejection,
    Server,
    Store,
    TaskRequest,
    ToolError,
    demo_server,
    elicit,
    input_required,
    takes,
)

HAS_TASKS = {"extensions": {TASKS: {}}}
CAN_ASK = HAS_TASKS | {"elicitation": {}}
NOT_FOUND = {"code": -32602, "message": "There is no such task"}
MAY = {"month": "May"}
ACTIVE = ("working", "input_required")


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


@pytest.fixture
def server():
    """A server of one tool for each way in which a task can end; `server.go` lets `gated` go on."""
    with alive(Server("tasks", "1")) as server:
        server.go, server.runs = threading.Event(), []
        add_tools(server)
        yield server
        server.go.set()


def add_tools(server):
    @server.tool("gated", "Waits for the test.", takes())
    def gated(arguments, request):
        request.as_task()
        server.runs.append(request)
        while not server.go.is_set():
            request.sleep(0.001)
        return "through the gate"

    @server.tool("fails", "Fails in a way that a model can act on.", takes())
    def fails(arguments, request):
        request.as_task()
        raise ToolError("not like this")

    @server.tool("rejects", "Ends with a JSON-RPC error.", takes())
    def rejects(arguments, request):
        request.as_task()
        raise Rejection(-32603, "API rate limit exceeded", {"limit": 1})

    @server.tool("crashes", "Has a fault.", takes())
    def crashes(arguments, request):
        request.as_task()
        raise KeyError("swordfish")

    @server.tool("required", "Cannot do without a task.", takes())
    def required(arguments, request):
        request.as_task(required=True)
        return "done"

    @server.tool("asks", "Asks two things, then a third.", takes())
    def asks(arguments, request):
        request.as_task()
        two = request.ask({"a": elicit("?", {"x": TEXT}), "b": elicit("?", {"x": TEXT})})
        three = request.ask({"a": elicit("?", {"x": TEXT}), "c": elicit("?", {"x": TEXT})})
        return json.dumps([two, three])

    @server.tool("asks_first", "Asks before it becomes a task.", takes())
    def asks_first(arguments, request):
        if not request.responses:
            return input_required({"q": elicit("?", {"x": TEXT})}, "kept")
        request.as_task()
        return f"{request.state} {request.accepted('q')}"

    @server.tool("short", "Is kept for one second.", takes())
    def short(arguments, request):
        request.as_task(ttl_ms=1000)
        server.runs.append(request)
        request.sleep(PATIENCE)

    @server.tool("steps", "Reports progress and log messages.", takes())
    def steps(arguments, request):
        request.as_task()
        request.log("error", "not on a task")
        request.progress(1, 2, "half")
        request.progress(2)
        for value in (2, 1, float("nan"), float("inf")):
            request.progress(value, 2, "no progress")
        return "done"


def create(server, name, arguments=None, user="anonymous", capabilities=HAS_TASKS, **more):
    result = call_tool(server, name, arguments, user, capabilities=capabilities, **more)["result"]
    assert result["resultType"] == "task", result
    return result["taskId"]


def get(server, task, user="anonymous"):
    result = respond(server, "tasks/get", {"taskId": task}, user, capabilities=HAS_TASKS)["result"]
    assert result["resultType"] == "complete"
    return result


def update(server, task, responses, user="anonymous"):
    return respond(server, "tasks/update", {"taskId": task, "inputResponses": responses}, user, capabilities=HAS_TASKS)


def cancel(server, task, user="anonymous"):
    return respond(server, "tasks/cancel", {"taskId": task}, user, capabilities=HAS_TASKS)


def wait_for(server, task, *statuses, user="anonymous"):
    """The task as soon as it has one of these statuses (by default: a terminal one)."""
    wanted = statuses or ("completed", "failed", "cancelled")
    assert eventually(lambda: get(server, task, user)["status"] in wanted), get(server, task, user)
    return get(server, task, user)


def is_acknowledgement(server, answer):
    return answer["result"] == {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": server.info}}


def text_of(view):
    return view["result"]["content"][0]["text"]


# ---- who gets a task ----


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"extensions": {}},
        {"extensions": {"com.example/tasks": {}}},
        {"tasks": {}},
        {"tasks": {"requests": {"tools": {"call": {}}}}},
    ],
)
def test_a_client_that_does_not_know_tasks_never_gets_one(demo, capabilities):
    """MUST NOT (Tasks Extension › Capability Negotiation): CreateTaskResult without the capability on that request."""
    result = call_tool(demo, "build_report", MAY, capabilities=capabilities)["result"]
    assert (result["resultType"], result["content"][0]["text"]) == ("complete", "The report for May is ready.")
    assert "taskId" not in result


def test_the_declaration_counts_for_its_own_request_only():
    """MUST NOT (Tasks Extension › Capability Negotiation): regardless of prior declarations, also on one connection."""
    with running(demo_server(0)) as server, server.connect() as connection:
        params = {"name": "build_report", "arguments": MAY}
        for declared in (HAS_TASKS, {}, HAS_TASKS, {}):
            result = connection.call("tools/call", params, capabilities=declared).message["result"]
            assert result["resultType"] == ("task" if declared else "complete")


def test_a_tool_that_cannot_do_without_a_task_needs_the_capability(server):
    """MUST (Tasks Extension › Capability Negotiation): -32021 with the required extension."""
    answer = call_tool(server, "required")
    assert answer["error"]["code"] == -32021
    assert answer["error"]["data"] == {"requiredCapabilities": HAS_TASKS}
    assert text_of(wait_for(server, create(server, "required"))) == "done"


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
def test_the_methods_of_tasks_need_the_capability(demo, method):
    """MUST (Tasks Extension › Protocol Errors): -32021 for non-declaring clients, before the task is looked for."""
    task = create(demo, "build_report", MAY)
    for one in (task, "nothing"):
        answer = respond(demo, method, {"taskId": one, "inputResponses": {}})
        assert answer["error"]["code"] == -32021
        assert answer["error"]["data"] == {"requiredCapabilities": HAS_TASKS}


def test_the_old_task_parameter_is_ignored(demo):
    """MUST (Tasks Extension › Backward Compatibility): treat the `task` parameter as unknown."""
    params = {"name": "build_report", "arguments": MAY, "task": {"ttl": 60_000, "pollInterval": 100}}
    assert respond(demo, "tools/call", params)["result"]["resultType"] == "complete"


@pytest.mark.parametrize("method", ["tasks/result", "tasks/list", "tasks/", "tasks"])
def test_the_old_methods_are_gone(demo, method):
    """MUST (Tasks Extension › Backward Compatibility): tasks/result is -32601."""
    assert respond(demo, method, {"taskId": "x"}, capabilities=HAS_TASKS)["error"]["code"] == -32601


# ---- the handle ----


def test_the_handle_says_what_is_known_and_nothing_else(server):
    """MUST (Tasks Extension › Polymorphic Results): resultType "task"; and no member that has no value yet."""
    result = call_tool(server, "gated", capabilities=HAS_TASKS)["result"]
    assert result.keys() == {
        "resultType",
        "taskId",
        "status",
        "createdAt",
        "lastUpdatedAt",
        "ttlMs",
        "pollIntervalMs",
        "_meta",
    }
    assert (result["resultType"], result["status"], result["ttlMs"]) == ("task", "working", 3_600_000)
    assert isinstance(result["pollIntervalMs"], int)
    for key in ("createdAt", "lastUpdatedAt"):
        assert abs(
            datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result[key])
        ) < datetime.timedelta(minutes=1)
    same = {key: value for key, value in get(server, result["taskId"]).items() if key != "resultType"}
    assert same == {key: value for key, value in result.items() if key != "resultType"}


def test_the_task_is_there_before_its_handle_is(demo):
    """MUST NOT (Tasks Extension › Task Creation): return CreateTaskResult until a tasks/get would resolve."""
    for _ in range(20):
        assert get(demo, create(demo, "build_report", MAY))["status"] in ("working", "completed")


def test_a_handle_cannot_be_guessed(server):
    """MUST (Tasks Extension › Security Implications): sufficient entropy that nobody can enumerate or guess them."""
    handles = {create(server, "gated") for _ in range(20)}
    assert len(handles) == 20
    assert {len(handle) for handle in handles} == {32}  # 24 octets at 6 bits a character
    assert len({handle[:4] for handle in handles}) > 10


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
@pytest.mark.parametrize("task", ["", "nothing", "x" * 10_000, "\0", "' OR 1=1 --", "%", "\ud800"])
def test_a_task_that_does_not_exist_is_an_error(demo, method, task):
    """MUST (Tasks Extension › Protocol Errors): -32602 for tasks/get; SHOULD for tasks/update and tasks/cancel."""
    answer = respond(demo, method, {"taskId": task, "inputResponses": {}}, capabilities=HAS_TASKS)
    assert answer.get("error") == NOT_FOUND


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tasks/get", {}),
        ("tasks/get", {"taskId": 1}),
        ("tasks/cancel", {"taskId": None}),
        ("tasks/update", {"taskId": "x"}),
        ("tasks/update", {"taskId": "x", "inputResponses": None}),
        ("tasks/update", {"taskId": "x", "inputResponses": []}),
    ],
)
def test_params_of_the_wrong_shape_are_an_error(demo, method, params):
    """MUST (Tasks Extension › Protocol Errors): -32602 for an invalid taskId."""
    assert respond(demo, method, params, capabilities=HAS_TASKS)["error"]["code"] == -32602


def test_the_task_id_is_mirrored_into_mcp_name():
    """MUST (Tasks Extension › Streamable HTTP: Routing Headers): Mcp-Name is params.taskId."""
    with running(demo_server(0)) as server, server.connect() as connection:
        task = connection.call(
            "tools/call", {"name": "build_report", "arguments": MAY}, capabilities=HAS_TASKS
        ).message["result"]["taskId"]
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            body = message(method, {"taskId": task, "inputResponses": {}}, capabilities=HAS_TASKS)
            for name, status in ((task, 200), (None, 400), ("other", 400), (task.swapcase(), 400)):
                connection.send(octets(body, Mcp_Name=name))
                reply = connection.reply()
                assert (reply.status, reply.message.get("error", {}).get("code")) == (
                    status,
                    None if status == 200 else -32020,
                )


# ---- how a task ends ----


ENDS = [
    ("required", "completed", None),
    ("fails", "completed", None),
    ("rejects", "failed", {"code": -32603, "message": "API rate limit exceeded", "data": {"limit": 1}}),
    ("crashes", "failed", {"code": -32603, "message": "Internal error"}),
]


@pytest.mark.parametrize(("name", "status", "error"), ENDS)
def test_only_a_json_rpc_error_is_a_failure(server, name, status, error):
    """MUST NOT (Tasks Extension › Task Execution Errors): `failed` for errors within the result of a method."""
    view = wait_for(server, create(server, name))
    assert view["status"] == status
    if error:
        assert view["error"] == error
        assert view["statusMessage"] == error["message"]
        assert "result" not in view
    else:
        assert "error" not in view
        assert view["result"].get("isError", False) is (name == "fails")


def test_a_completed_task_holds_what_the_call_would_have_returned(server, demo):
    """MUST (Tasks Extension › Task Execution Errors): what the underlying request would have returned."""
    for one, name, arguments in ((server, "fails", None), (demo, "build_report", MAY)):
        assert wait_for(one, create(one, name, arguments))["result"] == call_tool(one, name, arguments)["result"]


@pytest.mark.parametrize("name", ["required", "fails", "rejects", "crashes"])
def test_nothing_changes_a_task_that_has_ended(server, name):
    """SHOULD (Tasks Extension › Task Cancellation): acknowledge; what is terminal stays as it is, lastUpdatedAt too."""
    task = create(server, name)
    before = wait_for(server, task)
    assert is_acknowledgement(server, cancel(server, task))
    assert is_acknowledgement(server, update(server, task, {"a": {"action": "accept"}}))
    server.tasks.renew()
    assert get(server, task) == before


def test_a_cancelled_task_stays_cancelled(server):
    """Choice: cancelling is final, whatever the worker does afterwards; cancelling again changes nothing."""
    task = create(server, "gated")
    assert is_acknowledgement(server, cancel(server, task))
    before = get(server, task)
    assert before["status"] == "cancelled"
    assert before.keys().isdisjoint({"result", "error", "inputRequests"})
    server.go.set()
    assert eventually(lambda: not server.tasks.running)
    assert is_acknowledgement(server, cancel(server, task))
    assert get(server, task) == before


@pytest.mark.parametrize("step", range(1, 11))
def test_a_report_can_be_cancelled_at_every_step(demo, step, monkeypatch, capsys):
    """SHOULD (Tasks Extension › Task Cancellation): the work stops where it is; the steps done before stay known."""
    reached, sleep = threading.Event(), TaskRequest.sleep

    def sleep_at(request, seconds):
        if int(request.done) + 1 == step:
            reached.set()
            sleep(request, PATIENCE)

    monkeypatch.setattr(TaskRequest, "sleep", sleep_at)
    task = create(demo, "build_report", MAY)
    assert reached.wait(PATIENCE)
    assert is_acknowledgement(demo, cancel(demo, task))
    assert eventually(lambda: not demo.tasks.running)
    view = get(demo, task)
    assert view["status"] == "cancelled"
    assert view.get("statusMessage") == (f"step {step - 1} of 10" if step > 1 else None)
    assert f"build_report cancelled at step {step} (tasks/cancel)" in capsys.readouterr().err


def test_a_cancellation_notification_does_not_cancel_a_task(server):
    """MUST NOT (Tasks Extension › Task Cancellation): notifications/cancelled is not for tasks."""
    with running(demo_server(0)) as http, http.connect() as connection:
        params = {"name": "build_report", "arguments": MAY}
        task = connection.call("tools/call", params, id=5, capabilities=CAN_ASK).message["result"]["taskId"]
        wait_for(http.server, task, "input_required")
        for request_id in (5, task):
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": request_id}}
            connection.send(octets(note))
            assert connection.reply().status == 202
        assert get(http.server, task)["status"] == "input_required"


# ---- the work and its connection ----


def test_the_client_dies_and_another_one_of_the_same_user_reads_the_report():
    """MUST (Overview › Statelessness): the handle is all that is needed; hanging up cancels no task."""
    with running(demo_server(0)) as server:
        with server.connect() as killed:
            killed.send(
                octets(
                    message("tools/call", {"name": "build_report", "arguments": MAY}, capabilities=CAN_ASK),
                    user="alice",
                )
            )
            task = killed.reply().message["result"]["taskId"]
        assert eventually(lambda: not server.http.connections)
        with server.connect() as another:

            def poll():
                return another.call("tasks/get", {"taskId": task}, "alice", capabilities=HAS_TASKS).message["result"]

            assert eventually(lambda: poll()["status"] == "input_required")
            yes = {"charts": {"action": "accept", "content": {"charts": True}}}
            another.call("tasks/update", {"taskId": task, "inputResponses": yes}, "alice", capabilities=HAS_TASKS)
            assert eventually(lambda: poll()["status"] == "completed")
            assert text_of(poll()) == "The report for May is ready, with charts."


ANSWERS = [
    ({"action": "accept", "content": {"charts": True}}, "with"),
    ({"action": "accept", "content": {"charts": False}}, "without"),
    ({"action": "decline"}, "without"),
    ({"action": "cancel"}, "without"),
    ({"action": "decline", "content": {"charts": True}}, "without"),
    ({"action": "cancel", "content": {"charts": True}}, "without"),
    ({"action": "accept", "content": {"charts": True, "more": "yes"}}, "with"),
]


def ask_about_charts(server):
    """A report that has come to its question."""
    task = create(server, "build_report", MAY, capabilities=CAN_ASK)
    asked = wait_for(server, task, "input_required")
    assert asked["inputRequests"]["charts"]["params"]["requestedSchema"]["properties"] == {
        "charts": {"type": "boolean", "title": "Charts", "description": "one for each week"}
    }
    assert asked["statusMessage"] == "step 5 of 10"
    return task, asked


@pytest.mark.parametrize(("answer", "charts"), ANSWERS)
def test_the_report_has_charts_only_if_the_user_says_so(demo, answer, charts):
    """MUST (Elicitation › Error Handling): handle that the user declines or cancels; whatever stands beside it."""
    task, _ = ask_about_charts(demo)
    assert is_acknowledgement(demo, update(demo, task, {"charts": answer}))
    view = wait_for(demo, task)
    assert (view["status"], text_of(view)) == ("completed", f"The report for May is ready, {charts} charts.")
    assert "inputRequests" not in view


@pytest.mark.parametrize(
    "answer",
    [
        {"action": "accept", "content": {"charts": "yes"}},
        {"action": "accept", "content": {"charts": "true"}},
        {"action": "accept", "content": {"charts": 1}},
        {"action": "accept", "content": {"charts": None}},
        {"action": "accept", "content": {"charts": [True]}},
        {"action": "accept", "content": {}},
        {"action": "accept", "content": None},
        {"action": "accept"},
        {"action": "accept", "content": "yes"},
        {"action": "accept", "content": ["charts"]},
        {"action": "decline", "content": "no"},
        {"action": True, "content": {"charts": True}},
        {"action": "yes"},
        {"action": ["accept"]},
        {},
        "accept",
        True,
        1,
        None,
        ["accept"],
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_refused_and_the_question_stays(demo, answer):
    """SHOULD (Elicitation › Form Mode Security): validate the received data against the schema: "yes" is not true."""
    task, asked = ask_about_charts(demo)
    assert update(demo, task, {"charts": answer})["error"]["code"] == -32602
    assert get(demo, task) == asked
    assert is_acknowledgement(demo, update(demo, task, {"charts": {"action": "decline"}}))
    assert text_of(wait_for(demo, task)) == "The report for May is ready, without charts."


@pytest.mark.parametrize("elicitation", [None, {"url": {}}])
def test_a_client_that_cannot_be_asked_is_not_asked(demo, elicitation):
    """MUST NOT (Elicitation › Capabilities): modes that the client does not support; no question, no charts."""
    capabilities = HAS_TASKS | ({"elicitation": elicitation} if elicitation else {})
    assert (
        text_of(wait_for(demo, create(demo, "build_report", MAY, capabilities=capabilities)))
        == "The report for May is ready."
    )


# ---- questions of a task ----


def accept(x):
    return {"action": "accept", "content": {"x": x}}


def test_answers_come_in_parts_and_each_question_is_asked_once(server):
    """MAY (Tasks Extension › Task Update Requests): a partial set; MUST: every outstanding request in inputRequests."""
    task = create(server, "asks", capabilities=CAN_ASK)
    assert wait_for(server, task, "input_required")["inputRequests"].keys() == {"a", "b"}
    assert is_acknowledgement(server, update(server, task, {"a": accept("1")}))
    assert get(server, task)["inputRequests"].keys() == {"b"}
    assert get(server, task)["status"] == "input_required"
    update(server, task, {"b": accept("2")})
    assert eventually(lambda: get(server, task).get("inputRequests", {}).keys() == {"c"})  # `a` was answered before
    update(server, task, {"c": accept("3")})
    assert json.loads(text_of(wait_for(server, task))) == [
        {"a": accept("1"), "b": accept("2")},
        {"a": accept("1"), "c": accept("3")},
    ]


@pytest.mark.parametrize("ignored", [{}, {"unknown": accept("9")}, {"unknown": 9}, {"c": accept("9")}, {"": None}])
def test_answers_to_what_is_not_outstanding_are_ignored(server, ignored):
    """SHOULD (Tasks Extension › Task Update Requests): ignore keys that were never issued or are already answered."""
    task = create(server, "asks", capabilities=CAN_ASK)
    before = wait_for(server, task, "input_required")
    assert is_acknowledgement(server, update(server, task, ignored))
    assert get(server, task) == before
    update(server, task, {"a": accept("1")})
    before = get(server, task)
    assert is_acknowledgement(server, update(server, task, {"a": accept("99")} | ignored))
    assert get(server, task) == before
    update(server, task, {"b": accept("2")} | ignored)
    assert wait_for(server, task, "input_required")
    assert eventually(lambda: "c" in get(server, task).get("inputRequests", {}))
    update(server, task, {"c": accept("3")})
    assert json.loads(text_of(wait_for(server, task)))[0]["a"] == accept("1")


@pytest.mark.parametrize("wrong", ["x", None, {"action": "accept"}, {"action": "accept", "content": {"x": 1}}])
def test_an_answer_of_the_wrong_shape_is_an_error_and_changes_nothing(server, wrong):
    """MUST (Tasks Extension › Protocol Errors): -32602; and the question stays outstanding."""
    task = create(server, "asks", capabilities=CAN_ASK)
    before = wait_for(server, task, "input_required")
    assert update(server, task, {"a": accept("1"), "b": wrong})["error"]["code"] == -32602
    assert get(server, task) == before
    cancel(server, task)


def test_a_task_that_waits_for_an_answer_can_be_cancelled(server):
    """SHOULD (Tasks Extension › Task Cancellation): also while the task waits for an answer."""
    task = create(server, "asks", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    cancel(server, task)
    assert get(server, task)["status"] == "cancelled"
    assert "inputRequests" not in get(server, task)
    assert eventually(lambda: not server.tasks.running)
    assert is_acknowledgement(server, update(server, task, {"a": accept("1"), "b": accept("2")}))
    assert get(server, task)["status"] == "cancelled"


def test_answers_and_cancellations_wake_the_work_at_once(server, monkeypatch):
    """Choice: the work looks for answers now and then, for those that came to another instance; here it is told."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 10 * PATIENCE)
    answered, cancelled = (create(server, "asks", capabilities=CAN_ASK) for _ in range(2))
    for task in (answered, cancelled):
        wait_for(server, task, "input_required")
    update(server, answered, {"a": accept("1"), "b": accept("2")})
    assert eventually(lambda: "c" in get(server, answered).get("inputRequests", {}))
    cancel(server, cancelled)
    assert eventually(lambda: cancelled not in server.tasks.running)
    cancel(server, answered)


def test_a_question_that_the_client_cannot_answer_fails_the_task(server):
    """MUST NOT (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): none that are undeclared."""
    view = wait_for(server, create(server, "asks", capabilities=HAS_TASKS))
    assert view["status"] == "failed"
    assert view["error"]["code"] == -32021
    assert view["error"]["data"] == {"requiredCapabilities": {"elicitation": {"form": {}}}}


def test_questions_before_the_task_are_asked_by_round_trips(server):
    """SHOULD (Tasks Extension › Task Creation): resolve all MRTR exchanges before the CreateTaskResult."""
    first = call_tool(server, "asks_first", capabilities=CAN_ASK)["result"]
    assert first["resultType"] == "input_required"
    task = create(
        server,
        "asks_first",
        capabilities=CAN_ASK,
        id=2,
        inputResponses={"q": accept("1")},
        requestState=first["requestState"],
    )
    assert text_of(wait_for(server, task)) == "kept {'x': '1'}"


# ---- progress, notifications ----


def test_progress_is_the_status_message_and_nothing_is_sent_for_it(server):
    """MUST NOT (Tasks Extension › Task Status Notifications): progress and log messages, which tasks do not support."""
    channel = Recorder()
    with Listener(server, {"toolsListChanged": True}, capabilities=HAS_TASKS) as listener:
        task = create(server, "steps", channel=channel, progressToken="p", log_level="debug")
        assert wait_for(server, task)["statusMessage"] == "2"
        assert channel.messages == []
        assert listener.messages.empty()


def test_every_change_of_a_task_is_told(demo, monkeypatch):
    """MUST (Tasks Extension › Task Status Notifications): each carries the complete task for its status."""
    gate, sleep = threading.Event(), TaskRequest.sleep
    monkeypatch.setattr(TaskRequest, "sleep", lambda request, seconds: gate.wait(PATIENCE) and sleep(request, seconds))
    task = create(demo, "build_report", MAY, capabilities=CAN_ASK)
    with Listener(demo, {"taskIds": [task, "other"]}, id=9, capabilities=HAS_TASKS) as listener:
        assert listener.first["params"]["notifications"] == {"taskIds": [task]}
        gate.set()
        told = [listener.next()["params"]]
        while told[-1]["status"] != "input_required":
            told.append(listener.next()["params"])
        update(demo, task, {"charts": {"action": "decline"}})
        while told[-1]["status"] != "completed":
            told.append(listener.next()["params"])
    assert {one["_meta"]["io.modelcontextprotocol/subscriptionId"] for one in told} == {9}
    assert {one["taskId"] for one in told} == {task}
    assert {one["status"] for one in told} == {"working", "input_required", "completed"}
    assert all(("inputRequests" in one) is (one["status"] == "input_required") for one in told)
    assert [one["lastUpdatedAt"] for one in told] == sorted(one["lastUpdatedAt"] for one in told)
    last = get(demo, task)
    assert told[-1] == {key: value for key, value in last.items() if key != "resultType"} | {"_meta": told[-1]["_meta"]}


def test_a_cancellation_is_told(server):
    """MUST (Tasks Extension › Task Status Notifications): a terminal status too."""
    task = create(server, "gated")
    with Listener(server, {"taskIds": [task]}, capabilities=HAS_TASKS) as listener:
        cancel(server, task)
        assert listener.next()["params"]["status"] == "cancelled"


# ---- expiry and adoption ----


def test_a_task_that_expires_is_freed_and_its_work_stops(server, capsys):
    """MAY (Tasks Extension › Task Polling): discard a task after its TTL; nobody finds it or works on it."""
    task, other = create(server, "short"), create(server, "gated")
    assert eventually(lambda: len(server.runs) == 2)
    assert get(server, task)["ttlMs"] == 1000
    server.store.execute("UPDATE tasks SET created = created - 1.5")
    server.tasks.renew()
    assert respond(server, "tasks/get", {"taskId": task}, capabilities=HAS_TASKS)["error"] == NOT_FOUND
    assert eventually(lambda: set(server.tasks.running) == {other})
    assert "short cancelled at step 1 (expired)" in capsys.readouterr().err
    assert get(server, other)["status"] == "working"


def test_a_task_that_expires_while_it_is_answered_is_unknown(server, monkeypatch, capsys):
    """MUST (Tasks Extension › Protocol Errors): -32602 for a task that is gone, whenever it went."""
    task = create(server, "asks", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    transaction = server.store.transaction

    def too_late():
        server.store.execute("DELETE FROM tasks WHERE id = ?", task)
        return transaction()

    monkeypatch.setattr(server.store, "transaction", too_late)
    assert update(server, task, {"a": {"action": "decline"}})["error"]["code"] == -32602
    assert eventually(lambda: not server.tasks.running)
    assert "Traceback" not in capsys.readouterr().err


def test_a_finished_task_expires_too(server):
    """MAY (Tasks Extension › Protocol Errors): a purged task cannot be found."""
    task = create(server, "fails")
    wait_for(server, task)
    server.store.execute("UPDATE tasks SET created = created - 3601")
    server.tasks.renew()
    assert cancel(server, task)["error"] == NOT_FOUND


def test_work_that_a_dead_instance_left_is_taken_up_where_it_stopped(tmp_path, monkeypatch):
    """Choice: the row is the truth; whoever asks about a task whose lease has lapsed goes on with it."""
    steps, reached, sleep = [], threading.Event(), TaskRequest.sleep

    def sleep_at(request, seconds):
        steps.append((request.tasks.store.instance, int(request.done) + 1))
        if request.tasks.store.instance == dying.instance and request.done == 3:
            reached.set()
            sleep(request, PATIENCE)

    monkeypatch.setattr(TaskRequest, "sleep", sleep_at)
    dying, living = Store(str(tmp_path / "state")), Store(str(tmp_path / "state"))
    with alive(demo_server(0, living)) as heir:
        with alive(demo_server(0, dying)) as server:
            task = create(server, "build_report", MAY, "alice")
            assert reached.wait(PATIENCE)
        assert text_of(wait_for(heir, task, user="alice")) == "The report for May is ready."
    assert [step for instance, step in steps if instance == dying.instance] == [1, 2, 3, 4]
    assert [step for instance, step in steps if instance == living.instance] == [4, 5, 6, 7, 8, 9, 10]


def test_only_one_instance_works_on_a_task(tmp_path):
    """Choice: a lease is a row's column; an instance that finds it held leaves the task alone."""
    stores = [Store(str(tmp_path / "state")) for _ in range(2)]
    with alive(demo_server(PATIENCE, stores[0])) as one, alive(demo_server(0, stores[1])) as two:
        task = create(one, "build_report", MAY)
        for _ in range(5):
            assert get(two, task)["status"] == "working"
            two.tasks.adopt_all()
        assert set(one.tasks.running) == {task}
        assert two.tasks.running == {}
        cancel(two, task)
        assert eventually(lambda: not one.tasks.running)


def test_a_user_has_a_bounded_number_of_unfinished_tasks(server, monkeypatch):
    """Choice: 429 with Retry-After beyond MAX_TASKS, for that user alone; a finished one makes room."""
    monkeypatch.setattr(reference_server, "MAX_TASKS", 2)
    first, _ = create(server, "gated"), create(server, "gated")
    body = message("tools/call", {"name": "gated", "arguments": {}}, capabilities=HAS_TASKS)
    refused = server.respond(body, Recorder(), "anonymous")
    assert refused.status == 429
    assert "Retry-After" in refused.fields
    create(server, "gated", user="bob")
    cancel(server, first)
    create(server, "gated")

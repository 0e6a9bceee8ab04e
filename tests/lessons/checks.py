"""What a server says is checked before it is believed: pure functions, values in, values or `McpError` out.

A client reads messages that others wrote. Whatever is missing in them, of another type, null or huge, ends in the
result, in a default that is named here, or in one `McpError` whose text is one sentence.
"""

import math
from typing import Any

Message = dict[str, Any]  # a JSON object

FINISHED = ("completed", "failed", "cancelled")  # statuses of a task that stay as they are
STATUSES = (*FINISHED, "working", "input_required")

# spec: Multi Round-Trip Requests › Supported Requests: three methods may ask; sep-2663: one may become a task
RESULT_TYPES = {"tools/call": ["complete", "input_required", "task"], "prompts/get": ["complete", "input_required"],
                "resources/read": ["complete", "input_required"]}


class McpError(Exception):
    """A refusal: a JSON-RPC error, or with `code` None a response that is none. `status` is HTTP's."""

    def __init__(self, code: int | None, message: str, data: Any = None, status: int | None = None) -> None:
        super().__init__(message if code is None else f"{message} ({code})")
        self.code, self.message, self.data, self.status = code, message, data, status


def result_of(method: str, response: Message, status: int | None) -> Message:
    """The result in a response to `method`; McpError for an error, or for what is no result of that method."""
    if "error" in response:
        raise error_in(response["error"], f"the response to {method}", status)
    result = response.get("result")
    # spec: Overview › ResultType: absent means "complete"; an unrecognized one MUST be considered invalid
    allowed = RESULT_TYPES.get(method, ["complete"])
    if not isinstance(result, dict) or result.get("resultType", "complete") not in allowed:
        raise McpError(None, f"the response to {method} is no result of it", response, status)
    return result


def error_in(error: Any, where: str, status: int | None = None) -> McpError:
    """The `error` member of a response, or of a failed task, as an exception."""
    code = error.get("code") if isinstance(error, dict) else None
    if type(code) is not int:
        return McpError(None, f"{where} is no result of it, nor an error with a code", error, status)
    message = error.get("message")
    return McpError(code, message if isinstance(message, str) else "an error without a message", error.get("data"),
                    status)


def supported_versions(error: McpError) -> list[Any]:
    """The versions that an error about versions names; none if it does not say."""
    supported = error.data.get("supported") if isinstance(error.data, dict) else None
    return supported if isinstance(supported, list) else []


def tools_in(page: Message) -> list[Message]:
    """The tools on one page of tools/list."""
    tools = page.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise McpError(None, "a page of tools/list has no list of tools", page)
    return tools


def cursor_after(page: Message, earlier: set[str]) -> str | None:
    """The cursor of the next page, None after the last one; McpError if it leads back, or nowhere."""
    # spec: Pagination › Implementation Guidelines: a missing cursor is the end; "" is a cursor like any other
    cursor = page.get("nextCursor")
    if cursor is not None and not isinstance(cursor, str):
        raise McpError(None, f"the cursor of tools/list is no text: {str(cursor)[:80]}", page)
    if cursor in earlier:
        raise McpError(None, f"the pages of tools/list go round in a circle at cursor {cursor!r:.80}")
    return cursor


def questions_in(asking: Message) -> Message:
    """The input requests of a result or a task, by key, each with a method and params; McpError for anything else."""
    questions = asking.get("inputRequests")
    if questions is None:
        return {}
    if not isinstance(questions, dict):
        raise McpError(None, "inputRequests is no object", asking)
    for key, one in questions.items():
        shapely = isinstance(one, dict) and isinstance(one.get("method"), str)
        if not shapely or not isinstance(one.get("params", {}), dict):
            raise McpError(None, f"the input request {key!r:.80} has no method or no params", asking)
    return questions


def checked_task(task: Message, method: str) -> Message:
    """A task as it came; McpError unless it has a handle and a status that a client can act on."""
    if not isinstance(task.get("taskId"), str) or task.get("status") not in STATUSES:
        raise McpError(None, f"the response to {method} is no task: it needs a taskId and one of {STATUSES}", task)
    return task


def poll_seconds(task: Message) -> float:
    """How long to wait before the next tasks/get."""
    # sep-2663 › Task Polling: clients SHOULD respect pollIntervalMs, which may change
    # choice: a second if it is none, at least a tenth and at most a minute, because no server may set us spinning
    wanted = number(task.get("pollIntervalMs"))
    return 1.0 if wanted is None or wanted < 0 else min(max(wanted / 1000, 0.1), 60.0)


def outcome_of(task: Message) -> Message:
    """What became of a finished task: the result of its request, or McpError."""
    if task["status"] == "failed":
        raise error_in(task.get("error"), "the failed task")
    if task["status"] == "cancelled":
        raise McpError(None, f"task {task['taskId']} was cancelled", task)
    result = task.get("result")
    if not isinstance(result, dict):
        raise McpError(None, "the completed task has no result", task)
    return result


def number(value: Any) -> float | None:
    """A JSON number that a float can hold, else None; true is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def progress_in(message: Message) -> tuple[float, float | None, str | None] | None:
    """Done, total and message of a progress notification; None for one that does not say how much is done."""
    params = message.get("params")
    done = number(params.get("progress")) if isinstance(params, dict) else None
    if done is None or params is None:
        return None
    text = params.get("message")
    return done, number(params.get("total")), text if isinstance(text, str) else None


def granted_in(message: Message) -> Message:
    """The filter that a subscription's first message acknowledges; McpError if it is no acknowledgment."""
    # spec: Subscriptions › Acknowledgment: MUST be the first message, with the filter that the server will honor
    params = message.get("params")
    granted = params.get("notifications") if isinstance(params, dict) else None
    if message["method"] != "notifications/subscriptions/acknowledged" or not isinstance(granted, dict):
        raise McpError(None, "the subscription does not begin with an acknowledgment", message)
    return granted


def not_granted(asked: Message, granted: Message) -> list[str]:
    """A line for each part of the filter that was asked for and not granted, or granted and not asked for."""
    lines = []
    for name in sorted(asked.keys() | granted.keys()):
        wanted, given = (members(name, one.get(name)) for one in (asked, granted))
        lines += [f"asked for and not granted: {one}" for one in sorted(wanted - given)]
        lines += [f"granted and not asked for: {one}" for one in sorted(given - wanted)]
    return lines


def members(name: str, value: Any) -> set[str]:
    """What one member of a filter covers: each text of a list; itself when it is true; nothing otherwise."""
    if isinstance(value, list):
        return {f"{name} {one}" for one in value if isinstance(one, str)}
    return {name} if value is True else set()


# ---- results and the schema that was promised for them ----

KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def check_output(tool: Message, result: Message) -> None:
    """McpError when a tool that has an output schema returned something else."""
    # spec: Tools › Output Schema: clients SHOULD validate structured results against this schema
    if tool.get("outputSchema") is None or result.get("isError"):
        return
    if "structuredContent" not in result:
        problem = "structuredContent is missing"
    else:
        problem = misfit(result["structuredContent"], tool["outputSchema"], "structuredContent")
    if problem:
        raise McpError(None, f"the result of {tool['name']} breaks its output schema: {problem}", result)


def misfit(value: Any, schema: Any, place: str) -> str:
    """Where a value does not fit a schema, and how; "" where it fits. It knows the keywords that most schemas use.

    Others are not checked, and a `$ref` is not followed: who fetches what a server names can be sent anywhere.
    """
    if not isinstance(schema, dict):
        return f"{place} must not be there" if schema is False else ""
    kinds = schema.get("type", [])
    if kinds and not any(is_of(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])):
        return f"{place} is not of type {kinds}"
    if "const" in schema and value != schema["const"]:
        return f"{place} is not {str(schema['const'])[:80]}"
    if isinstance(schema.get("enum"), list) and value not in schema["enum"]:
        return f"{place} is none of {str(schema['enum'])[:80]}"
    known: Any = schema.get("properties")
    properties = known if isinstance(known, dict) else {}
    missing = [name for name in names_in(schema.get("required")) if isinstance(value, dict) and name not in value]
    inside = [f"{place}.{missing[0]} is missing"] if missing else []
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        inside += [misfit(member, properties.get(name, others), f"{place}.{name}") for name, member in value.items()]
    if isinstance(value, list):
        inside += [misfit(item, schema.get("items"), f"{place}[{number}]") for number, item in enumerate(value)]
    return next(filter(None, inside), "")


def names_in(required: Any) -> list[str]:
    """The names in a schema's `required`."""
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type; of one that JSON Schema does not have, everything is."""
    if kind in ("number", "integer"):
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return numeric and (kind == "number" or value == int(value))
    return not isinstance(kind, str) or kind not in KINDS or isinstance(value, KINDS[kind])

"""What the Inspector does with the reference server, driven by `mcpdo`, its command line for kept connections."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import Log

CONFIG = "file:///project/config.json"


class NotOffered(Exception):
    """The client has nothing for this feature; says how that was established."""


def expect(truth: object, seen: object) -> str:
    """What was seen, when the truth holds."""
    if not truth:
        raise AssertionError(str(seen))
    return str(seen)[:100]


class Inspector:
    """Two connections to one server, held by a private daemon: @demo, and @tasks, which declares the extension."""

    def __init__(self, folder: Path, target: list[str], log: Log) -> None:
        self.log = log
        self.program = str(folder / "node_modules/.bin/mcpdo")
        self.home = tempfile.TemporaryDirectory(prefix="mcpdo-")
        home = self.home.name
        node = folder / "node_modules/node/bin"
        self.environment = os.environ | {
            "PATH": f"{node}:{os.environ['PATH']}", "MCP_STORAGE_DIR": home, "MCP_INSPECTOR_DAEMON_DIR": home,
            "MCP_CATALOG_PATH": f"{home}/catalog.json", "MCP_INSPECTOR_SECRET_STORE": "file",
        }
        server: dict[str, Any] = {"type": "streamable-http", "url": target[0]}
        if not target[0].startswith("http"):
            server = {"type": "stdio", "command": target[0], "args": target[1:]}
        server["protocolEra"] = "modern"  # the default is the 2025 handshake
        Path(home, "catalog.json").write_text(json.dumps({"mcpServers": {"demo": server}}))

    def __enter__(self) -> Inspector:
        self.ask("connect", "demo")
        return self

    def __exit__(self, *exception: object) -> None:
        self.start("disconnect", "demo").communicate()
        self.start("daemon", "stop").communicate()
        self.home.cleanup()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """One mcpdo command, running."""
        return subprocess.Popen([self.program, *arguments], env=self.environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ask(self, *arguments: str) -> Any:
        """What one mcpdo command answers, as JSON."""
        process = self.start("--format", "json", *arguments)
        try:
            answer, complaint = process.communicate(timeout=30)
        finally:
            process.kill()
        if process.returncode != 0:
            raise AssertionError(f"{' '.join(arguments)}: {complaint.strip()[-300:]}")
        return json.loads(answer)

    def call(self, name: str, *arguments: str) -> Any:
        """A tool's result, or the question that it waits with."""
        result = self.ask("@demo", "tools/call", name, *arguments)
        expect(not result.get("isError"), result)
        return result

    def answer(self, question: Any, *words: str) -> str:
        """Answers a tool's question and gives its text."""
        elicitation = question["elicitationPending"]["elicitationId"]
        return str(self.ask("elicitation/respond", elicitation, *words)["content"][0]["text"])

    def discover(self) -> str:
        shown = self.ask("connections/show", "@demo")
        return expect(shown["protocolVersion"] == "2026-07-28", shown["serverInfo"])

    def list_tools(self) -> str:
        names = [tool["name"] for tool in self.ask("@demo", "tools/list")["tools"]]
        return expect("build_report" in names, f"{len(names)} tools")

    def call_tool(self) -> str:
        return expect(words := self.call("get_weather", "location:=Paris")["content"][0]["text"], words)

    def structured_output(self) -> str:
        seen = self.call("get_weather_data", "location:=Paris").get("structuredContent")
        return expect(seen, seen)

    def mirrored_argument(self) -> str:
        content = self.call("execute_sql", "region:=us-west1", "query:=SELECT 1")["content"]
        return expect(words := content[0]["text"], words)

    def progress(self) -> str:
        usage, complaint = self.start("tools/call", "--help").communicate()
        expect("--tool-name" in usage and "progress" not in usage.lower(), usage + complaint)
        raise NotOffered("`mcpdo tools/call --help` has no option for progress")

    def cancel(self) -> str:
        """mcpdo always declares the tasks extension, so the call is a task: interrupt it, then cancel the task.

        On a terminal, because only there an interrupt ends the call; without one mcpdo goes on waiting for it.
        """
        terminal, side = pty.openpty()
        process = subprocess.Popen([self.program, "@demo", "tools/call", "build_report", "month:=2026-07"],
                                   env=self.environment, stdin=side, stdout=side, stderr=side)
        try:
            polled = self.log.wait_for(r"tasks/get (\S+)")
            process.send_signal(signal.SIGINT)
            process.wait(10)
        finally:
            process.kill()
            os.close(side)
            os.close(terminal)
        return str(self.ask("@demo", "tasks/cancel", polled[1] if polled else "unknown"))

    def resources(self) -> str:
        uris = [resource["uri"] for resource in self.ask("@demo", "resources/list")["resources"]]
        templates = self.ask("@demo", "resources/templates/list")["resourceTemplates"]
        contents = self.ask("@demo", "resources/read", CONFIG)["contents"]
        return expect(CONFIG in uris and templates and contents[0]["text"], f"{len(uris)} and {len(templates)}")

    def prompts(self) -> str:
        names = [prompt["name"] for prompt in self.ask("@demo", "prompts/list")["prompts"]]
        arguments = ["--prompt-args", "code=print(1)", "language=python"]
        prompt = self.ask("@demo", "prompts/get", "code_review", *arguments)
        words = prompt["messages"][0]["content"]["text"]
        return expect("code_review" in names and "print(1)" in words, words)

    def completion(self) -> str:
        values = self.ask("@demo", "prompts/complete", "--complete-ref-type", "ref/prompt", "--complete-ref",
                          "code_review", "--complete-arg-name", "language", "--complete-arg-value", "py")["values"]
        return expect("python" in values, values)

    def form_elicitation(self) -> str:
        words = self.answer(self.call("create_repo", "repo:=demo"), "name:=octocat")
        return expect("octocat" in words, words)

    def url_elicitation(self) -> str:
        """Consent alone connects nothing; mcpdo lets no call through that would play the page meanwhile, so give up."""
        elicitation = self.call("connect_billing")["elicitationPending"]["elicitationId"]
        again = self.ask("elicitation/respond", elicitation, "--done")
        return expect("not connected" in (words := self.answer(again, "--cancel")), words)

    def subscription(self) -> str:
        process = self.start("--format", "json", "@demo", "resources/subscribe", CONFIG)
        try:
            assert process.stdout is not None
            events = Log(process.stdout)
            expect(events.wait_for("subscribed"), "no acknowledgement")
            self.call("touch_config")
            return expect(events.wait_for("updated"), f"after touch_config: {events.lines}")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(10)

    def tasks(self) -> str:
        question = self.call("build_report", "month:=2026-08")
        return self.answer(question, "charts:=true")


def run(folder: Path, target: list[str], log: Log, features: list[str]) -> list[tuple[str, str, str]]:
    """Every feature in turn: its name, works / not offered / fails, and what was seen."""
    rows = []
    with Inspector(folder, target, log) as inspector:
        for feature in features:
            method = {"call": "call_tool"}.get(feature, feature.replace(" ", "_").lower())
            try:
                rows.append((feature, "works", getattr(inspector, method)()))
            except NotOffered as reason:
                rows.append((feature, "not offered", str(reason)))
            except Exception as error:
                rows.append((feature, "fails", f"{type(error).__name__}: {error}"))
    return rows

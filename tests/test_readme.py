"""The README is true: each command block is run, in its order, and what follows it is what comes out.

Time runs 40 times faster here than for a reader: every number of seconds in a command is divided by that, unless it is
less than one. A server's steps are 20 times as fast, since it must still be at work when it is asked what it does.
Blocks that start a server, or that the paragraph before puts into "the third terminal", get a terminal
of their own and go on until the next block for that terminal; the reader presses Ctrl-C there, and so does the test.
`npx`, `make spoof` and `make three-ways` are not run. COURSE_SHELL=zsh or =dash plays the course in that shell.
"""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from support import PATIENCE, ROOT, named_tests, nodes_of, source_of

import reference_server

README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
FASTER = 40
PORTS = ("3000", "3001", "3002", "3003", "3004")  # those that the README uses; each stands for a free one
SERVERS = re.compile(r"(?!.*--stdio).*reference_server\.py|python3 tests/lessons/(gateway|legacy_server|bad_tool)\.py")
SHELLS = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f", "-o", "no_interactive_comments"], "dash": ["dash"]}
SHELL = SHELLS[os.environ.get("COURSE_SHELL", "bash")]


class Step(NamedTuple):
    """A command block, its line in the README, the paragraph before it, and the output blocks that follow it."""

    line: int
    commands: str
    said: str
    expected: list[str]

    def __str__(self) -> str:
        return f"line {self.line}: {self.commands[:50]}".partition("\n")[0]

    @property
    def starts_a_server(self) -> bool:
        """Whether its last command runs until Ctrl-C."""
        return bool(SERVERS.match(self.commands.splitlines()[-1]))

    @property
    def terminal(self) -> str:
        """Where a reader types it."""
        if "third terminal" in self.said:
            return "third"
        return "first" if self.starts_a_server else "second"


def steps_in(text: str) -> list[Step]:
    """The steps of a page."""
    steps: list[Step] = []
    for match in re.finditer(r"^```(sh|text)\n(.*?)^```$", text, re.M | re.S):
        if match[1] == "sh":
            before = text[:match.start()]
            said = " ".join(re.split(r"\n\n|```\n", before.rstrip("\n"))[-1].split())
            steps.append(Step(before.count("\n") + 2, match[2].rstrip("\n"), said, []))
        else:
            steps[-1].expected.append(match[2])
    return steps


STEPS = steps_in(README)

# ------------------------------------------------------------------------------------------------------- running it


class Terminal:
    """A shell, and everything that appears in it. `changed` guards `lines`, which the reading thread appends to."""

    def __init__(self, environment: dict[str, str], script: str | None = None) -> None:
        self.lines: list[str] = []
        self.changed = threading.Condition()
        command = [*SHELL, *(["-c", script] if script else [])]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, encoding="utf-8",
                                        start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        """The reading thread: until nobody holds the terminal's output any more."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.rstrip("\r\n"))
                self.changed.notify_all()

    def type(self, text: str) -> None:
        """What a reader types."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait_for(self, pattern: str, start: int = 0, count: int = 1) -> bool:
        """Whether so many lines from `start` on have matched within PATIENCE."""
        def come() -> bool:
            return sum(bool(re.search(pattern, line)) for line in self.lines[start:]) >= count

        with self.changed:
            return self.changed.wait_for(come, PATIENCE)

    def press_ctrl_c(self) -> None:
        """Interrupts all that runs in it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> int:
        """Ctrl-C, or the end of the shell; the exit status of what ran there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            self.press_ctrl_c()
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        finally:
            self.reader.join(PATIENCE)
            self.process.stdout.close()
        return status


END = "--- end of the block ---"
# The server as a module, which is not compiled anew each time: the course starts eight of them.
PYTHON3 = """#!/bin/sh
[ "$1" = reference_server.py ] && shift && set -- -m reference_server "$@"
exec "$PYTHON" "$@"
"""


class Course:
    """A reader who works through the README, at most once through each step."""

    def __init__(self, folder: Path) -> None:
        self.ports = {port: free_port() for port in PORTS}
        self.folder = str(folder)
        (folder / "python3").write_text(PYTHON3)
        (folder / "python3").chmod(0o755)
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("MCP", "PYTHON"))}
        port = self.ports["3000"]
        self.environment = outer | {"PORT": port, "PYTHON": sys.executable, "MCP": f"http://127.0.0.1:{port}/mcp",
                                    "LC_ALL": "C.UTF-8", "NO_PROXY": "*",
                                    "PATH": f"{folder}:{outer['PATH']}"}
        self.terminals = {"second": Terminal(self.environment)}
        self.terminals["second"].type("trap : INT")
        self.done: list[tuple[list[str], dict[str, int]]] = []  # each step's output; how long the terminals were before

    def close(self) -> None:
        """Ends everything that still runs."""
        for terminal in self.terminals.values():
            terminal.press_ctrl_c()
        for name in list(self.terminals):
            self.close_terminal(name)

    def close_terminal(self, name: str) -> None:
        """Ctrl-C in a terminal; a server must then end by itself."""
        if terminal := self.terminals.pop(name, None):
            terminal.close()

    def adapted(self, text: str) -> str:
        """A block as it is run: its ports are free ones, its times are short."""
        text = "\n".join(self.adapted_output(text)).replace("/tmp/lesson", f"{self.folder}/lesson")
        text = re.sub(r"reference_server\.py(?! --wire)", f"reference_server.py --step-seconds {2 / FASTER}", text)
        if SHELL[0] == "dash":
            text = re.sub("(?m)^source ", ". ./", text)
        return re.sub(r"( -m|sleep) ([1-9][0-9.]*)", lambda match: f"{match[1]} {float(match[2]) / FASTER:.4f}", text)

    def adapted_output(self, text: str) -> list[str]:
        """The lines of an output block, with the ports that are used here."""
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text.splitlines()

    def run(self, step: Step) -> list[str]:
        """What appears in the step's own terminal."""
        if step.terminal == "second":
            return self.run_in_second(step)
        self.close_terminal(step.terminal)
        terminal = self.terminals[step.terminal] = Terminal(self.environment, self.adapted(step.commands))
        assert terminal.wait_for("."), f"{step} printed nothing"
        return terminal.lines

    def run_in_second(self, step: Step) -> list[str]:
        """All output of a block that ends, by itself or by Ctrl-C."""
        terminal = self.terminals["second"]
        start = len(terminal.lines)
        terminal.type(f"{self.adapted(step.commands)}\necho; echo '{END}'")
        if "Ctrl-C after the third event" in step.said:
            assert terminal.wait_for("^data: ", start, 3), terminal.lines[start:]
            terminal.press_ctrl_c()
        assert terminal.wait_for(re.escape(END), start), f"{step} did not end: {terminal.lines[start:]}"
        return terminal.lines[start:terminal.lines.index(END, start)]

    def seen_in_log(self, line: str, marks: dict[str, int]) -> bool:
        """Whether a line of the log in terminal 1 comes, after what was there before the step."""
        return self.terminals["first"].wait_for(pattern_of(line), marks.get("first", 0))


def free_port() -> str:
    """A port that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def pattern_of(line: str) -> str:
    """An expected line as a pattern: `…` is anything, and times and steps are what they happen to be."""
    text = re.escape(line).replace("…", ".*")
    text = re.sub(r"((?:at|after)\\ step\\ )\d+", r"\1\\d+", text)
    text = re.sub(r"7(\\ comments)", r"[3-9]\1", text)
    text = re.sub(r"\\#\d+(\\ )+\d+\\\.\d(\\ )ms", r"\\#\\d+ +[\\d.]+ ms", text)
    return f"^{text}$"


def first_missing(expected: list[str], lines: list[str]) -> str | None:
    """The first expected line that does not come after the ones before it."""
    rest = iter(lines)
    for line in expected:
        if line and line != "…" and not any(re.search(pattern_of(line), one) for one in rest):
            return line
    return None


def is_log(line: str) -> bool:
    """Whether a server prints it on stderr."""
    return line.startswith(("[ref] ", "--> ", "<-- ", "--x "))


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    """One reader for the whole page."""
    reader = Course(tmp_path_factory.mktemp("course"))
    yield reader
    reader.close()


RUN = [step for step in STEPS if not step.commands.startswith(("make spoof", "make three-ways", "npx "))]


@pytest.mark.skipif(not shutil.which("curl"), reason="the course needs curl")
@pytest.mark.parametrize("number", range(len(RUN)), ids=[str(step) for step in RUN])
def test_each_command_block_prints_what_the_readme_says(course: Course, number: int) -> None:
    """Choice: a course whose commands do not work teaches the wrong thing. A step needs the ones before it."""
    while len(course.done) <= number:
        marks = {name: len(terminal.lines) for name, terminal in course.terminals.items()}
        step = RUN[len(course.done)]
        if step.terminal != "second":
            marks[step.terminal] = 0
        course.done.append((course.run(step), marks))
    lines, marks = course.done[number]
    own, *others = [course.adapted_output(block) for block in RUN[number].expected] or [[]]
    assert not (line := first_missing([line for line in own if not is_log(line)], lines)), (line, lines)
    for block in others:
        third = course.terminals["third"]
        for line in (line for line in block if line and not is_log(line)):
            assert third.wait_for(pattern_of(line)), (line, third.lines)
        third.press_ctrl_c()
    for line in (line for block in [own, *others] for line in block if is_log(line)):
        assert not first_missing([line], lines) or course.seen_in_log(line, marks), line


@pytest.mark.parametrize("step", [step for step in STEPS if step not in RUN], ids=str)
def test_each_other_block_is_one_command_that_exists(step: Step) -> None:
    """Choice: what takes long or needs the network is not run here, but it must be there."""
    words = step.commands.split()
    assert "\n" not in step.commands
    if words[0] == "make":
        assert words[1] in make_targets() and len(words) == 2
    else:
        assert words[:2] == ["npx", "@modelcontextprotocol/inspector@2.12.0"]
        assert "http://127.0.0.1:3000/mcp" in words and words[-1] == "modern"


def expected_after(command: str) -> list[str]:
    """The output lines that the README gives for a command."""
    return next(step for step in STEPS if step.commands == command).expected[0].splitlines()


def test_the_table_of_three_ways_has_the_words_of_the_program() -> None:
    """Choice: its figures vary by a step; that it prints what it should is shown where it is tested."""
    source = (ROOT / "tests/lessons/three_ways.py").read_text(encoding="utf-8")
    words = [fragment for line in expected_after("make three-ways") for fragment in re.split(r" {2,}| ?\d+ ?", line)]
    assert len(words) > 20
    assert not [one for one in words if len(one) > 3 and one not in source]


# --------------------------------------------------------------------------------------------- what it says of the code


@cache
def names_in(path: str) -> dict[str, int]:
    """The functions, classes and constants of a file, `Class.method` for methods, with their lines."""
    names: dict[str, int] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[prefix + node.name] = node.lineno
                collect(node.body, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(one, ast.Name):
                            names[prefix + one.id] = node.end_lineno or node.lineno

    collect(nodes_of(path)[0].body, "")  # type: ignore[attr-defined]
    return names


HEADINGS = json.loads((ROOT / "tests/spec_headings.json").read_text(encoding="utf-8"))
MODULES = ("reference_server.py", "headers.py", "sse.py")
LESSONS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/lessons").glob("*.py"))
NAMES = {path: names_in(path) for path in (*MODULES, *LESSONS)}
ALL_NAMES = {name for names in NAMES.values() for name in names}


def section(title: str, text: str = REFERENCE) -> str:
    """The text under a heading of the reference, or of another page."""
    return re.split(r"(?m)^## ", text.partition(f"## {title}\n")[2])[0]


def rows_in(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def make_targets() -> set[str]:
    """What `make` can be asked for."""
    return set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))


def test_it_says_what_it_is_and_runs_on_the_first_screen() -> None:
    """Choice: a newcomer decides on the first screen, and is told there what MCP is and how to get the code."""
    first = "\n".join(README.splitlines()[:24])
    assert first.startswith("# ") and "2026-07-28" in first and "```sh\npython3 reference_server.py\n```" in first
    before = first.partition("```sh")[0]
    assert all(word in before for word in ("Model Context Protocol", "tools", "JSON-RPC", "handshake", "Clone", "3.11"))


def test_the_course_is_no_longer_than_one_can_read() -> None:
    """Choice: the course is this page; what one looks up is in tests/README.md."""
    assert len(README.splitlines()) <= 600


def test_the_table_of_contents_has_every_lesson_and_leads_there() -> None:
    """Choice: a heading's anchor is its text in lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"(?m)^## (.+)$", README)
    anchors = [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    linked = re.findall(r"\]\(#([^)]+)\)", README)
    assert not set(linked) - set(anchors)
    assert not {anchor for anchor in anchors if anchor[0].isdigit()} - set(linked)


def test_every_function_that_it_tells_to_read_exists() -> None:
    """Choice: a name in the README is a promise."""
    told = [*re.findall(r"(?ms)^Read[: ].*?(?=\n\n)", README), section("The order in which to read the source", README)]
    names = [name for text in told for name in re.findall(r"`([A-Za-z_.]+)`", text)]
    names = [name for name in names if not name.endswith((".py", ".sh"))]
    assert len(names) > 40 and not [name for name in names if name not in ALL_NAMES]


@pytest.mark.parametrize("row", rows_in("The map"), ids=lambda row: row[0])
def test_the_map_leads_to_functions_and_tests_that_exist(row: list[str]) -> None:
    """Choice: the map is how a reader gets from a rule to its code and to its proof."""
    rule, function, test = row
    page, _, heading = rule.replace("`", "").partition(" › ")
    assert heading in HEADINGS[page]
    assert function.strip("`") in ALL_NAMES
    file, name = re.findall(r"`([^`]+)`", test)
    assert name in named_tests(file)


def test_the_map_has_each_section_once() -> None:
    """Choice: one row for a section, so that a reader finds it."""
    assert not [rule for rule, count in Counter(row[0] for row in rows_in("The map")).items() if count > 1]


def owners_of_choices(path: str) -> list[str]:
    """For each `choice:` in a file the innermost function it stands in, or the constant at or after it."""
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    names = {line: name for name, line in NAMES[path].items()}
    owners = []
    for number, line in enumerate(source_of(path).splitlines(), 1):
        if re.search(r"(# |; |^ +)choice: ", line):
            around = [node for node in functions if node.lineno <= number <= (node.end_lineno or 0)]
            innermost = max((node.lineno for node in around if node.lineno in names), default=0)
            owners.append(names[innermost or min(line for line in names if line >= number)])
    return owners


def test_it_lists_every_choice_of_the_code_and_no_other() -> None:
    """Choice: what no text decides is a reader's to know."""
    listed = [tuple(re.findall(r"`([^`]+)`", row[0])) for row in rows_in("The choices")]
    made = [(name, path) for path in (*MODULES, *LESSONS) for name in owners_of_choices(path)]
    assert Counter(listed) == Counter(made)


def test_it_explains_every_option_of_the_command_line_and_no_other(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the table of options is the one that --help prints."""
    monkeypatch.setattr(sys, "argv", ["reference_server.py", "--help"])
    with pytest.raises(SystemExit):
        reference_server.main()
    options = re.findall(r"(?m)^  (--[a-z-]+)", capsys.readouterr().out)
    assert Counter(row[0].strip("`") for row in rows_in("Limits and options")) == Counter(options)


def test_the_limits_that_it_names_exist() -> None:
    """Choice: a constant in the README can be looked up."""
    names = re.findall(r"`([A-Z][A-Z_]+)`", section("Limits and options"))
    assert len(names) > 4 and not [name for name in names if name not in ALL_NAMES]


def test_its_links_and_targets_lead_somewhere() -> None:
    """Choice: a dead link stops a reader."""
    for page, folder in ((README, ROOT), (REFERENCE, ROOT / "tests")):
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
        assert links and not [link for link in links if not (folder / link).exists()]
        assert not set(re.findall(r"`make ([a-z-]+)`", page)) - make_targets()
    assert make_targets() >= {"spoof", "three-ways", "cuts"}


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("make", [one for one in ("make", "bmake") if shutil.which(one)])
@pytest.mark.parametrize("target", [[], ["help"]])
def test_make_alone_lists_what_it_can_be_asked_for(make: str, target: list[str]) -> None:
    """Choice: whoever types `make` wants to know what there is; BSD make is what macOS's cousins have."""
    done = subprocess.run([make, *target], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    listed = re.findall(r"(?m)^make ([a-z-]+) +\S", done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(listed) == make_targets() and len(listed) == len(set(listed))


def test_the_statuses_are_the_rungs_that_the_code_numbers() -> None:
    """Choice: the order of the checks is part of the contract."""
    assert [row[0] for row in rows_in("The statuses")] == [str(number) for number in range(1, 19)]


@pytest.mark.parametrize("row", rows_in("The statuses"), ids=lambda row: row[0])
def test_the_rules_of_the_statuses_exist(row: list[str]) -> None:
    """Choice: a rule is a page and a heading of the revision, a section of an RFC, or a choice listed below."""
    for rule in row[3].split("; "):
        page, _, heading = rule.replace("`", "").partition(" › ")
        assert re.fullmatch(r"RFC \d{4} §[\d.]+|choice", rule) or heading in HEADINGS[page], rule

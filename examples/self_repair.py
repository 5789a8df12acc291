"""An agent that repairs code: five strategies fork from one prompt, and the first that passes the tests wins.

    mallee serve --model smollm2
    python examples/self_repair.py

The prompt (the function, its tests, how they fail) is computed once as a capsule; five branches go on from it
at once, each asked to mend in its own way. The terminal draws the tree while they write. A branch that is
complete is run against the tests; as soon as one passes, the others are pruned and their capsules released.

Tests run in a child process: `python -I -S` without an environment, in a folder of its own that is removed,
with bounds on processor time, memory, file sizes and processes, and a time limit; its process group is killed
at the end. An audit hook refuses writes outside the folder, sockets, other programs and signals. That holds
off accidents of a model: endless loops, a full disk, a lost file. It is no wall against code that means harm:
it can read your files, audit hooks can be got round, the bound on processes does not bind root, and code that
looks for it finds how a pass is reported. Run what you don't trust in a container or a virtual machine.
Needs Linux.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from mallee.client import AsyncBranches, AsyncCapsule, AsyncMallee

CODE = """\
def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
"""
TESTS = """\
import unittest

class MedianTest(unittest.TestCase):
    def test_odd(self):
        self.assertEqual(median([3, 1, 2]), 2)
    def test_even(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)
    def test_empty(self):
        with self.assertRaises(ValueError):
            median([])
"""
PROMPT = """\
The function fails its tests. Answer with the whole function, mended, and nothing else.
```python
{code}```
Tests:
```python
{tests}```
They end with: {reason}
"""
STRATEGIES: Final = {
    "smallest change": "Change as few lines as you can.",
    "edge cases first": "Begin with the special cases, each with a return or an error of its own.",
    "library": "Let the standard library do the work.",
    "anew": "Forget the old lines and write the function anew.",
    "by the tests": "Go through the tests one by one, and serve each.",
}
SUFFIX = "{instruction}\n```python\n"

WALL_S = 10.0  # of each run of the tests
LIMITS: Final = {  # soft and hard
    "RLIMIT_CPU": (1, 2),
    "RLIMIT_AS": (1 << 29, 1 << 29),
    "RLIMIT_FSIZE": (1 << 16, 1 << 16),
    "RLIMIT_NPROC": (0, 0),
    "RLIMIT_CORE": (0, 0),
}
SANDBOX = """\
import json, os, resource, sys, unittest
given = json.load(sys.stdin)
home = os.path.realpath(os.getcwd()) + os.sep
refused = ("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn",
           "os.kill", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.ch")
def guard(event, args):
    if event.startswith(refused):
        raise PermissionError(event + " is refused")
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    if event == "open" and not isinstance(args[0], int) and args[2] & writes:
        if not os.path.realpath(os.fsdecode(args[0])).startswith(home):
            raise PermissionError("a write outside its folder is refused: " + os.fsdecode(args[0]))
for name, bounds in given["limits"].items():
    resource.setrlimit(getattr(resource, name), bounds)
sys.addaudithook(guard)
names, at = {"__name__": "candidate"}, ""
try:
    exec(compile(given["code"], "candidate", "exec"), names)
    exec(compile(given["tests"], "tests", "exec"), names)
    kinds = [each for each in names.values() if isinstance(each, type)]
    for kind in [each for each in kinds if issubclass(each, unittest.TestCase)]:
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
            at = case.id().rpartition(".")[2] + ": "
            case.debug()
except BaseException as error:
    sys.exit(at + type(error).__name__ + ": " + (str(error).splitlines() or [""])[0])
print("\\n" + given["passed"])
"""

State: TypeAlias = Literal["waiting", "writing", "testing", "passed", "failed", "pruned"]
STYLES: Final[dict[State, str]] = {
    **{"waiting": "dim", "writing": "yellow", "testing": "blue"},
    **{"passed": "bold green", "failed": "red", "pruned": "dim"},
}


@dataclass(slots=True)
class Attempt:
    """One strategy's branch; `reason` of one that failed."""

    strategy: str
    text: str = ""
    state: State = "waiting"
    reason: str = ""

    @property
    def is_open(self) -> bool:
        """Whether its text may still grow."""
        return self.state in ("waiting", "writing")


class Proposal(NamedTuple):
    """A branch's text so far; once it `is_whole` it is tested."""

    text: str
    is_whole: bool


Proposer: TypeAlias = Callable[[int, str, bool], Proposal]
"""The proposal of a branch, by its number, the text that was streamed so far, and whether that has ended."""
Show: TypeAlias = Callable[[Sequence[Attempt]], None]


def streamed(index: int, text: str, is_over: bool) -> Proposal:
    """The text that the model writes."""
    return Proposal(text, is_over)


def scripted(texts: Sequence[str]) -> Proposer:
    """Given texts instead of the model's, as fast as it writes."""

    def propose(index: int, text: str, is_over: bool) -> Proposal:
        script = texts[index]
        is_whole = is_over or len(text) >= len(script)
        return Proposal(script if is_whole else script[: len(text)], is_whole)

    return propose


def code_of(text: str) -> str:
    """The first fenced block, or all up to the first fence: the prompt has opened one."""
    before, fence, after = text.partition("```python\n")
    return (after if fence else before).partition("```")[0]


async def fault_of(code: str, tests: str) -> str:
    """Run `tests` on `code` in a process of its own; the reason why they fail, or nothing if they pass."""
    passed = secrets.token_hex(8)
    given = {"code": code, "tests": tests, "limits": LIMITS, "passed": passed}
    with (
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryDirectory(prefix="mallee-repair-") as home,
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", "-c", SANDBOX),
            stdin=asyncio.subprocess.PIPE,
            stdout=report,
            stderr=report,
            cwd=home,
            env={},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(WALL_S):
                await process.communicate(json.dumps(given).encode())
        except TimeoutError:
            return f"no end within {WALL_S:g} s"
        finally:
            with suppress(ProcessLookupError):  # all of its group have ended
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        report.seek(0)
        last = report.read().decode(errors="replace").rstrip().rpartition("\n")[2]
    assert process.returncode is not None
    if process.returncode == -signal.SIGXCPU:
        return f"more than {LIMITS['RLIMIT_CPU'][0]} s of processor time"
    if process.returncode < 0:
        return f"ended by {signal.Signals(-process.returncode).name}"
    return "" if last == passed else last or "ended before its tests"


class Repair:
    """One run of the agent: its attempts, and the capsule that they fork from."""

    def __init__(
        self, capsule: AsyncCapsule, tests: str, propose: Proposer = streamed, *, show: Show
    ) -> None:
        self.attempts = [Attempt(name) for name in STRATEGIES]
        self._capsule = capsule
        self._tests = tests
        self._propose = propose
        self._show = show
        self._checks: dict[int, asyncio.Task[None]] = {}

    async def run(self, *, max_tokens: int, seed: int) -> Attempt | None:
        """Have all strategies written and tested at once; the first that passed, if one did."""
        suffixes = [SUFFIX.format(instruction=each) for each in STRATEGIES.values()]
        fork = self._capsule.fork(
            suffixes, max_tokens=max_tokens, temperature=0.7, seed=seed, stop="```"
        )
        async with fork as branches, asyncio.TaskGroup() as checks:
            async for event in branches.events():
                self._take(event.index, branches, checks)
        return next((each for each in self.attempts if each.state == "passed"), None)

    def _take(self, index: int, branches: AsyncBranches, checks: asyncio.TaskGroup) -> None:
        """Take a branch's news; begin its test once it is whole."""
        attempt, branch = self.attempts[index], branches.branches[index]
        if not attempt.is_open:
            return
        if branch.finish_reason in ("cancelled", "error"):
            attempt.state, attempt.reason = "failed", f"its branch: {branch.finish_reason}"
        else:
            is_over = branch.finish_reason is not None
            attempt.text, is_whole = self._propose(index, branch.text, is_over)
            attempt.state = "testing" if is_whole else "writing"
            if is_whole:
                self._checks[index] = checks.create_task(self._check(index))
        self._show(self.attempts)

    async def _check(self, index: int) -> None:
        attempt = self.attempts[index]
        attempt.reason = await fault_of(code_of(attempt.text), self._tests)
        attempt.state = "failed" if attempt.reason else "passed"
        if attempt.state == "passed":
            await self._end_others()
        self._show(self.attempts)

    async def _end_others(self) -> None:
        """End what is still written or tested; the capsules of all branches are released."""
        for index, attempt in enumerate(self.attempts):
            if attempt.state == "testing":
                self._checks[index].cancel()
            if attempt.is_open or attempt.state == "testing":
                attempt.state = "pruned"
        await self._capsule.prune()


def draw(title: str, attempts: Sequence[Attempt]) -> Tree:
    """The tree as it stands: each strategy with its state, below it the end of its code."""
    tree = Tree(Text(title, style="bold"), guide_style="green")
    for each in attempts:
        head = Text.assemble((each.strategy, "cyan"), "  ", (each.state, STYLES[each.state]))
        head.append(f": {each.reason}" if each.reason else "")
        node = tree.add(head)
        tail = "\n".join(code_of(each.text).rstrip().splitlines()[-2:])
        if tail:
            node.add(Text(tail, style="dim", no_wrap=True, overflow="ellipsis"))
    return tree


def printing(console: Console) -> Show:
    """Shows a line for each attempt that is being tested, or has ended."""
    shown: dict[str, State] = {}

    def show(attempts: Sequence[Attempt]) -> None:
        for each in attempts:
            if not each.is_open and shown.get(each.strategy) != each.state:
                shown[each.strategy] = each.state
                reason = f": {each.reason}" if each.reason else ""
                line = f"{each.strategy}  {each.state}{reason}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    return show


async def repair(
    url: str,
    code: str,
    tests: str,
    *,
    console: Console,
    propose: Proposer = streamed,
    max_tokens: int = 200,
    seed: int = 0,
    is_plain: bool = False,
) -> str | None:
    """The code that passes the tests, if one of the strategies found it."""
    fault = await fault_of(code, tests)
    if not fault:
        return code
    prompt = PROMPT.format(code=code, tests=tests, reason=fault)
    # The session's end releases whatever is left of its capsules.
    async with AsyncMallee(url) as client, client.session() as session:
        capsule = await session.prefill(prompt)
        title = f"prompt of {capsule.tokens} tokens, {capsule.prefill_tokens} of them computed"
        view = Live(console=console, refresh_per_second=12)
        draws = console.is_terminal and not is_plain
        with view if draws else nullcontext():
            show = (lambda all_: view.update(draw(title, all_))) if draws else printing(console)
            agent = Repair(capsule, tests, propose, show=show)
            found = await agent.run(max_tokens=max_tokens, seed=seed)
    if found is None:
        console.print(f"{title}; no strategy passed", highlight=False)
        return None
    console.print(f"{title}; passed: {found.strategy}", highlight=False)
    console.print(code_of(found.text), markup=False, highlight=False)
    return code_of(found.text)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Repair a function by five strategies at once.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--code", type=Path, help="A file with the function, instead of a median.")
    parser.add_argument("--tests", type=Path, help="A file with its unittest cases.")
    parser.add_argument("--tokens", type=int, default=200, help="At most, of each answer.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scripted", type=Path, help="A JSON list of five answers to show instead."
    )
    parser.add_argument("--plain", action="store_true", help="Lines instead of a tree.")
    asked = parser.parse_args(given)
    code = asked.code.read_text() if asked.code else CODE
    tests = asked.tests.read_text() if asked.tests else TESTS
    script = json.loads(asked.scripted.read_text()) if asked.scripted else None
    if script is not None and len(script) != len(STRATEGIES):
        parser.error(f"--scripted: {len(script)} answers; give {len(STRATEGIES)}, one a strategy")
    found = asyncio.run(
        repair(
            *(asked.url, code, tests),
            console=Console(),
            propose=scripted(script) if script else streamed,
            max_tokens=asked.tokens,
            seed=asked.seed,
            is_plain=asked.plain,
        )
    )
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())

"""Grammars are tried in a child process first, where they can do no harm.

llguidance's own limits bound the steps of an answer, but not its compiler: eight short regular expressions
joined by & take minutes, a thousand schemas that refer to each other overflow its stack, and with that the
process ends. The child compiles under limits of processor time, memory and stack; a grammar that it survives
takes no more here.

Run as `python -m`, this module is the child: one line of JSON in, one out. It ends with its input.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S: Final = 1.0
"""Processor time that a grammar may take; those of real schemas take 2 to 34 ms."""
MEMORY_NBYTES: Final = 512 << 20
"""Memory that a grammar may take beside the tokenizer; those of real schemas take 1 to 16 MiB."""
STACK_NBYTES: Final = 2 << 20
"""The compiler's stack; that of any thread here is larger, so that what fits there fits here."""
WALL_S: Final = 10.0
"""Time that a grammar may take on a machine that is busy otherwise."""
START_S: Final = 60.0
END_S: Final = 5.0

# Work that a step of an answer may cost: with the worst grammars found, 11 ms for its mask and 3 ms for its
# token. More is needed by schemas of more than 800 optional properties.
_STEP: Final[dict[str, Any]] = {
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
}


def parser_limits() -> LLParserLimits:
    """The limits of llguidance, here and in the child."""
    return LLParserLimits(verbose_errors=False, **_STEP)


_STATM: Final = Path("/proc/self/statm")


class TokenizerSpec(NamedTuple):
    """The arguments of a `LLTokenizer`; `text` is that of a tokenizer.json."""

    text: str
    vocab_size: int
    eos_token_ids: list[int]

    def load(self) -> LLTokenizer:
        return LLTokenizer(self.text, n_vocab=self.vocab_size, eos_token=self.eos_token_ids)


class Trial:
    """The child process, which starts with the first grammar, and again when one has killed it.

    Used by one thread at a time.
    """

    def __init__(self, tokenizer: TokenizerSpec, *, wall_s: float = WALL_S) -> None:
        self._tokenizer = tokenizer
        self._wall_s = wall_s
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def run(self, text: str) -> str:
        """The fault of the grammar `text`, "" if it has none. Raises OSError: there is no child."""
        child = self._started()
        error = self._ask(child, {"grammar": text}, self._wall_s)
        if error is not None:
            return error
        with suppress(OSError):  # the next grammar tries again
            self._started()  # this one waits for the next child, not one that comes later
        return _DEATHS.get(child.returncode, "its compiler ran out of memory or stack")

    def close(self) -> None:
        """End the child. Idempotent."""
        self._child = None
        if self._end is not None:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its traceback, if its parent is killed, would be no line of a log, and may quote a client.
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the parent's to handle
        )
        self._end = weakref.finalize(self, _end, self._child)
        if self._ask(self._child, self._tokenizer._asdict(), START_S) != "":
            self.close()
            raise OSError("the process that tries grammars did not start")
        return self._child

    def _ask(
        self, child: subprocess.Popen[bytes], message: dict[str, Any], limit_s: float
    ) -> str | None:
        """The child's answer; None: it has died, or was killed since it took longer than `limit_s`."""
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
        line = _read_line(child.stdout, time.monotonic() + limit_s)
        if line:
            error: str = json.loads(line)
            return error
        child.kill()
        child.wait(END_S)
        return None


_DEATHS: Final = {
    -signal.SIGPROF: f"it takes more than {CPU_S:g} s to compile",
    -signal.SIGKILL: f"it takes more than {WALL_S:g} s to compile",
}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(END_S)
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(OSError):  # it did not read all
            pipe.close()


def _read_line(pipe: IO[bytes], deadline: float) -> bytes:
    """A line; b"" if none comes in time, or the other end is closed."""
    line = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1e3):
            return b""
        read = os.read(pipe.fileno(), 1 << 16)
        if not read:
            return b""
        line += read
    return line


# The child


def _serve() -> None:
    tokenizer = TokenizerSpec(**json.loads(sys.stdin.buffer.readline())).load()
    if _STATM.is_file():  # only Linux tells how much there is already
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        limit = used + MEMORY_NBYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer("")
    for line in sys.stdin.buffer:
        text = json.loads(line)["grammar"]
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process
        error = _try(tokenizer, text)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _answer(error)


def _try(tokenizer: LLTokenizer, text: str) -> str:
    """The fault of a grammar, "" if it has none; its first mask is computed too."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()) if matcher.is_error() else ""


def _answer(error: str) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


def _with_stack(nbytes: int, work: Callable[[], None]) -> None:
    """Run `work` in a thread with such a stack."""
    threading.stack_size(nbytes)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _with_stack(STACK_NBYTES, _serve)

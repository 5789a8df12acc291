"""Names of blocks for whole prompts, also of forks, which have no ids in the workload.

A workload's ids may stand for more or fewer tokens than a block: ids are prefix-chained, so the last id
inside a block names it with all before, and an id that is longer than a block makes several. A fork's
prompt is its parent's text (prompt and answer) and what it adds. The blocks behind a parent's prompt
have no ids in the workload; they get names from `FRESH` on, the same for all forks of this parent.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.traces.numbers import Ints
from mallee.traces.workload import NO_PARENT, Request

FRESH: Final = 1 << 40  # names of a workload's own ids are below where it has forks
END: Final = 1 << 53  # JSON numbers below are exact everywhere


@dataclass(frozen=True, slots=True)
class Prompt:
    """Blocks of a prompt from the first token on (the last may be partial), and all its tokens."""

    path: Ints
    tokens: int


class Prompts:
    """Prompts of a workload's requests, one after the other. Keeps what will be forked until it was."""

    def __init__(self, id_tokens: int, size: int, *, has_forks: bool) -> None:
        """Blocks have `size` tokens. Raises ConfigError if neither size divides the other."""
        if size < 1 or (size % id_tokens and id_tokens % size):
            raise ConfigError(
                f"block size {size}: give a multiple or a divisor of {id_tokens}, the tokens of an id of"
                " this trace"
            )
        self._id_tokens = id_tokens
        self._end = FRESH if has_forks else END
        self._size = size
        self._fresh = FRESH
        self._ends: dict[int, Prompt] = {}  # prompt and answer of what is to be forked
        self._to_come: dict[int, int] = {}  # how many will fork it

    def of(self, request: Request, copies: int = 1) -> list[Prompt]:
        """Its prompt; of a fork with several branches, `copies` that differ in what they add.

        Requests come in their order. Raises ConfigError for a fork of text that is not kept.
        """
        if request.num_children and self._end != FRESH:
            raise ConfigError(
                f"request {request.number} will be forked; say has_forks of its workload"
            )
        if request.parent == NO_PARENT:
            found = [self._own(request)]
            text = self._full(found[0])
        else:
            end = self._taken(request)
            found = [self._longer(end, request.input_tokens) for _ in range(copies)]
            text = found[0]
        if request.num_children:
            self._ends[request.number] = self._longer(text, request.output_tokens)
            self._to_come[request.number] = request.num_children
        return found

    def _taken(self, fork: Request) -> Prompt:
        """Text that `fork` goes on from; forgotten after its last fork."""
        parent = fork.parent
        end = self._ends.get(parent)
        if end is None:
            raise ConfigError(
                f"request {fork.number} forks {parent}, which expects no more forks; let num_children of"
                " a request be how many requests fork it"
            )
        self._to_come[parent] -= 1
        if not self._to_come[parent]:
            del self._ends[parent], self._to_come[parent]
        return end

    def _own(self, request: Request) -> Prompt:
        ids = np.asarray(request.ids, np.int64)
        path = resized(ids, self._id_tokens, self._size, request.input_tokens)
        top = int(path.max(initial=-1))
        if top >= self._end:
            what = f"request {request.number}: block {top} of {self._size} tokens"
            raise ConfigError(
                f"{what}; number the blocks of the trace from 0, to stay below {self._end}"
            )
        return Prompt(path, request.input_tokens)

    def _full(self, prompt: Prompt) -> Prompt:
        return Prompt(prompt.path[: prompt.tokens // self._size], prompt.tokens)

    def _longer(self, text: Prompt, tokens: int) -> Prompt:
        """`text` with `tokens` more of its own; full blocks only."""
        total = text.tokens + tokens
        count = total // self._size - len(text.path)
        if count <= 0:
            return Prompt(text.path, total)
        fresh = np.arange(self._fresh, self._fresh + count, dtype=np.int64)
        self._fresh += count
        return Prompt(np.concatenate([text.path, fresh]), total)


def resized(ids: Ints, id_tokens: int, size: int, tokens: int) -> Ints:
    """Names of the blocks of `size` tokens of a prompt of `tokens`; a partial one if its end has an id."""
    if id_tokens == size:
        return ids
    if id_tokens > size:
        each = id_tokens // size
        blocks = (ids[:, None] * each + np.arange(each)).ravel()
        return blocks[: -(-tokens // size)]
    each = size // id_tokens
    full = 2 * ids[each - 1 :: each]
    if len(ids) % each and len(ids) * id_tokens >= tokens:  # the last id reaches the prompt's end
        return np.append(full, 2 * ids[-1] + 1)  # apart from the whole block's name
    return full

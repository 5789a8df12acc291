"""Drafts of a second, smaller model, which computes the texts of branches beside the one that answers.

Its KV lies in a tree of its own, over blocks of its own: forks, sisters and later turns share what is
computed, and what no branch needs is evicted as any cache is. A branch's node there ends before its last
token. That one, and what is drafted after it, is computed into reserved slots, and committed once the branch
has drawn it; so a rollback is to compute on from where draft and text part.

Tokens are drawn as the branch itself draws: with its settings, its seed and the position. The same noise
then decides between the same candidates: at a temperature of 0.8, 77 % of the drafts of a copy in 6 bits are
drawn, as of greedy ones without temperature, and 43 % of greedy ones (measured).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from mallee.protocol.errors import ConfigError, PoolExhausted
from mallee.protocol.hashing import as_tokens, block_hashes
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, Forward, ForwardBatch, Logits, Row
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node, Reservation
from mallee.worker.kv.paths import flatten, path_hashes, side_tables
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.make import make_sides
from mallee.worker.kv.text import TokenNotation
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Job, answer_of, node_of
from mallee.worker.speculation.drafters import text_of
from mallee.worker.speculation.worth import StepCosts

MAX_STEP_TOKENS: Final = 512
"""Tokens of texts that are computed before the drafts of one step, of all branches together."""


class _Followed:
    """A branch as far as it is computed: up to the end of `node`, which it holds, and `ahead` of that."""

    __slots__ = ("ahead", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ahead: list[int] = []  # in reserved slots


class _Chunk(NamedTuple):
    """Tokens to compute after the end of a branch's node."""

    branch: Branch
    tokens: list[int]
    is_last: bool


class DraftModel:
    """A `Drafter` that computes by `forward`, whose blocks it owns. `clock` times its passes.

    Its blocks are as long as the engine's, whose hashes it finds texts by.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        clock: Callable[[], float],
        max_step_tokens: int = MAX_STEP_TOKENS,
    ) -> None:
        """Raises ConfigError if layers of `forward` are recurrent."""
        if (
            forward.spec.has_states
        ):  # behind an uncommitted token there is none to draft the next from
            raise ConfigError(
                f"draft_model {forward.spec.name} has recurrent layers, whose state can't go back to where a"
                " draft was refused; give one without, or set speculation to prompt, sibling or auto"
            )
        self._forward = forward
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._block_size = size = forward.block_size
        self._vocab_size = forward.spec.vocab_size
        self._eos = frozenset(forward.spec.eos_token_ids)
        self._journal = Journal()  # which tells nobody
        self._tree = BranchTree(
            BlockPool(forward.num_blocks),
            size,
            self._journal,
            notation=TokenNotation(self._vocab_size),
            sides=make_sides(forward.spec.groups, forward.num_blocks, size, self._journal),
        )
        self._followed: OrderedDict[Branch, _Followed] = OrderedDict()  # used last: at the end
        self._costs = StepCosts()
        self._narrowed: tuple[Sampling, Sampling] | None = None

    # A drafter

    def read(self, branch: Branch) -> None:
        """Its text is computed when a draft is wanted."""

    def seconds(self, branch: Branch, num_branches: int) -> float:
        """A share of a pass, and of the time to compute the text so far, over the tokens that are left."""
        followed = self._followed.get(branch) or self._follow(branch)[0]
        missing = branch.length - followed.node.end
        left = max(1, branch.job.limits.max_tokens - branch.num_output)
        costs = self._costs
        return costs.seconds(num_branches) / num_branches + costs.slope * missing / left

    def propose_all(self, lengths: Mapping[Branch, int]) -> dict[Branch, list[int]]:
        """Drafts of branches whose texts are computed within this step's tokens; of the others later."""
        longest = self._forward.spec.max_model_len
        wanted = {
            branch: most
            for branch, num in lengths.items()
            if (most := min(num, longest - branch.length + 1)) > 0
        }
        for branch in wanted:
            if branch in self._followed:
                self._followed.move_to_end(branch)
        began = self._clock()
        chunks = self._chunks(wanted)
        self._journal.drain()
        logits = self._compute(chunks)
        num_computed = sum(len(chunk.tokens) for chunk in chunks)
        drafts: dict[Branch, list[int]] = {branch: [] for branch in logits}
        while logits:
            draws = [self._draw(branch, each, drafts[branch]) for branch, each in logits.items()]
            tokens = self._forward.sample(draws)
            self._costs.learn(num_computed, self._clock() - began)
            going = []
            for branch, token in zip(logits, tokens, strict=True):
                draft = drafts[branch]
                draft.append(token)
                if len(draft) < wanted[branch] and not self._ends(branch, token):
                    going.append(branch)
            began, num_computed = self._clock(), len(going)
            logits = self._go_on({branch: drafts[branch] for branch in going})
        return drafts

    def forget(self, branch: Branch) -> None:
        followed = self._followed.pop(branch, None)
        if followed is not None:
            self._tree.release(followed.node)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        check_tree(self._tree)
        held = Counter(each.node for each in self._followed.values())
        assert held == self._tree.holds(), "nodes are held by other branches than are followed"

    # Texts

    def _follow(self, branch: Branch) -> tuple[_Followed, int | None]:
        """The state of `branch`, at the end of the longest part of its text that is computed.

        If a block or more is missing, which sisters may compute too: the chain hash of the first one.
        """
        followed = self._followed.get(branch)
        size, last = self._block_size, branch.length - 1
        if followed is not None and last - followed.node.end < size:
            return followed, None
        salt = branch.job.salt
        hashes = path_hashes(
            node_of(branch), size
        )  # as the engine has them, where it keeps a cache
        if (num := len(hashes)) < last // size:
            parent = int(hashes[-1]) if num else None
            rest = block_hashes(text_of(branch, num * size, last), size, salt=salt, parent=parent)
            hashes = np.concatenate((hashes, rest))
        num_found = self._tree.find(hashes)
        if followed is None:
            node = self._tree.attach(hashes, salt, num_found)
            followed = self._followed[branch] = _Followed(node)
        elif num_found * size > followed.node.end:
            self._tree.release(followed.node)
            followed.node = self._tree.attach(hashes, salt)
            followed.ahead.clear()
        first = followed.node.end // size
        return followed, int(hashes[first]) if first < len(hashes) else None

    def _missing(self, branch: Branch, followed: _Followed, most: int) -> list[int]:
        """The next tokens of `branch` to be computed, one to `most`. What is right ahead is committed."""
        begin = followed.node.end
        end = min(branch.length, begin + len(followed.ahead) + most)
        tokens = text_of(branch, begin, end)
        num = 0
        for token, drafted in zip(tokens[:-1], followed.ahead, strict=False):
            if token != drafted:
                break
            num += 1
        followed.ahead.clear()
        if num:
            self._tree.commit(followed.node, tokens[:num])
        return tokens[num : num + most]

    def _chunks(self, lengths: Mapping[Branch, int]) -> list[_Chunk]:
        """The tokens to compute before drafts of such lengths, which have room."""
        chunks: dict[Branch, _Chunk] = {}
        begun: set[int] = set()  # blocks that sisters wait for
        left = self._max_step_tokens
        for branch, length in lengths.items():
            if not left:
                break
            followed, block = self._follow(branch)
            if block is not None and block in begun:
                continue
            tokens = self._missing(branch, followed, left)
            if max(tokens) >= self._vocab_size:  # as raw token ids may be
                continue
            is_last = followed.node.end + len(tokens) == branch.length
            room = len(tokens) + (length - 1 if is_last else 0)
            reserved = self._reserve(followed.node, room, chunks)
            if reserved is None:
                continue
            assert reserved.copy is None, "texts part where blocks end"
            followed.node = reserved.node
            if block is not None:
                begun.add(block)
            chunks[branch] = _Chunk(branch, tokens, is_last)
            left -= len(tokens)
        return list(chunks.values())

    def _reserve(self, node: Node, num_tokens: int, kept: Container[Branch]) -> Reservation | None:
        """Room after `node`, at the cost of branches that drafted longest ago, but not of those `kept`."""
        while True:
            try:
                return self._tree.reserve(node, num_tokens)
            except PoolExhausted:
                oldest = (
                    branch
                    for branch, each in self._followed.items()
                    if branch not in kept and each.node is not node
                )
                if (branch := next(oldest, None)) is None:
                    return None
                self.forget(branch)

    # Passes

    def _compute(self, chunks: Sequence[_Chunk]) -> dict[Branch, Logits]:
        """Compute `chunks`; the logits after those that are the last of their branches."""
        if not chunks:
            return {}
        rows = []
        for branch, tokens, is_last in chunks:
            followed = self._followed[branch]
            rows.append(self._row(followed, tokens, followed.node.end, int(is_last)))
        logits = self._forward.forward(ForwardBatch((), rows))
        for branch, tokens, is_last in chunks:
            followed = self._followed[branch]
            num_known = len(tokens) - is_last
            followed.ahead = tokens[num_known:]
            self._tree.commit(followed.node, tokens[:num_known])
        return dict(zip((c.branch for c in chunks if c.is_last), logits, strict=True))

    def _go_on(self, drafts: Mapping[Branch, list[int]]) -> dict[Branch, Logits]:
        """Compute the last token of each draft; the logits after it."""
        if not drafts:
            return {}
        rows = [
            self._row(self._followed[branch], draft[-1:], branch.length + len(draft) - 1, 1)
            for branch, draft in drafts.items()
        ]
        logits = self._forward.forward(ForwardBatch((), rows))
        for branch, draft in drafts.items():
            self._followed[branch].ahead.append(draft[-1])
        return dict(zip(drafts, logits, strict=True))

    def _row(self, followed: _Followed, tokens: list[int], start: int, num_logits: int) -> Row:
        node, size = followed.node, self._block_size
        sides = side_tables(node, size)
        return Row(as_tokens(tokens), start, flatten(node, size), num_logits, sides)

    def _draw(self, branch: Branch, logits: Logits, draft: Sequence[int]) -> Draw:
        """The draw of `branch` after `draft`, but for what its grammar forbids."""
        job, answer, history = branch.job, answer_of(branch), None
        if answer.rules.has_penalties:
            assert answer.history is not None, "a decode has drawn before"
            history = answer.history.after(draft)
        return Draw(logits, self._sampling(job), answer.seed, branch.length + len(draft), history)

    def _sampling(self, job: Job) -> Sampling:
        """The job's, without biases of tokens that only the larger vocabulary has.

        The same object for all draws of one answer's settings: those are drawn together.
        """
        sampling = job.sampling
        if all(token < self._vocab_size for token, _ in sampling.logit_bias):
            return sampling
        if self._narrowed is None or self._narrowed[0] is not sampling:
            bias = tuple(each for each in sampling.logit_bias if each[0] < self._vocab_size)
            self._narrowed = sampling, structs.replace(sampling, logit_bias=bias)
        return self._narrowed[1]

    def _ends(self, branch: Branch, token: int) -> bool:
        """Whether nothing is drawn after `token`."""
        is_eos = token in self._eos and not branch.job.limits.ignore_eos
        return is_eos or token in branch.job.rules.stop_ids

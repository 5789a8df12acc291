"""The orders of a scheduler, as small objects: which branch goes first, and which gives way.

    fair                sessions by share, in a session the highest priority, then the oldest
    fcfs                the oldest first, decodes before prompts; shares and priorities count for nothing
    prefill_first       as fcfs, but prompts before decodes: first tokens soon, later ones unevenly
    decode_round_robin  as fcfs, but decodes take turns when not all have room in a step

Victims, when blocks run out (the shared part of a victim's text is never lost):

    least_due           of the session most over its share the lowest priority, then the youngest
    youngest            the youngest, whatever its priority
    oldest_decode       the oldest of those that decode (the order of vLLM's and Dynamo's simulators)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from mallee.protocol.errors import ConfigError
from mallee.worker.sched.branch import Branch

PolicyName: TypeAlias = Literal["fair", "fcfs", "prefill_first", "decode_round_robin"]
VictimName: TypeAlias = Literal["least_due", "youngest", "oldest_decode"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_step_tokens` bounds a step (decode rows count one each), `max_rows` its batch.

    `max_decodes` and `max_chunks` bound the decode rows and the prefill chunks of a step further (None:
    no further). After `ageing_steps` steps without being served a branch goes first, whatever its
    priority (0: never). `watermark` is the share of blocks that admission leaves free for the growth of
    those that run; `headroom_tokens` must be left in the pool beside the longest text of a request.
    `gang` puts rows that share a prefix side by side. Without `chunked` a prompt runs whole in one
    step; without `continuous` branches are admitted only when none runs.
    """

    max_step_tokens: int = 512
    max_rows: int = 256
    max_waiting: int = 4096
    policy: PolicyName = "fair"
    victims: VictimName = "least_due"
    max_decodes: int | None = None
    max_chunks: int | None = None
    ageing_steps: int = 256
    watermark: float = 0.02
    headroom_tokens: int = 0
    gang: bool = True
    chunked: bool = True
    continuous: bool = True

    def validate(self, max_model_len: int) -> "SchedulerConfig":
        """Itself. Raises ConfigError naming what contradicts what, and the remedy."""
        for name in ("max_step_tokens", "max_rows", "max_waiting", "max_decodes", "max_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give at least 1")
        for name in ("ageing_steps", "headroom_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give 0 (off) or more")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark}: give a share from 0 to below 1")
        if not self.chunked and self.max_step_tokens < max_model_len:
            raise ConfigError(
                f"chunked=False with max_step_tokens={self.max_step_tokens}: a prompt of up to"
                f" {max_model_len} tokens must fit into one step; raise max_step_tokens, lower"
                " max_model_len, or leave chunked on"
            )
        return self


class Policy(NamedTuple):
    """`is_fair`: sessions have accounts; else all branches are of one. Lower ranks go first."""

    is_fair: bool = False
    prefill_first: bool = False
    takes_turns: bool = False

    def rank(self, branch: Branch) -> float:
        """Among the branches of a session that wait or compute a prompt. Then arrival decides."""
        return -branch.priority if self.is_fair else 0.0

    def turn(self, branch: Branch) -> float:
        """Among the decodes of a session, when not all have room in a step. Then arrival decides."""
        return float(branch.last_step) if self.takes_turns else self.rank(branch)


POLICIES: dict[PolicyName, Policy] = {
    "fair": Policy(is_fair=True),
    "fcfs": Policy(),
    "prefill_first": Policy(prefill_first=True),
    "decode_round_robin": Policy(takes_turns=True),
}


def _least_due(branch: Branch) -> tuple[float, ...]:
    session = branch.job.session
    return (session.tenant.tag, session.tag, -branch.priority, branch.ticket)


def _youngest(branch: Branch) -> tuple[float, ...]:
    return (branch.ticket,)


def _oldest_decode(branch: Branch) -> tuple[float, ...]:
    return (branch.phase == "decode", -branch.ticket)


URGES: dict[VictimName, Callable[[Branch], tuple[float, ...]]] = {
    "least_due": _least_due,
    "youngest": _youngest,
    "oldest_decode": _oldest_decode,
}
"""The running branch with the greatest urge to go is preempted."""

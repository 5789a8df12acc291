"""The settings of a scheduler, and the order in which it serves."""

from dataclasses import dataclass

from mallee.protocol.errors import ConfigError
from mallee.worker.sched.branch import Branch


class Order:
    """Fair between tenants and their sessions (`sessions.py`), in a session by priority, then by arrival.

    Other orders are subclasses, to be compared with it (`bench.mocker.policies`). Lower ranks go first.
    """

    is_fair = (
        True  # sessions have accounts; else all branches are of one, and none overtakes another
    )
    prompts_first = False  # prompts are given tokens of a step before decodes

    def rank(self, branch: Branch) -> float:
        """Among the branches of a session that wait or compute a prompt. Then arrival decides."""
        return -branch.priority

    def turn(self, branch: Branch) -> float:
        """Among the decodes of a session, when not all have room in a step. Then arrival decides."""
        return -branch.priority

    def victim(self, branch: Branch) -> tuple[float, ...]:
        """Order of preemption: the running branch for which it is the greatest goes when blocks run out.

        Of the session most over its share the lowest priority, then the youngest. The shared part of its
        text is never lost.
        """
        session = branch.job.session
        return (session.tenant.level, session.level, -branch.priority, branch.ticket)


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
    max_decodes: int | None = None
    max_chunks: int | None = None
    ageing_steps: int = 256
    watermark: float = 0.02
    headroom_tokens: int = 0
    gang: bool = True
    chunked: bool = True
    continuous: bool = True
    order: Order = Order()  # noqa: RUF009 - it has no state

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

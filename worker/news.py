"""What a step has to report, by gateway: updates of branches, gathered into frames."""

from typing import Protocol

from mallee.protocol.errors import MalleeError
from mallee.protocol.messages import (
    ALL_BRANCHES,
    FinishReason,
    Frame,
    Generate,
    TokenLogprobs,
    Update,
)
from mallee.worker.jobs import Branch
from mallee.worker.kv.text import Text


class News(Protocol):
    """Hears what became of branches; tells each gateway of its own."""

    def __len__(self) -> int:
        """How many gateways there is something to tell."""
        ...

    def tell(
        self,
        branch: Branch,
        *,
        index: int | None = None,
        tokens: Text | tuple[int, ...] = (),
        finish: FinishReason | None = None,
        capsule: str | None = None,
        boundary: int = 0,
        error: MalleeError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """News of `branch`, or of its member `index`, for the gateway that asked for it."""
        ...

    def refuse(self, gateway: str, request: str, error: MalleeError) -> None:
        """`request` never began."""
        ...

    def drop(self, gateway: str) -> None:
        """Nobody is there to be told."""
        ...

    def drain(self, step: int) -> dict[str, Frame]:
        """Frames of everything since the last drain."""
        ...


class FrameNews:
    """Collects updates; `drain` hands them over as one frame a gateway and starts afresh."""

    __slots__ = ("_updates",)

    def __init__(self) -> None:
        self._updates: dict[str, list[Update]] = {}

    def __len__(self) -> int:
        return len(self._updates)

    def tell(
        self,
        branch: Branch,
        *,
        index: int | None = None,
        tokens: Text | tuple[int, ...] = (),
        finish: FinishReason | None = None,
        capsule: str | None = None,
        boundary: int = 0,
        error: MalleeError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """One update of `branch`, or of its member `index`, for the gateway that asked for it."""
        cached, computed = prompt_tokens(branch)
        update = Update(
            branch.job.command.request,
            branch.index if index is None else index,
            tokens if isinstance(tokens, tuple) else tuple(tokens),
            finish,
            cached,
            computed,
            capsule,
            boundary,
            error.to_wire() if error else None,
            logprobs,
        )
        self._updates.setdefault(branch.job.gateway, []).append(update)

    def refuse(self, gateway: str, request: str, error: MalleeError) -> None:
        """`request` never began."""
        update = Update(request, ALL_BRANCHES, finish="error", error=error.to_wire())
        self._updates.setdefault(gateway, []).append(update)

    def drop(self, gateway: str) -> None:
        """Nobody is there to be told."""
        self._updates.pop(gateway, None)

    def drain(self, step: int) -> dict[str, Frame]:
        """Everything since the last drain."""
        updates, self._updates = self._updates, {}
        return {gateway: Frame(step, tuple(news)) for gateway, news in updates.items()}


def prompt_tokens(branch: Branch) -> tuple[int, int]:
    """Prompt tokens found and computed, (0, 0) before the branch is admitted.

    What n branches of one prompt share was computed once: branch 0 reports it.
    """
    if branch.cached_tokens is None:
        return 0, 0
    if isinstance(branch.job.command, Generate) and branch.index > 0:
        return branch.cached_tokens, 0
    return branch.cached_tokens, branch.prompt_len - branch.cached_tokens

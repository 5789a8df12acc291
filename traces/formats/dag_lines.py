"""Lines of aiperf's dag-jsonl: one conversation each."""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from mallee.traces.files.lines import MAX_MS, MAX_TOKENS

_Answer = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Delay = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_MS)]


class Part(msgspec.Struct, omit_defaults=True):
    """A part of a message whose content is a list."""

    type: str = ""
    text: str = ""


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a turn."""

    role: str
    content: str | list[Part] | None = ""

    def text(self) -> str:
        """All of it. Raises ValueError if there is something else than text."""
        if isinstance(self.content, list):
            other = next((part.type for part in self.content if part.type != "text"), None)
            if other is not None:
                raise ValueError(f"a part of type {other!r}; only text can be read")
            return " ".join(part.text for part in self.content)
        return self.content or ""


class Fork(msgspec.Struct, omit_defaults=True):
    """A session that goes on from here; `background`: beside its parent."""

    child: str
    background: bool = False


class Spawn(msgspec.Struct, omit_defaults=True):
    """Sessions that begin here from nothing; turn `join_at` waits for them, by default the next."""

    children: list[str]
    join_at: int | None = None


class Turn(msgspec.Struct, omit_defaults=True):
    """One call. `delay` ms after what it waits for."""

    messages: list[Message] = []
    max_tokens: _Answer | None = None
    delay: _Delay = 0.0
    forks: list[str | Fork] = []
    spawns: list[str | Spawn] = []
    extra: dict[str, Any] | None = None

    @property
    def branches(self) -> int:
        n = (self.extra or {}).get("n", 1)
        return n if isinstance(n, int) and n > 1 else 1

    def forked(self) -> list[str]:
        return [fork if isinstance(fork, str) else fork.child for fork in self.forks]

    def spawned(self, place: int) -> list[tuple[str, int]]:
        """(session, turn that joins it); this is turn `place`."""
        found: list[tuple[str, int]] = []
        for spawn in self.spawns:
            if isinstance(spawn, str):
                found.append((spawn, place + 1))
            else:
                at = place + 1 if spawn.join_at is None else spawn.join_at
                found += [(child, at) for child in spawn.children]
        return found


class Conversation(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    session_id: str
    turns: list[Turn] = []
    pre_session_spawns: list[str] = []
    orchestrator: bool = False
    context_mode: str | None = None

    @property
    def is_isolated(self) -> bool:
        """Whether each turn has its whole prompt."""
        return self.context_mode == "message_array_with_responses"

    def started(self) -> Iterator[str]:
        """The sessions that it forks or spawns."""
        yield from self.pre_session_spawns
        for place, turn in enumerate(self.turns):
            yield from turn.forked()
            yield from (child for child, _ in turn.spawned(place))


decoder: Final = msgspec.json.Decoder(Conversation)

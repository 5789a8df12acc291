"""Sessions recorded without a gateway: an engine's updates become a record as a gateway would write it."""

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import from_wire
from mallee.protocol.ids import RequestId, capsule_id
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Cancel,
    CapsuleReply,
    Capture,
    Cut,
    Fork,
    Generate,
    Prefill,
    Rewind,
    Update,
    pack_tokens,
)
from mallee.protocol.model import BASE_WEIGHTS, ModelSpec
from mallee.sessions.record import (
    Asked,
    Captured,
    CutShort,
    Entry,
    GivenUp,
    Got,
    Manifest,
    Opened,
    Rewound,
    frame,
)
from mallee.worker.engine import Engine
from support.lending import record_of

SPEC = mock_spec(vocab_size=64, max_model_len=512)


class Live:
    """A branch that runs, as its client sees it."""

    def __init__(self, number: int, request: str, branch: int, start: int) -> None:
        self.number = number
        self.request = request
        self.branch = branch
        self.start = start
        self.num_got = 0
        self.has_grammar = False


class SessionDriver:
    """One client's session on one engine. Capsules are (name -> boundary) as they become known."""

    def __init__(self, engine: Engine, spec: ModelSpec) -> None:
        self.engine = engine
        self.entries: list[Entry] = [Opened(1, 1e9, "g", "s", spec)]
        self.running: dict[tuple[str, int], Live] = {}
        self.capsules: dict[str, int] = {}
        self._asked: dict[str, Capture | Rewind] = {}
        self._lives: dict[tuple[str, int], Live] = {}
        self._num = 0

    @property
    def raw(self) -> bytes:
        return b"".join(map(frame, self.entries))

    def name(self) -> str:
        self._num += 1
        return f"r{self._num}"

    def at_s(self) -> float:
        return float(len(self.entries))

    def ask(self, command: Generate | Fork | Prefill) -> None:
        number = sum(isinstance(entry, Asked) for entry in self.entries)
        self.entries.append(Asked(number, self.at_s(), command, BASE_WEIGHTS))
        if isinstance(command, Fork):
            boundary = self.capsules[command.capsule] if command.at is None else command.at
            starts = [boundary + len(suffix) // 4 for suffix in command.suffixes]
        else:
            starts = [len(command.tokens) // 4] * getattr(command, "n", 1)
        for branch, start in enumerate(starts):
            live = Live(number, command.request, branch, start)
            live.has_grammar = getattr(command, "grammar", None) is not None
            self.running[command.request, branch] = self._lives[command.request, branch] = live
        self.engine.submit(command, "g")

    def cancel(self, live: Live) -> None:
        self.entries.append(GivenUp(live.number, self.at_s(), live.branch))
        del self.running[live.request, live.branch]
        self.engine.submit(Cancel(live.request, live.branch), "g")

    def cut(self, live: Live, num_back: int, residue: list[int]) -> None:
        """The client saw all but the last `num_back` tokens, and `residue`."""
        at, capsule = (
            live.start + live.num_got - num_back,
            capsule_id(RequestId(live.request), live.branch),
        )
        where = (live.branch, at, pack_tokens(residue), capsule)
        self.entries.append(CutShort(live.number, self.at_s(), *where))
        del self.running[live.request, live.branch]
        self.engine.submit(Cut(live.request, live.branch, at, pack_tokens(residue)), "g")
        self.capsules[capsule] = at + len(residue)

    def capture(self, live: Live) -> None:
        command = Capture(self.name(), live.request, live.branch)
        self._asked[command.request] = command
        self.engine.submit(command, "g")

    def rewind(self, capsule: str, at: int) -> None:
        command = Rewind(self.name(), capsule, at)
        self._asked[command.request] = command
        self.engine.submit(command, "g")

    def step(self) -> None:
        frame = self.engine.step().frames.get("g")
        if frame is None:
            return
        for update in frame.updates:
            self._take(update)
        for reply in frame.replies:
            self._reply(reply)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def _take(self, update: Update) -> None:
        assert update.branch != ALL_BRANCHES, update.error and from_wire(update.error)
        live = self.running.get((update.request, update.branch))
        if live is None:
            return
        live.num_got += len(update.tokens)
        self.entries.append(
            Got(
                live.number,
                self.at_s(),
                update.branch,
                pack_tokens(update.tokens),
                update.finish,
                update.capsule,
                update.boundary,
                None if update.error is None else update.error[0],
            )
        )
        if update.finish is not None:
            del self.running[update.request, update.branch]
        if update.capsule is not None:
            self.capsules[update.capsule] = update.boundary

    def _reply(self, reply: CapsuleReply) -> None:
        command, status = self._asked.pop(reply.request), reply.status
        if status is None:
            return  # its branch had ended
        self.capsules[status.capsule] = status.boundary
        if isinstance(command, Rewind):
            made = (status.capsule, command.capsule, status.boundary)
            self.entries.append(Rewound(self.at_s(), *made))
        else:
            live = self._lives[command.of, command.branch]
            taken = (live.branch, status.capsule, status.boundary)
            self.entries.append(Captured(live.number, self.at_s(), *taken))

    def forget_before(self, num_entries: int) -> bytes:
        """The record as if it had begun later: capsules from before are in it as texts."""
        tail = self.entries[num_entries:]
        numbers = {entry.number for entry in tail if isinstance(entry, Asked)}
        kept = [entry for entry in tail if getattr(entry, "number", -1) in numbers | {-1}]
        made = {getattr(entry, "capsule", None) for entry in kept if not isinstance(entry, Asked)}
        wanted = {
            name
            for entry in kept
            for name in (
                entry.command.capsule
                if isinstance(entry, Asked) and isinstance(entry.command, Fork)
                else None,
                entry.source if isinstance(entry, Rewound) else None,
            )
            if name is not None and name not in made
        }
        manifests: list[Entry] = []
        for name in sorted(wanted):
            record = record_of(self.engine, name)
            manifests.append(Manifest(name, record.tokens, record.grammar, record.continuation))
        return b"".join(map(frame, [self.entries[0], *manifests, *kept]))

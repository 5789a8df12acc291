"""The texts of a replay: names that stand for tokens, in jobs, commands and capsules."""

from typing import Final, NamedTuple

from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.gateway.requests import Asked
from mallee.mocker.texts import Texts
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import COMMON, CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import END_OF_TEXT, Limits, Prefill, RetainSpan, Sampling
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, QueueTerms
from mallee.router.dispatch.texts import AnswerLog, CapsuleText
from mallee.traces.workload import NO_PARENT

MAX_BRANCHES: Final = 1 << 20  # of one request
_GREEDY: Final = Sampling()
_SEED: Final = 0  # of greedy draws
_PRIORITY: Final = 50  # of what is to be retained


class NamedText:
    """A text by its name. `raws`: the names that are dropped together with it."""

    __slots__ = ("hashes", "num_tokens", "raw", "raws")

    def __init__(self, raw: bytes, num_tokens: int, hashes: Hashes, raws: list[bytes]) -> None:
        self.raw = raw
        self.num_tokens = num_tokens
        self.hashes = hashes  # of its full blocks
        self.raws = raws
        raws.append(raw)

    def __len__(self) -> int:
        return self.num_tokens

    def tobytes(self) -> bytes:
        """Its name, which stands for its tokens in commands."""
        return self.raw


class _Parent:
    """A finished request that others fork."""

    __slots__ = ("capsule", "gateway", "num_forks", "text", "ttl_s", "workers")

    def __init__(self, capsule: CapsuleId, raw: bytes, num_tokens: int, num_forks: int) -> None:
        self.capsule = capsule
        self.gateway = ""  # that made it
        self.text = NamedText(raw, num_tokens, NO_HASHES, [])  # hashed when that is needed
        self.ttl_s: float | None = None  # None: an answer left the capsule
        self.num_forks = num_forks  # that have not ended
        self.workers: list[Worker] = []  # that were asked for the capsule


class _ForkText:
    """The log of a shard of forks: greedy draws are known by their positions, so it has the text before."""

    __slots__ = ("text",)

    def __init__(self, text: NamedText) -> None:
        self.text = text

    def take(self, update: object) -> None:
        """Keep nothing."""

    def note(self, capsule: CapsuleId, row: int, boundary: int, ttl_s: float | None) -> None:
        """Never asked: a replay takes no capsules of running branches."""

    def drop(self, capsule: CapsuleId) -> None:
        """Never asked: a replay promises no capsules."""

    def cut(self, capsule: CapsuleId, row: int, at: int, residue: Tokens) -> None:
        """Never asked: a replay has no stop strings."""

    def tail(self, row: int, num: int) -> tuple[int, ...]:
        """Nothing: tokens have names here."""
        return ()


class Abandoned(NamedTuple):
    """A capsule that nobody will fork any more, and the workers that may have it."""

    capsule: CapsuleId
    workers: list[Worker]


class ReplayTexts:
    """The dispatcher's `Texts`: named when requests begin, those of parents until their last fork ends.

    All gateways of a replay have the same; each calls the capsules of its requests its own (`of`).
    """

    def __init__(self, texts: Texts, id_tokens: int, retain_s: float = 0.0) -> None:
        """Requests of sessions want their texts retained for `retain_s`."""
        self._texts = texts
        self._retain: tuple[RetainSpan, ...] = ()
        if retain_s:
            self._retain = (RetainSpan(END_OF_TEXT, _PRIORITY, retain_s),)
        self._id_tokens = id_tokens
        self._gateway = ""
        self._limits: dict[int, Limits] = {}
        self._terms: dict[str, QueueTerms] = {}  # by session
        self._parents: dict[int, _Parent] = {}  # by number of the request
        self._capsules: dict[CapsuleId, _Parent] = {}

    def of(self, gateway: str) -> "ReplayTexts":
        """The same texts, as `gateway` has them."""
        # `copy` makes no object of a compiled class.
        texts = ReplayTexts(self._texts, self._id_tokens)
        texts._gateway, texts._retain = gateway, self._retain
        texts._limits, texts._terms = self._limits, self._terms
        texts._parents, texts._capsules = self._parents, self._capsules
        return texts

    # Requests

    def job(self, asked: Asked, max_tokens: int) -> Job:
        """The job of a request that begins; a fork's parent has ended."""
        request, session = asked.request, asked.request.session
        retain = self._retain if session else ()
        terms = self._terms.get(session)
        if terms is None:
            terms = self._terms[session] = QueueTerms(session)
        if request.parent == NO_PARENT:
            text = self._prompt(asked)
            if not max_tokens:
                return PrefillJob(text, terms=terms, retain=retain)
            limits = self._limits_of(max_tokens)
            return GenerateJob(text, limits, _GREEDY, request.branches, terms=terms, retain=retain)
        parent = self._parents[request.parent]
        asked.prompt_tokens = parent.text.num_tokens + request.input_tokens
        limits = self._limits_of(max_tokens)
        return ForkJob(parent.capsule, self._suffixes(asked), limits, _GREEDY, terms, retain=retain)

    def _prompt(self, asked: Asked) -> NamedText:
        """A whole prompt of at least one token."""
        request = asked.request
        num_tokens = asked.prompt_tokens = max(1, request.input_tokens)
        raw = self._texts.prompt(request.ids, num_tokens, self._id_tokens)
        return NamedText(raw, num_tokens, self._texts.hashes(raw), asked.raws)

    def _suffixes(self, asked: Asked) -> list[NamedText]:
        """The texts that the branches of a fork add to their parent's."""
        num_tokens, first = asked.request.input_tokens, asked.request.number * MAX_BRANCHES
        suffix, raws = self._texts.suffix, asked.raws
        return [
            NamedText(suffix(first + i, num_tokens), num_tokens, NO_HASHES, raws)
            for i in range(asked.request.branches)
        ]

    def _limits_of(self, max_tokens: int) -> Limits:
        """Limits of an answer of exactly `max_tokens`. Equal ones are the same object."""
        limits = self._limits.get(max_tokens)
        if limits is None:
            limits = self._limits[max_tokens] = Limits(max_tokens, (), True)
        return limits

    def drop(self, asked: Asked) -> None:
        """Forget the texts of a request that is over."""
        for raw in asked.raws:
            self._texts.drop(raw)

    # Capsules

    def leave(self, asked: Asked) -> None:
        """Keep the state of a request that has ended, well or not, for its forks."""
        job, left = asked.job, asked.capsule
        text, suffix = self._shared(job), b""
        num_tokens = text.num_tokens
        if isinstance(job, ForkJob):
            suffix = job.suffixes[0].tobytes()
            num_tokens += len(job.suffixes[0])
        end = left.num_tokens if left is not None else num_tokens + asked.output // job.num_branches
        raw = self._texts.answered(text.raw, _SEED, end - num_tokens, suffix)
        capsule = capsule_id(asked.name) if left is None else left.id
        parent = _Parent(capsule, raw, end, asked.request.num_children)
        parent.gateway = asked.gateway.name
        if isinstance(job, PrefillJob):
            parent.ttl_s = 0.0
        if left is not None:
            parent.workers.append(left.worker)
        self._parents[asked.request.number] = self._capsules[capsule] = parent

    def built(self, capsule: CapsuleId, worker: Worker) -> None:
        """`worker` is asked to build a lost capsule again."""
        self._capsules[capsule].workers.append(worker)

    def child_ended(self, number: int) -> Abandoned | None:
        """Count a fork of request `number` as over; after the last one its capsule is to be released."""
        parent = self._parents[number]
        parent.num_forks -= 1
        if parent.num_forks:
            return None
        del self._parents[number], self._capsules[parent.capsule]
        self._texts.drop(parent.text.raw)
        return Abandoned(parent.capsule, parent.workers)

    def _shared(self, job: Job) -> NamedText:
        """The text that the branches of `job` share."""
        if job.capsule is not None:
            return self._capsules[job.capsule].text
        assert isinstance(job, GenerateJob | PrefillJob), "no other job has a prompt"
        assert isinstance(job.tokens, NamedText), "a replay's texts are named"
        return job.tokens

    # The dispatcher's

    def hashes(self, job: Job) -> Hashes:
        return NO_HASHES if job.capsule is not None else self._shared(job).hashes

    def knows(self, capsule: CapsuleId) -> bool:
        return capsule in self._capsules

    def capsule_text(self, capsule: CapsuleId, at: int | None) -> CapsuleText | None:
        assert at is None, "forks continue whole capsules"
        parent = self._capsules.get(capsule)
        if parent is None:
            return None
        text = parent.text
        if not len(text.hashes):
            text.hashes = self._texts.hashes(text.raw)
        is_own = parent.gateway == self._gateway
        return CapsuleText(text, text.hashes, COMMON, None, parent.ttl_s, is_own)

    def weights(self, capsule: CapsuleId) -> None:
        return None  # a replay's weights don't change

    def log(self, job: Job, first_branch: int) -> AnswerLog | None:
        return None if job.capsule is None else _ForkText(self._shared(job))

    def resumed(
        self, job: Job, row: int, num_drawn: int, log: AnswerLog | None
    ) -> GenerateJob | None:
        text, suffix = (log.text if isinstance(log, _ForkText) else self._shared(job)), b""
        num_tokens, raws = text.num_tokens + num_drawn, text.raws
        if isinstance(job, ForkJob):
            own = job.suffixes[row]
            assert isinstance(own, NamedText), "a replay's texts are named"
            suffix, raws = own.raw, own.raws
            num_tokens += own.num_tokens
        raw = self._texts.answered(text.raw, _SEED, num_drawn, suffix)
        whole = NamedText(raw, num_tokens, self._texts.hashes(raw), raws)
        drawn = job.drawn + num_drawn
        return GenerateJob(whole, job.limits, _GREEDY, terms=job.terms, drawn=drawn)

    def probe(self, request: RequestId) -> Prefill:
        raise AssertionError("a replay's workers don't hang")

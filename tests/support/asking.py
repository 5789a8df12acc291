"""Scenes for engines: who asks for what when, in words that tokens and outlines can both be written from."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from bench.mocker.policies import make_order
from mallee.mocker.texts import Texts
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Prioritize,
    Release,
    Sampling,
    Share,
    pack_tokens,
)
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

SIZE = 4
ID_TOKENS = 8  # tokens of a prompt that one id names


class Writer(Protocol):
    """Turns what an `Ask` names into bytes of a command."""

    def prompt(self, ids: Sequence[int], num_tokens: int) -> bytes: ...

    def suffix(self, key: int, num_tokens: int) -> bytes: ...


class OutlineWriter:
    """Writes outlines."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self._suffixes: dict[tuple[int, int], bytes] = {}  # equal ones have one name

    def prompt(self, ids: Sequence[int], num_tokens: int) -> bytes:
        return self.texts.prompt(ids, num_tokens, ID_TOKENS)

    def suffix(self, key: int, num_tokens: int) -> bytes:
        found = self._suffixes.get((key, num_tokens))
        if found is None:
            found = self._suffixes[key, num_tokens] = self.texts.suffix(key, num_tokens)
        return found


class Ask(NamedTuple):
    """One request of a client. `ids` name the prompt's pieces."""

    at_s: float
    kind: str
    name: str
    ids: tuple[int, ...] = ()
    num_tokens: int = 0
    max_tokens: int = 1
    n: int = 1
    suffixes: tuple[tuple[int, int], ...] = ()  # (key, tokens) of each branch
    capsule: str = ""
    at: int | None = None
    branch: int | None = None
    sampling: Sampling = Sampling()
    share: Share = Share()
    ttl_s: float = 0.0
    drawn: int = 0
    own: str = ""  # the capsule's id, if the prefill doesn't name it
    replaceable: bool = False


class TokenWriter:
    """Writes real token ids: below 64 in prompts, below 128 in suffixes."""

    def prompt(self, ids: Sequence[int], num_tokens: int) -> bytes:
        tokens = [1 + (i * ID_TOKENS + k) % 60 for i in ids for k in range(ID_TOKENS)]
        for piece, i in enumerate(ids):
            tokens[piece * ID_TOKENS] = i  # ids are few: the first token tells them apart
        return pack_tokens(tokens[:num_tokens])

    def suffix(self, key: int, num_tokens: int) -> bytes:
        return pack_tokens([64 + (key + k) % 60 for k in range(num_tokens)])


def command(ask: Ask, writer: Writer) -> Command:
    limits = Limits(ask.max_tokens, ignore_eos=True)
    match ask.kind:
        case "generate":
            prompt = writer.prompt(ask.ids, ask.num_tokens)
            return Generate(
                *(ask.name, prompt, limits, ask.sampling, ask.n), share=ask.share, drawn=ask.drawn
            )
        case "prefill":
            prompt = writer.prompt(ask.ids, ask.num_tokens)
            return Prefill(
                *(ask.name, prompt),
                ttl_s=ask.ttl_s,
                share=ask.share,
                capsule=ask.own,
                replaceable=ask.replaceable,
            )
        case "fork":
            texts = tuple(writer.suffix(*each) for each in ask.suffixes)
            return Fork(
                ask.name, ask.capsule, texts, limits, ask.sampling, share=ask.share, at=ask.at
            )
        case "cancel":
            return Cancel(ask.name, ask.branch)
        case "release":
            return Release(ask.capsule)
    assert ask.kind == "prioritize"
    return Prioritize(ask.name, ask.share.priority, ask.branch)


class Scene(NamedTuple):
    """An engine's settings and who asks it for what."""

    config: EngineConfig
    num_blocks: int
    asks: tuple[Ask, ...]


def random_scene(seed: int, *, num_asks: int = 16, is_varied: bool = True) -> Scene:
    """Prompts with shared beginnings, forks of what computes and of answers, cancels; little room.

    Not `is_varied`: without cancels, releases and priorities, and without branches and capsules of others.
    """
    rng, others = random.Random(seed), random.Random(f"{seed} others")
    sched = SchedulerConfig(
        max_step_tokens=rng.choice([6, 16, 64]),
        max_rows=rng.choice([3, 8]),
        order=make_order(
            rng.choice(["fair", "fair", "fcfs", "prefill_first", "decode_round_robin"]),
            rng.choice(["least_due", "youngest", "oldest_decode"]),
        ),
        ageing_steps=rng.choice([0, 7, 256]),
        watermark=rng.choice([0.0, 0.1]),
        gang=rng.random() < 0.5,
    )
    config = EngineConfig(sched, max_answer_capsules=rng.choice([2, 64]))
    now, asks = 0.0, []
    capsules: list[str] = []
    for i in range(num_asks):
        now += rng.choice([0.0, 1e-4, 0.004, 0.03, 0.3]) * rng.random()
        ask = _random_ask(rng, f"r{i}", now, capsules, is_varied=is_varied)
        if is_varied and ask.kind in ("generate", "prefill") and ask.n == 1:
            ask = _of_others(others, ask)
        if ask.own:
            capsules.append(ask.own)
        elif ask.kind == "generate":
            capsules += [f"r{i}.{k}" for k in range(ask.n)]
        elif ask.kind == "prefill":
            capsules.append(f"r{i}.0")
        asks.append(ask)
    return Scene(config, rng.choice([24, 40, 200]), tuple(asks))


def _of_others(rng: random.Random, ask: Ask) -> Ask:
    """`ask`, or what goes on with a branch or a capsule of another engine under its id."""
    if rng.random() < 0.6:
        return ask
    own = f"x{rng.randrange(6)}.{rng.randrange(3)}"
    if ask.kind == "prefill":
        return ask._replace(own=own, replaceable=not ask.ttl_s)
    drawn = rng.randrange(ask.num_tokens)
    return ask._replace(drawn=drawn, max_tokens=ask.max_tokens + drawn)


def _path(rng: random.Random) -> list[int]:
    """Ids of a prompt; as in traces an id says what is before it too."""
    first = rng.randrange(3)
    second = 3 * first + rng.randrange(3)
    third = 2 * second + rng.randrange(2)
    return [first, 3 + second, 12 + third, 30 + third][: rng.randint(1, 4)]


def _random_ask(
    rng: random.Random, name: str, now: float, capsules: list[str], *, is_varied: bool
) -> Ask:
    kinds = ["generate"] * 5 + ["prefill", "prefill"] + ["fork"] * 4
    if is_varied:
        kinds += ["cancel", "release", "prioritize"]
    kind = rng.choice(kinds)
    ids = _path(rng)
    sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 64))
    share = Share(rng.choice("ab"), rng.choice([1.0, 3.0]), float(rng.randint(0, 2)))
    num_tokens = max(1, len(ids) * ID_TOKENS - rng.choice([0, 0, 1, 3, 6]))
    max_tokens = rng.choice([1, 2, 7, 20, 33])
    if kind == "fork" and capsules:
        suffixes = tuple(
            (rng.randrange(4), rng.choice([0, 1, 5])) for _ in range(rng.choice([1, 1, 2, 4]))
        )
        capsule, where = rng.choice(capsules), rng.choice([None, None, 3, 8])
        return Ask(
            now, "fork", name, max_tokens=max_tokens, suffixes=suffixes, capsule=capsule, at=where,
            sampling=sampling, share=share,
        )  # fmt: skip
    if kind in ("cancel", "prioritize"):
        other = f"r{rng.randrange(16)}"
        return Ask(now, kind, other, branch=rng.choice([None, 0, 1]), share=share)
    if kind == "release" and capsules:
        return Ask(now, kind, name, capsule=rng.choice(capsules))
    if kind == "prefill":
        ttl_s = rng.choice([0.0, 0.0, 0.05])
        return Ask(now, kind, name, tuple(ids), num_tokens, share=share, ttl_s=ttl_s)
    n = rng.choice([1, 1, 1, 2, 3])
    return Ask(
        now, "generate", name, tuple(ids), num_tokens, max_tokens, n, sampling=sampling, share=share
    )

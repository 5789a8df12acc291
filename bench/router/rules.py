"""Rules of other routers beside ours, on two real workloads at equal load, in virtual time.

    python -m bench.router.rules [--traces FOLDER] [--seeds 3] [--requests 4000 2000]
                                 [--rule MODULE:NAME]

Scenes and engines are those of `bench.router.ranking`. Each rule is a function of a `View`, the knowledge of
a router when a request comes, to the place of a worker; `--rule` adds one of your own.

    session_hash  by a hash of the session; where there is none, of the prompt's first blocks
    two_choices   of two at random the one with fewer requests
    sglang        the cache-aware rule of SGLang's router at its defaults: where loads differ by more than 64
                  requests and half, the least loaded; else the longest match if that is 0.3 of the prompt,
                  else the one that keeps least
    llm_d         llm-d's default scorers: 3 x share of the prompt there, 2 x shortness of the queue, 2 x
                  share of KV that is free

They see exact matches from events, as ours does, which is more than SGLang's own tree of what was sent
tells. All in one process. The last line is one JSON object, as of `bench.router.ranking`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from bench import TRACES
from bench.router.ranking import Figures, Scene, as_json, figures_of, jobs_of, table
from mallee.mocker.replay import build
from mallee.mocker.replay.run import replay
from mallee.mocker.sweeps.pool import keep
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.load import layout
from mallee.router.placement.kernels import score
from mallee.router.placement.placer import Placement
from mallee.router.placement.pricing import Choice, Demand, Offers, Pricer
from mallee.router.router import Router

Floats = npt.NDArray[np.float64]


class View(NamedTuple):
    """A request and the workers that may take it, as arrays of one place each."""

    key: str  # its session, or else its first blocks
    num_blocks: int  # of its prompt
    overlap: Floats  # leading blocks that are there
    requests: Floats
    used: Floats  # share of KV memory with something in it
    draw: Callable[[], float]  # in [0, 1)


Rule = Callable[[View], int]


def session_hash(view: View) -> int:
    marks = [xxhash.xxh3_64_intdigest(f"{view.key} {i}".encode()) for i in range(len(view.overlap))]
    return int(np.argmax(marks))


def two_choices(view: View) -> int:
    one, other = (int(view.draw() * len(view.overlap)) for _ in range(2))
    return one if view.requests[one] <= view.requests[other] else other


def sglang(view: View) -> int:
    most, least = view.requests.max(), view.requests.min()
    if most - least > 64 and most > 1.5 * least:
        return int(view.requests.argmin())
    best = int(view.overlap.argmax())
    return best if view.overlap[best] > 0.3 * view.num_blocks else int(view.used.argmin())


def llm_d(view: View) -> int:
    spread = max(1.0, np.ptp(view.requests))
    shortness = (view.requests.max() - view.requests) / spread
    share = view.overlap / max(1, view.num_blocks)
    scores = 3 * share + 2 * shortness + 2 * (1 - view.used)
    best = np.flatnonzero(scores == scores.max())
    return int(best[int(view.draw() * len(best))])


RULES: Final[dict[str, Rule]] = {
    rule.__name__: rule for rule in (session_hash, two_choices, sglang, llm_d)
}


class RulePricer(Pricer):
    """Chooses by a rule among the workers that the prices allow."""

    rule: Rule
    key = ""

    def choose(
        self,
        demand: Demand,
        offers: Offers,
        *,
        now: float,
        width: int,
        prefers_new: bool = False,
    ) -> Choice | None:
        priced = super().choose(demand, offers, now=now, width=width)
        if priced is None or not width:
            return priced
        terms, loads = priced.terms[:, :width], self._loads[:, :width]
        allowed = np.flatnonzero(np.isfinite(terms[score.TERM_TOTAL]))
        room, free = loads[layout.LOAD_ROOM, allowed], loads[layout.LOAD_FREE, allowed]
        rows = loads[layout.LOAD_ROWS] + loads[layout.LOAD_EXTRA_ROWS]
        view = View(
            key=self.key,
            num_blocks=demand.num_blocks,
            overlap=terms[score.TERM_OVERLAP, allowed].astype(np.float64),
            requests=rows[allowed],
            used=1.0 - free / room,
            draw=self._draw,
        )
        slot = int(allowed[type(self).rule(view)])
        overlap = int(terms[score.TERM_OVERLAP, slot])
        return replace(priced, slot=slot, overlap_blocks=overlap, is_new=False, pulled_blocks=0)


def router_of(rule: Rule, sessions: dict[str, str]) -> type[Router]:
    """A router whose pricer follows `rule`; `sessions` by request."""

    class Ruled(RulePricer):
        pass

    Ruled.rule = staticmethod(rule)

    class RuleRouter(Router):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._placer._pricer.__class__ = Ruled

        def route(self, request: RequestId, hashes: Hashes, **more: Any) -> Placement:
            pricer = self._placer._pricer
            assert isinstance(pricer, RulePricer)
            pricer.key = sessions.get(request) or str(hashes[:2].tolist())
            return super().route(request, hashes, **more)

    return RuleRouter


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs=2, default=(4000, 2000))
    parser.add_argument("--rule", action="append", default=[])
    given = parser.parse_args(args)
    rules = dict(RULES)
    for name in given.rule:
        module, _, function = name.partition(":")
        rules[name] = getattr(import_module(module), function)
    scenes = (
        Scene("mooncake", given.traces / "mooncake_conversation.jsonl.gz", given.requests[0], 4),
        Scene("claude_code", given.traces / "claude_code_sessions.jsonl.gz", given.requests[1], 16),
    )
    begun = time.perf_counter()
    found: dict[str, dict[str, list[Figures]]] = {scene.name: {} for scene in scenes}
    for scene in scenes:
        for policy, job in jobs_of(scene, given.seeds):
            if policy != "cost":
                continue
            workload = job.make()
            sessions = {f"r{request.number}": request.session for request in workload}
            for name in ("cost", *rules):
                build.Router = Router if name == "cost" else router_of(rules[name], sessions)
                run = figures_of(keep(replay(workload, job.config)))
                found[scene.name].setdefault(name, []).append(run)
                sys.stderr.write(
                    f"{scene.name} {name} seed {job.config.seed}: {run.p50_ms:.0f} ms\n"
                )
        print("\n".join(table(scene, found[scene.name])), end="\n\n")
    print(json.dumps(as_json(scenes, found) | {"wall_s": round(time.perf_counter() - begun, 1)}))


if __name__ == "__main__":
    main(sys.argv[1:])

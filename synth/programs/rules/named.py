"""Programs by name, for where there is no source."""

from dataclasses import replace
from typing import Final

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import Knobs
from mallee.synth.programs.rules.drafts import PER_HOUR
from mallee.synth.programs.rules.swarm import Swarm
from mallee.synth.programs.rules.trees import Beam, DepthFirst, Uct
from mallee.traces.workload import Workload

PROGRAMS: Final[dict[str, Beam | DepthFirst | Uct | Swarm]] = {
    "bfs": Beam(),
    "dfs": DepthFirst(),
    "mcts": Uct(),
    "swarm": Swarm(),
}

_DEFAULT: Final = Knobs()


def program_workload(
    name: str, *, requests: int, seed: int, per_hour: float = PER_HOUR, knobs: Knobs = _DEFAULT
) -> Workload:
    """`requests` of programs of that name, begun by chance. Raises ConfigError for one that is not known."""
    if name not in PROGRAMS:
        raise ConfigError(f"program {name!r}: give one of {', '.join(PROGRAMS)}")
    rules = replace(PROGRAMS[name], per_hour=per_hour)
    return rules.generate(requests=requests, seed=seed, knobs=knobs)

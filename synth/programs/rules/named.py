"""Programs by name, for traffic without a source."""

from typing import Final

from mallee.synth.programs.rules.swarm import Swarm
from mallee.synth.programs.rules.trees import Beam, DepthFirst, Uct

PROGRAMS: Final[dict[str, Beam | DepthFirst | Uct | Swarm]] = {
    "bfs": Beam(),
    "dfs": DepthFirst(),
    "mcts": Uct(),
    "swarm": Swarm(),
}

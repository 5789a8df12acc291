"""Programs by name, for traffic without a source."""

from typing import Final

from mallee.synth.programs.rules.drafts import Rule
from mallee.synth.programs.rules.swarm import Swarm
from mallee.synth.programs.rules.trees import Beam, DepthFirst, Uct

PROGRAMS: Final[dict[str, Rule]] = {
    "bfs": Beam(),
    "dfs": DepthFirst(),
    "mcts": Uct(),
    "swarm": Swarm(),
}

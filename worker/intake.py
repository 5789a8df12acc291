"""How requests begin: what they ask is checked, then their branches stand in line.

Everything that can be refused is refused before anything changes.
"""

from functools import lru_cache

from mallee.protocol.messages import Fork, Generate, Prefill
from mallee.protocol.model import ModelSpec
from mallee.worker import debug_log
from mallee.worker.admission import Admission
from mallee.worker.capsules import CapsuleRegistry
from mallee.worker.drawing import Drawing
from mallee.worker.jobs import Job
from mallee.worker.kv.capsule import Capsule
from mallee.worker.kv.tree import BranchTree
from mallee.worker.roster import Roster
from mallee.worker.sched.scheduler import Scheduler
from mallee.worker.structure import Matcher
from mallee.worker.trunks import Trunk, grouped, trunk_of


class Intake:
    """Turns commands into jobs of the roster. Every method raises MalleeError before any change."""

    def __init__(
        self,
        spec: ModelSpec,
        tree: BranchTree,
        *,
        admission: Admission,
        scheduler: Scheduler,
        drawing: Drawing,
        capsules: CapsuleRegistry,
        roster: Roster,
    ) -> None:
        self._salt = lru_cache(maxsize=256)(spec.salt)  # tenants are few
        self._block_size = tree.block_size
        self._notation = tree.notation
        self._admission = admission
        self._scheduler = scheduler
        self._drawing = drawing
        self._capsules = capsules
        self._roster = roster

    def open(self, command: Prefill | Generate, gateway: str) -> None:
        """A prompt: one branch computes it for all that continue it."""
        tokens = self._admission.prompt(command, self._roster.jobs)
        num_branches = command.n if isinstance(command, Generate) else 1
        self._capsules.check_unused(command.request, num_branches)
        self._scheduler.check_room(num_branches)
        salt = self._salt(command.salt)
        matchers: tuple[Matcher, ...] = ()
        if isinstance(command, Prefill):
            self._capsules.promise(command.request, tokens, salt)
        else:
            matchers = self._drawing.matchers(command, None)
        job = Job(command, gateway, matchers)
        trunk = Trunk(0, 0, self._notation.empty(), salt)
        self._roster.open(job, trunk, {tuple(job.indices): tokens})

    def fork(self, command: Fork, gateway: str) -> None:
        """Branches that continue a capsule, or a prompt that will be one."""
        source = self._roster.producer(command.capsule) or self._capsules.get(command.capsule)
        trunk = trunk_of(command, source, self._block_size, self._notation)
        suffixes = self._admission.suffixes(command, trunk.boundary, self._roster.jobs)
        self._capsules.check_unused(command.request, len(suffixes))
        self._scheduler.check_room(len(suffixes))
        whole = source if isinstance(source, Capsule) else None
        if whole is not None and trunk.boundary < whole.boundary:
            whole = None  # there is no grammar state inside its text
        matchers = self._drawing.matchers(command, whole)
        if debug_log.is_on("forks"):
            debug_log.log_fork(command.request, len(suffixes), trunk.boundary, trunk.base)
        texts = grouped(trunk.rest, suffixes, command.suffixes, self._notation)
        self._roster.open(Job(command, gateway, matchers), trunk, texts)

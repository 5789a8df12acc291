"""A gateway for prefill and decode workers: prompts are computed by the ones, and lent to the others."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import structs

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.fleet.workers import Fleet, Worker
from mallee.mocker.replay.gateway.gateway import Gateway, Recorder
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import Lease
from mallee.protocol.ids import COMMON, CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import MAX_HOLDERS, Generate, Holder, Prefill, Release
from mallee.router.dispatch.effects import Deliver, Placed, Send
from mallee.router.dispatch.jobs import GenerateJob, Job, PrefillJob
from mallee.router.router import Router

_KEPT_S: Final = 600.0  # that a prefill worker keeps a prompt at most until it is fetched


class RoleRecorder(Recorder, Protocol):
    """Records prompts too."""

    def prompted(self, request: RequestId, effect: Deliver) -> None:
        """Take news of the prompt of `request`."""
        ...


class _Prompt:
    """A prompt that is computed apart from its answer."""

    __slots__ = ("capsule", "job", "request", "shards", "until", "worker")

    def __init__(self, request: RequestId, job: GenerateJob | PrefillJob) -> None:
        self.request = request
        self.job = job  # of the answer
        self.worker: Worker | None = None  # where it is computed
        self.capsule: CapsuleId | None = None  # once it is
        self.shards: set[str] = set()  # of the answer, that have told nothing yet

    @property
    def holder(self) -> Holder:
        """Its worker, once it is computed."""
        worker = self.worker
        assert worker is not None, "nothing has computed it"
        return Holder(worker.name, worker.incarnation, "", len(self.job.tokens))


class RoleGateway:
    """Two gateways in one: prompts go to prefill workers, and then to decode workers, which answer them.

    The decode workers' price of a missing token should be that of moving it. A fork goes with its suffix
    to the decode worker that has its capsule, and what a lost decode worker left undone is computed where
    it goes on. While no prefill worker takes prompts, or one refuses to keep one, decode workers compute
    them; without decode workers all requests wait.
    """

    def __init__(
        self,
        name: str,
        routers: Mapping[str, Router],
        *,
        clock: Clock,
        fleet: Fleet,
        recorder: RoleRecorder,
        **more: Any,
    ) -> None:
        """`routers["prefill"]` knows the prefill workers, `routers["both"]` the decode workers.

        `more` as for a gateway.
        """
        self.name = name
        self.routers = routers
        self.router = routers["both"]
        self._clock = clock
        self._fleet = fleet
        self._recorder = recorder
        self._prompts: dict[RequestId, _Prompt] = {}  # under way, by the name of their own request
        self._computed: dict[RequestId, _Prompt] = {}  # by the name of their answer
        more |= {"clock": clock, "fleet": fleet}
        self._prefill = Gateway(name, routers["prefill"], recorder=_Prompts(self), **more)
        self._decode = Gateway(name, self.router, recorder=self, send=self._send, **more)
        self.room = self._decode.room

    def router_for(self, worker: Worker) -> Router:
        """The router that knows `worker`."""
        return self._half(worker).router

    def _half(self, worker: Worker) -> Gateway:
        return self._prefill if worker.role == "prefill" else self._decode

    # What happens

    def begin(self, request: RequestId, job: Job) -> None:
        """Route a new request, its prompt first if that is computed apart."""
        is_apart = self.routers["prefill"].has_workers
        if not is_apart or not isinstance(job, GenerateJob | PrefillJob):
            self._decode.begin(request, job)
            return
        prompt = _Prompt(request, job)
        name = RequestId(f"{request}-p")
        self._prompts[name] = prompt
        self._prefill.begin(name, PrefillJob(job.tokens, COMMON, _KEPT_S, job.terms))

    def on_updates(self, worker: Worker, updates: Sequence[CountedUpdate], ended: float) -> None:
        """Handle updates by a step of `worker` that ended at `ended`."""
        self._half(worker).on_updates(worker, updates, ended)

    def on_lease(self, worker: Worker, lease: Lease) -> None:
        """`worker` joins, drains or has room; its router knows."""
        self._half(worker).on_lease(worker, lease)
        self._withdraw()

    def lost(self, worker: Worker) -> None:
        """Have what ran on `worker` go on elsewhere; its router knows that it is gone."""
        self._half(worker).lost(worker)
        self._withdraw()

    def _withdraw(self) -> None:
        """Have decode workers compute the prompts that wait while there is no prefill worker."""
        if not self.routers["prefill"].has_workers:
            for name, prompt in list(self._prompts.items()):
                if prompt.worker is None or not prompt.worker.is_alive:
                    self._prefill.cancel(name)

    def poke(self, worker: WorkerId | None) -> None:
        """Try what waits again: `worker` may have room now."""
        self._prefill.poke(worker)
        self._decode.poke(worker)

    def release(self, capsule: CapsuleId) -> None:
        """No request will fork `capsule` any more: it is not made again if its worker drains."""
        self._decode.release(capsule)

    def is_linked(self, worker: Worker) -> bool:
        """Whether this life of `worker` has joined and was neither lost nor let go of."""
        return self._half(worker).is_linked(worker)

    # Prompts

    def prompt_placed(self, effect: Placed) -> None:
        """A prompt goes to a prefill worker."""
        prompt = self._prompts[effect.request]
        prompt.worker = self._fleet.lives[effect.placement.incarnation]
        self._recorder.placed(effect._replace(request=prompt.request))

    def prompt_told(self, effect: Deliver) -> None:
        """A prompt is computed, and kept."""
        prompt = self._prompts[effect.request]
        prompt.capsule = effect.update.capsule
        self._recorder.prompted(prompt.request, effect)

    def prompt_over(self, name: RequestId) -> None:
        """Answer a prompt that is computed, or was refused: then where it is answered it is computed too."""
        prompt = self._prompts.pop(name)
        if prompt.capsule is not None:
            self._computed[prompt.request] = prompt
        self._decode.begin(prompt.request, prompt.job)

    # Answers

    def _send(self, worker: Worker, effect: Send) -> None:
        """Send a command, with the worker that has computed its prompt."""
        command, shard = effect.command, effect.shard
        assert shard is not None, "nothing is sent but for requests"
        prompt = self._computed.get(shard.state.id)
        is_first = prompt is not None and not shard.dispatch.is_moved
        if prompt is not None and is_first and isinstance(command, Generate | Prefill):
            prompt.shards.add(shard.name)
            holders = (prompt.holder, *command.holders)[:MAX_HOLDERS]
            effect = effect._replace(command=structs.replace(command, holders=holders))
        self._decode.send(worker, effect)

    def _release(self, prompt: _Prompt) -> None:
        """Let go of a prompt where it was computed."""
        worker, capsule = prompt.worker, prompt.capsule
        prompt.capsule = None
        if worker is not None and worker.is_alive and capsule is not None:
            self._fleet.send(worker, Release(capsule))

    def placed(self, effect: Placed) -> None:
        """A shard of an answer is booked."""
        self._recorder.placed(effect)

    def deliver(self, effect: Deliver, ended: float) -> None:
        """Tell of an answer; once all of it has begun its prompt is there."""
        prompt = self._computed.get(effect.request)
        if prompt is not None and effect.shard.name in prompt.shards:
            prompt.shards.remove(effect.shard.name)
            if not prompt.shards:
                self._release(prompt)
        self._recorder.deliver(effect, ended)

    def failed(self, request: RequestId, error: MalleeError) -> None:
        self._recorder.failed(request, error)

    def over(self, request: RequestId) -> None:
        """An answer is over."""
        prompt = self._computed.pop(request, None)
        if prompt is not None:
            self._release(prompt)  # if it was refused before it began
        self._recorder.over(request)

    # Reading

    @property
    def num_retries(self) -> int:
        """Shards that were placed again."""
        return self._prefill.num_retries + self._decode.num_retries

    @property
    def num_rebuilt(self) -> int:
        """Capsules that were gone and were computed again."""
        return self._decode.num_rebuilt

    def check(self) -> None:
        """Raises AssertionError on a broken invariant, or if a request is under way."""
        self._prefill.check()
        self._decode.check()
        assert not self._prompts, "prompts under way"
        assert not self._computed, "computed for no answer"


class _Prompts:
    """Records the prompts of a `RoleGateway`: the news of one are no news of its answer."""

    def __init__(self, gateway: RoleGateway) -> None:
        self._gateway = gateway

    def placed(self, effect: Placed) -> None:
        self._gateway.prompt_placed(effect)

    def deliver(self, effect: Deliver, ended: float) -> None:
        self._gateway.prompt_told(effect)

    def failed(self, request: RequestId, error: MalleeError) -> None:
        """Nothing: it is computed where it is answered."""

    def over(self, request: RequestId) -> None:
        self._gateway.prompt_over(request)

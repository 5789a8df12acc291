"""The Ray cluster as replicas see it: names and lives of workers, the app's own values, nodes, targets.

Names and lives come from Ray's key-value store, not from Serve's ranks or a clock: a rank moves to
another replica during an update, and a node's clock may be behind.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import ray
from ray._private import state
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.exceptions import RayError
from ray.experimental import internal_kv

from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import PRIVATE

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1")
_NAMESPACE = "mallee"


class Claim(NamedTuple):
    """The number of a process of workers, and which life of that number it is, counted from 1."""

    number: int
    life: int


class RayStore:
    """Ray's key-value store, which outlives every replica and redeploy. Its calls block."""

    def add(self, key: str, value: str) -> bool:
        """Put a value, atomically. False if there is one already."""
        return not internal_kv._internal_kv_put(
            key, value.encode(), overwrite=False, namespace=_NAMESPACE
        )

    def put(self, key: str, value: str) -> None:
        internal_kv._internal_kv_put(key, value.encode(), overwrite=True, namespace=_NAMESPACE)

    def get(self, key: str) -> str | None:
        raw = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        return None if raw is None else bytes(raw).decode()

    def keys(self, prefix: str) -> list[str]:
        found = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        return [bytes(key).decode() for key in found]

    def remove(self, key: str) -> None:
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


class Names:
    """The numbers of a group's replicas, and their lives, in Ray's store. Its calls block.

    A group has a name of its own in the cluster: that of an app for its workers.
    Owners are actors' ids; `is_alive` says of one whether that actor lives.
    """

    def __init__(
        self, store: RayStore, group: str, owner: str, *, is_alive: Callable[[str], bool]
    ) -> None:
        self._store = store
        self._prefix = f"worker:{group}:"
        self._owner = owner
        self._is_alive = is_alive

    @classmethod
    def of(cls, group: str) -> "Names":
        """As the actor that calls this claims them."""
        owner = ray.get_runtime_context().get_actor_id()
        assert owner is not None, "only actors have numbers"
        return cls(RayStore(), group, owner, is_alive=_is_alive)

    def claim(self) -> Claim:
        """Take the lowest number whose last owner is dead, in a new life.

        Replicas that start at once get different numbers, and one that still drains keeps its own.
        """
        while True:
            lives = self._lives()
            found = next(
                Claim(number, lives.get(number, 0) + 1)
                for number in count()
                if number not in lives or not self._lives_on(Claim(number, lives[number]))
            )
            if self._take(found):
                return found

    def claim_departed(self, number: int, target: Callable[[], int]) -> Claim | None:
        """Take `number` if its last owner is dead and no replica is about to: `target` others live.

        So one worker adopts what that one left on disk, and no replica takes the name before `give_back`.
        """
        lives = self._lives()
        last = Claim(number, lives.pop(number, 0))
        if self._lives_on(last):
            return None
        others = {self._owner_of(Claim(*each)) for each in lives.items()}  # one may hold several
        if sum(map(self._is_alive, filter(None, others))) < target():
            return None
        found = Claim(number, last.life + 1)
        return found if self._take(found) else None

    @contextmanager
    def hold_departed(self, target: Callable[[], int], name: str) -> Iterator[bool]:
        """Hold the name of a worker that is gone, as `claim_departed` takes it: whether it is."""
        found = None
        try:
            found = self.claim_departed(int(name.removeprefix("w")), target)
        except RayError as error:  # the controller is being replaced
            log.info("whether %s has departed is not known: %r", name, error)
        try:
            yield found is not None
        finally:
            if found is not None:
                self.give_back(found)

    def give_back(self, claim: Claim) -> None:
        """Nothing is done under that number any more: the next replica may have it."""
        self._store.put(self._key(claim), "")

    def _lives(self) -> dict[int, int]:
        """The last life of each number that was ever claimed."""
        lives: dict[int, int] = {}
        for key in self._store.keys(self._prefix):
            number, life = map(int, key.removeprefix(self._prefix).split(":"))
            lives[number] = max(life, lives.get(number, 0))
        return lives

    def _take(self, claim: Claim) -> bool:
        if not self._store.add(self._key(claim), self._owner):
            return False
        if claim.life > 1:
            self._store.remove(self._key(Claim(claim.number, claim.life - 1)))
        return True

    def _owner_of(self, claim: Claim) -> str:
        """The actor that made `claim`; none if it was given back."""
        return self._store.get(self._key(claim)) or ""

    def _lives_on(self, claim: Claim) -> bool:
        owner = self._owner_of(claim)
        return bool(owner) and self._is_alive(owner)

    def _key(self, claim: Claim) -> str:
        return f"{self._prefix}{claim.number}:{claim.life}"


def _is_alive(actor: str) -> bool:
    found: dict[str, Any] = state.actors(actor) or {}
    return str(found.get("State", "DEAD")) != "DEAD"


def num_nodes() -> int:
    """Nodes that can run replicas."""
    return len(_nodes())


def is_only_node() -> bool:
    """Whether replicas can run on this node, and on no other.

    False on a head without CPUs, even while a cluster that starts has but one other node.
    """
    return _nodes() == {own_node()}


def _nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {
        str(node["NodeID"])
        for node in nodes
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }


def own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def own_gpus() -> tuple[str, ...]:
    """The GPUs that Ray gave to the actor that calls this, by its names of them on this node."""
    return tuple(map(str, ray.get_gpu_ids()))


def num_gpus() -> float:
    """GPUs of the cluster, in use or not."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def check_one_node(nats_url: str | None) -> None:
    """Raises ConfigError if the cluster is too large for a broker on loopback."""
    if nats_url is None and (nodes := num_nodes()) > 1:
        raise ConfigError(
            f"the cluster has {nodes} nodes, and without nats_url the broker is reached from one"
            " alone: start a nats-server and give its nats_url"
        )


def exposure() -> str | None:
    """A sentence for the log if other machines reach this Ray, which asks nobody for a token."""
    if is_token_auth_enabled():
        return None
    addresses = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if open_ := sorted(each for each in addresses if each not in LOOPBACK):
        return (
            f"Ray listens on {', '.join(open_)} without authentication, and whoever reaches it can run code"
            " here: set RAY_AUTH_MODE=token for `ray start` and every other command (docs/deploy.md)"
        )
    return None


def target_replicas(app: str, deployment: str) -> int | None:
    """The replicas that Serve aims at now, by the settings, a redeploy or the autoscaler; blocks."""
    if (client := _serve()) is None:
        return None
    apps = client.get_serve_details().get("applications", {})
    found = apps.get(app, {}).get("deployments", {}).get(deployment)
    return None if found is None else found.get("target_num_replicas")


def http_host() -> str | None:
    """The address that Serve's proxy listens on, and in HAProxy mode every gateway; blocks.

    Serve's own word, the same in a builder and in a replica: `http_options.host` of the first deploy
    holds, and without one the default, which is every interface in HAProxy mode. None if there is no
    Serve, or it doesn't listen to anybody outside (`PRIVATE`).
    """
    if os.environ.get(PRIVATE) == "1":
        return None
    client = _serve()
    return None if client is None else client.http_config.host


def _serve() -> Any:
    """Serve's client in this process, or None."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)

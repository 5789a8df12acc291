"""Names of things, as distinct types, and the rules by which names are derived.

Ids are opaque strings made by their owner: a gateway mints request ids, and the ids of capsules and
response choices follow from them, so that no process has to ask another for a name.
"""

from typing import Final, NewType

WorkerId = NewType("WorkerId", str)
"""One engine with its cache, stable over restarts (`w0`)."""
Incarnation = NewType("Incarnation", int)
"""One life of a worker: larger means younger (nanoseconds since the epoch at its start)."""
RequestId = NewType("RequestId", str)
CapsuleId = NewType("CapsuleId", str)
Scope = NewType("Scope", str)
"""The owner of state, a tenant and a cache salt in it, as a digest that salts its blocks' hashes."""
COMMON: Final = Scope("")
"""The scope of requests without a tenant and a salt. Its blocks have the plain hashes."""
_PART: Final = "+"
_ACCOUNT: Final = "~"

_MASK = (1 << 64) - 1


def private_part(scope: Scope, nonce: str) -> Scope:
    """A part of `scope` whose blocks nothing finds that does not name `nonce`."""
    return Scope(f"{scope}{_PART}{nonce}")


def owner_of(scope: str) -> Scope:
    """The scope that `scope` is a private part of, or itself."""
    return Scope(scope.partition(_PART)[0])


def capsule_id(request: RequestId, branch: int = 0) -> CapsuleId:
    """The capsule that branch `branch` of `request` leaves at its last committed boundary."""
    return CapsuleId(f"{request}.{branch}")


def request_of(capsule: str) -> RequestId:
    """The request that left `capsule`."""
    return RequestId(capsule.rpartition(".")[0])


def on_account(name: str, account: str) -> str:
    """The name of what is made on an account, which bounds it; "" for what none bounds."""
    return f"{name}{_ACCOUNT}{account}" if account else name


def account_of(name: str) -> str:
    """The account that a request runs on, or that a capsule's was made on; "" if none bounds it."""
    return name.partition(_ACCOUNT)[2].partition(".")[0].partition("-")[0]


def branch_seed(seed: int, branch: int) -> int:
    """The sampler seed of branch `branch` of a request with `seed`; branch 0 keeps the seed itself.

    So a request with n=1 and branch 0 of a fork draw the same stream. (`splitmix64`.)
    """
    if branch == 0:
        return seed & _MASK
    return splitmix64(seed, branch)


def splitmix64(seed: int, n: int) -> int:
    """The n-th number (from 1) of splitmix64's stream from `seed`: 64 bits that look random."""
    z = (seed + n * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)

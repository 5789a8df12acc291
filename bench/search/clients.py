"""Ways in which a client has a search carried out by a service over HTTP, and the cost of each.

`server` is one `POST /v1/search`. `client` runs the policy here, over forks of capsules. `prefix` runs it
here over `/v1/completions`: each expansion sends its whole text again, with `n` for its width, and the
service finds what it has in its cache. `cold` is the same where no request finds anything.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from hashlib import blake2b
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias

import httpx
import msgspec

from mallee.client import Branches, Mallee
from mallee.client.calls import Call
from mallee.client.searches.local import Value, run
from mallee.search.policies.named import read_policy
from mallee.search.results import SearchResult

TIMEOUT_S: Final = 600.0


class Task(NamedTuple):
    """One search. `policy` is as requests give it; without a `value` texts are worth their mean_logprob."""

    prompt: str
    policy: Mapping[str, Any]
    steps: Mapping[str, Any]  # parameters of every expansion
    ends: tuple[str, ...] = ()
    value: Value | None = None


class Played(NamedTuple):
    """Cost and outcome of one search. `unique`: tokens of the prompt and of the tree, duplicates left out."""

    seconds: float
    prefilled: int
    drawn: int
    unique: int
    requests: int
    score: float | None
    tree: str  # equal trees have equal ones


class CountedTransport(httpx.HTTPTransport):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        next(self._numbers)
        return super().handle_request(request)

    def taken(self) -> int:
        """The requests so far. Called once, when all have been sent."""
        return next(self._numbers)


class CountedClient(Mallee):
    """Keeps the branches of all its requests: their tokens are added up at the end."""

    def __init__(self, url: str) -> None:
        self.transport = CountedTransport()
        self.opened: list[Branches] = []
        http = httpx.Client(transport=self.transport)
        super().__init__(url, timeout=TIMEOUT_S, http_client=http)

    def _open(self, call: Call) -> Branches:
        branches = super()._open(call)
        self.opened.append(branches)
        return branches

    def close(self) -> None:
        self.transport.close()

    def tokens(self) -> tuple[int, int]:
        """Prompt tokens that its requests had computed, and tokens drawn."""
        ended = [each for opened in self.opened for each in opened.branches.values()]
        prefilled = sum(each.prefill_tokens or 0 for each in ended)
        return prefilled, sum(each.completion_tokens or 0 for each in ended)


class Texts:
    """Expansions by `/v1/completions`: a state is its text, which is sent from the beginning."""

    def __init__(self, client: Mallee, prompt: str, salt: Callable[[], str]) -> None:
        self._client = client
        self._prompt = prompt
        self._salt = salt
        self._asked: list[tuple[Branches, str]] = []  # each with the text before its branches

    def fork(self, key: str, num: int, params: Mapping[str, Any]) -> Branches:
        text = self._text(key)
        sent = {**params, "n": num, "cache_salt": self._salt()}
        branches = self._client.stream(self._prompt + text, **sent)
        self._asked.append((branches, text))
        return branches

    def _text(self, key: str) -> str:
        """The text below the prompt, of the state that a branch named so."""
        if not key:
            return ""
        return next(
            before + branch.text
            for branches, before in self._asked
            for branch in branches.branches.values()
            if branch.capsule == key
        )


def by_server(url: str, task: Task, seed: int, salt: str) -> Played:
    """One call."""
    assert task.value is None, "a function of the client's can't be sent"
    transport = CountedTransport()
    body = {
        **{"prompt": task.prompt, "policy": task.policy, "ends": task.ends, "seed": seed},
        **{"cache_salt": salt, **task.steps},
    }
    with httpx.Client(base_url=url, transport=transport, timeout=TIMEOUT_S) as client:
        begin = time.perf_counter()
        found = client.post("/v1/search", json=body).raise_for_status().json()
        took_s = time.perf_counter() - begin
    spent, result = found["spent"], msgspec.convert(found, SearchResult)
    tokens = (spent["prefill_tokens"], spent["completion_tokens"])
    return _played(url, task, result, took_s, tokens, transport.taken())


def by_client(url: str, task: Task, seed: int, salt: str) -> Played:
    """The SDK's search."""
    with closing(CountedClient(url)) as client:
        begin = time.perf_counter()
        with client.prefill(task.prompt, cache_salt=salt) as capsule:
            result = capsule.search(
                read_policy(task.policy)[1],
                score=task.value or "mean_logprob",
                seed=seed,
                ends=task.ends,
                **task.steps,
            )
        took_s = time.perf_counter() - begin
        prefilled, drawn = client.tokens()
        tokens = (prefilled + (capsule.data.prefill_tokens or 0), drawn)
        return _played(url, task, result, took_s, tokens, client.transport.taken())


def by_prefix(url: str, task: Task, seed: int, salt: str) -> Played:
    """Texts sent again, to a service that caches prefixes."""
    return _by_texts(url, task, seed, lambda: salt)


def by_cold(url: str, task: Task, seed: int, salt: str) -> Played:
    """Texts sent again, each with a salt of its own."""
    numbers = count()
    return _by_texts(url, task, seed, lambda: f"{salt}-{next(numbers)}")


Way: TypeAlias = Callable[[str, Task, int, str], Played]
WAYS: Final[Mapping[str, Way]] = {
    "server": by_server,
    "client": by_client,
    "prefix": by_prefix,
    "cold": by_cold,
}
"""A way takes the service's address, the search, its seed, and a cache salt that nothing else had."""


def _by_texts(url: str, task: Task, seed: int, salt: Callable[[], str]) -> Played:
    with closing(CountedClient(url)) as client:
        fork, policy = Texts(client, task.prompt, salt).fork, read_policy(task.policy)[1]
        begin = time.perf_counter()
        result = run(
            fork,
            "",
            policy,
            score=task.value or "mean_logprob",
            seed=seed,
            budget=None,
            ends=task.ends,
            params=task.steps,
        )
        took_s = time.perf_counter() - begin
        return _played(url, task, result, took_s, client.tokens(), client.transport.taken())


def _played(
    url: str,
    task: Task,
    result: SearchResult,
    took_s: float,
    tokens: tuple[int, int],
    num_requests: int,
) -> Played:
    nodes = [node for node in result.nodes if node.state != "duplicate"]
    unique = prompt_tokens(url, task.prompt) + sum(node.tokens for node in nodes)
    tree = blake2b(repr([(node.parent, node.text) for node in result.nodes]).encode()).hexdigest()
    return Played(took_s, *tokens, unique, num_requests, result.score, tree)


def prompt_tokens(url: str, prompt: str) -> int:
    answer = httpx.post(f"{url}/tokenize", json={"prompt": prompt}, timeout=TIMEOUT_S)
    return int(answer.raise_for_status().json()["count"])

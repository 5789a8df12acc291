"""A group of rollouts for reinforcement learning: 16 samples of one prompt as one fork, and their advantages.

    mallee serve --model smollm2
    python examples/rollouts.py > group.jsonl

The prompt is computed once, and all samples draw from it. Each line has a sample's text, token ids and
log-probabilities (the model's own, before the temperature), its reward, and its advantage within the group:
(reward - mean) / deviation. A trainer must not mix weights: the version that began and ended each sample is
checked, and a group of more than one version is thrown away and drawn once more.

This speaks HTTP as trainers do: branches of the SDK don't tell the version of the weights. The service
answers with the texts of tokens, and `/tokenize` has their ids; a sample that can't be told in ids has null
(where a character was drawn in parts, or the tokenizer writes a word otherwise where it stands alone).
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import httpx

from mallee.client.errors import from_body
from mallee.protocol.errors import WeightsChanged

PROMPT = "Question: What is 17 + 25?\nAnswer: 17 + 25 ="
RIGHT = "42"


class MixedWeights(Exception):
    """The samples of a group come of more than one version of the weights, or some ended at a change."""


class Sample(NamedTuple):
    """One rollout; `weights` is the version that drew it."""

    text: str
    token_ids: list[int] | None
    logprobs: list[float]
    finish_reason: str
    weights: str


def reward(text: str) -> float:
    """1 if the first number of the text is right, else 0."""
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == RIGHT)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward's distance from the group's mean, in deviations of the group."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(each - mean) / (deviation + 1e-6) for each in rewards]


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """The decoded answer. Raises the service's error."""
    answer = http.post(path, json=body)
    if answer.status_code != 200:
        raise from_body(answer.json(), answer.status_code)
    return answer.json()


def draw_group(http: httpx.Client, prompt: str, n: int, **sampling: Any) -> list[Sample]:
    """`n` samples of one version. Raises MixedWeights."""
    try:
        answer = post(http, "/v1/completions", prompt=prompt, n=n, logprobs=0, **sampling)
    except WeightsChanged as error:  # not one sample had ended before
        raise MixedWeights(str(error)) from error
    choices = answer["choices"]
    versions = [choice["mallee"]["weight_version"] for choice in choices]
    seen = sorted({each for version in versions for each in (version["start"], version["end"])})
    if len(seen) > 1:
        raise MixedWeights(f"the group has samples of several weights: {', '.join(seen)}")
    token_ids = TokenIds(http)
    return [
        Sample(
            choice["text"],
            token_ids.of(choice["logprobs"]["tokens"]),
            choice["logprobs"]["token_logprobs"],
            choice["finish_reason"],
            *seen,
        )
        for choice in choices
    ]


class TokenIds:
    """Ids of tokens by their texts, as the service tells them; each is asked for once."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._known: dict[str, list[int]] = {}

    def of(self, tokens: Sequence[str]) -> list[int] | None:
        """The ids of one sample's tokens, whose text is the sample's; else None."""
        ids = [each for token in tokens for each in self._of_one(token)]
        if len(ids) != len(tokens):
            return None
        text = post(self._http, "/detokenize", tokens=ids)["prompt"]
        return ids if text == "".join(tokens) else None

    def _of_one(self, token: str) -> list[int]:
        if token not in self._known:
            body = {"prompt": token, "add_special_tokens": False}
            self._known[token] = post(self._http, "/tokenize", **body)["tokens"]
        return self._known[token]


def rollouts(
    http: httpx.Client, prompt: str, n: int, score: Callable[[str], float] = reward, **sampling: Any
) -> list[Mapping[str, Any]]:
    """The group as rows. A group of mixed weights is drawn once more. Raises MixedWeights."""
    try:
        samples = draw_group(http, prompt, n, **sampling)
    except MixedWeights as error:
        print(f"{error}; drawing the group again", file=sys.stderr)
        samples = draw_group(http, prompt, n, **sampling)
    rewards = [score(each.text) for each in samples]
    return [
        {"index": index, **sample._asdict(), "reward": value, "advantage": round(advantage, 4)}
        for index, (sample, value, advantage) in enumerate(
            zip(samples, rewards, advantages(rewards), strict=True)
        )
    ]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw a group of rollouts as JSON lines.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="At most, of each sample.")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(given)
    sampling = {"max_tokens": asked.tokens, "temperature": 1.0, "seed": asked.seed}
    with httpx.Client(base_url=asked.url, timeout=120) as http:
        try:
            rows = rollouts(http, PROMPT, asked.n, **sampling)
        except MixedWeights as error:
            raise SystemExit(f"{error}, twice; try again once the fleet has settled") from error
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()

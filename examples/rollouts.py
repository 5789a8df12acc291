"""A group of rollouts for reinforcement learning: 16 samples of one prompt as one fork, and their advantages.

    mallee serve --model smollm2
    python examples/rollouts.py > group.jsonl

The prompt is computed once, and all samples draw from it. Each line has a sample's text, the exact ids of its
prompt and of its tokens, with the one that ended it, their log-probabilities (the model's own, before the
temperature), its reward, and its advantage within the group: (reward - mean) / deviation. A trainer must not
mix weights: the version that began and ended each sample is checked, and a group of more than one version is
thrown away and drawn once more.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from mallee.client import Mallee
from mallee.protocol.errors import WeightsChanged

PROMPT = "Question: What is 17 + 25?\nAnswer: 17 + 25 ="
RIGHT = "42"


class MixedWeights(Exception):
    """The samples of a group come of more than one version of the weights, or some ended at a change."""


class Sample(NamedTuple):
    """One rollout; `weights` is the version that drew it."""

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    weights: str


def reward(text: str) -> float:
    """1 if the first number of the text is right, else 0."""
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == RIGHT)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward's distance from the group's mean, in deviations of the group."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(each - mean) / (deviation + 1e-6) for each in rewards]


def draw_group(
    client: Mallee, prompt: str | Sequence[int], n: int, **sampling: Any
) -> list[Sample]:
    """`n` samples of one version. Raises MixedWeights."""
    try:
        branches = client.complete(prompt, n=n, logprobs=0, return_token_ids=True, **sampling)
    except WeightsChanged as error:  # not one sample had ended before
        raise MixedWeights(str(error)) from error
    versions = [branch.weight_version for branch in branches]
    seen = sorted({each for found in versions if found for each in (found.start, found.end)})
    if len(seen) > 1:
        raise MixedWeights(f"the group has samples of several weights: {', '.join(seen)}")
    return [
        Sample(
            text=branch.text,
            prompt_token_ids=branch.prompt_token_ids or [],
            token_ids=branch.token_ids,
            logprobs=branch.token_logprobs,
            finish_reason=branch.finish_reason,
            weights=seen[0],
        )
        for branch in branches
    ]


def rollouts(
    client: Mallee,
    prompt: str | Sequence[int],
    n: int,
    score: Callable[[str], float] = reward,
    **sampling: Any,
) -> list[Mapping[str, Any]]:
    """The group as rows. A group of mixed weights is drawn once more. Raises MixedWeights."""
    try:
        samples = draw_group(client, prompt, n, **sampling)
    except MixedWeights as error:
        print(f"{error}; drawing the group again", file=sys.stderr)
        samples = draw_group(client, prompt, n, **sampling)
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
    with Mallee(asked.url) as client:
        try:
            rows = rollouts(client, PROMPT, asked.n, **sampling)
        except MixedWeights as error:
            raise SystemExit(f"{error}, twice; try again once the fleet has settled") from error
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()

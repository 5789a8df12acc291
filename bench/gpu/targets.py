"""The targets of the GPU path as rows, each with what was measured, or the reason why nothing was."""

from typing import Final, Literal, NamedTuple

Bound = Literal["at_least", "at_most"]


class Target(NamedTuple):
    """A bound of one figure, on an H200 with an 8B Llama in bfloat16 unless the name says otherwise."""

    bound: Bound
    value: float
    unit: str
    text: str


TARGETS: Final[dict[str, Target]] = {
    "decode_bf16": Target(
        "at_least",
        0.70,
        "of the floor",
        "a decode step of one row against reading the weights once",
    ),
    "decode_fp8": Target(
        "at_least", 0.60, "of the floor", "the same with weights in FP8, against their floor"
    ),
    "prefill": Target("at_least", 0.50, "of 790 TFLOP/s", "a prompt that is computed in one step"),
    "shared_step": Target(
        "at_most", 1.15, "of weights alone", "a step of 32 branches that share 2048 tokens"
    ),
    "shared_attention": Target(
        "at_least", 5.0, "times as fast", "attention of those branches against flat paging"
    ),
    "forks": Target(
        "at_most", 1.0, "ms", "1000 forks of a 2048-token parent, with page tables on the device"
    ),
    "restore": Target("at_most", 0.2, "ms", "a capsule on the device becomes a branch"),
    "recaptures": Target("at_most", 0, "graphs", "graphs captured again after forks"),
    "search": Target(
        "at_least",
        5.0,
        "times as fast",
        "50 expansions of 20 rollouts of 50 tokens, by forks against sending each text again",
    ),
    "reference_error": Target(
        "at_most",
        1e-2,
        "of the largest logit",
        "logits against torch operations on the same device",
    ),
    "exact_prompts": Target(
        "at_least", 50, "prompts", "equal greedy answers of 50 prompts in one batch and alone"
    ),
}
PREFILL_FLOPS: Final = 790e12
H200_FLOOR_S: Final = 3.7e-3
"""Of a step of Llama 3.1 8B in bfloat16; elsewhere the floor is by the bandwidth that is measured."""


class Row(NamedTuple):
    """One target: `measured` None has a `reason`; `meets` None: it was not judged."""

    name: str
    target: str
    measured: float | None
    meets: bool | None
    reason: str = ""


def row(name: str, measured: float | None, reason: str = "", *, judges: bool = True) -> Row:
    """The row of target `name`; only figures of real shapes on a device are judged."""
    target = TARGETS[name]
    sign = ">=" if target.bound == "at_least" else "<="
    text = f"{target.text}: {sign} {target.value:g} {target.unit}"
    if measured is None:
        assert reason, f"{name} has neither a figure nor a reason"
        return Row(name, text, None, None, reason)
    meets = None
    if judges:
        at_least = target.bound == "at_least"
        meets = measured >= target.value if at_least else measured <= target.value
    return Row(name, text, measured, meets, reason)

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
    "attention_error": Target(
        "at_most", 1e-2, "of the norm", "attention of a layer against plain float32 attention"
    ),
    "reference_error": Target(
        "at_most", 2e-2, "of the norm", "logits of 8 layers against float32 in torch's operations"
    ),
    "golden_tokens": Target(
        "at_least", 100, "prompts", "transformers' greedy answers of tiny models in float32"
    ),
    "decode_bf16": Target(
        "at_least",
        0.70,
        "of the floor",
        "a decode step of one row against reading the weights once",
    ),
    "decode_bf16_32": Target(
        "at_least", 0.60, "of the floor", "a step of 32 rows that share nothing, against the same"
    ),
    "shared_step": Target(
        "at_most",
        1.15,
        "of the same over none",
        "a step of 32 branches that share 2048 tokens",
    ),
    "shared_attention": Target(
        "at_least", 5.0, "times as fast", "attention of those branches against flat paging"
    ),
    "replay_error": Target(
        "at_most", 1e-2, "of the norm", "logits of recorded decode steps against eager ones"
    ),
    "recaptures": Target("at_most", 0, "graphs", "graphs captured again after forks"),
    "prefill": Target(
        "at_least",
        0.50,
        "of the measured rate",
        "a prompt of 2048 tokens in one step, against products in bfloat16",
    ),
    "forks": Target(
        "at_most", 1.0, "ms", "1000 forks of a 2048-token parent, with page tables on the device"
    ),
    "restore": Target("at_most", 0.2, "ms", "a capsule on the device becomes a branch"),
    "draws": Target("at_most", 0.3, "ms", "draws of 256 rows of 151,936 tokens with top-p"),
    "exact_prompts": Target(
        "at_least",
        50,
        "prompts",
        "equal greedy answers of 50 prompts in one batch and alone (engine.deterministic)",
    ),
    "search": Target(
        "at_least",
        5.0,
        "times as fast",
        "50 expansions of 20 rollouts of 50 tokens, by forks against sending each text again",
    ),
    "decode_fp8": Target(
        "at_least", 0.60, "of the floor", "a decode step of one row with weights in FP8"
    ),
}
"""In the order of their worth, which is that of the benches."""
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

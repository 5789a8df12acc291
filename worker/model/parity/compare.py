"""Compares our forward pass with transformers', site by site: where do they part first?

One sequence, as a server computes it: the prompt in two chunks, then greedy steps over the cache. The
oracle runs over the whole sequence at once, without a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mallee.protocol.errors import ConfigError
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.model.decoder import Site
from mallee.worker.model.parity.tolerance import TOLERANCES, Tolerance
from mallee.worker.model.runner import TorchForward

_AT_OUTPUTS: tuple[Site, ...] = ("norm", "logits")

Place: TypeAlias = tuple[Site, int | None]
Values: TypeAlias = dict[Place, torch.Tensor]
"""Values seen at each place: [positions, features], float32."""


class SiteReport(NamedTuple):
    """All positions at one site. `of_tolerance` is the largest share of the tolerance that was used."""

    site: Site
    layer: int | None
    max_error: float
    mean_error: float
    of_tolerance: float


class Difference(NamedTuple):
    """The first place, in order of computation, where the two differ beyond the tolerance.

    `head` is a query head if the heads' outputs differ; `step` counts decode steps from 1 (0: in the
    prompt). `scores` are the attention weights of that head and position, ours and theirs.
    """

    site: Site
    layer: int | None  # None: outside the layers
    position: int
    step: int
    head: int | None
    error: float
    allowed: float
    scores: tuple[list[float], list[float]] | None

    def __str__(self) -> str:
        where = "outside the layers" if self.layer is None else f"layer {self.layer}"
        head = "" if self.head is None else f", head {self.head}"
        when = f"decode step {self.step}" if self.step else "the prompt"
        return (
            f"first difference: {where}, {self.site}{head}, position {self.position} ({when}):"
            f" {self.error:.3g} where {self.allowed:.3g} is allowed"
        )


class Diagnosis(NamedTuple):
    """`first` is None if all sites agree. `tokens` are the prompt and what was decoded after it."""

    tokens: list[int]
    num_prompt: int
    dtype: str
    tolerance: Tolerance
    sites: list[SiteReport]
    first: Difference | None


def load_oracle(folder: Path, dtype: str) -> Any:
    """transformers' model of the checkpoint, with attention that can show its weights.

    Its activations stay floats, as ours do in float32. Raises ConfigError if it can't load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        oracle = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    except ImportError as e:  # a package for this form of weights
        raise ConfigError(f"transformers can't load {folder}: {e}") from e
    finally:
        if had_bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    for module in oracle.modules():  # compressed-tensors' switch, once weights are dequantised
        if hasattr(module, "quantization_scheme"):
            vars(module)["quantization_enabled"] = False
    return oracle


def examine(
    forward: TorchForward, oracle: Any, prompt: Sequence[int], *, num_steps: int = 8
) -> Diagnosis:
    """Run `prompt` and `num_steps` greedy decode steps through both, and compare every site.

    `forward` must hold nothing that is still needed: its first blocks are overwritten.
    """
    dtype = str(oracle.dtype).removeprefix("torch.")
    tolerance = TOLERANCES[dtype]
    tokens, ours = _run_ours(forward, list(prompt), num_steps)
    at_outputs = torch.arange(len(prompt) - 1, len(tokens))
    with torch.inference_mode():
        theirs = _run_theirs(oracle, tokens, at_outputs)
    sites, first = [], None
    for (site, layer), expected in theirs.items():
        found = ours[site, layer]
        share = tolerance.outputs if site in _AT_OUTPUTS else tolerance.inside
        report, failed = _compare(site, layer, found, expected, share)
        sites.append(report)
        if first is None and failed is not None:
            row, error, allowed = failed
            position = int(at_outputs[row]) if site in _AT_OUTPUTS else row
            has_heads = (
                site == "heads" and not forward.decoder.config.layers[layer or 0].is_recurrent
            )
            head = _worst_head(forward, found[row], expected[row]) if has_heads else None
            step = max(0, position - len(prompt) + 1)
            first = Difference(
                site=site,
                layer=layer,
                position=position,
                step=step,
                head=head,
                error=error,
                allowed=allowed,
                scores=None,
            )
    if first is not None and first.head is not None:
        with torch.inference_mode():
            scores = (_our_scores(forward, ours, first), _their_scores(oracle, tokens, first))
        first = first._replace(scores=scores)
    return Diagnosis(tokens, len(prompt), dtype, tolerance, sites, first)


def _compare(
    site: Site, layer: int | None, found: torch.Tensor, expected: torch.Tensor, share: float
) -> tuple[SiteReport, tuple[int, float, float] | None]:
    """The report, and (row, error, allowed) of the first row that differs too much."""
    errors = (found - expected).abs().nan_to_num(nan=torch.inf)
    worst = errors.amax(1)
    allowed = expected.abs().amax(1).clamp(min=1.0) * share
    used = worst / allowed
    report = SiteReport(site, layer, float(worst.max()), float(errors.mean()), float(used.max()))
    bad = (used > 1).nonzero()
    if not len(bad):
        return report, None
    row = int(bad[0])
    return report, (row, float(worst[row]), float(allowed[row]))


def _run_ours(forward: TorchForward, prompt: list[int], num_steps: int) -> tuple[list[int], Values]:
    seen: dict[Place, list[torch.Tensor]] = {}

    def tap(site: Site, layer: int | None, values: torch.Tensor) -> None:
        seen.setdefault((site, layer), []).append(values.flatten(1).to(torch.float32, copy=True))

    decoder = forward.decoder
    table = np.arange(forward.num_blocks, dtype=np.int32)
    tokens = list(prompt)

    def run(begin: int, num_logits: int) -> None:
        new = np.array(tokens[begin:], dtype=np.uint32)
        sides = tuple(
            np.array([0 if begin else NO_STATE, 0], np.int32) if side.kind == "state" else table
            for side in forward.spec.sides
        )
        out = forward.forward(ForwardBatch((), [Row(new, begin, table, num_logits, sides)]))
        if num_logits:
            tokens.append(int(out[0].argmax()))

    decoder.tap = tap
    try:
        half = len(prompt) // 2
        if half:
            del tokens[half:]
            run(0, num_logits=0)
            tokens += prompt[half:]
        run(half, num_logits=1)
        for _ in range(num_steps):
            run(len(tokens) - 1, num_logits=1)
    finally:
        decoder.tap = None
    return tokens[:-1], {place: torch.cat(parts) for place, parts in seen.items()}


def _run_theirs(oracle: Any, tokens: list[int], at_outputs: torch.Tensor) -> Values:
    """The oracle's values, in order of computation."""
    seen: Values = {}

    def note(site: Site, layer: int | None, values: torch.Tensor) -> None:
        seen[site, layer] = values

    with _hooked(oracle, note):
        logits = oracle(torch.tensor([tokens])).logits
    seen["logits", None] = logits
    return {
        (site, layer): values[0].float()[at_outputs if site in _AT_OUTPUTS else slice(None)]
        for (site, layer), values in seen.items()
    }


@contextmanager
def _hooked(oracle: Any, note: Callable[[Site, int | None, torch.Tensor], None]) -> Iterator[None]:
    """`note` hears what our taps hear, under the same names."""

    def gets(site: Site, layer: int | None) -> Callable[..., None]:
        return lambda _module, args: note(site, layer, args[0])

    def gives(site: Site, layer: int | None) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            note(site, layer, out[0] if isinstance(out, tuple) else out)

        return hook

    model = getattr(oracle.model, "language_model", oracle.model)  # of a model that also sees
    handles = [
        model.embed_tokens.register_forward_hook(gives("embed", None)),
        model.norm.register_forward_hook(gives("norm", None)),
    ]
    for i, layer in enumerate(model.layers):
        is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
        mixer = (
            layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
        )
        before_mlp = (
            layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm
        )
        handles += [
            mixer.register_forward_pre_hook(gets("heads", i)),
            before_mlp.register_forward_pre_hook(gets("attention", i)),
            layer.register_forward_hook(gives("output", i)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _worst_head(forward: TorchForward, found: torch.Tensor, expected: torch.Tensor) -> int:
    errors = (found - expected).abs().nan_to_num(nan=torch.inf)
    return int(errors.view(forward.decoder.config.num_heads, -1).amax(1).argmax())


def _our_scores(forward: TorchForward, ours: Values, at: Difference) -> list[float]:
    config = forward.decoder.config
    assert at.head is not None
    assert at.layer is not None
    num_turned = config.num_heads + config.num_kv_heads
    turned = ours["turned", at.layer].view(-1, num_turned, config.head_dim)
    kv_head = at.head // (config.num_heads // config.num_kv_heads)
    window = config.layers[at.layer].window
    first = 0 if window is None else max(0, at.position + 1 - window)
    keys = turned[first : at.position + 1, config.num_heads + kv_head]
    scores = keys @ turned[at.position, at.head] * config.query_scale
    return [0.0] * first + [float(x) for x in scores.softmax(0)]


def _their_scores(oracle: Any, tokens: list[int], at: Difference) -> list[float]:
    found = oracle(torch.tensor([tokens]), output_attentions=True).attentions
    kinds = getattr(oracle.config, "layer_types", None) or ()
    weights = found[(at.layer or 0) - kinds[: at.layer].count("linear_attention")]
    return [float(x) for x in weights[0, at.head, at.position, : at.position + 1]]

"""Models of real shapes with random weights, made on the device: no checkpoint is read or written."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import torch

from bench.doubles.quantized import Form, quantization_config, quantized_tensors
from mallee.protocol.model import ModelSpec
from mallee.testing.random_weights import SHAPES, random_tensors
from mallee.worker.memory.budget import Budget, DeviceMemory, Room
from mallee.worker.model.config import ModelConfig, model_spec
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.loading.stored import expected_shapes
from mallee.worker.model.loading.weights import ModelWeights, fuse_weights
from mallee.worker.model.runner import TorchForward, work_of

BLOCK_SIZE: Final = 16
LLAMA_8B: Final = SHAPES["llama-3.1-8b"]
TINY: Final[dict[str, Any]] = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of every bench."""

    raw: dict[str, Any]  # config.json of the model
    prompt: int  # tokens of a prefill
    branches: int
    shared: int  # tokens that they share, and that a parent has
    forks: int
    expansions: int
    rollouts: int  # of an expansion
    rollout_tokens: int
    measured_expansions: int  # of the run without forks: the others count like them
    exact_prompts: int
    exact_tokens: int  # of each answer
    error_tokens: int  # after each prompt, for the distance to float32
    draws: tuple[int, int]  # rows and vocabulary
    repeats: int
    num_blocks: int  # of KV, at most
    max_model_len: int

    @property
    def config(self) -> ModelConfig:
        return parse_config(self.raw)

    def shallow(self, num_layers: int) -> "Scale":
        """Of a model of that many layers at most."""
        num = min(num_layers, self.raw["num_hidden_layers"])
        return replace(self, raw=self.raw | {"num_hidden_layers": num})


FULL: Final = Scale(
    raw=LLAMA_8B,
    prompt=2048,
    branches=32,
    shared=2048,
    forks=1000,
    expansions=50,
    rollouts=20,
    rollout_tokens=50,
    measured_expansions=3,
    exact_prompts=50,
    exact_tokens=32,
    error_tokens=4,
    draws=(256, 151_936),
    repeats=20,
    num_blocks=8192,
    max_model_len=16_384,
)
TINY_SCALE: Final = Scale(
    raw=TINY,
    prompt=64,
    branches=4,
    shared=64,
    forks=20,
    expansions=3,
    rollouts=2,
    rollout_tokens=4,
    measured_expansions=2,
    exact_prompts=4,
    exact_tokens=4,
    error_tokens=2,
    draws=(4, 512),
    repeats=3,
    num_blocks=512,
    max_model_len=1024,
)


class Model(NamedTuple):
    """A model's weights on a device."""

    config: ModelConfig
    weights: ModelWeights
    spec: ModelSpec

    def forward(self, num_blocks: int, **options: Any) -> TorchForward:
        """Over a KV memory of its own, unless `memories` are given; with graphs, on CUDA."""
        return TorchForward(
            *(self.config, self.weights, self.spec),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            **{"graphs": GraphOptions(), **options},
        )

    def beside(self, forward: TorchForward, **options: Any) -> TorchForward:
        """Another one over the memory of `forward`, without graphs: to be used in turns with it."""
        given = {"memories": forward._memories, "graphs": None, **options}
        return self.forward(forward.num_blocks, **given)

    def budget(self, room: Room, before: DeviceMemory) -> Budget:
        """The split of a device that was looked at before the weights were there."""
        return room.split(before, work_of(self.config, self.weights, self.spec, BLOCK_SIZE, room))


def random_model(
    scale: Scale,
    device: str,
    form: Form | None = None,
    seed: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Model:
    """The model of `scale`, its matrices in 8 bits of that form if one is given.

    Numbers are those of bfloat16 in either `dtype`.
    """
    raw = scale.raw
    generator = torch.Generator(device).manual_seed(seed)
    tensors = random_tensors(parse_config(raw), generator, torch.bfloat16)
    if form is not None:
        raw = raw | {"quantization_config": quantization_config(form)}
        tensors = quantized_tensors(tensors, form, is_ignored=lambda name: name == "lm_head")
    config = parse_config(raw)
    weights = fuse_weights(tensors, config, dtype=getattr(torch, dtype), device=device)
    digest = f"random {seed}"
    spec = model_spec(
        config, name="random", weights_digest=digest, dtype=dtype, max_model_len=scale.max_model_len
    )
    return Model(config, weights, spec)


def product_flops(config: ModelConfig, num_tokens: int) -> float:
    """Floating-point operations of a prompt's prefill: products, attention over half a square, one head."""
    head = config.vocab_size * config.hidden_size
    matrices = sum(
        shape[0] * shape[1]
        for name, shape in expected_shapes(config).items()
        if len(shape) == 2 and name not in ("model.embed_tokens.weight", "lm_head.weight")
    )
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * pairs * config.num_layers * config.num_heads * config.head_dim
    return 2.0 * matrices * num_tokens + attention + 2.0 * head

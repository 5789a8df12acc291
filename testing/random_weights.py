"""Models of a given shape with weights that are drawn: their passes take as long as a trained model's."""

import json
from pathlib import Path
from typing import Any, Final

import torch

from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.loading.stored import DELTA_NORM, expected_shapes
from mallee.worker.model.loading.weights import ModelWeights, fuse_weights

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 128_001,
        "dtype": "bfloat16",
    }
}
"""The content of config.json by name."""


_WIDTHS: Final = {"mlp.gate.weight": 6.0, "mlp.experts.down_proj": 0.5}
"""Of tensors that are drawn wider or narrower. Of two experts that a router likes about as much rounding may
choose either, so it decides clearly, and what an expert adds is small."""


def read_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape of that name, or in that folder. Raises ModelNotFound."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser() / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        known = ", ".join(SHAPES)
        raise ModelNotFound(
            f"{name!r} is none of the shapes {known}, and {path} can't be read: {error.strerror}",
            model=name,
        ) from error
    except ValueError as error:
        raise ModelNotFound(f"{path} is no JSON: {error}", model=name) from error
    if not isinstance(found, dict):
        raise ModelNotFound(f"{path} holds no object", model=name)
    return found


def draw_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: str, seed: int = 0
) -> ModelWeights:
    """Weights of `config`, drawn on the device. Raises UnsupportedModel for those of 8 bits."""
    if config.quantization is not None:
        raise UnsupportedModel(
            "weights of 8 bits can't be drawn: take quantization_config out of config.json"
        )
    generator = torch.Generator(device).manual_seed(seed)
    tensors = random_tensors(config, generator, dtype)
    return fuse_weights(tensors, config, dtype=dtype, device=device)


def random_tensors(
    config: ModelConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights of `config` under transformers' names, on the generator's device."""
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
        # Wide enough that next tokens differ clearly, narrow enough that nothing saturates.
        is_norm = len(shape) == 1
        has_offset = not name.endswith(f"{DELTA_NORM}.weight")
        centre = 1.0 - config.family.norm_offset * has_offset
        if is_norm:
            tensors[name] = centre + 0.1 * values
        else:
            inputs = shape[-1] if ".experts." in name else shape[1]
            width = next((own for end, own in _WIDTHS.items() if name.endswith(end)), 1.5)
            tensors[name] = values * width / inputs**0.5
    return tensors

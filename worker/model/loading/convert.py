"""Makes a Hugging Face directory of a GGUF file: `python -m mallee.worker.model.loading.convert GGUF FOLDER`.

A program of its own, since transformers and the widened weights would stay in the memory of a process that
goes on to serve. Its last line on stderr says what went wrong.
"""

import sys
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  (transformers asks for it only after a long load)
import gguf as gguf_package  # noqa: F401
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, target: Path) -> None:
    folder = str(gguf.parent)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.bfloat16)
    _forget_quantization(model)
    model.save_pretrained(target)


def _forget_quantization(model: Any) -> None:
    """The weights are dequantised by now; transformers refuses to save until told so."""
    for owner, attribute in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ):
        if attribute in vars(owner):
            delattr(owner, attribute)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

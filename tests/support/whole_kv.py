"""Answers of models with sliding windows whose layers are one group, which keeps all its KV."""

import msgspec

from bench.doubles.random_model import RandomModel
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive, engine_over


def answer_of_all_kv(
    model: RandomModel, text: list[int], num: int, sampling: Sampling
) -> list[int]:
    """The next tokens of `text`, alone in an engine."""
    split = model.forward(num_blocks=1)
    spec = msgspec.structs.replace(split.spec, groups=())
    forward = TorchForward(
        split.decoder.config, split.decoder.weights, spec, num_blocks=100, block_size=4
    )
    config = EngineConfig(SchedulerConfig(512, 1), 0, prefix_cache=False)
    engine = engine_over(forward, config=config)
    engine.submit(Generate("r", pack_tokens(text), Limits(num, ignore_eos=True), sampling), "g")
    return drive(engine)["r", 0][0]

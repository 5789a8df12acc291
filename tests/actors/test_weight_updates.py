"""New weights of a real, tiny model in a worker that serves: written over the old ones between two lives."""

from pathlib import Path
from typing import Any

from bench.doubles.random_model import random_model
from mallee.actors.build import ALONE, ModelSource
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import Incarnation
from mallee.protocol.messages import Generate, Limits, pack_tokens
from mallee.router.dispatch.jobs import GenerateJob
from mallee.runtime.config import AppConfig
from support.driving import drive, engine_over
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet
from support.waiting import until

PROMPT = [i % 61 for i in range(40)]
LIMITS = Limits(12, ignore_eos=True)


def fresh(seed: int) -> list[int]:
    """The greedy answer of an engine that never had other weights."""
    engine = engine_over(random_model(seed=seed).forward())
    engine.submit(Generate("r", pack_tokens(PROMPT), LIMITS), "g")
    return drive(engine)["r", 0][0]


async def answer(fleet: LiveFleet) -> list[int]:
    stream = await fleet.gateways[0].requests.start(GenerateJob(as_tokens(PROMPT), LIMITS))
    return [token async for delta in stream for token in delta.tokens]


async def test_a_worker_goes_on_with_weights_that_took_the_place_of_its_own(tmp_path: Path) -> None:
    """A checkpoint that doesn't fit leaves the old ones; back and forth, no answer mixes two."""
    for seed in (1, 2):
        random_model(seed=seed).save(tmp_path / str(seed))
    random_model(seed=2, num_hidden_layers=1).save(tmp_path / "other")
    config = AppConfig.model_validate({"model": str(tmp_path / "1"), "engine": {"block_size": 4}})
    forwards: list[Any] = []

    def source(host: Any, forward: Any, capacity: Any) -> ModelSource:
        forwards.append(forward)
        return ModelSource(config, host, forward, Incarnation(1000), capacity, ALONE)

    async with tiny_fleet(random_model(seed=1), 1, source=source) as fleet:
        assert await answer(fleet) == fresh(1)
        table = forwards[0].decoder.weights.embedding.data_ptr()

        async def change(label: str, folder: str) -> str:
            options: dict[str, Any] = {"drain_s": 5.0, "wait_s": 20.0}
            path = str(tmp_path / folder)
            found = await fleet.gateways[0].operator.change_weights(label, path=path, **options)
            await until(lambda: len(fleet.routers[0].workers()) == 1)
            return str(found["workers"][0]["state"])

        assert await change("v1", "2") == "serving"
        assert await answer(fleet) == fresh(2) != fresh(1)
        assert await change("v2", "other") == "failed"
        assert await answer(fleet) == fresh(2)
        assert await change("v3", "1") == "serving"
        assert await answer(fleet) == fresh(1)
        assert forwards[0].decoder.weights.embedding.data_ptr() == table

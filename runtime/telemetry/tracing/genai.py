"""Names of spans' attributes: OpenTelemetry's for generative AI and HTTP, and Mallee's own.

Source: OpenTelemetry semantic conventions, generative AI (opentelemetry-semantic-conventions 0.66b2, where
they are in development: a change of theirs is a change here alone). Attributes for prompts, answers, users
and sessions are left out on purpose.
"""

from typing import Final, TypeAlias

Attributes: TypeAlias = dict[str, str | bool | int | float | list[str]]

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
CHOICES: Final = "gen_ai.request.choice.count"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_K: Final = "gen_ai.request.top_k"
TOP_P: Final = "gen_ai.request.top_p"
FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
OUTPUT_TYPE: Final = "gen_ai.output.type"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

METHOD: Final = "http.request.method"
ROUTE: Final = "http.route"
STATUS: Final = "http.response.status_code"
ERROR: Final = "error.type"

WORKER: Final = "mallee.worker.id"
SHARD: Final = "mallee.shard.id"
BRANCH: Final = "mallee.branch.index"
BRANCHES: Final = "mallee.branch.count"
MOVES: Final = "mallee.branch.moves"
CAPSULE: Final = "mallee.capsule.id"
COMPUTED_TOKENS: Final = "mallee.prompt.computed_tokens"
OVERLAP: Final = "mallee.route.overlap_blocks"
BEST_OVERLAP: Final = "mallee.route.best_overlap_blocks"
REASON: Final = "mallee.route.reason"
HOW: Final = "mallee.route.how"
COMMAND: Final = "mallee.engine.command"
STEP: Final = "mallee.engine.step"
STEPS: Final = "mallee.engine.steps"
PROCESS: Final = "mallee.process"

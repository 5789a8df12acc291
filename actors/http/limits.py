"""What one request may ask for at most."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Checked before anything is tokenized. `api_key` None: no token is asked for."""

    max_body_bytes: int = 8 << 20
    max_branches: int = 128  # branches of one request, over all its prompts
    max_stops: int = 16
    default_max_tokens: int = 16
    inline_body_bytes: int = 32 << 10  # larger bodies are read off the event loop
    api_key: str | None = field(default=None, repr=False)

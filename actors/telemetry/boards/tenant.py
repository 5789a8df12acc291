"""The dashboard of tenants: which one asks for how much, and what it gets."""

from typing import Final

from mallee.actors.telemetry.boards.goals import FIRST_TOKEN_S
from mallee.actors.telemetry.boards.panels import (
    JOB,
    TENANT,
    TOKENS_S,
    Board,
    Limits,
    Panel,
    Query,
    Row,
    each,
)
from mallee.actors.telemetry.boards.queries import Scope, share

_IN: Final = Scope("$__rate_interval", ("job", "tenant"))
_OVER: Final = Scope("$__range", ("job", "tenant"))
_REQUESTS: Final = "mallee_tenant_requests_total"
_REFUSALS: Final = "mallee_tenant_refusals_total"
_TOKENS: Final = "mallee_tenant_tokens_total"
_FIRST: Final = "mallee_tenant_first_token_seconds"
_FOUND: Final = 'kind="cached"'
_PROMPT: Final = 'kind=~"cached|prefill"'
_COMPUTED: Final = 'kind=~"prefill|output"'

_TOTALS: Final = Row(
    "Over the chosen time",
    (
        Panel("Requests", "short", each(_OVER.growth, _REQUESTS, "tenant"), "bars"),
        Panel(
            "Tokens computed",
            "short",
            each(_OVER.growth, _TOKENS, "tenant", where=_COMPUTED),
            "bars",
            text="Prompt tokens that were in no cache, and tokens generated: the measure of fair shares.",
        ),
        Panel(
            "Share of requests that no worker took",
            "percentunit",
            (
                Query(
                    share(_OVER.growth(_REFUSALS, "tenant"), _OVER.growth(_REQUESTS, "tenant")),
                    "{{tenant}}",
                ),
            ),
            "bars",
            limits=Limits(0.01, 0.05),
        ),
    ),
)

_RATES: Final = Row(
    "By time",
    (
        Panel("Requests by time", "reqps", each(_IN.rate, _REQUESTS, "tenant"), "areas"),
        Panel(
            "Generated", TOKENS_S, each(_IN.rate, _TOKENS, "tenant", where='kind="output"'), "areas"
        ),
        Panel(
            "Prompt tokens computed",
            TOKENS_S,
            each(_IN.rate, _TOKENS, "tenant", where='kind="prefill"'),
            "areas",
        ),
        Panel("Refused for lack of room", "reqps", each(_IN.rate, _REFUSALS, "tenant"), "areas"),
        Panel(
            "Share of prompt tokens found",
            "percentunit",
            (
                Query(
                    share(
                        _IN.rate(_TOKENS, "tenant", where=_FOUND),
                        _IN.rate(_TOKENS, "tenant", where=_PROMPT),
                    ),
                    "{{tenant}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Time to first token, on average",
            "s",
            each(_IN.mean, _FIRST, "tenant"),
            limits=Limits(FIRST_TOKEN_S, 2 * FIRST_TOKEN_S),
        ),
    ),
)

BOARD: Final = Board(
    "tenant",
    "Tenant",
    "Requests, refusals, tokens and first tokens by the tenant that an API key names. Tenants beyond"
    " the bound are `others`.",
    (JOB, TENANT),
    (_TOTALS, _RATES),
)

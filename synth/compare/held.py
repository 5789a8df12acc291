"""Models that saw half of the sessions, against the other half: whether they learned or only remember."""

from collections.abc import Callable

from mallee.synth.compare.fits import Source, compare_model, sessions_of
from mallee.synth.compare.lengths import Maker
from mallee.synth.compare.measures import Value
from mallee.synth.compare.views import halves
from mallee.traces.trace import Trace


def held_out(source: Source, fit: Callable[[Trace], Maker], deal: int) -> dict[str, Value] | None:
    """A model fitted to half of the sessions, as `deal` deals them, against the others.

    To be read beside noise of halves, which is the one half itself against the other. None where there
    is only one session. Raises ConfigError, CodecError of fitting.
    """
    sessions = sessions_of(source.trace)
    if sessions.max(initial=-1) < 1:
        return None
    seen, unseen = halves(source.trace, sessions, deal)
    judge = Source(source.reading, unseen, None)
    return compare_model(judge, fit(seen), deal, with_lengths=False).values

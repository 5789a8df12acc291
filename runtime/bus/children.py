"""Child processes that end with their parent, however it ends."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

STOP_TIMEOUT_S = 2.0
_PR_SET_PDEATHSIG = 1


class Pauses:
    """Pauses before the next start of a process that ended: twice as long each time that it ended young."""

    def __init__(self, least_s: float, most_s: float, young_s: float) -> None:
        self.num_young = 0  # ends one after the other
        self._least_s, self._most_s, self._young_s = least_s, most_s, young_s

    def after(self, lived_s: float) -> float:
        """The pause after a life of so many seconds."""
        self.num_young = self.num_young + 1 if lived_s < self._young_s else 0
        return float(min(self._least_s * 2 ** min(self.num_young, 32), self._most_s))


async def end(child: asyncio.subprocess.Process, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End a child: terminate it, and kill it after `timeout_s`."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def death_follower() -> Callable[[], None] | None:
    """A `preexec_fn`, run by a child before its program; None where the kernel can't do it.

    The kernel then kills it when its parent dies (PR_SET_PDEATHSIG, Linux). The signal follows the
    *thread* that starts the child: that must live as long as the process (the event loop's does, a
    pool's may not). Ctrl-C reaches the parent alone, which ends its children in order.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork
    parent = os.getpid()

    def follow() -> None:
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return follow

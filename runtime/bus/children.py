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

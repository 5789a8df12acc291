"""An answer that is a file, sent as its reader takes it."""

import asyncio
import logging
import re
from contextlib import aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mallee.api.errors import ClientGone
from mallee.api.sse import unless_gone
from mallee.gateway.capsules.files.exports import Export
from mallee.protocol.errors import MalleeError

MAX_STALL_S: Final = 20.0
"""In which a reader takes a run of blocks: less than a worker waits with a loan that is not read."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")

_log = logging.getLogger(__name__)


class CapsuleFile(Response):
    """A capsule as a file. One that can't be sent to its end is cut: its length says so."""

    media_type = "application/octet-stream"

    def __init__(self, export: Export, name: str, *, max_stall_s: float = MAX_STALL_S) -> None:
        safe = _UNSAFE.sub("_", name)
        super().__init__(
            headers={
                "content-disposition": f'attachment; filename="{safe}.capsule"',
                "content-length": str(export.nbytes),
                "cache-control": "no-store",
            }
        )
        self._export = export
        self._max_stall_s = max_stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except TimeoutError:
            _log.warning("a client took nothing of a capsule for %g s", self._max_stall_s)
        except MalleeError as error:
            _log.warning("an export broke off: %s", error)
        except (ClientGone, OSError):
            return  # no reader is left
        finally:
            self._export.close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._export.pieces()) as pieces:
            async for piece in pieces:
                async with asyncio.timeout(self._max_stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

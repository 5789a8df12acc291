"""A KV transfer from end to end beside a plain copy of the same bytes, over the same kind of socket.

    python -m bench.migration [--blocks 256] [--rounds 9]

Two processes, each with the KV memory of SmolLM2-135M in float32 (blocks of 720 KiB). Plain: `sendall` of
one buffer and `recv_into` one. Transfer: the server's memory, socket, checksums at both ends, the client's
memory, 16 blocks at a time as a worker's mover does it. Sides take turns; the last line is one JSON object:
GB/s (10^9) as medians, and the medians of each round's ratios.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.measure import machine, rounded, seconds
from mallee.actors.kv_transfer.client import KvClient
from mallee.actors.kv_transfer.server import KvServer
from mallee.protocol.messages import Holder
from mallee.runtime.transport.address import parse_address
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.listener import Listener
from mallee.worker.kv.watch import Rows
from mallee.worker.model.kv_memory import TorchKV
from mallee.worker.transfer.values import BATCH_BLOCKS, Ask

LAYERS, SLOT_NBYTES, BLOCK_SIZE = 30, 2 * 3 * 64 * 4, 16
SECRET = b"the secret of this bench"


def memory(num_blocks: int, fill: int) -> TorchKV:
    slots = torch.full((LAYERS, num_blocks * BLOCK_SIZE, SLOT_NBYTES // 4), float(fill))
    return TorchKV(slots, BLOCK_SIZE)


class WholeMemory:
    """A `Lender`, and the loan of all its blocks."""

    def __init__(self, held: TorchKV, num_blocks: int) -> None:
        self._held = held
        self.record = b""
        self.num_blocks = num_blocks
        self.block_nbytes = held.block_nbytes

    def lend(self, ask: Ask) -> "WholeMemory":
        return self

    def read(self, places: Sequence[int], rows: Rows) -> None:
        self._held.read(places, rows)

    def close(self) -> None:
        pass


def send_plainly(listener: socket.socket, buffer: memoryview) -> None:
    """Send `buffer` for each byte that comes, over one connection."""
    sock, _ = listener.accept()
    while sock.recv(1):
        sock.sendall(buffer)


async def serve(folder: str, num_blocks: int, pipe: Connection) -> None:
    """The process that has the blocks."""
    held = memory(num_blocks, 1)
    listener = Listener(KvServer(WholeMemory(held, num_blocks), Secret(SECRET)), node="here")
    await listener.listen_unix(f"{folder}/kv.sock")
    await listener.listen_tcp("127.0.0.1")
    buffer = memoryview(np.full(num_blocks * held.block_nbytes, 1, np.uint8))
    places: list[Any] = []
    for family, place in (
        (socket.AF_UNIX, f"{folder}/plain.sock"),
        (socket.AF_INET, ("127.0.0.1", 0)),
    ):
        plain = socket.socket(family)
        plain.bind(place)
        plain.listen()
        places.append(plain.getsockname())
        threading.Thread(target=send_plainly, args=(plain, buffer), daemon=True).start()
    pipe.send((str(listener.address), places))
    await asyncio.to_thread(pipe.recv)
    await listener.close()


def run_server(folder: str, num_blocks: int, pipe: Connection) -> None:
    asyncio.run(serve(folder, num_blocks, pipe))


def plain_copy(family: int, place: Any, nbytes: int) -> Callable[[], None]:
    sock = socket.socket(family)
    sock.connect(place)
    into = memoryview(np.zeros(nbytes, np.uint8))

    def copy() -> None:
        sock.send(b"x")
        done = 0
        while done < nbytes:
            done += sock.recv_into(into[done:])

    return copy


def transfer(address: str, node: str, num_blocks: int) -> Callable[[], None]:
    held = memory(num_blocks, 0)
    staged = np.empty((BATCH_BLOCKS, held.block_nbytes), np.uint8)
    client = KvClient("bench", Secret(SECRET), node=node)

    def read() -> None:
        got = client.lend(Ask(Holder("w0", 1, address, 0), tuple(range(num_blocks)), ""))
        for i in range(0, num_blocks, BATCH_BLOCKS):
            part = range(i, min(i + BATCH_BLOCKS, num_blocks))
            rows = staged[: len(part)]
            got.read(part, rows)
            held.write(part, rows)
        got.close()

    return read


def figures(num_blocks: int, rounds: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = spawn.Process(target=run_server, args=(folder, num_blocks, theirs), daemon=True)
        child.start()
        address, (unix, tcp) = ours.recv()
        assert parse_address(address).tcp is not None
        nbytes = num_blocks * LAYERS * SLOT_NBYTES * BLOCK_SIZE
        sides = {
            "unix_plain": plain_copy(socket.AF_UNIX, unix, nbytes),
            "unix_loan": transfer(address, "here", num_blocks),
            "tcp_plain": plain_copy(socket.AF_INET, tcp, nbytes),
            "tcp_loan": transfer(address, "elsewhere", num_blocks),
        }
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds + 1):  # the first warms up
            for name, work in sides.items():
                taken_s = seconds(work)
                if i:
                    speeds[name].append(nbytes / taken_s / 1e9)
        ours.send("end")
        child.join()
        assert not list(Path(folder).glob("kv.sock"))
    ratios = {
        kind: [a / b for a, b in zip(speeds[f"{kind}_loan"], speeds[f"{kind}_plain"], strict=True)]
        for kind in ("unix", "tcp")
    }
    return {
        "mb": nbytes / 1e6,
        "gb_per_s": {name: median(each) for name, each in speeds.items()},
        "ratios": {kind: median(each) for kind, each in ratios.items()},
        "all_ratios": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(json.dumps(rounded(figures(options.blocks, options.rounds)) | machine()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

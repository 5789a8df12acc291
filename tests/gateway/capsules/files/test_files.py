"""Exports and imports over a lender that is a test's: what goes out comes in, and nothing torn does."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mallee.gateway.capsules.files.imports import Import, Received
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    CorruptExport,
    IncompatibleCapsule,
    MalleeError,
    StorageFull,
    Unavailable,
    UnknownCapsule,
)
from mallee.protocol.model import WeightVersion
from mallee.worker.capsules.record import decode_record
from mallee.worker.transfer.values import Ask
from support.files import BLOCK_SIZE, SPEC, Desk, record, rows, spec
from support.waiting import until


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    made = Desk(tmp_path)
    yield made
    made.pool.shutdown()
    assert list(tmp_path.iterdir()) == [], "a file has a name"


async def taken(desk: Desk, data: bytes, size: int = 1 << 16) -> tuple[Import, Received]:
    """The import of a whole file, which is to be closed."""
    incoming = await desk.imports.begin(desk.model, BLOCK_SIZE)
    try:
        for i in range(0, len(data), size):
            await incoming.feed(data[i : i + size])
        return incoming, await incoming.finish()
    except BaseException:
        incoming.close()
        raise


async def file_of(desk: Desk, num: int = 11) -> bytes:
    kept = record(desk.model, num=num)
    return await desk.sent(desk.shelf.put("c", kept, rows(desk.model, num=num)))


@pytest.mark.parametrize(("num", "size"), [(11, 13), (1, 5), (62, 100), (62, 1 << 20)])
@pytest.mark.parametrize("window", [None, 9])
async def test_what_goes_out_is_lent_when_it_has_come_in(
    tmp_path: Path, num: int, size: int, window: int | None
) -> None:
    """S8, part: the record but for its owner, and every byte of KV, windows' too."""
    model = spec(window=window)
    desk = Desk(tmp_path, model=model)
    data = await file_of(desk, num)
    assert b"secret" not in data
    assert b"5c09e" not in data
    incoming, found = await taken(desk, data, size)
    assert (found.nbytes, found.record.boundary) == (len(data), num)
    loan = desk.lender.lend(Ask(found.holder, (), model.identity))
    want = rows(model, num=num)
    got = np.empty((len(want), loan.block_nbytes), np.uint8)
    assert loan.num_blocks == len(want)
    loan.read(range(len(want)), got)
    assert [row.tobytes() for row in got] == want
    lent = decode_record(loan.record)
    assert lent.fingerprint == model.identity
    assert lent.continuation == record(model, num=num).continuation
    incoming.close()
    with pytest.raises(UnknownCapsule):
        desk.lender.lend(Ask(found.holder, (), model.identity))
    loan.read([0], got[:1]) if want else None  # what is lent is there until it is given back
    loan.close()
    loan.close()
    with pytest.raises(MalleeError, match="over"):
        loan.read([0], np.empty((1, loan.block_nbytes), np.uint8))
    await until(lambda: (desk.spools.num_open, desk.spools.nbytes) == (0, 0))
    await until(lambda: all(each.is_closed for each in desk.shelf.loans))
    desk.pool.shutdown()


async def test_weights_that_change_meanwhile_get_no_kv(desk: Desk) -> None:
    incoming, found = await taken(desk, await file_of(desk))
    changed = spec(weights=WeightVersion(1, "v2"))
    with pytest.raises(IncompatibleCapsule):
        desk.lender.lend(Ask(found.holder, (), changed.identity))
    incoming.close()


async def test_a_forged_block_is_refused_though_its_sum_is_right(desk: Desk) -> None:
    wrong = rows()
    wrong[1] = np.full(len(wrong[1]) // 4, np.inf, np.float32).tobytes()
    data = await desk.sent(desk.shelf.put("c", record(), wrong))
    with pytest.raises(CorruptExport, match="block 1"):
        await taken(desk, data)


async def test_imports_and_exports_at_once_are_bounded(desk: Desk) -> None:
    holder = desk.shelf.put("c", record(), rows())
    begun = [await desk.imports.begin(SPEC, BLOCK_SIZE) for _ in range(2)]
    with pytest.raises(Unavailable, match="2 capsules are being imported"):
        await desk.imports.begin(SPEC, BLOCK_SIZE)
    sent = [await desk.exports.begin(holder, SPEC, BLOCK_SIZE) for _ in range(2)]
    with pytest.raises(Unavailable, match="2 capsules are being exported"):
        await desk.exports.begin(holder, SPEC, BLOCK_SIZE)
    for each in (*begun, *sent):
        each.close()
        each.close()
    await until(lambda: desk.spools.num_open == 0)
    (await desk.imports.begin(SPEC, BLOCK_SIZE)).close()
    (await desk.exports.begin(holder, SPEC, BLOCK_SIZE)).close()
    assert desk.exports.num_open == 0


async def test_a_full_spool_or_disk_refuses_an_import_and_frees_its_room(tmp_path: Path) -> None:
    small = Desk(tmp_path, max_spool_nbytes=1200)
    data = await file_of(small)  # 3 blocks of 512 bytes
    with pytest.raises(StorageFull, match=r"imports\.spool_gib.* 1024 of 1200"):
        await taken(small, data)
    await until(lambda: small.spools.num_open == 0)
    assert small.spools.nbytes == 0
    small.pool.shutdown()

    desk, limits = Desk(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        with pytest.raises(StorageFull):
            await taken(desk, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await until(lambda: desk.spools.num_open == 0)
    incoming, _ = await taken(desk, data)  # there is room again
    incoming.close()
    desk.pool.shutdown()


async def test_a_slow_reader_has_a_run_read_ahead_and_no_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mallee.gateway.capsules.files.exports.RUN_NBYTES", 1024)
    kept, blocks = record(num=62), rows(num=62)
    export = await desk.exports.begin(desk.shelf.put("c", kept, blocks), SPEC, BLOCK_SIZE)
    pieces = export.pieces()
    for taken_so_far in range(1, 6):
        await anext(pieces)
        assert export._next is not None
        await asyncio.wait_for(asyncio.wrap_future(export._next), 5)
        assert desk.shelf.num_read <= 2 * (taken_so_far + 2)
    await pieces.aclose()
    export.close()
    await until(lambda: desk.shelf.loans[0].is_closed)
    assert desk.shelf.num_read < len(blocks)


async def test_a_record_of_another_shape_than_the_model_is_never_sent(desk: Desk) -> None:
    holder = desk.shelf.put("c", record(), [b"1234"] * 3)
    with pytest.raises(MalleeError, match="no KV of m"):
        await desk.sent(holder)
    broken = desk.shelf.put("d", record(), rows())
    desk.shelf.capsules["d"] = encode([1]), rows()
    with pytest.raises(MalleeError, match="record"):
        await desk.sent(broken)

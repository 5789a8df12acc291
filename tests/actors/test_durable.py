"""Workers' disks, as their settings make them: durable capsules, the secret that tags their ids, faults."""

import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.random_model import random_model
from mallee.actors.build import Surroundings, load_forward, make_engine
from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.orphans import HoldName, Orphans
from mallee.actors.hosting.worker import Capacity
from mallee.actors.secret import build_ids, check_secret, file_of, secret_of
from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import COMMON, Incarnation, RequestId, WorkerId
from mallee.protocol.messages import Demote, Fork, Limits, Prefill, Sampling, pack_tokens
from mallee.runtime.config import AppConfig
from mallee.runtime.transport.greeting import Secret
from mallee.worker.engine import Engine
from mallee.worker.storage.files import CATALOGUE
from mallee.worker.transfer.values import DISK
from support.dict_store import DictStore
from support.run_out import run_out
from support.tokenizers_made import byte_level
from support.waiting import until

PROMPT = [3 + i % 29 for i in range(40)]


class Ray:
    """One life of Ray on one machine: its store, the app's secret in it, and workers one at a time."""

    def __init__(self, model: Path, disk: Path, fleet: str = "default") -> None:
        engine = {"kv_tokens": 1024, "dtype": "float32", "disk_path": str(disk)}
        given = {"model": str(model), "engine": engine, "fleet": fleet}
        self.config = AppConfig.model_validate(given)
        self.store = DictStore()
        secret = secret_of(self.store, "app", file_of(self.config))
        self.ids = build_ids(Secret(secret))
        self._lives = 0

    def worker(self, name: str = "w0", orphans: Orphans | None = None) -> Engine:
        self._lives += 1
        forward, life = load_forward(self.config, 1), Incarnation(self._lives)
        around = Surroundings(ids=self.ids, orphans=orphans)
        return make_engine(self.config, forward, WorkerId(name), life, around)

    def make_durable(self, engine: Engine) -> str:
        """A capsule on disk, with an id as gateways draw it."""
        request = self.ids.new(COMMON)
        run_out(engine, Prefill(request, pack_tokens(PROMPT)))
        _, (reply,) = run_out(engine, Demote(self.ids.new(COMMON), f"{request}.0", DISK))
        assert reply.status is not None, reply.error
        assert reply.status.tier == "disk"
        return f"{request}.0"


def refusal(ray: Ray, engine: Engine) -> str | None:
    """Of the demotion of a capsule to disk."""
    request = ray.ids.new(COMMON)
    run_out(engine, Prefill(request, pack_tokens(PROMPT)))
    _, (reply,) = run_out(engine, Demote(ray.ids.new(COMMON), f"{request}.0", DISK))
    assert len(fork(engine, f"{request}.0")) == 8, "it serves all the same"
    return None if reply.error is None else reply.error[0]


def fork(engine: Engine, capsule: str) -> list[int]:
    request = RequestId(f"f{engine.stats().num_output_tokens}")
    command = Fork(request, capsule, (b"",), Limits(8), Sampling(seed=7))
    return run_out(engine, command).tokens[request]


def unreadable(engine: Engine) -> int:
    tiers = engine.stats().tiers
    assert tiers is not None
    return tiers.num_unreadable


def test_ids_of_durable_capsules_are_right_after_ray_has_ended(model: Path, tmp_path: Path) -> None:
    """F24, S16, X28, part: with the default settings; all that Ray kept is gone, the disk is there."""
    before = Ray(model, tmp_path)
    engine = before.worker()
    kept = before.make_durable(engine)
    want = fork(engine, kept)
    engine.close()

    after = Ray(model, tmp_path)
    assert after.ids.belongs(kept, COMMON)
    engine = after.worker()
    assert fork(engine, kept) == want
    assert engine.stats().num_prefill_tokens == 0
    assert unreadable(engine) == 0
    engine.close()


def test_all_processes_that_make_the_secret_at_once_get_one(tmp_path: Path) -> None:
    file = tmp_path / "kv" / "default" / "secret"
    store = DictStore()
    with ThreadPoolExecutor(8) as pool:
        of_one_ray = set(pool.map(lambda _: secret_of(store, "app", file), range(32)))
    assert of_one_ray == {file.read_bytes()}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["secret"]
    assert secret_of(store, "app") in of_one_ray, "gateways have it from Ray"
    assert secret_of(store, "another") not in of_one_ray


def test_a_node_with_a_disk_of_its_own_takes_the_fleets_secret_or_refuses(tmp_path: Path) -> None:
    here, there, other = (tmp_path / name / "secret" for name in ("here", "there", "other"))
    store, take = DictStore(), secret_of
    with pytest.raises(ConfigError, match=r"another node may have it: give links\.secret_file"):
        take(store, "app", here, may_make=False)
    assert not here.exists()
    made = take(store, "app", here)
    assert take(store, "app", there, may_make=False) == made == there.read_bytes()
    assert take(DictStore(), "app", there, may_make=False) == made, "Ray is new, the disk is not"
    take(DictStore(), "app", other)
    with pytest.raises(ConfigError, match=r"another secret .* give links\.secret_file="):
        take(store, "app", other)
    other.write_bytes(b"")
    with pytest.raises(ConfigError, match="has 0 bytes, no secret"):
        take(store, "app", other)


def test_a_disk_without_its_secret_is_not_used(model: Path, tmp_path: Path) -> None:
    """The disk can't be written while Ray has the secret: workers serve, and promise nothing durable."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"can't be read.* give links\.secret_file"):
        Ray(model, tmp_path / "file")
    ray = Ray(model, tmp_path / "disk")
    os.remove(tmp_path / "disk" / "default" / "secret")
    engine = ray.worker()
    assert refusal(ray, engine) is not None
    engine.close()


def test_a_disk_in_use_or_broken_stops_no_worker(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F24, part: while one worker has the disk, another of its name serves without it."""
    ray = Ray(model, tmp_path)
    first, second = ray.worker(), ray.worker()
    assert f"in use by process {os.getpid()}" in caplog.text
    assert refusal(ray, second) == "invalid_parameter"
    (tmp_path / "default" / "w1").write_text("no folder")
    broken = ray.worker("w1")
    assert "w1 serves without its disk" in caplog.text
    assert "look after the disk" in caplog.text
    assert refusal(ray, broken) == "invalid_parameter"
    for engine in (first, second, broken):
        engine.check()
        engine.close()


def test_capsules_of_other_weights_are_not_taken_in(model: Path, tmp_path: Path) -> None:
    """F24, part: the volume outlives them; its blocks are found by nothing."""
    ray = Ray(model, tmp_path / "disk")
    leave_behind(ray, "w0")
    random_model("llama", 6, vocab_size=320).save(tmp_path / "model")
    byte_level().save(str(tmp_path / "model" / "tokenizer.json"))
    ray = Ray(tmp_path / "model", tmp_path / "disk")
    other = ray.worker()
    assert other.snapshot().capsules == ()
    assert other.snapshot().disk_hashes == b""
    ray.make_durable(other)
    other.close()


def test_an_object_store_needs_a_secret_of_the_operators() -> None:
    settings = {"model": "m", "engine": {"disk_path": "s3://bucket/kv"}}
    with pytest.raises(ValueError, match=r"disk_path='s3://bucket/kv' needs links\.secret_file"):
        AppConfig.model_validate(settings)
    AppConfig.model_validate({**settings, "links": {"secret_file": "/secret"}})


def lose_secret(folder: Path) -> None:
    (folder / "default" / "secret").unlink()


def damage(folder: Path) -> None:
    """A byte in the record's body."""
    part = folder / "default" / "w0"
    with closing(sqlite3.connect(part / CATALOGUE)) as catalogue:
        sql = "SELECT slot, block_nbytes FROM blocks JOIN identities ON id = identity WHERE is_body"
        slot, nbytes = catalogue.execute(sql).fetchone()
    with (part / "blocks-1").open("r+b") as blocks:
        blocks.seek(slot * nbytes + 20)
        byte = blocks.read(1)
        blocks.seek(-1, os.SEEK_CUR)
        blocks.write(bytes([byte[0] ^ 1]))


def cut(folder: Path) -> None:
    os.truncate(folder / "default" / "w0" / CATALOGUE, 5000)


@pytest.mark.parametrize(
    ("spoil", "reason", "fault"),
    [
        (lose_secret, "secret was", "is missing: put it back"),
        (damage, "its sum differs", ""),
        (cut, "is not what was written", ""),
    ],
)
def test_capsules_that_are_found_and_can_not_be_used_are_logged_and_counted(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    reason: str,
    fault: str,
) -> None:
    """X28, part: and `mallee check --files` tells beforehand that a secret is missing, or another one."""
    before = Ray(model, tmp_path)
    engine = before.worker()
    before.make_durable(engine)
    engine.close()
    check_secret(before.config)
    spoil(tmp_path)
    if fault:
        with pytest.raises(ConfigError, match=fault):
            check_secret(before.config)
    after = Ray(model, tmp_path)
    if fault:
        with pytest.raises(ConfigError, match="1 of 1 capsules there are tagged by another secret"):
            check_secret(after.config)
    engine = after.worker()
    engine.step()
    assert engine.snapshot().capsules == ()
    assert unreadable(engine) == 1
    load = engine.load().use
    assert load is not None
    assert load.tiers is not None
    assert load.tiers.num_unreadable == 1
    assert "w0: 1 capsules on its disk can't be used, the first because:" in caplog.text
    assert reason in caplog.text
    engine.close()


# Parts of the disk whose worker is gone


@contextmanager
def gone(name: str) -> Iterator[bool]:
    yield True


def heir(ray: Ray, name: str, hold: HoldName = gone) -> tuple[Engine, Orphans]:
    orphans = Orphans(Path(ray.config.disk_place("")), WorkerId(name), hold)
    return ray.worker(name, orphans), orphans


def leave_behind(ray: Ray, name: str) -> str:
    """A capsule on the disk of a worker that is gone."""
    engine = ray.worker(name)
    capsule = ray.make_durable(engine)
    engine.close()
    return capsule


def files(ray: Ray, name: str) -> list[str]:
    return [each.name for each in Path(ray.config.disk_place(name)).glob("blocks-*")]


def test_a_worker_adopts_capsules_of_one_that_is_gone_when_it_starts(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """X28, part: the name comes back later, and shares nothing; a part in use or with an heir is left."""
    ray = Ray(model, tmp_path)
    kept = leave_behind(ray, "w5")
    own = leave_behind(ray, "w0")
    other, _ = heir(ray, "w1", lambda name: nullcontext(False))
    engine, _ = heir(ray, "w0")
    for capsule in (kept, own):
        assert len(fork(engine, capsule)) == 8
    assert engine.stats().num_prefill_tokens == 0
    assert "w0 adopted the capsules of w5" in caplog.text or files(ray, "w5") == []
    back = ray.worker("w5")
    back.step()
    assert back.snapshot().capsules == ()
    for each in (other, engine, back):
        each.close()
    again = ray.worker("w0")
    assert len(fork(again, kept)) == 8
    assert again.stats().num_prefill_tokens == 0
    again.close()


def test_a_worker_that_runs_adopts_too_and_may_end_in_the_middle(
    model: Path, tmp_path: Path
) -> None:
    """X28, part: what has not come when it ends is adopted in the next life."""
    ray = Ray(model, tmp_path)
    engine, orphans = heir(ray, "w0")
    gone_ones = [leave_behind(ray, "w1"), leave_behind(ray, "w1")]
    with ExitStack() as held:
        other = orphans._open("w1", held)
        assert other is not None
        late, _ = heir(ray, "w3")  # though it holds the name too: there is a lock
        assert files(ray, "w1"), "nothing was taken"
        late.close()
        done: list[object] = []
        engine.adopt(other, done.append)
        engine.close()  # one is on its way
    assert not done
    engine, orphans = heir(ray, "w0")
    for capsule in gone_ones:
        assert len(fork(engine, capsule)) == 8
    last = leave_behind(ray, "w2")
    with ExitStack() as held:
        other = orphans._open("w2", held)
        assert other is not None
        engine.adopt(other, done.append)
        while not done:
            engine.step()
    assert done == [[]]
    assert files(ray, "w2") == []
    assert len(fork(engine, last)) == 8
    assert engine.stats().num_prefill_tokens == 0
    engine.check()
    engine.close()


@pytest.fixture
def ray(model: Path, tmp_path: Path) -> Ray:
    """With a capsule that a worker w1 left."""
    made = Ray(model, tmp_path)
    leave_behind(made, "w1")
    return made


async def test_a_worker_looks_for_capsules_of_others_while_it_runs(ray: Ray) -> None:
    """X28, part: of a name that was not gone at its start, and that is held until they have come."""
    held: list[str] = []
    names = iter([False, True])

    @contextmanager
    def hold(name: str) -> Iterator[bool]:
        held.append(name)
        yield next(names)
        held.append(f"{name} is free")

    engine, orphans = heir(ray, "w0", hold)
    host = Host("w0", LocalBus(LocalHub()), fleet="test", clock=time.monotonic)
    add_engine(host, engine, Capacity(16, 64, 8))
    await host.start()
    host.tasks.spawn(orphans.watch(host))
    await until(lambda: len(held) == 4)
    assert held == ["w1", "w1 is free"] * 2
    assert files(ray, "w1") == []
    assert host.workers[WorkerId("w0")].is_serving
    await host.close()

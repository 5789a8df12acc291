"""A mocked fleet as `mallee mock` starts it: processes, sockets, NATS, HTTP, the openai client. K21, K28."""

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from mallee.actors.mock import process as loops
from mallee.actors.mock import stack
from mallee.actors.mock.pacer import Pacer
from mallee.actors.mock.stack import MockStack
from mallee.protocol.errors import ConfigError, InternalError
from mallee.runtime.addresses import free_port
from mallee.runtime.config import EngineSettings
from support.mock_scene import make_folder, mock_config
from support.task_groups import FLIP_S, groups, running
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


async def complete(client: openai.AsyncOpenAI, number: int, **options: Any) -> Any:
    options = {"max_tokens": 6, "extra_body": {"ignore_eos": True}, **options}
    return await client.completions.create(
        model="tiny", prompt=f"a tree of {number} trunks and one root " * 3, **options
    )


async def test_a_thousand_engines_of_one_process_register_and_serve_over_nats(folder: Path) -> None:
    """K21: each of them answers one request of the client."""
    config = mock_config(
        folder,
        mock__engines_per_worker=1000,
        engine__kv_tokens=256,
        routing__policy="round_robin",
        lease_period_s=5.0,
    )
    async with (
        MockStack(config, port=free_port()) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        workers: list[str] = []
        for begin in range(0, 1000, 50):
            answers = await asyncio.gather(*(complete(client, begin + i) for i in range(50)))
            workers += [answer.choices[0].mallee["worker"] for answer in answers]
        assert sorted(workers) == sorted(f"w{i}" for i in range(1000))
        assert stack.router.stats().gaps == 0


async def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no-such"):
        await MockStack(mock_config(folder, mock__timing="no-such", mock__speedup=1.0)).start()
    with pytest.raises(ConfigError, match="only mocked engines"):
        MockStack(mock_config(folder).model_copy(update={"engine": EngineSettings(kind="model")}))
    with pytest.raises(ConfigError, match=r"max_workers=2: .* use `mallee serve "):
        MockStack(mock_config(folder, autoscaling__max_workers=2))


async def test_a_killed_process_of_engines_comes_back_and_its_streams_go_on_elsewhere(
    folder: Path,
) -> None:
    """Each stream has all of its tokens, whichever process drew them, and the workers live again."""
    config = mock_config(folder, workers=2, mock__engines_per_worker=1, mock__speedup=1.0)
    async with (
        MockStack(config, port=free_port()) as stack,
        openai.AsyncOpenAI(
            base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        lives = {view.worker: view.incarnation for view in stack.router.workers()}
        asked = [asyncio.create_task(complete(client, i, max_tokens=200)) for i in range(8)]
        await until(lambda: sum(view.rows for view in stack.router.workers()) == len(asked))
        first = stack.children[0].pid
        stack.children[0].kill()
        answers = await asyncio.gather(*asked)
        assert [answer.usage.completion_tokens for answer in answers] == [200] * len(asked)
        await until(lambda: len(stack.router.workers()) == 2, timeout_s=60.0)
        now = {view.worker: view.incarnation for view in stack.router.workers()}
        changed = {worker for worker in lives if now[worker] != lives[worker]}
        assert changed == {"w0"}
        assert stack.children[0].pid != first


async def test_a_process_that_ends_right_after_its_start_comes_back_later_each_time_and_is_told_of_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = list[float]()

    async def spawn(self: MockStack, number: int) -> None:
        """It says that it is ready, and ends."""
        starts.append(asyncio.get_running_loop().time())
        self.children[number] = await asyncio.create_subprocess_exec(
            "echo", "ready", stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
        )

    monkeypatch.setattr(stack, "PAUSES_S", (0.05, 0.3, 10.0))
    async with MockStack(mock_config(folder), port=free_port()) as made:
        monkeypatch.setattr(MockStack, "_spawn", spawn)
        made.children[0].kill()
        await until(lambda: len(starts) == 4)
    first, second, third = (after - before for before, after in pairwise(starts))
    assert first >= 0.2
    assert min(second, third) >= 0.3
    (told,) = [each for each in caplog.messages if "it is started again" in each]
    assert told.endswith("it is started again, and later each time that it ends at once")


async def test_a_stack_ends_if_a_killed_process_does_not_start_again_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: MockStack, number: int) -> None:
        await asyncio.Event().wait()

    async with MockStack(mock_config(folder), port=free_port()) as made:
        monkeypatch.setattr(MockStack, "_ready", never)
        monkeypatch.setattr(stack, "START_TIMEOUT_S", 0.01)
        made.children[0].kill()
        with pytest.raises(InternalError, match="did not start again in 0 s"):
            await made.wait()


async def test_a_stack_ends_whichever_task_of_its_gateway_was_killed(folder: Path) -> None:
    """Also those of the bus, the broker and the links. Where Ray replaces it, `mallee mock` ends."""
    config = mock_config(folder, workers=2)
    seen: Counter[str] = Counter()
    while True:
        with groups() as made:
            async with MockStack(config, port=0) as stack:
                left = [each for each in running(made) if not seen[each[0]]]
                if not left:
                    return
                name, task = left[0]
                seen[name] += 1
                async with asyncio.timeout(FLIP_S):
                    waiting = asyncio.create_task(stack.wait())
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(InternalError, match="failed"):
                        await waiting


def test_the_loop_of_a_process_wakes_no_engine_again_and_again() -> None:
    """A loop's timers may ring a little early: those of uvloop count milliseconds."""

    async def body() -> None:
        now = asyncio.get_running_loop().time
        pacer = Pacer(now)

        class Sleeper:
            due, num_woken = now(), 0

            def wake(self) -> None:
                assert now() >= self.due
                self.due, self.num_woken = self.due + 0.0014, self.num_woken + 1
                pacer.at(self.due, self)

        sleeper = Sleeper()
        pacer.at(sleeper.due, sleeper)
        await until(lambda: sleeper.num_woken > 50)
        assert pacer.stats().wakes <= 3 * sleeper.num_woken
        pacer.close()

    loops.run(body())

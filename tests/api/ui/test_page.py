"""The page at `/ui` in a real browser, before a fleet of mocked engines."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from mallee.actors.mock.stack import MockStack
from mallee.gateway.access.keys import NewKey, new_key
from mallee.runtime.addresses import free_port
from support.browser import MISSING, WAIT_MS, browser_page
from support.mock_scene import make_folder, mock_config
from support.waiting import until_asked

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [
    pytest.mark.process,
    pytest.mark.nats,
    pytest.mark.timeout(120),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]

ACME, EVIL, ROOT = (
    new_key("acme", "client", None),
    new_key("evil", "client", None),
    new_key("root", "operator", None),
)
DOCUMENT = (
    "a mallee is a tree of many trunks from one root, which re-sprouts after fire and rain " * 4
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[MockStack]:
    """Without keys: everybody is the operator."""
    config = mock_config(make_folder(tmp_path), mock__speedup=1.0, workers=2)
    async with MockStack(config, port=free_port()) as made:
        yield made


async def complete(client: httpx.AsyncClient, session: str, **more: Any) -> list[str]:
    """The capsules that the answers leave."""
    body = {"prompt": DOCUMENT, "max_tokens": 4, "ignore_eos": True, **more}
    answer = await client.post("/v1/completions", json={**body, "mallee": {"session": session}})
    assert answer.status_code == 200, answer.text
    return [choice["mallee"]["capsule"] for choice in answer.json()["choices"]]


async def nodes(client: httpx.AsyncClient, session: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get(f"/v1/sessions/{session}")).json()["nodes"]
    return found


async def live_branches(page: "Page", num: int) -> None:
    """Wait until so many branches are drawn as running."""
    from playwright.async_api import expect

    await expect(page.locator(".node.live")).to_have_count(num, timeout=WAIT_MS)


async def test_a_fork_by_click_arrives_and_a_prune_ends_its_streams(stack: MockStack) -> None:
    """X12: in a browser; in a terminal by the tests of `mallee top`."""
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=30) as client:
        (capsule,) = await complete(client, "grove")
        async with browser_page() as page:
            await page.goto(f"{stack.base_url}/ui")
            await page.locator(f'.node[data-name="{capsule}"]').click()
            await page.locator("#details pre.text", has_text="mallee").wait_for()
            form = page.locator("form.fork")
            await form.locator("[name=n]").fill("3")
            await form.locator("[name=max_tokens]").fill("1500")
            await form.get_by_role("button", name="Fork").click()
            await live_branches(page, 3)
            assert await page.locator(".says.live").count() == 3, "each shows the end of its text"

            # A branch is ended by itself; the others go on.
            await page.locator(".node.live").nth(0).click()
            await page.get_by_role("button", name="End this branch").click()
            await page.locator("#state", has_text="the branch is ended").wait_for()
            await live_branches(page, 2)

            await page.locator(f'.node[data-name="{capsule}"]').click()
            prune = page.get_by_role("button", name="Prune below")
            await prune.click()
            await page.get_by_role("button", name="press again").wait_for()
            assert await page.locator(".node.live").count() == 2, "nothing has happened yet"
            await prune.click()
            await page.locator("#state", has_text="1 requests ended").wait_for()
            await live_branches(page, 0)

            async def is_quiet() -> bool:
                found = (await client.get("/v1/sessions/grove")).json()
                return found["running"] == 0

            await until_asked(is_quiet)


async def test_a_prefix_that_answers_share_is_drawn_once(stack: MockStack) -> None:
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=30) as client:
        one, *others = await complete(client, "grove", n=3)
        fork = {"suffixes": [" one", " two"], "max_tokens": 2, "mallee": {"session": "grove"}}
        forked = (await client.post(f"/v1/capsules/{one}/fork", json=fork)).json()
        below = [choice["mallee"]["capsule"] for choice in forked["choices"]]
        await client.post("/v1/sessions/grove/fork", json={"session": "other", "capsule": one})
        async with browser_page() as page:
            await page.goto(f"{stack.base_url}/ui")
            await page.locator(".node").nth(6).wait_for()
            names = [
                await each.get_attribute("data-name") for each in await page.locator(".node").all()
            ]
            request = one.rpartition(".")[0]
            prompt, root = f"{request} prompt", f"other from {one}"
            assert sorted(map(str, names)) == sorted([prompt, one, *others, *below, root])
            boxes = {}
            for name in names:
                boxes[name] = await page.locator(f'.node[data-name="{name}"]').bounding_box()
            ends = {name: box["x"] + box["width"] for name, box in boxes.items() if box}
            for name in (one, *others):
                assert ends[prompt] < boxes[name]["x"], "answers begin where their prompt ends"
            for name in below:
                assert ends[one] < boxes[name]["x"]
            # By keys: down to the first answer, on to what went on from it, and back.
            for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
                await page.keyboard.press(key)
            assert await page.locator(".node.chosen").get_attribute("data-name") == below[0]
            await page.keyboard.press("ArrowLeft")
            assert await page.locator(".node.chosen").get_attribute("data-name") == one
            await page.locator("#details", has_text="Placed on w").wait_for()


async def test_prompts_that_begin_alike_are_one_tree(stack: MockStack) -> None:
    """As the parallel branches of a LangGraph ask: each names the session and its whole prompt."""
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=30) as client:
        asked = ("A?", "B?", "C?")
        capsules = [(await complete(client, "grove", prompt=DOCUMENT + each))[0] for each in asked]
        async with browser_page() as page:
            await page.goto(f"{stack.base_url}/ui")
            await page.locator(".node").nth(len(capsules)).wait_for()
            boxes = {
                str(await each.get_attribute("data-name")): await each.bounding_box()
                for each in await page.locator(".node").all()
            }
            (shared,) = boxes.keys() - {*capsules}
            assert " prefix " in shared
            begin = boxes[shared]
            assert begin is not None
            for name in capsules:
                box = boxes[name]
                assert box is not None
                assert box["x"] > begin["x"] + begin["width"], "each begins where they part"
            await page.locator(f'.node[data-name="{shared}"]').click()
            await page.locator("#details", has_text="Its request: ended").wait_for()


async def test_a_capsule_that_is_gone_is_not_asked_for(stack: MockStack) -> None:
    async with (
        httpx.AsyncClient(base_url=stack.base_url, timeout=30) as client,
        browser_page() as page,
    ):
        bad: list[str] = []
        page.on("response", lambda each: bad.append(each.url) if each.status >= 400 else None)
        (capsule,) = await complete(client, "grove")
        assert (await client.delete(f"/v1/capsules/{capsule}")).status_code == 200
        await page.goto(f"{stack.base_url}/ui")
        await page.locator(f'.node[data-name="{capsule}"]').click()
        await page.locator("#details pre.text", has_text="It is held no more.").wait_for()
        assert bad == []


async def test_asking_searching_and_workers(stack: MockStack) -> None:
    async with browser_page() as page:
        await page.goto(f"{stack.base_url}/ui")
        await page.get_by_text("No sessions yet.").wait_for()
        await page.locator("#ask [name=text]").fill("a mallee is")
        await page.locator("#ask button").click()
        await page.locator(".row.session", has_text="page-").wait_for()
        await page.locator("#filter").fill("bold")
        await page.locator("#ask [name=session]").fill("<b>bold")
        await page.locator("#ask [name=text]").fill("a mallee is <script>alert(1)</script>")
        await page.locator("#ask [name=n]").fill("1")
        await page.locator("#ask [name=max_tokens]").fill("6")
        await page.locator("#ask button").click()
        await page.locator(".row.session", has_text="<b>bold").wait_for()
        await page.locator(".node.kept").click()
        await page.locator("#details pre.text", has_text="<script>alert(1)</script>").wait_for()
        await page.locator("form.search [name=policy]").select_option("beam")
        await page.locator("form.search button").click()
        await page.locator("#state", has_text="beam: best 0.").wait_for()
        await page.locator(".says .value").first.wait_for()

        await page.locator("#tab-workers").click()
        await page.locator(".card", has_text="w1").wait_for()
        assert await page.locator(".card .ready").count() == await page.locator(".card").count()


async def test_keys_part_tenants_and_workers_are_an_operators(tmp_path: Path) -> None:
    """F7, part: nothing of another tenant is visible, whichever key the page had before."""
    file, folder = tmp_path / "keys.yaml", tmp_path / "model"
    folder.mkdir()
    file.write_text(yaml.safe_dump({"keys": [key.entry for key in (ACME, EVIL, ROOT)]}))
    config = mock_config(make_folder(folder), http__keys_file=str(file))
    async with MockStack(config, port=free_port()) as stack:
        headers = {"authorization": f"Bearer {ACME.token}"}
        async with httpx.AsyncClient(base_url=stack.base_url, headers=headers) as acme:
            await complete(acme, "the secret of acme")
        async with browser_page() as page:
            await page.goto(f"{stack.base_url}/ui")
            await page.locator("#trouble", has_text='Give a key by the button "Key"').wait_for()

            async def use(key: NewKey) -> None:
                await page.locator("#open-key").click()
                await page.locator("#key [name=key]").fill(key.token)
                await page.get_by_role("button", name="Use").click()

            await use(ACME)
            await page.locator(".row.session", has_text="the secret of acme").wait_for()
            await page.locator(".node").first.click()
            await page.locator("#details pre.text", has_text="mallee").wait_for()
            await use(EVIL)
            await page.get_by_text("No sessions yet.").wait_for()
            await page.locator("#tab-workers").click()
            await page.get_by_text("Workers are shown to an operator's key.").wait_for()
            shown = await page.evaluate("document.body.innerText")
            assert "secret" not in shown
            assert "many trunks" not in shown
            await use(ROOT)
            await page.locator(".card", has_text="w0").wait_for()
            assert ACME.token not in await page.content()


async def test_a_thousand_branches_scroll_without_a_stutter(tmp_path: Path) -> None:
    """A frame of scrolling takes less than 100 ms, and only what is in view is drawn."""
    config = mock_config(make_folder(tmp_path), http__max_branches=1000, engine__kv_tokens=200_000)
    async with (
        MockStack(config, port=free_port()) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=60) as client,
    ):
        (capsule,) = await complete(client, "grove")
        fork = {"n": 1000, "max_tokens": 2, "mallee": {"session": "grove"}}
        forking = asyncio.create_task(client.post(f"/v1/capsules/{capsule}/fork", json=fork))
        async with browser_page() as page:
            await page.goto(f"{stack.base_url}/ui")
            assert (await forking).status_code == 200
            await page.locator("#counts", has_text="1,001 capsules, 0 running").wait_for()
            took = await page.evaluate(
                """async () => {
                    const view = document.getElementById("forest"), took = [];
                    for (let at = 0; at < view.scrollHeight; at += 400) {
                        const begun = performance.now();
                        view.scrollTop = at;
                        view.dispatchEvent(new Event("scroll"));
                        took.push(performance.now() - begun);
                        await new Promise(requestAnimationFrame);
                    }
                    return took;
                }"""
            )
            assert len(took) > 50
            assert sorted(took)[len(took) // 2] < 100
            assert 0 < await page.locator(".row").count() < 100
            await page.keyboard.press("End")
            await page.locator(".node.chosen").wait_for()


async def test_dark_light_and_help_by_keys(stack: MockStack) -> None:
    async with browser_page(color_scheme="dark") as page:
        await page.goto(f"{stack.base_url}/ui")
        theme = "document.documentElement.dataset.theme"
        assert await page.evaluate(theme) == "dark"
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.keyboard.press("d")
        assert await page.evaluate(theme) == "light"
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        await page.reload()
        assert await page.evaluate(theme) == "light", "it is remembered"
        await page.keyboard.press("?")
        await page.locator("#help[open]").wait_for()
        await page.keyboard.press("Escape")
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.id") == "filter"

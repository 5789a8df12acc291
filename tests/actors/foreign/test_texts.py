"""Capsules as texts: the newest that answers left, and those that are kept, against a plain model."""

import random

import numpy as np
import pytest

from mallee.actors.foreign.texts import ENTRY_NBYTES, CapsuleText, CapsuleTexts, TextLimits
from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.ids import CapsuleId


class Scene:
    def __init__(self, max_left: int = 3, max_kept: int = 3) -> None:
        self.now = 0.0
        self.there: set[str] = set()  # by what was told
        self.texts = CapsuleTexts(
            TextLimits(max_left, max_kept * (ENTRY_NBYTES + 40)),
            clock=lambda: self.now,
            stored=lambda text: self.there.add(text.id),
            released=lambda capsule: self.there.remove(capsule),
        )


def text(
    name: str, ttl_s: float | None = None, num: int = 10, drawn: int | None = 4
) -> CapsuleText:
    return CapsuleText(CapsuleId(name), np.arange(num, dtype="<u4"), "", drawn, ttl_s)


def test_random_changes_leave_what_a_model_has_and_tell_of_each() -> None:
    rng, scene = random.Random(3), Scene()
    left: list[str] = []
    kept: dict[str, tuple[float, float]] = {}  # ttl, last use
    for _ in range(3000):
        scene.now += rng.random()
        name = f"r{rng.randrange(9)}"
        match rng.randrange(5):
            case 0:
                kept.pop(name, None)
                left = [*(each for each in left if each != name), name][-3:]
                assert scene.texts.put(text(name))
            case 1:
                ttl_s = rng.choice((0.0, 2.0, 5.0))
                if len(kept.keys() - {name}) == 3:
                    with pytest.raises(CapsulesFull):
                        scene.texts.put(text(name, ttl_s))
                else:
                    scene.texts.put(text(name, ttl_s))
                    left = [each for each in left if each != name]
                    kept[name] = ttl_s, scene.now
            case 2:
                scene.texts.drop(name)
                left = [each for each in left if each != name]
                kept.pop(name, None)
            case 3 if name in kept:
                assert scene.texts.get(name).id == name
                kept[name] = kept[name][0], scene.now
            case 3 if name in left:
                scene.texts.get(name)
                left = [*(each for each in left if each != name), name]
            case 3:
                with pytest.raises(UnknownCapsule):
                    scene.texts.get(name)
            case _:
                scene.texts.expire()
                kept = {n: (t, at) for n, (t, at) in kept.items() if not t or at + t > scene.now}
        assert {each.id for each in scene.texts} == scene.there == {*left, *kept}


def test_the_beginning_of_a_text_has_what_its_branch_had_drawn_by_then() -> None:
    whole = text("r")
    assert whole.first(8, whole.id).drawn == 2
    assert whole.first(5, whole.id).drawn == 0
    assert text("p", drawn=None).first(5, whole.id).drawn is None
    for at in (0, 11):
        with pytest.raises(InvalidParameter, match="1 to 10"):
            whole.first(at, whole.id)


def test_no_answer_leaves_a_text_where_none_may() -> None:
    scene = Scene(max_left=0)
    assert not scene.texts.put(text("r"))
    assert not scene.there

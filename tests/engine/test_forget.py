"""`forget`: after every so many steps, the next one reads the canvas alone."""

import pytest

from diffusiongemma import Engine
from diffusiongemma.errors import ConfigError


def conditioned(engine: Engine, monkeypatch: pytest.MonkeyPatch, **options: int) -> list[bool]:
    """Whether each step of one canvas was conditioned on a belief."""
    seen = []
    denoise = type(engine.model).denoise_packed

    def watch(model, canvas, soft, rows, counts):  # type: ignore[no-untyped-def]
        seen.append(soft is not None and bool((soft != 0).any()))
        return denoise(model, canvas, soft, rows, counts)

    monkeypatch.setattr(type(engine.model), "denoise_packed", watch)
    engine.generate("x", seed=1, raw=True, early_stop=False, max_new_tokens=8, canvas=8, **options)
    return seen


def test_the_belief_is_dropped_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load("random:tiny") as engine:
        assert conditioned(engine, monkeypatch, steps=8) == [False] + [True] * 7
        monkeypatch.undo()
        assert conditioned(engine, monkeypatch, steps=8, forget=3) == [False, True, True] * 2 + [False, True]


def test_what_it_changes_is_the_text() -> None:
    with Engine.load("random:tiny") as engine:
        texts = [
            engine.generate(
                "x", seed=1, raw=True, steps=6, early_stop=False, max_new_tokens=16, canvas=16, **more
            ).tokens
            for more in ({}, {"forget": 0}, {"forget": 2}, {"forget": 6})
        ]
    assert texts[0] == texts[1] == texts[3]  # the sixth step is the last: nothing follows that could forget
    assert texts[2] != texts[0]


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_a_number_of_steps(bad: object) -> None:
    with Engine.load("random:tiny") as engine, pytest.raises(ConfigError, match="forget"):
        engine.generate("x", forget=bad)
    with Engine.load("random:tiny") as engine, pytest.raises(ConfigError, match="forget has no effect"):
        engine.generate("x", mode="ar", forget=2)

"""Rows of holes: passages from elsewhere in the file before the text next to the hole; without them as ever."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusiongemma.checkpoint import save_model
from diffusiongemma.config import ModelConfig
from diffusiongemma.errors import ConfigError
from diffusiongemma.model import DiffusionGemma
from diffusiongemma.tasks.format import BOS, EOS, FIM_PREFIX, FIM_SUFFIX, infill_prompt
from diffusiongemma.text.alike import LEAST, alike
from diffusiongemma.train.infill import Infill
from diffusiongemma.train.initial import first_weights, with_window
from diffusiongemma.train.recipe import TaskConfig, parse_recipe
from diffusiongemma.train.sources import Documents, Ids, Vocabulary

VOCABULARY = Vocabulary("bytes")
TEXT = "def f{0}(x):\n    y = x + {0}\n    if y:\n        return y\n\n    return g(x,\n        y)\n\n\n"
PREFIX, FAR = 240, 96


def documents(count: int = 12, functions: int = 8) -> Documents:
    """Files in which functions are alike"""
    texts = ["".join(TEXT.format(10 * i + j) for j in range(functions)) for i in range(count)]
    ids = [np.array([*VOCABULARY.encode(text), EOS], np.uint16) for text in texts]
    return Documents(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))


def task(of: Documents, prefix: int = PREFIX, far: int = FAR) -> Infill:
    return Infill(TaskConfig("t", "infill", 1.0, prefix=prefix, canvas=40), of, VOCABULARY.line_starts, far=far)


def test_passages_stand_closed_before_the_text_next_to_the_hole() -> None:
    of, rng, seen = documents(), np.random.default_rng(3), 0
    holes = task(of)
    for first, end, begin, close in holes.holes(rng, 200).tolist():
        row, where = holes.prompt(rng, first, end, begin, close)
        ids = row.tolist()
        bos, middle = where.stop, ids.index(FIM_PREFIX)
        assert len(ids) == PREFIX
        assert ids[bos : bos + 2] == [BOS, FIM_SUFFIX]
        assert len(ids) - bos <= PREFIX - FAR
        after, before = ids[bos + 2 : middle], ids[middle + 1 :]
        assert before == of.tokens[first - len(before) : first].tolist()
        assert after == of.tokens[end : end + len(after)].tolist()
        assert where.start == 0 or ids[where.start - 1] == EOS  # the end of another file
        assert where.stop - where.start <= FAR
        passages, whole = row[where], of.tokens[begin:close].tobytes()
        assert len(passages) == 0 or passages[-1] == EOS
        for one in np.split(passages, np.flatnonzero(passages == EOS) + 1)[:-1]:
            assert len(one) > 1
            assert one[:-1].astype(np.uint16).tobytes() in whole
            seen += 1
    assert seen > 150


def test_passages_are_seen_and_not_learned() -> None:
    """They end anywhere: what predicts them would learn eos from that."""
    rows = task(documents()).rows(np.random.default_rng(0), 60)
    some = 0
    for ids, learned in zip(rows.prefix.tolist(), rows.encoder_weight[:, :PREFIX] > 0, strict=True):
        bos = ids.index(BOS)
        hidden = (~learned).nonzero().flatten().tolist()
        assert hidden == list(range(bos - len(hidden), bos))  # right before the text, and nowhere else
        assert not hidden or ids[bos - 1] == EOS
        some += bool(hidden)
    assert some > 40
    assert (task(documents(), far=0).rows(np.random.default_rng(0), 60).encoder_weight[:, :PREFIX] > 0).all()


def test_a_file_that_ends_early_has_nothing_beyond() -> None:
    """A row may pretend that the file ends behind the hole: no passage is from there."""
    of = documents(count=2, functions=30)
    holes, close = task(of), int(of.offsets[1]) - 1
    first, end = holes.lines[[80, 81]].tolist()

    class Short:
        """Draws that leave the suffix out"""

        def random(self) -> float:
            return 0.27

        def integers(self, low: int, high: int) -> int:
            return low

    row, where = holes.prompt(Short(), first, end, 0, close)  # type: ignore[arg-type]
    assert row[where.stop : where.stop + 3].tolist() == [BOS, FIM_SUFFIX, FIM_PREFIX]
    before, near = np.asarray(of.tokens[:first], np.int64), len(row) - where.stop - 3
    found = alike(before, np.empty(0, np.int64), (near, 0), VOCABULARY.line_starts, FAR)
    assert found
    assert row[where].tolist() == [token for one in found for token in (*one.tolist(), EOS)]
    assert holes._passages(first, end, 0, close, (near, 0)).tolist() != row[where].tolist()


def plain_prompt(self: Infill, rng: np.random.Generator, first: int, end: int, begin: int, close: int) -> Ids:
    """A row as it was before there were passages."""
    tokens, room = self.documents.tokens, self.config.prefix - len(infill_prompt([], []))
    draw, wish = rng.random(), self.max_suffix
    if draw < 0.3:
        wish = int(rng.integers(0, self.max_suffix + 1)) if draw < 0.25 else 0
    after = tokens[end : min(close, end + wish)]
    before = tokens[max(begin, first - (room - len(after))) : first]
    spare = room - len(after) - len(before)
    fill = self.documents.tail(rng, spare) if spare else np.empty(0, np.int64)
    prompt = np.array(infill_prompt(before.tolist(), after.tolist()))
    return np.concatenate([np.zeros(spare - len(fill), np.int64), fill, prompt])


@pytest.mark.parametrize("prefix", [80, 400, 1600])
def test_rows_without_passages_are_as_they_were(prefix: int) -> None:
    holes = task(documents(), prefix=prefix, far=0)
    now, then = np.random.default_rng(5), np.random.default_rng(5)
    for hole in holes.holes(np.random.default_rng(1), 100).tolist():
        row, where = holes.prompt(now, *hole)
        assert row.tolist() == plain_prompt(holes, then, *hole).tolist()
        assert where.start == where.stop
    assert now.random() == then.random()


def test_far_is_a_part_of_the_prefix() -> None:
    """… that passages can fill and that leaves some of it, as at inference."""
    of, told = (
        documents(),
        f"far must be 0 or an integer of at least 24 tokens, and leave at least 8 of .* {PREFIX}, got",
    )
    for wrong in (-1, 1, LEAST - 1, 96.0, True, PREFIX - 7, PREFIX - 1, PREFIX, PREFIX + 8):
        with pytest.raises(ConfigError, match=f"{told} {wrong}"):
            task(of, far=wrong)  # type: ignore[arg-type]
    for right in (0, LEAST, PREFIX - 8):
        assert len(task(of, far=right).rows(np.random.default_rng(0), 9).prefix) == 9
    assert task(of).max_suffix == int(0.4 * (PREFIX - FAR))


# ---- the window ------------------------------------------------------------------------------------------------------


def recipe(**more: object) -> dict[str, object]:
    tasks = [{"name": "t", "kind": "arithmetic", "weight": 1.0, "prefix": 32, "canvas": 16}]
    run = {"total_steps": 1, "micro_tokens": 100, "accumulate": 1, "workers": 0}
    return {"name": "x", "run": run, "task": tasks, **more}


def test_another_window_keeps_the_weights(tmp_path: Path) -> None:
    config = replace(ModelConfig.preset("tiny"), sliding_window=8)
    model = DiffusionGemma(config).init_weights(0, 0.1).eval()
    save_model(model, tmp_path)
    made = parse_recipe(recipe(init_from=str(tmp_path), sliding_window=24))
    wider = first_weights(made, torch.device("cpu"), torch.float32)
    as_it_was = first_weights(parse_recipe(recipe(init_from=str(tmp_path))), torch.device("cpu"), torch.float32)
    assert wider.config == replace(as_it_was.config, sliding_window=24)
    assert as_it_was.config.sliding_window == 8
    assert wider.training
    assert all(parameter.requires_grad for parameter in wider.parameters())
    own, other = model.state_dict(), wider.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    tokens = torch.randint(1, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # the window that the network is told is the one that it has
        assert torch.equal(last(with_window(wider, 8), tokens), last(model, tokens))
        assert not torch.equal(last(wider, tokens), last(model, tokens))


def last(model: DiffusionGemma, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden state of the last token of a text that is longer than either window"""
    return model.eval().encode(tokens, model.new_cache(1))[:, -1]


def test_a_window_goes_with_a_checkpoint() -> None:
    for wrong in ({"model": {"preset": "tiny"}, "sliding_window": 64}, {"init_from": "x", "sliding_window": -1}):
        with pytest.raises(ConfigError, match="sliding_window must be positive, and goes with init_from"):
            parse_recipe(recipe(**wrong))

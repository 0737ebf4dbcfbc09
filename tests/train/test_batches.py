"""Rows: the right text in the right place, the same for the same step."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusiongemma.errors import ConfigError, DataError
from diffusiongemma.tasks import format
from diffusiongemma.tasks.format import BOS, EOS, FIM_PREFIX, FIM_SUFFIX, PAD
from diffusiongemma.train.batches import Batches, turns
from diffusiongemma.train.data import bpe
from diffusiongemma.train.loop import Trainer
from diffusiongemma.train.recipe import Recipe, parse_recipe
from diffusiongemma.train.report import Window
from diffusiongemma.train.sources import Vocabulary

VOCABULARY = Vocabulary("bytes")
TEXT = "def f{0}(x):\n    y = x + {0}\n    if y:\n        return y\n\n    return g(x,\n        y)\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    documents = [[*VOCABULARY.encode(TEXT.format(n)), EOS] for n in range(10, 40)]
    np.save(tmp_path / "code.npy", np.concatenate([np.array(d, np.uint16) for d in documents]))
    np.save(tmp_path / "code_offsets.npy", np.cumsum([0, *map(len, documents)]))
    icons = [[*VOCABULARY.encode(f"<svg>{n}</svg>"), EOS] for n in range(9)]
    prompts = [[*VOCABULARY.encode(f"icon {n}, outline"), EOS] for n in range(9)]
    for name, rows in (("icons", icons), ("icons_prompts", prompts)):
        np.save(tmp_path / f"{name}.npy", np.concatenate([np.array(r, np.uint16) for r in rows]))
        np.save(tmp_path / f"{name}_offsets.npy", np.cumsum([0, *map(len, rows)]))
    np.save(tmp_path / "icons_prompt_of.npy", np.arange(9))
    return tmp_path


def recipe(data: Path | str, **task: object) -> Recipe:
    base = {"name": "t", "weight": 1.0, "prefix": 80, "canvas": 40}
    return parse_recipe(
        {
            "name": "x", "data": str(data), "model": {"preset": "tiny"},
            "run": {"total_steps": 3, "micro_tokens": 1600, "accumulate": 2, "workers": 0},
            "task": [{**base, **task}],
        }
    )  # fmt: skip


def text(ids: torch.Tensor) -> str:
    return str(VOCABULARY.library.decode([i for i in ids.tolist() if i > 106], skip_special_tokens=False))


def answer(canvas: torch.Tensor) -> torch.Tensor:
    end = canvas.tolist().index(EOS)
    assert set(canvas[end + 1 :].tolist()) <= {PAD}
    return canvas[:end]


@pytest.mark.parametrize("kinds", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
def test_infill_prompt_and_canvas_make_the_text_whole(data: Path, kinds: list[float]) -> None:
    batches = Batches(recipe(data, kind="infill", source="code", kinds=kinds), VOCABULARY)
    corpus = "".join(TEXT.format(n) for n in range(10, 40))
    rows = batches[0][0]
    assert len(rows.prefix) > 4
    for prefix, canvas in zip(rows.prefix, rows.canvas, strict=True):
        ids = prefix.tolist()
        assert ids.count(FIM_SUFFIX) == ids.count(FIM_PREFIX) == ids.count(BOS) == 1
        assert ids.index(BOS) == ids.index(FIM_SUFFIX) - 1
        assert ids.index(BOS) == 0 or ids[ids.index(BOS) - 1] == EOS  # another document's end stands before
        suffix = text(prefix[ids.index(FIM_SUFFIX) + 1 : ids.index(FIM_PREFIX)])
        before, middle = text(prefix[ids.index(FIM_PREFIX) + 1 :]), text(answer(canvas))
        assert before + middle + suffix in corpus
        if kinds[0]:  # bytes: the indent is not one token with its line break, but a line is a line
            assert middle.count("\n") == 1
            assert middle.startswith("\n")
        elif kinds[1]:
            assert middle.startswith("\n")
            assert 2 <= middle.count("\n") <= 8
        else:
            assert "\n" not in middle
            assert middle


def test_continuation_ends_with_the_document(data: Path) -> None:
    rows = Batches(recipe(data, kind="continuation", source="code"), VOCABULARY)[0][0]
    assert set(rows.prefix[:, 0].tolist()) == {BOS}
    ended = 0
    for canvas in rows.canvas:
        if EOS in canvas.tolist():
            answer(canvas)
            ended += 1
    assert ended


def test_sudoku_rows_are_valid_boards() -> None:
    rows = Batches(recipe("", kind="sudoku", prefix=104, canvas=96, count=4, pinned=0.5), VOCABULARY)[0][0]
    value = {id: n for n, id in enumerate(VOCABULARY.encode("0123456789"))}
    assert 0 < int(rows.pinned.any(dim=1).sum()) < len(rows.pinned)
    for prefix, canvas, pinned, weight in zip(rows.prefix, rows.canvas, rows.pinned, rows.weight, strict=True):
        ids = prefix.tolist()
        assert text(prefix).startswith("user\nSudoku\n")
        board = [value[i] for i in ids if i in value]
        solution = [value[i] for i in answer(canvas).tolist()]
        assert len(board) == len(solution) == 81
        assert all(given in (0, digit) for given, digit in zip(board, solution, strict=True))
        assert all(sorted(solution[9 * r : 9 * r + 9]) == list(range(1, 10)) for r in range(9))
        if pinned.any():
            assert pinned[:81].tolist() == [given > 0 for given in board]
        assert torch.equal(weight == 0, pinned)


@pytest.mark.parametrize("kind", ["icons", "arithmetic"])
def test_chats_are_framed_as_inference_will(data: Path, kind: str) -> None:
    options = {"source": "icons"} if kind == "icons" else {}
    rows = Batches(recipe(data, kind=kind, **options), VOCABULARY)[0][0]
    for prefix, canvas in zip(rows.prefix, rows.canvas, strict=True):
        ids = prefix.tolist()
        start = len(ids) - 1 - ids[::-1].index(BOS)
        asked = text(prefix[start:]).removeprefix("user\n").removesuffix("\nmodel\n")
        assert ids[start:] == format.chat_prompt(VOCABULARY.encode, asked)
        assert start == 0 or ids[start - 1] == EOS
        if kind == "icons":
            number = asked.removeprefix("SVG icon\nicon ").removesuffix(", outline")
            assert text(answer(canvas)) == f"<svg>{number}</svg>"


def test_icons_are_trained_along_the_path_of_the_sampler(data: Path, tmp_path: Path) -> None:
    """Several rounds over icons, at temperatures and acceptance of their own."""
    ranges = {"noise": [0.5, 1.0], "temperature": [0.1, 0.6], "accept": [0.05, 1]}
    made = recipe(data, kind="icons", source="icons", rounds=3, **ranges)
    trainer = Trainer(made, tmp_path / "run", torch.device("cpu"), quiet=True)
    window = Window()
    trainer.train_step(trainer.batches[0], window)
    figures = window.means()["t"]
    assert 0 < figures["last round"] != figures["first round"] > 0
    assert trainer.objectives["t"].temperature == (0.1, 0.6)


def test_bare_chats_begin_at_bos(data: Path) -> None:
    """A model that always saw something before bos writes nonsense without it."""
    whole = len(format.chat_prompt(VOCABULARY.encode, format.svg_request("icon 1, outline")))
    for own in ({"kind": "icons", "source": "icons", "prefix": whole}, {"kind": "arithmetic", "prefix": 32}):
        rows = Batches(recipe(data, bare=True, **own), VOCABULARY)[0][0]
        assert (rows.prefix[:, 0] == BOS).all()
        assert ((rows.prefix == BOS).sum(dim=1) == 1).all()
    with pytest.raises(DataError, match="no icon"):
        Batches(recipe(data, kind="icons", source="icons", prefix=whole + 1, bare=True), VOCABULARY)
    with pytest.raises(DataError, match="hardly any problem"):
        Batches(recipe(data, kind="arithmetic", prefix=200, bare=True), VOCABULARY)[0]


def test_pairs_of_a_user_span_blocks(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "count", "response": "".join(f"{n:02d}" for n in range(50))}) + "\n")
    rows = Batches(recipe("", kind="pairs", file=str(file), prefix=100, canvas=40), VOCABULARY)[0][0]
    whole = "".join(f"{n:02d}" for n in range(50))
    starts = {whole.index(text(canvas)) for canvas in rows.canvas}
    assert starts == {0, 40, 80}
    for prefix, canvas in zip(rows.prefix, rows.canvas, strict=True):
        block = whole.index(text(canvas))
        assert text(prefix).endswith(f"model\n{whole[:block]}"[-90:])
    file.write_text('{"question": 1}\n')
    with pytest.raises(DataError, match="prompt"):
        Batches(recipe("", kind="pairs", file=str(file)), VOCABULARY)


def test_steps_are_reproducible_and_different(data: Path) -> None:
    made = recipe(data, kind="infill", source="code")
    first, again = (Batches(made, VOCABULARY) for _ in range(2))
    assert torch.equal(first[5][1].prefix, again[5][1].prefix)
    assert not torch.equal(first[5][1].prefix, first[5][0].prefix)
    assert not torch.equal(first[5][1].prefix, first[6][1].prefix)


def test_workers_deliver_the_same_in_order(data: Path) -> None:
    made = recipe(data, kind="infill", source="code")
    alone = Batches(made, VOCABULARY)
    several = Batches(dataclasses.replace(made, run=dataclasses.replace(made.run, workers=2)), VOCABULARY)
    stream = several.stream(3, pin=False)
    for step in (3, 4, 5):
        for ours, theirs in zip(next(stream), alone[step], strict=True):
            assert torch.equal(ours.prefix, theirs.prefix)
            assert torch.equal(ours.canvas, theirs.canvas)


def test_turns_follow_the_weights() -> None:
    order = turns([0.5, 0.3, 0.2], 100)
    assert [order.count(i) for i in range(3)] == [50, 30, 20]
    for part in range(0, 100, 10):
        assert order[part : part + 10].count(0) == 5


def test_an_unknown_option_or_kind_is_an_error(data: Path) -> None:
    for wrong, message in (
        ({"kind": "infill", "source": "code", "nonsense": 1}, "nonsense"),
        ({"kind": "chess"}, "no kind 'chess'"),
        ({"kind": "sudoku", "prefix": 90, "canvas": 96}, "set prefix = 104"),
    ):
        with pytest.raises(ConfigError, match=message):
            Batches(recipe(data, **wrong), VOCABULARY)
    with pytest.raises(DataError, match="no token arrays"):
        Batches(recipe(data, kind="continuation", source="nothing"), VOCABULARY)


def test_arrays_of_another_tokenizer_are_refused(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe.save(VOCABULARY.library, folder)
    made = dataclasses.replace(recipe(data, kind="continuation", source="code"), tokenizer=str(folder))
    own = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    for there in ("{}", json.dumps({"tokenizer_sha256": own})):
        (data / "meta.json").write_text(there)
        Batches(made, VOCABULARY)
    (data / "meta.json").write_text('{"tokenizer_sha256": "0"}')
    with pytest.raises(DataError, match="another tokenizer"):
        Batches(made, VOCABULARY)
    Batches(dataclasses.replace(made, tokenizer="bytes"), VOCABULARY)  # has no file to compare


def test_open_hole() -> None:
    assert format.open_hole("a = 1\n    ") == ("a = 1", "\n    ")
    assert format.open_hole("a = (") == ("a = (", "")

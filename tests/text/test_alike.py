"""Passages that look like the place of a hole: whole lines of the far text, within their room, the likeliest last."""

import gzip
import hashlib
import json
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diffusiongemma.engine.engine import ASSETS
from diffusiongemma.tasks.infill import FILE
from diffusiongemma.text import Tokenizer
from diffusiongemma.text.alike import (
    AROUND,
    LEAST,
    LONGEST,
    REACH,
    Ids,
    Lines,
    _around,
    _scores,
    alike,
    line_breaks,
)
from diffusiongemma.train.sources import Vocabulary
from text.fixtures import make_tokenizer

BREAKS = np.arange(512) < 2  # a line break, and one with an indent
WORDS = {"\n": 0}


def ids(text: str) -> Ids:
    """A token a word, and one for each line break"""
    words = text.replace("\n", " \n ").split(" ")
    return np.array([WORDS.setdefault(word, len(WORDS) + 1) for word in words if word], np.int64)


def text(tokens: Ids) -> str:
    words = {id: word for word, id in WORDS.items()}
    return " ".join(words[token] for token in tokens.tolist()).replace(" \n", "\n").replace("\n ", "\n")


def place(one: Ids, whole: Ids) -> slice:
    """Where a passage, which is a view, stands in the text that it is from"""
    start = (one.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize
    return slice(start, start + len(one))


SIDES = st.lists(st.integers(0, 7) | st.integers(0, 30), max_size=400).map(lambda some: np.array(some, np.int64))


@settings(max_examples=300)
@given(SIDES, SIDES, st.tuples(st.integers(0, 60), st.integers(0, 60)), st.integers(0, 200))
@example(ids("a b c\n" * 40), ids("d" + "\na b c" * 40), (5, 3), 120)
@example(ids(""), ids("\na b" * 40), (0, 9), 120)
@example(ids("a b\n" * 40), ids(""), (9, 0), 120)
@example(ids("a " * 80), ids("a " * 90), (9, 9), 120)  # no line break at all
@example(ids("a b\n" + "a " * LONGEST + "\na b\n" * 3), ids("\na b\n" + "a " * 3 * LONGEST), (4, 4), 200)
def test_passages_are_whole_lines_of_the_far_text(before: Ids, after: Ids, near: tuple[int, int], room: int) -> None:
    near = (min(near[0], len(before)), min(near[1], len(after)))
    kept = before.copy(), after.copy()
    found = alike(before, after, near, BREAKS, room)
    assert sum(len(one) + 1 for one in found) <= room
    taken = [np.arange(len(before)) >= len(before) - near[0], np.arange(len(after)) < near[1]]
    for one in found:
        (side,) = (i for i, whole in enumerate((before, after)) if np.shares_memory(one, whole))
        whole = (before, after)[side]
        at = place(one, whole)
        assert not taken[side][at].any()  # neither seen already, nor part of another passage
        taken[side][at] = True
        far = slice(0, len(before) - near[0]) if side == 0 else slice(near[1], len(after))
        assert BREAKS[one[0]] or at.start == far.start  # whole lines
        assert at.stop == far.stop or BREAKS[whole[at.stop]]
        assert not BREAKS[one].all()
    assert all(map(np.array_equal, kept, (before, after)))
    more = alike(before, after, near, np.append(BREAKS, [False] * 99), room)  # as long as in training
    assert [one.tolist() for one in more] == [one.tolist() for one in found]


def plain_scores(lines: list[list[int]], around: list[tuple[int, list[int], float]], worth: list[float]) -> list[float]:
    """What `_scores` sums over arrays, a line at a time."""
    scores = []
    for i in range(len(lines)):
        score = 0.0
        for where, wanted, counts in around:
            if 0 <= i + where < len(lines):
                line = lines[i + where]
                common = sum(worth[token] for token in line if token in wanted)
                size, own = sum(worth[token] for token in line), sum(worth[token] for token in wanted)
                score += counts * min(1.0, common / (size + own - min(common, own)))
        scores.append(score)
    return scores


def plain_lines(tokens: list[int]) -> list[list[int]]:
    lines: list[list[int]] = [[]]
    for token in tokens:
        if BREAKS[token]:
            lines.append([])
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


def plain_around(before: list[int], after: list[int]) -> list[tuple[int, list[int], float]]:
    above, below = plain_lines(before)[::-1], plain_lines(after)
    around = []
    if after and not BREAKS[after[0]]:  # the hole is in the middle of a line, which has three halves
        own = (above.pop(0) if above else []) + below.pop(0)
        around.append((0, own, 1.5))
    around += [(-1 - i, above[i], AROUND[i]) for i in range(min(3, len(above)))]
    return around + [(1 + i, below[i], AROUND[i]) for i in range(min(3, len(below)))]


@given(SIDES, SIDES, SIDES)
def test_scores_are_those_of_a_line_at_a_time(far: Ids, before: Ids, after: Ids) -> None:
    worth = 1.0 / np.sqrt(1.0 + np.arange(512) % 7)
    lines = Lines.of(far, BREAKS)
    inside = len(after) > 0 and not BREAKS[after[0]]
    around = list(_around(Lines.of(before, BREAKS), Lines.of(after, BREAKS), inside))
    plain = plain_around(before.tolist(), after.tolist())
    told = [(where, wanted.tolist(), counts) for where, wanted, counts in around]
    assert sorted(told) == sorted(plain)
    assert [lines.content(i).tolist() for i in range(len(lines))] == plain_lines(far.tolist())
    expected = plain_scores(plain_lines(far.tolist()), plain, worth.tolist())
    np.testing.assert_allclose(_scores(lines, around, worth), expected, rtol=1e-9, atol=1e-12)


FAR = """
def first ( a )
 open the door
 walk through it
 close the door
 say first
def other ( b )
 nothing here is
 like that place
 at all in
 any way whatever
def second ( c )
 open the door
 jump through it
 close the window
 say second
"""
FILLER = "".join(f"\n filler{i} of{i} its{i} own{i}" for i in range(40))


def test_the_likeliest_is_the_last() -> None:
    before, after = ids(FAR + FILLER + "\ndef third ( d )\n open the door"), ids("\n close the door\n say third")
    near = (len(ids(FILLER)), len(after))
    found = [text(one) for one in alike(before, after, near, BREAKS, 256)]
    assert "walk through it" in found[-1]  # both its neighbours are those of the hole
    assert any("jump through it" in one for one in found)  # one of them is
    few = [text(one) for one in alike(before, after, near, BREAKS, LEAST)]
    assert len(few) == 1
    assert "walk through it" in few[0]


def test_inside_a_line_the_rest_of_it_counts_most() -> None:
    own, above = "\n total = add ( one , two , three )", "\n some line\n nothing like it"
    before = ids(own + FAR + above + FILLER + "\n some line\n total = add (")
    after = ids("two , three )\n other line")
    found = alike(before, after, (len(ids(FILLER)), len(after)), BREAKS, 256)
    assert own.strip() in text(found[-1])
    behind = ids("\n other line")  # a hole behind that line, not in it
    found = alike(before, behind, (len(ids(FILLER)), len(behind)), BREAKS, 256)
    assert own.strip() not in text(found[-1])


def test_where_there_is_nothing_far_there_is_no_passage() -> None:
    some, none = ids(FAR), ids("")
    assert alike(none, none, (0, 0), BREAKS, 256) == []
    assert alike(some, none, (len(some), 0), BREAKS, 256) == []
    assert alike(none, some, (0, len(some)), BREAKS, 256) == []
    assert alike(some, some, (4, 4), BREAKS, LEAST - 1) == []
    assert alike(some, none, (0, 0), BREAKS, 256)  # all of it is far, if the prompt holds nothing
    unlike = ids("\n u v w" * 20 + "\n a b c\n d e f\n g h i")
    assert alike(unlike, ids("\n x y z"), (12, 4), BREAKS, 256) == []


def test_blank_lines_between_passages_take_no_room() -> None:
    """Passages that follow each other were one, with the blank lines between them, which nobody had counted."""
    function = "\ndef name ( a )\n open the door\n walk through it\n close the door\n say something"
    before, after = ids((function + "\n" * 4) * 9 + "\ndef name ( a )\n open the door"), ids("\n close the door")
    for room in range(LEAST, 200):
        found = alike(before, after, (9, 4), BREAKS, room)
        assert sum(len(one) + 1 for one in found) <= room


def test_a_passage_needs_room_for_what_closes_it() -> None:
    one = ids("\n a b c d e f g h i j k l m" * 2)
    before, after = np.concatenate([one, ids("\n a b c\n" + "z " * LONGEST)]), ids("\n a b c d")
    near = (len(before) - len(one), 0)
    assert len(one) > LEAST
    for room in range(len(one) + 1, len(one) + 5):
        assert [found.tolist() for found in alike(before, after, near, BREAKS, room)] == [one.tolist()]
    for room in range(LEAST, len(one) + 1):
        assert sum(len(found) + 1 for found in alike(before, after, near, BREAKS, room)) <= room


def test_very_long_lines_are_left_out() -> None:
    long, short = "\n a b c" + " d" * LONGEST, "\n a b c d e"
    before, after = ids(long * 5 + short + long * 5 + "\n f g" + "\n a b c"), ids("\n a b c")
    found = alike(before, after, (4, 4), BREAKS, 256)
    assert all(len(one) <= LONGEST for one in found)
    assert any(np.array_equal(one, ids(short)) for one in found)


def test_only_so_much_of_a_text_is_searched() -> None:
    one, other = ids("\n open the door\n walk through it\n close the door"), np.full(REACH, 40)
    before, after = np.concatenate([one, other]), ids("\n close the door")
    assert alike(before, after, (8, 4), BREAKS, 256) == []
    assert len(alike(before[len(one) // 2 : -len(one)], after, (8, 4), BREAKS, 256)) == 1
    before, after = ids("\n open the door"), np.concatenate([ids("\n close the door"), other, one])
    assert alike(before, after, (4, 4), BREAKS, 256) == []
    assert len(alike(before, after[2 * len(one) :], (4, 0), BREAKS, 256)) == 1


def test_passages_are_those_that_nano_was_trained_with() -> None:
    """Training and inference share the code, so nothing else notices a change: after one, nano must learn again.

    Lines that are alike rank by how sums of floats round, which is the same everywhere: `cumsum` adds in order.
    """
    tokenizer, digest, some = Tokenizer.from_pretrained(ASSETS / "nano"), hashlib.sha256(), 0
    breaks = line_breaks(tokenizer)
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 16)]
    for text in texts:
        tokens = np.array(tokenizer.encode(text), np.int64)
        starts = list(pairwise(np.flatnonzero(breaks[tokens]).tolist()))
        for line in range(3, len(starts), len(starts) // 12 + 1):
            first, end = starts[line]
            for hole in ((first, end), (min(first + 3, end), (first + end) // 2 + 2)):  # a line, or some of it
                before, after = tokens[: hole[0]], tokens[max(hole) :]
                found = alike(before, after, (min(230, len(before)), min(151, len(after))), breaks, 256)
                digest.update(json.dumps([one.tolist() for one in found]).encode())
                some += len(found)
    assert some > 1000
    assert digest.hexdigest()[:16] == "ffff445e0f9c6901"


@pytest.mark.parametrize("kind", ["nano", "byte_level", "bytes"])
def test_line_breaks_are_those_of_training(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = ASSETS / "nano"
    if kind != "nano":
        folder = tmp_path_factory.mktemp(kind)
    if kind == "byte_level":
        (folder / "tokenizer.json").write_text(make_tokenizer(kind).to_json(), encoding="utf-8")
    vocabulary = Vocabulary("bytes" if kind == "bytes" else str(folder))
    if kind == "bytes":
        (folder / "tokenizer.json").write_text(vocabulary.library.to_str(), encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(folder)
    table = line_breaks(tokenizer)
    assert len(table) == tokenizer.vocab_size == vocabulary.size
    assert np.array_equal(table, vocabulary.line_starts[: len(table)])
    assert not vocabulary.line_starts[len(table) :].any()
    assert table.any()
    assert line_breaks(tokenizer) is table


def test_line_breaks_of_another_kind_of_tokenizer() -> None:
    tokenizer = make_tokenizer("gemma_like")
    found = {tokenizer.piece(id) for id in np.flatnonzero(line_breaks(tokenizer)).tolist()}
    assert "\n" in found
    assert all(piece.startswith(("\n", "\r\n")) for piece in found)

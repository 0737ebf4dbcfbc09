"""Which of several fillings wins: by the model's own score, by what Python says, or by what the others say.

`check="python"`: fillings that make the whole text parse come before those that do not.
`choose="middle"`: not the likeliest, but the one that is most like all others, each weighed by its likelihood. If the
candidates are draws of what could stand there, that one is expected to be nearest to what does (minimum Bayes risk).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from diffusiongemma.engine.candidates import Candidate, likeliest_first
from diffusiongemma.errors import InputError
from diffusiongemma.text.python import parses
from diffusiongemma.text.similar import similarity

Check = Literal["none", "python"]
Choose = Literal["likeliest", "middle"]


class NoChoice(InputError):
    """There are too few candidates for what was asked."""


@dataclass(frozen=True)
class Choice:
    check: Check = "none"
    choose: Choose = "likeliest"

    def __post_init__(self) -> None:
        if self.check not in ("none", "python"):
            raise InputError(f"check must be 'none' or 'python', got {self.check!r}")
        if self.choose not in ("likeliest", "middle"):
            raise InputError(f"choose must be 'likeliest' or 'middle', got {self.choose!r}")

    def refuse_without_effect(self, tries: int | None, mode: str) -> None:
        """One candidate leaves no choice, and of two the likelier is always the middle. None: not known yet."""
        more = "ask for more, or for longer holes"
        if self.check != "none" and (mode == "ar" or tries == 1):
            few = "in mode 'ar': it writes one" if mode == "ar" else f"on one candidate: {more}"
            raise NoChoice(f"check {self.check!r} has no effect {few}")
        if self.choose != "likeliest" and (mode == "ar" or tries in (1, 2)):
            few = "in mode 'ar': it writes one" if mode == "ar" else f"on fewer than three candidates: {more}"
            raise NoChoice(f"choose {self.choose!r} has no effect {few}")

    def order(self, found: Sequence[Candidate], texts: Sequence[str]) -> list[Candidate]:
        """The best first; `texts` stand around the holes, one more than there are holes."""
        if self.check == "python":
            found = [replace(one, sound=one.texts is not None and parses(_whole(one.texts, texts))) for one in found]
        ranked = likeliest_first(found)
        return ranked if self.choose == "likeliest" else _middle_first(ranked)


def _whole(fillings: Sequence[str], texts: Sequence[str]) -> str:
    return texts[0] + "".join(filling + after for filling, after in zip(fillings, texts[1:], strict=True))


def _middle_first(ranked: list[Candidate]) -> list[Candidate]:
    """Among those that only the score tells apart from the first."""
    rivals = [one for one in ranked if one.rank[:-1] == ranked[0].rank[:-1]]
    told = ["".join(one.texts or ()) for one in rivals]
    weights = [math.exp(one.score or 0.0) for one in rivals]

    def likeness(i: int) -> float:
        return sum(weight * similarity(told[i], other) for weight, other in zip(weights, told, strict=True))

    likenesses = [likeness(i) for i in range(len(rivals))]
    by_likeness = sorted(range(len(rivals)), key=lambda i: -likenesses[i])  # stable: of equals the likelier
    return [rivals[i] for i in by_likeness] + ranked[len(rivals) :]

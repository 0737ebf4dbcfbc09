"""Small arithmetic with one right answer: sums, differences, products, comparisons, digits to sort, and the like."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Problem:
    """A question as it stands in a prompt, and the only answer that counts."""

    kind: str
    question: str
    answer: str


def _number(rng: Random, digits: int) -> int:
    """A number of up to `digits` digits, each length as likely as the others."""
    return rng.randrange(10 ** rng.randint(1, digits))


def _add(rng: Random) -> tuple[str, str]:
    a, b = _number(rng, 4), _number(rng, 4)
    return f"{a} + {b} =", str(a + b)


def _subtract(rng: Random) -> tuple[str, str]:
    a, b = _number(rng, 4), _number(rng, 4)
    return f"{a} - {b} =", str(a - b)


def _multiply(rng: Random) -> tuple[str, str]:
    a, b = _number(rng, 2), _number(rng, 2)
    return f"{a} * {b} =", str(a * b)


def _chain(rng: Random) -> tuple[str, str]:
    numbers = [_number(rng, 2) for _ in range(3)]
    signs = [rng.choice("+-") for _ in range(2)]
    total = numbers[0]
    for sign, number in zip(signs, numbers[1:], strict=True):
        total += number if sign == "+" else -number
    return f"{numbers[0]} {signs[0]} {numbers[1]} {signs[1]} {numbers[2]} =", str(total)


def _divide(rng: Random) -> tuple[str, str]:
    a, b = _number(rng, 3), rng.randint(1, 12)
    return f"{a} // {b}, {a} % {b} =", f"{a // b}, {a % b}"


def _compare(rng: Random) -> tuple[str, str]:
    a, b = _number(rng, 4), _number(rng, 4)
    if rng.random() < 0.2:
        b = a
    return f"{a} ? {b}", "<" if a < b else ">" if a > b else "="


def _row(rng: Random, low: int = 4, high: int = 10) -> list[int]:
    return [rng.randrange(10) for _ in range(rng.randint(low, high))]


def _sort(rng: Random) -> tuple[str, str]:
    digits = _row(rng)
    return f"sort {''.join(map(str, digits))}", "".join(map(str, sorted(digits)))


def _reverse(rng: Random) -> tuple[str, str]:
    digits = "".join(map(str, _row(rng)))
    return f"reverse {digits}", digits[::-1]


def _largest(rng: Random) -> tuple[str, str]:
    numbers = [_number(rng, 3) for _ in range(rng.randint(3, 5))]
    return f"max {' '.join(map(str, numbers))}", str(max(numbers))


def _count(rng: Random) -> tuple[str, str]:
    digits, wanted = _row(rng, 6, 14), rng.randrange(10)
    return f"count {wanted} in {''.join(map(str, digits))}", str(digits.count(wanted))


def _digit_sum(rng: Random) -> tuple[str, str]:
    digits = _row(rng)
    return f"digit sum {''.join(map(str, digits))}", str(sum(digits))


KINDS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "chain": _chain,
    "divide": _divide,
    "compare": _compare,
    "sort": _sort,
    "reverse": _reverse,
    "max": _largest,
    "count": _count,
    "digit sum": _digit_sum,
}


def held_out(question: str) -> bool:
    """Whether a question is kept for evaluation: one in sixteen, decided by its text."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % 16 == 0


def problem(rng: Random, kind: str | None = None, test: bool = False) -> Problem:
    """One random problem of the training part or of the evaluation part, of any kind unless one is named."""
    chosen = kind or rng.choice(list(KINDS))
    while True:
        made = Problem(chosen, *KINDS[chosen](rng))
        if held_out(made.question) == test:
            return made


def problems(seed: int, count: int, test: bool = True) -> list[Problem]:
    """`count` different problems, the same ones for the same seed."""
    rng = Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        new = problem(rng, test=test)
        found.setdefault(new.question, new)
    return list(found.values())

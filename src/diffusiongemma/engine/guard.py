"""Is a finished block garbage? Three signs, each cheap and each with a name for the log."""

from __future__ import annotations

from collections.abc import Sequence

HIGH_ENTROPY = 0.5  # nats a position at the last step: the canvas never settled
MAX_PERIOD = 16  # a loop repeats at most this many tokens
MIN_REPEATS = 6  # … at least this often
MIN_SHARE = 0.5  # … over at least this share of the block


def find_garbage(
    block: Sequence[int],
    reply: Sequence[int],
    converged: bool,
    mean_entropy: float,
    pairs: Sequence[tuple[int, int]],
    ended: bool,
) -> str | None:
    """-> why the block is garbage, or None

    `block`: its tokens up to the end of text; `reply`: those of all blocks so far, this one included. `pairs`: opening
    and closing control tokens. `ended`: the reply is over, so whatever was opened must be closed.
    """
    if not converged and mean_entropy > HIGH_ENTROPY:
        return "not converged"
    if _is_loop(block):
        return "repetition"
    if not all(_is_balanced(reply, opening, closing, ended) for opening, closing in pairs):
        return "unbalanced control tokens"
    return None


def _is_loop(tokens: Sequence[int]) -> bool:
    """Does some stretch repeat itself, period after period, over much of the block?"""
    for period in range(1, min(MAX_PERIOD, len(tokens) // MIN_REPEATS) + 1):
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= max(MIN_REPEATS * period, MIN_SHARE * len(tokens)):
                return True
    return False


def _is_balanced(reply: Sequence[int], opening: int, closing: int, ended: bool) -> bool:
    depth = 0
    for token in reply:
        depth += (token == opening) - (token == closing)
        if depth not in (0, 1):
            return False
    return depth == 0 or not ended

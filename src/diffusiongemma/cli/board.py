"""A Sudoku while it crystallises: what each cell holds, how sure the model is, and what it has taken back.

Pure: events go in, text comes out, so that a terminal and a test see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from diffusiongemma.cli.canvas import STYLES, level
from diffusiongemma.engine.events import Commit, Draft, Event
from diffusiongemma.tasks.sudoku import CELLS, SEEN, TURNS, SudokuBoard
from diffusiongemma.tasks.sudoku_solver import PEERS

GIVEN, REPAIRED, WRONG, LINES = "bold", "bold #cb4b16", "bold reverse #dc322f", "dim"
EMPTY = "·"
LEGEND = (("given", GIVEN), ("settled", STYLES[0]), ("unsure", STYLES[2]), ("taken back", REPAIRED))


@dataclass
class Board:
    """The cells of one look, always drawn upright."""

    view: SudokuBoard
    givens: Sequence[int]  # upright
    look: int = 0  # from 0 on; a later one has the board turned
    values: list[int] = field(init=False)  # the draft, 0 where it holds no digit
    levels: list[int] = field(init=False)  # how unsure, as in canvas.STYLES
    repaired: set[int] = field(default_factory=set)  # cells that were accepted once with another digit
    step: int = 0
    entropy: float = 0.0  # mean over the cells that are not given
    _held: dict[int, int] = field(default_factory=dict)  # what a cell was accepted with last
    _offset: int = 0  # places of committed blocks: a small canvas holds only part of a board
    _drafted: bool = False

    def __post_init__(self) -> None:
        self.values = list(self.givens)
        self.levels = [0 if given else len(STYLES) - 1 for given in self.givens]

    def told_look(self, most: int) -> str:
        """To stand before other words; nothing for the first look, which often is the only one."""
        how = "turned" if self.look < TURNS else "mirrored"
        return f"look {self.look + 1} of {most}, the board {how}, " if self.look else ""

    def take(self, event: Event) -> None:
        if isinstance(event, Draft):
            self._draft(event)
        elif isinstance(event, Commit):
            self.step += not self._drafted  # the causal twin has a step a token, and no drafts
            for token in event.tokens:
                if self._offset < CELLS:
                    self._set(SEEN[self.look][self._offset], self.view.read([token])[0], accepted=True, entropy=0.0)
                self._offset += 1

    def _draft(self, draft: Draft) -> None:
        self.step += 1
        self._drafted = True
        free = []
        for i, (token, entropy, accepted) in enumerate(zip(draft.tokens, draft.entropy, draft.accepted, strict=True)):
            place = self._offset + i
            if place < CELLS and not self.givens[cell := SEEN[self.look][place]]:
                free.append(entropy)
                self._set(cell, self.view.read([token])[0], accepted, entropy)
        self.entropy = sum(free) / len(free) if free else 0.0

    def _set(self, cell: int, value: int, accepted: bool, entropy: float) -> None:
        if self.givens[cell]:
            self.values[cell] = value  # pinned, but the causal twin may write something else
            return
        if self._held.get(cell, value) != value:
            self.repaired.add(cell)
        if accepted:
            self._held[cell] = value
        self.values[cell], self.levels[cell] = value, level(entropy, accepted)

    @property
    def settled(self) -> int:
        return sum(at == 0 for at in self.levels)

    @property
    def conflicts(self) -> set[int]:
        """Cells that break a rule, or are not what was given."""
        v, given = self.values, self.givens
        wrong = {c for c in range(CELLS) if v[c] == 0 or any(v[c] == v[peer] for peer in PEERS[c])}
        return wrong | {c for c in range(CELLS) if given[c] not in (0, v[c])}

    def line(self) -> str:
        """81 characters: what is settled, `.` elsewhere."""
        return "".join(
            str(value) if value and not at else "." for value, at in zip(self.values, self.levels, strict=True)
        )

    def render(self, final: bool = False) -> Text:
        """Thirteen lines. In the end what breaks a rule is marked too."""
        wrong = self.conflicts if final else set()
        out = Text()
        for row in range(9):
            if row % 3 == 0:
                out.append(("┌" if row == 0 else "├") + ("┬" if row == 0 else "┼").join(["───────"] * 3), LINES)
                out.append("┐\n" if row == 0 else "┤\n", LINES)
            for column in range(9):
                out.append("│ " if column % 3 == 0 else "", LINES)
                cell = 9 * row + column
                out.append(str(self.values[cell] or EMPTY), self._style(cell, cell in wrong))
                out.append(" ")
            out.append("│\n", LINES)
        return out.append("└" + "┴".join(["───────"] * 3) + "┘", LINES)

    def _style(self, cell: int, wrong: bool) -> str:
        if wrong:
            return WRONG
        if self.givens[cell]:
            return GIVEN
        return REPAIRED if cell in self.repaired and self.levels[cell] == 0 else STYLES[self.levels[cell]]


def legend() -> Text:
    return Text("  ").join(Text(name, style=style) for name, style in LEGEND)

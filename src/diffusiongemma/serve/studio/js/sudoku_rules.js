// The rules of Sudoku, and puzzles made by them. Nothing here helps the model: it makes puzzles and judges boards.

const ALL = 0x3fe; // bits 1 to 9
export const CELLS = 81;

const UNITS = [];
for (let i = 0; i < 9; i += 1) {
  const corner = 27 * Math.floor(i / 3) + 3 * (i % 3); // of the box
  UNITS.push(Array.from({ length: 9 }, (_, k) => 9 * i + k));
  UNITS.push(Array.from({ length: 9 }, (_, k) => 9 * k + i));
  UNITS.push(Array.from({ length: 9 }, (_, k) => corner + 9 * Math.floor(k / 3) + (k % 3)));
}
const PEERS = Array.from({ length: CELLS }, (_, cell) => {
  const seen = new Set(UNITS.filter((unit) => unit.includes(cell)).flat());
  seen.delete(cell);
  return [...seen];
});

/** 81 characters, `.`, `0`, `_` or `*` for empty; white space and the lines of a drawn board are skipped.
 *  null: it is no board */
export function parse(text) {
  const cells = [...text.replace(/[\s|+─-]/g, "")].map((mark) => (".0_*".includes(mark) ? 0 : Number(mark)));
  return cells.length === CELLS && cells.every((value) => Number.isInteger(value)) ? cells : null;
}

export const write = (board) => board.map((value) => value || ".").join("");

/** 81 values of a board turned by 90 degrees, so many times: other cells come first, the rules stay the same. */
export function turn(cells, times) {
  if (!times) return [...cells];
  return turn(Array.from({ length: CELLS }, (_, at) => cells[9 * (at % 9) + 8 - Math.floor(at / 9)]), times - 1);
}

/** Cells that break a rule; empty ones do not. */
export function conflicts(board) {
  const wrong = new Set();
  board.forEach((value, cell) => { if (value && PEERS[cell].some((peer) => board[peer] === value)) wrong.add(cell); });
  return wrong;
}

/** Is every cell filled in, no rule broken, and every given kept? */
export function isSolution(board, givens) {
  const right = (value, cell) => value >= 1 && value <= 9 && (!givens[cell] || givens[cell] === value);
  return board.length === CELLS && board.every(right) && !conflicts(board).size;
}

const candidates = (board, cell) => {
  let free = ALL;
  for (const peer of PEERS[cell]) free &= ~(1 << board[peer]);
  return free;
};

const count = (bits) => {
  let n = 0;
  for (let rest = bits; rest; rest &= rest - 1) n += 1;
  return n;
};

const digitsOf = (bits) => [1, 2, 3, 4, 5, 6, 7, 8, 9].filter((digit) => bits & (1 << digit));

/** Up to `limit` solutions; the cell with the fewest candidates first, its digits in an order of chance.
 *  null: it gave up, for a few boards of a user's own would take too long. */
export function solutions(givens, limit, random = null, patience = Infinity) {
  const board = [...givens], found = [];
  let tried = 0;
  if (conflicts(board).size) return found;
  const search = () => {
    tried += 1;
    if (tried > patience) return;
    let best = -1, options = 0, fewest = 10;
    for (let cell = 0; cell < CELLS && fewest > 1; cell += 1) {
      if (board[cell]) continue;
      const free = candidates(board, cell), n = count(free);
      if (n < fewest) [best, options, fewest] = [cell, free, n];
    }
    if (best < 0) {
      found.push([...board]);
      return;
    }
    for (const digit of random ? shuffle(digitsOf(options), random) : digitsOf(options)) {
      board[best] = digit;
      search();
      board[best] = 0;
      if (found.length >= limit) return;
    }
  };
  search();
  return tried > patience ? null : found;
}

// easy and medium have many givens; hard ones none to spare, yet need only singles; expert ones need more than that.
const FLOORS = { easy: 42, medium: 33, hard: 0, expert: 0 };

/** A puzzle with one solution. `random`: a function like Math.random */
export function randomPuzzle(level, random = Math.random) {
  for (;;) {
    const puzzle = dig(FLOORS[level], random);
    if (level === "easy" || level === "medium" || bySingles(puzzle) === (level === "hard")) return puzzle;
  }
}

function dig(floor, random) {
  const puzzle = solutions(Array(CELLS).fill(0), 1, random)[0];
  let left = CELLS;
  for (const cell of shuffle([...puzzle.keys()], random)) {
    if (left <= floor) break;
    const value = puzzle[cell];
    puzzle[cell] = 0;
    if (solutions(puzzle, 2).length === 1) left -= 1;
    else puzzle[cell] = value;
  }
  return puzzle;
}

/** Can it be filled in without guessing and without reasoning about pairs? */
export function bySingles(puzzle) {
  const board = [...puzzle];
  for (;;) {
    const open = board.map((value, cell) => (value ? 0 : candidates(board, cell)));
    if (!board.includes(0)) return true;
    let moved = false;
    open.forEach((free, cell) => { if (count(free) === 1) [board[cell], moved] = [digitsOf(free)[0], true]; });
    if (moved) continue;
    for (const unit of UNITS) {
      for (let digit = 1; digit <= 9; digit += 1) {
        const places = unit.filter((cell) => open[cell] & (1 << digit));
        if (places.length === 1 && !board[places[0]]) [board[places[0]], moved] = [digit, true];
      }
    }
    if (!moved) return false;
  }
}

function shuffle(list, random) {
  for (let i = list.length - 1; i > 0; i -= 1) {
    const j = Math.floor(random() * (i + 1));
    [list[i], list[j]] = [list[j], list[i]];
  }
  return list;
}

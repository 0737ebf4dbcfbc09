// The board of the Sudoku tab: 81 fields, what each draft holds, and what was taken back.

import { el } from "./dom.js";
import { NOISE } from "./recording.js";
import { CELLS, conflicts, isSolution, parse } from "./sudoku_rules.js";

const digit = (token) => (/^[1-9]$/.test(token ?? "") ? Number(token) : 0);

/** The 81 cells: fields of a grid, so that phones show their digits. */
export class Board {
  givens = Array(CELLS).fill(0);
  wrong = new Set();
  #cells = [];
  #held = new Map(); // cell -> the digit that it was accepted with last
  #repaired = new Set();

  constructor(host, onEdit) {
    this.onEdit = onEdit;
    for (let row = 0; row < 9; row += 1) {
      const line = el("div", { role: "row", class: "board-row" });
      for (let column = 0; column < 9; column += 1) {
        const name = `row ${row + 1}, column ${column + 1}`;
        const input = el("input", {
          inputmode: "numeric", autocomplete: "off", maxlength: 2, tabindex: row + column ? -1 : 0, "aria-label": name,
        });
        this.#cells.push(input);
        line.append(el("div", { role: "gridcell", class: "cell" }, input));
      }
      host.append(line);
    }
    host.addEventListener("input", (event) => this.#typed(this.#cells.indexOf(event.target)));
    host.addEventListener("keydown", (event) => this.#key(event));
    host.addEventListener("focusin", (event) => this.#rove(this.#cells.indexOf(event.target)));
    host.addEventListener("paste", (event) => {
      const puzzle = parse(event.clipboardData.getData("text"));
      if (!puzzle) return;
      event.preventDefault();
      this.load(puzzle);
      this.onEdit();
    });
  }

  load(givens) {
    this.givens = [...givens];
    this.begin();
    this.#showGivens();
  }

  begin() {
    this.wrong = new Set();
    this.#held.clear();
    this.#repaired = new Set();
  }

  lock(locked) {
    for (const cell of this.#cells) cell.readOnly = locked;
  }

  focus(at) {
    this.#cells[at].focus();
  }

  /** Note on the newest draft what it holds, and which cells were accepted once with another digit. */
  track(recording) {
    const draft = recording.last;
    if (draft.values) return;
    draft.values = this.givens.map((given, cell) => given || digit(draft.tokens[cell]));
    draft.values.forEach((value, cell) => {
      if (this.givens[cell]) return;
      if (this.#held.has(cell) && this.#held.get(cell) !== value) this.#repaired = new Set(this.#repaired).add(cell);
      if (draft.accepted[cell]) this.#held.set(cell, value);
    });
    draft.repaired = this.#repaired;
  }

  draw(recording, at) {
    const { values, levels, repaired } = recording.drafts[at];
    const final = recording.usage !== null && at === recording.drafts.length - 1;
    values.forEach((value, cell) => {
      if (this.givens[cell]) return this.#set(cell, value, "given");
      if (final && this.wrong.has(cell)) return this.#set(cell, value, "wrong");
      const level = final ? 0 : levels[cell];
      const kind = level === 0 && repaired.has(cell) ? "repaired" : `lv${value ? level : NOISE}`;
      return this.#set(cell, value, kind);
    });
  }

  /** The whole answer against the rules. */
  judge(recording) {
    const marks = [...recording.text];
    const clean = this.givens.map((_, cell) => digit(marks[cell]));
    this.wrong = conflicts(clean);
    clean.forEach((value, cell) => {
      if (!value) this.wrong.add(cell);
      if (this.givens[cell]) this.wrong.delete(cell); // the givens are right
    });
    if (recording.last) {
      recording.last.values = clean;
      this.draw(recording, recording.drafts.length - 1);
    }
    return isSolution(clean, this.givens);
  }

  #showGivens() {
    const wrong = conflicts(this.givens);
    this.givens.forEach((value, cell) => this.#set(cell, value, wrong.has(cell) ? "wrong" : value ? "given" : ""));
  }

  #set(cell, value, kind) {
    const input = this.#cells[cell], text = value ? String(value) : "";
    if (input.value !== text) input.value = text;
    if (input.className !== kind) input.className = kind;
  }

  #typed(cell) {
    const digits = this.#cells[cell].value.replace(/[^1-9]/g, "");
    this.givens[cell] = Number(digits.at(-1) ?? 0);
    this.begin();
    this.#showGivens();
    this.onEdit();
  }

  #key(event) {
    const at = this.#cells.indexOf(event.target);
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -9, ArrowDown: 9 };
    if (event.key in moves) {
      event.preventDefault();
      const next = at + moves[event.key];
      const sideways = Math.abs(moves[event.key]) === 1;
      if (next >= 0 && next < CELLS && (!sideways || Math.floor(next / 9) === Math.floor(at / 9))) this.focus(next);
    } else if (event.key === "Home" || event.key === "End") {
      event.preventDefault();
      this.focus(9 * Math.floor(at / 9) + (event.key === "End" ? 8 : 0));
    }
  }

  #rove(at) {
    this.#cells.forEach((cell, i) => { cell.tabIndex = i === at ? 0 : -1; });
    this.#cells[at].select();
  }
}

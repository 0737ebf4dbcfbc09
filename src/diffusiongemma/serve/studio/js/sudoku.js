// Sudoku: the givens are pinned on a canvas of 81 cells, the rest crystallises; cells that were taken back are marked.

import { record } from "./ask.js";
import { Board } from "./board.js";
import { $, $$, announce, dotted, figure, perFrame, plural, seconds } from "./dom.js";
import { link } from "./link.js";
import { Options, fieldsOf } from "./options.js";
import { CELLS, conflicts, parse, randomPuzzle, solutions, turn, write } from "./sudoku_rules.js";
import { Task, partsOf } from "./task.js";
import { Timeline } from "./timeline.js";

const CANVAS = 96; // what the embedded model learned boards in: 81 cells, the end, padding
// As `dgemma sudoku` has it: hotter than it writes text, and time for boards that hang in what they believe. One that has
// not settled when its steps run out is turned and looked at again; where the steps are given, there is one look.
const SAMPLER = { steps: 96, t_min: 0.4, t_max: 0.8, forget: 8 };
const LOOKS = 4;
const PATIENCE = 50000; // nodes of search to tell whether a puzzle of one's own has a solution

export function startSudoku() {
  const panel = $("#panel-sudoku"), text = $("#sudoku-text"), reset = $("#sudoku-reset");
  const task = new Task(partsOf(panel));
  const options = new Options($("#sudoku-options"), ["seed", "steps", "entropy_bound", "attempts"], { attempts: 3 });
  const board = new Board($("#board"), () => { text.value = write(board.givens); clear(); });
  const pick = (_, i) => i < CELLS && !board.givens[i];
  const timeline = new Timeline($("#sudoku-timeline"), (at) => board.draw(recording, at), { pick });
  let recording = null;
  const paint = perFrame((so_far) => board.draw(so_far, so_far.drafts.length - 1));

  function clear() {
    recording = null;
    timeline.clear();
    reset.hidden = true;
    verdict("");
    task.say("");
  }

  function load(puzzle) {
    task.stop();
    paint.drop();
    board.load(puzzle);
    text.value = write(puzzle);
    clear();
  }

  function verdict(said, kind = "") {
    $("#sudoku-verdict").textContent = said;
    $("#sudoku-verdict").dataset.kind = kind;
  }

  const solve = () => task.run(async (signal) => {
    const values = options.read(), doubt = whyNot(board.givens);
    if (!values) return;
    clear();
    if (doubt) verdict(doubt.text, doubt.fatal ? "bad" : "");
    if (doubt?.fatal) return;
    board.lock(true);
    try {
      const attempts = values.attempts ?? 1;
      for (let tried = 1; tried <= attempts; tried += 1) {
        const looks = await attempt(values, attempts > 1 && `Attempt ${tried} of at most ${attempts}`, signal);
        const solved = board.judge(recording);
        tell(solved, looks, tried);
        if (solved) break;
        values.seed += 1;
      }
    } finally {
      paint.flush();
      if (recording?.drafts.length) timeline.finish(recording);
      reset.hidden = !recording; // none: another puzzle was loaded meanwhile
      board.lock(false);
    }
  });

  /** Look after look, until the model's own stop rule says that the board has settled -> the figures of each. */
  async function attempt(values, title, signal) {
    const most = values.steps ? 1 : LOOKS, looks = [];
    do {
      const turns = looks.length;
      task.say(dotted(title, turns > 0 && `Look ${turns + 1} of ${most}, the board turned`));
      board.begin();
      const body = bodyFor(turn(board.givens, turns), values);
      recording = await record("sudoku", "/v1/canvas/infill", body, (so_far, what) => {
        recording = so_far;
        if (turns) turnBack(so_far, what, turns);
        if (!so_far.drafts.length) return;
        board.track(so_far);
        paint(so_far);
        timeline.follow(so_far);
      }, signal);
      paint.flush();
      looks.push(recording.usage.diffusion);
      values.seed = looks.at(-1).seed; // every look of an attempt has the same
    } while (looks.length < most && !looks.at(-1).blocks_settled);
    return looks;
  }

  function tell(solved, looks, tried) {
    const repaired = recording.last?.repaired.size ?? 0, wrong = board.wrong.size;
    const sum = (name) => looks.reduce((total, one) => total + one[name], 0);
    const cells = board.givens.filter((given) => !given).length;
    if (solved) verdict("Solved: every row, column and box holds 1 to 9.", "good");
    else verdict(`Not solved: ${plural(wrong, "cell breaks", "cells break")} the rules.`, "bad");
    task.say(dotted(
      plural(sum("steps"), "step"), looks.length > 1 && `${looks.length} looks`,
      `${figure(cells / sum("steps"))} cells a step`, `${plural(repaired, "cell")} repaired`,
      seconds(sum("total_seconds")), `seed ${looks[0].seed}`, tried > 1 && `attempt ${tried}`,
    ));
    announce($("#sudoku-verdict").textContent);
  }

  $("[data-go]", panel).addEventListener("click", solve);
  const loadNew = () => load(randomPuzzle($("#sudoku-level input:checked").value));
  $("#sudoku-new").addEventListener("click", loadNew);
  for (const radio of $$("#sudoku-level input")) radio.addEventListener("change", loadNew);
  $("#sudoku-clear").addEventListener("click", () => { load(Array(CELLS).fill(0)); board.focus(0); });
  reset.addEventListener("click", () => load(board.givens));
  text.addEventListener("input", () => {
    const puzzle = parse(text.value);
    text.setCustomValidity(puzzle || !text.value.trim() ? "" : "81 characters: digits, and . or 0 for an empty cell");
    text.toggleAttribute("data-wrong", !text.validity.valid);
    if (puzzle) load(puzzle);
  });
  link.addEventListener("model", () => {
    const { id, abilities } = link.model;
    if (!abilities.chat) task.say(`${id} has no chat template, so it cannot be asked for a board.`);
  });
  load(randomPuzzle("easy"));
}

/** Make what has just come upright: so is the board on the page, however the model has it. */
function turnBack(so_far, what, turns) {
  const upright = (values) => [...turn(values, 4 - turns), ...values.slice(CELLS)];
  if (what === "draft") {
    for (const part of ["tokens", "entropy", "accepted", "levels"]) so_far.last[part] = upright(so_far.last[part]);
  } else if (what === "end") so_far.text = upright([...so_far.text]).join("");
}

function bodyFor(givens, values) {
  const template = givens.map((value) => value || "[[?1]]").join("");
  const canvas = Math.min(CANVAS, link.model.canvas_length);
  const messages = [{ role: "user", content: `Sudoku\n${givens.join("")}` }];
  return { messages, template, ...fieldsOf(values, { canvas, ...SAMPLER }) };
}

/** A puzzle that cannot be solved is not sent. That is all that a solver does here. */
function whyNot(givens) {
  if (conflicts(givens).size) return { text: "These givens contradict each other.", fatal: true };
  if (!givens.includes(0)) return { text: "This board is full, and right.", fatal: true };
  const found = solutions(givens, 2, null, PATIENCE);
  if (found?.length === 0) return { text: "This puzzle has no solution: its givens leave some cell no digit.", fatal: true };
  if (found?.length === 2) return { text: "This puzzle has several solutions: any that obeys the rules will do." };
  return null;
}

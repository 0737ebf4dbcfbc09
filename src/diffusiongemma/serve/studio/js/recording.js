// Everything that one answer told: each draft with its time, the text that became final, the figures at the end.

const BOUNDS = [0.1, 0.5, 1.5, 3]; // nats: one shade below each, noise from the last on; the same as in the terminal
export const NOISE = BOUNDS.length + 1;

/** 0: settled … NOISE */
export function level(entropy, accepted) {
  if (accepted) return 0;
  let at = 0;
  while (at < BOUNDS.length && entropy >= BOUNDS[at]) at += 1;
  return 1 + at;
}

export class Recording {
  drafts = [];
  pieces = []; // {at, text}: what became final, and when
  text = "";
  thinking = "";
  finish = null;
  result = null; // the whole response of a canvas endpoint
  usage = null;
  began = performance.now();

  /** One event of the stream -> "draft", "text", "end" or null */
  take(message) {
    const at = performance.now() - this.began;
    if (message.object === "canvas.draft") {
      this.drafts.push(readDraft(message, at, this.text.length));
      return "draft";
    }
    if (message.object === "canvas.infill" || message.object === "canvas.edit") {
      this.result = message;
      this.#end(message.usage, message.finish_reason, message.text);
      return "end";
    }
    const choice = message.choices?.[0];
    const added = choice?.delta?.content ?? choice?.text ?? message.text ?? "";
    this.thinking += choice?.delta?.reasoning_content ?? "";
    this.finish = choice?.finish_reason ?? this.finish;
    if (message.usage) {
      this.#end(message.usage, this.finish, this.text);
      return "end";
    }
    if (!added) return null;
    this.text += added;
    this.pieces.push({ at, text: added });
    return "text";
  }

  #end(usage, finish, text) {
    Object.assign(this, { usage, finish, text, elapsed: performance.now() - this.began });
  }

  get last() {
    return this.drafts.at(-1) ?? null;
  }

  /** Final text in front of a draft: blocks that were done before it. */
  before(draft) {
    return this.text.slice(0, draft.before);
  }
}

function readDraft(message, at, before) {
  const { block, step, steps, tokens, entropy, accepted, skipped } = message;
  const levels = Uint8Array.from(entropy, (nats, i) => level(nats, accepted[i]));
  const special = new Set(message.special);
  let tail = tokens.length; // where the end and the padding behind the text begin
  while (tail > 0 && special.has(tail - 1)) tail -= 1;
  return { at, before, block, step, steps, tokens, entropy, accepted, skipped, levels, special, tail };
}

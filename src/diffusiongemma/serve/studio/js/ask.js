// Requests to the model, as every tab needs them.

import { stream } from "./api.js";
import { link } from "./link.js";
import { metrics } from "./metrics.js";
import { Recording } from "./recording.js";

/** Send it and record what comes; `onChange(recording, what)` after each event. */
export async function record(tab, path, body, onChange, signal) {
  const recording = new Recording();
  try {
    await stream(path, { model: link.model.id, ...body }, (message) => {
      const what = recording.take(message);
      if (what) onChange(recording, what);
    }, signal);
  } finally {
    recording.elapsed ??= performance.now() - recording.began;
  }
  if (recording.usage) metrics.add(tab, recording);
  return recording;
}

/** A text as the model takes it: a conversation, or, without a chat template, a text to continue. */
export function prompted(messages, fields) {
  if (link.model.abilities.chat) return ["/v1/chat/completions", { messages, ...fields }];
  return ["/v1/completions", { prompt: messages.map((message) => message.content).join("\n"), ...fields }];
}

export const isEmbedded = () => link.model.abilities.tasks.length > 0;

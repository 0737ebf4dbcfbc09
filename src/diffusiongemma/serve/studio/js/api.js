// The public API, and nothing else: docs/api.md tells what goes over this wire.

let key = remembered();

export class ApiError extends Error {
  /** `status` 0: the server was not reached, or the answer broke off. */
  constructor(status, message, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, param, retryAfter });
  }
}

export async function get(path, signal) {
  return (await send(path, { signal })).json();
}

/** POST with `stream: true`; `onEvent(object)` is called for every event, in order, until [DONE]. */
export async function stream(path, body, onEvent, signal) {
  const wanted = { include_drafts: true, ...(path.includes("/canvas/") ? {} : { include_usage: true }) };
  const response = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: wanted }),
    signal,
  });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const message = JSON.parse(data);
    signal?.throwIfAborted();
    if (message.error) throw new ApiError(response.status, message.error.message, message.error);
    onEvent(message);
  }
  throw brokenOff();
}

/** The data of server-sent events. Chromium and Safari have no `for await` over a body, so it is read by hand. */
async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : brokenOff();
      });
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading wants no more of it
  }
}

async function send(path, options) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.", { code: "unreachable" });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, { ...error, retryAfter });
  } catch {
    const said = `The server answered ${response.status} ${response.statusText}.`;
    return new ApiError(response.status, said, { retryAfter });
  }
}

const brokenOff = () =>
  new ApiError(0, "The connection broke off before the answer was whole.", { code: "broken_off" });

// ---- the key of servers that ask for one: kept for this tab, sent to this server alone ------------------------------

export function useKey(given) {
  key = given;
  try {
    sessionStorage.setItem("key", given);
  } catch { /* storage is switched off: it holds until the page is left */ }
}

function remembered() {
  try {
    return sessionStorage.getItem("key") ?? "";
  } catch {
    return "";
  }
}

// The API of the service that sent this page, asked with the caller's key and cache salt.

const KEY = "mallee.key", SALT = "mallee.salt";

// Paths are relative to the page, which may stand behind a prefix.
const base = new URL("./", document.baseURI).href;

export const credentials = {
  get key() { return sessionStorage.getItem(KEY) ?? ""; },
  get salt() { return sessionStorage.getItem(SALT) ?? ""; },
  set(key, salt) {
    sessionStorage.setItem(KEY, key);
    sessionStorage.setItem(SALT, salt);
  },
};

/** A refusal: its status, code and sentence. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (credentials.key) headers.authorization = `Bearer ${credentials.key}`;
  if (credentials.salt) headers["x-cache-salt"] = credentials.salt;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(base + path.replace(/^\//, ""), {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    error = { message: answer.statusText };
  }
  throw new Refused(answer.status, error.code ?? "", error.message ?? `status ${answer.status}`);
}

/** The JSON that answers. Throws Refused, and TypeError where nothing answers. */
export async function ask(method, path, body, signal) {
  return (await send(method, path, body, signal)).json();
}

/** The events of a stream, as objects, until it ends. Throws as `ask`, and Refused for an event that is one. */
export async function* events(method, path, body, signal) {
  const answer = await send(method, path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const line = text.slice(0, end);
        if (!line.startsWith("data: ")) continue; // a comment: the stream lives
        if (line === "data: [DONE]") return;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refused(0, event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const segment = encodeURIComponent;

export const sessionPath = (name) => `v1/sessions/${segment(name)}`;

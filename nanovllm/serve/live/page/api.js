// Requests to this page's server, with the API key if one is set.

const KEY = "nanovllm.key";

export class ApiFailure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => localStorage.getItem(KEY) ?? "",
  set: (value) => localStorage.setItem(KEY, value),
};

export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    const message = answer.error?.message ?? `the server returned ${response.status}`;
    throw new ApiFailure(message, response.status);
  }
  return response;
}

/** Yield a stream's events as objects; throw if an event is an error. */
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (!part.startsWith("data: ") || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiFailure(event.error.message, event.error.code ?? 500);
      yield event;
    }
  }
}

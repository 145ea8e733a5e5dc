// Conversations and settings, stored only in this browser; each conversation has its own key.

const PREFIX = "nanovllm.chat.";
const SETTINGS = "nanovllm.settings";

export function chats() {
  const all = Object.keys(localStorage)
    .filter((key) => key.startsWith(PREFIX))
    .map((key) => JSON.parse(localStorage.getItem(key)));
  return all.sort((one, other) => other.time - one.time);
}

export const newChat = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), time: Date.now(), messages: [] });

/** Store a conversation; delete the oldest ones if the browser's storage is full. */
export function save(chat) {
  for (;;) {
    try {
      localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
      return;
    } catch (error) {
      const oldest = chats().filter((each) => each.id !== chat.id).at(-1);
      if (!oldest) throw error;
      remove(oldest.id);
    }
  }
}

export const has = (chat) => localStorage.getItem(PREFIX + chat.id) !== null;

export const remove = (id) => localStorage.removeItem(PREFIX + id);

export const title = (chat) => chat.messages.find((each) => each.role === "user")?.content.trim().slice(0, 60) || "New chat";

export const settings = {
  get: () => JSON.parse(localStorage.getItem(SETTINGS) ?? "{}"),
  set: (values) => localStorage.setItem(SETTINGS, JSON.stringify(values)),
};

/** Convert settings to request fields. */
export function asFields(values) {
  const fields = {};
  for (const [name, value] of Object.entries(values)) {
    if (name === "system" || value === "") continue;
    if (name === "tools") fields.tools = JSON.parse(value);
    else if (name === "stop") fields.stop = [value];
    else fields[name] = Number(value);
  }
  return fields;
}

// The conversation: sends messages, streams responses, and stores both.

import { events } from "./api.js";
import { find, iconButton, make } from "./elements.js";
import { Images, contentWith } from "./images.js";
import { messageView } from "./messages.js";
import * as store from "./store.js";

const STARTERS = [
  "Explain paged attention to a ten-year-old.",
  "Write a Python function that merges two sorted lists.",
  "Compare three ways to make tea, as a table.",
];

export class Chat {
  constructor(onFailure) {
    this.onFailure = onFailure;
    this.chat = store.chats()[0] ?? store.newChat();
    this.answers = new Map(); // responses in progress, keyed by chat id: the chat and an AbortController
    this.views = new WeakMap(); // the latest view of each message
    this.list = find("messages");
    this.input = find("input");
    this.images = new Images();
    this.connect();
    this.show();
  }

  connect() {
    find("composer").onsubmit = (event) => (event.preventDefault(), this.sendInput());
    find("stop").onclick = () => this.stop();
    find("new-chat").onclick = () => this.open(store.newChat());
    this.input.oninput = () => this.fitInput();
    this.input.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), this.sendInput());
    };
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    window.addEventListener("storage", () => this.showChats());
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 220)}px`;
  }

  sendInput() {
    const text = this.input.value.trim();
    const isEmpty = !text && this.images.images.length === 0;
    if (isEmpty || this.answers.has(this.chat.id)) return;
    this.input.value = "";
    this.fitInput();
    const images = this.images.take();
    this.ask({ role: "user", content: text, ...(images.length && { images }) });
  }

  stop(id = this.chat.id) {
    this.answers.get(id)?.controller.abort();
  }

  /** Show a chat; responses in other chats continue. */
  open(chat) {
    document.body.classList.remove("history-open");
    find("menu").setAttribute("aria-expanded", "false");
    this.input.focus();
    this.chat = this.answers.get(chat.id)?.chat ?? chat;
    this.show();
  }

  /** Replace the messages from `index` on with the given ones, and request a response. */
  goOn(index, ...messages) {
    this.stop();
    this.chat.messages.splice(index, Infinity, ...messages);
    this.show();
    this.answer();
  }

  ask(message) {
    this.goOn(this.chat.messages.length, message);
  }

  async answer() {
    const { chat } = this;
    const message = { role: "assistant", content: "", isBusy: true };
    const asked = chat.messages.map(asRequestMessage);
    chat.messages.push(message);
    this.keep(chat);
    this.add(message, chat.messages.length - 1);
    const controller = new AbortController();
    this.answers.set(chat.id, { chat, controller });
    this.showAnswering();
    const update = () => (this.views.get(message).update(), chat === this.chat && this.scroll());
    try {
      await this.stream(asked, message, update, controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") {
        message.error = error.message;
        this.onFailure(error);
      }
    }
    delete message.isBusy;
    if (store.has(chat)) this.keep(chat); // unless it was deleted meanwhile
    if (this.answers.get(chat.id)?.controller === controller) this.answers.delete(chat.id);
    update();
    this.showAnswering();
  }

  async stream(messages, message, update, signal) {
    const values = store.settings.get();
    if (values.system) messages.unshift({ role: "system", content: values.system });
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...store.asFields(values) };
    const begin = performance.now();
    let first = 0;
    let isDrawn = true;
    const draw = () => ((isDrawn = true), update());
    for await (const event of events("v1/chat/completions", { body, signal })) {
      const now = performance.now();
      if (event.choices[0]) addDelta(message, event.choices[0].delta);
      if (!first && (message.content || message.reasoning || message.tool_calls)) first = now;
      if (event.usage) message.stats = statsOf(event.usage, begin, first || now, now);
      if (isDrawn) ((isDrawn = false), requestAnimationFrame(draw));
    }
  }

  showAnswering() {
    const isAnswering = this.answers.has(this.chat.id);
    find("stop").hidden = !isAnswering;
    find("send").hidden = isAnswering;
    this.list.setAttribute("aria-busy", String(isAnswering));
  }

  keep(chat) {
    chat.time = Date.now();
    const messages = chat.messages.map(({ isBusy, images, ...rest }) => ({
      ...rest,
      ...(images && { images: images.map(({ name }) => ({ name })) }), // their content may exceed the browser's storage
    }));
    store.save({ ...chat, messages });
    this.showChats();
  }

  show() {
    this.list.replaceChildren();
    if (this.chat.messages.length === 0) this.list.append(this.greeting());
    this.chat.messages.forEach((message, index) => this.add(message, index));
    this.showChats();
    this.showAnswering();
    this.scroll(true);
  }

  greeting() {
    const buttons = STARTERS.map((text) => make("button", { type: "button", onclick: () => this.ask({ role: "user", content: text }) }, text));
    return make("div", { className: "greeting" }, make("h1", {}, "Ask, and watch the engine think"), make("div", { className: "starters" }, ...buttons));
  }

  add(message, index) {
    const view = messageView(message, {
      regenerate: () => this.goOn(index),
      edit: (content) => this.goOn(index, { ...message, content }),
      answerCall: (id, content) => this.addResult({ role: "tool", tool_call_id: id, content }),
      needsResult: (id) => this.chat.messages.every((each) => each.tool_call_id !== id),
    });
    this.list.append(view);
    this.views.set(message, view);
  }

  /** Add a tool's result; request a response once every call has its result. */
  addResult(result) {
    this.chat.messages.push(result);
    const calls = this.chat.messages.findLast((each) => each.tool_calls).tool_calls;
    const isDone = calls.every((call) => this.chat.messages.some((each) => each.tool_call_id === call.id));
    if (isDone) this.goOn(this.chat.messages.length);
    else this.show();
  }

  showChats() {
    const entries = store.chats().map((chat) => {
      const name = store.title(chat);
      const open = make("button", { type: "button", className: "chat-name", onclick: () => this.open(chat) }, name);
      if (chat.id === this.chat.id) open.setAttribute("aria-current", "true");
      const remove = iconButton("remove", `Delete ${name}`, () => {
        store.remove(chat.id);
        this.stop(chat.id);
        if (chat.id === this.chat.id) this.open(store.newChat());
        else this.showChats();
      });
      return make("li", {}, open, remove);
    });
    find("chats").replaceChildren(...entries);
  }

  /** Scroll with the response, unless the user scrolled up. */
  scroll(isForced = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    if (isForced || scrollHeight - scrollTop - clientHeight < 160) this.list.scrollTop = scrollHeight;
  }
}

function asRequestMessage({ role, content, images, tool_calls, tool_call_id }) {
  const message = { role, content: images ? contentWith(images, content) : content };
  if (tool_calls) message.tool_calls = tool_calls;
  if (tool_call_id) message.tool_call_id = tool_call_id;
  return message;
}

function addDelta(message, delta) {
  message.content += delta.content ?? "";
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    const call = message.tool_calls[index].function;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }
}

function statsOf(usage, begin, first, now) {
  return {
    prompt: usage.prompt_tokens,
    answer: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    first: (first - begin) / 1000,
    seconds: (now - first) / 1000,
  };
}

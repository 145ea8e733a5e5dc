// The view of one message of a conversation.

import { copyButton, iconButton, make } from "./elements.js";
import { parse, render } from "./markdown.js";

/** Create the element of a message; `actions` are the callbacks of its buttons and forms, keyed by name. */
export function messageView(message, actions) {
  const body = make("div", { className: "body" });
  const view = make("article", { className: `message ${message.role}` }, body);
  view.setAttribute("aria-label", { user: "You", assistant: "The model", tool: "A tool" }[message.role]);
  const tools = make("div", { className: "actions" });
  if (message.role === "assistant") {
    tools.append(copyButton(() => message.content), iconButton("again", "Regenerate", actions.regenerate));
  } else if (message.role === "user") {
    tools.append(copyButton(() => message.content), iconButton("edit", "Edit", () => edit(view, message, actions.edit)));
  }
  const facts = make("span", { className: "facts" });
  tools.append(facts);
  view.append(tools);
  view.update = () => {
    body.replaceChildren(...contents(message, body, actions));
    facts.textContent = describe(message);
    view.classList.toggle("busy", Boolean(message.isBusy));
  };
  view.update();
  return view;
}

function contents(message, old, actions) {
  if (message.role === "user") {
    const images = (message.images ?? []).map(({ name }) => make("p", { className: "image" }, name));
    return [...images, make("p", { className: "plain" }, message.content)];
  }
  if (message.role === "tool") return [make("p", { className: "plain" }, `result: ${message.content}`)];
  const parts = [];
  if (message.reasoning) {
    const isOpen = old.querySelector("details.reasoning")?.open ?? false;
    const label = message.content || !message.isBusy ? "Reasoning" : "Reasoning…";
    const text = make("div", { className: "plain" }, message.reasoning);
    parts.push(make("details", { className: "reasoning", open: isOpen }, make("summary", {}, label), text));
  }
  parts.push(...render(parse(message.content), codeBlock));
  for (const call of message.tool_calls ?? []) parts.push(toolCall(call, message, actions));
  if (message.error) parts.push(make("p", { className: "error" }, message.error));
  return parts;
}

export function codeBlock(code, language) {
  const head = make("div", { className: "code-head" }, make("span", {}, language || "text"), copyButton(() => code));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, make("code", {}, code)));
}

function toolCall(call, message, actions) {
  const text = call.function.arguments;
  const view = make("div", { className: "tool-call" }, make("strong", {}, `calls ${call.function.name}`), make("pre", {}, pretty(text)));
  if (!message.isBusy && actions.needsResult(call.id)) {
    const input = make("input", { type: "text", placeholder: "What the tool returned" });
    input.setAttribute("aria-label", `Result of ${call.function.name}`);
    const form = make("form", { onsubmit: (event) => (event.preventDefault(), actions.answerCall(call.id, input.value)) });
    form.append(input, make("button", {}, "Return"));
    view.append(form);
  }
  return view;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function describe({ stats, isBusy }) {
  if (!stats || isBusy) return "";
  const cached = stats.cached ? `, ${stats.cached} cached` : "";
  const speed = stats.seconds > 0 ? ` · ${(stats.answer / stats.seconds).toFixed(1)} tok/s` : "";
  return `${stats.prompt} → ${stats.answer} tokens${cached} · first after ${stats.first.toFixed(2)} s${speed}`;
}

function edit(view, message, done) {
  const area = make("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
  area.setAttribute("aria-label", "Edit the message");
  const finish = (isSent) => (isSent && area.value.trim() ? done(area.value) : view.update());
  area.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey) (event.preventDefault(), finish(true));
    if (event.key === "Escape") (event.stopPropagation(), finish(false));
  };
  const send = make("button", { type: "button", onclick: () => finish(true) }, "Send");
  const cancel = make("button", { type: "button", className: "quiet", onclick: () => finish(false) }, "Cancel");
  view.querySelector(".body").replaceChildren(area, make("p", { className: "buttons" }, send, cancel));
  area.focus();
}

// Entry point of the page: sets up the chat, the engine view, the settings and the buttons.

import { key, request } from "./api.js";
import { Chat } from "./chat.js";
import { find, make } from "./elements.js";
import { Engine } from "./engine.js";
import { asFields, settings } from "./store.js";
import { startTips } from "./tips.js";

const THEME = "nanovllm.theme";

/** Ask for an API key if the server rejected the request for lack of a valid one; return whether it did. */
function onFailure(error) {
  if (error.status !== 401) return false;
  const dialog = find("key-dialog");
  if (!dialog.open) {
    dialog.querySelector(".error").textContent = key.get() ? "The server rejected this key." : "";
    dialog.showModal();
  }
  return true;
}

export const engine = new Engine(onFailure);
export const chat = new Chat(onFailure);

async function begin() {
  engine.watch();
  try {
    const models = await (await request("v1/models")).json();
    find("model").textContent = models.data[0].id;
    document.title = `${models.data[0].id} · nanovllm`;
    showDefaults(models.data[0]);
  } catch (error) {
    onFailure(error);
  }
}

find("key-dialog").querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  key.set(event.target.elements.key.value.trim());
  find("key-dialog").close();
  begin();
};

function showDefaults({ default_sampling_params: values, max_model_len: maxLength }) {
  const { elements } = find("settings").querySelector("form");
  for (const [name, value] of Object.entries(values)) elements[name].placeholder = value;
  elements.max_tokens.placeholder = `up to ${maxLength}`;
}

function openSettings() {
  const { elements } = find("settings").querySelector("form");
  const values = settings.get();
  for (const element of elements) if (element.name) element.value = values[element.name] ?? "";
  find("settings").querySelector(".error").textContent = "";
  find("settings").showModal();
}

find("settings").querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  const values = Object.fromEntries(new FormData(event.target));
  try {
    asFields(values);
  } catch (error) {
    find("settings").querySelector(".error").textContent = `The tools are not valid JSON: ${error.message}`;
    return;
  }
  settings.set(values);
  find("settings").close();
};
find("settings").querySelector("[value=cancel]").onclick = () => find("settings").close();
find("open-settings").onclick = openSettings;

const systemTheme = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const theme = localStorage.getItem(THEME) ?? (systemTheme.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  engine.recolor();
  return theme;
}
find("theme").onclick = () => {
  localStorage.setItem(THEME, showTheme() === "dark" ? "light" : "dark");
  showTheme();
};
systemTheme.onchange = showTheme;

function showView(view) {
  document.body.dataset.view = view;
  for (const name of ["chat", "engine"]) find(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  engine.drawSoon();
}
find("show-chat").onclick = () => showView("chat");
find("show-engine").onclick = () => showView("engine");
find("menu").onclick = () => {
  const isOpen = document.body.classList.toggle("history-open");
  find("menu").setAttribute("aria-expanded", String(isOpen));
};

/** Run a button's action; show an error next to the buttons if it fails. */
async function attempt(action) {
  find("try-error").textContent = "";
  try {
    await action();
  } catch (error) {
    if (!onFailure(error)) find("try-error").textContent = error.message;
  }
}

/** Send all prompts in one request, so that they run together: a browser opens at most six connections. */
const send = (prompt, maxTokens) =>
  attempt(() => request("v1/completions", { body: { prompt, max_tokens: maxTokens, ignore_eos: true } }));

const control = (action) => attempt(() => request(`engine/${action}?engine=${engine.number}`, { body: {} }));
find("pause").onclick = () => control(engine.state.paused ? "resume" : "pause");
find("step").onclick = () => ((find("step").disabled = true), control("step")); // disabled until the next snapshot

const WORDS = "block token cache step prompt answer batch queue engine page share read write wait run".split(" ");
const words = (number, salt) => Array.from({ length: number }, (_, i) => WORDS[(i * (salt + 7) + ((i * i) % 11)) % WORDS.length]).join(" ");
const salt = () => Math.floor(Math.random() * 1000);

find("try-batch").onclick = () => send(Array.from({ length: 8 }, (_, i) => `${i + salt()}. ${words(12, i)}`), 80);
find("try-prefix").onclick = () => {
  const beginning = `${salt()} ${words(240, salt())}`;
  send(Array.from({ length: 4 }, (_, i) => `${beginning} ${i}`), 60);
};
find("try-long").onclick = () => send([`${salt()} ${words(1200, salt())}`], 24);
find("record").onclick = async () => {
  find("record").disabled = true;
  await attempt(async () => {
    const blob = await (await request("trace?seconds=2")).blob();
    const link = make("a", { href: URL.createObjectURL(blob), download: "nanovllm-trace.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  });
  find("record").disabled = false;
};

showTheme();
startTips();
begin();

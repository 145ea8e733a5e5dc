// The live view of the engine: subscribes to its events while the page is visible, and draws them.

import { ApiFailure, events } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { Sparkline, Timeline } from "./charts.js";
import { find, make, setText } from "./elements.js";
import { Pace } from "./pace.js";
import { apply, counts, holders, hue, running, shownText } from "./state.js";
import { StepMode } from "./stepmode.js";

const MAX_ROWS = 64;
const SAMPLE_MS = 500;
const WHOLE = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });

export class Engine {
  constructor(onFailure) {
    this.onFailure = onFailure;
    this.state = null;
    this.map = new BlockMap(find("map"), find("map-detail"));
    this.timeline = new Timeline(find("steps"), find("step-detail"));
    this.lines = {
      speed: new Sparkline(find("speed-line")),
      hits: new Sparkline(find("hits-line"), 1),
      usage: new Sparkline(find("usage-line"), 1),
    };
    this.stepMode = new StepMode((blocks) => ((this.map.marked = blocks), this.pace.askNow()));
    this.rows = new Map(); // elements of running sequences, keyed by id
    this.totals = []; // output tokens, one entry per sample
    this.pace = new Pace(() => this.draw());
    this.isSampled = false; // whether there are samples that are not drawn yet
    this.query = ""; // empty until an engine is selected: the server chooses a healthy one
    find("engines").onchange = () => ((this.query = `?engine=${find("engines").value}`), this.watch());
    setInterval(() => this.sample(), SAMPLE_MS);
    document.addEventListener("visibilitychange", () => this.watch());
    new ResizeObserver(() => this.state && this.pace.askNow()).observe(find("engine"));
  }

  /** Subscribe while the page is visible; a hidden page costs the engine nothing. */
  async watch() {
    this.controller?.abort();
    if (document.hidden) return;
    const controller = (this.controller = new AbortController());
    this.place = ""; // the shown engine and the list of all engines
    try {
      for await (const event of events(`engine/events${this.query}`, { signal: controller.signal })) {
        this.setEngine(event);
        this.state = apply(this.state, event);
        const status = event.paused ? "paused" : "live";
        this.setStatus(status, status);
        if (event.paused) this.pace.askNow();
        else this.drawSoon();
      }
      throw new ApiFailure("the server closed the connection", 0);
    } catch (error) {
      if (controller.signal.aborted) return;
      this.fail(error);
    }
  }

  /** Update the list of engines, and reset the view if the engine changed. */
  setEngine({ engine, engines }) {
    const place = JSON.stringify([engine, engines]);
    if (place === this.place) return; // the list may be open: do not replace it
    this.place = place;
    if (engine !== this.number) {
      this.number = engine;
      this.state = null;
      this.totals = [];
      for (const line of Object.values(this.lines)) line.values = [];
    }
    const select = find("engines");
    select.replaceChildren(...engines.map((number) => make("option", { value: number }, `engine ${number}`)));
    select.value = engine;
    select.hidden = engines.length === 1;
  }

  fail(error) {
    const isDead = error instanceof ApiFailure && error.status !== 0;
    this.setStatus("dead", isDead ? "engine lost" : "no connection");
    find("failure").textContent = isDead ? `The engine is lost: ${error.message}` : "The server does not respond.";
    find("failure").hidden = false;
    if (error.status === 400) this.query = ""; // the selected engine no longer exists
    if (!this.onFailure(error)) setTimeout(() => this.watch(), 2000);
  }

  setStatus(state, text) {
    const status = find("status");
    if (status.dataset.state === state && status.textContent === text) return;
    status.dataset.state = state;
    status.textContent = text;
    if (state !== "dead") find("failure").hidden = true;
  }

  drawSoon() {
    if (this.state) this.pace.ask();
  }

  /** Redraw everything in the colors of a new theme, sparklines included. */
  recolor() {
    if (!this.state) return;
    this.isSampled = this.speed !== undefined;
    this.pace.askNow();
  }

  draw() {
    const { state } = this;
    const held = holders(state);
    const number = counts(state, held);
    this.map.draw(state, held);
    this.timeline.set(state.steps);
    for (const [name, count] of Object.entries(number)) setText(find(`num-${name}`), count);
    find("snapshots").hidden = state.snapshots === null;
    const zoom = this.map.numShown < state.numBlocks ? ` · zoomed to ${this.map.numShown}` : "";
    setText(find("map-size"), `${state.numBlocks} blocks of ${state.blockSize} tokens${zoom}`);
    find("map").setAttribute("aria-label", `KV cache: ${number.held} blocks held, ${number.shared} of them shared, ${number.cached} cached, ${number.free} free`);
    this.stepMode.draw(state);
    this.drawSamples();
    this.drawNumbers();
    this.drawRunning();
    this.drawQueue();
    const last = state.steps.findLast((step) => step.rows);
    setText(find("step-size"), last ? `${last.prompt + last.answer} tokens in ${(last.device / 1000).toFixed(1)} ms` : "");
  }

  drawNumbers() {
    const { stats } = this.state;
    setText(find("hits"), percent(stats.num_cache_hits / Math.max(stats.num_cache_queries, 1)));
    setText(find("usage"), percent(1 - stats.num_free_blocks / stats.num_blocks));
    setText(find("num-running"), `${stats.num_running} of ${this.state.maxSeqs} slots`);
    setText(find("num-waiting"), stats.num_waiting);
    setText(find("preemptions"), `${stats.num_preemptions} preempted so far`);
    find("preemptions").classList.toggle("warn", stats.num_preemptions > 0);
  }

  drawRunning() {
    const shown = running(this.state).sort((one, other) => one.id - other.id);
    const kept = new Set(shown.slice(0, MAX_ROWS).map((sequence) => sequence.id));
    for (const [id, row] of this.rows) {
      if (kept.has(id)) continue;
      row.item.remove();
      this.rows.delete(id);
    }
    for (const sequence of shown.slice(0, MAX_ROWS)) {
      if (!this.rows.has(sequence.id)) {
        this.rows.set(sequence.id, this.makeRow(sequence));
        find("running").append(this.rows.get(sequence.id).item);
      }
      updateRow(this.rows.get(sequence.id), sequence);
      setText(this.rows.get(sequence.id).words, this.words(sequence.id));
    }
    find("running").dataset.more = shown.length > MAX_ROWS ? `and ${shown.length - MAX_ROWS} more` : "";
  }

  makeRow({ id }) {
    const bars = ["from-cache", "computed", "computed"].map((className) => make("i", { className }));
    const prompt = make("span", { className: "bar" }, bars[0], bars[1]);
    const answer = make("span", { className: "bar" }, bars[2]);
    const amounts = make("span", { className: "amounts" });
    const item = make("li", { tabIndex: 0 }, make("b", { className: "swatch" }, `#${id}`));
    const words = make("span", { className: "words" });
    item.append(make("span", { className: "bars" }, prompt, answer), amounts, words);
    item.dataset.id = id;
    item.dataset.tip = "";
    item.tip = () => describeRow(this.state?.sequences.get(id));
    item.style.setProperty("--hue", hue(id));
    const choose = (id) => () => ((this.map.chosen = id), this.pace.askNow());
    item.onpointerenter = item.onfocus = choose(id);
    item.onpointerleave = item.onblur = choose(null);
    return { item, bars, amounts, words };
  }

  /** Return the beginning of a prompt; only a paused engine sends it. */
  words(id) {
    const text = this.state.paused?.prompts[id];
    return text ? shownText(text) : "";
  }

  drawQueue() {
    const entries = this.state.queue.map((id) => {
      const { prompt, tokens, status } = this.state.sequences.get(id);
      const item = make("li", { className: status }, `#${id} · ${tokens} tokens`);
      item.dataset.id = id;
      if (status === "preempted") item.append(` · preempted after ${tokens - prompt}`);
      if (status === "postponed") item.append(" · postponed");
      if (this.words(id)) item.append(make("span", { className: "words" }, this.words(id)));
      return item;
    });
    const list = find("queue");
    list.replaceChildren(...entries);
    const rest = this.state.stats.num_waiting - entries.length;
    list.dataset.more = rest > 0 ? `and ${rest} more` : "";
  }

  sample() {
    if (!this.state || document.hidden) return;
    const { stats } = this.state;
    this.totals.push(stats.num_decode_tokens);
    if (this.totals.length > 1000 / SAMPLE_MS + 1) this.totals.shift();
    const seconds = ((this.totals.length - 1) * SAMPLE_MS) / 1000;
    const speed = seconds ? Math.max(0, this.totals.at(-1) - this.totals[0]) / seconds : 0;
    this.speed = speed < 100 ? speed.toFixed(1) : WHOLE.format(speed);
    this.lines.speed.add(speed);
    this.lines.hits.add(stats.num_cache_hits / Math.max(stats.num_cache_queries, 1));
    this.lines.usage.add(1 - stats.num_free_blocks / stats.num_blocks);
    this.isSampled = true;
    if (stats.num_running === 0) this.drawSamples(); // else wait for the next step: every frame is expensive
  }

  drawSamples() {
    if (!this.isSampled) return;
    this.isSampled = false;
    setText(find("speed"), this.speed);
    for (const line of Object.values(this.lines)) line.draw();
  }
}

/** Update only what has changed: most bars stay the same between steps. */
function updateRow({ bars, amounts }, { prompt, most, cached, computed, tokens }) {
  const read = Math.min(computed, prompt);
  const shares = [Math.min(cached, read) / prompt, Math.max(0, read - cached) / prompt, (tokens - prompt) / (most - prompt)];
  shares.forEach((share, index) => {
    const width = `${Math.round(1000 * share) / 10}%`;
    if (bars[index].style.width !== width) bars[index].style.width = width;
  });
  setText(amounts, read < prompt ? `prefill ${read} / ${prompt}` : `${tokens - prompt} / ${most - prompt}`);
}

function describeRow(sequence) {
  if (!sequence) return ""; // the sequence has just ended
  const { prompt, most, cached, computed, tokens } = sequence;
  const hits = cached ? `, ${cached} of them from the prefix cache (striped)` : "";
  const read = `${Math.min(computed, prompt)} of ${prompt} tokens computed${hits}`;
  return `Left: the prompt, ${read}. Right: the output, ${tokens - prompt} of at most ${most - prompt} tokens.`;
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

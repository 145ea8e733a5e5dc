// Step mode: what the last step of a paused engine changed, and which functions made the changes.

import { find, make, setText } from "./elements.js";
import { asRanges, hue, shownText } from "./state.js";

const RUNNING = "Pause the engine to run it step by step.";
const PAUSED = "The engine is paused between two steps. Send a prompt, then click Step.";

export class StepMode {
  /** `mark` highlights a list of blocks on the map, or none if it is null. */
  constructor(mark) {
    this.mark = mark;
    this.changes = undefined; // not drawn yet
  }

  draw({ allowPause, paused, changes }) {
    find("step-mode").hidden = !allowPause;
    setText(find("pause"), paused ? "Resume" : "Pause");
    find("step").disabled = !paused;
    find("map-detail").classList.toggle("tall", paused !== null);
    if (changes === this.changes) return;
    this.changes = changes;
    const groups = new Map();
    for (const change of changes ?? []) groups.set(change.kind, [...(groups.get(change.kind) ?? []), change]);
    const numRows = groups.get("scheduled")?.length ?? 0;
    setText(find("plan-size"), numRows ? `the plan had ${numRows} ${numRows > 1 ? "rows" : "row"}` : "");
    setText(find("step-hint"), changes?.length ? "" : paused ? PAUSED : RUNNING);
    if (changes !== null) this.mark(null);
    find("changes").replaceChildren(...[...groups].flatMap(([kind, list]) => this.group(kind, list)));
  }

  group(kind, changes) {
    const where = changes[0].function.replace("nanovllm/", "");
    const title = make("dt", {}, make("b", {}, kind), make("code", {}, where));
    return [title, make("dd", {}, ...changes.map((change) => this.entry(change)))];
  }

  entry({ id, blocks, note, text }) {
    const item = make("span", { className: "change", tabIndex: 0 });
    if (id !== null) {
      item.append(make("b", { className: "swatch" }, `#${id}`));
      item.style.setProperty("--hue", hue(id));
    }
    const parts = [blocks.length ? `${blocks.length > 1 ? "blocks" : "block"} ${asRanges(blocks)}` : "", note, text && shownText(text)];
    item.append(parts.filter(Boolean).join(", "));
    item.onpointerenter = item.onfocus = () => this.mark(blocks.length ? blocks : null);
    item.onpointerleave = item.onblur = () => this.mark(null);
    return item;
  }
}

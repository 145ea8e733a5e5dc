// The engine's state, computed from the snapshots of its event stream. Nothing here draws.

const SEQUENCE = ["id", "status", "prompt", "most", "cached", "computed", "tokens", "arrival", "tables"];
const STEP = ["begin", "schedule", "submit", "wait", "commit", "deviceBegin", "device", "prompt", "answer", "rows", "accepted"];
const CHANGE = ["kind", "function", "id", "blocks", "note", "text"];
export const MAX_STEPS = 400;

const named = (names, row) => Object.fromEntries(names.map((name, i) => [name, row[i]]));

/** Return the state after an event. An event is a full snapshot; only steps and changes are kept from the old state. */
export function apply(state, event) {
  const steps = event.steps.map((row) => named(STEP, row));
  const changes = event.paused?.changes.map((row) => named(CHANGE, row)) ?? null;
  return {
    numBlocks: event.num_blocks,
    blockSize: event.block_size,
    maxSeqs: event.max_num_seqs,
    maxTokens: event.max_num_batched_tokens,
    sequences: new Map(event.sequences.map((row) => [row[0], named(SEQUENCE, row)])),
    queue: event.queue,
    cached: Uint8Array.from(atob(event.cached), (flag) => flag.charCodeAt(0)), // 1 for a cached block
    snapshots: event.snapshots && new Set(event.snapshots), // block ids; null without recurrent layers
    steps: [...(state?.steps ?? []), ...steps].slice(-MAX_STEPS),
    stats: event.stats,
    allowPause: event.allow_pause,
    paused: event.paused, // null, or the text of blocks and prompts
    changes: changes?.length === 0 ? (state?.changes ?? changes) : changes,
    time: event.time,
  };
}

export const running = (state) => [...state.sequences.values()].filter((each) => each.status === "running");

/** Map each held block to its holders: a list of [sequence, index of the block in its table]. */
export function holders(state) {
  const held = new Map();
  for (const sequence of state.sequences.values()) {
    for (const [first, blocks] of sequence.tables) {
      blocks.forEach((block, index) => {
        if (!held.has(block)) held.set(block, []);
        held.get(block).push([sequence, first + index]);
      });
    }
  }
  return held;
}

export function counts(state, held = holders(state)) {
  let shared = 0;
  for (const each of held.values()) shared += each.length > 1;
  let cached = 0;
  state.cached.forEach((isCached, block) => (cached += isCached && !held.has(block)));
  return { held: held.size, shared, cached, free: state.numBlocks - held.size - cached, snapshots: state.snapshots?.size ?? 0 };
}

/** Return the computed fraction of a block, from 0 to 1. */
export function filled(state, [sequence, index]) {
  return Math.min(1, Math.max(0, sequence.computed / state.blockSize - index));
}

export function describeBlock(state, block, held = holders(state)) {
  const owners = held.get(block) ?? [];
  const text = state.paused?.blocks[block];
  const snapshot = state.snapshots?.has(block) ? " It has a snapshot of the recurrent state after its last token." : "";
  const content = snapshot + (text ? ` ${shownText(text)}` : "");
  if (owners.length === 0) {
    return state.cached[block]
      ? `Block ${block}: cached. No sequence holds it; a prompt with the same prefix can reuse it.${content}`
      : `Block ${block}: free.`;
  }
  const names = owners.map(([sequence]) => `#${sequence.id}`);
  const first = owners[0][1] * state.blockSize;
  const where = `tokens ${first} to ${first + state.blockSize - 1} of ${joined(names)}`;
  const full = `${Math.round(100 * Math.max(...owners.map((owner) => filled(state, owner))))}% computed`;
  const shared = owners.length > 1 ? ". Shared: computed once, read by all of them" : "";
  return `Block ${block}: ${where}, ${full}${shared}.${content}`;
}

export function describeStep(step) {
  const host = step.schedule + step.submit + step.commit;
  const accepted = step.accepted ? ` (${step.accepted} accepted draft tokens)` : "";
  const tokens = `${step.prompt} prompt and ${step.answer} output tokens${accepted} in ${step.rows} rows`;
  return `${tokens}; device ${ms(step.device)}, host ${ms(host)} (schedule ${ms(step.schedule)}, submit ${ms(step.submit)}, commit ${ms(step.commit)}).`;
}

const ms = (us) => (us < 10_000 ? `${(us / 1000).toFixed(2)} ms` : `${Math.round(us / 1000)} ms`);

function joined(names) {
  const shown = names.length > 6 ? [...names.slice(0, 5), `${names.length - 5} others`] : names;
  return shown.length > 1 ? `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}` : shown[0];
}

/** Quote text on one line. */
export const shownText = (text) => `“${text.replaceAll("\n", "⏎")}”`;

/** Format sorted numbers as ranges, such as "3 to 5, 9". */
export function asRanges(numbers) {
  const ranges = [];
  for (const number of numbers) {
    if (ranges.at(-1)?.[1] === number - 1) ranges.at(-1)[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(", ");
}

/** Return the hue of a sequence; consecutive ids get distant hues. */
export const hue = (id) => (id * 137.508) % 360;

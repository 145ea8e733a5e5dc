"""Run three sequences in a KV cache of eight blocks, and print what every step does.

    python examples/step_by_step.py [--model FOLDER]

A and B begin with the same words, so B shares A's first blocks, although both are admitted in the
same step: a block enters the prefix cache when the step that fills it is planned, and in each layer
A's keys and values are written before B's attention reads them. Soon the cache is full: the
sequence admitted last is preempted, waits until blocks are free, and is recomputed from what is
still cached.
Consecutive steps in which every sequence only decodes are printed as one.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from nanovllm import LLM, SamplingParams
from nanovllm.engine.timing import StepLog
from nanovllm.serve.core_messages import CoreStats
from nanovllm.serve.live.engine_state import Change, EngineState, SequenceState
from nanovllm.serve.live.snapshots import take_snapshot
from nanovllm.serve.live.step_mode import StepMode

NUM_BLOCKS, BLOCK_SIZE = 8, 16
SHARED = (
    "A KV cache stores the keys and values of all earlier tokens, so that each new token needs "
    "only one row of every matrix product. A block holds the keys and values of"
)
PROMPTS = {
    "A": f"{SHARED} sixteen tokens",
    "B": f"{SHARED} one sequence, or of several",
    "C": "Paris is the capital of France, Rome is the capital of Italy, Madrid is the capital of "
    "Spain, and Berlin is the capital of",
}
NUM_NEW_TOKENS = {"A": 16, "B": 13, "C": 18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file or hub id")
    args = parser.parse_args()
    # With depth 0, the engine collects the result of a step before it plans the next one.
    sizes = {"num_kvcache_blocks": NUM_BLOCKS, "kvcache_block_size": BLOCK_SIZE}
    texts: dict[str, str] = {}
    with LLM(args.model, **sizes, max_model_len=128, max_num_batched_tokens=64, depth=0) as llm:
        decode = llm.get_tokenizer().decode
        numbered = enumerate(steps(llm, texts))
        for is_only_decode, group in groupby(numbered, lambda step: only_decodes(step[1])):
            if is_only_decode:
                print_decode_steps(list(group), decode)
                continue
            for number, state in group:
                print_step(number, state, decode)
    print("\nTexts")
    for seq, text in sorted(texts.items()):
        print(f"  {seq}    {PROMPTS[seq][-24:]!r} -> {text!r}")


def steps(llm: LLM, texts: dict[str, str]) -> Iterator[EngineState]:
    """Yield a snapshot of the engine before the first step and after every step.

    The snapshot after a sequence's last step still includes it. The text is added to `texts`.
    """
    core = llm.engine.core
    log = core.log = StepLog()
    step_mode = StepMode(core)  # finds what has changed since the previous snapshot

    def snapshot() -> EngineState:
        stats = CoreStats(num_waiting=len(core.scheduler.waiting))
        return step_mode.explain(take_snapshot(core, log, stats, 0.0))

    for seq, prompt in PROMPTS.items():
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS[seq], ignore_eos=True)
        llm.add_request(prompt, params)
    yield (before := snapshot())
    while not llm.is_finished():
        texts.update({name(output.seq_id): output.text for output in llm.step().finished})
        after, rows = snapshot(), {seq.seq_id: seq for seq in before.sequences}
        ended = [rows[end.seq_id] for end in after.ended]
        yield replace(after, sequences=sorted([*after.sequences, *map(after_last_step, ended)]))
        before = after


def after_last_step(seq: SequenceState) -> SequenceState:
    num_tokens = seq.num_tokens
    return seq._replace(
        status="finished", num_tokens=num_tokens + 1, num_computed=num_tokens, tables=[]
    )


def only_decodes(state: EngineState) -> bool:
    notes = [change.note for change in changes_in(state) if change.kind != "sampled"]
    return bool(notes) and all(note.startswith("decode") for note in notes)


def changes_in(state: EngineState) -> list[Change]:
    return state.paused.changes if state.paused else []


def print_decode_steps(
    group: list[tuple[int, EngineState]], decode: Callable[[list[int]], str]
) -> None:
    (first, state), last = group[0], group[-1][0]
    print(f"\nStep {first}" if first == last else f"\nSteps {first} to {last}", end=": decode\n")
    changes = [change for _, each in group for change in changes_in(each)]
    for seq in state.sequences:
        new = [token for each in changes if each.seq_id == seq.seq_id for token in each.token_ids]
        if new:
            print(f"  {name(seq.seq_id):4} {decode(new)!r}")


def print_step(number: int, state: EngineState, decode: Callable[[list[int]], str]) -> None:
    changes = changes_in(state)
    ran = {change.seq_id: change.note for change in changes if change.kind == "scheduled"}
    new = {change.seq_id: change.token_ids for change in changes if change.kind == "sampled"}
    print(f"\nStep {number}" if number else "Before the first step")
    print("  seq  state      tokens  computed  this step ran                 new token     blocks")
    for seq in state.sequences:
        text = repr(decode(list(new[seq.seq_id]))) if seq.seq_id in new else ""
        print(
            f"  {name(seq.seq_id):4} {seq.status:10} {seq.num_tokens:6} {seq.num_computed:9}  "
            f"{ran.get(seq.seq_id, ''):29} {text:13} {' '.join(map(str, seq.held_block_ids))}"
        )
    print("  cache:", "  ".join(f"{block}={holders(state, block)}" for block in range(NUM_BLOCKS)))
    for change in changes:
        if change.kind not in ("queued", "scheduled", "sampled"):
            where = change.function.removeprefix("nanovllm/")
            print(f"  {change.kind:10} {describe(change):45} {where}")


def name(seq_id: int) -> str:
    return list(PROMPTS)[seq_id]


def holders(state: EngineState, block: int) -> str:
    names = "".join(name(seq.seq_id) for seq in state.sequences if block in seq.held_block_ids)
    return names or ("cached" if state.cached[block] else "free")


def describe(change: Change) -> str:
    ids = " ".join(map(str, change.block_ids))
    blocks = f"{'block' if len(change.block_ids) == 1 else 'blocks'} {ids}" if ids else ""
    who = "" if change.seq_id is None else f"{name(change.seq_id)}:"
    return " ".join(filter(None, [who, blocks, f"({change.note})" if change.note else ""]))


if __name__ == "__main__":
    main()

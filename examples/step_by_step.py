"""Run three sequences in a KV cache of eight blocks, and print a table after every step.

    python examples/step_by_step.py [--model FOLDER]

A and B begin with the same words, so B shares A's first blocks. Soon the cache is full: the newest
sequence is preempted, waits until blocks are free, and is recomputed from what is still cached.
"""

import argparse
from collections.abc import Callable, Iterator

from nanovllm import LLM, SamplingParams
from nanovllm.serve.core_messages import Change, CoreStats, EngineState
from nanovllm.serve.core_process import take_snapshot
from nanovllm.serve.step_mode import StepMode

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
    with LLM(args.model, **sizes, max_model_len=128, max_num_batched_tokens=64, depth=0) as llm:
        for number, state in enumerate(steps(llm)):
            print_step(number, state, llm.get_tokenizer().decode)


def steps(llm: LLM) -> Iterator[EngineState]:
    """Yield a snapshot of the engine after every step; the first one is from before them."""
    core = llm.engine.core
    step_mode = StepMode(core)  # finds what has changed since the previous snapshot

    def snapshot() -> EngineState:
        stats = CoreStats(num_waiting=len(core.scheduler.waiting))
        return step_mode.explain(take_snapshot(core, stats, 0.0))

    for name, prompt in PROMPTS.items():
        params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS[name], ignore_eos=True)
        llm.add_request(prompt, params)
    yield snapshot()
    while not llm.is_finished():
        llm.step()
        yield snapshot()


def print_step(number: int, state: EngineState, decode: Callable[[list[int]], str]) -> None:
    changes = state.paused.changes if state.paused else []
    ran = {change.seq_id: change.note for change in changes if change.kind == "scheduled"}
    new = {change.seq_id: change.token_ids for change in changes if change.kind == "sampled"}
    print(f"\nStep {number}" if number else "Before the first step")
    print("  seq  state      tokens  computed  this step ran               new token     blocks")
    for seq in state.sequences:
        text = repr(decode(list(new[seq.seq_id]))) if seq.seq_id in new else ""
        print(
            f"  {name(seq.seq_id):4} {seq.status:10} {seq.num_tokens:6} {seq.num_computed:9}  "
            f"{ran.get(seq.seq_id, ''):27} {text:13} {' '.join(map(str, seq.block_ids))}"
        )
    print("  cache:", "  ".join(f"{block}={holders(state, block)}" for block in range(NUM_BLOCKS)))
    for change in changes:
        if change.kind not in ("queued", "scheduled", "sampled"):
            where = change.function.removeprefix("nanovllm/")
            print(f"  {change.kind:10} {describe(change):40} {where}")


def name(seq_id: int) -> str:
    return list(PROMPTS)[seq_id]


def holders(state: EngineState, block: int) -> str:
    names = "".join(name(seq.seq_id) for seq in state.sequences if block in seq.block_ids)
    return names or ("cached" if state.cached[block] else "free")


def describe(change: Change) -> str:
    ids = " ".join(map(str, change.block_ids))
    blocks = f"{'block' if len(change.block_ids) == 1 else 'blocks'} {ids}" if ids else ""
    who = "" if change.seq_id is None else f"{name(change.seq_id)}:"
    return " ".join(filter(None, [who, blocks, f"({change.note})" if change.note else ""]))


if __name__ == "__main__":
    main()

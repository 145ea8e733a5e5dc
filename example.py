"""Ask eight questions as one batch, and print the answers as they are generated: `make demo`."""

import argparse
from collections import defaultdict

from nanovllm import LLM, SamplingParams

# All prompts begin with this text; its first 64 tokens fill a KV-cache block and are computed once.
SYSTEM = (
    "You are a helpful AI assistant. You answer every question truthfully, in plain words and in "
    "no more than two short sentences, so that everyone understands the answer. You do not repeat "
    "the question and you do not speak about yourself. When you are asked for code, you write it "
    "in Python, with a short comment. When you do not know something, you say that you do not."
)
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "What do bees make?",
    "Give me two tips for sleeping well.",
    "Explain in one sentence what a cache is.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file or hub id")
    parser.add_argument("--max-tokens", type=int, default=128, help="maximum tokens per answer")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="number of GPUs")
    args = parser.parse_args()

    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    outputs, is_new = [], True
    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        # Without streaming: for output in llm.chat(chats, params): print(output.text)
        for piece in in_order(llm.stream_chat(chats, params)):
            if is_new:
                print(f"[{piece.index + 1}/{len(QUESTIONS)}] {QUESTIONS[piece.index]}")
            print(piece.text, end="\n\n" if piece.finished else "", flush=True)
            is_new = piece.finished
            outputs += [piece.output] if piece.finished else []

    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_new = sum(len(output.token_ids) for output in outputs)
    seconds = max(output.duration for output in outputs)
    print(f"prompts    {len(outputs)}, {num_prompt} tokens, {num_cached} from the prefix cache")
    print(f"generated  {num_new} tokens in {seconds:.2f} s, {num_new / seconds:.0f} per second")


def in_order(pieces):
    """Yield pieces question by question; all run at once, so pieces of later questions wait."""
    waiting, turn = defaultdict(list), 0
    for new in pieces:
        waiting[new.index].append(new)
        while waiting[turn]:
            piece = waiting[turn].pop(0)
            yield piece
            turn += piece.finished


if __name__ == "__main__":
    main()

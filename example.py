"""Run several prompts as one continuously batched job, streaming; `make demo` runs this."""

import argparse
import sys

from nanovllm import LLM, SamplingParams
from nanovllm.cli.exit_code import exit_code
from nanovllm.cli.options import dashed
from nanovllm.cli.output import RunStats, print_in_order
from nanovllm.cli.start import configure_logging

# Every prompt starts with this text; with the prefix cache, its first block is computed once.
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


def main() -> int:
    args = parse_args()
    configure_logging(is_verbose=False)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    print(f"Loading {args.model} ...")
    with LLM(
        args.model,
        device=args.device,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
    ) as llm:
        prompts = as_chat(llm, QUESTIONS)
        # Without streaming: for output in llm.generate(prompts, params): print(output.text)
        stats = RunStats()
        print_in_order(llm.stream(prompts, params), QUESTIONS, stats)
        print("\n" + stats.summary())
    return 0


def as_chat(llm: LLM, questions: list[str]) -> list[str] | list[list[int]]:
    """Put each question into the model's chat template, if it has one."""
    if not llm.get_tokenizer().chat_template:
        return questions
    system = {"role": "system", "content": SYSTEM}
    conversations = [[system, {"role": "user", "content": question}] for question in questions]
    return llm.apply_chat_template(conversations, enable_thinking=False)  # Qwen3: skip reasoning


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file, hub id, or qwen3")
    parser.add_argument("--device", default="auto", help="where to run")
    parser.add_argument("--max-tokens", type=int, default=128, help="per output")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--enforce-eager", action="store_true", help="run without captured graphs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to shard over")
    return parser.parse_args(dashed(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(exit_code(main))

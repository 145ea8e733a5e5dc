"""Measure what images cost: encoding them, first tokens, and the streams of other users.

    python -m benchmarks.engine.images                  # the shape of Qwen3.5-9B, random weights
    python -m benchmarks.engine.images --model FOLDER   # any model that sees images

Each request has one image, and its text has a few tokens. Text prompts with as many tokens take
turns with them. Compares the time of encoding with that of the whole prefill, and the time between
the tokens of other streams beside images and beside text.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image

from nanovllm import LLM, SamplingParams
from nanovllm.cli.options import at_least

PROCESSOR = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
NUM_STREAMS = 8  # streams of other users


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = {"skip_tokenizer_init": True, "max_model_len": 8192, "device": args.device}
        options |= {"load_format": "dummy"} if args.model is None else {}
        model = args.model or make_model(Path(folder))
        with LLM(model, **options, target_inter_token_ms=25.0) as llm:
            report(llm, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model that sees images (default: random weights)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=at_least(1), default=64)
    parser.add_argument("--side", type=at_least(32), default=1024, help="of an image, in pixels")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """Write the config of a model with the shape of Qwen3.5-9B."""
    from transformers import Qwen3_5Config

    config = Qwen3_5Config(vision_config={"out_hidden_size": 4096}, dtype="bfloat16")
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def report(llm: LLM, args: argparse.Namespace) -> None:
    reader: Any = llm.engine.input_processor.image_reader
    rng = random.Random(0)

    def image_prompts() -> list[dict[str, Any]]:
        """Return prompts with new images, already read: a server reads them in other threads."""
        small = [Image.frombytes("RGB", (8, 8), rng.randbytes(192)) for _ in range(args.requests)]
        images = [reader.read(each.resize((args.side, args.side))) for each in small]
        ids = [1, 2, 3, reader.placeholder_id, 4, 5]
        return [{"prompt_token_ids": ids, "multi_modal_data": {"image": image}} for image in images]

    num_tokens = image_prompts()[0]["multi_modal_data"]["image"].num_tokens + 5

    def text_prompts() -> list[list[int]]:
        return [[rng.randrange(1, 90) for _ in range(num_tokens)] for _ in range(args.requests)]

    print(f"{args.requests} requests with {num_tokens} prompt tokens each, median of the rounds")
    kinds = {"images": image_prompts, "text": text_prompts}
    prefills: dict[str, list[float]] = {kind: [] for kind in kinds}
    firsts: dict[str, list[float]] = {kind: [] for kind in kinds}
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    encodings = []
    for number in range(args.rounds + 1):  # the first round warms up
        for kind, make in kinds.items():
            prefill, first = run(llm, make())
            beside = gaps_beside(llm, make())
            if number:
                prefills[kind].append(prefill)
                firsts[kind].append(first)
                gaps[kind] += beside
        encodings.append(encode(llm, image_prompts()))
    encoding = statistics.median(encodings[1:])
    for kind in kinds:
        prefill, first = statistics.median(prefills[kind]), statistics.median(firsts[kind])
        beside = statistics.quantiles(gaps[kind], n=100)
        print(
            f"{kind:<7} {args.requests / prefill:7.1f} requests/s, mean first token after "
            f"{1000 * first:.0f} ms; between tokens of {NUM_STREAMS} other streams "
            f"{1000 * beside[49]:.1f} ms (median), {1000 * beside[98]:.1f} ms (99%)"
        )
    whole = statistics.median(prefills["images"])
    print(f"encoding {1000 * encoding / args.requests:.2f} ms per image, {encoding / whole:.0%}")


def run(llm: LLM, prompts: list[Any]) -> tuple[float, float]:
    """Return the duration of the prefill of all prompts, and the mean time to the first token."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, FIRST_TOKEN, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, statistics.mean(output.time_to_first_token for output in outputs)


def gaps_beside(llm: LLM, prompts: list[Any]) -> list[float]:
    """Return the times between the tokens of running streams while the prompts are processed."""
    params = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True)
    is_over, gaps = threading.Event(), list[float]()

    def stream() -> None:
        last: dict[int, float] = {}
        for piece in llm.stream([[7, index] for index in range(NUM_STREAMS)], params):
            now = time.perf_counter()
            if piece.index in last:
                gaps.append(now - last[piece.index])
            last[piece.index] = now
            if is_over.is_set():
                return

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(0.2)
    gaps.clear()
    llm.generate(prompts, FIRST_TOKEN, use_tqdm=False)
    is_over.set()
    thread.join()
    return gaps


def encode(llm: LLM, prompts: list[Any]) -> float:
    """Return the duration of encoding the images of all prompts, and nothing else."""
    import torch

    executor: Any = llm.engine.core.executor
    [inputs] = executor.parts
    images = [prompt["multi_modal_data"]["image"] for prompt in prompts]

    def encode_all() -> float:
        start = time.perf_counter()
        with torch.inference_mode(), executor.device.in_order():
            for image in images:
                last = inputs.tower.encode(image)
            executor.device.fetch(last[:1, :1].float()).result()
        return time.perf_counter() - start

    return llm.engine.call(encode_all)


if __name__ == "__main__":
    main()

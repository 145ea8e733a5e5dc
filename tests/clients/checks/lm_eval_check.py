"""Score a model with lm-eval through our server, and through its transformers backend."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL = os.environ["NANOVLLM_URL"], os.environ["NANOVLLM_MODEL"]
QUESTIONS = ["The sky is", "Grass, they say, is", "Snow 雪 is", "Two and two", "Once upon a"]
CHOICES = [" blue", " green and wet", " white", " four", " time"]
CHOOSING = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
WRITING = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["\n", "z"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}


def main(folder: Path) -> None:
    for name, task in (("choosing", CHOOSING), ("writing", WRITING), ("rolling", ROLLING)):
        write_task(folder, name, task)
    tasks = ["choosing", "writing", "rolling"]
    own = {"pretrained": MODEL, "dtype": "float32", "device": "cpu", "max_length": 1024}
    ours = {
        "model": "tiny",
        "base_url": f"{URL}/v1/completions",
        "tokenizer": MODEL,
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_length": 1024,
    }
    expected = scores(folder, tasks, "hf", own)
    compare(expected, scores(folder, tasks, "local-completions", ours))
    chat = {**ours, "base_url": f"{URL}/v1/chat/completions", "tokenized_requests": False}
    expected = scores(folder, ["writing"], "hf", own, apply_chat_template=True)
    compare(
        expected,
        scores(folder, ["writing"], "local-chat-completions", chat, apply_chat_template=True),
    )


def write_task(folder: Path, name: str, task: dict[str, Any]) -> None:
    rows = [
        {"question": question, "choices": CHOICES, "answer": index}
        for index, question in enumerate(QUESTIONS)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    asking = {"test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    if task is ROLLING:
        asking["doc_to_text"] = ""
    whole = {"task": name, **source, **asking, **task}
    (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")  # JSON is valid YAML


def scores(folder: Path, tasks: list[str], model: str, args: Any, **options: Any) -> Any:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=tasks, task_manager=manager, **options
    )


def compare(expected: Any, found: Any) -> None:
    """Return the metrics and the values that they were computed from."""
    for task, metrics in expected["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                other = found["results"][task][name]
                assert math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-6), (
                    task,
                    name,
                    value,
                    other,
                )
    for task, samples in expected["samples"].items():
        others = found["samples"][task]
        assert len(samples) == len(others) == len(QUESTIONS)
        for sample, other in zip(samples, others, strict=True):
            assert same(sample["filtered_resps"], other["filtered_resps"]), (sample, other)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, abs_tol=1e-3)
    return bool(one == other)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

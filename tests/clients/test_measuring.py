"""Evaluation and benchmark programs, each in its own environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, Servers
from tests.clients.environments import HERE, environment
from tests.clients.test_clients import run

pytestmark = pytest.mark.slow
NUM_REQUESTS = 6


def test_lm_eval_scores_as_with_transformers(servers: Servers, tmp_path: Path) -> None:
    check = HERE / "checks" / "lm_eval_check.py"
    run([str(environment("lm_eval") / "python"), str(check), str(tmp_path)], servers)


def test_guidellm_measures_without_errors(servers: Servers, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [str(environment("guidellm") / "guidellm"), "run", "--disable-progress"]
    options = {
        "backend": f"kind=openai_http,target={servers.url},model=tiny,api_key={KEY}",
        "tokenizer": f"kind=huggingface_auto,model={servers.model}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "data-loader": f"kind=pytorch,samples={NUM_REQUESTS},prefetch_factor=2",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "output": f"kind=json,path={report}",
    }
    for name, value in options.items():
        command += [f"--{name}", value]
    run(command, servers, {"GUIDELLM__MAX_WORKER_PROCESSES": "1"})
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)

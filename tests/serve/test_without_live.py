"""The server without `serve/live`: the other routes work, and what needs the folder is refused."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.serve.byte_model import make_byte_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nanovllm"
SCRIPT = """
import asyncio, json, sys
sys.modules["nanovllm.serve.live"] = None
from nanovllm import AsyncLLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.serve.server_options import ServerOptions
from tests.serve.running import running

def refusal(function):
    try:
        function()
    except ConfigError as error:
        return str(error)

async def generate():
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return [piece async for piece in llm.generate("Hi", params)][-1].output

options = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "num_kvcache_blocks": 4}
llm = AsyncLLM(sys.argv[1], in_process=True, **options)
with running(llm) as server:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
    found = {
        "usage": server.post("/v1/chat/completions", **chat).json()["usage"],
        "statuses": {path: server.http.get(path).status_code for path in json.loads(sys.argv[2])},
        "pause": server.post("/engine/pause").status_code,
        "watch": refusal(lambda: asyncio.run(anext(llm.watch()))),
        "allow_pause": refusal(lambda: ServerOptions(allow_pause=True)),
    }
output = asyncio.run(generate())  # a server that shuts down resumes its engine: that does no harm
llm.close()
print(json.dumps({**found, "num_tokens": len(output.token_ids)}))
"""


def test_the_server_runs_without_the_folder(tmp_path: Path) -> None:
    missing = ["/", "/page/main.js", "/engine/events", "/trace"]
    others = ["/health", "/v1/models", "/metrics", "/openapi.json"]
    model = str(make_byte_model(tmp_path))
    command = [sys.executable, "-c", SCRIPT, model, json.dumps([*missing, *others])]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.pop("usage")["completion_tokens"] == 3
    assert found == {
        "statuses": {**dict.fromkeys(missing, 404), **dict.fromkeys(others, 200)},
        "pause": 404,
        "watch": "the engine cannot be watched: nanovllm/serve/live is missing",
        "allow_pause": "the engine cannot be paused: nanovllm/serve/live is missing",
        "num_tokens": 3,
    }


def test_no_file_needs_the_folder_when_it_is_imported() -> None:
    """Other files import it inside functions, or for annotations."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "serve" / "live":
            imports = filter(is_import, ast.parse(path.read_text()).body)
            assert "nanovllm.serve.live" not in " ".join(map(ast.unparse, imports)), path


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)

"""Every path, flag, package and metric named in the files of deploy/ exists."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanovllm.cli import parse
from nanovllm.serve.http_server import CANCEL_SECONDS, LAST_SECONDS
from tests.serve.fake_llm import FakeLLM
from tests.serve.running import running

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "nanovllm.json").read_text())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)", DOCKERFILE, re.MULTILINE)


def test_the_image_copies_what_is_there() -> None:
    copied = [path for line in instructions("COPY") for path in line.split()[:-1]]
    assert copied
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert {"pyproject.toml", "constraints.txt", "constraints-gpu.txt", "nanovllm"} <= set(copied)


def test_the_image_installs_packages_that_are_pinned() -> None:
    (line,) = [line for line in instructions("RUN") if "pip install" in line]
    assert instructions("ARG") == ["CONSTRAINTS=constraints-gpu.txt"]
    pinned = {pin.split("==")[0] for pin in (ROOT / "constraints-gpu.txt").read_text().split()}
    for command in line.split("&&"):
        assert "-c $CONSTRAINTS" in command
        words = [word for word in command.split()[2:] if not word.startswith("-")]
        assert set(words) - {".", "$CONSTRAINTS"} <= pinned


def test_the_image_has_the_c_compiler_that_triton_calls() -> None:
    (line,) = [line for line in instructions("RUN") if "apt-get install" in line]
    assert {"gcc", "libc6-dev"} <= set(line.split())  # slim images lack the C headers too


def test_the_image_and_the_service_start_with_flags_that_exist() -> None:
    (entry,) = instructions("ENTRYPOINT")
    program, *arguments = json.loads(entry)
    service = COMPOSE["services"]["nanovllm"]
    args = parse([*arguments, *service["command"]])
    assert program == "nanovllm"
    assert (args.host, str(args.port)) == ("0.0.0.0", instructions("EXPOSE")[0])
    assert service["ports"][0].split(":")[-1] == str(args.port)
    assert f":{args.port}/health" in DOCKERFILE


def test_services_mount_and_build_what_is_there() -> None:
    build = COMPOSE["services"]["nanovllm"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    mounts = [each for service in COMPOSE["services"].values() for each in service["volumes"]]
    paths = [mount.split(":")[0] for mount in mounts]
    assert [p for p in paths if p.startswith(".") and not (DEPLOY / p).is_file()] == []
    assert {p for p in paths if not p.startswith(".")} == set(COMPOSE["volumes"])


def test_containers_can_be_stopped_and_have_the_time_for_it() -> None:
    """This holds while a model loads, too, when only the system handles signals."""
    service = COMPOSE["services"]["nanovllm"]
    args = parse(["serve", *service["command"]])
    needed = args.shutdown_timeout + LAST_SECONDS + CANCEL_SECONDS
    assert service["init"]
    assert needed < float(service["stop_grace_period"].rstrip("s"))
    (command,) = re.findall(r"^docker run .*", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert "--init" in command.split()
    assert needed < float(command.split("--stop-timeout ")[1].split()[0])


def test_the_unit_starts_with_flags_that_exist(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("port: 8000")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "nanovllm.service")
    service = unit["Service"]
    program, command, *arguments = service["ExecStart"].split()
    name, _, path = service["LoadCredential"].partition(":")
    assert Path(program).name == "nanovllm"
    assert f"${{CREDENTIALS_DIRECTORY}}/{name}" in arguments
    arguments[arguments.index("--config") + 1] = str(tmp_path / "config.yaml")
    args = parse([command, *arguments])
    assert args.shutdown_timeout < float(service["TimeoutStopSec"])
    assert path in (ROOT / "docs" / "operations.md").read_text()


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (value[key] for key in ("expr", "query") if isinstance(value.get(key), str))
        for item in value.values():
            yield from expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from expressions(item)


@pytest.fixture(scope="module")
def exported() -> str:
    with running(FakeLLM()) as server:
        server.post("/v1/completions", prompt="x")
        return server.http.get("/metrics").text


def test_every_query_asks_for_metrics_that_are_exported(exported: str) -> None:
    queries = list(expressions(DASHBOARD))
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"vllm:\w+", query)
        assert names, query
        for name in names:
            samples = re.findall(rf"^{name}{{(.*)}} ", exported, re.MULTILINE)
            assert samples, name
            labels = [*re.findall(r"by \((\w+)\)", query), "model_name"]
            assert all(f'{label}="' in samples[0] for label in labels), query

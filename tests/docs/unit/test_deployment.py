"""What `deploy/` names exists: commands and their options, settings, ports, probes, extras, gauges. No container runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from configparser import RawConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from penstock.cli import app
from penstock.http.scaling import ScalingGauges
from penstock.http.settings import HttpSettings
from penstock.http.system import api
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.endpoint import parse_address
from penstock.worker.exposition import Exposition

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNIT = "systemd/penstock-worker.service"
# Read by the command line and the logs, not through a class of settings (docs/settings.md).
OTHER_VARIABLES = {"PENSTOCK_LOG", "PENSTOCK_LOG_PAYLOADS", "PENSTOCK_SERVER_URL", "PENSTOCK_SERVER_TOKEN"}


@dataclass(frozen=True)
class Program:
    """A container or service that runs `penstock`."""

    name: str
    arguments: tuple[str, ...]
    ports: frozenset[int]
    """Ports that it publishes."""
    probes: tuple[tuple[int, str], ...]
    """Ports and paths that are probed."""
    grace_s: int | None
    """How long it has to end."""

    def __str__(self) -> str:
        return self.name


def kubernetes() -> list[dict[str, Any]]:
    return [
        document for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
    ]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in kubernetes() if document["kind"] == kind]


def pods() -> list[dict[str, Any]]:
    return [document for document in kubernetes() if document["kind"] in ("Job", "Deployment")]


def programs() -> list[Program]:
    found = []
    for document in pods():
        spec = document["spec"]["template"]["spec"]
        for container in spec["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            gets = [container[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe") if kind in container]
            probes = tuple((ports[get["port"]], get["path"]) for get in gets)
            name = f"kubernetes {document['metadata']['name']}"
            grace = spec.get("terminationGracePeriodSeconds")
            found.append(Program(name, tuple(container["args"]), frozenset(ports.values()), probes, grace))
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        if service["image"] == "penstock":
            published = frozenset(int(port.rpartition(":")[2]) for port in service.get("ports", []))
            urls = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(service.get("healthcheck", {}).get("test", [])))
            grace = service.get("stop_grace_period")
            found.append(
                Program(
                    f"compose {name}", tuple(service["command"]), published, tuple((int(port), path) for port, path in urls),
                    None if grace is None else int(grace.removesuffix("s")),
                )
            )  # fmt: skip
    service = systemd()["Service"]
    _, *arguments = shlex.split(service["ExecStart"])
    found.append(Program("systemd worker", tuple(arguments), frozenset(), (), int(service["TimeoutStopSec"])))
    return found


def systemd() -> RawConfigParser:
    unit = RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / UNIT).read_text())
    return unit


PROGRAMS = programs()
LONG_LIVED = [program for program in PROGRAMS if program.arguments[0] in ("worker", "server")]


def parsed(arguments: tuple[str, ...]) -> dict[str, Any]:
    """The options and arguments of a command line, which is parsed and not run. Raises `click.UsageError`."""
    commands: Any = typer.main.get_command(app)
    context = click.Context(commands, info_name="penstock")
    name, command, rest = commands.resolve_command(context, list(arguments))
    return dict(command.make_context(name, rest, parent=context).params)


def listens_at(program: Program) -> int:
    given = parsed(program.arguments)
    return parse_address(given["metrics"])[1] if program.arguments[0] == "worker" else int(given["port"])


def test_every_program_of_the_examples_is_looked_at() -> None:
    assert {str(program) for program in PROGRAMS} == {
        "compose migrate",
        "compose server",
        "compose worker",
        "kubernetes penstock-migrate",
        "kubernetes penstock-server",
        "kubernetes penstock-worker",
        "systemd worker",
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_command_line_exists(program: Program) -> None:
    parsed(program.arguments)


@pytest.mark.parametrize("arguments", [("worker", "shop.jobs:app", "--metric-port", "1"), ("wok", "shop.jobs:app"), ("worker",)])
def test_a_command_line_that_does_not_exist_is_found(arguments: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match=r"No such|Missing") as raised:
        parsed(arguments)
    assert type(raised.value).__name__ in ("NoSuchOption", "NoSuchCommand", "UsageError", "MissingParameter")


@pytest.mark.parametrize("path", sorted(path for path in DEPLOY.rglob("*") if path.is_file()), ids=lambda path: path.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    settings: tuple[type[Settings | HttpSettings], ...] = (Settings, HttpSettings)
    known = {variable for kind in settings for field in kind.model_fields for variable in kind.variables(field)}
    assert set(re.findall(r"PENSTOCK_[A-Z_]+", path.read_text())) <= known | OTHER_VARIABLES


@pytest.mark.parametrize("program", LONG_LIVED, ids=str)
def test_ports_and_probes_agree_with_the_command(program: Program) -> None:
    port = listens_at(program)
    assert program.ports <= {port}
    if program.arguments[0] == "worker":
        routes = set(Exposition(Database("postgresql://", Settings(), "test"), lambda: []).routes)
    else:
        routes = {str(getattr(route, "path", "")) for route in api.routes}
    assert {path for _, path in program.probes} <= routes
    assert {probed for probed, _ in program.probes} <= {port}
    if program.name != "systemd worker":
        assert program.probes


@pytest.mark.parametrize("program", LONG_LIVED, ids=str)
def test_what_runs_is_given_longer_to_end_than_its_own_grace(program: Program) -> None:
    kind: type[Settings | HttpSettings] = Settings if program.arguments[0] == "worker" else HttpSettings
    grace = kind.model_fields["shutdown_grace"].default.total_seconds()
    assert program.grace_s is not None
    assert program.grace_s >= grace + 5


def test_kubernetes_objects_refer_to_each_other() -> None:
    deployments = {document["metadata"]["name"]: document for document in of_kind("Deployment")}
    labels = []
    for document in deployments.values():
        spec = document["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        labels.append(spec["selector"]["matchLabels"])
    for service in of_kind("Service"):
        (selected,) = [
            each for each in deployments.values() if each["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
        ]
        (container,) = selected["spec"]["template"]["spec"]["containers"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in container["ports"]}
    assert len({tuple(label.items()) for label in labels}) == len(labels)


def test_the_secret_that_the_pods_read_is_the_one_whose_making_is_shown() -> None:
    shown = (DEPLOY / "kubernetes" / "migrate.yaml").read_text()
    (name,) = re.findall(r"create secret generic (\S+)", shown)
    keys = set(re.findall(r"--from-literal=([\w-]+)=", shown))
    used = [
        variable["valueFrom"]["secretKeyRef"]
        for document in pods()
        for container in document["spec"]["template"]["spec"]["containers"]
        for variable in container["env"]
    ]
    assert {reference["name"] for reference in used} == {name}
    assert {reference["key"] for reference in used} == keys


def test_the_scaler_scales_the_workers_by_a_gauge_of_the_server() -> None:
    (scaler,) = of_kind("ScaledObject")
    workers = [
        document["metadata"]["name"]
        for document in of_kind("Deployment")
        if document["spec"]["template"]["spec"]["containers"][0]["args"][0] == "worker"
    ]
    assert [scaler["spec"]["scaleTargetRef"]["name"]] == workers
    (trigger,) = scaler["spec"]["triggers"]
    gauges = {family.name for family in ScalingGauges([]).collect()}
    named = set(re.findall(r"penstock_\w+", trigger["metadata"]["query"]))
    assert named
    assert named <= gauges


def test_the_image_is_built_from_what_it_is_given() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"/source\[([\w,]+)\]", lines)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    copied = {name for line in re.findall(r"^COPY ([^-].*)$", lines, re.MULTILINE) for name in line.split()[:-1]}
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)
    assert project["readme"] in copied
    assert set(project["license-files"]) <= copied
    entry, default = (json.loads(re.findall(rf"^{word} (.*)$", lines, re.MULTILINE)[0]) for word in ("ENTRYPOINT", "CMD"))
    assert entry == list(project["scripts"])
    assert default == ["--help"]


def test_each_pod_has_a_policy_that_admits_its_ports_and_no_others() -> None:
    policies = {tuple(one["spec"]["podSelector"]["matchLabels"].items()): one["spec"] for one in of_kind("NetworkPolicy")}
    assert len(policies) == len(pods())
    for document in pods():
        template = document["spec"]["template"]
        policy = policies[tuple(template["metadata"]["labels"].items())]
        (container,) = template["spec"]["containers"]
        assert "Ingress" in policy["policyTypes"]
        admitted = {port["port"] for rule in policy.get("ingress", []) for port in rule["ports"]}
        assert admitted == {port["name"] for port in container.get("ports", [])}


def test_compose_gives_no_part_of_penstock_the_superuser_and_the_owner_is_made_by_the_script() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    postgres = services.pop("postgres")
    superuser = {"postgres", postgres["environment"].get("POSTGRES_USER", "postgres")}
    script = (DEPLOY / "postgres" / "owner.sh").read_text()
    (owner, variable) = re.findall(r"create role (\w+) login password :'(\w+)'", script)[0]
    assert f'--set {variable}="$DATABASE_PASSWORD"' in script
    for service in services.values():
        url = service["environment"]["PENSTOCK_DATABASE_URL"]
        assert url == f"postgresql://{owner}:${{DATABASE_PASSWORD}}@postgres/{owner}"
        assert owner not in superuser
        assert not any("POSTGRES_PASSWORD" in str(value) for value in service["environment"].values())
    assert any(place.startswith("./deploy/postgres/owner.sh:/docker-entrypoint-initdb.d/") for place in postgres["volumes"])

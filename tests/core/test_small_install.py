"""`pip install penstock` is what a producer or worker on a PostgreSQL needs; what needs more names the extra."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import asyncpg
import pytest

from penstock import MissingExtra
from tests.waiting import eventually

BASE = Path(__file__).with_name("base_install.py")
ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
APPLICATION = """
from penstock import Event, Job, Penstock
from datetime import timedelta

app = Penstock()
orders = app.stream("orders", dict, partitions=2)

@app.job
async def square(number: int) -> None: ...

@app.job
def cube(number: int) -> None: ...

@app.pool("accounts", payload=int).job
async def book(job: Job[int]) -> None: ...

@orders.consumer(group="billing")
async def bill(event: Event[dict]) -> None: ...

@app.timer(every=timedelta(hours=1))
async def tidy() -> None: ...
"""


def base(*arguments: str) -> list[str]:
    return [sys.executable, str(BASE), *arguments]


def run_base(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(base(*arguments), capture_output=True, text=True, timeout=120, env=environment, check=False)


async def test_a_worker_and_a_producer_need_only_the_base(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APPLICATION)
    env = {"PENSTOCK_DATABASE_URL": url, "PYTHONPATH": str(tmp_path)}
    worker = subprocess.Popen(base("-m", "penstock", "worker", "shop:app"), cwd=tmp_path, env={**os.environ, **env})
    connection = await asyncpg.connect(url)
    try:
        produced = run_base(
            "-c",
            "from shop import *\nwith app.sync:\n    square.sync.enqueue(2)\n    cube.sync.enqueue(3)\n"
            "    orders.sync.append({'total': 3})",
            env=env,
        )  # fmt: skip
        assert produced.returncode == 0, produced.stderr
        assert run_base("-m", "penstock", "enqueue", "square", '{"number": 4}', env=env).returncode == 0
        done = "select count(*) = 3 from penstock.archived_jobs where status = 'succeeded' and name in ('square', 'cube')"
        await eventually(lambda: worker.poll() is not None or connection.fetchval(done), "three jobs", 60)
        assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()
        await connection.close()


KEY = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
SITES = [
    ("import penstock.http", "http"),
    ("import penstock.client", "http"),
    ("import penstock.http.users", "http"),
    ("import penstock.integrations.rickover.downstream", "http"),
    ("import penstock.integrations.gearman.bridge", "gearman"),
    ("import penstock.spark", "spark,jdk"),
    ("import penstock.spark.history", "spark,jdk"),
    ("import penstock\npenstock.Penstock().sync.open()", "embedded"),
    ("from penstock.testing import TemporaryDatabases\nTemporaryDatabases().__enter__()", "embedded"),
    (f"import penstock\npenstock.Penstock('postgresql://localhost/x', keys=['{KEY}'])", "encryption"),
    ("import penstock as p\np.Penstock('postgresql://localhost/x', settings=p.Settings(traces=True))", "otel"),
    ("from penstock.streams.compression import pack\npack(b'')", "compression"),
    ("from penstock.history.lake import Lake\nLake('a', '/tmp/a')", "spark"),
    ("from penstock.history.delta import delta_package\ndelta_package()", "delta"),
]


CATCHING = """
import sys
from penstock import MissingExtra
for code in {codes!r}:
    try:
        exec(code, {{}})
        print("nothing was missing")
    except MissingExtra as error:
        print(error)
"""


def test_what_needs_an_extra_names_it_in_one_sentence(tmp_path: Path) -> None:
    env = {"PENSTOCK_DATA_DIR": str(tmp_path), "PENSTOCK_DATABASE_URL": "", "DATABASE_URL": ""}
    done = run_base("-c", CATCHING.format(codes=[code for code, _ in SITES]), env=env)
    said = done.stdout.splitlines()
    assert len(said) == len(SITES), done.stdout + done.stderr
    for (code, extra), sentence in zip(SITES, said, strict=True):
        assert sentence.endswith(f"which is not installed: pip install 'penstock[{extra}]'"), code
        assert set(extra.split(",")) <= set(EXTRAS)


COMMANDS = [
    (("server",), "http"),
    (("--server", "http://localhost:1", "types", "list"), "http"),
    (("gearman", "--server", "localhost:4730"), "gearman"),
    (("types", "list"), "embedded"),
]


@pytest.mark.parametrize(("command", "extra"), COMMANDS)
def test_a_command_that_needs_an_extra_names_it(command: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APPLICATION)
    env = {
        "PENSTOCK_DATA_DIR": str(tmp_path / "data"),
        "PENSTOCK_DATABASE_URL": "",
        "DATABASE_URL": "",
        "PYTHONPATH": str(tmp_path),
    }
    done = run_base("-m", "penstock", *command, env={**env, "COLUMNS": "400"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"pip install 'penstock[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_is_named_in_a_document() -> None:
    text = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    missing = [extra for extra in EXTRAS if f"`{extra}`" not in text and f"penstock[{extra}" not in text]
    assert not missing


def test_a_missing_extra_is_an_import_error_too_and_passes_between_processes() -> None:
    error = MissingExtra("the HTTP API", "http", "fastapi")
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

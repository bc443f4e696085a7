"""The code of the documents runs as it stands there: a fresh database for each page, block after block.

What cannot be run says why in the source of the page.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from tests.docs.snippets import Block, blocks, run_python
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/encryption.md",
    "docs/erasure.md",
    "docs/http.md",
    "docs/jobs.md",
    "docs/pools.md",
    "docs/schedules.md",
    "docs/sql.md",
    "docs/streams.md",
    "docs/testing.md",
    "docs/topics.md",
    "docs/workflows.md",
]
# Pages whose code needs more than a database: the test that takes it from the page.
ELSEWHERE = {
    "docs/coming-from/celery.md": "tests/docs/test_coming_from.py",
    "docs/coming-from/dramatiq.md": "tests/docs/test_coming_from.py",
    "docs/coming-from/procrastinate.md": "tests/docs/test_coming_from.py",
    "docs/embedded.md": "tests/cli/test_frameworks.py",
    "docs/frameworks.md": "tests/cli/test_frameworks.py",
    "docs/spark.md": "tests/spark/test_documents.py",
    "docs/tracing.md": "tests/docs/test_tracing.py",
    "examples/shop/README.md": "tests/docs/test_shop.py",
}
BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ['PATH']}"


@dataclass
class Page:
    """A page while it runs."""

    folder: Path
    connection: Any
    names: dict[str, Any]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0
    shell: subprocess.Popen[str] | None = None

    async def run(self, block: Block) -> None:
        """Run one block."""
        await run_python(block.setup, self.names, f"setup of {block}")
        if block.file:
            (self.folder / block.file).write_text(block.code)
        elif block.how == "background":
            self.running.append(subprocess.Popen(["bash", "-c", f"exec {self.command(block)}"], cwd=self.folder))
            await eventually(lambda: self.connection.fetchval("select count(*) from penstock.workers"), "the worker", 60)
        elif block.how == "session":
            await self.session(block)
        elif block.how == "script":
            await self.program([sys.executable, "-c", block.code])
        elif block.language == "sh":
            await self.program(["bash", "-e", "-c", self.command(block)])
        else:
            await (self.sql(block) if block.language == "sql" else self.python(block))

    def command(self, block: Block) -> str:
        """With the programs of this environment."""
        return block.code.replace(".venv/bin/", f"{BIN}/").strip()

    async def session(self, block: Block) -> None:
        """Run commands in the shell of the page; one that fails ends it, an HTTP status from 400 on too. Servers listen on a port
        of the test, and what follows a stream for ever does so for two seconds."""
        log = self.folder / "session.log"
        if self.shell is None:
            environment = {**os.environ, "PATH": PATH, "PORT": str(self.port)}
            with log.open("wb") as output:
                self.shell = subprocess.Popen(
                    ["bash", "-e", "-o", "pipefail"], stdin=subprocess.PIPE, stdout=output, stderr=output, text=True,
                    cwd=self.folder, env=environment, start_new_session=True,
                )  # fmt: skip
        shell, done = self.shell, self.folder / f"done-{block.line}"
        command = self.command(block).replace("localhost:9090", f"localhost:{self.port}")
        command = command.replace("curl ", "curl --fail-with-body --retry 20 --retry-connrefused --silent --show-error ")
        command = re.sub(r"^(call -N .*[^&])$", r"\1 --retry 0 --max-time 2 || [ $? = 28 ]", command, flags=re.MULTILINE)
        assert shell.stdin is not None
        shell.stdin.write(f"{command}\ntouch {done}\n")
        shell.stdin.flush()
        await eventually(lambda: done.exists() or shell.poll() is not None, f"the end of {block}", 60)
        assert done.exists(), log.read_text()[-3000:]

    async def program(self, arguments: list[str]) -> None:
        """Run a program to its end."""
        done = await asyncio.to_thread(
            subprocess.run, arguments, cwd=self.folder, env={**os.environ, "PATH": PATH}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]

    async def python(self, block: Block) -> None:
        """Run Python; what is for threads without a loop runs in one."""
        lines = block.code.splitlines()
        alone = [line for line in lines if re.match(r"\w+\.sync\.", line)]
        await run_python("\n".join(line for line in lines if line not in alone), self.names, str(block))
        for line in alone:
            await asyncio.to_thread(eval, line, self.names)

    async def sql(self, block: Block) -> None:
        """Run SQL. `<name>` stands for what an earlier statement returned under that name."""
        for statement in re.sub(r"--.*", "", block.code).split(";"):
            if statement.strip():
                filled = re.sub(r"<(\w+)>", lambda found: str(self.names[found[1]]), statement)
                for row in await self.connection.fetch(filled):
                    self.names.update(row.items())

    def close(self) -> None:
        """End what runs in the background."""
        if self.shell is not None:
            # The shell and what it started.
            os.killpg(self.shell.pid, signal.SIGTERM)
            self.shell.communicate(timeout=60)
        for process in self.running:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


@contextmanager
def module_of(page: str) -> Iterator[ModuleType]:
    """A module for the names of a page; dataclasses look theirs up."""
    module = ModuleType(f"document_{Path(page).stem}")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]
    sys.modules.pop("shop", None)


@pytest.mark.parametrize("page", PAGES)
async def test_the_code_of_a_page_runs(page: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    connection = await asyncpg.connect(url)
    left, ran = [], 0
    with module_of(page) as module:
        module.__dict__["connection"] = connection
        module.__dict__["folder"] = tmp_path
        under_way = Page(tmp_path, connection, module.__dict__, port=free_port())
        try:
            for block in blocks(ROOT / page):
                if block.not_run:
                    left.append(f"{block}: {block.not_run}")
                    continue
                try:
                    await under_way.run(block)
                except Exception as error:
                    pytest.fail(f"{block}: {type(error).__name__}: {error}\n{block.code}")
                ran += 1
        finally:
            under_way.close()
            for app in [value for value in module.__dict__.values() if isinstance(value, Penstock)]:
                await app.close()
            await connection.close()
    print(f"{page}: {ran} blocks ran; {len(left)} not: {left}")
    assert ran > 0


def pages_with_code() -> list[str]:
    """All pages of the repository that have code; the reference runs in `test_reference`."""
    shown = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [page for page in shown if not page.startswith("docs/reference/") and blocks(ROOT / page)]


@pytest.mark.parametrize("page", pages_with_code())
def test_every_page_with_code_is_run_or_says_why_not(page: str) -> None:
    if page in ELSEWHERE:
        assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text("utf-8"), f"{ELSEWHERE[page]} does not read it"
    elif page not in PAGES:
        assert [str(block) for block in blocks(ROOT / page) if not block.not_run] == []

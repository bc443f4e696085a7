"""`penstock doctor`: what is wrong with the database and the workers, and what to do about it."""

from __future__ import annotations

import asyncio

import typer

from penstock.cli.backend import database_app, server_url, with_backend
from penstock.cli.output import AsJson, out, print_json
from penstock.worker.findings import Finding, worst

_SHOWN = {"ok": "[green]ok[/green]      ", "warning": "[yellow]warning[/yellow] ", "problem": "[red]problem[/red] "}
_PROBLEM, _WARNING = 1, 4


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def _examine() -> list[Finding]:
    """What the configured server finds, or else this process, from an app that is not open: its schema may not fit."""
    if server_url() is not None:
        return with_backend(lambda backend: backend.doctor())
    app = database_app()

    async def run() -> list[Finding]:
        try:
            return await app.doctor()
        finally:
            await app.close()

    return asyncio.run(run())


def doctor(as_json: AsJson = False) -> None:
    """Check everything that work depends on, and say what to do. Exit code: 0 fine, 1 problem, 4 warning."""
    findings = _examine()
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            out.print(_SHOWN[finding.level], end="")
            out.print(f"{finding.check}: {finding.message}", markup=False, highlight=False, soft_wrap=True)
            if finding.advice is not None:
                out.print(f"         {finding.advice}", markup=False, highlight=False, soft_wrap=True)
    code = {"ok": 0, "warning": _WARNING, "problem": _PROBLEM}[worst(findings)]
    if code:
        raise typer.Exit(code)

"""Commands about the keys of encrypted payloads."""

from __future__ import annotations

import typer

from penstock.cli.output import AsJson, print_json, print_table
from penstock.core.encryption import Keyring, new_key
from penstock.settings import Settings

app = typer.Typer(help="Keys of encrypted payloads: making one, and their ids.", no_args_is_help=True)


@app.command()
def create() -> None:
    """Print a new key. Keep it in a store of secrets: a document whose key is lost cannot be read any more."""
    typer.echo(new_key())


@app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """The ids of the keys in PENSTOCK_KEYS, in their order. The first one encrypts, and all decrypt."""
    ids = Keyring(Settings.read().keys).ids
    if as_json:
        print_json([{"id": id, "encrypts": place == 0} for place, id in enumerate(ids)])
        return
    print_table(
        ["key", "encrypts"],
        [(id, "yes" if place == 0 else None) for place, id in enumerate(ids)],
        empty="no keys: set PENSTOCK_KEYS",
    )

"""The proof: words that are planted into encrypted work are nowhere in the files of the server, nor in the logs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock import Penstock
from penstock.core.encryption import new_key
from penstock.errors import InvalidInput
from tests.encryption.searched_app import WORDS, Searched
from tests.encryption.searching import files_of, found_in


async def work(folder: Path, *, encrypted: bool) -> None:
    app = Penstock(data_dir=folder, keys=[new_key()])
    searched = Searched(app, encrypted=encrypted)
    async with app:
        await searched.work()
        if encrypted:
            # What is refused is not stored either.
            async with Penstock(data_dir=folder) as unaware:
                with pytest.raises(InvalidInput):
                    await unaware.enqueue("payments", {"card": "numbatpayload"})
                with pytest.raises(InvalidInput):
                    await unaware.stream("orders").append({"word": "numbatevent"})
                with pytest.raises(InvalidInput):
                    await unaware.topic("delays").publish({"word": "numbatmessage"})
                with pytest.raises(InvalidInput):
                    await (await unaware.find_pool("tenants")).notify("acme", {"word": "numbatnotice"})
        await (await app.database()).fetch("checkpoint")


@pytest.mark.embedded
@pytest.mark.timeout(300)
async def test_no_word_is_in_the_files_or_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "encrypted"
    await work(folder, encrypted=True)
    out = capfd.readouterr()
    assert found_in([*files_of(folder), (caplog.text + out.out + out.err).encode()]) == set()
    # The same search finds them where nothing is encrypted.
    plain = tmp_path / "plain"
    await work(plain, encrypted=False)
    assert found_in(files_of(plain)) == set(WORDS)

"""Envelopes: what opens with which keys, and what does not."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from penstock import Penstock, Settings
from penstock.core.encryption import Keyring, SealedCodec, is_envelope, key_id_of, new_key, owned_by
from penstock.core.serialization import Codec, dump_json
from penstock.errors import InvalidInput, KeyMissing, Unreadable

_OLD, _NEW = new_key(), new_key()
_OWNER = owned_by("job", "payments")


@given(st.text())
def test_an_envelope_opens_to_what_was_sealed(text: str) -> None:
    document = orjson.dumps({"text": text.encode("utf-8", "replace").decode()}).decode()
    ring = Keyring([_NEW])
    assert ring.open(ring.seal(document, _OWNER), _OWNER) == document


def test_an_envelope_survives_jsonb_which_orders_its_fields() -> None:
    ring = Keyring([_NEW])
    inner = orjson.loads(ring.seal('{"card": 1}', _OWNER))["penstock"]
    stored = f'{{"penstock": {{"c": "{inner["c"]}", "v": {inner["v"]}, "kid": "{inner["kid"]}"}}}}'
    assert ring.open(stored, _OWNER) == '{"card": 1}'
    assert key_id_of(stored) == ring.ids[0]


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    before, after = Keyring([_OLD]), Keyring([_NEW, _OLD])
    assert after.open(before.seal("1", _OWNER), _OWNER) == "1"
    assert key_id_of(after.seal("2", _OWNER)) == Keyring([_NEW]).ids[0]
    with pytest.raises(KeyMissing) as missing:
        before.open(after.seal("2", _OWNER), _OWNER)
    assert missing.value.key_id == Keyring([_NEW]).ids[0]
    again = pickle.loads(pickle.dumps(missing.value))
    assert (again.key_id, again.message, again.hint) == (missing.value.key_id, missing.value.message, missing.value.hint)


@pytest.mark.parametrize(
    "owner",
    [
        owned_by("job", "refunds"),
        owned_by("message", "payments"),
        owned_by("job", "payments", "1"),
        owned_by("jobpayments"),
        owned_by("job", "payment", "s"),
    ],
)
def test_an_envelope_does_not_open_for_another_owner(owner: bytes) -> None:
    ring = Keyring([_NEW])
    with pytest.raises(Unreadable, match="belongs to something else"):
        ring.open(ring.seal("1", _OWNER), owner)


def test_a_changed_envelope_does_not_open() -> None:
    ring = Keyring([_NEW])
    inner = orjson.loads(ring.seal('{"amount": 10}', _OWNER))["penstock"]
    sealed = bytearray(base64.b64decode(inner["c"]))
    for place in range(len(sealed)):
        changed = bytes([*sealed[:place], sealed[place] ^ 1, *sealed[place + 1 :]])
        text = orjson.dumps({"penstock": {**inner, "c": base64.b64encode(changed).decode()}}).decode()
        with pytest.raises(Unreadable):
            ring.open(text, _OWNER)


def test_a_version_that_is_not_known_is_an_error_of_its_own() -> None:
    ring = Keyring([_NEW])
    text = ring.seal("1", _OWNER).replace('"v":1', '"v":2')
    with pytest.raises(Unreadable, match="version 2"):
        ring.open(text, _OWNER)


@pytest.mark.parametrize(
    "text",
    [
        '{"penstock":"gate"}',
        '{"penstock":{"v":1}}',
        '{"penstock":{"v":1,"kid":"x","c":"not base64!"}}',
        '{"penstock":{"v":1,"kid":7,"c":"AAAA"}}',
        '{"penstock":{"v":1,"kid":"x","c":"AAAA"}}',
        '{"penstock":{"v":1,"kid":"x","c":"AAAA","more":1}}',
        '{"penstock":{"v":1,"kid":"x","c":"AAAA"},"more":1}',
        '{"penstock":',
        "[1]",
        '"{\\"penstock\\":1}"',
        "null",
    ],
)
def test_what_is_no_envelope_is_returned_as_it_is(text: str) -> None:
    assert Keyring([_NEW]).open(text, _OWNER) == text
    assert key_id_of(text) is None


def test_equal_documents_have_different_envelopes_unless_they_have_a_place() -> None:
    ring = Keyring([_NEW, _OLD])
    assert ring.seal("1", _OWNER) != ring.seal("1", _OWNER)
    assert ring.seal("1", _OWNER, place="7") == ring.seal("1", _OWNER, place="7")
    assert ring.seal("1", _OWNER, place="7") != ring.seal("1", _OWNER, place="8")
    assert ring.seal("1", _OWNER, place="7") != ring.seal("2", _OWNER, place="7")
    assert ring.open(ring.seal("1", _OWNER, place="7", key_id=ring.ids[1]), _OWNER) == "1"


def test_the_envelope_is_small() -> None:
    document = dump_json({"text": "x" * 3_000}, "x")
    assert len(Keyring([_NEW]).seal(document, _OWNER)) < len(document) * 4 / 3 + 100


def test_the_codec_reads_what_is_encrypted_and_what_is_not() -> None:
    codec: SealedCodec[Any] = SealedCodec(Codec(dict[str, int], "payments"), Keyring([_NEW]), "job", "payments")
    sealed = codec.dump({"n": 1})
    assert is_envelope(orjson.loads(sealed))
    assert codec.load(sealed) == {"n": 1} == codec.load('{"n":1}')
    with pytest.raises(InvalidInput, match="invalid payload for payments"):
        codec.dump({"n": "many"})
    with pytest.raises(Unreadable, match="invalid payload for payments"):
        codec.load('{"n":"many"}')


def test_without_a_key_nothing_is_sealed_and_nothing_opens() -> None:
    ring = Keyring()
    assert not ring
    with pytest.raises(InvalidInput, match="job payments is encrypted, and this application has no key"):
        SealedCodec(Codec(Any, "payments"), ring, "job", "payments").dump({"n": 1})
    with pytest.raises(KeyMissing):
        ring.open(Keyring([_NEW]).seal("1", _OWNER), _OWNER)


def test_keys_come_as_text_in_both_alphabets_as_bytes_and_as_secrets() -> None:
    key = os.urandom(32)
    forms: list[Any] = [
        key,
        base64.b64encode(key).decode(),
        base64.urlsafe_b64encode(key).decode().rstrip("="),
        SecretStr(base64.b64encode(key).decode()),
    ]
    assert len({Keyring([form]).ids for form in forms}) == 1


@pytest.mark.parametrize("wrong", ["", "s3cret-s3cret", b"s3cret", base64.b64encode(b"s3cret" * 8).decode(), "é" * 44])
def test_a_wrong_key_is_refused_without_being_shown(wrong: str | bytes) -> None:
    with pytest.raises(InvalidInput, match="key 2 of the application is not 32 bytes") as refused:
        Keyring([_NEW, wrong])
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("keys", ["s3cret", b"s3cret", {"s3cret": 1}])
def test_keys_that_are_no_list_are_refused_without_being_shown(keys: Any) -> None:
    with pytest.raises(InvalidInput, match="keys must be a list, not of type") as refused:
        Penstock(keys=keys)
    assert "s3cret" not in str(refused.value)


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KEYS", f"{_NEW}, {_OLD}")
    app = Penstock()
    assert app.context.keyring.ids == Keyring([_NEW, _OLD]).ids
    for text in (repr(app.settings), str(app.settings), str(app.settings.model_dump()), repr(app.context.keyring)):
        assert _NEW not in text and _OLD not in text
    assert Penstock(keys=[_OLD]).context.keyring.ids == Keyring([_OLD]).ids
    assert Penstock(keys=[]).context.keyring.ids == ()
    assert Penstock(settings=Settings(keys=(base64.b64decode(_NEW),))).context.keyring.ids == Keyring([_NEW]).ids  # type: ignore[arg-type]

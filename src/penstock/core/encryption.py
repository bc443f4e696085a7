"""Encrypted documents: the keys of an application, and the envelope in which a document is stored.

An envelope is a JSON document that takes the place of another one, wherever JSON is stored:

    {"penstock": {"v": 1, "kid": "Zm9vYmFy", "c": "<base64>"}}

`v` is the version of this form, `kid` the id of the key, and `c` the nonce (12 bytes), the ciphertext and the tag (16 bytes) of
AES-256-GCM-SIV (RFC 8452). The ciphertext is bound to its owner, which is the associated data: an envelope that is moved to
another job type, or a result that is moved to another job, does not open.

AES-GCM-SIV stays secure when a nonce repeats; equal documents of one owner then have equal envelopes, and nothing else shows.
Random nonces are therefore safe for any number of documents. Where a repeated call must produce the same envelope (a batch of a
producer, the payload of a standing job), the nonce follows from the owner and the place instead.

Where bytes are stored, as in a stream of bytes, the same parts stand one after another without JSON: the mark `f5 50 4e 53`, the
version, the six bytes of the key's id, and the sealed bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import SecretStr

from penstock.core.extras import needs
from penstock.core.serialization import Codec
from penstock.errors import InvalidInput, KeyMissing, PenstockError, Unreadable

T = TypeVar("T")
KEY_BYTES = 32
ENCRYPTED = "encrypted"
"""What is shown in the place of a document that the reader has no key for."""
_VERSION = 1
_NONCE, _TAG = 12, 16
_BEGINNING = '{"penstock":'
_FIELDS = {"v", "kid", "c"}
_MARK = b"\xf5PNS" + bytes([_VERSION])  # no UTF-8, no zstd
_KID = 6
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{8}", re.ASCII)
_INSIDE = re.compile(r'\{"penstock":\{[^{}]*\}\}')
_LONGEST_REASON = 500


def new_key() -> str:
    """A new key: 32 random bytes as base64 text."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def key_bytes(given: str | bytes | SecretStr, which: str = "the key") -> bytes:
    """The bytes of a key, which is given as base64 text or as 32 bytes. Raises `InvalidInput`, without the value."""
    if isinstance(given, SecretStr):
        given = given.get_secret_value()
    key = b""
    if isinstance(given, bytes):
        key = given
    elif isinstance(given, str):
        text = given.strip().replace("-", "+").replace("_", "/").rstrip("=")
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            key = b""
    if len(key) != KEY_BYTES:
        raise InvalidInput(f"{which} is not {KEY_BYTES} bytes in base64", hint="Make a key with: penstock keys create")
    return key


def owned_by(kind: str, *names: str) -> bytes:
    """The owner of documents, to which their ciphertext is bound: what they are, and the names of what they belong to."""
    # Names have no control characters, so that no two owners have the same bytes.
    return "\x00".join(("penstock", kind, *names)).encode()


def owner_of_events(stream: str) -> bytes:
    """What the payloads of a stream, and of its dead letters, are bound to when they are encrypted."""
    return owned_by("event", stream.removesuffix(".dead"))


class Keyring:
    """The keys of an application: the first encrypts, all decrypt. A ring without keys is false.

    Args:
        keys: Keys, as `key_bytes` takes them.

    Attributes:
        ids: Ids of the keys. An id follows from its key, and says nothing about it.
    """

    def __init__(self, keys: Iterable[str | bytes | SecretStr] = ()) -> None:
        given = [key_bytes(key, f"key {place} of the application") for place, key in enumerate(keys, 1)]
        self._ciphers: dict[str, Any] = {}
        if given:
            make = _cipher()
            self._ciphers = {_id_of(key): make(key) for key in given}
        self.ids: tuple[str, ...] = tuple(self._ciphers)

    def __bool__(self) -> bool:
        return bool(self._ciphers)

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self.ids)})"

    def seal(self, text: str, owner: bytes, *, place: str | None = None, key_id: str | None = None) -> str:
        """The envelope of a document.

        Args:
            text: The document, JSON text.
            owner: What it belongs to, see `owned_by`.
            place: Names the place of the document among those of its owner, when a repeated call must return the same envelope.
            key_id: Id of the key; None: the first key.

        Raises:
            InvalidInput: There is no key.
        """
        if not self._ciphers:
            raise no_key("this document")
        kid = key_id or self.ids[0]
        sealed = self._sealed(kid, text.encode(), owner, place)
        return f'{{"penstock":{{"v":{_VERSION},"kid":"{kid}","c":"{binascii.b2a_base64(sealed, newline=False).decode()}"}}}}'

    def seal_bytes(self, blob: bytes, owner: bytes, *, place: str | None = None) -> bytes:
        """The sealed form of bytes, where bytes are stored. See `seal`."""
        if not self._ciphers:
            raise no_key("these bytes")
        kid = self.ids[0]
        return _MARK + base64.urlsafe_b64decode(kid) + self._sealed(kid, blob, owner, place)

    def _sealed(self, kid: str, plain: bytes, owner: bytes, place: str | None) -> bytes:
        nonce = os.urandom(_NONCE) if place is None else hashlib.sha256(b"%b\x00%b" % (owner, place.encode())).digest()[:_NONCE]
        return nonce + bytes(self._ciphers[kid].encrypt(nonce, plain, owner))

    def open(self, text: str, owner: bytes) -> str:
        """The document of an envelope; a text that is no envelope is returned as it is.

        Raises:
            KeyMissing: The ring does not have its key.
            Unreadable: The envelope belongs to another owner, was changed, or is of a version that is not known.
        """
        if not text.startswith(_BEGINNING) or (found := _parts_of(text)) is None:
            return text
        return str(self._opened(*found, owner), "utf-8")

    def open_bytes(self, stored: bytes, owner: bytes) -> bytes:
        """The bytes of a sealed form; other bytes are returned as they are. Raises as `open` does."""
        if not is_sealed(stored):
            return stored
        kid = base64.urlsafe_b64encode(stored[len(_MARK) : len(_MARK) + _KID]).decode()
        return self._opened(kid, stored[len(_MARK) + _KID :], owner)

    def _opened(self, kid: str, sealed: bytes, owner: bytes) -> bytes:
        cipher = self._ciphers.get(kid)
        if cipher is None:
            raise KeyMissing(f"the document is encrypted with the key {kid}, which this application does not have", key_id=kid)
        try:
            return bytes(cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], owner))
        except Exception:  # InvalidTag, whose module may not be there
            raise Unreadable("the document cannot be decrypted: it was changed, or belongs to something else") from None

    def missing(self, text: str) -> str | None:
        """The id of the key that a document needs and the ring does not have; None: none."""
        kid = key_id_of(text)
        return None if kid is None or kid in self._ciphers else kid


def key_id_of(text: str) -> str | None:
    """The id of the key of an envelope; None for every other text."""
    if not text.startswith(_BEGINNING):
        return None
    try:
        found = _parts_of(text)
    except Unreadable:
        return None
    return None if found is None else found[0]


def is_envelope(value: object) -> bool:
    """Whether a value of JSON has the form of an envelope."""
    inner = value.get("penstock") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(inner, dict) or inner.keys() != _FIELDS:
        return False
    return isinstance(inner["kid"], str) and _KEY_ID.fullmatch(inner["kid"]) is not None


def is_sealed(stored: bytes) -> bool:
    """Whether bytes have the form of sealed ones."""
    return stored.startswith(_MARK) and len(stored) >= len(_MARK) + _KID + _NONCE + _TAG


class SealedCodec(Codec[T]):
    """Encrypts what another codec writes, and decrypts what it reads. It reads documents that are not encrypted too.

    Args:
        plain: The codec of the documents.
        keyring: The keys of the application.
        kind: Kind of the documents, see `owned_by`.
        name: Name of what the documents belong to.
    """

    def __init__(self, plain: Codec[T], keyring: Keyring, kind: str, name: str) -> None:
        self.plain = plain
        self.keyring = keyring
        self.owner = owned_by(kind, name)
        self._what = f"{kind} {name}"

    @property
    def takes_none(self) -> bool:
        """See `Codec`."""
        return self.plain.takes_none

    def dump(self, value: T) -> str:
        """The envelope of a payload. Raises `InvalidInput` as the codec does, and when the application has no key."""
        text = self.plain.dump(value)
        if not self.keyring:
            raise no_key(self._what)
        return self.keyring.seal(text, self.owner)

    def check(self, value: Any) -> Any:
        """See `Codec`."""
        return self.plain.check(value)

    def open(self, text: str) -> str:
        """The JSON text of an envelope; another text as it is. Raises `Unreadable` and `KeyMissing`."""
        return self.keyring.open(text, self.owner)

    def load(self, text: str) -> T:
        """The payload of an envelope, or of a document that is not encrypted. Raises `Unreadable` and `KeyMissing`."""
        return self.plain.load(self.keyring.open(text, self.owner))


class MayBeEncrypted(Protocol):
    """The record of a job type or a stream."""

    @property
    def encrypted(self) -> bool:
        """Whether its documents are encrypted."""

    @property
    def encrypted_at(self) -> datetime | None:
        """Since when there may be encrypted documents."""


class Sealer:
    """Encrypts what belongs to the jobs of one type, or to the standing jobs of a pool, while the type is encrypted.

    Args:
        keyring: Keys of the application.
        name: Name of the job type.
        owner: What the payloads of its jobs belong to: kind and name, see `owned_by`. None: the job type.
        encrypted: Whether the type is encrypted.

    Attributes:
        encrypted: Whether the type is encrypted now, which a worker refreshes from the database.
        has_envelopes: Whether there may be encrypted documents.
    """

    __slots__ = ("_name", "encrypted", "has_envelopes", "keyring", "owner")

    def __init__(self, keyring: Keyring, name: str, owner: tuple[str, str] | None = None, *, encrypted: bool = False) -> None:
        self._name = name
        self.keyring = keyring
        self.owner = owner or ("job", name)
        self.encrypted = self.has_envelopes = encrypted

    def refresh(self, record: MayBeEncrypted) -> None:
        """Apply what the database has."""
        self.encrypted, self.has_envelopes = record.encrypted, record.encrypted_at is not None

    @property
    def locked(self) -> bool:
        """Whether the type is encrypted and there is no key."""
        return self.encrypted and not self.keyring

    def codec(self, plain: Codec[T]) -> Codec[T]:
        """A codec of payloads that may be encrypted."""
        return plain if isinstance(plain, SealedCodec) or not self.keyring else SealedCodec(plain, self.keyring, *self.owner)

    def seal(self, kind: str, text: str, *names: str, place: str | None = None) -> str:
        """A document as it is stored: its envelope when the type is encrypted.

        Args:
            kind: Kind of the document, such as result.
            text: The document, JSON text.
            names: What it belongs to in the type: the id of a job, the key of a standing job.
            place: See `Keyring.seal`.
        """
        if not self.encrypted or not self.keyring:
            return text
        return self.keyring.seal(text, owned_by(kind, self._name, *names), place=place)

    def open(self, kind: str, text: str, *names: str) -> str:
        """A document from its stored form. Raises `Unreadable` and `KeyMissing`."""
        return self.keyring.open(text, owned_by(kind, self._name, *names))

    def seal_line(self, line: str, *names: str) -> str:
        """A line of a job's log as it is stored: when the type is encrypted, an envelope."""
        if not self.encrypted or not self.keyring:
            return line
        return self.seal("log", orjson.dumps({"line": line}).decode(), *names)

    def seal_error(self, kind: str, error: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """An error as it is stored: when the type is encrypted, its type and the envelope of the rest."""
        if not self.encrypted or not self.keyring:
            return dict(error)
        return sealed_error(self.keyring, owned_by(kind, self._name, *names), error)


def sealed_error(keyring: Keyring, owner: bytes, error: Mapping[str, Any]) -> dict[str, Any]:
    """An error whose type stays readable beside the envelope of the rest."""
    rest = orjson.dumps({name: value for name, value in error.items() if name != "type"}).decode()
    return {"type": error.get("type"), **orjson.loads(keyring.seal(rest, owner))}


def opened_entry(keyring: Keyring, owner: bytes, entry: Any, word: str = "message") -> Any:
    """A stored error, or a line of a log, with what its envelope contains; when that cannot be opened, `word` is "encrypted"."""
    if not isinstance(entry, dict) or not is_envelope({"penstock": entry.get("penstock")}):
        return entry
    plain = {name: value for name, value in entry.items() if name != "penstock"}
    text = orjson.dumps({"penstock": entry["penstock"]}).decode()
    try:
        return {**orjson.loads(keyring.open(text, owner)), **plain}
    except Unreadable:
        return {**plain, word: ENCRYPTED}


def sealed_reason(keyring: Keyring, owner: bytes, error_type: str, message: str) -> str:
    """Why a handler failed, as it is stored in a line of text: the class of the error, and the envelope of its message.

    Args:
        keyring: Keys of the application.
        owner: What the envelope is bound to.
        error_type: Class of the error.
        message: Its message; what is beyond 500 bytes is left out.
    """
    kept = message.encode(errors="replace")[:_LONGEST_REASON].decode(errors="ignore")
    return f"{error_type}: {keyring.seal(orjson.dumps(kept).decode(), owner)}"


def opened_reason(keyring: Keyring, owner: bytes, text: str) -> str:
    """A line of text with what its envelopes contain, or the word "encrypted" in the place of those that do not open."""

    def opened(found: re.Match[str]) -> str:
        try:
            return str(orjson.loads(keyring.open(found.group(), owner)))
        except (Unreadable, orjson.JSONDecodeError):
            return ENCRYPTED

    return _INSIDE.sub(opened, text) if _BEGINNING in text else text


def no_key(what: str) -> InvalidInput:
    """The error of an application without a key that would have to encrypt."""
    return InvalidInput(
        f"{what} is encrypted, and this application has no key",
        hint="Give the keys that the other applications have: Penstock(keys=[...]), or PENSTOCK_KEYS.",
    )


def _parts_of(text: str) -> tuple[str, bytes] | None:
    """The id of the key, and the sealed bytes, of an envelope; None for another document."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not is_envelope(value):
        return None
    inner = value["penstock"]
    if inner["v"] != _VERSION:
        raise Unreadable(f"the envelope has the version {inner['v']!r:.20}, and this version of Penstock reads {_VERSION}")
    try:
        kid, sealed = inner["kid"], binascii.a2b_base64(inner["c"])
    except (TypeError, ValueError):
        return None
    return (kid, sealed) if isinstance(kid, str) and len(sealed) >= _NONCE + _TAG else None


def _id_of(key: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(b"penstock key id\x00" + key).digest()[:6]).decode()


def _cipher() -> Callable[[bytes], Any]:
    with needs("encryption", "an application with keys"):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
    try:
        AESGCMSIV(bytes(KEY_BYTES))
    except UnsupportedAlgorithm:
        raise PenstockError(
            "the package cryptography is built with an OpenSSL that lacks AES-GCM-SIV", hint="Use OpenSSL 3.2 or newer."
        ) from None
    return AESGCMSIV

"""What belongs to standing jobs of an encrypted pool, as it is stored: payload, messages, state and error.

A start compares its payload with the stored one, and a reconciliation all of them. So equal payloads of a key have equal
envelopes as long as the key of encryption is the same; and a payload whose envelope has an older key is compared under that one,
so that a rotation of keys starts no standing job again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from penstock.core.encryption import Sealer, key_id_of, no_key, opened_entry, owned_by
from penstock.jobs.opening import open_value
from penstock.pools.models import StandingState

_PAYLOAD, _MESSAGE, _STATE, _ERROR = "standing", "standing-message", "standing-state", "standing-error"


class SealedStanding:
    """Encrypts and decrypts for the standing jobs of one pool; of a pool that is not encrypted, texts stay as they are.

    Args:
        name: Name of the pool.
        sealer: Says whether the pool is encrypted, and has the keys.
    """

    __slots__ = ("_name", "_sealer")

    def __init__(self, name: str, sealer: Sealer) -> None:
        self._name = name
        self._sealer = sealer

    @property
    def encrypted(self) -> bool:
        """Whether the pool is encrypted."""
        return self._sealer.encrypted

    def payload(self, key: str, text: str, present: Any = None) -> str:
        """A payload as it is stored. Raises `InvalidInput` when there is no key.

        Args:
            key: Key of the standing job.
            text: Payload, JSON text.
            present: The stored payload of this key; None: not known, or none.
        """
        if not self.encrypted:
            return text
        keyring, owner = self._sealer.keyring, owned_by(_PAYLOAD, self._name, key)
        if not keyring:
            raise no_key(f"pool {self._name}")
        kid = None if present is None else key_id_of(orjson.dumps(present).decode())
        if kid is not None and kid in keyring.ids:
            under_its_key = keyring.seal(text, owner, place="payload", key_id=kid)
            if orjson.loads(under_its_key) == present:
                return under_its_key
        return keyring.seal(text, owner, place="payload")

    def message(self, key: str, text: str) -> str:
        """A message as it is stored. Raises `InvalidInput` when there is no key."""
        if self._sealer.locked:
            raise no_key(f"pool {self._name}")
        return self._sealer.seal(_MESSAGE, text, key)

    def state(self, key: str, text: str) -> str:
        """The state of a run as it is stored."""
        return self._sealer.seal(_STATE, text, key)

    def error(self, key: str, error: dict[str, Any]) -> dict[str, Any]:
        """The error of a run as it is stored: its type stays readable."""
        return self._sealer.seal_error(_ERROR, error, key)

    def open_payload(self, key: str, text: str) -> str:
        """A payload from its stored form. Raises `Unreadable` and `KeyMissing`, as the next two do."""
        return self._sealer.open(_PAYLOAD, text, key) if self._sealer.has_envelopes else text

    def open_message(self, key: str, text: str) -> str:
        """A message from its stored form."""
        return self._sealer.open(_MESSAGE, text, key) if self._sealer.has_envelopes else text

    def open_state(self, key: str, text: str) -> str:
        """A state from its stored form."""
        return self._sealer.open(_STATE, text, key) if self._sealer.has_envelopes else text

    def opened(self, job: StandingState) -> StandingState:
        """A standing job as a reader sees it: with the word "encrypted" where the key is missing."""
        keyring = self._sealer.keyring
        return replace(
            job,
            data=open_value(job.data, keyring, owned_by(_PAYLOAD, self._name, job.key)),
            state=open_value(job.state, keyring, owned_by(_STATE, self._name, job.key)),
            error=opened_entry(keyring, owned_by(_ERROR, self._name, job.key), job.error),
        )

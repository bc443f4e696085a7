"""HTTP without encryption, over which all servers of the tests speak."""

from __future__ import annotations

import ssl

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For `verify` of a client of httpx, each of which otherwise reads the certificates of all authorities: longer than a test."""

"""How a client reaches its server: whose certificates it takes."""

from __future__ import annotations

import ssl

from penstock.client.connection import options_for


def test_a_server_over_https_is_verified_and_over_http_no_certificate_is_read() -> None:
    assert options_for("https://host", None, "", None, 1)["verify"] is True
    plain = options_for("http://host", None, "", None, 1)["verify"]
    # It trusts no certificate, should it come to encryption after all.
    assert (plain.verify_mode, plain.check_hostname, plain.get_ca_certs()) == (ssl.CERT_REQUIRED, True, [])

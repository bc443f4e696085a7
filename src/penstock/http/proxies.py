"""Who the client is behind proxies.

A proxy appends the address that it was called from to `X-Forwarded-For`. Any client can send that header, so it is read from its
end, and only as far as proxies are named in `trusted_proxies`: the first address that is no trusted proxy is the client.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# A client of IPv6 has as many addresses as it likes below this.
_IPV6_CLIENT = 64
_MOST_HOPS = 20


class Proxies:
    """The proxies before this server.

    Args:
        networks: Their addresses, or networks such as `10.0.0.0/8`.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(one, strict=False) for one in networks]

    def client(self, peer: str, forwarded: bytes) -> str:
        """The address of the client.

        Args:
            peer: The address that the connection came from.
            forwarded: The values of `X-Forwarded-For`, joined by commas.
        """
        if not self._networks or not forwarded or not self._trusts(peer):
            return peer
        client = peer
        for hop in reversed(forwarded.decode("latin-1").split(",")[-_MOST_HOPS:]):
            address = _bare(hop.strip())
            if address is None:
                break
            client = address
            if not self._trusts(address):
                break
        return client

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)


def household(client: str) -> str:
    """What an address is counted as: of IPv6 the network of a customer, which is one client with 2^64 addresses."""
    try:
        parsed = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if isinstance(parsed, ipaddress.IPv4Address):
        return client
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_CLIENT), strict=False).network_address)


def _bare(hop: str) -> str | None:
    """The address of a hop, which some proxies write with a port or in brackets; None when it is none."""
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return str(ipaddress.ip_address(hop))
    except ValueError:
        return None

"""What a failed connection to a network address says of TLS, in words that name the way out.

gRPC reports a wrong CA, a wrong name and a port without TLS as "unavailable", like a server that is
down. Must not be here: anything that connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client_config import ClientConfig
    from kvstore.server_address import ServerAddress

# What BoringSSL and gRPC say, and what it may mean where this client talks TLS.
_MEANINGS = (
    ("certificate has expired", "its certificate has ended: renew it with `kvstore cert`"),
    ("not yet valid", "its certificate is not valid yet: compare the clocks"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not from the CA that this client believes: name the server's CA with "
        "ca_file (--ca)",
    ),
    (
        "Hostname Verification Check failed",
        "its certificate does not name {host}: connect by a name that stands in it, or add this "
        "one with `kvstore cert DIR --host {host}`",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "what answers there does not speak TLS: see that this is the port of a server with "
        "tls_cert, or go without TLS with insecure_network (--insecure-network)",
    ),
    (
        "Socket closed",
        "it closed the connection: it may want a client certificate, cert_file and key_file "
        "(--cert, --key), from the CA of its tls_client_ca",
    ),
)
_WITHOUT_TLS = (
    "it closed the connection: it may want TLS; leave insecure_network out and name its CA with "
    "ca_file (--ca)"
)


def tls_trouble(details: str, address: ServerAddress, config: ClientConfig) -> str:
    """What may be wrong, by gRPC's words for a failed connection; "" when it is not TLS."""
    if address.socket is not None:
        return ""
    if config.insecure_network:
        return _WITHOUT_TLS if "Socket closed" in details else ""
    host = address.target.rpartition(":")[0]
    for words, meaning in _MEANINGS:
        if words in details:
            return meaning.format(host=host)
    return ""

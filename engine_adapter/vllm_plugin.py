"""The entry point `vllm.general_plugins`: makes "KVStoreConnector" a name that vLLM knows.

vLLM calls this in each of its processes; nothing heavy may be imported here.
"""

from __future__ import annotations

NAME = "KVStoreConnector"
MODULE = "kvstore.engine_adapter.vllm_connector"


def register() -> None:
    """Tell vLLM's factory; again does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)

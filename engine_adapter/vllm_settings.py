"""Settings of the vLLM plug-in: `kv_connector_extra_config`, checked once; unknown keys refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.engine_adapter.load_choice import LOOKUP_S_ALWAYS, LoadMode
from kvstore.errors import ConfigError
from kvstore.server_address import parse_address

SESSION_PIN_S = 600.0
LOOKUP_S = 0.25


class VllmSettings(BaseModel):
    """What a user may say. Only `store` has to be given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = Field(min_length=1)  # a directory, or kvstore://unix:/path/kvstore.sock
    load: LoadMode = LoadMode.AUTO
    save: bool = True
    page_tokens: int | None = Field(default=None, ge=1)  # a multiple of the engine's block
    weights_version: str | None = Field(default=None, min_length=1, max_length=256)
    keep_failure_policy: bool = False  # leave vLLM's kv_load_failure_policy as it is
    load_by_layer: bool | None = None  # let the forward begin during a load; None: on a GPU
    start_wait_s: float = Field(default=3.0, ge=0, le=60)  # for the store, when the engine starts
    session_pin_s: float = Field(default=SESSION_PIN_S, gt=0)
    pin_ttl_s_max: float = Field(default=24 * 3600.0, gt=0)
    host_bytes: str | int | None = None  # of a server that has to be started
    disk_bytes: str | int | None = None
    server_uid: int | None = Field(default=None, ge=0)
    private_server: bool | None = None  # as kvstore.client_config has it

    @property
    def connect_arguments(self) -> dict[str, Any]:
        """For kvstore.connect.connect()."""
        named = {"host_bytes": self.host_bytes, "disk_bytes": self.disk_bytes}
        given: dict[str, Any] = {name: each for name, each in named.items() if each is not None}
        # In a thread; the planner waits less.
        given["lookup_deadline_s"] = LOOKUP_S_ALWAYS if self.load is LoadMode.ALWAYS else LOOKUP_S
        if self.server_uid is not None:
            given["server_uid"] = self.server_uid
        if self.private_server is not None:
            given["private_server"] = self.private_server
        return given


def read_settings(extra_config: dict[str, Any]) -> VllmSettings:
    """The settings; ConfigError in one line that names what is wrong."""
    try:
        settings = VllmSettings(**extra_config)
    except ValidationError as exc:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}"
            for each in exc.errors(include_url=False)
        )
        known = ", ".join(VllmSettings.model_fields)
        raise ConfigError(f"kv_connector_extra_config: {wrong}; known are {known}") from exc
    address = parse_address(settings.store)
    if address.directory is None and address.socket is None:
        raise ConfigError(
            f"store: {settings.store} is on a network; vLLM's workers need its memory, so give a "
            "directory or kvstore://unix:/path/kvstore.sock of this host"
        )
    return settings

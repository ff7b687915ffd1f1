from typing import Any

# Generated without types: its names are checked by use.
def __getattr__(name: str) -> Any: ...

# Its own file imports all of its 400 models where types are checked, which took pyright longer than Shardwright.
from typing import Any

def __getattr__(name: str) -> Any: ...

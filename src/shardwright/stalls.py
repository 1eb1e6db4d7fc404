"""Where a training step waits for its input, for any loader and any step.

``analyse(loader, step)`` measures; ``shardwright stalls`` is the same from the command line.
"""

from shardwright.core.caches import page_cache_hits
from shardwright.core.stalls import DataFiles, InputRates, Knob, Stalls
from shardwright.verbs.stalls import analyse

__all__ = ["DataFiles", "InputRates", "Knob", "Stalls", "analyse", "page_cache_hits"]

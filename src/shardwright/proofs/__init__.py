"""What is proved of a Program, whatever made it: nobody waits for ever, and nothing is read or summed amiss.

``check`` and ``check_complete`` are the doors. They rest on nothing that lowering remembers.
"""

from shardwright.proofs.check import check
from shardwright.proofs.complete import check_complete

__all__ = ["check", "check_complete"]

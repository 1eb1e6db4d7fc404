"""Markov chains over strategies, FlexFlow's search, instead of the planner's: `plan --method mcmc`.

``sample`` is the door. Nothing that the planner finds depends on them.
"""

from shardwright.chains.mcmc import Chain, sample

__all__ = ["Chain", "sample"]

"""How operators may be split: ``iterate`` gives an operator's iteration space by the rule of its kind,
``has_rule`` says whether there is one, ``find_samples`` which of the dims of a graph count samples."""

from shardwright.operators.splitting.rules import has_rule, iterate
from shardwright.operators.splitting.samples import find_samples

__all__ = ["find_samples", "has_rule", "iterate"]

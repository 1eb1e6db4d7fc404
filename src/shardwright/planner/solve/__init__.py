"""Solvers that know no graph and no device: variables, tables of costs, and what is best.

``network`` and ``elimination`` find minima by eliminating variables, ``frontier`` every supported point and,
by ``exchange``, points between them; ``tables`` eliminates where the tables on the way are wanted, ``wide``
solves what is too wide to eliminate.
"""

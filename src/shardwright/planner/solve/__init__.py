"""Solvers that know no graph and no device: variables, tables of costs, and what is best.

``network`` and ``elimination`` find minima and every supported point by eliminating variables,
``nonsupported`` the points between, ``tables`` eliminates where the tables on the way are wanted,
``wide`` solves what is too wide to eliminate.
"""

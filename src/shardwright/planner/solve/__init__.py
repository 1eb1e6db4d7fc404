"""Solvers that know no graph and no device: variables, tables of two costs, and what is best.

``network`` and ``elimination`` find minima and every supported point by eliminating variables,
``gaps`` the points between, ``wide`` what is too wide to eliminate.
"""

"""The nouns: immutable values that every room speaks in.

Graph, layout, strategy, program, timeline, plan, cluster and costs. They check themselves when made
and do nothing else. Only the standard library and NumPy may be imported here.
"""

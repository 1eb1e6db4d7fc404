"""What choices cost, as terms that add up: the model that proposes plans to the simulator.

``context`` holds what one search knows, ``decisions`` what has to be decided on a mesh, ``problem``
both with their prices, ``partition`` how blocks become stages.
"""

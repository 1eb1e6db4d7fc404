"""Settings for every test."""

from hypothesis import settings

# No time limit per example: the first one may compile a kernel, and machines differ.
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")

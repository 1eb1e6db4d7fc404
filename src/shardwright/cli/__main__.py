"""``python -m shardwright.cli``."""

from shardwright.cli import main

main()

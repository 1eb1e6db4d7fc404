"""``python -m shardwright``."""

from shardwright.cli import main

main()

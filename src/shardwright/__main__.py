"""``python -m shardwright``."""

from shardwright.cli import main
from shardwright.runtime.lifeline import die_with_agent

die_with_agent()
main()

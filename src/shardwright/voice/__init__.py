"""How results sound: tables and a next step for people, one object with stable keys for machines.

Results go to standard output; progress and warnings to standard error, so that output can be piped.
"""

from shardwright.voice.contest import show_contest
from shardwright.voice.plans import (
    explanation_text,
    plan_summary,
    show_checks,
    show_cluster_file,
    show_contrast,
    show_explanation,
    show_graph,
    show_profile,
    show_simulation,
    show_study,
    story_summary,
)
from shardwright.voice.rules import show_proposals, show_rules, show_unruled
from shardwright.voice.runs import (
    show_comparison,
    show_export,
    show_report,
    show_training,
    show_verification,
)
from shardwright.voice.speaker import Voice, encode_loosely
from shardwright.voice.validation import show_validation

__all__ = [
    "Voice",
    "encode_loosely",
    "explanation_text",
    "plan_summary",
    "show_checks",
    "show_cluster_file",
    "show_comparison",
    "show_contest",
    "show_contrast",
    "show_explanation",
    "show_export",
    "show_graph",
    "show_profile",
    "show_proposals",
    "show_report",
    "show_rules",
    "show_simulation",
    "show_study",
    "show_training",
    "show_unruled",
    "show_validation",
    "show_verification",
    "story_summary",
]

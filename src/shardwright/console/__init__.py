"""How results sound: tables and a next step for people, one object with stable keys for machines.

Results go to standard output; progress and warnings to standard error, so that output can be piped.

The functions are imported when they are first used, each with what it shows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.console.advice import show_advice
    from shardwright.console.contest import show_contest
    from shardwright.console.layertraces import show_trace
    from shardwright.console.plans import (
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
    from shardwright.console.rules import show_proposals, show_rules, show_unruled
    from shardwright.console.runs import (
        show_comparison,
        show_export,
        show_report,
        show_training,
        show_tuning,
        show_verification,
    )
    from shardwright.console.stalls import show_stalls
    from shardwright.console.terminal import Terminal, encode_loosely
    from shardwright.console.validation import show_validation

_HOMES = {
    "Terminal": "terminal",
    "encode_loosely": "terminal",
    "explanation_text": "plans",
    "plan_summary": "plans",
    "show_advice": "advice",
    "show_checks": "plans",
    "show_cluster_file": "plans",
    "show_comparison": "runs",
    "show_contest": "contest",
    "show_contrast": "plans",
    "show_explanation": "plans",
    "show_export": "runs",
    "show_graph": "plans",
    "show_profile": "plans",
    "show_proposals": "rules",
    "show_report": "runs",
    "show_rules": "rules",
    "show_simulation": "plans",
    "show_stalls": "stalls",
    "show_study": "plans",
    "show_trace": "layertraces",
    "show_training": "runs",
    "show_tuning": "runs",
    "show_unruled": "rules",
    "show_validation": "validation",
    "show_verification": "runs",
    "story_summary": "plans",
}

__all__ = [
    "Terminal",
    "encode_loosely",
    "explanation_text",
    "plan_summary",
    "show_advice",
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
    "show_stalls",
    "show_study",
    "show_trace",
    "show_training",
    "show_tuning",
    "show_unruled",
    "show_validation",
    "show_verification",
    "story_summary",
]


def __getattr__(name: str) -> Any:
    """Import a function when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

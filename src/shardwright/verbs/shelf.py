"""What trials measured, in the store: planning again soon tries nothing twice."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.codec import decode, dumps, encode
from shardwright.core.costs import CostTable, Record
from shardwright.core.plan import Measured
from shardwright.core.strategy import Feedback, Strategy
from shardwright.planner.search import Survey
from shardwright.planner.space import check_strategy
from shardwright.store import Store, is_old


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where trials lie: those of a graph (its fingerprint) trained in one way, in an environment."""

    graph: str
    how: str
    environment: str

    @staticmethod
    def of(survey: Survey, optimizer: str, environment: str) -> Shelf:
        """Return where the trials of a survey's model lie."""
        # What was tried before there were further ways of training keeps its place.
        said = repr(survey.context.training)
        later = (
            "gradient_dtype='parameter'",
            "error_feedback=False",
            "compressor='none'",
            "density=1.0",
            f"feedback={Feedback()!r}",
            "least_sent=1.0",
        )
        for unsaid in later:
            said = said.replace(f", {unsaid}", "")
        training = hashlib.sha256(said.encode()).hexdigest()[:8]
        return Shelf(survey.context.graph.fingerprint, f"{optimizer}|{training}", environment)

    @property
    def prefix(self) -> str:
        """How the keys of its trials begin; a strategy's JSON follows."""
        return f"trial|{self.graph}|{self.how}|"

    def read(self, survey: Survey) -> tuple[dict[Strategy, Measured], bool]:
        """Return what is known of plans that ran and still fit, and whether all that is old. What cannot
        be read as a strategy of this graph is as if it were not there."""
        with Store() as store:
            records = store.find(None, self.environment)
        found: dict[Strategy, Measured] = {}
        used: list[Record] = []
        for one in records:
            if not one.key.startswith(self.prefix):
                continue
            with contextlib.suppress(ValueError, IndexError, RecursionError):
                strategy = decode(Strategy, json.loads(one.key[len(self.prefix) :]))
                check_strategy(survey.context.graph, strategy, survey.context.facts.samples)
                if survey.plan(strategy).predicted.peak_bytes <= survey.room:
                    found[strategy] = Measured(
                        step_seconds=one.seconds, spread_seconds=one.spread, num_steps=one.count
                    )
                    used.append(one)
        return found, bool(used) and is_old(used)

    def write(self, known: Mapping[Strategy, Measured], table: CostTable) -> None:
        """Store what was measured, and the factors fitted to it."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows = [
            (
                self.prefix + dumps(encode(one)),
                found.step_seconds,
                found.spread_seconds,
                found.num_steps,
            )
            for one, found in known.items()
        ]
        rows += [
            (f"factor|{self.graph}|{name}", value, 0.0, max(len(known), 1))
            for name, value in table.factors
        ]
        with Store() as store:
            store.put(
                Record(
                    key=key,
                    seconds=seconds,
                    spread=spread,
                    count=count,
                    environment=self.environment,
                    measured_at=now,
                )
                for key, seconds, spread, count in rows
            )

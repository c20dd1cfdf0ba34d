"""`python -m elaswave_fx.inspect [recipe=NAME …] out=DIR`: what would run where, without running it.

Captures and partitions the model, prints the plan as a table, and writes `graph.txt` (stable text of the partitioned
program) and `plan.json` to `out`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elaswave_fx.config.compose import Job, run_hydra
from elaswave_fx.entry import run_command
from elaswave_fx.errors import ConfigError
from elaswave_fx.files import replace_file

if TYPE_CHECKING:
    from elaswave_fx.plan.plan import Plan
    from elaswave_fx.program.artifact import Artifact


def inspect(job: Job) -> int:
    """Write the files and print the table; raises ConfigError for what cannot be captured or planned."""
    import torch

    from elaswave_fx.build.builder import build
    from elaswave_fx.build.initial_plan import plan_of
    from elaswave_fx.plan.describe import describe

    if job.extra.get("lose"):
        raise ConfigError(f"lose={job.extra['lose']} is not available yet")
    torch.set_num_threads(1)
    out = Path(job.run_dir)
    built = build(job.config, None)
    artifact = built.artifact
    plan = plan_of(job.config, artifact)
    replace_file(out / "graph.txt", graph_text(artifact, plan).encode())
    replace_file(out / "plan.json", plan.to_json().encode())
    print(f"{built.origin}\npipeline: {artifact.pipeline}\n\n{describe(plan)}")
    print(f"\nwrote {out / 'graph.txt'} and {out / 'plan.json'}")
    return 0


def graph_text(artifact: Artifact, plan: Plan) -> str:
    """The pipeline, the stages of the plan, then the program's units."""
    lines = [f"pipeline: {artifact.pipeline}", ""]
    for tile in plan.tiles:
        if not tile.units:
            lines.append(f"rank {tile.rank}: computes nothing")
            continue
        lines.append(
            f"rank {tile.rank}: units {', '.join(f'{s.lo}..{s.hi - 1}' for s in tile.units.spans)}, "
            f"samples {', '.join(f'{s.lo}..{s.hi - 1}' for s in tile.spans)} in {len(tile.micro_batches)} micro-batches"
        )
    return "\n".join(lines) + "\n\n" + artifact.text


if __name__ == "__main__":
    sys.exit(run_command(lambda: run_hydra(inspect, "inspect", ("out", "lose"))))

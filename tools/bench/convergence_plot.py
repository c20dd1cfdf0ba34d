"""The picture of the convergence study: how far each step's loss is from where it would be if no rank had failed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from elaswave_fx.pictures.drawing import pyplot, save

Lines = Mapping[str, Sequence[Sequence[float]]]
"""By the way in which failures are met: for each seed, the deviation of every step."""

_LINEAR_BELOW = 1e-9
"""Zero has a place on the axis."""


def draw(found: Mapping[str, Lines], failures: Sequence[int], path: Path) -> None:
    """Draw a panel per precision: medians over seeds, in front of the range from the least to the greatest.

    `failures`: the steps in which ranks fail, a mark each. Raises ConfigError without matplotlib.
    """
    plt = pyplot("convergence", path)
    figure, panels = plt.subplots(1, len(found), figsize=(5.2 * len(found), 4), sharey=True, squeeze=False,
                                  layout="constrained")  # fmt: skip
    for axes, (precision, lines) in zip(panels[0], found.items(), strict=True):
        for number, (way, seeds) in enumerate(lines.items()):
            by_step = list(zip(*seeds, strict=True))
            steps = range(len(by_step))
            axes.fill_between(
                steps, [min(each) for each in by_step], [max(each) for each in by_step], color=f"C{number}", alpha=0.15,
                linewidth=0,
            )  # fmt: skip
            medians = [statistics.median(each) for each in by_step]
            axes.plot(steps, medians, color=f"C{number}", label=way, zorder=3 - number / len(lines))
        for step in failures:
            axes.axvline(step, ymax=0.03, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW)
        axes.set_ylim(bottom=-_LINEAR_BELOW / 2)
        axes.set_title(precision, loc="left")
        axes.set_xlabel("step (marks: a rank is lost)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("deviation of the loss (nats)")
    handles, ways = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, ways, loc="outside lower center", ncols=len(ways), frameon=False)
    save(figure, path)
    plt.close(figure)

"""Plots of a report: maps of heads and layers, and curves. Needs matplotlib.

Made from the report alone, so that they can be drawn again from its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from criticalkv.shared.figures import file_name, one_axis, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERIES = "after"


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what a report holds; return the files.

    Args:
        report: details and samples of `findings.report_of`.
        folder: for the files, PNG.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    return saved(_figures(report), folder)


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    details, samples = report["details"], report["samples"]
    for other, base in details["bases"].items():
        yield f"reduction-{file_name(other)}", _reductions(samples["actual_l1"], base, other)
    for name, tiers in details["table"].items():
        yield f"bounds-{file_name(name)}", _bounds(tiers, name)
    for key, what in (("sigma", "σ"), ("first_sigma", "first-stage σ")):
        for name, tiers in samples[key].items():
            yield f"{key}-{file_name(name)}", _masses(tiers, f"{what} of {name}")
    if "sweep" in details:
        yield f"sweep-{details['sweep']}", _sweep(details["table"], details["bases"])


def _reductions(maps: dict[str, Any], base: str, other: str) -> Figure:
    """Share of the perturbation that is gone, head by head (the paper's Figs. 4–6)."""
    found = {
        f"1 − {other} ÷ {base}, {tier} kept": [
            [1 - b / a if a else 0.0 for a, b in zip(before, after, strict=True)]
            for before, after in zip(of[QUERIES], maps[other][tier][QUERIES], strict=True)
        ]
        for tier, of in maps[base].items()
    }
    return heat_maps(found, -1, 1, "RdBu")


def _masses(tiers: dict[str, Any], what: str) -> Figure:
    """Kept share of attention, head by head (the paper's Fig. 8 for the first stage)."""
    found = {f"{what}, {tier} kept": of[QUERIES] for tier, of in tiers.items()}
    return heat_maps(found, 0, 1, "viridis")


def heat_maps(maps: dict[str, Any], low: float, high: float, colours: str) -> Figure:
    """One heat map beside the other: layers down, query heads across."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(maps), 5), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    image = None
    for axis, (title, values) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
        axis.set(title=title, xlabel="query head", ylabel="layer")
        axis.title.set_fontsize(8)
    if image is not None:
        figure.colorbar(image, ax=axes)
    return figure


def _bounds(tiers: dict[str, Any], name: str) -> Figure:
    """Actual perturbation under its two bounds (the paper's Table 9)."""
    axis, figure = one_axis()
    for key, label in (
        ("actual_l1", "actual"),
        ("theta_l1", "θ, Theorem 3.3"),
        ("attention_only_l1", "attention only, Theorem C.1"),
    ):
        axis.plot([float(t) for t in tiers], [of[QUERIES][key] for of in tiers.values()], "o-")
        axis.lines[-1].set_label(label)
    axis.set(title=name, xlabel="kept", ylabel="mean L1 perturbation of a head", ylim=(0, None))
    axis.legend()
    return figure


def _sweep(table: dict[str, Any], bases: dict[str, str]) -> Figure:
    """Perturbation by the value of one option, relative to the base method."""
    axis, figure = one_axis()
    base = next(iter(bases.values()))
    for tier, of in table[base].items():
        whole = of[QUERIES]["actual_l1"]
        ratios = [table[name][tier][QUERIES]["actual_l1"] / whole for name in bases]
        axis.plot(list(bases), ratios, "o-", label=f"{tier} kept")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(ylabel=f"mean L1 perturbation ÷ that of {base}")
    axis.legend()
    return figure

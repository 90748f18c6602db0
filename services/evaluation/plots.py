"""Plots of a run's report: quality over bytes, turn by turn, and needles by place.

Made from the report alone, so that they can be drawn again from its file. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from criticalkv.services.evaluation.answer import FULL
from criticalkv.shared.figures import file_name, one_axis, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what a report holds; return the files.

    Args:
        report: details and samples of `findings.report_of`.
        folder: for the files, PNG.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    return saved(figures(report), folder)


def figures(report: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield every figure and its name."""
    details = report["details"]
    for (task, length), rows in _split(details["table"], "task", "length"):
        name = file_name(task if length is None else f"{task}-{length}")
        yield f"bytes-{name}", over_bytes(rows, details["measure"])
        if any(len(row["turns"]) > 1 for row in rows):
            yield f"turns-{name}", by_turn(rows)
    for (policy, tier), places in _split(details["places"], "policy", "tier"):
        yield f"needle-{file_name(policy)}-{tier}", needle_map(places)


def over_bytes(rows: list[Row], measure: str) -> Figure:
    """Score, and KL where there is one, over the bytes kept; the full cache as a level.

    A line for each policy. A band around scores: the 95 % interval.
    """
    from matplotlib.figure import Figure

    with_kl = any(row["kl"] and row["policy"] != FULL for row in rows)
    figure = Figure(figsize=(6, 7 if with_kl else 4), layout="constrained")
    axes = figure.subplots(1 + with_kl, 1, squeeze=False)[:, 0]
    figure.suptitle(_title(rows[0]))
    _lines(axes[0], rows, "score")
    axes[0].set(xlabel="bytes kept of a context, MB", ylabel=measure)
    if with_kl:
        _lines(axes[1], [row for row in rows if row["kl"]], "kl")
        axes[1].set(xlabel="bytes kept of a context, MB", ylabel="KL to full, nats per token")
        axes[1].set_yscale("symlog", linthresh=1e-4)
    return figure


def _lines(axis: Axes, rows: list[Row], key: str) -> None:
    for (policy,), own in _split(rows, "policy"):
        values = {bound: [row[key][bound] for row in own] for bound in ("mean", "low", "high")}
        if policy == FULL:
            axis.axhline(values["mean"][0], color="grey", linestyle="--", label=FULL)
            continue
        megabytes = [row["kept_bytes"] / 1e6 for row in own]
        axis.plot(megabytes, values["mean"], "o-", label=policy)
        axis.fill_between(megabytes, values["low"], values["high"], alpha=0.15)
    axis.legend(fontsize=7)


def by_turn(rows: list[Row]) -> Figure:
    """Score of each turn: a line for each policy at each tier."""
    axis, figure = one_axis()
    most = max(len(row["turns"]) for row in rows)
    for row in rows:
        label = FULL if row["policy"] == FULL else f"{row['policy']}, {row['tier']}"
        axis.plot(range(1, 1 + len(row["turns"])), row["turns"], "o-", label=label)
    axis.set(title=_title(rows[0]), xlabel="turn", ylabel="score", ylim=(-2, 102))
    axis.set_xticks(range(1, 1 + most))
    axis.legend(fontsize=7)
    return figure


def needle_map(places: list[Row]) -> Figure:
    """Score by the context's length (across) and the needle's depth (down)."""
    axis, figure = one_axis()
    lengths, depths, grid = needle_grid(places)
    image = axis.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axis.set(
        title=f"{places[0]['policy']}, {places[0]['tier']} kept",
        xlabel="length, tokens",
        ylabel="depth of the needle, %",
        xticks=range(len(lengths)),
        yticks=range(len(depths)),
        xticklabels=[str(length) for length in lengths],
        yticklabels=[f"{100 * depth:g}" for depth in depths],
    )
    figure.colorbar(image, ax=axis, label="score")
    return figure


def needle_grid(places: list[Row]) -> tuple[list[int], list[float], list[list[float]]]:
    """Return lengths, depths, and scores [depth][length]; NaN where nothing was asked."""
    scores = {(place["depth"], place["length"]): place["score"] for place in places}
    depths, lengths = (sorted({key[i] for key in scores}) for i in (0, 1))
    grid = [[scores.get((depth, n), float("nan")) for n in lengths] for depth in depths]
    return lengths, depths, grid


def _title(row: Row) -> str:
    return row["task"] if row["length"] is None else f"{row['task']}, {row['length']} tokens"


def _split(rows: Iterable[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Yield the rows that agree in some of their fields, in order of appearance."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from found.items()

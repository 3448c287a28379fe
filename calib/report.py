"""The calibration report for people."""

from typing import Any


def render(report: dict[str, Any]):
    """Tables of a report: what each depth can do, and what was chosen.

    Args:
        report: as in `Calibration.report`.

    Returns:
        A rich renderable.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    depths = Table(title=f"Exit points of {report['num_layers']} layers ({report['label']} labels)")
    for name in ("layers run", "plain head", "projected", "kept", "label rate", "router loss", "threshold"):
        depths.add_column(name, justify="right")
    for row in report["depths"]:
        threshold = report["chosen"].get(str(row["depth"]))
        depths.add_row(
            str(row["depth"]),
            f"{row['plain_agreement']:.1%}",
            f"{row['projected_agreement']:.1%}",
            "yes" if row["projection_kept"] else "no",
            f"{row['label_rate']:.1%}" + (" degenerate: never fires" if row["degenerate"] else ""),
            f"{row['router_loss']:.3f}",
            "-" if threshold is None else f"{threshold:.3f}",
        )
    curves = Table(title="Coverage / precision when only this exit point is used, held-out documents")
    grid = [point["threshold"] for point in report["depths"][0]["curve"]]
    shown = [index for index, value in enumerate(grid) if value in (0.3, 0.5, 0.7, 0.85, 0.95)]
    curves.add_column("layers run", justify="right")
    for index in shown:
        curves.add_column(f"> {grid[index]}", justify="right")
    for row in report["depths"]:
        cells = []
        for index in shown:
            point = row["curve"][index]
            right = "-" if point["precision"] is None else f"{point['precision']:.0%}"
            cells.append(f"{point['coverage']:.1%} / {right}")
        curves.add_row(str(row["depth"]), *cells)
    tokens = report["tokens"]
    lines = [
        f"{report['texts']} texts, {report['documents']} documents; tokens: {tokens['projections']} for projections, "
        f"{tokens['routers']} for routers, {tokens['thresholds']} for thresholds.",
    ]
    if report["chosen"]:
        last = report["checked"]
        lines.append(
            f"Chosen for agreement {report['agreement']:.0%}: {report['saved_layers']:.2f} of {report['num_layers']} "
            f"layers saved per token on recorded states ({report['recorded_agreement']:.1%} agreement); the running "
            f"engine, with its own K/V, agrees on {last['agreement']:.1%} of {last['positions']} positions and runs "
            f"{last['mean_depth']:.2f} layers."
        )
    else:
        lines.append(f"No exit fires: {report['reason']}. The curve above shows why.")
    return Group(depths, curves, Text("\n".join(lines)))

"""What every report says about its circumstances, and how it is laid out."""

import datetime
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from dspark_jax.io.files import atomic_file


def environment() -> dict[str, Any]:
    """Device, versions and date."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": f"{device.platform}, {platform.machine()}",
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")}
        | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def number(value: float) -> float | None:
    """A number for JSON: null where it is not defined."""
    return float(value) if math.isfinite(value) else None


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table: a dash where it is not defined."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows, the first of them the heading, in aligned columns: the first to the left, others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]

    def line(row: Sequence[str]) -> str:
        first, *others = row
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        return "  ".join([first.ljust(widths[0]), *right]).rstrip()

    heading, *body = map(line, cells)
    return "\n".join([heading, "  ".join("-" * width for width in widths), *body])


def save_figure(path: Path, figure: Figure) -> None:
    """Writes a PNG, whole or not at all."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)

"""A report as one HTML page that loads nothing: `report.html.jinja` with its plots as SVG."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from hfgpt.comparing.highlights import date
from hfgpt.comparing.plots import Plot, short
from hfgpt.comparing.report import Report

TEMPLATE = "report.html.jinja"  # beside this file; it includes report.css
_NOT_IN_HTML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_ACROSS_SEVERAL = ("loss_time", "loss_flops")  # plots that add nothing to another one for a single run
_READINGS = 48  # strips of a plot that show their values on hover
_READING_WIDTH = 100 / _READINGS
_SIZE = 1000  # side of the square in which curves are drawn; it is stretched to fit the screen


def as_page(report: Report) -> str:
    """Return the whole report as HTML that is also well-formed XML."""
    several = len(report.names) > 1
    plots = [plot for plot in report.plots if several or plot.name not in _ACROSS_SEVERAL]
    tables = [table for table in report.all_tables if table.rows]
    return _template().render(
        report=report,
        several=several,
        reading_width=_READING_WIDTH,
        plots=[(plot, list(_readings(plot))) for plot in plots],
        main_tables=[table for table in tables if not all(row.is_detail for row in table.rows)],
        folded_tables=[table for table in tables if all(row.is_detail for row in table.rows)],
        written=date(time.time()),
    )


@cache
def _template() -> jinja2.Template:
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {"path": _path, "percent": _percent, "short": short}
    return environment.get_template(TEMPLATE)


def _printable(value: Any) -> Any:
    """Replace characters that HTML cannot contain: control characters and lone surrogates."""
    return _NOT_IN_HTML.sub("\ufffd", value) if type(value) is str else value


def _percent(value: float, limits: tuple[float, float], falls: bool = False) -> str:
    """Return a position between two limits as an SVG percentage; falls: measured from the top, as for y."""
    part = (value - limits[0]) / (limits[1] - limits[0])
    return f"{100 * (1 - part if falls else part):.2f}%"


def _path(curve: pd.Series, plot: Plot) -> str:
    """Return a curve as SVG path data; values far outside of the plot are clipped."""
    x = _SIZE * (curve.index.to_numpy() - plot.x[0]) / (plot.x[1] - plot.x[0])
    y = _SIZE * (plot.y[1] - curve.to_numpy()) / (plot.y[1] - plot.y[0])
    points = np.stack([x, y.clip(-_SIZE, 2 * _SIZE)], axis=1).round(1)
    return "M" + " ".join(f"{across:g},{down:g}" for across, down in points.tolist())


def _readings(plot: Plot) -> Iterable[tuple[float, str]]:
    """Yield strips of a plot: where each starts, in percent of the width, and the values of the curves there."""
    drawn = [curve for curve in plot.curves if len(curve.trend)]
    for part in (np.arange(_READINGS) + 0.5) / _READINGS:
        at = plot.x[0] + part * (plot.x[1] - plot.x[0])
        there = [curve for curve in drawn if curve.trend.index[0] <= at <= curve.trend.index[-1]]
        if not there:
            continue
        places = there[0].trend.index.to_numpy()
        at = float(places[np.abs(places - at).argmin()])  # at a record, not between two
        lines = [plot.describe_place(at)]
        for curve in there:
            value = plot.describe_value(float(np.interp(at, curve.trend.index, curve.trend)))
            lines.append(f"{curve.name}: {value}" if len(plot.curves) > 1 else value)
        yield 100 * part - _READING_WIDTH / 2, "\n".join(lines)

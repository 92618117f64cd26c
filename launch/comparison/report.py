"""The report of a comparison: `report.html`, a single file that works offline and has no script, `report.json` and `loss.png`.

`launch/compare.py` writes them. Names of runs, and the keys and values in their files, are untrusted text, which the template escapes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import jinja2
from markupsafe import Markup
from PIL import Image

from data_pipeline.staging import write_atomically
from launch.comparison import tables
from launch.comparison.comparison import Comparison
from launch.comparison.pictures import draw_forest, draw_losses
from launch.errors import printable_line

HERE = Path(__file__).resolve().parent


def write_report(comparison: Comparison, out: Path) -> Path:
    """Write `report.html`, `report.json` and `loss.png` into the folder `out`, and return the page."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "report.json", json.dumps(comparison.as_json(), indent=1, allow_nan=False) + "\n")
    draw_losses(comparison, out / "loss.png")
    (page := out / "report.html").write_text(
        html(comparison), encoding="utf-8", errors="backslashreplace"
    )  # a file's name may not be UTF-8
    return page


def summary(comparison: Comparison) -> list[str]:
    """The lines that `launch/compare.py` prints."""
    return [
        *(f"not a controlled comparison: {mismatch}" for mismatch in comparison.mismatches),
        *tables.caveats(comparison),
        *(f"{pair.treatment.name}: {verdict}" for pair in comparison.pairs for verdict in tables.verdicts(pair)),
        *(tables.ranking(comparison).text().splitlines() if comparison.sides else ()),
        tables.answer(comparison),
    ]


def html(comparison: Comparison) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    rows = [(pair.testbed.name if pair.testbed else "", printable_line(pair.name)[:60], pair) for pair in comparison.pairs]
    rows.sort(key=lambda row: row[0])
    return environment.get_template("report.html").render(
        comparison=comparison,
        tables=tables,
        answer=tables.answer(comparison),
        ranking=tables.ranking(comparison),
        setting=tables.setting(comparison),
        caveats=tables.caveats(comparison),
        runs=tables.runs(comparison),
        forest=_image(lambda file: draw_forest(rows, file)) if rows else "",
        draw=lambda pair, axis: _image(lambda file: draw_losses(Comparison(comparison.sides, (pair,) if pair else ()), file, axis)),
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
    )


def _image(draw: Callable[[BinaryIO], object]) -> str:
    """The picture that `draw` writes, in base64; as WebP, which is a third of its PNG."""
    draw(png := io.BytesIO())
    Image.open(png).save(webp := io.BytesIO(), "WEBP", quality=60)
    return base64.b64encode(webp.getvalue()).decode()

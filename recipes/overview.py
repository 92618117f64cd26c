"""The picture above the index of recipes: what each one did to the loss, the step's time, memory and bytes, against its control.

make recipes_table                   # python -m recipes.pages --write

Drawn from `results.json` and the verdicts that stand; the picture carries their digest, and a test holds that they belong together.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from recipes.claims import CLAIMS, WITHDRAWN

#: Panels: (name of the figure, its title, difference or ratio, the claims about it).
PANELS = (
    ("final_val_loss", "final validation loss", "difference", ("loss_within", "loss_lower_by")),
    ("step_seconds", "time of a step", "ratio", ("step_time_ratio",)),
    ("peak_memory_bytes", "peak memory of a rank", "ratio", ("peak_memory_ratio",)),
    ("bytes_per_step", "sent by a rank in a step", "ratio", ("bytes_ratio",)),
)
#: By verdict, and of what is not claimed: Okabe and Ito's hues, told apart with the common colour blindnesses, and by their marks.
LOOKS = {
    "holds": ("#007a5e", "o", "a claim holds"),
    "fails": ("#c8500a", "X", "a claim fails"),
    "inconclusive": ("#0b62b0", "D", "a claim is inconclusive"),
    WITHDRAWN: ("#8a9199", "x", "verdict withdrawn: unstable control"),
    None: ("#8a9199", "o", "not claimed"),
}
NUMBER: dict[str, Any] = {"color": "#3d4349", "marker": "|", "markersize": 11, "markeredgewidth": 2}
KEYWORD = "Source"  # of a PNG's text, by its specification


def digest(results: dict[str, dict[str, Any]]) -> str:
    """What the picture says that it was drawn from."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def drawn_from(picture: Path) -> str:
    """The digest that a picture carries. Raises OSError where there is none, KeyError where it carries none."""
    from PIL import Image

    with Image.open(picture) as image:
        return str(image.info[KEYWORD])


def draw_overview(results: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draw every recipe that was measured: a row each, its mean over seeds and 95% interval, and a bar at each claim's number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    measured = [name for name in sorted(results) if "absent" not in results[name]]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}):
        figure, panels = pyplot.subplots(
            1, len(PANELS), figsize=(12, 1.9 + 0.27 * len(measured)), dpi=120, sharey=True, layout="constrained"
        )
        for axes, (quantity, title, scale, kinds) in zip(panels, PANELS, strict=True):
            axes.set_title(f"{title}\nrecipe {'−' if scale == 'difference' else '/'} control", fontsize=10)
            axes.axvline(0 if scale == "difference" else 1, color="#3d4349", linewidth=0.8)
            for row, name in enumerate(measured):
                _draw_row(axes, row, results[name], quantity, scale, kinds)
            axes.grid(alpha=0.25)
            axes.tick_params(axis="y", length=0)
            if scale == "ratio":
                axes.set_xlim(left=0)
        panels[0].set_yticks(range(len(measured)), measured)
        panels[0].set_ylim(len(measured) - 0.5, -0.5)
        handles = [Line2D([], [], color=color, marker=mark, linestyle="none", label=label) for color, mark, label in LOOKS.values()]
        handles.append(Line2D([], [], **NUMBER, linestyle="none", label="the claim's number"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
        figure.savefig(picture, metadata={KEYWORD: digest(results)})
        pyplot.close(figure)


def _draw_row(axes: Any, row: int, found: dict[str, Any], quantity: str, scale: str, kinds: tuple[str, ...]) -> None:
    compared = found["figures"].get(quantity, {}).get(scale)
    if compared is None or compared[0] is None:
        return
    mean, low, high = compared
    claim = next((one for one in found["claims"] if one["claim"] in kinds), None)
    color, mark, _ = LOOKS[claim["outcome"] if claim else None]
    if low is not None:
        axes.plot([low, high], [row, row], color=color, linewidth=1.6)
    axes.plot(mean, row, marker=mark, color=color, markersize=6)
    if claim is not None:
        number = CLAIMS[claim["claim"]].bound(claim["threshold"])
        axes.plot(number, row, **NUMBER)

"""The pages that are written from the recipe folders and from `results.json`, what `launch/compare.py --publish` measured last.

make recipes_table                   # python -m recipes.pages --write

The index in recipes/README.md, the README's own table of recipes, and in each recipe's page the part below `BEGIN`. A test holds that the
pages are what this writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from recipes.claims import CLAIMS, NOTICE, WITHDRAWN, notice
from recipes.registry import ROOT, Recipe, read_recipe, recipe_names, technique_classes

INDEX = ROOT / "recipes" / "README.md"
README = ROOT / "README.md"
RESULTS = ROOT / "recipes" / "results.json"

BEGIN = "<!-- what launch/compare.py measured, written by `make recipes_table`: -->\n"
END = "<!-- the rest is written by hand -->\n"
#: The part of a recipe's page that follows what was measured.
NEXT_PART = "**When it does not help.**"
#: For a recipe or a claim for which `launch/compare.py --publish` has published nothing.
UNMEASURED = "not measured yet"
SIGNS = {"holds": "✓", "fails": "✗", "inconclusive": "?", WITHDRAWN: "–"}
#: Rows of a page's table of figures: (name of the figure, how it is called, divided by, format, compared as).
FIGURES = (
    ("final_val_loss", "final validation loss", 1, ".4f", "difference"),
    ("step_seconds", "step time, ms (median)", 1e-3, ",.1f", "ratio"),
    ("tokens_per_second", "tokens per second (median)", 1, ",.0f", "ratio"),
    ("seconds_to_reach", "seconds to the control's final loss", 1, ",.1f", "ratio"),
    ("tokens_to_reach", "tokens to the control's final loss", 1, ",.0f", "ratio"),
    ("peak_memory_bytes", "peak memory per rank, MB", 1e6, ",.0f", "ratio"),
    ("bytes_per_step", "sent per rank and step, MB", 1e6, ",.2f", "ratio"),
    ("skipped_steps", "updates skipped for overflow", 1, ",.1f", "difference"),
    ("spikes", "steps with a spike of the loss", 1, ",.1f", "difference"),
)


def read_results() -> dict[str, dict[str, Any]]:
    """The measurements of each recipe, by name, or why there are none: `{"absent": reason}`."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def index_table(results: dict[str, dict[str, Any]]) -> str:
    """The index of all recipes as a Markdown table."""
    rows = ["| recipe | what it does | DeepSpeed JSON | control | claims, and what was found | needs |", "|---|---|---|---|---|---|"]
    for name in recipe_names():
        recipe = read_recipe(ROOT / "recipes" / name)
        claims = "; ".join(_claim(key, value, results.get(name, {})) for key, value in recipe.claims.items())
        rows.append(
            f"| [{name}]({name}/README.md) | {recipe.title} | `{recipe.config}` | `{recipe.control}` | {claims} | {recipe.needs or '-'} |"
        )
    return "\n".join(rows) + "\n"


def _claim(name: str, x: float, found: dict[str, Any]) -> str:
    """One claim with its verdict, for the index."""
    if (verdict := _verdict(name, x, found)) is None:
        return f"`{name}` {x:g}: {UNMEASURED}"
    measured = "" if verdict["estimate"] is None else f" ({_estimate(name, verdict['estimate'])})"
    return f"`{name}` {x:g}: {SIGNS[verdict['outcome']]} {verdict['outcome']}{measured}{_would_tell(verdict)}"


def _verdict(name: str, x: float, found: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict on a claim; None if there is none for this number."""
    return next((one for one in found.get("claims", ()) if (one["claim"], one["threshold"]) == (name, x)), None)


def _would_tell(verdict: dict[str, Any]) -> str:
    """The number of seeds that would decide an inconclusive claim."""
    if verdict["outcome"] != "inconclusive" or verdict["p_holds"] is None:  # None: nothing could be tested
        return ""
    seeds = verdict["seeds_needed"]
    return f"; about {seeds:,} seeds would decide" if seeds else "; more than 1,000 seeds would decide"


def _estimate(claim: str, value: float) -> str:
    """A mean difference, with its sign, or a mean ratio."""
    return f"{value:+.4f}" if CLAIMS[claim].scale == "difference" else f"{value:.3f}"


def measured_part(recipe: Recipe, found: dict[str, Any] | None) -> str:
    """The part of a recipe's page between `BEGIN` and `END`: the last comparison."""
    if found is None:
        return f"{BEGIN}\n**Compared.** {UNMEASURED.capitalize()}.\n\n{END}"
    if "absent" in found:
        return f"{BEGIN}\n**Compared.** Not possible on {found['machine']}: {_escaped(found['absent'])}.\n\n{END}"
    seeds, control = found["seeds"], Path(recipe.control).stem
    turns = "interleaved ten steps at a time" if found["in_turns"] else "partly at different times"
    lines = [
        f"**Compared.** Control and recipe with the same {len(seeds)} seeds, {turns}, on {found['ranks']} rank(s) of {found['machine']},",
        f"{found['tokens']:,} tokens per run, commit {found['commit']}:",
        "",
        f"    {found['command']}",
        "",
        "| claim | verdict | measured (95% interval) |",
        "|---|---|---|",
    ]
    for one in found["claims"]:
        kind = CLAIMS[one["claim"]]
        interval = "" if one["interval"] is None else " ({} to {})".format(*(_estimate(one["claim"], bound) for bound in one["interval"]))
        measured = "-" if one["estimate"] is None else _estimate(one["claim"], one["estimate"]) + interval
        outcome = f"{SIGNS[one['outcome']]} **{one['outcome']}**{_would_tell(one)}"
        lines.append(f"| {kind.says(one['threshold'])} | {outcome} | {measured} |")
    lines += ["", f"| mean of the seeds | {control} | {recipe.name} | recipe against control (95% interval) |", "|---|---|---|---|"]
    for name, title, unit, form, scale in FIGURES:
        figure = found["figures"].get(name)
        if figure is None or (name in ("skipped_steps", "spikes") and not figure["control"] and not figure["other"]):
            continue
        sides = ("not reached" if figure[side] is None else format(figure[side] / unit, form) for side in ("control", "other"))
        lines.append(f"| {title} | {' | '.join(sides)} | {_against(figure.get(scale), scale, unit, form)} |")
    loss = found["figures"].get("final_val_loss")
    ends = f": {loss['control']:.3f} and {loss['other']:.3f} at the end" if loss and None not in (loss["control"], loss["other"]) else ""
    lines += ["", f"![Validation loss of {control} and {recipe.name} over tokens, {len(seeds)} seeds each{ends}](loss.png)", ""]
    return BEGIN + "\n" + notice([found]) + "\n".join(lines) + "\n" + END


def _against(compared: list[float | None] | None, scale: str, unit: float, form: str) -> str:
    """The mean difference or ratio of the pairs and its interval: `[mean, low, high]`."""
    if compared is None or compared[0] is None:
        return "-"
    shown = [None if value is None else f"{value / unit:+{form}}" if scale == "difference" else f"{value:.3f}" for value in compared]
    times = "" if scale == "difference" else "x "
    return f"{times}{shown[0]}" + (f" ({shown[1]} to {shown[2]})" if shown[1] is not None else "")


def _escaped(text: str) -> str:
    return re.sub(r"([<>|*_`\[\]])", r"\\\1", text)


def with_measured_part(page: str, part: str) -> str:
    """A recipe's page with its generated part replaced by `part`; without one, `part` is inserted before NEXT_PART."""
    if BEGIN in page and END in page:
        before, _, rest = page.partition(BEGIN)
        return before + part + rest.partition(END)[2]
    before, next_part, rest = page.partition(NEXT_PART)
    assert next_part, f"the page has no part {NEXT_PART}"
    return f"{before}{part}\n{next_part}{rest}"


def excluded_pairs() -> str:
    """The pairs of recipes that cannot be combined, with what both control, as a Markdown table."""
    classes = {cls.__module__.split(".")[1]: cls.declaration for cls in technique_classes()}
    pairs = [(one, other, classes[one].shared_with(classes[other])) for one, other in combinations(classes, 2)]
    rows = [f"| {one} | {other} | {shared} |" for one, other, shared in pairs if shared]
    return "\n".join(["| recipe | recipe | both control |", "|---|---|---|", *rows]) + "\n"


def index_page(results: dict[str, dict[str, Any]]) -> str:
    """The whole of recipes/README.md, of which the tables are generated and the rest is constant."""
    claims = "\n".join(f"| `{name}` x | {kind.says('x')} |" for name, kind in CLAIMS.items())
    return (
        f"# Recipes\n\n{notice(results.values())}"
        "Each technique has one folder. The folder names the DeepSpeed JSON that switches the technique on, its control, the keys\n"
        "in which the two JSONs differ, and the claims. `make recipes_table` writes this page from the folders and from\n"
        "`results.json`, which holds the last measurements of `launch/compare.py --publish`. A test checks that the page is up\n"
        "to date.\n\n"
        + index_table(results)
        + "\n`deepspeed launch/pretrain.py --recipe recipes/<name>` runs a recipe. `python launch/compare.py --recipe\n"
        "recipes/<name>` compares it with its control over several seeds. A claim is about the mean over pairs of runs: control\n"
        "and recipe with the same flags and seed. It is tested with one-sided paired t-tests at 5%: ✓ **holds** if its opposite\n"
        "is rejected, ✗ **fails** if the claim itself is rejected, and ? **inconclusive** otherwise. The figures are from short\n"
        "runs of a small model, which any machine can repeat. If a claim is about longer runs or larger models, the recipe's\n"
        "page has measurements of those too.\n\n"
        "| claim | of a recipe against its control |\n|---|---|\n" + claims + "\n\n## Which can be combined\n\n"
        "Recipes that change only DeepSpeed's own sections can be combined with all others; combinations that DeepSpeed does not support\n"
        "are refused before a run starts. To combine two recipes, add a section to one, such as `--recipe recipes/progressive_layer_drop\n"
        "--set curriculum_learning.enabled=true`, or write a JSON with both sections. Recipes with code of their own can be combined too,\n"
        "except for these pairs:\n\n" + excluded_pairs()
    )


def short_table(results: dict[str, dict[str, Any]]) -> str:
    """The recipes for the project's README: what each does, and the claims that have a verdict."""
    rows = ["| recipe | what it does | claims |", "|---|---|---|"]
    for name in recipe_names():
        recipe = read_recipe(ROOT / "recipes" / name)
        verdicts = {key: found for key, value in recipe.claims.items() if (found := _verdict(key, value, results.get(name, {})))}
        claims = ", ".join(f"`{key}` {SIGNS[found['outcome']]}" for key, found in verdicts.items() if found["outcome"] != WITHDRAWN)
        rows.append(f"| [{name}](recipes/{name}/README.md) | {recipe.title} | {claims} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str, results: dict[str, dict[str, Any]]) -> str:
    """The text of the project's README with its table of recipes, and the notice above it, written anew; unchanged without a table."""
    table = notice(results.values()) + short_table(results)
    return re.sub(rf"^({re.escape(NOTICE)})?\| recipe \|.*\n(\|.*\n)*", lambda _: table, readme, count=1, flags=re.MULTILINE)


def pages() -> dict[Path, str]:
    """The text of every page that is generated from the folders and the results."""
    results = read_results()
    made = {INDEX: index_page(results), README: with_table(README.read_text(encoding="utf-8"), results)}
    for name in recipe_names():
        page = ROOT / "recipes" / name / "README.md"
        part = measured_part(read_recipe(page.parent), results.get(name))
        made[page] = with_measured_part(page.read_text(encoding="utf-8"), part)
    return made


def write_pages(write: Callable[[Path, str], object]) -> None:
    """Write every page by `write`."""
    for page, text in pages().items():
        write(page, text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_pages(lambda page, text: page.write_text(text, encoding="utf-8"))
    else:
        print(index_table(read_results()), end="")

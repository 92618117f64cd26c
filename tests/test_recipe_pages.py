"""What is written into the pages from the recipe folders and from recipes/results.json is what stands there."""

from __future__ import annotations

import copy

import pytest

from recipes import pages
from recipes.claims import NOTICE
from recipes.registry import ROOT, Recipe, read_recipe, recipe_names
from tests.helpers import ROOT as CHECKOUT


def test_every_page_is_what_the_folders_and_the_results_say():
    for page, text in pages.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.relative_to(CHECKOUT)}: run `make recipes_table`"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_was_compared_or_says_why_not(name):
    """Of each claim as it stands now; the picture is there; nothing was measured with changes that no commit holds."""
    found = pages.read_results().get(name)
    if found is None:
        (row,) = (line for line in pages.INDEX.read_text(encoding="utf-8").splitlines() if line.startswith(f"| [{name}]("))
        assert pages.UNMEASURED in row
        assert pages.UNMEASURED.capitalize() in (ROOT / "recipes" / name / "README.md").read_text(encoding="utf-8")
        return
    if "absent" in found:
        assert found["absent"] and found["machine"]
        return
    recipe = read_recipe(ROOT / "recipes" / name)
    assert {one["claim"]: one["threshold"] for one in found["claims"]} == recipe.claims
    assert len(found["seeds"]) >= 5
    assert "+" not in found["commit"]
    assert (ROOT / "recipes" / name / "loss.png").stat().st_size > 10_000


RECIPE = Recipe("x", "t", "ds_configs/zero2_bf16.json", "ds_configs/zero1_bf16.json", [], {"loss_within": 0.02, "bytes_ratio": 0.5})
FOUND = {
    "command": "python launch/compare.py --recipe recipes/x --seeds 5",
    "commit": "abc1234",
    "machine": "AMD EPYC, 2 cores",
    "in_turns": True,
    "ranks": 2,
    "tokens": 204800,
    "seeds": [1, 2, 3, 4, 5],
    "figures": {
        "final_val_loss": {"control": 5.5, "other": 5.51, "difference": [0.01, -0.005, 0.025], "ratio": None},
        "step_seconds": {"control": 0.2, "other": 0.1, "difference": [-0.1, -0.1, -0.1], "ratio": [0.5, 0.49, 0.51]},
        "seconds_to_reach": {"control": 20.0, "other": None, "difference": None, "ratio": None},
        "spikes": {"control": 0.0, "other": 0.0, "difference": [0.0, 0.0, 0.0], "ratio": None},
    },
    "claims": [
        {
            "claim": "loss_within",
            "threshold": 0.02,
            "outcome": "inconclusive",
            "estimate": 0.01,
            "interval": [-0.005, 0.025],
            "p_holds": 0.2,
            "seeds_needed": 12,
        },
        {"claim": "bytes_ratio", "threshold": 0.5, "outcome": "holds", "estimate": 0.25, "interval": None},
    ],
}


def test_a_recipes_page_says_what_was_found():
    part = pages.measured_part(RECIPE, FOUND)
    for line in (
        "    python launch/compare.py --recipe recipes/x --seeds 5",
        "| the final validation loss is at most 0.02 above the control's | ? **inconclusive**; about 12 seeds would decide "
        "| +0.0100 (-0.0050 to +0.0250) |",
        "| a rank sends at most 0.5 of the control's bytes over the run | ✓ **holds** | 0.250 |",
        "| final validation loss | 5.5000 | 5.5100 | +0.0100 (-0.0050 to +0.0250) |",
        "| step time, ms (median) | 200.0 | 100.0 | x 0.500 (0.490 to 0.510) |",
        "| seconds to the control's final loss | 20.0 | not reached | - |",
        "![Validation loss of zero1_bf16 and x over tokens, 5 seeds each: 5.500 and 5.510 at the end](loss.png)",
    ):
        assert line in part.splitlines()
    assert "spike" not in part, "nothing happened"
    assert "with the same 5 seeds, interleaved ten steps at a time, on 2 rank(s) of AMD EPYC, 2 cores," in part
    assert "partly at different times" in pages.measured_part(RECIPE, {**FOUND, "in_turns": False})
    changed = copy.deepcopy(FOUND)
    changed["figures"]["final_val_loss"]["control"] += 0.001
    assert pages.measured_part(RECIPE, changed) != part
    absent = pages.measured_part(RECIPE, {"absent": "needs 'a|b' <c>", "machine": "AMD EPYC, 2 cores"})
    assert "Not possible on AMD EPYC, 2 cores: needs 'a\\|b' \\<c\\>." in absent


def test_the_index_has_the_verdict_of_each_claim_as_it_stands():
    table = pages.index_table({"zero_2": {**FOUND, "claims": [{**FOUND["claims"][0], "threshold": 0.005}]}})
    assert "`loss_within` 0.005: ? inconclusive (+0.0100); about 12 seeds would decide" in table
    beyond = {**FOUND["claims"][0], "threshold": 0.005, "seeds_needed": None}
    assert "(+0.0100); more than 1,000 seeds would decide" in pages.index_table({"zero_2": {**FOUND, "claims": [beyond]}})
    assert "inconclusive (+0.0100) |" in pages.index_table({"zero_2": {**FOUND, "claims": [beyond | {"p_holds": None}]}})
    assert "`loss_within` 0.005: not measured" in pages.index_table({"zero_2": FOUND}), "a verdict on another number is none"
    readme = pages.with_table("a\n\n| recipe | b |\n|---|---|\n| c | d |\n\ne\n", {"zero_2": {**FOUND, "claims": [beyond]}})
    assert readme.startswith("a\n\n| recipe | what it does | claims |\n") and readme.endswith(" |\n\ne\n")
    assert "| [zero_2](recipes/zero_2/README.md) |" in readme and "partitioned over the ranks | `loss_within` ? |" in readme
    assert "| `loss_within` - |" not in readme, "what was not measured has no verdict"


WITHDRAWN = {**FOUND, "claims": [{**FOUND["claims"][0], "outcome": "withdrawn"}, FOUND["claims"][1]]}


def test_a_withdrawn_verdict_gets_a_notice_and_the_others_stand():
    part = pages.measured_part(RECIPE, WITHDRAWN)
    assert "| – **withdrawn** | +0.0100 (-0.0050 to +0.0250) |" in part and NOTICE in part
    assert part.count("✓") == 1 and "✓ **holds** | 0.250 |" in part
    assert NOTICE not in pages.measured_part(RECIPE, FOUND)
    page = "# T\n\n| recipe | a |\n|---|---|\n"
    once = pages.with_table(page, {"zero_2": WITHDRAWN})
    assert once.startswith(f"# T\n\n{NOTICE}| recipe |") and pages.with_table(once, {"zero_2": WITHDRAWN}) == once
    assert NOTICE not in pages.with_table(once, {"zero_2": FOUND})


def test_a_part_is_written_in_its_place_once():
    page = "# T\n\n**Measured.** By hand.\n\n**When it does not help.** Never.\n"
    once = pages.with_measured_part(page, f"{pages.BEGIN}a\n{pages.END}")
    twice = pages.with_measured_part(once, f"{pages.BEGIN}b\n{pages.END}")
    assert once == f"# T\n\n**Measured.** By hand.\n\n{pages.BEGIN}a\n{pages.END}\n**When it does not help.** Never.\n"
    assert twice == once.replace("a\n<", "b\n<")

"""What is written into the pages from the recipe folders and from recipes/results.json is what stands there."""

from __future__ import annotations

import pytest

from recipes import pages
from recipes.registry import ROOT, read_recipe, recipe_names
from tests.helpers import ROOT as CHECKOUT


def test_every_page_is_what_the_folders_and_the_results_say():
    for page, text in pages.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.relative_to(CHECKOUT)}: run `make recipes_table`"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_was_compared_or_says_what_it_needs(name):
    """Of each claim as it stands now; the picture is there; nothing was measured with changes that no commit holds."""
    found = pages.read_results()[name]
    if "absent" in found:
        assert found["absent"] and found["machine"]
        return
    recipe = read_recipe(ROOT / "recipes" / name)
    assert {one["claim"]: one["threshold"] for one in found["claims"]} == recipe.claims
    assert len(found["seeds"]) >= 3
    assert "+" not in found["commit"]
    assert (ROOT / "recipes" / name / "loss.png").stat().st_size > 10_000


def test_a_changed_figure_or_a_renamed_recipe_is_noticed():
    results = pages.read_results()
    name = next(name for name, found in results.items() if "absent" not in found)
    recipe = read_recipe(ROOT / "recipes" / name)
    before = pages.measured_part(recipe, results[name])
    results[name]["figures"]["final_val_loss"]["control"] += 0.001
    assert pages.measured_part(recipe, results[name]) != before
    assert pages.index_table({}) != pages.index_table(results)


def test_a_part_is_written_in_its_place_once():
    page = "# T\n\n**Measured.** By hand.\n\n**When it does not help.** Never.\n"
    once = pages.with_measured_part(page, f"{pages.BEGIN}a\n{pages.END}")
    twice = pages.with_measured_part(once, f"{pages.BEGIN}b\n{pages.END}")
    assert once == f"# T\n\n**Measured.** By hand.\n\n{pages.BEGIN}a\n{pages.END}\n**When it does not help.** Never.\n"
    assert twice == once.replace("a\n<", "b\n<")

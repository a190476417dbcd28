"""What the pages show is what the program gives."""

import re
from pathlib import Path

from bytescale.cost import preset_cost
from bytescale.plan import plan_from_text
from bytescale.plan.validate import validate
from bytescale.planner import make_plan, make_problem

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_files_that_the_pages_name_exist() -> None:
    package = ROOT / "src" / "bytescale"
    for page in (*DOCS.glob("*.md"), ROOT / "README.md"):
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", page.read_text()):
            assert (package / name).is_file() or (ROOT / name).is_file(), f"{page.name} names {name}"


def test_the_picture_of_the_idea_shows_real_plans() -> None:
    text = (DOCS / "concepts.md").read_text()
    static, balance, best = re.findall(r"```\n(.*?)```", text, flags=re.DOTALL)[:3]
    head = "".join(static.splitlines(keepends=True)[:2])
    lengths = plan_from_text(static).lengths
    problem = make_problem(lengths, hdp_size=6, tokens_per_rank=8192, cost=preset_cost(), offload="off")
    for strategy, shown in (("static", static), ("hdp-balance", head + balance), ("best", head + best)):
        plan = plan_from_text(shown)
        validate(plan)
        assert plan.pieces == make_plan(problem, strategy).pieces
        predicted = make_plan(problem, strategy).predicted
        assert predicted is not None
        assert f"{predicted.step_time_s:.2f} s" in text


def test_every_figure_of_the_readme_says_what_kind_it_is() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    kinds = ("measured", "predicted", "simulated", "fitted")
    results = text.split("| what | figure | kind |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(results) > 8
    for row in results:
        assert row.split("|")[3].strip().startswith(kinds), row
    others = [part for part in text.split("\n\n") if "| what | figure | kind |" not in part]
    unsaid = [
        part for part in others if re.search(r"\d ?%|\d(\.\d+)?x\b", part) and not re.search("|".join(kinds), part)
    ]
    assert unsaid == []

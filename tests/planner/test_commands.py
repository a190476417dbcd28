"""The commands plan, lengths and compare, as a person calls them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from bytescale.cli import main
from bytescale.cli.compare import compare
from bytescale.cli.lengths import lengths
from bytescale.cli.plan import plan
from bytescale.cli.planning import TABLE_WIDTH
from bytescale.errors import UserError
from bytescale.plan.file import read_plan
from bytescale.plan.validate import validate
from bytescale.planner import STRATEGIES
from bytescale.report.plan_table import comparison_table
from bytescale.report.simulation import simulation_table

BATCH = ("--lengths", "wikipedia", "--batch-tokens", "256K", "--ranks", "8", "--seed", "1")


def run(command: Any, *arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def refused(command: Any, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        run(command, *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_json_is_one_value_with_prediction_and_table() -> None:
    value = json.loads(run(plan, *BATCH, "--json"))
    assert {"step_time_s", "lower_bound_s", "rank_time_s", "imbalance", "planning_time_s"} <= value.keys()
    assert value["gap"] >= 1 - 1e-9
    assert value["tokens"] == 256 * 1024
    assert value["cost_source"] == "preset"
    assert sum(value["cp_degree"].values()) == value["sequences"]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_writes_a_plan_that_checks(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run(plan, *BATCH, "--strategy", strategy, "--out", str(path))
    validate(read_plan(path))
    assert "valid" in run(plan, "--check", str(path))
    assert json.loads(run(plan, "--check", str(path), "--json"))["valid"] is True


def test_the_cap_on_equation_3_is_an_option() -> None:
    asked = (
        "--lengths",
        "lognormal:mean=400000,sigma=0.01,max=450000",
        "--batch-sequences",
        "1",
        "--ranks",
        "64",
        "--json",
    )

    def degree(*more: str) -> int:
        return max(int(d) for d in json.loads(run(plan, *asked, "--strategy", "hdp-naive", *more))["cp_degree"])

    assert degree("--offload-cap", "inf") < degree() < degree("--offload", "off")
    assert degree("--offload-cap", "1.5") == degree()


def test_explain_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = run(plan, *BATCH, "--explain", "--plot", str(tmp_path / "plan.png"))
    assert "why" in text
    assert "bounds the step" in text
    run(plan, *BATCH[:-4], "--ranks", "100", "--pp-size", "2", "--plot", str(tmp_path / "wide.svg"))
    run(lengths, "github", "--plot", str(tmp_path / "lengths.png"), "--batch-sequences", "1000")
    assert all(p.stat().st_size > 1000 for p in tmp_path.iterdir())


def test_a_bound_of_whole_sequences_says_so(tmp_path: Path) -> None:
    """Chunks of one sequence are on several stages at a time, so they may end before it could run whole."""
    path = tmp_path / "lengths.txt"
    path.write_text("1000\n300000\n")
    options = ["--lengths", str(path), "--ranks", "40", "--pp-size", "4", "--strategy", "chunked", "--explain"]
    value = json.loads(run(plan, *options, "--json"))
    assert value["gap"] < 1
    text = " ".join(run(plan, *options).split())
    assert "set by sequence 1 (300000 tokens) run whole" in text
    assert "no plan without chunks is faster than" in text
    assert "most of it in sequences 1, 0 waiting" in text


def test_tables_fit_into_120_columns() -> None:
    figures = {
        "step_time_s": 354.0,
        "tokens_per_s": 94_800.0,
        "speedup": 10.0,
        "gap": 12.6034,
        "imbalance": 10.25,
        "idle_share": 0.4024,
        "degree_1_share": 0.881,
        "attention_bytes": 2.5e15,
        "planning_time_s": 0.713,
        "peak_memory_bytes": 1.02e12,
        "fits": False,
        "main_loss": "exposed communication",
        "error": "",
    }
    console = Console(width=300)
    compared = comparison_table([{"strategy": name, **figures} for name in STRATEGIES], "title")
    assert console.measure(compared).maximum <= TABLE_WIDTH
    names = ("compute", "tensor", "communication", "copy", "gang_wait", "pp_bubble", "dp_bubble", "overheads")
    step = {
        "sequences": 999_999,
        "tokens": 4.19e6,
        "simulated_step_time_s": 354.0,
        "tokens_per_s": 4.82e6,
        "mfu": 0.373,
    }
    rows = [
        {"strategy": name, **step, "shares": dict.fromkeys(names, 0.1), "peak_memory_bytes": 7.2e10}
        for name in STRATEGIES
    ]
    assert console.measure(simulation_table(rows, "title")).maximum <= TABLE_WIDTH


def test_a_file_is_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[300, 6000, 50000]")
    value = json.loads(run(plan, "--lengths", str(path), "--ranks", "8", "--json", "--explain"))
    assert value["sequences"] == 3
    assert [r["length"] for r in value["explain"]] == [50000, 6000, 300]


def test_compare_shows_every_strategy() -> None:
    rows = json.loads(run(compare, *BATCH, "--batches", "2", "--cluster", "paper", "--json"))
    names = [row["strategy"] for row in rows if row["strategy"] != "fcp-32k"]
    assert names == [name for name in STRATEGIES if not STRATEGIES[name].pipeline_only]
    steps = {row["strategy"]: row["step_time_s"] for row in rows if row["strategy"] in names and not row["error"]}
    assert steps["best"] <= min(steps.values()) * (1 + 1e-9)
    text = run(compare, *BATCH, "--strategies", "static,best")
    assert "static" in text
    assert "hdp-naive" not in text


def test_compare_shows_fcp_with_the_memory_of_its_source() -> None:
    rows = json.loads(run(compare, *BATCH, "--strategies", "fcp,fcp-32k", "--json"))
    assert rows[1]["note"] == "4 times the tokens a rank of the others"
    assert rows[1]["peak_memory_bytes"] > rows[0]["peak_memory_bytes"]


def test_compare_times_the_same_plans_with_head_exchange() -> None:
    names = ["--strategies", "static,flexsp,fcp"]
    ring = json.loads(run(compare, *BATCH, *names, "--json"))
    heads = json.loads(run(compare, *BATCH, *names, "--attention", "ulysses", "--json"))
    assert "no group that could exchange heads" in heads[2]["error"]
    for before, after in zip(ring[:2], heads[:2], strict=True):
        assert after["step_time_s"] == after["simulated_step_time_s"] != before["step_time_s"]
        assert after["attention_bytes"] == before["attention_bytes"]


def test_compare_says_why_a_strategy_has_no_row(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[70000, 100]")
    text = run(compare, "--lengths", str(path), "--ranks", "8", "--strategies", "static,best")
    assert "static: static needs 9 ranks" in text


@pytest.mark.parametrize("names", ["static", "static,best"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_compare_fails_when_every_strategy_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, form: list[str]
) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[70000, 100]")
    options = ["--lengths", str(path), "--ranks", "1", "--offload", "off", "--strategies", names, *form]
    assert main(["compare", *options]) == 2
    out, error = capsys.readouterr()
    assert error == "bytescale: no strategy asked for can plan these batches\n"
    assert out.count("needs 9 ranks") == len(names.split(","))
    if form:
        assert all(row["error"] for row in json.loads(out))


def test_lengths_figures(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1000\n3000\n")
    value = json.loads(run(lengths, str(path), "--above", "2000", "--json"))
    assert value["tokens"] == 4000
    assert value["above"][0] == {"length": 2000, "sequence_share": 0.5, "token_share": 0.75}
    assert "histogram" in run(lengths, "byted")


def test_rank_speeds(tmp_path: Path) -> None:
    path = tmp_path / "speed.txt"
    path.write_text("\n".join(["1.0"] * 4 + ["0.93"] * 4))
    options = (*BATCH, "--rank-speed", str(path), "--cost", "dense-flops", "--json")
    value = json.loads(run(plan, *options))
    unaware = json.loads(run(plan, *options, "--strategy", "flexible-cp"))
    assert value["gap"] < 1.01
    assert value["step_time_s"] < unaware["step_time_s"]


BAD = [
    ([], "--lengths is missing"),
    (["--lengths", "github", "--batch-tokens", "1M"], "--ranks is missing"),
    ([*BATCH, "--strategy", "bst"], "did you mean 'best'"),
    ([*BATCH, "--model", "llama-8b"], "unknown model"),
    ([*BATCH, "--cluster", "h10"], "unknown cluster"),
    ([*BATCH, "--cost", "dense"], "unknown --cost"),
    ([*BATCH, "--offload", "1.5"], "ratio in 0..1"),
    ([*BATCH, "--offload", "nan"], "ratio in 0..1"),
    ([*BATCH, "--ranks", "0"], "--ranks is 0"),
    ([*BATCH, "--ranks", "100000000000"], "up to"),
    ([*BATCH, "--tokens-per-rank", "9999999999999M"], "up to"),
    ([*BATCH, "--pp-size", "33"], "33"),
    ([*BATCH, "--tp-size", "3"], "tp_size is 3"),
    ([*BATCH, "--batch-sequences", "5"], "not both"),
    ([*BATCH, "--rank-speed", "/no/such"], "cannot read rank speeds"),
    ([*BATCH, "--out", "/proc/nowhere/plan.json"], "cannot write plan"),
    (["--check", "/no/such.json"], "cannot read plan"),
    (["--check", "/no/such.json", "--ranks", "8", "--explain"], "as it stands: leave out --ranks, --explain"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    assert words in refused(plan, *arguments)


@pytest.mark.parametrize("word", ["0", "-5", "x", "1.5", ""])
def test_token_counts_are_checked(word: str) -> None:
    result = CliRunner().invoke(plan, [*BATCH, "--tokens-per-rank", word])
    assert result.exit_code == 2


def test_broken_and_foreign_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("", "[]", '{"format": "other"}', "\x00"):
        path.write_text(text)
        assert "plan" in refused(plan, "--check", str(path))
    run(plan, *BATCH, "--out", str(path))
    value = json.loads(path.read_text())
    value["pieces"]["rank"][0] = 99
    path.write_text(json.dumps(value))
    assert "rank 99" in refused(plan, "--check", str(path))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "empty"),
        ([0, 100], "sequence 0 has length 0"),
        ([5, -1], "sequence 1 has length -1"),
        ([1.5], "sequence 0 has length 1.5"),
        ([1.0, float("nan")], "sequence 1 has length nan"),
        (["a"], "integers"),
        ([[1, 2], [3]], "flat list"),
        (np.ones((2, 2)), "flat list"),
        ([2**60], "no token count"),
    ],
)
def test_bad_lengths_by_the_api(values: Any, words: str) -> None:
    from bytescale.cost import preset_cost
    from bytescale.planner import plan as make

    with pytest.raises(UserError, match=words):
        make(values, hdp_size=2, tokens_per_rank=8, cost=preset_cost())


def test_plan_and_compare_say_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "github", "--batch-tokens", "1M", "--ranks", "64", "--model", "llama-70b"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "does not fit: the fullest GPU needs" in shown
    assert "raise --tp-size or --pp-size" in shown
    assert main(["compare", *words, "--strategies", "static,best"]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "1.00x" not in shown and "no fit" in shown
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(["plan", *words[:-2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_hosts_have_memory_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "lognormal:mean=65536,sigma=0.1,max=131072", "--batch-tokens", "4M", "--ranks", "64"]
    assert main(["plan", *words, "--strategy", "hdp-naive", "--offload", "1", "--tokens-per-rank", "8K"]) == 0
    assert "does not fit: offloading needs" in capsys.readouterr().out


@pytest.mark.parametrize(("stages", "why"), [("1", "chunks need a pipeline"), ("2", "no chunk made a step shorter")])
def test_chunked_says_when_nothing_was_chunked(stages: str, why: str, tmp_path: Path, capsys: Any) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[100, 100, 100, 100, 100, 100, 100, 100]")
    words = ["--lengths", str(lengths), "--ranks", "2", "--pp-size", stages, "--strategy", "chunked"]
    assert main(["plan", *words]) == 0
    assert why in capsys.readouterr().out


def test_a_tilde_is_home_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "l.json").write_text("[100, 200]")
    run(plan, "--lengths=~/l.json", "--ranks", "2", "--out=~/plan.json")
    assert read_plan(tmp_path / "plan.json").lengths.tolist() == [100, 200]
    run(lengths, "~/l.json", "--json")
    with pytest.raises(UserError, match="no such home"):
        run(plan, "--lengths=~nobody-here/l.json", "--ranks", "2")
    with pytest.raises(UserError, match=f"cannot read profile {tmp_path}/p.json"):
        run(plan, "--lengths=~/l.json", "--ranks", "2", "--profile=~/p.json")

"""The published figures: what must hold with few batches, and the shape of every result."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale.cost.predict import lower_bound_s
from bytescale.errors import UserError
from bytescale.plan.validate import validate
from bytescale.planner import plan as make_plan
from bytescale.reproduction import systems
from bytescale.reproduction.calibration import paper_cluster, read_calibration
from bytescale.reproduction.catalogue import FIGURES
from bytescale.reproduction.figures import beyond
from bytescale.reproduction.figures.beyond import run_strategy
from bytescale.reproduction.figures.case_study import figure_18, figure_20
from bytescale.reproduction.figures.fused_loss import figure_16
from bytescale.reproduction.figures.labels import READINGS, byted
from bytescale.reproduction.figures.offloading import figure_21
from bytescale.reproduction.figures.small_figures import figure_4, figure_5, figure_6
from bytescale.reproduction.figures.throughput import MODELS, decay
from bytescale.reproduction.figures.worked_examples import figure_12, figure_13
from bytescale.reproduction.published import published
from bytescale.reproduction.rows import Row
from bytescale.reproduction.store import keep_rows, kept_rows
from bytescale.reproduction.systems import folded_cost, folded_static, paper_workload
from bytescale.simulator import simulate
from bytescale.simulator.workload import stratified_batches

K = 1024


def test_levels_and_pipelines_of_the_worked_examples() -> None:
    share, *bubbles = figure_12()
    assert share.ours == pytest.approx(0.42, abs=0.02)
    waits = [row.extra["dp_bubble"] for row in bubbles]
    assert max(waits[:2]) < 0.002 < 0.4 < waits[2]  # both end together; without attention the wide one idles
    assert bubbles[1].ours < bubbles[0].ours  # more micro-batches, less bubble
    ends = {(row.quantity, row.system): row for row in figure_13()}
    for words in ("DP-Balance", "PP-Balance"):
        quantity = f"{words}, six ranks: last / mean end"
        assert ends[quantity, "hdp-balance"].extra["step_s"] <= ends[quantity, "hdp-naive"].extra["step_s"]


def test_a_fused_loss_moves_fewer_bytes() -> None:
    rows = figure_16()
    assert [round(row.paper or 0, 2) for row in rows] == [6.45, 2.33, 4.23]
    assert all(row.ours > 1 for row in rows)


def test_labels_as_lower_edges_meet_the_stated_sums() -> None:
    for reading in READINGS[:2]:
        lengths = stratified_batches(byted(reading), num_batches=1, batch_tokens=K**3, context=2048 * K, seed=0)[0]
        tokens = float(lengths.sum())
        assert lengths[lengths >= 128 * K].sum() / tokens == pytest.approx(0.443, abs=0.005)
        assert lengths[lengths >= 2048 * K].sum() / tokens == pytest.approx(0.121, abs=0.005)


def test_decay_is_the_slope_of_the_ends() -> None:
    rows = []
    for model in MODELS:
        for data in ("github", "byted"):
            for context, rate in (("256K", 8.0), ("2M", 1.0)):
                rates = {"tokens_per_s": rate**0.5, "static_tokens_per_s": rate}
                extra = rates | {f"paper_{name}": value for name, value in rates.items()}
                rows += [
                    Row("fig17", "speedup", 1.0, 1.0, model, data, context, system, extra)
                    for system in ("hdp-naive", "hdp-balance")
                ]
    found = {(row.data, row.system): row for row in decay(rows)}
    assert found["github", "static"].ours == pytest.approx(2.0)
    assert found["github", "hdp-balance"].ours == pytest.approx(2**0.5)
    assert found["github", "hdp-naive"].paper == 1.23
    assert found["byted", "static"].paper is None


def test_every_constant_has_a_source() -> None:
    calibration = read_calibration()
    assert all(entry["source"] and entry["unit"] for entry in calibration["common"].values())
    assert all(entry["source"] for entry in calibration["models"].values())
    assert set(calibration["models"]) == set(MODELS)
    assert paper_cluster("mistral-8x22b").num_gpus == 12288
    with pytest.raises(UserError, match="did you mean 'llama-7b'"):
        paper_cluster("lama-7b")


def test_the_published_table_has_96_speedups() -> None:
    table = published()["fig17"]
    cells = [table[m][d][s] for m in MODELS for d in ("github", "byted") for s in ("naive", "balance")]
    assert sum(len(cell) for cell in cells) == 96


@pytest.mark.parametrize("context", [64 * K, 100_000])
def test_a_folded_static_plan_takes_as_long_as_the_whole_one(context: int) -> None:
    cost = paper_cluster("llama-7b").cost
    lengths = np.random.default_rng(1).integers(1, 64 * K, 300)
    arguments = {"hdp_size": 64, "tokens_per_rank": 8192, "cost": cost, "context": context}
    whole = simulate(make_plan(lengths, "static", **arguments), cost)
    plan = folded_static(lengths, **arguments)
    folded = simulate(plan, folded_cost(cost, plan))
    assert folded.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert float(folded.ranks.communication_s.mean()) == pytest.approx(float(whole.ranks.communication_s.mean()))


def test_lengths_meet_the_stated_shares() -> None:
    rows = [row for row in figure_4() if row.paper is not None]
    assert len(rows) == 8
    assert all(abs(row.ours - row.paper) < 0.01 for row in rows if row.paper is not None)


def test_the_bubble_of_figure_5() -> None:
    rows = figure_5()
    assert rows[-1].ours == pytest.approx(0.33, abs=0.001)
    assert 1.5 < rows[-1].extra["slow_factor"] < 1.9
    assert [row.ours for row in rows[:-1]] == sorted(row.ours for row in rows[:-1])


def test_attention_share_grows_with_length() -> None:
    shares = [row.ours for row in figure_6() if row.quantity == "attention share of a layer"]
    assert shares == sorted(shares)


def test_offloading_half_is_free_at_64k_and_all_of_it_at_256k() -> None:
    rows = {(row.context, row.quantity): row for row in figure_21()}
    assert rows["64K", "time / time without, offload 0.5"].ours == pytest.approx(1.0, abs=0.005)
    full = rows["64K", "time / time without, offload 1"]
    assert full.paper is not None
    assert abs(full.ours - full.paper) < 0.05
    assert rows["256K", "time / time without, offload 1"].ours == pytest.approx(1.0)


def test_the_case_study_with_few_batches() -> None:
    rows = {(row.quantity, row.system): row for row in figure_18(4)}
    share = rows["communication share, ring / (ring + feed-forward)", "static"]
    assert share.paper is not None
    assert abs(share.ours - share.paper) < 0.03
    assert rows["rank time until done, std / mean", "hdp-balance"].extra["most"] < 0.05
    static, naive, balance = (rows["step s, mean", s].ours for s in ("static", "hdp-naive", "hdp-balance"))
    assert static > naive > balance


def test_the_ablation_states_the_factor_of_every_step() -> None:
    rows = {row.system: row for row in figure_20(2)}
    assert rows["static"].ours == 1.0
    assert rows["loader"].extra["factor"] > 1.0
    assert rows["balance"].ours > rows["naive"].ours > 1.0


def test_best_is_never_slower_and_near_the_bound_without_a_pipeline() -> None:
    cluster = replace(paper_cluster("llama-7b"), update_s=0.0, hdp_size=256)
    lengths = paper_workload("byted", 1024 * K, 8 * K * K, 1).batches[0]
    context = int(lengths.max())
    times = {}
    for name in beyond.STRATEGIES:
        if name in beyond.OTHER_SETTINGS:
            continue
        step, _ = run_strategy(cluster, lengths, name, context)
        times[name] = step.step_time_s
    assert times["best"] <= min(times.values()) * (1 + 1e-9)
    assert times["best"] <= 1.03 * lower_bound_s(cluster.cost, lengths, cluster.hdp_size)


def test_chunks_are_faster_than_whole_sequences_within_their_memory() -> None:
    cluster = replace(paper_cluster("mistral-8x7b"), update_s=0.0, hdp_size=64)
    lengths = paper_workload("github", 512 * K, 4 * K * K, 1).batches[0]
    times = {}
    for name in ("hdp-balance", "best", "chunked"):
        step, _ = run_strategy(cluster, lengths, name, int(lengths.max()))
        times[name] = step.step_time_s
    assert step.plan.layout == "chunks"
    validate(step.plan)  # its memory rule counts kept tokens and gradients
    assert times["chunked"] < 0.95 * times["best"] < 0.95 * times["hdp-balance"]
    assert times["chunked"] >= lower_bound_s(cluster.cost, lengths, 64, 1) / 4


def test_rows_are_kept_for_the_code_that_made_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = figure_12()
    assert kept_rows(tmp_path, "fig12", 3) is None
    keep_rows(tmp_path, "fig12", 3, rows)
    assert kept_rows(tmp_path, "fig12", 3) == rows
    assert kept_rows(tmp_path, "fig12", 4) is None
    (file,) = tmp_path.iterdir()
    file.write_text("[{}]")
    with pytest.raises(UserError, match="holds no rows of a reproduction"):
        kept_rows(tmp_path, "fig12", 3)
    monkeypatch.setattr("bytescale.reproduction.store._PACKAGES", ("cost",))
    assert kept_rows(tmp_path, "fig12", 3) is None


def test_every_figure_of_the_catalogue_gives_json() -> None:
    assert list(FIGURES)[:2] == ["fig4", "fig5"]
    for row in figure_5():
        assert json.loads(json.dumps(row.to_dict()))["figure"] == "fig5"
    assert systems.NUM_BATCHES >= 20

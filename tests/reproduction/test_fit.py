"""Fitting the rates of the paper's cluster, and what is held out."""

import numpy as np
import pytest

from bytescale.cost.presets import cluster_spec
from bytescale.reproduction.calibration import paper_cluster
from bytescale.reproduction.figures.holdout import splits
from bytescale.reproduction.figures.throughput import _cell
from bytescale.reproduction.fit import Cell, descend, error, fit_cluster, is_as_printed, log_errors, plan_cell, scaled
from bytescale.reproduction.pool import each


def test_the_search_finds_the_least_of_a_smooth_bowl() -> None:
    goal = (1.7, 0.6, 1.2)

    def bowl(factors: tuple[float, float, float]) -> float:
        return float(np.abs(np.log(np.array(factors) / goal)).sum())

    assert descend(bowl, 1.2) == pytest.approx(goal, rel=0.1)


def test_one_cluster_serves_every_model() -> None:
    cluster = cluster_spec("paper")
    faster = scaled(cluster, (2.0, 4.0, 0.5))
    assert faster.linear_flops_per_s == 2 * cluster.linear_flops_per_s
    for name in ("llama-7b", "mistral-8x22b"):
        before, after = paper_cluster(name).cost, paper_cluster(name, faster).cost
        assert after.forward.square_s == before.forward.square_s
        assert after.inter_node.latency_s == before.inter_node.latency_s / 2
        assert after.forward.token_s < 0.6 * before.forward.token_s


def test_errors_of_a_cell_are_those_of_the_figure() -> None:
    cluster = cluster_spec("paper")
    cell = Cell("llama-13b", "github", "256K")
    logs = log_errors([plan_cell(cell, cluster, 1)], cluster)[0]
    assert np.exp(logs) == pytest.approx([row.ratio for row in _cell(1, ("llama-13b", "github", "256K"))])
    assert error(np.log([2.0, 0.5])) == pytest.approx(1.0)


def test_a_fit_is_no_worse_than_its_start() -> None:
    cluster, cells = cluster_spec("paper"), [Cell("llama-7b", "byted", "256K")]
    start = scaled(cluster, (0.9, 1.0, 1.0))
    assert is_as_printed(start) and not is_as_printed(scaled(cluster, (3.0, 1.0, 1.0)))

    def off(rates: object) -> float:
        return error(log_errors([plan_cell(cells[0], rates, 1)], rates))  # type: ignore[arg-type]

    fitted = fit_cluster(cells, start, 1)
    assert off(fitted) <= off(start) and is_as_printed(fitted)


def test_no_split_is_fitted_to_what_it_predicts() -> None:
    for _, seen, unseen in splits():
        assert not set(seen) & set(unseen)
    assert {len(seen) + len(unseen) for _, seen, unseen in splits()} == {48}


def test_cells_in_processes_are_those_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    assert each(len, ["a", "bb", "ccc"], 2, said.append) == each(len, ["a", "bb", "ccc"]) == [1, 2, 3]
    assert sorted(said) == ["a is done", "bb is done", "ccc is done"]
    with pytest.raises(TypeError):
        each(len, [1, 2], 2)  # type: ignore[arg-type, list-item]

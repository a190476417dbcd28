"""Fitting the constants, and what is held out."""

import numpy as np
import pytest

from bytescale.reproduction.calibration import paper_cluster, read_calibration
from bytescale.reproduction.figures.throughput import _cell_rows, _tokens_per_s
from bytescale.reproduction.fit import Cell, _descend, error, log_errors, rate, with_rates
from bytescale.reproduction.published import published
from bytescale.reproduction.systems import CONTEXTS


def test_the_search_finds_the_least_of_a_smooth_bowl() -> None:
    found = _descend(lambda f: abs(np.log(f[0] / 1.7)) + abs(np.log(f[1] / 0.6)))
    assert found[0] == pytest.approx(1.7, rel=0.06)
    assert found[1] == pytest.approx(0.6, rel=0.06)


def test_rates_are_what_the_constants_imply() -> None:
    calibration = read_calibration()
    flops, num_bytes = rate(calibration, "llama-7b")
    assert 40e12 < flops < 70e12
    assert 8e9 < num_bytes < 16e9
    one = with_rates(calibration, flops, num_bytes)
    assert one["models"]["llama-7b"]["linear_ms"] == pytest.approx(calibration["models"]["llama-7b"]["linear_ms"])
    for name in one["models"]:
        assert rate(one, name) == pytest.approx((flops, num_bytes))
    assert calibration["models"]["llama-70b"]["linear_ms"] == 16


def test_errors_of_a_cell_are_those_of_the_figure() -> None:
    calibration = read_calibration()
    cell = Cell("llama-13b", "github", "256K")
    logs = log_errors([cell], calibration, 1)[0]
    ours = _tokens_per_s(paper_cluster(cell.model), cell.data, CONTEXTS[cell.context], 1)
    rows = _cell_rows(cell.model, cell.data, cell.context, ours, published()["fig17"][cell.model][cell.data], 0)
    assert np.exp(logs) == pytest.approx([row.ratio for row in rows])
    assert error(np.log([2.0, 0.5])) == pytest.approx(1.0)

"""Fits find the coefficients that made the points; profiles survive storing; foreign and broken ones are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale.cost import MODELS
from bytescale.cost.model import piece_times_s
from bytescale.cost.profile import (
    Profile,
    beyond_range,
    check_profile,
    make_profile,
    predicted_layer_s,
    profile_cost,
    read_profile,
    relative_least_squares,
    write_profile,
)
from bytescale.errors import UserError
from bytescale.planner import plan

MODEL = MODELS["llama-7b"]
LENGTHS = np.array([256.0, 512, 1024, 2048, 4096, 8192])
A, E0, B, G = 2e-9, 300.0, 1e-5, 1e-4


def points(**changed: Any) -> dict[str, dict[str, list[float]]]:
    """Exact points of known coefficients; the backward takes 2.5, 2 and 3 times as long."""
    edges = np.array([128.0, 512, 1024, 2048])
    q, kv = (x.ravel() for x in np.meshgrid(edges, edges))
    area = 2 * q * kv
    block = A * (area + E0 * np.sqrt(area)) + 1e-6

    def layer(s: np.ndarray) -> dict[str, Any]:
        attention = A * s * (s + E0)
        return {"length": s, "forward_s": attention + B * s + G, "backward_s": 2.5 * attention + 2 * B * s + 3 * G}

    sizes = np.array([1e3, 1e5, 1e7])
    tables: dict[str, dict[str, Any]] = {
        "layer": layer(LENGTHS),
        "held_out": layer(np.array([700.0, 3000.0])),
        "block": {"q_len": q, "kv_len": kv, "forward_s": block, "backward_s": 2.5 * block},
        "activation": {"length": LENGTHS, "num_bytes": 2e5 * LENGTHS + 64},
        "embedding": {"forward_token_s": [1e-9], "backward_token_s": [3e-9]},
        "head": {"length": LENGTHS, "forward_s": 1e-6 * LENGTHS + 1e-5, "backward_s": 2e-6 * LENGTHS + 1e-5},
        "intra_node": {"num_bytes": sizes, "time_s": 1e-5 + sizes / 1e10},
        "inter_node": {"num_bytes": sizes, "time_s": 2e-5 + sizes / 1e9},
        "copy": {"out_alone": [5e9], "in_alone": [4e9], "out_both": [3e9], "in_both": [2e9]},
    }
    tables |= changed
    return {name: {key: list(map(float, v)) for key, v in table.items()} for name, table in tables.items()}


def profile(**changed: Any) -> Profile:
    facts = {"model": MODEL, "device": "cpu", "hardware": "a test", "versions": {"numpy": "2"}, "settings": {}}
    return make_profile(points=points(**changed), ranks_per_node=4, **facts)


def test_the_fit_finds_what_made_the_points() -> None:
    made = profile()
    fit = made.fit
    assert fit.forward.square_s == pytest.approx(A, rel=1e-6)
    assert fit.backward.square_s == pytest.approx(2.5 * A, rel=1e-6)
    assert fit.block_half_tokens == pytest.approx(E0, rel=1e-4)
    assert (fit.forward.token_s, fit.backward.token_s) == pytest.approx((B, 2 * B), rel=1e-3)
    assert (fit.forward.constant_s, fit.backward.constant_s) == pytest.approx((G, 3 * G), rel=1e-3)
    assert (fit.forward.head_token_s, fit.backward.head_token_s) == pytest.approx((1e-6, 2e-6))
    assert (fit.forward.embedding_token_s, fit.backward.embedding_token_s) == (1e-9, 3e-9)
    assert (fit.activation_bytes_per_token, fit.activation_bytes) == pytest.approx((2e5, 64), rel=1e-3)
    assert (fit.intra_node.latency_s, fit.intra_node.bytes_per_s) == pytest.approx((1e-5, 1e10))
    assert (fit.inter_node.latency_s, fit.inter_node.bytes_per_s) == pytest.approx((2e-5, 1e9))
    assert fit.copy_bytes_per_s == 2e9
    assert max(made.worst_residual(table) for table in made.residuals) < 1e-6
    assert predicted_layer_s(fit, fit.forward, 5000.0) == pytest.approx(A * 5000 * 5300 + B * 5000 + G)


def test_residuals_are_those_of_noisy_points() -> None:
    noisy = points()["layer"]
    noisy["forward_s"][3] *= 1.08
    made = profile(layer=noisy)
    lengths = np.array(made.points["layer"]["length"])
    expected = predicted_layer_s(made.fit, made.fit.forward, lengths) / np.array(noisy["forward_s"]) - 1
    assert made.residuals["layer"]["forward_s"] == pytest.approx(expected.tolist())
    assert 0.01 < made.worst_residual("layer") < 0.08


def test_no_coefficient_is_negative() -> None:
    s = np.array([1.0, 2, 4, 8])
    coefficients, _ = relative_least_squares(np.stack([s**2, s, np.ones(4)], axis=1), 3 * s**2 - 1)
    assert np.all(coefficients >= 0)


def test_the_cost_model_is_that_of_the_fit() -> None:
    cost = profile_cost(profile(), num_layers=10, recompute=True)
    assert (cost.num_layers, cost.ranks_per_node, cost.recompute, cost.provenance) == (10, 4, True, "fitted")
    forward_s, backward_s = piece_times_s(cost, 4096.0)
    assert forward_s == pytest.approx(A * 4096 * (4096 + E0) + B * 4096)
    assert backward_s > 3 * forward_s
    made = plan([60_000, 500], "hdp-naive", hdp_size=4, tokens_per_rank=8192, cost=cost, offload="auto")
    # Eq. 3 with 2 GB/s: the copy of a layer's activations takes 0.1 ms a token, its compute 0.13 ms.
    assert made.pieces.offload_ratio.max() > 0


def test_without_another_machine_links_are_those_of_one() -> None:
    fit = profile(inter_node={"num_bytes": [], "time_s": []}).fit
    assert fit.inter_node == fit.intra_node


def test_a_profile_survives_storing(tmp_path: Path) -> None:
    made = profile()
    write_profile(made, tmp_path / "profile.json")
    read = read_profile(tmp_path / "profile.json")
    assert read == made
    stored = json.loads((tmp_path / "profile.json").read_text())
    assert {"points", "fit", "residuals", "hardware", "versions", "model"} <= set(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format="plan"), "is not a profile"),
        (lambda v: v.update(version=9), "has version 9"),
        (lambda v: v["points"].pop("layer"), "needs at least 3 points of layer"),
        (lambda v: v["points"]["layer"].update(forward_s=[-1.0] * 6), "must be positive numbers"),
        (lambda v: v["model"].pop("hidden_size"), "is broken"),
        (lambda v: v.update(points=[]), "is broken"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=message) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


def test_a_profile_of_another_model_is_refused() -> None:
    made = profile()
    check_profile(made, MODEL, "cpu", "p.json")
    with pytest.raises(UserError, match="another model: hidden_size is 4096 there and 5120 here"):
        check_profile(made, MODELS["llama-13b"], "cpu", "p.json")
    with pytest.raises(UserError, match="measured on cpu, this run computes on cuda"):
        check_profile(made, MODEL, "cuda", "p.json")


def test_lengths_beyond_the_range_are_named() -> None:
    made = profile()
    assert beyond_range(made, [256, 8192]) is None
    line = beyond_range(made, [100, 9000, 20_000])
    assert line is not None
    assert line.startswith(
        "profile measured 256 to 8192 tokens; 2 of 3 sequences are longer than the longest, up to 20000"
    )
    assert "1 are shorter" in line

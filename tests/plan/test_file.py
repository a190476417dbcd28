"""Plan files: the round trip is exact, and a broken file is one clear line, never a traceback."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bytescale.errors import UserError
from bytescale.plan.file import plan_from_dict, plan_to_dict, read_plan, write_plan
from bytescale.plan.step_plan import Prediction, StepPlan
from bytescale.plan.validate import validate
from tests.plans import drawn, valid_plans

CONTRACT = {
    "format": "bytescale-plan",
    "version": 1,
    "strategy": "hdp-balance",
    "hdp_size": 4,
    "pp_size": 1,
    "tokens_per_rank": 8192,
    "num_layers": 32,
    "sequences": {"length": [16384, 100]},
    "pieces": {
        "sequence": [0, 0, 1],
        "rank": [0, 1, 2],
        "micro_batch": [0, 0, 0],
        "cp_degree": [2, 2, 1],
        "cp_index": [0, 1, 0],
        "tokens": [8192, 8192, 100],
        "offload_ratio": [0.0, 0.0, 0.0],
    },
    "predicted": {
        "step_time_s": 1.0,
        "lower_bound_s": 0.52,
        "rank_time_s": [1.0, 1.0, 0.01, 0.0],
        "imbalance": 1.99,
        "planning_time_s": 0.01,
    },
}


@given(valid_plans())
def test_round_trip(plan: StepPlan) -> None:
    text = json.dumps(plan_to_dict(plan))
    assert json.dumps(plan_to_dict(plan_from_dict(json.loads(text)))) == text


def test_the_contract_file_reads_and_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(CONTRACT))
    plan = read_plan(path)
    report = validate(plan)
    assert report.idle_ranks.tolist() == [3]
    assert plan.predicted is not None and plan.predicted.rank_time_s.tolist() == [1.0, 1.0, 0.01, 0.0]
    write_plan(plan, path)
    assert json.loads(path.read_text()) == CONTRACT
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_prediction_round_trip() -> None:
    predicted = Prediction(1.5, 1.0, np.array([1.5, 0.5]), 1.5, 0.001)
    plan = plan_from_dict(plan_to_dict(drawn("5", "0[0/2]", "0[1/2]")) | {"predicted": CONTRACT["predicted"]})
    assert plan.predicted is not None and plan.predicted.lower_bound_s == 0.52
    assert predicted.rank_time_s.tolist() == [1.5, 0.5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, '"format" must be'),
        ({"version": 2}, "version 2"),
        ({"hdp_size": 2.5}, '"hdp_size" must be an integer'),
        ({"hdp_size": True}, '"hdp_size" must be an integer'),
        ({"tokens_per_rank": None}, "tokens_per_rank"),
        ({"sequences": {}}, "sequences.length is missing"),
        ({"sequences": {"length": [1, "x"]}}, "sequences.length"),
        ({"pieces": []}, '"pieces" is missing or not an object'),
        ({"pieces": CONTRACT["pieces"] | {"rank": [0, 1]}}, "column rank has 2 rows"),
        ({"pieces": CONTRACT["pieces"] | {"rank": [0, 1, 2.5]}}, "pieces.rank must hold integers"),
        ({"pieces": CONTRACT["pieces"] | {"rank": [[0], [1], [2]]}}, "pieces.rank must be a flat array"),
        ({"pieces": CONTRACT["pieces"] | {"rank": [[0], [1, 2], 2]}}, "pieces.rank must be a flat array"),
        ({"pieces": CONTRACT["pieces"] | {"cp_index": None}}, "pieces.cp_index is missing"),
        ({"pieces": CONTRACT["pieces"] | {"tokens": [10**30, 1, 1]}}, "pieces.tokens must hold integers"),
        ({"pieces": CONTRACT["pieces"] | {"offload_ratio": [0.0, 0.5]}}, "offload_ratio"),
        ({"layout": "rings"}, "layout 'rings'"),
        ({"layout": "blocks"}, "pieces.token_begin is missing"),
        ({"predicted": {"step_time_s": "soon"}}, "predicted.step_time_s"),
        ({"predicted": 3}, "predicted must be an object"),
        ({"predicted": CONTRACT["predicted"] | {"step_time_s": float("nan")}}, "step_time_s must be a finite"),
        ({"predicted": CONTRACT["predicted"] | {"imbalance": 10**400}}, "predicted.imbalance must be a finite"),
        ({"pieces": CONTRACT["pieces"] | {"rank": [0, True, 2]}}, "pieces.rank must hold numbers, not true"),
    ],
)
def test_broken_files_name_the_key(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(CONTRACT | change))
    with pytest.raises(UserError, match=words) as caught:
        read_plan(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b'"bytescale-plan"', b"[" * 100_000])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a plan file"):
        read_plan(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read plan .*none\.json: No such file"):
        read_plan(tmp_path / "none.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(CONTRACT)), JSON_VALUES)
def test_any_value_anywhere_is_read_or_refused(key: str, value: Any) -> None:
    _read_or_refuse(CONTRACT | {key: value})


@given(st.sampled_from(["sequences", "pieces", "predicted"]), st.data(), JSON_VALUES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_value_in_a_section_is_read_or_refused(section: str, data: st.DataObject, value: Any) -> None:
    name = data.draw(st.sampled_from(sorted(CONTRACT[section])))
    _read_or_refuse(CONTRACT | {section: CONTRACT[section] | {name: value}})


@given(st.integers(0, len(json.dumps(CONTRACT))), st.binary(max_size=3))
def test_damaged_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes) -> None:
    text = json.dumps(CONTRACT).encode()
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_bytes(text[:cut] + junk + text[cut + len(junk) :])
    try:
        validate(read_plan(path))
    except UserError as error:
        assert "\n" not in str(error)


def _read_or_refuse(value: Any) -> None:
    try:
        validate(plan_from_dict(json.loads(json.dumps(value))))
    except UserError as error:
        assert str(error)

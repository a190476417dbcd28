"""Plan files: JSON with parallel arrays, format `bytescale-plan` version 1.

Reading trusts nothing: every key, type and length is checked and a broken or foreign file is a `UserError` that names
the file and the key. Writing goes to a temporary name and is renamed, so a file is whole or absent.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bytescale.errors import UserError
from bytescale.files import StrPath, write_text_atomically
from bytescale.plan.step_plan import Layout, Pieces, Prediction, StepPlan, step_plan

FORMAT, VERSION = "bytescale-plan", 1
_SCALARS = ("hdp_size", "pp_size", "tokens_per_rank", "num_layers")


def plan_to_dict(plan: StepPlan) -> dict[str, Any]:
    """The plan as JSON-ready values. `layout` is written where it is not `zigzag`."""
    columns = {f.name: getattr(plan.pieces, f.name) for f in fields(Pieces)}
    value: dict[str, Any] = {"format": FORMAT, "version": VERSION, "strategy": plan.strategy}
    value |= {name: getattr(plan, name) for name in _SCALARS}
    if plan.layout != "zigzag":
        value["layout"] = plan.layout
    if plan.layout == "chunks":
        value["kept_gradient_share"] = plan.kept_gradient_share
    value["sequences"] = {"length": plan.lengths.tolist()}
    value["pieces"] = {name: column.tolist() for name, column in columns.items() if column is not None}
    if plan.predicted is not None:
        value["predicted"] = prediction_to_dict(plan.predicted)
    return value


def prediction_to_dict(predicted: Prediction) -> dict[str, Any]:
    """The `predicted` section."""
    values = {f.name: getattr(predicted, f.name) for f in fields(Prediction)}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def write_plan(plan: StepPlan, path: StrPath) -> None:
    """Store `plan` at `path`, atomically."""
    write_text_atomically(path, json.dumps(plan_to_dict(plan)) + "\n")


def read_plan(path: StrPath) -> StepPlan:
    """Load a plan file. The plan is well-formed but not yet proven; call `validate`.

    Raises:
        UserError: the file cannot be read, is not a plan, or a key is missing, of a wrong type or of a wrong length.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read plan {path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a plan file: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is not a plan file: it nests too deeply") from None
    try:
        return plan_from_dict(value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def plan_from_dict(value: Any) -> StepPlan:
    """The plan stored in `value`, the parsed JSON of a plan file.

    Raises:
        UserError: names the key at fault.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f'not a plan file: "format" must be "{FORMAT}"')
    if value.get("version") != VERSION:
        raise UserError(f"plan version {value.get('version')!r} is not supported; this program reads {VERSION}")
    layout = value.get("layout", "zigzag")
    if layout not in get_args(Layout):
        raise UserError(f"layout {layout!r} is unknown; it is one of {', '.join(get_args(Layout))}")
    table = _section(value, "pieces")
    names = ["sequence", "rank", "micro_batch", "tokens"]
    names += ["cp_degree", "cp_index"] if layout != "blocks" else []
    names += ["token_begin", "token_end"] if layout != "zigzag" else []
    columns: dict[str, Any] = {name: _integers(table, "pieces", name) for name in names}
    scalars: dict[str, Any] = {name: _integer(value, name) for name in _SCALARS}
    offload_ratio = _floats(table, "pieces", "offload_ratio")
    share = _number(value, "", "kept_gradient_share") if layout == "chunks" else 0.0
    try:
        return step_plan(
            strategy=str(value.get("strategy", "")),
            lengths=_integers(_section(value, "sequences"), "sequences", "length"),
            offload_ratio=offload_ratio,
            kept_gradient_share=share,
            predicted=_prediction(value["predicted"]) if "predicted" in value else None,
            **scalars,
            **columns,
        )
    except ValueError as error:
        raise UserError(f"pieces: {error}") from None


def _prediction(value: Any) -> Prediction:
    if not isinstance(value, dict):
        raise UserError("predicted must be an object")
    names = ("step_time_s", "lower_bound_s", "imbalance", "planning_time_s")
    scalars = {name: _number(value, "predicted.", name) for name in names}
    return Prediction(rank_time_s=_floats(value, "predicted", "rank_time_s"), **scalars)


def _number(value: dict[str, Any], where: str, name: str) -> float:
    number = value.get(name)
    if not isinstance(number, int | float) or isinstance(number, bool) or not abs(number) <= sys.float_info.max:
        raise UserError(f"{where}{name} must be a finite number, not {number!r}")
    return float(number)


def _section(value: dict[str, Any], name: str) -> dict[str, Any]:
    section = value.get(name)
    if not isinstance(section, dict):
        raise UserError(f'key "{name}" is missing or not an object')
    return section


def _integer(value: dict[str, Any], name: str) -> int:
    number = value.get(name)
    if not isinstance(number, int) or isinstance(number, bool):
        raise UserError(f'key "{name}" must be an integer, not {number!r}')
    return number


def _integers(section: dict[str, Any], where: str, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = _array(section, where, name)
    if array.size and array.dtype.kind != "i":
        raise UserError(f"{where}.{name} must hold integers only")
    return array.astype(np.int64)


def _floats(section: dict[str, Any], where: str, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    array = _array(section, where, name)
    if array.size and array.dtype.kind not in "if":
        raise UserError(f"{where}.{name} must hold numbers only")
    return array.astype(np.float64)


def _array(section: dict[str, Any], where: str, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    values = section.get(name)
    if not isinstance(values, list):
        raise UserError(f"{where}.{name} is missing or not an array")
    if bool in set(map(type, values)):
        raise UserError(f"{where}.{name} must hold numbers, not true or false")
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        raise UserError(f"{where}.{name} must be a flat array of numbers") from None
    if array.ndim != 1:
        raise UserError(f"{where}.{name} must be a flat array of numbers")
    return array

"""The profile of a machine: measured points, the coefficients fitted to them, and the cost model these make.

`bytescale profile` measures (`bytescale.profiler.measure`); this module fits, stores, reads and judges. Fits minimise
the sum of squared *relative* residuals with coefficients that are not negative, over

    layer, forward and backward     T(s) = a*s^2 + b*s + g                      (paper, Eq. 3)
    attention blocks of q x k       A*(2qk + e0*sqrt(2qk)) + c                  (as a causal block of that edge)
    activations of a layer          Act(s) = p*s + q
    head, links                     t = h*s + c,    t = latency + bytes / bandwidth

The block half-length e0 is taken from the blocks, the rest of the linear term stays in b. The copy bandwidth is that of
the slower direction with both running. Held-out lengths are measured, not fitted: they test the fit.

Invariant: a profile of another model, type or device is refused; lengths outside the measured range are named by
`beyond_range`, never extrapolated silently. Cost: a handful of tiny least-squares problems; numpy alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bytescale.arrays import FloatArray
from bytescale.cost.model import CostModel, DirectionCost, Link, ModelShape
from bytescale.errors import UserError
from bytescale.files import StrPath, write_text_atomically

Columns = Mapping[str, Sequence[float]]

FORMAT, VERSION = "bytescale-profile", 1
FITTED_FROM_TOKENS = 512
"""Residuals are judged above this length; shorter points are measured and fitted too."""

_COLUMNS = {
    "layer": ("length", "forward_s", "backward_s"),
    "held_out": ("length", "forward_s", "backward_s"),
    "block": ("q_len", "kv_len", "forward_s", "backward_s"),
    "activation": ("length", "num_bytes"),
    "head": ("length", "forward_s", "backward_s"),
    "embedding": ("forward_token_s", "backward_token_s"),
    "intra_node": ("num_bytes", "time_s"),
    "inter_node": ("num_bytes", "time_s"),
    "copy": ("out_alone", "in_alone", "out_both", "in_both"),
}
"""Tables of points and their columns; `inter_node` and `embedding` may be empty. `copy` holds bytes per second, and
`embedding` seconds a token: a lookup is so short that no more is worth fitting."""


@dataclass(frozen=True)
class Fit:
    """Coefficients, head and embedding included; `token_s` is without the share that e0 stands for."""

    forward: DirectionCost
    backward: DirectionCost
    block_half_tokens: float
    activation_bytes_per_token: float
    activation_bytes: float
    intra_node: Link
    inter_node: Link
    copy_bytes_per_s: float


@dataclass(frozen=True)
class Profile:
    """What was measured, where, and what was fitted.

    Attributes:
        model: sizes of the model, `dtype_bytes` included.
        device: `cpu` or `cuda`.
        hardware: in words.
        versions: of the libraries that matter.
        settings: threads, offload tier, number of ranks.
        ranks_per_node: ranks that share a machine.
        points: tables of columns, see `_COLUMNS`.
        fit: the coefficients.
        residuals: per table and column the relative residual of every point, prediction over measurement minus 1.
    """

    model: ModelShape
    device: str
    hardware: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    ranks_per_node: int
    points: Mapping[str, Columns]
    fit: Fit
    residuals: Mapping[str, Columns]

    @property
    def shortest(self) -> int:
        """Least length measured."""
        return int(min(self.points["layer"]["length"]))

    @property
    def longest(self) -> int:
        """Greatest length measured."""
        return int(max(self.points["layer"]["length"]))

    def worst_residual(self, table: str) -> float:
        """Largest absolute residual above `FITTED_FROM_TOKENS`; 0 without such a point."""
        columns = self.residuals.get(table, {})
        lengths = np.asarray(self.points[table].get("length", []), np.float64)
        worst = 0.0
        for values in columns.values():
            chosen = np.abs(np.asarray(values, np.float64))
            if len(lengths) == len(chosen):
                chosen = chosen[lengths > FITTED_FROM_TOKENS]
            worst = max(worst, float(chosen.max(initial=0.0)))
        return worst


def fit_points(points: Mapping[str, Columns]) -> tuple[Fit, dict[str, dict[str, list[float]]]]:
    """The coefficients of `points`, and the relative residuals of every table that was fitted.

    Raises:
        UserError: a table is missing or has too few points.
    """
    table = {name: _columns(points, name) for name in _COLUMNS}
    residuals: dict[str, dict[str, list[float]]] = {}

    def fitted(name: str, column: str, *terms: FloatArray) -> FloatArray:
        coefficients, residual = relative_least_squares(np.stack(terms, axis=1), table[name][column])
        residuals.setdefault(name, {})[column] = residual.tolist()
        return coefficients

    length, block = table["layer"]["length"], table["block"]
    area = 2.0 * block["q_len"] * block["kv_len"]
    both = block["forward_s"] + block["backward_s"]
    (square, edge, _), block_residual = relative_least_squares(
        np.stack([area, np.sqrt(area), np.ones_like(area)], axis=1), both
    )
    residuals["block"] = {"forward_s + backward_s": block_residual.tolist()}
    half = float(edge / square) if square > 0 else 0.0
    head, residuals["head"] = _head(table["head"])
    directions = []
    for column, transfer in (("forward_s", 1.0), ("backward_s", 2.0)):
        a, b, g = fitted("layer", column, length**2, length, np.ones_like(length))
        embedding = float(table["embedding"][column.replace("_s", "_token_s")].sum())
        directions.append((float(a), float(b), float(g), transfer, head[column], embedding))
    # e0 may not claim more than the linear term of either direction holds.
    half = min([half, *(b / a for a, b, *_ in directions if a > 0)])
    forward, backward = (DirectionCost(a, b - a * half, *rest) for a, b, *rest in directions)
    p, q = fitted("activation", "num_bytes", table["activation"]["length"], np.ones_like(table["activation"]["length"]))
    intra = _link(table["intra_node"], "intra_node", residuals)
    inter = _link(table["inter_node"], "inter_node", residuals) if len(table["inter_node"]["num_bytes"]) else intra
    fit = Fit(
        forward=forward,
        backward=backward,
        block_half_tokens=half,
        activation_bytes_per_token=float(p),
        activation_bytes=float(q),
        intra_node=intra,
        inter_node=inter,
        copy_bytes_per_s=float(min(table["copy"]["out_both"][0], table["copy"]["in_both"][0])),
    )
    for column, direction in (("forward_s", forward), ("backward_s", backward)):
        held_out = table["held_out"]
        if len(held_out["length"]):
            predicted = predicted_layer_s(fit, direction, held_out["length"])
            residuals.setdefault("held_out", {})[column] = (predicted / held_out[column] - 1.0).tolist()
    return fit, residuals


def _head(columns: dict[str, FloatArray]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds a token of head and loss in each direction; the residuals are those of both directions together.

    The forward makes the gradients as well, so the backward alone is a small difference that nothing depends on.
    """
    length = columns["length"]
    terms = np.stack([length, np.ones_like(length)], axis=1)
    fits = {column: relative_least_squares(terms, columns[column])[0] for column in ("forward_s", "backward_s")}
    total_s = columns["forward_s"] + columns["backward_s"]
    residual = terms @ (fits["forward_s"] + fits["backward_s"]) / total_s - 1.0
    return {column: float(fit[0]) for column, fit in fits.items()}, {"forward_s + backward_s": residual.tolist()}


def predicted_layer_s(fit: Fit, direction: DirectionCost, length: Any) -> FloatArray:
    """T(s) of one layer and direction on one rank, the constant included."""
    s = np.asarray(length, np.float64)
    attention_s = direction.square_s * s * (s + fit.block_half_tokens)
    return np.asarray(attention_s + direction.token_s * s + direction.constant_s, np.float64)


def relative_least_squares(terms: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Coefficients >= 0 with the least sum of squared relative residuals, and these residuals.

    There are few terms, so every subset is fitted; the best fit without a negative coefficient is the solution.

    Args:
        terms: one column a coefficient. Shape [num_points, num_terms].
        values: measured, positive. Shape [num_points].
    """
    num_terms = terms.shape[1]
    scaled, ones = terms / values[:, None], np.ones(len(values))
    best, best_error = np.zeros(num_terms), float("inf")
    for size in range(num_terms, 0, -1):
        for chosen in combinations(range(num_terms), size):
            part = scaled[:, list(chosen)]
            norms = np.linalg.norm(part, axis=0)
            solution = np.linalg.lstsq(part / norms, ones, rcond=None)[0] / norms
            error = float(np.square(part @ solution - 1.0).sum())
            if np.all(solution >= 0) and error < best_error:
                best, best_error = np.zeros(num_terms), error
                best[list(chosen)] = solution
    return best, scaled @ best - 1.0


def _link(columns: dict[str, FloatArray], name: str, residuals: dict[str, dict[str, list[float]]]) -> Link:
    num_bytes = columns["num_bytes"]
    terms = np.stack([np.ones_like(num_bytes), num_bytes], axis=1)
    (latency, per_byte), residual = relative_least_squares(terms, columns["time_s"])
    residuals[name] = {"time_s": residual.tolist()}
    return Link(float(latency), 1.0 / float(per_byte) if per_byte > 0 else float("inf"))


def _columns(points: Mapping[str, Columns], name: str) -> dict[str, FloatArray]:
    columns = {key: np.asarray(points.get(name, {}).get(key, []), np.float64) for key in _COLUMNS[name]}
    num = {len(values) for values in columns.values()}
    least = {"layer": 3, "block": 3, "held_out": 0, "inter_node": 0, "embedding": 0, "copy": 1}.get(name, 2)
    if len(num) != 1 or min(num) < least:
        raise UserError(f"a profile needs at least {least} points of {name}; found {min(num)}")
    if any(not np.all(np.isfinite(values) & (values > 0)) for values in columns.values()):
        raise UserError(f"the points of {name} in a profile must be positive numbers")
    return columns


def profile_cost(profile: Profile, *, num_layers: int | None = None, recompute: bool = False) -> CostModel:
    """The cost model of what was measured.

    Args:
        profile: the profile.
        num_layers: of the whole model; None takes those of the profiled one.
        recompute: activation checkpointing of every layer.
    """
    fit = profile.fit
    return CostModel(
        name=f"{profile.model.name}, profile of {profile.hardware}",
        num_layers=profile.model.num_layers if num_layers is None else num_layers,
        forward=fit.forward,
        backward=fit.backward,
        kv_bytes_per_token=float(profile.model.kv_bytes_per_token),
        activation_bytes_per_token=fit.activation_bytes_per_token,
        activation_bytes=fit.activation_bytes,
        intra_node=fit.intra_node,
        inter_node=fit.inter_node,
        block_half_tokens=fit.block_half_tokens,
        ring_step_floor_s=fit.intra_node.latency_s,
        ranks_per_node=profile.ranks_per_node,
        copy_bytes_per_s=fit.copy_bytes_per_s,
        recompute=recompute,
        provenance="fitted",
    )


def check_profile(profile: Profile, shape: ModelShape, device: str, path: Path | str) -> None:
    """Whether `profile` was made of this model, type and device; layers may differ, they are measured one by one.

    Raises:
        UserError: names the first size that differs.
    """
    ours, theirs = asdict(shape), asdict(profile.model)
    for key in ours:
        if key not in ("name", "num_layers") and ours[key] != theirs[key]:
            raise UserError(
                f"profile {path} is of another model: {key} is {theirs[key]} there and {ours[key]} here; "
                "profile this one with `bytescale profile`"
            )
    if profile.device != device:
        raise UserError(f"profile {path} was measured on {profile.device}, this run computes on {device}")


def beyond_range(profile: Profile, lengths: npt.ArrayLike) -> str | None:
    """One line when sequences lie outside the measured lengths, so that no guess passes for a measurement."""
    values = np.asarray(lengths)
    longer = int((values > profile.longest).sum())
    shorter = int((values < profile.shortest).sum())
    parts = []
    if longer:
        parts.append(f"{longer} of {len(values)} sequences are longer than the longest, up to {int(values.max())}")
    if shorter:
        parts.append(f"{shorter} are shorter than the shortest")
    if not parts:
        return None
    return (
        f"profile measured {profile.shortest} to {profile.longest} tokens; {', '.join(parts)}: their times are "
        "extrapolated"
    )


def write_profile(profile: Profile, path: StrPath) -> None:
    """Store as JSON, atomically."""
    value = {"format": FORMAT, "version": VERSION, **asdict(profile)}
    write_text_atomically(path, json.dumps(value, indent=1) + "\n")


def read_profile(path: StrPath) -> Profile:
    """A stored profile, fitted again from its points: the coefficients in the file are not trusted.

    Raises:
        UserError: the file cannot be read or is not a profile.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read profile {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"profile {path} is not JSON") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f'{path} is not a profile: "format" must be "{FORMAT}"')
    if value.get("version") != VERSION:
        raise UserError(f"profile {path} has version {value.get('version')}; this program reads version {VERSION}")
    try:
        points = {
            name: {k: list(map(float, v)) for k, v in columns.items()} for name, columns in value["points"].items()
        }
        return make_profile(
            model=ModelShape(**value["model"]),
            device=str(value["device"]),
            hardware=str(value["hardware"]),
            versions=dict(value["versions"]),
            settings=dict(value["settings"]),
            ranks_per_node=int(value["ranks_per_node"]),
            points=points,
        )
    except UserError as error:
        raise UserError(f"profile {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"profile {path} is broken: {type(error).__name__}: {error}") from None


def make_profile(*, points: Mapping[str, Columns], **facts: Any) -> Profile:
    """A profile with the fit of `points`."""
    fit, residuals = fit_points(points)
    return Profile(points=points, fit=fit, residuals=residuals, **facts)

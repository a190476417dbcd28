"""`bytescale profile CONFIG`: measure this machine for the model of a run, fit the cost model, store and draw both.

Ranks are started as for training: two by default, so that links can be measured, and one on a single GPU, which gets
the link of a preset. Rank 0 measures compute and copies while the others wait, then pairs of ranks measure their link.
Settings that decide speed (model, device, type, threads, offload directory) come from the configuration, so the profile
is that of the run.
"""

import json
import platform
import socket
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bytescale import __version__
from bytescale.cli.paths import UserPath
from bytescale.cli.planning import TokenCount
from bytescale.cli.ranks import run_ranks, show_failure
from bytescale.config.overrides import parse_overrides
from bytescale.config.schema import Config
from bytescale.config.toml import load_config
from bytescale.cost.profile import Fit, Profile, make_profile, predicted_layer_s, write_profile
from bytescale.errors import UserError
from bytescale.files import write_text_atomically
from bytescale.launch import interruptible, shared_threads
from bytescale.report import units
from bytescale.report.page import Chart, page
from bytescale.report.svg import Series, line_chart


@click.command(
    "profile",
    context_settings={"ignore_unknown_options": True},
    options_metavar="CONFIG [--out FILE] [--max-length N] [--rounds N] [--nproc N] [--section.key value ...]",
)
@click.option("--out", type=UserPath(), default="profile.json", show_default=True, help="Profile file.")
@click.option("--max-length", type=TokenCount(), help="Longest length measured [default: data.max_context].")
@click.option("--rounds", type=int, default=5, show_default=True, help="Runs of every point; the best one counts.")
@click.option("--nproc", type=int, help="Number of local ranks [default: 2; 1 with a single GPU].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def profile(
    out: Path, max_length: int | None, rounds: int, nproc: int | None, as_json: bool, arguments: tuple[str, ...]
) -> int:
    """Measure layers, links and copies for the model of CONFIG on this machine, and fit the cost model to them.

    Writes FILE and a page beside it that shows the points against the fit. Use it with plan.profile in a run, or with
    --profile where a command takes it.
    """
    overrides, rest = parse_overrides(arguments, ("--out", "--max-length", "--rounds", "--nproc", "--json"))
    if len(rest) != 1:
        raise UserError(f"one configuration file is needed, {len(rest)} are given" + "".join(f" {w}" for w in rest[:3]))
    if rounds < 1 or (nproc is not None and nproc < 1):
        raise UserError("--rounds and --nproc must be at least 1")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}")
    if out.is_dir():
        raise UserError(f"--out {out} is a directory; name a file in it, such as {out / 'profile.json'}")
    if find_spec("torch") is None:
        raise UserError("profiling needs torch: pip install 'bytescale[train]'")
    config = load_config(Path(rest[0]), overrides)
    longest = max_length if max_length is not None else config.data.max_context
    if longest < 1024:
        raise UserError(f"--max-length is {longest}; a fit needs lengths up to at least 1024")
    threads = config.train.compute_threads or 1
    with interruptible(), shared_threads(nproc or 2, threads):
        session = _session()
        nproc, config = session.decide(nproc, config)
        failure = run_ranks(nproc, lambda: _profile(session, config, longest, rounds, out, as_json), config)
    return show_failure(failure)


def _profile(session: Any, config: Config, longest: int, rounds: int, out: Path, as_json: bool) -> None:
    """Measure as one rank; rank 0 writes and prints."""
    measured = _measure(session, config, longest, rounds)
    if measured is not None:
        _show(measured, out, as_json)


def _session() -> Any:
    """The profiler, imported late because it brings torch."""
    try:
        from bytescale.profiler import session
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bytescale"):
            raise
        raise UserError(f"profiling needs {error.name}: pip install 'bytescale[train]'") from None
    return session


def _measure(session: Any, config: Config, longest: int, rounds: int) -> Profile | None:
    """The profile, on rank 0."""
    found = session.measure(config, longest, rounds)
    if found is None:
        return None
    shape, device, points, ranks_per_node, link = found
    threads = config.train.compute_threads or 1
    return make_profile(
        points=points,
        model=shape,
        device=device,
        hardware=_hardware(),
        versions={name: version(name) for name in ("torch", "transformers", "numpy")} | {"bytescale": __version__},
        settings={
            "dtype": config.train.dtype,
            "link": link,
            "compute_threads": threads,
            "offload_dir": config.offload.dir or config.run.dir,
            "host": socket.gethostname(),
            "clock": "events" if device == "cuda" else "thread CPU time" if threads == 1 else "wall time",
        },
        ranks_per_node=ranks_per_node,
    )


def _hardware() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _show(measured: Profile, out: Path, as_json: bool) -> None:
    write_profile(measured, out)
    picture = out.with_suffix(".html")
    write_text_atomically(picture, _page(measured))
    facts = profile_figures(measured)
    if as_json:
        click.echo(json.dumps({"profile": str(out), "page": str(picture), **facts}))
        return
    for name, value in facts.items():
        click.echo(f"{name:<28}{value if isinstance(value, str) else units.significant(float(value))}")
    click.echo(f"profile: {out}\npage: {picture}")


def profile_figures(measured: Profile) -> dict[str, Any]:
    """What a profile says, as flat values; names carry units."""
    fit = measured.fit
    figures: dict[str, Any] = {
        "hardware": measured.hardware,
        "shortest_tokens": measured.shortest,
        "longest_tokens": measured.longest,
    }
    for name, direction in (("forward", fit.forward), ("backward", fit.backward)):
        figures |= {f"{name}_{key}": value for key, value in vars(direction).items() if key != "transfer"}
    figures |= {
        "block_half_tokens": fit.block_half_tokens,
        "activation_bytes_per_token": fit.activation_bytes_per_token,
        "intra_node_latency_s": fit.intra_node.latency_s,
        "intra_node_bytes_per_s": fit.intra_node.bytes_per_s,
        "copy_bytes_per_s": fit.copy_bytes_per_s,
    }
    return figures | {f"worst_residual_{table}": measured.worst_residual(table) for table in measured.residuals}


def _page(measured: Profile) -> str:
    charts = [_layer_chart(measured, measured.fit, column) for column in ("forward_s", "backward_s")]
    activation = measured.points["activation"]
    charts.append(
        Chart("Activations of one layer", line_chart([_series("measured", activation, "num_bytes")], units.size))
    )
    residuals = [
        Series(column[:-2], list(zip(measured.points["layer"]["length"], values, strict=True)))
        for column, values in measured.residuals["layer"].items()
    ]
    charts.append(Chart("Residual of the layer fit", line_chart(residuals), "Prediction over measurement, minus 1."))
    facts = [
        (name, str(v) if isinstance(v, str) else units.significant(v)) for name, v in profile_figures(measured).items()
    ]
    return page("ByteScale profile", measured.model.name, facts, charts)


def _series(name: str, columns: Any, column: str) -> Series:
    return Series(name, list(zip(map(float, columns["length"]), map(float, columns[column]), strict=True)))


def _layer_chart(measured: Profile, fit: Fit, column: str) -> Chart:
    lengths = list(measured.points["layer"]["length"])
    direction = fit.forward if column == "forward_s" else fit.backward
    predicted = predicted_layer_s(fit, direction, lengths)
    series = [_series("measured", measured.points["layer"], column)]
    series.append(Series("fit", list(zip(lengths, predicted.tolist(), strict=True))))
    if measured.points["held_out"]["length"]:
        series.append(_series("held out", measured.points["held_out"], column))
    return Chart(f"One layer, {column[:-2]}", line_chart(series, units.duration, zero=True), "By sequence length.")

"""`python -m benchmarks.cluster`: run strategies on settings, keep every run's numbers, write the page."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.cluster.memory import longest_sequences
from benchmarks.cluster.page import write_page
from benchmarks.cluster.settings import SETTINGS
from benchmarks.cluster.trial import Trial, trial
from bytescale.errors import RunError, UserError, nearest


@click.command()
@click.argument("settings", nargs=-1)
@click.option("--strategies", default=None, help="Names, separated by commas.  [default: those of the setting]")
@click.option("--steps", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Runs of each strategy.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), default=Path("runs/cluster"), show_default=True)
@click.option("--again", is_flag=True, help="Measure again what has been measured.")
@click.option("--longest", is_flag=True, help="Find the longest sequence that trains within a host's memory instead.")
@click.option("--page", type=click.Path(path_type=Path), default=None, help="Write the page of all measurements here.")
def cluster(
    settings: tuple[str, ...],
    strategies: str | None,
    steps: int,
    repeats: int,
    directory: Path,
    again: bool,
    longest: bool,
    page: Path | None,
) -> None:
    """Measure SETTINGS (all by default); what DIR holds already is not measured again."""
    for name in settings:
        if name not in SETTINGS:
            raise UserError(f"unknown setting {name!r}; {nearest(name, SETTINGS)}")
    if longest:
        for name, tokens in longest_sequences(directory.resolve()).items():
            click.echo(f"{name:24} {tokens:8,} tokens")
        return
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "trials.jsonl"
    trials = [] if again else _known(results)
    done = {(one.setting, one.strategy, one.repeat) for one in trials}
    for setting in (SETTINGS[name] for name in settings or SETTINGS):
        for repeat in range(repeats):
            for strategy in strategies.split(",") if strategies else setting.strategies:
                if (setting.name, strategy, repeat) in done:
                    continue
                one = trial(setting, strategy, repeat, steps, directory.resolve())
                trials.append(one)
                with results.open("a") as file:
                    file.write(json.dumps(one.to_json()) + "\n")
                click.echo(f"{setting.name:20} {strategy:18} {one.mean_step_s:7.2f} s a step")
    if page is not None:
        write_page(trials, page)


def _known(results: Path) -> list[Trial]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [Trial(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(line).items()}) for line in lines]


def _end(number: int, _frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)


def main() -> int:
    """Run the command; every failure is one line, and no host is left."""
    signal.signal(signal.SIGTERM, _end)
    try:
        cluster.main(standalone_mode=False)
    except (UserError, click.UsageError) as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, click.Abort):
        print("benchmarks.cluster: interrupted; the hosts are gone", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The page of the measurements: a table a setting, and a picture of step times."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.settings import SETTINGS, Setting
from benchmarks.cluster.trial import Trial
from benchmarks.common import hardware
from bytescale.files import write_text_atomically

SETTLED = 5
"""Steps after which imbalance is judged."""

_HEAD = """# A small cluster, in wall time

Hosts are network namespaces with shaped links, each held to a share of one core, so a step takes as long as it would on
as many slow machines. The same batches for all strategies of a setting, trained through `bytescale train`; a step time
is the mean of a run without its first step, the best of the runs that were made. {hardware}.

Made by `python -m benchmarks.cluster`; all figures are measured.
"""


def write_page(trials: Sequence[Trial], path: Path) -> None:
    """Write the page of all settings that were measured."""
    parts = [_HEAD.format(hardware=hardware())]
    parts += [text for setting in SETTINGS.values() if (text := _section(setting, trials))]
    write_text_atomically(path, "\n".join(parts))


def _section(setting: Setting, trials: Sequence[Trial]) -> str:
    best = best_runs(setting.name, trials)
    if not best:
        return ""
    base = best.get(setting.strategies[0])
    balance = best.get("hdp-balance")
    slow = f", host {setting.slow_host} at half its share" if setting.slow_host is not None else ""
    lines = [
        f"## {setting.name}",
        "",
        f"{setting.num_hosts} hosts with {setting.share:.1%} of a core{slow}, links of {setting.link_rate}/s, lengths "
        f"`{setting.lengths}`, {setting.tokens_per_rank:,} tokens a rank, {setting.pp_size} "
        f"stage{'s' * (setting.pp_size > 1)}.",
        "",
        f"| strategy | s/step | over {setting.strategies[0]} | over hdp-balance | imbalance | planning, s | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for strategy in setting.strategies:
        if run := best.get(strategy):
            lines.append(
                f"| {strategy} | {run.mean_step_s:.2f} | {_over(base, run)} | {_over(balance, run)} "
                f"| {statistics.fmean(run.imbalance[SETTLED:] or run.imbalance):.2f} "
                f"| {statistics.median(run.plan_time_s):.2f} | {run.loss[-1]:.6f} |"
            )
    worst = largest_loss_difference(list(best.values()))
    lines += ["", f"Largest difference of a loss between strategies: {worst:.1e}.", ""]
    return "\n".join(lines)


def _over(base: Trial | None, run: Trial) -> str:
    return f"{base.mean_step_s / run.mean_step_s:.2f}x" if base else "-"


def best_runs(setting: str, trials: Sequence[Trial]) -> dict[str, Trial]:
    """The fastest run of every strategy on a setting."""
    found: dict[str, Trial] = {}
    for one in trials:
        known = found.get(one.strategy)
        if one.setting == setting and (known is None or one.mean_step_s < known.mean_step_s):
            found[one.strategy] = one
    return found


def largest_loss_difference(trials: Sequence[Trial]) -> float:
    """Over the steps of runs on the same batches."""
    steps = zip(*(one.loss for one in trials), strict=False)
    return max((max(losses) - min(losses) for losses in steps), default=0.0)

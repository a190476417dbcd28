"""What the planner costs and how good its plans are: speed, the comparison table, real lengths, alternatives.

    python -m benchmarks.planner speed          # p50, p99 and memory of planning
    python -m benchmarks.planner table          # log-normal lengths, dense FLOPs: idle share, degree 1, step / bound
    python -m benchmarks.planner real           # real and generated lengths, 32M tokens, cluster `paper`
    python -m benchmarks.planner pipelines      # four stages: step / bound of all; 2,048 x 8: planning and proof
    python -m benchmarks.planner alternatives   # choices the paper leaves open in hdp-balance, offloading on and off

Each finishes in a minute or two on two cores and prints Markdown. Times are wall times of one process.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from bytescale.arrays import IntArray
from bytescale.cost import CostModel, dense_flops, preset_cost
from bytescale.lengths.source import batches, length_source
from bytescale.plan.step_plan import StepPlan
from bytescale.plan.validate import validate
from bytescale.planner import plan
from bytescale.planner.explain import explain_step

CAPACITY = 8192
SPEED_CASES = ((512, 64, 100), (16_384, 4_096, 5), (100_000, 16_384, 3))
SPEED_COSTS = {
    "dense-flops": dense_flops(),
    "paper": preset_cost("llama-7b", "paper", tp_size=2),
    "h100": preset_cost(),
}
TABLE_RANKS, TABLE_SEQUENCES, TABLE_MEANS = (64, 512, 4096), (512, 4096, 16384), (2048, 8192)
REAL_SOURCES = ("wikipedia", "wlb", "magiattention", "github", "byted")


def lognormal(num: int, mean: float, seed: int = 0) -> IntArray:
    """Log-normal lengths, sigma 1.2, clipped to [16, 131072]."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(mean) - 0.72, 1.2, num).astype(np.int64), 16, 131072)


def timed(lengths: IntArray, strategy: str, ranks: int, cost: CostModel, offload: str) -> tuple[StepPlan, str, float]:
    """A plan, the strategy that made it, and its wall time."""
    begin = time.perf_counter()
    made = plan(
        lengths, strategy, hdp_size=ranks, tokens_per_rank=CAPACITY, cost=cost, offload=offload, allow_blocks=True
    )
    return made, made.origin, time.perf_counter() - begin


def idle_share(made: StepPlan) -> float:
    """1 - work / (ranks * step)."""
    assert made.predicted is not None
    return 1 - float(made.predicted.rank_time_s.sum()) / (made.hdp_size * made.predicted.step_time_s)


def gap(made: StepPlan) -> float:
    """Step / lower bound."""
    assert made.predicted is not None
    return made.predicted.step_time_s / made.predicted.lower_bound_s


def header(*names: str) -> None:
    """The first two lines of a Markdown table."""
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")


def speed() -> None:
    """Median and 99th percentile over seeds and both means, wall and CPU; peak memory of a process of its own."""
    times = ("median ms", "p99 ms", "CPU median ms", "CPU p99 ms")
    header("strategy", "sequences", "ranks", "offload", "cost", "plans", *times, "worst gap", "MiB")
    for strategy, offload in (("best", "off"), ("best", "auto"), ("hdp-balance", "off")):
        for num, ranks, repeats in SPEED_CASES:
            for name, cost in SPEED_COSTS.items():
                wall, cpu, gaps = _speed_of(strategy, num, ranks, repeats, cost, offload)
                figures = [f(values) for values in (wall, cpu) for f in (np.median, lambda v: np.percentile(v, 99))]
                memory = memory_mib(strategy, num, ranks) if (name, offload) == ("paper", "off") else "-"
                print(
                    f"| {strategy} | {num} | {ranks} | {offload} | {name} | {len(wall)} | "
                    f"{' | '.join(f'{1e3 * figure:.0f}' for figure in figures)} | {max(gaps):.4f} | {memory} |",
                    flush=True,
                )


def _speed_of(
    strategy: str, num: int, ranks: int, repeats: int, cost: CostModel, offload: str
) -> tuple[list[float], list[float], list[float]]:
    """Wall seconds, CPU seconds and gap of every plan."""
    wall, cpu, gaps = [], [], []
    for seed in range(repeats):
        for mean in TABLE_MEANS:
            lengths, begin = lognormal(num, mean, seed), time.process_time()
            made, _, elapsed = timed(lengths, strategy, ranks, cost, offload)
            cpu.append(time.process_time() - begin)
            wall.append(elapsed)
            gaps.append(gap(made))
    return wall, cpu, gaps


def memory_mib(strategy: str, num: int, ranks: int) -> str:
    """Peak resident memory of a fresh process that makes one plan, in MiB."""
    command = [sys.executable, "-m", "benchmarks.planner", "memory", strategy, str(num), str(ranks)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def memory(strategy: str, num: int, ranks: int) -> None:
    """One plan; prints this process's peak resident memory."""
    timed(lognormal(num, 8192), strategy, ranks, preset_cost("llama-7b", "paper", tp_size=2), "off")
    # The high-water mark since exec; getrusage would count the parent's memory at the time of the fork.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(f"{int(line.split()[1]) / 1024:.0f}")


def table(strategy: str) -> None:
    """The rows of the published comparison, and step / bound of the same lengths under the `paper` cost."""
    names = ("ranks", "sequences", "mean", "plan ms", "idle", "short at degree 1", "gap", "made by", "`paper` gap")
    header(*names)
    for ranks in TABLE_RANKS:
        for num in TABLE_SEQUENCES:
            for mean in TABLE_MEANS:
                lengths = lognormal(num, mean)
                made, origin, elapsed = timed(lengths, strategy, ranks, dense_flops(), "off")
                validate(made)
                short = made.sequence_degrees()[lengths <= CAPACITY] == 1
                paper, paper_origin, _ = timed(
                    lengths, strategy, ranks, preset_cost("llama-7b", "paper", tp_size=2), "off"
                )
                print(
                    f"| {ranks} | {num} | {mean} | {1e3 * elapsed:.0f} | {idle_share(made):.2%} | {short.mean():.1%} | "
                    f"{gap(made):.4f} | {origin} | {gap(paper):.4f} ({paper_origin}) |",
                    flush=True,
                )


def real(strategy: str, num_batches: int) -> None:
    """32M tokens on 64, 256 and 1,024 ranks, offloading chosen; 64 ranks: lengths cut at 524,288."""
    cost = preset_cost("llama-7b", "paper", tp_size=2)
    names = ("lengths", "ranks", "sequences", "longest", "gap", "worst", "imbalance", "plan ms", "bound", "made by")
    header(*names)
    origins: Counter[str] = Counter()
    for source in REAL_SOURCES:
        for ranks in (64, 256, 1024):
            gaps, imbalances, times, bounds = [], [], [], []
            here: Counter[str] = Counter()
            for lengths in batches(length_source(source), num_batches, 0, tokens=32 * 2**20):
                cut = np.minimum(lengths, 524_288) if ranks == 64 else lengths
                made, origin, elapsed = timed(cut, strategy, ranks, cost, "auto")
                validate(made)
                assert made.predicted is not None
                gaps.append(gap(made))
                imbalances.append(made.predicted.imbalance)
                times.append(1e3 * elapsed)
                here[origin] += 1
                step = explain_step(made, cost)
                bounds.append("work" if step.bound_by == "work" else f"sequence of {step.longest_length}")
            origins += here
            print(
                f"| {source} | {ranks} | {len(cut)} | {cut.max()} | {np.mean(gaps):.4f} | {max(gaps):.4f} | "
                f"{max(imbalances):.4f} | {np.median(times):.0f} | {', '.join(sorted(set(bounds)))} | "
                f"{', '.join(f'{n} {o}' for o, n in here.items())} |",
                flush=True,
            )
    print(f"\nPlans by origin: {dict(origins)}")


def pipelines() -> None:
    """Step / bound of every strategy in pipelines of four stages, 8M tokens."""
    names = ("static", "megatron-hybrid", "megatron-dynamic", "hdp-balance", "flexible-cp", "flexsp", "wlb-llm")
    names = (*names, "best", "chunked")
    header("model, ranks, lengths", *names, "`best` made by")
    for model, ranks, tp_size in (("llama-70b", 64, 8), ("mistral-8x7b", 128, 4)):
        cost = preset_cost(model, "paper", tp_size=tp_size)
        for source in ("github", "byted", "wikipedia"):
            (lengths,) = batches(length_source(source), 1, 0, tokens=8 * 2**20)
            lengths = np.minimum(lengths, ranks * CAPACITY)
            made = {
                name: plan(lengths, name, hdp_size=ranks, tokens_per_rank=CAPACITY, cost=cost, pp_size=4, offload="off")
                for name in names
            }
            row = " | ".join(f"{gap(made[name]):.2f}" for name in names)
            print(f"| {model}, {ranks}, {source} | {row} | {made['best'].origin} |", flush=True)
    print()
    large_pipelines()


def large_pipelines() -> None:
    """2,048 pipelines of 8 stages with 32M GitHub tokens: what planning and the validator's proof take."""
    cost = preset_cost("llama-70b", "h100", tp_size=8)
    (lengths,) = batches(length_source("github"), 1, 0, tokens=32 * 2**20)
    header("strategy", "pieces", "operations", "step s", "plan s", "validate s", "validate CPU s")
    for strategy in ("static", "hdp-balance", "best", "chunked"):
        begin = time.perf_counter()
        made = plan(
            lengths,
            strategy,
            hdp_size=2048,
            tokens_per_rank=CAPACITY,
            cost=cost,
            pp_size=8,
            offload="off",
            allow_blocks=True,
        )
        plan_s = time.perf_counter() - begin
        begin, cpu_begin = time.perf_counter(), time.process_time()
        validate(made)
        proof_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
        assert made.predicted is not None
        operations = 2 * made.pp_size * int(made.num_micro_batches().sum())
        print(
            f"| {strategy} | {len(made.pieces)} | {operations} | {made.predicted.step_time_s:.2f} | {plan_s:.2f} | "
            f"{proof_s:.2f} | {cpu_s:.2f} |",
            flush=True,
        )


def alternatives() -> None:
    """`hdp-balance` under other numbers of buckets and deltas, and the paper's offloading rule."""
    from bytescale.planner.parts.degrees import paper_degrees
    from bytescale.planner.parts.timing import predicted
    from bytescale.planner.parts.units import units_of
    from bytescale.planner.problem import make_problem
    from bytescale.planner.strategies.hdp_balance import balance_units

    cost = preset_cost("llama-7b", "paper", tp_size=2)
    header("lengths", "ranks", "buckets", "delta", "step / bound")
    for source, ranks in (("github", 256), ("byted", 256), ("wikipedia", 256)):
        (lengths,) = batches(length_source(source), 1, 0, tokens=32 * 2**20)
        asked = make_problem(lengths, hdp_size=ranks, tokens_per_rank=CAPACITY, cost=cost)
        choice = paper_degrees(asked)
        units = units_of(asked, choice.degree, choice.offload_ratio, CAPACITY)
        for buckets in (1, 8, 64):
            for delta in (0.0, 0.5, 1.0, 2.0):
                placed = balance_units(units.degree, units.time_s, asked, buckets, delta)
                made = predicted(asked, units.plan(asked, "hdp-balance", placed))
                print(f"| {source} | {ranks} | {buckets} | {delta} | {gap(made):.4f} |", flush=True)
    print()
    header("lengths", "ranks", "strategy", "step, offload off s", "step, offload auto s")
    for source, ranks in (("github", 512), ("byted", 512)):
        (lengths,) = batches(length_source(source), 1, 0, tokens=32 * 2**20)
        for strategy in ("hdp-naive", "hdp-balance", "best"):
            steps = []
            for offload in ("off", "auto"):
                made, _, _ = timed(lengths, strategy, ranks, cost, offload)
                assert made.predicted is not None
                steps.append(made.predicted.step_time_s)
            print(f"| {source} | {ranks} | {strategy} | {steps[0]:.2f} | {steps[1]:.2f} |", flush=True)


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "table", "real", "pipelines", "alternatives", "memory"))
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--strategy", default="best")
    parser.add_argument("--batches", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.part == "speed":
        speed()
    elif chosen.part == "memory":
        memory(chosen.arguments[0], int(chosen.arguments[1]), int(chosen.arguments[2]))
    elif chosen.part == "table":
        table(chosen.strategy)
    elif chosen.part == "real":
        real(chosen.strategy, chosen.batches)
    elif chosen.part == "pipelines":
        pipelines()
    else:
        alternatives()


if __name__ == "__main__":
    main()

"""The page `docs/reproduction.md`: tables, pictures, what agrees, what does not and the likely reason.

Numbers in the text are computed from the rows; judgements stand in
`notes.toml` and hold for the constants of the file.
Invariant: the same rows give the same page.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from bytescale.cost.presets import paper_constants
from bytescale.reproduction.calibration import CONSTANT_FILES, constant, paper_cluster
from bytescale.reproduction.figures.beyond import CHUNKED, OTHER_SETTINGS
from bytescale.reproduction.figures.throughput import MODELS, decay, orders_that_fail
from bytescale.reproduction.page.plots import has_picture
from bytescale.reproduction.page.tables import rows_markdown
from bytescale.reproduction.rows import Row, geometric_error

Rows = Mapping[str, Sequence[Row]]

_COLUMNS = {
    "fig17": (),
    "beyond": (
        "gap",
        "gap_most",
        "longest_binds",
        "exposed_communication",
        "gang_wait",
        "pp_bubble",
        "dp_bubble",
        "main_loss",
        "taken_from",
        "speedup",
    ),
}


def reproduction_page(rows: Rows, num_batches: int) -> str:
    """The whole page as Markdown."""
    words = _words()
    parts = [words["introduction"] + "\n", _summary(rows), _rules(words["rules"], num_batches) + "\n"]
    for name, own in rows.items():
        parts.append(f"## {_title(name)}\n\n")
        if has_picture(name, own):
            parts.append(f"![{name}](images/reproduce-{name}.svg)\n\n")
        if name == "fig17":
            parts.append(_throughput_section(own) + words["notes"][name] + "\n")
            parts.append(rows_markdown(decay(list(own))) + words["notes"]["decay"] + "\n")
            continue
        parts.append(rows_markdown(own, _COLUMNS.get(name)) + "\n")
        if name == "beyond":
            parts.append(_beyond_words(own))
        parts.append(words["notes"].get(name, "") + "\n")
    return "".join(parts).rstrip() + "\n"


def _words() -> dict[str, Any]:
    """What is not computed, from `notes.toml`."""
    return tomllib.loads(resources.files("bytescale.reproduction.page").joinpath("notes.toml").read_text("utf-8"))


def _title(name: str) -> str:
    words = {
        "holdout": "Held out: what the constants predict beyond what they were fitted to",
        "labels": "Byted with the labels of Fig. 4: sensitivity",
        "offload": "The offload step under each rule",
        "beyond": "Beyond the paper: all strategies on the same batches",
        "scaling": "Scaling from 64 to 16,384 ranks",
    }
    return words.get(name, f"Fig. {name.removeprefix('fig')}")


def _rules(words: str, num_batches: int) -> str:
    constants = [
        f"| {name.replace('_', ' ')} | {entry['value']:g} | {entry['unit']} | {entry['source']} |"
        for name, entry in paper_constants().items()
    ]
    layouts = []
    for model in MODELS:
        c = paper_cluster(model)
        edge = float(c.tokens_per_rank)
        cells = (
            model,
            f"{c.tp_size} x {c.pp_size} x {c.hdp_size}",
            f"{c.num_gpus:,}",
            f"{1e3 * c.cost.forward.square_s * edge**2:.2f}",
            f"{1e3 * c.cost.forward.token_s * edge:.1f}",
            f"{1e3 * float(c.cost.inter_node.time_s(edge * c.cost.kv_bytes_per_token)):.2f}",
        )
        layouts.append("| " + " | ".join(cells) + " |")
    return words.format(
        num=num_batches,
        files="`, `".join(CONSTANT_FILES),
        update=constant("update_s"),
        constants="\n".join(constants),
        layouts="\n".join(layouts),
    )


def _summary(rows: Rows) -> str:
    """What agrees and what does not, in numbers."""
    makers = (_fig17_words, _holdout_words, _fig20_words, _fig18_words, _fig21_words)
    lines = [line for maker in makers for line in maker(rows)]
    lines.append("- Figs. 6, 19 and the offload step of Fig. 20 disagree in part; each section says why.")
    return "\n".join(["## In short\n", *lines]) + "\n\n"


def _fig17_words(rows: Rows) -> Iterator[str]:
    own = list(rows.get("fig17", ()))
    if not own:
        return
    off = sum(abs(math.log(r.ratio or 1.0)) > math.log(1.25) for r in own)
    at_2m = []
    for data in ("github", "byted"):
        ratios = [r.ratio or 0.0 for r in own if (r.data, r.context, r.system) == (data, "2M", "hdp-balance")]
        at_2m.append(f"{min(ratios):.2f} to {max(ratios):.2f} times the printed speedup on {data}")
    yield (
        f"- Fig. 17, fitted: geometric-mean error of the 96 speedups {100 * geometric_error(own):.1f} %, {off} of them "
        f"off by more than 25 %. Three rates of one cluster were fitted to these very speedups. At 2M balance lies at "
        f"{' and '.join(at_2m)}."
    )
    failed = orders_that_fail(own)
    yield "- Orders of Fig. 17: " + ("all hold." if not failed else "; ".join(failed) + ".")
    falls = [f"{r.system} {r.ours:.2f} ({r.paper:g})" for r in decay(own) if r.paper]
    yield f"- Throughput lost per doubling of the context on GitHub, ours (paper): {', '.join(falls)} times."


def _holdout_words(rows: Rows) -> Iterator[str]:
    own = rows.get("holdout", ())
    whole = [f"{r.extra['split']} {100 * r.ours:.1f} %" for r in own if r.model == "all"]
    if whole:
        yield f"- Predicted, held out: {', '.join(whole)}."
    alone = [r for r in own if r.quantity.endswith("one cluster")]
    if alone:
        shared = 100 * float(np.mean([r.ours for r in alone]))
        each = 100 * float(np.mean([r.extra["fitted_error"] for r in alone]))
        worst = max(alone, key=lambda r: r.ours)
        yield (
            f"- One cluster for all six models errs by {shared:.1f} % in the mean, {100 * worst.ours:.1f} % for "
            f"{worst.model}; with rates of its own for every model, fitted to it, {each:.1f} %."
        )


def _fig20_words(rows: Rows) -> Iterator[str]:
    steps = {r.system: r for r in rows.get("fig20", ()) if r.paper}
    if steps:
        words = ", ".join(f"{name} {r.ours:.2f} ({r.paper:.2f})" for name, r in steps.items())
        yield (
            f"- Fig. 20, ours (paper): {words}. **The gain of offloading is not reproduced:** its step is "
            f"{steps['offload'].extra['factor']:.2f} here, {steps['offload'].extra['paper_factor']:.2f} there."
        )


def _fig18_words(rows: Rows) -> Iterator[str]:
    own = {r.quantity: r for r in rows.get("fig18", ()) if r.system == "static"}
    share = own.get("communication share, ring / (ring + feed-forward)")
    if share and share.paper:
        exposed = own["exposed communication / step, whole static step"].ours
        yield (
            f"- Fig. 18: communication {100 * share.ours:.1f} % of a static layer, printed {100 * share.paper:.1f} %; "
            "both count whole ring steps, their compute included. Exposed communication alone is "
            f"{100 * exposed:.1f} % of our static step."
        )


def _fig21_words(rows: Rows) -> Iterator[str]:
    if full := [r for r in rows.get("fig21", ()) if r.quantity.endswith("offload 1") and r.context == "64K"]:
        yield f"- Fig. 21: offloading everything at 64K costs {100 * (full[0].ours - 1):.0f} % (28 %), nothing at 256K."


def _throughput_section(rows: Sequence[Row]) -> str:
    """Speedups as a grid, then errors by group, then tokens/s beside the paper's."""
    lines = ["Ours / paper, naive and balance.\n", _grid(rows, lambda r: f"{r.ours:.2f} / {r.paper:.2f}")]
    lines.append("Geometric-mean error, per cent:\n")
    lines.append("| model | all | naive | balance | baseline tokens/s | naive tokens/s | balance tokens/s |")
    lines.append("| --- " * 7 + "|")
    for model in [*MODELS, None]:
        own = [r for r in rows if model is None or r.model == model]
        naive, balance = ([r for r in own if r.system == s] for s in ("hdp-naive", "hdp-balance"))
        cells = [geometric_error(own), geometric_error(naive), geometric_error(balance)]
        cells += [
            _rate_error(balance, "static_tokens_per_s"),
            _rate_error(naive, "tokens_per_s"),
            _rate_error(balance, "tokens_per_s"),
        ]
        lines.append(f"| {model or 'all'} | " + " | ".join(f"{100 * c:.1f}" for c in cells) + " |")
    lines.append("\nThousand tokens/s, ours / paper (the paper's are read from the figure's pixels, 1 to 3 %):\n")
    lines.append(
        _grid(rows, lambda r: f"{r.extra['tokens_per_s'] / 1e3:.0f} / {r.extra['paper_tokens_per_s'] / 1e3:.0f}", True)
    )
    return "\n".join(lines) + "\n"


def _rate_error(rows: Sequence[Row], key: str) -> float:
    logs = [abs(math.log(r.extra[key] / r.extra[f"paper_{key}"])) for r in rows]
    return float(np.expm1(np.mean(logs)))


def _grid(rows: Sequence[Row], cell: Callable[[Row], str], with_static: bool = False) -> str:
    """One line a model, data set and system; contexts across."""
    contexts = list(dict.fromkeys(r.context for r in rows))
    lines = [
        "| model | data | system | " + " | ".join(str(c) for c in contexts) + " |",
        "| --- " * (3 + len(contexts)) + "|",
    ]
    for model in MODELS:
        for data in ("github", "byted"):
            own = {(r.system, r.context): r for r in rows if r.model == model and r.data == data}
            if with_static:
                base = [own["hdp-balance", c].extra for c in contexts]
                values = (
                    f"{e['static_tokens_per_s'] / 1e3:.0f} / {e['paper_static_tokens_per_s'] / 1e3:.0f}" for e in base
                )
                lines.append(f"| {model} | {data} | static | " + " | ".join(values) + " |")
            for system in ("hdp-naive", "hdp-balance"):
                values = (cell(own[system, c]) for c in contexts)
                lines.append(f"| {model} | {data} | {system} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _beyond_words(rows: Sequence[Row]) -> str:
    """`best` against all others, batch by batch, and against the bound."""
    worst = 1.0
    lead: dict[tuple[str | None, str | None], float] = {}
    for row in rows:
        if row.system in ("best", CHUNKED, *OTHER_SETTINGS):
            continue
        best = next(r for r in rows if (r.model, r.data, r.system) == (row.model, row.data, "best"))
        if row.model != "llama-7b":
            cell = (row.model, row.data)
            lead[cell] = min(lead.get(cell, math.inf), best.ours / row.ours)
        pairs = zip(best.extra["step_s_each"], row.extra["step_s_each"], strict=True)
        worst = max(worst, *(ours / other for ours, other in pairs))
    plain = [r.extra["gap_most"] for r in rows if r.system == "best" and r.model == "llama-7b"]
    piped = [r.extra["gap"] for r in rows if r.system == "best" and r.model != "llama-7b"]
    balance = [r.extra["gap"] for r in rows if r.system == "hdp-balance" and r.model != "llama-7b"]
    chunked = [r.extra for r in rows if r.system == "chunked"]
    chunks = [extra["over_hdp_balance"] for extra in chunked]
    chunk_gaps = [extra["gap"] for extra in chunked]
    kept, gradients = (max(extra[key] for extra in chunked) for key in ("in_flight_share", "kept_gradient_share"))
    never = (
        "never slower than another strategy under the same memory and the same attention"
        if worst <= 1 + 1e-9
        else f"at worst {worst:.3f} times as slow as another strategy"
    )
    return (
        f"`best` is {never}, batch by batch. Without a pipeline it lies within {100 * (max(plain) - 1):.1f} % of the\n"
        f"bound in the worst batch. With one it takes {min(piped):.2f} to {max(piped):.2f} times the bound,\n"
        f"hdp-balance {min(balance):.2f} to {max(balance):.2f}; the bound lets all stages work all the time, while a\n"
        "long sequence crosses them one after another. It is "
        f"{math.exp(np.mean(np.log(list(lead.values())))):.2f} times as fast as the best other strategy of each\n"
        "cell, in the geometric mean. "
        "`chunked` takes "
        f"{min(chunk_gaps):.2f} to {max(chunk_gaps):.2f} times the bound and\n"
        f"is {min(chunks):.2f} to {max(chunks):.2f} times as fast as hdp-balance. Between forward and backward it\n"
        f"holds at most {kept:.2f} times what whole sequences may, gradients of kept keys and values (up to "
        f"{100 * gradients:.0f} % of a\nkept token's activations) included.\n\n"
    )

"""Plans for tests: a readable way to write one down, and random valid ones."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from bytescale.plan.step_plan import StepPlan, step_plan
from bytescale.plan.text import plan_from_text
from bytescale.plan.zigzag import piece_tokens


def drawn(lengths: str, *ranks: str, **scalars: object) -> StepPlan:
    """The plan with these lengths and one line a rank, written as in `bytescale.plan.text`."""
    head = " ".join(f"{key}={value}" for key, value in ({"tokens_per_rank": 10**6, "num_layers": 2} | scalars).items())
    lines = (f"rank {rank}: {line}" for rank, line in enumerate(ranks))
    return plan_from_text("\n".join([f"plan by-hand: {head}", f"lengths: {lengths}", *lines]))


def drawn_in_chunks(lengths: str, *ranks: str, pp_size: int = 2) -> StepPlan:
    """`drawn` in the layout `chunks`."""
    return drawn(lengths, *ranks, pp_size=pp_size, layout="chunks", kept_gradient_share=0.25)


def plan_of(
    lengths: Sequence[int], ranks: Sequence[Sequence[Sequence[int]]], *, pp_size: int = 1, tokens_per_rank: int = 10**6
) -> StepPlan:
    """The plan in which `ranks[r][m]` lists the sequences of micro-batch m of rank r; indices follow the ranks."""
    rows = [(s, r, m) for r, mbs in enumerate(ranks) for m, members in enumerate(mbs) for s in members]
    degree = {s: sum(1 for row in rows if row[0] == s) for s in range(len(lengths))}
    seen: dict[int, int] = {}
    index = [seen.update({s: seen.get(s, -1) + 1}) or seen[s] for s, _, _ in rows]
    return step_plan(
        strategy="by-hand",
        hdp_size=len(ranks),
        tokens_per_rank=tokens_per_rank,
        num_layers=4,
        lengths=lengths,
        sequence=[s for s, _, _ in rows],
        rank=[r for _, r, _ in rows],
        micro_batch=[m for _, _, m in rows],
        tokens=[piece_tokens(lengths[s], degree[s], k) for (s, _, _), k in zip(rows, index, strict=True)],
        cp_degree=[degree[s] for s, _, _ in rows],
        cp_index=index,
        pp_size=pp_size,
    )


def columns_of(plan: StepPlan) -> dict[str, list[float]]:
    """The columns of `plan`, to be changed and handed to `rebuilt`."""
    names = ("sequence", "rank", "micro_batch", "tokens", "offload_ratio", "cp_degree", "cp_index")
    return {name: getattr(plan.pieces, name).tolist() for name in names}


def rebuilt(plan: StepPlan, columns: Mapping[str, list[float]], **scalars: object) -> StepPlan:
    """`plan` with other columns and scalars."""
    values: dict[str, object] = {
        "strategy": plan.strategy,
        "hdp_size": plan.hdp_size,
        "pp_size": plan.pp_size,
        "tokens_per_rank": plan.tokens_per_rank,
        "num_layers": plan.num_layers,
        "lengths": plan.lengths,
    }
    return step_plan(**(values | scalars | dict(columns)))


@st.composite
def valid_plans(
    draw: st.DrawFn, min_ranks: int = 1, max_ranks: int = 6, max_sequences: int = 12, pp_size: int = 1
) -> StepPlan:
    """A legal plan: waves of gangs, each on its own ranks, with sequences of several degrees inside."""
    hdp_size = draw(st.integers(min_ranks, max_ranks))
    num_sequences = draw(st.integers(1, max_sequences))
    lengths = draw(st.lists(st.integers(1, 200), min_size=num_sequences, max_size=num_sequences))
    ranks: list[list[list[int]]] = [[] for _ in range(hdp_size)]
    order = np.array(draw(st.permutations(range(num_sequences))))
    for members in np.array_split(order, draw(st.integers(1, num_sequences))):
        used = draw(st.permutations(range(hdp_size)))[: draw(st.integers(1, hdp_size))]
        fresh: dict[int, list[int]] = {}
        for sequence in sorted(int(s) for s in members):
            for rank in draw(st.lists(st.sampled_from(used), min_size=1, unique=True)):
                fresh.setdefault(rank, []).append(sequence)
        for rank, batch in fresh.items():
            ranks[rank].append(batch)
    return plan_of(lengths, ranks, pp_size=pp_size)


def placed(
    lengths: Sequence[int],
    placement: Sequence[Sequence[tuple[int, int]]],
    hdp_size: int,
    *,
    num_layers: int = 2,
    pp_size: int = 1,
    tokens_per_rank: int = 10**6,
) -> StepPlan:
    """The plan in which sequence i lies on the (rank, micro_batch) pairs of `placement[i]`, in order of cp_index."""
    rows = [
        (i, rank, micro_batch, len(pairs), k, piece_tokens(lengths[i], len(pairs), k))
        for i, pairs in enumerate(placement)
        for k, (rank, micro_batch) in enumerate(pairs)
    ]
    names = ("sequence", "rank", "micro_batch", "cp_degree", "cp_index", "tokens")
    return step_plan(
        strategy="by-hand",
        hdp_size=hdp_size,
        tokens_per_rank=tokens_per_rank,
        num_layers=num_layers,
        pp_size=pp_size,
        lengths=lengths,
        **{name: [row[j] for row in rows] for j, name in enumerate(names)},
    )


Chunk = tuple[int, Sequence[tuple[int, int]]]
"""End of a chunk in its sequence, and the (rank, micro_batch) pairs that hold it."""


def in_chunks(
    lengths: Sequence[int],
    chunks: Sequence[Sequence[Chunk]],
    hdp_size: int,
    *,
    pp_size: int = 2,
    num_layers: int = 2,
    tokens_per_rank: int = 10**6,
) -> StepPlan:
    """The plan in which sequence i runs as `chunks[i]`, pairs in order of cp_index."""
    rows = []
    for i, parts in enumerate(chunks):
        begin = 0
        for end, pairs in parts:
            for k, (rank, micro_batch) in enumerate(pairs):
                tokens = int(piece_tokens(end - begin, len(pairs), k))
                rows.append((i, rank, micro_batch, len(pairs), k, tokens, begin, end))
            begin = end
    names = ("sequence", "rank", "micro_batch", "cp_degree", "cp_index", "tokens", "token_begin", "token_end")
    return step_plan(
        strategy="by-hand",
        hdp_size=hdp_size,
        tokens_per_rank=tokens_per_rank,
        num_layers=num_layers,
        pp_size=pp_size,
        lengths=lengths,
        kept_gradient_share=0.25,
        **{name: [row[j] for row in rows] for j, name in enumerate(names)},
    )


@st.composite
def chunked_plans(draw: st.DrawFn, hdp_size: int, pp_size: int, max_sequences: int = 6) -> StepPlan:
    """A legal plan in chunks: each sequence on ranks with equally many micro-batches, shared or alone."""
    lengths, chunks = [], []
    counts = [0] * hdp_size
    for _ in range(draw(st.integers(1, max_sequences))):
        level = draw(st.sampled_from(sorted(set(counts))))
        free = draw(st.permutations([rank for rank in range(hdp_size) if counts[rank] == level]))
        ranks = free[: draw(st.integers(1, len(free)))]
        num = draw(st.integers(1, 4))
        sizes = draw(st.lists(st.integers(len(ranks), 40), min_size=num, max_size=num))
        ends = np.cumsum(sizes).tolist()
        chunks.append([(end, [(rank, level + i) for rank in ranks]) for i, end in enumerate(ends)])
        lengths.append(ends[-1])
        for rank in ranks:
            counts[rank] += num
    return in_chunks(lengths, chunks, hdp_size, pp_size=pp_size)

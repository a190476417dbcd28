"""What a step costs besides its micro-batches: collectives over HDP, the optimizer, reading and planning the batch.

    gather = (1 - 1/N) * parameter bytes / bandwidth + ceil(log2 N) * latency,   reduce alike with gradient bytes,

over the N = hdp_size ranks, with the parameters of one GPU (tensor and pipeline parallel divide them); nothing hides
them, since the compute phase of a step holds point-to-point traffic alone. Reading and planning of step n + 1 overlap
step n: what is longer than a step is exposed. Without prefetching all of it is.

Invariant: `StepOverheads()` adds nothing, so the simulated step equals the plan's predicted one. Cost: O(1).
"""

from dataclasses import dataclass

from bytescale.cost.model import ClusterSpec, Link, ModelShape


@dataclass(frozen=True)
class StepOverheads:
    """Seconds that every rank spends once a step, and the link between pipeline stages.

    Attributes:
        gather_s: parameters made whole before the first micro-batch.
        reduce_s: gradients summed over all HDP ranks after the last one.
        update_s: optimizer and everything else at the end of a step.
        loading_s: reading the batch.
        planning_s: planning it.
        prefetch: loading and planning run during the step before.
        stage_link: carries hidden states to the next stage; None costs nothing.
        stage_bytes_per_token: bytes of the hidden state of one token.
    """

    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    loading_s: float = 0.0
    planning_s: float = 0.0
    prefetch: bool = True
    stage_link: Link | None = None
    stage_bytes_per_token: float = 0.0

    def exposed_input_s(self, step_s: float) -> float:
        """Loading and planning that a step of `step_s` does not hide."""
        needed_s = self.loading_s + self.planning_s
        return max(0.0, needed_s - step_s) if self.prefetch else needed_s


PARAMETER_BYTES = 2
GRADIENT_BYTES = 4


def step_overheads(
    model: ModelShape,
    cluster: ClusterSpec,
    *,
    hdp_size: int,
    tp_size: int = 1,
    pp_size: int = 1,
    update_s: float = 0.0,
    loading_s: float = 0.0,
    planning_s: float = 0.0,
    prefetch: bool = True,
) -> StepOverheads:
    """Collectives and stage transfers of `model` on `cluster`."""
    parameters = model.num_parameters / (tp_size * pp_size)
    one_node = hdp_size * tp_size <= cluster.gpus_per_node
    link = cluster.intra_node if one_node else cluster.inter_node
    return StepOverheads(
        gather_s=collective_s(parameters * PARAMETER_BYTES, hdp_size, link),
        reduce_s=collective_s(parameters * GRADIENT_BYTES, hdp_size, link),
        update_s=update_s,
        loading_s=loading_s,
        planning_s=planning_s,
        prefetch=prefetch,
        stage_link=cluster.inter_node if pp_size > 1 else None,
        stage_bytes_per_token=model.hidden_size * model.dtype_bytes / tp_size,
    )


def collective_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """All-gather or reduce-scatter of `num_bytes`; the latency grows with the logarithm of the ranks (a tree)."""
    if num_ranks == 1:
        return 0.0
    rounds = (num_ranks - 1).bit_length()
    return num_bytes * (num_ranks - 1) / num_ranks / link.bytes_per_s + rounds * link.latency_s

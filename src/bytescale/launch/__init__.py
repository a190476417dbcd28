"""Local ranks, forked from a process that has imported once, and the one error of a failed run.

`launch` runs a function as N ranks and `run_apart` in one child, `run_with_restarts` does so again after a failure,
`rendezvous` is where ranks meet, `interruptible` ends a process by signals that were not ignored from the start,
`torchrun` reads and writes what torchrun expects.
"""

from bytescale.launch.child import ignore_input
from bytescale.launch.failure import Complaint, RankFailure, complaint, describe
from bytescale.launch.ranks import launch, run_apart, shared_threads
from bytescale.launch.restarts import ATTEMPT_VARIABLE, run_with_restarts
from bytescale.launch.signals import interruptible
from bytescale.launch.store import rendezvous

__all__ = [
    "ATTEMPT_VARIABLE",
    "Complaint",
    "RankFailure",
    "complaint",
    "describe",
    "ignore_input",
    "interruptible",
    "launch",
    "rendezvous",
    "run_apart",
    "run_with_restarts",
    "shared_threads",
]

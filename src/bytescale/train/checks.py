"""Checks that need no torch, so that a typo is answered within half a second.

Cost: one listing of the data's files; nothing is read but a profile.
"""

from pathlib import Path

from bytescale.config.schema import Config
from bytescale.config.tokenizer import check_tokenizer
from bytescale.cost.profile import read_profile
from bytescale.data.dataset import in_words_of
from bytescale.data.sources.source import open_source
from bytescale.data.tokenizers import tokenizer_file
from bytescale.errors import UserError, nearest
from bytescale.planner import STRATEGIES
from bytescale.report.writers import check_writers
from bytescale.runtime.model.origin import check_origin
from bytescale.train.evaluation.held_out import check_held_out
from bytescale.train.resuming.origin import checkpoint_dir, find_origin
from bytescale.train.run_dir import check_checkpoint_dir, check_run_dir


def check_first(config: Config, world_size: int) -> None:
    """Whether names, paths, mesh and run directory of `config` can work; makes the run directory when they can.

    Raises:
        UserError: one of them cannot.
    """
    if config.plan.strategy not in STRATEGIES:
        raise UserError(f"unknown plan.strategy {config.plan.strategy!r}; {nearest(config.plan.strategy, STRATEGIES)}")
    config.parallel.check_world_size(world_size)
    check_origin(config.model)
    check_tokenizer(config)
    tokenizer_file(config.data)
    for source in config.data.named_sources:
        with in_words_of(source.name or ""):
            open_source(source)
    check_held_out(config)
    check_writers(config.run.writers)
    if config.plan.profile is not None:
        read_profile(Path(config.plan.profile))
    check_directories(config)


def check_directories(config: Config) -> None:
    """Whether the run can write where it will, and go on from what it is to go on from.

    Raises:
        UserError: it cannot.
    """
    origin = find_origin(config)
    overwrite = config.run.overwrite or origin.may_clear
    check_run_dir(Path(config.run.dir), save_model=config.run.save_model, overwrite=overwrite, goes_on=origin.goes_on)
    if config.checkpoint.every is not None:
        check_checkpoint_dir(checkpoint_dir(config), overwrite=overwrite, goes_on=origin.goes_on)

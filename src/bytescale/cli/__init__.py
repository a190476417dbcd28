"""The command line: which commands there are, and how every failure ends.

Commands are loaded when they are called, so `bytescale --help` and the planning commands start without torch. Exit
codes: 0 success; 2 bad input, with one line on standard error and no traceback; 1 a failure at run time, with the
traceback unless it is a lost peer or a run that cannot go on (`CommunicationError`, `RunError`: one line); 130 after
Ctrl-C, 128 + n after another signal n that ended a run.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import click

from bytescale import __version__
from bytescale.cli.ranks import fail
from bytescale.errors import Interrupted, UserError, nearest
from bytescale.report.output import say, silence

_COMMANDS = {
    "train": ("bytescale.cli.train", "Train a model on sequences of mixed length."),
    "plan": ("bytescale.cli.plan", "Place sequences on ranks and prove the plan."),
    "data": ("bytescale.cli.inputs.data", "What a run would see of its data."),
    "lengths": ("bytescale.cli.lengths", "Statistics of sequence lengths."),
    "compare": ("bytescale.cli.compare", "Several strategies on the same batches, side by side."),
    "profile": ("bytescale.cli.profile", "Measure this machine for a model and fit the cost model."),
    "report": ("bytescale.cli.results.report", "Write the report of a run directory as one HTML file."),
    "runs": ("bytescale.cli.results.runs", "List the runs below a directory."),
    "export": ("bytescale.cli.results.export", "Write the model of a checkpoint for other programs."),
    "simulate": ("bytescale.cli.simulate", "Run a plan on a described cluster, or find the longest context."),
    "reproduce": ("bytescale.cli.reproduce", "The published figures beside ours."),
}
"""Name -> (module, one line of help). The module holds a click command of that name."""


class _Commands(click.Group):
    """A group whose commands are imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            raise UserError(f"unknown command {cmd_name!r}; {nearest(cmd_name, _COMMANDS)}")
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        commands = [value for value in vars(module).values() if isinstance(value, click.Command)]
        return next(command for command in commands if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in _COMMANDS.items()])


@click.group(cls=_Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="bytescale", message="%(prog)s %(version)s")
@click.pass_context
def bytescale(ctx: click.Context) -> None:
    """Train language models on mixtures of short and very long sequences with Hybrid Data Parallelism."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Nothing but the code and the output is a result.

    Args:
        arguments: the words after the program's name; None takes those of this process.
    """
    _open_standard_streams()
    try:
        result = bytescale.main(args=arguments, prog_name="bytescale", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader of a listing (head, less) went away: end quietly. A training run goes on, see `say`.
        silence(sys.stdout)
        return 1
    except Interrupted as error:
        if str(error):
            say(f"bytescale: {error}", sys.stderr)
        return 128 + error.signal_number
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.ClickException as error:
        return fail(UserError(error.format_message()))
    except Exception as error:
        return fail(error)


def _open_standard_streams() -> None:
    """Whoever started us may have closed them; their numbers must not be given to files of ours."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")

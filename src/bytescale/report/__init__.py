"""What a person sees of a run: progress lines, the closing table, and one self-contained HTML file.

Reads values and files of a run directory only, never the runtime, and needs no torch: a report can be made anywhere
from a copied run directory. The trainer uses the progress lines and stores the summary; the command line shows it and
writes the report.
"""

from bytescale.report.progress import EvaluationLine, Progress, StepLine, evaluation_line, progress_line
from bytescale.report.run_report import write_report
from bytescale.report.summary import RunIdentity, RunSummary, read_summary, summary_table, write_summary

__all__ = [
    "EvaluationLine",
    "Progress",
    "RunIdentity",
    "RunSummary",
    "StepLine",
    "evaluation_line",
    "progress_line",
    "read_summary",
    "summary_table",
    "write_report",
    "write_summary",
]

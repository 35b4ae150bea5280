"""A page about a fit."""

from lightning_commopt.callbacks.report.comparison import NamedRun, compared, names_of, render_comparison
from lightning_commopt.callbacks.report.content import Measured, ReportContent
from lightning_commopt.callbacks.report.page import check_can_report, render, write
from lightning_commopt.callbacks.report.recording import ReportRecording
from lightning_commopt.callbacks.report.run_file import RunFileError, read_run, run_files, write_atomically, write_run

__all__ = [
    "Measured",
    "NamedRun",
    "ReportContent",
    "ReportRecording",
    "RunFileError",
    "check_can_report",
    "compared",
    "names_of",
    "read_run",
    "render",
    "render_comparison",
    "run_files",
    "write",
    "write_atomically",
    "write_run",
]

"""A page about a fit."""

from lightning_commopt.callbacks.report.content import ReportContent
from lightning_commopt.callbacks.report.page import check_can_report, render, write
from lightning_commopt.callbacks.report.recording import ReportRecording

__all__ = ["ReportContent", "ReportRecording", "check_can_report", "render", "write"]

"""A run or a comparison as one HTML file that opens offline, and its figures for papers."""

from troll.lab.report.page import write_report

__all__ = ["write_report"]

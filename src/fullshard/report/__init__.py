"""A self-contained HTML page about a run, made from the files of its output_dir."""

from fullshard.report.page import write_report as write_report

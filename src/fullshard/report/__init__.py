"""One page that tells what a run did: made from the files of its output_dir, whole in itself."""

from fullshard.report.page import write_report as write_report

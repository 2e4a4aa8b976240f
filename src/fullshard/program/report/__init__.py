"""Self-contained HTML pages about a run, from the files in its output_dir, and about a plan."""

from fullshard.program.report.page import write_report as write_report
from fullshard.program.report.plan_page import write_plan as write_plan

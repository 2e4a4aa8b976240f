"""`fullshard init`: inspects a table and this machine, and writes a first run file."""

from fullshard.program.starter.inspection import Look as Look, look_at as look_at
from fullshard.program.starter.run_file import (
    NEW_MODEL as NEW_MODEL,
    Choice as Choice,
    Machine as Machine,
    Rows as Rows,
    read_rows as read_rows,
    run_file_text as run_file_text,
    this_machine as this_machine,
)

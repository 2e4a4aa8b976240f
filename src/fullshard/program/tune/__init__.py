"""`fullshard tune`: measures ways, recomputed blocks and rows of a micro-batch on this machine, and chooses.

Files, in reading order: ``candidates`` (what is tried), ``measure`` (one candidate's steps on all ranks), ``halving``
(which ones, and for how long), ``journal`` (what is kept when ranks start again), ``table`` (what is printed),
``run_file`` (the choice in the user's file), ``tune`` (all of it).
"""

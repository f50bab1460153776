# SPDX-License-Identifier: Apache-2.0
"""`python demos/benchmark`: what is timed, against what, and how it is told.

suites.py   the table of suites: shapes, our function, rivals, check, bytes
cases.py    the shapes; inputs.py: logits for them
ours.py     our functions; rivals.py: all others, and the floors; devices.py: which device, and a kernel that only reads
check.py    whether an answer is right; only right answers are timed
timing.py   samples of all ways in turns: replays of CUDA graphs, or rounds of calls on a CPU
runner.py   all of it, case by case
results.py  measurements as CSV; report.py: as tables, and against an older run; plot.py: as a figure
publish.py  the figures that documents show
cli.py      the commands
"""

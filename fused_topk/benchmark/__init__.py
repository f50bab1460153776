# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_topk bench`: what is timed, how, against what, and how it is told.

suites.py   which shapes, and the targets they have: data
inputs.py   logits of each distribution, and how many of them a cold cache takes
check.py    no time without a right answer
timing.py   CUDA-graph replays, interleaved CPU rounds, host time, their statistics
peers.py    what else computes the same
runner.py   all of it, shape by shape
report.py   tables and JSON; compare.py: against an older JSON; plot.py: a figure
"""

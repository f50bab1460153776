# SPDX-License-Identifier: Apache-2.0
"""`python demos/benchmark`: what is timed, how, against what, and how it is told.

cli.py       the commands; command_options.py: the text of their options
devices.py   where, and what only reads the logits there: the floor
suites.py    which shapes, and the targets they have: data
inputs.py    logits of each distribution, and how many of them a cold cache takes
check.py     no time without a right answer
timing.py    CUDA-graph replays, interleaved CPU rounds, host time, their statistics
peers.py     what else computes the same
runner.py    all of it, shape by shape; linear.py: LM heads; distributed.py: several processes; calls.py: short calls on the CPU
report.py    tables and JSON; compare.py: against an older JSON; plot.py: a figure
sweep.py     every choice of kernel (choices.py); counters.py: what the hardware counts
publish.py   the documents, and views of what the demos write; published.py: views of a run, and how a document is filled
"""

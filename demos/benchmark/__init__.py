# SPDX-License-Identifier: Apache-2.0
"""`python demos/benchmark`: what is timed, how, against what, and how it is told.

cli.py       the commands; command_options.py: the text of their options
devices.py   the device, and the floor there: a function that only reads the logits
suites.py    the shapes that are timed and their targets, as tables
inputs.py    logits of each distribution, and how many inputs take turns so that each comes from memory
check.py     whether an answer is right; only right answers are timed
timing.py    CUDA-graph replays, interleaved CPU rounds, host time, their statistics
peers.py     what else computes the same
runner.py    all of it, shape by shape; linear.py: LM heads; distributed.py: several processes; calls.py: short calls on the CPU
report.py    tables and JSON; compare.py: against an older JSON; plot.py: a figure
sweep.py     every choice of kernel (choices.py); counters.py: what the hardware counts
publish.py   the documents, and views of what the demos write; published.py: views of a run, and how a document is filled
"""

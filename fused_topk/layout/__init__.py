# SPDX-License-Identifier: Apache-2.0
"""How rows are laid over a GPU: which kernel, which grid, which argument. Pure functions that need no GPU."""

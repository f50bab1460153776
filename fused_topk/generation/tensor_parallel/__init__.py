# SPDX-License-Identifier: Apache-2.0
"""Models whose LM head the processes of a group have between them, a part of the columns each."""

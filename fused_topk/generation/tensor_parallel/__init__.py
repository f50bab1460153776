# SPDX-License-Identifier: Apache-2.0
"""Models that the processes of a group have between them: of the LM head each has some columns."""

# SPDX-License-Identifier: Apache-2.0
"""Models that are spread over the processes of a group: each process has some columns of the LM head."""

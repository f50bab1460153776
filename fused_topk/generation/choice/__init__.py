# SPDX-License-Identifier: Apache-2.0
"""How tokens are chosen from a step's logits, what changes their scores, and what warpers leave of them."""

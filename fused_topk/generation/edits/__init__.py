# SPDX-License-Identifier: Apache-2.0
"""What transformers' logits processors do, as edits that name the few tokens they touch."""

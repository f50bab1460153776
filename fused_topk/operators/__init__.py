# SPDX-License-Identifier: Apache-2.0
"""What torch sees: the operators of `torch.ops.fused_topk`, their gradients, and how transforms map over them."""

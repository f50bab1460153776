# SPDX-License-Identifier: Apache-2.0
"""How a user asks vLLM to choose its tokens with this package."""

from __future__ import annotations

from ... import env
from . import patches


def enable() -> bool:
    """vLLM chooses its tokens with this package from now on, in this process and in the processes that this one starts.

        fused_topk.integrations.vllm.enable()
        llm = vllm.LLM(model)

    It sets `FUSED_TOPK_VLLM=1`, which the plugin that vLLM loads in each of its processes reads. Call it before the engine is made.
    In a process that runs its model itself it also serves an engine that was made before.

    Returns:
        bool: False, with one warning, if the installed vLLM is not one that was tested. vLLM then runs as it is.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    is_known = patches.install()
    env.set_choose_in_vllm(is_known)
    return is_known


def disable() -> None:
    """vLLM chooses its tokens by itself from now on, in this process and in the processes that this one starts."""
    env.set_choose_in_vllm(False)
    patches.uninstall()


def plugin() -> None:
    """What vLLM calls in each of its processes (the entry point `vllm.general_plugins`): :func:`enable` if `FUSED_TOPK_VLLM=1`."""
    if env.choose_in_vllm():
        patches.install()

# SPDX-License-Identifier: Apache-2.0
"""How a user asks vLLM to choose its tokens with this package."""

from __future__ import annotations

from ... import env
from . import patches


def enable() -> bool:
    """vLLM chooses its tokens with this package, in this process and in those that it starts from now on.

        fused_topk.integrations.vllm.enable()
        llm = vllm.LLM(model)

    It sets `FUSED_TOPK_VLLM=1`, which says the same to the plugin that vLLM loads in each of its processes. Call it before the
    engine is made; in a process that runs its model itself it also serves an engine that there is.

    Returns:
        bool: False, with one warning, if the installed vLLM is not one that was tested. It then runs as it is.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    is_known = patches.install()
    env.set_choose_in_vllm(is_known)
    return is_known


def disable() -> None:
    """vLLM chooses its tokens as it does by itself, in this process and in those that it starts from now on."""
    env.set_choose_in_vllm(False)
    patches.uninstall()


def plugin() -> None:
    """What vLLM calls in each of its processes (the entry point `vllm.general_plugins`): :func:`enable` if `FUSED_TOPK_VLLM=1`."""
    if env.choose_in_vllm():
        patches.install()

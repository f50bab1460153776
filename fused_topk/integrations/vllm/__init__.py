# SPDX-License-Identifier: Apache-2.0
"""vLLM chooses its tokens with fused_topk. The only part of the package that knows vLLM::

    FUSED_TOPK_VLLM=1 vllm serve MODEL           # every process of vLLM loads the plugin
    fused_topk.integrations.vllm.enable()        # or this, in a script of one's own, before it makes the engine
    stats()                                      # how many steps were fused, and why others were not

The modules, of which none imports one above it:

    entrance       how a user asks, and the plugin that vLLM calls in each of its processes
    patches        the functions of vLLM that are replaced
    compatibility  whether these functions are those that were tested
    choice         draws tokens and reports log-probabilities, in the place of the sampler
    prompts        log-probabilities of prompts
    requests       what the requests of a batch ask for, as arguments of `fused_topk.sample`
    statistics     what was counted

Only patches and compatibility import vLLM, and not before it is asked for.
"""

from .entrance import disable, enable, plugin
from .statistics import Stats, stats

__all__ = ["Stats", "disable", "enable", "plugin", "stats"]

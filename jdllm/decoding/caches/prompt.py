"""The prompt cache of the LLaDA inference guide."""

from jdllm.decoding.caches.prefix import Prefix

# In the first step of a request, which is the only one that refreshes, the prompt is left of the block.
POLICY = Prefix("prompt", "the prompt, evaluated alone and once (LLaDA inference guide)", once=True)

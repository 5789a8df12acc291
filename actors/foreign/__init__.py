"""Others' engines as workers behind our host: vLLM's AsyncLLM.

Knows commands, frames and events, and the calls of the engine; nothing of gateways or Ray.
"""

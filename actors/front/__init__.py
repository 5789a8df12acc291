"""Mallee's router in front of others' engines: pods of vLLM, SGLang, or any server that speaks OpenAI's API.

`pods/` knows backends, their metrics and KV events; `prompts` reads requests as tokens; `front` puts these
and the router together; `picker/` answers an Envoy, `proxy/` forwards requests itself. Must not know Ray,
torch, Mallee's own engines or their transport.
"""

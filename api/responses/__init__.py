"""OpenAI's Responses: conversations that the server remembers; each goes on from the last one's capsule.

Knows request bodies, conversations and plans. Must not know routers, workers or how capsules are kept.
"""

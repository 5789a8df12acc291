"""Everything that is asked of capsules over HTTP.

Must not read prompts itself: `jobs` does.
"""

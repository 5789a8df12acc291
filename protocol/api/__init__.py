"""Bodies of the HTTP API, each declared once.

From these types come parsing with its refusals, answers, the OpenAPI document, the tables of docs/api, and
the SDK's types.
"""

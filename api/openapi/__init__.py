"""The API's own description: its operations, the shapes of their bodies, the document and a page of them.

Routes are made from the same table. Must not know the handlers, nor any state.
"""

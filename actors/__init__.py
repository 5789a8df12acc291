"""The processes of the service: Ray Serve app, hosted engines, mocked fleets, and the picker.

Here the parts are wired (`build.py`). Decisions live in `router`, token work in `worker`.
"""

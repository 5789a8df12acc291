"""Live mocked fleets: engines on one event loop, and a whole stack around them without Ray.

The engines are `mocker.engine`; what serves them is what serves real ones.
"""

"""The mocker: speed of replays (`python -m bench.mocker`), a live mocked fleet, and fidelity."""

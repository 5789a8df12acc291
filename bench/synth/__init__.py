"""The synthesizer: speed and memory (`python -m bench.synth`), and its gates on recorded traces (`gates`)."""

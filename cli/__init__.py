"""The command line: what each command reads, refuses and prints.

Knows every other package, and imports the heavy ones inside commands. Nothing imports it but tests.
"""

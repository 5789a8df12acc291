"""The command line: options, output and exit status of each command.

Knows every other package, and imports the heavy ones inside commands. Only tests import it.
"""

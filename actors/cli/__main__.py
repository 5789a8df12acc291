"""`python -m mallee.actors.cli`."""

from mallee.actors.cli.main import main

main()

"""`python -m mallee.cli`."""

from mallee.cli.main import main

main()

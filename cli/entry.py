"""The program `mallee`, also where the SDK alone is installed."""

import sys


def main() -> None:
    """Run the command; without the packages of commands say how to get them, with status 1."""
    try:
        from mallee.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mallee"):
            raise
        sys.exit(
            f"mallee: commands need {error.name}, which the SDK alone does not bring: pip install"
            " 'mallee[cli]', or 'mallee[serve]' to serve models"
        )
    run()

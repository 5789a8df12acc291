"""The program `mallee`: its commands, each from a module of its own, and the exit status of errors."""

import errno
import os
import sys
from typing import Annotated

import typer

from mallee import __version__
from mallee.cli import check, keys, metrics, sessions, settings, tree
from mallee.cli.demo import command as demo
from mallee.cli.doctor import machine as doctor
from mallee.cli.doctor import model as doctor_model
from mallee.cli.mocker import replay, sweep
from mallee.cli.options import JsonOption, print_error, print_json
from mallee.cli.profile import command as profile
from mallee.cli.remote import capsules, chat, explain, remote_sessions, top, workers
from mallee.cli.serving import mock, picker, serve, up
from mallee.cli.synth import group
from mallee.protocol.errors import MalleeError

cli = typer.Typer(
    name="mallee",
    help="Serves LLM requests that branch: forks land where their prefix already lives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _module in (
    *(serve, up, workers, keys, mock, demo, settings, metrics, check, tree, doctor, doctor_model),
    *(profile, replay, sweep, sessions, remote_sessions, capsules, chat, explain, top, picker),
    group,
):
    _module.add_to(cli)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"mallee {__version__}\n")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serves LLM requests that branch: forks land where their prefix already lives."""


@cli.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version.

    Example: mallee version --json
    """
    if as_json:
        print_json({"version": __version__})
    else:
        _print_version(True)


def main() -> None:
    """Entry point. Mallee's own errors are one line and status 1, without a traceback."""
    try:
        cli()
    except MalleeError as error:
        print_error(str(error))
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drops the rest of stdout's buffer
        if error.errno != errno.EPIPE:  # a closed pipe (head) is no error
            print_error(f"output can't be written ({error.strerror})")
        sys.exit(1)
    except MemoryError:
        print_error("out of memory: give fewer engines or less KV memory, or replay fewer requests")
        sys.exit(1)
    except KeyboardInterrupt:  # during start-up, after it was undone
        sys.exit(130)

"""The program `mallee`: its commands, each from a module of its own, and the exit status of errors."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from mallee import __version__
from mallee.cli import keys
from mallee.cli.check import check
from mallee.cli.demo.command import demo
from mallee.cli.doctor.machine import doctor
from mallee.cli.doctor.model import doctor_model
from mallee.cli.metrics import metrics
from mallee.cli.mocker.replay import replay
from mallee.cli.mocker.sweep import sweep
from mallee.cli.options import JsonOption
from mallee.cli.output import answer, print_error
from mallee.cli.profile.command import profile
from mallee.cli.remote import capsules, remote_sessions, workers
from mallee.cli.remote.chat import chat
from mallee.cli.remote.explain import explain
from mallee.cli.remote.top import top
from mallee.cli.serving.mock import mock
from mallee.cli.serving.picker import picker
from mallee.cli.serving.router import router
from mallee.cli.serving.serve import serve
from mallee.cli.serving.up import up
from mallee.cli.sessions import export_episode, replay_session
from mallee.cli.settings import settings
from mallee.cli.synth import group as synth
from mallee.cli.tree import tree
from mallee.protocol.errors import MalleeError

cli = typer.Typer(
    name="mallee",
    help="Serves LLM requests that branch: forks land where their prefix already lives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    *(serve, up, mock, demo, settings, metrics, check, tree, doctor, doctor_model, profile, replay),
    *(sweep, replay_session, export_episode, chat, explain, top, picker, router),
)
for _command in _COMMANDS:
    cli.command()(_command)
for _module in (workers, keys, remote_sessions, capsules, synth):
    cli.add_typer(_module.group)
cli.add_typer(synth.traces)


def _print_version(wanted: bool) -> None:
    if wanted:
        version(as_json=False)
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
    answer({"version": __version__}, f"mallee {__version__}", as_json=as_json)


def main() -> None:
    """Entry point. Mallee's own errors are one line and status 1, without a traceback."""
    # Nothing here or in a child goes to loopback by a proxy of the environment.
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = f"{spared},localhost,127.0.0.1,::1".lstrip(",")
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

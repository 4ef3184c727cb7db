"""The command ``kvtier``: the commands of installed distributions. It needs neither torch nor an engine."""

from __future__ import annotations

import typer

from kvtier._cli import extensions, run

app = typer.Typer(
    name="kvtier",
    cls=extensions.Commands,
    help="Tools for operators of kvtier, which keeps the KV cache of an LLM engine in host memory and larger "
    "tiers.",
    epilog=run.STATUS,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _common(_version: run.VersionFlag = False) -> None:
    pass


def main() -> None:
    run.run(app)

"""The command ``kvtier``: operators' tools and plug-ins' commands. It needs neither torch nor an engine."""

from __future__ import annotations

import typer

from kvtier._cli import doctor, explain, extensions, hint, run, tiers, top
from kvtier._cli.root import compare, du, gc, ls, stat, verify

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

app.command("top")(top.command)
app.command("tiers")(tiers.command)
app.command("doctor")(doctor.command)
app.command("explain")(explain.command)
app.command("hint")(hint.command)
app.command("schema")(tiers.schema_command)
app.command("ls")(ls.command)
app.command("compare")(compare.command)
app.command("stat")(stat.command)
app.command("verify")(verify.command)
app.command("gc")(gc.command)
app.command("du")(du.command)


@app.callback()
def _common(_version: run.VersionFlag = False) -> None:
    pass


def main() -> None:
    run.run(app)

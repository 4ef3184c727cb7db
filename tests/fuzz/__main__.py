"""Fuzz one parser, guided by coverage: ``python -m tests.fuzz PARSER [LIBFUZZER OPTIONS]``."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["kvtier"]):
    from tests.fuzz.parsers import PARSERS

logging.disable()  # prints each rejected input
name = sys.argv.pop(1)
atheris.Setup(sys.argv, PARSERS[name])
atheris.Fuzz()

"""``python -m tests.gpu``: see ``report``."""

from tests.gpu.report import main

main()

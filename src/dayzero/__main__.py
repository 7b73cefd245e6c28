"""`python -m dayzero`: the same as the `dayzero` command."""

from dayzero.cli import main

main()

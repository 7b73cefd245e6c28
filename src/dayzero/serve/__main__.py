"""`python -m dayzero.serve`: a server for a parent program (see launch.py). People use `dayzero serve`.

The first line of standard input is a ServerSpec as JSON; when the input ends, the parent is gone and so is this process. One
JSON object on standard output says that the server is ready; errors follow the contract of the command line.
"""

import json
import os
import sys

from dayzero.core.errors import DayZeroError
from dayzero.core.records import from_dict
from dayzero.serve.processes import at_end_of_file, end_own_group
from dayzero.serve.server import run_server
from dayzero.serve.spec import ServerSpec


def main() -> int:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)  # unbuffered: what follows is watched below
        if not piece:
            return 2
        line += piece
    at_end_of_file(0, end_own_group)
    try:
        spec = from_dict(ServerSpec, json.loads(line), source="standard input")
        return run_server(spec, on_ready=lambda ready: print(json.dumps(ready), flush=True))
    except DayZeroError as error:
        print(error, file=sys.stderr, flush=True)
        print(json.dumps(error.as_dict()), flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())

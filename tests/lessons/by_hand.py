"""What the scripts of the lessons share when somebody starts them by hand. To be imported first: it looks at Python."""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer

SCRIPT = "This project" if __name__ == "__main__" else Path(sys.argv[0]).name  # the Makefile runs this file alone

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(SCRIPT + " needs Python 3.11 or newer, this is " + sys.version.split()[0])


def parser_for(about: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is the script's own docstring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def serve(port: int, build: Callable[[int], TCPServer], ready: str) -> int:
    """Serves until Ctrl-C; says `ready`, with the port for PORT, as soon as it listens. The exit status.

    A port that cannot be had is one sentence, which says how to go on.
    """
    try:
        with build(port) as server, suppress(KeyboardInterrupt):
            print(ready.replace("PORT", str(server.server_address[1])), file=sys.stderr, flush=True)
            server.serve_forever()
    except (OSError, OverflowError) as problem:
        print(f"{SCRIPT}: cannot listen on port {port}: {problem}. Give another port as the last argument.",
              file=sys.stderr)
        return 1
    return 0

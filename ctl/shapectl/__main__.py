# SPDX-License-Identifier: Apache-2.0
"""The program `shapectl`, and `python -m shapectl`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:  # Ctrl-C in the tenth of a second in which Python reads the modules
        from shapectl import cli
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\nStopped by Ctrl-C.\n")
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

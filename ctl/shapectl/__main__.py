# SPDX-License-Identifier: Apache-2.0
"""`python -m shapectl`."""

from __future__ import annotations

import sys

from shapectl.cli import main

if __name__ == "__main__":
    sys.exit(main())

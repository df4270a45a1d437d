# SPDX-License-Identifier: Apache-2.0
"""shapectl's command line. Importing it loads neither the engine nor rich."""

from __future__ import annotations

__version__ = "0.1.0"

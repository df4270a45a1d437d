# SPDX-License-Identifier: Apache-2.0
"""One file per command; cli.py names them and loads each when it is asked for."""

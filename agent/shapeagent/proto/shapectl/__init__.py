# SPDX-License-Identifier: Apache-2.0
"""The package `shapectl` of the API, not the command line."""

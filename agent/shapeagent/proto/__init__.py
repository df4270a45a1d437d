# SPDX-License-Identifier: Apache-2.0
"""The API `shapectl.v1`: what it says (`.proto`) and what is generated from that."""

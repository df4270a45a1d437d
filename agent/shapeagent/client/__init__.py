# SPDX-License-Identifier: Apache-2.0
"""Speaks to an agent: channel, credentials, retries, and an engine that lives elsewhere."""

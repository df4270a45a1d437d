# SPDX-License-Identifier: Apache-2.0
"""What the agent tells the world: events and Prometheus metrics."""

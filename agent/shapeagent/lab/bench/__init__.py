# SPDX-License-Identifier: Apache-2.0
"""The benchmark: scenarios of an inference host, over a modelled wire, under many queues."""

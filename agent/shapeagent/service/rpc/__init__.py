# SPDX-License-Identifier: Apache-2.0
"""The gRPC servers of the agent: who may call what, and what a call does."""

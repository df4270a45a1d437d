# SPDX-License-Identifier: Apache-2.0
"""Who calls over TCP, and what was done in whose name: TLS, SPIFFE ids, the audit log.

Nothing here is imported by commands that ask no agent: cryptography alone takes
10 MB and 30 ms.
"""
